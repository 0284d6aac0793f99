//! The layer beside tower's own limit doing the same job, and beside no layer at all.
//!
//! `cargo bench --bench layer`. Only ratios within one run mean anything. Each of 1, 100 and 10,000 requests is a task of
//! its own; all are spawned at once on a capacity of 10, and the service yields once, so that whoever is not among the first
//! ten waits. tower's `ConcurrencyLimit` waits in `poll_ready`, where its `Timeout` does not look; so the whole wait is moved
//! into `call`, under the `Timeout`, as a handler that must answer by a deadline has to do.

use std::{convert::Infallible, hint::black_box, time::Duration};

use bytes::Bytes;
use criterion::{BenchmarkId, Criterion, Throughput, criterion_group, criterion_main};
use http::{Request, Response};
use http_body_util::Full;
use tokio::runtime::{Builder, Runtime};
use tower::{Layer, Service, ServiceExt, limit::ConcurrencyLimit, service_fn, timeout::Timeout};
use tower_fair_queue::{FairQueueConfig, FairQueueLayer, Limit};

const CAPACITY: u32 = 10;
const MAX_WAIT: Duration = Duration::from_secs(20);

async fn answer(yields: bool) -> Result<Response<Full<Bytes>>, Infallible> {
    if yields {
        tokio::task::yield_now().await;
    }
    Ok(Response::new(Full::from("answer")))
}

fn runtimes() -> [(&'static str, Runtime); 2] {
    [
        ("one thread", Builder::new_current_thread().enable_all().build().expect("a runtime")),
        (
            "two threads",
            Builder::new_multi_thread().worker_threads(2).enable_all().build().expect("a runtime"),
        ),
    ]
}

/// All requests at once, each in a task; the responses are dropped where they arrive.
async fn run<S>(service: S, requests: usize)
where
    S: Service<Request<()>> + Clone + Send + 'static,
    S::Future: Send,
    S::Response: Send,
    S::Error: std::fmt::Debug + Send,
{
    let ask = |_| {
        let service = service.clone();
        tokio::spawn(async move { drop(black_box(service.oneshot(Request::new(())).await.expect("served"))) })
    };
    let tasks: Vec<_> = (0..requests).map(ask).collect();
    for task in tasks {
        task.await.expect("no panic");
    }
}

fn layer() -> FairQueueLayer {
    let config = FairQueueConfig::builder("bench").capacity(CAPACITY).max_waiting(Limit::Unlimited);
    FairQueueLayer::new(config.max_wait(MAX_WAIT).build().expect("within its bounds"))
}

fn bench(c: &mut Criterion) {
    for (threads, runtime) in runtimes() {
        let mut group = c.benchmark_group(threads);
        for requests in [1, 100, 10_000] {
            group.throughput(Throughput::Elements(requests as u64));
            if requests == 10_000 {
                group.sample_size(20);
            }
            let inner = service_fn(|_: Request<()>| answer(true));

            group.bench_function(BenchmarkId::new("no layer", requests), |b| {
                b.to_async(&runtime).iter(|| run(inner, requests));
            });

            let limit = ConcurrencyLimit::new(inner, CAPACITY as usize);
            let tower = Timeout::new(service_fn(move |request| limit.clone().oneshot(request)), MAX_WAIT);
            group.bench_function(BenchmarkId::new("timeout over concurrency limit", requests), |b| {
                b.to_async(&runtime).iter(|| run(tower.clone(), requests));
            });

            let ours = layer().layer(inner);
            group.bench_function(BenchmarkId::new("fair queue", requests), |b| {
                b.to_async(&runtime).iter(|| run(ours.clone(), requests));
            });
        }
        group.finish();

        // One request after the other, without a task or a yield: what the layers themselves cost.
        let mut group = c.benchmark_group(format!("{threads}, alone"));
        let inner = service_fn(|_: Request<()>| answer(false));
        group.bench_function("no layer", |b| {
            b.to_async(&runtime).iter(|| inner.oneshot(Request::new(())));
        });
        let limit = ConcurrencyLimit::new(inner, CAPACITY as usize);
        let tower = Timeout::new(service_fn(move |request| limit.clone().oneshot(request)), MAX_WAIT);
        group.bench_function("timeout over concurrency limit", |b| {
            b.to_async(&runtime).iter(|| tower.clone().oneshot(Request::new(())));
        });
        let ours = layer().layer(inner);
        group.bench_function("fair queue", |b| {
            b.to_async(&runtime).iter(|| ours.clone().oneshot(Request::new(())));
        });
        group.finish();
    }
}

criterion_group!(benches, bench);
criterion_main!(benches);
