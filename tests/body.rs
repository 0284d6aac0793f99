//! The response body: how long it holds its permit, and that nothing of it is changed.

mod support;

use std::{
    convert::Infallible,
    future::{Ready, ready},
    net::SocketAddr,
    pin::pin,
    sync::{
        Arc,
        atomic::{AtomicUsize, Ordering},
    },
    time::Duration,
};

use axum::{
    Router,
    body::Body,
    extract::Request,
    response::{IntoResponse, Response},
    routing::get,
};
use bytes::Bytes;
use futures_util::stream;
use http::{HeaderMap, HeaderValue, StatusCode, header};
use http_body::Body as _;
use http_body_util::{BodyExt, Empty, Full};
use hyper::body::Incoming;
use hyper_util::{rt::TokioExecutor, server::conn::auto};
use tokio::{
    io::{AsyncReadExt, AsyncWriteExt},
    net::TcpStream,
    task::JoinSet,
    time::{Instant, interval},
};
use tower::{Layer, ServiceBuilder, ServiceExt, retry, service_fn};
use tower_fair_queue::FairQueueLayer;

use crate::support::{
    AT_ONCE, Http2, Raw, Script, Units, config, counter, end_check, eventually, gate, gauge, layer,
    raw_answer, serve, serve_with, soon,
};

fn responses(name: &str, outcome: &str) -> u64 {
    counter(name, "fairqueue_responses_total", Some(("outcome", outcome)))
}

// B01, first part: C=2, 10 streams of 3 s; run two at a time they take 15 s.
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn permit_is_held_until_the_stream_ends() {
    let layer = layer("b01", 2);
    let (queue, units) = (layer.queue().clone(), Units::default());
    let handler = {
        let units = units.clone();
        async move || {
            let (unit, start) = (units.enter(), Instant::now());
            let mut body = Script::new().holding(unit);
            for n in 1..=30 {
                body = body.until(start + n * Duration::from_millis(100)).data(format!("data: {n}\n\n"));
            }
            ([(header::CONTENT_TYPE, "text/event-stream")], Body::new(body))
        }
    };
    let server = serve(Router::new().route("/", get(handler)).layer(layer)).await;

    let (start, addr) = (Instant::now(), server.addr);
    let mut clients = JoinSet::new();
    for _ in 0..10 {
        clients.spawn(async move { Raw::getting(addr, "/").await.answer().await });
    }
    let mut samples = interval(Duration::from_millis(20));
    let mut answers = Vec::new();
    while answers.len() < 10 {
        tokio::select! {
            answer = clients.join_next() => answers.push(answer.unwrap().unwrap()),
            _ = samples.tick() => {
                assert!(queue.stats().in_flight <= 2);
                // A grant and the start of its handler are two instants, so a sample between them is looked at again.
                let equal = || queue.stats().in_flight == units.now() as u64;
                eventually(AT_ONCE, "as many units are held as streams are open", equal).await;
            }
        }
    }
    let wall = start.elapsed().as_secs_f64();
    assert!((13.5..=16.5).contains(&wall), "10 streams of 3 s, two at a time, took {wall} s");
    for answer in answers {
        assert_eq!((answer.status, answer.complete), (200, true));
        assert_eq!(answer.text().matches("data: ").count(), 30);
    }
    assert_eq!((units.entered(), units.peak()), (10, 2));
    assert_eq!(responses("b01", "completed"), 10);
    end_check(&queue, &units).await;
}

// B01, second part: no socket.
#[tokio::test]
async fn dropped_body_releases_at_once() {
    let layer = layer("b01-dropped", 1);
    let (queue, units) = (layer.queue().clone(), Units::default());
    let service = layer.layer(service_fn(async |_: Request| {
        Ok::<_, Infallible>(Response::new(Script::new().data("never polled").idle().holding(units.enter())))
    }));
    for _ in 0..3 {
        let response = service.clone().oneshot(Request::new(Body::empty())).await.unwrap();
        assert_eq!((queue.stats().in_flight, units.now()), (1, 1));
        drop(response);
        assert_eq!((queue.stats().in_flight, units.now()), (0, 0));
    }
    assert_eq!(responses("b01-dropped", "aborted"), 3);
    end_check(&queue, &units).await;
}

