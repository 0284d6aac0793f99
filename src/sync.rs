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
    pub(crate) fn push(&mut self, waker: Waker) {
        match &self.first {
            None => self.first = Some(waker),
            Some(_) => self.rest.push(waker),
        }
    }

    pub(crate) fn wake(self) {
        self.first.into_iter().chain(self.rest).for_each(Waker::wake);
    }
}
