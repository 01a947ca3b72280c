//! Decides whether and how a Job finishes.

use jiff::{SignedDuration, Timestamp};

use super::plan::CountedJob;
use super::policy::{FailureAction, matched_success_rule};
use crate::pod::phase;

/// The result of a Job.
#[derive(Clone, Debug, PartialEq)]
pub struct Verdict {
    pub succeeded: bool,
    pub reason: String,
    pub message: String,
}

impl CountedJob<'_> {
    /// The verdict, if the Job fails or meets its success policy before all completions are reached.
    pub(super) fn verdict(&self) -> Option<Verdict> {
        let recorded = |kind: &str, succeeded| {
            let condition = self.condition(kind).filter(|condition| condition.status == "True")?;
            Some(Verdict {
                succeeded,
                reason: condition.reason.clone().unwrap_or_default(),
                message: condition.message.clone().unwrap_or_default(),
            })
        };
        recorded("SuccessCriteriaMet", true)
            .or_else(|| recorded("FailureTarget", false))
            .or_else(|| self.failure_verdict())
            .or_else(|| {
                let indexed = self.indexed.as_ref()?;
                let policy = self.spec.success_policy.as_ref();
                let message = matched_success_rule(policy, indexed.completions, &indexed.succeeded)?;
                Some(Verdict { succeeded: true, reason: "SuccessPolicy".to_owned(), message })
            })
    }

    fn failure_verdict(&self) -> Option<Verdict> {
        let failed = self.snapshot.pods.iter().filter(|pod| self.is_failed(pod));
        let fatal = failed.map(|pod| self.failure_action(pod)).find_map(|action| match action {
            FailureAction::FailJob(message) => Some(message),
            _ => None,
        });
        if let Some(message) = fatal {
            return Some(failure("PodFailurePolicy", &message));
        }
        let limit = u32::try_from(self.spec.backoff_limit.unwrap_or(6)).unwrap_or(0);
        if self.failed > limit || self.past_backoff_limit_on_failure(limit) {
            return Some(failure("BackoffLimitExceeded", "Job has reached the specified backoff limit"));
        }
        if self.active_deadline().is_some_and(|deadline| deadline <= self.snapshot.now) {
            return Some(failure("DeadlineExceeded", "Job was active longer than specified deadline"));
        }
        let indexed = self.indexed.as_ref()?;
        let failed = indexed.failed.as_ref()?.total();
        let max_failed =
            self.spec.max_failed_indexes.map(|max_failed| u32::try_from(max_failed).unwrap_or(0));
        if max_failed.is_some_and(|max_failed| failed > max_failed) {
            let message = "Job has exceeded the specified maximal number of failed indexes";
            return Some(failure("MaxFailedIndexesExceeded", message));
        }
        (failed > 0 && failed + indexed.succeeded.total() >= indexed.completions)
            .then(|| failure("FailedIndexes", "Job has failed indexes"))
    }

    /// Container restarts in place count towards the backoff limit, too.
    fn past_backoff_limit_on_failure(&self, limit: u32) -> bool {
        let policy = self.spec.template.spec.as_ref().and_then(|spec| spec.restart_policy.as_deref());
        if policy != Some("OnFailure") {
            return false;
        }
        let active = self.snapshot.pods.iter().filter(|pod| matches!(phase(pod), "Running" | "Pending"));
        let statuses = active.filter_map(|pod| pod.status.as_ref()).flat_map(|status| {
            let init_containers = status.init_container_statuses.iter().flatten();
            init_containers.chain(status.container_statuses.iter().flatten())
        });
        let restarts: i64 = statuses.map(|status| i64::from(status.restart_count)).sum();
        restarts >= i64::from(limit.max(1))
    }

    pub(super) fn active_deadline(&self) -> Option<Timestamp> {
        let seconds = self.spec.active_deadline_seconds.filter(|_| !self.is_suspended())?;
        let start = self.status.start_time.as_ref().map_or(self.snapshot.now, |time| time.0);
        let seconds = SignedDuration::from_secs(seconds);
        Some(start.checked_add(seconds).unwrap_or(Timestamp::MAX))
    }

    /// The verdict, if all completions are reached.
    pub(super) fn completion_verdict(&self) -> Option<Verdict> {
        let enough = match self.spec.completions {
            // The first success completes the Job. The remaining active pods only have to finish.
            None => self.succeeded > 0,
            Some(completions) => i64::from(self.succeeded) >= i64::from(completions),
        };
        (enough && self.active.is_empty()).then(|| Verdict {
            succeeded: true,
            reason: "CompletionsReached".to_owned(),
            message: "Reached expected number of succeeded pods".to_owned(),
        })
    }
}

fn failure(reason: &str, message: &str) -> Verdict {
    Verdict { succeeded: false, reason: reason.to_owned(), message: message.to_owned() }
}
