//! What control loops are told about the cluster besides what they can see of it.

/// How the cluster was set up. What is not told is empty, and the loops that need it do without.
#[derive(Clone, Debug, Default)]
pub struct Settings {
    /// The certificate of the authority by which clients know the API server.
    pub root_ca: String,
    /// The networks of pods, at most one of each family; each node gets a part of each.
    pub cluster_cidrs: Vec<String>,
    /// The networks of Services.
    pub service_cidrs: Vec<String>,
}
