//! The servers and the proxy of the Redis tests do what those tests take for granted.

mod support;

use std::{io::ErrorKind, net::TcpStream, path::Path, process::Command, time::Duration};

use support::{
    eventually,
    process::Process,
    redis::{
        Binary, Certificates, Cluster, Kind, Options, Proxy, Reply, Resp, Rule, Sentinels, Server, Way,
        require,
    },
};
use tokio::time::Instant;

const SOON: Duration = Duration::from_secs(10);

fn redis() -> Option<Binary> {
    require(Kind::Redis70)
}

/// A call over a connection that blocks, beside the proxy's tasks.
async fn call(mut connection: Resp, args: &'static [&str]) -> (Resp, std::io::Result<Reply>) {
    tokio::task::spawn_blocking(move || {
        let reply = connection.call(args);
        (connection, reply)
    })
    .await
    .unwrap()
}

#[tokio::test]
async fn every_kind_of_server_starts_and_is_what_it_says() {
    for kind in Kind::ALL {
        let Some(binary) = require(kind) else { continue };
        let server = Server::start(&binary).await;
        let info = server.cli(&["INFO", "server"]);
        let version = |name: &str| {
            let mut lines = info.lines();
            lines.find_map(|line| line.strip_prefix(name)).unwrap_or_default().to_owned()
        };
        let (name, found) = match kind {
            Kind::Redis70 => ("7.", version("redis_version:")),
            Kind::Redis74 => ("7.4.", version("redis_version:")),
            Kind::Valkey8 => ("8.", version("valkey_version:")),
            Kind::Valkey9 => ("9.", version("valkey_version:")),
        };
        assert!(found.starts_with(name), "{kind:?}: {info}");
        assert_eq!(server.cli(&["EVAL", "return redis.call('TIME')[1] > '0'", "0"]), "1", "{kind:?}");
    }
}

#[tokio::test]
async fn dropped_server_is_gone() {
    let Some(binary) = redis() else { return };
    let server = Server::start(&binary).await;
    let (port, pid) = (server.port(), server.pid());
    drop(server);
    assert_eq!(TcpStream::connect(("127.0.0.1", port)).unwrap_err().kind(), ErrorKind::ConnectionRefused);
    assert!(!Path::new(&format!("/proc/{pid}")).exists());
}

#[tokio::test]
async fn stopped_server_is_silent_until_it_continues() {
    let Some(binary) = redis() else { return };
    let server = Server::start(&binary).await;
    server.stop();
    let start = Instant::now();
    let error = server.try_cli(&["PING"]).unwrap_err();
    assert!(error.contains("ask") && start.elapsed() >= Duration::from_secs(1), "{error}");
    server.cont();
    assert_eq!(server.cli(&["PING"]), "PONG");
}

#[tokio::test]
async fn restarts_keep_the_port_and_the_data_asked_for() {
    let Some(binary) = redis() else { return };
    let mut server = Server::start(&binary).await;
    let (port, pid) = (server.port(), server.pid());
    server.cli(&["SET", "key", "saved"]);
    server.restart_with_data().await;
    assert_eq!(server.cli(&["GET", "key"]), "saved");
    assert!(server.port() == port && server.pid() != pid);
    server.cli(&["SET", "key", "later"]);
    server.restart_from_save().await;
    assert_eq!(server.cli(&["GET", "key"]), "saved");
    server.kill9();
    assert!(server.try_cli(&["PING"]).is_err());
    server.restart().await;
    assert_eq!(server.cli(&["DBSIZE"]), "0");
}

