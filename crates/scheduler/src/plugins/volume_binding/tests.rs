use std::sync::Arc;

use expect_test::{Expect, expect};
use serde_json::Value;

use crate::testing::test_cluster;

const CLUSTER: &str = r#"
    node a zone=z1
    node b zone=z2
    {"kind":"StorageClass","metadata":{"name":"late"},"provisioner":"kubernetes.io/no-provisioner","volumeBindingMode":"WaitForFirstConsumer"}
    {"kind":"StorageClass","metadata":{"name":"made"},"provisioner":"driver","volumeBindingMode":"WaitForFirstConsumer","allowedTopologies":[{"matchLabelExpressions":[{"key":"topology.kubernetes.io/zone","values":["z2"]}]}]}
    {"kind":"StorageClass","metadata":{"name":"room"},"provisioner":"telling","volumeBindingMode":"WaitForFirstConsumer"}
    {"kind":"CSIDriver","metadata":{"name":"telling"},"spec":{"storageCapacity":true}}
    {"kind":"CSIStorageCapacity","metadata":{"name":"c","namespace":"x"},"storageClassName":"room","capacity":"10Gi","nodeTopology":{"matchLabels":{"topology.kubernetes.io/zone":"z1"}}}
    {"kind":"PersistentVolume","metadata":{"name":"big"},"spec":{"storageClassName":"late","capacity":{"storage":"9Gi"},"accessModes":["ReadWriteOnce"],"nodeAffinity":{"required":{"nodeSelectorTerms":[{"matchExpressions":[{"key":"topology.kubernetes.io/zone","operator":"In","values":["z1"]}]}]}}},"status":{"phase":"Available"}}
    {"kind":"PersistentVolume","metadata":{"name":"small"},"spec":{"storageClassName":"late","capacity":{"storage":"5Gi"},"accessModes":["ReadWriteOnce"],"nodeAffinity":{"required":{"nodeSelectorTerms":[{"matchExpressions":[{"key":"topology.kubernetes.io/zone","operator":"In","values":["z1"]}]}]}}},"status":{"phase":"Available"}}
    {"kind":"PersistentVolume","metadata":{"name":"taken"},"spec":{"storageClassName":"late","capacity":{"storage":"5Gi"},"nodeAffinity":{"required":{"nodeSelectorTerms":[{"matchExpressions":[{"key":"topology.kubernetes.io/zone","operator":"In","values":["z2"]}]}]}}},"status":{"phase":"Bound"}}
    {"kind":"PersistentVolumeClaim","metadata":{"name":"bound","namespace":"default","annotations":{"pv.kubernetes.io/bind-completed":"yes"}},"spec":{"volumeName":"taken"}}
    {"kind":"PersistentVolumeClaim","metadata":{"name":"orphan","namespace":"default","annotations":{"pv.kubernetes.io/bind-completed":"yes"}},"spec":{"volumeName":"gone"}}
    {"kind":"PersistentVolumeClaim","metadata":{"name":"w","namespace":"default","uid":"w"},"spec":{"storageClassName":"late","accessModes":["ReadWriteOnce"],"resources":{"requests":{"storage":"4Gi"}}}}
    {"kind":"PersistentVolumeClaim","metadata":{"name":"w2","namespace":"default","uid":"w2"},"spec":{"storageClassName":"late","accessModes":["ReadWriteOnce"],"resources":{"requests":{"storage":"4Gi"}}}}
    {"kind":"PersistentVolumeClaim","metadata":{"name":"huge","namespace":"default"},"spec":{"storageClassName":"late","resources":{"requests":{"storage":"40Gi"}}}}
    {"kind":"PersistentVolumeClaim","metadata":{"name":"m","namespace":"default"},"spec":{"storageClassName":"made","resources":{"requests":{"storage":"1Gi"}}}}
    {"kind":"PersistentVolumeClaim","metadata":{"name":"fits","namespace":"default"},"spec":{"storageClassName":"room","resources":{"requests":{"storage":"10Gi"}}}}
    {"kind":"PersistentVolumeClaim","metadata":{"name":"over","namespace":"default"},"spec":{"storageClassName":"room","resources":{"requests":{"storage":"11Gi"}}}}
    {"kind":"PersistentVolumeClaim","metadata":{"name":"now","namespace":"default"},"spec":{"resources":{"requests":{"storage":"1Gi"}}}}
    {"kind":"PersistentVolumeClaim","metadata":{"name":"lost","namespace":"default"},"spec":{"volumeName":"v"},"status":{"phase":"Lost"}}"#;

