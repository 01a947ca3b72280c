//! Request bodies into values and values into the media types of answers.

use api::{Resource, Status};
use bytes::Bytes;
use http::{HeaderMap, header};
use schema::TypeId;
use serde_json::{Value, json};

use crate::negotiate::{Media, PROTOBUF};

/// What `fieldValidation` asks to be done about fields that do not exist or stand twice.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum FieldValidation {
    Ignore,
    Warn,
    Strict,
}

/// A decoded body, its shape checked and its unknown fields dropped.
#[derive(Debug)]
pub struct Decoded {
    pub value: Value,
    pub warnings: Vec<String>,
}

impl FieldValidation {
    pub fn parse(text: &str) -> Result<FieldValidation, Status> {
        match text {
            "" | "Warn" => Ok(FieldValidation::Warn),
            "Ignore" => Ok(FieldValidation::Ignore),
            "Strict" => Ok(FieldValidation::Strict),
            other => {
                let mut errors = api::Errors::default();
                errors.not_supported(
                    &api::Path::new("fieldValidation"),
                    other,
                    &["", "Ignore", "Strict", "Warn"],
                );
                Err(Status::invalid("meta.k8s.io", "CreateOptions", "", &errors))
            }
        }
    }

    /// What to do about the complaints of strict decoding.
    pub fn judge(self, kind: &str, version: &str, complaints: Vec<String>) -> Result<Vec<String>, Status> {
        match self {
            FieldValidation::Ignore => Ok(Vec::new()),
            FieldValidation::Warn => Ok(complaints),
            FieldValidation::Strict if complaints.is_empty() => Ok(complaints),
            FieldValidation::Strict => Err(Status::bad_request(format!(
                "{kind} in version {version:?} cannot be handled as a {kind}: strict decoding error: {}",
                complaints.join(", ")
            ))),
        }
    }
}

