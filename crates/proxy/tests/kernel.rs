//! The rules in a real kernel, in networks of our own: real connections to every kind of Service, and the same
//! table whether `nft` or we ourselves put it there. Needs root; without, the tests say that they are skipped.

#[path = "kernel/net.rs"]
mod net;

use std::collections::{BTreeMap, BTreeSet};
use std::future::Future;
use std::sync::Arc;
use std::time::Duration;

use k8s_openapi::api::core::v1::{Event, Node, Pod, Service};
use k8s_openapi::api::discovery::v1::EndpointSlice;
use k8s_openapi::api::networking::v1::NetworkPolicy;
use net::{Flow, ask, build, inside, serve, sh};
use nft::{Net, Ruleset};
use proxy::plan::{Place, plan};
use proxy::skeleton::{loopback, skeleton};
use proxy::{Config, Firewall, Kernel, Nft};
use reconcile::{Client, Clock, Ctx, Key, Patch};
use serde_json::{Value, json};
use tokio::sync::watch;

fn nets(texts: &[&str]) -> Vec<Net> {
    texts.iter().map(|text| text.parse().unwrap()).collect()
}

fn config() -> Config {
    Config {
        node: "here".into(),
        pods: nets(&["10.42.0.0/16", "fd42::/56"]),
        services: nets(&["10.43.0.0/16", "fd43::/112"]),
        way_out: true,
        policies: true,
        accept: true,
        host_ports: true,
        bridge: Some("pods"),
        ports: None,
    }
}

fn service(name: &str, spec: &Value) -> Service {
    serde_json::from_value(json!({
        "metadata": {"name": name, "namespace": "default"},
        "spec": spec,
        "status": {"loadBalancer": {"ingress": spec["balancers"]}},
    }))
    .unwrap()
}

fn slice(name: &str, family: &str, proto: &str, endpoints: &[(&str, &str)]) -> EndpointSlice {
    let endpoints: Vec<Value> = endpoints
        .iter()
        .map(|(address, node)| json!({"addresses": [address], "nodeName": node, "conditions": {"ready": true}}))
        .collect();
    let (family_low, proto_low) = (family.to_lowercase(), proto.to_lowercase());
    serde_json::from_value(json!({
        "metadata": {
            "name": format!("{name}-{family_low}-{proto_low}"), "namespace": "default",
            "labels": {"kubernetes.io/service-name": name},
        },
        "addressType": family,
        "endpoints": endpoints,
        "ports": [{"port": 8080, "protocol": proto, "name": proto_low}],
    }))
    .unwrap()
}

/// Everything the model can say.
fn samples() -> Ruleset {
    let config = config();
    let place = Place {
        node: config.node.clone(),
        zone: "a".into(),
        addresses: vec!["192.0.2.1".parse().unwrap()],
        pods: config.pods.clone(),
    };
    let mut rules = Ruleset::default();
    rules.put(&"".into(), skeleton(&config.pods, &config.services));
    rules.put(&"loopback".into(), loopback());
    let ports = json!([
        {"port": 80, "nodePort": 30080, "protocol": "TCP", "name": "tcp"},
        {"port": 53, "nodePort": 30053, "protocol": "UDP", "name": "udp"},
        {"port": 99, "nodePort": 30099, "protocol": "SCTP", "name": "sctp"},
    ]);
    let specs = [
        ("plain", json!({"ports": ports})),
        (
            "local",
            json!({"type": "NodePort", "externalTrafficPolicy": "Local", "internalTrafficPolicy": "Local", "ports": ports}),
        ),
        ("sticky", json!({"sessionAffinity": "ClientIP", "ports": ports})),
        (
            "balanced",
            json!({
                "type": "LoadBalancer", "ports": ports, "externalIPs": ["203.0.113.9", "2001:db8:f::9"],
                "loadBalancerSourceRanges": ["198.51.100.0/24", "198.51.102.0/24", "255.255.255.0/24", "192.0.2.7/32", "2001:db8::/32"],
                "balancers": [{"ip": "203.0.113.1"}, {"ip": "2001:db8:f::1"}],
            }),
        ),
        ("empty", json!({"type": "NodePort", "ports": ports})),
    ];
    for (number, (name, mut spec)) in specs.into_iter().enumerate() {
        spec["clusterIPs"] = json!([format!("10.43.1.{number}"), format!("fd43::{number}")]);
        let mut slices = Vec::new();
        for proto in ["TCP", "UDP", "SCTP"].iter().filter(|_| name != "empty") {
            slices.push(slice(name, "IPv4", proto, &[("10.42.0.5", "here"), ("10.42.1.5", "there")]));
            slices.push(slice(name, "IPv6", proto, &[("fd42::5", "here")]));
        }
        let slices: Vec<Arc<EndpointSlice>> = slices.into_iter().map(Arc::new).collect();
        rules.put(&name.into(), plan(&service(name, &spec), &slices, &place).fragment);
    }
    rules
}

