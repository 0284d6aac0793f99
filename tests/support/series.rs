//! A recorder that remembers the extremes of every series, so that a test sees each value a gauge ever had and not only
//! those at its samples.

use std::{
    collections::HashMap,
    sync::{Arc, Mutex, MutexGuard, OnceLock, PoisonError},
};

use metrics::{
    Counter, CounterFn, Gauge, GaugeFn, Histogram, Key, KeyName, Metadata, Recorder, SharedString, Unit,
};

/// One series: its value, and the least and the most it ever was.
#[derive(Clone, Copy, Debug, Default)]
pub(crate) struct Reading {
    pub(crate) now: f64,
    pub(crate) least: f64,
    pub(crate) most: f64,
}

#[derive(Debug, Default)]
struct Value(Mutex<Reading>);

#[derive(Clone, Debug, Default)]
struct Series(Arc<Mutex<HashMap<Key, Arc<Value>>>>);

static SERIES: OnceLock<Series> = OnceLock::new();

/// Installs the recorder of this process. A queue takes its handles at its first use, so this comes before.
pub(super) fn install() {
    SERIES.get_or_init(|| {
        let series = Series::default();
        metrics::set_global_recorder(series.clone()).expect("no other recorder in a test binary");
        series
    });
}

/// The gauge `metric` of the queue called `queue`; zeros while it was never touched.
pub(crate) fn gauge(queue: &str, metric: &str) -> Reading {
    read(queue, metric, None)
}

/// The counter `metric` of the queue called `queue`, with one more label if there is one.
pub(crate) fn counter(queue: &str, metric: &str, label: Option<(&str, &str)>) -> u64 {
    let value = read(queue, metric, label).now;
    #[expect(
        clippy::cast_possible_truncation,
        clippy::cast_sign_loss,
        reason = "a sum of small whole numbers"
    )]
    let whole = value as u64;
    whole
}

fn read(queue: &str, metric: &str, label: Option<(&str, &str)>) -> Reading {
    let has = |key: &Key, name: &str, value: &str| {
        key.labels().any(|label| label.key() == name && label.value() == value)
    };
    let series = lock(&SERIES.get().expect("the recorder is installed").0);
    let mut found = series.iter().filter(|(key, _)| {
        key.name() == metric
            && has(key, "queue", queue)
            && label.is_none_or(|(name, value)| has(key, name, value))
    });
    let reading = found.next().map(|(_, value)| *lock(&value.0)).unwrap_or_default();
    assert!(found.next().is_none(), "{metric} of {queue} has more than one series");
    reading
}

fn lock<T>(mutex: &Mutex<T>) -> MutexGuard<'_, T> {
    mutex.lock().unwrap_or_else(PoisonError::into_inner)
}

impl Series {
    fn value(&self, key: &Key) -> Arc<Value> {
        Arc::clone(lock(&self.0).entry(key.clone()).or_default())
    }
}

impl Value {
    fn change(&self, change: impl FnOnce(f64) -> f64) {
        let mut reading = lock(&self.0);
        let now = change(reading.now);
        *reading = Reading { now, least: reading.least.min(now), most: reading.most.max(now) };
    }
}

impl CounterFn for Value {
    fn increment(&self, value: u64) {
        #[expect(clippy::cast_precision_loss, reason = "small numbers")]
        self.change(|now| now + value as f64);
    }

    fn absolute(&self, value: u64) {
        #[expect(clippy::cast_precision_loss, reason = "small numbers")]
        self.change(|_| value as f64);
    }
}

impl GaugeFn for Value {
    fn increment(&self, value: f64) {
        self.change(|now| now + value);
    }

    fn decrement(&self, value: f64) {
        self.change(|now| now - value);
    }

    fn set(&self, value: f64) {
        self.change(|_| value);
    }
}

impl Recorder for Series {
    fn describe_counter(&self, _: KeyName, _: Option<Unit>, _: SharedString) {}

    fn describe_gauge(&self, _: KeyName, _: Option<Unit>, _: SharedString) {}

    fn describe_histogram(&self, _: KeyName, _: Option<Unit>, _: SharedString) {}

    fn register_counter(&self, key: &Key, _: &Metadata<'_>) -> Counter {
        Counter::from_arc(self.value(key))
    }

    fn register_gauge(&self, key: &Key, _: &Metadata<'_>) -> Gauge {
        Gauge::from_arc(self.value(key))
    }

    fn register_histogram(&self, _: &Key, _: &Metadata<'_>) -> Histogram {
        Histogram::noop()
    }
}
