use expect_test::{Expect, expect};
use jiff::Timestamp;
use serde_json::{Value, json};

use super::*;
use crate::test_cluster::{TestCluster, wait_for};

fn typed<T: serde::de::DeserializeOwned>(value: Value) -> T {
    serde_json::from_value(value).expect("an object")
}

fn slice(generation: i64, taints: Value) -> Arc<ResourceSlice> {
    Arc::new(typed(json!({"metadata": {"name": format!("s{generation}")}, "spec": {
        "driver": "d", "pool": {"name": "p", "generation": generation, "resourceSliceCount": 1},
        "devices": [{"name": "gpu", "taints": taints}],
    }})))
}

fn claim(user: &str, tolerations: Value) -> Arc<ResourceClaim> {
    let device =
        json!({"request": "r", "driver": "d", "pool": "p", "device": "gpu", "tolerations": tolerations});
    Arc::new(typed(json!({"metadata": {"name": "c", "namespace": "ns"}, "spec": {}, "status": {
        "allocation": {"devices": {"results": [device]}},
        "reservedFor": [{"resource": "pods", "name": "p", "uid": user}],
    }})))
}

#[track_caller]
fn check(claim: &Arc<ResourceClaim>, slices: &[Arc<ResourceSlice>], expected: Expect) {
    let pod: Pod = typed(json!({"metadata": {"name": "p", "namespace": "ns", "uid": "u"}}));
    let now: Timestamp = "2026-01-01T01:00:00Z".parse().expect("a time");
    let at = plan::eviction_time(&pod, std::slice::from_ref(claim), slices, now);
    expected.assert_eq(&at.map_or("stays".into(), |at| at.to_string()));
}

#[test]
fn eviction_time_follows_device_taints() {
    let taint = |effect: &str| json!([{"key": "bad", "effect": effect, "timeAdded": "2026-01-01T00:00:00Z"}]);
    let tainted = slice(1, taint("NoExecute"));
    let tolerates = |seconds: Value| {
        claim(
            "u",
            json!([{"key": "bad", "operator": "Exists", "effect": "NoExecute", "tolerationSeconds": seconds}]),
        )
    };
    check(&claim("u", json!([])), std::slice::from_ref(&tainted), expect!["2026-01-01T00:00:00Z"]);
    check(&claim("u", json!([])), &[slice(1, taint("NoSchedule"))], expect!["stays"]);
    check(&claim("v", json!([])), std::slice::from_ref(&tainted), expect!["stays"]);
    check(&tolerates(json!(7200)), std::slice::from_ref(&tainted), expect!["2026-01-01T02:00:00Z"]);
    check(&tolerates(json!(null)), std::slice::from_ref(&tainted), expect!["stays"]);
    // Slices of an older pool generation are ignored.
    check(&claim("u", json!([])), &[tainted, slice(2, json!([]))], expect!["stays"]);
    let without_time_added = slice(1, json!([{"key": "bad", "effect": "NoExecute"}]));
    check(&claim("u", json!([])), &[without_time_added], expect!["2026-01-01T01:00:00Z"]);
}

#[tokio::test]
async fn deletes_pod_of_tainted_device() {
    let test_cluster = TestCluster::start(&["device-taint-eviction-controller"]).await;
    let send = async |method: http::Method, path: &str, object: Value| {
        test_cluster.client.request(method, path, Some(&object)).await.expect("an object")
    };
    let pod = send(
        http::Method::POST,
        "/api/v1/namespaces/default/pods",
        json!({"metadata": {"name": "p"}, "spec": {
            "nodeName": "n", "containers": [{"name": "c", "image": "i"}],
            "resourceClaims": [{"name": "gpu", "resourceClaimName": "c"}],
        }}),
    )
    .await;
    let request = json!({"name": "r", "exactly": {"deviceClassName": "gpu"}});
    let path = "/apis/resource.k8s.io/v1/namespaces/default/resourceclaims";
    let spec = json!({"devices": {"requests": [request]}});
    let mut claim = send(http::Method::POST, path, json!({"metadata": {"name": "c"}, "spec": spec})).await;
    claim["status"] = json!({
        "allocation": {"devices": {"results": [{"request": "r", "driver": "d.io", "pool": "p", "device": "gpu"}]}},
        "reservedFor": [{"resource": "pods", "name": "p", "uid": pod["metadata"]["uid"]}],
    });
    send(http::Method::PUT, &format!("{path}/c/status"), claim).await;
    let slice = json!({"metadata": {"name": "s"}, "spec": {
        "driver": "d.io", "nodeName": "n", "pool": {"name": "p", "generation": 1, "resourceSliceCount": 1},
        "devices": [{"name": "gpu", "taints": [{"key": "bad", "effect": "NoExecute"}]}],
    }});
    send(http::Method::POST, "/apis/resource.k8s.io/v1/resourceslices", slice).await;
    let deleting = || async {
        let pod: Pod = test_cluster.client.get(&Key::new("default", "p")).await.ok()?;
        let condition = pod::condition(&pod, "DisruptionTarget")?;
        (pod.is_deleting() && condition.reason.as_deref() == Some("DeletionByDeviceTaintManager"))
            .then_some(())
    };
    wait_for("deletion of the pod", deleting).await;
}
