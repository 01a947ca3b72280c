use std::collections::BTreeMap;
use std::sync::Arc;

use expect_test::{Expect, expect};
use k8s_openapi::api::core::v1::{PersistentVolume, PersistentVolumeClaim};
use k8s_openapi::api::storage::v1::StorageClass;
use proptest::prelude::*;
use reconcile::{DeleteOptions, Key, Object};
use serde_json::{Value, json};

use super::bound;
use super::plan::{self, BinderState, ClaimAction, VolumeAction};
use crate::test_cluster::{TestCluster, wait_for};

/// A volume given as `name 5Gi class=fast modes=ReadWriteOnce,ReadOnlyMany ref=claim uid=u phase=Available
/// policy=Delete`.
fn volume(text: &str) -> Arc<PersistentVolume> {
    let mut words = text.split_whitespace();
    let name = words.next().unwrap_or_default();
    let mut value = json!({
        "metadata": {"name": name, "uid": name, "annotations": {}},
        "spec": {"accessModes": ["ReadWriteOnce"], "persistentVolumeReclaimPolicy": "Retain"},
        "status": {"phase": "Available"},
    });
    for word in words {
        match word.split_once('=') {
            Some(("class", class)) => value["spec"]["storageClassName"] = json!(class),
            Some(("modes", modes)) => {
                value["spec"]["accessModes"] = json!(modes.split(',').collect::<Vec<_>>())
            }
            Some(("ref", claim)) => value["spec"]["claimRef"] = json!({"namespace": "ns", "name": claim}),
            Some(("uid", uid)) => value["spec"]["claimRef"]["uid"] = json!(uid),
            Some(("phase", phase)) => value["status"]["phase"] = json!(phase),
            Some(("policy", policy)) => value["spec"]["persistentVolumeReclaimPolicy"] = json!(policy),
            Some(("by", by)) => {
                value["metadata"]["annotations"]["pv.kubernetes.io/provisioned-by"] = json!(by)
            }
            Some(("mode", mode)) => value["spec"]["volumeMode"] = json!(mode),
            _ => value["spec"]["capacity"] = json!({"storage": word}),
        }
    }
    Arc::new(serde_json::from_value(value).expect("a volume"))
}

/// A claim given as `name 5Gi class=fast volume=v done node=n`. The UID equals the name.
fn claim(text: &str) -> PersistentVolumeClaim {
    let mut words = text.split_whitespace();
    let name = words.next().unwrap_or_default();
    let mut value = json!({
        "metadata": {"name": name, "namespace": "ns", "uid": name, "annotations": {}},
        "spec": {"accessModes": ["ReadWriteOnce"]}, "status": {"phase": "Pending"},
    });
    for word in words {
        match word.split_once('=') {
            Some(("class", class)) => value["spec"]["storageClassName"] = json!(class),
            Some(("volume", volume)) => value["spec"]["volumeName"] = json!(volume),
            Some(("mode", mode)) => value["spec"]["volumeMode"] = json!(mode),
            Some(("node", node)) => {
                value["metadata"]["annotations"]["volume.kubernetes.io/selected-node"] = json!(node)
            }
            _ if word == "done" => {
                value["metadata"]["annotations"]["pv.kubernetes.io/bind-completed"] = json!("yes")
            }
            _ => value["spec"]["resources"] = json!({"requests": {"storage": word}}),
        }
    }
    serde_json::from_value(value).expect("a claim")
}

/// A storage class given as `name provisioner [wait] [default]`.
fn class(text: &str) -> Arc<StorageClass> {
    let words: Vec<&str> = text.split_whitespace().collect();
    let mode = if words.contains(&"wait") { "WaitForFirstConsumer" } else { "Immediate" };
    let default = words.contains(&"default").to_string();
    let value = json!({
        "metadata": {"name": words[0], "annotations": {"storageclass.kubernetes.io/is-default-class": default}},
        "provisioner": words[1], "volumeBindingMode": mode,
    });
    Arc::new(serde_json::from_value(value).expect("a class"))
}

