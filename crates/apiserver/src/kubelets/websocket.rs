//! Translates WebSocket clients of exec, attach and portforward to SPDY towards the kubelet.
//!
//! Container runtimes do not support the newest WebSocket protocols; all of them support SPDY.

use std::sync::Arc;

use api::Status;
use http::header::{CONNECTION, HeaderMap, HeaderValue, UPGRADE};
use http::{Method, Response, StatusCode};
use http_body_util::{BodyExt as _, Limited};
use hyper::body::Incoming;
use hyper::upgrade::{OnUpgrade, Upgraded};
use hyper_util::rt::TokioIo;
use stream::translator::{self, SessionStreams};
use stream::{ForwardRequest, websocket};

use super::{MAX_ERROR_BODY_BYTES, StreamSubresource, UpstreamAddr, copy_response, dial, plain_error};
use crate::body::Body;
use crate::server::Server;

/// The channel protocol that can close single channels.
const CHANNEL_PROTOCOL: &str = "v5.channel.k8s.io";
/// SPDY tunneled in WebSocket messages.
const TUNNEL_PROTOCOL: &str = "SPDY/3.1+portforward.k8s.io";

/// The WebSocket subprotocol in use.
#[derive(Clone, Copy, Debug, PartialEq)]
pub enum WebSocketProtocol {
    Channels,
    Tunnel,
}

/// The kubelet side of a session.
pub struct KubeletTarget {
    pub server: Arc<Server>,
    pub addr: UpstreamAddr,
    /// Includes the query.
    pub path: String,
}

/// The protocol that is translated here; `None` forwards the handshake to the kubelet.
pub fn negotiate_protocol(headers: &HeaderMap, kind: StreamSubresource) -> Option<WebSocketProtocol> {
    if !websocket::is_websocket_request(headers) {
        return None;
    }
    let offered = websocket::requested_protocols(headers);
    match kind {
        StreamSubresource::PortForward => {
            offered.contains(&TUNNEL_PROTOCOL).then_some(WebSocketProtocol::Tunnel)
        }
        StreamSubresource::Exec | StreamSubresource::Attach => {
            offered.contains(&CHANNEL_PROTOCOL).then_some(WebSocketProtocol::Channels)
        }
    }
}

impl KubeletTarget {
    /// Requests an upgrade to SPDY.
    async fn request_upgrade(&self, version: &'static str) -> Result<Response<Incoming>, String> {
        let connection = dial(&self.server, &self.addr).await?;
        let mut headers = HeaderMap::new();
        headers.insert(CONNECTION, HeaderValue::from_static("Upgrade"));
        headers.insert(UPGRADE, HeaderValue::from_static("SPDY/3.1"));
        headers.insert("x-stream-protocol-version", HeaderValue::from_static(version));
        let host = self.addr.host_port();
        let request =
            ForwardRequest { method: Method::POST, path: &self.path, host: &host, headers: &headers };
        stream::forward_upgrade(connection, request).await.map_err(|error| error.to_string())
    }

    /// The upgraded SPDY connection. The error is an encoded Status for the client's error channel.
    async fn connect(&self) -> Result<Upgraded, String> {
        let answer = self.request_upgrade("v4.channel.k8s.io").await;
        let answer = answer.map_err(|reason| {
            let reason = format!(
                "error sending request: Post \"https://{}{}\": {reason}",
                self.addr.host_port(),
                self.path
            );
            translator::internal_error_status(&reason)
        })?;
        if answer.status() == StatusCode::SWITCHING_PROTOCOLS {
            return hyper::upgrade::on(answer)
                .await
                .map_err(|error| translator::internal_error_status(&error.to_string()));
        }
        let text = match Limited::new(answer.into_body(), MAX_ERROR_BODY_BYTES).collect().await {
            Ok(collected) => String::from_utf8_lossy(&collected.to_bytes()).trim().to_owned(),
            Err(error) => format!("unable to read error from server response: {error}"),
        };
        let status = serde_json::from_str::<serde_json::Value>(&text).ok();
        Err(match status.filter(|status| status["kind"] == "Status") {
            Some(status) => status.to_string(),
            None => translator::internal_error_status(&format!("unable to upgrade connection: {text}")),
        })
    }
}

/// Serves exec and attach. The client's upgrade is accepted at once; errors of the kubelet follow
/// on the error channel.
pub fn session(
    headers: &HeaderMap,
    client: OnUpgrade,
    kubelet: KubeletTarget,
    streams: SessionStreams,
) -> Result<Response<Body>, Status> {
    let response = websocket::accept(headers, Some(CHANNEL_PROTOCOL)).ok_or_else(missing_key_error)?;
    let mut shutdown = kubelet.server.shutdown.clone();
    tokio::spawn(async move {
        let relay = async {
            let client = TokioIo::new(client.await.map_err(std::io::Error::other)?);
            match kubelet.connect().await {
                Ok(kubelet) => translator::translate(client, TokioIo::new(kubelet), streams).await,
                Err(status) => translator::reject(client, streams, &status).await,
            }
        };
        let ended = tokio::select! {
            ended = relay => ended,
            () = crate::cache::wait_for_shutdown(&mut shutdown) => return,
        };
        if let Err(error) = ended {
            tracing::debug!(%error, "websocket session closed with an error");
        }
    });
    Ok(response.map(|()| Body::empty()))
}

/// Serves portforward. A rejection by the kubelet is returned as the response.
pub async fn tunnel(
    headers: &HeaderMap,
    client: OnUpgrade,
    kubelet: KubeletTarget,
) -> Result<Response<Body>, Status> {
    let response = websocket::accept(headers, Some(TUNNEL_PROTOCOL)).ok_or_else(missing_key_error)?;
    let answer = kubelet.request_upgrade("portforward.k8s.io").await;
    let answer = answer.map_err(|reason| plain_error(format!("error dialing backend: {reason}")))?;
    if answer.status() != StatusCode::SWITCHING_PROTOCOLS {
        return Ok(copy_response(&kubelet.server, answer));
    }
    let mut shutdown = kubelet.server.shutdown.clone();
    tokio::spawn(async move {
        let relay = async {
            let (client, kubelet) =
                tokio::try_join!(client, hyper::upgrade::on(answer)).map_err(std::io::Error::other)?;
            translator::tunnel_spdy(TokioIo::new(client), TokioIo::new(kubelet)).await
        };
        let ended = tokio::select! {
            ended = relay => ended,
            () = crate::cache::wait_for_shutdown(&mut shutdown) => return,
        };
        if let Err(error) = ended {
            tracing::debug!(%error, "websocket tunnel closed with an error");
        }
    });
    Ok(response.map(|()| Body::empty()))
}

fn missing_key_error() -> Status {
    Status::bad_request("missing Sec-WebSocket-Key header")
}
