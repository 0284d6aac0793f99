//! Who answers a request that got no permit.

use std::{
    fmt,
    future::{Future, Ready, ready},
    pin::Pin,
    task::{Context, Poll, ready as ready_or_return},
};

use http::{Request, Response};
use pin_project_lite::pin_project;

use super::{Rejection, ResponseBody};

/// Answers rejected requests. [`FairQueueLayer::reject_with`](super::FairQueueLayer::reject_with) and
/// [`reject_with_async`](super::FairQueueLayer::reject_with_async) make one of a closure.
///
/// Called at most once for a request (promise P5), without a permit and without a lock.
pub trait Reject<ReqBody, ResBody> {
    /// The answer to come.
    type Future: Future<Output = Response<ResponseBody<ResBody>>>;

    /// Answers `request`.
    fn reject(&self, rejection: Rejection, request: Request<ReqBody>) -> Self::Future;
}

/// Answers with [`Rejection::response`].
#[derive(Clone, Copy, Debug, Default)]
pub struct DefaultReject(());

impl<ReqBody, ResBody> Reject<ReqBody, ResBody> for DefaultReject {
    type Future = Ready<Response<ResponseBody<ResBody>>>;

    fn reject(&self, rejection: Rejection, _: Request<ReqBody>) -> Self::Future {
        ready(rejection.response().map(ResponseBody::whole))
    }
}

/// Answers with what a closure returns.
#[derive(Clone, Copy)]
pub struct RejectFn<F>(F);

impl<F> RejectFn<F> {
    pub(super) fn new(f: F) -> Self {
        Self(f)
    }
}

impl<F, ReqBody, ResBody> Reject<ReqBody, ResBody> for RejectFn<F>
where
    F: Fn(Rejection, Request<ReqBody>) -> Response<ResBody>,
{
    type Future = Ready<Response<ResponseBody<ResBody>>>;

    fn reject(&self, rejection: Rejection, request: Request<ReqBody>) -> Self::Future {
        ready(mark((self.0)(rejection.clone(), request), rejection))
    }
}

/// Answers with what an asynchronous closure returns.
#[derive(Clone, Copy)]
pub struct RejectAsyncFn<F>(F);

impl<F> RejectAsyncFn<F> {
    pub(super) fn new(f: F) -> Self {
        Self(f)
    }
}

impl<F, Fut, ReqBody, ResBody> Reject<ReqBody, ResBody> for RejectAsyncFn<F>
where
    F: Fn(Rejection, Request<ReqBody>) -> Fut,
    Fut: Future<Output = Response<ResBody>>,
{
    type Future = RejectFuture<Fut>;

    fn reject(&self, rejection: Rejection, request: Request<ReqBody>) -> Self::Future {
        RejectFuture { inner: (self.0)(rejection.clone(), request), rejection: Some(rejection) }
    }
}

pin_project! {
    /// The future of a [`RejectAsyncFn`].
    pub struct RejectFuture<Fut> {
        #[pin]
        inner: Fut,
        rejection: Option<Rejection>,
    }
}

impl<Fut, ResBody> Future for RejectFuture<Fut>
where
    Fut: Future<Output = Response<ResBody>>,
{
    type Output = Response<ResponseBody<ResBody>>;

    fn poll(self: Pin<&mut Self>, cx: &mut Context<'_>) -> Poll<Self::Output> {
        let this = self.project();
        let response = ready_or_return!(this.inner.poll(cx));
        let rejection = this.rejection.take().expect("`RejectFuture` polled after it gave its answer");
        Poll::Ready(mark(response, rejection))
    }
}

fn mark<ResBody>(mut response: Response<ResBody>, rejection: Rejection) -> Response<ResponseBody<ResBody>> {
    response.extensions_mut().get_or_insert_with(|| rejection);
    response.map(ResponseBody::bare)
}

impl<F> fmt::Debug for RejectFn<F> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("RejectFn").finish_non_exhaustive()
    }
}

impl<F> fmt::Debug for RejectAsyncFn<F> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("RejectAsyncFn").finish_non_exhaustive()
    }
}

impl<Fut> fmt::Debug for RejectFuture<Fut> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("RejectFuture").finish_non_exhaustive()
    }
}
