//! Requests and limits as cgroups know them.

use k8s_openapi::api::core::v1::{Container, Pod};
use runtime::cri::LinuxContainerResources;
use schema::quantity::Quantity;

pub const PERIOD: i64 = 100_000;
/// The kernel takes no smaller ones.
const LEAST_QUOTA: i64 = 1_000;
pub const LEAST_SHARES: i64 = 2;
const MOST_SHARES: i64 = 262_144;

pub fn of(pod: &Pod, container: &Container, node_memory: i64) -> LinuxContainerResources {
    let resources = crate::pod::resize::effective(pod, container);
    let amount = |limits: bool, name: &str| {
        let amounts = if limits { resources.limits.as_ref() } else { resources.requests.as_ref() };
        Quantity::parse(&amounts?.get(name)?.0).ok()
    };
    let limit = amount(true, "cpu").map(|cpu| cpu.milli());
    let request = amount(false, "cpu").map(|cpu| cpu.milli()).or(limit);
    let memory = amount(true, "memory").map_or(0, |memory| memory.value());
    let asked = amount(false, "memory").map_or(0, |memory| memory.value());
    LinuxContainerResources {
        cpu_period: PERIOD,
        cpu_quota: limit.map_or(0, quota),
        cpu_shares: request.map_or(LEAST_SHARES, shares),
        memory_limit_in_bytes: memory,
        oom_score_adj: oom_score(pod, asked, node_memory),
        hugepage_limits: crate::huge_pages::limits(pod, container),
        ..LinuxContainerResources::default()
    }
}

/// Microseconds in each period, of thousandths of a processor.
pub fn quota(milli: i64) -> i64 {
    (milli.saturating_mul(PERIOD) / 1000).max(LEAST_QUOTA)
}

/// The weight among others, of thousandths of a processor.
pub fn shares(milli: i64) -> i64 {
    (milli.saturating_mul(1024) / 1000).clamp(LEAST_SHARES, MOST_SHARES)
}

/// Who goes first when memory runs out: the less was promised, the sooner.
fn oom_score(pod: &Pod, asked: i64, node_memory: i64) -> i64 {
    let critical =
        pod.spec.as_ref().and_then(|spec| spec.priority).is_some_and(|priority| priority >= 2_000_000_000);
    let class = pod.status.as_ref().and_then(|status| status.qos_class.as_deref());
    match class {
        _ if critical => -997,
        Some("Guaranteed") => -997,
        Some("BestEffort") => 1000,
        // The share of memory that was not asked for, in per mille, between the two.
        _ => (1000 - 1000 * asked / node_memory.max(1)).clamp(3, 999),
    }
}
