//! Allocation manager: tracks which resources the node has allocated to each pod. A pod that
//! requests other amounts gets them once they fit beside the allocations of the other pods. Until
//! then it keeps its current allocation. [`plan`] decides about pending resizes.
//!
//! The allocation is recorded in the pod's directory, together with the values last set on its
//! containers. The record survives restarts of the kubelet and is deleted with the pod. It is not
//! synced to disk: a crash of the machine that loses it has also ended all containers.
//!
//! Upstream: `pkg/kubelet/allocation`.

mod plan;

use std::borrow::Cow;
use std::collections::{BTreeMap, HashMap};
use std::io;
use std::path::Path;
use std::sync::Arc;

use k8s_openapi::api::core::v1::{Container, Pod, PodSpec, ResourceRequirements};
use k8s_openapi::apimachinery::pkg::api::resource::Quantity as Text;
use reconcile::{Key, Object as _};
use schema::quantity::Quantity;
use serde::{Deserialize, Serialize};
use tokio::sync::Notify;

use crate::admission::{self, AdmissionFailure};
use crate::observed::ObservedPod;
use crate::pod::resize::status::{ResizeStatus, resize_event_message};
use crate::pod::resize::{ComputeResources, PodResources, is_in_progress};
use crate::worker_state::PodWorkerState;
use crate::{Node, pod};
use plan::{AdmittedPod, evaluate_resizes};

/// The checkpoint in the pod's directory.
const ALLOCATION_FILE: &str = "resources.json";

/// The checkpoint of one pod.
#[derive(Clone, Debug, Default, PartialEq, Serialize, Deserialize)]
pub struct AllocationRecord {
    pub allocated: Allocation,
    /// The values last set on containers, by container ID, if they differ from the values at
    /// creation.
    pub given: BTreeMap<String, ComputeResources>,
    /// The values last set on the pod's cgroup.
    pub whole: PodResources,
}

/// The resources that the node has allocated to a pod and its containers.
#[derive(Clone, Debug, Default, PartialEq, Serialize, Deserialize)]
pub struct Allocation {
    pub pod: Option<ResourceRequirements>,
    /// By container name.
    pub containers: BTreeMap<String, ResourceRequirements>,
}

impl AllocationRecord {
    fn new(pod: &Pod) -> AllocationRecord {
        AllocationRecord {
            allocated: Allocation::from_pod(pod),
            whole: PodResources::of(pod),
            ..AllocationRecord::default()
        }
    }

    fn read(dir: &Path) -> Option<AllocationRecord> {
        serde_json::from_slice(&std::fs::read(dir.join(ALLOCATION_FILE)).ok()?).ok()
    }

    /// Writes the file atomically.
    fn write(&self, dir: &Path) -> io::Result<()> {
        std::fs::create_dir_all(dir)?;
        let temporary = dir.join(format!(".{ALLOCATION_FILE}"));
        std::fs::write(&temporary, serde_json::to_vec(self)?)?;
        std::fs::rename(&temporary, dir.join(ALLOCATION_FILE))
    }
}

impl Allocation {
    /// The resources that the pod spec requests.
    pub fn from_pod(pod: &Pod) -> Allocation {
        let Some(spec) = &pod.spec else { return Allocation::default() };
        let containers = spec.init_containers.iter().flatten().chain(&spec.containers);
        let own =
            |container: &Container| (container.name.clone(), container.resources.clone().unwrap_or_default());
        Allocation { pod: spec.resources.clone(), containers: containers.map(own).collect() }
    }

    /// Whether the pod spec requests other amounts than these.
    pub fn differs(&self, pod: &Pod) -> bool {
        let requested = Allocation::from_pod(pod);
        let same = |a: Option<&ResourceRequirements>, b: Option<&ResourceRequirements>| {
            let lists = |resources: Option<&ResourceRequirements>| {
                let resources = resources.cloned().unwrap_or_default();
                [parse_resources(resources.requests), parse_resources(resources.limits)]
            };
            lists(a) == lists(b)
        };
        let is_same = |(name, requested)| same(self.containers.get(name), Some(requested));
        !(same(self.pod.as_ref(), requested.pod.as_ref()) && requested.containers.iter().all(is_same))
    }

