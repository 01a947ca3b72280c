//! Converts the OpenAPI schema of a custom resource into a [`Table`] like that of the built-in types.
//!
//! The table holds what server-side apply and field management need, which is the structure. Validation
//! of values uses the JSON schema itself. `metadata` always has the built-in `ObjectMeta` type.

use std::collections::HashMap;

use serde_json::{Map, Value};

use crate::kubernetes;
use crate::table::{Field, Gvk, ListType, PatchStrategy, Shape, Table, Type, TypeId};

const OBJECT_META: &str = "io.k8s.apimachinery.pkg.apis.meta.v1.ObjectMeta";

/// Creates the table of a custom resource with this OpenAPI schema. The root type has the ID 0.
pub fn custom_table(kind: Gvk, schema: &Value) -> (Table, TypeId) {
    let mut builder = Builder { types: vec![Type::default()], copied: HashMap::new() };
    let mut root = builder.build_struct(schema, kind.kind.to_string());
    builder.add_meta(&mut root);
    root.kinds.push(kind);
    builder.types[0] = root;
    (Table::new(builder.types), TypeId(0))
}

struct Builder {
    types: Vec<Type>,
    /// Built-in types copied into this table: ID in the built-in table to ID here.
    copied: HashMap<TypeId, TypeId>,
}

impl Builder {
    fn push(&mut self, ty: Type) -> TypeId {
        let id = self.next_id();
        self.types.push(ty);
        id
    }

    fn next_id(&self) -> TypeId {
        TypeId(u32::try_from(self.types.len()).unwrap_or(u32::MAX))
    }

    fn build_struct(&mut self, schema: &Value, name: String) -> Type {
        let required: Vec<&str> =
            items(schema, "required").iter().filter_map(Value::as_str).collect::<Vec<_>>();
        let mut fields = Vec::new();
        for (field, property) in properties(schema) {
            let shape = self.build_shape(property, &format!("{name}.{field}"));
            let default = property.get("default").filter(|value| !value.is_null()).cloned();
            let required = required.contains(&field.as_str());
            fields.push(Field { default, required, ..simple_field(field, shape) });
        }
        Type {
            name: name.into(),
            fields,
            atomic: text(schema, "x-kubernetes-map-type") == "atomic",
            preserve_unknown: flag(schema, "x-kubernetes-preserve-unknown-fields"),
            ..Type::default()
        }
    }

    fn build_shape(&mut self, schema: &Value, name: &str) -> Shape {
        if flag(schema, "x-kubernetes-int-or-string") {
            return Shape::IntOrString;
        }
        match text(schema, "type") {
            "string" => Shape::String,
            "integer" => Shape::Int64,
            "number" => Shape::Double,
            "boolean" => Shape::Bool,
            "array" => {
                let item = schema.get("items").unwrap_or(&Value::Null);
                let item = Box::new(self.build_shape(item, &format!("{name}.items")));
                Shape::List { item, kind: list_type(schema) }
            }
            _ => match schema.get("additionalProperties").filter(|value| value.is_object()) {
                Some(value) => Shape::Map {
                    value: Box::new(self.build_shape(value, &format!("{name}.values"))),
                    atomic: text(schema, "x-kubernetes-map-type") == "atomic",
                },
                None => Shape::Struct(self.build_object(schema, name)),
            },
        }
    }

    fn build_object(&mut self, schema: &Value, name: &str) -> TypeId {
        let mut ty = self.build_struct(schema, name.to_owned());
        if flag(schema, "x-kubernetes-embedded-resource") {
            self.add_meta(&mut ty);
        }
        self.push(ty)
    }

    /// Adds the type and object metadata fields. They replace whatever the schema says about these names.
    fn add_meta(&mut self, ty: &mut Type) {
        ty.fields.retain(|field| !matches!(&*field.name, "apiVersion" | "kind" | "metadata"));
        ty.fields.push(simple_field("apiVersion", Shape::String));
        ty.fields.push(simple_field("kind", Shape::String));
        if let Some(meta) = kubernetes().type_by_name(OBJECT_META) {
            let shape = Shape::Struct(self.copy_type(meta));
            ty.fields.push(simple_field("metadata", shape));
        }
    }

