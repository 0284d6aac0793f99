//! What stands in the way of a connection to Redis is told by name, soon, and without a secret.

mod support;

use std::{io, net::TcpListener as StdListener, time::Duration};

use support::{
    Units, config, eventually,
    nodes::{end_check_on, hold, node, redis, state},
    redis::{Binary, Certificates, Kind, Options, Proxy, Rule, Server, Way, free_port, require},
    soon,
};
use tokio::{
    io::{AsyncReadExt, AsyncWriteExt},
    net::TcpListener,
    task::JoinHandle,
    time::Instant,
};
use tower_fair_queue::{ConnectError, ConnectProblem, FairQueue, RedisConfig};

/// Everything that a user of the server has to be allowed, for queues with the default key prefix: the keys and channels,
/// the commands on the connection and, since a script may do what its caller may, those within the script. `AUTH` and `HELLO` need no
/// right. On a Cluster `+ssubscribe` and `+spublish` take the place of `+subscribe` and `+publish`.
const LEAST: [&str; 33] = [
    "~fairq:*",
    "&fairq:*",
    "+script|load",
    "+evalsha",
    "+subscribe",
    "+publish",
    "+time",
    "+unlink",
    "+del",
    "+exists",
    "+get",
    "+set",
    "+hset",
    "+hget",
    "+hmget",
    "+hgetall",
    "+hlen",
    "+hscan",
    "+hdel",
    "+sadd",
    "+scard",
    "+smembers",
    "+srem",
    "+zadd",
    "+zcard",
    "+zscore",
    "+zmscore",
    "+zrange",
    "+zlexcount",
    "+zrangebylex",
    "+zrangebyscore",
    "+zremrangebylex",
    "+zrem",
];

const SECRET: &str = "hunter2";

fn oldest() -> Option<Binary> {
    require(Kind::Redis70)
}

/// The error of a connection that must fail, within 2 s and without showing a secret.
async fn refused(redis: RedisConfig) -> ConnectError {
    let config = config("refused", 1).redis(redis).build().unwrap();
    let start = Instant::now();
    let error =
        soon("the connection fails", FairQueue::connect(config)).await.expect_err("it cannot connect");
    let took = start.elapsed();
    assert!(took <= Duration::from_secs(2), "{error} after {took:?}");
    let shown = format!("{error} {error:?}");
    assert!(!shown.contains(SECRET), "{shown}");
    error
}

/// A listener that says the same to whatever comes, as often as `HELLO` is asked.
async fn saying(answer: &'static [u8]) -> (u16, JoinHandle<()>) {
    let listener = TcpListener::bind("127.0.0.1:0").await.unwrap();
    let port = listener.local_addr().unwrap().port();
    let task = tokio::spawn(async move {
        loop {
            let (mut stream, _) = listener.accept().await.unwrap();
            tokio::spawn(async move {
                let mut bytes = [0; 4096];
                while let Ok(length @ 1..) = stream.read(&mut bytes).await {
                    for _ in bytes[..length].windows(5).filter(|window| window == b"HELLO") {
                        stream.write_all(answer).await?;
                    }
                }
                io::Result::Ok(())
            });
        }
    });
    (port, task)
}

fn at(port: u16) -> RedisConfig {
    redis(format!("redis://:{SECRET}@127.0.0.1:{port}"))
}

#[tokio::test]
async fn nobody_listening_is_unreachable() {
    let error = refused(at(free_port())).await;
    assert_eq!(error.problem(), ConnectProblem::Unreachable, "{error}");
    assert!(error.is_transient());
}

// B43: an address that swallows everything.
#[tokio::test]
async fn silent_server_is_told_within_the_timeout() {
    // It is never accepted from, so the system takes connections and nobody speaks.
    let listener = StdListener::bind("127.0.0.1:0").unwrap();
    let error = refused(at(listener.local_addr().unwrap().port())).await;
    assert_eq!(error.problem(), ConnectProblem::Silent, "{error}");
    assert!(error.is_transient());

    let Some(binary) = oldest() else { return };
    let server = Server::start(&binary).await;
    server.stop();
    let error = refused(redis(server.url())).await;
    assert_eq!(error.problem(), ConnectProblem::Silent, "{error}");
    server.cont();
}

