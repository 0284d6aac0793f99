//! A node's side of the protocol: what it holds, what it tells Redis, and what it believes of the answers.
//!
//! No I/O and no clock of its own; `now` is [`clock::now`](super::clock::now). `docs/PROTOCOL.md` tells why each rule is there.

use std::{
    collections::{HashMap, HashSet, VecDeque},
    sync::Arc,
    time::Duration,
};

use super::{
    outage::Local,
    wire::{
        AskRecord, Call, Epoch, FlowId, Granted, Head, How, Kind, MAX_GRANTS, MAX_OPS, NodeId, Push, Reply,
        RulesRecord, Status, micros,
    },
};
use crate::{
    backend::{Ticket, WakeList},
    config::{LeaseLost, Outage, TooWide},
    error::Cause,
    schedule::{Ask, DrainRate, Rules},
};

/// How often a node with nothing to do renews its lease.
pub(super) const HEARTBEAT: Duration = Duration::from_secs(1);
/// The most the queue clock moves in one call, and with it what one clock jump of the server's takes from a lease.
pub(super) const MAX_STEP: Duration = Duration::from_millis(1_500);
/// How long a node waits that may not restate yet.
pub(super) const REAPING: Duration = Duration::from_millis(20);
/// How often a node calls at least while the queue recovers: each call moves the queue clock by 300 ms at most, and the recovery ends by it.
pub(super) const RECOVERING: Duration = Duration::from_millis(200);

/// What a node is told once.
#[derive(Clone, Debug)]
pub(super) struct Settings {
    pub(super) rules: Rules,
    pub(super) lease: Duration,
    pub(super) lease_lost: LeaseLost,
    pub(super) outage: Outage,
    pub(super) poll: Duration,
    pub(super) ramp: Duration,
}

#[derive(Debug)]
pub(super) struct Node {
    id: NodeId,
    settings: Settings,

    epoch: Epoch,
    version: u64,
    number: u64,
    session: u64,
    /// The last pushed grant that came without a gap.
    received: u64,
    membership: u64,
    peers: Vec<NodeId>,
    /// The counter of this node's own rules, once it has attached.
    rules_set: u64,
    /// What an operator set, as last heard, and what one has set here and Redis has not acknowledged.
    operator: (Option<u64>, u64),
    new_operator: Option<Option<u64>>,

    entries: HashMap<u64, Entry>,
    next_ticket: u64,
    waiting: u64,
    held: u64,
    unsent: VecDeque<u64>,
    ended: VecDeque<Ended>,
    /// Locally granted, which Redis has to be told.
    untold: Vec<u64>,

    under_way: Option<UnderWay>,
    restate: Restate,
    list_from: Option<u64>,
    more: bool,
    attached: bool,
    recovering: bool,
    renewed: Duration,
    last_call: Duration,
    not_before: Duration,
    /// When Redis wants to be called though nothing is new: units open with time.
    wake: Option<Duration>,
    last_news: Duration,

    seen: Seen,
    drain_rate: DrainRate,
    closed: Option<Cause>,
    outage: bool,
    left_outage: bool,
    /// The server's memory was full at the last call that would have grown it. Until one has gone through, what is new goes in
    /// calls of its own, so that no end is refused with it.
    full: bool,
    /// Since when Redis has been wanted and not heard.
    trouble: Option<Duration>,
    local: Option<Local>,
    lost_pushes: u32,
}

/// The queue as a whole, as Redis last told it.
#[derive(Clone, Copy, Debug, Default)]
pub(super) struct Seen {
    pub(super) capacity: u64,
    pub(super) waiting: u64,
    pub(super) in_flight: u64,
    pub(super) live: u64,
    granted: u64,
}

#[derive(Debug)]
struct Entry {
    ticket: Arc<Ticket>,
    ask: Ask,
    record: AskRecord,
    wait: bool,
    stage: Stage,
}

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Stage {
    /// Redis has not been told.
    Unsent,
    /// Redis was told, or may have been; the arrival number is known once it has answered.
    Waiting {
        arrival: u64,
    },
    Held {
        units: u32,
        counted: bool,
    },
}

/// An end that Redis has not acknowledged.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Ended {
    Ticket(u64),
    Permit { ticket: u64, units: u32, flow: FlowId },
}

