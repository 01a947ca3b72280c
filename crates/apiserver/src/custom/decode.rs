//! Decoding of custom resources: metadata by its type, the rest by the schema of the definition.

use api::Status;
use api::apiextensions::values::coerce_embedded;
use api::custom::VersionSchema;
use schema::{DecodeError, TypeId};
use serde_json::{Map, Value, json};

const OBJECT_META: &str = "io.k8s.apimachinery.pkg.apis.meta.v1.ObjectMeta";

/// Decodes the JSON of an object. Also returns the strict decoding errors.
pub fn decode(version_schema: &VersionSchema, json: &[u8]) -> Result<(Value, Vec<String>), DecodeError> {
    let mut value: Value = serde_json::from_slice(json).map_err(|error| {
        let text = error.to_string();
        match text.starts_with("recursion limit") {
            true => DecodeError::Depth,
            false => DecodeError::Syntax(schema::syntax::syntax_error(json).unwrap_or(text)),
        }
    })?;
    if value.is_null() {
        value = json!({});
    }
    let mut strict_errors = crate::patch_handler::strict::strict_errors(json, false);
    strict_errors.extend(normalize(version_schema, &mut value)?);
    Ok((value, strict_errors))
}

/// Normalizes a value to the schema; returns the strict decoding errors.
pub fn normalize(version_schema: &VersionSchema, value: &mut Value) -> Result<Vec<String>, DecodeError> {
    let mut strict_errors = Vec::new();
    if let Some(fields) = value.as_object_mut() {
        decode_metadata(fields, "", &mut strict_errors)?;
    }
    let unknown = version_schema.prune(value);
    strict_errors.extend(unknown.iter().map(|path| format!("unknown field {path:?}")));
    let mut visit = |fields: &mut Map<String, Value>, path: &str| {
        decode_metadata(fields, path, &mut strict_errors).map_err(|error| error.to_string())
    };
    coerce_embedded(&version_schema.schema, value, "", &mut visit).map_err(DecodeError::Type)?;
    Ok(strict_errors)
}

/// Decodes `metadata` as ObjectMeta.
fn decode_metadata(
    fields: &mut Map<String, Value>,
    path: &str,
    strict_errors: &mut Vec<String>,
) -> Result<(), DecodeError> {
    let Some(metadata) = fields.get_mut("metadata") else { return Ok(()) };
    if metadata.is_null() {
        fields.remove("metadata");
        return Ok(());
    }
    let table = schema::kubernetes();
    let Some(ty) = table.type_by_name(OBJECT_META) else { return Ok(()) };
    let unknown = normalize_by_type(ty, metadata)?;
    let inside = if path.is_empty() { "metadata".to_owned() } else { format!("{path}.metadata") };
    strict_errors.extend(unknown.into_iter().map(|error| match error.split_once('"') {
        Some((what, name)) => format!("{what}\"{inside}.{name}"),
        None => error,
    }));
    // Upstream encodes a missing creationTimestamp as null; we omit it.
    if let Some(metadata) = metadata.as_object_mut()
        && metadata.get("creationTimestamp").is_some_and(Value::is_null)
    {
        metadata.remove("creationTimestamp");
    }
    Ok(())
}

fn normalize_by_type(ty: TypeId, metadata: &mut Value) -> Result<Vec<String>, DecodeError> {
    schema::normalize(schema::kubernetes(), ty, metadata)
}

/// The error for protobuf bodies and for Accept headers that only accept protobuf.
pub const NO_PROTOBUF: &str = "object *unstructured.Unstructured does not implement the protobuf marshalling interface and cannot be encoded to a protobuf message";

/// Custom resources have no protobuf encoding; only their PartialObjectMetadata has.
pub fn not_acceptable() -> Status {
    Status::failure(406, "NotAcceptable", NO_PROTOBUF)
}

#[cfg(test)]
mod tests {
    use std::sync::Arc;

    use api::custom::Definition;

    use super::*;

    fn test_schema() -> Arc<VersionSchema> {
        let crd = json!({
            "metadata": {"name": "boats.a.b"},
            "spec": {
                "group": "a.b", "scope": "Namespaced", "names": {"plural": "boats", "kind": "Boat"},
                "versions": [{"name": "v1", "served": true, "storage": true, "schema": {"openAPIV3Schema": {
                    "type": "object", "properties": {"spec": {"type": "object", "properties": {
                        "n": {"type": "integer"}, "part": {"type": "object", "x-kubernetes-embedded-resource": true},
                    }}},
                }}}],
            },
        });
        Definition::parse(crd.to_string().into()).unwrap().version_schema("v1")
    }

    #[track_caller]
    fn check(body: &str, expected: &str) {
        let found = match decode(&test_schema(), body.as_bytes()) {
            Ok((value, strict_errors)) => format!("{value} {}", strict_errors.join(", ")),
            Err(error) => error.to_string(),
        };
        assert_eq!(found, expected);
    }

    #[test]
    fn custom_resource_decoding() {
        check(r#"{"spec":{"n":"x"}}"#, r#"{"spec":{"n":"x"}} "#);
        check(
            r#"{"metadata":{"name":"a"},"spec":{"n":1,"m":2},"x":1}"#,
            r#"{"metadata":{"name":"a"},"spec":{"n":1}} unknown field "spec.m", unknown field "x""#,
        );
        check(r#"{"spec":{"n":1,"n":2}}"#, r#"{"spec":{"n":2}} duplicate field "spec.n""#);
        check(
            r#"{"metadata":{"name":"a","nope":1},"spec":{"n":null}}"#,
            r#"{"metadata":{"name":"a"},"spec":{}} unknown field "metadata.nope""#,
        );
        check(
            r#"{"metadata":{"name":5}}"#,
            "json: cannot unmarshal number into Go struct field ObjectMeta.name of type string",
        );
        check(
            r#"{"spec":{"part":{"apiVersion":"v1","kind":"K","metadata":{"name":"n","x":1},"y":1}}}"#,
            r#"{"spec":{"part":{"apiVersion":"v1","kind":"K","metadata":{"name":"n"}}}} unknown field "spec.part.y", unknown field "spec.part.metadata.x""#,
        );
        check("{", "unexpected end of JSON input");
    }
}
