//! PersistentVolume binder: binds claims to volumes and releases volumes whose claims are deleted.
//!
//! A binding is complete when volume and claim refer to each other. The controller may be stopped after
//! each write, or lose a race; the next sync continues from the state it finds.
//!
//! Upstream: `pkg/controller/volume/persistentvolume`.

mod bound;
mod matching;
mod plan;
#[cfg(test)]
mod tests;

use std::sync::Arc;

use k8s_openapi::api::core::v1::{PersistentVolume, PersistentVolumeClaim, Pod};
use k8s_openapi::api::storage::v1::StorageClass;
use reconcile::{Controller, Ctx, Enqueue, Error, Key, Object, ObjectUpdate, ReconcileAction, keys};

use crate::pod;
use matching::{claim_class, claim_ref, volume_class};
use plan::{BinderState, ClaimAction, PROVISIONER, VolumeAction};

const WORKERS: usize = 4;

pub async fn run(ctx: Ctx) {
    let ctx = Ctx {
        client: ctx.client.impersonate("persistent-volume-binder"),
        events: ctx.events.from("persistentvolume-controller"),
        ..ctx
    };
    let claims = Controller::new("claims", &ctx);
    claims.on(ctx.caches.persistent_volume_claims(), keys::own::<PersistentVolumeClaim>);
    let known = ctx.caches.persistent_volume_claims().clone();
    claims.on(
        ctx.caches.persistent_volumes(),
        move |changed: &ObjectUpdate<'_, PersistentVolume>, enqueue| {
            let volume = changed.latest();
            if let Some(reference) = claim_ref(volume) {
                let part = |part: &Option<String>| part.clone().unwrap_or_default();
                enqueue(Key::new(&part(&reference.namespace), &part(&reference.name)));
            }
            let named = |claim: &PersistentVolumeClaim| {
                let name =
                    claim.spec.as_ref().and_then(|spec| spec.volume_name.as_deref()).unwrap_or_default();
                name == volume.name() || name.is_empty() && claim_class(claim) == volume_class(volume)
            };
            known.all().iter().filter(|claim| named(claim)).for_each(|claim| enqueue(claim.key()));
        },
    );
    let known = ctx.caches.persistent_volume_claims().clone();
    claims.on(ctx.caches.storage_classes(), move |_: &ObjectUpdate<'_, StorageClass>, enqueue| {
        let waiting = |claim: &&Arc<PersistentVolumeClaim>| {
            claim.spec.as_ref().is_none_or(|spec| spec.volume_name.is_none())
        };
        known.all().iter().filter(waiting).for_each(|claim| enqueue(claim.key()));
    });
    let volumes = Controller::new("volumes", &ctx);
    volumes.on(ctx.caches.persistent_volumes(), keys::own::<PersistentVolume>);
    let known = ctx.caches.persistent_volumes().clone();
    volumes.on(
        ctx.caches.persistent_volume_claims(),
        move |changed: &ObjectUpdate<'_, PersistentVolumeClaim>, enqueue| {
            let claim = changed.latest();
            known.indexed("claim", &claim.key().to_string()).iter().for_each(|volume| enqueue(volume.key()));
        },
    );
    let binder = Arc::new(Binder { ctx: ctx.clone(), claims: claims.enqueue() });
    let other = binder.clone();
    let sync_claim = move |key: Key| {
        let binder = binder.clone();
        async move { binder.sync_claim(&key).await }
    };
    let sync_volume = move |key: Key| {
        let binder = other.clone();
        async move { binder.sync_volume(&key).await }
    };
    tokio::join!(claims.run(&ctx, WORKERS, sync_claim), volumes.run(&ctx, WORKERS, sync_volume));
}

struct Binder {
    ctx: Ctx,
    claims: Enqueue,
}

impl Binder {
    async fn sync_claim(&self, key: &Key) -> Result<ReconcileAction, Error> {
        let caches = &self.ctx.caches;
        let Some(claim) = caches.persistent_volume_claims().get(key) else {
            return Ok(ReconcileAction::Forget);
        };
        let pods = caches.pods().indexed("claim", &key.to_string());
        let is_unscheduled = |pod: &&Arc<Pod>| pod::node(pod).is_empty();
        let waiting_pods: Vec<String> =
            pods.iter().filter(is_unscheduled).map(|pod| pod.name().to_owned()).collect();
        let state = BinderState {
            volumes: &caches.persistent_volumes().all(),
            classes: &caches.storage_classes().all(),
            waiting_pods: &waiting_pods,
        };
        for action in plan::plan_claim(&claim, &state) {
            match action {
                ClaimAction::Bind(volume) => self.bind(&claim, &volume).await?,
                ClaimAction::Pending => self.update_claim_phase(&claim, "Pending").await?,
                ClaimAction::Lost { reason, message } => {
                    let phase = claim.status.as_ref().and_then(|status| status.phase.as_deref());
                    if phase != Some("Lost") {
                        self.update_claim_phase(&claim, "Lost").await?;
                        self.ctx.events.warning(&*claim, reason, message);
                    }
                }
                ClaimAction::AssignClass(class) => {
                    let mut claim = (*claim).clone();
                    claim.spec.get_or_insert_default().storage_class_name = Some(class);
                    self.ctx.replace(&claim).await?;
                }
                ClaimAction::SetProvisioner(name) => self.set_provisioner(&claim, &name).await?,
                ClaimAction::Event { severity, reason, message } => {
                    self.ctx.events.record(reconcile::reference(&*claim), severity, reason, message);
                }
            }
        }
        Ok(ReconcileAction::AwaitChange)
    }

