//! The promises of the order, held against random runs.

use std::{
    collections::{HashMap, VecDeque},
    num::NonZeroU32,
};

use proptest::{collection::vec, prelude::*};

use super::{Ask, Entered, FairOrder, Finished, Place, Priority, Rules, Weight, fair_order::SCALE};
use crate::{config::TooWide, error::Cause};

const CAPACITY: u32 = 20;

fn rules(priority_step: u32) -> Rules {
    Rules {
        capacity: CAPACITY.into(),
        flow_cap: u64::MAX,
        max_waiting: u64::MAX,
        max_waiting_per_flow: u64::MAX,
        too_wide: TooWide::RunAlone,
        priority_step,
    }
}

#[derive(Clone, Copy, Debug)]
struct FlowKind {
    weight: u32,
    level: u8,
}

#[derive(Clone, Copy, Debug)]
enum Op {
    /// A request of one of the lasting flows.
    Enqueue { flow: usize, cost: u32 },
    /// A request of a flow that is never seen again.
    OneShot { level: u8, cost: u32 },
    /// The oldest permit comes back.
    Release,
    /// A waiting ticket, counted from the oldest, leaves.
    Cancel { nth: usize },
}

fn ops(flows: usize) -> impl Strategy<Value = Vec<Op>> {
    let cost = prop_oneof![4 => 1..4_u32, 1 => 1..=CAPACITY];
    let op = prop_oneof![
        5 => (0..flows, cost.clone()).prop_map(|(flow, cost)| Op::Enqueue { flow, cost }),
        2 => (0..8_u8, cost).prop_map(|(level, cost)| Op::OneShot { level, cost }),
        5 => Just(Op::Release),
        1 => (0..40_usize).prop_map(|nth| Op::Cancel { nth }),
    ];
    vec(op, 1..300)
}

fn kinds() -> impl Strategy<Value = Vec<FlowKind>> {
    let weight = prop_oneof![3 => 1..5_u32, 1 => 1..=1_000_u32];
    vec((weight, 0..8_u8).prop_map(|(weight, level)| FlowKind { weight, level }), 2..5)
}

fn ask(name: &str, kind: FlowKind, cost: u32) -> Ask {
    Ask::new()
        .flow(name)
        .weight(Weight::new(kind.weight).unwrap())
        .priority(Priority::new(kind.level).unwrap())
        .cost(NonZeroU32::new(cost).unwrap())
}

/// A ticket as the run knows it: the lasting flow, if any, and its cost.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
struct Known {
    number: usize,
    flow: Option<usize>,
    cost: u32,
}

struct Run {
    order: FairOrder<Known>,
    kinds: Vec<FlowKind>,
    waiting: Vec<(Place, Known)>,
    running: VecDeque<(Place, u32)>,
    granted: Vec<Known>,
    tickets: usize,
}

impl Run {
    fn new(order: FairOrder<Known>, kinds: Vec<FlowKind>) -> Self {
        Self { order, kinds, waiting: vec![], running: VecDeque::new(), granted: vec![], tickets: 0 }
    }

    /// A run whose units are all taken, so that whoever comes has to wait.
    fn busy(step: u32, kinds: Vec<FlowKind>) -> Self {
        let mut run = Self::new(FairOrder::new(rules(step)), kinds);
        run.apply(Op::OneShot { level: 4, cost: CAPACITY });
        run
    }

    fn enqueue(&mut self, name: &str, kind: FlowKind, flow: Option<usize>, cost: u32) {
        self.tickets += 1;
        let known = Known { number: self.tickets, flow, cost };
        match self.order.enqueue(&ask(name, kind, cost), known).expect("nothing bounds this run") {
            Entered::Waiting(place) => self.waiting.push((place, known)),
            Entered::Granted { place, units } => self.took(place, units, known),
        }
    }

