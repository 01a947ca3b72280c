//! Asking what listens in a pod how it is: over TCP, HTTP, HTTPS and gRPC. An error is what people are told.

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

use crate::hooks::port;

/// What is read of an answer: enough to say what was wrong.
pub const MOST_READ: usize = 10 << 10;
const MOST_REDIRECTS: usize = 10;
/// What is said of a server that answers without TLS, where that was wanted.
const PLAIN: &str = "http: server gave HTTP response to HTTPS client";
/// What gRPC's health service answers with, by number.
const HEALTH: [&str; 4] = ["UNKNOWN", "SERVING", "NOT_SERVING", "SERVICE_UNKNOWN"];
const UNIMPLEMENTED: &str = "12";

/// Connects and hangs up.
pub async fn tcp(host: &str, port: u16, timeout: Duration) -> Result<(), String> {
    match tokio::time::timeout(timeout, TcpStream::connect((host, port))).await {
        Ok(Ok(_)) => Ok(()),
        Ok(Err(error)) => Err(format!("dial tcp {}: {}", shown(host, port), reason(&error))),
        Err(_) => Err(format!("dial tcp {}: i/o timeout", shown(host, port))),
    }
}

/// A page that is asked for.
#[derive(Clone, Debug, PartialEq)]
pub struct Page {
    tls: bool,
    host: String,
    port: u16,
    path: String,
    headers: Vec<HTTPHeader>,
    /// What it is asked for, which is part of the asker's name.
    purpose: &'static str,
}

/// How a page was called.
#[derive(Debug, PartialEq)]
pub enum Called {
    AsWanted,
    /// With TLS was wanted, but the server knows nothing of that.
    WithoutTls,
}

struct Answer {
    code: u16,
    location: Option<String>,
}

impl Page {
    /// The page that somebody means who has a probe or a hook in this container, at the host it names or else at `host`.
    pub fn of(
        container: &Container,
        host: &str,
        get: &HTTPGetAction,
        purpose: &'static str,
    ) -> Result<Page, String> {
        let named = get.host.as_deref().filter(|host| !host.is_empty());
        let path = get.path.as_deref().filter(|path| !path.is_empty()).unwrap_or("/");
        Ok(Page {
            tls: get.scheme.as_deref() == Some("HTTPS"),
            host: named.unwrap_or(host).to_owned(),
            port: port(container, &get.port)?,
            path: if path.starts_with('/') { path.to_owned() } else { format!("/{path}") },
            headers: get.http_headers.clone().unwrap_or_default(),
            purpose,
        })
    }

    /// Asks for the page; any answer from 200 to 399 is a good one.
    pub async fn probe(&self, timeout: Duration) -> Result<(), String> {
        match tokio::time::timeout(timeout, self.answer()).await {
            Ok(Ok(200..400)) => Ok(()),
            Ok(Ok(code)) => Err(format!("HTTP probe failed with statuscode: {code}")),
            Ok(Err(why)) => Err(why),
            Err(_) => Err(format!(
                "Get {:?}: context deadline exceeded (Client.Timeout exceeded while awaiting headers)",
                self.url()
            )),
        }
    }

    /// Asks for the page, however long that takes; any answer is a good one.
    pub async fn call(&self) -> Result<Called, String> {
        match self.answer().await {
            Err(why) if why.ends_with(PLAIN) => {
                // What is for one who proves who they are is not for everybody on the way.
                let is_open = |header: &&HTTPHeader| !header.name.eq_ignore_ascii_case("authorization");
                let headers = self.headers.iter().filter(is_open).cloned().collect();
                let page = Page { tls: false, headers, ..self.clone() };
                page.answer().await.map(|_| Called::WithoutTls).map_err(|_| why)
            }
            answer => answer.map(|_| Called::AsWanted),
        }
    }

    /// The host and the port.
    pub fn authority(&self) -> String {
        shown(&self.host, self.port)
    }

    fn url(&self) -> String {
        let scheme = if self.tls { "https" } else { "http" };
        format!("{scheme}://{}{}", self.authority(), self.path)
    }