/// What the kernel has. `nft` names the kind of rejection by family where it knows the family; it is the same one.
/// Endpoints stand in a map that all rules share, and are put back into the rules here.
fn listed() -> String {
    let text = sh("nft list table inet skiff");
    let text = text.replace(" with icmp port-unreachable", "").replace(" with icmpv6 port-unreachable", "");
    let (mut rest, mut endpoints) = (String::new(), BTreeMap::new());
    let mut map = None;
    for line in text.lines() {
        if let Some(name) = line.strip_prefix("\tmap endpoints") {
            map = Some(name.trim_end_matches(" {").to_owned());
        }
        map = map.filter(|_| line != "\t}");
        if let Some(map) = &map {
            let elements = line.trim().trim_start_matches("elements = {").trim_end_matches(['}', ',']);
            for (number, to) in elements.split(',').filter_map(|row| row.split_once(" : ")) {
                if let Ok(number) = number.trim().parse::<u32>() {
                    endpoints.insert((map.clone(), number), to.trim().to_owned());
                }
            }
        } else if line != "\t}" {
            rest.push_str(line);
            rest.push('\n');
        }
    }
    let line = |line: &str| match line.split_once(" map @endpoints") {
        Some((start, map)) => {
            let (start, first) = start.split_once(" offset ").unwrap_or((start, "0"));
            let (first, count) = (first.parse::<u32>().unwrap(), start.rsplit(' ').next().unwrap());
            let numbers = 0..count.parse::<u32>().unwrap();
            let rows: Vec<String> = numbers
                .map(|number| format!("{number} : {}", endpoints[&(map.to_owned(), first + number)]))
                .collect();
            format!("{start} map {{ {} }}", rows.join(", "))
        }
        None => line.to_owned(),
    };
    rest.lines().map(line).collect::<Vec<_>>().join("\n")
}

#[test]
fn the_same_table_either_way() {
    if !inside("the_same_table_either_way") {
        return;
    }
    let (mut rules, kernel) = (samples(), Kernel::default());
    let batch = rules.everything();
    Nft::default().apply(&batch).unwrap();
    let by_nft = listed();
    kernel.apply(&batch).unwrap();
    let by_us = listed();
    let lines = |text: &str| text.lines().map(str::to_owned).collect::<BTreeSet<String>>();
    let (nft, us) = (lines(&by_nft), lines(&by_us));
    let differ: Vec<&String> = nft.symmetric_difference(&us).collect();
    assert!(differ.is_empty(), "{differ:#?}");
    assert!(by_us.lines().count() > 300, "{by_us}");

    // Taking everything out again leaves the skeleton, and removing that leaves nothing.
    rules.retain(|owner| owner.is_empty());
    kernel.apply(&rules.changes()).unwrap();
    kernel.apply(&rules.changes_and_sweep()).unwrap();
    let bare = listed();
    kernel.apply(&rules.everything()).unwrap();
    assert_eq!(lines(&bare), lines(&listed()));
    kernel.apply(&nft::Batch::remove()).unwrap();
    assert_eq!(sh("nft list ruleset"), "");
}