    async fn bind(&self, claim: &PersistentVolumeClaim, volume: &PersistentVolume) -> Result<(), Error> {
        let volume = match bound::bind_volume(volume, claim) {
            Some(bound) => self.ctx.replace(&bound).await?,
            None => volume.clone(),
        };
        let volume = self.update_volume_phase(&volume, "Bound", "").await?;
        let claim = match bound::bind_claim(claim, &volume) {
            Some(bound) => self.ctx.replace(&bound).await?,
            None => claim.clone(),
        };
        if let Some(bound) = bound::claim_status(&claim, "Bound", Some(&volume)) {
            self.ctx.replace_status(&bound).await?;
        }
        Ok(())
    }

    async fn update_claim_phase(&self, claim: &PersistentVolumeClaim, phase: &str) -> Result<(), Error> {
        match bound::claim_status(claim, phase, None) {
            Some(claim) => self.ctx.replace_status(&claim).await.map(drop),
            None => Ok(()),
        }
    }

    /// Sets the provisioner annotations of a claim, which trigger the external provisioner.
    async fn set_provisioner(&self, claim: &PersistentVolumeClaim, name: &str) -> Result<(), Error> {
        if PROVISIONER.iter().all(|annotation| claim.annotation(annotation) == Some(name)) {
            return Ok(());
        }
        let mut claim = claim.clone();
        let annotations = claim.metadata.annotations.get_or_insert_default();
        for annotation in PROVISIONER {
            annotations.insert(annotation.into(), name.into());
        }
        self.ctx.replace(&claim).await.map(drop)
    }

    async fn sync_volume(&self, key: &Key) -> Result<ReconcileAction, Error> {
        let Some(volume) = self.ctx.caches.persistent_volumes().get(key) else {
            return Ok(ReconcileAction::Forget);
        };
        let claim = self.claim_of(&volume).await?;
        match plan::plan_volume(&volume, claim.as_ref()) {
            VolumeAction::Nothing => {}
            VolumeAction::SetPhase(phase) => drop(self.update_volume_phase(&volume, phase, "").await?),
            VolumeAction::Release => drop(self.update_volume_phase(&volume, "Released", "").await?),
            VolumeAction::Fail { reason, message } => {
                self.update_volume_phase(&volume, "Failed", &message).await?;
                self.ctx.events.warning(&*volume, reason, message);
            }
            VolumeAction::Unbind => {
                let free = self.ctx.replace(&bound::release_volume(&volume)).await?;
                self.update_volume_phase(&free, "Available", "").await?;
            }
            VolumeAction::EnqueueClaim => {
                if let Some(claim) = claim {
                    self.claims.now(claim.key());
                }
            }
            VolumeAction::Mismatch => {
                if let Some(claim) = claim {
                    let (volume_name, name) = (volume.name(), claim.name());
                    let message = format!(
                        "Cannot bind PersistentVolume to requested PersistentVolumeClaim {name:?} due to incompatible volumeMode."
                    );
                    self.ctx.events.warning(&*volume, "VolumeMismatch", message);
                    let message = format!(
                        "Cannot bind PersistentVolume {volume_name:?} to requested PersistentVolumeClaim due to incompatible volumeMode."
                    );
                    self.ctx.events.warning(&claim, "VolumeMismatch", message);
                }
            }
        }
        Ok(ReconcileAction::AwaitChange)
    }

    /// The claim that a volume refers to. A live read confirms that a claim is deleted, because the volume
    /// is released then.
    async fn claim_of(&self, volume: &PersistentVolume) -> Result<Option<PersistentVolumeClaim>, Error> {
        let Some(reference) = claim_ref(volume) else { return Ok(None) };
        let part = |part: &Option<String>| part.clone().unwrap_or_default();
        let (key, uid) =
            (Key::new(&part(&reference.namespace), &part(&reference.name)), part(&reference.uid));
        if let Some(claim) = self.ctx.caches.persistent_volume_claims().get_exactly(&key, &uid) {
            return Ok(Some((*claim).clone()));
        }
        match self.ctx.client.get::<PersistentVolumeClaim>(&key).await {
            Ok(claim) => Ok(Some(claim).filter(|claim| claim.uid() == uid)),
            Err(error) if error.is_not_found() => Ok(None),
            Err(error) => Err(error),
        }
    }

    async fn update_volume_phase(
        &self,
        volume: &PersistentVolume,
        phase: &str,
        message: &str,
    ) -> Result<PersistentVolume, Error> {
        if matching::phase(volume) == phase {
            return Ok(volume.clone());
        }
        let mut volume = volume.clone();
        let status = volume.status.get_or_insert_default();
        status.phase = Some(phase.into());
        status.message = (!message.is_empty()).then(|| message.to_owned());
        self.ctx.replace_status(&volume).await
    }
}
