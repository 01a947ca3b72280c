//! Visiting every struct inside a value, outer before inner.

use std::collections::HashSet;

use serde_json::{Map, Value};

use crate::decode::MAX_DEPTH;
use crate::table::{Shape, Table, TypeId};

type Object = Map<String, Value>;

/// The types that somebody wants to see, and those that lead to one.
#[derive(Debug, Default)]
pub struct Interest {
    wanted: HashSet<TypeId>,
    leading: HashSet<TypeId>,
}

impl Interest {
    /// By definition name. Names that the table does not know are left out.
    pub fn new<'n>(table: &Table, names: impl IntoIterator<Item = &'n str>) -> Interest {
        let wanted: HashSet<TypeId> = names.into_iter().filter_map(|name| table.named(name)).collect();
        let mut leading = wanted.clone();
        loop {
            let before = leading.len();
            for (id, ty) in table.types() {
                if ty.fields.iter().any(|field| leads(&field.shape, &leading)) {
                    leading.insert(id);
                }
            }
            if leading.len() == before {
                return Interest { wanted, leading };
            }
        }
    }

    /// Whether the type was asked for by name.
    pub fn wants(&self, id: TypeId) -> bool {
        self.wanted.contains(&id)
    }
}

fn leads(shape: &Shape, leading: &HashSet<TypeId>) -> bool {
    match shape {
        Shape::Struct(id) => leading.contains(id),
        Shape::List { item: inner, .. } | Shape::Map { value: inner, .. } => leads(inner, leading),
        _ => false,
    }
}

/// Calls `f` for every struct in a value of type `ty`.
pub fn visit_mut(table: &Table, ty: TypeId, value: &mut Value, f: &mut dyn FnMut(TypeId, &mut Object)) {
    Walk { table, interest: None, f }.value(&Shape::Struct(ty), value, 0);
}

/// Calls `f` for the structs of interest only, and stays out of what cannot hold any.
pub fn visit_interest_mut(
    table: &Table,
    interest: &Interest,
    ty: TypeId,
    value: &mut Value,
    f: &mut dyn FnMut(TypeId, &mut Object),
) {
    Walk { table, interest: Some(interest), f }.value(&Shape::Struct(ty), value, 0);
}

struct Walk<'w> {
    table: &'w Table,
    interest: Option<&'w Interest>,
    f: &'w mut dyn FnMut(TypeId, &mut Object),
}

impl Walk<'_> {
    /// Decoded values are never deeper than the limit; what is deeper is left alone.
    fn value(&mut self, shape: &Shape, value: &mut Value, depth: usize) {
        if depth > MAX_DEPTH {
            return;
        }
        match (shape, value) {
            (Shape::Struct(id), Value::Object(object)) => self.object(*id, object, depth),
            (Shape::List { item, .. }, Value::Array(list)) if self.may_hold(item) => {
                list.iter_mut().for_each(|value| self.value(item, value, depth + 1));
            }
            (Shape::Map { value: inner, .. }, Value::Object(map)) if self.may_hold(inner) => {
                map.values_mut().for_each(|value| self.value(inner, value, depth + 1));
            }
            _ => {}
        }
    }

    fn object(&mut self, id: TypeId, object: &mut Object, depth: usize) {
        if self.interest.is_none_or(|interest| interest.wants(id)) {
            (self.f)(id, object);
        }
        let table = self.table;
        for field in &table.get(id).fields {
            if self.may_hold(&field.shape)
                && let Some(value) = object.get_mut(&*field.name)
            {
                self.value(&field.shape, value, depth + 1);
            }
        }
    }

    fn may_hold(&self, shape: &Shape) -> bool {
        match (shape, self.interest) {
            (Shape::Struct(id), Some(interest)) => interest.leading.contains(id),
            (Shape::Struct(_), None) => true,
            (Shape::List { item: inner, .. } | Shape::Map { value: inner, .. }, _) => self.may_hold(inner),
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
    fn check(interest: Option<&[&str]>, expect: Expect) {
        let table = kubernetes();
        let interest = interest.map(|names| Interest::new(table, names.iter().copied()));
        let id = table.kind("apps", "v1", "Deployment").expect("a built-in kind");
        let mut value = json!({"metadata": {"ownerReferences": [{}]}, "spec": {"template": {"spec": {
            "containers": [{"name": "a", "ports": [{}, {}], "livenessProbe": {"httpGet": {}}}],
        }}}, "status": 5});
        let mut seen = Vec::new();
        let mut f = |id, object: &mut Object| {
            seen.push(table.get(id).short_name().to_owned());
            object.entry("name").or_insert(json!("seen"));
        };
        match interest {
            None => visit_mut(table, id, &mut value, &mut f),
            Some(interest) => visit_interest_mut(table, &interest, id, &mut value, &mut f),
        }
        expect.assert_eq(&seen.join(" "));
    }

    #[test]
    fn outer_before_inner() {
        check(
            None,
            expect![
                "Deployment ObjectMeta OwnerReference DeploymentSpec PodTemplateSpec PodSpec Container ContainerPort ContainerPort Probe HTTPGetAction"
            ],
        );
    }

    #[test]
    fn only_what_is_of_interest() {
        check(
            Some(&["io.k8s.api.core.v1.Probe", "io.k8s.api.core.v1.ContainerPort"]),
            expect!["ContainerPort ContainerPort Probe"],
        );
        check(Some(&["io.k8s.api.core.v1.Secret", "nonsense"]), expect![]);
    }
}
