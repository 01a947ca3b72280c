//! The kubelet's HTTPS API. Most requests come from the API server on behalf of users.
//!
//! The API server decides who may access what ([`access`]). Pods and containers are looked up by
//! name among those of this node, and paths are built from what was found, never from the request.
//! Streams are served by the runtime: it returns an address, and the client's connection is
//! forwarded to it. Start reading at [`run`], then [`handle_request`].

mod access;
mod log;
mod log_target;
mod metrics;
mod request;

use std::collections::BTreeMap;
use std::convert::Infallible;
use std::net::TcpListener;
use std::sync::Arc;
use std::time::Duration;

use bytes::Bytes;
use http::header::{CONTENT_TYPE, HeaderValue};
use http::{Method, Request, Response, StatusCode};
use http_body_util::combinators::UnsyncBoxBody;
use http_body_util::{BodyExt as _, Full};
use hyper::body::Incoming;
use hyper::server::conn::http1;
use hyper::service::service_fn;
use hyper_util::rt::{TokioIo, TokioTimer};
use jiff::Timestamp;
use k8s_openapi::api::core::v1::Pod;
use pki::{ClientAuthority, ServingCertificate};
use reconcile::{Key, Object as _};
use runtime::cri;
use serde_json::{Value, json};
use tokio::net::TcpStream;
use tokio::sync::Semaphore;
use tokio_rustls::TlsAcceptor;

use crate::Node;
use request::{MetricsEndpoint, QueryFlags, Route, StreamOptions};

const TLS_HANDSHAKE_TIMEOUT: Duration = Duration::from_secs(10);
/// For the headers of a request, including the idle time before them.
const HEADER_READ_TIMEOUT: Duration = Duration::from_secs(90);
const MAX_CONNECTIONS: usize = 4096;
/// For the connection to the runtime's streaming server, which is on this host.
const STREAM_DIAL_TIMEOUT: Duration = Duration::from_secs(10);

/// The listener, certificates and users of the kubelet's API.
pub struct KubeletServer {
    pub listener: TcpListener,
    /// The serving certificate.
    pub serving: Arc<ServingCertificate>,
    /// The CA of client certificates.
    pub authority: ClientAuthority,
    /// The user name of the API server.
    pub api_server_user: String,
}

type Body = UnsyncBoxBody<Bytes, Infallible>;

