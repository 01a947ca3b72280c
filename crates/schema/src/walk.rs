//! Visits every struct inside a value, outer structs first.

use std::collections::HashSet;

use serde_json::{Map, Value};

use crate::decode::MAX_DEPTH;
use crate::table::{Shape, Table, TypeId};

type Object = Map<String, Value>;

/// A set of selected types, and all types that contain one of them.
#[derive(Debug, Default)]
pub struct TypeFilter {
    selected: HashSet<TypeId>,
    containing: HashSet<TypeId>,
}

impl TypeFilter {
    /// Selects types by definition name. Names that are not in the table are ignored.
    pub fn new<'n>(table: &Table, names: impl IntoIterator<Item = &'n str>) -> TypeFilter {
        let selected: HashSet<TypeId> =
            names.into_iter().filter_map(|name| table.type_by_name(name)).collect();
        let mut containing = selected.clone();
        // Repeat until nothing is added: types refer to each other, also in cycles.
        loop {
            let size = containing.len();
            for (id, ty) in table.types() {
                if ty.fields.iter().any(|field| contains_selected(&field.shape, &containing)) {
                    containing.insert(id);
                }
            }
            if containing.len() == size {
                return TypeFilter { selected, containing };
            }
        }
    }

    /// Whether the type is selected.
    pub fn matches(&self, id: TypeId) -> bool {
        self.selected.contains(&id)
    }
}

fn contains_selected(shape: &Shape, containing: &HashSet<TypeId>) -> bool {
    match shape {
        Shape::Struct(id) => containing.contains(id),
        Shape::List { item: inner, .. } | Shape::Map { value: inner, .. } => {
            contains_selected(inner, containing)
        }
        _ => false,
    }
}

/// Calls `f` for every struct in a value of type `ty`.
pub fn visit_mut(table: &Table, ty: TypeId, value: &mut Value, f: &mut dyn FnMut(TypeId, &mut Object)) {
    TypeWalk { table, filter: None, f }.value(&Shape::Struct(ty), value, 0);
}

/// Calls `f` for the selected structs only, and skips values that cannot contain one.
pub fn visit_filtered_mut(
    table: &Table,
    filter: &TypeFilter,
    ty: TypeId,
    value: &mut Value,
    f: &mut dyn FnMut(TypeId, &mut Object),
) {
    TypeWalk { table, filter: Some(filter), f }.value(&Shape::Struct(ty), value, 0);
}

struct TypeWalk<'w> {
    table: &'w Table,
    filter: Option<&'w TypeFilter>,
    f: &'w mut dyn FnMut(TypeId, &mut Object),
}

impl TypeWalk<'_> {
    /// Decoded values are never deeper than the limit. Deeper values are not visited.
    fn value(&mut self, shape: &Shape, value: &mut Value, depth: usize) {
        if depth > MAX_DEPTH {
            return;
        }
        match (shape, value) {
            (Shape::Struct(id), Value::Object(object)) => self.object(*id, object, depth),
            (Shape::List { item, .. }, Value::Array(list)) if self.may_contain(item) => {
                list.iter_mut().for_each(|value| self.value(item, value, depth + 1));
            }
            (Shape::Map { value: inner, .. }, Value::Object(map)) if self.may_contain(inner) => {
                map.values_mut().for_each(|value| self.value(inner, value, depth + 1));
            }
            _ => {}
        }
    }

    fn object(&mut self, id: TypeId, object: &mut Object, depth: usize) {
        if self.filter.is_none_or(|filter| filter.matches(id)) {
            (self.f)(id, object);
        }
        let table = self.table;
        for field in &table.get(id).fields {
            if self.may_contain(&field.shape)
                && let Some(value) = object.get_mut(&*field.name)
            {
                self.value(&field.shape, value, depth + 1);
            }
        }
    }

    fn may_contain(&self, shape: &Shape) -> bool {
        match (shape, self.filter) {
            (Shape::Struct(id), Some(filter)) => filter.containing.contains(id),
            (Shape::Struct(_), None) => true,
            (Shape::List { item: inner, .. } | Shape::Map { value: inner, .. }, _) => self.may_contain(inner),
            _ => false,
        }
    }
}

#[cfg(test)]
mod tests {
    use expect_test::{Expect, expect};
    use serde_json::json;

    use super::*;
    use crate::kubernetes;

    #[track_caller]
    fn check(filter: Option<&[&str]>, expect: Expect) {
        let table = kubernetes();
        let filter = filter.map(|names| TypeFilter::new(table, names.iter().copied()));
        let id = table.type_by_kind("apps", "v1", "Deployment").expect("a built-in kind");
        let mut value = json!({"metadata": {"ownerReferences": [{}]}, "spec": {"template": {"spec": {
            "containers": [{"name": "a", "ports": [{}, {}], "livenessProbe": {"httpGet": {}}}],
        }}}, "status": 5});
        let mut seen = Vec::new();
        let mut f = |id, object: &mut Object| {
            seen.push(table.get(id).short_name().to_owned());
            object.entry("name").or_insert(json!("seen"));
        };
        match filter {
            None => visit_mut(table, id, &mut value, &mut f),
            Some(filter) => visit_filtered_mut(table, &filter, id, &mut value, &mut f),
        }
        expect.assert_eq(&seen.join(" "));
    }

    #[test]
    fn visit_calls_outer_struct_first() {
        check(
            None,
            expect![
                "Deployment ObjectMeta OwnerReference DeploymentSpec PodTemplateSpec PodSpec Container ContainerPort ContainerPort Probe HTTPGetAction"
            ],
        );
    }

    #[test]
    fn visit_filtered_calls_selected_types_only() {
        check(
            Some(&["io.k8s.api.core.v1.Probe", "io.k8s.api.core.v1.ContainerPort"]),
            expect!["ContainerPort ContainerPort Probe"],
        );
        check(Some(&["io.k8s.api.core.v1.Secret", "nonsense"]), expect![]);
    }
}
