use futures_util::future::join_all;

use super::*;
use crate::tests::{TestServer, summary};

/// A server with a quota without any usage.
async fn start_with_quota(hard: Value) -> TestServer {
    let test_server = TestServer::start().await;
    let mut quota = json!({"metadata": {"name": "q"}, "spec": {"hard": hard}});
    test_server.send("POST /api/v1/namespaces/default/resourcequotas", quota.clone()).await;
    let used = hard.as_object().into_iter().flatten().map(|(name, _)| (name.clone(), json!("0")));
    quota["status"] = json!({"hard": hard, "used": used.collect::<Value>()});
    let answer = test_server.send("PUT /api/v1/namespaces/default/resourcequotas/q/status", quota).await;
    assert_eq!(summary(&answer, &["metadata.name"]), "200 q");
    test_server
}

async fn create(test_server: &TestServer, plural: &str, body: Value) -> String {
    summary(
        &test_server.send(&format!("POST /api/v1/namespaces/default/{plural}"), body).await,
        &["metadata.name"],
    )
}

#[tokio::test(flavor = "multi_thread")]
async fn concurrent_creates_stay_within_quota() {
    let test_server = start_with_quota(json!({"count/secrets": "10"})).await;
    let secret = |name: String| json!({"metadata": {"name": name}});
    let responses = join_all((0..40).map(|i| create(&test_server, "secrets", secret(format!("s{i}"))))).await;
    assert_eq!(responses.iter().filter(|answer| answer.starts_with("201")).count(), 10);
    let exceeded = "is forbidden: exceeded quota: q, requested: count/secrets=1, used: count/secrets=10, limited: count/secrets=10";
    let others: Vec<&String> = responses.iter().filter(|answer| !answer.starts_with("201")).collect();
    assert!(others.iter().all(|answer| answer.ends_with(exceeded)), "{others:?}");
    test_server.stop.send_replace(true);
}

#[tokio::test]
async fn quota_counts_pod_requests() {
    let test_server =
        start_with_quota(json!({"pods": "2", "requests.cpu": "1", "services.nodeports": "1"})).await;
    let pod = |name: &str, cpu: Option<&str>| {
        let requests = cpu.map_or(json!({}), |cpu| json!({"requests": {"cpu": cpu}}));
        json!({"metadata": {"name": name}, "spec": {"containers": [{"name": "c", "image": "i", "resources": requests}]}})
    };
    assert_eq!(
        create(&test_server, "pods", pod("a", None)).await,
        "403 pods \"a\" is forbidden: failed quota: q: must specify requests.cpu for: c"
    );
    assert_eq!(create(&test_server, "pods", pod("a", Some("600m"))).await, "201 a");
    assert_eq!(
        create(&test_server, "pods", pod("b", Some("600m"))).await,
        "403 pods \"b\" is forbidden: exceeded quota: q, requested: requests.cpu=600m, used: requests.cpu=600m, limited: requests.cpu=1"
    );
    assert_eq!(create(&test_server, "pods", pod("b", Some("400m"))).await, "201 b");
    assert_eq!(
        create(&test_server, "pods", pod("c", Some("0"))).await,
        "403 pods \"c\" is forbidden: exceeded quota: q, requested: pods=1, used: pods=2, limited: pods=2"
    );
    let used = test_server.get("/api/v1/namespaces/default/resourcequotas/q").await;
    assert_eq!(
        used.at("status").at("used"),
        &json!({"pods": "2", "requests.cpu": "1", "services.nodeports": "0"})
    );
    let service = json!({"metadata": {"name": "s"}, "spec": {"type": "NodePort", "ports": [{"port": 1, "name": "a"}, {"port": 2, "name": "b"}]}});
    assert_eq!(
        create(&test_server, "services", service).await,
        "403 services \"s\" is forbidden: exceeded quota: q, requested: services.nodeports=2, used: services.nodeports=0, limited: services.nodeports=1"
    );
    test_server.stop.send_replace(true);
}
