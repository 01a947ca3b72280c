//! Deployment: REST strategy and validation.

use serde_json::Value;

use super::workload;
use crate::core::pod::rules::{non_negative, validate_immutable};
use crate::field::{ErrorList, Path};
use crate::json::JsonExt;
use crate::meta::semantic_equal;
use crate::strategy::RestStrategy;

pub struct Deployment;

impl RestStrategy for Deployment {
    fn prepare_for_create(&self, new: &mut Value) {
        workload::prepare_template(new, &["spec", "template"]);
    }

    fn prepare_for_update(&self, new: &mut Value, old: &Value) {
        workload::prepare_template(new, &["spec", "template"]);
        // The controller copies annotations to ReplicaSets, so changed annotations increase the
        // generation, too.
        if !semantic_equal(new.path("metadata.annotations"), old.path("metadata.annotations"))
            && let Some(generation) = old.path("metadata.generation").as_i64()
        {
            new.object_mut("metadata").insert("generation".to_owned(), generation.saturating_add(1).into());
        }
    }

    fn validate(&self, obj: &Value, errors: &mut ErrorList) {
        let (spec, path) = (obj.at("spec"), Path::new("spec"));
        non_negative(errors, spec, &path, "replicas");
        workload::validate_selector(spec, &path, "deployment", errors);
        if workload::validate_selector_matches_template(spec, &path, "invalid label selector", errors) {
            workload::validate_template(spec, &path, "ReplicaSet", errors);
        }
        validate_strategy(spec.at("strategy"), &path.child("strategy"), errors);
        for field in ["minReadySeconds", "revisionHistoryLimit", "progressDeadlineSeconds"] {
            non_negative(errors, spec, &path, field);
        }
        if let Some(deadline) = spec.int("progressDeadlineSeconds")
            && deadline <= spec.int("minReadySeconds").unwrap_or(0)
        {
            let at = path.child("progressDeadlineSeconds");
            errors.invalid(&at, deadline, "must be greater than minReadySeconds");
        }
    }

    fn validate_update(&self, new: &Value, old: &Value, errors: &mut ErrorList) {
        let field = "spec.selector";
        validate_immutable(errors, &Path::new(field), new.path(field), old.path(field));
    }

    fn validate_status_update(&self, new: &Value, old: &Value, errors: &mut ErrorList) {
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
        workload::validate_counts(new.at("status"), COUNTS, PARTS, errors);
        workload::validate_collision_count(new, old, errors);
    }

    fn warnings(&self, new: &Value, old: Option<&Value>) -> Vec<String> {
        workload::name_and_template_warnings(new, old)
    }
}

fn validate_strategy(strategy: &Value, path: &Path, e: &mut ErrorList) {
    let (rollout, at) = (strategy.at("rollingUpdate"), path.child("rollingUpdate"));
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
            workload::validate_count_or_percent(rollout, &at, "maxUnavailable", e);
            workload::validate_count_or_percent(rollout, &at, "maxSurge", e);
            let number = |field| workload::int_value(rollout, field);
            if number("maxUnavailable") == 0 && number("maxSurge") == 0 {
                let value = rollout.at("maxUnavailable").clone();
                e.invalid(&at.child("maxUnavailable"), value, "may not be 0 when `maxSurge` is 0");
            }
            workload::validate_max_100_percent(rollout, &at, "maxUnavailable", e);
        }
        _ => workload::unsupported(e, path, &render_strategy(strategy), "\"Recreate\", \"RollingUpdate\""),
    }
}

/// The strategy of a Deployment or DaemonSet as upstream prints its internal type.
pub(super) fn render_strategy(strategy: &Value) -> String {
    let rollout = strategy.at("rollingUpdate");
    let rollout = if rollout.is_null() {
        "null".to_owned()
    } else {
        let number = |field| workload::render_number(rollout.at(field));
        format!("{{\"MaxUnavailable\":{},\"MaxSurge\":{}}}", number("maxUnavailable"), number("maxSurge"))
    };
    format!("{{\"Type\":{},\"RollingUpdate\":{rollout}}}", crate::field::quote(strategy.text("type")))
}
