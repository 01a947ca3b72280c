//! An object as the store holds it and every reader gets it: the same JSON bytes (DESIGN D1).
//!
//! The bytes carry no `resourceVersion`, since it is only known once the store has taken them. They begin
//! `{"kind":…,"apiVersion":…,"metadata":{`, so that it can be spliced in on the way out without decoding.

use std::sync::{Arc, OnceLock};

use bytes::Bytes;
use serde::Deserialize;
use serde_json::{Map, Value};
use store::Revision;

const METADATA: &[u8] = b"\"metadata\":{";

/// One stored object at one revision.
#[derive(Debug)]
pub struct Object {
    /// The store's key; namespace and name are its last parts.
    pub key: Arc<str>,
    pub revision: Revision,
    bytes: Bytes,
    /// Where `"metadata":{` begins.
    metadata_at: usize,
    labels: OnceLock<Box<[(Box<str>, Box<str>)]>>,
    fields: OnceLock<Fields>,
}

/// What a field selector can see of an object besides its name and namespace.
pub type Fields = Box<[(&'static str, Box<str>)]>;

/// Why stored bytes cannot be an object.
#[derive(Debug, thiserror::Error)]
#[error("the stored value of {key} is not an object written by this server")]
pub struct NotAnObject {
    pub key: Arc<str>,
}

/// How the object stands in an answer.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Place {
    /// By itself, or in a watch event.
    Whole,
    /// In a list, where upstream leaves out kind and apiVersion.
    Item,
}

impl Object {
    pub fn new(key: Arc<str>, bytes: Bytes, revision: Revision) -> Result<Object, NotAnObject> {
        match memchr::memmem::find(&bytes, METADATA) {
            Some(metadata_at) if bytes.get(metadata_at + METADATA.len()) == Some(&b'"') => Ok(Object {
                key,
                revision,
                bytes,
                metadata_at,
                labels: OnceLock::new(),
                fields: OnceLock::new(),
            }),
            _ => Err(NotAnObject { key }),
        }
    }

    pub fn size(&self) -> usize {
        self.bytes.len()
    }

    /// Appends the object's JSON with `revision` as its resourceVersion.
    pub fn write_json(&self, place: Place, revision: Revision, out: &mut Vec<u8>) {
        match place {
            Place::Whole => out.extend_from_slice(&self.bytes[..self.metadata_at]),
            Place::Item => out.push(b'{'),
        }
        out.extend_from_slice(METADATA);
        out.extend_from_slice(b"\"resourceVersion\":\"");
        out.extend_from_slice(itoa::Buffer::new().format(revision).as_bytes());
        out.extend_from_slice(b"\",");
        out.extend_from_slice(&self.bytes[self.metadata_at + METADATA.len()..]);
    }

    /// Decodes the whole object, resourceVersion included.
    pub fn value(&self) -> Value {
        self.value_at(self.revision)
    }

    pub fn value_at(&self, revision: Revision) -> Value {
        let mut value: Value = serde_json::from_slice(&self.bytes).unwrap_or_default();
        if let Some(metadata) = value.get_mut("metadata").and_then(Value::as_object_mut) {
            metadata.insert("resourceVersion".to_owned(), Value::String(revision.to_string()));
        }
        value
    }

    pub fn label(&self, name: &str) -> Option<&str> {
        self.labels().iter().find(|(key, _)| **key == *name).map(|(_, value)| &**value)
    }

    fn labels(&self) -> &[(Box<str>, Box<str>)] {
        self.labels.get_or_init(|| {
            let head: Head = serde_json::from_slice(&self.bytes).unwrap_or_default();
            head.metadata.labels.into_iter().map(|(key, value)| (key.into(), value.into())).collect()
        })
    }

    /// The fields for selectors, worked out once by `rules` from the decoded object.
    pub fn fields(&self, rules: &dyn api::Kind) -> &Fields {
        self.fields.get_or_init(|| {
            let fields = rules.selectable(&self.value());
            fields.into_iter().map(|(name, value)| (name, value.into())).collect()
        })
    }

    /// The namespace and name, from the key.
    pub fn name(&self) -> &str {
        self.key.rsplit('/').next().unwrap_or_default()
    }

    pub fn namespace(&self) -> &str {
        self.key.rsplit('/').nth(1).unwrap_or_default()
    }
}

#[derive(Default, Deserialize)]
struct Head {
    #[serde(default)]
    metadata: HeadMetadata,
}

#[derive(Default, Deserialize)]
struct HeadMetadata {
    #[serde(default)]
    labels: std::collections::BTreeMap<String, String>,
}

/// The bytes to store for `value`: kind, apiVersion and metadata first, without resourceVersion.
pub fn to_stored(mut value: Value) -> Bytes {
    let mut out = Vec::with_capacity(1024);
    let mut fields = match value.as_object_mut() {
        Some(fields) => std::mem::take(fields),
        None => Map::new(),
    };
    let kind = fields.remove("kind").unwrap_or_default();
    let api_version = fields.remove("apiVersion").unwrap_or_default();
    let mut metadata = fields.remove("metadata").unwrap_or_default();
    if let Some(metadata) = metadata.as_object_mut() {
        metadata.remove("resourceVersion");
    }
    for (prefix, value) in
        [("{\"kind\":", kind), (",\"apiVersion\":", api_version), (",\"metadata\":", metadata)]
    {
        out.extend_from_slice(prefix.as_bytes());
        write_value(&value, &mut out);
    }
    for (name, value) in &fields {
        out.push(b',');
        write_value(&Value::String(name.clone()), &mut out);
        out.push(b':');
        write_value(value, &mut out);
    }
    out.push(b'}');
    out.into()
}

fn write_value(value: &Value, out: &mut Vec<u8>) {
    serde_json::to_writer(out, value).expect("a JSON value with string keys always serialises to memory");
}

#[cfg(test)]
mod tests {
    use serde_json::json;

    use super::*;

    #[test]
    fn the_revision_is_spliced_into_the_stored_bytes() {
        let value = json!({
            "apiVersion": "v1", "kind": "ConfigMap", "data": {"a": "\"metadata\":{"},
            "metadata": {"name": "x", "labels": {"l": "1"}, "resourceVersion": "7"},
        });
        let object = Object::new("/registry/configmaps/ns/x".into(), to_stored(value.clone()), 42).unwrap();
        let mut whole = Vec::new();
        object.write_json(Place::Whole, 42, &mut whole);
        let mut expected = value;
        expected["metadata"]["resourceVersion"] = json!("42");
        assert_eq!(serde_json::from_slice::<Value>(&whole).unwrap(), expected);
        assert_eq!(object.value(), expected);
        let mut item = Vec::new();
        object.write_json(Place::Item, 42, &mut item);
        assert!(item.starts_with(b"{\"metadata\":{\"resourceVersion\":\"42\","), "{item:?}");
        assert_eq!((object.label("l"), object.label("m")), (Some("1"), None));
        assert_eq!((object.namespace(), object.name()), ("ns", "x"));
    }

    #[test]
    fn foreign_bytes_are_refused() {
        for bytes in ["", "{}", "[]", "{\"metadata\":{}}", "k8s\0..."] {
            assert!(Object::new("k".into(), Bytes::from_static(bytes.as_bytes()), 1).is_err(), "{bytes}");
        }
    }
}