#[track_caller]
fn check(text: &str, volumes: &[&str], classes: &[&str], pods: &[&str], expected: Expect) {
    let state = BinderState {
        volumes: &volumes.iter().map(|text| volume(text)).collect::<Vec<_>>(),
        classes: &classes.iter().map(|text| class(text)).collect::<Vec<_>>(),
        waiting_pods: &pods.iter().map(|pod| (*pod).to_owned()).collect::<Vec<_>>(),
    };
    let rendered: Vec<String> = plan::plan_claim(&claim(text), &state)
        .iter()
        .map(|action| match action {
            ClaimAction::Bind(volume) => format!("bind {}", volume.name()),
            ClaimAction::Pending => "pending".into(),
            ClaimAction::Lost { reason, message } => format!("lost {reason} {message}"),
            ClaimAction::AssignClass(class) => format!("class {class}"),
            ClaimAction::SetProvisioner(name) => format!("ask {name}"),
            ClaimAction::Event { reason, message, .. } => format!("event {reason} {message}"),
        })
        .collect();
    expected.assert_eq(&rendered.join("\n"));
}

#[test]
fn binds_claim_to_smallest_matching_volume() {
    check("c 2Gi", &["a 1Gi", "b 5Gi", "d 3Gi"], &[], &[], expect!["bind d"]);
    check("c 2Gi", &["a 5Gi modes=ReadWriteOnce,ReadOnlyMany", "b 9Gi"], &[], &[], expect!["bind b"]);
    check("c 2Gi", &["a 2Gi", "b 9Gi ref=c"], &[], &[], expect!["bind b"]);
    check("c 2Gi class=x", &["a 2Gi", "b 9Gi class=x"], &[], &[], expect!["bind b"]);
    check(
        "c 2Gi",
        &["a 2Gi ref=other uid=o", "b 2Gi phase=Released"],
        &[],
        &[],
        expect![[r#"
        event FailedBinding no persistent volumes available for this claim and no storage class is set
        pending"#]],
    );
    check("c 2Gi", &["a 9Gi mode=Block"], &["fast x.io/p default"], &[], expect!["class fast"]);
    check(
        "c 2Gi class=fast",
        &[],
        &[],
        &[],
        expect![[r#"event ProvisioningFailed storageclass.storage.k8s.io "fast" not found"#]],
    );
    check(
        "c 2Gi class=fast",
        &[],
        &["fast x.io/p"],
        &[],
        expect![[r#"
        ask x.io/p
        event ExternalProvisioning Waiting for a volume to be created either by the external provisioner 'x.io/p' or manually by the system administrator. If volume creation is delayed, please verify that the provisioner is running and correctly registered."#]],
    );
    check(
        "c 2Gi class=no",
        &[],
        &["no kubernetes.io/no-provisioner"],
        &[],
        expect!["event ProvisioningFailed no volume plugin matched name: kubernetes.io/no-provisioner"],
    );
}

#[test]
fn delayed_binding_waits_for_pod() {
    let classes = &["late x.io/p wait"];
    check(
        "c 2Gi class=late",
        &["a 2Gi class=late"],
        classes,
        &[],
        expect![[r#"
        event WaitForFirstConsumer waiting for first consumer to be created before binding
        pending"#]],
    );
    check(
        "c 2Gi class=late",
        &[],
        classes,
        &["p", "q"],
        expect![[r#"
        event WaitForPodScheduled waiting for pods p,q to be scheduled
        pending"#]],
    );
    check("c 2Gi class=late", &["a 2Gi class=late ref=c uid=c"], classes, &["p"], expect!["bind a"]);
    check(
        "c 2Gi class=late node=n",
        &[],
        classes,
        &[],
        expect![[r#"
        ask x.io/p
        event ExternalProvisioning Waiting for a volume to be created either by the external provisioner 'x.io/p' or manually by the system administrator. If volume creation is delayed, please verify that the provisioner is running and correctly registered."#]],
    );
}

#[test]
fn claim_binds_only_to_named_volume() {
    check("c 2Gi volume=a", &[], &[], &[], expect!["pending"]);
    check("c 2Gi volume=a", &["a 2Gi"], &[], &[], expect!["bind a"]);
    check(
        "c 2Gi volume=a",
        &["a 1Gi"],
        &[],
        &[],
        expect![[r#"
        event VolumeMismatch Cannot bind to requested volume "a": requested PV is too small
        pending"#]],
    );
    check(
        "c 2Gi volume=a",
        &["a 2Gi ref=other uid=o"],
        &[],
        &[],
        expect![[r#"
        event FailedBinding volume "a" already bound to a different claim.
        pending"#]],
    );
    check(
        "c 2Gi done",
        &["a 2Gi"],
        &[],
        &[],
        expect![
            "lost ClaimLost Bound claim has lost reference to PersistentVolume. Data on the volume is lost!"
        ],
    );
    check(
        "c 2Gi volume=a done",
        &[],
        &[],
        &[],
        expect!["lost ClaimLost Bound claim has lost its PersistentVolume. Data on the volume is lost!"],
    );
    check("c 2Gi volume=a done", &["a 2Gi ref=c uid=c"], &[], &[], expect!["bind a"]);
    check(
        "c 2Gi volume=a done",
        &["a 2Gi ref=c uid=old"],
        &[],
        &[],
        expect!["lost ClaimMisbound Two claims are bound to the same volume, this one is bound incorrectly"],
    );
}

#[test]
fn volume_phase_follows_claim() {
    let check = |text: &str, named: Option<&str>, expected: VolumeAction| {
        let named = named.map(claim);
        assert_eq!(plan::plan_volume(&volume(text), named.as_ref()), expected, "{text}");
    };
    check("a 1Gi phase=Pending", None, VolumeAction::SetPhase("Available"));
    check("a 1Gi", None, VolumeAction::Nothing);
    check("a 1Gi ref=c", None, VolumeAction::Nothing);
    check("a 1Gi ref=c uid=c", Some("c 1Gi"), VolumeAction::EnqueueClaim);
    check("a 1Gi ref=c uid=c mode=Block", Some("c 1Gi"), VolumeAction::Mismatch);
    check("a 1Gi ref=c uid=c", Some("c 1Gi volume=a"), VolumeAction::SetPhase("Bound"));
    check("a 1Gi ref=c uid=c", Some("c 1Gi volume=b"), VolumeAction::Unbind);
    check("a 1Gi ref=c uid=c phase=Bound", None, VolumeAction::Release);
    check("a 1Gi ref=c uid=c phase=Released", None, VolumeAction::Nothing);
    check("a 1Gi ref=c uid=c phase=Released policy=Delete by=x.io/p", None, VolumeAction::Nothing);
    let message =
        "error getting deleter volume plugin for volume \"a\": no deletable volume plugin matched".to_owned();
    check(
        "a 1Gi ref=c uid=c phase=Released policy=Delete",
        None,
        VolumeAction::Fail { reason: "VolumeFailedDelete", message },
    );
}

proptest! {
    /// For any claims and volumes, binding until nothing changes leaves no volume with two claims, no claim
    /// with a volume that is too small, and no pending claim that an available volume would fit.
    #[test]
    fn no_volume_is_bound_to_two_claims(sizes in prop::collection::vec(1..6u32, 0..6), requested_sizes in prop::collection::vec(1..6u32, 0..6)) {
        let mut volumes: Vec<Arc<PersistentVolume>> = sizes.iter().enumerate().map(|(i, size)| volume(&format!("v{i} {size}Gi"))).collect();
        let mut claims: Vec<PersistentVolumeClaim> = requested_sizes.iter().enumerate().map(|(i, size)| claim(&format!("c{i} {size}Gi class="))).collect();
        for claim in &mut claims {
            let state = BinderState { volumes: &volumes, classes: &[], waiting_pods: &[] };
            if let Some(ClaimAction::Bind(chosen)) = plan::plan_claim(claim, &state).into_iter().next() {
                let mut taken = bound::bind_volume(&chosen, claim).expect("a new binding");
                taken.status.get_or_insert_default().phase = Some("Bound".into());
                *claim = bound::bind_claim(claim, &taken).expect("a new binding");
                let slot = volumes.iter_mut().find(|volume| volume.name() == taken.name()).expect("the volume");
                *slot = Arc::new(taken);
            }
        }
        let mut by_volume: BTreeMap<String, u32> = BTreeMap::new();
        for (claim, requested) in claims.iter().zip(&requested_sizes) {
            let name = claim.spec.as_ref().and_then(|spec| spec.volume_name.clone());
            match name {
                Some(name) => {
                    let index: usize = name[1..].parse().expect("a number");
                    prop_assert!(sizes[index] >= *requested);
                    *by_volume.entry(name).or_default() += 1;
                }
                None => prop_assert!(volumes.iter().enumerate().all(|(i, volume)| sizes[i] < *requested || super::matching::claim_ref(volume).is_some())),
            }
            let state = BinderState { volumes: &volumes, classes: &[], waiting_pods: &[] };
            for action in plan::plan_claim(claim, &state) {
                if let ClaimAction::Bind(volume) = action {
                    prop_assert_eq!(bound::bind_volume(&volume, claim), None);
                    prop_assert_eq!(bound::bind_claim(claim, &volume), None);
                }
            }
        }
        prop_assert!(by_volume.values().all(|count| *count == 1));
    }
}

async fn create(test_cluster: &TestCluster, path: &str, value: Value) {
    test_cluster.client.request(http::Method::POST, path, Some(&value)).await.expect("an object");
}

#[tokio::test]
async fn claim_is_bound_and_volume_released_on_api_server() {
    let test_cluster = TestCluster::start(&[
        "persistentvolume-binder-controller",
        "persistentvolumeclaim-protection-controller",
    ])
    .await;
    let spec = json!({"storageClassName": "", "accessModes": ["ReadWriteOnce"], "resources": {"requests": {"storage": "1Gi"}}});
    create(
        &test_cluster,
        "/api/v1/namespaces/default/persistentvolumeclaims",
        json!({"metadata": {"name": "c"}, "spec": spec}),
    )
    .await;
    let spec = json!({
        "capacity": {"storage": "2Gi"}, "accessModes": ["ReadWriteOnce"], "hostPath": {"path": "/x"},
        "persistentVolumeReclaimPolicy": "Retain",
    });
    create(&test_cluster, "/api/v1/persistentvolumes", json!({"metadata": {"name": "v"}, "spec": spec}))
        .await;
    let key = Key::new("default", "c");
    let bound = || async {
        let claim: PersistentVolumeClaim = test_cluster.client.get(&key).await.ok()?;
        let status = claim.status.as_ref()?;
        (status.phase.as_deref() == Some("Bound")).then_some(claim)
    };
    let claim = wait_for("the claim to be bound", bound).await;
    assert_eq!(claim.spec.as_ref().and_then(|spec| spec.volume_name.as_deref()), Some("v"));
    assert_eq!(json!(claim.status)["capacity"], json!({"storage": "2Gi"}));
    assert_eq!(claim.annotation("pv.kubernetes.io/bind-completed"), Some("yes"));
    let phase = |expected: &'static str| {
        let test_cluster = &test_cluster;
        async move {
            let volume: PersistentVolume = test_cluster.client.get(&Key::new("", "v")).await.ok()?;
            (super::matching::phase(&volume) == expected).then_some(())
        }
    };
    wait_for("the volume to be bound", || phase("Bound")).await;
    test_cluster
        .client
        .delete::<PersistentVolumeClaim>(&key, &DeleteOptions::default())
        .await
        .expect("a deletion");
    wait_for("the volume to be released", || phase("Released")).await;
}
