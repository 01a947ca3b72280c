//! Converts pods, containers and images to CRI messages.

use std::collections::BTreeMap;

use super::pods::{Container as Known, Pod};
use super::supervisor::identity;
use crate::cri::*;

/// The exit code that runtimes report for a container that could not be started.
const START_ERROR: i32 = 128;

pub fn has_labels(labels: &BTreeMap<String, String>, selector: &[(&str, &str)]) -> bool {
    selector.iter().all(|(name, value)| labels.get(*name).is_some_and(|known| known == value))
}

pub fn sandbox(pod: &Pod) -> PodSandbox {
    let record = pod.record.lock();
    let config = record.config.as_ref();
    PodSandbox {
        id: pod.id.clone(),
        metadata: config.and_then(|config| config.metadata.clone()),
        state: sandbox_state(pod).into(),
        created_at: record.created,
        labels: config.map(|config| config.labels.clone()).unwrap_or_default(),
        annotations: config.map(|config| config.annotations.clone()).unwrap_or_default(),
        runtime_handler: record.handler.clone(),
    }
}

fn sandbox_state(pod: &Pod) -> PodSandboxState {
    if *pod.is_ready.borrow() { PodSandboxState::Ready } else { PodSandboxState::NotReady }
}

pub fn sandbox_status(pod: &Pod) -> PodSandboxStatus {
    let summary = sandbox(pod);
    let record = pod.record.lock();
    let options =
        || record.config.as_ref()?.linux.as_ref()?.security_context.as_ref()?.namespace_options.clone();
    let namespaces = Namespace { options: Some(options().unwrap_or_default()) };
    let ips = &record.ips;
    let more = ips.iter().skip(1).map(|ip| PodIp { ip: ip.clone() });
    let ip = ips.first().cloned().unwrap_or_default();
    PodSandboxStatus {
        id: summary.id,
        metadata: summary.metadata,
        state: summary.state,
        created_at: summary.created_at,
        network: Some(PodSandboxNetworkStatus { ip, additional_ips: more.collect() }),
        // External kubelets compare this with the pod's spec.
        linux: Some(LinuxPodSandboxStatus { namespaces: Some(namespaces) }),
        labels: summary.labels,
        annotations: summary.annotations,
        runtime_handler: summary.runtime_handler,
    }
}

pub fn state(known: &Known) -> ContainerState {
    match known.status() {
        None => ContainerState::Created,
        Some(status) if status.finished != 0 || status.failure.is_some() => ContainerState::Exited,
        // Its program is not running yet.
        Some(status) if status.started == 0 => ContainerState::Created,
        Some(_) => ContainerState::Running,
    }
}

pub fn container(pod: &Pod, known: &Known) -> Container {
    let record = &known.record;
    let config = record.config.as_ref();
    Container {
        id: known.id.clone(),
        pod_sandbox_id: pod.id.clone(),
        metadata: config.and_then(|config| config.metadata.clone()),
        image: config.and_then(|config| config.image.clone()),
        image_ref: record.image_ref.clone(),
        state: state(known).into(),
        created_at: record.created,
        labels: config.map(|config| config.labels.clone()).unwrap_or_default(),
        annotations: config.map(|config| config.annotations.clone()).unwrap_or_default(),
        image_id: record.image.clone(),
    }
}

pub fn container_status(pod: &Pod, known: &Known) -> ContainerStatus {
    let summary = container(pod, known);
    let config = known.record.config.as_ref();
    let status = known.status().unwrap_or_default();
    let (exit_code, reason, message) = match (&status.failure, status.finished) {
        (Some(failure), _) => (START_ERROR, "StartError", failure.clone()),
        (None, 0) => (0, "", String::new()),
        (None, _) if status.out_of_memory => (status.exit_code, "OOMKilled", String::new()),
        (None, _) if status.exit_code == 0 => (0, "Completed", String::new()),
        (None, _) => (status.exit_code, "Error", String::new()),
    };
    let record = pod.record.lock();
    let directory = record.config.as_ref().map_or("", |config| &config.log_directory);
    let log = config.map_or("", |config| &config.log_path);
    let user = status.user.map(|user| LinuxContainerUser {
        uid: user.uid.into(),
        gid: user.gid.into(),
        supplemental_groups: user.groups.into_iter().map(i64::from).collect(),
    });
    let resources = known.resources.lock().clone();
    ContainerStatus {
        id: summary.id,
        metadata: summary.metadata,
        state: summary.state,
        created_at: summary.created_at,
        started_at: status.started,
        finished_at: status.finished,
        exit_code,
        image: summary.image,
        image_ref: summary.image_ref,
        reason: reason.to_owned(),
        message,
        labels: summary.labels,
        annotations: summary.annotations,
        mounts: config.map(|config| config.mounts.clone()).unwrap_or_default(),
        log_path: format!("{directory}/{log}"),
        resources: Some(ContainerResources { linux: Some(resources) }),
        image_id: summary.image_id,
        user: user.map(|linux| ContainerUser { linux: Some(linux) }),
    }
}

pub fn image(known: &image::Image, user: &str) -> Image {
    let name = user.split(':').next().unwrap_or_default();
    // A user that is not a valid number is reported as a name, which cannot be verified to be non-root.
    let uid = match identity::parse_id(name) {
        Some(value) => Some(Int64Value { value: value.into() }),
        None if name.is_empty() => Some(Int64Value { value: 0 }),
        None => None,
    };
    Image {
        id: known.id.to_string(),
        repo_tags: known.tags.iter().cloned().collect(),
        repo_digests: known.digests.iter().cloned().collect(),
        size: known.size,
        username: if uid.is_none() { name.to_owned() } else { String::new() },
        uid,
        spec: None,
        pinned: false,
    }
}

/// The stats of a container without its filesystem usage.
pub fn stats(pod: &Pod, known: &Known, usage: &sys::cgroup::Usage, timestamp: i64) -> ContainerStats {
    let summary = container(pod, known);
    let (cpu, memory) = cgroup_usage(usage, timestamp);
    let swap = usage.swap.map(|used| {
        let left = usage.swap_limit.map(|limit| Uint64Value { value: limit.saturating_sub(used) });
        let used = Some(Uint64Value { value: used });
        SwapUsage { timestamp, swap_available_bytes: left, swap_usage_bytes: used }
    });
    ContainerStats {
        attributes: Some(ContainerAttributes {
            id: summary.id,
            metadata: summary.metadata,
            labels: summary.labels,
            annotations: summary.annotations,
        }),
        cpu: Some(cpu),
        memory: Some(memory),
        writable_layer: None,
        swap,
    }
}

/// The CPU and memory stats of a cgroup.
pub fn cgroup_usage(usage: &sys::cgroup::Usage, timestamp: i64) -> (CpuUsage, MemoryUsage) {
    let value = |value: u64| Some(Uint64Value { value });
    let available =
        usage.memory_limit.map(|limit| Uint64Value { value: limit.saturating_sub(usage.working_set) });
    let cpu = CpuUsage { timestamp, usage_core_nano_seconds: value(usage.cpu), usage_nano_cores: None };
    let memory = MemoryUsage {
        timestamp,
        working_set_bytes: value(usage.working_set),
        available_bytes: available,
        usage_bytes: value(usage.memory),
        rss_bytes: value(usage.anonymous),
        page_faults: value(usage.page_faults),
        major_page_faults: value(usage.major_page_faults),
    };
    (cpu, memory)
}
