//! Decoding of request bodies, and encoding of responses in each media type.

use std::borrow::Cow;
use std::fmt;

use api::json::JsonExt as _;
use api::{Resource, Status};
use bytes::Bytes;
use http::{HeaderMap, header};
use schema::{DecodeError, Table, TypeId};
use serde::de::{Deserialize, Deserializer, IgnoredAny, MapAccess, Visitor};
use serde_json::error::Category;
use serde_json::{Value, json};
use serde_saphyr::DuplicateKeyPolicy;

use crate::custom;
use crate::negotiate::{MediaType, PROTOBUF};
use crate::patch_handler::strict;
use crate::subresource_view::SubresourceView;

/// `fieldValidation`: how unknown and duplicate fields are handled.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum FieldValidation {
    Ignore,
    Warn,
    Strict,
}

/// A decoded body: checked against the schema, without unknown fields.
#[derive(Debug)]
pub struct Decoded {
    pub value: Value,
    pub warnings: Vec<String>,
}

impl FieldValidation {
    /// `None` for an unknown value.
    pub fn parse(text: &str) -> Option<FieldValidation> {
        match text {
            "" | "Warn" => Some(FieldValidation::Warn),
            "Ignore" => Some(FieldValidation::Ignore),
            "Strict" => Some(FieldValidation::Strict),
            _ => None,
        }
    }

    /// Turns strict decoding errors into warnings or an error.
    pub fn handle_strict_errors(
        self,
        kind: &str,
        version: &str,
        strict_errors: Vec<String>,
    ) -> Result<Vec<String>, Status> {
        match self {
            FieldValidation::Ignore => Ok(Vec::new()),
            FieldValidation::Warn => Ok(strict_errors),
            FieldValidation::Strict if strict_errors.is_empty() => Ok(strict_errors),
            FieldValidation::Strict => Err(Status::bad_request(format!(
                "{kind} in version {version:?} cannot be handled as a {kind}: strict decoding error: {}",
                strict_errors.join(", ")
            ))),
        }
    }
}

/// The media type of a request body; JSON by default.
pub fn body_media(headers: &HeaderMap) -> Result<MediaType, Status> {
    let content_type = headers.get(header::CONTENT_TYPE).and_then(|value| value.to_str().ok()).unwrap_or("");
    match content_type.split(';').next().unwrap_or("").trim() {
        "" | "application/json" => Ok(MediaType::Json),
        "application/yaml" => Ok(MediaType::Yaml),
        PROTOBUF => Ok(MediaType::Protobuf),
        _ => {
            Err(unsupported_media("application/json, application/yaml, application/vnd.kubernetes.protobuf"))
        }
    }
}

pub fn unsupported_media(accepted: &str) -> Status {
    Status::failure(
        415,
        "UnsupportedMediaType",
        format!(
            "the body of the request was in an unknown format - accepted media types include: {accepted}"
        ),
    )
}

/// Decodes the body of a request to an object or subresource of `row`.
pub fn decode_row(
    media: MediaType,
    body: &[u8],
    row: &Resource,
    view: SubresourceView,
    validation: FieldValidation,
) -> Result<Decoded, Status> {
    let (group, version, kind) = view.kind(row);
    let Some(crd) = row.custom.filter(|_| view != SubresourceView::Scale) else {
        return decode(media, body, (group, version, kind), validation);
    };
    let cannot = |reason: String| {
        Status::bad_request(format!("{kind} in version {version:?} cannot be handled as a {kind}: {reason}"))
    };
    let (json, duplicates) = match media {
        MediaType::Json => (Cow::Borrowed(body), None),
        MediaType::Yaml => {
            let yaml = read_yaml(body).map_err(|reason| unrecognized(kind, &reason, body))?;
            (Cow::Owned(yaml.json), yaml.duplicates)
        }
        MediaType::Protobuf => return Err(cannot(custom::NO_PROTOBUF.to_owned())),
    };
    let meta = type_meta(&json).map_err(|error| unrecognized(kind, &error, body))?;
    let expected = api_version(group, version);
    if !meta.api_version.is_empty() && meta.api_version != expected {
        return Err(Status::bad_request(format!(
            "the API version in the data ({}) does not match the expected API version ({expected})",
            meta.api_version
        )));
    }
    let decoded = custom::decode(&crd.version_schema(), &json).map_err(|error| cannot(error.to_string()))?;
    let (mut value, mut strict_errors) = decoded;
    strict_errors.splice(..0, duplicates);
    // A wrong kind is reported by validation.
    let body_kind = if meta.kind.is_empty() { kind } else { &meta.kind };
    set_type_meta(&mut value, group, version, body_kind);
    let warnings = validation.handle_strict_errors(kind, version, strict_errors)?;
    Ok(Decoded { value, warnings })
}

