use expect_test::{Expect, expect};
use serde_json::Value;

use crate::testing::test_cluster;

const CLUSTER: &str = r#"
    node a zone=z1
    node b zone=z1
    node c zone=z2
    node x
    {"kind":"Namespace","metadata":{"name":"default","labels":{"team":"one"}}}
    {"kind":"Namespace","metadata":{"name":"other","labels":{"team":"two"}}}
    pod a1 on=a label=app=web
    pod c1 on=c ns=other label=app=db"#;

const ZONE: &str = "topology.kubernetes.io/zone";
const HOST: &str = "kubernetes.io/hostname";

fn term(key: &str, app: &str, more: &str) -> String {
    format!(r#"{{"topologyKey":"{key}","labelSelector":{{"matchLabels":{{"app":"{app}"}}}}{more}}}"#)
}

fn pod(label: &str, kind: &str, when: &str, terms: &[String]) -> String {
    format!(
        r#"pod p label={label} {{"spec":{{"affinity":{{"{kind}":{{"{when}DuringSchedulingIgnoredDuringExecution":[{}]}}}}}}}}"#,
        terms.join(",")
    )
}

#[track_caller]
fn filter(more: &str, pod: &str, expected: Expect) {
    let plugin = super::make(&Value::Null).unwrap();
    expected.assert_eq(&test_cluster(&format!("{CLUSTER}\n{more}")).filter(&plugin, pod));
}

#[track_caller]
fn score(more: &str, pod: &str, expected: Expect) {
    let plugin = super::make(&Value::Null).unwrap();
    expected.assert_eq(&test_cluster(&format!("{CLUSTER}\n{more}")).score(&plugin, pod));
}

#[test]
fn required_affinity_filters_topology_domains() {
    filter("", "pod p", expect!["skip\n"]);
    filter(
        "",
        &pod("app=x", "podAffinity", "required", &[term(ZONE, "web", "")]),
        expect![[r#"
            a: ok
            b: ok
            c: never, node(s) didn't match pod affinity rules
            x: never, node(s) didn't match pod affinity rules
        "#]],
    );
    // Both terms must be satisfied by the same pod.
    filter(
        "",
        &pod("app=x", "podAffinity", "required", &[term(ZONE, "web", ""), term(HOST, "web", "")]),
        expect![[r#"
            a: ok
            b: never, node(s) didn't match pod affinity rules
            c: never, node(s) didn't match pod affinity rules
            x: never, node(s) didn't match pod affinity rules
        "#]],
    );
}

#[test]
fn affinity_matches_namespaces_by_name_and_label() {
    for namespaces in [
        r#","namespaces":["other"]"#,
        r#","namespaceSelector":{"matchLabels":{"team":"two"}}"#,
        r#","namespaceSelector":{}"#,
    ] {
        filter(
            "",
            &pod("app=x", "podAffinity", "required", &[term(ZONE, "db", namespaces)]),
            expect![[r#"
                a: never, node(s) didn't match pod affinity rules
                b: never, node(s) didn't match pod affinity rules
                c: ok
                x: never, node(s) didn't match pod affinity rules
            "#]],
        );
    }
    // Without namespaces the pod's own namespace is used: it has no matching pod, and the pod does not match
    // itself.
    filter(
        "",
        &pod("app=x", "podAffinity", "required", &[term(ZONE, "db", "")]),
        expect![[r#"
            a: never, node(s) didn't match pod affinity rules
            b: never, node(s) didn't match pod affinity rules
            c: never, node(s) didn't match pod affinity rules
            x: never, node(s) didn't match pod affinity rules
        "#]],
    );
}

#[test]
fn first_pod_of_group_matching_own_affinity_is_schedulable() {
    filter(
        "",
        &pod("app=new", "podAffinity", "required", &[term(ZONE, "new", "")]),
        expect![[r#"
            a: ok
            b: ok
            c: ok
            x: never, node(s) didn't match pod affinity rules
        "#]],
    );
}

#[test]
fn required_anti_affinity_rejects_topology_domain() {
    filter(
        "",
        &pod("app=x", "podAntiAffinity", "required", &[term(ZONE, "web", "")]),
        expect![[r#"
            a: no, node(s) didn't match pod anti-affinity rules
            b: no, node(s) didn't match pod anti-affinity rules
            c: ok
            x: ok
        "#]],
    );
}

#[test]
fn existing_anti_affinity_rejects_topology_domain() {
    let existing = pod("app=hater", "podAntiAffinity", "required", &[term(ZONE, "web", "")])
        .replace("pod p", "pod hater on=c");
    filter(
        &existing,
        "pod p label=app=web",
        expect![[r#"
            a: ok
            b: ok
            c: no, node(s) didn't satisfy existing pods anti-affinity rules
            x: ok
        "#]],
    );
    filter(&existing, "pod p label=app=db", expect!["skip\n"]);
}

#[test]
fn scores_preferences_of_incoming_and_existing_pods() {
    score("", "pod p label=app=web", expect!["skip\n"]);
    let weighted = |weight: i32, term: String| format!(r#"{{"weight":{weight},"podAffinityTerm":{term}}}"#);
    score(
        "",
        &pod("app=x", "podAffinity", "preferred", &[weighted(10, term(ZONE, "web", ""))]),
        expect![[r#"
            a: 10 -> 100
            b: 10 -> 100
            c: 0 -> 0
            x: 0 -> 0
        "#]],
    );
    score(
        "",
        &pod("app=x", "podAntiAffinity", "preferred", &[weighted(10, term(HOST, "web", ""))]),
        expect![[r#"
            a: -10 -> 0
            b: 0 -> 100
            c: 0 -> 100
            x: 0 -> 100
        "#]],
    );
    // A pod on c prefers affinity to web (weight 4), one on b prefers anti-affinity (3), one on a requires
    // affinity (1).
    let affinity_pod = pod("app=f", "podAffinity", "preferred", &[weighted(4, term(HOST, "web", ""))])
        .replace("pod p", "pod f on=c");
    let anti_affinity_pod =
        pod("app=g", "podAntiAffinity", "preferred", &[weighted(3, term(HOST, "web", ""))])
            .replace("pod p", "pod g on=b");
    let required_affinity_pod =
        pod("app=h", "podAffinity", "required", &[term(HOST, "web", "")]).replace("pod p", "pod h on=a");
    score(
        &[affinity_pod, anti_affinity_pod, required_affinity_pod].join("\n"),
        "pod p label=app=web",
        expect![[r#"
            a: 1 -> 57
            b: -3 -> 0
            c: 4 -> 100
            x: 0 -> 42
        "#]],
    );
}

#[test]
fn rejects_invalid_label_selector() {
    let broken =
        r#"pod p {"spec":{"affinity":{"podAffinity":{"requiredDuringSchedulingIgnoredDuringExecution":[
        {"topologyKey":"z","labelSelector":{"matchExpressions":[{"key":"a","operator":"Like"}]}}]}}}}"#
            .replace('\n', " ");
    filter(
        "",
        &broken,
        expect![[r#"
            reject never, parsing pod: requiredAffinityTerms: "Like" is not a valid label selector operator
        "#]],
    );
}