/// Tries again where the service answered 500.
#[derive(Clone)]
struct Again;

impl<B> retry::Policy<Request, Response<B>, Infallible> for Again {
    type Future = Ready<()>;

    fn retry(
        &mut self,
        _: &mut Request,
        result: &mut Result<Response<B>, Infallible>,
    ) -> Option<Self::Future> {
        let failed =
            result.as_ref().is_ok_and(|response| response.status() == StatusCode::INTERNAL_SERVER_ERROR);
        failed.then(|| ready(()))
    }

    fn clone_request(&mut self, request: &Request) -> Option<Request> {
        let mut copy = Request::new(Body::empty());
        request.method().clone_into(copy.method_mut());
        request.uri().clone_into(copy.uri_mut());
        request.headers().clone_into(copy.headers_mut());
        Some(copy)
    }
}

// B11: C=20, 1,000 streams of six kinds. The recorder sees every value of the gauge, which is more than one each 10 ms.
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn in_flight_gauge_stays_within_zero_and_capacity_over_mixed_streams() {
    const KINDS: [&str; 6] = ["/full", "/aborted", "/error", "/trailers", "/empty", "/retried"];
    let layer = layer("b11", 20);
    let (queue, units) = (layer.queue().clone(), Units::default());
    let flaky = Arc::new(AtomicUsize::new(0));
    let handler = {
        let (units, flaky) = (units.clone(), Arc::clone(&flaky));
        async move |request: Request| {
            let moment = Duration::from_millis(2);
            let body = Script::new().holding(units.enter());
            let body = match request.uri().path() {
                "/full" => body.data("one").sleep(moment).data("two").sleep(moment).data("three"),
                "/aborted" => body.data("one").idle(),
                "/error" => body.data("one").flush().sleep(moment).fail(),
                "/trailers" => body.data("one").sleep(moment).trailers(HeaderMap::new()),
                "/empty" => body.sleep(moment),
                "/retried" => {
                    // The first of each two fails, and its body is dropped by the retry layer.
                    if flaky.fetch_add(1, Ordering::SeqCst) % 2 == 0 {
                        let body = Body::new(body.data("no").sleep(moment));
                        return (StatusCode::INTERNAL_SERVER_ERROR, body).into_response();
                    }
                    body.data("yes").sleep(moment)
                }
                other => unreachable!("{other}"),
            };
            Response::new(Body::new(body))
        }
    };
    let retried = get(handler.clone())
        .layer(ServiceBuilder::new().layer(retry::RetryLayer::new(Again)).layer(layer.clone()));
    let app = Router::new().route("/{kind}", get(handler).layer(layer)).route("/retried", retried);
    let server = serve(app).await;

    let addr = server.addr;
    let mut clients = JoinSet::new();
    for client in 0..50 {
        clients.spawn(async move {
            for n in 0..20 {
                let path = KINDS[(client * 20 + n) % KINDS.len()];
                let mut raw = Raw::getting(addr, path).await;
                if path == "/aborted" {
                    assert_eq!(raw.head().await.status, 200);
                    raw.until("one").await.expect("the first chunk");
                    continue;
                }
                let answer = raw.answer().await;
                let expected = match path {
                    "/full" => (200, "onetwothree", true),
                    "/error" => (200, "one", false),
                    "/trailers" => (200, "one", true),
                    "/empty" => (200, "", true),
                    _ => (200, "yes", true),
                };
                assert_eq!((answer.status, answer.text(), answer.complete), expected, "{path}");
            }
        });
    }
    let of = |kind: &str| (0..1_000).filter(|n| KINDS[n % KINDS.len()] == kind).count() as u64;
    while let Some(ended) = clients.join_next().await {
        ended.unwrap();
        assert!(queue.stats().in_flight <= 20);
    }
    end_check(&queue, &units).await;
    let in_flight = gauge("b11", "fairqueue_in_flight_units");
    assert!(in_flight.least >= 0.0 && in_flight.most <= 20.0, "{in_flight:?}");
    assert!(units.peak() <= 20, "{}", units.peak());
    assert!(gauge("b11", "fairqueue_waiting_requests").most > 0.0, "the queue was meant to be full");
    let retries = flaky.load(Ordering::SeqCst) as u64 - of("/retried");
    let granted = counter("b11", "fairqueue_granted_units_total", None);
    assert_eq!((granted, units.entered() as u64), (1_000 + retries, 1_000 + retries));
    assert_eq!(responses("b11", "failed"), of("/error"));
    assert_eq!(responses("b11", "aborted"), of("/aborted") + retries);
    assert_eq!(responses("b11", "completed"), of("/full") + of("/trailers") + of("/empty") + of("/retried"));
}