    /// The code of the answer. Redirects on the same host are followed; one that leads elsewhere is an answer.
    async fn answer(&self) -> Result<u16, String> {
        let mut page = self.clone();
        for _ in 0..MOST_REDIRECTS {
            let Answer { code, location } = page.get().await?;
            let to = location.filter(|_| (300..400).contains(&code));
            match to.and_then(|to| page.on_same_host(&to)) {
                Some(next) => page = next,
                None => return Ok(code),
            }
        }
        Err(format!("Get {:?}: stopped after {MOST_REDIRECTS} redirects", page.url()))
    }

    async fn get(&self) -> Result<Answer, String> {
        let url = self.url();
        let stream = TcpStream::connect((self.host.as_str(), self.port))
            .await
            .map_err(|error| format!("Get {url:?}: dial tcp {}: {}", self.authority(), reason(&error)))?;
        let failed = |error: std::io::Error| match is_no_tls(&error) {
            true => format!("Get {url:?}: {PLAIN}"),
            false => format!("Get {url:?}: {error}"),
        };
        let answer = if self.tls {
            // Whom a certificate in a pod is for nobody knows.
            let config = pki::unverified().map_err(|error| error.to_string())?;
            let name = ServerName::try_from(self.host.clone()).map_err(|error| error.to_string())?;
            let stream = TlsConnector::from(config).connect(name, stream).await.map_err(failed)?;
            self.exchange(stream).await
        } else {
            self.exchange(stream).await
        };
        let answer = answer.map_err(failed)?;
        let text = String::from_utf8_lossy(&answer);
        let mut lines = text.lines();
        let code = lines.next().and_then(|line| line.split(' ').nth(1)?.parse().ok());
        let code = code.ok_or_else(|| format!("Get {url:?}: malformed HTTP response"))?;
        let headers = lines.take_while(|line| !line.is_empty());
        let mut pairs = headers.filter_map(|line| line.split_once(':'));
        let location = pairs.find(|(name, _)| name.eq_ignore_ascii_case("location"));
        Ok(Answer { code, location: location.map(|(_, value)| value.trim().to_owned()) })
    }

    async fn exchange(&self, mut stream: impl AsyncRead + AsyncWrite + Unpin) -> std::io::Result<Vec<u8>> {
        stream.write_all(self.request().as_bytes()).await?;
        let mut answer = Vec::new();
        match stream.take(MOST_READ as u64).read_to_end(&mut answer).await {
            // Many servers hang up without a word once they have said theirs.
            Err(error) if answer.is_empty() => Err(error),
            _ => Ok(answer),
        }
    }

    fn request(&self) -> String {
        let mut headers = String::new();
        let mut has = |name: &str, value: &str, named: &str| {
            headers += &format!("{name}: {value}\r\n");
            name.eq_ignore_ascii_case(named)
        };
        let (mut host, mut agent, mut accept) = (false, false, false);
        for header in &self.headers {
            // A line break would begin another header.
            let value: String = header.value.chars().filter(|character| !character.is_control()).collect();
            host |= has(&header.name, &value, "host");
            agent |= header.name.eq_ignore_ascii_case("user-agent");
            accept |= header.name.eq_ignore_ascii_case("accept");
        }
        for (missing, name, value) in [
            (!host, "Host", self.authority().as_str()),
            (!agent, "User-Agent", &format!("kube-{}/1.36", self.purpose)),
            (!accept, "Accept", "*/*"),
        ] {
            if missing {
                has(name, value, "");
            }
        }
        format!("GET {} HTTP/1.1\r\n{headers}Connection: close\r\n\r\n", self.path)
    }

