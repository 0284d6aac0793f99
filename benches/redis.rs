//! A queue in Redis: what an acquire costs beside a PING, how fast a release reaches the next in line, how many grants a
//! second there are, what waiting costs, and how long the script runs.
//!
//! `cargo bench --features redis --bench redis`. It starts a server of its own (`redis-server` from the `PATH`; another by
//! `FAIRQ_REDIS70=path`; one part by `-- latency`, `throughput`, `waiting` or `script`) on the same machine and on the same two cores, so the figures are for both together; only ratios within one
//! run mean anything.

#![allow(clippy::print_stdout, reason = "the figures")]

#[path = "../tests/support/process.rs"]
#[allow(dead_code, unreachable_pub, reason = "shared with the tests")]
mod process;
#[path = "../tests/support/redis/mod.rs"]
#[allow(dead_code, unused_imports, unreachable_pub, reason = "shared with the tests")]
mod redis_support;

use std::{
    sync::{
        Arc,
        atomic::{AtomicBool, AtomicU64, Ordering},
    },
    time::Duration,
};

use redis_support::{Kind, Server, require};
use tokio::{
    runtime::Builder,
    sync::oneshot,
    task::JoinSet,
    time::{Instant, sleep},
};
use tower_fair_queue::{Ask, FairQueue, FairQueueConfig, Limit, RedisConfig};

struct Bench {
    server: Server,
    queues: u32,
}

fn median(times: &mut [Duration]) -> Duration {
    times.sort_unstable();
    times[times.len() / 2]
}

fn p99(times: &[Duration]) -> Duration {
    times[times.len() * 99 / 100]
}

impl Bench {
    async fn queues(&mut self, nodes: usize, capacity: u32, poll: Duration) -> Vec<FairQueue> {
        self.queues += 1;
        let mut queues = vec![];
        for _ in 0..nodes {
            let redis = RedisConfig::new(self.server.url()).ramp(Duration::ZERO).poll_interval(poll);
            let config = FairQueueConfig::builder(format!("bench{}", self.queues))
                .capacity(capacity)
                .max_waiting(Limit::Unlimited)
                .max_wait(Duration::from_secs(3_600))
                .redis(redis)
                .build()
                .expect("within its bounds");
            queues.push(FairQueue::connect(config).await.expect("it connects"));
        }
        queues
    }

    /// Calls of the script so far.
    fn calls(&self) -> u64 {
        self.stat("calls=")
    }

    fn stat(&self, name: &str) -> u64 {
        let stats = self.server.cli(&["INFO", "commandstats"]);
        let line = stats.lines().find(|line| line.starts_with("cmdstat_evalsha:")).unwrap_or_default();
        let value = line.split(name).nth(1).unwrap_or("0");
        value.split(',').next().and_then(|text| text.parse().ok()).unwrap_or(0)
    }

    /// Processor time so far: the server's and this process's.
    fn cpu(&self) -> [Duration; 2] {
        let ticks = |pid: &str| -> u64 {
            let stat = std::fs::read_to_string(format!("/proc/{pid}/stat")).expect("Linux");
            let fields: Vec<&str> = stat.rsplit(") ").next().expect("a name").split(' ').collect();
            fields[11].parse::<u64>().expect("a number") + fields[12].parse::<u64>().expect("a number")
        };
        // A tick is a hundredth of a second on every Linux in use.
        [self.server.pid().to_string(), "self".to_owned()].map(|pid| Duration::from_millis(10 * ticks(&pid)))
    }

    /// Waits until so many tickets stand in Redis.
    async fn in_line(&self, tickets: usize) {
        let key = format!("fairq:{{bench{}}}:tickets", self.queues);
        while self.server.cli(&["HLEN", &key]).trim() != tickets.to_string() {
            sleep(Duration::from_millis(2)).await;
        }
    }

    fn memory(&self) -> u64 {
        let info = self.server.cli(&["INFO", "memory"]);
        let line = info.lines().find(|line| line.starts_with("used_memory:")).expect("a line");
        line["used_memory:".len()..].trim().parse().expect("a number")
    }

