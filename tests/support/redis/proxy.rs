//! A proxy that hurts what passes it.

use std::{
    collections::hash_map::RandomState,
    hash::BuildHasher,
    io,
    net::SocketAddr,
    ops::Range,
    sync::{
        Arc, Mutex,
        atomic::{AtomicU64, AtomicUsize, Ordering},
    },
    time::Duration,
};

use tokio::{
    io::{AsyncReadExt, AsyncWriteExt},
    net::{
        TcpListener, TcpStream,
        tcp::{OwnedReadHalf, OwnedWriteHalf},
    },
    sync::{mpsc, watch},
    task::{JoinHandle, JoinSet},
    time::{Instant, sleep_until},
};

use super::free_port;

/// Stands on a port of its own before a server. It passes all on until it is told otherwise. Dropped, it cuts all off.
#[derive(Debug)]
pub(crate) struct Proxy {
    port: u16,
    link: Arc<Link>,
    accepting: Mutex<Option<JoinHandle<()>>>,
}

/// A direction.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Way {
    /// From the client to the server.
    Requests,
    /// From the server to the client.
    Replies,
}

/// What happens to bytes that come in from now on. Order is kept: none overtake those before them in a connection.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(crate) enum Rule {
    Pass,
    /// Each read's bytes are passed on after a time from this range.
    Delay(Range<Duration>),
    /// The same, only if they contain these bytes.
    DelayOf(&'static [u8], Range<Duration>),
    /// They wait in the proxy until the rule is another.
    Hold,
    /// They are gone.
    Swallow,
}

/// What all connections share.
#[derive(Debug)]
struct Link {
    server: SocketAddr,
    seed: u64,
    requests: Side,
    replies: Side,
    /// Each change cuts the connections that were there.
    cuts: watch::Sender<()>,
    accepted: AtomicU64,
    open: AtomicUsize,
}

#[derive(Debug)]
struct Side {
    rule: watch::Sender<Rule>,
    passed: AtomicU64,
    swallowed: AtomicU64,
}

impl Proxy {
    /// With a seed by chance, or that of the variable `FAIRQ_SEED`.
    pub(crate) async fn start(server: u16) -> Self {
        let seed = std::env::var("FAIRQ_SEED").map(|seed| seed.parse().expect("FAIRQ_SEED is a number"));
        Self::seeded(server, seed.unwrap_or_else(|_| RandomState::new().hash_one(server))).await
    }

    pub(crate) async fn seeded(server: u16, seed: u64) -> Self {
        eprintln!("proxy before port {server}: FAIRQ_SEED={seed}");
        let link = Arc::new(Link {
            server: SocketAddr::from(([127, 0, 0, 1], server)),
            seed,
            requests: Side::new(),
            replies: Side::new(),
            cuts: watch::Sender::new(()),
            accepted: AtomicU64::new(0),
            open: AtomicUsize::new(0),
        });
        let (port, listener) = loop {
            let port = free_port();
            if let Ok(listener) = listen(port).await {
                break (port, listener);
            }
        };
        let accepting = tokio::spawn(accept(listener, Arc::clone(&link)));
        Self { port, link, accepting: Mutex::new(Some(accepting)) }
    }

    pub(crate) fn port(&self) -> u16 {
        self.port
    }

    pub(crate) fn url(&self) -> String {
        format!("redis://127.0.0.1:{}", self.port)
    }

    /// Sets the rule of a direction, for the connections that are there and those to come.
    pub(crate) fn set(&self, way: Way, rule: Rule) {
        self.link.side(way).rule.send_replace(rule);
    }

    /// Both directions pass again. What is delayed already stays so.
    pub(crate) fn heal(&self) {
        self.set(Way::Requests, Rule::Pass);
        self.set(Way::Replies, Rule::Pass);
    }

    /// Closes all connections that are there.
    pub(crate) fn cut(&self) {
        self.link.cuts.send_replace(());
    }

    /// From now on nobody listens on the port; connections that are there stay. [`Self::allow`] ends it.
    pub(crate) async fn refuse(&self) {
        let accepting = self.accepting.lock().unwrap().take();
        if let Some(accepting) = accepting {
            accepting.abort();
            _ = accepting.await;
        }
    }

    pub(crate) async fn allow(&self) {
        self.refuse().await;
        let listener = listen(self.port).await.expect("the port is still free");
        let accepting = tokio::spawn(accept(listener, Arc::clone(&self.link)));
        *self.accepting.lock().unwrap() = Some(accepting);
    }

    /// The connections that are there.
    pub(crate) fn open(&self) -> usize {
        self.link.open.load(Ordering::Acquire)
    }

    /// The connections that ever were.
    pub(crate) fn accepted(&self) -> u64 {
        self.link.accepted.load(Ordering::Acquire)
    }

    /// The bytes that were passed on.
    pub(crate) fn passed(&self, way: Way) -> u64 {
        self.link.side(way).passed.load(Ordering::Acquire)
    }

    pub(crate) fn swallowed(&self, way: Way) -> u64 {
        self.link.side(way).swallowed.load(Ordering::Acquire)
    }
}

