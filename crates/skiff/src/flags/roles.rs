//! Roles that run apart from the server, told as upstream's programs are.

use std::net::IpAddr;
use std::path::PathBuf;

use clap::Args;
use jiff::SignedDuration;
use reconcile::Silence;

use super::values::duration;

#[derive(Debug, Args)]
pub struct ControllerManagerFlags {
    /// Where the API server is and who to be there
    #[arg(long, env = "KUBECONFIG")]
    pub kubeconfig: PathBuf,
    /// The controllers to run: `*` is all, `-name` is all but that one
    #[arg(long, value_delimiter = ',', default_value = "*", allow_hyphen_values = true)]
    pub controllers: Vec<String>,
    /// Work only while holding the lease, so that several may run
    #[arg(long, default_value_t = true, action = clap::ArgAction::Set)]
    pub leader_elect: bool,
    /// The networks of pods, at most one of each family; without any, nodes get none
    #[arg(long, value_delimiter = ',')]
    pub cluster_cidr: Vec<String>,
    /// The networks of cluster IPs
    #[arg(long, value_delimiter = ',')]
    pub service_cluster_ip_range: Vec<String>,
    /// The authority by which pods know the API server [default: the kubeconfig's]
    #[arg(long, value_name = "FILE")]
    pub root_ca_file: Option<PathBuf>,
    /// The key for tokens of service accounts that stand in Secrets
    #[arg(long, value_name = "FILE")]
    pub service_account_private_key_file: Option<PathBuf>,
    #[command(flatten)]
    pub signing: SigningFlags,
    /// Where on nodes volumes of the built-in storage class are kept; without it, none are made
    #[arg(long)]
    pub default_local_storage_path: Option<String>,
    /// Lead to Services of type LoadBalancer at the addresses of nodes
    #[arg(long)]
    pub servicelb: bool,
    /// Addresses for Services of type LoadBalancer, as networks or ranges, instead of those of the nodes
    #[arg(long, value_delimiter = ',', requires = "servicelb")]
    pub servicelb_pool: Vec<String>,
    #[command(flatten)]
    pub silence: SilenceFlags,
    #[command(flatten)]
    pub monitor: MonitorFlags,
}

/// When a node that says nothing is believed to be gone. Named as upstream's.
#[derive(Clone, Debug, Args)]
pub struct SilenceFlags {
    /// How long a node may say nothing until it is not ready any more; nodes say something every ten seconds
    #[arg(long, value_name = "TIME", default_value = "50s", value_parser = duration)]
    pub node_monitor_grace_period: SignedDuration,
    /// How long a new node may take to say something
    #[arg(long, value_name = "TIME", default_value = "1m", value_parser = duration)]
    pub node_startup_grace_period: SignedDuration,
}

impl SilenceFlags {
    pub fn settings(&self) -> Silence {
        Silence { grace: self.node_monitor_grace_period, startup: self.node_startup_grace_period }
    }
}

/// Where a role that runs apart tells how it is doing.
#[derive(Debug, Args)]
pub struct MonitorFlags {
    /// The port for health and metrics; 0 serves none [default: 10257 for controllers, 10259 for the scheduler]
    #[arg(long)]
    pub secure_port: Option<u16>,
    /// The address for that
    #[arg(long, default_value = "0.0.0.0")]
    pub bind_address: IpAddr,
    /// The certificate to show, in PEM [default: one that vouches for itself]
    #[arg(long, value_name = "FILE", requires = "tls_private_key_file")]
    pub tls_cert_file: Option<PathBuf>,
    /// Its key, in PEM
    #[arg(long, value_name = "FILE", requires = "tls_cert_file")]
    pub tls_private_key_file: Option<PathBuf>,
    /// Who vouches for clients, in PEM [default: as the API server publishes]
    #[arg(long, value_name = "FILE")]
    pub client_ca_file: Option<PathBuf>,
}

