//! The service.

use std::{
    fmt,
    sync::Arc,
    task::{Context, Poll},
};

use http::{Request, Response};
use http_body::Body;
use tower_service::Service;

use super::{Class, Classify, Reject, RequestHead, ResponseBody, ResponseFuture, mark::Mark};
use crate::queue::FairQueue;

/// What a [`FairQueueLayer`](super::FairQueueLayer) makes of a service.
///
/// # The inner service is cloned
///
/// Each request takes a clone of the inner service into its response future, and that clone is made ready once the
/// permit is there. A request in line so holds nothing of the inner service; an error of its readiness comes out of the
/// response future, as the service's own errors do.
pub struct FairQueueService<S, C, R> {
    inner: S,
    front: Arc<Front<C, R>>,
}

/// What all services and clones of a layer share: a service is cloned for each request, and this is one count.
pub(super) struct Front<C, R> {
    pub(super) queue: FairQueue,
    pub(super) classify: Arc<C>,
    pub(super) reject: Arc<R>,
}

impl<S, C, R> FairQueueService<S, C, R> {
    pub(super) fn new(inner: S, front: Arc<Front<C, R>>) -> Self {
        Self { inner, front }
    }

    /// The inner service.
    pub fn get_ref(&self) -> &S {
        &self.inner
    }

    /// The inner service, mutably.
    pub fn get_mut(&mut self) -> &mut S {
        &mut self.inner
    }

    /// The inner service, without the queue.
    pub fn into_inner(self) -> S {
        self.inner
    }
}

impl<S, C, R, ReqBody, ResBody> Service<Request<ReqBody>> for FairQueueService<S, C, R>
where
    S: Service<Request<ReqBody>, Response = Response<ResBody>> + Clone,
    C: Classify,
    R: Reject<ReqBody, ResBody>,
    ResBody: Body,
{
    type Response = Response<ResponseBody<ResBody>>;
    type Error = S::Error;
    type Future = ResponseFuture<S, R, ReqBody, ResBody>;

    /// Always ready. It reserves nothing, here or in the inner service.
    fn poll_ready(&mut self, _: &mut Context<'_>) -> Poll<Result<(), Self::Error>> {
        Poll::Ready(Ok(()))
    }

    fn call(&mut self, request: Request<ReqBody>) -> Self::Future {
        let Front { queue, classify, reject } = &*self.front;
        let shared = queue.shared();
        if Mark::is_on(request.extensions(), shared) {
            return ResponseFuture::pass(self.inner.clone(), request);
        }
        match classify.classify(&RequestHead::of(&request)) {
            Class::Bypass => {
                shared.metrics().bypassed();
                ResponseFuture::pass(self.inner.clone(), request)
            }
            Class::Queue(ask) => {
                ResponseFuture::wait(queue.acquire(ask), self.inner.clone(), Arc::clone(reject), request)
            }
            Class::Refuse => ResponseFuture::refuse(&**reject, shared, request),
        }
    }
}

impl<S: Clone, C, R> Clone for FairQueueService<S, C, R> {
    fn clone(&self) -> Self {
        Self { inner: self.inner.clone(), front: Arc::clone(&self.front) }
    }
}

impl<S: fmt::Debug, C, R> fmt::Debug for FairQueueService<S, C, R> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("FairQueueService")
            .field("inner", &self.inner)
            .field("queue", &self.front.queue)
            .finish_non_exhaustive()
    }
}
