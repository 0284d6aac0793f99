//! Nodes of one queue, each a process of its own: the example `redis_node` with a record of what it holds.

#![allow(dead_code, reason = "each test file uses its part")]

use std::{
    path::{Path, PathBuf},
    sync::OnceLock,
    time::Duration,
};

use tokio::time::{Instant, sleep};

use crate::{
    example::build,
    record::{Lapse, Records, now},
    support::{
        process::Process,
        redis::{Folder, Server},
    },
};

/// Long enough that only a fault runs into it.
const LIMIT: Duration = Duration::from_secs(40);

/// The nodes. Dropped, they are killed.
#[derive(Debug)]
pub(crate) struct Nodes {
    folder: Folder,
    flags: Vec<String>,
    lease: Duration,
    aborts: bool,
    nodes: Vec<Option<Process>>,
    lapses: Vec<(usize, Lapse)>,
    silent: Vec<Option<Duration>>,
}

impl Nodes {
    /// Nodes with a lease of 5 s that wait while Redis is away. `flags` are those of the example and come last.
    pub(crate) fn new(capacity: u32, flags: &str) -> Self {
        let text = format!(
            "--capacity {capacity} --lease 5 --outage wait --max-wait 60 --grace 2 --queue test {flags}"
        );
        Self {
            folder: Folder::new(),
            flags: text.split_whitespace().map(str::to_owned).collect(),
            lease: Duration::from_secs(5),
            aborts: flags.contains("--lease-lost abort"),
            nodes: Vec::new(),
            lapses: Vec::new(),
            silent: Vec::new(),
        }
    }

    /// Starts one more and waits until it grants. Returns its index.
    pub(crate) async fn start(&mut self, url: &str, flags: &str) -> usize {
        let node = self.spawn(&[], url, flags);
        self.ready(node).await;
        node
    }

    /// Starts one more, with variables of the environment, and does not wait for it.
    pub(crate) fn spawn(&mut self, variables: &[&str], url: &str, flags: &str) -> usize {
        static PROGRAM: OnceLock<PathBuf> = OnceLock::new();
        let program = PROGRAM.get_or_init(|| build("redis_node")).to_str().expect("a plain path");
        let node = self.nodes.len();
        let (record, seed) = (self.record(node), (seed() + node as u64).to_string());
        let record = record.to_str().expect("a plain path");
        let mut args: Vec<&str> = variables.to_vec();
        args.extend([program, "--redis", url, "--record", record, "--seed", &seed]);
        args.extend(self.flags.iter().map(String::as_str));
        args.extend(flags.split_whitespace());
        self.nodes.push(Some(Process::spawn(Path::new("/usr/bin/env"), &args)));
        self.silent.push(None);
        node
    }

    pub(crate) async fn ready(&mut self, node: usize) {
        self.process(node).wait_line("ready", LIMIT).await;
    }

    fn record(&self, node: usize) -> PathBuf {
        self.folder.path().join(format!("node-{node}"))
    }

    pub(crate) fn process(&mut self, node: usize) -> &mut Process {
        self.nodes[node].as_mut().expect("the node runs")
    }

    pub(crate) fn say(&mut self, node: usize, line: &str) {
        self.process(node).say(line);
    }

    /// Returns when it was.
    pub(crate) fn kill9(&mut self, node: usize) -> Duration {
        let at = now();
        self.nodes[node].take().expect("the node runs").kill9();
        self.lapses.push((node, Lapse::Killed(at)));
        at
    }

    pub(crate) fn stop(&mut self, node: usize) -> Duration {
        let from = now();
        self.process(node).stop();
        self.silent[node] = Some(from);
        from
    }

    pub(crate) fn cont(&mut self, node: usize) -> Duration {
        let from = self.silent[node].take().expect("it was stopped");
        self.process(node).cont();
        let to = now();
        self.lapses.push((node, Lapse::Silent { from, to, stopped: true }));
        to
    }

    /// Notes that nobody could hear the node since `from`, until now.
    pub(crate) fn was_cut(&mut self, node: usize, from: Duration) {
        self.lapses.push((node, Lapse::Silent { from, to: now(), stopped: false }));
    }

    pub(crate) fn running(&self) -> Vec<usize> {
        (0..self.nodes.len()).filter(|&node| self.nodes[node].is_some()).collect()
    }

    /// The records so far.
    pub(crate) fn records(&self) -> Records {
        let mut records = Records::new(self.lease, self.aborts);
        for node in 0..self.nodes.len() {
            records.read(node, &self.record(node));
        }
        self.lapses.iter().for_each(|&(node, lapse)| records.lapse(node, lapse));
        records
    }

    /// Waits until the records say so.
    pub(crate) async fn until(
        &self,
        what: &str,
        within: Duration,
        mut condition: impl FnMut(&Records) -> bool,
    ) -> Records {
        let start = Instant::now();
        loop {
            let records = self.records();
            if condition(&records) {
                return records;
            }
            assert!(start.elapsed() < within, "not within {within:?}: {what}");
            sleep(Duration::from_millis(20)).await;
        }
    }

    /// Ends the load and all that is kept, waits until all that was asked has ended, and returns the records. Redis has nothing left then (promise P6).
    pub(crate) async fn finish(&mut self, server: &Server) -> Records {
        for node in self.running() {
            self.say(node, "stop");
            self.say(node, "release 1000");
        }
        for node in self.running() {
            self.process(node).wait_line("idle", LIMIT).await;
        }
        nothing_left(server, Duration::from_secs(2)).await;
        self.records()
    }
}

/// Nothing waits and nothing is held, by each of the keys that could say otherwise.
pub(crate) async fn nothing_left(server: &Server, within: Duration) {
    let start = Instant::now();
    loop {
        let left = left(server);
        if left.iter().all(|(_, size)| size == "0") {
            return;
        }
        assert!(start.elapsed() < within, "P6, left after {within:?}: {left:?}");
        sleep(Duration::from_millis(20)).await;
    }
}

fn left(server: &Server) -> Vec<(String, String)> {
    let key = |name: &str| format!("fairq:{{test}}:{name}");
    let sizes = [
        ("lines", "ZCARD"),
        ("tickets", "HLEN"),
        ("heads", "ZCARD"),
        ("flows", "HLEN"),
        ("permits", "ZCARD"),
        ("outbox", "ZCARD"),
    ];
    let mut left: Vec<_> =
        sizes.map(|(name, size)| (name.to_owned(), server.cli(&[size, &key(name)]))).into();
    for field in ["in_flight", "waiting"] {
        left.push((field.to_owned(), server.state(&key("state"), field).to_string()));
    }
    left
}

/// The seed of what is left to chance: by chance itself, or that of the variable `FAIRQ_SEED`.
pub(crate) fn seed() -> u64 {
    static SEED: OnceLock<u64> = OnceLock::new();
    *SEED.get_or_init(|| {
        let seed = std::env::var("FAIRQ_SEED").map(|seed| seed.parse().expect("FAIRQ_SEED is a number"));
        let seed = seed.unwrap_or_else(|_| u64::from(now().subsec_nanos()));
        eprintln!("FAIRQ_SEED={seed}");
        seed
    })
}

/// Whether the long forms are asked for.
pub(crate) fn heavy() -> bool {
    std::env::var_os("FAIRQ_HEAVY").is_some()
}
