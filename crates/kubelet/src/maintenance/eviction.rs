//! Eviction thresholds: detects shortages and selects the pod to evict. Does no I/O except for
//! reading the signals. Upstream: `pkg/kubelet/eviction`.

use std::collections::{BTreeMap, BTreeSet};
use std::os::unix::fs::MetadataExt as _;
use std::path::Path;
use std::sync::Arc;

use jiff::{SignedDuration, Timestamp};
use k8s_openapi::api::core::v1::{Container, Pod};
use reconcile::Object as _;
use schema::quantity::Quantity;

use crate::{Node, cgroups, stats};

/// The default time that a pressure condition outlasts the shortage, so that pods do not come and
/// go.
pub const PRESSURE_TRANSITION_PERIOD: SignedDuration = SignedDuration::from_secs(300);
/// The lowest priority of a critical pod.
const SYSTEM_CRITICAL_PRIORITY: i32 = 2_000_000_000;

/// The value of a threshold: a quantity or a percentage.
#[derive(Clone, Copy, Debug, PartialEq)]
pub enum ThresholdValue {
    Number(u64),
    Percent(u64),
}

impl ThresholdValue {
    /// The value as a number, for this capacity.
    pub fn to_number(self, capacity: u64) -> u64 {
        match self {
            ThresholdValue::Number(number) => number,
            ThresholdValue::Percent(percent) => capacity / 100 * percent,
        }
    }
}

/// The signals that were met before, and the minimum reclaim that ends their shortage.
pub struct ReclaimState<'a> {
    pub met_signals: &'a BTreeSet<&'static str>,
    pub reclaim: &'a EvictionThresholds,
}

impl ReclaimState<'_> {
    fn reclaim_amount(&self, signal: &str, capacity: u64) -> u64 {
        let amount = self.reclaim.clone().threshold_mut(signal).map(|amount| amount.to_number(capacity));
        amount.filter(|_| self.met_signals.contains(signal)).unwrap_or(0)
    }
}

/// An eviction threshold for each signal.
#[derive(Clone, Debug, PartialEq)]
pub struct EvictionThresholds {
    pub memory: ThresholdValue,
    /// For the memory limit of all pods. The larger of this and `memory` applies.
    pub pods_memory: ThresholdValue,
    pub disk: ThresholdValue,
    pub inodes: ThresholdValue,
    pub image_disk: ThresholdValue,
    pub image_inodes: ThresholdValue,
    pub processes: ThresholdValue,
}

impl Default for EvictionThresholds {
    fn default() -> EvictionThresholds {
        EvictionThresholds {
            memory: ThresholdValue::Number(100 << 20),
            disk: ThresholdValue::Percent(10),
            inodes: ThresholdValue::Percent(5),
            image_disk: ThresholdValue::Percent(15),
            image_inodes: ThresholdValue::Percent(5),
            ..EvictionThresholds::NONE
        }
    }
}

impl EvictionThresholds {
    /// No threshold for any signal.
    pub const NONE: EvictionThresholds = {
        let nothing = ThresholdValue::Number(0);
        EvictionThresholds {
            memory: nothing,
            pods_memory: nothing,
            disk: nothing,
            inodes: nothing,
            image_disk: nothing,
            image_inodes: nothing,
            processes: nothing,
        }
    };

    /// The threshold of a signal by upstream's name.
    pub fn threshold_mut(&mut self, signal: &str) -> Option<&mut ThresholdValue> {
        Some(match signal {
            MEMORY => &mut self.memory,
            PODS_MEMORY => &mut self.pods_memory,
            DISK => &mut self.disk,
            INODES => &mut self.inodes,
            IMAGE_DISK => &mut self.image_disk,
            IMAGE_INODES => &mut self.image_inodes,
            PROCESSES => &mut self.processes,
            _ => return None,
        })
    }
}

