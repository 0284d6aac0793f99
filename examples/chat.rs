//! A chat server of which three answers run at once, and a page that shows what becomes of the fourth.
//!
//! ```text
//! cargo run --example chat
//! cargo run --example chat -- --capacity 1 --max-wait 5s --port 8080
//! cargo run --features redis --example chat -- --redis redis://127.0.0.1:6379 --port 3000
//! ```
//!
//! Open the address it prints and ask ten questions at once. Three answers stream, seven questions wait in line and start one by one
//! as permits come back; one that waits longer than `--max-wait` is told that the line is too long and when to come back, and the
//! history has it. Close the tab, and its questions leave the line. Stop the server with Ctrl-C while answers stream: whoever waits
//! is told at once, the answers get five seconds to end.
//!
//! With `--redis` several of these servers are one queue: start another with `--port 3001` and ask on both pages. Three answers stream
//! over the two, and a permit that comes back on one starts a question of the other. Kill one, and what it held is the other's
//! once its lease is over.
//!
//! `/metrics` has the queue's metrics for Prometheus, `/queue` its numbers as JSON, `/history/{conversation}` what was said.

#![expect(clippy::print_stdout, reason = "the address to open and the help are for whoever started it")]

use std::{
    collections::VecDeque,
    error::Error,
    net::Ipv4Addr,
    process::exit,
    sync::{Arc, Mutex, PoisonError},
    time::Duration,
};

use axum::{
    Json, Router,
    body::to_bytes,
    extract::{Path, Request, State},
    http::{HeaderValue, Method, StatusCode, header},
    middleware::{Next, from_fn_with_state},
    response::{Html, IntoResponse, Response, Sse, sse::Event},
    routing::{get, post},
};
use futures_util::{Stream, future::join_all, stream::unfold};
use metrics_exporter_prometheus::{Matcher, PrometheusBuilder};
use serde::{Deserialize, Serialize};
use serde_json::json;
use tokio::{net::TcpListener, sync::watch, time::timeout};
use tower_fair_queue::{
    Ask, Cause, Class, FairQueueConfig, FairQueueConfigBuilder, FairQueueLayer, Limit, Rejection,
};

const HELP: &str = "\
A chat server behind a fair queue, on 127.0.0.1.

  --port N              port of the page; 0 is any free one [3000]
  --capacity N          answers that stream at once [3]
  --max-wait TIME       longest wait in line [20s]
  --max-waiting N       most questions in line [100]
  --tokens N            words of an answer [40]
  --token-interval TIME time from one word to the next [250ms]
  --help                this text

One queue over several servers, where it is built with `--features redis`:

  --redis URL           the server that keeps the queue, such as redis://127.0.0.1:6379
  --outage POLICY       while it is out of reach: wait, reject, local or admit [local]
  --lease-lost POLICY   answers of a server that could not renew its lease: continue, or abort, which
                        needs --outage wait or reject [continue]
  --lease TIME          how long a silent server keeps its permits, from 5s on [10s]

TIME is a whole number with its unit: 500ms, 20s or 1m.";

const BODY_LIMIT: usize = 64 * 1024;
const GRACE: Duration = Duration::from_secs(5);
/// A browser opens at most six HTTP/1.1 connections to one port, so ten questions sent to one port would leave four of them in the
/// browser's own line, where the page would call them waiting and the queue would not know them. The page therefore sends its
/// questions to these further ports, at most five to each, and polls `/queue` on its own port, which no answer can block.
const DOORS: usize = 4;

struct Flags {
    port: u16,
    capacity: u32,
    max_wait: Duration,
    max_waiting: u32,
    tokens: usize,
    token_interval: Duration,
    redis: Option<Shared>,
}

/// What there is to be told of a queue in Redis.
#[cfg_attr(not(feature = "redis"), expect(dead_code, reason = "nothing is done with it but to refuse it"))]
struct Shared {
    url: String,
    outage: Option<String>,
    lease_lost: Option<String>,
    lease: Option<Duration>,
}

