//! Proxies requests to pods. Bodies are streamed in both directions.

use std::net::IpAddr;
use std::sync::atomic::Ordering;
use std::time::Duration;

use bytes::Bytes;
use http::header::{self, HeaderName, HeaderValue};
use http::{Method, Request, Response, StatusCode, Uri, Version};
use http_body_util::combinators::UnsyncBoxBody;
use http_body_util::{BodyExt as _, Full};
use hyper::body::Incoming;

use crate::Shared;
use crate::pool::PodConnection;
use crate::table::{Backend, BackendAddr, BackendProtocol};

/// The timeout for the response headers of a pod.
const RESPONSE_TIMEOUT: Duration = Duration::from_secs(300);
/// The maximum number of pods to try if connections fail.
const MAX_ATTEMPTS: usize = 3;

pub type Body = UnsyncBoxBody<Bytes, hyper::Error>;

/// The origin of a request.
#[derive(Clone, Copy)]
pub struct RequestSource {
    pub client: IpAddr,
    /// The port that received the connection.
    pub port: u16,
    pub tls: bool,
}

/// Handles a request from a client.
pub async fn handle_request(
    shared: &Shared,
    source: RequestSource,
    request: Request<Incoming>,
) -> Response<Body> {
    let response = match proxy_request(shared, source, request).await {
        Ok(response) => response,
        Err(code) => plain_response(code),
    };
    shared.metrics.record_response(response.status().as_u16());
    response
}

async fn proxy_request(
    shared: &Shared,
    source: RequestSource,
    mut request: Request<Incoming>,
) -> Result<Response<Body>, StatusCode> {
    // CONNECT would allow connections to arbitrary addresses.
    if request.method() == Method::CONNECT {
        return Err(StatusCode::METHOD_NOT_ALLOWED);
    }
    let host = request_host(&request).ok_or(StatusCode::BAD_REQUEST)?;
    let table = shared.table.read().clone();
    let backend = table.find(strip_port(&host), request.uri().path()).ok_or(StatusCode::NOT_FOUND)?;
    let https_port = shared.https_port.load(Ordering::Relaxed);
    if backend.redirect && !source.tls && https_port != 0 {
        return redirect(&host, https_port, request.uri()).ok_or(StatusCode::BAD_REQUEST);
    }
    let supports_upgrade = request.version() < Version::HTTP_2 && !backend.protocol.http2;
    let upgrade = (supports_upgrade && stream::is_upgrade_request(request.headers()))
        .then(|| hyper::upgrade::on(&mut request));
    rewrite_request(&mut request, &host, source, upgrade.is_some(), backend.protocol)
        .ok_or(StatusCode::BAD_REQUEST)?;
    let mut response = send_with_retries(shared, backend, request).await?;
    if response.status() == StatusCode::SWITCHING_PROTOCOLS {
        let upgrade = upgrade.ok_or(StatusCode::BAD_GATEWAY)?;
        stream::splice_on_upgrade(upgrade, &mut response);
        return Ok(response.map(|_| Full::default().map_err(|never| match never {}).boxed_unsync()));
    }
    stream::strip_hop_by_hop_headers(response.headers_mut(), false);
    Ok(response.map(|body| body.boxed_unsync()))
}

/// Tries several pods until one accepts the request. A request that was sent is not repeated.
async fn send_with_retries(
    shared: &Shared,
    backend: &Backend,
    mut request: Request<Incoming>,
) -> Result<Response<Incoming>, StatusCode> {
    if backend.addresses.is_empty() {
        return Err(StatusCode::SERVICE_UNAVAILABLE);
    }
    for backend_addr in backend.rotate().take(MAX_ATTEMPTS) {
        let address = backend_addr.address;
        // An idle connection may have been closed by the pod. A request that was not sent over it
        // is retried over a new connection.
        if let Some(idle) = shared.pool.take_idle(backend_addr) {
            match send_once(shared, backend, backend_addr, idle, request).await? {
                Ok(response) => return Ok(response),
                Err(unsent) => request = *unsent,
            }
            shared.pool.close_idle(backend_addr);
        }
        match shared.pool.dial(backend_addr).await {
            Ok(fresh) => match send_once(shared, backend, backend_addr, fresh, request).await? {
                Ok(response) => return Ok(response),
                Err(unsent) => request = *unsent,
            },
            Err(error) => {
                tracing::debug!(%error, %address, backend = backend.name, "cannot connect to pod")
            }
        }
    }
    tracing::debug!(backend = backend.name, "no pod accepts connections");
    Err(StatusCode::BAD_GATEWAY)
}

