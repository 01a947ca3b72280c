//! DaemonSet: REST strategy and validation.

use serde_json::Value;

use super::deployment::render_strategy;
use super::workload;
use crate::core::pod::internal;
use crate::core::pod::rules::{invalid_as, non_negative, validate_immutable};
use crate::core::pod::template::{validate_long_running, validate_pod_template_spec};
use crate::core::pod::warnings;
use crate::field::{ErrorList, Path};
use crate::json::JsonExt;
use crate::meta::{self, SelectorOptions, semantic_equal};
use crate::selector::LabelSelector;
use crate::strategy::RestStrategy;

/// Counts template changes. In `apps/v1` the former field is this annotation.
const TEMPLATE_GENERATION: &str = "deprecated.daemonset.template.generation";

pub struct DaemonSet;

impl RestStrategy for DaemonSet {
    fn prepare_for_create(&self, new: &mut Value) {
        workload::prepare_template(new, &["spec", "template"]);
        let generation = template_generation(new).max(1);
        set_template_generation(new, generation);
    }

    fn prepare_for_update(&self, new: &mut Value, old: &Value) {
        workload::prepare_template(new, &["spec", "template"]);
        let changed = !internal::semantic_equal(
            "PodTemplateSpec",
            new.path("spec.template"),
            old.path("spec.template"),
        );
        set_template_generation(new, template_generation(old).saturating_add(i64::from(changed)));
    }

    fn validate(&self, obj: &Value, errors: &mut ErrorList) {
        let (spec, path) = (obj.at("spec"), Path::new("spec"));
        let selector = spec.at("selector");
        meta::validate_label_selector(selector, &path.child("selector"), SelectorOptions::default(), errors);
        if let Ok(parsed) = LabelSelector::from_value(selector) {
            workload::validate_template_labels(&parsed, spec, &path, errors);
        }
        if !selector.is_null() && workload::is_empty(selector) {
            invalid_as(errors, &path.child("selector"), "{}", "empty selector is invalid for daemonset");
        }
        let (template, at) = (spec.at("template"), path.child("template"));
        validate_pod_template_spec(template, &at, errors);
        validate_long_running(template, &at, "DaemonSet", errors);
        non_negative(errors, spec, &path, "minReadySeconds");
        update_strategy(spec.at("updateStrategy"), &path.child("updateStrategy"), errors);
        non_negative(errors, spec, &path, "revisionHistoryLimit");
    }

    fn validate_update(&self, new: &Value, old: &Value, errors: &mut ErrorList) {
        let field = "spec.selector";
        validate_immutable(errors, &Path::new(field), new.path(field), old.path(field));
    }

    fn validate_status_update(&self, new: &Value, old: &Value, errors: &mut ErrorList) {
        const COUNTS: &[&str] = &[
            "currentNumberScheduled",
            "numberMisscheduled",
            "desiredNumberScheduled",
            "numberReady",
            "observedGeneration",
            "updatedNumberScheduled",
            "numberAvailable",
            "numberUnavailable",
            "collisionCount",
        ];
        workload::validate_counts(new.at("status"), COUNTS, &[], errors);
        workload::validate_collision_count(new, old, errors);
    }

    fn warnings(&self, new: &Value, old: Option<&Value>) -> Vec<String> {
        let template = new.path("spec.template");
        if old.is_some_and(|old| semantic_equal(old.path("spec.template"), template)) {
            return Vec::new();
        }
        warnings::for_template(template, &Path::new("spec.template"))
    }
}

fn template_generation(object: &Value) -> i64 {
    let annotations = object.path("metadata.annotations");
    annotations
        .get(TEMPLATE_GENERATION)
        .and_then(Value::as_str)
        .and_then(|text| text.parse().ok())
        .unwrap_or(0)
}

fn set_template_generation(object: &mut Value, generation: i64) {
    if let Some(metadata) = object.get_mut("metadata") {
        metadata
            .object_mut("annotations")
            .insert(TEMPLATE_GENERATION.to_owned(), Value::String(generation.to_string()));
    }
}

fn update_strategy(strategy: &Value, path: &Path, e: &mut ErrorList) {
    let (rollout, at) = (strategy.at("rollingUpdate"), path.child("rollingUpdate"));
    match strategy.text("type") {
        "OnDelete" => {}
        "RollingUpdate" if rollout.is_null() => e.required(&at, ""),
        "RollingUpdate" => {
            const FIELDS: [&str; 2] = ["maxUnavailable", "maxSurge"];
            for field in FIELDS {
                workload::validate_count_or_percent(rollout, &at, field, e);
            }
            for field in FIELDS {
                workload::validate_max_100_percent(rollout, &at, field, e);
            }
            match FIELDS.map(|field| workload::int_value(rollout, field) != 0) {
                [true, true] => {
                    let message = "may not be set when maxUnavailable is non-zero";
                    e.invalid(&at.child("maxSurge"), rollout.at("maxSurge").clone(), message);
                }
                [false, false] => e.required(&at.child("maxUnavailable"), "cannot be 0 when maxSurge is 0"),
                _ => {}
            }
        }
        _ => workload::unsupported(e, path, &render_strategy(strategy), "\"RollingUpdate\", \"OnDelete\""),
    }
}
