//! The ReplicaSets of a Deployment: the one with its template, the ones before, and their revisions.

use std::collections::BTreeMap;
use std::sync::Arc;

use jiff::Timestamp;
use k8s_openapi::api::apps::v1::{Deployment, ReplicaSet, ReplicaSetSpec};
use k8s_openapi::api::core::v1::PodTemplateSpec;
use k8s_openapi::apimachinery::pkg::apis::meta::v1::{LabelSelector, ObjectMeta};
use reconcile::Object as _;

use super::scale::Limits;
use super::{Action, rollback, status};
use crate::{hash, template};

pub(super) const REVISION: &str = "deployment.kubernetes.io/revision";
pub(super) const DESIRED: &str = "deployment.kubernetes.io/desired-replicas";
pub(super) const MAX: &str = "deployment.kubernetes.io/max-replicas";
const HISTORY: &str = "deployment.kubernetes.io/revision-history";
const TEMPLATE_HASH: &str = "pod-template-hash";

/// Annotations that each object has for itself.
const OWN_ANNOTATIONS: &[&str] =
    &["kubectl.kubernetes.io/last-applied-configuration", REVISION, HISTORY, DESIRED, MAX, rollback::WANTED];

/// How long the list of past revisions may be.
const LONGEST_HISTORY: usize = 2000;
const LONGEST_NAME: usize = 253;

/// A ReplicaSet as it is and as it shall be.
pub(super) struct Set {
    pub is_new: bool,
    /// `None` for one that is to be created.
    before: Option<Arc<ReplicaSet>>,
    pub now: Arc<ReplicaSet>,
}

/// All ReplicaSets of a Deployment, in the order in which they are written.
pub(super) struct Sets(pub Vec<Set>);

impl Sets {
    /// The one whose template is the Deployment's comes first, then the others from oldest to newest.
    pub fn new(deployment: &Deployment, owned: &[Arc<ReplicaSet>]) -> Sets {
        let mut owned = owned.to_vec();
        owned.sort_by(|a, b| by_creation(a, b));
        let new = owned.iter().position(|set| is_new(deployment, set));
        let new = new.map(|i| owned.remove(i));
        let set = |is_new| move |set: Arc<ReplicaSet>| Set { is_new, before: Some(set.clone()), now: set };
        Sets(new.into_iter().map(set(true)).chain(owned.into_iter().map(set(false))).collect())
    }

    /// How many replicas the sets had before this step, and the one it creates has.
    pub fn known_replicas(&self) -> i32 {
        let known = |set: &Set| {
            let known = set.before.as_ref().unwrap_or(&set.now);
            known.spec.as_ref().and_then(|spec| spec.replicas).unwrap_or(1)
        };
        self.0.iter().map(known).fold(0, i32::saturating_add)
    }

    pub fn new_one(&self) -> Option<&Set> {
        self.0.iter().find(|set| set.is_new)
    }

    pub fn new_one_mut(&mut self) -> Option<&mut Set> {
        self.0.iter_mut().find(|set| set.is_new)
    }

    pub fn old(&self) -> impl Iterator<Item = &Set> {
        self.0.iter().filter(|set| !set.is_new)
    }

    /// Brings the annotations of the new set up to date with the Deployment, and the Deployment's revision
    /// with the set's.
    pub fn follow(&mut self, told: &mut Deployment, now: Timestamp) {
        let revision = self.next_revision();
        let Some(set) = self.new_one_mut() else { return };
        set.annotate(told, revision);
        let min_ready_seconds = told.spec.as_ref().and_then(|spec| spec.min_ready_seconds);
        if set.now.spec.as_ref().is_some_and(|spec| spec.min_ready_seconds != min_ready_seconds) {
            let set = Arc::make_mut(&mut set.now);
            set.spec.get_or_insert_default().min_ready_seconds = min_ready_seconds;
        }
        copy_revision(set, told);
        status::found(told, set.now.name(), now);
    }

    /// Makes the set for the Deployment's template, with as many replicas as there is room for.
    pub fn create(&mut self, told: &mut Deployment, limits: &Limits, now: Timestamp) {
        let revision = self.next_revision();
        let mut set = Set { is_new: true, before: None, now: Arc::new(from_template(told)) };
        set.annotate(told, revision);
        set.scale(limits.room(self, 0), limits);
        copy_revision(&set, told);
        status::created(told, set.now.name(), now);
        self.0.insert(0, set);
    }

    /// Old sets beyond the history limit that have ended, the oldest revisions first.
    pub fn surplus(&self, deployment: &Deployment) -> Vec<Arc<ReplicaSet>> {
        let limit = deployment.spec.as_ref().and_then(|spec| spec.revision_history_limit);
        let Some(limit) = limit.filter(|limit| *limit != i32::MAX) else { return Vec::new() };
        let mut sets: Vec<&Set> = self.old().filter(|set| !set.now.is_deleting()).collect();
        let count = sets.len().saturating_sub(usize::try_from(limit).unwrap_or(0));
        sets.sort_by(|a, b| revision(&a.now).cmp(&revision(&b.now)).then(by_creation(&a.now, &b.now)));
        let ended = |set: &&&Set| {
            let observed = set.now.status.as_ref().and_then(|status| status.observed_generation);
            let is_seen = set.now.metadata.generation.unwrap_or(0) <= observed.unwrap_or(0);
            set.replicas() == 0 && set.running() == 0 && is_seen
        };
        sets[..count].iter().filter(ended).map(|set| set.now.clone()).collect()
    }

