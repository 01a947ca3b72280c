//! Extended resources backed by device classes (DRAExtendedResource).
//!
//! If a node does not provide such a resource by a device plugin, the pod's containers get devices instead.
//! They are allocated to one special claim for the whole pod, which is created at PreBind. Until then it is
//! kept in the state under a name that no API object can have.

use std::sync::Arc;

use k8s_openapi::api::core::v1::ContainerExtendedResourceRequest as Mapping;
use k8s_openapi::api::resource::v1 as resource;
use k8s_openapi::apimachinery::pkg::apis::meta::v1::{ObjectMeta, OwnerReference};

use super::Claim;
use crate::state::objects::{Objects, key};
use crate::state::pod::ContainerRequests;
use crate::state::{NodeInfo, PodInfo};

/// Annotation of a claim for extended resources.
const EXTENDED_RESOURCE_CLAIM_ANNOTATION: &str = "resource.kubernetes.io/extended-resource-claim";
const SPECIAL_CLAIM_NAME: &str = "<extended-resources>";

/// An extended resource and the name of its device class.
pub type ExtendedResource = (Arc<str>, String);

/// Returns the extended resources that a pod requests and that have a device class.
pub fn resources_with_device_class(pod: &PodInfo, objects: &Objects) -> Vec<ExtendedResource> {
    let requested = pod.requests.exact.scalar.iter().filter(|(_, amount)| *amount != 0);
    let class = |(name, _): &(Arc<str>, i64)| Some((name.clone(), objects.device_class_for(name)?));
    requested
        .filter_map(class)
        .map(|(name, class)| (name, class.metadata.name.clone().unwrap_or_default()))
        .collect()
}

/// Returns those that the node does not provide by a device plugin.
pub fn missing_on_node<'b>(resources: &'b [ExtendedResource], node: &NodeInfo) -> Vec<&'b ExtendedResource> {
    resources.iter().filter(|(name, _)| node.allocatable.scalar(name) == 0).collect()
}

/// Returns the claim that an earlier attempt created for the pod.
pub fn find_leftover_claim(pod: &PodInfo, objects: &Objects) -> Option<Claim> {
    let own = |claim: &&Claim| is_extended_claim_of(claim, pod) && !is_special_claim(claim);
    objects.resource_claims.values().find(own).cloned()
}

/// Whether a claim is for the extended resources of a pod.
pub fn is_extended_claim_of(claim: &resource::ResourceClaim, pod: &PodInfo) -> bool {
    owner(claim).is_some_and(|owner| owner.uid == *pod.uid && owner.name == *pod.name)
}

/// Whether a claim is not created in the API yet.
pub fn is_special_claim(claim: &resource::ResourceClaim) -> bool {
    claim.metadata.name.as_deref().is_some_and(|name| name.starts_with(SPECIAL_CLAIM_NAME))
}

/// Returns the key under which an allocated special claim was kept before it was created.
pub fn special_claim_key_of(claim: &resource::ResourceClaim) -> Option<String> {
    super::allocation(claim)?;
    let namespace = claim.metadata.namespace.as_deref().unwrap_or_default();
    Some(special_claim_key(namespace, &owner(claim)?.uid))
}

/// Returns the key of a pod's special claim before it is created.
pub fn special_claim_key(namespace: &str, uid: &str) -> String {
    key(namespace, &format!("{SPECIAL_CLAIM_NAME}{uid}"))
}

fn owner(claim: &resource::ResourceClaim) -> Option<&OwnerReference> {
    let annotations = claim.metadata.annotations.as_ref()?;
    annotations.get(EXTENDED_RESOURCE_CLAIM_ANNOTATION).filter(|value| *value == "true")?;
    claim.metadata.owner_references.iter().flatten().find(|owner| owner.controller == Some(true))
}

