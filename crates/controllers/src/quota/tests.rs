use std::collections::BTreeSet;

use api::quota::ScopeAttributes;
use expect_test::{Expect, expect};
use jiff::Timestamp;
use k8s_openapi::api::core::v1::{Pod, Secret};
use proptest::prelude::*;
use reconcile::{Client, DeleteOptions};
use schema::quantity::{Format, Quantity};
use serde_json::{Value, json};

use super::plan::ObjectUsage;
use super::*;
use crate::test_cluster::{TestCluster, wait_for};

fn quota(value: Value) -> ResourceQuota {
    serde_json::from_value(json!({"metadata": {"name": "q", "namespace": "default"}, "spec": value}))
        .expect("a quota")
}

fn entry(uses: &[(&str, &str)], best_effort: bool) -> ObjectUsage {
    let uses =
        uses.iter().map(|(name, text)| ((*name).to_owned(), Quantity::parse(text).expect("a quantity")));
    let attributes = ScopeAttributes::Pod {
        terminating: false,
        best_effort,
        priority_class: String::new(),
        cross_namespace_affinity: false,
    };
    ObjectUsage { uses: uses.collect(), attributes, later_usage: None }
}

#[track_caller]
fn check(spec: Value, entries: &[ObjectUsage], expected: Expect) {
    let known = BTreeSet::from([("".to_owned(), "pods".to_owned())]);
    let (used, requeue_at) = plan::count(&quota(spec), &known, entries.iter(), Timestamp::UNIX_EPOCH);
    let used: Vec<String> = used.iter().map(|(name, quantity)| format!("{name}={quantity}")).collect();
    let requeue_at = requeue_at.map(|at| format!(" until {at}")).unwrap_or_default();
    expected.assert_eq(&format!("{}{requeue_at}", used.join(" ")));
}

#[test]
fn usage_is_sum_of_matching_objects() {
    let pods = [entry(&[("pods", "1"), ("cpu", "500m")], false), entry(&[("pods", "1")], true)];
    check(json!({"hard": {"pods": "5", "cpu": "2"}}), &pods, expect!["cpu=500m pods=2"]);
    check(json!({"hard": {"pods": "5"}, "scopes": ["BestEffort"]}), &pods, expect!["pods=1"]);
    check(json!({"hard": {"pods": "5", "count/widgets.example.com": "2"}}), &[], expect!["pods=0"]);
    let mut expiring = pods[0].clone();
    expiring.later_usage = Some(("2026-01-01T00:00:00Z".parse().expect("a time"), Default::default()));
    check(json!({"hard": {"pods": "5"}}), &[expiring.clone()], expect!["pods=1 until 2026-01-01T00:00:00Z"]);
    expiring.later_usage = Some((Timestamp::UNIX_EPOCH, Default::default()));
    check(json!({"hard": {"pods": "5"}}), &[expiring], expect!["pods=0"]);
}

proptest! {
    /// Applying a count makes the next count a no-op.
    #[test]
    fn usage_status_is_stable(pods in 0i64..50, hard in 0u32..50, status_used in 0u32..50) {
        let mut quota = quota(json!({"hard": {"pods": hard.to_string()}}));
        quota.status = serde_json::from_value(json!({"used": {"pods": status_used.to_string()}})).ok();
        let used = [("pods".to_owned(), Quantity::new(pods, Format::DecimalSI))].into();
        let counted = plan::updated_status(&quota, &used).unwrap_or(quota);
        prop_assert_eq!(plan::updated_status(&counted, &used), None);
        let status_used = counted.status.and_then(|status| status.used).unwrap_or_default();
        prop_assert_eq!(status_used.get("pods").map(|text| text.0.clone()), Some(pods.to_string()));
    }
}

async fn used(client: &Client, name: &str) -> Option<String> {
    let quota: ResourceQuota = client.get(&Key::new("default", "q")).await.ok()?;
    quota.status?.used?.get(name).map(|quantity| quantity.0.clone())
}

#[tokio::test]
async fn released_usage_is_available_again() {
    let test_cluster = TestCluster::start(&["resourcequota-controller"]).await;
    let hard =
        json!({"secrets": "2", "pods": "3", "count/deployments.apps": "1", "count/things.example.com": "1"});
    test_cluster.client.create(&quota(json!({"hard": hard}))).await.expect("a quota");
    let is = async |name: &str, expected: &str| {
        used(&test_cluster.client, name).await.filter(|found| found == expected)
    };
    wait_for("the first count", || is("secrets", "0")).await;
    assert_eq!(used(&test_cluster.client, "count/things.example.com").await, None);
    let secret = |name: &str| -> Secret {
        serde_json::from_value(json!({"metadata": {"name": name, "namespace": "default"}})).expect("a secret")
    };
    test_cluster.client.create(&secret("a")).await.expect("one");
    // Admitted by quota, but not created.
    test_cluster.client.create(&secret("a")).await.expect_err("the same again");
    wait_for("the usage of the rejected object to be released", || is("secrets", "1")).await;
    test_cluster.client.create(&secret("b")).await.expect("another");
    test_cluster.client.create(&secret("c")).await.expect_err("too many");
    test_cluster
        .client
        .delete::<Secret>(&Key::new("default", "a"), &DeleteOptions::default())
        .await
        .expect("a deletion");
    wait_for("the usage of the deleted object to be released", || is("secrets", "1")).await;
    test_cluster.client.create(&secret("c")).await.expect("one more");

    let pod = json!({"metadata": {"name": "p"}, "spec": {"containers": [{"name": "c", "image": "i"}]}});
    let path = "/api/v1/namespaces/default/pods";
    test_cluster.client.request(http::Method::POST, path, Some(&pod)).await.expect("a pod");
    wait_for("the pod to be counted", || is("pods", "1")).await;
    let ended = reconcile::Patch::Merge(json!({"status": {"phase": "Succeeded"}}));
    test_cluster.client.patch_status::<Pod>(&Key::new("default", "p"), &ended).await.expect("an end");
    wait_for("the terminated pod not to be counted", || is("pods", "0")).await;
}