impl Flags {
    fn parse(mut args: impl Iterator<Item = String>) -> Result<Self, String> {
        let ms = Duration::from_millis;
        let (mut port, mut capacity, mut max_waiting, mut tokens) = (3000, 3, 100, 40);
        let (mut max_wait, mut token_interval) = (ms(20_000), ms(250));
        let (mut redis, mut outage, mut lease_lost, mut lease) = (None, None, None, None);
        while let Some(arg) = args.next() {
            let (flag, value) = match arg.split_once('=') {
                Some((flag, value)) => (flag, Some(value.to_owned())),
                None => (&*arg, None),
            };
            if flag == "--help" {
                println!("{HELP}");
                exit(0);
            }
            let mut value = || value.clone().or_else(|| args.next()).unwrap_or_default();
            match flag {
                "--port" => port = number(flag, &value(), 0, u16::MAX.into())?,
                "--capacity" => capacity = number(flag, &value(), 1, u32::MAX.into())?,
                "--max-wait" => max_wait = time(flag, &value())?,
                "--max-waiting" => max_waiting = number(flag, &value(), 1, u32::MAX.into())?,
                "--tokens" => tokens = number(flag, &value(), 1, 10_000)?,
                "--token-interval" => token_interval = time(flag, &value())?,
                "--redis" => redis = Some(value()),
                "--outage" => outage = Some(one_of(flag, value(), &["wait", "reject", "local", "admit"])?),
                "--lease-lost" => lease_lost = Some(one_of(flag, value(), &["continue", "abort"])?),
                "--lease" => lease = Some(time(flag, &value())?),
                _ => return Err(format!("{flag}: there is no such flag; --help lists them")),
            }
        }
        let needs_redis = [outage.is_some(), lease_lost.is_some(), lease.is_some()];
        let needs_redis = ["--outage", "--lease-lost", "--lease"].into_iter().zip(needs_redis);
        if redis.is_none()
            && let Some((flag, _)) = needs_redis.into_iter().find(|&(_, given)| given)
        {
            return Err(format!("{flag}: has no meaning without --redis"));
        }
        if redis.is_some() && cfg!(not(feature = "redis")) {
            return Err("--redis: this program was built without Redis; run it with \
                        `cargo run --features redis --example chat -- --redis URL`"
                .to_owned());
        }
        let redis = redis.map(|url| Shared { url, outage, lease_lost, lease });
        Ok(Self { port, capacity, max_wait, max_waiting, tokens, token_interval, redis })
    }
}

fn one_of(flag: &str, value: String, names: &[&str]) -> Result<String, String> {
    if names.contains(&&*value) {
        return Ok(value);
    }
    Err(format!("{flag}: takes one of {}, not {value:?}", names.join(", ")))
}

fn number<N: TryFrom<u64>>(flag: &str, value: &str, least: u64, most: u64) -> Result<N, String> {
    let number = value.parse().ok().filter(|number| (least..=most).contains(number));
    let number = number.and_then(|number| number.try_into().ok());
    number.ok_or_else(|| format!("{flag}: takes a whole number from {least} to {most}, not {value:?}"))
}

fn time(flag: &str, value: &str) -> Result<Duration, String> {
    let (digits, unit) = value.split_at(value.bytes().take_while(u8::is_ascii_digit).count());
    let unit = [("ms", 1), ("s", 1_000), ("m", 60_000)].into_iter().find(|&(name, _)| name == unit);
    let millis = unit.and_then(|(_, millis)| digits.parse::<u64>().ok()?.checked_mul(millis));
    millis.filter(|millis| (1..=86_400_000).contains(millis)).map(Duration::from_millis).ok_or_else(|| {
        format!("{flag}: takes a time from 1ms to 1440m, such as 500ms, 20s or 1m, not {value:?}")
    })
}

#[derive(Default, Deserialize)]
struct Question {
    question: String,
    conversation: String,
}

/// One question and what became of it.
#[derive(Clone, Serialize)]
struct Exchange {
    question: String,
    answer: String,
    /// `answered`, `interrupted` or `rejected`.
    status: &'static str,
    #[serde(skip_serializing_if = "Option::is_none")]
    cause: Option<&'static str>,
}

/// The latest conversations, the one written to last at the end. Both bounds forget the oldest.
#[derive(Clone, Default)]
struct History(Arc<Mutex<VecDeque<(String, VecDeque<Exchange>)>>>);

impl History {
    const CONVERSATIONS: usize = 100;
    const EXCHANGES: usize = 50;
    const BOUNDS: &str = "question: 1 to 4000 bytes; conversation: 1 to 64 bytes\n";

    fn holds(asked: &Question) -> bool {
        (1..=4_000).contains(&asked.question.len()) && (1..=64).contains(&asked.conversation.len())
    }

