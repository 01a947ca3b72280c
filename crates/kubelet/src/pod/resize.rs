//! In-place resize: which resources of a pod differ from its spec, in which order they are changed,
//! and whether a memory limit can be lowered. Pure. Conditions and events are in [`status`].

pub mod status;

use k8s_openapi::api::core::v1::{Container, Pod, ResourceRequirements};
use k8s_openapi::apimachinery::pkg::api::resource::Quantity as Text;
use schema::quantity::{Format, Quantity};
use serde::{Deserialize, Serialize};

use crate::observed::{ContainerRun, ObservedPod};
use crate::worker_state::PodWorkerState;

/// CPU and memory of a container: bytes and millicores, 0 if unset.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
pub struct ComputeResources {
    pub memory_limit: i64,
    pub memory_request: i64,
    pub cpu_limit: i64,
    pub cpu_request: i64,
}

/// The limits of a pod's cgroup in the kernel's units; 0 for no limit.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
pub struct PodResources {
    pub memory: i64,
    pub cpu_quota: i64,
    pub cpu_shares: i64,
}

/// The change from a pod's current resources to the desired ones.
#[derive(Clone, Debug, Default, PartialEq)]
pub struct Resize {
    pub from: PodResources,
    pub to: PodResources,
    pub updates: Vec<ContainerUpdate>,
}

/// The change from a container's current resources to the desired ones.
#[derive(Clone, Debug, PartialEq)]
pub struct ContainerUpdate {
    pub id: String,
    pub container: String,
    pub from: ComputeResources,
    pub to: ComputeResources,
}

/// One change. If it fails, the steps after it are skipped.
#[derive(Clone, Debug, PartialEq)]
pub enum ResizeStep {
    /// Limits of the pod's cgroup.
    PodMemory(i64),
    PodCpuQuota(i64),
    PodCpuShares(i64),
    /// All resources of one container from then on.
    Container {
        id: String,
        container: String,
        resources: ComputeResources,
    },
}

impl ComputeResources {
    /// The desired resources of a container.
    pub fn of(pod: &Pod, container: &Container) -> ComputeResources {
        ComputeResources::from(&effective_resources(pod, container))
    }

    /// The resources that were recorded when the container was created.
    pub fn from_annotation(text: &str) -> Option<ComputeResources> {
        serde_json::from_str::<ResourceRequirements>(text)
            .ok()
            .map(|resources| ComputeResources::from(&resources))
    }

    fn from(resources: &ResourceRequirements) -> ComputeResources {
        let amount = |limits: bool, name: &str| {
            let list = if limits { &resources.limits } else { &resources.requests };
            Quantity::parse(&list.as_ref()?.get(name)?.0).ok()
        };
        ComputeResources {
            memory_limit: amount(true, "memory").map_or(0, |amount| amount.value()),
            memory_request: amount(false, "memory").map_or(0, |amount| amount.value()),
            cpu_limit: amount(true, "cpu").map_or(0, |amount| amount.milli()),
            cpu_request: amount(false, "cpu").map_or(0, |amount| amount.milli()),
        }
    }

    /// The container with these amounts of CPU and memory. Its other resources stay.
    pub fn apply_to(self, container: &Container) -> Container {
        let mut changed = container.clone();
        let resources = changed.resources.get_or_insert_default();
        let cpu = |milli| Quantity::from_milli(milli, Format::DecimalSI);
        let memory = |bytes| Quantity::new(bytes, Format::BinarySI);
        let limits = [("cpu", cpu(self.cpu_limit)), ("memory", memory(self.memory_limit))];
        let requests = [("cpu", cpu(self.cpu_request)), ("memory", memory(self.memory_request))];
        for (list, values) in [(&mut resources.limits, limits), (&mut resources.requests, requests)] {
            let list = list.get_or_insert_default();
            for (name, amount) in values {
                list.remove(name);
                if !amount.is_zero() {
                    list.insert(name.to_owned(), Text(amount.to_string()));
                }
            }
        }
        changed
    }

    /// Whether the limit grows, or the request if the limit stays the same.
    fn is_increase(from: [i64; 2], to: [i64; 2]) -> bool {
        let [limit, request] = [to[0].cmp(&from[0]), to[1].cmp(&from[1])];
        limit.then(request).is_gt()
    }

    fn memory(self) -> [i64; 2] {
        [self.memory_limit, self.memory_request]
    }

    fn cpu(self) -> [i64; 2] {
        [self.cpu_limit, self.cpu_request]
    }
}

