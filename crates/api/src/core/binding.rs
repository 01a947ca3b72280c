//! Binding: assigns a pod to a node. It is never stored.

use serde_json::Value;

use crate::field::{ErrorList, Path};
use crate::json::JsonExt;
use crate::strategy::RestStrategy;

pub struct Binding;

impl RestStrategy for Binding {
    fn validate(&self, obj: &Value, errors: &mut ErrorList) {
        validate_binding(obj, errors);
    }
}

/// Validates a Binding, created directly or through the `binding` subresource of a pod.
pub fn validate_binding(binding: &Value, errors: &mut ErrorList) {
    let target = binding.at("target");
    let kind = target.text("kind");
    if !["", "Node"].contains(&kind) {
        errors.not_supported(&Path::new("target.kind"), kind, &["Node", "<empty>"]);
    }
    if target.text("name").is_empty() {
        errors.required(&Path::new("target.name"), "");
    }
}