// B19: C=1; two connections take turns, so that a permit that comes back late makes the next request wait.
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn body_that_is_never_polled_to_its_end_is_completed() {
    let layer = layer("b19", 1);
    let (queue, units) = (layer.queue().clone(), Units::default());
    // The server never polls this body, which would not end by itself.
    let unpolled =
        |units: &Units| Body::new(Script::new().data("not for the wire").idle().holding(units.enter()));
    let handler = {
        let units = units.clone();
        async move |request: Request| match request.uri().path() {
            "/five" => {
                let body = Body::new(Script::new().data("fi").data("ve!").idle().holding(units.enter()));
                ([(header::CONTENT_LENGTH, 5)], body).into_response()
            }
            "/five-by-hint" => {
                Body::new(Script::new().data("five!").idle().sized(5).holding(units.enter())).into_response()
            }
            "/204" => (StatusCode::NO_CONTENT, unpolled(&units)).into_response(),
            "/304" => (StatusCode::NOT_MODIFIED, unpolled(&units)).into_response(),
            "/head" => unpolled(&units).into_response(),
            "/empty" => ().into_response(),
            "/cut" => {
                let body = Script::new().data("four").idle().holding(units.enter());
                ([(header::CONTENT_LENGTH, 5)], Body::new(body)).into_response()
            }
            other => unreachable!("{other}"),
        }
    };
    // A service without a router, which would answer HEAD itself.
    let service = layer.layer(service_fn(move |request: Request<_>| {
        let (handler, request) = (handler.clone(), request.map(Body::new));
        async move { Ok::<_, Infallible>(handler(request).await) }
    }));
    let server = serve_with(auto::Builder::new(TokioExecutor::new()), service).await;

    let mut connections = [Raw::connect(server.addr).await, Raw::connect(server.addr).await];
    for (path, status, body) in [
        ("/five", 200, "five!"),
        ("/five-by-hint", 200, "five!"),
        ("/empty", 200, ""),
        ("/204", 204, ""),
        ("/304", 304, ""),
        ("/head", 200, ""),
    ] {
        for n in 0..50 {
            let raw = &mut connections[n % 2];
            let answer = if matches!(path, "/204" | "/304" | "/head") {
                let method = if path == "/head" { "HEAD" } else { "GET" };
                raw.send(format!("{method} {path} HTTP/1.1\r\nhost: test\r\n\r\n")).await;
                raw.head().await
            } else {
                raw.get(path, "").await;
                raw.answer().await
            };
            assert_eq!((answer.status, answer.text(), answer.complete), (status, body, true), "{path}");
        }
    }
    let waiting = gauge("b19", "fairqueue_waiting_requests");
    assert!(waiting.most == 0.0, "a request had to wait for the permit of the one before");
    end_check(&queue, &units).await;
    assert_eq!(responses("b19", "completed"), 6 * 50);
    assert_eq!(responses("b19", "aborted"), 0);

    let mut cut = Raw::getting(server.addr, "/cut").await;
    cut.until("four").await.expect("the body but for its last byte");
    drop(cut);
    eventually(AT_ONCE, "the abort is seen", || responses("b19", "aborted") == 1).await;
    drop(connections);
    end_check(&queue, &units).await;
    assert_eq!((responses("b19", "completed"), units.peak()), (6 * 50, 1));
}

