//! The `FieldsV1` serialization of a field set: `{"f:spec":{"f:ports":{".":{},"k:{\"port\":80}":{}}}}`.

use serde_json::{Map, Value};

use super::field_set::{Node, PathElement, Set};
use crate::go;

/// Parses a set. Path elements of unknown types are skipped, as upstream does.
pub(crate) fn parse(fields: &Value) -> Result<Set, String> {
    let fields = match fields {
        Value::Object(fields) => fields,
        Value::Null => return Ok(Set::default()),
        other => return Err(format!("expected a map, got {}", go::json_kind(other))),
    };
    let mut nodes = Vec::with_capacity(fields.len());
    for (key, below) in fields.iter().filter(|(key, _)| *key != ".") {
        let Some(element) = element(key)? else { continue };
        let children = parse(below)?;
        // A leaf is `{}`. A member with children has a dot entry.
        let member = children.is_empty() || below.get(".").is_some();
        nodes.push(Node { element, member, children });
    }
    Ok(Set::from_nodes(nodes))
}

pub(crate) fn print(set: &Set) -> Value {
    Value::Object(contents(set, false))
}

/// Whether a serialized set, as written by `print`, overlaps `changes`: it has one of their paths or
/// something below it.
pub(crate) fn has_overlap(fields: &Value, changes: &Set) -> bool {
    changes.nodes().iter().any(|node| {
        fields.get(key(&node.element)).is_some_and(|below| node.member || has_overlap(below, &node.children))
    })
}

fn contents(set: &Set, member: bool) -> Map<String, Value> {
    let mut fields = Map::new();
    if member && !set.is_empty() {
        fields.insert(".".to_owned(), Value::Object(Map::new()));
    }
    for node in set.nodes() {
        fields.insert(key(&node.element), Value::Object(contents(&node.children, node.member)));
    }
    fields
}

fn element(key: &str) -> Result<Option<PathElement>, String> {
    if key.len() < 2 {
        return Err("key must be 2 characters long:".to_owned());
    }
    let Some((kind, rest)) = key.split_once(':').filter(|(kind, _)| kind.len() == 1) else {
        return Err(format!("missing colon: {key}"));
    };
    Ok(Some(match kind {
        "f" => PathElement::Field(rest.to_owned()),
        "v" => PathElement::Value(serde_json::from_str(rest).map_err(|e| e.to_string())?),
        "k" => {
            let fields: Map<String, Value> = serde_json::from_str(rest).map_err(|e| e.to_string())?;
            PathElement::Key(fields.into_iter().collect())
        }
        "i" => PathElement::Index(
            rest.parse().map_err(|_| format!("strconv.Atoi: parsing {}: invalid syntax", go::quote(rest)))?,
        ),
        _ => return Ok(None),
    }))
}

pub(crate) fn field_key(name: &str) -> String {
    ["f:", name].concat()
}

pub(crate) fn key(element: &PathElement) -> String {
    match element {
        PathElement::Field(name) => field_key(name),
        PathElement::Value(value) => ["v:", &go::json(value)].concat(),
        PathElement::Index(at) => format!("i:{at}"),
        PathElement::Key(fields) => {
            let mut key = "k:{".to_owned();
            for (at, (name, value)) in fields.iter().enumerate() {
                key.push_str(if at > 0 { ",\"" } else { "\"" });
                key.push_str(name);
                key.push_str("\":");
                key.push_str(&go::json(value));
            }
            key.push('}');
            key
        }
    }
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;
    use serde_json::json;

    use super::*;
    use crate::apply::field_set::tests::any_set;
    use crate::json_patch::tests::any_json;

    #[track_caller]
    fn check(fields: Value, paths: &[&str]) {
        let set = parse(&fields).expect("a field set");
        assert_eq!(set.paths(), paths);
        assert_eq!(print(&set), fields);
    }

    #[test]
    fn parse_and_print_path_elements() {
        check(json!({}), &[]);
        check(json!({"f:data": {"f:a": {}, "f:b": {}}}), &[".data.a", ".data.b"]);
        check(json!({"f:labels": {".": {}, "f:x": {}}}), &[".labels", ".labels.x"]);
        check(
            json!({"f:ports": {"k:{\"port\":80,\"protocol\":\"TCP\"}": {".": {}, "f:name": {}}}}),
            &[".ports[port=80,protocol=\"TCP\"]", ".ports[port=80,protocol=\"TCP\"].name"],
        );
        check(
            json!({"f:finalizers": {"v:\"a/b\"": {}, "v:\"\\u003c\"": {}}}),
            &[".finalizers[=\"<\"]", ".finalizers[=\"a/b\"]"],
        );
        check(json!({"i:3": {}}), &["[3]"]);
    }

    #[test]
    fn rejects_invalid_field_sets() {
        assert!(parse(&json!({"x": {}})).is_err());
        assert!(parse(&json!({"foo": {}})).is_err());
        assert!(parse(&json!({"v:{": {}})).is_err());
        assert!(parse(&json!({"k:1": {}})).is_err());
        assert!(parse(&json!({"f:a": 1})).is_err());
        assert_eq!(parse(&json!({"z:new": {}})), Ok(Set::default()));
    }

    proptest! {
        #[test]
        fn printing_and_parsing_round_trips(set in any_set()) {
            prop_assert_eq!(parse(&print(&set)), Ok(set));
        }

        #[test]
        fn overlapping_sets_share_path(a in any_set(), b in any_set()) {
            let shared = !a.intersection(&b).is_empty();
            prop_assert!(!shared || has_overlap(&print(&a), &b));
        }

        #[test]
        fn random_json_never_panics(value in any_json(), key in "[fvki.]?:?.{0,6}") {
            let _ = parse(&value);
            let _ = parse(&json!({key: value}));
        }
    }
}
