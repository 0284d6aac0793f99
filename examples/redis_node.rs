//! One node of a queue that many processes share through Redis: it makes requests, holds what they are granted for a while, and
//! prints what it sees.
//!
//! ```text
//! redis-server &
//! cargo run --features redis --example redis_node -- --requesters 20 &
//! cargo run --features redis --example redis_node -- --requesters 20
//! ```
//!
//! However many run, their `holds` add up to no more than the capacity of 5. Kill one with `kill -9`: the others have its units a lease
//! later. End one with Ctrl-C, and they have them at once. `--help` lists the flags. Lines on stdin are commands: `ask N` makes N more
//! requests, whose permits are held until `release N` ends as many, the oldest first; `stop` ends the load.

#![expect(clippy::print_stdout, reason = "what it prints is for whoever started it")]

use std::{
    error::Error,
    fmt::Display,
    fs::{File, OpenOptions},
    io::{BufRead, Write},
    num::NonZeroU32,
    str::FromStr,
    sync::{
        Arc,
        atomic::{AtomicBool, AtomicU64, Ordering},
    },
    time::Duration,
};

use rustix::time::{ClockId, clock_gettime};
use tokio::{
    select,
    signal::unix::{SignalKind, signal},
    sync::{Semaphore, mpsc},
    time::{MissedTickBehavior, interval, sleep},
};
use tower_fair_queue::{Ask, FairQueue, FairQueueConfig, LeaseLost, Limit, Outage, RedisConfig};

const HELP: &str = "\
--redis URL          the server (redis://127.0.0.1:6379)
--sentinel NAME,URL… instead of it: a service and the Sentinels to ask
--queue NAME         (demo)
--capacity UNITS     of all nodes together (5)
--lease SECONDS      (10)
--outage POLICY      wait, reject, local, admit, or a number: a local share of so many units (local)
--lease-lost POLICY  continue, abort (continue)
--ramp SECONDS       over how long the capacity opens again (1)
--max-wait SECONDS   (20)
--max-waiting N      of all nodes together (1000)
--requesters N       so many requests at once, each followed by another (0)
--rate N             so many more a second, whatever becomes of them (0)
--hold MS..MS        how long a permit is held (20..200)
--flows N            requests are of one of so many flows (3)
--cost UNITS         a request costs one unit up to so many (1)
--grace SECONDS      how long permits may last when it is asked to end (5)
--seed N             of what is left to chance (1)
--record FILE        appends what happened: nanoseconds of CLOCK_MONOTONIC, ask, take, give or end, the request's number, details";

struct Options {
    redis: String,
    sentinel: Option<String>,
    queue: String,
    capacity: u32,
    lease: u64,
    outage: Outage,
    lease_lost: LeaseLost,
    ramp: f64,
    max_wait: f64,
    max_waiting: u32,
    requesters: u32,
    rate: u32,
    hold: (u64, u64),
    flows: u64,
    cost: u64,
    grace: u64,
    seed: u64,
    record: Option<String>,
}

impl Options {
    fn read(mut args: impl Iterator<Item = String>) -> Result<Self, String> {
        let mut options = Self {
            redis: "redis://127.0.0.1:6379".to_owned(),
            sentinel: None,
            queue: "demo".to_owned(),
            capacity: 5,
            lease: 10,
            outage: Outage::Local,
            lease_lost: LeaseLost::Continue,
            ramp: 1.0,
            max_wait: 20.0,
            max_waiting: 1_000,
            requesters: 0,
            rate: 0,
            hold: (20, 200),
            flows: 3,
            cost: 1,
            grace: 5,
            seed: 1,
            record: None,
        };
        while let Some(flag) = args.next() {
            let value = args.next().ok_or_else(|| format!("{flag} takes a value; the flags are\n{HELP}"))?;
            match flag.as_str() {
                "--redis" => options.redis = value,
                "--sentinel" => options.sentinel = Some(value),
                "--queue" => options.queue = value,
                "--capacity" => options.capacity = number(&flag, &value)?,
                "--lease" => options.lease = number(&flag, &value)?,
                "--outage" => {
                    options.outage = match value.as_str() {
                        "wait" => Outage::Wait,
                        "reject" => Outage::Reject,
                        "local" => Outage::Local,
                        "admit" => Outage::Admit(Limit::Unlimited),
                        share => Outage::LocalShare(number(&flag, share)?),
                    }
                }
                "--lease-lost" => {
                    options.lease_lost = match value.as_str() {
                        "continue" => LeaseLost::Continue,
                        "abort" => LeaseLost::Abort,
                        _ => return Err(format!("{flag} is continue or abort, not {value:?}")),
                    }
                }
                "--ramp" => options.ramp = number(&flag, &value)?,
                "--max-wait" => options.max_wait = number(&flag, &value)?,
                "--max-waiting" => options.max_waiting = number(&flag, &value)?,
                "--requesters" => options.requesters = number(&flag, &value)?,
                "--rate" => options.rate = number(&flag, &value)?,
                "--hold" => {
                    let (least, most) =
                        value.split_once("..").ok_or_else(|| format!("{flag} is a range such as 20..200"))?;
                    options.hold = (number(&flag, least)?, number(&flag, most)?);
                }
                "--flows" => options.flows = number(&flag, &value)?,
                "--cost" => options.cost = number(&flag, &value)?,
                "--grace" => options.grace = number(&flag, &value)?,
                "--seed" => options.seed = number(&flag, &value)?,
                "--record" => options.record = Some(value),
                _ => return Err(format!("there is no {flag}; the flags are\n{HELP}")),
            }
        }
        Ok(options)
    }