/// Replies of every framing.
fn replies() -> Router {
    let file = async || {
        let path = concat!(env!("CARGO_MANIFEST_DIR"), "/Cargo.toml");
        let file = tokio::fs::File::open(path).await.unwrap();
        let length = file.metadata().await.unwrap().len();
        let chunks = stream::unfold(file, async |mut file| {
            let mut chunk = vec![0; 1_000];
            let read = file.read(&mut chunk).await.unwrap();
            chunk.truncate(read);
            (read > 0).then_some((Ok::<_, Infallible>(chunk), file))
        });
        ([(header::CONTENT_LENGTH, length)], Body::from_stream(chunks))
    };
    Router::new()
        .route("/fixed", get(async || "hello, world!"))
        .route("/empty", get(async || ()))
        .route("/streamed", get(async || Body::new(Script::new().data("one").data("two").data("three"))))
        .route("/file", get(file))
}

async fn replies_with_and_without(layer: FairQueueLayer) -> [support::Server; 2] {
    [serve(replies().layer(layer)).await, serve(replies()).await]
}

// B20, HTTP/1.
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn replies_over_http1_are_framed_as_without_the_layer() {
    let layer = layer("b20-http1", 1);
    let queue = layer.queue().clone();
    let [with, without] = replies_with_and_without(layer).await;
    for path in ["/fixed", "/empty", "/streamed", "/file"] {
        for request in [
            format!("GET {path} HTTP/1.1\r\nhost: test\r\nconnection: close\r\n\r\n"),
            format!("HEAD {path} HTTP/1.1\r\nhost: test\r\nconnection: close\r\n\r\n"),
            format!("GET {path} HTTP/1.0\r\n\r\n"),
        ] {
            let expected = raw_answer(without.addr, &request).await;
            assert_eq!(raw_answer(with.addr, &request).await, expected, "{request}");
        }
    }
    for (path, length) in [("/fixed", "13"), ("/empty", "0")] {
        let answer = Raw::getting(with.addr, path).await.answer().await;
        assert_eq!(answer.header("content-length"), Some(length));
        assert_eq!(answer.header("transfer-encoding"), None);
    }
    let streamed = Raw::getting(with.addr, "/streamed").await.answer().await;
    assert_eq!(streamed.header("transfer-encoding"), Some("chunked"));
    end_check(&queue, &Units::default()).await;
}

const HEADERS: u8 = 1;
const END_STREAM: u8 = 1;

/// The frames that answer a GET of `path` over HTTP/2: type, flags, and the payload of those that are no headers (those of
/// two answers differ by the date).
async fn frames(addr: SocketAddr, path: &str) -> Vec<(u8, u8, Vec<u8>)> {
    let mut io = TcpStream::connect(addr).await.unwrap();
    let mut out = b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n".to_vec();
    out.extend([0, 0, 0, 4, 0, 0, 0, 0, 0]);
    // `:method GET` and `:scheme http` from the static table, then `:path` and `:authority` as literals.
    let mut head = vec![0x82, 0x86, 0x04, u8::try_from(path.len()).unwrap()];
    head.extend(path.as_bytes());
    head.extend(b"\x01\x04test");
    out.extend([0, 0, u8::try_from(head.len()).unwrap(), HEADERS, 0b101, 0, 0, 0, 1]);
    out.extend(head);
    io.write_all(&out).await.unwrap();
    let mut frames = Vec::new();
    loop {
        let mut prefix = [0; 9];
        soon("a frame", io.read_exact(&mut prefix)).await.unwrap();
        let [a, b, c, kind, flags, stream @ ..] = prefix;
        let mut payload = vec![0; u32::from_be_bytes([0, a, b, c]) as usize];
        soon("its payload", io.read_exact(&mut payload)).await.unwrap();
        if u32::from_be_bytes(stream) == 1 {
            frames.push((kind, flags, if kind == HEADERS { Vec::new() } else { payload }));
            if flags & END_STREAM != 0 {
                return frames;
            }
        }
    }
}

// B20, HTTP/2.
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn replies_over_http2_are_framed_as_without_the_layer() {
    let layer = layer("b20-http2", 1);
    let queue = layer.queue().clone();
    let [with, without] = replies_with_and_without(layer).await;
    for path in ["/fixed", "/empty", "/streamed", "/file"] {
        let expected = frames(without.addr, path).await;
        assert_eq!(frames(with.addr, path).await, expected, "{path}");
        let mut heads = Vec::new();
        for addr in [with.addr, without.addr] {
            let response = Http2::connect(addr).await.get(path).await.response().await;
            let (mut head, _) = response.into_parts();
            head.headers.remove(header::DATE);
            heads.push((head.status, head.headers));
        }
        assert_eq!(heads[0], heads[1], "{path}");
    }
    let empty = frames(with.addr, "/empty").await;
    assert_eq!(empty.len(), 1, "the empty reply ends on its HEADERS frame: {empty:?}");
    end_check(&queue, &Units::default()).await;
}

