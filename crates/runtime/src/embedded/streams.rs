//! Streams of containers: exec, attach and port-forward, spoken as clients want them (WebSocket, SPDY).
//!
//! As CRI has it, whoever asks is given an address to connect to. It is on the loopback, good for one connection soon
//! after, and nobody can guess it. Read [`Server`], then [`session`].

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

use super::{Embedded, refused};
use crate::Result;
use crate::cri::{AttachRequest, ExecRequest};
use session::Session;

/// For the client to come.
const VALID: Duration = Duration::from_secs(60);
const SPDY: &str = "SPDY/3.1";
/// Of exec and attach, the newest first. They differ in how the end of stdin is told.
const WEBSOCKET: [&str; 3] = ["v5.channel.k8s.io", "v4.channel.k8s.io", "channel.k8s.io"];
const SPDY_VERSIONS: [&str; 4] =
    ["v4.channel.k8s.io", "v3.channel.k8s.io", "v2.channel.k8s.io", "channel.k8s.io"];
const PORT_FORWARD: &str = "portforward.k8s.io";
/// Port-forward in SPDY inside WebSocket.
const TUNNEL: &str = "SPDY/3.1+portforward.k8s.io";

type Body = Full<Bytes>;

/// Serves streams for as long as it is kept.
pub struct Server {
    address: SocketAddr,
    waiting: Arc<Mutex<HashMap<String, Waiting>>>,
    accepting: tokio::task::JoinHandle<()>,
}

struct Waiting {
    what: What,
    until: Instant,
}

/// What a client is going to be tied to.
enum What {
    Session(Session),
    Ports { pod: PathBuf },
}

impl Server {
    pub async fn start() -> io::Result<Server> {
        let listener = TcpListener::bind("127.0.0.1:0").await?;
        let address = listener.local_addr()?;
        let waiting: Arc<Mutex<HashMap<String, Waiting>>> = Arc::default();
        let known = waiting.clone();
        let accepting = tokio::spawn(async move {
            loop {
                match listener.accept().await {
                    Ok((stream, _)) => drop(tokio::spawn(serve(stream, known.clone()))),
                    // Out of descriptors; it will pass.
                    Err(_) => tokio::time::sleep(Duration::from_millis(50)).await,
                }
            }
        });
        Ok(Server { address, waiting, accepting })
    }

    fn expect(&self, what: What) -> String {
        let token = uuid::Uuid::new_v4().simple().to_string();
        let mut waiting = self.waiting.lock();
        let now = Instant::now();
        waiting.retain(|_, one| one.until > now);
        waiting.insert(token.clone(), Waiting { what, until: now + VALID });
        format!("http://{}/{token}", self.address)
    }
}

impl Drop for Server {
    fn drop(&mut self) {
        self.accepting.abort();
    }
}

