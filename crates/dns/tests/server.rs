//! The server on real sockets, over a cluster in this process and with a resolver of our own behind it.

use std::net::SocketAddr;
use std::sync::Arc;
use std::sync::atomic::{AtomicUsize, Ordering::SeqCst};
use std::time::Duration;

use dns::wire::{self, kind};
use dns::{Config, Metrics, Server};
use k8s_openapi::api::core::v1::Service;
use k8s_openapi::api::discovery::v1::EndpointSlice;
use reconcile::{Client, Clock, Ctx, Key};
use serde_json::{Value, json};
use tokio::io::{AsyncReadExt as _, AsyncWriteExt as _};
use tokio::net::{TcpStream, UdpSocket};
use tokio::sync::watch;

struct World {
    client: Client,
    udp: SocketAddr,
    tcp: SocketAddr,
    /// How many questions were handed on.
    handed_on: Arc<AtomicUsize>,
    metrics: Arc<Metrics>,
    stop: watch::Sender<bool>,
    _server: apiserver::Started,
    _directory: tempfile::TempDir,
}

impl World {
    async fn start(allow: bool) -> World {
        let directory = tempfile::tempdir().unwrap();
        let stop = watch::Sender::new(false);
        let server = apiserver::start_in(directory.path(), stop.subscribe()).await.unwrap();
        let client = Client::new(server.local(), "test");
        let ctx = Ctx::new(client.clone(), Clock::default(), stop.subscribe());
        let handed_on = Arc::new(AtomicUsize::new(0));
        let upstream = resolver(handed_on.clone()).await;
        let names = Server::bind("127.0.0.1:0".parse().unwrap()).await.unwrap();
        let (udp, tcp) = (names.udp_address().unwrap(), names.tcp_address().unwrap());
        let config = Config {
            domain: "Cluster.Local.".into(),
            upstream: vec![upstream],
            allowed: Arc::new(move |_| allow),
        };
        let metrics = Arc::new(Metrics::default());
        tokio::spawn(names.run(ctx, config, metrics.clone()));
        World { client, udp, tcp, handed_on, metrics, stop, _server: server, _directory: directory }
    }

    async fn service(&self, name: &str, spec: Value) {
        let service = json!({"metadata": {"name": name, "namespace": "default"}, "spec": spec});
        self.client.create::<Service>(&serde_json::from_value(service).unwrap()).await.unwrap();
    }

    /// What is answered over UDP: the code and the addresses or names in it.
    async fn ask(&self, name: &str, wanted: u16) -> String {
        print(&self.raw(&wire::question(7, name, wanted)).await.expect("an answer"))
    }

    async fn raw(&self, question: &[u8]) -> Option<Vec<u8>> {
        let socket = UdpSocket::bind("127.0.0.1:0").await.unwrap();
        socket.connect(self.udp).await.unwrap();
        socket.send(question).await.unwrap();
        let mut buffer = vec![0; 65_535];
        let received = tokio::time::timeout(Duration::from_secs(10), socket.recv(&mut buffer)).await.ok()?;
        buffer.truncate(received.unwrap());
        Some(buffer)
    }

    /// Asks until the answer is as wished: caches follow after a moment.
    async fn becomes(&self, name: &str, wanted: u16, wished: &str) {
        let mut last = String::new();
        let wait = async {
            while last != wished {
                last = self.ask(name, wanted).await;
            }
        };
        let outcome = tokio::time::timeout(Duration::from_secs(20), wait).await;
        assert!(outcome.is_ok(), "{last:?} is not {wished:?}");
    }
}

impl Drop for World {
    fn drop(&mut self) {
        self.stop.send_replace(true);
    }
}

/// Says 192.0.2.1 to everything, for a minute.
async fn resolver(asked: Arc<AtomicUsize>) -> SocketAddr {
    let socket = UdpSocket::bind("127.0.0.1:0").await.unwrap();
    let address = socket.local_addr().unwrap();
    tokio::spawn(async move {
        let mut buffer = vec![0; 4096];
        while let Ok((length, peer)) = socket.recv_from(&mut buffer).await {
            asked.fetch_add(1, SeqCst);
            let query = wire::query(&buffer[..length]).unwrap();
            let data = dns::answer::Data::A([192, 0, 2, 1].into());
            let record = dns::answer::Record { name: query.name.clone(), ttl: 60, data };
            let mut answer = dns::answer::Answer::empty(wire::Code::Ok);
            answer.answers.push(record);
            socket.send_to(&wire::reply(&query, &answer, 512), peer).await.unwrap();
        }
    });
    address
}

fn print(reply: &[u8]) -> String {
    let code = wire::number(reply, 2).unwrap() & 0xf;
    let count = usize::from(wire::number(reply, 6).unwrap());
    let cut = if reply[2] & 2 == 2 { " cut" } else { "" };
    let records = wire::records(reply).expect("a whole answer");
    let data = records.iter().take(count).map(|record| {
        let bytes = &reply[record.ttl_at + 6..record.end];
        match record.kind {
            kind::A => format!(" {}.{}.{}.{}", bytes[0], bytes[1], bytes[2], bytes[3]),
            kind => format!(" type{kind}"),
        }
    });
    format!("{code}{cut}{}", data.collect::<String>())
}

