//! Objects, lists and events in the form a client asked for.
//!
//! Plain JSON of a kind in its stored version is the fast path: bytes are joined, nothing is decoded.

mod list;
mod order;

use std::io::Write as _;

use api::{Resource, Status};
use bytes::Bytes;
use http::{Response, StatusCode, header};
use jiff::Timestamp;
use serde_json::{Value, json};
use store::Revision;

pub use self::order::InOrder;
use crate::body::Body;
use crate::cache::{Event, json_line};
use crate::negotiate::{Form, Format, Media};
use crate::object::{Object, Place};
use crate::registry::stored_as;

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
            other => Err(Status::bad_request(format!(
                "Unable to convert to Table as requested: includeObject: Invalid value: {}: must be 'Metadata', 'Object', 'None', or empty",
                api::field::quoted(other)
            ))),
        }
    }
}

impl Renderer {
    /// Stored bytes can be joined as they are.
    fn is_plain(&self) -> bool {
        self.format.is_plain() && self.is_stored_form()
    }

    /// The version asked for is the one stored.
    fn is_stored_form(&self) -> bool {
        std::ptr::eq(stored_as(self.resource), self.resource)
    }

    pub fn object(&self, code: StatusCode, object: &Object) -> Response<Body> {
        if self.is_plain() {
            let mut bytes = Vec::with_capacity(object.size() + 48);
            object.write_json(Place::Whole, object.revision, &mut bytes);
            bytes.push(b'\n');
            return respond(code, Media::Json, bytes.into());
        }
        self.value(code, self.converted(object, object.revision))
    }

    /// An object that is already decoded, in the version asked for.
    pub fn value(&self, code: StatusCode, value: Value) -> Response<Body> {
        match self.format.form {
            Form::Object => encoded(code, &self.format, value),
            Form::Metadata => encoded(code, &self.format, self.metadata_of(value)),
            Form::Table => {
                let meta = json!({"resourceVersion": value.pointer("/metadata/resourceVersion").cloned().unwrap_or_default()});
                let row = self.row(crate::codec::to_stored_version(self.resource, value));
                encoded(code, &self.format, self.table(meta, row, true))
            }
        }
    }

    /// A watch event; `first` tells whether a table still owes its column definitions.
    pub fn event(&self, kind: &str, object: &Object, revision: Revision, first: bool) -> Bytes {
        if self.is_plain() {
            return json_line(kind, object, revision);
        }
        if self.format.form == Form::Metadata && self.format.media == Media::Json {
            let mut line = Vec::with_capacity(1024);
            let _ = write!(line, "{{\"type\":\"{kind}\",\"object\":");
            write_partial(self.format.meta_version(), object, revision, &mut line);
            line.extend_from_slice(b"}\n");
            return line.into();
        }
        let value = match self.format.form {
            Form::Table => object.value_at(revision),
            _ => self.converted(object, revision),
        };
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
        let mut metadata = json!({"resourceVersion": revision.to_string()});
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
            Form::Metadata => self.metadata_of(value),
            Form::Table => {
                let revision = value.pointer("/metadata/resourceVersion").cloned().unwrap_or_default();
                let row = self.row(value);
                self.table(json!({"resourceVersion": revision}), row, first)
            }
        };
        crate::codec::watch_event(self.format.media, kind, value)
    }

    /// The object in the version asked for.
    pub fn converted(&self, object: &Object, revision: Revision) -> Value {
        crate::codec::from_stored(self.resource, object.value_at(revision))
    }

    fn metadata_of(&self, mut value: Value) -> Value {
        let mut partial = json!({"kind": "PartialObjectMetadata", "apiVersion": self.format.meta_version()});
        partial["metadata"] = value.get_mut("metadata").map(Value::take).unwrap_or_default();
        partial
    }

    /// A table's row for an object in the version it is stored in, which is what columns know.
    fn row(&self, value: Value) -> Value {
        let stored = stored_as(self.resource);
        let cells = match self.resource.custom {
            Some(slot) => slot.form().cells(&value, self.now),
            None => api::columns::cells(stored.group, stored.plural, &value, self.now),
        };
        let mut row = json!({"cells": cells});
        let conditions = api::columns::conditions(stored.group, stored.plural, &value);
        if !conditions.is_empty() {
            row["conditions"] = Value::Array(conditions);
        }
        // Even a client that wants no objects is told that the initial events are complete.
        let tells_end = value.pointer("/metadata/annotations/k8s.io~1initial-events-end").is_some();
        row["object"] = match self.include {
            Include::Object => crate::codec::from_stored(self.resource, value),
            Include::Nothing if !tells_end => Value::Null,
            Include::Nothing | Include::Metadata => self.metadata_of(value),
        };
        row
    }

    fn table(&self, metadata: Value, row: Value, with_columns: bool) -> Value {
        let columns = if with_columns { self.columns() } else { Value::Null };
        let mut table = json!({
            "kind": "Table", "apiVersion": self.format.meta_version(), "columnDefinitions": columns,
        });
        table["metadata"] = metadata;
        table["rows"] = Value::Array(vec![row]);
        table
    }

    fn columns(&self) -> Value {
        if let Some(slot) = self.resource.custom {
            return slot.form().column_definitions();
        }
        let stored = stored_as(self.resource);
        let columns = api::columns::columns(stored.group, stored.plural);
        let column = |column: &api::columns::Column| {
            json!({
                "name": column.name, "type": column.kind, "format": column.format,
                "description": column.description, "priority": column.priority,
            })
        };
        columns.iter().map(column).collect()
    }
}

/// Appends the object as `PartialObjectMetadata`, whose metadata are the same in every version of a kind.
fn write_partial(meta_version: &str, object: &Object, revision: Revision, out: &mut Vec<u8>) {
    let _ = write!(out, "{{\"kind\":\"PartialObjectMetadata\",\"apiVersion\":\"{meta_version}\",");
    object.write_metadata(revision, out);
    out.push(b'}');
}

fn list_meta(meta: &ListMeta) -> Value {
    let mut value = json!({});
    // What is never stored has no revision.
    if meta.revision > 0 {
        value["resourceVersion"] = json!(meta.revision.to_string());
    }
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
        Media::Json => json(format, &InOrder::object(&value)),
        Media::Yaml => crate::codec::to_yaml(&value).into_bytes(),
        Media::Protobuf => crate::codec::to_protobuf(&value),
    };
    respond(code, format.media, bytes.into())
}

/// JSON text, indented for people.
pub fn json(format: &Format, value: &impl serde::Serialize) -> Vec<u8> {
    let bytes = if format.pretty { serde_json::to_vec_pretty(value) } else { serde_json::to_vec(value) };
    let mut bytes = bytes.unwrap_or_default();
    bytes.push(b'\n');
    bytes
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
    if status.is_no_such_path() {
        // Said as upstream's router says it; clients then add what they have asked for.
        let mut response = respond(code, Media::Json, "404 page not found\n".as_bytes().to_vec().into());
        let text = header::HeaderValue::from_static("text/plain; charset=utf-8");
        response.headers_mut().insert(header::CONTENT_TYPE, text);
        return response;
    }
    let mut response = match format.media {
        // Fields in upstream's order, for whoever reads them.
        Media::Json => respond(code, Media::Json, json(format, status).into()),
        _ => {
            let value = serde_json::to_value(status).unwrap_or_default();
            encoded(code, &Format { form: Form::Object, ..*format }, value)
        }
    };
    let seconds = status.details.as_ref().map_or(0, |details| details.retry_after_seconds);
    if seconds > 0 {
        response.headers_mut().insert(header::RETRY_AFTER, seconds.into());
    }
    response
}
