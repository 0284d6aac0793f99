//! One queue as a process sees it.

mod acquire;
mod drain;
mod permit;

#[cfg(all(test, fair_queue_loom))]
mod loom;

use std::{
    collections::hash_map::RandomState,
    fmt,
    hash::BuildHasher,
    sync::{
        Arc, OnceLock,
        atomic::{AtomicBool, AtomicU64, Ordering},
    },
    time::Duration,
};

use tokio::sync::Notify;

#[cfg(feature = "redis")]
use crate::{backend::Redis, error::ConnectError};

use self::permit::Held;
pub use self::{acquire::Acquire, drain::Drained, permit::Permit};
use crate::{
    backend::{Backend, Memory, Place},
    config::{FairQueueConfig, Limit},
    error::{AcquireError, Cause, ConfigError},
    metrics::Metrics,
    schedule::{Ask, Rules},
};

/// A handle to one queue: asks for permits, reads and changes the queue. Clones are handles to the same queue.
///
/// The queue is used without HTTP like this, and behind a [`FairQueueLayer`](crate::FairQueueLayer) it is
/// [`FairQueueLayer::queue`](crate::FairQueueLayer::queue).
///
/// # Examples
///
/// ```
/// use tower_fair_queue::{Ask, FairQueue, FairQueueConfig};
///
/// # #[tokio::main(flavor = "current_thread")]
/// # async fn main() -> Result<(), Box<dyn std::error::Error>> {
/// let queue = FairQueue::new(FairQueueConfig::builder("reports").capacity(2).build()?);
/// let permit = queue.acquire(Ask::new()).await?;
/// assert_eq!(queue.stats().in_flight, 1);
/// drop(permit);
/// assert_eq!(queue.stats().in_flight, 0);
/// # Ok(())
/// # }
/// ```
#[derive(Clone)]
pub struct FairQueue {
    shared: Arc<Shared>,
}

pub(crate) struct Shared {
    /// Another one for each queue of the process.
    pub(crate) id: u64,
    pub(crate) config: FairQueueConfig,
    pub(crate) backend: Box<dyn Backend>,
    metrics: OnceLock<Metrics>,
    closed: AtomicBool,
    /// Told of every ending once the queue is closed.
    ended: Notify,
    jitter: (RandomState, AtomicU64),
}

impl Shared {
    pub(crate) fn metrics(&self) -> &Metrics {
        self.metrics.get_or_init(|| {
            let metrics = Metrics::new(&self.config.name);
            metrics.capacity(self.backend.snapshot().capacity);
            metrics
        })
    }

    pub(crate) fn finish(&self, place: Place) {
        self.backend.finish(place);
        // Pairs with `close`: either this sees the flag, or whoever waits after `close` sees the units back.
        if self.closed.load(Ordering::SeqCst) {
            self.ended.notify_waiters();
        }
    }

    pub(crate) fn rejection(
        &self,
        ask: &Ask,
        place: Option<Place>,
        cause: Cause,
        waited: Duration,
    ) -> AcquireError {
        let outlook = self.backend.outlook(ask, place);
        AcquireError::new(cause, waited).with_outlook(outlook.position, outlook.estimate)
    }

    /// A number from 0 up to and without 1, another one each time.
    pub(crate) fn jitter(&self) -> f64 {
        let (seed, counter) = &self.jitter;
        let bits = seed.hash_one(counter.fetch_add(1, Ordering::Relaxed)) >> 40;
        #[expect(clippy::cast_precision_loss, reason = "24 bits")]
        let fraction = bits as f64 / (1_u64 << 24) as f64;
        fraction
    }
}

