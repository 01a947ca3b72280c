//! Handing a request on to a pod, and its answer back, as they come.

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
use crate::pool::Sender;
use crate::table::{Backend, Place, Speech};

/// How long a pod may take to begin its answer.
const ANSWER: Duration = Duration::from_secs(300);
/// So many pods are tried that cannot be reached.
const TRIES: usize = 3;

pub type Body = UnsyncBoxBody<Bytes, hyper::Error>;

/// Where a request came from.
#[derive(Clone, Copy)]
pub struct From {
    pub client: IpAddr,
    /// Where it was heard.
    pub port: u16,
    pub tls: bool,
}

/// Answers a request from outside.
pub async fn answer(shared: &Shared, from: From, request: Request<Incoming>) -> Response<Body> {
    let response = match handed_on(shared, from, request).await {
        Ok(response) => response,
        Err(code) => plain(code),
    };
    shared.metrics.answered(response.status().as_u16());
    response
}

async fn handed_on(
    shared: &Shared,
    from: From,
    mut request: Request<Incoming>,
) -> Result<Response<Body>, StatusCode> {
    // Nobody is led anywhere but to pods.
    if request.method() == Method::CONNECT {
        return Err(StatusCode::METHOD_NOT_ALLOWED);
    }
    let host = host(&request).ok_or(StatusCode::BAD_REQUEST)?;
    let table = shared.table.read().clone();
    let backend = table.find(name_of(&host), request.uri().path()).ok_or(StatusCode::NOT_FOUND)?;
    let secure = shared.https_port.load(Ordering::Relaxed);
    if backend.redirect && !from.tls && secure != 0 {
        return redirect(&host, secure, request.uri()).ok_or(StatusCode::BAD_REQUEST);
    }
    let both = request.version() < Version::HTTP_2 && !backend.speech.http2;
    let upgrade =
        (both && stream::wants_upgrade(request.headers())).then(|| hyper::upgrade::on(&mut request));
    prepare(&mut request, &host, from, upgrade.is_some(), backend.speech).ok_or(StatusCode::BAD_REQUEST)?;
    let mut response = ask(shared, backend, request).await?;
    if response.status() == StatusCode::SWITCHING_PROTOCOLS {
        let upgrade = upgrade.ok_or(StatusCode::BAD_GATEWAY)?;
        stream::tie_when_told(upgrade, &mut response);
        return Ok(response.map(|_| Full::default().map_err(|never| match never {}).boxed_unsync()));
    }
    stream::strip(response.headers_mut(), false);
    Ok(response.map(|body| body.boxed_unsync()))
}

/// Asks one pod after the other until one takes the request. What was sent is not sent to another.
async fn ask(
    shared: &Shared,
    backend: &Backend,
    mut request: Request<Incoming>,
) -> Result<Response<Incoming>, StatusCode> {
    if backend.addresses.is_empty() {
        return Err(StatusCode::SERVICE_UNAVAILABLE);
    }
    for place in backend.in_turn().take(TRIES) {
        let address = place.address;
        // Those that were kept may have been closed at the other end meanwhile; a new one is not.
        if let Some(kept) = shared.pool.kept(place) {
            match send(shared, backend, place, kept, request).await? {
                Ok(response) => return Ok(response),
                Err(unsent) => request = *unsent,
            }
            shared.pool.forget(place);
        }
        match shared.pool.dial(place).await {
            Ok(new) => match send(shared, backend, place, new, request).await? {
                Ok(response) => return Ok(response),
                Err(unsent) => request = *unsent,
            },
            Err(error) => {
                tracing::debug!(%error, %address, backend = backend.name, "a pod cannot be reached")
            }
        }
    }
    tracing::debug!(backend = backend.name, "no pod can be reached");
    Err(StatusCode::BAD_GATEWAY)
}

