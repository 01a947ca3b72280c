//! JSON merge patch (RFC 7386).

use serde_json::{Map, Value};

/// Merges `patch` into `doc`: objects are merged by field, `null` removes a field and any other value
/// replaces it.
pub fn merge_patch(doc: &mut Value, patch: &Value) {
    let Value::Object(changes) = patch else {
        *doc = patch.clone();
        return;
    };
    if !doc.is_object() {
        *doc = Value::Object(Map::new());
    }
    let Value::Object(fields) = doc else { return };
    for (name, change) in changes {
        match (change, fields.get_mut(name)) {
            (Value::Null, _) => {
                fields.remove(name);
            }
            (_, Some(field)) => merge_patch(field, change),
            (_, None) => {
                // New values are merged into an empty one, which removes their nulls.
                let mut field = Value::Null;
                merge_patch(&mut field, change);
                fields.insert(name.clone(), field);
            }
        }
    }
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;
    use serde_json::json;

    use super::*;
    use crate::json_patch::tests::any_json;

    #[track_caller]
    fn check(mut doc: Value, patch: Value, want: Value) {
        merge_patch(&mut doc, &patch);
        assert_eq!(doc, want);
    }

    #[test]
    fn applies_examples_of_rfc_7386() {
        check(json!({"a": "b"}), json!({"a": "c"}), json!({"a": "c"}));
        check(json!({"a": "b"}), json!({"b": "c"}), json!({"a": "b", "b": "c"}));
        check(json!({"a": "b"}), json!({"a": null}), json!({}));
        check(json!({"a": "b", "b": "c"}), json!({"a": null}), json!({"b": "c"}));
        check(json!({"a": ["b"]}), json!({"a": "c"}), json!({"a": "c"}));
        check(json!({"a": "c"}), json!({"a": ["b"]}), json!({"a": ["b"]}));
        check(json!({"a": {"b": "c"}}), json!({"a": {"b": "d", "c": null}}), json!({"a": {"b": "d"}}));
        check(json!({"a": [{"b": "c"}]}), json!({"a": [1]}), json!({"a": [1]}));
        check(json!(["a", "b"]), json!(["c", "d"]), json!(["c", "d"]));
        check(json!({"a": "b"}), json!(["c"]), json!(["c"]));
        check(json!({"a": "foo"}), json!(null), json!(null));
        check(json!({"e": null}), json!({"a": 1}), json!({"e": null, "a": 1}));
        check(json!([1, 2]), json!({"a": "b", "c": null}), json!({"a": "b"}));
        check(json!({}), json!({"a": {"bb": {"ccc": null}}}), json!({"a": {"bb": {}}}));
    }

    /// The merge patch that changes `from` to `to`, if neither contains nulls.
    fn diff(from: &Value, to: &Value) -> Value {
        let (Value::Object(old), Value::Object(new)) = (from, to) else { return to.clone() };
        let deleted =
            old.keys().filter(|name| !new.contains_key(*name)).map(|name| (name.clone(), Value::Null));
        let set = new.iter().filter(|(name, value)| old.get(*name) != Some(value)).map(|(name, value)| {
            (name.clone(), old.get(name).map_or_else(|| value.clone(), |old| diff(old, value)))
        });
        Value::Object(deleted.chain(set).collect())
    }

    fn remove_null_values(value: &mut Value) {
        match value {
            Value::Object(map) => {
                map.retain(|_, value| !value.is_null());
                map.values_mut().for_each(remove_null_values);
            }
            Value::Array(items) => items.iter_mut().for_each(remove_null_values),
            _ => {}
        }
    }

    proptest! {
        #[test]
        fn diff_patch_produces_target(mut from in any_json(), mut to in any_json()) {
            remove_null_values(&mut from);
            remove_null_values(&mut to);
            prop_assume!(!to.is_null() && to.is_object() == from.is_object());
            let patch = diff(&from, &to);
            merge_patch(&mut from, &patch);
            prop_assert_eq!(from, to);
        }

        #[test]
        fn merge_patch_is_stable_when_repeated(mut doc in any_json(), patch in any_json()) {
            merge_patch(&mut doc, &patch);
            let once = doc.clone();
            merge_patch(&mut doc, &patch);
            prop_assert_eq!(doc, once);
        }
    }
}
