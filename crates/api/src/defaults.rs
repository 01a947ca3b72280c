//! The defaults of all types, at every occurrence: the defaults of PodSpec apply to Pods, Deployments
//! and CronJobs alike.
//!
//! Constant defaults are rows ([`DefaultRule::Set`]), defaults that depend on other fields are
//! functions ([`DefaultRule::Apply`]), and the few defaults that OpenAPI publishes come from `schema`.
//! The rules of a struct run before those of nested structs, as upstream. Objects have been decoded by
//! `schema`, so structs without `omitempty` are present. There is no clock here:
//! `DeviceTaint.timeAdded` is set by the strategy of ResourceSlice.

mod admission;
mod core;
mod image;
mod other_groups;
mod pod;
mod workloads;

use std::collections::HashMap;
use std::sync::LazyLock;

use schema::quantity::Quantity;
use schema::walk::{TypeFilter, visit_filtered_mut};
use schema::{Shape, Table, Type, TypeId};
use serde_json::{Map, Value};

use crate::json::JsonExt;

/// Sets the defaults of an object of this type.
pub fn set_defaults(table: &Table, ty: TypeId, object: &mut Value) {
    if std::ptr::eq(table, schema::kubernetes()) {
        BUILTIN_DEFAULTS.apply(table, ty, object);
    } else {
        Defaulter::new(table).apply(table, ty, object);
    }
}

/// The rules of a type. The name is the definition name without `io.k8s.api.`.
struct TypeDefaults {
    ty: &'static str,
    rules: &'static [DefaultRule],
}

enum DefaultRule {
    /// Sets the field if it is absent (or zero, if the field is not a pointer).
    Set(&'static str, DefaultValue),
    /// Applies a function to the struct.
    Apply(fn(&mut Value)),
}

#[derive(Clone, Copy)]
enum DefaultValue {
    Text(&'static str),
    Int(i64),
    Flag(bool),
    /// `{}`
    Struct,
    List(&'static [&'static str]),
}

const TYPE_DEFAULTS: &[&[TypeDefaults]] = &[
    admission::TYPE_DEFAULTS,
    core::TYPE_DEFAULTS,
    pod::TYPE_DEFAULTS,
    other_groups::TYPE_DEFAULTS,
    workloads::TYPE_DEFAULTS,
];

static BUILTIN_DEFAULTS: LazyLock<Defaulter> = LazyLock::new(|| Defaulter::new(schema::kubernetes()));

/// The default steps of all types of a table.
struct Defaulter {
    steps: HashMap<TypeId, Vec<DefaultStep>>,
    filter: TypeFilter,
}

enum DefaultStep {
    Set {
        field: Box<str>,
        value: Value,
        pointer: bool,
    },
    Apply(fn(&mut Value)),
    /// Rounds the quantities of a `ResourceList` field to thousandths.
    Round {
        field: Box<str>,
    },
}

impl Defaulter {
    fn new(table: &Table) -> Defaulter {
        let rows: HashMap<String, &TypeDefaults> =
            TYPE_DEFAULTS.iter().copied().flatten().map(|row| (full_name(row.ty), row)).collect();
        let mut defaulter = Defaulter { steps: HashMap::new(), filter: TypeFilter::default() };
        let mut names = Vec::new();
        for (id, ty) in table.types() {
            let rules = rows.get(&*ty.name).map_or(&[][..], |row| row.rules);
            let own = rules.iter().map(|rule| rule.to_step(ty));
            let steps: Vec<DefaultStep> = own.chain(openapi_defaults(ty)).chain(round_steps(ty)).collect();
            if !steps.is_empty() {
                names.push(&*ty.name);
                defaulter.steps.insert(id, steps);
            }
        }
        defaulter.filter = TypeFilter::new(table, names);
        defaulter
    }

    fn apply(&self, table: &Table, ty: TypeId, object: &mut Value) {
        visit_filtered_mut(table, &self.filter, ty, object, &mut |ty, map| {
            let mut object = Value::Object(std::mem::take(map));
            self.steps.get(&ty).into_iter().flatten().for_each(|step| step.apply(&mut object));
            if let Value::Object(filled) = object {
                *map = filled;
            }
        });
    }
}

impl DefaultRule {
    fn to_step(&self, ty: &Type) -> DefaultStep {
        match *self {
            DefaultRule::Set(field, constant) => DefaultStep::Set {
                field: field.into(),
                value: constant.value(),
                pointer: ty.field(field).is_some_and(|field| field.pointer),
            },
            DefaultRule::Apply(apply) => DefaultStep::Apply(apply),
        }
    }
}

impl DefaultStep {
    fn apply(&self, object: &mut Value) {
        match self {
            DefaultStep::Apply(apply) => apply(object),
            DefaultStep::Set { field, value, pointer } => {
                let current = object.at(field);
                if current.is_null() || (!pointer && is_zero(current)) {
                    object.set(field, value.clone());
                }
            }
            DefaultStep::Round { field } => {
                let resource_list = object.get_mut(&**field).and_then(Value::as_object_mut);
                resource_list.into_iter().flatten().for_each(|(_, quantity)| round_to_milli(quantity));
            }
        }
    }
}

impl DefaultValue {
    fn value(self) -> Value {
        match self {
            DefaultValue::Text(text) => text.into(),
            DefaultValue::Int(number) => number.into(),
            DefaultValue::Flag(flag) => flag.into(),
            DefaultValue::Struct => Value::Object(Map::new()),
            DefaultValue::List(list) => list.into(),
        }
    }
}

fn full_name(ty: &str) -> String {
    if ty.starts_with("io.") { ty.to_owned() } else { format!("io.k8s.api.{ty}") }
}

/// The defaults in OpenAPI, except those that equal an absent field.
fn openapi_defaults(ty: &Type) -> impl Iterator<Item = DefaultStep> {
    ty.fields.iter().filter_map(|field| {
        let value = field.default.clone().filter(|default| field.pointer || !is_zero(default))?;
        Some(DefaultStep::Set { field: field.name.clone(), value, pointer: field.pointer })
    })
}

/// In the core group, every map of quantities is a `ResourceList`.
fn round_steps(ty: &Type) -> impl Iterator<Item = DefaultStep> {
    let in_core = ty.name.starts_with("io.k8s.api.core.v1.");
    let is_list = |shape: &Shape| matches!(shape, Shape::Map { value, .. } if **value == Shape::Quantity);
    let lists = ty.fields.iter().filter(move |field| in_core && is_list(&field.shape));
    lists.map(|field| DefaultStep::Round { field: field.name.clone() })
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

/// Only canonical forms with a suffix below `m` need rounding.
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
