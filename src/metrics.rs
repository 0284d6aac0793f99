//! Every metric: its name, unit, help and labels. No other file names the `metrics` crate.
//! The table for users stands in the crate's documentation.
//!
//! Values come from what the requests of this process do, in the order in which one request does it, so no gauge
//! is ever negative. No label holds anything a client chose.

use std::{cell::Cell, time::Duration};

use metrics::{Counter, Gauge, Histogram, IntoF64, Unit};

use crate::error::Cause;

/// How a wait ended, as the label `outcome` tells it.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Waited {
    Granted,
    Cancelled,
    Rejected(Cause),
}

/// How a granted response ended, as the label `outcome` tells it.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Ended {
    /// Everything was delivered.
    Completed,
    /// It was dropped before its end: the client left, or the server gave up.
    Aborted,
    /// The service or its body failed.
    Failed,
    /// The permit was taken back.
    Revoked,
}

/// The handles of one queue. Taken from the recorder once, at the queue's first use.
#[derive(Clone)]
pub(crate) struct Metrics {
    waiting: Gauge,
    in_flight: Gauge,
    capacity: Gauge,
    granted: Outcome,
    timed_out: Outcome,
    cancelled: Outcome,
    refused: Outcome,
    rejections: [Counter; Cause::ALL.len()],
    granted_units: Counter,
    released_units: Counter,
    responses: [Counter; 4],
    bypassed: Counter,
    hold: Histogram,
    times_holds: bool,
}

#[derive(Clone)]
struct Outcome {
    requests: Counter,
    wait: Histogram,
}

impl Metrics {
    pub(crate) fn new(queue: &str) -> Self {
        describe();
        let outcome = |outcome: &'static str| Outcome {
            requests: metrics::counter!("fairqueue_requests_total", "queue" => queue.to_owned(), "outcome" => outcome),
            wait: metrics::histogram!("fairqueue_wait_seconds", "queue" => queue.to_owned(), "outcome" => outcome),
        };
        let response = |outcome: &'static str| metrics::counter!("fairqueue_responses_total", "queue" => queue.to_owned(), "outcome" => outcome);
        let hold = metrics::histogram!("fairqueue_hold_seconds", "queue" => queue.to_owned());
        Self {
            waiting: metrics::gauge!("fairqueue_waiting_requests", "queue" => queue.to_owned()),
            in_flight: metrics::gauge!("fairqueue_in_flight_units", "queue" => queue.to_owned()),
            capacity: metrics::gauge!("fairqueue_capacity_units", "queue" => queue.to_owned()),
            granted: outcome("granted"),
            timed_out: outcome("timed_out"),
            cancelled: outcome("cancelled"),
            refused: outcome("refused"),
            rejections: Cause::ALL.map(|cause| {
                metrics::counter!("fairqueue_rejections_total", "queue" => queue.to_owned(), "cause" => cause.as_str())
            }),
            granted_units: metrics::counter!("fairqueue_granted_units_total", "queue" => queue.to_owned()),
            released_units: metrics::counter!("fairqueue_released_units_total", "queue" => queue.to_owned()),
            responses: ["completed", "aborted", "failed", "revoked"].map(response),
            bypassed: metrics::counter!("fairqueue_bypassed_requests_total", "queue" => queue.to_owned()),
            times_holds: is_recorded(&hold),
            hold,
        }
    }

    pub(crate) fn capacity(&self, units: u64) {
        set_capacity(&self.capacity, units);
    }

    pub(crate) fn parked(&self) {
        self.waiting.increment(1.0);
    }

    pub(crate) fn unparked(&self) {
        self.waiting.decrement(1.0);
    }

    pub(crate) fn waited(&self, how: Waited, time: Duration) {
        let outcome = match how {
            Waited::Granted => &self.granted,
            Waited::Cancelled => &self.cancelled,
            Waited::Rejected(cause) => {
                self.rejections[usize::from(cause.index())].increment(1);
                if cause == Cause::TimedOut { &self.timed_out } else { &self.refused }
            }
        };
        outcome.requests.increment(1);
        outcome.wait.record(time);
    }

    pub(crate) fn took(&self, units: u32) {
        self.granted_units.increment(units.into());
        self.in_flight.increment(f64::from(units));
    }

    /// Whether anyone wants to know how long units are held; else no clock need be read for it.
    pub(crate) fn times_holds(&self) -> bool {
        self.times_holds
    }

    pub(crate) fn gave_back(&self, units: u32, held: Option<Duration>) {
        self.in_flight.decrement(f64::from(units));
        self.released_units.increment(units.into());
        if let Some(held) = held {
            self.hold.record(held);
        }
    }

    pub(crate) fn responded(&self, how: Ended) {
        let index = match how {
            Ended::Completed => 0,
            Ended::Aborted => 1,
            Ended::Failed => 2,
            Ended::Revoked => 3,
        };
        self.responses[index].increment(1);
    }

    pub(crate) fn bypassed(&self) {
        self.bypassed.increment(1);
    }
}

/// How a call to the server that keeps the queue ended, as the label `outcome` tells it.
#[cfg(feature = "redis")]
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum CallOutcome {
    Done,
    TimedOut,
    Failed,
}

