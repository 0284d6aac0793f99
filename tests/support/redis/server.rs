//! One server.

use std::{
    fs::{self, File},
    io,
    process::{Child, Stdio},
    time::Duration,
};

use tokio::time::{Instant, sleep};

use super::super::process::{signal, wait_stopped};
use super::{Binary, Certificates, Folder, Reply, Resp, free_port};

/// The harness's own user and its password, so that a test is free in what it does with all others.
pub(super) const HARNESS: &str = "harness";

/// What a server is to have beyond the defaults, which are: no password, nothing kept on disk.
#[derive(Clone, Debug, Default)]
pub(crate) struct Options {
    password: Option<String>,
    certificates: Option<Certificates>,
    cluster: bool,
    lines: Vec<String>,
}

/// A running server. Dropped, it is killed and its folder removed.
#[derive(Debug)]
pub(crate) struct Server {
    binary: Binary,
    port: u16,
    tls_port: Option<u16>,
    password: Option<String>,
    sentinel: bool,
    child: Option<Child>,
    folder: Folder,
}

impl Options {
    /// The password of the default user.
    pub(crate) fn password(mut self, password: &str) -> Self {
        self.password = Some(password.to_owned());
        self.set("requirepass", password)
    }

    /// A user; `rules` as in `ACL SETUSER`, such as `>secret ~fairq:* -@all +ping`.
    pub(crate) fn user(self, name: &str, rules: &str) -> Self {
        self.set("user", &format!("{name} on {rules}"))
    }

    pub(crate) fn max_memory(self, bytes: usize, policy: &str) -> Self {
        self.set("maxmemory", &bytes.to_string()).set("maxmemory-policy", policy)
    }

    /// A second port, which speaks TLS; see [`Server::tls_url`].
    pub(crate) fn tls(mut self, certificates: &Certificates) -> Self {
        self.certificates = Some(certificates.clone());
        self
    }

    /// A line of the server's configuration.
    pub(crate) fn set(mut self, name: &str, value: &str) -> Self {
        self.lines.push(format!("{name} {value}"));
        self
    }

    pub(super) fn cluster(mut self) -> Self {
        self.cluster = true;
        self.set("cluster-enabled", "yes").set("cluster-node-timeout", "1000")
    }
}

impl Server {
    pub(crate) async fn start(binary: &Binary) -> Self {
        Self::with(binary, &Options::default()).await
    }

    pub(crate) async fn with(binary: &Binary, options: &Options) -> Self {
        Self::on_free_ports(|| {
            let folder = Folder::new();
            let port = free_port();
            let mut lines = options.lines.clone();
            lines.extend([
                format!("port {port}"),
                "save \"\"".to_owned(),
                format!("user {HARNESS} on >{HARNESS} ~* &* +@all"),
            ]);
            if options.cluster {
                lines.push(format!("cluster-port {}", free_port()));
            }
            let tls_port = options.certificates.as_ref().map(|certificates| {
                let port = free_port();
                let mut file = |name: &str, setting: &str, content: &str| {
                    lines.push(format!("{setting} {}", folder.write(name, content).display()));
                };
                file("root.pem", "tls-ca-cert-file", &certificates.root);
                file("server.pem", "tls-cert-file", &certificates.certificate);
                file("server.key", "tls-key-file", &certificates.key);
                lines.extend([format!("tls-port {port}"), "tls-auth-clients no".to_owned()]);
                port
            });
            let password = options.password.clone();
            Self::new(binary, folder, port, &lines, tls_port, password, false)
        })
        .await
    }

    /// A sentinel, with these lines of configuration.
    pub(super) async fn sentinel(binary: &Binary, lines: &[String]) -> Self {
        Self::on_free_ports(|| {
            let port = free_port();
            let mut lines = lines.to_vec();
            lines.push(format!("port {port}"));
            Self::new(binary, Folder::new(), port, &lines, None, None, true)
        })
        .await
    }

