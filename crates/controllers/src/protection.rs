//! Keeps PersistentVolumes, their claims and their attribute classes that are in use from going, by a finalizer.

use std::sync::Arc;

use k8s_openapi::api::core::v1::{PersistentVolume, PersistentVolumeClaim, Pod};
use k8s_openapi::api::storage::v1::VolumeAttributesClass;
use reconcile::{Changed, Controller, Ctx, Error, Key, Next, Object, claims_of, keys};

use crate::pod;

const CLAIM: &str = "kubernetes.io/pvc-protection";
const VOLUME: &str = "kubernetes.io/pv-protection";
const ATTRIBUTES_CLASS: &str = "kubernetes.io/vac-protection";
const WORKERS: usize = 5;

/// What happens to an object's finalizer.
#[derive(Debug, PartialEq)]
enum Action {
    Nothing,
    Add,
    /// Once nothing uses the object.
    Remove,
}

fn plan<T: Object>(object: &T, finalizer: &str) -> Action {
    let held = object.metadata().finalizers.iter().flatten().any(|held| held == finalizer);
    match (object.is_deleting(), held) {
        (true, true) => Action::Remove,
        (false, false) => Action::Add,
        _ => Action::Nothing,
    }
}

fn with<T: Object>(object: &T, finalizer: &str) -> T {
    let mut object = object.clone();
    object.metadata_mut().finalizers.get_or_insert_default().push(finalizer.into());
    object
}

fn without<T: Object>(object: &T, finalizer: &str) -> T {
    let mut object = object.clone();
    if let Some(finalizers) = &mut object.metadata_mut().finalizers {
        finalizers.retain(|held| held != finalizer);
    }
    object
}

/// Claims are in use while a pod on some node mentions them.
pub async fn claims(ctx: Ctx) {
    let ctx = Ctx { client: ctx.client.acting_as("pvc-protection-controller"), ..ctx };
    let controller = Controller::new("pvcprotection", &ctx);
    controller.on(ctx.caches.persistent_volume_claims(), keys::own::<PersistentVolumeClaim>);
    controller.on(ctx.caches.pods(), |changed: &Changed<'_, Pod>, enqueue| {
        let over = changed.after.is_none_or(|pod| pod::is_terminal(pod));
        if over {
            let pod = changed.newest();
            claims_of(pod).for_each(|name| enqueue(Key::new(pod.namespace(), &name)));
        }
    });
    let work = ctx.clone();
    let reconcile = move |key: Key| {
        let ctx = work.clone();
        async move { claim(&ctx, &key).await }
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

async fn claim(ctx: &Ctx, key: &Key) -> Result<Next, Error> {
    let Some(claim) = ctx.caches.persistent_volume_claims().get(key) else { return Ok(Next::Forget) };
    match plan(&*claim, CLAIM) {
        Action::Nothing => {}
        Action::Add => drop(ctx.replace(&with(&*claim, CLAIM)).await?),
        Action::Remove => {
            let known = ctx.caches.pods().indexed("claim", &key.to_string());
            // Asked anew, since a pod may have come to a node this moment.
            let used = known.iter().any(|pod| uses(pod, &claim))
                || ctx.client.list::<Pod>(claim.namespace()).await?.iter().any(|pod| uses(pod, &claim));
            if !used {
                gone_is_fine(ctx.replace(&without(&*claim, CLAIM)).await)?;
            }
        }
    }
    Ok(Next::Change)
}

fn gone_is_fine<T>(result: Result<T, Error>) -> Result<(), Error> {
    match result {
        Err(error) if !error.is_not_found() => Err(error),
        _ => Ok(()),
    }
}

/// Volumes are in use while they are bound.
pub async fn volumes(ctx: Ctx) {
    let ctx = Ctx { client: ctx.client.acting_as("pv-protection-controller"), ..ctx };
    let controller = Controller::new("pvprotection", &ctx);
    controller.on(ctx.caches.persistent_volumes(), keys::own::<PersistentVolume>);
    let work = ctx.clone();
    let reconcile = move |key: Key| {
        let ctx = work.clone();
        async move { volume(&ctx, &key).await }
    };
    controller.run(&ctx, WORKERS, reconcile).await
}

async fn volume(ctx: &Ctx, key: &Key) -> Result<Next, Error> {
    let found: Option<Arc<PersistentVolume>> = ctx.caches.persistent_volumes().get(key);
    let Some(volume) = found else { return Ok(Next::Change) };
    let bound = volume.status.as_ref().and_then(|status| status.phase.as_deref()) == Some("Bound");
    match plan(&*volume, VOLUME) {
        Action::Add => drop(ctx.replace(&with(&*volume, VOLUME)).await?),
        Action::Remove if !bound => gone_is_fine(ctx.replace(&without(&*volume, VOLUME)).await)?,
        _ => {}
    }
    Ok(Next::Change)
}

/// Attribute classes are in use while a claim or a volume names them.
pub async fn attributes_classes(ctx: Ctx) {
    let ctx = Ctx { client: ctx.client.acting_as("volumeattributesclass-protection-controller"), ..ctx };
    let controller = Controller::new("vacprotection", &ctx);
    controller.on(ctx.caches.volume_attributes_classes(), keys::own::<VolumeAttributesClass>);
    controller.on(
        ctx.caches.persistent_volume_claims(),
        |changed: &Changed<'_, PersistentVolumeClaim>, enqueue| {
            let before = changed.before.into_iter().flat_map(|claim| classes_of_claim(claim));
            before.for_each(|name| enqueue(Key::new("", name)));
        },
    );
    controller.on(ctx.caches.persistent_volumes(), |changed: &Changed<'_, PersistentVolume>, enqueue| {
        let before = changed.before.and_then(|volume| class_of_volume(volume));
        before.into_iter().for_each(|name| enqueue(Key::new("", name)));
    });
    let work = ctx.clone();
    let reconcile = move |key: Key| {
        let ctx = work.clone();
        async move { attributes_class(&ctx, &key).await }
    };
    controller.run(&ctx, WORKERS, reconcile).await
}