const MEMORY: &str = "memory.available";
/// The memory that is left below the limit of all pods.
const PODS_MEMORY: &str = "allocatableMemory.available";
const DISK: &str = "nodefs.available";
const INODES: &str = "nodefs.inodesFree";
const IMAGE_DISK: &str = "imagefs.available";
const IMAGE_INODES: &str = "imagefs.inodesFree";
const PROCESSES: &str = "pid.available";
/// The signals that thresholds can be set for.
pub const SIGNALS: [&str; 7] = [MEMORY, PODS_MEMORY, DISK, INODES, IMAGE_DISK, IMAGE_INODES, PROCESSES];
/// Signals that upstream accepts but overrides: containers write to one of the two filesystems
/// above, whose threshold applies.
pub const IGNORED_SIGNALS: [&str; 2] = ["containerfs.available", "containerfs.inodesFree"];

/// Soft eviction: thresholds that must be met for a grace period, and evicted pods have time to
/// terminate.
#[derive(Clone, Debug, PartialEq)]
pub struct SoftEviction {
    pub limits: EvictionThresholds,
    /// The grace period by signal.
    pub grace_by_signal: BTreeMap<String, SignedDuration>,
    /// The maximum termination grace period of an evicted pod, in seconds.
    pub max_pod_grace_seconds: i64,
}

impl Default for SoftEviction {
    fn default() -> SoftEviction {
        SoftEviction {
            limits: EvictionThresholds::NONE,
            grace_by_signal: BTreeMap::new(),
            max_pod_grace_seconds: 0,
        }
    }
}

impl SoftEviction {
    /// The soft thresholds that are met. Only a hard `memory` threshold applies to the memory of
    /// all pods as well.
    pub fn thresholds_met(
        &self,
        signals: &SignalObservations,
        before: &ReclaimState<'_>,
    ) -> Vec<MetThreshold> {
        self.limits.evaluate(signals, before)
    }

    /// The thresholds that are met for longer than their grace period. Updates `since`, the start
    /// of each shortage.
    pub fn thresholds_past_grace_period(
        &self,
        signals: &SignalObservations,
        since: &mut BTreeMap<&'static str, Timestamp>,
        reclaim: &EvictionThresholds,
        now: Timestamp,
    ) -> Vec<MetThreshold> {
        let known = since.keys().copied().collect();
        let mut met = self.thresholds_met(signals, &ReclaimState { met_signals: &known, reclaim });
        since.retain(|signal, _| met.iter().any(|met| met.signal == *signal));
        met.retain(|met| {
            let from = *since.entry(met.signal).or_insert(now);
            let grace_period = self.grace_by_signal.get(met.signal).copied().unwrap_or_default();
            now.duration_since(from) >= grace_period
        });
        met
    }
}

/// The value of a signal.
#[derive(Clone, Copy, Debug, Default, PartialEq)]
pub struct SignalObservation {
    pub available: u64,
    pub capacity: u64,
}

/// The values of all signals.
#[derive(Clone, Debug, Default, PartialEq)]
pub struct SignalObservations {
    pub memory: SignalObservation,
    pub pods_memory: SignalObservation,
    pub disk: SignalObservation,
    pub inodes: SignalObservation,
    pub image_disk: SignalObservation,
    pub image_inodes: SignalObservation,
    pub processes: SignalObservation,
    /// The runtime stores images and writable layers on a filesystem of its own.
    pub has_dedicated_image_fs: bool,
}

/// A threshold that is met.
#[derive(Clone, Debug, PartialEq)]
pub struct MetThreshold {
    /// Upstream's name of the signal.
    pub signal: &'static str,
    pub threshold: u64,
    pub available: u64,
}

impl MetThreshold {
    pub fn resource(&self) -> &'static str {
        match self.signal {
            MEMORY | PODS_MEMORY => "memory",
            DISK | IMAGE_DISK => "ephemeral-storage",
            INODES | IMAGE_INODES => "inodes",
            _ => "pids",
        }
    }

    pub fn is_disk(&self) -> bool {
        matches!(self.signal, DISK | IMAGE_DISK | INODES | IMAGE_INODES)
    }

    /// What uses the filesystem of the signal: images with writable layers, and volumes with logs.
    pub fn usage_sources(&self, has_dedicated_image_fs: bool) -> [bool; 2] {
        let of_images = matches!(self.signal, IMAGE_DISK | IMAGE_INODES);
        [!has_dedicated_image_fs || of_images, !has_dedicated_image_fs || !of_images]
    }
}

