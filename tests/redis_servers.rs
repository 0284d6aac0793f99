//! One queue over two nodes on every kind of server: it grants, waits, hands over, gives back, follows the primary, and changes its capacity.

mod support;

use std::{
    sync::{
        Arc,
        atomic::{AtomicBool, Ordering},
    },
    time::Duration,
};

use support::{
    Units, eventually,
    nodes::{AT_ONCE_OVER_REDIS, Holding, end_check_on, hold, node, redis, state, taken_and_waiting},
    redis::{Binary, Certificates, Cluster, Kind, Options, Sentinels, Server, require},
    soon,
};
use tokio::{
    task::{JoinHandle, JoinSet},
    time::{Instant, sleep},
};
use tower_fair_queue::{Cause, FairQueue, Limit, Outage, RedisConfig};

const SECOND: Duration = Duration::from_secs(1);

fn millis(millis: u64) -> Duration {
    Duration::from_millis(millis)
}

fn oldest() -> Option<Binary> {
    require(Kind::Redis70)
}

fn asking(queue: &FairQueue, units: &Units) -> JoinHandle<Holding> {
    let (queue, units) = (queue.clone(), units.clone());
    tokio::spawn(async move { hold(&queue, &units).await.unwrap_or_else(|error| panic!("{error}")) })
}

/// The grant of one that waits, which comes at once.
async fn handed_over(what: &str, waiting: JoinHandle<Holding>) -> Holding {
    let start = Instant::now();
    let held = soon(what, waiting).await.unwrap();
    assert!(start.elapsed() <= AT_ONCE_OVER_REDIS, "{what}: {:?}", start.elapsed());
    held
}

