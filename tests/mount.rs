//! Where the layer can stand, and what a client sees of it there.

mod support;

use std::{
    convert::Infallible,
    net::SocketAddr,
    sync::{Arc, Mutex},
    time::Duration,
};

use axum::{
    Router,
    body::Body,
    extract::Request,
    response::{IntoResponse, Response},
    routing::{any, any_service, get},
};
use http::{StatusCode, header};
use hyper::{body::Incoming, upgrade};
use hyper_util::{
    rt::{TokioExecutor, TokioIo},
    server::conn::auto,
};
use tokio::{
    io::{AsyncReadExt, AsyncWriteExt},
    task::JoinSet,
    time::{Instant, sleep},
};
use tower::{Layer, service_fn};
use tower_fair_queue::{Class, FairQueue, FairQueueLayer, RequestHead};

use crate::support::{
    AT_ONCE, Answer, Gate, Http2, Raw, Script, Units, config, counter, end_check, eventually, gate, gauge,
    layer, raw_answer, serve, serve_with,
};

fn granted(name: &str) -> u64 {
    counter(name, "fairqueue_granted_units_total", None)
}

// B14: one layer value on a router, on a route and on a method router; 50 connections, C=5.
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn one_layer_is_one_queue_wherever_it_is_mounted() {
    let layer = layer("b14", 5);
    let (queue, units) = (layer.queue().clone(), Units::default());
    let handler = {
        let units = units.clone();
        async move || {
            let unit = units.enter();
            sleep(Duration::from_millis(20)).await;
            Body::new(Script::new().holding(unit).data("o").sleep(Duration::from_millis(20)).data("k"))
        }
    };
    let app = Router::new()
        .merge(Router::new().route("/router", get(handler.clone())).layer(layer.clone()))
        .merge(Router::new().route("/route", get(handler.clone())).route_layer(layer.clone()))
        .route("/method", get(handler).layer(layer));
    let server = serve(app).await;

    let mut connections = Vec::new();
    for _ in 0..50 {
        connections.push(Raw::connect(server.addr).await);
    }
    let mut clients = JoinSet::new();
    for (n, mut raw) in connections.into_iter().enumerate() {
        clients.spawn(async move {
            raw.get(["/router", "/route", "/method"][n % 3], "").await;
            raw.answer().await
        });
    }
    while let Some(answer) = clients.join_next().await {
        let answer = answer.unwrap();
        assert_eq!((answer.status, answer.text(), answer.complete), (200, "ok", true));
    }
    assert_eq!((units.entered(), units.peak()), (50, 5));
    assert_eq!(granted("b14"), 50);
    end_check(&queue, &units).await;
}

// B14: the same layer on the router and on the route. With a permit for each, C=1 would be a deadlock.
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn layer_met_twice_takes_one_permit() {
    let layer = layer("b14-twice", 1);
    let (queue, units) = (layer.queue().clone(), Units::default());
    let handler = {
        let units = units.clone();
        async move || {
            let body =
                Script::new().holding(units.enter()).data("o").sleep(Duration::from_millis(5)).data("k");
            Body::new(body)
        }
    };
    let app =
        Router::new().route("/", get(handler).layer(layer.clone())).route_layer(layer.clone()).layer(layer);
    let server = serve(app).await;

    let mut clients = JoinSet::new();
    for _ in 0..20 {
        let addr = server.addr;
        clients.spawn(async move { Raw::getting(addr, "/").await.answer().await });
    }
    while let Some(answer) = clients.join_next().await {
        let answer = answer.unwrap();
        assert_eq!((answer.status, answer.text(), answer.complete), (200, "ok", true));
    }
    assert_eq!((granted("b14-twice"), units.peak()), (20, 1));
    assert_eq!(counter("b14-twice", "fairqueue_responses_total", Some(("outcome", "completed"))), 20);
    end_check(&queue, &units).await;
}

