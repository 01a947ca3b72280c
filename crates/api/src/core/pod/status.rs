//! Validates the status of a pod, which the kubelet writes.

use std::collections::BTreeSet;
use std::net::IpAddr;

use serde_json::Value;

use super::rules::{validate_id, validate_label, validate_name, validate_subdomain};
use super::template::validate_pod_annotations;
use super::update::validate_annotation_updates;
use crate::field::{ErrorList, Path};
use crate::json::JsonExt;
use crate::names;

/// Sets status fields that older clients omit.
pub(super) fn prepare_status(new: &mut Value, old: &Value) {
    let before = old.at("status");
    if !new.at("status").is_object() {
        return;
    }
    let status = &mut new["status"];
    let keep = |status: &mut Value, field: &str, empty: bool| {
        if empty && let (Some(map), Some(value)) = (status.as_object_mut(), before.get(field)) {
            map.insert(field.to_owned(), value.clone());
        }
    };
    let no_class = status.text("qosClass").is_empty();
    keep(status, "qosClass", no_class);
    let no_generation = status.int("observedGeneration").unwrap_or(0) == 0;
    keep(status, "observedGeneration", no_generation);
    let conditions = status.get_mut("conditions").and_then(Value::as_array_mut);
    for condition in conditions.into_iter().flatten() {
        if condition.int("observedGeneration").unwrap_or(0) != 0 {
            continue;
        }
        let same = |one: &&Value| one.text("type") == condition.text("type");
        let generation =
            before.items("conditions").iter().find(same).and_then(|one| one.int("observedGeneration"));
        if let (Some(generation), Some(map)) = (generation, condition.as_object_mut()) {
            map.insert("observedGeneration".to_owned(), generation.into());
        }
    }
}

pub(super) fn validate_status(e: &mut ErrorList, new: &Value, old: &Value) {
    validate_annotation_updates(e, new.at("metadata"), old.at("metadata"));
    validate_pod_annotations(e, new.at("metadata"), new.at("spec"), &Path::new("metadata.annotations"));
    let path = Path::new("status");
    let (spec, status, before) = (old.at("spec"), new.at("status"), old.at("status"));
    conditions(e, status, &path.child("conditions"));
    if new.at("spec").text("nodeName") != spec.text("nodeName") {
        e.forbidden(&path.child("nodeName"), "may not be changed directly");
    }
    let nominated = status.text("nominatedNodeName");
    if nominated != before.text("nominatedNodeName") && !nominated.is_empty() {
        validate_subdomain(e, &path.child("nominatedNodeName"), nominated);
        if !spec.text("nodeName").is_empty() {
            let message = "may not be set on pods that are already bound to a node";
            e.forbidden(&path.child("nominatedNodeName"), message);
        }
    }
    validate_observed_generation(e, status, &path);
    let class = status.text("qosClass");
    if class != before.text("qosClass") {
        e.invalid(&path.child("qosClass"), class, super::rules::IMMUTABLE);
    }
    for (list, containers) in
        [("containerStatuses", "containers"), ("initContainerStatuses", "initContainers")]
    {
        validate_state_transitions(
            e,
            status.items(list),
            before.items(list),
            &path.child(list),
            Some((spec, containers)),
        );
    }
    let list = "ephemeralContainerStatuses";
    validate_state_transitions(e, status.items(list), before.items(list), &path.child(list), None);
    claim_statuses(e, status, new.at("spec"), &path.child("resourceClaimStatuses"));
    extended_claim(e, status, new.at("spec"), &path.child("extendedResourceClaimStatus"));
    addresses(e, status, before, &path, "podIPs");
    if let Some(first) = status.items("hostIPs").first()
        && first.text("ip") != status.text("hostIP")
    {
        e.invalid(&path.child("hostIPs").index(0).child("ip"), first.text("ip"), "must be equal to `hostIP`");
    }
    addresses(e, status, before, &path, "hostIPs");
    for list in ["containerStatuses", "initContainerStatuses", "ephemeralContainerStatuses"] {
        validate_users(e, status.items(list), &path.child(list), spec);
    }
    for (list, containers) in
        [("containerStatuses", "containers"), ("initContainerStatuses", "initContainers")]
    {
        validate_allocated_resources(
            e,
            status.items(list),
            &path.child(list),
            new.at("spec").items(containers),
        );
    }
    for (i, one) in status.items("ephemeralContainerStatuses").iter().enumerate() {
        if !one.items("allocatedResourcesStatus").is_empty() {
            let at = path.child("ephemeralContainerStatuses").index(i).child("allocatedResourcesStatus");
            e.forbidden(&at, "must not be specified in container status");
        }
    }
}

