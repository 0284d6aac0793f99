//! Clients that go away, or have not said all they have to say, while their request is parked or running.

mod support;

use std::{
    sync::{
        Arc, Mutex,
        atomic::{AtomicBool, AtomicUsize, Ordering},
    },
    thread,
    time::Duration,
};

use axum::{
    Router,
    body::Body,
    extract::{Path, Request},
    routing::{get, post},
};
use futures_util::StreamExt;
use hyper_util::{rt::TokioExecutor, server::conn::auto};
use tokio::{
    sync::watch,
    task::spawn_blocking,
    time::{Instant, sleep, sleep_until},
};
use tower_fair_queue::FairQueueLayer;

use crate::support::{
    AT_ONCE, Http2, Raw, Script, Units, config, end_check, eventually, gate, gauge, layer, serve, serve_with,
    soon,
};

fn waiting(name: &str) -> f64 {
    gauge(name, "fairqueue_waiting_requests").now
}

// B23: C=1 busy for 2 s, 20 parked, 19 of them gone at 0.5 s.
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn gone_clients_leave_the_line_and_never_run() {
    let layer = layer("b23", 1);
    let (queue, units) = (layer.queue().clone(), Units::default());
    let started = Arc::new(Mutex::new(Vec::new()));
    let handler = {
        let (units, started) = (units.clone(), Arc::clone(&started));
        async move |Path(time): Path<u64>| {
            let _unit = units.enter();
            started.lock().unwrap().push(Instant::now());
            sleep(Duration::from_millis(time)).await;
            "done"
        }
    };
    let server = serve(Router::new().route("/{time}", get(handler)).layer(layer)).await;

    let start = Instant::now();
    let mut busy = Raw::getting(server.addr, "/2000").await;
    eventually(AT_ONCE, "the first runs", || units.now() == 1).await;
    let mut parked = Vec::new();
    for _ in 0..20 {
        parked.push(Raw::getting(server.addr, "/0").await);
    }
    eventually(Duration::from_millis(400), "20 wait", || waiting("b23") == 20.0).await;

    // The one that stays is in the middle of those that go.
    let mut live = parked.remove(10);
    sleep_until(start + Duration::from_millis(500)).await;
    drop(parked);
    let limit = Duration::from_millis(1_500).saturating_sub(start.elapsed());
    eventually(limit, "one waits", || waiting("b23") == 1.0 && queue.stats().waiting == 1).await;

    assert_eq!(live.answer().await.status, 200);
    assert_eq!(busy.answer().await.status, 200);
    {
        let started = started.lock().unwrap();
        assert_eq!(started.len(), 2, "the handler ran for those who waited for it alone");
        let between = started[1] - started[0];
        let at_once = Duration::from_secs(2)..=Duration::from_secs(2) + AT_ONCE;
        assert!(at_once.contains(&between), "the second started {between:?} after the first");
    }
    drop((live, busy));
    end_check(&queue, &units).await;
    assert_eq!(units.peak(), 1);
}

/// Parks a GET whose client then shuts its write side, and tells what becomes of it.
async fn half_closed(name: &str, half_close: bool) -> Option<u16> {
    let layer = layer(name, 1);
    let (queue, units) = (layer.queue().clone(), Units::default());
    let handler = {
        let units = units.clone();
        async move |Path(time): Path<u64>| {
            let _unit = units.enter();
            sleep(Duration::from_millis(time)).await;
            "done"
        }
    };
    let mut builder = auto::Builder::new(TokioExecutor::new());
    builder.http1().half_close(half_close);
    let app = Router::new().route("/{time}", get(handler)).layer(layer);
    let server = serve_with(builder, app).await;

    let mut busy = Raw::getting(server.addr, "/500").await;
    eventually(AT_ONCE, "the first runs", || units.now() == 1).await;
    let mut half = Raw::getting(server.addr, "/0").await;
    eventually(AT_ONCE, "the second waits", || waiting(name) == 1.0).await;
    half.half_close().await;
    if !half_close {
        eventually(AT_ONCE, "the second is gone", || waiting(name) == 0.0).await;
    }
    let status = half.try_answer().await.map(|answer| answer.status);
    assert_eq!(busy.answer().await.status, 200);
    assert_eq!(units.entered(), if half_close { 2 } else { 1 });
    drop((half, busy));
    end_check(&queue, &units).await;
    status
}

// B23: half closed after a full GET.
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn half_closed_client_is_answered_where_the_server_allows_it() {
    assert_eq!(half_closed("b23-half-on", true).await, Some(200));
}

// B23: by hyper's default a client that has shut its write side is gone.
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn half_closed_client_is_gone_by_default() {
    assert_eq!(half_closed("b23-half-off", false).await, None);
}

