//! Capacity and usage of volumes. CSI drivers report their own. For other volumes, the kubelet
//! measures the directory if the volume lives as long as its pod, and the filesystem if it is
//! persistent. As upstream, there are no stats of hostPath volumes.

use std::collections::{BTreeMap, HashMap, HashSet};
use std::io::Seek as _;
use std::path::{Path, PathBuf};
use std::sync::Arc;
use std::time::Duration;

use jiff::Timestamp;
use k8s_openapi::api::core::v1::{PersistentVolume, PersistentVolumeClaim, Pod, Volume};
use parking_lot::Mutex;
use reconcile::{Key, Object as _};
use serde_json::{Value, json};
use tokio::time::Instant;

use super::format_time;
use crate::csi::{self, VolumeUsage};
use crate::{Node, volumes};

/// A network filesystem may never respond.
const STAT_TIMEOUT: Duration = Duration::from_secs(5);
/// The maximum number of concurrent measurements of the same path.
const MAX_WAITERS_PER_PATH: usize = 4;

/// The field names for [`csi::BYTES`] and [`csi::INODES`].
const SUMMARY_FIELDS: [(i32, [&str; 3]); 2] = [
    (csi::BYTES, ["availableBytes", "capacityBytes", "usedBytes"]),
    (csi::INODES, ["inodesFree", "inodes", "inodesUsed"]),
];

/// How long the stats of a pod's claims are cached; upstream's value.
const STATS_CACHE_TTL: Duration = Duration::from_secs(60);

/// Measurements in progress. A measurement that hangs cannot be canceled, only the wait for it
/// ends.
#[derive(Clone, Default)]
pub struct VolumeStatsCollector {
    waiting: Arc<Mutex<HashMap<PathBuf, usize>>>,
    cache: Arc<Mutex<VolumeStatsCache>>,
}

/// The last stats of each pod's claims, and their time, by pod UID.
#[derive(Default)]
struct VolumeStatsCache(HashMap<String, (Instant, Vec<Value>)>);

impl VolumeStatsCache {
    /// The stats of a pod, unless they have expired.
    fn get(&self, uid: &str) -> Option<Vec<Value>> {
        self.0
            .get(uid)
            .filter(|(at, _)| at.elapsed() < STATS_CACHE_TTL)
            .map(|(_, volume_stats)| volume_stats.clone())
    }
}

/// How a volume is measured.
#[derive(Clone, Debug, PartialEq)]
enum StatTarget {
    /// The files in this directory.
    Directory(PathBuf),
    /// The whole filesystem.
    FileSystem(PathBuf),
    /// A block device without a filesystem.
    Device(PathBuf),
}

/// The stats of a pod's volumes, or only of those with claims.
pub async fn pod_volume_stats(node: &Node, pod: &Pod, only_claims: bool, now: Timestamp) -> Vec<Value> {
    let mut by_drivers = csi::volume::stats(&node.csi, &node.settings, pod.uid()).await;
    let dir = node.settings.pod_dir(pod).join("volumes");
    let mut all: Vec<(bool, Value)> = Vec::new();
    for volume in pod.spec.iter().flat_map(|spec| spec.volumes.iter().flatten()) {
        let claim = volumes::claims::claim_name(pod, volume);
        if only_claims && claim.is_none() {
            continue;
        }
        let usage = match (by_drivers.remove(&volume.name), &claim) {
            (Some(reported), _) => Some(reported),
            (None, Some(claim)) => match claim_target(node, pod, claim, &dir).await {
                Some(target) => node.volume_stats.collect(target).await,
                None => None,
            },
            (None, None) => match inline_target(volume, &dir) {
                Some(target) => node.volume_stats.collect(target).await,
                None => None,
            },
        };
        let Some(usage) = usage else { continue };
        let mut one = usage_fields(&usage);
        one["name"] = json!(volume.name);
        one["time"] = json!(format_time(now));
        if let Some(claim) = claim {
            one["pvcRef"] = json!({"name": claim, "namespace": pod.namespace()});
        }
        all.push((is_local_and_ephemeral(volume), one));
    }
    // Upstream reports local ephemeral volumes first.
    all.sort_by_key(|(is_first, _)| !is_first);
    all.into_iter().map(|(_, one)| one).collect()
}

