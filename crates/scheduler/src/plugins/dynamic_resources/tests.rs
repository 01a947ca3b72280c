use std::sync::Arc;

use expect_test::{Expect, expect};
use k8s_openapi::api::resource::v1 as resource;
use serde_json::{Value, json};

use crate::testing::{World, world};

const CLUSTER: &str = r#"
    node a
    node b
    {"kind":"DeviceClass","metadata":{"name":"gpu"},"spec":{}}
    {"kind":"DeviceClass","metadata":{"name":"picky"},"spec":{"selectors":[{"cel":{"expression":"device.attributes['d'].model == 'big'"}}]}}
    {"kind":"DeviceClass","metadata":{"name":"broken"},"spec":{"selectors":[{"cel":{"expression":"x"}}]}}
    {"kind":"ResourceSlice","metadata":{"name":"s1"},"spec":{"driver":"d","nodeName":"a","pool":{"name":"a","generation":1,"resourceSliceCount":1},"devices":[{"name":"g0"},{"name":"g1","taints":[{"key":"k","effect":"NoSchedule"}]}]}}
    {"kind":"ResourceSlice","metadata":{"name":"s2"},"spec":{"driver":"d","nodeName":"b","pool":{"name":"b","generation":1,"resourceSliceCount":1},"devices":[{"name":"g0"},{"name":"g1","attributes":{"model":{"string":"big"}}}]}}
    {"kind":"ResourceClaim","metadata":{"name":"one","namespace":"default"},"spec":{"devices":{"requests":[{"name":"r","exactly":{"deviceClassName":"gpu","allocationMode":"ExactCount","count":1}}]}}}
    {"kind":"ResourceClaim","metadata":{"name":"two","namespace":"default"},"spec":{"devices":{"requests":[{"name":"r","exactly":{"deviceClassName":"gpu","allocationMode":"ExactCount","count":2}}]}}}
    {"kind":"ResourceClaim","metadata":{"name":"rather","namespace":"default"},"spec":{"devices":{"requests":[{"name":"r","firstAvailable":[{"name":"x","deviceClassName":"gpu","count":3},{"name":"y","deviceClassName":"gpu","count":1}]}]}}}
    {"kind":"ResourceClaim","metadata":{"name":"nowhere","namespace":"default"},"spec":{"devices":{"requests":[{"name":"r","exactly":{"deviceClassName":"tpu"}}]}}}
    {"kind":"ResourceClaim","metadata":{"name":"picky","namespace":"default"},"spec":{"devices":{"requests":[{"name":"r","exactly":{"deviceClassName":"picky"}}]}}}
    {"kind":"ResourceClaim","metadata":{"name":"broken","namespace":"default"},"spec":{"devices":{"requests":[{"name":"r","exactly":{"deviceClassName":"broken"}}]}}}
    {"kind":"ResourceClaim","metadata":{"name":"has","namespace":"default"},"spec":{},"status":{"allocation":{"nodeSelector":{"nodeSelectorTerms":[{"matchFields":[{"key":"metadata.name","operator":"In","values":["b"]}]}]},"devices":{"results":[{"request":"r","driver":"d","pool":"b","device":"g0"}]}}}}"#;

