//! The cells of an object as JSON, made once: only ages change while the object does not.

use std::fmt::Write as _;

use jiff::Timestamp;
use serde_json::Value;

use super::{Cell, columns, conditions};
use crate::json::Json as _;
use crate::time::human_duration;

/// A cell's text, in which it may say how long ago something was.
#[derive(Debug, Default)]
pub struct Told {
    pub before: String,
    pub since: Option<Timestamp>,
    pub after: &'static str,
}

impl Told {
    pub fn at(&self, now: Timestamp) -> String {
        let age = self.since.map(|since| human_duration(now.duration_since(since)));
        format!("{}{}{}", self.before, age.unwrap_or_default(), self.after)
    }
}

impl From<String> for Told {
    fn from(text: String) -> Told {
        Told { before: text, ..Told::default() }
    }
}

/// What a table's row says of an object, with gaps where the ages go.
#[derive(Debug)]
pub struct Row {
    json: Box<str>,
    ages: Box<[(u32, Timestamp)]>,
}

impl Row {
    /// The row of an object in the version it is stored in.
    pub fn of(group: &str, plural: &str, obj: &Value) -> Row {
        let mut json = "\"cells\":[".to_owned();
        let mut ages = Vec::new();
        for (i, column) in columns(group, plural).iter().enumerate() {
            json.push_str(if i == 0 { "" } else { "," });
            let told = match &column.cell {
                Cell::Since(path) => super::text::since(obj.path(path)),
                Cell::Timed(tell) => tell(obj),
                // Nothing else depends on the time.
                other => {
                    let _ = write!(json, "{}", other.of(obj, Timestamp::UNIX_EPOCH));
                    continue;
                }
            };
            let _ = write!(json, "{}", Value::String(told.before));
            json.pop();
            ages.extend(told.since.map(|since| (json.len() as u32, since)));
            json.push_str(told.after);
            json.push('"');
        }
        json.push(']');
        let conditions = conditions(group, plural, obj);
        if !conditions.is_empty() {
            let _ = write!(json, ",\"conditions\":{}", Value::Array(conditions));
        }
        Row { json: json.into(), ages: ages.into() }
    }

    /// Appends `"cells":[…]`, and `"conditions":[…]` where there are any.
    pub fn write(&self, now: Timestamp, out: &mut Vec<u8>) {
        let mut written = 0;
        for (at, since) in &self.ages {
            let at = *at as usize;
            out.extend_from_slice(&self.json.as_bytes()[written..at]);
            out.extend_from_slice(human_duration(now.duration_since(*since)).as_bytes());
            written = at;
        }
        out.extend_from_slice(&self.json.as_bytes()[written..]);
    }
}
