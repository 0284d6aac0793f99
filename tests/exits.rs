//! Every way a request can end badly gives its permit back.

mod support;

use std::{
    convert::Infallible,
    error::Error,
    sync::{
        Arc,
        atomic::{AtomicUsize, Ordering},
    },
    time::Duration,
};

use axum::{
    BoxError, Router,
    body::Body,
    error_handling::HandleErrorLayer,
    extract::Request,
    response::Response,
    routing::{any_service, get_service},
};
use http::StatusCode;
use hyper::body::Incoming;
use hyper_util::{rt::TokioExecutor, server::conn::auto};
use tokio::{task::JoinSet, time::Instant, time::sleep};
use tower::{Layer, ServiceBuilder, service_fn};
use tower_fair_queue::{Ask, Cause, Class, FairQueueLayer, Rejection, RequestHead};

use crate::support::{
    AT_ONCE, Http2, Raw, Script, Units, config, counter, end_check, eventually, gate, gauge, layer,
    panic_on_purpose, quiet_panics, serve, serve_with,
};

const ROUNDS: u32 = 20;

/// Each exit with what its client sees: a status, or the end of the connection instead of a response.
const EXITS: [(&str, Option<u16>); 9] = [
    ("/panic-in-call", None),
    ("/panic-in-future", None),
    ("/panic-in-body", Some(200)),
    ("/panic-in-classify", None),
    ("/panic-in-reject", None),
    ("/inner-error", Some(502)),
    ("/inner-timeout", Some(504)),
    ("/outer-timeout", Some(504)),
    ("/outer-timeout-in-line", Some(504)),
];

fn classify(head: &RequestHead<'_>) -> Class {
    match head.uri().path() {
        "/panic-in-classify" => panic_on_purpose(),
        "/panic-in-reject" => Class::Refuse,
        _ => Ask::new().into(),
    }
}

#[expect(clippy::needless_pass_by_value, reason = "the signature of a rejecting closure")]
fn reject(rejection: Rejection, request: Request) -> Response {
    if request.uri().path() == "/panic-in-reject" {
        panic_on_purpose();
    }
    let mut response = Response::new(Body::from(rejection.cause().as_str()));
    *response.status_mut() = rejection.status();
    response
}

async fn answer_error(error: BoxError) -> StatusCode {
    if error.is::<tower::timeout::error::Elapsed>() {
        StatusCode::GATEWAY_TIMEOUT
    } else {
        StatusCode::BAD_GATEWAY
    }
}

