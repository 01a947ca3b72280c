//! JSON patch (RFC 6902), as lenient as upstream's library (`evanphx/json-patch`) and with its error
//! texts.

use serde_json::Value;

/// The same limit as upstream on the operations of one patch.
const MAX_OPERATIONS: usize = 10_000;
/// The same limit as upstream on the bytes that all `copy` operations of one patch may add.
const MAX_COPY_BYTES: usize = 3 * 1024 * 1024;
/// The maximum depth that the JSON parser accepts. Operations can nest values, so the result is limited
/// to it, too.
const MAX_DEPTH: usize = 127;

#[derive(Debug, PartialEq, Eq, thiserror::Error)]
pub enum JsonPatchError {
    /// The patch is not a list of operations.
    #[error("{0}")]
    Invalid(String),
    #[error("The allowed maximum operations in a JSON patch is {MAX_OPERATIONS}, got {0}")]
    TooManyOperations(usize),
    #[error("testing value {0} failed: test failed")]
    TestFailed(String),
    /// An operation cannot be applied to this document.
    #[error("{0}")]
    Failed(String),
}

/// Applies the operations in `ops` to `doc` in order.
pub fn json_patch(doc: &mut Value, ops: &Value) -> Result<(), JsonPatchError> {
    let ops = match ops {
        Value::Array(ops) => ops.as_slice(),
        Value::Null => &[],
        other => return Err(not_a(other, "jsonpatch.Patch")),
    };
    if let Some(other) = ops.iter().find(|op| !op.is_object() && !op.is_null()) {
        return Err(not_a(other, "jsonpatch.Operation"));
    }
    if ops.len() > MAX_OPERATIONS {
        return Err(JsonPatchError::TooManyOperations(ops.len()));
    }
    let mut copied = 0;
    ops.iter().try_for_each(|op| run(doc, op, &mut copied))
}

type PatchResult<T = ()> = Result<T, JsonPatchError>;

fn run(doc: &mut Value, op: &Value, copied: &mut usize) -> PatchResult {
    let kind = op.get("op").and_then(Value::as_str).unwrap_or("unknown");
    let value = || op.get("value").cloned().unwrap_or(Value::Null);
    match kind {
        "add" => {
            let path =
                text(op, "path").map_err(|_| failed("add operation failed to decode path: missing value"))?;
            let (parent, key) = find(doc, path).ok_or_else(|| {
                failed(format!(
                    "add operation does not apply: doc is missing path: \"{path}\": missing value"
                ))
            })?;
            let value = value();
            check_depth(path, &value)?;
            add(parent, &key, value).map_err(operation_error("add", path))
        }
        "remove" => {
            let path = text(op, "path")
                .map_err(|_| failed("remove operation failed to decode path: missing value"))?;
            let (parent, key) = find(doc, path).ok_or_else(|| {
                failed(format!(
                    "remove operation does not apply: doc is missing path: \"{path}\": missing value"
                ))
            })?;
            remove(parent, &key).map(drop).map_err(operation_error("remove", path))
        }
        "replace" => replace(doc, path_of(op, "replace", "path")?, value()),
        "move" => {
            let from = path_of(op, "move", "from")?;
            let (parent, key) =
                find(doc, from).ok_or_else(|| missing("move", "doc is missing from path", from))?;
            get(parent, &key).map_err(operation_error("move", &key))?;
            let value = remove(parent, &key).map_err(operation_error("move", &key))?;
            let path = path_of(op, "move", "path")?;
            if steps(path) > steps(from) {
                check_depth(path, &value)?;
            }
            let (parent, key) =
                find(doc, path).ok_or_else(|| missing("move", "doc is missing destination path", path))?;
            add(parent, &key, value).map_err(operation_error("move", path))
        }
        "copy" => {
            let from = path_of(op, "copy", "from")?;
            let (parent, key) =
                find(doc, from).ok_or_else(|| missing("copy", "doc is missing from path", from))?;
            let value =
                get(parent, &key).map_err(|e| failed(format!("error in copy for from: '{from}': {e}")))?;
            // The size is checked before the copy: a chain of copies doubles the document each time.
            *copied += size(value);
            if *copied > MAX_COPY_BYTES {
                return Err(failed(format!(
                    "Unable to complete the copy, the accumulated size increase of copy is {copied}, \
                     exceeding the limit {MAX_COPY_BYTES}"
                )));
            }
            let value = value.clone();
            let path = text(op, "path")
                .map_err(|_| failed("copy operation failed to decode path: missing value"))?;
            check_depth(path, &value)?;
            let (parent, key) =
                find(doc, path).ok_or_else(|| missing("copy", "doc is missing destination path", path))?;
            add(parent, &key, value).map_err(|e| failed(format!("error while adding value during copy: {e}")))
        }
        "test" => test(doc, op),
        other => Err(failed(format!("Unexpected kind: {other}"))),
    }
}

