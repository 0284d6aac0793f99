//! The errors a user of this crate meets. They name no backend type.

use std::{error::Error, fmt, time::Duration};

/// A setting outside its bound: tells the field, the value given and the bound it broke.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct ConfigError {
    field: &'static str,
    value: String,
    bound: String,
}

impl ConfigError {
    pub(crate) fn new(field: &'static str, value: impl fmt::Display, bound: impl fmt::Display) -> Self {
        Self { field, value: value.to_string(), bound: bound.to_string() }
    }

    /// The name of the field, as the builder's setter spells it.
    #[must_use]
    pub fn field(&self) -> &'static str {
        self.field
    }

    /// The value that was given, as text.
    #[must_use]
    pub fn value(&self) -> &str {
        &self.value
    }

    /// What the field accepts.
    #[must_use]
    pub fn bound(&self) -> &str {
        &self.bound
    }
}

impl fmt::Display for ConfigError {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{} must be {}, got {}", self.field, self.bound, self.value)
    }
}

impl Error for ConfigError {}

/// Why an ask got no permit.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
#[non_exhaustive]
pub enum Cause {
    /// The deadline passed while the ask waited, or had passed before it arrived.
    TimedOut,
    /// The queue already holds as many waiting tickets as it may.
    QueueFull,
    /// The ask's flow already holds as many waiting tickets as one flow may.
    FlowFull,
    /// The queue is closed or draining.
    ShuttingDown,
    /// The backend could not take the ask.
    Unavailable,
    /// The ask costs more than the capacity (or the flow's cap) and the queue refuses such asks.
    TooWide,
    /// No permit is free right now and the ask does not wait ([`FairQueue::try_acquire`]).
    ///
    /// [`FairQueue::try_acquire`]: crate::FairQueue::try_acquire
    WouldWait,
    /// The classifier refused the request.
    Refused,
}

impl Cause {
    /// Every cause, in the order of the variants.
    pub(crate) const ALL: [Self; 8] = [
        Self::TimedOut,
        Self::QueueFull,
        Self::FlowFull,
        Self::ShuttingDown,
        Self::Unavailable,
        Self::TooWide,
        Self::WouldWait,
        Self::Refused,
    ];

    /// The cause as it stands in metric labels and in the default rejection's body: `timed_out`,
    /// `queue_full`, `flow_full`, `shutting_down`, `unavailable`, `too_wide`, `would_wait` or
    /// `refused`.
    #[must_use]
    pub fn as_str(self) -> &'static str {
        match self {
            Self::TimedOut => "timed_out",
            Self::QueueFull => "queue_full",
            Self::FlowFull => "flow_full",
            Self::ShuttingDown => "shutting_down",
            Self::Unavailable => "unavailable",
            Self::TooWide => "too_wide",
            Self::WouldWait => "would_wait",
            Self::Refused => "refused",
        }
    }

    /// The cause's place in [`ALL`](Self::ALL).
    pub(crate) fn index(self) -> u8 {
        self as u8
    }

    fn reason(self) -> &'static str {
        match self {
            Self::TimedOut => "no permit came free before the deadline",
            Self::QueueFull => "the queue is full",
            Self::FlowFull => "the flow has too many requests waiting",
            Self::ShuttingDown => "the queue is shutting down",
            Self::Unavailable => "the queue's backend is unavailable",
            Self::TooWide => "the request costs more than may be in flight",
            Self::WouldWait => "no permit is free",
            Self::Refused => "the request was refused",
        }
    }
}

impl fmt::Display for Cause {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(self.reason())
    }
}

/// An ask that ended without a permit. It was never started, so asking again is safe.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct AcquireError {
    cause: Cause,
    waited: Duration,
    position: Option<usize>,
    estimate: Option<Duration>,
}

impl AcquireError {
    pub(crate) fn new(cause: Cause, waited: Duration) -> Self {
        Self { cause, waited, position: None, estimate: None }
    }

    pub(crate) fn with_outlook(mut self, position: Option<usize>, estimate: Option<Duration>) -> Self {
        (self.position, self.estimate) = (position, estimate);
        self
    }

    /// Why no permit was granted.
    #[must_use]
    pub fn cause(&self) -> Cause {
        self.cause
    }

    /// How long the ask stood in line, with Redis also until the answer; zero where the answer was there at once.
    #[must_use]
    pub fn waited(&self) -> Duration {
        self.waited
    }

    /// The place in line at the end, 1 being the next to be granted; for an ask that was refused at
    /// once, the place it would have had. `None` where no place was known.
    ///
    /// Exact among requests of the same flow; over flows an estimate by weight that is never more than
    /// the number waiting.
    #[must_use]
    pub fn position(&self) -> Option<usize> {
        self.position
    }

    /// How long the queue would still take to reach [`position`](Self::position), at the rate at which
    /// permits came back lately. `None` while none has come back yet.
    #[must_use]
    pub fn estimate(&self) -> Option<Duration> {
        self.estimate
    }