    /// Where a redirect leads, if that is the same host.
    fn on_same_host(&self, to: &str) -> Option<Page> {
        if let Some(path) = to.strip_prefix('/').filter(|rest| !rest.starts_with('/')) {
            return Some(Page { path: format!("/{path}"), ..self.clone() });
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
        Some(Page { tls, port, path, ..self.clone() })
    }
}

/// Asks gRPC's health service.
pub async fn grpc(host: &str, port: u16, service: &str, timeout: Duration) -> Result<(), String> {
    let address = shown(host, port);
    let seconds = timeout.as_secs();
    let begun = tokio::time::Instant::now();
    let connect = TcpStream::connect((host, port));
    let stream = match tokio::time::timeout(timeout, connect).await {
        Ok(Ok(stream)) => stream,
        // A blocking dial goes on until its time is over, whatever the reason.
        _ => {
            return Err(format!(
                "timeout: failed to connect service {address:?} within {seconds}s: context deadline exceeded"
            ));
        }
    };
    let left = timeout.saturating_sub(begun.elapsed());
    let answer = match tokio::time::timeout(left, check(stream, &address, service)).await {
        Ok(answer) => answer.map_err(|error| format!("error: health rpc probe failed: {error}"))?,
        Err(_) => return Err(format!("timeout: health rpc did not complete within {seconds}s")),
    };
    match answer {
        Health::Status(1) => Ok(()),
        Health::Status(number) => {
            let name = usize::try_from(number).ok().and_then(|number| HEALTH.get(number));
            let name = name.map_or_else(|| number.to_string(), |name| (*name).to_owned());
            Err(format!("service unhealthy (responded with {name:?})"))
        }
        Health::Failed { code, message } if code == UNIMPLEMENTED => Err(format!(
            "error: this server does not implement the grpc health protocol (grpc.health.v1.Health): {message}"
        )),
        Health::Failed { code, message } => {
            Err(format!("error: health rpc probe failed: rpc error: code = {code} desc = {message}"))
        }
    }
}

/// What a health service says.
#[derive(Debug, PartialEq)]
enum Health {
    Status(u64),
    Failed { code: String, message: String },
}

async fn check(stream: TcpStream, address: &str, service: &str) -> Result<Health, String> {
    let told = |error: &dyn std::fmt::Display| error.to_string();
    let handshake = hyper::client::conn::http2::handshake(TokioExecutor::new(), TokioIo::new(stream));
    let (mut sender, connection) = handshake.await.map_err(|error| told(&error))?;
    let driving = tokio::spawn(connection);
    let request = Request::post(format!("http://{address}/grpc.health.v1.Health/Check"))
        .header("content-type", "application/grpc")
        .header("te", "trailers")
        .header("user-agent", "kube-probe/1.36")
        .body(Full::new(question(service)))
        .map_err(|error| told(&error))?;
    let answer = async {
        let (parts, body) = sender.send_request(request).await.map_err(|error| told(&error))?.into_parts();
        let body = Limited::new(body, MOST_READ).collect().await.map_err(|error| told(&error))?;
        let trailers = body.trailers().cloned().unwrap_or_default();
        let text = |name: &str| {
            let value = trailers.get(name).or_else(|| parts.headers.get(name));
            value.and_then(|value| value.to_str().ok()).unwrap_or_default().to_owned()
        };
        let code = text("grpc-status");
        if code != "0" && !code.is_empty() {
            return Ok(Health::Failed { code, message: text("grpc-message") });
        }
        Ok(Health::Status(status(&body.to_bytes())))
    };
    let answer = answer.await;
    driving.abort();
    answer
}

/// A HealthCheckRequest in gRPC's frame: the service is field 1.
fn question(service: &str) -> Bytes {
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

/// The status of a HealthCheckResponse in its frame, which is field 1, and 0 where it is left out.
fn status(frame: &[u8]) -> u64 {
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

/// Whether what came is nothing that TLS begins with.
fn is_no_tls(error: &std::io::Error) -> bool {
    use rustls::{Error, InvalidMessage};
    let inner = error.get_ref().and_then(|inner| inner.downcast_ref::<Error>());
    inner == Some(&Error::InvalidMessage(InvalidMessage::InvalidContentType))
}

fn shown(host: &str, port: u16) -> String {
    if host.contains(':') { format!("[{host}]:{port}") } else { format!("{host}:{port}") }
}

fn reason(error: &std::io::Error) -> String {
    match error.kind() {
        std::io::ErrorKind::ConnectionRefused => "connect: connection refused".to_owned(),
        std::io::ErrorKind::HostUnreachable => "connect: no route to host".to_owned(),
        std::io::ErrorKind::NetworkUnreachable => "connect: network is unreachable".to_owned(),
        _ => error.to_string(),
    }
}

#[cfg(test)]
mod tests;