#[test]
fn a_refused_batch_changes_nothing() {
    if !inside("a_refused_batch_changes_nothing") {
        return;
    }
    let (mut rules, kernel) = (samples(), Kernel::default());
    kernel.apply(&rules.everything()).unwrap();
    let before = listed();
    let batch = nft::Batch {
        commands: vec![
            nft::Command::AddChain("new".into(), None),
            nft::Command::DeleteChain("is-not-there".into()),
            nft::Command::AddChain("newer".into(), None),
        ],
    };
    let error = kernel.apply(&batch).unwrap_err().to_string();
    assert!(error.contains("No such file"), "{error}");
    assert_eq!(listed(), before);
}

/// A cluster with the proxy at work in this network.
struct World {
    client: Client,
    stop: watch::Sender<bool>,
    _server: apiserver::Started,
    _directory: tempfile::TempDir,
}

impl World {
    async fn start() -> World {
        let directory = tempfile::tempdir().unwrap();
        let stop = watch::Sender::new(false);
        let server = apiserver::start_in(directory.path(), stop.subscribe()).await.unwrap();
        let client = Client::new(server.local(), "test");
        let ctx = Ctx::new(client.clone(), Clock::default(), stop.subscribe());
        tokio::spawn(proxy::run(ctx, config(), Arc::new(Kernel::default())));
        World { client, stop, _server: server, _directory: directory }
    }

    async fn service(&self, name: &str, mut spec: Value) -> Service {
        let balancers = spec.as_object_mut().unwrap().remove("balancers");
        let mut made = self.client.create(&service(name, &spec)).await.unwrap();
        if let Some(balancers) = balancers {
            let status = json!({"loadBalancer": {"ingress": balancers}});
            made.status = Some(serde_json::from_value(status).unwrap());
            made = self.client.replace_status(&made).await.unwrap();
        }
        made
    }

    /// Whom pods act as.
    async fn account(&self) {
        let account = json!({"metadata": {"name": "default", "namespace": "default"}});
        let account: k8s_openapi::api::core::v1::ServiceAccount = serde_json::from_value(account).unwrap();
        self.client.create(&account).await.unwrap();
    }

    /// A running pod of this node, with its port 8080 named.
    async fn pod(&self, name: &str, address: &str) {
        let port = if name == "a" { 8081 } else { 8082 };
        let pod = json!({
            "metadata": {"name": name, "namespace": "default", "labels": {"name": name}},
            "spec": {"nodeName": "here", "containers": [{
                "name": "main", "image": "x", "ports": [
                    {"name": "http", "containerPort": 8080, "hostPort": port},
                    {"containerPort": 8080, "hostPort": port, "protocol": "UDP", "hostIP": "127.0.0.1"},
                ],
            }]},
        });
        let mut made = self.client.create::<Pod>(&serde_json::from_value(pod).unwrap()).await.unwrap();
        let status = json!({"phase": "Running", "podIP": address, "podIPs": [{"ip": address}]});
        made.status = Some(serde_json::from_value(status).unwrap());
        self.client.replace_status(&made).await.unwrap();
    }

    async fn endpoints(&self, name: &str, proto: &str, endpoints: &[&str]) {
        let endpoints: Vec<(&str, &str)> =
            endpoints.iter().map(|text| text.split_once('@').unwrap_or((text, "here"))).collect();
        let wanted = slice(name, "IPv4", proto, &endpoints);
        let key = Key::new("default", wanted.metadata.name.as_deref().unwrap());
        match self.client.create(&wanted).await {
            Ok(_) => {}
            Err(error) if error.is_already_exists() => {
                let patch = Patch::Merge(json!({"endpoints": wanted.endpoints}));
                self.client.patch::<EndpointSlice>(&key, &patch).await.unwrap();
            }
            Err(error) => panic!("{error}"),
        }
    }
}

impl Drop for World {
    fn drop(&mut self) {
        self.stop.send_replace(true);
    }
}