fn validate_observed_generation(e: &mut ErrorList, object: &Value, path: &Path) {
    if let Some(generation) = object.int("observedGeneration")
        && generation < 0
    {
        e.invalid(&path.child("observedGeneration"), generation, "must be a non-negative integer");
    }
}

fn conditions(e: &mut ErrorList, status: &Value, path: &Path) {
    for (i, condition) in status.items("conditions").iter().enumerate() {
        validate_observed_generation(e, condition, &path.index(i));
        let name = condition.text("type");
        if !["PodScheduled", "Ready", "Initialized"].contains(&name) {
            validate_name(e, &path.index(i).child("Type"), name, names::qualified_name);
        }
    }
}

/// A terminated container must not run again, unless its restart policy allows it.
fn validate_state_transitions(
    e: &mut ErrorList,
    new: &[Value],
    old: &[Value],
    path: &Path,
    owner: Option<(&Value, &str)>,
) {
    if owner.is_some_and(|(spec, _)| has_restart_all_rule(spec)) {
        return;
    }
    for (i, before) in old.iter().enumerate() {
        let ended = before.path("state.terminated");
        let name = before.text("name");
        let running_again =
            new.iter().find(|now| now.text("name") == name && !now.path("state.terminated").is_object());
        if !ended.is_object() || running_again.is_none() {
            continue;
        }
        let allowed = owner.is_some_and(|(spec, list)| {
            let container = spec.items(list).iter().find(|container| container.text("name") == name);
            container
                .is_some_and(|container| should_restart(container, spec, ended.int("exitCode").unwrap_or(0)))
        });
        if !allowed {
            e.forbidden(&path.index(i).child("state"), "may not be transitioned to non-terminated state");
        }
    }
}

/// Whether a container has a `RestartAllContainers` rule.
fn has_restart_all_rule(spec: &Value) -> bool {
    ["containers", "initContainers"].iter().flat_map(|list| spec.items(list)).any(|container| {
        container.items("restartPolicyRules").iter().any(|rule| rule.text("action") == "RestartAllContainers")
    })
}

/// Whether a container restarts after this exit code.
pub fn should_restart(container: &Value, spec: &Value, exit_code: i64) -> bool {
    for rule in container.items("restartPolicyRules") {
        let codes = rule.at("exitCodes");
        let listed = codes.items("values").iter().any(|code| code.as_i64() == Some(exit_code));
        let matches = match codes.text("operator") {
            "In" => listed,
            "NotIn" => !listed,
            _ => false,
        };
        if matches {
            return true;
        }
    }
    let own = container.text("restartPolicy");
    match if own.is_empty() { spec.text("restartPolicy") } else { own } {
        "Always" => true,
        "OnFailure" => exit_code != 0,
        _ => false,
    }
}

fn claim_statuses(e: &mut ErrorList, status: &Value, spec: &Value, path: &Path) {
    let mut seen = BTreeSet::new();
    for (i, claim) in status.items("resourceClaimStatuses").iter().enumerate() {
        let (at, name) = (path.index(i), claim.text("name"));
        if !spec.items("resourceClaims").iter().any(|one| one.text("name") == name) {
            let message = "must match the name of an entry in `spec.resourceClaims`";
            e.invalid(&at.child("name"), name, message);
        }
        if !seen.insert(name) {
            e.duplicate(&at.child("name"), name);
        }
        if let Some(name) = claim.at("resourceClaimName").as_str() {
            validate_subdomain(e, &at.child("resourceClaimName"), name);
        }
    }
}

fn extended_claim(e: &mut ErrorList, status: &Value, spec: &Value, path: &Path) {
    let claim = status.at("extendedResourceClaimStatus");
    if claim.is_null() {
        return;
    }
    let at = path.child("requestMappings");
    let mappings = claim.items("requestMappings");
    if mappings.is_empty() {
        e.required(&at, "at least one request mapping is required");
    }
    let mut seen = BTreeSet::new();
    for (i, mapping) in mappings.iter().enumerate() {
        let at = at.index(i);
        let fields =
            ["containerName", "resourceName", "requestName"].map(|field| (field, mapping.text(field)));
        let [(_, container), (_, resource), (_, request)] = fields;
        let owner = ["containers", "initContainers"]
            .iter()
            .find_map(|list| spec.items(list).iter().find(|one| one.text("name") == container));
        match owner {
            None => e.invalid(
                &at.child("containerName"),
                container,
                "must match the name of an entry in spec.initContainers.name or spec.containers.name",
            ),
            Some(owner) if owner.path("resources.requests").get(resource).is_none() => e.invalid(
                &at.child("resourceName"),
                resource,
                "must match the extended resource name of an entry in spec.initContainers.resources.requests or spec.containers.resources.requests",
            ),
            Some(_) => {}
        }
        validate_label(e, &path.child("requestName"), request);
        if !seen.insert((container, resource, request)) {
            for (field, value) in fields {
                e.duplicate(&at.child(field), value);
            }
        }
    }
    match claim.text("resourceClaimName") {
        "" => e.required(&path.child("resourceClaimName"), ""),
        name => validate_subdomain(e, &path.child("resourceClaimName"), name),
    }
}

