use expect_test::{Expect, expect};
use proptest::prelude::*;
use reconcile::cloud::LoadBalancer as _;
use serde_json::{Value, json};

use super::nodes::NodeBalancer;
use super::*;
use crate::test_cluster::{TestCluster, wait_for};

fn typed<T: serde::de::DeserializeOwned>(value: Value) -> T {
    serde_json::from_value(value).expect("an object")
}

fn node(name: &str, addresses: &[(&str, &str)], ready: &str) -> Node {
    let addresses: Vec<Value> =
        addresses.iter().map(|(kind, ip)| json!({"type": kind, "address": ip})).collect();
    typed(json!({
        "metadata": {"name": name},
        "status": {"addresses": addresses, "conditions": [{"type": "Ready", "status": ready}]},
    }))
}

/// A Service with a port, additional spec fields and load balancer addresses.
fn service(name: &str, port: i32, more: Value, addresses: &[&str]) -> Arc<Service> {
    let mut spec = json!({"type": "LoadBalancer", "ports": [{"port": port}], "ipFamilies": ["IPv4"]});
    for (name, value) in more.as_object().into_iter().flatten() {
        spec[name] = value.clone();
    }
    let ingress: Vec<Value> = addresses.iter().map(|ip| json!({"ip": ip})).collect();
    let metadata = json!({"name": name, "namespace": "ns"});
    Arc::new(typed(
        json!({"metadata": metadata, "spec": spec, "status": {"loadBalancer": {"ingress": ingress}}}),
    ))
}

async fn check(pool: &[&str], service: &Service, others: &[Arc<Service>], expected: Expect) {
    let pool: Vec<String> = pool.iter().map(|part| (*part).to_owned()).collect();
    let nodes = [
        node("a", &[("InternalIP", "10.0.0.2"), ("InternalIP", "fd00::2")], "True"),
        node("b", &[("InternalIP", "10.0.0.3"), ("ExternalIP", "198.51.100.3")], "True"),
    ];
    let cluster_state = LoadBalancerContext {
        nodes: nodes.into_iter().map(Arc::new).collect(),
        serving: ["b".to_owned()].into(),
        others: others.to_vec(),
    };
    let rendered = match NodeBalancer::with_pool(&pool).expect("a pool").ensure(service, &cluster_state).await
    {
        Ok(status) => {
            plan::ingress_pairs(Some(&status)).into_iter().map(|(ip, _)| ip).collect::<Vec<_>>().join(" ")
        }
        Err(error) => error.to_string(),
    };
    expected.assert_eq(&rendered);
}

#[tokio::test]
async fn node_addresses_become_ingress() {
    let plain = service("s", 80, json!({}), &[]);
    check(&[], &plain, &[], expect!["10.0.0.2 198.51.100.3"]).await;
    let local = service("s", 80, json!({"externalTrafficPolicy": "Local"}), &[]);
    check(&[], &local, &[], expect!["198.51.100.3"]).await;
    let dual = service("s", 80, json!({"ipFamilies": ["IPv6", "IPv4"]}), &[]);
    check(&[], &dual, &[], expect!["fd00::2 10.0.0.2 198.51.100.3"]).await;
    let other = service("other", 80, json!({}), &["10.0.0.2"]);
    check(&[], &plain, &[other], expect!["port 80/TCP is already used by Service ns/other"]).await;
    let other_port = service("other", 81, json!({}), &["10.0.0.2"]);
    check(&[], &plain, &[other_port], expect!["10.0.0.2 198.51.100.3"]).await;
}

#[tokio::test]
async fn each_service_is_assigned_one_pool_address() {
    let pool = &["192.0.2.10-192.0.2.11", "2001:db8::/127"];
    let plain = service("s", 80, json!({}), &[]);
    let other = service("other", 80, json!({}), &["192.0.2.10"]);
    check(pool, &plain, std::slice::from_ref(&other), expect!["192.0.2.11"]).await;
    let last = service("last", 80, json!({}), &["192.0.2.11"]);
    check(pool, &plain, &[other.clone(), last], expect!["the address pool is exhausted"]).await;
    check(pool, &service("s", 80, json!({}), &["192.0.2.11"]), &[], expect!["192.0.2.11"]).await;
    let dual = service("s", 80, json!({"ipFamilies": ["IPv4", "IPv6"]}), &[]);
    check(pool, &dual, std::slice::from_ref(&other), expect!["192.0.2.11 2001:db8::"]).await;
    let with_ip = |ip: &str| service("s", 80, json!({"loadBalancerIP": ip}), &[]);
    check(pool, &with_ip("192.0.2.11"), std::slice::from_ref(&other), expect!["192.0.2.11"]).await;
    check(pool, &with_ip("192.0.2.10"), &[other], expect!["address 192.0.2.10 is already in use"]).await;
    check(pool, &with_ip("203.0.113.1"), &[], expect!["address 203.0.113.1 is not in the pool"]).await;
    for wrong in ["x", "192.0.2.9-192.0.2.1", "192.0.2.1-::1"] {
        assert!(NodeBalancer::with_pool(&[wrong.to_owned()]).is_err(), "{wrong}");
    }
}

