//! Clients that hide nothing: HTTP/1 by hand on a socket, and HTTP/2 frame by frame.

use std::{net::SocketAddr, time::Duration};

use bytes::Bytes;
use h2::{
    Reason, RecvStream, SendStream,
    client::{ResponseFuture, SendRequest},
};
use http::{Request, Response};
use tokio::{
    io::{AsyncReadExt, AsyncWriteExt},
    net::TcpStream,
    time::timeout,
};

use super::soon;

/// An HTTP/1 connection. Every wait ends in a panic rather than in a hang.
#[derive(Debug)]
pub(crate) struct Raw {
    io: TcpStream,
    /// Read and not yet taken.
    buffer: Vec<u8>,
    closed: bool,
}

/// A response as it came over the wire.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub(crate) struct Answer {
    pub(crate) status: u16,
    /// Status line and header fields.
    pub(crate) head: String,
    /// Without the framing of chunks.
    pub(crate) body: Vec<u8>,
    /// Whether the body came to its end as its framing says.
    pub(crate) complete: bool,
}

impl Answer {
    pub(crate) fn header(&self, name: &str) -> Option<&str> {
        self.head.lines().skip(1).find_map(|line| {
            let (field, value) = line.split_once(':')?;
            field.eq_ignore_ascii_case(name).then(|| value.trim())
        })
    }

    pub(crate) fn text(&self) -> &str {
        std::str::from_utf8(&self.body).unwrap()
    }
}

impl Raw {
    pub(crate) async fn connect(addr: SocketAddr) -> Self {
        let io = TcpStream::connect(addr).await.unwrap();
        io.set_nodelay(true).unwrap();
        Self { io, buffer: Vec::new(), closed: false }
    }

    /// A connection on which a GET has just been sent.
    pub(crate) async fn getting(addr: SocketAddr, path: &str) -> Self {
        let mut raw = Self::connect(addr).await;
        raw.get(path, "").await;
        raw
    }

    /// Sends a GET; `fields` are further header fields, each with its line end.
    pub(crate) async fn get(&mut self, path: &str, fields: &str) {
        self.send(format!("GET {path} HTTP/1.1\r\nhost: test\r\n{fields}\r\n")).await;
    }

    pub(crate) async fn send(&mut self, bytes: impl AsRef<[u8]>) {
        soon("the request is written", self.io.write_all(bytes.as_ref())).await.unwrap();
    }

    /// Shuts the write side and leaves the read side open.
    pub(crate) async fn half_close(&mut self) {
        self.io.shutdown().await.unwrap();
    }

    /// Whether bytes or the end of the connection come within `time`.
    pub(crate) async fn hears_within(&mut self, time: Duration) -> bool {
        !self.buffer.is_empty() || timeout(time, self.read()).await.is_ok()
    }

    /// Reads until `pattern`, which is taken as well. `None`: the connection ended before.
    pub(crate) async fn until(&mut self, pattern: &str) -> Option<Vec<u8>> {
        loop {
            let found = self.buffer.windows(pattern.len()).position(|window| window == pattern.as_bytes());
            if let Some(at) = found {
                return Some(self.buffer.drain(..at + pattern.len()).collect());
            }
            if !soon(pattern, self.read()).await {
                return None;
            }
        }
    }

    /// The next head, interim or final, with nothing of a body. `None`: the connection ended before.
    pub(crate) async fn try_head(&mut self) -> Option<Answer> {
        let head = String::from_utf8(self.until("\r\n\r\n").await?).unwrap();
        let status = head.split(' ').nth(1).unwrap().parse().unwrap();
        Some(Answer { status, head, body: Vec::new(), complete: true })
    }

    pub(crate) async fn head(&mut self) -> Answer {
        self.try_head().await.expect("a response before the connection ended")
    }

    /// The next response with its body, if one came before the connection ended.
    pub(crate) async fn try_answer(&mut self) -> Option<Answer> {
        let mut answer = self.try_head().await?;
        if answer.header("transfer-encoding") == Some("chunked") {
            answer.complete = self.chunks(&mut answer.body).await;
        } else if let Some(length) = answer.header("content-length") {
            let length = length.parse().unwrap();
            while self.buffer.len() < length && soon("a body of known length", self.read()).await {}
            answer.complete = self.buffer.len() >= length;
            answer.body = self.buffer.drain(..length.min(self.buffer.len())).collect();
        } else {
            answer.body = self.rest().await;
        }
        Some(answer)
    }

