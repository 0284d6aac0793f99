//! `docs/PROTOCOL.md` and the code say the same. Names, sizes and numbers are taken from the document's tables.

use std::collections::BTreeSet;

use super::{
    keys::KEYS,
    node::{HEARTBEAT, MAX_STEP, REAPING, RECOVERING},
    script::{PROBE, STEPS},
    wire::{
        AskRecord, Call, Epoch, FlowId, Head, How, Kind, MAX_GRANTS, MAX_OPS, NodeId, RulesRecord, Status,
        UNBOUNDED, read_push, read_reply,
    },
};
use crate::{config::TooWide, error::Cause, schedule::Rules};

const TEXT: &str = include_str!("../../../docs/PROTOCOL.md");

/// The rows of the first table behind a line that begins so, without its heading.
fn table(behind: &str) -> Vec<Vec<&'static str>> {
    let mut lines = TEXT.lines().skip_while(|line| !line.starts_with(behind)).skip(1);
    let rows =
        lines.by_ref().skip_while(|line| !line.starts_with('|')).take_while(|line| line.starts_with('|'));
    let cells =
        |row: &'static str| row.trim_matches('|').split('|').map(|cell| cell.trim().trim_matches('`'));
    let rows: Vec<Vec<&str>> = rows.skip(2).map(|row| cells(row).collect()).collect();
    assert!(!rows.is_empty(), "no table behind {behind:?}");
    rows
}

/// The size of a record: what its heading says, which is the sum of its fields.
fn size(heading: &str) -> usize {
    let line = TEXT.lines().find(|line| line.starts_with(heading)).unwrap_or_else(|| panic!("{heading:?}"));
    let said = line.rsplit_once('(').and_then(|(_, rest)| rest.strip_suffix(" bytes)")?.parse().ok());
    let sum = table(heading).iter().map(|row| row[1].parse::<usize>().expect("a number of bytes")).sum();
    assert_eq!(said, Some(sum), "{heading}");
    sum
}

/// The size of a record that the script packs.
fn packed(format: &str) -> usize {
    let (mut size, mut rest) = (0, format.trim_start_matches('>'));
    while let Some(kind) = rest.chars().next() {
        let digits = rest[1..].bytes().take_while(u8::is_ascii_digit).count();
        let number = rest[1..=digits].parse().ok();
        size += match (kind, number) {
            ('B', None) => 1,
            ('d', None) => 8,
            ('I' | 'c', Some(number)) => number,
            _ => panic!("{format}"),
        };
        rest = &rest[1 + digits..];
    }
    size
}

/// What stands in the script between `before` and the next quote.
fn format_after(before: &str) -> usize {
    let script = STEPS.concat();
    let (_, rest) = script.split_once(before).unwrap_or_else(|| panic!("{before:?} in the script"));
    packed(rest.split_once('\'').expect("the format ends").0)
}

/// A number that the script names, whose names and values stand in one line.
fn constant(name: &str) -> Option<u64> {
    let script = STEPS.concat();
    script.lines().find_map(|line| {
        let line = line.split(" -- ").next()?;
        let (names, values) = line.strip_prefix("local ")?.split_once(" = ")?;
        let place = names.split(", ").position(|other| other == name)?;
        values.split(", ").nth(place)?.parse().ok()
    })
}

fn quoted_after<'a>(text: &'a str, before: &str) -> BTreeSet<&'a str> {
    text.split(before).skip(1).filter_map(|rest| rest.split('\'').next()).collect()
}

fn head(kind: Kind) -> Head {
    Head {
        node: NodeId::default(),
        epoch: Epoch::default(),
        number: 0,
        version: 0,
        received: 0,
        lease_micros: 0,
        membership: 0,
        list_from: 0,
        kind,
        last: false,
        fresh: false,
        lists: false,
        max_grants: 0,
    }
}

#[test]
fn the_keys_are_those_of_the_document() {
    let named: Vec<&str> = table("## Keys").iter().map(|row| row[0]).collect();
    assert_eq!(named, KEYS);
    let script = STEPS.concat();
    assert!(script.contains(&format!("-- KEYS   {}\n", KEYS.join(" "))));
}

#[test]
fn the_state_has_the_fields_of_the_document() {
    let script = STEPS.concat();
    let (_, rest) = script.split_once("local NUMBERS = {").unwrap();
    let numbers = rest.split_once('}').unwrap().0.split(',').map(|name| name.trim().trim_matches('\''));
    let numbers: Vec<&str> = numbers.filter(|name| !name.is_empty()).collect();
    let named: Vec<&str> = table("### The state").iter().map(|row| row[0]).collect();
    assert_eq!(named, numbers);
    let whole = 8 + 16 + 8 * numbers.len() + 8 * packed("BdI4");
    assert_eq!(table("## Keys")[0][3], format!("{whole} bytes"), "layout, epoch and levels too");
}

#[test]
fn the_members_of_the_keys_have_the_sizes_of_the_document() {
    let member = |key: &str, part: usize| {
        let keys = table("## Keys");
        let row = keys.iter().find(|row| row[0] == key).unwrap();
        let text = row[2].split('→').nth(part).unwrap();
        let sizes =
            text.split('(').skip(1).map(|rest| rest.split(')').next().unwrap().parse::<usize>().unwrap());
        sizes.sum::<usize>()
    };
    // What a flow's record has of its head is the member of its line without the flow.
    let head = table("### A flow's record").last().unwrap()[1].parse::<usize>().unwrap();
    assert_eq!(member("lines", 0), FlowId::default().len() + head);
    assert_eq!(member("tickets", 0) + member("tickets", 1), member("lines", 0));
    assert_eq!(member("permits", 0), NodeId::default().len() + size("### A release"));
    assert_eq!(member("outbox", 0), NodeId::default().len() + 8 + size("### A grant"));
    let waiting = member("lines", 0) + member("tickets", 0) + member("tickets", 1);
    assert!(TEXT.contains(&format!("{waiting} bytes of content")));
    let flow = FlowId::default().len() + size("### A flow's record");
    assert!(TEXT.contains(&format!("`heads` ({} bytes)", member("heads", 0))));
    assert!(TEXT.contains(&format!("`flows` ({flow} bytes)")));
}

#[test]
fn records_have_the_sizes_of_the_document() {
    assert_eq!(size("### A flow's record"), format_after("local FLOW, NO_HEAD = '"));
    assert_eq!(size("### A node's record"), format_after("entry.live =\n                unpack_from('"));
    let mut written = vec![];
    head(Kind::Ordinary).write(&mut written);
    assert_eq!(written.len(), size("### The head of a call"));
    assert_eq!(written.len(), format_after("flags, grants_left =\n    unpack_from('"));

    let rules = Rules {
        capacity: 1,
        flow_cap: u64::MAX,
        max_waiting: 1,
        max_waiting_per_flow: 1,
        too_wide: TooWide::Refuse,
        priority_step: 0,
    };
    let mut written = vec![];
    RulesRecord { rules, ramp_micros: 0, set: 0, operator: None, operator_set: 0 }.write(&mut written);
    assert_eq!(written.len(), size("### The rules"));
    assert_eq!(written.len(), format_after("operator, operator_set =\n            unpack_from('"));
    assert_eq!(written[8..16], UNBOUNDED.to_be_bytes(), "no bound");

    let mut call = Call::default();
    let record = AskRecord { flow: FlowId::default(), cost: 1, weight: 1, level: 0 };
    call.enqueue(1, &record, How::Again { arrival: 1 });
    call.release(1, 1, FlowId::default());
    call.hold(1, 1, FlowId::default());
    call.finish(1);
    assert_eq!(call.enqueues.len(), size("### An enqueue"));
    assert_eq!(call.enqueues.len(), format_after("local ticket, flow, ask, arrival, how = unpack_from('"));
    assert_eq!(call.releases.len(), size("### A release"));
    assert_eq!(call.held.len(), size("### A release"));
    assert_eq!(call.held.len(), format_after("local ticket, units, flow = unpack_from('"));
    assert_eq!(call.ops(), 4);

    let part = |size: usize| vec![0; size];
    let parts = vec![
        part(size("### The head of a reply")),
        part(2 * size("### A grant")),
        part(3 * size("### A refusal")),
        part(4 * size("### A place")),
        part(5 * NodeId::default().len()),
    ];
    assert_eq!(parts[0].len(), format_after("return {\n        pack('"));
    let reply = read_reply(&parts).unwrap();
    assert_eq!((reply.grants.len(), reply.refusals.len()), (2, 3));
    assert_eq!((reply.places.len(), reply.peers.map(|peers| peers.len())), (4, Some(5)));
    let push = read_push(&part(16 + 8 + 8 + size("### A grant"))).unwrap();
    assert_eq!(push.grants.len(), 1);
}

#[test]
fn kinds_statuses_and_causes_are_those_of_the_document() {
    let script = STEPS.concat();
    let kinds = [
        ("ordinary", Kind::Ordinary, "ORDINARY"),
        ("restate", Kind::Restate, "RESTATE"),
        ("restate further", Kind::RestateOn, "RESTATE_ON"),
        ("detach", Kind::Detach, "DETACH"),
    ];
    let rows = table("| most grants | 4");
    assert_eq!(rows.len(), kinds.len());
    for (row, (name, kind, constant_name)) in rows.iter().zip(kinds) {
        assert_eq!((row[0], row[1]), (&*(kind as u8).to_string(), name));
        assert_eq!(constant(constant_name), Some(u64::from(kind as u8)));
    }

    let names = ["OK", "UNKNOWN", "OTHER_EPOCH", "GAP", "STALE", "REAPING", "OTHER_LAYOUT"];
    let statuses = [
        Status::Done,
        Status::Restate,
        Status::Restate,
        Status::Restate,
        Status::Stale,
        Status::Reaping,
        Status::OtherLayout,
    ];
    let rows = table("| list from | 8 | where the list of permits");
    assert_eq!(rows.len(), names.len());
    for ((row, name), status) in rows.iter().zip(names).zip(statuses) {
        let number = constant(name).unwrap();
        assert_eq!(row[0], number.to_string());
        let said = row[1].replace(' ', "_").to_uppercase();
        assert_eq!(if name == "OK" { "DONE" } else { name }, said);
        let mut parts = vec![vec![0; size("### The head of a reply")], vec![], vec![], vec![], vec![]];
        parts[0][0] = u8::try_from(number).unwrap();
        assert_eq!(read_reply(&parts).unwrap().status, status);
    }

    let causes = table("### A refusal")[1][2];
    for (name, constant_name, cause) in [
        ("queue full", "QUEUE_FULL", Cause::QueueFull),
        ("flow full", "FLOW_FULL", Cause::FlowFull),
        ("too wide", "TOO_WIDE", Cause::TooWide),
        ("would wait", "WOULD_WAIT", Cause::WouldWait),
    ] {
        assert!(causes.contains(&format!("{}: {name}", cause.index())), "{name} in {causes}");
        assert_eq!(constant(constant_name), Some(cause.index().into()), "{constant_name} in {script}");
    }
}

#[test]
fn the_numbers_are_those_of_the_document() {
    let millis = |duration: std::time::Duration| u64::try_from(duration.as_millis()).unwrap();
    let micros = |name| constant(name).map(|micros| micros / 1_000);
    for row in table("## Numbers") {
        let said: u64 = row[1].trim_end_matches(" ms").parse().unwrap();
        let found = match row[2] {
            "MAX_OPS" => MAX_OPS as u64,
            "MAX_GRANTS" => MAX_GRANTS.into(),
            "HEARTBEAT" => millis(HEARTBEAT),
            "RECOVERING" => millis(RECOVERING),
            "REAPING" => millis(REAPING),
            "own_lease" => millis(2 * MAX_STEP),
            "UNBOUNDED" => UNBOUNDED,
            name @ ("MAX_STEP" | "RECOVERY_STEP" | "SETTLE") => micros(name).unwrap(),
            name => constant(name).unwrap_or_else(|| panic!("{name} is no number of the script's")),
        };
        assert_eq!(said, found, "{}", row[0]);
    }
    assert_eq!(micros("MAX_STEP"), Some(millis(MAX_STEP)), "both sides count with the same step");
}

#[test]
fn the_least_rights_are_what_the_script_and_the_node_use() {
    let line = TEXT.lines().find(|line| line.starts_with("ACL SETUSER")).unwrap();
    let readme = include_str!("../../../README.md");
    let (_, readme) = readme.split_once("redis-cli ACL SETUSER").unwrap();
    let readme = readme.split("```").next().unwrap().replace(['\'', '\\', '\n'], " ");
    assert!(readme.split_whitespace().eq(line.split_whitespace().skip(2)), "the README has the same");
    let granted: BTreeSet<String> =
        line.split(' ').filter_map(|word| word.strip_prefix('+')).map(str::to_uppercase).collect();
    let script = STEPS.concat();
    let mut used = quoted_after(&script, "call('");
    used.extend(quoted_after(&script, "call_many('"));
    assert_eq!(quoted_after(PROBE, "try('"), used, "`connect` tries each");
    let node = ["EVALSHA", "SCRIPT|LOAD", "SUBSCRIBE", "PUBLISH"];
    let used: BTreeSet<String> = used.into_iter().chain(node).map(str::to_owned).collect();
    assert_eq!(granted, used);
}
