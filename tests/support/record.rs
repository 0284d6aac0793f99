//! What the nodes of a queue have written down themselves, and what it says of the promises. Redis' own counters have no say in it.

#![allow(dead_code, reason = "each test file uses its part")]

use std::{collections::HashMap, fs, path::Path, time::Duration};

use rustix::time::{ClockId, clock_gettime};

/// Time on the clock that all processes of a machine share.
pub(crate) fn now() -> Duration {
    let time = clock_gettime(ClockId::Monotonic);
    Duration::new(time.tv_sec.unsigned_abs(), u32::try_from(time.tv_nsec).expect("nanoseconds of a second"))
}

/// What happened to a node, which its own record cannot tell.
#[derive(Clone, Copy, Debug)]
pub(crate) enum Lapse {
    /// It was killed, and holds nothing since.
    Killed(Duration),
    /// It could not renew its lease for so long; it did nothing (stopped), or nobody heard of it (cut off).
    Silent { from: Duration, to: Duration, stopped: bool },
}

/// A request of a node.
#[derive(Clone, Debug)]
pub(crate) struct Request {
    pub(crate) node: usize,
    pub(crate) number: u64,
    pub(crate) flow: u64,
    pub(crate) asked: Duration,
    pub(crate) units: u64,
    pub(crate) taken: Option<Duration>,
    pub(crate) given: Option<Duration>,
    pub(crate) revoked: bool,
    /// Why there was no permit.
    pub(crate) refused: Option<(Duration, String)>,
}

/// The records of all nodes of a queue.
#[derive(Clone, Debug, Default)]
pub(crate) struct Records {
    pub(crate) requests: Vec<Request>,
    lapses: Vec<(usize, Lapse)>,
    lease: Duration,
    aborts: bool,
}

/// The most units that were held at once, and when.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, PartialOrd, Ord)]
pub(crate) struct Peak {
    pub(crate) units: u64,
    pub(crate) at: Duration,
}

/// Two clock jumps of the server's may shorten a lease by so much, so a node counts its own as shorter.
const JUMPS: Duration = Duration::from_secs(3);
/// A lease that was renewed so long ago was the last that a silent node renewed.
const HEARTBEAT: Duration = Duration::from_millis(1_100);
/// A process that has just been woken has to come to run.
const WAKING: Duration = Duration::from_millis(250);

impl Records {
    pub(crate) fn new(lease: Duration, aborts: bool) -> Self {
        Self { lease, aborts, ..Self::default() }
    }

    pub(crate) fn lapse(&mut self, node: usize, lapse: Lapse) {
        self.lapses.push((node, lapse));
    }

    /// Adds what a node has written. What its last line lacks was cut off by its end.
    pub(crate) fn read(&mut self, node: usize, path: &Path) {
        let text = fs::read_to_string(path).unwrap_or_default();
        let mut numbers = HashMap::new();
        for line in text.lines() {
            let fields: Vec<&str> = line.split(' ').collect();
            let &[at, what, number, ref details @ ..] = &fields[..] else { panic!("{line:?}") };
            let parsed = |text: &str| text.parse::<u64>().unwrap_or_else(|_| panic!("{line:?}"));
            let (at, number) = (Duration::from_nanos(parsed(at)), parsed(number));
            if what == "ask" {
                let request = Request {
                    node,
                    number,
                    flow: parsed(details[0]),
                    asked: at,
                    units: parsed(details[1]),
                    taken: None,
                    given: None,
                    revoked: false,
                    refused: None,
                };
                assert!(numbers.insert(number, self.requests.len()).is_none(), "asked twice: {line}");
                self.requests.push(request);
                continue;
            }
            let request = &mut self.requests[*numbers.get(&number).expect("asked before")];
            let decided = request.taken.is_some() || request.refused.is_some();
            match what {
                "take" => {
                    assert!(!decided, "P5, two outcomes: {line}, {request:?}");
                    (request.taken, request.units) = (Some(at), parsed(details[0]));
                }
                "give" => {
                    assert!(request.taken.is_some() && request.given.is_none(), "{line}, {request:?}");
                    (request.given, request.revoked) = (Some(at), details[0] == "revoked");
                }
                "end" => {
                    assert!(!decided, "P5, two outcomes: {line}, {request:?}");
                    request.refused = Some((at, details[0].to_owned()));
                }
                _ => panic!("{line:?}"),
            }
        }
    }

    fn lapses(&self, node: usize) -> impl Iterator<Item = Lapse> {
        self.lapses.iter().filter(move |(of, _)| *of == node).map(|&(_, lapse)| lapse)
    }

    fn killed(&self, node: usize) -> Option<Duration> {
        self.lapses(node).find_map(|lapse| match lapse {
            Lapse::Killed(at) => Some(at),
            Lapse::Silent { .. } => None,
        })
    }

