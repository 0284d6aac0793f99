//! The wait for a permit.

use std::{
    future::Future,
    pin::Pin,
    sync::Arc,
    task::{Context, Poll, ready},
    time::Duration,
};

use pin_project_lite::pin_project;
use tokio::time::{Instant, Sleep, sleep_until};

use super::{Held, Permit, Shared};
use crate::{
    backend::{Phase, Place, Ticket},
    error::{AcquireError, Cause},
    metrics::Waited,
    schedule::Ask,
};

pin_project! {
    /// The future of [`FairQueue::acquire`](super::FairQueue::acquire) and [`FairQueue::try_acquire`](super::FairQueue::try_acquire).
    #[derive(Debug)]
    #[must_use = "futures do nothing unless polled"]
    pub struct Acquire {
        #[pin]
        deadline: Option<Sleep>,
        state: State,
    }
}

#[derive(Debug)]
enum State {
    /// Not polled yet; the first poll takes the place in line.
    New { shared: Arc<Shared>, ask: Ask, wait: bool },
    /// In line, until it is granted, refused or past the deadline.
    Waiting { waiting: Waiting },
    /// The answer was given.
    Done,
}

impl Acquire {
    pub(crate) fn new(shared: Arc<Shared>, ask: Ask, wait: bool) -> Self {
        Self { deadline: None, state: State::New { shared, ask, wait } }
    }
}

impl Future for Acquire {
    type Output = Result<Permit, AcquireError>;

    fn poll(self: Pin<&mut Self>, cx: &mut Context<'_>) -> Poll<Self::Output> {
        let mut this = self.project();
        if matches!(this.state, State::New { .. })
            && let State::New { shared, ask, wait } = std::mem::replace(this.state, State::Done)
        {
            let now = Instant::now();
            let mut deadline = now + shared.config.max_wait;
            if let Some(own) = ask.deadline {
                deadline = deadline.min(own);
            }
            if deadline <= now {
                // Too late before it came: no look at the backend.
                let error = AcquireError::new(Cause::TimedOut, Duration::ZERO);
                shared.metrics().waited(Waited::Rejected(Cause::TimedOut), Duration::ZERO);
                return Poll::Ready(Err(error));
            }
            let mut waiting = match enter(shared, ask, now, wait) {
                Ok(Entered::Waiting(waiting)) => waiting,
                Ok(Entered::Granted(permit)) => return Poll::Ready(Ok(permit)),
                Err(error) => return Poll::Ready(Err(error)),
            };
            waiting.park();
            this.deadline.set(Some(sleep_until(deadline)));
            *this.state = State::Waiting { waiting };
        }
        let State::Waiting { waiting } = this.state else {
            panic!("`Acquire` polled after it gave its answer");
        };
        // The grant is looked at first: one that comes with the deadline is not thrown away.
        let answer = match waiting.ticket.poll_phase(cx) {
            Phase::Pending => {
                let sleep = this.deadline.as_mut().as_pin_mut().expect("a waiting ticket has its deadline");
                ready!(sleep.poll(cx));
                if waiting.ticket.time_out() { Err(Cause::TimedOut) } else { waiting.decided() }
            }
            _ => waiting.decided(),
        };
        let answer = waiting.end(answer);
        this.deadline.set(None);
        *this.state = State::Done;
        Poll::Ready(answer)
    }
}

enum Entered {
    Granted(Permit),
    Waiting(Waiting),
}

/// Puts a new ticket to the backend.
fn enter(shared: Arc<Shared>, ask: Ask, now: Instant, wait: bool) -> Result<Entered, AcquireError> {
    let ticket = Arc::new(Ticket::new());
    let place = shared.backend.enqueue(&ask, &ticket, wait, now);
    let phase = ticket.phase();
    if let (Phase::Granted { units }, Some(place)) = (phase, place) {
        let held = Held { shared, ticket, place, units, since: now, waited: Duration::ZERO, counted: false };
        return Ok(Entered::Granted(held.counted()));
    }
    let mut waiting = Waiting { shared, ask, ticket, place, since: now, parked: false };
    match phase {
        Phase::Refused(cause) => Err(waiting.rejected(cause)),
        Phase::Pending | Phase::Granted { .. } | Phase::Ended => Ok(Entered::Waiting(waiting)),
    }
}

/// A ticket that its request still has a claim to. Dropped, it leaves the line, or hands on what it was given.
#[derive(Debug)]
struct Waiting {
    shared: Arc<Shared>,
    ask: Ask,
    ticket: Arc<Ticket>,
    place: Option<Place>,
    since: Instant,
    parked: bool,
}

impl Waiting {
    fn park(&mut self) {
        self.parked = true;
        self.shared.metrics().parked();
    }

    fn decided(&self) -> Result<u32, Cause> {
        match self.ticket.phase() {
            Phase::Granted { units } => Ok(units),
            Phase::Refused(cause) => Err(cause),
            Phase::Pending | Phase::Ended => {
                unreachable!("only the request itself ends its ticket otherwise")
            }
        }
    }

    fn end(&mut self, answer: Result<u32, Cause>) -> Result<Permit, AcquireError> {
        match answer {
            Ok(units) => Ok(self.permit(units)),
            Err(cause) => Err(self.rejected(cause)),
        }
    }

    /// The permit takes over the claim.
    fn permit(&mut self, units: u32) -> Permit {
        let place = self.place.take().expect("a granted ticket has a place");
        let now = if self.parked { Instant::now() } else { self.since };
        let waited = now - self.since;
        let parked = std::mem::take(&mut self.parked);
        let held = Held {
            shared: Arc::clone(&self.shared),
            ticket: Arc::clone(&self.ticket),
            place,
            units,
            since: now,
            waited,
            counted: false,
        };
        if parked {
            self.shared.metrics().unparked();
        }
        held.counted()
    }

    fn rejected(&mut self, cause: Cause) -> AcquireError {
        let place = self.place.take();
        let now = Instant::now();
        let waited = if self.parked { now - self.since } else { Duration::ZERO };
        let error = self.shared.rejection(&self.ask, place, cause, waited);
        if let Some(place) = place {
            self.shared.finish(place, now);
        }
        self.settle(Waited::Rejected(cause), waited);
        error
    }

    fn settle(&mut self, how: Waited, waited: Duration) {
        let metrics = self.shared.metrics();
        if std::mem::take(&mut self.parked) {
            metrics.unparked();
        }
        metrics.waited(how, waited);
    }
}

impl Drop for Waiting {
    fn drop(&mut self) {
        // Taken by whoever ended the wait before.
        let Some(place) = self.place.take() else { return };
        // Cancelled or granted this instant: in both cases the backend is told, and it knows which.
        if !self.ticket.cancel() {
            self.ticket.end();
        }
        let now = Instant::now();
        self.shared.finish(place, now);
        self.settle(Waited::Cancelled, now - self.since);
    }
}