/// Normalizes a value to the schema of the object or subresource; returns the strict decoding
/// errors.
pub fn normalize_row(
    row: &Resource,
    view: SubresourceView,
    value: &mut Value,
) -> Result<Vec<String>, DecodeError> {
    let (group, version, kind) = view.kind(row);
    match row.custom.filter(|_| view != SubresourceView::Scale) {
        Some(crd) => custom::normalize(&crd.version_schema(), value),
        None => {
            let ty = type_of(group, version, kind).map_err(|status| DecodeError::Type(status.message))?;
            schema::normalize(schema::kubernetes(), ty, value)
        }
    }
}

/// Calls `f` with the type of the row's kind and its schema table.
pub fn with_type<T>(row: &Resource, f: impl FnOnce(&Table, TypeId) -> T) -> Result<T, Status> {
    match row.custom {
        Some(crd) => {
            let version_schema = crd.version_schema();
            Ok(f(&version_schema.table, version_schema.root))
        }
        None => Ok(f(schema::kubernetes(), row_type(row)?)),
    }
}

/// Decodes an object of the given kind from a request body.
pub fn decode(
    media: MediaType,
    body: &[u8],
    (group, version, kind): (&str, &str, &str),
    validation: FieldValidation,
) -> Result<Decoded, Status> {
    let ty = type_of(group, version, kind)?;
    let table = schema::kubernetes();
    let cannot = |reason: String| {
        Status::bad_request(format!("{kind} in version {version:?} cannot be handled as a {kind}: {reason}"))
    };
    let decoded = match media {
        MediaType::Json => {
            let decoded = schema::from_json(table, ty, body);
            // As upstream, a wrong kind is reported before any other error. Bodies rarely have one,
            // so apiVersion and kind are only parsed separately if the decoded object does not have
            // the expected ones.
            if !decoded.as_ref().is_ok_and(|decoded| has_gvk(&decoded.value, group, version, kind)) {
                let meta = type_meta(body).map_err(|error| unrecognized(kind, &error, body))?;
                check_type_meta(&meta, group, version, kind)?;
            }
            decoded.map_err(|error| cannot(error.to_string()))?
        }
        MediaType::Yaml => {
            let yaml = read_yaml(body).map_err(|reason| unrecognized(kind, &reason, body))?;
            let meta = type_meta(&yaml.json).map_err(|error| unrecognized(kind, &error, body))?;
            check_type_meta(&meta, group, version, kind)?;
            let mut decoded =
                schema::from_json(table, ty, &yaml.json).map_err(|error| cannot(error.to_string()))?;
            decoded.strict_errors.splice(..0, yaml.duplicates);
            decoded
        }
        MediaType::Protobuf => {
            let envelope =
                schema::protobuf::decode_envelope(body).map_err(|error| cannot(error.to_string()))?;
            let meta =
                TypeMeta { api_version: envelope.api_version.to_owned(), kind: envelope.kind.to_owned() };
            check_type_meta(&meta, group, version, kind)?;
            let value = schema::protobuf::from_protobuf(table, ty, envelope.raw)
                .map_err(|error| cannot(error.to_string()))?;
            schema::Decoded { value, strict_errors: Vec::new() }
        }
    };
    let mut value = decoded.value;
    set_type_meta(&mut value, group, version, kind);
    let warnings = validation.handle_strict_errors(kind, version, decoded.strict_errors)?;
    Ok(Decoded { value, warnings })
}

pub fn api_version(group: &str, version: &str) -> String {
    if group.is_empty() { version.to_owned() } else { format!("{group}/{version}") }
}

fn has_gvk(value: &Value, group: &str, version: &str, kind: &str) -> bool {
    let value_version = value.text("apiVersion");
    value.text("kind") == kind
        && match group {
            "" => value_version == version,
            _ => value_version.split_once('/') == Some((group, version)),
        }
}

pub fn set_type_meta(value: &mut Value, group: &str, version: &str, kind: &str) {
    if let Some(fields) = value.as_object_mut() {
        fields.insert("kind".into(), kind.into());
        fields.insert("apiVersion".into(), api_version(group, version).into());
    }
}

