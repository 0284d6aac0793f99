//! A response body that does what a test tells it to.

use std::{
    collections::VecDeque,
    future::{Future, pending},
    io,
    pin::Pin,
    task::{Context, Poll, ready},
    time::Duration,
};

use bytes::Bytes;
use http::HeaderMap;
use http_body::{Body, Frame, SizeHint};
use tokio::{
    sync::oneshot,
    task::yield_now,
    time::{Instant, sleep, sleep_until},
};

use super::{Unit, panic_on_purpose};

/// A body of steps, with the end-of-stream and size hints of a stream (none) unless told otherwise.
///
/// It lets go of its [`Unit`] in the poll that ends it, before that poll returns: from there on it is no more in flight.
#[derive(Default)]
pub(crate) struct Script {
    steps: VecDeque<Step>,
    unit: Option<Unit>,
    hints_end_before_trailers: bool,
    size: Option<u64>,
}

enum Step {
    Data(Bytes),
    Wait(Pin<Box<dyn Future<Output = ()> + Send>>),
    Trailers(HeaderMap),
    Fail,
    Panic,
}

/// Opens the way past [`Script::gate`].
#[derive(Debug)]
pub(crate) struct Gate(oneshot::Sender<()>);

impl Gate {
    pub(crate) fn open(self) {
        // Whoever stood before it may be gone.
        let _ = self.0.send(());
    }
}

/// A gate, and what waits for it: for ever if the gate is dropped unopened.
pub(crate) fn gate() -> (Gate, impl Future<Output = ()> + Send + 'static) {
    let (opener, opened) = oneshot::channel();
    let wait = async move {
        if opened.await.is_err() {
            pending().await
        }
    };
    (Gate(opener), wait)
}

impl Script {
    pub(crate) fn new() -> Self {
        Self::default()
    }

    pub(crate) fn data(self, data: impl Into<Bytes>) -> Self {
        self.step(Step::Data(data.into()))
    }

    pub(crate) fn wait(self, future: impl Future<Output = ()> + Send + 'static) -> Self {
        self.step(Step::Wait(Box::pin(future)))
    }

    pub(crate) fn sleep(self, time: Duration) -> Self {
        self.wait(async move { sleep(time).await })
    }

    /// Waits until an instant, so that many waits do not add up their delays.
    pub(crate) fn until(self, instant: Instant) -> Self {
        self.wait(sleep_until(instant))
    }

    /// Is pending once, whatever the time: the server then writes what it has. A sleep would not do, since one that is over
    /// before its first poll is never pending, and hyper drops what it has not written once a body fails.
    pub(crate) fn flush(self) -> Self {
        self.wait(yield_now())
    }

    /// Never goes on.
    pub(crate) fn idle(self) -> Self {
        self.wait(pending())
    }

    pub(crate) fn trailers(self, trailers: HeaderMap) -> Self {
        self.step(Step::Trailers(trailers))
    }

    pub(crate) fn fail(self) -> Self {
        self.step(Step::Fail)
    }

    pub(crate) fn panic(self) -> Self {
        self.step(Step::Panic)
    }

    /// Carries `unit` until the end.
    pub(crate) fn holding(mut self, unit: Unit) -> Self {
        self.unit = Some(unit);
        self
    }

    /// Says "end of stream" once its data is out, though trailers follow, as some bodies do.
    pub(crate) fn hint_end_before_trailers(mut self) -> Self {
        self.hints_end_before_trailers = true;
        self
    }

    /// Says that it will have so many bytes.
    pub(crate) fn sized(mut self, bytes: u64) -> Self {
        self.size = Some(bytes);
        self
    }

    fn step(mut self, step: Step) -> Self {
        self.steps.push_back(step);
        self
    }
}

impl Body for Script {
    type Data = Bytes;
    type Error = io::Error;

    fn poll_frame(
        mut self: Pin<&mut Self>,
        cx: &mut Context<'_>,
    ) -> Poll<Option<Result<Frame<Bytes>, io::Error>>> {
        let this = &mut *self;
        while let Some(Step::Wait(future)) = this.steps.front_mut() {
            ready!(future.as_mut().poll(cx));
            this.steps.pop_front();
        }
        Poll::Ready(match this.steps.pop_front() {
            Some(Step::Data(data)) => {
                this.size = this.size.map(|size| size - data.len() as u64);
                Some(Ok(Frame::data(data)))
            }
            Some(Step::Trailers(trailers)) => Some(Ok(Frame::trailers(trailers))),
            Some(Step::Fail) => {
                this.unit = None;
                Some(Err(io::Error::other("the body failed")))
            }
            Some(Step::Panic) => {
                this.unit = None;
                panic_on_purpose()
            }
            Some(Step::Wait(_)) => unreachable!("passed above"),
            None => {
                this.unit = None;
                None
            }
        })
    }

    fn is_end_stream(&self) -> bool {
        let data_left = self.steps.iter().any(|step| matches!(step, Step::Data(_)));
        self.hints_end_before_trailers && !data_left
    }

    fn size_hint(&self) -> SizeHint {
        self.size.map_or_else(SizeHint::default, SizeHint::with_exact)
    }
}
