//! Going back to an earlier revision by annotation, which the first versions of the API had a field for.

use k8s_openapi::api::apps::v1::Deployment;
use reconcile::{Object as _, Severity};

use super::Action;
use super::sets::{Set, Sets, is_new, own_annotation, revision, without_hash};

pub(super) const WANTED: &str = "deprecated.deployment.rollback.to";

/// The revision to go back to, 0 for the last one; `None` where nobody asks.
pub(super) fn wanted(deployment: &Deployment) -> Option<i64> {
    deployment.annotation(WANTED)?.parse().ok()
}

/// Puts the template of that revision into the Deployment, and takes the wish out in any case.
pub(super) fn plan(deployment: &Deployment, sets: &Sets, wanted: i64) -> Vec<Action> {
    let mut written = deployment.clone();
    let annotations = written.metadata.annotations.get_or_insert_default();
    annotations.remove(WANTED);

    let wanted = if wanted == 0 { last_revision(sets) } else { Some(wanted) };
    let Some(wanted) = wanted else {
        let message = "Unable to find last revision.".to_owned();
        let tell = Action::Tell(Severity::Warning, "DeploymentRollbackRevisionNotFound", message);
        return vec![tell, Action::WriteSpec(Box::new(written))];
    };
    let Some(set) = sets.0.iter().find(|set| revision(&set.now) == wanted) else {
        let message = "Unable to find the revision to rollback to.".to_owned();
        let tell = Action::Tell(Severity::Warning, "DeploymentRollbackRevisionNotFound", message);
        return vec![tell, Action::WriteSpec(Box::new(written))];
    };
    if is_new(deployment, &set.now) {
        let name = deployment.name();
        let message =
            format!("The rollback revision contains the same template as current deployment {name:?}");
        let tell = Action::Tell(Severity::Warning, "DeploymentRollbackTemplateUnchanged", message);
        return vec![tell, Action::WriteSpec(Box::new(written))];
    }
    // The annotations of that time come back too, such as the cause of the change.
    annotations.retain(|name, _| own_annotation(name));
    let kept = set.now.metadata.annotations.iter().flatten().filter(|(name, _)| !own_annotation(name));
    annotations.extend(kept.map(|(name, value)| (name.clone(), value.clone())));
    restore(&mut written, set);
    let message = format!("Rolled back deployment {:?} to revision {wanted}", deployment.name());
    let tell = Action::Tell(Severity::Normal, "DeploymentRollback", message);
    vec![Action::WriteSpec(Box::new(written)), tell]
}

fn restore(written: &mut Deployment, set: &Set) {
    let template = set.now.spec.as_ref().and_then(|spec| spec.template.as_ref());
    if let (Some(spec), Some(template)) = (&mut written.spec, template) {
        spec.template.metadata = without_hash(template).metadata;
        spec.template.spec = template.spec.clone();
    }
}

/// The one before the newest.
fn last_revision(sets: &Sets) -> Option<i64> {
    let mut revisions: Vec<i64> = sets.0.iter().map(|set| revision(&set.now)).collect();
    revisions.sort_unstable();
    revisions.iter().rev().nth(1).copied().filter(|revision| *revision > 0)
}
