//! Pod networks: a routed link that skiff sets up itself, or the CNI network that the administrator has
//! configured.

mod restore;

use std::collections::BTreeMap;
use std::path::{Path, PathBuf};

use podnet::cni::{self, CniPlugins, RuntimeConf};
use podnet::{Address, Attachment, Bandwidth};
use schema::quantity::Quantity;
use serde_json::{Map, Value, json};

use super::pods::Pod;
use super::{Embedded, call_error, error_chain, link_name, supervisor_client, translate};
use crate::Result;
use crate::cri::*;

/// Skiff writes this file for other runtimes. It does not count as a configured network.
const SKIFF_CNI_CONFIG: &str = "10-skiff.conflist";
const INGRESS_ANNOTATION: &str = "kubernetes.io/ingress-bandwidth";
const EGRESS_ANNOTATION: &str = "kubernetes.io/egress-bandwidth";
/// Limits of the bandwidth annotations, in bits per second. Upstream counterpart: `pkg/util/bandwidth`.
const MIN_BANDWIDTH_BITS: i64 = 1_000;
const MAX_BANDWIDTH_BITS: i64 = 1_000_000_000_000_000;
/// As in containerd: bursts are not limited.
const BURST_BYTES: u64 = u32::MAX as u64;

/// CNI directories.
#[derive(Clone, Debug, Default)]
pub struct Cni {
    /// The first valid configuration in this directory is used for all pods. Without one, pods have
    /// routed links.
    pub conf_dir: PathBuf,
    /// Directories of CNI plugins.
    pub bin_dirs: Vec<PathBuf>,
}

/// The network of a new pod.
pub enum PodNetwork {
    Host,
    Own(Attachment),
    Cni(cni::Network, Map<String, Value>),
}

impl PodNetwork {
    /// The attachment that the pod's supervisor sets up.
    pub fn attachment(&self) -> Option<&Attachment> {
        match self {
            PodNetwork::Own(attachment) => Some(attachment),
            _ => None,
        }
    }
}

impl Embedded {
    fn cni_plugins(&self) -> CniPlugins {
        let config = &self.inner.config;
        CniPlugins { dirs: config.cni.bin_dirs.clone(), cache: config.root.join("cni") }
    }

    fn configured_network(&self) -> std::result::Result<Option<cni::Network>, cni::CniError> {
        cni::load(&self.inner.config.cni.conf_dir, &[SKIFF_CNI_CONFIG])
    }

    /// Why pods cannot get a network at the moment.
    pub(super) fn network_error(&self) -> Option<String> {
        match self.configured_network() {
            Ok(Some(_)) => None,
            Ok(None) if self.inner.ranges.read().is_empty() => Some("node has no pod CIDR yet".to_owned()),
            Ok(None) => None,
            Err(error) => Some(error_chain(&error)),
        }
    }

    /// Selects the network of a new pod. For a routed link, its addresses are allocated.
    pub(super) fn select_network(
        &self,
        id: &str,
        config: &PodSandboxConfig,
    ) -> std::result::Result<PodNetwork, String> {
        if translate::namespaces(config).network() == NamespaceMode::Node {
            return Ok(PodNetwork::Host);
        }
        let bandwidth = bandwidth(&config.annotations)
            .map_err(|why| format!("failed to get bandwidth info from annotations: {why}"))?;
        match self.configured_network().map_err(|error| error_chain(&error))? {
            Some(network) => Ok(PodNetwork::Cni(network, capabilities(config, bandwidth))),
            None => self.attachment(id, bandwidth).map(PodNetwork::Own).map_err(|error| error_chain(&error)),
        }
    }

    fn attachment(&self, id: &str, bandwidth: Bandwidth) -> std::result::Result<Attachment, podnet::Error> {
        let ranges = self.inner.ranges.read().clone();
        if ranges.is_empty() {
            return Err(podnet::Error::NoRange);
        }
        let bridge = self.inner.config.bridge.clone();
        podnet::prepare(&bridge, &ranges)?;
        let taken = self.inner.pool.allocate(&ranges, id)?;
        let address = |(ip, range): (std::net::IpAddr, &podnet::Cidr)| Address {
            ip,
            prefix: range.prefix(),
            gateway: range.gateway(),
        };
        let addresses = taken.into_iter().zip(&ranges).map(address).collect();
        Ok(Attachment { link: link_name(id), bridge, addresses, bandwidth })
    }

