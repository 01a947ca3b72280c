//! Tests in the kernel, in separate network namespaces: real connections to every type of Service, and
//! a comparison of the tables written with `nft` and with netlink. They need root and are skipped
//! without it.

#[path = "kernel/net.rs"]
mod net;

use std::collections::{BTreeMap, BTreeSet};
use std::future::Future;
use std::sync::Arc;
use std::time::Duration;

use k8s_openapi::api::core::v1::{Event, Node, Pod, Service};
use k8s_openapi::api::discovery::v1::EndpointSlice;
use k8s_openapi::api::networking::v1::NetworkPolicy;
use net::{UdpClient, build, inside, serve, sh, tcp_request};
use nft::{IpNet, Ruleset};
use proxy::base_ruleset::{base_rules, loopback};
use proxy::plan::{NodeTopology, plan};
use proxy::{Config, Firewall, NetlinkFirewall, NftFirewall};
use reconcile::{Client, Clock, Ctx, Key, Patch};
use serde_json::{Value, json};
use tokio::sync::watch;

fn parse_networks(strings: &[&str]) -> Vec<IpNet> {
    strings.iter().map(|text| text.parse().unwrap()).collect()
}

fn config() -> Config {
    Config {
        node: "here".into(),
        pods: parse_networks(&["10.42.0.0/16", "fd42::/56"]),
        services: parse_networks(&["10.43.0.0/16", "fd43::/112"]),
        masquerade_outgoing: true,
        policies: true,
        accept_in_host_firewall: true,
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

/// A ruleset that uses every feature of the model.
fn samples() -> Ruleset {
    let config = config();
    let place = NodeTopology {
        node: config.node.clone(),
        zone: "a".into(),
        addresses: vec!["192.0.2.1".parse().unwrap()],
        pods: config.pods.clone(),
    };
    let mut rules = Ruleset::default();
    rules.put(&"".into(), base_rules(&config.pods, &config.services));
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

/// The table as listed by `nft`, normalized. `nft` adds the ICMP type to `reject` if it knows the
/// family, which has the same meaning. Endpoints are in maps shared by many rules and are put back into
/// the rules here.
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
fn nft_and_netlink_write_the_same_table() {
    if !inside("nft_and_netlink_write_the_same_table") {
        return;
    }
    let (mut rules, kernel) = (samples(), NetlinkFirewall::default());
    let batch = rules.full_batch();
    NftFirewall::default().apply(&batch).unwrap();
    let by_nft = listed();
    kernel.apply(&batch).unwrap();
    let by_us = listed();
    let lines = |text: &str| text.lines().map(str::to_owned).collect::<BTreeSet<String>>();
    let (nft, us) = (lines(&by_nft), lines(&by_us));
    let difference: Vec<&String> = nft.symmetric_difference(&us).collect();
    assert!(difference.is_empty(), "{difference:#?}");
    assert!(by_us.lines().count() > 300, "{by_us}");

    // Removing all owners leaves the base rules. Deleting the table leaves nothing.
    rules.retain(|owner| owner.is_empty());
    kernel.apply(&rules.changes()).unwrap();
    kernel.apply(&rules.changes_and_prune()).unwrap();
    let bare = listed();
    kernel.apply(&rules.full_batch()).unwrap();
    assert_eq!(lines(&bare), lines(&listed()));
    kernel.apply(&nft::Batch::delete_table()).unwrap();
    assert_eq!(sh("nft list ruleset"), "");
}

#[test]
fn rejected_batch_changes_nothing() {
    if !inside("rejected_batch_changes_nothing") {
        return;
    }
    let (mut rules, kernel) = (samples(), NetlinkFirewall::default());
    kernel.apply(&rules.full_batch()).unwrap();
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

/// A cluster with the proxy running in this network namespace.
struct ProxyTestCluster {
    client: Client,
    stop: watch::Sender<bool>,
    _server: apiserver::RunningServer,
    _directory: tempfile::TempDir,
}

impl ProxyTestCluster {
    async fn start() -> ProxyTestCluster {
        let directory = tempfile::tempdir().unwrap();
        let stop = watch::Sender::new(false);
        let server = apiserver::start_in_directory(directory.path(), stop.subscribe()).await.unwrap();
        let client = Client::new(server.local(), "test");
        let ctx = Ctx::new(client.clone(), Clock::default(), stop.subscribe());
        tokio::spawn(proxy::run(ctx, config(), Arc::new(NetlinkFirewall::default())));
        ProxyTestCluster { client, stop, _server: server, _directory: directory }
    }

    async fn service(&self, name: &str, mut spec: Value) -> Service {
        let ingress = spec.as_object_mut().unwrap().remove("balancers");
        let mut created = self.client.create(&service(name, &spec)).await.unwrap();
        if let Some(ingress) = ingress {
            let status = json!({"loadBalancer": {"ingress": ingress}});
            created.status = Some(serde_json::from_value(status).unwrap());
            created = self.client.replace_status(&created).await.unwrap();
        }
        created
    }

    /// The service account of the pods.
    async fn create_service_account(&self) {
        let account = json!({"metadata": {"name": "default", "namespace": "default"}});
        let account: k8s_openapi::api::core::v1::ServiceAccount = serde_json::from_value(account).unwrap();
        self.client.create(&account).await.unwrap();
    }

    /// A running pod on this node, with port 8080 named.
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
        let mut created = self.client.create::<Pod>(&serde_json::from_value(pod).unwrap()).await.unwrap();
        let status = json!({"phase": "Running", "podIP": address, "podIPs": [{"ip": address}]});
        created.status = Some(serde_json::from_value(status).unwrap());
        self.client.replace_status(&created).await.unwrap();
    }

    async fn endpoints(&self, name: &str, proto: &str, endpoints: &[&str]) {
        let endpoints: Vec<(&str, &str)> =
            endpoints.iter().map(|text| text.split_once('@').unwrap_or((text, "here"))).collect();
        let endpoint_slice = slice(name, "IPv4", proto, &endpoints);
        let key = Key::new("default", endpoint_slice.metadata.name.as_deref().unwrap());
        match self.client.create(&endpoint_slice).await {
            Ok(_) => {}
            Err(error) if error.is_already_exists() => {
                let patch = Patch::Merge(json!({"endpoints": endpoint_slice.endpoints}));
                self.client.patch::<EndpointSlice>(&key, &patch).await.unwrap();
            }
            Err(error) => panic!("{error}"),
        }
    }
}

impl Drop for ProxyTestCluster {
    fn drop(&mut self) {
        self.stop.send_replace(true);
    }
}

/// Repeats the request until the response is as expected, because rules follow the cluster with a
/// delay.
async fn wait_until(mut observe: impl FnMut() -> String, expected: &str) {
    let mut last = String::new();
    let wait = async {
        loop {
            last = observe();
            if last == expected {
                return;
            }
            tokio::time::sleep(Duration::from_millis(20)).await;
        }
    };
    let result = tokio::time::timeout(Duration::from_secs(20), wait).await;
    assert!(result.is_ok(), "{last:?} is not {expected:?}");
}

/// Runs a test of the whole proxy in a network of namespaces.
fn with_cluster<F: Future<Output = ()>>(test: &str, work: impl FnOnce(ProxyTestCluster) -> F) {
    if !inside(test) {
        return;
    }
    build();
    ["a", "b", "out", "node"].into_iter().for_each(serve);
    let runtime = tokio::runtime::Builder::new_multi_thread().worker_threads(2).enable_all().build().unwrap();
    runtime.block_on(async {
        work(ProxyTestCluster::start().await).await;
    });
}

const TCP: &str = r#"[{"port": 80, "protocol": "TCP", "name": "tcp"}]"#;

fn tcp() -> Value {
    serde_json::from_str(TCP).unwrap()
}

#[test]
fn cluster_ips() {
    with_cluster("cluster_ips", |cluster| async move {
        cluster.service("web", json!({"clusterIP": "10.43.7.1", "ports": tcp()})).await;
        wait_until(|| tcp_request("a", "10.43.7.1:80"), "refused").await;
        cluster.endpoints("web", "TCP", &["10.42.0.5", "10.42.0.6"]).await;
        wait_until(
            || tcp_request("node", "10.43.7.1:80").split(' ').next().unwrap_or_default().to_owned(),
            "a",
        )
        .await;

        // Between pods the source address is preserved. Connections of a pod to itself come from the
        // node.
        let seen: BTreeSet<String> = (0..40).map(|_| tcp_request("a", "10.43.7.1:80")).collect();
        assert_eq!(seen, ["a 10.42.0.1", "b 10.42.0.5"].map(str::to_owned).into());
        let seen: BTreeSet<String> = (0..40).map(|_| tcp_request("out", "10.43.7.1:80")).collect();
        assert_eq!(seen, ["a 10.42.0.1", "b 10.42.0.1"].map(str::to_owned).into());

        // Outside the cluster pods appear with the node's address; among each other with their own.
        assert_eq!(tcp_request("a", "192.0.2.2:8080"), "out 192.0.2.1");
        assert_eq!(tcp_request("a", "10.42.0.6:8080"), "b 10.42.0.5");

        // Other ports of a cluster IP are rejected, and unused addresses of the range are dropped.
        assert_eq!(tcp_request("a", "10.43.7.1:81"), "refused");
        assert_eq!(tcp_request("a", "10.43.7.2:80"), "nothing");

        cluster.endpoints("web", "TCP", &["10.42.0.6"]).await;
        // A single response could be a coincidence.
        let responses = || (0..20).map(|_| tcp_request("a", "10.43.7.1:80")).collect::<BTreeSet<_>>();
        wait_until(|| Vec::from_iter(responses()).join(", "), "b 10.42.0.5").await;
        assert_eq!(tcp_request("b", "10.43.7.1:80"), "b 10.42.0.1");
        cluster.client.delete::<Service>(&Key::new("default", "web"), &Default::default()).await.unwrap();
        wait_until(|| tcp_request("a", "10.43.7.1:80"), "nothing").await;
    });
}

#[test]
fn services_accept_external_traffic() {
    with_cluster("services_accept_external_traffic", |cluster| async move {
        let ports = json!([{"port": 80, "nodePort": 30080, "protocol": "TCP", "name": "tcp"}]);
        let spec = json!({
            "type": "LoadBalancer", "ports": ports, "externalIPs": ["203.0.113.9"],
            "loadBalancerSourceRanges": ["192.0.2.2/32"], "balancers": [{"ip": "203.0.113.1"}],
        });
        cluster.service("web", spec).await;
        cluster.endpoints("web", "TCP", &["10.42.0.5"]).await;
        wait_until(|| tcp_request("out", "192.0.2.1:30080"), "a 10.42.0.1").await;
        wait_until(|| tcp_request("out", "203.0.113.1:80"), "a 10.42.0.1").await;
        assert_eq!(tcp_request("out", "203.0.113.9:80"), "a 10.42.0.1");
        assert_eq!(tcp_request("node", "192.0.2.1:30080"), "a 10.42.0.1");
        assert_eq!(tcp_request("b", "192.0.2.1:30080"), "a 10.42.0.1");
        assert_eq!(
            tcp_request("b", "203.0.113.1:80"),
            "nothing",
            "the source is not in loadBalancerSourceRanges"
        );

        // Policy Local preserves the source address and does not use endpoints on other nodes for
        // external traffic.
        let local = Patch::Merge(json!({"spec": {"externalTrafficPolicy": "Local"}}));
        let key = Key::new("default", "web");
        let created = cluster.client.patch::<Service>(&key, &local).await.unwrap();
        wait_until(|| tcp_request("out", "192.0.2.1:30080"), "a 192.0.2.2").await;
        let port = created.spec.and_then(|spec| spec.health_check_node_port).unwrap();
        wait_until(|| health(port), "HTTP/1.1 200 OK 1").await;
        cluster.endpoints("web", "TCP", &["10.42.0.5@there"]).await;
        wait_until(|| tcp_request("out", "192.0.2.1:30080"), "nothing").await;
        assert_eq!(
            tcp_request("b", "192.0.2.1:30080"),
            "a 10.42.0.6",
            "the policy does not apply to internal traffic"
        );
        wait_until(|| health(port), "HTTP/1.1 503 Service Unavailable 0").await;
    });
}

/// The status and the endpoint weight in the response of a health check node port.
fn health(port: i32) -> String {
    use std::io::{Read as _, Write as _};
    let Ok(mut stream) = std::net::TcpStream::connect(("127.0.0.1", u16::try_from(port).unwrap())) else {
        return "refused".into();
    };
    let mut text = String::new();
    let written = stream.write_all(b"GET /healthz HTTP/1.1\r\nHost: x\r\n\r\n");
    if written.and_then(|()| stream.read_to_string(&mut text).map(drop)).is_err() {
        return "broken".into();
    }
    let weight = text.lines().find_map(|line| {
        line.to_lowercase().strip_prefix("x-load-balancing-endpoint-weight: ").map(str::to_owned)
    });
    format!("{} {}", text.lines().next().unwrap_or_default(), weight.unwrap_or_default())
}

#[test]
fn session_affinity_is_stable() {
    with_cluster("session_affinity_is_stable", |cluster| async move {
        let spec = json!({"clusterIP": "10.43.7.1", "ports": tcp(), "sessionAffinity": "ClientIP"});
        cluster.service("web", spec).await;
        cluster.endpoints("web", "TCP", &["10.42.0.5", "10.42.0.6"]).await;
        wait_until(|| tcp_request("node", "10.43.7.1:80").split(' ').count().to_string(), "2").await;
        let first = tcp_request("out", "10.43.7.1:80");
        assert!((0..30).all(|_| tcp_request("out", "10.43.7.1:80") == first), "{first}");
        // Until the endpoint is removed.
        let left = if first.starts_with('a') { "10.42.0.6" } else { "10.42.0.5" };
        cluster.endpoints("web", "TCP", &[left]).await;
        let other = if first.starts_with('a') { "b 10.42.0.1" } else { "a 10.42.0.1" };
        wait_until(|| tcp_request("out", "10.43.7.1:80"), other).await;
    });
}

#[test]
fn udp_clients_move_to_new_endpoints() {
    with_cluster("udp_clients_move_to_new_endpoints", |cluster| async move {
        let ports = json!([{"port": 53, "protocol": "UDP", "name": "udp"}]);
        cluster.service("dns", json!({"clusterIP": "10.43.7.1", "ports": ports})).await;
        cluster.endpoints("dns", "UDP", &["10.42.0.5"]).await;
        wait_until(|| UdpClient::new("b", "10.43.7.1:53").request(), "a 10.42.0.6").await;
        let flow = UdpClient::new("b", "10.43.7.1:53");
        assert_eq!(flow.request(), "a 10.42.0.6");
        cluster.endpoints("dns", "UDP", &["10.42.0.6"]).await;
        wait_until(|| flow.request(), "b 10.42.0.1").await;
    });
}

#[test]
fn network_policies_are_enforced() {
    with_cluster("network_policies_are_enforced", |cluster| async move {
        cluster.create_service_account().await;
        cluster.pod("a", "10.42.0.5").await;
        cluster.pod("b", "10.42.0.6").await;
        wait_until(|| tcp_request("b", "10.42.0.5:8080"), "a 10.42.0.6").await;
        wait_until(|| tcp_request("out", "192.0.2.1:8081"), "a 192.0.2.2").await;
        assert_eq!(tcp_request("a", "192.0.2.1:8081"), "a 10.42.0.1", "hairpin through the host port");
        let key = Key::new("default", "p");
        let policy = json!({
            "metadata": {"name": "p", "namespace": "default"},
            "spec": {"podSelector": {"matchLabels": {"name": "a"}}, "policyTypes": ["Ingress"]},
        });
        let policy: NetworkPolicy = serde_json::from_value(policy).unwrap();
        cluster.client.create(&policy).await.unwrap();
        wait_until(|| tcp_request("b", "10.42.0.5:8080"), "nothing").await;
        assert_eq!(tcp_request("out", "10.42.0.5:8080"), "nothing");
        assert_eq!(
            tcp_request("node", "10.42.0.5:8080"),
            "a 10.42.0.1",
            "a node can always connect to its pods"
        );
        assert_eq!(tcp_request("a", "10.42.0.6:8080"), "b 10.42.0.5", "responses are accepted");

        let allow = json!({"spec": {"ingress": [
            {"from": [{"podSelector": {"matchLabels": {"name": "b"}}}], "ports": [{"port": 8000, "endPort": 8080}]},
            {"from": [{"ipBlock": {"cidr": "192.0.2.0/24", "except": ["192.0.2.3/32", "192.0.2.9/32"]}}], "ports": [{"port": "http"}]},
        ]}});
        cluster.client.patch::<NetworkPolicy>(&key, &Patch::Merge(allow)).await.unwrap();
        wait_until(|| tcp_request("b", "10.42.0.5:8080"), "a 10.42.0.6").await;
        wait_until(|| tcp_request("out", "10.42.0.5:8080"), "a 192.0.2.2").await;

        // Policies also apply to connections through a Service: the client's address counts.
        let ports = json!([{"port": 80, "nodePort": 30080, "protocol": "TCP", "name": "tcp"}]);
        cluster.service("web", json!({"type": "NodePort", "ports": ports})).await;
        cluster.endpoints("web", "TCP", &["10.42.0.5"]).await;
        wait_until(|| tcp_request("out", "192.0.2.1:30080"), "a 10.42.0.1").await;
        let closed = json!({"spec": {"ingress": []}});
        cluster.client.patch::<NetworkPolicy>(&key, &Patch::Merge(closed)).await.unwrap();
        wait_until(|| tcp_request("out", "192.0.2.1:30080"), "nothing").await;

        cluster.client.delete::<NetworkPolicy>(&key, &Default::default()).await.unwrap();
        wait_until(|| tcp_request("out", "192.0.2.1:30080"), "a 10.42.0.1").await;
        assert_eq!(tcp_request("b", "10.42.0.5:8080"), "a 10.42.0.6");
    });
}

#[test]
fn host_ports_work_at_loopback() {
    with_cluster("host_ports_work_at_loopback", |cluster| async move {
        cluster.create_service_account().await;
        cluster.pod("a", "10.42.0.5").await;
        wait_until(|| tcp_request("node", "127.0.0.1:8081"), "a 10.42.0.1").await;
        assert_eq!(tcp_request("node", "127.0.0.2:8081"), "a 10.42.0.1");
        assert_eq!(UdpClient::new("node", "127.0.0.1:8081").request(), "a 10.42.0.1");
        assert_eq!(UdpClient::new("node", "192.0.2.1:8081").request(), "refused", "not at that address");
        assert_eq!(
            tcp_request("node", "127.0.0.1:8080"),
            "node 127.0.0.1",
            "an unmapped port is the node's own"
        );

        // Neighbours that send packets with loopback addresses to this node.
        for (name, gateway) in [("b", "10.42.0.1"), ("out", "192.0.2.1")] {
            sh(&format!(
                "ip netns exec {name} sh -ec 'echo 1 > /proc/sys/net/ipv4/conf/all/route_localnet'
                 ip -n {name} addr del 127.0.0.1/8 dev lo
                 ip -n {name} route add 127.0.0.0/8 via {gateway} dev eth0 onlink"
            ));
            assert_eq!(tcp_request(name, "127.0.0.1:8080"), "nothing");
            assert_eq!(UdpClient::new(name, "127.0.0.1:8081").request(), "nothing");
        }
        // Confirms that the rules, and not the kernel, drop these packets.
        sh("nft insert rule inet skiff filter-prerouting ip daddr 127.0.0.0/8 accept");
        assert_eq!(tcp_request("b", "127.0.0.1:8080"), "node 10.42.0.6");
        assert_eq!(UdpClient::new("out", "127.0.0.1:8081").request(), "a 192.0.2.2");

        // Without the bridge's addresses, no link is known to lead to pods.
        for link in ["veth-a", "veth-b"] {
            sh(&format!("ip addr add 192.0.2.9/32 dev {link}; ip addr del 10.42.0.1/32 dev {link}"));
            sh(&format!("echo 0 > /proc/sys/net/ipv4/conf/{link}/route_localnet"));
        }
        sh("ip link del pods");
        cluster.pod("b", "10.42.0.6").await;
        wait_until(|| tcp_request("node", "127.0.0.1:8081"), "refused").await;
        wait_until(|| tcp_request("node", "192.0.2.1:8082"), "b 192.0.2.1").await;
    });
}

#[test]
fn pods_of_other_nodes_have_routes() {
    with_cluster("pods_of_other_nodes_have_routes", |cluster| async move {
        let ctx = Ctx::new(cluster.client.clone(), Clock::default(), cluster.stop.subscribe());
        tokio::spawn(proxy::routes::run(ctx, "here".into()));
        let node = json!({"metadata": {"name": "there"}, "spec": {"podCIDR": "10.42.1.0/24", "podCIDRs": ["10.42.1.0/24"]}});
        let mut node = cluster.client.create::<Node>(&serde_json::from_value(node).unwrap()).await.unwrap();
        let status = json!({"addresses": [{"type": "InternalIP", "address": "192.0.2.2"}]});
        node.status = Some(serde_json::from_value(status).unwrap());
        cluster.client.replace_status(&node).await.unwrap();
        sh("ip -n out addr add 10.42.1.5/32 dev lo");
        wait_until(|| tcp_request("a", "10.42.1.5:8080"), "out 10.42.0.5").await;
        cluster.client.delete::<Node>(&Key::new("", "there"), &Default::default()).await.unwrap();
        wait_until(|| sh("ip route show 10.42.1.0/24"), "").await;
    });
}

/// Like [`wait_until`], for the output of a shell command.
async fn wait_for_output(line: &str, expected: &str) {
    wait_until(|| sh(line).trim().to_owned(), expected).await;
}

#[test]
fn removed_rules_are_written_again() {
    with_cluster("removed_rules_are_written_again", |cluster| async move {
        cluster.service("web", json!({"clusterIP": "10.43.7.1", "ports": tcp()})).await;
        cluster.endpoints("web", "TCP", &["10.42.0.6"]).await;
        wait_until(|| tcp_request("a", "10.43.7.1:80"), "b 10.42.0.5").await;
        for damage in [
            "nft flush ruleset",
            "nft delete table inet skiff",
            "nft flush chain inet skiff nat-prerouting",
            "nft flush map inet skiff services4",
        ] {
            sh(damage);
            wait_until(|| tcp_request("a", "10.43.7.1:80"), "b 10.42.0.5").await;
        }
    });
}

#[test]
fn docker_and_ufw_accept_pod_packets() {
    with_cluster("docker_and_ufw_accept_pod_packets", |cluster| async move {
        cluster.service("web", json!({"clusterIP": "10.43.7.1", "ports": tcp()})).await;
        cluster.endpoints("web", "TCP", &["10.42.0.6"]).await;
        wait_until(|| tcp_request("a", "10.43.7.1:80"), "b 10.42.0.5").await;
        assert_eq!(tcp_request("out", "192.0.2.1:8080"), "node 192.0.2.2");
        let count_own_rules = "iptables -S | grep -c SKIFF || true";
        wait_for_output(count_own_rules, "0").await;

        // The rules of Docker and ufw.
        for filter in ["iptables", "ip6tables"] {
            sh(&format!("{filter} -N DOCKER-USER; {filter} -A DOCKER-USER -j RETURN; {filter} -I FORWARD -j DOCKER-USER
                {filter} -P FORWARD DROP; {filter} -P INPUT DROP"));
        }
        wait_until(|| tcp_request("a", "10.43.7.1:80"), "b 10.42.0.5").await;
        wait_until(|| tcp_request("a", "10.42.0.6:8080"), "b 10.42.0.5").await;
        wait_until(|| tcp_request("a", "[fd42::6]:8080"), "b fd42::5").await;
        wait_until(|| tcp_request("a", "10.42.0.1:8080"), "node 10.42.0.5").await;
        wait_until(|| tcp_request("a", "192.0.2.2:8080"), "out 192.0.2.1").await;
        // Other traffic is still dropped.
        assert_eq!(tcp_request("out", "192.0.2.1:8080"), "nothing");
        wait_for_output("iptables -S FORWARD", "-P FORWARD DROP\n-A FORWARD -m comment --comment skiff -j SKIFF-FORWARD\n-A FORWARD -j DOCKER-USER").await;

        // A reload of the firewall deletes our rules, wholly or in part.
        sh("iptables -D FORWARD 1");
        wait_until(|| tcp_request("a", "10.42.0.6:8080"), "b 10.42.0.5").await;
        sh("iptables -F");
        wait_until(|| tcp_request("a", "10.42.0.6:8080"), "b 10.42.0.5").await;
        sh("nft delete table ip filter; iptables -P FORWARD DROP");
        wait_until(|| tcp_request("a", "10.42.0.6:8080"), "b 10.42.0.5").await;

        drop(cluster);
        proxy::host_firewall::remove().unwrap();
        wait_for_output(count_own_rules, "0").await;
        wait_for_output("ip6tables -S | grep -c SKIFF || true", "0").await;
        wait_for_output("ip6tables -S FORWARD", "-P FORWARD DROP\n-A FORWARD -j DOCKER-USER").await;
    });
}

/// The chains of firewalld that drop packets.
const FIREWALLD: &str = "nft 'add table inet firewalld
    add chain inet firewalld filter_FORWARD { type filter hook forward priority filter + 10; policy accept; }
    add rule inet firewalld filter_FORWARD ct state established,related accept
    add rule inet firewalld filter_FORWARD reject with icmpx admin-prohibited
    add chain inet firewalld filter_INPUT { type filter hook input priority filter + 10; policy accept; }
    add rule inet firewalld filter_INPUT ct state established,related accept
    add rule inet firewalld filter_INPUT reject with icmpx admin-prohibited'";

#[test]
fn firewalld_accepts_pods_and_other_drops_are_reported() {
    with_cluster("firewalld_accepts_pods_and_other_drops_are_reported", |cluster| async move {
        cluster.create_service_account().await;
        sh(FIREWALLD);
        wait_until(|| tcp_request("a", "10.42.0.6:8080"), "b 10.42.0.5").await;
        wait_until(|| tcp_request("a", "[fd42::6]:8080"), "b fd42::5").await;
        wait_until(|| tcp_request("a", "10.42.0.1:8080"), "node 10.42.0.5").await;
        assert_ne!(tcp_request("out", "192.0.2.1:8080"), "node 192.0.2.2");
        // A reload of firewalld.
        sh(&FIREWALLD
            .replace("add table inet firewalld", "delete table inet firewalld; add table inet firewalld"));
        wait_until(|| tcp_request("a", "10.42.0.6:8080"), "b 10.42.0.5").await;

        // Chains of the administrator are not changed but reported.
        sh(
            "nft 'add table inet admin; add chain inet admin forward { type filter hook forward priority 0; policy drop; }'",
        );
        let named = "table inet admin, chain forward: the policy drops packets of pods";
        let blocking_rules = || {
            let found = proxy::host_firewall::inspect(&config().pods).unwrap();
            found.blocking_rules.join("; ")
        };
        assert_eq!(blocking_rules(), named);
        let event = async || {
            let events = cluster.client.list::<Event>("default").await.unwrap();
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
        assert_eq!(blocking_rules(), "");
    });
}
