//! Slow clients, and clients that send too much, over real connections.

use std::net::SocketAddr;
use std::time::Instant;

use rustls::pki_types::{CertificateDer, ServerName, pem::PemObject as _};
use tokio::io::{AsyncReadExt as _, AsyncWriteExt as _};
use tokio_rustls::TlsConnector;
use tokio_rustls::client::TlsStream;

use super::*;
use crate::tests::TestServer;

const SHORT_TIMEOUTS: ConnectionTimeouts = ConnectionTimeouts {
    handshake: Duration::from_millis(300),
    first_headers: Duration::from_millis(300),
    next_headers: Duration::from_millis(600),
};
/// Far longer than the timeouts above, even on a busy machine.
const TEST_DEADLINE: Duration = Duration::from_secs(20);

struct TestListener {
    test_server: TestServer,
    address: SocketAddr,
    authority: String,
    _dir: tempfile::TempDir,
}

async fn listen() -> TestListener {
    let dir = tempfile::tempdir().unwrap();
    let now = Timestamp::now();
    let ca = pki::Authority::load_or_create(dir.path(), "ca", now).unwrap();
    let leaf = pki::Leaf {
        common_name: "server".into(),
        organizations: Vec::new(),
        dns_names: Vec::new(),
        ips: vec!["127.0.0.1".parse().unwrap()],
        usage: pki::Usage::Server,
        lifetime: Duration::from_secs(3600),
    };
    let serving = pki::ServingCertificate::new(&ca.issue(&leaf, now).unwrap()).unwrap();
    let tls = pki::server_config(serving, &[]).unwrap();
    let test_server = TestServer::start().await;
    let listener = TcpListener::bind("127.0.0.1:0").await.unwrap();
    let address = listener.local_addr().unwrap();
    tokio::spawn(serve_with(
        test_server.server.clone(),
        Connections::new(listener, None),
        tls,
        test_server.stop.subscribe(),
        SHORT_TIMEOUTS,
    ));
    TestListener { test_server, address, authority: ca.pem().to_owned(), _dir: dir }
}

impl TestListener {
    async fn connect(&self, protocol: &str) -> TlsStream<TcpStream> {
        let mut roots = rustls::RootCertStore::empty();
        roots.add(CertificateDer::from_pem_slice(self.authority.as_bytes()).unwrap()).unwrap();
        let provider = Arc::new(rustls::crypto::ring::default_provider());
        let mut config = rustls::ClientConfig::builder_with_provider(provider)
            .with_safe_default_protocol_versions()
            .unwrap()
            .with_root_certificates(roots)
            .with_no_client_auth();
        config.alpn_protocols = vec![protocol.as_bytes().to_vec()];
        let stream = TcpStream::connect(self.address).await.unwrap();
        let name = ServerName::try_from("127.0.0.1").unwrap();
        TlsConnector::from(Arc::new(config)).connect(name, stream).await.unwrap()
    }

    /// The response, read until the connection is closed.
    async fn answer(&self, request: &str) -> String {
        let mut stream = self.connect("http/1.1").await;
        stream.write_all(request.as_bytes()).await.unwrap();
        String::from_utf8_lossy(&closed(&mut stream).await).into_owned()
    }
}

/// Reads until the server closes the connection, which it must do.
async fn closed(stream: &mut (impl tokio::io::AsyncRead + Unpin)) -> Vec<u8> {
    let mut read = Vec::new();
    // A close without a TLS close_notify counts, too.
    let end = tokio::time::timeout(TEST_DEADLINE, stream.read_to_end(&mut read)).await;
    assert!(end.is_ok(), "the connection stays open");
    read
}

#[tokio::test]
async fn closes_idle_connections() {
    let listener = listen().await;
    // No TLS handshake.
    let mut stream = TcpStream::connect(listener.address).await.unwrap();
    assert!(closed(&mut stream).await.is_empty());
    // A handshake without a request: no bytes, or half of the HTTP/2 preface.
    for (protocol, bytes) in [("http/1.1", ""), ("h2", ""), ("h2", "PRI * HTTP/2.0\r\n")] {
        let mut stream = listener.connect(protocol).await;
        stream.write_all(bytes.as_bytes()).await.unwrap();
        let start = Instant::now();
        closed(&mut stream).await;
        assert!(
            start.elapsed() >= SHORT_TIMEOUTS.first_headers / 2,
            "{protocol}: after {:?}",
            start.elapsed()
        );
    }
}