/// Asks until the answer is as wished: rules follow the cluster after a moment.
async fn becomes(mut look: impl FnMut() -> String, wished: &str) {
    let mut last = String::new();
    let wait = async {
        loop {
            last = look();
            if last == wished {
                return;
            }
            tokio::time::sleep(Duration::from_millis(20)).await;
        }
    };
    let outcome = tokio::time::timeout(Duration::from_secs(20), wait).await;
    assert!(outcome.is_ok(), "{last:?} is not {wished:?}");
}

/// Runs a test of the whole role in a built network.
fn with_world<F: Future<Output = ()>>(test: &str, work: impl FnOnce(World) -> F) {
    if !inside(test) {
        return;
    }
    build();
    ["a", "b", "out", "node"].into_iter().for_each(serve);
    let runtime = tokio::runtime::Builder::new_multi_thread().worker_threads(2).enable_all().build().unwrap();
    runtime.block_on(async {
        work(World::start().await).await;
    });
}

const TCP: &str = r#"[{"port": 80, "protocol": "TCP", "name": "tcp"}]"#;

fn tcp() -> Value {
    serde_json::from_str(TCP).unwrap()
}

#[test]
fn cluster_ips() {
    with_world("cluster_ips", |world| async move {
        world.service("web", json!({"clusterIP": "10.43.7.1", "ports": tcp()})).await;
        becomes(|| ask("a", "10.43.7.1:80"), "refused").await;
        world.endpoints("web", "TCP", &["10.42.0.5", "10.42.0.6"]).await;
        becomes(|| ask("node", "10.43.7.1:80").split(' ').next().unwrap_or_default().to_owned(), "a").await;

        // From one pod to the other the source stays; to itself it is the node.
        let seen: BTreeSet<String> = (0..40).map(|_| ask("a", "10.43.7.1:80")).collect();
        assert_eq!(seen, ["a 10.42.0.1", "b 10.42.0.5"].map(str::to_owned).into());
        let seen: BTreeSet<String> = (0..40).map(|_| ask("out", "10.43.7.1:80")).collect();
        assert_eq!(seen, ["a 10.42.0.1", "b 10.42.0.1"].map(str::to_owned).into());

        // Outside nobody knows pods, and among themselves they are known as they are.
        assert_eq!(ask("a", "192.0.2.2:8080"), "out 192.0.2.1");
        assert_eq!(ask("a", "10.42.0.6:8080"), "b 10.42.0.5");

        // Other ports of the address and other addresses of the range are nobody's.
        assert_eq!(ask("a", "10.43.7.1:81"), "refused");
        assert_eq!(ask("a", "10.43.7.2:80"), "nothing");

        world.endpoints("web", "TCP", &["10.42.0.6"]).await;
        // One answer may be chance.
        let twenty = || (0..20).map(|_| ask("a", "10.43.7.1:80")).collect::<BTreeSet<_>>();
        becomes(|| Vec::from_iter(twenty()).join(", "), "b 10.42.0.5").await;
        assert_eq!(ask("b", "10.43.7.1:80"), "b 10.42.0.1");
        world.client.delete::<Service>(&Key::new("default", "web"), &Default::default()).await.unwrap();
        becomes(|| ask("a", "10.43.7.1:80"), "nothing").await;
    });
}