/// The answer, or the request again if nothing of it was sent.
async fn send(
    shared: &Shared,
    backend: &Backend,
    place: Place,
    mut sender: Sender,
    request: Request<Incoming>,
) -> Result<Result<Response<Incoming>, Box<Request<Incoming>>>, StatusCode> {
    let sent = tokio::time::timeout(ANSWER, sender.send(request)).await;
    match sent {
        Err(_) => Err(StatusCode::GATEWAY_TIMEOUT),
        Ok(Ok(response)) => {
            if response.status() != StatusCode::SWITCHING_PROTOCOLS {
                shared.pool.keep(place, sender);
            }
            Ok(Ok(response))
        }
        Ok(Err(mut error)) => match error.take_message() {
            Some(request) => Ok(Err(Box::new(request))),
            None => {
                let error = error.into_error();
                tracing::debug!(%error, address = %place.address, backend = backend.name, "a pod gave no answer");
                Err(StatusCode::BAD_GATEWAY)
            }
        },
    }
}

/// Whom a request is for, with the port if one is named.
fn host<B>(request: &Request<B>) -> Option<String> {
    if let Some(authority) = request.uri().authority() {
        let port = authority.port().map(|port| format!(":{port}")).unwrap_or_default();
        return Some(format!("{}{port}", authority.host()));
    }
    match request.headers().get(header::HOST) {
        Some(value) => value.to_str().ok().map(str::to_owned),
        // HTTP/1.0 has none.
        None => (request.version() < Version::HTTP_11).then(String::new),
    }
}

/// A host without its port.
fn name_of(host: &str) -> &str {
    match host.rsplit_once(':') {
        Some((name, port)) if port.bytes().all(|digit| digit.is_ascii_digit()) => name,
        _ => host,
    }
}

/// Sends a client to the same place over TLS, with the same method.
fn redirect(host: &str, port: u16, uri: &Uri) -> Option<Response<Body>> {
    let name = name_of(host);
    if name.is_empty() {
        return None;
    }
    let port = if port == 443 { String::new() } else { format!(":{port}") };
    let path = uri.path_and_query().map_or("/", |path| path.as_str());
    let mut response = plain(StatusCode::PERMANENT_REDIRECT);
    let there = HeaderValue::from_str(&format!("https://{name}{port}{path}")).ok()?;
    response.headers_mut().insert(header::LOCATION, there);
    Some(response)
}

/// Makes of a request to us one to a pod: as it expects it, for the same host, and saying for whom it is.
fn prepare<B>(request: &mut Request<B>, host: &str, from: From, upgrade: bool, to: Speech) -> Option<()> {
    let path = request.uri().path_and_query().map_or("/", |path| path.as_str());
    let path = if path.starts_with('/') { path } else { "/" };
    let (uri, version) = match to {
        Speech { http2: false, .. } => (path.parse::<Uri>().ok()?, Version::HTTP_11),
        // There the host is a part of the address.
        Speech { tls: true, .. } => (format!("https://{host}{path}").parse().ok()?, Version::HTTP_2),
        Speech { tls: false, .. } => (format!("http://{host}{path}").parse().ok()?, Version::HTTP_2),
    };
    *request.uri_mut() = uri;
    *request.version_mut() = version;
    let headers = request.headers_mut();
    // gRPC wants to hear that its answers may end with more headers.
    let trailers = headers.get(header::TE).cloned().filter(|te| to.http2 && te == "trailers");
    stream::strip(headers, upgrade);
    headers.extend(trailers.map(|te| (header::TE, te)));
    let value = |text: &str| HeaderValue::from_str(text).ok();
    match to.http2 {
        true => _ = headers.remove(header::HOST),
        false => _ = headers.insert(header::HOST, value(host)?),
    }
    let client = value(&from.client.to_string())?;
    // What clients say themselves is not to be believed.
    headers.insert(HeaderName::from_static("x-forwarded-for"), client.clone());
    headers.insert(HeaderName::from_static("x-real-ip"), client);
    headers.insert(HeaderName::from_static("x-forwarded-host"), value(host)?);
    headers.insert(HeaderName::from_static("x-forwarded-port"), value(&from.port.to_string())?);
    let proto = HeaderValue::from_static(if from.tls { "https" } else { "http" });
    headers.insert(HeaderName::from_static("x-forwarded-proto"), proto);
    headers.remove(header::FORWARDED);
    Some(())
}

