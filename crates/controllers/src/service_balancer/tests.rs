use expect_test::{Expect, expect};
use proptest::prelude::*;
use reconcile::cloud::Balancer as _;
use serde_json::{Value, json};

use super::nodes::Nodes;
use super::*;
use crate::rig::{Rig, until};

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

/// A Service with a port, further fields of its spec, and where it is reached.
fn service(name: &str, port: i32, more: Value, reached: &[&str]) -> Arc<Service> {
    let mut spec = json!({"type": "LoadBalancer", "ports": [{"port": port}], "ipFamilies": ["IPv4"]});
    for (name, value) in more.as_object().into_iter().flatten() {
        spec[name] = value.clone();
    }
    let ways: Vec<Value> = reached.iter().map(|ip| json!({"ip": ip})).collect();
    let metadata = json!({"name": name, "namespace": "ns"});
    Arc::new(typed(
        json!({"metadata": metadata, "spec": spec, "status": {"loadBalancer": {"ingress": ways}}}),
    ))
}

async fn check(pool: &[&str], asked: &Service, others: &[Arc<Service>], expected: Expect) {
    let pool: Vec<String> = pool.iter().map(|part| (*part).to_owned()).collect();
    let nodes = [
        node("a", &[("InternalIP", "10.0.0.2"), ("InternalIP", "fd00::2")], "True"),
        node("b", &[("InternalIP", "10.0.0.3"), ("ExternalIP", "198.51.100.3")], "True"),
    ];
    let around = Around {
        nodes: nodes.into_iter().map(Arc::new).collect(),
        serving: ["b".to_owned()].into(),
        others: others.to_vec(),
    };
    let shown = match Nodes::with_pool(&pool).expect("a pool").ensure(asked, &around).await {
        Ok(status) => {
            plan::ingress(Some(&status)).into_iter().map(|(ip, _)| ip).collect::<Vec<_>>().join(" ")
        }
        Err(error) => error.to_string(),
    };
    expected.assert_eq(&shown);
}

#[tokio::test]
async fn nodes_take_traffic_for_services() {
    let plain = service("s", 80, json!({}), &[]);
    check(&[], &plain, &[], expect!["10.0.0.2 198.51.100.3"]).await;
    let local = service("s", 80, json!({"externalTrafficPolicy": "Local"}), &[]);
    check(&[], &local, &[], expect!["198.51.100.3"]).await;
    let dual = service("s", 80, json!({"ipFamilies": ["IPv6", "IPv4"]}), &[]);
    check(&[], &dual, &[], expect!["fd00::2 10.0.0.2 198.51.100.3"]).await;
    let other = service("other", 80, json!({}), &["10.0.0.2"]);
    check(&[], &plain, &[other], expect!["port 80/TCP is taken by Service ns/other"]).await;
    let elsewhere = service("other", 81, json!({}), &["10.0.0.2"]);
    check(&[], &plain, &[elsewhere], expect!["10.0.0.2 198.51.100.3"]).await;
}

#[tokio::test]
async fn a_pool_gives_each_service_an_address() {
    let pool = &["192.0.2.10-192.0.2.11", "2001:db8::/127"];
    let plain = service("s", 80, json!({}), &[]);
    let other = service("other", 80, json!({}), &["192.0.2.10"]);
    check(pool, &plain, std::slice::from_ref(&other), expect!["192.0.2.11"]).await;
    let last = service("last", 80, json!({}), &["192.0.2.11"]);
    check(pool, &plain, &[other.clone(), last], expect!["no address is left in the pool"]).await;
    check(pool, &service("s", 80, json!({}), &["192.0.2.11"]), &[], expect!["192.0.2.11"]).await;
    let dual = service("s", 80, json!({"ipFamilies": ["IPv4", "IPv6"]}), &[]);
    check(pool, &dual, std::slice::from_ref(&other), expect!["192.0.2.11 2001:db8::"]).await;
    let asks = |ip: &str| service("s", 80, json!({"loadBalancerIP": ip}), &[]);
    check(pool, &asks("192.0.2.11"), std::slice::from_ref(&other), expect!["192.0.2.11"]).await;
    check(pool, &asks("192.0.2.10"), &[other], expect!["address 192.0.2.10 is taken"]).await;
    check(pool, &asks("203.0.113.1"), &[], expect!["address 203.0.113.1 is not in the pool"]).await;
    for wrong in ["x", "192.0.2.9-192.0.2.1", "192.0.2.1-::1"] {
        assert!(Nodes::with_pool(&[wrong.to_owned()]).is_err(), "{wrong}");
    }
}

