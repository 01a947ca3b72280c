//! Pod: what is special about it, and the rules of pod specs that every workload shares.
//!
//! Read [`spec::validate_pod_spec`] first; each part of a spec has a module of its own below it.

mod affinity;
mod containers;
mod diff;
mod env;
pub(crate) mod internal;
mod overlap;
mod prepare;
mod probes;
mod projected;
#[cfg(test)]
mod properties;
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
mod volumes;
pub(crate) mod warnings;
mod windows;

use serde_json::Value;

use crate::field::{Errors, Path};
use crate::json::Json;
use crate::kind::Kind;

pub(crate) use affinity::{node_selector, tolerations};
pub(crate) use diff::unified;
pub(crate) use prepare::drop_disabled;
pub use qos::qos_class;
pub use spec::{Options, validate_pod_spec};
pub use status::restarts;
pub use template::validate_pod_template_spec;
pub use update::{
    prepare_ephemeral_containers_update, prepare_resize, validate_ephemeral_containers_update,
    validate_resize,
};
pub(crate) use volumes::claim_spec;

pub struct Pod;

impl Kind for Pod {
    fn prepare_create(&self, new: &mut Value) {
        prepare::create(new);
    }

    fn prepare_update(&self, new: &mut Value, _old: &Value) {
        if let Some(spec) = new.get_mut("spec") {
            drop_disabled(spec);
        }
    }

    fn prepare_status(&self, new: &mut Value, old: &Value) {
        status::prepare(new, old);
    }

    fn validate(&self, obj: &Value, errors: &mut Errors) {
        let (metadata, spec, path) = (obj.at("metadata"), obj.at("spec"), Path::new("spec"));
        template::pod_annotations(errors, metadata, spec, &Path::new("metadata.annotations"));
        validate_pod_spec(spec, Some(metadata), &path, Options { is_pod: true }, errors);
        if spec.text("serviceAccountName").is_empty() {
            tokens_without_account(spec, &path, errors);
        }
        for list in ["containers", "initContainers"] {
            for (i, container) in spec.items(list).iter().enumerate() {
                containers::trimmed_image(errors, container, &path.at(list).index(i));
            }
        }
    }

    fn validate_create(&self, new: &Value, errors: &mut Errors) {
        let (metadata, spec, path) = (new.at("metadata"), new.at("spec"), Path::new("spec"));
        if !spec.items("ephemeralContainers").is_empty() {
            errors.forbidden(&path.at("ephemeralContainers"), "cannot be set on create");
        }
        if !spec.text("nodeName").is_empty() && !spec.items("schedulingGates").is_empty() {
            let words = "cannot be set until all schedulingGates have been cleared";
            errors.forbidden(&path.at("nodeName"), words);
        }
        security::annotations_match_fields(errors, metadata, spec, &path);
    }

    fn validate_update(&self, new: &Value, old: &Value, errors: &mut Errors) {
        update::update(errors, new, old);
    }

    fn validate_status(&self, new: &Value, old: &Value, errors: &mut Errors) {
        status::validate(errors, new, old);
    }

    fn warnings(&self, new: &Value, old: Option<&Value>) -> Vec<String> {
        if old.is_some() {
            return Vec::new();
        }
        template::name_warning(new, "the Pod's hostname").into_iter().chain(warnings::for_pod(new)).collect()
    }

    fn selectable(&self, obj: &Value) -> Vec<(&'static str, String)> {
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

/// A projected token is some account's.
fn tokens_without_account(spec: &Value, path: &Path, errors: &mut Errors) {
    for (i, volume) in spec.items("volumes").iter().enumerate() {
        for (j, source) in volume.at("projected").items("sources").iter().enumerate() {
            if source.has("serviceAccountToken") {
                let at =
                    path.at("volumes").index(i).at("projected.sources").index(j).at("serviceAccountToken");
                errors.forbidden(&at, "must not be specified when serviceAccountName is not set");
            }
        }
    }
}

/// How long a pod has to end when it is deleted, in seconds; `requested` is what the client asked for. One
/// that no node runs any more, or ever did, goes at once.
pub fn grace_period(pod: &Value, requested: Option<i64>) -> i64 {
    let spec = pod.at("spec");
    let over = matches!(pod.at("status").text("phase"), "Failed" | "Succeeded");
    if spec.text("nodeName").is_empty() || over {
        return 0;
    }
    match requested.or_else(|| spec.int("terminationGracePeriodSeconds")).unwrap_or(0) {
        ..0 => 1,
        seconds => seconds,
    }
}
