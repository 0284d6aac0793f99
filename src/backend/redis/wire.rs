//! What a call of the script takes and answers, and what a push holds, byte for byte. `docs/PROTOCOL.md` describes it.
//!
//! Everything that comes from Redis is checked for length and range, and what does not fit is an error that names
//! the part; nothing of it is guessed.

use std::{fmt, time::Duration};

use crate::{config::TooWide, error::Cause, schedule::Rules};

pub(super) type NodeId = [u8; 16];
pub(super) type Epoch = [u8; 16];
pub(super) type FlowId = [u8; 16];

/// Numbers without bound are this on the wire: the largest whole number that a script's doubles count to.
pub(super) const UNBOUNDED: u64 = 1 << 53;

/// The most operations of a call.
pub(super) const MAX_OPS: usize = 256;

/// The most grants of a call from the line: each costs the script about as much as three operations.
pub(super) const MAX_GRANTS: u32 = 64;

/// What kind of call it is.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Kind {
    Ordinary = 0,
    /// The first of a restate: it makes the node known and starts a session.
    Restate = 1,
    /// A further part of a restate.
    RestateOn = 2,
    /// The last call of a node.
    Detach = 3,
}

/// A ticket as the script knows it.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) struct AskRecord {
    pub(super) flow: FlowId,
    pub(super) cost: u32,
    pub(super) weight: u16,
    pub(super) level: u8,
}

/// How a ticket is enqueued.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum How {
    /// Granted at once or refused.
    AtOnce,
    Wait,
    /// Told again, with its arrival number where the node knows it.
    Again {
        arrival: u64,
    },
}

/// One call, put together.
#[derive(Debug, Default)]
pub(super) struct Call {
    pub(super) head: Vec<u8>,
    pub(super) rules: Vec<u8>,
    pub(super) peers: Vec<u8>,
    pub(super) enqueues: Vec<u8>,
    pub(super) releases: Vec<u8>,
    pub(super) finishes: Vec<u8>,
    pub(super) held: Vec<u8>,
    grows: bool,
}

/// The fixed part of a call.
#[derive(Clone, Copy, Debug)]
pub(super) struct Head {
    pub(super) node: NodeId,
    pub(super) epoch: Epoch,
    pub(super) number: u64,
    pub(super) version: u64,
    pub(super) received: u64,
    pub(super) lease_micros: u64,
    pub(super) membership: u64,
    pub(super) list_from: u64,
    pub(super) kind: Kind,
    pub(super) last: bool,
    pub(super) fresh: bool,
    pub(super) lists: bool,
    pub(super) max_grants: u32,
}

impl Head {
    pub(super) fn write(&self, to: &mut Vec<u8>) {
        to.extend(self.node);
        to.extend(self.epoch);
        for number in
            [self.number, self.version, self.received, self.lease_micros, self.membership, self.list_from]
        {
            to.extend(number.to_be_bytes());
        }
        to.push(self.kind as u8);
        to.push(u8::from(self.last) | u8::from(self.fresh) << 1 | u8::from(self.lists) << 2);
        to.extend(self.max_grants.to_be_bytes());
    }
}

impl Call {
    /// Whether the call puts something into Redis that grows it. One that does not is run by a server whose memory is full.
    pub(super) fn grows(&self) -> bool {
        self.grows
    }

    pub(super) fn ops(&self) -> usize {
        self.enqueues.len() / 40 + self.releases.len() / 28 + self.finishes.len() / 8 + self.held.len() / 28
    }

    pub(super) fn enqueue(&mut self, ticket: u64, ask: &AskRecord, how: How) {
        self.grows |= !matches!(how, How::Again { .. });
        let (arrival, how) = match how {
            How::AtOnce => (0, 0),
            How::Wait => (0, 1),
            How::Again { arrival } => (arrival, 2),
        };
        let to = &mut self.enqueues;
        to.extend(ticket.to_be_bytes());
        to.extend(ask.flow);
        to.extend(ask.cost.to_be_bytes());
        to.extend(ask.weight.to_be_bytes());
        to.push(ask.level);
        to.extend(arrival.to_be_bytes());
        to.push(how);
    }

