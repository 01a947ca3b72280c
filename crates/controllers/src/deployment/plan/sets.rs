//! The ReplicaSets of a Deployment: the new one with its template, the old ones, and their revisions.

use std::collections::BTreeMap;
use std::sync::Arc;

use jiff::Timestamp;
use k8s_openapi::api::apps::v1::{Deployment, ReplicaSet, ReplicaSetSpec};
use k8s_openapi::api::core::v1::PodTemplateSpec;
use k8s_openapi::apimachinery::pkg::apis::meta::v1::{LabelSelector, ObjectMeta};
use reconcile::Object as _;

use super::scale::RolloutLimits;
use super::{Action, rollback, status};
use crate::{hash, template};

pub(super) const REVISION: &str = "deployment.kubernetes.io/revision";
pub(super) const DESIRED_REPLICAS: &str = "deployment.kubernetes.io/desired-replicas";
pub(super) const MAX_REPLICAS: &str = "deployment.kubernetes.io/max-replicas";
const REVISION_HISTORY: &str = "deployment.kubernetes.io/revision-history";
const TEMPLATE_HASH: &str = "pod-template-hash";

/// Annotations that are not copied between a Deployment and its ReplicaSets.
const OWN_ANNOTATIONS: &[&str] = &[
    "kubectl.kubernetes.io/last-applied-configuration",
    REVISION,
    REVISION_HISTORY,
    DESIRED_REPLICAS,
    MAX_REPLICAS,
    rollback::ROLLBACK_TO,
];

/// The maximum length of the revision history annotation.
const MAX_REVISION_HISTORY_BYTES: usize = 2000;
const MAX_NAME_BYTES: usize = 253;

/// A ReplicaSet with its existing and its desired state.
pub(super) struct ReplicaSetState {
    pub is_new: bool,
    /// `None` if it is to be created.
    existing: Option<Arc<ReplicaSet>>,
    pub desired: Arc<ReplicaSet>,
}

/// All ReplicaSets of a Deployment, in the order in which they are written.
pub(super) struct ReplicaSets(pub Vec<ReplicaSetState>);

impl ReplicaSets {
    /// The new ReplicaSet (with the Deployment's template) comes first, then the old ones from oldest to
    /// newest.
    pub fn new(deployment: &Deployment, owned: &[Arc<ReplicaSet>]) -> ReplicaSets {
        let mut owned = owned.to_vec();
        owned.sort_by(|a, b| by_creation(a, b));
        let new = owned.iter().position(|set| is_new(deployment, set));
        let new = new.map(|i| owned.remove(i));
        let set = |is_new| {
            move |set: Arc<ReplicaSet>| ReplicaSetState { is_new, existing: Some(set.clone()), desired: set }
        };
        ReplicaSets(new.into_iter().map(set(true)).chain(owned.into_iter().map(set(false))).collect())
    }

    /// The replicas before this step, plus those of a newly created ReplicaSet.
    pub fn existing_replicas(&self) -> i32 {
        let known = |set: &ReplicaSetState| {
            let known = set.existing.as_ref().unwrap_or(&set.desired);
            known.spec.as_ref().and_then(|spec| spec.replicas).unwrap_or(1)
        };
        self.0.iter().map(known).fold(0, i32::saturating_add)
    }

    pub fn new_set(&self) -> Option<&ReplicaSetState> {
        self.0.iter().find(|set| set.is_new)
    }

    pub fn new_set_mut(&mut self) -> Option<&mut ReplicaSetState> {
        self.0.iter_mut().find(|set| set.is_new)
    }

    pub fn old_sets(&self) -> impl Iterator<Item = &ReplicaSetState> {
        self.0.iter().filter(|set| !set.is_new)
    }

    /// Updates the annotations of the new ReplicaSet from the Deployment, and the Deployment's revision
    /// from the ReplicaSet.
    pub fn sync_annotations(&mut self, updated: &mut Deployment, now: Timestamp) {
        let revision = self.next_revision();
        let Some(set) = self.new_set_mut() else { return };
        set.annotate(updated, revision);
        let min_ready_seconds = updated.spec.as_ref().and_then(|spec| spec.min_ready_seconds);
        if set.desired.spec.as_ref().is_some_and(|spec| spec.min_ready_seconds != min_ready_seconds) {
            let set = Arc::make_mut(&mut set.desired);
            set.spec.get_or_insert_default().min_ready_seconds = min_ready_seconds;
        }
        copy_revision(set, updated);
        status::record_found_set(updated, set.desired.name(), now);
    }

