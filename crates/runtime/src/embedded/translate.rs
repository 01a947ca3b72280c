//! Converts CRI and image configuration to the spec of a supervisor. Pure.

use std::collections::BTreeMap;
use std::path::{Component, Path, PathBuf};

use image::ImageProcess;
use podnet::{Attachment, HostPort};
use sys::cgroup::Limits;

use super::labels::SecurityModules;
use super::record::PodRecord;
use super::{capability, spec};
use crate::cri::*;

/// The size of `/dev/shm`, the same in all runtimes.
const SHM_BYTES: u64 = 64 << 20;
/// The PATH of a container whose image sets none.
const DEFAULT_PATH_ENV: &str = "PATH=/usr/local/sbin:/usr/local/bin:/usr/sbin:/usr/bin:/sbin:/bin";

/// The spec of a pod sandbox.
pub fn sandbox(config: &PodSandboxConfig, network: Option<Attachment>) -> spec::Sandbox {
    let linux = config.linux.clone().unwrap_or_default();
    let namespaces = namespaces(config);
    let host_network = namespaces.network() == NamespaceMode::Node;
    spec::Sandbox {
        hostname: if host_network { String::new() } else { config.hostname.clone() },
        host_network,
        host_ipc: namespaces.ipc() == NamespaceMode::Node,
        shared_pids: namespaces.pid() == NamespaceMode::Pod,
        network,
        sysctls: linux.sysctls.into_iter().collect(),
        shm: SHM_BYTES,
        users: users(config),
    }
}

/// The ID mappings of a pod's user namespace, if it has one.
pub fn users(config: &PodSandboxConfig) -> Option<spec::UserMap> {
    let userns_options = namespaces(config)
        .userns_options
        .filter(|userns_options| userns_options.mode() == NamespaceMode::Pod)?;
    let range = |range: &IdMapping| spec::IdRange {
        inside: range.container_id,
        outside: range.host_id,
        length: range.length,
    };
    let (uids, gids): (Vec<_>, Vec<_>) =
        (userns_options.uids.iter().map(range).collect(), userns_options.gids.iter().map(range).collect());
    // Pods created by older versions have none.
    (!uids.is_empty()).then_some(spec::UserMap { uids, gids })
}

/// Rejects unsupported user namespace options.
pub fn check(config: &PodSandboxConfig) -> Result<(), String> {
    let Some(wanted) = namespaces(config).userns_options else { return Ok(()) };
    match wanted.mode() {
        NamespaceMode::Node => Ok(()),
        NamespaceMode::Pod if !wanted.uids.is_empty() => Ok(()),
        NamespaceMode::Pod => Err("can't set up a user namespace without a mapping of users".to_owned()),
        mode => Err(format!("unsupported user namespace mode: {mode:?}")),
    }
}

/// The namespace options of a pod.
pub fn namespaces(config: &PodSandboxConfig) -> NamespaceOption {
    let security = config.linux.clone().and_then(|linux| linux.security_context);
    security.and_then(|security| security.namespace_options).unwrap_or_default()
}

/// The cgroup of a container.
pub fn cgroup(config: &PodSandboxConfig, id: &str) -> String {
    let parent = config.linux.as_ref().map_or("", |linux| linux.cgroup_parent.as_str());
    format!("/{}/{id}", parent.trim_matches('/')).replace("//", "/")
}

/// What determines a container's spec besides its configuration.
pub struct ContainerInputs<'a> {
    pub id: &'a str,
    pub image: &'a ImageProcess,
    pub layers_dir: PathBuf,
    pub layers: Vec<String>,
    /// The pod's directory, which has its files for `/etc`.
    pub directory: &'a Path,
    /// The directory of the node's seccomp profiles.
    pub seccomp_dir: &'a Path,
    /// The layers of image volumes, by image name.
    pub volumes: &'a BTreeMap<String, Vec<String>>,
    pub modules: &'a SecurityModules,
}

