//! Structural schemas: every field's type is said once, outside of `allOf`, `anyOf`, `oneOf` and `not`, so that
//! unknown fields can be dropped and defaults filled in without trying out alternatives.

use serde_json::{Value, json};

use super::super::values::compile_pattern;
use super::schema::is_zero;
use crate::field::{Errors, Path};
use crate::json::Json;

#[derive(Clone, Copy, PartialEq)]
enum Level {
    Root,
    Item,
    Field,
}

/// Complains in the order of the complaints' text, as upstream does.
pub(super) fn structural(schema: &Value, path: &Path, errors: &mut Errors) {
    let mut found = Errors::default();
    skeleton(schema, Level::Root, path, &mut found);
    each_junctor(schema, path, |nested, at| complete(nested, schema, path, &at, &mut found));
    found.0.sort_by_cached_key(|complaint| format!("{}: {}", complaint.path, complaint.message));
    errors.0.append(&mut found.0);
}

/// The part outside of junctors.
fn skeleton(schema: &Value, level: Level, path: &Path, errors: &mut Errors) {
    let kind = schema.text("type");
    if kind == "array" && !schema.has("items") {
        errors.required(&path.at("items"), "must be specified");
    }
    if schema.at("items").is_object() {
        skeleton(schema.at("items"), Level::Item, &path.at("items"), errors);
    }
    for (name, property) in schema.entries("properties") {
        skeleton(property, Level::Field, &path.at("properties").key(name), errors);
    }
    let additional = schema.at("additionalProperties");
    if !additional.is_null() {
        let path = path.at("additionalProperties");
        if level == Level::Root {
            errors.forbidden(&path, "must not be used at the root");
        }
        if additional.is_object() {
            skeleton(additional, Level::Field, &path, errors);
        }
    }
    extensions(schema, path, errors);
    values(schema, int_or_string(schema), int_or_string(&schema.at("allOf")[0]), path, errors);
    types(schema, level, path, errors);
    object_fields(schema, level, path, errors);
}

fn extensions(schema: &Value, path: &Path, errors: &mut Errors) {
    if schema.flag("x-kubernetes-int-or-string") {
        for keyword in ["x-kubernetes-preserve-unknown-fields", "x-kubernetes-embedded-resource"] {
            if schema.flag(keyword) {
                let message = "must be false if x-kubernetes-int-or-string is true";
                errors.invalid(&path.at(keyword), true, message);
            }
        }
    }
}

fn types(schema: &Value, level: Level, path: &Path, errors: &mut Errors) {
    let kind = schema.text("type");
    let at = path.at("type");
    let embedded = schema.flag("x-kubernetes-embedded-resource");
    let untyped =
        schema.flag("x-kubernetes-int-or-string") || schema.flag("x-kubernetes-preserve-unknown-fields");
    if embedded && kind != "object" {
        let message = "must be object if x-kubernetes-embedded-resource is true";
        if kind.is_empty() {
            errors.required(&at, message);
        } else {
            errors.invalid(&at, kind, message);
        }
    } else if kind.is_empty() && !untyped {
        let message = match level {
            Level::Root => "must not be empty at the root",
            Level::Item => "must not be empty for specified array items",
            Level::Field => "must not be empty for specified object fields",
        };
        errors.required(&at, message);
    }
    if embedded && schema.has("additionalProperties") {
        let message = "must not be used if x-kubernetes-embedded-resource is set";
        errors.forbidden(&path.at("additionalProperties"), message);
    }
    if level == Level::Root && !kind.is_empty() && kind != "object" {
        errors.invalid(&at, kind, "must be object at the root");
    }
}

/// `apiVersion`, `kind` and `metadata` have a shape of their own in whatever is an object.
fn object_fields(schema: &Value, level: Level, path: &Path, errors: &mut Errors) {
    let embedded = schema.flag("x-kubernetes-embedded-resource");
    let properties = schema.at("properties");
    let at = |name: &str| path.at("properties").key(name);
    if level == Level::Root || embedded {
        let shapes = [
            ("kind", "string", "must be string"),
            ("apiVersion", "string", "must be string"),
            ("metadata", "object", "must be object"),
        ];
        for (name, wanted, message) in shapes {
            let property = properties.at(name);
            if !property.is_null() && property.text("type") != wanted {
                errors.invalid(&at(name).at("type"), property.text("type"), message);
            }
        }
    }
    if level == Level::Root && properties.has("metadata") && !says_only_names(properties.at("metadata")) {
        errors.forbidden(
            &at("metadata"),
            "must not specify anything other than name and generateName, but metadata is implicitly specified",
        );
    }
    let keeps_unknown = schema.flag("x-kubernetes-preserve-unknown-fields");
    if embedded && !keeps_unknown && schema.entries("properties").next().is_none() {
        errors.required(
            &path.at("properties"),
            "must not be empty if x-kubernetes-embedded-resource is true without x-kubernetes-preserve-unknown-fields",
        );
    }
}

