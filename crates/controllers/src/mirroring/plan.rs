//! What the mirror of Endpoints looks like. Pure.

use std::collections::BTreeMap;
use std::net::IpAddr;
use std::sync::Arc;

use k8s_openapi::api::core::v1::{EndpointAddress, EndpointSubset, Endpoints, Service};
use k8s_openapi::api::discovery::v1::{Endpoint, EndpointConditions, EndpointPort, EndpointSlice};
use k8s_openapi::apimachinery::pkg::apis::meta::v1::{ObjectMeta, OwnerReference};
use reconcile::Object;

use crate::backends::TRIGGER_TIME;
use crate::endpoint_slices::pack::{Changes, Group, MANAGED_BY, SERVICE_NAME, pack, reuse};
use crate::endpoints::subsets::repack;

pub const MANAGER: &str = "endpointslicemirroring-controller.k8s.io";
/// How many addresses of a subset are mirrored at most.
const MOST: usize = 1000;
const SKIP: &str = "endpointslice.kubernetes.io/skip-mirror";
/// Annotations that say nothing about what is mirrored.
const NOT_MIRRORED: [&str; 2] = [TRIGGER_TIME, "kubectl.kubernetes.io/last-applied-configuration"];
const LEADER: &str = "control-plane.alpha.kubernetes.io/leader";

/// What has to happen, and the reasons and messages of events.
#[derive(Debug, Default)]
pub struct Plan {
    pub changes: Changes,
    pub told: Vec<(&'static str, String)>,
}

pub fn plan(endpoints: Option<&Endpoints>, service: Option<&Service>, slices: &[Arc<EndpointSlice>]) -> Plan {
    let unselected =
        service.is_some_and(|service| service.spec.as_ref().is_none_or(|spec| spec.selector.is_none()));
    let is_mirrored = |endpoints: &&Endpoints| {
        unselected && endpoints.label(SKIP) != Some("true") && endpoints.annotation(LEADER).is_none()
    };
    let mut plan = Plan::default();
    let Some(endpoints) = endpoints.filter(is_mirrored) else {
        plan.changes.delete = slices.to_vec();
        return plan;
    };
    let mut wanted = Wanted::default();
    for subset in repack(endpoints.subsets.as_deref().unwrap_or_default()) {
        wanted.add(&subset);
    }
    wanted.tell(&mut plan.told);
    for (family, groups) in [("IPv4", wanted.v4), ("IPv6", wanted.v6)] {
        let slices: Vec<Arc<EndpointSlice>> =
            slices.iter().filter(|slice| slice.address_type == family).cloned().collect();
        let blank = blank(endpoints, family);
        let mut changes = pack(&blank, &slices, groups, MOST);
        annotate(&mut changes, &blank);
        reuse(&blank, &mut changes);
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
struct Wanted {
    v4: Vec<Group>,
    v6: Vec<Group>,
    invalid: usize,
    skipped: usize,
}

impl Wanted {
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
                _ if v4.len() + v6.len() >= MOST => self.skipped += 1,
                Ok(ip) if ip.is_ipv4() => v4.push(endpoint(address, ip, ready)),
                Ok(ip) => v6.push(endpoint(address, ip, ready)),
                Err(_) => self.invalid += 1,
            }
        }
        for (groups, endpoints) in [(&mut self.v4, v4), (&mut self.v6, v6)] {
            if !endpoints.is_empty() {
                groups.push(Group { ports: ports.clone(), endpoints });
            }
        }
    }

    fn tell(&self, told: &mut Vec<(&'static str, String)>) {
        let Wanted { invalid, skipped, .. } = self;
        if *invalid > 0 {
            let message = format!("Skipped {invalid} invalid IP addresses when mirroring to EndpointSlices");
            told.push(("InvalidIPAddress", message));
        }
        if *skipped > 0 {
            let skipped = skipped + invalid;
            told.push((
                "TooManyAddressesToMirror",
                format!("A max of {MOST} addresses can be mirrored to EndpointSlices per Endpoints subset. {skipped} addresses were skipped"),
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

fn blank(endpoints: &Endpoints, family: &str) -> EndpointSlice {
    let mut labels = endpoints.metadata.labels.clone().unwrap_or_default();
    labels.insert(SERVICE_NAME.into(), endpoints.name().into());
    labels.insert(MANAGED_BY.into(), MANAGER.into());
    let annotations: BTreeMap<String, String> = endpoints
        .metadata
        .annotations
        .iter()
        .flatten()
        .filter(|(name, _)| !NOT_MIRRORED.contains(&name.as_str()))
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

/// The mirror has the annotations of what it mirrors.
fn annotate(changes: &mut Changes, blank: &EndpointSlice) {
    let wanted = &blank.metadata.annotations;
    let (keep, outdated): (Vec<_>, Vec<_>) = std::mem::take(&mut changes.keep)
        .into_iter()
        .partition(|slice| slice.metadata.annotations == *wanted);
    changes.keep = keep;
    changes.update.extend(outdated.iter().map(|slice| (**slice).clone()));
    for slice in &mut changes.update {
        slice.metadata.annotations = wanted.clone();
    }
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;
    use serde_json::json;

    use super::*;

    proptest! {
        /// However Endpoints change, carrying out the plan mirrors just their addresses and leaves nothing to do.
        #[test]
        fn mirrors_show_what_is_there(
            rounds in prop::collection::vec(prop::collection::btree_set(0..30u8, 0..30), 1..4),
            mirrored in any::<bool>(),
        ) {
            let service: Service = serde_json::from_value(json!({"metadata": {"name": "s"}, "spec": {}})).expect("a service");
            let mut slices: Vec<Arc<EndpointSlice>> = Vec::new();
            let mut made = 0;
            for addresses in rounds {
                let addresses: Vec<_> = addresses.iter().map(|last| json!({"ip": format!("10.0.0.{last}")})).collect();
                let subsets = json!([{"addresses": addresses, "ports": [{"port": 80}]}]);
                let skip = (!mirrored).to_string();
                let metadata = json!({"name": "s", "namespace": "ns", "uid": "u", "labels": {SKIP: skip}});
                let endpoints: Endpoints = serde_json::from_value(json!({"metadata": metadata, "subsets": subsets})).expect("endpoints");
                let changes = plan(Some(&endpoints), Some(&service), &slices).changes;
                slices.retain(|slice| changes.keep.iter().any(|kept| kept.name() == slice.name()));
                slices.extend(changes.update.into_iter().map(Arc::new));
                for mut slice in changes.create {
                    made += 1;
                    slice.metadata.name = Some(format!("s-{made}"));
                    slices.push(Arc::new(slice));
                }
                let shown: Vec<String> = slices
                    .iter()
                    .flat_map(|slice| slice.endpoints.iter().flatten())
                    .flat_map(|endpoint| endpoint.addresses.clone())
                    .collect();
                let wanted = if mirrored { addresses.len() } else { 0 };
                prop_assert_eq!(shown.len(), wanted);
                let again = plan(Some(&endpoints), Some(&service), &slices).changes;
                prop_assert!(again.create.is_empty() && again.update.is_empty() && again.delete.is_empty());
            }
        }
    }
}
