//! Selects the endpoints of a Service port that this node may use. Counterpart: `CategorizeEndpoints`
//! in `pkg/proxy/topology.go`.

use std::collections::BTreeMap;
use std::net::{IpAddr, SocketAddr};
use std::sync::Arc;

use k8s_openapi::api::discovery::v1::{Endpoint, EndpointSlice, ForNode, ForZone};
use nft::{IpFamily, Proto};

use super::NodeTopology;
use super::service::protocol;

/// An endpoint from the perspective of this node.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct Backend<'a> {
    pub to: SocketAddr,
    pub is_local: bool,
    pub is_ready: bool,
    /// The endpoint responds. It may be terminating.
    pub is_serving: bool,
    pub is_terminating: bool,
    endpoint: &'a Endpoint,
}

/// The usable endpoints by traffic policy. If none is ready, those that are serving while they
/// terminate.
#[derive(Debug, Default)]
pub struct UsableEndpoints {
    /// For traffic policy Cluster.
    pub cluster: Vec<SocketAddr>,
    /// For traffic policy Local.
    pub local: Vec<SocketAddr>,
    /// The endpoints in either list that are on this node.
    pub local_in_use: Vec<SocketAddr>,
    /// There is a usable endpoint anywhere, not necessarily for this node.
    pub has_any: bool,
}

/// The traffic policies that a Service port needs endpoints for.
#[derive(Clone, Copy, Debug)]
pub struct TrafficScopes {
    pub cluster: bool,
    pub local: bool,
}

/// The unique endpoints of a port, sorted by address.
pub fn backends<'a>(
    slices: &'a [Arc<EndpointSlice>],
    ip: IpFamily,
    port_name: &str,
    proto: Proto,
    topology: &NodeTopology,
) -> Vec<Backend<'a>> {
    let family = if ip == IpFamily::V4 { "IPv4" } else { "IPv6" };
    let mut found: BTreeMap<SocketAddr, Backend<'a>> = BTreeMap::new();
    for slice in slices.iter().filter(|slice| slice.address_type == family) {
        let port = slice.ports.iter().flatten().find(|port| {
            port.name.as_deref().unwrap_or_default() == port_name && protocol(&port.protocol) == Some(proto)
        });
        let Some(port) = port.and_then(|port| u16::try_from(port.port?).ok()) else { continue };
        for endpoint in slice.endpoints.iter().flatten() {
            let address = endpoint.addresses.first().and_then(|text| text.parse::<IpAddr>().ok());
            let Some(address) = address.filter(|address| IpFamily::of(*address) == ip) else { continue };
            let backend = backend(endpoint, SocketAddr::new(address, port), topology);
            // An endpoint may be in two slices while it is moved between them. A ready entry takes
            // precedence.
            let known = found.get(&backend.to).is_some_and(|known| known.is_ready);
            if !known {
                found.insert(backend.to, backend);
            }
        }
    }
    found.into_values().collect()
}

fn backend<'a>(endpoint: &'a Endpoint, to: SocketAddr, topology: &NodeTopology) -> Backend<'a> {
    let conditions = endpoint.conditions.as_ref();
    let ready = conditions.and_then(|conditions| conditions.ready);
    Backend {
        to,
        is_local: endpoint.node_name.as_deref() == Some(&topology.node),
        is_ready: ready.unwrap_or(true),
        is_serving: conditions.and_then(|conditions| conditions.serving).unwrap_or(true),
        is_terminating: conditions.and_then(|conditions| conditions.terminating).unwrap_or(false),
        endpoint,
    }
}

impl Backend<'_> {
    fn is_serving_terminating(&self) -> bool {
        !self.is_ready && self.is_serving && self.is_terminating
    }

    fn zones(&self) -> &[ForZone] {
        let hints = self.endpoint.hints.as_ref().and_then(|hints| hints.for_zones.as_deref());
        hints.unwrap_or_default()
    }

    fn nodes(&self) -> &[ForNode] {
        let hints = self.endpoint.hints.as_ref().and_then(|hints| hints.for_nodes.as_deref());
        hints.unwrap_or_default()
    }

    fn is_for_node(&self, node: &str) -> bool {
        self.nodes().iter().any(|hint| hint.name == node)
    }

    fn is_for_zone(&self, zone: &str) -> bool {
        self.zones().iter().any(|hint| hint.name == zone)
    }
}

pub fn usable(backends: &[Backend<'_>], scopes: TrafficScopes, topology: &NodeTopology) -> UsableEndpoints {
    let mut usable = UsableEndpoints {
        has_any: backends.iter().any(|one| one.is_ready || one.is_serving_terminating()),
        ..UsableEndpoints::default()
    };
    let addresses = |filter: &dyn Fn(&Backend<'_>) -> bool| -> Vec<SocketAddr> {
        backends.iter().filter(|one| filter(one)).map(|one| one.to).collect()
    };
    if scopes.cluster {
        usable.cluster = addresses(&by_topology(backends, topology));
        if usable.cluster.is_empty() {
            usable.cluster = addresses(&|one| one.is_serving_terminating());
        }
    }
    if scopes.local {
        usable.local = addresses(&|one| one.is_local && one.is_ready);
        if usable.local.is_empty() {
            usable.local = addresses(&|one| one.is_local && one.is_serving_terminating());
        }
    }
    let is_in_use = |to: &SocketAddr| usable.cluster.contains(to) || usable.local.contains(to);
    let here = backends.iter().filter(|one| one.is_local && is_in_use(&one.to));
    usable.local_in_use = here.map(|one| one.to).collect();
    usable
}

/// The ready endpoints with a hint for this node, else those with a hint for its zone, else all. Hints
/// are ignored unless every ready endpoint has one and at least one matches, because traffic would be
/// lost otherwise.
fn by_topology<'a>(
    backends: &'a [Backend<'a>],
    topology: &'a NodeTopology,
) -> Box<dyn Fn(&Backend<'_>) -> bool + 'a> {
    let ready = || backends.iter().filter(|one| one.is_ready);
    let all_for_nodes = ready().all(|one| !one.nodes().is_empty());
    if all_for_nodes && ready().any(|one| one.is_for_node(&topology.node)) {
        return Box::new(|one| one.is_ready && one.is_for_node(&topology.node));
    }
    if ready().all(|one| !one.zones().is_empty()) && ready().any(|one| one.is_for_zone(&topology.zone)) {
        return Box::new(|one| one.is_ready && one.is_for_zone(&topology.zone));
    }
    Box::new(|one| one.is_ready)
}
