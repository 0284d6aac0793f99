//! The layer beside tower's own limit doing the same job, and beside no layer at all.
//!
//! `cargo bench --bench layer`. Only ratios within one run mean anything, and `--bench ratio` measures those. Each of 1, 100
//! and 10,000 requests is a task of its own; all are spawned at once on a capacity of 10.

use std::fmt::Debug;

use criterion::{
    BenchmarkGroup, BenchmarkId, Criterion, Throughput, criterion_group, criterion_main,
    measurement::WallTime,
};
use http::Request;
use tokio::runtime::Runtime;
use tower::Service;

mod support;

use support::{all_at_once, alone, fair_queue, no_layer, runtimes, timeout_over_concurrency_limit};

fn at_once<S>(
    group: &mut BenchmarkGroup<'_, WallTime>,
    runtime: &Runtime,
    name: &str,
    requests: usize,
    service: &S,
) where
    S: Service<Request<()>, Future: Send, Response: Send, Error: Debug + Send> + Clone + Send + 'static,
{
    group.bench_function(BenchmarkId::new(name, requests), |b| {
        b.to_async(runtime).iter(|| all_at_once(service.clone(), requests));
    });
}

fn one<S>(group: &mut BenchmarkGroup<'_, WallTime>, runtime: &Runtime, name: &str, service: &S)
where
    S: Service<Request<()>, Error: Debug> + Clone,
{
    group.bench_function(name, |b| b.to_async(runtime).iter(|| alone(service.clone())));
}

fn bench(c: &mut Criterion) {
    for (threads, runtime) in runtimes() {
        let mut group = c.benchmark_group(threads);
        for requests in [1, 100, 10_000] {
            group.throughput(Throughput::Elements(requests as u64));
            if requests == 10_000 {
                group.sample_size(20);
            }
            at_once(&mut group, &runtime, "no layer", requests, &no_layer(true));
            let tower = timeout_over_concurrency_limit(true);
            at_once(&mut group, &runtime, "timeout over concurrency limit", requests, &tower);
            at_once(&mut group, &runtime, "fair queue", requests, &fair_queue(true));
        }
        group.finish();

        // One request after the other, without a task or a yield: what the layers themselves cost.
        let mut group = c.benchmark_group(format!("{threads}, alone"));
        one(&mut group, &runtime, "no layer", &no_layer(false));
        let tower = timeout_over_concurrency_limit(false);
        one(&mut group, &runtime, "timeout over concurrency limit", &tower);
        one(&mut group, &runtime, "fair queue", &fair_queue(false));
        group.finish();
    }
}

criterion_group!(benches, bench);
criterion_main!(benches);
