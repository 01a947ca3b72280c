//! Host ports of pods on this node. Counterpart: the CNI `portmap` plugin.

use std::net::{IpAddr, SocketAddr};
use std::sync::Arc;

use k8s_openapi::api::core::v1::{ContainerPort, Pod};
use nft::{Field, Fragment, IpFamily, MatchValue, Name, Ruleset, Statement, Verdict, rule};
use podnet::HostPort;
use reconcile::{Caches, Key, Object as _};

use crate::base_ruleset::{MASQUERADE, ServiceSets, loopback_net, loopback_ports};
use crate::plan::protocol;
use crate::policy::plan::{addresses, chain_name};
use crate::policy::{fragment_owner, is_on_node};

/// Watches the pods of a node that use host ports. `notify` is called for each pod whose rules may have
/// changed.
pub fn listen(caches: &Arc<Caches>, node: &str, notify: impl Fn(Key) + Send + Sync + 'static) {
    let node = node.to_owned();
    caches.pods().listen(move |changed| {
        let uses_host_ports = |pod: &Arc<Pod>| is_on_node(pod, &node) && ports(pod).next().is_some();
        let host_port_addresses = |pod: Option<&Arc<Pod>>| {
            pod.filter(|pod| uses_host_ports(pod)).map(|pod| addresses(pod).collect())
        };
        let (before, after): (Option<Vec<IpAddr>>, _) =
            (host_port_addresses(changed.before), host_port_addresses(changed.after));
        if before != after {
            notify(changed.latest().key());
        }
    });
}

/// Puts the rules for a pod's host ports into the table, or removes them.
pub fn apply(caches: &Arc<Caches>, key: &Key, node: &str, rules: &mut Ruleset) {
    let pod = caches.pods().get(key).filter(|pod| is_on_node(pod, node));
    rules.put(&fragment_owner("host-port", key), pod.as_deref().map(plan).unwrap_or_default());
}

/// The rules for the host ports of a pod. They are in the same maps as node ports.
pub fn plan(pod: &Pod) -> Fragment {
    let mut host_ports = Vec::new();
    for address in addresses(pod) {
        let number = |port: i32| u16::try_from(port).ok();
        host_ports.extend(ports(pod).filter_map(|port| {
            Some(HostPort {
                pod: pod.key().to_string(),
                address,
                port: number(port.container_port)?,
                protocol: port.protocol.clone().unwrap_or_else(|| "TCP".to_owned()),
                host_ip: port.host_ip.clone().unwrap_or_default(),
                host_port: port.host_port.and_then(number)?,
            })
        }));
    }
    redirect_fragment(&host_ports)
}

/// The rules for these host ports.
pub fn redirect_fragment(ports: &[HostPort]) -> Fragment {
    let mut fragment = Fragment::default();
    ports.iter().for_each(|port| write(&mut fragment, port));
    fragment
}

/// The host ports of all containers.
fn ports(pod: &Pod) -> impl Iterator<Item = &ContainerPort> {
    let spec = pod.spec.as_ref();
    let init_containers = spec.and_then(|spec| spec.init_containers.as_ref()).into_iter().flatten();
    // Of the init containers only sidecars (`restartPolicy: Always`) keep running.
    let sidecars = init_containers.filter(|container| container.restart_policy.as_deref() == Some("Always"));
    let containers = spec.into_iter().flat_map(|spec| &spec.containers).chain(sidecars);
    containers
        .flat_map(|container| container.ports.iter().flatten())
        .filter(|port| port.host_port.is_some_and(|port| port != 0))
}

