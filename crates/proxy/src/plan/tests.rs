//! Traces packets to every type of Service.

use expect_test::{Expect, expect};
use nft::Ruleset;
use nft::trace::{HostState, Packet, trace};
use serde_json::{Value, json};

use super::*;
use crate::base_ruleset::{base_rules, loopback};

const NODE: [&str; 2] = ["192.0.2.1", "2001:db8::1"];

fn topology() -> NodeTopology {
    NodeTopology {
        node: "here".into(),
        zone: "a".into(),
        addresses: NODE.map(|address| address.parse().unwrap()).into(),
        pods: vec!["10.42.0.0/16".parse().unwrap(), "fd42::/56".parse().unwrap()],
    }
}

/// Service `default/web` with port 80 in both families. `spec` is merged into its spec.
fn service(spec: Value) -> Service {
    let mut base = json!({
        "metadata": {"name": "web", "namespace": "default"},
        "spec": {
            "clusterIP": "10.43.0.1",
            "clusterIPs": ["10.43.0.1", "fd43::1"],
            "type": "ClusterIP",
            "ports": [{"port": 80, "protocol": "TCP"}],
        },
    });
    for (name, value) in spec.as_object().unwrap() {
        if name == "status" || name == "metadata" {
            base[name] = value.clone();
        } else {
            base["spec"][name] = value.clone();
        }
    }
    serde_json::from_value(base).unwrap()
}

/// EndpointSlices from a text such as `10.42.0.5@here`, with an optional property after each endpoint.
fn slices(text: &str) -> Vec<Arc<EndpointSlice>> {
    slices_of(text, "TCP", None)
}

fn slices_of(text: &str, proto: &str, name: Option<&str>) -> Vec<Arc<EndpointSlice>> {
    let mut by_family = [Vec::new(), Vec::new()];
    for line in text.split(',').map(str::trim).filter(|line| !line.is_empty()) {
        let mut words = line.split_whitespace();
        let (address, node) = words.next().unwrap().split_once('@').unwrap();
        let words: Vec<&str> = words.collect();
        let has = |word| words.contains(&word);
        let hint = |kind: &str| -> Vec<Value> {
            words
                .iter()
                .filter_map(|word| word.strip_prefix(kind))
                .map(|name| json!({"name": name}))
                .collect()
        };
        let endpoint = json!({
            "addresses": [address],
            "nodeName": node,
            "conditions": {
                "ready": !has("unready") && !has("ending") && !has("dead"),
                "serving": !has("unready") && !has("dead"),
                "terminating": has("ending") || has("dead"),
            },
            "hints": {"forZones": hint("zone="), "forNodes": hint("node=")},
        });
        by_family[usize::from(address.contains(':'))].push(endpoint);
    }
    let families = ["IPv4", "IPv6"].into_iter().zip(by_family);
    let slice = |(family, endpoints)| {
        let port = json!({"port": 8080, "protocol": proto, "name": name.unwrap_or("")});
        let slice = json!({
            "addressType": family, "metadata": {}, "endpoints": endpoints, "ports": [port],
        });
        Arc::new(serde_json::from_value(slice).unwrap())
    };
    families.map(slice).collect()
}

fn rules(service: &Service, slices: &[Arc<EndpointSlice>]) -> Ruleset {
    let topology = topology();
    let mut rules = Ruleset::default();
    let services = ["10.43.0.0/16".parse().unwrap(), "fd43::/112".parse().unwrap()];
    rules.put(&"".into(), base_rules(&topology.pods, &services));
    rules.put(&"loopback".into(), loopback());
    rules.put(&"default/web".into(), plan(service, slices, &topology).fragment);
    rules
}

/// Parses a packet such as `10.42.0.9 > 10.43.0.1:80`, with an optional `udp` after it or `own` before
/// it.
fn packet(text: &str) -> Packet {
    let words: Vec<&str> = text.split_whitespace().collect();
    let own = words[0] == "own";
    let [from, _, to, rest @ ..] = &words[usize::from(own)..] else { panic!("{text}") };
    let proto = match rest {
        [] => Proto::Tcp,
        ["udp"] => Proto::Udp,
        ["sctp"] => Proto::Sctp,
        _ => panic!("{text}"),
    };
    Packet { from: from.parse().unwrap(), to: to.parse().unwrap(), proto, host_generated: own }
}

