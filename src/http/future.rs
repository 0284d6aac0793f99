//! The response future.

use std::{
    fmt,
    future::Future,
    pin::Pin,
    sync::Arc,
    task::{Context, Poll, ready},
    time::Duration,
};

use http::{HeaderMap, Method, Request, Response, Version};
use http_body::Body;
use pin_project_lite::pin_project;
use tower_service::Service;

use super::{Reject, Rejection, ResponseBody, holding::Holding, mark::Mark};
use crate::{
    error::{AcquireError, Cause},
    metrics::{Ended, Waited},
    queue::{Acquire, Shared},
};

pin_project! {
    /// The future of a [`FairQueueService`](super::FairQueueService): waits in line, then for the inner service to be ready, then for its
    /// response.
    ///
    /// # Cancel safety
    ///
    /// Dropped in line it gives up the place; later it drops the inner service's future and then gives back the permit.
    #[must_use = "futures do nothing unless polled"]
    pub struct ResponseFuture<S, R, ReqBody, ResBody>
    where
        S: Service<Request<ReqBody>>,
        R: Reject<ReqBody, ResBody>,
    {
        #[pin]
        state: State<S, R, ReqBody, ResBody>,
    }
}

pin_project! {
    #[project = StateProj]
    #[project_replace = StateOwn]
    enum State<S, R, ReqBody, ResBody>
    where
        S: Service<Request<ReqBody>>,
        R: Reject<ReqBody, ResBody>,
    {
        /// In line. Left for `Preparing` by a grant, for `Rejecting` by anything else.
        Waiting { #[pin] acquire: Acquire, inner: S, reject: Arc<R>, shared: Arc<Shared>, request: Request<ReqBody> },
        /// Granted, or passing by without a permit, until the inner service is ready.
        Preparing { inner: S, request: Request<ReqBody>, holding: Holding },
        /// The inner service is at work. The future stands before the holding, so it is dropped before the units go back.
        Running { #[pin] future: S::Future, method: Method, version: Version, holding: Holding },
        /// Rejected; the answer is being made.
        Rejecting { #[pin] answer: R::Future },
        Done,
    }
}

impl<S, R, ReqBody, ResBody> ResponseFuture<S, R, ReqBody, ResBody>
where
    S: Service<Request<ReqBody>, Response = Response<ResBody>>,
    R: Reject<ReqBody, ResBody>,
{
    pub(super) fn pass(inner: S, request: Request<ReqBody>) -> Self {
        Self { state: State::Preparing { inner, request, holding: Holding::new(None) } }
    }

    pub(super) fn wait(
        acquire: Acquire,
        inner: S,
        reject: Arc<R>,
        shared: Arc<Shared>,
        request: Request<ReqBody>,
    ) -> Self {
        Self { state: State::Waiting { acquire, inner, reject, shared, request } }
    }

    pub(super) fn refuse(reject: &R, shared: &Shared, request: Request<ReqBody>) -> Self {
        shared.metrics().waited(Waited::Rejected(Cause::Refused), Duration::ZERO);
        let error = AcquireError::new(Cause::Refused, Duration::ZERO);
        Self { state: State::rejecting(reject, shared, error, request) }
    }
}

impl<S, R, ReqBody, ResBody> State<S, R, ReqBody, ResBody>
where
    S: Service<Request<ReqBody>>,
    R: Reject<ReqBody, ResBody>,
{
    fn rejecting(reject: &R, shared: &Shared, error: AcquireError, request: Request<ReqBody>) -> Self {
        let rejection = Rejection::new(error, shared, request.version(), request.headers());
        Self::Rejecting { answer: reject.reject(rejection, request) }
    }

    /// Hands the request to the service, which is ready.
    fn running(mut inner: S, request: Request<ReqBody>, holding: Holding) -> Self {
        let (method, version) = (request.method().clone(), request.version());
        Self::Running { future: inner.call(request), method, version, holding }
    }

    /// Ends a granted request whose service had not answered when the grace of a drain was over. The request is the
    /// service's by now, so this gives the default answer, whoever answers rejections.
    fn revoked<Body>(mut self: Pin<&mut Self>) -> Response<ResponseBody<Body>> {
        let (holding, version) = match self.as_mut().project() {
            StateProj::Preparing { request, holding, .. } => (holding, request.version()),
            StateProj::Running { holding, version, .. } => (holding, *version),
            _ => unreachable!("only a granted request can be revoked"),
        };
        holding.ends(Ended::Revoked);
        let permit = holding.permit().expect("what is revoked is a permit");
        let error = AcquireError::new(Cause::ShuttingDown, permit.waited());
        let rejection = Rejection::new(error, permit.shared(), version, &HeaderMap::new());
        // The service's future goes here, and after it the permit.
        self.set(Self::Done);
        rejection.response().map(ResponseBody::whole)
    }
}

impl<S, R, ReqBody, ResBody> Future for ResponseFuture<S, R, ReqBody, ResBody>
where
    S: Service<Request<ReqBody>, Response = Response<ResBody>>,
    R: Reject<ReqBody, ResBody>,
    ResBody: Body,
{
    type Output = Result<Response<ResponseBody<ResBody>>, S::Error>;

    fn poll(self: Pin<&mut Self>, cx: &mut Context<'_>) -> Poll<Self::Output> {
        let mut state = self.project().state;
        loop {
            match state.as_mut().project() {
                StateProj::Waiting { acquire, .. } => {
                    let answer = ready!(acquire.poll(cx));
                    let StateOwn::Waiting { inner, reject, shared, mut request, .. } =
                        state.as_mut().project_replace(State::Done)
                    else {
                        unreachable!("the state was `Waiting` a moment ago");
                    };
                    let next = match answer {
                        Ok(permit) => {
                            Mark::put(&permit, request.extensions_mut());
                            let mut holding = Holding::new(Some(permit));
                            let mut inner = inner;
                            match inner.poll_ready(cx) {
                                Poll::Ready(Ok(())) => State::running(inner, request, holding),
                                Poll::Ready(Err(error)) => {
                                    holding.ends(Ended::Failed);
                                    return Poll::Ready(Err(error));
                                }
                                Poll::Pending => State::Preparing { inner, request, holding },
                            }
                        }
                        Err(error) => State::rejecting(&*reject, &shared, error, request),
                    };
                    state.set(next);
                }
                StateProj::Preparing { inner, holding, .. } => {
                    let prepared = match inner.poll_ready(cx) {
                        Poll::Ready(prepared) => prepared,
                        Poll::Pending if holding.poll_revoked(cx) => {
                            return Poll::Ready(Ok(state.revoked()));
                        }
                        Poll::Pending => return Poll::Pending,
                    };
                    let StateOwn::Preparing { inner, request, mut holding } =
                        state.as_mut().project_replace(State::Done)
                    else {
                        unreachable!("the state was `Preparing` a moment ago");
                    };
                    if let Err(error) = prepared {
                        holding.ends(Ended::Failed);
                        return Poll::Ready(Err(error));
                    }
                    state.set(State::running(inner, request, holding));
                }
                StateProj::Running { future, holding, .. } => {
                    let answer = match future.poll(cx) {
                        Poll::Ready(answer) => answer,
                        Poll::Pending if holding.poll_revoked(cx) => {
                            return Poll::Ready(Ok(state.revoked()));
                        }
                        Poll::Pending => return Poll::Pending,
                    };
                    let StateOwn::Running { method, mut holding, .. } = state.project_replace(State::Done)
                    else {
                        unreachable!("the state was `Running` a moment ago");
                    };
                    return Poll::Ready(match answer {
                        Ok(response) => Ok(ResponseBody::granted(response, holding, &method)),
                        Err(error) => {
                            holding.ends(Ended::Failed);
                            Err(error)
                        }
                    });
                }
                StateProj::Rejecting { answer } => {
                    let response = ready!(answer.poll(cx));
                    state.set(State::Done);
                    return Poll::Ready(Ok(response));
                }
                StateProj::Done => panic!("`ResponseFuture` polled after it gave its answer"),
            }
        }
    }
}

impl<S, R, ReqBody, ResBody> fmt::Debug for ResponseFuture<S, R, ReqBody, ResBody>
where
    S: Service<Request<ReqBody>>,
    R: Reject<ReqBody, ResBody>,
{
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let state = match &self.state {
            State::Waiting { .. } => "waiting",
            State::Preparing { .. } => "preparing",
            State::Running { .. } => "running",
            State::Rejecting { .. } => "rejecting",
            State::Done => "done",
        };
        f.debug_struct("ResponseFuture").field("state", &state).finish_non_exhaustive()
    }
}
