//! The scheduler's API requests.

use async_trait::async_trait;
use k8s_openapi::api::core::v1 as core;
use k8s_openapi::api::resource::v1 as resource;
use reconcile::{Client, DeleteOptions, Error, Key, Object as _, Patch};
use serde_json::{Value, json};

use crate::bind::{Api, ApiError};
use crate::state::PodInfo;

/// Implementation of [`Api`] with a client.
pub(crate) struct ClientApi(pub Client);

impl From<Error> for ApiError {
    fn from(error: Error) -> ApiError {
        // A transport error has its cause in the source chain.
        let mut message = error.to_string();
        let mut source = std::error::Error::source(&error);
        while let Some(cause) = source {
            message += &format!(": {cause}");
            source = cause.source();
        }
        ApiError { code: error.code(), message }
    }
}

#[async_trait]
impl Api for ClientApi {
    async fn bind(&self, pod: &PodInfo, node: &str) -> Result<(), ApiError> {
        let binding = json!({
            "apiVersion": "v1",
            "kind": "Binding",
            "metadata": {"name": &*pod.name, "namespace": &*pod.namespace, "uid": &*pod.uid},
            "target": {"kind": "Node", "name": node},
        });
        let key = Key { namespace: pod.namespace.clone(), name: pod.name.clone() };
        self.0.create_at::<core::Pod>(&key, "binding", &binding).await?;
        Ok(())
    }

    async fn patch_pod_status(&self, namespace: &str, name: &str, patch: &Value) -> Result<(), ApiError> {
        let key = Key::new(namespace, name);
        let path = pod_status_path(&key);
        let _: Value = self.0.patch_at(&path, &Patch::Strategic(patch.clone())).await?;
        Ok(())
    }

    async fn delete_pod(&self, pod: &PodInfo) -> Result<(), ApiError> {
        let key = Key { namespace: pod.namespace.clone(), name: pod.name.clone() };
        self.0.delete::<core::Pod>(&key, &DeleteOptions::uid(&pod.uid)).await?;
        Ok(())
    }

    async fn update_claim(&self, claim: &core::PersistentVolumeClaim) -> Result<(), ApiError> {
        self.0.replace(claim).await?;
        Ok(())
    }

    async fn update_volume(&self, volume: &core::PersistentVolume) -> Result<(), ApiError> {
        self.0.replace(volume).await?;
        Ok(())
    }

    async fn update_resource_claim_status(
        &self,
        claim: &resource::ResourceClaim,
    ) -> Result<resource::ResourceClaim, ApiError> {
        Ok(self.0.replace_status(claim).await?)
    }

    async fn create_resource_claim(
        &self,
        claim: &resource::ResourceClaim,
    ) -> Result<resource::ResourceClaim, ApiError> {
        Ok(self.0.create(claim).await?)
    }

    async fn delete_resource_claim(&self, claim: &resource::ResourceClaim) -> Result<(), ApiError> {
        let uid = claim.metadata.uid.as_deref().unwrap_or_default();
        self.0.delete::<resource::ResourceClaim>(&claim.key(), &DeleteOptions::uid(uid)).await?;
        Ok(())
    }

    async fn update_resource_claim(
        &self,
        claim: &resource::ResourceClaim,
    ) -> Result<resource::ResourceClaim, ApiError> {
        Ok(self.0.replace(claim).await?)
    }
}

fn pod_status_path(pod: &Key) -> String {
    format!("/api/v1/namespaces/{}/pods/{}/status", pod.namespace, pod.name)
}
