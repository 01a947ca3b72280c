//! The conditions in a pod's status, for kubelets and simulated nodes. No I/O.

use jiff::Timestamp;
use k8s_openapi::api::core::v1::{PodCondition, PodStatus};
use k8s_openapi::apimachinery::pkg::apis::meta::v1::Time;

/// Type of a condition, whether it is true, and its reason and message if it is not.
pub type ConditionUpdate<'a> = (&'a str, bool, Option<(&'a str, String)>);

/// Inputs for the conditions of one pod.
pub struct PodConditions<'a> {
    pub before: &'a PodStatus,
    pub now: Timestamp,
    /// The pod generation that the conditions describe (`observedGeneration`).
    pub generation: Option<i64>,
}

impl PodConditions<'_> {
    /// Returns the given conditions in order, then `PodScheduled`, then the existing conditions of other
    /// types. The transition time is kept while the status of a condition does not change.
    pub fn with_existing<'a>(&self, own: impl IntoIterator<Item = ConditionUpdate<'a>>) -> Vec<PodCondition> {
        let own = own.into_iter().chain([("PodScheduled", true, None)]);
        let mut all: Vec<PodCondition> =
            own.map(|(type_, is_true, cause)| self.condition(type_, is_true, cause)).collect();
        for other in self.before.conditions.iter().flatten() {
            if !all.iter().any(|condition| condition.type_ == other.type_) {
                all.push(other.clone());
            }
        }
        all
    }

    fn condition(&self, type_: &str, is_true: bool, cause: Option<(&str, String)>) -> PodCondition {
        let status = if is_true { "True" } else { "False" };
        let before = self.before.conditions.iter().flatten().find(|condition| condition.type_ == type_);
        let since = before.filter(|before| before.status == status);
        let since = since.and_then(|before| before.last_transition_time.clone());
        let (reason, message) = cause.unzip();
        PodCondition {
            type_: type_.to_owned(),
            status: status.to_owned(),
            reason: reason.map(str::to_owned),
            message: message.filter(|message| !message.is_empty()),
            last_transition_time: since.or(Some(Time(self.now))),
            observed_generation: self.generation,
            ..PodCondition::default()
        }
    }
}

/// Reason and message for a pod in this phase that is not ready. `unready` are the names of its unready
/// containers.
pub fn unready_reason(phase: &str, unready: &[&str]) -> (&'static str, String) {
    match phase {
        "Succeeded" => ("PodCompleted", String::new()),
        "Failed" => ("PodFailed", String::new()),
        _ => ("ContainersNotReady", format!("containers with unready status: [{}]", unready.join(" "))),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn keeps_transition_time_of_unchanged_and_foreign_conditions() {
        let condition = |type_: &str, status: &str| PodCondition {
            type_: type_.into(),
            status: status.into(),
            last_transition_time: Some(Time(Timestamp::UNIX_EPOCH)),
            ..PodCondition::default()
        };
        let conditions = vec![
            condition("PodScheduled", "True"),
            condition("example.com/gate", "True"),
            condition("Ready", "False"),
            condition("Initialized", "True"),
        ];
        let before = PodStatus { conditions: Some(conditions), ..PodStatus::default() };
        let now = Timestamp::from_second(9).expect("a time");
        let of = PodConditions { before: &before, now, generation: Some(3) };
        let cause = unready_reason("Running", &["a", "b"]);
        let found = of.with_existing([
            ("Initialized", true, None),
            ("Ready", true, None),
            ("ContainersReady", false, Some(cause)),
        ]);
        let render = |condition: &PodCondition| {
            let at = condition.last_transition_time.as_ref().map_or(-1, |time| time.0.as_second());
            let cause = condition
                .reason
                .iter()
                .chain(&condition.message)
                .fold(String::new(), |all, text| all + " " + text);
            format!(
                "{}={} {at} {:?}{cause}",
                condition.type_, condition.status, condition.observed_generation
            )
        };
        let found: Vec<String> = found.iter().map(render).collect();
        let expected = [
            "Initialized=True 0 Some(3)",
            "Ready=True 9 Some(3)",
            "ContainersReady=False 9 Some(3) ContainersNotReady containers with unready status: [a b]",
            "PodScheduled=True 0 Some(3)",
            "example.com/gate=True 0 None",
        ];
        assert_eq!(found, expected);
        assert_eq!(unready_reason("Failed", &["a"]), ("PodFailed", String::new()));
    }
}
