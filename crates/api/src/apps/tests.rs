//! Tests workload validation.

use expect_test::{Expect, expect};
use serde_json::{Value, json};

use super::daemon_set::DaemonSet;
use super::deployment::Deployment;
use super::replica_set::ReplicaSet;
use super::stateful_set::StatefulSet;
use crate::core::pod::tests::defaulted;
use crate::core::replication_controller::ReplicationController;
use crate::core::testing::lines;
use crate::field::ErrorList;
use crate::json::JsonExt;
use crate::strategy::RestStrategy;

fn object(mut spec: Value) -> Value {
    spec.set_default("selector", json!({"matchLabels": {"a": "b"}}));
    spec.set_default("template", json!({"metadata": {"labels": {"a": "b"}}, "spec": {}}));
    let pod = spec["template"]["spec"].take();
    spec["template"]["spec"] = defaulted(pod);
    json!({"metadata": {"name": "x"}, "spec": spec})
}

#[track_caller]
fn check(kind: &dyn RestStrategy, spec: Value, expected: Expect) {
    let mut errors = ErrorList::default();
    let mut new = object(spec);
    kind.prepare_for_create(&mut new);
    kind.validate(&new, &mut errors);
    kind.validate_create(&new, &mut errors);
    expected.assert_eq(&lines(&errors));
}

#[track_caller]
fn check_update(kind: &dyn RestStrategy, old: Value, new: Value, expected: Expect) {
    let mut errors = ErrorList::default();
    let (mut new, old) = (object(new), object(old));
    kind.prepare_for_update(&mut new, &old);
    kind.validate(&new, &mut errors);
    kind.validate_update(&new, &old, &mut errors);
    expected.assert_eq(&lines(&errors));
}

fn rolling_update(unavailable: Value, surge: Value) -> Value {
    json!({"type": "RollingUpdate", "rollingUpdate": {"maxUnavailable": unavailable, "maxSurge": surge}})
}

