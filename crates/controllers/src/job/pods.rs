//! The pods of a Job.

use std::collections::BTreeMap;

use k8s_openapi::api::batch::v1::Job;
use k8s_openapi::api::core::v1::{Container, EnvVar, EnvVarSource, ObjectFieldSelector, Pod};
use reconcile::Object as _;

use crate::template;

/// The finalizer that keeps a pod until it is counted.
pub const TRACKING_FINALIZER: &str = "batch.kubernetes.io/job-tracking";
const COMPLETION_INDEX: &str = "batch.kubernetes.io/job-completion-index";
const FAILURES: &str = "batch.kubernetes.io/job-index-failure-count";
const IGNORED_FAILURES: &str = "batch.kubernetes.io/job-index-ignored-failure-count";
const INDEX_ENV: &str = "JOB_COMPLETION_INDEX";
/// The maximum length of a generated name prefix: 63 characters minus the 5 random ones.
const MAX_NAME_PREFIX_BYTES: usize = 58;

/// A pod to create.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct NewPod {
    pub index: Option<u32>,
    /// The number of counted and of ignored failures of this index.
    pub failures: Option<(i32, i32)>,
}

pub fn is_tracked(pod: &Pod) -> bool {
    pod.metadata.finalizers.iter().flatten().any(|finalizer| finalizer == TRACKING_FINALIZER)
}

pub fn index_of(pod: &Pod) -> Option<u32> {
    pod.annotation(COMPLETION_INDEX)?.parse().ok()
}

pub fn failure_count(pod: &Pod) -> i32 {
    count(pod, FAILURES)
}

pub fn ignored_failure_count(pod: &Pod) -> i32 {
    count(pod, IGNORED_FAILURES)
}

fn count(pod: &Pod, annotation: &str) -> i32 {
    pod.annotation(annotation).and_then(|text| text.parse().ok()).filter(|count| *count >= 0).unwrap_or(0)
}

/// Builds the pod to create.
pub fn pod(job: &Job, new_pod: &NewPod) -> Pod {
    let template = job.spec.as_ref().map(|spec| spec.template.clone()).unwrap_or_default();
    let mut pod = template::pod_from_template(job, &template);
    let finalizers = pod.metadata.finalizers.get_or_insert_default();
    if !finalizers.iter().any(|finalizer| finalizer == TRACKING_FINALIZER) {
        finalizers.push(TRACKING_FINALIZER.to_owned());
    }
    let Some(index) = new_pod.index else { return pod };
    let annotations: &mut BTreeMap<_, _> = pod.metadata.annotations.get_or_insert_default();
    annotations.insert(COMPLETION_INDEX.to_owned(), index.to_string());
    if let Some((failures, ignored)) = new_pod.failures {
        annotations.insert(FAILURES.to_owned(), failures.to_string());
        if ignored > 0 {
            annotations.insert(IGNORED_FAILURES.to_owned(), ignored.to_string());
        }
    }
    pod.metadata.labels.get_or_insert_default().insert(COMPLETION_INDEX.to_owned(), index.to_string());
    pod.metadata.generate_name = Some(generate_name_prefix(job.name(), index));
    if let Some(spec) = &mut pod.spec {
        spec.hostname = Some(format!("{}-{index}", job.name()));
        let init_containers = spec.init_containers.iter_mut().flatten();
        init_containers.chain(&mut spec.containers).for_each(add_completion_index_env);
    }
    pod
}

fn generate_name_prefix(job: &str, index: u32) -> String {
    let end = format!("-{index}-");
    let prefix_len = MAX_NAME_PREFIX_BYTES.saturating_sub(end.len());
    // Object names are ASCII, so `get` never splits a character.
    format!("{}{end}", job.get(..prefix_len).unwrap_or(job))
}

fn add_completion_index_env(container: &mut Container) {
    let env = container.env.get_or_insert_default();
    if env.iter().any(|variable| variable.name == INDEX_ENV) {
        return;
    }
    let field = ObjectFieldSelector {
        field_path: format!("metadata.labels['{COMPLETION_INDEX}']"),
        api_version: None,
    };
    let source = EnvVarSource { field_ref: Some(field), ..EnvVarSource::default() };
    env.push(EnvVar { name: INDEX_ENV.to_owned(), value: None, value_from: Some(source) });
}
