use std::collections::HashSet;
use std::net::IpAddr;

use proptest::prelude::*;
use serde_json::{Value, json};

use super::*;
use crate::core::testing;

/// The allocator state of a cluster, with a constant as random number.
#[derive(Default)]
struct Cluster {
    ips: HashSet<IpAddr>,
    ports: HashSet<u16>,
    seed: u64,
}

impl AllocatorState for Cluster {
    fn ip_in_use(&self, ip: IpAddr) -> bool {
        self.ips.contains(&ip)
    }

    fn port_in_use(&self, port: u16) -> bool {
        self.ports.contains(&port)
    }

    fn random(&mut self, bound: u64) -> u64 {
        self.seed % bound
    }
}

impl Cluster {
    fn record(&mut self, changes: &AllocationChanges) {
        self.ips.extend(&changes.allocated_ips);
        self.ports.extend(&changes.allocated_ports);
        self.ips.retain(|ip| !changes.released_ips.contains(ip));
        self.ports.retain(|port| !changes.released_ports.contains(port));
    }
}

fn ranges(cidrs: &[&str]) -> AllocationRanges {
    AllocationRanges::new(cidrs.iter().map(|cidr| Cidr::parse(cidr).unwrap()).collect(), 30000..=32767)
}

const V4: &[&str] = &["10.0.0.0/24"];
const V6: &[&str] = &["fd00::/112"];
const DUAL: &[&str] = &["10.0.0.0/24", "fd00::/112"];

/// Returns the allocated fields or the error.
fn run(cluster: &mut Cluster, cidrs: &[&str], old: Option<&Value>, spec: Value) -> (Value, String) {
    let mut new = json!({"metadata": {"name": "x"}, "spec": spec});
    let result = match allocate(&mut new, old, &ranges(cidrs), cluster) {
        Ok(changes) => {
            cluster.record(&changes);
            let spec = &new["spec"];
            let ports: Vec<i64> = node_ports(spec).collect();
            format!(
                "{} {} {:?} {ports:?}",
                strings(spec, "clusterIPs").join(","),
                strings(spec, "ipFamilies").join(","),
                spec.text("ipFamilyPolicy"),
            )
        }
        Err(AllocationError::Invalid(errors)) => testing::lines(&errors).trim_end().to_owned(),
        Err(AllocationError::Internal(message)) => format!("internal: {message}"),
    };
    (new, result)
}

#[track_caller]
fn check(cidrs: &[&str], spec: Value, expected: &str) {
    assert_eq!(run(&mut Cluster::default(), cidrs, None, spec).1, expected);
}

#[test]
fn default_families_match_cluster() {
    let selector = json!({"a": "b"});
    check(V4, json!({"type": "ClusterIP"}), "10.0.0.17 IPv4 \"SingleStack\" []");
    check(V6, json!({"type": "ClusterIP"}), "fd00::101 IPv6 \"SingleStack\" []");
    check(DUAL, json!({"type": "ClusterIP"}), "10.0.0.17 IPv4 \"SingleStack\" []");
    check(
        DUAL,
        json!({"type": "ClusterIP", "ipFamilyPolicy": "PreferDualStack"}),
        "10.0.0.17,fd00::101 IPv4,IPv6 \"PreferDualStack\" []",
    );
    check(
        V4,
        json!({"type": "ClusterIP", "ipFamilyPolicy": "PreferDualStack"}),
        "10.0.0.17 IPv4 \"PreferDualStack\" []",
    );
    check(
        DUAL,
        json!({"type": "ClusterIP", "ipFamilies": ["IPv6"], "ipFamilyPolicy": "RequireDualStack"}),
        "fd00::101,10.0.0.17 IPv6,IPv4 \"RequireDualStack\" []",
    );
    check(
        V4,
        json!({"type": "ClusterIP", "ipFamilies": ["IPv6"], "ipFamilyPolicy": "RequireDualStack"}),
        "spec.ipFamilyPolicy: Invalid value: \"RequireDualStack\": this cluster is not configured for dual-stack services\n\
         spec.ipFamilies[0]: Invalid value: \"IPv6\": not configured on this cluster",
    );
    check(
        V4,
        json!({"type": "ClusterIP", "clusterIP": "fd00::1"}),
        "spec.clusterIPs[0]: Invalid value: [\"fd00::1\"]: IPv6 is not configured on this cluster",
    );
    check(
        V4,
        json!({"type": "ClusterIP", "clusterIP": "None", "selector": selector}),
        "None IPv4 \"SingleStack\" []",
    );
    check(V4, json!({"type": "ClusterIP", "clusterIP": "None"}), "None IPv4,IPv6 \"RequireDualStack\" []");
    check(V4, json!({"type": "ExternalName"}), "  \"\" []");
    check(
        DUAL,
        json!({"type": "ClusterIP", "ipFamilies": ["IPv6", "IPv4"]}),
        "spec.ipFamilyPolicy: Invalid value: \"SingleStack\": must be 'RequireDualStack' or 'PreferDualStack' when multiple IP families are specified",
    );
}

