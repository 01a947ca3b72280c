//! Looks up the schemas of kinds that are not built in where every user may read them: in discovery and in the
//! OpenAPI documents.

use api::admissionregistration::type_check::CustomKind;
use reconcile::{Client, Error, Served};
use serde::Deserialize;
use serde_json::{Map, Value};

const KINDS: &str = "x-kubernetes-group-version-kind";
const REFERENCE: &str = "#/components/schemas/";
/// References inside references; a schema that contains itself has no end.
const MAX_REFERENCES: u32 = 16;

#[derive(Deserialize)]
struct Document {
    components: Components,
}

#[derive(Deserialize)]
struct Components {
    schemas: Map<String, Value>,
}

/// The kinds of a group and version, such as `example.com/v1`.
pub(super) async fn kinds(client: &Client, api_version: &str) -> Result<Vec<CustomKind>, Error> {
    let served = client.serves(api_version).await?;
    let document: Document = client.read(&format!("/openapi/v3/apis/{api_version}")).await?;
    let schemas = document.components.schemas;
    let kind = |served: Served| {
        let is_kind = |schema: &&Value| {
            schema[KINDS].as_array().into_iter().flatten().any(|kind| {
                kind["group"] == served.group.as_str()
                    && kind["version"] == served.version.as_str()
                    && kind["kind"] == served.kind.as_str()
            })
        };
        let schema = populated(schemas.values().find(is_kind)?, &schemas, 0)?;
        let Served { group, version, plural, kind, .. } = served;
        Some(CustomKind { group, version, plural, kind, schema })
    };
    Ok(served.into_iter().filter_map(kind).collect())
}

/// The schema with what it refers to in place of the references. None if they never end.
fn populated(schema: &Value, schemas: &Map<String, Value>, depth: u32) -> Option<Value> {
    match schema {
        Value::Object(fields) => {
            // A description beside a reference puts it into an `allOf` of one.
            let inner = match fields.get("allOf").and_then(Value::as_array).map(Vec::as_slice) {
                Some([only]) => only,
                _ => schema,
            };
            if let Some(name) = inner["$ref"].as_str().and_then(|name| name.strip_prefix(REFERENCE)) {
                return populated(
                    schemas.get(name)?,
                    schemas,
                    (depth < MAX_REFERENCES).then_some(depth + 1)?,
                );
            }
            let fields =
                fields.iter().map(|(name, value)| Some((name.clone(), populated(value, schemas, depth)?)));
            fields.collect::<Option<Map<String, Value>>>().map(Value::Object)
        }
        Value::Array(items) => items
            .iter()
            .map(|item| populated(item, schemas, depth))
            .collect::<Option<Vec<Value>>>()
            .map(Value::Array),
        other => Some(other.clone()),
    }
}
