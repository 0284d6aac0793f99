//! The permit of a request at work.

use std::task::Context;

use crate::{metrics::Ended, queue::Permit};

/// Holds a request's permit, if it has one, and tells once how the response ended. Dropped without a word it was
/// aborted.
pub(super) struct Holding {
    permit: Option<Permit>,
    how: Ended,
}

impl Holding {
    #[inline]
    pub(super) fn new(permit: Option<Permit>) -> Self {
        Self { permit, how: Ended::Aborted }
    }

    /// Says how it will have ended when it is dropped.
    #[inline]
    pub(super) fn ends(&mut self, how: Ended) {
        self.how = how;
    }

    /// Says that all was delivered, unless something was said before.
    pub(super) fn completes(&mut self) {
        if self.how == Ended::Aborted {
            self.how = Ended::Completed;
        }
    }

    /// Releases now.
    #[inline]
    pub(super) fn end(&mut self, how: Ended) {
        self.how = how;
        self.release();
    }

    #[inline]
    pub(super) fn permit(&self) -> Option<&Permit> {
        self.permit.as_ref()
    }

    #[inline]
    pub(super) fn is_revoked(&self) -> bool {
        self.permit.as_ref().is_some_and(Permit::is_revoked)
    }

    /// As [`is_revoked`](Self::is_revoked); if not, the task is woken when it is.
    pub(super) fn poll_revoked(&self, cx: &Context<'_>) -> bool {
        self.permit.as_ref().is_some_and(|permit| {
            permit.shared().backend.attend();
            permit.ticket().poll_revoked(cx)
        })
    }

    #[inline]
    fn release(&mut self) {
        if let Some(permit) = self.permit.take() {
            permit.shared().metrics().responded(self.how);
        }
    }
}

impl Drop for Holding {
    fn drop(&mut self) {
        self.release();
    }
}
