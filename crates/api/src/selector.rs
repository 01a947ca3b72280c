//! Label and field selectors. Parsing has upstream's error messages; matching does not allocate.

pub mod fields;
mod parse;

use std::fmt;

use serde_json::Value;

pub use fields::{FieldSelector, escape};

use crate::field::{ErrorList, Path, quote};
use crate::json::JsonExt;
use crate::names;

/// A label selector: all requirements must match.
#[derive(Clone, Debug, Default, PartialEq, Eq, Hash)]
pub struct LabelSelector {
    /// Sorted by key.
    requirements: Vec<Requirement>,
    /// Matches no objects, like an absent `metav1.LabelSelector`.
    nothing: bool,
}

#[derive(Clone, Debug, PartialEq, Eq, Hash)]
pub struct Requirement {
    pub key: String,
    pub operator: Operator,
    pub values: Vec<String>,
}

#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub enum Operator {
    In,
    NotIn,
    Equals,
    DoubleEquals,
    NotEquals,
    Exists,
    DoesNotExist,
    GreaterThan,
    LessThan,
}

/// A parse error, which is the message of a `BadRequest`.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
#[error("{0}")]
pub struct SelectorError(pub String);

impl LabelSelector {
    pub fn everything() -> LabelSelector {
        LabelSelector::default()
    }

    pub fn nothing() -> LabelSelector {
        LabelSelector { nothing: true, ..LabelSelector::default() }
    }

    /// Parses the text form: `a=b,c!=d,e in (x,y),!f,g notin (z),h>5`.
    pub fn parse(text: &str) -> Result<LabelSelector, SelectorError> {
        parse::parse_requirements(text).map(LabelSelector::new)
    }

    /// Converts a `metav1.LabelSelector`: an absent one matches nothing, an empty one everything.
    pub fn from_value(selector: &Value) -> Result<LabelSelector, SelectorError> {
        if selector.is_null() {
            return Ok(LabelSelector::nothing());
        }
        let mut requirements = label_set_requirements(selector.at("matchLabels"))?;
        for expression in selector.items("matchExpressions") {
            let operator = match expression.text("operator") {
                "In" => Operator::In,
                "NotIn" => Operator::NotIn,
                "Exists" => Operator::Exists,
                "DoesNotExist" => Operator::DoesNotExist,
                other => {
                    let message = format!("{} is not a valid label selector operator", quote(other));
                    return Err(SelectorError(message));
                }
            };
            let values = expression.items("values").iter().filter_map(Value::as_str).map(str::to_owned);
            requirements.push(Requirement::new(expression.text("key"), operator, values.collect())?);
        }
        Ok(LabelSelector::new(requirements))
    }

    /// Converts a plain map of required labels, such as the selector of a Service or
    /// ReplicationController. An empty map matches everything; some callers need another meaning.
    pub fn from_set(labels: &Value) -> LabelSelector {
        let requirement = |(key, value): (&String, &Value)| Requirement {
            key: key.clone(),
            operator: Operator::Equals,
            values: vec![value.as_str().unwrap_or("").to_owned()],
        };
        LabelSelector::new(labels.as_object().into_iter().flatten().map(requirement).collect())
    }

    pub fn new(mut requirements: Vec<Requirement>) -> LabelSelector {
        requirements.sort_by(|a, b| a.key.cmp(&b.key));
        LabelSelector { requirements, nothing: false }
    }

    /// Whether the selector matches an object; `get` returns the value of a label.
    pub fn matches<'a>(&self, get: impl Fn(&str) -> Option<&'a str>) -> bool {
        !self.nothing
            && self.requirements.iter().all(|requirement| requirement.matches(get(&requirement.key)))
    }

    /// Whether the selector matches a map of labels, such as `metadata.labels`.
    pub fn matches_labels(&self, labels: &Value) -> bool {
        self.matches(|key| labels.at(key).as_str())
    }

    pub fn is_everything(&self) -> bool {
        !self.nothing && self.requirements.is_empty()
    }

    pub fn is_nothing(&self) -> bool {
        self.nothing
    }

    pub fn requirements(&self) -> &[Requirement] {
        &self.requirements
    }

    /// The only value that the selector allows for a label, if there is exactly one.
    pub fn exact(&self, key: &str) -> Option<&str> {
        let requirement = self.requirements.iter().find(|requirement| requirement.key == key)?;
        match (requirement.operator, requirement.values.as_slice()) {
            (Operator::Equals | Operator::DoubleEquals | Operator::In, [one]) => Some(one),
            _ => None,
        }
    }
}