/// The life of a queue of two nodes. `server` is where its state is.
async fn live(name: &str, settings: RedisConfig, server: &Server) {
    // Slow polls, so that what comes at once was pushed.
    let settings = settings.ramp(Duration::ZERO).poll_interval(SECOND);
    let here = node(name, 2, settings.clone()).await;
    let there = node(name, 2, settings).await;
    let units = Units::default();
    let waits = async |count| {
        eventually(SECOND, "it waits", || state(server, name, "waiting") == count).await;
    };

    // Granted at once, on both.
    let start = Instant::now();
    let (first, second) = (hold(&here, &units).await.unwrap(), hold(&there, &units).await.unwrap());
    assert!(start.elapsed() <= AT_ONCE_OVER_REDIS, "{:?}", start.elapsed());
    // The line goes over both nodes, in order of arrival.
    let third = asking(&there, &units);
    waits(1).await;
    let fourth = asking(&here, &units);
    waits(2).await;
    assert_eq!(here.try_acquire(tower_fair_queue::Ask::new()).await.unwrap_err().cause(), Cause::WouldWait);
    drop(first);
    let third = handed_over("from here to there", third).await;
    assert!(!fourth.is_finished());
    drop(second);
    let fourth = handed_over("from there to here", fourth).await;
    // A drain gives back what its node holds, at once.
    let fifth = asking(&here, &units);
    waits(1).await;
    let drain = {
        let there = there.clone();
        tokio::spawn(async move { there.drain(Duration::ZERO).await })
    };
    soon("it is revoked", third.permit.revoked()).await;
    drop(third);
    let fifth = handed_over("from the drained node", fifth).await;
    assert!(soon("the drain", drain).await.unwrap().is_complete());
    assert_eq!(state(server, name, "live"), 1);
    drop((fourth, fifth));
    assert_eq!(units.peak(), 2);
    end_check_on(server, &[&here], &units).await;
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn queue_lives_on_every_server() {
    let mut runs = JoinSet::new();
    for kind in Kind::ALL {
        let Some(binary) = require(kind) else { continue };
        runs.spawn(async move {
            let server = Server::start(&binary).await;
            live(&format!("life-{}", kind.name()), redis(server.url()), &server).await;
        });
    }
    soon("all lives", runs.join_all()).await;
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn queue_lives_over_tls() {
    let Some(binary) = oldest() else { return };
    let certificates = Certificates::new();
    let server = Server::with(&binary, &Options::default().tls(&certificates)).await;
    let settings = redis(server.tls_url()).root_certificates(&certificates.root);
    live("life-tls", settings, &server).await;
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn queue_lives_with_a_password_and_with_a_user() {
    let Some(binary) = oldest() else { return };
    let options = Options::default().password("open").user("app", ">secret ~fairq:* &fairq:* +@all -@admin");
    let server = Server::with(&binary, &options).await;
    live("life-password", redis(server.url()), &server).await;
    live("life-user", redis(server.url_as("app", "secret")), &server).await;
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn queue_lives_in_a_cluster() {
    let Some(binary) = oldest() else { return };
    let cluster = Cluster::start(&binary).await;
    let owner = cluster.owner("fairq:{life-cluster}:state");
    // Whatever node is asked first, also one alone.
    live("life-cluster", RedisConfig::cluster(cluster.urls()), &cluster.nodes[owner]).await;
    let seed = cluster.nodes[(owner + 1) % 3].url();
    live("life-cluster", RedisConfig::cluster([seed]), &cluster.nodes[owner]).await;
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn queue_lives_behind_sentinels() {
    let Some(binary) = oldest() else { return };
    let all = Sentinels::start(&binary).await;
    let settings = || RedisConfig::sentinel(Sentinels::NAME, all.urls());
    live("life-sentinel", settings(), &all.servers[0]).await;
    let unknown = RedisConfig::sentinel("nobody", all.urls());
    let config = support::config("unknown", 1).redis(unknown).build().unwrap();
    let error = FairQueue::connect(config).await.unwrap_err();
    assert_eq!(error.problem(), tower_fair_queue::ConnectProblem::Sentinel, "{error}");
}

/// Requests over both nodes until it is told to stop. Every one is served.
struct Load {
    stop: Arc<AtomicBool>,
    task: JoinHandle<usize>,
}

impl Load {
    fn start(nodes: &[FairQueue; 2], units: &Units) -> Self {
        let (nodes, units, stop) = (nodes.clone(), units.clone(), Arc::new(AtomicBool::new(false)));
        let stopped = Arc::clone(&stop);
        let task = tokio::spawn(async move {
            let (mut asks, mut asked) = (JoinSet::new(), 0);
            while !stopped.load(Ordering::Acquire) {
                let (queue, units) = (nodes[asked % 2].clone(), units.clone());
                asks.spawn(async move {
                    let held = hold(&queue, &units).await.unwrap_or_else(|error| panic!("{error}"));
                    sleep(millis(30)).await;
                    drop(held);
                });
                asked += 1;
                sleep(millis(10)).await;
            }
            asks.join_all().await;
            asked
        });
        Self { stop, task }
    }

    async fn end(self) -> usize {
        self.stop.store(true, Ordering::Release);
        soon("all are served", self.task).await.unwrap()
    }
}

// A slot moves to another master, first with units held and asked for and nothing else, then under load.
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn queue_follows_its_slot() {
    let Some(binary) = oldest() else { return };
    let cluster = Cluster::start(&binary).await;
    let settings = || RedisConfig::cluster(cluster.urls()).ramp(Duration::ZERO).outage(Outage::Wait);
    let nodes = [node("slot", 2, settings()).await, node("slot", 2, settings()).await];
    let units = Units::default();
    let key = "fairq:{slot}:state";
    let one = hold(&nodes[0], &units).await.unwrap();
    let two = hold(&nodes[1], &units).await.unwrap();
    let waiting = asking(&nodes[1], &units);
    let from = cluster.owner(key);
    eventually(SECOND, "it waits", || state(&cluster.nodes[from], "slot", "waiting") == 1).await;
    let to = (from + 1) % 3;
    cluster.move_slot(key, to);
    let (from, to) = (&cluster.nodes[from], &cluster.nodes[to]);
    // Both have been there: the clock of the state goes on by their calls alone.
    let listening = || to.cli(&["PUBSUB", "SHARDCHANNELS", "fairq:{slot}:node:*"]).lines().count();
    eventually(5 * SECOND, "both listen at the new owner", || listening() == 2).await;
    assert_eq!((units.now(), taken_and_waiting(to, "slot")), (2, (2, 1)));
    drop(one);
    drop(handed_over("at the new owner", waiting).await);
    drop(two);

    let load = Load::start(&nodes, &units);
    sleep(millis(500)).await;
    let before = units.entered();
    cluster.move_slot(key, (cluster.owner(key) + 1) % 3);
    eventually(5 * SECOND, "grants go on", || units.entered() > before + 20).await;
    let asked = load.end().await;
    assert_eq!(units.entered(), asked + 3);
    assert_eq!(units.peak(), 2);
    let owner = &cluster.nodes[cluster.owner(key)];
    assert!(owner.port() != from.port() && owner.port() != to.port());
    end_check_on(owner, &[&nodes[0], &nodes[1]], &units).await;
}

// A failover that the sentinels are asked for, then one since the primary is killed, both under load.
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn queue_follows_the_primary() {
    let Some(binary) = oldest() else { return };
    let mut all = Sentinels::start(&binary).await;
    let settings =
        || RedisConfig::sentinel(Sentinels::NAME, all.urls()).ramp(Duration::ZERO).outage(Outage::Wait);
    let nodes = [node("failover", 2, settings()).await, node("failover", 2, settings()).await];
    let units = Units::default();

    // What is held is held through it, and what waits waits.
    let held = [hold(&nodes[0], &units).await.unwrap(), hold(&nodes[1], &units).await.unwrap()];
    let waiting = asking(&nodes[0], &units);
    eventually(SECOND, "it waits", || state(&all.servers[0], "failover", "waiting") == 1).await;
    let primary = all.failover().await;
    eventually(10 * SECOND, "both are at the new primary", || {
        all.servers[primary].cli(&["PUBSUB", "CHANNELS", "fairq:{failover}:node:*"]).lines().count() == 2
    })
    .await;
    assert_eq!(units.now(), 2);
    eventually(5 * SECOND, "it is known there", || {
        taken_and_waiting(&all.servers[primary], "failover") == (2, 1)
    })
    .await;
    drop(held);
    drop(soon("the grant", waiting).await.unwrap());

    all.ok().await;
    let load = Load::start(&nodes, &units);
    sleep(millis(500)).await;
    let primary = all.kill_primary().await;
    let before = units.entered();
    eventually(10 * SECOND, "grants go on", || units.entered() > before + 20).await;
    let asked = load.end().await;
    assert_eq!(units.entered(), asked + 3);
    // A rollback may cost the grants in the writes it lost: what two nodes are granted in one round trip.
    assert!(units.peak() <= 3, "{units:?}");
    end_check_on(&all.servers[primary], &[&nodes[0], &nodes[1]], &units).await;
}

// A full server that evicts nothing refuses what grows it and takes what gives back.
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn full_server_refuses_requests_and_takes_units_back() {
    let Some(binary) = oldest() else { return };
    let server = Server::with(&binary, &Options::default().max_memory(0, "noeviction")).await;
    let nodes = [node("full", 3, redis(server.url())).await, node("full", 3, redis(server.url())).await];
    let units = Units::default();
    let mut held = Vec::new();
    for index in 0..3 {
        held.push(hold(&nodes[index % 2], &units).await.unwrap());
    }
    let waiting = asking(&nodes[1], &units);
    eventually(SECOND, "it waits", || state(&server, "full", "waiting") == 1).await;

    server.cli(&["CONFIG", "SET", "maxmemory", "1"]);
    // On each node 20 clients that ask again as soon as they are refused: every call would have something new in it.
    let stop = Arc::new(AtomicBool::new(false));
    let refused: Vec<_> = (0..40)
        .map(|index| {
            let (queue, units, stop) = (nodes[index % 2].clone(), units.clone(), Arc::clone(&stop));
            tokio::spawn(async move {
                let mut refused = 0_u32;
                while !stop.load(Ordering::Acquire) {
                    let start = Instant::now();
                    let error = hold(&queue, &units).await.expect_err("the server is full");
                    assert_eq!(error.cause(), Cause::Unavailable);
                    assert!(start.elapsed() <= millis(750), "{:?}", start.elapsed());
                    refused += 1;
                }
                refused
            })
        })
        .collect();
    sleep(millis(200)).await;
    drop(held.pop());
    let granted = handed_over("to the one that waited before", waiting).await;
    eventually(millis(500), "its units are taken over", || taken_and_waiting(&server, "full") == (3, 0))
        .await;
    drop((held, granted));
    eventually(millis(500), "all units are back", || taken_and_waiting(&server, "full") == (0, 0)).await;
    // It lives on, past its lease were it not renewed. Nobody admits by itself.
    let live = || state(&server, "full", "live") == 2;
    assert!(live());
    stop.store(true, Ordering::Release);
    for refused in refused {
        let refused = soon("the refusals end", refused).await.unwrap();
        assert!(refused > 10, "{refused}");
    }
    assert_eq!((units.now(), units.entered()), (0, 4));

    server.cli(&["CONFIG", "SET", "maxmemory", "0"]);
    let start = Instant::now();
    for queue in &nodes {
        drop(soon("a request", hold(queue, &units)).await.unwrap());
    }
    assert!(start.elapsed() <= 2 * AT_ONCE_OVER_REDIS, "{:?}", start.elapsed());
    assert_eq!(units.peak(), 3);
    end_check_on(&server, &[&nodes[0], &nodes[1]], &units).await;
}

// The capacity is the whole queue's: raised by one node it grants on the other at once, lowered it grants nothing before what is
// in flight has come below it, and a node that attaches later does not undo what an operator set.
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn capacity_is_set_for_all_nodes() {
    let Some(binary) = oldest() else { return };
    let server = Server::start(&binary).await;
    let settings = || redis(server.url()).poll_interval(SECOND);
    let (here, there) = (node("capacity", 2, settings()).await, node("capacity", 2, settings()).await);
    let units = Units::default();
    let capacity_is = async |queue: &FairQueue, units: u32| {
        let told = || queue.stats().capacity == Limit::AtMost(units);
        eventually(2 * SECOND, &format!("a capacity of {units}"), told).await;
    };
    let mut held = vec![hold(&here, &units).await.unwrap(), hold(&here, &units).await.unwrap()];
    let waiting: Vec<_> = (0..3).map(|_| asking(&there, &units)).collect();
    eventually(SECOND, "three wait", || state(&server, "capacity", "waiting") == 3).await;

    here.set_capacity(5).unwrap();
    for waiting in waiting {
        held.push(handed_over("by the raised capacity", waiting).await);
    }
    assert_eq!(units.now(), 5);
    capacity_is(&there, 5).await;

    there.set_capacity(1).unwrap();
    capacity_is(&here, 1).await;
    let waiting = asking(&here, &units);
    eventually(SECOND, "one waits", || state(&server, "capacity", "waiting") == 1).await;
    let peak_before = units.entered();
    for left in (1..5).rev() {
        drop(held.pop());
        eventually(SECOND, "it is back", || state(&server, "capacity", "in_flight") == left).await;
    }
    sleep(millis(300)).await;
    assert_eq!((units.entered(), units.now()), (peak_before, 1), "nothing is granted above the capacity");
    drop(held.pop());
    drop(handed_over("below the lowered capacity", waiting).await);

    // Configured with another capacity, it changes nothing now, and is the last to have attached.
    let third = node("capacity", 4, settings()).await;
    capacity_is(&third, 1).await;
    capacity_is(&here, 1).await;
    let only = hold(&third, &units).await.unwrap();
    let ask = tower_fair_queue::Ask::new();
    assert_eq!(third.try_acquire(ask.clone()).await.unwrap_err().cause(), Cause::WouldWait);

    let waiting: Vec<_> = (0..4).map(|_| asking(&there, &units)).collect();
    eventually(SECOND, "four wait", || state(&server, "capacity", "waiting") == 4).await;
    here.clear_capacity();
    for queue in [&here, &there, &third] {
        capacity_is(queue, 4).await;
    }
    eventually(SECOND, "three are granted", || units.now() == 4).await;
    assert_eq!(state(&server, "capacity", "waiting"), 1);
    drop(only);
    for waiting in waiting {
        drop(soon("all are served", waiting).await.unwrap());
    }
    // Without an operator's, that of whoever attaches next counts.
    let fourth = node("capacity", 3, settings()).await;
    for queue in [&here, &there, &third, &fourth] {
        capacity_is(queue, 3).await;
    }
    end_check_on(&server, &[&here, &there, &third, &fourth], &units).await;
}
