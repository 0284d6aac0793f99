//! The line of one process, in its own memory.

use std::sync::{Arc, PoisonError};

use tokio::time::Instant;

use super::{Backend, Outlook, Place, Snapshot, Ticket};
use crate::{
    error::Cause,
    schedule::{Ask, DrainRate, Entered, FairOrder, Finished, Rules},
    sync::{Mutex, WakeList},
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
    ///
    /// Nothing in here runs code of a user's, so a poisoned lock would mean a defect of this crate's; the
    /// state is used on, since the other requests are worth more than the word of it.
    fn change<R>(&self, now: Instant, change: impl FnOnce(&mut State, &mut WakeList) -> R) -> R {
        let mut wake = WakeList::default();
        let result = {
            let mut state = self.state.lock().unwrap_or_else(PoisonError::into_inner);
            let result = change(&mut state, &mut wake);
            state.dispatch(&mut wake);
            state.note_waiting(now);
            result
        };
        wake.wake();
        result
    }
}

impl State {
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
    fn note_waiting(&mut self, now: Instant) {
        let waiting = self.order.waiting() > 0;
        if waiting != self.waiting {
            self.waiting = waiting;
            self.drain_rate.count(waiting, now.saturating_duration_since(self.started));
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
    fn enqueue(&self, ask: &Ask, ticket: &Arc<Ticket>, wait: bool, now: Instant) -> Option<Place> {
        self.change(now, |state, wake| {
            if let Some(cause) = state.closed {
                ticket.refuse(cause, wake);
                return None;
            }
            match state.order.enqueue(ask, Arc::clone(ticket)) {
                Ok(Entered::Granted { place, units }) => {
                    ticket.grant_unseen(units);
                    Some(place)
                }
                Ok(Entered::Waiting(place)) if wait => Some(place),
                Ok(Entered::Waiting(place)) => {
                    state.dispatch(wake);
                    if ticket.refuse(Cause::WouldWait, wake) {
                        state.order.finish(place);
                        return None;
                    }
                    Some(place)
                }
                Err(cause) => {
                    ticket.refuse(cause, wake);
                    None
                }
            }
        })
    }

    fn finish(&self, place: Place, now: Instant) {
        self.change(now, |state, _| {
            if let Finished::Released(units) = state.order.finish(place) {
                state.drain_rate.released(units, now.saturating_duration_since(state.started));
            }
        });
    }

    fn outlook(&self, ask: &Ask, place: Option<Place>) -> Outlook {
        let mut state = self.state.lock().unwrap_or_else(PoisonError::into_inner);
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
        self.change(Instant::now(), |state, wake| {
            state.order.resize(capacity.unwrap_or(state.configured));
            let refused = state.order.too_wide().map(|(place, ticket)| (place, Arc::clone(ticket))).collect();
            state.refuse_all(refused, Cause::TooWide, wake);
        });
    }

    fn close(&self, cause: Cause) {
        self.change(Instant::now(), |state, wake| {
            state.closed = Some(cause);
            let refused =
                state.order.waiting_tickets().map(|(place, ticket)| (place, Arc::clone(ticket))).collect();
            state.refuse_all(refused, cause, wake);
        });
    }

    fn revoke(&self) {
        self.change(Instant::now(), |state, wake| {
            for ticket in state.order.permits() {
                ticket.revoke(wake);
            }
        });
    }

    fn snapshot(&self) -> Snapshot {
        let state = self.state.lock().unwrap_or_else(PoisonError::into_inner);
        Snapshot {
            capacity: state.order.capacity(),
            waiting: state.order.waiting(),
            in_flight: state.order.in_flight(),
            own_waiting: state.order.waiting(),
            own_in_flight: state.order.in_flight(),
            flows: state.order.flows(),
        }
    }
}
