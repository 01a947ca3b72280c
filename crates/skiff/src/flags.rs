//! The command line. Flags are named as in k3s where k3s has the same thing.

mod roles;
mod values;

use std::net::IpAddr;
use std::path::{Path, PathBuf};

use clap::{Args, Parser, Subcommand};
use jiff::SignedDuration;

pub use roles::{
    ControllerManagerFlags, MonitorFlags, ProxyFlags, SchedulerFlags, SigningFlags, SilenceFlags,
};
use values::{PortRange, duration, label, octal, port_range, taint};

/// Where everything is kept unless told otherwise.
pub const DATA_DIR: &str = "/var/lib/skiff";

/// Kubernetes as one small program.
#[derive(Debug, Parser)]
#[command(name = "skiff", version, arg_required_else_help = true)]
pub struct Flags {
    /// What to log: error, warn, info, debug, or a filter such as `apiserver=debug`
    #[arg(long, global = true, default_value = "info", env = "SKIFF_LOG")]
    pub log: tracing_subscriber::filter::Targets,
    #[command(subcommand)]
    pub command: Command,
}

#[derive(Debug, Subcommand)]
pub enum Command {
    /// Run a control plane
    Server(Box<ServerFlags>),
    /// Run a node that joins a server
    Agent(Box<AgentFlags>),
    /// Run a node alone, for any API server
    Kubelet(Box<KubeletFlags>),
    /// Run the controllers alone, against any API server
    ControllerManager(Box<ControllerManagerFlags>),
    /// Run the scheduler alone, against any API server
    Scheduler(SchedulerFlags),
    /// Route Services on this machine, for any API server
    Proxy(ProxyFlags),
    /// Run pods alone, for any kubelet or crictl, over CRI
    Runtime(RuntimeFlags),
    /// Play nodes and pods that are not there, against any API server
    Simulate(SimulateFlags),
    /// Say what this host lacks of what a node needs, and how to get it
    Check,
    /// Look after the images of the container runtime in use
    Image(ImageFlags),
    /// Make a cluster of several nodes on this machine, for as long as this runs
    Dev(DevFlags),
    /// Look after the tokens by which nodes join
    Token(TokenFlags),
    /// Stop the server or agent of a data directory and end its pods; keeps all data
    Stop(StopFlags),
    /// Remove what skiff has made on this host
    Reset(ResetFlags),
    /// Copy a stopped server's data into one file
    Backup(BackupFlags),
    /// Fill an empty data directory from a backup
    Restore(BackupFlags),
}

/// Where this program's own runtime gets images from.
#[derive(Clone, Debug, Default, Args)]
pub struct RegistryFlags {
    /// Mirrors, certificates and passwords of registries [default: agent/registries.yaml in the data directory]
    #[arg(long)]
    pub private_registry: Option<PathBuf>,
    /// Do not ask a registry itself that has mirrors
    #[arg(long)]
    pub disable_default_registry_endpoint: bool,
}

impl RegistryFlags {
    /// The file with what there is to say about registries.
    pub fn file(&self, data_dir: &Path) -> PathBuf {
        self.private_registry.clone().unwrap_or_else(|| data_dir.join("agent/registries.yaml"))
    }
}

