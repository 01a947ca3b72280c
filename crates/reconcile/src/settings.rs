//! What control loops are told about the cluster besides what they can see of it.

use std::collections::BTreeMap;
use std::fmt;
use std::ops::Deref;
use std::sync::Arc;

use jiff::SignedDuration;

use crate::cloud::CloudHandle;

/// How the cluster was set up. What is not told is empty, and the loops that need it do without.
#[derive(Clone, Debug, Default)]
pub struct Settings {
    /// The certificate of the authority by which clients know the API server.
    pub root_ca: String,
    /// The networks of pods, at most one of each family; each node gets a part of each.
    pub cluster_cidrs: Vec<String>,
    /// The networks of Services.
    pub service_cidrs: Vec<String>,
    /// Who signs certificates.
    pub signers: Signers,
    /// Who signs the tokens of service accounts that stand in Secrets.
    pub account_tokens: Option<Arc<pki::token::Keys>>,
    /// The directory on nodes for volumes of the built-in storage class.
    pub local_storage: String,
    /// Who balances loads and routes packets.
    pub cloud: CloudHandle,
    /// When a node that says nothing is believed to be gone.
    pub node_monitor: NodeMonitorConfig,
}

/// How long nodes may say nothing.
#[derive(Clone, Copy, Debug)]
pub struct NodeMonitorConfig {
    /// One that has spoken before.
    pub grace_period: SignedDuration,
    /// A new one.
    pub startup_grace_period: SignedDuration,
}

/// As upstream's.
impl Default for NodeMonitorConfig {
    fn default() -> NodeMonitorConfig {
        NodeMonitorConfig {
            grace_period: SignedDuration::from_secs(50),
            startup_grace_period: SignedDuration::from_secs(60),
        }
    }
}

/// Authorities by the names of the signers they stand behind.
#[derive(Clone, Default)]
pub struct Signers(pub BTreeMap<String, Arc<pki::Authority>>);

impl Deref for Signers {
    type Target = BTreeMap<String, Arc<pki::Authority>>;

    fn deref(&self) -> &Self::Target {
        &self.0
    }
}

/// Their names: keys are nobody's business.
impl fmt::Debug for Signers {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_set().entries(self.0.keys()).finish()
    }
}
