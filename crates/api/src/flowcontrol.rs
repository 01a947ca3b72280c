//! The kinds of the `flowcontrol.apiserver.k8s.io` group.

pub mod flow_schema;
pub mod priority_level_configuration;

use std::collections::HashSet;

use serde_json::Value;

use crate::field::{ErrorList, Path};
use crate::json::JsonExt;

/// Validates `status.conditions`: types are required and unique.
fn validate_conditions(obj: &Value, errors: &mut ErrorList) {
    let path = Path::new("status.conditions");
    let mut seen = HashSet::new();
    for (i, condition) in obj.at("status").items("conditions").iter().enumerate() {
        let (kind, path) = (condition.text("type"), path.index(i).child("type"));
        if !seen.insert(kind) {
            errors.duplicate(&path, kind);
        }
        if kind.is_empty() {
            errors.required(&path, "");
        }
    }
}