#[derive(Debug)]
struct UnderWay {
    number: u64,
    sent: Duration,
    kind: Kind,
    last: bool,
    fresh: bool,
    ended: Vec<Ended>,
    /// Tickets that were new to Redis.
    enqueued: Vec<u64>,
    operator: bool,
}

#[derive(Debug)]
enum Restate {
    No,
    Due,
    /// What is still to be told, from the back.
    Going {
        held: Vec<u64>,
        waiting: Vec<u64>,
        first: bool,
    },
}

/// What came of a reply.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Heard {
    Fine,
    /// The queue's state is of another version of this crate's.
    OtherLayout,
    /// The reply is not the one to the call under way: the connection has lost count.
    Mismatch,
}

impl Node {
    pub(super) fn new(id: NodeId, settings: Settings, now: Duration) -> Self {
        Self {
            id,
            seen: Seen { capacity: settings.rules.capacity, ..Seen::default() },
            settings,
            epoch: Epoch::default(),
            version: 0,
            number: 0,
            session: 0,
            received: 0,
            membership: 0,
            peers: vec![],
            rules_set: 0,
            operator: (None, 0),
            new_operator: None,
            entries: HashMap::new(),
            next_ticket: 0,
            waiting: 0,
            held: 0,
            unsent: VecDeque::new(),
            ended: VecDeque::new(),
            untold: vec![],
            under_way: None,
            restate: Restate::Due,
            list_from: None,
            more: false,
            attached: false,
            recovering: false,
            renewed: now,
            last_call: now,
            not_before: Duration::ZERO,
            wake: None,
            last_news: now,
            drain_rate: DrainRate::default(),
            closed: None,
            outage: false,
            left_outage: false,
            full: false,
            trouble: None,
            local: None,
            lost_pushes: 0,
        }
    }

    /// The flows of this node's tickets and permits.
    pub(super) fn flows(&self) -> usize {
        self.entries.values().map(|entry| entry.record.flow).collect::<HashSet<_>>().len()
    }

    pub(super) fn seen(&self) -> Seen {
        self.seen
    }

    /// Tickets and permits of this node: waiting, and units held.
    pub(super) fn own(&self) -> (u64, u64) {
        (self.waiting, self.held)
    }

    pub(super) fn is_ready(&self) -> bool {
        self.attached && !self.recovering && matches!(self.restate, Restate::No)
    }

    fn own_lease(&self) -> Duration {
        self.settings.lease - 2 * MAX_STEP
    }

    /// When the node's own lease ends if nothing renews it.
    pub(super) fn lease_end(&self) -> Duration {
        self.renewed + self.own_lease()
    }

    pub(super) fn lease_is_over(&self, now: Duration) -> bool {
        now > self.lease_end()
    }

    /// How long until `units` more of the queue's have come back.
    pub(super) fn time_for(&mut self, units: u64, now: Duration) -> Option<Duration> {
        self.drain_rate.time_for(units, now)
    }

    /// Whether grants keep coming by polls that a push should have told.
    pub(super) fn misses_pushes(&mut self) -> bool {
        let misses = self.lost_pushes >= 3;
        if misses {
            self.lost_pushes = 0;
        }
        misses
    }

    // ---- the requests' side ----

    pub(super) fn enqueue(
        &mut self,
        ask: &Ask,
        record: AskRecord,
        ticket: &Arc<Ticket>,
        wait: bool,
        wake: &mut WakeList,
    ) -> Option<u64> {
        if let Some(cause) = self.closed {
            ticket.refuse(cause, wake);
            return None;
        }
        if self.outage && self.settings.outage == Outage::Reject {
            ticket.refuse(Cause::Unavailable, wake);
            return None;
        }
        // What Redis bounds is bounded here too while it cannot say so. What is on its way may yet be granted at once.
        if self.waiting >= self.settings.rules.max_waiting.saturating_add(self.seen.capacity) {
            ticket.refuse(Cause::QueueFull, wake);
            return None;
        }
        self.next_ticket += 1;
        let number = self.next_ticket;
        let entry =
            Entry { ticket: Arc::clone(ticket), ask: ask.clone(), record, wait, stage: Stage::Unsent };
        self.entries.insert(number, entry);
        self.waiting += 1;
        self.unsent.push_back(number);
        if let Some(local) = &mut self.local {
            local.enqueue(number, ask);
            self.grant_locally(wake);
            if !wait && self.local.is_some() && self.refuse_waiting(number, Cause::WouldWait, wake) {
                return None;
            }
        }
        Some(number)
    }

