//! The pods of a StatefulSet: names, ordinals and contents.

use k8s_openapi::api::apps::v1::{StatefulSet, StatefulSetSpec};
use k8s_openapi::api::core::v1::{
    ContainerStatus, PersistentVolumeClaimVolumeSource, Pod, PodTemplateSpec, Volume,
};
use reconcile::Object as _;

use super::claims::claim_name;
use crate::history::POD_REVISION;
use crate::pod::{condition, is_ready};
use crate::template;

const POD_NAME: &str = "statefulset.kubernetes.io/pod-name";
const POD_INDEX: &str = "apps.kubernetes.io/pod-index";

pub fn pod_name(set: &StatefulSet, ordinal: i32) -> String {
    format!("{}-{ordinal}", set.name())
}

/// The ordinal of a pod, or `None` if the pod's name is not that of one of the set's pods.
pub fn ordinal(set: &StatefulSet, pod: &Pod) -> Option<i32> {
    let digits = pod.name().strip_prefix(set.name())?.strip_prefix('-')?;
    let ordinal = digits.parse().ok().filter(|ordinal| *ordinal >= 0)?;
    (pod_name(set, ordinal) == pod.name()).then_some(ordinal)
}

/// Builds the pod of an ordinal from the template of a revision.
pub fn pod(
    set: &StatefulSet,
    spec: &StatefulSetSpec,
    template: &PodTemplateSpec,
    revision: &str,
    ordinal: i32,
) -> Pod {
    let mut pod = template::pod_from_template(set, template);
    let name = pod_name(set, ordinal);
    pod.metadata.generate_name = None;
    pod.metadata.name = Some(name.clone());
    let labels = pod.metadata.labels.get_or_insert_default();
    labels.extend(identity_labels(&name, ordinal).map(|(key, value)| (key.to_owned(), value)));
    labels.insert(POD_REVISION.to_owned(), revision.to_owned());
    let pod_spec = pod.spec.get_or_insert_default();
    pod_spec.hostname = Some(name);
    pod_spec.subdomain = spec.service_name.clone().filter(|name| !name.is_empty());
    let mut volumes: Vec<Volume> = Vec::new();
    for claim in spec.volume_claim_templates.iter().flatten() {
        let claim_name = claim_name(set, claim, ordinal);
        let source = PersistentVolumeClaimVolumeSource { claim_name, read_only: None };
        let name = claim.name().to_owned();
        volumes.push(Volume { name, persistent_volume_claim: Some(source), ..Volume::default() });
    }
    let others = pod_spec.volumes.take().unwrap_or_default();
    let (claim_count, claims) = (volumes.len(), volumes.clone());
    volumes.extend(
        others
            .into_iter()
            .filter(|volume| !claims[..claim_count].iter().any(|claim| claim.name == volume.name)),
    );
    pod_spec.volumes = (!volumes.is_empty()).then_some(volumes);
    pod
}

/// The labels with the pod's name and ordinal.
pub fn identity_labels(name: &str, ordinal: i32) -> [(&'static str, String); 2] {
    [(POD_NAME, name.to_owned()), (POD_INDEX, ordinal.to_string())]
}

/// Whether the pod has its identity labels.
pub fn has_pod_name_label(pod: &Pod) -> bool {
    pod.label(POD_NAME) == Some(pod.name())
}

/// Whether the pod is not ready and has not been ready since its running containers were started.
pub fn was_never_ready(pod: &Pod) -> bool {
    if is_ready(pod) {
        return false;
    }
    let since = condition(pod, "Ready").and_then(|ready| ready.last_transition_time.as_ref());
    let statuses = pod.status.iter().flat_map(|status| status.container_statuses.iter().flatten());
    let mut running = statuses.filter_map(|status: &ContainerStatus| status.state.as_ref()?.running.as_ref());
    running.all(|running| match (&running.started_at, since) {
        (Some(started), Some(since)) => started.0 >= since.0,
        _ => true,
    })
}