    fn keep(&self, conversation: String, exchange: Exchange) {
        let mut all = self.0.lock().unwrap_or_else(PoisonError::into_inner);
        let known = all.iter().position(|(name, _)| *name == conversation);
        let (_, mut exchanges) = known.and_then(|index| all.remove(index)).unwrap_or_default();
        exchanges.push_back(exchange);
        while exchanges.len() > Self::EXCHANGES {
            exchanges.pop_front();
        }
        all.push_back((conversation, exchanges));
        while all.len() > Self::CONVERSATIONS {
            all.pop_front();
        }
    }

    fn of(&self, conversation: &str) -> Option<VecDeque<Exchange>> {
        let all = self.0.lock().unwrap_or_else(PoisonError::into_inner);
        all.iter().find(|(name, _)| name == conversation).map(|(_, exchanges)| exchanges.clone())
    }
}

/// An answer under way. The response body owns it, so that it is kept as far as it came, whoever ends the body.
struct Answer {
    history: History,
    asked: Question,
    words: Vec<&'static str>,
    told: usize,
    interval: Duration,
}

impl Answer {
    fn events(self) -> impl Stream<Item = Result<Event, axum::Error>> {
        unfold(Some(self), |answer| async {
            let mut answer = answer?;
            let Some(word) = answer.words.get(answer.told) else {
                let done = Event::default().event("done").json_data(json!({ "tokens": answer.told }));
                return Some((done, None));
            };
            tokio::time::sleep(answer.interval).await;
            answer.told += 1;
            let token = Event::default().event("token").json_data(json!({ "text": format!("{word} ") }));
            Some((token, Some(answer)))
        })
    }
}

impl Drop for Answer {
    fn drop(&mut self) {
        let status = if self.told == self.words.len() { "answered" } else { "interrupted" };
        let Question { question, conversation } = std::mem::take(&mut self.asked);
        let answer = self.words[..self.told].join(" ");
        self.history.keep(conversation, Exchange { question, answer, status, cause: None });
    }
}

/// Each has 40 words, of which the first 20 are a sentence too.
const ANSWERS: [&str; 4] = [
    "A line is fair when nobody waits longer because somebody else asks more often: each user has their \
     own line. The queue goes round them and takes one question from each, so whoever comes with only \
     one is served soon.",
    "As many answers stream as there are permits, and when one ends its permit goes to the next in line. \
     It goes at once and to nobody else, which is why the others start one by one and not together.",
    "A rate limit counts how many begin, while this queue counts how many are under way, which is what \
     hurts. A thousand short requests are no harm to anybody; three long ones may be all a graphics card \
     can bear.",
    "If you close this page the answer stops, its permit goes back at once, and the next in line starts. \
     If you lose patience in line your place is given up, and nobody has to clean anything up by hand.",
];

#[derive(Clone)]
struct App {
    flags: Arc<Flags>,
    history: History,
    page: Arc<str>,
    /// The page's origins, which may read what the other ports answer.
    origins: Arc<[HeaderValue]>,
}

async fn chat(State(app): State<App>, Json(asked): Json<Question>) -> Response {
    if !History::holds(&asked) {
        return (StatusCode::UNPROCESSABLE_ENTITY, History::BOUNDS).into_response();
    }
    let text = ANSWERS[asked.question.bytes().map(usize::from).sum::<usize>() % ANSWERS.len()];
    let words = text.split(' ').cycle().take(app.flags.tokens).collect();
    let answer = Answer { history: app.history, asked, words, told: 0, interval: app.flags.token_interval };
    Sse::new(answer.events()).into_response()
}

async fn history(State(app): State<App>, Path(conversation): Path<String>) -> Response {
    app.history.of(&conversation).map(Json).ok_or(StatusCode::NOT_FOUND).into_response()
}

/// Answers as the queue would, and keeps the question with the reason it got no answer.
async fn busy(history: History, rejection: Rejection, request: Request) -> Response {
    let body = to_bytes(request.into_body(), BODY_LIMIT).await.unwrap_or_default();
    if let Ok(asked) = serde_json::from_slice::<Question>(&body)
        && History::holds(&asked)
    {
        let answer = match rejection.cause() {
            Cause::ShuttingDown => "I am being stopped and could not take your question.".to_owned(),
            Cause::Unavailable => {
                format!("I cannot reach the queue. Try again in {} s.", rejection.retry_after().as_secs())
            }
            _ => format!("Too many are asking me now. Try again in {} s.", rejection.retry_after().as_secs()),
        };
        let (question, cause) = (asked.question, Some(rejection.cause().as_str()));
        history.keep(asked.conversation, Exchange { question, answer, status: "rejected", cause });
    }
    rejection.response()
}

