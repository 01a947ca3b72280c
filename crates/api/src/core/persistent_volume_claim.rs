//! PersistentVolumeClaim: REST strategy and validation.

use serde_json::{Value, json};

use super::{pod, resources, rules};
use crate::field::{ErrorList, Path};
use crate::json::JsonExt;
use crate::quantity::Quantity;
use crate::strategy::RestStrategy;
use crate::{meta, names};

pub struct PersistentVolumeClaim;

const BETA_STORAGE_CLASS_ANNOTATION: &str = "volume.beta.kubernetes.io/storage-class";
const RESIZE_STATES: &[&str] = &[
    "ControllerResizeInProgress",
    "ControllerResizeInfeasible",
    "NodeResizeInProgress",
    "NodeResizeInfeasible",
    "NodeResizePending",
];

impl RestStrategy for PersistentVolumeClaim {
    fn prepare_for_create(&self, new: &mut Value) {
        let status = new.object_mut("status");
        status.clear();
        status.insert("phase".to_owned(), json!("Pending"));
        drop_invalid_data_source(new);
        sync_data_sources(new);
    }

    fn prepare_for_update(&self, new: &mut Value, old: &Value) {
        let before = old.at("spec");
        if !before.has("dataSource") && !before.has("dataSourceRef") {
            drop_invalid_data_source(new);
        }
        sync_data_sources(new);
    }

    fn validate(&self, obj: &Value, errors: &mut ErrorList) {
        pod::validate_claim_spec(errors, obj.at("spec"), &Path::new("spec"));
    }

    fn validate_update(&self, new: &Value, old: &Value, errors: &mut ErrorList) {
        let (after, before) = (new.at("spec"), old.at("spec"));
        let (class, old_class) = (
            rules::annotations(new).text(BETA_STORAGE_CLASS_ANNOTATION),
            rules::annotations(old).text(BETA_STORAGE_CLASS_ANNOTATION),
        );
        if class != old_class && !class_is_set_from_annotation(new, old) {
            let path = Path::new("metadata.annotations").child(BETA_STORAGE_CLASS_ANNOTATION);
            errors.invalid(&path, class, "field is immutable");
        }
        let mutable = mutable_fields(new, old);
        let (new_spec, old_spec) = (spec_without(new, &mutable), spec_without(old, &mutable));
        if !meta::semantic_equal(&new_spec, &old_spec) {
            let detail = format!(
                "spec is immutable after creation except resources.requests and volumeAttributesClassName for bound claims\n{}",
                pod::diff_json(&old_spec, &new_spec)
            );
            errors.forbidden(&Path::new("spec"), &detail);
        }
        validate_size_not_reduced(new, old, errors);
        meta::validate_immutable(
            after.at("volumeMode"),
            before.at("volumeMode"),
            &Path::new("volumeMode"),
            errors,
        );
        let field = "volumeAttributesClassName";
        if old.at("status").has("currentVolumeAttributesClassName") && after.at(field) != before.at(field) {
            let to = match after.at(field).as_str() {
                None => "nil",
                Some("") => "empty string",
                Some(_) => return,
            };
            let detail = format!(
                "update to {to} is forbidden when status.currentVolumeAttributesClassName is not nil"
            );
            errors.forbidden(&Path::new("spec").child(field), &detail);
        }
    }

    fn validate_status_update(&self, new: &Value, _old: &Value, errors: &mut ErrorList) {
        let status = new.at("status");
        if new.at("spec").items("accessModes").is_empty() {
            errors.required(&Path::new("Spec.accessModes"), "");
        }
        for (name, amount) in status.entries("capacity") {
            if Quantity::from_value(amount).is_some_and(|amount| amount.is_negative()) {
                let path = Path::new("status.capacity").key(name);
                errors.invalid(&path, amount.clone(), "must be a valid resource quantity");
            }
        }
        let path = Path::new("status.allocatedResourceStatuses");
        for (name, state) in status.entries("allocatedResourceStatuses") {
            resource_key(name, &path, errors);
            if !RESIZE_STATES.contains(&state.as_str().unwrap_or("")) {
                errors.not_supported(&path, name, RESIZE_STATES);
            }
        }
        let path = Path::new("status.allocatedResources");
        for (name, amount) in status.entries("allocatedResources") {
            let before = errors.0.len();
            resource_key(name, &path, errors);
            if errors.0.len() == before {
                resources::validate_quantity("storage", amount, &path.key(name), errors);
            }
        }
    }

