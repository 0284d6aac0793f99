//! The layer by itself, without sockets: tower's contract, order of drops, rejections.

use std::{
    convert::Infallible,
    pin::Pin,
    sync::{
        Arc,
        atomic::{AtomicU64, Ordering},
    },
    task::{Context, Poll, ready},
    time::Duration,
};

use bytes::Bytes;
use futures_util::FutureExt as _;
use http::{Request, Response, StatusCode};
use http_body::{Body, Frame};
use http_body_util::{BodyExt, Full};
use tokio_test::{assert_pending, assert_ready, assert_ready_err, assert_ready_ok, task};
use tower::{Layer, Service, ServiceBuilder, ServiceExt, service_fn};
use tower_fair_queue::{Ask, Cause, Class, FairQueue, FairQueueConfig, FairQueueLayer, Rejection, Revoked};

fn layer(capacity: u32) -> FairQueueLayer {
    FairQueueLayer::new(FairQueueConfig::builder("q").capacity(capacity).build().expect("within its bounds"))
}

async fn hello(_: Request<()>) -> Result<Response<Full<Bytes>>, Infallible> {
    Ok(Response::new(Full::from("hello")))
}

#[track_caller]
fn assert_numbers(queue: &FairQueue, in_flight: u64, waiting: u64) {
    let stats = queue.stats();
    assert_eq!((stats.in_flight, stats.waiting), (in_flight, waiting), "in flight and waiting");
}

#[tokio::test(start_paused = true)]
async fn a_permit_lives_as_long_as_the_body() {
    let layer = layer(1);
    let queue = layer.queue().clone();
    let service = layer.layer(service_fn(hello));

    let held = service.clone().oneshot(Request::new(())).await.unwrap();
    assert_numbers(&queue, 1, 0);

    let rejected = service.clone().oneshot(Request::new(())).await.unwrap();
    assert_eq!(rejected.status(), StatusCode::SERVICE_UNAVAILABLE);
    assert_eq!(rejected.extensions().get::<Rejection>().unwrap().cause(), Cause::TimedOut);

    assert_eq!(held.into_body().collect().await.unwrap().to_bytes(), "hello");
    assert_numbers(&queue, 0, 0);
    let granted = service.oneshot(Request::new(())).await.unwrap();
    assert_eq!(granted.status(), StatusCode::OK);
    drop(granted);
    assert_numbers(&queue, 0, 0);
}

// B15.
#[tokio::test]
async fn readiness_reserves_nothing() {
    let layer = layer(2);
    let queue = layer.queue().clone();
    let service = layer.layer(service_fn(hello));
    let mut idle: Vec<_> = (0..10).map(|_| task::spawn(service.clone())).collect();
    idle.iter_mut().for_each(|clone| assert_ready_ok!(clone.enter(|cx, mut clone| clone.poll_ready(cx))));
    assert_numbers(&queue, 0, 0);
    let response = service.clone().oneshot(Request::new(())).await.unwrap();
    assert_numbers(&queue, 1, 0);
    drop(idle);
    assert_numbers(&queue, 1, 0);
    drop(response);
    assert_numbers(&queue, 0, 0);
}

// B17: readiness asks nobody, so neither a spent budget nor a full queue sheds anything.
#[tokio::test]
async fn a_load_shed_above_never_sheds() {
    for (capacity, parked) in [(10_000, 0), (1, 9_999)] {
        let layer = || {
            let config = FairQueueConfig::builder("q").capacity(capacity).max_waiting(10_000);
            FairQueueLayer::new(config.build().unwrap())
        };
        let (bare, buffered) = (layer(), layer());
        let queue = bare.queue().clone();
        let shed = ServiceBuilder::new().load_shed().layer(bare).service(service_fn(hello));
        call_ten_thousand_times(shed, &queue, parked).await;

        let queue = buffered.queue().clone();
        let shed = ServiceBuilder::new()
            .load_shed()
            .buffer::<Request<()>>(20_000)
            .layer(buffered)
            .service(service_fn(hello));
        // The readiness of tower's own buffer spends the task's budget, whatever it stands over.
        tokio::task::unconstrained(call_ten_thousand_times(shed, &queue, parked)).await;
    }
}

