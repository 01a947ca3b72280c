mod component;

use std::collections::{BTreeMap, BTreeSet};
use std::sync::Arc;

use k8s_openapi::api::core::v1::Service;
use k8s_openapi::api::discovery::v1::{Endpoint, EndpointPort, EndpointSlice};
use proptest::prelude::*;
use reconcile::Object;
use serde_json::json;

use super::hints;
use super::pack::{self, EndpointGroup, SliceChanges, add_placeholder_slice, reuse_deleted_slices};

fn pack(
    blank: &EndpointSlice,
    existing: &[Arc<EndpointSlice>],
    groups: Vec<EndpointGroup>,
    most: usize,
) -> SliceChanges {
    let mut changes = pack::pack(blank, existing, groups, most);
    add_placeholder_slice(blank, &mut changes);
    changes
}

fn blank(labels: &str) -> EndpointSlice {
    serde_json::from_value(json!({
        "metadata": {
            "generateName": "web-", "namespace": "ns",
            "labels": {"kubernetes.io/service-name": "web", "app": labels},
            "ownerReferences": [{"apiVersion": "v1", "kind": "Service", "name": "web", "uid": "u", "controller": true}],
        },
        "addressType": "IPv4", "endpoints": [],
    }))
    .expect("a slice")
}

/// `a` is a ready endpoint, `a!` is not ready.
fn endpoint(text: &str) -> Endpoint {
    let name = text.trim_end_matches('!');
    serde_json::from_value(json!({
        "addresses": [format!("10.0.0.{name}")],
        "conditions": {"ready": !text.ends_with('!')},
        "targetRef": {"kind": "Pod", "namespace": "ns", "name": name},
    }))
    .expect("an endpoint")
}

fn ports(port: i32) -> Vec<EndpointPort> {
    vec![EndpointPort { port: Some(port), ..EndpointPort::default() }]
}

/// A slice given as `name:80 a b!`.
fn slice(text: &str) -> Arc<EndpointSlice> {
    let (name, rest) = text.split_once(':').expect("a name");
    let mut words = rest.split_whitespace();
    let port: i32 = words.next().unwrap_or_default().parse().expect("a port");
    let mut slice = blank("x");
    slice.metadata.name = Some(name.into());
    slice.ports = Some(if port == 0 { Vec::new() } else { ports(port) });
    slice.endpoints = Some(words.map(endpoint).collect());
    Arc::new(slice)
}

fn render(slice: &EndpointSlice) -> String {
    let port = slice.ports.as_deref().unwrap_or_default().first().and_then(|port| port.port).unwrap_or(0);
    let mut endpoints: Vec<String> = slice
        .endpoints
        .iter()
        .flatten()
        .map(|endpoint| {
            let ready = endpoint.conditions.as_ref().and_then(|conditions| conditions.ready) == Some(true);
            let name =
                endpoint.target_ref.as_ref().and_then(|target| target.name.clone()).unwrap_or_default();
            format!(" {name}{}", if ready { "" } else { "!" })
        })
        .collect();
    endpoints.sort();
    format!("{}:{port}{}", slice.name(), endpoints.concat())
}

#[track_caller]
fn check(existing: &[&str], desired: &[(i32, &str)], expected: &[&str]) {
    let existing: Vec<Arc<EndpointSlice>> = existing.iter().map(|text| slice(text)).collect();
    let groups = desired.iter().map(|(port, endpoints)| EndpointGroup {
        ports: ports(*port),
        endpoints: endpoints.split_whitespace().map(endpoint).collect(),
    });
    let mut changes = pack(&blank("x"), &existing, groups.collect(), 3);
    reuse_deleted_slices(&blank("x"), &mut changes);
    let SliceChanges { create, update, delete, .. } = &changes;
    let mut found: Vec<String> = create.iter().map(|slice| format!("create {}", render(slice))).collect();
    found.extend(update.iter().map(|slice| format!("update {}", render(slice))));
    found.extend(delete.iter().map(|slice| format!("delete {}", slice.name())));
    assert_eq!(found, expected);
}