    fn apply(&mut self, op: Op) {
        match op {
            Op::Enqueue { flow, cost } => self.enqueue(&flow.to_string(), self.kinds[flow], Some(flow), cost),
            Op::OneShot { level, cost } => {
                let name = format!("once {}", self.tickets);
                self.enqueue(&name, FlowKind { weight: 1, level }, None, cost);
            }
            Op::Release => {
                if let Some((place, units)) = self.running.pop_front() {
                    assert_eq!(self.order.finish(place), Finished::Released(units));
                    assert_eq!(self.order.finish(place), Finished::Nothing, "a second release is no release");
                }
            }
            Op::Cancel { nth } => {
                if nth < self.waiting.len() {
                    let (place, _) = self.waiting.remove(nth);
                    assert_eq!(self.order.finish(place), Finished::Left);
                    assert_eq!(self.order.finish(place), Finished::Nothing);
                }
            }
        }
    }

    /// Grants one ticket if one can be.
    fn grant(&mut self) -> Option<Known> {
        let grant = self.order.grant_next()?;
        let (place, units, known) = (grant.place, grant.units, *grant.ticket);
        let at =
            self.waiting.iter().position(|(p, _)| *p == place).expect("only a waiting ticket is granted");
        self.waiting.remove(at);
        self.took(place, units, known);
        Some(known)
    }

    fn took(&mut self, place: Place, units: u32, known: Known) {
        self.running.push_back((place, units));
        self.granted.push(known);
        let held: u64 = self.running.iter().map(|(_, units)| u64::from(*units)).sum();
        assert_eq!(self.order.in_flight(), held);
        assert!(held <= CAPACITY.into(), "{held} units in flight");
    }

    fn end(&mut self) {
        while !(self.waiting.is_empty() && self.running.is_empty()) {
            self.apply(Op::Release);
            while self.grant().is_some() {}
        }
        assert!(self.order.is_blank(), "something is left behind");
    }
}

/// For each pair of lasting flows, the extremes of the difference of their services while both were backlogged.
struct Fairness {
    kinds: Vec<FlowKind>,
    step: u32,
    /// Units served per weight.
    served: Vec<f64>,
    /// The largest cost that stood in a flow's line since it became backlogged, cancelled or not: a head that is
    /// cancelled is not charged, so it leaves the flow's claim behind.
    largest: Vec<u32>,
    extremes: HashMap<(usize, usize), (f64, f64)>,
}

impl Fairness {
    fn new(kinds: Vec<FlowKind>, step: u32) -> Self {
        let flows = kinds.len();
        Self { kinds, step, served: vec![0.0; flows], largest: vec![0; flows], extremes: HashMap::new() }
    }

    fn look(&mut self, waiting: &[(Place, Known)]) -> Result<(), TestCaseError> {
        for (flow, largest) in self.largest.iter_mut().enumerate() {
            let costs =
                waiting.iter().filter(|(_, known)| known.flow == Some(flow)).map(|(_, known)| known.cost);
            *largest = costs.max().map_or(0, |cost| cost.max(*largest));
        }
        for i in 0..self.kinds.len() {
            for j in 0..i {
                if self.largest[i] == 0 || self.largest[j] == 0 {
                    self.extremes.remove(&(i, j));
                    continue;
                }
                let difference = self.served[i] - self.served[j];
                let (least, most) = self.extremes.entry((i, j)).or_insert((difference, difference));
                (*least, *most) = (least.min(difference), most.max(difference));
                let (a, b) = (self.kinds[i], self.kinds[j]);
                let requests = f64::from(self.largest[i]) / f64::from(a.weight)
                    + f64::from(self.largest[j]) / f64::from(b.weight);
                let head_starts = f64::from(a.level.abs_diff(b.level)) * f64::from(self.step);
                #[expect(clippy::cast_precision_loss, reason = "a small number")]
                let rounding = 4.0 / SCALE as f64;
                prop_assert!(
                    *most - *least <= requests + head_starts + rounding,
                    "flows {a:?} and {b:?} drifted {} apart, {requests} and {head_starts} are allowed",
                    *most - *least,
                );
            }
        }
        Ok(())
    }
}

