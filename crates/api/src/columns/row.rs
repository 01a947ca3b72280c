//! Table rows as prepared JSON. Only ages change while an object does not.

use std::fmt::Write as _;

use jiff::Timestamp;
use serde_json::Value;

use super::{CellSource, columns, conditions};
use crate::json::JsonExt as _;
use crate::time::human_duration;

/// A cell that may contain an age.
#[derive(Debug, Default)]
pub struct AgeText {
    pub prefix: String,
    pub since: Option<Timestamp>,
    pub suffix: &'static str,
}

impl AgeText {
    pub fn render(&self, now: Timestamp) -> String {
        let age = self.since.map(|since| human_duration(now.duration_since(since)));
        format!("{}{}{}", self.prefix, age.unwrap_or_default(), self.suffix)
    }
}

impl From<String> for AgeText {
    fn from(text: String) -> AgeText {
        AgeText { prefix: text, ..AgeText::default() }
    }
}

/// The JSON of a table row, without its ages.
#[derive(Debug)]
pub struct TableRow {
    json: Box<str>,
    age_offsets: Box<[(u32, Timestamp)]>,
}

impl TableRow {
    /// Creates the row of an object in its storage version.
    pub fn from_object(group: &str, plural: &str, obj: &Value) -> TableRow {
        let mut json = "\"cells\":[".to_owned();
        let mut age_offsets = Vec::new();
        for (i, column) in columns(group, plural).iter().enumerate() {
            json.push_str(if i == 0 { "" } else { "," });
            let age_text = match &column.cell {
                CellSource::Age(path) => super::text::since(obj.path(path)),
                CellSource::ComputeAge(compute) => compute(obj),
                // No other cell depends on the time.
                other => {
                    let _ = write!(json, "{}", other.evaluate(obj, Timestamp::UNIX_EPOCH));
                    continue;
                }
            };
            let _ = write!(json, "{}", Value::String(age_text.prefix));
            json.pop();
            age_offsets.extend(age_text.since.map(|since| (json.len() as u32, since)));
            json.push_str(age_text.suffix);
            json.push('"');
        }
        json.push(']');
        let conditions = conditions(group, plural, obj);
        if !conditions.is_empty() {
            let _ = write!(json, ",\"conditions\":{}", Value::Array(conditions));
        }
        TableRow { json: json.into(), age_offsets: age_offsets.into() }
    }

    /// Appends `"cells":[…]`, and `"conditions":[…]` if there are any.
    pub fn write(&self, now: Timestamp, out: &mut Vec<u8>) {
        let mut written = 0;
        for (at, since) in &self.age_offsets {
            let at = *at as usize;
            out.extend_from_slice(&self.json.as_bytes()[written..at]);
            out.extend_from_slice(human_duration(now.duration_since(*since)).as_bytes());
            written = at;
        }
        out.extend_from_slice(&self.json.as_bytes()[written..]);
    }
}
