//! Protection controllers: finalizers keep PersistentVolumeClaims, PersistentVolumes and
//! VolumeAttributesClasses from being deleted while in use.
//!
//! Upstream: `pkg/controller/volume/pvcprotection`, `pvprotection` and `vacprotection`.

use std::sync::Arc;

use k8s_openapi::api::core::v1::{PersistentVolume, PersistentVolumeClaim, Pod};
use k8s_openapi::api::storage::v1::VolumeAttributesClass;
use reconcile::{Controller, Ctx, Error, Key, Object, ObjectUpdate, ReconcileAction, claims_of, keys};

use crate::pod;

const PVC_FINALIZER: &str = "kubernetes.io/pvc-protection";
const PV_FINALIZER: &str = "kubernetes.io/pv-protection";
const VAC_FINALIZER: &str = "kubernetes.io/vac-protection";
const WORKERS: usize = 5;

/// The change to an object's finalizer.
#[derive(Debug, PartialEq)]
enum Action {
    Nothing,
    Add,
    /// Remove the finalizer once the object is not in use.
    Remove,
}

fn plan<T: Object>(object: &T, finalizer: &str) -> Action {
    let found = object.metadata().finalizers.iter().flatten().any(|found| found == finalizer);
    match (object.is_deleting(), found) {
        (true, true) => Action::Remove,
        (false, false) => Action::Add,
        _ => Action::Nothing,
    }
}

fn with_finalizer<T: Object>(object: &T, finalizer: &str) -> T {
    let mut object = object.clone();
    object.metadata_mut().finalizers.get_or_insert_default().push(finalizer.into());
    object
}

fn without_finalizer<T: Object>(object: &T, finalizer: &str) -> T {
    let mut object = object.clone();
    if let Some(finalizers) = &mut object.metadata_mut().finalizers {
        finalizers.retain(|found| found != finalizer);
    }
    object
}

/// A claim is in use while a scheduled pod references it.
pub async fn protect_claims(ctx: Ctx) {
    let ctx = Ctx { client: ctx.client.impersonate("pvc-protection-controller"), ..ctx };
    let controller = Controller::new("pvcprotection", &ctx);
    controller.on(ctx.caches.persistent_volume_claims(), keys::own::<PersistentVolumeClaim>);
    controller.on(ctx.caches.pods(), |changed: &ObjectUpdate<'_, Pod>, enqueue| {
        let is_terminated = changed.after.is_none_or(|pod| pod::is_terminal(pod));
        if is_terminated {
            let pod = changed.latest();
            claims_of(pod).for_each(|name| enqueue(Key::new(pod.namespace(), &name)));
        }
    });
    let work = ctx.clone();
    let reconcile = move |key: Key| {
        let ctx = work.clone();
        async move { sync_claim(&ctx, &key).await }
    };
    controller.run(&ctx, WORKERS, reconcile).await
}

fn uses(pod: &Pod, claim: &PersistentVolumeClaim) -> bool {
    let own = claim.controller().is_some_and(|owner| owner.uid == pod.uid());
    let volumes = pod.spec.iter().flat_map(|spec| spec.volumes.iter().flatten());
    !pod::node(pod).is_empty()
        && volumes.into_iter().any(|volume| match (&volume.persistent_volume_claim, &volume.ephemeral) {
            (Some(used), _) => used.claim_name == claim.name(),
            (None, Some(_)) => {
                own && !pod::is_terminal(pod) && format!("{}-{}", pod.name(), volume.name) == claim.name()
            }
            _ => false,
        })
}

async fn sync_claim(ctx: &Ctx, key: &Key) -> Result<ReconcileAction, Error> {
    let Some(claim) = ctx.caches.persistent_volume_claims().get(key) else {
        return Ok(ReconcileAction::Forget);
    };
    match plan(&*claim, PVC_FINALIZER) {
        Action::Nothing => {}
        Action::Add => drop(ctx.replace(&with_finalizer(&*claim, PVC_FINALIZER)).await?),
        Action::Remove => {
            let known = ctx.caches.pods().indexed("claim", &key.to_string());
            // The live list comes last: a pod may have been scheduled a moment ago and be missing in the
            // cache.
            let used = known.iter().any(|pod| uses(pod, &claim))
                || ctx.client.list::<Pod>(claim.namespace()).await?.iter().any(|pod| uses(pod, &claim));
            if !used {
                ignore_not_found(ctx.replace(&without_finalizer(&*claim, PVC_FINALIZER)).await)?;
            }
        }
    }
    Ok(ReconcileAction::AwaitChange)
}

