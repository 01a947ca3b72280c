//! Templates of pods, as workloads carry them.

use serde_json::Value;

use super::rules::{MIRROR, annotation};
use super::spec::{Options, validate_pod_spec};
use super::{affinity, security};
use crate::field::{Errors, Path};
use crate::json::Json;
use crate::{meta, names};

/// Checks a `PodTemplateSpec`.
pub fn validate_pod_template_spec(template: &Value, path: &Path, e: &mut Errors) {
    let (metadata, spec, at) = (template.at("metadata"), template.at("spec"), path.at("spec"));
    // Upstream leaves `metadata` out of these three paths.
    meta::labels(metadata.at("labels"), &path.at("labels"), e);
    meta::annotations(metadata.at("annotations"), &path.at("annotations"), e);
    pod_annotations(e, metadata, spec, &path.at("annotations"));
    validate_pod_spec(spec, None, &at, Options::default(), e);
    security::annotations_match_fields(e, metadata, spec, &at);
    if !spec.items("ephemeralContainers").is_empty() {
        e.forbidden(&at.at("ephemeralContainers"), "ephemeral containers not allowed in pod template");
    }
}

/// The pods of a workload that keeps them running restart always and have no deadline.
pub(crate) fn keeps_running(template: &Value, path: &Path, kind: &str, e: &mut Errors) {
    let (spec, at) = (template.at("spec"), path.at("spec"));
    let policy = spec.text("restartPolicy");
    if policy != "Always" {
        e.not_supported(&at.at("restartPolicy"), policy, &["Always"]);
    }
    if spec.has("activeDeadlineSeconds") {
        let words = format!("activeDeadlineSeconds in {kind} is not Supported");
        e.forbidden(&at.at("activeDeadlineSeconds"), &words);
    }
}

/// Annotations that mean something to a pod.
pub(crate) fn pod_annotations(e: &mut Errors, metadata: &Value, spec: &Value, path: &Path) {
    if let Some(mirror) = annotation(metadata, MIRROR)
        && spec.text("nodeName").is_empty()
    {
        e.invalid(&path.key(MIRROR), mirror, "must set spec.nodeName if mirror pod annotation is set");
    }
    if let Some(noted) = annotation(metadata, TOLERATIONS).filter(|noted| !noted.is_empty()) {
        match serde_json::from_str::<Vec<Value>>(noted) {
            Err(error) => e.invalid(path, TOLERATIONS, &error.to_string()),
            Ok(noted) => affinity::tolerations(e, &noted, &path.at(TOLERATIONS)),
        }
    }
    if let Some(cost) = annotation(metadata, DELETION_COST)
        && !is_cost(cost)
    {
        e.invalid(&path.key(DELETION_COST), cost, "must be a 32bit integer");
    }
    security::annotations(e, metadata, spec, path);
}

const TOLERATIONS: &str = "scheduler.alpha.kubernetes.io/tolerations";
const DELETION_COST: &str = "controller.kubernetes.io/pod-deletion-cost";

/// No leading plus or zero, so that there is one way to write each number.
fn is_cost(text: &str) -> bool {
    let first = text.bytes().next();
    text.parse::<i32>().is_ok() && first != Some(b'+') && (first != Some(b'0') || text.len() == 1)
}

/// A name that ends up in the names of pods had better be a label.
pub(crate) fn name_warning(object: &Value, used: &str) -> Option<String> {
    let messages = names::dns1123_label(object.at("metadata").text("name"));
    (!messages.is_empty()).then(|| {
        format!(
            "metadata.name: this is used in {used}, which can result in surprising behavior; a DNS label is recommended: [{}]",
            messages.join(" ")
        )
    })
}
