//! Proxying requests to remote API servers, with our client certificate and the user in
//! `X-Remote-*` headers.

use std::sync::Arc;
use std::time::Duration;

use api::Status;
use bytes::Bytes;
use http::header::{self, HeaderMap, HeaderName, HeaderValue};
use http::{Method, Request, Response, StatusCode};
use http_body_util::{BodyExt as _, Full, Limited};
use rustls::pki_types::ServerName;
use tokio::net::TcpStream;
use tokio_rustls::TlsConnector;
use tokio_rustls::client::TlsStream;

use super::{ApiService, ServiceBackend};
use crate::access::User;
use crate::body::Body;
use crate::endpoints;
use crate::kubelets::stream_body;
use crate::server::{Call, Server};
use crate::webhook_client::{certificate_message, host_port};

/// Connect timeout.
const DIAL_TIMEOUT: Duration = Duration::from_secs(30);
/// Size limit of discovery responses. OpenAPI documents are the largest.
const MAX_DISCOVERY_BYTES: usize = 32 << 20;

/// Proxies a request to the server of an APIService.
pub async fn proxy_request(
    server: &Arc<Server>,
    call: &Call,
    entry: &ApiService,
) -> Result<Response<Body>, Status> {
    let Some(remote) = entry.remote.as_ref().filter(|remote| remote.available) else {
        return Ok(plain_text(StatusCode::SERVICE_UNAVAILABLE, "service unavailable"));
    };
    let address = match endpoints::resolve(server, &remote.namespace, &remote.service, remote.port) {
        Ok(address) => address,
        Err(reason) => {
            tracing::warn!(
                apiservice = entry.name,
                error = reason,
                "cannot resolve the Service of an APIService"
            );
            return Ok(plain_text(StatusCode::SERVICE_UNAVAILABLE, "service unavailable"));
        }
    };
    let host = host_port(&address.0, address.1);
    let connection = match dial(server, remote, &address).await {
        Ok(connection) => connection,
        Err(reason) => return Ok(plain_text(StatusCode::SERVICE_UNAVAILABLE, &reason)),
    };
    let upgrade = call.upgrade.clone().filter(|_| stream::is_upgrade_request(&call.headers));
    let query = call.query.encode();
    let path = if query.is_empty() { call.path.clone() } else { format!("{}?{query}", call.path) };
    let mut request = Request::new(Full::new(call.body.clone()));
    *request.method_mut() = call.method.clone();
    *request.uri_mut() = path.parse().map_err(|_| Status::bad_request("invalid request path"))?;
    *request.headers_mut() = headers(call, &host, upgrade.is_some());
    let response = match stream::proxy_request(connection, request, upgrade).await {
        Ok(response) => response,
        Err(error) => return Ok(plain_text(StatusCode::SERVICE_UNAVAILABLE, &error.to_string())),
    };
    if response.status() == StatusCode::SWITCHING_PROTOCOLS {
        return Ok(response.map(|_| Body::empty()));
    }
    if response.status().is_redirection() && response.status() != StatusCode::NOT_MODIFIED {
        const REDIRECT: &str = "the backend attempted to redirect this request, which is not permitted";
        return Ok(plain_text(StatusCode::BAD_GATEWAY, REDIRECT));
    }
    let (mut parts, body) = response.into_parts();
    stream::strip_hop_by_hop_headers(&mut parts.headers, false);
    Ok(Response::from_parts(parts, stream_body(server, body)))
}

/// The request headers without hop-by-hop headers and credentials, plus forwarding and user
/// headers.
fn headers(call: &Call, host: &str, upgrade: bool) -> HeaderMap {
    let mut out = call.headers.clone();
    stream::strip_hop_by_hop_headers(&mut out, upgrade);
    let is_reserved = |name: &HeaderName| {
        let name = name.as_str();
        name.starts_with("x-remote-")
            || name.starts_with("impersonate-")
            || matches!(name, "content-length" | "authorization")
    };
    let names: Vec<HeaderName> = out.keys().filter(|name| is_reserved(name)).cloned().collect();
    for name in names {
        out.remove(name);
    }
    let mut set = |name: &'static str, text: &str| {
        if let Ok(value) = HeaderValue::from_str(text) {
            out.insert(HeaderName::from_static(name), value);
        }
    };
    set("host", host);
    set("x-forwarded-host", call.header(header::HOST));
    set("x-forwarded-uri", &call.path);
    set("x-forwarded-proto", "https");
    set_user_headers(&mut out, &call.user);
    out
}

