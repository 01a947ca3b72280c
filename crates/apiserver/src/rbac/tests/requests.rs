//! End-to-end requests of users outside `system:masters`.

use api::Status;
use api::json::JsonExt as _;
use expect_test::{Expect, expect};
use serde_json::{Value, json};

use super::{aggregated_rules, user};
use crate::access::{self, RequestInfo};
use crate::rbac::ensure_defaults;
use crate::request::{Route, route, verb};
use crate::tests::{TestServer, summary};

async fn check(test_server: &TestServer, subject: &str, request: &str, expected: Expect) {
    let (method, path) = request.split_once(' ').expect("a method and a path");
    let route = route(&test_server.server.registry, path);
    let request_info = match &route {
        Ok(Route::Resource(target)) => RequestInfo::Resource(
            verb(&method.parse().expect("a method"), target, false),
            target,
            &target.name,
            None,
        ),
        _ => RequestInfo::Path(method, path),
    };
    let answer = access::authorize(&test_server.server.rbac, &user(subject), &request_info).await;
    expected.assert_eq(&answer.map_or_else(|status: Status| status.message, |()| "may".to_owned()));
}

async fn review(test_server: &TestServer, subject: &str, groups: &[&str], attributes: Value) -> String {
    let spec = json!({"user": subject, "groups": groups, "resourceAttributes": attributes});
    let review =
        json!({"apiVersion": "authorization.k8s.io/v1", "kind": "SubjectAccessReview", "spec": spec});
    let answer = test_server.send("POST /apis/authorization.k8s.io/v1/subjectaccessreviews", review).await;
    summary(&answer, &["status.allowed", "status.reason"])
}