#[tokio::test(flavor = "multi_thread")]
async fn names_follow_the_cluster() {
    let world = World::start(true).await;
    world.becomes("kubernetes.default.svc.cluster.local", kind::A, "0 10.43.0.1").await;
    assert_eq!(world.ask("web.default.svc.cluster.local", kind::A).await, "3");
    world.service("web", json!({"clusterIP": "10.43.7.1", "ports": [{"port": 80}]})).await;
    world.becomes("web.default.svc.cluster.local", kind::A, "0 10.43.7.1").await;
    assert_eq!(world.ask("WEB.default.svc.CLUSTER.local", kind::A).await, "0 10.43.7.1");
    assert_eq!(world.ask("1.7.43.10.in-addr.arpa", kind::PTR).await, "0 type12");
    world.client.delete::<Service>(&Key::new("default", "web"), &Default::default()).await.unwrap();
    world.becomes("web.default.svc.cluster.local", kind::A, "3").await;
    assert_eq!(world.handed_on.load(SeqCst), 0, "the cluster's names are nobody else's business");
    let mut text = String::new();
    world.metrics.write(&mut text);
    assert!(text.contains("coredns_dns_responses_total{rcode=\"NXDOMAIN\"}"), "{text}");
}

#[tokio::test(flavor = "multi_thread")]
async fn long_answers_go_over_tcp() {
    let world = World::start(true).await;
    world.service("many", json!({"clusterIP": "None", "ports": [{"port": 80}]})).await;
    let endpoints: Vec<Value> =
        (1..=90).map(|number| json!({"addresses": [format!("10.42.0.{number}")]})).collect();
    let slice = json!({
        "metadata": {
            "name": "many", "namespace": "default", "labels": {"kubernetes.io/service-name": "many"},
        },
        "addressType": "IPv4", "endpoints": endpoints, "ports": [{"port": 80}],
    });
    world.client.create::<EndpointSlice>(&serde_json::from_value(slice).unwrap()).await.unwrap();
    let name = "many.default.svc.cluster.local";
    let count = |text: &str| text.matches(" 10.42.").count();
    let mut answer = String::new();
    while count(&answer) < 2 {
        answer = world.ask(name, kind::A).await;
    }
    assert!(answer.contains("cut") && count(&answer) < 90, "{answer}");

    let mut stream = TcpStream::connect(world.tcp).await.unwrap();
    let mut firsts = std::collections::BTreeSet::new();
    for id in 0..4 {
        let question = wire::question(id, name, kind::A);
        stream.write_u16(question.len() as u16).await.unwrap();
        stream.write_all(&question).await.unwrap();
        let mut reply = vec![0; usize::from(stream.read_u16().await.unwrap())];
        stream.read_exact(&mut reply).await.unwrap();
        let text = print(&reply);
        assert_eq!(count(&text), 90, "{text}");
        firsts.insert(text.split(' ').nth(1).unwrap().to_owned());
    }
    assert_eq!(firsts.len(), 4, "each client gets another one first");
}

#[tokio::test(flavor = "multi_thread")]
async fn other_names_are_handed_on_once() {
    let world = World::start(true).await;
    for _ in 0..5 {
        assert_eq!(world.ask("example.com", kind::A).await, "0 192.0.2.1");
    }
    assert_eq!(world.handed_on.load(SeqCst), 1, "then they are known");
    world.service("out", json!({"type": "ExternalName", "externalName": "example.org"})).await;
    world.becomes("out.default.svc.cluster.local", kind::A, "0 type5 192.0.2.1").await;
    assert_eq!(world.ask("out.default.svc.cluster.local", kind::CNAME).await, "0 type5");
}

#[tokio::test(flavor = "multi_thread")]
async fn nonsense_does_no_harm() {
    let world = World::start(true).await;
    world.becomes("kubernetes.default.svc.cluster.local", kind::A, "0 10.43.0.1").await;
    let socket = UdpSocket::bind("127.0.0.1:0").await.unwrap();
    for bytes in [&b""[..], b"x", &[0; 11], &[255; 600]] {
        socket.send_to(bytes, world.udp).await.unwrap();
    }
    // No question at all is still answered, with a word.
    let reply = world.raw(&[1, 2, 1, 0, 0, 0, 0, 0, 0, 0, 0, 0]).await.unwrap();
    assert_eq!(reply[3] & 0xf, 1);
    let mut stream = TcpStream::connect(world.tcp).await.unwrap();
    stream.write_all(&[0, 3, 1, 2, 3]).await.unwrap();
    assert_eq!(stream.read(&mut [0; 10]).await.unwrap(), 0, "closed");
    assert_eq!(world.ask("kubernetes.default.svc.cluster.local", kind::A).await, "0 10.43.0.1");
}

#[tokio::test(flavor = "multi_thread")]
async fn strangers_are_not_answered() {
    let world = World::start(false).await;
    let mut stream = TcpStream::connect(world.tcp).await.unwrap();
    assert_eq!(stream.read(&mut [0; 10]).await.unwrap(), 0, "closed");
}
