//! A stored object. The store, the cache and every reader share the same JSON bytes.
//!
//! The bytes contain no `resourceVersion`, since the revision is known only after the store has
//! accepted them. They start with `{"kind":…,"apiVersion":…,"metadata":{`, so that it can be
//! spliced in on output without decoding.

use std::ops::Range;
mod table_decode;

use std::sync::atomic::{AtomicU32, Ordering};
use std::sync::{Arc, OnceLock};

use bytes::Bytes;
use schema::json::{self, for_each_member};
use serde_json::{Map, Value};
use store::Revision;

const METADATA_PREFIX: &[u8] = b"\"metadata\":{";
const MANAGED_FIELDS: &str = "managedFields";

/// One stored object at one revision.
#[derive(Debug)]
pub struct Object {
    /// The store's key; its last segments are the namespace and the name.
    pub key: Arc<str>,
    pub revision: Revision,
    bytes: Bytes,
    /// The content of `metadata`, without the braces.
    metadata: Span,
    /// The content of `metadata.labels`, without the braces; empty if there are no labels.
    labels: Span,
    fields: OnceLock<SelectableFields>,
    /// Initialized when the object is first listed as a table.
    row: OnceLock<Box<api::columns::TableRow>>,
    /// The serial of the CustomResourceDefinition that the bytes are known to conform to; 0 if
    /// unknown.
    clean: AtomicU32,
}

/// A range of an object's bytes. `u32` suffices (objects are far smaller than 4 GiB) and saves
/// memory: there are many objects.
#[derive(Clone, Copy, Debug, Default)]
struct Span {
    start: u32,
    end: u32,
}

