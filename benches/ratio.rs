//! How much longer a request takes through the layer than through tower's own limit doing the same job.
//!
//! `cargo bench --bench ratio`. The variants take turns in slices of some milliseconds, so that what troubles the machine
//! troubles them alike. Told are the median time of a request with each, and the ratio of our layer to tower's `Timeout` over
//! `ConcurrencyLimit`: the median over all rounds of turns, and between which values half of the rounds lie.

#![expect(clippy::print_stdout, reason = "the table is what it is run for")]

use std::{fmt::Debug, time::Duration};

use http::Request;
use tokio::{runtime::Runtime, time::Instant};
use tower::Service;

mod support;

use support::{all_at_once, alone, fair_queue, no_layer, runtimes, timeout_over_concurrency_limit};

const ROUNDS: usize = 201;
const SLICE: Duration = Duration::from_millis(4);

/// Runs a variant so many times and tells how long it took.
type Variant<'a> = Box<dyn Fn(u32) -> Duration + 'a>;

fn timed<S>(runtime: &Runtime, requests: usize, service: S) -> Variant<'_>
where
    S: Service<Request<()>, Future: Send, Response: Send, Error: Debug + Send> + Clone + Send + 'static,
{
    Box::new(move |times| {
        runtime.block_on(async {
            let start = Instant::now();
            for _ in 0..times {
                match requests {
                    0 => alone(service.clone()).await,
                    _ => all_at_once(service.clone(), requests).await,
                }
            }
            start.elapsed()
        })
    })
}

fn quartiles(mut values: Vec<f64>) -> [f64; 3] {
    values.sort_by(f64::total_cmp);
    [1, 2, 3].map(|quarter| values[(values.len() - 1) * quarter / 4])
}

fn main() {
    println!("{:26}{:>12}{:>12}{:>12}   ratio", "nanoseconds per request", "no layer", "tower", "fair queue");
    for (threads, runtime) in &runtimes() {
        for (name, requests) in [("alone", 0), ("1 task", 1), ("100 tasks", 100), ("10,000 tasks", 10_000)] {
            let yields = requests > 0;
            let variants = [
                timed(runtime, requests, no_layer(yields)),
                timed(runtime, requests, timeout_over_concurrency_limit(yields)),
                timed(runtime, requests, fair_queue(yields)),
            ];
            let mut times = 1;
            while variants[1](times) < SLICE && times < 1 << 20 {
                times *= 2;
            }
            let mut taken = [const { Vec::new() }; 3];
            for round in 0..ROUNDS {
                for turn in 0..3 {
                    let variant = (round + turn) % 3;
                    let per_run = variants[variant](times) / times;
                    taken[variant].push(per_run.as_secs_f64() * 1e9 / requests.max(1) as f64);
                }
            }
            let ratios = taken[2].iter().zip(&taken[1]).map(|(ours, tower)| ours / tower).collect();
            let [low, ratio, high] = quartiles(ratios);
            let [none, tower, ours] = taken.map(|taken| quartiles(taken)[1]);
            let name = format!("{threads}, {name}");
            println!("{name:26}{none:12.0}{tower:12.0}{ours:12.0}   {ratio:.3} ({low:.3} to {high:.3})");
        }
    }
}