/// Stands outside the queue. While a request is parked, hyper notices that an HTTP/1 client has left only if nothing of the
/// request is left to read, so the body is read before the wait begins, and it is bounded because those who wait hold it in memory.
async fn enter(State(app): State<App>, request: Request, next: Next) -> Response {
    let origin = request.headers().get(header::ORIGIN).filter(|origin| app.origins.contains(origin)).cloned();
    let mut response = if request.method() == Method::OPTIONS {
        StatusCode::NO_CONTENT.into_response()
    } else {
        let (head, body) = request.into_parts();
        match to_bytes(body, BODY_LIMIT).await {
            Ok(body) => next.run(Request::from_parts(head, body.into())).await,
            Err(_) => StatusCode::PAYLOAD_TOO_LARGE.into_response(),
        }
    };
    if let Some(origin) = origin {
        let headers = response.headers_mut();
        headers.insert(header::ACCESS_CONTROL_ALLOW_ORIGIN, origin);
        headers.insert(header::VARY, HeaderValue::from_static("origin"));
        let allowed = HeaderValue::from_static("content-type, x-user");
        headers.insert(header::ACCESS_CONTROL_ALLOW_HEADERS, allowed);
        headers.insert(header::ACCESS_CONTROL_MAX_AGE, HeaderValue::from_static("600"));
    }
    response
}

/// The layer over a queue of this process, or over one that it shares.
#[cfg(feature = "redis")]
async fn layer(builder: FairQueueConfigBuilder, flags: &Flags) -> FairQueueLayer {
    use tower_fair_queue::{LeaseLost, Outage, RedisConfig};

    let Some(shared) = &flags.redis else { return FairQueueLayer::new(built(builder)) };
    let mut redis = RedisConfig::new(&shared.url)
        .outage(match shared.outage.as_deref() {
            Some("wait") => Outage::Wait,
            Some("reject") => Outage::Reject,
            Some("admit") => Outage::Admit(Limit::Unlimited),
            _ => Outage::Local,
        })
        .lease_lost(match shared.lease_lost.as_deref() {
            Some("abort") => LeaseLost::Abort,
            _ => LeaseLost::Continue,
        });
    if let Some(lease) = shared.lease {
        redis = redis.lease(lease);
    }
    // It could as well be served at once and let the first questions wait, but whoever starts this wants to know what is wrong.
    FairQueueLayer::connect(built(builder.redis(redis))).await.unwrap_or_else(|error| {
        eprintln!("--redis: {error}");
        exit(1);
    })
}

#[cfg(not(feature = "redis"))]
async fn layer(builder: FairQueueConfigBuilder, _flags: &Flags) -> FairQueueLayer {
    FairQueueLayer::new(built(builder))
}

fn built(builder: FairQueueConfigBuilder) -> FairQueueConfig {
    builder.build().unwrap_or_else(|error| {
        eprintln!("{error}");
        exit(2);
    })
}

