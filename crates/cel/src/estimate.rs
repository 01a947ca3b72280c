//! Estimates the cost of an expression from the maximum sizes that the schemas of its variables allow.
//! Validation rules of CustomResourceDefinitions are rejected by this estimate, so it must equal
//! upstream's exactly. Upstream: `checker/cost.go` in cel-go and `apiserver/pkg/cel/library/cost.go`.

mod calls;
mod range;

use std::collections::HashMap;
use std::sync::{Arc, LazyLock};

use crate::ast::{Comprehension, ExprKind, Id, Literal};
use crate::check::Checked;
use crate::decl::Decl;
use crate::eval::cost::{LIST_CREATE_BASE_COST, MAP_CREATE_BASE_COST, STRUCT_CREATE_BASE_COST};
use crate::types::Type;
pub use range::Estimate as Cost;
use range::Estimate;

pub(crate) fn estimate(checked: &Checked, variables: &HashMap<String, Arc<Decl>>) -> Cost {
    let mut estimator = CostEstimator {
        checked,
        variables,
        scope: Vec::new(),
        path_decls: HashMap::new(),
        size_cache: HashMap::new(),
        entry_sizes: HashMap::new(),
        cost_cache: HashMap::new(),
    };
    estimator.cost(checked.ast.root)
}

/// The sizes of the keys and values in a list or map.
#[derive(Clone, Copy)]
struct EntrySizes {
    list: bool,
    key: Estimate,
    value: Estimate,
}

impl EntrySizes {
    fn union(a: Option<EntrySizes>, b: Option<EntrySizes>) -> Option<EntrySizes> {
        let (a, b) = (a?, b?);
        Some(EntrySizes { list: a.list, key: a.key.union(b.key), value: a.value.union(b.value) })
    }
}

/// The origin of a value in the schemas.
#[derive(Clone, Copy)]
enum DeclPath<'a> {
    /// The value was created by the expression.
    NoPath,
    /// The value comes from a variable, but the schemas do not describe it.
    Unknown,
    Known(&'a Decl),
}

struct ScopeEntry<'a> {
    name: &'a str,
    path: DeclPath<'a>,
    size: Option<Estimate>,
    entry_sizes: Option<EntrySizes>,
}

struct CostEstimator<'a> {
    checked: &'a Checked,
    variables: &'a HashMap<String, Arc<Decl>>,
    scope: Vec<ScopeEntry<'a>>,
    path_decls: HashMap<Id, DeclPath<'a>>,
    size_cache: HashMap<Id, Estimate>,
    entry_sizes: HashMap<Id, EntrySizes>,
    cost_cache: HashMap<Id, Estimate>,
}

/// Schemas do not limit the length of map keys.
static MAP_KEY_DECL: LazyLock<Decl> = LazyLock::new(|| Decl { max: 0, ..Decl::new(Type::String) });

impl<'a> CostEstimator<'a> {
    fn cost(&mut self, id: Id) -> Estimate {
        if let Some(cost) = self.cost_cache.get(&id) {
            return *cost;
        }
        let cost = self.estimate_expr(id);
        self.cost_cache.insert(id, cost);
        cost
    }

