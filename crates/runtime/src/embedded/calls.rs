//! The CRI calls for pods and containers: [`Runtime`] for [`Embedded`].

use std::iter;
use std::path::{Path, PathBuf};
use std::sync::Arc;
use std::sync::atomic::Ordering;
use std::time::Duration;

use async_trait::async_trait;

use super::labels::SecurityModules;
use super::network::PodNetwork;
use super::pods::{Container as Known, Pod};
use super::protocol::SupervisorRequest;
use super::record::{self, ContainerRecord, PodRecord};
use super::spec::{self, Stage};
use super::{
    Embedded, call_error, cdi, hooks, launch, link_name, mountpoint_layer, not_found, now, supervisor_client,
    translate, view,
};
use crate::cri::*;
use crate::{Error, ErrorCode, Result, Runtime};

/// Time for killed processes to exit.
const KILL_TIMEOUT: Duration = Duration::from_secs(60);
/// Between attempts to remove a cgroup or directory that is not empty yet.
const RETRY_INTERVAL: Duration = Duration::from_millis(5);
/// Time for a status update to arrive after the supervisor has answered a request.
const STATUS_UPDATE_TIMEOUT: Duration = Duration::from_secs(1);
const SIGKILL: i32 = 9;
const SIGTERM: i32 = 15;

/// Whether the kernel supports user namespaces for pods.
fn has_user_namespaces() -> bool {
    let most = std::fs::read_to_string("/proc/sys/user/max_user_namespaces").unwrap_or_default();
    Path::new("/proc/self/ns/user").exists() && most.trim() != "0"
}

/// Changes the resources of a container that has not been started.
fn update_spec(directory: &Path, resources: &LinuxContainerResources) -> std::io::Result<()> {
    let (path, temp_path) = (directory.join("spec.json"), directory.join("spec.json.new"));
    let mut spec: spec::Container = serde_json::from_slice(&std::fs::read(&path)?)?;
    spec.limits = translate::limits(resources);
    spec.oom_score_adj = resources.oom_score_adj;
    std::fs::write(&temp_path, serde_json::to_vec(&spec)?)?;
    std::fs::rename(temp_path, path)
}

/// The cgroup of a pod whose configuration names none.
fn default_cgroup(id: &str) -> String {
    format!("/skiff/sandbox-{id}")
}

/// The pod's resolv.conf; the host's if the DNS configuration is empty.
fn resolv_conf(dns: &DnsConfig) -> Vec<u8> {
    match translate::resolv_conf(dns) {
        text if text.is_empty() => std::fs::read("/etc/resolv.conf").unwrap_or_default(),
        text => text.into_bytes(),
    }
}

/// Half the length of containerd's IDs.
fn new_id() -> String {
    uuid::Uuid::new_v4().simple().to_string()
}

fn io_error(call: &'static str, doing: &'static str) -> impl FnOnce(std::io::Error) -> Error {
    move |error| call_error(call, format!("cannot {doing}: {error}"))
}

