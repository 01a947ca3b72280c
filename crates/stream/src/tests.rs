use std::convert::Infallible;
use std::sync::{Arc, Mutex};

use http_body_util::BodyExt as _;
use hyper::server::conn::http1 as server;
use hyper::service::service_fn;
use tokio::io::{AsyncReadExt as _, DuplexStream, duplex};
use tokio::sync::oneshot;

use super::*;

/// A far end that changes the protocol, repeats what it hears in the new one, and tells when it is over.
fn echo(io: DuplexStream) -> oneshot::Receiver<()> {
    let (over, told) = oneshot::channel();
    let over = Arc::new(Mutex::new(Some(over)));
    let service = service_fn(move |mut request: Request<Incoming>| {
        let over = over.clone();
        async move {
            let mut response = Response::new(Full::new(Bytes::from_static(b"no")));
            if !wants_upgrade(request.headers()) {
                return Ok::<_, Infallible>(response);
            }
            let upgrade = hyper::upgrade::on(&mut request);
            tokio::spawn(async move {
                let io = TokioIo::new(upgrade.await.expect("another protocol"));
                let (mut read, mut write) = tokio::io::split(io);
                let _ = tokio::io::copy(&mut read, &mut write).await;
                over.lock().expect("a lock").take().map(|over| over.send(()))
            });
            *response.status_mut() = StatusCode::SWITCHING_PROTOCOLS;
            response.headers_mut().insert(CONNECTION, "Upgrade".parse().expect("a header"));
            response.headers_mut().insert(UPGRADE, "SPDY/3.1".parse().expect("a header"));
            Ok(response)
        }
    });
    tokio::spawn(server::Builder::new().serve_connection(TokioIo::new(io), service).with_upgrades());
    told
}

/// A server that hands everything on to an echo; the client's end of a connection to it.
fn proxy() -> (DuplexStream, oneshot::Receiver<()>) {
    let (near, far) = duplex(1024);
    let over = echo(far);
    let near = Arc::new(Mutex::new(Some(near)));
    let service = service_fn(move |mut request: Request<Incoming>| {
        let near = near.lock().expect("a lock").take().expect("one request");
        async move {
            let upgrade = wants_upgrade(request.headers()).then(|| hyper::upgrade::on(&mut request));
            let ask = Ask { method: Method::POST, path: "/x", host: "far", headers: request.headers() };
            forward(near, ask, upgrade).await
        }
    });
    let (client, io) = duplex(1024);
    tokio::spawn(server::Builder::new().serve_connection(TokioIo::new(io), service).with_upgrades());
    (client, over)
}

#[tokio::test]
async fn bytes_pass_and_the_far_end_learns_when_the_client_leaves() {
    let (mut client, over) = proxy();
    let request = "POST /x HTTP/1.1\r\nHost: x\r\nConnection: Upgrade\r\nUpgrade: SPDY/3.1\r\nContent-Length: 0\r\n\r\n";
    client.write_all(request.as_bytes()).await.expect("sent");
    let mut head = Vec::new();
    while !head.ends_with(b"\r\n\r\n") {
        head.push(client.read_u8().await.expect("an answer"));
    }
    let head = String::from_utf8(head).expect("text").to_lowercase();
    assert!(head.starts_with("http/1.1 101") && head.contains("upgrade: spdy/3.1"), "{head}");
    let said: Vec<u8> = (0..50_000u32).map(|i| i as u8).collect();
    let mut heard = vec![0; said.len()];
    let (mut read, mut write) = tokio::io::split(client);
    let (sent, got) = tokio::join!(write.write_all(&said), read.read_exact(&mut heard));
    sent.and(got.map(drop)).expect("an echo");
    assert!(said == heard);
    drop((read, write));
    over.await.expect("the far end is let go");
}

#[tokio::test]
async fn an_answer_without_another_protocol_comes_back_as_it_is() {
    let (near, far) = duplex(1024);
    let _over = echo(far);
    let ask = Ask { method: Method::GET, path: "/x", host: "far", headers: &HeaderMap::new() };
    let answer = forward(near, ask, None).await.expect("an answer");
    assert_eq!(answer.status(), StatusCode::OK);
    assert_eq!(answer.into_body().collect().await.expect("a body").to_bytes(), "no");
}
