//! Validates security contexts of pods and containers, also against the operating system of the pod.

use std::collections::BTreeSet;

use serde_json::Value;

use super::internal::format_compact;
use super::rules::{
    all_containers, annotation, invalid_as, optional_one_of, validate_id, validate_relative_path,
};
use super::windows;
use crate::field::{ErrorList, Path};
use crate::json::JsonExt;

const PROFILE_TYPES: &[&str] = &["Localhost", "RuntimeDefault", "Unconfined"];

/// Validates the pod's security context. The host namespace fields are in the spec itself.
pub(super) fn validate_pod_security_context(e: &mut ErrorList, spec: &Value, path: &Path) {
    let context = spec.at("securityContext");
    for field in ["fsGroup", "runAsUser", "runAsGroup"] {
        validate_id(e, context, path, field);
    }
    for (i, group) in context.items("supplementalGroups").iter().enumerate() {
        let at = path.child("supplementalGroups").index(i);
        super::rules::validate_range(e, &at, group.as_i64().unwrap_or(0), 0, i64::from(i32::MAX));
    }
    if spec.flag("shareProcessNamespace") && spec.flag("hostPID") {
        e.invalid(
            &path.child("shareProcessNamespace"),
            true,
            "ShareProcessNamespace and HostPID cannot both be enabled",
        );
    }
    sysctls(e, spec, &path.child("sysctls"));
    optional_one_of(e, context, path, "fsGroupChangePolicy", &["Always", "OnRootMismatch"]);
    seccomp(e, context.at("seccompProfile"), &path.child("seccompProfile"));
    windows::validate_options(e, context.at("windowsOptions"), &path.child("windowsOptions"));
    app_armor(e, context.at("appArmorProfile"), &path.child("appArmorProfile"));
    optional_one_of(e, context, path, "supplementalGroupsPolicy", &["Merge", "Strict"]);
    optional_one_of(e, context, path, "seLinuxChangePolicy", &["Recursive"]);
}

pub(super) fn validate_container_security_context(
    e: &mut ErrorList,
    context: &Value,
    path: &Path,
    host_users: bool,
) {
    if context.is_null() {
        return;
    }
    validate_id(e, context, path, "runAsUser");
    validate_id(e, context, path, "runAsGroup");
    if let Some(mount) = context.at("procMount").as_str() {
        optional_one_of(e, context, path, "procMount", &["Default", "Unmasked"]);
        if host_users && mount == "Unmasked" {
            e.invalid(&path.child("procMount"), mount, "`hostUsers` must be false to use `Unmasked`");
        }
    }
    seccomp(e, context.at("seccompProfile"), &path.child("seccompProfile"));
    if context.at("allowPrivilegeEscalation").as_bool() == Some(false) {
        let rendered = || format_compact("SecurityContext", context);
        if context.flag("privileged") {
            let message = "cannot set `allowPrivilegeEscalation` to false and `privileged` to true";
            invalid_as(e, path, &rendered(), message);
        }
        let added = context.at("capabilities").items("add").iter();
        for _ in added.filter(|capability| capability.as_str() == Some("CAP_SYS_ADMIN")) {
            let message =
                "cannot set `allowPrivilegeEscalation` to false and `capabilities.Add` CAP_SYS_ADMIN";
            invalid_as(e, path, &rendered(), message);
        }
    }
    windows::validate_options(e, context.at("windowsOptions"), &path.child("windowsOptions"));
    app_armor(e, context.at("appArmorProfile"), &path.child("appArmorProfile"));
}

fn seccomp(e: &mut ErrorList, profile: &Value, path: &Path) {
    if profile.is_null() {
        return;
    }
    match profile.text("type") {
        "" => e.required(&path.child("type"), "type is required when seccompProfile is set"),
        _ => optional_one_of(e, profile, path, "type", PROFILE_TYPES),
    }
    let at = path.child("localhostProfile");
    let local = profile.at("localhostProfile").as_str();
    match (profile.text("type") == "Localhost", local) {
        (true, None) => e.required(&at, "must be set when seccomp type is Localhost"),
        (true, Some(local)) => validate_relative_path(e, &at, local),
        (false, Some(_)) => invalid_as(
            e,
            &at,
            &format_compact("SeccompProfile", profile),
            "can only be set when seccomp type is Localhost",
        ),
        (false, None) => {}
    }
}

