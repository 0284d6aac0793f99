//! Redis loses what it knew, in the middle of the load of several processes: the cap holds, nobody loses the place or the permit.

mod support;

#[path = "support/example.rs"]
mod example;
#[path = "support/node_processes.rs"]
mod nodes;
#[path = "support/record.rs"]
mod record;

use std::time::Duration;

use tokio::time::sleep;

use crate::{
    nodes::{Nodes, heavy},
    record::{Peak, Records, now},
    support::redis::{Binary, Kind, Proxy, Sentinels, Server, require},
};

const CAPACITY: u32 = 7;
/// Two flows of requests that cost 1 or 2 and are held 20 to 200 ms: the line is about as long as a recovery. The capacity opens at
/// once after one, so that nothing but the recovery keeps the cap.
const LOAD: &str = "--requesters 30 --flows 2 --cost 2 --ramp 0";
/// How long the load goes on before the first fault and after the last, so that both find a full line.
const LOADED: Duration = Duration::from_secs(2);
/// A recovery takes 1.8 s of queue time.
const RECOVERED: Duration = Duration::from_secs(4);
/// How much earlier a request in one node has to have come than one in another, for their order to be known: as long as a call takes to
/// arrive where the connection has to be made anew.
const MARGIN: Duration = Duration::from_millis(1_200);
/// A reply and a push travel apart, and a lost reply is told again by the restate.
const LATE: Duration = Duration::from_millis(700);

fn redis() -> Option<Binary> {
    require(Kind::Redis70)
}

/// Two nodes at full load.
async fn loaded(url: &str, flags: &str) -> Nodes {
    let mut nodes = Nodes::new(CAPACITY, &format!("{LOAD} {flags}"));
    let started = [nodes.spawn(&[], url, ""), nodes.spawn(&[], url, "")];
    for node in started {
        nodes.ready(node).await;
    }
    // Held all along, in one or the other: whoever does not wait for it grants it again.
    for node in started {
        nodes.say(node, "ask 1");
    }
    busy(&nodes).await;
    nodes
}

/// Waits until the whole capacity is held, and a while longer.
async fn busy(nodes: &Nodes) {
    let since = now();
    let full = |records: &Records| records.peak_within(since, Duration::MAX).units >= CAPACITY.into();
    nodes.until("the capacity is used", RECOVERED + Duration::from_secs(3), full).await;
    sleep(LOADED).await;
}

/// P1, P2 and P5 of a run in which nothing may have been lost.
fn check(name: &str, records: &Records, most: u64) {
    let Peak { units, .. } = records.peak();
    eprintln!("{name}: peak {units} of {CAPACITY}, {} granted", records.granted());
    assert!(units <= most, "P1: {units} units at once, at most {most} allowed");
    records.check_all_granted();
    records.check_order(MARGIN, LATE);
}

// P1, P2, P5, P6: FLUSHALL, twice.
#[tokio::test]
async fn flush_costs_neither_cap_nor_place() {
    let Some(binary) = redis() else { return };
    let server = Server::start(&binary).await;
    let mut nodes = loaded(&server.url(), "").await;
    for _ in 0..2 {
        let flushed = now();
        server.cli(&["FLUSHALL"]);
        sleep(RECOVERED).await;
        let records = nodes.records();
        // What was granted before may be told a moment later; then nothing is until all have restated.
        let pause = records.first_taken(flushed + Duration::from_millis(300)).expect("it goes on") - flushed;
        eprintln!("granted again {pause:?} after FLUSHALL");
        assert!(pause > Duration::from_millis(1_500) && pause < Duration::from_millis(3_500), "{pause:?}");
    }
    busy(&nodes).await;
    check("FLUSHALL", &nodes.finish(&server).await, CAPACITY.into());
}

