//! The task that speaks for a node: one per queue and process, one call at a time.

use std::{
    pin::pin,
    sync::{
        Arc, Mutex, PoisonError,
        atomic::{AtomicBool, AtomicU64, Ordering},
    },
    time::Duration,
};

use tokio::{
    select,
    sync::{Notify, watch},
    task::JoinHandle,
    time::{sleep, timeout},
};

use super::{
    clock,
    keys::Keys,
    link::{CallError, Link, Subscription, Target},
    node::{Heard, Node, Settings},
    wire::{NodeId, micros, read_push, read_reply},
};
use crate::{
    backend::WakeList,
    config::{FairQueueConfig, LeaseLost, RedisConfig},
    error::{ConnectError, ConnectProblem},
    metrics::{BackendMetrics, CallOutcome},
    schedule::Rules,
    trace,
};

/// The pauses between connections that fail: jittered between the two, doubling. With a connection and a call they stay below the time that a
/// queue waits after a loss of data, so no node misses it.
const BACKOFF: (Duration, Duration) = (Duration::from_millis(25), Duration::from_millis(300));

/// How long `connect` waits for the queue beyond a lease, which is the longest a recovery takes.
const READY: Duration = Duration::from_secs(5);

/// What the engine and the queue's handles share.
#[derive(Debug)]
pub(super) struct Core {
    pub(super) node: Mutex<Node>,
    name: Arc<str>,
    id: NodeId,
    keys: Keys,
    target: Target,
    timeout: Duration,
    lease: Duration,
    aborts: bool,
    /// When the node's own lease ends, in microseconds, for whoever may not wait for the lock; 0 until it has one.
    lease_end: AtomicU64,
    /// The engine has something to tell, or is to stop.
    work: Notify,
    running: AtomicBool,
    stopping: AtomicBool,
    /// What the engine last met: `None` while all is well.
    state: watch::Sender<State>,
    metrics: std::sync::OnceLock<BackendMetrics>,
}

#[derive(Clone, Debug, PartialEq, Eq)]
enum State {
    /// Nothing has been heard yet.
    Starting,
    Ready,
    /// Redis is heard, and the queue does not grant yet.
    Recovering,
    Failed(ConnectError),
    Stopped,
}

impl Core {
    pub(super) fn new(id: NodeId, config: &FairQueueConfig, redis: &RedisConfig) -> Self {
        let settings = Settings {
            rules: Rules::from(config),
            lease: redis.lease,
            lease_lost: redis.lease_lost,
            outage: redis.outage,
            poll: redis.poll_interval,
            ramp: redis.ramp,
        };
        Self {
            node: Mutex::new(Node::new(id, settings, clock::now())),
            name: Arc::clone(&config.name),
            id,
            keys: Keys::new(&redis.key_prefix, &config.name),
            target: Target::new(redis),
            timeout: redis.command_timeout,
            lease: redis.lease,
            aborts: redis.lease_lost == LeaseLost::Abort,
            lease_end: AtomicU64::new(0),
            work: Notify::new(),
            running: AtomicBool::new(false),
            stopping: AtomicBool::new(false),
            state: watch::Sender::new(State::Starting),
            metrics: std::sync::OnceLock::new(),
        }
    }

    /// Changes the node under its lock and wakes afterwards.
    pub(super) fn change<R>(&self, change: impl FnOnce(&mut Node, &mut WakeList) -> R) -> R {
        let mut wake = WakeList::default();
        let result = change(&mut self.node.lock().unwrap_or_else(PoisonError::into_inner), &mut wake);
        wake.wake();
        result
    }

    /// Starts the engine if none runs and there is a runtime for it. One whose runtime has ended has left its place free.
    pub(super) fn run(self: &Arc<Self>) {
        if self.running.load(Ordering::Acquire) || self.stopping.load(Ordering::Acquire) {
            return;
        }
        if let Ok(runtime) = tokio::runtime::Handle::try_current()
            && !self.running.swap(true, Ordering::AcqRel)
        {
            let running = Running(Arc::clone(self));
            let core = Arc::clone(self);
            drop(runtime.spawn(async move {
                let _running = running;
                core.engine().await;
            }));
        }
    }

    pub(super) fn work(&self) {
        self.work.notify_one();
    }

    pub(super) fn stop(&self) {
        self.stopping.store(true, Ordering::Release);
        self.work.notify_one();
    }

    /// Stops the engine and waits until the node has detached, for as long as two calls may take at most.
    pub(super) async fn detach(&self) {
        let mut state = self.state.subscribe();
        if !self.running.load(Ordering::Acquire) {
            return;
        }
        self.stop();
        let stopped = state.wait_for(|state| *state == State::Stopped);
        // Late or lost, the lease gives the units back.
        let _ = timeout(2 * self.timeout, stopped).await;
    }

