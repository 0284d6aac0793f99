//! A program as a process of its own.

use std::{
    fs,
    io::{BufRead, BufReader, Write},
    path::Path,
    process::{Child, ChildStdin, Command, ExitStatus, Stdio},
    thread,
    time::Duration,
};

use tokio::{
    sync::mpsc,
    time::{Instant, sleep, timeout_at},
};

/// A running program. Dropped, it is killed.
#[derive(Debug)]
pub(crate) struct Process {
    child: Child,
    stdin: ChildStdin,
    lines: mpsc::UnboundedReceiver<String>,
    /// Read and not yet waited for.
    read: Vec<String>,
}

impl Process {
    /// Starts the program; what it writes to stderr joins the test's.
    pub(crate) fn spawn(program: &Path, args: &[&str]) -> Self {
        let mut command = Command::new(program);
        command.args(args).stdin(Stdio::piped()).stdout(Stdio::piped());
        let mut child = command.spawn().unwrap_or_else(|error| panic!("start {command:?}: {error}"));
        let stdin = child.stdin.take().expect("stdin is piped");
        let stdout = BufReader::new(child.stdout.take().expect("stdout is piped"));
        let (send, lines) = mpsc::unbounded_channel();
        // It reads for as long as the program runs, so that the program never waits for the test.
        thread::spawn(move || {
            for line in stdout.lines().map_while(Result::ok) {
                _ = send.send(line);
            }
        });
        Self { child, stdin, lines, read: Vec::new() }
    }

    pub(crate) fn pid(&self) -> u32 {
        self.child.id()
    }

    /// Writes a line to the program's stdin.
    pub(crate) fn say(&mut self, line: &str) {
        writeln!(self.stdin, "{line}").unwrap_or_else(|error| panic!("say {line:?}: {error}"));
    }

    /// The first line that contains `pattern` and was not returned before. Panics at the deadline and when the program ends.
    pub(crate) async fn wait_line(&mut self, pattern: &str, within: Duration) -> String {
        let deadline = Instant::now() + within;
        if let Some(index) = self.read.iter().position(|line| line.contains(pattern)) {
            return self.read.remove(index);
        }
        loop {
            match timeout_at(deadline, self.lines.recv()).await {
                Ok(Some(line)) if line.contains(pattern) => return line,
                Ok(Some(line)) => self.read.push(line),
                Ok(None) => panic!("ended without a line with {pattern:?}: {:#?}", self.read),
                Err(_) => panic!("no line with {pattern:?} within {within:?}: {:#?}", self.read),
            }
        }
    }

    /// The lines so far that [`Self::wait_line`] has not returned.
    pub(crate) fn lines(&mut self) -> &[String] {
        while let Ok(line) = self.lines.try_recv() {
            self.read.push(line);
        }
        &self.read
    }

    /// Stops the process where it stands; its connections stay open and silent.
    pub(crate) fn stop(&self) {
        signal(self.pid(), "STOP");
        wait_stopped(self.pid());
    }

    pub(crate) fn cont(&self) {
        signal(self.pid(), "CONT");
    }

    /// Asks it to stop.
    pub(crate) fn terminate(&self) {
        signal(self.pid(), "TERM");
    }

    pub(crate) fn kill9(&mut self) {
        _ = self.child.kill();
        _ = self.child.wait();
    }

    /// Waits until it has ended.
    pub(crate) async fn ended(&mut self, within: Duration) -> ExitStatus {
        let deadline = Instant::now() + within;
        loop {
            if let Some(status) = self.child.try_wait().expect("it is our child") {
                return status;
            }
            assert!(Instant::now() < deadline, "the process has not ended within {within:?}");
            sleep(Duration::from_millis(5)).await;
        }
    }
}

impl Drop for Process {
    fn drop(&mut self) {
        self.kill9();
    }
}

/// Sends a signal, by its name without `SIG`, to a child of this process that has not been waited for.
pub(crate) fn signal(pid: u32, name: &str) {
    let sent = Command::new("kill").args([&format!("-{name}"), &pid.to_string()]).status();
    assert!(sent.expect("`kill` is a command of every system that has signals").success());
}

/// Waits until a process that was sent SIGSTOP has stopped.
pub(crate) fn wait_stopped(pid: u32) {
    let limit = Duration::from_secs(10);
    let start = Instant::now();
    let state = || fs::read_to_string(format!("/proc/{pid}/stat")).expect("the process is there");
    // The name, in parentheses, may have any character.
    while !state().rsplit_once(") ").is_some_and(|(_, rest)| rest.starts_with('T')) {
        assert!(start.elapsed() < limit, "the process has not stopped within {limit:?}");
        thread::sleep(Duration::from_millis(1));
    }
}
