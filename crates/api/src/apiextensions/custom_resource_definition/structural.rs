//! Validates that a schema is structural: types of all fields are specified outside of `allOf`,
//! `anyOf`, `oneOf` and `not`. Pruning and defaulting then need not evaluate alternatives.

use serde_json::{Value, json};

use super::super::values::compile_pattern;
use super::schema::is_zero;
use crate::field::{ErrorList, Path};
use crate::json::JsonExt;

#[derive(Clone, Copy, PartialEq)]
enum SchemaLevel {
    Root,
    Item,
    Field,
}

/// The errors are sorted by their text, as upstream.
pub(super) fn validate_structural(schema: &Value, path: &Path, errors: &mut ErrorList) {
    let mut found = ErrorList::default();
    structural_invariants(schema, SchemaLevel::Root, path, &mut found);
    for_each_nested(schema, path, |nested, at| validate_complete(nested, schema, path, &at, &mut found));
    found.0.sort_by_cached_key(|error| format!("{}: {}", error.path, error.message));
    errors.0.append(&mut found.0);
}

/// Validates the part of a schema outside of logical junctors.
fn structural_invariants(schema: &Value, level: SchemaLevel, path: &Path, errors: &mut ErrorList) {
    let kind = schema.text("type");
    if kind == "array" && !schema.has("items") {
        errors.required(&path.child("items"), "must be specified");
    }
    if schema.at("items").is_object() {
        structural_invariants(schema.at("items"), SchemaLevel::Item, &path.child("items"), errors);
    }
    for (name, property) in schema.entries("properties") {
        structural_invariants(property, SchemaLevel::Field, &path.child("properties").key(name), errors);
    }
    let additional = schema.at("additionalProperties");
    if !additional.is_null() {
        let path = path.child("additionalProperties");
        if level == SchemaLevel::Root {
            errors.forbidden(&path, "must not be used at the root");
        }
        if additional.is_object() {
            structural_invariants(additional, SchemaLevel::Field, &path, errors);
        }
    }
    extensions(schema, path, errors);
    value_validation(
        schema,
        is_int_or_string(schema),
        is_int_or_string(&schema.at("allOf")[0]),
        path,
        errors,
    );
    types(schema, level, path, errors);
    object_fields(schema, level, path, errors);
}

fn extensions(schema: &Value, path: &Path, errors: &mut ErrorList) {
    if schema.flag("x-kubernetes-int-or-string") {
        for keyword in ["x-kubernetes-preserve-unknown-fields", "x-kubernetes-embedded-resource"] {
            if schema.flag(keyword) {
                let message = "must be false if x-kubernetes-int-or-string is true";
                errors.invalid(&path.child(keyword), true, message);
            }
        }
    }
}

fn types(schema: &Value, level: SchemaLevel, path: &Path, errors: &mut ErrorList) {
    let kind = schema.text("type");
    let at = path.child("type");
    let embedded = schema.flag("x-kubernetes-embedded-resource");
    let type_optional =
        schema.flag("x-kubernetes-int-or-string") || schema.flag("x-kubernetes-preserve-unknown-fields");
    if embedded && kind != "object" {
        let message = "must be object if x-kubernetes-embedded-resource is true";
        if kind.is_empty() {
            errors.required(&at, message);
        } else {
            errors.invalid(&at, kind, message);
        }
    } else if kind.is_empty() && !type_optional {
        let message = match level {
            SchemaLevel::Root => "must not be empty at the root",
            SchemaLevel::Item => "must not be empty for specified array items",
            SchemaLevel::Field => "must not be empty for specified object fields",
        };
        errors.required(&at, message);
    }
    if embedded && schema.has("additionalProperties") {
        let message = "must not be used if x-kubernetes-embedded-resource is set";
        errors.forbidden(&path.child("additionalProperties"), message);
    }
    if level == SchemaLevel::Root && !kind.is_empty() && kind != "object" {
        errors.invalid(&at, kind, "must be object at the root");
    }
}

/// Restricts the properties `apiVersion`, `kind` and `metadata` at the root and in embedded resources.
fn object_fields(schema: &Value, level: SchemaLevel, path: &Path, errors: &mut ErrorList) {
    let embedded = schema.flag("x-kubernetes-embedded-resource");
    let properties = schema.at("properties");
    let at = |name: &str| path.child("properties").key(name);
    if level == SchemaLevel::Root || embedded {
        let required_types = [
            ("kind", "string", "must be string"),
            ("apiVersion", "string", "must be string"),
            ("metadata", "object", "must be object"),
        ];
        for (name, expected, message) in required_types {
            let property = properties.at(name);
            if !property.is_null() && property.text("type") != expected {
                errors.invalid(&at(name).child("type"), property.text("type"), message);
            }
        }
    }
    if level == SchemaLevel::Root && properties.has("metadata") && !has_names_only(properties.at("metadata"))
    {
        errors.forbidden(
            &at("metadata"),
            "must not specify anything other than name and generateName, but metadata is implicitly specified",
        );
    }
    let preserves_unknown = schema.flag("x-kubernetes-preserve-unknown-fields");
    if embedded && !preserves_unknown && schema.entries("properties").next().is_none() {
        errors.required(
            &path.child("properties"),
            "must not be empty if x-kubernetes-embedded-resource is true without x-kubernetes-preserve-unknown-fields",
        );
    }
}

