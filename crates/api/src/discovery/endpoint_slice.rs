//! EndpointSlice: REST strategy and validation.

use serde_json::Value;

use crate::core::endpoints::PROTOCOLS;
use crate::core::rules;
use crate::field::{ErrorList, Path};
use crate::json::JsonExt;
use crate::networking::ip;
use crate::strategy::RestStrategy;
use crate::{meta, names};

pub struct EndpointSlice;

const ADDRESS_TYPES: &[&str] = &["FQDN", "IPv4", "IPv6"];
const MAX_ENDPOINTS: usize = 1000;
const MAX_ADDRESSES: usize = 100;
const MAX_PORTS: usize = 20000;
const MAX_HINTS: usize = 8;

impl RestStrategy for EndpointSlice {
    fn prepare(&self, new: &mut Value) {
        drop_topology(new);
    }

    fn validate(&self, obj: &Value, errors: &mut ErrorList) {
        let kind = obj.text("addressType");
        rules::required_one_of(kind, ADDRESS_TYPES, &Path::new("addressType"), errors);
        ports(obj.items("ports"), &Path::new("ports"), errors);
        let endpoints = obj.items("endpoints");
        let path = Path::new("endpoints");
        if endpoints.len() > MAX_ENDPOINTS {
            errors.too_many(&path, endpoints.len(), MAX_ENDPOINTS);
            return;
        }
        for (i, endpoint) in endpoints.iter().enumerate() {
            check_endpoint(endpoint, kind, &path.index(i), errors);
        }
    }

    fn validate_update(&self, new: &Value, old: &Value, errors: &mut ErrorList) {
        let field = "addressType";
        meta::validate_immutable(new.at(field), old.at(field), &Path::new(field), errors);
    }

    fn warnings(&self, new: &Value, old: Option<&Value>) -> Vec<String> {
        let mut warnings = Vec::new();
        if old.is_none() && new.text("addressType") == "FQDN" {
            warnings.push("spec.addressType: FQDN endpoints are deprecated".to_owned());
        }
        for (i, endpoint) in new.items("endpoints").iter().enumerate() {
            for (j, address) in endpoint.items("addresses").iter().enumerate() {
                let path = Path::new("endpoints").index(i).child("addresses").index(j);
                warnings.extend(ip::format_warning(address.as_str().unwrap_or(""), &path));
            }
        }
        warnings
    }
}

/// `deprecatedTopology` is a field of v1beta1. The v1 API does not accept it.
fn drop_topology(obj: &mut Value) {
    let endpoints = obj.get_mut("endpoints").and_then(Value::as_array_mut);
    for endpoint in endpoints.into_iter().flatten().filter_map(Value::as_object_mut) {
        endpoint.remove("deprecatedTopology");
    }
}

fn ports(ports: &[Value], path: &Path, errors: &mut ErrorList) {
    if ports.len() > MAX_PORTS {
        errors.too_many(path, ports.len(), MAX_PORTS);
        return;
    }
    let mut seen = std::collections::HashSet::new();
    for (i, port) in ports.iter().enumerate() {
        let path = path.index(i);
        let name = port.text("name");
        if !name.is_empty() {
            rules::validate_name(name, names::dns1123_label, &path.child("name"), errors);
        }
        if !seen.insert(name) {
            errors.duplicate(&path.child("name"), name);
        }
        rules::required_one_of(port.text("protocol"), PROTOCOLS, &path.child("protocol"), errors);
        if let Some(protocol) = port.at("appProtocol").as_str() {
            rules::validate_name(protocol, names::qualified_name, &path.child("appProtocol"), errors);
        }
    }
}

