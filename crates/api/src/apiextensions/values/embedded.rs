//! Objects inside objects: they say what they are, and their metadata is sound.

use serde_json::Value;

use crate::field::{Errors, Path};
use crate::json::Json;
use crate::kind::NameRule;
use crate::{meta, names};

/// Checks the objects inside a value that the schema says are objects of their own.
pub fn embedded(schema: &Value, value: &Value, path: &Path, errors: &mut Errors) {
    match value {
        Value::Object(map) => {
            if schema.flag("x-kubernetes-embedded-resource") {
                object(value, path, errors);
            }
            let additional = schema.at("additionalProperties");
            for (name, child) in map {
                let property = schema.at("properties").at(name);
                if property.is_object() {
                    embedded(property, child, &path.at(name), errors);
                } else if additional.is_object() {
                    embedded(additional, child, &path.key(name), errors);
                }
            }
        }
        Value::Array(items) => {
            for (i, item) in items.iter().enumerate() {
                embedded(schema.at("items"), item, &path.index(i), errors);
            }
        }
        _ => {}
    }
}

fn object(value: &Value, path: &Path, errors: &mut Errors) {
    for name in ["apiVersion", "kind"] {
        let at = path.at(name);
        match value.get(name) {
            None => errors.required(&at, ""),
            Some(Value::String(text)) if text.is_empty() => errors.invalid(&at, "", "must not be empty"),
            Some(Value::String(text)) if name == "kind" => {
                let words = names::dns1035_label(&text.to_lowercase());
                if !words.is_empty() {
                    let words =
                        format!("may have mixed case, but should otherwise match: {}", words.join(","));
                    errors.invalid(&at, text.as_str(), &words);
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
            NameRule::PathSegment,
            &path.at("metadata"),
            errors,
        );
    }
}
