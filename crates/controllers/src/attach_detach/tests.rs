use expect_test::{Expect, expect};
use proptest::prelude::*;
use serde_json::{Value, json};

use super::*;
use crate::test_cluster::{TestCluster, wait_for};

fn typed<T: serde::de::DeserializeOwned>(value: Value) -> T {
    serde_json::from_value(value).expect("an object")
}

fn volume(name: &str, mode: &str) -> Arc<PersistentVolume> {
    Arc::new(typed(json!({
        "metadata": {"name": name},
        "spec": {"accessModes": [mode], "csi": {"driver": "d.io", "volumeHandle": format!("h-{name}")}},
    })))
}

fn volume_to_attach(name: &str, mode: &str) -> VolumeToAttach {
    VolumeToAttach {
        volume: volume(name, mode),
        pods: vec![Arc::new(typed(json!({"metadata": {"name": "p"}})))],
        pods_on_other_nodes: vec![],
    }
}

/// The attachment of a volume to a node. `state` is `new`, `attached` or an attach error.
fn attachment(of: &str, node: &str, state: &str) -> Arc<VolumeAttachment> {
    let name = plan::csi_attachment_name(&volume_to_attach(of, ""), node);
    let status = match state {
        "new" => json!({"attached": false}),
        "attached" => json!({"attached": true}),
        error => json!({"attached": false, "attachError": {"message": error}}),
    };
    Arc::new(typed(json!({
        "metadata": {"name": name},
        "spec": {"attacher": "d.io", "nodeName": node, "source": {"persistentVolumeName": of}}, "status": status,
    })))
}

/// A node with its readiness, the volumes attached and the volumes in use.
fn node(ready: bool, attached: &[&str], used: &[&str]) -> Node {
    let unique = |name: &&str| format!("kubernetes.io/csi/d.io^h-{name}");
    let attached: Vec<Value> =
        attached.iter().map(|name| json!({"name": unique(name), "devicePath": ""})).collect();
    let used: Vec<String> = used.iter().map(unique).collect();
    typed(json!({
        "metadata": {"name": "n", "annotations": {"volumes.kubernetes.io/controller-managed-attach-detach": "true"}},
        "status": {
            "volumesAttached": attached, "volumesInUse": used,
            "conditions": [{"type": "Ready", "status": if ready { "True" } else { "Unknown" }}],
        },
    }))
}

fn render(actions: &[Action]) -> String {
    let line = |action: &Action| match action {
        Action::UpdateVolumesAttached(volumes) => {
            let names: Vec<&str> =
                volumes.iter().filter_map(|volume| volume.name.rsplit('^').next()).collect();
            format!("report {names:?}")
        }
        Action::Detach(attachment) => {
            format!("detach {}", attachment.spec.source.persistent_volume_name.as_deref().unwrap_or_default())
        }
        Action::Attach(attachment) => {
            format!("attach {}", attachment.spec.source.persistent_volume_name.as_deref().unwrap_or_default())
        }
        Action::Event { reason, message, .. } => format!("event {reason} {message}"),
        Action::RequeueAt(at) => format!("requeue at {at}"),
    };
    actions.iter().map(line).collect::<Vec<_>>().join("\n")
}

#[track_caller]
fn check(
    node: Option<&Node>,
    to_attach: &[VolumeToAttach],
    there: &[Arc<VolumeAttachment>],
    minutes: i64,
    expected: Expect,
) {
    let other_attachments: Vec<_> = there.iter().filter(|one| one.spec.node_name != "n").cloned().collect();
    let here: Vec<_> = there.iter().filter(|one| one.spec.node_name == "n").cloned().collect();
    let since = here.iter().map(|one| (one.name().to_owned(), Timestamp::UNIX_EPOCH)).collect();
    let now = Timestamp::from_second(minutes * 60).expect("a time");
    let state = plan::NodeState { name: "n", node, disks: &[], taken: &BTreeSet::new() };
    expected.assert_eq(&render(&plan::plan(&state, to_attach, &here, &other_attachments, &since, now)));
}

