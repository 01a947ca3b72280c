//! The values absent fields get, for every type wherever it occurs: a PodSpec's defaults hold in a Pod, a
//! Deployment and a CronJob alike.
//!
//! Constants are rows ([`Rule::Set`]), what depends on other fields is a small function ([`Rule::Fill`]), and
//! the few defaults OpenAPI publishes come from `schema`. The rules of a struct run before those of the
//! structs within it, as upstream's do. Objects come as `schema` decodes them, so structs that are always
//! written are there. No clock here: `DeviceTaint.timeAdded` is its kind's own business.

mod admission;
mod core;
mod image;
mod pod;
mod small_groups;
mod workloads;

use std::collections::HashMap;
use std::sync::LazyLock;

use schema::quantity::Quantity;
use schema::walk::{Interest, visit_interest_mut};
use schema::{Shape, Table, Type, TypeId};
use serde_json::{Map, Value};

use crate::json::Json;

/// Sets the defaults of an object of this type, in place.
pub fn set_defaults(table: &Table, ty: TypeId, object: &mut Value) {
    if std::ptr::eq(table, schema::kubernetes()) {
        BUILT_IN.apply(table, ty, object);
    } else {
        Index::new(table).apply(table, ty, object);
    }
}

/// The rules of one type; its name is the definition's without the leading `io.k8s.api.`.
struct Row {
    ty: &'static str,
    rules: &'static [Rule],
}

enum Rule {
    /// The field gets the value if it is absent (or zero, where zero means absent).
    Set(&'static str, Constant),
    /// Sees the whole struct.
    Fill(fn(&mut Value)),
}

#[derive(Clone, Copy)]
enum Constant {
    Text(&'static str),
    Int(i64),
    Flag(bool),
    /// `{}`
    Struct,
    List(&'static [&'static str]),
}

const ROWS: &[&[Row]] = &[admission::ROWS, core::ROWS, pod::ROWS, small_groups::ROWS, workloads::ROWS];

static BUILT_IN: LazyLock<Index> = LazyLock::new(|| Index::new(schema::kubernetes()));

/// What there is to do for each type of a table.
struct Index {
    steps: HashMap<TypeId, Vec<Step>>,
    interest: Interest,
}

enum Step {
    Set {
        field: Box<str>,
        value: Value,
        pointer: bool,
    },
    Fill(fn(&mut Value)),
    /// The field is a `ResourceList`, whose quantities are kept to the thousandth.
    Round {
        field: Box<str>,
    },
}

impl Index {
    fn new(table: &Table) -> Index {
        let rows: HashMap<String, &Row> =
            ROWS.iter().copied().flatten().map(|row| (full_name(row.ty), row)).collect();
        let mut index = Index { steps: HashMap::new(), interest: Interest::default() };
        let mut names = Vec::new();
        for (id, ty) in table.types() {
            let rules = rows.get(&*ty.name).map_or(&[][..], |row| row.rules);
            let own = rules.iter().map(|rule| rule.step(ty));
            let steps: Vec<Step> = own.chain(published_defaults(ty)).chain(rounded(ty)).collect();
            if !steps.is_empty() {
                names.push(&*ty.name);
                index.steps.insert(id, steps);
            }
        }
        index.interest = Interest::new(table, names);
        index
    }

    fn apply(&self, table: &Table, ty: TypeId, object: &mut Value) {
        visit_interest_mut(table, &self.interest, ty, object, &mut |ty, map| {
            let mut object = Value::Object(std::mem::take(map));
            self.steps.get(&ty).into_iter().flatten().for_each(|step| step.take(&mut object));
            if let Value::Object(filled) = object {
                *map = filled;
            }
        });
    }
}

impl Rule {
    fn step(&self, ty: &Type) -> Step {
        match *self {
            Rule::Set(field, constant) => Step::Set {
                field: field.into(),
                value: constant.value(),
                pointer: ty.field(field).is_some_and(|field| field.pointer),
            },
            Rule::Fill(fill) => Step::Fill(fill),
        }
    }
}

impl Step {
    fn take(&self, object: &mut Value) {
        match self {
            Step::Fill(fill) => fill(object),
            Step::Set { field, value, pointer } => {
                let now = object.at(field);
                if now.is_null() || (!pointer && is_zero(now)) {
                    object.set(field, value.clone());
                }
            }
            Step::Round { field } => {
                let quantities = object.get_mut(&**field).and_then(Value::as_object_mut);
                quantities.into_iter().flatten().for_each(|(_, quantity)| round_to_milli(quantity));
            }
        }
    }
}

impl Constant {
    fn value(self) -> Value {
        match self {
            Constant::Text(text) => text.into(),
            Constant::Int(number) => number.into(),
            Constant::Flag(flag) => flag.into(),
            Constant::Struct => Value::Object(Map::new()),
            Constant::List(list) => list.into(),
        }
    }
}

fn full_name(ty: &str) -> String {
    if ty.starts_with("io.") { ty.to_owned() } else { format!("io.k8s.api.{ty}") }
}

/// The defaults OpenAPI tells of, but for those that equal an absent field.
fn published_defaults(ty: &Type) -> impl Iterator<Item = Step> {
    ty.fields.iter().filter_map(|field| {
        let value = field.default.clone().filter(|default| field.pointer || !is_zero(default))?;
        Some(Step::Set { field: field.name.clone(), value, pointer: field.pointer })
    })
}

/// The core group's maps of quantities are all `ResourceList`s.
fn rounded(ty: &Type) -> impl Iterator<Item = Step> {
    let in_core = ty.name.starts_with("io.k8s.api.core.v1.");
    let is_list = |shape: &Shape| matches!(shape, Shape::Map { value, .. } if **value == Shape::Quantity);
    let lists = ty.fields.iter().filter(move |field| in_core && is_list(&field.shape));
    lists.map(|field| Step::Round { field: field.name.clone() })
}

fn is_zero(value: &Value) -> bool {
    match value {
        Value::Null => true,
        Value::Bool(flag) => !flag,
        Value::Number(number) => number.as_f64() == Some(0.0),
        Value::String(text) => text.is_empty(),
        Value::Array(list) => list.is_empty(),
        Value::Object(map) => map.is_empty(),
    }
}

/// Only canonical forms with a suffix finer than `m` can need it.
fn round_to_milli(value: &mut Value) {
    let Some(text) = value.as_str().filter(|text| text.ends_with(['n', 'u']) || text.contains("e-")) else {
        return;
    };
    if let Ok(rounded) = Quantity::parse(text).map(Quantity::rounded_to_milli) {
        *value = rounded.to_string().into();
    }
}

#[cfg(test)]
mod tests;
