//! What a request wants of the queue.

use std::{
    collections::hash_map::RandomState,
    fmt,
    hash::{BuildHasher, Hash, Hasher},
    num::NonZeroU32,
    sync::{Arc, OnceLock},
};

use tokio::time::Instant;

use crate::error::ConfigError;

/// What a request wants: its flow, weight, cost, priority and deadline.
///
/// # Examples
///
/// ```
/// use std::num::NonZeroU32;
/// use tower_fair_queue::{Ask, Priority, Weight};
///
/// let ask = Ask::new()
///     .flow("acme")
///     .weight(Weight::new(3)?)
///     .cost(NonZeroU32::new(2).expect("2 is not 0"))
///     .priority(Priority::BACKGROUND);
/// # Ok::<(), tower_fair_queue::ConfigError>(())
/// ```
#[derive(Clone, Debug, Default, PartialEq, Eq)]
#[must_use = "an ask does nothing until it is put to a queue"]
pub struct Ask {
    pub(crate) flow: Option<Flow>,
    pub(crate) weight: Weight,
    pub(crate) cost: Option<NonZeroU32>,
    pub(crate) priority: Priority,
    pub(crate) deadline: Option<Instant>,
}

impl Ask {
    /// An ask of cost 1, weight 1 and normal priority that names no flow.
    pub fn new() -> Self {
        Self::default()
    }

    /// The flow the request belongs to: all requests of one flow stand in one line, in the order in
    /// which they arrived (promise P2), and flows share the capacity by weight (promise P3). A tenant, a
    /// user or an API key makes a flow.
    ///
    /// Default: the request joins the flow of its priority, so that with no flows named the queue is
    /// first come, first served.
    pub fn flow(mut self, flow: impl Into<Flow>) -> Self {
        self.flow = Some(flow.into());
        self
    }

    /// The flow's share against other flows, as of this request. Default 1.
    pub fn weight(mut self, weight: Weight) -> Self {
        self.weight = weight;
        self
    }

    /// How many units the request takes while it runs. Default 1. A cost above the capacity is subject to
    /// [`TooWide`](crate::TooWide); a cost of 0 cannot be expressed.
    pub fn cost(mut self, units: NonZeroU32) -> Self {
        self.cost = Some(units);
        self
    }

    /// The request's priority. Default [`Priority::NORMAL`].
    pub fn priority(mut self, priority: Priority) -> Self {
        self.priority = priority;
        self
    }

    /// The instant after which the answer is of no use. The wait ends at the earlier of this and
    /// `max_wait`; an ask past its deadline is refused without a look at the queue. Default: `max_wait`
    /// alone. It is Tokio's instant, which stands still with a paused clock; `Instant::from_std` makes one of the standard library's.
    pub fn deadline(mut self, deadline: Instant) -> Self {
        self.deadline = Some(deadline);
        self
    }

    pub(crate) fn units(&self) -> u32 {
        self.cost.map_or(1, NonZeroU32::get)
    }
}

/// The name of a flow: any bytes, of any length.
///
/// A name is data. It is compared and hashed with a random seed, and never becomes part of a key, a label
/// or a log line by itself; `Debug` shows its length alone. It is hashed once, where the `Flow` is made, and held once for all clones
/// of it, while its requests wait or run.
#[derive(Clone, PartialEq, Eq)]
pub struct Flow {
    hash: u64,
    name: Arc<[u8]>,
}

impl Flow {
    /// The name's bytes.
    #[must_use]
    pub fn as_bytes(&self) -> &[u8] {
        &self.name
    }

    fn new(name: Arc<[u8]>) -> Self {
        static SEED: OnceLock<RandomState> = OnceLock::new();
        Self { hash: SEED.get_or_init(RandomState::new).hash_one(&name), name }
    }
}

impl Hash for Flow {
    fn hash<H: Hasher>(&self, state: &mut H) {
        state.write_u64(self.hash);
    }
}

