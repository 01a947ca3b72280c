//! The pure parts of a pod worker, above all what a pod needs next ([`plan`]) and its status
//! ([`status`]).

pub mod back_off;
pub mod plan;
pub mod resize;
pub mod restart_all_containers;
pub mod status;

use k8s_openapi::api::core::v1::{Container, EphemeralContainer, Pod};
use reconcile::Object as _;
use serde_json::{Value, json};

/// All containers of a pod: init, main and ephemeral containers.
pub fn containers(pod: &Pod) -> Vec<Container> {
    let Some(spec) = &pod.spec else { return Vec::new() };
    let mut all = spec.init_containers.clone().unwrap_or_default();
    all.extend(spec.containers.iter().cloned());
    all.extend(spec.ephemeral_containers.iter().flatten().map(from_ephemeral));
    all
}

/// Whether the pod has terminated: its phase is `Succeeded` or `Failed`.
pub fn is_terminal(pod: &Pod) -> bool {
    let phase = pod.status.as_ref().and_then(|status| status.phase.as_deref());
    matches!(phase, Some("Succeeded" | "Failed"))
}

/// Name, namespace and UID for messages; upstream's `format.Pod`.
pub fn format_pod(pod: &Pod) -> String {
    format!("{}_{}({})", pod.name(), pod.namespace(), pod.uid())
}

/// A container of a pod by its name.
pub fn container(pod: &Pod, name: &str) -> Option<Container> {
    containers(pod).into_iter().find(|container| container.name == name)
}

/// The fields of a pod's spec that determine its resources, in the JSON form of the API.
pub fn resource_spec(pod: &Pod) -> Value {
    let Some(spec) = &pod.spec else { return Value::Null };
    let each = |containers: &[Container]| -> Value {
        let needs = |one: &Container| json!({"name": one.name, "restartPolicy": one.restart_policy, "resources": one.resources});
        containers.iter().map(needs).collect()
    };
    json!({
        "initContainers": each(spec.init_containers.as_deref().unwrap_or_default()),
        "containers": each(&spec.containers),
        "resources": spec.resources, "overhead": spec.overhead,
    })
}

/// An ephemeral container as a regular one. It is started in the same way, but never restarted.
pub fn from_ephemeral(container: &EphemeralContainer) -> Container {
    let EphemeralContainer { name, image, command, args, working_dir, .. } = container.clone();
    let EphemeralContainer { env, env_from, volume_mounts, volume_devices, security_context, .. } =
        container.clone();
    Container {
        name,
        image,
        command,
        args,
        working_dir,
        env,
        env_from,
        volume_mounts,
        volume_devices,
        security_context,
        image_pull_policy: container.image_pull_policy.clone(),
        stdin: container.stdin,
        stdin_once: container.stdin_once,
        tty: container.tty,
        termination_message_path: container.termination_message_path.clone(),
        termination_message_policy: container.termination_message_policy.clone(),
        ..Container::default()
    }
}
