//! `/metrics` and its relatives, in Prometheus' words. Everything is counted when it is asked for, but for what claims hold.

use std::fmt::Write as _;

use reconcile::Object as _;
use runtime::cri;

use crate::Node;
use crate::stats::{self, Usage};

/// What is done with each container: its labels, its pod's uid, what it uses.
type Each<'a> = dyn FnMut(&[(&str, &str)], &str, Usage) + 'a;

/// A page of metrics.
#[derive(Default)]
struct Page(String);

impl Page {
    fn about(&mut self, name: &str, kind: &str, help: &str) {
        let _ = write!(self.0, "# HELP {name} {help}\n# TYPE {name} {kind}\n");
    }

    fn line(&mut self, name: &str, labels: &[(&str, &str)], value: impl std::fmt::Display, at: Option<i64>) {
        self.0.push_str(name);
        if !labels.is_empty() {
            let pairs: Vec<String> =
                labels.iter().map(|(name, value)| format!("{name}=\"{}\"", escaped(value))).collect();
            let _ = write!(self.0, "{{{}}}", pairs.join(","));
        }
        let _ = match at {
            Some(nanoseconds) => writeln!(self.0, " {value} {}", nanoseconds / 1_000_000),
            None => writeln!(self.0, " {value}"),
        };
    }
}

fn escaped(text: &str) -> String {
    text.replace('\\', "\\\\").replace('"', "\\\"").replace('\n', "\\n")
}

fn seconds(nanoseconds: u64) -> f64 {
    nanoseconds as f64 / 1e9
}

/// `/metrics`: the kubelet itself.
pub async fn own(node: &Node) -> String {
    let mut page = Page::default();
    let name = &node.settings.node_name;
    page.about("kubelet_node_name", "gauge", "The node's name. The count is always 1.");
    page.line("kubelet_node_name", &[("node", name)], 1, None);
    let desired = node.pods().len();
    page.about("kubelet_desired_pods", "gauge", "The number of pods the kubelet is being instructed to run.");
    page.line("kubelet_desired_pods", &[("static", "")], desired, None);
    let sandboxes = node.runtime.sandboxes(&[]).await.unwrap_or_default();
    let ready = sandboxes.iter().filter(|one| one.state() == cri::PodSandboxState::Ready).count();
    page.about("kubelet_running_pods", "gauge", "Number of pods that have a running pod sandbox");
    page.line("kubelet_running_pods", &[], ready, None);
    let containers = node.runtime.containers(&[]).await.unwrap_or_default();
    page.about("kubelet_running_containers", "gauge", "Number of containers currently running");
    let states = [
        ("created", cri::ContainerState::Created),
        ("exited", cri::ContainerState::Exited),
        ("running", cri::ContainerState::Running),
    ];
    for (shown, state) in states {
        let count = containers.iter().filter(|one| one.state() == state).count();
        page.line("kubelet_running_containers", &[("container_state", shown)], count, None);
    }
    let help = "The number of ResourceClaims that are currently in use on the node, by driver name (driver_name label value) and across all drivers (special value <any> for driver_name). Note that the sum of all by-driver counts is not the total number of in-use ResourceClaims because the same ResourceClaim might use devices from different drivers. Instead, use the count for the <any> driver_name.";
    page.about("dra_resource_claims_in_use", "gauge", help);
    for (driver, count) in node.dra.in_use() {
        page.line("dra_resource_claims_in_use", &[("driver_name", &driver)], count, None);
    }
    volumes(node, &mut page).await;
    let statm = std::fs::read_to_string("/proc/self/statm").unwrap_or_default();
    let pages: Vec<u64> = statm.split(' ').filter_map(|text| text.parse().ok()).collect();
    page.about("process_resident_memory_bytes", "gauge", "Resident memory size in bytes.");
    page.line("process_resident_memory_bytes", &[], pages.get(1).unwrap_or(&0) * 4096, None);
    // Beside an API server, that one tells of the rest of the process.
    if node.referred.is_some() {
        node.ctx.metrics.write(&mut page.0);
    }
    page.0
}

/// What claims hold, as `/stats/summary` tells it.
async fn volumes(node: &Node, page: &mut Page) {
    const METRICS: [(&str, &str, &str); 6] = [
        ("capacity_bytes", "capacityBytes", "Capacity in bytes of the volume"),
        ("available_bytes", "availableBytes", "Number of available bytes in the volume"),
        ("used_bytes", "usedBytes", "Number of used bytes in the volume"),
        ("inodes", "inodes", "Maximum number of inodes in the volume"),
        ("inodes_free", "inodesFree", "Number of free inodes in the volume"),
        ("inodes_used", "inodesUsed", "Number of used inodes in the volume"),
    ];
    let claims = stats::volumes::of_claims(node).await;
    for (name, field, help) in METRICS.iter().filter(|_| !claims.is_empty()) {
        let name = format!("kubelet_volume_stats_{name}");
        page.about(&name, "gauge", help);
        for ((namespace, claim), told) in &claims {
            let labels = [("namespace", namespace.as_str()), ("persistentvolumeclaim", claim)];
            page.line(&name, &labels, &told[field], None);
        }
    }
}

