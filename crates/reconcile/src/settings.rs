//! What control loops are told about the cluster besides what they can see of it.

use std::collections::BTreeMap;
use std::fmt;
use std::ops::Deref;
use std::sync::Arc;

use jiff::SignedDuration;

use crate::cloud::Place;

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
    pub cloud: Place,
    /// When a node that says nothing is believed to be gone.
    pub silence: Silence,
}

/// How long nodes may say nothing.
#[derive(Clone, Copy, Debug)]
pub struct Silence {
    /// One that has spoken before.
    pub grace: SignedDuration,
    /// A new one.
    pub startup: SignedDuration,
}

/// As upstream's.
impl Default for Silence {
    fn default() -> Silence {
        Silence { grace: SignedDuration::from_secs(50), startup: SignedDuration::from_secs(60) }
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