    /// Ends a ticket or permit. Whether Redis is to be told.
    pub(super) fn finish(&mut self, number: u64, wake: &mut WakeList) -> bool {
        let Some(entry) = self.entries.remove(&number) else { return false };
        if let Some(local) = &mut self.local {
            local.finish(number);
        }
        match entry.stage {
            // Its enqueue finds nothing to send.
            Stage::Unsent => self.waiting -= 1,
            Stage::Waiting { .. } => {
                self.waiting -= 1;
                self.ended.push_back(Ended::Ticket(number));
            }
            Stage::Held { units, counted } => {
                self.held -= u64::from(units);
                let flow = if counted { entry.record.flow } else { FlowId::default() };
                self.ended.push_back(Ended::Permit { ticket: number, units, flow });
            }
        }
        if self.local.is_some() {
            self.grant_locally(wake);
        }
        true
    }

    pub(super) fn close(&mut self, cause: Cause, wake: &mut WakeList) {
        self.closed = Some(cause);
        self.refuse_all_waiting(cause, wake);
    }

    pub(super) fn revoke(&self, wake: &mut WakeList) {
        for entry in self.entries.values() {
            if matches!(entry.stage, Stage::Held { .. }) {
                entry.ticket.revoke(wake);
            }
        }
    }

    /// An operator's capacity, or `None` for the configured one.
    pub(super) fn set_operator(&mut self, capacity: Option<u64>, wake: &mut WakeList) {
        self.new_operator = Some(capacity);
        if let Some(capacity) = capacity {
            self.capacity_is(capacity, wake);
        }
    }

    fn refuse_all_waiting(&mut self, cause: Cause, wake: &mut WakeList) {
        let waiting: Vec<u64> = self.waiting_numbers().collect();
        for number in waiting {
            self.refuse_waiting(number, cause, wake);
        }
    }

    fn waiting_numbers(&self) -> impl Iterator<Item = u64> {
        let waits = |entry: &Entry| !matches!(entry.stage, Stage::Held { .. });
        self.entries.iter().filter(move |(_, entry)| waits(entry)).map(|(&number, _)| number)
    }

    /// Refuses a ticket that waits; it is told to Redis that it has ended.
    fn refuse_waiting(&mut self, number: u64, cause: Cause, wake: &mut WakeList) -> bool {
        let Some(entry) = self.entries.get(&number) else { return false };
        if matches!(entry.stage, Stage::Held { .. }) {
            return false;
        }
        entry.ticket.refuse(cause, wake);
        self.finish(number, wake);
        true
    }

    fn capacity_is(&mut self, capacity: u64, wake: &mut WakeList) {
        let lowered = capacity < self.seen.capacity;
        self.seen.capacity = capacity;
        if lowered && self.settings.rules.too_wide == TooWide::Refuse {
            let widest = capacity.min(self.settings.rules.flow_cap);
            let too_wide: Vec<u64> =
                self.waiting_numbers().filter(|n| u64::from(self.entries[n].record.cost) > widest).collect();
            for number in too_wide {
                self.refuse_waiting(number, Cause::TooWide, wake);
            }
        }
    }

    // ---- outages ----

    /// Redis is wanted and not there.
    pub(super) fn trouble(&mut self, now: Duration) {
        self.trouble.get_or_insert(now);
    }

    /// When there is something to be seen to while the engine waits: an outage, or the end of the node's own lease.
    pub(super) fn watch(&self, timeout: Duration, aborts: bool) -> Option<Duration> {
        let outage = self.outage_due(timeout).filter(|_| !self.outage);
        let lease =
            (aborts && self.attached && self.held > 0).then(|| self.lease_end() + Duration::from_millis(1));
        match (outage, lease) {
            (Some(outage), Some(lease)) => Some(outage.min(lease)),
            (outage, lease) => outage.or(lease),
        }
    }

    pub(super) fn outage_is_due(&self, now: Duration, timeout: Duration) -> bool {
        !self.outage && self.outage_due(timeout).is_some_and(|due| due <= now)
    }

    fn outage_due(&self, timeout: Duration) -> Option<Duration> {
        let since = match (self.trouble, &self.under_way) {
            (Some(trouble), Some(call)) => trouble.min(call.sent),
            (Some(trouble), None) => trouble,
            (None, Some(call)) => call.sent,
            (None, None) => return None,
        };
        Some(since + timeout)
    }

