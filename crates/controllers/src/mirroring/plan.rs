//! Computes the mirrored EndpointSlices. Does no I/O.

use std::collections::BTreeMap;
use std::net::IpAddr;
use std::sync::Arc;

use k8s_openapi::api::core::v1::{EndpointAddress, EndpointSubset, Endpoints, Service};
use k8s_openapi::api::discovery::v1::{Endpoint, EndpointConditions, EndpointPort, EndpointSlice};
use k8s_openapi::apimachinery::pkg::apis::meta::v1::{ObjectMeta, OwnerReference};
use reconcile::Object;

use crate::backends::TRIGGER_TIME;
use crate::endpoint_slices::pack::{
    EndpointGroup, MANAGED_BY, SERVICE_NAME, SliceChanges, pack, reuse_deleted_slices,
};
use crate::endpoints::subsets::repack_subsets;

pub const MANAGER: &str = "endpointslicemirroring-controller.k8s.io";
/// The maximum number of addresses per subset that are mirrored.
const MAX_ADDRESSES_PER_SUBSET: usize = 1000;
const SKIP_MIRROR: &str = "endpointslice.kubernetes.io/skip-mirror";
/// Annotations that are not mirrored.
const SKIPPED_ANNOTATIONS: [&str; 2] = [TRIGGER_TIME, "kubectl.kubernetes.io/last-applied-configuration"];
const LEADER: &str = "control-plane.alpha.kubernetes.io/leader";

/// The changes to slices, and reasons and messages of events.
#[derive(Debug, Default)]
pub struct Plan {
    pub changes: SliceChanges,
    pub events: Vec<(&'static str, String)>,
}

pub fn plan(endpoints: Option<&Endpoints>, service: Option<&Service>, slices: &[Arc<EndpointSlice>]) -> Plan {
    let has_no_selector =
        service.is_some_and(|service| service.spec.as_ref().is_none_or(|spec| spec.selector.is_none()));
    let should_mirror = |endpoints: &&Endpoints| {
        has_no_selector
            && endpoints.label(SKIP_MIRROR) != Some("true")
            && endpoints.annotation(LEADER).is_none()
    };
    let mut plan = Plan::default();
    let Some(endpoints) = endpoints.filter(should_mirror) else {
        plan.changes.delete = slices.to_vec();
        return plan;
    };
    let mut desired = DesiredEndpoints::default();
    for subset in repack_subsets(endpoints.subsets.as_deref().unwrap_or_default()) {
        desired.add(&subset);
    }
    desired.add_events(&mut plan.events);
    for (family, groups) in [("IPv4", desired.v4), ("IPv6", desired.v6)] {
        let slices: Vec<Arc<EndpointSlice>> =
            slices.iter().filter(|slice| slice.address_type == family).cloned().collect();
        let blank = empty_slice(endpoints, family);
        let mut changes = pack(&blank, &slices, groups, MAX_ADDRESSES_PER_SUBSET);
        copy_annotations(&mut changes, &blank);
        reuse_deleted_slices(&blank, &mut changes);
        plan.changes.create.append(&mut changes.create);
        plan.changes.update.append(&mut changes.update);
        plan.changes.delete.append(&mut changes.delete);
        plan.changes.keep.append(&mut changes.keep);
    }
    if endpoints.is_deleting() {
        plan.changes.create.clear();
    }
    plan
}

#[derive(Default)]
struct DesiredEndpoints {
    v4: Vec<EndpointGroup>,
    v6: Vec<EndpointGroup>,
    invalid: usize,
    skipped: usize,
}

impl DesiredEndpoints {
    fn add(&mut self, subset: &EndpointSubset) {
        let ports: Vec<EndpointPort> = subset
            .ports
            .iter()
            .flatten()
            .map(|port| EndpointPort {
                name: Some(port.name.clone().unwrap_or_default()),
                port: Some(port.port),
                protocol: Some(port.protocol.clone().unwrap_or_else(|| "TCP".into())),
                app_protocol: port.app_protocol.clone(),
            })
            .collect();
        let (mut v4, mut v6) = (Vec::new(), Vec::new());
        let ready = subset.addresses.iter().flatten().map(|address| (address, true));
        let not_ready = subset.not_ready_addresses.iter().flatten().map(|address| (address, false));
        for (address, ready) in ready.chain(not_ready) {
            match address.ip.parse::<IpAddr>() {
                _ if v4.len() + v6.len() >= MAX_ADDRESSES_PER_SUBSET => self.skipped += 1,
                Ok(ip) if ip.is_ipv4() => v4.push(endpoint(address, ip, ready)),
                Ok(ip) => v6.push(endpoint(address, ip, ready)),
                Err(_) => self.invalid += 1,
            }
        }
        for (groups, endpoints) in [(&mut self.v4, v4), (&mut self.v6, v6)] {
            if !endpoints.is_empty() {
                groups.push(EndpointGroup { ports: ports.clone(), endpoints });
            }
        }
    }

