//! What a queue does while Redis is out of reach, by each policy, and when it is back.

mod support;

use std::time::Duration;

use support::{
    Units, eventually,
    nodes::{Holding, end_check_on, heavy, hold, node, node_with, redis, state, taken_and_waiting},
    redis::{Kind, Proxy, Rule, Server, Way, require},
    soon,
};
use tokio::{
    task::{JoinHandle, JoinSet},
    time::{Instant, sleep},
};
use tower_fair_queue::{AcquireError, Ask, Cause, FairQueue, LeaseLost, Limit, Outage};

const SECOND: Duration = Duration::from_secs(1);
/// How soon a policy acts.
const POLICY: Duration = Duration::from_millis(750);
/// How late an answer may be after its deadline.
const LATE: Duration = Duration::from_millis(50);

fn millis(millis: u64) -> Duration {
    Duration::from_millis(millis)
}

async fn server() -> Option<Server> {
    Some(Server::start(&require(Kind::Redis70)?).await)
}

type Asked = JoinHandle<(Duration, Result<Holding, AcquireError>)>;

/// An acquire that runs by itself; it tells how long it took.
fn asking(queue: &FairQueue, units: &Units) -> Asked {
    asking_for(queue, units, Ask::new())
}

fn asking_for(queue: &FairQueue, units: &Units, ask: Ask) -> Asked {
    let (queue, units) = (queue.clone(), units.clone());
    tokio::spawn(async move {
        let start = Instant::now();
        let result = queue.acquire(ask).await.map(|permit| Holding::new(permit, &units));
        (start.elapsed(), result)
    })
}

/// Those that have been granted by now; the others stay in `asked`.
async fn granted(asked: &mut Vec<Asked>) -> Vec<Holding> {
    let mut granted = Vec::new();
    for ask in std::mem::take(asked) {
        if ask.is_finished() {
            granted.push(ask.await.unwrap().1.unwrap_or_else(|error| panic!("{error}")));
        } else {
            asked.push(ask);
        }
    }
    granted
}

/// Asks until it is granted. Until the node has heard of Redis again it may refuse.
async fn served_again(queue: &FairQueue, units: &Units) -> Holding {
    soon("normal service", async {
        loop {
            match hold(queue, units).await {
                Ok(held) => break held,
                Err(error) => assert_eq!(error.cause(), Cause::Unavailable),
            }
            sleep(millis(10)).await;
        }
    })
    .await
}

/// How the server goes away.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Away {
    /// Killed; it comes back with nothing of its data.
    Killed,
    /// Stopped where it stands.
    Stopped,
}

impl Away {
    fn begin(self, server: &mut Server) {
        match self {
            Self::Killed => server.kill9(),
            Self::Stopped => server.stop(),
        }
    }

    async fn end(self, server: &mut Server) {
        match self {
            Self::Killed => server.restart().await,
            Self::Stopped => server.cont(),
        }
    }

    /// How long the queue may take to grant again: a loss of data is followed by a recovery of about 2 s.
    fn pause(self) -> Duration {
        match self {
            Self::Killed => 4 * SECOND,
            Self::Stopped => 2 * SECOND,
        }
    }
}

// B43: C=4, all of it held, 50 parked and 20 more a second: each is refused within 750 ms.
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn reject_answers_all_while_redis_is_silent() {
    let Some(server) = server().await else { return };
    let queue = node("silent-reject", 4, redis(server.url()).outage(Outage::Reject)).await;
    let units = Units::default();
    let mut held = Vec::new();
    for _ in 0..4 {
        held.push(hold(&queue, &units).await.unwrap());
    }
    let mut asked: Vec<_> = (0..50).map(|_| asking(&queue, &units)).collect();
    eventually(SECOND, "50 wait", || state(&server, "silent-reject", "waiting") == 50).await;
    server.stop();
    let start = Instant::now();
    let long = if heavy() { 10 * SECOND } else { 4 * SECOND };
    while start.elapsed() < long {
        sleep(millis(50)).await;
        asked.push(asking(&queue, &units));
        if start.elapsed() > POLICY + millis(300) {
            let parked = asked.iter().take(50).filter(|ask| !ask.is_finished()).count();
            assert_eq!(parked, 0, "parked ones without an answer");
        }
    }
    for (index, ask) in asked.into_iter().enumerate() {
        let (took, result) = soon("an answer", ask).await.unwrap();
        let error = result.err().unwrap_or_else(|| panic!("the {index}th was granted"));
        assert_eq!(error.cause(), Cause::Unavailable, "the {index}th");
        // A node that has nothing to tell notices with its next heartbeat, so a first ask may be the first to find out.
        assert!(index < 50 || took <= POLICY, "the {index}th after {took:?}");
    }
    server.cont();
    let back = Instant::now();
    drop(held);
    drop(served_again(&queue, &units).await);
    assert!(back.elapsed() <= 2 * SECOND, "{:?}", back.elapsed());
    assert_eq!(units.peak(), 4);
    end_check_on(&server, &[&queue], &units).await;
}

