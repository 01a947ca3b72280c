//! Differences in how resources are written: upstream's strategies, as tables.

use api::Resource;

type ResourceNames = &'static [(&'static str, &'static str)];

/// Resources that PUT may create (upstream's `AllowCreateOnUpdate`).
const ALLOW_CREATE_ON_UPDATE: ResourceNames = &[
    ("", "endpoints"),
    ("", "events"),
    ("", "limitranges"),
    ("", "services"),
    ("coordination.k8s.io", "leases"),
    ("node.k8s.io", "runtimeclasses"),
    ("rbac.authorization.k8s.io", "clusterrolebindings"),
    ("rbac.authorization.k8s.io", "clusterroles"),
    ("rbac.authorization.k8s.io", "rolebindings"),
    ("rbac.authorization.k8s.io", "roles"),
];

/// Resources whose updates require a resourceVersion (no `AllowUnconditionalUpdate` upstream).
const FORBID_UNCONDITIONAL_UPDATE: ResourceNames = &[
    ("admissionregistration.k8s.io", "mutatingadmissionpolicies"),
    ("admissionregistration.k8s.io", "mutatingadmissionpolicybindings"),
    ("admissionregistration.k8s.io", "mutatingwebhookconfigurations"),
    ("admissionregistration.k8s.io", "validatingadmissionpolicies"),
    ("admissionregistration.k8s.io", "validatingadmissionpolicybindings"),
    ("admissionregistration.k8s.io", "validatingwebhookconfigurations"),
    ("apiextensions.k8s.io", "customresourcedefinitions"),
    ("apiregistration.k8s.io", "apiservices"),
    ("coordination.k8s.io", "leases"),
    ("node.k8s.io", "runtimeclasses"),
    ("policy", "poddisruptionbudgets"),
    ("storage.k8s.io", "csidrivers"),
    ("storage.k8s.io", "csinodes"),
    ("storage.k8s.io", "csistoragecapacities"),
    ("storage.k8s.io", "volumeattachments"),
];

/// Resources whose deletion returns the object (upstream's `ReturnDeletedObject`).
const RETURN_DELETED_OBJECT: ResourceNames = &[
    ("", "namespaces"),
    ("", "persistentvolumeclaims"),
    ("", "persistentvolumes"),
    ("", "pods"),
    ("", "podtemplates"),
    ("", "resourcequotas"),
    ("", "serviceaccounts"),
    ("", "services"),
    ("resource.k8s.io", "deviceclasses"),
    ("resource.k8s.io", "resourceclaims"),
    ("resource.k8s.io", "resourceclaimtemplates"),
    ("resource.k8s.io", "resourceslices"),
    ("storage.k8s.io", "csidrivers"),
    ("storage.k8s.io", "csinodes"),
    ("storage.k8s.io", "storageclasses"),
    ("storage.k8s.io", "volumeattachments"),
    ("storage.k8s.io", "volumeattributesclasses"),
];

/// Resources whose `/status` updates ignore metadata.
const STATUS_IGNORES_METADATA: ResourceNames = &[
    ("admissionregistration.k8s.io", "validatingadmissionpolicies"),
    ("apiregistration.k8s.io", "apiservices"),
    ("flowcontrol.apiserver.k8s.io", "flowschemas"),
    ("flowcontrol.apiserver.k8s.io", "prioritylevelconfigurations"),
    ("networking.k8s.io", "servicecidrs"),
    ("resource.k8s.io", "resourceclaims"),
    ("storage.k8s.io", "volumeattachments"),
];

/// Resources whose dependents are orphaned by default, for compatibility with their first versions.
const ORPHAN_BY_DEFAULT: ResourceNames = &[("", "replicationcontrollers"), ("batch", "jobs")];

/// Groups that do not validate finalizer names.
const GROUPS_WITH_ANY_FINALIZER: &[&str] = &[
    "admissionregistration.k8s.io",
    "apiextensions.k8s.io",
    "apiregistration.k8s.io",
    "coordination.k8s.io",
    "node.k8s.io",
    "policy",
];

/// Whether finalizers must be standard ones or have a domain-qualified name.
pub fn requires_valid_finalizer_names(stored: &Resource) -> bool {
    stored.custom.is_none() && !GROUPS_WITH_ANY_FINALIZER.contains(&stored.group)
}

fn contains(kinds: ResourceNames, row: &Resource) -> bool {
    kinds.contains(&(row.group, row.plural))
}

pub fn allow_create_on_update(stored: &Resource) -> bool {
    contains(ALLOW_CREATE_ON_UPDATE, stored)
}

pub fn requires_resource_version(stored: &Resource) -> bool {
    stored.custom.is_some() || contains(FORBID_UNCONDITIONAL_UPDATE, stored)
}

pub fn return_deleted_object(stored: &Resource) -> bool {
    contains(RETURN_DELETED_OBJECT, stored)
}

/// The propagation policy of a delete request without one.
pub fn default_propagation(stored: &Resource) -> &'static str {
    if contains(ORPHAN_BY_DEFAULT, stored) { "Orphan" } else { "" }
}

pub fn is(stored: &Resource, group: &str, plural: &str) -> bool {
    stored.group == group && stored.plural == plural
}

pub fn has_status(row: &Resource) -> bool {
    row.subresource("status").is_some()
}

/// The metadata fields that a `/status` update may change.
pub fn status_mutable_metadata(stored: &Resource) -> &'static [&'static str] {
    match (stored.group, stored.plural) {
        _ if stored.custom.is_some() || contains(STATUS_IGNORES_METADATA, stored) => &[],
        ("", "pods") => &["annotations", "finalizers", "labels"],
        ("apps", "deployments") => &["annotations", "finalizers", "ownerReferences"],
        _ => &["annotations", "finalizers", "labels", "ownerReferences"],
    }
}

/// Fields that a write through this subresource does not change and therefore does not own
/// (upstream's `GetResetFields`).
pub fn reset_fields(stored: &Resource, subresource: &str) -> &'static [&'static [&'static str]] {
    match (subresource, stored.group, stored.plural) {
        ("", "certificates.k8s.io", _) => &[&["spec"], &["status"]],
        ("approval", ..) => &[&["spec"], &["status", "certificate"]],
        ("status", "certificates.k8s.io", _) => &[&["spec"], &["status", "conditions"]],
        ("status", "", "pods") => {
            &[&["spec"], &["metadata", "deletionTimestamp"], &["metadata", "ownerReferences"]]
        }
        ("status", "apps", "deployments") => &[&["spec"], &["metadata", "labels"]],
        ("status", ..) if stored.custom.is_some() || contains(STATUS_IGNORES_METADATA, stored) => {
            &[&["spec"], &["metadata"]]
        }
        ("status", ..) => &[&["spec"]],
        ("" | "finalize" | "ephemeralcontainers" | "resize", ..) if has_status(stored) => &[&["status"]],
        _ => &[],
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn tables_list_existing_resources() {
        let tables = [
            ALLOW_CREATE_ON_UPDATE,
            FORBID_UNCONDITIONAL_UPDATE,
            RETURN_DELETED_OBJECT,
            STATUS_IGNORES_METADATA,
            ORPHAN_BY_DEFAULT,
        ];
        for (group, plural) in tables.concat() {
            assert!(api::resource_table::find_resource(group, "v1", plural).is_some(), "{group} {plural}");
        }
        for (group, plural) in STATUS_IGNORES_METADATA {
            assert!(
                has_status(api::resource_table::find_resource(group, "v1", plural).unwrap()),
                "{group} {plural}"
            );
        }
    }
}
