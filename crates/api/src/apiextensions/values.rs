//! Custom resource values: validation against their schema with upstream's messages, pruning and defaulting.
//!
//! Schemas are processed as JSON. CEL rules are in `custom::validation_rules`.

mod embedded;
mod formats;
mod lists;
mod pattern;
mod prune;

use serde_json::Value;

use crate::field::{ErrorList, Path};
use crate::json::JsonExt;

pub use embedded::validate_embedded;
pub use lists::{find_old_item, validate_lists};
pub use pattern::{Patterns, compile as compile_pattern};
pub use prune::{coerce_embedded, prune, remove_null_fields, set_defaults};

pub(super) use formats::is_known as is_known_format;

/// Validates a value at `path`. The JSON parser limits the depth, so recursion is safe.
pub fn validate_value(
    schema: &Value,
    value: &Value,
    path: &Path,
    patterns: &Patterns,
    errors: &mut ErrorList,
) {
    ValueValidator { base: path, patterns, errors }.check_value(schema, value, None, "");
}

/// Validates an update with ratcheting: errors in parts that are equal to `old` are ignored.
pub fn validate_value_update(
    schema: &Value,
    value: &Value,
    old: &Value,
    path: &Path,
    patterns: &Patterns,
    errors: &mut ErrorList,
) {
    ValueValidator { base: path, patterns, errors }.check_value(schema, value, Some(old), "");
}

struct ValueValidator<'a> {
    base: &'a Path,
    patterns: &'a Patterns,
    errors: &'a mut ErrorList,
}

