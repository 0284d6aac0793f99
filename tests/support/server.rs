//! Servers on a free port of the loopback address.

use std::{error::Error, net::SocketAddr};

use axum::Router;
use bytes::Bytes;
use http::{Request, Response};
use http_body::Body;
use hyper::body::Incoming;
use hyper_util::{
    rt::{TokioExecutor, TokioIo},
    server::conn::auto,
    service::TowerToHyperService,
};
use tokio::{net::TcpListener, task::JoinHandle};
use tower::Service;

/// A server that accepts until it is dropped.
#[derive(Debug)]
pub(crate) struct Server {
    pub(crate) addr: SocketAddr,
    task: JoinHandle<()>,
}

impl Drop for Server {
    fn drop(&mut self) {
        self.task.abort();
    }
}

/// Serves `app` by axum's own server.
pub(crate) async fn serve(app: Router) -> Server {
    let listener = TcpListener::bind("127.0.0.1:0").await.unwrap();
    let addr = listener.local_addr().unwrap();
    let task = tokio::spawn(async move { axum::serve(listener, app).await.unwrap() });
    Server { addr, task }
}

/// Serves `service` by plain hyper, with the options of `builder`.
pub(crate) async fn serve_with<S, B>(builder: auto::Builder<TokioExecutor>, service: S) -> Server
where
    S: Service<Request<Incoming>, Response = Response<B>> + Clone + Send + 'static,
    S::Future: Send + 'static,
    S::Error: Into<Box<dyn Error + Send + Sync>> + 'static,
    B: Body<Data = Bytes> + Send + 'static,
    B::Error: Into<Box<dyn Error + Send + Sync>>,
{
    let listener = TcpListener::bind("127.0.0.1:0").await.unwrap();
    let addr = listener.local_addr().unwrap();
    let task = tokio::spawn(async move {
        loop {
            let (io, _) = listener.accept().await.unwrap();
            let builder = builder.clone();
            let service = TowerToHyperService::new(service.clone());
            tokio::spawn(async move {
                // How a connection ends is the client's view to judge.
                let _ = builder.serve_connection_with_upgrades(TokioIo::new(io), service).await;
            });
        }
    });
    Server { addr, task }
}
