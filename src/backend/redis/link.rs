//! Connections to the server that holds the queue: where it is, whether it will do, and one call at a time.
//!
//! A link is two connections, since a slot that moves sends a reply nobody asked for to whoever subscribed: one for calls, one for pushes.
//! It never mends itself; whoever uses it drops it at the first error and makes another.

use std::{
    error::Error,
    io,
    sync::{Arc, Mutex, PoisonError},
    time::Duration,
};

use redis::{
    AsyncConnectionConfig, Client, ConnectionAddr, ConnectionInfo, ErrorKind, FromRedisValue,
    IntoConnectionInfo, ProtocolVersion, PushInfo, PushKind, RedisError, RedisResult, ServerErrorKind, Value,
    aio::MultiplexedConnection,
    cmd,
    io::tcp::{TcpSettings, socket2::TcpKeepalive},
};
use tokio::{sync::mpsc, time::timeout};

use super::{
    keys::Keys,
    script::{Hashes, PROBE, Script},
    wire::{Call, NodeId},
};
use crate::{
    config::{RedisConfig, Servers},
    error::{ConfigError, ConnectError, ConnectProblem},
};

/// How many servers of a Cluster may pass us on before one has to have the slot.
const REDIRECTS: usize = 5;

/// Where the queue's server is to be found, and what it has to be able to do.
pub(super) struct Target {
    servers: Servers,
    tls: Tls,
    timeout: Duration,
    script: Script,
    /// Where a Cluster said the slot is.
    redirect: Mutex<Option<(String, u16)>>,
}

#[derive(Clone)]
struct Tls {
    root: Option<Vec<u8>>,
    client: Option<(Vec<u8>, Vec<u8>)>,
}

/// The connection for calls.
#[derive(Debug)]
pub(super) struct Link {
    connection: MultiplexedConnection,
    hashes: Hashes,
    sharded: bool,
}

/// The connection on which the node is told of grants. It is open while this lives.
#[derive(Debug)]
pub(super) struct Subscription {
    _connection: MultiplexedConnection,
    pushes: mpsc::UnboundedReceiver<PushInfo>,
}

/// Why a call has no reply.
#[derive(Debug)]
pub(super) enum CallError {
    /// The server's memory is full. It has refused the call whole.
    OutOfMemory,
    /// Nothing came within the timeout.
    Silent,
    Failed(RedisError),
}

impl Target {
    pub(super) fn new(config: &RedisConfig) -> Self {
        let tls = Tls {
            root: config.root_certificates.as_deref().map(<[u8]>::to_vec),
            client: config
                .client_certificate
                .as_ref()
                .map(|(certificate, key)| (certificate.to_vec(), key.to_vec())),
        };
        Self {
            servers: config.servers.clone(),
            tls,
            timeout: config.command_timeout,
            script: Script::new(),
            redirect: Mutex::new(None),
        }
    }

    /// Connects, makes sure of the server, loads the script and subscribes. Takes a few timeouts at most.
    pub(super) async fn connect(
        &self,
        keys: &Keys,
        node: &NodeId,
    ) -> Result<(Link, Subscription), ConnectError> {
        for _ in 0..REDIRECTS {
            let info = self.resolve().await?;
            match self.connect_to(&info, keys, node).await {
                Err(Refused::Moved(to)) => *self.redirect() = Some(to),
                Err(Refused::Error(error)) => {
                    // Whoever sent us there may know better by now.
                    *self.redirect() = None;
                    return Err(error);
                }
                Ok(link) => return Ok(link),
            }
        }
        Err(ConnectError::new(ConnectProblem::Cluster, format_args!("passed on {REDIRECTS} times")))
    }

