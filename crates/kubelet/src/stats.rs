//! Resource usage of pods and the node, read on request from the runtime and from `/proc`. The
//! source of the summary API and of metrics.

pub mod volumes;

use std::collections::{BTreeMap, HashMap};
use std::path::Path;

use jiff::Timestamp;
use parking_lot::Mutex;
use runtime::cri;
use serde_json::{Value, json};

use crate::observed::{CONTAINER_NAME, POD_NAME, POD_NAMESPACE, POD_UID};
use crate::{Key, Node};

/// `/proc/stat` counts CPU time in hundredths of a second.
const NANOSECONDS_PER_TICK: u64 = 10_000_000;

/// CPU time and memory usage.
#[derive(Clone, Copy, Debug, Default, PartialEq)]
pub struct ResourceUsage {
    /// The time of the sample in nanoseconds.
    pub at: i64,
    pub cpu_nanoseconds: u64,
    pub working_set: u64,
    pub memory: Option<u64>,
    pub rss: Option<u64>,
    pub page_faults: Option<u64>,
    pub major_page_faults: Option<u64>,
}

/// The usage of a container.
pub struct ContainerUsage {
    pub name: String,
    pub usage: ResourceUsage,
    pub layer: Option<u64>,
    pub layer_inodes: Option<u64>,
}

/// The usage of a pod.
pub struct PodUsage {
    pub key: Key,
    pub uid: String,
    pub containers: Vec<ContainerUsage>,
}

impl PodUsage {
    pub fn usage(&self) -> ResourceUsage {
        let mut sum = ResourceUsage::default();
        for ContainerUsage { usage, .. } in &self.containers {
            sum.at = sum.at.max(usage.at);
            sum.cpu_nanoseconds += usage.cpu_nanoseconds;
            sum.working_set += usage.working_set;
            sum.memory = Some(sum.memory.unwrap_or(0) + usage.memory.unwrap_or(0));
            sum.rss = Some(sum.rss.unwrap_or(0) + usage.rss.unwrap_or(0));
        }
        sum
    }
}

/// The last sample of each pod, container and of the node, from which CPU rates are computed.
#[derive(Default)]
pub struct CpuRates(Mutex<HashMap<String, (i64, u64, u64)>>);

impl CpuRates {
    /// CPU nanoseconds per second since the last sample; the last rate if there is no newer sample.
    fn cpu_rate(&self, id: &str, usage: &ResourceUsage) -> u64 {
        let mut counts = self.0.lock();
        let known = counts.get(id).copied();
        let rate = match known {
            Some((at, cpu, rate)) => {
                let time = u64::try_from(usage.at - at).unwrap_or(0);
                match usage.cpu_nanoseconds.saturating_sub(cpu).checked_mul(1_000_000_000) {
                    Some(spent) if time > 0 => spent / time,
                    _ => rate,
                }
            }
            None => 0,
        };
        counts.insert(id.to_owned(), (usage.at, usage.cpu_nanoseconds, rate));
        rate
    }

    fn retain(&self, ids: &BTreeMap<String, ()>) {
        self.0.lock().retain(|id, _| ids.contains_key(id));
    }
}

/// The usage of all running containers by pod.
pub async fn pod_stats(node: &Node) -> runtime::Result<Vec<PodUsage>> {
    let mut pods: BTreeMap<String, PodUsage> = BTreeMap::new();
    for stats in node.runtime.stats().await? {
        let Some(attributes) = &stats.attributes else { continue };
        let label = |name: &str| attributes.labels.get(name).cloned();
        let (Some(namespace), Some(name), Some(uid), Some(container)) =
            (label(POD_NAMESPACE), label(POD_NAME), label(POD_UID), label(CONTAINER_NAME))
        else {
            continue;
        };
        // A container that has exited has no stats.
        let Some(usage) = container_usage(&stats) else { continue };
        let layer = stats.writable_layer.as_ref();
        let found = ContainerUsage {
            name: container,
            usage,
            layer: layer.and_then(|layer| layer.used_bytes.as_ref()).map(|used| used.value),
            layer_inodes: layer.and_then(|layer| layer.inodes_used.as_ref()).map(|used| used.value),
        };
        let key = Key::new(&namespace, &name);
        let pod = pods.entry(uid.clone()).or_insert_with(|| PodUsage { key, uid, containers: Vec::new() });
        pod.containers.push(found);
    }
    Ok(pods.into_values().collect())
}

