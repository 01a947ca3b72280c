//! CSINode: REST strategy and validation.

use std::collections::HashMap;

use serde_json::Value;

use super::csi_driver::validate_driver_name;
use crate::core::rules;
use crate::field::{ErrorList, Path};
use crate::json::JsonExt;
use crate::strategy::RestStrategy;
use crate::{meta, names};

pub struct CSINode;

const MAX_NODE_ID_BYTES: usize = 256;

impl RestStrategy for CSINode {
    fn validate(&self, obj: &Value, errors: &mut ErrorList) {
        let drivers = obj.at("spec").items("drivers");
        let repeated = rules::find_duplicates(drivers.iter().map(|driver| driver.text("name")));
        for (i, driver) in drivers.iter().enumerate() {
            let path = Path::new("spec.drivers").index(i);
            let name = driver.text("name");
            validate_driver_name(name, &path.child("name"), errors);
            let node = driver.text("nodeID");
            if node.is_empty() {
                errors.required(&path.child("nodeID"), "");
            }
            if node.len() > MAX_NODE_ID_BYTES {
                let detail = format!("must be {MAX_NODE_ID_BYTES} characters or less");
                errors.invalid(&path.child("nodeID"), node, &detail);
            }
            meta::validate_non_negative(
                driver.path("allocatable.count"),
                &path.child("allocatable.count"),
                errors,
            );
            if repeated[i] {
                errors.duplicate(&path.child("name"), name);
            }
            topology_keys(driver, &path, errors);
        }
    }

    /// The entry of a driver is immutable, except for its volume limit.
    fn validate_update(&self, new: &Value, old: &Value, errors: &mut ErrorList) {
        let without_count = |driver: &Value| {
            let mut driver = driver.clone();
            if let Some(fields) = driver.as_object_mut() {
                fields.remove("allocatable");
            }
            driver
        };
        let drivers = new.at("spec").items("drivers");
        let by_name: HashMap<&str, &Value> =
            drivers.iter().map(|driver| (driver.text("name"), driver)).collect();
        for before in old.at("spec").items("drivers") {
            if let Some(after) = by_name.get(before.text("name")) {
                let path = Path::new("spec.drivers");
                meta::validate_immutable(&without_count(after), &without_count(before), &path, errors);
            }
        }
    }
}

fn topology_keys(driver: &Value, path: &Path, errors: &mut ErrorList) {
    let keys: Vec<&str> = driver.items("topologyKeys").iter().filter_map(Value::as_str).collect();
    let repeated = rules::find_duplicates(keys.iter());
    for (i, key) in keys.iter().enumerate() {
        if key.is_empty() {
            errors.required(path, "");
        }
        if repeated[i] {
            errors.duplicate(path, *key);
        }
        rules::validate_name(key, names::qualified_name, path, errors);
    }
}

#[cfg(test)]
mod tests {
    use expect_test::expect;

    use super::*;
    use crate::core::testing::{check, check_update};

    #[test]
    fn validates_csi_nodes() {
        let good = r#"{"spec": {"drivers": [{"name": "a.io", "nodeID": "x", "allocatable": {"count": 1}, "topologyKeys": ["k"]}]}}"#;
        check(&CSINode, good, &expect![""]);
        check(
            &CSINode,
            r#"{"spec": {"drivers": [{"name": "a", "allocatable": {"count": -1}}, {"name": "a", "nodeID": "x", "topologyKeys": ["k", "k"]}]}}"#,
            &expect![[r#"
                spec.drivers[0].nodeID: Required value
                spec.drivers[0].allocatable.count: Invalid value: -1: must be greater than or equal to 0
                spec.drivers[1].name: Duplicate value: "a"
                spec.drivers[1]: Duplicate value: "k"
            "#]],
        );
        check_update(&CSINode, good, &good.replace('1', "2"), &expect![""]);
        check_update(
            &CSINode,
            good,
            &good.replace("\"x\"", "\"y\""),
            &expect![[r#"
            spec.drivers: Invalid value: {"name":"a.io","nodeID":"y","topologyKeys":["k"]}: field is immutable
        "#]],
        );
    }
}