/// The handles of one queue's engine.
#[cfg(feature = "redis")]
pub(crate) struct BackendMetrics {
    calls: [Counter; 3],
    call: Histogram,
    operations: Counter,
    outage: Gauge,
    nodes: Gauge,
    capacity: Gauge,
    aborted: Counter,
}

#[cfg(feature = "redis")]
impl BackendMetrics {
    pub(crate) fn new(queue: &str) -> Self {
        describe();
        let calls = ["done", "timed_out", "failed"].map(|outcome| {
            metrics::counter!("fairqueue_calls_total", "queue" => queue.to_owned(), "outcome" => outcome)
        });
        Self {
            calls,
            call: metrics::histogram!("fairqueue_call_seconds", "queue" => queue.to_owned()),
            operations: metrics::counter!("fairqueue_operations_total", "queue" => queue.to_owned()),
            outage: metrics::gauge!("fairqueue_outage", "queue" => queue.to_owned()),
            nodes: metrics::gauge!("fairqueue_nodes", "queue" => queue.to_owned()),
            capacity: metrics::gauge!("fairqueue_capacity_units", "queue" => queue.to_owned()),
            aborted: metrics::counter!("fairqueue_aborted_permits_total", "queue" => queue.to_owned()),
        }
    }

    pub(crate) fn called(&self, how: CallOutcome, operations: usize, took: Duration) {
        self.calls[how as usize].increment(1);
        if how == CallOutcome::Done {
            self.operations.increment(operations as u64);
            self.call.record(took);
        }
    }

    pub(crate) fn outage(&self, is: bool) {
        self.outage.set(if is { 1.0 } else { 0.0 });
    }

    pub(crate) fn seen(&self, nodes: u64, capacity: u64) {
        #[expect(clippy::cast_precision_loss, reason = "a gauge is a double")]
        self.nodes.set(nodes as f64);
        set_capacity(&self.capacity, capacity);
    }

    pub(crate) fn aborted(&self, permits: usize) {
        self.aborted.increment(permits as u64);
    }
}

#[cfg(feature = "redis")]
impl std::fmt::Debug for BackendMetrics {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_struct("BackendMetrics").finish_non_exhaustive()
    }
}

fn set_capacity(gauge: &Gauge, units: u64) {
    #[expect(clippy::cast_precision_loss, reason = "a gauge is a double")]
    gauge.set(if units == u64::MAX { f64::INFINITY } else { units as f64 });
}

impl std::fmt::Debug for Metrics {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_struct("Metrics").finish_non_exhaustive()
    }
}

/// Whether a recorder is behind the handle. One that is not there is never asked for the value.
fn is_recorded(histogram: &Histogram) -> bool {
    struct Probe<'a>(&'a Cell<bool>);

    impl IntoF64 for Probe<'_> {
        fn into_f64(self) -> f64 {
            self.0.set(true);
            0.0
        }
    }

    let recorded = Cell::new(false);
    // No value, so many times.
    histogram.record_many(Probe(&recorded), 0);
    recorded.get()
}

fn describe() {
    use metrics::{describe_counter, describe_gauge, describe_histogram};

    describe_gauge!("fairqueue_waiting_requests", Unit::Count, "Requests parked in line in this process.");
    describe_gauge!("fairqueue_in_flight_units", Unit::Count, "Units held by permits of this process.");
    describe_gauge!("fairqueue_capacity_units", Unit::Count, "The queue's capacity in units.");
    describe_counter!("fairqueue_requests_total", Unit::Count, "Asks ended, by outcome.");
    describe_counter!("fairqueue_rejections_total", Unit::Count, "Asks that got no permit, by cause.");
    describe_counter!("fairqueue_granted_units_total", Unit::Count, "Units handed out.");
    describe_counter!("fairqueue_released_units_total", Unit::Count, "Units that came back.");
    describe_counter!("fairqueue_responses_total", Unit::Count, "Granted HTTP responses ended, by outcome.");
    describe_counter!(
        "fairqueue_bypassed_requests_total",
        Unit::Count,
        "HTTP requests that passed by the queue."
    );
    describe_histogram!("fairqueue_wait_seconds", Unit::Seconds, "Time in line, by outcome.");
    describe_histogram!("fairqueue_hold_seconds", Unit::Seconds, "Time from grant to release.");
    #[cfg(feature = "redis")]
    {
        describe_counter!("fairqueue_calls_total", Unit::Count, "Calls of the script in Redis, by outcome.");
        describe_histogram!("fairqueue_call_seconds", Unit::Seconds, "Time from a call to its reply.");
        describe_counter!("fairqueue_operations_total", Unit::Count, "Operations that calls held.");
        describe_gauge!("fairqueue_outage", Unit::Count, "1 while Redis is out of reach, else 0.");
        describe_gauge!("fairqueue_nodes", Unit::Count, "Nodes that are attached to the queue.");
        describe_counter!(
            "fairqueue_aborted_permits_total",
            Unit::Count,
            "Permits revoked with a lost lease."
        );
    }
}
