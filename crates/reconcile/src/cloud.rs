//! What control loops ask of whatever the cluster runs on. Most clusters run on nothing in particular.

use std::collections::BTreeSet;
use std::fmt;
use std::net::IpAddr;
use std::ops::Deref;
use std::sync::Arc;

use async_trait::async_trait;
use k8s_openapi::api::core::v1::{LoadBalancerStatus, Node, Service};

/// A place to run a cluster on.
pub trait Cloud: Send + Sync {
    /// Who brings traffic from outside to Services of type LoadBalancer, where anybody does.
    fn load_balancer(&self) -> Option<&dyn LoadBalancer>;

    /// Who carries packets between the pods of different nodes, where that needs routes from outside.
    fn routes(&self) -> Option<&dyn Routes>;
}

/// A failure of the cloud, as it is told to users.
#[derive(Debug, thiserror::Error)]
#[error("{0}")]
pub struct CloudError(pub String);

/// Brings traffic from outside to Services.
#[async_trait]
pub trait LoadBalancer: Send + Sync {
    /// Whether something outside the cluster has to be taken away before a Service may go.
    fn needs_cleanup(&self) -> bool;

    /// Balances the load of a Service, anew or still, and says where from outside it is reached. Doing so twice is
    /// doing it once.
    async fn ensure(
        &self,
        service: &Service,
        context: &LoadBalancerContext,
    ) -> Result<LoadBalancerStatus, CloudError>;

    /// Takes away what `ensure` has made; what is not there is no failure.
    async fn remove(&self, service: &Service) -> Result<(), CloudError>;
}

/// What a balancer has to know besides the Service.
#[derive(Debug, Default)]
pub struct LoadBalancerContext {
    /// The nodes that may take traffic.
    pub nodes: Vec<Arc<Node>>,
    /// The names of nodes on which the Service has endpoints.
    pub serving: BTreeSet<String>,
    /// All other Services that are balanced, with what their status says.
    pub others: Vec<Arc<Service>>,
}

/// Carries packets between nodes.
#[async_trait]
pub trait Routes: Send + Sync {
    async fn list(&self) -> Result<Vec<Route>, CloudError>;

    async fn create(&self, route: &Route) -> Result<(), CloudError>;

    async fn delete(&self, route: &Route) -> Result<(), CloudError>;
}

/// Packets to the pods of `network` go to `node`.
#[derive(Clone, Debug, PartialEq, Eq, PartialOrd, Ord)]
pub struct Route {
    pub node: String,
    pub addresses: Vec<IpAddr>,
    pub network: String,
}

/// The cloud a cluster runs on, if any.
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
