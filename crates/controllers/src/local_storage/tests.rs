use expect_test::{Expect, expect};
use k8s_openapi::api::core::v1::Node;
use reconcile::DeleteOptions;
use serde_json::{Value, json};

use super::*;
use crate::test_cluster::{TestCluster, wait_for};

fn typed<T: serde::de::DeserializeOwned>(value: Value) -> T {
    serde_json::from_value(value).expect("an object")
}

/// Merges `spec` into a claim for `node` and checks the planned action.
#[track_caller]
fn check(spec: Value, node: &str, mode: &str, expected: Expect) {
    let mut all = json!({"accessModes": ["ReadWriteOnce"], "resources": {"requests": {"storage": "1Gi"}}});
    for (name, value) in spec.as_object().into_iter().flatten() {
        all[name] = value.clone();
    }
    let annotations = json!({"volume.kubernetes.io/storage-provisioner": PROVISIONER, (SELECTED_NODE): node});
    let metadata = json!({"name": "data", "namespace": "ns", "uid": "u", "annotations": annotations});
    let claim: PersistentVolumeClaim = typed(json!({"metadata": metadata, "spec": all}));
    let class = StorageClass { volume_binding_mode: Some(mode.into()), ..default_storage_class() };
    let node: Option<Node> = (node == "one")
        .then(|| typed(json!({"metadata": {"name": "one", "labels": {"kubernetes.io/hostname": "host"}}})));
    let rendered = match plan::plan_provision(&claim, Some(&class), node.as_ref(), "/data") {
        ProvisionAction::Nothing => "nothing".into(),
        ProvisionAction::Reschedule => "reschedule".into(),
        ProvisionAction::Reject(reason) => reason,
        ProvisionAction::Provision(volume) => {
            let spec = volume.spec.expect("a spec");
            let affinity = spec.node_affinity.and_then(|affinity| affinity.required).expect("an affinity");
            let values = affinity.node_selector_terms[0].match_expressions.iter().flatten();
            let hosts: Vec<String> =
                values.flat_map(|term| term.values.clone().unwrap_or_default()).collect();
            let path = spec.host_path.map(|path| path.path).unwrap_or_default();
            let policy = spec.persistent_volume_reclaim_policy.unwrap_or_default();
            let size = spec.capacity.and_then(|sizes| sizes.get("storage").cloned()).unwrap_or_default();
            format!("{} {path} on {hosts:?} {} {policy}", volume.metadata.name.unwrap_or_default(), size.0)
        }
    };
    expected.assert_eq(&rendered);
}

#[test]
fn directory_is_provisioned_on_selected_node() {
    let late = "WaitForFirstConsumer";
    check(json!({}), "one", late, expect![[r#"pvc-u /data/pvc-u_ns_data on ["host"] 1Gi Delete"#]]);
    check(json!({}), "", late, expect!["nothing"]);
    check(json!({}), "gone", late, expect!["reschedule"]);
    check(json!({"volumeName": "v"}), "one", late, expect!["nothing"]);
    check(
        json!({}),
        "",
        "Immediate",
        expect![[
            r#"failed to provision volume with StorageClass "local-path": configuration error, no node was specified"#
        ]],
    );
    check(
        json!({"accessModes": ["ReadWriteMany"]}),
        "one",
        late,
        expect![[
            r#"failed to provision volume with StorageClass "local-path": NodePath only supports ReadWriteOnce and ReadWriteOncePod (1.22+) access modes"#
        ]],
    );
    check(
        json!({"selector": {}}),
        "one",
        late,
        expect![[
            r#"failed to provision volume with StorageClass "local-path": claim.Spec.Selector is not supported"#
        ]],
    );
    check(
        json!({"volumeMode": "Block"}),
        "one",
        late,
        expect![[
            r#"failed to provision volume with StorageClass "local-path": rancher.io/local-path does not support block volume provisioning"#
        ]],
    );
}

#[tokio::test]
async fn volume_is_created_and_deleted_with_claim() {
    let test_cluster = TestCluster::start(&[
        "local-storage-controller",
        "persistentvolume-binder-controller",
        "persistentvolume-protection-controller",
        "persistentvolumeclaim-protection-controller",
    ])
    .await;
    test_cluster.client.create(&default_storage_class()).await.expect("a class");
    test_cluster.client.create::<Node>(&typed(json!({"metadata": {"name": "one"}}))).await.expect("a node");
    let spec = json!({"accessModes": ["ReadWriteOnce"], "resources": {"requests": {"storage": "1Gi"}}});
    let metadata = json!({"name": "data", "namespace": "default", "annotations": {(SELECTED_NODE): "one"}});
    let claim: PersistentVolumeClaim = typed(json!({"metadata": metadata, "spec": spec}));
    test_cluster.client.create(&claim).await.expect("a claim");
    let key = claim.key();
    let bound = || async {
        let claim: PersistentVolumeClaim = test_cluster.client.get(&key).await.ok()?;
        let phase = claim.status.as_ref()?.phase.as_deref()?;
        (phase == "Bound").then_some(claim)
    };
    let claim = wait_for("a bound claim", bound).await;
    assert_eq!(claim.spec.as_ref().and_then(|spec| spec.storage_class_name.as_deref()), Some("local-path"));
    test_cluster
        .client
        .delete::<PersistentVolumeClaim>(&key, &DeleteOptions::default())
        .await
        .expect("a deletion");
    let deleted = || async {
        let left: Vec<PersistentVolume> = test_cluster.client.list("").await.ok()?;
        left.is_empty().then_some(())
    };
    wait_for("deletion of the volume", deleted).await;
}
