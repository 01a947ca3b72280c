//! ReplicationController: REST strategy and validation.

use serde_json::Value;

use crate::apps::workload;
use crate::core::pod::rules::non_negative;
use crate::field::{ErrorList, Path};
use crate::json::JsonExt;
use crate::selector::LabelSelector;
use crate::strategy::RestStrategy;

pub struct ReplicationController;

impl RestStrategy for ReplicationController {
    fn prepare(&self, new: &mut Value) {
        workload::prepare_template(new, &["spec", "template"]);
    }

    fn validate(&self, obj: &Value, errors: &mut ErrorList) {
        let (spec, path) = (obj.at("spec"), Path::new("spec"));
        non_negative(errors, spec, &path, "minReadySeconds");
        let empty = spec.entries("selector").next().is_none();
        if empty {
            errors.required(&path.child("selector"), "");
        }
        if !spec.has("replicas") {
            errors.required(&path.child("replicas"), "");
        }
        non_negative(errors, spec, &path, "replicas");
        if !spec.has("template") {
            return errors.required(&path.child("template"), "");
        }
        if !empty {
            workload::validate_template_labels(
                &LabelSelector::from_set(spec.at("selector")),
                spec,
                &path,
                errors,
            );
        }
        workload::validate_template(spec, &path, "ReplicationController", errors);
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
