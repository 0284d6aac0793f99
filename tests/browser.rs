//! The chat example's page in a real browser: Chromium, driven by chromedriver.

#[path = "support/example.rs"]
mod example;
#[cfg(all(unix, feature = "redis"))]
mod support;

use std::{
    io::{BufRead, BufReader, Read, Write},
    net::TcpStream,
    path::PathBuf,
    process::{Child, ChildStdout, Command, Stdio},
    time::Duration,
};

use example::{Example, until};
use fantoccini::{
    Client, ClientBuilder, Locator,
    actions::{InputSource, KeyAction, KeyActions},
};
use http_body_util::BodyExt;
use hyper_util::{client::legacy, rt::TokioExecutor};
use serde_json::{Value, json};
use tokio::sync::{Mutex, MutexGuard};

const SOON: Duration = Duration::from_secs(10);
const TAB: char = '\u{E004}';
const ENTER: char = '\u{E007}';

/// A browser takes a core for itself, and these tests watch the clock.
static ONE_AT_A_TIME: Mutex<()> = Mutex::const_new(());

/// A browser with a fresh profile under a driver of its own. Dropped, both end and the profile goes.
struct Browser {
    client: Client,
    session: String,
    port: u16,
    driver: Child,
    profile: PathBuf,
    _stdout: BufReader<ChildStdout>,
    _alone: MutexGuard<'static, ()>,
}

impl Browser {
    async fn start() -> Self {
        let alone = ONE_AT_A_TIME.lock().await;
        let chromium = installed("chromium");
        let mut driver = Command::new(installed("chromedriver"))
            .arg("--port=0")
            .stdout(Stdio::piped())
            .stderr(Stdio::null())
            .spawn()
            .expect("chromedriver is installed, but does not start");
        let mut stdout = BufReader::new(driver.stdout.take().expect("stdout is piped"));
        let port = loop {
            let mut line = String::new();
            assert!(stdout.read_line(&mut line).expect("text") > 0, "chromedriver told no port");
            if let Some(port) = line.trim().strip_prefix("ChromeDriver was started successfully on port ") {
                break port.trim_end_matches('.').parse().expect("a port");
            }
        };
        let profile = std::env::temp_dir().join(format!("fair-queue-browser-{}-{port}", std::process::id()));
        let mut args = [
            "--headless",
            "--no-sandbox",
            "--disable-gpu",
            "--disable-background-networking",
            "--disable-component-update",
            "--disable-sync",
            "--no-first-run",
            "--disable-quic",
            "--disable-dev-shm-usage",
            "--window-size=1100,900",
        ]
        .map(str::to_owned)
        .to_vec();
        args.push(format!("--user-data-dir={}", profile.display()));
        let capabilities = json!({ "goog:chromeOptions": { "binary": chromium, "args": args } });
        let mut builder = ClientBuilder::new(legacy::connect::HttpConnector::new());
        builder.capabilities(capabilities.as_object().expect("an object").clone());
        let client = builder.connect(&format!("http://127.0.0.1:{port}")).await;
        let client = client.unwrap_or_else(|error| {
            _ = driver.kill();
            _ = driver.wait();
            panic!("chromedriver starts no browser: {error}");
        });
        let session = client.session_id().await.unwrap().expect("the session is new");
        Self { client, session, port, driver, profile, _stdout: stdout, _alone: alone }
    }

    /// Opens the example's page, and waits until it has heard of the queue.
    async fn open(&self, example: &Example) {
        self.client.goto(&example.url("/")).await.unwrap();
        let heard = async || (self.text("#in-flight").await != "–").then_some(());
        until("the page shows the queue", SOON, heard).await;
    }

    async fn text(&self, selector: &str) -> String {
        self.client.find(Locator::Css(selector)).await.unwrap().text().await.unwrap()
    }

    async fn click(&self, selector: &str) {
        self.client.find(Locator::Css(selector)).await.unwrap().click().await.unwrap();
    }

    async fn execute(&self, script: &str) -> Value {
        self.client.execute(script, vec![]).await.unwrap()
    }

    /// The texts of the parts of those questions that are in this state.
    async fn questions(&self, state: &str, part: &str) -> Vec<String> {
        let script = "return [...document.querySelectorAll(`[data-state=${arguments[0]}] ${arguments[1]}`)]\
                      .map((part) => part.innerText)";
        let texts = self.client.execute(script, vec![state.into(), part.into()]).await.unwrap();
        serde_json::from_value(texts).unwrap()
    }

