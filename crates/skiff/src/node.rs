//! How the node of this process presents itself and where it keeps what.

use std::net::{IpAddr, SocketAddr, TcpListener};
use std::sync::Arc;

use anyhow::Context as _;
use kubelet::{Api, Config, Presentation, Settings};

use crate::certificates::KUBELET_CLIENT;
use crate::flags::ServerFlags;
use crate::services;

/// Upstream's default.
const MAX_PODS: u32 = 110;

/// What the node's API needs besides a place to listen.
pub struct Credentials {
    pub serving: Arc<pki::Serving>,
    pub authority: pki::ClientAuthority,
}

/// This node's name.
pub fn name(flags: &ServerFlags) -> String {
    match &flags.node_name {
        Some(name) => name.clone(),
        None => rustix::system::uname().nodename().to_string_lossy().to_lowercase(),
    }
}

pub fn config(
    flags: &ServerFlags,
    address: Option<IpAddr>,
    credentials: Credentials,
) -> anyhow::Result<Config> {
    let bind = SocketAddr::new(flags.kubelet_address, flags.kubelet_port);
    let listener = TcpListener::bind(bind).with_context(|| format!("cannot listen on {bind}"))?;
    let port = listener.local_addr()?.port();
    let pods = flags.data_dir.join("agent/pods");
    let logs = flags.data_dir.join("agent/logs");
    for dir in [&pods, &logs] {
        std::fs::create_dir_all(dir).with_context(|| format!("cannot make {}", dir.display()))?;
    }
    let taints = flags.node_taint.iter().map(|(key, value, effect)| kubelet::Taint {
        key: key.clone(),
        value: Some(value.clone()).filter(|value| !value.is_empty()),
        effect: effect.clone(),
        ..kubelet::Taint::default()
    });
    Ok(Config {
        settings: Settings {
            node_name: name(flags),
            node_ip: address.map_or_else(|| "127.0.0.1".to_owned(), |address| address.to_string()),
            pods,
            logs,
            cluster_domain: flags.cluster_domain.clone(),
            cluster_dns: services::dns_addresses(flags)?.iter().map(ToString::to_string).collect(),
            host_dns: kubelet::host_dns(),
            memory: memory()?,
        },
        presentation: Presentation {
            labels: flags.node_label.iter().cloned().collect(),
            taints: taints.collect(),
            max_pods: MAX_PODS,
            port,
        },
        api: Some(Api {
            listener,
            serving: credentials.serving,
            authority: credentials.authority,
            user: KUBELET_CLIENT.to_owned(),
        }),
    })
}

/// The memory of this machine in bytes.
fn memory() -> anyhow::Result<i64> {
    let text = std::fs::read_to_string("/proc/meminfo").context("cannot read /proc/meminfo")?;
    let line = text.lines().find_map(|line| line.strip_prefix("MemTotal:"));
    let kibibytes =
        line.and_then(|line| line.split_whitespace().next()).and_then(|number| number.parse::<i64>().ok());
    Ok(kibibytes.context("/proc/meminfo does not say how much memory there is")? * 1024)
}
