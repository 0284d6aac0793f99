//! Where the line of many processes is kept, and what happens while it is out of reach.

use std::{fmt, sync::Arc, time::Duration};

use super::Limit;
use crate::error::ConfigError;

/// What a node does while Redis is out of reach (promise P10). It begins once no call has succeeded for the
/// [`command_timeout`](RedisConfig::command_timeout) although one was wanted, and ends with the next that does.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Hash)]
#[non_exhaustive]
pub enum Outage {
    /// Requests wait for Redis to come back, until their deadline.
    Wait,
    /// Requests that wait or come are refused at once with [`Cause::Unavailable`](crate::Cause::Unavailable).
    Reject,
    /// The node admits by itself, in fair order, while all it has in flight is below its share: the capacity over the nodes that
    /// were live when Redis was last heard, rounded down; 0 if it never heard. A request wider than the share waits for
    /// Redis. The default.
    ///
    /// At most each node's share comes on top of what was in flight when Redis went away (promise P1, exception b).
    #[default]
    Local,
    /// As [`Local`](Self::Local), with a share of so many units for this node. At least 1.
    LocalShare(u32),
    /// Everything is admitted (fails open), at most so many units of this node at once.
    Admit(Limit),
}

/// What becomes of the permits of a node that could not renew its lease in time.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Hash)]
#[non_exhaustive]
pub enum LeaseLost {
    /// They go on. Redis gives their units to others once the lease has ended, so what the node holds then comes on top of the
    /// capacity (promise P1, exception c). The default.
    #[default]
    Continue,
    /// They are revoked before anyone else can be granted their units, so the capacity holds under partition too. Cannot go
    /// together with [`Outage::Local`], [`Outage::LocalShare`] or [`Outage::Admit`].
    Abort,
}

/// The Redis or Valkey server (7.0 or later) that holds one queue for many processes.
///
/// All processes that name the same server, [`key_prefix`](Self::key_prefix) and queue share one line and one capacity. The
/// settings are checked by [`FairQueueConfigBuilder::build`](crate::FairQueueConfigBuilder::build).
///
/// Addresses are URLs: `redis://[user:password@]host[:port][/db]`, `rediss://` for TLS (feature `redis-tls`), `unix://`. They may
/// hold secrets, so `Debug` shows none.
///
/// # Examples
///
/// ```
/// use std::time::Duration;
/// use tower_fair_queue::{FairQueueConfig, RedisConfig};
///
/// let config = FairQueueConfig::builder("chat")
///     .capacity(3)
///     .redis(RedisConfig::new("redis://127.0.0.1:6379").lease(Duration::from_secs(20)))
///     .build()?;
/// # Ok::<(), tower_fair_queue::ConfigError>(())
/// ```
#[derive(Clone)]
#[must_use = "settings do nothing until they are given to a queue"]
pub struct RedisConfig {
    pub(crate) servers: Servers,
    pub(crate) key_prefix: Arc<str>,
    pub(crate) command_timeout: Duration,
    pub(crate) poll_interval: Duration,
    pub(crate) lease: Duration,
    pub(crate) lease_lost: LeaseLost,
    pub(crate) outage: Outage,
    pub(crate) ramp: Duration,
    pub(crate) root_certificates: Option<Arc<[u8]>>,
    pub(crate) client_certificate: Option<(Arc<[u8]>, Arc<[u8]>)>,
}

/// How the server that holds the queue is found.
#[derive(Clone)]
pub(crate) enum Servers {
    One(Arc<str>),
    Sentinel { service: Arc<str>, sentinels: Vec<Arc<str>>, credentials: Option<(Option<String>, String)> },
    Cluster(Vec<Arc<str>>),
}

impl RedisConfig {
    /// The bounds of [`lease`](Self::lease). Two clock jumps on the server may shorten a lease by 3 s, and the node has to have time
    /// to renew in what is left.
    pub const LEASE: (Duration, Duration) = (Duration::from_secs(5), Duration::from_secs(3_600));
    /// The bounds of [`command_timeout`](Self::command_timeout).
    pub const COMMAND_TIMEOUT: (Duration, Duration) = (Duration::from_millis(50), Duration::from_millis(500));
    /// The bounds of [`poll_interval`](Self::poll_interval).
    pub const POLL_INTERVAL: (Duration, Duration) = (Duration::from_millis(50), Duration::from_secs(1));
    /// The longest [`ramp`](Self::ramp).
    pub const MAX_RAMP: Duration = Duration::from_secs(60);
    /// The longest [`key_prefix`](Self::key_prefix), in bytes.
    pub const MAX_KEY_PREFIX: usize = 64;

