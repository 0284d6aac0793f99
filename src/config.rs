//! What a queue is told when it is made. Every bound is checked once, in [`FairQueueConfigBuilder::build`].

#[cfg(feature = "redis")]
mod redis;

use std::{fmt, sync::Arc, time::Duration};

#[cfg(feature = "redis")]
pub(crate) use self::redis::Servers;
#[cfg(feature = "redis")]
pub use self::redis::{LeaseLost, Outage, RedisConfig};
use crate::error::ConfigError;

/// An upper bound, or the explicit absence of one. A number of 0 is refused wherever a `Limit` is
/// taken; it never means "unlimited".
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub enum Limit {
    /// At most this many.
    AtMost(u32),
    /// No bound.
    Unlimited,
}

impl Limit {
    pub(crate) fn as_units(self) -> u64 {
        match self {
            Self::AtMost(n) => n.into(),
            Self::Unlimited => u64::MAX,
        }
    }

    pub(crate) fn check(self, field: &'static str) -> Result<Self, ConfigError> {
        match self {
            Self::AtMost(0) => Err(ConfigError::new(
                field,
                0,
                format_args!("between 1 and {}, or Limit::Unlimited", u32::MAX),
            )),
            Self::AtMost(_) | Self::Unlimited => Ok(self),
        }
    }
}

impl From<u32> for Limit {
    fn from(n: u32) -> Self {
        Self::AtMost(n)
    }
}

impl fmt::Display for Limit {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::AtMost(n) => n.fmt(f),
            Self::Unlimited => f.write_str("unlimited"),
        }
    }
}

/// What becomes of an ask that costs more than the capacity or its flow's cap.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Hash)]
#[non_exhaustive]
pub enum TooWide {
    /// It waits its turn and then takes all there is: the cost is lowered to the capacity (or the flow's
    /// cap) at the grant. The default.
    #[default]
    RunAlone,
    /// It is refused at once, with [`Cause::TooWide`](crate::Cause::TooWide).
    Refuse,
}

/// The checked settings of one queue. Made by [`FairQueueConfig::builder`].
///
/// # Examples
///
/// ```
/// use std::time::Duration;
/// use tower_fair_queue::FairQueueConfig;
///
/// let config = FairQueueConfig::builder("chat")
///     .capacity(3)
///     .max_wait(Duration::from_secs(20))
///     .build()?;
/// assert_eq!(config.name(), "chat");
///
/// let error = FairQueueConfig::builder("chat").capacity(0).build().unwrap_err();
/// assert_eq!(error.field(), "capacity");
/// # Ok::<(), tower_fair_queue::ConfigError>(())
/// ```
#[derive(Clone, Debug)]
pub struct FairQueueConfig {
    pub(crate) name: Arc<str>,
    pub(crate) capacity: Limit,
    pub(crate) max_wait: Duration,
    pub(crate) max_waiting: Limit,
    pub(crate) max_waiting_per_flow: Limit,
    pub(crate) max_in_flight_per_flow: Limit,
    pub(crate) too_wide: TooWide,
    pub(crate) priority_step: u32,
    pub(crate) retry_after: (Duration, Duration),
    #[cfg(feature = "redis")]
    pub(crate) redis: Option<RedisConfig>,
}

impl FairQueueConfig {
    /// The longest name, in bytes.
    pub const MAX_NAME: usize = 64;
    /// The shortest `max_wait`: the resolution of Tokio's timer.
    pub const MIN_MAX_WAIT: Duration = Duration::from_millis(1);
    /// The longest `max_wait`: 365 days. Tokio's timer holds a little over two years.
    pub const MAX_MAX_WAIT: Duration = Duration::from_secs(365 * 24 * 60 * 60);
    /// The largest `priority_step`, in units.
    pub const MAX_PRIORITY_STEP: u32 = 1_000_000;
    /// The longest wait that `Retry-After` may name: one day.
    pub const MAX_RETRY_AFTER: Duration = Duration::from_secs(24 * 60 * 60);