    /// Redis is out of reach: from now on the policy decides. Whether that is new.
    pub(super) fn enter_outage(&mut self, wake: &mut WakeList) -> bool {
        let new = !std::mem::replace(&mut self.outage, true);
        if new {
            self.begin_outage(wake);
        }
        new
    }

    fn begin_outage(&mut self, wake: &mut WakeList) {
        let share = match self.settings.outage {
            Outage::Wait => return,
            Outage::Reject => return self.refuse_all_waiting(Cause::Unavailable, wake),
            Outage::Local => match (self.attached, self.seen.capacity) {
                (false, _) => 0,
                (true, u64::MAX) => u64::MAX,
                (true, capacity) => capacity / self.seen.live.max(1),
            },
            Outage::LocalShare(units) => units.into(),
            Outage::Admit(limit) => limit.as_units(),
        };
        let mut local = Local::new(self.settings.rules, self.seen.capacity, share);
        let mut numbers: Vec<(u64, &Entry)> =
            self.entries.iter().map(|(&number, entry)| (number, entry)).collect();
        numbers.sort_unstable_by_key(|(number, _)| *number);
        for &(number, entry) in &numbers {
            if let Stage::Held { units, .. } = entry.stage {
                local.hold(number, &entry.ask, units);
            }
        }
        for &(number, entry) in &numbers {
            if !matches!(entry.stage, Stage::Held { .. }) {
                local.enqueue(number, &entry.ask);
            }
        }
        self.local = Some(local);
        self.grant_locally(wake);
    }

    fn grant_locally(&mut self, wake: &mut WakeList) {
        let Some(mut local) = self.local.take() else { return };
        while let Some((number, units)) = local.grant_next() {
            let Some(entry) = self.entries.get_mut(&number) else {
                local.finish(number);
                continue;
            };
            entry.stage = Stage::Held { units, counted: self.settings.rules.flow_cap != u64::MAX };
            self.waiting -= 1;
            self.held += u64::from(units);
            self.untold.push(number);
            entry.ticket.grant(units, wake);
        }
        self.local = Some(local);
    }

    /// Redis answers.
    fn leave_outage(&mut self) {
        self.left_outage |= std::mem::replace(&mut self.outage, false);
        self.trouble = None;
        self.local = None;
    }

    /// Whether an outage ended since this was last asked.
    pub(super) fn left_outage(&mut self) -> bool {
        std::mem::take(&mut self.left_outage)
    }

    /// The server's memory is full: it has refused the call under way whole. What was new in it is refused.
    pub(super) fn refused_whole(&mut self, wake: &mut WakeList) {
        let enqueued =
            self.under_way.as_mut().map(|call| std::mem::take(&mut call.enqueued)).unwrap_or_default();
        self.take_back();
        self.full = true;
        for number in enqueued {
            self.refused(number, Cause::Unavailable, wake);
        }
    }

    // ---- calls ----

    /// When the next call is due.
    pub(super) fn due(&self) -> Duration {
        let at_once = !matches!(self.restate, Restate::No)
            || !self.unsent.is_empty()
            || !self.ended.is_empty()
            || !self.untold.is_empty()
            || self.list_from.is_some()
            || self.more
            || self.new_operator.is_some();
        let due = if at_once {
            Duration::ZERO
        } else if self.recovering {
            self.last_call + self.settings.poll.min(RECOVERING)
        } else if self.waiting > 0 {
            // News by push say as much as a poll does, but for the lease.
            (self.last_call.max(self.last_news) + self.settings.poll).min(self.last_call + HEARTBEAT)
        } else {
            self.last_call + HEARTBEAT
        };
        due.min(self.wake.unwrap_or(Duration::MAX)).max(self.not_before)
    }