impl EvictionThresholds {
    /// The hard thresholds that are met, memory first. The `memory` threshold applies to the memory
    /// of all pods as well.
    pub fn thresholds_met(
        &self,
        signals: &SignalObservations,
        before: &ReclaimState<'_>,
    ) -> Vec<MetThreshold> {
        let capacity = signals.pods_memory.capacity;
        let most = self.memory.to_number(capacity).max(self.pods_memory.to_number(capacity));
        EvictionThresholds { pods_memory: ThresholdValue::Number(most), ..self.clone() }
            .evaluate(signals, before)
    }

    /// The thresholds that are met, each by its own signal.
    fn evaluate(&self, signals: &SignalObservations, before: &ReclaimState<'_>) -> Vec<MetThreshold> {
        let all = [
            (MEMORY, signals.memory, self.memory),
            (PODS_MEMORY, signals.pods_memory, self.pods_memory),
            (DISK, signals.disk, self.disk),
            (IMAGE_DISK, signals.image_disk, self.image_disk),
            (INODES, signals.inodes, self.inodes),
            (IMAGE_INODES, signals.image_inodes, self.image_inodes),
            (PROCESSES, signals.processes, self.processes),
        ];
        // A signal that cannot be read must not cause evictions.
        let known = all.into_iter().filter(|(_, left, _)| left.capacity > 0);
        let met = known.filter_map(|(signal, left, limit)| {
            let (threshold, available) = (limit.to_number(left.capacity), left.available);
            let required = threshold.saturating_add(before.reclaim_amount(signal, left.capacity));
            (available < required).then_some(MetThreshold { signal, threshold, available })
        });
        met.collect()
    }
}

/// When each kind of pressure was last observed.
#[derive(Clone, Debug, Default, PartialEq)]
pub struct LastPressure {
    memory: Option<Timestamp>,
    disk: Option<Timestamp>,
    processes: Option<Timestamp>,
}

impl LastPressure {
    pub fn observe(&mut self, met: &[MetThreshold], now: Timestamp) {
        self.observe_signals(met.iter().map(|met| met.signal), now);
    }

    /// Like `observe`, by signal names.
    pub fn observe_signals<'s>(&mut self, signals: impl Iterator<Item = &'s str>, now: Timestamp) {
        for signal in signals {
            let seen = match signal {
                MEMORY | PODS_MEMORY => &mut self.memory,
                PROCESSES => &mut self.processes,
                _ => &mut self.disk,
            };
            *seen = Some(now);
        }
    }

    /// Whether there is memory, disk and PID pressure, now or within the transition period.
    pub fn is_active(&self, now: Timestamp, transition_period: SignedDuration) -> [bool; 3] {
        [self.memory, self.disk, self.processes]
            .map(|seen| seen.is_some_and(|seen| now.duration_since(seen) < transition_period))
    }
}

impl SignalObservations {
    pub(crate) async fn read(node: &Node) -> SignalObservations {
        let read = |path: &str| std::fs::read_to_string(path).unwrap_or_default();
        let memory = read("/proc/meminfo");
        let memory = SignalObservation {
            available: stats::meminfo(&memory, "MemAvailable"),
            capacity: stats::meminfo(&memory, "MemTotal"),
        };
        let pods = cgroups::usage(&node.settings);
        let pods_memory = pods.memory_limit.map_or(SignalObservation::default(), |capacity| {
            SignalObservation { available: capacity.saturating_sub(pods.working_set), capacity }
        });
        let own = FilesystemStats::for_path(&node.settings.pods);
        let of_images = image_fs_stats(node).await;
        let has_dedicated_image_fs = are_different_devices(own.as_ref(), of_images.as_ref());
        let (own, of_images) = (own.unwrap_or_default(), of_images.unwrap_or_default());
        let most = stats::max_processes().and_then(|most| u64::try_from(most).ok()).unwrap_or(0);
        let load = read("/proc/loadavg");
        let there = load.split(' ').nth(3).and_then(|pair| pair.split('/').nth(1)?.parse::<u64>().ok());
        let processes =
            SignalObservation { available: most.saturating_sub(there.unwrap_or(0)), capacity: most };
        SignalObservations {
            memory,
            pods_memory,
            disk: own.disk,
            inodes: own.inodes,
            image_disk: of_images.disk,
            image_inodes: of_images.inodes,
            processes,
            has_dedicated_image_fs,
        }
    }
}

