//! What `connect` waits for, and a state that it leaves alone.

mod support;

use std::time::Duration;

use support::redis::{Kind, Server, require};
use tokio::time::Instant;
use tower_fair_queue::{ConnectProblem, FairQueue, FairQueueConfig, RedisConfig};

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_state_of_another_layout_is_told_and_left_alone() {
    let Some(binary) = require(Kind::Redis70) else { return };
    let server = Server::start(&binary).await;
    server.cli(&["SET", "fairq:{layout}:state", "of another version"]);
    server.cli(&["SADD", "fairq:{layout}:expected", "somebody"]);
    let keys = || server.cli(&["DUMP", "fairq:{layout}:state"]) + &server.cli(&["KEYS", "*"]);
    let before = keys();
    let redis = RedisConfig::new(server.url());
    let config = FairQueueConfig::builder("layout").capacity(1).redis(redis).build().unwrap();
    let error = FairQueue::connect(config).await.unwrap_err();
    assert_eq!(error.problem(), ConnectProblem::OtherLayout, "{error}");
    assert_eq!(keys(), before);
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn the_first_start_takes_two_seconds_however_seldom_the_node_polls() {
    let Some(binary) = require(Kind::Redis70) else { return };
    let server = Server::start(&binary).await;
    let redis = RedisConfig::new(server.url()).poll_interval(Duration::from_secs(1));
    let config = FairQueueConfig::builder("start").capacity(1).redis(redis).build().unwrap();
    let began = Instant::now();
    FairQueue::connect(config).await.unwrap();
    let took = began.elapsed();
    assert!(took > Duration::from_millis(1_800), "{took:?}: others had no time to tell what they hold");
    assert!(took < Duration::from_secs(3), "{took:?}");
}
