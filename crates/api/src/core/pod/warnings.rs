//! Warnings about pods and pod templates: deprecated, ignored or ambiguous fields.

use std::collections::{BTreeMap, BTreeSet};

use serde_json::Value;

use super::prepare::app_armor_from_annotation;
use super::rules::{all_containers, annotation, ip_warning};
use super::security;
use crate::field::{Path, quote};
use crate::json::JsonExt;
use crate::node::deprecated_label_warning;
use crate::quantity::Quantity;

const REQUIRED: &str = "requiredDuringSchedulingIgnoredDuringExecution";
const PREFERRED: &str = "preferredDuringSchedulingIgnoredDuringExecution";

/// Warnings about a new pod. Its AppArmor annotations have already been converted to fields.
pub(super) fn for_pod(pod: &Value) -> Vec<String> {
    let mut found = for_spec(pod.at("metadata"), pod.at("spec"), &Path::root(), false);
    found.extend(pod_app_armor_warnings(pod));
    found
}

/// Warnings about the pod template at `path`.
pub(crate) fn for_template(template: &Value, path: &Path) -> Vec<String> {
    for_spec(template.at("metadata"), template.at("spec"), path, true)
}

fn for_spec(metadata: &Value, spec: &Value, path: &Path, is_template: bool) -> Vec<String> {
    let mut found = Vec::new();
    let at = path.child("spec");
    for (key, _) in spec.entries("nodeSelector") {
        found.extend(
            deprecated_label_warning(key)
                .map(|warning| format!("{}: {warning}", at.child("nodeSelector").key(key))),
        );
    }
    node_affinity(&mut found, spec.path("affinity.nodeAffinity"), &at.child("affinity.nodeAffinity"));
    for (i, constraint) in spec.items("topologySpreadConstraints").iter().enumerate() {
        let at = at.child("topologySpreadConstraints").index(i);
        let key = constraint.text("topologyKey");
        found.extend(
            deprecated_label_warning(key)
                .map(|warning| format!("{}: {key} is {warning}", at.child("topologyKey"))),
        );
        null_selector(&mut found, constraint, &at);
    }
    for (key, warning) in DEPRECATED_ANNOTATIONS {
        if annotation(metadata, key).is_some() {
            found.push(format!("{}: {warning}", path.child("metadata.annotations").key(key)));
        }
    }
    volumes(&mut found, spec, &at.child("volumes"));
    super::volume_overlap::warnings(&mut found, spec.items("volumes"));
    duplicate_names(&mut found, spec, &at, "hostAliases", "ip");
    duplicate_names(&mut found, spec, &at, "imagePullSecrets", "name");
    for (i, secret) in spec.items("imagePullSecrets").iter().enumerate() {
        if secret.text("name").is_empty() {
            let at = at.child("imagePullSecrets").index(i).child("name");
            found.push(format!("{at}: invalid empty name \"\""));
        }
    }
    fractional_byte_values(&mut found, spec, "overhead", &at);
    let pod_key = security::seccomp_pod_annotation();
    if spec.path("securityContext.seccompProfile").is_null() && annotation(metadata, pod_key).is_some() {
        found.push(seccomp(path, pod_key));
    }
    for (container_at, container) in all_containers(spec, &at) {
        let key = security::seccomp_container_annotation(container);
        if container.path("securityContext.seccompProfile").is_null() && annotation(metadata, &key).is_some()
        {
            found.push(seccomp(path, &key));
        }
        if is_template {
            found.extend(container_app_armor_warning(metadata, spec, container, path));
        }
        for name in ["memory", "ephemeral-storage"] {
            for list in ["limits", "requests"] {
                let value = container.at("resources").at(list).get(name);
                found.extend(fractional_byte_value(
                    value,
                    &container_at.child("resources").child(list).key(name),
                ));
            }
        }
        duplicate_env_vars(&mut found, container, &container_at.child("env"));
    }
    duplicate_ports(&mut found, spec, &at);
    if spec.int("terminationGracePeriodSeconds").is_some_and(|grace| grace < 0) {
        let at = at.child("terminationGracePeriodSeconds");
        found.push(format!("{at}: must be >= 0; negative values are invalid and will be treated as 1"));
    }
    for side in ["podAffinity", "podAntiAffinity"] {
        let (rules, at) = (spec.at("affinity").at(side), at.child("affinity").child(side));
        for (i, term) in rules.items(REQUIRED).iter().enumerate() {
            null_selector(&mut found, term, &at.child(REQUIRED).index(i));
        }
        for (i, term) in rules.items(PREFERRED).iter().enumerate() {
            let at = at.child(PREFERRED).index(i).child("podAffinityTerm");
            null_selector(&mut found, term.at("podAffinityTerm"), &at);
        }
    }
    for (i, server) in spec.at("dnsConfig").items("nameservers").iter().enumerate() {
        found.extend(ip_warning(&at.child("dnsConfig.nameservers").index(i), server.as_str().unwrap_or("")));
    }
    for (i, alias) in spec.items("hostAliases").iter().enumerate() {
        found.extend(ip_warning(&at.child("hostAliases").index(i).child("ip"), alias.text("ip")));
    }
    found
}