impl Embedded {
    async fn create_pod(
        &self,
        id: &str,
        directory: &Path,
        config: &PodSandboxConfig,
        handler: &str,
        is_external: bool,
    ) -> Result<Arc<Pod>> {
        const CALL: &str = "RunPodSandbox";
        translate::check(config).map_err(|message| call_error(CALL, message))?;
        let failed = |reason: String| {
            call_error(CALL, format!("failed to setup network for sandbox {id:?}: {reason}"))
        };
        let pod_network = self.select_network(id, config).map_err(failed)?;
        let addresses = pod_network.attachment().into_iter().flat_map(|network| &network.addresses);
        let record = PodRecord {
            config: Some(config.clone()),
            created: now(),
            handler: handler.into(),
            ips: addresses.map(|address| address.ip.to_string()).collect(),
            is_unfinished: matches!(pod_network, PodNetwork::Cni(..)),
            // CNI plugins publish host ports themselves.
            opens_ports: is_external && matches!(pod_network, PodNetwork::Own(..)),
        };
        let mut spec = translate::sandbox(config, pod_network.attachment().cloned());
        let full_spec = spec.clone();
        // With CNI, sysctls are applied after the plugins have run: sysctls of an interface need the
        // interface to exist, and those of the pod override those that plugins set.
        if record.is_unfinished {
            spec.sysctls.clear();
        }
        let dns = config.dns_config.clone().unwrap_or_default();
        let files = [
            ("hostname", format!("{}\n", translate::hostname(config)).into_bytes()),
            ("resolv.conf", resolv_conf(&dns)),
        ];
        for (name, content) in files {
            std::fs::write(directory.join(name), content).map_err(io_error(CALL, "write the pod files"))?;
        }
        record::write(directory, &record).map_err(io_error(CALL, "write the pod record"))?;
        let inner = self.inner.clone();
        let pod_dir = directory.to_owned();
        let started =
            tokio::task::spawn_blocking(move || launch::start_supervisor(&inner.program, &pod_dir, &spec))
                .await;
        started
            .map_err(|error| call_error(CALL, error.to_string()))?
            .map_err(|message| call_error(CALL, message))?;
        let pod = Arc::new(Pod::new(id, directory.to_owned(), record, self.inner.events.clone()));
        if let PodNetwork::Cni(network, capabilities) = pod_network {
            let ips = self.attach_by_cni(&pod, network, capabilities).await.map_err(failed)?;
            if !full_spec.sysctls.is_empty() {
                let set =
                    supervisor_client::call(directory, &SupervisorRequest::Set { pod: full_spec }).await;
                set.map_err(|message| call_error(CALL, message))?;
            }
            let mut record = pod.record.lock();
            (record.ips, record.is_unfinished) = (ips, false);
            record::write(directory, &*record).map_err(io_error(CALL, "write the pod record"))?;
        }
        self.follow(&pod).await;
        Ok(pod)
    }

    /// Creates and starts a pod. `is_external` marks pods that the kubelet in this process does not
    /// know.
    pub(super) async fn run_pod(
        &self,
        config: &PodSandboxConfig,
        handler: &str,
        is_external: bool,
    ) -> Result<String> {
        const CALL: &str = "RunPodSandbox";
        if !handler.is_empty() {
            return Err(call_error(CALL, format!("no runtime for {handler:?} is configured")));
        }
        let id = new_id();
        let metadata = config.metadata.clone().unwrap_or_default();
        let PodSandboxMetadata { name, uid, namespace, attempt } = &metadata;
        let has_it = |pod: &Arc<Pod>| {
            let record = pod.record.lock();
            record.config.as_ref().is_some_and(|config| config.metadata.as_ref() == Some(&metadata))
        };
        let taken = || self.inner.pods.all().into_iter().find(has_it).map(|pod| pod.id.clone());
        let reserved = self.inner.pods.reserve(format!("{name}_{namespace}_{uid}_{attempt}"), taken);
        let _reserved = reserved
            .map_err(|reason| call_error(CALL, format!("failed to reserve sandbox name: {reason}")))?;
        let directory = self.inner.pods_dir().join(&id);
        std::fs::create_dir(&directory).map_err(io_error(CALL, "create the pod directory"))?;
        let mut config = config.clone();
        // A pod without a parent cgroup gets one of its own, so that its usage can be accounted as a
        // whole.
        let linux = config.linux.get_or_insert_default();
        if linux.cgroup_parent.is_empty() {
            linux.cgroup_parent = default_cgroup(&id);
        }
        match self.create_pod(&id, &directory, &config, handler, is_external).await {
            Ok(pod) => {
                self.inner.pods.add(pod.clone());
                self.inner.publish_host_ports();
                for kind in [ContainerEventType::Created, ContainerEventType::Started] {
                    self.inner.events.publish(kind, &pod, &id);
                }
                Ok(id)
            }
            Err(error) => {
                // Best effort. A CNI attachment that could not be deleted stays in the CNI cache, and
                // the next start retries.
                let _ = self.detach_by_cni(&id, &directory, true).await;
                let _ = supervisor_client::call(&directory, &SupervisorRequest::Stop).await;
                let _ = podnet::detach(&link_name(&id));
                self.inner.pool.release(&id);
                let _ = self.inner.cgroups.remove(&default_cgroup(&id));
                let _ = remove_directory(directory).await;
                Err(error)
            }
        }
    }

