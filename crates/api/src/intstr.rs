//! Reads `IntOrString` fields: a number, or a string that may be a percentage.

use serde_json::Value;

use crate::field::{ErrorList, Path};
use crate::{meta, names};

/// An `IntOrString`, borrowed from the object.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum IntOrString<'a> {
    Int(i64),
    Text(&'a str),
}

/// The rounding of a percentage.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum RoundingMode {
    Up,
    Down,
}

impl<'a> IntOrString<'a> {
    /// `None` if the field is absent.
    pub fn from_value(value: &'a Value) -> Option<IntOrString<'a>> {
        match value {
            Value::Number(number) => number.as_i64().map(IntOrString::Int),
            Value::String(text) => Some(IntOrString::Text(text)),
            _ => None,
        }
    }

    /// The number of a percentage.
    pub fn percent(self) -> Option<i64> {
        match self {
            IntOrString::Int(_) => None,
            IntOrString::Text(text) => text.strip_suffix('%')?.parse().ok(),
        }
    }

    /// The number, or the percentage of `total`. `None` for other strings.
    pub fn scaled_value(self, total: i64, round: RoundingMode) -> Option<i64> {
        let part = match self {
            IntOrString::Int(number) => return Some(number),
            IntOrString::Text(_) => i128::from(self.percent()?) * i128::from(total),
        };
        let whole = part.div_euclid(100);
        let up = round == RoundingMode::Up && part.rem_euclid(100) != 0;
        i64::try_from(whole + i128::from(up)).ok()
    }

    /// The number, the number that a string contains, or 0 (upstream's `IntValue`).
    pub fn int_value(self) -> i64 {
        match self {
            IntOrString::Int(number) => number,
            IntOrString::Text(text) => text.parse().unwrap_or(0),
        }
    }
}

/// Validates a number of at least 0, or a percentage.
pub fn validate_non_negative_or_percent(value: &Value, path: &Path, errors: &mut ErrorList) {
    match value {
        Value::String(text) => errors.invalid_each(path, text.as_str(), names::percent(text)),
        _ => meta::validate_non_negative(value, path, errors),
    }
}

/// Validates that a percentage is at most `100%`. Numbers are not restricted.
pub fn validate_max_100_percent(value: &Value, path: &Path, errors: &mut ErrorList) {
    let percent = IntOrString::from_value(value).and_then(IntOrString::percent);
    if percent.is_some_and(|percent| percent > 100) {
        errors.invalid(path, value.clone(), "must not be greater than 100%");
    }
}

#[cfg(test)]
mod tests {
    use serde_json::json;

    use super::*;

    #[track_caller]
    fn check(value: Value, total: i64, up: Option<i64>, down: Option<i64>) {
        let read = IntOrString::from_value(&value).expect("an int or string");
        assert_eq!(read.scaled_value(total, RoundingMode::Up), up, "{value} of {total}, up");
        assert_eq!(read.scaled_value(total, RoundingMode::Down), down, "{value} of {total}, down");
    }

    #[test]
    fn scaled_value_rounds_percentages() {
        check(json!(3), 10, Some(3), Some(3));
        check(json!("25%"), 10, Some(3), Some(2));
        check(json!("100%"), 7, Some(7), Some(7));
        check(json!("0%"), 7, Some(0), Some(0));
        check(json!("25"), 10, None, None);
        check(json!("x%"), 10, None, None);
        assert_eq!(IntOrString::from_value(&json!(null)), None);
    }
}
