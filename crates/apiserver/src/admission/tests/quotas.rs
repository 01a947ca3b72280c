use futures_util::future::join_all;

use super::*;
use crate::admission::quota::keep_counts;
use crate::tests::{Rig, brief};

/// Waits until the quota's status has `path` at `value`; the test runner's own limit is the deadline.
async fn until(rig: &Rig, field: &str, value: &str) {
    let row = api::table::find("", "v1", "resourcequotas").unwrap();
    let mut news = rig.server.shard(row).subscribe();
    while rig.get("/api/v1/namespaces/default/resourcequotas/q").await.at("status").at("used").text(field)
        != value
    {
        news.changed().await.unwrap();
    }
}

async fn rig(hard: Value) -> Rig {
    let rig = Rig::start().await;
    tokio::spawn(keep_counts(rig.server.clone(), rig.stop.subscribe()));
    let quota = json!({"metadata": {"name": "q"}, "spec": {"hard": hard}});
    rig.send("POST /api/v1/namespaces/default/resourcequotas", quota).await;
    rig
}

async fn create(rig: &Rig, plural: &str, body: Value) -> String {
    brief(&rig.send(&format!("POST /api/v1/namespaces/default/{plural}"), body).await, &["metadata.name"])
}

#[tokio::test(flavor = "multi_thread")]
async fn many_at_once_never_exceed_a_quota() {
    let rig = rig(json!({"count/secrets": "10"})).await;
    until(&rig, "count/secrets", "0").await;
    let secret = |name: String| json!({"metadata": {"name": name}});
    let answers = join_all((0..40).map(|i| create(&rig, "secrets", secret(format!("s{i}"))))).await;
    assert_eq!(answers.iter().filter(|answer| answer.starts_with("201")).count(), 10);
    let refused = "is forbidden: exceeded quota: q, requested: count/secrets=1, used: count/secrets=10, limited: count/secrets=10";
    let others: Vec<&String> = answers.iter().filter(|answer| !answer.starts_with("201")).collect();
    assert!(others.iter().all(|answer| answer.ends_with(refused)), "{others:?}");
    let made = answers.iter().find_map(|answer| answer.strip_prefix("201 ")).unwrap();
    rig.call(&format!("DELETE /api/v1/namespaces/default/secrets/{made}"), "", "").await;
    until(&rig, "count/secrets", "9").await;
    assert_eq!(create(&rig, "secrets", secret("later".into())).await, "201 later");
    rig.stop.send_replace(true);
}

#[tokio::test]
async fn pods_count_with_what_they_ask_for() {
    let rig = rig(json!({"pods": "2", "requests.cpu": "1", "services.nodeports": "1"})).await;
    until(&rig, "pods", "0").await;
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

#[tokio::test]
async fn what_fails_after_its_grant_is_given_back() {
    let rig = rig(json!({"secrets": "3"})).await;
    until(&rig, "secrets", "0").await;
    let secret = json!({"metadata": {"name": "a"}});
    assert_eq!(create(&rig, "secrets", secret.clone()).await, "201 a");
    assert_eq!(create(&rig, "secrets", secret).await, "409 secrets \"a\" already exists");
    until(&rig, "secrets", "1").await;
    rig.stop.send_replace(true);
}

#[test]
fn scopes_choose_pods() {
    let pods = api::table::find("", "v1", "pods").unwrap();
    let in_scope = |scope: Value, spec: Value| {
        let quota = json!({"spec": scope});
        super::super::usage::matches(&quota, pods, &json!({"spec": spec}))
    };
    let plain = |scope: &str| json!({"scopes": [scope]});
    let class = |operator: &str, values: Value| json!({"scopeSelector": {"matchExpressions": [{"scopeName": "PriorityClass", "operator": operator, "values": values}]}});
    let cases = [
        (plain("Terminating"), json!({"activeDeadlineSeconds": 5}), true),
        (plain("Terminating"), json!({}), false),
        (plain("NotTerminating"), json!({}), true),
        (plain("BestEffort"), json!({"containers": [{"name": "c"}]}), true),
        (plain("NotBestEffort"), json!({"containers": [{"name": "c"}]}), false),
        (class("In", json!(["high"])), json!({"priorityClassName": "high"}), true),
        (class("In", json!(["high"])), json!({"priorityClassName": "low"}), false),
        (class("NotIn", json!(["high"])), json!({}), true),
        (class("Exists", json!([])), json!({}), false),
        (json!({}), json!({}), true),
    ];
    for (scope, spec, expected) in cases {
        assert_eq!(in_scope(scope.clone(), spec.clone()), expected, "{scope} {spec}");
    }
}

#[test]
fn objects_use_what_they_ask_for() {
    let now = "2026-01-01T00:00:00Z".parse().unwrap();
    let check = |plural: &str, object: Value, expected: &str| {
        let row = api::table::find("", "v1", plural).unwrap();
        let used = super::super::usage::usage(row, &object, now);
        let used: Vec<String> = used.iter().map(|(name, quantity)| format!("{name}={quantity}")).collect();
        assert_eq!(used.join(" "), expected, "{object}");
        for name in used.iter().filter_map(|part| part.split_once('=')).map(|(name, _)| name) {
            assert!(super::super::usage::is_of(row, name), "{name}");
        }
    };
    let resources = json!({"requests": {"cpu": "1", "example.com/gpu": "2", "hugepages-2Mi": "4Mi"}, "limits": {"memory": "1Gi"}});
    let pod = |phase: &str| json!({"spec": {"containers": [{"name": "c", "resources": resources}], "overhead": {"cpu": "500m"}}, "status": {"phase": phase}});
    check(
        "pods",
        pod("Pending"),
        "count/pods=1 cpu=1500m hugepages-2Mi=4Mi limits.memory=1Gi pods=1 requests.cpu=1500m requests.example.com/gpu=2 requests.hugepages-2Mi=4Mi",
    );
    check("pods", pod("Succeeded"), "count/pods=1");
    let late =
        json!({"metadata": {"deletionTimestamp": "2025-12-31T23:59:00Z", "deletionGracePeriodSeconds": 30}});
    check("pods", late, "count/pods=1");
    check("configmaps", Value::Null, "configmaps=1 count/configmaps=1");
    let service = json!({"spec": {"type": "LoadBalancer", "ports": [{"port": 1}, {"port": 2}]}});
    check("services", service, "count/services=1 services=1 services.loadbalancers=1 services.nodeports=2");
    let bare = json!({"spec": {"type": "LoadBalancer", "allocateLoadBalancerNodePorts": false, "ports": [{"port": 1}]}});
    check("services", bare, "count/services=1 services=1 services.loadbalancers=1 services.nodeports=0");
    let claim = json!({"spec": {"storageClassName": "fast", "resources": {"requests": {"storage": "1Gi"}}}, "status": {"allocatedResources": {"storage": "2Gi"}}});
    check(
        "persistentvolumeclaims",
        claim,
        "count/persistentvolumeclaims=1 fast.storageclass.storage.k8s.io/persistentvolumeclaims=1 fast.storageclass.storage.k8s.io/requests.storage=2Gi persistentvolumeclaims=1 requests.storage=2Gi",
    );
}