proptest! {
    // P2 and P8.
    #[test]
    fn a_flow_is_served_in_order_of_arrival_and_nothing_is_left(kinds in kinds(), step in 0..30_u32, ops in ops(2)) {
        let mut run = Run::new(FairOrder::new(rules(step)), kinds);
        for op in ops {
            run.apply(op);
            while run.grant().is_some() {}
        }
        run.end();
        for flow in 0..2 {
            let numbers: Vec<_> =
                run.granted.iter().filter(|known| known.flow == Some(flow)).map(|known| known.number).collect();
            prop_assert!(numbers.is_sorted(), "flow {flow} was granted in the order {numbers:?}");
        }
    }

    // P3, the exact bound, among flows that come and go, cancelled heads, one-request flows of every priority.
    #[test]
    fn backlogged_flows_drift_apart_by_one_request_of_each_and_their_head_starts(
        kinds in kinds(), step in 0..30_u32, ops in ops(4),
    ) {
        let flows = kinds.len();
        let mut run = Run::new(FairOrder::new(rules(step)), kinds.clone());
        let mut fairness = Fairness::new(kinds, step);
        for op in ops {
            match op {
                Op::Enqueue { flow, .. } if flow >= flows => continue,
                op => run.apply(op),
            }
            fairness.look(&run.waiting)?;
            while let Some(known) = run.grant() {
                if let Some(flow) = known.flow {
                    let weight = fairness.kinds[flow].weight;
                    fairness.served[flow] += f64::from(known.cost) / f64::from(weight);
                }
                fairness.look(&run.waiting)?;
            }
        }
    }

    // P4: one low, wide ticket beside an endless stream of one-request flows of the highest priority.
    #[test]
    fn a_low_and_wide_ticket_waits_a_bounded_time(
        step in 0..30_u32, abreast in 1..20_u32, weight in 1..5_u32, before in 0..50_u32,
    ) {
        let mut run = Run::new(FairOrder::new(rules(step)), vec![FlowKind { weight, level: 0 }]);
        let urgent = |run: &mut Run| run.apply(Op::OneShot { level: 7, cost: 1 });
        // Full, so that everyone below has to wait, and the high level has had its head start for a while.
        for _ in 0..CAPACITY + before + abreast {
            urgent(&mut run);
            while run.grant().is_some() {}
            if run.waiting.len() > abreast as usize {
                run.apply(Op::Release);
                while run.grant().is_some() {}
            }
        }
        run.apply(Op::Enqueue { flow: 0, cost: CAPACITY });
        // Two more than `abreast` wait at a time, and each time around all of them may be ahead.
        let bound = (abreast + 2) * (7 * step + CAPACITY / weight + 2);
        let mut passed = 0;
        let mut served = false;
        while !served {
            urgent(&mut run);
            run.apply(Op::Release);
            while let Some(known) = run.grant() {
                served |= known.flow == Some(0);
                passed += 1;
            }
            prop_assert!(served || passed <= bound, "passed {} times; at most {} were promised", passed, bound);
        }
    }

    // Moving the tags back changes nobody's turn.
    #[test]
    fn rebasing_changes_no_grant(kinds in kinds(), step in 0..30_u32, at in 1..100_000_i64, ops in ops(2)) {
        let mut plain = Run::new(FairOrder::new(rules(step)), kinds.clone());
        let mut order = FairOrder::new(rules(step));
        order.set_rebase_at(at);
        let mut rebased = Run::new(order, kinds);
        for op in ops {
            for run in [&mut plain, &mut rebased] {
                run.apply(op);
                while run.grant().is_some() {}
            }
        }
        prop_assert_eq!(plain.granted, rebased.granted);
    }

    // Caps and bounds, with capacity changed on the way: never more in flight than the capacity at the grant, or of a
    // flow than its cap; a flow at its cap leaves the rest to the others.
    #[test]
    fn caps_hold_and_conserve_work(
        cap in 1..6_u32, sizes in vec(1..30_u32, 1..5), asks in vec((0..4_usize, 1..30_u32), 1..120),
    ) {
        let mut order = FairOrder::new(Rules { flow_cap: cap.into(), ..rules(0) });
        let mut running: Vec<(Place, usize, u32)> = vec![];
        let mut left = [0_u32; 4];
        for (i, (flow, cost)) in asks.iter().copied().enumerate() {
            if i % 10 == 9 {
                order.resize(sizes[i / 10 % sizes.len()].into());
            }
            left[flow] += 1;
            let kind = FlowKind { weight: 1, level: 4 };
            match order.enqueue(&ask(&flow.to_string(), kind, cost), flow).expect("nothing bounds this run") {
                Entered::Waiting(_) => {}
                Entered::Granted { place, units } => {
                    running.push((place, flow, units));
                    left[flow] -= 1;
                }
            }
            if i % 3 == 2 && !running.is_empty() {
                let (place, ..) = running.remove(i % running.len());
                order.finish(place);
            }
            while let Some(grant) = order.grant_next() {
                running.push((grant.place, *grant.ticket, grant.units));
                left[*running.last().map(|(_, flow, _)| flow).unwrap()] -= 1;
                prop_assert!(order.in_flight() <= order.capacity());
                for flow in 0..4 {
                    let held: u32 = running.iter().filter(|r| r.1 == flow).map(|r| r.2).sum();
                    prop_assert!(held <= cap, "flow {} holds {} of {}", flow, held, cap);
                }
            }
            // Whoever waits does so because its flow is near its cap, or its units are not free.
            let free = order.capacity().saturating_sub(order.in_flight());
            for (flow, left) in left.iter().enumerate() {
                let held: u32 = running.iter().filter(|r| r.1 == flow).map(|r| r.2).sum();
                let widest = cap.min(u32::try_from(order.capacity()).unwrap());
                prop_assert!(
                    *left == 0 || held > 0 || free < widest.into(),
                    "flow {} has nothing in flight, waits, and {} units are free", flow, free
                );
            }
        }
        while !running.is_empty() || order.waiting() > 0 {
            for (place, ..) in running.drain(..) {
                order.finish(place);
            }
            while let Some(grant) = order.grant_next() {
                running.push((grant.place, *grant.ticket, grant.units));
            }
        }
        prop_assert!(order.is_blank());
    }
}