    /// Stops a pod. Does nothing the second time: `RemovePodSandbox` usually follows `StopPodSandbox`.
    async fn stop_pod(&self, pod: &Arc<Pod>) -> Result<()> {
        if pod.is_ended.load(Ordering::Acquire) {
            return Ok(());
        }
        let is_alive = *pod.is_ready.borrow();
        // Detached first: CNI plugins need the network namespace, which the supervisor keeps alive.
        self.detach_by_cni(&pod.id, &pod.directory, is_alive).await?;
        let result = supervisor_client::call(&pod.directory, &SupervisorRequest::Stop).await;
        if result.is_err() {
            let _ = supervisor_client::kill_supervisor(&pod.directory).await;
        }
        if *pod.is_ready.borrow() {
            let mut ready = pod.is_ready.subscribe();
            let stopped = tokio::time::timeout(KILL_TIMEOUT, ready.wait_for(|ready| !ready)).await;
            if stopped.is_err() {
                let reason = result.err().unwrap_or_else(|| "the pod supervisor is still running".to_owned());
                return Err(call_error("StopPodSandbox", reason));
            }
        }
        self.inner.cleanup_pod(pod);
        self.inner.pool.release(&pod.id);
        pod.is_ended.store(true, Ordering::Release);
        Ok(())
    }

    /// Kills the processes in a cgroup and removes it once it is empty.
    async fn remove_cgroup(&self, group: &str, call: &'static str) -> Result<()> {
        let attempt = async {
            loop {
                let _ = self.inner.cgroups.kill(group);
                if self.inner.cgroups.remove(group).is_ok() {
                    return;
                }
                tokio::time::sleep(RETRY_INTERVAL).await;
            }
        };
        let done = tokio::time::timeout(KILL_TIMEOUT, attempt).await;
        done.map_err(|_| call_error(call, format!("the cgroup {group} is still in use")))
    }

    async fn delete_container(&self, pod: &Arc<Pod>, known: &Arc<Known>) -> Result<()> {
        const CALL: &str = "RemoveContainer";
        self.signal_and_wait(pod, known, SIGKILL, KILL_TIMEOUT, CALL).await?;
        let _ = supervisor_client::call(
            &pod.directory,
            &SupervisorRequest::Forget { container: known.id.clone() },
        )
        .await;
        let config = pod.record.lock().config.clone().unwrap_or_default();
        self.remove_cgroup(&translate::cgroup(&config, &known.id), CALL).await?;
        run_hooks(pod.directory.join(&known.id), Stage::Poststop, "stopped", 0).await;
        remove_directory(pod.directory.join(&known.id))
            .await
            .map_err(io_error(CALL, "remove the container files"))?;
        // Removed from the table last, so that a retried call finds the container as long as any of it
        // is left.
        pod.containers.lock().remove(&known.id);
        self.inner.events.publish(ContainerEventType::Deleted, pod, &known.id);
        Ok(())
    }

    async fn signal_and_wait(
        &self,
        pod: &Pod,
        known: &Known,
        signal: i32,
        wait: Duration,
        call: &'static str,
    ) -> Result<()> {
        if !known.is_running() {
            return Ok(());
        }
        let request = SupervisorRequest::Signal { container: known.id.clone(), signal };
        if let Err(message) = supervisor_client::call(&pod.directory, &request).await
            && known.is_running()
        {
            return Err(call_error(call, message));
        }
        let mut status = known.status.subscribe();
        let ended = status.wait_for(|status| status.as_ref().is_some_and(|status| status.finished != 0));
        match tokio::time::timeout(wait, ended).await {
            Ok(_) => Ok(()),
            Err(_) => Err(Error::Rejected {
                call,
                code: ErrorCode::Timeout,
                message: "the container is still running".into(),
            }),
        }
    }
}

