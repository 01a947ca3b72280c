//! StatefulSet: REST strategy and validation.

use std::collections::BTreeSet;

use serde_json::{Value, json};

use super::workload;
use crate::core::pod::rules::{invalid_as, non_negative, validate_label};
use crate::core::pod::template::{
    validate_long_running, validate_pod_annotations, validate_pod_template_spec,
};
use crate::core::pod::{validate_claim_spec, warnings};
use crate::field::{ErrorList, Path, quote};
use crate::json::JsonExt;
use crate::meta::{self, semantic_equal};
use crate::strategy::{NameFormat, RestStrategy};

pub struct StatefulSet;

impl RestStrategy for StatefulSet {
    fn prepare_for_create(&self, new: &mut Value) {
        drop_max_unavailable(new);
        workload::prepare_template(new, &["spec", "template"]);
    }

    fn prepare_for_update(&self, new: &mut Value, _old: &Value) {
        self.prepare_for_create(new);
    }

    fn name_format(&self) -> NameFormat {
        NameFormat::Label
    }

    fn validate(&self, obj: &Value, errors: &mut ErrorList) {
        let (spec, path) = (obj.at("spec"), Path::new("spec"));
        match spec.text("podManagementPolicy") {
            "" => errors.required(&path.child("podManagementPolicy"), ""),
            "OrderedReady" | "Parallel" => {}
            other => {
                errors.invalid(
                    &path.child("podManagementPolicy"),
                    other,
                    "must be 'OrderedReady' or 'Parallel'",
                );
            }
        }
        update_strategy(spec.at("updateStrategy"), &path.child("updateStrategy"), errors);
        retention(spec.at("persistentVolumeClaimRetentionPolicy"), &path, errors);
        for (i, claim) in spec.items("volumeClaimTemplates").iter().enumerate() {
            validate_claim_spec(
                errors,
                claim.at("spec"),
                &path.child("volumeClaimTemplates").index(i).child("spec"),
            );
        }
        non_negative(errors, spec, &path, "replicas");
        non_negative(errors, spec, &path, "minReadySeconds");
        non_negative(errors, spec.at("ordinals"), &path.child("ordinals"), "start");
        if !spec.text("serviceName").is_empty() {
            validate_label(errors, &path.child("serviceName"), spec.text("serviceName"));
        }
        workload::validate_selector(spec, &path, "statefulset", errors);
        if workload::validate_selector_matches_template(spec, &path, "", errors) {
            template(spec, &path.child("template"), errors);
        }
        validate_long_running(spec.at("template"), &path.child("template"), "StatefulSet", errors);
    }

    fn validate_update(&self, new: &Value, old: &Value, errors: &mut ErrorList) {
        const MUTABLE: &[&str] = &[
            "replicas",
            "template",
            "updateStrategy",
            "minReadySeconds",
            "ordinals",
            "revisionHistoryLimit",
            "persistentVolumeClaimRetentionPolicy",
        ];
        let fixed = |object: &Value| {
            let mut spec = object.at("spec").as_object().cloned().unwrap_or_default();
            spec.retain(|field, value| !MUTABLE.contains(&field.as_str()) && value != "");
            Value::Object(spec)
        };
        if !semantic_equal(&fixed(new), &fixed(old)) {
            errors.forbidden(
                &Path::new("spec"),
                "updates to statefulset spec for fields other than 'replicas', 'ordinals', 'template', 'updateStrategy', 'revisionHistoryLimit', 'persistentVolumeClaimRetentionPolicy' and 'minReadySeconds' are forbidden",
            );
        }
    }

    fn validate_status_update(&self, new: &Value, old: &Value, errors: &mut ErrorList) {
        const COUNTS: &[&str] = &[
            "replicas",
            "readyReplicas",
            "currentReplicas",
            "updatedReplicas",
            "availableReplicas",
            "observedGeneration",
            "collisionCount",
        ];
        const PARTS: &[(&str, &str, &str)] = &[
            ("readyReplicas", "replicas", "cannot be greater than status.replicas"),
            ("currentReplicas", "replicas", "cannot be greater than status.replicas"),
            ("updatedReplicas", "replicas", "cannot be greater than status.replicas"),
            ("availableReplicas", "replicas", "cannot be greater than status.replicas"),
            ("availableReplicas", "readyReplicas", "cannot be greater than status.readyReplicas"),
        ];
        workload::validate_counts(new.at("status"), COUNTS, PARTS, errors);
        workload::validate_collision_count(new, old, errors);
    }

