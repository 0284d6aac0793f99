//! The answer to a request that got no permit.

use std::{fmt, time::Duration};

use bytes::Bytes;
use http::{HeaderMap, HeaderValue, Response, StatusCode, Version, header};

use crate::{
    error::{AcquireError, Cause, Revoked},
    queue::Shared,
};

/// Why a request was rejected, and when it is worth another try. The request was never started.
///
/// It stands in the extensions of the rejecting response, and is what a custom answer is made from.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Rejection {
    error: AcquireError,
    retry_after: u64,
    grpc: bool,
    http1: bool,
    /// The service had begun, so this is no rejection in truth: another try may do the work twice.
    begun: bool,
}

impl Rejection {
    pub(super) fn new(error: AcquireError, shared: &Shared, version: Version, headers: &HeaderMap) -> Self {
        let (least, most) = shared.config.retry_after;
        let estimate = error.estimate().unwrap_or(shared.config.max_wait / 2);
        // Spread over half as much again, so that those who were rejected together do not come back together.
        let spread = estimate.as_secs_f64() * (1.0 + shared.jitter() / 2.0);
        let seconds = Duration::try_from_secs_f64(spread).unwrap_or(most).clamp(least, most);
        let whole = seconds.as_secs() + u64::from(seconds.subsec_nanos() > 0);
        Self {
            error,
            retry_after: whole,
            grpc: is_grpc(headers),
            http1: version < Version::HTTP_2,
            begun: false,
        }
    }

    /// For a granted request whose service was cut off.
    pub(super) fn revoked(error: AcquireError, version: Version, grpc: bool) -> Self {
        Self { error, retry_after: 0, grpc, http1: version < Version::HTTP_2, begun: true }
    }

    /// Why.
    #[must_use]
    pub fn cause(&self) -> Cause {
        self.error.cause()
    }

    /// How long the request stood in line; zero where it was refused at once.
    #[must_use]
    pub fn waited(&self) -> Duration {
        self.error.waited()
    }

    /// The place in line at the end: see [`AcquireError::position`].
    #[must_use]
    pub fn position(&self) -> Option<usize> {
        self.error.position()
    }

    /// How long the queue would still take to reach that place: see [`AcquireError::estimate`].
    #[must_use]
    pub fn estimate(&self) -> Option<Duration> {
        self.error.estimate()
    }

    /// When another try is worth it, in whole seconds: the estimate (half of `max_wait` while there is none) with up to half of it added by
    /// chance, within the bounds of [`retry_after`](crate::FairQueueConfigBuilder::retry_after).
    #[must_use]
    pub fn retry_after(&self) -> Duration {
        Duration::from_secs(self.retry_after)
    }

    /// The status of [`response`](Self::response), but for gRPC, where that is always 200: 429 where the request's flow is at a
    /// bound of its own, 403 where the classifier refused it, 422 where it asks for more than may ever be in flight, 503 otherwise.
    #[must_use]
    pub fn status(&self) -> StatusCode {
        match self.cause() {
            Cause::FlowFull => StatusCode::TOO_MANY_REQUESTS,
            Cause::Refused => StatusCode::FORBIDDEN,
            Cause::TooWide => StatusCode::UNPROCESSABLE_ENTITY,
            Cause::TimedOut
            | Cause::QueueFull
            | Cause::ShuttingDown
            | Cause::Unavailable
            | Cause::WouldWait => StatusCode::SERVICE_UNAVAILABLE,
        }
    }

    /// Whether another try can end otherwise.
    fn can_retry(&self) -> bool {
        !self.begun && !matches!(self.cause(), Cause::Refused | Cause::TooWide)
    }

    /// The default answer, with the rejection in its extensions.
    ///
    /// An RFC 9457 problem (`application/problem+json`) with the members `type` (`about:blank`), `title`, `status`, `detail` and `cause`
    /// ([`Cause::as_str`]), and `retry_after` in seconds; `Retry-After` in whole seconds (not where another try cannot
    /// help) and `Cache-Control: no-store`. While shutting down, HTTP/1 is asked to close the connection.
    ///
    /// A request whose content type is `application/grpc` gets a gRPC status instead, in a response of headers alone: 8
    /// (`RESOURCE_EXHAUSTED`) where HTTP gets 429, 7 (`PERMISSION_DENIED`) for 403, 9
    /// (`FAILED_PRECONDITION`) for an ask that is too wide, 14 (`UNAVAILABLE`) for any other.
    #[must_use]
    pub fn response<B: From<Bytes>>(&self) -> Response<B> {
        let mut response = if self.grpc { self.grpc_response() } else { self.problem_response() };
        let headers = response.headers_mut();
        headers.insert(header::CACHE_CONTROL, HeaderValue::from_static("no-store"));
        if self.can_retry() {
            headers.insert(header::RETRY_AFTER, self.retry_after.into());
        }
        // HTTP/2 has no such field; its servers say GOAWAY by themselves.
        if self.http1 && self.cause() == Cause::ShuttingDown {
            headers.insert(header::CONNECTION, HeaderValue::from_static("close"));
        }
        if self.begun {
            response.extensions_mut().insert(Revoked(()));
        } else {
            response.extensions_mut().insert(self.clone());
        }
        response.map(B::from)
    }

