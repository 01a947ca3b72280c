//! Computes when a finished Job expires. Does no I/O.

use jiff::{SignedDuration, Timestamp};
use k8s_openapi::api::batch::v1::Job;
use reconcile::Object as _;

/// When a Job expires. `None` if it is not finished, has no TTL or is being deleted.
pub fn expires_at(job: &Job) -> Option<Timestamp> {
    let seconds = job.spec.as_ref()?.ttl_seconds_after_finished.filter(|_| !job.is_deleting())?;
    let conditions = job.status.as_ref()?.conditions.as_ref()?;
    let end = conditions.iter().find(|condition| {
        matches!(condition.type_.as_str(), "Complete" | "Failed") && condition.status == "True"
    })?;
    let pause = SignedDuration::from_secs(seconds.into());
    Some(end.last_transition_time.as_ref()?.0.checked_add(pause).unwrap_or(Timestamp::MAX))
}
