//! HTTP client for one repository of a registry: authentication, redirects, timeouts and errors.
//!
//! Counterpart upstream: containerd's `core/remotes/docker` (resolver and authorizer).

use std::path::Path;
use std::sync::Arc;
use std::time::Duration;

use bytes::Bytes;
use http::{Method, Request, Response, StatusCode, Uri, header};
use http_body_util::{BodyExt as _, Full, Limited};
use hyper::body::{Body, Incoming};
use hyper_rustls::HttpsConnector;
use hyper_util::client::legacy::Client;
use hyper_util::rt::TokioExecutor;
use rustls::pki_types::pem::PemObject as _;
use rustls::pki_types::{CertificateDer, PrivateKeyDer};
use serde::Deserialize;
use tokio::sync::Mutex;

use super::proxy::{Connector, Proxies};
use super::settings::{RegistryHost, Tls};
use super::{Credentials, PullError};
use crate::{Digest, Error, Reference, file_error};

const MAX_REDIRECTS: usize = 5;
const MAX_TOKEN_BYTES: usize = 1 << 20;
/// Limits for the body of an error response. The message is useful, but not worth a long wait.
const MAX_ERROR_BODY_BYTES: usize = 8 << 10;
const ERROR_BODY_TIMEOUT: Duration = Duration::from_secs(5);
/// The CA bundles of common distributions, as in Go's `crypto/x509`.
const SYSTEM_CA_BUNDLES: [&str; 4] = [
    "/etc/ssl/certs/ca-certificates.crt",
    "/etc/pki/tls/certs/ca-bundle.crt",
    "/etc/ssl/ca-bundle.pem",
    "/etc/ssl/cert.pem",
];
const ACCEPT_MANIFESTS: &str = "application/vnd.oci.image.manifest.v1+json, application/vnd.oci.image.index.v1+json, \
    application/vnd.docker.distribution.manifest.v2+json, \
    application/vnd.docker.distribution.manifest.list.v2+json, */*";

/// Timeouts and backoff.
#[derive(Clone, Copy, Debug)]
pub struct RegistryTimeouts {
    /// Until the response headers are received.
    pub header_timeout: Duration,
    /// Until the next bytes of the body are received. With all attempts this adds up to the five
    /// minutes that containerd waits for progress.
    pub read_timeout: Duration,
    /// Before the first retry. Doubles with each attempt.
    pub initial_backoff: Duration,
}

impl Default for RegistryTimeouts {
    fn default() -> RegistryTimeouts {
        let [header_timeout, read_timeout] = [30, 60].map(Duration::from_secs);
        RegistryTimeouts { header_timeout, read_timeout, initial_backoff: Duration::from_millis(250) }
    }
}

/// A request to the repository.
pub struct RegistryRequest {
    path: String,
    /// The first byte of a range request. 0 requests the whole blob.
    from: u64,
    is_manifest: bool,
    method: Method,
}

impl RegistryRequest {
    pub fn manifest(which: &str) -> RegistryRequest {
        RegistryRequest {
            path: format!("manifests/{which}"),
            from: 0,
            is_manifest: true,
            method: Method::GET,
        }
    }

    /// A HEAD request for a manifest.
    pub fn head(which: &str) -> RegistryRequest {
        RegistryRequest { method: Method::HEAD, ..RegistryRequest::manifest(which) }
    }

    pub fn blob(digest: &Digest, from: u64) -> RegistryRequest {
        RegistryRequest { path: format!("blobs/{digest}"), from, is_manifest: false, method: Method::GET }
    }
}

/// A client for one repository.
pub struct Registry {
    http: Client<HttpsConnector<Connector>, Full<Bytes>>,
    proxies: Arc<Proxies>,
    host: RegistryHost,
    name: Reference,
    credentials: Option<Credentials>,
    /// The `Authorization` header of the last successful challenge, or the configured token.
    authorization: Mutex<Option<String>>,
    pub timeouts: RegistryTimeouts,
}

