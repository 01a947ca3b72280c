//! The rules of a pod's spec, the same for pods and for every template of pods.

use std::collections::BTreeSet;

use serde_json::Value;

use super::containers::{self, Surroundings};
use super::rules::{in_range, invalid_as, label, named, one_of, required_one_of, subdomain};
use super::{affinity, env, resources, security, volumes, windows};
use crate::field::{Errors, Path};
use crate::json::Json;
use crate::{meta, names};

/// What differs between a pod and a template.
#[derive(Clone, Copy, Debug, Default)]
pub struct Options {
    /// The spec is a pod's own, so nothing will be filled in later.
    pub is_pod: bool,
}

/// Checks a `PodSpec`. `pod` is the metadata of the pod it belongs to; a template has none.
pub fn validate_pod_spec(spec: &Value, pod: Option<&Value>, path: &Path, options: Options, e: &mut Errors) {
    let grace_period = spec.int("terminationGracePeriodSeconds");
    if grace_period.is_none() {
        e.required(&path.at("terminationGracePeriodSeconds"), "");
    }
    let good = volumes::volumes(e, spec, pod, &path.at("volumes"), options.is_pod);
    let claims: BTreeSet<&str> = spec
        .items("resourceClaims")
        .iter()
        .map(|claim| claim.text("name"))
        .filter(|name| !name.is_empty())
        .collect();
    resources::pod_claims(e, spec, pod, &path.at("resourceClaims"));
    let around = Surroundings {
        volumes: good,
        claims,
        grace_period,
        restart_policy: spec.text("restartPolicy"),
        host_users: super::rules::host_users(spec),
    };
    containers::main(e, spec.items("containers"), &path.at("containers"), &around);
    containers::init(e, spec, &path.at("initContainers"), &around);
    containers::ephemeral(e, spec, &path.at("ephemeralContainers"), &around);
    resources::pod(e, spec, &path.at("resources"), &around.claims);
    host_network_ports(e, spec, path, options);
    required_one_of(e, spec, path, "restartPolicy", &["Always", "OnFailure", "Never"]);
    required_one_of(
        e,
        spec,
        path,
        "dnsPolicy",
        &["ClusterFirstWithHostNet", "ClusterFirst", "Default", "None"],
    );
    meta::labels(spec.at("nodeSelector"), &path.at("nodeSelector"), e);
    security::pod(e, spec, &path.at("securityContext"));
    pull_secrets(e, spec, &path.at("imagePullSecrets"));
    affinity::affinity(e, spec.at("affinity"), &path.at("affinity"));
    dns_config(e, spec, &path.at("dnsConfig"));
    for (i, gate) in spec.items("readinessGates").iter().enumerate() {
        let at = path.at("readinessGates").index(i).at("conditionType");
        named(e, &at, gate.text("conditionType"), names::qualified_name);
    }
    scheduling_gates(e, spec, &path.at("schedulingGates"));
    affinity::topology_spread(
        e,
        spec.items("topologySpreadConstraints"),
        &path.at("topologySpreadConstraints"),
    );
    windows::host_process(e, spec, path);
    security::host_users(e, spec, path);
    hostname_override(e, spec, &path.at("hostnameOverride"));
    plain_fields(e, spec, path);
    windows::os(e, spec, path);
    env::file_key_volumes(e, spec, path);
}

fn plain_fields(e: &mut Errors, spec: &Value, path: &Path) {
    for field in ["serviceAccountName", "nodeName"] {
        if !spec.text(field).is_empty() {
            subdomain(e, &path.at(field), spec.text(field));
        }
    }
    if let Some(deadline) = spec.int("activeDeadlineSeconds") {
        in_range(e, &path.at("activeDeadlineSeconds"), deadline, 1, i64::from(i32::MAX));
    }
    for field in ["hostname", "subdomain"] {
        if !spec.text(field).is_empty() {
            label(e, &path.at(field), spec.text(field));
        }
    }
    affinity::tolerations(e, spec.items("tolerations"), &path.at("tolerations"));
    for (i, alias) in spec.items("hostAliases").iter().enumerate() {
        let at = path.at("hostAliases").index(i);
        named(e, &at.at("ip"), alias.text("ip"), names::ip_any_form);
        for (j, name) in alias.items("hostnames").iter().enumerate() {
            subdomain(e, &at.at("hostnames").index(j), name.as_str().unwrap_or(""));
        }
    }
    if !spec.text("priorityClassName").is_empty() {
        subdomain(e, &path.at("priorityClassName"), spec.text("priorityClassName"));
    }
    if let Some(class) = spec.at("runtimeClassName").as_str() {
        subdomain(e, &path.at("runtimeClassName"), class);
    }
    if spec.has("preemptionPolicy") {
        match spec.text("preemptionPolicy") {
            "" => e.required(&path.at("preemptionPolicy"), ""),
            _ => one_of(e, spec, path, "preemptionPolicy", &["PreemptLowerPriority", "Never"]),
        }
    }
    if spec.has("overhead") {
        resources::overhead(e, spec, &path.at("overhead"));
    }
}

