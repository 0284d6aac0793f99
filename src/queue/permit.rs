//! A granted ticket's units.

use std::{future::poll_fn, sync::Arc, task::Poll, time::Duration};

use tokio::time::Instant;

use super::Shared;
use crate::{
    backend::{Place, Ticket},
    metrics::Waited,
};

/// Units of a queue's capacity, held until this is dropped (promise P6): the drop hands them to the next in line at once,
/// on any thread, inside or outside of a runtime, also while unwinding from a panic.
#[derive(Debug)]
#[must_use = "a permit is released when it is dropped"]
#[clippy::has_significant_drop]
pub struct Permit {
    held: Held,
}

impl Permit {
    /// How many units are held: the ask's cost, or less where the ask was too wide
    /// ([`TooWide::RunAlone`](crate::TooWide::RunAlone)).
    #[must_use]
    pub fn units(&self) -> u32 {
        self.held.units
    }

    /// How long the ask waited in line.
    #[must_use]
    pub fn waited(&self) -> Duration {
        self.held.waited
    }

    /// Gives the units back, as dropping does.
    pub fn release(self) {}

    /// Whether the queue wants the units back now: the grace of a drain is over, or a lease was lost that permits do not outlive
    /// (`LeaseLost::Abort`).
    #[must_use]
    pub fn is_revoked(&self) -> bool {
        self.held.ticket.is_revoked() || self.held.shared.backend.lease_is_lost()
    }

    /// Waits until the queue wants the units back.
    ///
    /// # Cancel safety
    ///
    /// May be dropped and called again at will. One task at a time is told: the one that polled last.
    pub async fn revoked(&self) {
        poll_fn(|cx| {
            if self.held.ticket.poll_revoked(cx) || self.is_revoked() {
                return Poll::Ready(());
            }
            self.held.shared.backend.attend();
            Poll::Pending
        })
        .await;
    }

    pub(crate) fn ticket(&self) -> &Arc<Ticket> {
        &self.held.ticket
    }

    pub(crate) fn shared(&self) -> &Arc<Shared> {
        &self.held.shared
    }
}

/// The guard of granted units. Its drop is the one way they go back.
#[derive(Debug)]
pub(crate) struct Held {
    pub(super) shared: Arc<Shared>,
    pub(super) ticket: Arc<Ticket>,
    pub(super) place: Place,
    pub(super) units: u32,
    /// Since when the units are held, if it is known; once it is counted, where the metrics ask for it.
    pub(super) since: Option<Instant>,
    pub(super) waited: Duration,
    /// Whether the metrics know of it.
    pub(super) counted: bool,
}

impl Held {
    /// Tells the metrics of the grant. The guard is there already, so the units come back should a recorder panic.
    pub(super) fn counted(mut self) -> Permit {
        let metrics = self.shared.metrics();
        metrics.waited(Waited::Granted, self.waited);
        metrics.took(self.units);
        self.since = metrics.times_holds().then(|| self.since.unwrap_or_else(Instant::now));
        self.counted = true;
        Permit { held: self }
    }
}

impl Drop for Held {
    fn drop(&mut self) {
        /// Gives the units back after the metrics were told, also if a recorder panics.
        struct Finish<'a>(&'a Held);

        impl Drop for Finish<'_> {
            fn drop(&mut self) {
                self.0.shared.finish(self.0.place);
            }
        }

        self.ticket.end();
        let _finish = Finish(self);
        if self.counted {
            self.shared.metrics().gave_back(self.units, self.since.map(|since| since.elapsed()));
        }
    }
}
