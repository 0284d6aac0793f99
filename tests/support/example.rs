//! An example as a process of its own, on a port of its own.

#![allow(dead_code, reason = "each test file uses its part")]

use std::{
    io::{BufRead, BufReader},
    path::{Path, PathBuf},
    process::{Child, ChildStdout, Command, ExitStatus, Stdio},
    time::Duration,
};

use axum::body::Body;
use http::{HeaderMap, Request, Response, StatusCode};
use http_body_util::BodyExt;
use hyper::body::Incoming;
use hyper_util::{client::legacy::Client, rt::TokioExecutor};
use tokio::time::{Instant, sleep};

/// A running example. Dropped, it is killed.
pub(crate) struct Example {
    child: Child,
    /// Open as long as the example runs, so that it never writes into a closed pipe.
    _stdout: BufReader<ChildStdout>,
    address: String,
}

impl Example {
    /// Builds and starts the example, and waits until it has told its address.
    pub(crate) fn start(name: &str, flags: &[&str]) -> Self {
        let mut command = Command::new(build(name));
        command.args(["--port", "0"]).args(flags).stdin(Stdio::null()).stdout(Stdio::piped());
        let mut child = command.spawn().unwrap_or_else(|error| panic!("start {command:?}: {error}"));
        let mut stdout = BufReader::new(child.stdout.take().expect("stdout is piped"));
        let mut line = String::new();
        stdout.read_line(&mut line).expect("the example's stdout is text");
        let Some(address) = line.trim().strip_prefix("open http://").and_then(|line| line.strip_suffix('/'))
        else {
            let status = child.wait();
            panic!("{name} told no address but {line:?}, and ended with {status:?}");
        };
        Self { child, address: address.to_owned(), _stdout: stdout }
    }

    /// The host and port it listens on.
    pub(crate) fn address(&self) -> &str {
        &self.address
    }

    pub(crate) fn url(&self, path: &str) -> String {
        format!("http://{}{path}", self.address)
    }

    /// Kills it, and with it all of its connections.
    pub(crate) fn kill9(&mut self) {
        self.child.kill().and_then(|()| self.child.wait()).expect("it is our child");
    }

    /// Sends the signal that asks it to stop.
    pub(crate) fn terminate(&self) {
        let sent = Command::new("kill").args(["-TERM", &self.child.id().to_string()]).status();
        assert!(sent.expect("`kill` is a command of every system that has signals").success());
    }

    /// Waits until it has ended.
    pub(crate) async fn ended(&mut self, within: Duration) -> ExitStatus {
        until("the example has ended", within, async || self.child.try_wait().expect("it is our child")).await
    }

    /// The queue's numbers: in flight and waiting.
    pub(crate) async fn queue(&self) -> (u64, u64) {
        self.numbers("in_flight", "waiting").await
    }

    /// The part of the queue's numbers that is this process's: in flight and waiting.
    pub(crate) async fn own(&self) -> (u64, u64) {
        self.numbers("own_in_flight", "own_waiting").await
    }

    async fn numbers(&self, in_flight: &str, waiting: &str) -> (u64, u64) {
        let queue: serde_json::Value = serde_json::from_str(&self.get("/queue").await.1).expect("JSON");
        let number = |name| queue[name].as_u64().unwrap_or_else(|| panic!("{name} in {queue}"));
        (number(in_flight), number(waiting))
    }

    /// Waits until the queue has these numbers.
    pub(crate) async fn queue_is(&self, in_flight: u64, waiting: u64, within: Duration) {
        let what = format!("{in_flight} in flight and {waiting} waiting");
        until(&what, within, async || (self.queue().await == (in_flight, waiting)).then_some(())).await;
    }

    pub(crate) async fn get(&self, path: &str) -> (StatusCode, String) {
        let request = Request::get(self.url(path)).body(Body::empty()).expect("a request");
        let (status, _, body) = read(self.send(request).await).await;
        (status, body)
    }

    /// Asks a question; the answer's body is not read yet.
    pub(crate) async fn ask(&self, question: &str, conversation: &str) -> Response<Incoming> {
        self.send(self.question(question, conversation)).await
    }

    pub(crate) fn question(&self, question: &str, conversation: &str) -> Request<Body> {
        let body = serde_json::json!({ "question": question, "conversation": conversation }).to_string();
        let request = Request::post(self.url("/chat")).header("content-type", "application/json");
        request.body(body.into()).expect("a request")
    }

    /// Sends a request over a connection of its own.
    pub(crate) async fn send(&self, request: Request<Body>) -> Response<Incoming> {
        let client = Client::builder(TokioExecutor::new()).build_http();
        client.request(request).await.expect("the example answers")
    }

    /// What the example keeps of a conversation.
    pub(crate) async fn history(&self, conversation: &str) -> Vec<serde_json::Value> {
        let (status, body) = self.get(&format!("/history/{conversation}")).await;
        if status == StatusCode::NOT_FOUND { vec![] } else { serde_json::from_str(&body).expect("JSON") }
    }
}

impl Drop for Example {
    fn drop(&mut self) {
        _ = self.child.kill();
        _ = self.child.wait();
    }
}

pub(crate) async fn read(response: Response<Incoming>) -> (StatusCode, HeaderMap, String) {
    let (head, body) = response.into_parts();
    let body = body.collect().await.expect("a complete body").to_bytes();
    (head.status, head.headers, String::from_utf8(body.into()).expect("text"))
}

/// Asks until there is an answer, and panics at the deadline.
pub(crate) async fn until<T>(what: &str, within: Duration, mut probe: impl AsyncFnMut() -> Option<T>) -> T {
    let deadline = Instant::now() + within;
    loop {
        if let Some(answer) = probe().await {
            return answer;
        }
        assert!(Instant::now() < deadline, "not within {within:?}: {what}");
        sleep(Duration::from_millis(20)).await;
    }
}

/// Builds the example into the target directory and profile of the running test, and returns its path. Cargo builds examples
/// for a run of all tests, but not for `--test` with a name. The features are the test's own.
pub(crate) fn build(name: &str) -> PathBuf {
    let test = std::env::current_exe().expect("a test knows its own path");
    let profile = test.parent().and_then(Path::parent).expect("tests are built into target/PROFILE/deps");
    let target = profile.parent().expect("tests are built into target/PROFILE/deps");
    let name_of_profile = match profile.file_name().and_then(|name| name.to_str()) {
        Some("debug") | None => "dev",
        Some(other) => other,
    };
    let mut cargo = Command::new(env!("CARGO"));
    cargo.args(["build", "--quiet", "--example", name, "--profile", name_of_profile]);
    // With the features of the test, so that the crate is not built again.
    for (feature, is_on) in [
        ("redis", cfg!(feature = "redis")),
        ("redis-tls", cfg!(feature = "redis-tls")),
        ("tracing", cfg!(feature = "tracing")),
        ("full", cfg!(feature = "full")),
    ] {
        if is_on {
            cargo.args(["--features", feature]);
        }
    }
    cargo.arg("--manifest-path").arg(concat!(env!("CARGO_MANIFEST_DIR"), "/Cargo.toml"));
    let built = cargo.arg("--target-dir").arg(target).status().expect("cargo runs");
    assert!(built.success(), "{cargo:?} failed");
    profile.join("examples").join(name).with_extension(std::env::consts::EXE_EXTENSION)
}
