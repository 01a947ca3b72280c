//! Traces connections between pods under various policies.

use std::collections::BTreeMap;

use expect_test::{Expect, expect};
use nft::Ruleset;
use nft::trace::{HostState, Packet, trace};
use serde_json::{Value, json};

use super::*;

struct PolicyTestCluster {
    pods: Vec<Arc<Pod>>,
    namespaces: Vec<Arc<Namespace>>,
}

impl ClusterView for PolicyTestCluster {
    fn pods(&self, namespace: &str) -> Vec<Arc<Pod>> {
        self.pods.iter().filter(|pod| pod.namespace() == namespace).cloned().collect()
    }

    fn namespaces(&self) -> Vec<Arc<Namespace>> {
        self.namespaces.clone()
    }
}

const ADDRESSES: [(&str, &str); 7] = [
    ("web", "10.42.0.5"),
    ("api", "10.42.0.6"),
    ("far", "10.42.1.5"),
    ("other/web", "10.42.0.7"),
    ("host", "192.0.2.1"),
    ("over", "10.42.0.9"),
    ("outside", "198.51.100.7"),
];

fn address(name: &str) -> IpAddr {
    ADDRESSES.into_iter().collect::<BTreeMap<_, _>>()[name].parse().unwrap()
}

/// Pods `web`, `api` and `far` in namespace `default` and `web` in `other`. Each is labelled with its
/// name.
fn policy_test_cluster() -> PolicyTestCluster {
    let pod = |full: &str, more: Value| {
        let (namespace, name) = full.split_once('/').unwrap_or(("default", full));
        let mut pod = json!({
            "metadata": {"name": name, "namespace": namespace, "labels": {"app": name}},
            "spec": {"nodeName": "here", "containers": [{"name": "main", "ports": [
                {"name": "http", "containerPort": if full == "api" { 9000 } else { 8080 }, "protocol": "TCP"},
            ]}]},
            "status": {"phase": "Running", "podIPs": [{"ip": address(full).to_string()}]},
        });
        for (name, value) in more.as_object().unwrap() {
            pod["status"][name] = value.clone();
            pod["spec"][name] = value.clone();
        }
        Arc::new(serde_json::from_value(pod).unwrap())
    };
    let namespace = |name: &str| {
        let namespace = json!({"metadata": {"name": name, "labels": {"name": name}}});
        Arc::new(serde_json::from_value(namespace).unwrap())
    };
    PolicyTestCluster {
        pods: vec![
            pod("web", json!({})),
            pod("api", json!({})),
            pod("far", json!({"nodeName": "there"})),
            pod("other/web", json!({})),
            pod("host", json!({"hostNetwork": true})),
            pod("over", json!({"phase": "Succeeded"})),
        ],
        namespaces: vec![namespace("default"), namespace("other")],
    }
}

/// Traces connections, each written as `api > web:8080`, and compares the results.
#[track_caller]
fn check(specs: &[Value], connections: &[&str], expected: Expect) {
    let cluster = policy_test_cluster();
    let policies: Vec<Arc<NetworkPolicy>> = specs
        .iter()
        .enumerate()
        .map(|(number, spec)| {
            let policy = json!({
                "metadata": {"name": format!("p{number}"), "namespace": "default"}, "spec": spec,
            });
            Arc::new(serde_json::from_value(policy).unwrap())
        })
        .collect();
    let mut rules = Ruleset::default();
    rules.put(&"policies".into(), base_rules());
    for one in &policies {
        rules.put(&one.name().into(), policy(one, &cluster, &IpFamily::ALL));
    }
    for one in cluster.pods.iter().filter(|one| one.name() != "far") {
        let own: Vec<Arc<NetworkPolicy>> =
            policies.iter().filter(|policy| policy.namespace() == one.namespace()).cloned().collect();
        rules.put(&format!("pod/{}/{}", one.namespace(), one.name()).into(), pod(one, &own, &IpFamily::ALL));
    }
    let lines = connections.iter().map(|text| {
        let (from, to) = text.split_once(" > ").unwrap();
        let (to, port) = to.split_once(':').unwrap();
        let (port, proto) = match port.strip_suffix("/udp") {
            Some(port) => (port, Proto::Udp),
            None => (port, Proto::Tcp),
        };
        let to = (address(to), port.parse().unwrap()).into();
        let packet = Packet { from: address(from), to, proto, host_generated: from == "host" };
        let machine = HostState { local: [address("host")].into(), ..HostState::default() };
        let results = trace(&rules, &machine, &packet);
        let word = match results.first() {
            Some(nft::trace::TraceResult::Delivered { .. }) => "yes",
            _ => "no",
        };
        format!("{text} {word}\n")
    });
    expected.assert_eq(&lines.collect::<String>());
}

