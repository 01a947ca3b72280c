use std::collections::BTreeSet;

use api::quota::Facts;
use expect_test::{Expect, expect};
use jiff::Timestamp;
use k8s_openapi::api::core::v1::{Pod, Secret};
use proptest::prelude::*;
use reconcile::{Client, Delete};
use schema::quantity::{Format, Quantity};
use serde_json::{Value, json};

use super::plan::Entry;
use super::*;
use crate::rig::{Rig, until};

fn quota(value: Value) -> ResourceQuota {
    serde_json::from_value(json!({"metadata": {"name": "q", "namespace": "default"}, "spec": value}))
        .expect("a quota")
}

fn entry(uses: &[(&str, &str)], best_effort: bool) -> Entry {
    let uses =
        uses.iter().map(|(name, text)| ((*name).to_owned(), Quantity::parse(text).expect("a quantity")));
    let facts = Facts::Pod {
        terminating: false,
        best_effort,
        priority_class: String::new(),
        crosses_namespaces: false,
    };
    Entry { uses: uses.collect(), facts, afterwards: None }
}

#[track_caller]
fn check(spec: Value, entries: &[Entry], expected: Expect) {
    let known = BTreeSet::from([("".to_owned(), "pods".to_owned())]);
    let (used, recheck) = plan::count(&quota(spec), &known, entries.iter(), Timestamp::UNIX_EPOCH);
    let used: Vec<String> = used.iter().map(|(name, quantity)| format!("{name}={quantity}")).collect();
    let recheck = recheck.map(|at| format!(" until {at}")).unwrap_or_default();
    expected.assert_eq(&format!("{}{recheck}", used.join(" ")));
}

#[test]
fn what_is_used_is_summed_up() {
    let pods = [entry(&[("pods", "1"), ("cpu", "500m")], false), entry(&[("pods", "1")], true)];
    check(json!({"hard": {"pods": "5", "cpu": "2"}}), &pods, expect!["cpu=500m pods=2"]);
    check(json!({"hard": {"pods": "5"}, "scopes": ["BestEffort"]}), &pods, expect!["pods=1"]);
    check(json!({"hard": {"pods": "5", "count/widgets.example.com": "2"}}), &[], expect!["pods=0"]);
    let mut going = pods[0].clone();
    going.afterwards = Some(("2026-01-01T00:00:00Z".parse().expect("a time"), Default::default()));
    check(json!({"hard": {"pods": "5"}}), &[going.clone()], expect!["pods=1 until 2026-01-01T00:00:00Z"]);
    going.afterwards = Some((Timestamp::UNIX_EPOCH, Default::default()));
    check(json!({"hard": {"pods": "5"}}), &[going], expect!["pods=0"]);
}

proptest! {
    /// Writing down what was counted leaves nothing to write.
    #[test]
    fn a_count_is_written_once(pods in 0i64..50, hard in 0u32..50, told in 0u32..50) {
        let mut quota = quota(json!({"hard": {"pods": hard.to_string()}}));
        quota.status = serde_json::from_value(json!({"used": {"pods": told.to_string()}})).ok();
        let used = [("pods".to_owned(), Quantity::new(pods, Format::DecimalSI))].into();
        let counted = plan::counted(&quota, &used).unwrap_or(quota);
        prop_assert_eq!(plan::counted(&counted, &used), None);
        let told = counted.status.and_then(|status| status.used).unwrap_or_default();
        prop_assert_eq!(told.get("pods").map(|text| text.0.clone()), Some(pods.to_string()));
    }
}

async fn used(client: &Client, name: &str) -> Option<String> {
    let quota: ResourceQuota = client.get(&Key::new("default", "q")).await.ok()?;
    quota.status?.used?.get(name).map(|quantity| quantity.0.clone())
}

#[tokio::test]
async fn what_is_given_back_can_be_used_again() {
    let rig = Rig::start(&["resourcequota-controller"]).await;
    let hard =
        json!({"secrets": "2", "pods": "3", "count/deployments.apps": "1", "count/things.example.com": "1"});
    rig.client.create(&quota(json!({"hard": hard}))).await.expect("a quota");
    let is = async |name: &str, wanted: &str| used(&rig.client, name).await.filter(|found| found == wanted);
    until("a count", || is("secrets", "0")).await;
    assert_eq!(used(&rig.client, "count/things.example.com").await, None);
    let secret = |name: &str| -> Secret {
        serde_json::from_value(json!({"metadata": {"name": name, "namespace": "default"}})).expect("a secret")
    };
    rig.client.create(&secret("a")).await.expect("one");
    // Granted, and failed after all.
    rig.client.create(&secret("a")).await.expect_err("the same again");
    until("what failed to be given back", || is("secrets", "1")).await;
    rig.client.create(&secret("b")).await.expect("another");
    rig.client.create(&secret("c")).await.expect_err("too many");
    rig.client.delete::<Secret>(&Key::new("default", "a"), &Delete::default()).await.expect("a deletion");
    until("what is gone to be given back", || is("secrets", "1")).await;
    rig.client.create(&secret("c")).await.expect("one more");

    let pod = json!({"metadata": {"name": "p"}, "spec": {"containers": [{"name": "c", "image": "i"}]}});
    let path = "/api/v1/namespaces/default/pods";
    rig.client.request(http::Method::POST, path, Some(&pod)).await.expect("a pod");
    until("a pod to count", || is("pods", "1")).await;
    let ended = reconcile::Patch::Merge(json!({"status": {"phase": "Succeeded"}}));
    rig.client.patch_status::<Pod>(&Key::new("default", "p"), &ended).await.expect("an end");
    until("a pod that has ended not to", || is("pods", "0")).await;
}
