//! Encodes objects, lists and watch events in the negotiated format.
//!
//! The fast path is plain JSON in the storage version: it joins stored bytes without decoding.

mod field_order;
mod list;

use std::io::Write as _;

use api::{Resource, Status};
use bytes::Bytes;
use http::{Response, StatusCode, header};
use jiff::Timestamp;
use serde_json::{Value, json};
use store::Revision;

pub use self::field_order::OrderedJson;
use crate::body::Body;
use crate::cache::{Event, json_line};
use crate::negotiate::{Format, MediaType, OutputKind};
use crate::object::{Object, ObjectPosition};
use crate::registry::stored_as;

/// Encodes the results of handlers; created once per request.
#[derive(Clone)]
pub struct Renderer {
    pub resource: &'static Resource,
    pub format: Format,
    pub include: IncludeObject,
    pub now: Timestamp,
}

/// The `includeObject` option of tables.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum IncludeObject {
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

impl IncludeObject {
    pub fn parse(text: &str) -> Result<IncludeObject, Status> {
        match text {
            "" | "Metadata" => Ok(IncludeObject::Metadata),
            "None" => Ok(IncludeObject::Nothing),
            "Object" => Ok(IncludeObject::Object),
            other => Err(Status::bad_request(format!(
                "Unable to convert to Table as requested: includeObject: Invalid value: {}: must be 'Metadata', 'Object', 'None', or empty",
                api::field::quote(other)
            ))),
        }
    }
}

impl Renderer {
    /// Whether stored bytes can be sent unchanged.
    fn is_plain(&self) -> bool {
        self.format.is_plain() && self.is_stored_form()
    }

    /// Whether the requested version is the storage version.
    fn is_stored_form(&self) -> bool {
        std::ptr::eq(stored_as(self.resource), self.resource)
    }

    pub fn object(&self, code: StatusCode, object: &Object) -> Response<Body> {
        if self.is_plain() {
            let mut bytes = Vec::with_capacity(object.size() + 48);
            object.write_json(ObjectPosition::Root, object.revision, &mut bytes);
            bytes.push(b'\n');
            return build_response(code, MediaType::Json, bytes.into());
        }
        self.value(code, self.convert(object, object.revision))
    }

    /// Encodes a decoded object in the requested version.
    pub fn value(&self, code: StatusCode, value: Value) -> Response<Body> {
        match self.format.output_kind {
            OutputKind::Object => encode_response(code, &self.format, value),
            OutputKind::Metadata => encode_response(code, &self.format, self.metadata_of(value)),
            OutputKind::Table => {
                let meta = json!({"resourceVersion": value.pointer("/metadata/resourceVersion").cloned().unwrap_or_default()});
                let row = self.row(crate::codec::to_stored_version(self.resource, value));
                encode_response(code, &self.format, self.table(meta, row, true))
            }
        }
    }

    /// Encodes a watch event. With `first`, a table includes its column definitions.
    pub fn event(&self, kind: &str, object: &Object, revision: Revision, first: bool) -> Bytes {
        if self.is_plain() {
            return json_line(kind, object, revision);
        }
        if self.format.output_kind == OutputKind::Metadata && self.format.media == MediaType::Json {
            let mut line = Vec::with_capacity(1024);
            let _ = write!(line, "{{\"type\":\"{kind}\",\"object\":");
            write_partial(self.format.meta_version(), object, revision, &mut line);
            line.extend_from_slice(b"}\n");
            return line.into();
        }
        let value = match self.format.output_kind {
            OutputKind::Table => object.value_at(revision),
            _ => self.convert(object, revision),
        };
        self.event_value(kind, value, first)
    }

    /// Encodes an event for a watch without selectors. Plain JSON is shared among all watches.
    pub fn shared_event(&self, event: &Event, first: bool) -> Bytes {
        if self.is_plain() {
            event.line()
        } else {
            self.event(event.kind(), &event.object, event.revision, first)
        }
    }