/// Calls in a tight loop from one task, and then awaits the answers.
async fn call_ten_thousand_times<S, B>(mut service: S, queue: &FairQueue, parked: u64)
where
    S: Service<Request<()>, Response = Response<B>>,
    S::Future: Send + 'static,
    S::Response: Send + 'static,
    S::Error: std::fmt::Debug + Send + 'static,
{
    let mut calls = vec![];
    for _ in 0..10_000 {
        calls.push(tokio::spawn(service.ready().await.unwrap().call(Request::new(()))));
    }
    while parked > 0 && queue.stats().waiting < parked {
        tokio::task::yield_now().await;
    }
    let mut responses = vec![];
    for call in calls {
        let response = call.await.unwrap().expect("nothing is shed");
        assert_eq!(response.status(), StatusCode::OK);
        // With one unit, the next one needs it.
        if parked == 0 {
            responses.push(response);
        }
    }
    drop(responses);
    assert_numbers(queue, 0, 0);
}

/// Must be polled ready, on the instance that is called, and gets ready at the second poll.
struct Fussy {
    polls: u32,
    fail: bool,
}

impl Clone for Fussy {
    fn clone(&self) -> Self {
        Self { polls: 0, fail: self.fail }
    }
}

impl Service<Request<()>> for Fussy {
    type Response = Response<Full<Bytes>>;
    type Error = &'static str;
    type Future = std::future::Ready<Result<Self::Response, Self::Error>>;

    fn poll_ready(&mut self, cx: &mut Context<'_>) -> Poll<Result<(), Self::Error>> {
        self.polls += 1;
        match self.polls {
            1 => {
                cx.waker().wake_by_ref();
                Poll::Pending
            }
            _ if self.fail => Poll::Ready(Err("not ready")),
            _ => Poll::Ready(Ok(())),
        }
    }

    fn call(&mut self, _: Request<()>) -> Self::Future {
        assert!(self.polls > 1, "called without being ready");
        std::future::ready(Ok(Response::new(Full::from("hello"))))
    }
}

#[tokio::test]
async fn the_inner_service_is_made_ready_after_the_grant_on_the_instance_that_is_called() {
    let layer = layer(1);
    let queue = layer.queue().clone();
    let held = queue.try_acquire(Ask::new()).now_or_never().unwrap().unwrap();
    let mut response = task::spawn(layer.layer(Fussy { polls: 0, fail: false }).oneshot(Request::new(())));
    assert_pending!(response.poll());
    drop(held);
    assert_pending!(response.poll(), "granted, and not ready yet");
    assert_numbers(&queue, 1, 0);
    drop(assert_ready_ok!(response.poll()));
    assert_numbers(&queue, 0, 0);

    let mut failing = task::spawn(layer.layer(Fussy { polls: 0, fail: true }).oneshot(Request::new(())));
    assert_pending!(failing.poll());
    assert_eq!(assert_ready_err!(failing.poll()), "not ready");
    assert_numbers(&queue, 0, 0);
}

/// Notes, as it is dropped, how many units are in flight.
struct Witness {
    queue: FairQueue,
    seen: Arc<AtomicU64>,
}

impl Drop for Witness {
    fn drop(&mut self) {
        self.seen.store(self.queue.stats().in_flight, Ordering::SeqCst);
    }
}

