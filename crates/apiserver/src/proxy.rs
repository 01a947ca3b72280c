//! `proxy` of nodes, pods and services: a request is handed on to what stands behind the object, and its answer
//! comes back with its links made to lead through here again.
//!
//! A kubelet is spoken to as by `kubelets`, its certificate checked. Pods and services are only spoken to at
//! addresses of pods, and what says who the client is here (tokens, whom it impersonates) never reaches them.

mod links;
mod place;

use std::sync::Arc;
use std::time::Duration;

use api::Status;
use http::header::{self, HeaderMap, HeaderName, HeaderValue};
use http::{Method, Request, Response, StatusCode};
use http_body_util::{BodyExt as _, Full, Limited};
use hyper::body::Incoming;
use hyper::upgrade::OnUpgrade;
use rustls::pki_types::ServerName;
use tokio_rustls::TlsConnector;

use crate::body::Body;
use crate::kubelets::{self, streamed};
use crate::request::Target;
use crate::server::{Call, Server};
use crate::tunnels;
use links::Links;
use place::{Far, Way};

const DIAL: Duration = Duration::from_secs(30);
/// Pages larger than this are no pages.
const LARGEST_PAGE: usize = 16 << 20;
/// What begins the names of headers by which clients say who they are.
const IDENTITY: [&str; 3] = ["authorization", "impersonate-", "x-remote-"];

pub async fn answer(server: &Arc<Server>, call: &Call, target: &Target) -> Result<Response<Body>, Status> {
    let far = place::find(server, target).await?;
    let (prefix, path) = split(&call.path, target);
    let query = if call.raw_query.is_empty() { String::new() } else { format!("?{}", call.raw_query) };
    let upgrade = call.upgrade.clone().filter(|_| stream::wants_upgrade(&call.headers));
    if path.is_empty() && upgrade.is_none() && matches!(call.method, Method::GET | Method::HEAD) {
        return moved(&format!("{}/{query}", call.path));
    }
    let mut request = Request::new(Full::new(call.body.clone()));
    *request.method_mut() = call.method.clone();
    let asked = format!("/{}{query}", path.trim_start_matches('/'));
    *request.uri_mut() = asked.parse().map_err(bad)?;
    *request.headers_mut() = headers(call, &far, upgrade.is_some());
    if upgrade.is_none()
        && let Ok(uri) = HeaderValue::from_str(&format!("{prefix}/{}", path.trim_start_matches('/')))
    {
        request.headers_mut().insert("x-forwarded-uri", uri);
    }
    let unreachable = |why: String| unavailable(format!("error trying to reach service: {why}"));
    let answer = ask(server, &far, request, upgrade.clone()).await.map_err(unreachable)?;
    if answer.status() == StatusCode::SWITCHING_PROTOCOLS {
        return Ok(answer.map(|_| Body::empty()));
    }
    let host = call.header(header::HOST);
    handed_back(server, answer, &Links { prefix, far: &far.shown(), host }).await
}

/// The path up to and with `/proxy`, and what comes after.
fn split<'a>(path: &'a str, target: &Target) -> (&'a str, &'a str) {
    // api, v1, namespaces, its name, plural, name, proxy.
    let segments = if target.namespace.is_empty() { 5 } else { 7 };
    let ends = path.match_indices('/').map(|(at, _)| at).nth(segments);
    path.split_at(ends.unwrap_or(path.len()))
}

fn moved(to: &str) -> Result<Response<Body>, Status> {
    let mut response = Response::new(Body::empty());
    *response.status_mut() = StatusCode::MOVED_PERMANENTLY;
    let to = HeaderValue::from_str(to).map_err(bad)?;
    response.headers_mut().insert(header::LOCATION, to);
    Ok(response)
}