    /// Starts the settings of a queue called `name`. The capacity must be set; all else has a default.
    ///
    /// The name stands in metric labels, so queues of one name in one process add up in the metrics: give each its own. It has 1 to [`MAX_NAME`](Self::MAX_NAME) bytes, each an ASCII
    /// letter, a digit, `-`, `_` or `.`; [`build`](FairQueueConfigBuilder::build) checks it.
    pub fn builder(name: impl Into<String>) -> FairQueueConfigBuilder {
        FairQueueConfigBuilder {
            name: name.into(),
            capacity: None,
            max_wait: Duration::from_secs(20),
            max_waiting: Limit::AtMost(1_000),
            max_waiting_per_flow: Limit::Unlimited,
            max_in_flight_per_flow: Limit::Unlimited,
            too_wide: TooWide::default(),
            priority_step: 10,
            retry_after: (Duration::from_secs(1), Duration::from_secs(60)),
            #[cfg(feature = "redis")]
            redis: None,
        }
    }

    /// The queue's name.
    #[must_use]
    pub fn name(&self) -> &str {
        &self.name
    }

    /// The capacity, in units.
    #[must_use]
    pub fn capacity(&self) -> Limit {
        self.capacity
    }

    /// The longest a request waits in line.
    #[must_use]
    pub fn max_wait(&self) -> Duration {
        self.max_wait
    }
}

/// Collects the settings of a queue; [`build`](Self::build) checks them.
#[derive(Clone, Debug)]
#[must_use = "a builder does nothing until `build` is called"]
pub struct FairQueueConfigBuilder {
    name: String,
    capacity: Option<Limit>,
    max_wait: Duration,
    max_waiting: Limit,
    max_waiting_per_flow: Limit,
    max_in_flight_per_flow: Limit,
    too_wide: TooWide,
    priority_step: u32,
    retry_after: (Duration, Duration),
    #[cfg(feature = "redis")]
    redis: Option<RedisConfig>,
}

impl FairQueueConfigBuilder {
    /// The most units in flight at once (promise P1). Must be set: a number of at least 1, or
    /// [`Limit::Unlimited`], which queues nothing and only counts.
    pub fn capacity(mut self, units: impl Into<Limit>) -> Self {
        self.capacity = Some(units.into());
        self
    }

    /// The longest a request waits in line before it is answered with a rejection (promise P7).
    ///
    /// Default 20 s; from [`MIN_MAX_WAIT`](FairQueueConfig::MIN_MAX_WAIT) to
    /// [`MAX_MAX_WAIT`](FairQueueConfig::MAX_MAX_WAIT). It bounds the time in line only: once granted, a
    /// request runs as long as it likes. Keep it below the timeout of any proxy in front, commonly 60 s.
    pub fn max_wait(mut self, wait: Duration) -> Self {
        self.max_wait = wait;
        self
    }

    /// The most tickets that wait at once; one more that would have to wait is refused with
    /// [`Cause::QueueFull`](crate::Cause::QueueFull) (promise P8). Default 1,000, at least 1.
    ///
    /// With [`Limit::Unlimited`] memory is bounded by what the server in front accepts and nothing else.
    pub fn max_waiting(mut self, tickets: impl Into<Limit>) -> Self {
        self.max_waiting = tickets.into();
        self
    }

    /// The most tickets of one flow that wait at once; one more is refused with
    /// [`Cause::FlowFull`](crate::Cause::FlowFull), so that one flow cannot fill the queue.
    /// Default [`Limit::Unlimited`]: only `max_waiting` counts. At least 1.
    pub fn max_waiting_per_flow(mut self, tickets: impl Into<Limit>) -> Self {
        self.max_waiting_per_flow = tickets.into();
        self
    }

