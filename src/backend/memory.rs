//! The line of one process, in its own memory.

use std::sync::{Arc, PoisonError};

use tokio::time::Instant;

use super::{Backend, Outlook, Place, Snapshot, Ticket, WakeList};
use crate::{
    error::Cause,
    schedule::{Ask, DrainRate, Entered, FairOrder, Finished, Rules},
    sync::{Mutex, MutexGuard},
};

/// The fair order under one lock. Units go from who releases to who is next while the lock is held, so there is no
/// instant at which a newcomer could take what the head of the line waits for; wakers are called after.
#[derive(Debug)]
pub(crate) struct Memory {
    state: Mutex<State>,
}

#[derive(Debug)]
struct State {
    order: FairOrder<Arc<Ticket>>,
    drain_rate: DrainRate,
    /// Whether anyone waited after the last change.
    waiting: bool,
    started: Instant,
    closed: Option<Cause>,
    /// The capacity the queue was made with.
    configured: u64,
}

impl Memory {
    pub(crate) fn new(rules: Rules) -> Self {
        Self {
            state: Mutex::new(State {
                order: FairOrder::new(rules),
                drain_rate: DrainRate::default(),
                waiting: false,
                started: Instant::now(),
                closed: None,
                configured: rules.capacity,
            }),
        }
    }

    /// Runs `change` under the lock, then grants what can be granted, then wakes.
    fn change(&self, change: impl FnOnce(&mut State, &mut WakeList)) {
        let mut wake = WakeList::default();
        {
            let mut state = self.lock();
            change(&mut state, &mut wake);
            state.dispatch(&mut wake);
            state.note_waiting();
        }
        wake.wake();
    }

    /// Nothing under the lock runs code of a user's, so a poisoned one would mean a defect of this crate's; the
    /// state is used on, since the other requests are worth more than the word of it.
    fn lock(&self) -> MutexGuard<'_, State> {
        self.state.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

impl State {
    fn enqueue(&mut self, ask: &Ask, ticket: &Arc<Ticket>, wait: bool, wake: &mut WakeList) -> Option<Place> {
        let entered = match self.closed {
            Some(cause) => Err(cause),
            None => self.order.enqueue(ask, Arc::clone(ticket)),
        };
        match entered {
            Ok(Entered::Granted { place, units }) => {
                // Nobody stood before it, so nothing changes for those who wait.
                ticket.grant_unseen(units);
                Some(place)
            }
            Ok(Entered::Waiting(place)) => {
                self.dispatch(wake);
                let refused = !wait && ticket.refuse(Cause::WouldWait, wake);
                if refused {
                    self.order.finish(place);
                    self.dispatch(wake);
                }
                self.note_waiting();
                (!refused).then_some(place)
            }
            Err(cause) => {
                ticket.refuse(cause, wake);
                None
            }
        }
    }

    /// Grants while the head of the line fits. A ticket that was decided otherwise in this instant takes nothing:
    /// its units go to the next.
    fn dispatch(&mut self, wake: &mut WakeList) {
        while let Some(grant) = self.order.grant_next() {
            if !grant.ticket.grant(grant.units, wake) {
                let place = grant.place;
                self.order.finish(place);
            }
        }
    }

    /// Tells the drain rate whether its time counts.
    fn note_waiting(&mut self) {
        let waiting = self.order.waiting() > 0;
        if waiting != self.waiting {
            self.waiting = waiting;
            self.drain_rate.count(waiting, self.started.elapsed());
        }
    }

    fn refuse_all(&mut self, places: Vec<(Place, Arc<Ticket>)>, cause: Cause, wake: &mut WakeList) {
        for (place, ticket) in places {
            ticket.refuse(cause, wake);
            self.order.finish(place);
        }
    }
}

impl Backend for Memory {
    fn enqueue(&self, ask: &Ask, ticket: &Arc<Ticket>, wait: bool) -> Option<Place> {
        let mut wake = WakeList::default();
        let place = self.lock().enqueue(ask, ticket, wait, &mut wake);
        wake.wake();
        place
    }

    fn finish(&self, place: Place) {
        self.change(|state, _| {
            if let Finished::Released(units) = state.order.finish(place) {
                state.drain_rate.released(units, || state.started.elapsed());
            }
        });
    }

    fn outlook(&self, ask: &Ask, place: Option<Place>) -> Outlook {
        let mut state = self.lock();
        let position = match place {
            Some(place) => state.order.position(place),
            None => Some(state.order.position_of_next(ask)),
        };
        let Some(position) = position else { return Outlook::default() };
        let now = state.started.elapsed();
        let units = position.saturating_mul(state.order.units_of(ask).into());
        Outlook { position: usize::try_from(position).ok(), estimate: state.drain_rate.time_for(units, now) }
    }

    fn resize(&self, capacity: Option<u64>) {
        self.change(|state, wake| {
            state.order.resize(capacity.unwrap_or(state.configured));
            let refused = state.order.too_wide().map(|(place, ticket)| (place, Arc::clone(ticket))).collect();
            state.refuse_all(refused, Cause::TooWide, wake);
        });
    }

    fn close(&self, cause: Cause) {
        self.change(|state, wake| {
            state.closed = Some(cause);
            let refused =
                state.order.waiting_tickets().map(|(place, ticket)| (place, Arc::clone(ticket))).collect();
            state.refuse_all(refused, cause, wake);
        });
    }

    fn revoke(&self) {
        self.change(|state, wake| {
            for ticket in state.order.permits() {
                ticket.revoke(wake);
            }
        });
    }

    fn snapshot(&self) -> Snapshot {
        let state = self.lock();
        Snapshot {
            capacity: state.order.capacity(),
            waiting: state.order.waiting(),
            in_flight: state.order.in_flight(),
            own_waiting: state.order.waiting(),
            own_in_flight: state.order.in_flight(),
        }
    }

    fn flows(&self) -> usize {
        self.state.lock().unwrap_or_else(PoisonError::into_inner).order.flows()
    }
}