    /// Attaches a pod with CNI plugins and returns its addresses. The pod's supervisor is running, but
    /// no container.
    pub(super) async fn attach_by_cni(
        &self,
        pod: &Pod,
        network: cni::Network,
        capabilities: Map<String, Value>,
    ) -> std::result::Result<Vec<String>, String> {
        let metadata =
            pod.record.lock().config.clone().and_then(|config| config.metadata).unwrap_or_default();
        let pid =
            supervisor_client::supervisor_pid(&pod.directory).await.map_err(|error| error.to_string())?;
        let (plugins, id) = (self.cni_plugins(), pod.id.clone());
        let args = [
            ("IgnoreUnknown", "1".to_owned()),
            ("K8S_POD_NAMESPACE", metadata.namespace),
            ("K8S_POD_NAME", metadata.name),
            ("K8S_POD_INFRA_CONTAINER_ID", id.clone()),
            ("K8S_POD_UID", metadata.uid),
        ];
        let added = tokio::task::spawn_blocking(move || {
            let to = RuntimeConf {
                id: &id,
                namespace: Some(format!("/proc/{pid}/ns/net").into()),
                args: args.into_iter().map(|(name, value)| (name.to_owned(), value)).collect(),
                capabilities,
            };
            plugins.add(&network, &to)
        });
        let added = added.await.map_err(|error| error.to_string())?;
        let addresses = added.map_err(|error| error_chain(&error))?;
        Ok(addresses.iter().map(ToString::to_string).collect())
    }

    /// Detaches a pod with CNI plugins, if it was attached by them.
    pub(super) async fn detach_by_cni(&self, id: &str, directory: &Path, is_alive: bool) -> Result<()> {
        let (plugins, owned) = (self.cni_plugins(), id.to_owned());
        if !plugins.cached_ids().contains(&owned) {
            return Ok(());
        }
        // A stopped pod has no network namespace, and its PID may have been reused.
        let pid = match is_alive {
            true => supervisor_client::supervisor_pid(directory).await.ok(),
            false => None,
        };
        let namespace = pid.map(|pid| format!("/proc/{pid}/ns/net").into());
        let deleted = tokio::task::spawn_blocking(move || plugins.delete(&owned, namespace)).await;
        let failed = |why: String| {
            call_error("StopPodSandbox", format!("failed to destroy network for sandbox {id:?}: {why}"))
        };
        deleted.map_err(|error| failed(error.to_string()))?.map_err(|error| failed(error_chain(&error)))
    }

    /// The result of CNI's CHECK; `None` for a pod that was not attached by CNI.
    pub(super) async fn check_by_cni(&self, pod: &Pod) -> Option<std::result::Result<(), String>> {
        let plugins = self.cni_plugins();
        if !plugins.cached_ids().contains(&pod.id) {
            return None;
        }
        let (id, pid) = (pod.id.clone(), supervisor_client::supervisor_pid(&pod.directory).await.ok()?);
        let checked = tokio::task::spawn_blocking(move || {
            let namespace = format!("/proc/{pid}/ns/net");
            plugins.check(&id, namespace.as_ref()).map_err(|error| error_chain(&error))
        });
        checked.await.ok()
    }

    /// Detaches pods that no longer exist from CNI networks.
    pub(super) fn detach_removed_by_cni(&self, known: &std::collections::BTreeSet<String>) {
        let plugins = self.cni_plugins();
        let removed: Vec<String> =
            plugins.cached_ids().into_iter().filter(|id| !known.contains(id)).collect();
        if removed.is_empty() {
            return;
        }
        // In the background. What fails is retried at the next start of skiff.
        tokio::task::spawn_blocking(move || {
            for id in removed {
                let _ = plugins.delete(&id, None);
            }
        });
    }
}

