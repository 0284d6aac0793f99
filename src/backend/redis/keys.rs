//! The names a queue has in Redis, and the names of its flows.

use sha2::{Digest, Sha256};

use super::wire::{FlowId, NodeId};
use crate::schedule::Ask;

/// In the order in which the script takes them.
pub(super) const KEYS: [&str; 10] =
    ["state", "lines", "tickets", "heads", "flows", "permits", "nodes", "calls", "outbox", "expected"];

/// The keys and channels of one queue. All carry one hash tag, the queue's name in braces, so a
/// Cluster keeps them in one slot.
#[derive(Debug)]
pub(super) struct Keys {
    pub(super) keys: [String; 10],
    /// Where the rights are tried; nothing is kept in it.
    pub(super) probe: String,
    /// A channel's name without the node.
    pub(super) channels: String,
}

impl Keys {
    /// Both parts are of plain characters, which their bounds see to.
    pub(super) fn new(prefix: &str, queue: &str) -> Self {
        let named = |what: &str| format!("{prefix}:{{{queue}}}:{what}");
        Self { keys: KEYS.map(named), probe: named("probe"), channels: named("node:") }
    }

    pub(super) fn channel(&self, node: &NodeId) -> String {
        use std::fmt::Write as _;

        let mut name = self.channels.clone();
        for byte in node {
            // Writing to a string does not fail.
            let _ = write!(name, "{byte:02x}");
        }
        name
    }

    /// One of the keys; all are in one slot.
    pub(super) fn lines(&self) -> &str {
        &self.keys[1]
    }
}

/// Whatever bytes and however many a flow's name has, its id has 16: a part of their SHA-256. Asks without a flow have
/// the flow of their priority, whose id is no hash.
pub(super) fn flow_id(ask: &Ask) -> FlowId {
    let mut id = FlowId::default();
    match &ask.flow {
        Some(flow) => id.copy_from_slice(&Sha256::digest(flow.as_bytes())[..16]),
        None => id[15] = ask.priority.level() + 1,
    }
    id
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::schedule::Priority;

    #[test]
    fn a_queue_has_one_hash_tag() {
        let keys = Keys::new("fairq", "chat");
        assert_eq!(keys.keys[0], "fairq:{chat}:state");
        assert!(keys.keys.iter().chain([&keys.probe]).all(|key| key.contains("{chat}")));
        assert_eq!(keys.channel(&[0xab; 16]), format!("fairq:{{chat}}:node:{}", "ab".repeat(16)));
    }

    #[test]
    fn flows_are_told_apart_and_an_unnamed_one_is_that_of_its_priority() {
        let named = |name: &[u8]| flow_id(&Ask::new().flow(name));
        assert_ne!(named(b"a"), named(b"b"));
        assert_ne!(named(b""), flow_id(&Ask::new()));
        assert_ne!(flow_id(&Ask::new()), flow_id(&Ask::new().priority(Priority::URGENT)));
        assert_ne!(
            flow_id(&Ask::new().priority(Priority::BACKGROUND)),
            FlowId::default(),
            "reserved for no flow"
        );
    }
}
