//! Serves the embedded runtime as CRI v1 on a Unix socket, for `crictl`, `critest` and external
//! kubelets.
//!
//! gRPC framing is implemented here: a length prefix before each message, and the status in trailers.
//! An idle socket costs nothing. The calls are in [`methods`].

mod methods;

use std::collections::VecDeque;
use std::convert::Infallible;
use std::io;
use std::os::fd::AsRawFd as _;
use std::os::unix::fs::PermissionsExt as _;
use std::path::Path;
use std::pin::Pin;
use std::sync::Arc;
use std::task::{Context, Poll};
use std::time::Duration;

use bytes::{Buf as _, Bytes};
use http::{HeaderMap, HeaderValue, Request, Response, header};
use http_body_util::{BodyExt as _, Limited};
use hyper::body::{Body, Frame, Incoming};
use hyper_util::rt::{TokioExecutor, TokioIo};
use rustix::fs::{Mode, OFlags};
use tokio::net::{UnixListener, UnixStream};
use tokio::sync::mpsc;

use super::Embedded;
use crate::{Error, ErrorCode};

/// The limit of other runtimes.
const MAX_MESSAGE_BYTES: usize = 16 << 20;
/// Length of a gRPC frame header: compression flag and message length.
const FRAME_HEADER_BYTES: usize = 5;
/// Messages that a response stream buffers.
const STREAM_BUFFER_MESSAGES: usize = 16;
const ACCEPT_RETRY_INTERVAL: Duration = Duration::from_millis(50);

/// Binds the CRI socket, which only root may use. A socket left by an earlier run is replaced.
pub fn listen(path: &Path) -> io::Result<UnixListener> {
    match std::fs::remove_file(path) {
        Err(error) if error.kind() != io::ErrorKind::NotFound => return Err(error),
        _ => {}
    }
    let (Some(directory), Some(name)) = (path.parent(), path.file_name()) else {
        return Err(io::ErrorKind::InvalidInput.into());
    };
    // A socket path is limited to 108 bytes. The path through /proc/self/fd is short however long the
    // directory is.
    let directory_fd =
        rustix::fs::open(directory, OFlags::PATH | OFlags::DIRECTORY | OFlags::CLOEXEC, Mode::empty())?;
    let listener =
        UnixListener::bind(Path::new(&format!("/proc/self/fd/{}", directory_fd.as_raw_fd())).join(name))?;
    std::fs::set_permissions(path, std::fs::Permissions::from_mode(0o600))?;
    Ok(listener)
}

/// Serves CRI until the future is dropped.
pub async fn serve(runtime: Embedded, listener: UnixListener) {
    let call = move |path: String, message: Bytes| -> ReplyFuture {
        let runtime = runtime.clone();
        Box::pin(async move { methods::call(runtime, &path, &message).await })
    };
    serve_all(listener, Arc::new(call)).await;
}

/// Serves another gRPC API whose handler does not block. `answer` gets the path of the method and the
/// message.
pub async fn serve_with(
    listener: UnixListener,
    answer: impl Fn(&str, &[u8]) -> Result<GrpcReply, String> + Send + Sync + 'static,
) {
    let call = move |path: String, message: Bytes| -> ReplyFuture {
        let answer = answer(&path, &message).map_err(|message| GrpcStatus { code: UNKNOWN, message });
        Box::pin(std::future::ready(answer))
    };
    serve_all(listener, Arc::new(call)).await;
}

type ReplyFuture = Pin<Box<dyn Future<Output = Result<GrpcReply, GrpcStatus>> + Send>>;
type Handler = Arc<dyn Fn(String, Bytes) -> ReplyFuture + Send + Sync>;

async fn serve_all(listener: UnixListener, methods: Handler) {
    loop {
        match listener.accept().await {
            Ok((stream, _)) => drop(tokio::spawn(connection(methods.clone(), stream))),
            // Out of file descriptors; retry after a pause.
            Err(_) => tokio::time::sleep(ACCEPT_RETRY_INTERVAL).await,
        }
    }
}

async fn connection(methods: Handler, stream: UnixStream) {
    let service = hyper::service::service_fn(move |request: Request<Incoming>| {
        let methods = methods.clone();
        async move { Ok::<_, Infallible>(handle_request(methods, request).await) }
    });
    // Ends with an error if the client just disconnects.
    let _ = hyper::server::conn::http2::Builder::new(TokioExecutor::new())
        .serve_connection(TokioIo::new(stream), service)
        .await;
}

async fn handle_request(methods: Handler, request: Request<Incoming>) -> Response<GrpcBody> {
    let path = request.uri().path().to_owned();
    let body = match Limited::new(request.into_body(), MAX_MESSAGE_BYTES).collect().await {
        Ok(body) => body.to_bytes(),
        Err(error) => return error_response(&GrpcStatus::invalid(error.to_string())),
    };
    let Some(message) = decode_frame(&body) else {
        return error_response(&GrpcStatus::invalid("request must be a single uncompressed message"));
    };
    let message = Bytes::copy_from_slice(message);
    // A disconnect cancels only calls where that is safe. All others run to completion in a task, so
    // that no half-created pod is left.
    let may_end = path.ends_with("/ExecSync") || path.ends_with("/PullImage");
    let reply = methods(path, message);
    let done = match may_end {
        true => reply.await,
        false => match tokio::spawn(reply).await {
            Ok(done) => done,
            Err(error) => Err(GrpcStatus { code: INTERNAL, message: error.to_string() }),
        },
    };
    match done {
        Ok(GrpcReply::One(message)) => {
            let frames =
                VecDeque::from([Frame::data(encode_frame(&message)), Frame::trailers(trailers(0, ""))]);
            Response::builder()
                .header(header::CONTENT_TYPE, "application/grpc")
                .body(GrpcBody { frames, more: None })
                .unwrap_or_default()
        }
        Ok(GrpcReply::Many(more)) => {
            let answer = GrpcBody { frames: VecDeque::new(), more: Some(more) };
            Response::builder()
                .header(header::CONTENT_TYPE, "application/grpc")
                .body(answer)
                .unwrap_or_default()
        }
        Err(status) => error_response(&status),
    }
}

