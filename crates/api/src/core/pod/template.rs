//! Validates pod templates of workloads.

use serde_json::Value;

use super::rules::{MIRROR_ANNOTATION, annotation};
use super::spec::{PodValidationOptions, validate_pod_spec};
use super::{affinity, security};
use crate::field::{ErrorList, Path};
use crate::json::JsonExt;
use crate::{meta, names};

/// Validates a `PodTemplateSpec`.
pub fn validate_pod_template_spec(template: &Value, path: &Path, e: &mut ErrorList) {
    let (metadata, spec, at) = (template.at("metadata"), template.at("spec"), path.child("spec"));
    // Upstream's paths omit `metadata` in these three cases.
    meta::validate_labels(metadata.at("labels"), &path.child("labels"), e);
    meta::validate_annotations(metadata.at("annotations"), &path.child("annotations"), e);
    validate_pod_annotations(e, metadata, spec, &path.child("annotations"));
    validate_pod_spec(spec, None, &at, PodValidationOptions::default(), e);
    security::validate_annotations_match_fields(e, metadata, spec, &at);
    if !spec.items("ephemeralContainers").is_empty() {
        e.forbidden(&at.child("ephemeralContainers"), "ephemeral containers not allowed in pod template");
    }
}

/// Pods of continuously running workloads must have restart policy `Always` and no active deadline.
pub(crate) fn validate_long_running(template: &Value, path: &Path, kind: &str, e: &mut ErrorList) {
    let (spec, at) = (template.at("spec"), path.child("spec"));
    let policy = spec.text("restartPolicy");
    if policy != "Always" {
        e.not_supported(&at.child("restartPolicy"), policy, &["Always"]);
    }
    if spec.has("activeDeadlineSeconds") {
        let message = format!("activeDeadlineSeconds in {kind} is not Supported");
        e.forbidden(&at.child("activeDeadlineSeconds"), &message);
    }
}

/// Validates annotations with a meaning for pods.
pub(crate) fn validate_pod_annotations(e: &mut ErrorList, metadata: &Value, spec: &Value, path: &Path) {
    if let Some(mirror) = annotation(metadata, MIRROR_ANNOTATION)
        && spec.text("nodeName").is_empty()
    {
        e.invalid(
            &path.key(MIRROR_ANNOTATION),
            mirror,
            "must set spec.nodeName if mirror pod annotation is set",
        );
    }
    if let Some(tolerations) =
        annotation(metadata, TOLERATIONS_ANNOTATION).filter(|tolerations| !tolerations.is_empty())
    {
        match serde_json::from_str::<Vec<Value>>(tolerations) {
            Err(error) => e.invalid(path, TOLERATIONS_ANNOTATION, &error.to_string()),
            Ok(tolerations) => {
                affinity::validate_tolerations(e, &tolerations, &path.child(TOLERATIONS_ANNOTATION))
            }
        }
    }
    if let Some(cost) = annotation(metadata, DELETION_COST_ANNOTATION)
        && !is_deletion_cost(cost)
    {
        e.invalid(&path.key(DELETION_COST_ANNOTATION), cost, "must be a 32bit integer");
    }
    security::validate_annotations(e, metadata, spec, path);
}

const TOLERATIONS_ANNOTATION: &str = "scheduler.alpha.kubernetes.io/tolerations";
const DELETION_COST_ANNOTATION: &str = "controller.kubernetes.io/pod-deletion-cost";

/// A leading plus sign or zero is rejected, so that each number has a single form.
fn is_deletion_cost(text: &str) -> bool {
    let first = text.bytes().next();
    text.parse::<i32>().is_ok() && first != Some(b'+') && (first != Some(b'0') || text.len() == 1)
}

/// Warns about names that are part of pod names and are not DNS labels.
pub(crate) fn name_warning(object: &Value, used: &str) -> Option<String> {
    let messages = names::dns1123_label(object.at("metadata").text("name"));
    (!messages.is_empty()).then(|| {
        format!(
            "metadata.name: this is used in {used}, which can result in surprising behavior; a DNS label is recommended: [{}]",
            messages.join(" ")
        )
    })
}