#[tokio::test]
async fn users_may_do_what_their_rules_say() {
    let Some(binary) = redis() else { return };
    let options = Options::default().password("open").user("app", ">secret ~app:* -@all +get");
    let server = Server::with(&binary, &options).await;
    assert_eq!(server.url(), format!("redis://:open@127.0.0.1:{}", server.port()));
    assert_eq!(server.cli_as("default", "open", &["PING"]).unwrap(), "PONG");
    assert!(server.cli_as("default", "wrong", &["PING"]).unwrap_err().starts_with("WRONGPASS"));
    assert_eq!(server.cli_as("app", "secret", &["GET", "app:key"]).unwrap(), "");
    for refused in [&["GET", "key"][..], &["SET", "app:key", "1"]] {
        assert!(server.cli_as("app", "secret", refused).unwrap_err().starts_with("NOPERM"), "{refused:?}");
    }
    let mut nobody = Resp::connect(server.port()).unwrap();
    let Reply::Error(error) = nobody.call(&["PING"]).unwrap() else { panic!("served without a password") };
    assert!(error.starts_with("NOAUTH"), "{error}");
}

#[tokio::test]
async fn full_server_refuses_to_write() {
    let Some(binary) = redis() else { return };
    let server = Server::with(&binary, &Options::default().max_memory(1, "noeviction")).await;
    assert!(server.try_cli(&["SET", "key", "1"]).unwrap_err().starts_with("OOM"));
}

#[tokio::test]
async fn tls_is_trusted_by_its_own_root_alone() {
    let Some(binary) = redis() else { return };
    let certificates = Certificates::new();
    let server = Server::with(&binary, &Options::default().tls(&certificates)).await;
    let port = server.tls_port().to_string();
    assert_eq!(server.tls_url(), format!("rediss://localhost:{port}"));
    let ping = |root: &str| {
        let path = std::env::temp_dir().join(format!("fairq-root-{port}.pem"));
        std::fs::write(&path, root).unwrap();
        let mut client = Command::new("redis-cli");
        client.args(["-h", "localhost", "-p", &port, "--tls", "--cacert"]).arg(&path).arg("PING");
        let output = client.output().expect("redis-cli, which comes with Debian's server");
        std::fs::remove_file(&path).unwrap();
        output
    };
    let trusted = ping(&certificates.root);
    assert_eq!(String::from_utf8_lossy(&trusted.stdout), "PONG\n", "{trusted:?}");
    let other = ping(&Certificates::new().root);
    assert!(
        !other.status.success() && String::from_utf8_lossy(&other.stderr).contains("certificate"),
        "{other:?}"
    );
}

#[tokio::test]
async fn cluster_serves_each_slot_at_its_owner() {
    let Some(binary) = redis() else { return };
    let cluster = Cluster::start(&binary).await;
    assert_eq!(cluster.urls().len(), 3);
    // Of slots 866 and 12182.
    assert_eq!((cluster.owner("hello"), cluster.owner("foo")), (0, 2));
    let owner = cluster.owner("{foo}:a");
    cluster.nodes[owner].cli(&["SET", "{foo}:a", "1"]);
    let to = (owner + 1) % 3;
    assert!(cluster.nodes[to].try_cli(&["GET", "{foo}:a"]).unwrap_err().starts_with("MOVED"));
    cluster.move_slot("{foo}:a", to);
    assert_eq!(cluster.owner("foo"), to);
    assert_eq!(cluster.nodes[to].cli(&["GET", "{foo}:a"]), "1");
    cluster.ok().await;
}

#[tokio::test]
async fn sentinels_elect_the_replica() {
    let Some(binary) = redis() else { return };
    let mut all = Sentinels::start(&binary).await;
    assert_eq!(all.primary(), Some(0));
    assert_eq!(all.failover().await, 1);
    all.ok().await;
    assert_eq!(all.kill_primary().await, 0);
    all.servers[1].restart().await;
    all.ok().await;
}

#[tokio::test]
async fn proxy_swallows_one_way_only() {
    let Some(binary) = redis() else { return };
    let server = Server::start(&binary).await;
    let proxy = Proxy::start(server.port()).await;
    let connection = Resp::connect(proxy.port()).unwrap();
    let (connection, reply) = call(connection, &["INCR", "key"]).await;
    assert_eq!(reply.unwrap(), Reply::Number(1));
    proxy.set(Way::Replies, Rule::Swallow);
    let (connection, reply) = call(connection, &["INCR", "key"]).await;
    assert!(matches!(reply.unwrap_err().kind(), ErrorKind::WouldBlock | ErrorKind::TimedOut));
    assert_eq!((server.cli(&["GET", "key"]).as_str(), proxy.swallowed(Way::Replies)), ("2", 4));
    proxy.heal();
    proxy.set(Way::Requests, Rule::Swallow);
    let (connection, reply) = call(connection, &["INCR", "key"]).await;
    assert!(reply.is_err() && server.cli(&["GET", "key"]) == "2");
    proxy.heal();
    assert_eq!(call(connection, &["INCR", "key"]).await.1.unwrap(), Reply::Number(3));
}