// B20, without a socket: the hints of every body at every step of it.
#[tokio::test]
async fn hints_are_those_of_the_inner_body_at_every_step() {
    type Made = Box<dyn Fn() -> Body + Send + Sync>;
    let bodies: [Made; 5] = [
        Box::new(|| Body::new(Full::new(Bytes::from("hello, world!")))),
        Box::new(|| Body::new(Empty::new())),
        Box::new(|| Body::new(Script::new().data("one").data("two"))),
        Box::new(|| Body::new(Script::new().data("one").data("three").sized(8))),
        Box::new(|| {
            let trailers = HeaderMap::new();
            Body::new(Script::new().data("one").trailers(trailers).hint_end_before_trailers())
        }),
    ];
    let layer = layer("b20-hints", 1);
    for make in &bodies {
        let service = layer.layer(service_fn(async |_: Request| Ok::<_, Infallible>(Response::new(make()))));
        let response = service.oneshot(Request::new(Body::empty())).await.unwrap();
        let (mut outer, mut inner) = (response.into_body(), make());
        loop {
            assert_eq!(outer.is_end_stream(), inner.is_end_stream());
            assert_eq!(outer.size_hint().lower(), inner.size_hint().lower());
            assert_eq!(outer.size_hint().upper(), inner.size_hint().upper());
            let (frame, expected) = (outer.frame().await, inner.frame().await);
            match (frame, expected) {
                (Some(frame), Some(expected)) => {
                    let (frame, expected) = (frame.unwrap(), expected.unwrap());
                    assert_eq!(frame.data_ref(), expected.data_ref());
                    assert_eq!(frame.trailers_ref(), expected.trailers_ref());
                }
                (None, None) => break,
                (frame, expected) => panic!("{frame:?} instead of {expected:?}"),
            }
        }
    }
    end_check(layer.queue(), &Units::default()).await;
}

fn status_trailers() -> HeaderMap {
    let mut trailers = HeaderMap::new();
    trailers.insert("grpc-status", HeaderValue::from_static("5"));
    trailers.insert("grpc-message", HeaderValue::from_static("no%20such%20thing"));
    // More than one value of a name, in their order.
    trailers.append("x-detail-bin", HeaderValue::from_static("AAEC"));
    trailers.append("x-detail-bin", HeaderValue::from_static("AwQF"));
    trailers
}

// B22 over HTTP/2: what gRPC sends for a unary call, a stream, an empty message (trailers alone) and an error (headers alone).
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn trailers_arrive_unchanged_and_the_permit_is_held_until_then() {
    let layer = layer("b22", 1);
    let (queue, units) = (layer.queue().clone(), Units::default());
    let (gates, mut opened) = tokio::sync::mpsc::unbounded_channel();
    let handler = {
        let units = units.clone();
        async move |request: Request<_>| {
            let path = request.uri().path().to_owned();
            if path == "/error" || path == "/next" {
                let mut response = Response::new(Body::empty());
                *response.headers_mut() = status_trailers();
                return Ok::<_, Infallible>(response);
            }
            let (opener, wait) = gate();
            gates.send(opener).unwrap();
            let body = Script::new().holding(units.enter());
            let body = match path.as_str() {
                "/unary" => body.data("message"),
                "/stream" => body.data("mess").data("a").data("ge"),
                "/empty-message" => body,
                other => unreachable!("{other}"),
            };
            Ok(Response::new(Body::new(body.wait(wait).trailers(status_trailers()))))
        }
    };
    let service = layer.layer(service_fn(move |request: Request<Incoming>| {
        let handler = handler.clone();
        async move { handler(request).await }
    }));
    let server = serve_with(auto::Builder::new(TokioExecutor::new()), service).await;

    let client = Http2::connect(server.addr).await;
    for (path, message) in [("/unary", "message"), ("/stream", "message"), ("/empty-message", "")] {
        let mut body = client.get(path).await.response().await.into_body();
        let mut received = Vec::new();
        while received.len() < message.len() {
            received.extend(soon("data", body.data()).await.unwrap().unwrap());
        }
        assert_eq!(received, message.as_bytes());

        let mut next = client.get("/next").await;
        let waiting = || queue.stats().waiting == 1;
        eventually(AT_ONCE, "the next call waits while the trailers are to come", waiting).await;
        assert_eq!((queue.stats().in_flight, units.now()), (1, 1), "{path}");

        opened.recv().await.unwrap().open();
        assert!(soon("the end of the data", body.data()).await.is_none());
        let trailers = soon("trailers", body.trailers()).await.unwrap();
        assert_eq!(trailers, Some(status_trailers()), "{path}");
        next.response().await;
        eventually(AT_ONCE, "the permit is back", || queue.stats().in_flight == 0).await;
    }
    let error = client.get("/error").await.response().await;
    assert!(error.body().is_end_stream());
    for (name, value) in &status_trailers() {
        assert!(error.headers().get_all(name).iter().any(|found| found == value), "{name}");
    }
    drop(client);
    end_check(&queue, &units).await;
    assert_eq!((responses("b22", "completed"), responses("b22", "aborted")), (7, 0));
}

