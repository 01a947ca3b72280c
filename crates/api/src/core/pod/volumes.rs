//! Volumes: exactly one source each, and what each source asks for.

use std::collections::{BTreeMap, BTreeSet};

use serde_json::Value;

use super::containers::PULL_POLICIES;
use super::projected;
use super::rules::{
    descending_path, file_mode, in_range, invalid_as, label, named, no_backsteps, one_of, required,
    required_one_of, unreserved_path,
};
use crate::field::{Errors, Path};
use crate::json::Json;
use crate::quantity::Quantity;
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
        source(e, volume, &at, pod_name, is_pod);
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

type SourceRule = fn(&mut Errors, &Value, &Path);

/// The sources in upstream's order: field, the name a second source is refused under, its rules.
const SOURCES: &[(&str, &str, SourceRule)] = &[
    ("emptyDir", "emptyDir", empty_dir),
    ("hostPath", "hostPath", host_path),
    ("gitRepo", "gitRepo", git_repo),
    ("gcePersistentDisk", "gcePersistentDisk", gce_disk),
    ("awsElasticBlockStore", "awsElasticBlockStore", aws_disk),
    ("secret", "secret", secret),
    ("nfs", "nfs", nfs),
    ("iscsi", "iscsi", iscsi),
    ("glusterfs", "glusterfs", |e, source, at| all_required(e, source, at, &["endpoints", "path"])),
    ("flocker", "flocker", flocker),
    ("persistentVolumeClaim", "persistentVolumeClaim", |e, source, at| {
        all_required(e, source, at, &["claimName"]);
    }),
    ("rbd", "rbd", rbd),
    ("cinder", "cinder", |e, source, at| {
        all_required(e, source, at, &["volumeID"]);
        secret_ref(e, source, at);
    }),
    ("cephfs", "cephFS", |e, source, at| monitors(e, source, at)),
    ("quobyte", "quobyte", quobyte),
    ("downwardAPI", "downwarAPI", projected::downward_api),
    ("fc", "fc", fibre_channel),
    ("flexVolume", "flexVolume", flex),
    ("configMap", "configMap", config_map),
    ("azureFile", "azureFile", |e, source, at| all_required(e, source, at, &["secretName", "shareName"])),
    ("vsphereVolume", "vsphereVolume", |e, source, at| all_required(e, source, at, &["volumePath"])),
    ("photonPersistentDisk", "photonPersistentDisk", |e, source, at| all_required(e, source, at, &["pdID"])),
    ("portworxVolume", "portworxVolume", |e, source, at| all_required(e, source, at, &["volumeID"])),
    ("azureDisk", "azureDisk", azure_disk),
    ("storageos", "storageos", storage_os),
    ("projected", "projected", projected::projected),
    ("scaleIO", "scaleIO", |e, source, at| all_required(e, source, at, &["gateway", "system", "volumeName"])),
    ("csi", "csi", csi),
    ("ephemeral", "ephemeral", ephemeral),
    ("image", "image", |_, _, _| {}),
];

fn source(e: &mut Errors, volume: &Value, path: &Path, pod_name: &str, is_pod: bool) {
    let name = volume.text("name");
    let mut found = false;
    for (field, shown, rule) in SOURCES {
        if !volume.has(field) {
            continue;
        }
        let source = volume.at(field);
        if found {
            e.forbidden(&path.at(shown), "may not specify more than 1 volume type");
        } else {
            found = true;
            rule(e, source, &path.at(if *field == "gcePersistentDisk" { "persistentDisk" } else { field }));
            match *field {
                "ephemeral" if !pod_name.is_empty() && !name.is_empty() => {
                    let claim = format!("{pod_name}-{name}");
                    for message in names::dns1123_subdomain(&claim) {
                        e.invalid(&path.at("name"), name, &format!("PVC name {claim:?}: {message}"));
                    }
                }
                "image" => {
                    // Templates may leave the reference to whoever fills them in.
                    if is_pod {
                        required(e, source, &path.at("image"), "reference");
                    }
                    required_one_of(e, source, &path.at("image"), "pullPolicy", PULL_POLICIES);
                }
                _ => {}
            }
        }
        if *field == "iscsi"
            && source.has("initiatorName")
            && name.len() + 1 + source.text("targetPortal").len() > 64
        {
            e.invalid(
                &path.at("name"),
                name,
                "Total length of <volume name>:<iscsi.targetPortal> must be under 64 characters if iscsi.initiatorName is specified.",
            );
        }
    }
    if !found {
        e.required(path, "must specify a volume type");
    }
}