    /// The pod with its resources replaced by the allocated ones.
    pub fn apply_to<'a>(&self, pod: &'a Pod) -> Cow<'a, Pod> {
        let is_same = |spec: &PodSpec| {
            let mut containers = spec.init_containers.iter().flatten().chain(&spec.containers);
            let own = |one: &Container| {
                self.containers.get(&one.name).is_none_or(|own| one.resources.as_ref() == Some(own))
            };
            spec.resources == self.pod && containers.all(own)
        };
        if pod.spec.as_ref().is_none_or(is_same) {
            return Cow::Borrowed(pod);
        }
        let mut pod = pod.clone();
        let Some(spec) = &mut pod.spec else { return Cow::Owned(pod) };
        spec.resources.clone_from(&self.pod);
        for container in spec.init_containers.iter_mut().flatten().chain(&mut spec.containers) {
            if let Some(own) = self.containers.get(&container.name) {
                container.resources = Some(own.clone());
            }
        }
        Cow::Owned(pod)
    }

    /// Like `apply_to`, for a shared pod.
    fn apply_to_shared(&self, pod: &Arc<Pod>) -> Arc<Pod> {
        match self.apply_to(pod) {
            Cow::Borrowed(_) => pod.clone(),
            Cow::Owned(changed) => Arc::new(changed),
        }
    }
}

fn parse_resources(list: Option<BTreeMap<String, Text>>) -> BTreeMap<String, Option<Quantity>> {
    list.into_iter().flatten().map(|(name, text)| (name, Quantity::parse(&text.0).ok())).collect()
}

/// Whether a pod is admitted, by this process or by an earlier one: an admitted pod has a start
/// time.
pub fn is_admitted(pod: &Pod, state: &PodWorkerState) -> bool {
    state.admitted || pod.status.as_ref().is_some_and(|status| status.start_time.is_some())
}

/// Retries pending resizes whenever another pod releases resources, or the node's allocatable
/// resources or conditions change.
pub async fn run_resize_loop(node: &Node) {
    let (pods, nodes) = (node.ctx.caches.pods(), node.ctx.caches.nodes());
    let changed = Arc::new(Notify::new());
    let (notify, own) = (changed.clone(), node.settings.node_name.clone());
    pods.listen(move |change| {
        let here =
            |pod: &&Arc<Pod>| pod.spec.as_ref().and_then(|spec| spec.node_name.as_deref()) == Some(&own);
        if change.before.filter(here).is_some_and(|before| has_released_resources(before, change.after)) {
            notify.notify_one();
        }
    });
    let (notify, own) = (changed.clone(), node.settings.node_name.clone());
    nodes.listen(move |change| {
        let has = |node: Option<&Arc<k8s_openapi::api::core::v1::Node>>| {
            let status = node?.status.as_ref()?;
            let conditions = status.conditions.iter().flatten();
            let conditions = conditions.map(|condition| condition.status.clone()).collect::<Vec<_>>();
            Some((status.allocatable.clone(), conditions))
        };
        if change.latest().name() == own && has(change.before) != has(change.after) {
            notify.notify_one();
        }
    });
    loop {
        changed.notified().await;
        if node.pod_states.lock().values().any(|state| state.resize_status.pending.is_some()) {
            evaluate_pending_resizes(node, &node.admission_lock.lock());
        }
    }
}

/// Whether a change of a pod can have released resources.
fn has_released_resources(before: &Pod, after: Option<&Arc<Pod>>) -> bool {
    let Some(after) = after.filter(|after| !pod::is_terminal(after)) else {
        return !pod::is_terminal(before);
    };
    !reported_resources(before).eq(reported_resources(after))
}

/// The actual and allocated resources that the status reports for the pod and its containers.
fn reported_resources(
    pod: &Pod,
) -> impl Iterator<Item = (Option<&ResourceRequirements>, Option<&BTreeMap<String, Text>>)> {
    let status = pod.status.as_ref();
    let of_pod = status.map(|status| (status.resources.as_ref(), status.allocated_resources.as_ref()));
    let lists =
        status.into_iter().flat_map(|status| [&status.container_statuses, &status.init_container_statuses]);
    let each = lists.flatten().flatten();
    let each = each.map(|one| (one.resources.as_ref(), one.allocated_resources.as_ref()));
    of_pod.into_iter().chain(each)
}

