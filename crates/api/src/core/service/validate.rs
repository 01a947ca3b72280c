//! Validates Services, in upstream's order.

use serde_json::Value;

use super::{cluster_ips, has_external_traffic, is_headless, needs_health_check, node_port, strings};
use crate::core::rules;
use crate::field::{ErrorList, ErrorType, Path};
use crate::json::JsonExt;
use crate::networking::ip;
use crate::{meta, names};

pub(super) const MAY_NOT_CHANGE: &str = "may not change once set";

const TYPES: &[&str] = &["ClusterIP", "ExternalName", "LoadBalancer", "NodePort"];
const PROTOCOLS: &[&str] = &["SCTP", "TCP", "UDP"];
const SESSION_AFFINITY_TYPES: &[&str] = &["ClientIP", "None"];
const TRAFFIC_POLICIES: &[&str] = &["Cluster", "Local"];
const TRAFFIC_DISTRIBUTION_TYPES: &[&str] = &["PreferClose", "PreferSameZone", "PreferSameNode"];
const MAX_AFFINITY_SECONDS: i64 = 86400;
const ONLY_LOAD_BALANCER: &str = "may only be used when `type` is 'LoadBalancer'";
const TOPOLOGY_MODE: &str = "service.kubernetes.io/topology-mode";
const TOPOLOGY_HINTS: &str = "service.kubernetes.io/topology-aware-hints";
const SOURCE_RANGES: &str = "service.beta.kubernetes.io/load-balancer-source-ranges";

pub(super) fn validate_service(obj: &Value, errors: &mut ErrorList) {
    let spec = obj.at("spec");
    let path = Path::new("spec");
    let kind = spec.text("type");

    topology_annotations(obj, errors);
    if spec.items("ports").is_empty() && !is_headless(spec) && kind != "ExternalName" {
        errors.required(&path.child("ports"), "");
    }
    match kind {
        "LoadBalancer" | "NodePort" if is_headless(spec) => {
            let detail = format!("may not be set to 'None' for {kind} services");
            errors.invalid(&path.child("clusterIPs").index(0), "None", &detail);
        }
        "ExternalName" => external_name(spec, errors),
        _ => {}
    }
    validate_ports(spec, errors);
    if spec.has("selector") {
        meta::validate_labels(spec.at("selector"), &path.child("selector"), errors);
    }
    session_affinity(spec, errors);
    cluster_ips::validate_cluster_ips(spec, errors);
    for (i, address) in strings(spec, "externalIPs").iter().enumerate() {
        let path = path.child("externalIPs").index(i);
        let before = errors.0.len();
        rules::validate_name(address, names::ip_any_form, &path, errors);
        if errors.0.len() == before {
            ip::validate_endpoint_ip(address, &path, errors);
        }
    }
    rules::required_one_of(kind, TYPES, &path.child("type"), errors);
    validate_duplicate_ports(spec, errors);
    source_ranges(obj, errors);
    load_balancer_fields(spec, errors);
    traffic_policies(spec, errors);
    rules::optional_one_of(
        spec.at("trafficDistribution"),
        TRAFFIC_DISTRIBUTION_TYPES,
        &path.child("trafficDistribution"),
        errors,
    );
}

pub(super) fn validate_status(obj: &Value, errors: &mut ErrorList) {
    let balancer = obj.at("status").at("loadBalancer");
    let path = Path::new("status.loadBalancer");
    if obj.at("spec").text("type") != "LoadBalancer" && !balancer.items("ingress").is_empty() {
        errors.forbidden(&path.child("ingress"), "may only be used when `spec.type` is 'LoadBalancer'");
    } else {
        load_balancer_status(balancer, &path, errors);
    }
}

/// Validates the ingress addresses of a load balancer.
fn load_balancer_status(balancer: &Value, path: &Path, errors: &mut ErrorList) {
    for (i, ingress) in balancer.items("ingress").iter().enumerate() {
        let path = path.child("ingress").index(i);
        let (address, hostname) = (ingress.text("ip"), ingress.text("hostname"));
        if !address.is_empty() {
            rules::validate_name(address, names::ip_any_form, &path.child("ip"), errors);
        }
        let mode_path = path.child("ipMode");
        match ingress.at("ipMode").as_str() {
            None if !address.is_empty() => {
                errors.required(&mode_path, "must be specified when `ip` is set");
            }
            Some(_) if address.is_empty() => {
                errors.forbidden(&mode_path, "may not be specified when `ip` is not set");
            }
            _ => rules::optional_one_of(ingress.at("ipMode"), &["Proxy", "VIP"], &mode_path, errors),
        }
        if !hostname.is_empty() {
            rules::validate_name(hostname, names::dns1123_subdomain, &path.child("hostname"), errors);
            if ip::parse(hostname).is_some() {
                errors.invalid(&path.child("hostname"), hostname, "must be a DNS name, not an IP address");
            }
        }
    }
}

