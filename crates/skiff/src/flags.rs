//! The command line. Flags are named as in k3s where k3s has the same thing.

mod roles;
mod values;

use std::net::IpAddr;
use std::path::{Path, PathBuf};

use clap::{Args, Parser, Subcommand};
use jiff::SignedDuration;

pub use roles::{
    ControllerManagerFlags, NodeMonitorFlags, ProxyFlags, SchedulerFlags, SecureServingFlags, SigningFlags,
};
use values::{PortRange, duration, label, octal, port_range, taint};

/// The default of --data-dir.
pub const DATA_DIR: &str = "/var/lib/skiff";

/// Kubernetes in one small program
#[derive(Debug, Parser)]
#[command(name = "skiff", version, arg_required_else_help = true)]
pub struct Flags {
    /// Log level (error, warn, info, debug) or filter such as `apiserver=debug`
    #[arg(long, global = true, default_value = "info", env = "SKIFF_LOG", help_heading = "Logging")]
    pub log: tracing_subscriber::filter::Targets,
    #[command(subcommand)]
    pub command: Command,
}

#[derive(Debug, Subcommand)]
pub enum Command {
    /// Run a control plane, and a node unless --disable-agent is given
    Server(Box<ServerFlags>),
    /// Run a node that joins a server
    Agent(Box<AgentFlags>),
    /// Run only the kubelet, for any API server
    Kubelet(Box<KubeletFlags>),
    /// Run only the controllers, for any API server
    ControllerManager(Box<ControllerManagerFlags>),
    /// Run only the scheduler, for any API server
    Scheduler(SchedulerFlags),
    /// Run only the Service proxy, for any API server
    Proxy(ProxyFlags),
    /// Run only the container runtime, as a CRI server
    Runtime(RuntimeFlags),
    /// Run simulated nodes and pods, for any API server
    Simulate(SimulateFlags),
    /// Check whether this host has what a node needs
    Check,
    /// Manage container images
    Image(ImageFlags),
    /// Run a temporary cluster of several nodes on this machine
    Dev(DevFlags),
    /// Manage join tokens
    Token(TokenFlags),
    /// Stop the server or agent of a data directory and end its pods; keeps all data
    Stop(StopFlags),
    /// Remove everything that skiff created on this host
    Reset(ResetFlags),
    /// Save the data of a stopped server to a file
    Backup(BackupFlags),
    /// Restore a backup into an empty data directory
    Restore(BackupFlags),
    /// Print the versions of skiff and of Kubernetes
    Version(VersionFlags),
}

/// How the embedded runtime pulls images.
#[derive(Clone, Debug, Default, Args)]
pub struct RegistryFlags {
    /// File with mirrors, TLS settings and credentials of registries [default: DATA_DIR/agent/registries.yaml]
    #[arg(long, help_heading = "Runtime")]
    pub private_registry: Option<PathBuf>,
    /// Pull from mirrors only if a registry has mirrors
    #[arg(long, help_heading = "Runtime")]
    pub disable_default_registry_endpoint: bool,
}

impl RegistryFlags {
    /// The file with the configuration of registries.
    pub fn file(&self, data_dir: &Path) -> PathBuf {
        self.private_registry.clone().unwrap_or_else(|| data_dir.join("agent/registries.yaml"))
    }
}

