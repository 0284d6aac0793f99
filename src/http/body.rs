//! The response body, which the permit lives in.

use std::{
    error::Error,
    fmt,
    pin::Pin,
    task::{Context, Poll},
};

use bytes::{Buf, Bytes};
use http::{Method, Response, StatusCode};
use http_body::{Body, Frame, SizeHint};
use pin_project_lite::pin_project;

use super::holding::Holding;
use crate::{error::Revoked, metrics::Ended};

pin_project! {
    /// The body of a response that came through a queue.
    ///
    /// For a granted request it is the service's own body, frame for frame, with the same size hint, end-of-stream and
    /// trailers (promise P12), and it holds the permit until the first of its end, an error, its drop, and revocation
    /// (promise P6). The last ends it with the error [`Revoked`], so that it never looks complete.
    ///
    /// The data of the body must be made of [`Bytes`], as a rejection's is, and its error comes boxed, since it may be a
    /// revocation.
    ///
    /// The end is the stream's `None`. The end-of-stream hint alone releases nothing, since some bodies give it before
    /// their trailers; a server that goes by the hint drops the body then.
    pub struct ResponseBody<B> {
        #[pin]
        kind: Kind<B>,
    }
}

pin_project! {
    #[project = KindProj]
    #[project_replace = KindOwn]
    enum Kind<B> {
        /// The body of a granted request. The body stands before the guard, so it is dropped before the units go back.
        Granted { #[pin] inner: B, guard: BodyGuard },
        /// A body without a permit: a request that passed by, or a custom rejection.
        Bare { #[pin] inner: B },
        /// The default rejection's.
        Whole { bytes: Bytes },
        /// Revoked: the error was given and nothing follows.
        Over,
    }
}

impl<B> ResponseBody<B> {
    /// A body that holds no permit, for an implementation of [`Reject`](super::Reject).
    pub fn bare(inner: B) -> Self {
        Self { kind: Kind::Bare { inner } }
    }

    /// A body of these bytes that holds no permit, for an implementation of [`Reject`](super::Reject).
    #[must_use]
    pub fn whole(bytes: Bytes) -> Self {
        Self { kind: Kind::Whole { bytes } }
    }
}

impl<B: Body> ResponseBody<B> {
    pub(super) fn granted(response: Response<B>, holding: Holding, method: &Method) -> Response<Self> {
        let (head, inner) = response.into_parts();
        if holding.permit().is_none() {
            return Response::from_parts(head, Self::bare(inner));
        }
        let no_content = matches!(
            head.status,
            StatusCode::SWITCHING_PROTOCOLS | StatusCode::NO_CONTENT | StatusCode::NOT_MODIFIED
        );
        let tunnel = method == Method::CONNECT && head.status.is_success();
        let expected = if no_content || tunnel || method == Method::HEAD {
            Some(0)
        } else {
            let length = head.headers.get(http::header::CONTENT_LENGTH);
            let length = length.and_then(|length| length.to_str().ok()?.parse().ok());
            length.or_else(|| inner.size_hint().exact())
        };
        let guard = BodyGuard { holding, expected, delivered: 0, at_end: inner.is_end_stream() };
        Response::from_parts(head, Self { kind: Kind::Granted { inner, guard } })
    }
}

impl<B> Body for ResponseBody<B>
where
    B: Body,
    B::Data: From<Bytes>,
    B::Error: Into<Box<dyn Error + Send + Sync>>,
{
    type Data = B::Data;
    type Error = Box<dyn Error + Send + Sync>;

    fn poll_frame(
        self: Pin<&mut Self>,
        cx: &mut Context<'_>,
    ) -> Poll<Option<Result<Frame<Self::Data>, Self::Error>>> {
        let mut kind = self.project().kind;
        match kind.as_mut().project() {
            KindProj::Granted { mut inner, guard } => {
                if !guard.holding.is_revoked() {
                    let polled = inner.as_mut().poll_frame(cx);
                    match &polled {
                        Poll::Ready(Some(Ok(frame))) => guard.delivered(frame, inner.is_end_stream()),
                        Poll::Ready(Some(Err(_))) => guard.holding.end(Ended::Failed),
                        Poll::Ready(None) => guard.holding.end(Ended::Completed),
                        Poll::Pending => {}
                    }
                    if polled.is_ready() || !guard.holding.poll_revoked(cx) {
                        return polled.map_err(Into::into);
                    }
                }
                guard.holding.ends(Ended::Revoked);
                // The inner body goes before the guard, as in a drop.
                kind.project_replace(Kind::Over);
                Poll::Ready(Some(Err(Box::new(Revoked(())))))
            }
            KindProj::Bare { inner } => inner.poll_frame(cx).map_err(Into::into),
            KindProj::Whole { bytes } if !bytes.is_empty() => {
                Poll::Ready(Some(Ok(Frame::data(std::mem::take(bytes).into()))))
            }
            KindProj::Whole { .. } | KindProj::Over => Poll::Ready(None),
        }
    }

    fn is_end_stream(&self) -> bool {
        match &self.kind {
            Kind::Granted { inner, .. } | Kind::Bare { inner } => inner.is_end_stream(),
            Kind::Whole { bytes } => bytes.is_empty(),
            // An end by error is no end of stream.
            Kind::Over => false,
        }
    }

    fn size_hint(&self) -> SizeHint {
        match &self.kind {
            Kind::Granted { inner, .. } | Kind::Bare { inner } => inner.size_hint(),
            Kind::Whole { bytes } => SizeHint::with_exact(bytes.len() as u64),
            Kind::Over => SizeHint::new(),
        }
    }
}

impl<B> fmt::Debug for ResponseBody<B> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let kind = match &self.kind {
            Kind::Granted { .. } => "granted",
            Kind::Bare { .. } => "bare",
            Kind::Whole { .. } => "whole",
            Kind::Over => "revoked",
        };
        f.debug_struct("ResponseBody").field("kind", &kind).finish_non_exhaustive()
    }
}

/// Releases the permit once, and knows a body that was delivered from one that was aborted.
struct BodyGuard {
    holding: Holding,
    /// The length the server will write, if it is known; it polls no further than that.
    expected: Option<u64>,
    delivered: u64,
    at_end: bool,
}

impl BodyGuard {
    fn delivered<D: Buf>(&mut self, frame: &Frame<D>, at_end: bool) {
        if let Some(data) = frame.data_ref() {
            self.delivered += data.remaining() as u64;
        }
        self.at_end = at_end || frame.is_trailers();
    }
}

impl Drop for BodyGuard {
    fn drop(&mut self) {
        // Servers drop a body without a last poll when the length is written, or nothing may be: that is no abort.
        if self.at_end || self.expected.is_some_and(|length| self.delivered >= length) {
            self.holding.completes();
        }
    }
}