fn simple(cost: u32) -> Ask {
    Ask::new().cost(NonZeroU32::new(cost).unwrap())
}

// P3 and P4: under start-time tags, or one virtual time for all priorities, this flow starves.
#[test]
fn a_backlogged_flow_beside_an_endless_stream_of_one_request_flows_gets_its_share() {
    for level in [0, 4, 7] {
        let kind = FlowKind { weight: 1, level: 0 };
        let mut run = Run::new(FairOrder::new(Rules { capacity: 1, ..rules(10) }), vec![kind]);
        run.apply(Op::OneShot { level, cost: 1 });
        enqueue(&mut run, 0, 1_000, 1);
        for _ in 0..3 {
            run.apply(Op::OneShot { level, cost: 1 });
        }
        let mut backlogged = 0;
        for _ in 0..1_000 {
            run.apply(Op::Release);
            match run.grant().expect("a unit is free").flow {
                Some(_) => backlogged += 1,
                None => run.apply(Op::OneShot { level, cost: 1 }),
            }
        }
        // Three one-request flows stand beside it at any time, so its share is a quarter, less the head start.
        assert!(backlogged >= 1_000 / 4 - 10 * u32::from(level), "level {level}: {backlogged} of 1,000");
    }
}

// P8.
#[test]
fn a_hundred_thousand_one_request_flows_leave_no_state() {
    let mut run = Run::new(FairOrder::new(rules(10)), vec![]);
    for i in 0..100_000_u32 {
        run.apply(Op::OneShot { level: u8::try_from(i % 8).unwrap(), cost: 1 + i % 3 });
        while run.grant().is_some() {}
        if run.waiting.len() > 20 {
            run.apply(Op::Release);
        }
        run.granted.clear();
        assert!(run.order.flows() <= 21 + CAPACITY as usize + 20, "flows are kept without need");
    }
    run.end();
}

