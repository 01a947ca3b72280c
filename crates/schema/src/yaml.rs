//! YAML, read by way of JSON as upstream does: what is null is absent, and what a file means is said in JSON's types.

use serde::de::DeserializeOwned;
use serde_json::Value;

/// Why a text cannot be read.
#[derive(Debug, thiserror::Error)]
pub enum Error {
    #[error(transparent)]
    Syntax(Box<serde_saphyr::Error>),
    #[error(transparent)]
    Content(#[from] serde_json::Error),
}

impl Error {
    /// Where it stops being YAML.
    pub fn line(&self) -> Option<u64> {
        match self {
            Error::Syntax(error) => error.location().map(|place| place.line()),
            Error::Content(_) => None,
        }
    }
}

/// Any document.
pub fn value(text: &str) -> Result<Value, Error> {
    serde_saphyr::from_str(text).map_err(|error| Error::Syntax(Box::new(error)))
}

/// A document of a known form.
pub fn read<T: DeserializeOwned>(text: &str) -> Result<T, Error> {
    let mut value = value(text)?;
    drop_nulls(&mut value);
    Ok(serde_json::from_value(value)?)
}

fn drop_nulls(value: &mut Value) {
    match value {
        Value::Object(fields) => {
            fields.retain(|_, field| !field.is_null());
            fields.values_mut().for_each(drop_nulls);
        }
        Value::Array(items) => items.iter_mut().for_each(drop_nulls),
        _ => {}
    }
}

#[cfg(test)]
mod tests {
    use std::collections::BTreeMap;

    use super::*;

    #[test]
    fn nulls_are_absent() {
        let read: BTreeMap<String, Vec<i64>> = read("a: [1, 2]\nb:\nc: null\n").unwrap();
        assert_eq!(read, BTreeMap::from([("a".to_owned(), vec![1, 2])]));
    }

    #[test]
    fn mistakes_are_placed() {
        assert_eq!(value("a: 1\nb: [").unwrap_err().line(), Some(2));
        let error = read::<BTreeMap<String, i64>>("a: b").unwrap_err();
        assert_eq!(error.to_string(), "invalid type: string \"b\", expected i64");
    }
}