fn all_required(e: &mut Errors, source: &Value, path: &Path, fields: &[&str]) {
    for field in fields {
        required(e, source, path, field);
    }
}

fn secret_ref(e: &mut Errors, source: &Value, path: &Path) {
    if source.has("secretRef") {
        required(e, source.at("secretRef"), &path.at("secretRef"), "name");
    }
}

fn empty_dir(e: &mut Errors, source: &Value, path: &Path) {
    if Quantity::read(source.at("sizeLimit")).is_some_and(|size| size.is_negative()) {
        e.forbidden(&path.at("sizeLimit"), "SizeLimit field must be a valid resource quantity");
    }
}

fn host_path(e: &mut Errors, source: &Value, path: &Path) {
    let target = source.text("path");
    if target.is_empty() {
        return e.required(&path.at("path"), "");
    }
    no_backsteps(e, &path.at("path"), target);
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
    one_of(e, source, path, "type", TYPES);
}

fn git_repo(e: &mut Errors, source: &Value, path: &Path) {
    required(e, source, path, "repository");
    descending_path(e, &path.at("directory"), source.text("directory"));
}

/// Zero is allowed all the same: it means the whole disk.
const PARTITION: &str = "must be between 1 and 255, inclusive";

fn gce_disk(e: &mut Errors, source: &Value, path: &Path) {
    disk(e, source, path, "pdName");
}

fn aws_disk(e: &mut Errors, source: &Value, path: &Path) {
    disk(e, source, path, "volumeID");
}

fn disk(e: &mut Errors, source: &Value, path: &Path, name: &str) {
    required(e, source, path, name);
    let partition = source.int("partition").unwrap_or(0);
    if !(0..=255).contains(&partition) {
        e.invalid(&path.at("partition"), partition, PARTITION);
    }
}

fn secret(e: &mut Errors, source: &Value, path: &Path) {
    required(e, source, path, "secretName");
    keyed_files(e, source, path);
}

