//! Fetches the schemas of custom kinds from discovery and the OpenAPI v3 documents, which every user may
//! read.

use api::admissionregistration::type_check::CustomKind;
use reconcile::{ApiResource, Client, Error};
use serde::Deserialize;
use serde_json::{Map, Value};

const GVK_EXTENSION: &str = "x-kubernetes-group-version-kind";
const REFERENCE_PREFIX: &str = "#/components/schemas/";
/// The maximum depth of nested references, which ends the expansion of recursive schemas.
const MAX_REFERENCE_DEPTH: u32 = 16;

#[derive(Deserialize)]
struct Document {
    components: Components,
}

#[derive(Deserialize)]
struct Components {
    schemas: Map<String, Value>,
}

/// The kinds of a group and version such as `example.com/v1`.
pub(super) async fn kinds(client: &Client, api_version: &str) -> Result<Vec<CustomKind>, Error> {
    let served = client.resources_for_group_version(api_version).await?;
    let document: Document = client.read(&format!("/openapi/v3/apis/{api_version}")).await?;
    let schemas = document.components.schemas;
    let kind = |served: ApiResource| {
        let is_kind = |schema: &&Value| {
            schema[GVK_EXTENSION].as_array().into_iter().flatten().any(|kind| {
                kind["group"] == served.group.as_str()
                    && kind["version"] == served.version.as_str()
                    && kind["kind"] == served.kind.as_str()
            })
        };
        let schema = populate_refs(schemas.values().find(is_kind)?, &schemas, 0)?;
        let ApiResource { group, version, plural, kind, .. } = served;
        Some(CustomKind { group, version, plural, kind, schema })
    };
    Ok(served.into_iter().filter_map(kind).collect())
}

/// The schema with all references expanded. `None` if the schema is recursive or a reference is missing.
fn populate_refs(schema: &Value, schemas: &Map<String, Value>, depth: u32) -> Option<Value> {
    match schema {
        Value::Object(fields) => {
            // A reference with a description is wrapped into an `allOf` with one element.
            let inner = match fields.get("allOf").and_then(Value::as_array).map(Vec::as_slice) {
                Some([only]) => only,
                _ => schema,
            };
            if let Some(name) = inner["$ref"].as_str().and_then(|name| name.strip_prefix(REFERENCE_PREFIX)) {
                return populate_refs(
                    schemas.get(name)?,
                    schemas,
                    (depth < MAX_REFERENCE_DEPTH).then_some(depth + 1)?,
                );
            }
            let fields = fields
                .iter()
                .map(|(name, value)| Some((name.clone(), populate_refs(value, schemas, depth)?)));
            fields.collect::<Option<Map<String, Value>>>().map(Value::Object)
        }
        Value::Array(items) => items
            .iter()
            .map(|item| populate_refs(item, schemas, depth))
            .collect::<Option<Vec<Value>>>()
            .map(Value::Array),
        other => Some(other.clone()),
    }
}