#[tokio::main]
async fn main() -> Result<(), Box<dyn Error>> {
    let flags = Flags::parse(std::env::args().skip(1)).unwrap_or_else(|error| {
        eprintln!("{error}");
        exit(2);
    });

    // A wait as long as it can be ends its own bucket, so that the share below it is the share of those who were let in.
    let max_wait = flags.max_wait.as_secs_f64();
    let mut buckets = vec![0.01, 0.05, 0.1, 0.25, 0.5, 1.0, 2.5, 5.0, 10.0, 20.0, 30.0, 60.0, 120.0, 300.0];
    buckets.retain(|&bound| bound != max_wait);
    buckets.push(max_wait);
    buckets.sort_by(f64::total_cmp);
    let metrics = PrometheusBuilder::new()
        .set_buckets_for_metric(Matcher::Full("fairqueue_wait_seconds".to_owned()), &buckets)?
        .set_buckets_for_metric(Matcher::Full("fairqueue_hold_seconds".to_owned()), &buckets)?
        .install_recorder()?;
    let upkeep = metrics.clone();
    tokio::spawn(async move {
        loop {
            tokio::time::sleep(Duration::from_secs(5)).await;
            upkeep.run_upkeep();
        }
    });

    let config = FairQueueConfig::builder("chat")
        .capacity(flags.capacity)
        .max_wait(flags.max_wait)
        .max_waiting(flags.max_waiting);
    let history = History::default();
    let kept = history.clone();
    let layer = layer(config, &flags)
        .await
        .classify(|head| match (head.method(), head.uri().path()) {
            (&Method::POST, "/chat") => {
                let ask = Ask::new();
                head.headers().get("x-user").map_or(ask.clone(), |user| ask.flow(user.as_bytes())).into()
            }
            _ => Class::Bypass,
        })
        .reject_with_async(move |rejection, request| busy(kept.clone(), rejection, request));
    let queue = layer.queue().clone();

    let stop_signal = stop_signal()?;
    let bound = TcpListener::bind((Ipv4Addr::LOCALHOST, flags.port)).await;
    let mut listeners = vec![bound.map_err(|error| format!("--port {}: {error}", flags.port))?];
    for _ in 0..DOORS {
        listeners.push(TcpListener::bind((Ipv4Addr::LOCALHOST, 0)).await?);
    }
    let ports = listeners.iter().map(|listener| Ok(listener.local_addr()?.port().to_string()));
    let ports = ports.collect::<Result<Vec<_>, std::io::Error>>()?;
    let page = include_str!("chat/index.html")
        .replace("{{doors}}", &ports[1..].join(" "))
        .replace("{{shared}}", if flags.redis.is_some() { "yes" } else { "no" })
        .replace("{{max_wait_ms}}", &flags.max_wait.as_millis().to_string());
    let origins = ["127.0.0.1", "localhost"].map(|host| format!("http://{host}:{}", ports[0]).try_into());
    let origins = origins.into_iter().collect::<Result<_, _>>()?;
    let app = App { flags: Arc::new(flags), history, page: page.into(), origins };

    let stats = queue.clone();
    let router = Router::new()
        .route("/", get(|State(app): State<App>| async move { Html(app.page.to_string()) }))
        .route("/chat", post(chat))
        .route("/history/{conversation}", get(self::history))
        .route("/metrics", get(move || async move { metrics.render() }))
        .route("/healthz", get(|| async { "ok\n" }))
        .route("/queue", get(move || async move { numbers(stats.stats()) }))
        .layer(layer)
        .layer(from_fn_with_state(app.clone(), enter))
        .with_state(app);

    let (stop, stopped) = watch::channel(());
    let servers = listeners.into_iter().map(|listener| {
        let mut stopped = stopped.clone();
        let serve = axum::serve(listener, router.clone());
        tokio::spawn(serve.with_graceful_shutdown(async move { _ = stopped.changed().await }).into_future())
    });
    let servers: Vec<_> = servers.collect();
    println!("open http://127.0.0.1:{}/", ports[0]);

    stop_signal.await;
    drop(stop);
    let drained = queue.drain(GRACE).await;
    // A client that reads nothing more keeps its connection for ever, so what is left of them ends with the process.
    let closed = timeout(Duration::from_secs(1), join_all(servers)).await.is_ok();
    let (cut_off, unread) = (drained.revoked(), drained.remaining());
    eprintln!("stopped: {cut_off} cut off, {unread} of them unread; all connections closed: {closed}");
    Ok(())
}

fn numbers(stats: tower_fair_queue::Stats) -> Json<serde_json::Value> {
    let capacity = match stats.capacity {
        Limit::AtMost(units) => Some(units),
        Limit::Unlimited => None,
    };
    Json(json!({
        "capacity": capacity, "in_flight": stats.in_flight, "waiting": stats.waiting, "flows": stats.flows,
        "own_in_flight": stats.own_in_flight, "own_waiting": stats.own_waiting,
    }))
}

/// The future of the first signal to stop. The signals are caught from the call on, before anything is served.
#[cfg(unix)]
fn stop_signal() -> std::io::Result<impl Future<Output = ()>> {
    use tokio::signal::unix::{SignalKind, signal};
    let (mut interrupt, mut terminate) = (signal(SignalKind::interrupt())?, signal(SignalKind::terminate())?);
    Ok(async move {
        tokio::select! {
            _ = interrupt.recv() => {}
            _ = terminate.recv() => {}
        }
    })
}

#[cfg(not(unix))]
fn stop_signal() -> std::io::Result<impl Future<Output = ()>> {
    Ok(async { _ = tokio::signal::ctrl_c().await })
}