/// The fields for field selectors, besides name and namespace.
pub type SelectableFields = Box<[(&'static str, Box<str>)]>;

/// Stored bytes that are not a valid object.
#[derive(Debug, thiserror::Error)]
#[error("invalid stored object at {key}")]
pub struct InvalidObjectError {
    pub key: Arc<str>,
}

/// The position of the object in a response.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum ObjectPosition {
    /// A single object, or the object of a watch event.
    Root,
    /// A list item, where upstream omits kind and apiVersion.
    ListItem,
}

impl Object {
    pub fn new(key: Arc<str>, bytes: Bytes, revision: Revision) -> Result<Object, InvalidObjectError> {
        match metadata_of(&bytes) {
            Some((metadata, labels)) => Ok(Object {
                key,
                revision,
                bytes,
                metadata,
                labels,
                fields: OnceLock::new(),
                row: OnceLock::new(),
                clean: AtomicU32::new(0),
            }),
            None => Err(InvalidObjectError { key }),
        }
    }

    /// The stored bytes.
    pub fn bytes(&self) -> Bytes {
        self.bytes.clone()
    }

    /// Whether the definition with this serial would prune and default nothing.
    pub fn is_clean(&self, serial: u32) -> bool {
        self.clean.load(Ordering::Relaxed) == serial
    }

    pub fn mark_clean(&self, serial: u32) {
        self.clean.store(serial, Ordering::Relaxed);
    }

    /// The apiVersion in the stored bytes.
    pub fn api_version(&self) -> &str {
        const NAME: &[u8] = b"\"apiVersion\":\"";
        let head = &self.bytes[..self.metadata.start as usize];
        let Some(start) = memchr::memmem::find(head, NAME).map(|at| at + NAME.len()) else { return "" };
        let end = memchr::memchr(b'"', &head[start..]).map_or(head.len(), |length| start + length);
        std::str::from_utf8(&head[start..end]).unwrap_or("")
    }

    pub fn size(&self) -> usize {
        self.bytes.len()
    }

    /// Appends the object's JSON with `revision` as its resourceVersion.
    pub fn write_json(&self, position: ObjectPosition, revision: Revision, out: &mut Vec<u8>) {
        match position {
            ObjectPosition::Root => {
                out.extend_from_slice(&self.bytes[..self.metadata.start as usize - METADATA_PREFIX.len()])
            }
            ObjectPosition::ListItem => out.push(b'{'),
        }
        write_revision(revision, out);
        out.extend_from_slice(&self.bytes[self.metadata.start as usize..]);
    }

    /// Appends `"metadata":{…}` alone.
    pub fn write_metadata(&self, revision: Revision, out: &mut Vec<u8>) {
        write_revision(revision, out);
        out.extend_from_slice(self.slice_of(self.metadata));
        out.push(b'}');
    }

    /// The range of `managedFields` in the stored bytes, for decoders that skip it.
    pub fn managed_fields(&self) -> Range<usize> {
        let mut cut = None;
        for_each_member(&self.bytes, self.metadata.start as usize, |name, at, value| {
            if name == b"\"managedFields\"" {
                cut = Some(at..value.end);
            }
        });
        let Some(mut cut) = cut else { return 0..0 };
        match self.bytes[cut.end] {
            b',' => cut.end += 1,
            // The last member is cut with the comma before it.
            _ if self.bytes[cut.start - 1] == b',' => cut.start -= 1,
            _ => {}
        }
        cut
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

    /// Decodes the object for tables: without `managedFields` and without the pod fields that no
    /// column reads.
    pub fn value_for_table(&self) -> Value {
        table_decode::decode_for_table(&self.bytes)
    }

    /// A label's value.
    pub fn label(&self, name: &str) -> Option<&str> {
        let (_, value) = self.labels().find(|(key, _)| *key == name.as_bytes())?;
        std::str::from_utf8(value).ok()
    }

    /// A Bloom filter of the labels: an object without a label's bits does not have the label.
    pub fn label_bits(&self) -> u64 {
        self.labels().fold(0, |bits, (name, value)| bits | label_bits(name, value))
    }

    /// Splits at quotes: neither names nor values of labels can contain a quote or a backslash.
    fn labels(&self) -> impl Iterator<Item = (&[u8], &[u8])> {
        let mut parts = self.slice_of(self.labels).split(|byte| *byte == b'"');
        std::iter::from_fn(move || Some((parts.nth(1)?, parts.nth(1)?)))
    }

    /// Whether the JSON contains `text` anywhere: a cheap way to rule a field out.
    pub fn contains_text(&self, text: &str) -> bool {
        memchr::memmem::find(&self.bytes, text.as_bytes()).is_some()
    }

    fn slice_of(&self, span: Span) -> &[u8] {
        &self.bytes[span.start as usize..span.end as usize]
    }

    /// The fields for field selectors, computed once by `rules` from the decoded object.
    pub fn fields(&self, rules: &dyn api::RestStrategy) -> &SelectableFields {
        self.fields.get_or_init(|| {
            let fields = rules.selectable_fields(&self.value());
            fields.into_iter().map(|(name, value)| (name, value.into())).collect()
        })
    }

    /// The object's table row, computed once.
    pub fn row(&self, stored: &api::Resource) -> &api::columns::TableRow {
        self.row.get_or_init(|| {
            Box::new(api::columns::TableRow::from_object(
                stored.group,
                stored.plural,
                &self.value_for_table(),
            ))
        })
    }

    /// The name, from the key.
    pub fn name(&self) -> &str {
        self.key.rsplit('/').next().unwrap_or_default()
    }

    pub fn namespace(&self) -> &str {
        self.key.rsplit('/').nth(1).unwrap_or_default()
    }
}

/// Two of 64 bits that represent a label with its value.
pub fn label_bits(name: &[u8], value: &[u8]) -> u64 {
    // FNV-1a, folded because its low bits are the weaker ones.
    let bytes = name.iter().chain(b"=").chain(value);
    let hash = bytes.fold(0xcbf2_9ce4_8422_2325_u64, |hash, byte| {
        (hash ^ u64::from(*byte)).wrapping_mul(0x0100_0000_01b3)
    });
    let hash = hash ^ hash >> 32;
    1 << (hash & 63) | 1 << (hash >> 6 & 63)
}

fn write_revision(revision: Revision, out: &mut Vec<u8>) {
    out.extend_from_slice(METADATA_PREFIX);
    out.extend_from_slice(b"\"resourceVersion\":\"");
    out.extend_from_slice(itoa::Buffer::new().format(revision).as_bytes());
    out.extend_from_slice(b"\",");
}

/// Finds the metadata and labels in the stored bytes without decoding them.
fn metadata_of(bytes: &[u8]) -> Option<(Span, Span)> {
    let span = |start: usize, end: usize| Span { start: start as u32, end: end as u32 };
    u32::try_from(bytes.len()).ok()?;
    let start = memchr::memmem::find(bytes, METADATA_PREFIX)? + METADATA_PREFIX.len();
    let mut labels = Span::default();
    let end = for_each_member(bytes, start, |name, _, value| {
        if name == b"\"labels\"" && bytes[value.start] == b'{' {
            labels = span(value.start + 1, value.end - 1);
        }
    })?;
    Some((span(start, end), labels))
}

/// Encodes `value` for the store: kind, apiVersion and metadata first, without resourceVersion.
pub fn to_stored(value: Value) -> Bytes {
    to_stored_with(value, None)
}

/// Like `to_stored`, with `managed_fields` as encoded JSON that is inserted without decoding it.
/// `value` itself has none.
pub fn to_stored_with(mut value: Value, mut managed_fields: Option<&[u8]>) -> Bytes {
    let mut out =
        Vec::with_capacity(1024 + managed_fields.map_or(0, |managed_fields| 3 * managed_fields.len()));
    let mut fields = match value.as_object_mut() {
        Some(fields) => std::mem::take(fields),
        None => Map::new(),
    };
    let kind = fields.remove("kind").unwrap_or_default();
    let api_version = fields.remove("apiVersion").unwrap_or_default();
    let mut metadata = fields.remove("metadata").unwrap_or_default();
    for (prefix, value) in [("{\"kind\":", kind), (",\"apiVersion\":", api_version)] {
        out.extend_from_slice(prefix.as_bytes());
        json::write(&value, &mut out);
    }
    out.extend_from_slice(b",\"metadata\":");
    match &mut metadata {
        Value::Object(metadata) => {
            metadata.remove("resourceVersion");
            // Admission may have decoded the managed fields into the value; those take precedence.
            managed_fields = managed_fields.filter(|_| !metadata.contains_key(MANAGED_FIELDS));
            let mut separator = b'{';
            for (name, value) in &*metadata {
                if let Some(managed_fields) = managed_fields.take_if(|_| name.as_str() > MANAGED_FIELDS) {
                    write_member(
                        &mut separator,
                        MANAGED_FIELDS,
                        |out| out.extend_from_slice(managed_fields),
                        &mut out,
                    );
                }
                write_member(&mut separator, name, |out| json::write(value, out), &mut out);
            }
            if let Some(managed_fields) = managed_fields {
                write_member(
                    &mut separator,
                    MANAGED_FIELDS,
                    |out| out.extend_from_slice(managed_fields),
                    &mut out,
                );
            }
            out.extend_from_slice(if separator == b'{' { b"{}" } else { b"}" });
        }
        other => json::write(other, &mut out),
    }
    let mut separator = b',';
    for (name, value) in &fields {
        write_member(&mut separator, name, |out| json::write(value, out), &mut out);
    }
    out.push(b'}');
    out.into()
}

fn write_member(separator: &mut u8, name: &str, value: impl FnOnce(&mut Vec<u8>), out: &mut Vec<u8>) {
    out.push(std::mem::replace(separator, b','));
    json::write_text(name, out);
    out.push(b':');
    value(out);
}

#[cfg(test)]
mod tests {
    use serde_json::json;

    use super::*;

    #[test]
    fn writes_revision_into_stored_bytes() {
        let value = json!({
            "apiVersion": "v1", "kind": "ConfigMap", "data": {"a": "\"metadata\":{", "labels": {"m": "no"}},
            "metadata": {
                "annotations": {"a": "{\"labels\":{\"m\":\"no\"}}\\", "labels": "x"}, "generation": 1,
                "labels": {"l": "1", "k8s.io/x": "", "z": "2"}, "name": "x", "resourceVersion": "7",
                "managedFields": [{"fieldsV1": {"f:labels": {"m": {}}, "labels": {"m": "no"}}}, {}],
            },
        });
        let object = Object::new("/registry/configmaps/ns/x".into(), to_stored(value.clone()), 42).unwrap();
        let mut whole = Vec::new();
        object.write_json(ObjectPosition::Root, 42, &mut whole);
        let mut expected = value;
        expected["metadata"]["resourceVersion"] = json!("42");
        assert_eq!(serde_json::from_slice::<Value>(&whole).unwrap(), expected);
        assert_eq!(object.value(), expected);
        let mut for_table = expected.clone();
        let metadata = for_table["metadata"].as_object_mut().unwrap();
        metadata.retain(|name, _| name != "managedFields" && name != "resourceVersion");
        assert_eq!(object.value_for_table(), for_table);
        let mut item = Vec::new();
        object.write_json(ObjectPosition::ListItem, 42, &mut item);
        assert!(item.starts_with(b"{\"metadata\":{\"resourceVersion\":\"42\","), "{item:?}");
        let labels = ["l", "k8s.io/x", "z", "m", "", "1"].map(|name| object.label(name));
        assert_eq!(labels, [Some("1"), Some(""), Some("2"), None, None, None]);
        let bits = ["l=1", "k8s.io/x=", "z=2"].map(|label| label.split_once('=').unwrap());
        let bits =
            bits.iter().fold(0, |bits, (name, value)| bits | label_bits(name.as_bytes(), value.as_bytes()));
        assert_eq!(object.label_bits(), bits);
        let mut metadata = b"{".to_vec();
        object.write_metadata(42, &mut metadata);
        metadata.push(b'}');
        let metadata: Value = serde_json::from_slice(&metadata).unwrap();
        assert_eq!(metadata["metadata"], expected["metadata"]);
        assert_eq!((object.namespace(), object.name()), ("ns", "x"));
    }

    #[test]
    fn accepts_encoded_managed_fields() {
        for metadata in [json!({"labels": {"a": "b"}, "name": "x"}), json!({"annotations": {}}), json!({})] {
            let without =
                json!({"kind": "K", "apiVersion": "v1", "metadata": metadata, "spec": {"managedFields": 1}});
            let mut with = without.clone();
            with["metadata"]["managedFields"] = json!([{"fieldsV1": {"f:spec": {}}, "manager": "me"}]);
            let managed_fields = with["metadata"]["managedFields"].to_string();
            assert_eq!(to_stored_with(without, Some(managed_fields.as_bytes())), to_stored(with));
        }
    }

    #[test]
    fn managed_fields_are_removed_at_any_position() {
        let with = [
            "\"managedFields\":[{}],\"name\":\"x\"",
            "\"a\":1,\"managedFields\":[{}]",
            "\"managedFields\":[]",
            "\"name\":\"x\"",
        ];
        let without = ["\"name\":\"x\"", "\"a\":1", "", "\"name\":\"x\""];
        for (with, without) in with.iter().zip(without) {
            let bytes = format!("{{\"kind\":\"K\",\"metadata\":{{{with}}},\"spec\":{{}}}}");
            let object = Object::new("k".into(), bytes.into(), 1).unwrap();
            let expected = format!("{{\"kind\":\"K\",\"metadata\":{{{without}}},\"spec\":{{}}}}");
            assert_eq!(object.value_for_table(), serde_json::from_str::<Value>(&expected).unwrap());
        }
    }

    #[test]
    fn rejects_invalid_bytes() {
        let cut = "{\"metadata\":{\"name\":\"x\",\"labels\":{\"a\":[\"b\\\"\"]}}";
        let truncated = (0..cut.len()).map(|end| &cut[..end]);
        let odd =
            ["[]", "{\"metadata\":{}}", "k8s\0...", "{\"metadata\":{\"a\":}}", "{\"metadata\":{\"a\",1}}"];
        for bytes in truncated.chain(odd) {
            assert!(Object::new("k".into(), Bytes::copy_from_slice(bytes.as_bytes()), 1).is_err(), "{bytes}");
        }
    }
}
