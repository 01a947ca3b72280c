//! The server on real sockets, with an API server in the test process and a fake upstream resolver.

use std::net::SocketAddr;
use std::sync::Arc;
use std::sync::atomic::{AtomicUsize, Ordering::SeqCst};
use std::time::Duration;

use dns::wire::{self, record_type};
use dns::{Config, Metrics, Server};
use k8s_openapi::api::core::v1::Service;
use k8s_openapi::api::discovery::v1::EndpointSlice;
use reconcile::{Client, Clock, Ctx, Key};
use serde_json::{Value, json};
use tokio::io::{AsyncReadExt as _, AsyncWriteExt as _};
use tokio::net::{TcpStream, UdpSocket};
use tokio::sync::watch;

struct DnsTestServer {
    client: Client,
    udp: SocketAddr,
    tcp: SocketAddr,
    /// The number of forwarded queries.
    forward_count: Arc<AtomicUsize>,
    metrics: Arc<Metrics>,
    stop: watch::Sender<bool>,
    _server: apiserver::RunningServer,
    _directory: tempfile::TempDir,
}

impl DnsTestServer {
    async fn start(allow: bool) -> DnsTestServer {
        let directory = tempfile::tempdir().unwrap();
        let stop = watch::Sender::new(false);
        let server = apiserver::start_in_directory(directory.path(), stop.subscribe()).await.unwrap();
        let client = Client::new(server.local(), "test");
        let ctx = Ctx::new(client.clone(), Clock::default(), stop.subscribe());
        let forward_count = Arc::new(AtomicUsize::new(0));
        let upstream = start_upstream(forward_count.clone()).await;
        let dns_server = Server::bind("127.0.0.1:0".parse().unwrap()).await.unwrap();
        let (udp, tcp) = (dns_server.udp_address().unwrap(), dns_server.tcp_address().unwrap());
        let config = Config {
            domain: "Cluster.Local.".into(),
            upstream: vec![upstream],
            allowed: Arc::new(move |_| allow),
        };
        let metrics = Arc::new(Metrics::default());
        tokio::spawn(dns_server.run(ctx, config, metrics.clone()));
        DnsTestServer {
            client,
            udp,
            tcp,
            forward_count,
            metrics,
            stop,
            _server: server,
            _directory: directory,
        }
    }

    async fn service(&self, name: &str, spec: Value) {
        let service = json!({"metadata": {"name": name, "namespace": "default"}, "spec": spec});
        self.client.create::<Service>(&serde_json::from_value(service).unwrap()).await.unwrap();
    }

    /// The response over UDP: response code and addresses or record types.
    async fn query(&self, name: &str, record_type: u16) -> String {
        render(&self.exchange(&wire::encode_question(7, name, record_type)).await.expect("an answer"))
    }

    async fn exchange(&self, question: &[u8]) -> Option<Vec<u8>> {
        let socket = UdpSocket::bind("127.0.0.1:0").await.unwrap();
        socket.connect(self.udp).await.unwrap();
        socket.send(question).await.unwrap();
        let mut buffer = vec![0; 65_535];
        let received = tokio::time::timeout(Duration::from_secs(10), socket.recv(&mut buffer)).await.ok()?;
        buffer.truncate(received.unwrap());
        Some(buffer)
    }

    /// Polls until the response is as expected, because caches are updated asynchronously.
    async fn wait_for_answer(&self, name: &str, record_type: u16, expected: &str) {
        let mut last = String::new();
        let wait = async {
            while last != expected {
                last = self.query(name, record_type).await;
            }
        };
        let result = tokio::time::timeout(Duration::from_secs(20), wait).await;
        assert!(result.is_ok(), "{last:?} is not {expected:?}");
    }
}

impl Drop for DnsTestServer {
    fn drop(&mut self) {
        self.stop.send_replace(true);
    }
}

/// Answers every query with 192.0.2.1 and a TTL of one minute.
async fn start_upstream(forward_count: Arc<AtomicUsize>) -> SocketAddr {
    let socket = UdpSocket::bind("127.0.0.1:0").await.unwrap();
    let address = socket.local_addr().unwrap();
    tokio::spawn(async move {
        let mut buffer = vec![0; 4096];
        while let Ok((length, peer)) = socket.recv_from(&mut buffer).await {
            forward_count.fetch_add(1, SeqCst);
            let query = wire::parse_query(&buffer[..length]).unwrap();
            let data = dns::answer::RecordData::A([192, 0, 2, 1].into());
            let record = dns::answer::Record { name: query.name.clone(), ttl: 60, data };
            let mut answer = dns::answer::Answer::empty(wire::Rcode::Ok);
            answer.answers.push(record);
            socket.send_to(&wire::encode_reply(&query, &answer, 512), peer).await.unwrap();
        }
    });
    address
}

fn render(reply: &[u8]) -> String {
    let code = wire::read_u16(reply, 2).unwrap() & 0xf;
    let count = usize::from(wire::read_u16(reply, 6).unwrap());
    let truncated = if reply[2] & 2 == 2 { " cut" } else { "" };
    let records = wire::parse_records(reply).expect("a whole answer");
    let data = records.iter().take(count).map(|record| {
        let bytes = &reply[record.ttl_offset + 6..record.end];
        match record.record_type {
            record_type::A => format!(" {}.{}.{}.{}", bytes[0], bytes[1], bytes[2], bytes[3]),
            record_type => format!(" type{record_type}"),
        }
    });
    format!("{code}{truncated}{}", data.collect::<String>())
}

