//! What is said of what a pod and its containers have: what was agreed to, and of what runs what it really has. Pure.

use std::collections::BTreeMap;

use api::resources::{ResourceList, add, list, of_pod as sum};
use k8s_openapi::api::core::v1::{Container, ContainerStatus, Pod, ResourceRequirements};
use k8s_openapi::apimachinery::pkg::api::resource::Quantity as Text;
use runtime::cri::LinuxContainerResources;
use schema::quantity::{Format, Quantity};

use crate::config::resources::{LEAST_SHARES, PERIOD};
use crate::memory::Memory;
use crate::observed::Ran;
use crate::pod::needs;
use crate::pod::resize::{self, Amounts, Whole};

type Amount = BTreeMap<String, Text>;

/// Limits up to this many thousandths of a processor are all the same to the kernel.
const LEAST_MILLI: i64 = 10;

/// What a container has that was agreed to have this. `before` is what was said last of the same container, if it ran.
pub fn of_container(
    container: &Container,
    run: &Ran,
    memory: &Memory,
    before: Option<&ContainerStatus>,
) -> ResourceRequirements {
    let mut resources = container.resources.clone().unwrap_or_default();
    if !run.state.is_running() {
        return resources;
    }
    let is_same = |told: &&ContainerStatus| {
        let id = told.container_id.as_deref().and_then(|id| id.rsplit("://").next());
        id == Some(&run.id) && told.state.as_ref().is_some_and(|state| state.running.is_some())
    };
    let before = before.filter(is_same).and_then(|told| told.resources.clone()).unwrap_or_default();
    let actual = actual(run, memory);
    if let Some(limits) = &mut resources.limits {
        set(limits, "cpu", cpu(actual.cpu_limit), LEAST_MILLI, before.limits.as_ref());
        set(limits, "memory", bytes(actual.memory_limit), 0, before.limits.as_ref());
    }
    if let Some(requests) = &mut resources.requests {
        set(requests, "cpu", cpu(actual.cpu_request), LEAST_SHARES, before.requests.as_ref());
        set(requests, "memory", bytes(actual.memory_request), 0, before.requests.as_ref());
    }
    resources
}

/// Puts in what there is, or what was there where nobody knows. What is too little to be told apart, as `least` of the
/// kernel's measure is, stays as it was agreed to.
fn set(list: &mut Amount, name: &str, actual: Quantity, least: i64, before: Option<&Amount>) {
    if actual.is_zero() {
        let known = before.and_then(|before| before.get(name));
        list.extend(known.map(|known| (name.to_owned(), known.clone())));
        return;
    }
    let agreed = list.get(name).and_then(|text| Quantity::parse(&text.0).ok()).unwrap_or(Quantity::ZERO);
    let is_more = |amount: Quantity| least == 0 || amount.milli() > least;
    if agreed != actual && (is_more(actual) || is_more(agreed)) {
        list.insert(name.to_owned(), Text(actual.to_string()));
    }
}

/// What a run has as the runtime tells; what it does not tell, as it was given.
fn actual(run: &Ran, memory: &Memory) -> Amounts {
    let given = resize::present(run, memory).unwrap_or_default();
    match run.resources.as_ref().map(told).filter(|told| *told != Amounts::default()) {
        Some(told) => Amounts { memory_request: given.memory_request, ..told },
        None => given,
    }
}

fn told(resources: &LinuxContainerResources) -> Amounts {
    let (quota, period) = (resources.cpu_quota, resources.cpu_period);
    Amounts {
        memory_limit: resources.memory_limit_in_bytes.max(0),
        memory_request: 0,
        cpu_limit: if quota > 0 && period > 0 { quota.saturating_mul(1000) / period } else { 0 },
        cpu_request: of_shares(resources.cpu_shares),
    }
}

fn of_shares(shares: i64) -> i64 {
    if shares < LEAST_SHARES { 0 } else { shares.saturating_mul(1000).saturating_add(1023) / 1024 }
}

/// What a pod as a whole has, and what was agreed to.
pub fn of_pod(pod: &Pod, memory: &Memory, is_running: bool) -> (ResourceRequirements, Amount) {
    let spec = needs(pod);
    let (mut requests, mut limits) = (sum(&spec, "requests"), sum(&spec, "limits"));
    let overhead = list(&spec, "overhead");
    add(&mut requests, &overhead);
    for (name, more) in &overhead {
        limits.entry(name.clone()).and_modify(|limit| *limit = *limit + *more);
    }
    let texts = |list: &ResourceList| -> Amount {
        list.iter().map(|(name, amount)| (name.clone(), Text(amount.to_string()))).collect()
    };
    let allocated = texts(&requests);
    if !is_running {
        return (of(allocated.clone(), texts(&limits)), allocated);
    }
    let own = pod.spec.as_ref().and_then(|spec| spec.resources.clone()).unwrap_or_default();
    let (mut has, mut may) = (own.requests.unwrap_or_default(), own.limits.unwrap_or_default());
    for name in ["cpu", "memory"] {
        has.extend(allocated.get(name).map(|amount| (name.to_owned(), amount.clone())));
    }
    let wanted = Whole::of(pod);
    let whole = memory.record.as_ref().map_or(wanted, |record| record.whole);
    // What is as it was agreed to is said so, since the kernel's measure is a coarse one.
    if whole.cpu_shares != wanted.cpu_shares {
        set(&mut has, "cpu", cpu(of_shares(whole.cpu_shares)), LEAST_SHARES, None);
    }
    set(&mut may, "cpu", cpu(whole.cpu_quota.saturating_mul(1000) / PERIOD), LEAST_MILLI, None);
    set(&mut may, "memory", bytes(whole.memory), 0, None);
    (of(has, may), allocated)
}

fn of(requests: Amount, limits: Amount) -> ResourceRequirements {
    let some = |list: Amount| (!list.is_empty()).then_some(list);
    ResourceRequirements { requests: some(requests), limits: some(limits), claims: None }
}

fn cpu(milli: i64) -> Quantity {
    Quantity::from_milli(milli, Format::DecimalSI)
}

fn bytes(amount: i64) -> Quantity {
    Quantity::new(amount, Format::BinarySI)
}
