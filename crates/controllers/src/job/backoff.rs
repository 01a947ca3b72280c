//! The delay before a Job replaces a failed pod: 10 seconds, doubled with each further failure, up to 10
//! minutes.

use std::time::Duration;

use jiff::{SignedDuration, Timestamp};
use k8s_openapi::api::core::v1::{ContainerStatus, Pod};

const INITIAL_BACKOFF: Duration = Duration::from_secs(10);
const MAX_BACKOFF: Duration = Duration::from_secs(600);

/// The failures of a Job's pods since the last success.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Backoff {
    pub failures: u32,
    pub last: Option<Timestamp>,
}

impl Backoff {
    /// The state after further pods finish. A success resets the failures before it.
    pub fn with_finished<'a>(
        self,
        succeeded: impl Iterator<Item = &'a Pod>,
        failed: impl Iterator<Item = &'a Pod>,
    ) -> Backoff {
        let success = succeeded.map(finished_at).max();
        let before = if success.is_some() { Backoff::default() } else { self };
        let failed = failed.map(finished_at).filter(|at| success.is_none_or(|success| *at > success));
        failed.fold(before, |sum, at| Backoff {
            failures: sum.failures.saturating_add(1),
            last: sum.last.max(Some(at)),
        })
    }

    /// When the next pod may be created. `None` means now.
    pub fn next_creation_at(&self, now: Timestamp) -> Option<Timestamp> {
        let last = self.last.filter(|_| self.failures > 0)?;
        let exponent = (self.failures - 1).min(16);
        let pause = INITIAL_BACKOFF.saturating_mul(1 << exponent).min(MAX_BACKOFF);
        let until = last.checked_add(pause).unwrap_or(Timestamp::MAX);
        (until > now).then_some(until)
    }
}

/// The finish time of a pod, from the best source available.
pub fn finished_at(pod: &Pod) -> Timestamp {
    containers_finished_at(pod)
        .or_else(|| not_ready_since(pod))
        .or_else(|| deleted_at(pod))
        .or_else(|| pod.metadata.creation_timestamp.as_ref().map(|created| created.0))
        .unwrap_or(Timestamp::UNIX_EPOCH)
}

/// When the last container terminated, including sidecars, which end last. `None` if some container has not.
fn containers_finished_at(pod: &Pod) -> Option<Timestamp> {
    let status = pod.status.as_ref()?;
    let sidecar = |container: &&ContainerStatus| {
        let init_containers = pod.spec.iter().flat_map(|spec| spec.init_containers.iter().flatten());
        init_containers
            .filter(|init| init.restart_policy.as_deref() == Some("Always"))
            .any(|init| init.name == container.name)
    };
    let sidecars = status.init_container_statuses.iter().flatten().filter(sidecar);
    let mut last = None;
    for container in status.container_statuses.iter().flatten().chain(sidecars) {
        let ended = container.state.as_ref()?.terminated.as_ref()?.finished_at.as_ref()?.0;
        last = last.max(Some(ended));
    }
    last
}

fn not_ready_since(pod: &Pod) -> Option<Timestamp> {
    let conditions = pod.status.as_ref()?.conditions.as_ref()?;
    let ready = conditions.iter().find(|condition| condition.type_ == "Ready")?;
    ready.last_transition_time.as_ref().filter(|_| ready.status == "False").map(|time| time.0)
}

/// The deletion timestamp includes the grace period.
fn deleted_at(pod: &Pod) -> Option<Timestamp> {
    let grace = SignedDuration::from_secs(pod.metadata.deletion_grace_period_seconds.unwrap_or(0));
    pod.metadata.deletion_timestamp.as_ref()?.0.checked_sub(grace).ok()
}
