//! One line for many processes, kept in Redis.
//!
//! A request never talks to Redis. It changes the node's table ([`node`]) under a lock and wakes the queue's engine
//! ([`engine`]), which tells Redis all that is new in one call of one script and believes the reply by the node's rules. Pushes, on a
//! connection of their own, say what others' calls have granted. `docs/PROTOCOL.md` has the whole of it.

mod clock;
mod engine;
mod keys;
mod link;
mod node;
mod outage;
mod script;
mod wire;

#[cfg(test)]
mod order;
#[cfg(test)]
mod protocol;
#[cfg(test)]
mod simulation;
#[cfg(test)]
mod testing;

use std::{
    collections::hash_map::RandomState,
    hash::BuildHasher,
    pin::Pin,
    sync::{Arc, PoisonError},
    time::Duration,
};

pub(crate) use self::link::check_url;
use self::{
    engine::Core,
    keys::flow_id,
    wire::{AskRecord, NodeId},
};
use super::{Backend, Outlook, Place, Snapshot, Ticket, WakeList};
use crate::{
    config::{FairQueueConfig, RedisConfig},
    error::{Cause, ConnectError},
    schedule::Ask,
};

/// One queue's handle to its engine. The engine ends, and the node detaches, when this is dropped.
#[derive(Debug)]
pub(crate) struct Redis {
    core: Arc<Core>,
}

impl Redis {
    pub(crate) fn new(config: &FairQueueConfig, redis: &RedisConfig) -> Self {
        let redis = Self { core: Arc::new(Core::new(new_id(), config, redis)) };
        // Where there is a runtime already the queue attaches now, and else with the first request.
        redis.core.run();
        redis
    }

    /// Waits until the queue grants, or tells why it cannot.
    pub(crate) async fn ready(&self) -> Result<(), ConnectError> {
        self.core.ready().await
    }

    fn change<R>(&self, change: impl FnOnce(&mut node::Node, &mut WakeList) -> R) -> R {
        self.core.change(change)
    }
}

impl Backend for Redis {
    fn enqueue(&self, ask: &Ask, ticket: &Arc<Ticket>, wait: bool) -> Option<Place> {
        let record = AskRecord {
            flow: flow_id(ask),
            cost: ask.units(),
            weight: u16::try_from(ask.weight.get()).unwrap_or(u16::MAX),
            level: ask.priority.level(),
        };
        self.core.run();
        let number = self.change(|node, wake| node.enqueue(ask, record, ticket, wait, wake));
        self.core.work();
        number.map(Place::numbered)
    }

    fn finish(&self, place: Place) {
        if self.change(|node, wake| node.finish(place.number(), wake)) {
            self.core.work();
        }
    }

    fn outlook(&self, _ask: &Ask, _place: Option<Place>) -> Outlook {
        let now = clock::now();
        self.change(|node, _| {
            let units = node.seen().waiting.max(1);
            Outlook { position: None, estimate: node.time_for(units, now) }
        })
    }

    fn resize(&self, capacity: Option<u64>) {
        self.core.run();
        self.change(|node, wake| node.set_operator(capacity, wake));
        self.core.work();
    }

    fn close(&self, cause: Cause) {
        self.change(|node, wake| node.close(cause, wake));
        self.core.work();
    }

    fn revoke(&self) {
        self.change(|node, wake| node.revoke(wake));
    }

    fn attend(&self) {
        self.core.run();
    }

    fn lease_is_lost(&self) -> bool {
        self.core.lease_is_lost()
    }

    fn snapshot(&self) -> Snapshot {
        let node = self.core.node.lock().unwrap_or_else(PoisonError::into_inner);
        let (seen, (own_waiting, own_in_flight)) = (node.seen(), node.own());
        Snapshot {
            capacity: seen.capacity,
            waiting: seen.waiting.max(own_waiting),
            in_flight: seen.in_flight.max(own_in_flight),
            own_waiting,
            own_in_flight,
        }
    }

    fn flows(&self) -> usize {
        self.change(|node, _| node.flows())
    }

    fn detach(&self) -> Pin<Box<dyn Future<Output = ()> + Send + '_>> {
        Box::pin(self.core.detach())
    }
}

impl Drop for Redis {
    fn drop(&mut self) {
        self.core.stop();
    }
}

/// 128 bits that no other engine has: a hash with a key of the operating system's, twice.
fn new_id() -> NodeId {
    let mut id = NodeId::default();
    let time = Duration::as_nanos(&clock::now());
    id[..8].copy_from_slice(&RandomState::new().hash_one(time).to_be_bytes());
    id[8..].copy_from_slice(&RandomState::new().hash_one((time, std::process::id())).to_be_bytes());
    id
}