    /// Whether the deadline ended the wait.
    #[must_use]
    pub fn is_timed_out(&self) -> bool {
        self.cause == Cause::TimedOut
    }

    /// Whether a bound on waiting tickets, the queue's or the flow's, refused the ask.
    #[must_use]
    pub fn is_full(&self) -> bool {
        matches!(self.cause, Cause::QueueFull | Cause::FlowFull)
    }

    /// Whether the queue was closed or draining.
    #[must_use]
    pub fn is_shutting_down(&self) -> bool {
        self.cause == Cause::ShuttingDown
    }
}

impl fmt::Display for AcquireError {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        self.cause.fmt(f)
    }
}

impl Error for AcquireError {}

/// The error a response body ends with when its permit was taken back before the body was complete:
/// the grace of a drain was over.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Revoked(pub(crate) ());

impl fmt::Display for Revoked {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str("the permit was revoked before the response was complete")
    }
}

impl Error for Revoked {}

/// What stood in the way of a connection to Redis.
#[cfg(feature = "redis")]
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
#[non_exhaustive]
pub enum ConnectProblem {
    /// No connection came about, or it broke.
    Unreachable,
    /// Nothing answered within the command timeout. A server that wants TLS and is spoken to in plain text is silent too.
    Silent,
    /// TLS failed, or one side speaks it and the other does not.
    Tls,
    /// The name or password is wrong, or one is needed.
    Credentials,
    /// The user may not do what the queue needs; the detail names the commands.
    MissingRight,
    /// The server is older than 7.0.
    TooOld,
    /// It greets like no Redis or Valkey server.
    NotRedis,
    /// It is a replica or a Sentinel.
    NotPrimary,
    /// No Sentinel knows the service.
    Sentinel,
    /// The Cluster has no owner for the queue's slot that answers.
    Cluster,
    /// The queue's state is that of another version of this crate.
    OtherLayout,
    /// The server refused for another reason, which the detail tells.
    Refused,
    /// The server was reached, but the queue was not ready in time: a node it waits for is silent, or calls fail.
    NotReady,
}

#[cfg(feature = "redis")]
impl ConnectProblem {
    fn reason(self) -> &'static str {
        match self {
            Self::Unreachable => "no connection to the server",
            Self::Silent => "the server is silent",
            Self::Tls => "TLS failed",
            Self::Credentials => "the server refused the credentials",
            Self::MissingRight => "the user lacks a right",
            Self::TooOld => "the server must be of version 7.0 or later",
            Self::NotRedis => "no Redis or Valkey server",
            Self::NotPrimary => "the server is no primary",
            Self::Sentinel => "the sentinels name no primary",
            Self::Cluster => "the cluster has no owner of the slot",
            Self::OtherLayout => "the queue's state is of another version of this crate",
            Self::Refused => "the server refused",
            Self::NotReady => "the queue was not ready in time",
        }
    }
}

/// Why a queue could not be connected to its server. Its text names the cause and holds no secret.
#[cfg(feature = "redis")]
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct ConnectError {
    problem: ConnectProblem,
    detail: String,
    /// Whether somebody was there and ended the connection.
    pub(crate) breaks: bool,
}

#[cfg(feature = "redis")]
impl ConnectError {
    pub(crate) fn new(problem: ConnectProblem, detail: impl fmt::Display) -> Self {
        // Some texts of the client's go over lines.
        let detail = detail.to_string().split_whitespace().collect::<Vec<_>>().join(" ");
        Self { problem, detail, breaks: false }
    }

    /// Says what else it may be: of two sides of which one speaks TLS, either waits for ever or hangs up.
    pub(crate) fn in_view_of_tls(mut self, tls: bool) -> Self {
        if self.breaks || self.problem == ConnectProblem::Silent {
            self.detail.push_str(if tls { "; does it speak TLS?" } else { "; does it want TLS?" });
        }
        self
    }

    /// What stood in the way.
    #[must_use]
    pub fn problem(&self) -> ConnectProblem {
        self.problem
    }

    /// Whether trying again can help with nothing changed: the server may come back.
    #[must_use]
    pub fn is_transient(&self) -> bool {
        use ConnectProblem as P;

        matches!(
            self.problem,
            P::Unreachable | P::Silent | P::NotPrimary | P::Sentinel | P::Cluster | P::NotReady
        )
    }
}

#[cfg(feature = "redis")]
impl fmt::Display for ConnectError {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{}: {}", self.problem.reason(), self.detail)
    }
}

#[cfg(feature = "redis")]
impl Error for ConnectError {}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn every_cause_stands_in_its_place() {
        for (place, cause) in Cause::ALL.into_iter().enumerate() {
            assert_eq!(usize::from(cause.index()), place);
        }
        assert_eq!(Cause::ALL.last(), Some(&Cause::Refused), "the last variant");
    }
}
