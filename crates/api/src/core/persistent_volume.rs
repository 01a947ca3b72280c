//! PersistentVolume: REST strategy and validation.

use serde_json::{Value, json};

use super::{pod, rules};
use crate::field::{ErrorList, Path};
use crate::json::JsonExt;
use crate::node::deprecated_label_warning;
use crate::quantity::Quantity;
use crate::strategy::RestStrategy;
use crate::{meta, names};

mod source;

pub struct PersistentVolume;

const ACCESS_MODES: &[&str] = &["ReadOnlyMany", "ReadWriteMany", "ReadWriteOnce", "ReadWriteOncePod"];
const RECLAIM_POLICIES: &[&str] = &["Delete", "Recycle", "Retain"];
const FORBIDDEN_INLINE: &str = "may not be specified in the context of inline volumes";

impl RestStrategy for PersistentVolume {
    fn prepare_for_create(&self, new: &mut Value) {
        let status = new.object_mut("status");
        status.clear();
        status.insert("phase".to_owned(), json!("Pending"));
    }

    fn validate(&self, obj: &Value, errors: &mut ErrorList) {
        let spec = obj.at("spec");
        let path = Path::new("spec");
        access_modes(spec, &path, errors);
        capacity(spec, &path.child("capacity"), errors);
        let policy = spec.text("persistentVolumeReclaimPolicy");
        if !policy.is_empty() {
            rules::required_one_of(
                policy,
                RECLAIM_POLICIES,
                &path.child("persistentVolumeReclaimPolicy"),
                errors,
            );
        }
        node_affinity(spec, &path.child("nodeAffinity"), errors);
        source::validate_source(spec, obj.at("metadata").text("name"), &path, errors);
        let class = spec.text("storageClassName");
        if !class.is_empty() {
            rules::validate_name(class, names::dns1123_subdomain, &path.child("storageClassName"), errors);
        }
        rules::optional_one_of(
            spec.at("volumeMode"),
            &["Block", "Filesystem"],
            &path.child("volumeMode"),
            errors,
        );
        validate_attributes_class_name(spec, &path, errors);
    }

    fn validate_update(&self, new: &Value, old: &Value, errors: &mut ErrorList) {
        let (after, before) = (new.at("spec"), old.at("spec"));
        if !source::same_source(after, before) {
            let path = Path::new("spec.persistentvolumesource");
            let difference = pod::diff_json(&source::source_of(before), &source::source_of(after));
            let detail = format!("spec.persistentvolumesource is immutable after creation\n{difference}");
            errors.forbidden(&path, &detail);
        }
        meta::validate_immutable(
            after.at("volumeMode"),
            before.at("volumeMode"),
            &Path::new("volumeMode"),
            errors,
        );
        let field = "nodeAffinity";
        if before.has(field)
            && !meta::semantic_equal(&ga_labels(after.at(field)), &ga_labels(before.at(field)))
        {
            let detail = "field is immutable, except for updating from beta label to GA";
            errors.invalid(&Path::new(field), after.at(field).clone(), detail);
        }
        let field = "volumeAttributesClassName";
        if before.has(field) && !after.has(field) {
            let path = Path::new("spec").child(field);
            errors.forbidden(&path, "update from non-nil value to nil is forbidden");
        }
    }

    fn warnings(&self, new: &Value, _old: Option<&Value>) -> Vec<String> {
        let spec = new.at("spec");
        let mut warnings = Vec::new();
        if spec.text("persistentVolumeReclaimPolicy") == "Recycle" {
            warnings.push("spec.persistentVolumeReclaimPolicy: The Recycle reclaim policy is deprecated. Instead, the recommended approach is to use dynamic provisioning.".to_owned());
        }
        let terms = spec.path("nodeAffinity.required").items("nodeSelectorTerms");
        for (i, term) in terms.iter().enumerate() {
            let path = Path::new("spec.nodeAffinity.required.nodeSelectorTerms").index(i);
            for (j, requirement) in term.items("matchExpressions").iter().enumerate() {
                let key = requirement.text("key");
                if let Some(message) = deprecated_label_warning(key) {
                    let path = path.child("matchExpressions").index(j).child("key");
                    warnings.push(format!("{path}: {key} is {message}"));
                }
            }
        }
        for (field, shown, message) in DEPRECATED_SOURCES {
            if spec.has(field) {
                warnings.push(format!("spec.{shown}: {message}"));
            }
        }
        warnings
    }
}

const DEPRECATED_SOURCES: &[(&str, &str, &str)] = &[
    ("cephfs", "cephfs", "deprecated in v1.28, non-functional in v1.31+"),
    ("photonPersistentDisk", "photonPersistentDisk", "deprecated in v1.11, non-functional in v1.16+"),
    ("scaleIO", "scaleIO", "deprecated in v1.16, non-functional in v1.22+"),
    ("storageos", "storageOS", "deprecated in v1.22, non-functional in v1.25+"),
    ("glusterfs", "glusterfs", "deprecated in v1.25, non-functional in v1.26+"),
    ("rbd", "rbd", "deprecated in v1.28, non-functional in v1.31+"),
];

