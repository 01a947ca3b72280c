//! Requests over real sockets, with an API server in the test process and fake pods.

use std::convert::Infallible;
use std::net::{IpAddr, Ipv4Addr, SocketAddr, UdpSocket};
use std::sync::Arc;
use std::time::Duration;

use bytes::Bytes;
use http::{HeaderMap, HeaderName, HeaderValue, Request, Response, StatusCode};
use http_body_util::{BodyExt as _, Empty, Full, StreamBody, combinators::UnsyncBoxBody};
use hyper::body::{Frame, Incoming};
use hyper::service::service_fn;
use hyper_util::rt::{TokioExecutor, TokioIo};
use ingress::{Config, IngressServer};
use jiff::Timestamp;
use k8s_openapi::api::core::v1::{Node, Secret, Service};
use k8s_openapi::api::discovery::v1::EndpointSlice;
use k8s_openapi::api::networking::v1::Ingress as Object;
use k8s_openapi::serde::{Serialize, de::DeserializeOwned};
use pki::{Authority, Leaf, Usage};
use reconcile::{Client, Clock, Ctx, DeleteOptions, Key};
use rustls::pki_types::{CertificateDer, ServerName, pem::PemObject as _};
use serde_json::{Value, json};
use tokio::io::{AsyncReadExt as _, AsyncWriteExt as _};
use tokio::net::{TcpListener, TcpStream};
use tokio::sync::{mpsc, watch};
use tokio_rustls::TlsConnector;

const TIMEOUT: Duration = Duration::from_secs(60);

/// An address of this machine that is valid in an EndpointSlice. Loopback addresses are not.
fn non_loopback_address() -> Option<IpAddr> {
    let socket = UdpSocket::bind((Ipv4Addr::UNSPECIFIED, 0)).ok()?;
    socket.connect("198.51.100.1:9").ok()?;
    let ip = socket.local_addr().ok()?.ip();
    (!ip.is_loopback() && !ip.is_unspecified()).then_some(ip)
}

struct TestCluster {
    client: Client,
    pod_ip: IpAddr,
    http: SocketAddr,
    https: SocketAddr,
    _stop: watch::Sender<bool>,
    _server: apiserver::RunningServer,
    directory: tempfile::TempDir,
}

impl TestCluster {
    async fn start() -> Option<TestCluster> {
        let Some(pod_ip) = non_loopback_address() else {
            eprintln!("skipped: this machine has no address besides loopback");
            return None;
        };
        let directory = tempfile::tempdir().unwrap();
        let stop = watch::Sender::new(false);
        let server = apiserver::start_in_directory(directory.path(), stop.subscribe()).await.unwrap();
        let client = Client::new(server.local(), "test");
        let ctx = Ctx::new(client.clone(), Clock::default(), stop.subscribe());
        client.create(&ingress::ingress_class()).await.unwrap();
        let address = watch::channel(Some("192.0.2.1".parse().unwrap())).1;
        let config = Config { client: client.clone(), address, dial: ingress::direct_dialer() };
        let ingress = IngressServer::start(&ctx, config).unwrap();
        let listen = async || TcpListener::bind("127.0.0.1:0").await.unwrap();
        let (plain, tls) = (listen().await, listen().await);
        let (http, https) = (plain.local_addr().unwrap(), tls.local_addr().unwrap());
        tokio::spawn(ingress.clone().serve_http(plain));
        tokio::spawn(ingress.serve_https(tls));
        Some(TestCluster { client, pod_ip, http, https, _stop: stop, _server: server, directory })
    }

    async fn create<T: reconcile::Object + Serialize + DeserializeOwned>(&self, object: Value) -> T {
        self.client.create::<T>(&serde_json::from_value(object).unwrap()).await.unwrap()
    }