#[test]
fn from_outside() {
    with_world("from_outside", |world| async move {
        let ports = json!([{"port": 80, "nodePort": 30080, "protocol": "TCP", "name": "tcp"}]);
        let spec = json!({
            "type": "LoadBalancer", "ports": ports, "externalIPs": ["203.0.113.9"],
            "loadBalancerSourceRanges": ["192.0.2.2/32"], "balancers": [{"ip": "203.0.113.1"}],
        });
        world.service("web", spec).await;
        world.endpoints("web", "TCP", &["10.42.0.5"]).await;
        becomes(|| ask("out", "192.0.2.1:30080"), "a 10.42.0.1").await;
        becomes(|| ask("out", "203.0.113.1:80"), "a 10.42.0.1").await;
        assert_eq!(ask("out", "203.0.113.9:80"), "a 10.42.0.1");
        assert_eq!(ask("node", "192.0.2.1:30080"), "a 10.42.0.1");
        assert_eq!(ask("b", "192.0.2.1:30080"), "a 10.42.0.1");
        assert_eq!(ask("b", "203.0.113.1:80"), "nothing", "not from everywhere");

        // Local: the source is seen, and other nodes' endpoints are not for outsiders.
        let local = Patch::Merge(json!({"spec": {"externalTrafficPolicy": "Local"}}));
        let key = Key::new("default", "web");
        let made = world.client.patch::<Service>(&key, &local).await.unwrap();
        becomes(|| ask("out", "192.0.2.1:30080"), "a 192.0.2.2").await;
        let port = made.spec.and_then(|spec| spec.health_check_node_port).unwrap();
        becomes(|| health(port), "HTTP/1.1 200 OK 1").await;
        world.endpoints("web", "TCP", &["10.42.0.5@there"]).await;
        becomes(|| ask("out", "192.0.2.1:30080"), "nothing").await;
        assert_eq!(ask("b", "192.0.2.1:30080"), "a 10.42.0.6", "from inside there is no policy");
        becomes(|| health(port), "HTTP/1.1 503 Service Unavailable 0").await;
    });
}

/// The status and the weight a load balancer is told.
fn health(port: i32) -> String {
    use std::io::{Read as _, Write as _};
    let Ok(mut stream) = std::net::TcpStream::connect(("127.0.0.1", u16::try_from(port).unwrap())) else {
        return "refused".into();
    };
    let mut text = String::new();
    let asked = stream.write_all(b"GET /healthz HTTP/1.1\r\nHost: x\r\n\r\n");
    if asked.and_then(|()| stream.read_to_string(&mut text).map(drop)).is_err() {
        return "broken".into();
    }
    let weight = text.lines().find_map(|line| {
        line.to_lowercase().strip_prefix("x-load-balancing-endpoint-weight: ").map(str::to_owned)
    });
    format!("{} {}", text.lines().next().unwrap_or_default(), weight.unwrap_or_default())
}

#[test]
fn sessions_stay() {
    with_world("sessions_stay", |world| async move {
        let spec = json!({"clusterIP": "10.43.7.1", "ports": tcp(), "sessionAffinity": "ClientIP"});
        world.service("web", spec).await;
        world.endpoints("web", "TCP", &["10.42.0.5", "10.42.0.6"]).await;
        becomes(|| ask("node", "10.43.7.1:80").split(' ').count().to_string(), "2").await;
        let first = ask("out", "10.43.7.1:80");
        assert!((0..30).all(|_| ask("out", "10.43.7.1:80") == first), "{first}");
        // Until its endpoint goes.
        let left = if first.starts_with('a') { "10.42.0.6" } else { "10.42.0.5" };
        world.endpoints("web", "TCP", &[left]).await;
        let other = if first.starts_with('a') { "b 10.42.0.1" } else { "a 10.42.0.1" };
        becomes(|| ask("out", "10.43.7.1:80"), other).await;
    });
}

#[test]
fn udp_flows_move_on() {
    with_world("udp_flows_move_on", |world| async move {
        let ports = json!([{"port": 53, "protocol": "UDP", "name": "udp"}]);
        world.service("dns", json!({"clusterIP": "10.43.7.1", "ports": ports})).await;
        world.endpoints("dns", "UDP", &["10.42.0.5"]).await;
        becomes(|| Flow::new("b", "10.43.7.1:53").ask(), "a 10.42.0.6").await;
        let flow = Flow::new("b", "10.43.7.1:53");
        assert_eq!(flow.ask(), "a 10.42.0.6");
        world.endpoints("dns", "UDP", &["10.42.0.6"]).await;
        becomes(|| flow.ask(), "b 10.42.0.1").await;
    });
}