/// The spec of a container.
pub fn container(
    config: &ContainerConfig,
    pod: &PodSandboxConfig,
    parts: ContainerInputs<'_>,
) -> Result<spec::Container, String> {
    let linux = config.linux.clone().unwrap_or_default();
    let security = linux.security_context.unwrap_or_default();
    let resources = linux.resources.unwrap_or_default();
    let capability_config = security.capabilities.clone().unwrap_or_default();
    let capabilities = match security.privileged {
        true => capability::all(),
        false => capability::select_capabilities(
            &capability_config.add_capabilities,
            &capability_config.drop_capabilities,
        )?,
    };
    let ambient = capability_config
        .add_ambient_capabilities
        .iter()
        .filter_map(|name| capability::number(name))
        .collect();
    let mut mounts = files(pod, parts.directory, security.readonly_rootfs);
    // Mounts of the container take precedence over the files that every pod has.
    mounts.retain(|known| !config.mounts.iter().any(|mount| same_path(&mount.container_path, &known.target)));
    for wanted in &config.mounts {
        mounts.push(mount(wanted, parts.volumes)?);
    }
    let volumes = image_volumes(parts.image, &mounts)?;
    let log = (!config.log_path.is_empty() && !pod.log_directory.is_empty())
        .then(|| Path::new(&pod.log_directory).join(&config.log_path));
    Ok(spec::Container {
        layers_dir: parts.layers_dir,
        layers: parts.layers,
        args: arguments(config, parts.image)?,
        env: environment(config, pod, parts.image),
        cwd: first_non_empty([&config.working_dir, &parts.image.working_dir]),
        user: user(&security, parts.image)?,
        read_only: security.readonly_rootfs,
        privileged: security.privileged,
        pids: pids(&security),
        mounts,
        volumes,
        devices: devices(config),
        masked: security.masked_paths.clone(),
        read_only_paths: security.readonly_paths.clone(),
        capabilities,
        ambient,
        no_new_privileges: security.no_new_privs,
        seccomp: seccomp(&security, parts.seccomp_dir)?,
        apparmor: parts.modules.apparmor(security.apparmor.as_ref(), security.privileged)?,
        selinux: parts.modules.selinux(security.selinux_options.as_ref()),
        cgroup: cgroup(pod, parts.id),
        limits: limits(&resources),
        oom_score_adj: resources.oom_score_adj,
        stdin: config.stdin,
        stdin_once: config.stdin_once,
        tty: config.tty,
        log,
        hooks: Vec::new(),
    })
}

fn first_non_empty(choices: [&String; 2]) -> String {
    choices.into_iter().find(|text| !text.is_empty()).cloned().unwrap_or_default()
}

/// The command line. `command` replaces the image's entrypoint and its arguments.
fn arguments(config: &ContainerConfig, image: &ImageProcess) -> Result<Vec<String>, String> {
    let entrypoint = image.entrypoint.clone().unwrap_or_default();
    let args = match (config.command.is_empty(), config.args.is_empty()) {
        (false, _) => [config.command.clone(), config.args.clone()].concat(),
        (true, false) => [entrypoint, config.args.clone()].concat(),
        (true, true) => [entrypoint, image.cmd.clone().unwrap_or_default()].concat(),
    };
    if args.is_empty() { Err("no command specified".to_owned()) } else { Ok(args) }
}

/// The hostname of a pod; the host's in the host's network.
pub fn hostname(pod: &PodSandboxConfig) -> String {
    let host = || rustix::system::uname().nodename().to_string_lossy().into_owned();
    if pod.hostname.is_empty() { host() } else { pod.hostname.clone() }
}

/// The variables in containerd's order: the runtime's, the image's, the container's. A variable of the
/// runtime keeps its position when it is overridden; all others are at the position of their last
/// occurrence.
fn environment(config: &ContainerConfig, pod: &PodSandboxConfig, image: &ImageProcess) -> Vec<String> {
    let mut env = vec![DEFAULT_PATH_ENV.to_owned()];
    if config.tty {
        env.push("TERM=xterm".to_owned());
    }
    env.push(format!("HOSTNAME={}", hostname(pod)));
    let own = env.len();
    let of_container = config.envs.iter().map(|pair| format!("{}={}", pair.key, pair.value));
    for variable in image.env.iter().flatten().cloned().chain(of_container) {
        match env_position(&env, &variable) {
            Some(at) if at < own => env[at] = variable,
            Some(at) => {
                env.remove(at);
                env.push(variable);
            }
            None => env.push(variable),
        }
    }
    env
}

/// The index of a variable with the same name.
pub fn env_position(env: &[String], variable: &str) -> Option<usize> {
    let name = |variable: &str| variable.split('=').next().map(str::to_owned);
    env.iter().position(|known| name(known) == name(variable))
}

