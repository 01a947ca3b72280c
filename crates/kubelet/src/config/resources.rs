//! Converts resource requests and limits to cgroup values. Upstream:
//! `pkg/kubelet/cm/helpers_linux.go` and `pkg/kubelet/qos`.

use k8s_openapi::api::core::v1::{Container, Pod};
use runtime::cri::LinuxContainerResources;
use schema::quantity::Quantity;

pub const CFS_PERIOD_MICROS: i64 = 100_000;
/// The kernel rejects smaller values.
const MIN_CFS_QUOTA_MICROS: i64 = 1_000;
pub const MIN_CPU_SHARES: i64 = 2;
const MAX_CPU_SHARES: i64 = 262_144;

pub fn container_resources(pod: &Pod, container: &Container, node_memory: i64) -> LinuxContainerResources {
    let resources = crate::pod::resize::effective_resources(pod, container);
    let amount = |limits: bool, name: &str| {
        let values = if limits { resources.limits.as_ref() } else { resources.requests.as_ref() };
        Quantity::parse(&values?.get(name)?.0).ok()
    };
    let limit = amount(true, "cpu").map(|cpu| cpu.milli());
    let request = amount(false, "cpu").map(|cpu| cpu.milli()).or(limit);
    let memory = amount(true, "memory").map_or(0, |memory| memory.value());
    let memory_request = amount(false, "memory").map_or(0, |memory| memory.value());
    LinuxContainerResources {
        cpu_period: CFS_PERIOD_MICROS,
        cpu_quota: limit.map_or(0, quota),
        cpu_shares: request.map_or(MIN_CPU_SHARES, shares),
        memory_limit_in_bytes: memory,
        oom_score_adj: oom_score(pod, memory_request, node_memory),
        hugepage_limits: crate::huge_pages::limits(pod, container),
        ..LinuxContainerResources::default()
    }
}

/// The CFS quota in microseconds per period, for millicores.
pub fn quota(milli: i64) -> i64 {
    (milli.saturating_mul(CFS_PERIOD_MICROS) / 1000).max(MIN_CFS_QUOTA_MICROS)
}

/// The CPU shares for millicores.
pub fn shares(milli: i64) -> i64 {
    (milli.saturating_mul(1024) / 1000).clamp(MIN_CPU_SHARES, MAX_CPU_SHARES)
}

/// The OOM score adjustment: containers with small memory requests are killed first.
fn oom_score(pod: &Pod, memory_request: i64, node_memory: i64) -> i64 {
    let critical =
        pod.spec.as_ref().and_then(|spec| spec.priority).is_some_and(|priority| priority >= 2_000_000_000);
    let class = pod.status.as_ref().and_then(|status| status.qos_class.as_deref());
    match class {
        _ if critical => -997,
        Some("Guaranteed") => -997,
        Some("BestEffort") => 1000,
        // The share of the node's memory that is not requested, in per mille, between the scores of
        // the other classes.
        _ => (1000 - 1000 * memory_request / node_memory.max(1)).clamp(3, 999),
    }
}
