use std::sync::Arc;

use expect_test::{Expect, expect};
use serde_json::Value;

use crate::testing::world;

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
