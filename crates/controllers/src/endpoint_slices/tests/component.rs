//! Tests against a real API server.

use k8s_openapi::api::core::v1::{Endpoints, Pod, Service};
use k8s_openapi::api::discovery::v1::EndpointSlice;
use reconcile::{DeleteOptions, Key, Object, Patch};
use serde_json::{Value, json};

use crate::test_cluster::{TestCluster, wait_for};

async fn create(test_cluster: &TestCluster, path: &str, value: Value) {
    test_cluster.client.request(http::Method::POST, path, Some(&value)).await.expect("an object");
}

async fn pod(test_cluster: &TestCluster, name: &str, ip: &str) {
    let spec = json!({"nodeName": "n", "containers": [{"name": "c", "image": "i", "ports": [{"name": "web", "containerPort": 8080}]}]});
    let value = json!({"metadata": {"name": name, "labels": {"app": "web"}}, "spec": spec});
    create(test_cluster, "/api/v1/namespaces/default/pods", value).await;
    set_ready(test_cluster, name, ip, true).await;
}

async fn set_ready(test_cluster: &TestCluster, name: &str, ip: &str, ready: bool) {
    let ready = if ready { "True" } else { "False" };
    let status = json!({"status": {
        "phase": "Running", "podIP": ip, "podIPs": [{"ip": ip}], "conditions": [{"type": "Ready", "status": ready}],
    }});
    let _: Pod = test_cluster
        .client
        .patch_status(&Key::new("default", name), &Patch::Strategic(status))
        .await
        .expect("a status");
}

/// `ip port ready` of all endpoints of the Service `web`.
async fn rendered_slices(test_cluster: &TestCluster) -> Vec<String> {
    let slices: Vec<EndpointSlice> = test_cluster.client.list("default").await.unwrap_or_default();
    let mut found = Vec::new();
    for slice in slices.iter().filter(|slice| slice.label("kubernetes.io/service-name") == Some("web")) {
        let port = slice.ports.as_deref().unwrap_or_default().first().and_then(|port| port.port).unwrap_or(0);
        for endpoint in slice.endpoints.iter().flatten() {
            let ready = endpoint.conditions.as_ref().and_then(|conditions| conditions.ready);
            found.push(format!("{} {port} {}", endpoint.addresses[0], ready == Some(true)));
        }
    }
    found.sort();
    found
}

async fn rendered_addresses(test_cluster: &TestCluster) -> Option<String> {
    let endpoints: Endpoints = test_cluster.client.get(&Key::new("default", "web")).await.ok()?;
    let mut parts = Vec::new();
    for subset in endpoints.subsets.iter().flatten() {
        let list = |addresses: &Option<Vec<k8s_openapi::api::core::v1::EndpointAddress>>| {
            addresses.iter().flatten().map(|address| address.ip.clone()).collect::<Vec<_>>().join(",")
        };
        parts.push(format!("{}|{}", list(&subset.addresses), list(&subset.not_ready_addresses)));
    }
    Some(parts.join(" "))
}

#[tokio::test]
async fn slices_and_endpoints_follow_pods() {
    let test_cluster = TestCluster::start(&["endpointslice-controller", "endpoints-controller"]).await;
    create(&test_cluster, "/api/v1/nodes", json!({"metadata": {"name": "n"}})).await;
    let spec = json!({"selector": {"app": "web"}, "ports": [{"port": 80, "targetPort": "web"}]});
    create(
        &test_cluster,
        "/api/v1/namespaces/default/services",
        json!({"metadata": {"name": "web"}, "spec": spec}),
    )
    .await;
    create(&test_cluster, "/api/v1/namespaces/default/endpoints", json!({"metadata": {"name": "by-hand"}}))
        .await;
    let empty = || async {
        let slices: Vec<EndpointSlice> = test_cluster.client.list("default").await.ok()?;
        slices.iter().any(|slice| slice.name().starts_with("web-")).then_some(())
    };
    wait_for("an empty slice", empty).await;
    pod(&test_cluster, "one", "10.1.0.1").await;
    pod(&test_cluster, "two", "10.1.0.2").await;
    let both = ["10.1.0.1 8080 true", "10.1.0.2 8080 true"];
    wait_for("two endpoints", || async { (rendered_slices(&test_cluster).await == both).then_some(()) })
        .await;
    wait_for("two addresses", || async {
        (rendered_addresses(&test_cluster).await? == "10.1.0.1,10.1.0.2|").then_some(())
    })
    .await;
    set_ready(&test_cluster, "two", "10.1.0.2", false).await;
    let one = ["10.1.0.1 8080 true", "10.1.0.2 8080 false"];
    wait_for("one ready endpoint", || async { (rendered_slices(&test_cluster).await == one).then_some(()) })
        .await;
    wait_for("one ready address", || async {
        (rendered_addresses(&test_cluster).await? == "10.1.0.1|10.1.0.2").then_some(())
    })
    .await;
    let now = DeleteOptions { grace_seconds: Some(0), ..DeleteOptions::default() };
    for name in ["one", "two"] {
        test_cluster.client.delete::<Pod>(&Key::new("default", name), &now).await.expect("a deletion");
    }
    wait_for("no endpoints", || async { rendered_slices(&test_cluster).await.is_empty().then_some(()) })
        .await;
    wait_for("no addresses", || async { rendered_addresses(&test_cluster).await?.is_empty().then_some(()) })
        .await;
    let (web, by_hand) = (Key::new("default", "web"), Key::new("default", "by-hand"));
    test_cluster.client.delete::<Service>(&web, &DeleteOptions::default()).await.expect("a deletion");
    let deleted = || async {
        test_cluster
            .client
            .get::<Endpoints>(&web)
            .await
            .is_err_and(|error| error.is_not_found())
            .then_some(())
    };
    wait_for("deletion of the Endpoints with their Service", deleted).await;
    test_cluster.client.get::<Endpoints>(&by_hand).await.expect("Endpoints without a Service are kept");
}

#[tokio::test]
async fn manual_endpoints_are_copied_to_slices() {
    let test_cluster = TestCluster::start(&["endpointslice-mirroring-controller"]).await;
    create(
        &test_cluster,
        "/api/v1/namespaces/default/services",
        json!({"metadata": {"name": "web"}, "spec": {"ports": [{"port": 80}]}}),
    )
    .await;
    let subsets = json!([{"addresses": [{"ip": "192.0.2.1"}], "notReadyAddresses": [{"ip": "2001:db8::1"}], "ports": [{"port": 9000}]}]);
    create(
        &test_cluster,
        "/api/v1/namespaces/default/endpoints",
        json!({"metadata": {"name": "web"}, "subsets": subsets}),
    )
    .await;
    let both = ["192.0.2.1 9000 true", "2001:db8::1 9000 false"];
    wait_for("a mirrored slice", || async { (rendered_slices(&test_cluster).await == both).then_some(()) })
        .await;
    let patch =
        Patch::Merge(json!({"subsets": [{"addresses": [{"ip": "192.0.2.2"}], "ports": [{"port": 9000}]}]}));
    let _: Endpoints =
        test_cluster.client.patch(&Key::new("default", "web"), &patch).await.expect("the changed slice");
    wait_for("the changed slice", || async {
        (rendered_slices(&test_cluster).await == ["192.0.2.2 9000 true"]).then_some(())
    })
    .await;
    test_cluster
        .client
        .delete::<Endpoints>(&Key::new("default", "web"), &DeleteOptions::default())
        .await
        .expect("a deletion");
    wait_for("deletion of the mirrored slice", || async {
        rendered_slices(&test_cluster).await.is_empty().then_some(())
    })
    .await;
}