#[test]
fn not_every_node_takes_traffic() {
    let good = node("a", &[], "True");
    assert!(plan::takes_traffic(&good));
    assert!(!plan::takes_traffic(&node("a", &[], "Unknown")));
    let labelled = |value: &str| {
        let mut node = good.clone();
        let label = ("node.kubernetes.io/exclude-from-external-load-balancers".to_owned(), value.to_owned());
        node.metadata.labels = Some([label].into());
        node
    };
    assert!(!plan::takes_traffic(&labelled("")));
    assert!(plan::takes_traffic(&labelled("false")));
}

#[tokio::test]
async fn services_say_where_they_are_reached() {
    let rig = Rig::start(&["service-lb-controller"]).await;
    let node = node("a", &[("InternalIP", "10.0.0.2")], "True");
    let made = rig.client.create(&node).await.expect("a node");
    rig.client.replace_status(&Node { metadata: made.metadata, ..node }).await.expect("a status");
    let make = async |name: &str, kind: &str| {
        let object = json!({"metadata": {"name": name}, "spec": {"type": kind, "ports": [{"port": 80}]}});
        let path = "/api/v1/namespaces/default/services";
        rig.client.request(http::Method::POST, path, Some(&object)).await.expect("a service");
    };
    let reached = async |name: &str| {
        let service: Service = rig.client.get(&Key::new("default", name)).await.ok()?;
        Some(plan::addresses(&service).into_iter().map(|(ip, _)| ip).collect::<Vec<_>>())
    };
    make("first", "LoadBalancer").await;
    let is = async |name: &str, ips: &[&str]| reached(name).await.filter(|found| *found == ips);
    until("an address", || is("first", &["10.0.0.2"])).await;
    make("second", "LoadBalancer").await;
    let key = Key::new("default", "first");
    let patch = Patch::Merge(json!({"spec": {"type": "ClusterIP"}}));
    rig.client.patch::<Service>(&key, &patch).await.expect("a change");
    until("no address any more", || is("first", &[])).await;
    until("the port for the other", || is("second", &["10.0.0.2"])).await;
}

proptest! {
    /// However Services come to their addresses, no two have the same one of a pool, each keeps what it has, and
    /// asking again changes nothing.
    #[test]
    fn no_address_is_given_twice(count in 1..12usize, order in prop::collection::vec(0..12usize, 0..30)) {
        let runtime = tokio::runtime::Builder::new_current_thread().build().expect("a runtime");
        let pool = Nodes::with_pool(&["192.0.2.0-192.0.2.7".to_owned()]).expect("a pool");
        let mut services: Vec<Arc<Service>> =
            (0..count).map(|i| service(&format!("s{i}"), 80, json!({}), &[])).collect();
        for i in (0..count).chain(order.into_iter().filter(|i| *i < count)) {
            let others = services.iter().filter(|other| other.key() != services[i].key()).cloned().collect();
            let around = Around { others, ..Around::default() };
            let before = plan::addresses(&services[i]);
            let Ok(status) = runtime.block_on(pool.ensure(&services[i], &around)) else {
                prop_assert!(before.is_empty() && count > 8);
                continue;
            };
            prop_assert!(before.is_empty() || before == plan::ingress(Some(&status)));
            let given: Vec<String> = plan::ingress(Some(&status)).into_iter().map(|(ip, _)| ip).collect();
            let given: Vec<&str> = given.iter().map(String::as_str).collect();
            services[i] = service(&format!("s{i}"), 80, json!({}), &given);
        }
        let all: Vec<_> = services.iter().flat_map(|service| plan::addresses(service)).collect();
        let distinct: BTreeSet<_> = all.iter().collect();
        prop_assert_eq!(distinct.len(), all.len());
        prop_assert_eq!(all.len(), count.min(8));
    }
}