/// Allows one address per IP family. Addresses of the old status are not validated again.
fn addresses(e: &mut ErrorList, status: &Value, before: &Value, path: &Path, list: &str) {
    let ips = status.items(list);
    let path = path.child(list);
    for (i, ip) in ips.iter().enumerate() {
        let ip = ip.text("ip");
        if !before.items(list).iter().any(|old| old.text("ip") == ip) {
            validate_name(e, &path.index(i), ip, names::ip_any_form);
        }
    }
    if ips.len() > 1 {
        let families: Vec<Option<IpAddr>> = ips.iter().map(|ip| names::parse_ip(ip.text("ip"))).collect();
        let v6 = families.iter().flatten().filter(|ip| ip.is_ipv6()).count();
        if families.len() != 2 || families.contains(&None) || v6 != 1 {
            let rendered: Vec<String> = ips.iter().map(|ip| format!("{{\"IP\":{}}}", ip.at("ip"))).collect();
            let rendered = format!("[{}]", rendered.join(","));
            super::rules::invalid_as(
                e,
                &path,
                &rendered,
                "may specify no more than one IP for each IP family",
            );
        }
    }
}

fn validate_users(e: &mut ErrorList, statuses: &[Value], path: &Path, spec: &Value) {
    for (i, status) in statuses.iter().enumerate() {
        let user = status.path("user.linux");
        let at = path.index(i).child("user.linux");
        if user.is_null() {
            continue;
        }
        if spec.at("os").text("name") == "windows" {
            e.forbidden(&at, "cannot be set for a windows pod");
            continue;
        }
        validate_id(e, user, &at, "uid");
        validate_id(e, user, &at, "gid");
        for (j, group) in user.items("supplementalGroups").iter().enumerate() {
            let at = at.child("supplementalGroups").index(j);
            super::rules::validate_range(e, &at, group.as_i64().unwrap_or(0), 0, i64::from(i32::MAX));
        }
    }
}

const MAX_MESSAGE_BYTES: usize = 1024;

/// Device health may only be reported for resources that the container requests.
fn validate_allocated_resources(e: &mut ErrorList, statuses: &[Value], path: &Path, containers: &[Value]) {
    for (i, status) in statuses.iter().enumerate() {
        let container = containers.iter().find(|one| one.text("name") == status.text("name"));
        for (j, resource) in status.items("allocatedResourcesStatus").iter().enumerate() {
            let at = path.index(i).child("allocatedResourcesStatus").index(j);
            if let Some(container) = container {
                validate_resource_name(e, resource.text("name"), container, &at.child("name"));
            }
            let mut seen = BTreeSet::new();
            for (k, device) in resource.items("resources").iter().enumerate() {
                let at = at.child("resources").index(k);
                const HEALTH_VALUES: &[&str] = &["Healthy", "Unhealthy", "Unknown"];
                if !HEALTH_VALUES.contains(&device.text("health")) {
                    e.not_supported(&at.child("health"), device.text("health"), HEALTH_VALUES);
                }
                match device.at("message").as_str() {
                    Some("") => e.required(&at.child("message"), "must be non-empty if specified"),
                    Some(message) if message.len() > MAX_MESSAGE_BYTES => {
                        e.too_long(&at.child("message"), MAX_MESSAGE_BYTES)
                    }
                    _ => {}
                }
                if !seen.insert(device.text("resourceID")) {
                    e.duplicate(&at.child("resourceID"), device.text("resourceID"));
                }
            }
        }
    }
}

fn validate_resource_name(e: &mut ErrorList, name: &str, container: &Value, path: &Path) {
    let resources = container.at("resources");
    if let Some(claim_request) = name.strip_prefix("claim:") {
        let found = resources.items("claims").iter().any(|claim| match claim.text("request") {
            "" => claim_request == claim.text("name"),
            request => claim_request == format!("{}/{request}", claim.text("name")),
        });
        if !found {
            let message = "must match one of the container's resource claims in a format 'claim:<claimName>/<request>' or 'claim:<claimName>' if request is empty";
            e.invalid(path, name, message);
        }
    } else if resources.at("requests").get(name).is_none() {
        e.invalid(path, name, "must match one of the container's resource requests");
    }
}
