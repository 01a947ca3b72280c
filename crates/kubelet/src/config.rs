//! Translates a pod into CRI configuration. Does no I/O except for files of the node that
//! [`Settings`] names.

pub mod resources;
mod security;

use std::collections::BTreeMap;
use std::net::{IpAddr, Ipv4Addr};
use std::path::{Component, Path, PathBuf};

use k8s_openapi::api::core::v1::{Container, Pod};
use reconcile::{Key, Object as _};
use runtime::cri;
use tokio::sync::watch;

use crate::env::expand;
use crate::observed::{
    CONTAINER_NAME, IMAGE_ANNOTATION, POD_NAME, POD_NAMESPACE, POD_UID, RESOURCES_ANNOTATION,
};

/// The root directory of upstream's kubelet, which CSI drivers, network plugins and monitoring
/// agents mount.
const DEFAULT_ROOT: &str = "/var/lib/kubelet";

/// The settings of a node that apply to all its pods.
#[derive(Clone, Debug)]
pub struct Settings {
    pub node_name: String,
    /// The node's primary address, which may change. `None` on a machine without a network.
    pub node_ip: watch::Receiver<Option<IpAddr>>,
    /// The configured address of the other IP family.
    pub second_ip: Option<IpAddr>,
    /// The directory of the pod directories: volumes, hosts files, termination messages.
    pub pods: PathBuf,
    /// The kubelet's root directory, for plugin sockets and CSI volumes. Paths at or below
    /// `/var/lib/kubelet` refer to this directory ([`Settings::host_path`]).
    pub root: PathBuf,
    pub logs: crate::PodLogs,
    pub cluster_domain: String,
    pub cluster_dns: Vec<String>,
    pub resolver: crate::ResolverConfig,
    /// The node's memory in bytes, for OOM scores.
    pub memory: i64,
    /// The part of the kubelet configuration for evictions, images, logs and the like.
    pub kubelet_config: crate::KubeletConfig,
    /// The grace periods of a graceful node shutdown. Empty if it is disabled.
    pub shutdown: Vec<crate::PriorityGracePeriod>,
    /// No shutdown grace periods are configured. Pods are then stopped by a shutdown and started
    /// again after it, instead of failing.
    pub is_shutdown_default: bool,
    /// The directory of static pod manifests.
    pub manifests: Option<PathBuf>,
    /// Skiff's proxy runs beside the kubelet and implements masquerading and host ports. The
    /// runtime's network must not do either then.
    pub proxied: bool,
}

impl Settings {
    /// The node's current addresses, the primary one first.
    pub fn node_ips(&self) -> Vec<String> {
        let first = self.node_ip.borrow().unwrap_or(IpAddr::V4(Ipv4Addr::LOCALHOST));
        [Some(first), self.second_ip].into_iter().flatten().map(|ip| ip.to_string()).collect()
    }

    /// Maps a host path below `/var/lib/kubelet` to the root directory of this node. Several nodes
    /// on one host have a root directory each, but pods and plugins use the default path.
    pub fn host_path(&self, path: &Path) -> PathBuf {
        match path.strip_prefix(DEFAULT_ROOT) {
            Ok(rest) if !rest.components().any(|part| part == Component::ParentDir) => {
                self.root.components().chain(rest.components()).collect()
            }
            _ => path.to_owned(),
        }
    }

    pub fn pod_dir(&self, pod: &Pod) -> PathBuf {
        self.pods.join(pod.uid())
    }

    /// The file of a `Localhost` seccomp profile. Older versions kept profiles beside the pods
    /// directory, so it is searched, too.
    fn seccomp_profile(&self, name: &str) -> PathBuf {
        let [now, before] = [self.root.join("seccomp"), self.pods.with_file_name("seccomp")];
        let is_moved = now.join(name).exists() || !before.join(name).exists();
        if is_moved { now.join(name) } else { before.join(name) }
    }

    /// The directory of the pod's logs.
    pub fn log_dir(&self, pod: &Key, uid: &str) -> PathBuf {
        self.logs.pod_dir(pod, uid)
    }

    #[cfg(test)]
    pub fn for_tests(root: &Path) -> Settings {
        Settings {
            node_name: "here".into(),
            node_ip: watch::channel(None).1,
            second_ip: None,
            pods: root.join("own"),
            root: root.to_owned(),
            logs: crate::PodLogs::within(root.join("logs")),
            cluster_domain: String::new(),
            cluster_dns: Vec::new(),
            resolver: crate::ResolverConfig::None,
            memory: 0,
            kubelet_config: crate::KubeletConfig::default(),
            shutdown: Vec::new(),
            is_shutdown_default: false,
            manifests: None,
            proxied: true,
        }
    }
}