#[test]
fn policies_hold() {
    with_world("policies_hold", |world| async move {
        world.account().await;
        world.pod("a", "10.42.0.5").await;
        world.pod("b", "10.42.0.6").await;
        becomes(|| ask("b", "10.42.0.5:8080"), "a 10.42.0.6").await;
        becomes(|| ask("out", "192.0.2.1:8081"), "a 192.0.2.2").await;
        assert_eq!(ask("a", "192.0.2.1:8081"), "a 10.42.0.1", "to itself by the port of the machine");
        let key = Key::new("default", "p");
        let policy = json!({
            "metadata": {"name": "p", "namespace": "default"},
            "spec": {"podSelector": {"matchLabels": {"name": "a"}}, "policyTypes": ["Ingress"]},
        });
        let policy: NetworkPolicy = serde_json::from_value(policy).unwrap();
        world.client.create(&policy).await.unwrap();
        becomes(|| ask("b", "10.42.0.5:8080"), "nothing").await;
        assert_eq!(ask("out", "10.42.0.5:8080"), "nothing");
        assert_eq!(ask("node", "10.42.0.5:8080"), "a 10.42.0.1", "a node always reaches its pods");
        assert_eq!(ask("a", "10.42.0.6:8080"), "b 10.42.0.5", "and answers come back");

        let allow = json!({"spec": {"ingress": [
            {"from": [{"podSelector": {"matchLabels": {"name": "b"}}}], "ports": [{"port": 8000, "endPort": 8080}]},
            {"from": [{"ipBlock": {"cidr": "192.0.2.0/24", "except": ["192.0.2.3/32", "192.0.2.9/32"]}}], "ports": [{"port": "http"}]},
        ]}});
        world.client.patch::<NetworkPolicy>(&key, &Patch::Merge(allow)).await.unwrap();
        becomes(|| ask("b", "10.42.0.5:8080"), "a 10.42.0.6").await;
        becomes(|| ask("out", "10.42.0.5:8080"), "a 192.0.2.2").await;

        // By a Service it is the same: the client counts, not the way.
        let ports = json!([{"port": 80, "nodePort": 30080, "protocol": "TCP", "name": "tcp"}]);
        world.service("web", json!({"type": "NodePort", "ports": ports})).await;
        world.endpoints("web", "TCP", &["10.42.0.5"]).await;
        becomes(|| ask("out", "192.0.2.1:30080"), "a 10.42.0.1").await;
        let closed = json!({"spec": {"ingress": []}});
        world.client.patch::<NetworkPolicy>(&key, &Patch::Merge(closed)).await.unwrap();
        becomes(|| ask("out", "192.0.2.1:30080"), "nothing").await;

        world.client.delete::<NetworkPolicy>(&key, &Default::default()).await.unwrap();
        becomes(|| ask("out", "192.0.2.1:30080"), "a 10.42.0.1").await;
        assert_eq!(ask("b", "10.42.0.5:8080"), "a 10.42.0.6");
    });
}

#[test]
fn loopback_leads_to_host_ports() {
    with_world("loopback_leads_to_host_ports", |world| async move {
        world.account().await;
        world.pod("a", "10.42.0.5").await;
        becomes(|| ask("node", "127.0.0.1:8081"), "a 10.42.0.1").await;
        assert_eq!(ask("node", "127.0.0.2:8081"), "a 10.42.0.1");
        assert_eq!(Flow::new("node", "127.0.0.1:8081").ask(), "a 10.42.0.1");
        assert_eq!(Flow::new("node", "192.0.2.1:8081").ask(), "refused", "not at that address");
        assert_eq!(ask("node", "127.0.0.1:8080"), "node 127.0.0.1", "what is nobody else's is the node's");

        // Neighbours who send packets for loopback addresses our way.
        for (name, gateway) in [("b", "10.42.0.1"), ("out", "192.0.2.1")] {
            sh(&format!(
                "ip netns exec {name} sh -ec 'echo 1 > /proc/sys/net/ipv4/conf/all/route_localnet'
                 ip -n {name} addr del 127.0.0.1/8 dev lo
                 ip -n {name} route add 127.0.0.0/8 via {gateway} dev eth0 onlink"
            ));
            assert_eq!(ask(name, "127.0.0.1:8080"), "nothing");
            assert_eq!(Flow::new(name, "127.0.0.1:8081").ask(), "nothing");
        }
        // It is the rules that keep them away.
        sh("nft insert rule inet skiff filter-prerouting ip daddr 127.0.0.0/8 accept");
        assert_eq!(ask("b", "127.0.0.1:8080"), "node 10.42.0.6");
        assert_eq!(Flow::new("out", "127.0.0.1:8081").ask(), "a 192.0.2.2");

        // Where pods are behind something else, nothing leads there.
        for link in ["veth-a", "veth-b"] {
            sh(&format!("ip addr add 192.0.2.9/32 dev {link}; ip addr del 10.42.0.1/32 dev {link}"));
            sh(&format!("echo 0 > /proc/sys/net/ipv4/conf/{link}/route_localnet"));
        }
        sh("ip link del pods");
        world.pod("b", "10.42.0.6").await;
        becomes(|| ask("node", "127.0.0.1:8081"), "refused").await;
        becomes(|| ask("node", "192.0.2.1:8082"), "b 192.0.2.1").await;
    });
}

