//! Validates environment variables and their value sources.

use std::collections::BTreeMap;

use serde_json::Value;

use super::rules::{required, validate_label, validate_name, validate_no_parent_refs, validate_subdomain};
use crate::field::{ErrorList, Path};
use crate::json::JsonExt;
use crate::names;
use crate::quantity::Quantity;

pub(super) fn validate_env(e: &mut ErrorList, vars: &[Value], path: &Path) {
    for (i, var) in vars.iter().enumerate() {
        let at = path.index(i);
        match var.text("name") {
            "" => e.required(&at.child("name"), ""),
            name => validate_name(e, &at.child("name"), name, names::env_var_name),
        }
        if var.has("valueFrom") {
            value_from(e, var, &at.child("valueFrom"));
        }
    }
}

fn value_from(e: &mut ErrorList, var: &Value, path: &Path) {
    type SourceRule = fn(&mut ErrorList, &Value, &Path);
    const SOURCES: [(&str, SourceRule); 5] = [
        ("fieldRef", |e, source, at| validate_field_ref(e, source, at, ENV_FIELDS)),
        ("resourceFieldRef", |e, source, at| validate_resource_field_ref(e, source, at, false)),
        ("configMapKeyRef", key_ref),
        ("secretKeyRef", key_ref),
        ("fileKeyRef", file_key_ref),
    ];
    let from = var.at("valueFrom");
    let mut sources = 0;
    for (field, check) in SOURCES {
        if from.has(field) {
            sources += 1;
            check(e, from.at(field), &path.child(field));
        }
    }
    if sources == 0 {
        e.invalid(
            path,
            "",
            "must specify one of: `fieldRef`, `resourceFieldRef`, `configMapKeyRef`, `secretKeyRef` or `fileKeyRef`",
        );
    } else if !var.text("value").is_empty() {
        e.invalid(path, "", "may not be specified when `value` is not empty");
    } else if sources > 1 {
        e.invalid(path, "", "may not have more than one field specified at a time");
    }
}

pub(super) fn validate_env_from(e: &mut ErrorList, sources: &[Value], path: &Path) {
    for (i, source) in sources.iter().enumerate() {
        let at = path.index(i);
        let prefix = source.text("prefix");
        if !prefix.is_empty() {
            validate_name(e, &at.child("prefix"), prefix, names::env_var_name);
        }
        let mut count = 0;
        for field in ["configMapRef", "secretRef"] {
            if source.has(field) {
                count += 1;
                match source.at(field).text("name") {
                    "" => e.required(&at.child(field).child("name"), ""),
                    name => validate_name(e, &at.child(field).child("name"), name, |name| {
                        // Upstream checks these names as prefixes, which may end with a dash.
                        names::dns1123_subdomain(&replace_trailing_dash(name))
                    }),
                }
            }
        }
        if count == 0 {
            e.invalid(path, "", "must specify one of: `configMapRef` or `secretRef`");
        } else if count > 1 {
            e.invalid(path, "", "may not have more than one field specified at a time");
        }
    }
}

fn replace_trailing_dash(name: &str) -> String {
    match name.strip_suffix('-') {
        Some(rest) if !rest.is_empty() => format!("{rest}a"),
        _ => name.to_owned(),
    }
}

const ENV_FIELDS: &[&str] = &[
    "metadata.name",
    "metadata.namespace",
    "metadata.uid",
    "spec.nodeName",
    "spec.serviceAccountName",
    "status.hostIP",
    "status.hostIPs",
    "status.podIP",
    "status.podIPs",
];

pub(super) const VOLUME_FIELDS: &[&str] =
    &["metadata.annotations", "metadata.labels", "metadata.name", "metadata.namespace", "metadata.uid"];

/// The pod fields that the downward API supports both in variables and in volumes.
const POD_FIELDS: &[&str] = &[
    "metadata.annotations",
    "metadata.labels",
    "metadata.name",
    "metadata.namespace",
    "metadata.uid",
    "spec.nodeName",
    "spec.restartPolicy",
    "spec.serviceAccountName",
    "spec.schedulerName",
    "status.phase",
    "status.hostIP",
    "status.hostIPs",
    "status.podIP",
    "status.podIPs",
];

pub(super) fn validate_field_ref(e: &mut ErrorList, source: &Value, path: &Path, allowed: &[&str]) {
    let (version, field_path) = (source.text("apiVersion"), source.text("fieldPath"));
    if version.is_empty() {
        return e.required(&path.child("apiVersion"), "");
    }
    if field_path.is_empty() {
        return e.required(&path.child("fieldPath"), "");
    }
    let invalid_field_path = |e: &mut ErrorList, detail: &str| {
        e.invalid(&path.child("fieldPath"), field_path, &format!("error converting fieldPath: {detail}"));
    };
    if version != "v1" {
        return invalid_field_path(e, &format!("unsupported pod version: {version}"));
    }
    if let Some((base, key)) = split_key(field_path) {
        return match base {
            "metadata.annotations" => {
                let key = key.to_lowercase();
                validate_name(e, path, &key, names::qualified_name);
            }
            "metadata.labels" => validate_name(e, path, key, names::qualified_name),
            _ => invalid_field_path(e, &format!("field label does not support subscript: {field_path}")),
        };
    }
    let field = if field_path == "spec.host" { "spec.nodeName" } else { field_path };
    if !POD_FIELDS.contains(&field) {
        invalid_field_path(e, &format!("field label not supported: {field_path}"));
    } else if !allowed.contains(&field) {
        e.not_supported(&path.child("fieldPath"), field, allowed);
    }
}

