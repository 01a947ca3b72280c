//! Resources in the status of a pod and its containers: the allocated ones, and the actual ones of
//! what runs. Pure.

use std::collections::BTreeMap;

use api::resources::{ResourceList, add_resources, pod_resources as sum, resource_list};
use k8s_openapi::api::core::v1::{Container, ContainerStatus, Pod, ResourceRequirements};
use k8s_openapi::apimachinery::pkg::api::resource::Quantity as Text;
use runtime::cri::LinuxContainerResources;
use schema::quantity::{Format, Quantity};

use crate::config::resources::{CFS_PERIOD_MICROS, MIN_CPU_SHARES};
use crate::observed::ContainerRun;
use crate::pod::resize::{self, ComputeResources, PodResources};
use crate::pod::resource_spec;
use crate::worker_state::PodWorkerState;

type ResourceMap = BTreeMap<String, Text>;

/// CPU limits up to this many millicores are the same to the kernel.
const MIN_CPU_MILLI: i64 = 10;

/// The resources of a container whose spec has the allocated ones. `before` is its last reported
/// status, if it was running.
pub fn container_resources(
    container: &Container,
    run: &ContainerRun,
    worker_state: &PodWorkerState,
    before: Option<&ContainerStatus>,
) -> ResourceRequirements {
    let mut resources = container.resources.clone().unwrap_or_default();
    if !run.state.is_running() {
        return resources;
    }
    let is_same = |reported: &&ContainerStatus| {
        let id = reported.container_id.as_deref().and_then(|id| id.rsplit("://").next());
        id == Some(&run.id) && reported.state.as_ref().is_some_and(|state| state.running.is_some())
    };
    let before = before.filter(is_same).and_then(|reported| reported.resources.clone()).unwrap_or_default();
    let actual = actual(run, worker_state);
    if let Some(limits) = &mut resources.limits {
        set_actual(limits, "cpu", cpu(actual.cpu_limit), MIN_CPU_MILLI, before.limits.as_ref());
        set_actual(limits, "memory", bytes(actual.memory_limit), 0, before.limits.as_ref());
    }
    if let Some(requests) = &mut resources.requests {
        set_actual(requests, "cpu", cpu(actual.cpu_request), MIN_CPU_SHARES, before.requests.as_ref());
        set_actual(requests, "memory", bytes(actual.memory_request), 0, before.requests.as_ref());
    }
    resources
}

/// Replaces an allocated amount by the actual one, or by the one reported before if the actual one
/// is unknown. If both are at most `minimum`, the kernel cannot distinguish them, and the allocated
/// amount stays.
fn set_actual(
    list: &mut ResourceMap,
    name: &str,
    actual: Quantity,
    minimum: i64,
    before: Option<&ResourceMap>,
) {
    if actual.is_zero() {
        let known = before.and_then(|before| before.get(name));
        list.extend(known.map(|known| (name.to_owned(), known.clone())));
        return;
    }
    let allocated = list.get(name).and_then(|text| Quantity::parse(&text.0).ok()).unwrap_or(Quantity::ZERO);
    let is_more = |amount: Quantity| minimum == 0 || amount.milli() > minimum;
    if allocated != actual && (is_more(actual) || is_more(allocated)) {
        list.insert(name.to_owned(), Text(actual.to_string()));
    }
}

/// The resources that the runtime reports. Those that it does not report are taken from the last
/// resize, or from the creation of the container.
fn actual(run: &ContainerRun, worker_state: &PodWorkerState) -> ComputeResources {
    let given = resize::current_resources(run, worker_state).unwrap_or_default();
    match run.resources.as_ref().map(from_runtime).filter(|reported| *reported != ComputeResources::default())
    {
        Some(reported) => ComputeResources { memory_request: given.memory_request, ..reported },
        None => given,
    }
}

fn from_runtime(resources: &LinuxContainerResources) -> ComputeResources {
    let (quota, period) = (resources.cpu_quota, resources.cpu_period);
    ComputeResources {
        memory_limit: resources.memory_limit_in_bytes.max(0),
        memory_request: 0,
        cpu_limit: if quota > 0 && period > 0 { quota.saturating_mul(1000) / period } else { 0 },
        cpu_request: shares_to_milli(resources.cpu_shares),
    }
}

fn shares_to_milli(shares: i64) -> i64 {
    if shares < MIN_CPU_SHARES { 0 } else { shares.saturating_mul(1000).saturating_add(1023) / 1024 }
}

/// The resources of the pod as a whole, and its allocated requests.
pub fn pod_resources(
    pod: &Pod,
    worker_state: &PodWorkerState,
    is_running: bool,
) -> (ResourceRequirements, ResourceMap) {
    let spec = resource_spec(pod);
    let (mut requests, mut limits) = (sum(&spec, "requests"), sum(&spec, "limits"));
    let overhead = resource_list(&spec, "overhead");
    add_resources(&mut requests, &overhead);
    for (name, more) in &overhead {
        limits.entry(name.clone()).and_modify(|limit| *limit = *limit + *more);
    }
    let to_list = |list: &ResourceList| -> ResourceMap {
        list.iter().map(|(name, amount)| (name.clone(), Text(amount.to_string()))).collect()
    };
    let allocated = to_list(&requests);
    if !is_running {
        return (requirements(allocated.clone(), to_list(&limits)), allocated);
    }
    let own = pod.spec.as_ref().and_then(|spec| spec.resources.clone()).unwrap_or_default();
    let (mut actual_requests, mut actual_limits) =
        (own.requests.unwrap_or_default(), own.limits.unwrap_or_default());
    for name in ["cpu", "memory"] {
        actual_requests.extend(allocated.get(name).map(|amount| (name.to_owned(), amount.clone())));
    }
    let desired = PodResources::of(pod);
    let current = worker_state.record.as_ref().map_or(desired, |record| record.whole);
    // Unchanged shares are not converted back to a request, because shares are less precise.
    if current.cpu_shares != desired.cpu_shares {
        set_actual(
            &mut actual_requests,
            "cpu",
            cpu(shares_to_milli(current.cpu_shares)),
            MIN_CPU_SHARES,
            None,
        );
    }
    set_actual(
        &mut actual_limits,
        "cpu",
        cpu(current.cpu_quota.saturating_mul(1000) / CFS_PERIOD_MICROS),
        MIN_CPU_MILLI,
        None,
    );
    set_actual(&mut actual_limits, "memory", bytes(current.memory), 0, None);
    (requirements(actual_requests, actual_limits), allocated)
}

fn requirements(requests: ResourceMap, limits: ResourceMap) -> ResourceRequirements {
    let some = |list: ResourceMap| (!list.is_empty()).then_some(list);
    ResourceRequirements { requests: some(requests), limits: some(limits), claims: None }
}

fn cpu(milli: i64) -> Quantity {
    Quantity::from_milli(milli, Format::DecimalSI)
}

fn bytes(amount: i64) -> Quantity {
    Quantity::new(amount, Format::BinarySI)
}
