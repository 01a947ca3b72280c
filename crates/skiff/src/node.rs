//! How the node of this process presents itself and where it keeps what.

use std::net::IpAddr;

use anyhow::Context as _;
use kubelet::{Config, Presentation, Settings};

use crate::flags::ServerFlags;

/// Upstream's default.
const MAX_PODS: u32 = 110;
const PORT: u16 = 10250;

pub fn config(flags: &ServerFlags, address: Option<IpAddr>) -> anyhow::Result<Config> {
    let pods = flags.data_dir.join("agent/pods");
    let logs = flags.data_dir.join("agent/logs");
    for dir in [&pods, &logs] {
        std::fs::create_dir_all(dir).with_context(|| format!("cannot make {}", dir.display()))?;
    }
    let node_name = match &flags.node_name {
        Some(name) => name.clone(),
        None => rustix::system::uname().nodename().to_string_lossy().to_lowercase(),
    };
    let taints = flags.node_taint.iter().map(|(key, value, effect)| kubelet::Taint {
        key: key.clone(),
        value: Some(value.clone()).filter(|value| !value.is_empty()),
        effect: effect.clone(),
        ..kubelet::Taint::default()
    });
    Ok(Config {
        settings: Settings {
            node_name,
            node_ip: address.map_or_else(|| "127.0.0.1".to_owned(), |address| address.to_string()),
            pods,
            logs,
            cluster_domain: flags.cluster_domain.clone(),
            cluster_dns: flags.cluster_dns.iter().map(ToString::to_string).collect(),
            host_dns: kubelet::host_dns(),
            memory: memory()?,
        },
        presentation: Presentation {
            labels: flags.node_label.iter().cloned().collect(),
            taints: taints.collect(),
            max_pods: MAX_PODS,
            port: PORT,
        },
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
