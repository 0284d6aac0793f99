//! Pins the auto traits of the public types: losing one breaks users.

use bytes::Bytes;
use http::Request;
use http_body_util::Full;
use tower_fair_queue::{
    Acquire, AcquireError, Ask, Class, ConfigError, Drained, FairQueue, FairQueueConfig, FairQueueLayer,
    FairQueueService, Flow, Permit, Rejection, ResponseBody, ResponseFuture, Revoked, Stats,
};

fn everywhere<T: Send + Sync + 'static>() {}
fn shareable<T: Clone + Send + Sync + 'static>() {}
fn error<T: std::error::Error + Send + Sync + Unpin + 'static>() {}

type Inner =
    tower::util::BoxCloneSyncService<Request<Full<Bytes>>, http::Response<Full<Bytes>>, std::io::Error>;

#[test]
fn types_are_send_and_sync() {
    shareable::<FairQueue>();
    shareable::<FairQueueConfig>();
    shareable::<FairQueueLayer>();
    shareable::<FairQueueService<Inner, tower_fair_queue::QueueAll, tower_fair_queue::DefaultReject>>();
    shareable::<Ask>();
    shareable::<Class>();
    shareable::<Flow>();
    shareable::<Rejection>();
    shareable::<Stats>();
    everywhere::<Acquire>();
    everywhere::<Drained>();
    everywhere::<Permit>();
    everywhere::<ResponseBody<Full<Bytes>>>();
    error::<AcquireError>();
    error::<ConfigError>();
    error::<Revoked>();
}

#[test]
fn the_response_future_is_send_where_the_service_s_is() {
    fn send<T: Send>() {}
    send::<ResponseFuture<Inner, tower_fair_queue::DefaultReject, Full<Bytes>, Full<Bytes>>>();
}
