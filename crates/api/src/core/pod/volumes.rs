//! Validates volumes: exactly one source each, with the rules of that source.

use std::collections::{BTreeMap, BTreeSet};

use serde_json::Value;

use super::containers::PULL_POLICIES;
use super::projected;
use super::rules::{
    invalid_as, optional_one_of, required, required_one_of, validate_file_mode, validate_label,
    validate_name, validate_non_reserved_path, validate_relative_path,
};
use crate::core::volume_source::{self as shared, VolumeSourceRule, source};
use crate::field::{ErrorList, Path};
use crate::json::JsonExt;
use crate::quantity::Quantity;
use crate::storage::csi_driver::validate_driver_name;
use crate::{meta, names};

/// Validates the volumes and returns the valid ones by name.
pub(super) fn validate_volumes<'a>(
    e: &mut ErrorList,
    spec: &'a Value,
    pod: Option<&Value>,
    path: &Path,
    is_pod: bool,
) -> BTreeMap<&'a str, &'a Value> {
    let volumes = spec.items("volumes");
    let pod_name = pod.map_or("", |meta| meta.text("name"));
    let generated_claims: BTreeSet<String> = volumes
        .iter()
        .filter(|volume| !pod_name.is_empty() && volume.has("ephemeral"))
        .map(|volume| format!("{pod_name}-{}", volume.text("name")))
        .collect();
    let mut valid_volumes = BTreeMap::new();
    for (i, volume) in volumes.iter().enumerate() {
        let at = path.index(i);
        let name = volume.text("name");
        let before = e.0.len();
        check_source(e, volume, &at, pod_name, is_pod);
        match name {
            "" => e.required(&at.child("name"), ""),
            _ => validate_label(e, &at.child("name"), name),
        }
        if valid_volumes.contains_key(name) {
            e.duplicate(&at.child("name"), name);
        }
        if e.0.len() == before {
            valid_volumes.insert(name, volume);
        }
        let claim = volume.at("persistentVolumeClaim").text("claimName");
        if generated_claims.contains(claim) {
            e.invalid(
                &at.child("persistentVolumeClaim.claimName"),
                claim,
                "must not reference a PVC that gets created for an ephemeral volume",
            );
        }
    }
    valid_volumes
}

/// In upstream's order.
const SOURCES: &[VolumeSourceRule] = &[
    source("emptyDir", &[]).rule(empty_dir),
    shared::HOST_PATH,
    source("gitRepo", &["repository"]).rule(git_repo),
    shared::GCE_DISK,
    shared::AWS_DISK,
    source("secret", &["secretName"]).rule(validate_key_to_paths),
    shared::NFS,
    shared::ISCSI
        .rule(|e, source, at| shared::validate_iscsi(e, source, at, shared::validate_initiator_name, &[])),
    shared::GLUSTERFS,
    shared::FLOCKER,
    source("persistentVolumeClaim", &["claimName"]),
    shared::RBD,
    shared::CINDER.rule(|e, source, at| shared::validate_secret_ref(e, source, at, &["name"])),
    shared::CEPHFS,
    shared::QUOBYTE,
    source("downwardAPI", &[]).with_conflict_field("downwarAPI").rule(projected::validate_downward_api),
    shared::FC,
    shared::FLEX,
    source("configMap", &["name"]).rule(validate_key_to_paths),
    shared::AZURE_FILE,
    shared::VSPHERE,
    shared::PHOTON_DISK,
    shared::PORTWORX,
    shared::AZURE_DISK,
    shared::STORAGE_OS.rule(|e, source, at| shared::validate_storage_os(e, source, at, &["name"])),
    source("projected", &[]).rule(projected::validate_projected),
    shared::SCALE_IO,
    source("csi", &[]).rule(csi),
    source("ephemeral", &[]).rule(ephemeral),
    source("image", &[]),
];