#[test]
fn other_nodes_are_reached() {
    with_world("other_nodes_are_reached", |world| async move {
        let ctx = Ctx::new(world.client.clone(), Clock::default(), world.stop.subscribe());
        tokio::spawn(proxy::routes::run(ctx, "here".into()));
        let node = json!({"metadata": {"name": "there"}, "spec": {"podCIDR": "10.42.1.0/24", "podCIDRs": ["10.42.1.0/24"]}});
        let mut node = world.client.create::<Node>(&serde_json::from_value(node).unwrap()).await.unwrap();
        let status = json!({"addresses": [{"type": "InternalIP", "address": "192.0.2.2"}]});
        node.status = Some(serde_json::from_value(status).unwrap());
        world.client.replace_status(&node).await.unwrap();
        sh("ip -n out addr add 10.42.1.5/32 dev lo");
        becomes(|| ask("a", "10.42.1.5:8080"), "out 10.42.0.5").await;
        world.client.delete::<Node>(&Key::new("", "there"), &Default::default()).await.unwrap();
        becomes(|| sh("ip route show 10.42.1.0/24"), "").await;
    });
}

/// Like [`becomes`], for a line of a shell.
async fn says(line: &str, wished: &str) {
    becomes(|| sh(line).trim().to_owned(), wished).await;
}

#[test]
fn removed_rules_are_restored() {
    with_world("removed_rules_are_restored", |world| async move {
        world.service("web", json!({"clusterIP": "10.43.7.1", "ports": tcp()})).await;
        world.endpoints("web", "TCP", &["10.42.0.6"]).await;
        becomes(|| ask("a", "10.43.7.1:80"), "b 10.42.0.5").await;
        for damage in [
            "nft flush ruleset",
            "nft delete table inet skiff",
            "nft flush chain inet skiff nat-prerouting",
            "nft flush map inet skiff services4",
        ] {
            sh(damage);
            becomes(|| ask("a", "10.43.7.1:80"), "b 10.42.0.5").await;
        }
    });
}