fn host_network_ports(e: &mut Errors, spec: &Value, path: &Path, options: Options) {
    if !spec.flag("hostNetwork") {
        return;
    }
    for (i, container) in spec.items("containers").iter().enumerate() {
        for (j, port) in container.items("ports").iter().enumerate() {
            let host = port.int("hostPort").unwrap_or(0);
            if (options.is_pod || host != 0) && host != port.int("containerPort").unwrap_or(0) {
                e.invalid(
                    &path.at("containers").index(i).at("ports").index(j).at("hostPort"),
                    host,
                    "must match `containerPort` when `hostNetwork` is true",
                );
            }
        }
    }
}

fn pull_secrets(e: &mut Errors, spec: &Value, path: &Path) {
    for (i, secret) in spec.items("imagePullSecrets").iter().enumerate() {
        // The type has no other field; strict decoding refuses more, lenient decoding drops it.
        let more = secret.as_object().is_some_and(|fields| fields.keys().any(|key| key != "name"));
        if more {
            let shown = super::internal::compact("LocalObjectReference", secret);
            invalid_as(e, &path.index(i), &shown, "only name may be set");
        }
    }
}

const MAX_NAMESERVERS: usize = 3;
const MAX_SEARCHES: usize = 32;
const MAX_SEARCH_CHARS: usize = 2048;

fn dns_config(e: &mut Errors, spec: &Value, path: &Path) {
    let config = spec.at("dnsConfig");
    let (servers, searches) = (config.items("nameservers"), config.items("searches"));
    if spec.text("dnsPolicy") == "None" {
        if config.is_null() {
            return e.required(path, "must provide `dnsConfig` when `dnsPolicy` is None");
        }
        if servers.is_empty() {
            let words = "must provide at least one DNS nameserver when `dnsPolicy` is None";
            return e.required(&path.at("nameservers"), words);
        }
    }
    if servers.len() > MAX_NAMESERVERS {
        let words = format!("must not have more than {MAX_NAMESERVERS} nameservers");
        e.invalid(&path.at("nameservers"), config.at("nameservers").clone(), &words);
    }
    for (i, server) in servers.iter().enumerate() {
        named(e, &path.at("nameservers").index(i), server.as_str().unwrap_or(""), names::ip_any_form);
    }
    let at = path.at("searches");
    if searches.len() > MAX_SEARCHES {
        let words = format!("must not have more than {MAX_SEARCHES} search paths");
        e.invalid(&at, config.at("searches").clone(), &words);
    }
    let text = searches.iter().filter_map(Value::as_str);
    let chars = text.clone().map(str::len).sum::<usize>() + searches.len().saturating_sub(1);
    if chars > MAX_SEARCH_CHARS {
        let words = format!(
            "must not have more than {MAX_SEARCH_CHARS} characters (including spaces) in the search list"
        );
        e.invalid(&at, config.at("searches").clone(), &words);
    }
    for (i, search) in text.enumerate().filter(|(_, search)| *search != ".") {
        let search = search.strip_suffix('.').unwrap_or(search);
        named(e, &at.index(i), search, names::dns1123_subdomain_with_underscore);
    }
    for (i, option) in config.items("options").iter().enumerate() {
        if option.text("name").is_empty() {
            e.required(&path.at("options").index(i), "must not be empty");
        }
    }
}

fn scheduling_gates(e: &mut Errors, spec: &Value, path: &Path) {
    let mut seen = BTreeSet::new();
    for (i, gate) in spec.items("schedulingGates").iter().enumerate() {
        let name = gate.text("name");
        named(e, &path.index(i), name, names::qualified_name);
        if !seen.insert(name) {
            e.duplicate(&path.index(i), name);
        }
    }
}

fn hostname_override(e: &mut Errors, spec: &Value, path: &Path) {
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
    subdomain(e, path, name);
}
