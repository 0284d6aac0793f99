//! Who is next.

use std::collections::{HashMap, VecDeque};

use slab::Slab;

use super::{Ask, Flow, Priority, heads::Heads, levels::Levels};
use crate::{
    config::{FairQueueConfig, TooWide},
    error::Cause,
};

/// Virtual time per unit at weight 1. At least the largest weight, so that each unit moves the
/// tag of any flow; what a division leaves is carried to the flow's next tag, so no share drifts.
pub(super) const SCALE: i64 = 1 << 10;

/// When tags pass this they are moved back. A tag then stays below 2^53 by the largest cost and head start
/// (2^42 and 2^33), and another implementation may hold it in a double.
const REBASE_AT: i64 = 1 << 52;

/// The settings the order depends on. Numbers without bound are `u64::MAX`.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Rules {
    pub(crate) capacity: u64,
    pub(crate) flow_cap: u64,
    pub(crate) max_waiting: u64,
    pub(crate) max_waiting_per_flow: u64,
    pub(crate) too_wide: TooWide,
    pub(crate) priority_step: u32,
}

impl From<&FairQueueConfig> for Rules {
    fn from(config: &FairQueueConfig) -> Self {
        Self {
            capacity: config.capacity.as_units(),
            flow_cap: config.max_in_flight_per_flow.as_units(),
            max_waiting: config.max_waiting.as_units(),
            max_waiting_per_flow: config.max_waiting_per_flow.as_units(),
            too_wide: config.too_wide,
            priority_step: config.priority_step,
        }
    }
}

/// Names a ticket or permit in the order. One that has ended is never taken for a later one: the arrival
/// number is part of it.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct Place {
    arrival: u64,
    index: usize,
}

impl Place {
    /// The name of a ticket that another backend counts by itself.
    #[cfg(feature = "redis")]
    pub(crate) fn numbered(number: u64) -> Self {
        Self { arrival: number, index: 0 }
    }

    #[cfg(feature = "redis")]
    pub(crate) fn number(self) -> u64 {
        self.arrival
    }
}

/// A grant: `units` now belong to the permit.
#[derive(Debug)]
pub(crate) struct Grant<'a, T> {
    pub(crate) place: Place,
    pub(crate) units: u32,
    pub(crate) ticket: &'a T,
}

/// What became of a ticket that [`FairOrder::enqueue`] took.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Entered {
    /// It stands in line.
    Waiting(Place),
    /// `units` are its own already.
    Granted { place: Place, units: u32 },
}

/// What [`FairOrder::finish`] ended.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Finished {
    /// A waiting ticket left the line, uncharged.
    Left,
    /// A permit gave back this many units.
    Released(u32),
    /// Nothing: it had ended before.
    Nothing,
}

/// The line in its fair order: tickets that wait, permits in flight, and who of the waiting is next.
///
/// Self-clocked fair queueing with tags given at the head: each flow has its own line, in order of
/// arrival, and only the head of a line competes. A head's tag is its flow's `start` plus its cost over its
/// weight; the head with the least score (the tag less the priority's head start) is next, the earlier
/// arrival on a tie. It waits until its units are free and nobody passes it.
///
/// A grant moves the flow's start to the tag, and nothing else does while the flow stays in competition: a head
/// that is cancelled leaves its place in virtual time to the ticket behind it, so only grants are charged.
/// A flow that joins starts at its level's virtual time ([`Levels`]), so an idle flow earns nothing, and
/// nothing is kept of a flow that neither waits nor runs.
///
/// A flow at its cap is out of the competition until one of its permits is released, and joins anew then.
#[derive(Debug)]
pub(crate) struct FairOrder<T> {
    rules: Rules,
    entries: Slab<Entry<T>>,
    flows: Slab<FlowState>,
    names: HashMap<Flow, usize>,
    unnamed: [Option<usize>; Priority::LEVELS],
    heads: Heads,
    levels: Levels,
    arrivals: u64,
    waiting: u64,
    in_flight: u64,
    /// The summed weights of the heads that compete.
    active_weight: u64,
    rebase_at: i64,
}