/// What a node is told, wherever its API server is.
#[derive(Clone, Debug, Args)]
pub struct NodeFlags {
    /// Where everything is kept
    #[arg(long, short = 'd', env = "SKIFF_DATA_DIR", default_value = DATA_DIR)]
    pub data_dir: PathBuf,
    /// The address other nodes reach this one at, or one of each family [default: the one that leads to the server]
    #[arg(long, short = 'i', value_delimiter = ',')]
    pub node_ip: Vec<IpAddr>,
    /// Do not hold pods of this node to NetworkPolicies; something else does
    #[arg(long)]
    pub disable_network_policy: bool,
    /// Do not route Services on this node, nor hold pods to NetworkPolicies; something else does
    #[arg(long)]
    pub disable_kube_proxy: bool,
    /// The socket of a CRI runtime to run pods with, or `containerd` for the host's or one started here [default: pods
    /// are run by this program itself]
    #[arg(long)]
    pub container_runtime_endpoint: Option<String>,
    /// Where a network for pods is looked for in CNI's words; without one they are on a bridge of this program's own
    #[arg(long, default_value = "/etc/cni/net.d")]
    pub cni_conf_dir: PathBuf,
    /// Where CNI's programs are
    #[arg(long, value_delimiter = ',', default_values = crate::containerd::NETWORK_PROGRAMS)]
    pub cni_bin_dir: Vec<PathBuf>,
    #[command(flatten)]
    pub registries: RegistryFlags,
    /// Which programs have passwords for which registries: a CredentialProviderConfig, or a directory of them
    #[arg(long, requires = "image_credential_provider_bin_dir")]
    pub image_credential_provider_config: Option<PathBuf>,
    /// Where those programs are
    #[arg(long, requires = "image_credential_provider_config")]
    pub image_credential_provider_bin_dir: Option<PathBuf>,
    /// The address this node serves logs and streams of its containers on
    #[arg(long, default_value = "0.0.0.0")]
    pub kubelet_address: IpAddr,
    /// The port for that; 0 takes a free one
    #[arg(long, default_value_t = 10250)]
    pub kubelet_port: u16,
    /// Whom this node asks for names, for pods that ask the same [default: /etc/resolv.conf, or where that names only this
    /// machine, systemd's /run/systemd/resolve/resolv.conf]
    #[arg(long, env = "SKIFF_RESOLV_CONF")]
    pub resolv_conf: Option<PathBuf>,
    /// Flags of upstream's kubelet, as `name=value`; `config=FILE` is a KubeletConfiguration
    #[arg(long)]
    pub kubelet_arg: Vec<String>,
    /// This node's name [default: the host's]
    #[arg(long, env = "SKIFF_NODE_NAME")]
    pub node_name: Option<String>,
    /// A label for this node, as `name=value`
    #[arg(long, value_parser = label)]
    pub node_label: Vec<(String, String)>,
    /// A taint for this node, as `name=value:NoSchedule`
    #[arg(long, value_parser = taint)]
    pub node_taint: Vec<(String, String, String)>,
}