/// The type of a kind in the schema table.
pub fn type_of(group: &str, version: &str, kind: &str) -> Result<TypeId, Status> {
    schema::kubernetes().type_by_kind(group, version, kind).ok_or_else(|| {
        Status::internal(format!("no schema type for {kind} in {}", api_version(group, version)))
    })
}

pub fn row_type(row: &Resource) -> Result<TypeId, Status> {
    type_of(row.group, row.version, row.kind)
}

/// apiVersion and kind of a body; empty if absent, the last value if duplicate.
#[derive(Debug, Default, PartialEq)]
struct TypeMeta {
    api_version: String,
    kind: String,
}

/// The two fields with any JSON type.
#[derive(Default)]
struct RawTypeMeta {
    api_version: Value,
    kind: Value,
}

impl<'de> Deserialize<'de> for RawTypeMeta {
    fn deserialize<D: Deserializer<'de>>(deserializer: D) -> Result<RawTypeMeta, D::Error> {
        struct Fields;
        impl<'de> Visitor<'de> for Fields {
            type Value = RawTypeMeta;

            fn expecting(&self, f: &mut fmt::Formatter) -> fmt::Result {
                f.write_str("an object")
            }

            fn visit_unit<E>(self) -> Result<RawTypeMeta, E> {
                Ok(RawTypeMeta::default())
            }

            fn visit_map<A: MapAccess<'de>>(self, mut map: A) -> Result<RawTypeMeta, A::Error> {
                let mut meta = RawTypeMeta::default();
                while let Some(name) = map.next_key::<Cow<str>>()? {
                    match &*name {
                        "apiVersion" => meta.api_version = map.next_value()?,
                        "kind" => meta.kind = map.next_value()?,
                        _ => drop(map.next_value::<IgnoredAny>()?),
                    }
                }
                Ok(meta)
            }
        }
        deserializer.deserialize_any(Fields)
    }
}

fn type_meta(body: &[u8]) -> Result<TypeMeta, String> {
    let raw: RawTypeMeta = match serde_json::from_slice(body) {
        Ok(raw) => raw,
        // Nested too deeply: the real decoder reports that.
        Err(error) if error.to_string().starts_with("recursion limit") => RawTypeMeta::default(),
        Err(error) => {
            let reason = match error.classify() {
                Category::Data => {
                    format!("json: cannot unmarshal {} into Go value of type {GO_STRUCT}", json_type(body))
                }
                _ => schema::syntax::syntax_error(body).unwrap_or_else(|| error.to_string()),
            };
            return Err(format!("couldn't get version/kind; json parse error: {reason}"));
        }
    };
    let text = |name: &str, value: Value| match value {
        Value::Null => Ok(String::new()),
        Value::String(text) => Ok(text),
        other => Err(format!(
            "couldn't get version/kind; json parse error: json: cannot unmarshal {} into Go struct field .{name} of type string",
            json_type(other.to_string().as_bytes())
        )),
    };
    let meta = TypeMeta { api_version: text("apiVersion", raw.api_version)?, kind: text("kind", raw.kind)? };
    match meta.api_version.matches('/').count() {
        0 | 1 => Ok(meta),
        _ => Err(format!("unexpected GroupVersion string: {}", meta.api_version)),
    }
}

/// The Go type in upstream's error messages.
const GO_STRUCT: &str =
    r#"struct { APIVersion string "json:\"apiVersion,omitempty\""; Kind string "json:\"kind,omitempty\"" }"#;

/// Go's name for the type of a JSON value.
fn json_type(text: &[u8]) -> &'static str {
    match text.trim_ascii_start().first() {
        Some(b'{') => "object",
        Some(b'[') => "array",
        Some(b'"') => "string",
        Some(b't' | b'f') => "bool",
        _ => "number",
    }
}

/// The error for a body that cannot be decoded at all.
fn unrecognized(kind: &str, reason: &str, body: &[u8]) -> Status {
    const MAX_SUMMARY_BYTES: usize = 30;
    let head = &body[..body.len().min(MAX_SUMMARY_BYTES)];
    let more = if body.len() > MAX_SUMMARY_BYTES { " ..." } else { "" };
    let summary = match body.first() {
        None => "<empty>".to_owned(),
        Some(b'{') => String::from_utf8_lossy(head).into_owned(),
        Some(_) => head.iter().map(|byte| format!("{byte:02x}")).collect(),
    };
    Status::bad_request(format!(
        "the object provided is unrecognized (must be of type {kind}): {reason} ({summary}{more})"
    ))
}