    async fn latency(&mut self) {
        const ROUNDS: usize = 5_000;
        let queues = self.queues(2, 1, Duration::from_secs(1)).await;
        let (a, b) = (&queues[0], &queues[1]);
        let client = redis::Client::open(self.server.url()).expect("a URL");
        let info = client.get_connection_info().clone();
        let info = info.set_tcp_settings(redis::io::tcp::TcpSettings::default().set_nodelay(true));
        let client = redis::Client::open(info).expect("a URL");
        let mut connection = client.get_multiplexed_async_connection().await.expect("it listens");
        let (mut pings, mut acquires, mut hands) = (vec![], vec![], vec![]);
        for _ in 0..ROUNDS {
            let begun = Instant::now();
            redis::cmd("PING").query_async::<String>(&mut connection).await.expect("an answer");
            pings.push(begun.elapsed());

            let begun = Instant::now();
            let permit = a.acquire(Ask::new()).await.expect("granted");
            acquires.push(begun.elapsed());

            // Someone waits on the other node once this one's stats, or its own, say so.
            let (told, ready) = oneshot::channel();
            let waits = b.clone();
            let next = tokio::spawn(async move {
                let acquire = waits.acquire(Ask::new());
                let mut acquire = std::pin::pin!(acquire);
                let first = futures_util::poll!(acquire.as_mut());
                assert!(first.is_pending());
                told.send(()).expect("it listens");
                let permit = acquire.await.expect("granted");
                (Instant::now(), permit)
            });
            ready.await.expect("told");
            // Two round trips of this connection: the other node's enqueue is through.
            sleep(Duration::from_millis(2)).await;
            let begun = Instant::now();
            drop(permit);
            let (granted, permit) = next.await.expect("no panic");
            hands.push(granted - begun);
            drop(permit);
            sleep(Duration::from_millis(1)).await;
        }
        println!(
            "the script, {} calls of one operation on average {:.1} us in the server",
            self.calls(),
            self.stat("usec=") as f64 / self.calls() as f64
        );
        let (ping, acquire, hand) = (median(&mut pings), median(&mut acquires), median(&mut hands));
        let ratio = |time: Duration| time.as_secs_f64() / ping.as_secs_f64();
        println!("PING                          median {ping:>9.1?}  p99 {:>9.1?}", p99(&pings));
        println!(
            "acquire, nobody waits         median {acquire:>9.1?}  p99 {:>9.1?}  {:.2} x PING",
            p99(&acquires),
            ratio(acquire)
        );
        println!(
            "release on A to grant on B    median {hand:>9.1?}  p99 {:>9.1?}  {:.2} x PING",
            p99(&hands),
            ratio(hand)
        );
    }

    async fn throughput(&mut self, capacity: u32, tasks: usize, flows: usize) {
        let queue = self.queues(1, capacity, Duration::from_millis(200)).await.remove(0);
        let (stop, granted) = (Arc::new(AtomicBool::new(false)), Arc::new(AtomicU64::new(0)));
        let mut running = JoinSet::new();
        for task in 0..tasks {
            let (queue, stop, granted) = (queue.clone(), Arc::clone(&stop), Arc::clone(&granted));
            running.spawn(async move {
                let ask = if flows == 0 { Ask::new() } else { Ask::new().flow((task % flows).to_string()) };
                while !stop.load(Ordering::Relaxed) {
                    drop(queue.acquire(ask.clone()).await.expect("granted"));
                    granted.fetch_add(1, Ordering::Relaxed);
                }
            });
        }
        sleep(Duration::from_secs(1)).await;
        let (grants, calls, cpu, begun) =
            (granted.load(Ordering::Relaxed), self.calls(), self.cpu(), Instant::now());
        sleep(Duration::from_secs(4)).await;
        let (grants, more, cpu_then, took) =
            (granted.load(Ordering::Relaxed) - grants, self.calls(), self.cpu(), begun.elapsed());
        let calls = more - calls;
        let [server, own] = [0, 1].map(|i| (cpu_then[i] - cpu[i]).as_secs_f64());
        stop.store(true, Ordering::Relaxed);
        while running.join_next().await.is_some() {}
        #[expect(clippy::cast_precision_loss, reason = "a figure")]
        let per = |of: u64, seconds: f64| of as f64 / seconds;
        println!(
            "{tasks:>5} tasks, capacity {capacity:>4}, {flows:>4} flows: {:>7.0} grants/s, {:.3} calls per grant, processor time per grant {:.1} us in the server and {:.1} us here",
            per(grants, took.as_secs_f64()),
            per(calls, per(grants, 1.0)),
            1e6 / per(grants, server),
            1e6 / per(grants, own),
        );
    }

    /// Nodes with so many waiting and nothing moving: calls, memory.
    async fn waiting(&mut self, nodes: usize, tickets: usize, flows: usize) {
        let queues = self.queues(nodes, 1, Duration::from_millis(200)).await;
        let _held = queues[0].acquire(Ask::new()).await.expect("granted");
        let before = self.memory();
        let mut waiting = JoinSet::new();
        for ticket in 0..tickets {
            let queue = queues[ticket % nodes].clone();
            let ask = Ask::new().flow((ticket % flows).to_string());
            waiting.spawn(async move { queue.acquire(ask).await.map(drop) });
        }
        self.in_line(tickets).await;
        let bytes = (self.memory() - before) / tickets as u64;
        let calls = self.calls();
        sleep(Duration::from_secs(5)).await;
        let calls = self.calls() - calls;
        #[expect(clippy::cast_precision_loss, reason = "a figure")]
        let per_node = calls as f64 / 5.0 / nodes as f64;
        println!(
            "{tickets:>6} waiting in {flows:>6} flows on {nodes} nodes: {per_node:.1} calls/s per node, {bytes} bytes each"
        );
        waiting.abort_all();
        while waiting.join_next().await.is_some() {}
        while queues[0].stats().waiting > 0 {
            sleep(Duration::from_millis(50)).await;
        }
    }

