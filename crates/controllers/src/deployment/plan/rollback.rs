//! Rollback by annotation, which replaces the `rollbackTo` field of the `extensions/v1beta1` API.

use k8s_openapi::api::apps::v1::Deployment;
use reconcile::{EventType, Object as _};

use super::Action;
use super::sets::{ReplicaSetState, ReplicaSets, is_new, is_own_annotation, revision, without_hash};

pub(super) const ROLLBACK_TO: &str = "deprecated.deployment.rollback.to";

/// The requested revision, 0 for the previous one. `None` if no rollback is requested.
pub(super) fn rollback_revision(deployment: &Deployment) -> Option<i64> {
    deployment.annotation(ROLLBACK_TO)?.parse().ok()
}

/// Restores the template of the revision. The annotation is removed in any case.
pub(super) fn plan(deployment: &Deployment, sets: &ReplicaSets, target: i64) -> Vec<Action> {
    let mut updated = deployment.clone();
    let annotations = updated.metadata.annotations.get_or_insert_default();
    annotations.remove(ROLLBACK_TO);

    let target = if target == 0 { last_revision(sets) } else { Some(target) };
    let Some(target) = target else {
        let message = "Unable to find last revision.".to_owned();
        let event = Action::Event(EventType::Warning, "DeploymentRollbackRevisionNotFound", message);
        return vec![event, Action::WriteSpec(Box::new(updated))];
    };
    let Some(set) = sets.0.iter().find(|set| revision(&set.desired) == target) else {
        let message = "Unable to find the revision to rollback to.".to_owned();
        let event = Action::Event(EventType::Warning, "DeploymentRollbackRevisionNotFound", message);
        return vec![event, Action::WriteSpec(Box::new(updated))];
    };
    if is_new(deployment, &set.desired) {
        let name = deployment.name();
        let message =
            format!("The rollback revision contains the same template as current deployment {name:?}");
        let event = Action::Event(EventType::Warning, "DeploymentRollbackTemplateUnchanged", message);
        return vec![event, Action::WriteSpec(Box::new(updated))];
    }
    // Annotations such as the change cause belong to the revision and are restored, too.
    annotations.retain(|name, _| is_own_annotation(name));
    let template_annotations =
        set.desired.metadata.annotations.iter().flatten().filter(|(name, _)| !is_own_annotation(name));
    annotations.extend(template_annotations.map(|(name, value)| (name.clone(), value.clone())));
    restore(&mut updated, set);
    let message = format!("Rolled back deployment {:?} to revision {target}", deployment.name());
    let event = Action::Event(EventType::Normal, "DeploymentRollback", message);
    vec![Action::WriteSpec(Box::new(updated)), event]
}

fn restore(updated: &mut Deployment, set: &ReplicaSetState) {
    let template = set.desired.spec.as_ref().and_then(|spec| spec.template.as_ref());
    if let (Some(spec), Some(template)) = (&mut updated.spec, template) {
        spec.template.metadata = without_hash(template).metadata;
        spec.template.spec = template.spec.clone();
    }
}

/// The revision before the latest one.
fn last_revision(sets: &ReplicaSets) -> Option<i64> {
    let mut revisions: Vec<i64> = sets.0.iter().map(|set| revision(&set.desired)).collect();
    revisions.sort_unstable();
    revisions.iter().rev().nth(1).copied().filter(|revision| *revision > 0)
}
