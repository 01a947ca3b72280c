//! The values absent fields get, for every type wherever it occurs: a PodSpec's defaults hold in a Pod, a
//! Deployment and a CronJob alike.
//!
//! Constants are rows ([`Rule::Set`]), what depends on other fields is a small function ([`Rule::Fill`]), and
//! the few defaults OpenAPI publishes come from `schema`. The rules of a struct run before those of the
//! structs within it, as upstream's do. No clock here: `DeviceTaint.timeAdded` is its kind's own business.

mod admission;
mod core;
mod image;
mod pod;
mod small_groups;
mod workloads;

use std::collections::HashMap;
use std::sync::LazyLock;

use schema::quantity::Quantity;
use schema::{Shape, Table, TypeId};
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

static BUILT_IN: LazyLock<Index> = LazyLock::new(|| Index::new(schema::kubernetes()));

const ROWS: &[&[Row]] = &[admission::ROWS, core::ROWS, pod::ROWS, small_groups::ROWS, workloads::ROWS];

/// What there is to do for each type of a table, by its id.
struct Index(Vec<Work>);

#[derive(Default)]
struct Work {
    /// In order.
    steps: Vec<Step>,
    /// The fields whose values have work below them.
    below: Vec<Below>,
}

enum Step {
    Set { field: Box<str>, value: Value, pointer: bool },
    Fill(fn(&mut Value)),
}

struct Below {
    field: Box<str>,
    target: Target,
    /// Made if absent, for upstream sets the defaults of an empty struct that is no pointer.
    always_there: bool,
}

#[derive(Clone, Copy)]
enum Target {
    Struct(TypeId),
    Structs(TypeId),
    StructMap(TypeId),
    /// A `ResourceList`, whose quantities are kept to the thousandth.
    Resources,
}

impl Index {
    fn new(table: &Table) -> Index {
        let rows: HashMap<String, &Row> =
            ROWS.iter().copied().flatten().map(|row| (full_name(row.ty), row)).collect();
        let mut works: Vec<Work> = Vec::new();
        for (_, ty) in table.types() {
            let mut work = Work::default();
            let pointer = |name: &str| ty.field(name).is_some_and(|field| field.pointer);
            for rule in rows.get(&*ty.name).map_or(&[][..], |row| row.rules) {
                work.steps.push(match *rule {
                    Rule::Set(field, constant) => {
                        Step::Set { field: field.into(), value: constant.value(), pointer: pointer(field) }
                    }
                    Rule::Fill(fill) => Step::Fill(fill),
                });
            }
            works.push(work);
        }
        add_published_defaults(table, &mut works);
        let reaching = reaching(table, &works);
        for (id, ty) in table.types() {
            let in_core = ty.name.starts_with("io.k8s.api.core.v1.");
            let below = ty.fields.iter().filter_map(|field| {
                let target = target(&field.shape, in_core)?;
                let wanted = target.ty().is_none_or(|ty| reaching[ty.0 as usize]);
                let always_there = matches!(target, Target::Struct(_)) && !field.pointer;
                wanted.then(|| Below { field: field.name.clone(), target, always_there })
            });
            works[id.0 as usize].below = below.collect();
        }
        Index(works)
    }

    fn apply(&self, table: &Table, ty: TypeId, object: &mut Value) {
        let Some(work) = self.0.get(ty.0 as usize) else { return };
        if !object.is_object() {
            return;
        }
        for step in &work.steps {
            match step {
                Step::Fill(fill) => fill(object),
                Step::Set { field, value, pointer } => {
                    if is_unset(object.at(field), *pointer) {
                        object.set(field, value.clone());
                    }
                }
            }
        }
        for below in &work.below {
            self.apply_below(table, below, object);
        }
    }

    fn apply_below(&self, table: &Table, below: &Below, object: &mut Value) {
        if let Target::Struct(ty) = below.target
            && below.always_there
            && !object.has(&below.field)
        {
            let mut made = Value::Object(Map::new());
            self.apply(table, ty, &mut made);
            if made.as_object().is_some_and(|made| !made.is_empty()) {
                object.set(&below.field, made);
            }
            return;
        }
        let Some(value) = object.get_mut(&*below.field) else { return };
        match below.target {
            Target::Struct(ty) => self.apply(table, ty, value),
            Target::Structs(ty) => {
                value.as_array_mut().into_iter().flatten().for_each(|item| self.apply(table, ty, item));
            }
            Target::StructMap(ty) => {
                value.as_object_mut().into_iter().flatten().for_each(|(_, item)| self.apply(table, ty, item));
            }
            Target::Resources => {
                value.as_object_mut().into_iter().flatten().for_each(|(_, item)| round_to_milli(item));
            }
        }
    }
}

impl Target {
    fn ty(self) -> Option<TypeId> {
        match self {
            Target::Struct(ty) | Target::Structs(ty) | Target::StructMap(ty) => Some(ty),
            Target::Resources => None,
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
fn add_published_defaults(table: &Table, works: &mut [Work]) {
    for (id, ty) in table.types() {
        for field in &ty.fields {
            let Some(default) = &field.default else { continue };
            if field.pointer || !is_zero(default) {
                works[id.0 as usize].steps.push(Step::Set {
                    field: field.name.clone(),
                    value: default.clone(),
                    pointer: field.pointer,
                });
            }
        }
    }
}

fn target(shape: &Shape, in_core: bool) -> Option<Target> {
    match shape {
        Shape::Struct(ty) => Some(Target::Struct(*ty)),
        Shape::List { item, .. } => match **item {
            Shape::Struct(ty) => Some(Target::Structs(ty)),
            _ => None,
        },
        Shape::Map { value, .. } => match **value {
            Shape::Struct(ty) => Some(Target::StructMap(ty)),
            Shape::Quantity if in_core => Some(Target::Resources),
            _ => None,
        },
        _ => None,
    }
}

/// The types that have work, or contain one that has.
fn reaching(table: &Table, works: &[Work]) -> Vec<bool> {
    let mut reaching: Vec<bool> = works.iter().map(|work| !work.steps.is_empty()).collect();
    let mut grew = true;
    while grew {
        grew = false;
        for (id, ty) in table.types() {
            let in_core = ty.name.starts_with("io.k8s.api.core.v1.");
            let reaches = |shape: &Shape| match target(shape, in_core) {
                Some(target) => target.ty().is_none_or(|ty| reaching[ty.0 as usize]),
                None => false,
            };
            if !reaching[id.0 as usize] && ty.fields.iter().any(|field| reaches(&field.shape)) {
                reaching[id.0 as usize] = true;
                grew = true;
            }
        }
    }
    reaching
}

fn is_unset(value: &Value, pointer: bool) -> bool {
    value.is_null() || (!pointer && is_zero(value))
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