    /// The times in which a permit counts. The exceptions are those of promise P1:
    /// with `LeaseLost::Continue`, what a node held when its lease ended; with `Abort` a stopped process, which runs nothing, until it has
    /// had the time to give up what it held.
    fn counts(&self, request: &Request) -> Vec<(Duration, Duration)> {
        let Some(from) = request.taken else { return vec![] };
        let end = request.given.or(self.killed(request.node)).unwrap_or(Duration::MAX);
        let mut spans = vec![(from, end)];
        for lapse in self.lapses(request.node) {
            let Lapse::Silent { from: silent, to, stopped } = lapse else { continue };
            if from > silent || end < silent {
                continue;
            }
            let (lost, again) = if self.aborts {
                // Cut off it gives up by itself, in time.
                (silent + self.lease - JUMPS - HEARTBEAT, if stopped { to + WAKING } else { silent })
            } else {
                (silent + self.lease - HEARTBEAT, Duration::MAX)
            };
            if lost >= to || again <= lost {
                continue;
            }
            spans = spans
                .into_iter()
                .flat_map(|(from, end)| [(from, end.min(lost)), (from.max(again), end)])
                .filter(|(from, end)| from < end)
                .collect();
        }
        spans
    }

    /// The most units that all nodes together held at once, the exceptions of promise P1 (c) left out.
    pub(crate) fn peak(&self) -> Peak {
        self.peak_within(Duration::ZERO, Duration::MAX)
    }

    pub(crate) fn peak_within(&self, from: Duration, to: Duration) -> Peak {
        peak(self.requests.iter().flat_map(|request| {
            let within = move |(begin, end): (Duration, Duration)| (begin.max(from), end.min(to));
            self.counts(request).into_iter().map(within).map(|(begin, end)| (begin, end, request.units))
        }))
    }

    /// The end of the last time in a span in which more than `units` were held.
    pub(crate) fn last_above(&self, units: u64, from: Duration, to: Duration) -> Option<Duration> {
        let mut last = None;
        let mut now = 0_u64;
        let spans =
            self.requests.iter().filter_map(|r| Some((r.taken?.max(from), r.given?.min(to), r.units)));
        for (at, change) in changes(spans) {
            if now > units {
                last = Some(at);
            }
            now = now.checked_add_signed(change).expect("taken before given");
        }
        last
    }

    /// Units taken in a span of time.
    pub(crate) fn taken_within(&self, from: Duration, to: Duration) -> u64 {
        let within = |request: &&Request| request.taken.is_some_and(|at| at >= from && at <= to);
        self.requests.iter().filter(within).map(|request| request.units).sum()
    }

    /// The first permit of any node taken at `from` or later.
    pub(crate) fn first_taken(&self, from: Duration) -> Option<Duration> {
        self.requests.iter().filter_map(|request| request.taken).filter(|&at| at >= from).min()
    }

    pub(crate) fn granted(&self) -> usize {
        self.requests.iter().filter(|request| request.taken.is_some()).count()
    }

    /// Promises P5 and P6 as the nodes see them: of each node that was not killed, each request has ended, and each permit.
    pub(crate) fn check_ends(&self) {
        for request in self.requests.iter().filter(|request| self.killed(request.node).is_none()) {
            assert!(request.taken.is_some() || request.refused.is_some(), "P5, never answered: {request:?}");
            assert!(request.taken.is_none() || request.given.is_some(), "P6, never given back: {request:?}");
        }
    }

    /// No request but those of killed nodes ended without a permit.
    pub(crate) fn check_all_granted(&self) {
        self.check_ends();
        if let Some(lost) = self.requests.iter().find(|request| request.refused.is_some()) {
            panic!("not granted: {lost:?}");
        }
    }

    /// Promise P2: within a flow, whoever asked first was granted first. In one node the record has the very order of arrival; between
    /// nodes it has it where one asked `margin` earlier than the other, for as long may a call take to arrive. A grant may be told so
    /// much `late` that one after it is heard first.
    pub(crate) fn check_order(&self, margin: Duration, late: Duration) {
        let mut compared = 0_u64;
        let mut flows: HashMap<u64, Vec<&Request>> = HashMap::new();
        for request in self.requests.iter().filter(|request| request.taken.is_some()) {
            flows.entry(request.flow).or_default().push(request);
        }
        for requests in flows.values_mut() {
            requests.sort_unstable_by_key(|request| request.taken);
            for (index, later) in requests.iter().enumerate() {
                let taken = later.taken.expect("only those");
                // All that were taken before this one, most recent last: did any ask clearly later?
                for earlier in &requests[index.saturating_sub(500)..index] {
                    let before = earlier.taken.expect("only those");
                    let passed = if earlier.node == later.node {
                        earlier.number > later.number
                    } else {
                        earlier.asked > later.asked + margin
                    };
                    compared += 1;
                    assert!(!passed || before + late >= taken, "P2: {earlier:?} passed {later:?}");
                }
            }
        }
        assert!(compared > 0, "nothing to compare");
    }
}

fn changes(spans: impl Iterator<Item = (Duration, Duration, u64)>) -> Vec<(Duration, i64)> {
    let units = |units: u64| i64::try_from(units).expect("few");
    let spans = spans.filter(|(from, to, _)| from < to);
    let mut changes: Vec<(Duration, i64)> =
        spans.flat_map(|(from, to, n)| [(from, units(n)), (to, -units(n))]).collect();
    // At one instant what is given goes first.
    changes.sort_unstable();
    changes
}

fn peak(spans: impl Iterator<Item = (Duration, Duration, u64)>) -> Peak {
    let (mut now, mut peak) = (0_u64, Peak::default());
    for (at, change) in changes(spans) {
        now = now.checked_add_signed(change).expect("taken before given");
        if now > peak.units {
            peak = Peak { units: now, at };
        }
    }
    peak
}