impl ValueValidator<'_> {
    /// `name` is the path of the value relative to the base, such as `spec.ports[0]`.
    fn check_value(&mut self, schema: &Value, value: &Value, old: Option<&Value>, name: &str) {
        let before = self.errors.0.len();
        self.check_type(schema, value, name);
        if !value.is_null() {
            self.check_any_one_all_of(schema, value, old, name);
        }
        match value {
            Value::String(text) => self.check_string(schema, text, name),
            Value::Number(_) => self.check_number(schema, value, name),
            Value::Array(items) => self.check_items(schema, items, old, name),
            _ => {}
        }
        self.check_enum(schema, value, name);
        if value.is_object() {
            self.check_properties(schema, value, old, name);
        }
        if self.errors.0.len() > before && old == Some(value) {
            self.errors.0.truncate(before);
        }
    }

    fn at(&self, name: &str) -> Path {
        match name.trim_start_matches('.') {
            "" => self.base.clone(),
            name => self.base.child(name),
        }
    }

    fn invalid(&mut self, name: &str, value: impl Into<Value>, words: &str) {
        let path = self.at(name);
        self.errors.invalid(&path, value, &format!("{name} in body should {words}"));
    }

    fn check_type(&mut self, schema: &Value, value: &Value, name: &str) {
        let int_or_string = schema.flag("x-kubernetes-int-or-string");
        let expected = if int_or_string { "integer,string" } else { schema.text("type") };
        let format = formats::known_format(schema);
        if expected.is_empty() && format.is_empty()
            || value.is_null() && (expected.is_empty() || schema.flag("nullable"))
        {
            return;
        }
        let kind = json_type(value);
        if !format.is_empty()
            && matches!(value, Value::String(_) | Value::Array(_))
            && !matches!(expected, "integer" | "number")
        {
            // The format check decides instead.
            return;
        }
        let is_integer = value.as_f64().is_some_and(|number| number.fract() == 0.0);
        let fits = expected.split(',').any(|expected| {
            expected == kind
                || expected == "number" && kind == "integer"
                || expected == "integer" && is_integer
        });
        if !fits {
            let path = self.at(name);
            let (expected, kind) = match value {
                Value::Number(number) if !format.is_empty() => {
                    (format, if number.is_f64() { "float64" } else { "int64" })
                }
                Value::Bool(_) | Value::Object(_) if !format.is_empty() => (format, ""),
                _ => (expected, kind),
            };
            let message = format!("{name} in body must be of type {expected}: \"{kind}\"");
            self.errors.type_invalid(&path, kind, &message);
        }
    }

    /// The errors of a value if it had this schema. For junctors.
    fn errors_for_schema(&self, schema: &Value, value: &Value, old: Option<&Value>, name: &str) -> ErrorList {
        let mut errors = ErrorList::default();
        ValueValidator { base: self.base, patterns: self.patterns, errors: &mut errors }
            .check_value(schema, value, old, name);
        errors
    }

    fn check_any_one_all_of(&mut self, schema: &Value, value: &Value, old: Option<&Value>, name: &str) {
        let rendered = Value::from(name);
        let results = |keyword: &str| -> Vec<ErrorList> {
            schema
                .items(keyword)
                .iter()
                .map(|inner| self.errors_for_schema(inner, value, old, name))
                .collect()
        };
        let (any, one, all) = (results("anyOf"), results("oneOf"), results("allOf"));
        let failed = schema.at("not").is_object()
            && self.errors_for_schema(schema.at("not"), value, old, name).is_empty();
        let mut report = |words: String| self.errors.invalid(self.base, "", &words);
        let best_match = |results: Vec<ErrorList>| results.into_iter().min_by_key(|errors| errors.0.len());
        let mut found = Vec::new();
        if !any.is_empty() && !any.iter().any(ErrorList::is_empty) {
            report(format!("{rendered} must validate at least one schema (anyOf)"));
            found.extend(best_match(any));
        }
        let valid = one.iter().filter(|errors| errors.is_empty()).count();
        if !one.is_empty() && valid != 1 {
            let count = match valid {
                0 => "Found none valid".to_owned(),
                _ => format!("Found {valid} valid alternatives"),
            };
            report(format!("{rendered} must validate one and only one schema (oneOf). {count}"));
            if valid == 0 {
                found.extend(best_match(one));
            }
        }
        let valid = all.iter().filter(|errors| errors.is_empty()).count();
        if valid != all.len() {
            let none = if valid == 0 { ". None validated" } else { "" };
            report(format!("{rendered} must validate all the schemas (allOf){none}"));
            found.extend(all);
        }
        if failed {
            report(format!("{rendered} must not validate the schema (not)"));
        }
        found.into_iter().for_each(|mut errors| self.errors.0.append(&mut errors.0));
    }

    fn check_string(&mut self, schema: &Value, text: &str, name: &str) {
        let length = || text.chars().count();
        if let Some(max) = size_limit(schema, "maxLength").filter(|max| length() > *max) {
            let path = self.at(name);
            self.errors.too_long(&path, max);
        } else if let Some(min) = size_limit(schema, "minLength").filter(|min| length() < *min) {
            self.invalid(name, text, &format!("be at least {min} chars long"));
        } else if let Some(pattern) = schema.at("pattern").as_str()
            && !pattern.is_empty()
            && let Some(pattern) = self.patterns.mismatch(pattern, text)
        {
            self.invalid(name, text, &format!("match '{pattern}'"));
        }
        let format = formats::known_format(schema);
        if !format.is_empty()
            && schema.text("type") != "integer"
            && schema.text("type") != "number"
            && !formats::is_valid(format, text)
        {
            let path = self.at(name);
            let message = format!("{name} in body must be of type {format}: {}", crate::field::quote(text));
            self.errors.type_invalid(&path, text, &message);
        }
    }

    fn check_number(&mut self, schema: &Value, value: &Value, name: &str) {
        let Some(number) = value.as_f64() else { return };
        let (kind, format) = (schema.text("type"), schema.text("format"));
        let out_of_range = match (kind, format) {
            ("integer", "int32") => number < f64::from(i32::MIN) || number > f64::from(i32::MAX),
            ("integer", _) => value.as_i64().is_none() && number.abs() >= 9_223_372_036_854_775_807.0,
            ("number", "float") => number.abs() > f64::from(f32::MAX),
            _ => false,
        };
        if out_of_range {
            let expected_format = match format {
                "int32" | "int64" | "float" => format!("with format {format}"),
                _ => "(default format)".to_owned(),
            };
            self.errors.invalid(
                self.base,
                "",
                &format!("Checked value must be of type {kind} {expected_format} in {name}"),
            );
        }
        let limit = |keyword: &str| schema.at(keyword).as_f64();
        if let Some(factor) = limit("multipleOf").filter(|factor| *factor > 0.0) {
            let times = number / factor;
            if (times - times.round()).abs() > f64::EPSILON * times.abs() {
                self.invalid(name, value.clone(), &format!("be a multiple of {factor}"));
            }
        }
        if let Some(min) = limit("minimum") {
            let exclusive = schema.flag("exclusiveMinimum");
            if number < min || exclusive && number <= min {
                let or_equal = if exclusive { "" } else { "or equal to " };
                self.invalid(name, value.clone(), &format!("be greater than {or_equal}{min}"));
            }
        }
        if let Some(max) = limit("maximum") {
            let exclusive = schema.flag("exclusiveMaximum");
            if number > max || exclusive && number >= max {
                let or_equal = if exclusive { "" } else { "or equal to " };
                self.invalid(name, value.clone(), &format!("be less than {or_equal}{max}"));
            }
        }
    }

    fn check_items(&mut self, schema: &Value, items: &[Value], old: Option<&Value>, name: &str) {
        if schema.at("items").is_object() {
            for (i, item) in items.iter().enumerate() {
                let before = old.and_then(|old| lists::find_old_item(schema, old, item));
                self.check_value(schema.at("items"), item, before, &format!("{name}[{i}]"));
            }
        }
        if let Some(min) = size_limit(schema, "minItems").filter(|min| items.len() < *min) {
            self.invalid(name, items.len(), &format!("have at least {min} items"));
        }
        if let Some(max) = size_limit(schema, "maxItems").filter(|max| items.len() > *max) {
            let path = self.at(name);
            self.errors.too_many(&path, items.len(), max);
        }
    }

    fn check_enum(&mut self, schema: &Value, value: &Value, name: &str) {
        let enum_values = schema.items("enum");
        let same =
            |choice: &Value| choice == value || choice.is_number() && choice.as_f64() == value.as_f64();
        if enum_values.is_empty() || enum_values.iter().any(same) {
            return;
        }
        let words: Vec<String> = enum_values
            .iter()
            .map(|choice| choice.as_str().map_or_else(|| choice.to_string(), str::to_owned))
            .collect();
        let words: Vec<&str> = words.iter().map(String::as_str).collect();
        let path = self.at(name);
        self.errors.not_supported(&path, value.clone(), &words);
    }

    fn check_properties(&mut self, schema: &Value, object: &Value, old: Option<&Value>, name: &str) {
        let fields = object.as_object().into_iter().flatten();
        let count = object.as_object().map_or(0, serde_json::Map::len);
        if let Some(min) = size_limit(schema, "minProperties").filter(|min| count < *min) {
            self.invalid(name, count, &format!("have at least {min} properties"));
        }
        if let Some(max) = size_limit(schema, "maxProperties").filter(|max| count > *max) {
            let path = self.at(name);
            self.errors.too_many(&path, count, max);
        }
        let additional = schema.at("additionalProperties");
        for (field, value) in fields {
            let inside = if name.is_empty() { field.clone() } else { format!("{name}.{field}") };
            // The server chooses the version of an object, so it is not compared with the old one.
            let type_meta = name.is_empty() && matches!(field.as_str(), "apiVersion" | "kind");
            let before = old.filter(|_| !type_meta).and_then(|old| old.get(field));
            let property = schema.at("properties").at(field);
            if property.is_object() {
                self.check_value(property, value, before, &inside);
            } else if additional.is_object() {
                self.check_value(additional, value, before, &inside);
            }
        }
        for field in schema.items("required").iter().filter_map(Value::as_str) {
            if object.get(field).is_none() {
                let path = self.at(&format!("{name}.{field}"));
                self.errors.required(&path, "");
            }
        }
    }
}

