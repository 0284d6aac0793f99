//! What the tests over sockets share. Each test binary uses a part of it.

#![allow(dead_code, unused_imports, reason = "every test binary compiles this, and none uses all of it")]

mod client;
#[cfg(feature = "redis")]
pub(crate) mod nodes;
pub(crate) mod process;
pub(crate) mod redis;
mod script;
mod series;
mod server;
mod units;

use std::{panic, sync::Once, time::Duration};

use tokio::time::{Instant, sleep, timeout};
use tower_fair_queue::{FairQueue, FairQueueConfig, FairQueueConfigBuilder, FairQueueLayer};

pub(crate) use self::{
    client::{Answer, Http2, Raw, raw_answer},
    script::{Gate, Script, gate},
    series::{Reading, counter, gauge},
    server::{Server, serve, serve_with},
    units::{Unit, Units},
};

/// "At once" for a queue in the process's memory.
pub(crate) const AT_ONCE: Duration = Duration::from_millis(100);

/// The payload of the panics that tests cause on purpose; see [`quiet_panics`].
pub(crate) const ON_PURPOSE: &str = "on purpose";

/// The settings of a queue whose metrics can be read. Tests of one binary run at the same time and share one recorder, so
/// each takes a name of its own.
pub(crate) fn config(name: &str, capacity: u32) -> FairQueueConfigBuilder {
    series::install();
    FairQueueConfig::builder(name).capacity(capacity)
}

pub(crate) fn layer(name: &str, capacity: u32) -> FairQueueLayer {
    FairQueueLayer::new(config(name, capacity).build().unwrap())
}

/// Waits until `condition` holds; panics once it has not for `limit`.
pub(crate) async fn eventually(limit: Duration, what: &str, mut condition: impl FnMut() -> bool) {
    let start = Instant::now();
    while !condition() {
        assert!(start.elapsed() < limit, "not within {limit:?}: {what}");
        sleep(Duration::from_millis(1)).await;
    }
}

/// Awaits `future`, for long enough that only a hang runs into the limit.
pub(crate) async fn soon<F: Future>(what: &str, future: F) -> F::Output {
    let limit = Duration::from_secs(30);
    timeout(limit, future).await.unwrap_or_else(|_| panic!("not within {limit:?}: {what}"))
}

/// What must hold after every case once the last client has left: within 2 s nothing is in flight and nothing waits, no
/// gauge was negative at any time, and every unit granted was released.
pub(crate) async fn end_check(queue: &FairQueue, units: &Units) {
    let name = queue.name();
    let granted = || counter(name, "fairqueue_granted_units_total", None);
    let released = || counter(name, "fairqueue_released_units_total", None);
    let in_flight = || gauge(name, "fairqueue_in_flight_units");
    let waiting = || gauge(name, "fairqueue_waiting_requests");
    let start = Instant::now();
    loop {
        let stats = queue.stats();
        let now = (stats.in_flight, stats.waiting, in_flight().now, waiting().now, units.now());
        if now == (0, 0, 0.0, 0.0, 0) && granted() == released() && stats.flows == 0 {
            break;
        }
        assert!(
            start.elapsed() < Duration::from_secs(2),
            "2 s after the last client left {name}: {stats:?}, gauges {} and {}, {} units counted by the test, {} \
             granted, {} released",
            in_flight().now,
            waiting().now,
            units.now(),
            granted(),
            released(),
        );
        sleep(Duration::from_millis(1)).await;
    }
    for reading in [in_flight(), waiting()] {
        assert!(reading.least >= 0.0, "a gauge of {name} was negative: {reading:?}");
    }
}

/// Keeps panics with the payload [`ON_PURPOSE`] out of the test's output.
pub(crate) fn quiet_panics() {
    static ONCE: Once = Once::new();
    ONCE.call_once(|| {
        let previous = panic::take_hook();
        panic::set_hook(Box::new(move |info| {
            if info.payload().downcast_ref::<&str>() != Some(&ON_PURPOSE) {
                previous(info);
            }
        }));
    });
}

pub(crate) fn panic_on_purpose() -> ! {
    panic::panic_any(ON_PURPOSE)
}