#[test]
fn endpoints_are_packed_with_minimal_changes() {
    // No endpoints: one empty placeholder slice is created.
    check(&[], &[], &["create :0"]);
    check(&["s:0"], &[], &[]);
    check(&[], &[(80, "1 2")], &["create :80 1 2"]);
    check(&["s:0"], &[(80, "1")], &["update s:80 1"]);
    check(&["s:80 1"], &[], &["update s:0"]);
    check(&["s:80 1 2"], &[(80, "1 2")], &[]);
    check(&["s:80 1 2"], &[(80, "1 2!")], &["update s:80 1 2!"]);
    check(&["s:80 1 2"], &[(80, "1")], &["update s:80 1"]);
    // New endpoints go to slices that are updated anyway, else to the best fit, else to a new slice.
    check(&["s:80 1 2", "t:80 3"], &[(80, "1 3 4")], &["update s:80 1 4"]);
    check(&["s:80 1 2", "t:80 3"], &[(80, "1 2 3 4")], &["update s:80 1 2 4"]);
    check(&["s:80 1 2 3"], &[(80, "1 2 3 4")], &["create :80 4"]);
    check(&["s:80 1", "t:80 2"], &[(80, "2")], &["delete s"]);
    // Other ports need another slice.
    check(&["s:80 1"], &[(80, "1"), (81, "2")], &["create :81 2"]);
    check(&["s:80 1"], &[(81, "1")], &["update s:81 1"]);
}

#[test]
fn slices_of_other_owner_are_deleted_and_labels_updated() {
    let mut other = (*slice("s:80 1")).clone();
    other.metadata.owner_references.as_mut().expect("owners")[0].uid = "other".into();
    let changes = pack(
        &blank("x"),
        &[Arc::new(other)],
        vec![EndpointGroup { ports: ports(80), endpoints: vec![endpoint("1")] }],
        3,
    );
    assert_eq!((changes.create.len(), changes.delete.len()), (1, 1));
    let group = EndpointGroup { ports: ports(80), endpoints: vec![endpoint("1")] };
    let changes = pack(&blank("y"), &[slice("s:80 1")], vec![group], 3);
    assert_eq!(changes.update[0].label("app"), Some("y"));
}

/// The slices after `changes` are applied. New slices get names.
fn slices_after(changes: &SliceChanges, round: usize) -> Vec<Arc<EndpointSlice>> {
    let mut after: Vec<Arc<EndpointSlice>> = changes.keep.clone();
    after.extend(changes.update.iter().cloned().map(Arc::new));
    for (i, slice) in changes.create.iter().enumerate() {
        let mut slice = slice.clone();
        slice.metadata.name = Some(format!("new-{round}-{i}"));
        after.push(Arc::new(slice));
    }
    after
}

proptest! {
    #[test]
    fn slices_contain_exactly_the_desired_endpoints(rounds in prop::collection::vec(prop::collection::btree_map(0..40u8, (80..82i32, any::<bool>()), 0..40), 1..5)) {
        let mut slices = Vec::new();
        for (round, desired) in rounds.iter().enumerate() {
            let groups = || desired.iter().map(|(name, (port, ready))| EndpointGroup {
                ports: ports(*port),
                endpoints: vec![endpoint(&format!("{name}{}", if *ready { "" } else { "!" }))],
            }).collect::<Vec<_>>();
            let mut changes = pack(&blank("x"), &slices, groups(), 3);
            reuse_deleted_slices(&blank("x"), &mut changes);
            slices = slices_after(&changes, round);
            let actual: BTreeSet<(String, Option<bool>)> = slices.iter().flat_map(|slice| slice.endpoints.clone().unwrap_or_default())
                .map(|endpoint| (endpoint.addresses[0].clone(), endpoint.conditions.and_then(|c| c.ready))).collect();
            let expected: BTreeSet<(String, Option<bool>)> = desired.iter().map(|(name, (_, ready))| (format!("10.0.0.{name}"), Some(*ready))).collect();
            prop_assert_eq!(actual, expected);
            prop_assert!(slices.iter().all(|slice| slice.endpoints.as_ref().is_none_or(|endpoints| endpoints.len() <= 3)));
            let names: BTreeSet<&str> = slices.iter().map(|slice| slice.name()).collect();
            prop_assert_eq!(names.len(), slices.len());
            let mut again = pack(&blank("x"), &slices, groups(), 3);
            reuse_deleted_slices(&blank("x"), &mut again);
            prop_assert!(again.create.is_empty() && again.update.is_empty() && again.delete.is_empty());
        }
    }
}

