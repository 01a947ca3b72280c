//! Service: what is special about it.
//!
//! A Service is a union discriminated by `spec.type`, with fields allocated from pools. The server calls
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

/// `spec.clusterIPs` asks for no address at all.
fn is_headless(spec: &Value) -> bool {
    matches!(spec.items("clusterIPs"), [Value::String(only)] if only == "None")
}

/// Every type but ExternalName has a cluster IP, `None` included.
fn needs_cluster_ip(spec: &Value) -> bool {
    spec.text("type") != "ExternalName"
}

/// Reachable from outside the cluster, so that `externalTrafficPolicy` means something.
fn has_external_traffic(spec: &Value) -> bool {
    match spec.text("type") {
        "LoadBalancer" | "NodePort" => true,
        "ClusterIP" => !spec.items("externalIPs").is_empty(),
        _ => false,
    }
}

/// Load balancers that spread only to nodes with endpoints ask each node whether it has any.
fn needs_health_check(spec: &Value) -> bool {
    spec.text("type") == "LoadBalancer" && spec.text("externalTrafficPolicy") == "Local"
}

fn node_port(port: &Value) -> i64 {
    port.int("nodePort").unwrap_or(0)
}

/// The node ports set in a spec, in order.
fn node_ports(spec: &Value) -> impl Iterator<Item = i64> {
    spec.items("ports").iter().map(node_port).filter(|port| *port != 0)
}

/// The strings of a list field.
fn strings<'a>(spec: &'a Value, name: &str) -> Vec<&'a str> {
    spec.items(name).iter().map(|item| item.as_str().unwrap_or("")).collect()
}

#[cfg(test)]
mod tests;