    fn estimate_expr(&mut self, id: Id) -> Estimate {
        match self.checked.ast.kind(id) {
            ExprKind::Unspecified | ExprKind::Literal(_) => Estimate::ZERO,
            ExprKind::Ident(_) => Estimate::fixed(1),
            ExprKind::Select { operand, test: true, .. } => self.cost(*operand),
            ExprKind::Select { operand, field, .. } => {
                let mut cost = self.cost(*operand);
                if matches!(self.checked.ty(*operand), Type::Map(_) | Type::Object(_)) {
                    cost = cost.add(Estimate::fixed(1));
                }
                let path = self.path_inside(*operand, |decl| decl.field(field).map(|field| &field.decl));
                self.path_decls.insert(id, path);
                cost
            }
            ExprKind::Call { function, target, args } => self.call(id, function, *target, args),
            ExprKind::List { items, .. } => {
                let (cost, value) = self.elements(items.iter().copied());
                self.entry_sizes.insert(id, EntrySizes { list: true, key: Estimate::fixed(1), value });
                cost.add(Estimate::fixed(LIST_CREATE_BASE_COST))
            }
            ExprKind::Map(entries) => {
                let (keys, key) = self.elements(entries.iter().map(|entry| entry.key));
                let (values, value) = self.elements(entries.iter().map(|entry| entry.value));
                self.entry_sizes.insert(id, EntrySizes { list: false, key, value });
                keys.add(values).add(Estimate::fixed(MAP_CREATE_BASE_COST))
            }
            ExprKind::Struct { fields, .. } => {
                let (cost, _) = self.elements(fields.iter().map(|field| field.value));
                cost.add(Estimate::fixed(STRUCT_CREATE_BASE_COST))
            }
            ExprKind::Comprehension(comprehension) if self.is_binding(comprehension) => {
                self.binding_cost(id, comprehension)
            }
            ExprKind::Comprehension(comprehension) => self.comprehension_cost(id, comprehension),
        }
    }

    /// The total cost of the elements of a literal, and their sizes.
    fn elements(&mut self, ids: impl Iterator<Item = Id>) -> (Estimate, Estimate) {
        let mut cost = Estimate::ZERO;
        let mut size: Option<Estimate> = None;
        for id in ids {
            cost = cost.add(self.cost(id));
            let one = self.size_or_unknown(id);
            size = Some(size.map_or(one, |size| size.union(one)));
        }
        (cost, size.unwrap_or(Estimate::ZERO))
    }

    fn is_binding(&self, comprehension: &Comprehension) -> bool {
        let ast = &self.checked.ast;
        matches!(ast.kind(comprehension.iter_range), ExprKind::List { items, .. } if items.is_empty())
            && matches!(ast.kind(comprehension.loop_condition), ExprKind::Literal(Literal::Bool(false)))
            && comprehension.accu_var != crate::ast::ACCUMULATOR_NAME
    }

    fn binding_cost(&mut self, id: Id, comprehension: &'a Comprehension) -> Estimate {
        let cost = self.cost(comprehension.iter_range).add(self.cost(comprehension.accu_init));
        self.push_value(&comprehension.accu_var, comprehension.accu_init);
        let cost = cost.add(self.cost(comprehension.result));
        self.scope.pop();
        self.copy_sizes(id, comprehension.result);
        cost
    }

    fn comprehension_cost(&mut self, id: Id, comprehension: &'a Comprehension) -> Estimate {
        let cost = self.cost(comprehension.iter_range).add(self.cost(comprehension.accu_init));
        self.push_value(&comprehension.accu_var, comprehension.accu_init);
        self.push_items(comprehension);
        let step_cost = self.cost(comprehension.loop_condition).add(self.cost(comprehension.loop_step));
        self.scope.truncate(self.scope.len() - if comprehension.iter_var2.is_some() { 2 } else { 1 });
        let cost = cost.add(self.cost(comprehension.result));
        self.scope.pop();
        let iterations = self.size_or_unknown(comprehension.iter_range);
        let cost = cost.add(iterations.multiply(step_cost));
        match self.checked.ast.kind(comprehension.accu_init) {
            ExprKind::Literal(_) => {
                if let Some(size) = self.size(comprehension.accu_init) {
                    self.size_cache.insert(id, size);
                }
            }
            ExprKind::List { .. } | ExprKind::Map(_) => {
                self.size_cache.insert(id, iterations);
                if let Some(entries) = self.entries_of(comprehension.loop_step) {
                    self.entry_sizes.insert(id, entries);
                }
            }
            _ => {}
        }
        cost
    }

    fn push_value(&mut self, name: &'a str, id: Id) {
        let local = ScopeEntry {
            name,
            path: self.path_of(id),
            size: self.size(id),
            entry_sizes: self.entries_of(id),
        };
        self.scope.push(local);
    }