fn user(security: &LinuxContainerSecurityContext, image: &ImageProcess) -> Result<spec::User, String> {
    let number =
        |value: &Option<Int64Value>| value.as_ref().and_then(|value| u32::try_from(value.value).ok());
    let group = number(&security.run_as_group);
    let name = match (number(&security.run_as_user), security.run_as_username.as_str()) {
        (Some(uid), _) => uid.to_string(),
        (None, "") => match group {
            Some(group) => return Err(format!("user group \"{group}\" is specified without user")),
            None => image.user.clone(),
        },
        (None, name) => name.to_owned(),
    };
    Ok(spec::User {
        name,
        group,
        more_groups: security.supplemental_groups.iter().filter_map(|gid| u32::try_from(*gid).ok()).collect(),
        strict_groups: security.supplemental_groups_policy() == SupplementalGroupsPolicy::Strict,
    })
}

fn pids(security: &LinuxContainerSecurityContext) -> spec::Pids {
    let options = security.namespace_options.clone().unwrap_or_default();
    match options.pid() {
        NamespaceMode::Pod => spec::Pids::Pod,
        NamespaceMode::Container => spec::Pids::Own,
        NamespaceMode::Node => spec::Pids::Host,
        NamespaceMode::Target => spec::Pids::Of(options.target_id),
    }
}

fn seccomp(security: &LinuxContainerSecurityContext, profiles: &Path) -> Result<spec::Seccomp, String> {
    let Some(profile) = &security.seccomp else { return Ok(spec::Seccomp::Unconfined) };
    Ok(match profile.profile_type() {
        ProfileType::RuntimeDefault => spec::Seccomp::Default,
        ProfileType::Unconfined => spec::Seccomp::Unconfined,
        ProfileType::Localhost => {
            let named = Path::new(profile.localhost_ref.trim_start_matches("localhost/"));
            // The kubelet passes an absolute path. A relative one is in the profile directory.
            if named.components().any(|part| part == Component::ParentDir) {
                return Err(format!("{:?} is not a seccomp profile of this node", profile.localhost_ref));
            }
            spec::Seccomp::File(profiles.join(named))
        }
    })
}

fn same_path(one: &str, other: &str) -> bool {
    Path::new(one).components().eq(Path::new(other).components())
}

fn mount(wanted: &Mount, volumes: &BTreeMap<String, Vec<String>>) -> Result<spec::Mount, String> {
    let image = wanted.image.as_ref().map(|image| {
        let layers = volumes.get(&image.image).cloned();
        let layers =
            layers.ok_or_else(|| format!("ImageVolumeMountFailed: image {:?} not found", image.image))?;
        let sub_path = wanted.image_sub_path.clone();
        Ok::<_, String>(spec::ImageVolume { image: image.image.clone(), layers, sub_path })
    });
    if wanted.recursive_read_only && !(wanted.readonly && wanted.propagation() == MountPropagation::Private) {
        let target = &wanted.container_path;
        return Err(format!(
            "the mount {target:?} is recursively read-only, so it must be read-only and private"
        ));
    }
    Ok(spec::Mount {
        source: wanted.host_path.clone().into(),
        target: wanted.container_path.clone(),
        read_only: wanted.readonly,
        recursive_read_only: wanted.recursive_read_only,
        propagation: match wanted.propagation() {
            MountPropagation::Private => spec::Propagation::Private,
            MountPropagation::HostToContainer => spec::Propagation::HostToContainer,
            MountPropagation::Bidirectional => spec::Propagation::Bidirectional,
        },
        maps_owners: !wanted.uid_mappings.is_empty(),
        is_labelled: wanted.selinux_relabel,
        image: image.transpose()?,
    })
}

/// The volumes that the image declares, except those where something else is mounted.
fn image_volumes(image: &ImageProcess, mounts: &[spec::Mount]) -> Result<Vec<String>, String> {
    let mut targets: Vec<String> = Vec::new();
    for wanted in image.volumes.iter().flat_map(BTreeMap::keys) {
        let target = clean_path(wanted);
        if target == "/" {
            return Err(format!(
                "the image declares the volume {wanted:?}, which would hide its whole filesystem"
            ));
        }
        if !targets.contains(&target) && !mounts.iter().any(|mount| same_path(&mount.target, &target)) {
            targets.push(target);
        }
    }
    Ok(targets)
}

/// The absolute path without `.` and `..`, resolved lexically.
fn clean_path(path: &str) -> String {
    let mut plain = PathBuf::from("/");
    for part in Path::new(path).components() {
        match part {
            Component::Normal(name) => plain.push(name),
            Component::ParentDir => drop(plain.pop()),
            _ => {}
        }
    }
    plain.display().to_string()
}