/// Validates the inline spec in a VolumeAttachment, which represents a volume without a PersistentVolume.
pub(crate) fn validate_inline_spec(spec: &Value, path: &Path, errors: &mut ErrorList) {
    for field in ["claimRef", "capacity"] {
        if !rules::is_empty(spec.at(field)) {
            errors.forbidden(&path.child(field), FORBIDDEN_INLINE);
        }
    }
    if !spec.has("csi") {
        errors.required(&path.child("csi"), "has to be specified in the context of inline volumes");
    }
    access_modes(spec, path, errors);
    if !matches!(spec.text("persistentVolumeReclaimPolicy"), "" | "Retain") {
        let path = path.child("persistentVolumeReclaimPolicy");
        errors.forbidden(&path, "may only be Retain in the context of inline volumes");
    }
    if spec.has("nodeAffinity") {
        errors.forbidden(&path.child("nodeAffinity"), FORBIDDEN_INLINE);
    }
    source::validate_source(spec, "", path, errors);
    if !spec.text("storageClassName").is_empty() {
        errors.forbidden(&path.child("storageClassName"), FORBIDDEN_INLINE);
    }
    if !matches!(spec.text("volumeMode"), "" | "Filesystem") {
        let detail = "may not specify volumeMode other than Filesystem in the context of inline volumes";
        errors.forbidden(&path.child("volumeMode"), detail);
    }
    validate_attributes_class_name(spec, path, errors);
}

fn access_modes(spec: &Value, path: &Path, errors: &mut ErrorList) {
    let path = path.child("accessModes");
    let modes: Vec<&str> = spec.items("accessModes").iter().filter_map(Value::as_str).collect();
    if modes.is_empty() {
        errors.required(&path, "");
    }
    for mode in modes.iter().filter(|mode| !ACCESS_MODES.contains(mode)) {
        errors.not_supported(&path, *mode, ACCESS_MODES);
    }
    let single_pod_mode = "ReadWriteOncePod";
    if modes.contains(&single_pod_mode)
        && modes.iter().any(|mode| *mode != single_pod_mode && ACCESS_MODES.contains(mode))
    {
        errors.forbidden(&path, "may not use ReadWriteOncePod with other access modes");
    }
}

fn capacity(spec: &Value, path: &Path, errors: &mut ErrorList) {
    let count = spec.entries("capacity").count();
    if count == 0 {
        errors.required(path, "");
    }
    if count > 1 || !spec.at("capacity").has("storage") {
        errors.not_supported(path, spec.at("capacity").clone(), &["storage"]);
    }
    for (name, amount) in spec.entries("capacity") {
        if let Some(amount) = Quantity::from_value(amount).filter(|amount| !amount.is_positive()) {
            errors.invalid(&path.key(name), amount.to_string(), "must be greater than zero");
        }
    }
}

fn node_affinity(spec: &Value, path: &Path, errors: &mut ErrorList) {
    let affinity = spec.at("nodeAffinity");
    if affinity.is_null() {
        return;
    }
    if affinity.has("required") {
        pod::validate_node_selector(errors, affinity.at("required"), &path.child("required"));
    } else {
        errors.required(&path.child("required"), "must specify required node constraints");
    }
}

fn validate_attributes_class_name(spec: &Value, path: &Path, errors: &mut ErrorList) {
    let Some(class) = spec.at("volumeAttributesClassName").as_str() else { return };
    let at = path.child("volumeAttributesClassName");
    if class.is_empty() {
        errors.required(&at, "an empty string is disallowed");
    } else {
        rules::validate_name(class, names::dns1123_subdomain, &at, errors);
    }
    if !spec.has("csi") {
        errors.required(&path.child("csi"), "has to be specified when using volumeAttributesClassName");
    }
}

/// The node affinity with beta labels replaced by their GA labels. Updates may make this replacement.
fn ga_labels(affinity: &Value) -> Value {
    const RENAMED: &[(&str, &str)] = &[
        ("failure-domain.beta.kubernetes.io/zone", "topology.kubernetes.io/zone"),
        ("failure-domain.beta.kubernetes.io/region", "topology.kubernetes.io/region"),
        ("beta.kubernetes.io/os", "kubernetes.io/os"),
        ("beta.kubernetes.io/arch", "kubernetes.io/arch"),
        ("beta.kubernetes.io/instance-type", "node.kubernetes.io/instance-type"),
    ];
    let mut affinity = affinity.clone();
    let terms = affinity.pointer_mut("/required/nodeSelectorTerms").and_then(Value::as_array_mut);
    for term in terms.into_iter().flatten() {
        let requirements = term.get_mut("matchExpressions").and_then(Value::as_array_mut);
        for key in requirements.into_iter().flatten().filter_map(|requirement| requirement.get_mut("key")) {
            if let Some((_, ga)) = RENAMED.iter().find(|(beta, _)| key.as_str() == Some(beta)) {
                *key = Value::from(*ga);
            }
        }
    }
    affinity
}

#[cfg(test)]
mod tests {
    use expect_test::expect;