#[tokio::test]
async fn requests_are_authorized_by_stored_roles() {
    let test_server = TestServer::start().await;
    ensure_defaults(&test_server.server).await.expect("the default policy");
    check(&test_server, "jo", "GET /apis/apps", expect![[r#"may"#]]).await;
    check(&test_server, "system:anonymous", "GET /livez", expect![[r#"may"#]]).await;
    check(
        &test_server,
        "system:anonymous",
        "GET /apis",
        expect![[r#"forbidden: User "system:anonymous" cannot get path "/apis""#]],
    )
    .await;
    check(&test_server, "jo", "GET /api/v1/nodes", expect![[r#"nodes is forbidden: User "jo" cannot list resource "nodes" in API group "" at the cluster scope"#]]).await;
    check(&test_server, "jo", "GET /apis/apps/v1/namespaces/x/deployments", expect![[r#"deployments.apps is forbidden: User "jo" cannot list resource "deployments" in API group "apps" in the namespace "x""#]]).await;
    check(&test_server, "jo", "GET /api/v1/namespaces/x", expect![[r#"namespaces "x" is forbidden: User "jo" cannot get resource "namespaces" in API group "" in the namespace "x""#]]).await;
    check(&test_server, "jo", "GET /apis/acme.com/v1/namespaces/x/nope/y/z", expect![[r#"nope.acme.com "y" is forbidden: User "jo" cannot get resource "nope/z" in API group "acme.com" in the namespace "x""#]]).await;
    check(&test_server, "jo", "GET /api/v1/watch/nope", expect![[r#"nope is forbidden: User "jo" cannot watch resource "nope" in API group "" at the cluster scope"#]]).await;
    check(&test_server, "jo", "DELETE /apis/apps/v1/nope", expect![[r#"nope.apps is forbidden: User "jo" cannot deletecollection resource "nope" in API group "apps" at the cluster scope"#]]).await;
    check(&test_server, "jo", "GET /apis/acme.com/v1", expect![[r#"may"#]]).await;
    check(
        &test_server,
        "jo",
        "POST /apis/acme.com/v1",
        expect![[r#"forbidden: User "jo" cannot post path "/apis/acme.com/v1""#]],
    )
    .await;
    check(&test_server, "jo system:masters", "GET /api/v1/secrets", expect![[r#"may"#]]).await;
    let binding = json!({
        "metadata": {"name": "jo"}, "subjects": [{"kind": "User", "name": "jo", "apiGroup": "rbac.authorization.k8s.io"}],
        "roleRef": {"apiGroup": "rbac.authorization.k8s.io", "kind": "ClusterRole", "name": "view"},
    });
    let path = "/apis/rbac.authorization.k8s.io/v1/namespaces/default/rolebindings";
    let created = test_server.send(&format!("POST {path}"), binding).await;
    assert_eq!(summary(&created, &["metadata.name"]), "201 jo");
    aggregate(&test_server).await;
    check(&test_server, "jo", "GET /api/v1/namespaces/default/pods", expect![[r#"may"#]]).await;
    check(&test_server, "jo", "GET /api/v1/namespaces/default", expect![[r#"may"#]]).await;
    check(&test_server, "jo", "GET /api/v1/namespaces/default/secrets", expect![[r#"secrets is forbidden: User "jo" cannot list resource "secrets" in API group "" in the namespace "default""#]]).await;
    let pods = json!({"verb": "list", "resource": "pods", "namespace": "default"});
    let results = [
        review(&test_server, "jo", &[], pods.clone()).await,
        review(&test_server, "al", &[], pods.clone()).await,
        review(&test_server, "al", &["system:masters"], pods).await,
    ];
    expect![[r#"
        201 true RBAC: allowed by RoleBinding "jo/default" of ClusterRole "view" to User "jo"
        201 false null
        201 true null"#]]
    .assert_eq(&results.join("\n"));
}

/// Does what the clusterrole-aggregation controller does, including roles that aggregate aggregated
/// roles.
async fn aggregate(test_server: &TestServer) {
    let path = "/apis/rbac.authorization.k8s.io/v1/clusterroles";
    for _ in 0..3 {
        let roles = test_server.get(path).await.items("items").to_vec();
        for role in roles.iter().filter(|role| role.has("aggregationRule")) {
            let patch = json!({"rules": aggregated_rules(role, &roles)}).to_string();
            let path = format!("PATCH {path}/{}", role.at("metadata").text("name"));
            assert_eq!(test_server.call(&path, "application/merge-patch+json", &patch).await.0, 200);
        }
    }
}

#[tokio::test]
async fn default_policy_is_updated_at_start_if_enabled() {
    let test_server = TestServer::start().await;
    ensure_defaults(&test_server.server).await.expect("the default policy");
    let before = test_server.server.cache.revision();
    ensure_defaults(&test_server.server).await.expect("the default policy");
    assert_eq!(test_server.server.cache.revision(), before, "nothing to repair, nothing written");
    let path = "/apis/rbac.authorization.k8s.io/v1/clusterroles";
    for (name, annotations) in [
        ("system:basic-user", json!({})),
        ("system:discovery", json!({"rbac.authorization.kubernetes.io/autoupdate": "false"})),
    ] {
        let patch = json!({"rules": [], "metadata": {"annotations": annotations}});
        let patch = patch.to_string();
        let answer =
            test_server.call(&format!("PATCH {path}/{name}"), "application/merge-patch+json", &patch).await;
        assert_eq!(summary(&answer, &["rules"]), "200 null");
    }
    ensure_defaults(&test_server.server).await.expect("the default policy");
    assert_ne!(test_server.get(&format!("{path}/system:basic-user")).await["rules"], Value::Null);
    assert_eq!(test_server.get(&format!("{path}/system:discovery")).await["rules"], Value::Null);
}

/// A write by a user who may write roles but not grant more than they have.
async fn write(test_server: &TestServer, request: &str, body: Value) -> String {
    let media = match request.split_once(' ') {
        Some(("PATCH", rest)) if rest.contains("fieldManager") => "application/apply-patch+yaml",
        Some(("PATCH", _)) => "application/merge-patch+json",
        _ => "application/json",
    };
    summary(&test_server.call_as(user("al"), request, media, &body.to_string()).await, &["metadata.name"])
}

#[tokio::test]
async fn no_write_path_can_grant_more_than_the_user_has() {
    let test_server = TestServer::start().await;
    let group = "rbac.authorization.k8s.io";
    let rule = |verb: &str| json!([{"verbs": [verb], "apiGroups": [""], "resources": ["pods"]}]);
    let role = |name: &str, verb: &str| {
        let api_version = format!("{group}/v1");
        json!({"apiVersion": api_version, "kind": "ClusterRole", "metadata": {"name": name}, "rules": rule(verb)})
    };
    let path = format!("/apis/{group}/v1/clusterroles");
    let subject = json!({"kind": "User", "name": "al", "apiGroup": group});
    let binding = |name: &str, role: &str| {
        let reference = json!({"apiGroup": group, "kind": "ClusterRole", "name": role});
        json!({"metadata": {"name": name}, "subjects": [subject], "roleRef": reference})
    };
    let bindings = format!("/apis/{group}/v1/clusterrolebindings");
    test_server.send(&format!("POST {path}"), role("read", "get")).await;
    test_server.send(&format!("POST {path}"), role("big", "delete")).await;
    let (_, created) = test_server.send(&format!("POST {bindings}"), binding("al", "read")).await;
    let revision = created["metadata"]["resourceVersion"].as_str().and_then(|text| text.parse().ok());
    test_server.server.cache.wait_until_fresh(revision.expect("a version")).await.expect("in the cache");
    let results = [
        write(&test_server, &format!("POST {path}"), role("mine", "get")).await,
        write(&test_server, &format!("POST {path}"), role("more", "create")).await,
        write(&test_server, &format!("POST {path}?dryRun=All"), role("more", "create")).await,
        write(&test_server, &format!("PUT {path}/mine"), role("mine", "create")).await,
        write(&test_server, &format!("PUT {path}/more"), role("more", "create")).await,
        write(&test_server, &format!("PATCH {path}/mine"), json!({"rules": rule("create")})).await,
        write(&test_server, &format!("PATCH {path}/mine?fieldManager=al&force=true"), role("mine", "create"))
            .await,
        write(&test_server, &format!("PATCH {path}/more?fieldManager=al"), role("more", "create")).await,
        write(&test_server, &format!("PATCH {path}/big"), json!({"metadata": {"labels": {"a": "b"}}})).await,
        write(&test_server, &format!("PATCH {path}/big"), json!({"metadata": {"finalizers": ["a.b/c"]}}))
            .await,
        write(&test_server, &format!("POST {bindings}"), binding("ok", "read")).await,
        write(&test_server, &format!("POST {bindings}"), binding("more", "big")).await,
        write(&test_server, &format!("PUT {bindings}/more"), binding("more", "big")).await,
    ];
    expect![[r#"
        201 mine
        403 clusterroles.rbac.authorization.k8s.io "more" is forbidden: user "al" (groups=["system:authenticated"]) is attempting to grant RBAC permissions not currently held:
        {APIGroups:[""], Resources:["pods"], Verbs:["create"]}
        403 clusterroles.rbac.authorization.k8s.io "more" is forbidden: user "al" (groups=["system:authenticated"]) is attempting to grant RBAC permissions not currently held:
        {APIGroups:[""], Resources:["pods"], Verbs:["create"]}
        403 clusterroles.rbac.authorization.k8s.io "mine" is forbidden: user "al" (groups=["system:authenticated"]) is attempting to grant RBAC permissions not currently held:
        {APIGroups:[""], Resources:["pods"], Verbs:["create"]}
        403 clusterroles.rbac.authorization.k8s.io "more" is forbidden: User "al" cannot create resource "clusterroles" in API group "rbac.authorization.k8s.io" at the cluster scope
        403 clusterroles.rbac.authorization.k8s.io "mine" is forbidden: user "al" (groups=["system:authenticated"]) is attempting to grant RBAC permissions not currently held:
        {APIGroups:[""], Resources:["pods"], Verbs:["create"]}
        403 clusterroles.rbac.authorization.k8s.io "mine" is forbidden: user "al" (groups=["system:authenticated"]) is attempting to grant RBAC permissions not currently held:
        {APIGroups:[""], Resources:["pods"], Verbs:["create"]}
        403 clusterroles.rbac.authorization.k8s.io "more" is forbidden: User "al" cannot create resource "clusterroles" in API group "rbac.authorization.k8s.io" at the cluster scope
        403 clusterroles.rbac.authorization.k8s.io "big" is forbidden: user "al" (groups=["system:authenticated"]) is attempting to grant RBAC permissions not currently held:
        {APIGroups:[""], Resources:["pods"], Verbs:["delete"]}
        200 big
        201 ok
        403 clusterrolebindings.rbac.authorization.k8s.io "more" is forbidden: user "al" (groups=["system:authenticated"]) is attempting to grant RBAC permissions not currently held:
        {APIGroups:[""], Resources:["pods"], Verbs:["delete"]}
        403 clusterrolebindings.rbac.authorization.k8s.io "more" is forbidden: User "al" cannot create resource "clusterrolebindings" in API group "rbac.authorization.k8s.io" at the cluster scope"#]].assert_eq(&results.join("\n"));
}

#[tokio::test]
async fn rules_review_lists_rules_of_its_namespace() {
    let test_server = TestServer::start().await;
    ensure_defaults(&test_server.server).await.expect("the default policy");
    let review = |kind: &str, spec: Value| {
        let group = "authorization.k8s.io/v1";
        json!({"apiVersion": group, "kind": kind, "spec": spec}).to_string()
    };
    let rules = "POST /apis/authorization.k8s.io/v1/selfsubjectrulesreviews";
    let body = review("SelfSubjectRulesReview", json!({"namespace": "default"}));
    let answer = test_server.call_as(user("al"), rules, "application/json", &body).await;
    expect![[r#"201 {"incomplete":false,"nonResourceRules":[{"nonResourceURLs":["/api","/api/*","/apis","/apis/*","/healthz","/livez","/openapi","/openapi/*","/readyz","/version","/version/"],"verbs":["get"]},{"nonResourceURLs":["/healthz","/livez","/readyz","/version","/version/"],"verbs":["get"]}],"resourceRules":[{"apiGroups":["authorization.k8s.io"],"resources":["selfsubjectaccessreviews","selfsubjectrulesreviews"],"verbs":["create"]},{"apiGroups":["authentication.k8s.io"],"resources":["selfsubjectreviews"],"verbs":["create"]}]}"#]].assert_eq(&summary(&answer, &["status"]));
    let body = review("SelfSubjectRulesReview", json!({}));
    let answer = test_server.call_as(user("al"), rules, "application/json", &body).await;
    expect!["400 no namespace on request"].assert_eq(&summary(&answer, &["status"]));
    let local = "POST /apis/authorization.k8s.io/v1/namespaces/default/localsubjectaccessreviews";
    let other_namespace = json!({"verb": "get", "resource": "pods", "namespace": "kube-system"});
    let body =
        review("LocalSubjectAccessReview", json!({"user": "bo", "resourceAttributes": other_namespace}));
    let answer = test_server.call_as(user("al"), local, "application/json", &body).await;
    expect![[r#"422 LocalSubjectAccessReview.authorization.k8s.io "" is invalid: spec.resourceAttributes.namespace: Invalid value: "kube-system": must match metadata.namespace"#]].assert_eq(&summary(&answer, &["status"]));
}