#[derive(Debug)]
struct Entry<T> {
    arrival: u64,
    /// `None` for a permit where flows have no cap: nothing is to be told to its flow.
    flow: Option<usize>,
    cost: u32,
    weight: u32,
    priority: Priority,
    /// The units in flight; `None` while the ticket waits.
    units: Option<u32>,
    ticket: T,
}

#[derive(Debug)]
struct FlowState {
    /// `None` for the flow of a priority.
    name: Option<Flow>,
    level: usize,
    /// The arrival numbers and entries of the waiting tickets, in order.
    line: VecDeque<(u64, usize)>,
    start: Fraction,
    /// The head as it competes; `None` if nothing waits or the flow is at its cap.
    head: Option<Head>,
    /// Counted where flows have a cap.
    in_flight: u64,
}

#[derive(Clone, Copy, Debug)]
struct Head {
    tag: Fraction,
    score: i64,
    arrival: u64,
    level: usize,
    weight: u32,
}

/// A virtual time and what the last division left over, in parts of `weight`.
#[derive(Clone, Copy, Debug, Default)]
struct Fraction {
    time: i64,
    rest: i64,
    weight: u32,
}

impl Fraction {
    fn at(time: i64) -> Self {
        Self { time, rest: 0, weight: 0 }
    }

    fn max(self, other: Self) -> Self {
        if self.time >= other.time { self } else { other }
    }

    fn plus(self, units: u32, weight: u32) -> Self {
        let rest = if weight == self.weight { self.rest } else { 0 };
        let dividend = i64::from(units) * SCALE + rest;
        let divisor = i64::from(weight);
        Self { time: self.time + dividend / divisor, rest: dividend % divisor, weight }
    }
}

impl<T> FairOrder<T> {
    pub(crate) fn new(rules: Rules) -> Self {
        Self {
            rules,
            entries: Slab::new(),
            flows: Slab::new(),
            names: HashMap::new(),
            unnamed: [None; Priority::LEVELS],
            heads: Heads::default(),
            levels: Levels::new(i64::from(rules.priority_step) * SCALE),
            arrivals: 0,
            waiting: 0,
            in_flight: 0,
            active_weight: 0,
            rebase_at: REBASE_AT,
        }
    }

    pub(crate) fn capacity(&self) -> u64 {
        self.rules.capacity
    }

    pub(crate) fn waiting(&self) -> u64 {
        self.waiting
    }

    pub(crate) fn in_flight(&self) -> u64 {
        self.in_flight
    }

    /// The flows that are kept account of: those that wait and, where flows have a cap, those that run.
    pub(crate) fn flows(&self) -> usize {
        self.flows.len()
    }

    /// Grants a ticket that nobody stands before, or puts it at the end of its flow's line; then it is for
    /// [`grant_next`](Self::grant_next) to say whether it is next.
    ///
    /// # Errors
    ///
    /// A bound refuses it; nothing has changed.
    pub(crate) fn enqueue(&mut self, ask: &Ask, ticket: T) -> Result<Entered, Cause> {
        if self.rules.too_wide == TooWide::Refuse && u64::from(ask.units()) > self.widest() {
            return Err(Cause::TooWide);
        }
        self.arrivals += 1;
        let arrival = self.arrivals;
        if let Some(units) = self.free_for(ask) {
            let flow = self.tracks_permits().then(|| self.flow_of(ask));
            if let Some(flow) = flow {
                self.flows[flow].in_flight += u64::from(units);
            }
            self.in_flight += u64::from(units);
            let index = self.insert(arrival, flow, ask, Some(units), ticket);
            return Ok(Entered::Granted { place: Place { arrival, index }, units });
        }
        if self.waiting >= self.rules.max_waiting {
            return Err(Cause::QueueFull);
        }
        if let Some(flow) = self.find_flow(ask)
            && self.flows[flow].line.len() as u64 >= self.rules.max_waiting_per_flow
        {
            return Err(Cause::FlowFull);
        }
        let flow = self.flow_of(ask);
        let index = self.insert(arrival, Some(flow), ask, None, ticket);
        self.waiting += 1;
        self.flows[flow].line.push_back((arrival, index));
        if self.flows[flow].line.len() == 1 {
            self.compete(flow, None);
        }
        Ok(Entered::Waiting(Place { arrival, index }))
    }

