//! Validates type and metadata of embedded resources.

use serde_json::Value;

use crate::field::{ErrorList, Path};
use crate::json::JsonExt;
use crate::strategy::NameFormat;
use crate::{meta, names};

/// Validates all values that the schema marks as `x-kubernetes-embedded-resource`.
pub fn validate_embedded(schema: &Value, value: &Value, path: &Path, errors: &mut ErrorList) {
    match value {
        Value::Object(map) => {
            if schema.flag("x-kubernetes-embedded-resource") {
                validate_object(value, path, errors);
            }
            let additional = schema.at("additionalProperties");
            for (name, child) in map {
                let property = schema.at("properties").at(name);
                if property.is_object() {
                    validate_embedded(property, child, &path.child(name), errors);
                } else if additional.is_object() {
                    validate_embedded(additional, child, &path.key(name), errors);
                }
            }
        }
        Value::Array(items) => {
            for (i, item) in items.iter().enumerate() {
                validate_embedded(schema.at("items"), item, &path.index(i), errors);
            }
        }
        _ => {}
    }
}

fn validate_object(value: &Value, path: &Path, errors: &mut ErrorList) {
    for name in ["apiVersion", "kind"] {
        let at = path.child(name);
        match value.get(name) {
            None => errors.required(&at, ""),
            Some(Value::String(text)) if text.is_empty() => errors.invalid(&at, "", "must not be empty"),
            Some(Value::String(text)) if name == "kind" => {
                let message = names::dns1035_label(&text.to_lowercase());
                if !message.is_empty() {
                    let message =
                        format!("may have mixed case, but should otherwise match: {}", message.join(","));
                    errors.invalid(&at, text.as_str(), &message);
                }
            }
            Some(Value::String(text)) => {
                if text.matches('/').count() > 1 {
                    errors.invalid(&at, text.as_str(), &format!("unexpected GroupVersion string: {text}"));
                }
            }
            Some(other) => errors.invalid(&at, other.clone(), "must be a string"),
        }
    }
    let metadata = value.at("metadata");
    if metadata.is_object() {
        let mut metadata = metadata.clone();
        if metadata.text("name").is_empty() {
            metadata.set("name", "fakename");
        }
        let namespaced = !metadata.text("namespace").is_empty();
        meta::validate_object_meta(
            &metadata,
            namespaced,
            NameFormat::PathSegment,
            &path.child("metadata"),
            errors,
        );
    }
}
