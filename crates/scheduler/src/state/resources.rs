//! Resource amounts as integers, and the requests of pods.
//!
//! Like upstream, quantities are added exactly and rounded once at the end. Afterwards the scheduler uses the
//! integers only.

use std::collections::BTreeMap;
use std::sync::Arc;

use k8s_openapi::api::core::v1::{Container, ContainerStatus, Pod};
use k8s_openapi::apimachinery::pkg::api::resource::Quantity as Text;
use schema::quantity::{Format, Quantity};

use super::labels::StringPool;

/// CPU request in millicores assumed for containers without one when nodes are scored
/// (`DefaultMilliCPURequest`).
pub const DEFAULT_MILLI_CPU: i64 = 100;
/// Memory request assumed for containers without one when nodes are scored (`DefaultMemoryRequest`).
pub const DEFAULT_MEMORY: i64 = 200 * 1024 * 1024;

/// Resource amounts: CPU in millicores, the others in whole units.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct Resources {
    pub milli_cpu: i64,
    pub memory: i64,
    pub ephemeral_storage: i64,
    /// The number of pods a node accepts. Zero in requests.
    pub pods: i64,
    /// Extended resources, huge pages and the like, sorted by name.
    pub scalar: Vec<(Arc<str>, i64)>,
}

/// A resource name in plugin arguments.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum ResourceName {
    Cpu,
    Memory,
    EphemeralStorage,
    Scalar(Arc<str>),
}

impl From<&str> for ResourceName {
    fn from(name: &str) -> ResourceName {
        match name {
            "cpu" => ResourceName::Cpu,
            "memory" => ResourceName::Memory,
            "ephemeral-storage" => ResourceName::EphemeralStorage,
            other => ResourceName::Scalar(other.into()),
        }
    }
}

impl Resources {
    /// Parses a resource list, for example a node's allocatable.
    pub fn read(list: Option<&BTreeMap<String, Text>>, strings: &mut StringPool) -> Resources {
        let mut sum = QuantityList::default();
        sum.add(list);
        sum.resources(strings)
    }

    /// The amount of a resource.
    pub fn get(&self, name: &ResourceName) -> i64 {
        match name {
            ResourceName::Cpu => self.milli_cpu,
            ResourceName::Memory => self.memory,
            ResourceName::EphemeralStorage => self.ephemeral_storage,
            ResourceName::Scalar(name) => self.scalar(name),
        }
    }

    /// The amount of a scalar resource.
    pub fn scalar(&self, name: &str) -> i64 {
        self.scalar.iter().find(|(known, _)| &**known == name).map_or(0, |(_, amount)| *amount)
    }

    /// Whether the list contains the scalar resource.
    pub fn has_scalar(&self, name: &str) -> bool {
        self.scalar.iter().any(|(known, _)| &**known == name)
    }

    /// Whether all amounts are zero.
    pub fn is_zero(&self) -> bool {
        self.milli_cpu == 0 && self.memory == 0 && self.ephemeral_storage == 0 && self.scalar.is_empty()
    }

    /// Adds the requests of a pod, or with sign `-1` subtracts them.
    pub fn adjust(&mut self, by: &Resources, sign: i64) {
        let step = |into: &mut i64, amount: i64| *into = into.saturating_add(sign.saturating_mul(amount));
        step(&mut self.milli_cpu, by.milli_cpu);
        step(&mut self.memory, by.memory);
        step(&mut self.ephemeral_storage, by.ephemeral_storage);
        for (name, amount) in &by.scalar {
            match self.scalar.binary_search_by(|(known, _)| known.cmp(name)) {
                Ok(at) => {
                    step(&mut self.scalar[at].1, *amount);
                    if self.scalar[at].1 == 0 {
                        self.scalar.remove(at);
                    }
                }
                Err(at) => self.scalar.insert(at, (name.clone(), sign.saturating_mul(*amount))),
            }
        }
    }
}

/// The requests of a pod in the three forms the scheduler uses.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct Requests {
    /// The resources that must be free on the node.
    pub exact: Resources,
    /// CPU and memory with defaults for containers without requests; summed up per node.
    pub nonzero: [i64; 2],
    /// Like `nonzero` without pod-level requests, for the scores of NodeResourcesFit.
    pub scoring: [i64; 2],
}