/// Builds the claim for the devices that replace extended resources, and the mapping of its requests to
/// containers.
pub fn new_extended_claim(pod: &PodInfo, missing: &[&ExtendedResource]) -> (Claim, Vec<Mapping>) {
    let (mut requests, mut mappings) = (Vec::new(), Vec::new());
    for (resource, class) in missing {
        let resource_requests = ResourceRequests::of(&pod.container_requests, resource);
        requests.extend(
            resource_requests.requests.into_iter().map(|(name, count)| exact_request(name, class, count)),
        );
        mappings.extend(resource_requests.mappings);
    }
    requests.sort_by(|a, b| a.name.cmp(&b.name));
    let metadata = ObjectMeta {
        name: Some(format!("{SPECIAL_CLAIM_NAME}{}", pod.uid)),
        namespace: Some(pod.namespace.to_string()),
        generate_name: Some(format!("{}-extended-resources-", pod.name)),
        annotations: Some([(EXTENDED_RESOURCE_CLAIM_ANNOTATION.to_owned(), "true".to_owned())].into()),
        owner_references: Some(vec![OwnerReference {
            api_version: "v1".to_owned(),
            kind: "Pod".to_owned(),
            name: pod.name.to_string(),
            uid: pod.uid.to_string(),
            controller: Some(true),
            block_owner_deletion: None,
        }]),
        ..ObjectMeta::default()
    };
    let devices = resource::DeviceClaim { requests: Some(requests), ..resource::DeviceClaim::default() };
    let spec = resource::ResourceClaimSpec { devices: Some(devices) };
    (Arc::new(resource::ResourceClaim { metadata, spec, status: None }), mappings)
}

fn exact_request(name: String, class: &str, count: i64) -> resource::DeviceRequest {
    let exactly = resource::ExactDeviceRequest {
        device_class_name: class.to_owned(),
        allocation_mode: Some("ExactCount".to_owned()),
        count: Some(count),
        ..resource::ExactDeviceRequest::default()
    };
    resource::DeviceRequest { name, exactly: Some(exactly), first_available: None }
}

/// The device requests of a pod's containers for one resource.
#[derive(Default)]
struct ResourceRequests {
    /// Request name and number of devices.
    requests: Vec<(String, i64)>,
    mappings: Vec<Mapping>,
}

impl ResourceRequests {
    fn of(containers: &[ContainerRequests], resource: &str) -> ResourceRequests {
        let mut resource_requests = ResourceRequests::default();
        // Regular containers and sidecars run at the same time: each has its own devices.
        let mut long_running: Vec<Option<(String, i64)>> = vec![None; containers.len()];
        for (index, container) in containers.iter().enumerate().filter(|(_, one)| !one.is_regular_init) {
            if let Some((name, count)) = container.request(index, resource) {
                resource_requests.mappings.push(mapping(container, resource, &name));
                resource_requests.requests.push((name.clone(), count));
                long_running[index] = Some((name, count));
            }
        }
        // Other init containers end before later containers start: they reuse the devices of later containers
        // and sidecars, and share one more request for what is missing.
        let mut init_request: Option<(String, i64)> = None;
        let mut sharing = Vec::new();
        for (index, container) in containers.iter().enumerate().filter(|(_, one)| one.is_regular_init) {
            let Some((name, mut missing)) = container.request(index, resource) else { continue };
            for (later, count) in long_running[index..].iter().flatten() {
                if missing > 0 {
                    sharing.push(mapping(container, resource, later));
                    missing -= count;
                }
            }
            if missing > 0 {
                // The name of the shared request is known after the last init container.
                sharing.push(mapping(container, resource, ""));
                if init_request.as_ref().is_none_or(|(_, max)| *max < missing) {
                    init_request = Some((name, missing));
                }
            }
        }
        if let Some((name, _)) = &init_request {
            for shared in sharing.iter_mut().filter(|shared| shared.request_name.is_empty()) {
                shared.request_name.clone_from(name);
            }
        }
        resource_requests.mappings.extend(sharing);
        resource_requests.requests.extend(init_request);
        resource_requests
    }
}

fn mapping(container: &ContainerRequests, resource: &str, request: &str) -> Mapping {
    Mapping {
        container_name: container.name.to_string(),
        resource_name: resource.to_owned(),
        request_name: request.to_owned(),
    }
}

impl ContainerRequests {
    /// Returns the request name of a container and the number of devices; `None` if it does not use the
    /// resource.
    fn request(&self, index: usize, resource: &str) -> Option<(String, i64)> {
        let place = self.requests.iter().position(|(name, _)| **name == *resource)?;
        let count = self.requests[place].1;
        (count > 0).then(|| (format!("container-{index}-request-{place}"), count))
    }
}