#[test]
fn docker_and_ufw_let_pods_through() {
    with_world("docker_and_ufw_let_pods_through", |world| async move {
        world.service("web", json!({"clusterIP": "10.43.7.1", "ports": tcp()})).await;
        world.endpoints("web", "TCP", &["10.42.0.6"]).await;
        becomes(|| ask("a", "10.43.7.1:80"), "b 10.42.0.5").await;
        assert_eq!(ask("out", "192.0.2.1:8080"), "node 192.0.2.2");
        let ours = "iptables -S | grep -c SKIFF || true";
        says(ours, "0").await;

        // As Docker leaves them, and as ufw does.
        for filter in ["iptables", "ip6tables"] {
            sh(&format!("{filter} -N DOCKER-USER; {filter} -A DOCKER-USER -j RETURN; {filter} -I FORWARD -j DOCKER-USER
                {filter} -P FORWARD DROP; {filter} -P INPUT DROP"));
        }
        becomes(|| ask("a", "10.43.7.1:80"), "b 10.42.0.5").await;
        becomes(|| ask("a", "10.42.0.6:8080"), "b 10.42.0.5").await;
        becomes(|| ask("a", "[fd42::6]:8080"), "b fd42::5").await;
        becomes(|| ask("a", "10.42.0.1:8080"), "node 10.42.0.5").await;
        becomes(|| ask("a", "192.0.2.2:8080"), "out 192.0.2.1").await;
        // Nobody else gets more than before.
        assert_eq!(ask("out", "192.0.2.1:8080"), "nothing");
        says("iptables -S FORWARD", "-P FORWARD DROP\n-A FORWARD -m comment --comment skiff -j SKIFF-FORWARD\n-A FORWARD -j DOCKER-USER").await;

        // Reloads take our rules along, wholly or in part.
        sh("iptables -D FORWARD 1");
        becomes(|| ask("a", "10.42.0.6:8080"), "b 10.42.0.5").await;
        sh("iptables -F");
        becomes(|| ask("a", "10.42.0.6:8080"), "b 10.42.0.5").await;
        sh("nft delete table ip filter; iptables -P FORWARD DROP");
        becomes(|| ask("a", "10.42.0.6:8080"), "b 10.42.0.5").await;

        drop(world);
        proxy::host_firewall::remove().unwrap();
        says(ours, "0").await;
        says("ip6tables -S | grep -c SKIFF || true", "0").await;
        says("ip6tables -S FORWARD", "-P FORWARD DROP\n-A FORWARD -j DOCKER-USER").await;
    });
}

/// The tables that firewalld loads, as far as they drop.
const FIREWALLD: &str = "nft 'add table inet firewalld
    add chain inet firewalld filter_FORWARD { type filter hook forward priority filter + 10; policy accept; }
    add rule inet firewalld filter_FORWARD ct state established,related accept
    add rule inet firewalld filter_FORWARD reject with icmpx admin-prohibited
    add chain inet firewalld filter_INPUT { type filter hook input priority filter + 10; policy accept; }
    add rule inet firewalld filter_INPUT ct state established,related accept
    add rule inet firewalld filter_INPUT reject with icmpx admin-prohibited'";

#[test]
fn firewalld_lets_pods_through_and_others_are_named() {
    with_world("firewalld_lets_pods_through_and_others_are_named", |world| async move {
        world.account().await;
        sh(FIREWALLD);
        becomes(|| ask("a", "10.42.0.6:8080"), "b 10.42.0.5").await;
        becomes(|| ask("a", "[fd42::6]:8080"), "b fd42::5").await;
        becomes(|| ask("a", "10.42.0.1:8080"), "node 10.42.0.5").await;
        assert_ne!(ask("out", "192.0.2.1:8080"), "node 192.0.2.2");
        // A reload.
        sh(&FIREWALLD
            .replace("add table inet firewalld", "delete table inet firewalld; add table inet firewalld"));
        becomes(|| ask("a", "10.42.0.6:8080"), "b 10.42.0.5").await;

        // What is an administrator's own is left alone, and named.
        sh(
            "nft 'add table inet admin; add chain inet admin forward { type filter hook forward priority 0; policy drop; }'",
        );
        let named = "table inet admin, chain forward: the policy drops packets of pods";
        let obstacles = || {
            let found = proxy::host_firewall::inspect(&config().pods).unwrap();
            found.obstacles.iter().map(ToString::to_string).collect::<Vec<_>>().join("; ")
        };
        assert_eq!(obstacles(), named);
        let event = async || {
            let events = world.client.list::<Event>("default").await.unwrap();
            events.iter().any(|event| event.message.as_deref() == Some(named))
        };
        let wait = async {
            while !event().await {
                tokio::time::sleep(Duration::from_millis(50)).await;
            }
        };
        tokio::time::timeout(Duration::from_secs(20), wait).await.expect("an event names the chain");
        sh(
            "nft 'add rule inet admin forward ip saddr 10.42.0.0/16 counter accept; add rule inet admin forward ip6 saddr fd42::/56 accept'",
        );
        assert_eq!(obstacles(), "");
    });
}
