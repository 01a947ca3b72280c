use std::sync::Arc;

use bytes::Bytes;
use client::{Client, Connection, Error, Watch};
use expect_test::{Expect, expect};
use http::{Request, Response};
use k8s_openapi::api::resource::v1 as resource;
use parking_lot::Mutex;
use serde_json::{Value, json};

use crate::bind::BindContext;
use crate::testing::{TestCluster, test_cluster};

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
    expected.assert_eq(&test_cluster(CLUSTER).filter(&plugin, &pod("p", claim)));
}

#[test]
fn filters_nodes_without_free_devices() {
    check(
        "one",
        expect![[r#"
        a: ok
        b: ok
    "#]],
    );
    // One device on a is tainted, one on b is allocated.
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
fn rejects_pod_with_invalid_claims() {
    check(
        "missing",
        expect![[r#"
        reject never, resourceclaim.resource.k8s.io "missing" not found
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
fn reserved_device_is_not_allocated_again() {
    let plugin = super::make(&Value::Null).unwrap();
    let reserve = plugin.reserve.as_ref().unwrap();
    let mut cluster = test_cluster(CLUSTER);
    let node: Arc<str> = "a".into();
    let (first, _) = cluster.info(&pod("p1", "one"));
    assert!(reserve.reserve(&mut cluster.state, &first, &node).is_success());
    let claim = cluster.state.objects.resource_claims["default/one"].clone();
    let status = claim.status.clone().unwrap();
    assert_eq!(status.reserved_for.unwrap()[0].uid, "uid-p1");
    assert_eq!(status.allocation.unwrap().devices.unwrap().results.unwrap()[0].device, "g0");
    expect![[r#"
        a: never, cannot allocate all claims
        b: ok
    "#]]
    .assert_eq(&cluster.filter(&plugin, &pod("p2", "rather")));
    reserve.unreserve(&mut cluster.state, &first, &node);
    assert!(cluster.state.objects.resource_claims["default/one"].status.is_none());
}

/// A cluster with one node and these devices, and a claim with this spec.
fn cluster_of(devices: &str, more: &str, claim: &str) -> TestCluster {
    // Every slice states the number of slices in its pool.
    let slices = if more.contains(r#""name":"p","generation":2"#) { 2 } else { 1 };
    test_cluster(&format!(
        r#"
    node a
    {{"kind":"DeviceClass","metadata":{{"name":"gpu"}},"spec":{{"config":[{{"opaque":{{"driver":"d","parameters":{{"from":"class"}}}}}}]}}}}
    {{"kind":"ResourceSlice","metadata":{{"name":"s"}},"spec":{{"driver":"d.io","allNodes":true,"pool":{{"name":"p","generation":2,"resourceSliceCount":{slices}}},"devices":[{devices}]}}}}
    {{"kind":"ResourceSlice","metadata":{{"name":"old"}},"spec":{{"driver":"d.io","allNodes":true,"pool":{{"name":"p","generation":1,"resourceSliceCount":1}},"devices":[{{"name":"gone"}}]}}}}
    {{"kind":"ResourceClaim","metadata":{{"name":"c","namespace":"default"}},"spec":{{"devices":{claim}}}}}{more}"#
    ))
}

fn reserve_claim(cluster: &mut TestCluster) -> Result<resource::AllocationResult, String> {
    let plugin = super::make(&Value::Null).unwrap();
    let (pod, _) = cluster.info(&pod("p", "c"));
    let reserve = plugin.reserve.as_ref().unwrap();
    let status = reserve.reserve(&mut cluster.state, &pod, &"a".into());
    if !status.is_success() {
        return Err(status.reasons.join(", "));
    }
    let claim = cluster.state.objects.resource_claims["default/c"].clone();
    Ok(claim.status.clone().unwrap().allocation.unwrap())
}

/// Formats the allocation result of the claim.
#[track_caller]
fn check_allocation(devices: &str, more: &str, claim: &str, expected: Expect) {
    let allocation = match reserve_claim(&mut cluster_of(devices, more, claim)) {
        Ok(allocation) => allocation,
        Err(reason) => return expected.assert_eq(&(reason + "\n")),
    };
    let mut output = String::new();
    for result in allocation.devices.unwrap().results.unwrap() {
        output += &format!("{} {}", result.request, result.device);
        if result.share_id.is_some() {
            let parts = result.consumed_capacity.unwrap_or_default();
            let parts: Vec<_> = parts.iter().map(|(name, part)| format!("{name}={}", part.0)).collect();
            output += &format!(" shared {}", parts.join(","));
        }
        if result.admin_access == Some(true) {
            output += " admin";
        }
        output.push('\n');
    }
    if let Some(selector) = allocation.node_selector {
        output += &serde_json::to_string(&selector).unwrap();
    }
    expected.assert_eq(&output);
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
fn enforces_match_and_distinct_attribute_constraints() {
    let numa = one_line(NUMA);
    let two = |constraint: &str| {
        format!(
            r#"{{"requests":[{{"name":"r","exactly":{{"deviceClassName":"gpu","count":2}}}}],"constraints":[{constraint}]}}"#
        )
    };
    // The first device fits alone but matches no other: the search must backtrack.
    check_allocation(&numa, "", &two(r#"{"matchAttribute":"d.io/numa"}"#), expect!["r g1\nr g2\n"]);
    check_allocation(&numa, "", &two(r#"{"distinctAttribute":"d.io/numa"}"#), expect!["r g0\nr g1\n"]);
    check_allocation(
        &numa,
        "",
        &two(r#"{"matchAttribute":"d.io/numa"},{"matchAttribute":"d.io/model"}"#),
        expect!["cannot allocate all claims\n"],
    );
    check_allocation(
        &numa,
        "",
        &two(r#"{"matchAttribute":"d.io/numa","requests":["other"]}"#),
        expect!["r g0\nr g1\n"],
    );
    check_allocation(
        &numa,
        "",
        &two("{}"),
        expect!["claim default/c, constraint #0: empty constraint (unsupported constraint type?)\n"],
    );
}

#[test]
fn all_mode_and_first_available_allocation() {
    let numa = one_line(NUMA);
    let all = r#"{"requests":[{"name":"r","exactly":{"deviceClassName":"gpu","allocationMode":"All","selectors":[{"cel":{"expression":"'numa' in device.attributes['d.io']"}}]}}]}"#;
    check_allocation(&numa, "", all, expect!["r g0\nr g1\nr g2\n"]);
    let taken = "\n    {\"kind\":\"ResourceClaim\",\"metadata\":{\"name\":\"o\",\"namespace\":\"default\"},\"spec\":{},\"status\":{\"allocation\":{\"devices\":{\"results\":[{\"request\":\"r\",\"driver\":\"d.io\",\"pool\":\"p\",\"device\":\"g1\"}]}}}}";
    check_allocation(&numa, taken, all, expect!["cannot allocate all claims\n"]);
    let admin = r#"{"requests":[{"name":"r","exactly":{"deviceClassName":"gpu","allocationMode":"All","adminAccess":true}}]}"#;
    check_allocation(&numa, taken, admin, expect!["r g0 admin\nr g1 admin\nr g2 admin\nr g3 admin\n"]);
    let first = r#"{"requests":[{"name":"r","firstAvailable":[{"name":"many","deviceClassName":"gpu","count":5},{"name":"few","deviceClassName":"gpu","count":2}]},{"name":"s","exactly":{"deviceClassName":"gpu"}}]}"#;
    check_allocation(&numa, taken, first, expect!["r/few g0\nr/few g2\ns g3\n"]);
    let incomplete_pool = "\n    {\"kind\":\"ResourceSlice\",\"metadata\":{\"name\":\"n\"},\"spec\":{\"driver\":\"d.io\",\"allNodes\":true,\"pool\":{\"name\":\"q\",\"generation\":1,\"resourceSliceCount\":2},\"devices\":[{\"name\":\"g9\"}]}}";
    check_allocation(
        &numa,
        incomplete_pool,
        admin,
        expect![
            "claim default/c, request r: asks for all devices, but resource pool d.io/q is currently being updated\n"
        ],
    );
    let more = r#"{"requests":[{"name":"r","exactly":{"deviceClassName":"gpu","count":5}}]}"#;
    check_allocation(&numa, incomplete_pool, more, expect!["cannot allocate all claims\n"]);
}

#[test]
fn tracks_consumed_capacity_of_shared_devices() {
    let shared = r#"{"name":"g0","allowMultipleAllocations":true,"capacity":{"memory":{"value":"10Gi","requestPolicy":{"default":"1Gi","validRange":{"min":"1Gi","step":"1Gi"}}}}}"#;
    let claim_with = |first: &str, second: &str| {
        format!(
            r#"{{"requests":[{{"name":"r","exactly":{{"deviceClassName":"gpu","capacity":{{"requests":{{"memory":"{first}"}}}}}}}},{{"name":"s","exactly":{{"deviceClassName":"gpu","capacity":{{"requests":{{"memory":"{second}"}}}}}}}}]}}"#
        )
    };
    check_allocation(
        shared,
        "",
        &claim_with("2500Mi", "7Gi"),
        expect!["r g0 shared memory=3Gi\ns g0 shared memory=7Gi\n"],
    );
    check_allocation(shared, "", &claim_with("4Gi", "7Gi"), expect!["cannot allocate all claims\n"]);
    let other = "\n    {\"kind\":\"ResourceClaim\",\"metadata\":{\"name\":\"o\",\"namespace\":\"default\"},\"spec\":{},\"status\":{\"allocation\":{\"devices\":{\"results\":[{\"request\":\"r\",\"driver\":\"d.io\",\"pool\":\"p\",\"device\":\"g0\",\"shareID\":\"x\",\"consumedCapacity\":{\"memory\":\"8Gi\"}}]}}}}";
    check_allocation(
        shared,
        other,
        &claim_with("1Gi", "1Gi"),
        expect!["r g0 shared memory=1Gi\ns g0 shared memory=1Gi\n"],
    );
    check_allocation(shared, other, &claim_with("1Gi", "2Gi"), expect!["cannot allocate all claims\n"]);
}

#[test]
fn enforces_shared_counters() {
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
    check_allocation(&devices, &set("card"), &count(1), expect!["r whole\n"]);
    // The full device is tried first and leaves no counters for another one.
    check_allocation(&devices, &set("card"), &count(2), expect!["r half-0\nr half-1\n"]);
    check_allocation(&devices, &set("card"), &count(3), expect!["cannot allocate all claims\n"]);
    check_allocation(
        &devices,
        &set("other"),
        &count(1),
        expect!["invalid resource pools were encountered\n"],
    );
    let half = json!({"kind": "ResourceClaim", "metadata": {"name": "o", "namespace": "default"}, "spec": {},
        "status": {"allocation": {"devices": {"results": [
            {"request": "r", "driver": "d.io", "pool": "p", "device": "half-0"}]}}}});
    let more = format!("{}\n    {half}", set("card"));
    check_allocation(&devices, &more, &count(1), expect!["r half-1\n"]);
}

#[test]
fn passes_class_and_claim_config_to_drivers() {
    let numa = one_line(NUMA);
    let claim = r#"{"requests":[{"name":"r","exactly":{"deviceClassName":"gpu"}},{"name":"s","firstAvailable":[{"name":"t","deviceClassName":"gpu"}]}],"config":[{"opaque":{"driver":"d","parameters":{"to":"all"}}},{"requests":["s/t"],"opaque":{"driver":"d","parameters":{"to":"t"}}},{"requests":["x"],"opaque":{"driver":"d","parameters":{}}}]}"#;
    let mut cluster = cluster_of(&numa, "", claim);
    let config = reserve_claim(&mut cluster).unwrap().devices.unwrap().config.unwrap();
    let rendered: Vec<_> = config.iter().map(|one| serde_json::to_string(one).unwrap()).collect();
    expect![[r#"
        {"opaque":{"driver":"d","parameters":{"from":"class"}},"requests":["r","s/t"],"source":"FromClass"}
        {"opaque":{"driver":"d","parameters":{"to":"all"}},"source":"FromClaim"}
        {"opaque":{"driver":"d","parameters":{"to":"t"}},"requests":["s/t"],"source":"FromClaim"}"#]]
    .assert_eq(&rendered.join("\n"));
}

/// A device class for an extended resource, its devices on one node, and a node that provides the resource
/// itself.
const EXTENDED_RESOURCE_CLUSTER: &str = r#"
    node devices
    node itself example.com/gpu=2
    node neither
    {"kind":"DeviceClass","metadata":{"name":"gpu"},"spec":{"extendedResourceName":"example.com/gpu"}}
    {"kind":"ResourceSlice","metadata":{"name":"s1"},"spec":{"driver":"d","nodeName":"devices","pool":{"name":"a","generation":1,"resourceSliceCount":1},"devices":[{"name":"g0"},{"name":"g1"}]}}"#;

#[test]
fn device_classes_back_extended_resources() {
    let plugin = super::make(&Value::Null).unwrap();
    let fit = crate::plugins::node_resources_fit::make(&Value::Null).unwrap();
    // NodeResourcesFit ignores resources backed by devices, except on nodes that provide them.
    expect![[r#"
        devices: ok
        itself: never, Insufficient example.com/gpu
        neither: ok
    "#]]
    .assert_eq(&test_cluster(EXTENDED_RESOURCE_CLUSTER).filter(&fit, "pod p example.com/gpu=3"));
    expect![[r#"
        devices: never, cannot allocate all claims
        itself: ok
        neither: never, cannot allocate all claims
    "#]]
    .assert_eq(&test_cluster(EXTENDED_RESOURCE_CLUSTER).filter(&plugin, "pod p example.com/gpu=3"));
    expect![[r#"
        devices: ok
        itself: never, cannot allocate all claims
        neither: never, cannot allocate all claims
    "#]]
    .assert_eq(
        &test_cluster(EXTENDED_RESOURCE_CLUSTER)
            .filter(&plugin, "pod p deviceclass.resource.kubernetes.io/gpu=2"),
    );
    expect!["skip\n"]
        .assert_eq(&test_cluster(EXTENDED_RESOURCE_CLUSTER).filter(&plugin, "pod p example.com/other=1"));
}

#[test]
fn extended_resource_devices_are_not_allocated_twice() {
    let plugin = super::make(&Value::Null).unwrap();
    let reserve = plugin.reserve.as_ref().unwrap();
    let mut cluster = test_cluster(EXTENDED_RESOURCE_CLUSTER);
    let node: Arc<str> = "devices".into();
    let (first, _) = cluster.info("pod p example.com/gpu=2");
    assert!(reserve.reserve(&mut cluster.state, &first, &node).is_success());
    expect![[r#"
        devices: never, cannot allocate all claims
        itself: ok
        neither: never, cannot allocate all claims
    "#]]
    .assert_eq(&cluster.filter(&plugin, "pod q example.com/gpu=1"));
    reserve.unreserve(&mut cluster.state, &first, &node);
    assert!(cluster.state.objects.resource_claims.is_empty());
    // A claim left over from an earlier attempt must be deleted first.
    cluster.add(
        r#"{"kind":"ResourceClaim","metadata":{"name":"p-extended-resources-x","namespace":"default","annotations":{"resource.kubernetes.io/extended-resource-claim":"true"},"ownerReferences":[{"apiVersion":"v1","kind":"Pod","name":"p","uid":"uid-p","controller":true}]},"spec":{}}"#,
    );
    expect![[r#"
        devices: never, cannot schedule extended resource claim
        itself: never, cannot schedule extended resource claim
        neither: never, cannot schedule extended resource claim
    "#]]
    .assert_eq(&cluster.filter(&plugin, "pod p example.com/gpu=1"));
    expect!["0/3 nodes are available: 3 cannot schedule extended resource claim. deletion of ResourceClaim completed, preemption: 0/3 nodes are available: 3 Preemption is not helpful for scheduling.\n"]
        .assert_eq(&cluster.attempt(&crate::testing::default_profile(), "pod p example.com/gpu=1"));
}

/// Accepts every request like a server and records it.
struct RecordingConnection(Mutex<Vec<String>>);

#[async_trait::async_trait]
impl Connection for RecordingConnection {
    async fn send(&self, request: Request<Bytes>) -> Result<Response<Bytes>, Error> {
        let mut body: Value = serde_json::from_slice(request.body()).expect("JSON");
        let summary = match request.method().as_str() {
            "PATCH" => body["status"]["extendedResourceClaimStatus"].clone(),
            _ => json!([
                body["metadata"]["name"],
                body["metadata"]["generateName"],
                body["metadata"]["finalizers"],
                body["status"]["reservedFor"][0]["uid"],
                body["status"]["allocation"]["devices"]["results"][0]["device"]
            ]),
        };
        self.0.lock().push(format!("{} {} {summary}", request.method(), request.uri().path()));
        if body["metadata"]["name"].is_null() {
            body["metadata"]["name"] = "p-extended-resources-x7z9q".into();
        }
        Ok(Response::new(Bytes::from(body.to_string())))
    }

    async fn watch(&self, _: &str) -> Result<Box<dyn Watch>, Error> {
        unreachable!("this test does not watch")
    }

    fn impersonate(&self, _: &str) -> Option<Arc<dyn Connection>> {
        None
    }
}

#[test]
fn creates_extended_resource_claim_and_patches_pod_status() {
    let plugin = super::make(&Value::Null).unwrap();
    let mut cluster = test_cluster(EXTENDED_RESOURCE_CLUSTER);
    let node: Arc<str> = "devices".into();
    let (pod, _) = cluster.info("pod p example.com/gpu=1");
    assert!(plugin.reserve.as_ref().unwrap().reserve(&mut cluster.state, &pod, &node).is_success());
    let connection = Arc::new(RecordingConnection(Mutex::default()));
    let api = Arc::new(crate::run::ClientApi(Client::new(connection.clone(), "test")));
    let context =
        BindContext { api, claims: Arc::default(), resource_claims: Arc::default(), metrics: Arc::default() };
    let pre_bind = plugin.pre_bind.unwrap();
    assert!(pre_bind.has_work(&pod));
    let runtime = tokio::runtime::Builder::new_current_thread().build().unwrap();
    runtime.block_on(pre_bind.pre_bind(&context, &pod, "devices")).unwrap();
    expect![[r#"
        POST /apis/resource.k8s.io/v1/namespaces/default/resourceclaims [null,"p-extended-resources-",["resource.kubernetes.io/delete-protection"],null,null]
        PUT /apis/resource.k8s.io/v1/namespaces/default/resourceclaims/p-extended-resources-x7z9q/status ["p-extended-resources-x7z9q","p-extended-resources-",["resource.kubernetes.io/delete-protection"],"uid-p","g0"]
        PATCH /api/v1/namespaces/default/pods/p/status {"requestMappings":[{"containerName":"c","requestName":"container-0-request-0","resourceName":"example.com/gpu"}],"resourceClaimName":"p-extended-resources-x7z9q"}
    "#]]
    .assert_eq(&(connection.0.lock().join("\n") + "\n"));
}

/// Init containers reuse the devices of later containers and share one request for what is missing.
#[test]
fn init_containers_reuse_devices_of_later_containers() {
    let container = |name: &str, count: u32| json!({"name": name, "resources": {"requests": {"cpu": "1", "e.com/g": count.to_string()}}});
    let mut sidecar = container("side", 1);
    sidecar["restartPolicy"] = "Always".into();
    let spec = json!({
        "initContainers": [container("early", 5), sidecar, container("late", 3), container("least", 1)],
        "containers": [container("main", 1), container("none", 0)],
    });
    let (info, _) = test_cluster("").info(&format!(r#"pod p {{"spec":{spec}}}"#));
    let (claim, mappings) =
        super::extended_resources::new_extended_claim(&info, &[&("e.com/g".into(), "gpu".to_owned())]);
    let requests = claim.spec.devices.as_ref().unwrap().requests.as_ref().unwrap();
    let requested: Vec<(&str, Option<i64>)> =
        requests.iter().map(|one| (&*one.name, one.exactly.as_ref().unwrap().count)).collect();
    // The first needs three more than the sidecar and the main container have; this is enough for the other
    // two.
    assert_eq!(
        requested,
        [
            ("container-0-request-1", Some(3)),
            ("container-1-request-1", Some(1)),
            ("container-4-request-1", Some(1))
        ]
    );
    let mapped: Vec<String> =
        mappings.iter().map(|one| format!("{} {}", one.container_name, one.request_name)).collect();
    assert_eq!(
        mapped,
        [
            "side container-1-request-1",
            "main container-4-request-1",
            "early container-1-request-1",
            "early container-4-request-1",
            "early container-0-request-1",
            "late container-4-request-1",
            "late container-0-request-1",
            "least container-4-request-1",
        ]
    );
}

#[test]
fn scores_prioritized_list_by_rank() {
    let plugin = super::make(&Value::Null).unwrap();
    let sub_request = |name: &str, class: &str| json!({"name": name, "deviceClassName": class});
    let claim = json!({"kind": "ResourceClaim", "metadata": {"name": "c", "namespace": "default"}, "spec": {"devices": {"requests": [
        {"name": "r", "firstAvailable": [sub_request("big", "picky"), sub_request("any", "gpu")]},
    ]}}});
    let mut cluster = test_cluster(CLUSTER);
    cluster.add(&claim.to_string());
    // Only b has a big one; the second alternative scores seven of eight.
    expect![[r#"
        a: 7 -> 87
        b: 8 -> 100
    "#]]
    .assert_eq(&cluster.score(&plugin, &pod("p", "c")));
    expect!["skip\n"].assert_eq(&cluster.score(&plugin, &pod("p", "one")));
}

#[test]
fn unused_claim_is_released_when_it_prevents_scheduling() {
    let profile = crate::testing::default_profile();
    let mut cluster = test_cluster(CLUSTER);
    cluster.add("pod full on=b cpu=4");
    expect![[r#"
        0/2 nodes are available: 1 Insufficient cpu, 1 resourceclaim not available on the node. deallocation of ResourceClaim completed, preemption: 0/2 nodes are available: 1 No preemption victims found for incoming pod, 1 Preemption is not helpful for scheduling.
    "#]]
    .assert_eq(&cluster.attempt(&profile, &pod("p", "has").replace("pod p", "pod p cpu=1")));
}