fn check_source(e: &mut ErrorList, volume: &Value, path: &Path, pod_name: &str, is_pod: bool) {
    let name = volume.text("name");
    let mut found = false;
    for kind in SOURCES.iter().filter(|kind| volume.has(kind.field)) {
        let source = volume.at(kind.field);
        if found {
            e.forbidden(&path.child(kind.conflict_field), shared::MULTIPLE_SOURCES);
        } else {
            found = true;
            let at = path.child(kind.error_field);
            kind.required(e, source, &at);
            (kind.rule)(e, source, &at);
            match kind.field {
                "ephemeral" if !pod_name.is_empty() && !name.is_empty() => {
                    let claim = format!("{pod_name}-{name}");
                    for message in names::dns1123_subdomain(&claim) {
                        e.invalid(&path.child("name"), name, &format!("PVC name {claim:?}: {message}"));
                    }
                }
                "image" => {
                    // Templates may omit the reference; pods may not.
                    if is_pod {
                        required(e, source, &at, "reference");
                    }
                    required_one_of(e, source, &at, "pullPolicy", PULL_POLICIES);
                }
                _ => {}
            }
        }
        if kind.field == "iscsi" && shared::iscsi_name_too_long(source, name) {
            e.invalid(&path.child("name"), name, shared::ISCSI_NAME_TOO_LONG);
        }
    }
    if !found {
        e.required(path, "must specify a volume type");
    }
}

fn empty_dir(e: &mut ErrorList, source: &Value, path: &Path) {
    if Quantity::from_value(source.at("sizeLimit")).is_some_and(|size| size.is_negative()) {
        e.forbidden(&path.child("sizeLimit"), "SizeLimit field must be a valid resource quantity");
    }
}

fn git_repo(e: &mut ErrorList, source: &Value, path: &Path) {
    validate_relative_path(e, &path.child("directory"), source.text("directory"));
}

fn validate_key_to_paths(e: &mut ErrorList, source: &Value, path: &Path) {
    validate_file_mode(e, source, path, "defaultMode");
    for (i, item) in source.items("items").iter().enumerate() {
        validate_key_to_path(e, item, &path.child("items").index(i));
    }
}

pub(super) fn validate_key_to_path(e: &mut ErrorList, item: &Value, path: &Path) {
    required(e, item, path, "key");
    required(e, item, path, "path");
    validate_non_reserved_path(e, &path.child("path"), item.text("path"));
    validate_file_mode(e, item, path, "mode");
}

fn csi(e: &mut ErrorList, source: &Value, path: &Path) {
    validate_driver_name(source.text("driver"), &path.child("driver"), e);
    if source.has("nodePublishSecretRef") {
        match source.at("nodePublishSecretRef").text("name") {
            "" => e.required(&path.child("nodePublishSecretRef.name"), ""),
            // Upstream's path is one level higher.
            name => validate_name(e, &path.child("name"), name, names::dns1123_subdomain),
        }
    }
}

fn ephemeral(e: &mut ErrorList, source: &Value, path: &Path) {
    let template = source.at("volumeClaimTemplate");
    let at = path.child("volumeClaimTemplate");
    if template.is_null() {
        return e.required(&at, "");
    }
    template_meta(e, template.at("metadata"), &at.child("metadata"));
    validate_claim_spec(e, template.at("spec"), &at.child("spec"));
}

/// Validates the metadata of a claim template: only labels and annotations are allowed.
fn template_meta(e: &mut ErrorList, metadata: &Value, path: &Path) {
    meta::validate_annotations(metadata.at("annotations"), &path.child("annotations"), e);
    meta::validate_labels(metadata.at("labels"), &path.child("labels"), e);
    const FORBIDDEN_FIELDS: &[(&str, &str)] = &[
        ("name", "name"),
        ("generateName", "generateName"),
        ("namespace", "namespace"),
        ("selfLink", "selfLink"),
        ("uid", "uID"),
        ("resourceVersion", "resourceVersion"),
        ("generation", "generation"),
        ("creationTimestamp", "creationTimestamp"),
        ("deletionTimestamp", "deletionTimestamp"),
        ("deletionGracePeriodSeconds", "deletionGracePeriodSeconds"),
        ("ownerReferences", "ownerReferences"),
        ("finalizers", "finalizers"),
        ("managedFields", "managedFields"),
    ];
    for (field, shown) in FORBIDDEN_FIELDS {
        let value = metadata.at(field);
        if !value.is_null() && value != "" && value != 0 {
            e.forbidden(&path.child(shown), "cannot be set");
        }
    }
}

