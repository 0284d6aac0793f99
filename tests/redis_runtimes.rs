//! One process with several runtimes: the engine lives on one of them, and its end is nobody else's.

mod support;

use std::time::Duration;

use support::redis::{Kind, Server, require};
use tokio::{runtime::Runtime, time::timeout};
use tower_fair_queue::{Ask, FairQueue, FairQueueConfig, LeaseLost, Outage, RedisConfig};

const SOON: Duration = Duration::from_secs(5);

fn config(server: &Server, name: &str, redis: impl Fn(RedisConfig) -> RedisConfig) -> FairQueueConfig {
    let redis = redis(RedisConfig::new(server.url()).ramp(Duration::ZERO));
    FairQueueConfig::builder(name).capacity(1).redis(redis).build().unwrap()
}

fn runtime() -> Runtime {
    tokio::runtime::Builder::new_multi_thread().worker_threads(1).enable_all().build().unwrap()
}

// P9: a ticket that waits when the engine's runtime ends.
#[test]
fn whoever_waits_on_another_runtime_goes_on_with_the_engine() {
    let Some(binary) = require(Kind::Redis70) else { return };
    let [first, second] = [runtime(), runtime()];
    let server = second.block_on(Server::start(&binary));
    let queue = first.block_on(FairQueue::connect(config(&server, "waits", |redis| redis))).unwrap();
    let other = second.block_on(FairQueue::connect(config(&server, "waits", |redis| redis))).unwrap();
    let permit = second.block_on(other.acquire(Ask::new())).unwrap();
    let waiting = second.spawn({
        let queue = queue.clone();
        async move { queue.acquire(Ask::new()).await }
    });
    second.block_on(support::eventually(SOON, "it waits", || queue.stats().waiting == 1));
    first.shutdown_timeout(SOON);
    drop(permit);
    let granted =
        second.block_on(async { timeout(SOON, waiting).await }).expect("in time").expect("no panic");
    assert_eq!(granted.expect("granted").units(), 1);
}

// P1: a permit that is held when the engine's runtime ends is renewed by whoever waits for its revocation.
#[test]
fn whoever_holds_on_another_runtime_goes_on_with_the_engine() {
    let Some(binary) = require(Kind::Redis70) else { return };
    let [first, second] = [runtime(), runtime()];
    let server = second.block_on(Server::start(&binary));
    let abort = |redis: RedisConfig| {
        redis.lease(Duration::from_secs(5)).lease_lost(LeaseLost::Abort).outage(Outage::Wait)
    };
    let queue = first.block_on(FairQueue::connect(config(&server, "holds", abort))).unwrap();
    let other = second.block_on(FairQueue::connect(config(&server, "holds", abort))).unwrap();
    let permit = second.block_on(queue.acquire(Ask::new())).unwrap();
    let held = second.spawn(async move {
        permit.revoked().await;
    });
    second.block_on(tokio::task::yield_now());
    first.shutdown_timeout(SOON);
    // Longer than the lease, after which the unit would be the other's.
    let granted = second.block_on(async { timeout(Duration::from_secs(8), other.acquire(Ask::new())).await });
    assert!(granted.is_err(), "granted beside a permit that is held");
    assert!(!held.is_finished());
}
