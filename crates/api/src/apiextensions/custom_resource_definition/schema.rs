//! Validates the OpenAPI schema of a version: which keywords and values are allowed.
//!
//! Schemas are processed as JSON. The JSON parser limits their depth, so recursion is safe.

use serde_json::Value;

use super::super::values;
use super::cel_rules::validate_expressions;
use super::field_path::field_at;
use super::{internal_format, lists, structural};
use crate::field::{ErrorList, ErrorType, Path};
use crate::json::JsonExt;

const TYPES: [&str; 6] = ["array", "boolean", "integer", "number", "object", "string"];

/// Keywords allowed at the root of the schema with a status subresource. Others would be skipped when
/// only `status` is validated.
const ROOT_FIELDS: [(&str, &str); 22] = [
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

/// Validates `schema` of a version, or the top-level `validation` that all versions share.
pub(super) fn validate_version_schema(
    validation: &Value,
    has_status: bool,
    path: &Path,
    errors: &mut ErrorList,
) {
    let schema = validation.at("openAPIV3Schema");
    if schema.is_null() {
        return;
    }
    let before = errors.0.len();
    if has_status {
        validate_root_fields(schema, path, errors);
    }
    let path = path.child("openAPIV3Schema");
    if schema.flag("nullable") {
        errors.forbidden(&path.child("nullable"), "nullable cannot be true at the root");
    }
    let unsupported = find_unsupported(schema);
    if unsupported.is_none() {
        let before = errors.0.len();
        structural::validate_structural(schema, &path, errors);
        if errors.0.len() == before {
            validate_defaults(schema, &path, errors);
        }
    }
    validate_schema(
        schema,
        &path,
        true,
        SchemaContext { is_metadata: false, default_forbidden: None },
        errors,
    );
    if let Some(keyword) = unsupported
        && errors.0.len() == before
    {
        errors.invalid(&path, "", &format!("OpenAPIV3Schema '{keyword}' is not supported"));
    }
    // The expressions of an invalid schema cannot be type checked.
    if errors.0.len() == before {
        validate_expressions(schema, &path, errors);
    }
}

/// Validates default values. `validate_schema` reports defaults in metadata, which are forbidden.
fn validate_defaults(schema: &Value, path: &Path, errors: &mut ErrorList) {
    let default = schema.at("default");
    if !default.is_null() {
        let path = path.child("default");
        if !values::prune(schema, &mut default.clone(), false).is_empty() {
            errors.invalid(&path, default.clone(), "must not have unknown fields");
        }
        values::validate_value(schema, default, &path, &values::Patterns::from_schema(schema), errors);
    }
    if schema.at("items").is_object() {
        validate_defaults(schema.at("items"), &path.child("items"), errors);
    }
    for (name, property) in schema.entries("properties") {
        validate_defaults(property, &path.child("properties").key(name), errors);
    }
}

fn validate_root_fields(schema: &Value, path: &Path, errors: &mut ErrorList) {
    let set = |keyword: &str| !is_zero(schema.at(keyword));
    if set("type") && schema.text("type") != "object" {
        errors.invalid(
            &path.child("openAPIV3Schema.type"),
            schema.text("type"),
            "only \"object\" is allowed as the type at the root of the schema if the status subresource is enabled",
        );
    } else if internal_format::SCHEMA_FIELDS
        .iter()
        .any(|(_, keyword, _)| set(keyword) && !ROOT_FIELDS.iter().any(|(_, allowed)| allowed == keyword))
    {
        let names: Vec<&str> = ROOT_FIELDS.iter().map(|(name, _)| *name).collect();
        let message = format!(
            "Invalid value: {}: only [{}] fields are allowed at the root of the schema if the status subresource is enabled",
            internal_format::format_schema(schema),
            names.join(" ")
        );
        errors.push(ErrorType::Invalid, &path.child("openAPIV3Schema"), message);
    }
}

/// Whether a keyword has its zero value, like an absent one.
pub(super) fn is_zero(value: &Value) -> bool {
    match value {
        Value::Null => true,
        Value::Bool(flag) => !flag,
        Value::String(text) => text.is_empty(),
        Value::Array(items) => items.is_empty(),
        Value::Object(_) | Value::Number(_) => false,
    }
}

/// The direct subschemas of a schema.
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

/// Whether `test` is true for a schema or any of its subschemas.
pub(super) fn any_schema(schema: &Value, test: impl Fn(&Value) -> bool + Copy) -> bool {
    test(schema) || children(schema).any(|child| any_schema(child, test))
}

fn find_unsupported(schema: &Value) -> Option<&'static str> {
    const UNSUPPORTED_FIELDS: [(&str, &str); 7] = [
        ("id", "id"),
        ("$schema", "schema"),
        ("$ref", "$ref"),
        ("patternProperties", "patternProperties"),
        ("dependencies", "dependencies"),
        ("additionalItems", "additionalItems"),
        ("definitions", "definitions"),
    ];
    let own = UNSUPPORTED_FIELDS.iter().find(|(keyword, _)| {
        let value = schema.at(keyword);
        !is_zero(value) && !value.as_object().is_some_and(serde_json::Map::is_empty)
            || *keyword == "additionalItems" && !value.is_null()
    });
    let array = schema.at("items").as_array().is_some_and(|items| !items.is_empty());
    own.map(|(_, name)| *name)
        .or(array.then_some("items"))
        .or_else(|| children(schema).find_map(find_unsupported))
}

