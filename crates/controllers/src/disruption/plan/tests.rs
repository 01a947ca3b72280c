use std::fmt::Write as _;

use expect_test::{Expect, expect};
use proptest::prelude::*;
use serde_json::{Value, json};

use super::*;

fn now() -> Timestamp {
    "2026-01-01T12:00:00Z".parse().expect("a time")
}

fn budget(spec: Value, status: Value) -> PodDisruptionBudget {
    let mut spec = spec;
    spec["selector"] = json!({"matchLabels": {"app": "web"}});
    let metadata = json!({"name": "b", "namespace": "d", "generation": 2});
    let value = json!({"metadata": metadata, "spec": spec, "status": status});
    serde_json::from_value(value).expect("a budget")
}

/// `name word...`: `ready`, `ending` (being deleted), `bare` (no controller).
fn pod(text: &str) -> Arc<Pod> {
    let mut words = text.split_whitespace();
    let name = words.next().expect("a name");
    let mut value = json!({"metadata": {"name": name, "namespace": "d", "ownerReferences":
        [{"apiVersion": "apps/v1", "kind": "ReplicaSet", "name": "s", "uid": "s", "controller": true}]}});
    for word in words {
        match word {
            "ready" => value["status"]["conditions"] = json!([{"type": "Ready", "status": "True"}]),
            "ending" => value["metadata"]["deletionTimestamp"] = json!(now().to_string()),
            "bare" => value["metadata"]["ownerReferences"] = json!([]),
            other => panic!("{other:?}"),
        }
    }
    Arc::new(serde_json::from_value(value).expect("a pod"))
}

fn pods(text: &str) -> Vec<Arc<Pod>> {
    text.split('|').map(str::trim).filter(|text| !text.is_empty()).map(pod).collect()
}

#[track_caller]
fn check(budget: &PodDisruptionBudget, text: &str, controller_scale: Result<i32, &str>, expected: Expect) {
    let controller_scale =
        controller_scale.map(|size| ControllerScale::from([("s".to_owned(), size)])).map_err(str::to_owned);
    let mut output = String::new();
    for action in plan(budget, &pods(text), controller_scale, now()) {
        match action {
            Action::Normal(reason, message) => _ = writeln!(output, "normal {reason} {message}"),
            Action::Warn(reason, message) => _ = writeln!(output, "warn {reason} {message}"),
            Action::WarnPod(pod, message) => _ = writeln!(output, "warn {} {message}", pod.name()),
            Action::RequeueAt(at) => _ = writeln!(output, "requeue at {at}"),
            Action::WriteStatus(status) => {
                let number = |number: Option<i32>| number.unwrap_or(-1);
                let _ = writeln!(
                    output,
                    "expected={} desired={} healthy={} allowed={} disrupted={:?}",
                    number(status.expected_pods),
                    number(status.desired_healthy),
                    number(status.current_healthy),
                    number(status.disruptions_allowed),
                    status.disrupted_pods.iter().flat_map(|pods| pods.keys()).collect::<Vec<_>>()
                );
                for condition in status.conditions.iter().flatten() {
                    let Condition { type_, status, reason, message, .. } = condition;
                    let _ = writeln!(output, "{type_}={status} {reason} {message:?}");
                }
            }
        }
    }
    expected.assert_eq(&output);
}

