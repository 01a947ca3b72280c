//! OpenAPI v2: one document, with shared parameters under `parameters`.

use std::collections::BTreeMap;

use api::Resource;
use base64::Engine as _;
use base64::engine::general_purpose::URL_SAFE;
use schema::openapi::{Definitions, OpenApiVersion, collect_references};
use serde_json::{Map, Value, json};

use super::operations::{Operation, ResponseSchema, paths, status_reason, take_shared_parameters};
use super::parameters::{Parameter, ParameterLocation};

pub fn document(rows: &[&'static Resource]) -> Value {
    let definitions = super::custom::with_custom(Definitions::new(OpenApiVersion::V2), rows);
    let mut named = BTreeMap::new();
    let paths: Map<String, Value> = paths(rows, &definitions)
        .into_iter()
        .map(|(path, mut operations)| {
            let mut item = Map::new();
            let shared = take_shared_parameters(&mut operations);
            if !shared.is_empty() {
                item.insert(
                    "parameters".to_owned(),
                    shared.iter().map(|p| parameter(p, &mut named)).collect(),
                );
            }
            for operation in &operations {
                item.insert(operation.method.to_owned(), self::operation(operation, &mut named));
            }
            (path, Value::Object(item))
        })
        .collect();
    let parameters: Value = named.into_iter().collect();
    let mut roots = Vec::new();
    paths.values().for_each(|item| collect_references(item, &mut roots));
    collect_references(&parameters, &mut roots);
    json!({
        "swagger": "2.0",
        "info": info(),
        "paths": paths,
        "definitions": definitions.definitions_with_references(roots.iter().map(String::as_str)),
        "parameters": parameters,
        "securityDefinitions": {"BearerToken": bearer_token()},
        "security": [{"BearerToken": []}],
    })
}

pub fn info() -> Value {
    json!({"title": "Kubernetes", "version": "1.36"})
}

pub fn bearer_token() -> Value {
    json!({
        "description": "Bearer Token authentication",
        "in": "header",
        "name": "authorization",
        "type": "apiKey",
    })
}

fn operation(operation: &Operation, named: &mut BTreeMap<String, Value>) -> Value {
    let mut value = json!({
        "description": operation.description,
        "operationId": operation.id,
        "consumes": operation.consumes,
        "produces": operation.produces,
        "schemes": ["https"],
        "tags": [operation.tag],
        "responses": {"401": {"description": status_reason(401)}},
    });
    for (code, answer) in &operation.responses {
        let schema = match answer {
            ResponseSchema::Definition(name) => OpenApiVersion::V2.reference(name),
            ResponseSchema::Text => json!({"type": "string"}),
        };
        value["responses"][code.to_string()] = json!({"description": status_reason(*code), "schema": schema});
    }
    let body = operation.body.as_ref().map(|(name, required)| body(name, *required, named));
    let parameters: Vec<Value> =
        body.into_iter().chain(operation.parameters.iter().map(|p| parameter(p, named))).collect();
    if !parameters.is_empty() {
        value["parameters"] = parameters.into();
    }
    if let Some(action) = operation.action {
        value["x-kubernetes-action"] = action.into();
    }
    if let Some((group, version, kind)) = &operation.kind {
        value["x-kubernetes-group-version-kind"] = json!({"group": group, "version": version, "kind": kind});
    }
    value
}

/// Bodies of apimachinery types are shared parameters; those of resources are not.
fn body(name: &str, required: bool, named: &mut BTreeMap<String, Value>) -> Value {
    let mut text = r#"{"name":"body","in":"body""#.to_owned();
    let mut value = json!({"in": "body", "name": "body", "schema": OpenApiVersion::V2.reference(name)});
    if required {
        text.push_str(r#","required":true"#);
        value["required"] = true.into();
    }
    if !name.starts_with("io.k8s.apimachinery") {
        return value;
    }
    text.push_str(&format!(r#","schema":{}}}"#, OpenApiVersion::V2.reference(name)));
    add_shared_parameter("body", &text, value, named)
}

fn parameter(parameter: &Parameter, named: &mut BTreeMap<String, Value>) -> Value {
    let mut value = json!({
        "name": parameter.name,
        "in": parameter.location.as_str(),
        "type": parameter.kind,
        "uniqueItems": true,
    });
    // The hash covers upstream's order of keys.
    let mut text = format!(r#"{{"uniqueItems":true,"type":"{}""#, parameter.kind);
    if !parameter.description.is_empty() {
        value["description"] = parameter.description.clone().into();
        text.push_str(&format!(r#","description":{}"#, value["description"]));
    }
    text.push_str(&format!(r#","name":"{}","in":"{}""#, parameter.name, parameter.location.as_str()));
    if parameter.location == ParameterLocation::Path {
        value["required"] = true.into();
        text.push_str(r#","required":true"#);
    }
    text.push('}');
    // Upstream inlines these for clients that do not resolve references.
    match parameter.name.as_str() {
        "name" | "dryRun" | "fieldValidation" => value,
        name => add_shared_parameter(name, &text, value, named),
    }
}

fn add_shared_parameter(name: &str, text: &str, value: Value, named: &mut BTreeMap<String, Value>) -> Value {
    let name = format!("{name}-{}", URL_SAFE.encode(&fnv(text).to_be_bytes()[..6]));
    let reference = json!({ "$ref": format!("#/parameters/{name}") });
    named.insert(name, value);
    reference
}

/// The 64-bit FNV-1 hash.
fn fnv(text: &str) -> u64 {
    text.bytes()
        .fold(0xcbf2_9ce4_8422_2325, |hash: u64, byte| hash.wrapping_mul(0x0100_0000_01b3) ^ u64::from(byte))
}
