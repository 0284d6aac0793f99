//! The queue without HTTP: grants, deadlines, bounds, capacity, closing.

use std::{num::NonZeroU32, time::Duration};

use futures_util::FutureExt as _;
use tokio::time::{Instant, advance, sleep};
use tokio_test::{assert_pending, assert_ready, assert_ready_ok, task};
use tower_fair_queue::{Ask, Cause, FairQueue, FairQueueConfig, FairQueueConfigBuilder, Limit, TooWide};

fn config() -> FairQueueConfigBuilder {
    FairQueueConfig::builder("q").capacity(1)
}

fn queue(config: FairQueueConfigBuilder) -> FairQueue {
    FairQueue::new(config.build().expect("within its bounds"))
}

fn cost(units: u32) -> Ask {
    Ask::new().cost(NonZeroU32::new(units).expect("not 0"))
}

#[track_caller]
fn assert_numbers(queue: &FairQueue, in_flight: u64, waiting: u64) {
    let stats = queue.stats();
    assert_eq!((stats.in_flight, stats.waiting), (in_flight, waiting), "in flight and waiting");
    if in_flight + waiting == 0 {
        assert_eq!(stats.flows, 0, "a flow is kept");
    }
}

#[tokio::test(start_paused = true)]
async fn permits_go_to_the_head_of_the_line() {
    let queue = queue(config());
    let held = queue.acquire(Ask::new()).await.unwrap();
    let mut first = task::spawn(queue.acquire(Ask::new()));
    let mut second = task::spawn(queue.acquire(Ask::new()));
    assert_pending!(first.poll());
    assert_pending!(second.poll());
    assert_numbers(&queue, 1, 2);

    held.release();
    assert!(first.is_woken());
    assert!(!second.is_woken(), "one release wakes the one it grants");
    assert_numbers(&queue, 1, 1);
    // Granted to the first already, so a newcomer cannot take it, polled first or not.
    assert_eq!(queue.try_acquire(Ask::new()).now_or_never().unwrap().unwrap_err().cause(), Cause::WouldWait);
    let permit = assert_ready_ok!(first.poll());
    assert_eq!((permit.units(), permit.waited()), (1, Duration::ZERO));

    drop(permit);
    drop(assert_ready_ok!(second.poll()));
    assert_numbers(&queue, 0, 0);
}

#[tokio::test(start_paused = true)]
async fn an_ask_that_does_not_wait_never_passes_those_who_do() {
    let queue = queue(config().capacity(2));
    let one = queue.try_acquire(Ask::new()).now_or_never().unwrap().unwrap();
    let mut wide = task::spawn(queue.acquire(cost(2)));
    assert_pending!(wide.poll());
    let error = queue.try_acquire(Ask::new()).now_or_never().unwrap().unwrap_err();
    assert_eq!((error.cause(), error.waited()), (Cause::WouldWait, Duration::ZERO));
    assert_numbers(&queue, 1, 1);
    drop(one);
    assert_eq!(assert_ready_ok!(wide.poll()).units(), 2);
    assert_numbers(&queue, 0, 0);
}

// B08: what timed out leaves the line, so its slot is free again.
#[tokio::test(start_paused = true)]
async fn timed_out_asks_free_their_place_in_line() {
    let queue = queue(config().max_waiting(5).max_wait(Duration::from_millis(200)));
    let _held = queue.acquire(Ask::new()).await.unwrap();
    for round in 0..50 {
        let mut parked: Vec<_> = (0..5).map(|_| task::spawn(queue.acquire(Ask::new()))).collect();
        parked.iter_mut().for_each(|acquire| assert_pending!(acquire.poll(), "round {round}"));
        let refused = queue.acquire(Ask::new()).await.unwrap_err();
        assert_eq!((refused.cause(), refused.position()), (Cause::QueueFull, Some(6)));
        advance(Duration::from_millis(199)).await;
        parked.iter_mut().for_each(|acquire| assert_pending!(acquire.poll()));
        advance(Duration::from_millis(1)).await;
        for (gone, acquire) in parked.iter_mut().enumerate() {
            assert!(acquire.is_woken());
            let error = assert_ready!(acquire.poll()).unwrap_err();
            assert_eq!((error.cause(), error.waited()), (Cause::TimedOut, Duration::from_millis(200)));
            assert_eq!(error.position(), Some(1));
            assert_numbers(&queue, 1, 4 - gone as u64);
        }
    }
}