    /// Creates a Service whose pods listen on these ports.
    async fn service(&self, name: &str, ports: &[u16]) {
        let spec = json!({"ports": [{"port": 80, "name": "http"}], "clusterIP": "None"});
        self.create::<Service>(json!({"metadata": {"name": name, "namespace": "default"}, "spec": spec}))
            .await;
        for (index, port) in ports.iter().enumerate() {
            self.create::<EndpointSlice>(json!({
                "metadata": {
                    "name": format!("{name}-{index}"), "namespace": "default",
                    "labels": {"kubernetes.io/service-name": name},
                },
                "addressType": "IPv4", "ports": [{"name": "http", "port": port}],
                "endpoints": [{"addresses": [self.pod_ip.to_string()], "conditions": {"ready": true}}],
            }))
            .await;
        }
    }

    async fn ingress(&self, name: &str, host: &str, service: &str, tls: Value) {
        let backend = json!({"service": {"name": service, "port": {"number": 80}}});
        let paths = json!([{"path": "/", "pathType": "Prefix", "backend": backend}]);
        let spec = json!({
            "ingressClassName": "skiff", "rules": [{"host": host, "http": {"paths": paths}}], "tls": tls,
        });
        self.create::<Object>(json!({"metadata": {"name": name, "namespace": "default"}, "spec": spec}))
            .await;
    }

    /// The response over HTTP/1.1: status code and body.
    async fn get(&self, host: &str, path: &str) -> (u16, String) {
        let stream = TcpStream::connect(self.http).await.unwrap();
        let (mut sender, connection) =
            hyper::client::conn::http1::handshake(TokioIo::new(stream)).await.unwrap();
        tokio::spawn(connection);
        let request = Request::get(path).header("host", host).header("x-forwarded-for", "1.2.3.4");
        let request = request.body(Empty::<Bytes>::new()).unwrap();
        read_response(sender.send_request(request).await.unwrap()).await
    }

    /// Polls until the response is as expected.
    async fn wait_for_response(&self, host: &str, path: &str, expected: (u16, &str)) {
        let mut last = (0, String::new());
        let wait = async {
            while (last.0, last.1.as_str()) != expected {
                last = self.get(host, path).await;
            }
        };
        assert!(tokio::time::timeout(TIMEOUT, wait).await.is_ok(), "{last:?} is not {expected:?}");
    }
}

async fn read_response(response: Response<Incoming>) -> (u16, String) {
    let code = response.status().as_u16();
    let bytes = response.into_body().collect().await.unwrap().to_bytes();
    (code, String::from_utf8_lossy(&bytes).into_owned())
}

type Body = UnsyncBoxBody<Bytes, Infallible>;

/// A fake pod that returns its name and the forwarding headers. It also echoes bodies and upgrades
/// to another protocol.
async fn start_pod(name: &'static str) -> u16 {
    let listener = TcpListener::bind("0.0.0.0:0").await.unwrap();
    let port = listener.local_addr().unwrap().port();
    tokio::spawn(async move {
        while let Ok((stream, _)) = listener.accept().await {
            let service =
                service_fn(
                    move |request| async move { Ok::<_, Infallible>(handle_request(name, request).await) },
                );
            let served = hyper::server::conn::http1::Builder::new()
                .serve_connection(TokioIo::new(stream), service)
                .with_upgrades();
            tokio::spawn(served);
        }
    });
    port
}

async fn handle_request(name: &'static str, mut request: Request<Incoming>) -> Response<Body> {
    let header = |name: &str| {
        request.headers().get(name).map(|value| value.to_str().unwrap().to_owned()).unwrap_or_default()
    };
    match request.uri().path() {
        "/headers" => {
            let seen_headers =
                ["host", "x-forwarded-for", "x-forwarded-proto", "x-forwarded-host"].map(header);
            Response::new(Full::from(seen_headers.join(" ")).boxed_unsync())
        }
        "/echo" => Response::new(request.into_body().map_err(|_| unreachable!("it is whole")).boxed_unsync()),
        "/upgrade" => {
            let upgrade = hyper::upgrade::on(&mut request);
            tokio::spawn(async move {
                let mut stream = TokioIo::new(upgrade.await.unwrap());
                let mut received = [0; 4];
                stream.read_exact(&mut received).await.unwrap();
                stream.write_all(&received).await.unwrap();
                stream.shutdown().await.unwrap();
            });
            let response = Response::builder().status(101).header("connection", "upgrade");
            response.header("upgrade", "echo").body(Full::default().boxed_unsync()).unwrap()
        }
        _ => Response::new(Full::from(name).boxed_unsync()),
    }
}