#[test]
fn unready_and_excluded_nodes_receive_no_traffic() {
    let good = node("a", &[], "True");
    assert!(plan::include_node(&good));
    assert!(!plan::include_node(&node("a", &[], "Unknown")));
    let with_exclude_label = |value: &str| {
        let mut node = good.clone();
        let label = ("node.kubernetes.io/exclude-from-external-load-balancers".to_owned(), value.to_owned());
        node.metadata.labels = Some([label].into());
        node
    };
    assert!(!plan::include_node(&with_exclude_label("")));
    assert!(plan::include_node(&with_exclude_label("false")));
}

#[tokio::test]
async fn service_status_contains_ingress() {
    let test_cluster = TestCluster::start(&["service-lb-controller"]).await;
    let node = node("a", &[("InternalIP", "10.0.0.2")], "True");
    let created = test_cluster.client.create(&node).await.expect("a node");
    test_cluster.client.replace_status(&Node { metadata: created.metadata, ..node }).await.expect("a status");
    let create = async |name: &str, kind: &str| {
        let object = json!({"metadata": {"name": name}, "spec": {"type": kind, "ports": [{"port": 80}]}});
        let path = "/api/v1/namespaces/default/services";
        test_cluster.client.request(http::Method::POST, path, Some(&object)).await.expect("a service");
    };
    let addresses = async |name: &str| {
        let service: Service = test_cluster.client.get(&Key::new("default", name)).await.ok()?;
        Some(plan::ingress_addresses(&service).into_iter().map(|(ip, _)| ip).collect::<Vec<_>>())
    };
    create("first", "LoadBalancer").await;
    let is = async |name: &str, ips: &[&str]| addresses(name).await.filter(|found| *found == ips);
    wait_for("an address", || is("first", &["10.0.0.2"])).await;
    create("second", "LoadBalancer").await;
    let key = Key::new("default", "first");
    let patch = Patch::Merge(json!({"spec": {"type": "ClusterIP"}}));
    test_cluster.client.patch::<Service>(&key, &patch).await.expect("a change");
    wait_for("the address to be removed", || is("first", &[])).await;
    wait_for("the port to be assigned to the second Service", || is("second", &["10.0.0.2"])).await;
}

proptest! {
    /// For any order of syncs, no two Services get the same pool address, each Service keeps its address,
    /// and further syncs change nothing.
    #[test]
    fn no_address_is_assigned_twice(count in 1..12usize, order in prop::collection::vec(0..12usize, 0..30)) {
        let runtime = tokio::runtime::Builder::new_current_thread().build().expect("a runtime");
        let pool = NodeBalancer::with_pool(&["192.0.2.0-192.0.2.7".to_owned()]).expect("a pool");
        let mut services: Vec<Arc<Service>> =
            (0..count).map(|i| service(&format!("s{i}"), 80, json!({}), &[])).collect();
        for i in (0..count).chain(order.into_iter().filter(|i| *i < count)) {
            let others = services.iter().filter(|other| other.key() != services[i].key()).cloned().collect();
            let cluster_state = LoadBalancerContext { others, ..LoadBalancerContext::default() };
            let before = plan::ingress_addresses(&services[i]);
            let Ok(status) = runtime.block_on(pool.ensure(&services[i], &cluster_state)) else {
                prop_assert!(before.is_empty() && count > 8);
                continue;
            };
            prop_assert!(before.is_empty() || before == plan::ingress_pairs(Some(&status)));
            let given: Vec<String> = plan::ingress_pairs(Some(&status)).into_iter().map(|(ip, _)| ip).collect();
            let given: Vec<&str> = given.iter().map(String::as_str).collect();
            services[i] = service(&format!("s{i}"), 80, json!({}), &given);
        }
        let all: Vec<_> = services.iter().flat_map(|service| plan::ingress_addresses(service)).collect();
        let distinct: BTreeSet<_> = all.iter().collect();
        prop_assert_eq!(distinct.len(), all.len());
        prop_assert_eq!(all.len(), count.min(8));
    }
}
