//! Flags of components that run alone, named as those of upstream's binaries.

use std::net::IpAddr;
use std::path::PathBuf;

use clap::Args;
use jiff::SignedDuration;
use reconcile::NodeMonitorConfig;

use super::values::duration;

#[derive(Debug, Args)]
pub struct ControllerManagerFlags {
    /// Kubeconfig for the API server
    #[arg(long, env = "KUBECONFIG")]
    pub kubeconfig: PathBuf,
    /// Controllers to run; `*` for all, `-name` to leave one out
    #[arg(long, value_delimiter = ',', default_value = "*", allow_hyphen_values = true)]
    pub controllers: Vec<String>,
    /// Use leader election, so that several instances may run
    #[arg(long, default_value_t = true, action = clap::ArgAction::Set)]
    pub leader_elect: bool,
    /// Pod networks, at most one of each IP family; without it, nodes are not assigned pod CIDRs
    #[arg(long, value_delimiter = ',')]
    pub cluster_cidr: Vec<String>,
    /// Networks for cluster IPs of Services
    #[arg(long, value_delimiter = ',')]
    pub service_cluster_ip_range: Vec<String>,
    /// CA certificates published to pods in kube-root-ca.crt [default: those of the kubeconfig]
    #[arg(long, value_name = "FILE")]
    pub root_ca_file: Option<PathBuf>,
    /// Private key that signs service account tokens in Secrets, PEM
    #[arg(long, value_name = "FILE")]
    pub service_account_private_key_file: Option<PathBuf>,
    #[command(flatten)]
    pub signing: SigningFlags,
    /// Directory on nodes for volumes of the built-in StorageClass; without it, none are provisioned
    #[arg(long)]
    pub default_local_storage_path: Option<String>,
    /// Implement Services of type LoadBalancer at the addresses of the nodes
    #[arg(long)]
    pub servicelb: bool,
    /// Addresses for Services of type LoadBalancer, as CIDRs or ranges [default: the addresses of the nodes]
    #[arg(long, value_delimiter = ',', requires = "servicelb")]
    pub servicelb_pool: Vec<String>,
    #[command(flatten)]
    pub silence: NodeMonitorFlags,
    #[command(flatten)]
    pub monitor: SecureServingFlags,
}

/// When a node without heartbeats is marked NotReady.
#[derive(Clone, Debug, Args)]
pub struct NodeMonitorFlags {
    /// Time without a heartbeat after which a node is marked NotReady; nodes renew their lease every 10 s
    #[arg(long, value_name = "TIME", default_value = "50s", value_parser = duration, help_heading = "Node")]
    pub node_monitor_grace_period: SignedDuration,
    /// The same for a new node
    #[arg(long, value_name = "TIME", default_value = "1m", value_parser = duration, help_heading = "Node")]
    pub node_startup_grace_period: SignedDuration,
}

impl NodeMonitorFlags {
    pub fn settings(&self) -> NodeMonitorConfig {
        NodeMonitorConfig {
            grace_period: self.node_monitor_grace_period,
            startup_grace_period: self.node_startup_grace_period,
        }
    }
}

/// Where a component that runs alone serves health and metrics.
#[derive(Debug, Args)]
pub struct SecureServingFlags {
    /// Port for health and metrics; 0 to disable [default: 10257 for controllers, 10259 for the scheduler]
    #[arg(long)]
    pub secure_port: Option<u16>,
    /// Listen address for health and metrics
    #[arg(long, default_value = "0.0.0.0")]
    pub bind_address: IpAddr,
    /// Serving certificate, PEM [default: self-signed]
    #[arg(long, value_name = "FILE", requires = "tls_private_key_file")]
    pub tls_cert_file: Option<PathBuf>,
    /// Private key of that certificate, PEM
    #[arg(long, value_name = "FILE", requires = "tls_cert_file")]
    pub tls_private_key_file: Option<PathBuf>,
    /// CA certificates for client authentication, PEM [default: as published by the API server]
    #[arg(long, value_name = "FILE")]
    pub client_ca_file: Option<PathBuf>,
}

