//! Starting a container: its image, its environment, its volumes, itself.

use std::sync::Arc;
use std::time::Instant;

use k8s_openapi::api::core::v1::{Container, Pod};
use reconcile::{Object as _, Severity};
use runtime::cri::ImageSpec;

use crate::env::{Addresses, environment};
use crate::observed::{Observed, State};
use crate::pull_secrets::Shown;
use crate::volumes::{self, Materials};
use crate::{Node, config, docker_config, hooks, pull_secrets, users};

/// Why a container was not started.
pub struct Failed {
    /// The reason its state shows, such as `ErrImagePull`.
    pub reason: String,
    pub message: String,
    /// Nothing is wrong: others have to do something first.
    pub waits: bool,
}

fn failed(reason: &str, message: impl Into<String>) -> Failed {
    Failed { reason: reason.to_owned(), message: message.into(), waits: false }
}

/// Starts one run of a container in the pod's sandbox.
pub async fn start(
    node: &Arc<Node>,
    pod: &Pod,
    seen: &Observed,
    spec: &Container,
    attempt: u32,
) -> Result<(), Failed> {
    let Some(sandbox) = seen.sandbox() else { return Ok(()) };
    let needed = Needed {
        image: spec.image.as_deref().unwrap_or_default(),
        policy: spec.image_pull_policy.as_deref(),
        container: Some(&spec.name),
    };
    let image = image(node, pod, &needed).await?;
    let images = image_volumes(node, pod, spec).await?;
    let node_ips = node.settings.node_ips();
    let addresses = || Addresses { host_ips: &node_ips, pod_ips: &sandbox.ips };
    let sources = node.sources();
    let unusable = |why: String| {
        note(node, pod, &spec.name, Severity::Warning, "Failed", format!("Error: {why}"));
        failed("CreateContainerConfigError", why)
    };
    let materials = Materials {
        ctx: &node.ctx,
        sources: &sources,
        settings: &node.settings,
        csi: &node.csi,
        in_memory: node.sees_mounts,
        addresses: addresses(),
        is_first: seen.containers.is_empty() && !node.remember(pod, |memory| memory.has_volumes),
    };
    let places = match volumes::set_up(pod, &materials).await {
        Ok(places) => {
            node.remember(pod, |memory| memory.has_volumes = true);
            places
        }
        Err(error) if error.waits => return Err(Failed { waits: true, ..failed("ContainerCreating", "") }),
        Err(error) => {
            node.ctx.events.warning(pod, "FailedMount", error.to_string());
            return Err(failed("ContainerCreating", ""));
        }
    };
    // Only now, since variables may come from files in volumes.
    let path = |name: &str| places.get(name).map(|place| place.path.as_path());
    let env = environment(pod, spec, &sources, &addresses(), &path).map_err(|missing| unusable(missing.0))?;
    let creating = |message: String| {
        note(node, pod, &spec.name, Severity::Warning, "Failed", format!("Error: {message}"));
        failed("CreateContainerError", message)
    };
    volumes::write_files(pod, spec, attempt, &node.settings, &sandbox.ips)
        .map_err(|error| creating(error.to_string()))?;
    let mounted = volumes::Mounted { attempt, places: &places, images: &images, env: &env };
    let recursive = node.is_recursive(pod).await;
    let mounts = volumes::mounts(pod, spec, &mounted, recursive, &node.settings)
        .map_err(|why| unusable(why.to_string()))?;
    crate::identity::check(node, pod, spec, &image).await.map_err(unusable)?;
    let mut sandbox_config =
        config::sandbox(pod, sandbox.attempt, crate::cgroups::of(pod, &node.settings), &node.settings);
    let mut config = config::container(pod, spec, attempt, &image, &env, mounts, &node.settings);
    config.devices.extend(volumes::devices(spec, &places).map_err(|why| unusable(why.to_string()))?);
    config.cdi_devices = node.dra.devices(pod, spec).map_err(unusable)?;
    node.devices.hand_over(pod.uid(), &spec.name, &mut config).await.map_err(creating)?;
    if users::are_own(pod) {
        let own = node.users.of(pod.uid()).map_err(creating)?;
        users::into_sandbox(&mut sandbox_config, &own);
        users::into_container(&mut config, &own);
    }
    config::look_into(&mut config, target(pod, seen, &spec.name));
    let log = node.settings.log_dir(&pod.key(), pod.uid()).join(&spec.name);
    std::fs::create_dir_all(&log).map_err(|error| creating(error.to_string()))?;
    // One that was made before and never started.
    let made = seen
        .containers
        .iter()
        .find(|run| run.name == spec.name && run.attempt == attempt && run.state == State::Created);
    if let Some(made) = made
        && let Err(error) = node.runtime.remove_container(&made.id).await
    {
        // Somebody before us has asked for its start, which is still going on.
        tracing::debug!(%error, pod = %pod.key(), "waiting for a container that is about to be started");
        return Err(Failed { waits: true, ..failed("ContainerCreating", "") });
    }
    let id = node.runtime.create_container(&sandbox.id, &config, &sandbox_config).await;
    let id = id.map_err(|error| creating(error.message()))?;
    note(node, pod, &spec.name, Severity::Normal, "Created", "Container created".into());
    if let Err(error) = node.runtime.start_container(&id).await {
        let message = error.message();
        note(node, pod, &spec.name, Severity::Warning, "Failed", format!("Error: {message}"));
        return Err(failed("RunContainerError", message));
    }
    note(node, pod, &spec.name, Severity::Normal, "Started", "Container started".into());
    remove_old_runs(node, pod, seen, &spec.name).await;
    if let Some(hook) = spec.lifecycle.as_ref().and_then(|lifecycle| lifecycle.post_start.as_ref()) {
        let run = hooks::run(node, pod, spec, &id, hook);
        if let Some(Err(message)) = hooks::unless(|| node.is_to_end(pod), run).await {
            tracing::warn!(error = message, pod = %pod.key(), container = spec.name, "a hook has failed");
            let told = "PostStartHook failed".to_owned();
            note(node, pod, &spec.name, Severity::Warning, "FailedPostStartHook", told);
            let _ = node.runtime.stop_container(&id, std::time::Duration::from_secs(30)).await;
            return Err(failed("PostStartHookError", message));
        }
    }
    Ok(())
}

