//! CSIStorageCapacity: REST strategy and validation.

use serde_json::Value;

use crate::core::rules;
use crate::field::{ErrorList, Path};
use crate::json::JsonExt;
use crate::meta::{self, SelectorOptions};
use crate::names;
use crate::quantity::Quantity;
use crate::strategy::RestStrategy;

pub struct CSIStorageCapacity;

impl RestStrategy for CSIStorageCapacity {
    fn validate(&self, obj: &Value, errors: &mut ErrorList) {
        let topology = obj.at("nodeTopology");
        meta::validate_label_selector(
            topology,
            &Path::new("nodeTopology"),
            SelectorOptions::default(),
            errors,
        );
        let class = obj.text("storageClassName");
        rules::validate_name(class, names::dns1123_subdomain, &Path::new("storageClassName"), errors);
        if let Some(capacity) = Quantity::from_value(obj.at("capacity")).filter(Quantity::is_negative) {
            let detail = "must be greater than or equal to 0";
            errors.invalid(&Path::new("capacity"), capacity.to_string(), detail);
        }
    }

    fn validate_update(&self, new: &Value, old: &Value, errors: &mut ErrorList) {
        for field in ["nodeTopology", "storageClassName"] {
            meta::validate_immutable(new.at(field), old.at(field), &Path::new(field), errors);
        }
    }
}

#[cfg(test)]
mod tests {
    use expect_test::expect;

    use super::*;
    use crate::core::testing::{check, check_update};

    #[test]
    fn validates_csi_storage_capacity() {
        let good = r#"{"storageClassName": "a", "capacity": "1Gi"}"#;
        check(&CSIStorageCapacity, good, &expect![""]);
        check(
            &CSIStorageCapacity,
            &good.replace("1Gi", "-1"),
            &expect![[r#"
            capacity: Invalid value: "-1": must be greater than or equal to 0
        "#]],
        );
        check_update(
            &CSIStorageCapacity,
            good,
            &good.replace("\"a\"", "\"b\""),
            &expect![[r#"
            storageClassName: Invalid value: "b": field is immutable
        "#]],
        );
    }
}
