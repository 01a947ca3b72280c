//! Validates Windows options, and the fields that Linux and Windows pods must not set.

use serde_json::Value;

use super::rules::{all_containers, validate_name};
use crate::field::{ErrorList, Path};
use crate::json::JsonExt;
use crate::names;

/// Validates `spec.os` and the fields that it excludes.
pub(super) fn validate_os(e: &mut ErrorList, spec: &Value, path: &Path) {
    let os = spec.at("os");
    if os.is_null() {
        return;
    }
    match os.text("name") {
        "" => e.required(&path.child("os.name"), ""),
        "linux" => {
            const LINUX_MESSAGE: &str = "windows options cannot be set for a linux pod";
            forbid(
                e,
                spec.at("securityContext"),
                &path.child("securityContext"),
                &["windowsOptions"],
                LINUX_MESSAGE,
            );
            for (at, container) in all_containers(spec, path) {
                let context = container.at("securityContext");
                forbid(e, context, &at.child("securityContext"), &["windowsOptions"], LINUX_MESSAGE);
            }
        }
        "windows" => {
            pod_fields(e, spec, path);
            for (at, container) in all_containers(spec, path) {
                let context = container.at("securityContext");
                forbid(e, context, &at.child("securityContext"), CONTAINER_FIELDS, FORBIDDEN_FOR_WINDOWS);
            }
        }
        other => e.not_supported(&path.child("os"), other, &["linux", "windows"]),
    }
}

const FORBIDDEN_FOR_WINDOWS: &str = "cannot be set for a windows pod";

const CONTAINER_FIELDS: &[&str] = &[
    "appArmorProfile",
    "seLinuxOptions",
    "seccompProfile",
    "capabilities",
    "readOnlyRootFilesystem",
    "privileged",
    "allowPrivilegeEscalation",
    "procMount",
    "runAsUser",
    "runAsGroup",
];

fn forbid(e: &mut ErrorList, context: &Value, path: &Path, fields: &[&str], message: &str) {
    for field in fields {
        if context.has(field) {
            e.forbidden(&path.child(field), message);
        }
    }
}

fn pod_fields(e: &mut ErrorList, spec: &Value, path: &Path) {
    let context = spec.at("securityContext");
    let at = path.child("securityContext");
    forbid(e, context, &at, &["appArmorProfile", "seLinuxOptions"], FORBIDDEN_FOR_WINDOWS);
    forbid(e, spec, path, &["hostUsers"], FORBIDDEN_FOR_WINDOWS);
    for field in ["hostPID", "hostIPC"] {
        if spec.flag(field) {
            e.forbidden(&path.child(field), FORBIDDEN_FOR_WINDOWS);
        }
    }
    forbid(e, context, &at, &["seccompProfile", "fsGroup", "fsGroupChangePolicy"], FORBIDDEN_FOR_WINDOWS);
    if !context.items("sysctls").is_empty() {
        e.forbidden(&at.child("sysctls"), FORBIDDEN_FOR_WINDOWS);
    }
    forbid(e, spec, path, &["shareProcessNamespace"], FORBIDDEN_FOR_WINDOWS);
    const POD_FIELDS: &[&str] =
        &["runAsUser", "runAsGroup", "supplementalGroups", "supplementalGroupsPolicy", "seLinuxChangePolicy"];
    forbid(e, context, &at, POD_FIELDS, FORBIDDEN_FOR_WINDOWS);
}

/// Either all containers of a pod are host-process containers or none.
pub(super) fn validate_host_process(e: &mut ErrorList, spec: &Value, path: &Path) {
    let own = spec.path("securityContext.windowsOptions.hostProcess").as_bool();
    let containers = all_containers(spec, path);
    let mut count = 0;
    for (at, container) in &containers {
        let inner = container.path("securityContext.windowsOptions.hostProcess").as_bool();
        if let (Some(own), Some(inner)) = (own, inner)
            && own != inner
        {
            e.invalid(
                &at.child("securityContext.windowsOptions.hostProcess"),
                inner,
                &format!("pod hostProcess value must be identical if both are specified, was {own}"),
            );
        }
        count += usize::from(inner.or(own).unwrap_or(false));
    }
    if count == 0 {
        return;
    }
    if count != containers.len() {
        e.invalid(
            path,
            "",
            "If pod contains any hostProcess containers then all containers must be HostProcess containers",
        );
    }
    if !spec.flag("hostNetwork") {
        let message = "hostNetwork must be true if pod contains any hostProcess containers";
        e.invalid(&path.child("hostNetwork"), false, message);
    }
}