fn container_usage(stats: &cri::ContainerStats) -> Option<ResourceUsage> {
    let (cpu, memory) = (stats.cpu.as_ref()?, stats.memory.as_ref()?);
    let value = |value: &Option<cri::Uint64Value>| value.as_ref().map(|value| value.value);
    Some(ResourceUsage {
        at: cpu.timestamp,
        cpu_nanoseconds: value(&cpu.usage_core_nano_seconds)?,
        working_set: value(&memory.working_set_bytes)?,
        memory: value(&memory.usage_bytes),
        rss: value(&memory.rss_bytes),
        page_faults: value(&memory.page_faults),
        major_page_faults: value(&memory.major_page_faults),
    })
}

/// The usage of the host.
pub fn node_usage(now: Timestamp) -> ResourceUsage {
    let read = |path: &str| std::fs::read_to_string(path).unwrap_or_default();
    let memory = read("/proc/meminfo");
    let kib = |name: &str| meminfo(&memory, name);
    ResourceUsage {
        at: i64::try_from(now.as_nanosecond()).unwrap_or(0),
        cpu_nanoseconds: cpu_time(&read("/proc/stat")),
        working_set: kib("MemTotal").saturating_sub(kib("MemAvailable")),
        memory: Some(kib("MemTotal").saturating_sub(kib("MemFree"))),
        rss: Some(kib("AnonPages")),
        page_faults: None,
        major_page_faults: None,
    }
}

/// Bytes of an entry in `/proc/meminfo`.
pub fn meminfo(text: &str, name: &str) -> u64 {
    let line = text.lines().find_map(|line| line.strip_prefix(name)?.strip_prefix(':'));
    let kib: Option<u64> = line.and_then(|line| line.split_whitespace().next()?.parse().ok());
    kib.unwrap_or(0) * 1024
}

/// CPU time from `/proc/stat` without idle and iowait.
fn cpu_time(stat: &str) -> u64 {
    let line = stat.lines().find_map(|line| line.strip_prefix("cpu "));
    let columns: Vec<u64> =
        line.into_iter().flat_map(str::split_whitespace).filter_map(|n| n.parse().ok()).collect();
    // user nice system idle iowait irq softirq steal; guest time is included in user.
    let busy = [0, 1, 2, 5, 6, 7].into_iter().filter_map(|i| columns.get(i)).sum::<u64>();
    busy.saturating_mul(NANOSECONDS_PER_TICK)
}

