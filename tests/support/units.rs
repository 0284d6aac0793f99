//! The test's own count of what runs, apart from anything the crate says.

use std::sync::{
    Arc,
    atomic::{AtomicUsize, Ordering},
};

/// Counts the units inside handlers and response bodies. Clones count together.
#[derive(Clone, Debug, Default)]
pub(crate) struct Units(Arc<Counts>);

#[derive(Debug, Default)]
struct Counts {
    now: AtomicUsize,
    peak: AtomicUsize,
    entered: AtomicUsize,
}

/// One unit inside, until it is dropped.
#[derive(Debug)]
pub(crate) struct Unit(Arc<Counts>);

impl Units {
    pub(crate) fn enter(&self) -> Unit {
        self.0.entered.fetch_add(1, Ordering::SeqCst);
        let now = self.0.now.fetch_add(1, Ordering::SeqCst) + 1;
        self.0.peak.fetch_max(now, Ordering::SeqCst);
        Unit(Arc::clone(&self.0))
    }

    pub(crate) fn now(&self) -> usize {
        self.0.now.load(Ordering::SeqCst)
    }

    /// The most units that were ever inside at once.
    pub(crate) fn peak(&self) -> usize {
        self.0.peak.load(Ordering::SeqCst)
    }

    /// How many units ever came in.
    pub(crate) fn entered(&self) -> usize {
        self.0.entered.load(Ordering::SeqCst)
    }
}

impl Drop for Unit {
    fn drop(&mut self) {
        self.0.now.fetch_sub(1, Ordering::SeqCst);
    }
}