#[test]
fn requested_ips_are_allocated() {
    let cluster = &mut Cluster::default();
    let request = |ip: &str| json!({"type": "ClusterIP", "clusterIP": ip});
    assert_eq!(run(cluster, V4, None, request("10.0.0.10")).1, "10.0.0.10 IPv4 \"SingleStack\" []");
    assert_eq!(
        run(cluster, V4, None, request("10.0.0.10")).1,
        "spec.clusterIPs: Invalid value: [\"10.0.0.10\"]: failed to allocate IP 10.0.0.10: provided IP is already allocated"
    );
    for outside in ["1.2.3.4", "10.0.0.0", "10.0.0.255"] {
        assert_eq!(
            run(cluster, V4, None, request(outside)).1,
            format!(
                "spec.clusterIPs: Invalid value: [\"{outside}\"]: failed to allocate IP {outside}: the provided network does not match the current range"
            )
        );
    }
    assert_eq!(
        run(cluster, V4, None, request("nope")).1,
        "spec.clusterIPs[0]: Invalid value: \"nope\": must be a valid IP address, (e.g. 10.9.8.7 or 2001:db8::ffff)"
    );
}

#[test]
fn requested_node_ports_are_allocated() {
    let cluster = &mut Cluster::default();
    let port = |port: i64, node_port: i64| json!({"port": port, "protocol": "TCP", "nodePort": node_port});
    let request = |ports: Vec<Value>| json!({"type": "NodePort", "ports": ports});
    assert_eq!(
        run(cluster, V4, None, request(vec![port(80, 80)])).1,
        "spec.ports[0].nodePort: Invalid value: 80: provided port is not in the valid range. The range of valid ports is 30000-32767"
    );
    assert_eq!(
        run(cluster, V4, None, request(vec![port(80, 30999)])).1,
        "10.0.0.17 IPv4 \"SingleStack\" [30999]"
    );
    assert_eq!(
        run(cluster, V4, None, request(vec![port(80, 30999)])).1,
        "spec.ports[0].nodePort: Invalid value: 30999: provided port is already allocated"
    );
    // TCP and UDP share a node port, and the static band at the low end is not used.
    assert_eq!(
        run(cluster, V4, None, request(vec![port(53, 0), port(53, 0), port(80, 0)])).1,
        "10.0.0.18 IPv4 \"SingleStack\" [30086, 30086, 30087]"
    );
    let balancer = json!({"type": "LoadBalancer", "allocateLoadBalancerNodePorts": false,
                          "externalTrafficPolicy": "Local", "ports": [port(80, 0)]});
    let (new, _) = run(cluster, V4, None, balancer.clone());
    assert_eq!(
        (&new["spec"]["ports"][0]["nodePort"], &new["spec"]["healthCheckNodePort"]),
        (&json!(0), &json!(30088))
    );
    let mut requested = balancer;
    requested["healthCheckNodePort"] = json!(30088);
    assert_eq!(
        run(cluster, V4, None, requested).1,
        "internal: failed to allocate requested HealthCheck NodePort 30088: provided port is already allocated"
    );
}

