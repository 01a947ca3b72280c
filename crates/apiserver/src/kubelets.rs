//! Requests that the kubelet of a pod's node serves: log, exec, attach and portforward.
//!
//! The API server authorizes the request, finds the kubelet and forwards the request over TLS with
//! its own client certificate. The kubelet's certificate must be signed by the cluster CA;
//! verification cannot be turned off.

mod options;
#[cfg(test)]
mod tests;
mod websocket;

use std::sync::Arc;
use std::time::Duration;

use api::Status;
use api::json::JsonExt as _;
use futures_util::StreamExt as _;
use http::header::{CONTENT_TYPE, HeaderValue};
use http::{Method, Response, StatusCode};
use http_body_util::{BodyExt as _, BodyStream, Limited};
use hyper::body::Incoming;
use rustls::pki_types::ServerName;
use serde_json::Value;
use stream::ForwardRequest;
use tokio_rustls::TlsConnector;
use tokio_rustls::client::TlsStream;

use crate::access::authorize_creation;
use crate::body::Body;
use crate::request::Target;
use crate::server::{Call, Server, method_not_allowed};
use crate::tunnels::{self, Conn};
pub use options::StreamSubresource;

/// The timeout of connecting to a kubelet.
const DIAL_TIMEOUT: Duration = Duration::from_secs(30);
/// How much of a kubelet's error response is read.
const MAX_ERROR_BODY_BYTES: usize = 50_000;
/// Node address types in order of preference.
const ADDRESS_TYPES: [&str; 5] = ["InternalIP", "ExternalIP", "InternalDNS", "ExternalDNS", "Hostname"];
const DEFAULT_KUBELET_PORT: u64 = 10250;

/// A host and port to connect to.
#[derive(Debug, PartialEq)]
pub struct UpstreamAddr {
    pub host: String,
    pub port: u16,
}

/// `pods/log`.
pub async fn log(server: &Arc<Server>, call: &Call, target: &Target) -> Result<Response<Body>, Status> {
    if call.method != Method::GET {
        return Err(method_not_allowed());
    }
    let query = options::log_query(&call.query, &target.name)?;
    let pod = current_pod(server, target).await?;
    let container = select_container(call.query.get("container"), &pod)?;
    let Some(addr) = kubelet_addr(server, &pod)? else {
        // The pod is not scheduled and has no log yet, which is no error.
        let mut response = Response::new(Body::empty());
        *response.status_mut() = StatusCode::NO_CONTENT;
        return Ok(response);
    };
    let path = format!("/containerLogs/{}/{}/{container}{query}", target.namespace, target.name);
    let failed =
        |reason: String| plain_error(format!("Get \"https://{}{path}\": {reason}", addr.host_port()));
    let connection = dial(server, &addr).await.map_err(failed)?;
    let request =
        ForwardRequest { method: Method::GET, path: &path, host: &addr.host_port(), headers: &call.headers };
    let answer =
        stream::forward(connection, request, None).await.map_err(|error| failed(error.to_string()))?;
    if !answer.status().is_success() {
        return Err(error_status(answer, target).await);
    }
    let body = stream_body(server, answer.into_body());
    if let (true, Some(client)) =
        (stream::websocket::is_websocket_request(&call.headers), call.upgrade.clone())
    {
        return upgrade_to_websocket(call, client, body);
    }
    let mut response = Response::new(body);
    response.headers_mut().insert(CONTENT_TYPE, HeaderValue::from_static("text/plain"));
    Ok(response)
}

fn upgrade_to_websocket(
    call: &Call,
    client: hyper::upgrade::OnUpgrade,
    body: Body,
) -> Result<Response<Body>, Status> {
    let Body::Stream(chunks) = body else { return Ok(Response::new(body)) };
    let answer = stream::websocket::serve_chunks(&call.headers, client, chunks);
    let answer = answer.ok_or_else(|| Status::bad_request("unsupported WebSocket subprotocol"))?;
    Ok(answer.map(|()| Body::empty()))
}