    /// Copies a built-in type and all types it refers to.
    fn copy_type(&mut self, id: TypeId) -> TypeId {
        if let Some(copied) = self.copied.get(&id) {
            return *copied;
        }
        let mut ty = kubernetes().get(id).clone();
        // Reserve the ID before the fields are copied: types may refer to themselves.
        let new = self.push(Type::default());
        self.copied.insert(id, new);
        for field in &mut ty.fields {
            self.copy_shape(&mut field.shape);
        }
        self.types[new.0 as usize] = ty;
        new
    }

    fn copy_shape(&mut self, shape: &mut Shape) {
        match shape {
            Shape::Struct(id) => *id = self.copy_type(*id),
            Shape::List { item: inner, .. } | Shape::Map { value: inner, .. } => self.copy_shape(inner),
            _ => {}
        }
    }
}

fn simple_field(name: &str, shape: Shape) -> Field {
    Field {
        name: name.into(),
        // Custom resources have no protobuf encoding.
        tag: 0,
        shape,
        required: false,
        pointer: true,
        always_present: false,
        default: None,
        patch_strategy: PatchStrategy::default(),
        merge_key: "".into(),
    }
}

fn list_type(schema: &Value) -> ListType {
    match text(schema, "x-kubernetes-list-type") {
        "set" => ListType::Set,
        "map" => {
            let keys = items(schema, "x-kubernetes-list-map-keys").iter().filter_map(Value::as_str);
            ListType::Map(keys.map(Box::from).collect())
        }
        _ => ListType::Atomic,
    }
}

fn properties(schema: &Value) -> impl Iterator<Item = (&String, &Value)> {
    schema.get("properties").and_then(Value::as_object).into_iter().flat_map(Map::iter)
}

fn items<'a>(schema: &'a Value, name: &str) -> &'a [Value] {
    schema.get(name).and_then(Value::as_array).map_or(&[], Vec::as_slice)
}

fn text<'a>(schema: &'a Value, name: &str) -> &'a str {
    schema.get(name).and_then(Value::as_str).unwrap_or("")
}

fn flag(schema: &Value, name: &str) -> bool {
    schema.get(name).and_then(Value::as_bool).unwrap_or(false)
}

#[cfg(test)]
mod tests {
    use expect_test::expect;
    use serde_json::json;

    use super::*;

    #[test]
    fn creates_table_from_json_schema() {
        let schema = json!({"type": "object", "properties": {"spec": {"type": "object", "required": ["size"], "properties": {
            "size": {"type": "integer"},
            "port": {"x-kubernetes-int-or-string": true},
            "tags": {"type": "array", "x-kubernetes-list-type": "set", "items": {"type": "string"}},
            "parts": {"type": "array", "x-kubernetes-list-type": "map", "x-kubernetes-list-map-keys": ["name"],
                      "items": {"type": "object", "properties": {"name": {"type": "string", "default": "a"}}}},
            "labels": {"type": "object", "x-kubernetes-map-type": "atomic", "additionalProperties": {"type": "string"}},
            "free": {"x-kubernetes-preserve-unknown-fields": true},
            "template": {"type": "object", "x-kubernetes-embedded-resource": true},
        }}}});
        let kind = Gvk { group: "a.b".into(), version: "v1".into(), kind: "Boat".into() };
        let (table, root) = custom_table(kind, &schema);
        assert_eq!(table.type_by_kind("a.b", "v1", "Boat"), Some(root));
        let spec = table.type_by_name("Boat.spec").unwrap();
        let rendered: Vec<String> = table
            .get(spec)
            .fields
            .iter()
            .map(|field| format!("{} {:?}\n", field.name, field.shape))
            .collect();
        expect![[r#"
            free Struct(TypeId(1))
            labels Map { value: String, atomic: true }
            parts List { item: Struct(TypeId(2)), kind: Map(["name"]) }
            port IntOrString
            size Int64
            tags List { item: String, kind: Set }
            template Struct(TypeId(6))
        "#]]
        .assert_eq(&rendered.concat());
        assert_eq!(
            table.get(table.type_by_name("Boat.spec.parts.items").unwrap()).fields[0].default,
            Some(json!("a"))
        );
        let Shape::Struct(meta) = table.get(root).field("metadata").unwrap().shape else { panic!() };
        assert_eq!(table.get(meta).short_name(), "ObjectMeta");
        assert!(table.get(meta).field("ownerReferences").is_some());
    }
}
