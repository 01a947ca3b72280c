use api::json::JsonExt as _;
use serde_json::{Value, json};

use super::{TestServer, summary};
use crate::request::Target;

const SERVICES: &str = "/api/v1/namespaces/default/services";
const ADDRESSES: &str = "/apis/networking.k8s.io/v1/ipaddresses";
const MERGE: &str = "application/merge-patch+json";

fn service(name: &str, ip: &str) -> Value {
    json!({"metadata": {"name": name}, "spec": {"clusterIP": ip, "ports": [{"port": 80}]}})
}

#[tokio::test]
async fn cluster_ip_is_allocated_to_one_service_only() {
    let test_server = TestServer::start().await;
    let post = format!("POST {SERVICES}");
    let created = test_server.send(&post, service("a", "10.43.0.50")).await;
    assert_eq!(summary(&created, &["spec.clusterIP", "spec.ipFamilies"]), "201 10.43.0.50 [\"IPv4\"]");
    let address = test_server.get(&format!("{ADDRESSES}/10.43.0.50")).await;
    assert_eq!(address.path("spec.parentRef.name"), "a");
    let taken = test_server.send(&post, service("b", "10.43.0.50")).await;
    assert_eq!(
        summary(&taken, &[]),
        "422 Service \"b\" is invalid: spec.clusterIPs: Invalid value: [\"10.43.0.50\"]: failed to allocate IP 10.43.0.50: provided IP is already allocated"
    );
    // Neither a dry run nor a rejected Service allocates anything.
    let dry = test_server.send(&format!("{post}?dryRun=All"), service("c", "10.43.0.51")).await;
    assert_eq!(dry.0, 201);
    let mut bad = service("c", "10.43.0.51");
    bad["spec"]["ports"][0]["port"] = json!(0);
    assert_eq!(test_server.send(&post, bad).await.0, 422);
    assert_eq!(test_server.send(&post, service("c", "10.43.0.51")).await.0, 201);

    let name =
        r#"{"spec":{"type":"ExternalName","externalName":"x.example","clusterIP":null,"clusterIPs":null}}"#;
    let external = test_server.call(&format!("PATCH {SERVICES}/a"), MERGE, name).await;
    assert_eq!(summary(&external, &["spec.clusterIP"]), "200 null");
    assert_eq!(test_server.get(&format!("{ADDRESSES}/10.43.0.50")).await.int("code"), Some(404));
    let back = r#"{"spec":{"type":"ClusterIP","externalName":null,"clusterIP":"10.43.0.50"}}"#;
    let back = test_server.call(&format!("PATCH {SERVICES}/a"), MERGE, back).await;
    assert_eq!(summary(&back, &["spec.clusterIP"]), "200 10.43.0.50");
    assert_eq!(test_server.call(&format!("DELETE {SERVICES}/a"), "", "").await.0, 200);
    assert_eq!(test_server.send(&post, service("d", "10.43.0.50")).await.0, 201);
}

#[tokio::test]
async fn bootstrap_objects_follow_server_port() {
    let test_server = TestServer::start().await;
    let service = test_server.get(&format!("{SERVICES}/kubernetes")).await;
    assert_eq!(service.path("spec.clusterIP"), "10.43.0.1");
    let row = api::resource_table::find_resource("networking.k8s.io", "v1", "ipaddresses").unwrap();
    let ip_target = Target { name: "10.43.0.1".into(), ..Target::collection(row, "") };
    test_server.server.remove(&test_server.server.find(&ip_target).unwrap()).await.unwrap();
    test_server.bootstrap(7443).await;
    assert_eq!(
        test_server.get(&format!("{ADDRESSES}/10.43.0.1")).await.path("spec.parentRef.name"),
        "kubernetes"
    );
    let target = test_server.get(&format!("{SERVICES}/kubernetes")).await;
    assert_eq!(target.at("spec").items("ports")[0].at("targetPort"), 7443);
    let endpoints = test_server.get("/api/v1/namespaces/default/endpoints/kubernetes").await;
    assert_eq!(endpoints.at("subsets")[0]["ports"][0]["port"], 7443);
    let slices = "/apis/discovery.k8s.io/v1/namespaces/default/endpointslices/kubernetes";
    assert_eq!(test_server.get(slices).await.at("ports")[0]["port"], 7443);
}

#[tokio::test]
async fn kubernetes_service_is_created_again_after_delete() {
    let test_server = TestServer::start().await;
    let shard = test_server.server.shard(api::resource_table::find_resource("", "v1", "services").unwrap());
    let mut changes = shard.subscribe();
    let cluster = TestServer::cluster(6443);
    let task = tokio::spawn(crate::bootstrap::run_default_objects_controller(
        test_server.server.clone(),
        cluster,
        test_server.stop.subscribe(),
    ));
    let path = format!("{SERVICES}/kubernetes");
    let uid = test_server.get(&path).await.path("metadata.uid").clone();
    assert_eq!(test_server.call(&format!("DELETE {path}"), "", "").await.0, 200);
    while [&Value::Null, &uid].contains(&test_server.get(&path).await.path("metadata.uid")) {
        changes.changed().await.unwrap();
    }
    assert_eq!(test_server.get(&path).await.path("spec.clusterIP"), "10.43.0.1");
    test_server.stop.send_replace(true);
    task.await.unwrap();
}
