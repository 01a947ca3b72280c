use expect_test::{Expect, expect};
use serde_json::Value;

use crate::testing::test_cluster;

#[track_caller]
fn check(pod: &str, expected: Expect) {
    let claim = |name: &str, volume: &str| {
        format!(
            r#"{{"kind":"PersistentVolumeClaim","metadata":{{"name":"{name}","namespace":"default"}},"spec":{{"storageClassName":"c","volumeName":"{volume}"}}}}"#
        )
    };
    let volume = |name: &str| {
        format!(
            r#"{{"kind":"PersistentVolume","metadata":{{"name":"{name}"}},"spec":{{"csi":{{"driver":"d","volumeHandle":"h-{name}"}}}}}}"#
        )
    };
    let csi_node = |name: &str, count: i32| {
        format!(
            r#"{{"kind":"CSINode","metadata":{{"name":"{name}"}},"spec":{{"drivers":[{{"name":"d","nodeID":"n","allocatable":{{"count":{count}}}}}]}}}}"#
        )
    };
    let text = [
        "node a\nnode b\nnode x".to_owned(),
        r#"{"kind":"StorageClass","metadata":{"name":"c"},"provisioner":"d"}"#.to_owned(),
        volume("v1"),
        volume("v2"),
        volume("v3"),
        claim("c1", "v1"),
        claim("c2", "v2"),
        claim("c3", "v3"),
        claim("new", ""),
        csi_node("a", 1),
        csi_node("b", 2),
        "pod x on=a claim=c1\npod y on=b claim=c1".to_owned(),
        r#"{"kind":"VolumeAttachment","metadata":{"name":"t"},"spec":{"attacher":"d","nodeName":"b","source":{"persistentVolumeName":"v3"}}}"#
            .to_owned(),
    ];
    expected.assert_eq(&test_cluster(&text.join("\n")).filter(&super::make(&Value::Null).unwrap(), pod));
}

#[test]
fn filters_nodes_over_volume_limit_of_driver() {
    check("pod p", expect!["skip\n"]);
    // a is at its limit; b has one volume in use and one attached.
    for new in ["c2", "new"] {
        check(
            &format!("pod p claim={new}"),
            expect![[r#"
                a: no, node(s) exceed max volume count
                b: no, node(s) exceed max volume count
                x: ok
            "#]],
        );
    }
    // A volume that is attached already does not count again.
    check(
        "pod p claim=c1",
        expect![[r#"
        a: ok
        b: ok
        x: ok
    "#]],
    );
}
