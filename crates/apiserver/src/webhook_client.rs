//! Client for webhooks that API objects configure by `clientConfig`: URL or Service, with a CA
//! bundle.
//!
//! A [`WebhookClient`] is created when its object changes and keeps connections open. Calls return
//! the bytes of the response, or an error in upstream's wording.

use std::error::Error as _;
use std::time::Duration;

use api::field::quote;
use api::json::JsonExt as _;
use base64::Engine as _;
use base64::engine::general_purpose::STANDARD;
use bytes::Bytes;
use http::Method;
use serde_json::Value;

use crate::endpoints;
use crate::https::{self, AuthInfoResolver, Credentials, HttpReply, HttpsClient};
use crate::server::Server;

/// Client for one `clientConfig`.
pub struct WebhookClient {
    client: HttpsClient,
    /// `https://host:port` for error messages.
    origin: String,
    path: String,
    service: Option<(String, String, u16)>,
}

/// Why a call failed.
#[derive(Debug, PartialEq)]
pub struct CallFailure {
    pub message: String,
    /// The HTTP status code that stands for the error.
    pub code: u16,
}

impl CallFailure {
    fn unavailable(message: String) -> CallFailure {
        CallFailure { message, code: 503 }
    }
}

impl WebhookClient {
    /// From a `clientConfig`. `users` has our client credentials by server name.
    pub fn new(config: &Value, users: Option<&AuthInfoResolver>) -> Result<WebhookClient, String> {
        let bundle = config.text("caBundle");
        let authorities = match bundle {
            "" => None,
            bundle => {
                let pem = STANDARD.decode(bundle).ok().and_then(|pem| String::from_utf8(pem).ok());
                Some(pem.ok_or("unable to load root certificates: unable to parse bytes as PEM block")?)
            }
        };
        let credentials = |server: &str| {
            let own = users.map_or_else(|| Ok(Credentials::default()), |users| users.credentials(server));
            Ok::<_, String>(Credentials { authorities, ..own.map_err(|error| config_error_message(&error))? })
        };
        let service = config.at("service");
        if !service.is_null() {
            let (namespace, name) = (service.text("namespace"), service.text("name"));
            let port = service.int("port").and_then(|port| u16::try_from(port).ok()).unwrap_or(443);
            let origin = format!("https://{name}.{namespace}.svc:{port}");
            let credentials = credentials(&format!("{name}.{namespace}.svc:{port}"))?;
            let client =
                HttpsClient::new(&origin, credentials).map_err(|error| config_error_message(&error))?;
            let service = Some((namespace.to_owned(), name.to_owned(), port));
            return Ok(WebhookClient { client, origin, path: clean_path(service_path(config)), service });
        }
        let url = config.text("url");
        let authority = url.parse::<http::Uri>().ok().and_then(|uri| uri.authority().cloned());
        let server = authority.map(|it| format!("{}:{}", it.host(), it.port_u16().unwrap_or(443)));
        let client = HttpsClient::new(url, credentials(&server.unwrap_or_default())?)
            .map_err(|error| config_error_message(&error))?;
        let start = url.find("//").map_or(0, |at| at + 2);
        let (origin, path) = match url.get(start..).and_then(|rest| rest.find('/')) {
            Some(slash) => url.split_at(start + slash),
            None => (url, ""),
        };
        Ok(WebhookClient { client, origin: origin.to_owned(), path: clean_path(path), service: None })
    }

    /// Posts JSON and returns the JSON response.
    pub async fn post(&self, server: &Server, body: Bytes, timeout: Duration) -> Result<Bytes, CallFailure> {
        let path = format!("{}?timeout={}s", self.path, timeout.as_secs());
        let failed = |reason: String| {
            CallFailure::unavailable(format!("Post {}: {reason}", quote(&format!("{}{path}", self.origin))))
        };
        let resolve = || match &self.service {
            Some((namespace, name, port)) => endpoints::resolve(server, namespace, name, *port),
            None => Err("the webhook has no Service".to_owned()),
        };
        let resolve: Option<https::Resolve<'_>> = self.service.is_some().then_some(&resolve);
        let exchange = self.client.exchange(Method::POST, &path, body, resolve);
        match tokio::time::timeout(timeout, exchange).await {
            Err(_) => Err(failed("context deadline exceeded".to_owned())),
            Ok(Err(error)) => Err(failed(upstream_message(&error))),
            Ok(Ok(reply)) if (200..=206).contains(&reply.status) => Ok(reply.body),
            Ok(Ok(reply)) => Err(response_failure(&reply)),
        }
    }
}

fn service_path(config: &Value) -> &str {
    config.at("service").text("path")
}

/// As Go's `path.Join`: absolute, no empty elements, no trailing slash.
fn clean_path(path: &str) -> String {
    let steps: Vec<&str> = path.split('/').filter(|step| !step.is_empty()).collect();
    format!("/{}", steps.join("/"))
}

fn config_error_message(error: &https::ConfigError) -> String {
    match error.source() {
        Some(source) => format!("{error}: {source}"),
        None => error.to_string(),
    }
}

