//! Network probes and HTTP lifecycle hooks: TCP, HTTP, HTTPS and gRPC. Error texts are those of
//! Go's clients, since they appear in events.
//!
//! Upstream: `pkg/probe` and `pkg/kubelet/lifecycle/handlers.go`.

use std::time::Duration;

use bytes::Bytes;
use http::Request;
use http_body_util::{BodyExt as _, Full, Limited};
use hyper_util::rt::{TokioExecutor, TokioIo};
use k8s_openapi::api::core::v1::{Container, HTTPGetAction, HTTPHeader};
use rustls::pki_types::ServerName;
use tokio::io::{AsyncRead, AsyncReadExt as _, AsyncWrite, AsyncWriteExt as _};
use tokio::net::TcpStream;
use tokio_rustls::TlsConnector;

use crate::hooks::resolve_port;

/// The maximum number of bytes read from a response. Enough for an error message.
pub const MAX_RESPONSE_BYTES: usize = 10 << 10;
const MAX_REDIRECTS: usize = 10;
/// The error if the server does not use TLS on a connection that requires it.
const PLAINTEXT_SERVER: &str = "http: server gave HTTP response to HTTPS client";
/// The status names of gRPC's health service, by number.
const GRPC_SERVING_STATUS: [&str; 4] = ["UNKNOWN", "SERVING", "NOT_SERVING", "SERVICE_UNKNOWN"];
const GRPC_UNIMPLEMENTED: &str = "12";

/// Opens a TCP connection and closes it.
pub async fn tcp(host: &str, port: u16, timeout: Duration) -> Result<(), String> {
    match tokio::time::timeout(timeout, TcpStream::connect((host, port))).await {
        Ok(Ok(_)) => Ok(()),
        Ok(Err(error)) => Err(format!("dial tcp {}: {}", join_host_port(host, port), dial_error(&error))),
        Err(_) => Err(format!("dial tcp {}: i/o timeout", join_host_port(host, port))),
    }
}

/// An HTTP GET request of a probe or a hook.
#[derive(Clone, Debug, PartialEq)]
pub struct HttpGetRequest {
    tls: bool,
    host: String,
    port: u16,
    path: String,
    headers: Vec<HTTPHeader>,
    /// `probe` or `lifecycle`. Part of the User-Agent header.
    purpose: &'static str,
}

/// How an HTTP lifecycle hook succeeded.
#[derive(Debug, PartialEq)]
pub enum HttpHookResult {
    Success,
    /// The server does not use TLS, so the request was repeated over HTTP.
    HttpFallback,
}

struct HttpResponse {
    code: u16,
    location: Option<String>,
}

impl HttpGetRequest {
    /// The request of a probe or hook of this container, to the host that it names or else to
    /// `host`.
    pub fn new(
        container: &Container,
        host: &str,
        get: &HTTPGetAction,
        purpose: &'static str,
    ) -> Result<HttpGetRequest, String> {
        let named = get.host.as_deref().filter(|host| !host.is_empty());
        let path = get.path.as_deref().filter(|path| !path.is_empty()).unwrap_or("/");
        Ok(HttpGetRequest {
            tls: get.scheme.as_deref() == Some("HTTPS"),
            host: named.unwrap_or(host).to_owned(),
            port: resolve_port(container, &get.port)?,
            path: if path.starts_with('/') { path.to_owned() } else { format!("/{path}") },
            headers: get.http_headers.clone().unwrap_or_default(),
            purpose,
        })
    }

    /// Sends the request of a probe. A status code from 200 to 399 is a success.
    pub async fn probe(&self, timeout: Duration) -> Result<(), String> {
        match tokio::time::timeout(timeout, self.fetch_status()).await {
            Ok(Ok(200..400)) => Ok(()),
            Ok(Ok(code)) => Err(format!("HTTP probe failed with statuscode: {code}")),
            Ok(Err(reason)) => Err(reason),
            Err(_) => Err(format!(
                "Get {:?}: context deadline exceeded (Client.Timeout exceeded while awaiting headers)",
                self.url()
            )),
        }
    }

    /// Sends the request of a hook, without a timeout. Every status code is a success.
    pub async fn call(&self) -> Result<HttpHookResult, String> {
        match self.fetch_status().await {
            Err(reason) if reason.ends_with(PLAINTEXT_SERVER) => {
                // Credentials must not be sent unencrypted. Upstream drops this header as well.
                let is_open = |header: &&HTTPHeader| !header.name.eq_ignore_ascii_case("authorization");
                let headers = self.headers.iter().filter(is_open).cloned().collect();
                let request = HttpGetRequest { tls: false, headers, ..self.clone() };
                request.fetch_status().await.map(|_| HttpHookResult::HttpFallback).map_err(|_| reason)
            }
            response => response.map(|_| HttpHookResult::Success),
        }
    }

    pub fn authority(&self) -> String {
        join_host_port(&self.host, self.port)
    }

    fn url(&self) -> String {
        let scheme = if self.tls { "https" } else { "http" };
        format!("{scheme}://{}{}", self.authority(), self.path)
    }