fn has_names_only(metadata: &Value) -> bool {
    metadata.as_object().into_iter().flatten().all(|(keyword, value)| match keyword.as_str() {
        "type" | "default" => true,
        "properties" => {
            metadata.entries("properties").all(|(name, _)| matches!(name, "name" | "generateName"))
        }
        _ => is_zero(value),
    })
}

/// The only form in which types may be specified in `anyOf`.
fn is_int_or_string(schema: &Value) -> bool {
    schema.at("anyOf") == &json!([{"type": "integer"}, {"type": "string"}])
}

/// Validates the value validations of a schema: its junctors and its pattern.
fn value_validation(
    schema: &Value,
    skip_any_of: bool,
    skip_first_all_of: bool,
    path: &Path,
    errors: &mut ErrorList,
) {
    let list = |keyword: &str, errors: &mut ErrorList, skip: bool| {
        for (i, child) in schema.items(keyword).iter().enumerate() {
            nested_value_validation(child, skip && i == 0, &path.child(keyword).index(i), errors);
        }
    };
    if !skip_any_of {
        list("anyOf", errors, false);
    }
    list("allOf", errors, skip_first_all_of);
    list("oneOf", errors, false);
    nested_value_validation(schema.at("not"), false, &path.child("not"), errors);
    let pattern = schema.text("pattern");
    if !pattern.is_empty()
        && let Err(error) = compile_pattern(pattern)
    {
        let message = format!("must be a valid regular expression, but isn't: {error}");
        errors.invalid(&path.child("pattern"), pattern, &message);
    }
}

/// A schema inside a junctor may only restrict values.
fn nested_value_validation(schema: &Value, skip_any_of: bool, path: &Path, errors: &mut ErrorList) {
    if !schema.is_object() {
        return;
    }
    value_validation(schema, skip_any_of, false, path, errors);
    nested_value_validation(schema.at("items"), false, &path.child("items"), errors);
    for (name, property) in schema.entries("properties") {
        nested_value_validation(property, false, &path.child("properties").key(name), errors);
    }
    const FORBIDDEN: [(&str, &str); 12] = [
        ("type", "empty"),
        ("additionalProperties", "undefined"),
        ("default", "undefined"),
        ("title", "empty"),
        ("description", "empty"),
        ("nullable", "false"),
        ("x-kubernetes-preserve-unknown-fields", "false"),
        ("x-kubernetes-embedded-resource", "false"),
        ("x-kubernetes-int-or-string", "false"),
        ("x-kubernetes-list-map-keys", "empty"),
        ("x-kubernetes-list-type", "undefined"),
        ("x-kubernetes-map-type", "undefined"),
    ];
    for (keyword, expected) in FORBIDDEN {
        let value = schema.at(keyword);
        let set = if keyword == "default" { !value.is_null() } else { !is_zero(value) };
        if set {
            errors.forbidden(&path.child(keyword), &format!("must be {expected} to be structural"));
        }
    }
    if !schema.items("x-kubernetes-validations").is_empty() {
        let path = path.child("x-kubernetes-validations");
        errors.forbidden(&path, "must be empty to be structural");
    }
    if schema.at("properties").has("metadata") {
        let path = path.child("properties").key("metadata");
        errors.forbidden(&path, "must not be specified in a nested context");
    }
}

fn for_each_nested(schema: &Value, path: &Path, mut visit: impl FnMut(&Value, Path)) {
    if schema.at("not").is_object() {
        visit(schema.at("not"), path.child("not"));
    }
    for keyword in ["allOf", "anyOf", "oneOf"] {
        for (i, child) in schema.items(keyword).iter().enumerate() {
            visit(child, path.child(keyword).index(i));
        }
    }
}

/// Fields used inside a junctor must also be specified outside of it.
fn validate_complete(nested: &Value, outer: &Value, outer_path: &Path, path: &Path, errors: &mut ErrorList) {
    if !outer.is_object() {
        errors.required(outer_path, &format!("because it is defined in {path}"));
        return;
    }
    for_each_nested(nested, path, |inner, at| validate_complete(inner, outer, outer_path, &at, errors));
    if nested.at("items").is_object() {
        let (outer_path, path) = (outer_path.child("items"), path.child("items"));
        validate_complete(nested.at("items"), outer.at("items"), &outer_path, &path, errors);
    }
    for (name, property) in nested.entries("properties") {
        let (outer_path, path) =
            (outer_path.child("properties").key(name), path.child("properties").key(name));
        validate_complete(property, outer.at("properties").at(name), &outer_path, &path, errors);
    }
}
