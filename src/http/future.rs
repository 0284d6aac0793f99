//! The response future.

use std::{
    fmt,
    future::Future,
    pin::Pin,
    sync::Arc,
    task::{Context, Poll, ready},
    time::Duration,
};

use http::{Method, Request, Response, Version};
use http_body::Body;
use pin_project_lite::pin_project;
use tower_service::Service;

use super::{Reject, Rejection, ResponseBody, holding::Holding, mark::Mark, rejection::is_grpc};
use crate::{
    error::{AcquireError, Cause},
    metrics::{Ended, Waited},
    queue::{Acquire, Permit, Shared},
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
    enum State<S, R, ReqBody, ResBody>
    where
        S: Service<Request<ReqBody>>,
        R: Reject<ReqBody, ResBody>,
    {
        /// In line. Left for `Running` or `Preparing` by a grant, for `Rejecting` by anything else.
        Waiting { #[pin] acquire: Acquire, parked: Option<Parked<S, ReqBody>>, reject: Arc<R> },
        /// Granted, or passing by without a permit, until the inner service is ready.
        Preparing { parked: Option<Parked<S, ReqBody>>, holding: Option<Holding> },
        /// The inner service is at work. The future stands before the holding, so it is dropped before the units go back.
        Running { #[pin] future: S::Future, begun: Begun, holding: Option<Holding> },
        /// Rejected; the answer is being made.
        Rejecting { #[pin] answer: R::Future },
        Done,
    }
}

/// A request and the service it is for, until that gets it.
struct Parked<S, ReqBody> {
    inner: S,
    request: Request<ReqBody>,
}

/// What is remembered of a request once its service has it.
struct Begun {
    method: Method,
    version: Version,
    grpc: bool,
}

impl<S, R, ReqBody, ResBody> ResponseFuture<S, R, ReqBody, ResBody>
where
    S: Service<Request<ReqBody>, Response = Response<ResBody>>,
    R: Reject<ReqBody, ResBody>,
{
    pub(super) fn pass(inner: S, request: Request<ReqBody>) -> Self {
        Self {
            state: State::Preparing {
                parked: Some(Parked { inner, request }),
                holding: Some(Holding::new(None)),
            },
        }
    }

    #[inline]
    pub(super) fn wait(acquire: Acquire, inner: S, reject: Arc<R>, request: Request<ReqBody>) -> Self {
        Self { state: State::Waiting { acquire, parked: Some(Parked { inner, request }), reject } }
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

    /// Has a request answered that got no permit, or one that was revoked before its service had begun.
    #[cold]
    fn reject(mut self: Pin<&mut Self>, answer: Result<Permit, AcquireError>) {
        let StateProj::Waiting { acquire, parked, reject } = self.as_mut().project() else {
            unreachable!("only a request in line is rejected");
        };
        let Parked { request, .. } = parked.take().expect("it is taken once, with the one answer");
        let next = match answer {
            Ok(permit) => {
                let error = AcquireError::new(Cause::ShuttingDown, permit.waited());
                let shared = Arc::clone(permit.shared());
                drop(permit);
                Self::rejecting(&**reject, &shared, error, request)
            }
            Err(error) => Self::rejecting(&**reject, acquire.shared(), error, request),
        };
        self.set(next);
    }

    /// Hands the request to its service, which is ready.
    #[inline]
    fn run(mut self: Pin<&mut Self>, holding: Holding) {
        let parked = match self.as_mut().project() {
            StateProj::Waiting { parked, .. } | StateProj::Preparing { parked, .. } => parked.take(),
            StateProj::Running { .. } | StateProj::Rejecting { .. } | StateProj::Done => None,
        };
        let Parked { mut inner, request } = parked.expect("it is taken once, when the service is ready");
        let begun = Begun {
            method: request.method().clone(),
            version: request.version(),
            grpc: is_grpc(request.headers()),
        };
        let future = inner.call(request);
        self.set(Self::Running { future, begun, holding: Some(holding) });
    }

    /// Ends a granted request whose service had not answered when the grace of a drain was over. The request is the
    /// service's by now, so this gives the default answer, whoever answers rejections.
    #[cold]
    fn revoked<Body>(mut self: Pin<&mut Self>) -> Response<ResponseBody<Body>> {
        let (holding, version, grpc) = match self.as_mut().project() {
            StateProj::Preparing { parked: Some(Parked { request, .. }), holding: Some(holding) } => {
                (holding, request.version(), is_grpc(request.headers()))
            }
            StateProj::Running { holding: Some(holding), begun, .. } => (holding, begun.version, begun.grpc),
            _ => unreachable!("only a granted request can be revoked"),
        };
        holding.ends(Ended::Revoked);
        let permit = holding.permit().expect("what is revoked is a permit");
        let error = AcquireError::new(Cause::ShuttingDown, permit.waited());
        let rejection = Rejection::revoked(error, version, grpc);
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
                StateProj::Waiting { acquire, parked: slot, .. } => {
                    let permit = match ready!(acquire.poll(cx)) {
                        Ok(permit) if !permit.is_revoked() => permit,
                        // A permit among them: the grace of a drain ended before this poll, so its service need not begin.
                        answer => {
                            state.as_mut().reject(answer);
                            continue;
                        }
                    };
                    let parked = slot.as_mut().expect("it is taken once, with the one answer");
                    Mark::put(&permit, parked.request.extensions_mut());
                    let mut holding = Holding::new(Some(permit));
                    // Most services are ready at once; they need no state in between.
                    match parked.inner.poll_ready(cx) {
                        Poll::Ready(Ok(())) => state.as_mut().run(holding),
                        Poll::Ready(Err(error)) => {
                            holding.ends(Ended::Failed);
                            state.set(State::Done);
                            return Poll::Ready(Err(error));
                        }
                        Poll::Pending => {
                            let revoked = holding.poll_revoked(cx);
                            let parked = slot.take();
                            state.set(State::Preparing { parked, holding: Some(holding) });
                            return if revoked { Poll::Ready(Ok(state.revoked())) } else { Poll::Pending };
                        }
                    }
                }
                StateProj::Preparing { parked, holding: slot } => {
                    let parked = parked.as_mut().expect("it is taken once, when the service is ready");
                    let holding = slot.as_mut().expect("it is taken with the request");
                    if holding.is_revoked() {
                        return Poll::Ready(Ok(state.revoked()));
                    }
                    match parked.inner.poll_ready(cx) {
                        Poll::Ready(Ok(())) => {
                            let holding = slot.take().expect("it was there a moment ago");
                            state.as_mut().run(holding);
                        }
                        Poll::Ready(Err(error)) => {
                            holding.ends(Ended::Failed);
                            state.set(State::Done);
                            return Poll::Ready(Err(error));
                        }
                        Poll::Pending if holding.poll_revoked(cx) => {
                            return Poll::Ready(Ok(state.revoked()));
                        }
                        Poll::Pending => return Poll::Pending,
                    }
                }
                StateProj::Running { future, begun, holding: slot } => {
                    let answer = match future.poll(cx) {
                        Poll::Ready(answer) => answer,
                        Poll::Pending if slot.as_ref().is_some_and(|holding| holding.poll_revoked(cx)) => {
                            return Poll::Ready(Ok(state.revoked()));
                        }
                        Poll::Pending => return Poll::Pending,
                    };
                    let mut holding = slot.take().expect("it is taken once, with the one answer");
                    let method = begun.method.clone();
                    // The service's future goes before the body can give the permit back.
                    state.set(State::Done);
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