impl Requirement {
    /// Validates key and values as upstream, and reports all errors together.
    pub fn new(key: &str, operator: Operator, values: Vec<String>) -> Result<Requirement, SelectorError> {
        let mut errors = ErrorList::default();
        let messages = names::qualified_name(key);
        if !messages.is_empty() {
            errors.invalid(&Path::new("key"), key, &messages.join("; "));
        }
        operator.check(&values, &mut errors);
        for (i, value) in values.iter().enumerate() {
            let messages = names::label_value(value);
            if !messages.is_empty() {
                errors.invalid(&Path::new("values").index(i).key(key), value.as_str(), &messages.join("; "));
            }
        }
        match errors.to_string() {
            message if message.is_empty() => Ok(Requirement { key: key.to_owned(), operator, values }),
            message => Err(SelectorError(message)),
        }
    }

    /// Whether the value of the label, if there is one, meets the requirement.
    pub fn matches(&self, value: Option<&str>) -> bool {
        let listed = |value: &str| self.values.iter().any(|allowed| allowed == value);
        match self.operator {
            Operator::In | Operator::Equals | Operator::DoubleEquals => value.is_some_and(listed),
            Operator::NotIn | Operator::NotEquals => !value.is_some_and(listed),
            Operator::Exists => value.is_some(),
            Operator::DoesNotExist => value.is_none(),
            Operator::GreaterThan => self.parse_numbers(value).is_some_and(|(has, limit)| has > limit),
            Operator::LessThan => self.parse_numbers(value).is_some_and(|(has, limit)| has < limit),
        }
    }

    fn parse_numbers(&self, value: Option<&str>) -> Option<(i64, i64)> {
        Some((value?.parse().ok()?, self.values.first()?.parse().ok()?))
    }
}

impl Operator {
    fn check(self, values: &[String], errors: &mut ErrorList) {
        let path = Path::new("values");
        let rendered = || Value::from(values.to_vec());
        let message = match self {
            Operator::In | Operator::NotIn if values.is_empty() => {
                "for 'in', 'notin' operators, values set can't be empty"
            }
            Operator::Equals | Operator::DoubleEquals | Operator::NotEquals if values.len() != 1 => {
                "exact-match compatibility requires one single value"
            }
            Operator::Exists | Operator::DoesNotExist if !values.is_empty() => {
                "values set must be empty for exists and does not exist"
            }
            Operator::GreaterThan | Operator::LessThan if values.len() != 1 => {
                "for 'Gt', 'Lt' operators, exactly one value is required"
            }
            _ => "",
        };
        if !message.is_empty() {
            errors.invalid(&path, rendered(), message);
        }
        if matches!(self, Operator::GreaterThan | Operator::LessThan) {
            for (i, value) in values.iter().enumerate().filter(|(_, value)| value.parse::<i64>().is_err()) {
                errors.invalid(
                    &path.index(i),
                    value.as_str(),
                    "for 'Gt', 'Lt' operators, the value must be an integer",
                );
            }
        }
    }
}

fn label_set_requirements(labels: &Value) -> Result<Vec<Requirement>, SelectorError> {
    let requirement = |(key, value): (&String, &Value)| {
        Requirement::new(key, Operator::Equals, vec![value.as_str().unwrap_or("").to_owned()])
    };
    labels.as_object().into_iter().flatten().map(requirement).collect()
}

/// The format is upstream's: sorted by key.
impl fmt::Display for LabelSelector {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        for (i, requirement) in self.requirements.iter().enumerate() {
            write!(f, "{}{requirement}", if i == 0 { "" } else { "," })?;
        }
        Ok(())
    }
}

impl fmt::Display for Requirement {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let key = &self.key;
        let mut values: Vec<&str> = self.values.iter().map(String::as_str).collect();
        values.sort_unstable();
        let values = values.join(",");
        match self.operator {
            Operator::In => write!(f, "{key} in ({values})"),
            Operator::NotIn => write!(f, "{key} notin ({values})"),
            Operator::Equals => write!(f, "{key}={values}"),
            Operator::DoubleEquals => write!(f, "{key}=={values}"),
            Operator::NotEquals => write!(f, "{key}!={values}"),
            Operator::Exists => write!(f, "{key}"),
            Operator::DoesNotExist => write!(f, "!{key}"),
            Operator::GreaterThan => write!(f, "{key}>{values}"),
            Operator::LessThan => write!(f, "{key}<{values}"),
        }
    }
}

#[cfg(test)]
mod tests;