impl fmt::Debug for Flow {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "Flow({} bytes)", self.name.len())
    }
}

impl From<&str> for Flow {
    fn from(name: &str) -> Self {
        Self::new(name.as_bytes().into())
    }
}

impl From<String> for Flow {
    fn from(name: String) -> Self {
        Self::new(name.into_bytes().into())
    }
}

impl From<&[u8]> for Flow {
    fn from(name: &[u8]) -> Self {
        Self::new(name.into())
    }
}

impl From<Vec<u8>> for Flow {
    fn from(name: Vec<u8>) -> Self {
        Self::new(name.into())
    }
}

/// A flow's share: a flow of weight 3 is served three times the units of a flow of weight 1 while both
/// have requests waiting.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub struct Weight(u32);

impl Weight {
    /// The largest weight.
    pub const MAX: Self = Self(1_000);

    /// A weight of `weight`, from 1 to 1,000.
    ///
    /// # Errors
    ///
    /// `weight` is 0 or above 1,000.
    pub fn new(weight: u32) -> Result<Self, ConfigError> {
        if (1..=Self::MAX.0).contains(&weight) {
            Ok(Self(weight))
        } else {
            Err(ConfigError::new("weight", weight, format_args!("between 1 and {}", Self::MAX.0)))
        }
    }

    /// The weight as a number.
    #[must_use]
    pub fn get(self) -> u32 {
        self.0
    }
}

impl Default for Weight {
    fn default() -> Self {
        Self(1)
    }
}

/// How urgent a request is, from 0 (background) to 7 (most urgent).
///
/// A higher level has a bounded head start over a lower one, `priority_step` units for each level
/// between them; it is no absolute precedence, and the lower one always gets its turn (promise P4). Within
/// a flow priority does not reorder.
///
/// A flow whose requests are of several levels has, at each moment, the level of the one at the head of its line, and gains
/// nothing by mixing them.
///
/// The levels are those of RFC 9218's urgency, turned round so that more is sooner: level `7 - u`.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub struct Priority(u8);

impl Priority {
    /// The lowest level, 0.
    pub const BACKGROUND: Self = Self(0);
    /// The default level, 4.
    pub const NORMAL: Self = Self(4);
    /// The highest level, 7.
    pub const URGENT: Self = Self(7);

    pub(crate) const LEVELS: usize = 8;

    /// The priority of `level`, from 0 to 7.
    ///
    /// # Errors
    ///
    /// `level` is above 7.
    pub fn new(level: u8) -> Result<Self, ConfigError> {
        if level <= Self::URGENT.0 {
            Ok(Self(level))
        } else {
            Err(ConfigError::new("priority", level, format_args!("between 0 and {}", Self::URGENT.0)))
        }
    }

    /// The level as a number.
    #[must_use]
    pub fn level(self) -> u8 {
        self.0
    }

    pub(crate) fn index(self) -> usize {
        self.0.into()
    }
}

impl Default for Priority {
    fn default() -> Self {
        Self::NORMAL
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn weight_and_priority_are_bounded() {
        assert_eq!(Weight::new(0).unwrap_err().to_string(), "weight must be between 1 and 1000, got 0");
        assert!(Weight::new(1_001).is_err());
        assert_eq!(Weight::new(1_000).unwrap(), Weight::MAX);
        assert_eq!(Priority::new(8).unwrap_err().to_string(), "priority must be between 0 and 7, got 8");
        assert_eq!(Priority::new(7).unwrap(), Priority::URGENT);
    }

    #[test]
    fn flow_names_of_any_bytes_are_told_apart_and_not_shown() {
        let odd = Flow::from(vec![0, 0xff, b'\n']);
        assert_ne!(odd, Flow::from(vec![0, 0xff]));
        assert_eq!(Flow::from("secret"), Flow::from(b"secret".as_slice()));
        assert_eq!(format!("{:?}", Ask::new().flow("secret").flow), "Some(Flow(6 bytes))");
    }
}