impl Registry {
    pub fn new(
        host: RegistryHost,
        name: &Reference,
        credentials: Option<Credentials>,
        timeouts: RegistryTimeouts,
        proxies: Arc<Proxies>,
    ) -> Result<Registry, Error> {
        let mut roots = rustls::RootCertStore::empty();
        let read = |path: &Path| -> Result<Vec<CertificateDer<'static>>, Error> {
            let pem = std::fs::read(path).map_err(file_error("read", path))?;
            Ok(CertificateDer::pem_slice_iter(&pem).flatten().collect())
        };
        // Invalid certificates in a bundle are skipped.
        for path in SYSTEM_CA_BUNDLES.iter().map(Path::new).filter(|path| path.exists()) {
            roots.add_parsable_certificates(read(path)?);
        }
        // The configured file may contain a CA or the self-signed certificate of the registry
        // itself.
        let named = host.tls.ca_file.as_deref().map(read).transpose()?;
        roots.add_parsable_certificates(named.iter().flatten().cloned());
        let provider = Arc::new(rustls::crypto::ring::default_provider());
        let what = |reason: String| Error::Unusable { what: host.host.clone(), reason };
        let invalid = |error: rustls::Error| what(error.to_string());
        let verifier = match named {
            _ if host.tls.insecure_skip_verify => Some(pki::insecure_verifier()),
            Some(own) => Some(
                pki::server_verifier_with_self_signed(roots.clone(), own)
                    .map_err(|error| what(error.to_string()))?,
            ),
            None => None,
        };
        let tls = rustls::ClientConfig::builder_with_provider(provider)
            .with_safe_default_protocol_versions()
            .map_err(invalid)?
            .with_root_certificates(roots);
        let mut tls = match client_identity(&host.tls)? {
            Some((chain, key)) => tls.with_client_auth_cert(chain, key).map_err(invalid)?,
            None => tls.with_no_client_auth(),
        };
        if let Some(verifier) = verifier {
            tls.dangerous().set_certificate_verifier(verifier);
        }
        let connector = hyper_rustls::HttpsConnectorBuilder::new()
            .with_tls_config(tls)
            .https_or_http()
            .enable_http1()
            .wrap_connector(Connector::new(proxies.clone()));
        let http = Client::builder(TokioExecutor::new()).build(connector);
        let key = credentials
            .as_ref()
            .filter(|known| !known.token.is_empty())
            .map(|known| format!("Bearer {}", known.token));
        Ok(Registry {
            http,
            proxies,
            host,
            name: name.clone(),
            credentials,
            authorization: Mutex::new(key),
            timeouts,
        })
    }

    /// Sends a request and reads the whole response body, up to `limit` bytes.
    pub async fn get_bytes(
        &self,
        registry_request: &RegistryRequest,
        limit: usize,
    ) -> Result<Bytes, PullError> {
        let (url, response) = self.get(registry_request).await?;
        read_body(url, response, limit, self.timeouts).await
    }

    /// Sends a request. Handles an authentication challenge and follows redirects.
    pub async fn get(
        &self,
        registry_request: &RegistryRequest,
    ) -> Result<(String, Response<Incoming>), PullError> {
        let RegistryHost { scheme, host, path, repository, .. } = &self.host;
        let mut url = format!("{scheme}://{host}{path}/{repository}/{}", registry_request.path);
        if self.host.is_mirror_of(&self.name.registry) {
            // A mirror of several registries needs the original registry. containerd uses the query
            // parameter `ns` for it.
            url += &format!("?ns={}", percent_encode(&self.name.registry));
        }
        let mut key = self.authorization.lock().await.clone();
        for is_first in [true, false] {
            let (end, response) = self.follow_redirects(&url, registry_request, key.clone()).await?;
            match response.status() {
                status if status.is_success() => return Ok((url, response)),
                // Only the registry itself may request credentials, not the target of a redirect to
                // another host.
                StatusCode::UNAUTHORIZED if is_first && origin(&end) == origin(&url) => {
                    let all = response.headers().get_all(header::WWW_AUTHENTICATE).iter();
                    let best = all
                        .filter_map(|value| value.to_str().ok())
                        .max_by_key(|detail| challenge_preference(detail));
                    let challenge = best.unwrap_or_default().to_owned();
                    key = self.authorize(&challenge).await?;
                    self.authorization.lock().await.clone_from(&key);
                }
                StatusCode::UNAUTHORIZED | StatusCode::FORBIDDEN => {
                    let reason = "authorization failed".to_owned();
                    return Err(PullError::Denied { name: self.name.to_string(), reason });
                }
                StatusCode::NOT_FOUND => return Err(PullError::NotFound { name: self.name.to_string() }),
                _ => return Err(self.status_error(url, response).await),
            }
        }
        Err(PullError::Denied { name: self.name.to_string(), reason: "authorization failed".to_owned() })
    }

    /// Sends a request and follows redirects. Returns the final URL with the response.
    async fn follow_redirects(
        &self,
        url: &str,
        registry_request: &RegistryRequest,
        key: Option<String>,
    ) -> Result<(String, Response<Incoming>), PullError> {
        let mut url = url.to_owned();
        let mut key = key;
        for _ in 0..MAX_REDIRECTS {
            let request = Request::builder().method(registry_request.method.clone()).uri(&url);
            let mut request = request.header(header::USER_AGENT, "skiff");
            if registry_request.is_manifest {
                request = request.header(header::ACCEPT, ACCEPT_MANIFESTS);
            }
            if registry_request.from > 0 {
                request = request.header(header::RANGE, format!("bytes={}-", registry_request.from));
            }
            if let Some(key) = &key {
                request = request.header(header::AUTHORIZATION, sensitive_header(key)?);
            }
            let response = self.send(&url, request, Bytes::new()).await?;
            let location = response.headers().get(header::LOCATION).and_then(|value| value.to_str().ok());
            let Some(location) = location.filter(|_| response.status().is_redirection()) else {
                return Ok((url, response));
            };
            let next = resolve_location(&url, location);
            if origin(&next) != origin(&url) {
                // Credentials must not be sent to another origin.
                key = None;
            }
            url = next;
        }
        Err(PullError::Unreachable { method: "GET", url, reason: "too many redirects".to_owned() })
    }

    async fn send(
        &self,
        url: &str,
        request: http::request::Builder,
        body: Bytes,
    ) -> Result<Response<Incoming>, PullError> {
        let method = if body.is_empty() { "GET" } else { "POST" };
        let failed = |reason: String| PullError::Unreachable { method, url: url.to_owned(), reason };
        let mut request = request.body(Full::new(body)).map_err(|error| failed(error.to_string()))?;
        if let Some(key) = self.proxies.proxy_authorization(request.uri()) {
            request.headers_mut().insert(header::PROXY_AUTHORIZATION, key);
        }
        match tokio::time::timeout(self.timeouts.header_timeout, self.http.request(request)).await {
            Ok(Ok(response)) => Ok(response),
            Ok(Err(error)) => Err(failed(root_cause(&error))),
            Err(_) => Err(failed("timeout awaiting response headers".to_owned())),
        }
    }

    /// Converts a response with an unexpected status to an error, with the messages of its body and
    /// its `Retry-After`.
    async fn status_error(&self, url: String, response: Response<Incoming>) -> PullError {
        let status = response.status();
        let after = response.headers().get(header::RETRY_AFTER).and_then(|value| value.to_str().ok());
        // `Retry-After` may also be an HTTP date. Registries do not use that form; it is ignored.
        let after = after.and_then(|text| text.trim().parse().ok()).map(Duration::from_secs);
        let timeouts = RegistryTimeouts { read_timeout: ERROR_BODY_TIMEOUT, ..self.timeouts };
        let detail = read_body(url.clone(), response, MAX_ERROR_BODY_BYTES, timeouts).await;
        let detail = detail.map(|body| error_messages(&body)).unwrap_or_default();
        PullError::Status { method: "GET", url, status, errors: detail, after }
    }

    /// Answers a `WWW-Authenticate` challenge. Returns the value of the `Authorization` header.
    async fn authorize(&self, challenge: &str) -> Result<Option<String>, PullError> {
        let denied =
            |reason: &str| PullError::Denied { name: self.name.to_string(), reason: reason.to_owned() };
        let basic = self.credentials.as_ref().and_then(Credentials::basic);
        let (kind, rest) = challenge.split_once(' ').unwrap_or((challenge, ""));
        if kind.eq_ignore_ascii_case("basic") {
            return basic.map(Some).ok_or_else(|| denied("no basic auth credentials"));
        }
        if !kind.eq_ignore_ascii_case("bearer") {
            return Err(denied("authorization failed"));
        }
        let field = |name: &str| parameter(rest, name);
        let realm = field("realm").ok_or_else(|| denied("authorization failed"))?;
        let scope = field("scope").unwrap_or_else(|| format!("repository:{}:pull", self.host.repository));
        let mut query = format!("scope={}", percent_encode(&scope));
        if let Some(service) = field("service") {
            query += &format!("&service={}", percent_encode(&service));
        }
        let identity = self.credentials.as_ref().map_or("", |known| known.identity_token.as_str());
        let (url, response);
        if identity.is_empty() {
            let joint = if realm.contains('?') { '&' } else { '?' };
            let registry_request =
                RegistryRequest { path: String::new(), from: 0, is_manifest: false, method: Method::GET };
            (url, response) =
                self.follow_redirects(&format!("{realm}{joint}{query}"), &registry_request, basic).await?;
        } else {
            url = realm;
            let form = "application/x-www-form-urlencoded";
            let request =
                Request::post(&url).header(header::USER_AGENT, "skiff").header(header::CONTENT_TYPE, form);
            let grant = "grant_type=refresh_token&client_id=skiff&refresh_token=";
            let body = format!("{query}&{grant}{}", percent_encode(identity));
            response = self.send(&url, request, body.into()).await?;
        }
        match response.status() {
            status if status.is_success() => {}
            // An overloaded token server says nothing about the credentials. The error must allow a
            // retry.
            StatusCode::REQUEST_TIMEOUT | StatusCode::TOO_MANY_REQUESTS => {
                return Err(self.status_error(url, response).await);
            }
            status if status.is_server_error() => return Err(self.status_error(url, response).await),
            _ => return Err(denied("authorization failed")),
        }
        #[derive(Deserialize)]
        struct Token {
            #[serde(default)]
            token: String,
            #[serde(default)]
            access_token: String,
        }
        let bytes = read_body(url, response, MAX_TOKEN_BYTES, self.timeouts).await?;
        let token: Token = crate::manifest::parse("the token response", &bytes)?;
        let token = if token.token.is_empty() { token.access_token } else { token.token };
        Ok(Some(format!("Bearer {token}")))
    }
}

