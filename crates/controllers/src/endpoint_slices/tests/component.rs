//! Services on a real API server.

use k8s_openapi::api::core::v1::{Endpoints, Pod, Service};
use k8s_openapi::api::discovery::v1::EndpointSlice;
use reconcile::{Delete, Key, Object, Patch};
use serde_json::{Value, json};

use crate::rig::{Rig, until};

async fn make(rig: &Rig, path: &str, value: Value) {
    rig.client.request(http::Method::POST, path, Some(&value)).await.expect("an object");
}

async fn pod(rig: &Rig, name: &str, ip: &str) {
    let spec = json!({"nodeName": "n", "containers": [{"name": "c", "image": "i", "ports": [{"name": "web", "containerPort": 8080}]}]});
    let value = json!({"metadata": {"name": name, "labels": {"app": "web"}}, "spec": spec});
    make(rig, "/api/v1/namespaces/default/pods", value).await;
    ready(rig, name, ip, true).await;
}

async fn ready(rig: &Rig, name: &str, ip: &str, ready: bool) {
    let ready = if ready { "True" } else { "False" };
    let status = json!({"status": {
        "phase": "Running", "podIP": ip, "podIPs": [{"ip": ip}], "conditions": [{"type": "Ready", "status": ready}],
    }});
    let _: Pod = rig
        .client
        .patch_status(&Key::new("default", name), &Patch::Strategic(status))
        .await
        .expect("a status");
}

/// `ip port ready` of all endpoints of the Service `web`.
async fn slices(rig: &Rig) -> Vec<String> {
    let slices: Vec<EndpointSlice> = rig.client.list("default").await.unwrap_or_default();
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

async fn addresses(rig: &Rig) -> Option<String> {
    let endpoints: Endpoints = rig.client.get(&Key::new("default", "web")).await.ok()?;
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
async fn services_follow_their_pods() {
    let rig = Rig::start(&["endpointslice-controller", "endpoints-controller"]).await;
    make(&rig, "/api/v1/nodes", json!({"metadata": {"name": "n"}})).await;
    let spec = json!({"selector": {"app": "web"}, "ports": [{"port": 80, "targetPort": "web"}]});
    make(&rig, "/api/v1/namespaces/default/services", json!({"metadata": {"name": "web"}, "spec": spec}))
        .await;
    make(&rig, "/api/v1/namespaces/default/endpoints", json!({"metadata": {"name": "by-hand"}})).await;
    let empty = || async {
        let slices: Vec<EndpointSlice> = rig.client.list("default").await.ok()?;
        slices.iter().any(|slice| slice.name().starts_with("web-")).then_some(())
    };
    until("an empty slice", empty).await;
    pod(&rig, "one", "10.1.0.1").await;
    pod(&rig, "two", "10.1.0.2").await;
    let both = ["10.1.0.1 8080 true", "10.1.0.2 8080 true"];
    until("two endpoints", || async { (slices(&rig).await == both).then_some(()) }).await;
    until("two addresses", || async { (addresses(&rig).await? == "10.1.0.1,10.1.0.2|").then_some(()) }).await;
    ready(&rig, "two", "10.1.0.2", false).await;
    let one = ["10.1.0.1 8080 true", "10.1.0.2 8080 false"];
    until("one ready endpoint", || async { (slices(&rig).await == one).then_some(()) }).await;
    until("one ready address", || async { (addresses(&rig).await? == "10.1.0.1|10.1.0.2").then_some(()) })
        .await;
    let now = Delete { grace_seconds: Some(0), ..Delete::default() };
    for name in ["one", "two"] {
        rig.client.delete::<Pod>(&Key::new("default", name), &now).await.expect("a deletion");
    }
    until("no endpoints", || async { slices(&rig).await.is_empty().then_some(()) }).await;
    until("no addresses", || async { addresses(&rig).await?.is_empty().then_some(()) }).await;
    let (web, by_hand) = (Key::new("default", "web"), Key::new("default", "by-hand"));
    rig.client.delete::<Service>(&web, &Delete::default()).await.expect("a deletion");
    let gone = || async {
        rig.client.get::<Endpoints>(&web).await.is_err_and(|error| error.is_not_found()).then_some(())
    };
    until("the Endpoints go with their Service", gone).await;
    rig.client.get::<Endpoints>(&by_hand).await.expect("those made without a Service stay");
}

#[tokio::test]
async fn endpoints_made_by_hand_are_mirrored() {
    let rig = Rig::start(&["endpointslice-mirroring-controller"]).await;
    make(
        &rig,
        "/api/v1/namespaces/default/services",
        json!({"metadata": {"name": "web"}, "spec": {"ports": [{"port": 80}]}}),
    )
    .await;
    let subsets = json!([{"addresses": [{"ip": "192.0.2.1"}], "notReadyAddresses": [{"ip": "2001:db8::1"}], "ports": [{"port": 9000}]}]);
    make(
        &rig,
        "/api/v1/namespaces/default/endpoints",
        json!({"metadata": {"name": "web"}, "subsets": subsets}),
    )
    .await;
    let both = ["192.0.2.1 9000 true", "2001:db8::1 9000 false"];
    until("a mirror", || async { (slices(&rig).await == both).then_some(()) }).await;
    let patch =
        Patch::Merge(json!({"subsets": [{"addresses": [{"ip": "192.0.2.2"}], "ports": [{"port": 9000}]}]}));
    let _: Endpoints = rig.client.patch(&Key::new("default", "web"), &patch).await.expect("a change");
    until("a change", || async { (slices(&rig).await == ["192.0.2.2 9000 true"]).then_some(()) }).await;
    rig.client
        .delete::<Endpoints>(&Key::new("default", "web"), &Delete::default())
        .await
        .expect("a deletion");
    until("the end of the mirror", || async { slices(&rig).await.is_empty().then_some(()) }).await;
}