impl Embedded {
    pub(super) fn open_exec(&self, request: &ExecRequest) -> Result<String> {
        let (pod, known) = self.inner.container(&request.container_id, "Exec")?;
        if !known.is_running() {
            return Err(refused("Exec", format!("container {:?} is not running", request.container_id)));
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
        Ok(self.inner.streams.expect(What::Session(session)))
    }

    pub(super) fn open_attach(&self, request: &AttachRequest) -> Result<String> {
        let (pod, known) = self.inner.container(&request.container_id, "Attach")?;
        if !known.is_running() {
            return Err(refused("Attach", format!("container {:?} is not running", request.container_id)));
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
        Ok(self.inner.streams.expect(What::Session(session)))
    }

    pub(super) fn open_port_forward(&self, sandbox: &str, _ports: &[i32]) -> Result<String> {
        let pod = self.inner.pod(sandbox, "PortForward")?;
        Ok(self.inner.streams.expect(What::Ports { pod: pod.directory.clone() }))
    }
}

async fn serve(stream: TcpStream, waiting: Arc<Mutex<HashMap<String, Waiting>>>) {
    let _ = stream.set_nodelay(true);
    let service = hyper::service::service_fn(move |request: Request<Incoming>| {
        let found = waiting.lock().remove(request.uri().path().trim_start_matches('/'));
        async move { Ok::<_, Infallible>(answer(request, found)) }
    });
    let connection =
        hyper::server::conn::http1::Builder::new().serve_connection(TokioIo::new(stream), service);
    let _ = connection.with_upgrades().await;
}

fn answer(request: Request<Incoming>, found: Option<Waiting>) -> Response<Body> {
    let Some(Waiting { what, until }) = found else {
        return text(StatusCode::NOT_FOUND, "page not found");
    };
    if until < Instant::now() {
        return text(StatusCode::NOT_FOUND, "page not found");
    }
    let headers = request.headers();
    let wants = |name: &str| {
        headers.get(UPGRADE).is_some_and(|value| value.as_bytes().eq_ignore_ascii_case(name.as_bytes()))
    };
    let agreed = if wants(SPDY) {
        spdy(headers, &what)
    } else if wants("websocket") {
        websocket(headers, &what)
    } else {
        Err("unable to upgrade: missing upgrade headers in request")
    };
    let (response, protocol) = match agreed {
        Ok(agreed) => agreed,
        Err(why) => return text(StatusCode::BAD_REQUEST, why),
    };
    let upgrade = hyper::upgrade::on(request);
    tokio::spawn(async move {
        if let Ok(upgraded) = upgrade.await {
            run(what, protocol, upgraded).await;
        }
    });
    response
}

async fn run(what: What, protocol: Protocol, upgraded: Upgraded) {
    let client = TokioIo::new(upgraded);
    if let (What::Ports { pod }, Protocol::Tunnel) = (&what, &protocol) {
        let (reader, writer) = channels::tunnel(client);
        return forward::run(pod, reader, writer).await;
    }
    let (reader, writer) = tokio::io::split(client);
    match (what, protocol) {
        (What::Session(session), Protocol::WebSocket { tells_end, ending }) => {
            let channels = channels::websocket(&session, reader, writer, tells_end);
            session.run(channels, ending).await;
        }
        (What::Session(session), Protocol::Spdy { ending }) => {
            let channels = channels::spdy(&session, reader, writer);
            session.run(channels, ending).await;
        }
        (What::Ports { pod }, _) => forward::run(&pod, reader, writer).await,
        (What::Session(_), Protocol::Tunnel) => {}
    }
}

/// What was agreed upon.
enum Protocol {
    Spdy { ending: Ending },
    WebSocket { tells_end: bool, ending: Ending },
    Tunnel,
}

/// How a client is told the end of a session.
#[derive(Clone, Copy)]
pub enum Ending {
    /// From the fourth version on, by a Status in any case.
    Status,
    /// Before, by words where something went wrong.
    Words,
}

impl Ending {
    fn of(version: &str) -> Ending {
        match version {
            "v5.channel.k8s.io" | "v4.channel.k8s.io" => Ending::Status,
            _ => Ending::Words,
        }
    }
}

type Agreed = std::result::Result<(Response<Body>, Protocol), &'static str>;

fn spdy(headers: &HeaderMap, what: &What) -> Agreed {
    const VERSION: &str = "x-stream-protocol-version";
    let known: &[&'static str] = match what {
        What::Session(_) => &SPDY_VERSIONS,
        What::Ports { .. } => &[PORT_FORWARD],
    };
    let offered: Vec<&str> = words(headers, VERSION).collect();
    let chosen = known.iter().find(|version| offered.contains(version));
    // The oldest clients say nothing.
    let chosen = match (chosen, offered.is_empty()) {
        (Some(chosen), _) => chosen,
        (None, true) => known.last().ok_or("unable to negotiate protocol")?,
        (None, false) => return Err("unable to negotiate protocol"),
    };
    let mut response = switching(SPDY);
    response.headers_mut().insert(VERSION, HeaderValue::from_static(chosen));
    Ok((response, Protocol::Spdy { ending: Ending::of(chosen) }))
}

fn websocket(headers: &HeaderMap, what: &What) -> Agreed {
    const PROTOCOL: &str = "sec-websocket-protocol";
    let key = headers.get("sec-websocket-key").and_then(|key| key.to_str().ok()).ok_or("missing key")?;
    let offered: Vec<&str> = words(headers, PROTOCOL).collect();
    let (chosen, protocol) = match what {
        What::Session(_) => {
            let chosen =
                WEBSOCKET.iter().find(|version| offered.contains(version)).ok_or("unknown protocol")?;
            let ending = Ending::of(chosen);
            (*chosen, Protocol::WebSocket { tells_end: *chosen == WEBSOCKET[0], ending })
        }
        What::Ports { .. } if offered.contains(&TUNNEL) => (TUNNEL, Protocol::Tunnel),
        What::Ports { .. } => return Err("unknown protocol"),
    };
    let mut response = switching("websocket");
    let accept = HeaderValue::from_str(&stream::messages::accept_key(key)).map_err(|_| "bad key")?;
    response.headers_mut().insert("sec-websocket-accept", accept);
    response.headers_mut().insert(PROTOCOL, HeaderValue::from_static(chosen));
    Ok((response, protocol))
}

fn words<'a>(headers: &'a HeaderMap, name: &'static str) -> impl Iterator<Item = &'a str> {
    let values = headers.get_all(name).iter().filter_map(|value| value.to_str().ok());
    values.flat_map(|value| value.split(',')).map(str::trim)
}

fn switching(protocol: &'static str) -> Response<Body> {
    let mut response = Response::new(Full::default());
    *response.status_mut() = StatusCode::SWITCHING_PROTOCOLS;
    response.headers_mut().insert(CONNECTION, HeaderValue::from_static("Upgrade"));
    response.headers_mut().insert(UPGRADE, HeaderValue::from_static(protocol));
    response
}

fn text(code: StatusCode, text: &'static str) -> Response<Body> {
    let mut response = Response::new(Full::new(Bytes::from_static(text.as_bytes())));
    *response.status_mut() = code;
    response
}