// P1 (not even exception d, since it joined long before): who sleeps through the recovery keeps what it holds until its lease ends.
#[tokio::test]
async fn flush_while_a_node_is_stopped_waits_for_what_it_holds() {
    let Some(binary) = redis() else { return };
    let server = Server::start(&binary).await;
    // All is held by the one that is stopped, so whatever the other is granted is too much.
    let mut nodes = Nodes::new(CAPACITY, "--flows 1 --hold 0..50 --ramp 0");
    let holder = nodes.start(&server.url(), "").await;
    nodes.say(holder, &format!("ask {CAPACITY}"));
    let all = CAPACITY as usize;
    nodes.until("the first holds all", Duration::from_secs(5), |r| r.granted() == all).await;
    let other = nodes.start(&server.url(), "--requesters 10").await;
    // Each has heard of the other.
    sleep(Duration::from_millis(1_500)).await;
    let stopped = nodes.stop(holder);
    server.cli(&["FLUSHALL"]);
    // Longer than a recovery with all well, shorter than the lease.
    sleep(Duration::from_millis(3_300)).await;
    nodes.cont(holder);
    sleep(Duration::from_secs(1)).await;
    assert_eq!(
        nodes.records().first_taken(stopped),
        None,
        "P1: the other was granted what the stopped one holds"
    );
    nodes.say(holder, &format!("release {CAPACITY}"));
    nodes.until("the other is served", Duration::from_secs(3), |r| r.granted() > 20).await;
    let records = nodes.finish(&server).await;
    assert!(records.requests.iter().any(|request| request.node == other));
    check("FLUSHALL with a node stopped", &records, CAPACITY.into());
}

// B47: SCRIPT FLUSH each half second. No request notices, none is granted twice.
#[tokio::test]
async fn lost_scripts_are_loaded_again() {
    let Some(binary) = redis() else { return };
    let server = Server::start(&binary).await;
    let mut nodes = loaded(&server.url(), "").await;
    let from = now();
    for _ in 0..if heavy() { 40 } else { 8 } {
        server.cli(&["SCRIPT", "FLUSH"]);
        sleep(Duration::from_millis(500)).await;
    }
    let span = now() - from;
    let records = nodes.finish(&server).await;
    check("SCRIPT FLUSH", &records, CAPACITY.into());
    // No recovery comes of it, with which hardly any would be granted: the units that are not kept make some 20 a second.
    let granted = records.taken_within(from, from + span) as f64 / span.as_secs_f64();
    assert!(granted > 10.0, "{granted} units a second");
}

// P1, P2, P5, P6: a restart that lost all, and the server away for a second before.
#[tokio::test]
async fn restart_without_data_costs_neither_cap_nor_place() {
    let Some(binary) = redis() else { return };
    let mut server = Server::start(&binary).await;
    let mut nodes = loaded(&server.url(), "").await;
    for away in [Duration::ZERO, Duration::from_secs(1)] {
        server.kill9();
        sleep(away).await;
        server.restart().await;
        busy(&nodes).await;
    }
    check("restart", &nodes.finish(&server).await, CAPACITY.into());
}

// P1 (a): after a restart from an older file at most what was granted since the file comes on top. In truth nothing does, as long as the
// first to come back has seen a later state than the file's.
#[tokio::test]
async fn restart_from_an_older_file_adds_at_most_the_lost_grants() {
    let Some(binary) = redis() else { return };
    let mut server = Server::start(&binary).await;
    let mut nodes = loaded(&server.url(), "").await;
    for age in [Duration::from_millis(100), Duration::from_secs(1)] {
        let saved = now();
        server.save();
        sleep(age).await;
        let killed = now();
        server.restart_from_save().await;
        busy(&nodes).await;
        let records = nodes.records();
        let lost = records.taken_within(saved, killed + Duration::from_millis(100));
        let peak = records.peak_within(killed, Duration::MAX).units;
        eprintln!("restart from a file {age:?} old: {lost} units granted since, peak {peak} of {CAPACITY}");
        assert!(peak <= u64::from(CAPACITY) + lost, "P1 (a)");
        assert!(peak <= CAPACITY.into(), "all nodes had seen a later state");
    }
    check("restart from an older file", &nodes.finish(&server).await, CAPACITY.into());
}

