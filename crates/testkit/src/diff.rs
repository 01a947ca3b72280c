//! Compares two JSON values and reports only the differences.

use std::collections::BTreeSet;

use serde_json::Value;

/// Panics with the paths at which the two values differ.
#[track_caller]
pub fn assert_same(what: &str, left: &Value, right: &Value) {
    let found = diff_values(left, right);
    assert!(found.is_empty(), "{what}:\n  {}", found.join("\n  "));
}

/// One line per differing path.
pub fn diff_values(left: &Value, right: &Value) -> Vec<String> {
    let mut found = Vec::new();
    compare("", Some(left), Some(right), &mut found);
    found
}

fn compare(path: &str, left: Option<&Value>, right: Option<&Value>, found: &mut Vec<String>) {
    match (left, right) {
        (Some(Value::Object(left)), Some(Value::Object(right))) => {
            for key in left.keys().chain(right.keys()).collect::<BTreeSet<_>>() {
                compare(&format!("{path}.{key}"), left.get(key), right.get(key), found);
            }
        }
        (Some(Value::Array(left)), Some(Value::Array(right))) => {
            for i in 0..left.len().max(right.len()) {
                compare(&format!("{path}[{i}]"), left.get(i), right.get(i), found);
            }
        }
        (left, right) if left == right => {}
        (left, right) => found.push(format!("{path}: {} | {}", format_value(left), format_value(right))),
    }
}

fn format_value(value: Option<&Value>) -> String {
    value.map_or_else(|| "absent".to_owned(), Value::to_string)
}

#[cfg(test)]
mod tests {
    use serde_json::json;

    use super::*;

    #[test]
    fn reports_every_path() {
        let left = json!({"a": {"b": [1, 2]}, "c": "x", "same": [{}]});
        let right = json!({"a": {"b": [1]}, "c": "y", "d": null, "same": [{}]});
        assert_eq!(
            diff_values(&left, &right),
            [".a.b[1]: 2 | absent", ".c: \"x\" | \"y\"", ".d: absent | null"]
        );
        assert_same("left", &left, &left);
    }
}
