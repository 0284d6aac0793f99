//! The fair line in front of expensive endpoints.
//!
//! Some endpoints are too expensive to run all at once: a chat stream holds a GPU slot for half a minute, a report holds a
//! database for ten seconds. A rate limit does not help, since it counts what begins and not what is under way. [`FairQueueLayer`]
//! caps the units *in flight*, parks the other requests in a fair line, answers at a deadline, and holds each permit until the
//! response body has ended or is dropped.
//!
//! ```
//! use std::time::Duration;
//! use axum::{Router, routing::post};
//! use tower_fair_queue::{FairQueueConfig, FairQueueLayer};
//!
//! # async fn chat() -> &'static str { "hello" }
//! let config = FairQueueConfig::builder("chat").capacity(3).max_wait(Duration::from_secs(20)).build()?;
//! let layer = FairQueueLayer::new(config);
//! let app: Router = Router::new().route("/chat", post(chat)).layer(layer);
//! # Ok::<(), tower_fair_queue::ConfigError>(())
//! ```
//!
//! The same queue works without HTTP: [`FairQueue::acquire`].
//!
//! # What fair means
//!
//! Requests that share a key, a tenant say, are one [flow](Ask::flow), and a flow is served in order of arrival. Flows that wait share
//! the capacity by [`Weight`], counted in units of [cost](Ask::cost): between two of them the units served by weight differ by at most
//! one largest request of each, however many other flows come and go. A [`Priority`] is a bounded head start on top of that and no
//! precedence. A flow that was idle has earned nothing, and requests that were cancelled, refused or too late are not charged. With no
//! flows named the line is first come, first served.
//!
//! # What is guaranteed
//!
//! - P1: the units in flight never exceed the capacity; with Redis, but for the exceptions below.
//! - P2: within a flow, grants follow the order of arrival at the queue.
//! - P3: flows share by weight, within the bound above.
//! - P4: a wide request is never passed for ever; a low priority is delayed by a bounded amount.
//! - P5: each request ends exactly once, and callbacks run at most once.
//! - P6: every permit returns at once: at the end, error or drop of the body, a panic, a disconnect that the server sees. With Redis,
//!   those of a killed process return within one lease and one second.
//! - P7: each waiting request has its answer by its deadline, within 50 ms of what the runtime's timer allows, also when Redis hangs.
//! - P8: what waits is bounded, and nothing is kept of flows that neither wait nor run.
//! - P9: if every message of Redis to a process is lost, a free permit is still granted within one poll interval.
//! - P10: while Redis is out of reach the chosen policy decides, within 750 ms; silence counts like an error.
//! - P11: a [drain](FairQueue::drain) answers the waiting and bounds the running.
//! - P12: a granted response is what the service sent, frame for frame.
//!
//! # What is not
//!
//! Without Redis each process has a queue of its own. A client that leaves is noticed when the server notices: hyper 1 drops a parked HTTP/1
//! request only if its body was read already, HTTP/2 resets are always seen. A client that stops reading with its connection open holds
//! its permit for as long as the server keeps the response. An upgraded connection gives its permit back at the handshake.
//!
//! # Choosing a backend
//!
//! In memory, the default: nothing to run, and the cap is that of one process. With n processes behind a balancer each has its own
//! line, so a request can wait in one while another has permits to spare, and the caps add up.
//!
//! In Redis or Valkey, 7.0 or later, with the feature `redis` and `FairQueueConfigBuilder::redis`: one line and one cap over all
//! processes. A grant that nobody has to wait for takes a round trip; one that waited is told by a push.
//!
#![cfg_attr(feature = "redis", doc = "```no_run")]
#![cfg_attr(not(feature = "redis"), doc = "```ignore")]
//! use tower_fair_queue::{FairQueueConfig, FairQueueLayer, RedisConfig};
//!
//! # async fn connect() -> Result<(), Box<dyn std::error::Error>> {
//! let redis = RedisConfig::new("redis://127.0.0.1:6379");
//! let config = FairQueueConfig::builder("chat").capacity(3).redis(redis).build()?;
//! let layer = FairQueueLayer::connect(config).await?;
//! # Ok(())
//! # }
//! ```
//!
//! What is different then:
//!
//! - While Redis is out of reach a policy decides, `Outage`: wait, reject, admit this process's share of the capacity (the default), or
//!   admit all.
//! - A process that is cut off or stopped for longer than its lease no longer holds its units in the eyes of the others. `LeaseLost`
//!   says whether what it runs goes on, on top of the capacity, or is ended before anyone else is granted its units.
//! - The cap holds over crashes, loss of all data in Redis, lost and late messages and clock jumps (up to two forward ones within a
//!   lease). More than the capacity can be in flight (a) after a rollback, a failover to a replica that missed writes or a restart from
//!   an older file: at most the grants in the lost writes; (b) with local admission: at most each process's share, once; (c) with
//!   `LeaseLost::Continue`: what a process cut off beyond its lease holds; (d) if a process joined less than a second before all data
//!   was lost and is silent beyond the recovery: what it holds.
//! - A rejection tells no position in line, and its estimate is that of the whole line.
//! - The first start of a queue, and each after a loss of data, grants nothing for about 2 s. `FairQueueLayer::connect` waits for it.
//!
//! `docs/PROTOCOL.md` in the repository tells of each fault what happens and its bound.
//!
//! # Back-pressure
//!
//! The service is always ready: which line a request stands in is known only with the request, so waiting is the response future's
//! and not `poll_ready`'s. What holds back is [`max_waiting`](FairQueueConfigBuilder::max_waiting): a full queue rejects at once.
//!
//! # Metrics
//!
//! The queue reports to whatever recorder of the `metrics` crate is installed before its first use; with none it costs next to nothing.
//!
//! | metric | kind | labels | what it tells |
//! |---|---|---|---|
//! | `fairqueue_waiting_requests` | gauge | `queue` | requests parked in line in this process |
//! | `fairqueue_in_flight_units` | gauge | `queue` | units held by permits of this process |
//! | `fairqueue_capacity_units` | gauge | `queue` | the capacity; `+Inf` where there is no bound |
//! | `fairqueue_requests_total` | counter | `queue`, `outcome` | asks ended: `granted`, `timed_out`, `cancelled`, `refused` |
//! | `fairqueue_rejections_total` | counter | `queue`, `cause` | asks that got no permit, by [`Cause`] |
//! | `fairqueue_granted_units_total` | counter | `queue` | units handed out |
//! | `fairqueue_released_units_total` | counter | `queue` | units that came back |
//! | `fairqueue_responses_total` | counter | `queue`, `outcome` | granted responses ended: `completed`, `aborted` (dropped before its end: the client left, or the service panicked), `failed`, `revoked` |
//! | `fairqueue_bypassed_requests_total` | counter | `queue` | requests that the classifier let pass |
//! | `fairqueue_wait_seconds` | histogram | `queue`, `outcome` | time from arrival to the end of the wait |
//! | `fairqueue_hold_seconds` | histogram | `queue` | time from grant to release |
//! | `fairqueue_calls_total` | counter | `queue`, `outcome` | with Redis: calls of the script, `done`, `timed_out` or `failed` |
//! | `fairqueue_call_seconds` | histogram | `queue` | with Redis: time from a call to its reply |
//! | `fairqueue_operations_total` | counter | `queue` | with Redis: operations that the calls held |
//! | `fairqueue_outage` | gauge | `queue` | with Redis: 1 while it is out of reach, else 0 |
//! | `fairqueue_nodes` | gauge | `queue` | with Redis: nodes attached to the queue |
//! | `fairqueue_aborted_permits_total` | counter | `queue` | with Redis: permits revoked with a lost lease (`LeaseLost::Abort`) |
//!
//! Queues of one name add up in these. `metrics-exporter-prometheus` renders histograms as summaries unless it is given buckets; the
//! chat example does that, with one at `max_wait`.
//!
//! # Features
//!
//! The queue in memory is always built; none of these is on by default.
//!
//! | feature | adds |
//! |---|---|
//! | `redis` | `FairQueueConfigBuilder::redis`: one queue over many processes, kept in Redis or Valkey |
//! | `redis-tls` | `rediss://` addresses and certificates, by rustls; implies `redis`. Where the process has no default `CryptoProvider` when it first connects, that of `ring` becomes it |
//! | `tracing` | log events: `warn` when Redis is lost and when it is back, `debug` for connections |
//! | `full` | all of them |
//!
//! # Minimum supported Rust version
//!
//! 1.88. It is raised only in a minor release, with a line in the changelog.

mod backend;
mod config;
mod error;
mod http;
mod metrics;
mod queue;
mod schedule;
mod sync;
mod trace;

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
#[cfg(feature = "redis")]
pub use crate::{
    config::{LeaseLost, Outage, RedisConfig},
    error::{ConnectError, ConnectProblem},
};

/// The examples of the README compile.
#[cfg(doctest)]
#[doc = include_str!("../README.md")]
struct Readme;
