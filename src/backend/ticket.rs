//! One request's place in line, and what it became.

use std::{
    fmt,
    sync::{Arc, OnceLock, PoisonError, atomic::Ordering},
    task::{Context, Waker},
};

use crate::{
    error::Cause,
    sync::{AtomicU8, AtomicU32, Mutex},
};

/// Waiting; left once, by whoever is first of the four below.
const PENDING: u8 = 0;
/// A backend granted it; left by `end` when the units go back.
const GRANTED: u8 = 1;
/// The request's own deadline ended it. Final.
const TIMED_OUT: u8 = 2;
/// The request was dropped. Final.
const CANCELLED: u8 = 3;
/// It was granted and its units are back. Final.
const ENDED: u8 = 4;
/// From here on: a backend refused it, for `Cause::ALL[phase - REFUSED]`. Final.
const REFUSED: u8 = 5;

/// The phase's part of the state.
const PHASE: u8 = 0b0001_1111;
/// There is a waker to call.
const LISTENED: u8 = 0b0010_0000;
/// The waker to call is the later one.
const MOVED: u8 = 0b0100_0000;
/// The holder of the permit is asked to end.
const REVOKED: u8 = 0b1000_0000;

const _: () = assert!(Cause::ALL.len() <= (PHASE - REFUSED) as usize);

/// The state machine of one request, shared by the request and the backend.
///
/// There is one transition out of *pending*, a compare and swap, so a request ends exactly once (promise
/// P5) whichever of grant, deadline, drop and close come together. It only decides; taking the ticket off
/// the line or giving its units back is [`Backend::finish`](super::Backend::finish), which whoever loses the
/// race may call as well without harm.
///
/// No wake-up is lost: who changes the state and who says that there is a waker both do it to one number. Whichever comes
/// second sees the other.
pub(crate) struct Ticket {
    state: AtomicU8,
    /// Written before the phase becomes `GRANTED`.
    units: AtomicU32,
    /// The waker of the first poll. Most requests are polled by one task to their end, and need no other and no lock.
    waker: OnceLock<Waker>,
    /// The waker of the last poll, once it was another task's.
    later: Mutex<Option<Waker>>,
}

/// What a look at a ticket finds.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Phase {
    Pending,
    Granted { units: u32 },
    Refused(Cause),
    Ended,
}

impl Ticket {
    pub(crate) fn new() -> Self {
        Self {
            state: AtomicU8::new(PENDING),
            units: AtomicU32::new(0),
            waker: OnceLock::new(),
            later: Mutex::new(None),
        }
    }

    /// Hands `units` to the ticket. `false`: it is pending no more, and the units are the next one's.
    ///
    /// The caller wakes what it gets once it holds no lock.
    pub(crate) fn grant(self: &Arc<Self>, units: u32, wake: &mut WakeList) -> bool {
        self.units.store(units, Ordering::Relaxed);
        self.decide(GRANTED, wake)
    }

    /// As [`grant`](Self::grant), for a ticket that nobody but its backend has seen yet: nobody waits to be woken.
    pub(crate) fn grant_unseen(&self, units: u32) {
        self.units.store(units, Ordering::Relaxed);
        self.state.store(GRANTED, Ordering::Release);
    }

    /// Refuses the ticket for `cause`; `false` if it is pending no more.
    pub(crate) fn refuse(self: &Arc<Self>, cause: Cause, wake: &mut WakeList) -> bool {
        self.decide(REFUSED + cause.index(), wake)
    }

    /// The deadline passed; `false` if something else came first.
    pub(crate) fn time_out(&self) -> bool {
        self.leave(PENDING, TIMED_OUT).is_some()
    }

    /// The request is gone; `false` if something else came first.
    pub(crate) fn cancel(&self) -> bool {
        self.leave(PENDING, CANCELLED).is_some()
    }

    /// The units go back; `false` if none were held.
    #[inline]
    pub(crate) fn end(&self) -> bool {
        self.leave(GRANTED, ENDED).is_some()
    }

    /// Asks the holder of the permit to end. It is told through the waker, and units come back when it does.
    pub(crate) fn revoke(self: &Arc<Self>, wake: &mut WakeList) {
        if self.state.fetch_or(REVOKED, Ordering::AcqRel) & LISTENED != 0 {
            wake.push(Arc::clone(self));
        }
    }

    /// Has whoever waits look again, though nothing has changed for the ticket itself.
    #[cfg(feature = "redis")]
    pub(crate) fn nudge(self: &Arc<Self>, wake: &mut WakeList) {
        if self.state.load(Ordering::Acquire) & LISTENED != 0 {
            wake.push(Arc::clone(self));
        }
    }

