//! Objects, lists and events in the form a client asked for.
//!
//! Plain JSON of a kind in its stored version is the fast path: bytes are joined, nothing is decoded.

use std::sync::Arc;

use api::{Resource, Status};
use bytes::Bytes;
use http::{Response, StatusCode, header};
use jiff::Timestamp;
use serde_json::{Map, Value, json};
use store::Revision;

use crate::body::Body;
use crate::cache::{Event, json_line};
use crate::negotiate::{Form, Format, Media};
use crate::object::{Object, Place};
use crate::registry::stored_as;

/// How much of a list is put together at a time.
const CHUNK: usize = 64 << 10;

/// Turns what handlers found into bytes; made once per request.
#[derive(Clone)]
pub struct Renderer {
    pub resource: &'static Resource,
    pub format: Format,
    pub include: Include,
    pub now: Timestamp,
}

/// `includeObject` of tables.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Include {
    Nothing,
    Metadata,
    Object,
}

/// The `metadata` of a list.
#[derive(Clone, Debug, Default)]
pub struct ListMeta {
    pub revision: Revision,
    pub token: String,
    pub remaining: Option<usize>,
}

impl Include {
    pub fn parse(text: &str) -> Result<Include, Status> {
        match text {
            "" | "Metadata" => Ok(Include::Metadata),
            "None" => Ok(Include::Nothing),
            "Object" => Ok(Include::Object),
            other => Err(Status::bad_request(format!("unrecognized includeObject value: {other:?}"))),
        }
    }
}

impl Renderer {
    /// Stored bytes can be joined as they are.
    fn is_plain(&self) -> bool {
        self.format.is_plain() && std::ptr::eq(stored_as(self.resource), self.resource)
    }

    pub fn object(&self, code: StatusCode, object: &Object) -> Response<Body> {
        if self.is_plain() {
            let mut bytes = Vec::with_capacity(object.size() + 48);
            object.write_json(Place::Whole, object.revision, &mut bytes);
            return respond(code, Media::Json, bytes.into());
        }
        self.value(code, self.converted(object, object.revision))
    }

    /// An object that is already decoded, in the version asked for.
    pub fn value(&self, code: StatusCode, value: Value) -> Response<Body> {
        match self.format.form {
            Form::Object => encoded(code, &self.format, value),
            Form::Metadata => encoded(code, &self.format, self.metadata_of(value, true)),
            Form::Table => {
                let meta = json!({"resourceVersion": value.pointer("/metadata/resourceVersion").cloned().unwrap_or_default()});
                let row = self.row(value);
                encoded(code, &self.format, self.table(meta, Some(vec![row]), true))
            }
        }
    }

    pub fn list(&self, objects: Vec<Arc<Object>>, meta: &ListMeta) -> Response<Body> {
        match self.format.form {
            Form::Object if self.is_plain() => {
                respond(StatusCode::OK, Media::Json, Body::Chunks(self.plain_chunks(objects, meta)))
            }
            Form::Object if self.format.media == Media::Protobuf => {
                respond(StatusCode::OK, Media::Protobuf, self.protobuf_list(&objects, meta).into())
            }
            Form::Object => {
                let items = objects.iter().map(|object| {
                    let mut item = self.converted(object, object.revision);
                    if let Some(fields) = item.as_object_mut() {
                        fields.remove("kind");
                        fields.remove("apiVersion");
                    }
                    item
                });
                let list = json!({
                    "kind": self.resource.list_kind(), "apiVersion": self.resource.api_version(),
                    "metadata": list_meta(meta), "items": items.collect::<Vec<_>>(),
                });
                encoded(StatusCode::OK, &self.format, list)
            }
            Form::Metadata => {
                let items = objects.iter().map(|o| self.metadata_of(self.converted(o, o.revision), true));
                let list = json!({
                    "kind": "PartialObjectMetadataList", "apiVersion": self.format.meta_version(),
                    "metadata": list_meta(meta), "items": items.collect::<Vec<_>>(),
                });
                encoded(StatusCode::OK, &self.format, list)
            }
            Form::Table if self.format.media == Media::Json && !self.format.pretty => {
                respond(StatusCode::OK, Media::Json, Body::Chunks(self.table_chunks(objects, meta)))
            }
            Form::Table => {
                let rows = objects.iter().map(|object| self.row(self.converted(object, object.revision)));
                encoded(StatusCode::OK, &self.format, self.table(list_meta(meta), Some(rows.collect()), true))
            }
        }
    }