#[derive(Clone, Debug, Args)]
pub struct ServerFlags {
    #[command(flatten)]
    pub node: NodeFlags,
    /// What nodes show to join: `id.secret`, or any word [default: made once, and kept in the file `token`]
    #[arg(long, env = "SKIFF_TOKEN", hide_env_values = true)]
    pub token: Option<String>,
    /// A YAML file with these same options, `data-dir: /x` for `--data-dir /x`; flags win over it
    #[arg(long, env = "SKIFF_CONFIG_FILE")]
    pub config: Option<PathBuf>,
    /// Merge the administrator's kubeconfig into this file [default: only admin.kubeconfig in the data directory is
    /// written]
    #[arg(long, short = 'o', env = "SKIFF_KUBECONFIG_OUTPUT")]
    pub write_kubeconfig: Option<PathBuf>,
    /// File mode for --write-kubeconfig [default: that of the existing file, else 600]
    #[arg(long, env = "SKIFF_KUBECONFIG_MODE", value_parser = octal)]
    pub write_kubeconfig_mode: Option<u32>,
    /// The address to listen on
    #[arg(long, default_value = "0.0.0.0")]
    pub bind_address: IpAddr,
    /// The port to listen on
    #[arg(long, default_value_t = 6443)]
    pub https_listen_port: u16,
    /// The address pods and nodes reach this server at [default: found by itself]
    #[arg(long)]
    pub advertise_address: Option<IpAddr>,
    /// Further names and addresses for the serving certificate
    #[arg(long, value_delimiter = ',')]
    pub tls_san: Vec<String>,
    /// The networks of pods, at most one of each family
    #[arg(long, value_delimiter = ',', default_value = "10.42.0.0/16")]
    pub cluster_cidr: Vec<String>,
    /// The networks of cluster IPs
    #[arg(long, value_delimiter = ',', default_value = "10.43.0.0/16")]
    pub service_cidr: Vec<String>,
    /// The ports that Services may open on nodes
    #[arg(long, default_value = "30000-32767", value_parser = port_range)]
    pub service_node_port_range: PortRange,
    /// The domain of cluster names
    #[arg(long, default_value = "cluster.local")]
    pub cluster_domain: String,
    /// etcd endpoints, separated by commas, instead of the embedded store
    #[arg(long, value_delimiter = ',', env = "SKIFF_DATASTORE_ENDPOINT")]
    pub datastore_endpoint: Vec<String>,
    /// The authority of etcd's certificates, in PEM
    #[arg(long, value_name = "FILE", env = "SKIFF_DATASTORE_CAFILE")]
    pub datastore_cafile: Option<PathBuf>,
    /// The certificate shown to etcd, in PEM
    #[arg(long, value_name = "FILE", env = "SKIFF_DATASTORE_CERTFILE", requires = "datastore_keyfile")]
    pub datastore_certfile: Option<PathBuf>,
    /// Its key, in PEM
    #[arg(long, value_name = "FILE", env = "SKIFF_DATASTORE_KEYFILE", requires = "datastore_certfile")]
    pub datastore_keyfile: Option<PathBuf>,
    /// Groups and versions to switch, as `batch/v1=false`
    #[arg(long, value_delimiter = ',')]
    pub runtime_config: Vec<String>,
    /// Flags of upstream's API server, as `name=value`; an unknown name is answered with those that have a
    /// meaning here
    #[arg(long)]
    pub kube_apiserver_arg: Vec<String>,
    /// Run the control plane without a node
    #[arg(long)]
    pub disable_agent: bool,
    /// The addresses pods ask for names [default: the tenth of the Services' networks]
    #[arg(long, value_delimiter = ',')]
    pub cluster_dns: Vec<IpAddr>,
    /// Run no controllers in this process
    #[arg(long)]
    pub disable_controller_manager: bool,
    /// The controllers to run: `*` is all, `-name` is all but that one
    #[arg(long, value_delimiter = ',', default_value = "*", allow_hyphen_values = true)]
    pub controllers: Vec<String>,
    /// Parts to do without: `dns` answers for names of the cluster, `ingress` leads to Services by host and path,
    /// `local-storage` makes volumes on nodes, `servicelb` leads to Services at the nodes' addresses
    #[arg(long, value_delimiter = ',', value_parser = ["dns", "ingress", "local-storage", "servicelb"])]
    pub disable: Vec<String>,
    /// The port of this node for Ingresses over HTTP; 0 for none
    #[arg(long, default_value_t = 80)]
    pub ingress_http_port: u16,
    /// The port of this node for Ingresses over HTTPS; 0 for none
    #[arg(long, default_value_t = 443)]
    pub ingress_https_port: u16,
    /// Where on nodes volumes of the built-in storage class are kept [default: storage in the data directory]
    #[arg(long)]
    pub default_local_storage_path: Option<PathBuf>,
    /// Addresses for Services of type LoadBalancer, as networks or ranges, instead of those of the nodes
    #[arg(long, value_delimiter = ',')]
    pub servicelb_pool: Vec<String>,
    #[command(flatten)]
    pub silence: SilenceFlags,
    /// Run no scheduler in this process
    #[arg(long)]
    pub disable_scheduler: bool,
    /// A KubeSchedulerConfiguration file for the scheduler in this process
    #[arg(long)]
    pub scheduler_config: Option<PathBuf>,
    /// Play this many nodes and the pods on them; nothing is really run
    #[arg(long, default_value_t = 0, hide_default_value = true)]
    pub simulate: u32,
}