/// The resources of a container. Limits that it does not set are those of its pod.
pub fn effective_resources(pod: &Pod, container: &Container) -> ResourceRequirements {
    let mut resources = container.resources.clone().unwrap_or_default();
    let of_pod = pod.spec.as_ref().and_then(|spec| spec.resources.as_ref()?.limits.as_ref());
    for name in ["cpu", "memory"] {
        let Some(limit) = of_pod.and_then(|limits| limits.get(name)) else { continue };
        resources.limits.get_or_insert_default().entry(name.to_owned()).or_insert_with(|| limit.clone());
    }
    resources
}

impl PodResources {
    /// The desired limits of a pod.
    pub fn of(pod: &Pod) -> PodResources {
        let limits = crate::cgroups::pod_limits(pod, 0);
        PodResources { memory: limits.memory, cpu_quota: limits.cpu_quota, cpu_shares: limits.cpu_shares }
    }
}

/// The current resources of a run: those of its last resize, or else those it was created with.
/// `None` if neither is recorded.
pub fn current_resources(run: &ContainerRun, worker_state: &PodWorkerState) -> Option<ComputeResources> {
    let given = worker_state.record.as_ref().and_then(|record| record.given.get(&run.id).copied());
    given.or_else(|| ComputeResources::from_annotation(run.created_from.resources.as_deref()?))
}

/// The changes of running containers whose resources differ from the spec, with the containers.
fn pending_updates<'a>(
    pod: &'a Pod,
    seen: &'a ObservedPod,
    worker_state: &'a PodWorkerState,
) -> impl Iterator<Item = (&'a Container, ContainerUpdate)> {
    let spec = pod.spec.iter();
    let containers =
        spec.flat_map(|spec| spec.init_containers.iter().flatten().chain(spec.containers.iter()));
    containers.filter_map(move |container| {
        let run = seen.latest(&container.name).filter(|run| run.state.is_running())?;
        let (from, to) = (current_resources(run, worker_state)?, ComputeResources::of(pod, container));
        let update = ContainerUpdate { id: run.id.clone(), container: container.name.clone(), from, to };
        (from != to).then_some((container, update))
    })
}

/// Whether current resources differ from the desired ones.
pub fn is_in_progress(pod: &Pod, seen: &ObservedPod, worker_state: &PodWorkerState) -> bool {
    let pod_resources =
        worker_state.record.as_ref().filter(|_| seen.sandbox().is_some()).map(|record| record.whole);
    pod_resources.is_some_and(|pod_resources| pod_resources != PodResources::of(pod))
        || pending_updates(pod, seen, worker_state).next().is_some()
}

/// The changes that can be made without a restart, if there are any.
pub fn pending_resize(pod: &Pod, seen: &ObservedPod, worker_state: &PodWorkerState) -> Option<Resize> {
    let to = PodResources::of(pod);
    let from = worker_state.record.as_ref().map_or(to, |record| record.whole);
    let updates = pending_updates(pod, seen, worker_state);
    let updates: Vec<ContainerUpdate> = updates
        .filter(|(container, update)| !must_restart(container, update))
        .map(|(_, update)| update)
        .collect();
    (from != to || !updates.is_empty()).then_some(Resize { from, to, updates })
}

/// Whether the resize policy of a running container requires a restart for its changes.
pub fn requires_restart(pod: &Pod, seen: &ObservedPod, worker_state: &PodWorkerState, name: &str) -> bool {
    pending_updates(pod, seen, worker_state)
        .any(|(container, update)| container.name == name && must_restart(container, &update))
}

fn must_restart(container: &Container, ContainerUpdate { from, to, .. }: &ContainerUpdate) -> bool {
    container.resize_policy.iter().flatten().any(|policy| {
        let changed = match policy.resource_name.as_str() {
            "cpu" => from.cpu() != to.cpu(),
            "memory" => from.memory() != to.memory(),
            _ => false,
        };
        changed && policy.restart_policy == "RestartContainer"
    })
}

/// The limit as a number that can be compared: no limit is the largest.
fn limit_or_max(limit: i64) -> i64 {
    if limit <= 0 { i64::MAX } else { limit }
}

