use expect_test::{Expect, expect};
use serde_json::{Value, json};

use crate::testing::test_cluster;

const CLUSTER: &str = "
    node a zone=z1
    node b zone=z1
    node c zone=z2
    node x
    pod a1 on=a label=app=web
    pod a2 on=a label=app=web
    pod b1 on=b label=app=web
    pod c1 on=c label=app=web
    pod c2 on=c label=app=db
    pod c3 on=c label=app=web leaving
    pod other ns=other on=c label=app=web";

fn constraint(key: &str, skew: i32, action: &str, more: &str) -> String {
    format!(
        r#"{{"topologyKey":"{key}","maxSkew":{skew},"whenUnsatisfiable":"{action}",
            "labelSelector":{{"matchLabels":{{"app":"web"}}}}{more}}}"#
    )
}

fn pod(label: &str, constraints: &[String], spec: &str) -> String {
    format!(
        r#"pod p label={label} {{"spec":{{"topologySpreadConstraints":[{}]{spec}}}}}"#,
        constraints.join(",")
    )
}

#[track_caller]
fn filter(cluster: &str, pod: &str, expected: Expect) {
    let plugin = super::make(&Value::Null).unwrap();
    expected.assert_eq(&test_cluster(cluster).filter(&plugin, pod));
}

#[track_caller]
fn score(cluster: &str, pod: &str, expected: Expect) {
    let plugin = super::make(&Value::Null).unwrap();
    expected.assert_eq(&test_cluster(cluster).score(&plugin, pod));
}

const ZONE: &str = "topology.kubernetes.io/zone";
const HOST: &str = "kubernetes.io/hostname";

