//! Writes down what was chosen for a pod, before it is bound.

use async_trait::async_trait;
use jiff::Timestamp;
use k8s_openapi::api::core::v1::ContainerExtendedResourceRequest;
use k8s_openapi::api::resource::v1 as resource;
use k8s_openapi::apimachinery::pkg::apis::meta::v1::Time;
use serde_json::json;

use super::{Claim, DynamicResources, claim_key, conditions, extended};
use crate::bind::{Api, ApiError, BindContext, PreBind};
use crate::state::PodInfo;

/// Keeps an allocated claim from being deleted while it is in use.
const FINALIZER: &str = "resource.kubernetes.io/delete-protection";

#[async_trait]
impl PreBind for DynamicResources {
    fn has_work(&self, pod: &PodInfo) -> bool {
        !(pod.claims.is_empty() && pod.asking.is_empty()) && self.chosen.lock().contains_key(&pod.uid)
    }

    async fn pre_bind(&self, context: &BindContext, pod: &PodInfo, _: &str) -> Result<(), String> {
        let chosen = self.chosen.lock().get(&pod.uid).cloned().unwrap_or_default();
        for (was, promised) in &chosen.claims {
            if extended::is_unnamed(was) {
                create(context, pod, promised, &chosen.mappings).await?;
            } else {
                write(context, (**promised).clone()).await?;
            }
        }
        for (was, promised) in chosen.claims.iter().filter(|(was, _)| !extended::is_unnamed(was)) {
            conditions::met(context, &claim_key(was), promised).await?;
        }
        self.chosen.lock().remove(&pod.uid);
        Ok(())
    }
}

/// Writes down what a claim was given and for whom.
async fn write(context: &BindContext, mut claim: resource::ResourceClaim) -> Result<(), String> {
    let finalizers = claim.metadata.finalizers.get_or_insert_default();
    if !finalizers.iter().any(|known| known == FINALIZER) {
        finalizers.push(FINALIZER.to_owned());
        let marked = context.api.update_resource_claim(&claim).await;
        let marked =
            marked.map_err(|error| format!("add finalizer to claim {}: {error}", claim_key(&claim)))?;
        claim.metadata = marked.metadata;
    }
    if let Some(allocation) = claim.status.as_mut().and_then(|status| status.allocation.as_mut()) {
        allocation.allocation_timestamp.get_or_insert_with(|| Time(Timestamp::now()));
    }
    let written = context.api.update_resource_claim_status(&claim).await;
    written
        .map(drop)
        .map_err(|error| format!("add allocation and reservation to claim {}: {error}", claim_key(&claim)))
}

/// Makes the claim for a pod's extended resources and tells the pod of it. What comes of half of that is removed.
async fn create(
    context: &BindContext,
    pod: &PodInfo,
    promised: &Claim,
    mappings: &[ContainerExtendedResourceRequest],
) -> Result<(), String> {
    let mut claim = (**promised).clone();
    let status = claim.status.take();
    claim.metadata.name = None;
    claim.metadata.finalizers = Some(vec![FINALIZER.to_owned()]);
    let made = context.api.create_resource_claim(&claim).await;
    context.metrics.claim_made(made.is_ok());
    let made =
        made.map_err(|error| format!("create claim for extended resources {}: {error}", claim_key(&claim)))?;
    let (name, key) = (made.metadata.name.clone().unwrap_or_default(), claim_key(&made));
    let told = async {
        write(context, resource::ResourceClaim { status, ..made.clone() }).await?;
        let told = json!({"requestMappings": mappings, "resourceClaimName": name});
        let patch = json!({"status": {"extendedResourceClaimStatus": told}});
        let told = context.api.patch_pod_status(&pod.namespace, &pod.name, &patch).await;
        told.map_err(|error| format!("update pod {} ExtendedResourceClaimStatus: {error}", pod.key()))?;
        conditions::met(context, &key, promised).await
    };
    let told = told.await;
    if told.is_err()
        && let Err(error) = delete(&*context.api, &made).await
    {
        tracing::warn!(%error, claim = key, "cannot delete a claim for extended resources");
    }
    told
}

/// Deletes a claim, though it was allocated.
pub(crate) async fn delete(api: &dyn Api, claim: &resource::ResourceClaim) -> Result<(), ApiError> {
    let mut free = claim.clone();
    if let Some(finalizers) = &mut free.metadata.finalizers {
        finalizers.retain(|known| known != FINALIZER);
        api.update_resource_claim(&free).await?;
    }
    match api.delete_resource_claim(claim).await {
        Err(error) if error.is_not_found() => Ok(()),
        done => done,
    }
}
