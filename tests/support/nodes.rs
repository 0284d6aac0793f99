//! Queues in Redis as the tests make them, what they hold, and what the server says of them.

use std::{
    collections::hash_map::RandomState,
    hash::BuildHasher,
    time::{Duration, SystemTime},
};

use tokio::time::{Instant, sleep};
use tower_fair_queue::{AcquireError, Ask, FairQueue, FairQueueConfigBuilder, Permit, RedisConfig};

use super::{Unit, Units, config, end_check, redis::Server};

/// "At once" for a queue in Redis.
pub(crate) const AT_ONCE_OVER_REDIS: Duration = Duration::from_millis(250);

/// The keys of a queue that nobody waits in and that holds nothing.
pub(crate) const CONSTANT_KEYS: [&str; 3] = ["calls", "nodes", "state"];

/// The settings of a queue on this server, all of whose capacity is open from the start.
pub(crate) fn redis(url: impl AsRef<str>) -> RedisConfig {
    RedisConfig::new(url).ramp(Duration::ZERO)
}

/// One more node of the queue called `name`, once it grants.
pub(crate) async fn node(name: &str, capacity: u32, redis: RedisConfig) -> FairQueue {
    node_with(config(name, capacity), redis).await
}

pub(crate) async fn node_with(builder: FairQueueConfigBuilder, redis: RedisConfig) -> FairQueue {
    let config = builder.redis(redis).build().unwrap();
    FairQueue::connect(config).await.unwrap_or_else(|error| panic!("connect: {error}"))
}

/// A permit and its units in the test's own record. They leave the record just before they go back.
#[derive(Debug)]
pub(crate) struct Holding {
    _units: Vec<Unit>,
    pub(crate) permit: Permit,
}

impl Holding {
    pub(crate) fn new(permit: Permit, units: &Units) -> Self {
        Self { _units: (0..permit.units()).map(|_| units.enter()).collect(), permit }
    }
}

/// Asks for one unit.
pub(crate) async fn hold(queue: &FairQueue, units: &Units) -> Result<Holding, AcquireError> {
    hold_ask(queue, units, Ask::new()).await
}

pub(crate) async fn hold_ask(queue: &FairQueue, units: &Units, ask: Ask) -> Result<Holding, AcquireError> {
    Ok(Holding::new(queue.acquire(ask).await?, units))
}

/// A number of the queue's state, as the server has it; 0 where there is no state.
pub(crate) fn state(server: &Server, name: &str, field: &str) -> u64 {
    server.state(&format!("fairq:{{{name}}}:state"), field)
}

/// Units taken and tickets waiting, as the server has them.
pub(crate) fn taken_and_waiting(server: &Server, name: &str) -> (u64, u64) {
    (state(server, name, "in_flight"), state(server, name, "waiting"))
}

/// The keys of the queue, without what they all begin with.
pub(crate) fn keys(server: &Server, name: &str) -> Vec<String> {
    let prefix = format!("fairq:{{{name}}}:");
    let all = server.cli(&["KEYS", "*"]);
    let mut keys: Vec<_> =
        all.lines().filter_map(|key| key.strip_prefix(&prefix).map(str::to_owned)).collect();
    keys.sort();
    keys
}

/// What must hold after every case once the last client has left: what [`end_check`] says of each node, and on the server
/// nothing taken, nothing waiting and no key beyond the constant ones.
pub(crate) async fn end_check_on(server: &Server, nodes: &[&FairQueue], units: &Units) {
    let name = nodes[0].name();
    for node in nodes {
        end_check(node, units).await;
    }
    let start = Instant::now();
    loop {
        let now = (taken_and_waiting(server, name), keys(server, name));
        if now.0 == (0, 0) && now.1.iter().all(|key| CONSTANT_KEYS.contains(&key.as_str())) {
            break;
        }
        // The grants told last are acknowledged with the next heartbeat.
        assert!(start.elapsed() < Duration::from_secs(2), "2 s after the last client left {name}: {now:?}");
        sleep(Duration::from_millis(10)).await;
    }
}

/// Numbers by chance that a seed repeats: splitmix64.
#[derive(Debug)]
pub(crate) struct Dice(u64);

impl Dice {
    /// With a seed by chance, or that of the variable `FAIRQ_SEED`. It is printed.
    pub(crate) fn new() -> Self {
        let seed = std::env::var("FAIRQ_SEED").map(|seed| seed.parse().expect("FAIRQ_SEED is a number"));
        let seed = seed.unwrap_or_else(|_| RandomState::new().hash_one(SystemTime::now()));
        eprintln!("dice: FAIRQ_SEED={seed}");
        Self(seed)
    }

    /// From 0 up to and without `end`.
    pub(crate) fn below(&mut self, end: u64) -> u64 {
        self.0 = self.0.wrapping_add(0x9e37_79b9_7f4a_7c15);
        let mut mixed = self.0;
        mixed = (mixed ^ (mixed >> 30)).wrapping_mul(0xbf58_476d_1ce4_e5b9);
        mixed = (mixed ^ (mixed >> 27)).wrapping_mul(0x94d0_49bb_1331_11eb);
        (mixed ^ (mixed >> 31)) % end.max(1)
    }

    /// A time shorter than `end`.
    pub(crate) fn time(&mut self, end: Duration) -> Duration {
        Duration::from_micros(self.below(u64::try_from(end.as_micros()).expect("a short time")))
    }
}

/// Whether the long forms of the tests are asked for.
pub(crate) fn heavy() -> bool {
    std::env::var_os("FAIRQ_HEAVY").is_some()
}