fn write(fragment: &mut Fragment, port: &HostPort) {
    let HostPort { address, host_port: outer, port: inner, .. } = *port;
    let Some(proto) = protocol(&Some(port.protocol.clone())) else { return };
    let (ip, sets) = (IpFamily::of(address), ServiceSets::of(IpFamily::of(address)));
    let (namespace, name) = port.pod.split_once('/').unwrap_or(("", &port.pod));
    let chain: Name = chain_name(&format!("host-port-{}-{outer}-", proto.name()), ip, namespace, name);
    let is_proto = Statement::equals(Field::Proto, MatchValue::Proto(proto));
    let redirect = Statement::Dnat(vec![SocketAddr::new(address, inner)]);
    let verdict = Some(Verdict::Goto(chain.clone()));
    match Some(port.host_ip.as_str()).filter(|text| !text.is_empty()).map(str::parse::<IpAddr>) {
        Some(Ok(host)) if !host.is_unspecified() => {
            if IpFamily::of(host) != ip {
                return;
            }
            let key = vec![MatchValue::Address(host), MatchValue::Proto(proto), MatchValue::Port(outer)];
            fragment.element(&sets.services, key, verdict);
        }
        Some(Err(_)) => return,
        _ => {
            let key = vec![MatchValue::Proto(proto), MatchValue::Port(outer)];
            if ip == IpFamily::V4 {
                fragment.element(&loopback_ports(), key.clone(), verdict.clone());
            }
            fragment.element(&sets.node_ports, key, verdict);
        }
    }
    let mut rules = vec![rule([is_proto, redirect])];
    if ip == IpFamily::V4 {
        // A pod would send its responses to a loopback address to itself, so the source is masqueraded.
        let from_loopback = Statement::equals(Field::Source(ip), loopback_net(ip));
        rules.insert(0, rule([from_loopback, Statement::SetMark(MASQUERADE)]));
    }
    fragment.chain(&chain, rules);
    let hairpin = vec![
        MatchValue::Address(address),
        MatchValue::Address(address),
        MatchValue::Proto(proto),
        MatchValue::Port(inner),
    ];
    fragment.element(&sets.hairpin_connections, hairpin, None);
}

#[cfg(test)]
mod tests {
    use expect_test::{Expect, expect};
    use nft::Proto;
    use nft::trace::{HostState, Packet, trace};
    use serde_json::{Value, json};

    use super::*;
    use crate::base_ruleset::{base_rules, loopback};

    #[track_caller]
    fn check(ports: Value, packets: &[(&str, &str)], expected: Expect) {
        let pod = json!({
            "metadata": {"name": "web", "namespace": "default"},
            "spec": {"containers": [{"name": "main", "ports": ports}]},
            "status": {"podIPs": [{"ip": "10.42.0.5"}, {"ip": "fd42::5"}]},
        });
        let mut rules = Ruleset::default();
        rules.put(&"".into(), base_rules(&["10.42.0.0/16".parse().unwrap()], &[]));
        rules.put(&"loopback".into(), loopback());
        rules.put(&"pod".into(), plan(&serde_json::from_value(pod).unwrap()));
        let local = ["192.0.2.1", "192.0.2.9", "2001:db8::1", "127.0.0.1", "127.0.0.2", "::1"];
        let local = local.map(|text| text.parse().unwrap());
        let machine = HostState { local: local.into(), ..HostState::default() };
        let lines = packets.iter().map(|(from, to)| {
            let (to, proto) = to.strip_suffix(" udp").map_or((*to, Proto::Tcp), |to| (to, Proto::Udp));
            let packet = Packet {
                from: from.parse().unwrap(),
                to: to.parse().unwrap(),
                proto,
                host_generated: ["192.0.2.1", "127.0.0.1", "::1"].contains(from),
            };
            let results = trace(&rules, &machine, &packet);
            let results: Vec<String> = results.iter().map(ToString::to_string).collect();
            format!("{from} > {to} -> {}\n", results.join(" | "))
        });
        expected.assert_eq(&lines.collect::<String>());
    }