// B09: in each order, the units of the moment go to the next live one.
#[tokio::test(start_paused = true)]
async fn a_grant_and_a_drop_in_the_same_instant_pass_the_unit_on() {
    let queue = queue(config());
    for run in 0..10_000 {
        let held = queue.acquire(Ask::new()).await.unwrap();
        let mut first = task::spawn(queue.acquire(Ask::new()));
        let mut second = task::spawn(queue.acquire(Ask::new()));
        assert_pending!(first.poll());
        assert_pending!(second.poll());
        if run % 2 == 0 {
            drop(held);
            drop(first);
        } else {
            drop(first);
            drop(held);
        }
        assert!(second.is_woken());
        drop(assert_ready_ok!(second.poll()));
        assert_numbers(&queue, 0, 0);
    }
}

// B09 on threads: the release and the drop really race.
#[test]
fn a_grant_racing_a_drop_is_never_lost() {
    let queue = queue(config().max_wait(FairQueueConfig::MAX_MAX_WAIT));
    let runtime = tokio::runtime::Builder::new_multi_thread().worker_threads(3).enable_all().build().unwrap();
    runtime.block_on(async {
        for _ in 0..10_000 {
            let held = queue.acquire(Ask::new()).await.unwrap();
            let mut first = task::spawn(queue.acquire(Ask::new()));
            assert_pending!(first.poll());
            let mut second = task::spawn(queue.acquire(Ask::new()));
            assert_pending!(second.poll());
            let release = tokio::spawn(async move { drop(held) });
            let cancel = tokio::spawn(async move { drop(first) });
            let (released, cancelled) = tokio::join!(release, cancel);
            released.and(cancelled).unwrap();
            assert!(second.is_woken());
            drop(assert_ready_ok!(second.poll()));
        }
    });
    assert_numbers(&queue, 0, 0);
}

#[tokio::test(start_paused = true)]
async fn a_grant_that_comes_with_the_deadline_is_taken() {
    let queue = queue(config().max_wait(Duration::from_secs(1)));
    let held = queue.acquire(Ask::new()).await.unwrap();
    let mut late = task::spawn(queue.acquire(Ask::new()));
    assert_pending!(late.poll());
    advance(Duration::from_secs(1)).await;
    drop(held);
    assert_ready_ok!(late.poll()).release();
    assert_numbers(&queue, 0, 0);
}

// B62 (a): the deadline is on the wait, never on the work.
#[tokio::test(start_paused = true)]
async fn a_deadline_does_not_cut_what_was_granted() {
    let queue = queue(config().max_wait(Duration::from_secs(1)));
    let held = queue.acquire(Ask::new()).await.unwrap();
    let waiting = tokio::spawn({
        let queue = queue.clone();
        async move {
            let permit = queue.acquire(Ask::new()).await.unwrap();
            assert_eq!(permit.waited(), Duration::from_millis(900));
            sleep(Duration::from_secs(10)).await;
            assert!(!permit.is_revoked());
        }
    });
    sleep(Duration::from_millis(900)).await;
    drop(held);
    waiting.await.unwrap();
    assert_numbers(&queue, 0, 0);
}

// B62 (b), in real time: nothing but the deadline itself wakes them.
#[tokio::test]
async fn a_thousand_deadlines_fire_with_nothing_else_going_on() {
    let queue = queue(config().max_wait(Duration::from_secs(2)));
    let _held = queue.acquire(Ask::new()).await.unwrap();
    let asks: Vec<_> = (0..1_000)
        .map(|_| {
            let acquire = queue.acquire(Ask::new());
            tokio::spawn(async move {
                let start = Instant::now();
                let error = acquire.await.unwrap_err();
                assert!(error.is_timed_out());
                (error.waited(), start.elapsed())
            })
        })
        .collect();
    for ask in asks {
        let (waited, elapsed) = ask.await.unwrap();
        for time in [waited, elapsed] {
            assert!((2.0..=2.3).contains(&time.as_secs_f64()), "{time:?}");
        }
    }
    assert_numbers(&queue, 1, 0);
}

// B62 (c).
#[tokio::test(start_paused = true)]
async fn an_ask_older_than_its_deadline_does_not_touch_the_queue() {
    let queue = queue(config());
    advance(Duration::from_secs(1)).await;
    let past = Ask::new().deadline(Instant::now());
    assert!(queue.acquire(past.clone()).await.unwrap_err().is_timed_out());
    assert!(queue.try_acquire(past).now_or_never().unwrap().unwrap_err().is_timed_out());
    assert_numbers(&queue, 0, 0);
}

