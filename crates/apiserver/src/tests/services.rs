use api::json::Json as _;
use serde_json::{Value, json};

use super::{Rig, brief};
use crate::request::Target;

const SERVICES: &str = "/api/v1/namespaces/default/services";
const ADDRESSES: &str = "/apis/networking.k8s.io/v1/ipaddresses";
const MERGE: &str = "application/merge-patch+json";

fn service(name: &str, ip: &str) -> Value {
    json!({"metadata": {"name": name}, "spec": {"clusterIP": ip, "ports": [{"port": 80}]}})
}

#[tokio::test]
async fn an_address_is_held_by_one_service_at_a_time() {
    let rig = Rig::start().await;
    let post = format!("POST {SERVICES}");
    let made = rig.send(&post, service("a", "10.43.0.50")).await;
    assert_eq!(brief(&made, &["spec.clusterIP", "spec.ipFamilies"]), "201 10.43.0.50 [\"IPv4\"]");
    let address = rig.get(&format!("{ADDRESSES}/10.43.0.50")).await;
    assert_eq!(address.path("spec.parentRef.name"), "a");
    let taken = rig.send(&post, service("b", "10.43.0.50")).await;
    assert_eq!(
        brief(&taken, &[]),
        "422 Service \"b\" is invalid: spec.clusterIPs: Invalid value: [\"10.43.0.50\"]: failed to allocate IP 10.43.0.50: provided IP is already allocated"
    );
    // Neither a dry run nor a service that is refused takes anything.
    let dry = rig.send(&format!("{post}?dryRun=All"), service("c", "10.43.0.51")).await;
    assert_eq!(dry.0, 201);
    let mut bad = service("c", "10.43.0.51");
    bad["spec"]["ports"][0]["port"] = json!(0);
    assert_eq!(rig.send(&post, bad).await.0, 422);
    assert_eq!(rig.send(&post, service("c", "10.43.0.51")).await.0, 201);

    let name =
        r#"{"spec":{"type":"ExternalName","externalName":"x.example","clusterIP":null,"clusterIPs":null}}"#;
    let external = rig.call(&format!("PATCH {SERVICES}/a"), MERGE, name).await;
    assert_eq!(brief(&external, &["spec.clusterIP"]), "200 null");
    assert_eq!(rig.get(&format!("{ADDRESSES}/10.43.0.50")).await.int("code"), Some(404));
    let back = r#"{"spec":{"type":"ClusterIP","externalName":null,"clusterIP":"10.43.0.50"}}"#;
    let back = rig.call(&format!("PATCH {SERVICES}/a"), MERGE, back).await;
    assert_eq!(brief(&back, &["spec.clusterIP"]), "200 10.43.0.50");
    assert_eq!(rig.call(&format!("DELETE {SERVICES}/a"), "", "").await.0, 200);
    assert_eq!(rig.send(&post, service("d", "10.43.0.50")).await.0, 201);
}

#[tokio::test]
async fn the_first_objects_follow_the_server() {
    let rig = Rig::start().await;
    let service = rig.get(&format!("{SERVICES}/kubernetes")).await;
    assert_eq!(service.path("spec.clusterIP"), "10.43.0.1");
    let row = api::table::find("networking.k8s.io", "v1", "ipaddresses").unwrap();
    let shown = Target { name: "10.43.0.1".into(), ..Target::collection(row, "") };
    rig.server.remove(&rig.server.find(&shown).unwrap()).await.unwrap();
    rig.bootstrap(7443).await;
    assert_eq!(rig.get(&format!("{ADDRESSES}/10.43.0.1")).await.path("spec.parentRef.name"), "kubernetes");
    let target = rig.get(&format!("{SERVICES}/kubernetes")).await;
    assert_eq!(target.at("spec").items("ports")[0].at("targetPort"), 7443);
    let endpoints = rig.get("/api/v1/namespaces/default/endpoints/kubernetes").await;
    assert_eq!(endpoints.at("subsets")[0]["ports"][0]["port"], 7443);
    let slices = "/apis/discovery.k8s.io/v1/namespaces/default/endpointslices/kubernetes";
    assert_eq!(rig.get(slices).await.at("ports")[0]["port"], 7443);
}

#[tokio::test]
async fn the_servers_own_service_comes_back() {
    let rig = Rig::start().await;
    let shard = rig.server.shard(api::table::find("", "v1", "services").unwrap());
    let mut news = shard.subscribe();
    let cluster = Rig::cluster(6443);
    let task =
        tokio::spawn(crate::bootstrap::keep_first_objects(rig.server.clone(), cluster, rig.stop.subscribe()));
    let path = format!("{SERVICES}/kubernetes");
    let uid = rig.get(&path).await.path("metadata.uid").clone();
    assert_eq!(rig.call(&format!("DELETE {path}"), "", "").await.0, 200);
    while [&Value::Null, &uid].contains(&rig.get(&path).await.path("metadata.uid")) {
        news.changed().await.unwrap();
    }
    assert_eq!(rig.get(&path).await.path("spec.clusterIP"), "10.43.0.1");
    rig.stop.send_replace(true);
    task.await.unwrap();
}