const MAX_CREDENTIAL_SPEC_BYTES: usize = 64 * 1024;
const MAX_DOMAIN_BYTES: usize = 256;
const MAX_USER_NAME_BYTES: usize = 104;

pub(super) fn validate_options(e: &mut ErrorList, options: &Value, path: &Path) {
    if let Some(name) = options.at("gmsaCredentialSpecName").as_str() {
        validate_name(e, &path.child("gmsaCredentialSpecName"), name, names::dns1123_subdomain);
    }
    if let Some(spec) = options.at("gmsaCredentialSpec").as_str() {
        let at = path.child("gmsaCredentialSpec");
        if spec.is_empty() {
            e.invalid(&at, spec, "gmsaCredentialSpec cannot be an empty string");
        } else if spec.len() > MAX_CREDENTIAL_SPEC_BYTES {
            e.invalid(&at, spec, "gmsaCredentialSpec size must be under 64 KiB");
        }
    }
    if let Some(name) = options.at("runAsUserName").as_str() {
        for message in user_name(name) {
            e.invalid(&path.child("runAsUserName"), name, &message);
        }
    }
}

fn user_name(name: &str) -> Vec<String> {
    let one = |message: &str| vec![message.to_owned()];
    if name.is_empty() {
        return one("runAsUserName cannot be an empty string");
    }
    if name.chars().any(|c| c.is_ascii_control()) {
        return one("runAsUserName cannot contain control characters");
    }
    if name.matches('\\').count() > 1 {
        return one("runAsUserName cannot contain more than one backslash");
    }
    let (domain, user) = name.split_once('\\').map_or((None, name), |(domain, user)| (Some(domain), user));
    let mut messages = Vec::new();
    if let Some(domain) = domain {
        if domain.len() >= MAX_DOMAIN_BYTES {
            messages
                .push(format!("runAsUserName's Domain length must be under {MAX_DOMAIN_BYTES} characters"));
        }
        if !is_valid_netbios(domain) && !is_dns(domain) {
            messages.push("runAsUserName's Domain doesn't match the NetBios nor the DNS format".to_owned());
        }
    }
    if user.is_empty() {
        messages.push("runAsUserName's User cannot be empty".to_owned());
    } else if user.len() > MAX_USER_NAME_BYTES {
        messages.push(format!(
            "runAsUserName's User length must not be longer than {MAX_USER_NAME_BYTES} characters"
        ));
    }
    if !user.is_empty() && user.chars().all(|c| c == '.' || c == ' ') {
        messages.push("runAsUserName's User cannot contain only periods or spaces".to_owned());
    }
    if user.contains(['"', '/', '\\', ':', ';', '|', '=', ',', '+', '*', '?', '<', '>', '@', '[', ']']) {
        messages.push(
            "runAsUserName's User cannot contain the following characters: \"/\\:;|=,+*?<>@[]".to_owned(),
        );
    }
    messages
}

fn is_valid_netbios(domain: &str) -> bool {
    let count = domain.chars().count();
    (1..=15).contains(&count)
        && !domain.starts_with('.')
        && !domain.contains(['\\', '/', ':', '*', '?', '"', '<', '>', '|'])
}

fn is_dns(domain: &str) -> bool {
    domain.split('.').all(|part| {
        let edge = |b: Option<&u8>| b.is_some_and(u8::is_ascii_alphanumeric);
        let part = part.as_bytes();
        part.len() <= 63
            && edge(part.first())
            && edge(part.last())
            && part.iter().all(|b| b.is_ascii_alphanumeric() || *b == b'-')
    })
}
