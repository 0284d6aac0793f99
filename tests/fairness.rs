//! Who is served when several flows want more than there is, in paused time.

use std::{
    collections::HashMap,
    num::NonZeroU32,
    sync::{Arc, Mutex},
    time::Duration,
};

use tokio::time::{Instant, interval, sleep};
use tower_fair_queue::{Ask, FairQueue, FairQueueConfig, Limit};

fn ms(ms: u64) -> Duration {
    Duration::from_millis(ms)
}

fn cost(units: u32) -> Ask {
    Ask::new().cost(NonZeroU32::new(units).expect("not 0"))
}

/// What the holders of permits themselves write down.
#[derive(Clone, Default)]
struct Record(Arc<Mutex<Inner>>);

#[derive(Default)]
struct Inner {
    waits: HashMap<String, Vec<Duration>>,
    used: u32,
    peak: u32,
    /// Units times seconds.
    work: f64,
}

impl Record {
    /// Asks, holds for `hold`, and writes down what happened.
    async fn run(self, queue: FairQueue, ask: Ask, name: String, hold: Duration) {
        let asked = Instant::now();
        let permit = queue.acquire(ask).await.expect("nobody waits until a deadline here");
        {
            let mut inner = self.0.lock().unwrap();
            inner.waits.entry(name).or_default().push(asked.elapsed());
            inner.used += permit.units();
            inner.peak = inner.peak.max(inner.used);
        }
        sleep(hold).await;
        let mut inner = self.0.lock().unwrap();
        inner.used -= permit.units();
        inner.work += f64::from(permit.units()) * hold.as_secs_f64();
    }

    fn waits(&self, name: &str) -> Vec<Duration> {
        self.0.lock().unwrap().waits.get(name).cloned().unwrap_or_default()
    }

    fn peak(&self) -> u32 {
        self.0.lock().unwrap().peak
    }

    fn work(&self) -> f64 {
        self.0.lock().unwrap().work
    }
}

fn queue(capacity: u32) -> FairQueue {
    let config = FairQueueConfig::builder("q")
        .capacity(capacity)
        .max_waiting(Limit::Unlimited)
        .max_wait(FairQueueConfig::MAX_MAX_WAIT);
    FairQueue::new(config.build().unwrap())
}

// B33: a tenant's backlog does not stand before anyone else's single request.
#[tokio::test(start_paused = true)]
async fn a_noisy_flow_does_not_hold_up_quiet_ones() {
    let (queue, record) = (queue(4), Record::default());
    let start = Instant::now();
    let send = |flow: &str| {
        tokio::spawn(record.clone().run(queue.clone(), Ask::new().flow(flow), flow.to_owned(), ms(100)))
    };
    let noisy: Vec<_> = (0..1_000).map(|_| send("a")).collect();
    sleep(ms(1_000)).await;
    send("b").await.unwrap();
    let waited = record.waits("b")[0];
    assert!(waited <= ms(200), "b waited {waited:?}");

    sleep(ms(950)).await;
    let quiet: Vec<_> = (0..10).map(|i| send(&format!("quiet {i}"))).collect();
    for ask in quiet {
        ask.await.unwrap();
    }
    for i in 0..10 {
        let waited = record.waits(&format!("quiet {i}"))[0];
        assert!(waited <= ms(400), "quiet {i} waited {waited:?}");
    }
    for ask in noisy {
        ask.await.unwrap();
    }
    let share = record.work() / (4.0 * start.elapsed().as_secs_f64());
    assert!(share >= 0.95, "only {share} of the capacity was used");
    assert_eq!(record.peak(), 4);
    let waits = record.waits("a");
    assert!(waits.is_sorted(), "within a flow, arrival order");
}

// B35: a wide request is neither passed for ever nor does it stop the rest.
#[tokio::test(start_paused = true)]
async fn a_wide_request_gets_its_turn_and_the_small_ones_go_on() {
    let (queue, record) = (queue(10), Record::default());
    let small = || tokio::spawn(record.clone().run(queue.clone(), cost(1), "small".to_owned(), ms(200)));
    let start = Instant::now();
    let mut ticks = interval(Duration::from_secs_f64(1.0 / 60.0));
    let mut running = vec![];
    for i in 0..1_200 {
        ticks.tick().await;
        if i == 120 {
            let wide = record.clone().run(queue.clone(), cost(8), "wide".to_owned(), ms(200));
            running.push(tokio::spawn(wide));
        }
        running.push(small());
    }
    let done = record.waits("small").len();
    let elapsed = start.elapsed().as_secs_f64();
    for ask in running {
        ask.await.unwrap();
    }
    let waited = record.waits("wide")[0];
    assert!(waited <= ms(2_000), "the wide one waited {waited:?}");
    // Ten units of 200 ms serve 50 a second at most; 60 a second come.
    #[expect(clippy::cast_precision_loss, reason = "a small number")]
    let share = done as f64 / (50.0 * elapsed);
    assert!(share >= 0.7, "small ones had {share} of the ideal");
    assert_eq!(record.peak(), 10);
}

// B36, with the cap on units in flight: a flow at its cap leaves the rest to the others, and never passes it.
#[tokio::test(start_paused = true)]
async fn a_flow_at_its_cap_holds_nobody_up() {
    let config = FairQueueConfig::builder("q").capacity(10).max_in_flight_per_flow(2).max_wait(ms(60_000));
    let (queue, record) = (FairQueue::new(config.build().unwrap()), Record::default());
    let send = |flow: &'static str| {
        let record = record.clone();
        tokio::spawn(record.run(queue.clone(), Ask::new().flow(flow), flow.to_owned(), ms(1_000)))
    };
    let mut all: Vec<_> = (0..100).map(|_| send("a")).collect();
    tokio::task::yield_now().await;
    assert_eq!(queue.stats().in_flight, 2);
    all.extend((0..2).map(|_| send("b")));
    sleep(ms(1)).await;
    assert_eq!(record.waits("b"), [ms(0); 2], "b starts at once");
    all.extend(["c", "d", "e"].into_iter().flat_map(|flow| (0..4).map(move |_| flow)).map(send));
    sleep(ms(1)).await;
    assert_eq!(queue.stats().in_flight, 10, "all units are used");
    assert_eq!(record.waits("a").len(), 2);
    for ask in all {
        ask.await.unwrap();
    }
    let last = record.waits("a")[99];
    assert_eq!(last.as_secs(), 49, "a has had its two units all along");
    assert_eq!(queue.stats().flows, 0);
}
