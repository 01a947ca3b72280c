//! The compiled schema of a version of a custom resource.

use schema::{Gvk, Table, TypeId};
use serde_json::Value;

use super::json_path::JsonPath;
use super::printer_columns::{self, CustomColumn};
use super::validation_rules::SchemaRules;
use super::{Definition, ScalePaths};
use crate::apiextensions::values::{self, Patterns};
use crate::json::JsonExt as _;

/// The schema of a version, and everything derived from it that reading and writing objects needs.
#[derive(Debug)]
pub struct VersionSchema {
    pub group: String,
    pub version: String,
    pub kind: String,
    /// The OpenAPI schema without descriptions; null if the version has none.
    pub schema: Value,
    pub table: Table,
    pub root: TypeId,
    pub columns: Vec<CustomColumn>,
    /// The selectable fields and their paths.
    pub selectable_fields: Vec<(String, JsonPath)>,
    pub scale: Option<ScalePaths>,
    pub has_status: bool,
    pub(super) patterns: Patterns,
    pub(super) rules: Option<SchemaRules>,
    /// Whether pruning is disabled (`preserveUnknownFields`).
    preserve_unknown: bool,
}

impl VersionSchema {
    /// `version_spec` is the entry of the version in the CRD.
    pub(super) fn new(definition: &Definition, version: &str, version_spec: &Value) -> VersionSchema {
        let mut schema = version_spec.path("schema.openAPIV3Schema").clone();
        drop_descriptions(&mut schema);
        let kind = Gvk {
            group: definition.group.as_str().into(),
            version: version.into(),
            kind: definition.accepted_names.kind.as_str().into(),
        };
        let preserve_unknown = definition.preserve_unknown || schema.is_null();
        let (table, root) = schema::custom::custom_table(kind, &schema);
        let selectable_fields = version_spec.items("selectableFields").iter().filter_map(|field| {
            let path = field.text("jsonPath");
            Some((path.strip_prefix('.').unwrap_or(path).to_owned(), JsonPath::parse(path)?))
        });
        let crd_version = definition.version(version);
        VersionSchema {
            group: definition.group.clone(),
            version: version.to_owned(),
            kind: definition.accepted_names.kind.clone(),
            table,
            root,
            columns: printer_columns::parse_columns(version_spec.items("additionalPrinterColumns")),
            selectable_fields: selectable_fields.collect(),
            scale: crd_version.and_then(|version| version.scale.clone()),
            has_status: crd_version.is_some_and(|version| version.has_status),
            patterns: Patterns::from_schema(&schema),
            rules: SchemaRules::compile_tree(&schema, true),
            preserve_unknown,
            schema,
        }
    }

    /// Removes unspecified fields, and nulls of fields that are not nullable. Returns the paths of the
    /// unspecified fields.
    pub fn prune(&self, value: &mut Value) -> Vec<String> {
        if self.preserve_unknown {
            return Vec::new();
        }
        let unknown = values::prune(&self.schema, value, true);
        // The schema does not apply to metadata, so exclude it.
        let metadata = value.as_object_mut().and_then(|fields| fields.remove("metadata"));
        values::remove_null_fields(&self.schema, value);
        if let (Some(metadata), Some(fields)) = (metadata, value.as_object_mut()) {
            fields.insert("metadata".to_owned(), metadata);
        }
        unknown
    }

    pub fn set_defaults(&self, value: &mut Value) {
        values::set_defaults(&self.schema, value);
    }

    /// The value of a selectable field.
    pub fn field_value(&self, name: &str, object: &Value) -> Option<String> {
        let (_, path) = self.selectable_fields.iter().find(|(field, _)| field == name)?;
        Some(match path.find(object).first() {
            None | Some(Value::Null) => String::new(),
            Some(Value::String(text)) => text.clone(),
            Some(other) => other.to_string(),
        })
    }
}

/// Removes descriptions and the like, which often are most of a schema.
fn drop_descriptions(schema: &mut Value) {
    let Some(keywords) = schema.as_object_mut() else { return };
    keywords.retain(|keyword, _| {
        !matches!(keyword.as_str(), "description" | "title" | "example" | "externalDocs")
    });
    for (keyword, value) in keywords.iter_mut() {
        match (keyword.as_str(), value) {
            ("properties", Value::Object(properties)) => properties.values_mut().for_each(drop_descriptions),
            ("items" | "additionalProperties" | "not", inner) => drop_descriptions(inner),
            ("allOf" | "anyOf" | "oneOf", Value::Array(inner)) => {
                inner.iter_mut().for_each(drop_descriptions)
            }
            _ => {}
        }
    }
}