    fn redirect(&self) -> std::sync::MutexGuard<'_, Option<(String, u16)>> {
        self.redirect.lock().unwrap_or_else(PoisonError::into_inner)
    }

    async fn connect_to(
        &self,
        info: &ConnectionInfo,
        keys: &Keys,
        node: &NodeId,
    ) -> Result<(Link, Subscription), Refused> {
        let mut connection = self.open(info, None).await?;
        let server: Value = self.within(cmd("HELLO").query_async(&mut connection)).await?;
        let sharded = check_server(&server)?;
        // Whatever it answers, a server of a Cluster that does not have the slot says so.
        let _: Value = self.within(cmd("ZCARD").arg(keys.lines()).query_async(&mut connection)).await?;
        let mut link =
            Link { connection, hashes: Hashes { growing: String::new(), allow_oom: String::new() }, sharded };
        self.load(&mut link).await?;
        let subscription = self.subscribe(info, sharded, &keys.channel(node)).await?;
        Ok((link, subscription))
    }

    async fn load(&self, link: &mut Link) -> Result<(), Refused> {
        let load = |source: &str| {
            let mut load = cmd("SCRIPT");
            load.arg("LOAD").arg(source);
            load
        };
        let growing = load(&self.script.growing);
        link.hashes.growing = self.within(growing.query_async(&mut link.connection)).await?;
        let allow_oom = load(&self.script.allow_oom);
        link.hashes.allow_oom = self.within(allow_oom.query_async(&mut link.connection)).await?;
        Ok(())
    }

    async fn subscribe(
        &self,
        info: &ConnectionInfo,
        sharded: bool,
        channel: &str,
    ) -> Result<Subscription, Refused> {
        let (sender, pushes) = mpsc::unbounded_channel();
        let mut connection = self.open(info, Some(sender)).await?;
        let subscribe = cmd(if sharded { "SSUBSCRIBE" } else { "SUBSCRIBE" }).arg(channel).clone();
        let _: Value = self.within(subscribe.query_async(&mut connection)).await?;
        Ok(Subscription { _connection: connection, pushes })
    }

    /// Tries each right the node needs. The others were needed to come this far.
    pub(super) async fn probe(
        &self,
        link: &mut Link,
        keys: &Keys,
        node: &NodeId,
    ) -> Result<(), ConnectError> {
        let load: RedisResult<String> =
            self.within_plain(cmd("SCRIPT").arg("LOAD").arg(PROBE).query_async(&mut link.connection)).await?;
        let hash = load.map_err(|error| refused(&error))?;
        let mut probe = cmd("EVALSHA");
        probe.arg(hash).arg(1).arg(&keys.probe).arg(link.publish()).arg(keys.channel(node));
        let missing: RedisResult<Vec<String>> =
            self.within_plain(probe.query_async(&mut link.connection)).await?;
        let missing = missing.map_err(|error| refused(&error))?;
        if missing.is_empty() {
            return Ok(());
        }
        Err(ConnectError::new(ConnectProblem::MissingRight, missing.join(", ")))
    }

    /// One call. A server that has lost the script is given it again; nothing of the call was run then.
    pub(super) async fn call(
        &self,
        link: &mut Link,
        keys: &Keys,
        call: &Call,
    ) -> Result<Vec<Vec<u8>>, CallError> {
        for attempt in 0..2 {
            let mut command = cmd("EVALSHA");
            command.arg(link.hashes.of(call)).arg(keys.keys.len()).arg(&keys.keys);
            for part in [
                &call.head,
                &call.rules,
                &call.peers,
                &call.enqueues,
                &call.releases,
                &call.finishes,
                &call.held,
            ] {
                command.arg(&part[..]);
            }
            command.arg(&keys.channels).arg(link.publish());
            let result =
                timeout(self.timeout, command.query_async::<Vec<Vec<u8>>>(&mut link.connection)).await;
            match result {
                Err(_) => return Err(CallError::Silent),
                Ok(Ok(parts)) => return Ok(parts),
                Ok(Err(error)) if error.code() == Some("OOM") => return Err(CallError::OutOfMemory),
                Ok(Err(error))
                    if attempt == 0 && error.kind() == ErrorKind::Server(ServerErrorKind::NoScript) =>
                {
                    match self.load(link).await {
                        Ok(()) => {}
                        Err(Refused::Moved(to)) => *self.redirect() = Some(to),
                        Err(Refused::Error(_)) => return Err(CallError::Silent),
                    }
                }
                Ok(Err(error)) => {
                    if let Some(to) = moved_to(&error) {
                        *self.redirect() = Some(to);
                    }
                    return Err(CallError::Failed(error));
                }
            }
        }
        Err(CallError::Silent)
    }

    async fn resolve(&self) -> Result<ConnectionInfo, ConnectError> {
        match &self.servers {
            Servers::One(url) => parse(url),
            Servers::Sentinel { service, sentinels, credentials } => {
                let mut last = None;
                for sentinel in sentinels {
                    match self.ask_sentinel(&parse(sentinel)?, service).await {
                        Ok((host, port)) => {
                            let first = parse(&sentinels[0])?;
                            let mut settings = first.redis_settings().clone();
                            if let Some((user, password)) = credentials {
                                settings = settings.set_password(password);
                                if let Some(user) = user {
                                    settings = settings.set_username(user);
                                }
                            }
                            let address = address(first.addr(), host, port);
                            return Ok(first.set_addr(address).set_redis_settings(settings));
                        }
                        Err(error) => last = Some(error),
                    }
                }
                Err(last.unwrap_or_else(|| ConnectError::new(ConnectProblem::Sentinel, "there is none")))
            }
            Servers::Cluster(seeds) => {
                let redirect = self.redirect().clone();
                if let Some((host, port)) = redirect {
                    let first = parse(&seeds[0])?;
                    let host = if host.is_empty() { host_of(first.addr()).to_owned() } else { host };
                    let address = address(first.addr(), host, port);
                    return Ok(first.set_addr(address));
                }
                let mut last = None;
                for seed in seeds {
                    let info = parse(seed)?;
                    match self.open(&info, None).await {
                        Ok(_) => return Ok(info),
                        Err(Refused::Error(error)) => last = Some(error),
                        Err(Refused::Moved(_)) => {}
                    }
                }
                Err(last.unwrap_or_else(|| ConnectError::new(ConnectProblem::Cluster, "no seed answers")))
            }
        }
    }

    async fn ask_sentinel(
        &self,
        info: &ConnectionInfo,
        service: &str,
    ) -> Result<(String, u16), ConnectError> {
        let mut connection = self.open(info, None).await.map_err(Refused::into_error)?;
        let mut ask = cmd("SENTINEL");
        ask.arg("GET-MASTER-ADDR-BY-NAME").arg(service);
        let answer: RedisResult<Option<(String, u16)>> =
            self.within_plain(ask.query_async(&mut connection)).await?;
        match answer {
            Ok(Some(address)) => Ok(address),
            Ok(None) => Err(ConnectError::new(ConnectProblem::Sentinel, "it knows no such service")),
            Err(error) => Err(refused(&error)),
        }
    }

    async fn open(
        &self,
        info: &ConnectionInfo,
        pushes: Option<mpsc::UnboundedSender<PushInfo>>,
    ) -> Result<MultiplexedConnection, Refused> {
        let keepalive =
            TcpKeepalive::new().with_time(Duration::from_secs(5)).with_interval(Duration::from_secs(2));
        let tcp = TcpSettings::default().set_nodelay(true).set_keepalive(keepalive);
        let settings =
            info.redis_settings().clone().set_protocol(ProtocolVersion::RESP3).set_skip_set_lib_name();
        let info = info.clone().set_tcp_settings(tcp).set_redis_settings(settings);
        let client = self.tls.client(info).map_err(|error| Refused::Error(refused(&error)))?;
        let mut config = AsyncConnectionConfig::new()
            .set_connection_timeout(Some(self.timeout))
            .set_response_timeout(None);
        if let Some(sender) = pushes {
            config = config.set_push_sender(sender);
        }
        let tls = matches!(client.get_connection_info().addr(), ConnectionAddr::TcpTls { .. });
        let opened = self.within(client.get_multiplexed_async_connection_with_config(&config)).await;
        opened.map_err(|error| match error {
            Refused::Error(error) => Refused::Error(error.in_view_of_tls(tls)),
            Refused::Moved(to) => Refused::Moved(to),
        })
    }

    /// What the future gives within the timeout.
    async fn within<T>(&self, future: impl Future<Output = RedisResult<T>>) -> Result<T, Refused> {
        self.within_plain(future).await.map_err(Refused::Error)?.map_err(|error| match moved_to(&error) {
            Some(to) => Refused::Moved(to),
            None => Refused::Error(refused(&error)),
        })
    }

    async fn within_plain<T>(
        &self,
        future: impl Future<Output = RedisResult<T>>,
    ) -> Result<RedisResult<T>, ConnectError> {
        let silent =
            |_| ConnectError::new(ConnectProblem::Silent, format_args!("nothing within {:?}", self.timeout));
        timeout(self.timeout, future).await.map_err(silent)
    }
}