    fn with(servers: Servers) -> Self {
        Self {
            servers,
            key_prefix: "fairq".into(),
            command_timeout: Duration::from_millis(500),
            poll_interval: Duration::from_millis(200),
            lease: Duration::from_secs(10),
            lease_lost: LeaseLost::default(),
            outage: Outage::default(),
            ramp: Duration::from_secs(1),
            root_certificates: None,
            client_certificate: None,
        }
    }

    /// One server, by its URL.
    pub fn new(url: impl AsRef<str>) -> Self {
        Self::with(Servers::One(url.as_ref().into()))
    }

    /// The primary that the Sentinels at these URLs name for `service`. It is asked for anew at each connection, so a failover is
    /// followed. Name and password for the server itself are set by [`sentinel_server_credentials`](Self::sentinel_server_credentials).
    pub fn sentinel<U: AsRef<str>>(service: impl AsRef<str>, sentinels: impl IntoIterator<Item = U>) -> Self {
        Self::with(Servers::Sentinel {
            service: service.as_ref().into(),
            sentinels: sentinels.into_iter().map(|url| url.as_ref().into()).collect(),
            credentials: None,
        })
    }

    /// The Cluster that the nodes at these URLs belong to. A queue lives in one slot, so on one of its primaries.
    pub fn cluster<U: AsRef<str>>(seeds: impl IntoIterator<Item = U>) -> Self {
        Self::with(Servers::Cluster(seeds.into_iter().map(|url| url.as_ref().into()).collect()))
    }

    /// Name (`None`: the default user) and password for the server that Sentinel names. Without it the one is used that the first Sentinel's URL
    /// has. No effect with [`new`](Self::new) and [`cluster`](Self::cluster), whose URLs hold them.
    pub fn sentinel_server_credentials(mut self, user: Option<&str>, password: impl Into<String>) -> Self {
        if let Servers::Sentinel { credentials, .. } = &mut self.servers {
            *credentials = Some((user.map(str::to_owned), password.into()));
        }
        self
    }

    /// What the names of all keys and channels begin with: `prefix:{queue}:…`. Default `fairq`; 1 to
    /// [`MAX_KEY_PREFIX`](Self::MAX_KEY_PREFIX) bytes of ASCII letters, digits, `-`, `_`, `.` or `:`.
    pub fn key_prefix(mut self, prefix: impl AsRef<str>) -> Self {
        self.key_prefix = prefix.as_ref().into();
        self
    }

    /// How long a command, or the making of a connection, may take. Silence beyond it counts like an error (promise P10). Default, and at
    /// most, 500 ms; at least 50 ms.
    pub fn command_timeout(mut self, timeout: Duration) -> Self {
        self.command_timeout = timeout;
        self
    }

    /// How often a node asks while its requests wait; a grant whose push was lost is late by this (promise P9). Default 200 ms; from 50 ms to
    /// 1 s. It is per node, however many wait.
    pub fn poll_interval(mut self, interval: Duration) -> Self {
        self.poll_interval = interval;
        self
    }

    /// How long the queue believes in a silent node: what a killed process held is free after this and one heartbeat, which is 1 s (promise P6). Default 10 s; from 5 s
    /// to 1 h. It has nothing to do with how long requests run: a live node renews all it holds.
    pub fn lease(mut self, lease: Duration) -> Self {
        self.lease = lease;
        self
    }

    /// What becomes of permits when this node could not renew its lease. Default [`LeaseLost::Continue`].
    pub fn lease_lost(mut self, policy: LeaseLost) -> Self {
        self.lease_lost = policy;
        self
    }

    /// What requests meet while Redis is out of reach. Default [`Outage::Local`].
    pub fn outage(mut self, policy: Outage) -> Self {
        self.outage = policy;
        self
    }

