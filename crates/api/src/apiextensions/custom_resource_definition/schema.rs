//! The OpenAPI schema of one version: what may be written in it at all.
//!
//! Schemas are read as the JSON they arrive in. Nesting is bounded by the JSON parser, so recursion is safe.

use serde_json::Value;

use super::super::values;
use super::field_path::field_at;
use super::rules::expressions;
use super::{inner, lists, structural};
use crate::field::{Errors, Path, Reason};
use crate::json::Json;

const TYPES: [&str; 6] = ["array", "boolean", "integer", "number", "object", "string"];

/// Keywords allowed at the root when status is apart: with others, checking `status` alone would lose rules.
const AT_ROOT: [(&str, &str); 22] = [
    ("Description", "description"),
    ("Type", "type"),
    ("Format", "format"),
    ("Title", "title"),
    ("Maximum", "maximum"),
    ("ExclusiveMaximum", "exclusiveMaximum"),
    ("Minimum", "minimum"),
    ("ExclusiveMinimum", "exclusiveMinimum"),
    ("MaxLength", "maxLength"),
    ("MinLength", "minLength"),
    ("Pattern", "pattern"),
    ("MaxItems", "maxItems"),
    ("MinItems", "minItems"),
    ("UniqueItems", "uniqueItems"),
    ("MultipleOf", "multipleOf"),
    ("Required", "required"),
    ("Items", "items"),
    ("Properties", "properties"),
    ("ExternalDocs", "externalDocs"),
    ("Example", "example"),
    ("XPreserveUnknownFields", "x-kubernetes-preserve-unknown-fields"),
    ("XValidations", "x-kubernetes-validations"),
];

/// `schema` of a version, or the `validation` all versions share.
pub(super) fn validation(validation: &Value, has_status: bool, path: &Path, errors: &mut Errors) {
    let schema = validation.at("openAPIV3Schema");
    if schema.is_null() {
        return;
    }
    let before = errors.0.len();
    if has_status {
        root_keywords(schema, path, errors);
    }
    let path = path.at("openAPIV3Schema");
    if schema.flag("nullable") {
        errors.forbidden(&path.at("nullable"), "nullable cannot be true at the root");
    }
    let unsupported = any_unsupported(schema);
    if unsupported.is_none() {
        let before = errors.0.len();
        structural::structural(schema, &path, errors);
        if errors.0.len() == before {
            defaults(schema, &path, errors);
        }
    }
    walk(schema, &path, true, Place { meta: false, no_defaults: None }, errors);
    if let Some(keyword) = unsupported
        && errors.0.len() == before
    {
        errors.invalid(&path, "", &format!("OpenAPIV3Schema '{keyword}' is not supported"));
    }
    // Of a schema that makes no sense, expressions make none either.
    if errors.0.len() == before {
        expressions(schema, &path, errors);
    }
}

/// A default is a value like any other. Inside metadata it is forbidden, which `walk` says.
fn defaults(schema: &Value, path: &Path, errors: &mut Errors) {
    let default = schema.at("default");
    if !default.is_null() {
        let path = path.at("default");
        if !values::prune(schema, &mut default.clone(), false).is_empty() {
            errors.invalid(&path, default.clone(), "must not have unknown fields");
        }
        values::check(schema, default, &path, &values::Patterns::of(schema), errors);
    }
    if schema.at("items").is_object() {
        defaults(schema.at("items"), &path.at("items"), errors);
    }
    for (name, property) in schema.entries("properties") {
        defaults(property, &path.at("properties").key(name), errors);
    }
}

fn root_keywords(schema: &Value, path: &Path, errors: &mut Errors) {
    let set = |keyword: &str| !is_zero(schema.at(keyword));
    if set("type") && schema.text("type") != "object" {
        errors.invalid(
            &path.at("openAPIV3Schema.type"),
            schema.text("type"),
            "only \"object\" is allowed as the type at the root of the schema if the status subresource is enabled",
        );
    } else if inner::KEYWORDS
        .iter()
        .any(|(_, keyword, _)| set(keyword) && !AT_ROOT.iter().any(|(_, allowed)| allowed == keyword))
    {
        let names: Vec<&str> = AT_ROOT.iter().map(|(name, _)| *name).collect();
        let message = format!(
            "Invalid value: {}: only [{}] fields are allowed at the root of the schema if the status subresource is enabled",
            inner::schema(schema),
            names.join(" ")
        );
        errors.push(Reason::Invalid, &path.at("openAPIV3Schema"), message);
    }
}

