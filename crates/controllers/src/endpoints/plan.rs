//! Computes the Endpoints of a Service. Does no I/O.

use std::collections::BTreeMap;
use std::sync::Arc;

use jiff::Timestamp;
use k8s_openapi::api::core::v1::{
    EndpointAddress, EndpointPort, EndpointSubset, Endpoints, Pod, Service, ServiceSpec,
};
use k8s_openapi::apimachinery::pkg::apis::meta::v1::ObjectMeta;
use reconcile::Object;

use super::subsets::{repack_subsets, truncate_addresses};
use crate::{backends, pod};

const MANAGED_BY: &str = "endpoints.kubernetes.io/managed-by";
const MANAGER: &str = "endpoint-controller";
const OVER_CAPACITY: &str = "endpoints.kubernetes.io/over-capacity";
/// The maximum number of addresses per Endpoints object.
const MAX_ADDRESSES: usize = 1000;

/// The Endpoints object to write, or `None` if it is up to date.
pub fn plan(
    service: &Service,
    spec: &ServiceSpec,
    pods: &[Arc<Pod>],
    current: Option<&Endpoints>,
    trigger: Option<Timestamp>,
) -> Option<Endpoints> {
    let mut subsets = repack_subsets(&subsets(service, spec, pods));
    let over = truncate_addresses(&mut subsets, MAX_ADDRESSES);
    let labels = labels(service, spec);
    if let Some(current) = current {
        let known = current.subsets.as_deref().unwrap_or_default();
        let same = known == subsets || repack_subsets(known) == subsets;
        let has_over_capacity_annotation = current.annotation(OVER_CAPACITY).is_some();
        if same && current.metadata.labels.as_ref() == Some(&labels) && over == has_over_capacity_annotation {
            return None;
        }
    }
    let metadata = ObjectMeta {
        name: Some(service.name().into()),
        namespace: Some(service.namespace().into()),
        ..ObjectMeta::default()
    };
    let mut desired = current.cloned().unwrap_or(Endpoints { metadata, subsets: None });
    desired.subsets = (!subsets.is_empty()).then_some(subsets);
    desired.metadata.labels = Some(labels);
    backends::set_trigger_annotation(&mut desired.metadata.annotations, trigger);
    let annotations = desired.metadata.annotations.get_or_insert_default();
    match over {
        true => drop(annotations.insert(OVER_CAPACITY.into(), "truncated".into())),
        false => drop(annotations.remove(OVER_CAPACITY)),
    }
    Some(desired)
}

fn labels(service: &Service, spec: &ServiceSpec) -> BTreeMap<String, String> {
    let mut labels = service.metadata.labels.clone().unwrap_or_default();
    labels.remove(backends::HEADLESS);
    if !backends::has_address(spec) {
        labels.insert(backends::HEADLESS.into(), String::new());
    }
    labels.insert(MANAGED_BY.into(), MANAGER.into());
    labels
}

fn subsets(service: &Service, spec: &ServiceSpec, pods: &[Arc<Pod>]) -> Vec<EndpointSubset> {
    let publish_not_ready = spec.publish_not_ready_addresses == Some(true);
    let mut subsets = Vec::new();
    for pod in pods.iter().filter(|pod| backends::should_be_endpoint(pod, publish_not_ready)) {
        let Some(address) = address(service, spec, pod) else { continue };
        let mut add = |ports: Option<Vec<EndpointPort>>| {
            let ready = publish_not_ready || pod::is_ready(pod);
            let (addresses, others) =
                if ready { (Some(vec![address.clone()]), None) } else { (None, Some(vec![address.clone()])) };
            subsets.push(EndpointSubset { addresses, not_ready_addresses: others, ports });
        };
        let ports = spec.ports.as_deref().unwrap_or_default();
        if ports.is_empty() && !backends::has_address(spec) {
            add(None);
        }
        for port in ports {
            let Some(number) = backends::find_pod_port(pod, port) else { continue };
            add(Some(vec![EndpointPort {
                name: port.name.clone(),
                port: number,
                protocol: Some(port.protocol.clone().unwrap_or_else(|| "TCP".into())),
                app_protocol: port.app_protocol.clone(),
            }]));
        }
    }
    subsets
}

