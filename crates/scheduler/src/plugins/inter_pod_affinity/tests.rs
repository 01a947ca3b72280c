use expect_test::{Expect, expect};
use serde_json::Value;

use crate::testing::world;

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
    expected.assert_eq(&world(&format!("{CLUSTER}\n{more}")).filter(&plugin, pod));
}

#[track_caller]
fn score(more: &str, pod: &str, expected: Expect) {
    let plugin = super::make(&Value::Null).unwrap();
    expected.assert_eq(&world(&format!("{CLUSTER}\n{more}")).score(&plugin, pod));
}

#[test]
fn near_those_it_likes() {
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
    // Both terms must hold, by one and the same pod.
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
fn other_namespaces_by_name_and_by_label() {
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
    // Its own namespace if none are said: no such pod there, and it is not one itself.
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
fn the_first_of_its_kind_may_go_anywhere_with_the_label() {
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
fn far_from_those_it_does_not_like() {
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
fn far_from_those_that_do_not_like_it() {
    let hater = pod("app=hater", "podAntiAffinity", "required", &[term(ZONE, "web", "")])
        .replace("pod p", "pod hater on=c");
    filter(
        &hater,
        "pod p label=app=web",
        expect![[r#"
            a: ok
            b: ok
            c: no, node(s) didn't satisfy existing pods anti-affinity rules
            x: ok
        "#]],
    );
    filter(&hater, "pod p label=app=db", expect!["skip\n"]);
}

#[test]
fn preferences_of_both_sides_count() {
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
    // A pod on c prefers web near (4), one on b prefers it far (3), and one on a requires it near (1).
    let friend = pod("app=f", "podAffinity", "preferred", &[weighted(4, term(HOST, "web", ""))])
        .replace("pod p", "pod f on=c");
    let foe = pod("app=g", "podAntiAffinity", "preferred", &[weighted(3, term(HOST, "web", ""))])
        .replace("pod p", "pod g on=b");
    let needs =
        pod("app=h", "podAffinity", "required", &[term(HOST, "web", "")]).replace("pod p", "pod h on=a");
    score(
        &[friend, foe, needs].join("\n"),
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
fn what_cannot_be_understood_is_told() {
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
