//! Validates that items of sets and maps are unique, and matches list items with old ones.

use std::collections::HashMap;

use serde_json::{Map, Value};

use crate::field::{ErrorList, Path};
use crate::json::JsonExt;

/// Reports duplicate items in lists of type `set` and `map`.
pub fn validate_lists(schema: &Value, value: &Value, path: &Path, errors: &mut ErrorList) {
    match value {
        Value::Object(map) => {
            let additional = schema.at("additionalProperties");
            for (name, child) in map {
                if additional.is_object() {
                    validate_lists(additional, child, &path.key(name), errors);
                }
                let property = schema.at("properties").at(name);
                if property.is_object() {
                    validate_lists(property, child, &path.child(name), errors);
                }
            }
        }
        Value::Array(items) => {
            match schema.text("x-kubernetes-list-type") {
                "set" => report_duplicates(items.iter().map(Clone::clone), path, errors),
                "map" => validate_map_list(schema, items, path, errors),
                _ => {}
            }
            for (i, item) in items.iter().enumerate() {
                validate_lists(schema.at("items"), item, &path.index(i), errors);
            }
        }
        _ => {}
    }
}

fn validate_map_list(schema: &Value, items: &[Value], path: &Path, errors: &mut ErrorList) {
    if let Some((i, item)) = items.iter().enumerate().find(|(_, item)| !item.is_object() && !item.is_null()) {
        errors.invalid(&path.index(i), item.clone(), "must be an object for an array of list-type map");
        return;
    }
    report_duplicates(items.iter().map(|item| key(schema, item)), path, errors);
}

/// Reports only the second of equal items.
fn report_duplicates(keys: impl Iterator<Item = Value>, path: &Path, errors: &mut ErrorList) {
    let mut seen: HashMap<String, usize> = HashMap::new();
    for (i, key) in keys.enumerate() {
        let times = seen.entry(key.to_string()).or_default();
        *times += 1;
        if *times == 2 {
            errors.duplicate(&path.index(i), key);
        }
    }
}

/// The values of the map keys of a list item.
fn key(schema: &Value, item: &Value) -> Value {
    let names = schema.items("x-kubernetes-list-map-keys").iter().filter_map(Value::as_str);
    let fields = names.filter_map(|name| Some((name.to_owned(), item.get(name)?.clone())));
    Value::Object(fields.collect::<Map<_, _>>())
}

/// The item of the old list with the same map keys.
pub fn find_old_item<'v>(schema: &Value, old: &'v Value, item: &Value) -> Option<&'v Value> {
    if schema.text("x-kubernetes-list-type") != "map" {
        return None;
    }
    let item_key = key(schema, item);
    old.as_array()?.iter().find(|old| key(schema, old) == item_key)
}

#[cfg(test)]
mod tests {
    use serde_json::json;

    use super::*;

    #[track_caller]
    fn check(schema: Value, value: Value, expected: &str) {
        let mut errors = ErrorList::default();
        validate_lists(&schema, &value, &Path::new("l"), &mut errors);
        assert_eq!(errors.to_string(), expected);
    }

    #[test]
    fn rejects_duplicate_items() {
        let set = json!({"type": "array", "x-kubernetes-list-type": "set"});
        check(set.clone(), json!(["a", "b"]), "");
        check(set, json!(["a", 1, "a", 1, "a"]), r#"[l[2]: Duplicate value: "a", l[3]: Duplicate value: 1]"#);
        let map =
            json!({"type": "array", "x-kubernetes-list-type": "map", "x-kubernetes-list-map-keys": ["name"]});
        check(map.clone(), json!([{"name": "a"}, {"name": "b"}, {}]), "");
        check(
            map.clone(),
            json!([{"name": "a", "x": 1}, {"name": "a"}]),
            r#"l[1]: Duplicate value: {"name":"a"}"#,
        );
        check(
            map,
            json!(["a"]),
            r#"l[0]: Invalid value: "a": must be an object for an array of list-type map"#,
        );
    }
}
