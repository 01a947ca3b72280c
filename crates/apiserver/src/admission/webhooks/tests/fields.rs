//! Contents of reviews, and for which requests they are sent.

use super::*;

/// The last review with variable fields replaced.
fn normalized_review(test: &WebhookTest) -> String {
    let mut received = test.hook.requests().last().unwrap().clone();
    for pointer in ["/request/uid", "/request/object/metadata/uid", "/request/oldObject/metadata/uid"] {
        if let Some(uid) = received.body.pointer_mut(pointer) {
            assert_eq!(uid.as_str().map(str::len), Some(36), "{pointer}");
            *uid = "UID".into();
        }
    }
    for object in ["object", "oldObject"] {
        let metadata = received.body.pointer_mut(&format!("/request/{object}/metadata"));
        let Some(metadata) = metadata.and_then(Value::as_object_mut) else { continue };
        metadata.remove("managedFields");
        for key in ["creationTimestamp", "resourceVersion"] {
            if metadata.contains_key(key) {
                metadata.insert(key.into(), "…".into());
            }
        }
    }
    received.body.to_string()
}

#[tokio::test(flavor = "multi_thread")]
async fn review_contains_all_fields() {
    let test = WebhookTest::start(|received| answer(received, json!({"auditAnnotations": {"k": "v"}}))).await;
    let hook = test.webhook("v.example.com", rule("*", "core", "v1", "configmaps,namespaces"));
    test.configure("Validating", "v", json!([hook])).await;
    let (_, recorder) =
        test.send(&format!("{CONFIG_MAPS}?fieldManager=me&dryRun=All"), config_map("a")).await;
    assert_eq!(recorder.annotations()["v.example.com/k"], "v");
    expect_test::expect![[r#"{"apiVersion":"admission.k8s.io/v1","kind":"AdmissionReview","request":{"dryRun":true,"kind":{"group":"","kind":"ConfigMap","version":"v1"},"name":"a","namespace":"default","object":{"apiVersion":"v1","data":{"a":"b"},"kind":"ConfigMap","metadata":{"creationTimestamp":"…","name":"a","namespace":"default","uid":"UID"}},"oldObject":null,"operation":"CREATE","options":{"apiVersion":"meta.k8s.io/v1","dryRun":["All"],"fieldManager":"me","kind":"CreateOptions"},"requestKind":{"group":"","kind":"ConfigMap","version":"v1"},"requestResource":{"group":"","resource":"configmaps","version":"v1"},"resource":{"group":"","resource":"configmaps","version":"v1"},"uid":"UID","userInfo":{"extra":{"k":["v"]},"groups":["system:masters"],"uid":"u-1","username":"alice"}}}"#]]
    .assert_eq(&normalized_review(&test));
    test.send(CONFIG_MAPS, config_map("a")).await;
    test.send("PATCH /api/v1/namespaces/default/configmaps/a", json!({"data": {"a": null}})).await;
    expect_test::expect![[r#"{"apiVersion":"admission.k8s.io/v1","kind":"AdmissionReview","request":{"dryRun":false,"kind":{"group":"","kind":"ConfigMap","version":"v1"},"name":"a","namespace":"default","object":{"apiVersion":"v1","kind":"ConfigMap","metadata":{"creationTimestamp":"…","name":"a","namespace":"default","resourceVersion":"…","uid":"UID"}},"oldObject":{"apiVersion":"v1","data":{"a":"b"},"kind":"ConfigMap","metadata":{"creationTimestamp":"…","name":"a","namespace":"default","resourceVersion":"…","uid":"UID"}},"operation":"UPDATE","options":{"apiVersion":"meta.k8s.io/v1","kind":"UpdateOptions"},"requestKind":{"group":"","kind":"ConfigMap","version":"v1"},"requestResource":{"group":"","resource":"configmaps","version":"v1"},"resource":{"group":"","resource":"configmaps","version":"v1"},"uid":"UID","userInfo":{"extra":{"k":["v"]},"groups":["system:masters"],"uid":"u-1","username":"alice"}}}"#]]
    .assert_eq(&normalized_review(&test));
    test.send("DELETE /api/v1/namespaces/default/configmaps/a", json!({"propagationPolicy": "Foreground"}))
        .await;
    expect_test::expect![[r#"{"apiVersion":"admission.k8s.io/v1","kind":"AdmissionReview","request":{"dryRun":false,"kind":{"group":"","kind":"ConfigMap","version":"v1"},"name":"a","namespace":"default","object":null,"oldObject":{"apiVersion":"v1","kind":"ConfigMap","metadata":{"creationTimestamp":"…","name":"a","namespace":"default","resourceVersion":"…","uid":"UID"}},"operation":"DELETE","options":{"apiVersion":"meta.k8s.io/v1","kind":"DeleteOptions","propagationPolicy":"Foreground"},"requestKind":{"group":"","kind":"ConfigMap","version":"v1"},"requestResource":{"group":"","resource":"configmaps","version":"v1"},"resource":{"group":"","resource":"configmaps","version":"v1"},"uid":"UID","userInfo":{"extra":{"k":["v"]},"groups":["system:masters"],"uid":"u-1","username":"alice"}}}"#]]
    .assert_eq(&normalized_review(&test));
    // The namespace of a Namespace is its own name.
    test.send("POST /api/v1/namespaces", json!({"metadata": {"name": "new"}})).await;
    let received = test.hook.requests().last().unwrap().body["request"].clone();
    assert_eq!((&received["name"], &received["namespace"]), (&json!("new"), &json!("new")));
}

#[tokio::test(flavor = "multi_thread")]
async fn generated_name_is_unset_for_mutating_webhooks() {
    let test = WebhookTest::start(|received| answer(received, json!({}))).await;
    let hook = test.webhook("x.example.com", rule("CREATE", "core", "v1", "configmaps"));
    test.configure("Mutating", "m", json!([hook.clone()])).await;
    test.configure("Validating", "v", json!([hook])).await;
    test.send(CONFIG_MAPS, json!({"metadata": {"generateName": "g-"}})).await;
    let names: Vec<bool> =
        test.hook.requests().iter().map(|received| received.body["request"].get("name").is_some()).collect();
    assert_eq!(names, [false, true]);
}

#[tokio::test(flavor = "multi_thread")]
async fn reviews_subresources_connections_and_equivalent_versions() {
    let test = WebhookTest::start(|received| answer(received, json!({}))).await;
    let rules = json!([
        rule("*", "apps", "v1", "deployments/scale"),
        rule("CONNECT", "core", "v1", "pods/attach,pods/exec"),
        rule("CREATE", "core", "v1", "pods/binding,pods/eviction,serviceaccounts/token"),
        rule("CREATE", "autoscaling", "v1", "horizontalpodautoscalers"),
        rule("DELETE", "core", "v1", "configmaps"),
        rule("CREATE", "authorization.k8s.io", "v1", "selfsubjectaccessreviews"),
    ]);
    let mut hook = test.webhook("v.example.com", match_all_rule());
    hook["rules"] = rules;
    test.configure("Validating", "v", json!([hook])).await;
    let seen = |paths: &[&str]| {
        let received = test.hook.requests();
        let review = &received.last().unwrap().body;
        paths
            .iter()
            .map(|path| review.pointer(&format!("/request/{path}")).cloned().unwrap_or_default().to_string())
            .collect::<Vec<_>>()
            .join(" ")
    };
    let kinds = [
        "kind/group",
        "kind/version",
        "kind/kind",
        "resource/resource",
        "subResource",
        "operation",
        "object/kind",
        "oldObject/kind",
        "options/kind",
    ];

    let template =
        json!({"metadata": {"labels": {"a": "b"}}, "spec": {"containers": [{"name": "c", "image": "i"}]}});
    let deployment = json!({"metadata": {"name": "d"}, "spec": {"replicas": 1, "selector": {"matchLabels": {"a": "b"}}, "template": template}});
    let (created, _) = test.send("POST /apis/apps/v1/namespaces/default/deployments", deployment).await;
    assert_eq!(created.0, 201, "{}", created.1);
    test.send("PATCH /apis/apps/v1/namespaces/default/deployments/d/scale", json!({"spec": {"replicas": 3}}))
        .await;
    expect_test::expect![[
        r#""autoscaling" "v1" "Scale" "deployments" "scale" "UPDATE" "Scale" "Scale" "UpdateOptions""#
    ]]
    .assert_eq(&seen(&kinds));
    assert_eq!(seen(&["object/spec", "oldObject/spec"]), r#"{"replicas":3} {"replicas":1}"#);

    let pod = json!({"metadata": {"name": "p"}, "spec": template["spec"]});
    test.send("POST /api/v1/namespaces/default/pods", pod).await;
    let attach = "/api/v1/namespaces/default/pods/p/attach?stdin=true&container=c";
    test.send(&format!("GET {attach}"), json!(null)).await;
    expect_test::expect![[
        r#""" "v1" "PodAttachOptions" "pods" "attach" "CONNECT" "PodAttachOptions" null null"#
    ]]
    .assert_eq(&seen(&kinds));
    assert_eq!(
        seen(&["object", "name", "options"]),
        r#"{"apiVersion":"v1","container":"c","kind":"PodAttachOptions","stdin":true} "p" null"#
    );

    let node = json!({"metadata": {"name": "p"}, "target": {"kind": "Node", "name": "n"}});
    test.send("POST /api/v1/namespaces/default/pods/p/binding", node).await;
    expect_test::expect![[r#""" "v1" "Binding" "pods" "binding" "CREATE" "Binding" null "CreateOptions""#]]
        .assert_eq(&seen(&kinds));
    let eviction = json!({"apiVersion": "policy/v1", "kind": "Eviction", "metadata": {"name": "p"}});
    test.send("POST /api/v1/namespaces/default/pods/p/eviction", eviction).await;
    expect_test::expect![[
        r#""policy" "v1" "Eviction" "pods" "eviction" "CREATE" "Eviction" null "CreateOptions""#
    ]]
    .assert_eq(&seen(&kinds));
    test.send("POST /api/v1/namespaces/default/serviceaccounts/default/token", json!({"spec": {}})).await;
    expect_test::expect![[r#""authentication.k8s.io" "v1" "TokenRequest" "serviceaccounts" "token" "CREATE" "TokenRequest" null "CreateOptions""#]].assert_eq(&seen(&kinds));
    let review = json!({"spec": {"resourceAttributes": {"verb": "get", "resource": "pods"}}});
    test.send("POST /apis/authorization.k8s.io/v1/selfsubjectaccessreviews", review).await;
    assert_eq!(seen(&["kind/kind"]), r#""SelfSubjectAccessReview""#);

    let target = json!({"apiVersion": "apps/v1", "kind": "Deployment", "name": "d"});
    let hpa = json!({"metadata": {"name": "h"}, "spec": {"maxReplicas": 3, "scaleTargetRef": target}});
    let (created, _) =
        test.send("POST /apis/autoscaling/v2/namespaces/default/horizontalpodautoscalers", hpa).await;
    assert_eq!(created.0, 201, "{}", created.1);
    assert_eq!(
        seen(&["kind/version", "resource/version", "requestKind/version", "object/apiVersion"]),
        r#""v1" "v1" "v2" "autoscaling/v1""#
    );

    for name in ["a", "b"] {
        test.send(CONFIG_MAPS, config_map(name)).await;
    }
    let before = test.hook.requests().len();
    test.send("DELETE /api/v1/namespaces/default/configmaps", json!({})).await;
    let names: Vec<_> =
        test.hook.requests()[before..].iter().map(|received| received.body["request"].clone()).collect();
    assert!(names.len() >= 2 && names.iter().all(|request| request.get("name").is_none()), "{names:?}");
}

#[tokio::test(flavor = "multi_thread")]
async fn calls_webhooks_only_for_matching_requests() {
    let test = WebhookTest::start(|received| answer(received, json!({"allowed": false}))).await;
    let labels = json!({"team": "red"});
    test.test_server
        .send("POST /api/v1/namespaces", json!({"metadata": {"name": "red", "labels": labels}}))
        .await;
    let check = async |hook: Value, request: &str, object: Value, expected: bool| {
        let mut whole = test.webhook("v.example.com", rule("CREATE", "core", "v1", "configmaps"));
        for (key, value) in hook.as_object().unwrap() {
            whole[key] = value.clone();
        }
        test.configure("Validating", "v", json!([whole])).await;
        let found = test.send_summary(request, object).await;
        assert_eq!(found.contains("denied the request"), expected, "{hook} {request}: {found}");
        let path = "DELETE /apis/admissionregistration.k8s.io/v1/validatingwebhookconfigurations/v";
        assert_eq!(test.test_server.send(path, json!({})).await.0, 200);
        test.wait_for_cache().await;
    };
    let red = "POST /api/v1/namespaces/red/configmaps?dryRun=All";
    let plain = "POST /api/v1/namespaces/default/configmaps?dryRun=All";
    let select = json!({"matchLabels": labels});
    check(json!({}), plain, config_map("a"), true).await;
    check(json!({"namespaceSelector": select}), plain, config_map("a"), false).await;
    check(json!({"namespaceSelector": select}), red, config_map("a"), true).await;
    check(json!({"objectSelector": select}), red, config_map("a"), false).await;
    let labeled = json!({"metadata": {"name": "a", "labels": labels}});
    check(json!({"objectSelector": select}), plain, labeled.clone(), true).await;
    let scoped = |scope: &str| {
        let mut rule = rule("*", "*", "*", "*");
        rule["scope"] = scope.into();
        json!({"rules": [rule]})
    };
    check(scoped("Cluster"), plain, config_map("a"), false).await;
    check(scoped("Namespaced"), plain, config_map("a"), true).await;
    let new = "POST /api/v1/namespaces?dryRun=All";
    check(scoped("Cluster"), new, json!({"metadata": {"name": "n"}}), true).await;
    check(scoped("Namespaced"), new, json!({"metadata": {"name": "n"}}), false).await;
    // The selector matches the new labels of the namespace, not the stored ones.
    let namespaces = json!({"rules": [rule("*", "core", "v1", "namespaces")], "namespaceSelector": select});
    check(namespaces.clone(), new, json!({"metadata": {"name": "n", "labels": labels}}), true).await;
    check(namespaces, new, json!({"metadata": {"name": "n"}}), false).await;
    let exact = json!({"rules": [rule("*", "autoscaling", "v1", "*")], "matchPolicy": "Exact"});
    let target = json!({"apiVersion": "apps/v1", "kind": "Deployment", "name": "d"});
    let hpa = json!({"metadata": {"name": "h"}, "spec": {"maxReplicas": 3, "scaleTargetRef": target}});
    let hpa_path = "POST /apis/autoscaling/v2/namespaces/default/horizontalpodautoscalers?dryRun=All";
    check(exact, hpa_path, hpa, false).await;
    check(json!({"rules": [rule("UPDATE", "core", "v1", "configmaps")]}), plain, config_map("a"), false)
        .await;
    check(json!({"rules": [rule("*", "core", "v1", "configmaps/*")]}), plain, config_map("a"), true).await;
    check(
        json!({"rules": [rule("*", "core", "v2", "*")], "matchPolicy": "Exact"}),
        plain,
        config_map("a"),
        false,
    )
    .await;
    // Requests for webhook configurations are not subject to webhooks.
    let own = "POST /apis/admissionregistration.k8s.io/v1/mutatingwebhookconfigurations?dryRun=All";
    check(json!({"rules": [match_all_rule()]}), own, json!({"metadata": {"name": "x"}}), false).await;
}

#[tokio::test(flavor = "multi_thread")]
async fn supports_v1beta1_reviews() {
    let test = WebhookTest::start(|received| {
        let (code, mut body) =
            answer(received, patch(json!([{"op": "add", "path": "/data/x", "value": "y"}])));
        // v1beta1 responses are not verified.
        body["response"]["uid"] = "whatever".into();
        body["response"].as_object_mut().unwrap().remove("patchType");
        (code, body)
    })
    .await;
    let mut hook = test.webhook("m.example.com", rule("CREATE", "core", "v1", "configmaps"));
    hook["admissionReviewVersions"] = json!(["v2", "v1beta1", "v1"]);
    test.configure("Mutating", "m", json!([hook])).await;
    let ((code, created), _) = test.send(CONFIG_MAPS, config_map("a")).await;
    assert_eq!((code, &created["data"]["x"]), (201, &json!("y")), "{created}");
    assert_eq!(test.hook.requests()[0].body["apiVersion"], "admission.k8s.io/v1beta1");
}

#[tokio::test(flavor = "multi_thread")]
async fn match_conditions_select_requests() {
    let test = WebhookTest::start(|received| answer(received, json!({"allowed": false}))).await;
    let check = async |expressions: &[&str], policy: &str, expected: &str| {
        let mut hook = test.webhook("v.example.com", rule("CREATE", "core", "v1", "configmaps"));
        let conditions = expressions
            .iter()
            .enumerate()
            .map(|(i, text)| json!({"name": format!("c{i}"), "expression": text}));
        hook["matchConditions"] = conditions.collect();
        hook["failurePolicy"] = policy.into();
        test.configure("Validating", "v", json!([hook])).await;
        let found = test.send_summary(&format!("{CONFIG_MAPS}?dryRun=All"), config_map("a")).await;
        assert_eq!(
            found.replace(
                "400 admission webhook \"v.example.com\" denied the request without explanation",
                "asked"
            ),
            expected,
            "{expressions:?}"
        );
        let path = "DELETE /apis/admissionregistration.k8s.io/v1/validatingwebhookconfigurations/v";
        assert_eq!(test.test_server.send(path, json!({})).await.0, 200);
        test.wait_for_cache().await;
    };
    check(&["object.metadata.name == 'a'"], "Fail", "asked").await;
    check(&["object.metadata.name == 'a'", "request.userInfo.username != 'alice'"], "Fail", "201").await;
    check(&["request.operation == 'CREATE' && request.dryRun && oldObject == null"], "Fail", "asked").await;
    check(
        &["request.resource.resource == 'configmaps' && 'system:masters' in request.userInfo.groups"],
        "Fail",
        "asked",
    )
    .await;
    check(
        &["authorizer.group('').resource('pods').namespace('x').check('delete').allowed()"],
        "Fail",
        "asked",
    )
    .await;
    check(&["authorizer.requestResource.check('create').allowed()"], "Fail", "asked").await;
    let error = "403 configmaps \"a\" is forbidden: expression 'object.spec.x == 1' resulted in error: no such key: spec";
    check(&["object.spec.x == 1"], "Fail", error).await;
    check(&["object.spec.x == 1"], "Ignore", "201").await;
    // A false condition takes precedence over errors.
    check(&["object.spec.x == 1", "false"], "Fail", "201").await;
    let mut out = String::new();
    test.test_server.server.webhooks.print(&mut out);
    for line in [
        "apiserver_admission_match_condition_exclusions_total{kind=\"webhook\",name=\"v.example.com\",operation=\"CREATE\",type=\"validating\"} 2",
        "apiserver_admission_match_condition_evaluation_errors_total{kind=\"webhook\",name=\"v.example.com\",operation=\"CREATE\",type=\"validating\"} 2",
    ] {
        assert!(out.lines().any(|found| found == line), "{line}\n{out}");
    }
}
