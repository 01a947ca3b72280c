//! Interfaces of the binding cycle: Permit, PreBind, Bind and PostBind. It calls the API and runs
//! asynchronously, parallel to the scheduling cycles of other pods.

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

/// The error of an API request.
#[derive(Clone, Debug, thiserror::Error)]
#[error("{message}")]
pub struct ApiError {
    /// The HTTP status code; 0 if there was no response.
    pub code: u16,
    pub message: String,
}

impl ApiError {
    /// Whether the object does not exist.
    pub fn is_not_found(&self) -> bool {
        self.code == 404
    }

    /// Whether a retry may succeed.
    pub fn is_temporary(&self) -> bool {
        matches!(self.code, 0 | 409 | 429 | 500..=599)
    }
}

/// The API requests of the scheduler.
#[async_trait]
pub trait Api: Send + Sync {
    /// Binds a pod to a node.
    async fn bind(&self, pod: &PodInfo, node: &str) -> Result<(), ApiError>;
    /// Patches a pod's status with a strategic merge patch.
    async fn patch_pod_status(&self, namespace: &str, name: &str, patch: &Value) -> Result<(), ApiError>;
    /// Deletes a pod, with its UID as precondition.
    async fn delete_pod(&self, pod: &PodInfo) -> Result<(), ApiError>;
    /// Updates a PersistentVolumeClaim.
    async fn update_claim(&self, claim: &core::PersistentVolumeClaim) -> Result<(), ApiError>;
    /// Updates a PersistentVolume.
    async fn update_volume(&self, volume: &core::PersistentVolume) -> Result<(), ApiError>;
    /// Updates the status of a ResourceClaim.
    async fn update_resource_claim_status(
        &self,
        claim: &resource::ResourceClaim,
    ) -> Result<resource::ResourceClaim, ApiError>;
    /// Creates a ResourceClaim.
    async fn create_resource_claim(
        &self,
        claim: &resource::ResourceClaim,
    ) -> Result<resource::ResourceClaim, ApiError>;
    /// Deletes a ResourceClaim, with its UID as precondition.
    async fn delete_resource_claim(&self, claim: &resource::ResourceClaim) -> Result<(), ApiError>;
    /// Updates a ResourceClaim.
    async fn update_resource_claim(
        &self,
        claim: &resource::ResourceClaim,
    ) -> Result<resource::ResourceClaim, ApiError>;
}

/// Dependencies of the plugins in the binding cycle.
#[derive(Clone)]
pub struct BindContext {
    pub api: Arc<dyn Api>,
    /// The current PersistentVolumeClaims.
    pub claims: Arc<ObjectWaiter<core::PersistentVolumeClaim>>,
    /// The current ResourceClaims.
    pub resource_claims: Arc<ObjectWaiter<resource::ResourceClaim>>,
    pub metrics: Arc<Metrics>,
}

/// A Permit plugin's `Wait`: a condition with a timeout before the pod is bound.
pub struct PermitWait {
    pub plugin: &'static str,
    /// Resolves when the plugin allows or rejects the pod.
    pub allowed: Pin<Box<dyn Future<Output = Result<(), String>> + Send>>,
    pub timeout: Duration,
}

impl PermitWait {
    /// Waits for the plugin's decision or the timeout.
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

/// The PreBind extension point.
#[async_trait]
pub trait PreBind: Send + Sync {
    /// Whether the plugin has work to do for the pod. If so, the node is written to `nominatedNodeName`
    /// first.
    fn has_work(&self, pod: &PodInfo) -> bool;
    /// Does the work. An error rejects the pod.
    async fn pre_bind(&self, context: &BindContext, pod: &PodInfo, node: &str) -> Result<(), String>;
}

/// Result of a Bind plugin.
pub enum BindStatus {
    Bound,
    /// The plugin does not handle this pod; the next one is called.
    Skip,
    Failed(String),
}

/// The Bind extension point.
#[async_trait]
pub trait Bind: Send + Sync {
    /// Binds the pod to the node.
    async fn bind(&self, context: &BindContext, pod: &PodInfo, node: &str) -> BindStatus;
}

/// The PostBind extension point.
#[async_trait]
pub trait PostBind: Send + Sync {
    /// Called after the pod was bound.
    async fn post_bind(&self, context: &BindContext, pod: &PodInfo, node: &str);
}