/// Runs the container's hooks of a stage. A failure is only logged.
async fn run_hooks(directory: PathBuf, stage: Stage, status: &'static str, pid: i32) {
    // config.json exists only for containers with hooks.
    if !directory.join("config.json").exists() {
        return;
    }
    let work = move || -> std::result::Result<(), String> {
        let text = std::fs::read(directory.join("spec.json")).map_err(|error| error.to_string())?;
        let spec: spec::Container = serde_json::from_slice(&text).map_err(|error| error.to_string())?;
        let id = directory.file_name().unwrap_or_default().to_string_lossy().into_owned();
        let state = hooks::HookState { id: &id, status, pid, bundle: &directory };
        hooks::run(&spec.hooks, stage, &state, &directory)
    };
    let done = tokio::task::spawn_blocking(work).await;
    if let Err(error) = done.unwrap_or_else(|error| Err(error.to_string())) {
        tracing::warn!(%error, "container hook failed");
    }
}

async fn remove_directory(directory: std::path::PathBuf) -> std::io::Result<()> {
    let started = tokio::time::Instant::now();
    loop {
        let directory = directory.clone();
        let removed = tokio::task::spawn_blocking(move || sys::trees::remove(&directory)).await;
        match removed.map_err(std::io::Error::other)? {
            // A killed process may still be exiting and create a last file.
            Err(error)
                if error.kind() == std::io::ErrorKind::DirectoryNotEmpty
                    && started.elapsed() < KILL_TIMEOUT =>
            {
                tokio::time::sleep(RETRY_INTERVAL).await;
            }
            Err(error) if error.kind() != std::io::ErrorKind::NotFound => return Err(error),
            _ => return Ok(()),
        }
    }
}

#[async_trait]
impl Runtime for Embedded {
    async fn version(&self) -> Result<VersionResponse> {
        Ok(VersionResponse {
            version: "0.1.0".to_owned(),
            runtime_name: "skiff".to_owned(),
            runtime_version: env!("CARGO_PKG_VERSION").to_owned(),
            runtime_api_version: "v1".to_owned(),
        })
    }

    async fn status(&self) -> Result<StatusResponse> {
        let network_error = self.network_error();
        let condition = |name: &str, status: bool, reason: &str, message: &str| RuntimeCondition {
            type_: name.to_owned(),
            status,
            reason: if status { String::new() } else { reason.to_owned() },
            message: if status { String::new() } else { message.to_owned() },
        };
        let conditions = vec![
            condition("RuntimeReady", true, "", ""),
            condition(
                "NetworkReady",
                network_error.is_none(),
                "NetworkPluginNotReady",
                network_error.as_deref().unwrap_or_default(),
            ),
        ];
        let features = RuntimeHandlerFeatures {
            recursive_read_only_mounts: true,
            user_namespaces: has_user_namespaces(),
        };
        let handler = RuntimeHandler { name: String::new(), features: Some(features) };
        Ok(StatusResponse {
            status: Some(RuntimeStatus { conditions }),
            info: Default::default(),
            runtime_handlers: vec![handler],
            features: Some(RuntimeFeatures { supplemental_groups_policy: true }),
        })
    }

    async fn set_pod_cidr(&self, cidr: &str) -> Result<()> {
        let ranges: std::result::Result<Vec<_>, String> = cidr.split(',').map(str::parse).collect();
        let ranges = ranges.map_err(|message| call_error("UpdateRuntimeConfig", message))?;
        *self.inner.ranges.write() = ranges;
        self.inner.networks.notify_one();
        Ok(())
    }

    async fn wait_for_change(&self, since: u64) -> u64 {
        self.inner.events.wait_for_change(since).await
    }

    async fn run_sandbox(&self, config: &PodSandboxConfig, handler: &str) -> Result<String> {
        self.run_pod(config, handler, false).await
    }

    async fn stop_sandbox(&self, id: &str) -> Result<()> {
        let Some(pod) = self.inner.pods.get(id) else { return Ok(()) };
        self.stop_pod(&pod).await
    }

