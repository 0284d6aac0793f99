//! The order a node keeps by itself while Redis is out of reach.

use std::collections::{HashMap, VecDeque};

use crate::schedule::{Ask, Entered, FairOrder, Place, Rules};

/// The fair order over what this node holds and has waiting, with the node's share as its capacity.
///
/// Units are those a grant takes while Redis decides. A ticket wider than the share is left out, and waits for Redis.
#[derive(Debug)]
pub(super) struct Local {
    order: FairOrder<u64>,
    places: HashMap<u64, Place>,
    /// Granted as they entered, for [`grant_next`](Self::grant_next) to tell.
    entered: VecDeque<(u64, u32)>,
    /// Held units that the order has no room for, since a flow holds more than its cap.
    outside: HashMap<u64, u32>,
    widest: u64,
    share: u64,
}

impl Local {
    pub(super) fn new(rules: Rules, capacity: u64, share: u64) -> Self {
        // How many may wait is the node's own matter.
        let rules = Rules { capacity: share, max_waiting: u64::MAX, max_waiting_per_flow: u64::MAX, ..rules };
        Self {
            order: FairOrder::new(rules),
            places: HashMap::new(),
            entered: VecDeque::new(),
            outside: HashMap::new(),
            widest: capacity.min(rules.flow_cap),
            share,
        }
    }

    /// A permit the node holds, from whomever.
    pub(super) fn hold(&mut self, number: u64, ask: &Ask, units: u32) {
        let Ok(cost) = units.try_into() else { return };
        self.order.resize(u64::MAX);
        match self.order.enqueue(&ask.clone().cost(cost), number) {
            Ok(Entered::Granted { place, .. }) => drop(self.places.insert(number, place)),
            Ok(Entered::Waiting(place)) => {
                self.order.finish(place);
                self.outside.insert(number, units);
            }
            Err(_) => drop(self.outside.insert(number, units)),
        }
        self.resize();
    }

    pub(super) fn enqueue(&mut self, number: u64, ask: &Ask) {
        if self.widest.min(ask.units().into()) > self.share {
            return;
        }
        match self.order.enqueue(ask, number) {
            Ok(Entered::Granted { place, units }) => {
                self.places.insert(number, place);
                self.entered.push_back((number, units));
            }
            Ok(Entered::Waiting(place)) => drop(self.places.insert(number, place)),
            // Too wide by the policy, which Redis will say.
            Err(_) => {}
        }
    }

    pub(super) fn finish(&mut self, number: u64) {
        if let Some(place) = self.places.remove(&number) {
            self.order.finish(place);
        }
        if self.outside.remove(&number).is_some() {
            self.resize();
        }
    }

    pub(super) fn grant_next(&mut self) -> Option<(u64, u32)> {
        let next = || {
            let grant = self.order.grant_next()?;
            Some((*grant.ticket, grant.units))
        };
        self.entered.pop_front().or_else(next)
    }

    fn resize(&mut self) {
        let outside: u64 = self.outside.values().map(|&units| u64::from(units)).sum();
        self.order.resize(self.share.saturating_sub(outside));
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::config::TooWide;

    fn local(share: u64, flow_cap: u64) -> Local {
        let rules = Rules {
            capacity: 10,
            flow_cap,
            max_waiting: 1,
            max_waiting_per_flow: 1,
            too_wide: TooWide::RunAlone,
            priority_step: 10,
        };
        Local::new(rules, 10, share)
    }

    fn costing(units: u32) -> Ask {
        Ask::new().cost(units.try_into().unwrap())
    }

    #[test]
    fn what_is_held_counts_and_nothing_is_admitted_beyond_the_share() {
        let mut local = local(5, u64::MAX);
        local.hold(1, &Ask::new(), 4);
        for number in 2..5 {
            local.enqueue(number, &Ask::new());
        }
        assert_eq!((local.grant_next(), local.grant_next()), (Some((2, 1)), None));
        local.finish(1);
        assert_eq!(
            (local.grant_next(), local.grant_next(), local.grant_next()),
            (Some((3, 1)), Some((4, 1)), None)
        );
    }

    #[test]
    fn a_request_wider_than_the_share_waits_and_lets_others_pass() {
        let mut local = local(5, u64::MAX);
        local.enqueue(1, &costing(6));
        local.enqueue(2, &costing(5));
        assert_eq!((local.grant_next(), local.grant_next()), (Some((2, 5)), None));
    }

    #[test]
    fn what_a_flow_holds_beyond_its_cap_still_counts() {
        let mut local = local(5, 2);
        local.hold(1, &Ask::new(), 2);
        local.hold(2, &Ask::new(), 2);
        local.enqueue(3, &Ask::new().flow("other"));
        local.enqueue(4, &Ask::new().flow("other"));
        assert_eq!((local.grant_next(), local.grant_next()), (Some((3, 1)), None));
        local.finish(2);
        assert_eq!(local.grant_next(), Some((4, 1)));
    }

    #[test]
    fn a_share_of_nothing_admits_nothing() {
        let mut local = local(0, u64::MAX);
        local.enqueue(1, &Ask::new());
        assert_eq!(local.grant_next(), None);
    }
}
