//! The `proxy` subresource of nodes, pods and services: forwards a request to the kubelet or pod,
//! and rewrites the links in the response to lead through the proxy.
//!
//! Kubelet certificates are verified as in `kubelets`. Pods and services are only reached at
//! addresses of pods. Headers that identify the client to this server (tokens, impersonation) are
//! not forwarded.

mod link_updater;
mod upstream;

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
use crate::kubelets::{self, stream_body};
use crate::request::Target;
use crate::server::{Call, Server};
use crate::tunnels;
use link_updater::LinkUpdater;
use upstream::{Upstream, UpstreamTransport};

const DIAL_TIMEOUT: Duration = Duration::from_secs(30);
/// Links are rewritten only in HTML pages up to this size; larger ones are an error.
const MAX_HTML_BYTES: usize = 16 << 20;
/// Prefixes of headers that identify the client.
const IDENTITY_HEADER_PREFIXES: [&str; 3] = ["authorization", "impersonate-", "x-remote-"];

pub async fn handle(server: &Arc<Server>, call: &Call, target: &Target) -> Result<Response<Body>, Status> {
    let upstream = upstream::resolve(server, target).await?;
    let (prefix, path) = split_proxy_path(&call.path, target);
    let query = if call.raw_query.is_empty() { String::new() } else { format!("?{}", call.raw_query) };
    let upgrade = call.upgrade.clone().filter(|_| stream::is_upgrade_request(&call.headers));
    if path.is_empty() && upgrade.is_none() && matches!(call.method, Method::GET | Method::HEAD) {
        return redirect_to(&format!("{}/{query}", call.path));
    }
    let mut request = Request::new(Full::new(call.body.clone()));
    *request.method_mut() = call.method.clone();
    let request_uri = format!("/{}{query}", path.trim_start_matches('/'));
    *request.uri_mut() = request_uri.parse().map_err(bad)?;
    *request.headers_mut() = upstream_headers(call, &upstream, upgrade.is_some());
    if upgrade.is_none()
        && let Ok(uri) = HeaderValue::from_str(&format!("{prefix}/{}", path.trim_start_matches('/')))
    {
        request.headers_mut().insert("x-forwarded-uri", uri);
    }
    let unreachable = |reason: String| unavailable(format!("error trying to reach service: {reason}"));
    let answer = send_request(server, &upstream, request, upgrade.clone()).await.map_err(unreachable)?;
    if answer.status() == StatusCode::SWITCHING_PROTOCOLS {
        return Ok(answer.map(|_| Body::empty()));
    }
    let host = call.header(header::HOST);
    rewrite_response(server, answer, &LinkUpdater { prefix, upstream_addr: &upstream.host_port(), host })
        .await
}

/// Splits the path after `/proxy`.
fn split_proxy_path<'a>(path: &'a str, target: &Target) -> (&'a str, &'a str) {
    // Segments: api, v1, namespaces, the namespace, plural, name, proxy.
    let segments = if target.namespace.is_empty() { 5 } else { 7 };
    let ends = path.match_indices('/').map(|(at, _)| at).nth(segments);
    path.split_at(ends.unwrap_or(path.len()))
}

fn redirect_to(to: &str) -> Result<Response<Body>, Status> {
    let mut response = Response::new(Body::empty());
    *response.status_mut() = StatusCode::MOVED_PERMANENTLY;
    let to = HeaderValue::from_str(to).map_err(bad)?;
    response.headers_mut().insert(header::LOCATION, to);
    Ok(response)
}

