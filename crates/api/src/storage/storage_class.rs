//! StorageClass: REST strategy and validation.

use std::collections::{BTreeMap, BTreeSet};

use serde_json::Value;

use crate::core::rules;
use crate::field::{ErrorList, Path};
use crate::json::JsonExt;
use crate::node::deprecated_label_warning;
use crate::strategy::RestStrategy;
use crate::{meta, names};

pub struct StorageClass;

const MAX_PARAMETERS: usize = 512;
const MAX_PARAMETERS_BYTES: usize = 256 * 1024;
const BINDING_MODES: &[&str] = &["Immediate", "WaitForFirstConsumer"];

impl RestStrategy for StorageClass {
    fn validate(&self, obj: &Value, errors: &mut ErrorList) {
        validate_provisioner(obj.text("provisioner"), &Path::new("provisioner"), errors);
        validate_parameters(obj, errors);
        let policy = obj.at("reclaimPolicy");
        if policy.as_str() != Some("") {
            rules::optional_one_of(policy, &["Delete", "Retain"], &Path::new("reclaimPolicy"), errors);
        }
        rules::required_one_of(
            obj.text("volumeBindingMode"),
            BINDING_MODES,
            &Path::new("volumeBindingMode"),
            errors,
        );
        topologies(obj.items("allowedTopologies"), errors);
    }

    fn validate_update(&self, new: &Value, old: &Value, errors: &mut ErrorList) {
        for field in ["parameters", "provisioner", "reclaimPolicy", "volumeBindingMode"] {
            meta::validate_immutable(new.at(field), old.at(field), &Path::new(field), errors);
        }
    }

    fn warnings(&self, new: &Value, _old: Option<&Value>) -> Vec<String> {
        let mut warnings = Vec::new();
        for (i, term) in new.items("allowedTopologies").iter().enumerate() {
            let path = Path::new("allowedTopologies").index(i).child("matchLabelExpressions");
            for (j, requirement) in term.items("matchLabelExpressions").iter().enumerate() {
                if let Some(message) = deprecated_label_warning(requirement.text("key")) {
                    warnings.push(format!("{}: {message}", path.index(j).child("key")));
                }
            }
        }
        warnings
    }
}

/// Validates the name of a driver or provisioner, ignoring case.
pub(super) fn validate_provisioner(name: &str, path: &Path, errors: &mut ErrorList) {
    if name.is_empty() {
        errors.required(path, "");
    } else {
        rules::validate_name(&name.to_lowercase(), names::qualified_name, path, errors);
    }
}

/// Validates the size of the parameters, which are otherwise opaque. Returns whether there are any.
pub(super) fn validate_parameters(obj: &Value, errors: &mut ErrorList) -> bool {
    let path = Path::new("parameters");
    if obj.entries("parameters").count() > MAX_PARAMETERS {
        errors.too_long(&path, MAX_PARAMETERS);
        return true;
    }
    let mut size = 0;
    for (key, value) in obj.entries("parameters") {
        if key.is_empty() {
            errors.invalid(&path, key, "field can not be empty.");
        }
        size += key.len() + value.as_str().map_or(0, str::len);
    }
    if size > MAX_PARAMETERS_BYTES {
        errors.too_long(&path, MAX_PARAMETERS_BYTES);
    }
    obj.entries("parameters").next().is_some()
}

fn topologies(terms: &[Value], errors: &mut ErrorList) {
    let mut seen: BTreeSet<BTreeMap<&str, BTreeSet<&str>>> = BTreeSet::new();
    for (i, term) in terms.iter().enumerate() {
        let path = Path::new("allowedTopologies").index(i).child("matchLabelExpressions");
        let mut keys: BTreeMap<&str, BTreeSet<&str>> = BTreeMap::new();
        for (j, requirement) in term.items("matchLabelExpressions").iter().enumerate() {
            let path = path.index(j);
            let key = requirement.text("key");
            let values: Vec<&str> = requirement.items("values").iter().filter_map(Value::as_str).collect();
            if values.is_empty() {
                errors.required(&path.child("values"), "");
            }
            let repeated = rules::find_duplicates(values.iter());
            for (k, value) in values.iter().enumerate().filter(|(k, _)| repeated[*k]) {
                errors.duplicate(&path.child("values").index(k), *value);
            }
            meta::validate_label_name(key, &path.child("key"), errors);
            if keys.insert(key, values.into_iter().collect()).is_some() {
                errors.duplicate(&path.child("key"), key);
            }
        }
        if !seen.insert(keys) {
            errors.duplicate(&path, "");
        }
    }
}

#[cfg(test)]
mod tests {
    use expect_test::expect;

    use super::*;
    use crate::core::testing::{check, check_update};

    #[test]
    fn validates_storage_classes() {
        let good = r#"{"provisioner": "Acme.io/disk", "reclaimPolicy": "Delete", "volumeBindingMode": "Immediate",
            "parameters": {"a": "b"}, "allowedTopologies": [{"matchLabelExpressions": [{"key": "zone", "values": ["a"]}]}]}"#;
        check(&StorageClass, good, &expect![""]);
        check(
            &StorageClass,
            r#"{"reclaimPolicy": "Recycle", "parameters": {"": "b"}, "allowedTopologies": [
                {"matchLabelExpressions": [{"key": "zone", "values": ["a", "a"]}, {"key": "zone"}]},
                {"matchLabelExpressions": []}, {"matchLabelExpressions": []}]}"#,
            &expect![[r#"
                provisioner: Required value
                parameters: Invalid value: "": field can not be empty.
                reclaimPolicy: Unsupported value: "Recycle": supported values: "Delete", "Retain"
                volumeBindingMode: Required value
                allowedTopologies[0].matchLabelExpressions[0].values[1]: Duplicate value: "a"
                allowedTopologies[0].matchLabelExpressions[1].values: Required value
                allowedTopologies[0].matchLabelExpressions[1].key: Duplicate value: "zone"
                allowedTopologies[2].matchLabelExpressions: Duplicate value: ""
            "#]],
        );
        check_update(
            &StorageClass,
            good,
            &good.replace("Immediate", "WaitForFirstConsumer").replace("\"b\"", "\"c\""),
            &expect![[r#"
                parameters: Invalid value: {"a":"c"}: field is immutable
                volumeBindingMode: Invalid value: "WaitForFirstConsumer": field is immutable
            "#]],
        );
    }
}
