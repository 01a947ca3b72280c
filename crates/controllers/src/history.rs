//! Template history of DaemonSets and StatefulSets, kept as ControllerRevisions.
//!
//! The data of a revision is a strategic merge patch that restores the template (upstream's
//! `pkg/controller/history`).

use std::sync::Arc;

use k8s_openapi::api::apps::v1::ControllerRevision;
use k8s_openapi::api::core::v1::PodTemplateSpec;
use k8s_openapi::apimachinery::pkg::apis::meta::v1::ObjectMeta;
use k8s_openapi::apimachinery::pkg::runtime::RawExtension;
use reconcile::{Ctx, Error, Object};
use serde_json::{Value, json};

use crate::hash;
use crate::template::new_controller_ref;

/// The label with the revision of a pod.
pub const POD_REVISION: &str = "controller-revision-hash";
/// The maximum length of the owner's name in a revision name, which leaves room for the hash.
const MAX_NAME_BYTES: usize = 223;

/// The revisions of an owner.
#[derive(Debug, PartialEq)]
pub struct History {
    /// Revisions of the current template. The last one is used.
    pub current: Vec<Arc<ControllerRevision>>,
    /// All others, oldest first.
    pub old: Vec<Arc<ControllerRevision>>,
}

/// A change that the history needs.
#[derive(Debug, PartialEq)]
pub enum MissingRevision {
    /// The current template has no revision yet.
    Create { number: i64 },
    /// The number of its revision is too low, because an older template was restored.
    SetNumber { revision: Arc<ControllerRevision>, number: i64 },
}

impl History {
    /// Splits an owner's revisions into those of this template and all others.
    pub fn of(template: &PodTemplateSpec, mut revisions: Vec<Arc<ControllerRevision>>) -> History {
        revisions.sort_by_key(|revision| {
            let created = revision.metadata.creation_timestamp.as_ref().map(|time| time.0);
            (revision.revision, created, revision.name().to_owned())
        });
        let data = template_patch(template);
        let same = |revision: &Arc<ControllerRevision>| {
            revision.data.as_ref().is_some_and(|RawExtension(known)| *known == data)
        };
        let (current, old) = revisions.into_iter().partition(same);
        History { current, old }
    }

    /// The revision to use.
    pub fn latest(&self) -> Option<&Arc<ControllerRevision>> {
        self.current.last()
    }

    /// The revision to use, or the change that is needed first.
    pub fn current_revision(&self) -> Result<&Arc<ControllerRevision>, MissingRevision> {
        let number = self.next_number();
        match self.latest() {
            None => Err(MissingRevision::Create { number }),
            Some(latest) if latest.revision < number => {
                Err(MissingRevision::SetNumber { revision: latest.clone(), number })
            }
            Some(latest) => Ok(latest),
        }
    }

    /// The number that the current revision must have at least: higher than all older ones.
    pub fn next_number(&self) -> i64 {
        self.old.last().map_or(0, |revision| revision.revision).saturating_add(1)
    }
}

/// The patch that restores a template.
pub fn template_patch(template: &PodTemplateSpec) -> Value {
    let mut template = serde_json::to_value(template).unwrap_or_default();
    template["$patch"] = json!("replace");
    json!({"spec": {"template": template}})
}

/// The template that a revision restores.
pub fn template(revision: &ControllerRevision) -> Option<PodTemplateSpec> {
    let RawExtension(data) = revision.data.as_ref()?;
    let mut template = data.pointer("/spec/template")?.clone();
    template.as_object_mut()?.remove("$patch");
    serde_json::from_value(template).ok()
}

/// Builds a revision of the owner's template. `label` is the name of the label for the hash.
pub fn new_revision<T: Object>(
    owner: &T,
    template: &PodTemplateSpec,
    label: &str,
    number: i64,
    collisions: Option<i32>,
) -> ControllerRevision {
    let data = template_patch(template);
    let hash = hash::hash_object(&data, collisions);
    let mut labels = template.metadata.as_ref().and_then(|meta| meta.labels.clone()).unwrap_or_default();
    labels.insert(label.to_owned(), hash.clone());
    let name = owner.name().get(..MAX_NAME_BYTES).unwrap_or(owner.name());
    let metadata = ObjectMeta {
        name: Some(format!("{name}-{hash}")),
        namespace: Some(owner.namespace().to_owned()),
        labels: Some(labels),
        annotations: owner.metadata().annotations.clone(),
        owner_references: Some(vec![new_controller_ref(owner)]),
        ..ObjectMeta::default()
    };
    ControllerRevision { metadata, data: Some(RawExtension(data)), revision: number }
}