/// Sets the `X-Remote-*` headers.
fn set_user_headers(headers: &mut HeaderMap, user: &User) {
    let mut add = |name: &str, text: &str| {
        if let (Ok(name), Ok(value)) = (HeaderName::try_from(name), HeaderValue::from_str(text)) {
            headers.append(name, value);
        }
    };
    add("x-remote-user", &user.name);
    if !user.uid.is_empty() {
        add("x-remote-uid", &user.uid);
    }
    for group in &user.groups {
        add("x-remote-group", group);
    }
    for (key, values) in &user.extra {
        let name = format!("x-remote-extra-{}", escape_header(key));
        values.iter().for_each(|value| add(&name, value));
    }
}

/// Percent-encodes bytes that are not allowed in header names.
fn escape_header(key: &str) -> String {
    let mut out = String::with_capacity(key.len());
    for byte in key.bytes() {
        match byte {
            b'a'..=b'z' | b'A'..=b'Z' | b'0'..=b'9' => out.push(byte.into()),
            b'!' | b'#' | b'$' | b'&' | b'\'' | b'*' | b'+' | b'-' | b'.' | b'^' | b'_' | b'`' | b'|'
            | b'~' => {
                out.push(byte.into());
            }
            _ => out.push_str(&format!("%{byte:02x}")),
        }
    }
    out
}

async fn dial(
    server: &Server,
    remote: &ServiceBackend,
    (host, port): &(String, u16),
) -> Result<TlsStream<TcpStream>, String> {
    let tls = remote.tls(server.aggregator.client_certificate.as_ref())?;
    let name = ServerName::try_from(remote.server_name());
    let name = name.map_err(|_| format!("{:?} is not a valid server name", remote.server_name()))?;
    let connect = async {
        let stream = TcpStream::connect((host.as_str(), *port)).await?;
        stream.set_nodelay(true)?;
        TlsConnector::from(tls).connect(name, stream).await
    };
    let address = host_port(host, *port);
    let reason = match tokio::time::timeout(DIAL_TIMEOUT, connect).await {
        Ok(Ok(stream)) => return Ok(stream),
        Ok(Err(error)) => match error.get_ref().and_then(|inner| inner.downcast_ref::<rustls::Error>()) {
            Some(error) => certificate_message(error),
            None if error.kind() == std::io::ErrorKind::ConnectionRefused => {
                format!("dial tcp {address}: connect: connection refused")
            }
            None => format!("dial tcp {address}: {error}"),
        },
        Err(_) => format!("dial tcp {address}: i/o timeout"),
    };
    Err(reason)
}

/// Sends a GET request as `system:kube-aggregator`.
pub async fn get(
    server: &Server,
    remote: &ServiceBackend,
    address: &(String, u16),
    path: &str,
) -> Result<(u16, Bytes), String> {
    let connection = dial(server, remote, address).await?;
    let mut request = Request::new(Full::new(Bytes::new()));
    *request.method_mut() = Method::GET;
    *request.uri_mut() = path.parse().unwrap_or_default();
    let aggregator = User {
        name: "system:kube-aggregator".into(),
        groups: vec!["system:masters".into()],
        ..User::default()
    };
    set_user_headers(request.headers_mut(), &aggregator);
    request.headers_mut().insert(header::ACCEPT, HeaderValue::from_static("application/json"));
    if let Ok(host) = host_port(&address.0, address.1).parse() {
        request.headers_mut().insert(header::HOST, host);
    }
    let response =
        stream::proxy_request(connection, request, None).await.map_err(|error| error.to_string())?;
    let status = response.status().as_u16();
    let body = Limited::new(response.into_body(), MAX_DISCOVERY_BYTES).collect().await;
    let body = body.map_err(|error| error.to_string())?.to_bytes();
    Ok((status, body))
}

/// An error response like that of upstream's proxy: plain text, no Status.
fn plain_text(status: StatusCode, text: &str) -> Response<Body> {
    let mut response = Response::new(Body::from(Bytes::from(format!("{text}\n"))));
    *response.status_mut() = status;
    let headers = response.headers_mut();
    headers.insert(header::CONTENT_TYPE, HeaderValue::from_static("text/plain; charset=utf-8"));
    headers.insert(header::X_CONTENT_TYPE_OPTIONS, HeaderValue::from_static("nosniff"));
    response
}
