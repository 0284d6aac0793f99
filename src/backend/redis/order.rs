//! The script's fair order, held against `schedule`.

use std::{
    cell::Cell,
    collections::{BTreeMap, BTreeSet, HashMap},
};

use proptest::{collection::vec, prelude::*, test_runner::TestRunner};
use redis::{Cmd, aio::MultiplexedConnection, cmd};

use super::{
    keys::{Keys, flow_id},
    script::Script,
    testing,
    wire::{AskRecord, Call, Head, How, Kind, NodeId, Reply, RulesRecord, Status, read_reply},
};
use crate::{
    config::TooWide,
    error::Cause,
    schedule::{Ask, Entered, FairOrder, Place, Priority, Rules, Weight},
};

/// One of the requests of a run: its node and its number there.
type Ticket = (usize, u64);

#[derive(Clone, Debug)]
struct AskKind {
    flow: usize,
    cost: u32,
    weight: u32,
    level: u8,
}

#[derive(Clone, Debug)]
enum Op {
    Enqueue(AskKind, bool),
    /// Ends a ticket of the node's, counted from the oldest, waiting or granted.
    Finish(usize),
}

#[derive(Clone, Debug)]
struct Step {
    node: usize,
    ops: Vec<Op>,
    resize: Option<u64>,
}

#[derive(Clone, Debug)]
struct Case {
    capacity: u64,
    flow_cap: u64,
    max_waiting: u64,
    max_waiting_per_flow: u64,
    too_wide: TooWide,
    priority_step: u32,
    steps: Vec<Step>,
}

fn case() -> impl Strategy<Value = Case> {
    let cost = prop_oneof![4 => 1..4_u32, 1 => 1..30_u32];
    let weight = prop_oneof![3 => 1..5_u32, 1 => 1..=1_000_u32];
    let kind = (0..6_usize, cost, weight, 0..8_u8).prop_map(|(flow, cost, weight, level)| AskKind {
        flow,
        cost,
        weight,
        level,
    });
    let op = prop_oneof![
        6 => (kind, prop::bool::weighted(0.9)).prop_map(|(kind, wait)| Op::Enqueue(kind, wait)),
        5 => (0..30_usize).prop_map(Op::Finish),
    ];
    let step = (0..3_usize, vec(op, 0..8), prop::option::weighted(0.1, 1..30_u64))
        .prop_map(|(node, ops, resize)| Step { node, ops, resize });
    let cap = prop_oneof![2 => Just(u64::MAX), 1 => 1..8_u64];
    let bound = prop_oneof![3 => Just(u64::MAX), 1 => 1..12_u64];
    (1..20_u64, cap, bound.clone(), bound, any::<bool>(), 0..20_u32, vec(step, 1..40)).prop_map(
        |(capacity, flow_cap, max_waiting, max_waiting_per_flow, refuse, priority_step, steps)| Case {
            capacity,
            flow_cap,
            max_waiting,
            max_waiting_per_flow,
            too_wide: if refuse { TooWide::Refuse } else { TooWide::RunAlone },
            priority_step,
            steps,
        },
    )
}

fn ask(kind: &AskKind) -> Ask {
    // Flow 0 stands for asks that name none.
    let ask = Ask::new()
        .weight(Weight::new(kind.weight).unwrap())
        .priority(Priority::new(kind.level).unwrap())
        .cost(kind.cost.try_into().unwrap());
    if kind.flow == 0 { ask } else { ask.flow(kind.flow.to_string()) }
}

/// The reference, with all that one call does done one by one.
struct Reference {
    order: FairOrder<Ticket>,
    places: HashMap<Ticket, Place>,
    permits: BTreeMap<Ticket, u32>,
    waiting: BTreeSet<Ticket>,
    refused: Vec<(Ticket, Cause)>,
}

impl Reference {
    fn finish(&mut self, ticket: Ticket) {
        if let Some(place) = self.places.remove(&ticket) {
            self.order.finish(place);
        }
        self.permits.remove(&ticket);
        self.waiting.remove(&ticket);
    }

    fn enqueue(&mut self, ticket: Ticket, kind: &AskKind, wait: bool) {
        let entered = self.order.enqueue(&ask(kind), ticket);
        match entered {
            Ok(Entered::Granted { place, units }) => {
                self.places.insert(ticket, place);
                self.permits.insert(ticket, units);
            }
            Ok(Entered::Waiting(place)) if wait => {
                self.places.insert(ticket, place);
                self.waiting.insert(ticket);
            }
            Ok(Entered::Waiting(place)) => {
                self.order.finish(place);
                self.refused.push((ticket, Cause::WouldWait));
            }
            Err(_) if !wait => self.refused.push((
                ticket,
                if matches!(entered, Err(Cause::TooWide)) { Cause::TooWide } else { Cause::WouldWait },
            )),
            Err(cause) => self.refused.push((ticket, cause)),
        }
    }

