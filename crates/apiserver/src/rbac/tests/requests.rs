//! Whole requests of users who are not masters.

use api::Status;
use expect_test::{Expect, expect};
use serde_json::{Value, json};

use super::user;
use crate::access::{self, Asks};
use crate::rbac::{ensure_defaults, keep_aggregated};
use crate::request::{Route, route, verb};
use crate::tests::{Rig, brief};

async fn check(rig: &Rig, who: &str, request: &str, expected: Expect) {
    let (method, path) = request.split_once(' ').expect("a method and a path");
    let route = route(&rig.server.registry, path).expect("a route");
    let asks = match &route {
        Route::Resource(target) => {
            Asks::Resource(verb(&method.parse().expect("a method"), target, false), target, &target.name)
        }
        _ => Asks::Path(method, path),
    };
    let answer = access::authorize(&rig.server.rbac, &user(who), &asks);
    expected.assert_eq(&answer.map_or_else(|status: Status| status.message, |()| "may".to_owned()));
}

async fn review(rig: &Rig, who: &str, groups: &[&str], attributes: Value) -> String {
    let spec = json!({"user": who, "groups": groups, "resourceAttributes": attributes});
    let review =
        json!({"apiVersion": "authorization.k8s.io/v1", "kind": "SubjectAccessReview", "spec": spec});
    let answer = rig.send("POST /apis/authorization.k8s.io/v1/subjectaccessreviews", review).await;
    brief(&answer, &["status.allowed", "status.reason"])
}

#[tokio::test]
async fn requests_are_decided_by_the_roles_in_the_store() {
    let rig = Rig::start().await;
    ensure_defaults(&rig.server).await.expect("the default policy");
    check(&rig, "jo", "GET /apis/apps", expect![[r#"may"#]]).await;
    check(&rig, "system:anonymous", "GET /livez", expect![[r#"may"#]]).await;
    check(
        &rig,
        "system:anonymous",
        "GET /apis",
        expect![[r#"forbidden: User "system:anonymous" cannot get path "/apis""#]],
    )
    .await;
    check(&rig, "jo", "GET /api/v1/nodes", expect![[r#"nodes is forbidden: User "jo" cannot list resource "nodes" in API group "" at the cluster scope"#]]).await;
    check(&rig, "jo", "GET /apis/apps/v1/namespaces/x/deployments", expect![[r#"deployments.apps is forbidden: User "jo" cannot list resource "deployments" in API group "apps" in the namespace "x""#]]).await;
    check(&rig, "jo", "GET /api/v1/namespaces/x", expect![[r#"namespaces "x" is forbidden: User "jo" cannot get resource "namespaces" in API group "" in the namespace "x""#]]).await;
    check(&rig, "jo system:masters", "GET /api/v1/secrets", expect![[r#"may"#]]).await;
    let binding = json!({
        "metadata": {"name": "jo"}, "subjects": [{"kind": "User", "name": "jo", "apiGroup": "rbac.authorization.k8s.io"}],
        "roleRef": {"apiGroup": "rbac.authorization.k8s.io", "kind": "ClusterRole", "name": "view"},
    });
    let path = "/apis/rbac.authorization.k8s.io/v1/namespaces/default/rolebindings";
    let made = rig.send(&format!("POST {path}"), binding).await;
    assert_eq!(brief(&made, &["metadata.name"]), "201 jo");
    let aggregator = tokio::spawn(keep_aggregated(rig.server.clone(), rig.stop.subscribe()));
    let mut news = rig.server.shard(crate::rbac::row("clusterroles")).subscribe();
    // The role is put together from others first.
    while rig.server.rbac.rules_of("", "admin").is_none_or(|rules| rules.len() < 20) {
        news.changed().await.expect("more changes");
    }
    check(&rig, "jo", "GET /api/v1/namespaces/default/pods", expect![[r#"may"#]]).await;
    check(&rig, "jo", "GET /api/v1/namespaces/default", expect![[r#"may"#]]).await;
    check(&rig, "jo", "GET /api/v1/namespaces/default/secrets", expect![[r#"secrets is forbidden: User "jo" cannot list resource "secrets" in API group "" in the namespace "default""#]]).await;
    let pods = json!({"verb": "list", "resource": "pods", "namespace": "default"});
    let answers = [
        review(&rig, "jo", &[], pods.clone()).await,
        review(&rig, "al", &[], pods.clone()).await,
        review(&rig, "al", &["system:masters"], pods).await,
    ];
    expect![[r#"
        201 true RBAC: allowed by RoleBinding "jo/default" of ClusterRole "view" to User "jo"
        201 false null
        201 true null"#]]
    .assert_eq(&answers.join("\n"));
    aggregator.abort();
}

#[tokio::test]
async fn the_policy_is_repaired_at_start_unless_told_otherwise() {
    let rig = Rig::start().await;
    ensure_defaults(&rig.server).await.expect("the default policy");
    let before = rig.server.cache.revision();
    ensure_defaults(&rig.server).await.expect("the default policy");
    assert_eq!(rig.server.cache.revision(), before, "nothing to repair, nothing written");
    let path = "/apis/rbac.authorization.k8s.io/v1/clusterroles";
    for (name, annotations) in [
        ("system:basic-user", json!({})),
        ("system:discovery", json!({"rbac.authorization.kubernetes.io/autoupdate": "false"})),
    ] {
        let patch = json!({"rules": [], "metadata": {"annotations": annotations}});
        let patch = patch.to_string();
        let answer = rig.call(&format!("PATCH {path}/{name}"), "application/merge-patch+json", &patch).await;
        assert_eq!(brief(&answer, &["rules"]), "200 null");
    }
    ensure_defaults(&rig.server).await.expect("the default policy");
    assert_ne!(rig.get(&format!("{path}/system:basic-user")).await["rules"], Value::Null);
    assert_eq!(rig.get(&format!("{path}/system:discovery")).await["rules"], Value::Null);
}