fn replace(doc: &mut Value, path: &str, value: Value) -> PatchResult {
    check_depth(path, &value)?;
    if path.is_empty() {
        // Upstream ignores the replacement of the whole document by a scalar.
        if value.is_object() || value.is_array() {
            *doc = value;
        }
        return Ok(());
    }
    let (parent, key) = find(doc, path).ok_or_else(|| missing("replace", "doc is missing path", path))?;
    *get_mut(parent, &key).map_err(|_| missing("replace", "doc is missing key", path))? = value;
    Ok(())
}

fn test(doc: &mut Value, op: &Value) -> PatchResult {
    let path = path_of(op, "test", "path")?;
    let want = op.get("value").unwrap_or(&Value::Null);
    let have = if path.is_empty() {
        &*doc
    } else {
        let (parent, key) = find(doc, path).ok_or_else(|| missing("test", "is missing path", path))?;
        match parent {
            // A missing field equals null.
            Value::Object(fields) => fields.get(&key).unwrap_or(&Value::Null),
            parent => get(parent, &key).map_err(operation_error("test", path))?,
        }
    };
    if have == want { Ok(()) } else { Err(JsonPatchError::TestFailed(path.to_owned())) }
}

/// Returns the container that the last element of a path refers to, and that element.
fn find<'d>(doc: &'d mut Value, path: &str) -> Option<(&'d mut Value, String)> {
    let (_, steps) = path.split_once('/')?;
    let (parents, last) =
        steps.rsplit_once('/').map_or((None, steps), |(parents, last)| (Some(parents), last));
    let mut container = doc;
    for step in parents.into_iter().flat_map(|parents| parents.split('/')) {
        container = get_mut(container, &unescape(step)).ok()?;
    }
    (container.is_object() || container.is_array()).then(|| (container, unescape(last)))
}

fn unescape(step: &str) -> String {
    if step.contains('~') { step.replace("~1", "/").replace("~0", "~") } else { step.to_owned() }
}

fn get<'v>(container: &'v Value, key: &str) -> Result<&'v Value, String> {
    match container {
        Value::Array(items) => Ok(&items[index(key, items.len())?]),
        other => other.get(key).ok_or_else(|| format!("unable to get nonexistent key: {key}: missing value")),
    }
}

fn get_mut<'v>(container: &'v mut Value, key: &str) -> Result<&'v mut Value, String> {
    match container {
        Value::Array(items) => {
            let at = index(key, items.len())?;
            Ok(&mut items[at])
        }
        other => {
            other.get_mut(key).ok_or_else(|| format!("unable to get nonexistent key: {key}: missing value"))
        }
    }
}

fn add(container: &mut Value, key: &str, value: Value) -> Result<(), String> {
    match container {
        Value::Array(items) if key == "-" => items.push(value),
        Value::Array(items) => {
            // The position after the last item is valid, too; -1 refers to it.
            let at = index(key, items.len() + 1).map_err(|e| match key.parse::<i64>() {
                Ok(_) => e,
                Err(_) => format!("value was not a proper array index: '{key}': {e}"),
            })?;
            items.insert(at, value);
        }
        Value::Object(fields) => {
            fields.insert(key.to_owned(), value);
        }
        _ => return Err(format!("unable to get nonexistent key: {key}: missing value")),
    }
    Ok(())
}

fn remove(container: &mut Value, key: &str) -> Result<Value, String> {
    match container {
        Value::Array(items) => Ok(items.remove(index(key, items.len())?)),
        other => other
            .as_object_mut()
            .and_then(|fields| fields.remove(key))
            .ok_or_else(|| format!("Unable to remove nonexistent key: {key}: missing value")),
    }
}

/// Parses an index below `len`. Negative indexes count from the end.
fn index(key: &str, len: usize) -> Result<usize, String> {
    let at: i64 = key.parse().map_err(|e: std::num::ParseIntError| {
        use std::num::IntErrorKind::{NegOverflow, PosOverflow};
        let reason = match e.kind() {
            PosOverflow | NegOverflow => "value out of range",
            _ => "invalid syntax",
        };
        format!("strconv.Atoi: parsing {}: {reason}", crate::go::quote(key))
    })?;
    let position = if at < 0 { len.checked_sub(at.unsigned_abs() as usize) } else { Some(at as usize) };
    position
        .filter(|position| *position < len)
        .ok_or_else(|| format!("Unable to access invalid index: {at}: invalid index referenced"))
}

fn text<'o>(op: &'o Value, name: &str) -> Result<&'o str, String> {
    match op.get(name) {
        None | Some(Value::Null) => Err(format!("operation missing {name} field: missing value")),
        Some(Value::String(text)) => Ok(text),
        Some(other) => Err(format!(
            "json: cannot unmarshal {} into Go value of type string",
            crate::go::json_kind(other)
        )),
    }
}