#[test]
fn shares_follow_the_weights() {
    let kinds = [1, 3, 6].map(|weight| FlowKind { weight, level: 4 });
    let mut run = Run::busy(10, kinds.to_vec());
    (0..3).for_each(|flow| enqueue(&mut run, flow, 700, 1));
    let served = served(&mut run, 1_000);
    let count = |flow| served.iter().filter(|&&f| f == flow).count();
    assert_eq!([count(0), count(1), count(2)], [100, 300, 600]);
}

#[test]
fn a_higher_priority_has_its_head_start_and_no_more() {
    let mut run = Run::busy(5, levels(&[0, 2]));
    (0..2).for_each(|flow| enqueue(&mut run, flow, 100, 1));
    let served = served(&mut run, 100);
    // Two levels of five units each; on the tie that follows the earlier arrival is next.
    assert_eq!(served.iter().position(|&flow| flow == 0), Some(10));
    assert_eq!(served.iter().filter(|&&flow| flow == 0).count(), 45);
}

#[test]
fn within_a_flow_priority_does_not_reorder() {
    let mut order = FairOrder::new(Rules { capacity: 1, ..rules(10) });
    let holder = granted(order.enqueue(&Ask::new(), 0));
    for (number, level) in [(1, 0), (2, 7), (3, 4)] {
        order.enqueue(&Ask::new().flow("a").priority(Priority::new(level).unwrap()), number).unwrap();
    }
    order.finish(holder);
    let mut granted = vec![];
    while let Some(grant) = order.grant_next() {
        let place = grant.place;
        granted.push(*grant.ticket);
        order.finish(place);
    }
    assert_eq!(granted, [1, 2, 3]);
}

#[track_caller]
fn granted(entered: Result<Entered, Cause>) -> Place {
    match entered {
        Ok(Entered::Granted { place, .. }) => place,
        other => panic!("{other:?} where nobody stands before"),
    }
}

#[track_caller]
fn waiting(entered: Result<Entered, Cause>) -> Place {
    match entered {
        Ok(Entered::Waiting(place)) => place,
        other => panic!("{other:?} where it has to wait"),
    }
}

// B38.
#[test]
fn a_cost_above_the_capacity_runs_alone_or_is_refused_at_once() {
    let mut order = FairOrder::new(rules(10));
    let small = granted(order.enqueue(&simple(1), "small"));
    order.enqueue(&simple(CAPACITY + 1), "wide").unwrap();
    assert!(order.grant_next().is_none(), "it runs alone");
    order.finish(small);
    let grant = order.grant_next().unwrap();
    assert_eq!((grant.units, *grant.ticket), (CAPACITY, "wide"));

    let mut order = FairOrder::new(Rules { too_wide: TooWide::Refuse, ..rules(10) });
    assert_eq!(order.enqueue(&simple(CAPACITY + 1), "wide").unwrap_err(), Cause::TooWide);
    granted(order.enqueue(&simple(CAPACITY), "all"));
    waiting(order.enqueue(&simple(8), "eight"));
    order.resize(5);
    let refused: Vec<_> = order.too_wide().map(|(_, ticket)| *ticket).collect();
    assert_eq!(refused, ["eight"]);
}

