//! A cluster.

use super::{Binary, Options, Server, settled};

/// Three masters with a third of the slots each.
#[derive(Debug)]
pub(crate) struct Cluster {
    pub(crate) nodes: Vec<Server>,
}

impl Cluster {
    /// Returns when all three take commands for any slot.
    pub(crate) async fn start(binary: &Binary) -> Self {
        Self::with(binary, Options::default()).await
    }

    /// The same, each with these options.
    pub(crate) async fn with(binary: &Binary, options: Options) -> Self {
        let options = options.cluster();
        let mut nodes = Vec::new();
        for (epoch, [first, last]) in
            [["0", "5460"], ["5461", "10922"], ["10923", "16383"]].iter().enumerate()
        {
            let node = Server::with(binary, &options).await;
            node.cli(&["CLUSTER", "ADDSLOTSRANGE", first, last]);
            // Masters of one epoch would first have to settle whose slots are whose.
            node.cli(&["CLUSTER", "SET-CONFIG-EPOCH", &(epoch + 1).to_string()]);
            nodes.push(node);
        }
        for node in &nodes[1..] {
            let bus = node.cli(&["CONFIG", "GET", "cluster-port"]);
            let bus = bus.lines().last().expect("a name and a value");
            nodes[0].cli(&["CLUSTER", "MEET", "127.0.0.1", &node.port().to_string(), bus]);
        }
        let cluster = Self { nodes };
        cluster.ok().await;
        cluster
    }

    /// Waits until every node knows the others and takes commands.
    pub(crate) async fn ok(&self) {
        let ok = |node: &Server| {
            let info = node.try_cli(&["CLUSTER", "INFO"]).unwrap_or_default();
            ["cluster_state:ok", "cluster_slots_ok:16384", "cluster_known_nodes:3"]
                .iter()
                .all(|line| info.contains(line))
        };
        settled("the cluster is ok", || self.nodes.iter().all(ok)).await;
    }

    pub(crate) fn urls(&self) -> Vec<String> {
        self.nodes.iter().map(Server::url).collect()
    }

    /// The index of the node that has the slot of a key.
    pub(crate) fn owner(&self, key: &str) -> usize {
        // The others only say where the key is.
        let owns = |node: &Server| node.try_cli(&["EXISTS", key]).is_ok();
        self.nodes.iter().position(owns).expect("a node has the slot")
    }

    /// Gives the slot of a key, and all keys in it, to another node.
    pub(crate) fn move_slot(&self, key: &str, to: usize) {
        let (from, to) = (&self.nodes[self.owner(key)], &self.nodes[to]);
        let slot = from.cli(&["CLUSTER", "KEYSLOT", key]);
        let [from_id, to_id] = [from, to].map(|node| node.cli(&["CLUSTER", "MYID"]));
        to.cli(&["CLUSTER", "SETSLOT", &slot, "IMPORTING", &from_id]);
        from.cli(&["CLUSTER", "SETSLOT", &slot, "MIGRATING", &to_id]);
        loop {
            let keys = from.cli(&["CLUSTER", "GETKEYSINSLOT", &slot, "100"]);
            if keys.is_empty() {
                break;
            }
            let port = to.port().to_string();
            let mut command = vec!["MIGRATE", "127.0.0.1", &port, "", "0", "5000"];
            command.extend(["AUTH2", super::server::HARNESS, super::server::HARNESS, "KEYS"]);
            command.extend(keys.lines());
            from.cli(&command);
        }
        // The new owner first, so that there is one at any time.
        for node in [to, from].into_iter().chain(&self.nodes) {
            node.cli(&["CLUSTER", "SETSLOT", &slot, "NODE", &to_id]);
        }
    }
}
