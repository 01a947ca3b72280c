//! Validates pod specs of pods and pod templates.

use std::collections::BTreeSet;

use serde_json::Value;

use super::containers::{self, PodContext};
use super::rules::{
    invalid_as, optional_one_of, required_one_of, validate_label, validate_name, validate_range,
    validate_subdomain,
};
use super::{affinity, env, resources, security, volumes, windows};
use crate::field::{ErrorList, Path};
use crate::json::JsonExt;
use crate::{meta, names};

/// The differences between pods and pod templates.
#[derive(Clone, Copy, Debug, Default)]
pub struct PodValidationOptions {
    /// The spec is that of a pod, not of a template, so all values must be set.
    pub is_pod: bool,
}

/// Validates a `PodSpec`. `pod` is the metadata of the pod; `None` for a template.
pub fn validate_pod_spec(
    spec: &Value,
    pod: Option<&Value>,
    path: &Path,
    options: PodValidationOptions,
    e: &mut ErrorList,
) {
    let grace_period = spec.int("terminationGracePeriodSeconds");
    if grace_period.is_none() {
        e.required(&path.child("terminationGracePeriodSeconds"), "");
    }
    let valid_volumes = volumes::validate_volumes(e, spec, pod, &path.child("volumes"), options.is_pod);
    let claims: BTreeSet<&str> = spec
        .items("resourceClaims")
        .iter()
        .map(|claim| claim.text("name"))
        .filter(|name| !name.is_empty())
        .collect();
    resources::validate_pod_claims(e, spec, pod, &path.child("resourceClaims"));
    let pod_context = PodContext {
        volumes: valid_volumes,
        claims,
        grace_period,
        restart_policy: spec.text("restartPolicy"),
        host_users: super::rules::host_users(spec),
    };
    containers::validate_containers(e, spec.items("containers"), &path.child("containers"), &pod_context);
    containers::validate_init_containers(e, spec, &path.child("initContainers"), &pod_context);
    containers::validate_ephemeral_containers(e, spec, &path.child("ephemeralContainers"), &pod_context);
    resources::validate_pod_resources(e, spec, &path.child("resources"), &pod_context.claims);
    host_network_ports(e, spec, path, options);
    required_one_of(e, spec, path, "restartPolicy", &["Always", "OnFailure", "Never"]);
    required_one_of(
        e,
        spec,
        path,
        "dnsPolicy",
        &["ClusterFirstWithHostNet", "ClusterFirst", "Default", "None"],
    );
    meta::validate_labels(spec.at("nodeSelector"), &path.child("nodeSelector"), e);
    security::validate_pod_security_context(e, spec, &path.child("securityContext"));
    pull_secrets(e, spec, &path.child("imagePullSecrets"));
    affinity::validate_affinity(e, spec.at("affinity"), &path.child("affinity"));
    dns_config(e, spec, &path.child("dnsConfig"));
    for (i, gate) in spec.items("readinessGates").iter().enumerate() {
        let at = path.child("readinessGates").index(i).child("conditionType");
        validate_name(e, &at, gate.text("conditionType"), names::qualified_name);
    }
    scheduling_gates(e, spec, &path.child("schedulingGates"));
    affinity::validate_topology_spread(
        e,
        spec.items("topologySpreadConstraints"),
        &path.child("topologySpreadConstraints"),
    );
    windows::validate_host_process(e, spec, path);
    security::validate_host_users(e, spec, path);
    hostname_override(e, spec, &path.child("hostnameOverride"));
    validate_simple_fields(e, spec, path);
    windows::validate_os(e, spec, path);
    env::validate_file_key_volumes(e, spec, path);
}

fn validate_simple_fields(e: &mut ErrorList, spec: &Value, path: &Path) {
    for field in ["serviceAccountName", "nodeName"] {
        if !spec.text(field).is_empty() {
            validate_subdomain(e, &path.child(field), spec.text(field));
        }
    }
    if let Some(deadline) = spec.int("activeDeadlineSeconds") {
        validate_range(e, &path.child("activeDeadlineSeconds"), deadline, 1, i64::from(i32::MAX));
    }
    for field in ["hostname", "subdomain"] {
        if !spec.text(field).is_empty() {
            validate_label(e, &path.child(field), spec.text(field));
        }
    }
    affinity::validate_tolerations(e, spec.items("tolerations"), &path.child("tolerations"));
    for (i, alias) in spec.items("hostAliases").iter().enumerate() {
        let at = path.child("hostAliases").index(i);
        validate_name(e, &at.child("ip"), alias.text("ip"), names::ip_any_form);
        for (j, name) in alias.items("hostnames").iter().enumerate() {
            validate_subdomain(e, &at.child("hostnames").index(j), name.as_str().unwrap_or(""));
        }
    }
    if !spec.text("priorityClassName").is_empty() {
        validate_subdomain(e, &path.child("priorityClassName"), spec.text("priorityClassName"));
    }
    if let Some(class) = spec.at("runtimeClassName").as_str() {
        validate_subdomain(e, &path.child("runtimeClassName"), class);
    }
    if spec.has("preemptionPolicy") {
        match spec.text("preemptionPolicy") {
            "" => e.required(&path.child("preemptionPolicy"), ""),
            _ => optional_one_of(e, spec, path, "preemptionPolicy", &["PreemptLowerPriority", "Never"]),
        }
    }
    if spec.has("overhead") {
        resources::validate_overhead(e, spec, &path.child("overhead"));
    }
}

