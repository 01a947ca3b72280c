//! Streams through the aggregator: watches and protocol upgrades.

use std::convert::Infallible;
use std::sync::Arc;
use std::time::Duration;

use http::{Request, StatusCode};
use http_body_util::{BodyExt as _, Empty};
use hyper::service::service_fn;
use hyper_util::rt::TokioIo;
use jiff::Timestamp;
use serde_json::json;
use tokio::io::{AsyncReadExt as _, AsyncWriteExt as _};
use tokio::net::{TcpListener, TcpStream};
use tokio::sync::Notify;
use tokio_rustls::TlsAcceptor;

use super::AggregatorTest;
use crate::access::User;
use crate::authentication::Peer;

const TEST_TIMEOUT: Duration = Duration::from_secs(60);
const FIRST: &str = r#"{"type":"ADDED","object":{}}"#;
const SECOND: &str = r#"{"type":"DELETED","object":{}}"#;

/// A server with a streaming response; it sends the second part after `resume` is notified.
async fn start_backend(dir: &std::path::Path, resume: Arc<Notify>) -> (u16, String) {
    let now = Timestamp::now();
    let ca = pki::Authority::load_or_create(dir, "streams", now).unwrap();
    let leaf = pki::Leaf {
        common_name: "streams".into(),
        organizations: Vec::new(),
        dns_names: vec!["hook.default.svc".into()],
        ips: vec!["127.0.0.1".parse().unwrap()],
        usage: pki::Usage::Server,
        lifetime: TEST_TIMEOUT,
    };
    let serving = pki::ServingCertificate::new(&ca.issue(&leaf, now).unwrap()).unwrap();
    let mut tls = pki::server_config(serving, &[]).unwrap();
    tls.alpn_protocols = vec![b"http/1.1".to_vec()];
    let acceptor = TlsAcceptor::from(Arc::new(tls));
    let listener = TcpListener::bind("127.0.0.1:0").await.unwrap();
    let port = listener.local_addr().unwrap().port();
    tokio::spawn(async move {
        while let Ok((socket, _)) = listener.accept().await {
            tokio::spawn(serve(acceptor.clone(), socket, resume.clone()));
        }
    });
    (port, ca.pem().to_owned())
}

/// Serves one request on a connection.
async fn serve(acceptor: TlsAcceptor, socket: TcpStream, resume: Arc<Notify>) -> Option<()> {
    let mut stream = acceptor.accept(socket).await.ok()?;
    let mut head = Vec::new();
    while !head.ends_with(b"\r\n\r\n") {
        head.push(stream.read_u8().await.ok()?);
    }
    let head = String::from_utf8_lossy(&head).to_ascii_lowercase();
    if head.contains("watch=true") {
        let chunk = |text: &str| format!("{:x}\r\n{text}\n\r\n", text.len() + 1);
        let begin = "HTTP/1.1 200 OK\r\ncontent-type: application/json\r\ntransfer-encoding: chunked\r\n\r\n";
        stream.write_all(format!("{begin}{}", chunk(FIRST)).as_bytes()).await.ok()?;
        stream.flush().await.ok()?;
        resume.notified().await;
        stream.write_all(format!("{}0\r\n\r\n", chunk(SECOND)).as_bytes()).await.ok()?;
    } else if head.contains("upgrade: echo") {
        let begin = "HTTP/1.1 101 Switching Protocols\r\nconnection: Upgrade\r\nupgrade: echo\r\n\r\n";
        stream.write_all(begin.as_bytes()).await.ok()?;
        let (mut read, mut write) = tokio::io::split(stream);
        tokio::io::copy(&mut read, &mut write).await.ok()?;
        return write.shutdown().await.ok();
    } else {
        let begin = "HTTP/1.1 200 OK\r\nconnection: close\r\ncontent-length: 2\r\n\r\n{}";
        stream.write_all(begin.as_bytes()).await.ok()?;
    }
    stream.shutdown().await.ok()
}

