//! A primary and its replica, watched by sentinels.

use super::{Binary, Options, Server, settled};

/// Three sentinels, two of which can declare the primary down.
#[derive(Debug)]
pub(crate) struct Sentinels {
    /// The first is the primary at the start, the second its replica.
    pub(crate) servers: Vec<Server>,
    pub(crate) sentinels: Vec<Server>,
}

impl Sentinels {
    /// What the sentinels call the primary.
    pub(crate) const NAME: &'static str = "fairq";

    /// Returns when each sentinel knows of all and could fail over.
    pub(crate) async fn start(binary: &Binary) -> Self {
        let options = Options::default().set("repl-diskless-sync-delay", "0");
        let primary = Server::with(binary, &options).await;
        let port = primary.port();
        let replica = Server::with(binary, &options.set("replicaof", &format!("127.0.0.1 {port}"))).await;
        let name = Self::NAME;
        let lines = [
            format!("sentinel monitor {name} 127.0.0.1 {port} 2"),
            format!("sentinel down-after-milliseconds {name} 1500"),
            format!("sentinel failover-timeout {name} 2000"),
        ];
        let mut sentinels = Vec::new();
        for _ in 0..3 {
            let sentinel = Server::sentinel(binary, &lines).await;
            // At the default of 1 s a primary that is well would often look silent for too long. Below 300 ms no replica would
            // be good enough: the news of it, once a second, may be five periods old.
            sentinel.cli(&["SENTINEL", "DEBUG", "PING-PERIOD", "500"]);
            // Otherwise they ask the servers, and tell each other of themselves, every few seconds only.
            sentinel.cli(&["SENTINEL", "DEBUG", "INFO-PERIOD", "500", "PUBLISH-PERIOD", "500"]);
            sentinels.push(sentinel);
        }
        let all = Self { servers: vec![primary, replica], sentinels };
        all.ok().await;
        all
    }

    pub(crate) fn urls(&self) -> Vec<String> {
        self.sentinels.iter().map(Server::url).collect()
    }

    /// The index of the primary, by what all sentinels and the server itself say. `None`: they do not agree.
    pub(crate) fn primary(&self) -> Option<usize> {
        let told = self.told(&self.sentinels[0])?;
        let agreed = self.sentinels.iter().all(|sentinel| self.told(sentinel) == Some(told));
        (agreed && role(&self.servers[told]) == Some("master")).then_some(told)
    }

    /// The index of the primary as a sentinel tells it.
    fn told(&self, sentinel: &Server) -> Option<usize> {
        let address = sentinel.try_cli(&["SENTINEL", "GET-MASTER-ADDR-BY-NAME", Self::NAME]).ok()?;
        self.servers.iter().position(|server| address == format!("127.0.0.1\n{}", server.port()))
    }

    /// Has the sentinels swap primary and replica, both of which run, and waits until they have. Returns the new primary.
    pub(crate) async fn failover(&self) -> usize {
        let old = self.primary().expect("a primary before the failover");
        let swapped = || {
            // Refused while one is under way, and until the sentinel has heard of the replica's state; one that has failed
            // is not tried again by itself.
            if self.told(&self.sentinels[0]) == Some(old) {
                _ = self.sentinels[0].try_cli(&["SENTINEL", "FAILOVER", Self::NAME]);
            }
            self.primary() == Some(1 - old)
        };
        settled("the sentinels swap primary and replica", swapped).await;
        1 - old
    }

    /// Kills the primary and waits until its replica has been made the primary. Returns that one.
    pub(crate) async fn kill_primary(&mut self) -> usize {
        let old = self.primary().expect("a primary before the failover");
        self.servers[old].kill9();
        settled("the replica is made the primary", || self.primary() == Some(1 - old)).await;
        1 - old
    }

    /// Waits until there is a primary with a replica in step and each sentinel knows of all.
    pub(crate) async fn ok(&self) {
        let knows = |sentinel: &Server| {
            let master = sentinel.try_cli(&["SENTINEL", "MASTER", Self::NAME]).unwrap_or_default();
            let replicas = sentinel.try_cli(&["SENTINEL", "REPLICAS", Self::NAME]).unwrap_or_default();
            let has = |text: &str, name, value| pairs(text).any(|pair| pair == (name, value));
            has(&master, "flags", "master")
                && has(&master, "num-slaves", "1")
                && has(&master, "num-other-sentinels", "2")
                && has(&replicas, "flags", "slave")
                && has(&replicas, "master-link-status", "ok")
        };
        let in_step = || {
            let replica = 1 - self.primary()?;
            let info = self.servers[replica].try_cli(&["INFO", "replication"]).ok()?;
            info.contains("master_link_status:up").then_some(())
        };
        settled("the sentinels know of all", || in_step().is_some() && self.sentinels.iter().all(knows))
            .await;
    }
}

fn role(server: &Server) -> Option<&'static str> {
    let info = server.try_cli(&["INFO", "replication"]).ok()?;
    ["master", "slave"].into_iter().find(|role| info.contains(&format!("role:{role}\r\n")))
}

/// The fields of a reply that lists names and values by turns.
fn pairs(text: &str) -> impl Iterator<Item = (&str, &str)> {
    let mut lines = text.split('\n');
    std::iter::from_fn(move || Some((lines.next()?, lines.next()?)))
}
