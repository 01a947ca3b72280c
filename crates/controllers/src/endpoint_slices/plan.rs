//! Computes the slices of a Service. Does no I/O.

use std::collections::BTreeMap;
use std::sync::Arc;

use k8s_openapi::api::core::v1::{Node, Pod, Service, ServiceSpec};
use k8s_openapi::api::discovery::v1::{Endpoint, EndpointConditions, EndpointPort, EndpointSlice};
use k8s_openapi::apimachinery::pkg::apis::meta::v1::{ObjectMeta, OwnerReference};
use reconcile::Object;

use super::hints::{self, TrafficDistribution};
use super::pack::{
    EndpointGroup, MANAGED_BY, SERVICE_NAME, SliceChanges, add_placeholder_slice, pack, reuse_deleted_slices,
};
use crate::{backends, pod};

pub const MANAGER: &str = "endpointslice-controller.k8s.io";
const ZONE: &str = "topology.kubernetes.io/zone";
/// Upstream's default of `--max-endpoints-per-slice`.
const MAX_ENDPOINTS_PER_SLICE: usize = 100;

/// Everything the slices of a Service depend on.
pub struct ServiceSnapshot<'a> {
    pub service: &'a Service,
    pub spec: &'a ServiceSpec,
    pub pods: &'a [Arc<Pod>],
    /// The Service's slices that this controller manages.
    pub slices: &'a [Arc<EndpointSlice>],
    pub node: &'a (dyn Fn(&str) -> Option<Arc<Node>> + Sync),
    /// Each zone's share of the CPUs, if proportional hints are requested and possible.
    pub shares: Option<&'a BTreeMap<String, f64>>,
    /// Whether the Service's endpoints had proportional hints so far.
    pub had_hints: bool,
}

/// The changes and events of a sync.
#[derive(Debug, Default)]
pub struct Plan {
    pub changes: SliceChanges,
    /// Event messages about hints. They are warnings unless `has_hints`.
    pub events: Vec<String>,
    pub has_hints: bool,
}

pub fn plan(observed: &ServiceSnapshot<'_>) -> Plan {
    let mut result = Plan::default();
    let families = families(observed.spec);
    for slice in observed.slices.iter().filter(|slice| !families.contains(&slice.address_type.as_str())) {
        result.changes.delete.push(slice.clone());
    }
    for family in families {
        let slices: Vec<Arc<EndpointSlice>> =
            observed.slices.iter().filter(|slice| slice.address_type == family).cloned().collect();
        let blank = empty_slice(observed.service, observed.spec, family);
        let mut changes =
            pack(&blank, &slices, endpoint_groups(observed, family == "IPv6"), MAX_ENDPOINTS_PER_SLICE);
        add_placeholder_slice(&blank, &mut changes);
        update_hints(observed, family, &mut changes, &mut result);
        reuse_deleted_slices(&blank, &mut changes);
        result.changes.create.append(&mut changes.create);
        result.changes.update.append(&mut changes.update);
        result.changes.delete.append(&mut changes.delete);
        result.changes.keep.append(&mut changes.keep);
    }
    if observed.service.is_deleting() {
        // The garbage collector would delete them with the Service.
        result.changes.create.clear();
    }
    result
}

/// Updates the topology hints.
fn update_hints(observed: &ServiceSnapshot<'_>, family: &str, changes: &mut SliceChanges, result: &mut Plan) {
    let with_address_type = |text: &str| format!("{text}, addressType: {family}");
    match TrafficDistribution::of(observed.service) {
        TrafficDistribution::Proportional => match hints::allocate_by_zone(changes, observed.shares) {
            Ok(()) => {
                result.has_hints = true;
                if !observed.had_hints {
                    result.events.push(with_address_type("Topology Aware Hints has been enabled"));
                }
            }
            Err(reason) => {
                hints::remove_hints(changes);
                result.events.push(with_address_type(&reason));
            }
        },
        distribution => {
            if observed.had_hints {
                result.events.push(with_address_type("Topology Aware Hints has been disabled"));
            }
            match distribution {
                TrafficDistribution::PreferClose { node } => hints::add_close_hints(changes, node),
                _ => hints::remove_hints(changes),
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

/// An empty slice with the metadata of the Service.
fn empty_slice(service: &Service, spec: &ServiceSpec, family: &str) -> EndpointSlice {
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

/// The endpoints of a Service, grouped by ports.
fn endpoint_groups(observed: &ServiceSnapshot<'_>, v6: bool) -> Vec<EndpointGroup> {
    let mut groups = Vec::new();
    for pod in observed.pods.iter().filter(|pod| backends::should_be_endpoint(pod, true)) {
        let node = (observed.node)(pod::node(pod));
        let publish_not_ready = observed.spec.publish_not_ready_addresses == Some(true);
        let ports = ports(observed.spec, pod);
        // The group is kept without endpoints, too, because other pods may have these ports and an address.
        let mut group = EndpointGroup { ports, endpoints: Vec::new() };
        let addresses = backends::addresses(pod, v6);
        if !addresses.is_empty() && (node.is_some() || publish_not_ready) {
            group.endpoints.push(endpoint(
                observed.service,
                pod,
                node.as_deref(),
                addresses,
                publish_not_ready,
            ));
        }
        groups.push(group);
    }
    groups
}

fn ports(spec: &ServiceSpec, pod: &Pod) -> Vec<EndpointPort> {
    let ports = spec.ports.iter().flatten().filter_map(|port| {
        Some(EndpointPort {
            name: Some(port.name.clone().unwrap_or_default()),
            port: Some(backends::find_pod_port(pod, port)?),
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
    publish_not_ready: bool,
) -> Endpoint {
    let serving = pod::is_ready(pod);
    let terminating = pod.is_deleting();
    let some = |text: &str| (!text.is_empty()).then(|| text.to_owned());
    Endpoint {
        addresses,
        conditions: Some(EndpointConditions {
            ready: Some(publish_not_ready || serving && !terminating),
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
