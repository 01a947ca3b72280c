//! Computes the conditions of a terminating namespace. Does no I/O.

use std::collections::BTreeMap;

use jiff::{SignedDuration, Timestamp};
use k8s_openapi::api::core::v1::NamespaceCondition;
use k8s_openapi::apimachinery::pkg::apis::meta::v1::Time;

/// The content that remains in a namespace after a deletion attempt.
#[derive(Clone, Debug, Default, PartialEq)]
pub struct RemainingContent {
    /// Groups whose discovery failed.
    pub unknown: Vec<String>,
    pub errors: Vec<String>,
    /// The number of objects by kind, for example `pods.` or `deployments.apps`.
    pub objects: BTreeMap<String, usize>,
    pub finalizers: BTreeMap<String, usize>,
}

impl RemainingContent {
    pub fn is_empty(&self) -> bool {
        self.unknown.is_empty() && self.errors.is_empty() && self.objects.is_empty()
    }

    /// Type, status, reason and message of each condition.
    fn condition_rows(&self) -> [(&'static str, bool, &'static str, String); 5] {
        let list = |parts: Vec<String>| parts.join(", ");
        let or = |bad: bool, kind, reason: [&'static str; 2], message: String, good: &str| match bad {
            true => (kind, true, reason[0], message),
            false => (kind, false, reason[1], good.to_owned()),
        };
        let mut errors = self.errors.clone();
        errors.sort();
        let objects =
            self.objects.iter().map(|(kind, count)| format!("{kind} has {count} resource instances"));
        let finalizers =
            self.finalizers.iter().map(|(name, count)| format!("{name} in {count} resource instances"));
        let mut objects: Vec<String> = objects.collect();
        objects.sort();
        [
            or(
                !self.unknown.is_empty(),
                "NamespaceDeletionDiscoveryFailure",
                ["DiscoveryFailed", "ResourcesDiscovered"],
                format!(
                    "Discovery failed for some groups, {} failing: {}",
                    self.unknown.len(),
                    list(self.unknown.clone())
                ),
                "All resources successfully discovered",
            ),
            or(
                false,
                "NamespaceDeletionGroupVersionParsingFailure",
                ["GroupVersionParsingFailed", "ParsedGroupVersions"],
                String::new(),
                "All legacy kube types successfully parsed",
            ),
            or(
                !errors.is_empty(),
                "NamespaceDeletionContentFailure",
                ["ContentDeletionFailed", "ContentDeleted"],
                format!(
                    "Failed to delete all resource types, {} remaining: {}",
                    errors.len(),
                    list(errors.clone())
                ),
                "All content successfully deleted, may be waiting on finalization",
            ),
            or(
                !self.objects.is_empty(),
                "NamespaceContentRemaining",
                ["SomeResourcesRemain", "ContentRemoved"],
                format!("Some resources are remaining: {}", list(objects)),
                "All content successfully removed",
            ),
            or(
                !self.finalizers.is_empty(),
                "NamespaceFinalizersRemaining",
                ["SomeFinalizersRemain", "ContentHasNoFinalizers"],
                format!(
                    "Some content in the namespace has finalizers remaining: {}",
                    list(finalizers.collect())
                ),
                "All content-preserving finalizers finished",
            ),
        ]
    }
}

/// The new conditions of a namespace, or `None` if they are up to date.
pub fn conditions(
    before: &[NamespaceCondition],
    remaining: &RemainingContent,
    now: Timestamp,
) -> Option<Vec<NamespaceCondition>> {
    let mut after = before.to_vec();
    for (type_, status, reason, message) in remaining.condition_rows() {
        let status = if status { "True" } else { "False" };
        let found = after.iter().position(|condition| condition.type_ == type_);
        let since = found.and_then(|i| {
            let same = after[i].status == status;
            after[i].last_transition_time.clone().filter(|_| same)
        });
        let condition = NamespaceCondition {
            type_: type_.into(),
            status: status.into(),
            reason: Some(reason.into()),
            message: Some(message),
            last_transition_time: Some(since.unwrap_or(Time(now))),
        };
        match found {
            Some(i) => after[i] = condition,
            None => after.push(condition),
        }
    }
    (after != before).then_some(after)
}