/// Those of the client that concern what it asks.
fn headers(call: &Call, far: &Far, upgrade: bool) -> HeaderMap {
    let mut headers = call.headers.clone();
    if !upgrade {
        stream::strip(&mut headers, false);
        // Links are found in what can be read.
        headers.remove(header::ACCEPT_ENCODING);
    }
    let telling = |name: &HeaderName| IDENTITY.iter().any(|begin| name.as_str().starts_with(begin));
    let names: Vec<HeaderName> = headers.keys().filter(|name| telling(name)).cloned().collect();
    for name in names {
        headers.remove(name);
    }
    // The body is whole by now.
    headers.remove(header::CONTENT_LENGTH);
    headers.remove(header::EXPECT);
    if !headers.contains_key(header::HOST)
        && let Ok(host) = far.shown().parse()
    {
        headers.insert(header::HOST, host);
    }
    if let Some(remote) = call.remote {
        let before = headers.get("x-forwarded-for").and_then(|value| value.to_str().ok());
        let all = before.map_or_else(|| remote.to_string(), |before| format!("{before}, {remote}"));
        if let Ok(all) = all.parse() {
            headers.insert("x-forwarded-for", all);
        }
    }
    headers
}

async fn ask(
    server: &Server,
    far: &Far,
    request: Request<Full<bytes::Bytes>>,
    upgrade: Option<OnUpgrade>,
) -> Result<Response<Incoming>, String> {
    if far.way == Way::Kubelet {
        let connection = kubelets::dial(server, &far.place).await?;
        return stream::hand_on(connection, request, upgrade).await.map_err(|error| error.to_string());
    }
    let connecting = tunnels::connect(server, &far.place.host, far.place.port);
    let connected = tokio::time::timeout(DIAL, connecting).await;
    let connection = match connected {
        Ok(Ok(connection)) => connection,
        Ok(Err(error)) if error.kind() == std::io::ErrorKind::ConnectionRefused => {
            return Err(format!("dial tcp {}: connect: connection refused", far.shown()));
        }
        Ok(Err(error)) => return Err(format!("dial tcp {}: {error}", far.shown())),
        Err(_) => return Err(format!("dial tcp {}: i/o timeout", far.shown())),
    };
    if far.way == Way::Plain {
        return stream::hand_on(connection, request, upgrade).await.map_err(|error| error.to_string());
    }
    let name = ServerName::try_from(far.place.host.clone()).map_err(|error| error.to_string())?;
    let tls = pki::unverified().map_err(|error| error.to_string())?;
    let connection = TlsConnector::from(tls).connect(name, connection).await;
    let connection = connection.map_err(|error| error.to_string())?;
    stream::hand_on(connection, request, upgrade).await.map_err(|error| error.to_string())
}

/// The far end's answer as the client gets it.
async fn handed_back(
    server: &Server,
    answer: Response<Incoming>,
    links: &Links<'_>,
) -> Result<Response<Body>, Status> {
    let (mut parts, body) = answer.into_parts();
    stream::strip(&mut parts.headers, false);
    // Who may read what is served here is not for those behind to say.
    let cors: Vec<HeaderName> =
        parts.headers.keys().filter(|name| name.as_str().starts_with("access-control-")).cloned().collect();
    for name in cors {
        parts.headers.remove(name);
    }
    if let Some(location) = parts.headers.get(header::LOCATION) {
        let led = location.to_str().ok().and_then(|location| links.through(location));
        if let Some(led) = led.and_then(|led| led.parse().ok()) {
            parts.headers.insert(header::LOCATION, led);
        }
        return Ok(Response::from_parts(parts, streamed(server, body)));
    }
    let text = |name| parts.headers.get(name).and_then(|value| value.to_str().ok()).unwrap_or("");
    let is_page = text(header::CONTENT_TYPE).split(';').next().is_some_and(|kind| kind.trim() == "text/html");
    if !is_page || !text(header::CONTENT_ENCODING).is_empty() {
        return Ok(Response::from_parts(parts, streamed(server, body)));
    }
    let page = Limited::new(body, LARGEST_PAGE).collect().await.map_err(Status::internal)?.to_bytes();
    parts.headers.remove(header::CONTENT_LENGTH);
    Ok(Response::from_parts(parts, Body::from(links.page(&page))))
}

fn unavailable(message: String) -> Status {
    Status::failure(503, "ServiceUnavailable", message)
}

fn bad(error: impl std::fmt::Display) -> Status {
    Status::bad_request(error.to_string())
}
