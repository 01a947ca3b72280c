use api::json::Json as _;
use serde_json::{Value, json};

use super::{Rig, brief};

const PODS: &str = "/api/v1/namespaces/default/pods";
const STATUS: &str = "application/merge-patch+json";

async fn pod(rig: &Rig, name: &str) -> Value {
    let pod = json!({
        "metadata": {"name": name, "labels": {"app": "a"}},
        "spec": {"containers": [{"name": "c", "image": "i"}]},
    });
    rig.send(&format!("POST {PODS}"), pod).await.1
}

fn binding(name: &str) -> Value {
    json!({"metadata": {"name": name}, "target": {"kind": "Node", "name": "node-1"}})
}

#[tokio::test]
async fn bindings() {
    let rig = Rig::start().await;
    let before = pod(&rig, "p").await;
    let bind = format!("POST {PODS}/p/binding");
    #[track_caller]
    fn check(answer: (u16, Value), expected: &str) {
        assert_eq!(brief(&answer, &["status"]), expected);
    }
    check(rig.send(&bind, binding("q")).await, "400 name in URL does not match name in Binding object");
    let nowhere = json!({"metadata": {"name": "p"}, "target": {"kind": "Node"}});
    check(rig.send(&bind, nowhere).await, "500 target.name: Required value");
    check(rig.send(&format!("{bind}?dryRun=All"), binding("p")).await, "201 Success");
    check(rig.send(&bind, binding("p")).await, "201 Success");
    check(
        rig.send("POST /api/v1/namespaces/default/bindings", binding("p")).await,
        "409 Operation cannot be fulfilled on pods/binding \"p\": pod p is already assigned to node \"node-1\"",
    );
    let after = rig.get(&format!("{PODS}/p")).await;
    assert_eq!(after.at("metadata").at("generation"), before.at("metadata").at("generation"));
    assert_eq!(after.at("metadata").at("managedFields"), before.at("metadata").at("managedFields"));
    assert_eq!(after.at("status").items("conditions")[0].text("type"), "PodScheduled");
}

#[tokio::test]
async fn evictions_ask_the_budget() {
    let rig = Rig::start().await;
    let budgets = "/apis/policy/v1/namespaces/default/poddisruptionbudgets";
    let budget = json!({
        "metadata": {"name": "b"},
        "spec": {"minAvailable": 1, "selector": {"matchLabels": {"app": "a"}}},
    });
    rig.send(&format!("POST {budgets}"), budget).await;
    pod(&rig, "p").await;
    rig.send(&format!("POST {PODS}/p/binding"), binding("p")).await;
    let ready = json!({"status": {"phase": "Running", "conditions": [{"type": "Ready", "status": "True"}]}});
    rig.call(&format!("PATCH {PODS}/p/status"), STATUS, &ready.to_string()).await;
    let evict = format!("POST {PODS}/p/eviction");
    let eviction = json!({"metadata": {"name": "p"}});
    let refused = rig.send(&evict, eviction.clone()).await;
    assert_eq!(brief(&refused, &[]), "429 Cannot evict pod as it would violate the pod's disruption budget.");
    let allowed = json!({"status": {"observedGeneration": 1, "disruptionsAllowed": 1, "currentHealthy": 2,
        "desiredHealthy": 1, "expectedPods": 2}});
    let status = rig.call(&format!("PATCH {budgets}/b/status"), STATUS, &allowed.to_string()).await;
    assert_eq!(status.0, 200, "{}", status.1);
    let dry = rig.send(&format!("{evict}?dryRun=All"), eviction.clone()).await;
    assert_eq!(brief(&dry, &["status"]), "201 Success");
    assert!(!rig.get(&format!("{PODS}/p")).await.at("metadata").has("deletionTimestamp"));
    let done = rig.send(&evict, eviction).await;
    assert_eq!(brief(&done, &["status"]), "201 Success");
    let pod = rig.get(&format!("{PODS}/p")).await;
    assert!(pod.at("metadata").has("deletionTimestamp"));
    let conditions = pod.at("status").items("conditions");
    assert!(conditions.iter().any(|condition| condition.text("type") == "DisruptionTarget"), "{pod}");
    let budget = rig.get(&format!("{budgets}/b")).await;
    assert_eq!(budget.at("status").int("disruptionsAllowed"), Some(0));
    assert!(budget.path("status.disruptedPods").has("p"));
}

#[tokio::test]
async fn scales() {
    let rig = Rig::start().await;
    let deployments = "/apis/apps/v1/namespaces/default/deployments";
    let labels = json!({"app": "a"});
    let deployment = json!({
        "metadata": {"name": "d"},
        "spec": {"selector": {"matchLabels": labels}, "template": {"metadata": {"labels": labels},
            "spec": {"containers": [{"name": "c", "image": "i"}]}}},
    });
    rig.send(&format!("POST {deployments}"), deployment).await;
    let path = format!("{deployments}/d/scale");
    let mut scale = rig.get(&path).await;
    assert_eq!((scale.text("kind"), scale.path("spec.replicas")), ("Scale", &json!(1)));
    scale["spec"]["replicas"] = json!(3);
    let answer = rig.send(&format!("PUT {path}"), scale.clone()).await;
    assert_eq!(brief(&answer, &["spec.replicas", "status.selector"]), "200 3 app=a");
    let stale = rig.send(&format!("PUT {path}"), scale).await;
    assert_eq!(stale.0, 409);
    let patched = rig.call(&format!("PATCH {path}"), STATUS, r#"{"spec":{"replicas":2}}"#).await;
    assert_eq!(brief(&patched, &["spec.replicas"]), "200 2");
    let deployment = rig.get(&format!("{deployments}/d")).await;
    assert_eq!(deployment.path("metadata.generation"), &json!(3));
}
