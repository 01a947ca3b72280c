//! The data model of the schema table.

use std::collections::HashMap;

use serde_json::Value;

/// An index into [`Table::types`].
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, PartialOrd, Ord)]
pub struct TypeId(pub u32);

/// A closed set of types: every `TypeId` in it refers to a type of this table.
#[derive(Debug, Default)]
pub struct Table {
    types: Vec<Type>,
    by_name: HashMap<Box<str>, TypeId>,
    by_kind: HashMap<Gvk, TypeId>,
    schema_or: HashMap<(TypeId, Box<str>), SchemaOr>,
    go_types: HashMap<(TypeId, Box<str>), Box<str>>,
}

/// The alternative to a nested schema in the few fields of `JSONSchemaProps` that accept two types (Go's
/// `JSONSchemaPropsOrArray` and the like). The shape of these fields is [`Shape::Json`] or a map of it.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum SchemaOr {
    Array,
    Bool,
    StringArray,
}

/// A group, version and kind, as in `x-kubernetes-group-version-kind`.
#[derive(Clone, Debug, PartialEq, Eq, Hash, PartialOrd, Ord)]
pub struct Gvk {
    pub group: Box<str>,
    pub version: Box<str>,
    pub kind: Box<str>,
}

/// A struct: a name and a list of fields.
#[derive(Clone, Debug, Default)]
pub struct Type {
    /// The OpenAPI definition name, `io.k8s.api.core.v1.PodSpec`.
    pub name: Box<str>,
    /// In upstream's declaration order, which is the order in its JSON.
    pub fields: Vec<Field>,
    /// Server-side apply treats the struct as a single value (`x-kubernetes-map-type: atomic`).
    pub atomic: bool,
    /// The kinds of which this is the root type; empty for nested types.
    pub kinds: Vec<Gvk>,
    /// Unknown fields are kept (`x-kubernetes-preserve-unknown-fields`).
    pub preserve_unknown: bool,
    /// Field indexes sorted by name, for `field`. Filled in by [`Table::new`].
    pub fields_by_name: Vec<u16>,
}

#[derive(Clone, Debug)]
pub struct Field {
    /// The JSON name.
    pub name: Box<str>,
    /// The protobuf field number; 0 if the type has no protobuf encoding. A field of an embedded
    /// struct, which JSON inlines, has the number of the embedded message in the next higher byte.
    pub tag: u32,
    pub shape: Shape,
    /// Listed under `required` in OpenAPI.
    pub required: bool,
    /// A pointer in upstream's Go type: a zero value (`0`, `""`, `false`, an empty list) differs from
    /// an absent one and is kept.
    pub pointer: bool,
    /// A field without `omitempty`: encoded even if it is empty (`"status": {}`).
    pub always_present: bool,
    /// The OpenAPI default.
    pub default: Option<Value>,
    /// The patch strategy in a strategic merge patch.
    pub patch_strategy: PatchStrategy,
    /// The key that identifies list items in a strategic merge patch; empty if there is none.
    pub merge_key: Box<str>,
}

/// `x-kubernetes-patch-strategy`.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct PatchStrategy {
    pub merge: bool,
    pub retain_keys: bool,
}

/// The type of a value in JSON.
#[derive(Clone, Debug, PartialEq)]
pub enum Shape {
    String,
    Bool,
    Int32,
    Int64,
    Double,
    /// Base64 in JSON.
    Bytes,
    /// RFC 3339 with seconds.
    Time,
    /// RFC 3339 with microseconds.
    MicroTime,
    /// A Go duration string (`metav1.Duration`).
    Duration,
    Quantity,
    IntOrString,
    /// An embedded API object (`runtime.RawExtension`): any JSON object.
    RawExtension,
    /// Any JSON value (`apiextensions.JSON`).
    Json,
    /// `metav1.FieldsV1`: a JSON object, raw bytes in protobuf.
    FieldsV1,
    Struct(TypeId),
    List {
        item: Box<Shape>,
        kind: ListType,
    },
    /// Keys are strings.
    Map {
        value: Box<Shape>,
        atomic: bool,
    },
}

/// `x-kubernetes-list-type`.
#[derive(Clone, Debug, PartialEq)]
pub enum ListType {
    Atomic,
    Set,
    /// `x-kubernetes-list-map-keys`.
    Map(Vec<Box<str>>),
}

impl Table {
    pub fn new(mut types: Vec<Type>) -> Table {
        types.iter_mut().for_each(Type::sort_fields);
        let by_name = types.iter().zip(0..).map(|(t, i)| (t.name.clone(), TypeId(i))).collect();
        let by_kind = types
            .iter()
            .zip(0..)
            .flat_map(|(t, i)| t.kinds.iter().map(move |kind| (kind.clone(), TypeId(i))))
            .collect();
        Table { types, by_name, by_kind, schema_or: HashMap::new(), go_types: HashMap::new() }
    }

    pub(crate) fn set_details(
        &mut self,
        schema_or: HashMap<(TypeId, Box<str>), SchemaOr>,
        go_types: HashMap<(TypeId, Box<str>), Box<str>>,
    ) {
        self.schema_or = schema_or;
        self.go_types = go_types;
    }

    /// The Go type of a field if the shape does not determine it. For error messages.
    pub(crate) fn go_type(&self, id: TypeId, field: &str) -> Option<&str> {
        self.go_types.get(&(id, field.into())).map(|name| &**name)
    }

    /// The alternative to a nested struct that the field accepts, if any.
    pub fn schema_or(&self, id: TypeId, field: &str) -> Option<SchemaOr> {
        if self.schema_or.is_empty() {
            return None;
        }
        self.schema_or.get(&(id, field.into())).copied()
    }

    pub fn get(&self, id: TypeId) -> &Type {
        &self.types[id.0 as usize]
    }

    /// Looks up a type by its definition name, such as `io.k8s.api.core.v1.Pod`.
    pub fn type_by_name(&self, name: &str) -> Option<TypeId> {
        self.by_name.get(name).copied()
    }

    /// Looks up a type by group, version and kind.
    pub fn type_by_kind(&self, group: &str, version: &str, kind: &str) -> Option<TypeId> {
        self.by_kind.get(&Gvk { group: group.into(), version: version.into(), kind: kind.into() }).copied()
    }

    pub fn types(&self) -> impl Iterator<Item = (TypeId, &Type)> {
        self.types.iter().zip(0..).map(|(t, i)| (TypeId(i), t))
    }
}

impl Type {
    pub fn field(&self, name: &str) -> Option<&Field> {
        let at = self
            .fields_by_name
            .binary_search_by(|&at| (*self.fields[usize::from(at)].name).cmp(name))
            .ok()?;
        self.fields.get(usize::from(self.fields_by_name[at]))
    }

    fn sort_fields(&mut self) {
        self.fields_by_name = (0..self.fields.len() as u16).collect();
        self.fields_by_name
            .sort_by(|&a, &b| self.fields[usize::from(a)].name.cmp(&self.fields[usize::from(b)].name));
    }

    /// The last part of the definition name, which is upstream's Go type name.
    pub fn short_name(&self) -> &str {
        self.name.rsplit('.').next().unwrap_or(&self.name)
    }
}
