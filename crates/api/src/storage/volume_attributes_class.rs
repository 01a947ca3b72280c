//! VolumeAttributesClass: REST strategy and validation.

use serde_json::Value;

use super::storage_class::{validate_parameters, validate_provisioner};
use crate::field::{ErrorList, Path};
use crate::json::JsonExt;
use crate::meta;
use crate::strategy::RestStrategy;

pub struct VolumeAttributesClass;

impl RestStrategy for VolumeAttributesClass {
    fn validate(&self, obj: &Value, errors: &mut ErrorList) {
        validate_provisioner(obj.text("driverName"), &Path::new("driverName"), errors);
        if !validate_parameters(obj, errors) {
            errors.required(&Path::new("parameters"), "must contain at least one key/value pair");
        }
    }

    fn validate_update(&self, new: &Value, old: &Value, errors: &mut ErrorList) {
        for field in ["driverName", "parameters"] {
            if !meta::semantic_equal(new.at(field), old.at(field)) {
                errors.forbidden(&Path::new(field), &format!("updates to {field} are forbidden."));
            }
        }
    }
}

#[cfg(test)]
mod tests {
    use expect_test::expect;

    use super::*;
    use crate::core::testing::{check, check_update};

    #[test]
    fn validates_volume_attributes_classes() {
        let good = r#"{"driverName": "acme.io", "parameters": {"a": "b"}}"#;
        check(&VolumeAttributesClass, good, &expect![""]);
        check(
            &VolumeAttributesClass,
            r#"{}"#,
            &expect![[r#"
            driverName: Required value
            parameters: Required value: must contain at least one key/value pair
        "#]],
        );
        check_update(
            &VolumeAttributesClass,
            good,
            r#"{}"#,
            &expect![[r#"
            driverName: Forbidden: updates to driverName are forbidden.
            parameters: Forbidden: updates to parameters are forbidden.
        "#]],
        );
    }
}