/// The delay before the next attempt, proportional to the time since the deletion started.
pub fn requeue_delay(since: Timestamp, now: Timestamp) -> std::time::Duration {
    let elapsed = now.duration_since(since).max(SignedDuration::ZERO).unsigned_abs();
    (elapsed / 8).clamp(std::time::Duration::from_millis(100), std::time::Duration::from_secs(15))
}

#[cfg(test)]
mod tests {
    use expect_test::{Expect, expect};
    use proptest::prelude::*;

    use super::*;

    #[track_caller]
    fn check(remaining: RemainingContent, expected: Expect) {
        let now: Timestamp = "2026-01-01T00:00:00Z".parse().expect("a time");
        let current = conditions(&[], &remaining, now).expect("a namespace without conditions gets some");
        let lines: Vec<String> = current
            .iter()
            .map(|c| {
                format!(
                    "{} {} {} {}\n",
                    c.type_,
                    c.status,
                    c.reason.as_deref().unwrap_or(""),
                    c.message.as_deref().unwrap_or("")
                )
            })
            .collect();
        expected.assert_eq(&lines.concat());
        let later: Timestamp = "2026-01-02T00:00:00Z".parse().expect("a time");
        assert_eq!(conditions(&current, &remaining, later), None, "conditions must not change again");
    }

    #[test]
    fn conditions_list_remaining_content() {
        check(
            RemainingContent::default(),
            expect![[r#"
            NamespaceDeletionDiscoveryFailure False ResourcesDiscovered All resources successfully discovered
            NamespaceDeletionGroupVersionParsingFailure False ParsedGroupVersions All legacy kube types successfully parsed
            NamespaceDeletionContentFailure False ContentDeleted All content successfully deleted, may be waiting on finalization
            NamespaceContentRemaining False ContentRemoved All content successfully removed
            NamespaceFinalizersRemaining False ContentHasNoFinalizers All content-preserving finalizers finished
        "#]],
        );
        let remaining = RemainingContent {
            unknown: vec!["metrics.k8s.io/v1".into()],
            errors: vec!["second".into(), "first".into()],
            objects: [("pods.".to_owned(), 2), ("jobs.batch".to_owned(), 1)].into(),
            finalizers: [("x/y".to_owned(), 3)].into(),
        };
        check(
            remaining,
            expect![[r#"
            NamespaceDeletionDiscoveryFailure True DiscoveryFailed Discovery failed for some groups, 1 failing: metrics.k8s.io/v1
            NamespaceDeletionGroupVersionParsingFailure False ParsedGroupVersions All legacy kube types successfully parsed
            NamespaceDeletionContentFailure True ContentDeletionFailed Failed to delete all resource types, 2 remaining: first, second
            NamespaceContentRemaining True SomeResourcesRemain Some resources are remaining: jobs.batch has 1 resource instances, pods. has 2 resource instances
            NamespaceFinalizersRemaining True SomeFinalizersRemain Some content in the namespace has finalizers remaining: x/y in 3 resource instances
        "#]],
        );
    }

    proptest! {
        /// Conditions are stable for unchanged content, and their transition time changes only with the
        /// status.
        #[test]
        fn unchanged_content_keeps_conditions(contents in prop::collection::vec((0..3usize, 0..3usize, any::<bool>()), 1..6)) {
            let mut current: Vec<NamespaceCondition> = Vec::new();
            for (second, (objects, finalizers, failed)) in contents.into_iter().enumerate() {
                let now = Timestamp::from_second(second as i64).expect("a time");
                let some = |name: &str, count: usize| (count > 0).then(|| (name.to_owned(), count)).into_iter().collect();
                let remaining = RemainingContent {
                    objects: some("pods.", objects),
                    finalizers: some("f", finalizers),
                    errors: failed.then(|| "no".to_owned()).into_iter().collect(),
                    unknown: Vec::new(),
                };
                let before = current.clone();
                current = conditions(&current, &remaining, now).unwrap_or(current);
                prop_assert_eq!(conditions(&current, &remaining, now), None);
                for condition in &current {
                    let was = before.iter().find(|was| was.type_ == condition.type_);
                    let unchanged = was.is_some_and(|was| was.status == condition.status);
                    let since = condition.last_transition_time.as_ref().map(|time| time.0);
                    prop_assert_eq!(since == Some(now), !unchanged);
                }
            }
        }
    }
}
