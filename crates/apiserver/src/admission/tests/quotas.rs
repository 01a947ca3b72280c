use futures_util::future::join_all;

use super::*;
use crate::tests::{Rig, brief};

/// A server with a quota of which nothing is used yet.
async fn rig(hard: Value) -> Rig {
    let rig = Rig::start().await;
    let mut quota = json!({"metadata": {"name": "q"}, "spec": {"hard": hard}});
    rig.send("POST /api/v1/namespaces/default/resourcequotas", quota.clone()).await;
    let used = hard.as_object().into_iter().flatten().map(|(name, _)| (name.clone(), json!("0")));
    quota["status"] = json!({"hard": hard, "used": used.collect::<Value>()});
    let answer = rig.send("PUT /api/v1/namespaces/default/resourcequotas/q/status", quota).await;
    assert_eq!(brief(&answer, &["metadata.name"]), "200 q");
    rig
}

async fn create(rig: &Rig, plural: &str, body: Value) -> String {
    brief(&rig.send(&format!("POST /api/v1/namespaces/default/{plural}"), body).await, &["metadata.name"])
}

#[tokio::test(flavor = "multi_thread")]
async fn many_at_once_never_exceed_a_quota() {
    let rig = rig(json!({"count/secrets": "10"})).await;
    let secret = |name: String| json!({"metadata": {"name": name}});
    let answers = join_all((0..40).map(|i| create(&rig, "secrets", secret(format!("s{i}"))))).await;
    assert_eq!(answers.iter().filter(|answer| answer.starts_with("201")).count(), 10);
    let refused = "is forbidden: exceeded quota: q, requested: count/secrets=1, used: count/secrets=10, limited: count/secrets=10";
    let others: Vec<&String> = answers.iter().filter(|answer| !answer.starts_with("201")).collect();
    assert!(others.iter().all(|answer| answer.ends_with(refused)), "{others:?}");
    rig.stop.send_replace(true);
}

#[tokio::test]
async fn pods_count_with_what_they_ask_for() {
    let rig = rig(json!({"pods": "2", "requests.cpu": "1", "services.nodeports": "1"})).await;
    let pod = |name: &str, cpu: Option<&str>| {
        let requests = cpu.map_or(json!({}), |cpu| json!({"requests": {"cpu": cpu}}));
        json!({"metadata": {"name": name}, "spec": {"containers": [{"name": "c", "image": "i", "resources": requests}]}})
    };
    assert_eq!(
        create(&rig, "pods", pod("a", None)).await,
        "403 pods \"a\" is forbidden: failed quota: q: must specify requests.cpu for: c"
    );
    assert_eq!(create(&rig, "pods", pod("a", Some("600m"))).await, "201 a");
    assert_eq!(
        create(&rig, "pods", pod("b", Some("600m"))).await,
        "403 pods \"b\" is forbidden: exceeded quota: q, requested: requests.cpu=600m, used: requests.cpu=600m, limited: requests.cpu=1"
    );
    assert_eq!(create(&rig, "pods", pod("b", Some("400m"))).await, "201 b");
    assert_eq!(
        create(&rig, "pods", pod("c", Some("0"))).await,
        "403 pods \"c\" is forbidden: exceeded quota: q, requested: pods=1, used: pods=2, limited: pods=2"
    );
    let used = rig.get("/api/v1/namespaces/default/resourcequotas/q").await;
    assert_eq!(
        used.at("status").at("used"),
        &json!({"pods": "2", "requests.cpu": "1", "services.nodeports": "0"})
    );
    let service = json!({"metadata": {"name": "s"}, "spec": {"type": "NodePort", "ports": [{"port": 1, "name": "a"}, {"port": 2, "name": "b"}]}});
    assert_eq!(
        create(&rig, "services", service).await,
        "403 services \"s\" is forbidden: exceeded quota: q, requested: services.nodeports=2, used: services.nodeports=0, limited: services.nodeports=1"
    );
    rig.stop.send_replace(true);
}
