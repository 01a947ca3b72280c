//! Validates Service updates and drops fields that do not apply to the new type.

use std::collections::BTreeSet;

use serde_json::Value;

use super::{
    has_external_traffic, is_headless, needs_cluster_ip, needs_health_check, node_ports, strings, validate,
};
use crate::field::{ErrorList, Path};
use crate::json::JsonExt;

/// Drops fields that do not apply after a change of type, unless the client changed them as well:
/// validation reports these.
pub(super) fn drop_type_dependent_fields(new: &mut Value, old: &Value) {
    let before = old.at("spec");
    let mut removed_fields: Vec<&str> = Vec::new();
    let mut drop_node_ports = false;
    {
        let after = new.at("spec");
        let same = |field: &str| before.at(field) == after.at(field);
        if needs_cluster_ip(before) && !needs_cluster_ip(after) {
            if before.text("clusterIP") == after.text("clusterIP")
                && strings(before, "clusterIPs") == strings(after, "clusterIPs")
            {
                removed_fields.extend(["clusterIP", "clusterIPs"]);
            }
            removed_fields.extend(["ipFamilies", "ipFamilyPolicy"].into_iter().filter(|field| same(field)));
        }
        if uses_node_ports(before) && !uses_node_ports(after) {
            let known: BTreeSet<i64> = node_ports(before).collect();
            drop_node_ports = node_ports(after).all(|port| known.contains(&port));
        }
        if needs_health_check(before) && !needs_health_check(after) && same("healthCheckNodePort") {
            removed_fields.push("healthCheckNodePort");
        }
        if before.text("type") == "LoadBalancer" && after.text("type") != "LoadBalancer" {
            removed_fields.extend(
                ["allocateLoadBalancerNodePorts", "loadBalancerClass"]
                    .into_iter()
                    .filter(|field| same(field)),
            );
        }
        if has_external_traffic(before) && !has_external_traffic(after) && same("externalTrafficPolicy") {
            removed_fields.push("externalTrafficPolicy");
        }
    }
    let is_load_balancer = new.at("spec").text("type") == "LoadBalancer";
    if let Some(spec) = new.get_mut("spec").and_then(Value::as_object_mut) {
        for field in removed_fields {
            spec.remove(field);
        }
        if drop_node_ports && let Some(ports) = spec.get_mut("ports").and_then(Value::as_array_mut) {
            for port in ports.iter_mut().filter_map(Value::as_object_mut) {
                port.remove("nodePort");
            }
        }
    }
    if !is_load_balancer && new.at("status").has("loadBalancer") {
        new.object_mut("status").insert("loadBalancer".to_owned(), Value::Object(serde_json::Map::new()));
    }
}

pub(super) fn validate(new: &Value, old: &Value, errors: &mut ErrorList) {
    let (after, before) = (new.at("spec"), old.at("spec"));
    if needs_cluster_ip(after) && needs_cluster_ip(before) {
        validate_cluster_ips_update(after, before, errors);
        validate_ip_families_update(after, before, errors);
    }
    let class = "loadBalancerClass";
    if before.text("type") == "LoadBalancer"
        && after.text("type") == "LoadBalancer"
        && before.at(class) != after.at(class)
    {
        errors.invalid(
            &Path::new("spec.loadBalancerClass"),
            after.at(class).clone(),
            validate::MAY_NOT_CHANGE,
        );
    }
    if needs_health_check(before)
        && needs_health_check(after)
        && before.int("healthCheckNodePort") != after.int("healthCheckNodePort")
    {
        errors.forbidden(&Path::new("spec.healthCheckNodePort"), "field is immutable");
    }
}

/// The first cluster IP is immutable. A second may be added, or removed if the policy allows it.
fn validate_cluster_ips_update(after: &Value, before: &Value, errors: &mut ErrorList) {
    if is_headless(before) && is_headless(after) {
        return;
    }
    let (new, old) = (strings(after, "clusterIPs"), strings(before, "clusterIPs"));
    let path = Path::new("spec.clusterIPs");
    let rendered = || Value::from(new.clone());
    if new.len() == old.len() {
        for i in (0..new.len()).filter(|i| new[*i] != old[*i]) {
            errors.invalid(&path.index(i), rendered(), validate::MAY_NOT_CHANGE);
        }
        return;
    }
    if new.is_empty() {
        errors.invalid(&path.index(0), Value::Null, "primary clusterIP can not be unset");
    }
    if let (Some(new), Some(old)) = (new.first(), old.first())
        && new != old
    {
        errors.invalid(&path.index(0), rendered(), validate::MAY_NOT_CHANGE);
    }
    if new.len() < old.len() && new.len() == 1 {
        require_single_stack_to_release("clusterIP", after, errors);
    }
}

fn validate_ip_families_update(after: &Value, before: &Value, errors: &mut ErrorList) {
    // Headless Services have no allocated addresses, so their families may change.
    if is_headless(before) || is_headless(after) {
        return;
    }
    let (new, old) = (strings(after, "ipFamilies"), strings(before, "ipFamilies"));
    let path = Path::new("spec.ipFamilies").index(0);
    if new.len() == old.len() {
        for _ in (0..new.len()).filter(|i| new[*i] != old[*i]) {
            errors.invalid(&path, Value::from(new.clone()), validate::MAY_NOT_CHANGE);
        }
        return;
    }
    let is_release = new.len() < old.len();
    if is_release && after.items("clusterIPs").is_empty() {
        errors.invalid(&path, Value::from(new.clone()), "primary ipFamily can not be unset");
    }
    if let (Some(new), Some(old)) = (new.first(), old.first())
        && new != old
    {
        // Upstream prints the addresses here instead of the families.
        errors.invalid(&path, after.at("clusterIPs").clone(), validate::MAY_NOT_CHANGE);
    }
    if is_release && new.len() == 1 {
        require_single_stack_to_release("ipFamily", after, errors);
    }
}

fn require_single_stack_to_release(what: &str, after: &Value, errors: &mut ErrorList) {
    if after.text("ipFamilyPolicy") != "SingleStack" {
        let detail = format!("must be set to 'SingleStack' when releasing the secondary {what}");
        errors.invalid(&Path::new("spec.ipFamilyPolicy"), after.at("ipFamilyPolicy").clone(), &detail);
    }
}

/// Whether the type supports node ports.
fn uses_node_ports(spec: &Value) -> bool {
    matches!(spec.text("type"), "NodePort" | "LoadBalancer")
}
