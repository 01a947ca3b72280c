//! The `scale` subresource of a custom kind: where its numbers are found.

use serde::Deserialize;
use serde_json::{Value, json};

use crate::field::{Errors, Path};
use crate::json::Json as _;

/// Simple paths such as `.spec.replicas`.
#[derive(Clone, Debug, PartialEq, Eq, Hash, Deserialize)]
#[serde(rename_all = "camelCase")]
pub struct ScalePaths {
    pub spec_replicas_path: String,
    pub status_replicas_path: String,
    #[serde(default)]
    pub label_selector_path: Option<String>,
}

fn steps(path: &str) -> Vec<&str> {
    path.strip_prefix('.').unwrap_or(path).split('.').collect()
}

fn find<'v>(object: &'v Value, path: &str) -> &'v Value {
    steps(path).into_iter().fold(object, |value, name| value.at(name))
}

impl ScalePaths {
    /// The `autoscaling/v1` Scale of an object; `None` if the object has no number of replicas.
    pub fn view(&self, object: &Value) -> Option<Value> {
        let replicas = find(object, &self.spec_replicas_path).as_i64()?;
        Some(self.of(object, replicas))
    }

    fn of(&self, object: &Value, replicas: i64) -> Value {
        let meta = object.at("metadata");
        let mut scale = json!({"apiVersion": "autoscaling/v1", "kind": "Scale", "metadata": {}, "spec": {}});
        for field in ["name", "namespace", "uid", "resourceVersion", "creationTimestamp"] {
            if meta.has(field) {
                scale["metadata"].set(field, meta.at(field).clone());
            }
        }
        if replicas != 0 {
            scale["spec"].set("replicas", replicas);
        }
        let there = find(object, &self.status_replicas_path).as_i64().unwrap_or(0);
        scale.set("status", json!({"replicas": there}));
        let selector = self.label_selector_path.as_deref().map(|path| find(object, path));
        if let Some(selector) = selector.and_then(Value::as_str).filter(|text| !text.is_empty()) {
            scale["status"].set("selector", selector);
        }
        scale
    }

    /// Writes a Scale's number into the object.
    pub fn apply(&self, object: &mut Value, scale: &Value) {
        let replicas = scale.path("spec.replicas").as_i64().unwrap_or(0);
        let mut value = object;
        let steps = steps(&self.spec_replicas_path);
        let Some((last, parents)) = steps.split_last() else { return };
        for name in parents {
            value.object_mut(name);
            let Some(child) = value.get_mut(*name) else { return };
            value = child;
        }
        value.set(last, replicas);
    }

    /// `parts` are those of the object that are looked at: `spec`, `status`.
    pub(super) fn validate(&self, object: &Value, parts: &[&str], errors: &mut Errors) {
        let numbers = [("spec", &self.spec_replicas_path), ("status", &self.status_replicas_path)];
        for (part, path) in numbers {
            if !parts.contains(&part) {
                continue;
            }
            let at = Path::new(path);
            match find(object, path) {
                Value::Null => {}
                value => match value.as_i64() {
                    None => {
                        let shown = path.strip_prefix('.').unwrap_or(path);
                        let why = format!(
                            "{} accessor error: {} is of the type {}, expected int64",
                            format_args!(".{shown}"),
                            value,
                            go_type(value)
                        );
                        errors.invalid(&at, 0, &why);
                    }
                    Some(..0) => errors.invalid(&at, value.clone(), "should be a non-negative integer"),
                    Some(number) if number > i64::from(i32::MAX) => {
                        let why = format!("should be less than or equal to {}", i32::MAX);
                        errors.invalid(&at, number, &why);
                    }
                    Some(_) => {}
                },
            }
        }
    }
}

fn go_type(value: &Value) -> &'static str {
    match value {
        Value::String(_) => "string",
        Value::Bool(_) => "bool",
        Value::Array(_) => "[]interface {}",
        Value::Object(_) => "map[string]interface {}",
        _ => "float64",
    }
}
