//! ReplicationController: what is special about it.

use serde_json::Value;

use crate::apps::workload;
use crate::core::pod::rules::non_negative;
use crate::field::{Errors, Path};
use crate::json::Json;
use crate::kind::Kind;
use crate::selector::LabelSelector;

pub struct ReplicationController;

impl Kind for ReplicationController {
    fn prepare(&self, new: &mut Value) {
        workload::prepare_template(new, &["spec", "template"]);
    }

    fn validate(&self, obj: &Value, errors: &mut Errors) {
        let (spec, path) = (obj.at("spec"), Path::new("spec"));
        non_negative(errors, spec, &path, "minReadySeconds");
        let empty = spec.entries("selector").next().is_none();
        if empty {
            errors.required(&path.at("selector"), "");
        }
        if !spec.has("replicas") {
            errors.required(&path.at("replicas"), "");
        }
        non_negative(errors, spec, &path, "replicas");
        if !spec.has("template") {
            return errors.required(&path.at("template"), "");
        }
        if !empty {
            workload::mismatch(&LabelSelector::from_set(spec.at("selector")), spec, &path, errors);
        }
        workload::replicated_template(spec, &path, "ReplicationController", errors);
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