    /// Adds a ReplicaSet for the Deployment's template, with as many replicas as the limits allow.
    pub fn create(&mut self, updated: &mut Deployment, limits: &RolloutLimits, now: Timestamp) {
        let revision = self.next_revision();
        let mut set =
            ReplicaSetState { is_new: true, existing: None, desired: Arc::new(new_replica_set(updated)) };
        set.annotate(updated, revision);
        set.scale(limits.new_set_replicas(self, 0), limits);
        copy_revision(&set, updated);
        status::record_created_set(updated, set.desired.name(), now);
        self.0.insert(0, set);
    }

    /// Scaled-down old ReplicaSets beyond the history limit, oldest revisions first.
    pub fn surplus(&self, deployment: &Deployment) -> Vec<Arc<ReplicaSet>> {
        let limit = deployment.spec.as_ref().and_then(|spec| spec.revision_history_limit);
        let Some(limit) = limit.filter(|limit| *limit != i32::MAX) else { return Vec::new() };
        let mut sets: Vec<&ReplicaSetState> =
            self.old_sets().filter(|set| !set.desired.is_deleting()).collect();
        let count = sets.len().saturating_sub(usize::try_from(limit).unwrap_or(0));
        sets.sort_by(|a, b| {
            revision(&a.desired).cmp(&revision(&b.desired)).then(by_creation(&a.desired, &b.desired))
        });
        let ended = |set: &&&ReplicaSetState| {
            let observed = set.desired.status.as_ref().and_then(|status| status.observed_generation);
            let is_seen = set.desired.metadata.generation.unwrap_or(0) <= observed.unwrap_or(0);
            set.replicas() == 0 && set.reported_replicas() == 0 && is_seen
        };
        sets[..count].iter().filter(ended).map(|set| set.desired.clone()).collect()
    }

    pub fn into_actions(self) -> Vec<Action> {
        let mut actions = Vec::new();
        for set in self.0 {
            match set.existing {
                None => actions.push(Action::CreateSet(Box::new(Arc::unwrap_or_clone(set.desired)))),
                Some(before) if Arc::ptr_eq(&before, &set.desired) => {}
                Some(before) => {
                    let from = before.spec.as_ref().and_then(|spec| spec.replicas).unwrap_or(1);
                    actions.push(Action::UpdateSet { set: set.desired, from });
                }
            }
        }
        actions
    }

    fn next_revision(&self) -> i64 {
        self.old_sets().map(|set| revision(&set.desired)).max().unwrap_or(0).max(0).saturating_add(1)
    }
}

impl ReplicaSetState {
    /// Sets the replica count and the annotations with the Deployment's limits.
    pub fn scale(&mut self, replicas: i32, limits: &RolloutLimits) {
        if self.replicas() != replicas {
            Arc::make_mut(&mut self.desired).spec.get_or_insert_default().replicas = Some(replicas);
        }
        self.set_annotation(DESIRED_REPLICAS, limits.replicas.to_string());
        self.set_annotation(MAX_REPLICAS, limits.max_total_pods().to_string());
    }

    fn annotate(&mut self, deployment: &Deployment, revision: i64) {
        for (name, value) in deployment.metadata.annotations.iter().flatten() {
            if !OWN_ANNOTATIONS.contains(&name.as_str()) {
                self.set_annotation(name, value.clone());
            }
        }
        let last = self.desired.annotation(REVISION).unwrap_or_default().to_owned();
        let newer = match last.as_str() {
            "" => true,
            // A value that is not a number is left unchanged.
            _ => last.parse().is_ok_and(|last: i64| last < revision),
        };
        if newer {
            if !last.is_empty() {
                // The ReplicaSet had an earlier revision: this is a rollback to it.
                let history =
                    append_revision(self.desired.annotation(REVISION_HISTORY).unwrap_or_default(), &last);
                self.set_annotation(REVISION_HISTORY, history);
            }
            self.set_annotation(REVISION, revision.to_string());
        }
    }

    fn set_annotation(&mut self, name: &str, value: String) {
        if self.desired.annotation(name) != Some(&value) {
            let metadata = &mut Arc::make_mut(&mut self.desired).metadata;
            metadata.annotations.get_or_insert_default().insert(name.to_owned(), value);
        }
    }
}

