//! Service: REST strategy and validation.
//!
//! A Service is a union discriminated by `spec.type`, with allocated IPs and ports. The server calls
//! [`alloc::allocate`] before `prepare_*`, so that validation sees the allocated values.

use serde_json::Value;

use crate::field::ErrorList;
use crate::json::JsonExt;
use crate::strategy::{NameFormat, RestStrategy};

pub mod alloc;
mod cluster_ips;
mod update;
mod validate;
mod warnings;

pub struct Service;

impl RestStrategy for Service {
    fn prepare_for_update(&self, new: &mut Value, old: &Value) {
        update::drop_type_dependent_fields(new, old);
    }

    fn validate(&self, obj: &Value, errors: &mut ErrorList) {
        validate::validate_service(obj, errors);
    }

    fn validate_update(&self, new: &Value, old: &Value, errors: &mut ErrorList) {
        update::validate(new, old, errors);
    }

    fn validate_status_update(&self, new: &Value, _old: &Value, errors: &mut ErrorList) {
        validate::validate_status(new, errors);
    }

    fn name_format(&self) -> NameFormat {
        NameFormat::Label
    }

    fn selectable_fields(&self, obj: &Value) -> Vec<(&'static str, String)> {
        let spec = obj.at("spec");
        vec![
            ("spec.clusterIP", spec.text("clusterIP").to_owned()),
            ("spec.type", spec.text("type").to_owned()),
        ]
    }

    fn warnings(&self, new: &Value, _old: Option<&Value>) -> Vec<String> {
        warnings::service_warnings(new)
    }
}

/// Whether the Service has no cluster IP (`clusterIPs: ["None"]`).
fn is_headless(spec: &Value) -> bool {
    matches!(spec.items("clusterIPs"), [Value::String(only)] if only == "None")
}

/// Every type except ExternalName has a cluster IP, which may be `None`.
fn needs_cluster_ip(spec: &Value) -> bool {
    spec.text("type") != "ExternalName"
}

/// Whether the Service is reachable from outside the cluster, so that `externalTrafficPolicy` applies.
fn has_external_traffic(spec: &Value) -> bool {
    match spec.text("type") {
        "LoadBalancer" | "NodePort" => true,
        "ClusterIP" => !spec.items("externalIPs").is_empty(),
        _ => false,
    }
}

/// A load balancer with `externalTrafficPolicy: Local` checks each node for endpoints.
fn needs_health_check(spec: &Value) -> bool {
    spec.text("type") == "LoadBalancer" && spec.text("externalTrafficPolicy") == "Local"
}

fn node_port(port: &Value) -> i64 {
    port.int("nodePort").unwrap_or(0)
}

/// The node ports of a spec in order.
fn node_ports(spec: &Value) -> impl Iterator<Item = i64> {
    spec.items("ports").iter().map(node_port).filter(|port| *port != 0)
}

fn strings<'a>(spec: &'a Value, name: &str) -> Vec<&'a str> {
    spec.items(name).iter().map(|item| item.as_str().unwrap_or("")).collect()
}

#[cfg(test)]
mod tests;