    fn warnings(&self, new: &Value, _old: Option<&Value>) -> Vec<String> {
        let mut warnings = Vec::new();
        if rules::annotations(new).has(BETA_STORAGE_CLASS_ANNOTATION) {
            warnings.push(format!(
                "metadata.annotations[{BETA_STORAGE_CLASS_ANNOTATION}]: deprecated since v1.8; use \"storageClassName\" attribute instead"
            ));
        }
        for field in ["requests", "limits"] {
            if let Some(amount) = Quantity::from_value(new.path("spec.resources").at(field).at("storage"))
                && !amount.is_whole()
            {
                warnings.push(format!(
                    "spec.resources.{field}[storage]: fractional byte value \"{amount}\" is invalid, must be an integer"
                ));
            }
        }
        warnings
    }
}

/// Drops a `dataSource` of an unsupported kind without an error, for compatibility with clients that
/// rely on this.
fn drop_invalid_data_source(claim: &mut Value) {
    let spec = claim.at("spec");
    let source = spec.at("dataSource");
    let known = matches!(
        (source.text("kind"), source.text("apiGroup")),
        ("PersistentVolumeClaim", "") | ("VolumeSnapshot", "snapshot.storage.k8s.io")
    );
    if !known
        && !spec.has("dataSourceRef")
        && let Some(spec) = claim.get_mut("spec").and_then(Value::as_object_mut)
    {
        spec.remove("dataSource");
    }
}

/// Copies `dataSource` to `dataSourceRef` or vice versa, so that old and new clients find it.
fn sync_data_sources(claim: &mut Value) {
    let spec = claim.at("spec");
    let (old, new) = (spec.at("dataSource"), spec.at("dataSourceRef"));
    let (field, from) = match (old.is_null(), new.is_null()) {
        (false, true) => ("dataSourceRef", old),
        (true, false) if new.text("namespace").is_empty() => ("dataSource", new),
        _ => return,
    };
    let mut copy = json!({"kind": from.text("kind"), "name": from.text("name")});
    if from.has("apiGroup") {
        copy.set_default("apiGroup", from.at("apiGroup").clone());
    }
    claim.object_mut("spec").insert(field.to_owned(), copy);
}

/// Whether the storage class moves from the annotation to the field.
fn class_is_set_from_annotation(new: &Value, old: &Value) -> bool {
    let (after, before) = (
        rules::annotations(new).at(BETA_STORAGE_CLASS_ANNOTATION),
        rules::annotations(old).at(BETA_STORAGE_CLASS_ANNOTATION),
    );
    !before.is_null()
        && !old.at("spec").has("storageClassName")
        && new.at("spec").at("storageClassName") == before
        && (after.is_null() || after == before)
}

/// The fields of the spec that an update may change.
fn mutable_fields(new: &Value, old: &Value) -> Vec<&'static str> {
    let before = old.at("spec");
    let class = new.at("spec").at("storageClassName");
    let annotation = rules::annotations(old).at(BETA_STORAGE_CLASS_ANNOTATION);
    let mut fields = Vec::new();
    // The volume and the storage class can be set once.
    if before.text("volumeName").is_empty() {
        fields.push("volumeName");
    }
    if !before.has("storageClassName") && (annotation.is_null() || annotation == class) {
        fields.push("storageClassName");
    }
    if new.at("status").text("phase") == "Bound" {
        fields.extend(["volumeAttributesClassName", "storage request"]);
    }
    fields
}

fn spec_without(claim: &Value, fields: &[&str]) -> Value {
    let mut spec = claim.at("spec").clone();
    for field in fields {
        if let Some(spec) = spec.as_object_mut() {
            spec.remove(*field);
        }
    }
    if fields.contains(&"storage request")
        && let Some(requests) = spec.pointer_mut("/resources/requests").and_then(Value::as_object_mut)
    {
        requests.remove("storage");
    }
    spec
}

/// A claim may grow, or shrink again as long as the new size has not been allocated.
fn validate_size_not_reduced(new: &Value, old: &Value, errors: &mut ErrorList) {
    let request = |claim: &Value| Quantity::from_value(claim.path("spec.resources.requests.storage"));
    let (Some(after), Some(before)) = (request(new), request(old)) else { return };
    if after >= before {
        return;
    }
    let capacity = Quantity::from_value(old.path("status.capacity.storage"));
    if capacity.is_some_and(|has| after <= has) {
        let path = Path::new("spec.resources.requests.storage");
        errors.forbidden(&path, "field can not be less than status.capacity");
    }
}

