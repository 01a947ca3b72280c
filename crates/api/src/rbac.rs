//! The kinds of the `rbac.authorization.k8s.io` group and their common validation.

pub mod cluster_role;
pub mod cluster_role_binding;
pub mod role;
pub mod role_binding;

use serde_json::{Value, json};

use crate::field::{ErrorList, Path};
use crate::json::JsonExt;
use crate::names;

const GROUP: &str = "rbac.authorization.k8s.io";

/// Validates the rules of a role. Namespaced roles must not have non-resource URLs.
pub fn validate_rules(rules: &[Value], namespaced: bool, path: &Path, errors: &mut ErrorList) {
    for (i, item) in rules.iter().enumerate() {
        validate_rule(item, namespaced, &path.index(i), errors);
    }
}

fn validate_rule(rule: &Value, namespaced: bool, path: &Path, errors: &mut ErrorList) {
    if rule.items("verbs").is_empty() {
        errors.required(&path.child("verbs"), "verbs must contain at least one value");
    }
    if !rule.items("nonResourceURLs").is_empty() {
        let at = path.child("nonResourceURLs");
        let urls = rule.at("nonResourceURLs").clone();
        if namespaced {
            errors.invalid(&at, urls.clone(), "namespaced rules cannot apply to non-resource URLs");
        }
        if ["apiGroups", "resources", "resourceNames"].iter().any(|field| !rule.items(field).is_empty()) {
            errors.invalid(&at, urls, "rules cannot apply to both regular resources and non-resource URLs");
        }
        return;
    }
    if rule.items("apiGroups").is_empty() {
        errors.required(&path.child("apiGroups"), "resource rules must supply at least one api group");
    }
    if rule.items("resources").is_empty() {
        errors.required(&path.child("resources"), "resource rules must supply at least one resource");
    }
}

/// Validates a RoleBinding (`namespaced`) or ClusterRoleBinding. `kinds` are the allowed kinds of the role.
fn validate_binding(obj: &Value, namespaced: bool, kinds: &[&str], errors: &mut ErrorList) {
    let (role, path) = (obj.at("roleRef"), Path::new("roleRef"));
    if role.text("apiGroup") != GROUP {
        errors.not_supported(&path.child("apiGroup"), role.text("apiGroup"), &[GROUP]);
    }
    if !kinds.contains(&role.text("kind")) {
        errors.not_supported(&path.child("kind"), role.text("kind"), kinds);
    }
    let name = role.text("name");
    if name.is_empty() {
        errors.required(&path.child("name"), "");
    } else {
        for message in names::path_segment_name(name) {
            errors.invalid(&path.child("name"), name, &message);
        }
    }
    for (i, item) in obj.items("subjects").iter().enumerate() {
        validate_subject(item, namespaced, &Path::new("subjects").index(i), errors);
    }
}

fn validate_subject(subject: &Value, namespaced: bool, path: &Path, errors: &mut ErrorList) {
    let (name, group) = (subject.text("name"), subject.text("apiGroup"));
    if name.is_empty() {
        errors.required(&path.child("name"), "");
    }
    match subject.text("kind") {
        "ServiceAccount" => {
            if !name.is_empty() {
                for message in names::dns1123_subdomain(name) {
                    errors.invalid(&path.child("name"), name, &message);
                }
            }
            if !group.is_empty() {
                errors.not_supported(&path.child("apiGroup"), group, &[""]);
            }
            if !namespaced && subject.text("namespace").is_empty() {
                errors.required(&path.child("namespace"), "");
            }
        }
        "User" | "Group" => {
            if group != GROUP {
                errors.not_supported(&path.child("apiGroup"), group, &[GROUP]);
            }
        }
        kind => errors.not_supported(&path.child("kind"), kind, &["ServiceAccount", "User", "Group"]),
    }
}

/// The role of a binding is immutable: delete and create the binding instead.
fn validate_role_ref_unchanged(new: &Value, old: &Value, errors: &mut ErrorList) {
    const FIELDS: [&str; 3] = ["apiGroup", "kind", "name"];
    let (new, old) = (new.at("roleRef"), old.at("roleRef"));
    if FIELDS.iter().any(|field| new.text(field) != old.text(field)) {
        // Upstream prints its internal type with these field names.
        let rendered =
            json!({"APIGroup": new.text("apiGroup"), "Kind": new.text("kind"), "Name": new.text("name")});
        errors.invalid(&Path::new("roleRef"), rendered, "cannot change roleRef");
    }
}
