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
        wait: Wait,
    }
}

/// The wait of one ask. Dropped, it leaves the line, or hands on what it was given.
#[derive(Debug)]
struct Wait {
    /// Taken by the permit.
    shared: Option<Arc<Shared>>,
    ask: Ask,
    stage: Stage,
}

#[derive(Debug)]
enum Stage {
    /// Not polled yet; the first poll takes the place in line.
    New { wait: bool },
    /// In line, until it is granted, refused or past the deadline.
    Waiting { ticket: Arc<Ticket>, place: Option<Place>, since: Instant },
    /// The answer was given.
    Done,
}

impl Acquire {
    pub(crate) fn new(shared: Arc<Shared>, ask: Ask, wait: bool) -> Self {
        Self { deadline: None, wait: Wait { shared: Some(shared), ask, stage: Stage::New { wait } } }
    }

    /// The queue, unless it has granted the ask: then the permit has it.
    pub(crate) fn shared(&self) -> &Arc<Shared> {
        self.wait.shared()
    }
}

impl Future for Acquire {
    type Output = Result<Permit, AcquireError>;

    fn poll(self: Pin<&mut Self>, cx: &mut Context<'_>) -> Poll<Self::Output> {
        let mut this = self.project();
        if let Stage::New { wait } = this.wait.stage {
            if let Some(answer) = this.wait.enter(wait) {
                return Poll::Ready(answer);
            }
            this.deadline.set(Some(sleep_until(this.wait.deadline())));
        }
        let answer = ready!(this.wait.poll_answer(this.deadline.as_mut(), cx));
        this.deadline.set(None);
        Poll::Ready(answer)
    }
}

impl Wait {
    fn shared(&self) -> &Arc<Shared> {
        self.shared.as_ref().expect("an ask that was granted nothing has its queue")
    }

    /// Puts a new ticket to the backend. `None`: it stands in line.
    fn enter(&mut self, wait: bool) -> Option<Result<Permit, AcquireError>> {
        self.stage = Stage::Done;
        if self.ask.deadline.is_some_and(|deadline| deadline <= Instant::now()) {
            // Too late before it came: no look at the backend.
            self.shared().metrics().waited(Waited::Rejected(Cause::TimedOut), Duration::ZERO);
            return Some(Err(AcquireError::new(Cause::TimedOut, Duration::ZERO)));
        }
        let ticket = Arc::new(Ticket::new());
        let place = self.shared().backend.enqueue(&self.ask, &ticket, wait);
        match (ticket.phase(), place) {
            (Phase::Granted { units }, Some(place)) => {
                Some(Ok(self.held(ticket, place, units, None).counted()))
            }
            (Phase::Refused(cause), place) => Some(Err(self.rejected(cause, place, None))),
            (Phase::Granted { .. } | Phase::Pending | Phase::Ended, place) => {
                self.stage = Stage::Waiting { ticket, place, since: Instant::now() };
                self.shared().metrics().parked();
                None
            }
        }
    }

    /// The earlier of the ask's own deadline and `max_wait`, for one that stands in line.
    fn deadline(&self) -> Instant {
        let Stage::Waiting { since, .. } = self.stage else {
            unreachable!("it has just come to stand in line")
        };
        let longest = since + self.shared().config.max_wait;
        self.ask.deadline.map_or(longest, |own| own.min(longest))
    }

    fn poll_answer(
        &mut self,
        sleep: Pin<&mut Option<Sleep>>,
        cx: &mut Context<'_>,
    ) -> Poll<Result<Permit, AcquireError>> {
        let Stage::Waiting { ticket, .. } = &self.stage else {
            panic!("`Acquire` polled after it gave its answer");
        };
        // The grant is looked at first: one that comes with the deadline is not thrown away.
        let answer = match ticket.poll_phase(cx) {
            Phase::Pending => {
                self.shared().backend.attend();
                ready!(sleep.as_pin_mut().expect("a waiting ticket has its deadline").poll(cx));
                if ticket.time_out() { Err(Cause::TimedOut) } else { decided(ticket.phase()) }
            }
            phase => decided(phase),
        };
        let Stage::Waiting { ticket, place, since } = std::mem::replace(&mut self.stage, Stage::Done) else {
            unreachable!("it was in line a moment ago");
        };
        Poll::Ready(match answer {
            Ok(units) => {
                let place = place.expect("a granted ticket has a place");
                let held = self.held(ticket, place, units, Some(since));
                held.shared.metrics().unparked();
                Ok(held.counted())
            }
            Err(cause) => Err(self.rejected(cause, place, Some(since))),
        })
    }

    /// The permit's guard takes over the claim. `parked`: since when it stood in line, if it did.
    fn held(&mut self, ticket: Arc<Ticket>, place: Place, units: u32, parked: Option<Instant>) -> Held {
        let shared = self.shared.take().expect("it is granted once");
        let since = parked.map(|_| Instant::now());
        let waited = parked.zip(since).map_or(Duration::ZERO, |(parked, since)| since - parked);
        Held { shared, ticket, place, units, since, waited, counted: false }
    }

    #[cold]
    fn rejected(&self, cause: Cause, place: Option<Place>, parked: Option<Instant>) -> AcquireError {
        let shared = self.shared();
        let waited = parked.map_or(Duration::ZERO, |since| since.elapsed());
        let error = shared.rejection(&self.ask, place, cause, waited);
        if let Some(place) = place {
            shared.finish(place);
        }
        if parked.is_some() {
            shared.metrics().unparked();
        }
        shared.metrics().waited(Waited::Rejected(cause), waited);
        error
    }
}

fn decided(phase: Phase) -> Result<u32, Cause> {
    match phase {
        Phase::Granted { units } => Ok(units),
        Phase::Refused(cause) => Err(cause),
        Phase::Pending | Phase::Ended => unreachable!("only the request itself ends its ticket otherwise"),
    }
}

impl Drop for Wait {
    fn drop(&mut self) {
        // Taken by whoever ended the wait before.
        let Stage::Waiting { ticket, place, since } = std::mem::replace(&mut self.stage, Stage::Done) else {
            return;
        };
        // Cancelled or granted this instant: in both cases the backend is told, and it knows which.
        if !ticket.cancel() {
            ticket.end();
        }
        let shared = self.shared();
        if let Some(place) = place {
            shared.finish(place);
        }
        shared.metrics().unparked();
        shared.metrics().waited(Waited::Cancelled, since.elapsed());
    }
}