/// Flags of a node, as part of a server, as an agent or as a kubelet alone.
#[derive(Clone, Debug, Args)]
pub struct NodeFlags {
    /// Directory for all state: store, certificates, images, pods
    #[arg(long, short = 'd', env = "SKIFF_DATA_DIR", default_value = DATA_DIR, help_heading = "Storage")]
    pub data_dir: PathBuf,
    /// Address of this node, or one of each IP family [default: the address used to reach the server]
    #[arg(long, short = 'i', value_delimiter = ',', help_heading = "Networking")]
    pub node_ip: Vec<IpAddr>,
    /// Do not enforce NetworkPolicies on this node
    #[arg(long, help_heading = "Networking")]
    pub disable_network_policy: bool,
    /// Do not program Services or NetworkPolicies on this node
    #[arg(long, help_heading = "Networking")]
    pub disable_kube_proxy: bool,
    /// CRI socket, or `containerd` for the host's containerd or one started by skiff [default: the embedded
    /// runtime]
    #[arg(long, help_heading = "Runtime")]
    pub container_runtime_endpoint: Option<String>,
    /// CNI configuration directory; without a configuration the built-in pod network is used
    #[arg(long, default_value = "/etc/cni/net.d", help_heading = "Networking")]
    pub cni_conf_dir: PathBuf,
    /// Directories with CNI plugins
    #[arg(long, value_delimiter = ',', default_values = crate::containerd::CNI_BIN_DIRS, help_heading = "Networking")]
    pub cni_bin_dir: Vec<PathBuf>,
    #[command(flatten)]
    pub registries: RegistryFlags,
    /// CredentialProviderConfig file, or a directory with such files
    #[arg(long, requires = "image_credential_provider_bin_dir", help_heading = "Runtime")]
    pub image_credential_provider_config: Option<PathBuf>,
    /// Directory with credential provider plugins
    #[arg(long, requires = "image_credential_provider_config", help_heading = "Runtime")]
    pub image_credential_provider_bin_dir: Option<PathBuf>,
    /// Listen address of the kubelet's API (logs, exec, metrics)
    #[arg(long, default_value = "0.0.0.0", help_heading = "Node")]
    pub kubelet_address: IpAddr,
    /// Listen port of the kubelet's API; 0 for a free port
    #[arg(long, default_value_t = 10250, help_heading = "Node")]
    pub kubelet_port: u16,
    /// Resolver configuration for pods with `dnsPolicy: Default` [default: /etc/resolv.conf, or systemd-resolved's
    /// file if that names only this host]
    #[arg(long, env = "SKIFF_RESOLV_CONF", help_heading = "Networking")]
    pub resolv_conf: Option<PathBuf>,
    /// Flag of the upstream kubelet, as `name=value`; `config=FILE` reads a KubeletConfiguration
    #[arg(long, help_heading = "Node")]
    pub kubelet_arg: Vec<String>,
    /// Name of this node [default: the host name]
    #[arg(long, env = "SKIFF_NODE_NAME", help_heading = "Node")]
    pub node_name: Option<String>,
    /// Label of this node, as `key=value`
    #[arg(long, value_parser = label, help_heading = "Node")]
    pub node_label: Vec<(String, String)>,
    /// Taint of this node, as `key=value:NoSchedule`
    #[arg(long, value_parser = taint, help_heading = "Node")]
    pub node_taint: Vec<(String, String, String)>,
}