// B23 and P6: the body is idle, so nothing is written that could fail.
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn client_gone_from_an_idle_stream_frees_its_permit_at_once() {
    let layer = layer("b23-idle", 1);
    let (queue, units) = (layer.queue().clone(), Units::default());
    let handler = {
        let units = units.clone();
        async move || Body::new(Script::new().data("event").idle().holding(units.enter()))
    };
    let server = serve(Router::new().route("/", get(handler)).layer(layer)).await;
    for n in 1..=20 {
        let mut client = Raw::getting(server.addr, "/").await;
        client.until("event").await.unwrap();
        assert_eq!(queue.stats().in_flight, 1);
        let mut next = Raw::getting(server.addr, "/").await;
        eventually(AT_ONCE, "the next waits", || queue.stats().waiting == 1).await;
        drop(client);
        eventually(AT_ONCE, "the next runs", || units.entered() == 2 * n).await;
        next.until("event").await.unwrap();
        drop(next);
        eventually(AT_ONCE, "nothing runs", || queue.stats().in_flight == 0).await;
    }
    end_check(&queue, &units).await;
    assert_eq!(units.peak(), 1);
}

// B25: one HTTP/2 connection, C=5 busy, 45 parked.
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn reset_streams_leave_the_line_and_free_their_permits() {
    let soon_enough = Duration::from_millis(250);
    let layer = layer("b25", 5);
    let (queue, units) = (layer.queue().clone(), Units::default());
    let ran = Arc::new(Mutex::new(Vec::new()));
    let handler = {
        let (units, ran) = (units.clone(), Arc::clone(&ran));
        async move |Path(n): Path<usize>| {
            ran.lock().unwrap().push(n);
            Body::new(Script::new().data("event").idle().holding(units.enter()))
        }
    };
    let app = Router::new()
        .route("/{n}", get(handler))
        .route("/plain/queued", get(async || "hello"))
        .layer(layer)
        .route("/plain/free", get(async || "hello"));
    let server = serve(app).await;
    let client = Http2::connect(server.addr).await;

    let mut running = Vec::new();
    for n in 0..5 {
        let mut stream = client.get(&format!("/{n}")).await;
        let mut body = stream.response().await.into_body();
        assert_eq!(soon("an event", body.data()).await.unwrap().unwrap(), "event");
        running.push((stream, body));
    }
    assert_eq!(units.now(), 5);
    let mut parked = Vec::new();
    for n in 5..50 {
        parked.push(client.get(&format!("/{n}")).await);
    }
    eventually(Duration::from_secs(1), "45 wait", || waiting("b25") == 45.0).await;

    // Every ninth stays.
    let (stay, go): (Vec<_>, Vec<_>) = parked.into_iter().enumerate().partition(|(n, _)| n % 9 == 0);
    assert_eq!((stay.len(), go.len()), (5, 40));
    go.into_iter().for_each(|(_, stream)| stream.reset());
    let left = || waiting("b25") == 5.0 && queue.stats().waiting == 5;
    eventually(soon_enough, "5 wait", left).await;
    assert_eq!(client.get("/plain/free").await.response().await.status(), 200);
    assert_eq!(ran.lock().unwrap().len(), 5);

    for (stream, _body) in running {
        stream.reset();
    }
    eventually(soon_enough, "those who waited run", || units.entered() == 10 && units.now() == 5).await;
    let mut running = Vec::new();
    for (_, mut stream) in stay {
        let body = stream.response().await.into_body();
        running.push((stream, body));
    }
    for (stream, _body) in running {
        stream.reset();
    }
    let free = || units.now() == 0 && queue.stats().in_flight == 0;
    eventually(soon_enough, "nothing is held", free).await;
    assert_eq!(client.get("/plain/queued").await.response().await.status(), 200);

    let mut ran = ran.lock().unwrap().clone();
    ran.sort_unstable();
    assert_eq!(ran, [0, 1, 2, 3, 4, 5, 14, 23, 32, 41]);
    drop(client);
    end_check(&queue, &units).await;
    assert_eq!(units.peak(), 5);
}

/// A server with one permit that is taken until the gate opens, and a handler that reads what it is sent.
async fn busy_uploads(layer: FairQueueLayer, units: &Units) -> (support::Server, support::Gate, Raw) {
    let (opener, wait) = gate();
    let busy = {
        let (units, wait) = (units.clone(), Arc::new(Mutex::new(Some(wait))));
        async move || {
            let wait = wait.lock().unwrap().take().expect("one busy request");
            Body::new(Script::new().data("busy").wait(wait).holding(units.enter()))
        }
    };
    let upload = {
        let units = units.clone();
        async move |request: Request| {
            let _unit = units.enter();
            let mut body = request.into_body().into_data_stream();
            let mut bytes = 0;
            while let Some(data) = body.next().await {
                bytes += data.unwrap().len();
            }
            bytes.to_string()
        }
    };
    let app = Router::new().route("/busy", get(busy)).route("/", post(upload)).layer(layer);
    let server = serve(app).await;
    let mut busy = Raw::getting(server.addr, "/busy").await;
    busy.until("busy").await.unwrap();
    (server, opener, busy)
}