fn path_of<'o>(op: &'o Value, kind: &str, name: &str) -> PatchResult<&'o str> {
    text(op, name).map_err(|e| failed(format!("{kind} operation failed to decode {name}: {e}")))
}

fn steps(path: &str) -> usize {
    path.bytes().filter(|b| *b == b'/').count()
}

fn check_depth(path: &str, value: &Value) -> PatchResult {
    if steps(path) + depth(value) > MAX_DEPTH {
        return Err(failed(format!("the result would nest deeper than {MAX_DEPTH} levels")));
    }
    Ok(())
}

fn depth(value: &Value) -> usize {
    match value {
        Value::Array(items) => 1 + items.iter().map(depth).max().unwrap_or(0),
        Value::Object(fields) => 1 + fields.values().map(depth).max().unwrap_or(0),
        _ => 0,
    }
}

/// The approximate size of the serialized value in bytes.
fn size(value: &Value) -> usize {
    match value {
        Value::Null | Value::Bool(_) | Value::Number(_) => 4,
        Value::String(text) => text.len() + 2,
        Value::Array(items) => 2 + items.iter().map(|item| size(item) + 1).sum::<usize>(),
        Value::Object(fields) => {
            2 + fields.iter().map(|(name, value)| name.len() + size(value) + 4).sum::<usize>()
        }
    }
}

fn not_a(value: &Value, what: &str) -> JsonPatchError {
    let kind = crate::go::json_kind(value);
    JsonPatchError::Invalid(format!("json: cannot unmarshal {kind} into Go value of type {what}"))
}

fn failed(text: impl Into<String>) -> JsonPatchError {
    JsonPatchError::Failed(text.into())
}

fn missing(kind: &str, what: &str, path: &str) -> JsonPatchError {
    failed(format!("{kind} operation does not apply: {what}: {path}: missing value"))
}

fn operation_error<'p>(kind: &'p str, path: &'p str) -> impl Fn(String) -> JsonPatchError + 'p {
    move |e| failed(format!("error in {kind} for path: '{path}': {e}"))
}

#[cfg(test)]
pub(crate) mod tests {
    use proptest::prelude::*;
    use serde_json::json;

    use super::*;

    /// Small JSON values with few names, so that two of them are likely to overlap.
    pub(crate) fn any_json() -> impl Strategy<Value = Value> {
        let leaf = prop_oneof![
            Just(Value::Null),
            any::<bool>().prop_map(Value::from),
            (0..3i64).prop_map(Value::from),
            "[ab]".prop_map(Value::from),
        ];
        leaf.prop_recursive(4, 24, 4, |inner| {
            prop_oneof![
                prop::collection::vec(inner.clone(), 0..4).prop_map(Value::from),
                prop::collection::btree_map("[abc]", inner, 0..4)
                    .prop_map(|map| Value::Object(map.into_iter().collect())),
            ]
        })
    }

    #[track_caller]
    fn check(mut doc: Value, ops: Value, want: Value) {
        json_patch(&mut doc, &ops).expect("the patch applies");
        assert_eq!(doc, want);
    }

    #[track_caller]
    fn check_error(mut doc: Value, ops: Value, want: &str) {
        let error = json_patch(&mut doc, &ops).expect_err("the patch does not apply");
        assert_eq!(error.to_string(), want);
    }

    #[test]
    fn applies_operations() {
        check(json!({"a": 1}), json!([{"op": "add", "path": "/b", "value": 2}]), json!({"a": 1, "b": 2}));
        check(
            json!({"a": [1, 3]}),
            json!([{"op": "add", "path": "/a/1", "value": 2}]),
            json!({"a": [1, 2, 3]}),
        );
        check(json!({"a": [1]}), json!([{"op": "add", "path": "/a/-", "value": 2}]), json!({"a": [1, 2]}));
        check(json!({"a": [1]}), json!([{"op": "add", "path": "/a/1", "value": 2}]), json!({"a": [1, 2]}));
        check(json!({"a": [1, 2]}), json!([{"op": "remove", "path": "/a/-1"}]), json!({"a": [1]}));
        check(json!({"a": {"b/c~": 1}}), json!([{"op": "remove", "path": "/a/b~1c~0"}]), json!({"a": {}}));
        check(
            json!({"a": [1, 2]}),
            json!([{"op": "replace", "path": "/a/0", "value": {}}]),
            json!({"a": [{}, 2]}),
        );
        check(json!({"a": 1}), json!([{"op": "replace", "path": "", "value": {"b": 1}}]), json!({"b": 1}));
        check(json!({"a": 1}), json!([{"op": "move", "from": "/a", "path": "/b"}]), json!({"b": 1}));
        check(
            json!({"a": {"x": 1}}),
            json!([{"op": "copy", "from": "/a", "path": "/a/y"}]),
            json!({"a": {"x": 1, "y": {"x": 1}}}),
        );
        check(json!({"a": [1]}), json!([{"op": "test", "path": "/a/0", "value": 1}]), json!({"a": [1]}));
        check(json!({}), json!([{"op": "test", "path": "/a", "value": null}]), json!({}));
        check(json!({"a": 1}), json!([{"op": "add", "path": "/b"}]), json!({"a": 1, "b": null}));
        check(json!({"a": 1}), json!(null), json!({"a": 1}));
    }

