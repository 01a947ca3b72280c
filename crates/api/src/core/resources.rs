//! Names and amounts of compute resources.

use serde_json::Value;

use super::rules;
use crate::field::{ErrorList, Path};
use crate::names;
use crate::quantity::Quantity;

/// Counted in whole numbers, and known to quotas.
const OBJECT_COUNTS: &[&str] = &[
    "pods",
    "resourcequotas",
    "services",
    "replicationcontrollers",
    "secrets",
    "configmaps",
    "persistentvolumeclaims",
    "services.nodeports",
    "services.loadbalancers",
];
const COMPUTE_RESOURCES: &[&str] = &[
    "cpu",
    "memory",
    "ephemeral-storage",
    "requests.cpu",
    "requests.memory",
    "requests.storage",
    "requests.ephemeral-storage",
    "limits.cpu",
    "limits.memory",
    "limits.ephemeral-storage",
];

/// A name that is well known, or qualified by a domain.
pub(crate) fn validate_resource_name(value: &str, path: &Path, errors: &mut ErrorList) {
    let before = errors.0.len();
    rules::validate_name(value, names::qualified_name, path, errors);
    if errors.0.len() == before && !value.contains('/') && !is_quota_standard(value) && value != "storage" {
        errors.invalid(path, value, "must be a standard resource type or fully qualified");
    }
}

/// A name a ResourceQuota may limit.
pub(crate) fn validate_quota_resource_name(value: &str, path: &Path, errors: &mut ErrorList) {
    validate_resource_name(value, path, errors);
    if !value.contains('/') && !is_quota_standard(value) {
        errors.invalid(path, value, "must be a standard resource for quota");
    }
}

/// A name a container may ask for.
pub(crate) fn validate_container_resource_name(value: &str, path: &Path, errors: &mut ErrorList) {
    validate_resource_name(value, path, errors);
    if !value.contains('/') {
        if !matches!(value, "cpu" | "memory" | "ephemeral-storage") && !is_huge_page(value) {
            errors.invalid(path, value, "must be a standard resource for containers");
        }
    } else if !is_native(value) && !is_extended(value) {
        errors.invalid(path, value, "doesn't follow extended resource name standard");
    }
}

/// An amount of a resource: not negative, and whole where the resource is.
pub(crate) fn validate_quantity(resource: &str, value: &Value, path: &Path, errors: &mut ErrorList) {
    let Some(amount) = Quantity::from_value(value) else { return };
    if amount.is_negative() {
        errors.invalid(path, amount.to_string(), "must be greater than or equal to 0");
    }
    if (OBJECT_COUNTS.contains(&resource) || is_extended(resource)) && !amount.is_whole() {
        errors.invalid(path, amount.to_string(), "must be an integer");
    }
}

pub(crate) fn is_quota_standard(name: &str) -> bool {
    OBJECT_COUNTS.contains(&name)
        || COMPUTE_RESOURCES.contains(&name)
        || is_huge_page(name)
        || name.starts_with("requests.hugepages-")
}

pub(crate) fn is_huge_page(name: &str) -> bool {
    name.starts_with("hugepages-")
}

/// In Kubernetes' own namespace, said or unsaid.
pub(crate) fn is_native(name: &str) -> bool {
    !name.contains('/') || name.contains("kubernetes.io/")
}

/// A device or the like that a node advertises.
pub(crate) fn is_extended(name: &str) -> bool {
    !is_native(name)
        && !name.starts_with("requests.")
        && names::qualified_name(&format!("requests.{name}")).is_empty()
}