/// The error for an HTTP status, in the wording of client-go.
fn response_failure(reply: &HttpReply) -> CallFailure {
    let code = reply.status;
    let status_body: Value = serde_json::from_slice(&reply.body).unwrap_or_default();
    if status_body.text("kind") == "Status"
        && status_body.text("status") == "Failure"
        && status_body.has("message")
    {
        return CallFailure { message: status_body.text("message").to_owned(), code };
    }
    let text = match reply.content_type.starts_with("text/") {
        true => String::from_utf8_lossy(&reply.body).trim().to_owned(),
        false => "unknown".to_owned(),
    };
    let message = match code {
        400 => "the server rejected our request for an unknown reason",
        401 => "the server has asked for the client to provide credentials",
        403 | 415 => &text,
        404 => "the server could not find the requested resource",
        405 => "the server does not allow this method on the requested resource",
        409 => "the server reported a conflict",
        422 => "the server rejected our request due to an error in our request",
        429 => "the server has received too many requests and has asked us to try again later",
        503 => "the server is currently unable to handle the request",
        504 => {
            "the server was unable to return a response in the time allotted, but may still be processing the request"
        }
        500.. => {
            let text = quote(&text);
            let message =
                format!("an error on the server ({text}) has prevented the request from succeeding");
            return CallFailure { message, code };
        }
        _ => {
            let message = format!(
                "the server responded with the status code {code} but did not return more information"
            );
            return CallFailure { message, code };
        }
    };
    CallFailure { message: message.to_owned(), code }
}

/// The error for a failed connection, in the wording of Go's net packages.
fn upstream_message(error: &https::Error) -> String {
    match error {
        https::Error::Connect { host, port, source } => {
            let tls = source.get_ref().and_then(|inner| inner.downcast_ref::<rustls::Error>());
            match (tls, source.kind()) {
                (Some(error), _) => certificate_message(error),
                (_, std::io::ErrorKind::ConnectionRefused) => {
                    format!("dial tcp {}: connect: connection refused", host_port(host, *port))
                }
                (_, std::io::ErrorKind::UnexpectedEof) => "EOF".to_owned(),
                _ => format!("dial tcp {}: {source}", host_port(host, *port)),
            }
        }
        https::Error::Http { source, .. } if source.is_incomplete_message() => "EOF".to_owned(),
        https::Error::Http { source, .. } => source.to_string(),
        https::Error::Body { .. } => "http: response body too large".to_owned(),
        other => other.to_string(),
    }
}

pub fn host_port(host: &str, port: u16) -> String {
    if host.contains(':') { format!("[{host}]:{port}") } else { format!("{host}:{port}") }
}

pub fn certificate_message(error: &rustls::Error) -> String {
    use rustls::CertificateError as E;
    let reason = match error {
        rustls::Error::InvalidCertificate(E::UnknownIssuer) => "certificate signed by unknown authority",
        rustls::Error::InvalidCertificate(E::Expired | E::ExpiredContext { .. }) => {
            "certificate has expired or is not yet valid"
        }
        rustls::Error::InvalidCertificate(E::NotValidForName | E::NotValidForNameContext { .. }) => {
            "certificate is not valid for this name"
        }
        other => return format!("remote error: tls: {other}"),
    };
    format!("tls: failed to verify certificate: x509: {reason}")
}

#[cfg(test)]
mod tests {
    use serde_json::json;

    use super::*;

    #[test]
    fn reads_webhook_addresses() {
        #[track_caller]
        fn check(config: Value, expected: &str) {
            let found =
                WebhookClient::new(&config, None).map(|found| format!("{} {}", found.origin, found.path));
            assert_eq!(found.unwrap_or_else(|reason| reason), expected);
        }
        // Any valid certificate serves as a CA here.
        let dir = tempfile::tempdir().unwrap();
        let ca = pki::Authority::load_or_create(dir.path(), "ca", jiff::Timestamp::now()).unwrap();
        let bundle = STANDARD.encode(ca.pem());
        let url = |url: &str| json!({"url": url, "caBundle": bundle});
        check(url("https://h.example:8443/a//b/"), "https://h.example:8443 /a/b");
        check(url("https://h.example"), "https://h.example /");
        check(
            json!({"service": {"namespace": "n", "name": "s", "path": "x", "port": 8443}, "caBundle": bundle}),
            "https://s.n.svc:8443 /x",
        );
        check(
            json!({"service": {"namespace": "n", "name": "s"}, "caBundle": bundle}),
            "https://s.n.svc:443 /",
        );
        check(
            json!({"url": "https://h/", "caBundle": "aHVzaA=="}),
            "invalid certificate authority for \"https://h/\"",
        );
    }

    #[test]
    fn maps_error_responses_to_upstream_messages() {
        #[track_caller]
        fn check(status: u16, content_type: &str, body: &str, expected: &str) {
            let reply = HttpReply { status, content_type: content_type.into(), body: body.to_owned().into() };
            assert_eq!(response_failure(&reply).message, expected);
        }
        let server = "an error on the server (\"boom\") has prevented the request from succeeding";
        check(500, "text/plain; charset=utf-8", "boom\n", server);
        check(500, "application/json", "{}", &server.replace("boom", "unknown"));
        check(500, "application/json", r#"{"kind":"Status","status":"Failure","message":"no"}"#, "no");
        check(404, "text/plain", "x", "the server could not find the requested resource");
        check(403, "text/plain", "go away", "go away");
        check(
            302,
            "",
            "",
            "the server responded with the status code 302 but did not return more information",
        );
    }
}