/// The headers to forward: without hop-by-hop and identity headers.
fn upstream_headers(call: &Call, upstream: &Upstream, upgrade: bool) -> HeaderMap {
    let mut headers = call.headers.clone();
    if !upgrade {
        stream::strip_hop_by_hop_headers(&mut headers, false);
        // Links can only be rewritten in an uncompressed body.
        headers.remove(header::ACCEPT_ENCODING);
    }
    let is_identity =
        |name: &HeaderName| IDENTITY_HEADER_PREFIXES.iter().any(|begin| name.as_str().starts_with(begin));
    let names: Vec<HeaderName> = headers.keys().filter(|name| is_identity(name)).cloned().collect();
    for name in names {
        headers.remove(name);
    }
    // The body was read completely, so its framing headers do not apply.
    headers.remove(header::CONTENT_LENGTH);
    headers.remove(header::EXPECT);
    if !headers.contains_key(header::HOST)
        && let Ok(host) = upstream.host_port().parse()
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

async fn send_request(
    server: &Server,
    upstream: &Upstream,
    request: Request<Full<bytes::Bytes>>,
    upgrade: Option<OnUpgrade>,
) -> Result<Response<Incoming>, String> {
    if upstream.transport == UpstreamTransport::Kubelet {
        let connection = kubelets::dial(server, &upstream.addr).await?;
        return stream::proxy_request(connection, request, upgrade).await.map_err(|error| error.to_string());
    }
    let connecting = tunnels::connect(server, &upstream.addr.host, upstream.addr.port);
    let connected = tokio::time::timeout(DIAL_TIMEOUT, connecting).await;
    let connection = match connected {
        Ok(Ok(connection)) => connection,
        Ok(Err(error)) if error.kind() == std::io::ErrorKind::ConnectionRefused => {
            return Err(format!("dial tcp {}: connect: connection refused", upstream.host_port()));
        }
        Ok(Err(error)) => return Err(format!("dial tcp {}: {error}", upstream.host_port())),
        Err(_) => return Err(format!("dial tcp {}: i/o timeout", upstream.host_port())),
    };
    if upstream.transport == UpstreamTransport::Plain {
        return stream::proxy_request(connection, request, upgrade).await.map_err(|error| error.to_string());
    }
    let name = ServerName::try_from(upstream.addr.host.clone()).map_err(|error| error.to_string())?;
    let tls = pki::unverified().map_err(|error| error.to_string())?;
    let connection = TlsConnector::from(tls).connect(name, connection).await;
    let connection = connection.map_err(|error| error.to_string())?;
    stream::proxy_request(connection, request, upgrade).await.map_err(|error| error.to_string())
}

/// Converts the upstream's response for the client: drops headers and rewrites links.
async fn rewrite_response(
    server: &Server,
    answer: Response<Incoming>,
    links: &LinkUpdater<'_>,
) -> Result<Response<Body>, Status> {
    let (mut parts, body) = answer.into_parts();
    stream::strip_hop_by_hop_headers(&mut parts.headers, false);
    // Backends must not set the CORS policy of this server.
    let cors: Vec<HeaderName> =
        parts.headers.keys().filter(|name| name.as_str().starts_with("access-control-")).cloned().collect();
    for name in cors {
        parts.headers.remove(name);
    }
    if let Some(location) = parts.headers.get(header::LOCATION) {
        let updated = location.to_str().ok().and_then(|location| links.proxied_link(location));
        if let Some(updated) = updated.and_then(|updated| updated.parse().ok()) {
            parts.headers.insert(header::LOCATION, updated);
        }
        return Ok(Response::from_parts(parts, stream_body(server, body)));
    }
    let text = |name| parts.headers.get(name).and_then(|value| value.to_str().ok()).unwrap_or("");
    let is_page = text(header::CONTENT_TYPE).split(';').next().is_some_and(|kind| kind.trim() == "text/html");
    if !is_page || !text(header::CONTENT_ENCODING).is_empty() {
        return Ok(Response::from_parts(parts, stream_body(server, body)));
    }
    let page = Limited::new(body, MAX_HTML_BYTES).collect().await.map_err(Status::internal)?.to_bytes();
    parts.headers.remove(header::CONTENT_LENGTH);
    Ok(Response::from_parts(parts, Body::from(links.update_page(&page))))
}

fn unavailable(message: String) -> Status {
    Status::failure(503, "ServiceUnavailable", message)
}

fn bad(error: impl std::fmt::Display) -> Status {
    Status::bad_request(error.to_string())
}