    use super::*;
    use crate::core::testing::{check, check_update};

    const GOOD: &str = r#"{"metadata": {"name": "p"}, "spec": {"accessModes": ["ReadWriteOnce"],
        "capacity": {"storage": "1Gi"}, "persistentVolumeReclaimPolicy": "Retain", "volumeMode": "Filesystem",
        "hostPath": {"path": "/a", "type": ""}}}"#;

    #[test]
    fn validates_volumes() {
        check(&PersistentVolume, GOOD, &expect![""]);
        check(
            &PersistentVolume,
            r#"{"spec": {"persistentVolumeReclaimPolicy": "X", "volumeMode": "Y", "storageClassName": "_",
                "volumeAttributesClassName": ""}}"#,
            &expect![[r#"
                spec.accessModes: Required value
                spec.capacity: Required value
                spec.capacity: Unsupported value: null: supported values: "storage"
                spec.persistentVolumeReclaimPolicy: Unsupported value: "X": supported values: "Delete", "Recycle", "Retain"
                spec: Required value: must specify a volume type
                spec.storageClassName: Invalid value: "_": a lowercase RFC 1123 subdomain must consist of lower case alphanumeric characters, '-' or '.', and must start and end with an alphanumeric character (e.g. 'example.com', regex used for validation is '[a-z0-9]([-a-z0-9]*[a-z0-9])?(\.[a-z0-9]([-a-z0-9]*[a-z0-9])?)*')
                spec.volumeMode: Unsupported value: "Y": supported values: "Block", "Filesystem"
                spec.volumeAttributesClassName: Required value: an empty string is disallowed
                spec.csi: Required value: has to be specified when using volumeAttributesClassName
            "#]],
        );
        check(
            &PersistentVolume,
            &GOOD
                .replace("1Gi", "0")
                .replace("\"hostPath\"", "\"local\": {}, \"nfs\": {\"path\": \"x\"}, \"hostPath\""),
            &expect![[r#"
                spec.capacity[storage]: Invalid value: "0": must be greater than zero
                spec.nfs: Forbidden: may not specify more than 1 volume type
                spec.local: Forbidden: may not specify more than 1 volume type
            "#]],
        );
        for (source, expected) in [
            (
                r#""nfs": {"path": "x"}"#,
                expect![[r#"
                spec.nfs.server: Required value
                spec.nfs.path: Invalid value: "x": must be an absolute path
            "#]],
            ),
            (
                r#""local": {"path": "/a/../b"}"#,
                expect![[r#"
                spec.local.path: Invalid value: "/a/../b": must not contain '..'
                spec.nodeAffinity: Required value: Local volume requires node affinity
            "#]],
            ),
            (
                r#""csi": {"driver": "d", "nodePublishSecretRef": {"name": "a"}}"#,
                expect![[r#"
                spec.csi.volumeHandle: Required value
                spec.csi.nodePublishSecretRef.namespace: Required value
            "#]],
            ),
            (
                r#""gcePersistentDisk": {"partition": 256}"#,
                expect![[r#"
                spec.persistentDisk.pdName: Required value
                spec.persistentDisk.partition: Invalid value: 256: must be between 1 and 255, inclusive
            "#]],
            ),
            (
                r#""fc": {"targetWWNs": ["a"]}"#,
                expect![[r#"
                spec.fc.lun: Required value: lun is required if targetWWNs is specified
            "#]],
            ),
        ] {
            check(
                &PersistentVolume,
                &GOOD.replace(r#""hostPath": {"path": "/a", "type": ""}"#, source),
                &expected,
            );
        }
    }

    #[test]
    fn validates_updates() {
        check_update(&PersistentVolume, GOOD, &GOOD.replace("Retain", "Delete"), &expect![""]);
        check_update(
            &PersistentVolume,
            GOOD,
            &GOOD.replace("/a", "/b").replace("Filesystem", "Block"),
            &expect![[r#"
                spec.persistentvolumesource: Forbidden: spec.persistentvolumesource is immutable after creation
                @@ -1,6 +1,6 @@
                 {
                  "hostPath": {
                -  "path": "/a",
                +  "path": "/b",
                   "type": ""
                  }
                 }

                volumeMode: Invalid value: "Block": field is immutable
            "#]],
        );
        let affinity = |key: &str| {
            GOOD.replace(
                "\"hostPath\"",
                &format!(
                    r#""nodeAffinity": {{"required": {{"nodeSelectorTerms": [{{"matchExpressions": [{{"key": "{key}", "operator": "Exists"}}]}}]}}}}, "hostPath""#
                ),
            )
        };
        let (beta, ga) = ("failure-domain.beta.kubernetes.io/zone", "topology.kubernetes.io/zone");
        check_update(&PersistentVolume, &affinity(beta), &affinity(ga), &expect![""]);
        check_update(&PersistentVolume, GOOD, &affinity(ga), &expect![""]);
        check_update(
            &PersistentVolume,
            &affinity(ga),
            GOOD,
            &expect![[r#"
            nodeAffinity: Invalid value: null: field is immutable, except for updating from beta label to GA
        "#]],
        );
    }
}