    fn warnings(&self, new: &Value, old: Option<&Value>) -> Vec<String> {
        let mut found = workload::template_warnings(new, old);
        for (i, claim) in new.at("spec").items("volumeClaimTemplates").iter().enumerate() {
            let at = Path::new("spec.volumeClaimTemplates").index(i);
            // Upstream's path differs between create and update.
            let at = if old.is_some() { at.child("Spec") } else { at };
            found.extend(warnings::for_claim(claim.at("spec"), &at));
        }
        if new.at("spec").int("revisionHistoryLimit").is_some_and(|limit| limit < 0) {
            found.push(
                "spec.revisionHistoryLimit: a negative value retains all historical revisions; a value >= 0 is recommended"
                    .to_owned(),
            );
        }
        found
    }
}

/// Drops the field of the `MaxUnavailableStatefulSet` feature, which is off by default.
fn drop_max_unavailable(object: &mut Value) {
    let rollout = object.pointer_mut("/spec/updateStrategy/rollingUpdate").and_then(Value::as_object_mut);
    if let Some(rollout) = rollout {
        rollout.remove("maxUnavailable");
    }
}

fn update_strategy(strategy: &Value, path: &Path, e: &mut ErrorList) {
    let rollout = strategy.at("rollingUpdate");
    let rendered = || {
        let partition = workload::render_number(rollout.at("partition"));
        format!("{{\"Partition\":{partition},\"MaxUnavailable\":{}}}", rollout.at("maxUnavailable"))
    };
    match strategy.text("type") {
        "" => e.required(path, ""),
        "OnDelete" => {
            if !rollout.is_null() {
                let message = "only allowed for updateStrategy 'RollingUpdate'";
                invalid_as(e, &path.child("rollingUpdate"), &rendered(), message);
            }
        }
        "RollingUpdate" => non_negative(e, rollout, &path.child("rollingUpdate"), "partition"),
        other => {
            let rollout = if rollout.is_null() { "null".to_owned() } else { rendered() };
            let rendered = format!("{{\"Type\":{},\"RollingUpdate\":{rollout}}}", quote(other));
            invalid_as(e, path, &rendered, "must be 'RollingUpdate' or 'OnDelete'");
        }
    }
}

fn retention(policy: &Value, path: &Path, e: &mut ErrorList) {
    if policy.is_null() {
        return;
    }
    let at = path.child("persistentVolumeClaimRetentionPolicy");
    for field in ["whenDeleted", "whenScaled"] {
        let value = policy.text(field);
        if !["Retain", "Delete"].contains(&value) {
            e.not_supported(&at.child(field), value, &["Retain", "Delete"]);
        }
    }
}

/// Validates the template like the pods created from it: with a volume for each claim template, and
/// without the host name, which is set for each pod.
fn template(spec: &Value, path: &Path, e: &mut ErrorList) {
    let mut template = spec.at("template").clone();
    let claims: BTreeSet<&str> =
        spec.items("volumeClaimTemplates").iter().map(|claim| claim.at("metadata").text("name")).collect();
    if let Some(pod) = template.get_mut("spec").and_then(Value::as_object_mut) {
        pod.remove("hostname");
        pod.remove("subdomain");
        if !claims.is_empty() {
            let volume = |claim: &&str| json!({"name": claim, "persistentVolumeClaim": {"claimName": claim}});
            let mut volumes: Vec<Value> = claims.iter().map(volume).collect();
            let own = pod.get("volumes").and_then(Value::as_array).into_iter().flatten();
            volumes.extend(own.filter(|volume| !claims.contains(volume.text("name"))).cloned());
            pod.insert("volumes".to_owned(), Value::Array(volumes));
        }
    }
    validate_pod_template_spec(&template, path, e);
    // Upstream validates these twice. Duplicate errors are removed from the message.
    let metadata = template.at("metadata");
    meta::validate_labels(metadata.at("labels"), &path.child("labels"), e);
    meta::validate_annotations(metadata.at("annotations"), &path.child("annotations"), e);
    validate_pod_annotations(e, metadata, template.at("spec"), &path.child("annotations"));
}