impl FairQueue {
    /// Makes a queue. It neither fails nor blocks, and needs no runtime.
    ///
    /// A queue in memory starts no task. A queue in Redis attaches as soon as there is a runtime: at once if this is called within
    /// one, else with the first ask. Its very first start, and the one after a loss of data, grants nothing for about 2 s, in which
    /// other processes may tell what they hold; see `FairQueue::connect`, with the feature `redis`.
    #[must_use]
    pub fn new(config: FairQueueConfig) -> Self {
        #[cfg(feature = "redis")]
        if let Some(redis) = &config.redis {
            let backend = Box::new(Redis::new(&config, redis));
            return Self::with_backend(config, backend);
        }
        let backend = Box::new(Memory::new(Rules::from(&config)));
        Self::with_backend(config, backend)
    }

    /// Makes a queue and waits until it grants; a queue's very first start takes about 2 s, and its capacity then opens over the
    /// [`ramp`](crate::RedisConfig::ramp), as it does whenever no process was attached for a while. The server is reached and of a version that will do, the user has the rights
    /// it needs, and what other processes hold is known. A queue in memory is ready at once.
    ///
    /// # Errors
    ///
    /// What stands in the way, by name, within 2 s; [`ConnectProblem::NotReady`](crate::ConnectProblem::NotReady) where
    /// a process that held permits is silent for longer than a lease and 5 s.
    ///
    /// # Cancel safety
    ///
    /// Dropping the future drops the queue, which detaches.
    #[cfg(feature = "redis")]
    pub async fn connect(config: FairQueueConfig) -> Result<Self, ConnectError> {
        let Some(redis) = &config.redis else { return Ok(Self::new(config)) };
        let backend = Redis::new(&config, redis);
        backend.ready().await?;
        Ok(Self::with_backend(config, Box::new(backend)))
    }

    fn with_backend(config: FairQueueConfig, backend: Box<dyn Backend>) -> Self {
        static NEXT_ID: AtomicU64 = AtomicU64::new(0);
        Self {
            shared: Arc::new(Shared {
                id: NEXT_ID.fetch_add(1, Ordering::Relaxed),
                config,
                backend,
                metrics: OnceLock::new(),
                closed: AtomicBool::new(false),
                ended: Notify::new(),
                jitter: (RandomState::new(), AtomicU64::new(0)),
            }),
        }
    }

    /// Waits in line for a permit, until the ask's deadline or `max_wait`, whichever is earlier.
    ///
    /// The place in line is taken at the first poll.
    ///
    /// # Errors
    ///
    /// [`AcquireError`] with its [`Cause`]: the deadline passed, a bound on waiting refused the ask, it is too wide, or
    /// the queue is closed. The ask was never granted then.
    ///
    /// # Panics
    ///
    /// When it is polled outside of a Tokio runtime with time enabled and has to wait, or polled again after its answer.
    ///
    /// # Cancel safety
    ///
    /// Dropping the future gives up the place in line; a grant that came in that instant goes to the next in line
    /// (promises P5 and P6). Asking again means the end of the line.
    pub fn acquire(&self, ask: Ask) -> Acquire {
        Acquire::new(Arc::clone(&self.shared), ask, true)
    }

    /// Takes a permit if one can be granted now. It never passes those who wait, and waits for nothing but the answer: none with a
    /// queue in memory, one round trip with Redis.
    ///
    /// # Errors
    ///
    /// [`Cause::WouldWait`] where the ask would have to wait; otherwise as [`acquire`](Self::acquire).
    ///
    /// # Cancel safety
    ///
    /// As [`acquire`](Self::acquire).
    pub fn try_acquire(&self, ask: Ask) -> Acquire {
        Acquire::new(Arc::clone(&self.shared), ask, false)
    }

    /// The queue's numbers at one instant.
    #[must_use]
    pub fn stats(&self) -> Stats {
        let snapshot = self.shared.backend.snapshot();
        Stats {
            capacity: u32::try_from(snapshot.capacity).map_or(Limit::Unlimited, Limit::AtMost),
            in_flight: snapshot.in_flight,
            waiting: snapshot.waiting,
            own_in_flight: snapshot.own_in_flight,
            own_waiting: snapshot.own_waiting,
            flows: self.shared.backend.flows(),
        }
    }

