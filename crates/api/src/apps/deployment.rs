//! Deployment: what is special about it.

use serde_json::Value;

use super::workload;
use crate::core::pod::rules::{immutable, non_negative};
use crate::field::{Errors, Path};
use crate::json::Json;
use crate::kind::Kind;
use crate::meta::same;

pub struct Deployment;

impl Kind for Deployment {
    fn prepare_create(&self, new: &mut Value) {
        workload::prepare_template(new, &["spec", "template"]);
    }

    fn prepare_update(&self, new: &mut Value, old: &Value) {
        workload::prepare_template(new, &["spec", "template"]);
        // Annotations are handed on to ReplicaSets, so a change of them counts as one of the spec would.
        if !same(new.path("metadata.annotations"), old.path("metadata.annotations"))
            && let Some(generation) = old.path("metadata.generation").as_i64()
        {
            new.object_mut("metadata").insert("generation".to_owned(), generation.saturating_add(1).into());
        }
    }

    fn validate(&self, obj: &Value, errors: &mut Errors) {
        let (spec, path) = (obj.at("spec"), Path::new("spec"));
        non_negative(errors, spec, &path, "replicas");
        workload::selector(spec, &path, "deployment", errors);
        if workload::selects_template(spec, &path, "invalid label selector", errors) {
            workload::replicated_template(spec, &path, "ReplicaSet", errors);
        }
        strategy(spec.at("strategy"), &path.at("strategy"), errors);
        for field in ["minReadySeconds", "revisionHistoryLimit", "progressDeadlineSeconds"] {
            non_negative(errors, spec, &path, field);
        }
        if let Some(deadline) = spec.int("progressDeadlineSeconds")
            && deadline <= spec.int("minReadySeconds").unwrap_or(0)
        {
            let at = path.at("progressDeadlineSeconds");
            errors.invalid(&at, deadline, "must be greater than minReadySeconds");
        }
    }

    fn validate_update(&self, new: &Value, old: &Value, errors: &mut Errors) {
        let field = "spec.selector";
        immutable(errors, &Path::new(field), new.path(field), old.path(field));
    }

    fn validate_status(&self, new: &Value, old: &Value, errors: &mut Errors) {
        const COUNTS: &[&str] = &[
            "observedGeneration",
            "replicas",
            "updatedReplicas",
            "readyReplicas",
            "availableReplicas",
            "unavailableReplicas",
            "terminatingReplicas",
            "collisionCount",
        ];
        const PARTS: &[(&str, &str, &str)] = &[
            ("updatedReplicas", "replicas", "cannot be greater than status.replicas"),
            ("readyReplicas", "replicas", "cannot be greater than status.replicas"),
            ("availableReplicas", "replicas", "cannot be greater than status.replicas"),
            ("availableReplicas", "readyReplicas", "cannot be greater than readyReplicas"),
        ];
        workload::counts(new.at("status"), COUNTS, PARTS, errors);
        workload::collisions(new, old, errors);
    }

    fn warnings(&self, new: &Value, old: Option<&Value>) -> Vec<String> {
        workload::name_and_template_warnings(new, old)
    }
}

fn strategy(strategy: &Value, path: &Path, e: &mut Errors) {
    let (rollout, at) = (strategy.at("rollingUpdate"), path.at("rollingUpdate"));
    match strategy.text("type") {
        "Recreate" => {
            if !rollout.is_null() {
                e.forbidden(&at, "may not be specified when strategy `type` is 'Recreate'");
            }
        }
        "RollingUpdate" if rollout.is_null() => {
            e.required(&at, "this should be defaulted and never be nil");
        }
        "RollingUpdate" => {
            workload::count_or_percent(rollout, &at, "maxUnavailable", e);
            workload::count_or_percent(rollout, &at, "maxSurge", e);
            let number = |field| workload::plain_number(rollout, field);
            if number("maxUnavailable") == 0 && number("maxSurge") == 0 {
                let value = rollout.at("maxUnavailable").clone();
                e.invalid(&at.at("maxUnavailable"), value, "may not be 0 when `maxSurge` is 0");
            }
            workload::at_most_whole(rollout, &at, "maxUnavailable", e);
        }
        _ => workload::unsupported(e, path, &shown_strategy(strategy), "\"Recreate\", \"RollingUpdate\""),
    }
}

/// A strategy of a Deployment or DaemonSet in upstream's internal form.
pub(super) fn shown_strategy(strategy: &Value) -> String {
    let rollout = strategy.at("rollingUpdate");
    let rollout = if rollout.is_null() {
        "null".to_owned()
    } else {
        let number = |field| workload::shown_number(rollout.at(field));
        format!("{{\"MaxUnavailable\":{},\"MaxSurge\":{}}}", number("maxUnavailable"), number("maxSurge"))
    };
    format!("{{\"Type\":{},\"RollingUpdate\":{rollout}}}", crate::field::quoted(strategy.text("type")))
}