/// Takes the zones of endpoints and returns the zones of their hints.
fn zone_hints(zones: &str, shares: &[(&str, f64)]) -> Result<String, String> {
    let endpoints = zones
        .split_whitespace()
        .enumerate()
        .map(|(i, zone)| Endpoint { zone: Some(zone.into()), ..endpoint(&i.to_string()) });
    let slice = EndpointSlice { endpoints: Some(endpoints.collect()), ..blank("x") };
    let mut changes = SliceChanges { create: vec![slice], ..SliceChanges::default() };
    let shares: BTreeMap<String, f64> =
        shares.iter().map(|(zone, share)| ((*zone).to_owned(), *share)).collect();
    hints::allocate_by_zone(&mut changes, (shares.len() > 1).then_some(&shares))?;
    let mut hint_zones: Vec<String> = changes.create[0]
        .endpoints
        .iter()
        .flatten()
        .filter_map(|endpoint| Some(endpoint.hints.as_ref()?.for_zones.as_ref()?.first()?.name.clone()))
        .collect();
    hint_zones.sort();
    let unchanged =
        SliceChanges { keep: changes.create.drain(..).map(Arc::new).collect(), ..SliceChanges::default() };
    let mut again = SliceChanges { keep: unchanged.keep.clone(), ..SliceChanges::default() };
    hints::allocate_by_zone(&mut again, Some(&shares))?;
    assert_eq!(again, unchanged, "balanced hints must not change");
    Ok(hint_zones.join(" "))
}

#[test]
fn endpoints_are_distributed_by_cpu_share() {
    let even = [("a", 0.5), ("b", 0.5)];
    assert_eq!(zone_hints("a a b b", &even).as_deref(), Ok("a a b b"));
    assert_eq!(zone_hints("a a a a", &even).as_deref(), Ok("a a b b"));
    assert_eq!(zone_hints("a a a b b b", &[("a", 0.66), ("b", 0.34)]).as_deref(), Ok("a a a a b b"));
    let err = |text: &str| Err::<String, String>(text.into());
    assert_eq!(zone_hints("a", &even), err("Insufficient number of endpoints (1 endpoints, 2 zones)"));
    assert_eq!(
        zone_hints("a a", &[]),
        err("Insufficient Node information: allocatable CPU or zone not specified on one or more nodes")
    );
    assert_eq!(
        zone_hints("a a b", &even),
        err(
            "Unable to allocate minimum required endpoints to each zone without exceeding overload threshold (3 endpoints, 2 zones)"
        )
    );
}

#[test]
fn prefer_close_hints_match_endpoint_location() {
    let endpoint_in_zone = Endpoint { zone: Some("a".into()), node_name: Some("n".into()), ..endpoint("1") };
    let slice = EndpointSlice { endpoints: Some(vec![endpoint_in_zone]), ..(*slice("s:80")).clone() };
    let mut changes = SliceChanges { keep: vec![Arc::new(slice)], ..SliceChanges::default() };
    hints::add_close_hints(&mut changes, true);
    let hints_of = |slice: &EndpointSlice| json!(slice.endpoints.as_ref().expect("endpoints")[0].hints);
    assert_eq!(
        hints_of(&changes.update[0]),
        json!({"forZones": [{"name": "a"}], "forNodes": [{"name": "n"}]})
    );
    let mut current =
        SliceChanges { keep: vec![Arc::new(changes.update.remove(0))], ..SliceChanges::default() };
    hints::add_close_hints(&mut current, true);
    assert!(current.update.is_empty());
    hints::add_close_hints(&mut current, false);
    assert_eq!(hints_of(&current.update[0]), json!({"forZones": [{"name": "a"}]}));
    hints::remove_hints(&mut current);
    assert_eq!(hints_of(&current.update[0]), json!(null));
}

#[test]
fn reads_distribution_from_field_and_annotation() {
    let distribution = |value: serde_json::Value| {
        hints::TrafficDistribution::of(&serde_json::from_value::<Service>(value).expect("a service"))
    };
    assert_eq!(distribution(json!({"metadata": {}, "spec": {}})), hints::TrafficDistribution::Anywhere);
    assert_eq!(
        distribution(json!({"metadata": {}, "spec": {"trafficDistribution": "PreferSameNode"}})),
        hints::TrafficDistribution::PreferClose { node: true }
    );
    let auto = json!({"metadata": {"annotations": {"service.kubernetes.io/topology-mode": "Auto"}}, "spec": {"trafficDistribution": "PreferClose"}});
    assert_eq!(distribution(auto), hints::TrafficDistribution::Proportional);
}
