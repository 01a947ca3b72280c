//! Node: REST strategy and validation.

use serde_json::Value;

use super::{resources, rules};
use crate::field::{ErrorList, ErrorType, Path};
use crate::json::JsonExt;
use crate::networking::ip::{self, Cidr};
use crate::strategy::RestStrategy;
use crate::{meta, names};

/// The label of simulated nodes, whose pods have no containers.
pub const SIMULATE_NODE_LABEL: &str = "simulate.skiff/node";

pub struct Node;

const TAINT_EFFECTS: &[&str] = &["NoSchedule", "PreferNoSchedule", "NoExecute"];

impl RestStrategy for Node {
    fn prepare_for_create(&self, new: &mut Value) {
        remove_field(new, "spec", "configSource");
        remove_field(new, "status", "config");
    }

    fn keeps_status_on_create(&self) -> bool {
        true
    }

    fn prepare_for_update(&self, new: &mut Value, old: &Value) {
        if !old.at("spec").has("configSource") {
            remove_field(new, "spec", "configSource");
        }
    }

    fn validate(&self, obj: &Value, errors: &mut ErrorList) {
        // Upstream's path. Taints were an annotation at first.
        validate_taints(obj.at("spec"), &Path::new("metadata.taints"), errors);
        validate_resources(obj, errors);
        if let Some(capacity) = obj.path("status.nodeInfo.swap").int("capacity").filter(|c| *c <= 0) {
            errors.invalid(
                &Path::new("metadata.nodeSwapStatus.capacity"),
                capacity,
                "must be greater than zero",
            );
        }
        validate_declared_features(obj, errors);
        validate_pod_cidrs(obj.at("spec"), errors);
    }

    fn validate_update(&self, new: &Value, old: &Value, errors: &mut ErrorList) {
        validate_addresses(new, errors);
        validate_set_once(new, old, errors);
        validate_config_source_update(new, errors);
    }

    fn validate_status_update(&self, new: &Value, old: &Value, errors: &mut ErrorList) {
        validate_resources(new, errors);
        validate_declared_features(new, errors);
        self.validate_update(new, old, errors);
    }

    fn selectable_fields(&self, obj: &Value) -> Vec<(&'static str, String)> {
        vec![("spec.unschedulable", obj.at("spec").flag("unschedulable").to_string())]
    }

    fn warnings(&self, new: &Value, _old: Option<&Value>) -> Vec<String> {
        let spec = new.at("spec");
        let mut warnings = Vec::new();
        if spec.has("configSource") {
            warnings.push("spec.configSource: the feature is removed".to_owned());
        }
        if !spec.text("externalID").is_empty() {
            let unused = "spec.externalID: this field is deprecated, and is unused by Kubernetes";
            warnings.push(unused.to_owned());
        }
        for (i, cidr) in spec.items("podCIDRs").iter().enumerate() {
            let path = Path::new("spec.podCIDRs").index(i);
            warnings.extend(ip::cidr_warnings(cidr.as_str().unwrap_or(""), &path));
        }
        warnings
    }
}

fn remove_field(obj: &mut Value, part: &str, field: &str) {
    if let Some(part) = obj.get_mut(part).and_then(Value::as_object_mut) {
        part.remove(field);
    }
}

fn validate_taints(spec: &Value, path: &Path, errors: &mut ErrorList) {
    let taints = spec.items("taints");
    let repeated =
        rules::find_duplicates(taints.iter().map(|taint| (taint.text("key"), taint.text("effect"))));
    for (i, taint) in taints.iter().enumerate() {
        let path = path.index(i);
        let (key, value, effect) = (taint.text("key"), taint.text("value"), taint.text("effect"));
        meta::validate_label_name(key, &path.child("key"), errors);
        let messages = names::label_value(value);
        if !messages.is_empty() {
            errors.invalid(&path.child("value"), value, &messages.join(";"));
        }
        rules::required_one_of(effect, TAINT_EFFECTS, &path.child("effect"), errors);
        if repeated[i] {
            // Upstream prints its internal struct.
            let message = format!(
                "Duplicate value: {{\"Key\":{},\"Value\":{},\"Effect\":{},\"TimeAdded\":{}}}: taints must be unique by key and effect pair",
                Value::from(key),
                Value::from(value),
                Value::from(effect),
                taint.at("timeAdded"),
            );
            errors.push(ErrorType::Duplicate, &path, message);
        }
    }
}

/// Validates capacity and allocatable of a node.
fn validate_resources(obj: &Value, errors: &mut ErrorList) {
    for field in ["capacity", "allocatable"] {
        let path = Path::new("status").child(field);
        for (name, quantity) in obj.at("status").entries(field) {
            resources::validate_quantity(name, quantity, &path.child(name), errors);
        }
    }
}