// B43, B52: C=8, all of it held by one node; the other's share is 4. Of its 50 parked and 20 more a second it admits 4 within 750 ms and no
// more, and the others have their answer at their own deadline. When Redis is back nothing is granted until in flight is below C.
async fn local_admits_the_share(name: &'static str, away: Away) {
    let Some(mut server) = server().await else { return };
    let made = async || {
        let builder = support::config(name, 8).max_wait(3 * SECOND);
        node_with(builder, redis(server.url()).outage(Outage::Local)).await
    };
    let (full, other) = (made().await, made().await);
    let units = Units::default();
    let mut held = Vec::new();
    for _ in 0..8 {
        held.push(hold(&full, &units).await.unwrap());
    }
    // The other one knows of both.
    eventually(2 * SECOND, "two nodes", || state(&server, name, "live") == 2).await;
    let start = Instant::now();
    let mut asked: Vec<_> = (0..50).map(|_| asking(&other, &units)).collect();
    let waiting_here = asking(&full, &units);
    eventually(SECOND, "51 wait", || state(&server, name, "waiting") == 51).await;
    away.begin(&mut server);
    let began = Instant::now();
    eventually(POLICY + millis(200), "the share is admitted", || units.now() == 12).await;
    eprintln!("{name}: the share after {:?}", began.elapsed());
    while start.elapsed() < if heavy() { 10 * SECOND } else { 4 * SECOND } {
        sleep(millis(50)).await;
        asked.push(asking(&other, &units));
    }
    assert_eq!((units.now(), units.peak()), (12, 12), "no more than the share");
    assert!(waiting_here.is_finished(), "a node that holds more than its share admits nothing");
    assert!(waiting_here.await.unwrap().1.is_err_and(|error| error.is_timed_out()));
    let mut local = Vec::new();
    for ask in asked.drain(..50) {
        let (took, result) = soon("an answer", ask).await.unwrap();
        match result {
            Ok(holding) => local.push(holding),
            Err(error) => {
                assert_eq!(error.cause(), Cause::TimedOut);
                assert!(took <= 3 * SECOND + LATE, "{took:?}");
            }
        }
    }
    assert_eq!(local.len(), 4);
    // A local permit that ends lets the next one in, in order, at once.
    let entered = units.entered();
    drop(local.pop());
    eventually(millis(100), "the next", || units.entered() == entered + 1).await;
    assert_eq!((units.now(), units.peak()), (12, 12));

    away.end(&mut server).await;
    let back = Instant::now();
    eventually(away.pause(), "all is told", || state(&server, name, "in_flight") == 12).await;
    // Four have to go before one is granted; the asks stand in line meanwhile.
    let entered = units.entered();
    asked.push(asking(&other, &units));
    for left in (8..12).rev() {
        drop(held.pop());
        eventually(SECOND, "it is back", || state(&server, name, "in_flight") == left).await;
    }
    assert_eq!(units.entered(), entered, "nothing is granted while in flight is not below the capacity");
    eprintln!("{name}: shared again {:?} after", back.elapsed());
    drop(held.pop());
    drop(local);
    let more: Vec<_> = [&full, &other].map(|queue| asking(queue, &units)).into_iter().collect();
    drop(held);
    for ask in asked.into_iter().chain(more) {
        // Some have met their deadline.
        drop(soon("an answer", ask).await.unwrap());
    }
    assert_eq!(units.peak(), 12);
    end_check_on(&server, &[&full, &other], &units).await;
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn local_admits_the_share_while_redis_is_silent() {
    local_admits_the_share("silent-local", Away::Stopped).await;
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn local_admits_the_share_while_redis_is_gone() {
    local_admits_the_share("gone-local", Away::Killed).await;
}

/// A queue of C=4 on two nodes, one of which holds 3 and the other 1. Ten asks of the other meet an outage: so many of them are `admitted`
/// within 750 ms, and `then` so many once its own permit has ended. When Redis is back nothing is granted before what is in
/// flight is below the capacity, which is kept from then on, and all are served.
async fn outage(name: &'static str, policy: Outage, away: Away, admitted: usize, then: usize) {
    let Some(mut server) = server().await else { return };
    let settings = || redis(server.url()).outage(policy);
    let (other, queue) = (node(name, 4, settings()).await, node(name, 4, settings()).await);
    let units = Units::default();
    let mut held = Vec::new();
    for _ in 0..3 {
        held.push(hold(&other, &units).await.unwrap());
    }
    let own = hold(&queue, &units).await.unwrap();
    let mut asked: Vec<_> = (0..5).map(|_| asking(&queue, &units)).collect();
    eventually(SECOND, "5 wait", || state(&server, name, "waiting") == 5).await;
    away.begin(&mut server);
    asked.extend((0..5).map(|_| asking(&queue, &units)));
    let start = Instant::now();
    if policy == Outage::Reject {
        for ask in std::mem::take(&mut asked) {
            let (_, result) = soon("a refusal", ask).await.unwrap();
            assert_eq!(result.unwrap_err().cause(), Cause::Unavailable);
        }
        assert!(start.elapsed() <= POLICY, "{name}: {:?}", start.elapsed());
        let (took, result) = asking(&queue, &units).await.unwrap();
        assert_eq!(result.unwrap_err().cause(), Cause::Unavailable);
        assert!(took <= LATE, "{name}: once it is known a refusal comes at once, not after {took:?}");
    } else {
        eventually(POLICY, name, || units.now() == 4 + admitted).await;
    }
    // Reconnecting fails again and again meanwhile, and changes nothing.
    sleep((start + millis(1_500)).saturating_duration_since(Instant::now())).await;
    assert_eq!((units.now(), units.peak()), (4 + admitted, 4 + admitted), "{name}");
    drop(own);
    eventually(LATE, "what ends makes room", || units.now() == 3 + then).await;

    away.end(&mut server).await;
    let back = Instant::now();
    let in_flight = 3 + then.max(usize::from(policy == Outage::Wait));
    let told = || state(&server, name, "in_flight") == in_flight as u64 && units.now() == in_flight;
    eventually(away.pause(), &format!("{name}: all is told"), told).await;
    let mut rest = granted(&mut asked).await;
    rest.append(&mut held);
    let entered = units.entered();
    while rest.len() > 4 {
        drop(rest.pop());
        let left = rest.len() as u64;
        eventually(SECOND, "it is back", || state(&server, name, "in_flight") == left).await;
    }
    assert_eq!(units.entered(), entered, "{name}: nothing is granted before there is room");
    while !asked.is_empty() {
        drop(rest.pop());
        let next = || asked.iter().any(JoinHandle::is_finished);
        // The recovery may not be over yet.
        eventually(away.pause(), &format!("{name}: the next is granted"), next).await;
        rest.extend(granted(&mut asked).await);
        assert!(units.now() <= 4, "{name}: {units:?}");
    }
    drop(rest);
    drop(served_again(&queue, &units).await);
    eprintln!("{name}: normal {:?} after", back.elapsed());
    assert_eq!(units.peak(), 4 + admitted, "{name}");
    end_check_on(&server, &[&other, &queue], &units).await;
}

// B52: equal results with a server that is killed and one that is stopped.
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn each_policy_does_what_it_says() {
    let mut runs = JoinSet::new();
    for (name, policy, admitted, then) in [
        ("wait", Outage::Wait, 0, 0),
        ("reject", Outage::Reject, 0, 0),
        // A share of 2, one unit of which is held.
        ("local", Outage::Local, 1, 2),
        ("local-share", Outage::LocalShare(3), 2, 3),
        ("admit-some", Outage::Admit(Limit::AtMost(6)), 5, 6),
        ("admit-all", Outage::Admit(Limit::Unlimited), 10, 10),
    ] {
        for (away, suffix) in [(Away::Killed, "killed"), (Away::Stopped, "stopped")] {
            let name: &'static str = format!("{name}-{suffix}").leak();
            runs.spawn(outage(name, policy, away, admitted, then));
        }
    }
    soon("all policies", runs.join_all()).await;
}

// A request that waits through an outage has its answer at its deadline, whatever Redis does.
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn deadlines_hold_while_redis_is_away() {
    for away in [Away::Killed, Away::Stopped] {
        let Some(mut server) = server().await else { return };
        let name: &'static str = format!("deadline-{away:?}").leak();
        let queue = node(name, 1, redis(server.url()).outage(Outage::Wait)).await;
        let units = Units::default();
        let held = hold(&queue, &units).await.unwrap();
        away.begin(&mut server);
        let asked: Vec<_> = (0..20)
            .map(|index| {
                let patience = millis(100 * index + 1);
                let ask = Ask::new().deadline(Instant::now() + patience);
                (patience, asking_for(&queue, &units, ask))
            })
            .collect();
        for (patience, ask) in asked {
            let (took, result) = ask.await.unwrap();
            assert!(result.unwrap_err().is_timed_out());
            assert!(took <= patience + LATE, "{away:?}: {took:?} for {patience:?}");
        }
        away.end(&mut server).await;
        drop(held);
        drop(soon("a request", hold(&queue, &units)).await.unwrap());
        end_check_on(&server, &[&queue], &units).await;
    }
}

/// Cuts a node that holds 2 of C=2 off for longer than its lease of 5 s, while another one waits. When its holders were told, if they were, and when the
/// other was granted, both counted from the cut.
async fn cut_off(name: &str, lost: LeaseLost) -> Option<(Option<Duration>, Duration, Units)> {
    let server = server().await?;
    let proxy = Proxy::start(server.port()).await;
    let settings = |url: String| redis(url).lease(5 * SECOND).outage(Outage::Wait).lease_lost(lost);
    let cut = node(name, 2, settings(proxy.url())).await;
    let other = node(name, 2, settings(server.url())).await;
    let units = Units::default();
    let mut holders = JoinSet::new();
    for _ in 0..2 {
        let held = hold(&cut, &units).await.unwrap();
        holders.spawn(async move {
            held.permit.revoked().await;
            let when = Instant::now();
            drop(held);
            when
        });
    }
    let waiting = asking(&other, &units);
    eventually(SECOND, "it waits", || state(&server, name, "waiting") == 1).await;
    proxy.set(Way::Requests, Rule::Hold);
    proxy.set(Way::Replies, Rule::Swallow);
    let start = Instant::now();
    let (_, granted) = soon("the other is granted", waiting).await.unwrap();
    let granted_after = start.elapsed();
    let mut told = None;
    while let Some(when) = holders.try_join_next() {
        let after = when.unwrap() - start;
        told = Some(told.map_or(after, |told: Duration| told.max(after)));
    }
    let at_once = (units.peak(), units.now());
    if lost == LeaseLost::Continue {
        assert_eq!((at_once, told), ((3, 3), None), "they go on");
    }
    // Back again it knows better than what was under way when it was cut off.
    proxy.heal();
    eventually(3 * SECOND, "it is back", || state(&server, name, "live") == 2).await;
    let expected = if lost == LeaseLost::Continue { 3 } else { 1 };
    eventually(2 * SECOND, "what it holds is known", || taken_and_waiting(&server, name) == (expected, 0))
        .await;
    drop(granted);
    holders.shutdown().await;
    drop(soon("a request", hold(&cut, &units)).await.unwrap());
    end_check_on(&server, &[&cut, &other], &units).await;
    Some((told, granted_after, units))
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn aborted_permits_are_revoked_before_their_units_are_granted() {
    let Some((told, granted, units)) = cut_off("abort", LeaseLost::Abort).await else { return };
    let told = told.expect("the holders are told");
    assert!(told < granted, "told after {told:?}, granted after {granted:?}");
    // Its own lease is 3 s shorter, and was renewed up to a heartbeat before.
    assert!(told <= millis(2_100), "{told:?}");
    assert!(granted >= 4 * SECOND && granted <= millis(6_500), "{granted:?}");
    assert_eq!(units.peak(), 2);
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn permits_that_go_on_are_counted_again() {
    let Some((_, granted, units)) = cut_off("continue", LeaseLost::Continue).await else { return };
    assert!(granted >= 4 * SECOND && granted <= millis(6_500), "{granted:?}");
    assert_eq!(units.peak(), 3);
}