#[derive(Clone, Debug, Args)]
pub struct ServerFlags {
    #[command(flatten)]
    pub node: NodeFlags,
    /// Token that nodes join with, `id.secret` or any text [default: generated once, stored in DATA_DIR/token]
    #[arg(long, env = "SKIFF_TOKEN", hide_env_values = true, help_heading = "Cluster")]
    pub token: Option<String>,
    /// YAML file with the same options (`data-dir: /x` for `--data-dir /x`); flags take precedence
    #[arg(long, env = "SKIFF_CONFIG_FILE")]
    pub config: Option<PathBuf>,
    /// Merge the administrator's kubeconfig into this file [default: only DATA_DIR/admin.kubeconfig is written]
    #[arg(long, short = 'o', env = "SKIFF_KUBECONFIG_OUTPUT", help_heading = "Security")]
    pub write_kubeconfig: Option<PathBuf>,
    /// File mode of --write-kubeconfig [default: that of the existing file, else 600]
    #[arg(long, env = "SKIFF_KUBECONFIG_MODE", value_parser = octal, help_heading = "Security")]
    pub write_kubeconfig_mode: Option<u32>,
    /// Listen address of the API server
    #[arg(long, default_value = "0.0.0.0", help_heading = "Networking")]
    pub bind_address: IpAddr,
    /// Listen port of the API server
    #[arg(long, default_value_t = 6443, help_heading = "Networking")]
    pub https_listen_port: u16,
    /// Address at which pods and nodes reach this server [default: the address of the default route]
    #[arg(long, help_heading = "Networking")]
    pub advertise_address: Option<IpAddr>,
    /// Additional host names and addresses for the serving certificate
    #[arg(long, value_delimiter = ',', help_heading = "Security")]
    pub tls_san: Vec<String>,
    /// Pod networks, at most one of each IP family
    #[arg(long, value_delimiter = ',', default_value = "10.42.0.0/16", help_heading = "Networking")]
    pub cluster_cidr: Vec<String>,
    /// Networks for cluster IPs of Services
    #[arg(long, value_delimiter = ',', default_value = "10.43.0.0/16", help_heading = "Networking")]
    pub service_cidr: Vec<String>,
    /// Port range for Services of type NodePort
    #[arg(long, default_value = "30000-32767", value_parser = port_range, help_heading = "Networking")]
    pub service_node_port_range: PortRange,
    /// DNS domain of the cluster
    #[arg(long, default_value = "cluster.local", help_heading = "Cluster")]
    pub cluster_domain: String,
    /// etcd endpoints, comma-separated, instead of the embedded store
    #[arg(long, value_delimiter = ',', env = "SKIFF_DATASTORE_ENDPOINT", help_heading = "Cluster")]
    pub datastore_endpoint: Vec<String>,
    /// CA certificates for etcd, PEM
    #[arg(long, value_name = "FILE", env = "SKIFF_DATASTORE_CAFILE", help_heading = "Cluster")]
    pub datastore_cafile: Option<PathBuf>,
    /// Client certificate for etcd, PEM
    #[arg(
        long,
        value_name = "FILE",
        env = "SKIFF_DATASTORE_CERTFILE",
        requires = "datastore_keyfile",
        help_heading = "Cluster"
    )]
    pub datastore_certfile: Option<PathBuf>,
    /// Private key of that certificate, PEM
    #[arg(
        long,
        value_name = "FILE",
        env = "SKIFF_DATASTORE_KEYFILE",
        requires = "datastore_certfile",
        help_heading = "Cluster"
    )]
    pub datastore_keyfile: Option<PathBuf>,
    /// API groups, versions or resources to enable or disable, as `batch/v1=false`
    #[arg(long, value_delimiter = ',', help_heading = "Cluster")]
    pub runtime_config: Vec<String>,
    /// Flag of the upstream API server, as `name=value`; an unknown name is refused with the list of supported flags
    #[arg(long, help_heading = "Cluster")]
    pub kube_apiserver_arg: Vec<String>,
    /// Run the control plane without a node
    #[arg(long, help_heading = "Node")]
    pub disable_agent: bool,
    /// Addresses of the cluster DNS [default: the tenth address of --service-cidr]
    #[arg(long, value_delimiter = ',', help_heading = "Networking")]
    pub cluster_dns: Vec<IpAddr>,
    /// Do not run the controllers
    #[arg(long, help_heading = "Cluster")]
    pub disable_controller_manager: bool,
    /// Controllers to run; `*` for all, `-name` to leave one out
    #[arg(
        long,
        value_delimiter = ',',
        default_value = "*",
        allow_hyphen_values = true,
        help_heading = "Cluster"
    )]
    pub controllers: Vec<String>,
    /// Components to disable: `dns` (cluster DNS), `ingress` (Ingress controller), `local-storage` (local volume
    /// provisioner), `servicelb` (LoadBalancer Services)
    #[arg(long, value_delimiter = ',', value_parser = ["dns", "ingress", "local-storage", "servicelb"], help_heading = "Cluster")]
    pub disable: Vec<String>,
    /// HTTP port of the Ingress controller on this node; 0 to disable
    #[arg(long, default_value_t = 80, help_heading = "Networking")]
    pub ingress_http_port: u16,
    /// HTTPS port of the Ingress controller on this node; 0 to disable
    #[arg(long, default_value_t = 443, help_heading = "Networking")]
    pub ingress_https_port: u16,
    /// Directory on nodes for volumes of the built-in StorageClass [default: DATA_DIR/storage]
    #[arg(long, help_heading = "Storage")]
    pub default_local_storage_path: Option<PathBuf>,
    /// Addresses for Services of type LoadBalancer, as CIDRs or ranges [default: the addresses of the nodes]
    #[arg(long, value_delimiter = ',', help_heading = "Networking")]
    pub servicelb_pool: Vec<String>,
    #[command(flatten)]
    pub silence: NodeMonitorFlags,
    /// Do not run the scheduler
    #[arg(long, help_heading = "Cluster")]
    pub disable_scheduler: bool,
    /// KubeSchedulerConfiguration file
    #[arg(long, help_heading = "Cluster")]
    pub scheduler_config: Option<PathBuf>,
    /// Number of simulated nodes; their pods are not executed
    #[arg(long, default_value_t = 0, hide_default_value = true, help_heading = "Cluster")]
    pub simulate: u32,
}

