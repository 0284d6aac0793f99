//! The rules of the line: no I/O, no async, no clock of its own.
//!
//! The memory backend calls them, and every other backend is held against them.

mod ask;
mod drain_rate;
mod fair_order;
mod heads;
mod levels;

#[cfg(test)]
mod properties;

pub use self::ask::{Ask, Flow, Priority, Weight};
pub(crate) use self::{
    drain_rate::DrainRate,
    fair_order::{Entered, FairOrder, Finished, Place, Rules},
};
