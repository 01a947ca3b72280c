//! What webhooks change.

use super::*;

/// Appends a letter of the webhook's name to a field, so that the order shows.
fn append(asked: &Asked) -> (u16, Value) {
    let name = asked.path.trim_start_matches('/').split('.').next().unwrap().to_owned();
    let so_far = asked.body["request"]["object"]["data"]["trace"].as_str().unwrap_or("").to_owned();
    if name == "quiet" {
        return answer(asked, json!({}));
    }
    let op = json!([{"op": "add", "path": "/data/trace", "value": format!("{so_far}{name}")}]);
    answer(asked, patch(op))
}

async fn trace(stage: &Stage) -> String {
    let ((code, made), _) = stage.send(&format!("{CONFIG_MAPS}?dryRun=All"), config_map("a")).await;
    assert_eq!(code, 201, "{made}");
    made["data"]["trace"].as_str().unwrap_or("").to_owned()
}

#[tokio::test(flavor = "multi_thread")]
async fn they_are_asked_by_name_and_some_again() {
    let stage = Stage::start(append).await;
    let hook = |name: &str, again: bool| {
        let mut hook =
            stage.webhook(&format!("{name}.example.com"), rule("CREATE", "core", "v1", "configmaps"));
        hook["reinvocationPolicy"] = if again { "IfNeeded" } else { "Never" }.into();
        hook
    };
    stage.configure("Mutating", "2", json!([hook("c", false)])).await;
    stage.configure("Mutating", "1", json!([hook("a", false), hook("b", false)])).await;
    assert_eq!(trace(&stage).await, "abc");
    stage.configure("Mutating", "0", json!([hook("x", true), hook("y", true)])).await;
    // Both get another look since others have changed something after them; the others do not want one.
    assert_eq!(trace(&stage).await, "xyabcxy");
    stage.configure("Mutating", "3", json!([hook("z", true)])).await;
    // The last one is only asked again if something changed after it, which is for the second round to show.
    assert_eq!(trace(&stage).await, "xyabczxyz");
    let (_, remarks) = stage.send(&format!("{CONFIG_MAPS}?dryRun=All"), config_map("a")).await;
    let keys: Vec<String> =
        remarks.annotations().into_keys().filter(|key| key.starts_with("patch.")).collect();
    assert_eq!(keys.len(), 9, "{keys:?}");
    assert_eq!(keys.last().unwrap(), "patch.webhook.admission.k8s.io/round_1_index_5");
}

#[tokio::test(flavor = "multi_thread")]
async fn what_is_changed_is_checked_and_completed() {
    let stage = Stage::start(|asked| {
        let op = match asked.body["request"]["object"]["metadata"]["name"].as_str().unwrap() {
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
                    asked,
                    json!({"patchType": "JSONPatch", "patch": STANDARD.encode("nonsense")}),
                );
            }
            "untyped" => return answer(asked, json!({"patch": "W10="})),
            "merge" => return answer(asked, json!({"patchType": "MergePatch", "patch": "W10="})),
            _ => json!([{"op": "add", "path": "/metadata/labels", "value": {"l": "x"}}]),
        };
        answer(asked, patch(op))
    })
    .await;
    let hook = stage.webhook("m.example.com", rule("CREATE", "core", "v1", "pods"));
    stage.configure("Mutating", "m", json!([hook])).await;
    let pods = "POST /api/v1/namespaces/default/pods?dryRun=All";
    let pod = |name: &str| json!({"metadata": {"name": name}, "spec": {"containers": [{"name": "c", "image": "i"}]}});
    let check =
        async |name: &str, expected: &str| assert_eq!(stage.brief(pods, pod(name)).await, expected, "{name}");
    let ((_, made), _) = stage.send(pods, pod("sidecar")).await;
    let sidecar = &made["spec"]["containers"][1];
    assert_eq!(
        (&sidecar["imagePullPolicy"], &sidecar["terminationMessagePath"]),
        (&json!("IfNotPresent"), &json!("/dev/termination-log"))
    );
    // What plugins do to containers is done to those of webhooks as well.
    assert_eq!(sidecar["volumeMounts"][0]["mountPath"], "/var/run/secrets/kubernetes.io/serviceaccount");
    let ((_, made), _) = stage.send(pods, pod("labels")).await;
    assert_eq!(made["metadata"]["labels"], json!({"l": "x"}));
    check("empty", "201").await;
    let internal = |why: &str| format!("500 Internal error occurred: {why}");
    check("nowhere", &internal(&nowhere(pod("nowhere")))).await;
    check(
        "shapeless",
        &internal("json: cannot unmarshal string into Go struct field Pod.spec of type v1.PodSpec"),
    )
    .await;
    let found = stage.brief(pods, pod("invalid")).await;
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
    let calling = "failed calling webhook \"m.example.com\": ";
    let found = stage.brief(pods, pod("huge")).await;
    assert!(found.contains(calling) && found.ends_with("http: response body too large"), "{found}");
    let found = stage.brief(pods, pod("long")).await;
    assert!(found.starts_with("422 Pod \"long\" is invalid: metadata.annotations: Too long"), "{found}");
    let received = format!("{calling}received invalid webhook response: ");
    check(
        "untyped",
        &internal(&format!("{received}webhook returned response.patch but not response.patchType")),
    )
    .await;
    check("merge", &internal(&format!("{calling}unsupported patch type \"MergePatch\""))).await;
    let undecodable = "received undecodable patch in webhook response: invalid character 'o' in literal null (expecting 'u')";
    check("text", &internal(&format!("{calling}{undecodable}"))).await;
}