    /// The status code of the response. Redirects within the same host are followed. A redirect to
    /// another host is the final response.
    async fn fetch_status(&self) -> Result<u16, String> {
        let mut target = self.clone();
        for _ in 0..MAX_REDIRECTS {
            let HttpResponse { code, location } = target.get().await?;
            let to = location.filter(|_| (300..400).contains(&code));
            match to.and_then(|to| target.resolve_redirect(&to)) {
                Some(next) => target = next,
                None => return Ok(code),
            }
        }
        Err(format!("Get {:?}: stopped after {MAX_REDIRECTS} redirects", target.url()))
    }

    async fn get(&self) -> Result<HttpResponse, String> {
        let url = self.url();
        let stream = TcpStream::connect((self.host.as_str(), self.port))
            .await
            .map_err(|error| format!("Get {url:?}: dial tcp {}: {}", self.authority(), dial_error(&error)))?;
        let failed = |error: std::io::Error| match is_plaintext_response(&error) {
            true => format!("Get {url:?}: {PLAINTEXT_SERVER}"),
            false => format!("Get {url:?}: {error}"),
        };
        let response = if self.tls {
            // The name in the certificate of a pod is not known, so it is not verified. Upstream
            // does the same.
            let config = pki::unverified().map_err(|error| error.to_string())?;
            let name = ServerName::try_from(self.host.clone()).map_err(|error| error.to_string())?;
            let stream = TlsConnector::from(config).connect(name, stream).await.map_err(failed)?;
            self.exchange(stream).await
        } else {
            self.exchange(stream).await
        };
        let response = response.map_err(failed)?;
        let text = String::from_utf8_lossy(&response);
        let mut lines = text.lines();
        let code = lines.next().and_then(|line| line.split(' ').nth(1)?.parse().ok());
        let code = code.ok_or_else(|| format!("Get {url:?}: malformed HTTP response"))?;
        let headers = lines.take_while(|line| !line.is_empty());
        let mut pairs = headers.filter_map(|line| line.split_once(':'));
        let location = pairs.find(|(name, _)| name.eq_ignore_ascii_case("location"));
        Ok(HttpResponse { code, location: location.map(|(_, value)| value.trim().to_owned()) })
    }

    async fn exchange(&self, mut stream: impl AsyncRead + AsyncWrite + Unpin) -> std::io::Result<Vec<u8>> {
        stream.write_all(self.encode_request().as_bytes()).await?;
        let mut response = Vec::new();
        match stream.take(MAX_RESPONSE_BYTES as u64).read_to_end(&mut response).await {
            // Many servers close the connection without `close_notify` after the response.
            Err(error) if response.is_empty() => Err(error),
            _ => Ok(response),
        }
    }

    fn encode_request(&self) -> String {
        let mut headers = String::new();
        let mut push_header = |name: &str, value: &str, named: &str| {
            headers += &format!("{name}: {value}\r\n");
            name.eq_ignore_ascii_case(named)
        };
        let (mut host, mut agent, mut accept) = (false, false, false);
        for header in &self.headers {
            // A line break in a value would start another header.
            let value: String = header.value.chars().filter(|character| !character.is_control()).collect();
            host |= push_header(&header.name, &value, "host");
            agent |= header.name.eq_ignore_ascii_case("user-agent");
            accept |= header.name.eq_ignore_ascii_case("accept");
        }
        for (missing, name, value) in [
            (!host, "Host", self.authority().as_str()),
            (!agent, "User-Agent", &format!("kube-{}/1.36", self.purpose)),
            (!accept, "Accept", "*/*"),
        ] {
            if missing {
                push_header(name, value, "");
            }
        }
        format!("GET {} HTTP/1.1\r\n{headers}Connection: close\r\n\r\n", self.path)
    }

    /// The target of a redirect, if it is on the same host.
    fn resolve_redirect(&self, to: &str) -> Option<HttpGetRequest> {
        if let Some(path) = to.strip_prefix('/').filter(|rest| !rest.starts_with('/')) {
            return Some(HttpGetRequest { path: format!("/{path}"), ..self.clone() });
        }
        let url: http::Uri = to.parse().ok()?;
        let tls = match url.scheme_str()? {
            "http" => false,
            "https" => true,
            _ => return None,
        };
        if url.host()?.trim_matches(['[', ']']) != self.host {
            return None;
        }
        let port = url.port_u16().unwrap_or(if tls { 443 } else { 80 });
        let path = url.path_and_query().map_or("/", |path| path.as_str()).to_owned();
        Some(HttpGetRequest { tls, port, path, ..self.clone() })
    }
}