#[tokio::test(start_paused = true)]
async fn an_ask_s_own_deadline_shortens_the_wait_and_never_lengthens_it() {
    let queue = queue(config().max_wait(Duration::from_secs(5)));
    let _held = queue.acquire(Ask::new()).await.unwrap();
    for (own, waited) in [(2, 2), (50, 5)] {
        let ask = Ask::new().deadline(Instant::now() + Duration::from_secs(own));
        assert_eq!(queue.acquire(ask).await.unwrap_err().waited(), Duration::from_secs(waited));
    }
}

// B38: never in line for what cannot be.
#[tokio::test(start_paused = true)]
async fn too_wide_an_ask_runs_alone_or_is_refused_at_once() {
    let alone = queue(config().capacity(10));
    let small = alone.acquire(cost(1)).await.unwrap();
    let mut wide = task::spawn(alone.acquire(cost(12)));
    assert_pending!(wide.poll());
    drop(small);
    let permit = assert_ready_ok!(wide.poll());
    assert_eq!(permit.units(), 10);
    drop(permit);
    assert_numbers(&alone, 0, 0);

    let refusing = queue(config().capacity(10).too_wide(TooWide::Refuse));
    let _one = refusing.acquire(cost(3)).await.unwrap();
    assert_eq!(refusing.acquire(cost(12)).await.unwrap_err().cause(), Cause::TooWide);
    let mut eight = task::spawn(refusing.acquire(cost(8)));
    let mut five = task::spawn(refusing.acquire(cost(5)));
    assert_pending!(eight.poll());
    assert_pending!(five.poll());
    refusing.set_capacity(5).unwrap();
    assert_eq!(assert_ready!(eight.poll()).unwrap_err().cause(), Cause::TooWide);
    assert_pending!(five.poll());
    assert_numbers(&refusing, 3, 1);

    let shrunk = queue(config().capacity(10));
    let held = shrunk.acquire(cost(3)).await.unwrap();
    let mut eight = task::spawn(shrunk.acquire(cost(8)));
    assert_pending!(eight.poll());
    shrunk.set_capacity(5).unwrap();
    drop(held);
    assert_eq!(assert_ready_ok!(eight.poll()).units(), 5);
}

#[tokio::test(start_paused = true)]
async fn capacity_changes_while_running() {
    let queue = queue(config().capacity(4));
    let mut held: Vec<_> =
        (0..4).map(|_| queue.try_acquire(Ask::new()).now_or_never().unwrap().unwrap()).collect();
    let mut parked: Vec<_> = (0..4).map(|_| task::spawn(queue.acquire(Ask::new()))).collect();
    parked.iter_mut().for_each(|acquire| assert_pending!(acquire.poll()));

    queue.set_capacity(2).unwrap();
    assert_eq!(queue.stats().capacity, Limit::AtMost(2));
    held.truncate(2);
    assert!(!parked[0].is_woken(), "two are in flight and two is the capacity");
    held.truncate(1);
    held.extend([assert_ready_ok!(parked[0].poll())]);
    assert_numbers(&queue, 2, 3);

    queue.set_capacity(4).unwrap();
    held.extend([assert_ready_ok!(parked[1].poll()), assert_ready_ok!(parked[2].poll())]);
    assert_numbers(&queue, 4, 1);

    queue.set_capacity(Limit::Unlimited).unwrap();
    held.extend([assert_ready_ok!(parked[3].poll())]);
    assert_eq!(queue.stats().capacity, Limit::Unlimited);
    assert_eq!(queue.set_capacity(0).unwrap_err().field(), "capacity");
    assert_eq!(queue.stats().capacity, Limit::Unlimited, "a refused change changes nothing");
    drop(held);
    assert_numbers(&queue, 0, 0);
}

#[tokio::test(start_paused = true)]
async fn a_closed_queue_refuses_the_waiting_and_the_coming_and_leaves_the_running() {
    let queue = queue(config());
    let held = queue.acquire(Ask::new()).await.unwrap();
    let mut parked = task::spawn(queue.acquire(Ask::new()));
    assert_pending!(parked.poll());
    assert!(!queue.is_closed());
    queue.close();
    queue.close();
    assert!(queue.is_closed());
    assert!(parked.is_woken());
    assert!(assert_ready!(parked.poll()).unwrap_err().is_shutting_down());
    assert!(queue.acquire(Ask::new()).await.unwrap_err().is_shutting_down());
    assert!(queue.try_acquire(Ask::new()).now_or_never().unwrap().unwrap_err().is_shutting_down());
    assert!(!held.is_revoked());
    assert_numbers(&queue, 1, 0);
    drop(held);
    assert_numbers(&queue, 0, 0);
}

