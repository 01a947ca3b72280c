//! ControllerRevision: an immutable snapshot of a workload's template.

use serde_json::Value;

use crate::core::pod::rules::{non_negative, validate_immutable};
use crate::field::{ErrorList, Path};
use crate::json::JsonExt;
use crate::strategy::RestStrategy;

pub struct ControllerRevision;

impl RestStrategy for ControllerRevision {
    fn validate(&self, obj: &Value, errors: &mut ErrorList) {
        non_negative(errors, obj, &Path::root(), "revision");
    }

    fn validate_create(&self, new: &Value, errors: &mut ErrorList) {
        match new.at("data") {
            Value::Null => errors.required(&Path::new("data"), "data is mandatory"),
            Value::Object(_) => {}
            _ => errors.required(&Path::new("data"), "data must be a valid JSON object"),
        }
    }

    fn validate_update(&self, new: &Value, old: &Value, errors: &mut ErrorList) {
        validate_immutable(errors, &Path::new("data"), new.at("data"), old.at("data"));
    }
}