    pub(super) fn release(&mut self, ticket: u64, units: u32, flow: FlowId) {
        write_permit(&mut self.releases, ticket, units, flow);
    }

    pub(super) fn hold(&mut self, ticket: u64, units: u32, flow: FlowId) {
        write_permit(&mut self.held, ticket, units, flow);
    }

    pub(super) fn finish(&mut self, ticket: u64) {
        self.finishes.extend(ticket.to_be_bytes());
    }
}

fn write_permit(to: &mut Vec<u8>, ticket: u64, units: u32, flow: FlowId) {
    to.extend(ticket.to_be_bytes());
    to.extend(units.to_be_bytes());
    to.extend(flow);
}

/// The queue's rules and what the operator set, with the counters that say which is newer.
#[derive(Clone, Copy, Debug)]
pub(super) struct RulesRecord {
    pub(super) rules: Rules,
    pub(super) ramp_micros: u64,
    pub(super) set: u64,
    pub(super) operator: Option<u64>,
    pub(super) operator_set: u64,
}

impl RulesRecord {
    pub(super) fn write(&self, to: &mut Vec<u8>) {
        let rules = &self.rules;
        for bound in [rules.capacity, rules.flow_cap, rules.max_waiting, rules.max_waiting_per_flow] {
            to.extend(bound.min(UNBOUNDED).to_be_bytes());
        }
        to.push(u8::from(rules.too_wide == TooWide::Refuse));
        to.extend(rules.priority_step.to_be_bytes());
        let operator = self.operator.map_or(0, |capacity| capacity.min(UNBOUNDED));
        for number in [self.ramp_micros, self.set, operator, self.operator_set] {
            to.extend(number.to_be_bytes());
        }
    }
}

/// What a call became.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Status {
    Done,
    /// The node has to restate: Redis does not know it, is another life of the queue, or does not know its last call.
    Restate,
    /// It ran before, or too late.
    Stale,
    /// What the node had before is still being taken back.
    Reaping,
    /// The queue's state is of another layout.
    OtherLayout,
}

/// A grant as Redis tells it. No units: the ticket is refused, being too wide.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) struct Granted {
    pub(super) ticket: u64,
    pub(super) units: u32,
    /// Whether the units are counted against the flow's cap.
    pub(super) counted: bool,
}

/// The answer to a call.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(super) struct Reply {
    pub(super) status: Status,
    pub(super) recovering: bool,
    pub(super) more: bool,
    /// Where the list of the node's permits goes on.
    pub(super) list_from: Option<u64>,
    pub(super) number: u64,
    pub(super) epoch: Epoch,
    pub(super) version: u64,
    pub(super) pushed: u64,
    pub(super) waiting: u64,
    pub(super) in_flight: u64,
    /// Units granted in this epoch.
    pub(super) granted: u64,
    pub(super) base: u64,
    pub(super) rules_set: u64,
    pub(super) operator: Option<u64>,
    pub(super) operator_set: u64,
    pub(super) live: u64,
    pub(super) membership: u64,
    pub(super) wake_micros: u64,
    pub(super) grants: Vec<Granted>,
    pub(super) refusals: Vec<(u64, Cause)>,
    pub(super) places: Vec<(u64, u64)>,
    /// `None`: as the node knows them.
    pub(super) peers: Option<Vec<NodeId>>,
}

impl Reply {
    /// The capacity that counts now.
    pub(super) fn capacity(&self) -> u64 {
        bound(self.operator.unwrap_or(self.base))
    }
}

/// `UNBOUNDED` as the rest of the crate has it.
pub(super) fn bound(number: u64) -> u64 {
    if number >= UNBOUNDED { u64::MAX } else { number }
}

