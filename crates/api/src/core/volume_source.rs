//! Validation of the volume sources that both Pods and PersistentVolumes support. Most of them are
//! legacy. Each source is a constant here; Pods and PersistentVolumes list them in different orders.

use serde_json::Value;

use crate::core::pod::rules::{
    optional_one_of, required, validate_label, validate_no_parent_refs, validate_range,
};
use crate::core::rules::is_empty;
use crate::field::{ErrorList, Path};
use crate::json::JsonExt;

pub(crate) const MULTIPLE_SOURCES: &str = "may not specify more than 1 volume type";

pub(crate) type SourceValidator = fn(&mut ErrorList, &Value, &Path);

/// The validation of a volume source.
pub(crate) struct VolumeSourceRule {
    pub field: &'static str,
    /// Upstream's field name in errors about more than one source.
    pub conflict_field: &'static str,
    /// Upstream's field name in errors inside the source.
    pub error_field: &'static str,
    required: &'static [&'static str],
    pub rule: SourceValidator,
}

pub(crate) const fn source(field: &'static str, required: &'static [&'static str]) -> VolumeSourceRule {
    VolumeSourceRule { field, conflict_field: field, error_field: field, required, rule: |_, _, _| {} }
}

impl VolumeSourceRule {
    pub const fn with_conflict_field(mut self, name: &'static str) -> VolumeSourceRule {
        self.conflict_field = name;
        self
    }

    const fn with_error_field(mut self, name: &'static str) -> VolumeSourceRule {
        self.error_field = name;
        self
    }

    pub const fn rule(mut self, rule: SourceValidator) -> VolumeSourceRule {
        self.rule = rule;
        self
    }

    pub fn required(&self, e: &mut ErrorList, source: &Value, path: &Path) {
        for field in self.required.iter().filter(|field| is_empty(source.at(field))) {
            e.required(&path.child(field), "");
        }
    }
}

pub(crate) const HOST_PATH: VolumeSourceRule = source("hostPath", &["path"]).rule(host_path);
pub(crate) const GCE_DISK: VolumeSourceRule =
    source("gcePersistentDisk", &["pdName"]).with_error_field("persistentDisk").rule(partition);
pub(crate) const AWS_DISK: VolumeSourceRule = source("awsElasticBlockStore", &["volumeID"]).rule(partition);
pub(crate) const GLUSTERFS: VolumeSourceRule = source("glusterfs", &["endpoints", "path"]);
pub(crate) const FLOCKER: VolumeSourceRule = source("flocker", &[]).rule(flocker);
pub(crate) const NFS: VolumeSourceRule = source("nfs", &["server", "path"]).rule(nfs);
pub(crate) const RBD: VolumeSourceRule = source("rbd", &["monitors", "image"]);
pub(crate) const QUOBYTE: VolumeSourceRule = source("quobyte", &[]).rule(quobyte);
pub(crate) const CEPHFS: VolumeSourceRule = source("cephfs", &["monitors"]).with_conflict_field("cephFS");
pub(crate) const ISCSI: VolumeSourceRule = source("iscsi", &["targetPortal"]);
pub(crate) const CINDER: VolumeSourceRule = source("cinder", &["volumeID"]);
pub(crate) const FC: VolumeSourceRule = source("fc", &[]).rule(fc);
pub(crate) const FLEX: VolumeSourceRule = source("flexVolume", &["driver"]).rule(flex);
pub(crate) const AZURE_FILE: VolumeSourceRule = source("azureFile", &["secretName", "shareName"]);
pub(crate) const VSPHERE: VolumeSourceRule = source("vsphereVolume", &["volumePath"]);
pub(crate) const PHOTON_DISK: VolumeSourceRule = source("photonPersistentDisk", &["pdID"]);
pub(crate) const PORTWORX: VolumeSourceRule = source("portworxVolume", &["volumeID"]);
pub(crate) const AZURE_DISK: VolumeSourceRule =
    source("azureDisk", &["diskName", "diskURI"]).rule(azure_disk);
pub(crate) const SCALE_IO: VolumeSourceRule = source("scaleIO", &["gateway", "system", "volumeName"]);
pub(crate) const STORAGE_OS: VolumeSourceRule = source("storageos", &[]);

/// Validates the required fields of an optional `secretRef`. In a PersistentVolume it also has a namespace.
pub(crate) fn validate_secret_ref(e: &mut ErrorList, source: &Value, path: &Path, fields: &[&str]) {
    if source.has("secretRef") {
        for field in fields {
            required(e, source.at("secretRef"), &path.child("secretRef"), field);
        }
    }
}

pub(crate) const ISCSI_NAME_TOO_LONG: &str = "Total length of <volume name>:<iscsi.targetPortal> must be under 64 characters if iscsi.initiatorName is specified.";

/// Whether the initiator name would exceed the limit with the names of volume and portal.
pub(crate) fn iscsi_name_too_long(source: &Value, volume: &str) -> bool {
    source.has("initiatorName") && volume.len() + 1 + source.text("targetPortal").len() > 64
}

/// `is_name` validates the names of initiator and target; `secret` are the required fields of a `secretRef`.
pub(crate) fn validate_iscsi(
    e: &mut ErrorList,
    source: &Value,
    path: &Path,
    validate_name: fn(&str) -> Result<(), &'static str>,
    secret_fields: &[&str],
) {
    let check_name = |e: &mut ErrorList, name: &str, field| {
        if let Err(message) = validate_name(name) {
            e.invalid(&path.child(field), name, message);
        }
    };
    match source.text("iqn") {
        "" => e.required(&path.child("iqn"), ""),
        iqn => check_name(e, iqn, "iqn"),
    }
    validate_range(e, &path.child("lun"), source.int("lun").unwrap_or(0), 0, 255);
    if (source.flag("chapAuthDiscovery") || source.flag("chapAuthSession")) && !source.has("secretRef") {
        e.required(&path.child("secretRef"), "");
    }
    validate_secret_ref(e, source, path, secret_fields);
    if let Some(initiator) = source.at("initiatorName").as_str() {
        check_name(e, initiator, "initiatorname");
    }
}

pub(crate) fn validate_storage_os(e: &mut ErrorList, source: &Value, path: &Path, secret_fields: &[&str]) {
    match source.text("volumeName") {
        "" => e.required(&path.child("volumeName"), ""),
        name => validate_label(e, &path.child("volumeName"), name),
    }
    let namespace = source.text("volumeNamespace");
    if !namespace.is_empty() {
        validate_label(e, &path.child("volumeNamespace"), namespace);
    }
    validate_secret_ref(e, source, path, secret_fields);
}

fn host_path(e: &mut ErrorList, source: &Value, path: &Path) {
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
    let target = source.text("path");
    if !target.is_empty() {
        validate_no_parent_refs(e, &path.child("path"), target);
        optional_one_of(e, source, path, "type", TYPES);
    }
}

/// Zero is allowed in spite of the message: it means the whole disk.
fn partition(e: &mut ErrorList, source: &Value, path: &Path) {
    if let Some(partition) = source.int("partition").filter(|number| *number != 0) {
        validate_range(e, &path.child("partition"), partition, 1, 255);
    }
}

fn nfs(e: &mut ErrorList, source: &Value, path: &Path) {
    let target = source.text("path");
    if !target.starts_with('/') {
        e.invalid(&path.child("path"), target, "must be an absolute path");
    }
}

fn flocker(e: &mut ErrorList, source: &Value, path: &Path) {
    let (name, uuid) = (source.text("datasetName"), source.text("datasetUUID"));
    if name.is_empty() && uuid.is_empty() {
        e.required(path, "one of datasetName and datasetUUID is required");
    }
    if !name.is_empty() && !uuid.is_empty() {
        e.invalid(path, "resource", "datasetName and datasetUUID can not be specified simultaneously");
    }
    if name.contains('/') {
        e.invalid(&path.child("datasetName"), name, "must not contain '/'");
    }
}

fn quobyte(e: &mut ErrorList, source: &Value, path: &Path) {
    const HOST_PORT_PAIRS: &str = "must be a host:port pair or multiple pairs separated by commas";
    let registry = source.text("registry");
    if registry.is_empty() {
        e.required(&path.child("registry"), HOST_PORT_PAIRS);
    } else if source.text("tenant").len() >= 65 {
        let message = "must be a UUID and may not exceed a length of 64 characters";
        e.required(&path.child("tenant"), message);
    } else {
        for _ in registry.split(',').filter(|pair| !pair.contains(':')) {
            e.invalid(&path.child("registry"), registry, HOST_PORT_PAIRS);
        }
    }
    required(e, source, path, "volume");
}

fn fc(e: &mut ErrorList, source: &Value, path: &Path) {
    let (targets, ids) = (source.items("targetWWNs"), source.items("wwids"));
    let at = path.child("targetWWNs");
    if targets.is_empty() && ids.is_empty() {
        e.required(&at, "must specify either targetWWNs or wwids, but not both");
    }
    if !targets.is_empty() && !ids.is_empty() {
        let message = "targetWWNs and wwids can not be specified simultaneously";
        e.invalid(&at, source.at("targetWWNs").clone(), message);
    }
    if !targets.is_empty() {
        match source.int("lun") {
            None => e.required(&path.child("lun"), "lun is required if targetWWNs is specified"),
            Some(lun) => validate_range(e, &path.child("lun"), lun, 0, 255),
        }
    }
}

fn flex(e: &mut ErrorList, source: &Value, path: &Path) {
    for (key, _) in source.entries("options") {
        let namespace = key.split_once('/').map_or(key, |(namespace, _)| namespace);
        let namespace = format!(".{}", namespace.to_lowercase());
        if namespace.ends_with(".kubernetes.io") || namespace.ends_with(".k8s.io") {
            let message = "kubernetes.io and k8s.io namespaces are reserved";
            e.invalid(&path.child("options").key(key), key, message);
        }
    }
}

fn azure_disk(e: &mut ErrorList, source: &Value, path: &Path) {
    optional_one_of(e, source, path, "cachingMode", &["None", "ReadOnly", "ReadWrite"]);
    optional_one_of(e, source, path, "kind", &["Dedicated", "Managed", "Shared"]);
    let uri = source.text("diskURI");
    match source.at("kind").as_str() {
        Some("Managed") if !uri.starts_with("/subscriptions/") => e.not_supported(
            &path.child("diskURI"),
            uri,
            &["/subscriptions/{sub-id}/resourcegroups/{group-name}/providers/microsoft.compute/disks/{disk-id}"],
        ),
        Some(kind) if kind != "Managed" && !uri.starts_with("https://") => e.not_supported(
            &path.child("diskURI"),
            uri,
            &["https://{account-name}.blob.core.windows.net/{container-name}/{disk-name}.vhd"],
        ),
        _ => {}
    }
}

pub(crate) fn validate_initiator_name(name: &str) -> Result<(), &'static str> {
    // The two numeric forms have one arbitrary character after the prefix.
    let id = |length: usize| {
        let mut chars = name.chars().skip(3);
        chars.next().is_some() && chars.clone().count() == length && chars.all(|c| c.is_ascii_alphanumeric())
    };
    let good = match name.get(..3) {
        Some("iqn") => is_iqn(name),
        Some("eui") => id(16),
        Some("naa") => id(32),
        _ => return Err("must be valid format starting with iqn, eui, or naa"),
    };
    if good { Ok(()) } else { Err("must be valid format") }
}