    fn add_events(&self, events: &mut Vec<(&'static str, String)>) {
        let DesiredEndpoints { invalid, skipped, .. } = self;
        if *invalid > 0 {
            let message = format!("Skipped {invalid} invalid IP addresses when mirroring to EndpointSlices");
            events.push(("InvalidIPAddress", message));
        }
        if *skipped > 0 {
            let skipped = skipped + invalid;
            events.push((
                "TooManyAddressesToMirror",
                format!("A max of {MAX_ADDRESSES_PER_SUBSET} addresses can be mirrored to EndpointSlices per Endpoints subset. {skipped} addresses were skipped"),
            ));
        }
    }
}

fn endpoint(address: &EndpointAddress, ip: IpAddr, ready: bool) -> Endpoint {
    Endpoint {
        addresses: vec![ip.to_string()],
        conditions: Some(EndpointConditions { ready: Some(ready), ..EndpointConditions::default() }),
        target_ref: address.target_ref.clone(),
        node_name: address.node_name.clone(),
        hostname: address.hostname.clone().filter(|name| !name.is_empty()),
        ..Endpoint::default()
    }
}

fn empty_slice(endpoints: &Endpoints, family: &str) -> EndpointSlice {
    let mut labels = endpoints.metadata.labels.clone().unwrap_or_default();
    labels.insert(SERVICE_NAME.into(), endpoints.name().into());
    labels.insert(MANAGED_BY.into(), MANAGER.into());
    let annotations: BTreeMap<String, String> = endpoints
        .metadata
        .annotations
        .iter()
        .flatten()
        .filter(|(name, _)| !SKIPPED_ANNOTATIONS.contains(&name.as_str()))
        .map(|(name, value)| (name.clone(), value.clone()))
        .collect();
    let owner = OwnerReference {
        api_version: "v1".into(),
        kind: "Endpoints".into(),
        name: endpoints.name().into(),
        uid: endpoints.uid().into(),
        controller: Some(true),
        block_owner_deletion: Some(true),
    };
    EndpointSlice {
        metadata: ObjectMeta {
            generate_name: Some(format!("{}-", endpoints.name())),
            namespace: Some(endpoints.namespace().into()),
            labels: Some(labels),
            annotations: (!annotations.is_empty()).then_some(annotations),
            owner_references: Some(vec![owner]),
            ..ObjectMeta::default()
        },
        address_type: family.into(),
        endpoints: Some(Vec::new()),
        ports: None,
    }
}

/// Copies the annotations of the Endpoints to the slices.
fn copy_annotations(changes: &mut SliceChanges, blank: &EndpointSlice) {
    let desired = &blank.metadata.annotations;
    let (keep, changed): (Vec<_>, Vec<_>) = std::mem::take(&mut changes.keep)
        .into_iter()
        .partition(|slice| slice.metadata.annotations == *desired);
    changes.keep = keep;
    changes.update.extend(changed.iter().map(|slice| (**slice).clone()));
    for slice in &mut changes.update {
        slice.metadata.annotations = desired.clone();
    }
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;
    use serde_json::json;

    use super::*;

    proptest! {
        /// For any sequence of changes, applying the plan mirrors exactly the addresses, and the plan is
        /// idempotent.
        #[test]
        fn slices_mirror_endpoints_exactly(
            rounds in prop::collection::vec(prop::collection::btree_set(0..30u8, 0..30), 1..4),
            enabled in any::<bool>(),
        ) {
            let service: Service = serde_json::from_value(json!({"metadata": {"name": "s"}, "spec": {}})).expect("a service");
            let mut slices: Vec<Arc<EndpointSlice>> = Vec::new();
            let mut created_count = 0;
            for addresses in rounds {
                let addresses: Vec<_> = addresses.iter().map(|last| json!({"ip": format!("10.0.0.{last}")})).collect();
                let subsets = json!([{"addresses": addresses, "ports": [{"port": 80}]}]);
                let skip = (!enabled).to_string();
                let metadata = json!({"name": "s", "namespace": "ns", "uid": "u", "labels": {SKIP_MIRROR: skip}});
                let endpoints: Endpoints = serde_json::from_value(json!({"metadata": metadata, "subsets": subsets})).expect("endpoints");
                let changes = plan(Some(&endpoints), Some(&service), &slices).changes;
                slices.retain(|slice| changes.keep.iter().any(|unchanged| unchanged.name() == slice.name()));
                slices.extend(changes.update.into_iter().map(Arc::new));
                for mut slice in changes.create {
                    created_count += 1;
                    slice.metadata.name = Some(format!("s-{created_count}"));
                    slices.push(Arc::new(slice));
                }
                let addresses_in_slices: Vec<String> = slices
                    .iter()
                    .flat_map(|slice| slice.endpoints.iter().flatten())
                    .flat_map(|endpoint| endpoint.addresses.clone())
                    .collect();
                let desired = if enabled { addresses.len() } else { 0 };
                prop_assert_eq!(addresses_in_slices.len(), desired);
                let again = plan(Some(&endpoints), Some(&service), &slices).changes;
                prop_assert!(again.create.is_empty() && again.update.is_empty() && again.delete.is_empty());
            }
        }
    }
}