/// The pod's address in the first IP family of the Service.
fn address(service: &Service, spec: &ServiceSpec, pod: &Pod) -> Option<EndpointAddress> {
    let pod_ip = pod.status.as_ref().and_then(|status| status.pod_ip.as_deref()).unwrap_or_default();
    let v6 = match spec.ip_families.as_deref().unwrap_or_default().first() {
        Some(family) => family == "IPv6",
        None if backends::has_address(spec) => spec.cluster_ip.as_ref().is_some_and(|ip| ip.contains(':')),
        None => pod_ip.contains(':'),
    };
    let some = |text: &str| (!text.is_empty()).then(|| text.to_owned());
    Some(EndpointAddress {
        ip: backends::addresses(pod, v6).into_iter().next()?,
        node_name: some(pod::node(pod)),
        hostname: backends::hostname(pod, service).cloned(),
        target_ref: Some(backends::reference(pod)),
    })
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;
    use serde_json::json;

    use super::*;

    fn pod(name: &str, ip: &str, ready: bool) -> Arc<Pod> {
        let conditions = json!([{"type": "Ready", "status": if ready { "True" } else { "False" }}]);
        let value = json!({
            "metadata": {"name": name, "namespace": "ns", "uid": name, "labels": {"app": "x"}},
            "spec": {"nodeName": "n", "containers": []},
            "status": {"phase": "Running", "podIP": ip, "podIPs": [{"ip": ip}], "conditions": conditions},
        });
        Arc::new(serde_json::from_value(value).expect("a pod"))
    }

    fn service(ports: serde_json::Value, cluster_ip: &str) -> Service {
        let spec = json!({"selector": {"app": "x"}, "ports": ports, "clusterIP": cluster_ip});
        let metadata = json!({"name": "web", "namespace": "ns", "labels": {"app": "x"}});
        serde_json::from_value(json!({"metadata": metadata, "spec": spec})).expect("a service")
    }

    fn plan_of(service: &Service, pods: &[Arc<Pod>], current: Option<&Endpoints>) -> Option<Endpoints> {
        plan(service, service.spec.as_ref().expect("a spec"), pods, current, None)
    }

    #[track_caller]
    fn check(service: &Service, pods: &[Arc<Pod>], expected: &str) {
        let desired = plan_of(service, pods, None).expect("missing Endpoints are created");
        let list = |addresses: &Option<Vec<EndpointAddress>>| {
            addresses.iter().flatten().map(|address| address.ip.clone()).collect::<Vec<_>>().join(",")
        };
        let subset = |subset: &EndpointSubset| {
            let ports: Vec<String> =
                subset.ports.iter().flatten().map(|port| port.port.to_string()).collect();
            format!("{}|{}:{}", list(&subset.addresses), list(&subset.not_ready_addresses), ports.join(","))
        };
        let found: Vec<String> = desired.subsets.iter().flatten().map(subset).collect();
        assert_eq!(found.join(" "), expected);
        assert_eq!(plan_of(service, pods, Some(&desired)), None, "the plan must be idempotent");
    }

    #[test]
    fn addresses_are_merged_by_ports() {
        let two = service(
            json!([{"name": "a", "port": 80}, {"name": "b", "port": 81, "targetPort": 8081}]),
            "10.0.0.1",
        );
        let pods =
            [pod("one", "10.1.0.2", true), pod("two", "10.1.0.1", true), pod("three", "10.1.0.3", false)];
        check(&two, &pods, "10.1.0.1,10.1.0.2|10.1.0.3:80,8081");
        check(&two, &[], "");
        check(&two, &[pod("old", "2001:db8::1", true)], "");
        let headless = service(json!([]), "None");
        check(&headless, &pods[..1], "10.1.0.2|:");
        assert!(plan_of(&headless, &[], None).is_some_and(|e| e.label(backends::HEADLESS) == Some("")));
    }

    #[test]
    fn addresses_over_limit_are_truncated() {
        let service = service(json!([{"port": 80}]), "10.0.0.1");
        let pods: Vec<Arc<Pod>> = (0..1100u32)
            .map(|i| pod(&format!("p{i}"), &std::net::Ipv4Addr::from(0x0a01_0000 + i).to_string(), i < 900))
            .collect();
        let desired = plan_of(&service, &pods, None).expect("endpoints");
        assert_eq!(desired.annotation(OVER_CAPACITY), Some("truncated"));
        let subset = &desired.subsets.as_ref().expect("subsets")[0];
        let counts =
            (subset.addresses.as_ref().map(Vec::len), subset.not_ready_addresses.as_ref().map(Vec::len));
        assert_eq!(counts, (Some(900), Some(100)));
        assert_eq!(plan_of(&service, &pods, Some(&desired)), None);
    }

    proptest! {
        #[test]
        fn repack_preserves_addresses_and_readiness(subsets in prop::collection::vec((prop::collection::vec(0..5u8, 0..4), prop::collection::vec(0..5u8, 0..4), prop::collection::vec(80..83i32, 1..3)), 0..5)) {
            let address = |n: &u8| EndpointAddress { ip: format!("10.0.0.{n}"), ..EndpointAddress::default() };
            let subsets: Vec<EndpointSubset> = subsets.iter().map(|(ready, others, ports)| EndpointSubset {
                addresses: Some(ready.iter().map(address).collect()),
                not_ready_addresses: Some(others.iter().map(address).collect()),
                ports: Some(ports.iter().map(|port| EndpointPort { port: *port, ..EndpointPort::default() }).collect()),
            }).collect();
            let readiness_by_address = |subsets: &[EndpointSubset]| {
                let mut readiness: BTreeMap<(i32, String), bool> = BTreeMap::new();
                for subset in subsets {
                    let ports: Vec<i32> = subset.ports.iter().flatten().map(|port| port.port).collect();
                    for port in if ports.is_empty() { vec![-1] } else { ports } {
                        for (addresses, ready) in [(&subset.addresses, true), (&subset.not_ready_addresses, false)] {
                            for address in addresses.iter().flatten() {
                                *readiness.entry((port, address.ip.clone())).or_insert(ready) &= ready;
                            }
                        }
                    }
                }
                readiness
            };
            let packed = repack_subsets(&subsets);
            prop_assert_eq!(readiness_by_address(&packed), readiness_by_address(&subsets));
            prop_assert_eq!(repack_subsets(&packed), packed);
        }
    }
}