    #[test]
    fn host_ports_redirect_to_pods() {
        let ports = json!([
            {"containerPort": 8080, "hostPort": 80, "protocol": "TCP"},
            {"containerPort": 53, "hostPort": 53, "protocol": "UDP", "hostIP": "192.0.2.9"},
            {"containerPort": 9000},
        ]);
        let packets = [
            ("198.51.100.7", "192.0.2.1:80"),
            ("198.51.100.7", "192.0.2.9:80"),
            ("2001:db8:ff::7", "[2001:db8::1]:80"),
            ("10.42.0.5", "192.0.2.1:80"),
            ("192.0.2.1", "192.0.2.1:80"),
            ("198.51.100.7", "192.0.2.9:53 udp"),
            ("198.51.100.7", "192.0.2.1:53 udp"),
            ("198.51.100.7", "192.0.2.1:9000"),
        ];
        check(
            ports,
            &packets,
            expect![[r#"
            198.51.100.7 > 192.0.2.1:80 -> 10.42.0.5:8080
            198.51.100.7 > 192.0.2.9:80 -> 10.42.0.5:8080
            2001:db8:ff::7 > [2001:db8::1]:80 -> [fd42::5]:8080
            10.42.0.5 > 192.0.2.1:80 -> 10.42.0.5:8080 masqueraded
            192.0.2.1 > 192.0.2.1:80 -> 10.42.0.5:8080
            198.51.100.7 > 192.0.2.9:53 -> 10.42.0.5:53
            198.51.100.7 > 192.0.2.1:53 -> 192.0.2.1:53
            198.51.100.7 > 192.0.2.1:9000 -> 192.0.2.1:9000
        "#]],
        );
    }

    #[test]
    fn host_ports_redirect_at_loopback_addresses() {
        let ports = json!([
            {"containerPort": 8080, "hostPort": 80, "protocol": "TCP"},
            {"containerPort": 53, "hostPort": 53, "protocol": "UDP", "hostIP": "127.0.0.1"},
            {"containerPort": 9000, "hostPort": 90, "hostIP": "192.0.2.9"},
        ]);
        let packets = [
            ("127.0.0.1", "127.0.0.1:80"),
            ("127.0.0.1", "127.0.0.2:80"),
            ("192.0.2.1", "127.0.0.1:80"),
            ("127.0.0.1", "192.0.2.1:80"),
            ("127.0.0.1", "127.0.0.1:80 udp"),
            ("127.0.0.1", "127.0.0.1:53 udp"),
            ("127.0.0.1", "127.0.0.2:53 udp"),
            ("127.0.0.1", "127.0.0.1:90"),
            ("::1", "[::1]:80"),
            ("10.42.0.9", "127.0.0.1:80"),
            ("10.42.0.9", "127.0.0.1:22"),
            ("198.51.100.7", "127.0.0.1:53 udp"),
            ("127.0.0.5", "192.0.2.1:9000"),
        ];
        check(
            ports,
            &packets,
            expect![[r#"
            127.0.0.1 > 127.0.0.1:80 -> 10.42.0.5:8080 masqueraded
            127.0.0.1 > 127.0.0.2:80 -> 10.42.0.5:8080 masqueraded
            192.0.2.1 > 127.0.0.1:80 -> 10.42.0.5:8080
            127.0.0.1 > 192.0.2.1:80 -> 10.42.0.5:8080 masqueraded
            127.0.0.1 > 127.0.0.1:80 -> 127.0.0.1:80
            127.0.0.1 > 127.0.0.1:53 -> 10.42.0.5:53 masqueraded
            127.0.0.1 > 127.0.0.2:53 -> 127.0.0.2:53
            127.0.0.1 > 127.0.0.1:90 -> 127.0.0.1:90
            ::1 > [::1]:80 -> [::1]:80
            10.42.0.9 > 127.0.0.1:80 -> dropped
            10.42.0.9 > 127.0.0.1:22 -> dropped
            198.51.100.7 > 127.0.0.1:53 -> dropped
            127.0.0.5 > 192.0.2.1:9000 -> dropped
        "#]],
        );
    }
}