impl Requests {
    /// Computes a pod's requests (upstream's `PodRequests`): the sum of the containers, or the highest init
    /// container together with the sidecars started before it if that is more; pod-level requests replace the
    /// result; overhead is added.
    pub fn of(pod: &Pod, strings: &mut StringPool) -> Requests {
        let exact = pod_requests(pod, &[], true);
        let defaults = [
            ("cpu", Quantity::from_milli(DEFAULT_MILLI_CPU, Format::DecimalSI)),
            ("memory", Quantity::new(DEFAULT_MEMORY, Format::DecimalSI)),
        ];
        let has_pod_level = pod_level(pod).next().is_some();
        let missing: Vec<_> = defaults
            .iter()
            .filter(|(name, _)| !has_pod_level || exact.get(name).is_none())
            .copied()
            .collect();
        let nonzero = pod_requests(pod, &missing, true).cpu_and_memory();
        let scoring =
            if has_pod_level { pod_requests(pod, &defaults, false).cpu_and_memory() } else { nonzero };
        Requests { exact: exact.resources(strings), nonzero, scoring }
    }
}

/// Quantities by name, in insertion order. Pods have few resources, so a list is enough.
#[derive(Clone, Default)]
struct QuantityList<'a>(Vec<(&'a str, Quantity)>);

impl<'a> QuantityList<'a> {
    fn get(&self, name: &str) -> Option<Quantity> {
        self.0.iter().find(|(known, _)| *known == name).map(|(_, amount)| *amount)
    }

    fn merge(&mut self, name: &'a str, amount: Quantity, by: impl Fn(Quantity, Quantity) -> Quantity) {
        match self.0.iter_mut().find(|(known, _)| *known == name) {
            Some((_, sum)) => *sum = by(*sum, amount),
            None => self.0.push((name, amount)),
        }
    }

    fn add(&mut self, list: Option<&'a BTreeMap<String, Text>>) {
        for (name, amount) in read(list) {
            self.merge(name, amount, |a, b| a + b);
        }
    }

    fn add_all(&mut self, other: &QuantityList<'a>) {
        for (name, amount) in &other.0 {
            self.merge(name, *amount, |a, b| a + b);
        }
    }

    fn max(&mut self, other: &QuantityList<'a>) {
        self.raise(other.0.iter().copied());
    }

