//! NetworkPolicy: REST strategy and validation.

use serde_json::Value;

use super::ip::{self, Cidr};
use crate::core::rules;
use crate::field::{ErrorList, Path};
use crate::json::JsonExt;
use crate::meta::{self, SelectorOptions};
use crate::names;
use crate::strategy::RestStrategy;

pub struct NetworkPolicy;

/// The fields with rules, and the peer field of these rules.
const RULE_FIELDS: [(&str, &str); 2] = [("ingress", "from"), ("egress", "to")];
const POLICY_TYPES: &[&str] = &["Ingress", "Egress"];

impl RestStrategy for NetworkPolicy {
    fn validate(&self, obj: &Value, errors: &mut ErrorList) {
        let spec = obj.at("spec");
        let path = Path::new("spec");
        let selector = spec.at("podSelector");
        meta::validate_label_selector(
            selector,
            &path.child("podSelector"),
            SelectorOptions::default(),
            errors,
        );
        for (direction, peers) in RULE_FIELDS {
            for (i, rule) in spec.items(direction).iter().enumerate() {
                let path = path.child(direction).index(i);
                for (j, port) in rule.items("ports").iter().enumerate() {
                    check_port(port, &path.child("ports").index(j), errors);
                }
                for (j, peer) in rule.items(peers).iter().enumerate() {
                    check_peer(peer, &path.child(peers).index(j), errors);
                }
            }
        }
        let types = spec.items("policyTypes");
        let path = path.child("policyTypes");
        if types.len() > POLICY_TYPES.len() {
            let detail = "may not specify more than two policyTypes";
            errors.invalid(&path, spec.at("policyTypes").clone(), detail);
            return;
        }
        for (i, kind) in types.iter().enumerate() {
            rules::optional_one_of(kind, POLICY_TYPES, &path.index(i), errors);
        }
    }

    fn warnings(&self, new: &Value, _old: Option<&Value>) -> Vec<String> {
        let mut warnings = Vec::new();
        for (direction, peers) in RULE_FIELDS {
            for (i, rule) in new.at("spec").items(direction).iter().enumerate() {
                for (j, peer) in rule.items(peers).iter().enumerate() {
                    let block = peer.at("ipBlock");
                    let path =
                        Path::new("spec").child(direction).index(i).child(peers).index(j).child("ipBlock");
                    warnings.extend(ip::cidr_warnings(block.text("cidr"), &path.child("cidr")));
                    for (k, except) in block.items("except").iter().enumerate() {
                        let path = path.child("except").index(k);
                        warnings.extend(ip::cidr_warnings(except.as_str().unwrap_or(""), &path));
                    }
                }
            }
        }
        warnings
    }
}

fn check_port(port: &Value, path: &Path, errors: &mut ErrorList) {
    rules::optional_one_of(port.at("protocol"), &["TCP", "UDP", "SCTP"], &path.child("protocol"), errors);
    let end = port.int("endPort");
    let end_path = path.child("endPort");
    let start = port.at("port");
    if !start.is_null() {
        let ends_after_name = end.filter(|_| start.is_string());
        if let Some(end) = ends_after_name {
            errors.invalid(&end_path, end, "may not be specified when `port` is non-numeric");
        }
        rules::validate_port_number_or_name(start, &path.child("port"), errors);
        if let (Some(start), Some(end)) = (start.as_i64(), end) {
            if end < start {
                errors.invalid(&end_path, start, "must be greater than or equal to `port`");
            }
            rules::validate_port_number(end, &end_path, errors);
        }
    } else if let Some(end) = end {
        errors.invalid(&end_path, end, "may not be specified when `port` is not specified");
    }
}

fn check_peer(peer: &Value, path: &Path, errors: &mut ErrorList) {
    let mut peers = 0;
    for field in ["podSelector", "namespaceSelector"] {
        if peer.has(field) {
            peers += 1;
            meta::validate_label_selector(
                peer.at(field),
                &path.child(field),
                SelectorOptions::default(),
                errors,
            );
        }
    }
    if peer.has("ipBlock") {
        ip_block(peer.at("ipBlock"), &path.child("ipBlock"), errors);
        if peers > 0 {
            errors.forbidden(path, "may not specify both ipBlock and another peer");
        }
    } else if peers == 0 {
        errors.required(path, "must specify a peer");
    }
}

fn ip_block(block: &Value, path: &Path, errors: &mut ErrorList) {
    let text = block.text("cidr");
    rules::validate_required_name(text, names::cidr_any_form, &path.child("cidr"), errors);
    let Some(cidr) = Cidr::parse(text) else { return };
    for (i, except) in block.items("except").iter().enumerate() {
        let path = path.child("except").index(i);
        let text = except.as_str().unwrap_or("");
        rules::validate_name(text, names::cidr_any_form, &path, errors);
        if let Some(except) = Cidr::parse(text)
            && (!cidr.contains(except.first()) || cidr.prefix_length() >= except.prefix_length())
        {
            errors.invalid(&path, text, "must be a strict subset of `cidr`");
        }
    }
}

#[cfg(test)]
mod tests {
    use expect_test::expect;

    use super::*;
    use crate::core::testing::check;

    #[test]
    fn validates_network_policies() {
        check(
            &NetworkPolicy,
            r#"{"spec": {"podSelector": {}, "policyTypes": ["Ingress"], "ingress": [{"from": [
                {"podSelector": {}, "namespaceSelector": {}},
                {"ipBlock": {"cidr": "10.0.0.0/8", "except": ["10.1.0.0/16"]}}],
                "ports": [{"port": 80, "endPort": 90, "protocol": "TCP"}, {"port": "web"}]}]}}"#,
            &expect![""],
        );
        check(
            &NetworkPolicy,
            r#"{"spec": {"policyTypes": ["Sideways"], "egress": [{"to": [{},
                {"ipBlock": {"cidr": "10.0.0.0/8", "except": ["11.0.0.0/16", "x"]}, "podSelector": {}}, {"ipBlock": {}}],
                "ports": [{"port": 80, "endPort": 70}, {"port": "web", "endPort": 1}, {"endPort": 1, "protocol": "X"}]}]}}"#,
            &expect![[r#"
                spec.egress[0].ports[0].endPort: Invalid value: 80: must be greater than or equal to `port`
                spec.egress[0].ports[1].endPort: Invalid value: 1: may not be specified when `port` is non-numeric
                spec.egress[0].ports[2].protocol: Unsupported value: "X": supported values: "TCP", "UDP", "SCTP"
                spec.egress[0].ports[2].endPort: Invalid value: 1: may not be specified when `port` is not specified
                spec.egress[0].to[0]: Required value: must specify a peer
                spec.egress[0].to[1].ipBlock.except[0]: Invalid value: "11.0.0.0/16": must be a strict subset of `cidr`
                spec.egress[0].to[1].ipBlock.except[1]: Invalid value: "x": must be a valid CIDR value, (e.g. 10.9.8.0/24 or 2001:db8::/64)
                spec.egress[0].to[1]: Forbidden: may not specify both ipBlock and another peer
                spec.egress[0].to[2].ipBlock.cidr: Required value
                spec.policyTypes[0]: Unsupported value: "Sideways": supported values: "Ingress", "Egress"
            "#]],
        );
    }
}