/// Validates the spec of a claim template.
pub(crate) fn validate_claim_spec(e: &mut ErrorList, spec: &Value, path: &Path) {
    const MODES: &[&str] = &["ReadOnlyMany", "ReadWriteMany", "ReadWriteOnce", "ReadWriteOncePod"];
    let modes = spec.items("accessModes");
    let at = path.child("accessModes");
    if modes.is_empty() {
        e.required(&at, "at least 1 access mode is required");
    }
    meta::validate_label_selector(
        spec.at("selector"),
        &path.child("selector"),
        meta::SelectorOptions::default(),
        e,
    );
    for mode in modes.iter().filter_map(Value::as_str).filter(|mode| !MODES.contains(mode)) {
        e.not_supported(&at, mode, MODES);
    }
    let once_pod = |mode: &&Value| mode.as_str() == Some("ReadWriteOncePod");
    let others =
        modes.iter().filter_map(Value::as_str).any(|m| m != "ReadWriteOncePod" && MODES.contains(&m));
    if modes.iter().any(|mode| once_pod(&mode)) && others {
        e.forbidden(&at, "may not use ReadWriteOncePod with other access modes");
    }
    let at = path.child("resources").key("storage");
    match Quantity::from_value(spec.path("resources.requests.storage")) {
        None => e.required(&at, ""),
        Some(size) if !size.is_positive() => {
            e.invalid(&at, size.to_string(), super::rules::NOT_POSITIVE_MESSAGE);
        }
        Some(_) => {}
    }
    for field in ["storageClassName", "volumeAttributesClassName"] {
        let class = spec.text(field);
        if field == "volumeAttributesClassName" {
            optional_one_of(e, spec, path, "volumeMode", &["Block", "Filesystem"]);
            data_sources(e, spec, path);
        }
        if !class.is_empty() {
            validate_name(e, &path.child(field), class, names::dns1123_subdomain);
        }
    }
}

fn data_sources(e: &mut ErrorList, spec: &Value, path: &Path) {
    let (old, new) = (spec.at("dataSource"), spec.at("dataSourceRef"));
    for (field, source) in [("dataSource", old), ("dataSourceRef", new)] {
        if source.is_null() {
            continue;
        }
        let at = path.child(field);
        required(e, source, &at, "name");
        required(e, source, &at, "kind");
        let (group, kind) = (source.text("apiGroup"), source.text("kind"));
        if group.is_empty() && kind != "PersistentVolumeClaim" {
            let message = "must be 'PersistentVolumeClaim' when referencing the default apiGroup";
            e.invalid(&at, kind, message);
        }
        if !group.is_empty() {
            validate_name(e, &at.child("apiGroup"), group, names::dns1123_subdomain);
        }
        let namespace = source.text("namespace");
        if field == "dataSourceRef" && !namespace.is_empty() {
            validate_name(e, &at.child("namespace"), namespace, names::dns1123_label);
        }
    }
    // Upstream prints the path itself, which is an object without exported fields.
    if !new.text("namespace").is_empty() {
        if !old.is_null() {
            invalid_as(e, path, "{}", "may not be specified when dataSourceRef.namespace is specified");
        }
    } else if !old.is_null() && !new.is_null() {
        let same = ["apiGroup", "kind", "name"].iter().all(|field| old.text(field) == new.text(field));
        if !same {
            invalid_as(e, path, "{}", "must match dataSourceRef");
        }
    }
}
