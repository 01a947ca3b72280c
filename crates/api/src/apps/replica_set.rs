//! ReplicaSet: REST strategy and validation.

use serde_json::Value;

use super::workload;
use crate::core::pod::rules::{non_negative, validate_immutable};
use crate::field::{ErrorList, Path};
use crate::json::JsonExt;
use crate::strategy::RestStrategy;

pub struct ReplicaSet;

impl RestStrategy for ReplicaSet {
    fn prepare(&self, new: &mut Value) {
        workload::prepare_template(new, &["spec", "template"]);
    }

    fn validate(&self, obj: &Value, errors: &mut ErrorList) {
        let (spec, path) = (obj.at("spec"), Path::new("spec"));
        non_negative(errors, spec, &path, "replicas");
        non_negative(errors, spec, &path, "minReadySeconds");
        workload::validate_selector(spec, &path, "deployment", errors);
        if workload::validate_selector_matches_template(spec, &path, "invalid label selector", errors) {
            workload::validate_template(spec, &path, "ReplicaSet", errors);
        }
    }

    fn validate_update(&self, new: &Value, old: &Value, errors: &mut ErrorList) {
        let field = "spec.selector";
        validate_immutable(errors, &Path::new(field), new.path(field), old.path(field));
    }

    fn validate_status_update(&self, new: &Value, _old: &Value, errors: &mut ErrorList) {
        workload::validate_replica_status(new.at("status"), errors);
    }

    fn selectable_fields(&self, obj: &Value) -> Vec<(&'static str, String)> {
        workload::selectable_replicas(obj)
    }

    fn warnings(&self, new: &Value, old: Option<&Value>) -> Vec<String> {
        workload::name_and_template_warnings(new, old)
    }
}
