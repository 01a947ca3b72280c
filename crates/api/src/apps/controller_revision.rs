//! ControllerRevision: a snapshot of a workload's template that never changes.

use serde_json::Value;

use crate::core::pod::rules::{immutable, non_negative};
use crate::field::{Errors, Path};
use crate::json::Json;
use crate::kind::Kind;

pub struct ControllerRevision;

impl Kind for ControllerRevision {
    fn validate(&self, obj: &Value, errors: &mut Errors) {
        non_negative(errors, obj, &Path::root(), "revision");
    }

    fn validate_create(&self, new: &Value, errors: &mut Errors) {
        match new.at("data") {
            Value::Null => errors.required(&Path::new("data"), "data is mandatory"),
            Value::Object(_) => {}
            _ => errors.required(&Path::new("data"), "data must be a valid JSON object"),
        }
    }

    fn validate_update(&self, new: &Value, old: &Value, errors: &mut Errors) {
        immutable(errors, &Path::new("data"), new.at("data"), old.at("data"));
    }
}
