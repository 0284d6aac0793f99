//! One queue over two nodes and a Redis that is slow, deaf, forgetful or far away: nothing is lost and nothing is granted twice.

mod support;

use std::{
    sync::{
        Arc,
        atomic::{AtomicBool, AtomicUsize, Ordering},
    },
    time::Duration,
};

use axum::{Router, body::Body, routing::get};
use futures_util::future::join_all;
use support::{
    Raw, Script, Units, config, counter, eventually,
    nodes::{
        AT_ONCE_OVER_REDIS, Dice, Holding, end_check_on, heavy, hold, hold_ask, node, node_with, redis,
        state, taken_and_waiting,
    },
    redis::{Cluster, Kind, Options, Proxy, Rule, Server, Way, require},
    serve, soon,
};
use tokio::{
    task::{JoinHandle, JoinSet},
    time::{Instant, sleep, timeout},
};
use tower::{Layer, ServiceExt};
use tower_fair_queue::{Ask, FairQueue, FairQueueConfig, FairQueueLayer, Outage, RedisConfig};

const HOUR: Duration = Duration::from_secs(3_600);
const SECOND: Duration = Duration::from_secs(1);

fn millis(millis: u64) -> Duration {
    Duration::from_millis(millis)
}

async fn server() -> Option<Server> {
    Some(Server::start(&require(Kind::Redis70)?).await)
}

/// An acquire that runs by itself.
fn asking(queue: &FairQueue, units: &Units) -> JoinHandle<Holding> {
    let (queue, units) = (queue.clone(), units.clone());
    tokio::spawn(async move { hold(&queue, &units).await.unwrap_or_else(|error| panic!("{error}")) })
}

// B05: C=1, lease 1 h; 100 streams, each left by its client after the second event.
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn aborted_streams_give_their_permits_back() {
    let Some(server) = server().await else { return };
    let config = config("b05", 1).redis(redis(server.url()).lease(HOUR)).build().unwrap();
    let layer = FairQueueLayer::connect(config).await.unwrap();
    let (queue, units) = (layer.queue().clone(), Units::default());
    let stream = {
        let units = units.clone();
        async move || {
            let body = Script::new().holding(units.enter());
            let events = (0..1_000).fold(body, |body, _| body.data("data: event\n\n").sleep(millis(5)));
            ([("content-type", "text/event-stream")], Body::new(events))
        }
    };
    let plain = {
        let units = units.clone();
        async move || {
            let _unit = units.enter();
            "plain"
        }
    };
    let app = Router::new().route("/stream", get(stream)).route("/plain", get(plain)).layer(layer);
    let http = serve(app).await;
    for round in 0..100 {
        let mut client = Raw::getting(http.addr, "/stream").await;
        for _ in 0..2 {
            let event = soon("an event", client.until("data: event\n\n")).await;
            assert!(event.is_some(), "round {round}");
        }
    }
    let start = Instant::now();
    let answer = Raw::getting(http.addr, "/plain").await.answer().await;
    assert_eq!((answer.status, answer.text()), (200, "plain"));
    assert!(start.elapsed() <= AT_ONCE_OVER_REDIS, "{:?}", start.elapsed());
    assert_eq!((units.peak(), units.entered()), (1, 101));
    end_check_on(&server, &[&queue], &units).await;
}

