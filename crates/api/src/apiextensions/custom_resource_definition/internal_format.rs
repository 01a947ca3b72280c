//! Prints versions and schemas as upstream's internal types do in error messages: with Go field names,
//! no omitted fields, in declaration order.

use serde_json::Value;

use super::PerVersion;
use crate::json::JsonExt;

/// Go field name, JSON name, and the output for an absent keyword.
#[rustfmt::skip]
pub(super) const SCHEMA_FIELDS: [(&str, &str, &str); 43] = [
    ("ID", "id", "\"\""), ("Schema", "$schema", "\"\""), ("Ref", "$ref", "null"),
    ("Description", "description", "\"\""), ("Type", "type", "\"\""), ("Nullable", "nullable", "false"),
    ("Format", "format", "\"\""), ("Title", "title", "\"\""), ("Default", "default", "null"),
    ("Maximum", "maximum", "null"), ("ExclusiveMaximum", "exclusiveMaximum", "false"),
    ("Minimum", "minimum", "null"), ("ExclusiveMinimum", "exclusiveMinimum", "false"),
    ("MaxLength", "maxLength", "null"), ("MinLength", "minLength", "null"), ("Pattern", "pattern", "\"\""),
    ("MaxItems", "maxItems", "null"), ("MinItems", "minItems", "null"),
    ("UniqueItems", "uniqueItems", "false"), ("MultipleOf", "multipleOf", "null"), ("Enum", "enum", "null"),
    ("MaxProperties", "maxProperties", "null"), ("MinProperties", "minProperties", "null"),
    ("Required", "required", "null"), ("Items", "items", "null"), ("AllOf", "allOf", "null"),
    ("OneOf", "oneOf", "null"), ("AnyOf", "anyOf", "null"), ("Not", "not", "null"),
    ("Properties", "properties", "null"), ("AdditionalProperties", "additionalProperties", "null"),
    ("PatternProperties", "patternProperties", "null"), ("Dependencies", "dependencies", "null"),
    ("AdditionalItems", "additionalItems", "null"), ("Definitions", "definitions", "null"),
    ("ExternalDocs", "externalDocs", "null"), ("Example", "example", "null"),
    ("XPreserveUnknownFields", "x-kubernetes-preserve-unknown-fields", "null"),
    ("XEmbeddedResource", "x-kubernetes-embedded-resource", "false"),
    ("XIntOrString", "x-kubernetes-int-or-string", "false"),
    ("XListMapKeys", "x-kubernetes-list-map-keys", "null"), ("XListType", "x-kubernetes-list-type", "null"),
    ("XMapType", "x-kubernetes-map-type", "null"),
];

pub(super) fn format_schema(schema: &Value) -> String {
    let mut fields: Vec<String> = SCHEMA_FIELDS
        .iter()
        .map(|(name, keyword, absent)| {
            let value = schema.at(keyword);
            let rendered = match (*keyword, value) {
                (_, Value::Null) => (*absent).to_owned(),
                ("items", Value::Object(_)) => {
                    format!("{{\"Schema\":{},\"JSONSchemas\":null}}", self::format_schema(value))
                }
                ("items", _) => format!("{{\"Schema\":null,\"JSONSchemas\":{}}}", format_list(value)),
                ("additionalProperties" | "additionalItems", Value::Object(_)) => {
                    format!("{{\"Allows\":true,\"Schema\":{}}}", self::format_schema(value))
                }
                ("additionalProperties" | "additionalItems", _) => {
                    format!("{{\"Allows\":{value},\"Schema\":null}}")
                }
                ("allOf" | "anyOf" | "oneOf", _) => format_list(value),
                ("not", _) => self::format_schema(value),
                ("properties" | "patternProperties" | "definitions", Value::Object(map)) => {
                    let entries: Vec<String> = map
                        .iter()
                        .map(|(name, child)| {
                            format!("{}:{}", Value::from(name.as_str()), self::format_schema(child))
                        })
                        .collect();
                    format!("{{{}}}", entries.join(","))
                }
                ("externalDocs", _) => format!(
                    "{{\"Description\":{},\"URL\":{}}}",
                    Value::from(value.text("description")),
                    Value::from(value.text("url"))
                ),
                _ => value.to_string(),
            };
            format!("\"{name}\":{rendered}")
        })
        .collect();
    fields.push(format!("\"XValidations\":{}", format_rules(schema.at("x-kubernetes-validations"))));
    format!("{{{}}}", fields.join(","))
}

