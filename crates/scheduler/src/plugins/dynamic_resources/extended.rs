//! Extended resources that device classes stand for.
//!
//! Where a node does not have such a resource itself, a pod's containers get devices for it. They are allocated to one
//! claim for the whole pod, which is made when the pod is bound; until then it is known by a name no object can have.

use std::sync::Arc;

use k8s_openapi::api::core::v1::ContainerExtendedResourceRequest as Mapping;
use k8s_openapi::api::resource::v1 as resource;
use k8s_openapi::apimachinery::pkg::apis::meta::v1::{ObjectMeta, OwnerReference};

use super::Claim;
use crate::state::objects::{Objects, key};
use crate::state::pod::Asking;
use crate::state::{NodeInfo, PodInfo};

/// Says that a claim is for extended resources.
const ANNOTATION: &str = "resource.kubernetes.io/extended-resource-claim";
const UNNAMED: &str = "<extended-resources>";

/// A resource and the class that stands for it.
pub type Backed = (Arc<str>, String);

/// The resources a pod asks for that classes stand for.
pub fn backed(pod: &PodInfo, objects: &Objects) -> Vec<Backed> {
    let asked = pod.requests.exact.scalar.iter().filter(|(_, amount)| *amount != 0);
    let class = |(name, _): &(Arc<str>, i64)| Some((name.clone(), objects.class_for(name)?));
    asked
        .filter_map(class)
        .map(|(name, class)| (name, class.metadata.name.clone().unwrap_or_default()))
        .collect()
}

/// Those that a node does not have itself.
pub fn lacking<'b>(backed: &'b [Backed], node: &NodeInfo) -> Vec<&'b Backed> {
    backed.iter().filter(|(name, _)| node.allocatable.scalar(name) == 0).collect()
}

/// The claim that was made for a pod when it was tried before.
pub fn left_over(pod: &PodInfo, objects: &Objects) -> Option<Claim> {
    let own = |claim: &&Claim| is_of(claim, pod) && !is_unnamed(claim);
    objects.resource_claims.values().find(own).cloned()
}

/// Whether a claim is for the extended resources of a pod.
pub fn is_of(claim: &resource::ResourceClaim, pod: &PodInfo) -> bool {
    owner(claim).is_some_and(|owner| owner.uid == *pod.uid && owner.name == *pod.name)
}

/// Whether a claim is not made yet.
pub fn is_unnamed(claim: &resource::ResourceClaim) -> bool {
    claim.metadata.name.as_deref().is_some_and(|name| name.starts_with(UNNAMED))
}

/// What a claim that was made and allocated was known by before.
pub fn known_by(claim: &resource::ResourceClaim) -> Option<String> {
    super::allocation(claim)?;
    let namespace = claim.metadata.namespace.as_deref().unwrap_or_default();
    Some(unnamed_key(namespace, &owner(claim)?.uid))
}

/// What the claim of a pod is known by before it is made.
pub fn unnamed_key(namespace: &str, uid: &str) -> String {
    key(namespace, &format!("{UNNAMED}{uid}"))
}

fn owner(claim: &resource::ResourceClaim) -> Option<&OwnerReference> {
    let annotations = claim.metadata.annotations.as_ref()?;
    annotations.get(ANNOTATION).filter(|value| *value == "true")?;
    claim.metadata.owner_references.iter().flatten().find(|owner| owner.controller == Some(true))
}

/// A claim for devices in place of resources, and which request is for which container.
pub fn claim(pod: &PodInfo, wanted: &[&Backed]) -> (Claim, Vec<Mapping>) {
    let (mut requests, mut mappings) = (Vec::new(), Vec::new());
    for (resource, class) in wanted {
        let asked = Asked::of(&pod.asking, resource);
        requests.extend(asked.requests.into_iter().map(|(name, count)| exactly(name, class, count)));
        mappings.extend(asked.mappings);
    }
    requests.sort_by(|a, b| a.name.cmp(&b.name));
    let metadata = ObjectMeta {
        name: Some(format!("{UNNAMED}{}", pod.uid)),
        namespace: Some(pod.namespace.to_string()),
        generate_name: Some(format!("{}-extended-resources-", pod.name)),
        annotations: Some([(ANNOTATION.to_owned(), "true".to_owned())].into()),
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

fn exactly(name: String, class: &str, count: i64) -> resource::DeviceRequest {
    let exactly = resource::ExactDeviceRequest {
        device_class_name: class.to_owned(),
        allocation_mode: Some("ExactCount".to_owned()),
        count: Some(count),
        ..resource::ExactDeviceRequest::default()
    };
    resource::DeviceRequest { name, exactly: Some(exactly), first_available: None }
}

/// What a pod's containers need of one resource.
#[derive(Default)]
struct Asked {
    /// Names and how many devices.
    requests: Vec<(String, i64)>,
    mappings: Vec<Mapping>,
}

impl Asked {
    fn of(containers: &[Asking], resource: &str) -> Asked {
        let mut asked = Asked::default();
        // Those that run till the end have devices of their own.
        let mut lasting: Vec<Option<(String, i64)>> = vec![None; containers.len()];
        for (index, container) in containers.iter().enumerate().filter(|(_, one)| !one.brief) {
            if let Some((name, count)) = container.request(index, resource) {
                asked.mappings.push(mapping(container, resource, &name));
                asked.requests.push((name.clone(), count));
                lasting[index] = Some((name, count));
            }
        }
        // Those that end before have the devices of those that begin after them, and share what they need beyond.
        let mut more: Option<(String, i64)> = None;
        let mut sharing = Vec::new();
        for (index, container) in containers.iter().enumerate().filter(|(_, one)| one.brief) {
            let Some((name, mut missing)) = container.request(index, resource) else { continue };
            for (later, count) in lasting[index..].iter().flatten() {
                if missing > 0 {
                    sharing.push(mapping(container, resource, later));
                    missing -= count;
                }
            }
            if missing > 0 {
                // What it is called is known when all have been asked.
                sharing.push(mapping(container, resource, ""));
                if more.as_ref().is_none_or(|(_, most)| *most < missing) {
                    more = Some((name, missing));
                }
            }
        }
        if let Some((name, _)) = &more {
            for shared in sharing.iter_mut().filter(|shared| shared.request_name.is_empty()) {
                shared.request_name.clone_from(name);
            }
        }
        asked.mappings.extend(sharing);
        asked.requests.extend(more);
        asked
    }
}

fn mapping(container: &Asking, resource: &str, request: &str) -> Mapping {
    Mapping {
        container_name: container.name.to_string(),
        resource_name: resource.to_owned(),
        request_name: request.to_owned(),
    }
}

impl Asking {
    /// What a request of a container is called, and how many it needs.
    fn request(&self, index: usize, resource: &str) -> Option<(String, i64)> {
        let place = self.requests.iter().position(|(name, _)| **name == *resource)?;
        let count = self.requests[place].1;
        (count > 0).then(|| (format!("container-{index}-request-{place}"), count))
    }
}