/// The properties of the current position in the schema that validation depends on.
#[derive(Clone, Copy)]
struct SchemaContext {
    /// Whether this is the `apiVersion`, `kind` or `metadata` of an object.
    is_metadata: bool,
    default_forbidden: Option<&'static str>,
}

fn validate_schema(schema: &Value, path: &Path, root: bool, context: SchemaContext, errors: &mut ErrorList) {
    if !schema.is_object() {
        return;
    }
    validate_fields(schema, path, context, errors);
    if schema.flag("uniqueItems") {
        errors.forbidden(
            &path.child("uniqueItems"),
            "uniqueItems cannot be set to true since the runtime complexity becomes quadratic",
        );
    }
    let additional = schema.at("additionalProperties");
    if !additional.is_null() {
        let allows_any = additional == &Value::Bool(true);
        if schema.entries("properties").next().is_some() && !allows_any {
            let message = "additionalProperties and properties are mutual exclusive";
            errors.forbidden(&path.child("additionalProperties"), message);
        }
        let mut context = context;
        if context.is_metadata {
            context.default_forbidden = Some("inside additionalProperties applying to object metadata");
        }
        validate_schema(additional, &path.child("additionalProperties"), false, context, errors);
    }
    for (name, property) in schema.entries("properties") {
        let mut context = context;
        if root || schema.flag("x-kubernetes-embedded-resource") {
            let reason = match name {
                "metadata" => "in top-level metadata",
                "kind" => "in top-level kind",
                "apiVersion" => "in top-level apiVersion",
                _ => "",
            };
            if !reason.is_empty() {
                context.is_metadata = true;
                if root {
                    context.default_forbidden = Some(reason);
                }
            }
        }
        validate_schema(property, &path.child("properties").key(name), false, context, errors);
    }
    validate_schema(schema.at("not"), &path.child("not"), false, context, errors);
    for keyword in ["allOf", "oneOf", "anyOf"] {
        for (i, child) in schema.items(keyword).iter().enumerate() {
            validate_schema(child, &path.child(keyword).index(i), false, context, errors);
        }
    }
    for (name, child) in schema.entries("definitions") {
        validate_schema(child, &path.child("definitions").key(name), false, context, errors);
    }
    validate_schema(schema.at("items"), &path.child("items"), false, context, errors);
    for (i, child) in schema.items("items").iter().enumerate() {
        validate_schema(child, &path.child("items").index(i), false, context, errors);
    }
    for (name, child) in schema.entries("dependencies") {
        validate_schema(child, &path.child("dependencies").key(name), false, context, errors);
    }
    if schema.at("x-kubernetes-preserve-unknown-fields") == &Value::Bool(false) {
        let path = path.child("x-kubernetes-preserve-unknown-fields");
        errors.invalid(&path, false, "must be true or undefined");
    }
    lists::validate_map_type(schema, path, errors);
    lists::validate_list_type(schema, path, errors);
    validate_rules(schema, path, errors);
}

