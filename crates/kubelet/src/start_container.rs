//! Starts containers: images, volumes and environment first, then the container itself.

use std::sync::Arc;
use std::time::Instant;

use k8s_openapi::api::core::v1::{Container, Pod};
use reconcile::{EventType, Object as _};
use runtime::cri::{Image, ImageSpec};

use crate::env::{Addresses, environment};
use crate::image_pull_records::PullSecret;
use crate::image_pulls::{PullKey, PullProgress, PullResult};
use crate::observed::{ObservedPod, State};
use crate::pull_secrets::RegistryCredential;
use crate::volumes::{self, VolumeContext};
use crate::{Node, config, docker_config, hooks, pull_secrets, user_namespaces};

/// The outcome of a start that did not fail.
#[derive(PartialEq)]
pub enum StartResult {
    Done,
    /// An image is being pulled. The pod is synced again when the pull has finished.
    Pulling,
}

/// Why a container was not started.
#[derive(Clone)]
pub struct StartError {
    /// The reason in the container's state, such as `ErrImagePull`.
    pub reason: String,
    pub message: String,
    /// Not an error: another component has to do something first.
    pub waits: bool,
}

fn start_error(reason: &str, message: impl Into<String>) -> StartError {
    StartError { reason: reason.to_owned(), message: message.into(), waits: false }
}

/// Starts a run of a container in the pod's sandbox once its images are present.
pub async fn start_container(
    node: &Arc<Node>,
    pod: &Pod,
    seen: &ObservedPod,
    spec: &Container,
    attempt: u32,
) -> Result<StartResult, StartError> {
    let images = match ensure_images(node, pod, spec).await {
        Ok(None) => return Ok(StartResult::Pulling),
        Ok(Some(images)) => Ok(images),
        Err(failed) => Err(failed),
    };
    node.pulls.consume(pod.uid(), &spec.name);
    let (image, volumes) = images?;
    run_container(node, pod, seen, (spec, attempt), (image, &volumes)).await.map(|()| StartResult::Done)
}

