//! The columns of `kubectl get` for every kind, as printed by upstream.
//!
//! The columns of a kind are rows in [`table`], each with the source of its cell, so rows and columns
//! always match. Cells that need more than a path are computed by functions in the submodules. Columns
//! with a priority above zero are for `-o wide`; the server always sends them and kubectl hides them.
//! Objects are in their storage version.
//!
//! Upstream: `pkg/printers/internalversion/printers.go`.

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

/// A column with the fields of `TableColumnDefinition`.
pub struct Column {
    pub name: &'static str,
    /// `type`: string, integer, boolean or date.
    pub kind: &'static str,
    /// `name` marks the column of the object name, which kubectl prefixes with the resource.
    pub format: &'static str,
    pub description: &'static str,
    pub priority: i32,
    cell: CellSource,
}

/// The source of a cell. Absent values are zero values unless noted.
enum CellSource {
    /// The string at a path.
    Text(&'static str),
    /// The string or number at a path as a string; a default if it is absent or empty.
    TextOr(&'static str, &'static str),
    Int(&'static str),
    /// The number at a path; a default if it is absent.
    IntOr(&'static str, &'static str),
    Flag(&'static str),
    /// The boolean at a path; true if it is absent.
    FlagOrTrue(&'static str),
    /// The number of items of the list or map at a path.
    Count(&'static str),
    /// The age of the time at a path.
    Age(&'static str),
    Compute(fn(&Value) -> i64),
    ComputeString(fn(&Value) -> String),
    ComputeAge(fn(&Value) -> AgeText),
}

/// The description of the `Name` column.
pub(crate) fn name_description() -> &'static str {
    table::NAME_DESCRIPTION
}

/// The description of the creation time column.
pub(crate) fn created_description() -> &'static str {
    table::AGE_DESCRIPTION
}

/// The columns of a resource. Resources without their own show name and creation time.
pub fn columns(group: &str, plural: &str) -> &'static [Column] {
    let table = table::TABLES.iter().find(|(g, p, _)| *g == group && *p == plural);
    table.map_or(table::DEFAULT_COLUMNS, |(_, _, columns)| columns)
}

/// The cells of an object, one for each of [`columns`].
pub fn cells(group: &str, plural: &str, obj: &Value, now: Timestamp) -> Vec<Value> {
    columns(group, plural).iter().map(|column| column.cell.evaluate(obj, now)).collect()
}

/// The `conditions` of a table row. Finished pods have a Completed condition, as upstream.
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
            CellSource::TextOr(path, default_text) => match obj.path(path) {
                Value::String(text) if !text.is_empty() => text.as_str().into(),
                Value::Number(number) => number.to_string().into(),
                _ => (*default_text).into(),
            },
            CellSource::Int(path) => obj.path(path).as_i64().unwrap_or(0).into(),
            CellSource::IntOr(path, default_text) => {
                obj.path(path).as_i64().map_or((*default_text).into(), Value::from)
            }
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
