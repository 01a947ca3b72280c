//! Validates a version except its schema: subresources, printer columns, selectable fields and deprecation.

use std::collections::HashSet;

use serde_json::Value;

use super::field_path::field_at;
use crate::field::{ErrorList, Path};
use crate::json::JsonExt;

const MAX_SELECTABLE_FIELDS: usize = 8;
const COLUMN_TYPES: [&str; 5] = ["boolean", "date", "integer", "number", "string"];
const COLUMN_FORMATS: [&str; 8] =
    ["byte", "date", "date-time", "double", "float", "int32", "int64", "password"];

pub(super) fn validate_deprecation(version: &Value, path: &Path, errors: &mut ErrorList) {
    let Some(warning) = version.at("deprecationWarning").as_str() else { return };
    if !version.flag("deprecated") {
        errors.invalid(path, warning, "can only be set for deprecated versions");
        return;
    }
    if warning.len() > 256 {
        errors.invalid(path, warning, "must be <= 256 characters long");
    }
    if warning.is_empty() {
        errors.invalid(path, warning, "must not be an empty string");
    }
    if let Some((i, _)) = warning.char_indices().find(|(_, c)| !is_printable(*c)) {
        let message = format!(
            "must only contain printable UTF-8 characters; non-printable character found at index {i}"
        );
        errors.invalid(path, warning, &message);
    }
}

/// Approximates Go's `unicode.IsPrint`: letters, marks, numbers, punctuation, symbols and the ASCII space.
fn is_printable(c: char) -> bool {
    !c.is_control() && (c == ' ' || !c.is_whitespace()) && !matches!(c, '\u{200b}'..='\u{200f}' | '\u{feff}')
}

pub(super) fn validate_scale(subresources: &Value, path: &Path, errors: &mut ErrorList) {
    let scale = subresources.at("scale");
    if scale.is_null() {
        return;
    }
    let mut check = |field: &str, under: &[&str], whose: &str, required: bool| {
        let (value, path) = (scale.text(field), path.child("scale").child(field));
        if value.is_empty() {
            if required {
                errors.required(&path, "");
            }
        } else if !value.starts_with('.') {
            errors.invalid(&path, value, "must be a simple json path starting with .");
        } else if !under.iter().any(|prefix| value.starts_with(prefix)) {
            errors.invalid(&path, value, &format!("should be a json path under {whose}"));
        }
    };
    check("specReplicasPath", &[".spec."], ".spec", true);
    check("statusReplicasPath", &[".status."], ".status", true);
    check("labelSelectorPath", &[".spec.", ".status."], "either .spec or .status", false);
}

pub(super) fn validate_printer_columns(columns: &Value, path: &Path, errors: &mut ErrorList) {
    for (i, column) in columns.as_array().into_iter().flatten().enumerate() {
        let path = path.index(i);
        if column.text("name").is_empty() {
            errors.required(&path.child("name"), "");
        }
        let kind = column.text("type");
        let known = format!("must be one of {}", COLUMN_TYPES.join(","));
        if kind.is_empty() {
            errors.required(&path.child("type"), &known);
        } else if !COLUMN_TYPES.contains(&kind) {
            errors.invalid(&path.child("type"), kind, &known);
        }
        let format = column.text("format");
        if !format.is_empty() && !COLUMN_FORMATS.contains(&format) {
            let known = format!("must be one of {}", COLUMN_FORMATS.join(","));
            errors.invalid(&path.child("format"), format, &known);
        }
        let json_path = column.text("jsonPath");
        if json_path.is_empty() {
            errors.required(&path.child("JSONPath"), "");
        } else if !json_path.starts_with('.') {
            errors.invalid(&path.child("JSONPath"), json_path, "must be a simple json path starting with .");
        }
    }
}

pub(super) fn validate_selectable_fields(
    fields: &Value,
    validation: &Value,
    path: &Path,
    errors: &mut ErrorList,
) {
    let fields = fields.as_array().map_or(&[][..], Vec::as_slice);
    if fields.is_empty() || !validation.has("openAPIV3Schema") {
        // A missing schema has been reported already.
        return;
    }
    let mut seen = HashSet::new();
    for (i, field) in fields.iter().enumerate() {
        let (json_path, path) = (field.text("jsonPath"), path.index(i).child("jsonPath"));
        if json_path.is_empty() {
            errors.required(&path, "");
            continue;
        }
        let found = match field_at(json_path, validation.at("openAPIV3Schema"), false) {
            Ok(found) => found,
            Err(problem) => {
                errors.invalid(&path, json_path, &format!("is an invalid path: {problem}"));
                continue;
            }
        };
        if json_path == ".metadata" || json_path.starts_with(".metadata.") {
            errors.invalid(&path, json_path, "must not point to fields in metadata");
        }
        if !matches!(found.text("type"), "string" | "boolean" | "integer") {
            errors.invalid(
                &path,
                json_path,
                "must point to a field of type string, boolean or integer. Enum string fields and strings with formats are allowed.",
            );
        }
        if !seen.insert(json_path) {
            errors.duplicate(&path, json_path);
        }
    }
    if seen.len() > MAX_SELECTABLE_FIELDS {
        errors.too_many(path, seen.len(), MAX_SELECTABLE_FIELDS);
    }
}
