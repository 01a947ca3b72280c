//! The streaming server for exec, attach and port-forward, over WebSocket and SPDY.
//!
//! As CRI specifies, the calls return a URL for the client to connect to. It is on the loopback
//! interface, has an unguessable token, and is valid for one connection soon after. Start reading at
//! [`StreamServer`], then [`session`]. Upstream counterpart: `k8s.io/kubelet/pkg/cri/streaming`.

mod channels;
mod forward;
mod session;
mod terminal;

use std::collections::HashMap;
use std::convert::Infallible;
use std::io;
use std::net::SocketAddr;
use std::path::PathBuf;
use std::sync::Arc;
use std::time::{Duration, Instant};

use bytes::Bytes;
use http::header::{CONNECTION, HeaderMap, HeaderValue, UPGRADE};
use http::{Request, Response, StatusCode};
use http_body_util::Full;
use hyper::body::Incoming;
use hyper::upgrade::Upgraded;
use hyper_util::rt::TokioIo;
use parking_lot::Mutex;
use tokio::net::{TcpListener, TcpStream};

use super::{Embedded, call_error};
use crate::Result;
use crate::cri::{AttachRequest, ExecRequest};
use session::Session;

/// Time for the client to connect.
const CONNECT_TIMEOUT: Duration = Duration::from_secs(60);
const SPDY: &str = "SPDY/3.1";
/// The subprotocols of exec and attach, newest first. v5 adds a close signal for stdin.
const WEBSOCKET_PROTOCOLS: [&str; 3] = ["v5.channel.k8s.io", "v4.channel.k8s.io", "channel.k8s.io"];
const SPDY_VERSIONS: [&str; 4] =
    ["v4.channel.k8s.io", "v3.channel.k8s.io", "v2.channel.k8s.io", "channel.k8s.io"];
const PORT_FORWARD: &str = "portforward.k8s.io";
/// SPDY port-forward tunnelled through WebSocket.
const TUNNEL_PROTOCOL: &str = "SPDY/3.1+portforward.k8s.io";

type Body = Full<Bytes>;

/// The streaming server. It runs until it is dropped.
pub struct StreamServer {
    address: SocketAddr,
    pending: Arc<Mutex<HashMap<String, PendingStream>>>,
    accept_task: tokio::task::JoinHandle<()>,
}

struct PendingStream {
    target: StreamTarget,
    deadline: Instant,
}

/// What a client will be connected to.
enum StreamTarget {
    Session(Session),
    Ports { pod: PathBuf },
}

impl StreamServer {
    pub async fn start() -> io::Result<StreamServer> {
        let listener = TcpListener::bind("127.0.0.1:0").await?;
        let address = listener.local_addr()?;
        let pending: Arc<Mutex<HashMap<String, PendingStream>>> = Arc::default();
        let known = pending.clone();
        let accept_task = tokio::spawn(async move {
            loop {
                match listener.accept().await {
                    Ok((stream, _)) => drop(tokio::spawn(serve(stream, known.clone()))),
                    // Out of file descriptors; retry after a pause.
                    Err(_) => tokio::time::sleep(Duration::from_millis(50)).await,
                }
            }
        });
        Ok(StreamServer { address, pending, accept_task })
    }

    fn register(&self, target: StreamTarget) -> String {
        let token = uuid::Uuid::new_v4().simple().to_string();
        let mut pending = self.pending.lock();
        let now = Instant::now();
        pending.retain(|_, one| one.deadline > now);
        pending.insert(token.clone(), PendingStream { target, deadline: now + CONNECT_TIMEOUT });
        format!("http://{}/{token}", self.address)
    }
}

impl Drop for StreamServer {
    fn drop(&mut self) {
        self.accept_task.abort();
    }
}