fn resource_key(name: &str, path: &Path, errors: &mut ErrorList) {
    let before = errors.0.len();
    rules::validate_name(name, names::qualified_name, path, errors);
    if errors.0.len() == before && resources::is_native(name) && name != "storage" {
        errors.not_supported(path, name, &["storage"]);
    }
}

#[cfg(test)]
mod tests {
    use expect_test::expect;

    use super::*;
    use crate::core::testing::{check_update, lines};

    #[test]
    fn data_source_and_data_source_ref_are_synced() {
        let source = json!({"kind": "PersistentVolumeClaim", "name": "a"});
        let mut new = json!({"spec": {"dataSource": source}});
        PersistentVolumeClaim.prepare_for_create(&mut new);
        assert_eq!(new["spec"]["dataSourceRef"], source);
        let mut odd = json!({"spec": {"dataSource": {"kind": "Tape", "name": "a"}}});
        PersistentVolumeClaim.prepare_for_create(&mut odd);
        assert_eq!(odd, json!({"spec": {}, "status": {"phase": "Pending"}}));
        let mut new = json!({"spec": {"dataSourceRef": {"apiGroup": "a.io", "kind": "Tape", "name": "a"}}});
        PersistentVolumeClaim.prepare_for_create(&mut new);
        assert_eq!(new["spec"]["dataSource"], new["spec"]["dataSourceRef"]);
    }

    #[test]
    fn validates_updates() {
        let claim = |spec: &str, phase: &str| {
            format!(
                r#"{{"spec": {{{spec}}}, "status": {{"phase": "{phase}", "capacity": {{"storage": "1Gi"}}}}}}"#
            )
        };
        let base = r#""accessModes": ["ReadWriteOnce"], "resources": {"requests": {"storage": "2Gi"}}"#;
        let pending = claim(base, "Pending");
        let bound = claim(&format!(r#"{base}, "volumeName": "v""#), "Bound");
        check_update(
            &PersistentVolumeClaim,
            &pending,
            &pending.replace(base, &format!(r#"{base}, "volumeName": "v", "storageClassName": "s""#)),
            &expect![""],
        );
        check_update(&PersistentVolumeClaim, &bound, &bound.replace("2Gi", "3Gi"), &expect![""]);
        check_update(
            &PersistentVolumeClaim,
            &bound,
            &bound.replace("\"v\"", "\"w\"").replace("2Gi", "1Gi"),
            &expect![[r#"
                spec: Forbidden: spec is immutable after creation except resources.requests and volumeAttributesClassName for bound claims
                @@ -5,5 +5,5 @@
                  "resources": {
                   "requests": {}
                  },
                - "volumeName": "v"
                + "volumeName": "w"
                 }

                spec.resources.requests.storage: Forbidden: field can not be less than status.capacity
            "#]],
        );
        check_update(
            &PersistentVolumeClaim,
            &bound,
            &bound.replace(r#", "volumeName": "v""#, ""),
            &expect![[r#"
                spec: Forbidden: spec is immutable after creation except resources.requests and volumeAttributesClassName for bound claims
                @@ -4,6 +4,5 @@
                  ],
                  "resources": {
                   "requests": {}
                - },
                - "volumeName": "v"
                + }
                 }

            "#]],
        );
        check_update(
            &PersistentVolumeClaim,
            &pending,
            &pending.replace("2Gi", "3Gi"),
            &expect![[r#"
                spec: Forbidden: spec is immutable after creation except resources.requests and volumeAttributesClassName for bound claims
                @@ -4,7 +4,7 @@
                  ],
                  "resources": {
                   "requests": {
                -   "storage": "2Gi"
                +   "storage": "3Gi"
                   }
                  }
                 }

            "#]],
        );
    }

    #[test]
    fn validates_status() {
        let mut errors = ErrorList::default();
        let claim = json!({"spec": {"accessModes": ["ReadWriteOnce"]}, "status": {
            "allocatedResources": {"cpu": "1", "storage": "1Gi"}, "allocatedResourceStatuses": {"storage": "Odd"}}});
        PersistentVolumeClaim.validate_status_update(&claim, &claim, &mut errors);
        expect![[r#"
            status.allocatedResourceStatuses: Unsupported value: "storage": supported values: "ControllerResizeInProgress", "ControllerResizeInfeasible", "NodeResizeInProgress", "NodeResizeInfeasible", "NodeResizePending"
            status.allocatedResources: Unsupported value: "cpu": supported values: "storage"
        "#]]
        .assert_eq(&lines(&errors));
    }
}
