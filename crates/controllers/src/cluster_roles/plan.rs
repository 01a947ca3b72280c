//! Computes the rules of an aggregated ClusterRole. Does no I/O.

use std::sync::Arc;

use k8s_openapi::api::rbac::v1::{ClusterRole, PolicyRule};
use reconcile::{Object, selector};

/// The aggregated rules of `role`, or `None` if they are up to date. `roles` must be sorted by name, so
/// that the order of the rules is stable.
pub fn plan(role: &ClusterRole, roles: &[Arc<ClusterRole>]) -> Option<Vec<PolicyRule>> {
    let selectors = role.aggregation_rule.as_ref()?.cluster_role_selectors.as_deref().unwrap_or_default();
    let mut rules: Vec<PolicyRule> = Vec::new();
    for role_selector in selectors {
        let role_selector = selector(Some(role_selector));
        let candidates = roles.iter().filter(|other| other.name() != role.name());
        for other in candidates.filter(|other| role_selector.matches(|name| other.label(name))) {
            for rule in other.rules.iter().flatten() {
                if !rules.contains(rule) {
                    rules.push(rule.clone());
                }
            }
        }
    }
    (role.rules.as_deref().unwrap_or_default() != rules).then_some(rules)
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;
    use serde_json::{Value, json};

    use super::*;

    fn role(value: Value) -> Arc<ClusterRole> {
        Arc::new(serde_json::from_value(value).expect("a role"))
    }

    fn role_with_label(name: &str, label: &str, verbs: &[&str]) -> Arc<ClusterRole> {
        let rules: Vec<Value> = verbs.iter().map(|verb| json!({"verbs": [verb]})).collect();
        role(json!({"metadata": {"name": name, "labels": {"to": label}}, "rules": rules}))
    }

    fn aggregated_role(rules: &[&str]) -> ClusterRole {
        let rules: Vec<Value> = rules.iter().map(|verb| json!({"verbs": [verb]})).collect();
        let selectors = json!([{"matchLabels": {"to": "a"}}, {"matchLabels": {"to": "b"}}]);
        let rule = json!({"clusterRoleSelectors": selectors});
        let value = json!({"metadata": {"name": "all", "labels": {"to": "a"}}, "aggregationRule": rule, "rules": rules});
        (*role(value)).clone()
    }

    #[track_caller]
    fn check(rules: &[&str], roles: &[Arc<ClusterRole>], expected: Option<&[&str]>) {
        let found = plan(&aggregated_role(rules), roles);
        let found = found.map(|rules| rules.iter().map(|rule| rule.verbs.concat()).collect::<Vec<_>>());
        assert_eq!(
            found.as_deref(),
            expected.map(|verbs| verbs.iter().map(|v| (*v).to_owned()).collect::<Vec<_>>()).as_deref()
        );
    }

    #[test]
    fn aggregated_rules_are_unique_and_in_order() {
        let roles = [
            role_with_label("one", "b", &["get", "list"]),
            role_with_label("two", "a", &["list", "watch"]),
            role_with_label("x", "c", &["x"]),
        ];
        check(&[], &roles, Some(&["list", "watch", "get"]));
        check(&["list", "watch", "get"], &roles, None);
        check(&["list"], &[], Some(&[]));
        check(&[], &[], None);
        // A role does not aggregate itself.
        check(&["own"], &[Arc::new(aggregated_role(&["own"]))], Some(&[]));
    }

    proptest! {
        /// Aggregation is idempotent, and every rule comes from a selected role.
        #[test]
        fn aggregation_is_stable(parts in prop::collection::vec((0..3usize, prop::sample::subsequence(vec!["get", "list", "watch"], 0..=3)), 0..6)) {
            let roles: Vec<_> = parts
                .iter()
                .enumerate()
                .map(|(i, (label, verbs))| role_with_label(&i.to_string(), ["a", "b", "c"][*label], verbs))
                .collect();
            let mut role = aggregated_role(&["old"]);
            role.rules = plan(&role, &roles);
            prop_assert_eq!(plan(&role, &roles), None);
            let chosen = |verb: &str| parts.iter().any(|(label, verbs)| *label < 2 && verbs.contains(&verb));
            for rule in role.rules.iter().flatten() {
                prop_assert!(chosen(&rule.verbs.concat()));
            }
        }
    }
}
