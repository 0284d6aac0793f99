//! The layer under two thousand real connections, which are killed half way and replaced by as many.

#![cfg(target_os = "linux")]

use std::{
    fs,
    process::{Child, Command, Output, Stdio},
    sync::{
        Arc,
        atomic::{AtomicBool, AtomicU64, Ordering},
    },
    time::Duration,
};

use axum::{Router, body::Body, routing::get};
use bytes::Bytes;
use futures_util::stream::unfold;
use metrics_exporter_prometheus::{PrometheusBuilder, PrometheusHandle};
use tokio::{
    net::TcpSocket,
    time::{Instant, MissedTickBehavior, interval, sleep},
};
use tower_fair_queue::{FairQueueConfig, FairQueueLayer};

const CAPACITY: u64 = 50;
const CONNECTIONS: u64 = 2_000;
const HALF: Duration = Duration::from_secs(10);

/// Ends the sampling.
static DONE: AtomicBool = AtomicBool::new(false);

/// What the handler counts by itself, knowing nothing of the queue.
#[derive(Clone, Default)]
struct Own {
    at_work: Arc<AtomicU64>,
    peak: Arc<AtomicU64>,
    begun: Arc<AtomicU64>,
}

struct AtWork(Own);

impl Own {
    fn begin(&self) -> AtWork {
        self.peak.fetch_max(self.at_work.fetch_add(1, Ordering::SeqCst) + 1, Ordering::SeqCst);
        self.begun.fetch_add(1, Ordering::Relaxed);
        AtWork(self.clone())
    }
}

impl Drop for AtWork {
    fn drop(&mut self) {
        self.0.at_work.fetch_sub(1, Ordering::SeqCst);
    }
}

/// Streams for two milliseconds. The guard lives in the stream, so it counts until the body is gone.
fn body(guard: AtWork) -> Body {
    Body::from_stream(unfold((guard, 0), |(guard, sent)| async move {
        if sent == 2 {
            return None;
        }
        if sent == 1 {
            sleep(Duration::from_millis(2)).await;
        }
        Some((Ok::<_, std::io::Error>(Bytes::from_static(b"word ")), (guard, sent + 1)))
    }))
}

fn wrk(address: &str, seconds: u64) -> Child {
    let mut command = Command::new("wrk");
    command.args(["--threads", "2", "--connections", &CONNECTIONS.to_string(), "--timeout", "30s"]);
    command.args(["--duration", &format!("{seconds}s"), &format!("http://{address}/")]);
    command
        .stdout(Stdio::piped())
        .spawn()
        .unwrap_or_else(|error| panic!("{command:?}: {error}; wrk is a package of the distribution's"))
}

fn said(output: &Output) -> String {
    String::from_utf8_lossy(&output.stdout).into_owned()
}

/// The sum of a metric's series.
fn metric(handle: &PrometheusHandle, name: &str) -> f64 {
    let text = handle.render();
    let values = text.lines().filter_map(|line| {
        let (series, value) = line.rsplit_once(' ')?;
        (series.split('{').next() == Some(name)).then(|| value.parse::<f64>().expect("a number"))
    });
    // Not `sum`, whose start is a negative zero.
    values.fold(0.0, |sum, value| sum + value)
}

