//! Provisioner of the built-in storage class: a volume is a directory on the node of the first pod that
//! uses it.
//!
//! This controller handles the API objects only. The kubelet creates the directory when a pod mounts the
//! volume, and deletes it with the volume if the reclaim policy is `Delete`.
//!
//! Counterpart of the external `local-path-provisioner` that k3s ships.

mod plan;

use k8s_openapi::api::core::v1::{PersistentVolume, PersistentVolumeClaim};
use k8s_openapi::api::storage::v1::StorageClass;
use k8s_openapi::apimachinery::pkg::apis::meta::v1::ObjectMeta;
use reconcile::{Controller, Ctx, Error, Key, Object, ObjectUpdate, ReconcileAction, keys};

use plan::{PROVISIONER, ProvisionAction, SELECTED_NODE};

pub async fn run(ctx: Ctx) {
    if ctx.settings.local_storage.is_empty() {
        return;
    }
    let ctx = Ctx {
        client: ctx.client.impersonate("persistent-volume-binder"),
        events: ctx.events.from(PROVISIONER),
        ..ctx
    };
    let claims = Controller::new("local_storage_claims", &ctx);
    claims.on(
        ctx.caches.persistent_volume_claims(),
        |changed: &ObjectUpdate<'_, PersistentVolumeClaim>, enqueue| {
            if plan::should_provision(changed.latest()) {
                enqueue(changed.latest().key());
            }
        },
    );
    let volumes = Controller::new("local_storage_volumes", &ctx);
    volumes.on(ctx.caches.persistent_volumes(), keys::own::<PersistentVolume>);
    let _ = (ctx.caches.nodes(), ctx.caches.storage_classes());
    let work = ctx.clone();
    let provision = move |key: Key| {
        let ctx = work.clone();
        async move { provision(&ctx, &key).await }
    };
    let work = ctx.clone();
    let reclaim = move |key: Key| {
        let ctx = work.clone();
        async move { reclaim(&ctx, &key).await }
    };
    tokio::join!(claims.run(&ctx, 2, provision), volumes.run(&ctx, 2, reclaim));
}

async fn provision(ctx: &Ctx, key: &Key) -> Result<ReconcileAction, Error> {
    let caches = &ctx.caches;
    let Some(claim) = caches.persistent_volume_claims().get(key) else { return Ok(ReconcileAction::Forget) };
    let class = claim.spec.as_ref().and_then(|spec| spec.storage_class_name.as_deref()).unwrap_or_default();
    let class = caches.storage_classes().get(&Key::new("", class));
    let node = claim.annotation(SELECTED_NODE).unwrap_or_default();
    let node = caches.nodes().get(&Key::new("", node));
    let exists = caches.persistent_volumes().get(&Key::new("", &plan::volume_name(&claim))).is_some();
    if exists {
        return Ok(ReconcileAction::AwaitChange);
    }
    match plan::plan_provision(&claim, class.as_deref(), node.as_deref(), &ctx.settings.local_storage) {
        ProvisionAction::Nothing => {}
        ProvisionAction::Reject(reason) => {
            ctx.events.warning(&*claim, "ProvisioningFailed", reason);
        }
        ProvisionAction::Reschedule => {
            let mut claim = (*claim).clone();
            claim.metadata.annotations.get_or_insert_default().remove(SELECTED_NODE);
            ctx.replace(&claim).await?;
        }
        ProvisionAction::Provision(volume) => {
            let message =
                format!("External provisioner is provisioning volume for claim {:?}", key.to_string());
            ctx.events.normal(&*claim, "Provisioning", message);
            match ctx.create(&*volume).await {
                Err(error) if !error.is_already_exists() => return Err(error),
                _ => {}
            }
            let message = format!("Successfully provisioned volume {}", volume.name());
            ctx.events.normal(&*claim, "ProvisioningSucceeded", message);
        }
    }
    Ok(ReconcileAction::AwaitChange)
}

async fn reclaim(ctx: &Ctx, key: &Key) -> Result<ReconcileAction, Error> {
    let Some(volume) = ctx.caches.persistent_volumes().get(key) else { return Ok(ReconcileAction::Forget) };
    if plan::should_delete(&volume) {
        ctx.delete(&*volume).await?;
    }
    Ok(ReconcileAction::AwaitChange)
}

/// The built-in storage class, which is the default class.
pub fn default_storage_class() -> StorageClass {
    let annotations = [("storageclass.kubernetes.io/is-default-class", "true")];
    StorageClass {
        metadata: ObjectMeta {
            name: Some("local-path".into()),
            annotations: Some(annotations.map(|(name, value)| (name.into(), value.into())).into()),
            ..ObjectMeta::default()
        },
        provisioner: PROVISIONER.into(),
        reclaim_policy: Some("Delete".into()),
        volume_binding_mode: Some("WaitForFirstConsumer".into()),
        ..StorageClass::default()
    }
}

#[cfg(test)]
mod tests;
