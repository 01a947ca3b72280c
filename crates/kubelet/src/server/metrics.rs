//! `/metrics` and its subpaths in the Prometheus text format. Values are collected on request,
//! except for the cached volume stats of claims.

use std::fmt::Write as _;

use reconcile::Object as _;
use runtime::cri;

use crate::Node;
use crate::stats::{self, ResourceUsage};

/// Called for each container with its labels, the UID of its pod, and its usage.
type ContainerVisitor<'a> = dyn FnMut(&[(&str, &str)], &str, ResourceUsage) + 'a;

/// Metrics in the text format.
#[derive(Default)]
struct MetricsText(String);

impl MetricsText {
    fn header(&mut self, name: &str, kind: &str, help: &str) {
        let _ = write!(self.0, "# HELP {name} {help}\n# TYPE {name} {kind}\n");
    }

    fn sample(
        &mut self,
        name: &str,
        labels: &[(&str, &str)],
        value: impl std::fmt::Display,
        at: Option<i64>,
    ) {
        self.0.push_str(name);
        if !labels.is_empty() {
            let pairs: Vec<String> =
                labels.iter().map(|(name, value)| format!("{name}=\"{}\"", escape_label(value))).collect();
            let _ = write!(self.0, "{{{}}}", pairs.join(","));
        }
        let _ = match at {
            Some(nanoseconds) => writeln!(self.0, " {value} {}", nanoseconds / 1_000_000),
            None => writeln!(self.0, " {value}"),
        };
    }
}

fn escape_label(text: &str) -> String {
    text.replace('\\', "\\\\").replace('"', "\\\"").replace('\n', "\\n")
}

fn seconds(nanoseconds: u64) -> f64 {
    nanoseconds as f64 / 1e9
}

/// `/metrics`: the kubelet itself.
pub async fn kubelet_metrics(node: &Node) -> String {
    let mut page = MetricsText::default();
    let name = &node.settings.node_name;
    page.header("kubelet_node_name", "gauge", "The node's name. The count is always 1.");
    page.sample("kubelet_node_name", &[("node", name)], 1, None);
    let desired = node.pods().len();
    page.header(
        "kubelet_desired_pods",
        "gauge",
        "The number of pods the kubelet is being instructed to run.",
    );
    page.sample("kubelet_desired_pods", &[("static", "")], desired, None);
    let sandboxes = node.runtime.sandboxes(&[]).await.unwrap_or_default();
    let ready = sandboxes.iter().filter(|one| one.state() == cri::PodSandboxState::Ready).count();
    page.header("kubelet_running_pods", "gauge", "Number of pods that have a running pod sandbox");
    page.sample("kubelet_running_pods", &[], ready, None);
    let containers = node.runtime.containers(&[]).await.unwrap_or_default();
    page.header("kubelet_running_containers", "gauge", "Number of containers currently running");
    let states = [
        ("created", cri::ContainerState::Created),
        ("exited", cri::ContainerState::Exited),
        ("running", cri::ContainerState::Running),
    ];
    for (state_label, state) in states {
        let count = containers.iter().filter(|one| one.state() == state).count();
        page.sample("kubelet_running_containers", &[("container_state", state_label)], count, None);
    }
    let help = "The number of ResourceClaims that are currently in use on the node, by driver name (driver_name label value) and across all drivers (special value <any> for driver_name). Note that the sum of all by-driver counts is not the total number of in-use ResourceClaims because the same ResourceClaim might use devices from different drivers. Instead, use the count for the <any> driver_name.";
    page.header("dra_resource_claims_in_use", "gauge", help);
    for (driver, count) in node.dra.in_use() {
        page.sample("dra_resource_claims_in_use", &[("driver_name", &driver)], count, None);
    }
    write_volume_metrics(node, &mut page).await;
    let process_memory = std::fs::read_to_string("/proc/self/statm").unwrap_or_default();
    let pages: Vec<u64> = process_memory.split(' ').filter_map(|text| text.parse().ok()).collect();
    page.header("process_resident_memory_bytes", "gauge", "Resident memory size in bytes.");
    page.sample("process_resident_memory_bytes", &[], pages.get(1).unwrap_or(&0) * 4096, None);
    // In a process with an API server, that one exports the metrics of the process.
    if node.object_manager.is_some() {
        node.ctx.metrics.write(&mut page.0);
    }
    page.0
}

