//! What is compared: no layer, tower's own limit doing the same job, and our layer, over one and the same service.
//!
//! tower's `ConcurrencyLimit` waits in `poll_ready`, where its `Timeout` does not look; so the whole wait is moved into
//! `call`, under the `Timeout`, as a handler that must answer by a deadline has to do.

use std::{convert::Infallible, fmt::Debug, hint::black_box, time::Duration};

use bytes::Bytes;
use http::{Request, Response};
use http_body_util::Full;
use tokio::runtime::{Builder, Runtime};
use tower::{BoxError, Layer, Service, ServiceExt, limit::ConcurrencyLimit, service_fn, timeout::Timeout};
use tower_fair_queue::{FairQueueConfig, FairQueueLayer, Limit, ResponseBody};

const CAPACITY: u32 = 10;
const MAX_WAIT: Duration = Duration::from_secs(20);

type Body = Full<Bytes>;

async fn answer(yields: bool) -> Result<Response<Body>, Infallible> {
    if yields {
        tokio::task::yield_now().await;
    }
    Ok(Response::new(Full::from("answer")))
}

/// The service alone. With `yields` it yields once, so that whoever is not among the first ten waits.
pub(crate) fn no_layer(
    yields: bool,
) -> impl Service<Request<()>, Response = Response<Body>, Error = Infallible, Future: Send> + Clone + Send + 'static
{
    service_fn(move |_: Request<()>| answer(yields))
}

pub(crate) fn timeout_over_concurrency_limit(
    yields: bool,
) -> impl Service<Request<()>, Response = Response<Body>, Error = BoxError, Future: Send> + Clone + Send + 'static
{
    let limit = ConcurrencyLimit::new(service_fn(move |_: Request<()>| answer(yields)), CAPACITY as usize);
    Timeout::new(service_fn(move |request| limit.clone().oneshot(request)), MAX_WAIT)
}

pub(crate) fn fair_queue(
    yields: bool,
) -> impl Service<Request<()>, Response = Response<ResponseBody<Body>>, Error = Infallible, Future: Send>
+ Clone
+ Send
+ 'static {
    let config = FairQueueConfig::builder("bench").capacity(CAPACITY).max_waiting(Limit::Unlimited);
    let layer = FairQueueLayer::new(config.max_wait(MAX_WAIT).build().expect("within its bounds"));
    layer.layer(service_fn(move |_: Request<()>| answer(yields)))
}

pub(crate) fn runtimes() -> [(&'static str, Runtime); 2] {
    [
        ("one thread", Builder::new_current_thread().enable_all().build().expect("a runtime")),
        (
            "two threads",
            Builder::new_multi_thread().worker_threads(2).enable_all().build().expect("a runtime"),
        ),
    ]
}

/// All requests at once, each in a task; the responses are dropped where they arrive.
pub(crate) async fn all_at_once<S>(service: S, requests: usize)
where
    S: Service<Request<()>, Future: Send, Response: Send, Error: Debug + Send> + Clone + Send + 'static,
{
    let ask = |_| {
        let service = service.clone();
        tokio::spawn(async move { drop(black_box(service.oneshot(Request::new(())).await.expect("served"))) })
    };
    let tasks: Vec<_> = (0..requests).map(ask).collect();
    for task in tasks {
        task.await.expect("no panic");
    }
}

/// One request, without a task.
pub(crate) async fn alone<S>(service: S)
where
    S: Service<Request<()>, Error: Debug> + Clone,
{
    drop(black_box(service.oneshot(Request::new(())).await.expect("served")));
}