#[tokio::test(flavor = "multi_thread")]
async fn routes_requests_to_pods_until_ingress_is_deleted() {
    let Some(test_cluster) = TestCluster::start().await else { return };
    assert_eq!(test_cluster.get("a.io", "/").await, (404, "404 page not found\n".to_owned()));
    test_cluster.service("web", &[start_pod("web").await]).await;
    test_cluster.ingress("web", "a.io", "web", json!([])).await;
    test_cluster.wait_for_response("a.io:8080", "/x?y=1", (200, "web")).await;
    assert_eq!(test_cluster.get("b.io", "/").await.0, 404);
    let response = test_cluster.get("a.io", "/headers").await;
    assert_eq!(response, (200, "a.io 127.0.0.1 http a.io".to_owned()));
    // CONNECT is rejected.
    let mut stream = TcpStream::connect(test_cluster.http).await.unwrap();
    stream.write_all(b"CONNECT a.io:80 HTTP/1.1\r\nhost: a.io\r\nconnection: close\r\n\r\n").await.unwrap();
    let mut received = String::new();
    tokio::time::timeout(TIMEOUT, stream.read_to_string(&mut received)).await.unwrap().unwrap();
    assert!(received.starts_with("HTTP/1.1 405 "), "{received}");
    // Oversized headers are rejected.
    let mut stream = TcpStream::connect(test_cluster.http).await.unwrap();
    let long = format!("GET / HTTP/1.1\r\nhost: a.io\r\nx: {}\r\n\r\n", "x".repeat(100_000));
    let _ = stream.write_all(long.as_bytes()).await;
    let mut received = Vec::new();
    let _ = tokio::time::timeout(TIMEOUT, stream.read_to_end(&mut received)).await.unwrap();
    assert!(!String::from_utf8_lossy(&received).contains(" 200 "), "{received:?}");
    test_cluster.ingress("empty", "empty.io", "missing", json!([])).await;
    test_cluster.wait_for_response("empty.io", "/", (503, "503 Service Unavailable\n")).await;
    // The status contains the address.
    let key = Key::new("default", "web");
    let status_ip = async {
        loop {
            let object: Object = test_cluster.client.get(&key).await.unwrap();
            let status = object.status.and_then(|status| status.load_balancer?.ingress);
            if let Some(all) = status.filter(|all| !all.is_empty()) {
                return all[0].ip.clone();
            }
            tokio::task::yield_now().await;
        }
    };
    assert_eq!(tokio::time::timeout(TIMEOUT, status_ip).await.unwrap().as_deref(), Some("192.0.2.1"));
    test_cluster.client.delete::<Object>(&key, &DeleteOptions::default()).await.unwrap();
    test_cluster.wait_for_response("a.io", "/", (404, "404 page not found\n")).await;
}

#[tokio::test(flavor = "multi_thread")]
async fn skips_unreachable_pods() {
    let Some(test_cluster) = TestCluster::start().await else { return };
    // A port without a listener.
    let closed_port = TcpListener::bind("0.0.0.0:0").await.unwrap().local_addr().unwrap().port();
    test_cluster.service("web", &[closed_port, start_pod("a").await, start_pod("b").await]).await;
    test_cluster.ingress("web", "a.io", "web", json!([])).await;
    test_cluster.wait_for_response("a.io", "/", (200, "a")).await;
    let mut seen = std::collections::BTreeMap::new();
    for _ in 0..12 {
        *seen.entry(test_cluster.get("a.io", "/").await).or_insert(0) += 1;
    }
    let names: Vec<&str> = seen.keys().map(|(_, name)| name.as_str()).collect();
    assert_eq!(names, ["a", "b"], "{seen:?}");
    test_cluster.service("none", &[closed_port]).await;
    test_cluster.ingress("none", "none.io", "none", json!([])).await;
    test_cluster.wait_for_response("none.io", "/", (502, "502 Bad Gateway\n")).await;
}