impl std::fmt::Debug for Target {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_struct("Target").field("servers", &self.servers).finish_non_exhaustive()
    }
}

impl Tls {
    #[cfg(feature = "redis-tls")]
    fn client(&self, info: ConnectionInfo) -> RedisResult<Client> {
        if !matches!(info.addr(), ConnectionAddr::TcpTls { .. }) {
            return Client::open(info);
        }
        // The client panics where the process has no provider of cryptography, or more than one to choose from.
        if rustls::crypto::CryptoProvider::get_default().is_none() {
            // Another thread may have been faster, which is as good.
            let _ = rustls::crypto::ring::default_provider().install_default();
        }
        let client_tls = self
            .client
            .clone()
            .map(|(client_cert, client_key)| redis::ClientTlsConfig { client_cert, client_key });
        Client::build_with_tls(info, redis::TlsCertificates { client_tls, root_cert: self.root.clone() })
    }

    #[cfg(not(feature = "redis-tls"))]
    fn client(&self, info: ConnectionInfo) -> RedisResult<Client> {
        let _ = (&self.root, &self.client);
        Client::open(info)
    }
}

impl Link {
    pub(super) fn publish(&self) -> &'static str {
        if self.sharded { "SPUBLISH" } else { "PUBLISH" }
    }
}