#[tokio::test(start_paused = true)]
async fn a_drain_ends_with_the_last_permit() {
    let queue = queue(config().capacity(2));
    let held = [queue.acquire(Ask::new()).await.unwrap(), queue.acquire(Ask::new()).await.unwrap()];
    let start = Instant::now();
    let ends = held.into_iter().zip([1, 3]).map(|(permit, secs)| async move {
        sleep(Duration::from_secs(secs)).await;
        drop(permit);
    });
    let (drained, _) =
        tokio::join!(queue.drain(Duration::from_secs(60)), futures_util::future::join_all(ends));
    assert!(drained.is_complete());
    assert_eq!((drained.revoked(), start.elapsed()), (0, Duration::from_secs(3)));
    assert!(queue.drain(Duration::MAX).await.is_complete(), "an idle queue is drained at once");
}

#[tokio::test(start_paused = true)]
async fn a_drain_revokes_at_the_end_of_its_grace_and_does_not_wait_for_the_deaf() {
    let queue = queue(config().capacity(2));
    let heeding = queue.acquire(Ask::new()).await.unwrap();
    let deaf = queue.acquire(Ask::new()).await.unwrap();
    let start = Instant::now();
    let heeds = async {
        heeding.revoked().await;
        assert_eq!(start.elapsed(), Duration::from_secs(5));
        drop(heeding);
    };
    let (drained, ()) = tokio::join!(queue.drain(Duration::from_secs(5)), heeds);
    assert_eq!((drained.revoked(), drained.remaining()), (2, 1));
    assert_eq!(start.elapsed(), Duration::from_millis(5_250));
    assert!(deaf.is_revoked());
    drop(deaf);
    assert_numbers(&queue, 0, 0);
}

#[test]
fn permits_and_waits_are_dropped_outside_of_any_runtime() {
    let queue = queue(config());
    let runtime = tokio::runtime::Builder::new_current_thread().enable_all().build().unwrap();
    let held = queue.try_acquire(Ask::new()).now_or_never().unwrap().unwrap();
    let mut parked = task::spawn(queue.acquire(Ask::new()));
    let unpolled = queue.acquire(Ask::new());
    {
        let _entered = runtime.enter();
        assert_pending!(parked.poll());
    }
    drop(runtime);
    drop(held);
    drop(unpolled);
    assert_numbers(&queue, 1, 0);
    drop(parked);
    assert_numbers(&queue, 0, 0);
    drop(queue);
}

#[test]
fn a_panicking_holder_gives_its_units_back() {
    let queue = queue(config());
    let permit = queue.try_acquire(Ask::new()).now_or_never().unwrap().unwrap();
    let unwound = std::panic::catch_unwind(std::panic::AssertUnwindSafe(move || {
        let _permit = permit;
        panic!("as handlers do");
    }));
    assert!(unwound.is_err());
    assert_numbers(&queue, 0, 0);
    assert!(queue.try_acquire(Ask::new()).now_or_never().unwrap().is_ok());
}

// P1 and P6 on threads, judged by the holders' own count.
#[test]
fn units_in_use_never_pass_the_capacity_and_all_come_back() {
    use std::sync::{
        Arc,
        atomic::{AtomicU32, Ordering},
    };
    let queue = queue(config().capacity(7).max_waiting(Limit::Unlimited).max_wait(Duration::from_secs(60)));
    let (used, peak) = (Arc::new(AtomicU32::new(0)), Arc::new(AtomicU32::new(0)));
    let runtime = tokio::runtime::Builder::new_multi_thread().worker_threads(4).enable_all().build().unwrap();
    let tasks: Vec<_> = (0..2_000_u32)
        .map(|i| {
            let (queue, used, peak) = (queue.clone(), Arc::clone(&used), Arc::clone(&peak));
            runtime.spawn(async move {
                let ask = cost(1 + i % 4).flow(format!("flow {}", i % 5));
                let acquire = queue.acquire(ask);
                let acquired = match i % 3 {
                    0 => tokio::time::timeout(Duration::from_micros(u64::from(i)), acquire).await.ok(),
                    _ => Some(acquire.await),
                };
                let Some(Ok(permit)) = acquired else { return };
                let now = used.fetch_add(permit.units(), Ordering::SeqCst) + permit.units();
                peak.fetch_max(now, Ordering::SeqCst);
                tokio::task::yield_now().await;
                used.fetch_sub(permit.units(), Ordering::SeqCst);
                drop(permit);
            })
        })
        .collect();
    runtime.block_on(async {
        for task in tasks {
            task.await.unwrap();
        }
    });
    let peak = peak.load(Ordering::SeqCst);
    assert!((5..=7).contains(&peak), "{peak} units at once");
    assert_numbers(&queue, 0, 0);
}

