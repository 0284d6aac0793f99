//! The mark on a request that it carries a permit.

use std::sync::{Arc, Weak};

use http::Extensions;

use crate::{
    backend::Ticket,
    queue::{Permit, Shared},
};

/// Stands in the extensions of a granted request, so that the same layer met again lets it pass. It holds no
/// units: once the permit is released, a request that still carries the mark (a copy of the extensions) waits
/// in line like any other. The type is private, so nobody else can write one.
#[derive(Clone)]
pub(super) struct Mark {
    own: Stamp,
    /// Those of other queues, met before this one.
    outer: Vec<Stamp>,
}

#[derive(Clone)]
struct Stamp {
    /// The queue's own number, so that the mark does not keep the queue.
    queue: u64,
    /// Weak, so that the task that waits for the answer lives no longer for it.
    ticket: Weak<Ticket>,
}

impl Stamp {
    fn is_held(&self) -> bool {
        self.ticket.upgrade().is_some_and(|ticket| ticket.is_held())
    }
}

impl Mark {
    pub(super) fn put(permit: &Permit, extensions: &mut Extensions) {
        let own = Stamp { queue: permit.shared().id, ticket: Arc::downgrade(permit.ticket()) };
        let mut outer = vec![];
        if let Some(mark) = extensions.remove::<Self>() {
            outer = mark.outer;
            outer.push(mark.own);
            // Extensions may be handed from request to request; what has ended must not pile up.
            outer.retain(|stamp| stamp.queue != own.queue && stamp.is_held());
        }
        extensions.insert(Self { own, outer });
    }

    #[inline]
    pub(super) fn is_on(extensions: &Extensions, queue: &Shared) -> bool {
        let held = |stamp: &Stamp| stamp.queue == queue.id && stamp.is_held();
        extensions.get::<Self>().is_some_and(|mark| held(&mark.own) || mark.outer.iter().any(held))
    }
}