fn trace_packet(rules: &Ruleset, machine: &HostState, text: &str) -> String {
    let results: Vec<String> =
        trace(rules, machine, &packet(text)).iter().map(|fate| fate.to_string()).collect();
    results.join(" | ")
}

fn machine() -> HostState {
    let local = NODE.iter().chain(&["127.0.0.1", "10.42.0.1"]).map(|address| address.parse().unwrap());
    HostState { local: local.collect(), ..HostState::default() }
}

#[track_caller]
fn check(service: &Service, slices: &[Arc<EndpointSlice>], packets: &[&str], expected: Expect) {
    let rules = rules(service, slices);
    let lines =
        packets.iter().map(|packet| format!("{packet} -> {}\n", trace_packet(&rules, &machine(), packet)));
    expected.assert_eq(&lines.collect::<String>());
}

const SPREAD: &str = "10.42.0.5@here, 10.42.1.5@there, fd42::5@here, fd42:0:0:1::5@there";

#[test]
fn cluster_ip() {
    check(
        &service(json!({})),
        &slices(SPREAD),
        &[
            "10.42.0.9 > 10.43.0.1:80",
            "fd42::9 > [fd43::1]:80",
            "own 192.0.2.1 > 10.43.0.1:80",
            "198.51.100.7 > 10.43.0.1:80",
            "10.42.0.5 > 10.43.0.1:80",
            "10.42.0.9 > 10.43.0.1:81",
            "10.42.0.9 > 10.43.0.1:80 udp",
            "10.42.0.9 > 10.43.0.2:80",
            "10.42.0.9 > 10.42.1.5:8080",
            "10.42.0.9 > 203.0.113.1:80",
            "198.51.100.7 > 192.0.2.1:80",
        ],
        expect![[r#"
            10.42.0.9 > 10.43.0.1:80 -> 10.42.0.5:8080 | 10.42.1.5:8080
            fd42::9 > [fd43::1]:80 -> [fd42::5]:8080 | [fd42:0:0:1::5]:8080
            own 192.0.2.1 > 10.43.0.1:80 -> 10.42.0.5:8080 masqueraded | 10.42.1.5:8080 masqueraded
            198.51.100.7 > 10.43.0.1:80 -> 10.42.0.5:8080 masqueraded | 10.42.1.5:8080 masqueraded
            10.42.0.5 > 10.43.0.1:80 -> 10.42.0.5:8080 masqueraded | 10.42.1.5:8080
            10.42.0.9 > 10.43.0.1:81 -> rejected
            10.42.0.9 > 10.43.0.1:80 udp -> rejected
            10.42.0.9 > 10.43.0.2:80 -> dropped
            10.42.0.9 > 10.42.1.5:8080 -> 10.42.1.5:8080
            10.42.0.9 > 203.0.113.1:80 -> 203.0.113.1:80
            198.51.100.7 > 192.0.2.1:80 -> 192.0.2.1:80
        "#]],
    );
}

#[test]
fn node_port() {
    let node_port = |more: Value| {
        let mut spec =
            json!({"type": "NodePort", "ports": [{"port": 80, "nodePort": 30080, "protocol": "TCP"}]});
        spec.as_object_mut().unwrap().extend(more.as_object().unwrap().clone());
        service(spec)
    };
    let packets = [
        "198.51.100.7 > 192.0.2.1:30080",
        "2001:db8:ff::7 > [2001:db8::1]:30080",
        "10.42.0.9 > 192.0.2.1:30080",
        "own 192.0.2.1 > 192.0.2.1:30080",
        "own 127.0.0.1 > 127.0.0.1:30080",
        "198.51.100.7 > 127.0.0.1:30080",
        "198.51.100.7 > 10.42.0.5:30080",
        "10.42.0.9 > 10.43.0.1:80",
    ];
    check(
        &node_port(json!({})),
        &slices(SPREAD),
        &packets,
        expect![[r#"
        198.51.100.7 > 192.0.2.1:30080 -> 10.42.0.5:8080 masqueraded | 10.42.1.5:8080 masqueraded
        2001:db8:ff::7 > [2001:db8::1]:30080 -> [fd42::5]:8080 masqueraded | [fd42:0:0:1::5]:8080 masqueraded
        10.42.0.9 > 192.0.2.1:30080 -> 10.42.0.5:8080 masqueraded | 10.42.1.5:8080 masqueraded
        own 192.0.2.1 > 192.0.2.1:30080 -> 10.42.0.5:8080 masqueraded | 10.42.1.5:8080 masqueraded
        own 127.0.0.1 > 127.0.0.1:30080 -> 127.0.0.1:30080
        198.51.100.7 > 127.0.0.1:30080 -> dropped
        198.51.100.7 > 10.42.0.5:30080 -> 10.42.0.5:30080
        10.42.0.9 > 10.43.0.1:80 -> 10.42.0.5:8080 | 10.42.1.5:8080
    "#]],
    );
    let local = node_port(json!({"externalTrafficPolicy": "Local"}));
    check(
        &local,
        &slices(SPREAD),
        &packets,
        expect![[r#"
        198.51.100.7 > 192.0.2.1:30080 -> 10.42.0.5:8080
        2001:db8:ff::7 > [2001:db8::1]:30080 -> [fd42::5]:8080
        10.42.0.9 > 192.0.2.1:30080 -> 10.42.0.5:8080 | 10.42.1.5:8080
        own 192.0.2.1 > 192.0.2.1:30080 -> 10.42.0.5:8080 masqueraded | 10.42.1.5:8080 masqueraded
        own 127.0.0.1 > 127.0.0.1:30080 -> 127.0.0.1:30080
        198.51.100.7 > 127.0.0.1:30080 -> dropped
        198.51.100.7 > 10.42.0.5:30080 -> 10.42.0.5:30080
        10.42.0.9 > 10.43.0.1:80 -> 10.42.0.5:8080 | 10.42.1.5:8080
    "#]],
    );
    let remote = slices("10.42.1.5@there");
    check(
        &local,
        &remote,
        &packets,
        expect![[r#"
        198.51.100.7 > 192.0.2.1:30080 -> dropped
        2001:db8:ff::7 > [2001:db8::1]:30080 -> rejected
        10.42.0.9 > 192.0.2.1:30080 -> 10.42.1.5:8080
        own 192.0.2.1 > 192.0.2.1:30080 -> 10.42.1.5:8080 masqueraded
        own 127.0.0.1 > 127.0.0.1:30080 -> 127.0.0.1:30080
        198.51.100.7 > 127.0.0.1:30080 -> dropped
        198.51.100.7 > 10.42.0.5:30080 -> 10.42.0.5:30080
        10.42.0.9 > 10.43.0.1:80 -> 10.42.1.5:8080
    "#]],
    );
    check(
        &local,
        &[],
        &packets,
        expect![[r#"
        198.51.100.7 > 192.0.2.1:30080 -> rejected
        2001:db8:ff::7 > [2001:db8::1]:30080 -> rejected
        10.42.0.9 > 192.0.2.1:30080 -> rejected
        own 192.0.2.1 > 192.0.2.1:30080 -> rejected
        own 127.0.0.1 > 127.0.0.1:30080 -> 127.0.0.1:30080
        198.51.100.7 > 127.0.0.1:30080 -> dropped
        198.51.100.7 > 10.42.0.5:30080 -> 10.42.0.5:30080
        10.42.0.9 > 10.43.0.1:80 -> rejected
    "#]],
    );
}

#[test]
fn load_balancer_and_external_ips() {
    let spec = json!({
        "type": "LoadBalancer",
        "externalIPs": ["203.0.113.9"],
        "loadBalancerSourceRanges": [" 198.51.100.0/24", "198.51.100.7/32", "192.0.2.0/24"],
        "status": {"loadBalancer": {"ingress": [
            {"ip": "203.0.113.1"}, {"ip": "203.0.113.2", "ipMode": "Proxy"}, {"hostname": "x"},
        ]}},
    });
    check(
        &service(spec),
        &slices("10.42.0.5@here"),
        &[
            "198.51.100.7 > 203.0.113.1:80",
            "198.51.101.7 > 203.0.113.1:80",
            "own 203.0.113.1 > 203.0.113.1:80",
            "198.51.100.7 > 203.0.113.2:80",
            "198.51.101.7 > 203.0.113.9:80",
            "10.42.0.9 > 203.0.113.1:80",
            "10.42.0.9 > 203.0.113.1:81",
        ],
        expect![[r#"
            198.51.100.7 > 203.0.113.1:80 -> 10.42.0.5:8080 masqueraded
            198.51.101.7 > 203.0.113.1:80 -> dropped
            own 203.0.113.1 > 203.0.113.1:80 -> 10.42.0.5:8080 masqueraded
            198.51.100.7 > 203.0.113.2:80 -> 203.0.113.2:80
            198.51.101.7 > 203.0.113.9:80 -> 10.42.0.5:8080 masqueraded
            10.42.0.9 > 203.0.113.1:80 -> dropped
            10.42.0.9 > 203.0.113.1:81 -> 203.0.113.1:81
        "#]],
    );
}

#[test]
fn local_traffic_policy_of_load_balancer() {
    let spec = json!({
        "type": "LoadBalancer",
        "externalTrafficPolicy": "Local",
        "healthCheckNodePort": 32000,
        "status": {"loadBalancer": {"ingress": [{"ip": "203.0.113.1"}]}},
    });
    let service = service(spec);
    let packets = ["198.51.100.7 > 203.0.113.1:80", "10.42.0.9 > 203.0.113.1:80"];
    check(
        &service,
        &slices(SPREAD),
        &packets,
        expect![[r#"
        198.51.100.7 > 203.0.113.1:80 -> 10.42.0.5:8080
        10.42.0.9 > 203.0.113.1:80 -> 10.42.0.5:8080 | 10.42.1.5:8080
    "#]],
    );
    check(
        &service,
        &slices("10.42.1.5@there"),
        &packets,
        expect![[r#"
        198.51.100.7 > 203.0.113.1:80 -> dropped
        10.42.0.9 > 203.0.113.1:80 -> 10.42.1.5:8080
    "#]],
    );
    let health = |endpoints: &str| plan(&service, &slices(endpoints), &topology()).health;
    assert_eq!(health(SPREAD), Some(HealthCheck { port: 32000, endpoints: 2 }));
    assert_eq!(health("10.42.0.5@here ending"), Some(HealthCheck { port: 32000, endpoints: 0 }));
}

#[test]
fn internal_policy() {
    let service = service(json!({"internalTrafficPolicy": "Local"}));
    let packets = ["10.42.0.9 > 10.43.0.1:80", "own 192.0.2.1 > 10.43.0.1:80"];
    check(
        &service,
        &slices(SPREAD),
        &packets,
        expect![[r#"
        10.42.0.9 > 10.43.0.1:80 -> 10.42.0.5:8080
        own 192.0.2.1 > 10.43.0.1:80 -> 10.42.0.5:8080 masqueraded
    "#]],
    );
    check(
        &service,
        &slices("10.42.1.5@there"),
        &packets,
        expect![[r#"
        10.42.0.9 > 10.43.0.1:80 -> dropped
        own 192.0.2.1 > 10.43.0.1:80 -> dropped
    "#]],
    );
    check(
        &service,
        &[],
        &packets,
        expect![[r#"
        10.42.0.9 > 10.43.0.1:80 -> rejected
        own 192.0.2.1 > 10.43.0.1:80 -> rejected
    "#]],
    );
}

#[test]
fn serving_terminating_endpoints_are_the_fallback() {
    let service = service(json!({}));
    let packets = ["10.42.0.9 > 10.43.0.1:80"];
    check(
        &service,
        &slices("10.42.0.5@here ending, 10.42.0.6@here"),
        &packets,
        expect![[r#"
        10.42.0.9 > 10.43.0.1:80 -> 10.42.0.6:8080
    "#]],
    );
    check(
        &service,
        &slices("10.42.0.5@here ending, 10.42.0.6@here dead"),
        &packets,
        expect![[r#"
        10.42.0.9 > 10.43.0.1:80 -> 10.42.0.5:8080
    "#]],
    );
    check(
        &service,
        &slices("10.42.0.5@here unready, 10.42.0.6@here dead"),
        &packets,
        expect![[r#"
        10.42.0.9 > 10.43.0.1:80 -> rejected
    "#]],
    );
}

#[test]
fn hints() {
    let service = service(json!({}));
    let packets = ["10.42.0.9 > 10.43.0.1:80"];
    let zones = "10.42.0.5@here zone=b, 10.42.1.5@there zone=a, 10.42.2.5@there zone=a";
    check(
        &service,
        &slices(zones),
        &packets,
        expect![[r#"
        10.42.0.9 > 10.43.0.1:80 -> 10.42.1.5:8080 | 10.42.2.5:8080
    "#]],
    );
    let one_without = "10.42.0.5@here zone=a, 10.42.1.5@there";
    check(
        &service,
        &slices(one_without),
        &packets,
        expect![[r#"
        10.42.0.9 > 10.43.0.1:80 -> 10.42.0.5:8080 | 10.42.1.5:8080
    "#]],
    );
    let none_for_us = "10.42.0.5@here zone=b, 10.42.1.5@there zone=c";
    check(
        &service,
        &slices(none_for_us),
        &packets,
        expect![[r#"
        10.42.0.9 > 10.43.0.1:80 -> 10.42.0.5:8080 | 10.42.1.5:8080
    "#]],
    );
    let nodes = "10.42.0.5@here zone=a node=here, 10.42.1.5@there zone=a node=there";
    check(
        &service,
        &slices(nodes),
        &packets,
        expect![[r#"
        10.42.0.9 > 10.43.0.1:80 -> 10.42.0.5:8080
    "#]],
    );
    let local_is_unready = "10.42.0.5@here zone=a node=here unready, 10.42.1.5@there zone=a node=there";
    check(
        &service,
        &slices(local_is_unready),
        &packets,
        expect![[r#"
        10.42.0.9 > 10.43.0.1:80 -> 10.42.1.5:8080
    "#]],
    );
}

#[test]
fn affinity() {
    let service = service(json!({
        "sessionAffinity": "ClientIP", "sessionAffinityConfig": {"clientIP": {"timeoutSeconds": 60}},
    }));
    let slices = slices(SPREAD);
    let packets = ["10.42.0.9 > 10.43.0.1:80"];
    check(
        &service,
        &slices,
        &packets,
        expect![[r#"
        10.42.0.9 > 10.43.0.1:80 -> 10.42.0.5:8080 | 10.42.1.5:8080
    "#]],
    );
    let rules = rules(&service, &slices);
    let set: Name = "affinity4/default/web/tcp/80/10.42.1.5/8080".into();
    let mut machine = machine();
    machine.dynamic_sets.insert(set, ["10.42.0.9".parse().unwrap()].into());
    assert_eq!(trace_packet(&rules, &machine, packets[0]), "10.42.1.5:8080");
    assert_eq!(trace_packet(&rules, &machine, "10.42.0.8 > 10.43.0.1:80"), "10.42.0.5:8080 | 10.42.1.5:8080");
}

#[test]
fn protocols() {
    let service = service(json!({"ports": [
        {"port": 53, "protocol": "UDP", "name": "dns"},
        {"port": 53, "protocol": "TCP", "name": "dns-tcp"},
        {"port": 36412, "protocol": "SCTP", "name": "s1"},
    ]}));
    let mut slices = slices_of("10.42.0.5@here", "UDP", Some("dns"));
    slices.extend(slices_of("10.42.0.6@here", "TCP", Some("dns-tcp")));
    slices.extend(slices_of("10.42.0.7@here", "SCTP", Some("s1")));
    check(
        &service,
        &slices,
        &["10.42.0.9 > 10.43.0.1:53 udp", "10.42.0.9 > 10.43.0.1:53", "10.42.0.9 > 10.43.0.1:36412 sctp"],
        expect![[r#"
            10.42.0.9 > 10.43.0.1:53 udp -> 10.42.0.5:8080
            10.42.0.9 > 10.43.0.1:53 -> 10.42.0.6:8080
            10.42.0.9 > 10.43.0.1:36412 sctp -> 10.42.0.7:8080
        "#]],
    );
    let udp_ports = plan(&service, &slices, &topology()).udp_ports;
    assert_eq!(udp_ports.len(), 2, "one per family");
    assert_eq!(udp_ports[0].to, ["10.42.0.5:8080".parse().unwrap()].into());
}

#[test]
fn services_of_other_proxies_are_ignored() {
    let empty = |spec: Value| assert!(plan(&service(spec), &slices(SPREAD), &topology()).fragment.is_empty());
    empty(json!({"clusterIP": "None", "clusterIPs": ["None"]}));
    empty(json!({"type": "ExternalName", "externalName": "example.com"}));
    empty(json!({"metadata": {"labels": {"service.kubernetes.io/service-proxy-name": "mine"}}}));
    empty(json!({"ports": []}));
}

#[test]
fn nested_networks_are_removed() {
    let networks = ["10.0.0.0/8", "10.1.0.0/16", "10.0.0.0/8", "192.0.2.1/32", "::/0"];
    let networks: Vec<IpNet> = networks.iter().map(|net| net.parse().unwrap()).collect();
    let remaining: Vec<String> = disjoint(&networks).iter().map(IpNet::to_string).collect();
    assert_eq!(remaining, ["::/0", "10.0.0.0/8", "192.0.2.1/32"]);
}