#[tokio::test]
async fn server_that_falls_silent_in_the_middle_is_told() {
    let Some(binary) = oldest() else { return };
    let server = Server::start(&binary).await;
    for pattern in [&b"ZCARD"[..], b"LOAD", b"SUBSCRIBE", b"EVALSHA"] {
        let proxy = Proxy::start(server.port()).await;
        proxy.set(Way::Requests, Rule::DelayOf(pattern, Duration::from_secs(60)..Duration::from_secs(61)));
        let error = refused(redis(proxy.url())).await;
        assert_eq!(error.problem(), ConnectProblem::Silent, "{}: {error}", String::from_utf8_lossy(pattern));
    }
}

#[tokio::test]
async fn wrong_or_missing_password_is_told() {
    let Some(binary) = oldest() else { return };
    let server =
        Server::with(&binary, &Options::default().password("open").user("app", ">right ~* &* +@all")).await;
    let port = server.port();
    for url in [
        format!("redis://127.0.0.1:{port}"),
        format!("redis://:{SECRET}@127.0.0.1:{port}"),
        format!("redis://app:{SECRET}@127.0.0.1:{port}"),
        format!("redis://{SECRET}:{SECRET}@127.0.0.1:{port}"),
    ] {
        let error = refused(redis(&url)).await;
        assert_eq!(error.problem(), ConnectProblem::Credentials, "{url}: {error}");
        assert!(!error.is_transient());
    }
}

#[tokio::test]
async fn plain_text_and_tls_do_not_mix() {
    let Some(binary) = oldest() else { return };
    let certificates = Certificates::new();
    let server = Server::with(&binary, &Options::default().tls(&certificates)).await;
    let trusting = |url: String| redis(url).root_certificates(&certificates.root);

    let error = refused(trusting(format!("rediss://localhost:{}", server.port()))).await;
    assert!(matches!(error.problem(), ConnectProblem::Tls | ConnectProblem::Silent), "{error}");
    assert!(error.to_string().contains("TLS"), "{error}");

    let error = refused(redis(format!("redis://127.0.0.1:{}", server.tls_port()))).await;
    let told = [ConnectProblem::Tls, ConnectProblem::Silent, ConnectProblem::Unreachable];
    assert!(told.contains(&error.problem()), "{error}");
    assert!(error.to_string().contains("TLS"), "{error}");

    // A server that nobody we trust vouches for, by an authority of our own and by the system's.
    for redis in
        [redis(server.tls_url()).root_certificates(Certificates::new().root), redis(server.tls_url())]
    {
        let error = refused(redis).await;
        assert_eq!(error.problem(), ConnectProblem::Tls, "{error}");
        assert!(error.to_string().contains("certificate"), "{error}");
    }
}

#[tokio::test]
async fn replica_is_no_primary() {
    let Some(binary) = oldest() else { return };
    let primary = Server::start(&binary).await;
    let options = Options::default().set("replicaof", &format!("127.0.0.1 {}", primary.port()));
    let replica = Server::with(&binary, &options).await;
    let error = refused(redis(replica.url())).await;
    assert_eq!(error.problem(), ConnectProblem::NotPrimary, "{error}");
    assert!(error.to_string().contains("replica"), "{error}");
}

// B49: a server that is too old fails at once, by its greeting.
#[tokio::test]
async fn servers_that_will_not_do_are_told_by_what_they_say() {
    let old = b"%7\r\n$6\r\nserver\r\n$5\r\nredis\r\n$7\r\nversion\r\n$6\r\n6.2.14\r\n$5\r\nproto\r\n:3\r\n$2\r\nid\r\n:7\r\n\
        $4\r\nmode\r\n$10\r\nstandalone\r\n$4\r\nrole\r\n$6\r\nmaster\r\n$7\r\nmodules\r\n*0\r\n";
    let (port, _task) = saying(old).await;
    let error = refused(redis(format!("redis://127.0.0.1:{port}"))).await;
    assert_eq!(error.problem(), ConnectProblem::TooOld, "{error}");
    assert!(error.to_string().contains("7.0") && error.to_string().contains("6.2.14"), "{error}");

    let (port, _task) = saying(b"-ERR unknown command `HELLO`, with args beginning with: `3`, \r\n").await;
    let error = refused(redis(format!("redis://127.0.0.1:{port}"))).await;
    assert_eq!(error.problem(), ConnectProblem::TooOld, "{error}");

    let (port, _task) = saying(b"HTTP/1.1 400 Bad Request\r\ncontent-length: 0\r\n\r\n").await;
    let error = refused(redis(format!("redis://127.0.0.1:{port}"))).await;
    assert!(matches!(error.problem(), ConnectProblem::NotRedis), "{error}");
}

