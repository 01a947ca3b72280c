use api::resource::resource_claim::prepare_status;
use api::resource::resource_slice::set_taint_time;
use expect_test::expect;
use serde_json::{Value, json};

use super::{check, check_status, check_update, check_valid, strategy, with_value};

fn claim() -> Value {
    json!({
        "metadata": {"name": "gpu", "namespace": "lab"},
        "spec": {"devices": {
            "requests": [{"name": "gpu", "exactly": {"deviceClassName": "gpu.example.com", "allocationMode": "ExactCount", "count": 1}}],
            "constraints": [{"requests": ["gpu"], "matchAttribute": "gpu.example.com/model"}],
            "config": [{"requests": ["gpu"], "opaque": {"driver": "gpu.example.com", "parameters": {"a": 1}}}],
        }},
    })
}

fn slice() -> Value {
    json!({
        "metadata": {"name": "node-1-gpu"},
        "spec": {
            "driver": "gpu.example.com",
            "nodeName": "node-1",
            "pool": {"name": "node-1", "generation": 1, "resourceSliceCount": 1},
            "devices": [{
                "name": "gpu-0",
                "attributes": {"model": {"string": "A"}, "example.com/rev": {"version": "1.2.3-rc.1+b"}},
                "capacity": {"memory": {"value": "16Gi"}},
            }],
        },
    })
}