    /// Changes the capacity of the running queue. Raised, it grants what now fits at once. Lowered, nothing in flight is
    /// touched and nothing is granted until what is in flight has come below it; waiting asks that are too wide
    /// now are treated by [`TooWide`](crate::TooWide) at once.
    ///
    /// It stays until [`clear_capacity`](Self::clear_capacity). With Redis it is the whole queue's, whatever processes that attach later are
    /// configured with, and is set with the next call, so a few milliseconds later.
    ///
    /// # Errors
    ///
    /// The capacity is 0. Nothing has changed.
    pub fn set_capacity(&self, units: impl Into<Limit>) -> Result<(), ConfigError> {
        let capacity = units.into().check("capacity")?.as_units();
        self.shared.backend.resize(Some(capacity));
        self.shared.metrics().capacity(capacity);
        Ok(())
    }

    /// Goes back to the configured capacity, after [`set_capacity`](Self::set_capacity). With Redis that is the one of the process
    /// that attached last.
    pub fn clear_capacity(&self) {
        self.shared.backend.resize(None);
        self.shared.metrics().capacity(self.shared.backend.snapshot().capacity);
    }

    /// Closes the queue for good: whoever waits or comes is refused with [`Cause::ShuttingDown`]. Permits in flight
    /// are left alone. Closing twice is closing once.
    pub fn close(&self) {
        self.shared.closed.store(true, Ordering::SeqCst);
        self.shared.backend.close(Cause::ShuttingDown);
    }

    /// Whether [`close`](Self::close) or [`drain`](Self::drain) was called. A call that is still under way may grant what asks
    /// in this instant.
    #[must_use]
    pub fn is_closed(&self) -> bool {
        self.shared.closed.load(Ordering::SeqCst)
    }

    /// Closes the queue and waits until everything this process has in flight has ended (promise P11), for at most `grace`; then revokes
    /// what is left and waits for at most a quarter of a second more. With Redis the node then detaches, so all it had is free for the
    /// other processes at once; that takes two command timeouts at most.
    ///
    /// Revoking ends response bodies with an error, never as if they were complete, when they are next polled. A request whose service has
    /// not answered yet is answered for: 503 without `Retry-After`, with [`Revoked`](crate::Revoked) in its extensions, since the work
    /// had begun; no rejection handler is called. Other holders are told by [`Permit::revoked`]. A body that its server does not poll, since its client has stopped
    /// reading, stays until the server drops it, and is counted in what this returns.
    ///
    /// # Cancel safety
    ///
    /// Dropping the future leaves the queue closed; what was revoked by then stays revoked. It may be called again.
    pub async fn drain(&self, grace: Duration) -> Drained {
        drain::drain(self, grace).await
    }

    /// The queue's name.
    #[must_use]
    pub fn name(&self) -> &str {
        &self.shared.config.name
    }

    pub(crate) fn shared(&self) -> &Arc<Shared> {
        &self.shared
    }
}

impl fmt::Debug for FairQueue {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("FairQueue")
            .field("name", &self.name())
            .field("stats", &self.stats())
            .finish_non_exhaustive()
    }
}

impl fmt::Debug for Shared {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Shared").field("name", &self.config.name).finish_non_exhaustive()
    }
}

/// A queue's numbers at one instant. Those of a queue in memory are read under one lock; of a queue in Redis, those of the
/// whole queue are as of this process's last call, at most a second ago while Redis answers, and from before while it does not; those
/// of this process are always its own.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
#[non_exhaustive]
pub struct Stats {
    /// The capacity, in units.
    pub capacity: Limit,
    /// Units granted and not released.
    pub in_flight: u64,
    /// Tickets parked.
    pub waiting: u64,
    /// The part of `in_flight` that this process holds.
    pub own_in_flight: u64,
    /// The part of `waiting` that waits in this process.
    pub own_waiting: u64,
    /// Flows that are kept account of, with Redis those of this process: those of which something waits and, with
    /// [`max_in_flight_per_flow`](crate::FairQueueConfigBuilder::max_in_flight_per_flow), those of which something runs.
    pub flows: usize,
}