// B14: two layers made apart, also of one configuration, are two queues; a request that meets both takes a permit of each.
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn layers_made_apart_are_queues_apart() {
    let (outer, inner) = (layer("b14-outer", 1), layer("b14-inner", 1));
    let twin = layer("b14-outer", 1);
    let queues = [outer.queue().clone(), inner.queue().clone()];
    let (gates, mut opened) = tokio::sync::mpsc::unbounded_channel();
    let units = Units::default();
    let handler = {
        let units = units.clone();
        async move || {
            let (opener, wait) = gate();
            gates.send(opener).unwrap();
            Body::new(Script::new().holding(units.enter()).data("event").wait(wait))
        }
    };
    let app = Router::new()
        .route("/both", get(handler.clone()).layer((outer.clone(), inner.clone())))
        .route("/outer", get(handler.clone()).layer(outer))
        .route("/inner", get(handler.clone()).layer(inner))
        .route("/twin", get(handler).layer(twin));
    let server = serve(app).await;

    let mut both = Raw::getting(server.addr, "/both").await;
    both.until("event").await.unwrap();
    assert_eq!(queues.each_ref().map(|queue| queue.stats().in_flight), [1, 1]);
    let mut twin = Raw::getting(server.addr, "/twin").await;
    twin.until("event").await.unwrap();

    let (mut on_outer, mut on_inner) =
        (Raw::getting(server.addr, "/outer").await, Raw::getting(server.addr, "/inner").await);
    let parked = || queues.iter().all(|queue| queue.stats().waiting == 1);
    eventually(AT_ONCE, "one waits in each queue", parked).await;
    opened.recv().await.unwrap().open();
    on_outer.until("event").await.unwrap();
    on_inner.until("event").await.unwrap();
    // Those of the twin and of the last two.
    for _ in 0..3 {
        opened.recv().await.unwrap().open();
    }
    for client in [&mut both, &mut twin, &mut on_outer, &mut on_inner] {
        client.until("0\r\n\r\n").await.unwrap();
    }
    drop((both, twin, on_outer, on_inner));
    end_check(&queues[1], &units).await;
    end_check(&queues[0], &units).await;
}

/// Takes the only permit behind `path` until the gate opens: see [`busy`].
async fn occupy(addr: SocketAddr, path: &str) -> Raw {
    let mut raw = Raw::getting(addr, path).await;
    raw.until("busy").await.unwrap();
    raw
}

/// A handler that is busy the first time, until the gate opens, and says hello from then on.
fn busy(units: &Units) -> (Gate, impl Fn() -> std::future::Ready<Response> + Clone + Send + Sync + 'static) {
    let (opener, wait) = gate();
    let (units, wait) = (units.clone(), Arc::new(Mutex::new(Some(Box::pin(wait)))));
    let handler = move || {
        let body = Script::new().holding(units.enter());
        std::future::ready(match wait.lock().unwrap().take() {
            Some(wait) => Response::new(Body::new(body.data("busy").wait(wait))),
            None => Response::new(Body::new(body.data("hello").sized(5))),
        })
    };
    (opener, handler)
}

