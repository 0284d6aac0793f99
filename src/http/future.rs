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
    enum State<S, R, ReqBody, ResBody>
    where
        S: Service<Request<ReqBody>>,
        R: Reject<ReqBody, ResBody>,
    {
        /// In line. Left for `Preparing` by a grant, for `Rejecting` by anything else.
        Waiting { #[pin] acquire: Acquire, parked: Option<Parked<S, R, ReqBody>> },
        /// Granted, or passing by without a permit, until the inner service is ready.
        Preparing { granted: Option<Granted<S, ReqBody>> },
        /// The inner service is at work. The future stands before the holding, so it is dropped before the units go back.
        Running { #[pin] future: S::Future, begun: Begun, holding: Option<Holding> },
        /// Rejected; the answer is being made.
        Rejecting { #[pin] answer: R::Future },
        Done,
    }
}

/// What a request in line keeps until it is decided.
struct Parked<S, R, ReqBody> {
    inner: S,
    reject: Arc<R>,
    shared: Arc<Shared>,
    request: Request<ReqBody>,
}

/// What is remembered of a request once its service has it.
struct Begun {
    method: Method,
    version: Version,
    grpc: bool,
}

/// A request that may go to its service, once that is ready.
struct Granted<S, ReqBody> {
    inner: S,
    request: Request<ReqBody>,
    holding: Holding,
}

impl<S, R, ReqBody, ResBody> ResponseFuture<S, R, ReqBody, ResBody>
where
    S: Service<Request<ReqBody>, Response = Response<ResBody>>,
    R: Reject<ReqBody, ResBody>,
{
    pub(super) fn pass(inner: S, request: Request<ReqBody>) -> Self {
        Self {
            state: State::Preparing {
                granted: Some(Granted { inner, request, holding: Holding::new(None) }),
            },
        }
    }

    pub(super) fn wait(
        acquire: Acquire,
        inner: S,
        reject: Arc<R>,
        shared: Arc<Shared>,
        request: Request<ReqBody>,
    ) -> Self {
        Self { state: State::Waiting { acquire, parked: Some(Parked { inner, reject, shared, request }) } }
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

    /// Ends a granted request whose service had not answered when the grace of a drain was over. The request is the
    /// service's by now, so this gives the default answer, whoever answers rejections.
    fn revoked<Body>(mut self: Pin<&mut Self>) -> Response<ResponseBody<Body>> {
        let (holding, version, grpc) = match self.as_mut().project() {
            StateProj::Preparing { granted: Some(Granted { request, holding, .. }) } => {
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

impl<S, ReqBody> Granted<S, ReqBody>
where
    S: Service<Request<ReqBody>>,
{
    /// Hands the request to the service, which is ready.
    fn run<R, ResBody>(mut self) -> State<S, R, ReqBody, ResBody>
    where
        R: Reject<ReqBody, ResBody>,
    {
        let begun = Begun {
            method: self.request.method().clone(),
            version: self.request.version(),
            grpc: is_grpc(self.request.headers()),
        };
        let future = self.inner.call(self.request);
        State::Running { future, begun, holding: Some(self.holding) }
    }

    fn fail(mut self, error: S::Error) -> S::Error {
        self.holding.ends(Ended::Failed);
        error
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
                StateProj::Waiting { acquire, parked } => {
                    let answer = ready!(acquire.poll(cx));
                    let Parked { inner, reject, shared, mut request } =
                        parked.take().expect("it is taken once, with the one answer");
                    let answer = answer.and_then(|permit| match permit.is_revoked() {
                        // Granted, and the grace of a drain ended before this poll: its service need not begin.
                        true => Err(AcquireError::new(Cause::ShuttingDown, permit.waited())),
                        false => Ok(permit),
                    });
                    let next = match answer {
                        Ok(permit) => {
                            Mark::put(&permit, request.extensions_mut());
                            let holding = Holding::new(Some(permit));
                            let mut granted = Granted { inner, request, holding };
                            // Most services are ready at once; they need no state in between.
                            match granted.inner.poll_ready(cx) {
                                Poll::Ready(Ok(())) => granted.run(),
                                Poll::Ready(Err(error)) => {
                                    state.set(State::Done);
                                    return Poll::Ready(Err(granted.fail(error)));
                                }
                                Poll::Pending => {
                                    let revoked = granted.holding.poll_revoked(cx);
                                    state.set(State::Preparing { granted: Some(granted) });
                                    return if revoked {
                                        Poll::Ready(Ok(state.revoked()))
                                    } else {
                                        Poll::Pending
                                    };
                                }
                            }
                        }
                        Err(error) => State::rejecting(&*reject, &shared, error, request),
                    };
                    state.set(next);
                }
                StateProj::Preparing { granted: slot } => {
                    let granted = slot.as_mut().expect("it is taken once, when the service is ready");
                    if granted.holding.is_revoked() {
                        return Poll::Ready(Ok(state.revoked()));
                    }
                    let prepared = match granted.inner.poll_ready(cx) {
                        Poll::Ready(prepared) => prepared,
                        Poll::Pending if granted.holding.poll_revoked(cx) => {
                            return Poll::Ready(Ok(state.revoked()));
                        }
                        Poll::Pending => return Poll::Pending,
                    };
                    let granted = slot.take().expect("it was there a moment ago");
                    if let Err(error) = prepared {
                        state.set(State::Done);
                        return Poll::Ready(Err(granted.fail(error)));
                    }
                    state.set(granted.run());
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
