//! The configuration of this process' node: its kubelet, its runtime and the paths of its state.

use std::io::ErrorKind;
use std::net::{IpAddr, SocketAddr};
use std::os::unix::fs::DirBuilderExt as _;
use std::path::{Path, PathBuf};
use std::sync::Arc;

use anyhow::Context as _;
use kubelet::{Config, KubeletServer, NodeRegistration, Settings};
use podnet::HostPort;
use runtime::embedded::Cni;
use runtime::{Embedded, Remote, Runtime};
use tokio::sync::watch;

use crate::address::{self, AddressReceiver};
use crate::certificates::KUBELET_CLIENT;
use crate::cluster_info::ClusterInfo;
use crate::containerd;
use crate::flags::{NodeFlags, RegistryFlags, RuntimeFlags};
use crate::host_state;
use crate::kubelet_config;
use crate::reset;
use crate::running;
use crate::server::{create_private_dir, shutdown_signal};
use crate::services;
use crate::threads::runtime_builder;

/// The default of upstream.
const MAX_PODS: u32 = 110;

/// Value of --container-runtime-endpoint for the host's containerd, or one started by skiff.
pub const CONTAINERD_ENDPOINT: &str = "containerd";

/// Directory of the embedded runtime's pods and images.
pub fn runtime_dir(data_dir: &Path) -> PathBuf {
    data_dir.join("agent/runtime")
}

/// Whether this process is able to run pods. Logs a warning if not.
pub fn can_run_pods(flags: &NodeFlags) -> bool {
    let can_run = flags.container_runtime_endpoint.is_some() || rustix::process::geteuid().is_root();
    if !can_run {
        tracing::warn!(
            "pods stay pending: run as root, set --container-runtime-endpoint, or use --disable-agent"
        );
    }
    can_run
}

/// The container runtime of this node: the configured endpoint, else the embedded one.
pub async fn runtime(
    flags: &NodeFlags,
    host_ports: watch::Sender<Vec<HostPort>>,
    shutdown: watch::Receiver<bool>,
) -> anyhow::Result<Arc<dyn Runtime>> {
    let data_dir = &flags.data_dir;
    let configured = kubelet_config::endpoint(&flags.kubelet_arg)?;
    let endpoint = flags.container_runtime_endpoint.clone().or(configured);
    record_runtime_endpoint(data_dir, endpoint.as_deref())?;
    let socket = match endpoint {
        Some(name) if name == CONTAINERD_ENDPOINT => {
            let found = containerd::ensure_running(data_dir, shutdown).await?;
            let socket = found.context("containerd neither runs nor is installed")?;
            record_runtime_endpoint(data_dir, Some(&socket))?;
            socket
        }
        Some(socket) => socket,
        None => {
            let (conf_dir, bin_dirs) = (flags.cni_conf_dir.clone(), flags.cni_bin_dir.clone());
            let config = embedded_config(data_dir, Cni { conf_dir, bin_dirs }, &flags.registries)?;
            let own = Embedded::open(runtime::embedded::Config { host_ports, ..config }).await?;
            serve_cri(&own, data_dir, shutdown);
            return Ok(Arc::new(own));
        }
    };
    Ok(Arc::new(Remote::new(&socket)))
}

/// `skiff runtime`: the embedded runtime as a CRI server. Pods keep running after it exits.
pub fn run_runtime(flags: &RuntimeFlags) -> anyhow::Result<()> {
    runtime_builder().build()?.block_on(async {
        create_private_dir(&flags.data_dir)?;
        let _lock = reset::lock(&flags.data_dir)?;
        running::register("runtime", Some(&flags.data_dir));
        record_host_state(&flags.data_dir);
        let (conf_dir, bin_dirs) = (flags.cni_conf_dir.clone(), flags.cni_bin_dir.clone());
        let range =
            |text: &String| text.parse().map_err(|error: String| anyhow::anyhow!("{text:?}: {error}"));
        let ranges = flags.pod_cidr.iter().map(range).collect::<anyhow::Result<_>>()?;
        let config = embedded_config(&flags.data_dir, Cni { conf_dir, bin_dirs }, &flags.registries)?;
        let config = runtime::embedded::Config { ranges, ..config };
        let table = services::proxy_config(String::new(), &flags.cluster_cidr, &[])?;
        let ports = Some(config.host_ports.subscribe());
        let bridge = Some(kubelet::network::BRIDGE);
        let table = proxy::Config {
            masquerade_outgoing: true,
            accept_in_host_firewall: true,
            bridge,
            ports,
            ..table
        };
        let own = Embedded::open(config).await?;
        let socket = flags.socket.clone().unwrap_or_else(|| flags.data_dir.join("agent/cri.sock"));
        let listener = runtime::embedded::listen(&socket)
            .with_context(|| format!("cannot listen at {}", socket.display()))?;
        proxy::enable_forwarding(&table.pods);
        tracing::info!(socket = %socket.display(), "ready");
        tokio::select! {
            () = runtime::embedded::serve(own, listener) => {}
            () = proxy::run_standalone(table, Arc::new(proxy::NetlinkFirewall::default())) => {}
            () = shutdown_signal() => {}
        }
        Ok(())
    })
}