/// Certificate authorities of the CertificateSigningRequest signers: one for all, or one for each.
#[derive(Debug, Args)]
pub struct SigningFlags {
    /// CA certificate of all signers, PEM
    #[arg(long, value_name = "FILE", requires = "cluster_signing_key_file")]
    pub cluster_signing_cert_file: Option<PathBuf>,
    /// Private key of that certificate, PEM
    #[arg(long, value_name = "FILE", requires = "cluster_signing_cert_file")]
    pub cluster_signing_key_file: Option<PathBuf>,
    /// CA certificate of kubernetes.io/kube-apiserver-client, PEM
    #[arg(long, value_name = "FILE", requires = "cluster_signing_kube_apiserver_client_key_file")]
    pub cluster_signing_kube_apiserver_client_cert_file: Option<PathBuf>,
    /// Private key of that certificate, PEM
    #[arg(long, value_name = "FILE", requires = "cluster_signing_kube_apiserver_client_cert_file")]
    pub cluster_signing_kube_apiserver_client_key_file: Option<PathBuf>,
    /// CA certificate of kubernetes.io/kube-apiserver-client-kubelet, PEM
    #[arg(long, value_name = "FILE", requires = "cluster_signing_kubelet_client_key_file")]
    pub cluster_signing_kubelet_client_cert_file: Option<PathBuf>,
    /// Private key of that certificate, PEM
    #[arg(long, value_name = "FILE", requires = "cluster_signing_kubelet_client_cert_file")]
    pub cluster_signing_kubelet_client_key_file: Option<PathBuf>,
    /// CA certificate of kubernetes.io/kubelet-serving, PEM
    #[arg(long, value_name = "FILE", requires = "cluster_signing_kubelet_serving_key_file")]
    pub cluster_signing_kubelet_serving_cert_file: Option<PathBuf>,
    /// Private key of that certificate, PEM
    #[arg(long, value_name = "FILE", requires = "cluster_signing_kubelet_serving_cert_file")]
    pub cluster_signing_kubelet_serving_key_file: Option<PathBuf>,
    /// CA certificate of kubernetes.io/legacy-unknown, PEM
    #[arg(long, value_name = "FILE", requires = "cluster_signing_legacy_unknown_key_file")]
    pub cluster_signing_legacy_unknown_cert_file: Option<PathBuf>,
    /// Private key of that certificate, PEM
    #[arg(long, value_name = "FILE", requires = "cluster_signing_legacy_unknown_cert_file")]
    pub cluster_signing_legacy_unknown_key_file: Option<PathBuf>,
}

#[derive(Debug, Args)]
pub struct SchedulerFlags {
    /// Kubeconfig for the API server
    #[arg(long, env = "KUBECONFIG")]
    pub kubeconfig: PathBuf,
    /// KubeSchedulerConfiguration file
    #[arg(long)]
    pub config: Option<PathBuf>,
    /// Use leader election, so that several instances may run [default: as in --config, else true]
    #[arg(long)]
    pub leader_elect: Option<bool>,
    #[command(flatten)]
    pub monitor: SecureServingFlags,
}

#[derive(Debug, Args)]
pub struct ProxyFlags {
    /// Kubeconfig for the API server
    #[arg(long, env = "KUBECONFIG")]
    pub kubeconfig: PathBuf,
    /// Name of this node [default: the host name]
    #[arg(long, env = "SKIFF_NODE_NAME", visible_alias = "hostname-override")]
    pub node_name: Option<String>,
    /// Pod networks; traffic from elsewhere to a cluster IP is masqueraded
    #[arg(long, value_delimiter = ',', default_value = "10.42.0.0/16")]
    pub cluster_cidr: Vec<String>,
    /// Networks for cluster IPs; traffic to an unused one is dropped
    #[arg(long, value_delimiter = ',', default_value = "10.43.0.0/16")]
    pub service_cidr: Vec<String>,
    /// Also enforce NetworkPolicies on this node; requires permission to list all pods
    #[arg(long)]
    pub network_policy: bool,
    /// Remove all rules and exit
    #[arg(long)]
    pub cleanup: bool,
}
