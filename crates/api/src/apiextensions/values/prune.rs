//! Changes values before validation: prunes unknown fields, drops nulls that are not allowed and sets
//! defaults.

use serde_json::{Map, Value};

use crate::json::JsonExt;

/// Removes unspecified fields and returns their sorted paths. `root` marks the custom resource itself,
/// whose metadata is not pruned by the schema.
pub fn prune(schema: &Value, value: &mut Value, root: bool) -> Vec<String> {
    let mut state = PruneState { unknown: Vec::new(), path: String::new() };
    state.prune_value(schema, value, root);
    state.unknown.sort();
    state.unknown
}

struct PruneState {
    unknown: Vec<String>,
    path: String,
}

impl PruneState {
    fn prune_value(&mut self, schema: &Value, value: &mut Value, root: bool) {
        if schema.flag("x-kubernetes-preserve-unknown-fields") {
            return self.skip_prune(schema, value, root);
        }
        let embedded = root || schema.flag("x-kubernetes-embedded-resource");
        match value {
            Value::Object(map) => map.retain(|name, child| {
                if embedded && is_meta(name) {
                    return true;
                }
                match child_schema(schema, name) {
                    Some(inner) => {
                        self.with_field(name, |state| state.prune_value(inner, child, false));
                        true
                    }
                    None => {
                        self.add_unknown(name);
                        false
                    }
                }
            }),
            Value::Array(items) => {
                for (i, item) in items.iter_mut().enumerate() {
                    self.with_index(i, |state| state.prune_value(schema.at("items"), item, false));
                }
            }
            _ => {}
        }
    }

    /// Keeps unspecified fields, but prunes the specified ones inside
    /// (`x-kubernetes-preserve-unknown-fields`).
    fn skip_prune(&mut self, schema: &Value, value: &mut Value, root: bool) {
        let embedded = root || schema.flag("x-kubernetes-embedded-resource");
        match value {
            Value::Object(map) => {
                for (name, child) in map.iter_mut().filter(|(name, _)| !(embedded && is_meta(name))) {
                    if let Some(inner) = child_schema(schema, name) {
                        self.with_field(name, |state| state.prune_value(inner, child, false));
                    }
                }
            }
            Value::Array(items) => {
                for (i, item) in items.iter_mut().enumerate() {
                    self.with_index(i, |state| state.skip_prune(schema.at("items"), item, false));
                }
            }
            _ => {}
        }
    }

    fn with_field(&mut self, name: &str, inside: impl FnOnce(&mut PruneState)) {
        let length = self.path.len();
        if length > 0 {
            self.path.push('.');
        }
        self.path.push_str(name);
        inside(self);
        self.path.truncate(length);
    }

    fn with_index(&mut self, i: usize, inside: impl FnOnce(&mut PruneState)) {
        let length = self.path.len();
        self.path.push_str(&format!("[{i}]"));
        inside(self);
        self.path.truncate(length);
    }

    fn add_unknown(&mut self, name: &str) {
        self.with_field(name, |state| state.unknown.push(state.path.clone()));
    }
}

/// The schema of a field; `None` if it is not specified.
fn child_schema<'s>(schema: &'s Value, name: &str) -> Option<&'s Value> {
    static ANY_SCHEMA: Value = Value::Null;
    let property = schema.at("properties").at(name);
    if property.is_object() {
        return Some(property);
    }
    match schema.at("additionalProperties") {
        Value::Null => None,
        additional @ Value::Object(_) => Some(additional),
        _ => Some(&ANY_SCHEMA),
    }
}

fn is_meta(name: &str) -> bool {
    matches!(name, "apiVersion" | "kind" | "metadata")
}

/// Removes nulls of fields that are not nullable, unless they have a default, which then replaces them.
pub fn remove_null_fields(schema: &Value, value: &mut Value) {
    match value {
        Value::Object(map) => map.retain(|name, child| {
            let inner = child_schema(schema, name).filter(|inner| inner.is_object());
            if let Some(inner) = inner
                && child.is_null()
                && !inner.flag("nullable")
                && !inner.has("default")
            {
                return false;
            }
            remove_null_fields(inner.unwrap_or(&Value::Null), child);
            true
        }),
        Value::Array(items) => items.iter_mut().for_each(|item| remove_null_fields(schema.at("items"), item)),
        _ => {}
    }
}