    fn dispatch(&mut self) {
        while let Some(grant) = self.order.grant_next() {
            let (ticket, units) = (*grant.ticket, grant.units);
            self.waiting.remove(&ticket);
            self.permits.insert(ticket, units);
        }
    }
}

struct Real {
    connection: MultiplexedConnection,
    script: String,
    keys: Keys,
    nodes: [Node; 3],
    rules: RulesRecord,
}

#[derive(Clone, Copy, Debug, Default)]
struct Node {
    epoch: [u8; 16],
    number: u64,
    version: u64,
}

fn id(node: usize) -> NodeId {
    [u8::try_from(node).unwrap() + b'a'; 16]
}

impl Real {
    async fn call(&mut self, node: usize, kind: Kind, mut call: Call) -> Reply {
        let known = &mut self.nodes[node];
        known.number += 1;
        let head = Head {
            node: id(node),
            epoch: known.epoch,
            number: known.number,
            version: known.version,
            received: 0,
            lease_micros: 3_600_000_000,
            membership: 0,
            list_from: 0,
            kind,
            last: kind == Kind::Restate,
            fresh: kind == Kind::Restate,
            lists: false,
            max_grants: 1_000,
        };
        head.write(&mut call.head);
        let parts: Vec<Vec<u8>> = command(&self.script, &self.keys, &call)
            .query_async(&mut self.connection)
            .await
            .expect("the script runs");
        let reply = read_reply(&parts).expect("well formed");
        assert_eq!(reply.status, Status::Done);
        (known.epoch, known.version) = (reply.epoch, reply.version);
        reply
    }

    async fn permits(&mut self) -> BTreeMap<Ticket, u32> {
        let members: Vec<Vec<u8>> = cmd("ZRANGE")
            .arg(&self.keys.keys[5])
            .arg(0)
            .arg(-1)
            .query_async(&mut self.connection)
            .await
            .unwrap();
        let number = |bytes: &[u8]| bytes.iter().fold(0_u64, |n, &byte| n << 8 | u64::from(byte));
        members
            .iter()
            .map(|m| {
                let units = u32::try_from(number(&m[24..28])).unwrap();
                ((usize::from(m[0] - b'a'), number(&m[16..24])), units)
            })
            .collect()
    }

    async fn keys(&mut self) -> Vec<String> {
        let mut left = vec![];
        for key in &self.keys.keys {
            if cmd("EXISTS").arg(key).query_async::<u8>(&mut self.connection).await.unwrap() == 1 {
                left.push(key.rsplit(':').next().unwrap().to_owned());
            }
        }
        left
    }
}

fn command(script: &str, keys: &Keys, call: &Call) -> Cmd {
    let mut command = cmd("EVALSHA");
    command.arg(script).arg(10).arg(&keys.keys);
    for part in
        [&call.head, &call.rules, &call.peers, &call.enqueues, &call.releases, &call.finishes, &call.held]
    {
        command.arg(&part[..]);
    }
    command.arg(&keys.channels).arg("PUBLISH");
    command
}

fn record(kind: &AskKind) -> AskRecord {
    AskRecord {
        flow: flow_id(&ask(kind)),
        cost: kind.cost,
        weight: kind.weight.try_into().unwrap(),
        level: kind.level,
    }
}