/// The free space of a filesystem and its device number.
#[derive(Debug, Default, PartialEq)]
pub(crate) struct FilesystemStats {
    pub disk: SignalObservation,
    inodes: SignalObservation,
    device: u64,
}

impl FilesystemStats {
    fn for_path(path: &Path) -> Option<FilesystemStats> {
        let (stat, found) = (rustix::fs::statvfs(path).ok()?, std::fs::metadata(path).ok()?);
        let inodes = SignalObservation { available: stat.f_ffree, capacity: stat.f_files };
        Some(FilesystemStats { disk: block_stats(&stat), inodes, device: found.dev() })
    }
}

/// Whether both filesystems are known and differ. Compares devices, since free space changes
/// between two reads.
fn are_different_devices(one: Option<&FilesystemStats>, other: Option<&FilesystemStats>) -> bool {
    one.zip(other).is_some_and(|(one, other)| one.device != other.device)
}

/// The filesystem of the images.
pub(crate) async fn image_fs_stats(node: &Node) -> Option<FilesystemStats> {
    let usage = node.runtime.image_filesystems().await.ok()?.into_iter().next()?;
    FilesystemStats::for_path(Path::new(&usage.fs_id?.mountpoint))
}

/// Blocks reserved for root count neither as available nor as capacity.
fn block_stats(stat: &rustix::fs::StatVfs) -> SignalObservation {
    let available = stat.f_bavail * stat.f_frsize;
    SignalObservation {
        available,
        capacity: stat.f_blocks.saturating_sub(stat.f_bfree) * stat.f_frsize + available,
    }
}

/// Whether a pod may be evicted: it runs and is not critical.
pub fn can_be_evicted(pod: &Pod) -> bool {
    let phase = pod.status.as_ref().and_then(|status| status.phase.as_deref());
    let critical = priority(pod) >= SYSTEM_CRITICAL_PRIORITY
        || pod.annotation(crate::manifests::MIRROR_ANNOTATION).is_some();
    !pod.is_deleting() && !matches!(phase, Some("Succeeded" | "Failed")) && !critical
}

fn priority(pod: &Pod) -> i32 {
    pod.spec.as_ref().and_then(|spec| spec.priority).unwrap_or(0)
}

/// Selects the pod to evict: those that exceed their requests first, then by priority, then by the
/// excess.
pub fn select_pod(met: &MetThreshold, mut pods: Vec<(Arc<Pod>, u64)>) -> Option<(Arc<Pod>, u64)> {
    pods.sort_by_key(|(pod, usage)| {
        let requested = requests(pod, met.resource());
        (*usage <= requested, priority(pod), std::cmp::Reverse(usage.saturating_sub(requested)), pod.key())
    });
    pods.into_iter().next()
}

fn requests(pod: &Pod, resource: &str) -> u64 {
    let containers = pod.spec.iter().flat_map(|spec| &spec.containers);
    containers.map(|container| request(container, resource)).sum()
}

fn request(container: &Container, resource: &str) -> u64 {
    let requests = container.resources.as_ref().and_then(|resources| resources.requests.as_ref());
    requests.and_then(|requests| bytes(&requests.get(resource)?.0)).unwrap_or(0)
}

fn bytes(text: &str) -> Option<u64> {
    u64::try_from(Quantity::parse(text).ok()?.value()).ok()
}