/// The volume stats of claims, as in `/stats/summary`.
async fn write_volume_metrics(node: &Node, page: &mut MetricsText) {
    const METRICS: [(&str, &str, &str); 6] = [
        ("capacity_bytes", "capacityBytes", "Capacity in bytes of the volume"),
        ("available_bytes", "availableBytes", "Number of available bytes in the volume"),
        ("used_bytes", "usedBytes", "Number of used bytes in the volume"),
        ("inodes", "inodes", "Maximum number of inodes in the volume"),
        ("inodes_free", "inodesFree", "Number of free inodes in the volume"),
        ("inodes_used", "inodesUsed", "Number of used inodes in the volume"),
    ];
    let claims = stats::volumes::claim_volume_stats(node).await;
    for (name, field, help) in METRICS.iter().filter(|_| !claims.is_empty()) {
        let name = format!("kubelet_volume_stats_{name}");
        page.header(&name, "gauge", help);
        for ((namespace, claim), usage) in &claims {
            let labels = [("namespace", namespace.as_str()), ("persistentvolumeclaim", claim)];
            page.sample(&name, &labels, &usage[field], None);
        }
    }
}

/// `/metrics/resource`: the source of autoscaling and `kubectl top`.
pub async fn resource_metrics(node: &Node) -> String {
    let mut page = MetricsText::default();
    let pods = stats::pod_stats(node).await;
    let failed = u8::from(pods.is_err());
    let pods = pods.unwrap_or_default();
    let each = |f: &mut ContainerVisitor<'_>| {
        for pod in &pods {
            for container in &pod.containers {
                let labels = [
                    ("container", container.name.as_str()),
                    ("namespace", &*pod.key.namespace),
                    ("pod", &*pod.key.name),
                ];
                f(&labels, &pod.uid, container.usage);
            }
        }
    };
    let help = "Cumulative cpu time consumed by the container in core-seconds";
    page.header("container_cpu_usage_seconds_total", "counter", help);
    each(&mut |labels, _, usage| {
        let cpu_seconds = seconds(usage.cpu_nanoseconds);
        page.sample("container_cpu_usage_seconds_total", labels, cpu_seconds, Some(usage.at));
    });
    page.header(
        "container_memory_working_set_bytes",
        "gauge",
        "Current working set of the container in bytes",
    );
    each(&mut |labels, _, usage| {
        page.sample("container_memory_working_set_bytes", labels, usage.working_set, Some(usage.at));
    });
    let help = "Start time of the container since unix epoch in seconds";
    page.header("container_start_time_seconds", "gauge", help);
    each(&mut |labels, uid, _| {
        if let Some(start) = start_seconds(node, labels, uid) {
            page.sample("container_start_time_seconds", labels, start, None);
        }
    });
    let machine = stats::node_usage(node.ctx.clock.now());
    let help = "Cumulative cpu time consumed by the node in core-seconds";
    page.header("node_cpu_usage_seconds_total", "counter", help);
    page.sample("node_cpu_usage_seconds_total", &[], seconds(machine.cpu_nanoseconds), Some(machine.at));
    page.header("node_memory_working_set_bytes", "gauge", "Current working set of the node in bytes");
    page.sample("node_memory_working_set_bytes", &[], machine.working_set, Some(machine.at));
    let help = "Cumulative cpu time consumed by the pod in core-seconds";
    page.header("pod_cpu_usage_seconds_total", "counter", help);
    for pod in &pods {
        let (labels, usage) = ([("namespace", &*pod.key.namespace), ("pod", &*pod.key.name)], pod.usage());
        page.sample("pod_cpu_usage_seconds_total", &labels, seconds(usage.cpu_nanoseconds), Some(usage.at));
    }
    page.header("pod_memory_working_set_bytes", "gauge", "Current working set of the pod in bytes");
    for pod in &pods {
        let (labels, usage) = ([("namespace", &*pod.key.namespace), ("pod", &*pod.key.name)], pod.usage());
        page.sample("pod_memory_working_set_bytes", &labels, usage.working_set, Some(usage.at));
    }
    let help = "1 if there was an error while getting container metrics, 0 otherwise";
    page.header("resource_scrape_error", "gauge", help);
    page.sample("resource_scrape_error", &[], failed, None);
    page.0
}

