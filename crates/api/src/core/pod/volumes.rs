//! Volumes: exactly one source each, and what each source asks for.

use std::collections::{BTreeMap, BTreeSet};

use serde_json::Value;

use super::containers::PULL_POLICIES;
use super::projected;
use super::rules::{
    descending_path, file_mode, invalid_as, label, named, one_of, required, required_one_of, unreserved_path,
};
use crate::core::volume_source::{self as shared, Source, source};
use crate::field::{Errors, Path};
use crate::json::Json;
use crate::quantity::Quantity;
use crate::storage::csi_driver::driver_name;
use crate::{meta, names};

/// Checks the volumes and returns those without a fault, by name.
pub(super) fn volumes<'a>(
    e: &mut Errors,
    spec: &'a Value,
    pod: Option<&Value>,
    path: &Path,
    is_pod: bool,
) -> BTreeMap<&'a str, &'a Value> {
    let volumes = spec.items("volumes");
    let pod_name = pod.map_or("", |meta| meta.text("name"));
    let made: BTreeSet<String> = volumes
        .iter()
        .filter(|volume| !pod_name.is_empty() && volume.has("ephemeral"))
        .map(|volume| format!("{pod_name}-{}", volume.text("name")))
        .collect();
    let mut good = BTreeMap::new();
    for (i, volume) in volumes.iter().enumerate() {
        let at = path.index(i);
        let name = volume.text("name");
        let before = e.0.len();
        check_source(e, volume, &at, pod_name, is_pod);
        match name {
            "" => e.required(&at.at("name"), ""),
            _ => label(e, &at.at("name"), name),
        }
        if good.contains_key(name) {
            e.duplicate(&at.at("name"), name);
        }
        if e.0.len() == before {
            good.insert(name, volume);
        }
        let claim = volume.at("persistentVolumeClaim").text("claimName");
        if made.contains(claim) {
            e.invalid(
                &at.at("persistentVolumeClaim.claimName"),
                claim,
                "must not reference a PVC that gets created for an ephemeral volume",
            );
        }
    }
    good
}

/// In the order upstream looks for them.
const SOURCES: &[Source] = &[
    source("emptyDir", &[]).rule(empty_dir),
    shared::HOST_PATH,
    source("gitRepo", &["repository"]).rule(git_repo),
    shared::GCE_DISK,
    shared::AWS_DISK,
    source("secret", &["secretName"]).rule(keyed_files),
    shared::NFS,
    shared::ISCSI.rule(|e, source, at| shared::iscsi(e, source, at, shared::initiator, &[])),
    shared::GLUSTERFS,
    shared::FLOCKER,
    source("persistentVolumeClaim", &["claimName"]),
    shared::RBD,
    shared::CINDER.rule(|e, source, at| shared::secret_ref(e, source, at, &["name"])),
    shared::CEPHFS,
    shared::QUOBYTE,
    source("downwardAPI", &[]).outside("downwarAPI").rule(projected::downward_api),
    shared::FC,
    shared::FLEX,
    source("configMap", &["name"]).rule(keyed_files),
    shared::AZURE_FILE,
    shared::VSPHERE,
    shared::PHOTON_DISK,
    shared::PORTWORX,
    shared::AZURE_DISK,
    shared::STORAGE_OS.rule(|e, source, at| shared::storage_os(e, source, at, &["name"])),
    source("projected", &[]).rule(projected::projected),
    shared::SCALE_IO,
    source("csi", &[]).rule(csi),
    source("ephemeral", &[]).rule(ephemeral),
    source("image", &[]),
];

fn check_source(e: &mut Errors, volume: &Value, path: &Path, pod_name: &str, is_pod: bool) {
    let name = volume.text("name");
    let mut found = false;
    for kind in SOURCES.iter().filter(|kind| volume.has(kind.field)) {
        let source = volume.at(kind.field);
        if found {
            e.forbidden(&path.at(kind.outside), shared::MORE_THAN_ONE);
        } else {
            found = true;
            let at = path.at(kind.inside);
            kind.required(e, source, &at);
            (kind.rule)(e, source, &at);
            match kind.field {
                "ephemeral" if !pod_name.is_empty() && !name.is_empty() => {
                    let claim = format!("{pod_name}-{name}");
                    for message in names::dns1123_subdomain(&claim) {
                        e.invalid(&path.at("name"), name, &format!("PVC name {claim:?}: {message}"));
                    }
                }
                "image" => {
                    // Templates may leave the reference to whoever fills them in.
                    if is_pod {
                        required(e, source, &at, "reference");
                    }
                    required_one_of(e, source, &at, "pullPolicy", PULL_POLICIES);
                }
                _ => {}
            }
        }
        if kind.field == "iscsi" && shared::iscsi_name_too_long(source, name) {
            e.invalid(&path.at("name"), name, shared::ISCSI_NAME_TOO_LONG);
        }
    }
    if !found {
        e.required(path, "must specify a volume type");
    }
}