fn says_only_names(metadata: &Value) -> bool {
    metadata.as_object().into_iter().flatten().all(|(keyword, value)| match keyword.as_str() {
        "type" | "default" => true,
        "properties" => {
            metadata.entries("properties").all(|(name, _)| matches!(name, "name" | "generateName"))
        }
        _ => is_zero(value),
    })
}

/// The one shape in which types may stand inside `anyOf`.
fn int_or_string(schema: &Value) -> bool {
    schema.at("anyOf") == &json!([{"type": "integer"}, {"type": "string"}])
}

/// The rules on values of a schema: its junctors and its pattern.
fn values(schema: &Value, skip_any_of: bool, skip_first_all_of: bool, path: &Path, errors: &mut Errors) {
    let list = |keyword: &str, errors: &mut Errors, skip: bool| {
        for (i, child) in schema.items(keyword).iter().enumerate() {
            nested(child, skip && i == 0, &path.at(keyword).index(i), errors);
        }
    };
    if !skip_any_of {
        list("anyOf", errors, false);
    }
    list("allOf", errors, skip_first_all_of);
    list("oneOf", errors, false);
    nested(schema.at("not"), false, &path.at("not"), errors);
    let pattern = schema.text("pattern");
    if !pattern.is_empty()
        && let Err(error) = compile_pattern(pattern)
    {
        let message = format!("must be a valid regular expression, but isn't: {error}");
        errors.invalid(&path.at("pattern"), pattern, &message);
    }
}

/// What stands inside a junctor may only restrict values.
fn nested(schema: &Value, skip_any_of: bool, path: &Path, errors: &mut Errors) {
    if !schema.is_object() {
        return;
    }
    values(schema, skip_any_of, false, path, errors);
    nested(schema.at("items"), false, &path.at("items"), errors);
    for (name, property) in schema.entries("properties") {
        nested(property, false, &path.at("properties").key(name), errors);
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
    for (keyword, wanted) in FORBIDDEN {
        let value = schema.at(keyword);
        let set = if keyword == "default" { !value.is_null() } else { !is_zero(value) };
        if set {
            errors.forbidden(&path.at(keyword), &format!("must be {wanted} to be structural"));
        }
    }
    if !schema.items("x-kubernetes-validations").is_empty() {
        let path = path.at("x-kubernetes-validations");
        errors.forbidden(&path, "must be empty to be structural");
    }
    if schema.at("properties").has("metadata") {
        let path = path.at("properties").key("metadata");
        errors.forbidden(&path, "must not be specified in a nested context");
    }
}

fn each_junctor(schema: &Value, path: &Path, mut visit: impl FnMut(&Value, Path)) {
    if schema.at("not").is_object() {
        visit(schema.at("not"), path.at("not"));
    }
    for keyword in ["allOf", "anyOf", "oneOf"] {
        for (i, child) in schema.items(keyword).iter().enumerate() {
            visit(child, path.at(keyword).index(i));
        }
    }
}

/// What a junctor speaks of must be declared outside too.
fn complete(nested: &Value, outer: &Value, outer_path: &Path, path: &Path, errors: &mut Errors) {
    if !outer.is_object() {
        errors.required(outer_path, &format!("because it is defined in {path}"));
        return;
    }
    each_junctor(nested, path, |inner, at| complete(inner, outer, outer_path, &at, errors));
    if nested.at("items").is_object() {
        let (outer_path, path) = (outer_path.at("items"), path.at("items"));
        complete(nested.at("items"), outer.at("items"), &outer_path, &path, errors);
    }
    for (name, property) in nested.entries("properties") {
        let (outer_path, path) = (outer_path.at("properties").key(name), path.at("properties").key(name));
        complete(property, outer.at("properties").at(name), &outer_path, &path, errors);
    }
}
