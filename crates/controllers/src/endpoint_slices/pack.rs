//! Distributes endpoints over slices with as few writes as possible. Does no I/O.

use std::collections::BTreeMap;
use std::sync::Arc;

use k8s_openapi::api::discovery::v1::{Endpoint, EndpointPort, EndpointSlice};
use reconcile::Object;

pub const SERVICE_NAME: &str = "kubernetes.io/service-name";
pub const MANAGED_BY: &str = "endpointslice.kubernetes.io/managed-by";

/// Labels that are not copied from the Service.
const RESERVED: [&str; 3] = [SERVICE_NAME, MANAGED_BY, crate::backends::HEADLESS];

/// The changes to the slices of one Service and address type.
#[derive(Debug, Default, PartialEq)]
pub struct SliceChanges {
    pub create: Vec<EndpointSlice>,
    pub update: Vec<EndpointSlice>,
    pub delete: Vec<Arc<EndpointSlice>>,
    pub keep: Vec<Arc<EndpointSlice>>,
}

/// Endpoints with the same ports.
#[derive(Clone, Debug, Default)]
pub struct EndpointGroup {
    pub ports: Vec<EndpointPort>,
    pub endpoints: Vec<Endpoint>,
}

/// Identifies an endpoint across state changes.
type Identity = (Vec<String>, String, String, String);

fn identity(endpoint: &Endpoint) -> Identity {
    let mut addresses = endpoint.addresses.clone();
    addresses.sort();
    let target = endpoint.target_ref.clone().unwrap_or_default();
    (
        addresses,
        endpoint.hostname.clone().unwrap_or_default(),
        target.namespace.unwrap_or_default(),
        target.name.unwrap_or_default(),
    )
}

/// Whether two endpoints are equal apart from hints, which are handled separately.
fn is_unchanged(a: &Endpoint, b: &Endpoint) -> bool {
    let uid = |endpoint: &Endpoint| endpoint.target_ref.as_ref().and_then(|target| target.uid.clone());
    a.node_name == b.node_name && a.zone == b.zone && a.conditions == b.conditions && uid(a) == uid(b)
}

/// The key by which endpoints are grouped.
pub fn port_key(ports: &[EndpointPort]) -> Vec<(String, i32, String, String)> {
    let mut key: Vec<_> = ports
        .iter()
        .map(|port| {
            let text = |text: &Option<String>| text.clone().unwrap_or_default();
            (text(&port.name), port.port.unwrap_or(-1), text(&port.protocol), text(&port.app_protocol))
        })
        .collect();
    key.sort();
    key
}

fn is_owned(slice: &EndpointSlice, blank: &EndpointSlice) -> bool {
    let owner = |slice: &EndpointSlice| slice.controller().map(|owner| owner.uid.clone());
    owner(slice).is_some() && owner(slice) == owner(blank)
}

fn own_labels(slice: &EndpointSlice) -> BTreeMap<&String, &String> {
    let labels = slice.metadata.labels.iter().flatten();
    labels.filter(|(name, _)| !RESERVED.contains(&name.as_str())).collect()
}

fn endpoint_count(slice: &EndpointSlice) -> usize {
    slice.endpoints.as_deref().unwrap_or_default().len()
}

/// Distributes `groups` over slices of at most `max_endpoints` endpoints. `blank` is an empty slice with
/// the metadata of the Service; `existing` are the current slices.
pub fn pack(
    blank: &EndpointSlice,
    existing: &[Arc<EndpointSlice>],
    groups: Vec<EndpointGroup>,
    max_endpoints: usize,
) -> SliceChanges {
    let (owned, mut delete): (Vec<_>, Vec<_>) =
        existing.iter().cloned().partition(|slice| is_owned(slice, blank));
    let mut by_ports: BTreeMap<_, Vec<Arc<EndpointSlice>>> = BTreeMap::new();
    for slice in owned {
        by_ports.entry(port_key(slice.ports.as_deref().unwrap_or_default())).or_default().push(slice);
    }
    let mut merged: BTreeMap<_, EndpointGroup> = BTreeMap::new();
    for group in groups {
        let known = merged.entry(port_key(&group.ports)).or_insert_with(EndpointGroup::default);
        known.ports = group.ports;
        known.endpoints.extend(group.endpoints);
    }
    let mut changes = SliceChanges::default();
    for (key, group) in merged {
        let slices = by_ports.remove(&key).unwrap_or_default();
        pack_group(blank, slices, group, max_endpoints, &mut changes);
    }
    delete.extend(by_ports.into_values().flatten());
    changes.delete.extend(delete);
    changes
}