#[tokio::test(flavor = "multi_thread")]
async fn body_is_copied_frame_by_frame_and_upgrade_is_supported() {
    let Some(test_cluster) = TestCluster::start().await else { return };
    test_cluster.service("web", &[start_pod("web").await]).await;
    test_cluster.ingress("web", "a.io", "web", json!([])).await;
    test_cluster.wait_for_response("a.io", "/", (200, "web")).await;
    let stream = TcpStream::connect(test_cluster.http).await.unwrap();
    let (mut sender, connection) = hyper::client::conn::http1::handshake(TokioIo::new(stream)).await.unwrap();
    tokio::spawn(connection.with_upgrades());
    let (parts, waiting) = mpsc::channel::<Bytes>(1);
    let body = StreamBody::new(futures_util::stream::unfold(waiting, async |mut waiting| {
        let part = waiting.recv().await?;
        Some((Ok::<_, Infallible>(Frame::data(part)), waiting))
    }));
    let request = Request::post("/echo").header("host", "a.io").body(body.boxed_unsync()).unwrap();
    let response = tokio::time::timeout(TIMEOUT, sender.send_request(request)).await.unwrap().unwrap();
    assert_eq!(response.status(), StatusCode::OK);
    let mut body = response.into_body();
    // Each chunk is echoed before the next one is sent.
    for part in ["one", "two"] {
        parts.send(Bytes::from(part)).await.unwrap();
        let frame = tokio::time::timeout(TIMEOUT, body.frame()).await.unwrap().unwrap().unwrap();
        assert_eq!(frame.into_data().unwrap(), part);
    }
    drop(parts);
    assert!(tokio::time::timeout(TIMEOUT, body.frame()).await.unwrap().is_none());

    let stream = TcpStream::connect(test_cluster.http).await.unwrap();
    let (mut sender, connection) = hyper::client::conn::http1::handshake(TokioIo::new(stream)).await.unwrap();
    tokio::spawn(connection.with_upgrades());
    let request = Request::get("/upgrade").header("host", "a.io").header("connection", "Upgrade");
    let request = request.header("upgrade", "echo").body(Empty::<Bytes>::new()).unwrap();
    let response = tokio::time::timeout(TIMEOUT, sender.send_request(request)).await.unwrap().unwrap();
    assert_eq!(response.status(), StatusCode::SWITCHING_PROTOCOLS);
    let mut stream = TokioIo::new(hyper::upgrade::on(response).await.unwrap());
    stream.write_all(b"ping").await.unwrap();
    let mut received = Vec::new();
    tokio::time::timeout(TIMEOUT, stream.read_to_end(&mut received)).await.unwrap().unwrap();
    assert_eq!(received, b"ping");
}

fn certificate_secret(authority: &Authority, name: &str) -> Value {
    let leaf = Leaf {
        common_name: name.to_owned(),
        organizations: Vec::new(),
        dns_names: vec![name.to_owned()],
        ips: Vec::new(),
        usage: Usage::Server,
        lifetime: Duration::from_secs(3600),
    };
    let key_pair = authority.issue(&leaf, Timestamp::now()).unwrap();
    json!({
        "apiVersion": "v1", "kind": "Secret", "metadata": {"name": "cert", "namespace": "default"},
        "type": "kubernetes.io/tls", "stringData": {"tls.crt": key_pair.cert_pem, "tls.key": key_pair.key_pem},
    })
}