// B07: C=2, 20 of each exit, 140 good requests between them.
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn every_bad_exit_gives_its_permit_back() {
    quiet_panics();
    let base = FairQueueLayer::new(config("b07", 2).build().unwrap());
    let (queue, units) = (base.queue().clone(), Units::default());
    let layer = base.classify(classify).reject_with(reject);
    let timed_out_at_work = Arc::new(AtomicUsize::new(0));

    let inner = {
        let (units, timed_out_at_work) = (units.clone(), Arc::clone(&timed_out_at_work));
        service_fn(move |request: Request| {
            let unit = units.enter();
            let path = request.uri().path().to_owned();
            if path == "/panic-in-call" {
                panic_on_purpose();
            }
            let timed_out_at_work = Arc::clone(&timed_out_at_work);
            async move {
                sleep(Duration::from_millis(2)).await;
                let body = Script::new().holding(unit).data("one").flush().sleep(Duration::from_millis(2));
                let body = match path.as_str() {
                    "/panic-in-future" => panic_on_purpose(),
                    "/panic-in-body" => body.panic(),
                    "/inner-error" => return Err(BoxError::from("the service failed")),
                    "/inner-timeout" | "/outer-timeout" | "/outer-timeout-in-line" => {
                        timed_out_at_work.fetch_add(1, Ordering::SeqCst);
                        // Longer than any timeout here, and the body keeps its unit until the future is dropped.
                        sleep(Duration::from_secs(60)).await;
                        body
                    }
                    _ => body.data("two"),
                };
                Ok(Response::new(Body::new(body)))
            }
        })
    };
    let errors = || HandleErrorLayer::new(answer_error);
    let plain = ServiceBuilder::new().layer(errors()).layer(layer.clone()).service(inner.clone());
    let inner_timeout = ServiceBuilder::new()
        .layer(errors())
        .layer(layer.clone())
        .timeout(Duration::from_millis(30))
        .service(inner.clone());
    let outer_timeout = |time| {
        let stack = ServiceBuilder::new().layer(errors()).timeout(time).layer(layer.clone());
        any_service(stack.service(inner.clone()))
    };
    let app = Router::new()
        .route_service("/inner-timeout", inner_timeout)
        // The first is long enough to be granted and short of the end; the second can end while it is parked.
        .route("/outer-timeout", outer_timeout(Duration::from_millis(250)))
        .route("/outer-timeout-in-line", outer_timeout(Duration::from_millis(5)))
        .fallback_service(get_service(plain));
    let server = serve(app).await;

    let addr = server.addr;
    let mut clients = JoinSet::new();
    for (path, expected) in EXITS {
        clients.spawn(async move {
            for _ in 0..ROUNDS {
                let answer = Raw::getting(addr, path).await.try_answer().await;
                assert_eq!(answer.as_ref().map(|answer| answer.status), expected, "{path}");
                if path == "/panic-in-body" {
                    let answer = answer.unwrap();
                    assert_eq!((answer.text(), answer.complete), ("one", false));
                }
            }
        });
    }
    for _ in 0..7 {
        clients.spawn(async move {
            for _ in 0..ROUNDS {
                let answer = Raw::getting(addr, "/good").await.answer().await;
                assert_eq!((answer.status, answer.text(), answer.complete), (200, "onetwo", true));
            }
        });
    }
    while let Some(ended) = clients.join_next().await {
        ended.unwrap();
    }
    end_check(&queue, &units).await;
    assert_eq!(units.peak(), 2);
    let at_work = timed_out_at_work.load(Ordering::SeqCst);
    assert!(
        at_work >= 2 * ROUNDS as usize,
        "only {at_work} of the timeouts came while the service was at work"
    );
    let ended = |outcome| counter("b07", "fairqueue_responses_total", Some(("outcome", outcome)));
    assert_eq!(ended("completed"), 140);
    assert_eq!(ended("failed"), u64::from(2 * ROUNDS), "the inner error and the inner timeout");

    // Both permits are there, and nothing is poisoned.
    let answers =
        [Raw::getting(addr, "/good").await.answer().await, Raw::getting(addr, "/good").await.answer().await];
    assert!(answers.iter().all(|answer| answer.status == 200 && answer.complete));
    end_check(&queue, &units).await;
}

// B07: without an error-handling layer the service's error passes through to hyper, which ends the connection.
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn errors_that_reach_the_server_give_their_permits_back() {
    let layer = layer("b07-plain", 2);
    let (queue, units) = (layer.queue().clone(), Units::default());
    let service = {
        let units = units.clone();
        layer.layer(service_fn(move |request: Request<Incoming>| {
            let unit = units.enter();
            async move {
                sleep(Duration::from_millis(1)).await;
                match request.uri().path() {
                    "/error" => Err(Box::<dyn Error + Send + Sync>::from("the service failed")),
                    "/body-error" => {
                        let body = Script::new().holding(unit).data("one").flush();
                        Ok(Response::new(body.fail()))
                    }
                    _ => Ok(Response::new(Script::new().holding(unit).data("good"))),
                }
            }
        }))
    };
    let server = serve_with(auto::Builder::new(TokioExecutor::new()), service).await;

    let addr = server.addr;
    let mut clients = JoinSet::new();
    for _ in 0..5 {
        clients.spawn(async move {
            for _ in 0..ROUNDS {
                assert_eq!(Raw::getting(addr, "/error").await.try_answer().await, None);
                let cut = Raw::getting(addr, "/body-error").await.answer().await;
                assert_eq!((cut.status, cut.text(), cut.complete), (200, "one", false));
                let good = Raw::getting(addr, "/good").await.answer().await;
                assert_eq!((good.status, good.text(), good.complete), (200, "good", true));
            }
        });
    }
    while let Some(ended) = clients.join_next().await {
        ended.unwrap();
    }
    end_check(&queue, &units).await;
    assert_eq!(units.peak(), 2);
}