/// The file that records the endpoint of a runtime other than the embedded one.
fn runtime_endpoint_file(data_dir: &Path) -> PathBuf {
    data_dir.join("agent/runtime-endpoint")
}

/// Records which runtime this node uses, for [`recorded_runtime_endpoint`].
fn record_runtime_endpoint(data_dir: &Path, endpoint: Option<&str>) -> anyhow::Result<()> {
    let (path, write_error) =
        (runtime_endpoint_file(data_dir), |path: &Path| format!("cannot write {}", path.display()));
    let Some(endpoint) = endpoint else {
        return match std::fs::remove_file(&path) {
            Err(error) if error.kind() != ErrorKind::NotFound => {
                Err(error).with_context(|| write_error(&path))
            }
            _ => Ok(()),
        };
    };
    // The reader may have another working directory.
    let is_path = endpoint != CONTAINERD_ENDPOINT && !endpoint.contains("://");
    let full = is_path.then(|| std::path::absolute(endpoint)).transpose()?;
    let text = full.map_or(endpoint.to_owned(), |full| full.display().to_string());
    let temporary = path.with_extension("new");
    std::fs::create_dir_all(data_dir.join("agent")).with_context(|| write_error(&path))?;
    std::fs::write(&temporary, text + "\n").with_context(|| write_error(&temporary))?;
    std::fs::rename(&temporary, &path).with_context(|| write_error(&path))
}

/// The runtime of the node with this data directory when it last ran: a socket or `containerd`, or
/// `None` for the embedded one.
pub fn recorded_runtime_endpoint(data_dir: &Path) -> anyhow::Result<Option<String>> {
    let path = runtime_endpoint_file(data_dir);
    match std::fs::read_to_string(&path) {
        Ok(text) => Ok(Some(text.trim_end().to_owned())),
        Err(error) if error.kind() == ErrorKind::NotFound => Ok(None),
        Err(error) => Err(error).with_context(|| format!("cannot read {}", path.display())),
    }
}

/// Serves the embedded runtime over CRI for `crictl` and similar tools. It costs nothing while unused.
fn serve_cri(own: &Embedded, data_dir: &Path, mut shutdown: watch::Receiver<bool>) {
    let socket = data_dir.join("agent/cri.sock");
    let listener = match runtime::embedded::listen(&socket) {
        Ok(listener) => listener,
        Err(error) => {
            return tracing::warn!(%error, socket = %socket.display(), "cannot listen on the CRI socket");
        }
    };
    let own = own.clone();
    tokio::spawn(async move {
        tokio::select! {
            () = runtime::embedded::serve(own, listener) => {}
            _ = shutdown.wait_for(|stop| *stop) => {}
        }
    });
}

/// The configuration of the embedded runtime.
pub fn embedded_config(
    data_dir: &Path,
    cni: Cni,
    registries: &RegistryFlags,
) -> anyhow::Result<runtime::embedded::Config> {
    // Supervisors have another working directory.
    let data_dir =
        std::path::absolute(data_dir).context("cannot determine the absolute path of the data directory")?;
    Ok(runtime::embedded::Config {
        root: runtime_dir(&data_dir),
        program: "/proc/self/exe".into(),
        bridge: kubelet::network::BRIDGE.to_owned(),
        // Set by the kubelet when the node has its pod CIDRs.
        ranges: Vec::new(),
        cni,
        registries: registries.file(&data_dir),
        mirrors_only: registries.disable_default_registry_endpoint,
        seccomp_profiles: data_dir.join("agent/seccomp"),
        host_ports: watch::Sender::default(),
    })
}