/// apiVersion and kind of the body must match the request, unless they are absent.
fn check_type_meta(meta: &TypeMeta, group: &str, version: &str, kind: &str) -> Result<(), Status> {
    let expected = api_version(group, version);
    let body_version = if meta.api_version.is_empty() { &expected } else { &meta.api_version };
    let body_kind = if meta.kind.is_empty() { kind } else { &meta.kind };
    if *body_version == expected && body_kind == kind {
        return Ok(());
    }
    let (body_group, short) = body_version.split_once('/').unwrap_or(("", body_version));
    let cannot = |reason: String| {
        Err(Status::bad_request(format!(
            "{body_kind} in version {short:?} cannot be handled as a {kind}: {reason}"
        )))
    };
    if schema::kubernetes().type_by_kind(body_group, short, body_kind).is_none() {
        return cannot(format!(
            "no kind {body_kind:?} is registered for version {body_version:?} in scheme \"pkg/api/legacyscheme/scheme.go:30\""
        ));
    }
    if body_kind != kind {
        // Upstream's Go packages are named after the groups.
        let package = match group {
            "" | "events.k8s.io" => "core",
            group => group.split('.').next().unwrap_or(group),
        };
        return cannot(format!("converting ({short}.{body_kind}) to ({package}.{kind}): unknown conversion"));
    }
    Err(Status::bad_request(format!(
        "the API version in the data ({body_version}) does not match the expected API version ({expected})"
    )))
}

/// Converts an object in the version of `row` to the storage version.
pub fn to_stored_version(row: &'static Resource, value: Value) -> Value {
    let stored = crate::registry::stored_as(row);
    if std::ptr::eq(stored, row) {
        return value;
    }
    api::convert::convert((row.group, row.version), (stored.group, stored.version), row.kind, value)
}

/// Converts an object in the storage version to the version of `row`.
pub fn from_stored(row: &'static Resource, value: Value) -> Value {
    let stored = crate::registry::stored_as(row);
    if std::ptr::eq(stored, row) {
        return value;
    }
    api::convert::convert((stored.group, stored.version), (row.group, row.version), row.kind, value)
}

/// The first document of a YAML stream; upstream ignores the others.
pub struct Yaml {
    pub json: Vec<u8>,
    /// The error for duplicate keys, of which the last one wins.
    pub duplicates: Option<String>,
}

/// Converts YAML to JSON. The parser limits the expansion of aliases, so a small document cannot
/// grow without bound.
pub fn read_yaml(body: &[u8]) -> Result<Yaml, String> {
    // JSON is valid YAML and decodes faster, but YAML flow mappings are not always valid JSON.
    if body.trim_ascii_start().starts_with(b"{")
        && serde_json::from_slice::<IgnoredAny>(body).is_ok()
        && strict::strict_errors(body, false).is_empty()
    {
        return Ok(Yaml { json: body.to_vec(), duplicates: None });
    }
    let text = decode_text(body).ok_or("yaml: invalid Unicode")?;
    let text = first_document(&text);
    let read = |duplicate_keys| {
        let options = serde_saphyr::options! { duplicate_keys: duplicate_keys };
        serde_saphyr::from_str_with_options::<Value>(text, options)
    };
    let (value, duplicates) = match read(DuplicateKeyPolicy::Error) {
        Ok(value) => (value, None),
        Err(error) => match error.without_snippet() {
            serde_saphyr::Error::DuplicateMappingKey { key, location } => {
                let key = key.as_deref().unwrap_or_default();
                let reason = format!(
                    "yaml: unmarshal errors:\n  line {}: key {key:?} already set in map",
                    location.line()
                );
                (read(DuplicateKeyPolicy::LastWins).map_err(yaml_error)?, Some(reason))
            }
            _ => return Err(yaml_error(error)),
        },
    };
    Ok(Yaml { json: serde_json::to_vec(&value).map_err(|error| error.to_string())?, duplicates })
}

/// YAML may be UTF-16 with a byte order mark. Decoded here, because the parser's own detection
/// links tables of a hundred other encodings.
fn decode_text(body: &[u8]) -> Option<Cow<'_, str>> {
    let wide = |of: fn([u8; 2]) -> u16| {
        let units: Vec<u16> =
            body[2..].chunks(2).map(|pair| of([pair[0], *pair.get(1).unwrap_or(&0)])).collect();
        String::from_utf16(&units).ok().map(Cow::Owned)
    };
    match body {
        [0xff, 0xfe, ..] => wide(u16::from_le_bytes),
        [0xfe, 0xff, ..] => wide(u16::from_be_bytes),
        _ => std::str::from_utf8(body).ok().map(|text| Cow::Borrowed(text.trim_start_matches('\u{feff}'))),
    }
}