/// The path of a container's log, relative to the log directory of its pod.
pub fn log_path(container: &str, attempt: u32) -> PathBuf {
    Path::new(container).join(format!("{attempt}.log"))
}

/// The CRI configuration of a pod sandbox in this cgroup.
pub fn sandbox(pod: &Pod, attempt: u32, group: String, settings: &Settings) -> cri::PodSandboxConfig {
    let spec = pod.spec.clone().unwrap_or_default();
    let host_network = spec.host_network == Some(true);
    let mut labels = pod.metadata.labels.clone().unwrap_or_default();
    labels.extend(pod_labels(pod));
    cri::PodSandboxConfig {
        metadata: Some(cri::PodSandboxMetadata {
            name: pod.name().to_owned(),
            uid: pod.uid().to_owned(),
            namespace: pod.namespace().to_owned(),
            attempt,
        }),
        // A pod in the host's network has the host's name.
        hostname: match fqdn(pod, settings).filter(|_| spec.set_hostname_as_fqdn == Some(true)) {
            _ if host_network => String::new(),
            Some(full) => full,
            None => hostname(pod),
        },
        log_directory: settings.log_dir(&pod.key(), pod.uid()).display().to_string(),
        dns_config: Some(crate::resolver::pod_dns_config(pod, settings).0),
        port_mappings: spec
            .containers
            .iter()
            .flat_map(|container| port_mappings(container, host_network || settings.proxied))
            .collect(),
        labels,
        annotations: pod.metadata.annotations.clone().unwrap_or_default(),
        linux: Some(cri::LinuxPodSandboxConfig {
            cgroup_parent: group,
            security_context: Some(security::sandbox(pod)),
            sysctls: security::sysctls(pod),
            ..cri::LinuxPodSandboxConfig::default()
        }),
    }
}

/// The CRI configuration of one run of a container.
pub fn container(
    pod: &Pod,
    container: &Container,
    attempt: u32,
    image: &cri::ImageSpec,
    env: &[(String, String)],
    mounts: Vec<cri::Mount>,
    settings: &Settings,
) -> cri::ContainerConfig {
    let known =
        |name: &str| env.iter().rev().find(|(known, _)| known == name).map(|(_, value)| value.clone());
    let expanded =
        |words: &Option<Vec<String>>| words.iter().flatten().map(|word| expand(word, &known)).collect();
    let mut labels: BTreeMap<String, String> = pod_labels(pod);
    labels.insert(CONTAINER_NAME.to_owned(), container.name.clone());
    let path = container.termination_message_path.as_deref().unwrap_or("/dev/termination-log");
    let grace = pod.spec.as_ref().and_then(|spec| spec.termination_grace_period_seconds).unwrap_or(30);
    let annotations = [
        ("io.kubernetes.pod.terminationGracePeriod", grace.to_string()),
        ("io.kubernetes.container.restartCount", attempt.to_string()),
        ("io.kubernetes.container.terminationMessagePath", path.to_owned()),
        (IMAGE_ANNOTATION, container.image.clone().unwrap_or_default()),
        (RESOURCES_ANNOTATION, resources_annotation(pod, container)),
    ];
    cri::ContainerConfig {
        metadata: Some(cri::ContainerMetadata { name: container.name.clone(), attempt }),
        image: Some(image.clone()),
        command: expanded(&container.command),
        args: expanded(&container.args),
        working_dir: container.working_dir.clone().unwrap_or_default(),
        envs: env
            .iter()
            .map(|(key, value)| cri::KeyValue { key: key.clone(), value: value.clone() })
            .collect(),
        mounts,
        labels,
        annotations: annotations.map(|(name, value)| (name.to_owned(), value)).into(),
        log_path: log_path(&container.name, attempt).display().to_string(),
        stdin: container.stdin == Some(true),
        stdin_once: container.stdin_once == Some(true),
        tty: container.tty == Some(true),
        linux: Some(cri::LinuxContainerConfig {
            resources: Some(self::resources(pod, container, settings)),
            security_context: Some(security::container(pod, container, settings)),
        }),
        ..cri::ContainerConfig::default()
    }
}

/// The resources of a container as an annotation, which later shows whether they have changed.
fn resources_annotation(pod: &Pod, container: &Container) -> String {
    let resources = crate::pod::resize::effective_resources(pod, container);
    serde_json::json!({"requests": resources.requests, "limits": resources.limits}).to_string()
}

/// The resources of a container for CRI.
pub fn resources(pod: &Pod, container: &Container, settings: &Settings) -> cri::LinuxContainerResources {
    let container_resources = resources::container_resources(pod, container, settings.memory);
    let cpu_quota = if settings.kubelet_config.cpu_cfs_quota { container_resources.cpu_quota } else { 0 };
    cri::LinuxContainerResources { cpu_quota, ..container_resources }
}