// P1: in the file the first node holds all, in truth the second does, and the first is back alone.
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn restart_from_an_older_file_waits_for_who_holds_now() {
    let Some(binary) = redis() else { return };
    let mut server = Server::start(&binary).await;
    let proxy = Proxy::start(server.port()).await;
    let mut nodes = Nodes::new(CAPACITY, "--flows 1 --ramp 0");
    let (first, second) = (nodes.start(&server.url(), "").await, nodes.start(&proxy.url(), "").await);
    let (all, soon) = (CAPACITY as usize, Duration::from_secs(5));
    nodes.say(first, &format!("ask {all}"));
    nodes.until("the first holds all", soon, |records| records.granted() == all).await;
    server.save();
    nodes.say(second, &format!("ask {all}"));
    sleep(Duration::from_millis(500)).await;
    nodes.say(first, &format!("release {all}"));
    nodes.until("the second holds all", soon, |records| records.granted() == 2 * all).await;
    nodes.say(first, &format!("ask {all}"));
    sleep(Duration::from_millis(500)).await;
    proxy.refuse().await;
    proxy.cut();
    server.restart_from_save().await;
    // Longer than a recovery with all well, shorter than the lease.
    sleep(Duration::from_secs(3)).await;
    assert_eq!(nodes.records().granted(), 2 * all, "P1: granted what the other holds");
    proxy.allow().await;
    sleep(Duration::from_secs(1)).await;
    assert_eq!(nodes.records().granted(), 2 * all, "P1: granted what the other holds");
    nodes.say(second, &format!("release {all}"));
    nodes.until("the first holds all", soon, |records| records.granted() == 3 * all).await;
    check("restart alone", &nodes.finish(&server).await, CAPACITY.into());
}

// P1, P2, P5, P6: a full server throws away any one key of the queue.
#[tokio::test]
async fn any_key_may_be_evicted() {
    let Some(binary) = redis() else { return };
    let server = Server::start(&binary).await;
    let mut nodes = loaded(&server.url(), "").await;
    let keys =
        ["state", "lines", "tickets", "heads", "flows", "permits", "nodes", "calls", "outbox", "expected"];
    for key in keys {
        let epoch = || server.cli(&["GETRANGE", "fairq:{test}:state", "8", "23"]);
        let (before, evicted) = (epoch(), now());
        if server.cli(&["DEL", &format!("fairq:{{test}}:{key}")]) == "0" {
            // `expected` is there during a recovery alone, `outbox` while a push is under way.
            assert!(["outbox", "expected"].contains(&key), "{key} is not there under load");
            continue;
        }
        let since = evicted + Duration::from_secs(1);
        nodes
            .until(&format!("{key} is made anew"), RECOVERED, |records| records.first_taken(since).is_some())
            .await;
        assert_ne!(epoch(), before, "{key} was not missed");
    }
    // The one key that only a recovery has, in a recovery.
    server.cli(&["FLUSHALL"]);
    let expected = || server.cli(&["DEL", "fairq:{test}:expected"]) == "1";
    let caught = (0..2_000).any(|_| expected());
    eprintln!("`expected` evicted while there: {caught}");
    busy(&nodes).await;
    check("evictions", &nodes.finish(&server).await, CAPACITY.into());
}

// P1 (a), P5, P6: a failover with both servers alive, so that the old primary grants until it is told, and one by its death.
#[tokio::test]
async fn failover_adds_at_most_the_grants_of_the_old_primary() {
    let Some(binary) = redis() else { return };
    let mut all = Sentinels::start(&binary).await;
    let sentinel = format!("--sentinel {},{}", Sentinels::NAME, all.urls().join(","));
    let mut nodes = loaded("", &sentinel).await;
    let from = now();
    all.failover().await;
    let to = now();
    busy(&nodes).await;
    let records = nodes.records();
    let lost = records.taken_within(from, to);
    let peak = records.peak_within(from, Duration::MAX).units;
    eprintln!("failover in {:?}: {lost} units granted meanwhile, peak {peak} of {CAPACITY}", to - from);
    assert!(peak <= u64::from(CAPACITY) + lost, "P1 (a)");
    all.ok().await;
    let from = now();
    let primary = all.kill_primary().await;
    let to = now();
    busy(&nodes).await;
    let records = nodes.records();
    let (lost, peak_after) = (records.taken_within(from, to), records.peak_within(from, Duration::MAX).units);
    eprintln!("killed and elected in {:?}: peak {peak_after} of {CAPACITY}", to - from);
    assert!(peak_after <= u64::from(CAPACITY) + lost, "P1 (a)");
    let records = nodes.finish(&all.servers[primary]).await;
    check("failover", &records, peak.max(peak_after).max(CAPACITY.into()));
}