#[tokio::test]
async fn proxy_delays_what_it_is_told_to() {
    let Some(binary) = redis() else { return };
    let server = Server::start(&binary).await;
    let proxy = Proxy::seeded(server.port(), 7).await;
    let [short, long] = [200, 300].map(Duration::from_millis);
    proxy.set(Way::Requests, Rule::DelayOf(b"SUBSCRIBE", short..long));
    let mut connection = Resp::connect(proxy.port()).unwrap();
    let mut times = Vec::new();
    for args in [&["SET", "key", "1"][..], &["SUBSCRIBE", "channel"]] {
        let start = Instant::now();
        (connection, _) = call(connection, args).await;
        times.push(start.elapsed());
    }
    assert!(times[0] < short && times[1] >= short, "{times:?}");
    proxy.heal();
    proxy.set(Way::Replies, Rule::Delay(short..long));
    let start = Instant::now();
    let (_, reply) = call(Resp::connect(proxy.port()).unwrap(), &["GET", "key"]).await;
    assert!(reply.unwrap() == Reply::Text("1".to_owned()) && start.elapsed() >= short);
}

#[tokio::test]
async fn held_request_arrives_after_its_sender_is_gone() {
    let Some(binary) = redis() else { return };
    let server = Server::start(&binary).await;
    let proxy = Proxy::start(server.port()).await;
    proxy.set(Way::Requests, Rule::Hold);
    let mut connection = Resp::connect(proxy.port()).unwrap();
    connection.send(&["SET", "key", "late"]).unwrap();
    drop(connection);
    eventually(SOON, "the proxy has the connection", || proxy.open() == 1).await;
    assert_eq!(server.cli(&["GET", "key"]), "");
    proxy.heal();
    eventually(SOON, "the request arrives", || server.cli(&["GET", "key"]) == "late").await;
    eventually(SOON, "the connection is closed", || proxy.open() == 0).await;
}

#[tokio::test]
async fn proxy_cuts_and_refuses() {
    let Some(binary) = redis() else { return };
    let server = Server::start(&binary).await;
    let proxy = Proxy::start(server.port()).await;
    let (connection, reply) = call(Resp::connect(proxy.port()).unwrap(), &["PING"]).await;
    reply.unwrap();
    proxy.refuse().await;
    assert_eq!(Resp::connect(proxy.port()).unwrap_err().kind(), ErrorKind::ConnectionRefused);
    let (connection, reply) = call(connection, &["PING"]).await;
    reply.unwrap();
    proxy.cut();
    assert!(call(connection, &["PING"]).await.1.is_err());
    eventually(SOON, "the connection is cut", || proxy.open() == 0).await;
    proxy.allow().await;
    call(Resp::connect(proxy.port()).unwrap(), &["PING"]).await.1.unwrap();
    assert_eq!(proxy.accepted(), 2);
}

#[tokio::test]
async fn process_is_heard_stopped_and_killed() {
    let script = "echo first; echo second; while read line; do echo got $line; done; echo end";
    let mut process = Process::spawn(Path::new("/bin/sh"), &["-c", script]);
    assert_eq!(process.wait_line("second", SOON).await, "second");
    assert_eq!(process.wait_line("first", SOON).await, "first");
    process.stop();
    process.say("it");
    process.cont();
    assert_eq!(process.wait_line("got", SOON).await, "got it");
    assert!(process.lines().is_empty());
    process.terminate();
    assert!(!process.ended(SOON).await.success());
}
