//! The mark on a request that it carries a permit.

use std::sync::Arc;

use http::Extensions;

use crate::queue::{Permit, Shared, Ticket};

/// Stands in the extensions of a granted request, so that the same layer met again lets it pass. It holds no
/// units: once the permit is released, a request that still carries the mark (a copy of the extensions) waits
/// in line like any other. The type is private, so nobody else can write one.
#[derive(Clone)]
pub(super) struct Mark {
    /// The queue's own number, so that the mark does not keep the queue.
    queue: u64,
    ticket: Arc<Ticket>,
    /// The mark of another queue, met before this one.
    outer: Option<Arc<Self>>,
}

impl Mark {
    pub(super) fn put(permit: &Permit, extensions: &mut Extensions) {
        let outer = extensions.remove::<Self>().map(Arc::new);
        extensions.insert(Self { queue: permit.shared().id, ticket: Arc::clone(permit.ticket()), outer });
    }

    #[inline]
    pub(super) fn is_on(extensions: &Extensions, queue: &Shared) -> bool {
        let mut next = extensions.get::<Self>();
        while let Some(mark) = next {
            if mark.queue == queue.id && mark.ticket.is_held() {
                return true;
            }
            next = mark.outer.as_deref();
        }
        false
    }
}