/// What an absent keyword would read as.
pub(super) fn is_zero(value: &Value) -> bool {
    match value {
        Value::Null => true,
        Value::Bool(flag) => !flag,
        Value::String(text) => text.is_empty(),
        Value::Array(items) => items.is_empty(),
        Value::Object(_) | Value::Number(_) => false,
    }
}

/// The schemas directly inside one.
pub(super) fn children(schema: &Value) -> impl Iterator<Item = &Value> {
    let single = ["not", "items", "additionalProperties", "additionalItems"];
    let lists = ["items", "allOf", "anyOf", "oneOf"];
    let maps = ["properties", "patternProperties", "definitions", "dependencies"];
    single
        .into_iter()
        .map(|keyword| schema.at(keyword))
        .filter(|child| child.is_object())
        .chain(lists.into_iter().flat_map(|keyword| schema.items(keyword)))
        .chain(maps.into_iter().flat_map(|keyword| schema.entries(keyword).map(|(_, child)| child)))
        .filter(|child| child.is_object())
}

/// Whether a schema or any inside it answers to `test`.
pub(super) fn any(schema: &Value, test: impl Fn(&Value) -> bool + Copy) -> bool {
    test(schema) || children(schema).any(|child| any(child, test))
}

fn any_unsupported(schema: &Value) -> Option<&'static str> {
    const KEYWORDS: [(&str, &str); 7] = [
        ("id", "id"),
        ("$schema", "schema"),
        ("$ref", "$ref"),
        ("patternProperties", "patternProperties"),
        ("dependencies", "dependencies"),
        ("additionalItems", "additionalItems"),
        ("definitions", "definitions"),
    ];
    let own = KEYWORDS.iter().find(|(keyword, _)| {
        let value = schema.at(keyword);
        !is_zero(value) && !value.as_object().is_some_and(serde_json::Map::is_empty)
            || *keyword == "additionalItems" && !value.is_null()
    });
    let array = schema.at("items").as_array().is_some_and(|items| !items.is_empty());
    own.map(|(_, name)| *name)
        .or(array.then_some("items"))
        .or_else(|| children(schema).find_map(any_unsupported))
}

/// Where in the object a schema stands, as far as its rules depend on it.
#[derive(Clone, Copy)]
struct Place {
    /// In the apiVersion, kind or metadata of an object.
    meta: bool,
    no_defaults: Option<&'static str>,
}

fn walk(schema: &Value, path: &Path, root: bool, place: Place, errors: &mut Errors) {
    if !schema.is_object() {
        return;
    }
    keywords(schema, path, place, errors);
    if schema.flag("uniqueItems") {
        errors.forbidden(
            &path.at("uniqueItems"),
            "uniqueItems cannot be set to true since the runtime complexity becomes quadratic",
        );
    }
    let additional = schema.at("additionalProperties");
    if !additional.is_null() {
        let anything = additional == &Value::Bool(true);
        if schema.entries("properties").next().is_some() && !anything {
            let message = "additionalProperties and properties are mutual exclusive";
            errors.forbidden(&path.at("additionalProperties"), message);
        }
        let mut place = place;
        if place.meta {
            place.no_defaults = Some("inside additionalProperties applying to object metadata");
        }
        walk(additional, &path.at("additionalProperties"), false, place, errors);
    }
    for (name, property) in schema.entries("properties") {
        let mut place = place;
        if root || schema.flag("x-kubernetes-embedded-resource") {
            let reason = match name {
                "metadata" => "in top-level metadata",
                "kind" => "in top-level kind",
                "apiVersion" => "in top-level apiVersion",
                _ => "",
            };
            if !reason.is_empty() {
                place.meta = true;
                if root {
                    place.no_defaults = Some(reason);
                }
            }
        }
        walk(property, &path.at("properties").key(name), false, place, errors);
    }
    walk(schema.at("not"), &path.at("not"), false, place, errors);
    for keyword in ["allOf", "oneOf", "anyOf"] {
        for (i, child) in schema.items(keyword).iter().enumerate() {
            walk(child, &path.at(keyword).index(i), false, place, errors);
        }
    }
    for (name, child) in schema.entries("definitions") {
        walk(child, &path.at("definitions").key(name), false, place, errors);
    }
    walk(schema.at("items"), &path.at("items"), false, place, errors);
    for (i, child) in schema.items("items").iter().enumerate() {
        walk(child, &path.at("items").index(i), false, place, errors);
    }
    for (name, child) in schema.entries("dependencies") {
        walk(child, &path.at("dependencies").key(name), false, place, errors);
    }
    if schema.at("x-kubernetes-preserve-unknown-fields") == &Value::Bool(false) {
        let path = path.at("x-kubernetes-preserve-unknown-fields");
        errors.invalid(&path, false, "must be true or undefined");
    }
    lists::map_type(schema, path, errors);
    lists::list_type(schema, path, errors);
    rules(schema, path, errors);
}