    /// Encodes a bookmark: an object with only a resourceVersion.
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
        let value = match self.format.output_kind {
            OutputKind::Object => value,
            OutputKind::Metadata => self.metadata_of(value),
            OutputKind::Table => {
                let revision = value.pointer("/metadata/resourceVersion").cloned().unwrap_or_default();
                let row = self.row(value);
                self.table(json!({"resourceVersion": revision}), row, first)
            }
        };
        crate::codec::watch_event(self.format.media, kind, value)
    }

    /// The object in the requested version.
    pub fn convert(&self, object: &Object, revision: Revision) -> Value {
        crate::codec::from_stored(self.resource, object.value_at(revision))
    }

    fn metadata_of(&self, mut value: Value) -> Value {
        let mut partial = json!({"kind": "PartialObjectMetadata", "apiVersion": self.format.meta_version()});
        partial["metadata"] = value.get_mut("metadata").map(Value::take).unwrap_or_default();
        partial
    }

    /// The table row of an object in its storage version, which the columns are defined for.
    fn row(&self, value: Value) -> Value {
        let stored = stored_as(self.resource);
        let cell_values = match self.resource.custom {
            Some(crd) => crd.version_schema().cells(&value, self.now),
            None => api::columns::cells(stored.group, stored.plural, &value, self.now),
        };
        let mut row = json!({"cells": cell_values});
        let conditions = api::columns::conditions(stored.group, stored.plural, &value);
        if !conditions.is_empty() {
            row["conditions"] = Value::Array(conditions);
        }
        // The end of the initial events is marked in the object's metadata, so it is included even
        // with `includeObject=None`.
        let is_initial_events_end =
            value.pointer("/metadata/annotations/k8s.io~1initial-events-end").is_some();
        row["object"] = match self.include {
            IncludeObject::Object => crate::codec::from_stored(self.resource, value),
            IncludeObject::Nothing if !is_initial_events_end => Value::Null,
            IncludeObject::Nothing | IncludeObject::Metadata => self.metadata_of(value),
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
        if let Some(crd) = self.resource.custom {
            return crd.version_schema().column_definitions();
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

/// Writes the object as `PartialObjectMetadata`. Metadata is the same in every version of a
/// resource.
fn write_partial(meta_version: &str, object: &Object, revision: Revision, out: &mut Vec<u8>) {
    let _ = write!(out, "{{\"kind\":\"PartialObjectMetadata\",\"apiVersion\":\"{meta_version}\",");
    object.write_metadata(revision, out);
    out.push(b'}');
}

fn list_meta(meta: &ListMeta) -> Value {
    let mut value = json!({});
    // Lists of resources that are never stored have no revision.
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

/// Encodes a value that is no stored object (review, Scale, discovery) in the negotiated media
/// type.
pub fn encode_response(code: StatusCode, format: &Format, value: Value) -> Response<Body> {
    let bytes = match format.media {
        MediaType::Json => json(format, &OrderedJson::object(&value)),
        MediaType::Yaml => crate::codec::to_yaml(&value).into_bytes(),
        MediaType::Protobuf => crate::codec::to_protobuf(&value),
    };
    build_response(code, format.media, bytes.into())
}

/// Encodes JSON, indented if requested.
pub fn json(format: &Format, value: &impl serde::Serialize) -> Vec<u8> {
    let bytes = if format.pretty { serde_json::to_vec_pretty(value) } else { serde_json::to_vec(value) };
    let mut bytes = bytes.unwrap_or_default();
    bytes.push(b'\n');
    bytes
}

pub fn build_response(code: StatusCode, media: MediaType, body: Body) -> Response<Body> {
    let mut response = Response::new(body);
    *response.status_mut() = code;
    let headers = response.headers_mut();
    headers.insert(header::CONTENT_TYPE, header::HeaderValue::from_static(media.content_type()));
    headers.insert(header::CACHE_CONTROL, header::HeaderValue::from_static("no-cache, private"));
    response
}

/// Encodes a Status in the negotiated media type; tables do not apply to errors.
pub fn status_response(format: &Format, status: &Status) -> Response<Body> {
    let code = StatusCode::from_u16(status.code).unwrap_or(StatusCode::INTERNAL_SERVER_ERROR);
    if status.is_unknown_path() {
        // The response of upstream's router. Clients extend it with the requested resource.
        let mut response =
            build_response(code, MediaType::Json, "404 page not found\n".as_bytes().to_vec().into());
        let text = header::HeaderValue::from_static("text/plain; charset=utf-8");
        response.headers_mut().insert(header::CONTENT_TYPE, text);
        return response;
    }
    let mut response = match format.media {
        // Serialized from the struct, so that fields are in upstream's order.
        MediaType::Json => build_response(code, MediaType::Json, json(format, status).into()),
        _ => {
            let value = serde_json::to_value(status).unwrap_or_default();
            encode_response(code, &Format { output_kind: OutputKind::Object, ..*format }, value)
        }
    };
    let seconds = status.details.as_ref().map_or(0, |details| details.retry_after_seconds);
    if seconds > 0 {
        response.headers_mut().insert(header::RETRY_AFTER, seconds.into());
    }
    response
}