    async fn remove_sandbox(&self, id: &str) -> Result<()> {
        let Some(pod) = self.inner.pods.get(id) else { return Ok(()) };
        self.stop_pod(&pod).await?;
        let containers: Vec<_> = pod.containers.lock().values().cloned().collect();
        for container in containers {
            self.delete_container(&pod, &container).await?;
        }
        let config = pod.record.lock().config.clone().unwrap_or_default();
        if config.linux.is_some_and(|linux| linux.cgroup_parent == default_cgroup(id)) {
            self.remove_cgroup(&default_cgroup(id), "RemovePodSandbox").await?;
        }
        remove_directory(pod.directory.clone())
            .await
            .map_err(io_error("RemovePodSandbox", "remove the pod files"))?;
        self.inner.pods.remove(id);
        self.inner.events.publish(ContainerEventType::Deleted, &pod, id);
        Ok(())
    }

    async fn sandbox_status(&self, id: &str) -> Result<PodSandboxStatus> {
        Ok(view::sandbox_status(&*self.inner.pod(id, "PodSandboxStatus")?))
    }

    async fn sandboxes(&self, labels: &[(&str, &str)]) -> Result<Vec<PodSandbox>> {
        let pods = self.inner.pods.all();
        let matches = |pod: &&Arc<Pod>| {
            let record = pod.record.lock();
            record.config.as_ref().is_some_and(|config| view::has_labels(&config.labels, labels))
        };
        Ok(pods.iter().filter(matches).map(|pod| view::sandbox(pod)).collect())
    }

    async fn create_container(
        &self,
        sandbox: &str,
        config: &ContainerConfig,
        _sandbox_config: &PodSandboxConfig,
    ) -> Result<String> {
        const CALL: &str = "CreateContainer";
        let pod = self.inner.pod(sandbox, CALL)?;
        if !*pod.is_ready.borrow() {
            return Err(call_error(CALL, format!("sandbox container {sandbox:?} is not running")));
        }
        let ContainerMetadata { name, attempt } = config.metadata.clone().unwrap_or_default();
        let taken = || {
            let containers = pod.containers.lock();
            let has_it = |known: &&Arc<Known>| {
                known.record.config.as_ref().is_some_and(|known| known.metadata == config.metadata)
            };
            containers.values().find(has_it).map(|known| known.id.clone())
        };
        let reserved = self.inner.pods.reserve(format!("{name}_{sandbox}_{attempt}"), taken);
        let _reserved = reserved
            .map_err(|reason| call_error(CALL, format!("failed to reserve container name: {reason}")))?;
        let pod_config = pod.record.lock().config.clone().unwrap_or_default();
        let name = config.image.clone().unwrap_or_default().image;
        let image = self.with_store(CALL, {
            let name = name.clone();
            move |store| {
                // The guard keeps garbage collection from deleting these layers before the container is
                // recorded.
                let guard = store.lock_shared()?;
                match store.find(&name)? {
                    Some(found) => Ok(Some((store.config(&found)?, found, guard))),
                    None => Ok(None),
                }
            }
        });
        let (image_config, image, _guard) =
            image.await?.ok_or_else(|| not_found(CALL, format!("image {name:?} not found")))?;
        let volumes = self.volume_layers(config).await?;
        let id = new_id();
        let targets = config.mounts.iter().map(|mount| mount.container_path.as_str());
        let parts = translate::ContainerInputs {
            id: &id,
            image: &image_config.config,
            layers_dir: self.inner.images.root().join("layers"),
            layers: iter::once(mountpoint_layer::layer_name(targets))
                .chain(image.layers.iter().cloned())
                .collect(),
            directory: &pod.directory,
            seccomp_dir: &self.inner.config.seccomp_profiles,
            volumes: &volumes,
            modules: &SecurityModules::of_host(),
        };
        let container_edits = cdi::resolve_devices(&cdi::DIRECTORIES.map(Path::new), &config.cdi_devices)
            .map_err(|reason| {
                call_error(
                    CALL,
                    format!("failed to create containerd container: CDI device injection failed: {reason}"),
                )
            })?;
        let mut cdi_config = config.clone();
        container_edits.apply(&mut cdi_config);
        let mut spec = translate::container(&cdi_config, &pod_config, parts)
            .map_err(|message| call_error(CALL, message))?;
        container_edits.apply_to_spec(&mut spec);
        for volume in spec.mounts.iter().filter_map(|mount| mount.image.as_ref()) {
            self.check_sub_path(volume).map_err(|message| call_error(CALL, message))?;
        }
        let digests = image.digests.iter().next().cloned();
        let record = ContainerRecord {
            config: Some(config.clone()),
            created: now(),
            image_ref: digests.unwrap_or_else(|| image.id.to_string()),
            image: image.id.to_string(),
            layers: image.layers.into_iter().chain(volumes.into_values().flatten()).collect(),
            stop_signal: sys::process::signal_number(&image_config.config.stop_signal).unwrap_or(SIGTERM),
            resources: None,
        };
        let directory = pod.directory.join(&id);
        let write = || -> std::io::Result<()> {
            std::fs::create_dir(&directory)?;
            // A kubelet mounts a hosts file of its own. Pods of other CRI clients get a copy of the
            // host's.
            let hosts = pod.directory.join("hosts");
            if spec.mounts.iter().any(|mount| mount.source == hosts) && !hosts.exists() {
                std::fs::write(&hosts, std::fs::read("/etc/hosts").unwrap_or_default())?;
            }
            let written = serde_json::to_vec(&spec).expect("has only strings and numbers");
            std::fs::write(directory.join("spec.json"), written)?;
            if !spec.hooks.is_empty() {
                let bundle_config = hooks::bundle_config(&spec, &directory, &config.annotations);
                std::fs::write(directory.join("config.json"), bundle_config.to_string())?;
            }
            record::write(&directory, &record)
        };
        write().map_err(io_error(CALL, "write the container record"))?;
        pod.containers.lock().insert(id.clone(), Arc::new(Known::new(id.clone(), record, None)));
        self.inner.events.publish(ContainerEventType::Created, &pod, &id);
        Ok(id)
    }