/// A time as the script counts it.
pub(super) fn micros(duration: Duration) -> u64 {
    u64::try_from(duration.as_micros()).unwrap_or(u64::MAX)
}

/// The grants of one push.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(super) struct Push {
    pub(super) epoch: Epoch,
    pub(super) session: u64,
    pub(super) first: u64,
    pub(super) grants: Vec<Granted>,
}

/// Something that is no answer of this protocol.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct Malformed {
    part: &'static str,
    found: u64,
    bound: &'static str,
}

impl fmt::Display for Malformed {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{} of the reply must be {}, got {}", self.part, self.bound, self.found)
    }
}

impl std::error::Error for Malformed {}

/// Takes a packed part from its front to its end.
struct Reader<'a> {
    part: &'static str,
    rest: &'a [u8],
}

impl<'a> Reader<'a> {
    fn new(part: &'static str, rest: &'a [u8]) -> Self {
        Self { part, rest }
    }

    fn bytes<const N: usize>(&mut self) -> Result<[u8; N], Malformed> {
        match self.rest.split_first_chunk::<N>() {
            Some((bytes, rest)) => {
                self.rest = rest;
                Ok(*bytes)
            }
            None => Err(Malformed { part: self.part, found: self.rest.len() as u64, bound: "whole records" }),
        }
    }

    fn u8(&mut self) -> Result<u8, Malformed> {
        Ok(self.bytes::<1>()?[0])
    }

    fn u32(&mut self) -> Result<u32, Malformed> {
        self.bytes().map(u32::from_be_bytes)
    }

    /// A number that a double holds.
    fn number(&mut self) -> Result<u64, Malformed> {
        let found = self.bytes().map(u64::from_be_bytes)?;
        if found <= UNBOUNDED {
            Ok(found)
        } else {
            Err(Malformed { part: self.part, found, bound: "at most 2^53" })
        }
    }

    fn ticket(&mut self) -> Result<u64, Malformed> {
        self.bytes().map(u64::from_be_bytes)
    }

    fn records<T>(
        &mut self,
        mut one: impl FnMut(&mut Self) -> Result<T, Malformed>,
    ) -> Result<Vec<T>, Malformed> {
        let mut records = vec![];
        while !self.rest.is_empty() {
            records.push(one(self)?);
        }
        Ok(records)
    }

    fn end(&self) -> Result<(), Malformed> {
        if self.rest.is_empty() {
            Ok(())
        } else {
            Err(Malformed { part: self.part, found: self.rest.len() as u64, bound: "without a rest" })
        }
    }

    fn granted(&mut self) -> Result<Granted, Malformed> {
        Ok(Granted { ticket: self.ticket()?, units: self.u32()?, counted: self.u8()? != 0 })
    }
}

pub(super) fn read_reply(parts: &[Vec<u8>]) -> Result<Reply, Malformed> {
    let [head, grants, refusals, places, peers] = parts else {
        return Err(Malformed { part: "the parts", found: parts.len() as u64, bound: "5" });
    };
    let mut head = Reader::new("the head", head);
    let status = match head.u8()? {
        0 => Status::Done,
        1..=3 => Status::Restate,
        4 => Status::Stale,
        5 => Status::Reaping,
        6 => Status::OtherLayout,
        other => return Err(Malformed { part: "the status", found: other.into(), bound: "at most 6" }),
    };
    let flags = head.u8()?;
    let reply = Reply {
        status,
        recovering: flags & 1 != 0,
        more: flags & 2 != 0,
        number: head.number()?,
        epoch: head.bytes()?,
        version: head.number()?,
        pushed: head.number()?,
        waiting: head.number()?,
        in_flight: head.number()?,
        granted: head.number()?,
        base: head.number()?,
        rules_set: head.number()?,
        operator: Some(head.number()?).filter(|&capacity| capacity > 0),
        operator_set: head.number()?,
        live: head.number()?,
        membership: head.number()?,
        wake_micros: head.number()?,
        list_from: Some(head.ticket()?).filter(|_| flags & 4 != 0),
        grants: Reader::new("the grants", grants).records(Reader::granted)?,
        refusals: Reader::new("the refusals", refusals).records(|record| {
            let (ticket, cause) = (record.ticket()?, record.u8()?);
            match Cause::ALL.get(usize::from(cause)) {
                Some(&cause) => Ok((ticket, cause)),
                None => Err(Malformed { part: "a cause", found: cause.into(), bound: "a known one" }),
            }
        })?,
        places: Reader::new("the places", places)
            .records(|record| Ok((record.ticket()?, record.number()?)))?,
        peers: (!peers.is_empty())
            .then(|| Reader::new("the peers", peers).records(Reader::bytes))
            .transpose()?,
    };
    head.end()?;
    Ok(reply)
}

