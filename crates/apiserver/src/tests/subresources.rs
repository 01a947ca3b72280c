use api::json::JsonExt as _;
use serde_json::{Value, json};

use super::{TestServer, summary};

const PODS: &str = "/api/v1/namespaces/default/pods";
const MERGE_PATCH: &str = "application/merge-patch+json";

async fn pod(test_server: &TestServer, name: &str) -> Value {
    let pod = json!({
        "metadata": {"name": name, "labels": {"app": "a"}},
        "spec": {"containers": [{"name": "c", "image": "i"}]},
    });
    test_server.send(&format!("POST {PODS}"), pod).await.1
}

fn binding(name: &str) -> Value {
    json!({"metadata": {"name": name}, "target": {"kind": "Node", "name": "node-1"}})
}

#[tokio::test]
async fn pod_can_be_bound_once() {
    let test_server = TestServer::start().await;
    let before = pod(&test_server, "p").await;
    let bind = format!("POST {PODS}/p/binding");
    #[track_caller]
    fn check(answer: (u16, Value), expected: &str) {
        assert_eq!(summary(&answer, &["status"]), expected);
    }
    check(
        test_server.send(&bind, binding("q")).await,
        "400 name in URL does not match name in Binding object",
    );
    let without_node = json!({"metadata": {"name": "p"}, "target": {"kind": "Node"}});
    check(test_server.send(&bind, without_node).await, "500 target.name: Required value");
    check(test_server.send(&format!("{bind}?dryRun=All"), binding("p")).await, "201 Success");
    check(test_server.send(&bind, binding("p")).await, "201 Success");
    check(
        test_server.send("POST /api/v1/namespaces/default/bindings", binding("p")).await,
        "409 Operation cannot be fulfilled on pods/binding \"p\": pod p is already assigned to node \"node-1\"",
    );
    let after = test_server.get(&format!("{PODS}/p")).await;
    assert_eq!(after.at("metadata").at("generation"), before.at("metadata").at("generation"));
    assert_eq!(after.at("metadata").at("managedFields"), before.at("metadata").at("managedFields"));
    assert_eq!(after.at("status").items("conditions")[0].text("type"), "PodScheduled");
}

#[tokio::test]
async fn eviction_follows_disruption_budget() {
    let test_server = TestServer::start().await;
    let budgets = "/apis/policy/v1/namespaces/default/poddisruptionbudgets";
    let budget = json!({
        "metadata": {"name": "b"},
        "spec": {"minAvailable": 1, "selector": {"matchLabels": {"app": "a"}}},
    });
    test_server.send(&format!("POST {budgets}"), budget).await;
    pod(&test_server, "p").await;
    test_server.send(&format!("POST {PODS}/p/binding"), binding("p")).await;
    let ready = json!({"status": {"phase": "Running", "conditions": [{"type": "Ready", "status": "True"}]}});
    test_server.call(&format!("PATCH {PODS}/p/status"), MERGE_PATCH, &ready.to_string()).await;
    let evict = format!("POST {PODS}/p/eviction");
    let eviction = json!({"metadata": {"name": "p"}});
    let rejected = test_server.send(&evict, eviction.clone()).await;
    assert_eq!(
        summary(&rejected, &[]),
        "429 Cannot evict pod as it would violate the pod's disruption budget."
    );
    let allowed = json!({"status": {"observedGeneration": 1, "disruptionsAllowed": 1, "currentHealthy": 2,
        "desiredHealthy": 1, "expectedPods": 2}});
    let status =
        test_server.call(&format!("PATCH {budgets}/b/status"), MERGE_PATCH, &allowed.to_string()).await;
    assert_eq!(status.0, 200, "{}", status.1);
    let dry = test_server.send(&format!("{evict}?dryRun=All"), eviction.clone()).await;
    assert_eq!(summary(&dry, &["status"]), "201 Success");
    assert!(!test_server.get(&format!("{PODS}/p")).await.at("metadata").has("deletionTimestamp"));
    let done = test_server.send(&evict, eviction).await;
    assert_eq!(summary(&done, &["status"]), "201 Success");
    let pod = test_server.get(&format!("{PODS}/p")).await;
    assert!(pod.at("metadata").has("deletionTimestamp"));
    let conditions = pod.at("status").items("conditions");
    assert!(conditions.iter().any(|condition| condition.text("type") == "DisruptionTarget"), "{pod}");
    let budget = test_server.get(&format!("{budgets}/b")).await;
    assert_eq!(budget.at("status").int("disruptionsAllowed"), Some(0));
    assert!(budget.path("status.disruptedPods").has("p"));
}

#[tokio::test]
async fn scale_updates_replicas() {
    let test_server = TestServer::start().await;
    let deployments = "/apis/apps/v1/namespaces/default/deployments";
    let labels = json!({"app": "a"});
    let deployment = json!({
        "metadata": {"name": "d"},
        "spec": {"selector": {"matchLabels": labels}, "template": {"metadata": {"labels": labels},
            "spec": {"containers": [{"name": "c", "image": "i"}]}}},
    });
    test_server.send(&format!("POST {deployments}"), deployment).await;
    let path = format!("{deployments}/d/scale");
    let mut scale = test_server.get(&path).await;
    assert_eq!((scale.text("kind"), scale.path("spec.replicas")), ("Scale", &json!(1)));
    scale["spec"]["replicas"] = json!(3);
    let answer = test_server.send(&format!("PUT {path}"), scale.clone()).await;
    assert_eq!(summary(&answer, &["spec.replicas", "status.selector"]), "200 3 app=a");
    let stale = test_server.send(&format!("PUT {path}"), scale).await;
    assert_eq!(stale.0, 409);
    let patched = test_server.call(&format!("PATCH {path}"), MERGE_PATCH, r#"{"spec":{"replicas":2}}"#).await;
    assert_eq!(summary(&patched, &["spec.replicas"]), "200 2");
    let deployment = test_server.get(&format!("{deployments}/d")).await;
    assert_eq!(deployment.path("metadata.generation"), &json!(3));
}