fn ignore_not_found<T>(result: Result<T, Error>) -> Result<(), Error> {
    match result {
        Err(error) if !error.is_not_found() => Err(error),
        _ => Ok(()),
    }
}

/// A volume is in use while it is bound.
pub async fn protect_volumes(ctx: Ctx) {
    let ctx = Ctx { client: ctx.client.impersonate("pv-protection-controller"), ..ctx };
    let controller = Controller::new("pvprotection", &ctx);
    controller.on(ctx.caches.persistent_volumes(), keys::own::<PersistentVolume>);
    let work = ctx.clone();
    let reconcile = move |key: Key| {
        let ctx = work.clone();
        async move { sync_volume(&ctx, &key).await }
    };
    controller.run(&ctx, WORKERS, reconcile).await
}

async fn sync_volume(ctx: &Ctx, key: &Key) -> Result<ReconcileAction, Error> {
    let found: Option<Arc<PersistentVolume>> = ctx.caches.persistent_volumes().get(key);
    let Some(volume) = found else { return Ok(ReconcileAction::AwaitChange) };
    let used_by_volume = volume.status.as_ref().and_then(|status| status.phase.as_deref()) == Some("Bound");
    match plan(&*volume, PV_FINALIZER) {
        Action::Add => drop(ctx.replace(&with_finalizer(&*volume, PV_FINALIZER)).await?),
        Action::Remove if !used_by_volume => {
            ignore_not_found(ctx.replace(&without_finalizer(&*volume, PV_FINALIZER)).await)?
        }
        _ => {}
    }
    Ok(ReconcileAction::AwaitChange)
}

/// An attributes class is in use while a claim or volume references it.
pub async fn protect_attributes_classes(ctx: Ctx) {
    let ctx = Ctx { client: ctx.client.impersonate("volumeattributesclass-protection-controller"), ..ctx };
    let controller = Controller::new("vacprotection", &ctx);
    controller.on(ctx.caches.volume_attributes_classes(), keys::own::<VolumeAttributesClass>);
    controller.on(
        ctx.caches.persistent_volume_claims(),
        |changed: &ObjectUpdate<'_, PersistentVolumeClaim>, enqueue| {
            let before = changed.before.into_iter().flat_map(|claim| classes_of_claim(claim));
            before.for_each(|name| enqueue(Key::new("", name)));
        },
    );
    controller.on(
        ctx.caches.persistent_volumes(),
        |changed: &ObjectUpdate<'_, PersistentVolume>, enqueue| {
            let before = changed.before.and_then(|volume| class_of_volume(volume));
            before.into_iter().for_each(|name| enqueue(Key::new("", name)));
        },
    );
    let work = ctx.clone();
    let reconcile = move |key: Key| {
        let ctx = work.clone();
        async move { sync_attributes_class(&ctx, &key).await }
    };
    controller.run(&ctx, WORKERS, reconcile).await
}

fn classes_of_claim(claim: &PersistentVolumeClaim) -> impl Iterator<Item = &str> {
    let desired = claim.spec.as_ref().and_then(|spec| spec.volume_attributes_class_name.as_deref());
    let status = claim.status.as_ref();
    let current = status.and_then(|status| status.current_volume_attributes_class_name.as_deref());
    let modify_status = status.and_then(|status| status.modify_volume_status.as_ref());
    let target = modify_status.and_then(|status| status.target_volume_attributes_class_name.as_deref());
    [desired, current, target].into_iter().flatten()
}

fn class_of_volume(volume: &PersistentVolume) -> Option<&str> {
    volume.spec.as_ref()?.volume_attributes_class_name.as_deref()
}

