//! Evaluates the pod failure policy and the success policy of a Job.

use k8s_openapi::api::batch::v1::{
    PodFailurePolicy, PodFailurePolicyOnExitCodesRequirement, PodFailurePolicyOnPodConditionsPattern,
    SuccessPolicy,
};
use k8s_openapi::api::core::v1::{ContainerStatus, Pod, PodCondition, PodStatus};
use reconcile::Object as _;

use super::indexes::Indexes;

/// The consequence of a failed pod for its Job.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum FailureAction {
    /// Count it as one failure.
    Count,
    Ignore,
    FailIndex,
    /// Fail the Job with this message.
    FailJob(String),
}

/// The action of the first matching rule. Without a match the failure counts.
pub fn match_failure_policy(policy: Option<&PodFailurePolicy>, pod: &Pod) -> FailureAction {
    let (Some(policy), Some(status)) = (policy, &pod.status) else { return FailureAction::Count };
    for (index, rule) in policy.rules.iter().enumerate() {
        let found = match (&rule.on_exit_codes, &rule.on_pod_conditions) {
            (Some(codes), _) => by_exit_code(status, codes).map(|(container, code)| {
                format!("Container {container} for pod {} failed with exit code {code}", pod.key())
            }),
            (None, Some(patterns)) => by_condition(status, patterns)
                .map(|condition| format!("Pod {} has condition {}", pod.key(), condition.type_)),
            (None, None) => None,
        };
        let Some(found) = found else { continue };
        match rule.action.as_str() {
            "Ignore" => return FailureAction::Ignore,
            "FailIndex" => return FailureAction::FailIndex,
            "Count" => return FailureAction::Count,
            "FailJob" => {
                return FailureAction::FailJob(format!("{found} matching FailJob rule at index {index}"));
            }
            _ => {}
        }
    }
    FailureAction::Count
}

fn by_exit_code<'a>(
    status: &'a PodStatus,
    requirement: &PodFailurePolicyOnExitCodesRequirement,
) -> Option<(&'a str, i32)> {
    let lists = [&status.container_statuses, &status.init_container_statuses];
    let ended = lists.into_iter().flatten().flatten().filter_map(|container| {
        let code = exit_code(container).filter(|code| *code != 0)?;
        Some((container.name.as_str(), code))
    });
    ended.filter(|(name, _)| requirement.container_name.as_deref().is_none_or(|wanted| wanted == *name)).find(
        |(_, code)| match requirement.operator.as_str() {
            "In" => requirement.values.contains(code),
            "NotIn" => !requirement.values.contains(code),
            _ => false,
        },
    )
}

fn exit_code(container: &ContainerStatus) -> Option<i32> {
    Some(container.state.as_ref()?.terminated.as_ref()?.exit_code)
}

fn by_condition<'a>(
    status: &'a PodStatus,
    patterns: &[PodFailurePolicyOnPodConditionsPattern],
) -> Option<&'a PodCondition> {
    status.conditions.iter().flatten().find(|condition| {
        let matches = |pattern: &PodFailurePolicyOnPodConditionsPattern| {
            pattern.type_ == condition.type_ && pattern.status.as_deref() == Some(condition.status.as_str())
        };
        patterns.iter().any(matches)
    })
}

/// The message of the first rule that the succeeded indexes meet.
pub fn matched_success_rule(
    policy: Option<&SuccessPolicy>,
    completions: u32,
    succeeded: &Indexes,
) -> Option<String> {
    if succeeded.total() == 0 {
        return None;
    }
    let enough = |count: Option<i32>, have: u32| {
        count.is_some_and(|count| u32::try_from(count).is_ok_and(|count| have >= count))
    };
    let met = policy?.rules.iter().position(|rule| match &rule.succeeded_indexes {
        Some(text) => {
            let indexes = Indexes::parse(text, completions);
            let have = indexes.intersection_count(succeeded);
            indexes.total() > 0 && (have == indexes.total() || enough(rule.succeeded_count, have))
        }
        None => enough(rule.succeeded_count, succeeded.total()),
    });
    met.map(|rule| format!("Matched rules at index {rule}"))
}