/// `/stats/summary`.
pub async fn summary(node: &Node, only_cpu_and_memory: bool) -> runtime::Result<Value> {
    let now = node.ctx.clock.now();
    let pods = pod_stats(node).await?;
    let mut ids = BTreeMap::from([("node".to_owned(), ())]);
    let mut pod_values = Vec::new();
    for pod in &pods {
        let known = node.pod_with_uid(&pod.key, &pod.uid);
        let status = known.as_ref().and_then(|pod| pod.status.as_ref());
        let started = |name: &str| {
            let all = status?
                .container_statuses
                .iter()
                .flatten()
                .chain(status?.init_container_statuses.iter().flatten());
            let state = all.into_iter().find(|status| status.name == name)?.state.as_ref()?;
            Some(format_time(state.running.as_ref()?.started_at.as_ref()?.0))
        };
        let mut containers = Vec::new();
        for container in &pod.containers {
            let id = format!("{}/{}", pod.uid, container.name);
            let mut one = json!({"name": container.name, "startTime": started(&container.name)});
            write_usage(node, &mut one, &id, &container.usage, None);
            ids.insert(id, ());
            if !only_cpu_and_memory {
                let mut rootfs = filesystem_summary(&node.settings.pods, now);
                rootfs["usedBytes"] = json!(container.layer);
                rootfs["inodesUsed"] = json!(container.layer_inodes);
                one["rootfs"] = rootfs;
                let dir = node.settings.log_dir(&pod.key, &pod.uid).join(&container.name);
                let mut logs = filesystem_summary(&node.settings.logs.dir, now);
                let (bytes, files) = sys::trees::usage(&dir);
                logs["usedBytes"] = json!(bytes);
                logs["inodesUsed"] = json!(files);
                one["logs"] = logs;
            }
            containers.push(one);
        }
        let start = status.and_then(|status| status.start_time.as_ref()).map(|time| format_time(time.0));
        let mut one = json!({
            "podRef": {"name": &*pod.key.name, "namespace": &*pod.key.namespace, "uid": pod.uid},
            "startTime": start,
            "containers": containers,
        });
        write_usage(node, &mut one, &pod.uid, &pod.usage(), None);
        ids.insert(pod.uid.clone(), ());
        if !only_cpu_and_memory {
            let (bytes, files) = sys::trees::usage(&node.settings.pods.join(&pod.uid));
            let layers: u64 = pod.containers.iter().filter_map(|container| container.layer).sum();
            let mut ephemeral = filesystem_summary(&node.settings.pods, now);
            ephemeral["usedBytes"] = json!(bytes + layers);
            ephemeral["inodesUsed"] = json!(files);
            one["ephemeral-storage"] = ephemeral;
            let volumes = match &known {
                Some(known) => volumes::pod_volume_stats(node, known, false, now).await,
                None => Vec::new(),
            };
            if !volumes.is_empty() {
                one["volume"] = json!(volumes);
            }
        }
        pod_values.push(one);
    }
    node.counts.retain(&ids);
    let uptime = std::fs::read_to_string("/proc/uptime").unwrap_or_default();
    let seconds: f64 = uptime.split(' ').next().and_then(|text| text.parse().ok()).unwrap_or(0.0);
    let boot = now.checked_sub(jiff::SignedDuration::from_secs(seconds as i64)).unwrap_or(now);
    let mut node_summary = json!({"nodeName": node.settings.node_name, "startTime": format_time(boot)});
    let available = meminfo(&std::fs::read_to_string("/proc/meminfo").unwrap_or_default(), "MemAvailable");
    write_usage(node, &mut node_summary, "node", &node_usage(now), Some(available));
    if !only_cpu_and_memory {
        node_summary["fs"] = filesystem_summary(&node.settings.pods, now);
        node_summary["network"] = network_summary(now);
        node_summary["rlimit"] = process_summary(now);
        let images = node.runtime.image_filesystems().await.unwrap_or_default();
        if let Some(usage) = images.first() {
            let mount = usage.fs_id.as_ref().map_or("/", |id| &id.mountpoint);
            let mut image = filesystem_summary(Path::new(mount), now);
            image["usedBytes"] = json!(usage.used_bytes.as_ref().map(|used| used.value));
            image["inodesUsed"] = json!(usage.inodes_used.as_ref().map(|used| used.value));
            node_summary["runtime"] = json!({"imageFs": image, "containerFs": image});
        }
    }
    Ok(json!({"node": node_summary, "pods": pod_values}))
}

fn write_usage(node: &Node, into: &mut Value, id: &str, usage: &ResourceUsage, available: Option<u64>) {
    let time = Timestamp::from_nanosecond(i128::from(usage.at)).map(format_time).unwrap_or_default();
    into["cpu"] = json!({
        "time": time,
        "usageNanoCores": node.counts.cpu_rate(id, usage),
        "usageCoreNanoSeconds": usage.cpu_nanoseconds,
    });
    let mut memory = json!({"time": time, "workingSetBytes": usage.working_set});
    let more = [
        ("availableBytes", available),
        ("usageBytes", usage.memory),
        ("rssBytes", usage.rss),
        ("pageFaults", usage.page_faults),
        ("majorPageFaults", usage.major_page_faults),
    ];
    more.into_iter().filter_map(|(name, value)| Some((name, value?))).for_each(|(name, value)| {
        memory[name] = json!(value);
    });
    into["memory"] = memory;
}

