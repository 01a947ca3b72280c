//! The data model of the schema table.

use std::collections::HashMap;

use serde_json::Value;

/// An index into [`Table::types`].
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, PartialOrd, Ord)]
pub struct TypeId(pub u32);

/// A closed set of types: every `TypeId` in it points into it.
#[derive(Debug, Default)]
pub struct Table {
    types: Vec<Type>,
    by_name: HashMap<Box<str>, TypeId>,
    by_kind: HashMap<Gvk, TypeId>,
    schema_or: HashMap<(TypeId, Box<str>), SchemaOr>,
    go_types: HashMap<(TypeId, Box<str>), Box<str>>,
}

/// What a value may be instead of its own struct again, in the few fields of a CRD's schema where it may be
/// one of two things. Their shape is [`Shape::Json`], or a map of it.
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

/// A struct: a named list of fields.
#[derive(Clone, Debug, Default)]
pub struct Type {
    /// The OpenAPI definition name, `io.k8s.api.core.v1.PodSpec`.
    pub name: Box<str>,
    /// In upstream's declaration order, which is also the order of its JSON.
    pub fields: Vec<Field>,
    /// Server-side apply treats the whole struct as one value.
    pub atomic: bool,
    /// The kinds this type is the root of; empty for inner types.
    pub kinds: Vec<Gvk>,
    /// Unknown fields are kept, as in custom resources that ask for it.
    pub preserve_unknown: bool,
    /// The fields by name, for `field`; filled in when the type joins a table.
    pub fields_by_name: Vec<u16>,
}

#[derive(Clone, Debug)]
pub struct Field {
    /// The JSON name.
    pub name: Box<str>,
    /// The protobuf field number; 0 where the type has no protobuf form. A field of an embedded struct, which
    /// JSON has among the others, carries the number of the embedded message one byte further up.
    pub tag: u32,
    pub shape: Shape,
    /// Listed under `required` in OpenAPI.
    pub required: bool,
    /// A zero value (`0`, `""`, `false`, an empty list) means something different from an absent one, so
    /// it is kept. Upstream calls these pointers.
    pub pointer: bool,
    /// Written even when empty (`"status": {}`): upstream's fields without `omitempty`.
    pub always_present: bool,
    /// The OpenAPI default.
    pub default: Option<Value>,
    /// How a strategic merge patch treats the field.
    pub patch_strategy: PatchStrategy,
    /// The key that tells list items apart in a strategic merge patch; empty when there is none.
    pub merge_key: Box<str>,
}

/// `x-kubernetes-patch-strategy`.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct PatchStrategy {
    pub merge: bool,
    pub retain_keys: bool,
}

/// What a value looks like in JSON.
#[derive(Clone, Debug, PartialEq)]
pub enum Shape {
    String,
    Bool,
    Int32,
    Int64,
    Double,
    /// Base64 in JSON.
    Bytes,
    /// RFC 3339, seconds.
    Time,
    /// RFC 3339, microseconds.
    MicroTime,
    /// A Go duration string (`metav1.Duration`).
    Duration,
    Quantity,
    IntOrString,
    /// Any JSON object, an embedded API object (`runtime.RawExtension`).
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

    /// The name of a field's Go type where its shape does not tell, for error messages.
    pub(crate) fn go_type(&self, id: TypeId, field: &str) -> Option<&str> {
        self.go_types.get(&(id, field.into())).map(|name| &**name)
    }

    /// Whether a field may hold something else instead of a struct of the same type.
    pub fn schema_or(&self, id: TypeId, field: &str) -> Option<SchemaOr> {
        if self.schema_or.is_empty() {
            return None;
        }
        self.schema_or.get(&(id, field.into())).copied()
    }

    pub fn get(&self, id: TypeId) -> &Type {
        &self.types[id.0 as usize]
    }

    /// By definition name, `io.k8s.api.core.v1.Pod`.
    pub fn type_by_name(&self, name: &str) -> Option<TypeId> {
        self.by_name.get(name).copied()
    }

    /// By group, version and kind.
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