    /// Waits until the queue grants. Problems that time does not mend are told at once.
    pub(super) async fn ready(self: &Arc<Self>) -> Result<(), ConnectError> {
        let (mut link, subscription) = self.target.connect(&self.keys, &self.id).await?;
        self.target.probe(&mut link, &self.keys, &self.id).await?;
        drop((link, subscription));
        let mut state = self.state.subscribe();
        self.run();
        let settled = |state: &State| match state {
            State::Ready | State::Stopped => true,
            State::Failed(error) => !error.is_transient(),
            State::Starting | State::Recovering => false,
        };
        let ready = timeout(self.lease + READY, state.wait_for(settled)).await;
        match ready.map(|state| state.map(|state| state.clone())) {
            Ok(Ok(State::Ready)) => Ok(()),
            Ok(Ok(State::Failed(error))) => Err(error),
            _ => Err(match &*self.state.borrow() {
                State::Failed(error) => error.clone(),
                _ => {
                    ConnectError::new(ConnectProblem::NotReady, "another node has not restated what it holds")
                }
            }),
        }
    }

    /// Whether permits do not outlive the lease, and it has ended: a process that slept may be here before its engine is.
    pub(super) fn lease_is_lost(&self) -> bool {
        if !self.aborts {
            return false;
        }
        let end = self.lease_end.load(Ordering::Acquire);
        end > 0 && micros(clock::now()) > end
    }

    fn metrics(&self) -> &BackendMetrics {
        self.metrics.get_or_init(|| BackendMetrics::new(&self.name))
    }

    fn set_state(&self, state: State) {
        self.state.send_if_modified(|before| {
            let changed = *before != state;
            *before = state;
            changed
        });
    }

    async fn engine(self: &Arc<Self>) {
        let mut failures = 0;
        self.change(|node, _| node.broken());
        while !self.stopping.load(Ordering::Acquire) {
            self.change(|node, _| node.trouble(clock::now()));
            let connected = self.guarded(self.target.connect(&self.keys, &self.id)).await;
            let outcome = match connected {
                Ok((link, subscription)) => self.serve(link, subscription, &mut failures).await,
                Err(error) => Outcome::Failed(error),
            };
            let Outcome::Failed(error) = outcome else { break };
            self.change(|node, _| node.broken());
            trace::connection_lost(&self.name, &error);
            self.set_state(State::Failed(error));
            self.pause(&mut failures).await;
        }
        self.set_state(State::Stopped);
    }

    /// Makes calls until one fails, or the engine is to stop.
    async fn serve(
        self: &Arc<Self>,
        mut link: Link,
        subscription: Subscription,
        failures: &mut u32,
    ) -> Outcome {
        let mut listener = Listener::spawn(self, subscription);
        self.change(|node, _| node.broken());
        loop {
            if self.stopping.load(Ordering::Acquire) {
                if let Some(call) = self.change(|node, _| node.detach_call()) {
                    let _ = self.target.call(&mut link, &self.keys, &call).await;
                }
                return Outcome::Stopped;
            }
            if listener.task.is_finished() || self.change(|node, _| node.misses_pushes()) {
                trace::subscription_renewed(&self.name);
                match self.guarded(self.target.connect(&self.keys, &self.id)).await {
                    Ok((_, subscription)) => listener = Listener::spawn(self, subscription),
                    Err(error) => return Outcome::Failed(error),
                }
            }
            let now = clock::now();
            let due = self.change(|node, _| node.due());
            if due > now {
                let more = pin!(self.work.notified());
                let rest = due - now;
                self.guarded(async {
                    select! {
                        () = more => {}
                        () = sleep(rest) => {}
                        _ = &mut listener.task => {}
                    }
                })
                .await;
                continue;
            }
            let call = self.change(|node, wake| node.next_call(now, wake));
            let begun = clock::now();
            let result = self.guarded(self.target.call(&mut link, &self.keys, &call)).await;
            let took = clock::now().saturating_sub(begun);
            match result {
                Ok(parts) => match read_reply(&parts) {
                    Ok(reply) => {
                        self.metrics().called(CallOutcome::Done, call.ops(), took);
                        let heard = self.change(|node, wake| node.on_reply(&reply, clock::now(), wake));
                        match heard {
                            Heard::Fine => *failures = 0,
                            Heard::Mismatch => {
                                return Outcome::failed(ConnectProblem::Refused, "a reply to another call");
                            }
                            Heard::OtherLayout => {
                                return Outcome::failed(
                                    ConnectProblem::OtherLayout,
                                    "another process runs it",
                                );
                            }
                        }
                        self.after_reply();
                    }
                    Err(malformed) => {
                        self.metrics().called(CallOutcome::Failed, call.ops(), took);
                        return Outcome::failed(ConnectProblem::NotRedis, malformed);
                    }
                },
                Err(CallError::OutOfMemory) => {
                    self.metrics().called(CallOutcome::Failed, call.ops(), took);
                    self.change(|node, wake| node.refused_whole(wake));
                }
                Err(CallError::Silent) => {
                    self.metrics().called(CallOutcome::TimedOut, call.ops(), took);
                    return Outcome::failed(
                        ConnectProblem::Silent,
                        format_args!("nothing within {:?}", self.timeout),
                    );
                }
                Err(CallError::Failed(error)) => {
                    self.metrics().called(CallOutcome::Failed, call.ops(), took);
                    return Outcome::Failed(super::link::refused(&error));
                }
            }
        }
    }