// B18: each of these compiles without an error-handling layer, and 20 requests past the deadline on one connection are 20
// complete responses.
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn rejections_are_responses_and_leave_the_connection_usable() {
    let mount = |layer: FairQueueLayer, place: &str, units: &Units| {
        let (opener, handler) = busy(units);
        let app = match place {
            "router" => Router::new().route("/a/b", any(handler)).layer(layer),
            "route" => Router::new().route("/a/b", any(handler)).route_layer(layer),
            "method" => Router::new().route("/a/b", any(handler).layer(layer)),
            "nested" => Router::new().nest("/a", Router::new().route("/b", any(handler)).layer(layer)),
            "fallback" => Router::new().fallback(handler).layer(layer),
            "fallback-service" => {
                Router::new().fallback_service(layer.layer(service_fn(move |_: Request| {
                    let response = handler();
                    async move { Ok::<_, Infallible>(response.await) }
                })))
            }
            "service" => {
                let service = layer.layer(service_fn(move |_: Request| {
                    let response = handler();
                    async move { Ok::<_, Infallible>(response.await) }
                }));
                Router::new().route("/a/b", any_service(service))
            }
            other => unreachable!("{other}"),
        };
        (opener, app)
    };
    for place in ["router", "route", "method", "nested", "fallback", "fallback-service", "service"] {
        let (name, wait) = (format!("b18-{place}"), Duration::from_millis(20));
        let layer = FairQueueLayer::new(config(&name, 1).max_wait(wait).build().unwrap());
        let (queue, units) = (layer.queue().clone(), Units::default());
        let (opener, app) = mount(layer, place, &units);
        let server = serve(app).await;

        let mut busy = occupy(server.addr, "/a/b").await;
        let mut client = Raw::connect(server.addr).await;
        for n in 0..20 {
            let start = Instant::now();
            if n % 2 == 0 {
                client.get("/a/b", "").await;
            } else {
                // A body that nobody reads is out of the way when the next request comes.
                client.send("POST /a/b HTTP/1.1\r\nhost: test\r\ncontent-length: 5\r\n\r\nhello").await;
            }
            let answer = client.answer().await;
            assert_eq!((answer.status, answer.complete), (503, true), "{place}, request {n}");
            assert!(start.elapsed() >= wait, "{place}, request {n} was not parked");
            assert_eq!(cause(&answer), "timed_out");
            assert_eq!(answer.header("connection"), None);
        }
        client.send("HEAD /a/b HTTP/1.1\r\nhost: test\r\n\r\n").await;
        assert_eq!(
            client.head().await.status,
            503,
            "{place}, and no body that would stand before the next head"
        );
        opener.open();
        busy.until("0\r\n\r\n").await.unwrap();
        client.get("/a/b", "").await;
        let answer = client.answer().await;
        assert_eq!((answer.status, answer.text()), (200, "hello"), "{place}");
        drop((busy, client));
        end_check(&queue, &units).await;
        assert_eq!((units.entered(), units.peak()), (2, 1));
    }
}

fn cause(answer: &Answer) -> String {
    let problem: serde_json::Value = serde_json::from_slice(&answer.body).unwrap();
    problem["cause"].as_str().unwrap().to_owned()
}

/// What a client that asked for an event stream must be told when it is rejected.
fn check_rejection(answer: &Answer, expected: &str) {
    assert_eq!((answer.status, answer.complete), (503, true));
    assert_eq!(cause(answer), expected);
    let retry_after = answer.header("retry-after").expect("a Retry-After").parse::<u64>();
    assert!(retry_after.is_ok_and(|seconds| seconds >= 1), "{}", answer.head);
    assert_eq!(answer.header("cache-control"), Some("no-store"));
    assert_eq!(answer.header("content-type"), Some("application/problem+json"));
}

const ACCEPT: &str = "accept: text/event-stream\r\n";

// B57, the memory part: there is no backend that could be down.
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn rejected_event_stream_is_told_why_and_when_to_come_back() {
    let builder = config("b57", 1).max_waiting(1).max_wait(Duration::from_millis(500));
    let layer = FairQueueLayer::new(builder.build().unwrap());
    let (queue, units) = (layer.queue().clone(), Units::default());
    let (opener, handler) = busy(&units);
    let server = serve(Router::new().route("/", any(handler)).layer(layer)).await;
    let mut busy = occupy(server.addr, "/").await;

    let mut parked = Raw::connect(server.addr).await;
    parked.get("/", ACCEPT).await;
    eventually(AT_ONCE, "one waits", || queue.stats().waiting == 1).await;
    let mut refused = Raw::connect(server.addr).await;
    refused.get("/", ACCEPT).await;
    check_rejection(&refused.answer().await, "queue_full");
    check_rejection(&parked.answer().await, "timed_out");

    // Both who waits and who comes when the queue closes.
    parked.get("/", ACCEPT).await;
    eventually(AT_ONCE, "one waits", || queue.stats().waiting == 1).await;
    queue.close();
    check_rejection(&parked.answer().await, "shutting_down");
    let mut late = Raw::connect(server.addr).await;
    late.get("/", ACCEPT).await;
    check_rejection(&late.answer().await, "shutting_down");

    opener.open();
    busy.until("0\r\n\r\n").await.unwrap();
    drop((busy, parked, refused, late));
    end_check(&queue, &units).await;
    assert_eq!(units.entered(), 1);
    for (cause, count) in [("timed_out", 1), ("queue_full", 1), ("shutting_down", 2)] {
        assert_eq!(counter("b57", "fairqueue_rejections_total", Some(("cause", cause))), count, "{cause}");
    }
}

