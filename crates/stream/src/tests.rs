use std::convert::Infallible;
use std::sync::{Arc, Mutex};

use http_body_util::BodyExt as _;
use hyper::server::conn::http1 as server;
use hyper::service::service_fn;
use tokio::io::{AsyncReadExt as _, DuplexStream, duplex};
use tokio::sync::oneshot;

use super::*;

/// An upstream server that switches protocols, echoes what it receives, and signals when the
/// connection closes.
fn echo(io: DuplexStream) -> oneshot::Receiver<()> {
    let (done, done_receiver) = oneshot::channel();
    let done = Arc::new(Mutex::new(Some(done)));
    let service = service_fn(move |mut request: Request<Incoming>| {
        let done = done.clone();
        async move {
            let mut response = Response::new(Full::new(Bytes::from_static(b"no")));
            if !is_upgrade_request(request.headers()) {
                return Ok::<_, Infallible>(response);
            }
            let upgrade = hyper::upgrade::on(&mut request);
            tokio::spawn(async move {
                let io = TokioIo::new(upgrade.await.expect("another protocol"));
                let (mut read, mut write) = tokio::io::split(io);
                let _ = tokio::io::copy(&mut read, &mut write).await;
                done.lock().expect("a lock").take().map(|done| done.send(()))
            });
            *response.status_mut() = StatusCode::SWITCHING_PROTOCOLS;
            response.headers_mut().insert(CONNECTION, "Upgrade".parse().expect("a header"));
            response.headers_mut().insert(UPGRADE, "SPDY/3.1".parse().expect("a header"));
            Ok(response)
        }
    });
    tokio::spawn(server::Builder::new().serve_connection(TokioIo::new(io), service).with_upgrades());
    done_receiver
}

/// A server that forwards everything to an echo server. Returns the client side of a connection to
/// it.
fn proxy() -> (DuplexStream, oneshot::Receiver<()>) {
    let (proxy_end, upstream_end) = duplex(1024);
    let done = echo(upstream_end);
    let proxy_end = Arc::new(Mutex::new(Some(proxy_end)));
    let service = service_fn(move |mut request: Request<Incoming>| {
        let proxy_end = proxy_end.lock().expect("a lock").take().expect("one request");
        async move {
            let upgrade = is_upgrade_request(request.headers()).then(|| hyper::upgrade::on(&mut request));
            let forward_request =
                ForwardRequest { method: Method::POST, path: "/x", host: "far", headers: request.headers() };
            forward(proxy_end, forward_request, upgrade).await
        }
    });
    let (client, io) = duplex(1024);
    tokio::spawn(server::Builder::new().serve_connection(TokioIo::new(io), service).with_upgrades());
    (client, done)
}

#[tokio::test]
async fn copies_bytes_after_upgrade_and_closes_upstream_with_client() {
    let (mut client, done) = proxy();
    let request = "POST /x HTTP/1.1\r\nHost: x\r\nConnection: Upgrade\r\nUpgrade: SPDY/3.1\r\nContent-Length: 0\r\n\r\n";
    client.write_all(request.as_bytes()).await.expect("sent");
    let mut head = Vec::new();
    while !head.ends_with(b"\r\n\r\n") {
        head.push(client.read_u8().await.expect("an answer"));
    }
    let head = String::from_utf8(head).expect("text").to_lowercase();
    assert!(head.starts_with("http/1.1 101") && head.contains("upgrade: spdy/3.1"), "{head}");
    let payload: Vec<u8> = (0..50_000u32).map(|i| i as u8).collect();
    let mut received = vec![0; payload.len()];
    let (mut read, mut write) = tokio::io::split(client);
    let (sent, got) = tokio::join!(write.write_all(&payload), read.read_exact(&mut received));
    sent.and(got.map(drop)).expect("an echo");
    assert!(payload == received);
    drop((read, write));
    done.await.expect("the upstream connection is closed");
}

#[tokio::test]
async fn returns_response_unchanged_without_upgrade() {
    let (proxy_end, upstream_end) = duplex(1024);
    let _done = echo(upstream_end);
    let forward_request =
        ForwardRequest { method: Method::GET, path: "/x", host: "far", headers: &HeaderMap::new() };
    let response = forward(proxy_end, forward_request, None).await.expect("an answer");
    assert_eq!(response.status(), StatusCode::OK);
    assert_eq!(response.into_body().collect().await.expect("a body").to_bytes(), "no");
}