fn app_armor(e: &mut ErrorList, profile: &Value, path: &Path) {
    if profile.is_null() {
        return;
    }
    const UNSET: &str = "must be set when AppArmor type is Localhost";
    let at = path.child("localhostProfile");
    match (profile.text("type"), profile.at("localhostProfile").as_str()) {
        ("Localhost", None) => e.required(&at, UNSET),
        ("Localhost", Some(local)) => {
            if local.trim() != local {
                e.invalid(&at, local, "must not be padded with whitespace");
            } else if local.is_empty() {
                e.required(&at, UNSET);
            }
            if local.len() > 4095 {
                e.too_long(&at, 4095);
            }
        }
        ("RuntimeDefault" | "Unconfined", Some(local)) => {
            e.invalid(&at, local, "can only be set when AppArmor type is Localhost");
        }
        ("RuntimeDefault" | "Unconfined", None) => {}
        ("", _) => e.required(&path.child("type"), "type is required when appArmorProfile is set"),
        _ => optional_one_of(e, profile, path, "type", PROFILE_TYPES),
    }
}

fn sysctls(e: &mut ErrorList, spec: &Value, path: &Path) {
    let mut names = BTreeSet::new();
    for (i, sysctl) in spec.at("securityContext").items("sysctls").iter().enumerate() {
        let at = path.index(i).child("name");
        let name = sysctl.text("name");
        if name.is_empty() {
            e.required(&at, "");
        } else if !is_sysctl(name) {
            e.invalid(
                &at,
                name,
                "must have at most 253 characters and match regex ^([a-z0-9]([-_a-z0-9]*[a-z0-9])?[\\./])*[a-z0-9]([-_a-z0-9]*[a-z0-9])?$",
            );
        } else if names.contains(name) {
            e.duplicate(&at, name);
        }
        let normalized = normalize_sysctl(name);
        if spec.flag("hostNetwork") && normalized.starts_with("net.") {
            e.invalid(&at, name, "may not be specified when 'hostNetwork' is true");
        } else if spec.flag("hostIPC")
            && (normalized.starts_with("fs.mqueue.") || IPC_SYSCTLS.contains(&normalized.as_str()))
        {
            e.invalid(&at, name, "may not be specified when 'hostIPC' is true");
        }
        names.insert(name);
    }
}

const IPC_SYSCTLS: &[&str] = &[
    "kernel.sem",
    "kernel.shmall",
    "kernel.shmmax",
    "kernel.shmmni",
    "kernel.shm_rmid_forced",
    "kernel.shm",
    "kernel.msgmax",
    "kernel.msgmnb",
    "kernel.msgmni",
    "kernel.msg",
];

/// A sysctl name may use slashes as separators. If the first separator is a slash, dots are literal.
fn normalize_sysctl(name: &str) -> String {
    match name.find(['.', '/']) {
        Some(i) if name.as_bytes()[i] == b'/' => name
            .chars()
            .map(|c| {
                if c == '/' {
                    '.'
                } else if c == '.' {
                    '/'
                } else {
                    c
                }
            })
            .collect(),
        _ => name.to_owned(),
    }
}

fn is_sysctl(name: &str) -> bool {
    let edge = |b: &u8| b.is_ascii_lowercase() || b.is_ascii_digit();
    name.len() <= 253
        && name.split(['.', '/']).all(|part| {
            let part = part.as_bytes();
            part.first().is_some_and(edge)
                && part.last().is_some_and(edge)
                && part.iter().all(|b| edge(b) || matches!(b, b'-' | b'_'))
        })
}

/// A pod with its own user namespace must not share other namespaces with the node.
pub(super) fn validate_host_users(e: &mut ErrorList, spec: &Value, path: &Path) {
    if super::rules::host_users(spec) {
        return;
    }
    const HOST_USERS_MESSAGE: &str = "when `hostUsers` is false";
    // Upstream capitalizes two of the field names.
    for (field, rendered) in [("hostNetwork", "hostNetwork"), ("hostPID", "HostPID"), ("hostIPC", "HostIPC")]
    {
        if spec.flag(field) {
            e.forbidden(&path.child(rendered), HOST_USERS_MESSAGE);
        }
    }
    for (at, container) in all_containers(spec, path) {
        if !container.items("volumeDevices").is_empty() {
            e.forbidden(&at.child("volumeDevices"), HOST_USERS_MESSAGE);
        }
    }
}