const DEPRECATED_ANNOTATIONS: &[(&str, &str)] = &[
    (
        "scheduler.alpha.kubernetes.io/critical-pod",
        "non-functional in v1.16+; use the \"priorityClassName\" field instead",
    ),
    ("security.alpha.kubernetes.io/sysctls", "non-functional in v1.11+; use the \"sysctls\" field instead"),
    (
        "security.alpha.kubernetes.io/unsafe-sysctls",
        "non-functional in v1.11+; use the \"sysctls\" field instead",
    ),
];

fn node_affinity(found: &mut Vec<String>, affinity: &Value, path: &Path) {
    let mut term = |term: &Value, at: Path, check_values: bool| {
        for (i, expression) in term.items("matchExpressions").iter().enumerate() {
            let at = at.child("matchExpressions").index(i);
            let key = expression.text("key");
            found.extend(
                deprecated_label_warning(key)
                    .map(|warning| format!("{}: {key} is {warning}", at.child("key"))),
            );
            for (j, value) in expression.items("values").iter().enumerate().filter(|_| check_values) {
                let value = value.as_str().unwrap_or("");
                for message in crate::names::label_value(value) {
                    found.push(format!("{}: {value} is invalid, {message}", at.child("values").index(j)));
                }
            }
        }
    };
    let at = path.child(REQUIRED).child("nodeSelectorTerms");
    for (i, one) in affinity.at(REQUIRED).items("nodeSelectorTerms").iter().enumerate() {
        term(one, at.index(i), false);
    }
    for (i, one) in affinity.items(PREFERRED).iter().enumerate() {
        term(one.at("preference"), path.child(PREFERRED).index(i).child("preference"), true);
    }
}

fn null_selector(found: &mut Vec<String>, term: &Value, path: &Path) {
    if !term.has("labelSelector") {
        found.push(format!(
            "{}: a null labelSelector results in matching no pod",
            path.child("labelSelector")
        ));
    }
}

/// Deprecated volume sources: the field, its name in the warning, and the status.
const DEPRECATED_SOURCES: &[(&str, &str, &str)] = &[
    ("photonPersistentDisk", "photonPersistentDisk", "deprecated in v1.11, non-functional in v1.16+"),
    ("gitRepo", "gitRepo", "deprecated in v1.11, and disabled by default in v1.33+"),
    ("scaleIO", "scaleIO", "deprecated in v1.16, non-functional in v1.22+"),
    ("flocker", "flocker", "deprecated in v1.22, non-functional in v1.25+"),
    ("storageos", "storageOS", "deprecated in v1.22, non-functional in v1.25+"),
    ("quobyte", "quobyte", "deprecated in v1.22, non-functional in v1.25+"),
    ("glusterfs", "glusterfs", "deprecated in v1.25, non-functional in v1.26+"),
    ("cephfs", "cephfs", "deprecated in v1.28, non-functional in v1.31+"),
    ("rbd", "rbd", "deprecated in v1.28, non-functional in v1.31+"),
];

fn volumes(found: &mut Vec<String>, spec: &Value, path: &Path) {
    for (i, volume) in spec.items("volumes").iter().enumerate() {
        let at = path.index(i);
        for (field, shown, warning) in DEPRECATED_SOURCES {
            if volume.has(field) {
                found.push(format!("{}: {warning}", at.child(shown)));
            }
        }
        let claim = volume.path("ephemeral.volumeClaimTemplate.spec");
        found.extend(for_claim(claim, &at.child("ephemeral.volumeClaimTemplate.spec")));
    }
}

/// Warnings about a claim spec.
pub(crate) fn for_claim(spec: &Value, path: &Path) -> Vec<String> {
    let lists = ["requests", "limits"].into_iter();
    lists
        .filter_map(|list| {
            let value = spec.at("resources").at(list).get("storage");
            fractional_byte_value(value, &path.child("resources").child(list).key("storage"))
        })
        .collect()
}

fn fractional_byte_values(found: &mut Vec<String>, object: &Value, field: &str, path: &Path) {
    for name in ["memory", "ephemeral-storage"] {
        found.extend(fractional_byte_value(object.at(field).get(name), &path.child(field).key(name)));
    }
}

fn fractional_byte_value(value: Option<&Value>, path: &Path) -> Option<String> {
    let value = Quantity::from_value(value?).filter(|value| !value.is_whole())?;
    Some(format!("{path}: fractional byte value \"{value}\" is invalid, must be an integer"))
}