// B09: C=1; the holder releases and the first waiter is dropped in the same instant, in both orders, with all on one node and
// with the holder, the first and the second waiter each somewhere else.
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn grant_to_a_waiter_that_leaves_goes_to_the_next() {
    let Some(server) = server().await else { return };
    let settings = || redis(server.url()).lease(HOUR).poll_interval(SECOND);
    let nodes = [node("b09", 1, settings()).await, node("b09", 1, settings()).await];
    let (units, mut dice) = (Units::default(), Dice::new());
    let mut holder = hold(&nodes[0], &units).await.unwrap();
    let runs = 1_000;
    for run in 0..runs {
        let [first, second] = [&nodes[run & 1], &nodes[run >> 1 & 1]];
        let first = asking(first, &units);
        eventually(SECOND, "the first waits", || state(&server, "b09", "waiting") == 1).await;
        let second = asking(second, &units);
        eventually(SECOND, "the second waits", || state(&server, "b09", "waiting") == 2).await;
        // A call takes some hundreds of microseconds, so that the two meet in each of its steps.
        let between = dice.time(millis(2));
        if run & 4 == 0 {
            drop(holder);
            spin(between);
            first.abort();
        } else {
            first.abort();
            spin(between);
            drop(holder);
        }
        // Granted before it was dropped, it holds; its end then is the drop of what it answered.
        drop(first);
        let start = Instant::now();
        holder = timeout(5 * SECOND, second).await.unwrap_or_else(|_| panic!("run {run} hangs")).unwrap();
        assert!(start.elapsed() <= AT_ONCE_OVER_REDIS, "run {run}: {:?} after {between:?}", start.elapsed());
    }
    drop(holder);
    assert_eq!(units.peak(), 1);
    end_check_on(&server, &[&nodes[0], &nodes[1]], &units).await;
}

/// Lets a time pass that is shorter than a timer can tell.
fn spin(time: Duration) {
    let start = Instant::now();
    while start.elapsed() < time {
        std::thread::yield_now();
    }
}

// B08, B23: what leaves the line, by its deadline or dropped, is out of it in Redis at once and not when it would be granted.
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn waiters_that_leave_are_out_of_the_line_at_once() {
    let Some(server) = server().await else { return };
    let builder = config("leave", 1).max_waiting(5);
    let settings = || redis(server.url()).lease(HOUR).poll_interval(SECOND);
    let (here, there) = (node_with(builder.clone(), settings()).await, node_with(builder, settings()).await);
    let units = Units::default();
    let held = hold(&here, &units).await.unwrap();
    let full = async || eventually(SECOND, "5 wait", || state(&server, "leave", "waiting") == 5).await;
    let empty = async || {
        eventually(AT_ONCE_OVER_REDIS, "none waits", || state(&server, "leave", "waiting") == 0).await;
    };
    for _ in 0..10 {
        let patience = Instant::now() + millis(100);
        let late: Vec<_> = (0..5)
            .map(|index| {
                let queue = [&here, &there][index % 2].clone();
                tokio::spawn(async move { queue.acquire(Ask::new().deadline(patience)).await })
            })
            .collect();
        full().await;
        let sixth = there.acquire(Ask::new()).await.unwrap_err();
        assert!(sixth.is_full(), "{sixth}");
        for ask in late {
            assert!(ask.await.unwrap().unwrap_err().is_timed_out());
        }
        empty().await;
        let dropped: Vec<_> = (0..5).map(|index| asking([&here, &there][index % 2], &units)).collect();
        full().await;
        dropped.iter().for_each(JoinHandle::abort);
        empty().await;
    }
    drop(held);
    assert_eq!(units.entered(), 1);
    end_check_on(&server, &[&here, &there], &units).await;
}

// B13: C=5; 500 acquires dropped at random within 20 ms, then 50 holds: exactly 5 at once.
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn dropped_acquires_neither_eat_nor_make_capacity() {
    let Some(server) = server().await else { return };
    let nodes = [node("b13", 5, redis(server.url())).await, node("b13", 5, redis(server.url())).await];
    let (units, mut dice) = (Units::default(), Dice::new());
    let mut dropped = JoinSet::new();
    for index in 0..500 {
        let (queue, units) = (nodes[index % 2].clone(), units.clone());
        let (start, length) = (dice.time(millis(200)), dice.time(millis(20)));
        dropped.spawn(async move {
            sleep(start).await;
            let acquire = async {
                let held = hold(&queue, &units).await.unwrap();
                std::future::pending::<()>().await;
                drop(held);
            };
            timeout(length, acquire).await.expect_err("it never ends by itself");
        });
    }
    soon("all are dropped", dropped.join_all()).await;
    assert!(units.peak() <= 5 && units.entered() > 0, "{units:?}");
    eventually(2 * SECOND, "all is back", || taken_and_waiting(&server, "b13") == (0, 0)).await;
    end_check_on(&server, &[&nodes[0], &nodes[1]], &units).await;

    let units = Units::default();
    let start = Instant::now();
    let holds = (0..50).map(|index| {
        let (queue, units) = (&nodes[index % 2], &units);
        async move {
            let _held = hold(queue, units).await.unwrap();
            sleep(millis(200)).await;
        }
    });
    soon("all are served", join_all(holds)).await;
    assert_eq!((units.peak(), units.entered()), (5, 50));
    assert!(start.elapsed() < millis(2_000 + 50 * 20), "{:?}", start.elapsed());
    end_check_on(&server, &[&nodes[0], &nodes[1]], &units).await;
}

