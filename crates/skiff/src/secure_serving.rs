//! The HTTPS server of a standalone component: health, metrics and its configuration.
//!
//! Health is public. Other paths require authentication (client certificates of the CA that the API
//! server publishes, or tokens by TokenReview) and authorization by SubjectAccessReview, as in
//! upstream's components.

use std::convert::Infallible;
use std::net::{IpAddr, SocketAddr};
use std::path::PathBuf;
use std::sync::Arc;
use std::time::Duration;

use anyhow::Context as _;
use bytes::Bytes;
use client::review::{ReviewClient, User};
use http::header::{AUTHORIZATION, CONTENT_TYPE, HeaderValue};
use http::{HeaderMap, Request, Response, StatusCode};
use http_body_util::Full;
use hyper::body::Incoming;
use hyper::server::conn::http1;
use hyper::service::service_fn;
use hyper_util::rt::{TokioIo, TokioTimer};
use jiff::Timestamp;
use k8s_openapi::api::core::v1::ConfigMap;
use pki::{CertKeyPair, ClientAuthority, Leaf, ServingCertificate, Usage};
use reconcile::{Ctx, Key};
use rustls::pki_types::CertificateDer;
use serde_json::{Value, json};
use tokio::net::{TcpListener, TcpStream};
use tokio::sync::{Mutex, Semaphore};
use tokio::time::Instant;
use tokio_rustls::TlsAcceptor;

use crate::flags::SecureServingFlags;

const HANDSHAKE_TIMEOUT: Duration = Duration::from_secs(10);
/// Time to receive a request's headers, including the idle time before.
const HEADER_TIMEOUT: Duration = Duration::from_secs(30);
const MAX_CONNECTIONS: usize = 256;
const CERTIFICATE_LIFETIME: Duration = Duration::from_secs(365 * 24 * 3600);
/// How long the client CA is cached.
const AUTHORITY_CACHE_TTL: Duration = Duration::from_secs(60);
/// Paths without authentication.
const PUBLIC_PATHS: [&str; 3] = ["/healthz", "/livez", "/readyz"];

