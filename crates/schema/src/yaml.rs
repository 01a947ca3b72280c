//! Parses YAML by way of JSON, as upstream's `sigs.k8s.io/yaml` does: null fields are absent, and
//! fields have JSON types.

use serde::de::DeserializeOwned;
use serde_json::Value;

#[derive(Debug, thiserror::Error)]
pub enum Error {
    #[error(transparent)]
    Syntax(Box<serde_saphyr::Error>),
    #[error(transparent)]
    Content(#[from] serde_json::Error),
}

impl Error {
    /// The error without any content of the document, which may be secret.
    pub fn without_values(&self) -> String {
        match self {
            Error::Syntax(error) => match error.location() {
                Some(location) => format!("invalid YAML at line {}", location.line()),
                None => "invalid YAML".to_owned(),
            },
            Error::Content(error) => {
                let text = error.to_string();
                // These messages contain field names. Others contain values.
                let names_fields =
                    ["unknown field", "missing field"].iter().any(|begin| text.starts_with(begin));
                if names_fields { text } else { "a field has the wrong type".to_owned() }
            }
        }
    }
}

/// Parses any document. Only `true` and `false` are booleans: `n`, for example, is a string.
pub fn parse(text: &str) -> Result<Value, Error> {
    let options = serde_saphyr::options! { strict_booleans: true };
    serde_saphyr::from_str_with_options(text, options).map_err(|error| Error::Syntax(Box::new(error)))
}

/// Parses a document of a known type.
pub fn from_str<T: DeserializeOwned>(text: &str) -> Result<T, Error> {
    let mut value = parse(text)?;
    remove_null_fields(&mut value);
    Ok(serde_json::from_value(value)?)
}

fn remove_null_fields(value: &mut Value) {
    match value {
        Value::Object(fields) => {
            fields.retain(|_, field| !field.is_null());
            fields.values_mut().for_each(remove_null_fields);
        }
        Value::Array(items) => items.iter_mut().for_each(remove_null_fields),
        _ => {}
    }
}

#[cfg(test)]
mod tests {
    use std::collections::BTreeMap;

    use super::*;

    #[test]
    fn null_fields_are_absent() {
        let read: BTreeMap<String, Vec<i64>> = from_str("a: [1, 2]\nb:\nc: null\n").unwrap();
        assert_eq!(read, BTreeMap::from([("a".to_owned(), vec![1, 2])]));
    }

    #[test]
    fn errors_contain_location() {
        assert_eq!(parse("a: n").unwrap(), serde_json::json!({"a": "n"}));
        assert_eq!(parse("a: 1\nb: [").unwrap_err().without_values(), "invalid YAML at line 2");
        let error = from_str::<BTreeMap<String, i64>>("a: b").unwrap_err();
        assert_eq!(error.to_string(), "invalid type: string \"b\", expected i64");
        assert_eq!(error.without_values(), "a field has the wrong type");
    }
}
