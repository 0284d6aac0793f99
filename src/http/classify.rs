//! What a request is to the queue.

use std::fmt;

use http::{Extensions, HeaderMap, Method, Request, Uri, Version};

use crate::schedule::Ask;

/// What becomes of a request.
#[derive(Clone, Debug, PartialEq, Eq)]
#[non_exhaustive]
pub enum Class {
    /// It passes: no permit, no look at the queue, no deadline. For health checks and metrics.
    Bypass,
    /// It waits in line with this ask.
    Queue(Ask),
    /// It is rejected at once, with [`Cause::Refused`](crate::Cause::Refused).
    Refuse,
}

impl From<Ask> for Class {
    fn from(ask: Ask) -> Self {
        Self::Queue(ask)
    }
}

/// Decides what a request is to the queue. Closures from `&RequestHead` to [`Class`] are classifiers.
///
/// Called once for each request, before anything is taken, so one that panics harms its own request alone.
/// What it finds in a request is the client's word: decide what a client may say of its own priority or cost.
pub trait Classify {
    /// The class of the request with this head.
    fn classify(&self, head: &RequestHead<'_>) -> Class;
}

impl<F> Classify for F
where
    F: Fn(&RequestHead<'_>) -> Class,
{
    fn classify(&self, head: &RequestHead<'_>) -> Class {
        self(head)
    }
}

/// The default classifier: every request waits in line with [`Ask::new`].
#[derive(Clone, Copy, Debug, Default)]
pub struct QueueAll(());

impl Classify for QueueAll {
    fn classify(&self, _: &RequestHead<'_>) -> Class {
        Class::Queue(Ask::new())
    }
}

/// A request without its body.
#[derive(Clone, Copy)]
pub struct RequestHead<'a> {
    method: &'a Method,
    uri: &'a Uri,
    version: Version,
    headers: &'a HeaderMap,
    extensions: &'a Extensions,
}

impl<'a> RequestHead<'a> {
    pub(super) fn of<B>(request: &'a Request<B>) -> Self {
        Self {
            method: request.method(),
            uri: request.uri(),
            version: request.version(),
            headers: request.headers(),
            extensions: request.extensions(),
        }
    }

    /// The method.
    #[must_use]
    pub fn method(&self) -> &'a Method {
        self.method
    }

    /// The URI. Behind a nested router it is what the router left of it.
    #[must_use]
    pub fn uri(&self) -> &'a Uri {
        self.uri
    }

    /// The HTTP version.
    #[must_use]
    pub fn version(&self) -> Version {
        self.version
    }

    /// The header fields.
    #[must_use]
    pub fn headers(&self) -> &'a HeaderMap {
        self.headers
    }

    /// The extensions, as the layers and routers outside have filled them.
    #[must_use]
    pub fn extensions(&self) -> &'a Extensions {
        self.extensions
    }

    /// The first value of the header field `name`, if it is there and visible ASCII. To make a flow of any value, its bytes are
    /// in [`headers`](Self::headers).
    #[must_use]
    pub fn header(&self, name: &str) -> Option<&'a str> {
        self.headers.get(name)?.to_str().ok()
    }
}

impl fmt::Debug for RequestHead<'_> {
    // Neither the query nor the headers: both carry secrets.
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("RequestHead")
            .field("method", &self.method)
            .field("path", &self.uri.path())
            .field("version", &self.version)
            .finish_non_exhaustive()
    }
}
