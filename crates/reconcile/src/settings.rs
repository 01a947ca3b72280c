//! Cluster settings that controllers cannot read from the API.

use std::collections::BTreeMap;
use std::fmt;
use std::ops::Deref;
use std::sync::Arc;

use jiff::SignedDuration;

use crate::cloud::CloudHandle;

/// Settings of the cluster. Controllers whose setting is empty do without it.
#[derive(Clone, Debug, Default)]
pub struct Settings {
    /// CA certificate of the API server, for `kube-root-ca.crt`.
    pub root_ca: String,
    /// Pod CIDRs, at most one per IP family. Each node is allocated a part of each.
    pub cluster_cidrs: Vec<String>,
    /// Service CIDRs.
    pub service_cidrs: Vec<String>,
    /// CAs of the certificate signers.
    pub signers: Signers,
    /// Key that signs the service account tokens in Secrets.
    pub account_tokens: Option<Arc<pki::token::Keys>>,
    /// Directory on nodes for volumes of the built-in storage class.
    pub local_storage: String,
    /// The cloud provider, for load balancers and routes.
    pub cloud: CloudHandle,
    /// When an unresponsive node is considered unhealthy.
    pub node_monitor: NodeMonitorConfig,
}

/// How long a node may fail to renew its lease before it is considered unhealthy.
#[derive(Clone, Copy, Debug)]
pub struct NodeMonitorConfig {
    /// For a node that has reported status before (`--node-monitor-grace-period`).
    pub grace_period: SignedDuration,
    /// For a new node (`--node-startup-grace-period`).
    pub startup_grace_period: SignedDuration,
}

/// Upstream's defaults.
impl Default for NodeMonitorConfig {
    fn default() -> NodeMonitorConfig {
        NodeMonitorConfig {
            grace_period: SignedDuration::from_secs(50),
            startup_grace_period: SignedDuration::from_secs(60),
        }
    }
}

/// CAs by signer name.
#[derive(Clone, Default)]
pub struct Signers(pub BTreeMap<String, Arc<pki::Authority>>);

impl Deref for Signers {
    type Target = BTreeMap<String, Arc<pki::Authority>>;

    fn deref(&self) -> &Self::Target {
        &self.0
    }
}

/// Prints the signer names only, never the keys.
impl fmt::Debug for Signers {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_set().entries(self.0.keys()).finish()
    }
}