    /// Over how long the capacity opens again after a loss of data or a time in which no node reached Redis, so that
    /// recovery is no burst. Default 1 s; at most 60 s; 0 opens it at once.
    pub fn ramp(mut self, ramp: Duration) -> Self {
        self.ramp = ramp;
        self
    }

    /// The certificates, in PEM, by which the server's is trusted, instead of those of the operating system.
    pub fn root_certificates(mut self, pem: impl AsRef<[u8]>) -> Self {
        self.root_certificates = Some(pem.as_ref().into());
        self
    }

    /// The certificate and key, in PEM, that this process shows to the server.
    pub fn client_certificate(mut self, certificate: impl AsRef<[u8]>, key: impl AsRef<[u8]>) -> Self {
        self.client_certificate = Some((certificate.as_ref().into(), key.as_ref().into()));
        self
    }

    pub(super) fn check(&self) -> Result<(), ConfigError> {
        let within = |field, value: Duration, (least, most): (Duration, Duration)| {
            if value < least || value > most {
                let bound = format!("between {least:?} and {most:?}");
                return Err(ConfigError::new(field, format_args!("{value:?}"), bound));
            }
            Ok(())
        };
        within("redis.lease", self.lease, Self::LEASE)?;
        within("redis.command_timeout", self.command_timeout, Self::COMMAND_TIMEOUT)?;
        within("redis.poll_interval", self.poll_interval, Self::POLL_INTERVAL)?;
        within("redis.ramp", self.ramp, (Duration::ZERO, Self::MAX_RAMP))?;
        let prefix = &self.key_prefix;
        let plain = |c: char| c.is_ascii_alphanumeric() || matches!(c, '-' | '_' | '.' | ':');
        if prefix.is_empty() || prefix.len() > Self::MAX_KEY_PREFIX || !prefix.chars().all(plain) {
            let bound =
                format!("1 to {} bytes of ASCII letters, digits, '-', '_', '.' or ':'", Self::MAX_KEY_PREFIX);
            return Err(ConfigError::new("redis.key_prefix", format_args!("{prefix:?}"), bound));
        }
        match self.outage {
            Outage::LocalShare(0) => {
                let bound = format!("between 1 and {}", u32::MAX);
                return Err(ConfigError::new("redis.outage.local_share", 0, bound));
            }
            Outage::Admit(limit) => drop(limit.check("redis.outage.admit")?),
            _ => {}
        }
        if self.lease_lost == LeaseLost::Abort && !matches!(self.outage, Outage::Wait | Outage::Reject) {
            let bound = "LeaseLost::Continue unless redis.outage is Wait or Reject: a node that admits by itself breaks the cap that Abort keeps";
            return Err(ConfigError::new("redis.lease_lost", "LeaseLost::Abort", bound));
        }
        let has = |pem: &[u8], what: &str| pem.windows(what.len()).any(|part| part == what.as_bytes());
        if self.root_certificates.as_ref().is_some_and(|pem| !has(pem, "-----BEGIN CERTIFICATE-----")) {
            return Err(ConfigError::new(
                "redis.root_certificates",
                "no PEM certificate",
                "at least one PEM certificate",
            ));
        }
        if let Some((certificate, key)) = &self.client_certificate
            && !(has(certificate, "-----BEGIN CERTIFICATE-----") && has(key, "PRIVATE KEY-----"))
        {
            let bound = "a PEM certificate and its PEM private key";
            return Err(ConfigError::new("redis.client_certificate", "something else", bound));
        }
        let urls = match &self.servers {
            Servers::One(url) => std::slice::from_ref(url),
            Servers::Sentinel { sentinels, service, .. } => {
                if service.is_empty() {
                    return Err(ConfigError::new("redis.sentinel.service", "nothing", "a name"));
                }
                sentinels
            }
            Servers::Cluster(seeds) => seeds,
        };
        if urls.is_empty() {
            return Err(ConfigError::new("redis.servers", "none", "at least one URL"));
        }
        let certificates = self.root_certificates.is_some() || self.client_certificate.is_some();
        let cluster = matches!(self.servers, Servers::Cluster(_));
        urls.iter().try_for_each(|url| crate::backend::check_url(url, certificates, cluster))
    }
}

