//! ReplicaSet: what is special about it.

use serde_json::Value;

use super::workload;
use crate::core::pod::rules::{immutable, non_negative};
use crate::core::pod::template::name_warning;
use crate::field::{Errors, Path};
use crate::json::Json;
use crate::kind::Kind;

pub struct ReplicaSet;

impl Kind for ReplicaSet {
    fn prepare_create(&self, new: &mut Value) {
        workload::prepare_template(new, &["spec", "template"]);
    }

    fn prepare_update(&self, new: &mut Value, _old: &Value) {
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
        workload::counts(new.at("status"), REPLICA_COUNTS, REPLICA_PARTS, errors);
    }

    fn selectable(&self, obj: &Value) -> Vec<(&'static str, String)> {
        vec![("status.replicas", obj.at("status").int("replicas").unwrap_or(0).to_string())]
    }

    fn warnings(&self, new: &Value, old: Option<&Value>) -> Vec<String> {
        let name = if old.is_none() { name_warning(new, "Pod names and hostnames") } else { None };
        name.into_iter().chain(workload::template_warnings(new, old)).collect()
    }
}

/// Also a ReplicationController's, which has no terminating ones.
pub(crate) const REPLICA_COUNTS: &[&str] = &[
    "replicas",
    "fullyLabeledReplicas",
    "readyReplicas",
    "availableReplicas",
    "observedGeneration",
    "terminatingReplicas",
];

pub(crate) const REPLICA_PARTS: &[(&str, &str, &str)] = &[
    ("fullyLabeledReplicas", "replicas", "cannot be greater than status.replicas"),
    ("readyReplicas", "replicas", "cannot be greater than status.replicas"),
    ("availableReplicas", "replicas", "cannot be greater than status.replicas"),
    ("availableReplicas", "readyReplicas", "cannot be greater than readyReplicas"),
];