    fn new(
        binary: &Binary,
        folder: Folder,
        port: u16,
        lines: &[String],
        tls_port: Option<u16>,
        password: Option<String>,
        sentinel: bool,
    ) -> Self {
        let place = format!("bind 127.0.0.1\ndir {}\n{}\n", folder.path().display(), lines.join("\n"));
        folder.write("server.conf", &place);
        Self { binary: binary.clone(), port, tls_port, password, sentinel, child: None, folder }
    }

    async fn on_free_ports(mut prepare: impl FnMut() -> Self) -> Self {
        let deadline = Instant::now() + Duration::from_secs(30);
        loop {
            let mut server = prepare();
            // Another process may have taken a port since it was found free.
            if server.launch(deadline).await {
                return server;
            }
        }
    }

    /// Starts the process and waits until it answers. `false`: a port is taken.
    async fn launch(&mut self, deadline: Instant) -> bool {
        assert!(self.child.is_none(), "the server runs already");
        let log = File::create(self.folder.path().join("log")).expect("a file in our own folder");
        let mut command = self.binary.command();
        command.arg(self.folder.path().join("server.conf")).args(self.sentinel.then_some("--sentinel"));
        command.current_dir(self.folder.path()).stdin(Stdio::null());
        command.stdout(log.try_clone().expect("a file")).stderr(log);
        let child = command.spawn().unwrap_or_else(|error| panic!("start {command:?}: {error}"));
        let own = format!("process_id:{}\r\n", child.id());
        let child = self.child.insert(child);
        loop {
            if let Some(status) = child.try_wait().expect("it is our child") {
                self.child = None;
                let log = self.log();
                assert!(
                    log.contains("in use") || log.contains("Failed listening"),
                    "ended with {status}: {log}"
                );
                assert!(Instant::now() < deadline, "no port to be had: {log}");
                return false;
            }
            let info = call(self.port, !self.sentinel, &["INFO", "server"]);
            // The test sees nothing of the data before they are loaded.
            let loaded = || call(self.port, !self.sentinel, &["PING"]).is_ok();
            if info.is_ok_and(|info| info.to_string().contains(&own)) && loaded() {
                return true;
            }
            assert!(Instant::now() < deadline, "the server does not answer: {}", self.log());
            sleep(Duration::from_millis(5)).await;
        }
    }

    pub(crate) fn port(&self) -> u16 {
        self.port
    }

    /// Of the default user.
    pub(crate) fn url(&self) -> String {
        let password = self.password.as_ref().map(|password| format!(":{password}@"));
        format!("redis://{}127.0.0.1:{}", password.unwrap_or_default(), self.port)
    }

    pub(crate) fn url_as(&self, user: &str, password: &str) -> String {
        format!("redis://{user}:{password}@127.0.0.1:{}", self.port)
    }

    pub(crate) fn tls_port(&self) -> u16 {
        self.tls_port.expect("`Options::tls` was asked for")
    }

    pub(crate) fn tls_url(&self) -> String {
        format!("rediss://localhost:{}", self.tls_port())
    }

    pub(crate) fn pid(&self) -> u32 {
        self.child.as_ref().expect("the server runs").id()
    }

    /// What the server has written.
    pub(crate) fn log(&self) -> String {
        fs::read_to_string(self.folder.path().join("log")).unwrap_or_default()
    }

    /// Runs a command as a user that may do everything, and returns its reply as `redis-cli` prints it into a pipe.
    pub(crate) fn cli(&self, args: &[&str]) -> String {
        self.try_cli(args).unwrap_or_else(|error| panic!("{args:?}: {error}"))
    }

    /// The same; the error is the server's, or tells why it could not be asked.
    pub(crate) fn try_cli(&self, args: &[&str]) -> Result<String, String> {
        call(self.port, !self.sentinel, args).map(|reply| reply.to_string())
    }

