//! What an expression can cost, judged before it ever runs, by the largest values its variables' schemas allow. A
//! rule of a CustomResourceDefinition is refused by this judgement, so it has to be upstream's to the unit.

mod calls;
mod range;

use std::collections::HashMap;
use std::sync::{Arc, LazyLock};

use crate::ast::{Fold, Id, Kind, Literal};
use crate::check::Checked;
use crate::decl::Decl;
use crate::eval::cost::{LIST, MAP, STRUCT};
use crate::types::Type;
pub use range::Range as Cost;
use range::Range;

pub(crate) fn estimate(checked: &Checked, variables: &HashMap<String, Arc<Decl>>) -> Cost {
    let mut estimation = Estimation {
        checked,
        variables,
        locals: Vec::new(),
        origins: HashMap::new(),
        sizes: HashMap::new(),
        entries: HashMap::new(),
        costs: HashMap::new(),
    };
    estimation.cost(checked.ast.root)
}

/// The sizes of what is in a list or map.
#[derive(Clone, Copy)]
struct Entries {
    list: bool,
    key: Range,
    value: Range,
}

impl Entries {
    fn union(a: Option<Entries>, b: Option<Entries>) -> Option<Entries> {
        let (a, b) = (a?, b?);
        Some(Entries { list: a.list, key: a.key.union(b.key), value: a.value.union(b.value) })
    }
}

/// Where in the schemas a value comes from.
#[derive(Clone, Copy)]
enum Origin<'a> {
    /// It was made by the expression.
    Nowhere,
    /// There, but the schemas say nothing about it.
    Unknown,
    Known(&'a Decl),
}

struct Local<'a> {
    name: &'a str,
    origin: Origin<'a>,
    size: Option<Range>,
    entries: Option<Entries>,
}

struct Estimation<'a> {
    checked: &'a Checked,
    variables: &'a HashMap<String, Arc<Decl>>,
    locals: Vec<Local<'a>>,
    origins: HashMap<Id, Origin<'a>>,
    sizes: HashMap<Id, Range>,
    entries: HashMap<Id, Entries>,
    costs: HashMap<Id, Range>,
}

/// Keys of maps have no length of their own in a schema.
static KEY: LazyLock<Decl> = LazyLock::new(|| Decl { max: 0, ..Decl::new(Type::String) });

impl<'a> Estimation<'a> {
    fn cost(&mut self, id: Id) -> Range {
        if let Some(cost) = self.costs.get(&id) {
            return *cost;
        }
        let cost = self.find(id);
        self.costs.insert(id, cost);
        cost
    }

    fn find(&mut self, id: Id) -> Range {
        match self.checked.ast.kind(id) {
            Kind::Broken | Kind::Literal(_) => Range::ZERO,
            Kind::Ident(_) => Range::fixed(1),
            Kind::Select { operand, test: true, .. } => self.cost(*operand),
            Kind::Select { operand, field, .. } => {
                let mut cost = self.cost(*operand);
                if matches!(self.checked.ty(*operand), Type::Map(_) | Type::Object(_)) {
                    cost = cost.add(Range::fixed(1));
                }
                let origin = self.inside(*operand, |decl| decl.field(field).map(|field| &field.decl));
                self.origins.insert(id, origin);
                cost
            }
            Kind::Call { function, target, args } => self.call(id, function, *target, args),
            Kind::List { items, .. } => {
                let (cost, value) = self.elements(items.iter().copied());
                self.entries.insert(id, Entries { list: true, key: Range::fixed(1), value });
                cost.add(Range::fixed(LIST))
            }
            Kind::Map(entries) => {
                let (keys, key) = self.elements(entries.iter().map(|entry| entry.key));
                let (values, value) = self.elements(entries.iter().map(|entry| entry.value));
                self.entries.insert(id, Entries { list: false, key, value });
                keys.add(values).add(Range::fixed(MAP))
            }
            Kind::Struct { fields, .. } => {
                let (cost, _) = self.elements(fields.iter().map(|field| field.value));
                cost.add(Range::fixed(STRUCT))
            }
            Kind::Fold(fold) if self.is_binding(fold) => self.binding(id, fold),
            Kind::Fold(fold) => self.fold(id, fold),
        }
    }

    /// What the elements of a literal cost together, and what sizes they have.
    fn elements(&mut self, ids: impl Iterator<Item = Id>) -> (Range, Range) {
        let mut cost = Range::ZERO;
        let mut size: Option<Range> = None;
        for id in ids {
            cost = cost.add(self.cost(id));
            let one = self.size_or_unknown(id);
            size = Some(size.map_or(one, |size| size.union(one)));
        }
        (cost, size.unwrap_or(Range::ZERO))
    }

    fn is_binding(&self, fold: &Fold) -> bool {
        let ast = &self.checked.ast;
        matches!(ast.kind(fold.range), Kind::List { items, .. } if items.is_empty())
            && matches!(ast.kind(fold.condition), Kind::Literal(Literal::Bool(false)))
            && fold.accumulator != crate::ast::ACCUMULATOR
    }

    fn binding(&mut self, id: Id, fold: &'a Fold) -> Range {
        let cost = self.cost(fold.range).add(self.cost(fold.init));
        self.push_value(&fold.accumulator, fold.init);
        let cost = cost.add(self.cost(fold.result));
        self.locals.pop();
        self.copy_sizes(id, fold.result);
        cost
    }

