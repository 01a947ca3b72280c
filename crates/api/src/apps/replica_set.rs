//! ReplicaSet: what is special about it.

use serde_json::Value;

use super::workload;
use crate::core::pod::rules::{immutable, non_negative};
use crate::field::{Errors, Path};
use crate::json::Json;
use crate::kind::Kind;

pub struct ReplicaSet;

impl Kind for ReplicaSet {
    fn prepare(&self, new: &mut Value) {
        workload::prepare_template(new, &["spec", "template"]);
    }

    fn validate(&self, obj: &Value, errors: &mut Errors) {
        let (spec, path) = (obj.at("spec"), Path::new("spec"));
        non_negative(errors, spec, &path, "replicas");
        non_negative(errors, spec, &path, "minReadySeconds");
        workload::selector(spec, &path, "deployment", errors);
        if workload::selects_template(spec, &path, "invalid label selector", errors) {
            workload::replicated_template(spec, &path, "ReplicaSet", errors);
        }
    }

    fn validate_update(&self, new: &Value, old: &Value, errors: &mut Errors) {
        let field = "spec.selector";
        immutable(errors, &Path::new(field), new.path(field), old.path(field));
    }

    fn validate_status(&self, new: &Value, _old: &Value, errors: &mut Errors) {
        workload::replica_status(new.at("status"), errors);
    }

    fn selectable(&self, obj: &Value) -> Vec<(&'static str, String)> {
        workload::selectable_replicas(obj)
    }

    fn warnings(&self, new: &Value, old: Option<&Value>) -> Vec<String> {
        workload::name_and_template_warnings(new, old)
    }
}