    /// The next call. None other is under way, since one at a time is: an earlier one has been answered or given up.
    pub(super) fn next_call(&mut self, now: Duration, wake: &mut WakeList) -> Call {
        debug_assert!(self.under_way.is_none());
        self.check_lease(now, wake);
        self.number += 1;
        self.last_call = now;
        self.more = false;
        self.wake = None;
        let mut call = Call::default();
        let mut ended = vec![];
        while call.ops() < MAX_OPS
            && let Some(end) = self.ended.pop_front()
        {
            match end {
                Ended::Ticket(ticket) => call.finish(ticket),
                Ended::Permit { ticket, units, flow } => call.release(ticket, units, flow),
            }
            ended.push(end);
        }
        let (mut kind, mut last, mut fresh) = (Kind::Ordinary, false, false);
        let mut enqueued = vec![];
        if matches!(self.restate, Restate::Due) {
            self.begin_restate(wake);
        }
        let mut operator = false;
        if let Restate::Going { mut held, mut waiting, first } =
            std::mem::replace(&mut self.restate, Restate::No)
        {
            kind = if first { Kind::Restate } else { Kind::RestateOn };
            if first {
                // Pushes of older sessions are void from here on.
                (self.session, self.received) = (self.number, 0);
                fresh = self.rules_set == 0;
                self.rules(self.operator).write(&mut call.rules);
                self.peers.iter().for_each(|peer| call.peers.extend(peer));
            }
            self.write_held(&mut call, &mut held);
            while call.ops() < MAX_OPS
                && let Some(number) = waiting.pop()
            {
                self.write_again(&mut call, number, &mut enqueued);
            }
            last = held.is_empty() && waiting.is_empty();
            self.restate = Restate::Going { held, waiting, first: false };
        } else {
            let mut untold = std::mem::take(&mut self.untold);
            self.write_held(&mut call, &mut untold);
            self.untold = untold;
            let alone = self.full && call.ops() > 0;
            while call.ops() < MAX_OPS
                && !alone
                && let Some(number) = self.unsent.pop_front()
            {
                if let Some(entry) = self.entries.get_mut(&number)
                    && entry.stage == Stage::Unsent
                {
                    entry.stage = Stage::Waiting { arrival: 0 };
                    call.enqueue(number, &entry.record, if entry.wait { How::Wait } else { How::AtOnce });
                    enqueued.push(number);
                }
            }
            if let Some(capacity) = self.new_operator {
                operator = true;
                self.rules((capacity, self.operator.1)).write(&mut call.rules);
            }
        }
        let list_from = if last { Some(0) } else { self.list_from };
        let head = Head {
            node: self.id,
            epoch: self.epoch,
            number: self.number,
            version: self.version,
            received: self.received,
            lease_micros: micros(self.settings.lease),
            membership: self.membership,
            list_from: list_from.unwrap_or(0),
            kind,
            last,
            fresh,
            lists: list_from.is_some(),
            max_grants: MAX_GRANTS,
        };
        head.write(&mut call.head);
        self.under_way =
            Some(UnderWay { number: self.number, sent: now, kind, last, fresh, ended, enqueued, operator });
        call
    }

    /// The last call: whatever this node still has goes back.
    pub(super) fn detach_call(&mut self) -> Option<Call> {
        if !self.attached || self.under_way.is_some() {
            return None;
        }
        self.number += 1;
        let mut call = Call::default();
        let head = Head {
            node: self.id,
            epoch: self.epoch,
            number: self.number,
            version: self.version,
            received: self.received,
            lease_micros: micros(self.settings.lease),
            membership: self.membership,
            list_from: 0,
            kind: Kind::Detach,
            last: false,
            fresh: false,
            lists: false,
            max_grants: MAX_GRANTS,
        };
        head.write(&mut call.head);
        self.attached = false;
        Some(call)
    }

    fn rules(&self, (operator, operator_set): (Option<u64>, u64)) -> RulesRecord {
        RulesRecord {
            rules: self.settings.rules,
            ramp_micros: micros(self.settings.ramp),
            set: self.rules_set,
            operator,
            operator_set,
        }
    }

    fn begin_restate(&mut self, wake: &mut WakeList) {
        let unanswered = |entry: &Entry| !entry.wait && matches!(entry.stage, Stage::Waiting { .. });
        let unanswered: Vec<u64> =
            self.entries.iter().filter(|(_, entry)| unanswered(entry)).map(|(&number, _)| number).collect();
        for number in unanswered {
            // It asked whether it could be granted at once, and nobody knows.
            self.refuse_waiting(number, Cause::Unavailable, wake);
        }
        let mut held = vec![];
        let mut waiting = vec![];
        for (&number, entry) in &self.entries {
            match entry.stage {
                Stage::Held { .. } => held.push(number),
                Stage::Unsent if self.full => {}
                Stage::Unsent => waiting.push((u64::MAX, number)),
                // Without a number it was told last.
                Stage::Waiting { arrival: 0 } => waiting.push((u64::MAX - 1, number)),
                Stage::Waiting { arrival } => waiting.push((arrival, number)),
            }
        }
        held.sort_unstable_by(|a, b| b.cmp(a));
        waiting.sort_unstable_by(|a, b| b.cmp(a));
        if !self.full {
            self.unsent.clear();
        }
        self.untold.clear();
        self.list_from = None;
        let waiting = waiting.into_iter().map(|(_, number)| number).collect();
        self.restate = Restate::Going { held, waiting, first: true };
    }