/// Applies the needed change; `new_revision` builds a new revision. Returns false if there is a hash
/// collision.
pub async fn sync_revision(
    ctx: &Ctx,
    missing_revision: MissingRevision,
    new_revision: impl FnOnce(i64) -> ControllerRevision,
) -> Result<bool, Error> {
    match missing_revision {
        MissingRevision::Create { number } => create(ctx, &new_revision(number)).await,
        MissingRevision::SetNumber { revision, number } => {
            let updated = ControllerRevision { revision: number, ..(*revision).clone() };
            ctx.replace(&updated).await.map(|_| true)
        }
    }
}

/// Deletes the revisions.
pub async fn remove(ctx: &Ctx, revisions: &[Arc<ControllerRevision>]) -> Result<(), Error> {
    for revision in revisions {
        ctx.delete(&**revision).await?;
    }
    Ok(())
}

/// Creates a revision. Returns false if the name is taken by a revision of another template (hash collision).
async fn create(ctx: &Ctx, revision: &ControllerRevision) -> Result<bool, Error> {
    match ctx.create(revision).await {
        Err(error) if error.is_already_exists() => {}
        other => return other.map(|_| true),
    }
    let existing = ctx.client.get::<ControllerRevision>(&revision.key()).await?;
    if existing.data != revision.data {
        return Ok(false);
    }
    ctx.caches.controller_revisions().wait_until_revision(existing.revision()).await?;
    Ok(true)
}

/// The oldest unused revisions beyond the history limit.
pub fn revisions_over_limit(
    old: &[Arc<ControllerRevision>],
    limit: Option<i32>,
    used: impl Fn(&ControllerRevision) -> bool,
) -> Vec<&Arc<ControllerRevision>> {
    let keep = usize::try_from(limit.unwrap_or(10)).unwrap_or(0);
    let unused = old.iter().filter(|revision| !used(revision));
    unused.take(old.len().saturating_sub(keep)).collect()
}

#[cfg(test)]
mod tests {
    use k8s_openapi::api::apps::v1::DaemonSet;

    use super::*;

    fn template_of(image: &str) -> PodTemplateSpec {
        serde_json::from_value(json!({"metadata": {"labels": {"a": "b"}},
            "spec": {"containers": [{"name": "c", "image": image}]}}))
        .expect("a template")
    }

    fn owner() -> DaemonSet {
        serde_json::from_value(json!({"metadata": {"name": "set", "namespace": "x", "uid": "u"}}))
            .expect("a set")
    }

    fn test_revision(image: &str, number: i64) -> Arc<ControllerRevision> {
        Arc::new(new_revision(&owner(), &template_of(image), POD_REVISION, number, None))
    }

    #[test]
    fn revision_roundtrips_template() {
        let first = test_revision("one", 1);
        assert_eq!(template(&first), Some(template_of("one")));
        assert_eq!(first.name(), format!("set-{}", first.label(POD_REVISION).expect("a hash")));
        assert_eq!(first.label("a"), Some("b"));
        let again = new_revision(&owner(), &template_of("one"), POD_REVISION, 1, Some(1));
        assert_ne!(again.name(), first.name());
    }

    #[test]
    fn history_is_sorted_by_revision() {
        let history = History::of(
            &template_of("two"),
            vec![test_revision("three", 3), test_revision("two", 2), test_revision("one", 1)],
        );
        assert_eq!(history.latest(), Some(&test_revision("two", 2)));
        assert_eq!(history.old, vec![test_revision("one", 1), test_revision("three", 3)]);
        assert_eq!(history.next_number(), 4);
        assert_eq!(History::of(&template_of("new"), vec![]).next_number(), 1);
        let (old, one) = (&history.old, test_revision("one", 1));
        assert_eq!(revisions_over_limit(old, Some(1), |_| false), vec![&one]);
        assert_eq!(
            revisions_over_limit(old, Some(0), |revision| *revision == *one),
            vec![&test_revision("three", 3)]
        );
        assert!(revisions_over_limit(old, Some(2), |_| false).is_empty());
    }
}