impl Drop for Proxy {
    fn drop(&mut self) {
        self.cut();
        if let Some(accepting) = self.accepting.get_mut().unwrap().take() {
            accepting.abort();
        }
    }
}

impl Link {
    fn side(&self, way: Way) -> &Side {
        match way {
            Way::Requests => &self.requests,
            Way::Replies => &self.replies,
        }
    }
}

impl Side {
    fn new() -> Self {
        Self { rule: watch::Sender::new(Rule::Pass), passed: AtomicU64::new(0), swallowed: AtomicU64::new(0) }
    }
}

async fn listen(port: u16) -> io::Result<TcpListener> {
    TcpListener::bind(("127.0.0.1", port)).await
}

async fn accept(listener: TcpListener, link: Arc<Link>) {
    loop {
        let Ok((client, _)) = listener.accept().await else { continue };
        let number = link.accepted.fetch_add(1, Ordering::AcqRel);
        link.open.fetch_add(1, Ordering::AcqRel);
        let mut cut = link.cuts.subscribe();
        let link = Arc::clone(&link);
        tokio::spawn(async move {
            tokio::select! {
                _ = cut.changed() => {}
                _ = connection(client, &link, number) => {}
            }
            link.open.fetch_sub(1, Ordering::AcqRel);
        });
    }
}

/// Ends when either side has closed and what it had sent before was passed on.
async fn connection(client: TcpStream, link: &Arc<Link>, number: u64) -> io::Result<()> {
    let server = TcpStream::connect(link.server).await?;
    client.set_nodelay(true)?;
    server.set_nodelay(true)?;
    let (from_client, to_client) = client.into_split();
    let (from_server, to_server) = server.into_split();
    let (mut readers, mut writers) = (JoinSet::new(), JoinSet::new());
    for (way, from, to) in [(Way::Requests, from_client, to_server), (Way::Replies, from_server, to_client)] {
        let chance = Chance(link.seed ^ (2 * number + u64::from(way == Way::Replies)));
        let (send, receive) = mpsc::unbounded_channel();
        readers.spawn(read(Arc::clone(link), way, from, send, chance));
        writers.spawn(write(Arc::clone(link), way, to, receive));
    }
    writers.join_next().await;
    Ok(())
}

/// Takes bytes in and says when they are due.
async fn read(
    link: Arc<Link>,
    way: Way,
    mut from: OwnedReadHalf,
    send: mpsc::UnboundedSender<(Instant, Vec<u8>)>,
    mut chance: Chance,
) {
    let side = link.side(way);
    let mut last: Vec<u8> = Vec::new();
    let mut buffer = vec![0; 64 * 1024];
    while let Ok(length @ 1..) = from.read(&mut buffer).await {
        let bytes = &buffer[..length];
        let rule = side.rule.borrow().clone();
        let delay = match rule {
            Rule::Pass | Rule::Hold => Duration::ZERO,
            Rule::Delay(range) => chance.within(&range),
            Rule::DelayOf(pattern, range) => {
                // The pattern may have begun at the end of the read before.
                last.drain(..last.len().saturating_sub(pattern.len() - 1));
                last.extend(bytes);
                let found = last.windows(pattern.len()).any(|window| window == pattern);
                if found { chance.within(&range) } else { Duration::ZERO }
            }
            Rule::Swallow => {
                side.swallowed.fetch_add(length as u64, Ordering::AcqRel);
                continue;
            }
        };
        if send.send((Instant::now() + delay, bytes.to_vec())).is_err() {
            break;
        }
    }
}

/// Passes on what is due and not held.
async fn write(
    link: Arc<Link>,
    way: Way,
    mut to: OwnedWriteHalf,
    mut receive: mpsc::UnboundedReceiver<(Instant, Vec<u8>)>,
) {
    let side = link.side(way);
    let mut rule = side.rule.subscribe();
    while let Some((due, bytes)) = receive.recv().await {
        sleep_until(due).await;
        let free = rule.wait_for(|rule| *rule != Rule::Hold).await.is_ok();
        if !free || to.write_all(&bytes).await.is_err() {
            break;
        }
        side.passed.fetch_add(bytes.len() as u64, Ordering::AcqRel);
    }
}

/// Splitmix64: numbers by chance that a seed repeats.
#[derive(Debug)]
struct Chance(u64);

impl Chance {
    fn next(&mut self) -> u64 {
        self.0 = self.0.wrapping_add(0x9e37_79b9_7f4a_7c15);
        let mut mixed = self.0;
        mixed = (mixed ^ (mixed >> 30)).wrapping_mul(0xbf58_476d_1ce4_e5b9);
        mixed = (mixed ^ (mixed >> 27)).wrapping_mul(0x94d0_49bb_1331_11eb);
        mixed ^ (mixed >> 31)
    }

    fn within(&mut self, range: &Range<Duration>) -> Duration {
        let width = u64::try_from(range.end.saturating_sub(range.start).as_micros()).expect("a short time");
        range.start + Duration::from_micros(self.next() % width.max(1))
    }
}
