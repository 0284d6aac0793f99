//! The layer.

use std::{fmt, future::Future, sync::Arc};

use http::{Request, Response};
use tower_layer::Layer;

use super::{
    Class, DefaultReject, FairQueueService, QueueAll, RejectAsyncFn, RejectFn, Rejection, RequestHead,
    service::Front,
};
use crate::{config::FairQueueConfig, queue::FairQueue};

/// Puts a queue in front of a service of HTTP requests.
///
/// All clones of a layer, and all services they make, share one queue: mounted on a router, a route and a method
/// router it is still one capacity, and a request that meets it twice takes one permit. Two layers made apart are two
/// queues, unless both are kept in Redis under one name.
///
/// A request is classified when the service is called, waits inside the response future, and is passed on to a clone
/// of the inner service that is made ready after the grant. `poll_ready` is always ready and reserves nothing: what holds
/// back is the line and its bound. The permit lives until the response body has ended or is dropped.
///
/// In axum, `route_layer` queues what a route will serve; with `layer` what no route matches stands in line as well before it
/// gets its 404.
///
/// # Examples
///
/// ```
/// use std::time::Duration;
/// use axum::{Router, routing::post};
/// use tower_fair_queue::{Ask, Class, FairQueueConfig, FairQueueLayer};
///
/// let config = FairQueueConfig::builder("chat").capacity(3).max_wait(Duration::from_secs(20)).build()?;
/// let layer = FairQueueLayer::new(config).classify(|head| match head.uri().path() {
///     "/healthz" => Class::Bypass,
///     // Set by an authenticating layer or proxy outside, never by the client.
///     _ => Ask::new().flow(head.header("x-tenant").unwrap_or_default()).into(),
/// });
/// let app: Router = Router::new().route("/chat", post(|| async { "hello" })).route_layer(layer);
/// # Ok::<(), tower_fair_queue::ConfigError>(())
/// ```
#[must_use = "a layer does nothing until it is applied to a service"]
pub struct FairQueueLayer<C = QueueAll, R = DefaultReject> {
    front: Arc<Front<C, R>>,
}

impl FairQueueLayer {
    /// A layer over a new queue. It never fails, never blocks and needs no runtime; see [`FairQueue::new`].
    pub fn new(config: FairQueueConfig) -> Self {
        Self::with_queue(FairQueue::new(config))
    }

    /// A layer over a new queue that grants already; see [`FairQueue::connect`].
    ///
    /// # Errors
    ///
    /// What stands in the way, by name.
    ///
    /// # Cancel safety
    ///
    /// As [`FairQueue::connect`].
    #[cfg(feature = "redis")]
    pub async fn connect(config: FairQueueConfig) -> Result<Self, crate::ConnectError> {
        Ok(Self::with_queue(FairQueue::connect(config).await?))
    }

    /// A layer over a queue that is there already, for instance behind another layer that classifies otherwise.
    pub fn with_queue(queue: FairQueue) -> Self {
        Self { front: Arc::new(Front { queue, classify: Arc::default(), reject: Arc::default() }) }
    }
}

impl<C, R> FairQueueLayer<C, R> {
    /// Decides by `classify` what each request is to the queue. Default [`QueueAll`].
    ///
    /// Any [`Classify`](super::Classify) can stand in for a closure: [`classify_with`](Self::classify_with).
    pub fn classify<F>(self, classify: F) -> FairQueueLayer<F, R>
    where
        F: Fn(&RequestHead<'_>) -> Class,
    {
        self.classify_with(classify)
    }

    /// As [`classify`](Self::classify), for any classifier.
    pub fn classify_with<D>(self, classify: D) -> FairQueueLayer<D, R> {
        let Front { queue, reject, .. } = &*self.front;
        let (queue, reject) = (queue.clone(), Arc::clone(reject));
        FairQueueLayer { front: Arc::new(Front { queue, classify: Arc::new(classify), reject }) }
    }

    fn rejecting<Q>(&self, reject: Q) -> FairQueueLayer<C, Q> {
        let Front { queue, classify, .. } = &*self.front;
        let (queue, classify) = (queue.clone(), Arc::clone(classify));
        FairQueueLayer { front: Arc::new(Front { queue, classify, reject: Arc::new(reject) }) }
    }

    /// Answers a rejected request with what `reject` returns. It gets the whole request, body included. The default is
    /// [`Rejection::response`].
    ///
    /// The response is of the inner service's own body type, `axum::body::Body` behind axum; that is checked where the layer meets
    /// the service. It gets the rejection as an extension, unless it has one.
    pub fn reject_with<F, ReqBody, ResBody>(self, reject: F) -> FairQueueLayer<C, RejectFn<F>>
    where
        F: Fn(Rejection, Request<ReqBody>) -> Response<ResBody>,
    {
        self.rejecting(RejectFn::new(reject))
    }

    /// As [`reject_with`](Self::reject_with), with an asynchronous answer: it can read the body, or write the question to the
    /// history, before it answers. It holds no permit and has no deadline but its own.
    pub fn reject_with_async<F, Fut, ReqBody, ResBody>(self, reject: F) -> FairQueueLayer<C, RejectAsyncFn<F>>
    where
        F: Fn(Rejection, Request<ReqBody>) -> Fut,
        Fut: Future<Output = Response<ResBody>>,
    {
        self.rejecting(RejectAsyncFn::new(reject))
    }

    /// The queue: for its numbers, its capacity, and its end.
    #[must_use]
    pub fn queue(&self) -> &FairQueue {
        &self.front.queue
    }
}

impl<S, C, R> Layer<S> for FairQueueLayer<C, R> {
    type Service = FairQueueService<S, C, R>;

    fn layer(&self, inner: S) -> Self::Service {
        FairQueueService::new(inner, Arc::clone(&self.front))
    }
}

impl<C, R> Clone for FairQueueLayer<C, R> {
    fn clone(&self) -> Self {
        Self { front: Arc::clone(&self.front) }
    }
}

impl<C, R> fmt::Debug for FairQueueLayer<C, R> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("FairQueueLayer").field("queue", &self.front.queue).finish_non_exhaustive()
    }
}
