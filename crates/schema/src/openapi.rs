//! Renders the built-in types as OpenAPI v2 and v3 definitions.
//!
//! As in upstream's published documents, v2 omits defaults and enums, and v3 wraps a reference that has
//! sibling keywords in `allOf`.

use std::collections::HashMap;

use serde_json::{Map, Value, json};

use crate::table::{Field, SchemaOr, Shape, Type, TypeId};
use crate::{kubernetes, openapi_extensions};

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum OpenApiVersion {
    V2,
    V3,
}

impl OpenApiVersion {
    /// A `$ref` to a definition.
    pub fn reference(self, name: &str) -> Value {
        match self {
            OpenApiVersion::V2 => json!({ "$ref": format!("#/definitions/{name}") }),
            OpenApiVersion::V3 => json!({ "$ref": format!("#/components/schemas/{name}") }),
        }
    }
}

/// The definitions with their descriptions. The descriptions are large and rarely needed, so callers
/// create this for one document and drop it.
pub struct Definitions {
    version: OpenApiVersion,
    /// By definition name, or definition name and field name separated by a space. Values are JSON
    /// string literals.
    descriptions: HashMap<String, &'static str>,
    /// Definitions that are not built in, by name.
    custom: HashMap<String, Value>,
}

impl Definitions {
    pub fn new(version: OpenApiVersion) -> Definitions {
        let descriptions = descriptions(include_str!("../data/descriptions.txt"));
        Definitions { version, descriptions, custom: HashMap::new() }
    }

    pub fn version(&self) -> OpenApiVersion {
        self.version
    }

    /// Adds a definition that is not a built-in type.
    pub fn add(&mut self, name: String, definition: Value) {
        self.custom.insert(name, definition);
    }

    /// The description of a type or of one of its fields; empty if there is none.
    pub fn describe(&self, name: &str, field: Option<&str>) -> String {
        let key = field.map(|field| format!("{name} {field}"));
        let text = self.descriptions.get(key.as_deref().unwrap_or(name)).copied().unwrap_or("\"\"");
        serde_json::from_str(text).unwrap_or_default()
    }