const LENGTH: usize = 10 * 1024 * 1024;

async fn expecting(server: &support::Server) -> Raw {
    let mut client = Raw::connect(server.addr).await;
    let head =
        format!("POST / HTTP/1.1\r\nhost: test\r\nexpect: 100-continue\r\ncontent-length: {LENGTH}\r\n\r\n");
    client.send(head).await;
    client
}

// B26: parked for 1 s, then rejected at the deadline.
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn rejected_request_is_never_told_to_continue() {
    let name = "b26-rejected";
    let layer = FairQueueLayer::new(config(name, 1).max_wait(Duration::from_millis(1_500)).build().unwrap());
    let (queue, units) = (layer.queue().clone(), Units::default());
    let (server, opener, mut busy) = busy_uploads(layer, &units).await;
    let mut client = expecting(&server).await;
    eventually(AT_ONCE, "it waits", || waiting(name) == 1.0).await;
    assert!(!client.hears_within(Duration::from_secs(1)).await, "a byte came while it was parked");
    assert_eq!(waiting(name), 1.0);

    let answer = client.answer().await;
    assert_eq!((answer.status, answer.complete), (503, true));
    assert!(answer.text().contains(r#""cause":"timed_out""#), "{}", answer.text());
    // The body was never sent, so the connection is of no more use.
    assert!(client.rest().await.is_empty());
    assert_eq!(units.entered(), 1);
    opener.open();
    busy.until("0\r\n\r\n").await.unwrap();
    drop((busy, client));
    end_check(&queue, &units).await;
}

// B26: granted, and read by the handler.
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn granted_request_is_told_to_continue_once() {
    let name = "b26-granted";
    let layer = layer(name, 1);
    let (queue, units) = (layer.queue().clone(), Units::default());
    let (server, opener, mut busy) = busy_uploads(layer, &units).await;
    let mut client = expecting(&server).await;
    eventually(AT_ONCE, "it waits", || waiting(name) == 1.0).await;
    assert!(!client.hears_within(Duration::from_secs(1)).await, "a byte came while it was parked");

    opener.open();
    busy.until("0\r\n\r\n").await.unwrap();
    assert_eq!(client.head().await.status, 100);
    client.send(vec![b'x'; LENGTH]).await;
    let answer = client.answer().await;
    assert_eq!((answer.status, answer.text()), (200, LENGTH.to_string().as_str()));
    drop((busy, client));
    end_check(&queue, &units).await;
    assert_eq!((units.entered(), units.peak()), (2, 1));
}

// B03 without the hold: the permit follows the request, not what the request has set going. A job of 2 s, its client gone
// at 0.2 s, the next request at 0.3 s.
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn permit_does_not_wait_for_detached_work() {
    let layer = layer("b03", 1);
    let (queue, units) = (layer.queue().clone(), Units::default());
    let (running, jobs) = (Arc::new(AtomicBool::new(false)), Arc::new(AtomicUsize::new(0)));
    let (finished, mut finishes) = watch::channel(());
    let handler = {
        let (units, running, jobs) = (units.clone(), Arc::clone(&running), Arc::clone(&jobs));
        async move |Path(time): Path<u64>| {
            let _unit = units.enter();
            let (running, jobs, finished) = (Arc::clone(&running), Arc::clone(&jobs), finished.clone());
            running.store(true, Ordering::SeqCst);
            let job = spawn_blocking(move || {
                thread::sleep(Duration::from_millis(time));
                running.store(false, Ordering::SeqCst);
                jobs.fetch_add(1, Ordering::SeqCst);
                finished.send_replace(());
            });
            job.await.unwrap();
            "done"
        }
    };
    let server = serve(Router::new().route("/{time}", get(handler)).layer(layer)).await;

    let start = Instant::now();
    let client = Raw::getting(server.addr, "/2000").await;
    eventually(AT_ONCE, "the job runs", || running.load(Ordering::SeqCst)).await;
    sleep_until(start + Duration::from_millis(200)).await;
    assert_eq!(queue.stats().in_flight, 1);
    drop(client);
    eventually(AT_ONCE, "the permit is back", || queue.stats().in_flight == 0).await;
    sleep_until(start + Duration::from_millis(300)).await;

    let mut second = Raw::getting(server.addr, "/0").await;
    eventually(AT_ONCE, "the second starts", || units.entered() == 2).await;
    assert_eq!(second.answer().await.status, 200);
    assert_eq!(jobs.load(Ordering::SeqCst), 1, "the job of the first goes on");
    drop(second);
    end_check(&queue, &units).await;
    while jobs.load(Ordering::SeqCst) < 2 {
        soon("the job ends", finishes.changed()).await.unwrap();
    }
    // The end of the job gives nothing back a second time.
    end_check(&queue, &units).await;
    assert_eq!(units.peak(), 1);
}