fn classes_of_claim(claim: &PersistentVolumeClaim) -> impl Iterator<Item = &str> {
    let wanted = claim.spec.as_ref().and_then(|spec| spec.volume_attributes_class_name.as_deref());
    let status = claim.status.as_ref();
    let current = status.and_then(|status| status.current_volume_attributes_class_name.as_deref());
    let modifying = status.and_then(|status| status.modify_volume_status.as_ref());
    let target = modifying.and_then(|status| status.target_volume_attributes_class_name.as_deref());
    [wanted, current, target].into_iter().flatten()
}

fn class_of_volume(volume: &PersistentVolume) -> Option<&str> {
    volume.spec.as_ref()?.volume_attributes_class_name.as_deref()
}

async fn attributes_class(ctx: &Ctx, key: &Key) -> Result<Next, Error> {
    let Some(class) = ctx.caches.volume_attributes_classes().get(key) else { return Ok(Next::Forget) };
    match plan(&*class, ATTRIBUTES_CLASS) {
        Action::Nothing => {}
        Action::Add => drop(ctx.replace(&with(&*class, ATTRIBUTES_CLASS)).await?),
        Action::Remove => {
            let name = class.name();
            let claimed = |claim: &PersistentVolumeClaim| classes_of_claim(claim).any(|used| used == name);
            let bound = |volume: &PersistentVolume| class_of_volume(volume) == Some(name);
            // Asked anew, as with claims.
            let used = ctx.caches.persistent_volume_claims().all().iter().any(|claim| claimed(claim))
                || ctx.caches.persistent_volumes().all().iter().any(|volume| bound(volume))
                || ctx.client.list::<PersistentVolumeClaim>("").await?.iter().any(claimed)
                || ctx.client.list::<PersistentVolume>("").await?.iter().any(bound);
            if !used {
                gone_is_fine(ctx.replace(&without(&*class, ATTRIBUTES_CLASS)).await)?;
            }
        }
    }
    Ok(Next::Change)
}

#[cfg(test)]
mod tests {
    use reconcile::Delete;
    use serde_json::{Value, json};

    use super::*;
    use crate::rig::{Rig, until};

    async fn make(rig: &Rig, path: &str, value: Value) {
        rig.client.request(http::Method::POST, path, Some(&value)).await.expect("an object");
    }

    #[tokio::test]
    async fn claims_wait_for_their_pods_and_volumes_for_their_claims() {
        let rig = Rig::start(&[
            "persistentvolumeclaim-protection-controller",
            "persistentvolume-protection-controller",
        ])
        .await;
        let spec = json!({"accessModes": ["ReadWriteOnce"], "resources": {"requests": {"storage": "1Gi"}}});
        make(
            &rig,
            "/api/v1/namespaces/default/persistentvolumeclaims",
            json!({"metadata": {"name": "c"}, "spec": spec}),
        )
        .await;
        let volumes = json!([{"name": "v", "persistentVolumeClaim": {"claimName": "c"}}]);
        let pod = json!({"nodeName": "n", "volumes": volumes, "containers": [{"name": "c", "image": "i"}]});
        make(&rig, "/api/v1/namespaces/default/pods", json!({"metadata": {"name": "p"}, "spec": pod})).await;
        let key = Key::new("default", "c");
        let held = || async {
            let claim: PersistentVolumeClaim = rig.client.get(&key).await.ok()?;
            claim.metadata.finalizers.is_some_and(|list| list == [CLAIM]).then_some(())
        };
        until("the finalizer", held).await;
        rig.client.delete::<PersistentVolumeClaim>(&key, &Delete::default()).await.expect("a deletion");
        let claim: PersistentVolumeClaim = rig.client.get(&key).await.expect("it is still used");
        assert!(claim.is_deleting());
        let now = Delete { grace_seconds: Some(0), ..Delete::default() };
        rig.client.delete::<Pod>(&Key::new("default", "p"), &now).await.expect("a deletion");
        let gone = || async { rig.client.get::<PersistentVolumeClaim>(&key).await.is_err().then_some(()) };
        until("the end of the claim", gone).await;
        let spec = json!({"capacity": {"storage": "1Gi"}, "accessModes": ["ReadWriteOnce"], "hostPath": {"path": "/x"}});
        make(&rig, "/api/v1/persistentvolumes", json!({"metadata": {"name": "v"}, "spec": spec})).await;
        let key = Key::new("", "v");
        let held = || async {
            let volume: PersistentVolume = rig.client.get(&key).await.ok()?;
            volume.metadata.finalizers.is_some_and(|list| list == [VOLUME]).then_some(())
        };
        until("the finalizer", held).await;
        rig.client.delete::<PersistentVolume>(&key, &Delete::default()).await.expect("a deletion");
        let gone = || async { rig.client.get::<PersistentVolume>(&key).await.is_err().then_some(()) };
        until("the end of the volume", gone).await;
    }
}
