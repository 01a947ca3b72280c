//! The cells of services, endpoints and ingresses.

use std::collections::BTreeSet;

use serde_json::Value;

use super::text::{annotation, join, join_limited, or_default, qualified, strings};
use crate::json::JsonExt as _;

pub fn cluster_ip(service: &Value) -> String {
    let first = service.at("spec").items("clusterIPs").first().and_then(Value::as_str);
    first.unwrap_or("<none>").to_owned()
}

pub fn external_ip(service: &Value) -> String {
    let spec = service.at("spec");
    let external = join(strings(spec.items("externalIPs")));
    match spec.text("type") {
        "ClusterIP" | "NodePort" => or_default(external, "<none>"),
        "LoadBalancer" => {
            let parts = [ingress_points(service), external];
            or_default(join(parts.iter().map(String::as_str).filter(|part| !part.is_empty())), "<pending>")
        }
        "ExternalName" => spec.text("externalName").to_owned(),
        _ => "<unknown>".to_owned(),
    }
}

pub fn ports(service: &Value) -> String {
    let port = |port: &Value| {
        let (number, protocol) = (port.int("port").unwrap_or(0), port.text("protocol"));
        match port.int("nodePort") {
            Some(node_port) if node_port > 0 => format!("{number}:{node_port}/{protocol}"),
            _ => format!("{number}/{protocol}"),
        }
    };
    let all: Vec<String> = service.at("spec").items("ports").iter().map(port).collect();
    or_default(all.join(","), "<none>")
}

/// The ingress addresses of a load balancer.
pub fn ingress_points(obj: &Value) -> String {
    let point = |point: &Value| match point.text("ip") {
        "" => point.text("hostname").to_owned(),
        ip => ip.to_owned(),
    };
    let points: BTreeSet<String> =
        obj.path("status.loadBalancer").items("ingress").iter().map(point).collect();
    join(points.iter().map(String::as_str).filter(|point| !point.is_empty()))
}

pub fn ingress_hosts(ingress: &Value) -> String {
    let rules = ingress.at("spec").items("rules");
    let mut hosts = Vec::new();
    let mut more = false;
    for rule in rules {
        // Upstream counts all rules after the third host, with or without a host.
        more = more || hosts.len() == 3;
        if !more && !rule.text("host").is_empty() {
            hosts.push(rule.text("host"));
        }
    }
    let rendered = or_default(hosts.join(","), "*");
    if more { format!("{rendered} + {} more...", rules.len() - 3) } else { rendered }
}

pub fn ingress_ports(ingress: &Value) -> String {
    if ingress.at("spec").items("tls").is_empty() { "80" } else { "80, 443" }.to_owned()
}

pub fn ingress_class_name(class: &Value) -> String {
    let name = class.at("metadata").text("name");
    let default = annotation(class, "ingressclass.kubernetes.io/is-default-class") == "true";
    if default { format!("{name} (default)") } else { name.to_owned() }
}

pub fn ingress_class_parameters(class: &Value) -> String {
    let parameters = class.path("spec.parameters");
    if parameters.is_null() {
        return "<none>".to_owned();
    }
    let kind = match parameters.at("apiGroup").as_str() {
        Some(group) => format!("{}.{group}", parameters.text("kind")),
        None => parameters.text("kind").to_owned(),
    };
    format!("{kind}/{}", parameters.text("name"))
}

pub fn endpoints(obj: &Value) -> String {
    let subsets = obj.items("subsets");
    if subsets.is_empty() {
        return "<none>".to_owned();
    }
    let mut rendered = Vec::new();
    let mut count = 0;
    for subset in subsets {
        let (addresses, ports) = (subset.items("addresses"), subset.items("ports"));
        // The Endpoints of a headless Service may have addresses without ports.
        let ports: Vec<Option<i64>> = match ports {
            [] => vec![None],
            ports => ports.iter().map(|port| Some(port.int("port").unwrap_or(0))).collect(),
        };
        for port in ports {
            count += addresses.len();
            let left = 3usize.saturating_sub(rendered.len());
            rendered.extend(addresses.iter().take(left).map(|address| host_port(address.text("ip"), port)));
        }
    }
    join_limited(3, &rendered, count, ",")
}

pub fn slice_ports(slice: &Value) -> String {
    let port = |port: &Value| match (port.int("port"), port.at("name").as_str()) {
        (Some(number), _) => number.to_string(),
        (None, Some(name)) => name.to_owned(),
        (None, None) => "*".to_owned(),
    };
    let all: Vec<String> = slice.items("ports").iter().map(port).collect();
    or_default(join_limited(3, &all, all.len(), ","), "<unset>")
}

pub fn slice_endpoints(slice: &Value) -> String {
    let addresses = slice.items("endpoints").iter().flat_map(|endpoint| strings(endpoint.items("addresses")));
    let all: Vec<String> = addresses.map(str::to_owned).collect();
    or_default(join_limited(3, &all, all.len(), ","), "<unset>")
}

pub fn cidrs(obj: &Value) -> String {
    join(strings(obj.at("spec").items("cidrs")))
}

pub fn parent(address: &Value) -> String {
    let parent = address.path("spec.parentRef");
    if parent.is_null() {
        return "<none>".to_owned();
    }
    let resource = qualified(parent.text("resource"), parent.text("group")).to_lowercase();
    match parent.text("namespace") {
        "" => format!("{resource}/{}", parent.text("name")),
        namespace => format!("{resource}/{namespace}/{}", parent.text("name")),
    }
}

fn host_port(ip: &str, port: Option<i64>) -> String {
    match port {
        None => ip.to_owned(),
        Some(port) if ip.contains(':') => format!("[{ip}]:{port}"),
        Some(port) => format!("{ip}:{port}"),
    }
}