fn format_list(schemas: &Value) -> String {
    let rendered: Vec<String> = schemas.as_array().into_iter().flatten().map(format_schema).collect();
    format!("[{}]", rendered.join(","))
}

/// Formats an `x-kubernetes-validations` rule.
pub(super) fn format_rule(rule: &Value) -> String {
    format!(
        "{{\"Rule\":{},\"Message\":{},\"MessageExpression\":{},\"Reason\":{},\"FieldPath\":{},\"OptionalOldSelf\":{}}}",
        Value::from(rule.text("rule")),
        Value::from(rule.text("message")),
        Value::from(rule.text("messageExpression")),
        rule.at("reason"),
        Value::from(rule.text("fieldPath")),
        rule.at("optionalOldSelf"),
    )
}

fn format_rules(rules: &Value) -> String {
    let Some(rules) = rules.as_array() else { return "null".to_owned() };
    format!("[{}]", rules.iter().map(format_rule).collect::<Vec<_>>().join(","))
}

/// Formats `spec.versions` without the fields that moved to the top level.
pub(super) fn format_versions(versions: &[Value]) -> String {
    if versions.is_empty() {
        return "null".to_owned();
    }
    let own = |version: &Value, field: &str| {
        PerVersion::from_versions(versions, field).version_value(version, field).clone()
    };
    let one = |version: &Value| {
        let validation = own(version, "schema");
        let rendered = if validation.is_null() {
            "null".to_owned()
        } else if validation.has("openAPIV3Schema") {
            format!("{{\"OpenAPIV3Schema\":{}}}", format_schema(validation.at("openAPIV3Schema")))
        } else {
            "{\"OpenAPIV3Schema\":null}".to_owned()
        };
        format!(
            "{{\"Name\":{},\"Served\":{},\"Storage\":{},\"Deprecated\":{},\"DeprecationWarning\":{},\"Schema\":{rendered},\"Subresources\":{},\"AdditionalPrinterColumns\":{},\"SelectableFields\":{}}}",
            Value::from(version.text("name")),
            version.flag("served"),
            version.flag("storage"),
            version.flag("deprecated"),
            version.at("deprecationWarning"),
            format_subresources(&own(version, "subresources")),
            format_columns(&own(version, "additionalPrinterColumns")),
            format_selectable_fields(&own(version, "selectableFields")),
        )
    };
    format!("[{}]", versions.iter().map(one).collect::<Vec<_>>().join(","))
}

fn format_subresources(value: &Value) -> String {
    if value.is_null() {
        return "null".to_owned();
    }
    let scale = value.at("scale");
    let scale = if scale.is_null() {
        "null".to_owned()
    } else {
        format!(
            "{{\"SpecReplicasPath\":{},\"StatusReplicasPath\":{},\"LabelSelectorPath\":{}}}",
            Value::from(scale.text("specReplicasPath")),
            Value::from(scale.text("statusReplicasPath")),
            scale.at("labelSelectorPath"),
        )
    };
    format!("{{\"Status\":{},\"Scale\":{scale}}}", if value.has("status") { "{}" } else { "null" })
}

fn format_columns(value: &Value) -> String {
    let Some(columns) = value.as_array() else { return "null".to_owned() };
    let one = |column: &Value| {
        format!(
            "{{\"Name\":{},\"Type\":{},\"Format\":{},\"Description\":{},\"Priority\":{},\"JSONPath\":{}}}",
            Value::from(column.text("name")),
            Value::from(column.text("type")),
            Value::from(column.text("format")),
            Value::from(column.text("description")),
            column.int("priority").unwrap_or(0),
            Value::from(column.text("jsonPath")),
        )
    };
    format!("[{}]", columns.iter().map(one).collect::<Vec<_>>().join(","))
}

fn format_selectable_fields(value: &Value) -> String {
    let Some(fields) = value.as_array() else { return "null".to_owned() };
    let one = |field: &Value| format!("{{\"JSONPath\":{}}}", Value::from(field.text("jsonPath")));
    format!("[{}]", fields.iter().map(one).collect::<Vec<_>>().join(","))
}
