//! Finds string and number formats that are not validated, for warnings.

use serde_json::Value;

use super::super::values;
use super::PerVersion;
use super::schema::children;
use crate::json::JsonExt;

/// The formats in the schemas of a CRD that are not validated.
pub(super) fn unrecognized_formats(crd: &Value) -> Vec<String> {
    let mut found = Vec::new();
    let versions = crd.at("spec").items("versions");
    let schemas: Vec<&Value> = match PerVersion::from_versions(versions, "schema") {
        PerVersion::Shared(shared) => vec![shared.at("openAPIV3Schema")],
        PerVersion::Distinct => {
            versions.iter().map(|version| version.path("schema.openAPIV3Schema")).collect()
        }
    };
    for schema in schemas {
        collect_formats(schema, &mut found);
    }
    found
}

fn collect_formats(schema: &Value, found: &mut Vec<String>) {
    let format = schema.text("format");
    if !format.is_empty() && !values::is_known_format(schema) {
        found.push(format.to_owned());
    }
    for child in children(schema) {
        collect_formats(child, found);
    }
}