    async fn start_container(&self, id: &str) -> Result<()> {
        const CALL: &str = "StartContainer";
        let (pod, known) = self.inner.container(id, CALL)?;
        match view::state(&known) {
            ContainerState::Created => {}
            state => {
                let state = format!("{state:?}").to_uppercase();
                return Err(call_error(CALL, format!("container is in CONTAINER_{state} state")));
            }
        }
        let result =
            supervisor_client::call(&pod.directory, &SupervisorRequest::Start { container: id.to_owned() })
                .await;
        // The status arrives on the watch connection. Wait for it, so that a `ContainerStatus` after
        // this call shows the start.
        let mut status = known.status.subscribe();
        let status_update = status.wait_for(|status| {
            status.as_ref().is_some_and(|status| status.started != 0 || status.failure.is_some())
        });
        let _ = tokio::time::timeout(STATUS_UPDATE_TIMEOUT, status_update).await;
        result.map_err(|message| {
            call_error(CALL, format!("failed to create containerd task: failed to create shim task: OCI runtime create failed: runc create failed: unable to start container process: error during container init: {message}"))
        })?;
        self.collect_if_needed();
        let pid = known.status().map_or(0, |status| status.pid);
        run_hooks(pod.directory.join(id), Stage::Poststart, "running", pid).await;
        Ok(())
    }

    async fn stop_container(&self, id: &str, grace: Duration) -> Result<()> {
        const CALL: &str = "StopContainer";
        let Ok((pod, known)) = self.inner.container(id, CALL) else { return Ok(()) };
        if !grace.is_zero() {
            match self.signal_and_wait(&pod, &known, known.record.stop_signal, grace, CALL).await {
                Err(Error::Rejected { code: ErrorCode::Timeout, .. }) => {}
                other => return other,
            }
        }
        self.signal_and_wait(&pod, &known, SIGKILL, KILL_TIMEOUT, CALL).await
    }

    async fn remove_container(&self, id: &str) -> Result<()> {
        match self.inner.pods.container(id) {
            Some((pod, known)) => self.delete_container(&pod, &known).await,
            None => Ok(()),
        }
    }