/// The client certificate and key, if configured.
fn client_identity(
    tls: &Tls,
) -> Result<Option<(Vec<CertificateDer<'static>>, PrivateKeyDer<'static>)>, Error> {
    let (Some(certificate), Some(key)) = (&tls.cert_file, &tls.key_file) else { return Ok(None) };
    let read = |path: &Path| std::fs::read(path).map_err(file_error("read", path));
    let invalid = |path: &Path, what: &str| Error::Unusable {
        what: path.display().to_string(),
        reason: format!("it has no {what}"),
    };
    let pem = read(certificate)?;
    let chain: Vec<_> = CertificateDer::pem_slice_iter(&pem).flatten().collect();
    if chain.is_empty() {
        return Err(invalid(certificate, "certificate"));
    }
    let key_der = PrivateKeyDer::from_pem_slice(&read(key)?).map_err(|_| invalid(key, "private key"))?;
    Ok(Some((chain, key_der)))
}

async fn read_body(
    url: String,
    response: Response<Incoming>,
    limit: usize,
    timeouts: RegistryTimeouts,
) -> Result<Bytes, PullError> {
    let mut body = Limited::new(response.into_body(), limit);
    let mut whole = Vec::new();
    while let Some(bytes) = next_chunk(&url, &mut body, timeouts).await? {
        whole.extend_from_slice(&bytes);
    }
    Ok(whole.into())
}