#[derive(Debug, Args)]
pub struct AgentFlags {
    /// A YAML file with these same options, `data-dir: /x` for `--data-dir /x`; flags win over it
    #[arg(long, env = "SKIFF_CONFIG_FILE")]
    pub config: Option<PathBuf>,
    /// The server to join, as in https://server:6443
    #[arg(long, short = 's', env = "SKIFF_URL")]
    pub server: String,
    /// What lets this node join, from the file `token` in the server's data directory; not needed any more afterwards
    #[arg(long, short = 't', env = "SKIFF_TOKEN", hide_env_values = true)]
    pub token: Option<String>,
    /// A file with the token
    #[arg(long, env = "SKIFF_TOKEN_FILE", conflicts_with = "token")]
    pub token_file: Option<PathBuf>,
    /// The port of this node for Ingresses over HTTP, which are passed on to the server; 0 for none
    #[arg(long, default_value_t = 80)]
    pub ingress_http_port: u16,
    /// The port of this node for Ingresses over HTTPS, which are passed on to the server; 0 for none
    #[arg(long, default_value_t = 443)]
    pub ingress_https_port: u16,
    #[command(flatten)]
    pub node: NodeFlags,
}

#[derive(Debug, Args)]
pub struct KubeletFlags {
    /// Where the API server is and who to be there; written where it is missing and --bootstrap-kubeconfig is given
    #[arg(long, env = "KUBECONFIG")]
    pub kubeconfig: PathBuf,
    /// By whom to ask for a certificate where the kubeconfig is missing or its own has ended
    #[arg(long)]
    pub bootstrap_kubeconfig: Option<PathBuf>,
    /// Where certificates are kept that were asked for [default: pki where the kubelet keeps everything]
    #[arg(long)]
    pub cert_dir: Option<PathBuf>,
    /// Ask for another certificate as a client before this one ends [default: with --bootstrap-kubeconfig]
    #[arg(long)]
    pub rotate_certificates: bool,
    /// Ask for a certificate to serve with until somebody signs it
    #[arg(long)]
    pub rotate_server_certificates: bool,
    /// Who vouches for clients of this node [default: those of the kubeconfig]
    #[arg(long)]
    pub client_ca_file: Option<PathBuf>,
    /// The certificate to serve with [default: asked for from the cluster, else made]
    #[arg(long, requires = "tls_private_key_file")]
    pub tls_cert_file: Option<PathBuf>,
    /// Its key
    #[arg(long, requires = "tls_cert_file")]
    pub tls_private_key_file: Option<PathBuf>,
    /// Where pods ask for names
    #[arg(long, value_delimiter = ',')]
    pub cluster_dns: Vec<IpAddr>,
    /// What the names of Services end in
    #[arg(long, default_value = "cluster.local")]
    pub cluster_domain: String,
    #[command(flatten)]
    pub node: NodeFlags,
}

#[derive(Debug, Args)]
pub struct RuntimeFlags {
    /// Where everything is kept
    #[arg(long, short = 'd', env = "SKIFF_DATA_DIR", default_value = "/var/lib/skiff")]
    pub data_dir: PathBuf,
    /// Where to listen [default: agent/cri.sock in the data directory]
    #[arg(long)]
    pub socket: Option<PathBuf>,
    /// The addresses of this node's pods, as long as no kubelet says others
    #[arg(long, value_delimiter = ',', default_value = "10.42.0.0/24")]
    pub pod_cidr: Vec<String>,
    /// The networks of all pods: what leaves them is masqueraded
    #[arg(long, value_delimiter = ',', default_value = "10.42.0.0/16")]
    pub cluster_cidr: Vec<String>,
    /// Where a network for pods is looked for in CNI's words; without one they are on a bridge of this program's own
    #[arg(long, default_value = "/etc/cni/net.d")]
    pub cni_conf_dir: PathBuf,
    /// Where CNI's programs are
    #[arg(long, value_delimiter = ',', default_values = crate::containerd::NETWORK_PROGRAMS)]
    pub cni_bin_dir: Vec<PathBuf>,
    #[command(flatten)]
    pub registries: RegistryFlags,
}

#[derive(Debug, Args)]
pub struct SimulateFlags {
    /// Where the API server is and who to be there
    #[arg(long, env = "KUBECONFIG")]
    pub kubeconfig: PathBuf,
    /// How many nodes to play
    #[arg(long, default_value_t = 1)]
    pub nodes: u32,
    /// Record the events a kubelet would
    #[arg(long, default_value_t = true, action = clap::ArgAction::Set)]
    pub events: bool,
}