/// The pod's files in `/etc`.
fn files(pod: &PodSandboxConfig, directory: &Path, read_only: bool) -> Vec<spec::Mount> {
    let mount = |name: &str| spec::Mount {
        source: directory.join(name),
        target: format!("/etc/{name}"),
        read_only,
        maps_owners: users(pod).is_some(),
        is_labelled: true,
        ..spec::Mount::default()
    };
    ["resolv.conf", "hostname", "hosts"].map(mount).into()
}

fn devices(config: &ContainerConfig) -> Vec<spec::Device> {
    let device = |device: &Device| spec::Device {
        source: device.host_path.clone().into(),
        target: device.container_path.clone(),
        access: if device.permissions.is_empty() { "rwm".to_owned() } else { device.permissions.clone() },
        made: None,
    };
    config.devices.iter().map(device).collect()
}

/// The host ports of a pod.
pub fn host_ports(id: &str, record: &PodRecord) -> Vec<HostPort> {
    let number = |port: i32| u16::try_from(port).ok().filter(|port| *port > 0);
    let mappings = record.config.iter().flat_map(|config| &config.port_mappings);
    let mut ports = Vec::new();
    for mapping in mappings {
        let (Some(port), Some(host_port)) = (number(mapping.container_port), number(mapping.host_port))
        else {
            continue;
        };
        let addresses = record.ips.iter().filter_map(|ip| ip.parse().ok());
        ports.extend(addresses.map(|address| HostPort {
            pod: id.to_owned(),
            address,
            port,
            protocol: format!("{:?}", mapping.protocol()).to_uppercase(),
            host_ip: mapping.host_ip.clone(),
            host_port,
        }));
    }
    ports
}

pub fn limits(resources: &LinuxContainerResources) -> Limits {
    Limits {
        cpu_shares: resources.cpu_shares,
        cpu_quota: resources.cpu_quota,
        cpu_period: resources.cpu_period,
        cpus: resources.cpuset_cpus.clone(),
        memory_nodes: resources.cpuset_mems.clone(),
        memory: resources.memory_limit_in_bytes,
        memory_and_swap: resources.memory_swap_limit_in_bytes,
        pids: 0,
        // The OOM killer kills all processes of a container together.
        ends_together: true,
        huge_pages: resources.hugepage_limits.iter().map(|one| (one.page_size.clone(), one.limit)).collect(),
        unified: resources.unified.clone().into_iter().collect(),
    }
}

/// The resources after an update, in which unset fields keep their value.
pub fn merge_resources(
    present: &LinuxContainerResources,
    change: &LinuxContainerResources,
) -> LinuxContainerResources {
    let number = |new: i64, old: i64| if new == 0 { old } else { new };
    let text = |new: &String, old: &String| if new.is_empty() { old.clone() } else { new.clone() };
    let mut hugepage_limits = present.hugepage_limits.clone();
    hugepage_limits.retain(|old| !change.hugepage_limits.iter().any(|new| new.page_size == old.page_size));
    hugepage_limits.extend(change.hugepage_limits.iter().cloned());
    let mut unified = present.unified.clone();
    unified.extend(change.unified.clone());
    LinuxContainerResources {
        cpu_period: number(change.cpu_period, present.cpu_period),
        cpu_quota: number(change.cpu_quota, present.cpu_quota),
        cpu_shares: number(change.cpu_shares, present.cpu_shares),
        memory_limit_in_bytes: number(change.memory_limit_in_bytes, present.memory_limit_in_bytes),
        oom_score_adj: number(change.oom_score_adj, present.oom_score_adj),
        cpuset_cpus: text(&change.cpuset_cpus, &present.cpuset_cpus),
        cpuset_mems: text(&change.cpuset_mems, &present.cpuset_mems),
        hugepage_limits,
        unified,
        memory_swap_limit_in_bytes: number(
            change.memory_swap_limit_in_bytes,
            present.memory_swap_limit_in_bytes,
        ),
    }
}

/// The pod's resolv.conf.
pub fn resolv_conf(dns: &DnsConfig) -> String {
    let mut text = String::new();
    if !dns.searches.is_empty() {
        text += &format!("search {}\n", dns.searches.join(" "));
    }
    for server in &dns.servers {
        text += &format!("nameserver {server}\n");
    }
    if !dns.options.is_empty() {
        text += &format!("options {}\n", dns.options.join(" "));
    }
    text
}

#[cfg(test)]
mod tests;