/// `pods/exec`, `pods/attach` and `pods/portforward`.
pub async fn stream(
    server: &Arc<Server>,
    call: &Call,
    target: &Target,
    kind: StreamSubresource,
) -> Result<Response<Body>, Status> {
    if !matches!(call.method, Method::GET | Method::POST) {
        return Err(method_not_allowed());
    }
    // A WebSocket handshake is a GET, yet exec needs the verb `create`.
    authorize_creation(&server.rbac, &call.user, target).await?;
    let query = kind.query(&call.query)?;
    let pod = current_pod(server, target).await?;
    let (namespace, name) = (&target.namespace, &target.name);
    let path = match kind {
        StreamSubresource::PortForward => format!("/portForward/{namespace}/{name}{query}"),
        StreamSubresource::Exec | StreamSubresource::Attach => {
            let container = select_container(call.query.get("container"), &pod)?;
            format!("/{}/{namespace}/{name}/{container}{query}", target.subresource)
        }
    };
    let Some(addr) = kubelet_addr(server, &pod)? else {
        return Err(Status::bad_request(format!("pod {name} does not have a host assigned")));
    };
    let Some(upgrade) = call.upgrade.clone().filter(|_| stream::is_upgrade_request(&call.headers)) else {
        return Err(Status::bad_request("Upgrade request required"));
    };
    let kubelet = websocket::KubeletTarget { server: server.clone(), addr, path };
    match websocket::negotiate_protocol(&call.headers, kind) {
        Some(websocket::WebSocketProtocol::Channels) => {
            return websocket::session(
                &call.headers,
                upgrade,
                kubelet,
                options::requested_streams(&call.query),
            );
        }
        Some(websocket::WebSocketProtocol::Tunnel) => {
            return websocket::tunnel(&call.headers, upgrade, kubelet).await;
        }
        None => {}
    }
    let websocket::KubeletTarget { addr: place, path, .. } = kubelet;
    let failed = |reason: String| plain_error(format!("error dialing backend: {reason}"));
    let connection = dial(server, &place).await.map_err(failed)?;
    let request = ForwardRequest {
        method: call.method.clone(),
        path: &path,
        host: &place.host_port(),
        headers: &call.headers,
    };
    let answer = stream::forward(connection, request, Some(upgrade))
        .await
        .map_err(|error| failed(error.to_string()))?;
    if answer.status() == StatusCode::SWITCHING_PROTOCOLS {
        return Ok(answer.map(|_| Body::empty()));
    }
    Ok(copy_response(server, answer))
}

/// The kubelet's response, as the response to the client.
fn copy_response(server: &Server, answer: Response<Incoming>) -> Response<Body> {
    let (mut parts, body) = answer.into_parts();
    // Hop-by-hop headers of the kubelet's connection do not apply to the client's.
    for name in [http::header::TRANSFER_ENCODING, http::header::CONNECTION] {
        parts.headers.remove(name);
    }
    Response::from_parts(parts, stream_body(server, body))
}

async fn current_pod(server: &Server, target: &Target) -> Result<Value, Status> {
    let pod = Target { subresource: String::new(), ..target.clone() };
    Ok(server.current(&pod).await?.ok_or_else(|| target.not_found())?.value())
}

/// The requested container, which must be one of the pod's. The only container is the default.
fn select_container(requested: &str, pod: &Value) -> Result<String, Status> {
    let (name, spec) = (pod.at("metadata").text("name"), pod.at("spec"));
    let names = |field| spec.items(field).iter().map(|container| container.text("name"));
    let all = names("initContainers").chain(names("containers")).chain(names("ephemeralContainers"));
    let all: Vec<&str> = all.collect();
    if !requested.is_empty() {
        return match all.contains(&requested) {
            true => Ok(requested.to_owned()),
            false => Err(Status::bad_request(format!("container {requested} is not valid for pod {name}"))),
        };
    }
    match spec.items("containers") {
        [only] => Ok(only.text("name").to_owned()),
        [] => Err(Status::bad_request(format!("a container name must be specified for pod {name}"))),
        _ => Err(Status::bad_request(format!(
            "a container name must be specified for pod {name}, choose one of: [{}]",
            all.join(" ")
        ))),
    }
}

/// The address of the pod's kubelet; `None` for a pod that is not scheduled.
fn kubelet_addr(server: &Server, pod: &Value) -> Result<Option<UpstreamAddr>, Status> {
    let name = pod.at("spec").text("nodeName");
    if name.is_empty() {
        return Ok(None);
    }
    let nodes =
        api::resource_table::find_resource("", "v1", "nodes").expect("nodes are in the resource table");
    let target = Target { name: name.to_owned(), ..Target::collection(nodes, "") };
    let node = server.find(&target).ok_or_else(|| target.not_found())?.value();
    UpstreamAddr::from_node(&node).map(Some)
}