/// The stats of all claims of this node's pods by namespace and name. They are requested often, and
/// collecting them needs requests to the API server and to CSI drivers, so they are cached for a
/// while.
pub async fn claim_volume_stats(node: &Node) -> BTreeMap<(String, String), Value> {
    let now = node.ctx.clock.now();
    let pods = node.pods();
    let uids: HashSet<&str> = pods.iter().map(|pod| pod.uid()).collect();
    node.volume_stats.cache.lock().0.retain(|uid, _| uids.contains(uid.as_str()));
    let mut all = BTreeMap::new();
    for pod in &pods {
        let phase = pod.status.as_ref().and_then(|status| status.phase.as_deref());
        let volumes = || pod.spec.iter().flat_map(|spec| spec.volumes.iter().flatten());
        let is_over = matches!(phase, Some("Succeeded" | "Failed"));
        if is_over || !volumes().any(|volume| volumes::claims::claim_name(pod, volume).is_some()) {
            continue;
        }
        let known = node.volume_stats.cache.lock().get(pod.uid());
        let volume_stats = match known {
            Some(volume_stats) => volume_stats,
            None => {
                let volume_stats = pod_volume_stats(node, pod, true, now).await;
                // Before that, volumes may be missing.
                if phase == Some("Running") {
                    node.volume_stats
                        .cache
                        .lock()
                        .0
                        .insert(pod.uid().to_owned(), (Instant::now(), volume_stats.clone()));
                }
                volume_stats
            }
        };
        for one in volume_stats {
            let name = one["pvcRef"]["name"].as_str().unwrap_or_default().to_owned();
            all.entry((pod.namespace().to_owned(), name)).or_insert(one);
        }
    }
    all
}

fn usage_fields(usage: &[VolumeUsage]) -> Value {
    let mut all = json!({});
    for (unit, names) in SUMMARY_FIELDS {
        let entry = usage.iter().find(|entry| entry.unit == unit);
        let values = entry.map_or([0; 3], |values| [values.available, values.total, values.used]);
        for (name, amount) in names.into_iter().zip(values) {
            all[name] = json!(amount);
        }
    }
    all
}

/// How to measure a volume that is defined in the pod's spec.
fn inline_target(volume: &Volume, dir: &Path) -> Option<StatTarget> {
    let is = |has: bool, kind: &str| has.then(|| dir.join(kind).join(&volume.name));
    let files = is(volume.empty_dir.is_some(), "kubernetes.io~empty-dir")
        .or_else(|| is(volume.config_map.is_some(), "kubernetes.io~configmap"))
        .or_else(|| is(volume.secret.is_some(), "kubernetes.io~secret"))
        .or_else(|| is(volume.downward_api.is_some(), "kubernetes.io~downward-api"))
        .or_else(|| is(volume.projected.is_some(), "kubernetes.io~projected"));
    let mounted = is(volume.nfs.is_some(), "kubernetes.io~nfs")
        .or_else(|| is(volume.iscsi.is_some(), "kubernetes.io~iscsi"));
    files.map(StatTarget::Directory).or(mounted.map(StatTarget::FileSystem))
}

/// How to measure the volume of a claim. Both objects are fetched by name, because a node may not
/// read others.
async fn claim_target(node: &Node, pod: &Pod, claim: &str, dir: &Path) -> Option<StatTarget> {
    let claim = node.ctx.client.get::<PersistentVolumeClaim>(&Key::new(pod.namespace(), claim)).await.ok()?;
    let name = claim.spec?.volume_name?;
    let volume = node.ctx.client.get::<PersistentVolume>(&Key::new("", &name)).await.ok()?;
    persistent_target(&volume, dir)
}

fn persistent_target(volume: &PersistentVolume, dir: &Path) -> Option<StatTarget> {
    let spec = volume.spec.as_ref()?;
    let is_block = spec.volume_mode.as_deref() == Some("Block");
    match (&spec.local, &spec.nfs, &spec.iscsi) {
        (Some(local), ..) if is_block => Some(StatTarget::Device(local.path.clone().into())),
        (Some(local), ..) => Some(StatTarget::FileSystem(local.path.clone().into())),
        (_, Some(_), _) => Some(StatTarget::FileSystem(dir.join("kubernetes.io~nfs").join(volume.name()))),
        (.., Some(_)) if !is_block => {
            Some(StatTarget::FileSystem(dir.join("kubernetes.io~iscsi").join(volume.name())))
        }
        _ => None,
    }
}

fn is_local_and_ephemeral(volume: &Volume) -> bool {
    let on_disk = |medium: Option<&str>| medium.unwrap_or_default().is_empty();
    volume.config_map.is_some()
        || volume.empty_dir.as_ref().is_some_and(|empty| on_disk(empty.medium.as_deref()))
}

impl VolumeStatsCollector {
    /// Measures a volume, with a timeout.
    async fn collect(&self, target: StatTarget) -> Option<Vec<VolumeUsage>> {
        let (StatTarget::Directory(path) | StatTarget::FileSystem(path) | StatTarget::Device(path)) =
            target.clone();
        {
            let mut waiting = self.waiting.lock();
            // Each measurement of a filesystem that hangs blocks a thread, so their number is
            // limited.
            let count = waiting.entry(path.clone()).or_default();
            if *count >= MAX_WAITERS_PER_PATH {
                return None;
            }
            *count += 1;
        }
        let all = self.waiting.clone();
        let task = tokio::task::spawn_blocking(move || {
            let usage = target.measure();
            let mut all = all.lock();
            let count = all.get_mut(&path).map(|count| {
                *count -= 1;
                *count
            });
            if count == Some(0) {
                all.remove(&path);
            }
            usage
        });
        tokio::time::timeout(STAT_TIMEOUT, task).await.ok()?.ok()?
    }
}