fn validate_declared_features(obj: &Value, errors: &mut ErrorList) {
    let path = Path::new("status.declaredFeatures");
    let features = obj.at("status").items("declaredFeatures");
    let mut previous: Option<&str> = None;
    for (i, feature) in features.iter().filter_map(Value::as_str).enumerate() {
        let path = path.index(i);
        match previous {
            Some(previous) if previous == feature => errors.duplicate(&path, feature),
            Some(previous) if previous > feature => {
                errors.invalid(&path, feature, "list must be sorted alphabetically");
            }
            _ => {}
        }
        if feature.len() > 253 {
            let detail = format!("invalid feature name {feature:?}: must be no more than 253 characters");
            errors.invalid(&path, feature, &detail);
        } else if !is_feature_name(feature) {
            let detail = format!(
                "invalid feature name {feature:?}: must start with an UpperCamelCase segment, with subsequent segments separated by '/' (e.g., MyFeature or MyFeature/mySubFeature), and contain only alphanumeric characters and slashes"
            );
            errors.invalid(&path, feature, &detail);
        }
        previous = Some(feature);
    }
}

fn is_feature_name(name: &str) -> bool {
    name.starts_with(|c: char| c.is_ascii_uppercase())
        && name.split('/').all(|segment| {
            segment.starts_with(|c: char| c.is_ascii_alphabetic())
                && segment.bytes().all(|b| b.is_ascii_alphanumeric())
        })
}

fn validate_pod_cidrs(spec: &Value, errors: &mut ErrorList) {
    let path = Path::new("spec.podCIDRs");
    let cidrs = spec.items("podCIDRs");
    for (i, cidr) in cidrs.iter().enumerate() {
        rules::validate_name(cidr.as_str().unwrap_or(""), names::cidr_any_form, &path.index(i), errors);
    }
    if cidrs.len() > 1 {
        let parsed: Vec<Cidr> =
            cidrs.iter().filter_map(|cidr| Cidr::parse(cidr.as_str().unwrap_or(""))).collect();
        let both = parsed.iter().any(|cidr| cidr.is_v6()) && parsed.iter().any(|cidr| !cidr.is_v6());
        if !both || cidrs.len() > 2 {
            let detail = "may specify no more than one CIDR for each IP family";
            errors.invalid(&path, spec.at("podCIDRs").clone(), detail);
        }
    }
}

fn validate_addresses(obj: &Value, errors: &mut ErrorList) {
    let addresses = obj.at("status").items("addresses");
    let repeated =
        rules::find_duplicates(addresses.iter().map(|item| (item.text("type"), item.text("address"))));
    for (i, address) in addresses.iter().enumerate() {
        let (kind, text) = (address.text("type"), address.text("address"));
        if repeated[i] {
            let message = format!(
                "Duplicate value: {{\"Type\":{},\"Address\":{}}}",
                Value::from(kind),
                Value::from(text)
            );
            errors.push(ErrorType::Duplicate, &Path::new("status.addresses").index(i), message);
        }
    }
}

/// Fields that may be set once and not changed afterwards.
fn validate_set_once(new: &Value, old: &Value, errors: &mut ErrorList) {
    let (after, before) = (new.at("spec"), old.at("spec"));
    let path = Path::new("spec");
    if !before.items("podCIDRs").is_empty() && before.items("podCIDRs") != after.items("podCIDRs") {
        let detail = "node updates may not change podCIDR except from \"\" to valid";
        errors.forbidden(&path.child("podCIDRs"), detail);
    }
    if !before.text("providerID").is_empty() && before.text("providerID") != after.text("providerID") {
        let detail = "node updates may not change providerID except from \"\" to valid";
        errors.forbidden(&path.child("providerID"), detail);
    }
    if before.text("externalID") != after.text("externalID") {
        errors.forbidden(&path.child("externalID"), "may not be updated");
    }
}

/// Validates the configuration source, which remains from dynamic kubelet configuration.
fn validate_config_source_update(obj: &Value, errors: &mut ErrorList) {
    let spec_source = obj.path("spec.configSource");
    if !spec_source.is_null() {
        let path = Path::new("spec.configSource");
        let map = spec_source.at("configMap");
        for field in ["uid", "resourceVersion"] {
            if !map.text(field).is_empty() {
                errors.forbidden(
                    &path.child("configMap").child(field),
                    &format!("{field} must not be set in spec"),
                );
            }
        }
        config_source(spec_source, &path, errors);
    }
    for field in ["assigned", "active", "lastKnownGood"] {
        let source = obj.path("status.config").at(field);
        if source.is_null() {
            continue;
        }
        let path = Path::new("status.config").child(field);
        if source.has("configMap") {
            for field in ["uid", "resourceVersion"] {
                if source.at("configMap").text(field).is_empty() {
                    errors.required(&path.child("configMap").child(field), "");
                }
            }
        }
        config_source(source, &path, errors);
    }
}