    fn fold(&mut self, id: Id, fold: &'a Fold) -> Range {
        let cost = self.cost(fold.range).add(self.cost(fold.init));
        self.push_value(&fold.accumulator, fold.init);
        self.push_items(fold);
        let each = self.cost(fold.condition).add(self.cost(fold.step));
        self.locals.truncate(self.locals.len() - if fold.second.is_some() { 2 } else { 1 });
        let cost = cost.add(self.cost(fold.result));
        self.locals.pop();
        let rounds = self.size_or_unknown(fold.range);
        let cost = cost.add(rounds.multiply(each));
        match self.checked.ast.kind(fold.init) {
            Kind::Literal(_) => {
                if let Some(size) = self.size(fold.init) {
                    self.sizes.insert(id, size);
                }
            }
            Kind::List { .. } | Kind::Map(_) => {
                self.sizes.insert(id, rounds);
                if let Some(entries) = self.entries_of(fold.step) {
                    self.entries.insert(id, entries);
                }
            }
            _ => {}
        }
        cost
    }

    fn push_value(&mut self, name: &'a str, id: Id) {
        let local =
            Local { name, origin: self.origin(id), size: self.size(id), entries: self.entries_of(id) };
        self.locals.push(local);
    }

    fn push_items(&mut self, fold: &'a Fold) {
        let entries = self.entries_of(fold.range);
        let list = match entries {
            Some(entries) => entries.list,
            None => matches!(self.checked.ty(fold.range), Type::List(_)),
        };
        let keys =
            self.inside(fold.range, |decl| if list || decl.items.is_none() { None } else { Some(&*KEY) });
        let items = self.inside(fold.range, |decl| decl.items.as_deref());
        let key = Local {
            name: &fold.variable,
            origin: keys,
            size: entries.map(|entries| entries.key),
            entries: None,
        };
        let value = |name: &'a str| Local {
            name,
            origin: items,
            size: entries.map(|entries| entries.value),
            entries: None,
        };
        match &fold.second {
            Some(second) => self.locals.extend([key, value(second)]),
            None if list => self.locals.push(value(&fold.variable)),
            None => self.locals.push(key),
        }
    }

    fn local(&self, name: &str) -> Option<&Local<'a>> {
        self.locals.iter().rev().find(|local| local.name == name)
    }

    fn origin(&self, id: Id) -> Origin<'a> {
        if let Kind::Ident(name) = self.checked.ast.kind(id) {
            return match self.local(name) {
                Some(local) => local.origin,
                None => self.variables.get(name).map_or_else(|| self.root(), |decl| Origin::Known(decl)),
            };
        }
        self.origins.get(&id).copied().unwrap_or(Origin::Nowhere)
    }

    /// Where a part of a value comes from. Upstream takes the first step of every path for the variable's name, so
    /// a part of something from nowhere counts as the rule's own value.
    fn inside(&self, whole: Id, part: impl FnOnce(&'a Decl) -> Option<&'a Decl>) -> Origin<'a> {
        match self.origin(whole) {
            Origin::Nowhere => self.root(),
            Origin::Unknown => Origin::Unknown,
            Origin::Known(decl) => part(decl).map_or(Origin::Unknown, Origin::Known),
        }
    }

    fn root(&self) -> Origin<'a> {
        self.variables.get("self").map_or(Origin::Unknown, |decl| Origin::Known(decl))
    }

    fn size(&mut self, id: Id) -> Option<Range> {
        if let Some(size) = self.sizes.get(&id) {
            return Some(*size);
        }
        let own = match self.checked.ast.kind(id) {
            Kind::Literal(Literal::String(text)) => Some(text.chars().count() as u64),
            Kind::Literal(Literal::Bytes(bytes)) => Some(bytes.len() as u64),
            Kind::Literal(_) => Some(1),
            Kind::List { items, .. } => Some(items.len() as u64),
            Kind::Map(entries) => Some(entries.len() as u64),
            _ => None,
        };
        if let Some(own) = own {
            return Some(Range::fixed(own));
        }
        if let Origin::Known(decl) = self.origin(id) {
            let size = Range { min: 0, max: decl.max };
            self.sizes.insert(id, size);
            return Some(size);
        }
        if self.checked.ty(id).is_scalar() {
            return Some(Range::fixed(1));
        }
        match self.checked.ast.kind(id) {
            Kind::Ident(name) => self.local(name).and_then(|local| local.size),
            _ => None,
        }
    }

    fn size_or_unknown(&mut self, id: Id) -> Range {
        self.size(id).unwrap_or(Range::UNKNOWN)
    }

    fn entries_of(&self, id: Id) -> Option<Entries> {
        if let Some(entries) = self.entries.get(&id) {
            return Some(*entries);
        }
        match self.checked.ast.kind(id) {
            Kind::Ident(name) => self.local(name).and_then(|local| local.entries),
            _ => None,
        }
    }

    fn copy_sizes(&mut self, to: Id, from: Id) {
        if let Some(size) = self.size(from) {
            self.sizes.insert(to, size);
        }
        if let Some(entries) = self.entries_of(from) {
            self.entries.insert(to, entries);
        }
    }
}