    fn config(&self) -> Result<FairQueueConfig, Box<dyn Error>> {
        let redis = match &self.sentinel {
            None => RedisConfig::new(&self.redis),
            Some(list) => {
                let mut parts = list.split(',');
                RedisConfig::sentinel(parts.next().unwrap_or_default(), parts)
            }
        };
        let redis = redis
            .lease(Duration::from_secs(self.lease))
            .outage(self.outage)
            .lease_lost(self.lease_lost)
            .ramp(Duration::try_from_secs_f64(self.ramp)?);
        let config = FairQueueConfig::builder(&self.queue)
            .capacity(self.capacity)
            .max_wait(Duration::try_from_secs_f64(self.max_wait)?)
            .max_waiting(self.max_waiting)
            .redis(redis);
        Ok(config.build()?)
    }
}

fn number<N: FromStr<Err: Display>>(flag: &str, value: &str) -> Result<N, String> {
    value.parse().map_err(|error| format!("{flag}: {value:?}: {error}"))
}

struct Node {
    queue: FairQueue,
    options: Options,
    record: Option<File>,
    /// The number of the last request.
    last: AtomicU64,
    chance: AtomicU64,
    stopped: AtomicBool,
    /// What the permits wait for that are held until they are asked for.
    releases: Semaphore,
}

impl Node {
    /// One line by one write, and into the file before what it tells goes on: a process that is killed has told all.
    fn record(&self, what: &str, number: u64, details: impl Display) {
        let Some(mut file) = self.record.as_ref() else { return };
        let now = clock_gettime(ClockId::Monotonic);
        let line = format!("{}{:09} {what} {number} {details}\n", now.tv_sec, now.tv_nsec);
        if let Err(error) = file.write_all(line.as_bytes()) {
            eprintln!("--record: {error}");
        }
    }

    /// A number below `bound`, by splitmix64.
    fn chance(&self, bound: u64) -> u64 {
        let mut mixed =
            self.chance.fetch_add(0x9e37_79b9_7f4a_7c15, Ordering::Relaxed).wrapping_add(self.options.seed);
        mixed = (mixed ^ (mixed >> 30)).wrapping_mul(0xbf58_476d_1ce4_e5b9);
        mixed = (mixed ^ (mixed >> 27)).wrapping_mul(0x94d0_49bb_1331_11eb);
        (mixed ^ (mixed >> 31)) % bound.max(1)
    }

    /// One request, whose permit is held until it is asked for or for a time by chance.
    async fn request(&self, kept: bool) {
        let number = self.last.fetch_add(1, Ordering::Relaxed) + 1;
        let flow = self.chance(self.options.flows);
        let cost = 1 + u32::try_from(self.chance(self.options.cost)).unwrap_or_default();
        let ask = Ask::new().flow(flow.to_string()).cost(NonZeroU32::MIN.saturating_add(cost - 1));
        self.record("ask", number, format_args!("{flow} {cost}"));
        let permit = match self.queue.acquire(ask).await {
            Ok(permit) => permit,
            Err(error) => return self.record("end", number, error.cause().as_str()),
        };
        self.record("take", number, permit.units());
        let (least, most) = self.options.hold;
        let end = async {
            if kept {
                self.releases.acquire().await.expect("it is never closed").forget();
            } else {
                sleep(Duration::from_millis(least + self.chance(most.saturating_sub(least)))).await;
            }
        };
        select! {
            () = end => self.record("give", number, "done"),
            () = permit.revoked() => self.record("give", number, "revoked"),
        }
        drop(permit);
    }
}