pub(super) fn read_push(message: &[u8]) -> Result<Push, Malformed> {
    let mut message = Reader::new("a push", message);
    Ok(Push {
        epoch: message.bytes()?,
        session: message.number()?,
        first: message.number()?,
        grants: message.records(Reader::granted)?,
    })
}

#[cfg(test)]
mod tests {
    use proptest::{collection::vec, prelude::*};

    use super::*;

    fn head() -> Vec<u8> {
        let mut head = vec![0, 0];
        head.extend(7_u64.to_be_bytes());
        head.extend([1; 16]);
        head.extend([0; 13 * 8]);
        head
    }

    fn parts(head: Vec<u8>) -> Vec<Vec<u8>> {
        vec![head, vec![], vec![], vec![], vec![]]
    }

    #[test]
    fn a_reply_is_read_to_its_last_byte() {
        let mut whole = parts(head());
        whole[1] = [&9_u64.to_be_bytes()[..], &3_u32.to_be_bytes(), &[1]].concat();
        whole[4] = vec![2; 32];
        let reply = read_reply(&whole).unwrap();
        assert_eq!((reply.status, reply.number), (Status::Done, 7));
        assert_eq!(reply.grants, [Granted { ticket: 9, units: 3, counted: true }]);
        assert_eq!(reply.peers, Some(vec![[2; 16]; 2]));
    }

    #[test]
    fn what_does_not_fit_is_named() {
        let text = |parts: &[Vec<u8>]| read_reply(parts).unwrap_err().to_string();
        assert_eq!(text(&[]), "the parts of the reply must be 5, got 0");
        let mut cut = parts(head());
        cut[0].pop();
        assert_eq!(text(&cut), "the head of the reply must be whole records, got 7");
        let mut long = parts(head());
        long[0].push(0);
        assert_eq!(text(&long), "the head of the reply must be without a rest, got 1");
        let mut odd = parts(head());
        odd[0][0] = 9;
        assert_eq!(text(&odd), "the status of the reply must be at most 6, got 9");
        let mut large = parts(head());
        large[0][2] = 0xff;
        assert!(text(&large).starts_with("the head of the reply must be at most 2^53, got "));
        let mut cause = parts(head());
        cause[2] = vec![0; 9];
        cause[2][8] = 200;
        assert_eq!(text(&cause), "a cause of the reply must be a known one, got 200");
    }

    proptest! {
        #[test]
        fn no_bytes_make_it_panic(blobs in vec(vec(any::<u8>(), 0..200), 0..7)) {
            let _ = read_reply(&blobs);
            for blob in &blobs {
                let _ = read_push(blob);
            }
        }

        #[test]
        fn no_change_of_a_valid_reply_makes_it_panic(at in 0..130_usize, to in any::<u8>(), grants in vec(any::<u8>(), 0..40)) {
            let mut changed = parts(head());
            let at = at % changed[0].len();
            changed[0][at] = to;
            changed[1] = grants;
            let _ = read_reply(&changed);
        }
    }
}