impl Embedded {
    pub(super) fn open_exec(&self, request: &ExecRequest) -> Result<String> {
        let (pod, known) = self.inner.container(&request.container_id, "Exec")?;
        if !known.is_running() {
            return Err(call_error("Exec", format!("container {:?} is not running", request.container_id)));
        }
        let session = Session {
            pod: pod.directory.clone(),
            container: request.container_id.clone(),
            command: Some(request.cmd.clone()),
            tty: request.tty,
            stdin: request.stdin,
            stdout: request.stdout,
            stderr: request.stderr && !request.tty,
        };
        Ok(self.inner.streams.register(StreamTarget::Session(session)))
    }

    pub(super) fn open_attach(&self, request: &AttachRequest) -> Result<String> {
        let (pod, known) = self.inner.container(&request.container_id, "Attach")?;
        if !known.is_running() {
            return Err(call_error("Attach", format!("container {:?} is not running", request.container_id)));
        }
        let session = Session {
            pod: pod.directory.clone(),
            container: request.container_id.clone(),
            command: None,
            tty: request.tty,
            stdin: request.stdin,
            stdout: request.stdout,
            stderr: request.stderr && !request.tty,
        };
        Ok(self.inner.streams.register(StreamTarget::Session(session)))
    }

    pub(super) fn open_port_forward(&self, sandbox: &str, _ports: &[i32]) -> Result<String> {
        let pod = self.inner.pod(sandbox, "PortForward")?;
        Ok(self.inner.streams.register(StreamTarget::Ports { pod: pod.directory.clone() }))
    }
}

async fn serve(stream: TcpStream, pending: Arc<Mutex<HashMap<String, PendingStream>>>) {
    let _ = stream.set_nodelay(true);
    let service = hyper::service::service_fn(move |request: Request<Incoming>| {
        let found = pending.lock().remove(request.uri().path().trim_start_matches('/'));
        async move { Ok::<_, Infallible>(handle_upgrade(request, found)) }
    });
    let connection =
        hyper::server::conn::http1::Builder::new().serve_connection(TokioIo::new(stream), service);
    let _ = connection.with_upgrades().await;
}

fn handle_upgrade(request: Request<Incoming>, found: Option<PendingStream>) -> Response<Body> {
    let Some(PendingStream { target: what, deadline }) = found else {
        return text_response(StatusCode::NOT_FOUND, "page not found");
    };
    if deadline < Instant::now() {
        return text_response(StatusCode::NOT_FOUND, "page not found");
    }
    let headers = request.headers();
    let wants = |name: &str| {
        headers.get(UPGRADE).is_some_and(|value| value.as_bytes().eq_ignore_ascii_case(name.as_bytes()))
    };
    let negotiated = if wants(SPDY) {
        spdy(headers, &what)
    } else if wants("websocket") {
        websocket(headers, &what)
    } else {
        Err("unable to upgrade: missing upgrade headers in request")
    };
    let (response, protocol) = match negotiated {
        Ok(negotiated) => negotiated,
        Err(reason) => return text_response(StatusCode::BAD_REQUEST, reason),
    };
    let upgrade = hyper::upgrade::on(request);
    tokio::spawn(async move {
        if let Ok(upgraded) = upgrade.await {
            run(what, protocol, upgraded).await;
        }
    });
    response
}

async fn run(target: StreamTarget, protocol: Protocol, upgraded: Upgraded) {
    let client = TokioIo::new(upgraded);
    if let (StreamTarget::Ports { pod }, Protocol::Tunnel) = (&target, &protocol) {
        let (reader, writer) = channels::tunnel(client);
        return forward::run(pod, reader, writer).await;
    }
    let (reader, writer) = tokio::io::split(client);
    match (target, protocol) {
        (StreamTarget::Session(session), Protocol::WebSocket { has_close_signal, status_format: ending }) => {
            let channels = channels::websocket(&session, reader, writer, has_close_signal);
            session.run(channels, ending).await;
        }
        (StreamTarget::Session(session), Protocol::Spdy { status_format: ending }) => {
            let channels = channels::spdy(&session, reader, writer);
            session.run(channels, ending).await;
        }
        (StreamTarget::Ports { pod }, _) => forward::run(&pod, reader, writer).await,
        (StreamTarget::Session(_), Protocol::Tunnel) => {}
    }
}