// B57: a client that resumes an event stream says where it was.
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn request_reaches_the_handler_unchanged_after_a_wait() {
    let layer = layer("b57-resumed", 1);
    let (queue, units) = (layer.queue().clone(), Units::default());
    let (opener, handler) = busy(&units);
    let echo = async |request: Request| {
        let (head, body) = request.into_parts();
        let mut seen = format!("{} {} {:?}\n", head.method, head.uri, head.version).into_bytes();
        for (name, value) in &head.headers {
            seen.extend(name.as_str().as_bytes());
            seen.extend(b": ");
            seen.extend(value.as_bytes());
            seen.push(b'\n');
        }
        seen.extend(axum::body::to_bytes(body, 1_000).await.unwrap());
        seen
    };
    let app = Router::new().route("/busy", any(handler)).route("/echo", any(echo)).layer(layer);
    let server = serve(app).await;
    let mut busy = occupy(server.addr, "/busy").await;

    let mut client = Raw::connect(server.addr).await;
    let mut request = b"POST /echo?last=%20 HTTP/1.1\r\nhost: test\r\n".to_vec();
    // An id is any text, here with a byte that is no ASCII, and repeated fields keep their order.
    request.extend(b"last-event-id: 42 \xfc\r\naccept: text/event-stream\r\nx-a: 1\r\nx-a: 2\r\n");
    request.extend(b"content-length: 5\r\n\r\nwhere");
    client.send(request).await;
    eventually(AT_ONCE, "it waits", || queue.stats().waiting == 1).await;
    opener.open();
    busy.until("0\r\n\r\n").await.unwrap();
    let seen = client.answer().await.body;
    let mut expected = b"POST /echo?last=%20 HTTP/1.1\nhost: test\n".to_vec();
    expected.extend(b"last-event-id: 42 \xfc\naccept: text/event-stream\nx-a: 1\nx-a: 2\n");
    expected.extend(b"content-length: 5\nwhere");
    assert_eq!(seen, expected, "{}", String::from_utf8_lossy(&seen));
    drop((busy, client));
    end_check(&queue, &units).await;
}

// Plain hyper on both protocols, over one port, without a router.
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn plain_hyper_serves_both_protocols_through_one_queue() {
    let base = FairQueueLayer::new(config("hyper", 2).build().unwrap());
    let (queue, units) = (base.queue().clone(), Units::default());
    let layer = base.classify(|head: &RequestHead<'_>| match head.uri().path() {
        "/healthz" => Class::Bypass,
        _ => tower_fair_queue::Ask::new().into(),
    });
    let service = {
        let units = units.clone();
        layer.layer(service_fn(move |request: Request<Incoming>| {
            let body = Script::new();
            let body = if request.uri().path() == "/healthz" { body } else { body.holding(units.enter()) };
            async move {
                sleep(Duration::from_millis(5)).await;
                let text = format!("{:?}", request.version());
                Ok::<_, Infallible>(Response::new(body.data(text).sleep(Duration::from_millis(5))))
            }
        }))
    };
    let server = serve_with(auto::Builder::new(TokioExecutor::new()), service).await;

    let addr = server.addr;
    let client = Http2::connect(addr).await;
    let mut requests = JoinSet::new();
    for _ in 0..20 {
        requests.spawn(async move {
            let answer = Raw::getting(addr, "/").await.answer().await;
            assert_eq!((answer.status, answer.text(), answer.complete), (200, "HTTP/1.1", true));
        });
        let client = client.clone();
        requests.spawn(async move {
            assert_eq!(client.get("/").await.text().await.as_deref(), Some("HTTP/2.0"));
        });
        requests.spawn(async move {
            assert_eq!(Raw::getting(addr, "/healthz").await.answer().await.text(), "HTTP/1.1");
        });
    }
    while let Some(ended) = requests.join_next().await {
        ended.unwrap();
    }
    drop(client);
    end_check(&queue, &units).await;
    assert_eq!((units.entered(), units.peak(), granted("hyper")), (40, 2, 40));
    assert_eq!(counter("hyper", "fairqueue_bypassed_requests_total", None), 20);
}