    #[test]
    fn rejects_invalid_operations() {
        check_error(
            json!({}),
            json!([{"op": "add", "path": "/metadata/labels/x", "value": "y"}]),
            "add operation does not apply: doc is missing path: \"/metadata/labels/x\": missing value",
        );
        check_error(
            json!({}),
            json!([{"op": "remove", "path": "/a"}]),
            "error in remove for path: '/a': Unable to remove nonexistent key: a: missing value",
        );
        check_error(
            json!({"spec": {}}),
            json!([{"op": "replace", "path": "/spec/replicas", "value": 1}]),
            "replace operation does not apply: doc is missing key: /spec/replicas: missing value",
        );
        check_error(
            json!({"a": [1]}),
            json!([{"op": "add", "path": "/a/3", "value": 1}]),
            "error in add for path: '/a/3': Unable to access invalid index: 3: invalid index referenced",
        );
        check_error(
            json!({"a": [1]}),
            json!([{"op": "add", "path": "/a/x", "value": 1}]),
            "error in add for path: '/a/x': value was not a proper array index: 'x': strconv.Atoi: parsing \"x\": invalid syntax",
        );
        check_error(
            json!({"a": 1}),
            json!([{"op": "test", "path": "/a", "value": 2}]),
            "testing value /a failed: test failed",
        );
        check_error(json!({"a": 1}), json!([{"op": "jump", "path": "/a"}]), "Unexpected kind: jump");
        check_error(json!({}), json!([null]), "Unexpected kind: unknown");
        check_error(
            json!({}),
            json!([{"op": "replace", "value": 2}]),
            "replace operation failed to decode path: operation missing path field: missing value",
        );
        check_error(
            json!({}),
            json!({"a": 1}),
            "json: cannot unmarshal object into Go value of type jsonpatch.Patch",
        );
        check_error(
            json!({}),
            json!([1]),
            "json: cannot unmarshal number into Go value of type jsonpatch.Operation",
        );
        let many = Value::from(vec![json!({"op": "test", "path": "", "value": {}}); 10_001]);
        check_error(json!({}), many, "The allowed maximum operations in a JSON patch is 10000, got 10001");
    }

    #[test]
    fn limits_total_size_of_copies() {
        let copy_operations = vec![json!({"op": "copy", "from": "/a", "path": "/a/-"}); 64];
        let mut doc = json!({"a": ["x"]});
        let error = json_patch(&mut doc, &Value::from(copy_operations)).expect_err("bounded");
        assert!(
            error.to_string().contains("nest deeper") || error.to_string().contains("exceeding the limit")
        );

        let wide = vec![json!({"op": "copy", "from": "/a", "path": "/b"}); 100];
        let mut doc = json!({"a": "x".repeat(100_000)});
        let error = json_patch(&mut doc, &Value::from(wide)).expect_err("bounded");
        assert!(error.to_string().contains("exceeding the limit 3145728"), "{error}");
    }

    #[test]
    fn limits_depth_of_moved_values() {
        let mut ops = vec![];
        for _ in 0..500 {
            ops.push(json!({"op": "add", "path": "/b", "value": {}}));
            ops.push(json!({"op": "move", "from": "/a", "path": "/b/c"}));
            ops.push(json!({"op": "move", "from": "/b", "path": "/a"}));
        }
        let error = json_patch(&mut json!({"a": {}}), &Value::from(ops)).expect_err("bounded");
        assert!(error.to_string().contains("nest deeper"), "{error}");
    }

    proptest! {
        #[test]
        fn random_operations_never_panic(
            mut doc in any_json(),
            ops in prop::collection::vec(
                ("add|remove|replace|move|copy|test", "(/([abc]|-|-?[012]|~0)){0,4}", "(/([abc]|-?[01])){0,3}", any_json()),
                0..8,
            ),
        ) {
            let ops: Vec<Value> = ops
                .into_iter()
                .map(|(op, path, from, value)| json!({"op": op, "path": path, "from": from, "value": value}))
                .collect();
            let _ = json_patch(&mut doc, &Value::from(ops));
        }
    }
}