/// Runs a container whose images are present.
async fn run_container(
    node: &Arc<Node>,
    pod: &Pod,
    seen: &ObservedPod,
    (spec, attempt): (&Container, u32),
    (image, images): (ImageSpec, &volumes::VolumeImages),
) -> Result<(), StartError> {
    let Some(sandbox) = seen.sandbox() else { return Ok(()) };
    let node_ips = node.settings.node_ips();
    let addresses = || Addresses { host_ips: &node_ips, pod_ips: &sandbox.ips };
    let sources = node.sources();
    let config_error = |why: String| {
        record_container_event(node, pod, &spec.name, EventType::Warning, "Failed", format!("Error: {why}"));
        start_error("CreateContainerConfigError", why)
    };
    let volume_context = VolumeContext {
        ctx: &node.ctx,
        sources: &sources,
        settings: &node.settings,
        csi: &node.csi,
        tmpfs_visible: node.shares_mounts,
        addresses: addresses(),
        before_first_container: seen.containers.is_empty()
            && !node.with_pod_state(pod, |worker_state| worker_state.volumes_mounted),
    };
    let volume_paths = match volumes::set_up(pod, &volume_context).await {
        Ok(volume_paths) => {
            node.with_pod_state(pod, |worker_state| worker_state.volumes_mounted = true);
            volume_paths
        }
        Err(error) if error.waits => {
            return Err(StartError { waits: true, ..start_error("ContainerCreating", "") });
        }
        Err(error) => {
            node.ctx.events.warning(pod, "FailedMount", error.to_string());
            return Err(start_error("ContainerCreating", ""));
        }
    };
    // After the volumes, because variables may come from files in them.
    let path = |name: &str| volume_paths.get(name).map(|volume| volume.path.as_path());
    let env =
        environment(pod, spec, &sources, &addresses(), &path).map_err(|missing| config_error(missing.0))?;
    let create_error = |message: String| {
        record_container_event(
            node,
            pod,
            &spec.name,
            EventType::Warning,
            "Failed",
            format!("Error: {message}"),
        );
        start_error("CreateContainerError", message)
    };
    volumes::write_container_files(pod, spec, attempt, &node.settings, &sandbox.ips)
        .map_err(|error| create_error(error.to_string()))?;
    let mounted = volumes::MountContext { attempt, volume_paths: &volume_paths, images, env: &env };
    let recursive = node.pod_supports_recursive_read_only(pod).await;
    let mounts = volumes::mounts(pod, spec, &mounted, recursive, &node.settings)
        .map_err(|why| config_error(why.to_string()))?;
    crate::run_as_non_root::verify_non_root(node, pod, spec, &image).await.map_err(config_error)?;
    let mut sandbox_config = config::sandbox(
        pod,
        sandbox.attempt,
        crate::cgroups::pod_cgroup(pod, &node.settings),
        &node.settings,
    );
    let mut config = config::container(pod, spec, attempt, &image, &env, mounts, &node.settings);
    if let Some(security) = config.linux.as_mut().and_then(|linux| linux.security_context.as_mut()) {
        crate::run_as_non_root::set_image_user(node, &image, security).await.map_err(config_error)?;
    }
    config
        .devices
        .extend(volumes::devices(spec, &volume_paths).map_err(|why| config_error(why.to_string()))?);
    config.cdi_devices = node.dra.devices(pod, spec).map_err(config_error)?;
    node.devices.configure_container(pod.uid(), &spec.name, &mut config).await.map_err(create_error)?;
    if user_namespaces::has_user_namespace(pod) {
        let own = node.users.get_or_allocate(pod.uid()).map_err(create_error)?;
        user_namespaces::apply_to_sandbox(&mut sandbox_config, &own);
        user_namespaces::apply_to_container(&mut config, &own);
    }
    config::target_pid_namespace(&mut config, target_container_id(pod, seen, &spec.name));
    let log = node.settings.log_dir(&pod.key(), pod.uid()).join(&spec.name);
    std::fs::create_dir_all(&log).map_err(|error| create_error(error.to_string()))?;
    // A container of this attempt that was created but never started.
    let created_container = seen
        .containers
        .iter()
        .find(|run| run.name == spec.name && run.attempt == attempt && run.state == State::Created);
    if let Some(created_container) = created_container
        && let Err(error) = node.runtime.remove_container(&created_container.id).await
    {
        // A start of it that was requested earlier is still in progress.
        tracing::debug!(%error, pod = %pod.key(), "waiting for an earlier start of the container");
        return Err(StartError { waits: true, ..start_error("ContainerCreating", "") });
    }
    let id = node.runtime.create_container(&sandbox.id, &config, &sandbox_config).await;
    let id = id.map_err(|error| create_error(error.message()))?;
    record_container_event(node, pod, &spec.name, EventType::Normal, "Created", "Container created".into());
    if let Err(error) = node.runtime.start_container(&id).await {
        let message = error.message();
        record_container_event(
            node,
            pod,
            &spec.name,
            EventType::Warning,
            "Failed",
            format!("Error: {message}"),
        );
        return Err(start_error("RunContainerError", message));
    }
    record_container_event(node, pod, &spec.name, EventType::Normal, "Started", "Container started".into());
    remove_old_runs(node, pod, seen, &spec.name).await;
    if let Some(hook) = spec.lifecycle.as_ref().and_then(|lifecycle| lifecycle.post_start.as_ref()) {
        let run = hooks::run(node, pod, spec, &id, hook);
        if let Some(Err(message)) = hooks::run_until_terminating(|| node.is_terminating(pod), run).await {
            tracing::warn!(error = message, pod = %pod.key(), container = spec.name, "post-start hook failed");
            let event_message = "PostStartHook failed".to_owned();
            record_container_event(
                node,
                pod,
                &spec.name,
                EventType::Warning,
                "FailedPostStartHook",
                event_message,
            );
            let _ = node.runtime.stop_container(&id, std::time::Duration::from_secs(30)).await;
            return Err(start_error("PostStartHookError", message));
        }
    }
    Ok(())
}

/// The container whose processes an ephemeral container targets.
fn target_container_id<'a>(pod: &Pod, seen: &'a ObservedPod, name: &str) -> Option<&'a str> {
    let ephemeral_containers = pod.spec.as_ref()?.ephemeral_containers.as_ref()?;
    let target = ephemeral_containers
        .iter()
        .find(|ephemeral| ephemeral.name == name)?
        .target_container_name
        .as_deref()?;
    seen.latest(target).filter(|run| run.state.is_running()).map(|run| run.id.as_str())
}

