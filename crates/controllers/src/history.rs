//! The past templates of DaemonSets and StatefulSets, kept as ControllerRevisions.
//!
//! A revision's data is a strategic merge patch that brings its template back, so undoing is applying it.

use std::sync::Arc;

use k8s_openapi::api::apps::v1::ControllerRevision;
use k8s_openapi::api::core::v1::PodTemplateSpec;
use k8s_openapi::apimachinery::pkg::apis::meta::v1::ObjectMeta;
use k8s_openapi::apimachinery::pkg::runtime::RawExtension;
use reconcile::{Ctx, Error, Object};
use serde_json::{Value, json};

use crate::hash;
use crate::template::controlled_by;

/// The label by which pods tell which revision they were made from.
pub const POD_REVISION: &str = "controller-revision-hash";
/// What is left of a name for the part before the hash.
const LONGEST_NAME: usize = 223;

/// What a template has been and has become.
#[derive(Debug, PartialEq)]
pub struct History {
    /// The revisions of the present template, the one to use last.
    pub current: Vec<Arc<ControllerRevision>>,
    /// All others, the oldest first.
    pub old: Vec<Arc<ControllerRevision>>,
}

/// What a history lacks.
#[derive(Debug, PartialEq)]
pub enum Revise {
    /// The present template has no revision yet.
    Remember { number: i64 },
    /// The one it has is of too low a number.
    Renumber { revision: Arc<ControllerRevision>, number: i64 },
}

impl History {
    /// Sorts out which of an owner's revisions are of this template.
    pub fn of(template: &PodTemplateSpec, mut revisions: Vec<Arc<ControllerRevision>>) -> History {
        revisions.sort_by_key(|revision| {
            let created = revision.metadata.creation_timestamp.as_ref().map(|time| time.0);
            (revision.revision, created, revision.name().to_owned())
        });
        let data = data(template);
        let same = |revision: &Arc<ControllerRevision>| {
            revision.data.as_ref().is_some_and(|RawExtension(known)| *known == data)
        };
        let (current, old) = revisions.into_iter().partition(same);
        History { current, old }
    }

    /// The revision to use.
    pub fn newest(&self) -> Option<&Arc<ControllerRevision>> {
        self.current.last()
    }

    /// The revision to use, or what is to be done first.
    pub fn settled(&self) -> Result<&Arc<ControllerRevision>, Revise> {
        let number = self.number();
        match self.newest() {
            None => Err(Revise::Remember { number }),
            Some(newest) if newest.revision < number => {
                Err(Revise::Renumber { revision: newest.clone(), number })
            }
            Some(newest) => Ok(newest),
        }
    }

    /// The number the present template must have at least: higher than all past ones.
    pub fn number(&self) -> i64 {
        self.old.last().map_or(0, |revision| revision.revision).saturating_add(1)
    }
}

/// The patch that brings a template back.
pub fn data(template: &PodTemplateSpec) -> Value {
    let mut template = serde_json::to_value(template).unwrap_or_default();
    template["$patch"] = json!("replace");
    json!({"spec": {"template": template}})
}

/// The template that a revision brings back.
pub fn template(revision: &ControllerRevision) -> Option<PodTemplateSpec> {
    let RawExtension(data) = revision.data.as_ref()?;
    let mut template = data.pointer("/spec/template")?.clone();
    template.as_object_mut()?.remove("$patch");
    serde_json::from_value(template).ok()
}

/// A revision of the owner's template; `label` is what its hash is written under.
pub fn revision<T: Object>(
    owner: &T,
    template: &PodTemplateSpec,
    label: &str,
    number: i64,
    collisions: Option<i32>,
) -> ControllerRevision {
    let data = data(template);
    let hash = hash::of(&data, collisions);
    let mut labels = template.metadata.as_ref().and_then(|meta| meta.labels.clone()).unwrap_or_default();
    labels.insert(label.to_owned(), hash.clone());
    let name = owner.name().get(..LONGEST_NAME).unwrap_or(owner.name());
    let metadata = ObjectMeta {
        name: Some(format!("{name}-{hash}")),
        namespace: Some(owner.namespace().to_owned()),
        labels: Some(labels),
        annotations: owner.metadata().annotations.clone(),
        owner_references: Some(vec![controlled_by(owner)]),
        ..ObjectMeta::default()
    };
    ControllerRevision { metadata, data: Some(RawExtension(data)), revision: number }
}

/// Does what is lacking, with `remembered` for the template. `false` where the hash has to change.
pub async fn revise(
    ctx: &Ctx,
    lacking: Revise,
    remembered: impl FnOnce(i64) -> ControllerRevision,
) -> Result<bool, Error> {
    match lacking {
        Revise::Remember { number } => create(ctx, &remembered(number)).await,
        Revise::Renumber { revision, number } => {
            let renumbered = ControllerRevision { revision: number, ..(*revision).clone() };
            ctx.replace(&renumbered).await.map(|_| true)
        }
    }
}

/// Deletes revisions.
pub async fn remove(ctx: &Ctx, revisions: &[Arc<ControllerRevision>]) -> Result<(), Error> {
    for revision in revisions {
        ctx.delete(&**revision).await?;
    }
    Ok(())
}

/// Creates a revision. `false` where its name belongs to another template's, so that the hash has to change.
async fn create(ctx: &Ctx, revision: &ControllerRevision) -> Result<bool, Error> {
    match ctx.create(revision).await {
        Err(error) if error.is_already_exists() => {}
        other => return other.map(|_| true),
    }
    let there = ctx.client.get::<ControllerRevision>(&revision.key()).await?;
    if there.data != revision.data {
        return Ok(false);
    }
    ctx.caches.controller_revisions().seen(there.revision()).await?;
    Ok(true)
}

/// The oldest revisions that are neither used nor among the `limit` to keep.
pub fn surplus(
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

    fn made(image: &str, number: i64) -> Arc<ControllerRevision> {
        Arc::new(revision(&owner(), &template_of(image), POD_REVISION, number, None))
    }

    #[test]
    fn revisions_remember_templates() {
        let made = made("one", 1);
        assert_eq!(template(&made), Some(template_of("one")));
        assert_eq!(made.name(), format!("set-{}", made.label(POD_REVISION).expect("a hash")));
        assert_eq!(made.label("a"), Some("b"));
        let again = revision(&owner(), &template_of("one"), POD_REVISION, 1, Some(1));
        assert_ne!(again.name(), made.name());
    }

    #[test]
    fn history_is_in_order() {
        let history =
            History::of(&template_of("two"), vec![made("three", 3), made("two", 2), made("one", 1)]);
        assert_eq!(history.newest(), Some(&made("two", 2)));
        assert_eq!(history.old, vec![made("one", 1), made("three", 3)]);
        assert_eq!(history.number(), 4);
        assert_eq!(History::of(&template_of("new"), vec![]).number(), 1);
        let (old, one) = (&history.old, made("one", 1));
        assert_eq!(surplus(old, Some(1), |_| false), vec![&one]);
        assert_eq!(surplus(old, Some(0), |revision| *revision == *one), vec![&made("three", 3)]);
        assert!(surplus(old, Some(2), |_| false).is_empty());
    }
}