async fn sync_attributes_class(ctx: &Ctx, key: &Key) -> Result<ReconcileAction, Error> {
    let Some(class) = ctx.caches.volume_attributes_classes().get(key) else {
        return Ok(ReconcileAction::Forget);
    };
    match plan(&*class, VAC_FINALIZER) {
        Action::Nothing => {}
        Action::Add => drop(ctx.replace(&with_finalizer(&*class, VAC_FINALIZER)).await?),
        Action::Remove => {
            let name = class.name();
            let used_by_claim =
                |claim: &PersistentVolumeClaim| classes_of_claim(claim).any(|used| used == name);
            let used_by_volume = |volume: &PersistentVolume| class_of_volume(volume) == Some(name);
            // A live list, too, for the same reason as with claims.
            let used = ctx.caches.persistent_volume_claims().all().iter().any(|claim| used_by_claim(claim))
                || ctx.caches.persistent_volumes().all().iter().any(|volume| used_by_volume(volume))
                || ctx.client.list::<PersistentVolumeClaim>("").await?.iter().any(used_by_claim)
                || ctx.client.list::<PersistentVolume>("").await?.iter().any(used_by_volume);
            if !used {
                ignore_not_found(ctx.replace(&without_finalizer(&*class, VAC_FINALIZER)).await)?;
            }
        }
    }
    Ok(ReconcileAction::AwaitChange)
}

#[cfg(test)]
mod tests {
    use reconcile::DeleteOptions;
    use serde_json::{Value, json};

    use super::*;
    use crate::test_cluster::{TestCluster, wait_for};

    async fn create(test_cluster: &TestCluster, path: &str, value: Value) {
        test_cluster.client.request(http::Method::POST, path, Some(&value)).await.expect("an object");
    }

    #[tokio::test]
    async fn claims_and_volumes_in_use_are_protected() {
        let test_cluster = TestCluster::start(&[
            "persistentvolumeclaim-protection-controller",
            "persistentvolume-protection-controller",
        ])
        .await;
        let spec = json!({"accessModes": ["ReadWriteOnce"], "resources": {"requests": {"storage": "1Gi"}}});
        create(
            &test_cluster,
            "/api/v1/namespaces/default/persistentvolumeclaims",
            json!({"metadata": {"name": "c"}, "spec": spec}),
        )
        .await;
        let volumes = json!([{"name": "v", "persistentVolumeClaim": {"claimName": "c"}}]);
        let pod = json!({"nodeName": "n", "volumes": volumes, "containers": [{"name": "c", "image": "i"}]});
        create(
            &test_cluster,
            "/api/v1/namespaces/default/pods",
            json!({"metadata": {"name": "p"}, "spec": pod}),
        )
        .await;
        let key = Key::new("default", "c");
        let found = || async {
            let claim: PersistentVolumeClaim = test_cluster.client.get(&key).await.ok()?;
            claim.metadata.finalizers.is_some_and(|list| list == [PVC_FINALIZER]).then_some(())
        };
        wait_for("the finalizer", found).await;
        test_cluster
            .client
            .delete::<PersistentVolumeClaim>(&key, &DeleteOptions::default())
            .await
            .expect("a deletion");
        let claim: PersistentVolumeClaim = test_cluster.client.get(&key).await.expect("claim in use is kept");
        assert!(claim.is_deleting());
        let now = DeleteOptions { grace_seconds: Some(0), ..DeleteOptions::default() };
        test_cluster.client.delete::<Pod>(&Key::new("default", "p"), &now).await.expect("a deletion");
        let deleted =
            || async { test_cluster.client.get::<PersistentVolumeClaim>(&key).await.is_err().then_some(()) };
        wait_for("deletion of the claim", deleted).await;
        let spec = json!({"capacity": {"storage": "1Gi"}, "accessModes": ["ReadWriteOnce"], "hostPath": {"path": "/x"}});
        create(&test_cluster, "/api/v1/persistentvolumes", json!({"metadata": {"name": "v"}, "spec": spec}))
            .await;
        let key = Key::new("", "v");
        let found = || async {
            let volume: PersistentVolume = test_cluster.client.get(&key).await.ok()?;
            volume.metadata.finalizers.is_some_and(|list| list == [PV_FINALIZER]).then_some(())
        };
        wait_for("the finalizer", found).await;
        test_cluster
            .client
            .delete::<PersistentVolume>(&key, &DeleteOptions::default())
            .await
            .expect("a deletion");
        let deleted =
            || async { test_cluster.client.get::<PersistentVolume>(&key).await.is_err().then_some(()) };
        wait_for("deletion of the volume", deleted).await;
    }
}