    /// The definitions with these names and all definitions they refer to.
    pub fn definitions_with_references<'n>(
        &self,
        roots: impl IntoIterator<Item = &'n str>,
    ) -> Map<String, Value> {
        let mut definitions = Map::new();
        let mut pending: Vec<String> = roots.into_iter().map(str::to_owned).collect();
        while let Some(name) = pending.pop() {
            if definitions.contains_key(&name) {
                continue;
            }
            if let Some(definition) = self.definition(&name) {
                collect_references(&definition, &mut pending);
                definitions.insert(name, definition);
            }
        }
        definitions
    }

    pub fn definition(&self, name: &str) -> Option<Value> {
        if let Some(custom) = self.custom.get(name) {
            return Some(custom.clone());
        }
        let mut definition = match (self.scalar_schema(name), kubernetes().type_by_name(name)) {
            (Some(scalar), _) => scalar,
            (None, Some(id)) => self.struct_schema(id, kubernetes().get(id)),
            (None, None) => return None,
        };
        let description = self.describe(name, None);
        if !description.is_empty() {
            definition.insert("description".to_owned(), description.into());
        }
        Some(Value::Object(definition))
    }

    fn struct_schema(&self, id: TypeId, ty: &Type) -> Map<String, Value> {
        let mut definition = Map::new();
        definition.insert("type".to_owned(), "object".into());
        let properties: Map<String, Value> = ty
            .fields
            .iter()
            .map(|field| (field.name.to_string(), self.property_schema(id, ty, field)))
            .collect();
        if !properties.is_empty() {
            definition.insert("properties".to_owned(), properties.into());
        }
        let required: Vec<&str> =
            ty.fields.iter().filter(|field| field.required).map(|field| &*field.name).collect();
        if !required.is_empty() {
            definition.insert("required".to_owned(), required.into());
        }
        if ty.atomic {
            definition.insert("x-kubernetes-map-type".to_owned(), "atomic".into());
        }
        if let Some(union) =
            openapi_extensions().union_types.get(&id).and_then(|union| serde_json::from_str(union).ok())
        {
            definition.insert("x-kubernetes-unions".to_owned(), union);
        }
        if !ty.kinds.is_empty() {
            let kinds = ty.kinds.iter();
            let kinds =
                kinds.map(|gvk| json!({"group": gvk.group, "version": gvk.version, "kind": gvk.kind}));
            definition.insert("x-kubernetes-group-version-kind".to_owned(), kinds.collect());
        }
        definition
    }

    fn property_schema(&self, id: TypeId, ty: &Type, field: &Field) -> Value {
        let mut property = self.field_schema(id, field);
        let description = self.describe(&ty.name, Some(&field.name));
        if !description.is_empty() {
            property.insert("description".to_owned(), description.into());
        }
        let key = (id, field.name.clone());
        if self.version == OpenApiVersion::V3 {
            let default = field.default.clone().or_else(|| implicit_default(field));
            if let Some(default) = default {
                property.insert("default".to_owned(), default);
            }
            if let Some(values) = openapi_extensions().enums.get(&key) {
                // The enum of a list field applies to its items.
                let values = Value::from_iter(values.split(',').map(|value| value.replace('+', " ")));
                match property.get_mut("items").and_then(Value::as_object_mut) {
                    Some(items) => items.insert("enum".to_owned(), values),
                    None => property.insert("enum".to_owned(), values),
                };
            }
        }
        if let Some(list) = openapi_extensions().list_types.get(&key) {
            let (kind, keys) = list.split_once(':').unwrap_or((list, ""));
            property.insert("x-kubernetes-list-type".to_owned(), kind.into());
            if !keys.is_empty() {
                let keys = keys.split(',').collect();
                property.insert("x-kubernetes-list-map-keys".to_owned(), keys);
            }
        }
        let extensions = [
            ("map-type", &openapi_extensions().map_types),
            ("patch-strategy", &openapi_extensions().patch_strategy),
        ];
        for (name, words) in extensions {
            if let Some(word) = words.get(&key) {
                property.insert(format!("x-kubernetes-{name}"), (&**word).into());
            }
        }
        if !field.merge_key.is_empty() {
            property.insert("x-kubernetes-patch-merge-key".to_owned(), (&*field.merge_key).into());
        }
        Value::Object(wrap_reference(self.version, property))
    }

    fn field_schema(&self, id: TypeId, field: &Field) -> Map<String, Value> {
        let Some(schema_or) = kubernetes().schema_or(id, &field.name) else {
            return self.shape_schema(&field.shape);
        };
        let reference = self.version.reference(match schema_or {
            SchemaOr::Array => {
                "io.k8s.apiextensions-apiserver.pkg.apis.apiextensions.v1.JSONSchemaPropsOrArray"
            }
            SchemaOr::Bool => {
                "io.k8s.apiextensions-apiserver.pkg.apis.apiextensions.v1.JSONSchemaPropsOrBool"
            }
            SchemaOr::StringArray => {
                "io.k8s.apiextensions-apiserver.pkg.apis.apiextensions.v1.JSONSchemaPropsOrStringArray"
            }
        });
        match &field.shape {
            Shape::Map { .. } => into_map(json!({"type": "object", "additionalProperties": reference})),
            _ => into_map(reference),
        }
    }

    fn shape_schema(&self, shape: &Shape) -> Map<String, Value> {
        let inner = |shape: &Shape| {
            let mut inner = self.shape_schema(shape);
            if self.version == OpenApiVersion::V3
                && let Some(default) = zero_default(shape)
            {
                inner.insert("default".to_owned(), default);
            }
            wrap_reference(self.version, inner)
        };
        into_map(match shape {
            Shape::String => json!({"type": "string"}),
            Shape::Bool => json!({"type": "boolean"}),
            Shape::Int32 => json!({"type": "integer", "format": "int32"}),
            Shape::Int64 => json!({"type": "integer", "format": "int64"}),
            Shape::Double => json!({"type": "number", "format": "double"}),
            Shape::Bytes => json!({"type": "string", "format": "byte"}),
            Shape::List { item, .. } => json!({"type": "array", "items": inner(item)}),
            Shape::Map { value, .. } => json!({"type": "object", "additionalProperties": inner(value)}),
            Shape::Struct(id) => self.version.reference(&kubernetes().get(*id).name),
            Shape::Time => self.version.reference("io.k8s.apimachinery.pkg.apis.meta.v1.Time"),
            Shape::MicroTime => self.version.reference("io.k8s.apimachinery.pkg.apis.meta.v1.MicroTime"),
            Shape::Duration => self.version.reference("io.k8s.apimachinery.pkg.apis.meta.v1.Duration"),
            Shape::Quantity => self.version.reference("io.k8s.apimachinery.pkg.api.resource.Quantity"),
            Shape::IntOrString => self.version.reference("io.k8s.apimachinery.pkg.util.intstr.IntOrString"),
            Shape::RawExtension => self.version.reference("io.k8s.apimachinery.pkg.runtime.RawExtension"),
            Shape::FieldsV1 => self.version.reference("io.k8s.apimachinery.pkg.apis.meta.v1.FieldsV1"),
            Shape::Json => {
                self.version.reference("io.k8s.apiextensions-apiserver.pkg.apis.apiextensions.v1.JSON")
            }
        })
    }

    /// The schemas of types that are not structs.
    fn scalar_schema(&self, name: &str) -> Option<Map<String, Value>> {
        let v3 = self.version == OpenApiVersion::V3;
        Some(into_map(match name {
            "io.k8s.apimachinery.pkg.api.resource.Quantity" if v3 => {
                json!({"oneOf": [{"type": "string"}, {"type": "number"}]})
            }
            "io.k8s.apimachinery.pkg.util.intstr.IntOrString" if v3 => {
                json!({"format": "int-or-string", "oneOf": [{"type": "integer"}, {"type": "string"}]})
            }
            "io.k8s.apimachinery.pkg.util.intstr.IntOrString" => {
                json!({"type": "string", "format": "int-or-string"})
            }
            "io.k8s.apimachinery.pkg.api.resource.Quantity"
            | "io.k8s.apimachinery.pkg.apis.meta.v1.Duration" => json!({"type": "string"}),
            "io.k8s.apimachinery.pkg.apis.meta.v1.Time"
            | "io.k8s.apimachinery.pkg.apis.meta.v1.MicroTime" => {
                json!({"type": "string", "format": "date-time"})
            }
            "io.k8s.apimachinery.pkg.apis.meta.v1.FieldsV1"
            | "io.k8s.apimachinery.pkg.apis.meta.v1.Patch"
            | "io.k8s.apimachinery.pkg.runtime.RawExtension" => json!({"type": "object"}),
            "io.k8s.apiextensions-apiserver.pkg.apis.apiextensions.v1.JSON"
            | "io.k8s.apiextensions-apiserver.pkg.apis.apiextensions.v1.JSONSchemaPropsOrArray"
            | "io.k8s.apiextensions-apiserver.pkg.apis.apiextensions.v1.JSONSchemaPropsOrBool"
            | "io.k8s.apiextensions-apiserver.pkg.apis.apiextensions.v1.JSONSchemaPropsOrStringArray" => {
                json!({})
            }
            _ => return None,
        }))
    }
}