/// TLS credentials of the kubelet API.
pub struct ServingCredentials {
    pub serving: Arc<pki::ServingCertificate>,
    pub authority: pki::ClientAuthority,
}

/// The name of this node.
pub fn name(flags: &NodeFlags) -> String {
    match &flags.node_name {
        Some(name) => name.clone(),
        None => rustix::system::uname().nodename().to_string_lossy().to_lowercase(),
    }
}

/// The addresses from --node-ip: the first one, and one of the other IP family.
pub fn node_ips(flags: &NodeFlags) -> anyhow::Result<(Option<IpAddr>, Option<IpAddr>)> {
    match flags.node_ip[..] {
        [] => Ok((None, None)),
        [one] => Ok((Some(one), None)),
        [one, other] if one.is_ipv4() != other.is_ipv4() => Ok((Some(one), Some(other))),
        _ => anyhow::bail!("--node-ip must be one address, or one of each family"),
    }
}

pub fn config(
    flags: &NodeFlags,
    cluster_info: &ClusterInfo,
    address: AddressReceiver,
    credentials: ServingCredentials,
) -> anyhow::Result<Config> {
    record_host_state(&flags.data_dir);
    let bind = SocketAddr::new(flags.kubelet_address, flags.kubelet_port);
    let listener = address::listen(bind)?;
    let port = listener.local_addr()?.port();
    let pods = pods_dir(&flags.data_dir);
    std::fs::create_dir_all(&pods).with_context(|| format!("cannot create {}", pods.display()))?;
    // Resolves symlinks, because the kernel lists mounts by their real paths.
    let pods = std::fs::canonicalize(&pods).with_context(|| format!("cannot find {}", pods.display()))?;
    let taints = flags.node_taint.iter().map(|(key, value, effect)| kubelet::Taint {
        key: key.clone(),
        value: Some(value.clone()).filter(|value| !value.is_empty()),
        effect: effect.clone(),
        ..kubelet::Taint::default()
    });
    let (all_seconds, critical_seconds) = kubelet::DEFAULT_SHUTDOWN_SECONDS;
    let mut config = Config {
        settings: Settings {
            node_name: name(flags),
            node_ip: address,
            second_ip: node_ips(flags)?.1,
            pods,
            root: kubelet_root(&flags.data_dir),
            logs: logs(&flags.data_dir),
            cluster_domain: cluster_info.cluster_domain.clone(),
            cluster_dns: cluster_info.cluster_dns.iter().map(ToString::to_string).collect(),
            resolver: kubelet::ResolverConfig::default(),
            memory: memory()?,
            kubelet_config: kubelet::KubeletConfig::default(),
            shutdown: kubelet::periods(all_seconds, critical_seconds),
            is_shutdown_default: true,
            manifests: None,
            proxied: !flags.disable_kube_proxy,
        },
        presentation: NodeRegistration {
            labels: flags.node_label.iter().cloned().collect(),
            taints: taints.collect(),
            max_pods: MAX_PODS,
            port,
            ..NodeRegistration::default()
        },
        api: Some(KubeletServer {
            listener,
            serving: credentials.serving,
            authority: credentials.authority,
            api_server_user: KUBELET_CLIENT.to_owned(),
        }),
        object_manager: None,
        host_shutdown: kubelet::HostShutdown::default(),
    };
    // If a flag is given twice, the last value applies, so --resolv-conf comes first.
    let resolv_conf = flags.resolv_conf.iter().map(|path| format!("resolv-conf={}", path.display()));
    let mut arguments: Vec<String> = resolv_conf.chain(flags.kubelet_arg.iter().cloned()).collect();
    for (name, path) in [
        ("image-credential-provider-config", &flags.image_credential_provider_config),
        ("image-credential-provider-bin-dir", &flags.image_credential_provider_bin_dir),
    ] {
        arguments.extend(path.iter().map(|path| format!("{name}={}", path.display())));
    }
    kubelet_config::apply(&arguments, &mut config)?;
    let kubelet::PodLogs { own, dir, .. } = &config.settings.logs;
    for dir in [own, dir] {
        let created = std::fs::DirBuilder::new().recursive(true).mode(0o750).create(dir);
        created.with_context(|| format!("cannot create {}", dir.display()))?;
    }
    [&config.settings.pods, dir].into_iter().for_each(|dir| sys::trees::set_topdir_flag(dir));
    Ok(config)
}