fn config_source(source: &Value, path: &Path, errors: &mut ErrorList) {
    let map = source.at("configMap");
    if map.is_null() {
        errors.invalid(path, source.clone(), "exactly one reference subfield must be non-nil");
        return;
    }
    let path = path.child("configMap");
    for (field, rule) in [
        ("namespace", names::dns1123_label as fn(&str) -> Vec<String>),
        ("name", names::dns1123_subdomain),
        ("kubeletConfigKey", names::config_map_key),
    ] {
        rules::validate_required_name(map.text(field), rule, &path.child(field), errors);
    }
}

#[cfg(test)]
mod tests {
    use expect_test::expect;
    use serde_json::json;

    use super::*;
    use crate::core::testing::{check, check_update, lines};

    #[test]
    fn validates_taints() {
        check(
            &Node,
            r#"{"spec": {"taints": [{"key": "a", "effect": "NoExecute"}, {"key": "-", "value": "/"},
                                    {"key": "a", "value": "b", "effect": "NoExecute"},
                                    {"key": "b", "effect": "Wrong"}]}}"#,
            &expect![[r#"
                metadata.taints[1].key: Invalid value: "-": name part must consist of alphanumeric characters, '-', '_' or '.', and must start and end with an alphanumeric character (e.g. 'MyName',  or 'my.name',  or '123-abc', regex used for validation is '([A-Za-z0-9][-A-Za-z0-9_.]*)?[A-Za-z0-9]')
                metadata.taints[1].value: Invalid value: "/": a valid label must be an empty string or consist of alphanumeric characters, '-', '_' or '.', and must start and end with an alphanumeric character (e.g. 'MyValue',  or 'my_value',  or '12345', regex used for validation is '(([A-Za-z0-9][-A-Za-z0-9_.]*)?[A-Za-z0-9])?')
                metadata.taints[1].effect: Required value
                metadata.taints[2]: Duplicate value: {"Key":"a","Value":"b","Effect":"NoExecute","TimeAdded":null}: taints must be unique by key and effect pair
                metadata.taints[3].effect: Unsupported value: "Wrong": supported values: "NoSchedule", "PreferNoSchedule", "NoExecute"
            "#]],
        );
    }

    #[test]
    fn validates_reported_status() {
        check(
            &Node,
            r#"{"spec": {"podCIDRs": ["10.0.0.0/24", "10.0.1.0/24", "x"]},
                "status": {"capacity": {"cpu": "-1", "pods": "1500m", "memory": "1Gi"},
                           "declaredFeatures": ["B", "A", "A", "x/y"]}}"#,
            &expect![[r#"
                status.capacity.cpu: Invalid value: "-1": must be greater than or equal to 0
                status.capacity.pods: Invalid value: "1500m": must be an integer
                status.declaredFeatures[1]: Invalid value: "A": list must be sorted alphabetically
                status.declaredFeatures[2]: Duplicate value: "A"
                status.declaredFeatures[3]: Invalid value: "x/y": invalid feature name "x/y": must start with an UpperCamelCase segment, with subsequent segments separated by '/' (e.g., MyFeature or MyFeature/mySubFeature), and contain only alphanumeric characters and slashes
                spec.podCIDRs[2]: Invalid value: "x": must be a valid CIDR value, (e.g. 10.9.8.0/24 or 2001:db8::/64)
                spec.podCIDRs: Invalid value: ["10.0.0.0/24","10.0.1.0/24","x"]: may specify no more than one CIDR for each IP family
            "#]],
        );
    }

    #[test]
    fn validates_updates() {
        let old = r#"{"spec": {"podCIDRs": ["10.0.0.0/24"], "providerID": "a"}}"#;
        check_update(&Node, r#"{}"#, old, &expect![""]);
        check_update(&Node, old, old, &expect![""]);
        check_update(
            &Node,
            old,
            r#"{"spec": {"providerID": "b", "configSource": {}}}"#,
            &expect![[r#"
                spec.podCIDRs: Forbidden: node updates may not change podCIDR except from "" to valid
                spec.providerID: Forbidden: node updates may not change providerID except from "" to valid
                spec.configSource: Invalid value: {}: exactly one reference subfield must be non-nil
            "#]],
        );
        let address = json!({"type": "InternalIP", "address": "1.2.3.4"});
        let status = json!({"status": {"addresses": [address, address]}});
        let mut errors = ErrorList::default();
        Node.validate_status_update(&status, &json!({}), &mut errors);
        assert_eq!(
            lines(&errors),
            "status.addresses[1]: Duplicate value: {\"Type\":\"InternalIP\",\"Address\":\"1.2.3.4\"}\n"
        );
    }
}