#[test]
fn volume_is_attached_before_reported_in_node_status() {
    let once = || [volume_to_attach("v", "ReadWriteOnce")];
    let idle = node(true, &[], &[]);
    check(Some(&idle), &once(), &[], 0, expect!["attach v"]);
    check(Some(&idle), &once(), &[attachment("v", "n", "new")], 0, expect![""]);
    check(
        Some(&idle),
        &once(),
        &[attachment("v", "n", "attached")],
        0,
        expect![[r#"
        event SuccessfulAttachVolume AttachVolume.Attach succeeded for volume "v" 
        report ["h-v"]"#]],
    );
    check(Some(&node(true, &["v"], &["v"])), &once(), &[attachment("v", "n", "attached")], 0, expect![""]);
    check(
        Some(&idle),
        &once(),
        &[attachment("v", "n", "no disk")],
        0,
        expect![[r#"event FailedAttachVolume AttachVolume.Attach failed for volume "v" : no disk"#]],
    );
    check(
        Some(&idle),
        &once(),
        &[attachment("v", "m", "attached")],
        0,
        expect![[
            r#"event FailedAttachVolume Waiting for detach for volume "v" Volume is already exclusively attached to one node, waiting on detach before it can be attached to another node"#
        ]],
    );
    let conflicting =
        [VolumeToAttach { pods_on_other_nodes: vec!["q".into()], ..volume_to_attach("v", "ReadWriteOnce") }];
    check(
        Some(&idle),
        &conflicting,
        &[attachment("v", "m", "attached")],
        0,
        expect![[
            r#"event FailedAttachVolume Waiting for detach for volume "v" Volume is already used by pod(s) q"#
        ]],
    );
    let mut without_annotation = idle.clone();
    without_annotation.metadata.annotations = None;
    check(Some(&without_annotation), &once(), &[], 0, expect![""]);
}

#[test]
fn volume_is_detached_after_unmount() {
    let there = [attachment("v", "n", "attached")];
    check(
        Some(&node(true, &["v"], &[])),
        &[],
        &there,
        0,
        expect![[r#"
        report []
        detach v"#]],
    );
    check(Some(&node(true, &["v"], &["v"])), &[], &there, 0, expect!["requeue at 1970-01-01T00:06:00Z"]);
    check(Some(&node(true, &["v"], &["v"])), &[], &there, 7, expect![""]);
    check(Some(&node(false, &["v"], &["v"])), &[], &there, 5, expect!["requeue at 1970-01-01T00:06:00Z"]);
    check(
        Some(&node(false, &["v"], &["v"])),
        &[],
        &there,
        6,
        expect![[r#"
        report []
        detach v"#]],
    );
    check(None, &[], &there, 0, expect!["detach v"]);
}

proptest! {
    /// For any combination of needed, attached, reported and mounted volumes, applying plans converges, and
    /// no exclusive volume is ever attached to two nodes.
    #[test]
    fn attach_detach_plan_is_stable(
        requested in prop::sample::subsequence(vec!["a", "b", "c"], 0..=3),
        here in prop::sample::subsequence(vec!["a", "b", "c"], 0..=3),
        other in prop::sample::subsequence(vec!["a", "b", "c"], 0..=3),
        reported in prop::sample::subsequence(vec!["a", "b", "c"], 0..=3),
        used in prop::sample::subsequence(vec!["a", "b", "c"], 0..=3),
        ready: bool,
    ) {
        let to_attach: Vec<VolumeToAttach> = requested.iter().map(|name| volume_to_attach(name, "ReadWriteOnce")).collect();
        let other: Vec<_> = other.iter().filter(|name| !here.contains(name)).map(|name| attachment(name, "m", "attached")).collect();
        let mut there: Vec<_> = here.iter().map(|name| attachment(name, "n", "attached")).collect();
        let mut node = node(ready, &reported, &used);
        let (mut rounds, now) = (0, Timestamp::UNIX_EPOCH);
        loop {
            let state =
                plan::NodeState { name: "n", node: Some(&node), disks: &[], taken: &BTreeSet::new() };
            let mut actions = plan::plan(&state, &to_attach, &there, &other, &HashMap::new(), now);
            actions.retain(|action| !matches!(action, Action::Event { .. } | Action::RequeueAt(_)));
            if actions.is_empty() {
                break;
            }
            for action in actions {
                match action {
                    Action::UpdateVolumesAttached(volumes) => node.status.get_or_insert_default().volumes_attached = Some(volumes),
                    Action::Detach(removed) => there.retain(|one| one.name() != removed.name()),
                    Action::Attach(object) => {
                        let name = object.spec.source.persistent_volume_name.clone().unwrap_or_default();
                        prop_assert!(other.iter().all(|one| one.spec.source.persistent_volume_name.as_ref() != Some(&name)));
                        there.push(attachment(&name, "n", "attached"));
                    }
                    _ => {}
                }
            }
            rounds += 1;
            prop_assert!(rounds < 5);
        }
    }
}

#[tokio::test]
async fn volume_of_pod_is_attached_and_detached() {
    let test_cluster = TestCluster::start(&[
        "persistentvolume-attach-detach-controller",
        "persistentvolume-binder-controller",
    ])
    .await;
    let post = async |path: &str, object: Value| {
        test_cluster.client.request(http::Method::POST, path, Some(&object)).await.expect("an object");
    };
    post("/api/v1/nodes", json!({"metadata": {"name": "n", "annotations": {"volumes.kubernetes.io/controller-managed-attach-detach": "true"}}})).await;
    let spec = json!({
        "capacity": {"storage": "1Gi"}, "accessModes": ["ReadWriteOnce"], "storageClassName": "x",
        "csi": {"driver": "d.io", "volumeHandle": "h-v"},
    });
    post("/api/v1/persistentvolumes", json!({"metadata": {"name": "v"}, "spec": spec})).await;
    let spec = json!({"accessModes": ["ReadWriteOnce"], "storageClassName": "x", "resources": {"requests": {"storage": "1Gi"}}});
    post(
        "/api/v1/namespaces/default/persistentvolumeclaims",
        json!({"metadata": {"name": "c"}, "spec": spec}),
    )
    .await;
    let spec = json!({
        "nodeName": "n", "containers": [{"name": "c", "image": "i"}],
        "volumes": [{"name": "v", "persistentVolumeClaim": {"claimName": "c"}}],
    });
    post("/api/v1/namespaces/default/pods", json!({"metadata": {"name": "p"}, "spec": spec})).await;
    let key = Key::new("", &plan::csi_attachment_name(&volume_to_attach("v", ""), "n"));
    wait_for("an attachment", || async { test_cluster.client.get::<VolumeAttachment>(&key).await.ok() })
        .await;
    let done = Patch::Merge(json!({"status": {"attached": true}}));
    test_cluster.client.patch_status::<VolumeAttachment>(&key, &done).await.expect("a status");
    let attached = async |count: usize| {
        let node: Node = test_cluster.client.get(&Key::new("", "n")).await.ok()?;
        let volumes = node.status?.volumes_attached.unwrap_or_default();
        (volumes.len() == count).then_some(())
    };
    wait_for("the volume in the node status", || attached(1)).await;
    let options = reconcile::DeleteOptions { grace_seconds: Some(0), ..reconcile::DeleteOptions::default() };
    test_cluster.client.delete::<Pod>(&Key::new("default", "p"), &options).await.expect("a deletion");
    wait_for("an empty node status", || attached(0)).await;
    let deleted = || async { test_cluster.client.get::<VolumeAttachment>(&key).await.is_err().then_some(()) };
    wait_for("deletion of the attachment", deleted).await;
}

fn disk(mode: &str) -> VolumeToAttach {
    let iscsi = json!({"targetPortal": "192.0.2.1:3260", "iqn": "iqn.x", "lun": 1});
    let volume = json!({"metadata": {"name": "d"}, "spec": {"accessModes": [mode], "iscsi": iscsi}});
    VolumeToAttach { volume: Arc::new(typed(volume)), ..volume_to_attach("d", mode) }
}

#[test]
fn exclusive_disk_is_attached_to_one_node_at_a_time() {
    const NAME: &str = "kubernetes.io/iscsi/192.0.2.1:3260:iqn.x:1";
    assert_eq!(disks::unique_name(&disk("").volume).as_deref(), Some(NAME));
    let node = |ready: bool, attached: bool, used: bool| {
        let mut node = node(ready, &[], &[]);
        let status = node.status.as_mut().expect("a status");
        let volume = json!([{"name": NAME, "devicePath": ""}]);
        status.volumes_attached = attached.then(|| typed(volume));
        status.volumes_in_use = used.then(|| vec![NAME.to_owned()]);
        node
    };
    let check = |node: Node, disks: &[VolumeToAttach], taken: bool, minutes: i64, expected: Expect| {
        let taken = if taken { disks::exclusive_disk_names(disks).collect() } else { BTreeSet::new() };
        let since = HashMap::from([(disks::disk_key(NAME, "n"), Timestamp::UNIX_EPOCH)]);
        let now = Timestamp::from_second(minutes * 60).expect("a time");
        let state = plan::NodeState { name: "n", node: Some(&node), disks, taken: &taken };
        expected.assert_eq(&render(&plan::plan(&state, &[], &[], &[], &since, now)));
    };
    let (once, many) = ([disk("ReadWriteOnce")], [disk("ReadWriteMany")]);
    check(
        node(true, false, false),
        &once,
        false,
        0,
        expect![[r#"
        event SuccessfulAttachVolume AttachVolume.Attach succeeded for volume "d" 
        report ["kubernetes.io/iscsi/192.0.2.1:3260:iqn.x:1"]"#]],
    );
    check(
        node(true, false, false),
        &once,
        true,
        0,
        expect![[
            r#"event FailedAttachVolume Waiting for detach for volume "d" Volume is already exclusively attached to one node, waiting on detach before it can be attached to another node"#
        ]],
    );
    check(
        node(true, false, false),
        &many,
        true,
        0,
        expect![[r#"
        event SuccessfulAttachVolume AttachVolume.Attach succeeded for volume "d" 
        report ["kubernetes.io/iscsi/192.0.2.1:3260:iqn.x:1"]"#]],
    );
    check(node(true, true, true), &once, true, 0, expect![""]);
    // No pod needs the disk.
    check(node(true, true, true), &[], false, 1, expect!["requeue at 1970-01-01T00:06:00Z"]);
    check(node(true, true, false), &[], false, 1, expect!["report []"]);
    check(node(false, true, true), &[], false, 5, expect!["requeue at 1970-01-01T00:06:00Z"]);
    check(node(false, true, true), &[], false, 7, expect!["report []"]);
}

#[test]
fn disk_not_assigned_is_free_for_other_nodes() {
    const NAME: &str = "kubernetes.io/iscsi/192.0.2.1:3260:iqn.x:1";
    let volumes = |names: &[&str]| -> Vec<k8s_openapi::api::core::v1::AttachedVolume> {
        typed(names.iter().map(|name| json!({"name": name, "devicePath": ""})).collect())
    };
    let other = ("other".to_owned(), "m".to_owned());
    // Disks in the status, disks in the plan, the recorded node afterwards, whether others are enqueued.
    let check = |status: &[&str], report: Option<&[&str]>, expected: &[&str], is_dropped: bool| {
        let mut node = node(true, &[], &[]);
        node.status.as_mut().expect("a status").volumes_attached = Some(volumes(status));
        let mut given = HashMap::from([(NAME.to_owned(), "n".to_owned()), other.clone()]);
        let state = plan::NodeState { name: "n", node: Some(&node), disks: &[], taken: &BTreeSet::new() };
        let actions: Vec<Action> =
            report.map(|names| Action::UpdateVolumesAttached(volumes(names))).into_iter().collect();
        assert_eq!(
            disks::record_assigned_disks(&mut given, &state, &actions),
            is_dropped,
            "{status:?} {report:?}"
        );
        assert_eq!(given.remove("other").as_deref(), Some("m"));
        assert_eq!(given.keys().collect::<Vec<_>>(), expected, "{status:?} {report:?}");
    };
    check(&[], Some(&[NAME, "kubernetes.io/csi/d^v"]), &[NAME], false);
    // The status is written.
    check(&[NAME], None, &[], false);
    check(&[NAME], Some(&[]), &[], false);
    // The status was not written, and no pod needs the disk.
    check(&[], None, &[], true);
    let mut given = HashMap::from([(NAME.to_owned(), "n".to_owned())]);
    let deleted_node = plan::NodeState { name: "n", node: None, disks: &[], taken: &BTreeSet::new() };
    assert!(disks::record_assigned_disks(&mut given, &deleted_node, &[]) && given.is_empty());
}

#[tokio::test]
async fn exclusive_disk_is_attached_to_second_node_after_release() {
    let test_cluster = TestCluster::start(&[
        "persistentvolume-attach-detach-controller",
        "persistentvolume-binder-controller",
    ])
    .await;
    let post = async |path: &str, object: Value| {
        test_cluster.client.request(http::Method::POST, path, Some(&object)).await.expect("an object");
    };
    let managed = json!({"volumes.kubernetes.io/controller-managed-attach-detach": "true"});
    let spec = json!({
        "capacity": {"storage": "1Gi"}, "accessModes": ["ReadWriteOnce"], "storageClassName": "x",
        "iscsi": {"targetPortal": "192.0.2.1", "iqn": "iqn.2026-01.example:disk", "lun": 0},
    });
    post("/api/v1/persistentvolumes", json!({"metadata": {"name": "v"}, "spec": spec})).await;
    let spec = json!({"accessModes": ["ReadWriteOnce"], "storageClassName": "x", "resources": {"requests": {"storage": "1Gi"}}});
    post(
        "/api/v1/namespaces/default/persistentvolumeclaims",
        json!({"metadata": {"name": "c"}, "spec": spec}),
    )
    .await;
    for node in ["m", "n"] {
        post("/api/v1/nodes", json!({"metadata": {"name": node, "annotations": managed}})).await;
        let spec = json!({
            "nodeName": node, "containers": [{"name": "c", "image": "i"}],
            "volumes": [{"name": "v", "persistentVolumeClaim": {"claimName": "c"}}],
        });
        post("/api/v1/namespaces/default/pods", json!({"metadata": {"name": node}, "spec": spec})).await;
    }
    let nodes_with_disk = async || {
        let mut nodes_with_disk = test_cluster.client.list::<Node>("").await.unwrap_or_default();
        nodes_with_disk.retain(|node| {
            let attached = node.status.as_ref().and_then(|status| status.volumes_attached.as_ref());
            attached.is_some_and(|attached| !attached.is_empty())
        });
        nodes_with_disk.iter().map(|node| node.name().to_owned()).collect::<Vec<String>>()
    };
    let first = wait_for("the disk on the first node", async || nodes_with_disk().await.pop()).await;
    // The second node gets an event that it has to wait. This is the last event it gets.
    let second = if first == "m" { "n" } else { "m" };
    wait_for("the second node to wait", async || {
        let events = test_cluster.client.list::<k8s_openapi::api::core::v1::Event>("default").await.ok()?;
        let is_it = |event: &k8s_openapi::api::core::v1::Event| {
            event.involved_object.name.as_deref() == Some(second)
                && event.reason.as_deref() == Some("FailedAttachVolume")
        };
        events.iter().any(is_it).then_some(())
    })
    .await;
    assert_eq!(nodes_with_disk().await, [first.as_str()]);
    let options = reconcile::DeleteOptions { grace_seconds: Some(0), ..reconcile::DeleteOptions::default() };
    test_cluster.client.delete::<Pod>(&Key::new("default", &first), &options).await.expect("a deletion");
    wait_for("the disk on the second node", async || {
        (nodes_with_disk().await == [second.to_owned()]).then_some(())
    })
    .await;
}