    pub(crate) async fn answer(&mut self) -> Answer {
        self.try_answer().await.expect("a response before the connection ended")
    }

    /// Everything until the connection ends.
    pub(crate) async fn rest(&mut self) -> Vec<u8> {
        while soon("the connection ends", self.read()).await {}
        std::mem::take(&mut self.buffer)
    }

    pub(crate) async fn take(&mut self, bytes: usize) -> Vec<u8> {
        while self.buffer.len() < bytes {
            assert!(soon("bytes", self.read()).await, "the connection ended {bytes} bytes too early");
        }
        self.buffer.drain(..bytes).collect()
    }

    async fn chunks(&mut self, body: &mut Vec<u8>) -> bool {
        loop {
            let Some(line) = self.until("\r\n").await else { return false };
            let line = String::from_utf8(line).unwrap();
            let length = usize::from_str_radix(line.trim_end(), 16).unwrap();
            if length == 0 {
                return self.until("\r\n").await.is_some();
            }
            while self.buffer.len() < length + 2 {
                if !soon("a chunk", self.read()).await {
                    return false;
                }
            }
            body.extend(self.buffer.drain(..length));
            self.buffer.drain(..2);
        }
    }

    /// `false`: the connection is at its end.
    async fn read(&mut self) -> bool {
        // A reset is an end like any other here.
        if !self.closed && self.io.read_buf(&mut self.buffer).await.unwrap_or(0) == 0 {
            self.closed = true;
        }
        !self.closed
    }
}

/// All bytes that answer `request` until the server closes, without the value of the date, which differs by chance.
pub(crate) async fn raw_answer(addr: SocketAddr, request: &str) -> String {
    let mut raw = Raw::connect(addr).await;
    raw.send(request).await;
    let bytes = String::from_utf8(raw.rest().await).unwrap();
    let (head, body) = bytes.split_once("\r\n\r\n").expect("a head");
    let head: Vec<_> =
        head.split("\r\n").map(|line| if line.starts_with("date:") { "date:" } else { line }).collect();
    format!("{}\r\n\r\n{body}", head.join("\r\n"))
}

/// An HTTP/2 connection, driven until this and all its streams are gone.
#[derive(Clone, Debug)]
pub(crate) struct Http2(SendRequest<Bytes>);

/// A request on its way.
#[derive(Debug)]
pub(crate) struct Http2Stream {
    response: ResponseFuture,
    sending: SendStream<Bytes>,
}

impl Http2 {
    pub(crate) async fn connect(addr: SocketAddr) -> Self {
        let io = TcpStream::connect(addr).await.unwrap();
        io.set_nodelay(true).unwrap();
        let (send, connection) = h2::client::handshake(io).await.unwrap();
        tokio::spawn(async move {
            // The end of the server's side is seen by whoever waits for a response.
            let _ = connection.await;
        });
        Self(send)
    }

    /// Sends a GET.
    pub(crate) async fn get(&self, path: &str) -> Http2Stream {
        let request = Request::get(format!("http://test{path}")).body(()).unwrap();
        let mut send = soon("room for a stream", self.0.clone().ready()).await.unwrap();
        let (response, sending) = send.send_request(request, true).unwrap();
        Http2Stream { response, sending }
    }
}

impl Http2Stream {
    pub(crate) async fn response(&mut self) -> Response<RecvStream> {
        soon("a response", &mut self.response).await.unwrap()
    }

    /// The whole response as text. `None`: the stream ended before it was complete.
    pub(crate) async fn text(self) -> Option<String> {
        let mut body = soon("a response", self.response).await.ok()?.into_body();
        let mut text = Vec::new();
        while let Some(data) = soon("data", body.data()).await {
            text.extend(data.ok()?);
        }
        Some(String::from_utf8(text).unwrap())
    }

    /// Ends it with RST_STREAM.
    pub(crate) fn reset(mut self) {
        self.sending.send_reset(Reason::CANCEL);
    }
}
