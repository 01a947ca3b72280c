//! Stats of pods and containers, computed on request.

use std::path::Path;
use std::sync::Arc;

use super::pods::{Container as Known, Pod};
use super::{Embedded, now, translate, view};
use crate::cri::*;

impl Embedded {
    /// The stats of the running containers of these pods.
    pub(super) async fn usage_of(&self, pods: Vec<Arc<Pod>>) -> Vec<(Arc<Pod>, Vec<ContainerStats>)> {
        let inner = self.inner.clone();
        // Counting files may take a while.
        let counted = tokio::task::spawn_blocking(move || {
            let of_pod = |pod: Arc<Pod>| {
                let config = pod.record.lock().config.clone().unwrap_or_default();
                let containers: Vec<Arc<Known>> = pod.containers.lock().values().cloned().collect();
                let running = containers.iter().filter(|known| known.is_running());
                let stats = running.map(|known| {
                    let usage = inner.cgroups.usage(&translate::cgroup(&config, &known.id));
                    // Volumes declared by the image count as part of the writable layer.
                    let [upper, volumes] =
                        ["upper", "volumes"].map(|part| pod.directory.join(&known.id).join(part));
                    let mut stats = view::stats(&pod, known, &usage, now());
                    stats.writable_layer = Some(filesystem_usage(&upper, &[&volumes]));
                    stats
                });
                let stats = stats.collect();
                (pod, stats)
            };
            pods.into_iter().map(of_pod).collect()
        });
        counted.await.unwrap_or_default()
    }

    /// The stats of whole pods.
    pub(super) async fn usage_of_pods(&self, pods: Vec<Arc<Pod>>) -> Vec<PodSandboxStats> {
        let counted = self.usage_of(pods).await;
        counted.into_iter().map(|(pod, containers)| self.pod_stats(&pod, containers)).collect()
    }

    fn pod_stats(&self, pod: &Pod, containers: Vec<ContainerStats>) -> PodSandboxStats {
        let summary = view::sandbox(pod);
        let config = pod.record.lock().config.clone().unwrap_or_default();
        let group = config.linux.as_ref().map_or("", |linux| linux.cgroup_parent.as_str());
        let usage = self.inner.cgroups.usage(group);
        let timestamp = now();
        let (cpu, memory) = view::cgroup_usage(&usage, timestamp);
        let running = pod.containers.lock().values().find_map(|known| {
            known.is_running().then(|| known.status().map_or(0, |status| status.pid)).filter(|pid| *pid > 0)
        });
        let network = running.and_then(|pid| {
            let text = std::fs::read_to_string(format!("/proc/{pid}/net/dev")).ok()?;
            let interfaces = interfaces(&text);
            let default_interface = interfaces.iter().find(|one| one.name == podnet::POD_INTERFACE).cloned();
            Some(NetworkUsage { timestamp, default_interface, interfaces })
        });
        let process_count = Some(Uint64Value { value: usage.pids });
        PodSandboxStats {
            attributes: Some(PodSandboxAttributes {
                id: summary.id,
                metadata: summary.metadata,
                labels: summary.labels,
                annotations: summary.annotations,
            }),
            linux: Some(LinuxPodSandboxStats {
                cpu: Some(cpu),
                memory: Some(memory),
                network,
                process: Some(ProcessUsage { timestamp, process_count }),
                containers,
            }),
        }
    }
}

/// The disk usage of a directory and of others with it.
pub fn filesystem_usage(directory: &Path, others: &[&Path]) -> FilesystemUsage {
    let each = others.iter().copied().chain([directory]).map(sys::trees::usage);
    let (bytes, inodes) = each.fold((0, 0), |all, one| (all.0 + one.0, all.1 + one.1));
    FilesystemUsage {
        timestamp: now(),
        fs_id: Some(FilesystemIdentifier { mountpoint: directory.display().to_string() }),
        used_bytes: Some(Uint64Value { value: bytes }),
        inodes_used: Some(Uint64Value { value: inodes }),
    }
}

/// Parses `/proc/net/dev`, without its header and the loopback.
fn interfaces(text: &str) -> Vec<NetworkInterfaceUsage> {
    let one = |line: &str| {
        let (name, numbers) = line.split_once(':')?;
        let numbers: Vec<u64> = numbers.split_whitespace().filter_map(|word| word.parse().ok()).collect();
        let at = |index: usize| numbers.get(index).map(|value| Uint64Value { value: *value });
        Some(NetworkInterfaceUsage {
            name: name.trim().to_owned(),
            rx_bytes: at(0),
            rx_errors: at(2),
            tx_bytes: at(8),
            tx_errors: at(10),
        })
    };
    text.lines().filter_map(one).filter(|one| one.name != "lo").collect()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn reads_proc_net_dev() {
        let text = "Inter-|   Receive                                                |  Transmit\n \
            face |bytes    packets errs drop fifo frame compressed multicast|bytes    packets errs drop fifo colls carrier compressed\n    \
            lo:     100       1    0    0    0     0          0         0      100       1    0    0    0     0       0          0\n  \
            eth0: 1296 16 2 0 0 0 0 0 776 10 3 0 0 0 0 0\n";
        let found = interfaces(text);
        let [one] = &found[..] else { panic!("{found:?}") };
        let numbers = [&one.rx_bytes, &one.rx_errors, &one.tx_bytes, &one.tx_errors];
        assert_eq!(one.name, "eth0");
        assert_eq!(numbers.map(|number| number.as_ref().unwrap().value), [1296, 2, 776, 3]);
    }
}
