//! The servers and the proxy of the Redis tests do what those tests take for granted.

mod support;

use std::{io::ErrorKind, net::TcpStream, path::Path, process::Command, time::Duration};

use support::{
    process::Process,
    redis::{Binary, Certificates, Cluster, Kind, Options, Reply, Resp, Server, require},
};
use tokio::time::Instant;

const SOON: Duration = Duration::from_secs(10);

fn redis() -> Option<Binary> {
    require(Kind::Redis70)
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