/// Returns the response, or the request if none of it was sent.
async fn send_once(
    shared: &Shared,
    backend: &Backend,
    backend_addr: BackendAddr,
    mut sender: PodConnection,
    request: Request<Incoming>,
) -> Result<Result<Response<Incoming>, Box<Request<Incoming>>>, StatusCode> {
    let sent = tokio::time::timeout(RESPONSE_TIMEOUT, sender.send(request)).await;
    match sent {
        Err(_) => Err(StatusCode::GATEWAY_TIMEOUT),
        Ok(Ok(response)) => {
            if response.status() != StatusCode::SWITCHING_PROTOCOLS {
                shared.pool.release(backend_addr, sender);
            }
            Ok(Ok(response))
        }
        Ok(Err(mut error)) => match error.take_message() {
            Some(request) => Ok(Err(Box::new(request))),
            None => {
                let error = error.into_error();
                tracing::debug!(%error, address = %backend_addr.address, backend = backend.name, "request to pod failed");
                Err(StatusCode::BAD_GATEWAY)
            }
        },
    }
}

/// The requested host with its optional port.
fn request_host<B>(request: &Request<B>) -> Option<String> {
    if let Some(authority) = request.uri().authority() {
        let port = authority.port().map(|port| format!(":{port}")).unwrap_or_default();
        return Some(format!("{}{port}", authority.host()));
    }
    match request.headers().get(header::HOST) {
        Some(value) => value.to_str().ok().map(str::to_owned),
        // HTTP/1.0 requests may have no Host header.
        None => (request.version() < Version::HTTP_11).then(String::new),
    }
}

/// The host without its port.
fn strip_port(host: &str) -> &str {
    match host.rsplit_once(':') {
        Some((name, port)) if port.bytes().all(|digit| digit.is_ascii_digit()) => name,
        _ => host,
    }
}

/// Redirects to the same URL with HTTPS. The status code keeps the method.
fn redirect(host: &str, port: u16, uri: &Uri) -> Option<Response<Body>> {
    let name = strip_port(host);
    if name.is_empty() {
        return None;
    }
    let port = if port == 443 { String::new() } else { format!(":{port}") };
    let path = uri.path_and_query().map_or("/", |path| path.as_str());
    let mut response = plain_response(StatusCode::PERMANENT_REDIRECT);
    let location = HeaderValue::from_str(&format!("https://{name}{port}{path}")).ok()?;
    response.headers_mut().insert(header::LOCATION, location);
    Some(response)
}

/// Rewrites a client request into a request for a pod: protocol version, original host and
/// forwarding headers.
fn rewrite_request<B>(
    request: &mut Request<B>,
    host: &str,
    source: RequestSource,
    upgrade: bool,
    protocol: BackendProtocol,
) -> Option<()> {
    let path = request.uri().path_and_query().map_or("/", |path| path.as_str());
    let path = if path.starts_with('/') { path } else { "/" };
    let (uri, version) = match protocol {
        BackendProtocol { http2: false, .. } => (path.parse::<Uri>().ok()?, Version::HTTP_11),
        // HTTP/2 sends the host in `:authority`, which comes from the URI.
        BackendProtocol { tls: true, .. } => (format!("https://{host}{path}").parse().ok()?, Version::HTTP_2),
        BackendProtocol { tls: false, .. } => (format!("http://{host}{path}").parse().ok()?, Version::HTTP_2),
    };
    *request.uri_mut() = uri;
    *request.version_mut() = version;
    let headers = request.headers_mut();
    // gRPC servers require `te: trailers`.
    let trailers = headers.get(header::TE).cloned().filter(|te| protocol.http2 && te == "trailers");
    stream::strip_hop_by_hop_headers(headers, upgrade);
    headers.extend(trailers.map(|te| (header::TE, te)));
    let value = |text: &str| HeaderValue::from_str(text).ok();
    match protocol.http2 {
        true => _ = headers.remove(header::HOST),
        false => _ = headers.insert(header::HOST, value(host)?),
    }
    let client = value(&source.client.to_string())?;
    // Values from clients are not trusted.
    headers.insert(HeaderName::from_static("x-forwarded-for"), client.clone());
    headers.insert(HeaderName::from_static("x-real-ip"), client);
    headers.insert(HeaderName::from_static("x-forwarded-host"), value(host)?);
    headers.insert(HeaderName::from_static("x-forwarded-port"), value(&source.port.to_string())?);
    let proto = HeaderValue::from_static(if source.tls { "https" } else { "http" });
    headers.insert(HeaderName::from_static("x-forwarded-proto"), proto);
    headers.remove(header::FORWARDED);
    Some(())
}