/// The summary of a path's filesystem.
fn filesystem_summary(path: &Path, now: Timestamp) -> Value {
    let Ok(stat) = rustix::fs::statvfs(path) else { return json!({"time": format_time(now)}) };
    json!({
        "time": format_time(now),
        "availableBytes": stat.f_bavail * stat.f_frsize,
        "capacityBytes": stat.f_blocks * stat.f_frsize,
        "usedBytes": (stat.f_blocks - stat.f_bfree) * stat.f_frsize,
        "inodesFree": stat.f_ffree,
        "inodes": stat.f_files,
        "inodesUsed": stat.f_files - stat.f_ffree,
    })
}

fn network_summary(now: Timestamp) -> Value {
    let text = std::fs::read_to_string("/proc/net/dev").unwrap_or_default();
    let interfaces: Vec<Value> = text.lines().skip(2).filter_map(interface_summary).collect();
    let mut result = interfaces.first().cloned().unwrap_or(json!({"name": ""}));
    result["time"] = json!(format_time(now));
    result["interfaces"] = json!(interfaces);
    result
}

/// A line of `/proc/net/dev`. The loopback interface and the host ends of pod links are omitted.
fn interface_summary(line: &str) -> Option<Value> {
    let (name, counts) = line.split_once(':')?;
    let name = name.trim();
    if name == "lo" || name.starts_with("veth") {
        return None;
    }
    let counts: Vec<u64> = counts.split_whitespace().filter_map(|count| count.parse().ok()).collect();
    let at = |i: usize| counts.get(i).copied().unwrap_or(0);
    Some(json!({"name": name, "rxBytes": at(0), "rxErrors": at(2), "txBytes": at(8), "txErrors": at(10)}))
}

/// The maximum number of processes and threads of this host.
pub fn max_processes() -> Option<i64> {
    let read = |name| std::fs::read_to_string(format!("/proc/sys/kernel/{name}")).ok();
    ["pid_max", "threads-max"].into_iter().filter_map(|name| read(name)?.trim().parse().ok()).min()
}

fn process_summary(now: Timestamp) -> Value {
    let max_pids = max_processes();
    let load = std::fs::read_to_string("/proc/loadavg").unwrap_or_default();
    let running = load.split(' ').nth(3).and_then(|pair| pair.split('/').nth(1)?.parse::<i64>().ok());
    json!({"time": format_time(now), "maxpid": max_pids, "curproc": running})
}

fn format_time(time: Timestamp) -> String {
    time.strftime("%Y-%m-%dT%H:%M:%SZ").to_string()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn reads_proc_files() {
        assert_eq!(cpu_time("cpu  1 2 3 100 200 4 5 6 7 8\ncpu0 9\n"), 21 * NANOSECONDS_PER_TICK);
        assert_eq!(meminfo("MemTotal:   10 kB\nMemFree: 3 kB\n", "MemFree"), 3072);
        assert_eq!(meminfo("", "MemFree"), 0);
        let line = "  eth0: 100 2 3 0 0 0 0 0 200 1 4 0 0 0 0 0";
        assert_eq!(
            interface_summary(line),
            Some(json!({"name": "eth0", "rxBytes": 100, "rxErrors": 3, "txBytes": 200, "txErrors": 4}))
        );
        assert_eq!(interface_summary("    lo: 1 2"), None);
        assert_eq!(interface_summary("Inter-|   Receive"), None);
    }

    #[test]
    fn cpu_rate_from_two_samples() {
        let counts = CpuRates::default();
        let at = |at: i64, cpu| ResourceUsage { at, cpu_nanoseconds: cpu, ..ResourceUsage::default() };
        assert_eq!(counts.cpu_rate("a", &at(1_000_000_000, 5)), 0);
        assert_eq!(counts.cpu_rate("a", &at(3_000_000_000, 1_000_000_005)), 500_000_000);
        // The runtime has no newer sample.
        assert_eq!(counts.cpu_rate("a", &at(3_000_000_000, 1_000_000_005)), 500_000_000);
        // The counter was reset.
        assert_eq!(counts.cpu_rate("a", &at(4_000_000_000, 1)), 0);
    }
}