/// The node's requests. Each has the sender for as long as it is under way.
async fn load(node: &Arc<Node>, under_way: &mpsc::Sender<()>) {
    for _ in 0..node.options.requesters {
        let (node, under_way) = (Arc::clone(node), under_way.clone());
        tokio::spawn(async move {
            let _under_way = under_way;
            while !node.stopped.load(Ordering::Relaxed) {
                node.request(false).await;
                // A refusal takes no time.
                sleep(Duration::from_millis(1)).await;
            }
        });
    }
    if node.options.rate > 0 {
        let mut ticks = interval(Duration::from_secs(1) / node.options.rate);
        ticks.set_missed_tick_behavior(MissedTickBehavior::Skip);
        while !node.stopped.load(Ordering::Relaxed) {
            ticks.tick().await;
            one(node, under_way, false);
        }
    }
}

fn one(node: &Arc<Node>, under_way: &mpsc::Sender<()>, kept: bool) {
    let (node, under_way) = (Arc::clone(node), under_way.clone());
    tokio::spawn(async move {
        let _under_way = under_way;
        node.request(kept).await;
    });
}

/// The lines of stdin. A thread reads them, which no runtime waits for.
fn commands() -> mpsc::UnboundedReceiver<String> {
    let (send, commands) = mpsc::unbounded_channel();
    std::thread::spawn(move || {
        std::io::stdin().lock().lines().map_while(Result::ok).for_each(|line| _ = send.send(line));
    });
    commands
}

fn status(node: &Node) -> String {
    let stats = node.queue.stats();
    format!(
        "in flight {} of {:?}, waiting {}; this node holds {}, and {} wait here",
        stats.in_flight, stats.capacity, stats.waiting, stats.own_in_flight, stats.own_waiting
    )
}

/// Until it is asked to end.
async fn run(node: &Arc<Node>) -> Result<(), Box<dyn Error>> {
    let (mut interrupt, mut terminate) = (signal(SignalKind::interrupt())?, signal(SignalKind::terminate())?);
    let mut commands = commands();
    let (sender, mut under_way) = mpsc::channel(1);
    let (mut sender, mut idle) = (Some(sender), false);
    if let Some(sender) = sender.clone() {
        let node = Arc::clone(node);
        tokio::spawn(async move { load(&node, &sender).await });
    }
    let mut ticks = interval(Duration::from_secs(1));
    let mut told = String::new();
    loop {
        let command = select! {
            _ = interrupt.recv() => break,
            _ = terminate.recv() => break,
            Some(command) = commands.recv() => command,
            // Nothing is sent; it ends with the last request after `stop`.
            _ = under_way.recv(), if sender.is_none() && !idle => {
                println!("idle");
                idle = true;
                continue;
            }
            _ = ticks.tick() => {
                let now = status(node);
                if now != told {
                    println!("{now}");
                    told = now;
                }
                continue;
            }
        };
        let mut words = command.split_whitespace();
        let (name, count) = (words.next(), words.next().map_or(Ok(1), str::parse::<usize>));
        match (name, count, &sender) {
            (Some("ask"), Ok(count), Some(sender)) => (0..count).for_each(|_| one(node, sender, true)),
            (Some("release"), Ok(count), _) => node.releases.add_permits(count),
            (Some("stop"), ..) => {
                node.stopped.store(true, Ordering::Relaxed);
                sender = None;
            }
            _ => eprintln!(
                "the commands are `ask N` and `release N`, and `stop`, after which nothing is asked"
            ),
        }
    }
    Ok(())
}

// One thread, so that requests are recorded in the order in which they enter the line.
#[tokio::main(flavor = "current_thread")]
async fn main() -> Result<(), Box<dyn Error>> {
    let options = Options::read(std::env::args().skip(1)).unwrap_or_else(|error| {
        eprintln!("{error}");
        std::process::exit(2);
    });
    let record = match &options.record {
        Some(path) => Some(OpenOptions::new().create(true).append(true).open(path)?),
        None => None,
    };
    let queue = FairQueue::connect(options.config()?).await?;
    println!("ready");
    let grace = Duration::from_secs(options.grace);
    let node = Arc::new(Node {
        queue,
        options,
        record,
        last: AtomicU64::new(0),
        chance: AtomicU64::new(0),
        stopped: AtomicBool::new(false),
        releases: Semaphore::new(0),
    });
    run(&node).await?;
    node.stopped.store(true, Ordering::Relaxed);
    let drained = node.queue.drain(grace).await;
    println!("drained: {} units revoked, {} left", drained.revoked(), drained.remaining());
    Ok(())
}