// B22 by direct polling: both an honest body and one that says "end of stream" before its trailers.
#[tokio::test]
async fn early_end_of_stream_hint_neither_drops_trailers_nor_releases() {
    let layer = layer("b22-polled", 1);
    let (queue, units) = (layer.queue().clone(), Units::default());
    for lies in [false, true] {
        for to_the_end in [false, true] {
            let service = layer.layer(service_fn(async |_: Request| {
                let body = Script::new().data("one").data("two").holding(units.enter());
                let body = if lies { body.hint_end_before_trailers() } else { body };
                let (opener, wait) = gate();
                let mut response = Response::new(body.wait(wait).trailers(status_trailers()));
                response.extensions_mut().insert(Arc::new(std::sync::Mutex::new(Some(opener))));
                Ok::<_, Infallible>(response)
            }));
            let response = service.oneshot(Request::new(Body::empty())).await.unwrap();
            let opener = response
                .extensions()
                .get::<Arc<std::sync::Mutex<Option<support::Gate>>>>()
                .and_then(|opener| opener.lock().unwrap().take())
                .unwrap();
            let mut body = response.into_body();
            for expected in ["one", "two"] {
                let frame = body.frame().await.unwrap().unwrap();
                assert_eq!(frame.into_data().unwrap(), expected);
                assert_eq!(queue.stats().in_flight, 1);
            }
            assert_eq!(body.is_end_stream(), lies);
            {
                let mut frame = pin!(body.frame());
                assert!(futures_util::poll!(frame.as_mut()).is_pending());
                assert_eq!((queue.stats().in_flight, units.now()), (1, 1), "trailers are to come");
                if to_the_end {
                    opener.open();
                    let trailers = frame.await.unwrap().unwrap().into_trailers().unwrap();
                    assert_eq!(trailers, status_trailers());
                }
            }
            if to_the_end {
                assert!(body.frame().await.is_none());
                assert_eq!(queue.stats().in_flight, 0, "the end releases");
                assert!(body.frame().await.is_none(), "polled again, it is still at its end");
            }
            drop(body);
            assert_eq!((queue.stats().in_flight, units.now()), (0, 0), "the drop releases");
        }
    }
    end_check(&queue, &units).await;
}

// B22: a server goes by the hint; what it then does is what it does without the layer, and the permit comes back.
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn early_end_of_stream_hint_over_http2_is_as_without_the_layer() {
    let layer = FairQueueLayer::new(config("b22-hint", 1).build().unwrap());
    let queue = layer.queue().clone();
    let app = || {
        Router::new().route(
            "/",
            get(async || {
                let body = Script::new().data("one").trailers(status_trailers()).hint_end_before_trailers();
                Body::new(body)
            }),
        )
    };
    let (with, without) = (serve(app().layer(layer)).await, serve(app()).await);
    assert_eq!(frames(with.addr, "/").await, frames(without.addr, "/").await);
    end_check(&queue, &Units::default()).await;
    assert_eq!(responses("b22-hint", "completed"), 1);
}
