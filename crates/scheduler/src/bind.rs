//! The last steps of scheduling a pod, which speak to the API: beside the next pods' cycles, in parallel.

use std::pin::Pin;
use std::sync::Arc;
use std::time::Duration;

use async_trait::async_trait;
use k8s_openapi::api::core::v1 as core;
use k8s_openapi::api::resource::v1 as resource;
use serde_json::Value;

use crate::metrics::Metrics;
use crate::object_waiter::ObjectWaiter;
use crate::state::PodInfo;

/// Why a call to the API failed.
#[derive(Clone, Debug, thiserror::Error)]
#[error("{message}")]
pub struct ApiError {
    /// The HTTP status, 0 if there was none.
    pub code: u16,
    pub message: String,
}

impl ApiError {
    /// The object is not there.
    pub fn is_not_found(&self) -> bool {
        self.code == 404
    }

    /// Trying again may help.
    pub fn is_temporary(&self) -> bool {
        matches!(self.code, 0 | 409 | 429 | 500..=599)
    }
}

/// What the scheduler asks of the API.
#[async_trait]
pub trait Api: Send + Sync {
    /// Binds a pod to a node.
    async fn bind(&self, pod: &PodInfo, node: &str) -> Result<(), ApiError>;
    /// Changes a pod's status by a strategic merge patch.
    async fn patch_pod_status(&self, namespace: &str, name: &str, patch: &Value) -> Result<(), ApiError>;
    /// Deletes a pod, if it is still this one.
    async fn delete_pod(&self, pod: &PodInfo) -> Result<(), ApiError>;
    /// Writes a volume claim back.
    async fn update_claim(&self, claim: &core::PersistentVolumeClaim) -> Result<(), ApiError>;
    /// Writes a volume back.
    async fn update_volume(&self, volume: &core::PersistentVolume) -> Result<(), ApiError>;
    /// Writes a resource claim's status back.
    async fn update_resource_claim_status(
        &self,
        claim: &resource::ResourceClaim,
    ) -> Result<resource::ResourceClaim, ApiError>;
    /// Makes a resource claim.
    async fn create_resource_claim(
        &self,
        claim: &resource::ResourceClaim,
    ) -> Result<resource::ResourceClaim, ApiError>;
    /// Deletes a resource claim, if it is still this one.
    async fn delete_resource_claim(&self, claim: &resource::ResourceClaim) -> Result<(), ApiError>;
    /// Writes a resource claim back.
    async fn update_resource_claim(
        &self,
        claim: &resource::ResourceClaim,
    ) -> Result<resource::ResourceClaim, ApiError>;
}

/// What the last steps have at hand.
#[derive(Clone)]
pub struct BindContext {
    pub api: Arc<dyn Api>,
    /// Volume claims as they are now.
    pub claims: Arc<ObjectWaiter<core::PersistentVolumeClaim>>,
    /// Resource claims as they are now.
    pub resource_claims: Arc<ObjectWaiter<resource::ResourceClaim>>,
    pub metrics: Arc<Metrics>,
}

/// Something a pod waits for before it is bound, for so long.
pub struct PermitWait {
    pub plugin: &'static str,
    /// Comes back when the pod may go on, or with why it may not.
    pub allowed: Pin<Box<dyn Future<Output = Result<(), String>> + Send>>,
    pub timeout: Duration,
}

impl PermitWait {
    /// Waits for it.
    pub async fn wait(self) -> Result<(), String> {
        match tokio::time::timeout(self.timeout, self.allowed).await {
            Ok(allowed) => allowed,
            Err(_) => {
                let PermitWait { plugin, timeout, .. } = self;
                Err(format!("rejected due to timeout after waiting {timeout:?} at plugin {plugin}"))
            }
        }
    }
}

/// Does what must be done before a pod is bound.
#[async_trait]
pub trait PreBind: Send + Sync {
    /// Whether there is anything to be done for the pod. While there is, the node is nominated.
    fn has_work(&self, pod: &PodInfo) -> bool;
    /// Does it.
    async fn pre_bind(&self, context: &BindContext, pod: &PodInfo, node: &str) -> Result<(), String>;
}

/// How a bind plugin did.
pub enum BindStatus {
    Bound,
    /// Not this plugin's pod.
    Skip,
    Failed(String),
}

/// Binds pods.
#[async_trait]
pub trait Bind: Send + Sync {
    /// Binds the pod to the node.
    async fn bind(&self, context: &BindContext, pod: &PodInfo, node: &str) -> BindStatus;
}

/// Told of pods that were bound.
#[async_trait]
pub trait PostBind: Send + Sync {
    /// The pod was bound.
    async fn post_bind(&self, context: &BindContext, pod: &PodInfo, node: &str);
}