fn size_limit(schema: &Value, keyword: &str) -> Option<usize> {
    schema.int(keyword).and_then(|size| usize::try_from(size).ok())
}

fn json_type(value: &Value) -> &'static str {
    match value {
        Value::Null => "null",
        Value::Bool(_) => "boolean",
        Value::Number(number) if number.is_f64() => "number",
        Value::Number(_) => "integer",
        Value::String(_) => "string",
        Value::Array(_) => "array",
        Value::Object(_) => "object",
    }
}

#[cfg(test)]
mod tests {
    use expect_test::{Expect, expect};
    use serde_json::json;

    use super::*;

    #[track_caller]
    fn check_errors(schema: Value, value: Value, expected: Expect) {
        let mut errors = ErrorList::default();
        validate_value(&schema, &value, &Path::root(), &Patterns::from_schema(&schema), &mut errors);
        let lines: Vec<String> =
            errors.0.iter().map(|error| format!("{}: {}\n", error.path, error.message)).collect();
        expected.assert_eq(&lines.concat());
    }

    #[test]
    fn validates_values_with_schema() {
        let schema = json!({
            "type": "object",
            "required": ["spec"],
            "properties": {"spec": {
                "type": "object",
                "required": ["length"],
                "maxProperties": 7,
                "properties": {
                    "length": {"type": "integer", "minimum": 1, "maximum": 400},
                    "depth": {"type": "number", "multipleOf": 0.5, "exclusiveMaximum": true, "maximum": 4},
                    "rig": {"type": "string", "enum": ["sloop", "ketch"], "maxLength": 5},
                    "tags": {"type": "array", "maxItems": 1, "items": {"type": "string", "minLength": 2}},
                    "port": {"x-kubernetes-int-or-string": true},
                    "note": {"type": "string", "nullable": true},
                    "sail": {"type": "object", "oneOf": [{"required": ["a"]}, {"required": ["b"]}]},
                },
            }},
        });
        let good = json!({"spec": {"length": 9.0, "depth": 1.5, "rig": "sloop", "tags": ["ab"], "port": "x", "note": null, "sail": {"a": 1}}});
        check_errors(schema.clone(), good, expect![""]);
        check_errors(
            schema.clone(),
            json!({}),
            expect![[r#"
            spec: Required value
        "#]],
        );
        check_errors(
            schema.clone(),
            json!([]),
            expect![[r#"
            <nil>: Invalid value: "array":  in body must be of type object: "array"
        "#]],
        );
        let bad = json!({"spec": {"depth": 4.1, "rig": "schooner", "tags": ["a", 1], "port": true, "note": 1, "sail": {}}});
        check_errors(
            schema.clone(),
            bad,
            expect![[r#"
            spec.depth: Invalid value: 4.1: spec.depth in body should be a multiple of 0.5
            spec.depth: Invalid value: 4.1: spec.depth in body should be less than 4
            spec.note: Invalid value: "integer": spec.note in body must be of type string: "integer"
            spec.port: Invalid value: "boolean": spec.port in body must be of type integer,string: "boolean"
            spec.rig: Too long: may not be more than 5 bytes
            spec.rig: Unsupported value: "schooner": supported values: "sloop", "ketch"
            <nil>: Invalid value: "": "spec.sail" must validate one and only one schema (oneOf). Found none valid
            spec.sail.a: Required value
            spec.tags[0]: Invalid value: "a": spec.tags[0] in body should be at least 2 chars long
            spec.tags[1]: Invalid value: "integer": spec.tags[1] in body must be of type string: "integer"
            spec.tags: Too many: 2: must have at most 1 item
            spec.length: Required value
        "#]],
        );
        check_errors(
            schema,
            json!({"spec": {"length": 0, "sail": {"a": 1, "b": 2}}}),
            expect![[r#"
            spec.length: Invalid value: 0: spec.length in body should be greater than or equal to 1
            <nil>: Invalid value: "": "spec.sail" must validate one and only one schema (oneOf). Found 2 valid alternatives
        "#]],
        );
    }

    #[test]
    fn validates_string_patterns_and_formats() {
        let schema = json!({"type": "object", "properties": {
            "code": {"type": "string", "pattern": "^\\d+-[a-z]{2}$"},
            "when": {"type": "string", "format": "date-time"},
            "ip": {"type": "string", "format": "ipv4"},
            "odd": {"type": "string", "format": "no-such-format"},
            "small": {"type": "integer", "format": "int32"},
        }});
        let good = json!({"code": "12-ab", "when": "2026-01-01T00:00:00Z", "ip": "10.0.0.1", "odd": "x", "small": 7});
        check_errors(schema.clone(), good, expect![""]);
        check_errors(
            schema,
            json!({"code": "٣-ab", "when": "x", "ip": 5, "small": 3_000_000_000_i64}),
            expect![[r#"
                code: Invalid value: "٣-ab": code in body should match '^\d+-[a-z]{2}$'
                ip: Invalid value: "int64": ip in body must be of type ipv4: "int64"
                <nil>: Invalid value: "": Checked value must be of type integer with format int32 in small
                when: Invalid value: "x": when in body must be of type date-time: "x"
            "#]],
        );
    }

    #[test]
    fn unchanged_invalid_value_is_allowed() {
        let schema = json!({"type": "object", "properties": {
            "a": {"type": "string", "maxLength": 2},
            "parts": {"type": "array", "x-kubernetes-list-type": "map", "x-kubernetes-list-map-keys": ["name"],
                      "items": {"type": "object", "properties": {"size": {"type": "integer", "minimum": 1}}}},
        }});
        let old = json!({"a": "long", "parts": [{"name": "x", "size": 0}, {"name": "y", "size": 0}]});
        let new = json!({"a": "long", "b": 1, "parts": [{"name": "y", "size": 0}, {"name": "z", "size": 0}, {"name": "x", "size": -1}]});
        let mut errors = ErrorList::default();
        validate_value_update(
            &schema,
            &new,
            &old,
            &Path::root(),
            &Patterns::from_schema(&schema),
            &mut errors,
        );
        let paths: Vec<&str> = errors.0.iter().map(|error| error.path.as_str()).collect();
        assert_eq!(paths, ["parts[1].size", "parts[2].size"]);
    }
}
