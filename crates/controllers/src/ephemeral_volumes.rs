//! Makes the claims of volumes that live and die with their pod.

use k8s_openapi::api::core::v1::{PersistentVolumeClaim, Pod, Volume};
use k8s_openapi::apimachinery::pkg::apis::meta::v1::{ObjectMeta, OwnerReference};
use reconcile::{Changed, Controller, Ctx, Error, Key, Next, Object};

const WORKERS: usize = 5;

pub async fn run(ctx: Ctx) {
    let ctx = Ctx { events: ctx.events.from("ephemeral_volume"), ..ctx };
    let controller = Controller::new("ephemeral_volume", &ctx);
    controller.on(ctx.caches.pods(), |changed: &Changed<'_, Pod>, enqueue| {
        // Volumes of a pod never change.
        let pod = changed.newest();
        if changed.before.is_none() && templates(pod).next().is_some() {
            enqueue(pod.key());
        }
    });
    let pods = ctx.caches.pods().clone();
    controller.on(
        ctx.caches.persistent_volume_claims(),
        move |changed: &Changed<'_, PersistentVolumeClaim>, enqueue| {
            if changed.after.is_none() {
                let claim = changed.newest();
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

fn templates(pod: &Pod) -> impl Iterator<Item = &Volume> {
    let volumes = pod.spec.iter().flat_map(|spec| spec.volumes.iter().flatten());
    volumes.filter(|volume| volume.ephemeral.is_some())
}

/// The claim a volume of a pod needs, where there is none; or why the one there is cannot be used.
fn plan(
    pod: &Pod,
    volume: &Volume,
    found: Option<&PersistentVolumeClaim>,
) -> Result<Option<PersistentVolumeClaim>, String> {
    if let Some(found) = found {
        let own = found.controller().is_some_and(|owner| owner.uid == pod.uid());
        let why = || format!("PVC {} was not created for pod {} (pod is not owner)", found.key(), pod.key());
        return if own { Ok(None) } else { Err(why()) };
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

async fn reconcile(ctx: &Ctx, key: &Key) -> Result<Next, Error> {
    let Some(pod) = ctx.caches.pods().get(key) else { return Ok(Next::Forget) };
    if pod.is_deleting() {
        return Ok(Next::Change);
    }
    for volume in templates(&pod) {
        let name = Key::new(pod.namespace(), &format!("{}-{}", pod.name(), volume.name));
        let found = ctx.caches.persistent_volume_claims().get(&name);
        let tell = |why: &str| {
            let message = format!("ephemeral volume {}: {why}", volume.name);
            ctx.events.warning(&*pod, "FailedBinding", message);
        };
        match plan(&pod, volume, found.as_deref()) {
            Ok(None) => {}
            Ok(Some(claim)) => {
                if let Err(error) = ctx.create(&claim).await {
                    tell(&format!("create PVC {}: {error}", name.name));
                    return Err(error);
                }
            }
            Err(why) => {
                tell(&why);
                return Ok(Next::After(std::time::Duration::from_secs(30)));
            }
        }
    }
    Ok(Next::Change)
}

#[cfg(test)]
mod tests {
    use serde_json::json;

    use super::*;
    use crate::rig::{Rig, until};

    #[tokio::test]
    async fn pods_get_their_claims() {
        let rig = Rig::start(&["ephemeral-volume-controller"]).await;
        let spec = json!({"accessModes": ["ReadWriteOnce"], "resources": {"requests": {"storage": "1Gi"}}});
        let template = json!({"metadata": {"labels": {"a": "b"}}, "spec": spec});
        let volumes = json!([{"name": "v", "ephemeral": {"volumeClaimTemplate": template}}]);
        let pod = json!({"metadata": {"name": "p"}, "spec": {"volumes": volumes, "containers": [{"name": "c", "image": "i"}]}});
        rig.client
            .request(http::Method::POST, "/api/v1/namespaces/default/pods", Some(&pod))
            .await
            .expect("a pod");
        let key = Key::new("default", "p-v");
        let claim: PersistentVolumeClaim =
            until("a claim", || async { rig.client.get(&key).await.ok() }).await;
        assert_eq!(
            (claim.label("a"), claim.controller().map(|owner| owner.name.as_str())),
            (Some("b"), Some("p"))
        );
        let pod: Pod = rig.client.get(&Key::new("default", "p")).await.expect("the pod");
        let volume = templates(&pod).next().expect("a volume");
        assert_eq!(plan(&pod, volume, Some(&claim)), Ok(None));
        let stranger = PersistentVolumeClaim {
            metadata: ObjectMeta { owner_references: None, ..claim.metadata.clone() },
            ..claim
        };
        let why = "PVC default/p-v was not created for pod default/p (pod is not owner)";
        assert_eq!(plan(&pod, volume, Some(&stranger)), Err(why.into()));
    }
}
