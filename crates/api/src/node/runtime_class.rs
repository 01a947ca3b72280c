//! RuntimeClass: REST strategy and validation.

use serde_json::Value;

use super::deprecated_label_warning;
use crate::core::{pod, resources, rules};
use crate::field::{ErrorList, ErrorType, Path};
use crate::json::JsonExt;
use crate::strategy::RestStrategy;
use crate::{meta, names};

pub struct RuntimeClass;

impl RestStrategy for RuntimeClass {
    fn validate(&self, obj: &Value, errors: &mut ErrorList) {
        rules::validate_required_name(
            obj.text("handler"),
            names::dns1123_label,
            &Path::new("handler"),
            errors,
        );
        for (name, amount) in obj.at("overhead").entries("podFixed") {
            let path = Path::new("overhead.limits").key(name);
            resources::validate_container_resource_name(name, &path, errors);
            resources::validate_quantity(name, amount, &path, errors);
        }
        let scheduling = obj.at("scheduling");
        let path = Path::new("scheduling");
        meta::validate_labels(scheduling.at("nodeSelector"), &path.child("nodeSelector"), errors);
        let path = path.child("tolerations");
        let tolerations = scheduling.items("tolerations");
        pod::validate_tolerations(errors, tolerations, &path);
        let key = |toleration: &Value| {
            ["key", "operator", "value", "effect"].map(|field| toleration.text(field).to_owned())
        };
        let repeated = rules::find_duplicates(tolerations.iter().map(key));
        for (i, toleration) in tolerations.iter().enumerate() {
            if repeated[i] {
                errors.push(ErrorType::Duplicate, &path.index(i), render_duplicate(toleration));
            }
        }
    }

    fn validate_update(&self, new: &Value, old: &Value, errors: &mut ErrorList) {
        meta::validate_immutable(new.at("handler"), old.at("handler"), &Path::new("handler"), errors);
    }

    fn warnings(&self, new: &Value, _old: Option<&Value>) -> Vec<String> {
        new.at("scheduling")
            .entries("nodeSelector")
            .filter_map(|(key, _)| deprecated_label_warning(key))
            .map(|message| format!("scheduling.nodeSelector: {message}"))
            .collect()
    }
}

/// Upstream prints its internal struct.
fn render_duplicate(toleration: &Value) -> String {
    let text = |field: &str| Value::from(toleration.text(field));
    format!(
        "Duplicate value: {{\"Key\":{},\"Operator\":{},\"Value\":{},\"Effect\":{},\"TolerationSeconds\":{}}}",
        text("key"),
        text("operator"),
        text("value"),
        text("effect"),
        toleration.at("tolerationSeconds"),
    )
}

#[cfg(test)]
mod tests {
    use expect_test::expect;

    use super::*;
    use crate::core::testing::{check, check_update};

    #[test]
    fn validates_runtime_classes() {
        check(&RuntimeClass, r#"{"handler": "runc", "overhead": {"podFixed": {"cpu": "1"}}}"#, &expect![""]);
        check(
            &RuntimeClass,
            r#"{"overhead": {"podFixed": {"disk": "1"}}, "scheduling": {"tolerations":
                [{"key": "a", "operator": "Exists"}, {"key": "a", "operator": "Exists"}]}}"#,
            &expect![[r#"
                handler: Required value
                overhead.limits[disk]: Invalid value: "disk": must be a standard resource type or fully qualified
                overhead.limits[disk]: Invalid value: "disk": must be a standard resource for containers
                scheduling.tolerations[1]: Duplicate value: {"Key":"a","Operator":"Exists","Value":"","Effect":"","TolerationSeconds":null}
            "#]],
        );
        check_update(
            &RuntimeClass,
            r#"{"handler": "a"}"#,
            r#"{"handler": "b"}"#,
            &expect![[r#"
            handler: Invalid value: "b": field is immutable
        "#]],
        );
    }
}