#[test]
fn bounds_on_waiting_refuse_and_change_nothing() {
    let mut order =
        FairOrder::new(Rules { capacity: 1, max_waiting: 3, max_waiting_per_flow: 2, ..rules(10) });
    granted(order.enqueue(&Ask::new(), ()));
    order.enqueue(&Ask::new().flow("a"), ()).unwrap();
    order.enqueue(&Ask::new().flow("a"), ()).unwrap();
    assert_eq!(order.enqueue(&Ask::new().flow("a"), ()).unwrap_err(), Cause::FlowFull);
    order.enqueue(&Ask::new().flow("b"), ()).unwrap();
    assert_eq!(order.enqueue(&Ask::new().flow("c"), ()).unwrap_err(), Cause::QueueFull);
    assert_eq!((order.waiting(), order.flows()), (3, 2));
}

#[test]
fn positions_are_exact_in_a_flow_and_by_weight_over_flows() {
    let mut order = FairOrder::new(Rules { capacity: 1, ..rules(10) });
    granted(order.enqueue(&Ask::new(), 0));
    let flow = |name: &str, weight| Ask::new().flow(name).weight(Weight::new(weight).unwrap());
    let alone: Vec<_> = (0..3).map(|n| waiting(order.enqueue(&flow("a", 1), n))).collect();
    let positions = |order: &FairOrder<i32>| alone.iter().map(|p| order.position(*p)).collect::<Vec<_>>();
    assert_eq!(positions(&order), [Some(1), Some(2), Some(3)]);
    assert_eq!(order.position_of_next(&flow("a", 1)), 4);
    order.finish(alone[1]);
    assert_eq!(positions(&order), [Some(1), None, Some(2)]);
    // Beside a flow of weight 3, three of four grants are the other's.
    for n in 0..9 {
        order.enqueue(&flow("b", 3), n).unwrap();
    }
    assert_eq!(positions(&order), [Some(4), None, Some(8)]);
    assert_eq!(order.position_of_next(&flow("a", 1)), 12);
    assert_eq!(order.position_of_next(&flow("c", 2)), 3, "one of two in six");
    assert_eq!(order.position_of_next(&flow("b", 3)), 12, "never more than all that wait");
}

/// The flows of the next `n` grants, each made by the release of the one before.
fn served(run: &mut Run, n: usize) -> Vec<usize> {
    let flow = |run: &mut Run| {
        run.apply(Op::Release);
        run.grant().expect("someone waits").flow.expect("of a lasting flow")
    };
    (0..n).map(|_| flow(run)).collect()
}

fn enqueue(run: &mut Run, flow: usize, tickets: usize, cost: u32) {
    (0..tickets).for_each(|_| run.apply(Op::Enqueue { flow, cost }));
}

fn levels(levels: &[u8]) -> Vec<FlowKind> {
    levels.iter().map(|&level| FlowKind { weight: 1, level }).collect()
}

// P3: cancelled requests are not charged.
#[test]
fn a_flow_whose_heads_are_cancelled_keeps_its_turn() {
    let mut run = Run::busy(10, levels(&[4, 4]));
    enqueue(&mut run, 0, 3, 10);
    enqueue(&mut run, 1, 30, 1);
    for _ in 0..2 {
        assert_eq!(served(&mut run, 4), [1; 4]);
        let oldest = run.waiting.iter().position(|(_, known)| known.flow == Some(0)).unwrap();
        run.apply(Op::Cancel { nth: oldest });
    }
    // The third has what the two before it waited for: ten units from the start, of which eight are served.
    assert_eq!(served(&mut run, 3), [1, 0, 1], "on the tie at ten the earlier arrival is first");
}

#[test]
fn a_head_start_is_whole_over_flows_that_come_while_only_higher_levels_wait() {
    let mut run = Run::busy(5, levels(&[1, 0, 0]));
    enqueue(&mut run, 0, 100, 1);
    assert_eq!(served(&mut run, 50), [0; 50]);
    enqueue(&mut run, 1, 20, 1);
    assert_eq!(served(&mut run, 2), [0; 2]);
    enqueue(&mut run, 2, 20, 1);
    assert_eq!(served(&mut run, 3), [0; 3], "five units ahead of the one that came first");
    let next = served(&mut run, 30);
    let count = |flow| next.iter().filter(|&&f| f == flow).count();
    assert_eq!([count(0), count(1), count(2)], [10, 10, 10], "{next:?}");
}