/// Serves until the node stops. Open connections end with their tasks then.
pub(crate) async fn run(node: &Arc<Node>, api: Option<KubeletServer>) {
    let Some(api) = api else { return std::future::pending().await };
    let tls = pki::server_config(api.serving.clone(), std::slice::from_ref(&api.authority));
    let prepared = tls.map_err(error_text).and_then(|mut tls| {
        // Streams need an HTTP/1.1 connection of their own.
        tls.alpn_protocols = vec![b"http/1.1".to_vec()];
        api.listener.set_nonblocking(true).map_err(error_text)?;
        let listener = api.listener.try_clone().map_err(error_text)?;
        Ok((tls, tokio::net::TcpListener::from_std(listener).map_err(error_text)?))
    });
    let (tls, listener) = match prepared {
        Ok(prepared) => prepared,
        Err(error) => {
            tracing::error!(error, "cannot serve the kubelet API");
            return std::future::pending().await;
        }
    };
    let acceptor = TlsAcceptor::from(Arc::new(tls));
    let connection_limit = Arc::new(Semaphore::new(MAX_CONNECTIONS));
    let api = Arc::new(api);
    let mut connections = tokio::task::JoinSet::new();
    loop {
        while connections.try_join_next().is_some() {}
        let permit = connection_limit.clone().acquire_owned().await.expect("never closed");
        match listener.accept().await {
            Ok((stream, _)) => {
                let serving = serve_connection(node.clone(), api.clone(), acceptor.clone(), stream);
                connections.spawn(async move {
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

fn error_text(error: impl std::fmt::Display) -> String {
    error.to_string()
}

async fn serve_connection(
    node: Arc<Node>,
    api: Arc<KubeletServer>,
    acceptor: TlsAcceptor,
    stream: TcpStream,
) {
    let _ = stream.set_nodelay(true);
    let stream = match tokio::time::timeout(TLS_HANDSHAKE_TIMEOUT, acceptor.accept(stream)).await {
        Ok(Ok(stream)) => stream,
        Ok(Err(error)) => return tracing::debug!(%error, "TLS handshake failed"),
        Err(_) => return tracing::debug!("TLS handshake timed out"),
    };
    let peer_certificates = stream.get_ref().1.peer_certificates().unwrap_or_default();
    let user = access::certificate_user(&api, peer_certificates, Timestamp::now());
    let service = service_fn(move |request: Request<Incoming>| {
        let (node, api, user) = (node.clone(), api.clone(), user.clone());
        async move {
            let target = (request.method(), request.uri().path());
            let authorization =
                access::authorize(&node, &api, user.as_ref(), target, request.headers()).await;
            Ok::<_, Infallible>(match authorization {
                Err((code, message)) => text(code, message),
                Ok(()) => handle_request(&node, request).await,
            })
        }
    });
    let mut builder = http1::Builder::new();
    builder.timer(TokioTimer::new()).header_read_timeout(HEADER_READ_TIMEOUT);
    let connection = builder.serve_connection(TokioIo::new(stream), service).with_upgrades();
    if let Err(error) = connection.await {
        tracing::debug!(%error, "connection ended");
    }
}

/// An error response with upstream's text.
type HttpError = (StatusCode, String);

async fn handle_request(node: &Arc<Node>, request: Request<Incoming>) -> Response<Body> {
    let route = Route::of(request.uri().path());
    let result = match (route, request.method()) {
        (Route::Health, &Method::GET) => Ok(text(StatusCode::OK, "ok".to_owned())),
        (Route::Pods, &Method::GET) => Ok(pods(node)),
        (Route::RunningPods, &Method::GET) => running_pods(node).await,
        (Route::Summary, &Method::GET | &Method::POST) => summary(node, request.uri().query()).await,
        (Route::Config, &Method::GET) => Ok(json(&config(node))),
        (Route::Metrics(which), &Method::GET) => Ok(text(
            StatusCode::OK,
            match which {
                MetricsEndpoint::Kubelet => metrics::kubelet_metrics(node).await,
                MetricsEndpoint::Resource => metrics::resource_metrics(node).await,
                MetricsEndpoint::Cadvisor => metrics::cadvisor_metrics(node).await,
                MetricsEndpoint::Probes => metrics::probe_metrics(node),
            },
        )),
        (Route::Logs { .. } | Route::Exec { .. } | Route::Attach { .. } | Route::PortForward { .. }, _)
            if node.presentation.debug_handlers_disabled =>
        {
            Err((StatusCode::METHOD_NOT_ALLOWED, "Debug endpoints are disabled.".to_owned()))
        }
        (Route::Logs { pod, container }, &Method::GET) => {
            log::handle_logs(node, &pod, &container, request.uri().query().unwrap_or("")).await
        }
        (Route::Exec { pod, container }, &Method::GET | &Method::POST) => {
            exec(node, &pod, &container, request).await
        }
        (Route::Attach { pod, container }, &Method::GET | &Method::POST) => {
            attach(node, &pod, &container, request).await
        }
        (Route::PortForward { pod }, &Method::GET | &Method::POST) => port_forward(node, &pod, request).await,
        (Route::Unknown, _) => Err((StatusCode::NOT_FOUND, "404: Page Not Found".to_owned())),
        _ => Err((StatusCode::METHOD_NOT_ALLOWED, "405: Method Not Allowed".to_owned())),
    };
    result.unwrap_or_else(|(code, message)| text(code, message))
}

async fn exec(
    node: &Node,
    pod: &Key,
    container: &str,
    mut request: Request<Incoming>,
) -> Result<Response<Body>, HttpError> {
    let StreamOptions { stdin, stdout, stderr, tty } = StreamOptions::of(&request)?;
    let flags = QueryFlags::of(request.uri().query().unwrap_or(""));
    let container_id = running_container_id(node, pod, container).await?;
    let cmd: Vec<String> = flags.all("command").map(str::to_owned).collect();
    let exec_request = cri::ExecRequest { container_id, cmd, tty, stdin, stdout, stderr };
    let url = node.runtime.exec(&exec_request).await.map_err(internal_error)?;
    tunnel(&url, &mut request).await
}

async fn attach(
    node: &Node,
    pod: &Key,
    container: &str,
    mut request: Request<Incoming>,
) -> Result<Response<Body>, HttpError> {
    let StreamOptions { stdin, stdout, stderr, tty } = StreamOptions::of(&request)?;
    let container_id = running_container_id(node, pod, container).await?;
    let attach_request = cri::AttachRequest { container_id, stdin, tty, stdout, stderr };
    let url = node.runtime.attach(&attach_request).await.map_err(internal_error)?;
    tunnel(&url, &mut request).await
}

async fn port_forward(
    node: &Node,
    pod: &Key,
    mut request: Request<Incoming>,
) -> Result<Response<Body>, HttpError> {
    let flags = QueryFlags::of(request.uri().query().unwrap_or(""));
    let ports: Vec<i32> =
        flags.all("port").flat_map(|text| text.split(',')).filter_map(|port| port.parse().ok()).collect();
    let pod = find_pod(node, pod)?;
    // The newest sandbox. An older one may have lost its network before its exit is noticed.
    let seen = crate::worker::observe(&*node.runtime, &pod, &node.settings).await.map_err(internal_error)?;
    let Some(sandbox) = seen.sandbox() else {
        return Err((StatusCode::INTERNAL_SERVER_ERROR, format!("not found (\"{}\")", pod.key())));
    };
    let url = node.runtime.port_forward(&sandbox.id, &ports).await.map_err(internal_error)?;
    tunnel(&url, &mut request).await
}

/// Connects the client to the runtime's streaming server at `url`.
async fn tunnel(url: &str, request: &mut Request<Incoming>) -> Result<Response<Body>, HttpError> {
    if !stream::is_upgrade_request(request.headers()) {
        return Err((StatusCode::BAD_REQUEST, "Upgrade request required".to_owned()));
    }
    let invalid_address = || {
        (
            StatusCode::INTERNAL_SERVER_ERROR,
            "the container runtime returned an invalid streaming address".to_owned(),
        )
    };
    let url: http::Uri = url.parse().map_err(|_| invalid_address())?;
    let authority =
        url.authority().filter(|_| url.scheme_str() == Some("http")).ok_or_else(invalid_address)?;
    let address = (authority.host().trim_matches(['[', ']']), authority.port_u16().unwrap_or(80));
    let stream_error = |message: &dyn std::fmt::Display| {
        (
            StatusCode::INTERNAL_SERVER_ERROR,
            format!("cannot connect to the streaming server of the container runtime: {message}"),
        )
    };
    let connected = tokio::time::timeout(STREAM_DIAL_TIMEOUT, TcpStream::connect(address)).await;
    let runtime = connected.map_err(|error| stream_error(&error))?.map_err(|error| stream_error(&error))?;
    let _ = runtime.set_nodelay(true);
    let upgrade = hyper::upgrade::on(&mut *request);
    let forward_request = stream::ForwardRequest {
        method: request.method().clone(),
        path: url.path_and_query().map_or("/", |path| path.as_str()),
        host: authority.as_str(),
        headers: request.headers(),
    };
    let answer = stream::forward(runtime, forward_request, Some(upgrade))
        .await
        .map_err(|error| stream_error(&error))?;
    if answer.status() == StatusCode::SWITCHING_PROTOCOLS {
        return Ok(answer.map(|_| Full::default().boxed_unsync()));
    }
    let (parts, body) = answer.into_parts();
    let bytes = body.collect().await.map_err(|error| stream_error(&error))?.to_bytes();
    let mut response = Response::new(Full::new(bytes).boxed_unsync());
    *response.status_mut() = parts.status;
    Ok(response)
}

/// A pod of this node.
fn find_pod(node: &Node, key: &Key) -> Result<Arc<Pod>, HttpError> {
    node.pod(key).ok_or_else(|| (StatusCode::NOT_FOUND, format!("pod {:?} does not exist", key.name)))
}

/// The ID of the running container of that name.
async fn running_container_id(node: &Node, pod: &Key, container: &str) -> Result<String, HttpError> {
    let pod = find_pod(node, pod)?;
    let labels = [(crate::POD_UID, pod.uid()), (crate::CONTAINER_NAME, container)];
    let runs = node.runtime.containers(&labels).await.map_err(internal_error)?;
    let run = runs.into_iter().find(|run| run.state() == cri::ContainerState::Running);
    run.map(|run| run.id)
        .ok_or_else(|| (StatusCode::INTERNAL_SERVER_ERROR, format!("container not found ({container:?})")))
}

fn internal_error(error: runtime::Error) -> HttpError {
    (StatusCode::INTERNAL_SERVER_ERROR, error.message())
}

fn pods(node: &Node) -> Response<Body> {
    let local_pods = node.pods();
    let items: Vec<_> = local_pods.iter().map(|pod| json!(**pod)).collect();
    json(&json!({"kind": "PodList", "apiVersion": "v1", "metadata": {}, "items": items}))
}

/// The pods that the runtime runs, whatever the API says.
async fn running_pods(node: &Node) -> Result<Response<Body>, HttpError> {
    let mut items: BTreeMap<(Key, String), Vec<Value>> = BTreeMap::new();
    for container in node.runtime.containers(&[]).await.map_err(internal_error)? {
        if container.state() == cri::ContainerState::Running
            && let Some(pod) = crate::pod_of(&container.labels)
        {
            let name = container.labels.get(crate::CONTAINER_NAME);
            let image = container.image.map(|image| image.image);
            items.entry(pod).or_default().push(json!({"name": name, "image": image, "resources": {}}));
        }
    }
    let items = items.into_iter().map(|((key, uid), containers)| {
        json!({
            "metadata": {"name": &*key.name, "namespace": &*key.namespace, "uid": uid},
            "spec": {"containers": containers},
            "status": {},
        })
    });
    let items: Vec<_> = items.collect();
    Ok(json(&json!({"kind": "PodList", "apiVersion": "v1", "metadata": {}, "items": items})))
}

async fn summary(node: &Node, query: Option<&str>) -> Result<Response<Body>, HttpError> {
    let only_cpu_and_memory = QueryFlags::of(query.unwrap_or("")).is_set("only_cpu_and_memory");
    crate::stats::summary(node, only_cpu_and_memory)
        .await
        .map(|summary| json(&summary))
        .map_err(internal_error)
}

/// The node's settings as an upstream KubeletConfiguration.
fn config(node: &Node) -> Value {
    let settings = &node.settings;
    json!({"kubeletconfig": {
        "kind": "KubeletConfiguration",
        "apiVersion": "kubelet.config.k8s.io/v1beta1",
        "port": node.presentation.port,
        "maxPods": node.presentation.max_pods,
        "clusterDomain": settings.cluster_domain,
        "clusterDNS": settings.cluster_dns,
        "authentication": {"anonymous": {"enabled": false}, "webhook": {"enabled": true, "cacheTTL": "2m0s"}},
        "authorization": {"mode": "Webhook"},
        "podLogsDir": settings.logs.dir,
    }})
}

fn json(value: &Value) -> Response<Body> {
    let mut response = text(StatusCode::OK, value.to_string());
    response.headers_mut().insert(CONTENT_TYPE, HeaderValue::from_static("application/json"));
    response
}

fn text(code: StatusCode, text: String) -> Response<Body> {
    let mut response = Response::new(Full::new(Bytes::from(text)).boxed_unsync());
    *response.status_mut() = code;
    response.headers_mut().insert(CONTENT_TYPE, HeaderValue::from_static("text/plain"));
    response
}