fn validate_fields(schema: &Value, path: &Path, context: SchemaContext, errors: &mut ErrorList) {
    let kind = schema.text("type");
    if !kind.is_empty() && !TYPES.contains(&kind) {
        errors.not_supported(&path.child("type"), kind, &TYPES);
    }
    if schema.has("default")
        && let Some(reason) = context.default_forbidden
    {
        errors.forbidden(&path.child("default"), &format!("must not be set {reason}"));
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
            errors.forbidden(&path.child(keyword), &format!("{keyword} is not supported"));
        }
    }
    if kind == "null" {
        let message = "type cannot be set to null, use nullable as an alternative";
        errors.forbidden(&path.child("type"), message);
    }
    if !schema.items("items").is_empty() {
        errors.forbidden(&path.child("items"), "items must be a schema object and not an array");
    }
    if context.is_metadata && schema.flag("x-kubernetes-embedded-resource") {
        let path = path.child("x-kubernetes-embedded-resource");
        errors.forbidden(&path, "must not be used inside of resource meta");
    }
}

/// Validates the CEL rules except their expressions.
fn validate_rules(schema: &Value, path: &Path, errors: &mut ErrorList) {
    const REASONS: [&str; 4] =
        ["FieldValueDuplicate", "FieldValueForbidden", "FieldValueInvalid", "FieldValueRequired"];
    let has_newline = |text: &str| text.contains(['\n', '\r']);
    let list = schema.items("x-kubernetes-validations");
    let field_path_supported =
        list.iter().any(|rule| rule.has("fieldPath")) && find_unsupported(schema).is_none();
    for (i, rule) in list.iter().enumerate() {
        let path = path.child("x-kubernetes-validations").index(i);
        let (message, given) = (rule.text("message").trim(), rule.text("message"));
        if rule.text("rule").trim().is_empty() {
            errors.required(&path.child("rule"), "rule is not specified");
        } else if !given.is_empty() && message.is_empty() {
            errors.invalid(&path.child("message"), given, "must be non-empty if specified");
        } else if has_newline(message) {
            errors.invalid(&path.child("message"), given, "must not contain line breaks");
        } else if has_newline(rule.text("rule").trim()) && message.is_empty() {
            let detail = "message must be specified if rule contains line breaks";
            errors.required(&path.child("message"), detail);
        }
        let expression = rule.text("messageExpression");
        if !expression.is_empty() && expression.trim().is_empty() {
            let detail = "messageExpression must be non-empty if specified";
            errors.required(&path.child("messageExpression"), detail);
        }
        if let Some(reason) = rule.at("reason").as_str().filter(|reason| !REASONS.contains(reason)) {
            errors.not_supported(&path.child("reason"), reason, &REASONS);
        }
        let field = rule.text("fieldPath");
        if field.is_empty() {
            continue;
        }
        let path = path.child("fieldPath");
        if field.trim().is_empty() {
            errors.invalid(&path, field, "must be non-empty if specified");
        }
        if has_newline(field) {
            errors.invalid(&path, field, "must not contain line breaks");
        }
        if field_path_supported && field_at(field, schema, true).is_err() {
            errors.invalid(&path, field, "must be a valid path");
        }
    }
}
