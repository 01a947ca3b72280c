//! Binding: tells a pod which node it runs on. Never stored.

use serde_json::Value;

use crate::field::{Errors, Path};
use crate::json::Json;
use crate::kind::Kind;

pub struct Binding;

impl Kind for Binding {
    fn validate(&self, obj: &Value, errors: &mut Errors) {
        validate_binding(obj, errors);
    }
}

/// The rules of a binding, posted alone or to a pod's `binding` subresource.
pub fn validate_binding(binding: &Value, errors: &mut Errors) {
    let target = binding.at("target");
    let kind = target.text("kind");
    if !["", "Node"].contains(&kind) {
        errors.not_supported(&Path::new("target.kind"), kind, &["Node", "<empty>"]);
    }
    if target.text("name").is_empty() {
        errors.required(&Path::new("target.name"), "");
    }
}