    async fn container_status(&self, id: &str) -> Result<ContainerStatus> {
        let (pod, known) = self.inner.container(id, "ContainerStatus")?;
        Ok(view::container_status(&pod, &known))
    }

    async fn containers(&self, labels: &[(&str, &str)]) -> Result<Vec<Container>> {
        let mut found = Vec::new();
        for pod in self.inner.pods.all() {
            let matches = |known: &&Arc<Known>| {
                known.record.config.as_ref().is_some_and(|config| view::has_labels(&config.labels, labels))
            };
            found.extend(
                pod.containers.lock().values().filter(matches).map(|known| view::container(&pod, known)),
            );
        }
        Ok(found)
    }

    async fn update_resources(&self, id: &str, resources: &LinuxContainerResources) -> Result<()> {
        const CALL: &str = "UpdateContainerResources";
        let (pod, known) = self.inner.container(id, CALL)?;
        let config = pod.record.lock().config.clone().unwrap_or_default();
        // Held during the whole update, so that the recorded resources are those applied last.
        let mut present = known.resources.lock();
        let changed = translate::merge_resources(&present, resources);
        match view::state(&known) {
            // The cgroup does not exist before the start.
            ContainerState::Created => update_spec(&pod.directory.join(id), &changed),
            _ => {
                let group = translate::cgroup(&config, id);
                self.inner.cgroups.limit(&group, &translate::limits(resources))
            }
        }
        .map_err(io_error(CALL, "update resource limits"))?;
        let record = ContainerRecord { resources: Some(changed.clone()), ..known.record.clone() };
        record::write(&pod.directory.join(id), &record)
            .map_err(io_error(CALL, "write the container record"))?;
        *present = changed;
        Ok(())
    }

    async fn reopen_log(&self, id: &str) -> Result<()> {
        const CALL: &str = "ReopenContainerLog";
        let (pod, known) = self.inner.container(id, CALL)?;
        if !known.is_running() {
            return Err(call_error(CALL, "container is not running"));
        }
        let request = SupervisorRequest::Reopen { container: id.to_owned() };
        supervisor_client::call(&pod.directory, &request).await.map_err(|message| call_error(CALL, message))
    }

    async fn stats(&self) -> Result<Vec<ContainerStats>> {
        let counted = self.usage_of(self.inner.pods.all()).await;
        Ok(counted.into_iter().flat_map(|(_, stats)| stats).collect())
    }

    async fn exec_sync(&self, id: &str, command: &[String], timeout: Duration) -> Result<ExecSyncResponse> {
        self.run_command(id, command, timeout).await
    }

    async fn exec(&self, request: &ExecRequest) -> Result<String> {
        self.open_exec(request)
    }

    async fn attach(&self, request: &AttachRequest) -> Result<String> {
        self.open_attach(request)
    }

    async fn port_forward(&self, sandbox: &str, ports: &[i32]) -> Result<String> {
        self.open_port_forward(sandbox, ports)
    }

    async fn images(&self) -> Result<Vec<Image>> {
        self.list_images().await
    }

    async fn image(&self, image: &ImageSpec) -> Result<Option<Image>> {
        self.find_image(image).await
    }

    async fn pull(
        &self,
        image: &ImageSpec,
        auth: Option<&AuthConfig>,
        _: &PodSandboxConfig,
    ) -> Result<String> {
        self.pull_image(image, auth).await
    }

    async fn remove_image(&self, image: &ImageSpec) -> Result<()> {
        self.delete_image(image).await
    }

    async fn image_filesystems(&self) -> Result<Vec<FilesystemUsage>> {
        let root = self.inner.images.root().display().to_string();
        let (bytes, files) = self.with_store("ImageFsInfo", |store| Ok(store.usage())).await?;
        Ok(vec![FilesystemUsage {
            timestamp: now(),
            fs_id: Some(FilesystemIdentifier { mountpoint: root }),
            used_bytes: Some(Uint64Value { value: bytes }),
            inodes_used: Some(Uint64Value { value: files }),
        }])
    }
}