/// Records the state of the host that this node is about to change, for `skiff reset`.
fn record_host_state(data_dir: &Path) {
    const SYSCTLS: [&str; 4] = [
        "net/ipv4/ip_forward",
        "net/ipv6/conf/all/forwarding",
        "net/bridge/bridge-nf-call-iptables",
        "net/bridge/bridge-nf-call-ip6tables",
    ];
    let root = kubelet_root(data_dir);
    // Directories inside the data directory need no record: they are removed with it.
    let outside = Some(&*root).filter(|root| !root.starts_with(data_dir));
    if let Err(error) = host_state::record(data_dir, &SYSCTLS, outside) {
        tracing::warn!(error = format!("{error:#}"), "skiff reset will not restore sysctls of this host");
    }
}

/// Directory of the pods' volumes and other files.
pub fn pods_dir(data_dir: &Path) -> PathBuf {
    data_dir.join("agent/pods")
}

/// The log directories: the standard ones with the default data directory, else directories in the data
/// directory, so that several nodes can run on one host.
pub fn logs(data_dir: &Path) -> kubelet::PodLogs {
    let own = std::path::absolute(data_dir).unwrap_or_else(|_| data_dir.to_owned()).join("agent/logs");
    match data_dir == Path::new(crate::flags::DATA_DIR) {
        true => {
            kubelet::PodLogs { own, dir: "/var/log/pods".into(), links: Some("/var/log/containers".into()) }
        }
        false => kubelet::PodLogs::within(own),
    }
}

/// The root directory of the kubelet for CSI drivers and volumes: the standard one with the default
/// data directory, else a directory in the data directory.
pub fn kubelet_root(data_dir: &Path) -> PathBuf {
    match data_dir == Path::new(crate::flags::DATA_DIR) {
        true => PathBuf::from("/var/lib/kubelet"),
        false => std::path::absolute(data_dir).unwrap_or_else(|_| data_dir.to_owned()).join("agent/kubelet"),
    }
}

/// The total memory of this host in bytes.
fn memory() -> anyhow::Result<i64> {
    let text = std::fs::read_to_string("/proc/meminfo").context("cannot read /proc/meminfo")?;
    let line = text.lines().find_map(|line| line.strip_prefix("MemTotal:"));
    let total_kib =
        line.and_then(|line| line.split_whitespace().next()).and_then(|number| number.parse::<i64>().ok());
    Ok(total_kib.context("/proc/meminfo has no MemTotal")? * 1024)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn only_default_data_dir_uses_standard_paths() {
        let check = |data_dir: &str, dir: &str, links: Option<&str>, root: &str| {
            let found = logs(Path::new(data_dir));
            assert_eq!(found.own, Path::new(data_dir).join("agent/logs"));
            assert_eq!((found.dir, found.links), (dir.into(), links.map(PathBuf::from)));
            assert_eq!(kubelet_root(Path::new(data_dir)), Path::new(root));
        };
        check("/var/lib/skiff", "/var/log/pods", Some("/var/log/containers"), "/var/lib/kubelet");
        check("/data", "/data/agent/logs", None, "/data/agent/kubelet");
    }

    #[test]
    fn records_and_reads_runtime_endpoint() {
        let dir = tempfile::tempdir().unwrap();
        let check = |endpoint: Option<&str>, expected: Option<&str>| {
            record_runtime_endpoint(dir.path(), endpoint).unwrap();
            assert_eq!(recorded_runtime_endpoint(dir.path()).unwrap().as_deref(), expected);
        };
        check(None, None);
        check(Some("containerd"), Some("containerd"));
        check(Some("unix:///run/crio/crio.sock"), Some("unix:///run/crio/crio.sock"));
        check(Some("/run/c.sock"), Some("/run/c.sock"));
        let here = std::env::current_dir().unwrap().join("c.sock").display().to_string();
        check(Some("c.sock"), Some(&here));
        check(None, None);
    }
}