/// The negotiated protocol.
enum Protocol {
    Spdy { status_format: StatusFormat },
    WebSocket { has_close_signal: bool, status_format: StatusFormat },
    Tunnel,
}

/// How the result of a session is reported on the error stream.
#[derive(Clone, Copy)]
pub enum StatusFormat {
    /// From v4 on: a `Status` object, also for success.
    Status,
    /// Before v4: a plain message, only for a failure.
    Message,
}

impl StatusFormat {
    fn of(version: &str) -> StatusFormat {
        match version {
            "v5.channel.k8s.io" | "v4.channel.k8s.io" => StatusFormat::Status,
            _ => StatusFormat::Message,
        }
    }
}

type Negotiated = std::result::Result<(Response<Body>, Protocol), &'static str>;

fn spdy(headers: &HeaderMap, target: &StreamTarget) -> Negotiated {
    const VERSION: &str = "x-stream-protocol-version";
    let known: &[&'static str] = match target {
        StreamTarget::Session(_) => &SPDY_VERSIONS,
        StreamTarget::Ports { .. } => &[PORT_FORWARD],
    };
    let offered: Vec<&str> = header_values(headers, VERSION).collect();
    let chosen = known.iter().find(|version| offered.contains(version));
    // The oldest clients offer no version.
    let chosen = match (chosen, offered.is_empty()) {
        (Some(chosen), _) => chosen,
        (None, true) => known.last().ok_or("unable to negotiate protocol")?,
        (None, false) => return Err("unable to negotiate protocol"),
    };
    let mut response = upgrade_response(SPDY);
    response.headers_mut().insert(VERSION, HeaderValue::from_static(chosen));
    Ok((response, Protocol::Spdy { status_format: StatusFormat::of(chosen) }))
}

fn websocket(headers: &HeaderMap, target: &StreamTarget) -> Negotiated {
    const PROTOCOL: &str = "sec-websocket-protocol";
    let key = headers.get("sec-websocket-key").and_then(|key| key.to_str().ok()).ok_or("missing key")?;
    let offered: Vec<&str> = header_values(headers, PROTOCOL).collect();
    let (chosen, protocol) = match target {
        StreamTarget::Session(_) => {
            let chosen = WEBSOCKET_PROTOCOLS
                .iter()
                .find(|version| offered.contains(version))
                .ok_or("unknown protocol")?;
            let status_format = StatusFormat::of(chosen);
            (
                *chosen,
                Protocol::WebSocket { has_close_signal: *chosen == WEBSOCKET_PROTOCOLS[0], status_format },
            )
        }
        StreamTarget::Ports { .. } if offered.contains(&TUNNEL_PROTOCOL) => {
            (TUNNEL_PROTOCOL, Protocol::Tunnel)
        }
        StreamTarget::Ports { .. } => return Err("unknown protocol"),
    };
    let mut response = upgrade_response("websocket");
    let accept = HeaderValue::from_str(&stream::websocket_codec::accept_key(key)).map_err(|_| "bad key")?;
    response.headers_mut().insert("sec-websocket-accept", accept);
    response.headers_mut().insert(PROTOCOL, HeaderValue::from_static(chosen));
    Ok((response, protocol))
}

fn header_values<'a>(headers: &'a HeaderMap, name: &'static str) -> impl Iterator<Item = &'a str> {
    let values = headers.get_all(name).iter().filter_map(|value| value.to_str().ok());
    values.flat_map(|value| value.split(',')).map(str::trim)
}

fn upgrade_response(protocol: &'static str) -> Response<Body> {
    let mut response = Response::new(Full::default());
    *response.status_mut() = StatusCode::SWITCHING_PROTOCOLS;
    response.headers_mut().insert(CONNECTION, HeaderValue::from_static("Upgrade"));
    response.headers_mut().insert(UPGRADE, HeaderValue::from_static(protocol));
    response
}

fn text_response(code: StatusCode, text: &'static str) -> Response<Body> {
    let mut response = Response::new(Full::new(Bytes::from_static(text.as_bytes())));
    *response.status_mut() = code;
    response
}