/// Removes all runs before the previous one, with their logs.
async fn remove_old_runs(node: &Node, pod: &Pod, seen: &ObservedPod, name: &str) {
    for old in seen.containers.iter().filter(|run| run.name == name).skip(1) {
        if let Err(error) = node.runtime.remove_container(&old.id).await {
            tracing::debug!(%error, "cannot remove an old container");
            continue;
        }
        let _ =
            std::fs::remove_file(volumes::termination_message_path(pod, name, old.attempt, &node.settings));
        let log = node.settings.log_dir(&pod.key(), pod.uid()).join(name);
        let prefix = format!("{}.log", old.attempt);
        for entry in std::fs::read_dir(log).into_iter().flatten().flatten() {
            let file = entry.file_name().to_string_lossy().into_owned();
            if file == prefix || file.starts_with(&format!("{prefix}.")) {
                let _ = std::fs::remove_file(entry.path());
            }
        }
    }
}

/// The images of a container and of its image volumes, pulled if necessary; `None` while a pull is
/// in progress.
async fn ensure_images(
    node: &Arc<Node>,
    pod: &Pod,
    spec: &Container,
) -> Result<Option<(ImageSpec, volumes::VolumeImages)>, StartError> {
    let needed = ImageRequest {
        image: spec.image.clone().unwrap_or_default(),
        policy: spec.image_pull_policy.clone(),
        container: spec.name.clone(),
        is_volume: false,
    };
    let Some(own) = ensure_image(node, pod, needed).await? else { return Ok(None) };
    let mut images = volumes::VolumeImages::new();
    for volume in pod.spec.iter().flat_map(|spec| spec.volumes.iter().flatten()) {
        let is_mounted = spec.volume_mounts.iter().flatten().any(|mount| mount.name == volume.name);
        let Some(source) = volume.image.as_ref().filter(|_| is_mounted) else { continue };
        let needed = ImageRequest {
            image: source.reference.clone().unwrap_or_default(),
            policy: source.pull_policy.clone(),
            container: spec.name.clone(),
            is_volume: true,
        };
        let found = ensure_image(node, pod, needed).await.inspect_err(|failed| {
            let message = format!("Error: {}", failed.reason);
            record_container_event(node, pod, &spec.name, EventType::Warning, "Failed", message);
        })?;
        let Some(found) = found else { return Ok(None) };
        images.insert(volume.name.clone(), found);
    }
    Ok(Some((own, images)))
}

/// An image that a container needs.
struct ImageRequest {
    image: String,
    policy: Option<String>,
    /// The name of the container.
    container: String,
    /// It is the image of a volume and not of the container itself.
    is_volume: bool,
}

impl ImageRequest {
    fn record_event(&self, node: &Node, pod: &Pod, severity: EventType, reason: &str, message: String) {
        match self.is_volume {
            false => record_container_event(node, pod, &self.container, severity, reason, message),
            true => node.ctx.events.record(reconcile::reference(pod), severity, reason, message),
        }
    }

    fn record_warning(&self, node: &Node, pod: &Pod, reason: &str, message: String) {
        self.record_event(node, pod, EventType::Warning, reason, message);
    }

    fn pull_policy(&self, tagged: &str) -> &str {
        let default = if tagged.ends_with(":latest") { "Always" } else { "IfNotPresent" };
        self.policy.as_deref().unwrap_or(default)
    }

    /// The present image, if the pod may use it with these credentials.
    fn present_if_allowed(
        &self,
        node: &Node,
        pod: &Pod,
        present: Option<&Image>,
        policy: &str,
        credentials: &[RegistryCredential],
    ) -> Option<ImageSpec> {
        let id = &present.filter(|_| policy != "Always")?.id;
        let secrets: Vec<_> = credentials.iter().filter_map(|credential| credential.source.clone()).collect();
        let pulled = &node.settings.kubelet_config.pull_policy;
        if !node.pulled.is_access_allowed(pulled, &self.image, id, &secrets, node.ctx.clock.now()) {
            return None;
        }
        let name = &self.image;
        let message =
            format!("Container image {name:?} already present on machine and can be accessed by the pod");
        self.record_event(node, pod, EventType::Normal, "Pulled", message);
        let (image, name) = (id.clone(), name.clone());
        Some(ImageSpec { image, user_specified_image: name, ..ImageSpec::default() })
    }
}