fn topology_annotations(obj: &Value, errors: &mut ErrorList) {
    let annotations = rules::annotations(obj);
    if let (Some(mode), Some(hints)) =
        (annotations.at(TOPOLOGY_MODE).as_str(), annotations.at(TOPOLOGY_HINTS).as_str())
        && mode != hints
    {
        let detail = format!("must match annotations[{TOPOLOGY_HINTS}] when both are specified");
        errors.invalid(&Path::new("metadata.annotations").key(TOPOLOGY_MODE), mode, &detail);
    }
}

fn external_name(spec: &Value, errors: &mut ErrorList) {
    let path = Path::new("spec");
    let forbidden_message = "may not be set for ExternalName services";
    for field in ["clusterIPs", "ipFamilies", "ipFamilyPolicy"] {
        if !rules::is_empty(spec.at(field)) {
            errors.forbidden(&path.child(field), forbidden_message);
        }
    }
    let target = spec.text("externalName");
    let target = target.strip_suffix('.').unwrap_or(target);
    rules::validate_required_name(target, names::dns1123_subdomain, &path.child("externalName"), errors);
}

fn validate_ports(spec: &Value, errors: &mut ErrorList) {
    let ports = spec.items("ports");
    let repeated = rules::find_duplicates(ports.iter().map(|port| port.text("name")));
    for (i, port) in ports.iter().enumerate() {
        let path = Path::new("spec.ports").index(i);
        let name = port.text("name");
        if name.is_empty() {
            if ports.len() > 1 {
                errors.required(&path.child("name"), "");
            }
        } else {
            rules::validate_name(name, names::dns1123_label, &path.child("name"), errors);
            if repeated[i] {
                errors.duplicate(&path.child("name"), name);
            }
        }
        rules::validate_port_number(port.int("port").unwrap_or(0), &path.child("port"), errors);
        rules::required_one_of(port.text("protocol"), PROTOCOLS, &path.child("protocol"), errors);
        rules::validate_port_number_or_name(port.at("targetPort"), &path.child("targetPort"), errors);
        if let Some(protocol) = port.at("appProtocol").as_str() {
            rules::validate_name(protocol, names::qualified_name, &path.child("appProtocol"), errors);
        }
    }
}

fn session_affinity(spec: &Value, errors: &mut ErrorList) {
    let affinity = spec.text("sessionAffinity");
    rules::required_one_of(affinity, SESSION_AFFINITY_TYPES, &Path::new("spec.sessionAffinity"), errors);
    let path = Path::new("spec.sessionAffinityConfig");
    let config = spec.at("sessionAffinityConfig");
    if affinity == "None" && !config.is_null() {
        errors.forbidden(&path, "must not be set when session affinity is None");
    }
    if affinity != "ClientIP" {
        return;
    }
    let needed = "when session affinity type is ClientIP";
    let client = config.at("clientIP");
    let timeout_path = path.child("clientIP.timeoutSeconds");
    if config.is_null() {
        errors.required(&path, needed);
    } else if client.is_null() {
        errors.required(&path.child("clientIP"), needed);
    } else if let Some(timeout) = client.int("timeoutSeconds") {
        if !(1..=MAX_AFFINITY_SECONDS).contains(&timeout) {
            let detail = format!("must be greater than 0 and less than {MAX_AFFINITY_SECONDS}");
            errors.invalid(&timeout_path, timeout, &detail);
        }
    } else {
        errors.required(&timeout_path, needed);
    }
}

