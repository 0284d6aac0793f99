//! One request's place in line, and what it became.

use std::{
    fmt,
    sync::{PoisonError, atomic::Ordering},
    task::{Context, Waker},
};

use crate::{
    error::Cause,
    sync::{AtomicBool, AtomicU8, AtomicU32, Mutex, WakeList},
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

/// The state machine of one request, shared by the request and the backend.
///
/// There is one transition out of *pending*, a compare and swap, so a request ends exactly once (promise
/// P5) whichever of grant, deadline, drop and close come together. It only decides; taking the ticket off
/// the line or giving its units back is [`Backend::finish`](super::Backend::finish), which whoever loses the
/// race may call as well without harm.
pub(crate) struct Ticket {
    phase: AtomicU8,
    /// Written before the phase becomes `GRANTED`.
    units: AtomicU32,
    revoked: AtomicBool,
    waker: Mutex<Option<Waker>>,
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
            phase: AtomicU8::new(PENDING),
            units: AtomicU32::new(0),
            revoked: AtomicBool::new(false),
            waker: Mutex::new(None),
        }
    }

    /// Hands `units` to the ticket. `false`: it is pending no more, and the units are the next one's.
    ///
    /// The caller wakes the waker it gets once it holds no lock.
    pub(crate) fn grant(&self, units: u32, wake: &mut WakeList) -> bool {
        self.units.store(units, Ordering::Relaxed);
        let granted = self.leave_pending(GRANTED);
        if granted {
            wake.extend(self.take_waker());
        }
        granted
    }

    /// As [`grant`](Self::grant), for a ticket that nobody but its backend has seen yet: nobody waits to be woken.
    pub(crate) fn grant_unseen(&self, units: u32) {
        self.units.store(units, Ordering::Relaxed);
        self.phase.store(GRANTED, Ordering::Release);
    }

    /// Refuses the ticket for `cause`; `false` if it is pending no more.
    pub(crate) fn refuse(&self, cause: Cause, wake: &mut WakeList) -> bool {
        let refused = self.leave_pending(REFUSED + cause.index());
        if refused {
            wake.extend(self.take_waker());
        }
        refused
    }

    /// The deadline passed; `false` if something else came first.
    pub(crate) fn time_out(&self) -> bool {
        self.leave_pending(TIMED_OUT)
    }

    /// The request is gone; `false` if something else came first.
    pub(crate) fn cancel(&self) -> bool {
        self.leave_pending(CANCELLED)
    }

    /// The units go back; `false` if none were held.
    #[inline]
    pub(crate) fn end(&self) -> bool {
        let ended = self.phase.compare_exchange(GRANTED, ENDED, Ordering::AcqRel, Ordering::Acquire).is_ok();
        if ended {
            // The ticket may live on in copies of a request's extensions; the task it woke need not.
            drop(self.take_waker());
        }
        ended
    }

    /// Asks the holder of the permit to end. It is told through the waker, and units come back when it does.
    pub(crate) fn revoke(&self, wake: &mut WakeList) {
        self.revoked.store(true, Ordering::Release);
        wake.extend(self.take_waker());
    }

    #[inline]
    pub(crate) fn is_revoked(&self) -> bool {
        self.revoked.load(Ordering::Acquire)
    }

    /// Whether units are held through this ticket now.
    #[inline]
    pub(crate) fn is_held(&self) -> bool {
        self.phase.load(Ordering::Acquire) == GRANTED
    }

    pub(crate) fn phase(&self) -> Phase {
        match self.phase.load(Ordering::Acquire) {
            PENDING => Phase::Pending,
            GRANTED => Phase::Granted { units: self.units.load(Ordering::Relaxed) },
            refused if refused >= REFUSED => Phase::Refused(Cause::ALL[usize::from(refused - REFUSED)]),
            _ => Phase::Ended,
        }
    }

    /// Looks at the phase, and while it is pending has the task woken when that changes.
    pub(crate) fn poll_phase(&self, cx: &Context<'_>) -> Phase {
        match self.phase() {
            Phase::Pending => {
                self.register(cx);
                // Between the look and the registration it may have been decided, with nobody to wake.
                self.phase()
            }
            decided => decided,
        }
    }

    /// Whether the permit was revoked; if not, the task is woken when it is.
    #[inline]
    pub(crate) fn poll_revoked(&self, cx: &Context<'_>) -> bool {
        self.is_revoked() || {
            self.register(cx);
            self.is_revoked()
        }
    }

    fn register(&self, cx: &Context<'_>) {
        let mut slot = self.waker.lock().unwrap_or_else(PoisonError::into_inner);
        if slot.as_ref().is_some_and(|waker| waker.will_wake(cx.waker())) {
            return;
        }
        let replaced = slot.replace(cx.waker().clone());
        // Dropping a waker can run code of the executor's, so the lock goes first.
        drop(slot);
        drop(replaced);
    }

    fn take_waker(&self) -> Option<Waker> {
        self.waker.lock().unwrap_or_else(PoisonError::into_inner).take()
    }

    fn leave_pending(&self, to: u8) -> bool {
        self.phase.compare_exchange(PENDING, to, Ordering::AcqRel, Ordering::Acquire).is_ok()
    }
}

impl fmt::Debug for Ticket {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Ticket").field("phase", &self.phase()).finish_non_exhaustive()
    }
}
