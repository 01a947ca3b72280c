//! One version of a custom kind, worked out: its schema and all that goes by it.

use schema::{Gvk, Table, TypeId};
use serde_json::Value;

use super::columns::{self, CustomColumn};
use super::path::JsonPath;
use super::rules::Rules;
use super::{Definition, ScalePaths};
use crate::apiextensions::values::{self, Patterns};
use crate::json::Json as _;

/// What is needed to write objects in a version, and to show them.
#[derive(Debug)]
pub struct Form {
    pub group: String,
    pub version: String,
    pub kind: String,
    /// The OpenAPI schema, without what it says to people; null where the definition has none.
    pub schema: Value,
    pub table: Table,
    pub root: TypeId,
    pub columns: Vec<CustomColumn>,
    /// The fields a selector may name, and where they are found.
    pub selectable: Vec<(String, JsonPath)>,
    pub scale: Option<ScalePaths>,
    pub has_status: bool,
    pub(super) patterns: Patterns,
    pub(super) rules: Option<Rules>,
    /// Nothing is pruned.
    preserve_unknown: bool,
}

impl Form {
    /// `described` is the version's entry in the definition.
    pub(super) fn new(definition: &Definition, version: &str, described: &Value) -> Form {
        let mut schema = described.path("schema.openAPIV3Schema").clone();
        forget_words(&mut schema);
        let kind = Gvk {
            group: definition.group.as_str().into(),
            version: version.into(),
            kind: definition.accepted.kind.as_str().into(),
        };
        let preserve_unknown = definition.preserve_unknown || schema.is_null();
        let (table, root) = schema::custom::table(kind, &schema);
        let selectable = described.items("selectableFields").iter().filter_map(|field| {
            let path = field.text("jsonPath");
            Some((path.strip_prefix('.').unwrap_or(path).to_owned(), JsonPath::parse(path)?))
        });
        let known = definition.version(version);
        Form {
            group: definition.group.clone(),
            version: version.to_owned(),
            kind: definition.accepted.kind.clone(),
            table,
            root,
            columns: columns::of(described.items("additionalPrinterColumns")),
            selectable: selectable.collect(),
            scale: known.and_then(|version| version.scale.clone()),
            has_status: known.is_some_and(|version| version.has_status),
            patterns: Patterns::of(&schema),
            rules: Rules::of(&schema, true),
            preserve_unknown,
            schema,
        }
    }

    /// Removes what the schema does not know, and nulls that mean nothing. Gives back the paths of what was
    /// unknown.
    pub fn prune(&self, value: &mut Value) -> Vec<String> {
        if self.preserve_unknown {
            return Vec::new();
        }
        let unknown = values::prune(&self.schema, value, true);
        // Metadata is not the schema's business.
        let metadata = value.as_object_mut().and_then(|fields| fields.remove("metadata"));
        values::drop_nulls(&self.schema, value);
        if let (Some(metadata), Some(fields)) = (metadata, value.as_object_mut()) {
            fields.insert("metadata".to_owned(), metadata);
        }
        unknown
    }

    pub fn set_defaults(&self, value: &mut Value) {
        values::set_defaults(&self.schema, value);
    }

    /// What a field selector can see of an object.
    pub fn field(&self, name: &str, object: &Value) -> Option<String> {
        let (_, path) = self.selectable.iter().find(|(field, _)| field == name)?;
        Some(match path.find(object).first() {
            None | Some(Value::Null) => String::new(),
            Some(Value::String(text)) => text.clone(),
            Some(other) => other.to_string(),
        })
    }
}

/// Drops descriptions and the like, which are often most of a schema.
fn forget_words(schema: &mut Value) {
    let Some(keywords) = schema.as_object_mut() else { return };
    keywords.retain(|keyword, _| {
        !matches!(keyword.as_str(), "description" | "title" | "example" | "externalDocs")
    });
    for (keyword, value) in keywords.iter_mut() {
        match (keyword.as_str(), value) {
            ("properties", Value::Object(properties)) => properties.values_mut().for_each(forget_words),
            ("items" | "additionalProperties" | "not", inner) => forget_words(inner),
            ("allOf" | "anyOf" | "oneOf", Value::Array(inner)) => inner.iter_mut().for_each(forget_words),
            _ => {}
        }
    }
}
