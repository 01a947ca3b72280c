//! When a node is short of something, and which pod has to go. Pure but for [`Signals::read`].

use std::collections::{BTreeMap, BTreeSet};
use std::os::unix::fs::MetadataExt as _;
use std::path::Path;
use std::sync::Arc;

use jiff::{SignedDuration, Timestamp};
use k8s_openapi::api::core::v1::{Container, Pod};
use reconcile::Object as _;
use schema::quantity::Quantity;

use crate::{Node, cgroups, stats};

/// A shortage is said to last this long after it was last seen, so that pods do not come and go.
pub const PRESSURE_TRANSITION_PERIOD: SignedDuration = SignedDuration::from_secs(300);
/// Whoever has this priority is needed by the node itself.
const SYSTEM_CRITICAL_PRIORITY: i32 = 2_000_000_000;

/// So much of something.
#[derive(Clone, Copy, Debug, PartialEq)]
pub enum ThresholdValue {
    Number(u64),
    Percent(u64),
}

impl ThresholdValue {
    /// As a number, of what there is in all.
    pub fn to_number(self, capacity: u64) -> u64 {
        match self {
            ThresholdValue::Number(number) => number,
            ThresholdValue::Percent(percent) => capacity / 100 * percent,
        }
    }
}

/// What there was too little of, and how much more than its limit there must be until that is over.
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

/// How much must be left.
#[derive(Clone, Debug, PartialEq)]
pub struct EvictionThresholds {
    pub memory: ThresholdValue,
    /// Of what there is for pods, besides `memory`, which must be left of that too.
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
    /// Nothing has to be left of anything.
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

    /// By the name that upstream has for what is looked at.
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
/// What pods have left of what there is for them.
const PODS_MEMORY: &str = "allocatableMemory.available";
const DISK: &str = "nodefs.available";
const INODES: &str = "nodefs.inodesFree";
const IMAGE_DISK: &str = "imagefs.available";
const IMAGE_INODES: &str = "imagefs.inodesFree";
const PROCESSES: &str = "pid.available";
/// What thresholds can be named for,
pub const SIGNALS: [&str; 7] = [MEMORY, PODS_MEMORY, DISK, INODES, IMAGE_DISK, IMAGE_INODES, PROCESSES];
/// and for what upstream takes them without heeding them: what containers write is on one of the two disks above, and has
/// its threshold.
pub const IGNORED_SIGNALS: [&str; 2] = ["containerfs.available", "containerfs.inodesFree"];

/// How much should be left: with less, pods are asked to go after a while, and have time for it.
#[derive(Clone, Debug, PartialEq)]
pub struct SoftEviction {
    pub limits: EvictionThresholds,
    /// How long there may be less, by what is looked at.
    pub grace_by_signal: BTreeMap<String, SignedDuration>,
    /// How many seconds a pod has at most.
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
    /// What there is less of than there should be. What must be left of the node's memory must be left of the pods' only
    /// where that is a hard limit.
    pub fn thresholds_met(
        &self,
        signals: &SignalObservations,
        before: &ReclaimState<'_>,
    ) -> Vec<MetThreshold> {
        self.limits.evaluate(signals, before)
    }

    /// What there has been too little of for too long. `since` says from when on, and is kept true.
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

/// What is left of what there is.
#[derive(Clone, Copy, Debug, Default, PartialEq)]
pub struct SignalObservation {
    pub available: u64,
    pub capacity: u64,
}

/// How much is left of everything.
#[derive(Clone, Debug, Default, PartialEq)]
pub struct SignalObservations {
    pub memory: SignalObservation,
    pub pods_memory: SignalObservation,
    pub disk: SignalObservation,
    pub inodes: SignalObservation,
    pub image_disk: SignalObservation,
    pub image_inodes: SignalObservation,
    pub processes: SignalObservation,
    /// Images, and what containers write, are on a disk of their own.
    pub has_dedicated_image_fs: bool,
}

/// What there is too little of.
#[derive(Clone, Debug, PartialEq)]
pub struct MetThreshold {
    /// In upstream's words.
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

    /// What takes room on the disk that is short: images with what containers write, and pods' volumes with their logs.
    pub fn usage_sources(&self, has_dedicated_image_fs: bool) -> [bool; 2] {
        let of_images = matches!(self.signal, IMAGE_DISK | IMAGE_INODES);
        [!has_dedicated_image_fs || of_images, !has_dedicated_image_fs || !of_images]
    }
}

impl EvictionThresholds {
    /// What there is too little of, memory first. What must be left of the node's must be left of the pods' too.
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

    /// What there is too little of by what is said of each.
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
        // What cannot be read is no reason to put anybody out.
        let known = all.into_iter().filter(|(_, left, _)| left.capacity > 0);
        let met = known.filter_map(|(signal, left, limit)| {
            let (threshold, available) = (limit.to_number(left.capacity), left.available);
            let required = threshold.saturating_add(before.reclaim_amount(signal, left.capacity));
            (available < required).then_some(MetThreshold { signal, threshold, available })
        });
        met.collect()
    }
}

/// Since when each shortage was last seen.
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

    /// The same by what is looked at.
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

    /// Whether there is, or was lately, too little memory, disk, processes.
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

/// What is left of a disk, and which one it is.
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

/// Two that are known to be different disks. How much is left of them tells nothing: it changes between two looks.
fn are_different_devices(one: Option<&FilesystemStats>, other: Option<&FilesystemStats>) -> bool {
    one.zip(other).is_some_and(|(one, other)| one.device != other.device)
}

/// What is left of the disk images are on.
pub(crate) async fn image_fs_stats(node: &Node) -> Option<FilesystemStats> {
    let usage = node.runtime.image_filesystems().await.ok()?.into_iter().next()?;
    FilesystemStats::for_path(Path::new(&usage.fs_id?.mountpoint))
}

/// What is reserved for others is neither left nor ours to fill.
fn block_stats(stat: &rustix::fs::StatVfs) -> SignalObservation {
    let available = stat.f_bavail * stat.f_frsize;
    SignalObservation {
        available,
        capacity: stat.f_blocks.saturating_sub(stat.f_bfree) * stat.f_frsize + available,
    }
}

/// Whether a pod may be put out: it has not ended, and the node can do without it.
pub fn can_be_evicted(pod: &Pod) -> bool {
    let phase = pod.status.as_ref().and_then(|status| status.phase.as_deref());
    let critical = priority(pod) >= SYSTEM_CRITICAL_PRIORITY
        || pod.annotation(crate::manifests::MIRROR_ANNOTATION).is_some();
    !pod.is_deleting() && !matches!(phase, Some("Succeeded" | "Failed")) && !critical
}

fn priority(pod: &Pod) -> i32 {
    pod.spec.as_ref().and_then(|spec| spec.priority).unwrap_or(0)
}

/// The first to go: those above what they asked for, the less important, those furthest above it.
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

/// Why this pod, in upstream's words.
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

/// As quantities of bytes are written.
fn format_bytes(bytes: u64) -> String {
    match bytes {
        0 => "0".to_owned(),
        _ if bytes.is_multiple_of(1 << 30) => format!("{}Gi", bytes >> 30),
        _ if bytes.is_multiple_of(1 << 20) => format!("{}Mi", bytes >> 20),
        _ if bytes.is_multiple_of(1 << 10) => format!("{}Ki", bytes >> 10),
        _ => bytes.to_string(),
    }
}

/// Whether anything limits the disk this pod may use.
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

/// What is wrong with a pod that uses more disk than it may; `None` for one that does not.
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