impl Subscription {
    /// The next message of the node's channel; `None` once the connection is gone or the channel is no more ours.
    pub(super) async fn next(&mut self) -> Option<Vec<u8>> {
        loop {
            let PushInfo { kind, data } = self.pushes.recv().await?;
            match kind {
                PushKind::Message | PushKind::SMessage => {
                    if let Some(Value::BulkString(message)) = data.into_iter().next_back() {
                        return Some(message);
                    }
                }
                PushKind::Disconnection | PushKind::Unsubscribe | PushKind::SUnsubscribe => return None,
                _ => {}
            }
        }
    }
}

enum Refused {
    /// The slot is elsewhere in the Cluster.
    Moved((String, u16)),
    Error(ConnectError),
}

impl Refused {
    fn into_error(self) -> ConnectError {
        match self {
            Self::Moved(_) => ConnectError::new(ConnectProblem::Cluster, "the slot is elsewhere"),
            Self::Error(error) => error,
        }
    }
}

impl From<ConnectError> for Refused {
    fn from(error: ConnectError) -> Self {
        Self::Error(error)
    }
}

/// Whether a URL is one; its text stays out of the error, as it may hold a password.
pub(crate) fn check_url(url: &str, certificates: bool, cluster: bool) -> Result<(), ConfigError> {
    let hidden = "a text that is not shown, as it may hold a password";
    let bound = "redis://, rediss:// or unix:// with a host or path, and as database a number from 0";
    let wants_tls = ["rediss://", "valkeys://"].iter().any(|scheme| url.starts_with(scheme));
    if wants_tls && cfg!(not(feature = "redis-tls")) {
        let bound = "redis:// or unix://, as the feature `redis-tls` is not on";
        return Err(ConfigError::new("redis.url", "rediss://", bound));
    }
    let Ok(info) = url.into_connection_info() else {
        return Err(ConfigError::new("redis.url", hidden, bound));
    };
    let database = info.redis_settings().db();
    if database < 0 || (cluster && database > 0) {
        let bound = if cluster { "database 0, the only one of a Cluster" } else { "a database from 0" };
        return Err(ConfigError::new("redis.url", format_args!("database {database}"), bound));
    }
    if certificates && !matches!(info.addr(), ConnectionAddr::TcpTls { .. }) {
        return Err(ConfigError::new("redis.url", "not rediss://", "rediss:// where certificates are given"));
    }
    Ok(())
}

fn parse(url: &str) -> Result<ConnectionInfo, ConnectError> {
    url.into_connection_info().map_err(|error| refused(&error))
}

/// The address of another server, reached as the first one is.
fn address(like: &ConnectionAddr, host: String, port: u16) -> ConnectionAddr {
    match like {
        ConnectionAddr::TcpTls { insecure, tls_params, .. } => {
            ConnectionAddr::TcpTls { host, port, insecure: *insecure, tls_params: tls_params.clone() }
        }
        _ => ConnectionAddr::Tcp(host, port),
    }
}

