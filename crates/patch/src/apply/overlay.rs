//! Merges a configuration into an object without field ownership, for mutating admission policies with
//! `ApplyConfiguration`.

use schema::{ListType, Table, TypeId};
use serde_json::Value;

use super::merge::merge;
use super::typed::{self, Atom, Fields, Typed};

/// Returns the object with `config` merged into it. Atomic fields in `config` are an error: setting one
/// field of an atomic struct would remove all others, which is rarely intended.
pub fn overlay(table: &Table, ty: TypeId, object: &Value, config: &Value) -> Result<Value, String> {
    let root = Typed::root(table, ty);
    typed::validate(root, config, false)
        .map_err(|error| format!("failed to convert patch object to typed object: {error}"))?;
    let mut atomic_paths = Vec::new();
    find_atomic_paths(root, config, &mut String::new(), &mut atomic_paths);
    if !atomic_paths.is_empty() {
        return Err(format!(
            "invalid ApplyConfiguration: may not mutate atomic arrays, maps or structs: {}",
            atomic_paths.join(", ")
        ));
    }
    merge(root, object, config).map_err(|error| format!("failed to merge patch: {error}"))
}

fn find_atomic_paths(typed: Typed, value: &Value, path: &mut String, atomic_paths: &mut Vec<String>) {
    let length = path.len();
    match (typed.atom(value), value) {
        (Atom::Map(fields), Value::Object(entries)) => {
            if fields.atomic {
                atomic_paths.push(path.clone());
            }
            for (name, value) in entries {
                if is_declared(&fields, name) {
                    path.push('.');
                    path.push_str(name);
                    find_atomic_paths(fields.child(name), value, path, atomic_paths);
                    path.truncate(length);
                }
            }
        }
        (Atom::List { item, kind }, Value::Array(items)) => {
            if *kind == ListType::Atomic {
                atomic_paths.push(path.clone());
            }
            for (index, value) in items.iter().enumerate() {
                path.push_str(&format!("[{index}]"));
                find_atomic_paths(item, value, path, atomic_paths);
                path.truncate(length);
            }
        }
        _ => {}
    }
}

fn is_declared(fields: &Fields, name: &str) -> bool {
    fields.declared(name).is_some()
}

#[cfg(test)]
mod tests {
    use serde_json::json;

    use super::*;

    fn overlay_deployment(object: Value, config: Value) -> Result<Value, String> {
        let table = schema::kubernetes();
        let ty = table.type_by_kind("apps", "v1", "Deployment").expect("there are Deployments");
        overlay(table, ty, &object, &config)
    }

    #[test]
    fn merges_lists_by_key() {
        let containers = |items: Value| json!({"spec": {"template": {"spec": {"containers": items}}}});
        let object = containers(json!([{"name": "a", "image": "x"}, {"name": "b", "image": "y"}]));
        let config = containers(json!([{"name": "b", "image": "z"}]));
        let expected = containers(json!([{"name": "a", "image": "x"}, {"name": "b", "image": "z"}]));
        assert_eq!(overlay_deployment(object, config), Ok(expected));
    }

    #[test]
    fn rejects_changes_of_atomic_fields() {
        let object = json!({"spec": {"selector": {"matchLabels": {"a": "b"}}}});
        let config = json!({"spec": {"selector": {"matchLabels": {"c": "d"}}}});
        let expected =
            "invalid ApplyConfiguration: may not mutate atomic arrays, maps or structs: .spec.selector";
        assert_eq!(overlay_deployment(object, config), Err(expected.to_owned()));
    }
}