/// A client of the in-process server.
async fn connect(test: &AggregatorTest) -> hyper::client::conn::http1::SendRequest<Empty<bytes::Bytes>> {
    let (here, there) = tokio::io::duplex(1 << 16);
    let server = test.test_server.server.clone();
    let service = service_fn(move |request: Request<hyper::body::Incoming>| {
        let server = server.clone();
        let user = User { name: "bob".into(), groups: vec!["system:masters".into()], ..User::default() };
        async move { Ok::<_, Infallible>(server.handle_request(request, Peer::known(user)).await) }
    });
    let serving = hyper::server::conn::http1::Builder::new().serve_connection(TokioIo::new(there), service);
    tokio::spawn(serving.with_upgrades());
    let (sender, connection) = hyper::client::conn::http1::handshake(TokioIo::new(here)).await.unwrap();
    tokio::spawn(connection.with_upgrades());
    sender
}

async fn start() -> (AggregatorTest, Arc<Notify>, tempfile::TempDir) {
    use base64::Engine as _;
    let dir = tempfile::tempdir().unwrap();
    let resume = Arc::new(Notify::new());
    let (port, ca) = start_backend(dir.path(), resume.clone()).await;
    let test = AggregatorTest::start().await;
    test.create_service().await;
    let bundle = base64::engine::general_purpose::STANDARD.encode(ca);
    let service = json!({"namespace": "default", "name": "hook", "port": port});
    test.register(json!({"service": service, "caBundle": bundle})).await;
    test.wait_for_reason("Passed").await;
    (test, resume, dir)
}

#[tokio::test(flavor = "multi_thread")]
async fn streams_watch_events_through_proxy() {
    let (test, resume, _dir) = start().await;
    let mut sender = connect(&test).await;
    let path = "/apis/wardle.example.com/v1/flunders?watch=true";
    let request = Request::get(path).header("host", "x").body(Empty::new()).unwrap();
    let answer = tokio::time::timeout(TEST_TIMEOUT, sender.send_request(request)).await.unwrap().unwrap();
    assert_eq!(answer.status(), StatusCode::OK);
    let mut body = answer.into_body();
    let mut next = async || {
        let frame = tokio::time::timeout(TEST_TIMEOUT, body.frame()).await.unwrap();
        frame.map(|frame| String::from_utf8(frame.unwrap().into_data().unwrap().to_vec()).unwrap())
    };
    // The first event arrives before the remote server sends the second one.
    assert_eq!(next().await.as_deref(), Some(&*format!("{FIRST}\n")));
    resume.notify_one();
    assert_eq!(next().await.as_deref(), Some(&*format!("{SECOND}\n")));
    assert_eq!(next().await, None);
}

#[tokio::test(flavor = "multi_thread")]
async fn proxies_protocol_upgrades() {
    let (test, _, _dir) = start().await;
    let mut sender = connect(&test).await;
    let request = Request::get("/apis/wardle.example.com/v1/namespaces/n/flunders/f/exec")
        .header("host", "x")
        .header("connection", "Upgrade")
        .header("upgrade", "echo")
        .body(Empty::new())
        .unwrap();
    let answer = tokio::time::timeout(TEST_TIMEOUT, sender.send_request(request)).await.unwrap().unwrap();
    assert_eq!(answer.status(), StatusCode::SWITCHING_PROTOCOLS);
    assert_eq!(answer.headers()["upgrade"], "echo");
    let mut stream = TokioIo::new(hyper::upgrade::on(answer).await.unwrap());
    let echo = async {
        for word in ["there", "and back"] {
            stream.write_all(word.as_bytes()).await.unwrap();
            let mut received = vec![0; word.len()];
            stream.read_exact(&mut received).await.unwrap();
            assert_eq!(received, word.as_bytes());
        }
        stream.shutdown().await.unwrap();
        let mut rest = Vec::new();
        stream.read_to_end(&mut rest).await.unwrap();
        assert!(rest.is_empty());
    };
    tokio::time::timeout(TEST_TIMEOUT, echo).await.unwrap();
}
