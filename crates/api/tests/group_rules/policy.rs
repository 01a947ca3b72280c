use api::policy::eviction::delete_options;
use expect_test::{Expect, expect};
use serde_json::{Value, json};

use super::{check, check_status, check_valid};

const PDB: &str = "PodDisruptionBudget";

#[test]
fn validates_budgets() {
    check_valid(PDB, json!({"spec": {"minAvailable": "50%", "selector": {"matchLabels": {"app": "web"}}}}));
    check_valid(PDB, json!({"spec": {"maxUnavailable": 1}}));
    let both = json!({"spec": {
        "minAvailable": 1,
        "maxUnavailable": "101%",
        "selector": {"matchExpressions": [{"key": "a", "operator": "Has"}], "matchLabels": {"app": "web"}},
        "unhealthyPodEvictionPolicy": "Never",
    }});
    check(
        PDB,
        both,
        expect![[r#"
        spec: Invalid value: {"MinAvailable":1,"Selector":{"matchLabels":{"app":"web"},"matchExpressions":[{"key":"a","operator":"Has"}]},"MaxUnavailable":"101%","UnhealthyPodEvictionPolicy":"Never"}: minAvailable and maxUnavailable cannot be both set
        spec.maxUnavailable: Invalid value: "101%": must not be greater than 100%
        spec.selector.matchExpressions[0].operator: Invalid value: "Has": not a valid selector operator
        spec.unhealthyPodEvictionPolicy: Unsupported value: "Never": supported values: "AlwaysAllow", "IfHealthyBudget"
    "#]],
    );
    check(
        PDB,
        json!({"spec": {"minAvailable": -1}}),
        expect![[r#"
        spec.minAvailable: Invalid value: -1: must be greater than or equal to 0
    "#]],
    );
    check(
        PDB,
        json!({"spec": {"maxUnavailable": "half"}}),
        expect![[r#"
        spec.maxUnavailable: Invalid value: "half": a valid percent string must be a numeric string followed by an ending '%' (e.g. '1%',  or '93%', regex used for validation is '[0-9]+%')
    "#]],
    );
    check(
        PDB,
        json!({"spec": {"maxUnavailable": "99999999999999999999%"}}),
        expect![[r#"
        spec.maxUnavailable: Invalid value: "99999999999999999999%": must not be greater than 100%
    "#]],
    );
}

#[test]
fn validates_status() {
    let status =
        json!({"currentHealthy": -1, "conditions": [{"type": "DisruptionAllowed", "status": "Maybe"}]});
    check_status(
        PDB,
        json!({"status": status}),
        expect![[r#"
        status.conditions[0].status: Unsupported value: "Maybe": supported values: "False", "True", "Unknown"
        status.conditions[0].lastTransitionTime: Required value
        status.conditions[0].reason: Required value
        status.currentHealthy: Invalid value: -1: must be greater than or equal to 0
    "#]],
    );
}

#[track_caller]
fn evict(eviction: Value, dry_run: &[&str], expected: Expect) {
    expected.assert_eq(&match delete_options(&eviction, "web-0", dry_run) {
        Ok(options) => options.to_string(),
        Err(status) => format!("{} {}", status.code, status.message),
    });
}

#[test]
fn validates_evictions() {
    let named = |options: Value| json!({"metadata": {"name": "web-0"}, "deleteOptions": options});
    evict(named(Value::Null), &[], expect!["{}"]);
    evict(
        named(json!({"gracePeriodSeconds": 3})),
        &["All"],
        expect![[r#"{"dryRun":["All"],"gracePeriodSeconds":3}"#]],
    );
    evict(named(json!({"dryRun": ["All"]})), &[], expect![[r#"{"dryRun":["All"]}"#]]);
    evict(
        named(json!({"dryRun": ["Some"]})),
        &["All"],
        expect!["500 Non-matching dry-run options in request and content: [All] and [Some]"],
    );
    evict(
        named(json!({"ignoreStoreReadErrorWithClusterBreakingPotential": true})),
        &[],
        expect![[
            r#"422 Eviction.policy "web-0" is invalid: deleteOptions.ignoreStoreReadErrorWithClusterBreakingPotential: Invalid value: true: can not be set for pod eviction, try after removing the option"#
        ]],
    );
    evict(
        json!({"metadata": {"name": "other"}}),
        &[],
        expect!["400 name in URL does not match name in Eviction object"],
    );
}
