//! Real Redis and Valkey servers of the test's own, on ports of 127.0.0.1 that were free, and a proxy to stand before them.

mod binary;
mod cluster;
mod proxy;
mod resp;
mod sentinel;
mod server;
mod tls;

use std::{
    fs,
    net::TcpListener,
    path::{Path, PathBuf},
    process,
    sync::atomic::{AtomicU32, Ordering},
    time::Duration,
};

use tokio::time::{Instant, sleep};

pub(crate) use self::{
    binary::{Binary, Kind, require},
    cluster::Cluster,
    proxy::{Proxy, Rule, Way},
    resp::{Reply, Resp},
    sentinel::Sentinels,
    server::{Options, Server},
    tls::Certificates,
};

/// A port that nobody listens on. It is below those that the system gives to outgoing connections: one of them could take the
/// port of a server that is down for a moment.
pub(crate) fn free_port() -> u16 {
    static NEXT: AtomicU32 = AtomicU32::new(0);
    loop {
        let number =
            process::id().wrapping_mul(97).wrapping_add(NEXT.fetch_add(1, Ordering::Relaxed)) % 20_000;
        let port = 10_000 + u16::try_from(number).expect("less than 20,000");
        if TcpListener::bind(("127.0.0.1", port)).is_ok() {
            return port;
        }
    }
}

/// Waits until `condition` holds, for long enough that only a fault runs into the limit.
async fn settled(what: &str, mut condition: impl FnMut() -> bool) {
    let limit = Duration::from_secs(30);
    let start = Instant::now();
    while !condition() {
        assert!(start.elapsed() < limit, "not within {limit:?}: {what}");
        sleep(Duration::from_millis(10)).await;
    }
}

/// A folder of its own. Dropped, it is removed.
#[derive(Debug)]
pub(crate) struct Folder(PathBuf);

impl Folder {
    pub(crate) fn new() -> Self {
        static NEXT: AtomicU32 = AtomicU32::new(0);
        loop {
            let number = NEXT.fetch_add(1, Ordering::Relaxed);
            let path = std::env::temp_dir().join(format!("fairq-{}-{number}", process::id()));
            match fs::create_dir(&path) {
                Ok(()) => return Self(path),
                // Left by a process that was killed and had the same number.
                Err(error) if error.kind() == std::io::ErrorKind::AlreadyExists => {}
                Err(error) => panic!("create {}: {error}", path.display()),
            }
        }
    }

    pub(crate) fn path(&self) -> &Path {
        &self.0
    }

    fn write(&self, name: &str, content: &str) -> PathBuf {
        let path = self.0.join(name);
        fs::write(&path, content).unwrap_or_else(|error| panic!("write {}: {error}", path.display()));
        path
    }
}

impl Drop for Folder {
    fn drop(&mut self) {
        _ = fs::remove_dir_all(&self.0);
    }
}