    /// Waits until as many questions are in each of the states as given, and none is in another.
    async fn questions_are(&self, within: Duration, counts: &[(&str, u64)]) {
        let script = "const counts = {};\
                      for (const row of document.querySelectorAll('[data-state]'))\
                      counts[row.dataset.state] = (counts[row.dataset.state] ?? 0) + 1;\
                      return counts";
        let expected: Value = counts.iter().map(|&(state, n)| (state.to_owned(), Value::from(n))).collect();
        let what = format!("the page shows {expected}");
        until(&what, within, async || (self.execute(script).await == expected).then_some(())).await;
    }

    async fn press(&self, keys: &str) {
        let press = keys.chars().flat_map(|value| [KeyAction::Down { value }, KeyAction::Up { value }]);
        let actions = press.fold(KeyActions::new("keyboard".to_owned()), InputSource::then);
        self.client.perform_actions(actions).await.unwrap();
    }

    /// Gives the page this size; a window of Chromium's is never as narrow as a phone.
    async fn viewport(&self, width: u32, height: u32) {
        let size = json!({ "width": width, "height": height, "deviceScaleFactor": 1, "mobile": false });
        self.devtools("Emulation.setDeviceMetricsOverride", size).await;
    }

    /// Runs a command of the DevTools protocol, which chromedriver passes on.
    async fn devtools(&self, command: &str, params: Value) {
        let url = format!("http://127.0.0.1:{}/session/{}/goog/cdp/execute", self.port, self.session);
        let body = json!({ "cmd": command, "params": params }).to_string();
        let request = http::Request::post(url).header("content-type", "application/json").body(body).unwrap();
        let response =
            legacy::Client::builder(TokioExecutor::new()).build_http().request(request).await.unwrap();
        let status = response.status();
        let answer = response.into_body().collect().await.unwrap().to_bytes();
        assert!(status.is_success(), "{command}: {}", String::from_utf8_lossy(&answer));
    }
}

impl Drop for Browser {
    fn drop(&mut self) {
        // Ending the session ends the browser; a driver that is killed would leave it running.
        let ended = TcpStream::connect(("127.0.0.1", self.port)).and_then(|mut driver| {
            driver.set_read_timeout(Some(SOON))?;
            let request = format!(
                "DELETE /session/{} HTTP/1.1\r\nhost: 127.0.0.1\r\nconnection: close\r\n\r\n",
                self.session
            );
            driver.write_all(request.as_bytes())?;
            driver.read(&mut [0; 1024])
        });
        if let Err(error) = ended {
            eprintln!("the browser may still run: {error}");
        }
        _ = self.driver.kill();
        _ = self.driver.wait();
        _ = std::fs::remove_dir_all(&self.profile);
    }
}