#[test]
fn update_keeps_unspecified_fields() {
    let cluster = &mut Cluster::default();
    let manifest = json!({"type": "NodePort", "ports": [{"port": 80, "protocol": "TCP"}]});
    let (stored, first) = run(cluster, V4, None, manifest.clone());
    assert_eq!(run(cluster, V4, Some(&stored), manifest).1, first);

    let (stored, result) =
        run(cluster, V4, Some(&stored), json!({"type": "ClusterIP", "ports": [{"port": 80}]}));
    assert_eq!(result, "10.0.0.17 IPv4 \"SingleStack\" []");
    assert!(cluster.ports.is_empty());
    let (stored, result) = run(cluster, V4, Some(&stored), json!({"type": "ExternalName"}));
    assert_eq!(result, "  \"\" []");
    assert!(cluster.ips.is_empty());
    let (_, result) = run(cluster, V4, Some(&stored), json!({"type": "ClusterIP"}));
    assert_eq!(result, "10.0.0.17 IPv4 \"SingleStack\" []");
}

#[test]
fn updates_between_single_and_dual_stack() {
    let cluster = &mut Cluster::default();
    let (stored, _) = run(cluster, DUAL, None, json!({"type": "ClusterIP"}));
    let mut spec = stored["spec"].clone();
    spec["ipFamilyPolicy"] = json!("RequireDualStack");
    let (stored, result) = run(cluster, DUAL, Some(&stored), spec);
    assert_eq!(result, "10.0.0.17,fd00::101 IPv4,IPv6 \"RequireDualStack\" []");
    let mut spec = stored["spec"].clone();
    spec["ipFamilyPolicy"] = json!("SingleStack");
    let (_, result) = run(cluster, DUAL, Some(&stored), spec);
    assert_eq!(result, "10.0.0.17 IPv4 \"SingleStack\" []");
    assert_eq!(cluster.ips.len(), 1);
}

#[test]
fn full_range_uses_static_band_and_then_fails() {
    let cluster = &mut Cluster::default();
    let mut seen = Vec::new();
    for _ in 0..14 {
        seen.push(run(cluster, &["10.0.0.0/28"], None, json!({"type": "ClusterIP"})).1);
    }
    assert!(seen[13].starts_with("10.0.0.14 "), "{seen:?}");
    assert_eq!(
        run(cluster, &["10.0.0.0/28"], None, json!({"type": "ClusterIP"})).1,
        "internal: failed to allocate a serviceIP for Service \"x\": range is full"
    );
    for tiny in ["10.0.0.0/32", "10.0.0.0/31"] {
        assert!(run(cluster, &[tiny], None, json!({"type": "ClusterIP"})).1.starts_with("internal"));
    }
}

proptest! {
    /// For any random number, addresses are in range and unique, and every usable address is allocated.
    #[test]
    fn every_address_is_allocated_once(seed: u64, bits in 26..30_u32) {
        let cidr = format!("10.0.0.0/{bits}");
        let mut cluster = Cluster { seed, ..Cluster::default() };
        let count = (1 << (32 - bits)) - 2;
        for _ in 0..count {
            let (_, result) = run(&mut cluster, &[&cidr], None, json!({"type": "ClusterIP"}));
            prop_assert!(result.starts_with("10.0.0."), "{result}");
        }
        prop_assert_eq!(cluster.ips.len(), count);
    }
}

/// A request may contain a hundred thousand ports. A quadratic comparison would take minutes here.
#[test]
fn allocation_of_many_ports_is_fast() {
    let ports: Vec<Value> = (0..100_000)
        .map(|port| json!({"port": port, "protocol": "TCP", "targetPort": 1, "name": "a"}))
        .collect();
    let cluster = &mut Cluster::default();
    let spec = json!({"type": "LoadBalancer", "allocateLoadBalancerNodePorts": false, "ports": ports});
    assert_eq!(run(cluster, V4, None, spec).1, "10.0.0.17 IPv4 \"SingleStack\" []");
    let mut errors = ErrorList::default();
    let service = json!({"spec": {"type": "ClusterIP", "ports": ports}});
    crate::core::service::validate::validate_service(&service, &mut errors);
    assert!(!errors.is_empty());
}