fn duplicate_names(found: &mut Vec<String>, spec: &Value, path: &Path, list: &str, field: &str) {
    let mut seen = BTreeSet::new();
    for (i, item) in spec.items(list).iter().enumerate() {
        let value = item.text(field);
        if !seen.insert(value) {
            found.push(format!(
                "{}: duplicate {field} {}",
                path.child(list).index(i).child(field),
                quote(value)
            ));
        }
    }
}

fn seccomp(path: &Path, key: &str) -> String {
    let at = path.child("metadata.annotations").key(key);
    format!("{at}: non-functional in v1.27+; use the \"seccompProfile\" field instead")
}

fn app_armor_deprecated(path: &Path, key: &str) -> String {
    let at = path.child("metadata.annotations").key(key);
    format!("{at}: deprecated since v1.30; use the \"appArmorProfile\" field instead")
}

fn container_app_armor_warning(
    metadata: &Value,
    spec: &Value,
    container: &Value,
    path: &Path,
) -> Option<String> {
    let key = security::app_armor_annotation(container);
    let annotation_value = annotation(metadata, &key)?;
    let own = spec.path("securityContext.appArmorProfile");
    let is_set = !container.path("securityContext.appArmorProfile").is_null()
        || (!own.is_null() && app_armor_from_annotation(annotation_value).as_ref() == Some(own));
    (!is_set).then(|| app_armor_deprecated(path, &key))
}

/// Valid annotations have been converted to fields, so a field that equals its annotation came from it,
/// unless the client set both.
fn pod_app_armor_warnings(pod: &Value) -> Vec<String> {
    let (metadata, spec) = (pod.at("metadata"), pod.at("spec"));
    if spec.at("os").text("name") == "windows" {
        return Vec::new();
    }
    let own = spec.path("securityContext.appArmorProfile");
    all_containers(spec, &Path::root())
        .iter()
        .filter_map(|(_, container)| {
            let key = security::app_armor_annotation(container);
            let field = app_armor_from_annotation(annotation(metadata, &key)?);
            let profile = container.path("securityContext.appArmorProfile");
            let should_warn = match &field {
                None => profile.is_null(),
                Some(field) => field != own && field == profile,
            };
            should_warn.then(|| app_armor_deprecated(&Path::root(), &key))
        })
        .collect()
}

fn duplicate_env_vars(found: &mut Vec<String>, container: &Value, path: &Path) {
    let mut seen = BTreeSet::new();
    for (i, var) in container.items("env").iter().enumerate() {
        let (name, value) = (var.text("name"), var.text("value"));
        if seen.insert(name) {
            continue;
        }
        // A definition that extends the previous value is intended.
        let reference = format!("$({name})");
        if var.has("valueFrom") || value == reference || !value.contains(&reference) {
            found.push(format!(
                "{}: hides previous definition of {}, which may be dropped when using apply",
                path.index(i),
                quote(name)
            ));
        }
    }
}

/// The maximum number of ports with the same number that a port is compared with. The comparison is
/// quadratic.
const MAX_CHECKED_PORTS: usize = 16;

fn duplicate_ports(found: &mut Vec<String>, spec: &Value, path: &Path) {
    let mut by_port: BTreeMap<(i64, &str), Vec<(Path, &Value)>> = BTreeMap::new();
    let mut by_name: BTreeMap<&str, Path> = BTreeMap::new();
    let mut names = Vec::new();
    for (at, container) in all_containers(spec, path) {
        for (i, port) in container.items("ports").iter().enumerate() {
            let at = at.child("ports").index(i);
            let host = |port: &Value| port.int("hostPort").unwrap_or(0);
            if !port.text("hostIP").is_empty() && host(port) == 0 {
                found.push(format!(
                    "{at}: hostIP set without hostPort: {{Name:{} HostPort:0 ContainerPort:{} Protocol:{} HostIP:{}}}",
                    port.text("name"),
                    port.int("containerPort").unwrap_or(0),
                    port.text("protocol"),
                    port.text("hostIP")
                ));
            }
            let key = (port.int("containerPort").unwrap_or(0), port.text("protocol"));
            let others = by_port.entry(key).or_default();
            for (other_at, other) in others.iter().take(MAX_CHECKED_PORTS) {
                let (ip, other_ip) = (port.text("hostIP"), other.text("hostIP"));
                let word = if ip == other_ip && host(port) == host(other) {
                    "duplicate"
                } else if host(port) == 0 || host(other) == 0 {
                    "overlapping"
                } else if host(port) == host(other) && ip.is_empty() != other_ip.is_empty() {
                    "dangerously ambiguous"
                } else {
                    continue;
                };
                found.push(format!("{at}: {word} port definition with {other_at}"));
            }
            others.push((at.clone(), port));
            let name = port.text("name");
            if name.is_empty() {
                continue;
            }
            if let Some(other) = by_name.get(name) {
                names.push(format!(
                    "{at}: duplicate port name {} with {other}, services and probes that select ports by name will use {other}",
                    quote(name)
                ));
            } else {
                by_name.insert(name, at);
            }
        }
    }
    found.extend(names);
}
