//! Encodes the OpenAPI v2 document as protobuf with the messages of the gnostic project, as
//! client-go's `OpenAPISchema` requests it.
//!
//! The fields of a message are listed as JSON name and field number; encoding walks the JSON
//! document.

use schema::protobuf::Writer;
use serde_json::{Map, Value};

type Object = Map<String, Value>;

/// The field numbers of strings, lists of strings and booleans, by JSON name.
type FieldNumbers = &'static [(&'static str, u32)];

const INFO: FieldNumbers = &[("title", 1), ("version", 2)];
const OPERATION: FieldNumbers = &[
    ("tags", 1),
    ("description", 3),
    ("operationId", 5),
    ("produces", 6),
    ("consumes", 7),
    ("schemes", 10),
    ("deprecated", 11),
];
const BODY: FieldNumbers = &[("description", 1), ("name", 2), ("in", 3), ("required", 4)];
const QUERY: FieldNumbers = &[
    ("required", 1),
    ("in", 2),
    ("description", 3),
    ("name", 4),
    ("type", 6),
    ("format", 7),
    ("uniqueItems", 20),
];
const PATH: FieldNumbers = &[
    ("required", 1),
    ("in", 2),
    ("description", 3),
    ("name", 4),
    ("type", 5),
    ("format", 6),
    ("uniqueItems", 19),
];
const SCHEMA: FieldNumbers =
    &[("$ref", 1), ("format", 2), ("title", 3), ("description", 4), ("required", 19)];
const API_KEY: FieldNumbers = &[("type", 1), ("name", 2), ("in", 3), ("description", 4)];
const METHODS: FieldNumbers =
    &[("get", 2), ("put", 3), ("post", 4), ("delete", 5), ("options", 6), ("head", 7), ("patch", 8)];

pub fn document(document: &Value) -> Vec<u8> {
    let mut writer = Writer::default();
    let Some(document) = document.as_object() else { return writer.bytes };
    write_fields(document, &[("swagger", 1)], &mut writer);
    write_nested(document, "info", |info| writer.message(2, |writer| write_fields(info, INFO, writer)));
    write_named_map(document, "paths", 8, 2, path, &mut writer);
    write_named_map(document, "definitions", 9, 1, schema, &mut writer);
    write_named_map(document, "parameters", 10, 1, parameter, &mut writer);
    for requirement in document.get("security").and_then(Value::as_array).into_iter().flatten() {
        let Some(requirement) = requirement.as_object() else { continue };
        writer.message(12, |writer| {
            for name in requirement.keys() {
                writer.message(1, |writer| {
                    writer.bytes(1, name.as_bytes());
                    writer.message(2, |_| {});
                });
            }
        });
    }
    let api_key = |security: &Object, writer: &mut Writer| {
        writer.message(2, |writer| write_fields(security, API_KEY, writer));
    };
    write_named_map(document, "securityDefinitions", 13, 1, api_key, &mut writer);
    writer.bytes
}

fn path(item: &Object, writer: &mut Writer) {
    for (method, number) in METHODS {
        write_nested(item, method, |operation| {
            writer.message(*number, |writer| self::operation(operation, writer))
        });
    }
    parameters(item, 9, writer);
}

fn operation(operation: &Object, writer: &mut Writer) {
    write_fields(operation, OPERATION, writer);
    parameters(operation, 8, writer);
    let response = |response: &Object, writer: &mut Writer| {
        writer.message(1, |writer| {
            write_fields(response, &[("description", 1)], writer);
            write_nested(response, "schema", |inner| {
                writer.message(2, |writer| writer.message(1, |writer| schema(inner, writer)));
            });
        });
    };
    write_named_map(operation, "responses", 9, 1, response, writer);
    extensions(operation, 13, writer);
}

fn parameters(owner: &Object, number: u32, writer: &mut Writer) {
    for item in owner.get("parameters").and_then(Value::as_array).into_iter().flatten() {
        let Some(item) = item.as_object() else { continue };
        writer.message(number, |writer| match item.contains_key("$ref") {
            true => writer.message(2, |writer| write_fields(item, &[("$ref", 1)], writer)),
            false => writer.message(1, |writer| parameter(item, writer)),
        });
    }
}

fn parameter(parameter: &Object, writer: &mut Writer) {
    match parameter.get("in").and_then(Value::as_str) {
        Some("body") => writer.message(1, |writer| {
            write_fields(parameter, BODY, writer);
            write_nested(parameter, "schema", |inner| writer.message(5, |writer| schema(inner, writer)));
        }),
        Some("path") => {
            writer.message(2, |writer| writer.message(4, |writer| write_fields(parameter, PATH, writer)));
        }
        _ => writer.message(2, |writer| writer.message(3, |writer| write_fields(parameter, QUERY, writer))),
    }
}

fn schema(schema: &Object, writer: &mut Writer) {
    write_fields(schema, SCHEMA, writer);
    write_nested(schema, "additionalProperties", |inner| {
        writer.message(21, |writer| writer.message(1, |writer| self::schema(inner, writer)));
    });
    if let Some(kind) = schema.get("type").and_then(Value::as_str) {
        writer.message(22, |writer| writer.bytes(1, kind.as_bytes()));
    }
    write_nested(schema, "items", |inner| {
        writer.message(23, |writer| writer.message(1, |writer| self::schema(inner, writer)));
    });
    write_named_map(schema, "properties", 25, 1, self::schema, writer);
    extensions(schema, 31, writer);
}

/// Extensions are encoded as YAML, of which JSON is a subset.
fn extensions(owner: &Object, number: u32, writer: &mut Writer) {
    for (name, value) in owner.iter().filter(|(name, _)| name.starts_with("x-")) {
        writer.message(number, |writer| {
            writer.bytes(1, name.as_bytes());
            writer.message(2, |writer| writer.bytes(2, format!("{value}\n").as_bytes()));
        });
    }
}

fn write_nested(owner: &Object, field: &str, write: impl FnOnce(&Object)) {
    if let Some(Value::Object(inner)) = owner.get(field) {
        write(inner);
    }
}

/// Encodes a map as a message (field `number`) of named values (field `entry`).
fn write_named_map(
    owner: &Object,
    field: &str,
    number: u32,
    entry: u32,
    write: impl Fn(&Object, &mut Writer),
    writer: &mut Writer,
) {
    let Some(Value::Object(map)) = owner.get(field) else { return };
    writer.message(number, |writer| {
        for (name, value) in map {
            let Some(value) = value.as_object() else { continue };
            writer.message(entry, |writer| {
                writer.bytes(1, name.as_bytes());
                writer.message(2, |writer| write(value, writer));
            });
        }
    });
}

fn write_fields(owner: &Object, fields: FieldNumbers, writer: &mut Writer) {
    for (name, number) in fields {
        match owner.get(*name) {
            Some(Value::String(text)) => writer.bytes(*number, text.as_bytes()),
            Some(Value::Bool(true)) => writer.varint(*number, 1),
            Some(Value::Array(list)) => {
                list.iter().filter_map(Value::as_str).for_each(|text| writer.bytes(*number, text.as_bytes()));
            }
            _ => {}
        }
    }
}
