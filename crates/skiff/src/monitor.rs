//! What a role that runs apart serves: its health, its metrics and how it is set up.
//!
//! Health is for everybody. For the rest the API server says who asks (client certificates by the authority it
//! publishes, tokens by TokenReview) and whether they may (SubjectAccessReview), as upstream's components let it.

use std::convert::Infallible;
use std::net::{IpAddr, SocketAddr};
use std::path::PathBuf;
use std::sync::Arc;
use std::time::Duration;

use anyhow::Context as _;
use bytes::Bytes;
use client::review::{Reviews, User};
use http::header::{AUTHORIZATION, CONTENT_TYPE, HeaderValue};
use http::{HeaderMap, Request, Response, StatusCode};
use http_body_util::Full;
use hyper::body::Incoming;
use hyper::server::conn::http1;
use hyper::service::service_fn;
use hyper_util::rt::{TokioIo, TokioTimer};
use jiff::Timestamp;
use k8s_openapi::api::core::v1::ConfigMap;
use pki::{ClientAuthority, Issued, Leaf, Serving, Usage};
use reconcile::{Ctx, Key};
use rustls::pki_types::CertificateDer;
use serde_json::{Value, json};
use tokio::net::{TcpListener, TcpStream};
use tokio::sync::{Mutex, Semaphore};
use tokio::time::Instant;
use tokio_rustls::TlsAcceptor;

use crate::flags::MonitorFlags;

const HANDSHAKE: Duration = Duration::from_secs(10);
/// To send a request's headers, the pause before them included.
const HEADERS: Duration = Duration::from_secs(30);
const MAX_CONNECTIONS: usize = 256;
const YEAR: Duration = Duration::from_secs(365 * 24 * 3600);
/// How long it is believed who vouches for clients.
const AUTHORITY_FOR: Duration = Duration::from_secs(60);
/// Paths for everybody.
const OPEN: [&str; 3] = ["/healthz", "/livez", "/readyz"];