/// Joins the PID namespace of another container, for ephemeral containers with a target.
pub fn target_pid_namespace(config: &mut cri::ContainerConfig, target: Option<&str>) {
    let linux = config.linux.as_mut().and_then(|linux| linux.security_context.as_mut());
    if let (Some(target), Some(options)) =
        (target, linux.and_then(|context| context.namespace_options.as_mut()))
        && options.pid == i32::from(cri::NamespaceMode::Container)
    {
        options.pid = cri::NamespaceMode::Target.into();
        options.target_id = target.to_owned();
    }
}

/// The labels that identify sandboxes and containers of a pod.
fn pod_labels(pod: &Pod) -> BTreeMap<String, String> {
    let labels = [(POD_NAME, pod.name()), (POD_NAMESPACE, pod.namespace()), (POD_UID, pod.uid())];
    labels.map(|(name, value)| (name.to_owned(), value.to_owned())).into()
}

/// The fully qualified name of a pod that has a subdomain.
pub fn fqdn(pod: &Pod, settings: &Settings) -> Option<String> {
    let spec = pod.spec.as_ref()?;
    let domain = spec.subdomain.as_deref().filter(|domain| !domain.is_empty())?;
    let has_no_override = spec.hostname_override.is_none();
    let full = format!("{}.{domain}.{}.svc.{}", hostname(pod), pod.namespace(), settings.cluster_domain);
    has_no_override.then_some(full)
}

/// Fails if the pod requests its FQDN as hostname and the name is longer than Linux allows.
pub fn check_hostname(pod: &Pod, settings: &Settings) -> Result<(), String> {
    const MAX_HOSTNAME_LENGTH: usize = 64;
    let is_requested = pod.spec.as_ref().and_then(|spec| spec.set_hostname_as_fqdn) == Some(true);
    match fqdn(pod, settings).filter(|full| is_requested && full.len() > MAX_HOSTNAME_LENGTH) {
        Some(full) => Err(format!(
            "failed to construct FQDN from Pod hostname and cluster domain, FQDN {full} is too long ({MAX_HOSTNAME_LENGTH} characters is \
             the max, {} characters requested)",
            full.len()
        )),
        None => Ok(()),
    }
}

/// The pod's hostname: at most 63 characters, as DNS labels require.
pub fn hostname(pod: &Pod) -> String {
    let hostname_override = pod.spec.as_ref().and_then(|spec| spec.hostname_override.clone());
    if let Some(name) = hostname_override.filter(|name| !name.is_empty()) {
        return name;
    }
    let spec_hostname =
        pod.spec.as_ref().and_then(|spec| spec.hostname.clone()).filter(|name| !name.is_empty());
    let mut name = spec_hostname.unwrap_or_else(|| pod.name().to_owned());
    name.truncate(63);
    name.trim_end_matches(['-', '.']).to_owned()
}

fn port_mappings(container: &Container, not_needed: bool) -> Vec<cri::PortMapping> {
    let ports = container.ports.iter().flatten().filter(|_| !not_needed);
    let mapped = ports.filter_map(|port| {
        let protocol = match port.protocol.as_deref() {
            Some("UDP") => cri::Protocol::Udp,
            Some("SCTP") => cri::Protocol::Sctp,
            _ => cri::Protocol::Tcp,
        };
        Some(cri::PortMapping {
            protocol: protocol.into(),
            container_port: port.container_port,
            host_port: port.host_port.filter(|port| *port > 0)?,
            host_ip: port.host_ip.clone().unwrap_or_default(),
        })
    });
    mapped.collect()
}

#[cfg(test)]
pub mod tests {
    use serde_json::json;

    use super::*;

    pub fn settings(dir: &Path) -> Settings {
        Settings {
            pods: dir.join("pods"),
            root: dir.join("root"),
            cluster_domain: "cluster.local".into(),
            cluster_dns: vec!["10.43.0.10".into()],
            ..Settings::for_tests(dir)
        }
    }

    #[test]
    fn port_mappings_are_empty_when_not_needed() {
        let ports = json!([{"containerPort": 80, "hostPort": 8080}, {"containerPort": 81}]);
        let container = serde_json::from_value(json!({"name": "main", "ports": ports})).expect("a container");
        let mapped = |not_needed| {
            let mapped = port_mappings(&container, not_needed);
            mapped.iter().map(|port| (port.host_port, port.container_port)).collect::<Vec<_>>()
        };
        assert_eq!(mapped(false), [(8080, 80)]);
        // Not in the host's network, and not if Skiff's proxy implements host ports.
        assert_eq!(mapped(true), []);
    }
}