#[test]
fn allowed_disruptions_follow_budget() {
    let none = Value::Null;
    let web = "a ready | b ready | c | d ready ending";
    check(
        &budget(json!({"minAvailable": 1}), none.clone()),
        web,
        Ok(0),
        expect![[r#"
        expected=4 desired=1 healthy=2 allowed=1 disrupted=[]
        DisruptionAllowed=True SufficientPods ""
    "#]],
    );
    check(
        &budget(json!({"minAvailable": "50%"}), none.clone()),
        web,
        Ok(4),
        expect![[r#"
        expected=4 desired=2 healthy=2 allowed=0 disrupted=[]
        DisruptionAllowed=False InsufficientPods ""
    "#]],
    );
    check(
        &budget(json!({"maxUnavailable": 3}), none.clone()),
        web,
        Ok(4),
        expect![[r#"
        expected=4 desired=1 healthy=2 allowed=1 disrupted=[]
        DisruptionAllowed=True SufficientPods ""
    "#]],
    );
    check(
        &budget(json!({"maxUnavailable": "30%"}), none.clone()),
        web,
        Ok(4),
        expect![[r#"
        expected=4 desired=2 healthy=2 allowed=0 disrupted=[]
        DisruptionAllowed=False InsufficientPods ""
    "#]],
    );
    check(
        &budget(json!({"minAvailable": 0}), none.clone()),
        "",
        Ok(0),
        expect![[r#"
        normal NoPods No matching pods found
        expected=0 desired=0 healthy=0 allowed=0 disrupted=[]
        DisruptionAllowed=False InsufficientPods ""
    "#]],
    );
    check(
        &budget(json!({"maxUnavailable": 1}), none),
        "a ready bare | b ready",
        Ok(1),
        expect![[r#"
        warn UnmanagedPods Pods selected by this PodDisruptionBudget (selector: &LabelSelector{MatchLabels:map[string]string{app: web,},MatchExpressions:[]LabelSelectorRequirement{},}) were found to be unmanaged. As a result, the status of the PDB cannot be calculated correctly, which may result in undefined behavior. To account for these pods please set ".spec.minAvailable" field of the PDB to an integer value.
        expected=1 desired=0 healthy=2 allowed=2 disrupted=[]
        DisruptionAllowed=True SufficientPods ""
    "#]],
    );
}

#[test]
fn pending_evictions_count_until_timeout() {
    let status = json!({"disruptedPods": {
        "a": "2026-01-01T11:59:00Z", "b": "2026-01-01T11:57:59Z", "c": "2026-01-01T11:59:30Z", "gone": "2026-01-01T11:59:30Z"}});
    let budget = budget(json!({"minAvailable": 1}), status);
    check(
        &budget,
        "a ready | b ready | c ending | d ready",
        Ok(0),
        expect![[r#"
        warn b Pod was expected by PDB d/d to be deleted but it wasn't
        requeue at 2026-01-01T12:01:00Z
        expected=4 desired=1 healthy=2 allowed=1 disrupted=["a"]
        DisruptionAllowed=True SufficientPods ""
    "#]],
    );
}

#[test]
fn unknown_scale_allows_no_disruption() {
    let status = json!({"expectedPods": 3, "desiredHealthy": 1, "currentHealthy": 3, "disruptionsAllowed": 2, "observedGeneration": 1});
    let budget = budget(json!({"maxUnavailable": 1}), status);
    check(
        &budget,
        "a ready",
        Err("found no controllers for pod \"a\""),
        expect![[r#"
        warn CalculateExpectedPodCountFailed Failed to calculate the number of expected pods: found no controllers for pod "a"
        expected=3 desired=1 healthy=3 allowed=0 disrupted=[]
        DisruptionAllowed=False SyncFailed "found no controllers for pod \"a\""
    "#]],
    );
}

#[test]
fn stale_disruption_condition_expires() {
    let pod_with_condition = |reason: &str, phase: &str| {
        let mark = json!({"type": DISRUPTION_TARGET, "status": "True", "reason": reason, "lastTransitionTime": "2026-01-01T12:00:00Z"});
        serde_json::from_value::<Pod>(
            json!({"metadata": {}, "status": {"phase": phase, "conditions": [mark]}}),
        )
        .expect("a pod")
    };
    let until = now() + DELETION_TIMEOUT;
    assert_eq!(stale_at(&pod_with_condition("EvictionByEvictionAPI", "Running")), Some(until));
    assert_eq!(stale_at(&pod_with_condition("TerminationByKubelet", "Running")), None);
    assert_eq!(stale_at(&pod_with_condition("EvictionByEvictionAPI", "Failed")), None);
    assert_eq!(stale_at(&pod("a ready")), None);
}

proptest! {
    /// Allowed disruptions never leave fewer healthy pods than desired, and the plan is idempotent.
    #[test]
    fn allowed_disruptions_keep_desired_healthy(
        words in prop::collection::vec(prop_oneof![Just("ready"), Just(""), Just("ending"), Just("bare ready")], 0..8),
        size in 0..8_i32,
        spec in prop_oneof![
            (0..8_i32).prop_map(|n| json!({"minAvailable": n})),
            (0..8_i32).prop_map(|n| json!({"maxUnavailable": n})),
            (0..=100_i32).prop_map(|n| json!({"minAvailable": format!("{n}%")})),
            (0..=100_i32).prop_map(|n| json!({"maxUnavailable": format!("{n}%")})),
        ],
    ) {
        let pods: Vec<_> = words.iter().enumerate().map(|(i, word)| pod(&format!("p{i} {word}"))).collect();
        let mut budget = budget(spec, Value::Null);
        let controller_scale = || Ok(ControllerScale::from([("s".to_owned(), size)]));
        for action in plan(&budget.clone(), &pods, controller_scale(), now()) {
            if let Action::WriteStatus(status) = action {
                budget.status = Some(*status);
            }
        }
        let status = budget.status.clone().expect("a status");
        let allowed = status.disruptions_allowed.expect("a number");
        let (healthy, desired) = (status.current_healthy.expect("a number"), status.desired_healthy.expect("a number"));
        prop_assert!(allowed >= 0 && (allowed == 0 || healthy - allowed >= desired));
        let again = plan(&budget, &pods, controller_scale(), now());
        prop_assert!(!again.iter().any(|action| matches!(action, Action::WriteStatus(_))));
    }
}