/// Whether a ReplicaSet has the Deployment's template, ignoring the `pod-template-hash` label.
pub fn is_new(deployment: &Deployment, set: &ReplicaSet) -> bool {
    let desired = deployment.spec.as_ref().map(|spec| &spec.template);
    let has = set.spec.as_ref().and_then(|spec| spec.template.as_ref());
    match (desired, has) {
        (Some(desired), Some(has)) => {
            desired.spec == has.spec && without_hash(desired).metadata == without_hash(has).metadata
        }
        _ => false,
    }
}

/// The revision of a ReplicaSet, 0 if it has none.
pub(super) fn revision(set: &ReplicaSet) -> i64 {
    set.annotation(REVISION).and_then(|revision| revision.parse().ok()).unwrap_or(0)
}

/// The template's metadata without the `pod-template-hash` label.
pub(super) fn without_hash(template: &PodTemplateSpec) -> PodTemplateSpec {
    let mut metadata = template.metadata.clone().unwrap_or_default();
    if let Some(labels) = &mut metadata.labels {
        labels.remove(TEMPLATE_HASH);
    }
    let some = |map: Option<BTreeMap<String, String>>| map.filter(|map| !map.is_empty());
    metadata.labels = some(metadata.labels);
    metadata.annotations = some(metadata.annotations);
    PodTemplateSpec { metadata: Some(metadata), spec: None }
}

pub(super) fn is_own_annotation(name: &str) -> bool {
    OWN_ANNOTATIONS.contains(&name)
}

pub(super) fn by_creation(a: &ReplicaSet, b: &ReplicaSet) -> std::cmp::Ordering {
    let created = |set: &ReplicaSet| set.metadata.creation_timestamp.as_ref().map(|time| time.0);
    created(a).cmp(&created(b)).then_with(|| a.name().cmp(b.name()))
}

fn copy_revision(set: &ReplicaSetState, updated: &mut Deployment) {
    if let Some(revision) = set.desired.annotation(REVISION)
        && updated.annotation(REVISION) != Some(revision)
    {
        let annotations = updated.metadata.annotations.get_or_insert_default();
        annotations.insert(REVISION.to_owned(), revision.to_owned());
    }
}

/// A ReplicaSet of the Deployment's template with no replicas. Its name is derived from the template hash,
/// so a duplicate creation fails with `AlreadyExists`.
fn new_replica_set(deployment: &Deployment) -> ReplicaSet {
    let spec = deployment.spec.clone().unwrap_or_default();
    let collisions = deployment.status.as_ref().and_then(|status| status.collision_count);
    let hash = hash::hash_object(&spec.template, collisions);
    let mut template = spec.template;
    let labels = template.metadata.get_or_insert_default().labels.get_or_insert_default();
    labels.insert(TEMPLATE_HASH.to_owned(), hash.clone());
    let labels = labels.clone();
    let mut match_labels = spec.selector.match_labels.unwrap_or_default();
    match_labels.insert(TEMPLATE_HASH.to_owned(), hash.clone());

    let mut name = deployment.name();
    while name.len() + 1 + hash.len() > MAX_NAME_BYTES && !name.is_empty() {
        name = &name[..name.len() - 1];
    }
    let metadata = ObjectMeta {
        name: Some(format!("{name}-{hash}")),
        namespace: Some(deployment.namespace().to_owned()),
        owner_references: Some(vec![template::new_controller_ref(deployment)]),
        labels: Some(labels),
        ..ObjectMeta::default()
    };
    let selector = LabelSelector { match_labels: Some(match_labels), ..spec.selector };
    let spec = ReplicaSetSpec {
        replicas: Some(0),
        min_ready_seconds: spec.min_ready_seconds,
        selector,
        template: Some(template),
    };
    ReplicaSet { metadata, spec: Some(spec), status: None }
}

/// Appends a revision and drops the oldest ones if the list gets too long.
fn append_revision(history: &str, revision: &str) -> String {
    let mut history = history;
    while !history.is_empty() && history.len() + 1 + revision.len() > MAX_REVISION_HISTORY_BYTES {
        history = history.split_once(',').map_or("", |(_, rest)| rest);
    }
    if history.is_empty() { revision.to_owned() } else { format!("{history},{revision}") }
}