fn empty_dir(e: &mut Errors, source: &Value, path: &Path) {
    if Quantity::read(source.at("sizeLimit")).is_some_and(|size| size.is_negative()) {
        e.forbidden(&path.at("sizeLimit"), "SizeLimit field must be a valid resource quantity");
    }
}

fn git_repo(e: &mut Errors, source: &Value, path: &Path) {
    descending_path(e, &path.at("directory"), source.text("directory"));
}

fn keyed_files(e: &mut Errors, source: &Value, path: &Path) {
    file_mode(e, source, path, "defaultMode");
    for (i, item) in source.items("items").iter().enumerate() {
        key_to_path(e, item, &path.at("items").index(i));
    }
}

pub(super) fn key_to_path(e: &mut Errors, item: &Value, path: &Path) {
    required(e, item, path, "key");
    required(e, item, path, "path");
    unreserved_path(e, &path.at("path"), item.text("path"));
    file_mode(e, item, path, "mode");
}

fn csi(e: &mut Errors, source: &Value, path: &Path) {
    driver_name(source.text("driver"), &path.at("driver"), e);
    if source.has("nodePublishSecretRef") {
        match source.at("nodePublishSecretRef").text("name") {
            "" => e.required(&path.at("nodePublishSecretRef.name"), ""),
            // Upstream reports it one level up.
            name => named(e, &path.at("name"), name, names::dns1123_subdomain),
        }
    }
}

fn ephemeral(e: &mut Errors, source: &Value, path: &Path) {
    let template = source.at("volumeClaimTemplate");
    let at = path.at("volumeClaimTemplate");
    if template.is_null() {
        return e.required(&at, "");
    }
    template_meta(e, template.at("metadata"), &at.at("metadata"));
    claim_spec(e, template.at("spec"), &at.at("spec"));
}

/// Metadata of an object made from a template: labels and annotations, nothing else.
fn template_meta(e: &mut Errors, metadata: &Value, path: &Path) {
    meta::annotations(metadata.at("annotations"), &path.at("annotations"), e);
    meta::labels(metadata.at("labels"), &path.at("labels"), e);
    const OTHERS: &[(&str, &str)] = &[
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
    for (field, shown) in OTHERS {
        let value = metadata.at(field);
        if !value.is_null() && value != "" && value != 0 {
            e.forbidden(&path.at(shown), "cannot be set");
        }
    }
}

/// The spec of a claim that a template makes.
pub(crate) fn claim_spec(e: &mut Errors, spec: &Value, path: &Path) {
    const MODES: &[&str] = &["ReadOnlyMany", "ReadWriteMany", "ReadWriteOnce", "ReadWriteOncePod"];
    let modes = spec.items("accessModes");
    let at = path.at("accessModes");
    if modes.is_empty() {
        e.required(&at, "at least 1 access mode is required");
    }
    meta::label_selector(spec.at("selector"), &path.at("selector"), meta::SelectorOptions::default(), e);
    for mode in modes.iter().filter_map(Value::as_str).filter(|mode| !MODES.contains(mode)) {
        e.not_supported(&at, mode, MODES);
    }
    let once_pod = |mode: &&Value| mode.as_str() == Some("ReadWriteOncePod");
    let others =
        modes.iter().filter_map(Value::as_str).any(|m| m != "ReadWriteOncePod" && MODES.contains(&m));
    if modes.iter().any(|mode| once_pod(&mode)) && others {
        e.forbidden(&at, "may not use ReadWriteOncePod with other access modes");
    }
    let at = path.at("resources").key("storage");
    match Quantity::read(spec.path("resources.requests.storage")) {
        None => e.required(&at, ""),
        Some(size) if !size.is_positive() => {
            e.invalid(&at, size.to_string(), super::rules::NOT_POSITIVE);
        }
        Some(_) => {}
    }
    for field in ["storageClassName", "volumeAttributesClassName"] {
        let class = spec.text(field);
        if field == "volumeAttributesClassName" {
            one_of(e, spec, path, "volumeMode", &["Block", "Filesystem"]);
            data_sources(e, spec, path);
        }
        if !class.is_empty() {
            named(e, &path.at(field), class, names::dns1123_subdomain);
        }
    }
}

fn data_sources(e: &mut Errors, spec: &Value, path: &Path) {
    let (old, new) = (spec.at("dataSource"), spec.at("dataSourceRef"));
    for (field, source) in [("dataSource", old), ("dataSourceRef", new)] {
        if source.is_null() {
            continue;
        }
        let at = path.at(field);
        required(e, source, &at, "name");
        required(e, source, &at, "kind");
        let (group, kind) = (source.text("apiGroup"), source.text("kind"));
        if group.is_empty() && kind != "PersistentVolumeClaim" {
            let words = "must be 'PersistentVolumeClaim' when referencing the default apiGroup";
            e.invalid(&at, kind, words);
        }
        if !group.is_empty() {
            named(e, &at.at("apiGroup"), group, names::dns1123_subdomain);
        }
        let namespace = source.text("namespace");
        if field == "dataSourceRef" && !namespace.is_empty() {
            named(e, &at.at("namespace"), namespace, names::dns1123_label);
        }
    }
    // The value shown is the path itself, an object without visible fields.
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
