//! A real server for tests of what is private here.

use redis::{AsyncConnectionConfig, aio::MultiplexedConnection, cmd};

use self::support::{Kind, Server, require};

#[path = "../../../tests/support/process.rs"]
#[allow(
    dead_code,
    unreachable_pub,
    reason = "shared with the tests outside of the crate, which use more of it"
)]
mod process;
#[path = "../../../tests/support/redis/mod.rs"]
#[allow(dead_code, unused_imports, unreachable_pub, reason = "as above")]
mod support;

/// A server and a connection to it, or nothing where it is not installed and need not be.
pub(super) async fn server() -> Option<(Server, MultiplexedConnection)> {
    let server = Server::start(&require(Kind::Redis70)?).await;
    let client = redis::Client::open(server.url()).expect("a URL");
    let config = AsyncConnectionConfig::new().set_response_timeout(None);
    let connection = client.get_multiplexed_async_connection_with_config(&config).await.expect("it listens");
    Some((server, connection))
}

pub(super) async fn load(connection: &mut MultiplexedConnection, script: &str) -> String {
    cmd("SCRIPT").arg("LOAD").arg(script).query_async(connection).await.expect("the script compiles")
}
