//! OpenAPI v3: one document per group and version.

use api::Resource;
use schema::openapi::{Definitions, OpenApiVersion, collect_references};
use serde_json::{Map, Value, json};

use super::operations::{Operation, ResponseSchema, paths, status_reason, take_shared_parameters};
use super::parameters::{Parameter, ParameterLocation};
use super::v2::{bearer_token, info};

/// `name` is listed in the index: `api`, `api/v1`, `apis/apps`, `apis/apps/v1`, `version`.
pub fn document(rows: &[&'static Resource], name: &str, definitions: &Definitions) -> Value {
    let group_version = group_version(name);
    let rows: Vec<&'static Resource> = rows
        .iter()
        .copied()
        .filter(|row| match group_version {
            Some((group, version)) => row.group == group && row.version == version,
            None => name.strip_prefix("apis/") == Some(row.group),
        })
        .collect();
    let paths: Map<String, Value> = paths(&rows, definitions)
        .into_iter()
        .filter(|(path, _)| match group_version {
            Some(_) => path.starts_with(&format!("/{name}/")),
            None => *path == format!("/{name}/"),
        })
        .map(|(path, operations)| (path, item(operations)))
        .collect();
    let mut roots = Vec::new();
    paths.values().for_each(|item| collect_references(item, &mut roots));
    let mut schemas = definitions.definitions_with_references(roots.iter().map(String::as_str));
    if let Some((group, version)) = group_version {
        schemas.values_mut().for_each(|schema| retain_group_version_kinds(schema, group, version));
    }
    json!({
        "openapi": "3.0.0",
        "info": info(),
        "paths": paths,
        "components": {"schemas": schemas, "securitySchemes": {"BearerToken": bearer_token()}},
    })
}

fn group_version(name: &str) -> Option<(&str, &str)> {
    match name.strip_prefix("apis/") {
        Some(rest) => rest.split_once('/'),
        None => name.strip_prefix("api/").map(|version| ("", version)),
    }
}

/// Of a kind that every group has, such as DeleteOptions, retains only this group version and `v1`.
fn retain_group_version_kinds(schema: &mut Value, group: &str, version: &str) {
    let Some(Value::Array(kinds)) = schema.get_mut("x-kubernetes-group-version-kind") else { return };
    if kinds.len() > 1 {
        kinds.retain(|kind| {
            (kind["group"] == group && kind["version"] == version)
                || (kind["group"] == "" && kind["version"] == "v1")
        });
    }
}

fn item(mut operations: Vec<Operation>) -> Value {
    let mut item = Map::new();
    let shared = take_shared_parameters(&mut operations);
    if !shared.is_empty() {
        item.insert("parameters".to_owned(), shared.iter().map(parameter).collect());
    }
    for operation in &operations {
        item.insert(operation.method.to_owned(), self::operation(operation));
    }
    Value::Object(item)
}

fn operation(operation: &Operation) -> Value {
    let mut value = json!({
        "description": operation.description,
        "operationId": operation.id,
        "tags": [operation.tag],
        "responses": {"401": {"description": status_reason(401)}},
    });
    let content = |types: &[&str], schema: &Value| -> Map<String, Value> {
        types.iter().map(|media| ((*media).to_owned(), json!({ "schema": schema }))).collect()
    };
    for (code, answer) in &operation.responses {
        let schema = match answer {
            ResponseSchema::Definition(name) => OpenApiVersion::V3.reference(name),
            ResponseSchema::Text => json!({"type": "string"}),
        };
        let content = content(operation.produces, &schema);
        value["responses"][code.to_string()] =
            json!({"description": status_reason(*code), "content": content});
    }
    if let Some((name, required)) = &operation.body {
        value["requestBody"] =
            json!({"content": content(operation.consumes, &OpenApiVersion::V3.reference(name))});
        if *required {
            value["requestBody"]["required"] = true.into();
        }
    }
    if !operation.parameters.is_empty() {
        value["parameters"] = operation.parameters.iter().map(parameter).collect();
    }
    if let Some(action) = operation.action {
        value["x-kubernetes-action"] = action.into();
    }
    if let Some((group, version, kind)) = &operation.kind {
        value["x-kubernetes-group-version-kind"] = json!({"group": group, "version": version, "kind": kind});
    }
    value
}

fn parameter(parameter: &Parameter) -> Value {
    let mut value = json!({
        "name": parameter.name,
        "in": parameter.location.as_str(),
        "schema": {"type": parameter.kind, "uniqueItems": true},
    });
    if !parameter.description.is_empty() {
        value["description"] = parameter.description.clone().into();
    }
    if parameter.location == ParameterLocation::Path {
        value["required"] = true.into();
    }
    value
}