/// The text before the second document. No line inside a document can begin with a document marker.
fn first_document(text: &str) -> &str {
    let (mut at, mut has_started) = (0, false);
    for line in text.split_inclusive('\n') {
        let is_mark = |mark: &str| {
            line.strip_prefix(mark)
                .is_some_and(|rest| rest.trim_start().len() != rest.len() || rest.is_empty())
        };
        if has_started && (is_mark("---") || is_mark("...")) {
            return &text[..at];
        }
        let is_outside = line.trim().is_empty() || line.starts_with(['#', '%']);
        has_started |= !is_outside;
        at += line.len();
    }
    text
}

fn yaml_error(error: serde_saphyr::Error) -> String {
    format!("yaml: {}", error.without_snippet())
}

pub fn to_yaml(value: &Value) -> String {
    serde_saphyr::to_string(value).unwrap_or_default()
}

/// Encodes an object in a protobuf envelope. Every stored kind has a protobuf schema; other kinds
/// are encoded as an empty message with their name.
pub fn to_protobuf(value: &Value) -> Vec<u8> {
    let text = |name: &str| value.get(name).and_then(Value::as_str).unwrap_or("");
    let (api_version, kind) = (text("apiVersion"), text("kind"));
    let (group, version) = api_version.rsplit_once('/').unwrap_or(("", api_version));
    let table = schema::kubernetes();
    let ty =
        table.type_by_kind(group, version, kind).or_else(|| table.type_by_name(&format!("{META}.{kind}")));
    let raw = ty.map(|ty| schema::protobuf::to_protobuf(table, ty, value)).unwrap_or_default();
    schema::protobuf::encode_envelope(api_version, kind, &raw)
}

const META: &str = "io.k8s.apimachinery.pkg.apis.meta.v1";