#[derive(Debug, Args)]
pub struct AgentFlags {
    /// YAML file with the same options (`data-dir: /x` for `--data-dir /x`); flags take precedence
    #[arg(long, env = "SKIFF_CONFIG_FILE")]
    pub config: Option<PathBuf>,
    /// URL of the server to join, as https://server:6443
    #[arg(long, short = 's', env = "SKIFF_URL", help_heading = "Cluster")]
    pub server: String,
    /// Join token, from DATA_DIR/token on the server; needed only for the first join
    #[arg(long, short = 't', env = "SKIFF_TOKEN", hide_env_values = true, help_heading = "Cluster")]
    pub token: Option<String>,
    /// File with the join token
    #[arg(long, env = "SKIFF_TOKEN_FILE", conflicts_with = "token", help_heading = "Cluster")]
    pub token_file: Option<PathBuf>,
    /// HTTP port of the Ingress controller on this node, forwarded to the server; 0 to disable
    #[arg(long, default_value_t = 80, help_heading = "Networking")]
    pub ingress_http_port: u16,
    /// HTTPS port of the Ingress controller on this node, forwarded to the server; 0 to disable
    #[arg(long, default_value_t = 443, help_heading = "Networking")]
    pub ingress_https_port: u16,
    #[command(flatten)]
    pub node: NodeFlags,
}

#[derive(Debug, Args)]
pub struct KubeletFlags {
    /// Kubeconfig for the API server; created if it is missing and --bootstrap-kubeconfig is given
    #[arg(long, env = "KUBECONFIG", help_heading = "Cluster")]
    pub kubeconfig: PathBuf,
    /// Kubeconfig used to request a client certificate if --kubeconfig is missing or its certificate has expired
    #[arg(long, help_heading = "Cluster")]
    pub bootstrap_kubeconfig: Option<PathBuf>,
    /// Directory for requested certificates [default: pki in the kubelet's root directory]
    #[arg(long, help_heading = "Security")]
    pub cert_dir: Option<PathBuf>,
    /// Renew the client certificate before it expires [default: true with --bootstrap-kubeconfig]
    #[arg(long, help_heading = "Security")]
    pub rotate_certificates: bool,
    /// Request the serving certificate with a CertificateSigningRequest
    #[arg(long, help_heading = "Security")]
    pub rotate_server_certificates: bool,
    /// CA certificates for client authentication [default: those of the kubeconfig]
    #[arg(long, help_heading = "Security")]
    pub client_ca_file: Option<PathBuf>,
    /// Serving certificate, PEM [default: requested from the cluster, or self-signed]
    #[arg(long, requires = "tls_private_key_file", help_heading = "Security")]
    pub tls_cert_file: Option<PathBuf>,
    /// Private key of that certificate, PEM
    #[arg(long, requires = "tls_cert_file", help_heading = "Security")]
    pub tls_private_key_file: Option<PathBuf>,
    /// Addresses of the cluster DNS
    #[arg(long, value_delimiter = ',', help_heading = "Networking")]
    pub cluster_dns: Vec<IpAddr>,
    /// DNS domain of the cluster
    #[arg(long, default_value = "cluster.local", help_heading = "Cluster")]
    pub cluster_domain: String,
    #[command(flatten)]
    pub node: NodeFlags,
}