    /// A list item's worth at a time, so that the whole list never stands in memory.
    fn plain_chunks(
        &self,
        objects: Vec<Arc<Object>>,
        meta: &ListMeta,
    ) -> Box<dyn Iterator<Item = Bytes> + Send> {
        let head = format!(
            "{{\"kind\":\"{}\",\"apiVersion\":\"{}\",\"metadata\":{},\"items\":[",
            self.resource.list_kind(),
            self.resource.api_version(),
            list_meta(meta)
        );
        chunks(head, objects, |object, out| object.write_json(Place::Item, object.revision, out))
    }

    fn table_chunks(
        &self,
        objects: Vec<Arc<Object>>,
        meta: &ListMeta,
    ) -> Box<dyn Iterator<Item = Bytes> + Send> {
        let mut head = self.table(list_meta(meta), None, true).to_string();
        head.pop();
        head.push_str(",\"rows\":[");
        let renderer = self.clone();
        chunks(head, objects, move |object, out| {
            let row = renderer.row(renderer.converted(object, object.revision));
            let _ = serde_json::to_writer(out, &row);
        })
    }

    fn protobuf_list(&self, objects: &[Arc<Object>], meta: &ListMeta) -> Vec<u8> {
        let mut items = Vec::with_capacity(objects.len());
        for object in objects {
            let mut item = self.converted(object, object.revision);
            if let Some(fields) = item.as_object_mut() {
                fields.remove("kind");
                fields.remove("apiVersion");
            }
            items.push(item);
        }
        let list = json!({
            "kind": self.resource.list_kind(), "apiVersion": self.resource.api_version(), "metadata": list_meta(meta),
        });
        let mut list = list;
        list["items"] = Value::Array(items);
        crate::codec::to_protobuf(&list)
    }

    /// A watch event; `first` tells whether a table still owes its column definitions.
    pub fn event(&self, kind: &str, object: &Object, revision: Revision, first: bool) -> Bytes {
        if self.is_plain() {
            return json_line(kind, object, revision);
        }
        let value = self.converted(object, revision);
        self.event_value(kind, value, first)
    }

    /// The event for a watcher without selectors, shared between all of them where possible.
    pub fn shared_event(&self, event: &Event, first: bool) -> Bytes {
        if self.is_plain() {
            event.line()
        } else {
            self.event(event.kind(), &event.object, event.revision, first)
        }
    }

    /// A bookmark: an object of the kind with nothing but a resourceVersion.
    pub fn bookmark(&self, revision: Revision, initial_events_end: bool, first: bool) -> Bytes {
        let mut metadata = json!({"resourceVersion": revision.to_string(), "creationTimestamp": null});
        if initial_events_end {
            metadata["annotations"] = json!({"k8s.io/initial-events-end": "true"});
        }
        let value = json!({
            "kind": self.resource.kind, "apiVersion": self.resource.api_version(), "metadata": metadata,
        });
        self.event_value("BOOKMARK", value, first)
    }

    pub fn error_event(&self, status: &Status) -> Bytes {
        let value = serde_json::to_value(status).unwrap_or_default();
        crate::codec::watch_event(self.format.media, "ERROR", value)
    }

    fn event_value(&self, kind: &str, value: Value, first: bool) -> Bytes {
        let value = match self.format.form {
            Form::Object => value,
            Form::Metadata => self.metadata_of(value, true),
            Form::Table => {
                let revision = value.pointer("/metadata/resourceVersion").cloned().unwrap_or_default();
                let rows = if kind == "BOOKMARK" { Vec::new() } else { vec![self.row(value)] };
                self.table(json!({"resourceVersion": revision}), Some(rows), first)
            }
        };
        crate::codec::watch_event(self.format.media, kind, value)
    }

    /// The object in the version asked for.
    pub fn converted(&self, object: &Object, revision: Revision) -> Value {
        crate::codec::from_stored(self.resource, object.value_at(revision))
    }

    fn metadata_of(&self, mut value: Value, typed: bool) -> Value {
        let mut metadata = Map::new();
        if typed {
            metadata.insert("kind".into(), "PartialObjectMetadata".into());
            metadata.insert("apiVersion".into(), self.format.meta_version().into());
        }
        metadata.insert("metadata".into(), value.get_mut("metadata").map(Value::take).unwrap_or_default());
        Value::Object(metadata)
    }

