//! Starting a container: its image, its environment, its volumes, itself.

use std::sync::Arc;
use std::time::Instant;

use k8s_openapi::api::core::v1::{Container, Pod};
use reconcile::{Object as _, Severity};
use runtime::cri::{Image, ImageSpec};

use crate::env::{Addresses, environment};
use crate::observed::{Observed, State};
use crate::pull_secrets::Shown;
use crate::pulled::PullSecret;
use crate::pulls::{For, Outcome, Progress};
use crate::volumes::{self, Materials};
use crate::{Node, config, docker_config, hooks, pull_secrets, users};

/// How far a start has come.
#[derive(PartialEq)]
pub enum Started {
    Done,
    /// An image is being pulled; the pod is looked at again when that is over.
    Pulling,
}

/// Why a container was not started.
#[derive(Clone)]
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

/// Starts one run of a container in the pod's sandbox, once its images are there.
pub async fn start(
    node: &Arc<Node>,
    pod: &Pod,
    seen: &Observed,
    spec: &Container,
    attempt: u32,
) -> Result<Started, Failed> {
    let images = match images(node, pod, spec).await {
        Ok(None) => return Ok(Started::Pulling),
        Ok(Some(images)) => Ok(images),
        Err(failed) => Err(failed),
    };
    node.pulls.used(pod.uid(), &spec.name);
    let (image, volumes) = images?;
    run(node, pod, seen, (spec, attempt), (image, &volumes)).await.map(|()| Started::Done)
}