async fn run(
    case: Case,
    connection: MultiplexedConnection,
    name: &str,
    script: String,
) -> Result<(), TestCaseError> {
    let rules = Rules {
        capacity: case.capacity,
        flow_cap: case.flow_cap,
        max_waiting: case.max_waiting,
        max_waiting_per_flow: case.max_waiting_per_flow,
        too_wide: case.too_wide,
        priority_step: case.priority_step,
    };
    let mut reference = Reference {
        order: FairOrder::new(rules),
        places: HashMap::new(),
        permits: BTreeMap::new(),
        waiting: BTreeSet::new(),
        refused: vec![],
    };
    let mut real = Real {
        connection,
        script,
        keys: Keys::new("order", name),
        nodes: [Node::default(); 3],
        rules: RulesRecord { rules, ramp_micros: 0, set: 0, operator: None, operator_set: 0 },
    };
    for node in 0..3 {
        let mut call = Call::default();
        real.rules.write(&mut call.rules);
        real.call(node, Kind::Restate, call).await;
    }
    let (mut tickets, mut resized) = (0, 0);
    let mut known: [Vec<u64>; 3] = Default::default();
    for step in case.steps {
        let mut call = Call::default();
        reference.refused.clear();
        // What a lower capacity makes too wide is refused by each node, which this run has none of.
        if let Some(capacity) = step.resize
            && case.too_wide == TooWide::RunAlone
        {
            resized += 1;
            RulesRecord { operator: Some(capacity), operator_set: resized, ..real.rules }
                .write(&mut call.rules);
            reference.order.resize(capacity);
        }
        let mine = &mut known[step.node];
        let mut ended = BTreeSet::new();
        for op in &step.ops {
            if let Op::Finish(nth) = op
                && let Some(&ticket) = mine.get(*nth)
                && ended.insert(ticket)
            {
                // The permits first, told with their units, then those whose state the node may not know: as the script has it.
                call.finish(ticket);
            }
        }
        // In the order in which the script ends them.
        for ticket in call.finishes.chunks(8).map(|bytes| u64::from_be_bytes(bytes.try_into().unwrap())) {
            reference.finish((step.node, ticket));
        }
        mine.retain(|ticket| !ended.contains(ticket));
        for op in &step.ops {
            if let Op::Enqueue(kind, wait) = op {
                tickets += 1;
                mine.push(tickets);
                call.enqueue(tickets, &record(kind), if *wait { How::Wait } else { How::AtOnce });
                reference.enqueue((step.node, tickets), kind, *wait);
            }
        }
        reference.dispatch();
        let reply = real.call(step.node, Kind::Ordinary, call).await;
        let refused: Vec<_> =
            reply.refusals.iter().map(|&(ticket, cause)| ((step.node, ticket), cause)).collect();
        prop_assert_eq!(&refused, &reference.refused, "refusals");
        let permits = real.permits().await;
        prop_assert_eq!(&permits, &reference.permits, "permits");
        prop_assert_eq!(
            (reply.waiting, reply.in_flight),
            (reference.order.waiting(), reference.order.in_flight())
        );
    }
    for (node, known) in known.iter().enumerate() {
        let mut call = Call::default();
        for ticket in known {
            call.finish(*ticket);
            reference.finish((node, *ticket));
        }
        reference.dispatch();
        real.call(node, Kind::Ordinary, call).await;
        let permits = real.permits().await;
        prop_assert_eq!(&permits, &reference.permits, "permits at the end");
    }
    let mut left = real.keys().await;
    // Grants told by a push stay until their node has acknowledged them, which these do not.
    left.retain(|key| key != "outbox");
    prop_assert_eq!(left, ["state", "nodes", "calls"].map(String::from).to_vec(), "what is left");
    Ok(())
}

/// The script of a test: without the pause for recovery, and moving its virtual times back that often.
fn script(rebase_at: &str) -> String {
    let changed = |source: &str, from: &str, to: &str| {
        assert_eq!(source.matches(from).count(), 1, "{from}");
        source.replace(from, to)
    };
    let source = changed(&Script::new().growing, "= 1500000, 300000, 1800000", "= 1500000, 300000, 0");
    changed(&source, "REBASE_AT = 1024, 2 ^ 52", &format!("REBASE_AT = 1024, {rebase_at}"))
}

fn hold(name: &str, rebase_at: &str, cases: u32) {
    let runtime = tokio::runtime::Builder::new_current_thread().enable_all().build().unwrap();
    let Some((_server, mut connection)) = runtime.block_on(testing::server()) else { return };
    let hash = runtime.block_on(testing::load(&mut connection, &script(rebase_at)));
    let config = ProptestConfig {
        cases,
        failure_persistence: None,
        max_shrink_iters: 2_000,
        ..ProptestConfig::default()
    };
    let runs = Cell::new(0);
    let one = |case| {
        runs.set(runs.get() + 1);
        let name = format!("{name}{}", runs.get());
        runtime.block_on(run(case, connection.clone(), &name, hash.clone()))
    };
    TestRunner::new(config).run(&case(), one).unwrap_or_else(|error| panic!("{error}"));
}

fn cases() -> u32 {
    std::env::var("FAIRQ_ORDER_CASES").map_or(300, |cases| cases.parse().expect("a number"))
}

// The whole order, call by call: random sequences of three nodes through the script and through `schedule`.
// `FAIRQ_ORDER_CASES=10000 cargo test --release --features redis --lib order` is the long form.
#[test]
fn the_script_grants_what_the_reference_grants() {
    hold("order", "2 ^ 52", cases());
}

#[test]
fn moving_the_virtual_times_back_changes_no_grant() {
    hold("rebase", "3000", cases() / 3);
}