    /// The most units of one flow in flight at once. Default [`Limit::Unlimited`]: only the capacity
    /// counts. At least 1. A flow at its cap leaves free units to the others.
    pub fn max_in_flight_per_flow(mut self, units: impl Into<Limit>) -> Self {
        self.max_in_flight_per_flow = units.into();
        self
    }

    /// What becomes of an ask that costs more than the capacity or its flow's cap. Default
    /// [`TooWide::RunAlone`].
    pub fn too_wide(mut self, policy: TooWide) -> Self {
        self.too_wide = policy;
        self
    }

    /// How many units, at weight 1, a flow may be served ahead of an equal one whose requests are one
    /// level of [`Priority`](crate::Priority) lower (promise P4: the lower one is delayed by so much and no
    /// more). Default 10; at most [`MAX_PRIORITY_STEP`](FairQueueConfig::MAX_PRIORITY_STEP); 0 makes
    /// all levels equal.
    pub fn priority_step(mut self, units: u32) -> Self {
        self.priority_step = units;
        self
    }

    /// The bounds of the wait a rejection asks for in `Retry-After`. Defaults 1 s and 60 s. The least is
    /// at least 1 s, the most at most [`MAX_RETRY_AFTER`](FairQueueConfig::MAX_RETRY_AFTER), and both are whole
    /// seconds.
    pub fn retry_after(mut self, least: Duration, most: Duration) -> Self {
        self.retry_after = (least, most);
        self
    }

    /// Keeps the line in Redis, where every process with the same server, key prefix and queue name shares it, and its
    /// capacity. The capacity is that of the last process that attached, unless one was set on the running queue.
    /// Default: the line is kept in this process's memory.
    #[cfg(feature = "redis")]
    pub fn redis(mut self, redis: RedisConfig) -> Self {
        self.redis = Some(redis);
        self
    }

    /// Checks every setting.
    ///
    /// # Errors
    ///
    /// The first setting outside its bound, with its field, its value and the bound.
    pub fn build(self) -> Result<FairQueueConfig, ConfigError> {
        check_name(&self.name)?;
        let Some(capacity) = self.capacity else {
            return Err(ConfigError::new(
                "capacity",
                "nothing",
                format_args!("set, to between 1 and {} or Limit::Unlimited", u32::MAX),
            ));
        };
        let (min, max) = (FairQueueConfig::MIN_MAX_WAIT, FairQueueConfig::MAX_MAX_WAIT);
        if self.max_wait < min || self.max_wait > max {
            let bound = format_args!("between {min:?} and {max:?}").to_string();
            return Err(ConfigError::new("max_wait", format_args!("{:?}", self.max_wait), bound));
        }
        if self.priority_step > FairQueueConfig::MAX_PRIORITY_STEP {
            let bound = format_args!("at most {}", FairQueueConfig::MAX_PRIORITY_STEP).to_string();
            return Err(ConfigError::new("priority_step", self.priority_step, bound));
        }
        let (least, most) = self.retry_after;
        let whole = least.subsec_nanos() == 0 && most.subsec_nanos() == 0;
        if !whole || least.as_secs() < 1 || least > most || most > FairQueueConfig::MAX_RETRY_AFTER {
            let bound = format_args!(
                "whole seconds, the least at least 1s and the most between that and {:?}",
                FairQueueConfig::MAX_RETRY_AFTER
            )
            .to_string();
            return Err(ConfigError::new("retry_after", format_args!("{least:?} to {most:?}"), bound));
        }
        #[cfg(feature = "redis")]
        if let Some(redis) = &self.redis {
            redis.check()?;
        }
        Ok(FairQueueConfig {
            capacity: capacity.check("capacity")?,
            max_wait: self.max_wait,
            max_waiting: self.max_waiting.check("max_waiting")?,
            max_waiting_per_flow: self.max_waiting_per_flow.check("max_waiting_per_flow")?,
            max_in_flight_per_flow: self.max_in_flight_per_flow.check("max_in_flight_per_flow")?,
            too_wide: self.too_wide,
            priority_step: self.priority_step,
            retry_after: self.retry_after,
            #[cfg(feature = "redis")]
            redis: self.redis,
            name: self.name.into(),
        })
    }
}

