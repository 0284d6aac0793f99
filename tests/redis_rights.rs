//! The least rights of a user, as `docs/PROTOCOL.md` has them, are enough.

mod support;

use std::time::Duration;

use support::{
    eventually,
    redis::{Cluster, Kind, Options, Server, require},
    soon,
};
use tower_fair_queue::{Ask, FairQueue, FairQueueConfig, RedisConfig};

const SOON: Duration = Duration::from_secs(5);

/// The rules behind the user's name.
fn least() -> String {
    let text = include_str!("../docs/PROTOCOL.md");
    let line = text.lines().find_map(|line| line.strip_prefix("ACL SETUSER fairq on "));
    line.expect("the document has it").to_owned()
}

async fn connect(redis: RedisConfig) -> FairQueue {
    let config = FairQueueConfig::builder("rights").capacity(1).redis(redis.ramp(Duration::ZERO)).build();
    FairQueue::connect(config.unwrap()).await.unwrap_or_else(|error| panic!("{error}"))
}

/// A grant on one node, and one that a push tells the other of.
async fn passes_on(a: &FairQueue, b: &FairQueue) {
    let held = soon("a permit", a.acquire(Ask::new())).await.unwrap();
    let waiting = b.acquire(Ask::new());
    let release = async {
        eventually(SOON, "the other waits", || a.stats().waiting == 1).await;
        drop(held);
    };
    let (permit, ()) = tokio::join!(soon("the permit", waiting), release);
    drop(permit.unwrap());
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn the_documented_rights_are_enough() {
    for kind in Kind::ALL {
        let Some(binary) = require(kind) else { continue };
        let options = Options::default().user("fairq", &least());
        let options = options.user("second", &format!("{} +select", least()));
        let server = Server::with(&binary, &options).await;
        let url = server.url_as("fairq", "secret");
        let (a, b) = tokio::join!(connect(RedisConfig::new(&url)), connect(RedisConfig::new(&url)));
        passes_on(&a, &b).await;
        server.cli(&["FLUSHALL"]);
        server.cli(&["SCRIPT", "FLUSH"]);
        passes_on(&a, &b).await;
        let denied = server.cli(&["INFO", "errorstats"]);
        assert!(!denied.contains("errorstat_NOPERM"), "{denied}");

        let other = format!("{}/1", server.url_as("second", "secret"));
        connect(RedisConfig::new(other)).await;
    }
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn in_a_cluster_the_sharded_channels_take_their_place() {
    let Some(binary) = require(Kind::Redis70) else { return };
    let sharded = least().replace("+subscribe +publish", "+ssubscribe +spublish");
    let cluster = Cluster::with(&binary, Options::default().user("fairq", &sharded)).await;
    let urls: Vec<String> = cluster.nodes.iter().map(|node| node.url_as("fairq", "secret")).collect();
    let (a, b) = tokio::join!(connect(RedisConfig::cluster(&urls)), connect(RedisConfig::cluster(&urls)));
    passes_on(&a, &b).await;
}