fn config_map(e: &mut Errors, source: &Value, path: &Path) {
    required(e, source, path, "name");
    keyed_files(e, source, path);
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

fn nfs(e: &mut Errors, source: &Value, path: &Path) {
    all_required(e, source, path, &["server", "path"]);
    let target = source.text("path");
    if !target.starts_with('/') {
        e.invalid(&path.at("path"), target, "must be an absolute path");
    }
}

fn iscsi(e: &mut Errors, source: &Value, path: &Path) {
    required(e, source, path, "targetPortal");
    match source.text("iqn") {
        "" => e.required(&path.at("iqn"), ""),
        iqn => initiator(e, iqn, &path.at("iqn")),
    }
    in_range(e, &path.at("lun"), source.int("lun").unwrap_or(0), 0, 255);
    if (source.flag("chapAuthDiscovery") || source.flag("chapAuthSession")) && !source.has("secretRef") {
        e.required(&path.at("secretRef"), "");
    }
    if let Some(name) = source.at("initiatorName").as_str() {
        initiator(e, name, &path.at("initiatorname"));
    }
}

fn initiator(e: &mut Errors, name: &str, path: &Path) {
    // One character of any sort follows the prefix of the two numeric forms.
    let id = |length: usize| {
        let mut chars = name.chars().skip(3);
        chars.next().is_some() && chars.clone().count() == length && chars.all(|c| c.is_ascii_alphanumeric())
    };
    let good = match name.get(..3) {
        Some("iqn") => is_iqn(name),
        Some("eui") => id(16),
        Some("naa") => id(32),
        _ => return e.invalid(path, name, "must be valid format starting with iqn, eui, or naa"),
    };
    if !good {
        e.invalid(path, name, "must be valid format");
    }
}

/// `iqn.2001-04.com.example:storage.disk1`: a date, a reversed domain, a name.
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

fn flocker(e: &mut Errors, source: &Value, path: &Path) {
    let (name, uuid) = (source.text("datasetName"), source.text("datasetUUID"));
    if name.is_empty() && uuid.is_empty() {
        e.required(path, "one of datasetName and datasetUUID is required");
    }
    if !name.is_empty() && !uuid.is_empty() {
        e.invalid(path, "resource", "datasetName and datasetUUID can not be specified simultaneously");
    }
    if name.contains('/') {
        e.invalid(&path.at("datasetName"), name, "must not contain '/'");
    }
}

fn monitors(e: &mut Errors, source: &Value, path: &Path) {
    if source.items("monitors").is_empty() {
        e.required(&path.at("monitors"), "");
    }
}

fn rbd(e: &mut Errors, source: &Value, path: &Path) {
    monitors(e, source, path);
    required(e, source, path, "image");
}

fn quobyte(e: &mut Errors, source: &Value, path: &Path) {
    const PAIRS: &str = "must be a host:port pair or multiple pairs separated by commas";
    let registry = source.text("registry");
    if registry.is_empty() {
        e.required(&path.at("registry"), PAIRS);
    } else if source.text("tenant").len() >= 65 {
        let words = "must be a UUID and may not exceed a length of 64 characters";
        e.required(&path.at("tenant"), words);
    } else {
        for _ in registry.split(',').filter(|pair| !pair.contains(':')) {
            e.invalid(&path.at("registry"), registry, PAIRS);
        }
    }
    required(e, source, path, "volume");
}

fn fibre_channel(e: &mut Errors, source: &Value, path: &Path) {
    let (targets, ids) = (source.items("targetWWNs"), source.items("wwids"));
    let at = path.at("targetWWNs");
    if targets.is_empty() && ids.is_empty() {
        e.required(&at, "must specify either targetWWNs or wwids, but not both");
    }
    if !targets.is_empty() && !ids.is_empty() {
        let words = "targetWWNs and wwids can not be specified simultaneously";
        e.invalid(&at, source.at("targetWWNs").clone(), words);
    }
    if !targets.is_empty() {
        match source.int("lun") {
            None => e.required(&path.at("lun"), "lun is required if targetWWNs is specified"),
            Some(lun) => in_range(e, &path.at("lun"), lun, 0, 255),
        }
    }
}

fn flex(e: &mut Errors, source: &Value, path: &Path) {
    required(e, source, path, "driver");
    for (key, _) in source.entries("options") {
        let namespace = key.split_once('/').map_or(key, |(namespace, _)| namespace);
        let namespace = format!(".{}", namespace.to_lowercase());
        if namespace.ends_with(".kubernetes.io") || namespace.ends_with(".k8s.io") {
            let words = "kubernetes.io and k8s.io namespaces are reserved";
            e.invalid(&path.at("options").key(key), key, words);
        }
    }
}

fn azure_disk(e: &mut Errors, source: &Value, path: &Path) {
    all_required(e, source, path, &["diskName", "diskURI"]);
    one_of(e, source, path, "cachingMode", &["None", "ReadOnly", "ReadWrite"]);
    one_of(e, source, path, "kind", &["Dedicated", "Managed", "Shared"]);
    let uri = source.text("diskURI");
    match source.at("kind").as_str() {
        Some("Managed") if !uri.starts_with("/subscriptions/") => e.not_supported(
            &path.at("diskURI"),
            uri,
            &["/subscriptions/{sub-id}/resourcegroups/{group-name}/providers/microsoft.compute/disks/{disk-id}"],
        ),
        Some(kind) if kind != "Managed" && !uri.starts_with("https://") => e.not_supported(
            &path.at("diskURI"),
            uri,
            &["https://{account-name}.blob.core.windows.net/{container-name}/{disk-name}.vhd"],
        ),
        _ => {}
    }
}

fn storage_os(e: &mut Errors, source: &Value, path: &Path) {
    match source.text("volumeName") {
        "" => e.required(&path.at("volumeName"), ""),
        name => label(e, &path.at("volumeName"), name),
    }
    let namespace = source.text("volumeNamespace");
    if !namespace.is_empty() {
        label(e, &path.at("volumeNamespace"), namespace);
    }
    secret_ref(e, source, path);
}

fn csi(e: &mut Errors, source: &Value, path: &Path) {
    let driver = source.text("driver");
    if driver.is_empty() {
        e.required(&path.at("driver"), "");
    } else {
        if driver.len() > 63 {
            e.too_long(&path.at("driver"), 63);
        }
        named(e, &path.at("driver"), driver, |driver| names::dns1123_subdomain(&driver.to_lowercase()));
    }
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
        all_required(e, source, &at, &["name", "kind"]);
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
