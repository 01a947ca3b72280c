//! PriorityClass: REST strategy and validation.

use serde_json::Value;

use crate::core::rules;
use crate::field::{ErrorList, Path};
use crate::json::JsonExt;
use crate::meta;
use crate::strategy::RestStrategy;

pub struct PriorityClass;

const SYSTEM_PREFIX: &str = "system-";
/// The built-in priority classes.
pub const SYSTEM_CLASSES: &[(&str, i64)] =
    &[("system-node-critical", 2_000_001_000), ("system-cluster-critical", 2_000_000_000)];
const MAX_USER_PRIORITY: i64 = 1_000_000_000;

impl RestStrategy for PriorityClass {
    fn validate(&self, obj: &Value, errors: &mut ErrorList) {
        let name = obj.at("metadata").text("name");
        let value = obj.int("value").unwrap_or(0);
        if name.starts_with(SYSTEM_PREFIX) {
            if let Some(mismatch) = system_class_mismatch(name, value, obj.flag("globalDefault")) {
                let detail = format!(
                    "priority class names with '{SYSTEM_PREFIX}' prefix are reserved for system use only. error: {mismatch}"
                );
                errors.forbidden(&Path::new("metadata.name"), &detail);
            }
        } else if value > MAX_USER_PRIORITY {
            let detail = format!("maximum allowed value of a user defined priority is {MAX_USER_PRIORITY}");
            errors.forbidden(&Path::new("value"), &detail);
        }
        if let Some(policy) = obj.at("preemptionPolicy").as_str() {
            let supported = &["PreemptLowerPriority", "Never"];
            rules::required_one_of(policy, supported, &Path::new("preemptionPolicy"), errors);
        }
    }

    fn validate_update(&self, new: &Value, old: &Value, errors: &mut ErrorList) {
        if new.int("value").unwrap_or(0) != old.int("value").unwrap_or(0) {
            errors.forbidden(&Path::new("value"), "may not be changed in an update.");
        }
        let field = "preemptionPolicy";
        meta::validate_immutable(new.at(field), old.at(field), &Path::new(field), errors);
    }
}

fn system_class_mismatch(name: &str, value: i64, global_default: bool) -> Option<String> {
    let Some((_, expected)) = SYSTEM_CLASSES.iter().find(|(class, _)| *class == name) else {
        return Some(format!("{name} is not a known system priority class"));
    };
    if *expected != value {
        return Some(format!("value of {name} PriorityClass must be {expected}"));
    }
    global_default.then(|| format!("globalDefault of {name} PriorityClass must be false"))
}

#[cfg(test)]
mod tests {
    use expect_test::expect;

    use super::*;
    use crate::core::testing::{check, check_update};

    #[test]
    fn validates_priority_classes() {
        for (obj, expected) in [
            (
                r#"{"metadata": {"name": "high"}, "value": 1000000000, "preemptionPolicy": "Never"}"#,
                expect![""],
            ),
            (r#"{"metadata": {"name": "system-node-critical"}, "value": 2000001000}"#, expect![""]),
            (
                r#"{"metadata": {"name": "system-node-critical"}, "value": 1}"#,
                expect![[r#"
                metadata.name: Forbidden: priority class names with 'system-' prefix are reserved for system use only. error: value of system-node-critical PriorityClass must be 2000001000
            "#]],
            ),
            (
                r#"{"metadata": {"name": "system-mine"}, "value": 1}"#,
                expect![[r#"
                metadata.name: Forbidden: priority class names with 'system-' prefix are reserved for system use only. error: system-mine is not a known system priority class
            "#]],
            ),
            (
                r#"{"metadata": {"name": "x"}, "value": 1000000001, "preemptionPolicy": "Maybe"}"#,
                expect![[r#"
                value: Forbidden: maximum allowed value of a user defined priority is 1000000000
                preemptionPolicy: Unsupported value: "Maybe": supported values: "PreemptLowerPriority", "Never"
            "#]],
            ),
        ] {
            check(&PriorityClass, obj, &expected);
        }
        check_update(
            &PriorityClass,
            r#"{"value": 1, "preemptionPolicy": "Never"}"#,
            r#"{"value": 2, "preemptionPolicy": "PreemptLowerPriority"}"#,
            &expect![[r#"
                value: Forbidden: may not be changed in an update.
                preemptionPolicy: Invalid value: "PreemptLowerPriority": field is immutable
            "#]],
        );
    }
}
