//! PreBind: writes assumed allocations to the claims.

use async_trait::async_trait;
use jiff::Timestamp;
use k8s_openapi::api::core::v1::ContainerExtendedResourceRequest;
use k8s_openapi::api::resource::v1 as resource;
use k8s_openapi::apimachinery::pkg::apis::meta::v1::Time;
use serde_json::json;

use super::{Claim, DynamicResources, claim_key, conditions, extended_resources};
use crate::bind::{Api, ApiError, BindContext, PreBind};
use crate::state::PodInfo;

/// Finalizer that protects an allocated claim from deletion.
const FINALIZER: &str = "resource.kubernetes.io/delete-protection";

#[async_trait]
impl PreBind for DynamicResources {
    fn has_work(&self, pod: &PodInfo) -> bool {
        !(pod.claims.is_empty() && pod.container_requests.is_empty())
            && self.reserved.lock().contains_key(&pod.uid)
    }

    async fn pre_bind(&self, context: &BindContext, pod: &PodInfo, _: &str) -> Result<(), String> {
        let chosen = self.reserved.lock().get(&pod.uid).cloned().unwrap_or_default();
        for (original, assumed) in &chosen.claims {
            if extended_resources::is_special_claim(original) {
                create_extended_resource_claim(context, pod, assumed, &chosen.request_mappings).await?;
            } else {
                write(context, (**assumed).clone()).await?;
            }
        }
        for (original, assumed) in
            chosen.claims.iter().filter(|(original, _)| !extended_resources::is_special_claim(original))
        {
            conditions::wait_for_binding_conditions(context, &claim_key(original), assumed).await?;
        }
        self.reserved.lock().remove(&pod.uid);
        Ok(())
    }
}

/// Writes the allocation and the reservation of a claim.
async fn write(context: &BindContext, mut claim: resource::ResourceClaim) -> Result<(), String> {
    let finalizers = claim.metadata.finalizers.get_or_insert_default();
    if !finalizers.iter().any(|known| known == FINALIZER) {
        finalizers.push(FINALIZER.to_owned());
        let updated = context.api.update_resource_claim(&claim).await;
        let updated =
            updated.map_err(|error| format!("add finalizer to claim {}: {error}", claim_key(&claim)))?;
        claim.metadata = updated.metadata;
    }
    if let Some(allocation) = claim.status.as_mut().and_then(|status| status.allocation.as_mut()) {
        allocation.allocation_timestamp.get_or_insert_with(|| Time(Timestamp::now()));
    }
    let written = context.api.update_resource_claim_status(&claim).await;
    written
        .map(drop)
        .map_err(|error| format!("add allocation and reservation to claim {}: {error}", claim_key(&claim)))
}

/// Creates the claim for a pod's extended resources and references it in the pod's status. On failure the
/// claim is deleted again.
async fn create_extended_resource_claim(
    context: &BindContext,
    pod: &PodInfo,
    assumed: &Claim,
    mappings: &[ContainerExtendedResourceRequest],
) -> Result<(), String> {
    let mut claim = (**assumed).clone();
    let status = claim.status.take();
    claim.metadata.name = None;
    claim.metadata.finalizers = Some(vec![FINALIZER.to_owned()]);
    let created = context.api.create_resource_claim(&claim).await;
    context.metrics.count_claim_create(created.is_ok());
    let created = created
        .map_err(|error| format!("create claim for extended resources {}: {error}", claim_key(&claim)))?;
    let (name, key) = (created.metadata.name.clone().unwrap_or_default(), claim_key(&created));
    let bound = async {
        write(context, resource::ResourceClaim { status, ..created.clone() }).await?;
        let claim_status = json!({"requestMappings": mappings, "resourceClaimName": name});
        let patch = json!({"status": {"extendedResourceClaimStatus": claim_status}});
        let patched = context.api.patch_pod_status(&pod.namespace, &pod.name, &patch).await;
        patched.map_err(|error| format!("update pod {} ExtendedResourceClaimStatus: {error}", pod.key()))?;
        conditions::wait_for_binding_conditions(context, &key, assumed).await
    };
    let bound = bound.await;
    if bound.is_err()
        && let Err(error) = delete(&*context.api, &created).await
    {
        tracing::warn!(%error, claim = key, "failed to delete ResourceClaim for extended resources");
    }
    bound
}

/// Deletes a claim even if it is allocated.
pub(crate) async fn delete(api: &dyn Api, claim: &resource::ResourceClaim) -> Result<(), ApiError> {
    let mut without_finalizer = claim.clone();
    if let Some(finalizers) = &mut without_finalizer.metadata.finalizers {
        finalizers.retain(|known| known != FINALIZER);
        api.update_resource_claim(&without_finalizer).await?;
    }
    match api.delete_resource_claim(claim).await {
        Err(error) if error.is_not_found() => Ok(()),
        done => done,
    }
}
