//! What a change of a pod's resources means for what runs of it: what differs, in which order it is changed, and what
//! cannot be taken from it at the moment. Pure. What is said of it meanwhile is in [`said`].

pub mod status;

use k8s_openapi::api::core::v1::{Container, Pod, ResourceRequirements};
use k8s_openapi::apimachinery::pkg::api::resource::Quantity as Text;
use schema::quantity::{Format, Quantity};
use serde::{Deserialize, Serialize};

use crate::observed::{ContainerRun, ObservedPod};
use crate::worker_state::PodWorkerState;

/// What a run may use and was promised: bytes and thousandths of processors, 0 for nothing said.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
pub struct ComputeResources {
    pub memory_limit: i64,
    pub memory_request: i64,
    pub cpu_limit: i64,
    pub cpu_request: i64,
}

/// What the runs of a pod may use together, in the kernel's terms; 0 for no limit.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
pub struct PodResources {
    pub memory: i64,
    pub cpu_quota: i64,
    pub cpu_shares: i64,
}

/// A pod that is to be given something else than it has.
#[derive(Clone, Debug, Default, PartialEq)]
pub struct Resize {
    pub from: PodResources,
    pub to: PodResources,
    pub updates: Vec<ContainerUpdate>,
}

/// A run that is to be given something else than it has.
#[derive(Clone, Debug, PartialEq)]
pub struct ContainerUpdate {
    pub id: String,
    pub container: String,
    pub from: ComputeResources,
    pub to: ComputeResources,
}

/// One change; what comes after it is left alone where it fails.
#[derive(Clone, Debug, PartialEq)]
pub enum ResizeStep {
    /// To all of the pod together.
    PodMemory(i64),
    PodCpuQuota(i64),
    PodCpuShares(i64),
    /// To one run: all that it is to have from then on.
    Container {
        id: String,
        container: String,
        resources: ComputeResources,
    },
}

impl ComputeResources {
    /// What a container of this pod is to have.
    pub fn of(pod: &Pod, container: &Container) -> ComputeResources {
        ComputeResources::from(&effective_resources(pod, container))
    }

    /// What was written down of a run when it was made.
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

    /// The container with these amounts and all else that it asks for.
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

    /// What it needs no less of than `other` in one of the two is changed after what it needs less of.
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

/// What a container asks for, limited by what its pod is limited to where it says nothing itself.
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
    /// What a pod is to have.
    pub fn of(pod: &Pod) -> PodResources {
        let limits = crate::cgroups::pod_limits(pod, 0);
        PodResources { memory: limits.memory, cpu_quota: limits.cpu_quota, cpu_shares: limits.cpu_shares }
    }
}

/// What a run has now: what it was given last, or made with. `None` of one that nothing was written down of.
pub fn current_resources(run: &ContainerRun, worker_state: &PodWorkerState) -> Option<ComputeResources> {
    let given = worker_state.record.as_ref().and_then(|record| record.given.get(&run.id).copied());
    given.or_else(|| ComputeResources::from_annotation(run.created_from.resources.as_deref()?))
}

/// Runs that have something else than they are to have, with their containers.
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

/// Whether something is not as it is to be.
pub fn is_in_progress(pod: &Pod, seen: &ObservedPod, worker_state: &PodWorkerState) -> bool {
    let pod_resources =
        worker_state.record.as_ref().filter(|_| seen.sandbox().is_some()).map(|record| record.whole);
    pod_resources.is_some_and(|pod_resources| pod_resources != PodResources::of(pod))
        || pending_updates(pod, seen, worker_state).next().is_some()
}

/// What can be changed of a pod while it runs, if anything is to be.
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

/// Whether a container that runs wants to be started anew for what is to change of it.
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

/// Beside any limit that there is.
fn limit_or_max(limit: i64) -> i64 {
    if limit <= 0 { i64::MAX } else { limit }
}

impl Resize {
    /// What is done, one after the other: the whole is never less than its parts. Memory comes first, and in each of both
    /// whoever gives something back is before those who get more. A limit of the whole is not taken away.
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

    /// Changes a part of what all runs have, which is kept count of in `present`.
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

    /// Whether memory is to be taken from somebody.
    pub fn has_lower_memory_limit(&self) -> bool {
        self.has_lower_pod_memory_limit() || self.updates.iter().any(has_lower_container_limit)
    }

    fn has_lower_pod_memory_limit(&self) -> bool {
        self.to.memory != 0 && limit_or_max(self.to.memory) < limit_or_max(self.from.memory)
    }

    /// What speaks against it by what is in use: of the pod, and of runs by their ids.
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