fn plain(code: StatusCode) -> Response<Body> {
    let reason = code.canonical_reason().unwrap_or_default();
    let text = match code {
        StatusCode::NOT_FOUND => "404 page not found\n".to_owned(),
        _ => format!("{} {reason}\n", code.as_u16()),
    };
    let body = Full::new(Bytes::from(text)).map_err(|never| match never {}).boxed_unsync();
    let mut response = Response::new(body);
    *response.status_mut() = code;
    let kind = HeaderValue::from_static("text/plain; charset=utf-8");
    response.headers_mut().insert(header::CONTENT_TYPE, kind);
    response
}

#[cfg(test)]
mod tests {
    use super::*;

    const FROM: From =
        From { client: IpAddr::V4(std::net::Ipv4Addr::new(192, 0, 2, 7)), port: 443, tls: true };

    #[track_caller]
    fn check(headers: &[(&str, &str)], upgrade: bool, expected: &str) {
        check_speech(headers, upgrade, Speech::default(), "/x?y=1", expected);
    }

    #[track_caller]
    fn check_speech(headers: &[(&str, &str)], upgrade: bool, to: Speech, uri: &str, expected: &str) {
        let mut request = Request::get("https://a.io:8443/x?y=1");
        for (name, value) in headers {
            request = request.header(*name, *value);
        }
        let mut request = request.body(()).unwrap();
        let host = host(&request).unwrap();
        prepare(&mut request, &host, FROM, upgrade, to).unwrap();
        assert_eq!(request.uri(), uri);
        let own = |name: &str| name.starts_with("x-forwarded") || name == "x-real-ip" || name == "host";
        let mut told: Vec<String> = request
            .headers()
            .iter()
            .filter(|(name, _)| !own(name.as_str()))
            .map(|(name, value)| format!("{name}={}", value.to_str().unwrap()))
            .collect();
        told.sort();
        assert_eq!(told.join(" "), expected);
        let header = |name: &str| request.headers()[name].to_str().unwrap().to_owned();
        assert_eq!(header("x-forwarded-for"), "192.0.2.7");
        assert_eq!(header("x-forwarded-proto"), "https");
        assert_eq!(header("x-forwarded-host"), "a.io:8443");
        let told = request.headers().get("host").and_then(|host| host.to_str().ok());
        assert_eq!(told, (!to.http2).then_some("a.io:8443"));
    }

    #[test]
    fn pods_are_told_what_concerns_them() {
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
            check_speech(&te, false, Speech { tls, http2: true }, uri, "te=trailers");
        }
    }

    #[test]
    fn who_comes_without_tls_is_sent_to_the_same_place_with_it() {
        let check = |host: &str, port: u16, path: &str, expected: Option<&str>| {
            let sent = redirect(host, port, &path.parse().unwrap());
            let there = sent.map(|sent| sent.headers()[header::LOCATION].to_str().unwrap().to_owned());
            assert_eq!(there.as_deref(), expected);
        };
        check("a.io", 443, "/x?y=1", Some("https://a.io/x?y=1"));
        check("a.io:8080", 8443, "/", Some("https://a.io:8443/"));
        check("", 443, "/", None);
    }

    #[test]
    fn hosts_are_read_without_ports() {
        for (host, expected) in
            [("a.io", "a.io"), ("a.io:80", "a.io"), ("[::1]:80", "[::1]"), ("[::1]", "[::1]"), ("", "")]
        {
            assert_eq!(name_of(host), expected, "{host}");
        }
        let old = Request::builder().version(Version::HTTP_10).uri("/").body(()).unwrap();
        assert_eq!(host(&old).as_deref(), Some(""));
        assert_eq!(host(&Request::get("/").body(()).unwrap()), None);
    }
}
