use expect_test::{Expect, expect};
use serde_json::json;

use super::*;
use crate::admission::tests::FakeCluster;
use crate::request::Target;

fn cluster() -> FakeCluster {
    let namespace = |name: &str, labels: Value| json!({"metadata": {"name": name, "labels": labels}});
    FakeCluster::of(&[
        ("", "namespaces", namespace("plain", json!({}))),
        ("", "namespaces", namespace("marked", json!({ADMIN: "true"}))),
    ])
}

fn validation_result(request: &Request<'_>, object: &Value) -> String {
    match validate(request, object, &cluster()) {
        Ok(()) => "ok".to_owned(),
        Err(status) => format!("{} {}", status.code, status.message),
    }
}

#[track_caller]
fn check_new(plural: &str, namespace: &str, spec: Value, expected: Expect) {
    let row = api::resource_table::find_resource(GROUP, "v1", plural).expect("a known kind");
    let object = json!({"metadata": {"name": "c", "namespace": namespace}, "spec": spec});
    let target = Target::collection(row, namespace);
    let request = Request::new(&target, Operation::Create, &object, None, None);
    expected.assert_eq(&validation_result(&request, &object));
}

/// Updates the status of a claim as a user whose pod is on node `a`.
#[track_caller]
fn check(user_name: &str, verb: &str, old: Value, new: Value, expected: Expect) {
    let row = api::resource_table::find_resource(GROUP, "v1", CLAIMS).expect("a known kind");
    let (new, old) = (json!({"status": new}), json!({"status": old}));
    let target =
        Target { name: "c".into(), subresource: "status".into(), ..Target::collection(row, "plain") };
    let extra = BTreeMap::from([(NODE_NAME.to_owned(), vec!["a".to_owned()])]);
    let user = User { name: user_name.to_owned(), extra, ..User::default() };
    let mut request = Request::new(&target, Operation::Update, &new, Some(&old), Some(&user));
    request.is_patch = verb == "patch";
    expected.assert_eq(&validation_result(&request, &new));
}

#[test]
fn allows_admin_access_only_in_labeled_namespaces() {
    let spec = |is_admin: bool| {
        let requests = json!([
            {"name": "a", "firstAvailable": [{"name": "b"}]},
            {"name": "c", "exactly": {"deviceClassName": "gpu", "adminAccess": is_admin}},
        ]);
        json!({"devices": {"requests": requests}})
    };
    check_new(CLAIMS, "plain", spec(false), expect!["ok"]);
    check_new(CLAIMS, "marked", spec(true), expect!["ok"]);
    check_new(
        CLAIMS,
        "plain",
        spec(true),
        expect![[
            r#"422 ResourceClaim.resource.k8s.io "c" is invalid: spec.devices.requests[1].adminAccess: Forbidden: admin access to devices requires the `resource.kubernetes.io/admin-access: true` label on the containing namespace"#
        ]],
    );
    check_new(
        "resourceclaimtemplates",
        "plain",
        json!({"spec": spec(true)}),
        expect![[
            r#"422 ResourceClaimTemplate.resource.k8s.io "c" is invalid: spec.devices.requests[1].adminAccess: Forbidden: admin access to devices requires the `resource.kubernetes.io/admin-access: true` label on the containing namespace"#
        ]],
    );
    let given = json!({"allocation": {"devices": {"results": [{"request": "c", "adminAccess": true}]}}});
    check("jo", "update", given.clone(), given.clone(), expect!["ok"]);
    check(
        "jo",
        "update",
        json!({}),
        given,
        expect![[
            r#"422 ResourceClaim.resource.k8s.io "c" is invalid: status.allocation.devices.results[0].adminAccess: Forbidden: admin access to devices requires the `resource.kubernetes.io/admin-access: true` label on the containing namespace"#
        ]],
    );
}

#[test]
fn requires_binding_permission_to_allocate_claims() {
    let reserved = json!({"reservedFor": [{"resource": "pods", "name": "p", "uid": "1"}]});
    check("jo", "update", json!({}), reserved.clone(), expect!["ok"]);
    check("al", "update", json!({}), json!({"reservedFor": []}), expect!["ok"]);
    check(
        "al",
        "patch",
        json!({}),
        reserved,
        expect![[
            r#"422 ResourceClaim.resource.k8s.io "c" is invalid: status.allocation: Forbidden: changing status.allocation or status.reservedFor requires resource="resourceclaims/binding", verb="patch" permission: resourceclaims.resource.k8s.io is forbidden: User "al" cannot patch resource "resourceclaims/binding" in API group "resource.k8s.io" at the cluster scope"#
        ]],
    );
}

#[test]
fn requires_driver_permission_to_update_device_status() {
    let field = json!({"key": "metadata.name", "operator": "In", "values": ["a"]});
    let status = |devices: Value| {
        let selector = json!({"nodeSelectorTerms": [{"matchFields": [field.clone()]}]});
        json!({"allocation": {"nodeSelector": selector}, "devices": devices})
    };
    let device =
        |driver: &str, data: i32| json!({"driver": driver, "pool": "p", "device": "d", "data": data});
    let before = || status(json!([device("one", 1), device("two", 1), device("three", 1)]));
    let after = || status(json!([device("one", 2), device("two", 1)]));
    check("jo", "update", before(), after(), expect!["ok"]);
    check("al", "update", before(), before(), expect!["ok"]);
    check(
        "al",
        "update",
        before(),
        after(),
        expect![[
            r#"422 ResourceClaim.resource.k8s.io "c" is invalid: [status.devices: Forbidden: changing status.devices requires resource="resourceclaims/driver", verb="[arbitrary-node:update]" permission: resourceclaims.resource.k8s.io "one" is forbidden: User "al" cannot arbitrary-node:update resource "resourceclaims/driver" in API group "resource.k8s.io" in the namespace "plain", status.devices: Forbidden: changing status.devices requires resource="resourceclaims/driver", verb="[arbitrary-node:update]" permission: resourceclaims.resource.k8s.io "three" is forbidden: User "al" cannot arbitrary-node:update resource "resourceclaims/driver" in API group "resource.k8s.io" in the namespace "plain"]"#
        ]],
    );
    let account = "system:serviceaccount:plain:driver";
    check(
        account,
        "patch",
        before(),
        status(json!([device("one", 1), device("two", 1)])),
        expect![[
            r#"422 ResourceClaim.resource.k8s.io "c" is invalid: status.devices: Forbidden: changing status.devices requires resource="resourceclaims/driver", verb="[associated-node:patch arbitrary-node:patch]" permission: resourceclaims.resource.k8s.io "three" is forbidden: User "system:serviceaccount:plain:driver" cannot associated-node:patch resource "resourceclaims/driver" in API group "resource.k8s.io" in the namespace "plain""#
        ]],
    );
    // The device status is removed together with the allocation.
    check("jo", "update", before(), json!({}), expect!["ok"]);
}