// B14: two layers built apart with the same name share; different names do not.
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn layers_share_by_name() {
    let Some(server) = server().await else { return };
    let layer = async |name: &str| {
        let config = FairQueueConfig::builder(name).capacity(5).redis(redis(server.url())).build().unwrap();
        FairQueueLayer::connect(config).await.unwrap()
    };
    let layers = [layer("b14").await, layer("b14").await, layer("b14-other").await];
    let units = [Units::default(), Units::default()];
    let mut requests = JoinSet::new();
    for index in 0..60 {
        let counted = units[usize::from(index % 3 == 2)].clone();
        let handler = tower::service_fn(move |_: http::Request<Body>| {
            let counted = counted.clone();
            async move {
                let _unit = counted.enter();
                sleep(millis(50)).await;
                Ok::<_, std::convert::Infallible>(http::Response::new(Body::empty()))
            }
        });
        let service = layers[index % 3].layer(handler);
        requests
            .spawn(async move { service.oneshot(http::Request::new(Body::empty())).await.unwrap().status() });
    }
    let answers = soon("all are answered", requests.join_all()).await;
    assert!(answers.iter().all(|status| *status == 200), "{answers:?}");
    assert_eq!(units.map(|units| (units.peak(), units.entered())), [(5, 40), (5, 20)]);
}

// B27: subscribing takes 300 ms, and the release comes somewhere in the attaching of the node that waits. Lease 1 h.
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn release_while_the_waiter_subscribes_is_not_missed() {
    let Some(server) = server().await else { return };
    let proxy = Proxy::start(server.port()).await;
    proxy.set(Way::Requests, Rule::DelayOf(b"SUBSCRIBE", millis(300)..millis(301)));
    let (url, far) = (server.url(), proxy.url());
    let (queues, rounds) = (25, 8);
    let mut runs = JoinSet::new();
    for index in 0..queues {
        let (url, far, mut dice) = (url.clone(), far.clone(), Dice::new());
        runs.spawn(async move {
            let (name, units) = (format!("b27-{index}"), Units::default());
            let settings = |url: &str| redis(url).lease(HOUR).poll_interval(SECOND).outage(Outage::Wait);
            let here = node(&name, 1, settings(&url)).await;
            for round in 0..rounds {
                let held = hold(&here, &units).await.unwrap();
                // It subscribes and asks at once; nothing has waited for it to be ready.
                let there = FairQueue::new(config(&name, 1).redis(settings(&far)).build().unwrap());
                let start = Instant::now();
                let waiting = asking(&there, &units);
                sleep(dice.time(millis(450))).await;
                drop(held);
                let released = Instant::now();
                let granted = timeout(10 * SECOND, waiting).await;
                let granted = granted.unwrap_or_else(|_| panic!("round {round} of {name} hangs")).unwrap();
                let late = released.elapsed();
                assert!(
                    late <= millis(1_300),
                    "round {round}: {late:?}, {:?} after the ask",
                    start.elapsed()
                );
                drop(granted);
                assert!(soon("it detaches", there.drain(SECOND)).await.is_complete());
            }
            assert_eq!((units.peak(), units.entered()), (1, 2 * rounds));
        });
    }
    soon("all runs", runs.join_all()).await;
}

