//! Chat examples that share one queue in Redis: each a process of its own, on a server of the test's own.

#![cfg(unix)]

#[path = "support/example.rs"]
mod example;
mod support;

use std::{process::Command, time::Duration};

use example::{Example, build, read, until};
use futures_util::future::join_all;
use http::StatusCode;
use http_body_util::BodyExt;
use support::redis::{Kind, Options, Server, free_port, require};
use tokio::time::{Instant, timeout};

const SOON: Duration = Duration::from_secs(10);
const LEASE: Duration = Duration::from_secs(5);
const HEARTBEAT: Duration = Duration::from_secs(1);
/// What the client and a busy machine may add to a bound.
const SLACK: Duration = Duration::from_millis(500);

fn chat(server: &Server, flags: &[&str]) -> Example {
    let url = server.url();
    Example::start("chat", &[&["--redis", &url, "--max-wait", "60s"], flags].concat())
}

/// The questions that Redis itself knows of, running and waiting.
fn known(server: &Server) -> u64 {
    let size = |key: &str| server.cli(&["ZCARD", &format!("fairq:{{chat}}:{key}")]);
    ["permits", "lines"].iter().map(|key| size(key).parse::<u64>().expect("a number")).sum()
}

/// When an answer began and ended.
async fn ask(example: &Example, number: usize) -> (Instant, Instant) {
    let response = example.ask(&format!("question {number}"), "shared").await;
    let began = Instant::now();
    let (status, _, body) = read(response).await;
    assert_eq!(status, StatusCode::OK, "{body}");
    assert!(body.contains("event: done\n"), "{body}");
    (began, Instant::now())
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn permits_that_come_back_on_one_server_start_questions_on_the_other() {
    let Some(binary) = require(Kind::Redis70) else { return };
    let server = &Server::start(&binary).await;
    let flags = ["--tokens", "20", "--token-interval", "150ms"];
    let (a, b) = (&chat(server, &flags), &chat(server, &flags));
    // The first three run on one server, and the next four wait on the other.
    let places = [a, a, a, b, b, b, b, a, a, b];
    let arrive = async |number: usize| {
        let before = async || (known(server) >= number as u64).then_some(());
        until("the one before has arrived", SOON, before).await;
        ask(places[number], number).await
    };
    let observe = async {
        for example in [a, b] {
            example.queue_is(3, 7, SOON).await;
        }
        assert_eq!((a.own().await, b.own().await), ((3, 2), (0, 5)), "the parts of the whole");
        let mut peak = 0;
        let over = async || {
            let (on_a, on_b) = (a.own().await, b.own().await);
            peak = peak.max(a.queue().await.0);
            (on_a == (0, 0) && on_b == (0, 0)).then_some(())
        };
        until("all have had their turn", 3 * SOON, over).await;
        assert_eq!(peak, 3);
    };
    let (answers, ()) = tokio::join!(join_all((0..10).map(arrive)), observe);

    assert!(answers.is_sorted_by_key(|&(began, _)| began), "they start in the order of their arrival");
    let mut ends: Vec<_> = answers.iter().map(|&(_, ended)| ended).collect();
    ends.sort();
    for ((began, _), end) in answers[3..].iter().zip(&ends) {
        // The client sees the two on two connections, hence the tolerance.
        assert!(*began + Duration::from_millis(50) >= *end, "each starts with a permit that came back");
        assert!(began.saturating_duration_since(*end) < SLACK, "and at once, on whichever server");
    }
    for example in [a, b] {
        example.queue_is(0, 0, SOON).await;
    }
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn what_a_killed_server_held_is_the_others_after_its_lease() {
    let Some(binary) = require(Kind::Redis70) else { return };
    let server = Server::start(&binary).await;
    let flags = ["--lease", "5s", "--tokens", "10000"];
    let (mut a, b) = (chat(&server, &flags), chat(&server, &flags));
    let running = join_all((0..3).map(|_| a.ask("endless", "killed"))).await;
    let waiting = async { join_all((0..3).map(|_| b.ask("and then?", "killed"))).await };
    let kill = async {
        b.queue_is(3, 3, SOON).await;
        a.kill9();
        Instant::now()
    };
    let (answers, killed) = tokio::join!(timeout(2 * SOON, waiting), kill);
    let answers = answers.expect("their turn comes");
    let took = killed.elapsed();
    assert!(answers.iter().all(|answer| answer.status() == StatusCode::OK));
    assert!(took < LEASE + HEARTBEAT + SLACK, "{took:?}");
    assert!(took > LEASE - HEARTBEAT - SLACK, "not while it may be alive: {took:?}");
    b.queue_is(3, 0, SOON).await;
    assert_eq!(b.own().await, (3, 0));
    drop(running);
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_server_that_is_stopped_leaves_its_permits_at_once() {
    let Some(binary) = require(Kind::Redis70) else { return };
    let server = Server::start(&binary).await;
    let flags = ["--capacity", "1", "--tokens", "10000", "--lease", "60s"];
    let (mut a, mut b) = (chat(&server, &flags), chat(&server, &flags));
    let running = a.ask("endless", "stopped").await;
    let waiting = async { (b.ask("and then?", "stopped").await, Instant::now()) };
    let stop = async {
        b.queue_is(1, 1, SOON).await;
        a.terminate();
        running.into_body().collect().await.expect_err("cut off after the grace");
        Instant::now()
    };
    let ((answer, began), cut_off) = tokio::join!(waiting, stop);
    assert_eq!(answer.status(), StatusCode::OK);
    let took = began.saturating_duration_since(cut_off);
    assert!(took < SLACK, "long before the lease is over: {took:?}");
    assert!(a.ended(SOON).await.success());

    // With the last server goes all that it had, though nobody is left to see to it.
    b.terminate();
    answer.into_body().collect().await.expect_err("cut off after the grace");
    assert!(b.ended(SOON).await.success());
    let left = |key: &str| server.cli(&["EXISTS", &format!("fairq:{{chat}}:{key}")]) == "1";
    assert!(!["permits", "lines", "tickets", "heads", "flows", "outbox"].into_iter().any(left));
}

#[test]
fn what_stands_in_the_way_is_told_and_ends_it() {
    let runtime = tokio::runtime::Runtime::new().unwrap();
    let Some(binary) = require(Kind::Redis70) else { return };
    let server = runtime.block_on(Server::with(&binary, &Options::default().password("hunter2")));
    let chat = build("chat");
    let nobody = format!("redis://127.0.0.1:{}", free_port());
    let wrong = format!("redis://:hunter3@127.0.0.1:{}", server.port());
    for (flags, code, said) in [
        (&["--redis", &*nobody][..], 1, "--redis: no connection to the server: "),
        (&["--redis", &*wrong], 1, "--redis: the server refused the credentials: "),
        (&["--redis", &*nobody, "--lease", "1s"], 2, "redis.lease must be between 5s and 3600s, got 1s"),
        (
            &["--redis", &*nobody, "--lease-lost", "abort"],
            2,
            "redis.lease_lost must be LeaseLost::Continue unless",
        ),
    ] {
        let began = Instant::now();
        let output = Command::new(&chat).args(["--port", "0"]).args(flags).output().unwrap();
        let stderr = String::from_utf8(output.stderr).unwrap();
        assert_eq!(output.status.code(), Some(code), "{flags:?}: {stderr}");
        assert!(stderr.starts_with(said), "{flags:?}: {stderr}");
        assert!(!stderr.contains("hunter"), "no secret is told: {stderr}");
        assert!(output.stdout.is_empty());
        assert!(began.elapsed() < SOON);
    }
}