// B07 over HTTP/2: a panic ends its own stream, and neither the connection nor those in line on it.
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn panic_over_http2_harms_its_own_stream_alone() {
    quiet_panics();
    let base = layer("b07-http2", 1);
    let (queue, units) = (base.queue().clone(), Units::default());
    let layer = base.classify(classify).reject_with(|_, _: Request<Incoming>| panic_on_purpose());
    let service = {
        let units = units.clone();
        layer.layer(service_fn(move |request: Request<Incoming>| {
            let unit = units.enter();
            let path = request.uri().path().to_owned();
            if path == "/panic-in-call" {
                panic_on_purpose();
            }
            async move {
                sleep(Duration::from_millis(1)).await;
                if path == "/panic-in-future" {
                    panic_on_purpose();
                }
                let body = Script::new().holding(unit).data("one").flush().sleep(Duration::from_millis(1));
                Ok::<_, Infallible>(Response::new(if path == "/panic-in-body" {
                    body.panic()
                } else {
                    body.data("two")
                }))
            }
        }))
    };
    let server = serve_with(auto::Builder::new(TokioExecutor::new()), service).await;

    let client = Http2::connect(server.addr).await;
    let paths =
        ["/panic-in-call", "/panic-in-future", "/panic-in-body", "/panic-in-classify", "/panic-in-reject"];
    for _ in 0..ROUNDS {
        let mut streams = Vec::new();
        for path in paths {
            streams.push((path, client.get(path).await));
            streams.push(("/good", client.get("/good").await));
        }
        for (path, stream) in streams {
            let text = stream.text().await;
            assert_eq!(text, (path == "/good").then(|| "onetwo".to_owned()), "{path}");
        }
    }
    drop(client);
    end_check(&queue, &units).await;
    assert_eq!(units.peak(), 1);
}

// B07: the rejection panics after a wait in line, not at once as above.
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn panicking_rejection_frees_its_place_in_line() {
    quiet_panics();
    let name = "b07-reject";
    let base = FairQueueLayer::new(
        config(name, 1).max_waiting(ROUNDS).max_wait(Duration::from_secs(60)).build().unwrap(),
    );
    let (queue, units) = (base.queue().clone(), Units::default());
    let layer = base
        .classify(|head: &RequestHead<'_>| match head.uri().path() {
            "/short" => Ask::new().deadline(Instant::now() + Duration::from_millis(200)).into(),
            _ => Ask::new().into(),
        })
        .reject_with(|rejection, _: Request| {
            if rejection.cause() == Cause::TimedOut {
                panic_on_purpose();
            }
            let mut response = Response::new(Body::empty());
            *response.status_mut() = rejection.status();
            response
        });
    let (opener, wait) = gate();
    let inner = {
        let (units, wait) = (units.clone(), Arc::new(std::sync::Mutex::new(Some(wait))));
        service_fn(move |_: Request| {
            let body = Script::new().holding(units.enter()).data("good");
            let body = match wait.lock().unwrap().take() {
                Some(wait) => body.wait(wait),
                None => body,
            };
            async move { Ok::<_, Infallible>(Response::new(Body::new(body))) }
        })
    };
    let server = serve(Router::new().fallback_service(layer.layer(inner))).await;

    let mut busy = Raw::getting(server.addr, "/").await;
    busy.until("good").await.unwrap();
    // The line is as long as its bound: a place that is lost would be missed in the second round.
    for _ in 0..2 {
        let mut parked = Vec::new();
        for _ in 0..ROUNDS {
            parked.push(Raw::getting(server.addr, "/short").await);
        }
        for client in &mut parked {
            assert_eq!(client.try_answer().await, None, "a panic ends the connection");
        }
        eventually(AT_ONCE, "nobody waits", || queue.stats().waiting == 0).await;
        let timed_out = counter(name, "fairqueue_rejections_total", Some(("cause", "queue_full")));
        assert_eq!(timed_out, 0);
    }
    assert!(gauge(name, "fairqueue_waiting_requests").most > 1.0);
    opener.open();
    busy.until("0\r\n\r\n").await.unwrap();
    assert_eq!(Raw::getting(server.addr, "/").await.answer().await.status, 200);
    drop(busy);
    end_check(&queue, &units).await;
    assert_eq!((units.entered(), units.peak()), (2, 1));
}
