//! The fair line in front of expensive endpoints.

mod backend;
mod config;
mod error;
mod http;
mod metrics;
mod queue;
mod schedule;
mod sync;

pub use crate::{
    config::{FairQueueConfig, FairQueueConfigBuilder, Limit, TooWide},
    error::{AcquireError, Cause, ConfigError, Revoked},
    http::{
        Class, Classify, DefaultReject, FairQueueLayer, FairQueueService, QueueAll, Reject, RejectAsyncFn,
        RejectFn, RejectFuture, Rejection, RequestHead, ResponseBody, ResponseFuture,
    },
    queue::{Acquire, Drained, FairQueue, Permit, Stats},
    schedule::{Ask, Flow, Priority, Weight},
};
