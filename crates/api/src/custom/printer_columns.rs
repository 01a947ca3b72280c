//! The `additionalPrinterColumns` of a CRD.

use jiff::Timestamp;
use serde_json::{Value, json};

use super::VersionSchema;
use super::json_path::JsonPath;
use crate::json::JsonExt as _;
use crate::time::human_duration;

/// A column of `additionalPrinterColumns`.
#[derive(Debug)]
pub struct CustomColumn {
    name: String,
    kind: String,
    format: String,
    description: String,
    priority: i64,
    path: Option<JsonPath>,
}

const AGE_PATH: &str = ".metadata.creationTimestamp";

/// Parses the columns. The default is an Age column.
pub(super) fn parse_columns(columns: &[Value]) -> Vec<CustomColumn> {
    let age = json!([{
        "name": "Age", "type": "date", "jsonPath": AGE_PATH,
        "description": crate::columns::created_description(),
    }]);
    let columns = if columns.is_empty() { age.as_array().map_or(&[][..], Vec::as_slice) } else { columns };
    columns.iter().map(CustomColumn::from_value).collect()
}

impl CustomColumn {
    fn from_value(column: &Value) -> CustomColumn {
        let path = column.text("jsonPath");
        let configured = column.text("description");
        let description = match configured {
            "" => format!("Custom resource definition column (in JSONPath format): {path}"),
            configured => configured.to_owned(),
        };
        CustomColumn {
            name: column.text("name").to_owned(),
            kind: column.text("type").to_owned(),
            format: column.text("format").to_owned(),
            description,
            priority: column.int("priority").unwrap_or(0),
            path: JsonPath::parse(path),
        }
    }

    fn cell(&self, object: &Value, now: Timestamp) -> Value {
        let found = self.path.as_ref().map(|path| path.find(object)).unwrap_or_default();
        match (self.kind.as_str(), found.first()) {
            (_, None) => Value::Null,
            ("string", Some(value)) => render_value(value).into(),
            ("integer", Some(value)) => match value.as_i64().or_else(|| value.as_f64().map(|n| n as i64)) {
                Some(number) => number.into(),
                None => Value::Null,
            },
            ("number", Some(value)) => value.as_f64().map_or(Value::Null, json_number),
            ("boolean", Some(value)) => value.as_bool().map_or(Value::Null, Value::from),
            ("date", Some(Value::String(text))) => match text.parse::<Timestamp>() {
                Ok(time) => human_duration(now.duration_since(time)).into(),
                Err(_) => "<invalid>".into(),
            },
            _ => Value::Null,
        }
    }
}

/// Go prints a float with an integral value without a decimal point.
fn json_number(number: f64) -> Value {
    if number.fract() == 0.0 && number.abs() < 9e15 { (number as i64).into() } else { number.into() }
}

fn render_value(value: &Value) -> String {
    match value {
        Value::String(text) => text.clone(),
        Value::Null => "<nil>".to_owned(),
        other => other.to_string(),
    }
}

impl VersionSchema {
    /// The `columnDefinitions` of a Table.
    pub fn column_definitions(&self) -> Value {
        let name = json!({
            "name": "Name", "type": "string", "format": "name",
            "description": crate::columns::name_description(), "priority": 0,
        });
        let column = |column: &CustomColumn| {
            json!({
                "name": column.name, "type": column.kind, "format": column.format,
                "description": column.description, "priority": column.priority,
            })
        };
        std::iter::once(name).chain(self.columns.iter().map(column)).collect()
    }

    /// The cells of an object.
    pub fn cells(&self, object: &Value, now: Timestamp) -> Vec<Value> {
        let name = object.at("metadata").text("name").into();
        std::iter::once(name).chain(self.columns.iter().map(|column| column.cell(object, now))).collect()
    }
}