fn start_seconds(node: &Node, labels: &[(&str, &str)], uid: &str) -> Option<f64> {
    let label = |name: &str| labels.iter().find(|(known, _)| *known == name).map_or("", |(_, value)| value);
    let key = crate::Key::new(label("namespace"), label("pod"));
    let pod = node.pod_with_uid(&key, uid)?;
    let status = pod.status.as_ref()?;
    let all =
        status.container_statuses.iter().flatten().chain(status.init_container_statuses.iter().flatten());
    let state = all.into_iter().find(|status| status.name == label("container"))?.state.as_ref()?;
    Some(state.running.as_ref()?.started_at.as_ref()?.0.as_millisecond() as f64 / 1e3)
}

/// `/metrics/cadvisor`: container usage under cAdvisor's names, which most dashboards use.
pub async fn cadvisor_metrics(node: &Node) -> String {
    let mut page = MetricsText::default();
    let pods = stats::pod_stats(node).await.unwrap_or_default();
    type Value = fn(&ResourceUsage) -> Option<f64>;
    let families: [(&str, &str, &str, Value); 5] = [
        (
            "container_cpu_usage_seconds_total",
            "counter",
            "Cumulative cpu time consumed in seconds.",
            |usage| Some(seconds(usage.cpu_nanoseconds)),
        ),
        ("container_memory_working_set_bytes", "gauge", "Current working set in bytes.", |usage| {
            Some(usage.working_set as f64)
        }),
        (
            "container_memory_usage_bytes",
            "gauge",
            "Current memory usage in bytes, including all memory regardless of when it was accessed",
            |usage| usage.memory.map(|bytes| bytes as f64),
        ),
        ("container_memory_rss", "gauge", "Size of RSS in bytes.", |usage| {
            usage.rss.map(|bytes| bytes as f64)
        }),
        (
            "container_memory_failures_total",
            "counter",
            "Cumulative count of memory allocation failures.",
            |usage| usage.page_faults.map(|faults| faults as f64),
        ),
    ];
    for (name, kind, help, value) in families {
        page.header(name, kind, help);
        for pod in &pods {
            for container in &pod.containers {
                let labels = [
                    ("container", container.name.as_str()),
                    ("namespace", &*pod.key.namespace),
                    ("pod", &*pod.key.name),
                ];
                if let Some(value) = value(&container.usage) {
                    page.sample(name, &labels, value, Some(container.usage.at));
                }
            }
        }
    }
    let cpus = std::thread::available_parallelism().map_or(1, usize::from);
    page.header("machine_cpu_cores", "gauge", "Number of logical CPU cores.");
    page.sample("machine_cpu_cores", &[], cpus, None);
    page.header("machine_memory_bytes", "gauge", "Amount of memory installed on the machine.");
    page.sample("machine_memory_bytes", &[], node.settings.memory, None);
    page.0
}

/// `/metrics/probes`.
pub fn probe_metrics(node: &Node) -> String {
    let mut page = MetricsText::default();
    let help = "Cumulative number of a liveness, readiness or startup probe for a container by result.";
    page.header("prober_probe_total", "counter", help);
    for pod in node.pods() {
        let probe_counts = node.with_pod_state(&pod, |memory| memory.probe_counts.clone());
        for ((container, kind, succeeded), count) in probe_counts {
            let labels = [
                ("container", container.as_str()),
                ("namespace", pod.namespace()),
                ("pod", pod.name()),
                ("pod_uid", pod.uid()),
                ("probe_type", kind),
                ("result", if succeeded { "successful" } else { "failed" }),
            ];
            page.sample("prober_probe_total", &labels, count, None);
        }
    }
    page.0
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn formats_samples() {
        let mut page = MetricsText::default();
        page.header("a", "gauge", "What it is.");
        page.sample("a", &[("x", "1\"2\\3\n")], 5, Some(1_500_000_000));
        page.sample("a", &[], 0.25, None);
        let expected = "# HELP a What it is.\n# TYPE a gauge\na{x=\"1\\\"2\\\\3\\n\"} 5 1500\na 0.25\n";
        assert_eq!(page.0, expected);
    }
}
