//! Warnings about Services.

use serde_json::Value;

use super::strings;
use crate::field::Path;
use crate::json::JsonExt;
use crate::networking::ip;

pub(super) fn service_warnings(obj: &Value) -> Vec<String> {
    let spec = obj.at("spec");
    let kind = spec.text("type");
    let external_ips = strings(spec, "externalIPs");
    let headless = kind == "ClusterIP" && spec.text("clusterIP") == "None";
    let mut warnings = Vec::new();

    if obj.at("metadata").at("annotations").has("service.kubernetes.io/topology-aware-hints") {
        warnings.push(
            "annotation service.kubernetes.io/topology-aware-hints is deprecated, please use service.kubernetes.io/topology-mode instead"
                .to_owned(),
        );
    }
    if !matches!(spec.text("clusterIP"), "" | "None") {
        warnings.extend(ip_format_warnings(&strings(spec, "clusterIPs"), "spec.clusterIPs"));
    }
    if headless {
        if !spec.text("loadBalancerIP").is_empty() {
            warnings.push("spec.loadBalancerIP is ignored for headless services".to_owned());
        }
        if !external_ips.is_empty() {
            warnings.push("spec.externalIPs is ignored for headless services".to_owned());
        }
        if spec.text("sessionAffinity") != "None" {
            warnings.push("spec.SessionAffinity is ignored for headless services".to_owned());
        }
    }
    warnings.extend(ip_format_warnings(&external_ips, "spec.externalIPs"));
    if !external_ips.is_empty() && !headless && kind != "ExternalName" {
        warnings.push(
            "spec.externalIPs is deprecated and may no longer be implemented in some clusters".to_owned(),
        );
    }
    warnings.extend(ip::format_warning(spec.text("loadBalancerIP"), &Path::new("spec.loadBalancerIP")));
    let ranges = Path::new("spec.loadBalancerSourceRanges");
    for (i, range) in strings(spec, "loadBalancerSourceRanges").iter().enumerate() {
        warnings.extend(ip::cidr_warnings(range, &ranges.index(i)));
    }
    if kind == "ExternalName" && !external_ips.is_empty() {
        warnings.push("spec.externalIPs is ignored when spec.type is \"ExternalName\"".to_owned());
    }
    if kind != "ExternalName" && !spec.text("externalName").is_empty() {
        warnings.push("spec.externalName is ignored when spec.type is not \"ExternalName\"".to_owned());
    }
    if spec.text("trafficDistribution") == "PreferClose" {
        warnings.push(
            "spec.trafficDistribution: \"PreferClose\" is deprecated; use \"PreferSameZone\"".to_owned(),
        );
    }
    warnings
}

fn ip_format_warnings(addresses: &[&str], path: &str) -> Vec<String> {
    let path = Path::new(path);
    addresses
        .iter()
        .enumerate()
        .filter_map(|(i, address)| ip::format_warning(address, &path.index(i)))
        .collect()
}
