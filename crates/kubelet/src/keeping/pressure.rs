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
pub const LASTS: SignedDuration = SignedDuration::from_secs(300);
/// Whoever has this priority is needed by the node itself.
const CRITICAL: i32 = 2_000_000_000;

/// So much of something.
#[derive(Clone, Copy, Debug, PartialEq)]
pub enum Amount {
    Number(u64),
    Percent(u64),
}

impl Amount {
    /// As a number, of what there is in all.
    pub fn of(self, capacity: u64) -> u64 {
        match self {
            Amount::Number(number) => number,
            Amount::Percent(percent) => capacity / 100 * percent,
        }
    }
}

/// What there was too little of, and how much more than its limit there must be until that is over.
pub struct Before<'a> {
    pub short: &'a BTreeSet<&'static str>,
    pub reclaim: &'a Limits,
}

impl Before<'_> {
    fn more(&self, signal: &str, capacity: u64) -> u64 {
        let amount = self.reclaim.clone().of_signal(signal).map(|amount| amount.of(capacity));
        amount.filter(|_| self.short.contains(signal)).unwrap_or(0)
    }
}

/// How much must be left.
#[derive(Clone, Debug, PartialEq)]
pub struct Limits {
    pub memory: Amount,
    /// Of what there is for pods, besides `memory`, which must be left of that too.
    pub pods_memory: Amount,
    pub disk: Amount,
    pub inodes: Amount,
    pub image_disk: Amount,
    pub image_inodes: Amount,
    pub processes: Amount,
}

impl Default for Limits {
    fn default() -> Limits {
        Limits {
            memory: Amount::Number(100 << 20),
            disk: Amount::Percent(10),
            inodes: Amount::Percent(5),
            image_disk: Amount::Percent(15),
            image_inodes: Amount::Percent(5),
            ..Limits::NONE
        }
    }
}

