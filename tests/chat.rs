//! The chat example as a process of its own, over plain HTTP.

#![cfg(unix)]

#[path = "support/example.rs"]
mod example;

use std::{io::ErrorKind, process::Command, time::Duration};

use axum::body::Body;
use example::{Example, build, read, until};
use futures_util::future::join_all;
use http::{HeaderMap, Request, StatusCode};
use http_body_util::BodyExt;
use tokio::{
    io::{AsyncReadExt, AsyncWriteExt},
    net::{TcpSocket, TcpStream},
    time::Instant,
};

const SOON: Duration = Duration::from_secs(5);
/// What the example gives to running answers once it is asked to stop.
const GRACE: Duration = Duration::from_secs(5);

/// One question asked: when its answer began and ended, and what it was.
struct Asked {
    began: Instant,
    ended: Instant,
    status: StatusCode,
    headers: HeaderMap,
    body: String,
}

async fn ask(example: &Example, question: &str, conversation: &str) -> Asked {
    let response = example.ask(question, conversation).await;
    let began = Instant::now();
    let (status, headers, body) = read(response).await;
    Asked { began, ended: Instant::now(), status, headers, body }
}

/// A question over a socket of the test's own, which can be closed. The body is chunked, since hyper reads a short one of known
/// length ahead by itself.
async fn ask_raw(example: &Example, conversation: &str) -> TcpStream {
    let body = format!(r#"{{"question":"who is there?","conversation":"{conversation}"}}"#);
    let request = format!(
        "POST /chat HTTP/1.1\r\nhost: {}\r\ncontent-type: application/json\r\ntransfer-encoding: chunked\r\n\r\n\
         {:x}\r\n{body}\r\n0\r\n\r\n",
        example.address(),
        body.len()
    );
    let mut socket = TcpStream::connect(example.address()).await.unwrap();
    socket.write_all(request.as_bytes()).await.unwrap();
    socket
}

/// A connection whose client asks for more and more and reads none of it, until the server has stopped to read as well.
async fn stalled(example: &Example) -> TcpStream {
    let socket = TcpSocket::new_v4().unwrap();
    socket.set_recv_buffer_size(2_048).unwrap();
    socket.set_send_buffer_size(2_048).unwrap();
    let socket = socket.connect(example.address().parse().unwrap()).await.unwrap();
    let requests = "GET /metrics HTTP/1.1\r\nhost: x\r\n\r\n".repeat(1_000);
    let (mut sent, mut stuck) = (0, 0);
    let full = async || {
        match socket.try_write(&requests.as_bytes()[sent..]) {
            Ok(more) => (sent, stuck) = ((sent + more) % requests.len(), 0),
            Err(error) if error.kind() == ErrorKind::WouldBlock => stuck += 1,
            Err(error) => panic!("the server closed the connection: {error}"),
        }
        (stuck == 25).then_some(())
    };
    until("the server has stopped to read", 2 * SOON, full).await;
    socket
}

fn problem(asked: &Asked, cause: &str) -> u64 {
    assert_eq!(asked.status, StatusCode::SERVICE_UNAVAILABLE, "{}", asked.body);
    assert_eq!(asked.headers["content-type"], "application/problem+json");
    let problem: serde_json::Value = serde_json::from_str(&asked.body).expect("JSON");
    assert_eq!(problem["cause"], cause);
    let retry_after = asked.headers["retry-after"].to_str().unwrap().parse().unwrap();
    assert!(retry_after >= 1);
    assert_eq!(problem["retry_after"], retry_after);
    retry_after
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn ten_at_once_on_three_permits_start_one_by_one_in_order() {
    let example =
        &Example::start("chat", &["--tokens", "20", "--token-interval", "100ms", "--max-wait", "30s"]);
    let arrive = async |number: u64| {
        // Each is sent once the one before it stands in the queue, so their order of arrival is known.
        let before = async || {
            let (in_flight, waiting) = example.queue().await;
            (in_flight + waiting >= number).then_some(())
        };
        until("the one before has arrived", SOON, before).await;
        ask(example, &format!("question {number}"), "ten").await
    };
    let observe = async {
        example.queue_is(3, 7, SOON).await;
        let asked = Instant::now();
        assert_eq!(example.get("/healthz").await, (StatusCode::OK, "ok\n".to_owned()));
        let (status, metrics) = example.get("/metrics").await;
        assert_eq!(status, StatusCode::OK);
        assert!(metrics.contains("fairqueue_in_flight_units{queue=\"chat\"} 3\n"), "{metrics}");
        assert!(metrics.contains("fairqueue_waiting_requests{queue=\"chat\"} 7\n"), "{metrics}");
        assert!(asked.elapsed() < Duration::from_millis(500), "they do not wait for a permit");
        let mut peak = 0;
        let drained = async || {
            let (in_flight, waiting) = example.queue().await;
            peak = peak.max(in_flight);
            (in_flight + waiting == 0).then_some(())
        };
        until("all have had their turn", 3 * SOON, drained).await;
        assert_eq!(peak, 3);
    };
    let (answers, ()) = tokio::join!(join_all((0..10).map(arrive)), observe);

    for asked in &answers {
        assert_eq!(asked.status, StatusCode::OK, "{}", asked.body);
        assert_eq!(asked.headers["content-type"], "text/event-stream");
        assert_eq!(asked.body.matches("event: token\n").count(), 20);
        assert!(asked.body.contains("event: done\n"));
    }
    assert!(answers.is_sorted_by_key(|asked| asked.began), "they start in the order of their arrival");
    let mut ends: Vec<_> = answers.iter().map(|asked| asked.ended).collect();
    ends.sort();
    // The client sees the end of one answer and the start of the next on two connections, hence the tolerance.
    for (asked, end) in answers[3..].iter().zip(&ends) {
        assert!(asked.began + Duration::from_millis(50) >= *end, "each starts with a permit that came back");
        assert!(asked.began.saturating_duration_since(*end) < Duration::from_millis(500), "and at once");
    }
    let kept = example.history("ten").await;
    assert_eq!(kept.len(), 10);
    assert!(kept.iter().all(|kept| kept["status"] == "answered"), "{kept:?}");
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn whoever_waits_past_the_deadline_is_told_and_kept() {
    let flags = ["--capacity", "1", "--max-wait", "700ms", "--tokens", "30", "--token-interval", "100ms"];
    let example = &Example::start("chat", &flags);
    let first = async { ask(example, "first", "deadline").await };
    let second = async {
        example.queue_is(1, 0, SOON).await;
        let began = Instant::now();
        (ask(example, "<b>second</b>", "deadline").await, began.elapsed())
    };
    let (first, (second, waited)) = tokio::join!(first, second);

    assert!(first.body.contains("event: done\n"));
    assert!(waited >= Duration::from_millis(700), "{waited:?}");
    assert!(waited < Duration::from_millis(1_200), "{waited:?}");
    let retry_after = problem(&second, "timed_out");

    let kept = example.history("deadline").await;
    let rejected = kept.iter().find(|kept| kept["status"] == "rejected").expect("the rejected question");
    assert_eq!(rejected["question"], "<b>second</b>");
    assert_eq!(rejected["cause"], "timed_out");
    assert_eq!(rejected["answer"], format!("Too many are asking me now. Try again in {retry_after} s."));
    let answered = kept.iter().find(|kept| kept["status"] == "answered").expect("the answered question");
    assert_eq!(answered["question"], "first");
    assert_eq!(answered["answer"].as_str().unwrap().split(' ').count(), 30);

    let (_, metrics) = example.get("/metrics").await;
    for line in [
        r#"fairqueue_wait_seconds_bucket{queue="chat",outcome="granted",le="0.7"} 1"#,
        r#"fairqueue_wait_seconds_bucket{queue="chat",outcome="timed_out",le="0.7"} 0"#,
        r#"fairqueue_wait_seconds_bucket{queue="chat",outcome="timed_out",le="+Inf"} 1"#,
        r#"fairqueue_hold_seconds_bucket{queue="chat",le="2.5"} 0"#,
        r#"fairqueue_hold_seconds_bucket{queue="chat",le="+Inf"} 1"#,
    ] {
        assert!(metrics.contains(line), "{line} in\n{metrics}");
    }
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_client_that_closes_its_socket_in_line_leaves_the_line() {
    let example = Example::start("chat", &["--capacity", "1"]);
    let running = example.ask("long", "leaver").await;
    let parked = ask_raw(&example, "leaver").await;
    example.queue_is(1, 1, SOON).await;
    drop(parked);
    example.queue_is(1, 0, Duration::from_secs(2)).await;
    let (_, metrics) = example.get("/metrics").await;
    assert!(metrics.contains(r#"fairqueue_requests_total{queue="chat",outcome="cancelled"} 1"#), "{metrics}");
    drop(running);
    example.queue_is(0, 0, Duration::from_secs(2)).await;
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn an_answer_is_kept_as_far_as_its_reader_stayed() {
    let example = Example::start("chat", &["--token-interval", "20ms", "--tokens", "1000"]);
    let mut answer = example.ask("and then?", "reader").await.into_body();
    for _ in 0..5 {
        answer.frame().await.expect("the answer goes on").unwrap();
    }
    drop(answer);
    let kept = async || example.history("reader").await.into_iter().next();
    let kept = until("the history has it", Duration::from_secs(2), kept).await;
    assert_eq!(kept["status"], "interrupted");
    let words = kept["answer"].as_str().unwrap().split(' ').count();
    assert!((5..500).contains(&words), "{words}");
    example.queue_is(0, 0, Duration::from_secs(2)).await;
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_body_over_the_bound_never_reaches_the_line() {
    let example = Example::start("chat", &["--capacity", "1"]);
    let running = example.ask("long", "bound").await;
    let post = async |size: usize| {
        let request = Request::post(example.url("/chat")).header("content-type", "application/json");
        example.send(request.body(Body::from(vec![b' '; size])).unwrap()).await.status()
    };
    assert_eq!(post(64 * 1024 + 1).await, StatusCode::PAYLOAD_TOO_LARGE);
    drop(running);
    assert_eq!(post(64 * 1024).await, StatusCode::BAD_REQUEST, "blanks are no JSON, but they are let in");
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn only_the_page_may_read_across_ports() {
    let example = Example::start("chat", &[]);
    let allowed = async |origin: String| {
        let request = Request::options(example.url("/chat")).header("origin", origin);
        let request = request.header("access-control-request-method", "POST").body(Body::empty()).unwrap();
        example.send(request).await.headers().get("access-control-allow-origin").cloned()
    };
    let own = example.url("");
    assert_eq!(allowed(own.clone()).await.expect("the page's own origin"), own.as_str());
    assert_eq!(allowed("http://example.com".to_owned()).await, None);
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn stopped_while_full_it_answers_the_waiting_and_lets_the_running_end() {
    let mut example = Example::start("chat", &["--tokens", "20", "--token-interval", "100ms"]);
    let stopped = {
        let example = &example;
        // A connection that stays open without a request must not keep the process.
        let mut idle = TcpStream::connect(example.address()).await.unwrap();
        idle.write_all(b"GET /healthz HTTP/1.1\r\nhost: x\r\n\r\n").await.unwrap();
        assert!(idle.read(&mut [0; 1024]).await.unwrap() > 0);

        let running = join_all((0..3).map(|_| ask(example, "runs", "stop")));
        let waiting = async {
            example.queue_is(3, 0, SOON).await;
            join_all((0..2).map(|_| ask(example, "waits", "stop"))).await
        };
        let stop = async {
            example.queue_is(3, 2, SOON).await;
            let now = Instant::now();
            example.terminate();
            now
        };
        let (running, waiting, stopped) = tokio::join!(running, waiting, stop);
        for asked in &waiting {
            problem(asked, "shutting_down");
            assert!(asked.ended - stopped < Duration::from_millis(500), "{:?}", asked.ended - stopped);
        }
        for asked in &running {
            assert!(asked.body.contains("event: done\n"), "{}", asked.body);
            assert!(asked.ended > stopped);
        }
        drop(idle);
        stopped
    };
    let status = example.ended(GRACE + Duration::from_secs(2)).await;
    assert!(status.success(), "{status}");
    assert!(stopped.elapsed() < GRACE, "it does not wait for the grace once the last answer is through");
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn stopped_under_endless_answers_and_a_stalled_reader_it_ends_with_the_grace() {
    let mut example = Example::start("chat", &["--tokens", "10000", "--token-interval", "1ms"]);
    let stalled = stalled(&example).await;
    let endless = example.ask("endless", "endless").await;
    let mut half_sent = TcpStream::connect(example.address()).await.unwrap();
    half_sent.write_all(b"POST /chat HTTP/1.1\r\nhost:").await.unwrap();
    example.queue_is(1, 0, SOON).await;

    let stopped = Instant::now();
    example.terminate();
    let cut_off = endless.into_body().collect().await.expect_err("an answer cut off never looks complete");
    assert!(
        stopped.elapsed() >= GRACE - Duration::from_millis(100),
        "{cut_off} after {:?}",
        stopped.elapsed()
    );
    let status = example.ended(Duration::from_secs(4)).await;
    assert!(status.success(), "{status}");
    assert!(stopped.elapsed() < GRACE + Duration::from_secs(2), "{:?}", stopped.elapsed());
    drop((stalled, half_sent));
}

/// What is said of an address that is none of Redis.
const REFUSED: &str = if cfg!(feature = "redis") {
    "redis.url must be redis://"
} else {
    "--redis: this program was built without Redis; run it with `cargo run --features redis --example chat"
};

#[test]
fn bad_flags_are_named_and_end_with_2() {
    let chat = build("chat");
    for (flags, said) in [
        (&["--capacity", "0"][..], "--capacity: takes a whole number from 1 to 4294967295, not \"0\""),
        (&["--capacity=-1"], "--capacity: takes a whole number from 1 to 4294967295, not \"-1\""),
        (&["--port", "65536"], "--port: takes a whole number from 0 to 65535, not \"65536\""),
        (
            &["--max-wait", "20"],
            "--max-wait: takes a time from 1ms to 1440m, such as 500ms, 20s or 1m, not \"20\"",
        ),
        (&["--max-wait", "0s"], "--max-wait: takes a time"),
        (&["--max-wait=99999999999999999999m"], "--max-wait: takes a time"),
        (&["--token-interval", "fast"], "--token-interval: takes a time"),
        (&["--tokens"], "--tokens: takes a whole number from 1 to 10000, not \"\""),
        (&["--max-waiting", "many"], "--max-waiting: takes a whole number"),
        (&["--speed", "9"], "--speed: there is no such flag; --help lists them"),
        (&["--outage", "panic"], "--outage: takes one of wait, reject, local, admit, not \"panic\""),
        (&["--lease-lost="], "--lease-lost: takes one of continue, abort, not \"\""),
        (&["--lease", "10s"], "--lease: has no meaning without --redis"),
        (&["--redis", "http://127.0.0.1"], REFUSED),
    ] {
        let output = Command::new(&chat).args(flags).output().unwrap();
        let stderr = String::from_utf8(output.stderr).unwrap();
        assert_eq!(output.status.code(), Some(2), "{flags:?}: {stderr}");
        assert!(stderr.starts_with(said), "{flags:?}: {stderr}");
        assert!(output.stdout.is_empty());
    }
    let help = Command::new(&chat).arg("--help").output().unwrap();
    assert!(help.status.success());
    let help = String::from_utf8(help.stdout).unwrap();
    let flags =
        ["--port", "--capacity", "--max-wait ", "--max-waiting", "--tokens", "--token-interval", "--redis"];
    for flag in flags {
        assert!(help.contains(flag), "{flag} in\n{help}");
    }
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn plain_hyper_serves_both_versions_behind_one_queue() {
    let example = &Example::start("hyper_basic", &[]);
    let request = || Request::get(example.url("/")).body(Body::empty()).unwrap();
    let http1 = async { read(example.send(request()).await).await };
    let http2 = async {
        let executor = hyper_util::rt::TokioExecutor::new();
        let client = hyper_util::client::legacy::Client::builder(executor).http2_only(true).build_http();
        let (a, b) = tokio::join!(client.request(request()), client.request(request()));
        (read(a.unwrap()).await, read(b.unwrap()).await)
    };
    let began = Instant::now();
    let (one, (two, three)) = tokio::join!(http1, http2);
    for (status, _, body) in [one, two, three] {
        assert_eq!((status, &*body), (StatusCode::OK, "done"));
    }
    assert!(began.elapsed() >= Duration::from_secs(4), "the third of them waits for a permit");
}