/// How many connections listen for grants of the queue, and the channels they listen on.
fn subscriptions(server: &Server, name: &str) -> (usize, usize) {
    let channels = server.try_cli(&["PUBSUB", "CHANNELS", &format!("fairq:{{{name}}}:node:*")]);
    let channels = channels.unwrap_or_default();
    let clients = server.try_cli(&["CLIENT", "LIST", "TYPE", "PUBSUB"]).unwrap_or_default();
    (channels.lines().count(), clients.lines().count())
}

// B28: the pub/sub connections are killed again and again, and Redis is restarted; each time grants go over nodes by push again. With a
// poll of 1 s, what comes within 250 ms five times in a row was pushed.
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn subscriptions_come_back() {
    let Some(mut server) = server().await else { return };
    let settings = || redis(server.url()).poll_interval(SECOND).outage(Outage::Wait);
    let (here, there) = (node("b28", 1, settings()).await, node("b28", 1, settings()).await);
    let units = Units::default();
    for round in 0..10 {
        let held = hold(&here, &units).await.unwrap();
        let waiting: Vec<_> = (0..10).map(|_| asking(&there, &units)).collect();
        eventually(SECOND, "10 wait", || state(&server, "b28", "waiting") == 10).await;
        let limit = if round % 5 == 4 {
            server.restart().await;
            3 * SECOND
        } else {
            server.cli(&["CLIENT", "KILL", "TYPE", "PUBSUB"]);
            millis(1_500)
        };
        let start = Instant::now();
        drop(held);
        let mut waiting = JoinSet::from_iter(waiting);
        let first = timeout(5 * SECOND, waiting.join_next()).await;
        let took = start.elapsed();
        assert!(first.is_ok() && took <= limit, "round {round}: the first grant after {took:?}");
        drop(first);
        let rest = async {
            while let Some(granted) = waiting.join_next().await {
                drop(granted.unwrap().unwrap());
            }
        };
        soon("all are served", rest).await;
        eventually(5 * SECOND, "each node listens, once", || subscriptions(&server, "b28") == (2, 2)).await;
        for _ in 0..5 {
            let held = hold(&here, &units).await.unwrap();
            let waiting = asking(&there, &units);
            eventually(SECOND, "it waits", || state(&server, "b28", "waiting") == 1).await;
            let start = Instant::now();
            drop(held);
            drop(soon("the handover", waiting).await.unwrap());
            assert!(start.elapsed() < AT_ONCE_OVER_REDIS, "round {round}: {:?}", start.elapsed());
        }
    }
    assert_eq!(units.peak(), 1);
    end_check_on(&server, &[&here, &there], &units).await;
}

// B33: C=4, 100 ms each. A tenant on one node queues 1,000; what others send from the other node is served next.
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn backlog_of_one_tenant_holds_up_nobody_on_another_node() {
    let Some(server) = server().await else { return };
    let made = async || node_with(config("b33", 4).max_waiting(2_000), redis(server.url())).await;
    let (here, there) = (made().await, made().await);
    let units = Units::default();
    let ask = |queue: &FairQueue, flow: String| {
        let (queue, units) = (queue.clone(), units.clone());
        async move {
            let start = Instant::now();
            let held = hold_ask(&queue, &units, Ask::new().flow(flow)).await;
            let waited = start.elapsed();
            if held.is_ok() {
                sleep(millis(100)).await;
            }
            drop(held);
            waited
        }
    };
    let mut backlog = JoinSet::new();
    for _ in 0..1_000 {
        backlog.spawn(ask(&here, "noisy".to_owned()));
    }
    sleep(SECOND).await;
    let (start, before) = (Instant::now(), units.entered());
    let waited = ask(&there, "single".to_owned()).await;
    assert!(waited <= millis(200 + 250), "{waited:?}");
    let quiet = join_all((0..10).map(|index| ask(&there, format!("quiet{index}")))).await;
    assert!(quiet.iter().all(|waited| *waited <= millis(400 + 250)), "{quiet:?}");
    sleep(2 * SECOND).await;
    let (took, served) = (start.elapsed(), units.entered() - before);
    let ideal = 4.0 * took.as_secs_f64() / 0.1;
    let rate = f64::from(u32::try_from(served).unwrap()) / ideal;
    assert!(rate >= 0.95, "{served} served in {took:?}, {rate:.3} of what is possible");
    assert_eq!(units.peak(), 4);
    backlog.shutdown().await;
    end_check_on(&server, &[&here, &there], &units).await;
}