fn check_endpoint(endpoint: &Value, kind: &str, path: &Path, errors: &mut ErrorList) {
    let addresses = endpoint.items("addresses");
    let addresses_path = path.child("addresses");
    if addresses.is_empty() {
        errors.required(&addresses_path, "must contain at least 1 address");
    } else if addresses.len() > MAX_ADDRESSES {
        errors.too_many(&addresses_path, addresses.len(), MAX_ADDRESSES);
    }
    for (i, address) in addresses.iter().enumerate() {
        check_address(address.as_str().unwrap_or(""), kind, &addresses_path, i, errors);
    }
    if let Some(node) = endpoint.at("nodeName").as_str() {
        rules::validate_name(node, names::dns1123_subdomain, &path.child("nodeName"), errors);
    }
    if let Some(hostname) = endpoint.at("hostname").as_str() {
        rules::validate_name(hostname, names::dns1123_label, &path.child("hostname"), errors);
    }
    for (field, rule) in
        [("forZones", names::label_value as fn(&str) -> Vec<String>), ("forNodes", names::dns1123_subdomain)]
    {
        let hints = endpoint.at("hints").items(field);
        let path = path.child("hints").child(field);
        if hints.len() > MAX_HINTS {
            errors.too_many(&path, hints.len(), MAX_HINTS);
            return;
        }
        for (i, hint) in hints.iter().enumerate() {
            let path = path.index(i).child("name");
            let name = hint.text("name");
            if hints[..i].iter().any(|other| other.text("name") == name) {
                errors.duplicate(&path, name);
            }
            rules::validate_name(name, rule, &path, errors);
        }
    }
}

fn check_address(address: &str, kind: &str, path: &Path, index: usize, errors: &mut ErrorList) {
    let at = path.index(index);
    let (rule, v6): (fn(&str) -> Vec<String>, bool) = match kind {
        "IPv4" => (names::ip_any_form, false),
        "IPv6" => (names::ip, true),
        "FQDN" => return names::fully_qualified_domain_name(address, &at, errors),
        _ => return,
    };
    let before = errors.0.len();
    rules::validate_name(address, rule, &at, errors);
    if errors.0.len() > before {
        return;
    }
    if ip::is_v6(address) != v6 {
        errors.invalid(path, address, &format!("must be an {kind} address"));
    }
    ip::validate_endpoint_ip(address, &at, errors);
}

#[cfg(test)]
mod tests {
    use expect_test::expect;
    use serde_json::json;

    use super::*;
    use crate::core::testing::{check, check_update};

    #[test]
    fn validates_endpoint_slices() {
        check(
            &EndpointSlice,
            r#"{"addressType": "IPv4", "ports": [{"name": "", "port": 80, "protocol": "TCP"}],
                "endpoints": [{"addresses": ["10.0.0.1"], "nodeName": "a", "hints": {"forZones": [{"name": "z"}]}}]}"#,
            &expect![""],
        );
        check(
            &EndpointSlice,
            r#"{"addressType": "IPv6", "ports": [{"name": "A", "protocol": "TCP"}, {"name": "A"}],
                "endpoints": [{}, {"addresses": ["10.0.0.1", "::1", "x"], "hostname": "a.b",
                              "hints": {"forZones": [{"name": "z"}, {"name": "z"}]}}]}"#,
            &expect![[r#"
                ports[0].name: Invalid value: "A": a lowercase RFC 1123 label must consist of lower case alphanumeric characters or '-', and must start and end with an alphanumeric character (e.g. 'my-name',  or '123-abc', regex used for validation is '[a-z0-9]([-a-z0-9]*[a-z0-9])?')
                ports[1].name: Invalid value: "A": a lowercase RFC 1123 label must consist of lower case alphanumeric characters or '-', and must start and end with an alphanumeric character (e.g. 'my-name',  or '123-abc', regex used for validation is '[a-z0-9]([-a-z0-9]*[a-z0-9])?')
                ports[1].name: Duplicate value: "A"
                ports[1].protocol: Required value
                endpoints[0].addresses: Required value: must contain at least 1 address
                endpoints[1].addresses: Invalid value: "10.0.0.1": must be an IPv6 address
                endpoints[1].addresses[1]: Invalid value: "::1": may not be in the loopback range (127.0.0.0/8, ::1/128)
                endpoints[1].addresses[2]: Invalid value: "x": must be a valid IP address, (e.g. 10.9.8.7 or 2001:db8::ffff)
                endpoints[1].hostname: Invalid value: "a.b": must not contain dots
                endpoints[1].hints.forZones[1].name: Duplicate value: "z"
            "#]],
        );
        let too_many_endpoints =
            json!({"addressType": "IPv4", "endpoints": vec![json!({}); 1001]}).to_string();
        check(
            &EndpointSlice,
            &too_many_endpoints,
            &expect![[r#"
            endpoints: Too many: 1001: must have at most 1000 items
        "#]],
        );
        check_update(
            &EndpointSlice,
            r#"{"addressType": "IPv4"}"#,
            r#"{"addressType": "IPv6"}"#,
            &expect![[r#"
            addressType: Invalid value: "IPv6": field is immutable
        "#]],
        );
    }
}
