//! The `scale` subresource of custom resources.

use serde::Deserialize;
use serde_json::{Value, json};

use crate::field::{ErrorList, Path};
use crate::json::JsonExt as _;

/// Simple field paths such as `.spec.replicas`.
#[derive(Clone, Debug, PartialEq, Eq, Hash, Deserialize)]
#[serde(rename_all = "camelCase")]
pub struct ScalePaths {
    pub spec_replicas_path: String,
    pub status_replicas_path: String,
    #[serde(default)]
    pub label_selector_path: Option<String>,
}

fn path_segments(path: &str) -> Vec<&str> {
    path.strip_prefix('.').unwrap_or(path).split('.').collect()
}

fn lookup<'v>(object: &'v Value, path: &str) -> &'v Value {
    path_segments(path).into_iter().fold(object, |value, name| value.at(name))
}

impl ScalePaths {
    /// The `autoscaling/v1` Scale of an object; `None` if the object has no replica count.
    pub fn to_scale(&self, object: &Value) -> Option<Value> {
        let replicas = lookup(object, &self.spec_replicas_path).as_i64()?;
        Some(self.build_scale(object, replicas))
    }

    fn build_scale(&self, object: &Value, replicas: i64) -> Value {
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
        let status_replicas = lookup(object, &self.status_replicas_path).as_i64().unwrap_or(0);
        scale.set("status", json!({"replicas": status_replicas}));
        let selector = self.label_selector_path.as_deref().map(|path| lookup(object, path));
        if let Some(selector) = selector.and_then(Value::as_str).filter(|text| !text.is_empty()) {
            scale["status"].set("selector", selector);
        }
        scale
    }

    /// Sets the replica count of an object from a Scale.
    pub fn apply(&self, object: &mut Value, scale: &Value) {
        let replicas = scale.path("spec.replicas").as_i64().unwrap_or(0);
        let mut value = object;
        let segments = path_segments(&self.spec_replicas_path);
        let Some((last, parents)) = segments.split_last() else { return };
        for name in parents {
            value.object_mut(name);
            let Some(child) = value.get_mut(*name) else { return };
            value = child;
        }
        value.set(last, replicas);
    }

    /// `parts` are the parts of the object to validate: `spec`, `status`.
    pub(super) fn validate(&self, object: &Value, parts: &[&str], errors: &mut ErrorList) {
        let numbers = [("spec", &self.spec_replicas_path), ("status", &self.status_replicas_path)];
        for (part, path) in numbers {
            if !parts.contains(&part) {
                continue;
            }
            let at = Path::new(path);
            match lookup(object, path) {
                Value::Null => {}
                value => match value.as_i64() {
                    None => {
                        let relative_path = path.strip_prefix('.').unwrap_or(path);
                        let message = format!(
                            "{} accessor error: {} is of the type {}, expected int64",
                            format_args!(".{relative_path}"),
                            value,
                            go_type(value)
                        );
                        errors.invalid(&at, 0, &message);
                    }
                    Some(..0) => errors.invalid(&at, value.clone(), "should be a non-negative integer"),
                    Some(number) if number > i64::from(i32::MAX) => {
                        let message = format!("should be less than or equal to {}", i32::MAX);
                        errors.invalid(&at, number, &message);
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