    /// The units of an ask that nobody stands before and that fit. Where nothing competes, a grant leaves no trace in the
    /// tags, so this is the whole of the order in short.
    fn free_for(&self, ask: &Ask) -> Option<u32> {
        let units = self.clamp(ask.units());
        if !self.heads.is_empty() || self.in_flight + u64::from(units) > self.rules.capacity {
            return None;
        }
        // Without a cap a flow that waits is in competition, and none is.
        if self.tracks_permits()
            && let Some(flow) = self.find_flow(ask)
        {
            let flow = &self.flows[flow];
            let fits = flow.in_flight + u64::from(units) <= self.rules.flow_cap;
            return (flow.line.is_empty() && fits).then_some(units);
        }
        Some(units)
    }

    /// Whether flows are capped, so that their permits have to be counted.
    fn tracks_permits(&self) -> bool {
        self.rules.flow_cap != u64::MAX
    }

    fn insert(
        &mut self,
        arrival: u64,
        flow: Option<usize>,
        ask: &Ask,
        units: Option<u32>,
        ticket: T,
    ) -> usize {
        self.entries.insert(Entry {
            arrival,
            flow,
            cost: ask.units(),
            weight: ask.weight.get(),
            priority: ask.priority,
            units,
            ticket,
        })
    }

    /// Grants the next ticket if its units are free. The ticket stays known to the order as a permit
    /// until [`finish`](Self::finish).
    pub(crate) fn grant_next(&mut self) -> Option<Grant<'_, T>> {
        let (score, arrival, flow, index, units) = loop {
            let ((score, arrival), flow) = self.heads.first()?;
            let (_, index) = self.flows[flow].line[0];
            let units = self.clamp(self.entries[index].cost);
            if self.in_flight + u64::from(units) > self.rules.capacity {
                return None;
            }
            if self.flows[flow].in_flight + u64::from(units) <= self.rules.flow_cap {
                break (score, arrival, flow, index, units);
            }
            // The capacity was raised since, the cost is clamped to it no more, and the flow is at its cap.
            self.withdraw(flow);
            self.compete(flow, None);
        };
        let head = self.withdraw(flow).expect("a flow among the heads has a head");
        self.levels.granted(head.level, score);
        self.in_flight += u64::from(units);
        self.waiting -= 1;
        let state = &mut self.flows[flow];
        state.line.pop_front();
        let entry = &mut self.entries[index];
        entry.units = Some(units);
        if self.rules.flow_cap == u64::MAX {
            entry.flow = None;
        } else {
            state.in_flight += u64::from(units);
        }
        self.compete(flow, Some((head.tag, head.level)));
        if score > self.rebase_at {
            self.rebase(score);
        }
        Some(Grant { place: Place { arrival, index }, units, ticket: &self.entries[index].ticket })
    }

    /// Ends a ticket or a permit: a waiting one leaves its line and is not charged, one in flight gives back its
    /// units, one that has ended is left alone.
    pub(crate) fn finish(&mut self, place: Place) -> Finished {
        match self.entries.get(place.index) {
            Some(entry) if entry.arrival == place.arrival => {}
            _ => return Finished::Nothing,
        }
        let entry = self.entries.remove(place.index);
        let Some(units) = entry.units else {
            let flow = entry.flow.expect("a waiting ticket stands in its flow's line");
            self.leave_line(flow, entry.arrival);
            return Finished::Left;
        };
        self.in_flight -= u64::from(units);
        if let Some(flow) = entry.flow {
            let state = &mut self.flows[flow];
            state.in_flight -= u64::from(units);
            if state.head.is_none() {
                // At its cap, or nothing of it waits.
                self.compete(flow, None);
            }
        }
        Finished::Released(units)
    }

    /// Changes the capacity. What is in flight stays; more is granted once it fits.
    pub(crate) fn resize(&mut self, capacity: u64) {
        self.rules.capacity = capacity;
    }

    /// The tickets that wait, in no order.
    pub(crate) fn waiting_tickets(&self) -> impl Iterator<Item = (Place, &T)> {
        self.waiting_entries().map(|(place, entry)| (place, &entry.ticket))
    }

    /// The waiting tickets that the policy refuses since the capacity was lowered, in no order.
    pub(crate) fn too_wide(&self) -> impl Iterator<Item = (Place, &T)> {
        let refused =
            move |cost: u32| self.rules.too_wide == TooWide::Refuse && u64::from(cost) > self.widest();
        self.waiting_entries()
            .filter(move |(_, entry)| refused(entry.cost))
            .map(|(place, entry)| (place, &entry.ticket))
    }

    /// The permits in flight, in no order.
    pub(crate) fn permits(&self) -> impl Iterator<Item = &T> {
        self.entries
            .iter()
            .map(|(_, entry)| entry)
            .filter(|entry| entry.units.is_some())
            .map(|entry| &entry.ticket)
    }

    /// How many grants a waiting ticket is away, 1 being the next: its rank in its flow's line, which is exact with one flow,
    /// times the weight of all that compete over its own, and never more than all that wait.
    pub(crate) fn position(&self, place: Place) -> Option<u64> {
        let entry = self.entries.get(place.index).filter(|entry| entry.arrival == place.arrival)?;
        let flow = entry.flow?;
        let line = &self.flows[flow].line;
        let rank = line.binary_search_by_key(&place.arrival, |&(arrival, _)| arrival).ok()? as u64 + 1;
        let own = self.flows[flow].head.map_or(entry.weight, |head| head.weight);
        Some((rank * self.active_weight / u64::from(own)).clamp(rank, self.waiting))
    }

    /// The position a new ticket would have.
    pub(crate) fn position_of_next(&self, ask: &Ask) -> u64 {
        let flow = self.find_flow(ask).map(|flow| &self.flows[flow]);
        let rank = flow.map_or(0, |flow| flow.line.len()) as u64 + 1;
        let (own, active) = match flow.and_then(|flow| flow.head) {
            Some(head) => (head.weight.into(), self.active_weight),
            None => (u64::from(ask.weight.get()), self.active_weight + u64::from(ask.weight.get())),
        };
        (rank * active / own).clamp(rank, self.waiting + 1)
    }

    /// The units an ask would take.
    pub(crate) fn units_of(&self, ask: &Ask) -> u32 {
        self.clamp(ask.units())
    }

    fn waiting_entries(&self) -> impl Iterator<Item = (Place, &Entry<T>)> {
        self.entries
            .iter()
            .filter(|(_, entry)| entry.units.is_none())
            .map(|(index, entry)| (Place { arrival: entry.arrival, index }, entry))
    }

    fn widest(&self) -> u64 {
        self.rules.capacity.min(self.rules.flow_cap)
    }

    fn clamp(&self, cost: u32) -> u32 {
        // The lesser of the two fits in 32 bits, since the cost does.
        u32::try_from(self.widest().min(cost.into())).unwrap_or(cost)
    }

    fn find_flow(&self, ask: &Ask) -> Option<usize> {
        match &ask.flow {
            Some(name) => self.names.get(name).copied(),
            None => self.unnamed[ask.priority.index()],
        }
    }

    fn flow_of(&mut self, ask: &Ask) -> usize {
        if let Some(flow) = self.find_flow(ask) {
            return flow;
        }
        let level = ask.priority.index();
        let flow = self.flows.insert(FlowState {
            name: ask.flow.clone(),
            level,
            line: VecDeque::new(),
            start: Fraction::default(),
            head: None,
            in_flight: 0,
        });
        match &ask.flow {
            Some(name) => drop(self.names.insert(name.clone(), flow)),
            None => self.unnamed[level] = Some(flow),
        }
        flow
    }

    /// Enters a flow's first waiting ticket into the competition, which the flow has been in since its start
    /// at `since`, or joins now. A flow at its cap stays out; a flow with nothing left is forgotten.
    ///
    /// A head of a higher level than the one before it starts no earlier than the higher level has come: otherwise
    /// each flow could borrow the whole head start anew by a low request before its urgent ones.
    fn compete(&mut self, flow: usize, since: Option<(Fraction, usize)>) {
        let state = &self.flows[flow];
        if let Some(&(arrival, index)) = state.line.front() {
            let entry = &self.entries[index];
            let units = self.clamp(entry.cost);
            if state.in_flight + u64::from(units) <= self.rules.flow_cap {
                let (level, weight) = (entry.priority.index(), entry.weight);
                let start = match since {
                    Some((start, before)) if level <= before => start,
                    Some((start, _)) => start.max(Fraction::at(self.levels.start(level))),
                    None => Fraction::at(self.levels.start(level)),
                };
                let tag = start.plus(units, weight);
                let score = tag.time - self.levels.head_start(level);
                let state = &mut self.flows[flow];
                state.start = start;
                state.head = Some(Head { tag, score, arrival, level, weight });
                self.heads.insert((score, arrival), flow);
                self.levels.join(level);
                self.active_weight += u64::from(weight);
            }
        } else if state.in_flight == 0 {
            let state = self.flows.remove(flow);
            match state.name {
                Some(name) => drop(self.names.remove(&name)),
                None => self.unnamed[state.level] = None,
            }
        }
        if self.heads.is_empty() {
            self.levels.reset();
        }
    }

    /// Takes a flow's head out of the competition.
    fn withdraw(&mut self, flow: usize) -> Option<Head> {
        let head = self.flows[flow].head.take()?;
        self.heads.remove((head.score, head.arrival));
        self.levels.leave(head.level);
        self.active_weight -= u64::from(head.weight);
        Some(head)
    }

    fn leave_line(&mut self, flow: usize, arrival: u64) {
        self.waiting -= 1;
        let state = &mut self.flows[flow];
        let rank = state.line.binary_search_by_key(&arrival, |&(arrival, _)| arrival);
        let rank = rank.expect("a waiting ticket stands in its flow's line");
        state.line.remove(rank);
        if rank == 0 {
            let start = state.start;
            let since = self.withdraw(flow).map(|head| (start, head.level));
            self.compete(flow, since);
        }
    }

    /// Moves all virtual times back by the same amount. Happens once in years: see [`REBASE_AT`].
    fn rebase(&mut self, by: i64) {
        self.levels.rebase(by);
        self.heads.rebase(by);
        for (_, state) in &mut self.flows {
            state.start.time -= by;
            if let Some(head) = &mut state.head {
                head.tag.time -= by;
                head.score -= by;
            }
        }
    }

    #[cfg(test)]
    pub(super) fn set_rebase_at(&mut self, at: i64) {
        self.rebase_at = at;
    }

    /// Whether anything is remembered of anyone.
    #[cfg(test)]
    pub(super) fn is_blank(&self) -> bool {
        self.entries.is_empty()
            && self.flows.is_empty()
            && self.names.is_empty()
            && self.unnamed == [None; Priority::LEVELS]
            && self.heads.is_empty()
            && (self.waiting, self.in_flight, self.active_weight) == (0, 0, 0)
    }
}