fn pod(name: &str, claim: &str) -> String {
    format!(r#"pod {name} {{"spec":{{"resourceClaims":[{{"name":"c","resourceClaimName":"{claim}"}}]}}}}"#)
}

#[track_caller]
fn check(claim: &str, expected: Expect) {
    let plugin = super::make(&Value::Null).unwrap();
    expected.assert_eq(&world(CLUSTER).filter(&plugin, &pod("p", claim)));
}

#[test]
fn devices_must_be_free_where_the_pod_runs() {
    check(
        "one",
        expect![[r#"
        a: ok
        b: ok
    "#]],
    );
    // One device of a is tainted, one of b is taken.
    check(
        "two",
        expect![[r#"
        a: never, cannot allocate all claims
        b: never, cannot allocate all claims
    "#]],
    );
    check(
        "rather",
        expect![[r#"
        a: ok
        b: ok
    "#]],
    );
    check(
        "has",
        expect![[r#"
        a: never, resourceclaim not available on the node
        b: ok
    "#]],
    );
}

#[test]
fn what_cannot_be_met_anywhere_is_told() {
    check(
        "nobody",
        expect![[r#"
        reject never, resourceclaim.resource.k8s.io "nobody" not found
    "#]],
    );
    check("nowhere", expect!["reject never, request r: device class tpu does not exist\n"]);
    check(
        "broken",
        expect![[r#"
        reject never, class broken: selector #0: CEL compile error: compilation failed: ERROR: <input>:1:1: undeclared reference to 'x' (in container '')
         | x
         | ^
    "#]],
    );
    check(
        "picky",
        expect![[r#"
        a: never, cannot allocate all claims
        b: ok
    "#]],
    );
}

#[test]
fn a_device_is_given_once() {
    let plugin = super::make(&Value::Null).unwrap();
    let reserve = plugin.reserve.as_ref().unwrap();
    let mut world = world(CLUSTER);
    let node: Arc<str> = "a".into();
    let (first, _) = world.info(&pod("p1", "one"));
    assert!(reserve.reserve(&mut world.state, &first, &node).is_success());
    let claim = world.state.objects.resource_claims["default/one"].clone();
    let status = claim.status.clone().unwrap();
    assert_eq!(status.reserved_for.unwrap()[0].uid, "uid-p1");
    assert_eq!(status.allocation.unwrap().devices.unwrap().results.unwrap()[0].device, "g0");
    expect![[r#"
        a: never, cannot allocate all claims
        b: ok
    "#]]
    .assert_eq(&world.filter(&plugin, &pod("p2", "rather")));
    reserve.unreserve(&mut world.state, &first, &node);
    assert!(world.state.objects.resource_claims["default/one"].status.is_none());
}

/// A cluster of one node with these devices, and a claim with this spec.
fn cluster_of(devices: &str, more: &str, claim: &str) -> World {
    // Every slice of a pool says how many there are.
    let slices = if more.contains(r#""name":"p","generation":2"#) { 2 } else { 1 };
    world(&format!(
        r#"
    node a
    {{"kind":"DeviceClass","metadata":{{"name":"gpu"}},"spec":{{"config":[{{"opaque":{{"driver":"d","parameters":{{"from":"class"}}}}}}]}}}}
    {{"kind":"ResourceSlice","metadata":{{"name":"s"}},"spec":{{"driver":"d.io","allNodes":true,"pool":{{"name":"p","generation":2,"resourceSliceCount":{slices}}},"devices":[{devices}]}}}}
    {{"kind":"ResourceSlice","metadata":{{"name":"old"}},"spec":{{"driver":"d.io","allNodes":true,"pool":{{"name":"p","generation":1,"resourceSliceCount":1}},"devices":[{{"name":"gone"}}]}}}}
    {{"kind":"ResourceClaim","metadata":{{"name":"c","namespace":"default"}},"spec":{{"devices":{claim}}}}}{more}"#
    ))
}

fn allocated(world: &mut World) -> Result<resource::AllocationResult, String> {
    let plugin = super::make(&Value::Null).unwrap();
    let (pod, _) = world.info(&pod("p", "c"));
    let reserve = plugin.reserve.as_ref().unwrap();
    let status = reserve.reserve(&mut world.state, &pod, &"a".into());
    if !status.is_success() {
        return Err(status.reasons.join(", "));
    }
    let claim = world.state.objects.resource_claims["default/c"].clone();
    Ok(claim.status.clone().unwrap().allocation.unwrap())
}

/// Says what the claim would be given.
#[track_caller]
fn given(devices: &str, more: &str, claim: &str, expected: Expect) {
    let allocation = match allocated(&mut cluster_of(devices, more, claim)) {
        Ok(allocation) => allocation,
        Err(why) => return expected.assert_eq(&(why + "\n")),
    };
    let mut said = String::new();
    for result in allocation.devices.unwrap().results.unwrap() {
        said += &format!("{} {}", result.request, result.device);
        if result.share_id.is_some() {
            let parts = result.consumed_capacity.unwrap_or_default();
            let parts: Vec<_> = parts.iter().map(|(name, part)| format!("{name}={}", part.0)).collect();
            said += &format!(" shared {}", parts.join(","));
        }
        if result.admin_access == Some(true) {
            said += " admin";
        }
        said.push('\n');
    }
    if let Some(selector) = allocation.node_selector {
        said += &serde_json::to_string(&selector).unwrap();
    }
    expected.assert_eq(&said);
}

const NUMA: &str = r#"
    {"name":"g0","attributes":{"numa":{"int":0},"d.io/model":{"string":"x"}}},
    {"name":"g1","attributes":{"numa":{"int":1},"d.io/model":{"string":"x"}}},
    {"name":"g2","attributes":{"numa":{"int":1},"d.io/model":{"string":"y"}}},
    {"name":"g3"}"#;

fn one_line(text: &str) -> String {
    text.split_whitespace().collect::<Vec<_>>().join(" ")
}

#[test]
fn devices_agree_on_attributes() {
    let numa = one_line(NUMA);
    let two = |constraint: &str| {
        format!(
            r#"{{"requests":[{{"name":"r","exactly":{{"deviceClassName":"gpu","count":2}}}}],"constraints":[{constraint}]}}"#
        )
    };
    // The first device fits alone, but no other goes with it: the search must come back to it.
    given(&numa, "", &two(r#"{"matchAttribute":"d.io/numa"}"#), expect!["r g1\nr g2\n"]);
    given(&numa, "", &two(r#"{"distinctAttribute":"d.io/numa"}"#), expect!["r g0\nr g1\n"]);
    given(
        &numa,
        "",
        &two(r#"{"matchAttribute":"d.io/numa"},{"matchAttribute":"d.io/model"}"#),
        expect!["cannot allocate all claims\n"],
    );
    given(&numa, "", &two(r#"{"matchAttribute":"d.io/numa","requests":["other"]}"#), expect!["r g0\nr g1\n"]);
    given(
        &numa,
        "",
        &two("{}"),
        expect!["claim default/c, constraint #0: empty constraint (unsupported constraint type?)\n"],
    );
}

#[test]
fn all_means_all_and_the_first_way_that_goes_is_gone() {
    let numa = one_line(NUMA);
    let all = r#"{"requests":[{"name":"r","exactly":{"deviceClassName":"gpu","allocationMode":"All","selectors":[{"cel":{"expression":"'numa' in device.attributes['d.io']"}}]}}]}"#;
    given(&numa, "", all, expect!["r g0\nr g1\nr g2\n"]);
    let taken = "\n    {\"kind\":\"ResourceClaim\",\"metadata\":{\"name\":\"o\",\"namespace\":\"default\"},\"spec\":{},\"status\":{\"allocation\":{\"devices\":{\"results\":[{\"request\":\"r\",\"driver\":\"d.io\",\"pool\":\"p\",\"device\":\"g1\"}]}}}}";
    given(&numa, taken, all, expect!["cannot allocate all claims\n"]);
    let admin = r#"{"requests":[{"name":"r","exactly":{"deviceClassName":"gpu","allocationMode":"All","adminAccess":true}}]}"#;
    given(&numa, taken, admin, expect!["r g0 admin\nr g1 admin\nr g2 admin\nr g3 admin\n"]);
    let first = r#"{"requests":[{"name":"r","firstAvailable":[{"name":"many","deviceClassName":"gpu","count":5},{"name":"few","deviceClassName":"gpu","count":2}]},{"name":"s","exactly":{"deviceClassName":"gpu"}}]}"#;
    given(&numa, taken, first, expect!["r/few g0\nr/few g2\ns g3\n"]);
    let unfinished = "\n    {\"kind\":\"ResourceSlice\",\"metadata\":{\"name\":\"n\"},\"spec\":{\"driver\":\"d.io\",\"allNodes\":true,\"pool\":{\"name\":\"q\",\"generation\":1,\"resourceSliceCount\":2},\"devices\":[{\"name\":\"g9\"}]}}";
    given(
        &numa,
        unfinished,
        admin,
        expect![
            "claim default/c, request r: asks for all devices, but resource pool d.io/q is currently being updated\n"
        ],
    );
    let more = r#"{"requests":[{"name":"r","exactly":{"deviceClassName":"gpu","count":5}}]}"#;
    given(&numa, unfinished, more, expect!["cannot allocate all claims\n"]);
}

#[test]
fn parts_of_devices_are_counted() {
    let shared = r#"{"name":"g0","allowMultipleAllocations":true,"capacity":{"memory":{"value":"10Gi","requestPolicy":{"default":"1Gi","validRange":{"min":"1Gi","step":"1Gi"}}}}}"#;
    let asks = |first: &str, second: &str| {
        format!(
            r#"{{"requests":[{{"name":"r","exactly":{{"deviceClassName":"gpu","capacity":{{"requests":{{"memory":"{first}"}}}}}}}},{{"name":"s","exactly":{{"deviceClassName":"gpu","capacity":{{"requests":{{"memory":"{second}"}}}}}}}}]}}"#
        )
    };
    given(shared, "", &asks("2500Mi", "7Gi"), expect!["r g0 shared memory=3Gi\ns g0 shared memory=7Gi\n"]);
    given(shared, "", &asks("4Gi", "7Gi"), expect!["cannot allocate all claims\n"]);
    let other = "\n    {\"kind\":\"ResourceClaim\",\"metadata\":{\"name\":\"o\",\"namespace\":\"default\"},\"spec\":{},\"status\":{\"allocation\":{\"devices\":{\"results\":[{\"request\":\"r\",\"driver\":\"d.io\",\"pool\":\"p\",\"device\":\"g0\",\"shareID\":\"x\",\"consumedCapacity\":{\"memory\":\"8Gi\"}}]}}}}";
    given(shared, other, &asks("1Gi", "1Gi"), expect!["r g0 shared memory=1Gi\ns g0 shared memory=1Gi\n"]);
    given(shared, other, &asks("1Gi", "2Gi"), expect!["cannot allocate all claims\n"]);
}

#[test]
fn devices_made_of_the_same_parts_exclude_each_other() {
    let devices = one_line(
        r#"
        {"name":"whole","consumesCounters":[{"counterSet":"card","counters":{"memory":{"value":"4"}}}]},
        {"name":"half-0","consumesCounters":[{"counterSet":"card","counters":{"memory":{"value":"2"}}}]},
        {"name":"half-1","consumesCounters":[{"counterSet":"card","counters":{"memory":{"value":"2"}}}]}"#,
    );
    let set = |name: &str| {
        format!(
            "\n    {}",
            json!({"kind": "ResourceSlice", "metadata": {"name": "sets"}, "spec": {
                "driver": "d.io", "allNodes": true,
                "pool": {"generation": 2, "name": "p", "resourceSliceCount": 2},
                "sharedCounters": [{"name": name, "counters": {"memory": {"value": "4"}}}],
            }})
        )
        .replace(r#""generation":2,"name":"p""#, r#""name":"p","generation":2"#)
    };
    let count = |count: u32| {
        format!(r#"{{"requests":[{{"name":"r","exactly":{{"deviceClassName":"gpu","count":{count}}}}}]}}"#)
    };
    given(&devices, &set("card"), &count(1), expect!["r whole\n"]);
    // The whole one is tried first and leaves nothing for another.
    given(&devices, &set("card"), &count(2), expect!["r half-0\nr half-1\n"]);
    given(&devices, &set("card"), &count(3), expect!["cannot allocate all claims\n"]);
    given(&devices, &set("other"), &count(1), expect!["invalid resource pools were encountered\n"]);
    let half = json!({"kind": "ResourceClaim", "metadata": {"name": "o", "namespace": "default"}, "spec": {},
        "status": {"allocation": {"devices": {"results": [
            {"request": "r", "driver": "d.io", "pool": "p", "device": "half-0"}]}}}});
    let more = format!("{}\n    {half}", set("card"));
    given(&devices, &more, &count(1), expect!["r half-1\n"]);
}

#[test]
fn drivers_are_told_what_classes_and_claims_say() {
    let numa = one_line(NUMA);
    let claim = r#"{"requests":[{"name":"r","exactly":{"deviceClassName":"gpu"}},{"name":"s","firstAvailable":[{"name":"t","deviceClassName":"gpu"}]}],"config":[{"opaque":{"driver":"d","parameters":{"to":"all"}}},{"requests":["s/t"],"opaque":{"driver":"d","parameters":{"to":"t"}}},{"requests":["x"],"opaque":{"driver":"d","parameters":{}}}]}"#;
    let mut world = cluster_of(&numa, "", claim);
    let config = allocated(&mut world).unwrap().devices.unwrap().config.unwrap();
    let said: Vec<_> = config.iter().map(|one| serde_json::to_string(one).unwrap()).collect();
    expect![[r#"
        {"opaque":{"driver":"d","parameters":{"from":"class"}},"requests":["r","s/t"],"source":"FromClass"}
        {"opaque":{"driver":"d","parameters":{"to":"all"}},"source":"FromClaim"}
        {"opaque":{"driver":"d","parameters":{"to":"t"}},"requests":["s/t"],"source":"FromClaim"}"#]]
    .assert_eq(&said.join("\n"));
}