/// The response over HTTP/2 to a client that trusts this CA. `None` if the certificate is not
/// trusted.
async fn get_https(
    test_cluster: &TestCluster,
    authority: &Authority,
    host: &str,
    path: &str,
) -> Option<(u16, String)> {
    let mut roots = rustls::RootCertStore::empty();
    roots.add(CertificateDer::from_pem_slice(authority.pem().as_bytes()).unwrap()).unwrap();
    let provider = Arc::new(rustls::crypto::ring::default_provider());
    let mut tls = rustls::ClientConfig::builder_with_provider(provider)
        .with_safe_default_protocol_versions()
        .unwrap()
        .with_root_certificates(roots)
        .with_no_client_auth();
    tls.alpn_protocols = vec![b"h2".to_vec()];
    let stream = TcpStream::connect(test_cluster.https).await.unwrap();
    let name = ServerName::try_from(host.to_owned()).unwrap();
    let stream = TlsConnector::from(Arc::new(tls)).connect(name, stream).await.ok()?;
    let io = TokioIo::new(stream);
    let (mut sender, connection) =
        hyper::client::conn::http2::handshake(TokioExecutor::new(), io).await.unwrap();
    tokio::spawn(connection);
    let request = Request::get(format!("https://{host}{path}")).body(Empty::<Bytes>::new()).unwrap();
    Some(read_response(sender.send_request(request).await.unwrap()).await)
}

#[tokio::test(flavor = "multi_thread")]
async fn uses_certificate_for_server_name_and_updates_it() {
    let Some(test_cluster) = TestCluster::start().await else { return };
    let authority = |name: &str| {
        Authority::load_or_create(&test_cluster.directory.path().join("ca"), name, Timestamp::now()).unwrap()
    };
    let (old, new) = (authority("old"), authority("new"));
    test_cluster.service("web", &[start_pod("web").await]).await;
    test_cluster.create::<Secret>(certificate_secret(&old, "*.a.io")).await;
    test_cluster.ingress("web", "*.a.io", "web", json!([{"hosts": ["*.a.io"], "secretName": "cert"}])).await;
    let wait_for_https_response = async |authority: &Authority, expected: Option<(u16, &str)>| {
        let mut last = None;
        let wait = async {
            loop {
                last = get_https(&test_cluster, authority, "x.a.io", "/headers").await;
                if last.as_ref().map(|(code, text)| (*code, text.as_str())) == expected {
                    break;
                }
            }
        };
        assert!(tokio::time::timeout(TIMEOUT, wait).await.is_ok(), "{last:?} is not {expected:?}");
    };
    let expected_response = Some((200, "x.a.io 127.0.0.1 https x.a.io"));
    wait_for_https_response(&old, expected_response).await;
    assert_eq!(
        get_https(&test_cluster, &old, "a.io", "/").await,
        None,
        "the certificate is for another name"
    );
    let key = Key::new("default", "cert");
    test_cluster.client.delete::<Secret>(&key, &DeleteOptions::default()).await.unwrap();
    wait_for_https_response(&old, None).await;
    test_cluster.create::<Secret>(certificate_secret(&new, "*.a.io")).await;
    wait_for_https_response(&new, expected_response).await;
}

/// A fake pod that only speaks TLS, with a certificate from an unknown CA.
async fn start_secure_pod(directory: &std::path::Path, name: &'static str) -> u16 {
    let authority = Authority::load_or_create(&directory.join("ca"), "pods", Timestamp::now()).unwrap();
    let secret = certificate_secret(&authority, "pod");
    let text = |field: &str| secret["stringData"][field].as_str().unwrap().to_owned();
    let key_pair = pki::CertKeyPair { cert_pem: text("tls.crt"), key_pem: text("tls.key") };
    let tls = pki::server_config(pki::ServingCertificate::new(&key_pair).unwrap(), &[]).unwrap();
    let listener = TcpListener::bind("0.0.0.0:0").await.unwrap();
    let port = listener.local_addr().unwrap().port();
    let acceptor = tokio_rustls::TlsAcceptor::from(Arc::new(tls));
    tokio::spawn(async move {
        while let Ok((stream, _)) = listener.accept().await {
            let acceptor = acceptor.clone();
            tokio::spawn(async move {
                let Ok(stream) = acceptor.accept(stream).await else { return };
                let service = service_fn(move |request| async move {
                    Ok::<_, Infallible>(handle_request(name, request).await)
                });
                let _ = hyper::server::conn::http1::Builder::new()
                    .serve_connection(TokioIo::new(stream), service)
                    .await;
            });
        }
    });
    port
}

