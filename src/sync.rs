//! The primitives that tickets and backends share between threads: the standard library's, or loom's when the
//! interleavings are checked (`--cfg fair_queue_loom`).

#[cfg(not(all(test, fair_queue_loom)))]
pub(crate) use std::sync::{
    Mutex, MutexGuard,
    atomic::{AtomicU8, AtomicU32},
};

#[cfg(all(test, fair_queue_loom))]
pub(crate) use loom::sync::{
    Mutex, MutexGuard,
    atomic::{AtomicU8, AtomicU32},
};