    fn write_held(&self, call: &mut Call, held: &mut Vec<u64>) {
        while call.ops() < MAX_OPS
            && let Some(number) = held.pop()
        {
            if let Some(entry) = self.entries.get(&number)
                && let Stage::Held { units, counted } = entry.stage
            {
                let flow = if counted { entry.record.flow } else { FlowId::default() };
                call.hold(number, units, flow);
            }
        }
    }

    fn write_again(&mut self, call: &mut Call, number: u64, enqueued: &mut Vec<u64>) {
        let Some(entry) = self.entries.get_mut(&number) else { return };
        let arrival = match entry.stage {
            Stage::Unsent => {
                entry.stage = Stage::Waiting { arrival: 0 };
                // Never sent before, so nothing of it is there to be found, and the bounds count for it.
                let how = if entry.wait { How::Wait } else { How::AtOnce };
                enqueued.push(number);
                return call.enqueue(number, &entry.record, how);
            }
            Stage::Waiting { arrival } => arrival,
            // Granted since: Redis knows, or is told as of a local grant.
            Stage::Held { .. } => return,
        };
        call.enqueue(number, &entry.record, How::Again { arrival });
    }

    /// The outcome of the call under way is unknown, or there was none and the connection is new.
    pub(super) fn broken(&mut self) {
        if let Some(sent) = self.take_back() {
            self.trouble(sent);
        }
    }

    /// The engine's runtime has ended, and nothing is wanted of Redis until there is another. Whoever waits on one that goes on is
    /// woken, to start the engine there.
    pub(super) fn abandoned(&mut self, wake: &mut WakeList) {
        self.take_back();
        self.trouble = None;
        for entry in self.entries.values() {
            entry.ticket.nudge(wake);
        }
    }

    /// The call under way has to be told again by a restate. When it was sent.
    fn take_back(&mut self) -> Option<Duration> {
        self.restate = Restate::Due;
        let under_way = self.under_way.take()?;
        for end in under_way.ended.into_iter().rev() {
            self.ended.push_front(end);
        }
        Some(under_way.sent)
    }

    pub(super) fn on_reply(&mut self, reply: &Reply, now: Duration, wake: &mut WakeList) -> Heard {
        let Some(under_way) = self.under_way.take_if(|call| call.number == reply.number) else {
            return Heard::Mismatch;
        };
        match reply.status {
            Status::Done => {}
            Status::OtherLayout => {
                self.under_way = Some(under_way);
                self.take_back();
                return Heard::OtherLayout;
            }
            Status::Reaping | Status::Restate | Status::Stale => {
                self.under_way = Some(under_way);
                self.take_back();
                if reply.status == Status::Reaping {
                    self.not_before = now + REAPING;
                }
                self.leave_outage();
                return Heard::Fine;
            }
        }
        if under_way.kind == Kind::Ordinary {
            // Before this renewal counts: what the lease has lost is lost.
            self.check_lease(now, wake);
        }
        self.renewed = self.renewed.max(under_way.sent);
        if self.lease_is_over(now) {
            // We slept. What this grants may be someone else's by now.
            self.check_lease(now, wake);
            return Heard::Fine;
        }
        self.attached = true;
        self.full &= under_way.enqueued.is_empty();
        self.leave_outage();
        if matches!(under_way.kind, Kind::Restate | Kind::RestateOn) {
            (self.epoch, self.version) = (reply.epoch, reply.version);
            if under_way.fresh {
                self.rules_set = reply.rules_set;
            }
            if under_way.last && matches!(self.restate, Restate::Going { .. }) {
                self.restate = Restate::No;
            }
        }
        if under_way.operator {
            self.new_operator = None;
        }
        self.version = self.version.max(reply.version);
        self.membership = reply.membership;
        if let Some(peers) = &reply.peers {
            self.peers.clone_from(peers);
        }
        self.recovering = reply.recovering;
        self.more = reply.more;
        self.list_from = reply.list_from;
        self.wake = (reply.wake_micros > 0).then(|| now + Duration::from_micros(reply.wake_micros));
        if reply.operator_set >= self.operator.1 {
            self.operator = (reply.operator, reply.operator_set);
        }
        self.note(reply, now, wake);
        for &(ticket, arrival) in &reply.places {
            if let Some(Entry { stage: Stage::Waiting { arrival: known }, .. }) =
                self.entries.get_mut(&ticket)
            {
                *known = arrival;
            }
        }
        for &(ticket, cause) in &reply.refusals {
            self.refused(ticket, cause, wake);
        }
        let told_late = reply.pushed.saturating_sub(self.received);
        for &granted in &reply.grants {
            self.granted(granted, wake);
        }
        // A push may be a little later than the reply that tells the same, so one or two say nothing.
        self.lost_pushes = if told_late > 0 { self.lost_pushes + 1 } else { 0 };
        self.received = self.received.max(reply.pushed);
        Heard::Fine
    }

