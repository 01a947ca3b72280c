//! A pod as the runtime reports it: its sandboxes, and the containers that run or ran in them.

use jiff::Timestamp;
use k8s_openapi::api::core::v1::{LinuxContainerUser, Pod};
use runtime::cri;

/// Labels by which sandboxes and containers belong to pods. They are upstream's, since tools read
/// them.
pub const POD_NAME: &str = "io.kubernetes.pod.name";
pub const POD_NAMESPACE: &str = "io.kubernetes.pod.namespace";
pub const POD_UID: &str = "io.kubernetes.pod.uid";
pub const CONTAINER_NAME: &str = "io.kubernetes.container.name";

/// Annotations of a container that record what it was created from.
pub const IMAGE_ANNOTATION: &str = "skiff.io/image";
pub const RESOURCES_ANNOTATION: &str = "skiff.io/resources";

/// The runtime state of a pod; upstream's `kubecontainer.PodStatus`.
#[derive(Clone, Debug, Default, PartialEq)]
pub struct ObservedPod {
    /// Newest first.
    pub sandboxes: Vec<Sandbox>,
    /// The newest of each name first.
    pub containers: Vec<ContainerRun>,
    /// When it was observed, by the wall clock, which the timestamps of the runtime use, too.
    pub at: Option<Timestamp>,
}

/// A pod sandbox, which holds the namespaces that the containers share.
#[derive(Clone, Debug, PartialEq)]
pub struct Sandbox {
    pub id: String,
    pub attempt: u32,
    pub ready: bool,
    pub ips: Vec<String>,
    /// The sandbox has lost its network. A runtime that is killed while it creates or stops a
    /// sandbox may forget the network.
    pub has_lost_network: bool,
}

/// One run of a container: a container in CRI's terms.
#[derive(Clone, Debug, PartialEq)]
pub struct ContainerRun {
    pub id: String,
    /// The ID of its sandbox, which may no longer exist.
    pub sandbox: String,
    pub name: String,
    pub attempt: u32,
    pub state: State,
    pub image: String,
    pub image_id: String,
    pub reason: String,
    pub message: String,
    /// The user of its first process, if the runtime reports it.
    pub user: Option<LinuxContainerUser>,
    /// The image and the resources it was created from, if they were recorded.
    pub created_from: CreatedFrom,
    /// Its actual resources, if the runtime reports them.
    pub resources: Option<cri::LinuxContainerResources>,
}

/// The parts of a container's spec that may change while it runs.
#[derive(Clone, Debug, Default, PartialEq)]
pub struct CreatedFrom {
    pub image: Option<String>,
    pub resources: Option<String>,
}

/// The state of a run.
#[derive(Clone, Copy, Debug, PartialEq)]
pub enum State {
    Created,
    Running { since: Timestamp },
    Exited { since: Timestamp, at: Timestamp, code: i32 },
}

impl State {
    pub fn is_running(self) -> bool {
        matches!(self, State::Running { .. })
    }

    pub fn is_exited(self) -> bool {
        matches!(self, State::Exited { .. })
    }
}

impl ObservedPod {
    /// The sandbox in which containers can be started.
    pub fn sandbox(&self) -> Option<&Sandbox> {
        self.sandboxes.first().filter(|sandbox| sandbox.ready && !sandbox.has_lost_network)
    }

    /// The newest run of a container.
    pub fn latest(&self, name: &str) -> Option<&ContainerRun> {
        self.containers.iter().find(|run| run.name == name)
    }

    /// The run before the newest.
    pub fn previous(&self, name: &str) -> Option<&ContainerRun> {
        self.containers.iter().filter(|run| run.name == name).nth(1)
    }

    pub fn running(&self) -> impl Iterator<Item = &ContainerRun> {
        self.containers.iter().filter(|run| run.state.is_running())
    }

    #[cfg(test)]
    pub fn is_terminated(&self) -> bool {
        self.running().next().is_none() && !self.sandboxes.iter().any(|sandbox| sandbox.ready)
    }

    /// Converts the CRI statuses. Each container comes with the ID of its sandbox.
    pub fn new(
        pod: &Pod,
        sandboxes: &[cri::PodSandboxStatus],
        containers: &[(String, cri::ContainerStatus)],
    ) -> ObservedPod {
        let on_host = pod.spec.as_ref().and_then(|spec| spec.host_network) == Some(true);
        let mut sandboxes: Vec<Sandbox> =
            sandboxes.iter().map(|status| Sandbox::of(status, on_host)).collect();
        sandboxes.sort_by_key(|sandbox| (std::cmp::Reverse(sandbox.attempt), sandbox.has_lost_network));
        let mut containers: Vec<ContainerRun> =
            containers.iter().map(|(sandbox, status)| ContainerRun::of(sandbox, status)).collect();
        containers.sort_by_key(|run| std::cmp::Reverse(run.attempt));
        ObservedPod { sandboxes, containers, at: Some(Timestamp::now()) }
    }
}

impl Sandbox {
    fn of(status: &cri::PodSandboxStatus, on_host: bool) -> Sandbox {
        let network = status.network.clone().unwrap_or_default();
        let mut ips = vec![network.ip];
        ips.extend(network.additional_ips.into_iter().map(|ip| ip.ip));
        ips.retain(|ip| !ip.is_empty());
        Sandbox {
            id: status.id.clone(),
            attempt: status.metadata.as_ref().map_or(0, |metadata| metadata.attempt),
            ready: status.state() == cri::PodSandboxState::Ready,
            has_lost_network: !on_host && status.network.is_some() && ips.is_empty(),
            ips,
        }
    }
}