    fn after_reply(&self) {
        let (ready, left, seen, lease_end) =
            self.change(|node, _| (node.is_ready(), node.left_outage(), node.seen(), node.lease_end()));
        self.lease_end.store(micros(lease_end), Ordering::Release);
        self.set_state(if ready { State::Ready } else { State::Recovering });
        self.metrics().seen(seen.live, seen.capacity);
        if left {
            self.metrics().outage(false);
            trace::outage_left(&self.name);
        }
    }

    /// Waits for the future, and sees to it meanwhile that an outage begins in time and that a lost lease is noticed.
    async fn guarded<T>(&self, future: impl Future<Output = T>) -> T {
        let mut future = pin!(future);
        loop {
            let now = clock::now();
            let due = self.change(|node, _| node.watch(self.timeout, self.aborts));
            let Some(due) = due else { return future.await };
            select! {
                biased;
                result = &mut future => return result,
                () = sleep(due.saturating_sub(now)) => {}
            }
            let now = clock::now();
            let (entered, aborted) = self.change(|node, wake| {
                let aborted = node.check_lease(now, wake);
                (node.outage_is_due(now, self.timeout) && node.enter_outage(wake), aborted)
            });
            if aborted > 0 {
                self.metrics().aborted(aborted);
            }
            if entered {
                self.metrics().outage(true);
                trace::outage_entered(&self.name);
            }
        }
    }

    async fn pause(&self, failures: &mut u32) {
        let (least, most) = BACKOFF;
        let longest = least.saturating_mul(1 << (*failures).min(10)).min(most);
        *failures += 1;
        let pause = longest.mul_f64(0.5 + 0.5 * fraction());
        let stop = async {
            while !self.stopping.load(Ordering::Acquire) {
                self.work.notified().await;
            }
        };
        self.guarded(async {
            select! {
                () = sleep(pause) => {}
                () = stop => {}
            }
        })
        .await;
    }
}

/// How serving ended.
enum Outcome {
    Stopped,
    Failed(ConnectError),
}

impl Outcome {
    fn failed(problem: ConnectProblem, detail: impl std::fmt::Display) -> Self {
        Self::Failed(ConnectError::new(problem, detail))
    }
}

/// Frees the engine's place when it ends, also when its runtime drops it in the middle of a call.
struct Running(Arc<Core>);

impl Drop for Running {
    fn drop(&mut self) {
        self.0.change(|node, wake| {
            // Under the lock, so that the next engine finds the node as this one leaves it.
            node.abandoned(wake);
            self.0.running.store(false, Ordering::Release);
        });
    }
}

/// The task that hears pushes. It ends with the connection.
struct Listener {
    task: JoinHandle<()>,
}

impl Listener {
    fn spawn(core: &Arc<Core>, mut subscription: Subscription) -> Self {
        let core = Arc::clone(core);
        let task = tokio::spawn(async move {
            while let Some(message) = subscription.next().await {
                // What is no push of ours says nothing; the poll finds what it may have meant.
                if let Ok(push) = read_push(&message) {
                    let work = core.change(|node, wake| {
                        node.on_push(&push, clock::now(), wake);
                        node.due() == Duration::ZERO
                    });
                    if work {
                        core.work();
                    }
                }
            }
        });
        Self { task }
    }
}

impl Drop for Listener {
    fn drop(&mut self) {
        self.task.abort();
    }
}

/// From 0 up to and without 1.
fn fraction() -> f64 {
    use std::{collections::hash_map::RandomState, hash::BuildHasher};

    let bits = RandomState::new().hash_one(clock::now()) >> 40;
    #[expect(clippy::cast_precision_loss, reason = "24 bits")]
    let fraction = bits as f64 / (1_u64 << 24) as f64;
    fraction
}