fn plain_response(code: StatusCode) -> Response<Body> {
    let reason = code.canonical_reason().unwrap_or_default();
    let text = match code {
        StatusCode::NOT_FOUND => "404 page not found\n".to_owned(),
        _ => format!("{} {reason}\n", code.as_u16()),
    };
    let body = Full::new(Bytes::from(text)).map_err(|never| match never {}).boxed_unsync();
    let mut response = Response::new(body);
    *response.status_mut() = code;
    let content_type = HeaderValue::from_static("text/plain; charset=utf-8");
    response.headers_mut().insert(header::CONTENT_TYPE, content_type);
    response
}

#[cfg(test)]
mod tests {
    use super::*;

    const SOURCE: RequestSource =
        RequestSource { client: IpAddr::V4(std::net::Ipv4Addr::new(192, 0, 2, 7)), port: 443, tls: true };

    #[track_caller]
    fn check(headers: &[(&str, &str)], upgrade: bool, expected: &str) {
        check_protocol(headers, upgrade, BackendProtocol::default(), "/x?y=1", expected);
    }

    #[track_caller]
    fn check_protocol(
        headers: &[(&str, &str)],
        upgrade: bool,
        protocol: BackendProtocol,
        uri: &str,
        expected: &str,
    ) {
        let mut request = Request::get("https://a.io:8443/x?y=1");
        for (name, value) in headers {
            request = request.header(*name, *value);
        }
        let mut request = request.body(()).unwrap();
        let host = request_host(&request).unwrap();
        rewrite_request(&mut request, &host, SOURCE, upgrade, protocol).unwrap();
        assert_eq!(request.uri(), uri);
        let own = |name: &str| name.starts_with("x-forwarded") || name == "x-real-ip" || name == "host";
        let mut sent_headers: Vec<String> = request
            .headers()
            .iter()
            .filter(|(name, _)| !own(name.as_str()))
            .map(|(name, value)| format!("{name}={}", value.to_str().unwrap()))
            .collect();
        sent_headers.sort();
        assert_eq!(sent_headers.join(" "), expected);
        let header = |name: &str| request.headers()[name].to_str().unwrap().to_owned();
        assert_eq!(header("x-forwarded-for"), "192.0.2.7");
        assert_eq!(header("x-forwarded-proto"), "https");
        assert_eq!(header("x-forwarded-host"), "a.io:8443");
        let host_header = request.headers().get("host").and_then(|host| host.to_str().ok());
        assert_eq!(host_header, (!protocol.http2).then_some("a.io:8443"));
    }

    #[test]
    fn hop_by_hop_headers_are_removed_and_forwarded_headers_set() {
        check(&[("accept", "x"), ("x-forwarded-for", "10.0.0.1"), ("forwarded", "for=1")], false, "accept=x");
        check(&[("connection", "close, x-secret"), ("x-secret", "1"), ("te", "trailers")], false, "");
        check(&[("connection", "Upgrade"), ("upgrade", "websocket")], false, "");
        check(
            &[("connection", "keep-alive, Upgrade"), ("upgrade", "websocket"), ("sec-websocket-key", "k")],
            true,
            "connection=Upgrade sec-websocket-key=k upgrade=websocket",
        );
        let te = [("te", "trailers"), ("connection", "te"), ("host", "a.io:8443")];
        for (tls, uri) in [(false, "http://a.io:8443/x?y=1"), (true, "https://a.io:8443/x?y=1")] {
            check_protocol(&te, false, BackendProtocol { tls, http2: true }, uri, "te=trailers");
        }
    }

    #[test]
    fn redirects_http_to_same_path_over_https() {
        let check = |host: &str, port: u16, path: &str, expected: Option<&str>| {
            let sent = redirect(host, port, &path.parse().unwrap());
            let location = sent.map(|sent| sent.headers()[header::LOCATION].to_str().unwrap().to_owned());
            assert_eq!(location.as_deref(), expected);
        };
        check("a.io", 443, "/x?y=1", Some("https://a.io/x?y=1"));
        check("a.io:8080", 8443, "/", Some("https://a.io:8443/"));
        check("", 443, "/", None);
    }

    #[test]
    fn strip_port_keeps_host() {
        for (host, expected) in
            [("a.io", "a.io"), ("a.io:80", "a.io"), ("[::1]:80", "[::1]"), ("[::1]", "[::1]"), ("", "")]
        {
            assert_eq!(strip_port(host), expected, "{host}");
        }
        let old = Request::builder().version(Version::HTTP_10).uri("/").body(()).unwrap();
        assert_eq!(request_host(&old).as_deref(), Some(""));
        assert_eq!(request_host(&Request::get("/").body(()).unwrap()), None);
    }
}