impl fmt::Debug for RedisConfig {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let Self {
            servers,
            key_prefix,
            command_timeout,
            poll_interval,
            lease,
            lease_lost,
            outage,
            ramp,
            root_certificates,
            client_certificate,
        } = self;
        let set = |is: bool| if is { "set" } else { "not set" };
        f.debug_struct("RedisConfig")
            .field("servers", servers)
            .field("key_prefix", key_prefix)
            .field("command_timeout", command_timeout)
            .field("poll_interval", poll_interval)
            .field("lease", lease)
            .field("lease_lost", lease_lost)
            .field("outage", outage)
            .field("ramp", ramp)
            .field("root_certificates", &set(root_certificates.is_some()))
            .field("client_certificate", &set(client_certificate.is_some()))
            .finish()
    }
}

impl fmt::Debug for Servers {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::One(_) => f.write_str("one, not shown"),
            Self::Sentinel { sentinels, .. } => write!(f, "{} sentinels, not shown", sentinels.len()),
            Self::Cluster(seeds) => write!(f, "{} seeds of a cluster, not shown", seeds.len()),
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::FairQueueConfig;

    #[track_caller]
    fn refused(config: RedisConfig, field: &str, value: &str) {
        let error = FairQueueConfig::builder("chat")
            .capacity(1)
            .redis(config)
            .build()
            .expect_err("outside its bound");
        assert_eq!((error.field(), error.value()), (field, value));
    }

    fn valid() -> RedisConfig {
        RedisConfig::new("redis://127.0.0.1:6379")
    }

    #[test]
    fn every_bound_is_checked_and_named() {
        refused(valid().lease(Duration::from_secs(4)), "redis.lease", "4s");
        refused(valid().lease(Duration::from_secs(3_601)), "redis.lease", "3601s");
        refused(valid().command_timeout(Duration::ZERO), "redis.command_timeout", "0ns");
        refused(valid().poll_interval(Duration::from_millis(49)), "redis.poll_interval", "49ms");
        refused(valid().ramp(Duration::from_secs(61)), "redis.ramp", "61s");
        refused(valid().key_prefix("{a}"), "redis.key_prefix", "\"{a}\"");
        refused(valid().key_prefix(""), "redis.key_prefix", "\"\"");
        refused(valid().outage(Outage::LocalShare(0)), "redis.outage.local_share", "0");
        refused(valid().outage(Outage::Admit(Limit::AtMost(0))), "redis.outage.admit", "0");
        refused(valid().lease_lost(LeaseLost::Abort), "redis.lease_lost", "LeaseLost::Abort");
        refused(RedisConfig::cluster(Vec::<String>::new()), "redis.servers", "none");
        refused(RedisConfig::sentinel("", ["redis://127.0.0.1"]), "redis.sentinel.service", "nothing");
        refused(
            RedisConfig::new("http://127.0.0.1"),
            "redis.url",
            "a text that is not shown, as it may hold a password",
        );
        refused(RedisConfig::new("redis://127.0.0.1/-1"), "redis.url", "database -1");
        refused(RedisConfig::cluster(["redis://127.0.0.1/3"]), "redis.url", "database 3");
        refused(valid().root_certificates("not PEM"), "redis.root_certificates", "no PEM certificate");
        refused(
            valid().client_certificate("not PEM", "nor this"),
            "redis.client_certificate",
            "something else",
        );
        let abort = valid().lease_lost(LeaseLost::Abort).outage(Outage::Reject);
        assert!(FairQueueConfig::builder("chat").capacity(1).redis(abort).build().is_ok());
    }

    #[test]
    fn no_secret_is_shown() {
        let config =
            RedisConfig::new("redis://user:hunter2@127.0.0.1:6379").client_certificate("hunter2", "hunter2");
        let shown = format!("{config:?}");
        assert!(!shown.contains("hunter2") && !shown.contains("127.0.0.1"), "{shown}");
        let error = FairQueueConfig::builder("chat")
            .capacity(1)
            .redis(RedisConfig::new("redis://user:hunter2@[::bad"))
            .build()
            .unwrap_err();
        assert!(!format!("{error:?} {error}").contains("hunter2"));
    }
}