#[track_caller]
fn check(pod: &str, expected: Expect) {
    expected.assert_eq(&test_cluster(CLUSTER).filter(&super::make(&Value::Null).unwrap(), pod));
}

#[test]
fn bound_claims_restrict_nodes() {
    check("pod p", expect!["skip\n"]);
    check(
        "pod p claim=bound",
        expect![[r#"
        a: never, node(s) didn't match PersistentVolume's node affinity
        b: ok
    "#]],
    );
    check(
        "pod p claim=orphan",
        expect![[r#"
        a: never, node(s) unavailable due to one or more pvc(s) bound to non-existent pv(s)
        b: never, node(s) unavailable due to one or more pvc(s) bound to non-existent pv(s)
    "#]],
    );
}

#[test]
fn rejects_pod_with_unbound_immediate_or_missing_claims() {
    check("pod p claim=now", expect!["reject never, pod has unbound immediate PersistentVolumeClaims\n"]);
    check(
        "pod p claim=missing",
        expect![[r#"
        reject never, persistentvolumeclaim "missing" not found
    "#]],
    );
    check(
        "pod p claim=lost",
        expect![[r#"
        reject never, persistentvolumeclaim "lost" bound to non-existent persistentvolume "v"
    "#]],
    );
    check(
        r#"pod p {"spec":{"volumes":[{"name":"e","ephemeral":{}}]}}"#,
        expect![[r#"
        reject never, waiting for ephemeral volume controller to create the persistentvolumeclaim "p-e"
    "#]],
    );
}

#[test]
fn delayed_claims_bind_or_provision_volumes() {
    check(
        "pod p claim=w",
        expect![[r#"
        a: ok
        b: never, node(s) didn't find available persistent volumes to bind
    "#]],
    );
    check(
        "pod p claim=huge",
        expect![[r#"
        a: never, node(s) didn't find available persistent volumes to bind
        b: never, node(s) didn't find available persistent volumes to bind
    "#]],
    );
    check(
        "pod p claim=m",
        expect![[r#"
        a: never, node(s) didn't find available persistent volumes to bind
        b: ok
    "#]],
    );
    check(
        "pod p claim=fits",
        expect![[r#"
        a: ok
        b: never, node(s) did not have enough free storage
    "#]],
    );
    check(
        "pod p claim=over",
        expect![[r#"
        a: never, node(s) did not have enough free storage
        b: never, node(s) did not have enough free storage
    "#]],
    );
}

#[test]
fn reserved_volume_is_not_bound_twice() {
    let plugin = super::make(&Value::Null).unwrap();
    let reserve = plugin.reserve.as_ref().unwrap();
    let mut cluster = test_cluster(CLUSTER);
    let node: Arc<str> = "a".into();
    let (first, _) = cluster.info("pod p1 claim=w");
    let claim_of_volume = |cluster: &crate::testing::TestCluster, name: &str| {
        let spec = cluster.state.objects.volumes[name].spec.clone().unwrap();
        spec.claim_ref.and_then(|claim| claim.name)
    };
    assert!(reserve.reserve(&mut cluster.state, &first, &node).is_success());
    // The smallest sufficient volume.
    assert_eq!(claim_of_volume(&cluster, "small").as_deref(), Some("w"));
    let (second, _) = cluster.info("pod p2 claim=w2");
    assert!(reserve.reserve(&mut cluster.state, &second, &node).is_success());
    assert_eq!(claim_of_volume(&cluster, "big").as_deref(), Some("w2"));
    reserve.unreserve(&mut cluster.state, &first, &node);
    assert_eq!(claim_of_volume(&cluster, "small"), None);
    assert_eq!(claim_of_volume(&cluster, "big").as_deref(), Some("w2"));
}