#[derive(Debug, Args)]
pub struct RuntimeFlags {
    /// Directory for all state: store, certificates, images, pods
    #[arg(long, short = 'd', env = "SKIFF_DATA_DIR", default_value = "/var/lib/skiff")]
    pub data_dir: PathBuf,
    /// Socket to listen on [default: DATA_DIR/agent/cri.sock]
    #[arg(long)]
    pub socket: Option<PathBuf>,
    /// Pod networks of this node, until a kubelet sets others
    #[arg(long, value_delimiter = ',', default_value = "10.42.0.0/24")]
    pub pod_cidr: Vec<String>,
    /// Pod networks of the cluster; traffic that leaves them is masqueraded
    #[arg(long, value_delimiter = ',', default_value = "10.42.0.0/16")]
    pub cluster_cidr: Vec<String>,
    /// CNI configuration directory; without a configuration the built-in pod network is used
    #[arg(long, default_value = "/etc/cni/net.d")]
    pub cni_conf_dir: PathBuf,
    /// Directories with CNI plugins
    #[arg(long, value_delimiter = ',', default_values = crate::containerd::CNI_BIN_DIRS)]
    pub cni_bin_dir: Vec<PathBuf>,
    #[command(flatten)]
    pub registries: RegistryFlags,
}

#[derive(Debug, Args)]
pub struct SimulateFlags {
    /// Kubeconfig for the API server
    #[arg(long, env = "KUBECONFIG")]
    pub kubeconfig: PathBuf,
    /// Number of simulated nodes
    #[arg(long, default_value_t = 1)]
    pub nodes: u32,
    /// Record the events that a kubelet would record
    #[arg(long, default_value_t = true, action = clap::ArgAction::Set)]
    pub events: bool,
}

#[derive(Debug, Args)]
pub struct DevFlags {
    /// Number of nodes, including the server
    #[arg(long, default_value_t = 1, value_parser = clap::value_parser!(u8).range(1..=100))]
    pub nodes: u8,
    /// Directory for all state of the cluster; removed at its end
    #[arg(long, short = 'd', default_value = "/var/lib/skiff-dev")]
    pub data_dir: PathBuf,
    /// Network between the nodes
    #[arg(long, default_value = "10.212.0.0/24")]
    pub network: podnet::Cidr,
    /// Route between the nodes instead of connecting them by one bridge
    #[arg(long)]
    pub routed: bool,
    /// Image archive to import on all nodes
    #[arg(long)]
    pub image: Vec<PathBuf>,
    /// Argument for the server only, as `--server-arg=--disable=dns`
    #[arg(long, allow_hyphen_values = true)]
    pub server_arg: Vec<String>,
    /// Remove a cluster that an earlier run left behind
    #[arg(long)]
    pub remove: bool,
    /// Arguments for the server and all agents
    #[arg(last = true)]
    pub rest: Vec<String>,
}

#[derive(Debug, Args)]
pub struct ResetFlags {
    /// Data directory of the server or agent
    #[arg(long, short = 'd', env = "SKIFF_DATA_DIR", default_value = "/var/lib/skiff")]
    pub data_dir: PathBuf,
    /// Also remove the data directory with all data of the cluster
    #[arg(long)]
    pub yes: bool,
    /// Stop the skiff processes that run on this host first, by their systemd services or by SIGTERM
    #[arg(long)]
    pub stop: bool,
}