/// Calls gRPC's health service.
pub async fn grpc(host: &str, port: u16, service: &str, timeout: Duration) -> Result<(), String> {
    let address = join_host_port(host, port);
    let seconds = timeout.as_secs();
    let started = tokio::time::Instant::now();
    let connect = TcpStream::connect((host, port));
    let stream = match tokio::time::timeout(timeout, connect).await {
        Ok(Ok(stream)) => stream,
        // grpc-go dials blocking for probes: it retries until the timeout, whatever the error is.
        _ => {
            return Err(format!(
                "timeout: failed to connect service {address:?} within {seconds}s: context deadline exceeded"
            ));
        }
    };
    let left = timeout.saturating_sub(started.elapsed());
    let response = match tokio::time::timeout(left, check_grpc_health(stream, &address, service)).await {
        Ok(response) => response.map_err(|error| format!("error: health rpc probe failed: {error}"))?,
        Err(_) => return Err(format!("timeout: health rpc did not complete within {seconds}s")),
    };
    match response {
        GrpcHealth::Status(1) => Ok(()),
        GrpcHealth::Status(number) => {
            let name = usize::try_from(number).ok().and_then(|number| GRPC_SERVING_STATUS.get(number));
            let name = name.map_or_else(|| number.to_string(), |name| (*name).to_owned());
            Err(format!("service unhealthy (responded with {name:?})"))
        }
        GrpcHealth::Failed { code, message } if code == GRPC_UNIMPLEMENTED => Err(format!(
            "error: this server does not implement the grpc health protocol (grpc.health.v1.Health): {message}"
        )),
        GrpcHealth::Failed { code, message } => {
            Err(format!("error: health rpc probe failed: rpc error: code = {code} desc = {message}"))
        }
    }
}

/// The result of a health check.
#[derive(Debug, PartialEq)]
enum GrpcHealth {
    Status(u64),
    Failed { code: String, message: String },
}

async fn check_grpc_health(stream: TcpStream, address: &str, service: &str) -> Result<GrpcHealth, String> {
    let to_message = |error: &dyn std::fmt::Display| error.to_string();
    let handshake = hyper::client::conn::http2::handshake(TokioExecutor::new(), TokioIo::new(stream));
    let (mut sender, connection) = handshake.await.map_err(|error| to_message(&error))?;
    let connection_task = tokio::spawn(connection);
    let request = Request::post(format!("http://{address}/grpc.health.v1.Health/Check"))
        .header("content-type", "application/grpc")
        .header("te", "trailers")
        .header("user-agent", "kube-probe/1.36")
        .body(Full::new(encode_health_request(service)))
        .map_err(|error| to_message(&error))?;
    let response = async {
        let (parts, body) =
            sender.send_request(request).await.map_err(|error| to_message(&error))?.into_parts();
        let body =
            Limited::new(body, MAX_RESPONSE_BYTES).collect().await.map_err(|error| to_message(&error))?;
        let trailers = body.trailers().cloned().unwrap_or_default();
        let text = |name: &str| {
            let value = trailers.get(name).or_else(|| parts.headers.get(name));
            value.and_then(|value| value.to_str().ok()).unwrap_or_default().to_owned()
        };
        let code = text("grpc-status");
        if code != "0" && !code.is_empty() {
            return Ok(GrpcHealth::Failed { code, message: text("grpc-message") });
        }
        Ok(GrpcHealth::Status(decode_health_status(&body.to_bytes())))
    };
    let response = response.await;
    connection_task.abort();
    response
}

/// Encodes a HealthCheckRequest with gRPC's frame header. The service name is field 1.
fn encode_health_request(service: &str) -> Bytes {
    let mut message = Vec::new();
    if !service.is_empty() {
        message.push(0x0a);
        let mut length = service.len();
        while length >= 0x80 {
            message.push((length & 0x7f) as u8 | 0x80);
            length >>= 7;
        }
        message.push(length as u8);
        message.extend(service.as_bytes());
    }
    let mut frame = vec![0];
    frame.extend(u32::try_from(message.len()).unwrap_or(0).to_be_bytes());
    frame.extend(message);
    frame.into()
}

/// Decodes the status from a framed HealthCheckResponse: field 1, or 0 if it is missing.
fn decode_health_status(frame: &[u8]) -> u64 {
    match frame.get(5..) {
        Some([0x08, rest @ ..]) => {
            let digits = rest.iter().take(9).enumerate();
            let mut value = 0;
            for (i, byte) in digits {
                value |= u64::from(byte & 0x7f) << (7 * i);
                if byte & 0x80 == 0 {
                    break;
                }
            }
            value
        }
        _ => 0,
    }
}

/// Whether the peer's first bytes are not a TLS record.
fn is_plaintext_response(error: &std::io::Error) -> bool {
    use rustls::{Error, InvalidMessage};
    let inner = error.get_ref().and_then(|inner| inner.downcast_ref::<Error>());
    inner == Some(&Error::InvalidMessage(InvalidMessage::InvalidContentType))
}

fn join_host_port(host: &str, port: u16) -> String {
    if host.contains(':') { format!("[{host}]:{port}") } else { format!("{host}:{port}") }
}

fn dial_error(error: &std::io::Error) -> String {
    match error.kind() {
        std::io::ErrorKind::ConnectionRefused => "connect: connection refused".to_owned(),
        std::io::ErrorKind::HostUnreachable => "connect: no route to host".to_owned(),
        std::io::ErrorKind::NetworkUnreachable => "connect: network is unreachable".to_owned(),
        _ => error.to_string(),
    }
}

#[cfg(test)]
mod tests;