/// The next chunk of a response body. Fails if nothing is received within `read_timeout`.
pub async fn next_chunk<B>(
    url: &str,
    body: &mut B,
    timeouts: RegistryTimeouts,
) -> Result<Option<Bytes>, PullError>
where
    B: Body<Data = Bytes, Error: std::fmt::Display> + Unpin,
{
    let failed = |reason: String| PullError::Unreachable { method: "GET", url: url.to_owned(), reason };
    loop {
        match tokio::time::timeout(timeouts.read_timeout, body.frame()).await {
            Ok(None) => return Ok(None),
            Ok(Some(Ok(frame))) => {
                if let Ok(bytes) = frame.into_data() {
                    return Ok(Some(bytes));
                }
            }
            Ok(Some(Err(error))) => return Err(failed(error.to_string())),
            Err(_) => return Err(failed(format!("no data received for {:?}", timeouts.read_timeout))),
        }
    }
}

/// The errors in a response body, formatted as containerd does.
fn error_messages(body: &[u8]) -> String {
    let body: serde_json::Value = serde_json::from_slice(body).unwrap_or_default();
    let text = |error: &serde_json::Value, name: &str| error[name].as_str().unwrap_or_default().to_owned();
    let reason = |error| {
        format!("\n{}: {}", text(error, "code").to_lowercase().replace('_', " "), text(error, "message"))
    };
    body["errors"].as_array().into_iter().flatten().map(reason).collect()
}