    pub fn into_actions(self) -> Vec<Action> {
        let mut actions = Vec::new();
        for set in self.0 {
            match set.before {
                None => actions.push(Action::CreateSet(Box::new(Arc::unwrap_or_clone(set.now)))),
                Some(before) if Arc::ptr_eq(&before, &set.now) => {}
                Some(before) => {
                    let from = before.spec.as_ref().and_then(|spec| spec.replicas).unwrap_or(1);
                    actions.push(Action::UpdateSet { set: set.now, from });
                }
            }
        }
        actions
    }

    fn next_revision(&self) -> i64 {
        self.old().map(|set| revision(&set.now)).max().unwrap_or(0).max(0).saturating_add(1)
    }
}

impl Set {
    /// Sets the size, and tells it what the Deployment's sizes are.
    pub fn scale(&mut self, replicas: i32, limits: &Limits) {
        if self.replicas() != replicas {
            Arc::make_mut(&mut self.now).spec.get_or_insert_default().replicas = Some(replicas);
        }
        self.put(DESIRED, limits.replicas.to_string());
        self.put(MAX, limits.most().to_string());
    }

    fn annotate(&mut self, deployment: &Deployment, revision: i64) {
        for (name, value) in deployment.metadata.annotations.iter().flatten() {
            if !OWN_ANNOTATIONS.contains(&name.as_str()) {
                self.put(name, value.clone());
            }
        }
        let last = self.now.annotation(REVISION).unwrap_or_default().to_owned();
        let newer = match last.as_str() {
            "" => true,
            // What is no number is left alone.
            _ => last.parse().is_ok_and(|last: i64| last < revision),
        };
        if newer {
            if !last.is_empty() {
                // It had its turn before: this is a way back.
                let history = lengthen(self.now.annotation(HISTORY).unwrap_or_default(), &last);
                self.put(HISTORY, history);
            }
            self.put(REVISION, revision.to_string());
        }
    }

    fn put(&mut self, name: &str, value: String) {
        if self.now.annotation(name) != Some(&value) {
            let metadata = &mut Arc::make_mut(&mut self.now).metadata;
            metadata.annotations.get_or_insert_default().insert(name.to_owned(), value);
        }
    }
}

/// Whether the set has the Deployment's template, apart from the label that tells sets apart.
pub fn is_new(deployment: &Deployment, set: &ReplicaSet) -> bool {
    let wanted = deployment.spec.as_ref().map(|spec| &spec.template);
    let has = set.spec.as_ref().and_then(|spec| spec.template.as_ref());
    match (wanted, has) {
        (Some(wanted), Some(has)) => {
            wanted.spec == has.spec && without_hash(wanted).metadata == without_hash(has).metadata
        }
        _ => false,
    }
}

/// The revision a set stands for; 0 where it does not say.
pub(super) fn revision(set: &ReplicaSet) -> i64 {
    set.annotation(REVISION).and_then(|revision| revision.parse().ok()).unwrap_or(0)
}

/// The template's metadata without the label that tells sets apart.
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

pub(super) fn own_annotation(name: &str) -> bool {
    OWN_ANNOTATIONS.contains(&name)
}

pub(super) fn by_creation(a: &ReplicaSet, b: &ReplicaSet) -> std::cmp::Ordering {
    let created = |set: &ReplicaSet| set.metadata.creation_timestamp.as_ref().map(|time| time.0);
    created(a).cmp(&created(b)).then_with(|| a.name().cmp(b.name()))
}

fn copy_revision(set: &Set, told: &mut Deployment) {
    if let Some(revision) = set.now.annotation(REVISION)
        && told.annotation(REVISION) != Some(revision)
    {
        let annotations = told.metadata.annotations.get_or_insert_default();
        annotations.insert(REVISION.to_owned(), revision.to_owned());
    }
}

/// A set of the Deployment's template without replicas. Its name follows from the template, so that creating
/// it twice is noticed.
fn from_template(deployment: &Deployment) -> ReplicaSet {
    let spec = deployment.spec.clone().unwrap_or_default();
    let collisions = deployment.status.as_ref().and_then(|status| status.collision_count);
    let hash = hash::of(&spec.template, collisions);
    let mut template = spec.template;
    let labels = template.metadata.get_or_insert_default().labels.get_or_insert_default();
    labels.insert(TEMPLATE_HASH.to_owned(), hash.clone());
    let labels = labels.clone();
    let mut match_labels = spec.selector.match_labels.unwrap_or_default();
    match_labels.insert(TEMPLATE_HASH.to_owned(), hash.clone());

    let mut name = deployment.name();
    while name.len() + 1 + hash.len() > LONGEST_NAME && !name.is_empty() {
        name = &name[..name.len() - 1];
    }
    let metadata = ObjectMeta {
        name: Some(format!("{name}-{hash}")),
        namespace: Some(deployment.namespace().to_owned()),
        owner_references: Some(vec![template::controlled_by(deployment)]),
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

/// The past revisions and one more, without the oldest where they get too many.
fn lengthen(history: &str, revision: &str) -> String {
    let mut history = history;
    while !history.is_empty() && history.len() + 1 + revision.len() > LONGEST_HISTORY {
        history = history.split_once(',').map_or("", |(_, rest)| rest);
    }
    if history.is_empty() { revision.to_owned() } else { format!("{history},{revision}") }
}