/// The image, pulled if necessary; `None` while the pull is in progress.
async fn ensure_image(
    node: &Arc<Node>,
    pod: &Pod,
    needed: ImageRequest,
) -> Result<Option<ImageSpec>, StartError> {
    let pull_key = PullKey { container: needed.container.clone(), image: needed.image.clone() };
    match node.pulls.progress(pod.uid(), &pull_key) {
        Some(PullProgress::InProgress) => return Ok(None),
        Some(PullProgress::Finished(result)) => return result.map(Some),
        None => {}
    }
    let name = needed.image.clone();
    let tagged = crate::image_reference::with_tag(&name).map_err(|why| {
        let message =
            format!("Failed to apply default image tag {name:?}: couldn't parse image name {name:?}: {why}");
        needed.record_warning(node, pod, "InspectFailed", message.clone());
        needed.record_warning(node, pod, "Failed", "Error: InvalidImageName".to_owned());
        start_error("InvalidImageName", message)
    })?;
    let image_spec = ImageSpec { image: tagged, user_specified_image: name.clone(), ..ImageSpec::default() };
    let present = node.runtime.image(&image_spec).await.map_err(|error| {
        needed.record_warning(
            node,
            pod,
            "InspectFailed",
            format!("Failed to inspect image {name:?}: {error}"),
        );
        start_error("ImageInspectError", error.message())
    })?;
    let mut credentials = pull_secrets::registry_credentials(node, pod, &image_spec.image);
    let home = std::env::home_dir();
    credentials.extend(docker_config::credentials_for_image(
        &node.settings.root,
        home.as_deref(),
        &image_spec.image,
    ));
    let policy = needed.pull_policy(&image_spec.image);
    if let Some(usable) = needed.present_if_allowed(node, pod, present.as_ref(), policy, &credentials) {
        return Ok(Some(usable));
    }
    // Credential providers need not run if the result does not depend on them.
    if policy == "Never" && present.is_none() {
        return Err(never_pull_error(node, pod, &needed));
    }
    let fetch = ImagePull { pod: pod.clone(), needed, image_spec, present, credentials };
    let task_node = node.clone();
    let task = |pull_key: PullKey| async move {
        let (pod, result) = fetch.run(&task_node).await;
        task_node.pulls.finish(pod.uid(), &pull_key, result);
        task_node.enqueue(pod.key());
    };
    node.pulls.start(pod.uid(), pull_key.clone(), || tokio::spawn(task(pull_key)).abort_handle());
    Ok(None)
}

/// The error is the same if the image is present but the pod may not use it, so that it does not
/// reveal that.
fn never_pull_error(node: &Node, pod: &Pod, needed: &ImageRequest) -> StartError {
    let message = format!("Container image {:?} is not present with pull policy of Never", needed.image);
    needed.record_warning(node, pod, "ErrImageNeverPull", message.clone());
    needed.record_warning(node, pod, "Failed", "Error: ErrImageNeverPull".into());
    start_error("ErrImageNeverPull", message)
}

/// The slow part: credential providers and the pull. It may be canceled at any time.
struct ImagePull {
    pod: Pod,
    needed: ImageRequest,
    image_spec: ImageSpec,
    /// The present image. Whether the pod may use it is not known yet.
    present: Option<Image>,
    credentials: Vec<RegistryCredential>,
}

impl ImagePull {
    async fn run(mut self, node: &Arc<Node>) -> (Pod, PullResult) {
        let result = self.pull(node).await;
        (self.pod, result)
    }