/// The result of a call.
pub enum GrpcReply {
    /// A single message.
    One(Vec<u8>),
    /// A stream of messages, until the sender is dropped.
    Many(mpsc::Receiver<Vec<u8>>),
}

const UNKNOWN: u8 = 2;
const INVALID_ARGUMENT: u8 = 3;
const DEADLINE_EXCEEDED: u8 = 4;
const NOT_FOUND: u8 = 5;
const UNIMPLEMENTED: u8 = 12;
const INTERNAL: u8 = 13;
const UNAVAILABLE: u8 = 14;

/// A gRPC status.
#[derive(Debug)]
struct GrpcStatus {
    code: u8,
    message: String,
}

impl GrpcStatus {
    fn invalid(message: impl Into<String>) -> GrpcStatus {
        GrpcStatus { code: INVALID_ARGUMENT, message: message.into() }
    }
}

impl From<Error> for GrpcStatus {
    fn from(error: Error) -> GrpcStatus {
        let code = match &error {
            Error::Rejected { code: ErrorCode::NotFound, .. } => NOT_FOUND,
            Error::Rejected { code: ErrorCode::Timeout, .. } => DEADLINE_EXCEEDED,
            Error::Rejected { code: ErrorCode::Unimplemented, .. } => UNIMPLEMENTED,
            Error::Rejected { code: ErrorCode::Other, .. } => UNKNOWN,
            Error::Unreachable { .. } => UNAVAILABLE,
        };
        GrpcStatus { code, message: error.message() }
    }
}

/// An error response, which consists of trailers only.
fn error_response(status: &GrpcStatus) -> Response<GrpcBody> {
    let mut response = Response::new(GrpcBody::default());
    *response.headers_mut() = trailers(status.code, &status.message);
    response.headers_mut().insert(header::CONTENT_TYPE, HeaderValue::from_static("application/grpc"));
    response
}

fn trailers(code: u8, message: &str) -> HeaderMap {
    let mut trailers = HeaderMap::new();
    trailers.insert("grpc-status", HeaderValue::from(u16::from(code)));
    if !message.is_empty()
        && let Ok(message) = HeaderValue::from_str(&percent_encode(message))
    {
        trailers.insert("grpc-message", message);
    }
    trailers
}

/// Percent-encodes a `grpc-message`, as the gRPC specification requires.
fn percent_encode(text: &str) -> String {
    let plain = |byte: u8| (0x20..=0x7e).contains(&byte) && byte != b'%';
    text.bytes()
        .map(|byte| if plain(byte) { char::from(byte).to_string() } else { format!("%{byte:02X}") })
        .collect()
}

fn encode_frame(message: &[u8]) -> Bytes {
    let length = u32::try_from(message.len()).unwrap_or(u32::MAX);
    [&[0][..], &length.to_be_bytes(), message].concat().into()
}

/// The message of a unary request; `None` if the body is not exactly one uncompressed message.
fn decode_frame(body: &Bytes) -> Option<&[u8]> {
    let mut head = body.get(..FRAME_HEADER_BYTES)?;
    let (compressed, length) = (head.get_u8(), head.get_u32());
    let message = body.get(FRAME_HEADER_BYTES..)?;
    (compressed == 0 && usize::try_from(length).ok() == Some(message.len())).then_some(message)
}

/// A response body: messages, then the trailers.
#[derive(Default)]
struct GrpcBody {
    frames: VecDeque<Frame<Bytes>>,
    more: Option<mpsc::Receiver<Vec<u8>>>,
}

impl Body for GrpcBody {
    type Data = Bytes;
    type Error = Infallible;

    fn poll_frame(
        mut self: Pin<&mut Self>,
        context: &mut Context<'_>,
    ) -> Poll<Option<Result<Frame<Bytes>, Infallible>>> {
        if let Some(frame) = self.frames.pop_front() {
            return Poll::Ready(Some(Ok(frame)));
        }
        let Some(more) = &mut self.more else { return Poll::Ready(None) };
        let Poll::Ready(next) = more.poll_recv(context) else { return Poll::Pending };
        let frame = match next {
            Some(message) => Frame::data(encode_frame(&message)),
            None => {
                self.more = None;
                Frame::trailers(trailers(0, ""))
            }
        };
        Poll::Ready(Some(Ok(frame)))
    }

    fn is_end_stream(&self) -> bool {
        self.frames.is_empty() && self.more.is_none()
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn decode_frames_with_one_message() {
        let whole = encode_frame(b"abc");
        assert_eq!(decode_frame(&whole), Some(&b"abc"[..]));
        for bad in [&b""[..], b"\0\0\0\0", b"\0\0\0\0\x04abc", b"\x01\0\0\0\x03abc", b"\0\0\0\0\x02abc"] {
            assert_eq!(decode_frame(&Bytes::copy_from_slice(bad)), None, "{bad:?}");
        }
        assert_eq!(decode_frame(&encode_frame(b"")), Some(&b""[..]));
    }

    #[test]
    fn percent_encodes_error_messages() {
        assert_eq!(percent_encode("100 % größer\n"), "100 %25 gr%C3%B6%C3%9Fer%0A");
        assert_eq!(trailers(5, "no\npod").get("grpc-message").unwrap(), "no%0Apod");
    }
}
