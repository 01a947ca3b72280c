use std::sync::Arc;

use async_trait::async_trait;
use parking_lot::Mutex;
use proptest::prelude::*;
use reconcile::Settings;
use reconcile::cloud::{Cloud, CloudHandle, LoadBalancer, Route, Routes};
use serde_json::json;

use super::*;
use crate::test_cluster::{TestCluster, wait_for};

fn node(name: &str, network: &str) -> Node {
    let addresses = json!([{"type": "InternalIP", "address": "10.0.0.1"}]);
    serde_json::from_value(json!({
        "metadata": {"name": name}, "spec": {"podCIDRs": [network], "podCIDR": network}, "status": {"addresses": addresses},
    }))
    .expect("a node")
}

fn route(node: &str, network: &str) -> Route {
    Route {
        node: node.into(),
        addresses: vec!["10.0.0.1".parse().expect("an address")],
        network: network.into(),
    }
}

proptest! {
    #[test]
    fn routes_match_node_cidrs(
        nodes in prop::collection::btree_map(0u8..6, 0u8..6, 0..6),
        existing in prop::collection::btree_set((0u8..6, 0u8..6), 0..12),
    ) {
        let network = |number: u8| format!("10.42.{number}.0/24");
        let nodes: Vec<Arc<Node>> =
            nodes.iter().map(|(name, number)| Arc::new(node(&format!("n{name}"), &network(*number)))).collect();
        let mut routes: Vec<Route> =
            existing.iter().map(|(name, number)| route(&format!("n{name}"), &network(*number))).collect();
        let foreign = route("elsewhere", "192.168.0.0/24");
        routes.push(foreign.clone());
        let whole = ["10.42.0.0/16".to_owned()];
        let plan = plan::plan(&nodes, &routes, &whole);
        routes.retain(|route| !plan.delete.contains(route));
        routes.extend(plan.create);
        prop_assert_eq!(plan::plan(&nodes, &routes, &whole), plan::RoutePlan::default());
        prop_assert!(routes.contains(&foreign));
        prop_assert_eq!(routes.len(), nodes.len() + 1);
    }
}

#[derive(Default)]
struct Table(Mutex<Vec<Route>>);

impl Cloud for Table {
    fn load_balancer(&self) -> Option<&dyn LoadBalancer> {
        None
    }

    fn routes(&self) -> Option<&dyn Routes> {
        Some(self)
    }
}

#[async_trait]
impl Routes for Table {
    async fn list(&self) -> Result<Vec<Route>, CloudError> {
        Ok(self.0.lock().clone())
    }

    async fn create(&self, route: &Route) -> Result<(), CloudError> {
        self.0.lock().push(route.clone());
        Ok(())
    }

    async fn delete(&self, route: &Route) -> Result<(), CloudError> {
        self.0.lock().retain(|other| other != route);
        Ok(())
    }
}

#[tokio::test]
async fn creates_routes_and_updates_network_condition() {
    let mut test_cluster = TestCluster::start(&[]).await;
    let table = Arc::new(Table::default());
    table.0.lock().push(route("gone", "10.42.9.0/24"));
    let settings = Settings {
        cloud: CloudHandle(Some(table.clone())),
        cluster_cidrs: vec!["10.42.0.0/16".into()],
        ..Settings::default()
    };
    test_cluster.ctx = test_cluster.ctx.clone().with_settings(settings);
    test_cluster.start_controller("node-route-controller");
    let created = node("a", "10.42.1.0/24");
    test_cluster.client.create(&created).await.expect("a node");
    // Without a resource version, because the controller may have updated the node already.
    test_cluster.client.replace_status(&created).await.expect("a status");
    let available = || async {
        let node: Node = test_cluster.client.get(&Key::new("", "a")).await.ok()?;
        node::condition(&node, NETWORK_UNAVAILABLE)
            .filter(|available| available.status == "False")
            .map(|_| ())
    };
    wait_for("a condition", available).await;
    let right = || async { (*table.0.lock() == [route("a", "10.42.1.0/24")]).then_some(()) };
    wait_for("one route", right).await;
}