    /// How long calls of 256 operations run in the server, by its own log.
    async fn script(&mut self, backlog: usize, flows: usize) {
        let queue = self.queues(1, 256, Duration::from_millis(200)).await.remove(0);
        let ask = move |n: usize| Ask::new().flow((n % flows).to_string());
        let mut held = JoinSet::new();
        for n in 0..256 {
            let queue = queue.clone();
            held.spawn(async move { queue.acquire(ask(n)).await.expect("granted") });
        }
        let mut permits = held.join_all().await;
        let mut waiting = JoinSet::new();
        for n in 0..backlog {
            let queue = queue.clone();
            waiting.spawn(async move { queue.acquire(ask(n)).await });
        }
        self.in_line(backlog).await;
        self.server.cli(&["CONFIG", "SET", "slowlog-log-slower-than", "0"]);
        self.server.cli(&["CONFIG", "SET", "slowlog-max-len", "4096"]);
        self.server.cli(&["SLOWLOG", "RESET"]);
        // All 256 permits come back in one call, which grants as many as it may; again and again.
        for _ in 0..20 {
            permits.clear();
            while permits.len() < 256.min(backlog) {
                permits.push(waiting.join_next().await.expect("one").expect("no panic").expect("granted"));
            }
            for n in 0..256 {
                let queue = queue.clone();
                waiting.spawn(async move { queue.acquire(ask(n)).await });
            }
            self.in_line(backlog).await;
        }
        let mut times = self.slowlog();
        self.server.cli(&["CONFIG", "SET", "slowlog-log-slower-than", "-1"]);
        times.sort_unstable();
        println!(
            "script with {backlog:>6} waiting in {flows:>6} flows, 256 ends or enqueues a call: median {:?}, 90 % {:?}, longest {:?}, {} calls",
            Duration::from_micros(times[times.len() / 2]),
            Duration::from_micros(times[times.len() * 9 / 10]),
            Duration::from_micros(*times.last().expect("calls")),
            times.len(),
        );
        waiting.abort_all();
        while waiting.join_next().await.is_some() {}
        drop(permits);
    }

    /// The times of the script's calls, in microseconds.
    fn slowlog(&self) -> Vec<u64> {
        let mut connection = self.server.connection();
        let redis_support::Reply::List(entries) =
            connection.call(&["SLOWLOG", "GET", "4096"]).expect("a log")
        else {
            panic!("no log")
        };
        let time = |entry: &redis_support::Reply| {
            let redis_support::Reply::List(fields) = entry else { return None };
            let redis_support::Reply::List(words) = &fields[3] else { return None };
            let is_ours = format!("{:?}", words[0]).to_uppercase().contains("EVALSHA");
            let redis_support::Reply::Number(micros) = fields[2] else { return None };
            is_ours.then_some(u64::try_from(micros).unwrap_or(0))
        };
        entries.iter().filter_map(time).collect()
    }
}

fn main() {
    let Some(binary) = require(Kind::Redis70) else { return };
    let runtime = Builder::new_multi_thread().worker_threads(2).enable_all().build().expect("a runtime");
    runtime.block_on(async {
        let mut bench = Bench { server: Server::start(&binary).await, queues: 0 };
        let wanted =
            |part: &str| std::env::args().skip(1).filter(|arg| !arg.starts_with("--")).all(|arg| arg == part);
        if wanted("latency") {
            bench.latency().await;
        }
        if wanted("throughput") {
            for (capacity, tasks, flows) in
                [(1_000, 512, 0), (100, 2_100, 0), (100, 2_100, 1), (100, 2_100, 100)]
            {
                bench.throughput(capacity, tasks, flows).await;
            }
        }
        if wanted("waiting") {
            for (nodes, tickets, flows) in [(4, 10_000, 10), (1, 100_000, 100), (1, 100_000, 100_000)] {
                bench.waiting(nodes, tickets, flows).await;
            }
        }
        if wanted("script") {
            for (backlog, flows) in [(1_000, 1), (100_000, 1), (100_000, 1_000), (100_000, 100_000)] {
                bench.script(backlog, flows).await;
            }
        }
    });
}