/// Encodes a watch event with the framing of its media type.
pub fn watch_event(media: MediaType, kind: &str, object: Value) -> Bytes {
    match media {
        MediaType::Json => {
            // Written by hand so that `type` comes first, as upstream.
            let mut line = format!("{{\"type\":\"{kind}\",\"object\":").into_bytes();
            // Writing into a Vec cannot fail.
            let _ = serde_json::to_writer(&mut line, &crate::render::OrderedJson::object(&object));
            line.extend_from_slice(b"}\n");
            line.into()
        }
        MediaType::Yaml => format!("---\n{}", to_yaml(&json!({"type": kind, "object": object}))).into(),
        MediaType::Protobuf => schema::protobuf::watch_frame(kind, &to_protobuf(&object)).into(),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[track_caller]
    fn check(media: MediaType, body: &str, expected: &str) {
        let found = match decode(media, body.as_bytes(), ("", "v1", "Pod"), FieldValidation::Strict) {
            Ok(decoded) => decoded.value["metadata"]["name"].to_string(),
            Err(status) => status.message,
        };
        assert_eq!(found, expected, "{body}");
    }

    #[test]
    fn request_body_decoding() {
        let name = "\"a\"";
        check(MediaType::Json, r#"{"metadata":{"name":"a"}}"#, name);
        check(MediaType::Json, r#"{"kind":"Pod","apiVersion":"v1","metadata":{"name":"a"}}"#, name);
        check(MediaType::Yaml, "metadata: {name: a}", name);
        check(MediaType::Yaml, "{metadata: {name: a}}", name);
        // Only the first document is read.
        check(MediaType::Yaml, "---\nmetadata: {name: a}\n---\nmetadata: {name: b}\n", name);
        check(MediaType::Yaml, "metadata: {name: a}\n---\n]", name);
        check(
            MediaType::Yaml,
            "metadata:\n  name: a\n  name: b\n",
            "Pod in version \"v1\" cannot be handled as a Pod: strict decoding error: yaml: unmarshal errors:\n  line 3: key \"name\" already set in map",
        );
        check(
            MediaType::Json,
            "{\"metadata\":{},}",
            "the object provided is unrecognized (must be of type Pod): couldn't get version/kind; json parse error: invalid character '}' looking for beginning of object key string ({\"metadata\":{},})",
        );
        check(
            MediaType::Json,
            "",
            "the object provided is unrecognized (must be of type Pod): couldn't get version/kind; json parse error: unexpected end of JSON input (<empty>)",
        );
        check(
            MediaType::Json,
            "[]",
            r#"the object provided is unrecognized (must be of type Pod): couldn't get version/kind; json parse error: json: cannot unmarshal array into Go value of type struct { APIVersion string "json:\"apiVersion,omitempty\""; Kind string "json:\"kind,omitempty\"" } (5b5d)"#,
        );
        check(
            MediaType::Json,
            r#"{"kind":5}"#,
            r#"the object provided is unrecognized (must be of type Pod): couldn't get version/kind; json parse error: json: cannot unmarshal number into Go struct field .kind of type string ({"kind":5})"#,
        );
        check(
            MediaType::Json,
            r#"{"apiVersion":"a/b/c"}"#,
            r#"the object provided is unrecognized (must be of type Pod): unexpected GroupVersion string: a/b/c ({"apiVersion":"a/b/c"})"#,
        );
        check(
            MediaType::Json,
            r#"{"kind":"PodList","apiVersion":"v1","items":[]}"#,
            "PodList in version \"v1\" cannot be handled as a Pod: converting (v1.PodList) to (core.Pod): unknown conversion",
        );
        check(
            MediaType::Json,
            r#"{"kind":"Deployment","apiVersion":"apps/v1"}"#,
            "Deployment in version \"v1\" cannot be handled as a Pod: converting (v1.Deployment) to (core.Pod): unknown conversion",
        );
        check(
            MediaType::Json,
            r#"{"kind":"Foo"}"#,
            "Foo in version \"v1\" cannot be handled as a Pod: no kind \"Foo\" is registered for version \"v1\" in scheme \"pkg/api/legacyscheme/scheme.go:30\"",
        );
        check(
            MediaType::Json,
            r#"{"kind":"Pod","kind":"Pod"}"#,
            "Pod in version \"v1\" cannot be handled as a Pod: strict decoding error: duplicate field \"kind\"",
        );
    }

    #[test]
    fn rejects_mismatched_api_version() {
        let body = br#"{"kind":"HorizontalPodAutoscaler","apiVersion":"autoscaling/v1"}"#;
        let kind = ("autoscaling", "v2", "HorizontalPodAutoscaler");
        let status = decode(MediaType::Json, body, kind, FieldValidation::Warn).unwrap_err();
        assert_eq!(
            status.message,
            "the API version in the data (autoscaling/v1) does not match the expected API version (autoscaling/v2)"
        );
    }

    #[test]
    fn malformed_input_never_panics() {
        let deep = "[".repeat(100_000);
        let braces = "{\"a\":".repeat(100_000);
        for body in ["null", "[]", "1", "\"x\"", "{\"kind\":5}", "\u{0}", &deep, &braces] {
            for media in [MediaType::Json, MediaType::Yaml, MediaType::Protobuf] {
                let _ = decode(media, body.as_bytes(), ("", "v1", "Pod"), FieldValidation::Warn);
            }
        }
    }

    #[track_caller]
    fn check_yaml(text: &[u8], expected: &str) {
        let read = read_yaml(text).map(|yaml| String::from_utf8(yaml.json).unwrap());
        assert_eq!(read.unwrap_or_else(|reason| reason), expected);
    }

    #[test]
    fn reads_only_the_first_yaml_document() {
        for text in [
            "a: 1\n",
            "---\na: 1\n--- \nb: 2\n",
            "# so\n%YAML 1.2\n--- # it begins\na: 1\n...\n:",
            "a: 1\n---",
        ] {
            check_yaml(text.as_bytes(), r#"{"a":1}"#);
        }
        check_yaml(b"a: |\n  ---\n  b\n", r#"{"a":"---\nb\n"}"#);
        check_yaml(b"a: ---b\n---c: 1\n", r#"{"---c":1,"a":"---b"}"#);
        for text in ["", "\n# nothing\n", "---\n", "---\n---\na: 1\n"] {
            check_yaml(text.as_bytes(), "null");
        }
    }

    #[test]
    fn detects_text_encoding() {
        let wide = |of: fn(u16) -> [u8; 2]| "\u{feff}a: é\n".encode_utf16().flat_map(of).collect::<Vec<u8>>();
        for text in ["\u{feff}a: é\n".as_bytes().to_vec(), wide(u16::to_le_bytes), wide(u16::to_be_bytes)] {
            check_yaml(&text, r#"{"a":"é"}"#);
        }
        check_yaml(b"a: \xff\n", "yaml: invalid Unicode");
    }
}