/// The run whose processes one for having a look is to see.
fn target<'a>(pod: &Pod, seen: &'a Observed, name: &str) -> Option<&'a str> {
    let looks = pod.spec.as_ref()?.ephemeral_containers.as_ref()?;
    let target = looks.iter().find(|look| look.name == name)?.target_container_name.as_deref()?;
    seen.latest(target).filter(|run| run.state.is_running()).map(|run| run.id.as_str())
}

/// All but the last run before this one are of no interest any more.
async fn remove_old_runs(node: &Node, pod: &Pod, seen: &Observed, name: &str) {
    for old in seen.containers.iter().filter(|run| run.name == name).skip(1) {
        if let Err(error) = node.runtime.remove_container(&old.id).await {
            tracing::debug!(%error, "cannot remove an old container");
            continue;
        }
        let _ = std::fs::remove_file(volumes::last_words(pod, name, old.attempt, &node.settings));
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

/// The volumes of a container that are images, pulled where that is wanted and needed.
async fn image_volumes(node: &Node, pod: &Pod, spec: &Container) -> Result<volumes::Images, Failed> {
    let mut images = volumes::Images::new();
    for volume in pod.spec.iter().flat_map(|spec| spec.volumes.iter().flatten()) {
        let is_mounted = spec.volume_mounts.iter().flatten().any(|mount| mount.name == volume.name);
        let Some(source) = volume.image.as_ref().filter(|_| is_mounted) else { continue };
        let needed = Needed {
            image: source.reference.as_deref().unwrap_or_default(),
            policy: source.pull_policy.as_deref(),
            container: None,
        };
        let found = image(node, pod, &needed).await.inspect_err(|failed| {
            let message = format!("Error: {}", failed.reason);
            note(node, pod, &spec.name, Severity::Warning, "Failed", message);
        })?;
        images.insert(volume.name.clone(), found);
    }
    Ok(images)
}

/// An image that a pod needs.
struct Needed<'a> {
    image: &'a str,
    policy: Option<&'a str>,
    /// Whose image it is; nobody's for one that is a volume.
    container: Option<&'a str>,
}

/// The image, pulled where that is wanted and needed.
async fn image(node: &Node, pod: &Pod, needed: &Needed<'_>) -> Result<ImageSpec, Failed> {
    let name = needed.image.to_owned();
    let say = |severity: Severity, reason: &str, message: String| match needed.container {
        Some(container) => note(node, pod, container, severity, reason, message),
        None => node.ctx.events.record(reconcile::reference(pod), severity, reason, message),
    };
    let tagged = crate::reference::with_tag(&name).map_err(|why| {
        let message =
            format!("Failed to apply default image tag {name:?}: couldn't parse image name {name:?}: {why}");
        say(Severity::Warning, "InspectFailed", message.clone());
        say(Severity::Warning, "Failed", "Error: InvalidImageName".to_owned());
        failed("InvalidImageName", message)
    })?;
    let wanted = ImageSpec { image: tagged, user_specified_image: name.clone(), ..ImageSpec::default() };
    let warn = |reason: &str, message: String| say(Severity::Warning, reason, message);
    let present = node.runtime.image(&wanted).await.map_err(|error| {
        warn("InspectFailed", format!("Failed to inspect image {name:?}: {error}"));
        failed("ImageInspectError", error.message())
    })?;
    let default = if wanted.image.ends_with(":latest") { "Always" } else { "IfNotPresent" };
    let policy = needed.policy.unwrap_or(default);
    let mut keys = pull_secrets::keys(node, pod, &wanted.image);
    let home = std::env::home_dir();
    keys.extend(docker_config::keys(&node.settings.root, home.as_deref(), &wanted.image));
    let may_use = |keys: &[Shown]| {
        let id = &present.as_ref().filter(|_| policy != "Always")?.id;
        let secrets: Vec<_> = keys.iter().filter_map(|key| key.from.clone()).collect();
        let pulled = &node.settings.keeping.pulled;
        node.pulled.may_use(pulled, &name, id, &secrets, node.ctx.clock.now()).then(|| id.clone())
    };
    let mut usable = may_use(&keys);
    // Programs are asked last, and not where nothing depends on what they say.
    if usable.is_none() && (policy != "Never" || present.is_some()) {
        keys.extend(node.credentials.keys(&node.ctx, pod, &wanted.image).await);
        usable = may_use(&keys);
    }
    match (policy, usable) {
        (_, Some(image)) => {
            let message =
                format!("Container image {name:?} already present on machine and can be accessed by the pod");
            say(Severity::Normal, "Pulled", message);
            return Ok(ImageSpec { image, user_specified_image: name, ..ImageSpec::default() });
        }
        // Whether it is there is nobody's business who may not use it.
        ("Never", _) => {
            let message = format!("Container image {name:?} is not present with pull policy of Never");
            warn("ErrImageNeverPull", message.clone());
            warn("Failed", "Error: ErrImageNeverPull".into());
            return Err(failed("ErrImageNeverPull", message));
        }
        _ => {}
    }
    node.pulled.begin(&name).map_err(|why| {
        let message = format!("Failed to record image pull intent for container image {name:?}: {why}");
        warn("Failed", message.clone());
        failed("ErrImagePull", message)
    })?;
    say(Severity::Normal, "Pulling", format!("Pulling image {name:?}"));
    let begun = Instant::now();
    let sandbox = config::sandbox(pod, 0, crate::cgroups::of(pod, &node.settings), &node.settings);
    let mut last = String::new();
    // Without any, the registry may still let everybody have it.
    let tries: Vec<Option<&Shown>> =
        if keys.is_empty() { vec![None] } else { keys.iter().map(Some).collect() };
    for key in tries {
        match node.runtime.pull(&wanted, key.map(|key| &key.auth), &sandbox).await {
            Ok(reference) => {
                let time = format!("{:.3}s", begun.elapsed().as_secs_f64());
                let there = node.runtime.image(&wanted).await.ok().flatten();
                let size = there.as_ref().map_or(0, |image| image.size);
                let id = there.as_ref().map_or(&reference, |image| &image.id);
                node.pulled.end(
                    &name,
                    Some((id, key.and_then(|key| key.from.as_ref()))),
                    node.ctx.clock.now(),
                );
                let message = format!(
                    "Successfully pulled image {name:?} in {time} ({time} including waiting). Image size: {size} bytes."
                );
                say(Severity::Normal, "Pulled", message);
                return Ok(ImageSpec {
                    image: reference,
                    user_specified_image: name,
                    ..ImageSpec::default()
                });
            }
            Err(error) => last = error.message(),
        }
    }
    node.pulled.end(&name, None, node.ctx.clock.now());
    warn("Failed", format!("Failed to pull image {name:?}: {last}"));
    warn("Failed", "Error: ErrImagePull".into());
    Err(failed("ErrImagePull", last))
}

/// An event about one container of a pod.
pub fn note(node: &Node, pod: &Pod, container: &str, severity: Severity, reason: &str, message: String) {
    let mut about = reconcile::reference(pod);
    let inits = pod.spec.as_ref().and_then(|spec| spec.init_containers.as_ref());
    let init = inits.into_iter().flatten().any(|init| init.name == container);
    let looks = pod.spec.as_ref().and_then(|spec| spec.ephemeral_containers.as_ref());
    let look = looks.into_iter().flatten().any(|look| look.name == container);
    let field = match (init, look) {
        (true, _) => "initContainers",
        (_, true) => "ephemeralContainers",
        _ => "containers",
    };
    about.field_path = Some(format!("spec.{field}{{{container}}}"));
    about.namespace = Some(pod.namespace().to_owned());
    node.ctx.events.record(about, severity, reason, message);
}