/// The server's state: what it serves, and how it authorizes requests.
pub struct SecureServer {
    ctx: Ctx,
    /// The configuration and its API group as in upstream's `/configz`.
    config: (&'static str, Value),
    reviews: ReviewClient,
    client_ca: Option<PathBuf>,
    authority: Mutex<Option<(Instant, Option<ClientAuthority>)>>,
}

/// Starts the server, unless the port is 0.
pub async fn start(
    flags: &SecureServingFlags,
    port: u16,
    ctx: &Ctx,
    config: (&'static str, Value),
) -> anyhow::Result<()> {
    let port = flags.secure_port.unwrap_or(port);
    if port == 0 {
        return Ok(());
    }
    let address = SocketAddr::new(flags.bind_address, port);
    let listener = TcpListener::bind(address).await.with_context(|| format!("cannot listen on {address}"))?;
    let serving = ServingCertificate::new(&certificate(flags)?)?;
    let mut tls = pki::server_config(serving, &[])?;
    tls.alpn_protocols = vec![b"http/1.1".to_vec()];
    tracing::info!(address = %listener.local_addr()?, "serving health and metrics");
    let server = Arc::new(SecureServer {
        ctx: ctx.clone(),
        config,
        reviews: ReviewClient::default(),
        client_ca: flags.client_ca_file.clone(),
        authority: Mutex::default(),
    });
    tokio::spawn(serve(server, listener, TlsAcceptor::from(Arc::new(tls))));
    Ok(())
}

/// The certificate of the flags, or a self-signed one.
fn certificate(flags: &SecureServingFlags) -> anyhow::Result<CertKeyPair> {
    let read = |path: &PathBuf| {
        std::fs::read_to_string(path).with_context(|| format!("cannot read {}", path.display()))
    };
    if let (Some(certificate), Some(key)) = (&flags.tls_cert_file, &flags.tls_private_key_file) {
        return Ok(CertKeyPair { cert_pem: read(certificate)?, key_pem: read(key)? });
    }
    let host = crate::roles::hostname();
    let ips = if flags.bind_address.is_unspecified() { Vec::new() } else { vec![flags.bind_address] };
    let leaf = Leaf {
        common_name: host.clone(),
        organizations: Vec::new(),
        dns_names: vec![host, "localhost".to_owned()],
        ips: ips.into_iter().chain([IpAddr::from([127, 0, 0, 1])]).collect(),
        usage: Usage::Server,
        lifetime: CERTIFICATE_LIFETIME,
    };
    Ok(pki::self_signed(&leaf, Timestamp::now())?)
}

async fn serve(server: Arc<SecureServer>, listener: TcpListener, acceptor: TlsAcceptor) {
    let connection_limit = Arc::new(Semaphore::new(MAX_CONNECTIONS));
    loop {
        let permit = connection_limit.clone().acquire_owned().await.expect("the semaphore is never closed");
        match listener.accept().await {
            Ok((stream, _)) => {
                let serving = connection(server.clone(), acceptor.clone(), stream);
                tokio::spawn(async move {
                    serving.await;
                    drop(permit);
                });
            }
            Err(error) => {
                tracing::warn!(%error, "cannot accept a connection");
                tokio::time::sleep(Duration::from_millis(50)).await;
            }
        }
    }
}

async fn connection(server: Arc<SecureServer>, acceptor: TlsAcceptor, stream: TcpStream) {
    let stream = match tokio::time::timeout(HANDSHAKE_TIMEOUT, acceptor.accept(stream)).await {
        Ok(Ok(stream)) => stream,
        Ok(Err(error)) => return tracing::debug!(%error, "TLS handshake failed"),
        Err(_) => return tracing::debug!("TLS handshake timed out"),
    };
    let peer_certificates = stream.get_ref().1.peer_certificates().unwrap_or_default();
    let peer_identity = server.peer_identity(peer_certificates).await;
    let service = service_fn(move |request: Request<Incoming>| {
        let (server, peer_identity) = (server.clone(), peer_identity.clone());
        async move { Ok::<_, Infallible>(server.handle(peer_identity, &request).await) }
    });
    let mut builder = http1::Builder::new();
    builder.timer(TokioTimer::new()).header_read_timeout(HEADER_TIMEOUT);
    if let Err(error) = builder.serve_connection(TokioIo::new(stream), service).await {
        tracing::debug!(%error, "connection ended");
    }
}

/// Who the client's certificate authenticates.
#[derive(Clone)]
enum PeerIdentity {
    NoCertificate,
    UnknownAuthority,
    User(User),
}

impl SecureServer {
    async fn peer_identity(&self, chain: &[CertificateDer<'_>]) -> PeerIdentity {
        let Some(leaf) = chain.first() else { return PeerIdentity::NoCertificate };
        let is_trusted = match self.authority().await {
            Some(authority) => authority.is_trusted(chain, Timestamp::now()),
            None => false,
        };
        match pki::identity_of(leaf) {
            Ok(identity) if is_trusted => PeerIdentity::User(User {
                name: identity.user,
                groups: [identity.groups, vec!["system:authenticated".to_owned()]].concat(),
                uid: identity.uid.unwrap_or_default(),
                extra: String::new(),
            }),
            _ => PeerIdentity::UnknownAuthority,
        }
    }

    /// The CA for client certificates: from a file, or published by the API server.
    async fn authority(&self) -> Option<ClientAuthority> {
        let mut cached = self.authority.lock().await;
        if let Some((since, authority)) = &*cached
            && since.elapsed() < AUTHORITY_CACHE_TTL
        {
            return authority.clone();
        }
        let pem = match &self.client_ca {
            Some(path) => std::fs::read_to_string(path).map_err(|error| error.to_string()),
            None => {
                let key = Key::new("kube-system", "extension-apiserver-authentication");
                let map = self.ctx.client.get::<ConfigMap>(&key).await;
                let pem = map.map(|map| map.data.and_then(|mut data| data.remove("client-ca-file")));
                pem.map(Option::unwrap_or_default).map_err(|error| error.to_string())
            }
        };
        let authority = pem
            .and_then(|pem| ClientAuthority::new(&pem, "the client CA").map_err(|error| error.to_string()));
        let authority = authority.inspect_err(|error| {
            tracing::warn!(error, "cannot load the client CA, client certificates are rejected")
        });
        let authority = authority.ok();
        *cached = Some((Instant::now(), authority.clone()));
        authority
    }

    async fn handle(
        &self,
        peer_identity: PeerIdentity,
        request: &Request<Incoming>,
    ) -> Response<Full<Bytes>> {
        let path = request.uri().path();
        let is_public = PUBLIC_PATHS.contains(&path);
        if !is_public && let Err(response) = self.authorize(peer_identity, request).await {
            return response;
        }
        match path {
            "/metrics" => {
                let mut out = String::new();
                self.ctx.metrics.write(&mut out);
                apiserver::write_process(&mut out);
                text_response(StatusCode::OK, out, "text/plain; version=0.0.4; charset=utf-8")
            }
            "/configz" => {
                let (group, config) = &self.config;
                text_response(StatusCode::OK, json!({*group: config}).to_string(), "application/json")
            }
            _ if is_public => {
                let verbose = request.uri().query().is_some_and(|query| query.contains("verbose"));
                let body = match verbose {
                    true => format!("[+]ping ok\n{} check passed\n", &path[1..]),
                    false => "ok".to_owned(),
                };
                text_response(StatusCode::OK, body, "text/plain; charset=utf-8")
            }
            _ => text_response(
                StatusCode::NOT_FOUND,
                "404 page not found\n".to_owned(),
                "text/plain; charset=utf-8",
            ),
        }
    }

    async fn authorize(
        &self,
        peer_identity: PeerIdentity,
        request: &Request<Incoming>,
    ) -> Result<(), Response<Full<Bytes>>> {
        let unauthorized =
            || error_response(StatusCode::UNAUTHORIZED, "Unauthorized", "Unauthorized".to_owned());
        let (verb, path) = (request.method().as_str().to_ascii_lowercase(), request.uri().path());
        let user = match (peer_identity, bearer(request.headers())) {
            (PeerIdentity::User(user), _) => user,
            (_, Some(token)) => match self.reviews.authenticate(&self.ctx.client, token).await {
                Ok(Some(user)) => user,
                Ok(None) => return Err(unauthorized()),
                Err(error) => {
                    tracing::warn!(%error, "TokenReview failed");
                    return Err(unauthorized());
                }
            },
            (PeerIdentity::UnknownAuthority, None) => return Err(unauthorized()),
            (PeerIdentity::NoCertificate, None) => User::anonymous(),
        };
        if user.is_privileged() {
            return Ok(());
        }
        let attributes = ("nonResourceAttributes", json!({"path": path, "verb": verb}));
        let message = match self.reviews.authorize(&self.ctx.client, &user, attributes).await {
            Ok(true) => return Ok(()),
            Ok(false) => format!("forbidden: User {:?} cannot {verb} path {path:?}", user.name),
            Err(error) => {
                tracing::warn!(%error, "SubjectAccessReview failed");
                let message = "Internal Server Error: SubjectAccessReview failed".to_owned();
                return Err(error_response(StatusCode::INTERNAL_SERVER_ERROR, "InternalError", message));
            }
        };
        Err(error_response(StatusCode::FORBIDDEN, "Forbidden", message))
    }
}

fn bearer(headers: &HeaderMap) -> Option<&str> {
    let (scheme, token) = headers.get(AUTHORIZATION)?.to_str().ok()?.split_once(' ')?;
    let token = token.trim();
    (scheme.eq_ignore_ascii_case("bearer") && !token.is_empty()).then_some(token)
}

fn error_response(code: StatusCode, reason: &str, message: String) -> Response<Full<Bytes>> {
    let status = json!({
        "kind": "Status", "apiVersion": "v1", "metadata": {}, "status": "Failure",
        "message": message, "reason": reason, "details": {}, "code": code.as_u16(),
    });
    text_response(code, status.to_string(), "application/json")
}

fn text_response(code: StatusCode, text: String, kind: &'static str) -> Response<Full<Bytes>> {
    let mut response = Response::new(Full::new(Bytes::from(text)));
    *response.status_mut() = code;
    response.headers_mut().insert(CONTENT_TYPE, HeaderValue::from_static(kind));
    response.headers_mut().insert("x-content-type-options", HeaderValue::from_static("nosniff"));
    response
}