/// The word on a path that is not there.
fn nowhere(mut pod: Value) -> String {
    patch::json_patch(&mut pod, &json!([{"op": "remove", "path": "/spec/nothing"}])).unwrap_err().to_string()
}

#[tokio::test(flavor = "multi_thread")]
async fn changes_through_subresources_and_none_to_deletions() {
    let stage = Stage::start(|asked| {
        let request = &asked.body["request"];
        let op = match request["subResource"].as_str() {
            Some("scale") => json!([{"op": "replace", "path": "/spec/replicas", "value": 2}]),
            Some("token") => json!([{"op": "add", "path": "/spec/audiences", "value": ["else"]}]),
            _ => json!([{"op": "add", "path": "/metadata/labels", "value": {"l": "x"}}]),
        };
        answer(asked, patch(op))
    })
    .await;
    let mut hook = stage.webhook("m.example.com", everything());
    hook["rules"] = json!([
        rule("UPDATE", "apps", "v1", "deployments/scale"),
        rule("CREATE", "core", "v1", "serviceaccounts/token"),
        rule("DELETE", "core", "v1", "configmaps"),
        rule("CREATE", "autoscaling", "v1", "horizontalpodautoscalers"),
        rule("CONNECT", "core", "v1", "pods/attach"),
    ]);
    stage.configure("Mutating", "m", json!([hook])).await;
    let template =
        json!({"metadata": {"labels": {"a": "b"}}, "spec": {"containers": [{"name": "c", "image": "i"}]}});
    let deployment = json!({"metadata": {"name": "d"}, "spec": {"replicas": 1, "selector": {"matchLabels": {"a": "b"}}, "template": template}});
    stage.send("POST /apis/apps/v1/namespaces/default/deployments", deployment).await;
    let ((code, scale), _) = stage
        .send("PATCH /apis/apps/v1/namespaces/default/deployments/d/scale", json!({"spec": {"replicas": 9}}))
        .await;
    assert_eq!((code, &scale["spec"]["replicas"]), (200, &json!(2)), "{scale}");
    let ((_, token), _) = stage
        .send("POST /api/v1/namespaces/default/serviceaccounts/default/token", json!({"spec": {}}))
        .await;
    assert_eq!(token["spec"]["audiences"], json!(["else"]), "{token}");
    // A webhook that wants the old version changes the new one all the same.
    let target = json!({"apiVersion": "apps/v1", "kind": "Deployment", "name": "d"});
    let hpa = json!({"metadata": {"name": "h"}, "spec": {"maxReplicas": 3, "scaleTargetRef": target}});
    let ((_, made), _) =
        stage.send("POST /apis/autoscaling/v2/namespaces/default/horizontalpodautoscalers", hpa).await;
    assert_eq!(
        (&made["apiVersion"], &made["metadata"]["labels"]),
        (&json!("autoscaling/v2"), &json!({"l": "x"}))
    );
    stage.send(CONFIG_MAPS, config_map("a")).await;
    let refused = "500 Internal error occurred: admission webhook \"m.example.com\" attempted to modify the object, which is not supported for this operation";
    assert_eq!(stage.brief("DELETE /api/v1/namespaces/default/configmaps/a", json!({})).await, refused);
    stage
        .send(
            "POST /api/v1/namespaces/default/pods",
            json!({"metadata": {"name": "p"}, "spec": template["spec"]}),
        )
        .await;
    assert_eq!(stage.brief("GET /api/v1/namespaces/default/pods/p/attach", json!(null)).await, refused);
}