fn check_name(name: &str) -> Result<(), ConfigError> {
    let bound =
        format_args!("1 to {} bytes of ASCII letters, digits, '-', '_' or '.'", FairQueueConfig::MAX_NAME)
            .to_string();
    if name.is_empty() || name.len() > FairQueueConfig::MAX_NAME {
        return Err(ConfigError::new("name", format_args!("{} bytes", name.len()), bound));
    }
    match name.chars().find(|c| !(c.is_ascii_alphanumeric() || matches!(c, '-' | '_' | '.'))) {
        Some(other) => Err(ConfigError::new("name", format_args!("{other:?} in {name:?}"), bound)),
        None => Ok(()),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn valid() -> FairQueueConfigBuilder {
        FairQueueConfig::builder("chat").capacity(3)
    }

    #[track_caller]
    fn refused(builder: FairQueueConfigBuilder, field: &str, value: &str) {
        let error = builder.build().expect_err("outside its bound");
        assert_eq!((error.field(), error.value()), (field, value));
        assert!(error.to_string().contains(error.bound()), "{error}");
    }

    // B38: a capacity of 0 is an error, never "unlimited".
    #[test]
    fn zero_is_refused_and_never_means_unlimited() {
        refused(valid().capacity(0), "capacity", "0");
        refused(valid().max_waiting(0), "max_waiting", "0");
        refused(valid().max_waiting_per_flow(0), "max_waiting_per_flow", "0");
        refused(valid().max_in_flight_per_flow(0), "max_in_flight_per_flow", "0");
        assert_eq!(valid().capacity(Limit::Unlimited).build().unwrap().capacity(), Limit::Unlimited);
    }

    #[test]
    fn missing_capacity_is_refused() {
        refused(FairQueueConfig::builder("chat"), "capacity", "nothing");
    }

    #[test]
    fn max_wait_is_held_to_what_a_timer_can_hold() {
        refused(valid().max_wait(Duration::ZERO), "max_wait", "0ns");
        refused(valid().max_wait(Duration::from_micros(999)), "max_wait", "999µs");
        refused(valid().max_wait(Duration::MAX), "max_wait", &format!("{:?}", Duration::MAX));
        assert!(valid().max_wait(FairQueueConfig::MAX_MAX_WAIT).build().is_ok());
        assert!(valid().max_wait(FairQueueConfig::MIN_MAX_WAIT).build().is_ok());
        assert_eq!(valid().build().unwrap().max_wait(), Duration::from_secs(20));
    }

    #[test]
    fn names_are_short_and_plain() {
        let named = |name: &str| FairQueueConfig::builder(name).capacity(1);
        refused(named(""), "name", "0 bytes");
        refused(named(&"x".repeat(65)), "name", "65 bytes");
        refused(named("a b"), "name", "' ' in \"a b\"");
        refused(named("{chat}"), "name", "'{' in \"{chat}\"");
        refused(named("ü"), "name", "'ü' in \"ü\"");
        assert!(named(&"x".repeat(64)).build().is_ok());
    }

    #[test]
    fn steps_and_retry_bounds_are_checked() {
        refused(valid().priority_step(1_000_001), "priority_step", "1000001");
        let second = Duration::from_secs(1);
        refused(valid().retry_after(Duration::ZERO, second), "retry_after", "0ns to 1s");
        refused(valid().retry_after(2 * second, second), "retry_after", "2s to 1s");
        refused(valid().retry_after(second, second * 3 / 2), "retry_after", "1s to 1.5s");
        refused(valid().retry_after(second, 86_401 * second), "retry_after", "1s to 86401s");
    }
}