    fn row(&self, value: Value) -> Value {
        let stored = stored_as(self.resource);
        let cells = api::columns::cells(stored.group, stored.plural, &value, self.now);
        let mut row = json!({"cells": cells});
        let conditions = api::columns::conditions(stored.group, stored.plural, &value);
        if !conditions.is_empty() {
            row["conditions"] = Value::Array(conditions);
        }
        match self.include {
            Include::Nothing => row["object"] = Value::Null,
            Include::Metadata => row["object"] = self.metadata_of(value, true),
            Include::Object => row["object"] = value,
        }
        row
    }

    fn table(&self, metadata: Value, rows: Option<Vec<Value>>, with_columns: bool) -> Value {
        let stored = stored_as(self.resource);
        let columns = with_columns.then(|| {
            let columns = api::columns::columns(stored.group, stored.plural);
            columns
                .iter()
                .map(|column| {
                    json!({
                        "name": column.name, "type": column.kind, "format": column.format,
                        "description": column.description, "priority": column.priority,
                    })
                })
                .collect::<Vec<_>>()
        });
        let mut table = json!({
            "kind": "Table", "apiVersion": self.format.meta_version(), "metadata": metadata, "columnDefinitions": columns,
        });
        if let Some(rows) = rows {
            table["rows"] = Value::Array(rows);
        }
        table
    }
}

/// `head`, the objects with commas between them, and `]}`, in chunks.
fn chunks(
    head: String,
    objects: Vec<Arc<Object>>,
    write: impl Fn(&Object, &mut Vec<u8>) + Send + 'static,
) -> Box<dyn Iterator<Item = Bytes> + Send> {
    let mut buffer = head.into_bytes();
    let mut objects = objects.into_iter();
    let mut first = true;
    let mut done = false;
    Box::new(std::iter::from_fn(move || {
        while !done && buffer.len() < CHUNK {
            match objects.next() {
                Some(object) => {
                    if !std::mem::take(&mut first) {
                        buffer.push(b',');
                    }
                    write(&object, &mut buffer);
                }
                None => {
                    buffer.extend_from_slice(b"]}\n");
                    done = true;
                }
            }
        }
        let chunk =
            std::mem::replace(&mut buffer, Vec::with_capacity(if done { 0 } else { CHUNK + CHUNK / 4 }));
        (!chunk.is_empty()).then(|| chunk.into())
    }))
}

fn list_meta(meta: &ListMeta) -> Value {
    let mut value = json!({"resourceVersion": meta.revision.to_string()});
    if !meta.token.is_empty() {
        value["continue"] = json!(meta.token);
    }
    if let Some(remaining) = meta.remaining.filter(|remaining| *remaining > 0) {
        value["remainingItemCount"] = json!(remaining);
    }
    value
}

/// A value that is no stored object (reviews, scales, discovery) in the media type asked for.
pub fn encoded(code: StatusCode, format: &Format, value: Value) -> Response<Body> {
    let bytes = match format.media {
        Media::Json if format.pretty => {
            let mut bytes = serde_json::to_vec_pretty(&value).unwrap_or_default();
            bytes.push(b'\n');
            bytes
        }
        Media::Json => {
            let mut bytes = serde_json::to_vec(&value).unwrap_or_default();
            bytes.push(b'\n');
            bytes
        }
        Media::Yaml => crate::codec::to_yaml(&value).into_bytes(),
        Media::Protobuf => crate::codec::to_protobuf(&value),
    };
    respond(code, format.media, bytes.into())
}

pub fn respond(code: StatusCode, media: Media, body: Body) -> Response<Body> {
    let mut response = Response::new(body);
    *response.status_mut() = code;
    let headers = response.headers_mut();
    headers.insert(header::CONTENT_TYPE, header::HeaderValue::from_static(media.content_type()));
    headers.insert(header::CACHE_CONTROL, header::HeaderValue::from_static("no-cache, private"));
    response
}

/// A failure, in the media type asked for; tables have no form for it.
pub fn failure(format: &Format, status: &Status) -> Response<Body> {
    let code = StatusCode::from_u16(status.code).unwrap_or(StatusCode::INTERNAL_SERVER_ERROR);
    let value = serde_json::to_value(status).unwrap_or_default();
    let mut response = encoded(code, &Format { form: Form::Object, ..*format }, value);
    let seconds = status.details.as_ref().map_or(0, |details| details.retry_after_seconds);
    if seconds > 0 {
        response.headers_mut().insert(header::RETRY_AFTER, seconds.into());
    }
    response
}