#[test]
fn validates_claims() {
    check_valid("ResourceClaim", claim());
    let devices = json!({
        "requests": [
            {"name": "A"},
            {"name": "b", "exactly": {"allocationMode": "All", "count": 1, "selectors": [{}]}, "firstAvailable": [{}]},
            {"name": "c", "exactly": {"allocationMode": "Some"}},
            {"name": "c", "firstAvailable": [
                {"name": "x", "deviceClassName": "k", "allocationMode": "All", "count": 1, "tolerations": [{"operator": "Exists", "value": "v", "effect": "No"}]},
                {"name": "x", "deviceClassName": "K", "allocationMode": "ExactCount", "tolerations": [{"key": "a b", "operator": "Like"}]},
            ]},
        ],
        "constraints": [{"requests": ["c/x", "c/y", "q", "a/b/c", "c/x"]}, {"matchAttribute": "model"}],
        "config": [{}, {"opaque": {"parameters": []}}],
    });
    check(
        "ResourceClaim",
        with_value(claim(), "/spec/devices", devices),
        expect![[r#"
        spec.devices.requests[0].name: Invalid value: "A": a lowercase RFC 1123 label must consist of lower case alphanumeric characters or '-', and must start and end with an alphanumeric character (e.g. 'my-name',  or '123-abc', regex used for validation is '[a-z0-9]([-a-z0-9]*[a-z0-9])?')
        spec.devices.requests[0]: Required value: exactly one of `exactly` or `firstAvailable` is required
        spec.devices.requests[1]: Invalid value: null: exactly one of `exactly` or `firstAvailable` is required, but multiple fields are set
        spec.devices.requests[2].exactly.deviceClassName: Required value
        spec.devices.requests[2].exactly.allocationMode: Unsupported value: "Some": supported values: "All", "ExactCount"
        spec.devices.requests[3].firstAvailable[0].count: Invalid value: 1: must not be specified when allocationMode is 'All'
        spec.devices.requests[3].firstAvailable[0].tolerations[0].value: Invalid value: "v": must be empty for operator `Exists`
        spec.devices.requests[3].firstAvailable[0].tolerations[0].effect: Unsupported value: "No": supported values: "NoExecute", "NoSchedule", "None"
        spec.devices.requests[3].firstAvailable[1].deviceClassName: Invalid value: "K": a lowercase RFC 1123 subdomain must consist of lower case alphanumeric characters, '-' or '.', and must start and end with an alphanumeric character (e.g. 'example.com', regex used for validation is '[a-z0-9]([-a-z0-9]*[a-z0-9])?(\.[a-z0-9]([-a-z0-9]*[a-z0-9])?)*')
        spec.devices.requests[3].firstAvailable[1].count: Invalid value: 0: must be greater than zero
        spec.devices.requests[3].firstAvailable[1].tolerations[0].key: Invalid value: "a b": name part must consist of alphanumeric characters, '-', '_' or '.', and must start and end with an alphanumeric character (e.g. 'MyName',  or 'my.name',  or '123-abc', regex used for validation is '([A-Za-z0-9][-A-Za-z0-9_.]*)?[A-Za-z0-9]')
        spec.devices.requests[3].firstAvailable[1].tolerations[0].operator: Unsupported value: "Like": supported values: "Equal", "Exists"
        spec.devices.requests[3].firstAvailable[1]: Duplicate value: "x"
        spec.devices.requests[3]: Duplicate value: "c"
        spec.devices.constraints[0].requests[1]: Invalid value: "c/y": must be the name of a request in the claim or the name of a request and a subrequest separated by '/'
        spec.devices.constraints[0].requests[2]: Invalid value: "q": must be the name of a request in the claim or the name of a request and a subrequest separated by '/'
        spec.devices.constraints[0].requests[3]: Invalid value: "a/b/c": must be the name of a request in the claim or the name of a request and a subrequest separated by '/'
        spec.devices.constraints[0].requests[4]: Duplicate value: "c/x"
        spec.devices.constraints[0]: Required value: exactly one of "matchAttribute" or "distinctAttribute" is required, but multiple fields are set
        spec.devices.constraints[1].matchAttribute: Invalid value: "model": a fully qualified name must be a domain and a name separated by a slash
        spec.devices.config[0].opaque: Required value
        spec.devices.config[1].opaque.driver: Required value
        spec.devices.config[1].opaque.parameters: Invalid value: "<value omitted>": must be a valid JSON object
    "#]],
    );
    check_update(
        "ResourceClaim",
        claim(),
        with_value(claim(), "/spec/devices/config", json!([])),
        expect![[r#"
        spec: Invalid value: {"devices":{"config":[],"constraints":[{"matchAttribute":"gpu.example.com/model","requests":["gpu"]}],"requests":[{"exactly":{"allocationMode":"ExactCount","count":1,"deviceClassName":"gpu.example.com"},"name":"gpu"}]}}: field is immutable
    "#]],
    );
    let template = json!({"spec": {"metadata": {"labels": {"a": "b c"}}, "spec": {"devices": {"requests": [{"name": "a"}]}}}});
    check(
        "ResourceClaimTemplate",
        template,
        expect![[r#"
        spec.metadata.labels: Invalid value: "b c": a valid label must be an empty string or consist of alphanumeric characters, '-', '_' or '.', and must start and end with an alphanumeric character (e.g. 'MyValue',  or 'my_value',  or '12345', regex used for validation is '(([A-Za-z0-9][-A-Za-z0-9_.]*)?[A-Za-z0-9])?')
        spec.spec.devices.requests[0]: Required value: exactly one of `exactly` or `firstAvailable` is required
    "#]],
    );
}

#[test]
fn validates_claim_status() {
    let mut obj = claim();
    let result = json!({"request": "gpu", "driver": "gpu.example.com", "pool": "node-1", "device": "gpu-0"});
    obj["status"] = json!({
        "allocation": {"devices": {"results": [result]}},
        "reservedFor": [{"resource": "pods", "name": "p", "uid": "1"}],
        "devices": [{"driver": "gpu.example.com", "pool": "node-1", "device": "gpu-0", "networkData": {"ips": ["10.0.0.1/24"]}}],
    });
    check_status("ResourceClaim", obj.clone(), expect![[r#""#]]);
    let mut removed = obj.clone();
    removed["status"]["allocation"] = Value::Null;
    check_status(
        "ResourceClaim",
        removed.clone(),
        expect![[r#"
        status.devices[0]: Invalid value: "gpu.example.com/node-1/gpu-0": must be an allocated device in the claim
        status.reservedFor: Forbidden: may not be specified when `allocated` is not set
    "#]],
    );
    prepare_status(&mut removed, &obj);
    assert_eq!(removed["status"]["devices"], json!([]));
    let bad = json!({"request": "x", "driver": "", "pool": "A", "device": "", "shareID": "1", "bindingConditions": ["a b"]});
    obj["status"] = json!({
        "allocation": {"devices": {"results": [bad], "config": [{"source": "Air", "opaque": {"driver": "d", "parameters": {}}}]}, "nodeSelector": {}},
        "reservedFor": [{}, {}],
    });
    check_status(
        "ResourceClaim",
        obj,
        expect![[r#"
        status.reservedFor[0].resource: Required value
        status.reservedFor[0].name: Required value
        status.reservedFor[0].uid: Required value
        status.reservedFor[1].resource: Required value
        status.reservedFor[1].name: Required value
        status.reservedFor[1].uid: Required value
        status.reservedFor[1]: Duplicate value: ""
        status.allocation.devices.results[0].request: Invalid value: "x": must be the name of a request in the claim or the name of a request and a subrequest separated by '/'
        status.allocation.devices.results[0].driver: Required value
        status.allocation.devices.results[0].pool: Invalid value: "A": a lowercase RFC 1123 subdomain must consist of lower case alphanumeric characters, '-' or '.', and must start and end with an alphanumeric character (e.g. 'example.com', regex used for validation is '[a-z0-9]([-a-z0-9]*[a-z0-9])?(\.[a-z0-9]([-a-z0-9]*[a-z0-9])?)*')
        status.allocation.devices.results[0].device: Invalid value: "": a lowercase RFC 1123 label must consist of lower case alphanumeric characters or '-', and must start and end with an alphanumeric character (e.g. 'my-name',  or '123-abc', regex used for validation is '[a-z0-9]([-a-z0-9]*[a-z0-9])?')
        status.allocation.devices.results[0].bindingConditions[0]: Invalid value: "a b": name part must consist of alphanumeric characters, '-', '_' or '.', and must start and end with an alphanumeric character (e.g. 'MyName',  or 'my.name',  or '123-abc', regex used for validation is '([A-Za-z0-9][-A-Za-z0-9_.]*)?[A-Za-z0-9]')
        status.allocation.devices.results[0].bindingFailureConditions: Invalid value: null: bindingFailureConditions are required to use bindingConditions
        status.allocation.devices.results[0].shareID: Invalid value: "1": error validating uid: invalid UUID length: 1
        status.allocation.devices.config[0].source: Unsupported value: "Air": supported values: "FromClaim", "FromClass"
        status.allocation.nodeSelector.nodeSelectorTerms: Required value: must have at least one node selector term
    "#]],
    );
}

#[test]
fn validates_device_classes() {
    check_valid(
        "DeviceClass",
        json!({"spec": {"extendedResourceName": "example.com/gpu", "selectors": [{"cel": {"expression": "true"}}]}}),
    );
    let spec = json!({"extendedResourceName": "kubernetes.io/gpu", "selectors": [{}, {"cel": {"expression": "x".repeat(10241)}}]});
    check(
        "DeviceClass",
        json!({"spec": spec}),
        expect![[r#"
        spec.selectors[0].cel: Required value
        spec.selectors[1].cel.expression: Too long: may not be more than 10240 bytes
        spec.extendedResourceName: Invalid value: "kubernetes.io/gpu": must be a valid extended resource name
    "#]],
    );
    let many: Vec<Value> = (0..33).map(|_| json!({})).collect();
    check(
        "DeviceClass",
        json!({"spec": {"selectors": many}}),
        expect![[r#"
        spec.selectors: Too many: 33: must have at most 32 items
    "#]],
    );
}

#[test]
fn validates_slices() {
    check_valid("ResourceSlice", slice());
    check(
        "ResourceSlice",
        json!({"spec": {}}),
        expect![[r#"
        spec.driver: Required value
        spec.pool.name: Required value
        spec.pool.resourceSliceCount: Invalid value: 0: must be greater than zero
        spec: Required value: exactly one of `nodeName`, `nodeSelector`, `allNodes`, `perDeviceNodeSelection` is required
    "#]],
    );
    let devices = json!([
        {"name": "A", "attributes": {"a-b": {}, "/x": {"int": 1, "bool": true}, "v": {"version": "01.2.3"}}, "allNodes": true},
        {"name": "a", "taints": [{"key": "k", "value": "a b"}, {"key": "k", "effect": "Go"}], "consumesCounters": [{}], "bindingConditions": ["x"]},
        {"name": "a", "capacity": {"m": {"value": "1", "requestPolicy": {}}}},
        {"name": "c", "allowMultipleAllocations": true, "capacity": {
            "a": {"value": "10", "requestPolicy": {"default": "3", "validValues": ["4", "2", "11"]}},
            "b": {"value": "10", "requestPolicy": {"default": "3", "validRange": {"min": "4", "max": "11", "step": "0"}}},
            "c": {"value": "10", "requestPolicy": {"validRange": {"min": "4"}}},
        }},
    ]);
    let obj = with_value(slice(), "/spec/devices", devices);
    check(
        "ResourceSlice",
        with_value(obj, "/spec/allNodes", json!(true)),
        expect![[r#"
        spec: Invalid value: "{`nodeName`, `allNodes`}": exactly one of `nodeName`, `nodeSelector`, `allNodes`, `perDeviceNodeSelection` is required, but multiple fields are set
        spec.devices[0].name: Invalid value: "A": a lowercase RFC 1123 label must consist of lower case alphanumeric characters or '-', and must start and end with an alphanumeric character (e.g. 'my-name',  or '123-abc', regex used for validation is '[a-z0-9]([-a-z0-9]*[a-z0-9])?')
        spec.devices[0].attributes: Invalid value: "": the domain must not be empty
        spec.devices[0].attributes[/x]: Invalid value: {"bool":true,"int":1}: exactly one value must be specified
        spec.devices[0].attributes: Invalid value: "a-b": a valid C identifier must start with alphabetic character or '_', followed by a string of alphanumeric characters or '_' (e.g. 'my_name',  or 'MY_NAME',  or 'MyName', regex used for validation is '[A-Za-z_][A-Za-z0-9_]*')
        spec.devices[0].attributes[a-b]: Invalid value: "": exactly one value must be specified
        spec.devices[0].attributes[v].version: Invalid value: "01.2.3": must be a string compatible with semver.org spec 2.0.0
        spec.devices[0]: Invalid value: null: `nodeName`, `nodeSelector` and `allNodes` can only be set if `perDeviceNodeSelection` is set to true in the ResourceSlice spec
        spec.devices[1].taints[0].value: Invalid value: "a b": a valid label must be an empty string or consist of alphanumeric characters, '-', '_' or '.', and must start and end with an alphanumeric character (e.g. 'MyValue',  or 'my_value',  or '12345', regex used for validation is '(([A-Za-z0-9][-A-Za-z0-9_.]*)?[A-Za-z0-9])?')
        spec.devices[1].taints[0].effect: Required value
        spec.devices[1].taints[1].effect: Unsupported value: "Go": supported values: "NoExecute", "NoSchedule", "None"
        spec.devices[1].consumesCounters[0].counterSet: Required value
        spec.devices[1].consumesCounters[0].counters: Required value
        spec.devices[1].bindingFailureConditions: Invalid value: null: bindingFailureConditions are required to use bindingConditions
        spec.devices[2].capacity[m].requestPolicy: Forbidden: allowMultipleAllocations must be true
        spec.devices[3].capacity[a].requestPolicy.validValues[1]: Invalid value: "2": values must be sorted in ascending order
        spec.devices[3].capacity[a].requestPolicy.validValues[2]: Invalid value: "11": option is larger than capacity value: 10
        spec.devices[3].capacity[a].requestPolicy.validValues: Invalid value: "3": default value is not valid according to the requestPolicy
        spec.devices[3].capacity[b].requestPolicy.validRange.min: Invalid value: "3": default is less than min: 4
        spec.devices[3].capacity[b].requestPolicy.validRange.max: Invalid value: "11": max is larger than capacity value: 10
        spec.devices[3].capacity[b].requestPolicy.validRange.step: Invalid value: "3": value is not a multiple of a given step (0) from (4)
        spec.devices[3].capacity[b].requestPolicy.validRange.step: Invalid value: "11": value is not a multiple of a given step (0) from (4)
        spec.devices[3].capacity[c].requestPolicy.default: Required value: required when validRange is defined
        spec.devices[2]: Duplicate value: "a"
    "#]],
    );
    let moved = with_value(slice(), "/spec/nodeName", json!("node-2"));
    check_update(
        "ResourceSlice",
        slice(),
        moved,
        expect![[r#"
        spec.nodeName: Invalid value: "node-2": field is immutable
    "#]],
    );
    let warnings = strategy("ResourceSlice")
        .warnings(&with_value(slice(), "/spec/driver", json!("GPU.example.com")), None);
    expect![[
        r#"spec.driver: driver names should be lowercase; "GPU.example.com" contains uppercase characters"#
    ]]
    .assert_eq(&warnings.join("\n"));
    let fields = strategy("ResourceSlice").selectable_fields(&slice());
    assert_eq!(
        fields,
        [("spec.nodeName", "node-1".to_owned()), ("spec.driver", "gpu.example.com".to_owned())]
    );
}

#[test]
fn drops_alpha_fields_of_slice() {
    let mut obj = slice();
    obj["spec"]["devices"][0]["attributes"]["model"]["strings"] = json!(["a"]);
    obj["spec"]["devices"][0]["nodeAllocatableResourceMappings"] = json!({});
    strategy("ResourceSlice").prepare_for_create(&mut obj);
    assert_eq!(obj, slice());
}

#[test]
fn sets_time_added_on_taints() {
    let mut obj = slice();
    obj["spec"]["devices"][0]["taints"] =
        json!([{"key": "a"}, {"key": "b", "timeAdded": "2020-01-01T00:00:00Z"}]);
    set_taint_time(&mut obj, "2026-01-02T03:04:05Z");
    let times: Vec<&Value> = (0..2).map(|i| &obj["spec"]["devices"][0]["taints"][i]["timeAdded"]).collect();
    assert_eq!(times, ["2026-01-02T03:04:05Z", "2020-01-01T00:00:00Z"]);
}
