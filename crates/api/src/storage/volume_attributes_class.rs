//! VolumeAttributesClass: what is special about it.

use serde_json::Value;

use super::storage_class::{parameters, provisioner};
use crate::field::{Errors, Path};
use crate::json::Json;
use crate::kind::Kind;
use crate::meta;

pub struct VolumeAttributesClass;

impl Kind for VolumeAttributesClass {
    fn validate(&self, obj: &Value, errors: &mut Errors) {
        provisioner(obj.text("driverName"), &Path::new("driverName"), errors);
        if !parameters(obj, errors) {
            errors.required(&Path::new("parameters"), "must contain at least one key/value pair");
        }
    }

    fn validate_update(&self, new: &Value, old: &Value, errors: &mut Errors) {
        for field in ["driverName", "parameters"] {
            if !meta::same(new.at(field), old.at(field)) {
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
    fn classes() {
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