    /// Runs a command as a user.
    pub(crate) fn cli_as(&self, user: &str, password: &str, args: &[&str]) -> Result<String, String> {
        call_as(self.port, Some((user, password)), args).map(|reply| reply.to_string())
    }

    /// A connection of a user that may do everything.
    /// A number of a queue's state, as docs/PROTOCOL.md lays it out; 0 where there is no state.
    pub(crate) fn state(&self, key: &str, field: &str) -> u64 {
        let text = include_str!("../../../docs/PROTOCOL.md");
        let fields = text.split("### The state").nth(1).expect("a heading").lines();
        let mut fields = fields.filter(|line| line.starts_with("| `")).map(|line| line.split('`').nth(1));
        let place = fields.position(|name| name == Some(field)).unwrap_or_else(|| panic!("no field {field}"));
        let read = "local state = redis.call('GET', KEYS[1]); \
                    return state and string.format('%.0f', (struct.unpack('>d', state, ARGV[1]))) or '0'";
        let offset = (25 + 8 * place).to_string();
        // A server that has been stopped or killed has none.
        let value = self.try_cli(&["EVAL", read, "1", key, &offset]).unwrap_or_default();
        value.parse().unwrap_or(0)
    }

    pub(crate) fn connection(&self) -> Resp {
        let mut connection = Resp::connect(self.port).expect("the server accepts");
        let reply = connection.call(&["AUTH", HARNESS, HARNESS]).expect("the server answers");
        assert_eq!(reply, Reply::Text("OK".to_owned()));
        connection
    }

    /// Stops the process where it stands; its connections stay open and silent.
    pub(crate) fn stop(&self) {
        signal(self.pid(), "STOP");
        wait_stopped(self.pid());
    }

    pub(crate) fn cont(&self) {
        signal(self.pid(), "CONT");
    }

    /// Kills the process. [`Self::restart`] brings it back.
    pub(crate) fn kill9(&mut self) {
        if let Some(mut child) = self.child.take() {
            _ = child.kill();
            _ = child.wait();
        }
    }

    /// Kills the process if it runs and starts it on the same port, with nothing of its data.
    pub(crate) async fn restart(&mut self) {
        self.kill9();
        if let Err(error) = fs::remove_file(self.folder.path().join("dump.rdb")) {
            assert_eq!(error.kind(), io::ErrorKind::NotFound, "remove the data: {error}");
        }
        self.start_again().await;
    }

    /// The same, with all of its data.
    pub(crate) async fn restart_with_data(&mut self) {
        self.save();
        self.restart_from_save().await;
    }

    /// The same, with the data of the last [`Self::save`]: what was written since is gone.
    pub(crate) async fn restart_from_save(&mut self) {
        self.kill9();
        self.start_again().await;
    }

    /// Writes the data to disk, for [`Self::restart_from_save`].
    pub(crate) fn save(&self) {
        self.cli(&["SAVE"]);
    }

    async fn start_again(&mut self) {
        let deadline = Instant::now() + Duration::from_secs(30);
        while !self.launch(deadline).await {
            sleep(Duration::from_millis(10)).await;
        }
    }
}

impl Drop for Server {
    fn drop(&mut self) {
        self.kill9();
    }
}

fn call(port: u16, harness: bool, args: &[&str]) -> Result<Reply, String> {
    call_as(port, harness.then_some((HARNESS, HARNESS)), args)
}

fn call_as(port: u16, user: Option<(&str, &str)>, args: &[&str]) -> Result<Reply, String> {
    let mut connection = Resp::connect(port).map_err(|error| format!("connect to {port}: {error}"))?;
    let mut run = |args: &[&str]| match connection.call(args) {
        Ok(Reply::Error(error)) => Err(error),
        Ok(reply) => Ok(reply),
        Err(error) => Err(format!("ask {port}: {error}")),
    };
    if let Some((user, password)) = user {
        run(&["AUTH", user, password])?;
    }
    run(args)
}