#[tokio::test]
async fn cluster_without_an_owner_of_the_slot_is_told() {
    let Some(binary) = oldest() else { return };
    let options =
        Options::default().set("cluster-enabled", "yes").set("cluster-port", &free_port().to_string());
    let server = Server::with(&binary, &options).await;
    for redis in [redis(server.url()), RedisConfig::cluster([server.url()])] {
        let error = refused(redis).await;
        assert_eq!(error.problem(), ConnectProblem::Cluster, "{error}");
    }
}

// B49: without any one of the least rights the connection fails, and says which it is.
#[tokio::test]
async fn each_missing_right_is_named() {
    for kind in [Kind::Redis70, Kind::Redis74, Kind::Valkey9] {
        let Some(binary) = require(kind) else { continue };
        let server = Server::start(&binary).await;
        for (index, missing) in LEAST.iter().enumerate() {
            let user = format!("user{index}");
            let password = format!(">{SECRET}");
            let mut set = vec!["ACL", "SETUSER", &user, "on", &password, "-@all"];
            set.extend(LEAST.iter().filter(|right| *right != missing));
            server.cli(&set);
            let name = match *missing {
                "~fairq:*" => "key",
                "&fairq:*" => "channel",
                command => command.trim_start_matches('+'),
            };
            let error = refused(redis(server.url_as(&user, SECRET))).await;
            assert_eq!(error.problem(), ConnectProblem::MissingRight, "{kind:?} without {missing}: {error}");
            assert!(!error.is_transient());
            let text = error.to_string().to_lowercase();
            assert!(text.contains(name), "{kind:?} without {missing}: {error}");
        }
    }
}

// B49: the least rights are enough for all a queue ever does: to wait, to pass on, to restate, to reap, to recover.
#[tokio::test]
async fn least_rights_are_enough() {
    let mut runs = Vec::new();
    for kind in [Kind::Redis70, Kind::Redis74, Kind::Valkey9] {
        let Some(binary) = require(kind) else { continue };
        runs.push(tokio::spawn(live_with_least_rights(kind, binary)));
    }
    for run in runs {
        run.await.unwrap();
    }
}

async fn live_with_least_rights(kind: Kind, binary: Binary) {
    let name = format!("least-{kind:?}");
    let options = Options::default().user("app", &format!(">{SECRET} -@all {}", LEAST.join(" ")));
    let server = Server::with(&binary, &options).await;
    let proxy = Proxy::start(server.port()).await;
    let url = server.url_as("app", SECRET);
    let settings =
        |url: &str| redis(url).lease(Duration::from_secs(5)).outage(tower_fair_queue::Outage::Wait);
    let units = Units::default();
    let here = node(&name, 2, settings(&url)).await;
    let there =
        node(&name, 2, settings(&url.replace(&server.port().to_string(), &proxy.port().to_string()))).await;

    // A node that is cut off while it holds and waits is reaped.
    let one = hold(&there, &units).await.unwrap();
    let two = hold(&here, &units).await.unwrap();
    let (queue, counted) = (there.clone(), units.clone());
    let waiting = tokio::spawn(async move { hold(&queue, &counted).await });
    eventually(Duration::from_secs(2), "it waits", || state(&server, &name, "waiting") == 1).await;
    proxy.set(Way::Requests, Rule::Hold);
    proxy.cut();
    waiting.abort();
    let reaped = || state(&server, &name, "live") == 1 && state(&server, &name, "in_flight") == 1;
    eventually(Duration::from_secs(8), "the silent node is reaped", reaped).await;
    drop(one);
    proxy.heal();
    proxy.cut();
    eventually(Duration::from_secs(5), "it is back", || state(&server, &name, "live") == 2).await;

    // A loss of all data, with both holding.
    let one = soon("a grant over there", hold(&there, &units)).await.unwrap();
    server.cli(&["FLUSHALL"]);
    eventually(Duration::from_secs(5), "both restated", || state(&server, &name, "in_flight") == 2).await;
    let (queue, counted) = (here.clone(), units.clone());
    let waiting = tokio::spawn(async move { hold(&queue, &counted).await });
    eventually(Duration::from_secs(2), "it waits", || state(&server, &name, "waiting") == 1).await;
    drop(one);
    let three = soon("the handover", waiting).await.unwrap().unwrap();
    drop((two, three));
    assert_eq!(units.peak(), 2);
    end_check_on(&server, &[&here, &there], &units).await;
    assert!(there.drain(Duration::ZERO).await.is_complete());
    assert_eq!(server.cli(&["ACL", "LOG"]), "", "refused");
}