impl UpstreamAddr {
    pub fn from_node(node: &Value) -> Result<UpstreamAddr, Status> {
        let (metadata, status) = (node.at("metadata"), node.at("status"));
        if metadata.at("labels").has(api::core::node::SIMULATE_NODE_LABEL) {
            // A simulated node's address is not reachable.
            return Err(Status::bad_request(format!(
                "node {} is simulated: it has no kubelet, so its pods have no logs or processes",
                metadata.text("name")
            )));
        }
        let known = status.items("addresses");
        let best =
            ADDRESS_TYPES.iter().find_map(|kind| known.iter().find(|known| known.text("type") == *kind));
        let Some(best) = best else {
            return Err(plain_error("no preferred addresses found; known addresses: []".to_owned()));
        };
        let port = status.at("daemonEndpoints").at("kubeletEndpoint").at("Port").as_u64();
        let port = port.filter(|port| *port != 0).unwrap_or(DEFAULT_KUBELET_PORT);
        let Ok(port) = u16::try_from(port) else {
            return Err(plain_error(format!(
                "node {} has invalid kubelet port {port}",
                metadata.text("name")
            )));
        };
        Ok(UpstreamAddr { host: best.text("address").to_owned(), port })
    }

    pub fn host_port(&self) -> String {
        match self.host.contains(':') {
            true => format!("[{}]:{}", self.host, self.port),
            false => format!("{}:{}", self.host, self.port),
        }
    }
}

/// A TLS connection to a kubelet whose certificate is verified against the cluster CA.
pub async fn dial(server: &Server, addr: &UpstreamAddr) -> Result<TlsStream<Box<dyn Conn>>, String> {
    let Some(kubelet_client_tls) = &server.kubelet_client_tls else {
        return Err("no kubelet client certificate configured".to_owned());
    };
    let name =
        ServerName::try_from(addr.host.clone()).map_err(|_| format!("invalid address {:?}", addr.host))?;
    let connect = async {
        let stream = tunnels::connect(server, &addr.host, addr.port).await?;
        TlsConnector::from(kubelet_client_tls.config()).connect(name, stream).await
    };
    let reason = match tokio::time::timeout(DIAL_TIMEOUT, connect).await {
        Ok(Ok(stream)) => return Ok(stream),
        Ok(Err(error)) if error.kind() == std::io::ErrorKind::ConnectionRefused => {
            "connect: connection refused".to_owned()
        }
        Ok(Err(error)) => error.to_string(),
        Err(_) => "i/o timeout".to_owned(),
    };
    Err(format!("dial tcp {}: {reason}", addr.host_port()))
}

/// An internal error without a reason, as upstream's plain Go errors.
fn plain_error(message: String) -> Status {
    Status::failure(500, "", message)
}

/// Converts a kubelet's error response to a Status.
async fn error_status(answer: Response<Incoming>, target: &Target) -> Status {
    let code = answer.status().as_u16();
    let text = match Limited::new(answer.into_body(), MAX_ERROR_BODY_BYTES).collect().await {
        Ok(collected) => String::from_utf8_lossy(&collected.to_bytes()).into_owned(),
        Err(error) => return Status::internal(error),
    };
    match code {
        400 => Status::bad_request(text),
        404 => {
            let message =
                format!("the server could not find the requested resource ( pods/log {})", target.name);
            Status::failure(404, "NotFound", message).with_details("", "pods/log", &target.name)
        }
        500 => Status::internal(text),
        code => Status::failure(
            502,
            "InternalError",
            format!("kubelet of pod {} returned HTTP status {code}: {text}", target.name),
        ),
    }
}

/// Streams a kubelet's response body until the server shuts down.
pub fn stream_body(server: &Server, body: Incoming) -> Body {
    let mut shutdown = server.shutdown.clone();
    let whole = BodyStream::new(body).take_while(|frame| futures_util::future::ready(frame.is_ok()));
    let chunks = whole.filter_map(|frame| async { frame.ok()?.into_data().ok() });
    let stopped = async move { crate::cache::wait_for_shutdown(&mut shutdown).await };
    Body::Stream(Box::pin(chunks.take_until(Box::pin(stopped))))
}