#[test]
fn enforces_max_skew_between_zones() {
    filter(CLUSTER, "pod p", expect!["skip\n"]);
    // z1 has 3, z2 has 1 (one is terminating, one in another namespace): 3+1-1 > 1, 1+1-1 <= 1.
    filter(
        CLUSTER,
        &pod("app=web", &[constraint(ZONE, 1, "DoNotSchedule", "")], ""),
        expect![[r#"
            a: no, node(s) didn't match pod topology spread constraints
            b: no, node(s) didn't match pod topology spread constraints
            c: ok
            x: never, node(s) didn't match pod topology spread constraints (missing required label)
        "#]],
    );
    // With maxSkew 3 both zones fit. A pod that does not match its own selector adds nothing.
    filter(
        CLUSTER,
        &pod("app=web", &[constraint(ZONE, 3, "DoNotSchedule", "")], ""),
        expect![[r#"
            a: ok
            b: ok
            c: ok
            x: never, node(s) didn't match pod topology spread constraints (missing required label)
        "#]],
    );
    filter(
        CLUSTER,
        &pod("app=db", &[constraint(ZONE, 2, "DoNotSchedule", "")], ""),
        expect![[r#"
            a: ok
            b: ok
            c: ok
            x: never, node(s) didn't match pod topology spread constraints (missing required label)
        "#]],
    );
}

#[test]
fn min_domains_counts_missing_domains_as_empty() {
    // minDomains 3 but only two zones: the minimum is 0, so 1+1-0 > 1 in z2, too.
    filter(
        CLUSTER,
        &pod("app=web", &[constraint(ZONE, 1, "DoNotSchedule", r#","minDomains":3"#)], ""),
        expect![[r#"
            a: no, node(s) didn't match pod topology spread constraints
            b: no, node(s) didn't match pod topology spread constraints
            c: no, node(s) didn't match pod topology spread constraints
            x: never, node(s) didn't match pod topology spread constraints (missing required label)
        "#]],
    );
}

#[test]
fn enforces_multiple_constraints() {
    // Nodes without a zone count for neither constraint. Hosts: a 2, b 1, c 1.
    filter(
        CLUSTER,
        &pod(
            "app=web",
            &[constraint(ZONE, 3, "DoNotSchedule", ""), constraint(HOST, 1, "DoNotSchedule", "")],
            "",
        ),
        expect![[r#"
            a: no, node(s) didn't match pod topology spread constraints
            b: ok
            c: ok
            x: never, node(s) didn't match pod topology spread constraints (missing required label)
        "#]],
    );
}

#[test]
fn skips_nodes_excluded_by_node_policies() {
    let cluster = "
        node a zone=z1 label=pool=x
        node b zone=z2 label=pool=x
        node c zone=z3 taint=k=v:NoSchedule
        pod a1 on=a label=app=web
        pod b1 on=b label=app=web";
    let selected = r#","nodeSelector":{"pool":"x"}"#;
    // z3 is excluded by the node selector, so the minimum is 1.
    filter(
        cluster,
        &pod("app=web", &[constraint(ZONE, 1, "DoNotSchedule", "")], selected),
        expect![[r#"
            a: ok
            b: ok
            c: ok
        "#]],
    );
    // Unless nodeAffinityPolicy is Ignore.
    let ignore_affinity_policy = r#","nodeAffinityPolicy":"Ignore""#;
    filter(
        cluster,
        &pod("app=web", &[constraint(ZONE, 1, "DoNotSchedule", ignore_affinity_policy)], selected),
        expect![[r#"
            a: no, node(s) didn't match pod topology spread constraints
            b: no, node(s) didn't match pod topology spread constraints
            c: ok
        "#]],
    );
    // With nodeTaintsPolicy Honor z3 is excluded again.
    let taints_policy = r#","nodeTaintsPolicy":"Honor""#;
    filter(
        cluster,
        &pod("app=web", &[constraint(ZONE, 1, "DoNotSchedule", taints_policy)], ""),
        expect![[r#"
            a: ok
            b: ok
            c: ok
        "#]],
    );
}

#[test]
fn applies_match_label_keys() {
    let cluster = "
        node a zone=z1
        node b zone=z2
        pod a1 on=a label=app=web label=rev=1
        pod b1 on=b label=app=web label=rev=2";
    let with_match_label_keys = constraint(ZONE, 1, "DoNotSchedule", r#","matchLabelKeys":["rev"]"#);
    filter(
        cluster,
        &format!(
            r#"pod p label=app=web label=rev=2 {{"spec":{{"topologySpreadConstraints":[{with_match_label_keys}]}}}}"#
        ),
        expect![[r#"
            a: ok
            b: no, node(s) didn't match pod topology spread constraints
        "#]],
    );
}

#[test]
fn domain_with_less_matching_pods_has_best_score() {
    // Zones: the node without the label is ignored, so the weight is ln(2+2) = 1.386: z1 3*1.386 = 4.16 -> 4,
    // z2 1.386 -> 1. Normalized 100*(4+1-s)/4.
    score(
        CLUSTER,
        &pod("app=web", &[constraint(ZONE, 1, "ScheduleAnyway", "")], ""),
        expect![[r#"
            a: 4 -> 25
            b: 4 -> 25
            c: 1 -> 100
            x: 0 -> 0
        "#]],
    );
    score(CLUSTER, "pod p label=app=web", expect!["skip\n"]);
}

#[test]
fn applies_default_constraints_to_service_pods() {
    let cluster = format!(
        "{CLUSTER}\n{}",
        r#"{"kind":"Service","metadata":{"name":"web","namespace":"default"},"spec":{"selector":{"app":"web"}}}"#
    );
    // Hosts: ln(4+2)=1.792 times 2,1,1,0 plus 2; zones: ln(3+2)=1.609 (z1, z2, none) times 3,3,1 plus 4.
    // a 3.58+2+4.83+4 = 14.41, b 1.79+2+4.83+4 = 12.62, c 1.79+2+1.61+4 = 9.40, x 2.
    score(
        &cluster,
        "pod p label=app=web",
        expect![[r#"
            a: 14 -> 14
            b: 13 -> 21
            c: 9 -> 50
            x: 2 -> 100
        "#]],
    );
}

#[test]
fn rejects_invalid_arguments() {
    let listed = json!({"defaultConstraints": [{"topologyKey": "z", "maxSkew": 1, "whenUnsatisfiable": "DoNotSchedule"}]});
    assert_eq!(
        super::make(&listed).err().as_deref(),
        Some("defaultingType: when .defaultingType is System, it must be empty")
    );
}
