//! Where kinds differ in how they are written: upstream's strategies, as tables.

use api::Resource;

type ResourceNames = &'static [(&'static str, &'static str)];

/// Kinds that a PUT may also make (upstream's `AllowCreateOnUpdate`).
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

/// Kinds whose updates must name the version they replace (no `AllowUnconditionalUpdate` upstream).
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

/// Kinds whose deletion is answered with the object itself (upstream's `ReturnDeletedObject`).
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

/// Kinds whose `/status` changes nothing of the metadata.
const STATUS_IGNORES_METADATA: ResourceNames = &[
    ("admissionregistration.k8s.io", "validatingadmissionpolicies"),
    ("apiregistration.k8s.io", "apiservices"),
    ("flowcontrol.apiserver.k8s.io", "flowschemas"),
    ("flowcontrol.apiserver.k8s.io", "prioritylevelconfigurations"),
    ("networking.k8s.io", "servicecidrs"),
    ("resource.k8s.io", "resourceclaims"),
    ("storage.k8s.io", "volumeattachments"),
];

/// Kinds whose dependents outlive them unless the deletion says otherwise, since they did in the first
/// versions of the kinds.
const ORPHAN_BY_DEFAULT: ResourceNames = &[("", "replicationcontrollers"), ("batch", "jobs")];

/// Groups whose objects may have finalizers that name nobody.
const GROUPS_WITH_ANY_FINALIZER: &[&str] = &[
    "admissionregistration.k8s.io",
    "apiextensions.k8s.io",
    "apiregistration.k8s.io",
    "coordination.k8s.io",
    "node.k8s.io",
    "policy",
];

/// Finalizers have to be standard ones or name who they belong to.
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

/// The policy of a deletion that names none.
pub fn default_propagation(stored: &Resource) -> &'static str {
    if contains(ORPHAN_BY_DEFAULT, stored) { "Orphan" } else { "" }
}

pub fn is(stored: &Resource, group: &str, plural: &str) -> bool {
    stored.group == group && stored.plural == plural
}

pub fn has_status(row: &Resource) -> bool {
    row.subresource("status").is_some()
}

/// The metadata that an update through `/status` may change.
pub fn status_mutable_metadata(stored: &Resource) -> &'static [&'static str] {
    match (stored.group, stored.plural) {
        _ if stored.custom.is_some() || contains(STATUS_IGNORES_METADATA, stored) => &[],
        ("", "pods") => &["annotations", "finalizers", "labels"],
        ("apps", "deployments") => &["annotations", "finalizers", "ownerReferences"],
        _ => &["annotations", "finalizers", "labels", "ownerReferences"],
    }
}

/// Fields that a write through this door does not change, and so nobody owns through it (upstream's
/// `GetResetFields`).
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