#[tokio::test(flavor = "multi_thread")]
async fn supports_tls_backends_and_ssl_redirect() {
    let Some(test_cluster) = TestCluster::start().await else { return };
    test_cluster.service("secure", &[start_secure_pod(test_cluster.directory.path(), "secure").await]).await;
    test_cluster.ingress("secure", "a.io", "secure", json!([])).await;
    // The Service does not declare the protocol yet.
    test_cluster.wait_for_response("a.io", "/", (502, "502 Bad Gateway\n")).await;
    let protocol_patch = json!({"spec": {"ports": [{"port": 80, "name": "http", "appProtocol": "HTTPS"}]}});
    let key = Key::new("default", "secure");
    test_cluster.client.patch::<Service>(&key, &reconcile::Patch::Merge(protocol_patch)).await.unwrap();
    test_cluster.wait_for_response("a.io", "/", (200, "secure")).await;

    let redirect_patch = json!({"metadata": {"annotations": {"skiff.dev/ssl-redirect": "true"}}});
    test_cluster.client.patch::<Object>(&key, &reconcile::Patch::Merge(redirect_patch)).await.unwrap();
    test_cluster.wait_for_response("a.io:8080", "/x?y=1", (308, "308 Permanent Redirect\n")).await;
    let mut stream = TcpStream::connect(test_cluster.http).await.unwrap();
    stream.write_all(b"GET /x?y=1 HTTP/1.1\r\nhost: a.io:1\r\nconnection: close\r\n\r\n").await.unwrap();
    let mut received = String::new();
    tokio::time::timeout(TIMEOUT, stream.read_to_string(&mut received)).await.unwrap().unwrap();
    let location = format!("location: https://a.io:{}/x?y=1\r\n", test_cluster.https.port());
    assert!(received.contains(&location), "{received}");
}

/// A fake pod that only speaks HTTP/2 without TLS, as gRPC servers do. It echoes the request body
/// and sends trailers.
async fn start_grpc_pod() -> u16 {
    let listener = TcpListener::bind("0.0.0.0:0").await.unwrap();
    let port = listener.local_addr().unwrap().port();
    let echo = async |request: Request<Incoming>| {
        let te = request.headers().get("te").cloned();
        let trailers = HeaderMap::from_iter([
            (HeaderName::from_static("grpc-status"), HeaderValue::from_static("0")),
            (HeaderName::from_static("te-was"), te.unwrap_or(HeaderValue::from_static("none"))),
            (
                HeaderName::from_static("host-was"),
                request.uri().authority().unwrap().as_str().parse().unwrap(),
            ),
        ]);
        let body = request.into_body().map_err(|_| unreachable!("it is whole"));
        let body: Body = body.with_trailers(std::future::ready(Some(Ok(trailers)))).boxed_unsync();
        Ok::<_, Infallible>(Response::new(body))
    };
    tokio::spawn(async move {
        while let Ok((stream, _)) = listener.accept().await {
            let serving = hyper::server::conn::http2::Builder::new(TokioExecutor::new());
            tokio::spawn(serving.serve_connection(TokioIo::new(stream), service_fn(echo)));
        }
    });
    port
}

