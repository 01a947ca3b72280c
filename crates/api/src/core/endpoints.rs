//! Endpoints: REST strategy and validation.

use serde_json::Value;

use super::rules;
use crate::field::{ErrorList, Path};
use crate::json::JsonExt;
use crate::names;
use crate::networking::ip;
use crate::strategy::RestStrategy;

pub struct Endpoints;

pub(crate) const PROTOCOLS: &[&str] = &["SCTP", "TCP", "UDP"];
const ADDRESS_LISTS: [&str; 2] = ["addresses", "notReadyAddresses"];

impl RestStrategy for Endpoints {
    fn validate(&self, obj: &Value, errors: &mut ErrorList) {
        for (i, subset) in obj.items("subsets").iter().enumerate() {
            check_subset(subset, &Path::new("subsets").index(i), errors);
        }
    }

    fn warnings(&self, new: &Value, _old: Option<&Value>) -> Vec<String> {
        let mut warnings = Vec::new();
        for (i, subset) in new.items("subsets").iter().enumerate() {
            for list in ADDRESS_LISTS {
                for (j, address) in subset.items(list).iter().enumerate() {
                    let path = Path::new("subsets").index(i).child(list).index(j).child("ip");
                    warnings.extend(ip::format_warning(address.text("ip"), &path));
                }
            }
        }
        warnings
    }
}

fn check_subset(subset: &Value, path: &Path, errors: &mut ErrorList) {
    if ADDRESS_LISTS.iter().all(|list| subset.items(list).is_empty()) {
        errors.required(path, "must specify `addresses` or `notReadyAddresses`");
    }
    for list in ADDRESS_LISTS {
        for (i, address) in subset.items(list).iter().enumerate() {
            check_address(address, &path.child(list).index(i), errors);
        }
    }
    let ports = subset.items("ports");
    for (i, port) in ports.iter().enumerate() {
        let path = path.child("ports").index(i);
        let name = port.text("name");
        if !name.is_empty() || ports.len() > 1 {
            rules::validate_required_name(name, names::dns1123_label, &path.child("name"), errors);
        }
        rules::validate_port_number(port.int("port").unwrap_or(0), &path.child("port"), errors);
        rules::required_one_of(port.text("protocol"), PROTOCOLS, &path.child("protocol"), errors);
        if let Some(protocol) = port.at("appProtocol").as_str() {
            rules::validate_name(protocol, names::qualified_name, &path.child("appProtocol"), errors);
        }
    }
}

fn check_address(address: &Value, path: &Path, errors: &mut ErrorList) {
    let text = address.text("ip");
    rules::validate_name(text, names::ip_any_form, &path.child("ip"), errors);
    if !address.text("hostname").is_empty() {
        rules::validate_name(address.text("hostname"), names::dns1123_label, &path.child("hostname"), errors);
    }
    if let Some(node) = address.at("nodeName").as_str() {
        rules::validate_name(node, names::dns1123_subdomain, &path.child("nodeName"), errors);
    }
    ip::validate_endpoint_ip(text, &path.child("ip"), errors);
}

#[cfg(test)]
mod tests {
    use expect_test::expect;

    use super::*;
    use crate::core::testing::check;

    #[test]
    fn validates_subsets() {
        check(
            &Endpoints,
            r#"{"subsets": [{"addresses": [{"ip": "10.0.0.1", "nodeName": "a"}],
                             "ports": [{"port": 80, "protocol": "TCP"}]}]}"#,
            &expect![""],
        );
        check(
            &Endpoints,
            r#"{"subsets": [{"ports": [{"port": 0, "protocol": "X"}, {"port": 1, "name": "A", "protocol": "TCP"}]},
                            {"notReadyAddresses": [{"ip": "nope", "hostname": "a.b"}, {"ip": "127.0.0.1"}]}]}"#,
            &expect![[r#"
                subsets[0]: Required value: must specify `addresses` or `notReadyAddresses`
                subsets[0].ports[0].name: Required value
                subsets[0].ports[0].port: Invalid value: 0: must be between 1 and 65535, inclusive
                subsets[0].ports[0].protocol: Unsupported value: "X": supported values: "SCTP", "TCP", "UDP"
                subsets[0].ports[1].name: Invalid value: "A": a lowercase RFC 1123 label must consist of lower case alphanumeric characters or '-', and must start and end with an alphanumeric character (e.g. 'my-name',  or '123-abc', regex used for validation is '[a-z0-9]([-a-z0-9]*[a-z0-9])?')
                subsets[1].notReadyAddresses[0].ip: Invalid value: "nope": must be a valid IP address, (e.g. 10.9.8.7 or 2001:db8::ffff)
                subsets[1].notReadyAddresses[0].hostname: Invalid value: "a.b": must not contain dots
                subsets[1].notReadyAddresses[0].ip: Invalid value: "nope": must be a valid IP address
                subsets[1].notReadyAddresses[1].ip: Invalid value: "127.0.0.1": may not be in the loopback range (127.0.0.0/8, ::1/128)
            "#]],
        );
    }
}
