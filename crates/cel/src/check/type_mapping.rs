//! Checks whether a type is assignable to another, and binds type variables accordingly.

use std::collections::HashMap;
use std::sync::Arc;

use crate::types::Type;

/// The bindings of type variables. Failed attempts are rolled back.
#[derive(Default)]
pub(super) struct TypeMapping {
    bound: HashMap<Arc<str>, Type>,
    trail: Vec<(Arc<str>, Option<Type>)>,
    next_type_var: usize,
}

impl TypeMapping {
    pub fn new_type_var(&mut self) -> Type {
        self.next_type_var += 1;
        Type::Param(format!("_var{}", self.next_type_var - 1).into())
    }

    /// Whether `from` is assignable to `to`. If so, their type variables are bound accordingly.
    pub fn assignable(&mut self, to: &Type, from: &Type) -> bool {
        self.all_assignable(std::slice::from_ref(to), std::slice::from_ref(from))
    }

    pub fn all_assignable(&mut self, to: &[Type], from: &[Type]) -> bool {
        self.trail.clear();
        if self.are_assignable(to, from) {
            return true;
        }
        while let Some((name, old)) = self.trail.pop() {
            match old {
                Some(old) => self.bound.insert(name, old),
                None => self.bound.remove(&name),
            };
        }
        false
    }

    /// Replaces bound type variables in `ty`. Unbound ones become `dyn` if `close` is set.
    pub fn apply(&self, ty: &Type, close: bool) -> Type {
        match ty {
            Type::Param(name) => match self.bound.get(name) {
                Some(bound) => self.apply(bound, close),
                None if close => Type::Dyn,
                None => ty.clone(),
            },
            Type::List(item) => Type::list(self.apply(item, close)),
            Type::Map(types) => Type::map(self.apply(&types.0, close), self.apply(&types.1, close)),
            Type::Opaque(name, parameters) if !parameters.is_empty() => {
                Type::Opaque(name, parameters.iter().map(|parameter| self.apply(parameter, close)).collect())
            }
            Type::Type(Some(inner)) => Type::Type(Some(Arc::new(self.apply(inner, close)))),
            _ => ty.clone(),
        }
    }

    fn are_assignable(&mut self, a: &[Type], b: &[Type]) -> bool {
        a.len() == b.len() && a.iter().zip(b).all(|(a, b)| self.is_assignable(a, b))
    }

    fn is_assignable(&mut self, a: &Type, b: &Type) -> bool {
        if let Type::Param(name) = b {
            match self.bind(a, name) {
                (true, _) => return true,
                (false, true) => return false,
                (false, false) => {}
            }
        }
        if let Type::Param(name) = a {
            return self.bind(b, name).0;
        }
        if a.is_dyn_or_error() || b.is_dyn_or_error() {
            return true;
        }
        match (a, b) {
            (Type::Null, other) | (other, Type::Null) => nullable(other),
            (Type::Type(_), Type::Type(_)) => true,
            (Type::List(a), Type::List(b)) => self.is_assignable(a, b),
            (Type::Map(a), Type::Map(b)) => self.is_assignable(&a.0, &b.0) && self.is_assignable(&a.1, &b.1),
            (Type::Opaque(name, p), Type::Opaque(other, q)) => name == other && self.are_assignable(p, q),
            _ => a == b,
        }
    }

    /// Binds a type variable to `ty`. Returns whether that is possible and whether the variable was
    /// bound before.
    fn bind(&mut self, ty: &Type, name: &Arc<str>) -> (bool, bool) {
        if matches!(ty, Type::Param(other) if other == name) {
            return (true, true);
        }
        if let Some(bound) = self.bound.get(name).cloned() {
            if *ty == bound {
                return (true, true);
            }
            if !self.is_assignable(ty, &bound) {
                return (false, true);
            }
            let general = more_general(ty, &bound);
            if !self.contains_type_param(name, &general) {
                self.set(name, general);
            }
            return (true, true);
        }
        if self.contains_type_param(name, ty) {
            return (false, false);
        }
        self.set(name, ty.clone());
        (true, false)
    }

    fn set(&mut self, name: &Arc<str>, ty: Type) {
        let old = self.bound.insert(name.clone(), ty);
        self.trail.push((name.clone(), old));
    }

    /// The occurs check: a type variable must not be bound to a type that contains it.
    fn contains_type_param(&self, name: &Arc<str>, within: &Type) -> bool {
        match within {
            Type::Param(other) => {
                other == name
                    || self.bound.get(other).is_some_and(|bound| self.contains_type_param(name, bound))
            }
            Type::List(item) => self.contains_type_param(name, item),
            Type::Map(types) => {
                self.contains_type_param(name, &types.0) || self.contains_type_param(name, &types.1)
            }
            Type::Opaque(_, parameters) => {
                parameters.iter().any(|parameter| self.contains_type_param(name, parameter))
            }
            Type::Type(Some(inner)) => self.contains_type_param(name, inner),
            _ => false,
        }
    }
}

/// The more general one of two compatible types.
pub(super) fn more_general(a: &Type, b: &Type) -> Type {
    if less_specific(a, b) { a.clone() } else { b.clone() }
}

fn less_specific(a: &Type, b: &Type) -> bool {
    match (a, b) {
        (Type::Dyn | Type::Param(_), _) => true,
        (_, Type::Dyn | Type::Param(_)) => false,
        (Type::List(a), Type::List(b)) => less_specific(a, b),
        (Type::Map(a), Type::Map(b)) => less_specific(&a.0, &b.0) && less_specific(&a.1, &b.1),
        (Type::Opaque(name, p), Type::Opaque(other, q)) => {
            name == other && p.len() == q.len() && p.iter().zip(q.iter()).all(|(a, b)| less_specific(a, b))
        }
        (Type::Type(_), Type::Type(_)) => true,
        _ => a == b,
    }
}

fn nullable(ty: &Type) -> bool {
    matches!(ty, Type::Null | Type::Opaque(..) | Type::Object(_) | Type::Duration | Type::Timestamp)
}
