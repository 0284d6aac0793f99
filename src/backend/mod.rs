//! What a queue needs of the place where its line is kept.

mod memory;
#[cfg(feature = "redis")]
mod redis;
mod ticket;

use std::{fmt, pin::Pin, sync::Arc, time::Duration};

#[cfg(feature = "redis")]
pub(crate) use self::redis::{Redis, check_url};
pub(crate) use self::{
    memory::Memory,
    ticket::{Phase, Ticket, WakeList},
};
pub(crate) use crate::schedule::Place;
use crate::{error::Cause, schedule::Ask};

/// The keeper of one queue's line.
///
/// A backend decides tickets: [`Ticket::grant`] and [`Ticket::refuse`], at any time from within
/// [`enqueue`](Self::enqueue) on. The requests' side decides the rest (deadline, drop) and then tells the backend
/// with [`finish`](Self::finish). No call waits for anything but a short lock, so each may be made from a `Drop`, outside of
/// a runtime, and under any executor.
pub(crate) trait Backend: fmt::Debug + Send + Sync + 'static {
    /// Puts a pending ticket in line and grants what can be granted. With `wait` false a ticket that is not granted at
    /// once, or as soon as the backend has an answer, is refused.
    ///
    /// When this returns the ticket is granted, refused, in line or on its way there. The place names it in `finish`; there is
    /// none for a ticket that was refused.
    fn enqueue(&self, ask: &Ask, ticket: &Arc<Ticket>, wait: bool) -> Option<Place>;

    /// Ends what the place names: a waiting ticket leaves the line, a permit's units go to the next in line.
    /// Once it has ended this does nothing, so it is called by whoever cannot tell.
    fn finish(&self, place: Place);

    /// The position of a waiting ticket and the time to get there, as far as they are known.
    fn outlook(&self, ask: &Ask, place: Option<Place>) -> Outlook;

    /// Changes the capacity (`u64::MAX`: without bound), or goes back to the configured one, and grants or refuses what
    /// follows from it.
    fn resize(&self, capacity: Option<u64>);

    /// Refuses all that wait and all that come, for `cause`. What is in flight is left alone.
    fn close(&self, cause: Cause);

    /// Asks everything in flight to end.
    fn revoke(&self);

    /// Whether this process may no longer use what it holds, though nobody has come to revoke it yet.
    fn lease_is_lost(&self) -> bool {
        false
    }

    /// A ticket of this backend's is polled, and waits on. A backend whose task has ended with its runtime goes on in this one.
    fn attend(&self) {}

    /// The queue's numbers at one instant, as far as this process knows them.
    fn snapshot(&self) -> Snapshot;

    /// The flows that are kept account of. It may look at every ticket.
    fn flows(&self) -> usize;

    /// Gives back what the backend keeps elsewhere for this process. It grants nothing from then on.
    fn detach(&self) -> Pin<Box<dyn Future<Output = ()> + Send + '_>> {
        Box::pin(std::future::ready(()))
    }
}

/// Where a ticket stands.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub(crate) struct Outlook {
    pub(crate) position: Option<usize>,
    pub(crate) estimate: Option<Duration>,
}

/// A queue's numbers at one instant.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub(crate) struct Snapshot {
    /// `u64::MAX`: without bound.
    pub(crate) capacity: u64,
    pub(crate) waiting: u64,
    pub(crate) in_flight: u64,
    /// The part of `waiting` and of `in_flight` that is this process's own.
    pub(crate) own_waiting: u64,
    pub(crate) own_in_flight: u64,
}