fn validate_duplicate_ports(spec: &Value, errors: &mut ErrorList) {
    let ports = spec.items("ports");
    let path = Path::new("spec.ports");
    if spec.text("type") == "ClusterIP" {
        for (i, _) in ports.iter().enumerate().filter(|(_, port)| node_port(port) != 0) {
            errors.forbidden(&path.index(i).child("nodePort"), "may not be used when `type` is 'ClusterIP'");
        }
    }
    let repeated = rules::find_duplicates(ports.iter().map(|port| (port.text("protocol"), node_port(port))));
    for (i, port) in ports.iter().enumerate().filter(|(_, port)| node_port(port) != 0) {
        if repeated[i] {
            errors.duplicate(&path.index(i).child("nodePort"), node_port(port));
        }
    }
    let number = |port: &Value| port.int("port").unwrap_or(0);
    let repeated = rules::find_duplicates(ports.iter().map(|port| (port.text("protocol"), number(port))));
    for (i, port) in ports.iter().enumerate() {
        if repeated[i] {
            // Upstream prints its internal struct with Go field names.
            let message = format!(
                "Duplicate value: {{\"Name\":\"\",\"Protocol\":{},\"AppProtocol\":null,\"Port\":{},\"TargetPort\":0,\"NodePort\":0}}",
                Value::from(port.text("protocol")),
                number(port),
            );
            errors.push(ErrorType::Duplicate, &path.index(i), message);
        }
    }
}

/// Validates the source ranges of a load balancer, in the field or in the legacy annotation.
fn source_ranges(obj: &Value, errors: &mut ErrorList) {
    let spec = obj.at("spec");
    let ranges = strings(spec, "loadBalancerSourceRanges");
    let annotation = rules::annotations(obj).at(SOURCE_RANGES).as_str();
    let path = if !ranges.is_empty() {
        Path::new("spec.LoadBalancerSourceRanges")
    } else if annotation.is_some() {
        Path::new("metadata.annotations").key(SOURCE_RANGES)
    } else {
        return;
    };
    if spec.text("type") != "LoadBalancer" {
        errors.forbidden(&path, ONLY_LOAD_BALANCER);
    }
    for (i, range) in ranges.iter().enumerate() {
        rules::validate_name(range.trim(), names::cidr_any_form, &path.index(i), errors);
    }
    if ranges.is_empty()
        && let Some(annotation) = annotation.map(str::trim).filter(|annotation| !annotation.is_empty())
    {
        for range in annotation.split(',') {
            rules::validate_name(range.trim(), names::cidr_any_form, &path, errors);
        }
    }
}

fn load_balancer_fields(spec: &Value, errors: &mut ErrorList) {
    let path = Path::new("spec");
    let is_load_balancer = spec.text("type") == "LoadBalancer";
    let allocate = "allocateLoadBalancerNodePorts";
    if spec.has(allocate) && !is_load_balancer {
        errors.forbidden(&path.child(allocate), ONLY_LOAD_BALANCER);
    }
    if !spec.has(allocate) && is_load_balancer {
        errors.required(&Path::new(allocate), "");
    }
    if let Some(class) = spec.at("loadBalancerClass").as_str() {
        if is_load_balancer {
            rules::validate_name(class, names::qualified_name, &path.child("loadBalancerClass"), errors);
        } else {
            errors.forbidden(&path.child("loadBalancerClass"), ONLY_LOAD_BALANCER);
        }
    }
}

fn traffic_policies(spec: &Value, errors: &mut ErrorList) {
    let path = Path::new("spec");
    let external = spec.text("externalTrafficPolicy");
    let external_path = path.child("externalTrafficPolicy");
    if has_external_traffic(spec) {
        rules::required_one_of(external, TRAFFIC_POLICIES, &external_path, errors);
    } else if !external.is_empty() {
        errors.invalid(&external_path, external, "may only be set for externally-accessible services");
    }

    let health = spec.int("healthCheckNodePort").unwrap_or(0);
    let health_path = path.child("healthCheckNodePort");
    match (needs_health_check(spec), health) {
        (false, 0) => {}
        (false, port) => errors.invalid(
            &health_path,
            port,
            "may only be set when `type` is 'LoadBalancer' and `externalTrafficPolicy` is 'Local'",
        ),
        (true, 0) => errors.required(&health_path, ""),
        (true, port) => rules::validate_port_number(port, &health_path, errors),
    }

    let internal = spec.at("internalTrafficPolicy");
    let internal_path = path.child("internalTrafficPolicy");
    if internal.is_null() && matches!(spec.text("type"), "ClusterIP" | "NodePort" | "LoadBalancer") {
        errors.required(&internal_path, "");
    }
    rules::optional_one_of(internal, TRAFFIC_POLICIES, &internal_path, errors);
}