impl Resize {
    /// The changes in the order of upstream's `doPodResizeAction`. The limits of the pod are never
    /// below those of its containers. Memory comes before CPU, and for both of them decreases come
    /// before increases. A limit of the pod is not removed.
    pub fn steps(&self) -> Vec<ResizeStep> {
        let (from, to) = (self.from, self.to);
        let or_previous = |from: i64, to: i64| if to == 0 { from } else { to };
        let memory = or_previous(from.memory, to.memory);
        let quota = or_previous(from.cpu_quota, to.cpu_quota);
        let mut current: Vec<ComputeResources> = self.updates.iter().map(|update| update.from).collect();
        let mut steps = Vec::new();
        steps.extend(
            (limit_or_max(memory) > limit_or_max(from.memory)).then_some(ResizeStep::PodMemory(memory)),
        );
        self.push_container_steps(ComputeResources::memory, &mut steps, &mut current, |now, to| {
            (now.memory_limit, now.memory_request) = (to.memory_limit, to.memory_request);
        });
        steps.extend(
            (limit_or_max(memory) < limit_or_max(from.memory)).then_some(ResizeStep::PodMemory(memory)),
        );
        steps.extend(
            (limit_or_max(quota) > limit_or_max(from.cpu_quota)).then_some(ResizeStep::PodCpuQuota(quota)),
        );
        steps.extend((to.cpu_shares > from.cpu_shares).then_some(ResizeStep::PodCpuShares(to.cpu_shares)));
        self.push_container_steps(ComputeResources::cpu, &mut steps, &mut current, |now, to| {
            (now.cpu_limit, now.cpu_request) = (to.cpu_limit, to.cpu_request);
        });
        steps.extend((to.cpu_shares < from.cpu_shares).then_some(ResizeStep::PodCpuShares(to.cpu_shares)));
        steps.extend(
            (limit_or_max(quota) < limit_or_max(from.cpu_quota)).then_some(ResizeStep::PodCpuQuota(quota)),
        );
        steps
    }

    /// Adds the steps that change one resource of all containers. `current` has the resources of
    /// each container after the steps so far.
    fn push_container_steps(
        &self,
        part: fn(ComputeResources) -> [i64; 2],
        steps: &mut Vec<ResizeStep>,
        current: &mut [ComputeResources],
        change: impl Fn(&mut ComputeResources, &ComputeResources),
    ) {
        for growing in [false, true] {
            for (update, now) in self.updates.iter().zip(current.iter_mut()) {
                let (from, to) = (part(update.from), part(update.to));
                if from != to && ComputeResources::is_increase(from, to) == growing {
                    change(now, &update.to);
                    let (id, container) = (update.id.clone(), update.container.clone());
                    steps.push(ResizeStep::Container { id, container, resources: *now });
                }
            }
        }
    }

    /// Whether a memory limit of the pod or of a container is lowered.
    pub fn has_lower_memory_limit(&self) -> bool {
        self.has_lower_pod_memory_limit() || self.updates.iter().any(has_lower_container_limit)
    }

    fn has_lower_pod_memory_limit(&self) -> bool {
        self.to.memory != 0 && limit_or_max(self.to.memory) < limit_or_max(self.from.memory)
    }

    /// The error if a lower memory limit is not above the current usage of the pod (`of_pod`) or of
    /// a container (`of_run`, by container ID).
    pub fn check_memory_usage(&self, of_pod: u64, of_run: impl Fn(&str) -> Option<u64>) -> Option<String> {
        let mut errors = Vec::new();
        let is_below = |used: u64, limit: i64| used >= u64::try_from(limit).unwrap_or(0);
        if self.has_lower_pod_memory_limit() && is_below(of_pod, self.to.memory) {
            let limit = self.to.memory;
            errors
                .push(format!("attempting to set pod memory limit ({limit}) below current usage ({of_pod})"));
        }
        for update in self.updates.iter().filter(|update| has_lower_container_limit(update)) {
            let (name, limit) = (&update.container, update.to.memory_limit);
            match of_run(&update.id) {
                None => errors.push(format!("missing container {name:?} memory usage")),
                Some(used) if is_below(used, limit) => errors.push(format!(
                    "attempting to set container {name:?} memory limit ({limit}) below current usage ({used})"
                )),
                Some(_) => {}
            }
        }
        let all = match &errors[..] {
            [] => return None,
            [one] => one.clone(),
            _ => format!("[{}]", errors.join(", ")),
        };
        Some(format!("cannot decrease memory limits: {all}"))
    }
}

fn has_lower_container_limit(update: &ContainerUpdate) -> bool {
    let [from, to] = [update.from, update.to].map(|resources| resources.memory_limit);
    to != 0 && limit_or_max(to) < limit_or_max(from)
}

#[cfg(test)]
mod tests;