const SECCOMP_POD: &str = "seccomp.security.alpha.kubernetes.io/pod";
const SECCOMP_CONTAINER: &str = "container.seccomp.security.alpha.kubernetes.io/";
pub(super) const APP_ARMOR: &str = "container.apparmor.security.beta.kubernetes.io/";

pub(super) fn seccomp_pod_annotation() -> &'static str {
    SECCOMP_POD
}

pub(super) fn seccomp_container_annotation(container: &Value) -> String {
    format!("{SECCOMP_CONTAINER}{}", container.text("name"))
}

pub(super) fn app_armor_annotation(container: &Value) -> String {
    format!("{APP_ARMOR}{}", container.text("name"))
}

/// Validates the legacy annotations that are still supported.
pub(super) fn validate_annotations(e: &mut ErrorList, meta: &Value, spec: &Value, path: &Path) {
    let seccomp = |e: &mut ErrorList, key: &str, profile: &str| {
        let at = path.child(key);
        if let Some(local) = profile.strip_prefix("localhost/") {
            validate_relative_path(e, &at, local);
        } else if !["runtime/default", "docker/default", "unconfined"].contains(&profile) {
            e.invalid(&at, profile, "must be a valid seccomp profile");
        }
    };
    if let Some(profile) = annotation(meta, SECCOMP_POD) {
        seccomp(e, SECCOMP_POD, profile);
    }
    for (key, value) in meta.entries("annotations") {
        if key.starts_with(SECCOMP_CONTAINER) {
            seccomp(e, key, value.as_str().unwrap_or(""));
        }
    }
    let containers: BTreeSet<&str> = ["initContainers", "containers", "ephemeralContainers"]
        .iter()
        .flat_map(|list| spec.items(list))
        .map(|container| container.text("name"))
        .collect();
    for (key, value) in meta.entries("annotations") {
        let Some(name) = key.strip_prefix(APP_ARMOR) else { continue };
        let value = value.as_str().unwrap_or("");
        if !containers.contains(name) {
            e.invalid(&path.key(key), name, "container not found");
        }
        let known = ["", "runtime/default", "unconfined"].contains(&value) || value.starts_with("localhost/");
        if !known {
            e.invalid(&path.key(key), value, &format!("invalid AppArmor profile name: {value:?}"));
        }
    }
}

/// Validates that annotation and field agree if both are set.
pub(super) fn validate_annotations_match_fields(e: &mut ErrorList, meta: &Value, spec: &Value, path: &Path) {
    let own = spec.at("securityContext");
    let mut matches = |profile: &Value, key: &str, at: Path, what: &str| {
        let Some(annotation_value) = annotation(meta, key).filter(|_| !profile.is_null()) else { return };
        let wrong_type = match profile.text("type") {
            "Unconfined" => annotation_value != "unconfined",
            "RuntimeDefault" => {
                annotation_value != "runtime/default"
                    && (what != "seccomp" || annotation_value != "docker/default")
            }
            "Localhost" => !annotation_value.starts_with("localhost/"),
            _ => return,
        };
        if wrong_type {
            e.forbidden(&at.child("type"), &format!("{what} type in annotation and field must match"));
        } else if profile.text("type") == "Localhost"
            && annotation_value.strip_prefix("localhost/") != profile.at("localhostProfile").as_str()
        {
            let message = format!("{what} profile in annotation and field must match");
            e.forbidden(&at.child("localhostProfile"), &message);
        }
    };
    matches(own.at("seccompProfile"), SECCOMP_POD, path.child("securityContext.seccompProfile"), "seccomp");
    for (at, container) in all_containers(spec, path) {
        let profile = container.path("securityContext.seccompProfile");
        let key = seccomp_container_annotation(container);
        matches(profile, &key, at.child("securityContext.seccompProfile"), "seccomp");
    }
    if spec.at("os").text("name") == "windows" {
        return;
    }
    for (at, container) in all_containers(spec, path) {
        let mut profile = container.path("securityContext.appArmorProfile");
        if profile.is_null() {
            profile = own.at("appArmorProfile");
        }
        let key = app_armor_annotation(container);
        matches(profile, &key, at.child("securityContext.appArmorProfile"), "apparmor");
    }
}