/// In v3, no keyword may stand beside `$ref`.
fn wrap_reference(version: OpenApiVersion, mut schema: Map<String, Value>) -> Map<String, Value> {
    if version == OpenApiVersion::V3
        && schema.len() > 1
        && let Some(reference) = schema.remove("$ref")
    {
        schema.insert("allOf".to_owned(), json!([{ "$ref": reference }]));
    }
    schema
}

/// Fields without `omitempty` have their zero value as default.
fn implicit_default(field: &Field) -> Option<Value> {
    match field.shape {
        _ if field.pointer => None,
        Shape::Struct(_) => zero_default(&field.shape),
        _ if field.always_present => zero_default(&field.shape),
        _ => None,
    }
}

fn zero_default(shape: &Shape) -> Option<Value> {
    Some(match shape {
        Shape::String => "".into(),
        Shape::Bool => false.into(),
        Shape::Int32 | Shape::Int64 | Shape::Double => 0.into(),
        Shape::Struct(_) => json!({}),
        _ => return None,
    })
}

fn into_map(value: Value) -> Map<String, Value> {
    match value {
        Value::Object(map) => map,
        _ => Map::new(),
    }
}

/// Appends the names of the definitions that a schema refers to.
pub fn collect_references(schema: &Value, names: &mut Vec<String>) {
    match schema {
        Value::Object(map) => {
            for (key, value) in map {
                match value.as_str().filter(|_| key == "$ref") {
                    Some(text) => names.extend(text.rsplit('/').next().map(str::to_owned)),
                    None => collect_references(value, names),
                }
            }
        }
        Value::Array(list) => list.iter().for_each(|value| collect_references(value, names)),
        _ => {}
    }
}

fn descriptions(text: &'static str) -> HashMap<String, &'static str> {
    let mut descriptions = HashMap::new();
    let (mut package, mut ty) = ("", String::new());
    for line in text.lines() {
        if let Some(name) = line.strip_prefix("package ") {
            package = name;
        } else if let Some((name, description)) = line.split_once('\t') {
            let key = match name.strip_prefix(' ') {
                Some(field) => format!("{ty} {field}"),
                None => {
                    ty = format!("{package}.{name}");
                    ty.clone()
                }
            };
            descriptions.insert(key, description);
        }
    }
    descriptions
}

#[cfg(test)]
mod tests;