/// Who signs requests for certificates: one authority for all, or one for each signer.
#[derive(Debug, Args)]
pub struct SigningFlags {
    /// The authority that signs all requests for certificates, in PEM
    #[arg(long, value_name = "FILE", requires = "cluster_signing_key_file")]
    pub cluster_signing_cert_file: Option<PathBuf>,
    /// Its key, in PEM
    #[arg(long, value_name = "FILE", requires = "cluster_signing_cert_file")]
    pub cluster_signing_key_file: Option<PathBuf>,
    /// The authority that signs requests of clients, in PEM
    #[arg(long, value_name = "FILE", requires = "cluster_signing_kube_apiserver_client_key_file")]
    pub cluster_signing_kube_apiserver_client_cert_file: Option<PathBuf>,
    /// Its key, in PEM
    #[arg(long, value_name = "FILE", requires = "cluster_signing_kube_apiserver_client_cert_file")]
    pub cluster_signing_kube_apiserver_client_key_file: Option<PathBuf>,
    /// The authority that signs requests of kubelets as clients, in PEM
    #[arg(long, value_name = "FILE", requires = "cluster_signing_kubelet_client_key_file")]
    pub cluster_signing_kubelet_client_cert_file: Option<PathBuf>,
    /// Its key, in PEM
    #[arg(long, value_name = "FILE", requires = "cluster_signing_kubelet_client_cert_file")]
    pub cluster_signing_kubelet_client_key_file: Option<PathBuf>,
    /// The authority that signs requests of kubelets as servers, in PEM
    #[arg(long, value_name = "FILE", requires = "cluster_signing_kubelet_serving_key_file")]
    pub cluster_signing_kubelet_serving_cert_file: Option<PathBuf>,
    /// Its key, in PEM
    #[arg(long, value_name = "FILE", requires = "cluster_signing_kubelet_serving_cert_file")]
    pub cluster_signing_kubelet_serving_key_file: Option<PathBuf>,
    /// The authority that signs all other requests, in PEM
    #[arg(long, value_name = "FILE", requires = "cluster_signing_legacy_unknown_key_file")]
    pub cluster_signing_legacy_unknown_cert_file: Option<PathBuf>,
    /// Its key, in PEM
    #[arg(long, value_name = "FILE", requires = "cluster_signing_legacy_unknown_cert_file")]
    pub cluster_signing_legacy_unknown_key_file: Option<PathBuf>,
}

#[derive(Debug, Args)]
pub struct SchedulerFlags {
    /// Where the API server is and who to be there
    #[arg(long, env = "KUBECONFIG")]
    pub kubeconfig: PathBuf,
    /// A KubeSchedulerConfiguration file
    #[arg(long)]
    pub config: Option<PathBuf>,
    /// Work only while holding the lease, so that several may run [default: as the file says, else true]
    #[arg(long)]
    pub leader_elect: Option<bool>,
    #[command(flatten)]
    pub monitor: MonitorFlags,
}

#[derive(Debug, Args)]
pub struct ProxyFlags {
    /// Where the API server is and who to be there
    #[arg(long, env = "KUBECONFIG")]
    pub kubeconfig: PathBuf,
    /// This node's name [default: the host's]
    #[arg(long, env = "SKIFF_NODE_NAME", visible_alias = "hostname-override")]
    pub node_name: Option<String>,
    /// The networks of pods: what comes from elsewhere to a cluster IP is masqueraded
    #[arg(long, value_delimiter = ',', default_value = "10.42.0.0/16")]
    pub cluster_cidr: Vec<String>,
    /// The networks of cluster IPs: what is sent to an unused one is dropped
    #[arg(long, value_delimiter = ',', default_value = "10.43.0.0/16")]
    pub service_cidr: Vec<String>,
    /// Hold pods of this node to NetworkPolicies too, for which one must be allowed to see all pods
    #[arg(long)]
    pub network_policy: bool,
    /// Remove all rules and end
    #[arg(long)]
    pub cleanup: bool,
}
