//! Pod: REST strategy, and the validation of pod specs that all workloads share.
//!
//! Start with [`spec::validate_pod_spec`]; each part of a spec has its own submodule.

mod affinity;
mod containers;
mod diff;
mod env;
pub(crate) mod internal;
mod prepare;
mod probes;
mod projected;
#[cfg(test)]
mod property_tests;
mod qos;
pub(crate) mod resources;
pub(crate) mod rules;
mod security;
mod spec;
mod status;
pub(crate) mod template;
#[cfg(test)]
pub(crate) mod tests;
mod update;
mod volume_overlap;
mod volumes;
pub(crate) mod warnings;
mod windows;

use serde_json::Value;

use crate::field::{ErrorList, Path};
use crate::json::JsonExt;
use crate::strategy::RestStrategy;

pub(crate) use affinity::{validate_node_selector, validate_tolerations};
pub(crate) use diff::diff_json;
pub(crate) use prepare::drop_disabled_fields;
pub use qos::qos_class;
pub use spec::{PodValidationOptions, validate_pod_spec};
pub use status::should_restart;
pub use template::validate_pod_template_spec;
pub use update::{
    prepare_ephemeral_containers_update, prepare_resize, validate_ephemeral_containers_update,
    validate_resize,
};
pub(crate) use volumes::validate_claim_spec;

pub struct Pod;

impl RestStrategy for Pod {
    fn prepare_for_create(&self, new: &mut Value) {
        prepare::prepare_for_create(new);
    }

    fn prepare_for_update(&self, new: &mut Value, _old: &Value) {
        if let Some(spec) = new.get_mut("spec") {
            drop_disabled_fields(spec);
        }
    }

    fn prepare_for_status_update(&self, new: &mut Value, old: &Value) {
        status::prepare_status(new, old);
    }

    fn validate(&self, obj: &Value, errors: &mut ErrorList) {
        let (metadata, spec, path) = (obj.at("metadata"), obj.at("spec"), Path::new("spec"));
        template::validate_pod_annotations(errors, metadata, spec, &Path::new("metadata.annotations"));
        validate_pod_spec(spec, Some(metadata), &path, PodValidationOptions { is_pod: true }, errors);
        if spec.text("serviceAccountName").is_empty() {
            forbid_tokens_without_service_account(spec, &path, errors);
        }
        for list in ["containers", "initContainers"] {
            for (i, container) in spec.items(list).iter().enumerate() {
                containers::validate_image(errors, container, &path.child(list).index(i));
            }
        }
    }

    fn validate_create(&self, new: &Value, errors: &mut ErrorList) {
        let (metadata, spec, path) = (new.at("metadata"), new.at("spec"), Path::new("spec"));
        if !spec.items("ephemeralContainers").is_empty() {
            errors.forbidden(&path.child("ephemeralContainers"), "cannot be set on create");
        }
        if !spec.text("nodeName").is_empty() && !spec.items("schedulingGates").is_empty() {
            let message = "cannot be set until all schedulingGates have been cleared";
            errors.forbidden(&path.child("nodeName"), message);
        }
        security::validate_annotations_match_fields(errors, metadata, spec, &path);
    }

    fn validate_update(&self, new: &Value, old: &Value, errors: &mut ErrorList) {
        update::validate_update(errors, new, old);
    }

    fn validate_status_update(&self, new: &Value, old: &Value, errors: &mut ErrorList) {
        status::validate_status(errors, new, old);
    }

    fn warnings(&self, new: &Value, old: Option<&Value>) -> Vec<String> {
        if old.is_some() {
            return Vec::new();
        }
        template::name_warning(new, "the Pod's hostname").into_iter().chain(warnings::for_pod(new)).collect()
    }

    fn selectable_fields(&self, obj: &Value) -> Vec<(&'static str, String)> {
        let (spec, status) = (obj.at("spec"), obj.at("status"));
        let ip = status.items("podIPs").first().map_or("", |first| first.text("ip"));
        vec![
            ("spec.nodeName", spec.text("nodeName").to_owned()),
            ("spec.restartPolicy", spec.text("restartPolicy").to_owned()),
            ("spec.schedulerName", spec.text("schedulerName").to_owned()),
            ("spec.serviceAccountName", spec.text("serviceAccountName").to_owned()),
            ("spec.hostNetwork", spec.flag("hostNetwork").to_string()),
            ("status.phase", status.text("phase").to_owned()),
            ("status.podIP", ip.to_owned()),
            ("status.nominatedNodeName", status.text("nominatedNodeName").to_owned()),
        ]
    }
}

/// Rejects projected service account tokens in a pod without a service account.
fn forbid_tokens_without_service_account(spec: &Value, path: &Path, errors: &mut ErrorList) {
    for (i, volume) in spec.items("volumes").iter().enumerate() {
        for (j, source) in volume.at("projected").items("sources").iter().enumerate() {
            if source.has("serviceAccountToken") {
                let at = path
                    .child("volumes")
                    .index(i)
                    .child("projected.sources")
                    .index(j)
                    .child("serviceAccountToken");
                errors.forbidden(&at, "must not be specified when serviceAccountName is not set");
            }
        }
    }
}

/// The deletion grace period of a pod in seconds. `requested` is the value in the delete options. It is
/// zero if the pod has not been scheduled or has finished.
pub fn grace_period(pod: &Value, requested: Option<i64>) -> i64 {
    let spec = pod.at("spec");
    let finished = matches!(pod.at("status").text("phase"), "Failed" | "Succeeded");
    if spec.text("nodeName").is_empty() || finished {
        return 0;
    }
    match requested.or_else(|| spec.int("terminationGracePeriodSeconds")).unwrap_or(0) {
        ..0 => 1,
        seconds => seconds,
    }
}
