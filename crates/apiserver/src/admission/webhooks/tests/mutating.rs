//! Changes by mutating webhooks.

use super::*;

/// Appends the webhook's letter to a field to record the order of calls.
fn append(received: &WebhookRequest) -> (u16, Value) {
    let name = received.path.trim_start_matches('/').split('.').next().unwrap().to_owned();
    let previous = received.body["request"]["object"]["data"]["trace"].as_str().unwrap_or("").to_owned();
    if name == "quiet" {
        return answer(received, json!({}));
    }
    let op = json!([{"op": "add", "path": "/data/trace", "value": format!("{previous}{name}")}]);
    answer(received, patch(op))
}

async fn trace(test: &WebhookTest) -> String {
    let ((code, created), _) = test.send(&format!("{CONFIG_MAPS}?dryRun=All"), config_map("a")).await;
    assert_eq!(code, 201, "{created}");
    created["data"]["trace"].as_str().unwrap_or("").to_owned()
}

#[tokio::test(flavor = "multi_thread")]
async fn calls_webhooks_in_name_order_with_reinvocation() {
    let test = WebhookTest::start(append).await;
    let hook = |name: &str, reinvoke: bool| {
        let mut hook =
            test.webhook(&format!("{name}.example.com"), rule("CREATE", "core", "v1", "configmaps"));
        hook["reinvocationPolicy"] = if reinvoke { "IfNeeded" } else { "Never" }.into();
        hook
    };
    test.configure("Mutating", "2", json!([hook("c", false)])).await;
    test.configure("Mutating", "1", json!([hook("a", false), hook("b", false)])).await;
    assert_eq!(trace(&test).await, "abc");
    test.configure("Mutating", "0", json!([hook("x", true), hook("y", true)])).await;
    // x and y are called again because a, b and c changed the object after them; those have no
    // reinvocation policy.
    assert_eq!(trace(&test).await, "xyabcxy");
    test.configure("Mutating", "3", json!([hook("z", true)])).await;
    // z is last and only called again because x and y changed the object in the second round.
    assert_eq!(trace(&test).await, "xyabczxyz");
    let (_, recorder) = test.send(&format!("{CONFIG_MAPS}?dryRun=All"), config_map("a")).await;
    let keys: Vec<String> =
        recorder.annotations().into_keys().filter(|key| key.starts_with("patch.")).collect();
    assert_eq!(keys.len(), 9, "{keys:?}");
    assert_eq!(keys.last().unwrap(), "patch.webhook.admission.k8s.io/round_1_index_5");
}

#[tokio::test(flavor = "multi_thread")]
async fn validates_and_defaults_patched_objects() {
    let test = WebhookTest::start(|received| {
        let op = match received.body["request"]["object"]["metadata"]["name"].as_str().unwrap() {
            "sidecar" => {
                json!([{"op": "add", "path": "/spec/containers/-", "value": {"name": "s", "image": "i:1"}}])
            }
            "empty" => json!([]),
            "nowhere" => json!([{"op": "remove", "path": "/spec/nothing"}]),
            "shapeless" => json!([{"op": "replace", "path": "/spec", "value": "text"}]),
            "invalid" => json!([{"op": "replace", "path": "/spec/containers/0/name", "value": "No Name"}]),
            "moved" => json!([{"op": "replace", "path": "/metadata/namespace", "value": "other"}]),
            "many" => (0..10_001).map(|_| json!({"op": "test", "path": "/kind", "value": "Pod"})).collect(),
            "huge" => {
                json!([{"op": "add", "path": "/metadata/annotations", "value": {"a": "x".repeat(6 << 20)}}])
            }
            "long" => {
                json!([{"op": "add", "path": "/metadata/annotations", "value": {"a": "x".repeat(300 << 10)}}])
            }
            "text" => {
                return answer(
                    received,
                    json!({"patchType": "JSONPatch", "patch": STANDARD.encode("nonsense")}),
                );
            }
            "untyped" => return answer(received, json!({"patch": "W10="})),
            "merge" => return answer(received, json!({"patchType": "MergePatch", "patch": "W10="})),
            _ => json!([{"op": "add", "path": "/metadata/labels", "value": {"l": "x"}}]),
        };
        answer(received, patch(op))
    })
    .await;
    let hook = test.webhook("m.example.com", rule("CREATE", "core", "v1", "pods"));
    test.configure("Mutating", "m", json!([hook])).await;
    let pods = "POST /api/v1/namespaces/default/pods?dryRun=All";
    let pod = |name: &str| json!({"metadata": {"name": name}, "spec": {"containers": [{"name": "c", "image": "i"}]}});
    let check = async |name: &str, expected: &str| {
        assert_eq!(test.send_summary(pods, pod(name)).await, expected, "{name}")
    };
    let ((_, created), _) = test.send(pods, pod("sidecar")).await;
    let sidecar = &created["spec"]["containers"][1];
    assert_eq!(
        (&sidecar["imagePullPolicy"], &sidecar["terminationMessagePath"]),
        (&json!("IfNotPresent"), &json!("/dev/termination-log"))
    );
    // Built-in plugins also apply to containers that webhooks add.
    assert_eq!(sidecar["volumeMounts"][0]["mountPath"], "/var/run/secrets/kubernetes.io/serviceaccount");
    let ((_, created), _) = test.send(pods, pod("labels")).await;
    assert_eq!(created["metadata"]["labels"], json!({"l": "x"}));
    check("empty", "201").await;
    let internal = |reason: &str| format!("500 Internal error occurred: {reason}");
    check("nowhere", &internal(&missing_path_error(pod("nowhere")))).await;
    check(
        "shapeless",
        &internal("json: cannot unmarshal string into Go struct field Pod.spec of type v1.PodSpec"),
    )
    .await;
    let found = test.send_summary(pods, pod("invalid")).await;
    assert!(
        found.starts_with(
            "422 Pod \"invalid\" is invalid: spec.containers[0].name: Invalid value: \"No Name\""
        ),
        "{found}"
    );
    check(
        "moved",
        "400 the namespace of the provided object does not match the namespace sent on the request",
    )
    .await;
    check("many", &internal("The allowed maximum operations in a JSON patch is 10000, got 10001")).await;
    let error_prefix = "failed calling webhook \"m.example.com\": ";
    let found = test.send_summary(pods, pod("huge")).await;
    assert!(found.contains(error_prefix) && found.ends_with("http: response body too large"), "{found}");
    let found = test.send_summary(pods, pod("long")).await;
    assert!(found.starts_with("422 Pod \"long\" is invalid: metadata.annotations: Too long"), "{found}");
    let invalid_response = format!("{error_prefix}received invalid webhook response: ");
    check(
        "untyped",
        &internal(&format!("{invalid_response}webhook returned response.patch but not response.patchType")),
    )
    .await;
    check("merge", &internal(&format!("{error_prefix}unsupported patch type \"MergePatch\""))).await;
    let decode_error = "received undecodable patch in webhook response: invalid character 'o' in literal null (expecting 'u')";
    check("text", &internal(&format!("{error_prefix}{decode_error}"))).await;
}