#[test]
fn head_starts_are_anew_once_nothing_waited() {
    let mut run = Run::busy(5, levels(&[1, 0]));
    for _ in 0..3 {
        enqueue(&mut run, 1, 1, 1);
        enqueue(&mut run, 0, 5, 1);
        // The whole head start is used, and the one it was used against leaves.
        assert_eq!(served(&mut run, 5), [0; 5]);
        run.apply(Op::Cancel { nth: 0 });
        run.apply(Op::Release);
        run.apply(Op::OneShot { level: 4, cost: CAPACITY });
    }
}

#[test]
fn positions_count_the_flows_beside() {
    let mut order = FairOrder::new(Rules { capacity: 1, ..rules(10) });
    granted(order.enqueue(&Ask::new(), 0));
    let places: Vec<_> =
        (0..100).map(|i| waiting(order.enqueue(&Ask::new().flow(format!("{i}")), i))).collect();
    assert_eq!(order.position(places[99]), Some(100));
    assert_eq!(order.position_of_next(&Ask::new().flow("new")), 101);
}

// A bound on what waits refuses nobody who need not wait.
#[test]
fn a_full_line_refuses_no_ask_whose_units_are_free() {
    let mut order = FairOrder::new(Rules { capacity: 10, flow_cap: 1, max_waiting: 2, ..rules(10) });
    let flow = |name: &str| Ask::new().flow(name);
    granted(order.enqueue(&flow("a"), ()));
    waiting(order.enqueue(&flow("a"), ()));
    waiting(order.enqueue(&flow("a"), ()));
    assert_eq!(order.enqueue(&flow("a"), ()).unwrap_err(), Cause::QueueFull);
    granted(order.enqueue(&flow("b"), ()));
}

/// What a flow of level 0 with an endless backlog gets of 3,000 grants beside flows that come one after the other, each with
/// `low` requests of level 0 and then `urgent` ones of level 7. If `cancel`, the low ones are cancelled.
fn share_beside_mixed_flows(low: usize, urgent: usize, cancel: bool) -> usize {
    let mut order = FairOrder::new(Rules { capacity: 1, ..rules(10) });
    let at = |name: &str, level| ask(name, FlowKind { weight: 1, level }, 1);
    let mut held = granted(order.enqueue(&Ask::new(), "holder"));
    for _ in 0..3_000 {
        waiting(order.enqueue(&at("steady", 0), "steady"));
    }
    let (mut steady, mut left, mut flows) = (0, 0, 0);
    for _ in 0..3_000 {
        if left == 0 {
            flows += 1;
            let name = format!("mixed {flows}");
            let lows: Vec<_> = (0..low).map(|_| waiting(order.enqueue(&at(&name, 0), "mixed"))).collect();
            for _ in 0..urgent {
                waiting(order.enqueue(&at(&name, 7), "mixed"));
            }
            left = urgent + if cancel { 0 } else { low };
            for place in lows.into_iter().filter(|_| cancel) {
                order.finish(place);
            }
        }
        order.finish(held);
        let grant = order.grant_next().expect("someone waits");
        held = grant.place;
        match *grant.ticket {
            "steady" => steady += 1,
            _ => left -= 1,
        }
    }
    steady
}

// P3 and P4: a low request before the urgent ones, served or cancelled, does not lend its place to them.
#[test]
fn flows_of_mixed_priorities_borrow_no_more_than_urgent_ones() {
    for (low, urgent, cancel) in [(0, 61, false), (1, 60, false), (1, 1, true), (1, 60, true)] {
        let steady = share_beside_mixed_flows(low, urgent, cancel);
        assert!(steady >= 1_400, "{steady} of 3,000 beside {low} low, {urgent} urgent, cancelled: {cancel}");
    }
}
