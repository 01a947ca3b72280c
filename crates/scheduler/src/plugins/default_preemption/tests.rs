use expect_test::{Expect, expect};

use crate::testing::{default_profile, test_cluster};

#[track_caller]
fn check(cluster: &str, pod: &str, expected: Expect) {
    expected.assert_eq(&test_cluster(cluster).attempt(&default_profile(), pod));
}

#[test]
fn lower_priority_pod_is_preempted() {
    check(
        "
        node a cpu=2
        pod low on=a cpu=1 priority=1
        pod lower on=a cpu=1 priority=0",
        "pod p cpu=1 priority=10",
        expect![[r#"
            0/1 nodes are available: 1 Insufficient cpu.
            preempt lower on a
        "#]],
    );
}

#[test]
fn does_not_preempt_pods_of_equal_priority() {
    check(
        "node a cpu=1\npod x on=a cpu=1 priority=5",
        "pod p cpu=1 priority=5",
        expect![[r#"
            0/1 nodes are available: 1 Insufficient cpu. no new claims to deallocate, preemption: 0/1 nodes are available: 1 No preemption victims found for incoming pod.
        "#]],
    );
    check(
        "node a cpu=1\npod x on=a cpu=1",
        r#"pod p cpu=1 priority=5 {"spec":{"preemptionPolicy":"Never"}}"#,
        expect![[r#"
            0/1 nodes are available: 1 Insufficient cpu. no new claims to deallocate, preemption: not eligible due to preemptionPolicy=Never.
        "#]],
    );
}

#[test]
fn does_not_preempt_when_preemption_cannot_help() {
    check(
        "node a unschedulable\nnode b cpu=1\npod x on=a",
        "pod p cpu=2 priority=5",
        expect![[r#"
            0/2 nodes are available: 1 Insufficient cpu, 1 node(s) were unschedulable. no new claims to deallocate, preemption: 0/2 nodes are available: 2 Preemption is not helpful for scheduling.
        "#]],
    );
}

/// Two nodes with pods: whose pods are preempted?
#[track_caller]
fn check_selected_node(on_a: &str, on_b: &str, expected: Expect) {
    let cluster = format!("node a cpu=2\nnode b cpu=2\n{on_a}\n{on_b}");
    let output = test_cluster(&cluster).attempt(&default_profile(), "pod p cpu=2 priority=100");
    let last = output.lines().last().unwrap_or_default();
    expected.assert_eq(last);
}

#[test]
fn node_with_least_disruption_wins() {
    let budget = r#"{"kind":"PodDisruptionBudget","metadata":{"name":"b","namespace":"default"},"spec":{"selector":{"matchLabels":{"app":"kept"}}},"status":{"disruptionsAllowed":0,"currentHealthy":1,"desiredHealthy":1,"expectedPods":1}}"#;
    // PDB violations count more than priority.
    check_selected_node(
        &format!("pod a on=a cpu=2 label=app=kept priority=1\n{budget}"),
        "pod b on=b cpu=2 priority=50",
        expect!["preempt b on b"],
    );
    // The lowest of the highest priorities.
    check_selected_node(
        "pod a on=a cpu=2 priority=5",
        "pod b on=b cpu=2 priority=6",
        expect!["preempt a on a"],
    );
    // The lowest sum of priorities: one pod of priority 5 rather than two pods.
    check_selected_node(
        "pod a on=a cpu=1 priority=5\npod a2 on=a cpu=1 priority=0",
        "pod b on=b cpu=2 priority=5",
        expect!["preempt b on b"],
    );
    // The latest start time.
    check_selected_node(
        "pod a on=a cpu=2 priority=5 started=2026-01-01T00:00:00Z",
        "pod b on=b cpu=2 priority=5 started=2026-01-02T00:00:00Z",
        expect!["preempt b on b"],
    );
}

#[test]
fn keeps_pods_with_highest_priority() {
    check(
        "
        node a cpu=3
        pod x on=a cpu=1 priority=3
        pod y on=a cpu=1 priority=2
        pod z on=a cpu=1 priority=1",
        "pod p cpu=2 priority=10",
        expect![[r#"
            0/1 nodes are available: 1 Insufficient cpu.
            preempt y z on a
        "#]],
    );
}

#[test]
fn preemption_updates_affinity_and_topology_spread() {
    let anti_affinity = r#"{"spec":{"affinity":{"podAntiAffinity":{"requiredDuringSchedulingIgnoredDuringExecution":[{"topologyKey":"kubernetes.io/hostname","labelSelector":{"matchLabels":{"app":"x"}}}]}}}}"#;
    check(
        "node a\npod x on=a label=app=x",
        &format!("pod p priority=10 {anti_affinity}"),
        expect![[r#"
            0/1 nodes are available: 1 node(s) didn't match pod anti-affinity rules.
            preempt x on a
        "#]],
    );
    let topology_spread = r#"{"spec":{"topologySpreadConstraints":[{"topologyKey":"kubernetes.io/hostname","maxSkew":1,"whenUnsatisfiable":"DoNotSchedule","labelSelector":{"matchLabels":{"app":"x"}}}]}}"#;
    check(
        "node a\nnode b unschedulable\npod x on=a label=app=x\npod y on=a label=app=x",
        &format!("pod p label=app=x priority=10 {topology_spread}"),
        expect![[r#"
            0/2 nodes are available: 1 node(s) didn't match pod topology spread constraints, 1 node(s) were unschedulable.
            preempt x y on a
        "#]],
    );
}

#[test]
fn lower_priority_pod_skips_nominated_node() {
    // A pod of higher priority is nominated to b, so only a fits.
    check(
        "node a cpu=2\nnode b cpu=2\npod x on=a cpu=1\npod big nominated=b cpu=2 priority=50",
        "pod p cpu=1 priority=10",
        expect!["on a\n"],
    );
    check("node b cpu=2\npod big nominated=b cpu=2 priority=5", "pod p cpu=1 priority=10", expect!["on b\n"]);
}