fn open_files() -> u64 {
    let limits = fs::read_to_string("/proc/self/limits").expect("Linux");
    let line = limits.lines().find(|line| line.starts_with("Max open files")).expect("a limit of open files");
    line["Max open files".len()..]
        .split_whitespace()
        .next()
        .and_then(|soft| soft.parse().ok())
        .unwrap_or(u64::MAX)
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn two_thousand_connections_never_exceed_the_cap_and_leave_nothing_behind() {
    assert!(open_files() >= 8_192, "{} open files are too few: run it under `ulimit -n 8192`", open_files());
    let metrics = PrometheusBuilder::new()
        .set_buckets(&[0.01, 0.1, 1.0, 10.0])
        .expect("there are buckets")
        .install_recorder()
        .expect("it is the only recorder of this process");

    let config = FairQueueConfig::builder("load").capacity(50).max_waiting(5_000).build().unwrap();
    let layer = FairQueueLayer::new(config);
    let queue = layer.queue().clone();
    let own = Own::default();
    let counts = own.clone();
    let app = Router::new().route("/", get(move || async move { body(counts.begin()) })).layer(layer);
    let socket = TcpSocket::new_v4().unwrap();
    socket.bind("127.0.0.1:0".parse().unwrap()).unwrap();
    let listener = socket.listen(4_096).unwrap();
    let address = listener.local_addr().unwrap().to_string();
    let server = tokio::spawn(axum::serve(listener, app).into_future());

    let sampled = metrics.clone();
    let sampling = tokio::spawn(async move {
        let mut every = interval(Duration::from_millis(10));
        every.set_missed_tick_behavior(MissedTickBehavior::Skip);
        // The least of both gauges, the most in flight, the most waiting, and how often it looked.
        let mut seen = (f64::INFINITY, 0.0_f64, 0.0_f64, 0_u32);
        loop {
            every.tick().await;
            let in_flight = metric(&sampled, "fairqueue_in_flight_units");
            let waiting = metric(&sampled, "fairqueue_waiting_requests");
            seen =
                (seen.0.min(in_flight).min(waiting), seen.1.max(in_flight), seen.2.max(waiting), seen.3 + 1);
            if seen.0 < 0.0 || DONE.load(Ordering::SeqCst) {
                return seen;
            }
        }
    });

    // The first is killed while all it has asked for is in line or under way.
    let mut killed = wrk(&address, 20);
    sleep(HALF).await;
    let before = own.begun.load(Ordering::Relaxed);
    assert!(queue.stats().waiting > CONNECTIONS / 2, "{:?}", queue.stats());
    killed.kill().unwrap();
    killed.wait().unwrap();
    let second = wrk(&address, HALF.as_secs());
    let output = tokio::task::spawn_blocking(move || second.wait_with_output()).await.unwrap().unwrap();
    let second = said(&output);
    assert!(output.status.success(), "{second}");

    let ended = Instant::now();
    loop {
        let stats = queue.stats();
        if stats.in_flight == 0 && stats.waiting == 0 {
            break;
        }
        assert!(ended.elapsed() < Duration::from_secs(2), "left behind: {stats:?}");
        sleep(Duration::from_millis(10)).await;
    }
    DONE.store(true, Ordering::SeqCst);
    let (least, most_in_flight, most_waiting, samples) = sampling.await.unwrap();
    let peak = own.peak.load(Ordering::SeqCst);
    let begun = own.begun.load(Ordering::Relaxed);
    let granted = metric(&metrics, "fairqueue_granted_units_total");
    let released = metric(&metrics, "fairqueue_released_units_total");
    println!(
        "{begun} requests begun ({before} before the kill), {granted} units granted, {released} released, peak {peak} of {CAPACITY}; \
         gauges over {samples} samples: least {least}, in flight {most_in_flight} and waiting {most_waiting} at most; \
         empty {:?} after the end\n{second}",
        ended.elapsed()
    );

    assert_eq!(peak, CAPACITY, "all permits were in use, and never more");
    assert!(least >= 0.0 && samples > 100, "{samples} samples");
    #[expect(clippy::cast_precision_loss, reason = "small numbers")]
    {
        assert!(most_in_flight <= CAPACITY as f64 && most_waiting > (CONNECTIONS / 2) as f64);
        assert!(granted >= begun as f64);
    }
    assert_eq!(own.at_work.load(Ordering::SeqCst), 0);
    assert_eq!(granted, released);
    for gauge in ["fairqueue_in_flight_units", "fairqueue_waiting_requests"] {
        assert_eq!(metric(&metrics, gauge), 0.0, "{gauge}");
    }
    assert!(!second.contains("Socket errors") && !second.contains("Non-2xx"), "{second}");
    server.abort();
}