/// The path of a program, of which the tests say plainly that it is missing: without a browser they prove nothing.
fn installed(program: &str) -> PathBuf {
    let path = std::env::var_os("PATH").unwrap_or_default();
    std::env::split_paths(&path)
        .map(|directory| directory.join(program))
        .find(|file| file.is_file())
        .unwrap_or_else(|| panic!("{program} is not installed: run scripts/test, which installs it"))
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn ten_at_once_stream_by_threes_and_the_late_are_told_why() {
    let browser = Browser::start().await;
    let example =
        Example::start("chat", &["--max-wait", "3s", "--tokens", "20", "--token-interval", "100ms"]);
    browser.viewport(1100, 900).await;
    browser.open(&example).await;
    browser.click("#ten").await;

    browser.questions_are(SOON, &[("streaming", 3), ("waiting", 7)]).await;
    // What the page calls waiting stands in the queue's line, not in the browser's.
    example.queue_is(3, 7, SOON).await;
    let gauges = async || {
        let shown = (browser.text("#in-flight").await, browser.text("#waiting").await);
        (shown == ("3".to_owned(), "7".to_owned())).then_some(())
    };
    until("the gauges show 3 in flight and 7 waiting", SOON, gauges).await;
    assert_eq!(browser.questions("streaming", ".chip").await, ["Streaming"; 3]);
    assert_eq!(browser.questions("waiting", ".chip").await, ["Waiting"; 7]);

    browser.questions_are(SOON, &[("streaming", 3), ("waiting", 4), ("done", 3)]).await;
    if let Some(path) = std::env::var_os("FAIR_QUEUE_SCREENSHOT") {
        let told = async || {
            let shown = (browser.text("#summary").await, browser.text("#waiting").await);
            (shown == ("3 done, 3 streaming, 4 waiting".to_owned(), "4".to_owned())).then_some(())
        };
        until("summary and gauges have caught up", SOON, told).await;
        std::fs::write(path, browser.client.screenshot().await.unwrap()).unwrap();
    }
    browser.questions_are(SOON, &[("done", 6), ("rejected", 4)]).await;
    for reason in browser.questions("rejected", ".reason").await {
        assert!(reason.starts_with("No permit came free within 3 s. "), "{reason}");
        assert!(reason.contains("try again now") || reason.contains("Try again in "), "{reason}");
    }
    for times in browser.questions("rejected", ".times").await {
        assert!(times.starts_with("waited 3."), "{times}");
    }
    for times in browser.questions("done", ".times").await {
        assert!(times.contains(" · streamed 2.") || times.contains(" · streamed 1.9"), "{times}");
    }
    for answer in browser.questions("done", ".answer").await {
        assert_eq!(answer.split_whitespace().count(), 20, "{answer}");
    }
    let summary = async || (browser.text("#summary").await == "6 done, 4 rejected").then_some(());
    until("the summary says it", SOON, summary).await;

    let history = browser.client.find(Locator::Css("#history")).await.unwrap();
    let history = history.attr("href").await.unwrap().expect("a link");
    let kept = example.history(history.strip_prefix("/history/").expect("a path")).await;
    let with = |status: &str| kept.iter().filter(|kept| kept["status"] == status).collect::<Vec<_>>();
    assert_eq!((with("answered").len(), with("rejected").len(), kept.len()), (6, 4, 10));
    let asked = browser.questions("rejected", ".question").await;
    for rejected in with("rejected") {
        assert_eq!(rejected["cause"], "timed_out");
        assert!(asked.iter().any(|asked| *asked == rejected["question"]), "{rejected} in {asked:?}");
    }
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_closed_tab_takes_its_question_out_of_the_line() {
    let browser = Browser::start().await;
    let example = Example::start("chat", &["--capacity", "1", "--tokens", "10000"]);
    let running = example.ask("long", "other").await;
    let first = browser.client.window().await.unwrap();
    let tab = browser.client.new_window(true).await.unwrap().handle;
    browser.client.switch_to_window(tab).await.unwrap();
    browser.open(&example).await;
    browser
        .client
        .find(Locator::Css("#question"))
        .await
        .unwrap()
        .send_keys("Is it my turn?\n")
        .await
        .unwrap();
    browser.questions_are(SOON, &[("waiting", 1)]).await;
    example.queue_is(1, 1, SOON).await;

    browser.client.close_window().await.unwrap();
    example.queue_is(1, 0, Duration::from_secs(2)).await;
    browser.client.switch_to_window(first).await.unwrap();
    drop(running);
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn the_keyboard_alone_asks_and_cancels() {
    let browser = Browser::start().await;
    let example = Example::start("chat", &["--tokens", "10000", "--token-interval", "50ms"]);
    browser.open(&example).await;
    let focused = async || {
        let script = "const at = document.activeElement, style = getComputedStyle(at);\
                      return [at.id, style.outlineStyle, parseFloat(style.outlineWidth)]";
        let (id, style, width): (String, String, f64) =
            serde_json::from_value(browser.execute(script).await).unwrap();
        assert!(style != "none" && width >= 2.0, "the focus on {id:?} is seen: {style} {width}");
        id
    };
    browser.press(&TAB.to_string()).await;
    assert_eq!(focused().await, "question");
    assert_eq!(browser.text("label[for=question]").await, "Your question");

    browser.press(&format!("<img src=x onerror=alert(1)> & more{ENTER}")).await;
    browser.questions_are(SOON, &[("streaming", 1)]).await;
    let words = async || browser.questions("streaming", ".answer").await.concat().split_whitespace().count();
    until("the answer grows", SOON, async || (words().await > 5).then_some(())).await;
    assert_eq!(browser.questions("streaming", ".question").await, ["<img src=x onerror=alert(1)> & more"]);
    assert_eq!(browser.execute("return document.images.length").await, 0);

    // From the field over both buttons and the link to the one row there is.
    for _ in 0..4 {
        browser.press(&TAB.to_string()).await;
        focused().await;
    }
    let label = "return document.activeElement.getAttribute('aria-label')";
    assert_eq!(browser.execute(label).await, "Cancel: question 1");
    browser.press(&ENTER.to_string()).await;
    browser.questions_are(SOON, &[("cancelled", 1)]).await;
    example.queue_is(0, 0, Duration::from_secs(2)).await;
    assert_eq!(browser.execute(label).await, "Ask again: question 1", "the focus is not lost");
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_narrow_window_never_scrolls_sideways() {
    let browser = Browser::start().await;
    let example =
        Example::start("chat", &["--max-wait", "1s", "--tokens", "20", "--token-interval", "100ms"]);
    browser.viewport(360, 740).await;
    let mut grounds = vec![];
    for scheme in ["light", "dark"] {
        let features = json!({ "features": [{ "name": "prefers-color-scheme", "value": scheme }] });
        browser.devtools("Emulation.setEmulatedMedia", features).await;
        browser.open(&example).await;
        let fits = async || {
            let root = "const root = document.documentElement; return [root.scrollWidth, root.clientWidth, innerWidth]";
            let (scroll, client, window): (u64, u64, u64) =
                serde_json::from_value(browser.execute(root).await).unwrap();
            assert_eq!(window, 360);
            assert!(scroll <= client, "{scroll} of {client} in {scheme}");
        };
        fits().await;
        browser.click("#ten").await;
        browser.questions_are(SOON, &[("streaming", 3), ("waiting", 7)]).await;
        fits().await;
        browser.questions_are(SOON, &[("done", 3), ("rejected", 7)]).await;
        let word = format!("{}{ENTER}", "m".repeat(300));
        browser.client.find(Locator::Css("#question")).await.unwrap().send_keys(&word).await.unwrap();
        browser.questions_are(SOON, &[("done", 4), ("rejected", 7)]).await;
        fits().await;
        grounds.push(browser.execute("return getComputedStyle(document.body).backgroundColor").await);
    }
    assert_ne!(grounds[0], grounds[1], "the dark scheme is another one");
}

#[cfg(all(unix, feature = "redis"))]
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn the_pages_of_two_servers_show_one_queue() {
    use support::redis::{Kind, Server, require};

    let Some(binary) = require(Kind::Redis70) else { return };
    let server = Server::start(&binary).await;
    let url = server.url();
    let flags = ["--redis", &url, "--max-wait", "60s", "--tokens", "20", "--token-interval", "200ms"];
    let (a, b) = (Example::start("chat", &flags), Example::start("chat", &flags));
    let browser = Browser::start().await;
    let first = browser.client.window().await.unwrap();
    browser.open(&a).await;
    let second = browser.client.new_window(true).await.unwrap().handle;
    browser.client.switch_to_window(second.clone()).await.unwrap();
    browser.open(&b).await;

    let shown = async |gauges: [&str; 4]| {
        let what = format!("the page shows {gauges:?}");
        let as_told = async || {
            let in_flight = (browser.text("#in-flight").await, browser.text("#own-in-flight").await);
            let waiting = (browser.text("#waiting").await, browser.text("#own-waiting").await);
            ([&*in_flight.0, &in_flight.1, &waiting.0, &waiting.1] == gauges).then_some(())
        };
        until(&what, SOON, as_told).await;
    };
    let permits = "return ['.held:not(.elsewhere)', '.held.elsewhere'].map((permit) =>\
                   document.querySelectorAll('#permits ' + permit).length)";
    browser.client.switch_to_window(first.clone()).await.unwrap();
    browser.click("#ten").await;
    browser.questions_are(SOON, &[("streaming", 3), ("waiting", 7)]).await;
    shown(["3", "3", "7", "7"]).await;
    assert_eq!(browser.execute(permits).await, json!([3, 0]));
    assert!(browser.text("#lede + .shared").await.contains("over all servers"));

    browser.client.switch_to_window(second).await.unwrap();
    shown(["3", "0", "7", "0"]).await;
    assert_eq!(browser.execute(permits).await, json!([0, 3]));
    browser.client.find(Locator::Css("#question")).await.unwrap().send_keys("And I?\n").await.unwrap();
    browser.questions_are(SOON, &[("waiting", 1)]).await;
    shown(["3", "0", "8", "1"]).await;
    // The last of all, it waits for the permits of the other server.
    browser.questions_are(3 * SOON, &[("done", 1)]).await;
    browser.client.switch_to_window(first).await.unwrap();
    browser.questions_are(SOON, &[("done", 10)]).await;
    shown(["0", "0", "0", "0"]).await;
}