/// Runs a container whose images are there.
async fn run(
    node: &Arc<Node>,
    pod: &Pod,
    seen: &Observed,
    (spec, attempt): (&Container, u32),
    (image, images): (ImageSpec, &volumes::Images),
) -> Result<(), Failed> {
    let Some(sandbox) = seen.sandbox() else { return Ok(()) };
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
    let mounted = volumes::Mounted { attempt, places: &places, images, env: &env };
    let recursive = node.is_recursive(pod).await;
    let mounts = volumes::mounts(pod, spec, &mounted, recursive, &node.settings)
        .map_err(|why| unusable(why.to_string()))?;
    crate::identity::check(node, pod, spec, &image).await.map_err(unusable)?;
    let mut sandbox_config =
        config::sandbox(pod, sandbox.attempt, crate::cgroups::of(pod, &node.settings), &node.settings);
    let mut config = config::container(pod, spec, attempt, &image, &env, mounts, &node.settings);
    if let Some(security) = config.linux.as_mut().and_then(|linux| linux.security_context.as_mut()) {
        crate::identity::complete(node, &image, security).await.map_err(unusable)?;
    }
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

/// The images of a container and of its volumes that are images, pulled where that is wanted and needed; `None` while
/// that goes on.
async fn images(
    node: &Arc<Node>,
    pod: &Pod,
    spec: &Container,
) -> Result<Option<(ImageSpec, volumes::Images)>, Failed> {
    let needed = Needed {
        image: spec.image.clone().unwrap_or_default(),
        policy: spec.image_pull_policy.clone(),
        container: spec.name.clone(),
        is_volume: false,
    };
    let Some(own) = image(node, pod, needed).await? else { return Ok(None) };
    let mut images = volumes::Images::new();
    for volume in pod.spec.iter().flat_map(|spec| spec.volumes.iter().flatten()) {
        let is_mounted = spec.volume_mounts.iter().flatten().any(|mount| mount.name == volume.name);
        let Some(source) = volume.image.as_ref().filter(|_| is_mounted) else { continue };
        let needed = Needed {
            image: source.reference.clone().unwrap_or_default(),
            policy: source.pull_policy.clone(),
            container: spec.name.clone(),
            is_volume: true,
        };
        let found = image(node, pod, needed).await.inspect_err(|failed| {
            let message = format!("Error: {}", failed.reason);
            note(node, pod, &spec.name, Severity::Warning, "Failed", message);
        })?;
        let Some(found) = found else { return Ok(None) };
        images.insert(volume.name.clone(), found);
    }
    Ok(Some((own, images)))
}

/// An image that a pod needs.
struct Needed {
    image: String,
    policy: Option<String>,
    /// For whom.
    container: String,
    /// It is not the container's own.
    is_volume: bool,
}

impl Needed {
    fn say(&self, node: &Node, pod: &Pod, severity: Severity, reason: &str, message: String) {
        match self.is_volume {
            false => note(node, pod, &self.container, severity, reason, message),
            true => node.ctx.events.record(reconcile::reference(pod), severity, reason, message),
        }
    }

    fn warn(&self, node: &Node, pod: &Pod, reason: &str, message: String) {
        self.say(node, pod, Severity::Warning, reason, message);
    }

    fn policy(&self, tagged: &str) -> &str {
        let default = if tagged.ends_with(":latest") { "Always" } else { "IfNotPresent" };
        self.policy.as_deref().unwrap_or(default)
    }

    /// The image that is there, if the pod may use it with these keys.
    fn usable(
        &self,
        node: &Node,
        pod: &Pod,
        present: Option<&Image>,
        policy: &str,
        keys: &[Shown],
    ) -> Option<ImageSpec> {
        let id = &present.filter(|_| policy != "Always")?.id;
        let secrets: Vec<_> = keys.iter().filter_map(|key| key.from.clone()).collect();
        let pulled = &node.settings.keeping.pulled;
        if !node.pulled.may_use(pulled, &self.image, id, &secrets, node.ctx.clock.now()) {
            return None;
        }
        let name = &self.image;
        let message =
            format!("Container image {name:?} already present on machine and can be accessed by the pod");
        self.say(node, pod, Severity::Normal, "Pulled", message);
        let (image, name) = (id.clone(), name.clone());
        Some(ImageSpec { image, user_specified_image: name, ..ImageSpec::default() })
    }
}

/// The image, pulled where that is wanted and needed; `None` while that goes on.
async fn image(node: &Arc<Node>, pod: &Pod, needed: Needed) -> Result<Option<ImageSpec>, Failed> {
    let what = For { container: needed.container.clone(), image: needed.image.clone() };
    match node.pulls.progress(pod.uid(), &what) {
        Some(Progress::UnderWay) => return Ok(None),
        Some(Progress::Ended(outcome)) => return outcome.map(Some),
        None => {}
    }
    let name = needed.image.clone();
    let tagged = crate::reference::with_tag(&name).map_err(|why| {
        let message =
            format!("Failed to apply default image tag {name:?}: couldn't parse image name {name:?}: {why}");
        needed.warn(node, pod, "InspectFailed", message.clone());
        needed.warn(node, pod, "Failed", "Error: InvalidImageName".to_owned());
        failed("InvalidImageName", message)
    })?;
    let wanted = ImageSpec { image: tagged, user_specified_image: name.clone(), ..ImageSpec::default() };
    let present = node.runtime.image(&wanted).await.map_err(|error| {
        needed.warn(node, pod, "InspectFailed", format!("Failed to inspect image {name:?}: {error}"));
        failed("ImageInspectError", error.message())
    })?;
    let mut keys = pull_secrets::keys(node, pod, &wanted.image);
    let home = std::env::home_dir();
    keys.extend(docker_config::keys(&node.settings.root, home.as_deref(), &wanted.image));
    let policy = needed.policy(&wanted.image);
    if let Some(usable) = needed.usable(node, pod, present.as_ref(), policy, &keys) {
        return Ok(Some(usable));
    }
    // Programs need not be asked where nothing depends on what they say.
    if policy == "Never" && present.is_none() {
        return Err(never(node, pod, &needed));
    }
    let fetch = Fetch { pod: pod.clone(), needed, wanted, present, keys };
    let at_work = node.clone();
    let task = |what: For| async move {
        let (pod, outcome) = fetch.run(&at_work).await;
        at_work.pulls.ended(pod.uid(), &what, outcome);
        at_work.look_at(pod.key());
    };
    node.pulls.begin(pod.uid(), what.clone(), || tokio::spawn(task(what)).abort_handle());
    Ok(None)
}

/// Whether it is there is nobody's business who may not use it.
fn never(node: &Node, pod: &Pod, needed: &Needed) -> Failed {
    let message = format!("Container image {:?} is not present with pull policy of Never", needed.image);
    needed.warn(node, pod, "ErrImageNeverPull", message.clone());
    needed.warn(node, pod, "Failed", "Error: ErrImageNeverPull".into());
    failed("ErrImageNeverPull", message)
}

/// What takes long: asking programs for keys, and pulling. Can be left at any time.
struct Fetch {
    pod: Pod,
    needed: Needed,
    wanted: ImageSpec,
    /// It is there, and not yet known whether the pod may use it.
    present: Option<Image>,
    keys: Vec<Shown>,
}

impl Fetch {
    async fn run(mut self, node: &Arc<Node>) -> (Pod, Outcome) {
        let outcome = self.outcome(node).await;
        (self.pod, outcome)
    }

    async fn outcome(&mut self, node: &Arc<Node>) -> Outcome {
        let Fetch { pod, needed, wanted, present, keys } = self;
        // These are asked last.
        keys.extend(node.credentials.keys(&node.ctx, pod, &wanted.image).await);
        let policy = needed.policy(&wanted.image);
        if let Some(usable) = needed.usable(node, pod, present.as_ref(), policy, keys) {
            return Ok(usable);
        }
        if policy == "Never" {
            return Err(never(node, pod, needed));
        }
        let name = &needed.image;
        let mut intent = Intent::begin(node, name).map_err(|why| {
            let message = format!("Failed to record image pull intent for container image {name:?}: {why}");
            needed.warn(node, pod, "Failed", message.clone());
            failed("ErrImagePull", message)
        })?;
        needed.say(node, pod, Severity::Normal, "Pulling", format!("Pulling image {name:?}"));
        let asked = Instant::now();
        // It is never closed.
        let _turn = node.pulls.turns.acquire().await;
        let begun = Instant::now();
        let sandbox = config::sandbox(pod, 0, crate::cgroups::of(pod, &node.settings), &node.settings);
        let mut last = String::new();
        // Without any, the registry may still let everybody have it.
        let tries: Vec<Option<&Shown>> =
            if keys.is_empty() { vec![None] } else { keys.iter().map(Some).collect() };
        for key in tries {
            match node.runtime.pull(wanted, key.map(|key| &key.auth), &sandbox).await {
                Ok(reference) => {
                    let [time, in_all] =
                        [begun, asked].map(|from| format!("{:.3}s", from.elapsed().as_secs_f64()));
                    let there = node.runtime.image(wanted).await.ok().flatten();
                    let size = there.as_ref().map_or(0, |image| image.size);
                    let id = there.as_ref().map_or(&reference, |image| &image.id);
                    intent.end(Some((id, key.and_then(|key| key.from.as_ref()))));
                    let message = format!(
                        "Successfully pulled image {name:?} in {time} ({in_all} including waiting). Image size: {size} bytes."
                    );
                    needed.say(node, pod, Severity::Normal, "Pulled", message);
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
        intent.end(None);
        needed.warn(node, pod, "Failed", format!("Failed to pull image {name:?}: {last}"));
        needed.warn(node, pod, "Failed", "Error: ErrImagePull".into());
        Err(failed("ErrImagePull", last))
    }
}

/// That an image is being pulled. Also where the pull is left in the middle it is said that nobody is at it.
struct Intent<'a> {
    node: &'a Node,
    image: Option<&'a str>,
}

impl<'a> Intent<'a> {
    fn begin(node: &'a Node, image: &'a str) -> Result<Intent<'a>, String> {
        node.pulled.begin(image)?;
        Ok(Intent { node, image: Some(image) })
    }

    fn end(&mut self, pulled: Option<(&str, Option<&PullSecret>)>) {
        if let Some(image) = self.image.take() {
            self.node.pulled.end(image, pulled, self.node.ctx.clock.now());
        }
    }
}

impl Drop for Intent<'_> {
    fn drop(&mut self) {
        if let Some(image) = self.image.take() {
            self.node.pulled.abandon(image);
        }
    }
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