/// `/metrics/resource`: what autoscaling and `kubectl top` go by.
pub async fn resource(node: &Node) -> String {
    let mut page = Page::default();
    let pods = stats::pods(node).await;
    let failed = u8::from(pods.is_err());
    let pods = pods.unwrap_or_default();
    let each = |f: &mut Each<'_>| {
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
    page.about("container_cpu_usage_seconds_total", "counter", help);
    each(&mut |labels, _, usage| {
        let spent = seconds(usage.cpu_nanoseconds);
        page.line("container_cpu_usage_seconds_total", labels, spent, Some(usage.at));
    });
    page.about(
        "container_memory_working_set_bytes",
        "gauge",
        "Current working set of the container in bytes",
    );
    each(&mut |labels, _, usage| {
        page.line("container_memory_working_set_bytes", labels, usage.working_set, Some(usage.at));
    });
    let help = "Start time of the container since unix epoch in seconds";
    page.about("container_start_time_seconds", "gauge", help);
    each(&mut |labels, uid, _| {
        if let Some(start) = started(node, labels, uid) {
            page.line("container_start_time_seconds", labels, start, None);
        }
    });
    let machine = stats::machine(node.ctx.clock.now());
    let help = "Cumulative cpu time consumed by the node in core-seconds";
    page.about("node_cpu_usage_seconds_total", "counter", help);
    page.line("node_cpu_usage_seconds_total", &[], seconds(machine.cpu_nanoseconds), Some(machine.at));
    page.about("node_memory_working_set_bytes", "gauge", "Current working set of the node in bytes");
    page.line("node_memory_working_set_bytes", &[], machine.working_set, Some(machine.at));
    let help = "Cumulative cpu time consumed by the pod in core-seconds";
    page.about("pod_cpu_usage_seconds_total", "counter", help);
    for pod in &pods {
        let (labels, usage) = ([("namespace", &*pod.key.namespace), ("pod", &*pod.key.name)], pod.usage());
        page.line("pod_cpu_usage_seconds_total", &labels, seconds(usage.cpu_nanoseconds), Some(usage.at));
    }
    page.about("pod_memory_working_set_bytes", "gauge", "Current working set of the pod in bytes");
    for pod in &pods {
        let (labels, usage) = ([("namespace", &*pod.key.namespace), ("pod", &*pod.key.name)], pod.usage());
        page.line("pod_memory_working_set_bytes", &labels, usage.working_set, Some(usage.at));
    }
    let help = "1 if there was an error while getting container metrics, 0 otherwise";
    page.about("resource_scrape_error", "gauge", help);
    page.line("resource_scrape_error", &[], failed, None);
    page.0
}

fn started(node: &Node, labels: &[(&str, &str)], uid: &str) -> Option<f64> {
    let label = |name: &str| labels.iter().find(|(known, _)| *known == name).map_or("", |(_, value)| value);
    let key = crate::Key::new(label("namespace"), label("pod"));
    let pod = node.pod_exactly(&key, uid)?;
    let status = pod.status.as_ref()?;
    let all =
        status.container_statuses.iter().flatten().chain(status.init_container_statuses.iter().flatten());
    let state = all.into_iter().find(|status| status.name == label("container"))?.state.as_ref()?;
    Some(state.running.as_ref()?.started_at.as_ref()?.0.as_millisecond() as f64 / 1e3)
}

/// `/metrics/cadvisor`: what a container uses, by the names most dashboards know.
pub async fn cadvisor(node: &Node) -> String {
    let mut page = Page::default();
    let pods = stats::pods(node).await.unwrap_or_default();
    type Value = fn(&Usage) -> Option<f64>;
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
        page.about(name, kind, help);
        for pod in &pods {
            for container in &pod.containers {
                let labels = [
                    ("container", container.name.as_str()),
                    ("namespace", &*pod.key.namespace),
                    ("pod", &*pod.key.name),
                ];
                if let Some(value) = value(&container.usage) {
                    page.line(name, &labels, value, Some(container.usage.at));
                }
            }
        }
    }
    let cpus = std::thread::available_parallelism().map_or(1, usize::from);
    page.about("machine_cpu_cores", "gauge", "Number of logical CPU cores.");
    page.line("machine_cpu_cores", &[], cpus, None);
    page.about("machine_memory_bytes", "gauge", "Amount of memory installed on the machine.");
    page.line("machine_memory_bytes", &[], node.settings.memory, None);
    page.0
}

/// `/metrics/probes`.
pub fn probes(node: &Node) -> String {
    let mut page = Page::default();
    let help = "Cumulative number of a liveness, readiness or startup probe for a container by result.";
    page.about("prober_probe_total", "counter", help);
    for pod in node.pods() {
        let asked = node.remember(&pod, |memory| memory.asked.clone());
        for ((container, kind, well), count) in asked {
            let labels = [
                ("container", container.as_str()),
                ("namespace", pod.namespace()),
                ("pod", pod.name()),
                ("pod_uid", pod.uid()),
                ("probe_type", kind),
                ("result", if well { "successful" } else { "failed" }),
            ];
            page.line("prober_probe_total", &labels, count, None);
        }
    }
    page.0
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn lines() {
        let mut page = Page::default();
        page.about("a", "gauge", "What it is.");
        page.line("a", &[("x", "1\"2\\3\n")], 5, Some(1_500_000_000));
        page.line("a", &[], 0.25, None);
        let expected = "# HELP a What it is.\n# TYPE a gauge\na{x=\"1\\\"2\\\\3\\n\"} 5 1500\na 0.25\n";
        assert_eq!(page.0, expected);
    }
}