// P12: byte for byte what comes without the layer, the date aside.
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn responses_are_byte_for_byte_those_of_the_service() {
    let streamed = || Body::new(Script::new().data("one").data("two"));
    let replies = Router::new()
        .route("/text", any(async || "hello"))
        .route("/streamed", any(async move || streamed()))
        .route("/declared", any(async move || ([(header::CONTENT_LENGTH, 6)], streamed())))
        .route("/204", any(async || StatusCode::NO_CONTENT))
        .route("/304", any(async || (StatusCode::NOT_MODIFIED, [(header::ETAG, "\"1\"")])))
        .route("/404", any(async || (StatusCode::NOT_FOUND, "no")))
        .route("/500", any(async || StatusCode::INTERNAL_SERVER_ERROR))
        .route("/empty", any(async || ()))
        .route("/cookies", any(async || [("x-a", "1"), ("set-cookie", "a=1")].into_response()))
        .route("/close", any(async || ([(header::CONNECTION, "close")], "bye")))
        .route(
            "/trailers",
            any(async || {
                let mut trailers = http::HeaderMap::new();
                trailers.insert("x-sum", "6".parse().unwrap());
                let body = Body::new(Script::new().data("one").data("two").trailers(trailers));
                ([(header::TRAILER, "x-sum")], body)
            }),
        );
    let layer = layer("p12", 1);
    let queue = layer.queue().clone();
    let (with, without) = (serve(replies.clone().layer(layer)).await, serve(replies).await);
    let paths = [
        "/text",
        "/streamed",
        "/declared",
        "/204",
        "/304",
        "/404",
        "/500",
        "/empty",
        "/cookies",
        "/close",
        "/trailers",
        "/none",
    ];
    for path in paths {
        for request in [
            format!("GET {path} HTTP/1.1\r\nhost: test\r\nconnection: close\r\n\r\n"),
            format!("GET {path} HTTP/1.1\r\nhost: test\r\nte: trailers\r\nconnection: close\r\n\r\n"),
            format!("HEAD {path} HTTP/1.1\r\nhost: test\r\nconnection: close\r\n\r\n"),
            format!("OPTIONS {path} HTTP/1.1\r\nhost: test\r\nconnection: close\r\n\r\n"),
            format!("GET {path} HTTP/1.0\r\n\r\n"),
        ] {
            let expected = raw_answer(without.addr, &request).await;
            assert_eq!(raw_answer(with.addr, &request).await, expected, "{request}");
        }
    }
    end_check(&queue, &Units::default()).await;
    let outcome = |outcome| counter("p12", "fairqueue_responses_total", Some(("outcome", outcome)));
    let completed = u64::try_from(paths.len()).unwrap() * 5;
    assert_eq!((outcome("completed"), outcome("aborted"), outcome("failed")), (completed, 0, 0));
}

const UPGRADE: &str = "connection: upgrade\r\nupgrade: echo\r\n";

