//! OpenAPI definitions of custom resources, converted from their structural schemas.

use api::Resource;
use api::json::JsonExt as _;
use schema::openapi::{Definitions, OpenApiVersion};
use serde_json::{Map, Value, json};

use super::operations::definition_of;

const META: &str = "io.k8s.apimachinery.pkg.apis.meta.v1";
const OBJECT_METADATA: &str = "Standard object's metadata. More info: https://git.k8s.io/community/contributors/devel/sig-architecture/api-conventions.md#metadata";
const LIST_METADATA: &str = "Standard list metadata. More info: https://git.k8s.io/community/contributors/devel/sig-architecture/api-conventions.md#types-kinds";
const EMBEDDED_VERSION: &str = "apiVersion defines the versioned schema of this representation of an object. More info: https://git.k8s.io/community/contributors/devel/sig-architecture/api-conventions.md#resources";
const EMBEDDED_KIND: &str = "kind is a string value representing the type of this object. In CamelCase. More info: https://git.k8s.io/community/contributors/devel/sig-architecture/api-conventions.md#types-kinds";

/// Adds the definitions of the custom kinds among `rows`.
pub fn with_custom(mut definitions: Definitions, rows: &[&'static Resource]) -> Definitions {
    for row in rows.iter().filter(|row| row.custom.is_some()) {
        let (object, list) = kind_definitions(&definitions, row);
        definitions.add(definition_of(row, row.kind), object);
        definitions.add(definition_of(row, &row.list_kind()), list);
    }
    definitions
}

/// The definitions of a custom resource and of its list.
fn kind_definitions(definitions: &Definitions, row: &'static Resource) -> (Value, Value) {
    let form = definitions.version();
    // Read from the definition instead of the cached version schema: a resource that only appears
    // in OpenAPI needs none.
    let version_spec = row.custom.map(|slot| slot.definition().version_spec(row.version)).unwrap_or_default();
    let schema = version_spec.path("schema.openAPIV3Schema");
    let opaque =
        schema.is_null() || form == OpenApiVersion::V2 && schema.flag("x-kubernetes-preserve-unknown-fields");
    let mut object = match opaque {
        true => json!({"type": "object"}),
        false => {
            let mut object = convert_schema(schema, form);
            add_embedded(&mut object, form);
            let properties = object.object_mut("properties");
            properties.insert("metadata".into(), reference("ObjectMeta", OBJECT_METADATA, form));
            type_meta(definitions, properties);
            object
        }
    };
    let kind = |kind: &str| json!([{"group": row.group, "version": row.version, "kind": kind}]);
    object.set("x-kubernetes-group-version-kind", kind(row.kind));
    let mut list = json!({
        "description": format!("{} is a list of {}", row.list_kind(), row.kind),
        "type": "object",
        "required": ["items"],
        "properties": {
            "items": {
                "description": format!("List of {}. More info: https://git.k8s.io/community/contributors/devel/sig-architecture/api-conventions.md", row.plural),
                "type": "array",
                "items": form.reference(&definition_of(row, row.kind)),
            },
            "metadata": reference("ListMeta", LIST_METADATA, form),
        },
        "x-kubernetes-group-version-kind": kind(&row.list_kind()),
    });
    type_meta(definitions, list.object_mut("properties"));
    let selectable: Vec<Value> = version_spec
        .items("selectableFields")
        .iter()
        .map(|field| json!({"fieldPath": field.text("jsonPath").trim_start_matches('.')}))
        .collect();
    if !selectable.is_empty() {
        object.set("x-kubernetes-selectable-fields", selectable.clone());
        list.set("x-kubernetes-selectable-fields", selectable);
    }
    (object, list)
}

fn type_meta(definitions: &Definitions, properties: &mut Map<String, Value>) {
    for name in ["apiVersion", "kind"] {
        let description = definitions.describe(&format!("{META}.Status"), Some(name));
        properties.insert(name.into(), json!({"description": description, "type": "string"}));
    }
}

fn reference(name: &str, description: &str, form: OpenApiVersion) -> Value {
    let mut reference = form.reference(&format!("{META}.{name}"));
    if form == OpenApiVersion::V3 {
        reference = json!({"allOf": [reference]});
    }
    reference.set("description", description);
    reference
}

/// Converts a schema for publishing. OpenAPI v2 cannot express much of it, and kubectl cannot
/// handle some of the rest. Upstream: `ToStructuralOpenAPIV2`.
fn convert_schema(schema: &Value, form: OpenApiVersion) -> Value {
    let Value::Object(fields) = schema else { return schema.clone() };
    let mut out = Map::new();
    for (name, value) in fields {
        let value = match (name.as_str(), value) {
            ("properties", Value::Object(properties)) => {
                properties.iter().map(|(name, inner)| (name.clone(), convert_schema(inner, form))).collect()
            }
            ("items" | "additionalProperties", inner) => convert_schema(inner, form),
            ("x-kubernetes-preserve-unknown-fields" | "nullable", Value::Bool(false)) => continue,
            (_, value) => value.clone(),
        };
        out.insert(name.clone(), value);
    }
    let mut out = Value::Object(out);
    if form == OpenApiVersion::V3 {
        expand_int_or_string(&mut out);
        return out;
    }
    let nullable = out.flag("nullable");
    let open = out.flag("x-kubernetes-preserve-unknown-fields");
    let Some(fields) = out.as_object_mut() else { return out };
    for name in ["allOf", "oneOf", "anyOf", "not", "nullable"] {
        fields.remove(name);
    }
    if nullable || open {
        fields.remove("items");
        fields.remove("properties");
    }
    let is = |fields: &Map<String, Value>, kind: &str| fields.get("type").is_some_and(|found| found == kind);
    let no_items = is(fields, "array") && !fields.contains_key("items");
    if nullable || no_items || open && is(fields, "object") {
        fields.remove("type");
    }
    // Nullable fields cannot be required where null cannot be expressed.
    let null_fields: Vec<&String> = schema
        .at("properties")
        .as_object()
        .into_iter()
        .flatten()
        .filter(|(_, inner)| inner.flag("nullable"))
        .map(|(name, _)| name)
        .collect();
    if let Some(Value::Array(required)) = fields.get_mut("required") {
        required.retain(|name| !null_fields.iter().any(|null| *null == name));
        if required.is_empty() || schema.at("additionalProperties").flag("nullable") {
            fields.remove("required");
        }
    }
    out
}

/// Expands `x-kubernetes-int-or-string` for clients that do not know the extension.
fn expand_int_or_string(schema: &mut Value) {
    let either = json!([{"type": "integer"}, {"type": "string"}]);
    let is_declared = |schema: &Value| {
        schema.at("anyOf") == &either
            || schema.items("allOf").first().is_some_and(|first| first.at("anyOf") == &either)
    };
    if !schema.flag("x-kubernetes-int-or-string") || is_declared(schema) {
        return;
    }
    if schema.has("anyOf") {
        let mut all = vec![json!({"anyOf": either})];
        all.extend(schema.items("allOf").iter().cloned());
        schema.set("allOf", all);
    } else {
        schema.set("anyOf", either);
    }
}

/// Adds apiVersion, kind and metadata to embedded resources.
fn add_embedded(schema: &mut Value, form: OpenApiVersion) {
    let Some(fields) = schema.as_object_mut() else { return };
    if let Some(Value::Object(properties)) = fields.get_mut("properties") {
        properties.values_mut().for_each(|inner| add_embedded(inner, form));
    }
    for name in ["items", "additionalProperties"] {
        if let Some(inner) = fields.get_mut(name) {
            add_embedded(inner, form);
        }
    }
    if form == OpenApiVersion::V2 && schema.flag("x-kubernetes-preserve-unknown-fields")
        || !schema.flag("x-kubernetes-embedded-resource")
    {
        return;
    }
    let properties = schema.object_mut("properties");
    properties.insert("apiVersion".into(), json!({"description": EMBEDDED_VERSION, "type": "string"}));
    properties.insert("kind".into(), json!({"description": EMBEDDED_KIND, "type": "string"}));
    properties.insert("metadata".into(), reference("ObjectMeta", OBJECT_METADATA, form));
    let mut required = schema.items("required").to_vec();
    for name in ["kind", "apiVersion"] {
        if !required.iter().any(|known| known == name) {
            required.push(name.into());
        }
    }
    schema.set("required", required);
}