/// The error for a missing path.
fn missing_path_error(mut pod: Value) -> String {
    patch::json_patch(&mut pod, &json!([{"op": "remove", "path": "/spec/nothing"}])).unwrap_err().to_string()
}

#[tokio::test(flavor = "multi_thread")]
async fn patches_subresources_but_not_deleted_objects() {
    let test = WebhookTest::start(|received| {
        let request = &received.body["request"];
        let op = match request["subResource"].as_str() {
            Some("scale") => json!([{"op": "replace", "path": "/spec/replicas", "value": 2}]),
            Some("token") => json!([{"op": "add", "path": "/spec/audiences", "value": ["else"]}]),
            _ => json!([{"op": "add", "path": "/metadata/labels", "value": {"l": "x"}}]),
        };
        answer(received, patch(op))
    })
    .await;
    let mut hook = test.webhook("m.example.com", match_all_rule());
    hook["rules"] = json!([
        rule("UPDATE", "apps", "v1", "deployments/scale"),
        rule("CREATE", "core", "v1", "serviceaccounts/token"),
        rule("DELETE", "core", "v1", "configmaps"),
        rule("CREATE", "autoscaling", "v1", "horizontalpodautoscalers"),
        rule("CONNECT", "core", "v1", "pods/attach"),
    ]);
    test.configure("Mutating", "m", json!([hook])).await;
    let template =
        json!({"metadata": {"labels": {"a": "b"}}, "spec": {"containers": [{"name": "c", "image": "i"}]}});
    let deployment = json!({"metadata": {"name": "d"}, "spec": {"replicas": 1, "selector": {"matchLabels": {"a": "b"}}, "template": template}});
    test.send("POST /apis/apps/v1/namespaces/default/deployments", deployment).await;
    let ((code, scale), _) = test
        .send("PATCH /apis/apps/v1/namespaces/default/deployments/d/scale", json!({"spec": {"replicas": 9}}))
        .await;
    assert_eq!((code, &scale["spec"]["replicas"]), (200, &json!(2)), "{scale}");
    let ((_, token), _) =
        test.send("POST /api/v1/namespaces/default/serviceaccounts/default/token", json!({"spec": {}})).await;
    assert_eq!(token["spec"]["audiences"], json!(["else"]), "{token}");
    // A webhook for the old version also sees and changes the new version.
    let target = json!({"apiVersion": "apps/v1", "kind": "Deployment", "name": "d"});
    let hpa = json!({"metadata": {"name": "h"}, "spec": {"maxReplicas": 3, "scaleTargetRef": target}});
    let ((_, created), _) =
        test.send("POST /apis/autoscaling/v2/namespaces/default/horizontalpodautoscalers", hpa).await;
    assert_eq!(
        (&created["apiVersion"], &created["metadata"]["labels"]),
        (&json!("autoscaling/v2"), &json!({"l": "x"}))
    );
    test.send(CONFIG_MAPS, config_map("a")).await;
    let unsupported = "500 Internal error occurred: admission webhook \"m.example.com\" attempted to modify the object, which is not supported for this operation";
    assert_eq!(
        test.send_summary("DELETE /api/v1/namespaces/default/configmaps/a", json!({})).await,
        unsupported
    );
    test.send(
        "POST /api/v1/namespaces/default/pods",
        json!({"metadata": {"name": "p"}, "spec": template["spec"]}),
    )
    .await;
    assert_eq!(
        test.send_summary("GET /api/v1/namespaces/default/pods/p/attach", json!(null)).await,
        unsupported
    );
}
