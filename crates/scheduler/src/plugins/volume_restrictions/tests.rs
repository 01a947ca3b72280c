use expect_test::{Expect, expect};
use serde_json::Value;

use crate::testing::test_cluster;

#[track_caller]
fn check(pod: &str, expected: Expect) {
    let mut cluster = test_cluster(
        r#"
        node a
        node b
        {"kind":"PersistentVolumeClaim","metadata":{"name":"once","namespace":"default"},"spec":{"accessModes":["ReadWriteOncePod"]}}
        {"kind":"PersistentVolumeClaim","metadata":{"name":"many","namespace":"default"},"spec":{"accessModes":["ReadWriteMany"]}}
        pod x on=a {"spec":{"volumes":[{"name":"d","gcePersistentDisk":{"pdName":"disk"}}]}}
        pod y on=b claim=once claim=many
        pod z on=b {"spec":{"volumes":[{"name":"d","gcePersistentDisk":{"pdName":"ro","readOnly":true}}]}}"#,
    );
    expected.assert_eq(&cluster.filter(&super::make(&Value::Null).unwrap(), pod));
}

#[test]
fn rejects_disk_and_read_write_once_pod_conflicts() {
    check("pod p", expect!["skip\n"]);
    check("pod p claim=many", expect!["skip\n"]);
    check(
        "pod p claim=missing",
        expect![[r#"
        reject never, persistentvolumeclaim "missing" not found
    "#]],
    );
    check(
        "pod p claim=once",
        expect![[r#"
        a: no, node(s) unavailable due to PersistentVolumeClaim with ReadWriteOncePod access mode already in-use by another pod
        b: no, node(s) unavailable due to PersistentVolumeClaim with ReadWriteOncePod access mode already in-use by another pod
    "#]],
    );
    check(
        r#"pod p {"spec":{"volumes":[{"name":"d","gcePersistentDisk":{"pdName":"disk","readOnly":true}}]}}"#,
        expect![[r#"
        a: no, node(s) had no available disk
        b: ok
    "#]],
    );
    check(
        r#"pod p {"spec":{"volumes":[{"name":"d","gcePersistentDisk":{"pdName":"ro","readOnly":true}}]}}"#,
        expect![[r#"
        a: ok
        b: ok
    "#]],
    );
}