    fn raise(&mut self, other: impl Iterator<Item = (&'a str, Quantity)>) {
        for (name, amount) in other {
            self.merge(name, amount, |a, b| if b > a { b } else { a });
        }
    }

    fn cpu_and_memory(&self) -> [i64; 2] {
        [self.get("cpu").map_or(0, |q| q.milli()), self.get("memory").map_or(0, |q| q.value())]
    }

    fn resources(&self, strings: &mut StringPool) -> Resources {
        let mut resources = Resources::default();
        for (name, amount) in &self.0 {
            match *name {
                "cpu" => resources.milli_cpu = amount.milli(),
                "memory" => resources.memory = amount.value(),
                "ephemeral-storage" => resources.ephemeral_storage = amount.value(),
                "pods" => resources.pods = amount.value(),
                name if is_scalar(name) => {
                    resources.scalar.push((strings.get_or_insert(name), amount.value()))
                }
                _ => {}
            }
        }
        resources.scalar.sort();
        resources
    }
}

fn read(list: Option<&BTreeMap<String, Text>>) -> impl Iterator<Item = (&str, Quantity)> {
    let entries = list.into_iter().flatten();
    entries.map(|(name, text)| (&**name, Quantity::parse(&text.0).unwrap_or(Quantity::ZERO)))
}

/// Pod-level requests of the resources that support them. During a resize, the highest of the desired,
/// allocated and actual requests.
fn pod_level(pod: &Pod) -> impl Iterator<Item = (&str, Quantity)> {
    let requests = pod.spec.as_ref().and_then(|spec| spec.resources.as_ref()?.requests.as_ref());
    let mut highest = QuantityList::default();
    match pod.status.as_ref().and_then(|status| Some((status, status.resources.as_ref()?))) {
        None => highest.add(requests),
        Some((status, given)) => {
            let desired = (!resize_is_infeasible(pod)).then_some(requests).flatten();
            for list in [desired, given.requests.as_ref(), status.allocated_resources.as_ref()] {
                highest.raise(read(list));
            }
        }
    }
    let names = requests.into_iter().flatten().map(|(name, _)| name.as_str());
    let names = names.filter(|name| matches!(*name, "cpu" | "memory") || name.starts_with("hugepages-"));
    names.map(move |name| (name, highest.get(name).unwrap_or(Quantity::ZERO)))
}

fn pod_requests<'a>(
    pod: &'a Pod,
    missing: &[(&'static str, Quantity)],
    with_pod_level: bool,
) -> QuantityList<'a> {
    let mut sum = QuantityList::default();
    let Some(spec) = &pod.spec else { return sum };
    for container in &spec.containers {
        sum.add_all(&container_requests(pod, container, missing));
    }
    let (mut sidecars, mut highest) = (QuantityList::default(), QuantityList::default());
    for container in spec.init_containers.iter().flatten() {
        let mut requests = container_requests(pod, container, missing);
        if is_sidecar(container) {
            sum.add_all(&requests);
            sidecars.add_all(&requests);
            highest.max(&sidecars);
        } else {
            requests.add_all(&sidecars);
            highest.max(&requests);
        }
    }
    sum.max(&highest);
    if with_pod_level {
        for (name, amount) in pod_level(pod) {
            sum.merge(name, amount, |_, own| own);
        }
    }
    sum.add(spec.overhead.as_ref());
    sum
}

/// Whether an init container is a sidecar (`restartPolicy: Always`).
pub fn is_sidecar(container: &Container) -> bool {
    container.restart_policy.as_deref() == Some("Always")
}

/// Requests of a container. During a resize, the highest of the desired, allocated and actual requests.
fn container_requests<'a>(
    pod: &'a Pod,
    container: &'a Container,
    missing: &[(&'static str, Quantity)],
) -> QuantityList<'a> {
    let mut requests = QuantityList::default();
    let spec = container.resources.as_ref().and_then(|resources| resources.requests.as_ref());
    match status_of(pod, container).and_then(|status| Some((status, status.resources.as_ref()?))) {
        None => requests.add(spec),
        Some((status, given)) => {
            let desired = (!resize_is_infeasible(pod)).then_some(spec).flatten();
            for list in [desired, given.requests.as_ref(), status.allocated_resources.as_ref()] {
                requests.raise(read(list));
            }
        }
    }
    for (name, amount) in missing {
        if requests.get(name).is_none() {
            requests.0.push((name, *amount));
        }
    }
    requests
}

fn status_of<'a>(pod: &'a Pod, container: &Container) -> Option<&'a ContainerStatus> {
    let status = pod.status.as_ref()?;
    // The status of other init containers is ignored: they have ended and cannot be resized.
    let sidecar_statuses = status.init_container_statuses.iter().filter(|_| is_sidecar(container)).flatten();
    status
        .container_statuses
        .iter()
        .flatten()
        .chain(sidecar_statuses)
        .find(|status| status.name == container.name)
}

fn resize_is_infeasible(pod: &Pod) -> bool {
    let conditions = pod.status.as_ref().and_then(|status| status.conditions.as_ref());
    let pending = conditions.into_iter().flatten().find(|condition| condition.type_ == "PodResizePending");
    pending.is_some_and(|condition| condition.reason.as_deref() == Some("Infeasible"))
}

/// Whether a resource is counted by name: extended resources, huge pages, attachable volumes.
pub fn is_scalar(name: &str) -> bool {
    is_extended(name)
        || name.starts_with("hugepages-")
        || name.contains("kubernetes.io/")
        || name.starts_with("attachable-volumes-")
}

/// Whether a resource is an extended resource (upstream's `IsExtendedResourceName`).
pub fn is_extended(name: &str) -> bool {
    name.contains('/') && !name.contains("kubernetes.io/") && !name.starts_with("requests.")
}