    #[inline]
    pub(crate) fn is_revoked(&self) -> bool {
        self.state.load(Ordering::Acquire) & REVOKED != 0
    }

    /// Whether units are held through this ticket now.
    #[inline]
    pub(crate) fn is_held(&self) -> bool {
        self.state.load(Ordering::Acquire) & PHASE == GRANTED
    }

    #[inline]
    pub(crate) fn phase(&self) -> Phase {
        self.phase_of(self.state.load(Ordering::Acquire))
    }

    /// Looks at the phase, and while it is pending has the task woken when that changes.
    #[inline]
    pub(crate) fn poll_phase(&self, cx: &Context<'_>) -> Phase {
        match self.phase() {
            // By the time of the registration it may have been decided, with nobody to wake.
            Phase::Pending => self.phase_of(self.register(cx)),
            decided => decided,
        }
    }

    /// Whether the permit was revoked; if not, the task is woken when it is.
    #[inline]
    pub(crate) fn poll_revoked(&self, cx: &Context<'_>) -> bool {
        self.is_revoked() || self.register(cx) & REVOKED != 0
    }

    /// Has the task woken at the next change, and gives the state as it was when that was made sure of.
    fn register(&self, cx: &Context<'_>) -> u8 {
        let state = self.state.load(Ordering::Acquire);
        if state & LISTENED == 0 && self.waker.set(cx.waker().clone()).is_ok() {
            return self.state.fetch_or(LISTENED, Ordering::AcqRel);
        }
        if state & (LISTENED | MOVED) == LISTENED
            && self.waker.get().is_some_and(|waker| waker.will_wake(cx.waker()))
        {
            return state;
        }
        self.register_later(cx.waker())
    }

    #[cold]
    fn register_later(&self, waker: &Waker) -> u8 {
        let mut slot = self.later.lock().unwrap_or_else(PoisonError::into_inner);
        let replaced = slot.replace(waker.clone());
        // Dropping a waker can run code of the executor's, so the lock goes first.
        drop(slot);
        drop(replaced);
        self.state.fetch_or(LISTENED | MOVED, Ordering::AcqRel)
    }

    /// Wakes the task that polled last. One that polls in this instant has seen what it is woken for.
    fn wake(&self) {
        if self.state.load(Ordering::Acquire) & MOVED == 0 {
            if let Some(waker) = self.waker.get() {
                waker.wake_by_ref();
            }
        } else {
            let waker = self.later.lock().unwrap_or_else(PoisonError::into_inner).clone();
            if let Some(waker) = waker {
                waker.wake();
            }
        }
    }

    fn decide(self: &Arc<Self>, to: u8, wake: &mut WakeList) -> bool {
        let before = self.leave(PENDING, to);
        if before.is_some_and(|before| before & LISTENED != 0) {
            wake.push(Arc::clone(self));
        }
        before.is_some()
    }

    /// Goes from phase to phase, and gives the state from before; `None` if it is in another.
    #[inline]
    fn leave(&self, from: u8, to: u8) -> Option<u8> {
        let change = |state| (state & PHASE == from).then_some(state & !PHASE | to);
        self.state.fetch_update(Ordering::AcqRel, Ordering::Acquire, change).ok()
    }

    fn phase_of(&self, state: u8) -> Phase {
        match state & PHASE {
            PENDING => Phase::Pending,
            GRANTED => Phase::Granted { units: self.units.load(Ordering::Relaxed) },
            refused if refused >= REFUSED => Phase::Refused(Cause::ALL[usize::from(refused - REFUSED)]),
            _ => Phase::Ended,
        }
    }
}

impl fmt::Debug for Ticket {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Ticket").field("phase", &self.phase()).finish_non_exhaustive()
    }
}

/// Tickets whose tasks are woken once no lock is held. The first needs no allocation, and most often it is the only one.
#[derive(Debug, Default)]
pub(crate) struct WakeList {
    first: Option<Arc<Ticket>>,
    rest: Vec<Arc<Ticket>>,
}

impl WakeList {
    fn push(&mut self, ticket: Arc<Ticket>) {
        if self.first.is_none() {
            self.first = Some(ticket);
        } else {
            self.rest.push(ticket);
        }
    }

    pub(crate) fn wake(mut self) {
        self.wake_all();
    }

    fn wake_all(&mut self) {
        while let Some(ticket) = self.first.take().or_else(|| self.rest.pop()) {
            ticket.wake();
        }
    }
}

impl Drop for WakeList {
    /// A waker is an executor's code; if one panics the others are called all the same.
    fn drop(&mut self) {
        self.wake_all();
    }
}
