//! What the slices of a Service should be. Pure.

use std::collections::BTreeMap;
use std::sync::Arc;

use k8s_openapi::api::core::v1::{Node, Pod, Service, ServiceSpec};
use k8s_openapi::api::discovery::v1::{Endpoint, EndpointConditions, EndpointPort, EndpointSlice};
use k8s_openapi::apimachinery::pkg::apis::meta::v1::{ObjectMeta, OwnerReference};
use reconcile::Object;

use super::hints::{self, Wish};
use super::pack::{Changes, Group, MANAGED_BY, SERVICE_NAME, hold_place, pack, reuse};
use crate::{backends, pod};

pub const MANAGER: &str = "endpointslice-controller.k8s.io";
const ZONE: &str = "topology.kubernetes.io/zone";
/// How many endpoints a slice has at most.
const MOST: usize = 100;

/// What a Service's slices are made from.
pub struct Observed<'a> {
    pub service: &'a Service,
    pub spec: &'a ServiceSpec,
    pub pods: &'a [Arc<Pod>],
    /// The slices of this Service that are this controller's.
    pub slices: &'a [Arc<EndpointSlice>],
    pub node: &'a (dyn Fn(&str) -> Option<Arc<Node>> + Sync),
    /// Each zone's part of the processors, where it is asked for and can be said.
    pub shares: Option<&'a BTreeMap<String, f64>>,
    /// The Service's endpoints were meant for zones until now.
    pub hinted: bool,
}

/// What has to happen, and what is worth telling.
#[derive(Debug, Default)]
pub struct Plan {
    pub changes: Changes,
    /// Whether endpoints are meant for zones, and what to tell about that: a warning unless they are.
    pub told: Vec<String>,
    pub hinted: bool,
}

pub fn plan(observed: &Observed<'_>) -> Plan {
    let mut result = Plan::default();
    let families = families(observed.spec);
    for slice in observed.slices.iter().filter(|slice| !families.contains(&slice.address_type.as_str())) {
        result.changes.delete.push(slice.clone());
    }
    for family in families {
        let slices: Vec<Arc<EndpointSlice>> =
            observed.slices.iter().filter(|slice| slice.address_type == family).cloned().collect();
        let blank = blank(observed.service, observed.spec, family);
        let mut changes = pack(&blank, &slices, groups(observed, family == "IPv6"), MOST);
        hold_place(&blank, &mut changes);
        place(observed, family, &mut changes, &mut result);
        reuse(&blank, &mut changes);
        result.changes.create.append(&mut changes.create);
        result.changes.update.append(&mut changes.update);
        result.changes.delete.append(&mut changes.delete);
        result.changes.keep.append(&mut changes.keep);
    }
    if observed.service.is_deleting() {
        // They would go with it.
        result.changes.create.clear();
    }
    result
}

/// Says for whom endpoints are meant.
fn place(observed: &Observed<'_>, family: &str, changes: &mut Changes, result: &mut Plan) {
    let told = |text: &str| format!("{text}, addressType: {family}");
    match Wish::of(observed.service) {
        Wish::Proportional => match hints::proportional(changes, observed.shares) {
            Ok(()) => {
                result.hinted = true;
                if !observed.hinted {
                    result.told.push(told("Topology Aware Hints has been enabled"));
                }
            }
            Err(why) => {
                hints::remove(changes);
                result.told.push(told(&why));
            }
        },
        wish => {
            if observed.hinted {
                result.told.push(told("Topology Aware Hints has been disabled"));
            }
            match wish {
                Wish::Close { node } => hints::stay_close(changes, node),
                _ => hints::remove(changes),
            }
        }
    }
}

/// The address types of a Service.
fn families(spec: &ServiceSpec) -> Vec<&'static str> {
    let known = spec.ip_families.as_deref().unwrap_or_default();
    let mut families: Vec<&'static str> = Vec::new();
    for (family, name) in [("IPv4", "IPv4"), ("IPv6", "IPv6")] {
        if known.iter().any(|known| known == family) {
            families.push(name);
        }
    }
    match (families.is_empty(), spec.cluster_ip.as_deref()) {
        (false, _) => families,
        (true, Some(ip)) if backends::has_address(spec) => {
            vec![if ip.contains(':') { "IPv6" } else { "IPv4" }]
        }
        (true, _) => vec!["IPv4", "IPv6"],
    }
}

/// A slice of a Service with nothing in it.
fn blank(service: &Service, spec: &ServiceSpec, family: &str) -> EndpointSlice {
    let mut labels = service.metadata.labels.clone().unwrap_or_default();
    labels.remove(backends::HEADLESS);
    if !backends::has_address(spec) {
        labels.insert(backends::HEADLESS.into(), String::new());
    }
    labels.insert(SERVICE_NAME.into(), service.name().into());
    labels.insert(MANAGED_BY.into(), MANAGER.into());
    let owner = OwnerReference {
        api_version: "v1".into(),
        kind: "Service".into(),
        name: service.name().into(),
        uid: service.uid().into(),
        controller: Some(true),
        block_owner_deletion: Some(true),
    };
    EndpointSlice {
        metadata: ObjectMeta {
            generate_name: Some(format!("{}-", service.name())),
            namespace: Some(service.namespace().into()),
            labels: Some(labels),
            owner_references: Some(vec![owner]),
            ..ObjectMeta::default()
        },
        address_type: family.into(),
        endpoints: Some(Vec::new()),
        ports: None,
    }
}

/// The endpoints of a Service, those with the same ports together.
fn groups(observed: &Observed<'_>, v6: bool) -> Vec<Group> {
    let mut groups = Vec::new();
    for pod in observed.pods.iter().filter(|pod| backends::is_listed(pod, true)) {
        let node = (observed.node)(pod::node(pod));
        let published = observed.spec.publish_not_ready_addresses == Some(true);
        let ports = ports(observed.spec, pod);
        // Also where this pod has none of the addresses, since others with these ports may.
        let mut group = Group { ports, endpoints: Vec::new() };
        let addresses = backends::addresses(pod, v6);
        if !addresses.is_empty() && (node.is_some() || published) {
            group.endpoints.push(endpoint(observed.service, pod, node.as_deref(), addresses, published));
        }
        groups.push(group);
    }
    groups
}

fn ports(spec: &ServiceSpec, pod: &Pod) -> Vec<EndpointPort> {
    let ports = spec.ports.iter().flatten().filter_map(|port| {
        Some(EndpointPort {
            name: Some(port.name.clone().unwrap_or_default()),
            port: Some(backends::port_of(pod, port)?),
            protocol: Some(port.protocol.clone().unwrap_or_else(|| "TCP".into())),
            app_protocol: port.app_protocol.clone(),
        })
    });
    ports.collect()
}

fn endpoint(
    service: &Service,
    pod: &Pod,
    node: Option<&Node>,
    addresses: Vec<String>,
    published: bool,
) -> Endpoint {
    let serving = pod::is_ready(pod);
    let terminating = pod.is_deleting();
    let some = |text: &str| (!text.is_empty()).then(|| text.to_owned());
    Endpoint {
        addresses,
        conditions: Some(EndpointConditions {
            ready: Some(published || serving && !terminating),
            serving: Some(serving),
            terminating: Some(terminating),
        }),
        target_ref: Some(backends::reference(pod)),
        node_name: some(pod::node(pod)),
        zone: node.and_then(|node| node.label(ZONE)).and_then(some),
        hostname: backends::hostname(pod, service).cloned(),
        ..Endpoint::default()
    }
}
