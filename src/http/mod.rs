//! What HTTP sees of a queue: the layer, its service, the response future and the response body.

mod body;
mod classify;
mod future;
mod holding;
mod layer;
mod mark;
mod reject;
mod rejection;
mod service;

pub use self::{
    body::ResponseBody,
    classify::{Class, Classify, QueueAll, RequestHead},
    future::ResponseFuture,
    layer::FairQueueLayer,
    reject::{DefaultReject, Reject, RejectAsyncFn, RejectFn, RejectFuture},
    rejection::Rejection,
    service::FairQueueService,
};
