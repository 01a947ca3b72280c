//! The interface of a cloud provider, as `k8s.io/cloud-provider` upstream. Most clusters have none.

use std::collections::BTreeSet;
use std::fmt;
use std::net::IpAddr;
use std::ops::Deref;
use std::sync::Arc;

use async_trait::async_trait;
use k8s_openapi::api::core::v1::{LoadBalancerStatus, Node, Service};

/// A cloud provider.
pub trait Cloud: Send + Sync {
    /// The implementation of Services of type LoadBalancer, if any.
    fn load_balancer(&self) -> Option<&dyn LoadBalancer>;

    /// The implementation of routes between the pod networks of nodes, if the cloud needs them.
    fn routes(&self) -> Option<&dyn Routes>;
}

/// An error of the cloud provider, as shown in events.
#[derive(Debug, thiserror::Error)]
#[error("{0}")]
pub struct CloudError(pub String);

/// Manages the load balancers of Services.
#[async_trait]
pub trait LoadBalancer: Send + Sync {
    /// Whether there are resources outside the cluster that must be removed before a Service is deleted.
    fn needs_cleanup(&self) -> bool;

    /// Creates or updates the load balancer of a Service and returns its status. Idempotent.
    async fn ensure(
        &self,
        service: &Service,
        context: &LoadBalancerContext,
    ) -> Result<LoadBalancerStatus, CloudError>;

    /// Removes what `ensure` created. Succeeds if there is nothing to remove.
    async fn remove(&self, service: &Service) -> Result<(), CloudError>;
}

/// What a load balancer depends on besides the Service.
#[derive(Debug, Default)]
pub struct LoadBalancerContext {
    /// Nodes that may receive traffic.
    pub nodes: Vec<Arc<Node>>,
    /// Names of the nodes with endpoints of the Service.
    pub serving: BTreeSet<String>,
    /// All other Services with a load balancer, with their status.
    pub others: Vec<Arc<Service>>,
}

/// Manages routes between nodes.
#[async_trait]
pub trait Routes: Send + Sync {
    async fn list(&self) -> Result<Vec<Route>, CloudError>;

    async fn create(&self, route: &Route) -> Result<(), CloudError>;

    async fn delete(&self, route: &Route) -> Result<(), CloudError>;
}

/// A route to the pod network `network` via `node`.
#[derive(Clone, Debug, PartialEq, Eq, PartialOrd, Ord)]
pub struct Route {
    pub node: String,
    pub addresses: Vec<IpAddr>,
    pub network: String,
}

/// The cloud provider of the cluster, if any.
#[derive(Clone, Default)]
pub struct CloudHandle(pub Option<Arc<dyn Cloud>>);

impl Deref for CloudHandle {
    type Target = Option<Arc<dyn Cloud>>;

    fn deref(&self) -> &Self::Target {
        &self.0
    }
}

impl fmt::Debug for CloudHandle {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(if self.0.is_some() { "a cloud" } else { "no cloud" })
    }
}