/// Never ends and never has anything.
struct Endless(#[expect(dead_code, reason = "it is there for its drop")] Witness);

impl Body for Endless {
    type Data = Bytes;
    type Error = Infallible;

    fn poll_frame(
        self: Pin<&mut Self>,
        _: &mut Context<'_>,
    ) -> Poll<Option<Result<Frame<Bytes>, Infallible>>> {
        Poll::Pending
    }
}

// P1: what runs is gone before its units are someone else's.
#[tokio::test(start_paused = true)]
async fn the_work_is_dropped_before_its_units_go_back() {
    let layer = layer(1);
    let (queue, seen) = (layer.queue().clone(), Arc::new(AtomicU64::new(9)));
    let service = layer.layer(service_fn(|request: Request<bool>| {
        let witness = Witness { queue: queue.clone(), seen: Arc::clone(&seen) };
        async move {
            if *request.body() {
                std::future::pending::<()>().await;
            }
            Ok::<_, Infallible>(Response::new(Endless(witness)))
        }
    }));
    let seen = || seen.swap(9, Ordering::SeqCst);

    let response = service.clone().oneshot(Request::new(false)).await.unwrap();
    drop(response);
    assert_eq!(seen(), 1, "the body, dropped");

    let mut running = task::spawn(service.clone().oneshot(Request::new(true)));
    assert_pending!(running.poll());
    drop(running);
    assert_eq!(seen(), 1, "the future, dropped");

    let mut body = task::spawn(service.clone().oneshot(Request::new(false)).await.unwrap().into_body());
    assert_pending!(body.enter(|cx, body| body.poll_frame(cx)));
    let mut drain = task::spawn(queue.drain(Duration::ZERO));
    assert_pending!(drain.poll());
    assert!(body.is_woken());
    let error =
        assert_ready!(body.enter(|cx, body| body.poll_frame(cx))).expect("an error and no end").unwrap_err();
    assert!(error.is::<Revoked>());
    assert_eq!(seen(), 1, "the body, revoked");
    assert!(!body.is_end_stream(), "an end by error is never taken for the end");
    assert!(drain.await.is_complete());
    assert_numbers(&queue, 0, 0);
}

#[tokio::test(start_paused = true)]
async fn a_service_at_work_when_the_grace_is_over_is_answered_for() {
    let layer = layer(1);
    let queue = layer.queue().clone();
    let service = layer.layer(service_fn(|_: Request<()>| async {
        std::future::pending::<()>().await;
        hello(Request::new(())).await
    }));
    let mut response = task::spawn(service.oneshot(Request::new(())));
    assert_pending!(response.poll());
    let mut drain = task::spawn(queue.drain(Duration::ZERO));
    assert_pending!(drain.poll());
    let response = assert_ready_ok!(response.poll());
    assert_eq!(response.status(), StatusCode::SERVICE_UNAVAILABLE);
    assert!(response.extensions().get::<Revoked>().is_some());
    assert!(
        response.extensions().get::<Rejection>().is_none(),
        "a rejected request was never started; this one was"
    );
    assert!(response.headers().get("retry-after").is_none());
    assert!(drain.await.is_complete());
}

#[tokio::test(start_paused = true)]
async fn a_service_does_not_begin_once_the_grace_is_over() {
    let layer = layer(1);
    let queue = layer.queue().clone();
    let held = queue.try_acquire(Ask::new()).now_or_never().unwrap().unwrap();
    let service = layer.layer(service_fn(|_: Request<()>| async {
        unreachable!("its permit was revoked before it began") as Result<Response<Full<Bytes>>, Infallible>
    }));
    let mut response = task::spawn(service.oneshot(Request::new(())));
    assert_pending!(response.poll());
    drop(held);
    let mut drain = task::spawn(queue.drain(Duration::ZERO));
    assert_pending!(drain.poll());
    let response = assert_ready_ok!(response.poll());
    assert_eq!(response.extensions().get::<Rejection>().unwrap().cause(), Cause::ShuttingDown);
    assert!(drain.await.is_complete());
}

// P8: extensions that are handed from request to request carry the marks of what is held, and of nothing else.
#[tokio::test]
async fn marks_of_what_has_ended_do_not_pile_up() {
    let layers = [layer(1), layer(1)];
    let services = layers.each_ref().map(|layer| {
        layer.layer(service_fn(|request: Request<()>| async move {
            let mut response = Response::new(Full::<Bytes>::default());
            *response.extensions_mut() = request.extensions().clone();
            Ok::<_, Infallible>(response)
        }))
    });
    let mut extensions = http::Extensions::new();
    for i in 0..100_000 {
        let mut request = Request::new(());
        *request.extensions_mut() = extensions;
        let response = services[i % 2].clone().oneshot(request).await.unwrap();
        extensions = response.extensions().clone();
    }
    // A chain of so many would overflow the stack of a small thread as it is dropped.
    std::thread::Builder::new()
        .stack_size(64 * 1024)
        .spawn(move || drop(extensions))
        .unwrap()
        .join()
        .unwrap();
}

#[tokio::test(start_paused = true)]
async fn a_grpc_call_that_is_cut_off_gets_a_grpc_status() {
    let layer = layer(1);
    let queue = layer.queue().clone();
    let service = layer.layer(service_fn(|_: Request<()>| async {
        std::future::pending::<()>().await;
        hello(Request::new(())).await
    }));
    let request = Request::builder().header("content-type", "application/grpc").body(()).unwrap();
    let mut response = task::spawn(service.oneshot(request));
    assert_pending!(response.poll());
    let mut drain = task::spawn(queue.drain(Duration::ZERO));
    assert_pending!(drain.poll());
    assert_eq!(assert_ready_ok!(response.poll()).headers()["grpc-status"], "14");
    assert!(drain.await.is_complete());
}

// P5: a rejected request is whole, and is answered once.
#[tokio::test(start_paused = true)]
async fn rejections_are_answered_by_closures_that_get_the_whole_request() {
    let config = || FairQueueConfig::builder("q").capacity(1).build().unwrap();
    let request = || Request::builder().uri("/ask").body(Full::<Bytes>::from("question")).unwrap();
    let service = service_fn(|_: Request<Full<Bytes>>| async {
        Ok::<_, Infallible>(Response::new(Full::<Bytes>::from("answer")))
    });

    let layer = FairQueueLayer::new(config()).reject_with(|rejection, request: Request<Full<Bytes>>| {
        assert!(rejection.waited() >= Duration::from_secs(20));
        Response::new(Full::<Bytes>::from(request.uri().path().to_owned()))
    });
    let _held = layer.queue().try_acquire(Ask::new()).now_or_never().unwrap().unwrap();
    let response = layer.layer(service).oneshot(request()).await.unwrap();
    assert_eq!(response.extensions().get::<Rejection>().unwrap().cause(), Cause::TimedOut);
    assert_eq!(response.into_body().collect().await.unwrap().to_bytes(), "/ask");

    let layer = FairQueueLayer::new(config()).reject_with_async(
        |rejection: Rejection, request: Request<Full<Bytes>>| async move {
            let question = request.into_body().collect().await.expect("it cannot fail").to_bytes();
            let mut response: Response<Full<Bytes>> = rejection.response();
            *response.body_mut() = Full::from(question);
            response
        },
    );
    let _held = layer.queue().try_acquire(Ask::new()).now_or_never().unwrap().unwrap();
    let response = layer.layer(service).oneshot(request()).await.unwrap();
    assert_eq!(response.status(), StatusCode::SERVICE_UNAVAILABLE);
    assert_eq!(response.into_body().collect().await.unwrap().to_bytes(), "question");
}

#[tokio::test]
async fn the_classifier_lets_pass_queues_and_refuses() {
    let layer = layer(1).classify(|head| match head.uri().path() {
        "/healthz" => Class::Bypass,
        "/refused" => Class::Refuse,
        _ => Ask::new().into(),
    });
    let queue = layer.queue().clone();
    let _held = queue.try_acquire(Ask::new()).now_or_never().unwrap().unwrap();
    let service = layer.layer(service_fn(hello));
    let send = |path: &str| service.clone().oneshot(Request::builder().uri(path).body(()).unwrap());
    assert_eq!(send("/healthz").await.unwrap().status(), StatusCode::OK);
    let refused = send("/refused").await.unwrap();
    assert_eq!(refused.status(), StatusCode::FORBIDDEN);
    assert_eq!(refused.extensions().get::<Rejection>().unwrap().cause(), Cause::Refused);
    let mut queued = task::spawn(send("/"));
    assert_pending!(queued.poll());
    assert_numbers(&queue, 1, 1);
}

/// Yields `frames` and then nothing more, one at each poll.
struct Counted {
    frames: u32,
}

impl Body for Counted {
    type Data = Bytes;
    type Error = Infallible;

    fn poll_frame(
        mut self: Pin<&mut Self>,
        cx: &mut Context<'_>,
    ) -> Poll<Option<Result<Frame<Bytes>, Infallible>>> {
        ready!(tokio::task::coop::poll_proceed(cx)).made_progress();
        self.frames = self.frames.saturating_sub(1);
        Poll::Ready((self.frames > 0).then(|| Ok(Frame::data(Bytes::from_static(b"x")))))
    }
}

#[tokio::test]
async fn a_body_keeps_saying_that_it_is_over() {
    let layer = layer(1);
    let queue = layer.queue().clone();
    let service = layer.layer(service_fn(|_: Request<()>| async {
        Ok::<_, Infallible>(Response::new(Counted { frames: 3 }))
    }));
    let mut body = service.oneshot(Request::new(())).await.unwrap().into_body();
    assert!(body.frame().await.is_some() && body.frame().await.is_some());
    assert_numbers(&queue, 1, 0);
    for _ in 0..3 {
        assert!(body.frame().await.is_none());
        assert_numbers(&queue, 0, 0);
    }
}
