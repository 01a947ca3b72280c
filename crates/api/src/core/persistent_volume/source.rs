//! Where a volume's bytes are: one of many kinds of storage, most of them history.

use serde_json::Value;

use crate::core::rules;
use crate::field::{Errors, Path};
use crate::json::Json;
use crate::storage::csi_driver::driver_name;
use crate::{meta, names};

/// A kind of storage.
struct Source {
    field: &'static str,
    /// What upstream calls the field when there is more than one kind, and when it complains inside.
    shown: [&'static str; 2],
    required: &'static [&'static str],
    more: fn(&Value, &str, &Path, &mut Errors),
}

const fn source(field: &'static str, required: &'static [&'static str]) -> Source {
    Source { field, shown: [field, field], required, more: |_, _, _, _| {} }
}

impl Source {
    const fn shown(mut self, shown: [&'static str; 2]) -> Source {
        self.shown = shown;
        self
    }

    const fn more(mut self, more: fn(&Value, &str, &Path, &mut Errors)) -> Source {
        self.more = more;
        self
    }
}

/// In the order upstream looks for them.
const SOURCES: &[Source] = &[
    source("hostPath", &["path"]).more(host_path),
    source("gcePersistentDisk", &["pdName"]).shown(["gcePersistentDisk", "persistentDisk"]).more(partition),
    source("awsElasticBlockStore", &["volumeID"]).more(partition),
    source("glusterfs", &["endpoints", "path"]).more(glusterfs),
    source("flocker", &[]).more(flocker),
    source("nfs", &["server", "path"]).more(nfs),
    source("rbd", &["monitors", "image"]),
    source("quobyte", &[]).more(quobyte),
    source("cephfs", &["monitors"]).shown(["cephFS", "cephfs"]),
    source("iscsi", &["targetPortal"]).more(iscsi),
    source("cinder", &["volumeID"]).more(secret_ref),
    source("fc", &[]).more(fc),
    source("flexVolume", &["driver"]).more(flex),
    source("azureFile", &["secretName", "shareName"]).more(azure_file),
    source("vsphereVolume", &["volumePath"]),
    source("photonPersistentDisk", &["pdID"]),
    source("portworxVolume", &["volumeID"]),
    source("azureDisk", &["diskName", "diskURI"]).more(azure_disk),
    source("scaleIO", &["gateway", "system", "volumeName"]),
    source("local", &["path"]).more(local),
    source("storageos", &[]).more(storage_os),
    source("csi", &[]).more(csi),
];

/// Exactly one source, and a good one.
pub(super) fn check(spec: &Value, name: &str, path: &Path, errors: &mut Errors) {
    let mut found = false;
    for source in SOURCES.iter().filter(|source| spec.has(source.field)) {
        let [outside, inside] = source.shown;
        if found && source.field != "flexVolume" {
            errors.forbidden(&path.at(outside), "may not specify more than 1 volume type");
            continue;
        }
        found = true;
        let value = spec.at(source.field);
        let at = path.at(inside);
        for field in source.required.iter().filter(|field| rules::is_empty(value.at(field))) {
            errors.required(&at.at(field), "");
        }
        (source.more)(value, name, &at, errors);
        if source.field == "local" && !spec.has("nodeAffinity") {
            errors.required(&path.at("nodeAffinity"), "Local volume requires node affinity");
        }
    }
    if !found {
        errors.required(path, "must specify a volume type");
    }
    let root = spec.at("hostPath").text("path").split('/').all(|part| matches!(part, "" | "."))
        && spec.at("hostPath").text("path").starts_with('/');
    if root && spec.text("persistentVolumeReclaimPolicy") == "Recycle" {
        let path = path.at("persistentVolumeReclaimPolicy");
        errors.forbidden(&path, "may not be 'recycle' for a hostPath mount of '/'");
    }
}

/// Whether the source is the same; a CSI volume may still be given the secret it is expanded with.
pub(super) fn same(after: &Value, before: &Value) -> bool {
    SOURCES.iter().all(|source| {
        let (mut new, old) = (after.at(source.field).clone(), before.at(source.field));
        let field = "controllerExpandSecretRef";
        if source.field == "csi" && !old.is_null() && !old.has(field) {
            new.as_object_mut().map(|csi| csi.remove(field));
        }
        meta::same(&new, old) && new.is_null() == old.is_null()
    })
}

/// The part of the spec that is a source.
pub(super) fn of(spec: &Value) -> Value {
    let sources = SOURCES.iter().filter(|source| spec.has(source.field));
    sources.map(|source| (source.field.to_owned(), spec.at(source.field).clone())).collect()
}

fn no_backsteps(text: &str, path: &Path, errors: &mut Errors) {
    if text.split('/').any(|part| part == "..") {
        errors.invalid(path, text, "must not contain '..'");
    }
}

fn in_range(value: Option<i64>, low: i64, path: &Path, errors: &mut Errors) {
    if let Some(value) = value.filter(|value| !(0..=255).contains(value)) {
        errors.invalid(path, value, &format!("must be between {low} and 255, inclusive"));
    }
}

fn host_path(source: &Value, _: &str, path: &Path, errors: &mut Errors) {
    const TYPES: &[&str] = &[
        "",
        "BlockDevice",
        "CharDevice",
        "Directory",
        "DirectoryOrCreate",
        "File",
        "FileOrCreate",
        "Socket",
    ];
    if source.text("path").is_empty() {
        return;
    }
    no_backsteps(source.text("path"), &path.at("path"), errors);
    rules::one_of_if_set(source.at("type"), TYPES, &path.at("type"), errors);
}

fn local(source: &Value, _: &str, path: &Path, errors: &mut Errors) {
    no_backsteps(source.text("path"), &path.at("path"), errors);
}

fn partition(source: &Value, _: &str, path: &Path, errors: &mut Errors) {
    in_range(source.int("partition"), 1, &path.at("partition"), errors);
}

fn nfs(source: &Value, _: &str, path: &Path, errors: &mut Errors) {
    if !source.text("path").starts_with('/') {
        errors.invalid(&path.at("path"), source.text("path"), "must be an absolute path");
    }
}

fn glusterfs(source: &Value, _: &str, path: &Path, errors: &mut Errors) {
    let at = path.at("endpointsNamespace");
    match source.at("endpointsNamespace").as_str() {
        Some("") => {
            errors.invalid(&at, "", "if the endpointnamespace is set, it must be a valid namespace name");
        }
        Some(namespace) => rules::name(namespace, names::dns1123_label, &at, errors),
        None => {}
    }
}

fn flocker(source: &Value, _: &str, path: &Path, errors: &mut Errors) {
    let (name, uuid) = (source.text("datasetName"), source.text("datasetUUID"));
    if name.is_empty() && uuid.is_empty() {
        errors.required(path, "one of datasetName and datasetUUID is required");
    }
    if !name.is_empty() && !uuid.is_empty() {
        errors.invalid(path, "resource", "datasetName and datasetUUID can not be specified simultaneously");
    }
    if name.contains('/') {
        errors.invalid(&path.at("datasetName"), name, "must not contain '/'");
    }
}

fn quobyte(source: &Value, _: &str, path: &Path, errors: &mut Errors) {
    let registry = source.text("registry");
    let pairs = "must be a host:port pair or multiple pairs separated by commas";
    if registry.is_empty() {
        errors.required(&path.at("registry"), pairs);
    } else if source.text("tenant").len() >= 65 {
        let detail = "must be a UUID and may not exceed a length of 64 characters";
        errors.required(&path.at("tenant"), detail);
    } else {
        for _ in registry.split(',').filter(|pair| !pair.contains(':')) {
            errors.invalid(&path.at("registry"), registry, pairs);
        }
    }
    if source.text("volume").is_empty() {
        errors.required(&path.at("volume"), "");
    }
}

fn iscsi(source: &Value, name: &str, path: &Path, errors: &mut Errors) {
    let (portal, iqn) = (source.text("targetPortal"), source.text("iqn"));
    let initiator = source.at("initiatorName").as_str();
    if initiator.is_some() && name.len() + 1 + portal.len() > 64 {
        let detail = "Total length of <volume name>:<iscsi.targetPortal> must be under 64 characters if iscsi.initiatorName is specified.";
        errors.invalid(&path.at("targetportal"), portal, detail);
    }
    if iqn.is_empty() {
        errors.required(&path.at("iqn"), "");
    } else if !is_iscsi_name(iqn) {
        errors.invalid(&path.at("iqn"), iqn, "must be valid format");
    }
    in_range(source.int("lun"), 0, &path.at("lun"), errors);
    let secret = source.at("secretRef");
    if (source.flag("chapAuthDiscovery") || source.flag("chapAuthSession")) && secret.is_null() {
        errors.required(&path.at("secretRef"), "");
    }
    if !secret.is_null() && secret.text("name").is_empty() {
        errors.required(&path.at("secretRef.name"), "");
    }
    if let Some(initiator) = initiator.filter(|initiator| !is_iscsi_name(initiator)) {
        errors.invalid(&path.at("initiatorname"), initiator, "must be valid format");
    }
}

/// `iqn.2020-01.com.example:disk`, `eui.` and 16 hexadecimal digits, or `naa.` and 32.
fn is_iscsi_name(name: &str) -> bool {
    let hex = |text: &str, len: usize| text.len() == len && text.bytes().all(|b| b.is_ascii_alphanumeric());
    if let Some(rest) = name.strip_prefix("iqn.") {
        let (date, authority) = (rest.get(..7).unwrap_or(""), rest.get(7..).unwrap_or(""));
        let digits = |text: &str| text.bytes().all(|b| b.is_ascii_digit());
        return date.split_once('-').is_some_and(|(year, month)| {
            year.len() == 4 && month.len() == 2 && digits(year) && digits(month)
        }) && authority.strip_prefix('.').is_some_and(|authority| !authority.is_empty());
    }
    name.strip_prefix("eui.").is_some_and(|rest| hex(rest, 16))
        || name.strip_prefix("naa.").is_some_and(|rest| hex(rest, 32))
}

fn secret_ref(source: &Value, _: &str, path: &Path, errors: &mut Errors) {
    let secret = source.at("secretRef");
    if secret.is_null() {
        return;
    }
    for field in ["name", "namespace"].iter().filter(|field| secret.text(field).is_empty()) {
        errors.required(&path.at("secretRef").at(field), "");
    }
}

fn fc(source: &Value, _: &str, path: &Path, errors: &mut Errors) {
    let (targets, ids) = (source.items("targetWWNs"), source.items("wwids"));
    let at = path.at("targetWWNs");
    if targets.is_empty() && ids.is_empty() {
        errors.required(&at, "must specify either targetWWNs or wwids, but not both");
    }
    if !targets.is_empty() && !ids.is_empty() {
        let detail = "targetWWNs and wwids can not be specified simultaneously";
        errors.invalid(&at, source.at("targetWWNs").clone(), detail);
    }
    if !targets.is_empty() {
        if source.has("lun") {
            in_range(source.int("lun"), 0, &path.at("lun"), errors);
        } else {
            errors.required(&path.at("lun"), "lun is required if targetWWNs is specified");
        }
    }
}

fn flex(source: &Value, _: &str, path: &Path, errors: &mut Errors) {
    for (key, _) in source.entries("options") {
        let domain = format!(".{}", key.split_once('/').map_or(key, |(domain, _)| domain).to_lowercase());
        if domain.ends_with(".kubernetes.io") || domain.ends_with(".k8s.io") {
            let detail = "kubernetes.io and k8s.io namespaces are reserved";
            errors.invalid(&path.at("options").key(key), key, detail);
        }
    }
}

fn azure_file(source: &Value, _: &str, path: &Path, errors: &mut Errors) {
    if source.at("secretNamespace").as_str() == Some("") {
        errors.required(&path.at("secretNamespace"), "");
    }
}

fn azure_disk(source: &Value, _: &str, path: &Path, errors: &mut Errors) {
    const MANAGED: &str =
        "/subscriptions/{sub-id}/resourcegroups/{group-name}/providers/microsoft.compute/disks/{disk-id}";
    const BLOB: &str = "https://{account-name}.blob.core.windows.net/{container-name}/{disk-name}.vhd";
    let modes = &["None", "ReadOnly", "ReadWrite"];
    rules::one_of_if_set(source.at("cachingMode"), modes, &path.at("cachingMode"), errors);
    let kinds = &["Dedicated", "Managed", "Shared"];
    rules::one_of_if_set(source.at("kind"), kinds, &path.at("kind"), errors);
    let uri = source.text("diskURI");
    let wanted = match source.at("kind").as_str() {
        Some("Managed") if !uri.starts_with("/subscriptions/") => MANAGED,
        Some(kind) if kind != "Managed" && !uri.starts_with("https://") => BLOB,
        _ => return,
    };
    errors.not_supported(&path.at("diskURI"), uri, &[wanted]);
}

fn storage_os(source: &Value, name: &str, path: &Path, errors: &mut Errors) {
    let volume = source.text("volumeName");
    rules::required_name(volume, names::dns1123_label, &path.at("volumeName"), errors);
    let namespace = source.text("volumeNamespace");
    if !namespace.is_empty() {
        rules::name(namespace, names::dns1123_label, &path.at("volumeNamespace"), errors);
    }
    secret_ref(source, name, path, errors);
}

fn csi(source: &Value, _: &str, path: &Path, errors: &mut Errors) {
    driver_name(source.text("driver"), &path.at("driver"), errors);
    if source.text("volumeHandle").is_empty() {
        errors.required(&path.at("volumeHandle"), "");
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
        let path = path.at(field);
        rules::required_name(secret.text("name"), names::dns1123_subdomain, &path.at("name"), errors);
        let namespace = secret.text("namespace");
        rules::required_name(namespace, names::dns1123_label, &path.at("namespace"), errors);
    }
}