fn pack_group(
    blank: &EndpointSlice,
    slices: Vec<Arc<EndpointSlice>>,
    group: EndpointGroup,
    max_endpoints: usize,
    changes: &mut SliceChanges,
) {
    let mut missing: BTreeMap<Identity, Endpoint> =
        group.endpoints.into_iter().map(|endpoint| (identity(&endpoint), endpoint)).collect();
    let (mut update, mut keep) = (Vec::new(), Vec::new());
    for slice in slices {
        let found = slice.endpoints.as_deref().unwrap_or_default();
        let mut differs = false;
        let mut endpoints = Vec::new();
        for endpoint in found {
            if let Some(desired) = missing.remove(&identity(endpoint)) {
                differs |= !is_unchanged(&desired, endpoint);
                endpoints.push(desired);
            }
        }
        let labels_changed = own_labels(&slice) != own_labels(blank);
        if differs || endpoints.len() != found.len() {
            if endpoints.is_empty() {
                changes.delete.push(slice);
            } else {
                update.push(changed(&slice, blank, endpoints));
            }
        } else if labels_changed {
            update.push(changed(&slice, blank, found.to_vec()));
        } else {
            keep.push(slice);
        }
    }
    // Slices that are updated anyway are filled first, the fullest one before the others.
    update.sort_by_key(|slice| std::cmp::Reverse(endpoint_count(slice)));
    for slice in &mut update {
        fill(slice, &mut missing, max_endpoints);
    }
    while !missing.is_empty() {
        let best = best_fit(&keep, missing.len(), max_endpoints);
        let mut slice = match best {
            Some(i) => {
                let slice = keep.remove(i);
                changed(&slice, blank, slice.endpoints.clone().unwrap_or_default())
            }
            None => EndpointSlice { ports: Some(group.ports.clone()), ..blank.clone() },
        };
        fill(&mut slice, &mut missing, max_endpoints);
        match best {
            Some(_) => update.push(slice),
            None => changes.create.push(slice),
        }
    }
    changes.update.append(&mut update);
    changes.keep.append(&mut keep);
}

fn changed(slice: &EndpointSlice, blank: &EndpointSlice, endpoints: Vec<Endpoint>) -> EndpointSlice {
    let mut slice = slice.clone();
    slice.metadata.labels = blank.metadata.labels.clone();
    slice.endpoints = Some(endpoints);
    slice
}

fn fill(slice: &mut EndpointSlice, missing: &mut BTreeMap<Identity, Endpoint>, max_endpoints: usize) {
    let endpoints = slice.endpoints.get_or_insert_default();
    while endpoints.len() < max_endpoints {
        let Some((_, endpoint)) = missing.pop_first() else { return };
        endpoints.push(endpoint);
    }
}

/// The index of the slice that is fullest after `more` endpoints are added.
fn best_fit(slices: &[Arc<EndpointSlice>], more: usize, max_endpoints: usize) -> Option<usize> {
    let remaining = |slice: &Arc<EndpointSlice>| max_endpoints.checked_sub(more + endpoint_count(slice));
    let candidates = slices.iter().enumerate().filter_map(|(i, slice)| Some((remaining(slice)?, i)));
    if more >= max_endpoints { None } else { candidates.min().map(|(_, i)| i) }
}

/// Adds an empty placeholder slice if a Service has no endpoints.
pub fn add_placeholder_slice(blank: &EndpointSlice, changes: &mut SliceChanges) {
    if !(changes.keep.is_empty() && changes.update.is_empty() && changes.create.is_empty()) {
        return;
    }
    let empty = EndpointSlice { ports: Some(Vec::new()), endpoints: Some(Vec::new()), ..blank.clone() };
    let is_empty = |slice: &EndpointSlice| {
        is_owned(slice, blank)
            && endpoint_count(slice) == 0
            && slice.ports.as_deref().unwrap_or_default().is_empty()
            && slice.metadata.labels == blank.metadata.labels
    };
    match changes.delete.as_slice() {
        [only] if is_empty(only) => changes.keep.push(changes.delete.remove(0)),
        _ => changes.create.push(empty),
    }
}

/// Turns pairs of a created and a deleted slice into updates.
pub fn reuse_deleted_slices(blank: &EndpointSlice, changes: &mut SliceChanges) {
    let mut left = Vec::new();
    for slice in std::mem::take(&mut changes.delete) {
        let reusable = is_owned(&slice, blank) && slice.address_type == blank.address_type;
        match changes.create.pop_if(|_| reusable) {
            Some(mut new) => {
                new.metadata.name = slice.metadata.name.clone();
                new.metadata.resource_version = slice.metadata.resource_version.clone();
                new.metadata.generate_name = None;
                changes.update.push(new);
            }
            None => left.push(slice),
        }
    }
    changes.delete = left;
}
