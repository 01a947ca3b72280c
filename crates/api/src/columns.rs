//! What `kubectl get` shows: the columns of every kind and the cells of an object, as upstream prints them.
//!
//! A kind's columns are rows of data in [`table`], each with the recipe for its cell, so a row can never have
//! more or fewer cells than columns. Recipes that need more than a path are functions in the modules below.
//! Columns with a priority above zero are for `-o wide`; the server always sends them and kubectl hides them.
//! Objects come in the form they are stored in.

mod admission;
mod batch;
mod cluster;
mod network;
mod pod;
mod row;
mod storage;
mod table;
mod text;

use jiff::Timestamp;
use serde_json::{Value, json};

use crate::json::JsonExt as _;

use row::AgeText;
pub use row::TableRow;

/// A column of a Table, with the fields of `TableColumnDefinition`.
pub struct Column {
    pub name: &'static str,
    /// `type`: string, integer, boolean or date.
    pub kind: &'static str,
    /// `name` marks the column with the object's name, which kubectl prefixes with the resource.
    pub format: &'static str,
    pub description: &'static str,
    pub priority: i32,
    cell: CellSource,
}

/// How a cell is made from the object. What is absent is the type's zero value unless said otherwise.
enum CellSource {
    /// The string at a path.
    Text(&'static str),
    /// The string or number at a path as a string, or these words where it is absent or empty.
    TextOr(&'static str, &'static str),
    Int(&'static str),
    /// The number at a path, or these words where it is absent.
    IntOr(&'static str, &'static str),
    Flag(&'static str),
    /// The boolean at a path, true where it is absent.
    FlagOrTrue(&'static str),
    /// How many items or entries the list or map at the path has.
    Count(&'static str),
    /// How long ago the time at the path was.
    Age(&'static str),
    Compute(fn(&Value) -> i64),
    ComputeString(fn(&Value) -> String),
    ComputeAge(fn(&Value) -> AgeText),
}

/// What clients are told of the column with an object's name.
pub(crate) fn name_description() -> &'static str {
    table::NAME_DESCRIPTION
}

/// What clients are told of the time an object was created.
pub(crate) fn created_description() -> &'static str {
    table::AGE_DESCRIPTION
}

/// The columns of a resource; a resource without columns of its own shows its name and when it was created.
pub fn columns(group: &str, plural: &str) -> &'static [Column] {
    let table = table::TABLES.iter().find(|(g, p, _)| *g == group && *p == plural);
    table.map_or(table::DEFAULT_COLUMNS, |(_, _, columns)| columns)
}

/// The cells of one object, one for each of [`columns`].
pub fn cells(group: &str, plural: &str, obj: &Value, now: Timestamp) -> Vec<Value> {
    columns(group, plural).iter().map(|column| column.cell.evaluate(obj, now)).collect()
}

/// The `conditions` of an object's row: a pod that is over says so, and kubectl can tell it apart.
pub fn conditions(group: &str, plural: &str, obj: &Value) -> Vec<Value> {
    if (group, plural) != ("", "pods") {
        return Vec::new();
    }
    let phase = obj.at("status").text("phase");
    let message = match phase {
        "Succeeded" => "The pod has completed successfully.",
        "Failed" => "The pod failed.",
        _ => return Vec::new(),
    };
    vec![json!({"type": "Completed", "status": "True", "reason": phase, "message": message})]
}

impl CellSource {
    fn evaluate(&self, obj: &Value, now: Timestamp) -> Value {
        match self {
            CellSource::Text(path) => obj.path(path).as_str().unwrap_or("").into(),
            CellSource::TextOr(path, words) => match obj.path(path) {
                Value::String(text) if !text.is_empty() => text.as_str().into(),
                Value::Number(number) => number.to_string().into(),
                _ => (*words).into(),
            },
            CellSource::Int(path) => obj.path(path).as_i64().unwrap_or(0).into(),
            CellSource::IntOr(path, words) => obj.path(path).as_i64().map_or((*words).into(), Value::from),
            CellSource::Flag(path) => obj.path(path).as_bool().unwrap_or(false).into(),
            CellSource::FlagOrTrue(path) => obj.path(path).as_bool().unwrap_or(true).into(),
            CellSource::Count(path) => match obj.path(path) {
                Value::Array(items) => items.len().into(),
                Value::Object(entries) => entries.len().into(),
                _ => 0.into(),
            },
            CellSource::Age(path) => text::since(obj.path(path)).render(now).into(),
            CellSource::Compute(count) => count(obj).into(),
            CellSource::ComputeString(make) => make(obj).into(),
            CellSource::ComputeAge(age) => age(obj).render(now).into(),
        }
    }
}

#[cfg(test)]
mod tests;