    fn push_items(&mut self, comprehension: &'a Comprehension) {
        let entries = self.entries_of(comprehension.iter_range);
        let list = match entries {
            Some(entries) => entries.list,
            None => matches!(self.checked.ty(comprehension.iter_range), Type::List(_)),
        };
        let keys = self.path_inside(comprehension.iter_range, |decl| {
            if list || decl.items.is_none() { None } else { Some(&*MAP_KEY_DECL) }
        });
        let items = self.path_inside(comprehension.iter_range, |decl| decl.items.as_deref());
        let key = ScopeEntry {
            name: &comprehension.iter_var,
            path: keys,
            size: entries.map(|entries| entries.key),
            entry_sizes: None,
        };
        let value = |name: &'a str| ScopeEntry {
            name,
            path: items,
            size: entries.map(|entries| entries.value),
            entry_sizes: None,
        };
        match &comprehension.iter_var2 {
            Some(second) => self.scope.extend([key, value(second)]),
            None if list => self.scope.push(value(&comprehension.iter_var)),
            None => self.scope.push(key),
        }
    }

    fn local(&self, name: &str) -> Option<&ScopeEntry<'a>> {
        self.scope.iter().rev().find(|local| local.name == name)
    }

    fn path_of(&self, id: Id) -> DeclPath<'a> {
        if let ExprKind::Ident(name) = self.checked.ast.kind(id) {
            return match self.local(name) {
                Some(local) => local.path,
                None => self.variables.get(name).map_or_else(|| self.root(), |decl| DeclPath::Known(decl)),
            };
        }
        self.path_decls.get(&id).copied().unwrap_or(DeclPath::NoPath)
    }

    /// The origin of a part of a value. Upstream takes the first segment of every path for the variable
    /// name, so a part of a value without origin is treated as `self`.
    fn path_inside(&self, whole: Id, part: impl FnOnce(&'a Decl) -> Option<&'a Decl>) -> DeclPath<'a> {
        match self.path_of(whole) {
            DeclPath::NoPath => self.root(),
            DeclPath::Unknown => DeclPath::Unknown,
            DeclPath::Known(decl) => part(decl).map_or(DeclPath::Unknown, DeclPath::Known),
        }
    }

    fn root(&self) -> DeclPath<'a> {
        self.variables.get("self").map_or(DeclPath::Unknown, |decl| DeclPath::Known(decl))
    }

    fn size(&mut self, id: Id) -> Option<Estimate> {
        if let Some(size) = self.size_cache.get(&id) {
            return Some(*size);
        }
        let own = match self.checked.ast.kind(id) {
            ExprKind::Literal(Literal::String(text)) => Some(text.chars().count() as u64),
            ExprKind::Literal(Literal::Bytes(bytes)) => Some(bytes.len() as u64),
            ExprKind::Literal(_) => Some(1),
            ExprKind::List { items, .. } => Some(items.len() as u64),
            ExprKind::Map(entries) => Some(entries.len() as u64),
            _ => None,
        };
        if let Some(own) = own {
            return Some(Estimate::fixed(own));
        }
        if let DeclPath::Known(decl) = self.path_of(id) {
            let size = Estimate { min: 0, max: decl.max };
            self.size_cache.insert(id, size);
            return Some(size);
        }
        if self.checked.ty(id).is_scalar() {
            return Some(Estimate::fixed(1));
        }
        match self.checked.ast.kind(id) {
            ExprKind::Ident(name) => self.local(name).and_then(|local| local.size),
            _ => None,
        }
    }

    fn size_or_unknown(&mut self, id: Id) -> Estimate {
        self.size(id).unwrap_or(Estimate::UNKNOWN)
    }

    fn entries_of(&self, id: Id) -> Option<EntrySizes> {
        if let Some(entries) = self.entry_sizes.get(&id) {
            return Some(*entries);
        }
        match self.checked.ast.kind(id) {
            ExprKind::Ident(name) => self.local(name).and_then(|local| local.entry_sizes),
            _ => None,
        }
    }

    fn copy_sizes(&mut self, to: Id, from: Id) {
        if let Some(size) = self.size(from) {
            self.size_cache.insert(to, size);
        }
        if let Some(entries) = self.entries_of(from) {
            self.entry_sizes.insert(to, entries);
        }
    }
}