/// Evaluates all pending resizes and records the result. The guard proves that the caller holds the
/// admission lock.
fn evaluate_pending_resizes(node: &Node, _guard: &parking_lot::MutexGuard<'_, ()>) {
    let name = &node.settings.node_name;
    let Some(api_node) = node.ctx.caches.nodes().get(&Key::new("", name)) else { return };
    let now = node.ctx.clock.now();
    let pressure = node
        .maintenance
        .last_pressure()
        .is_active(now, node.settings.kubelet_config.pressure_transition_period);
    let admit = |pod: &Pod, others: &[Arc<Pod>]| {
        let short = admission::admit_under_pressure(pod, pressure);
        short.or_else(|| admission::admit(pod, &api_node, others, &node.runtime_capabilities.lock()))
    };
    let on_node = node.pods().into_iter().filter(|pod| !pod::is_terminal(pod));
    let mut pod_states = node.pod_states.lock();
    let present: Vec<AdmittedPod> = on_node
        .filter_map(|pod| {
            let state = pod_state(&pod_states, &node.settings, &pod);
            let since = state.resize_status.pending.as_ref().map(|pending| pending.since);
            let allocated = state.record.as_ref().map(|record| record.allocated.clone());
            is_admitted(&pod, &state).then_some(AdmittedPod { pod, allocated, since })
        })
        .collect();
    for (pod, rejection) in evaluate_resizes(&present, admit) {
        let state = pod_state_mut(&mut pod_states, &node.settings, pod);
        let generation = pod.metadata.generation;
        let resize_message =
            |what: &str, error: &str| resize_event_message(what, pod, generation.unwrap_or_default(), error);
        match rejection {
            None => {
                let record = state.record.get_or_insert_with(|| AllocationRecord::new(pod));
                let accepted = AllocationRecord { allocated: Allocation::from_pod(pod), ..record.clone() };
                if !node.write_record(pod, &accepted) {
                    continue;
                }
                *record = accepted;
                state.resize_status.start(generation, now);
                node.ctx.events.normal(&**pod, "ResizeStarted", resize_message("Pod resize started", ""));
            }
            Some(AdmissionFailure { reason, message }) => {
                if state.resize_status.defer(&message, generation, now) {
                    let event_message = resize_message(&format!("Pod resize {reason}"), &message);
                    node.ctx.events.warning(&**pod, "ResizeDeferred", event_message);
                }
            }
        }
        node.enqueue(pod.key());
    }
}

/// The state of a pod. The first access restores it from the checkpoint.
fn pod_state_mut<'a>(
    pod_states: &'a mut HashMap<String, PodWorkerState>,
    settings: &crate::Settings,
    pod: &Pod,
) -> &'a mut PodWorkerState {
    pod_states.entry(pod.uid().to_owned()).or_insert_with(|| restore_pod_state(settings, pod))
}

/// The state of a pod without inserting it: its worker may have removed the pod already.
fn pod_state<'a>(
    pod_states: &'a HashMap<String, PodWorkerState>,
    settings: &crate::Settings,
    pod: &Pod,
) -> Cow<'a, PodWorkerState> {
    pod_states.get(pod.uid()).map_or_else(|| Cow::Owned(restore_pod_state(settings, pod)), Cow::Borrowed)
}

/// The state that an earlier process left in the checkpoint and in the pod status.
fn restore_pod_state(settings: &crate::Settings, pod: &Pod) -> PodWorkerState {
    PodWorkerState {
        record: AllocationRecord::read(&settings.pod_dir(pod)),
        resize_status: pod.status.as_ref().map(ResizeStatus::from_status).unwrap_or_default(),
        ..PodWorkerState::default()
    }
}

impl Node {
    /// Calls `f` with the state of a pod. For a pod that is deleted the state is temporary.
    pub fn with_pod_state<T>(&self, pod: &Pod, f: impl FnOnce(&mut PodWorkerState) -> T) -> T {
        let mut pod_states = self.pod_states.lock();
        let is_new = !pod_states.contains_key(pod.uid());
        let result = f(pod_state_mut(&mut pod_states, &self.settings, pod));
        drop(pod_states);
        // The state is new. If the pod was deleted before, its removal has run already and would
        // leave this entry behind. A pod that is deleted after this check has its entry removed as
        // usual.
        if is_new && self.pod_with_uid(&pod.key(), pod.uid()).is_none() {
            self.pod_states.lock().remove(pod.uid());
        }
        result
    }

