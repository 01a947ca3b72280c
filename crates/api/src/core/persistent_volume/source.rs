//! The volume source of a PersistentVolume: exactly one of them.

use serde_json::Value;

use crate::core::pod::rules::validate_no_parent_refs;
use crate::core::rules;
use crate::core::volume_source::{self as shared, VolumeSourceRule, source};
use crate::field::{ErrorList, Path};
use crate::json::JsonExt;
use crate::storage::csi_driver::validate_driver_name;
use crate::{meta, names};

/// In upstream's order.
const SOURCES: &[VolumeSourceRule] = &[
    shared::HOST_PATH,
    shared::GCE_DISK,
    shared::AWS_DISK,
    shared::GLUSTERFS.rule(glusterfs),
    shared::FLOCKER,
    shared::NFS,
    shared::RBD,
    shared::QUOBYTE,
    shared::CEPHFS,
    shared::ISCSI.rule(|e, source, at| shared::validate_iscsi(e, source, at, iscsi_name, &["name"])),
    shared::CINDER.rule(|e, source, at| shared::validate_secret_ref(e, source, at, &["name", "namespace"])),
    shared::FC,
    shared::FLEX,
    shared::AZURE_FILE.rule(azure_file),
    shared::VSPHERE,
    shared::PHOTON_DISK,
    shared::PORTWORX,
    shared::AZURE_DISK,
    shared::SCALE_IO,
    source("local", &["path"]).rule(local),
    shared::STORAGE_OS
        .rule(|e, source, at| shared::validate_storage_os(e, source, at, &["name", "namespace"])),
    source("csi", &[]).rule(csi),
];

/// Validates that there is exactly one source and that it is valid.
pub(super) fn validate_source(spec: &Value, name: &str, path: &Path, errors: &mut ErrorList) {
    let mut found = false;
    for source in SOURCES.iter().filter(|source| spec.has(source.field)) {
        if found && source.field != "flexVolume" {
            errors.forbidden(&path.child(source.conflict_field), shared::MULTIPLE_SOURCES);
            continue;
        }
        found = true;
        let value = spec.at(source.field);
        let at = path.child(source.error_field);
        source.required(errors, value, &at);
        if source.field == "iscsi" && shared::iscsi_name_too_long(value, name) {
            errors.invalid(
                &at.child("targetportal"),
                value.text("targetPortal"),
                shared::ISCSI_NAME_TOO_LONG,
            );
        }
        (source.rule)(errors, value, &at);
        if source.field == "local" && !spec.has("nodeAffinity") {
            errors.required(&path.child("nodeAffinity"), "Local volume requires node affinity");
        }
    }
    if !found {
        errors.required(path, "must specify a volume type");
    }
    let root = spec.at("hostPath").text("path").split('/').all(|part| matches!(part, "" | "."))
        && spec.at("hostPath").text("path").starts_with('/');
    if root && spec.text("persistentVolumeReclaimPolicy") == "Recycle" {
        let path = path.child("persistentVolumeReclaimPolicy");
        errors.forbidden(&path, "may not be 'recycle' for a hostPath mount of '/'");
    }
}

/// Whether the source is unchanged. `controllerExpandSecretRef` may be added to a CSI volume.
pub(super) fn same_source(after: &Value, before: &Value) -> bool {
    SOURCES.iter().all(|source| {
        let (mut new, old) = (after.at(source.field).clone(), before.at(source.field));
        let field = "controllerExpandSecretRef";
        if source.field == "csi" && !old.is_null() && !old.has(field) {
            new.as_object_mut().map(|csi| csi.remove(field));
        }
        meta::semantic_equal(&new, old) && new.is_null() == old.is_null()
    })
}

/// The source of a volume spec.
pub(super) fn source_of(spec: &Value) -> Value {
    let sources = SOURCES.iter().filter(|source| spec.has(source.field));
    sources.map(|source| (source.field.to_owned(), spec.at(source.field).clone())).collect()
}

fn local(errors: &mut ErrorList, source: &Value, path: &Path) {
    validate_no_parent_refs(errors, &path.child("path"), source.text("path"));
}

fn glusterfs(errors: &mut ErrorList, source: &Value, path: &Path) {
    let at = path.child("endpointsNamespace");
    match source.at("endpointsNamespace").as_str() {
        Some("") => {
            errors.invalid(&at, "", "if the endpointnamespace is set, it must be a valid namespace name");
        }
        Some(namespace) => rules::validate_name(namespace, names::dns1123_label, &at, errors),
        None => {}
    }
}

/// Upstream has the same message for all invalid names here.
fn iscsi_name(name: &str) -> Result<(), &'static str> {
    shared::validate_initiator_name(name).map_err(|_| "must be valid format")
}

fn azure_file(errors: &mut ErrorList, source: &Value, path: &Path) {
    if source.at("secretNamespace").as_str() == Some("") {
        errors.required(&path.child("secretNamespace"), "");
    }
}

fn csi(errors: &mut ErrorList, source: &Value, path: &Path) {
    validate_driver_name(source.text("driver"), &path.child("driver"), errors);
    if source.text("volumeHandle").is_empty() {
        errors.required(&path.child("volumeHandle"), "");
    }
    for field in [
        "controllerPublishSecretRef",
        "controllerExpandSecretRef",
        "nodePublishSecretRef",
        "nodeExpandSecretRef",
    ] {
        let secret = source.at(field);
        if secret.is_null() {
            continue;
        }
        let path = path.child(field);
        rules::validate_required_name(
            secret.text("name"),
            names::dns1123_subdomain,
            &path.child("name"),
            errors,
        );
        let namespace = secret.text("namespace");
        rules::validate_required_name(namespace, names::dns1123_label, &path.child("namespace"), errors);
    }
}