const ALL: [&str; 7] = [
    "api > web:8080",
    "far > web:8080",
    "other/web > web:8080",
    "outside > web:8080",
    "host > web:8080",
    "web > web:8080",
    "web > api:9000",
];

#[test]
fn no_policy() {
    check(
        &[],
        &ALL,
        expect![[r#"
        api > web:8080 yes
        far > web:8080 yes
        other/web > web:8080 yes
        outside > web:8080 yes
        host > web:8080 yes
        web > web:8080 yes
        web > api:9000 yes
    "#]],
    );
}

#[test]
fn deny_all_ingress() {
    check(
        &[json!({"podSelector": {}, "policyTypes": ["Ingress"]})],
        &ALL,
        expect![[r#"
        api > web:8080 no
        far > web:8080 no
        other/web > web:8080 no
        outside > web:8080 no
        host > web:8080 yes
        web > web:8080 yes
        web > api:9000 no
    "#]],
    );
}

#[test]
fn deny_all_egress() {
    let connections = ["web > api:9000", "web > outside:443", "outside > web:8080", "web > host:53/udp"];
    check(
        &[json!({"podSelector": {}, "policyTypes": ["Egress"]})],
        &connections,
        expect![[r#"
        web > api:9000 no
        web > outside:443 no
        outside > web:8080 yes
        web > host:53/udp yes
    "#]],
    );
}

#[test]
fn ingress_from_pods_and_namespaces() {
    let web = json!({"matchLabels": {"app": "web"}});
    let ingress = |from: Value| json!({"podSelector": web, "ingress": [{"from": from}]});
    let by_pod = ingress(json!([{"podSelector": {"matchLabels": {"app": "api"}}}]));
    check(
        std::slice::from_ref(&by_pod),
        &ALL,
        expect![[r#"
        api > web:8080 yes
        far > web:8080 no
        other/web > web:8080 no
        outside > web:8080 no
        host > web:8080 yes
        web > web:8080 yes
        web > api:9000 yes
    "#]],
    );
    let by_namespace = ingress(json!([{"namespaceSelector": {"matchLabels": {"name": "other"}}}]));
    check(
        std::slice::from_ref(&by_namespace),
        &ALL,
        expect![[r#"
        api > web:8080 no
        far > web:8080 no
        other/web > web:8080 yes
        outside > web:8080 no
        host > web:8080 yes
        web > web:8080 yes
        web > api:9000 yes
    "#]],
    );
    let both = ingress(json!([{
        "namespaceSelector": {}, "podSelector": {"matchExpressions": [
            {"key": "app", "operator": "In", "values": ["far", "missing"]},
        ]},
    }]));
    check(
        &[both],
        &ALL,
        expect![[r#"
        api > web:8080 no
        far > web:8080 yes
        other/web > web:8080 no
        outside > web:8080 no
        host > web:8080 yes
        web > web:8080 yes
        web > api:9000 yes
    "#]],
    );
    // Policies are additive.
    check(
        &[by_pod, by_namespace],
        &ALL,
        expect![[r#"
        api > web:8080 yes
        far > web:8080 no
        other/web > web:8080 yes
        outside > web:8080 no
        host > web:8080 yes
        web > web:8080 yes
        web > api:9000 yes
    "#]],
    );
    let allow_all = json!({"podSelector": web, "ingress": [{}]});
    check(
        &[allow_all],
        &ALL,
        expect![[r#"
        api > web:8080 yes
        far > web:8080 yes
        other/web > web:8080 yes
        outside > web:8080 yes
        host > web:8080 yes
        web > web:8080 yes
        web > api:9000 yes
    "#]],
    );
}

#[test]
fn blocks() {
    let spec = json!({"podSelector": {}, "ingress": [{"from": [
        {"ipBlock": {"cidr": "10.42.0.0/16", "except": ["10.42.1.0/24", "10.42.0.6/32"]}},
        {"ipBlock": {"cidr": "2001:db8::/32"}},
    ]}]});
    check(
        &[spec],
        &ALL,
        expect![[r#"
        api > web:8080 no
        far > web:8080 no
        other/web > web:8080 yes
        outside > web:8080 no
        host > web:8080 yes
        web > web:8080 yes
        web > api:9000 yes
    "#]],
    );
}

#[test]
fn ports() {
    let connections = [
        "api > web:8080",
        "api > web:8079",
        "api > web:9000",
        "api > web:9999",
        "api > web:8080/udp",
        "web > api:9000",
    ];
    let ports = |ports: Value| json!({"podSelector": {}, "ingress": [{"ports": ports}]});
    check(
        &[ports(json!([{"port": 8080}]))],
        &connections,
        expect![[r#"
        api > web:8080 yes
        api > web:8079 no
        api > web:9000 no
        api > web:9999 no
        api > web:8080/udp no
        web > api:9000 no
    "#]],
    );
    check(
        &[ports(json!([{"port": 8080, "endPort": 9100}, {"port": 9000, "endPort": 9999}]))],
        &connections,
        expect![[r#"
            api > web:8080 yes
            api > web:8079 no
            api > web:9000 yes
            api > web:9999 yes
            api > web:8080/udp no
            web > api:9000 yes
        "#]],
    );
    check(
        &[ports(json!([{"protocol": "UDP"}]))],
        &connections,
        expect![[r#"
        api > web:8080 no
        api > web:8079 no
        api > web:9000 no
        api > web:9999 no
        api > web:8080/udp yes
        web > api:9000 no
    "#]],
    );
    check(
        &[ports(json!([{"port": "http"}]))],
        &connections,
        expect![[r#"
        api > web:8080 yes
        api > web:8079 no
        api > web:9000 no
        api > web:9999 no
        api > web:8080/udp no
        web > api:9000 yes
    "#]],
    );
    check(
        &[ports(json!([{"port": 1}, {"port": 8080, "protocol": "UDP"}, {"port": "http"}]))],
        &connections,
        expect![[r#"
            api > web:8080 yes
            api > web:8079 no
            api > web:9000 no
            api > web:9999 no
            api > web:8080/udp yes
            web > api:9000 yes
        "#]],
    );
}

#[test]
fn egress_to_named_ports() {
    let connections =
        ["web > api:9000", "web > api:8080", "web > other/web:8080", "web > outside:8080", "web > far:8080"];
    let egress = |rule: Value| json!({"podSelector": {}, "policyTypes": ["Egress"], "egress": [rule]});
    check(
        &[egress(json!({"ports": [{"port": "http"}]}))],
        &connections,
        expect![[r#"
        web > api:9000 yes
        web > api:8080 no
        web > other/web:8080 yes
        web > outside:8080 no
        web > far:8080 yes
    "#]],
    );
    let to_own = json!({"to": [{"podSelector": {}}], "ports": [{"port": "http"}]});
    check(
        &[egress(to_own)],
        &connections,
        expect![[r#"
        web > api:9000 yes
        web > api:8080 no
        web > other/web:8080 no
        web > outside:8080 no
        web > far:8080 yes
    "#]],
    );
}

#[test]
fn both_ends_must_allow() {
    let out = json!({
        "podSelector": {"matchLabels": {"app": "web"}}, "policyTypes": ["Egress"],
        "egress": [{"to": [{"podSelector": {"matchLabels": {"app": "api"}}}]}],
    });
    let closed = json!({"podSelector": {"matchLabels": {"app": "api"}}});
    let connections = ["web > api:9000", "web > far:8080"];
    check(
        std::slice::from_ref(&out),
        &connections,
        expect![[r#"
        web > api:9000 yes
        web > far:8080 no
    "#]],
    );
    check(
        &[out, closed],
        &connections,
        expect![[r#"
        web > api:9000 no
        web > far:8080 no
    "#]],
    );
}

#[test]
fn long_names_are_truncated_and_remain_unique() {
    let name = |end: char| format!("{}{end}", "x".repeat(252));
    let (one, two) = (
        chain_name("allow-in", IpFamily::V4, "default", &name('a')),
        chain_name("allow-in", IpFamily::V4, "default", &name('b')),
    );
    assert!(one.len() < 256 && one != two);
}

#[test]
fn ranges_are_merged() {
    assert_eq!(
        merge_ranges(vec![(80, 80), (1, 5), (4, 10), (11, 12)]),
        [MatchValue::Ports(1, 12), MatchValue::Port(80)]
    );
    assert_eq!(merge_ranges(vec![(0, u16::MAX), (5, 5)]), [MatchValue::Ports(0, u16::MAX)]);
}