fn host_network_ports(e: &mut ErrorList, spec: &Value, path: &Path, options: PodValidationOptions) {
    if !spec.flag("hostNetwork") {
        return;
    }
    for (i, container) in spec.items("containers").iter().enumerate() {
        for (j, port) in container.items("ports").iter().enumerate() {
            let host = port.int("hostPort").unwrap_or(0);
            if (options.is_pod || host != 0) && host != port.int("containerPort").unwrap_or(0) {
                e.invalid(
                    &path.child("containers").index(i).child("ports").index(j).child("hostPort"),
                    host,
                    "must match `containerPort` when `hostNetwork` is true",
                );
            }
        }
    }
}

fn pull_secrets(e: &mut ErrorList, spec: &Value, path: &Path) {
    for (i, secret) in spec.items("imagePullSecrets").iter().enumerate() {
        // The type has no other field. Strict decoding rejects others, lenient decoding drops them.
        let has_other_fields =
            secret.as_object().is_some_and(|fields| fields.keys().any(|key| key != "name"));
        if has_other_fields {
            let rendered = super::internal::format_compact("LocalObjectReference", secret);
            invalid_as(e, &path.index(i), &rendered, "only name may be set");
        }
    }
}

const MAX_NAMESERVERS: usize = 3;
const MAX_SEARCH_PATHS: usize = 32;
const MAX_SEARCH_CHARS: usize = 2048;

fn dns_config(e: &mut ErrorList, spec: &Value, path: &Path) {
    let config = spec.at("dnsConfig");
    let (servers, searches) = (config.items("nameservers"), config.items("searches"));
    if spec.text("dnsPolicy") == "None" {
        if config.is_null() {
            return e.required(path, "must provide `dnsConfig` when `dnsPolicy` is None");
        }
        if servers.is_empty() {
            let message = "must provide at least one DNS nameserver when `dnsPolicy` is None";
            return e.required(&path.child("nameservers"), message);
        }
    }
    if servers.len() > MAX_NAMESERVERS {
        let message = format!("must not have more than {MAX_NAMESERVERS} nameservers");
        e.invalid(&path.child("nameservers"), config.at("nameservers").clone(), &message);
    }
    for (i, server) in servers.iter().enumerate() {
        validate_name(
            e,
            &path.child("nameservers").index(i),
            server.as_str().unwrap_or(""),
            names::ip_any_form,
        );
    }
    let at = path.child("searches");
    if searches.len() > MAX_SEARCH_PATHS {
        let message = format!("must not have more than {MAX_SEARCH_PATHS} search paths");
        e.invalid(&at, config.at("searches").clone(), &message);
    }
    let text = searches.iter().filter_map(Value::as_str);
    let chars = text.clone().map(str::len).sum::<usize>() + searches.len().saturating_sub(1);
    if chars > MAX_SEARCH_CHARS {
        let message = format!(
            "must not have more than {MAX_SEARCH_CHARS} characters (including spaces) in the search list"
        );
        e.invalid(&at, config.at("searches").clone(), &message);
    }
    for (i, search) in text.enumerate().filter(|(_, search)| *search != ".") {
        let search = search.strip_suffix('.').unwrap_or(search);
        validate_name(e, &at.index(i), search, names::dns1123_subdomain_with_underscore);
    }
    for (i, option) in config.items("options").iter().enumerate() {
        if option.text("name").is_empty() {
            e.required(&path.child("options").index(i), "must not be empty");
        }
    }
}

fn scheduling_gates(e: &mut ErrorList, spec: &Value, path: &Path) {
    let mut seen = BTreeSet::new();
    for (i, gate) in spec.items("schedulingGates").iter().enumerate() {
        let name = gate.text("name");
        validate_name(e, &path.index(i), name, names::qualified_name);
        if !seen.insert(name) {
            e.duplicate(&path.index(i), name);
        }
    }
}

fn hostname_override(e: &mut ErrorList, spec: &Value, path: &Path) {
    let Some(name) = spec.at("hostnameOverride").as_str() else { return };
    if spec.flag("setHostnameAsFQDN") {
        e.forbidden(path, "may not be specified when setHostnameAsFQDN is true");
    }
    if spec.flag("hostNetwork") {
        e.forbidden(path, "may not be specified when hostNetwork is true");
    }
    if name.len() > 64 {
        e.too_long(path, 64);
    }
    validate_subdomain(e, path, name);
}