/// The eviction message, as upstream has it.
pub fn eviction_message(met: &MetThreshold, pod: &Pod, usage: u64) -> String {
    let MetThreshold { threshold, available, .. } = met;
    let resource = met.resource();
    let mut text = format!("The node was low on resource: {resource}. ");
    text += &format!(
        "Threshold quantity: {}, available: {}. ",
        format_bytes(*threshold),
        format_bytes(*available)
    );
    let containers = pod.spec.as_ref().map(|spec| spec.containers.as_slice()).unwrap_or_default();
    if let [only] = containers {
        let requested = request(only, resource);
        if usage > requested {
            let (used, requested) =
                (format_bytes(usage), if requested == 0 { "0".to_owned() } else { format_bytes(requested) });
            text += &format!(
                "Container {} was using {used}, request is {requested}, has larger consumption of {resource}. ",
                only.name
            );
        }
    }
    text
}

/// Formats bytes as a quantity.
fn format_bytes(bytes: u64) -> String {
    match bytes {
        0 => "0".to_owned(),
        _ if bytes.is_multiple_of(1 << 30) => format!("{}Gi", bytes >> 30),
        _ if bytes.is_multiple_of(1 << 20) => format!("{}Mi", bytes >> 20),
        _ if bytes.is_multiple_of(1 << 10) => format!("{}Ki", bytes >> 10),
        _ => bytes.to_string(),
    }
}

/// Whether the pod has local storage limits that the eviction manager enforces.
pub fn has_disk_limits(pod: &Pod) -> bool {
    let Some(spec) = &pod.spec else { return false };
    let volumes = spec.volumes.iter().flatten();
    let sized =
        volumes.filter_map(|volume| volume.empty_dir.as_ref()).any(|empty| empty.size_limit.is_some());
    sized || spec.containers.iter().any(|container| disk_limit(container).is_some())
}

fn disk_limit(container: &Container) -> Option<(u64, String)> {
    let limit = container.resources.as_ref()?.limits.as_ref()?.get("ephemeral-storage")?;
    Some((bytes(&limit.0)?, limit.0.clone()))
}

/// Why a pod exceeds its local storage limits. `None` if it does not.
pub fn limit_exceeded_message(
    pod: &Pod,
    container: &dyn Fn(&str) -> u64,
    volume: &dyn Fn(&str) -> u64,
) -> Option<String> {
    let spec = pod.spec.as_ref()?;
    let empty_dirs = || {
        spec.volumes.iter().flatten().filter_map(|volume| {
            let empty = volume.empty_dir.as_ref()?;
            empty.medium.as_deref().unwrap_or_default().is_empty().then_some((volume, empty))
        })
    };
    for (found, empty) in empty_dirs() {
        if let Some(limit) = &empty.size_limit
            && bytes(&limit.0).is_some_and(|limit| limit > 0 && volume(&found.name) > limit)
        {
            return Some(format!(
                "Usage of EmptyDir volume {:?} exceeds the limit {:?}. ",
                found.name, limit.0
            ));
        }
    }
    let limits: Vec<_> = spec.containers.iter().map(disk_limit).collect();
    if limits.iter().all(Option::is_some) && !limits.is_empty() {
        let most: u64 = limits.iter().flatten().map(|(limit, _)| limit).sum();
        let all = spec.containers.iter().map(|one| container(&one.name)).sum::<u64>()
            + empty_dirs().map(|(found, _)| volume(&found.name)).sum::<u64>();
        if all > most {
            let text = "Pod ephemeral local storage usage exceeds the total limit of containers";
            return Some(format!("{text} {}. ", format_bytes(most)));
        }
    }
    let over = spec
        .containers
        .iter()
        .zip(&limits)
        .find(|(one, limit)| limit.as_ref().is_some_and(|(limit, _)| container(&one.name) > *limit));
    let (one, limit) = over?;
    let (_, text) = limit.as_ref()?;
    Some(format!("Container {} exceeded its local ephemeral storage limit {text:?}. ", one.name))
}

#[cfg(test)]
mod tests;