#[derive(Debug, Args)]
pub struct DevFlags {
    /// How many nodes, the server's among them
    #[arg(long, default_value_t = 1, value_parser = clap::value_parser!(u8).range(1..=100))]
    pub nodes: u8,
    /// Where everything is kept as long as the cluster lasts
    #[arg(long, short = 'd', default_value = "/var/lib/skiff-dev")]
    pub data_dir: PathBuf,
    /// The network between the nodes
    #[arg(long, default_value = "10.212.0.0/24")]
    pub network: podnet::Cidr,
    /// Let this machine route between the nodes instead of giving them a common link
    #[arg(long)]
    pub routed: bool,
    /// An archive with images that all nodes get
    #[arg(long)]
    pub image: Vec<PathBuf>,
    /// An argument for the server alone, as in `--server-arg=--disable=dns`
    #[arg(long, allow_hyphen_values = true)]
    pub server_arg: Vec<String>,
    /// Remove such a cluster that was left behind, or that another process has made
    #[arg(long)]
    pub remove: bool,
    /// Arguments for all nodes
    #[arg(last = true)]
    pub rest: Vec<String>,
}

#[derive(Debug, Args)]
pub struct ResetFlags {
    /// The data directory of the server or the agent
    #[arg(long, short = 'd', env = "SKIFF_DATA_DIR", default_value = "/var/lib/skiff")]
    pub data_dir: PathBuf,
    /// Remove the data directory too, with all that was in the cluster
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
    /// Where the API server is and who to be there [default: admin.kubeconfig in the data directory]
    #[arg(long, env = "KUBECONFIG", global = true)]
    pub kubeconfig: Option<PathBuf>,
    /// The server's data directory
    #[arg(long, short = 'd', env = "SKIFF_DATA_DIR", default_value = DATA_DIR, global = true)]
    pub data_dir: PathBuf,
    #[command(subcommand)]
    pub action: TokenAction,
}

#[derive(Debug, Subcommand)]
pub enum TokenAction {
    /// Make a token and print it
    Create {
        /// How long it lets nodes in; 0 for as long as it is not deleted
        #[arg(long, value_name = "TIME", default_value = "24h", value_parser = duration)]
        ttl: SignedDuration,
        /// What it is for
        #[arg(long, default_value = "")]
        description: String,
        /// Print the command by which a node joins instead
        #[arg(long)]
        print_join_command: bool,
    },
    /// List tokens, without what is secret of them
    #[command(visible_alias = "ls")]
    List,
    /// Delete tokens; nodes that have joined with them stay
    #[command(visible_alias = "rm")]
    Delete {
        /// The tokens, or what is before the dot in them
        #[arg(required = true)]
        tokens: Vec<String>,
    },
}

#[derive(Debug, Args)]
pub struct BackupFlags {
    /// The backup file
    pub file: PathBuf,
    /// The server's data directory
    #[arg(long, short = 'd', env = "SKIFF_DATA_DIR", default_value = DATA_DIR)]
    pub data_dir: PathBuf,
}

#[derive(Debug, Args)]
pub struct ImageFlags {
    /// The socket of a CRI runtime, or `containerd` [default: the one that the node with this data directory has]
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
    /// Load the images of archives, as `docker save` writes them or in OCI's layout
    Import {
        #[arg(required = true)]
        files: Vec<PathBuf>,
    },
    /// Write images into one archive
    Export {
        /// The archive
        file: PathBuf,
        #[arg(required = true)]
        names: Vec<String>,
    },
    /// Remove the pieces of images that are gone; with --all also all images that no container uses
    Gc {
        #[arg(long)]
        all: bool,
    },
    /// List images
    Ls,
    /// Fetch images from their registries
    Pull {
        #[command(flatten)]
        registries: RegistryFlags,
        #[arg(required = true)]
        names: Vec<String>,
    },
    /// Remove images
    Rm {
        #[arg(required = true)]
        names: Vec<String>,
    },
}