/// Sets defaults, outer objects first.
pub fn set_defaults(schema: &Value, value: &mut Value) {
    match value {
        Value::Object(map) => {
            for (name, property) in schema.entries("properties") {
                let default = property.at("default");
                if default.is_null() {
                    continue;
                }
                let missing = match map.get(name) {
                    None => true,
                    Some(found) => found.is_null() && !property.flag("nullable"),
                };
                if missing {
                    map.insert(name.to_owned(), default.clone());
                }
            }
            for (name, child) in map.iter_mut() {
                if let Some(inner) = child_schema(schema, name) {
                    replace_null(inner, child);
                    set_defaults(inner, child);
                }
            }
        }
        Value::Array(items) => {
            let inner = schema.at("items");
            for item in items {
                replace_null(inner, item);
                set_defaults(inner, item);
            }
        }
        _ => {}
    }
}

fn replace_null(schema: &Value, value: &mut Value) {
    if value.is_null() && schema.is_object() && !schema.flag("nullable") && schema.has("default") {
        *value = schema.at("default").clone();
    }
}

/// Coerces the metadata of the embedded object at a path.
type CoerceMeta<'c> = dyn FnMut(&mut Map<String, Value>, &str) -> Result<(), String> + 'c;

/// Coerces the metadata of embedded objects to `ObjectMeta`. `coerce` collects the paths of unknown
/// fields or returns an error.
pub fn coerce_embedded(
    schema: &Value,
    value: &mut Value,
    path: &str,
    coerce: &mut CoerceMeta<'_>,
) -> Result<(), String> {
    match value {
        Value::Object(map) => {
            if schema.flag("x-kubernetes-embedded-resource") {
                coerce(map, path)?;
            }
            for (name, child) in map.iter_mut() {
                if let Some(inner) = child_schema(schema, name) {
                    let inside = if path.is_empty() { name.clone() } else { format!("{path}.{name}") };
                    coerce_embedded(inner, child, &inside, coerce)?;
                }
            }
        }
        Value::Array(items) => {
            for (i, item) in items.iter_mut().enumerate() {
                coerce_embedded(schema.at("items"), item, &format!("{path}[{i}]"), coerce)?;
            }
        }
        _ => {}
    }
    Ok(())
}

#[cfg(test)]
mod tests {
    use serde_json::json;

    use super::*;

    #[test]
    fn prune_drops_unknown_fields() {
        let schema = json!({"type": "object", "properties": {
            "a": {"type": "object", "x-kubernetes-preserve-unknown-fields": true, "properties": {"b": {"type": "object"}}},
            "l": {"type": "array", "items": {"type": "object", "properties": {"x": {"type": "string"}}}},
            "m": {"type": "object", "additionalProperties": {"type": "object", "properties": {"y": {"type": "string"}}}},
            "open": {"type": "object", "additionalProperties": true},
        }});
        let mut value = json!({"metadata": {"name": "n"}, "a": {"b": {"no": 1}, "free": {"any": 1}},
            "l": [{"x": "1", "y": 2}], "m": {"k": {"y": "", "z": 1}}, "open": {"q": 1}, "z": 1});
        assert_eq!(prune(&schema, &mut value, true), ["a.b.no", "l[0].y", "m.k.z", "z"]);
        let pruned = json!({"metadata": {"name": "n"}, "a": {"b": {}, "free": {"any": 1}}, "l": [{"x": "1"}],
            "m": {"k": {"y": ""}}, "open": {"q": 1}});
        assert_eq!(value, pruned);
        assert!(prune(&schema, &mut value, true).is_empty());
        assert_eq!(prune(&schema, &mut value, false), ["metadata"]);
    }

    #[test]
    fn defaults_replace_absent_and_null_fields() {
        let schema = json!({"type": "object", "properties": {
            "spec": {"type": "object", "default": {}, "properties": {
                "crew": {"type": "integer", "default": 2},
                "note": {"type": "string", "nullable": true, "default": "x"},
                "plain": {"type": "string"},
                "parts": {"type": "array", "items": {"type": "object", "properties": {"n": {"type": "integer", "default": 1}}}},
                "by": {"type": "object", "additionalProperties": {"type": "integer", "default": 3}},
            }},
        }});
        let mut value = json!({});
        set_defaults(&schema, &mut value);
        assert_eq!(value, json!({"spec": {"crew": 2, "note": "x"}}));
        let mut value = json!({"spec": {"crew": null, "note": null, "plain": null, "parts": [{}, {"n": 5}], "by": {"k": null}}});
        remove_null_fields(&schema, &mut value);
        set_defaults(&schema, &mut value);
        assert_eq!(
            value,
            json!({"spec": {"crew": 2, "note": null, "parts": [{"n": 1}, {"n": 5}], "by": {"k": 3}}})
        );
    }
}