    fn note(&mut self, reply: &Reply, now: Duration, wake: &mut WakeList) {
        let granted = u32::try_from(reply.granted.saturating_sub(self.seen.granted)).unwrap_or(u32::MAX);
        if self.seen.granted > 0 {
            self.drain_rate.released(granted, || now);
        }
        self.drain_rate.count(reply.waiting > 0, now);
        if self.new_operator.is_none() {
            self.capacity_is(reply.capacity(), wake);
        }
        self.seen = Seen {
            capacity: self.seen.capacity,
            waiting: reply.waiting,
            in_flight: reply.in_flight,
            live: reply.live,
            granted: reply.granted,
        };
    }

    pub(super) fn on_push(&mut self, push: &Push, now: Duration, wake: &mut WakeList) {
        // While Redis is out of reach a restate is due, whose reply tells all.
        if push.session < self.session || self.outage {
            return;
        }
        if push.epoch != self.epoch {
            if self.under_way.is_none() && matches!(self.restate, Restate::No) {
                self.restate = Restate::Due;
            }
            return;
        }
        if self.lease_is_over(now) {
            self.check_lease(now, wake);
            return;
        }
        if push.first <= self.received + 1 {
            // Otherwise one before it is lost, and the next reply tells it.
            self.received = self.received.max((push.first + push.grants.len() as u64).saturating_sub(1));
            self.last_news = now;
        }
        self.lost_pushes = 0;
        for &granted in &push.grants {
            self.granted(granted, wake);
        }
    }

    fn granted(&mut self, granted: Granted, wake: &mut WakeList) {
        let Granted { ticket: number, units, counted } = granted;
        if units == 0 {
            return self.refused(number, Cause::TooWide, wake);
        }
        match self.entries.get_mut(&number) {
            Some(Entry { stage: Stage::Held { .. }, .. }) => {}
            Some(entry) => {
                entry.stage = Stage::Held { units, counted };
                self.waiting -= 1;
                self.held += u64::from(units);
                // Decided otherwise in this instant, its owner ends it.
                entry.ticket.grant(units, wake);
            }
            None => {
                // Nobody here has it, so it goes back; unless that is under way, which is told once more without harm.
                if !self.ended.contains(&Ended::Ticket(number)) {
                    self.ended.push_back(Ended::Ticket(number));
                }
            }
        }
    }

    fn refused(&mut self, number: u64, cause: Cause, wake: &mut WakeList) {
        if let Some(entry) = self.entries.get(&number)
            && !matches!(entry.stage, Stage::Held { .. })
        {
            entry.ticket.refuse(cause, wake);
            self.entries.remove(&number);
            self.waiting -= 1;
        }
    }

    /// Past its own lease a node can be sure of nothing it holds: it restates before any ordinary call, and with
    /// [`LeaseLost::Abort`] gives up what it holds. How many permits that were.
    pub(super) fn check_lease(&mut self, now: Duration, wake: &mut WakeList) -> usize {
        if !self.attached || !self.lease_is_over(now) {
            return 0;
        }
        if matches!(self.restate, Restate::No) {
            self.restate = Restate::Due;
        }
        if self.settings.lease_lost == LeaseLost::Continue {
            return 0;
        }
        let held: Vec<u64> = self
            .entries
            .iter()
            .filter(|(_, entry)| matches!(entry.stage, Stage::Held { .. }))
            .map(|(&number, _)| number)
            .collect();
        for &number in &held {
            self.entries[&number].ticket.revoke(wake);
            self.finish(number, wake);
        }
        held.len()
    }
}