    /// The pod with its allocated resources.
    pub fn allocated<'a>(&self, pod: &'a Pod) -> Cow<'a, Pod> {
        self.with_pod_state(pod, |state| match &state.record {
            Some(record) => record.allocated.apply_to(pod),
            None => Cow::Borrowed(pod),
        })
    }

    /// Changes the checkpoint of a pod, and writes it if it differs.
    pub fn update_record(&self, pod: &Pod, change: impl FnOnce(&mut AllocationRecord)) {
        self.with_pod_state(pod, |state| {
            let Some(record) = &mut state.record else { return };
            let before = record.clone();
            change(record);
            if *record != before {
                self.write_record(pod, record);
            }
        });
    }

    /// Writes the checkpoint of a pod. Returns `false` on failure.
    fn write_record(&self, pod: &Pod, record: &AllocationRecord) -> bool {
        let written = record.write(&self.settings.pod_dir(pod));
        if let Err(error) = &written {
            tracing::error!(%error, pod = %pod.key(), "failed to write the allocation record of a pod");
        }
        written.is_ok()
    }

    /// Admits a pod unless it is admitted already. The admission lock is held, so that two pods are
    /// not admitted to the same free resources.
    pub fn admit(&self, pod: &Pod) -> Option<AdmissionFailure> {
        let name = &self.settings.node_name;
        let api_node = self.ctx.caches.nodes().get(&Key::new("", name))?;
        let _guard = self.admission_lock.lock();
        let on_node = self.pods();
        let mut pod_states = self.pod_states.lock();
        if is_admitted(pod, &pod_state(&pod_states, &self.settings, pod)) {
            return None;
        }
        let others = on_node.into_iter().filter(|other| other.uid() != pod.uid() && !pod::is_terminal(other));
        let others: Vec<Arc<Pod>> = others
            .filter_map(|other| {
                let state = pod_state(&pod_states, &self.settings, &other);
                let allocated =
                    || state.record.as_ref().map(|record| record.allocated.apply_to_shared(&other));
                is_admitted(&other, &state).then(|| allocated().unwrap_or_else(|| other.clone()))
            })
            .collect();
        let rejection = admission::admit(pod, &api_node, &others, &self.runtime_capabilities.lock());
        pod_state_mut(&mut pod_states, &self.settings, pod).admitted = rejection.is_none();
        rejection
    }

    /// Allocates what the pod requests, as far as it fits. Returns the pod with its allocated
    /// resources.
    pub fn update_allocation<'a>(&self, pod: &'a Pod) -> Cow<'a, Pod> {
        self.with_pod_state(pod, |state| {
            // A terminating pod gets no new checkpoint: nothing would delete it.
            if state.record.is_none() && is_admitted(pod, state) && !pod.is_deleting() {
                self.write_record(pod, state.record.insert(AllocationRecord::new(pod)));
            }
        });
        if self.needs_resize_evaluation(pod) {
            let guard = self.admission_lock.lock();
            // Another worker may have evaluated all resizes while this one waited for the lock.
            if self.needs_resize_evaluation(pod) {
                evaluate_pending_resizes(self, &guard);
            }
        }
        self.allocated(pod)
    }

    fn needs_resize_evaluation(&self, pod: &Pod) -> bool {
        self.with_pod_state(pod, |state| {
            let wants = state.record.as_ref().is_some_and(|record| record.allocated.differs(pod));
            if !wants {
                state.resize_status.clear_pending();
            }
            wants && !pod.is_deleting() && state.resize_status.deferred_generation != pod.metadata.generation
        })
    }

    /// Records whether a resize is in progress or completed. `pod` has the resources of its spec,
    /// not the allocated ones.
    pub fn update_resize_progress(&self, pod: &Pod, seen: &ObservedPod) {
        let now = self.ctx.clock.now();
        let done = self.with_pod_state(pod, |state| {
            let allocated = state.record.as_ref()?.allocated.apply_to(pod);
            if is_in_progress(&allocated, seen, state) {
                state.resize_status.set_in_progress(pod.metadata.generation, now);
                return None;
            }
            state.resize_status.finish().map(|generation| (allocated.into_owned(), generation))
        });
        if let Some((allocated, generation)) = done {
            let event_message = resize_event_message("Pod resize completed", &allocated, generation, "");
            self.ctx.events.normal(pod, "ResizeCompleted", event_message);
        }
    }
}

#[cfg(test)]
mod tests;
