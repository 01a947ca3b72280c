//! Watch responses and logs over WebSocket, for clients that cannot read HTTP streams, such as
//! browsers. Messages from the client are ignored, except for the close.
//!
//! Counterpart upstream: `k8s.io/apimachinery/pkg/util/httpstream/wsstream`.

use base64::Engine as _;
use base64::engine::general_purpose::STANDARD;
use bytes::{BufMut as _, Bytes, BytesMut};
use futures_util::{Stream, StreamExt as _};
use http::header::{CONNECTION, HeaderMap, HeaderValue, UPGRADE};
use http::{Response, StatusCode};
use hyper::upgrade::OnUpgrade;
use hyper_util::rt::TokioIo;
use tokio::io::{AsyncWrite, AsyncWriteExt as _};

use crate::is_upgrade_request;

const BASE64_PROTOCOL: &str = "base64.binary.k8s.io";
const BINARY_PROTOCOL: &str = "binary.k8s.io";
/// A close frame with the status code 1000 (normal closure).
const CLOSE_FRAME: &[u8] = &[0x88, 2, 0x03, 0xe8];

/// Whether the client requests a WebSocket upgrade.
pub fn is_websocket_request(headers: &HeaderMap) -> bool {
    let named = headers.get(UPGRADE).and_then(|value| value.to_str().ok());
    is_upgrade_request(headers) && named.is_some_and(|name| name.eq_ignore_ascii_case("websocket"))
}

/// The subprotocols that the client offers, in its order of preference.
pub fn requested_protocols(headers: &HeaderMap) -> Vec<&str> {
    let values = headers.get_all("sec-websocket-protocol").iter().filter_map(|value| value.to_str().ok());
    values.flat_map(|value| value.split(',')).map(str::trim).filter(|name| !name.is_empty()).collect()
}

/// The upgrade response with the chosen subprotocol. `None` if the request has no valid key.
pub fn accept(headers: &HeaderMap, selected: Option<&'static str>) -> Option<Response<()>> {
    let key = headers.get("sec-websocket-key")?.to_str().ok()?;
    let mut response = Response::new(());
    *response.status_mut() = StatusCode::SWITCHING_PROTOCOLS;
    let response_headers = response.headers_mut();
    response_headers.insert(CONNECTION, HeaderValue::from_static("Upgrade"));
    response_headers.insert(UPGRADE, HeaderValue::from_static("websocket"));
    response_headers.insert("sec-websocket-accept", crate::websocket_codec::accept_key(key).parse().ok()?);
    if let Some(selected) = selected {
        response_headers.insert("sec-websocket-protocol", HeaderValue::from_static(selected));
    }
    Some(response)
}

/// Sends `chunks` over a WebSocket, one message each. Returns the upgrade response, or `None` if
/// the client offers no supported subprotocol.
pub fn serve_chunks(
    headers: &HeaderMap,
    client: OnUpgrade,
    chunks: impl Stream<Item = Bytes> + Send + Unpin + 'static,
) -> Option<Response<()>> {
    let requested = requested_protocols(headers);
    let selected = requested
        .iter()
        .find_map(|protocol| [BASE64_PROTOCOL, BINARY_PROTOCOL].into_iter().find(|known| known == protocol));
    if selected.is_none() && !requested.is_empty() {
        return None;
    }
    let response = accept(headers, selected)?;
    tokio::spawn(async move {
        let Ok(client) = client.await else { return };
        let (mut from, mut to) = tokio::io::split(TokioIo::new(client));
        let mut sink = tokio::io::sink();
        let result = tokio::select! {
            result = send_chunks(&mut to, chunks, selected == Some(BASE64_PROTOCOL)) => result,
            client_closed = tokio::io::copy(&mut from, &mut sink) => client_closed.map(drop),
        };
        if let Err(error) = result {
            tracing::debug!(%error, "WebSocket connection failed");
        }
        let _ = tokio::time::timeout(crate::SHUTDOWN_TIMEOUT, to.shutdown()).await;
    });
    Some(response)
}

async fn send_chunks(
    to: &mut (impl AsyncWrite + Unpin),
    mut chunks: impl Stream<Item = Bytes> + Unpin,
    as_base64: bool,
) -> std::io::Result<()> {
    while let Some(chunk) = chunks.next().await {
        let message = if as_base64 {
            encode_frame(0x81, STANDARD.encode(&chunk).as_bytes())
        } else {
            encode_frame(0x82, &chunk)
        };
        to.write_all(&message).await?;
        to.flush().await?;
    }
    to.write_all(CLOSE_FRAME).await?;
    to.flush().await
}

/// A complete message frame with the shortest length encoding.
fn encode_frame(first_byte: u8, message: &[u8]) -> Bytes {
    let mut out = BytesMut::with_capacity(message.len() + 10);
    out.put_u8(first_byte);
    match message.len() {
        length @ 0..126 => out.put_u8(length as u8),
        length @ 126..65536 => {
            out.put_u8(126);
            out.put_u16(length as u16);
        }
        length => {
            out.put_u8(127);
            out.put_u64(length as u64);
        }
    }
    out.put_slice(message);
    out.freeze()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn frame_uses_shortest_length_encoding() {
        let head = |length: usize| encode_frame(0x82, &vec![b'x'; length])[..10.min(length + 2)].to_vec();
        assert_eq!(encode_frame(0x81, b"hi"), Bytes::from_static(b"\x81\x02hi"));
        assert_eq!(head(125)[..2], [0x82, 125]);
        assert_eq!(head(126)[..4], [0x82, 126, 0, 126]);
        assert_eq!(head(65535)[..4], [0x82, 126, 255, 255]);
        assert_eq!(head(65536), [0x82, 127, 0, 0, 0, 0, 0, 1, 0, 0]);
    }

    #[tokio::test]
    async fn sends_all_chunks_and_then_close_frame() {
        let mut out = Vec::new();
        let chunks = futures_util::stream::iter([Bytes::from_static(b"a"), Bytes::from_static(b"bc")]);
        send_chunks(&mut out, chunks.clone(), false).await.expect("writing to memory succeeds");
        assert_eq!(out, b"\x82\x01a\x82\x02bc\x88\x02\x03\xe8");
        out.clear();
        send_chunks(&mut out, chunks, true).await.expect("writing to memory succeeds");
        assert_eq!(out, b"\x81\x04YQ==\x81\x04YmM=\x88\x02\x03\xe8");
    }
}
