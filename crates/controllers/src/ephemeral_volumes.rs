//! Ephemeral volume controller: creates the claims of generic ephemeral volumes.
//!
//! Upstream: `pkg/controller/volume/ephemeral`.

use k8s_openapi::api::core::v1::{PersistentVolumeClaim, Pod, Volume};
use k8s_openapi::apimachinery::pkg::apis::meta::v1::{ObjectMeta, OwnerReference};
use reconcile::{Controller, Ctx, Error, Key, Object, ObjectUpdate, ReconcileAction};

const WORKERS: usize = 5;

pub async fn run(ctx: Ctx) {
    let ctx = Ctx { events: ctx.events.from("ephemeral_volume"), ..ctx };
    let controller = Controller::new("ephemeral_volume", &ctx);
    controller.on(ctx.caches.pods(), |changed: &ObjectUpdate<'_, Pod>, enqueue| {
        // The volumes of a pod are immutable.
        let pod = changed.latest();
        if changed.before.is_none() && ephemeral_volumes(pod).next().is_some() {
            enqueue(pod.key());
        }
    });
    let pods = ctx.caches.pods().clone();
    controller.on(
        ctx.caches.persistent_volume_claims(),
        move |changed: &ObjectUpdate<'_, PersistentVolumeClaim>, enqueue| {
            if changed.after.is_none() {
                let claim = changed.latest();
                let owner = claim.controller().filter(|owner| owner.kind == "Pod");
                let pod = owner.and_then(|owner| pods.get(&Key::new(claim.namespace(), &owner.name)));
                pod.into_iter().for_each(|pod| enqueue(pod.key()));
            }
        },
    );
    let work = ctx.clone();
    let reconcile = move |key: Key| {
        let ctx = work.clone();
        async move { reconcile(&ctx, &key).await }
    };
    controller.run(&ctx, WORKERS, reconcile).await
}

fn ephemeral_volumes(pod: &Pod) -> impl Iterator<Item = &Volume> {
    let volumes = pod.spec.iter().flat_map(|spec| spec.volumes.iter().flatten());
    volumes.filter(|volume| volume.ephemeral.is_some())
}

/// The claim to create for a volume, if it does not exist. An existing claim with another owner is an error.
fn plan(
    pod: &Pod,
    volume: &Volume,
    found: Option<&PersistentVolumeClaim>,
) -> Result<Option<PersistentVolumeClaim>, String> {
    if let Some(found) = found {
        let own = found.controller().is_some_and(|owner| owner.uid == pod.uid());
        let reason =
            || format!("PVC {} was not created for pod {} (pod is not owner)", found.key(), pod.key());
        return if own { Ok(None) } else { Err(reason()) };
    }
    let template = volume.ephemeral.as_ref().and_then(|ephemeral| ephemeral.volume_claim_template.as_ref());
    let Some(template) = template else { return Ok(None) };
    let owner = OwnerReference {
        api_version: "v1".into(),
        kind: "Pod".into(),
        name: pod.name().into(),
        uid: pod.uid().into(),
        controller: Some(true),
        block_owner_deletion: Some(true),
    };
    let metadata = template.metadata.clone().unwrap_or_default();
    Ok(Some(PersistentVolumeClaim {
        metadata: ObjectMeta {
            name: Some(format!("{}-{}", pod.name(), volume.name)),
            namespace: Some(pod.namespace().into()),
            owner_references: Some(vec![owner]),
            annotations: metadata.annotations,
            labels: metadata.labels,
            ..ObjectMeta::default()
        },
        spec: Some(template.spec.clone()),
        status: None,
    }))
}

async fn reconcile(ctx: &Ctx, key: &Key) -> Result<ReconcileAction, Error> {
    let Some(pod) = ctx.caches.pods().get(key) else { return Ok(ReconcileAction::Forget) };
    if pod.is_deleting() {
        return Ok(ReconcileAction::AwaitChange);
    }
    for volume in ephemeral_volumes(&pod) {
        let name = Key::new(pod.namespace(), &format!("{}-{}", pod.name(), volume.name));
        let found = ctx.caches.persistent_volume_claims().get(&name);
        let warn_failed_binding = |reason: &str| {
            let message = format!("ephemeral volume {}: {reason}", volume.name);
            ctx.events.warning(&*pod, "FailedBinding", message);
        };
        match plan(&pod, volume, found.as_deref()) {
            Ok(None) => {}
            Ok(Some(claim)) => {
                if let Err(error) = ctx.create(&claim).await {
                    warn_failed_binding(&format!("create PVC {}: {error}", name.name));
                    return Err(error);
                }
            }
            Err(reason) => {
                warn_failed_binding(&reason);
                return Ok(ReconcileAction::RequeueAfter(std::time::Duration::from_secs(30)));
            }
        }
    }
    Ok(ReconcileAction::AwaitChange)
}

#[cfg(test)]
mod tests {
    use serde_json::json;

    use super::*;
    use crate::test_cluster::{TestCluster, wait_for};

    #[tokio::test]
    async fn creates_claims_for_ephemeral_volumes() {
        let test_cluster = TestCluster::start(&["ephemeral-volume-controller"]).await;
        let spec = json!({"accessModes": ["ReadWriteOnce"], "resources": {"requests": {"storage": "1Gi"}}});
        let template = json!({"metadata": {"labels": {"a": "b"}}, "spec": spec});
        let volumes = json!([{"name": "v", "ephemeral": {"volumeClaimTemplate": template}}]);
        let pod = json!({"metadata": {"name": "p"}, "spec": {"volumes": volumes, "containers": [{"name": "c", "image": "i"}]}});
        test_cluster
            .client
            .request(http::Method::POST, "/api/v1/namespaces/default/pods", Some(&pod))
            .await
            .expect("a pod");
        let key = Key::new("default", "p-v");
        let claim: PersistentVolumeClaim =
            wait_for("a claim", || async { test_cluster.client.get(&key).await.ok() }).await;
        assert_eq!(
            (claim.label("a"), claim.controller().map(|owner| owner.name.as_str())),
            (Some("b"), Some("p"))
        );
        let pod: Pod = test_cluster.client.get(&Key::new("default", "p")).await.expect("the pod");
        let volume = ephemeral_volumes(&pod).next().expect("a volume");
        assert_eq!(plan(&pod, volume, Some(&claim)), Ok(None));
        let without_owner = PersistentVolumeClaim {
            metadata: ObjectMeta { owner_references: None, ..claim.metadata.clone() },
            ..claim
        };
        let reason = "PVC default/p-v was not created for pod default/p (pod is not owner)";
        assert_eq!(plan(&pod, volume, Some(&without_owner)), Err(reason.into()));
    }
}
