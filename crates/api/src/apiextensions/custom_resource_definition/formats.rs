//! The formats of strings and numbers that something checks.

use serde_json::Value;

use super::Shared;
use super::schema::children;
use crate::json::Json;

/// Formats in the definition's schemas that nothing checks.
pub(super) fn unrecognized_formats(crd: &Value) -> Vec<String> {
    let mut found = Vec::new();
    let versions = crd.at("spec").items("versions");
    let schemas: Vec<&Value> = match Shared::of(versions, "schema") {
        Shared::ByAll(shared) => vec![shared.at("openAPIV3Schema")],
        Shared::Apart => versions.iter().map(|version| version.path("schema.openAPIV3Schema")).collect(),
    };
    for schema in schemas {
        collect_formats(schema, &mut found);
    }
    found
}

fn collect_formats(schema: &Value, found: &mut Vec<String>) {
    let format = schema.text("format");
    let known = match schema.text("type") {
        "" | "string" => STRING_FORMATS.contains(&format.replace('-', "").as_str()),
        "integer" => matches!(format, "int32" | "int64"),
        "number" => matches!(format, "float" | "double"),
        _ => false,
    };
    if !format.is_empty() && !known {
        found.push(format.to_owned());
    }
    for child in children(schema) {
        collect_formats(child, found);
    }
}

const STRING_FORMATS: [&str; 26] = [
    "bsonobjectid",
    "uri",
    "email",
    "hostname",
    "ipv4",
    "ipv6",
    "cidr",
    "mac",
    "uuid",
    "uuid3",
    "uuid4",
    "uuid5",
    "isbn",
    "isbn10",
    "isbn13",
    "creditcard",
    "ssn",
    "hexcolor",
    "rgbcolor",
    "byte",
    "password",
    "date",
    "duration",
    "datetime",
    "k8sshortname",
    "k8slongname",
];
