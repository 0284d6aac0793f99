//! What a queue that closes or drains tells those who are still there.

mod support;

use std::{
    convert::Infallible,
    future::{Ready, ready},
    task::{Context, Poll},
    time::Duration,
};

use bytes::Bytes;
use http::{Request, Response, StatusCode};
use http_body_util::{BodyExt, Full};
use tower::{Layer, Service, ServiceExt, service_fn};

use axum::{Router, routing::get};

use crate::support::{AT_ONCE, Raw, Script, Units, counter, end_check, eventually, layer, serve, soon};

/// A service that never gets ready.
#[derive(Clone)]
struct NeverReady;

impl Service<Request<()>> for NeverReady {
    type Response = Response<Script>;
    type Error = Infallible;
    type Future = Ready<Result<Self::Response, Infallible>>;

    fn poll_ready(&mut self, _: &mut Context<'_>) -> Poll<Result<(), Infallible>> {
        Poll::Pending
    }

    fn call(&mut self, _: Request<()>) -> Self::Future {
        ready(Ok(Response::new(Script::new())))
    }
}

// P11: what runs ends within the bound, also where it has not come as far as the inner service's future.
#[tokio::test]
async fn drain_ends_a_request_whose_service_is_not_ready() {
    let layer = layer("unready", 1);
    let queue = layer.queue().clone();
    let request = tokio::spawn(layer.layer(NeverReady).oneshot(Request::new(())));
    eventually(AT_ONCE, "it is granted", || queue.stats().in_flight == 1).await;
    let drained = queue.drain(Duration::from_millis(50)).await;
    assert!(drained.is_complete(), "{drained:?}");
    let response = soon("an answer", request).await.unwrap().unwrap();
    assert_eq!(response.status(), StatusCode::SERVICE_UNAVAILABLE);
    end_check(&queue, &Units::default()).await;
}

// B55 and the words of `Rejection::response`: a client that keeps its connection would come back to a server that is going.
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn rejection_while_shutting_down_asks_http1_to_close() {
    let layer = layer("closing", 1);
    let queue = layer.queue().clone();
    let server = serve(Router::new().route("/", get(async || "hello")).layer(layer)).await;
    let mut client = Raw::connect(server.addr).await;
    client.get("/", "").await;
    assert_eq!(client.answer().await.status, 200);
    queue.close();
    client.get("/", "").await;
    let answer = client.answer().await;
    assert_eq!(answer.status, 503);
    assert_eq!(answer.header("connection"), Some("close"), "{}", answer.head);
    assert!(client.rest().await.is_empty(), "the server closes");
    end_check(&queue, &Units::default()).await;
}

// A body whose every byte was delivered is complete, also if its permit was revoked before the server let go of it.
#[tokio::test]
async fn delivered_body_counts_as_completed_though_it_is_revoked_before_its_drop() {
    let layer = layer("delivered", 1);
    let queue = layer.queue().clone();
    let service = layer.layer(service_fn(|_: Request<()>| async {
        Ok::<_, Infallible>(Response::new(Full::<Bytes>::from("all of it")))
    }));
    let mut body = service.oneshot(Request::new(())).await.unwrap().into_body();
    assert!(body.frame().await.unwrap().is_ok());
    assert_eq!(queue.drain(Duration::ZERO).await.remaining(), 1);
    drop(body);
    let ended = |outcome| counter("delivered", "fairqueue_responses_total", Some(("outcome", outcome)));
    assert_eq!([ended("completed"), ended("aborted"), ended("revoked")], [1, 0, 0]);
    end_check(&queue, &Units::default()).await;
}