// B42: each reply is late by 0 to 1 s with a timeout of 500 ms, with short times between in which all is well; 1,000 acquires of two nodes, 20 at
// once, a third of them dropped at random.
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn late_replies_are_not_taken_for_others() {
    let Some(server) = server().await else { return };
    let proxy = Arc::new(Proxy::start(server.port()).await);
    let settings = || redis(proxy.url()).lease(5 * SECOND).outage(Outage::Wait);
    let nodes = [node("b42", 4, settings()).await, node("b42", 4, settings()).await];
    let (units, mut dice) = (Units::default(), Dice::new());
    let weather = {
        let (proxy, mut dice) = (Arc::clone(&proxy), Dice::new());
        tokio::spawn(async move {
            loop {
                proxy.set(Way::Replies, Rule::Delay(Duration::ZERO..SECOND));
                sleep(dice.time(SECOND)).await;
                proxy.heal();
                sleep(dice.time(millis(400))).await;
            }
        })
    };
    let (total, budget) = (1_000, if heavy() { 120 * SECOND } else { 25 * SECOND });
    let (start, mut asks) = (Instant::now(), JoinSet::new());
    let mut asked = 0;
    while asked < total && start.elapsed() < budget {
        if asks.len() == 20 {
            soon("one of 20 ends", asks.join_next()).await.unwrap().unwrap();
        }
        asked += 1;
        let (queue, units) = (nodes[asked % 2].clone(), units.clone());
        let (patience, length) = (dice.time(millis(600)), dice.time(millis(10)));
        let patience = if dice.below(3) == 0 { patience } else { 20 * SECOND };
        asks.spawn(async move {
            if let Ok(Ok(held)) = timeout(patience, hold(&queue, &units)).await {
                sleep(length).await;
                drop(held);
            }
        });
    }
    weather.abort();
    proxy.heal();
    soon("all end", asks.join_all()).await;
    eprintln!("{asked} asked, {} granted in {:?}", units.entered(), start.elapsed());
    assert!(units.entered() > 50, "{units:?} of {asked}");
    assert!(units.peak() <= 4, "{units:?}");
    eventually(5 * SECOND, "all is back", || taken_and_waiting(&server, "b42") == (0, 0)).await;
    end_check_on(&server, &[&nodes[0], &nodes[1]], &units).await;
}

// B44: C=20, lease 1 h; Redis grants 20 and its replies are lost. Then the same with the requests, which arrive when nobody wants them any more.
// On one thread the engine runs after all 20 have asked, so that they go into one call.
#[tokio::test]
async fn grants_that_nobody_heard_of_come_back() {
    let Some(server) = server().await else { return };
    let proxy = Proxy::start(server.port()).await;
    let settings = |url: String| redis(url).lease(HOUR).outage(Outage::Wait);
    let far = node("b44", 20, settings(proxy.url())).await;
    let near = node("b44", 20, settings(server.url())).await;
    let units = Units::default();
    for way in [Way::Replies, Way::Requests] {
        let rule = if way == Way::Replies { Rule::Swallow } else { Rule::Hold };
        proxy.set(way, rule);
        let asks: Vec<_> = (0..20).map(|_| asking(&far, &units)).collect();
        if way == Way::Replies {
            eventually(SECOND, "all are granted", || state(&server, "b44", "in_flight") == 20).await;
        } else {
            // Longer than the timeout: the engine has given the call up.
            sleep(millis(700)).await;
        }
        assert_eq!(units.now(), 0, "nobody has heard of a grant");
        asks.iter().for_each(JoinHandle::abort);
        proxy.heal();
        eventually(2 * SECOND, "nothing is held", || taken_and_waiting(&server, "b44") == (0, 0)).await;
        for queue in [&near, &far] {
            let start = Instant::now();
            drop(soon("a new request", hold(queue, &units)).await.unwrap());
            assert!(start.elapsed() <= AT_ONCE_OVER_REDIS, "{way:?}: {:?}", start.elapsed());
        }
    }
    end_check_on(&server, &[&near, &far], &units).await;
}

