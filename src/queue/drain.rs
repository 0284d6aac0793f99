//! Ending a queue.

use std::{pin::pin, time::Duration};

use tokio::time::{Instant, timeout_at};

use super::FairQueue;

/// How long holders have to notice that they are revoked. They are woken at once, so this is for the scheduling of
/// their tasks alone.
const NOTICE: Duration = Duration::from_millis(250);

/// How a drain ended.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
#[must_use = "tells whether everything in flight has ended"]
pub struct Drained {
    revoked: u64,
    remaining: u64,
}

impl Drained {
    /// Whether nothing is in flight any more.
    #[must_use]
    pub fn is_complete(&self) -> bool {
        self.remaining == 0
    }

    /// The units in flight when the grace was over, just before they were revoked.
    #[must_use]
    pub fn revoked(&self) -> u64 {
        self.revoked
    }

    /// The units still in flight.
    #[must_use]
    pub fn remaining(&self) -> u64 {
        self.remaining
    }
}

pub(super) async fn drain(queue: &FairQueue, grace: Duration) -> Drained {
    queue.close();
    let now = Instant::now();
    // A grace beyond what an instant can hold is no bound at all; a year stands for it.
    let end = now.checked_add(grace).unwrap_or(now + Duration::from_secs(365 * 24 * 60 * 60));
    let revoked = idle(queue, end).await;
    let mut remaining = revoked;
    if revoked > 0 {
        queue.shared.backend.revoke();
        remaining = idle(queue, Instant::now() + NOTICE).await;
    }
    queue.shared.backend.detach().await;
    Drained { revoked, remaining }
}

/// Waits until nothing is in flight, or `end`, and tells what still is.
async fn idle(queue: &FairQueue, end: Instant) -> u64 {
    loop {
        let mut ended = pin!(queue.shared.ended.notified());
        // Listening before looking: an ending between the two is heard.
        ended.as_mut().enable();
        let in_flight = queue.shared.backend.snapshot().own_in_flight;
        if in_flight == 0 || timeout_at(end, ended).await.is_err() {
            return queue.shared.backend.snapshot().own_in_flight;
        }
    }
}