#[test]
fn validates_deployments() {
    let valid = rolling_update(json!("25%"), json!("25%"));
    check(&Deployment, json!({"strategy": valid}), expect![""]);
    check(
        &Deployment,
        json!({"strategy": rolling_update(json!(0), json!(0))}),
        expect![[r#"
        spec.strategy.rollingUpdate.maxUnavailable: Invalid value: 0: may not be 0 when `maxSurge` is 0
    "#]],
    );
    check(
        &Deployment,
        json!({"strategy": rolling_update(json!("101%"), json!("x"))}),
        expect![[r#"
        spec.strategy.rollingUpdate.maxSurge: Invalid value: "x": a valid percent string must be a numeric string followed by an ending '%' (e.g. '1%',  or '93%', regex used for validation is '[0-9]+%')
        spec.strategy.rollingUpdate.maxUnavailable: Invalid value: "101%": must not be greater than 100%
    "#]],
    );
    check(
        &Deployment,
        json!({"strategy": {"type": "BlueGreen"}}),
        expect![[r#"
        spec.strategy: Unsupported value: {"Type":"BlueGreen","RollingUpdate":null}: supported values: "Recreate", "RollingUpdate"
    "#]],
    );
    check(
        &Deployment,
        json!({"strategy": valid, "replicas": -1, "progressDeadlineSeconds": 600, "minReadySeconds": 600}),
        expect![[r#"
            spec.replicas: Invalid value: -1: must be greater than or equal to 0
            spec.progressDeadlineSeconds: Invalid value: 600: must be greater than minReadySeconds
        "#]],
    );
    check(
        &Deployment,
        json!({"strategy": valid, "template": {"metadata": {"labels": {"a": "c"}}, "spec": {"restartPolicy": "Never"}}}),
        expect![[r#"
            spec.template.metadata.labels: Invalid value: {"a":"c"}: `selector` does not match template `labels`
            spec.template.spec.restartPolicy: Unsupported value: "Never": supported values: "Always"
        "#]],
    );
    check(
        &Deployment,
        json!({"strategy": valid, "selector": {}}),
        expect![[r#"
        spec.selector: Invalid value: {}: empty selector is invalid for deployment
    "#]],
    );
}

#[test]
fn annotation_change_updates_deployment_generation() {
    let mut old = object(json!({}));
    old["metadata"]["generation"] = json!(3);
    let mut new = old.clone();
    Deployment.prepare_for_update(&mut new, &old);
    assert_eq!(new["metadata"]["generation"], 3);
    new["metadata"]["annotations"] = json!({"a": "b"});
    Deployment.prepare_for_update(&mut new, &old);
    assert_eq!(new["metadata"]["generation"], 4);
}

#[test]
fn replica_set_selector_is_immutable() {
    let selector = json!({"matchLabels": {"a": "other"},
        "matchExpressions": [{"key": "tier", "operator": "In", "values": ["web", "api"]}, {"key": "canary", "operator": "DoesNotExist"}]});
    check_update(
        &ReplicaSet,
        json!({}),
        json!({"selector": selector}),
        expect![[r#"
        spec.template.metadata.labels: Invalid value: {"a":"b"}: `selector` does not match template `labels`
        spec.selector: Invalid value: {"matchLabels":{"a":"other"},"matchExpressions":[{"key":"tier","operator":"In","values":["web","api"]},{"key":"canary","operator":"DoesNotExist"}]}: field is immutable
    "#]],
    );
}

#[test]
fn validates_daemon_sets() {
    let strategy = rolling_update(json!(1), json!(0));
    check(&DaemonSet, json!({"updateStrategy": strategy}), expect![""]);
    check(
        &DaemonSet,
        json!({"updateStrategy": rolling_update(json!(1), json!(1))}),
        expect![[r#"
        spec.updateStrategy.rollingUpdate.maxSurge: Invalid value: 1: may not be set when maxUnavailable is non-zero
    "#]],
    );
    check(
        &DaemonSet,
        json!({"updateStrategy": rolling_update(json!(0), json!(0))}),
        expect![[r#"
        spec.updateStrategy.rollingUpdate.maxUnavailable: Required value: cannot be 0 when maxSurge is 0
    "#]],
    );
    check(
        &DaemonSet,
        json!({"updateStrategy": {"type": "Now"}}),
        expect![[r#"
        spec.updateStrategy: Unsupported value: {"Type":"Now","RollingUpdate":null}: supported values: "RollingUpdate", "OnDelete"
    "#]],
    );
}

#[test]
fn daemon_set_template_change_updates_generation() {
    let generation = |object: &Value| {
        object["metadata"]["annotations"]["deprecated.daemonset.template.generation"].clone()
    };
    let mut old = object(json!({}));
    DaemonSet.prepare_for_create(&mut old);
    assert_eq!(generation(&old), "1");
    let mut new = object(json!({"minReadySeconds": 1}));
    DaemonSet.prepare_for_update(&mut new, &old);
    assert_eq!(generation(&new), "1");
    new["spec"]["template"]["spec"]["containers"][0]["image"] = json!("other");
    DaemonSet.prepare_for_update(&mut new, &old);
    assert_eq!(generation(&new), "2");
}

#[test]
fn validates_stateful_sets() {
    let base = json!({"podManagementPolicy": "OrderedReady", "updateStrategy": {"type": "RollingUpdate"},
        "volumeClaimTemplates": [{"metadata": {"name": "data"}, "spec": {"accessModes": ["ReadWriteOnce"], "resources": {"requests": {"storage": "1"}}}}],
        "template": {"metadata": {"labels": {"a": "b"}}, "spec": {"containers": [{"volumeMounts": [{"name": "data", "mountPath": "/d"}]}]}}});
    check(&StatefulSet, base.clone(), expect![""]);
    check(
        &StatefulSet,
        json!({"podManagementPolicy": "Random", "updateStrategy": {"type": "Now", "rollingUpdate": {"partition": 1}}, "serviceName": "A",
            "persistentVolumeClaimRetentionPolicy": {"whenDeleted": "Keep", "whenScaled": "Retain"}}),
        expect![[r#"
            spec.podManagementPolicy: Invalid value: "Random": must be 'OrderedReady' or 'Parallel'
            spec.updateStrategy: Invalid value: {"Type":"Now","RollingUpdate":{"Partition":1,"MaxUnavailable":null}}: must be 'RollingUpdate' or 'OnDelete'
            spec.persistentVolumeClaimRetentionPolicy.whenDeleted: Unsupported value: "Keep": supported values: "Retain", "Delete"
            spec.serviceName: Invalid value: "A": a lowercase RFC 1123 label must consist of lower case alphanumeric characters or '-', and must start and end with an alphanumeric character (e.g. 'my-name',  or '123-abc', regex used for validation is '[a-z0-9]([-a-z0-9]*[a-z0-9])?')
        "#]],
    );
    let mut changed = base.clone();
    changed["replicas"] = json!(3);
    check_update(&StatefulSet, base.clone(), changed.clone(), expect![""]);
    changed["serviceName"] = json!("other");
    check_update(
        &StatefulSet,
        base,
        changed,
        expect![[r#"
        spec: Forbidden: updates to statefulset spec for fields other than 'replicas', 'ordinals', 'template', 'updateStrategy', 'revisionHistoryLimit', 'persistentVolumeClaimRetentionPolicy' and 'minReadySeconds' are forbidden
    "#]],
    );
}

#[test]
fn validates_replication_controllers() {
    check(&ReplicationController, json!({"selector": {"a": "b"}, "replicas": 1}), expect![""]);
    check(
        &ReplicationController,
        json!({"selector": {"a": "c"}}),
        expect![[r#"
        spec.replicas: Required value
        spec.template.metadata.labels: Invalid value: {"a":"b"}: `selector` does not match template `labels`
    "#]],
    );
}

#[test]
fn validates_status_counts() {
    let mut errors = ErrorList::default();
    let status = |count: i64| json!({"status": {"replicas": 1, "readyReplicas": 2, "availableReplicas": -1, "collisionCount": count}});
    Deployment.validate_status_update(&status(1), &status(2), &mut errors);
    expect![[r#"
        status.availableReplicas: Invalid value: -1: must be greater than or equal to 0
        status.readyReplicas: Invalid value: 2: cannot be greater than status.replicas
        status.collisionCount: Invalid value: 1: cannot be decremented
    "#]]
    .assert_eq(&lines(&errors));
}