impl ContainerRun {
    fn of(sandbox: &str, status: &cri::ContainerStatus) -> ContainerRun {
        let (since, at) = (time(status.started_at), time(status.finished_at));
        let metadata = status.metadata.clone().unwrap_or_default();
        ContainerRun {
            id: status.id.clone(),
            sandbox: sandbox.to_owned(),
            name: status.labels.get(CONTAINER_NAME).cloned().unwrap_or(metadata.name),
            attempt: metadata.attempt,
            state: match status.state() {
                cri::ContainerState::Created => State::Created,
                cri::ContainerState::Exited | cri::ContainerState::Unknown if start_was_canceled(status) => {
                    State::Created
                }
                cri::ContainerState::Running => State::Running { since },
                // `Unknown` means that the runtime has lost the container. It has exited with an
                // unknown code.
                cri::ContainerState::Exited => State::Exited { since, at, code: status.exit_code },
                cri::ContainerState::Unknown => State::Exited { since, at: since, code: 137 },
            },
            image: status.image.clone().unwrap_or_default().image,
            image_id: status.image_ref.clone(),
            reason: status.reason.clone(),
            message: status.message.clone(),
            user: status.user.as_ref().and_then(|user| user.linux.as_ref()).map(user_of),
            created_from: CreatedFrom {
                image: status.annotations.get(IMAGE_ANNOTATION).cloned(),
                resources: status.annotations.get(RESOURCES_ANNOTATION).cloned(),
            },
            resources: status.resources.as_ref().and_then(|resources| resources.linux.clone()),
        }
    }
}

fn user_of(user: &cri::LinuxContainerUser) -> LinuxContainerUser {
    let groups = user.supplemental_groups.clone();
    LinuxContainerUser {
        uid: user.uid,
        gid: user.gid,
        supplemental_groups: (!groups.is_empty()).then_some(groups),
    }
}

/// Whether a start was canceled because the client or the runtime was killed in the middle of it.
/// The container counts as created then, and the start is repeated. If it runs after all, it is
/// stopped because the old container is removed before that.
fn start_was_canceled(status: &cri::ContainerStatus) -> bool {
    if status.state() == cri::ContainerState::Unknown {
        return status.started_at == 0;
    }
    let message = &status.message;
    let is_canceled = message.contains("context canceled")
        || message.contains("failed to start shim") && message.contains("signal: killed");
    status.started_at == 0 && status.reason == "StartError" && is_canceled
}

fn time(nanoseconds: i64) -> Timestamp {
    Timestamp::from_nanosecond(nanoseconds.into()).unwrap_or_default()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn sandbox_without_an_address_is_invalid() {
        let status = |id: &str, ip: &str| cri::PodSandboxStatus {
            id: id.to_owned(),
            network: Some(cri::PodSandboxNetworkStatus { ip: ip.to_owned(), additional_ips: Vec::new() }),
            ..cri::PodSandboxStatus::default()
        };
        let check = |spec: serde_json::Value, sandboxes: &[cri::PodSandboxStatus], expected: Option<&str>| {
            let pod = serde_json::from_value(serde_json::json!({"spec": spec})).expect("a pod");
            let seen = ObservedPod::new(&pod, sandboxes, &[]);
            assert_eq!(seen.sandbox().map(|sandbox| sandbox.id.as_str()), expected);
        };
        let plain = || serde_json::json!({"containers": []});
        check(plain(), &[status("a", "10.0.0.1")], Some("a"));
        check(plain(), &[status("a", "")], None);
        // Two sandboxes of the same attempt: the one without an address was abandoned.
        check(plain(), &[status("a", ""), status("b", "10.0.0.1")], Some("b"));
        check(serde_json::json!({"containers": [], "hostNetwork": true}), &[status("a", "")], Some("a"));
    }

    #[test]
    fn unknown_container_has_exited_if_it_was_started() {
        let check = |started_at, expected: State| {
            let state = cri::ContainerState::Unknown.into();
            let status = cri::ContainerStatus { state, started_at, ..cri::ContainerStatus::default() };
            assert_eq!(ContainerRun::of("s", &status).state, expected);
        };
        check(0, State::Created);
        let since = Timestamp::from_second(7).expect("a time");
        check(7_000_000_000, State::Exited { since, at: since, code: 137 });
    }

    #[test]
    fn canceled_start_counts_as_created() {
        let check = |started_at, reason: &str, message: &str, is_created| {
            let status = cri::ContainerStatus {
                state: cri::ContainerState::Exited.into(),
                exit_code: 128,
                started_at,
                reason: reason.into(),
                message: message.into(),
                ..cri::ContainerStatus::default()
            };
            assert_eq!(
                ContainerRun::of("s", &status).state == State::Created,
                is_created,
                "{reason} {message}"
            );
        };
        let canceled =
            "failed to create containerd task: failed to create shim task: context canceled: unknown";
        check(0, "StartError", canceled, true);
        let killed =
            "failed to create containerd task: failed to start shim: start failed: : signal: killed: unknown";
        check(0, "StartError", killed, true);
        check(0, "StartError", "OCI runtime start failed: signal: killed", false);
        check(7, "StartError", canceled, false);
        check(0, "Error", canceled, false);
        check(0, "StartError", "exec: \"nope\": executable file not found in $PATH", false);
    }
}
