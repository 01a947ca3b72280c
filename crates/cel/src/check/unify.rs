//! Whether one type can stand where another is wanted, and what that makes of type variables.

use std::collections::HashMap;
use std::sync::Arc;

use crate::types::Type;

/// What type variables stand for. Attempts that fail are undone.
#[derive(Default)]
pub(super) struct Substitution {
    bound: HashMap<Arc<str>, Type>,
    trail: Vec<(Arc<str>, Option<Type>)>,
    fresh: usize,
}

impl Substitution {
    pub fn variable(&mut self) -> Type {
        self.fresh += 1;
        Type::Param(format!("_var{}", self.fresh - 1).into())
    }

    /// Whether `from` can be assigned to `to`; if so, their variables are bound accordingly.
    pub fn assignable(&mut self, to: &Type, from: &Type) -> bool {
        self.all_assignable(std::slice::from_ref(to), std::slice::from_ref(from))
    }

    pub fn all_assignable(&mut self, to: &[Type], from: &[Type]) -> bool {
        self.trail.clear();
        if self.lists(to, from) {
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

    /// `ty` with bound variables replaced, and unbound ones by `dyn` if `close`.
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

    fn lists(&mut self, a: &[Type], b: &[Type]) -> bool {
        a.len() == b.len() && a.iter().zip(b).all(|(a, b)| self.unify(a, b))
    }

    fn unify(&mut self, a: &Type, b: &Type) -> bool {
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
            (Type::List(a), Type::List(b)) => self.unify(a, b),
            (Type::Map(a), Type::Map(b)) => self.unify(&a.0, &b.0) && self.unify(&a.1, &b.1),
            (Type::Opaque(name, p), Type::Opaque(other, q)) => name == other && self.lists(p, q),
            _ => a == b,
        }
    }

    /// Whether the variable can stand for `ty`, and whether it stood for something already.
    fn bind(&mut self, ty: &Type, name: &Arc<str>) -> (bool, bool) {
        if matches!(ty, Type::Param(other) if other == name) {
            return (true, true);
        }
        if let Some(bound) = self.bound.get(name).cloned() {
            if *ty == bound {
                return (true, true);
            }
            if !self.unify(ty, &bound) {
                return (false, true);
            }
            let general = more_general(ty, &bound);
            if !self.occurs(name, &general) {
                self.set(name, general);
            }
            return (true, true);
        }
        if self.occurs(name, ty) {
            return (false, false);
        }
        self.set(name, ty.clone());
        (true, false)
    }

    fn set(&mut self, name: &Arc<str>, ty: Type) {
        let old = self.bound.insert(name.clone(), ty);
        self.trail.push((name.clone(), old));
    }

    /// A variable must not stand for something that contains it.
    fn occurs(&self, name: &Arc<str>, within: &Type) -> bool {
        match within {
            Type::Param(other) => {
                other == name || self.bound.get(other).is_some_and(|bound| self.occurs(name, bound))
            }
            Type::List(item) => self.occurs(name, item),
            Type::Map(types) => self.occurs(name, &types.0) || self.occurs(name, &types.1),
            Type::Opaque(_, parameters) => parameters.iter().any(|parameter| self.occurs(name, parameter)),
            Type::Type(Some(inner)) => self.occurs(name, inner),
            _ => false,
        }
    }
}

/// The less specific of two types that agree.
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