/// Upgrades to a protocol that sends back what it gets.
async fn echo(mut request: Request) -> Response {
    let upgraded = upgrade::on(&mut request);
    tokio::spawn(async move {
        let mut io = TokioIo::new(upgraded.await.expect("the upgrade handle works"));
        let mut buffer = [0; 1_024];
        // A reset ends it as an end does.
        while let Ok(read @ 1..) = io.read(&mut buffer).await {
            if io.write_all(&buffer[..read]).await.is_err() {
                break;
            }
        }
    });
    let head = [(header::CONNECTION, "upgrade"), (header::UPGRADE, "echo")];
    (StatusCode::SWITCHING_PROTOCOLS, head).into_response()
}

// P12 and B04 without the hold: the tunnel works and outlives the queue's deadline, and its permit goes at the handshake.
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn upgrade_works_and_frees_its_permit_at_the_handshake() {
    let wait = Duration::from_millis(300);
    let layer = FairQueueLayer::new(config("p12-upgrade", 1).max_wait(wait).build().unwrap());
    let queue = layer.queue().clone();
    let app = Router::new().route("/echo", any(echo)).route("/plain", any(async || "hello"));
    let (with, without) = (serve(app.clone().layer(layer)).await, serve(app).await);

    let mut heads = Vec::new();
    let mut tunnels = Vec::new();
    for addr in [with.addr, without.addr] {
        let mut tunnel = Raw::connect(addr).await;
        tunnel.get("/echo", UPGRADE).await;
        let head = tunnel.head().await;
        assert_eq!((head.status, head.header("upgrade")), (101, Some("echo")));
        let lines = head.head.lines().filter(|line| !line.starts_with("date:"));
        heads.push(lines.map(str::to_owned).collect::<Vec<_>>());
        tunnels.push(tunnel);
    }
    assert_eq!(heads[0], heads[1]);
    eventually(AT_ONCE, "the permit is back", || queue.stats().in_flight == 0).await;
    let mut tunnel = tunnels.swap_remove(0);

    let start = Instant::now();
    let mut plain = Raw::connect(with.addr).await;
    for n in 0..100 {
        let message = format!("message {n}");
        tunnel.send(&message).await;
        assert_eq!(tunnel.take(message.len()).await, message.as_bytes());
        if n % 10 == 0 {
            plain.get("/plain", "").await;
            assert_eq!(plain.answer().await.status, 200, "a second request is served beside the tunnel");
        }
        sleep(wait / 50).await;
    }
    assert!(start.elapsed() > wait, "the tunnel was meant to outlast the deadline in line");
    assert_eq!(gauge("p12-upgrade", "fairqueue_waiting_requests").most.to_bits(), 0.0_f64.to_bits());

    // A tunnel that dies has nothing to give back.
    drop((tunnel, plain));
    end_check(&queue, &Units::default()).await;
    assert_eq!(granted("p12-upgrade"), 11);
    let outcome = |outcome| counter("p12-upgrade", "fairqueue_responses_total", Some(("outcome", outcome)));
    assert_eq!((outcome("completed"), outcome("aborted")), (11, 0));
}

// The queue outlives the layer and its services: the handle taken from it still counts.
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn layer_over_a_queue_made_before_shares_it() {
    let queue = FairQueue::new(config("shared", 1).build().unwrap());
    let units = Units::default();
    let mount = |path: &str| {
        let units = units.clone();
        let handler = async move || {
            let body =
                Script::new().holding(units.enter()).data("o").sleep(Duration::from_millis(5)).data("k");
            Body::new(body)
        };
        let layer = FairQueueLayer::with_queue(queue.clone());
        Router::new().route(path, any(handler)).layer(layer)
    };
    let server = serve(mount("/one").merge(mount("/two"))).await;
    let mut clients = JoinSet::new();
    for n in 0..10 {
        let addr = server.addr;
        clients.spawn(async move { Raw::getting(addr, ["/one", "/two"][n % 2]).await.answer().await });
    }
    while let Some(answer) = clients.join_next().await {
        assert_eq!(answer.unwrap().text(), "ok");
    }
    end_check(&queue, &units).await;
    assert_eq!((units.entered(), units.peak(), granted("shared")), (10, 1, 10));
}
