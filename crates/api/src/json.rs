//! Access to the fields of JSON objects. Absent fields read as their zero value.

use serde_json::{Map, Value};

static NULL: Value = Value::Null;

/// Field access for objects whose structure has been validated by decoding.
pub trait JsonExt {
    /// The field, or `null`.
    fn at(&self, name: &str) -> &Value;
    /// The field at a dotted path, or `null`.
    fn path(&self, path: &str) -> &Value;
    fn has(&self, name: &str) -> bool;
    /// A string field, or `""`.
    fn text(&self, name: &str) -> &str;
    fn int(&self, name: &str) -> Option<i64>;
    fn flag(&self, name: &str) -> bool;
    fn items(&self, name: &str) -> &[Value];
    /// The entries of an object field.
    fn entries(&self, name: &str) -> impl Iterator<Item = (&str, &Value)>;
    /// The field as an object, which is created if it is absent or null. Has no effect on a value that
    /// is not an object.
    fn object_mut(&mut self, name: &str) -> &mut Map<String, Value>;
    /// Sets the field. Has no effect on a value that is not an object.
    fn set(&mut self, name: &str, value: impl Into<Value>);
    /// Sets the field if it is absent or null.
    fn set_default(&mut self, name: &str, value: impl Into<Value>);
}

impl JsonExt for Value {
    fn at(&self, name: &str) -> &Value {
        self.get(name).unwrap_or(&NULL)
    }

    fn path(&self, path: &str) -> &Value {
        path.split('.').fold(self, |value, name| value.at(name))
    }

    fn has(&self, name: &str) -> bool {
        !self.at(name).is_null()
    }

    fn text(&self, name: &str) -> &str {
        self.at(name).as_str().unwrap_or("")
    }

    fn int(&self, name: &str) -> Option<i64> {
        self.at(name).as_i64()
    }

    fn flag(&self, name: &str) -> bool {
        self.at(name).as_bool().unwrap_or(false)
    }

    fn items(&self, name: &str) -> &[Value] {
        self.at(name).as_array().map_or(&[], Vec::as_slice)
    }

    fn entries(&self, name: &str) -> impl Iterator<Item = (&str, &Value)> {
        self.at(name).as_object().into_iter().flatten().map(|(key, value)| (key.as_str(), value))
    }

    fn object_mut(&mut self, name: &str) -> &mut Map<String, Value> {
        if !self.is_object() {
            *self = Value::Object(Map::new());
        }
        let field = self.as_object_mut().expect("the value is an object").entry(name).or_insert(Value::Null);
        if !field.is_object() {
            *field = Value::Object(Map::new());
        }
        field.as_object_mut().expect("the value is an object")
    }

    fn set(&mut self, name: &str, value: impl Into<Value>) {
        if let Some(map) = self.as_object_mut() {
            map.insert(name.to_owned(), value.into());
        }
    }

    fn set_default(&mut self, name: &str, value: impl Into<Value>) {
        if !self.has(name) {
            self.set(name, value);
        }
    }
}