/// Splits `metadata.labels['key']`.
fn split_key(path: &str) -> Option<(&str, &str)> {
    path.strip_suffix("']")?.split_once("['").filter(|(base, _)| !base.is_empty())
}

const RESOURCE_FIELDS: &[&str] = &[
    "limits.cpu",
    "limits.ephemeral-storage",
    "limits.memory",
    "requests.cpu",
    "requests.ephemeral-storage",
    "requests.memory",
];

pub(super) fn validate_resource_field_ref(e: &mut ErrorList, source: &Value, path: &Path, in_volume: bool) {
    let resource = source.text("resource");
    let is_huge_page =
        resource.starts_with("requests.hugepages-") || resource.starts_with("limits.hugepages-");
    if in_volume && source.text("containerName").is_empty() {
        e.required(&path.child("containerName"), "");
    } else if resource.is_empty() {
        e.required(&path.child("resource"), "");
    } else if !RESOURCE_FIELDS.contains(&resource) && !is_huge_page {
        e.not_supported(&path.child("resource"), resource, RESOURCE_FIELDS);
    }
    divisor(e, source, path, resource, is_huge_page);
}

fn divisor(e: &mut ErrorList, source: &Value, path: &Path, resource: &str, is_huge_page: bool) {
    let Some(divisor) = Quantity::from_value(source.at("divisor")) else { return };
    if divisor.is_zero() {
        return;
    }
    let (allowed, detail): (&[&str], &str) = match resource {
        "limits.cpu" | "requests.cpu" => {
            (&["1m", "1"], "only divisor's values 1m and 1 are supported with the cpu resource")
        }
        "limits.memory" | "requests.memory" => (BYTE_DIVISOR_VALUES, "memory"),
        "limits.ephemeral-storage" | "requests.ephemeral-storage" => {
            (BYTE_DIVISOR_VALUES, "local ephemeral storage")
        }
        _ if is_huge_page => (BYTE_DIVISOR_VALUES, "hugepages"),
        _ => return,
    };
    if allowed.contains(&divisor.to_string().as_str()) {
        return;
    }
    let message = if allowed.len() == 2 {
        detail.to_owned()
    } else {
        format!(
            "only divisor's values 1, 1k, 1M, 1G, 1T, 1P, 1E, 1Ki, 1Mi, 1Gi, 1Ti, 1Pi, 1Ei are supported with the {detail} resource"
        )
    };
    e.invalid(&path.child("divisor"), resource, &message);
}

const BYTE_DIVISOR_VALUES: &[&str] =
    &["1", "1k", "1M", "1G", "1T", "1P", "1E", "1Ki", "1Mi", "1Gi", "1Ti", "1Pi", "1Ei"];

fn key_ref(e: &mut ErrorList, source: &Value, path: &Path) {
    validate_subdomain(e, &path.child("name"), source.text("name"));
    match source.text("key") {
        "" => e.required(&path.child("key"), ""),
        key => validate_name(e, &path.child("key"), key, names::config_map_key),
    }
}

fn file_key_ref(e: &mut ErrorList, source: &Value, path: &Path) {
    match source.text("key") {
        "" => e.required(&path.child("key"), ""),
        key => validate_name(e, &path.child("key"), key, names::env_var_name),
    }
    match source.text("volumeName") {
        "" => e.required(&path.child("volumeName"), ""),
        name => validate_label(e, &path.child("volumeName"), name),
    }
    required(e, source, path, "path");
    validate_no_parent_refs(e, &path.child("path"), source.text("path"));
}

/// A `fileKeyRef` must refer to an emptyDir volume of the pod.
pub(super) fn validate_file_key_volumes(e: &mut ErrorList, spec: &Value, path: &Path) {
    let volumes: BTreeMap<&str, &Value> =
        spec.items("volumes").iter().map(|volume| (volume.text("name"), volume)).collect();
    for (at, container) in super::rules::all_containers(spec, path) {
        for (i, var) in container.items("env").iter().enumerate() {
            let source = var.path("valueFrom.fileKeyRef");
            if source.is_null() {
                continue;
            }
            let name = source.text("volumeName");
            let at = at.child("env").index(i).child("valueFrom.fileKeyRef.volumeName");
            match volumes.get(name) {
                None => e.not_found(&at, name),
                Some(volume) if !volume.has("emptyDir") => {
                    e.invalid(&at, name, "referenced volume must be of type emptyDir");
                }
                Some(_) => {}
            }
        }
    }
}