    fn problem_response(&self) -> Response<Bytes> {
        let status = self.status();
        let retry =
            if self.can_retry() { format!(r#","retry_after":{}"#, self.retry_after) } else { String::new() };
        // Nothing in here needs escaping: words of this crate and numbers.
        let body = format!(
            r#"{{"type":"about:blank","title":"{}","status":{},"detail":"{}","cause":"{}"{retry}}}"#,
            status.canonical_reason().unwrap_or_default(),
            status.as_u16(),
            self.cause(),
            self.cause().as_str(),
        );
        let mut response = Response::new(Bytes::from(body));
        *response.status_mut() = status;
        let content_type = HeaderValue::from_static("application/problem+json");
        response.headers_mut().insert(header::CONTENT_TYPE, content_type);
        response
    }

    fn grpc_response(&self) -> Response<Bytes> {
        let code = match self.status() {
            StatusCode::UNPROCESSABLE_ENTITY => "9",
            StatusCode::TOO_MANY_REQUESTS => "8",
            StatusCode::FORBIDDEN => "7",
            _ => "14",
        };
        let mut response = Response::new(Bytes::new());
        let headers = response.headers_mut();
        headers.insert(header::CONTENT_TYPE, HeaderValue::from_static("application/grpc"));
        headers.insert("grpc-status", HeaderValue::from_static(code));
        if let Ok(message) = HeaderValue::from_str(&self.cause().to_string()) {
            headers.insert("grpc-message", message);
        }
        response
    }
}

/// Whether a request with these headers is a gRPC call.
pub(super) fn is_grpc(headers: &HeaderMap) -> bool {
    let content_type = headers.get(header::CONTENT_TYPE).map_or(&b""[..], HeaderValue::as_bytes);
    let prefix = b"application/grpc";
    content_type.len() >= prefix.len()
        && content_type[..prefix.len()].eq_ignore_ascii_case(prefix)
        && matches!(content_type.get(prefix.len()), None | Some(b'+' | b';'))
}

impl fmt::Display for Rejection {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        self.error.fmt(f)
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::{FairQueue, FairQueueConfig};

    fn rejection(cause: Cause, estimate: Option<Duration>, content_type: &'static str) -> Rejection {
        let queue = FairQueue::new(FairQueueConfig::builder("q").capacity(1).build().unwrap());
        let mut headers = HeaderMap::new();
        headers.insert(header::CONTENT_TYPE, HeaderValue::from_static(content_type));
        let error = AcquireError::new(cause, Duration::ZERO).with_outlook(Some(1), estimate);
        Rejection::new(error, queue.shared(), Version::HTTP_11, &headers)
    }

    #[test]
    fn every_cause_has_a_problem_of_its_own() {
        for cause in Cause::ALL {
            let response = rejection(cause, None, "text/plain").response::<Bytes>();
            let body: serde_json::Value = serde_json::from_slice(response.body()).unwrap();
            assert_eq!(body["cause"], cause.as_str());
            assert_eq!(body["status"], response.status().as_u16());
            assert_eq!(response.headers()["content-type"], "application/problem+json");
            assert_eq!(response.headers()["cache-control"], "no-store");
            let retry =
                response.headers().get("retry-after").map(|value| value.to_str().unwrap().parse().unwrap());
            assert_eq!(body.get("retry_after").and_then(serde_json::Value::as_u64), retry);
            assert_eq!(retry.is_none(), matches!(cause, Cause::Refused | Cause::TooWide));
            assert!(response.extensions().get::<Rejection>().is_some());
        }
    }

    #[test]
    fn retry_after_is_whole_seconds_within_its_bounds_and_spread() {
        let seconds = |estimate| rejection(Cause::TimedOut, estimate, "").retry_after().as_secs();
        assert_eq!(seconds(Some(Duration::ZERO)), 1);
        assert_eq!(seconds(Some(Duration::MAX)), 60);
        assert!((10..=15).contains(&seconds(None)), "half of max_wait and up to half of that");
        let spread: std::collections::HashSet<_> =
            (0..100).map(|_| seconds(Some(Duration::from_secs(20)))).collect();
        assert!(spread.len() > 3, "{spread:?}");
        assert!(spread.iter().all(|s| (20..=30).contains(s)), "{spread:?}");
    }

    #[test]
    fn grpc_requests_get_a_grpc_status() {
        for content_type in ["application/grpc", "application/grpc+proto", "Application/gRPC; x=y"] {
            let response = rejection(Cause::TimedOut, None, content_type).response::<Bytes>();
            assert_eq!(response.status(), StatusCode::OK);
            assert_eq!(response.headers()["grpc-status"], "14");
            assert!(response.body().is_empty());
        }
        assert_eq!(
            rejection(Cause::FlowFull, None, "application/grpc").response::<Bytes>().headers()["grpc-status"],
            "8"
        );
        let web = rejection(Cause::TimedOut, None, "application/grpc-web").response::<Bytes>();
        assert_eq!(web.status(), StatusCode::SERVICE_UNAVAILABLE);
    }
}