/// What is served, and what it takes to judge who may see it.
pub struct Monitor {
    ctx: Ctx,
    /// Named as upstream names the group of the configuration.
    config: (&'static str, Value),
    reviews: Reviews,
    client_ca: Option<PathBuf>,
    authority: Mutex<Option<(Instant, Option<ClientAuthority>)>>,
}

/// Begins to serve, if the flags say so.
pub async fn start(
    flags: &MonitorFlags,
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
    let serving = Serving::new(&certificate(flags)?)?;
    let mut tls = pki::server_config(serving, &[])?;
    tls.alpn_protocols = vec![b"http/1.1".to_vec()];
    tracing::info!(address = %listener.local_addr()?, "serving health and metrics");
    let monitor = Arc::new(Monitor {
        ctx: ctx.clone(),
        config,
        reviews: Reviews::default(),
        client_ca: flags.client_ca_file.clone(),
        authority: Mutex::default(),
    });
    tokio::spawn(serve(monitor, listener, TlsAcceptor::from(Arc::new(tls))));
    Ok(())
}

/// The certificate of the flags, or one that vouches for itself.
fn certificate(flags: &MonitorFlags) -> anyhow::Result<Issued> {
    let read = |path: &PathBuf| {
        std::fs::read_to_string(path).with_context(|| format!("cannot read {}", path.display()))
    };
    if let (Some(certificate), Some(key)) = (&flags.tls_cert_file, &flags.tls_private_key_file) {
        return Ok(Issued { cert_pem: read(certificate)?, key_pem: read(key)? });
    }
    let host = crate::roles::hostname();
    let ips = if flags.bind_address.is_unspecified() { Vec::new() } else { vec![flags.bind_address] };
    let leaf = Leaf {
        common_name: host.clone(),
        organizations: Vec::new(),
        dns_names: vec![host, "localhost".to_owned()],
        ips: ips.into_iter().chain([IpAddr::from([127, 0, 0, 1])]).collect(),
        usage: Usage::Server,
        lifetime: YEAR,
    };
    Ok(pki::self_signed(&leaf, Timestamp::now())?)
}

async fn serve(monitor: Arc<Monitor>, listener: TcpListener, acceptor: TlsAcceptor) {
    let room = Arc::new(Semaphore::new(MAX_CONNECTIONS));
    loop {
        let place = room.clone().acquire_owned().await.expect("never closed");
        match listener.accept().await {
            Ok((stream, _)) => {
                let serving = connection(monitor.clone(), acceptor.clone(), stream);
                tokio::spawn(async move {
                    serving.await;
                    drop(place);
                });
            }
            Err(error) => {
                tracing::warn!(%error, "cannot accept a connection");
                tokio::time::sleep(Duration::from_millis(50)).await;
            }
        }
    }
}

async fn connection(monitor: Arc<Monitor>, acceptor: TlsAcceptor, stream: TcpStream) {
    let stream = match tokio::time::timeout(HANDSHAKE, acceptor.accept(stream)).await {
        Ok(Ok(stream)) => stream,
        Ok(Err(error)) => return tracing::debug!(%error, "TLS handshake failed"),
        Err(_) => return tracing::debug!("TLS handshake took too long"),
    };
    let shown = stream.get_ref().1.peer_certificates().unwrap_or_default();
    let shown = monitor.shown(shown).await;
    let service = service_fn(move |request: Request<Incoming>| {
        let (monitor, shown) = (monitor.clone(), shown.clone());
        async move { Ok::<_, Infallible>(monitor.answer(shown, &request).await) }
    });
    let mut builder = http1::Builder::new();
    builder.timer(TokioTimer::new()).header_read_timeout(HEADERS);
    if let Err(error) = builder.serve_connection(TokioIo::new(stream), service).await {
        tracing::debug!(%error, "connection ended");
    }
}

/// Who a certificate is of, or that it is nobody's.
#[derive(Clone)]
enum Shown {
    Nothing,
    Stranger,
    User(User),
}

impl Monitor {
    async fn shown(&self, chain: &[CertificateDer<'_>]) -> Shown {
        let Some(leaf) = chain.first() else { return Shown::Nothing };
        let vouched = match self.authority().await {
            Some(authority) => authority.vouches_for(chain, Timestamp::now()),
            None => false,
        };
        match pki::identity_of(leaf) {
            Ok(identity) if vouched => Shown::User(User {
                name: identity.user,
                groups: [identity.groups, vec!["system:authenticated".to_owned()]].concat(),
                uid: identity.uid.unwrap_or_default(),
                extra: String::new(),
            }),
            _ => Shown::Stranger,
        }
    }

    /// Who vouches for clients: a file says, or the API server.
    async fn authority(&self) -> Option<ClientAuthority> {
        let mut known = self.authority.lock().await;
        if let Some((since, authority)) = &*known
            && since.elapsed() < AUTHORITY_FOR
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
        let authority = pem.and_then(|pem| {
            ClientAuthority::new(&pem, "the authority for clients").map_err(|error| error.to_string())
        });
        let authority =
            authority.inspect_err(|error| tracing::warn!(error, "cannot tell clients by certificates"));
        let authority = authority.ok();
        *known = Some((Instant::now(), authority.clone()));
        authority
    }

    async fn answer(&self, shown: Shown, request: &Request<Incoming>) -> Response<Full<Bytes>> {
        let path = request.uri().path();
        let is_open = OPEN.contains(&path);
        if !is_open && let Err(refusal) = self.admit(shown, request).await {
            return refusal;
        }
        match path {
            "/metrics" => {
                let mut out = String::new();
                self.ctx.metrics.write(&mut out);
                apiserver::write_process(&mut out);
                text(StatusCode::OK, out, "text/plain; version=0.0.4; charset=utf-8")
            }
            "/configz" => {
                let (group, config) = &self.config;
                text(StatusCode::OK, json!({*group: config}).to_string(), "application/json")
            }
            _ if is_open => {
                let verbose = request.uri().query().is_some_and(|query| query.contains("verbose"));
                let said = match verbose {
                    true => format!("[+]ping ok\n{} check passed\n", &path[1..]),
                    false => "ok".to_owned(),
                };
                text(StatusCode::OK, said, "text/plain; charset=utf-8")
            }
            _ => text(StatusCode::NOT_FOUND, "404 page not found\n".to_owned(), "text/plain; charset=utf-8"),
        }
    }

    async fn admit(&self, shown: Shown, request: &Request<Incoming>) -> Result<(), Response<Full<Bytes>>> {
        let unknown = || refusal(StatusCode::UNAUTHORIZED, "Unauthorized", "Unauthorized".to_owned());
        let (verb, path) = (request.method().as_str().to_ascii_lowercase(), request.uri().path());
        let user = match (shown, bearer(request.headers())) {
            (Shown::User(user), _) => user,
            (_, Some(token)) => match self.reviews.whose(&self.ctx.client, token).await {
                Ok(Some(user)) => user,
                Ok(None) => return Err(unknown()),
                Err(error) => {
                    tracing::warn!(%error, "cannot ask whose token it is");
                    return Err(unknown());
                }
            },
            (Shown::Stranger, None) => return Err(unknown()),
            (Shown::Nothing, None) => User::anonymous(),
        };
        if user.is_master() {
            return Ok(());
        }
        let asked = ("nonResourceAttributes", json!({"path": path, "verb": verb}));
        let words = match self.reviews.may(&self.ctx.client, &user, asked).await {
            Ok(true) => return Ok(()),
            Ok(false) => format!("forbidden: User {:?} cannot {verb} path {path:?}", user.name),
            Err(error) => {
                tracing::warn!(%error, "cannot ask who may ask");
                let words = "Internal Server Error: it cannot be asked who may".to_owned();
                return Err(refusal(StatusCode::INTERNAL_SERVER_ERROR, "InternalError", words));
            }
        };
        Err(refusal(StatusCode::FORBIDDEN, "Forbidden", words))
    }
}

fn bearer(headers: &HeaderMap) -> Option<&str> {
    let (scheme, token) = headers.get(AUTHORIZATION)?.to_str().ok()?.split_once(' ')?;
    let token = token.trim();
    (scheme.eq_ignore_ascii_case("bearer") && !token.is_empty()).then_some(token)
}

fn refusal(code: StatusCode, reason: &str, message: String) -> Response<Full<Bytes>> {
    let status = json!({
        "kind": "Status", "apiVersion": "v1", "metadata": {}, "status": "Failure",
        "message": message, "reason": reason, "details": {}, "code": code.as_u16(),
    });
    text(code, status.to_string(), "application/json")
}

fn text(code: StatusCode, text: String, kind: &'static str) -> Response<Full<Bytes>> {
    let mut response = Response::new(Full::new(Bytes::from(text)));
    *response.status_mut() = code;
    response.headers_mut().insert(CONTENT_TYPE, HeaderValue::from_static(kind));
    response.headers_mut().insert("x-content-type-options", HeaderValue::from_static("nosniff"));
    response
}