/// The CNI capability arguments (`runtimeConfig`), for plugins that declare the capability.
fn capabilities(config: &PodSandboxConfig, bandwidth: Bandwidth) -> Map<String, Value> {
    let mut capability_args = Map::new();
    let ports = config.port_mappings.iter().filter(|port| port.host_port > 0).map(|port| {
        let protocol = match port.protocol() {
            Protocol::Tcp => "tcp",
            Protocol::Udp => "udp",
            Protocol::Sctp => "sctp",
        };
        json!({
            "hostPort": port.host_port, "containerPort": port.container_port, "protocol": protocol,
            "hostIP": port.host_ip,
        })
    });
    let ports: Vec<Value> = ports.collect();
    if !ports.is_empty() {
        capability_args.insert("portMappings".to_owned(), ports.into());
    }
    if bandwidth != Bandwidth::default() {
        let mut limits = Map::new();
        for (name, rate) in [("ingress", bandwidth.ingress), ("egress", bandwidth.egress)] {
            if rate > 0 {
                limits.insert(format!("{name}Rate"), rate.into());
                limits.insert(format!("{name}Burst"), BURST_BYTES.into());
            }
        }
        capability_args.insert("bandwidth".to_owned(), limits.into());
    }
    if let Some(dns) = &config.dns_config {
        let dns = json!({"servers": dns.servers, "searches": dns.searches, "options": dns.options});
        capability_args.insert("dns".to_owned(), dns);
    }
    if let Some(linux) = config.linux.as_ref().filter(|linux| !linux.cgroup_parent.is_empty()) {
        capability_args.insert("cgroupPath".to_owned(), linux.cgroup_parent.as_str().into());
    }
    capability_args
}

/// The rates in a pod's bandwidth annotations.
fn bandwidth(annotations: &BTreeMap<String, String>) -> std::result::Result<Bandwidth, String> {
    let rate = |name: &str| -> std::result::Result<u64, String> {
        let Some(text) = annotations.get(name) else { return Ok(0) };
        let bits = Quantity::parse(text).map_err(|error| error.to_string())?.value();
        match bits {
            ..MIN_BANDWIDTH_BITS => Err("resource is unreasonably small (< 1kbit)".to_owned()),
            MIN_BANDWIDTH_BITS..=MAX_BANDWIDTH_BITS => Ok(bits.unsigned_abs()),
            _ => Err("resource is unreasonably large (> 1Pbit)".to_owned()),
        }
    };
    Ok(Bandwidth { ingress: rate(INGRESS_ANNOTATION)?, egress: rate(EGRESS_ANNOTATION)? })
}

#[cfg(test)]
mod tests {
    use super::*;

    #[track_caller]
    fn check(ingress: &str, expected: std::result::Result<u64, &str>) {
        let annotations = BTreeMap::from([(INGRESS_ANNOTATION.to_owned(), ingress.to_owned())]);
        let found = bandwidth(&annotations).map(|found| found.ingress);
        assert_eq!(found, expected.map_err(str::to_owned));
    }

    #[test]
    fn reads_bandwidth_annotations() {
        check("10M", Ok(10_000_000));
        check("1Mi", Ok(1 << 20));
        check("1k", Ok(1_000));
        check("999", Err("resource is unreasonably small (< 1kbit)"));
        check("2P", Err("resource is unreasonably large (> 1Pbit)"));
        assert!(bandwidth(&BTreeMap::from([(EGRESS_ANNOTATION.to_owned(), "fast".to_owned())])).is_err());
        assert_eq!(bandwidth(&BTreeMap::new()), Ok(Bandwidth::default()));
    }

    #[test]
    fn cni_capability_args() {
        let port = |host_port, protocol: Protocol| PortMapping {
            protocol: protocol.into(),
            container_port: 80,
            host_port,
            host_ip: String::new(),
        };
        let config = PodSandboxConfig {
            port_mappings: vec![port(8080, Protocol::Tcp), port(0, Protocol::Tcp), port(53, Protocol::Udp)],
            ..PodSandboxConfig::default()
        };
        let capability_args = capabilities(&config, Bandwidth { ingress: 5000, egress: 0 });
        let expected = json!({
            "portMappings": [
                {"hostPort": 8080, "containerPort": 80, "protocol": "tcp", "hostIP": ""},
                {"hostPort": 53, "containerPort": 80, "protocol": "udp", "hostIP": ""},
            ],
            "bandwidth": {"ingressRate": 5000, "ingressBurst": u32::MAX},
        });
        assert_eq!(Value::from(capability_args), expected);
        assert!(capabilities(&PodSandboxConfig::default(), Bandwidth::default()).is_empty());
    }
}