#[tokio::test(flavor = "multi_thread")]
async fn proxies_grpc_over_http2() {
    let Some(test_cluster) = TestCluster::start().await else { return };
    test_cluster.service("calls", &[start_grpc_pod().await]).await;
    test_cluster.ingress("calls", "a.io", "calls", json!([])).await;
    test_cluster.wait_for_response("a.io", "/", (502, "502 Bad Gateway\n")).await;
    let protocol_patch =
        json!({"spec": {"ports": [{"port": 80, "name": "http", "appProtocol": "kubernetes.io/h2c"}]}});
    let key = Key::new("default", "calls");
    test_cluster.client.patch::<Service>(&key, &reconcile::Patch::Merge(protocol_patch)).await.unwrap();
    // HTTP/1.1 clients are served, too.
    test_cluster.wait_for_response("a.io", "/", (200, "")).await;
    let stream = TcpStream::connect(test_cluster.http).await.unwrap();
    let (sender, connection) =
        hyper::client::conn::http2::handshake(TokioExecutor::new(), TokioIo::new(stream)).await.unwrap();
    tokio::spawn(connection);
    // Several concurrent calls over one connection, each with data in both directions.
    let calls = (0..3).map(|number| {
        let mut sender = sender.clone();
        async move {
            let (parts, waiting) = mpsc::channel::<Bytes>(1);
            let body = StreamBody::new(futures_util::stream::unfold(waiting, async |mut waiting| {
                let part = waiting.recv().await?;
                Some((Ok::<_, Infallible>(Frame::data(part)), waiting))
            }));
            let request = Request::post("http://a.io/service/Call").header("te", "trailers");
            let request = request.header("content-type", "application/grpc").body(body.boxed_unsync());
            let response = sender.send_request(request.unwrap()).await.unwrap();
            assert_eq!(response.status(), StatusCode::OK);
            let mut body = response.into_body();
            for part in [format!("one {number}"), format!("two {number}")] {
                parts.send(Bytes::from(part.clone())).await.unwrap();
                assert_eq!(body.frame().await.unwrap().unwrap().into_data().unwrap(), part);
            }
            drop(parts);
            let trailers = body.frame().await.unwrap().unwrap().into_trailers().unwrap();
            let values = ["grpc-status", "te-was", "host-was"].map(|name| trailers[name].to_str().unwrap());
            assert_eq!(values, ["0", "trailers", "a.io"]);
        }
    });
    tokio::time::timeout(TIMEOUT, futures_util::future::join_all(calls)).await.unwrap();
}

#[tokio::test(flavor = "multi_thread")]
async fn relay_nodes_forward_connections_and_are_in_status() {
    let Some(mut test_cluster) = TestCluster::start().await else { return };
    test_cluster.service("web", &[start_pod("web").await]).await;
    test_cluster.ingress("web", "a.io", "web", json!([])).await;
    let listener = TcpListener::bind("127.0.0.1:0").await.unwrap();
    let upstream_addr = test_cluster.http.to_string();
    test_cluster.http = listener.local_addr().unwrap();
    let stop = watch::Sender::new(false);
    tokio::spawn(ingress::relay(listener, upstream_addr, stop.subscribe()));
    test_cluster.wait_for_response("a.io", "/", (200, "web")).await;
    // The status includes relaying nodes while they are ready.
    let node = |ready: &str| {
        json!({
            "metadata": {"name": "far", "annotations": {"skiff.dev/ingress": "true"}},
            "status": {
                "addresses": [{"type": "InternalIP", "address": "192.0.2.9"}],
                "conditions": [{"type": "Ready", "status": ready}],
            },
        })
    };
    let wait_for_addresses = async |expected: &[&str]| {
        let wait = async {
            loop {
                let object: Object = test_cluster.client.get(&Key::new("default", "web")).await.unwrap();
                let all = object.status.and_then(|status| status.load_balancer?.ingress).unwrap_or_default();
                if all.iter().filter_map(|one| one.ip.as_deref()).eq(expected.iter().copied()) {
                    break;
                }
                tokio::task::yield_now().await;
            }
        };
        assert!(tokio::time::timeout(TIMEOUT, wait).await.is_ok(), "{expected:?} is not in the status");
    };
    wait_for_addresses(&["192.0.2.1"]).await;
    test_cluster.create::<Node>(node("True")).await;
    test_cluster
        .client
        .patch_status::<Node>(&Key::new("", "far"), &reconcile::Patch::Merge(node("True")))
        .await
        .unwrap();
    wait_for_addresses(&["192.0.2.1", "192.0.2.9"]).await;
    test_cluster
        .client
        .patch_status::<Node>(&Key::new("", "far"), &reconcile::Patch::Merge(node("False")))
        .await
        .unwrap();
    wait_for_addresses(&["192.0.2.1"]).await;
    stop.send_replace(true);
    let listener_closed = async { while TcpStream::connect(test_cluster.http).await.is_ok() {} };
    tokio::time::timeout(TIMEOUT, listener_closed).await.expect("listeners close on shutdown");
}
