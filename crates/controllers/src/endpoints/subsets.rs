//! The canonical form of the subsets of Endpoints. Does no I/O.

use std::collections::BTreeMap;

use k8s_openapi::api::core::v1::{EndpointAddress, EndpointPort, EndpointSubset};

type PortKey = (String, i32, String, Option<String>);
/// Keyed by IP and target UID: the address, and whether it is ready.
type Addresses = BTreeMap<(String, String), (EndpointAddress, bool)>;

/// Groups ports with the same addresses, each address once (upstream's `RepackSubsets`). An address that is
/// not ready in some subset is not ready for that port.
pub fn repack_subsets(subsets: &[EndpointSubset]) -> Vec<EndpointSubset> {
    let mut by_port: BTreeMap<Option<PortKey>, Addresses> = BTreeMap::new();
    for subset in subsets {
        let ports = subset.ports.as_deref().unwrap_or_default();
        let keys: Vec<Option<PortKey>> = match ports {
            [] => vec![None],
            ports => ports.iter().map(|port| Some(port_key(port))).collect(),
        };
        for key in keys {
            let known = by_port.entry(key).or_default();
            let ready = subset.addresses.iter().flatten().map(|address| (address, true));
            let not_ready = subset.not_ready_addresses.iter().flatten().map(|address| (address, false));
            for (address, ready) in ready.chain(not_ready) {
                let uid = address.target_ref.as_ref().and_then(|target| target.uid.clone());
                let entry = known.entry((address.ip.clone(), uid.unwrap_or_default()));
                entry.or_insert_with(|| (address.clone(), ready)).1 &= ready;
            }
        }
    }
    let mut packed: Vec<(Addresses, Vec<EndpointPort>)> = Vec::new();
    for (key, addresses) in by_port {
        let port = key.map(port_of);
        let states = |addresses: &Addresses| {
            addresses.iter().map(|(key, (_, ready))| (key.clone(), *ready)).collect::<Vec<_>>()
        };
        match packed.iter_mut().find(|(known, _)| states(known) == states(&addresses)) {
            Some((_, ports)) => ports.extend(port),
            None => packed.push((addresses, port.into_iter().collect())),
        }
    }
    packed.into_iter().map(subset).collect()
}

fn subset((addresses, ports): (Addresses, Vec<EndpointPort>)) -> EndpointSubset {
    let (ready, not_ready): (Vec<_>, Vec<_>) = addresses.into_values().partition(|(_, ready)| *ready);
    let some = |list: Vec<(EndpointAddress, bool)>| {
        (!list.is_empty()).then(|| list.into_iter().map(|(address, _)| address).collect())
    };
    EndpointSubset {
        addresses: some(ready),
        not_ready_addresses: some(not_ready),
        ports: (!ports.is_empty()).then_some(ports),
    }
}

fn port_key(port: &EndpointPort) -> PortKey {
    let text = |text: &Option<String>, default: &str| text.clone().unwrap_or_else(|| default.into());
    (text(&port.name, ""), port.port, text(&port.protocol, "TCP"), port.app_protocol.clone())
}

fn port_of((name, port, protocol, app_protocol): PortKey) -> EndpointPort {
    let name = (!name.is_empty()).then_some(name);
    EndpointPort { name, port, protocol: Some(protocol), app_protocol }
}

/// Limits the number of addresses, ready ones first. Returns whether addresses were removed.
pub fn truncate_addresses(subsets: &mut [EndpointSubset], max_addresses: usize) -> bool {
    let len = |addresses: &Option<Vec<EndpointAddress>>| addresses.as_ref().map_or(0, Vec::len);
    let ready: usize = subsets.iter().map(|subset| len(&subset.addresses)).sum();
    let not_ready: usize = subsets.iter().map(|subset| len(&subset.not_ready_addresses)).sum();
    if ready + not_ready <= max_addresses {
        return false;
    }
    let truncate_ready = ready > max_addresses;
    let (capacity, total) =
        if truncate_ready { (max_addresses, ready) } else { (max_addresses - ready, not_ready) };
    let mut left = capacity;
    for subset in subsets {
        if truncate_ready {
            subset.not_ready_addresses = None;
        }
        let addresses = if truncate_ready { &mut subset.addresses } else { &mut subset.not_ready_addresses };
        // Each subset keeps its proportional part, rounded up as long as the limit allows.
        let part = (len(addresses) * capacity).div_ceil(total).min(left);
        if let Some(list) = addresses {
            list.truncate(part);
            left -= list.len();
            if list.is_empty() {
                *addresses = None;
            }
        }
    }
    true
}