/// The media type of a request body; JSON where nothing is said.
pub fn body_media(headers: &HeaderMap) -> Result<Media, Status> {
    let content_type = headers.get(header::CONTENT_TYPE).and_then(|value| value.to_str().ok()).unwrap_or("");
    match content_type.split(';').next().unwrap_or("").trim() {
        "" | "application/json" => Ok(Media::Json),
        "application/yaml" => Ok(Media::Yaml),
        PROTOBUF => Ok(Media::Protobuf),
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

/// Reads an object of the given kind from a request body.
pub fn decode(
    media: Media,
    body: &[u8],
    (group, version, kind): (&str, &str, &str),
    validation: FieldValidation,
) -> Result<Decoded, Status> {
    let ty = type_of(group, version, kind)?;
    let table = schema::kubernetes();
    let cannot = |why: String| {
        Status::bad_request(format!("{kind} in version {version:?} cannot be handled as a {kind}: {why}"))
    };
    let decoded = match media {
        Media::Json => {
            check_type_meta(&type_meta(body), group, version, kind)?;
            schema::from_json(table, ty, body).map_err(|error| cannot(error.to_string()))?
        }
        Media::Yaml => {
            let json = yaml_to_json(body)?;
            check_type_meta(&type_meta(&json), group, version, kind)?;
            schema::from_json(table, ty, &json).map_err(|error| cannot(error.to_string()))?
        }
        Media::Protobuf => {
            let envelope = schema::protobuf::open(body).map_err(|error| cannot(error.to_string()))?;
            check_type_meta(
                &(envelope.api_version.to_owned(), envelope.kind.to_owned()),
                group,
                version,
                kind,
            )?;
            let value = schema::protobuf::from_protobuf(table, ty, envelope.raw)
                .map_err(|error| cannot(error.to_string()))?;
            schema::Decoded { value, unknown: Vec::new() }
        }
    };
    let mut value = decoded.value;
    set_type_meta(&mut value, group, version, kind);
    let warnings = validation.judge(kind, version, decoded.unknown)?;
    Ok(Decoded { value, warnings })
}

pub fn api_version(group: &str, version: &str) -> String {
    if group.is_empty() { version.to_owned() } else { format!("{group}/{version}") }
}

pub fn set_type_meta(value: &mut Value, group: &str, version: &str, kind: &str) {
    if let Some(fields) = value.as_object_mut() {
        fields.insert("kind".into(), kind.into());
        fields.insert("apiVersion".into(), api_version(group, version).into());
    }
}

/// The type of a kind in the schema table.
pub fn type_of(group: &str, version: &str, kind: &str) -> Result<TypeId, Status> {
    schema::kubernetes().kind(group, version, kind).ok_or_else(|| {
        Status::internal(format!("no type is known for {kind} in {}", api_version(group, version)))
    })
}

pub fn row_type(row: &Resource) -> Result<TypeId, Status> {
    type_of(row.group, row.version, row.kind)
}

/// apiVersion and kind as the body states them; empty where it does not.
fn type_meta(body: &[u8]) -> (String, String) {
    #[derive(Default, serde::Deserialize)]
    struct TypeMeta {
        #[serde(default, rename = "apiVersion")]
        api_version: Value,
        #[serde(default)]
        kind: Value,
    }
    let meta: TypeMeta = serde_json::from_slice(body).unwrap_or_default();
    let text = |value: Value| value.as_str().unwrap_or("").to_owned();
    (text(meta.api_version), text(meta.kind))
}

/// What a body says it is must be what the path says.
pub fn check_type_meta(
    said: &(String, String),
    group: &str,
    version: &str,
    kind: &str,
) -> Result<(), Status> {
    let expected = api_version(group, version);
    let (said_version, said_kind) = said;
    if !said_version.is_empty() && *said_version != expected {
        return Err(Status::bad_request(format!(
            "the API version in the data ({said_version}) does not match the expected API version ({expected})"
        )));
    }
    if !said_kind.is_empty() && said_kind != kind {
        return Err(Status::bad_request(format!(
            "{said_kind} in version {version:?} cannot be handled as a {kind}: converting ({said_kind}) to ({kind}): unknown conversion"
        )));
    }
    Ok(())
}

/// The stored form of an object sent in the version of `row`.
pub fn to_stored_version(row: &'static Resource, value: Value) -> Value {
    let stored = crate::registry::stored_as(row);
    if std::ptr::eq(stored, row) {
        return value;
    }
    api::convert::convert((row.group, row.version), (stored.group, stored.version), row.kind, value)
}

/// An object in the version of `row`.
pub fn from_stored(row: &'static Resource, value: Value) -> Value {
    let stored = crate::registry::stored_as(row);
    if std::ptr::eq(stored, row) {
        return value;
    }
    api::convert::convert((stored.group, stored.version), (row.group, row.version), row.kind, value)
}

/// YAML as JSON bytes. Aliases are bounded by the parser's budget, so a small text cannot grow without end.
pub fn yaml_to_json(body: &[u8]) -> Result<Vec<u8>, Status> {
    if matches!(body.iter().find(|byte| !byte.is_ascii_whitespace()), Some(b'{')) {
        return Ok(body.to_vec());
    }
    let text = std::str::from_utf8(body)
        .map_err(|error| Status::bad_request(format!("error decoding YAML: {error}")))?;
    let value: Value = serde_saphyr::from_str(text)
        .map_err(|error| Status::bad_request(format!("error converting YAML to JSON: {error}")))?;
    serde_json::to_vec(&value).map_err(Status::internal)
}

pub fn to_yaml(value: &Value) -> String {
    serde_saphyr::to_string(value).unwrap_or_default()
}

/// An object in its protobuf envelope. Every kind that is stored has a protobuf form; what has none goes as
/// an empty message of its name.
pub fn to_protobuf(value: &Value) -> Vec<u8> {
    let text = |name: &str| value.get(name).and_then(Value::as_str).unwrap_or("");
    let (api_version, kind) = (text("apiVersion"), text("kind"));
    let (group, version) = api_version.rsplit_once('/').unwrap_or(("", api_version));
    let table = schema::kubernetes();
    let ty = table.kind(group, version, kind).or_else(|| table.named(&format!("{META}.{kind}")));
    let raw = ty.map(|ty| schema::protobuf::to_protobuf(table, ty, value)).unwrap_or_default();
    schema::protobuf::seal(api_version, kind, &raw)
}

const META: &str = "io.k8s.apimachinery.pkg.apis.meta.v1";

/// One event of a watch, framed for its media type.
pub fn watch_event(media: Media, kind: &str, object: Value) -> Bytes {
    match media {
        Media::Json => {
            let mut line = serde_json::to_vec(&json!({"type": kind, "object": object})).unwrap_or_default();
            line.push(b'\n');
            line.into()
        }
        Media::Yaml => format!("---\n{}", to_yaml(&json!({"type": kind, "object": object}))).into(),
        Media::Protobuf => schema::protobuf::watch_frame(kind, &to_protobuf(&object)).into(),
    }
}
