use expect_test::{Expect, expect};
use serde_json::Value;

use crate::testing::test_cluster;

#[track_caller]
fn check(pod: &str, expected: Expect) {
    let mut cluster = test_cluster(
        r#"
        node a zone=z1
        node b zone=z2
        node x
        {"kind":"StorageClass","metadata":{"name":"late"},"provisioner":"p","volumeBindingMode":"WaitForFirstConsumer"}
        {"kind":"StorageClass","metadata":{"name":"early"},"provisioner":"p","volumeBindingMode":"Immediate"}
        {"kind":"PersistentVolume","metadata":{"name":"v1","labels":{"topology.kubernetes.io/zone":"z1"}}}
        {"kind":"PersistentVolume","metadata":{"name":"v2","labels":{"failure-domain.beta.kubernetes.io/zone":"z1__z2"}}}
        {"kind":"PersistentVolumeClaim","metadata":{"name":"c1","namespace":"default"},"spec":{"volumeName":"v1"}}
        {"kind":"PersistentVolumeClaim","metadata":{"name":"c2","namespace":"default"},"spec":{"volumeName":"v2"}}
        {"kind":"PersistentVolumeClaim","metadata":{"name":"late","namespace":"default"},"spec":{"storageClassName":"late"}}
        {"kind":"PersistentVolumeClaim","metadata":{"name":"early","namespace":"default"},"spec":{"storageClassName":"early"}}
        {"kind":"PersistentVolumeClaim","metadata":{"name":"none","namespace":"default"},"spec":{}}"#,
    );
    expected.assert_eq(&cluster.filter(&super::make(&Value::Null).unwrap(), pod));
}

#[test]
fn filters_nodes_outside_volume_zones() {
    check("pod p", expect!["skip\n"]);
    check("pod p claim=late", expect!["skip\n"]);
    check(
        "pod p claim=c1",
        expect![[r#"
        a: ok
        b: never, node(s) had no available volume zone
        x: ok
    "#]],
    );
    check(
        "pod p claim=c2",
        expect![[r#"
        a: ok
        b: ok
        x: ok
    "#]],
    );
    check("pod p claim=early", expect!["reject never, PersistentVolume had no name\n"]);
    check(
        "pod p claim=none",
        expect!["reject never, PersistentVolumeClaim had no pv name and storageClass name\n"],
    );
}