#[derive(Debug, Args)]
pub struct StopFlags {
    /// Data directory of the server or agent
    #[arg(long, short = 'd', env = "SKIFF_DATA_DIR", default_value = DATA_DIR)]
    pub data_dir: PathBuf,
    /// Upper limit in seconds for the grace periods of pods
    #[arg(long, value_name = "SECONDS")]
    pub grace_period: Option<u64>,
}

#[derive(Debug, Args)]
pub struct TokenFlags {
    /// Kubeconfig for the API server [default: DATA_DIR/admin.kubeconfig]
    #[arg(long, env = "KUBECONFIG", global = true)]
    pub kubeconfig: Option<PathBuf>,
    /// Data directory of the server
    #[arg(long, short = 'd', env = "SKIFF_DATA_DIR", default_value = DATA_DIR, global = true)]
    pub data_dir: PathBuf,
    #[command(subcommand)]
    pub action: TokenAction,
}

#[derive(Debug, Subcommand)]
pub enum TokenAction {
    /// Create a token and print it
    Create {
        /// Time until the token expires; 0 for never
        #[arg(long, value_name = "TIME", default_value = "24h", value_parser = duration)]
        ttl: SignedDuration,
        /// Description of the token
        #[arg(long, default_value = "")]
        description: String,
        /// Print the complete `skiff agent` command instead of the token
        #[arg(long)]
        print_join_command: bool,
    },
    /// List join tokens (secrets hidden)
    #[command(visible_alias = "ls")]
    List,
    /// Delete tokens; nodes that have joined with them are not affected
    #[command(visible_alias = "rm")]
    Delete {
        /// Tokens or token IDs
        #[arg(required = true)]
        tokens: Vec<String>,
    },
}

#[derive(Debug, Args)]
pub struct BackupFlags {
    /// Backup file
    pub file: PathBuf,
    /// Data directory of the server
    #[arg(long, short = 'd', env = "SKIFF_DATA_DIR", default_value = DATA_DIR)]
    pub data_dir: PathBuf,
}

#[derive(Debug, Args)]
pub struct ImageFlags {
    /// CRI socket, or `containerd` [default: the runtime of the node with this data directory]
    #[arg(long, global = true)]
    pub container_runtime_endpoint: Option<String>,
    /// Data directory of the server or agent [default: that of the node running on this host, else /var/lib/skiff]
    #[arg(long, short = 'd', env = "SKIFF_DATA_DIR", global = true)]
    pub data_dir: Option<PathBuf>,
    #[command(subcommand)]
    pub action: ImageAction,
}

#[derive(Debug, Subcommand)]
pub enum ImageAction {
    /// Import images from archives of `docker save` or in OCI layout
    Import {
        /// Image archives
        #[arg(required = true)]
        files: Vec<PathBuf>,
    },
    /// Export images to an archive
    Export {
        /// Image archive to write
        file: PathBuf,
        /// Image references
        #[arg(required = true)]
        names: Vec<String>,
    },
    /// Remove content that no image refers to
    Gc {
        /// Also remove images that no container uses
        #[arg(long)]
        all: bool,
    },
    /// List images
    Ls,
    /// Pull images from their registries
    Pull {
        #[command(flatten)]
        registries: RegistryFlags,
        /// Image references
        #[arg(required = true)]
        names: Vec<String>,
    },
    /// Remove images
    Rm {
        /// Image references
        #[arg(required = true)]
        names: Vec<String>,
    },
}

#[derive(Debug, Args)]
pub struct VersionFlags {
    /// Output format [default: text]
    #[arg(long, short)]
    pub output: Option<VersionOutput>,
}

#[derive(Clone, Debug, clap::ValueEnum)]
pub enum VersionOutput {
    Json,
}
