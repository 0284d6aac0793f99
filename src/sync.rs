//! The primitives that tickets and backends share between threads: the standard library's, or loom's when the
//! interleavings are checked (`--cfg fair_queue_loom`).

use std::task::Waker;

#[cfg(not(all(test, fair_queue_loom)))]
pub(crate) use std::sync::{
    Mutex,
    atomic::{AtomicBool, AtomicU8, AtomicU32},
};

#[cfg(all(test, fair_queue_loom))]
pub(crate) use loom::sync::{
    Mutex,
    atomic::{AtomicBool, AtomicU8, AtomicU32},
};

/// Wakers that are called once no lock is held. The first needs no allocation, and most often it is the only one.
#[derive(Debug, Default)]
pub(crate) struct WakeList {
    first: Option<Waker>,
    rest: Vec<Waker>,
}

impl WakeList {
    pub(crate) fn extend(&mut self, waker: Option<Waker>) {
        match (&self.first, waker) {
            (None, waker) => self.first = waker,
            (Some(_), Some(waker)) => self.rest.push(waker),
            (Some(_), None) => {}
        }
    }

    pub(crate) fn wake(mut self) {
        self.wake_all();
    }

    fn wake_all(&mut self) {
        while let Some(waker) = self.first.take().or_else(|| self.rest.pop()) {
            waker.wake();
        }
    }
}

impl Drop for WakeList {
    /// A waker is an executor's code; if one panics the others are called all the same.
    fn drop(&mut self) {
        self.wake_all();
    }
}
