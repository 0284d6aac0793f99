//! The layer by itself, without sockets.

use std::convert::Infallible;

use bytes::Bytes;
use http::{Request, Response, StatusCode};
use http_body_util::{BodyExt, Full};
use tower::{ServiceBuilder, ServiceExt, service_fn};
use tower_fair_queue::{Cause, FairQueueConfig, FairQueueLayer, Rejection};

async fn hello(_: Request<()>) -> Result<Response<Full<Bytes>>, Infallible> {
    Ok(Response::new(Full::from("hello")))
}

#[tokio::test(start_paused = true)]
async fn a_permit_lives_as_long_as_the_body() {
    let layer = FairQueueLayer::new(FairQueueConfig::builder("q").capacity(1).build().unwrap());
    let queue = layer.queue().clone();
    let service = ServiceBuilder::new().layer(layer).service(service_fn(hello));

    let held = service.clone().oneshot(Request::new(())).await.unwrap();
    assert_eq!(queue.stats().in_flight, 1);

    let rejected = service.clone().oneshot(Request::new(())).await.unwrap();
    assert_eq!(rejected.status(), StatusCode::SERVICE_UNAVAILABLE);
    assert_eq!(rejected.extensions().get::<Rejection>().unwrap().cause(), Cause::TimedOut);

    assert_eq!(held.into_body().collect().await.unwrap().to_bytes(), "hello");
    assert_eq!(queue.stats().in_flight, 0);
    let granted = service.oneshot(Request::new(())).await.unwrap();
    assert_eq!(granted.status(), StatusCode::OK);
    drop(granted);
    assert_eq!(queue.stats().in_flight, 0);
}