/// A task whose executor panics when it is woken.
struct Panics;

impl std::task::Wake for Panics {
    fn wake(self: std::sync::Arc<Self>) {
        panic!("as a broken executor might");
    }
}

#[tokio::test(start_paused = true)]
async fn a_waker_that_panics_keeps_nobody_else_from_waking() {
    let queue = queue(config().capacity(3));
    let held = queue.acquire(cost(3)).await.unwrap();
    let waker = std::task::Waker::from(std::sync::Arc::new(Panics));
    let mut broken = std::pin::pin!(queue.acquire(Ask::new()));
    assert!(broken.as_mut().poll(&mut std::task::Context::from_waker(&waker)).is_pending());
    let mut others = [task::spawn(queue.acquire(Ask::new())), task::spawn(queue.acquire(Ask::new()))];
    others.iter_mut().for_each(|acquire| assert_pending!(acquire.poll()));
    let release = std::panic::catch_unwind(std::panic::AssertUnwindSafe(move || drop(held)));
    assert!(release.is_err());
    for acquire in &mut others {
        assert!(acquire.is_woken());
        drop(assert_ready_ok!(acquire.poll()));
    }
}

#[tokio::test(start_paused = true)]
async fn an_estimate_counts_the_units_that_will_be_taken() {
    let queue = queue(config().capacity(2).max_wait(Duration::from_secs(5)));
    for _ in 0..20 {
        // One held and one waiting, so that the time counts.
        let (held, waiting) = (queue.acquire(cost(2)).await.unwrap(), task::spawn(queue.acquire(cost(2))));
        let mut waiting = waiting;
        assert_pending!(waiting.poll());
        sleep(Duration::from_secs(1)).await;
        drop(held);
        drop(assert_ready_ok!(waiting.poll()));
    }
    let _held = queue.acquire(cost(2)).await.unwrap();
    for units in [2, 1_000_000] {
        let error = queue.acquire(cost(units)).await.unwrap_err();
        let estimate = error.estimate().expect("units came back").as_secs_f64();
        assert!((0.5..=2.5).contains(&estimate), "{estimate} s for a cost of {units}");
    }
}

/// A recorder of which one metric panics.
struct Broken(&'static str);

impl metrics::CounterFn for Broken {
    fn increment(&self, _: u64) {
        panic!("as a broken recorder might");
    }

    fn absolute(&self, _: u64) {}
}

impl metrics::Recorder for Broken {
    fn describe_counter(&self, _: metrics::KeyName, _: Option<metrics::Unit>, _: metrics::SharedString) {}

    fn describe_gauge(&self, _: metrics::KeyName, _: Option<metrics::Unit>, _: metrics::SharedString) {}

    fn describe_histogram(&self, _: metrics::KeyName, _: Option<metrics::Unit>, _: metrics::SharedString) {}

    fn register_counter(&self, key: &metrics::Key, _: &metrics::Metadata<'_>) -> metrics::Counter {
        if key.name() == self.0 {
            metrics::Counter::from_arc(std::sync::Arc::new(Self(self.0)))
        } else {
            metrics::Counter::noop()
        }
    }

    fn register_gauge(&self, _: &metrics::Key, _: &metrics::Metadata<'_>) -> metrics::Gauge {
        metrics::Gauge::noop()
    }

    fn register_histogram(&self, _: &metrics::Key, _: &metrics::Metadata<'_>) -> metrics::Histogram {
        metrics::Histogram::noop()
    }
}

// P6: a recorder is a user's code, and whatever it does the units come back.
#[test]
fn a_recorder_that_panics_keeps_no_units() {
    for metric in ["fairqueue_granted_units_total", "fairqueue_released_units_total"] {
        let queue = queue(config());
        metrics::with_local_recorder(&Broken(metric), || {
            let hold = || drop(queue.try_acquire(Ask::new()).now_or_never().unwrap());
            assert!(std::panic::catch_unwind(std::panic::AssertUnwindSafe(hold)).is_err(), "{metric}");
        });
        assert_numbers(&queue, 0, 0);
    }
}