fn sensitive_header(text: &str) -> Result<header::HeaderValue, PullError> {
    let value = header::HeaderValue::from_str(text);
    let mut value = value.map_err(|_| Error::Unusable {
        what: "the credentials".to_owned(),
        reason: "they contain characters that are invalid in an HTTP header".to_owned(),
    })?;
    value.set_sensitive(true);
    Ok(value)
}

/// Ranks authentication schemes. Bearer is preferred over basic.
fn challenge_preference(challenge: &str) -> u8 {
    let kind = challenge.split(' ').next().unwrap_or_default();
    match kind.to_ascii_lowercase().as_str() {
        "bearer" => 2,
        "basic" => 1,
        _ => 0,
    }
}

/// A parameter of a challenge such as `realm="https://…",service="…"`.
fn parameter(text: &str, name: &str) -> Option<String> {
    let mut rest = text;
    while let Some((key, behind)) = rest.split_once('=') {
        let (value, next) = match behind.strip_prefix('"') {
            Some(quoted) => quoted.split_once('"')?,
            None => behind.split_once(',').unwrap_or((behind, "")),
        };
        if key.trim().trim_start_matches(',').trim().eq_ignore_ascii_case(name) {
            return Some(value.to_owned());
        }
        rest = next.trim_start_matches(',');
    }
    None
}

fn percent_encode(text: &str) -> String {
    let plain = |byte: u8| byte.is_ascii_alphanumeric() || b"-._~/:,".contains(&byte);
    text.bytes()
        .map(|byte| if plain(byte) { char::from(byte).to_string() } else { format!("%{byte:02X}") })
        .collect()
}

/// Resolves the `Location` of a redirect. Only absolute URLs and absolute paths are supported.
fn resolve_location(from: &str, location: &str) -> String {
    if location.contains("://") {
        return location.to_owned();
    }
    let uri: Option<Uri> = from.parse().ok();
    let base = uri.and_then(|uri| Some(format!("{}://{}", uri.scheme_str()?, uri.authority()?)));
    format!("{}{location}", base.unwrap_or_default())
}

fn origin(url: &str) -> Option<String> {
    let uri: Uri = url.parse().ok()?;
    Some(format!("{}://{}", uri.scheme_str()?, uri.authority()?))
}

/// The innermost source of a connection error. The outer errors only say that the request failed.
pub fn root_cause(error: &dyn std::error::Error) -> String {
    let mut last = error.to_string();
    let mut source = error.source();
    while let Some(cause) = source {
        last = cause.to_string();
        source = cause.source();
    }
    last
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn reads_challenge_parameters() {
        let text = r#"realm="https://auth.example/token",service="registry.example",scope="repository:a/b:pull,push""#;
        let found = ["realm", "service", "scope", "error"].map(|name| parameter(text, name));
        let expected = [
            Some("https://auth.example/token"),
            Some("registry.example"),
            Some("repository:a/b:pull,push"),
            None,
        ];
        assert_eq!(found.each_ref().map(Option::as_deref), expected);
        assert_eq!(parameter("realm", "realm"), None);
        assert_eq!(parameter("realm=\"cut", "realm"), None);
    }

    /// With `insecure_skip_verify`, an empty set of trusted CAs is valid.
    #[test]
    fn skip_verify_needs_no_system_ca() {
        let file = tempfile::NamedTempFile::new().expect("a file");
        let tls = Tls { ca_file: Some(file.path().to_owned()), insecure_skip_verify: true, ..Tls::default() };
        let host = RegistryHost {
            scheme: "https",
            host: "r.example:443".to_owned(),
            path: "/v2".to_owned(),
            repository: "a".to_owned(),
            tls,
        };
        let name = Reference::parse("r.example/a").expect("a name");
        assert!(Registry::new(host, &name, None, RegistryTimeouts::default(), Arc::default()).is_ok());
    }

    #[test]
    fn resolves_redirect_locations() {
        assert_eq!(resolve_location("https://a:1/v2/x", "/y?z"), "https://a:1/y?z");
        assert_eq!(resolve_location("https://a/v2/x", "http://b/y"), "http://b/y");
        assert_ne!(origin("https://a/x"), origin("http://a/x"));
    }
}