fn host_of(address: &ConnectionAddr) -> &str {
    match address {
        ConnectionAddr::Tcp(host, _) | ConnectionAddr::TcpTls { host, .. } => host,
        _ => "",
    }
}

/// Where a Cluster says that the slot is.
fn moved_to(error: &RedisError) -> Option<(String, u16)> {
    if error.kind() != ErrorKind::Server(ServerErrorKind::Moved) {
        return None;
    }
    let (address, _) = error.redirect_node()?;
    let (host, port) = address.rsplit_once(':')?;
    Some((host.to_owned(), port.parse().ok()?))
}

/// The server's version and part, from its greeting. Whether it is one of a Cluster.
fn check_server(hello: &Value) -> Result<bool, ConnectError> {
    let mut version = String::new();
    let (mut mode, mut role) = (String::new(), String::new());
    let Value::Map(fields) = hello else {
        return Err(ConnectError::new(ConnectProblem::NotRedis, "no greeting of protocol version 3"));
    };
    for (name, value) in fields {
        let Ok(name) = String::from_redis_value_ref(name) else { continue };
        let text = String::from_redis_value_ref(value).unwrap_or_default();
        match name.as_str() {
            "version" => version = text,
            "mode" => mode = text,
            "role" => role = text,
            _ => {}
        }
    }
    let major = version.split('.').next().and_then(|major| major.parse::<u32>().ok());
    match major {
        Some(major) if major >= 7 => {}
        _ => return Err(ConnectError::new(ConnectProblem::TooOld, format_args!("{version:?}"))),
    }
    match (mode.as_str(), role.as_str()) {
        ("sentinel", _) => Err(ConnectError::new(ConnectProblem::NotPrimary, "it is a Sentinel")),
        (_, "master") => Ok(mode == "cluster"),
        // A server of a Cluster that does not have the slot says so itself.
        ("cluster", _) => Ok(true),
        (_, role) => Err(ConnectError::new(ConnectProblem::NotPrimary, format_args!("it is a {role}"))),
    }
}

fn io_kind(error: &RedisError) -> Option<io::ErrorKind> {
    let source = error.source()?;
    // The client shares it.
    let shared = source.downcast_ref::<Arc<dyn Error + Send + Sync>>();
    let cause = shared.map_or(source, |shared| &**shared);
    cause.downcast_ref::<io::Error>().map(io::Error::kind)
}

/// A client's error as ours. Texts of the server's are kept; none of them repeats a password.
pub(super) fn refused(error: &RedisError) -> ConnectError {
    let problem = match error.kind() {
        ErrorKind::AuthenticationFailed => ConnectProblem::Credentials,
        ErrorKind::Server(ServerErrorKind::NoPerm) => ConnectProblem::MissingRight,
        ErrorKind::RESP3NotSupported => ConnectProblem::TooOld,
        ErrorKind::Server(ServerErrorKind::ReadOnly) => ConnectProblem::NotPrimary,
        ErrorKind::InvalidClientConfig => ConnectProblem::Tls,
        ErrorKind::Io if error.is_timeout() => ConnectProblem::Silent,
        // So an error of TLS comes: a certificate that is not trusted, an answer that is no TLS.
        ErrorKind::Io if io_kind(error) == Some(io::ErrorKind::InvalidData) => ConnectProblem::Tls,
        ErrorKind::Io => ConnectProblem::Unreachable,
        ErrorKind::Parse => ConnectProblem::NotRedis,
        ErrorKind::Server(ServerErrorKind::ClusterDown | ServerErrorKind::MasterDown) => {
            ConnectProblem::Cluster
        }
        // It reads its data from the disk, or moves the slot, and will be there.
        ErrorKind::Server(ServerErrorKind::BusyLoading | ServerErrorKind::TryAgain) => {
            ConnectProblem::NotReady
        }
        _ => match error.code() {
            Some("NOAUTH" | "WRONGPASS") => ConnectProblem::Credentials,
            _ => ConnectProblem::Refused,
        },
    };
    let mut refused = ConnectError::new(problem, error);
    refused.breaks = problem == ConnectProblem::Unreachable && !error.is_connection_refusal();
    refused
}
