//! Clients that speak the newest protocols over WebSocket, which no runtime does: what they say goes on to the node as
//! SPDY, which all of them understand.

use std::sync::Arc;

use api::Status;
use http::header::{CONNECTION, HeaderMap, HeaderValue, UPGRADE};
use http::{Method, Response, StatusCode};
use http_body_util::{BodyExt as _, Limited};
use hyper::body::Incoming;
use hyper::upgrade::{OnUpgrade, Upgraded};
use hyper_util::rt::TokioIo;
use stream::carry::{self, Wanted};
use stream::{Ask, websocket};

use super::{COMPLAINT, Place, Stream, dial, handed_back, plain};
use crate::body::Body;
use crate::server::Server;

/// Channels that can end by themselves.
const CHANNELS: &str = "v5.channel.k8s.io";
/// SPDY inside of messages.
const TUNNEL: &str = "SPDY/3.1+portforward.k8s.io";

/// What a client says in its messages.
#[derive(Clone, Copy, Debug, PartialEq)]
pub enum Spoken {
    Channels,
    Tunnel,
}

/// The node's end.
pub struct Far {
    pub server: Arc<Server>,
    pub place: Place,
    /// With its query.
    pub path: String,
}

/// What is spoken here; `None` leaves it to the node to understand the client.
pub fn chosen(headers: &HeaderMap, what: Stream) -> Option<Spoken> {
    if !websocket::is_wanted(headers) {
        return None;
    }
    let offered = websocket::offered(headers);
    match what {
        Stream::PortForward => offered.contains(&TUNNEL).then_some(Spoken::Tunnel),
        Stream::Exec | Stream::Attach => offered.contains(&CHANNELS).then_some(Spoken::Channels),
    }
}

impl Far {
    /// Asks the node to go on in SPDY.
    async fn ask(&self, version: &'static str) -> Result<Response<Incoming>, String> {
        let connection = dial(&self.server, &self.place).await?;
        let mut headers = HeaderMap::new();
        headers.insert(CONNECTION, HeaderValue::from_static("Upgrade"));
        headers.insert(UPGRADE, HeaderValue::from_static("SPDY/3.1"));
        headers.insert("x-stream-protocol-version", HeaderValue::from_static(version));
        let host = self.place.shown();
        let ask = Ask { method: Method::POST, path: &self.path, host: &host, headers: &headers };
        stream::begin(connection, ask).await.map_err(|error| error.to_string())
    }

    /// The connection in SPDY; why there is none, as a Status for the client.
    async fn connect(&self) -> Result<Upgraded, String> {
        let answer = self.ask("v4.channel.k8s.io").await;
        let answer = answer.map_err(|why| {
            let why =
                format!("error sending request: Post \"https://{}{}\": {why}", self.place.shown(), self.path);
            carry::broken(&why)
        })?;
        if answer.status() == StatusCode::SWITCHING_PROTOCOLS {
            return hyper::upgrade::on(answer).await.map_err(|error| carry::broken(&error.to_string()));
        }
        let text = match Limited::new(answer.into_body(), COMPLAINT).collect().await {
            Ok(collected) => String::from_utf8_lossy(&collected.to_bytes()).trim().to_owned(),
            Err(error) => format!("unable to read error from server response: {error}"),
        };
        let status = serde_json::from_str::<serde_json::Value>(&text).ok();
        Err(match status.filter(|status| status["kind"] == "Status") {
            Some(status) => status.to_string(),
            None => carry::broken(&format!("unable to upgrade connection: {text}")),
        })
    }
}

/// Exec and attach. The client is answered at once and learns over the session if the node cannot have it.
pub fn session(
    headers: &HeaderMap,
    client: OnUpgrade,
    far: Far,
    wanted: Wanted,
) -> Result<Response<Body>, Status> {
    let response = websocket::accept(headers, Some(CHANNELS)).ok_or_else(no_key)?;
    let mut shutdown = far.server.shutdown.clone();
    tokio::spawn(async move {
        let carried = async {
            let client = TokioIo::new(client.await.map_err(std::io::Error::other)?);
            match far.connect().await {
                Ok(far) => carry::channels(client, TokioIo::new(far), wanted).await,
                Err(status) => carry::refuse(client, wanted, &status).await,
            }
        };
        let ended = tokio::select! {
            ended = carried => ended,
            () = crate::cache::stopped(&mut shutdown) => return,
        };
        if let Err(error) = ended {
            tracing::debug!(%error, "a session broke");
        }
    });
    Ok(response.map(|()| Body::empty()))
}

/// Port-forward. Here the node's refusal is the answer.
pub async fn tunnel(headers: &HeaderMap, client: OnUpgrade, far: Far) -> Result<Response<Body>, Status> {
    let response = websocket::accept(headers, Some(TUNNEL)).ok_or_else(no_key)?;
    let answer = far.ask("portforward.k8s.io").await;
    let answer = answer.map_err(|why| plain(format!("error dialing backend: {why}")))?;
    if answer.status() != StatusCode::SWITCHING_PROTOCOLS {
        return Ok(handed_back(&far.server, answer));
    }
    let mut shutdown = far.server.shutdown.clone();
    tokio::spawn(async move {
        let carried = async {
            let (client, far) =
                tokio::try_join!(client, hyper::upgrade::on(answer)).map_err(std::io::Error::other)?;
            carry::tunnel(TokioIo::new(client), TokioIo::new(far)).await
        };
        let ended = tokio::select! {
            ended = carried => ended,
            () = crate::cache::stopped(&mut shutdown) => return,
        };
        if let Err(error) = ended {
            tracing::debug!(%error, "a tunnel broke");
        }
    });
    Ok(response.map(|()| Body::empty()))
}

fn no_key() -> Status {
    Status::bad_request("a WebSocket without a key")
}