    async fn pull(&mut self, node: &Arc<Node>) -> PullResult {
        let ImagePull { pod, needed, image_spec: wanted, present, credentials: keys } = self;
        // Credential providers come last, after the pull secrets and the node's own configuration.
        keys.extend(node.credentials.keys(&node.ctx, pod, &wanted.image).await);
        let policy = needed.pull_policy(&wanted.image);
        if let Some(usable) = needed.present_if_allowed(node, pod, present.as_ref(), policy, keys) {
            return Ok(usable);
        }
        if policy == "Never" {
            return Err(never_pull_error(node, pod, needed));
        }
        let name = &needed.image;
        let mut intent = PullIntent::record(node, name).map_err(|why| {
            let message = format!("Failed to record image pull intent for container image {name:?}: {why}");
            needed.record_warning(node, pod, "Failed", message.clone());
            start_error("ErrImagePull", message)
        })?;
        needed.record_event(node, pod, EventType::Normal, "Pulling", format!("Pulling image {name:?}"));
        let queued_at = Instant::now();
        // The semaphore is never closed.
        let _permit = node.pulls.permits.acquire().await;
        let started_at = Instant::now();
        let sandbox =
            config::sandbox(pod, 0, crate::cgroups::pod_cgroup(pod, &node.settings), &node.settings);
        let mut last = String::new();
        // Without credentials, the registry may still allow an anonymous pull.
        let attempts: Vec<Option<&RegistryCredential>> =
            if keys.is_empty() { vec![None] } else { keys.iter().map(Some).collect() };
        for credential in attempts {
            match node.runtime.pull(wanted, credential.map(|credential| &credential.auth), &sandbox).await {
                Ok(reference) => {
                    let [time, total] =
                        [started_at, queued_at].map(|from| format!("{:.3}s", from.elapsed().as_secs_f64()));
                    let there = node.runtime.image(wanted).await.ok().flatten();
                    let size = there.as_ref().map_or(0, |image| image.size);
                    let id = there.as_ref().map_or(&reference, |image| &image.id);
                    intent.finish(Some((id, credential.and_then(|credential| credential.source.as_ref()))));
                    let message = format!(
                        "Successfully pulled image {name:?} in {time} ({total} including waiting). Image size: {size} bytes."
                    );
                    needed.record_event(node, pod, EventType::Normal, "Pulled", message);
                    let name = name.clone();
                    return Ok(ImageSpec {
                        image: reference,
                        user_specified_image: name,
                        ..ImageSpec::default()
                    });
                }
                Err(error) => last = error.message(),
            }
        }
        intent.finish(None);
        needed.record_warning(node, pod, "Failed", format!("Failed to pull image {name:?}: {last}"));
        needed.record_warning(node, pod, "Failed", "Error: ErrImagePull".into());
        Err(start_error("ErrImagePull", last))
    }
}

/// The recorded intent to pull an image. It is released even if the pull is canceled.
struct PullIntent<'a> {
    node: &'a Node,
    image: Option<&'a str>,
}

impl<'a> PullIntent<'a> {
    fn record(node: &'a Node, image: &'a str) -> Result<PullIntent<'a>, String> {
        node.pulled.record_pull_intent(image)?;
        Ok(PullIntent { node, image: Some(image) })
    }

    fn finish(&mut self, pulled: Option<(&str, Option<&PullSecret>)>) {
        if let Some(image) = self.image.take() {
            self.node.pulled.record_pull_result(image, pulled, self.node.ctx.clock.now());
        }
    }
}

impl Drop for PullIntent<'_> {
    fn drop(&mut self) {
        if let Some(image) = self.image.take() {
            self.node.pulled.cancel_pull(image);
        }
    }
}

/// Records an event about one container of a pod.
pub fn record_container_event(
    node: &Node,
    pod: &Pod,
    container: &str,
    severity: EventType,
    reason: &str,
    message: String,
) {
    let mut about = reconcile::reference(pod);
    let init_containers = pod.spec.as_ref().and_then(|spec| spec.init_containers.as_ref());
    let init = init_containers.into_iter().flatten().any(|init| init.name == container);
    let ephemeral_containers = pod.spec.as_ref().and_then(|spec| spec.ephemeral_containers.as_ref());
    let ephemeral = ephemeral_containers.into_iter().flatten().any(|ephemeral| ephemeral.name == container);
    let field = match (init, ephemeral) {
        (true, _) => "initContainers",
        (_, true) => "ephemeralContainers",
        _ => "containers",
    };
    about.field_path = Some(format!("spec.{field}{{{container}}}"));
    about.namespace = Some(pod.namespace().to_owned());
    node.ctx.events.record(about, severity, reason, message);
}