// B47: the script cache is flushed every second under 100 requests a second, and Redis is restarted once: with its data, then without.
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn lost_scripts_are_loaded_again() {
    let Some(mut server) = server().await else { return };
    let nodes = [
        node("b47", 5, redis(server.url()).outage(Outage::Wait)).await,
        node("b47", 5, redis(server.url()).outage(Outage::Wait)).await,
    ];
    let (units, stop) = (Units::default(), Arc::new(AtomicBool::new(false)));
    let load = {
        let (nodes, units, stop) = (nodes.clone(), units.clone(), Arc::clone(&stop));
        tokio::spawn(async move {
            let (mut asks, mut asked) = (JoinSet::new(), 0);
            while !stop.load(Ordering::Acquire) {
                let (queue, units) = (nodes[asked % 2].clone(), units.clone());
                asks.spawn(async move {
                    let held = hold(&queue, &units).await.unwrap_or_else(|error| panic!("{error}"));
                    sleep(millis(20)).await;
                    drop(held);
                });
                asked += 1;
                sleep(millis(10)).await;
            }
            asks.join_all().await;
            asked
        })
    };
    let (seconds, mut flushed) = (if heavy() { 20 } else { 6 }, 0);
    for second in 0..seconds {
        server.cli(&["SCRIPT", "FLUSH"]);
        flushed += 1;
        if second == seconds / 3 {
            server.restart_with_data().await;
        }
        if second == seconds * 2 / 3 {
            server.restart().await;
        }
        sleep(SECOND).await;
    }
    stop.store(true, Ordering::Release);
    let asked = soon("all are served", load).await.unwrap();
    assert_eq!(units.entered(), asked, "each was granted once");
    assert_eq!(counter("b47", "fairqueue_granted_units_total", None), asked as u64);
    assert!(units.peak() <= 5, "{units:?} over {flushed} flushes");
    end_check_on(&server, &[&nodes[0], &nodes[1]], &units).await;
}

// B48: three masters, three tenants, 500 requests over two nodes, by a user that may touch the queue's own keys alone.
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn cluster_keeps_a_queue_in_one_slot() {
    let Some(binary) = require(Kind::Redis70) else { return };
    let rules = ">secret ~fairq:{b48}:* &fairq:{b48}:* +@all -@admin";
    let cluster = Cluster::with(&binary, Options::default().user("app", rules)).await;
    let urls = || cluster.nodes.iter().map(|node| node.url_as("app", "secret"));
    let made = async || node("b48", 5, RedisConfig::cluster(urls()).ramp(Duration::ZERO)).await;
    let nodes = [made().await, made().await];
    let units = Units::default();
    let served = AtomicUsize::new(0);
    let requests = (0..500).map(|index| {
        let (nodes, units, served) = (&nodes, &units, &served);
        async move {
            let ask = Ask::new().flow(format!("tenant {}", index % 3));
            let held =
                hold_ask(&nodes[index % 2], units, ask).await.unwrap_or_else(|error| panic!("{error}"));
            sleep(millis(10)).await;
            drop(held);
            served.fetch_add(1, Ordering::AcqRel);
        }
    });
    soon("all are served", join_all(requests)).await;
    assert_eq!((served.into_inner(), units.peak()), (500, 5));
    let owner = &cluster.nodes[cluster.owner("fairq:{b48}:state")];
    assert_eq!(owner.cli(&["ACL", "LOG"]), "");
    end_check_on(owner, &[&nodes[0], &nodes[1]], &units).await;
    let others = cluster.nodes.iter().filter(|node| node.port() != owner.port());
    assert!(others.map(|node| node.cli(&["DBSIZE"])).all(|size| size == "0"));
}
