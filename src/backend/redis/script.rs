//! The script, put together from its steps, and its two registrations.

use super::wire::Call;

/// The steps in the order in which they run.
pub(super) const STEPS: [&str; 8] = [
    include_str!("lua/head.lua"),
    include_str!("lua/state.lua"),
    include_str!("lua/nodes.lua"),
    include_str!("lua/permits.lua"),
    include_str!("lua/order.lua"),
    include_str!("lua/reap.lua"),
    include_str!("lua/restate.lua"),
    include_str!("lua/call.lua"),
];

/// What tries each right the script needs, and names those that are missing.
pub(super) const PROBE: &str = include_str!("lua/probe.lua");

/// The same source twice. A server whose memory is full refuses the first whole before it does anything, and runs
/// the second, which is for calls that give back, renew and restate.
#[derive(Debug)]
pub(super) struct Script {
    pub(super) growing: String,
    pub(super) allow_oom: String,
}

impl Script {
    pub(super) fn new() -> Self {
        let source = STEPS.concat();
        Self { growing: format!("#!lua\n{source}"), allow_oom: format!("#!lua flags=allow-oom\n{source}") }
    }
}

/// The hashes under which a server knows the two.
#[derive(Clone, Debug)]
pub(super) struct Hashes {
    pub(super) growing: String,
    pub(super) allow_oom: String,
}

impl Hashes {
    pub(super) fn of(&self, call: &Call) -> &str {
        if call.grows() { &self.growing } else { &self.allow_oom }
    }
}