/// `iqn.2001-04.com.example:storage.disk1`: date, reversed domain, name.
fn is_iqn(name: &str) -> bool {
    let digits = |part: &str, n: usize| part.len() == n && part.bytes().all(|b| b.is_ascii_digit());
    let Some((date, rest)) = name.strip_prefix("iqn.").and_then(|rest| rest.split_once('.')) else {
        return false;
    };
    let Some((domain, tail)) = rest.split_once(':') else { return false };
    date.split_once('-').is_some_and(|(year, month)| digits(year, 4) && digits(month, 2))
        && !domain.is_empty()
        && domain.bytes().all(|b| b.is_ascii_alphanumeric() || b == b'-' || b == b'.')
        && !tail.is_empty()
        && !tail.contains([',', ';', '*', '&', '$', '|', ' ', '\t', '\n', '\r', '\u{c}'])
}

#[cfg(test)]
mod tests {
    use super::*;

    #[track_caller]
    fn check(name: &str, expected: Result<(), &'static str>) {
        assert_eq!(validate_initiator_name(name), expected, "{name}");
    }

    #[test]
    fn validates_initiator_names() {
        check("iqn.2001-04.com.example:storage.disk1", Ok(()));
        check("eui.0123456789abcdef", Ok(()));
        check("naa.0123456789abcdef0123456789abcdef", Ok(()));
        check("iqn.2001-04.com.example", Err("must be valid format"));
        check("iqn.2001-04.com.example:a b", Err("must be valid format"));
        check("iqn.01-04.com.example:a", Err("must be valid format"));
        check("eui.0123", Err("must be valid format"));
        check("disk1", Err("must be valid format starting with iqn, eui, or naa"));
        check("", Err("must be valid format starting with iqn, eui, or naa"));
    }
}
