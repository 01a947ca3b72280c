//! Validates names and quantities of compute resources.

use serde_json::Value;

use super::rules;
use crate::field::{ErrorList, Path};
use crate::names;
use crate::quantity::Quantity;

/// Standard quota resources with integer quantities.
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

/// A standard resource name or a name with a domain prefix.
pub(crate) fn validate_resource_name(value: &str, path: &Path, errors: &mut ErrorList) {
    let before = errors.0.len();
    rules::validate_name(value, names::qualified_name, path, errors);
    if errors.0.len() == before && !value.contains('/') && !is_quota_standard(value) && value != "storage" {
        errors.invalid(path, value, "must be a standard resource type or fully qualified");
    }
}

/// A resource name that a ResourceQuota can limit.
pub(crate) fn validate_quota_resource_name(value: &str, path: &Path, errors: &mut ErrorList) {
    validate_resource_name(value, path, errors);
    if !value.contains('/') && !is_quota_standard(value) {
        errors.invalid(path, value, "must be a standard resource for quota");
    }
}

/// A resource name that a container can request.
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

/// Validates a quantity: not negative, and an integer for resources that require it.
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

/// Whether the resource is in the `kubernetes.io` namespace, explicitly or by default.
pub(crate) fn is_native(name: &str) -> bool {
    !name.contains('/') || name.contains("kubernetes.io/")
}

/// Whether this is an extended resource, such as a device advertised by a node.
pub(crate) fn is_extended(name: &str) -> bool {
    !is_native(name)
        && !name.starts_with("requests.")
        && names::qualified_name(&format!("requests.{name}")).is_empty()
}
