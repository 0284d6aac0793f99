//! The layer on plain hyper, HTTP/1 and HTTP/2 on one port: two requests at a time, each two seconds long.
//!
//! ```text
//! cargo run --example hyper_basic
//! for i in 1 2 3 4 5; do curl -sw ' after %{time_total} s\n' http://127.0.0.1:3001/ & done; wait
//! curl --http2-prior-knowledge http://127.0.0.1:3001/
//! ```
//!
//! Of the five, two answer after two seconds, two after four and one after six. `--port` changes the port; 0 is any free one.

#![expect(clippy::print_stdout, reason = "the address to open is for whoever started it")]

use std::{convert::Infallible, error::Error, net::Ipv4Addr, time::Duration};

use bytes::Bytes;
use http::{Request, Response};
use http_body_util::Full;
use hyper::body::Incoming;
use hyper_util::{
    rt::{TokioExecutor, TokioIo},
    server::conn::auto::Builder,
    service::TowerToHyperService,
};
use tokio::net::TcpListener;
use tower::{ServiceBuilder, service_fn};
use tower_fair_queue::{FairQueueConfig, FairQueueLayer};

async fn work(_: Request<Incoming>) -> Result<Response<Full<Bytes>>, Infallible> {
    tokio::time::sleep(Duration::from_secs(2)).await;
    Ok(Response::new(Full::from("done")))
}

fn port(args: &[String]) -> Result<u16, String> {
    match args {
        [] => Ok(3001),
        [flag, port] if flag == "--port" => {
            port.parse().map_err(|_| format!("--port: takes a whole number from 0 to 65535, not {port:?}"))
        }
        _ => Err("the one flag there is, is --port N".to_owned()),
    }
}

#[tokio::main]
async fn main() -> Result<(), Box<dyn Error>> {
    let args: Vec<_> = std::env::args().skip(1).collect();
    let port = port(&args).unwrap_or_else(|error| {
        eprintln!("{error}");
        std::process::exit(2);
    });
    let config = FairQueueConfig::builder("work").capacity(2).max_wait(Duration::from_secs(20)).build()?;
    let service = ServiceBuilder::new().layer(FairQueueLayer::new(config)).service(service_fn(work));

    let listener = TcpListener::bind((Ipv4Addr::LOCALHOST, port)).await?;
    println!("open http://{}/", listener.local_addr()?);
    loop {
        let (stream, _) = match listener.accept().await {
            Ok(accepted) => accepted,
            Err(error) => {
                // Out of file descriptors, most likely: some will come back.
                eprintln!("accept: {error}");
                tokio::time::sleep(Duration::from_millis(100)).await;
                continue;
            }
        };
        let service = TowerToHyperService::new(service.clone());
        tokio::spawn(async move {
            let builder = Builder::new(TokioExecutor::new());
            // A client that breaks off harms its own connection alone.
            if let Err(error) = builder.serve_connection_with_upgrades(TokioIo::new(stream), service).await {
                eprintln!("connection: {error}");
            }
        });
    }
}