#[tokio::test]
async fn closes_connections_with_slow_headers() {
    let listener = listen().await;
    let (mut reader, mut writer) = tokio::io::split(listener.connect("http/1.1").await);
    writer.write_all(b"GET /healthz HTTP/1.1\r\n").await.unwrap();
    let slow_writer = tokio::spawn(async move {
        while writer.write_all(b"x-a: b\r\n").await.is_ok() && writer.flush().await.is_ok() {
            tokio::time::sleep(Duration::from_millis(20)).await;
        }
    });
    closed(&mut reader).await;
    drop(reader);
    tokio::time::timeout(TEST_DEADLINE, slow_writer).await.unwrap().unwrap();
    // A second request on a connection that has served one.
    let mut stream = listener.connect("http/1.1").await;
    stream.write_all(b"GET /healthz HTTP/1.1\r\nhost: x\r\n\r\nGET /healthz HT").await.unwrap();
    let answer = closed(&mut stream).await;
    assert!(answer.starts_with(b"HTTP/1.1 "), "{}", String::from_utf8_lossy(&answer));
}

#[tokio::test]
async fn limits_header_count_and_size() {
    let listener = listen().await;
    let many: String = (0..200).map(|i| format!("x-{i}: y\r\n")).collect();
    let answer = listener.answer(&format!("GET /healthz HTTP/1.1\r\nhost: x\r\n{many}\r\n")).await;
    assert!(answer.starts_with("HTTP/1.1 431 "), "{answer}");
    let mut stream = listener.connect("http/1.1").await;
    let large = format!("GET /healthz HTTP/1.1\r\nhost: x\r\nx: {}", "y".repeat(2 * CONNECTION_BUFFER_BYTES));
    // The server may close before it has read everything.
    let _ = stream.write_all(large.as_bytes()).await;
    let answer = closed(&mut stream).await;
    assert!(
        answer.is_empty() || answer.starts_with(b"HTTP/1.1 431 "),
        "{}",
        String::from_utf8_lossy(&answer)
    );
}

#[tokio::test]
async fn closes_connection_without_request_body() {
    let listener = listen().await;
    let mut stream = listener.connect("http/1.1").await;
    // Anonymous, so rejected before the body is read; the connection is not kept open for the body.
    let head = "POST /api/v1/namespaces/default/configmaps?timeout=1s HTTP/1.1\r\nhost: x\r\ncontent-length: 100\r\n\r\n";
    stream.write_all(head.as_bytes()).await.unwrap();
    let answer = String::from_utf8(closed(&mut stream).await).unwrap();
    assert!(answer.starts_with("HTTP/1.1 403 "), "{answer}");
    drop(listener.test_server);
}

#[test]
fn accepts_only_authenticated_cipher_suites() {
    let dir = tempfile::tempdir().unwrap();
    let ca = pki::Authority::load_or_create(dir.path(), "ca", Timestamp::now()).unwrap();
    let leaf = pki::Leaf {
        common_name: "x".into(),
        organizations: Vec::new(),
        dns_names: vec!["x".into()],
        ips: Vec::new(),
        usage: pki::Usage::Server,
        lifetime: Duration::from_secs(3600),
    };
    let serving = pki::ServingCertificate::new(&ca.issue(&leaf, Timestamp::now()).unwrap()).unwrap();
    let config = pki::server_config(serving, &[]).unwrap();
    for suite in &config.crypto_provider().cipher_suites {
        let name = format!("{:?}", suite.suite());
        // Requires forward secrecy and authenticated encryption.
        assert!(name.starts_with("TLS13_") || name.starts_with("TLS_ECDHE_"), "{name}");
        assert!(name.contains("GCM") || name.contains("POLY1305"), "{name}");
    }
}