impl StatTarget {
    fn measure(&self) -> Option<Vec<VolumeUsage>> {
        let number = |amount: u64| i64::try_from(amount).unwrap_or(i64::MAX);
        if let StatTarget::Device(path) = self {
            let size = std::fs::File::open(path).ok()?.seek(std::io::SeekFrom::End(0)).ok()?;
            return Some(vec![VolumeUsage { available: 0, total: number(size), used: 0, unit: csi::BYTES }]);
        }
        let (StatTarget::Directory(path) | StatTarget::FileSystem(path) | StatTarget::Device(path)) = self;
        let stat = rustix::fs::statvfs(path).ok()?;
        let bytes = |blocks: u64| blocks.saturating_mul(stat.f_frsize);
        let (mut used, mut inodes) =
            (bytes(stat.f_blocks.saturating_sub(stat.f_bfree)), stat.f_files.saturating_sub(stat.f_ffree));
        if let StatTarget::Directory(path) = self {
            (used, inodes) = sys::trees::usage(path);
        }
        let usage = |unit, [available, total, used]: [u64; 3]| VolumeUsage {
            available: number(available),
            total: number(total),
            used: number(used),
            unit,
        };
        Some(vec![
            usage(csi::BYTES, [bytes(stat.f_bavail), bytes(stat.f_blocks), used]),
            usage(csi::INODES, [stat.f_ffree, stat.f_files, inodes]),
        ])
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[track_caller]
    fn check(volume: Value, expected: Option<StatTarget>) {
        let mut volume = volume;
        volume["name"] = json!("v");
        let volume: Volume = serde_json::from_value(volume).expect("a volume");
        assert_eq!(inline_target(&volume, Path::new("/p")), expected);
    }

    #[test]
    fn stat_targets_of_volumes() {
        let files = |path: &str| Some(StatTarget::Directory(path.into()));
        let mounted = |path: &str| Some(StatTarget::FileSystem(path.into()));
        check(json!({"emptyDir": {}}), files("/p/kubernetes.io~empty-dir/v"));
        check(json!({"configMap": {"name": "x"}}), files("/p/kubernetes.io~configmap/v"));
        check(json!({"secret": {"secretName": "x"}}), files("/p/kubernetes.io~secret/v"));
        check(json!({"downwardAPI": {}}), files("/p/kubernetes.io~downward-api/v"));
        check(json!({"projected": {}}), files("/p/kubernetes.io~projected/v"));
        check(json!({"nfs": {"server": "s", "path": "/"}}), mounted("/p/kubernetes.io~nfs/v"));
        check(json!({"hostPath": {"path": "/"}}), None);
        check(json!({"image": {"reference": "i"}}), None);
        for (spec, expected) in [
            (json!({"local": {"path": "/disk"}}), mounted("/disk")),
            (
                json!({"local": {"path": "/dev/x"}, "volumeMode": "Block"}),
                Some(StatTarget::Device("/dev/x".into())),
            ),
            (json!({"nfs": {"server": "s", "path": "/"}}), mounted("/p/kubernetes.io~nfs/pv")),
            (json!({"hostPath": {"path": "/"}}), None),
        ] {
            let volume = json!({"metadata": {"name": "pv"}, "spec": spec});
            let volume: PersistentVolume = serde_json::from_value(volume).expect("a volume");
            assert_eq!(persistent_target(&volume, Path::new("/p")), expected);
        }
    }

    #[tokio::test(start_paused = true)]
    async fn claim_stats_are_cached_for_a_minute() {
        let mut cache = VolumeStatsCache::default();
        cache.0.insert("1".to_owned(), (Instant::now(), vec![json!(1)]));
        tokio::time::advance(STATS_CACHE_TTL - Duration::from_millis(1)).await;
        assert_eq!((cache.get("1"), cache.get("2")), (Some(vec![json!(1)]), None));
        tokio::time::advance(Duration::from_millis(1)).await;
        assert_eq!(cache.get("1"), None);
    }

    #[tokio::test]
    async fn usage_of_directories_filesystems_and_devices() {
        let dir = tempfile::tempdir().expect("a directory");
        std::fs::write(dir.path().join("a"), vec![1; 100_000]).expect("written");
        let collector = VolumeStatsCollector::default();
        let files = collector.collect(StatTarget::Directory(dir.path().into())).await.expect("seen");
        assert!((100_000..200_000).contains(&files[0].used) && files[1].used == 2, "{files:?}");
        let all = collector.collect(StatTarget::FileSystem(dir.path().into())).await.expect("seen");
        assert!(all[0].used > 100_000 && all[0].total == files[0].total, "{all:?}");
        let device = collector.collect(StatTarget::Device(dir.path().join("a"))).await.expect("seen");
        assert_eq!(usage_fields(&device)["capacityBytes"], 100_000);
        assert_eq!(usage_fields(&device)["inodes"], 0);
        assert_eq!(collector.collect(StatTarget::Directory(dir.path().join("none"))).await, None);
        assert!(collector.waiting.lock().is_empty());
    }
}