fn keywords(schema: &Value, path: &Path, place: Place, errors: &mut Errors) {
    let kind = schema.text("type");
    if !kind.is_empty() && !TYPES.contains(&kind) {
        errors.not_supported(&path.at("type"), kind, &TYPES);
    }
    if schema.has("default")
        && let Some(reason) = place.no_defaults
    {
        errors.forbidden(&path.at("default"), &format!("must not be set {reason}"));
    }
    let non_empty = |keyword: &str| schema.entries(keyword).next().is_some();
    let forbidden = [
        ("id", !schema.text("id").is_empty()),
        ("additionalItems", schema.has("additionalItems")),
        ("patternProperties", non_empty("patternProperties")),
        ("definitions", non_empty("definitions")),
        ("dependencies", schema.has("dependencies")),
        ("$ref", schema.has("$ref")),
    ];
    for (keyword, set) in forbidden {
        if set {
            errors.forbidden(&path.at(keyword), &format!("{keyword} is not supported"));
        }
    }
    if kind == "null" {
        let message = "type cannot be set to null, use nullable as an alternative";
        errors.forbidden(&path.at("type"), message);
    }
    if !schema.items("items").is_empty() {
        errors.forbidden(&path.at("items"), "items must be a schema object and not an array");
    }
    if place.meta && schema.flag("x-kubernetes-embedded-resource") {
        let path = path.at("x-kubernetes-embedded-resource");
        errors.forbidden(&path, "must not be used inside of resource meta");
    }
}

/// The CEL rules, all but the expressions themselves.
fn rules(schema: &Value, path: &Path, errors: &mut Errors) {
    const REASONS: [&str; 4] =
        ["FieldValueDuplicate", "FieldValueForbidden", "FieldValueInvalid", "FieldValueRequired"];
    let has_newline = |text: &str| text.contains(['\n', '\r']);
    let list = schema.items("x-kubernetes-validations");
    let searchable = list.iter().any(|rule| rule.has("fieldPath")) && any_unsupported(schema).is_none();
    for (i, rule) in list.iter().enumerate() {
        let path = path.at("x-kubernetes-validations").index(i);
        let (message, given) = (rule.text("message").trim(), rule.text("message"));
        if rule.text("rule").trim().is_empty() {
            errors.required(&path.at("rule"), "rule is not specified");
        } else if !given.is_empty() && message.is_empty() {
            errors.invalid(&path.at("message"), given, "must be non-empty if specified");
        } else if has_newline(message) {
            errors.invalid(&path.at("message"), given, "must not contain line breaks");
        } else if has_newline(rule.text("rule").trim()) && message.is_empty() {
            let why = "message must be specified if rule contains line breaks";
            errors.required(&path.at("message"), why);
        }
        let expression = rule.text("messageExpression");
        if !expression.is_empty() && expression.trim().is_empty() {
            let why = "messageExpression must be non-empty if specified";
            errors.required(&path.at("messageExpression"), why);
        }
        if let Some(reason) = rule.at("reason").as_str().filter(|reason| !REASONS.contains(reason)) {
            errors.not_supported(&path.at("reason"), reason, &REASONS);
        }
        let field = rule.text("fieldPath");
        if field.is_empty() {
            continue;
        }
        let path = path.at("fieldPath");
        if field.trim().is_empty() {
            errors.invalid(&path, field, "must be non-empty if specified");
        }
        if has_newline(field) {
            errors.invalid(&path, field, "must not contain line breaks");
        }
        if searchable && field_at(field, schema, true).is_err() {
            errors.invalid(&path, field, "must be a valid path");
        }
    }
}