#[tokio::test(flavor = "multi_thread")]
async fn answers_follow_service_changes() {
    let test_server = DnsTestServer::start(true).await;
    test_server.wait_for_answer("kubernetes.default.svc.cluster.local", record_type::A, "0 10.43.0.1").await;
    assert_eq!(test_server.query("web.default.svc.cluster.local", record_type::A).await, "3");
    test_server.service("web", json!({"clusterIP": "10.43.7.1", "ports": [{"port": 80}]})).await;
    test_server.wait_for_answer("web.default.svc.cluster.local", record_type::A, "0 10.43.7.1").await;
    assert_eq!(test_server.query("WEB.default.svc.CLUSTER.local", record_type::A).await, "0 10.43.7.1");
    assert_eq!(test_server.query("1.7.43.10.in-addr.arpa", record_type::PTR).await, "0 type12");
    test_server.client.delete::<Service>(&Key::new("default", "web"), &Default::default()).await.unwrap();
    test_server.wait_for_answer("web.default.svc.cluster.local", record_type::A, "3").await;
    assert_eq!(test_server.forward_count.load(SeqCst), 0, "cluster names are not forwarded");
    let mut text = String::new();
    test_server.metrics.write(&mut text);
    assert!(text.contains("coredns_dns_responses_total{rcode=\"NXDOMAIN\"}"), "{text}");
}

#[tokio::test(flavor = "multi_thread")]
async fn long_answers_are_complete_only_over_tcp() {
    let test_server = DnsTestServer::start(true).await;
    test_server.service("many", json!({"clusterIP": "None", "ports": [{"port": 80}]})).await;
    let endpoints: Vec<Value> =
        (1..=90).map(|number| json!({"addresses": [format!("10.42.0.{number}")]})).collect();
    let slice = json!({
        "metadata": {
            "name": "many", "namespace": "default", "labels": {"kubernetes.io/service-name": "many"},
        },
        "addressType": "IPv4", "endpoints": endpoints, "ports": [{"port": 80}],
    });
    test_server.client.create::<EndpointSlice>(&serde_json::from_value(slice).unwrap()).await.unwrap();
    let name = "many.default.svc.cluster.local";
    let count = |text: &str| text.matches(" 10.42.").count();
    let mut answer = String::new();
    while count(&answer) < 2 {
        answer = test_server.query(name, record_type::A).await;
    }
    assert!(answer.contains("cut") && count(&answer) < 90, "{answer}");

    let mut stream = TcpStream::connect(test_server.tcp).await.unwrap();
    let mut first_addresses = std::collections::BTreeSet::new();
    for id in 0..4 {
        let question = wire::encode_question(id, name, record_type::A);
        stream.write_u16(question.len() as u16).await.unwrap();
        stream.write_all(&question).await.unwrap();
        let mut reply = vec![0; usize::from(stream.read_u16().await.unwrap())];
        stream.read_exact(&mut reply).await.unwrap();
        let text = render(&reply);
        assert_eq!(count(&text), 90, "{text}");
        first_addresses.insert(text.split(' ').nth(1).unwrap().to_owned());
    }
    assert_eq!(first_addresses.len(), 4, "addresses are rotated");
}

#[tokio::test(flavor = "multi_thread")]
async fn caches_answers_for_external_names() {
    let test_server = DnsTestServer::start(true).await;
    for _ in 0..5 {
        assert_eq!(test_server.query("example.com", record_type::A).await, "0 192.0.2.1");
    }
    assert_eq!(test_server.forward_count.load(SeqCst), 1, "later queries hit the cache");
    test_server.service("out", json!({"type": "ExternalName", "externalName": "example.org"})).await;
    test_server.wait_for_answer("out.default.svc.cluster.local", record_type::A, "0 type5 192.0.2.1").await;
    assert_eq!(test_server.query("out.default.svc.cluster.local", record_type::CNAME).await, "0 type5");
}

#[tokio::test(flavor = "multi_thread")]
async fn tolerates_malformed_messages() {
    let test_server = DnsTestServer::start(true).await;
    test_server.wait_for_answer("kubernetes.default.svc.cluster.local", record_type::A, "0 10.43.0.1").await;
    let socket = UdpSocket::bind("127.0.0.1:0").await.unwrap();
    for bytes in [&b""[..], b"x", &[0; 11], &[255; 600]] {
        socket.send_to(bytes, test_server.udp).await.unwrap();
    }
    // A message without a question gets a FORMERR response.
    let reply = test_server.exchange(&[1, 2, 1, 0, 0, 0, 0, 0, 0, 0, 0, 0]).await.unwrap();
    assert_eq!(reply[3] & 0xf, 1);
    let mut stream = TcpStream::connect(test_server.tcp).await.unwrap();
    stream.write_all(&[0, 3, 1, 2, 3]).await.unwrap();
    assert_eq!(stream.read(&mut [0; 10]).await.unwrap(), 0, "closed");
    assert_eq!(
        test_server.query("kubernetes.default.svc.cluster.local", record_type::A).await,
        "0 10.43.0.1"
    );
}

#[tokio::test(flavor = "multi_thread")]
async fn ignores_disallowed_clients() {
    let test_server = DnsTestServer::start(false).await;
    let mut stream = TcpStream::connect(test_server.tcp).await.unwrap();
    assert_eq!(stream.read(&mut [0; 10]).await.unwrap(), 0, "closed");
}