impl Limits {
    /// Nothing has to be left of anything.
    pub const NONE: Limits = {
        let nothing = Amount::Number(0);
        Limits {
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
    pub fn of_signal(&mut self, signal: &str) -> Option<&mut Amount> {
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
pub const OVERRIDDEN: [&str; 2] = ["containerfs.available", "containerfs.inodesFree"];

/// How much should be left: with less, pods are asked to go after a while, and have time for it.
#[derive(Clone, Debug, PartialEq)]
pub struct Soft {
    pub limits: Limits,
    /// How long there may be less, by what is looked at.
    pub patience: BTreeMap<String, SignedDuration>,
    /// How many seconds a pod has at most.
    pub grace: i64,
}

impl Default for Soft {
    fn default() -> Soft {
        Soft { limits: Limits::NONE, patience: BTreeMap::new(), grace: 0 }
    }
}

impl Soft {
    /// What there is less of than there should be. What must be left of the node's memory must be left of the pods' only
    /// where that is a hard limit.
    pub fn reached(&self, signals: &Signals, before: &Before<'_>) -> Vec<Short> {
        self.limits.named(signals, before)
    }

    /// What there has been too little of for too long. `since` says from when on, and is kept true.
    pub fn due(
        &self,
        signals: &Signals,
        since: &mut BTreeMap<&'static str, Timestamp>,
        reclaim: &Limits,
        now: Timestamp,
    ) -> Vec<Short> {
        let known = since.keys().copied().collect();
        let mut short = self.reached(signals, &Before { short: &known, reclaim });
        since.retain(|signal, _| short.iter().any(|short| short.signal == *signal));
        short.retain(|short| {
            let from = *since.entry(short.signal).or_insert(now);
            let patience = self.patience.get(short.signal).copied().unwrap_or_default();
            now.duration_since(from) >= patience
        });
        short
    }
}

/// What is left of what there is.
#[derive(Clone, Copy, Debug, Default, PartialEq)]
pub struct Left {
    pub available: u64,
    pub capacity: u64,
}

/// How much is left of everything.
#[derive(Clone, Debug, Default, PartialEq)]
pub struct Signals {
    pub memory: Left,
    pub pods_memory: Left,
    pub disk: Left,
    pub inodes: Left,
    pub image_disk: Left,
    pub image_inodes: Left,
    pub processes: Left,
    /// Images, and what containers write, are on a disk of their own.
    pub images_apart: bool,
}

/// What there is too little of.
#[derive(Clone, Debug, PartialEq)]
pub struct Short {
    /// In upstream's words.
    pub signal: &'static str,
    pub threshold: u64,
    pub available: u64,
}

impl Short {
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
    pub fn takes_room(&self, images_apart: bool) -> [bool; 2] {
        let of_images = matches!(self.signal, IMAGE_DISK | IMAGE_INODES);
        [!images_apart || of_images, !images_apart || !of_images]
    }
}

impl Limits {
    /// What there is too little of, memory first. What must be left of the node's must be left of the pods' too.
    pub fn reached(&self, signals: &Signals, before: &Before<'_>) -> Vec<Short> {
        let capacity = signals.pods_memory.capacity;
        let most = self.memory.of(capacity).max(self.pods_memory.of(capacity));
        Limits { pods_memory: Amount::Number(most), ..self.clone() }.named(signals, before)
    }

    /// What there is too little of by what is said of each.
    fn named(&self, signals: &Signals, before: &Before<'_>) -> Vec<Short> {
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
        let short = known.filter_map(|(signal, left, limit)| {
            let (threshold, available) = (limit.of(left.capacity), left.available);
            let wanted = threshold.saturating_add(before.more(signal, left.capacity));
            (available < wanted).then_some(Short { signal, threshold, available })
        });
        short.collect()
    }
}

/// Since when each shortage was last seen.
#[derive(Clone, Debug, Default, PartialEq)]
pub struct Pressures {
    memory: Option<Timestamp>,
    disk: Option<Timestamp>,
    processes: Option<Timestamp>,
}

impl Pressures {
    pub fn note(&mut self, short: &[Short], now: Timestamp) {
        self.note_all(short.iter().map(|short| short.signal), now);
    }

    /// The same by what is looked at.
    pub fn note_all<'s>(&mut self, signals: impl Iterator<Item = &'s str>, now: Timestamp) {
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
    pub fn lasting(&self, now: Timestamp, lasts: SignedDuration) -> [bool; 3] {
        [self.memory, self.disk, self.processes]
            .map(|seen| seen.is_some_and(|seen| now.duration_since(seen) < lasts))
    }
}

impl Signals {
    pub(crate) async fn read(node: &Node) -> Signals {
        let read = |path: &str| std::fs::read_to_string(path).unwrap_or_default();
        let memory = read("/proc/meminfo");
        let memory = Left {
            available: stats::meminfo(&memory, "MemAvailable"),
            capacity: stats::meminfo(&memory, "MemTotal"),
        };
        let pods = cgroups::usage(&node.settings);
        let pods_memory = pods.memory_limit.map_or(Left::default(), |capacity| Left {
            available: capacity.saturating_sub(pods.working_set),
            capacity,
        });
        let own = Room::of(&node.settings.pods);
        let of_images = image_room(node).await;
        let images_apart = apart(own.as_ref(), of_images.as_ref());
        let (own, of_images) = (own.unwrap_or_default(), of_images.unwrap_or_default());
        let most = stats::most_processes().and_then(|most| u64::try_from(most).ok()).unwrap_or(0);
        let load = read("/proc/loadavg");
        let there = load.split(' ').nth(3).and_then(|pair| pair.split('/').nth(1)?.parse::<u64>().ok());
        let processes = Left { available: most.saturating_sub(there.unwrap_or(0)), capacity: most };
        Signals {
            memory,
            pods_memory,
            disk: own.disk,
            inodes: own.inodes,
            image_disk: of_images.disk,
            image_inodes: of_images.inodes,
            processes,
            images_apart,
        }
    }
}

/// What is left of a disk, and which one it is.
#[derive(Debug, Default, PartialEq)]
pub(crate) struct Room {
    pub disk: Left,
    inodes: Left,
    device: u64,
}

impl Room {
    fn of(path: &Path) -> Option<Room> {
        let (stat, found) = (rustix::fs::statvfs(path).ok()?, std::fs::metadata(path).ok()?);
        let inodes = Left { available: stat.f_ffree, capacity: stat.f_files };
        Some(Room { disk: blocks(&stat), inodes, device: found.dev() })
    }
}

/// Two that are known to be different disks. How much is left of them tells nothing: it changes between two looks.
fn apart(one: Option<&Room>, other: Option<&Room>) -> bool {
    one.zip(other).is_some_and(|(one, other)| one.device != other.device)
}

/// What is left of the disk images are on.
pub(crate) async fn image_room(node: &Node) -> Option<Room> {
    let usage = node.runtime.image_filesystems().await.ok()?.into_iter().next()?;
    Room::of(Path::new(&usage.fs_id?.mountpoint))
}

/// What is reserved for others is neither left nor ours to fill.
fn blocks(stat: &rustix::fs::StatVfs) -> Left {
    let available = stat.f_bavail * stat.f_frsize;
    Left { available, capacity: stat.f_blocks.saturating_sub(stat.f_bfree) * stat.f_frsize + available }
}

/// Whether a pod may be put out: it has not ended, and the node can do without it.
pub fn may_be_evicted(pod: &Pod) -> bool {
    let phase = pod.status.as_ref().and_then(|status| status.phase.as_deref());
    let critical = priority(pod) >= CRITICAL || pod.annotation(crate::manifests::MIRROR).is_some();
    !pod.is_deleting() && !matches!(phase, Some("Succeeded" | "Failed")) && !critical
}

fn priority(pod: &Pod) -> i32 {
    pod.spec.as_ref().and_then(|spec| spec.priority).unwrap_or(0)
}

/// The first to go: those above what they asked for, the less important, those furthest above it.
pub fn choose(short: &Short, mut pods: Vec<(Arc<Pod>, u64)>) -> Option<(Arc<Pod>, u64)> {
    pods.sort_by_key(|(pod, usage)| {
        let asked = requests(pod, short.resource());
        (*usage <= asked, priority(pod), std::cmp::Reverse(usage.saturating_sub(asked)), pod.key())
    });
    pods.into_iter().next()
}

fn requests(pod: &Pod, resource: &str) -> u64 {
    let containers = pod.spec.iter().flat_map(|spec| &spec.containers);
    containers.map(|container| request(container, resource)).sum()
}

fn request(container: &Container, resource: &str) -> u64 {
    let amounts = container.resources.as_ref().and_then(|resources| resources.requests.as_ref());
    amounts.and_then(|amounts| bytes(&amounts.get(resource)?.0)).unwrap_or(0)
}

fn bytes(text: &str) -> Option<u64> {
    u64::try_from(Quantity::parse(text).ok()?.value()).ok()
}

/// Why this pod, in upstream's words.
pub fn message(short: &Short, pod: &Pod, usage: u64) -> String {
    let Short { threshold, available, .. } = short;
    let resource = short.resource();
    let mut text = format!("The node was low on resource: {resource}. ");
    text += &format!("Threshold quantity: {}, available: {}. ", shown(*threshold), shown(*available));
    let containers = pod.spec.as_ref().map(|spec| spec.containers.as_slice()).unwrap_or_default();
    if let [only] = containers {
        let asked = request(only, resource);
        if usage > asked {
            let (used, asked) = (shown(usage), if asked == 0 { "0".to_owned() } else { shown(asked) });
            text += &format!(
                "Container {} was using {used}, request is {asked}, has larger consumption of {resource}. ",
                only.name
            );
        }
    }
    text
}

/// As quantities of bytes are written.
fn shown(bytes: u64) -> String {
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
pub fn over_limits(
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
            return Some(format!("{text} {}. ", shown(most)));
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
