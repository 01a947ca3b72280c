//! What volumes hold, and how much there is room for. Drivers tell of theirs; of the others it is seen: what is in the
//! directory of one that lives as long as its pod, and the file system of one that does not. Of a directory of the host
//! nothing is told, as upstream has it.

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

use super::shown;
use crate::csi::{self, VolumeUsage};
use crate::{Node, volumes};

/// For the file system of another machine, which may never answer.
const PATIENCE: Duration = Duration::from_secs(5);
/// How many may wait for the same one.
const MOST_WAITING: usize = 4;

/// The amounts, by what [`csi::BYTES`] and [`csi::INODES`] are called.
const AMOUNTS: [(i32, [&str; 3]); 2] = [
    (csi::BYTES, ["availableBytes", "capacityBytes", "usedBytes"]),
    (csi::INODES, ["inodesFree", "inodes", "inodesUsed"]),
];

/// How long what was told of a pod's claims is told again, as upstream has it.
const TOLD_AGAIN: Duration = Duration::from_secs(60);

/// Volumes that are being looked at: looking cannot be given up, only waiting for it.
#[derive(Clone, Default)]
pub struct Looking {
    waiting: Arc<Mutex<HashMap<PathBuf, usize>>>,
    told: Arc<Mutex<Told>>,
}

/// What was told last of each pod's claims, by the pod's uid, and when.
#[derive(Default)]
struct Told(HashMap<String, (Instant, Vec<Value>)>);

impl Told {
    /// What may be told again of a pod.
    fn again(&self, uid: &str) -> Option<Vec<Value>> {
        self.0.get(uid).filter(|(at, _)| at.elapsed() < TOLD_AGAIN).map(|(_, told)| told.clone())
    }
}

/// How a volume is looked at.
#[derive(Clone, Debug, PartialEq)]
enum Look {
    /// What is in this directory counts.
    Files(PathBuf),
    /// All of the file system counts.
    FileSystem(PathBuf),
    /// A device without a file system.
    Device(PathBuf),
}

/// All volumes of a pod of which there is anything to tell; or those alone that claims stand for.
pub async fn of_pod(node: &Node, pod: &Pod, only_claims: bool, now: Timestamp) -> Vec<Value> {
    let mut by_drivers = csi::volume::stats(&node.csi, &node.settings, pod.uid()).await;
    let dir = node.settings.pod_dir(pod).join("volumes");
    let mut all: Vec<(bool, Value)> = Vec::new();
    for volume in pod.spec.iter().flat_map(|spec| spec.volumes.iter().flatten()) {
        let claim = volumes::claims::name(pod, volume);
        if only_claims && claim.is_none() {
            continue;
        }
        let usage = match (by_drivers.remove(&volume.name), &claim) {
            (Some(told), _) => Some(told),
            (None, Some(claim)) => match claimed(node, pod, claim, &dir).await {
                Some(look) => node.looking.see(look).await,
                None => None,
            },
            (None, None) => match own(volume, &dir) {
                Some(look) => node.looking.see(look).await,
                None => None,
            },
        };
        let Some(usage) = usage else { continue };
        let mut one = amounts(&usage);
        one["name"] = json!(volume.name);
        one["time"] = json!(shown(now));
        if let Some(claim) = claim {
            one["pvcRef"] = json!({"name": claim, "namespace": pod.namespace()});
        }
        all.push((is_local_and_ephemeral(volume), one));
    }
    // In upstream's order.
    all.sort_by_key(|(is_first, _)| !is_first);
    all.into_iter().map(|(_, one)| one).collect()
}

/// What all claims of this node's pods hold, by namespace and name. Whoever collects that asks often, and finding out means to
/// ask the API server and drivers, so for a while the same is told again.
pub async fn of_claims(node: &Node) -> BTreeMap<(String, String), Value> {
    let now = node.ctx.clock.now();
    let pods = node.pods();
    let uids: HashSet<&str> = pods.iter().map(|pod| pod.uid()).collect();
    node.looking.told.lock().0.retain(|uid, _| uids.contains(uid.as_str()));
    let mut all = BTreeMap::new();
    for pod in &pods {
        let phase = pod.status.as_ref().and_then(|status| status.phase.as_deref());
        let volumes = || pod.spec.iter().flat_map(|spec| spec.volumes.iter().flatten());
        let is_over = matches!(phase, Some("Succeeded" | "Failed"));
        if is_over || !volumes().any(|volume| volumes::claims::name(pod, volume).is_some()) {
            continue;
        }
        let known = node.looking.told.lock().again(pod.uid());
        let told = match known {
            Some(told) => told,
            None => {
                let told = of_pod(node, pod, true, now).await;
                // Before that not all may be there yet.
                if phase == Some("Running") {
                    node.looking.told.lock().0.insert(pod.uid().to_owned(), (Instant::now(), told.clone()));
                }
                told
            }
        };
        for one in told {
            let name = one["pvcRef"]["name"].as_str().unwrap_or_default().to_owned();
            all.entry((pod.namespace().to_owned(), name)).or_insert(one);
        }
    }
    all
}

fn amounts(usage: &[VolumeUsage]) -> Value {
    let mut all = json!({});
    for (unit, names) in AMOUNTS {
        let told = usage.iter().find(|told| told.unit == unit);
        let told = told.map_or([0; 3], |told| [told.available, told.total, told.used]);
        for (name, amount) in names.into_iter().zip(told) {
            all[name] = json!(amount);
        }
    }
    all
}

/// Where a volume is that the pod names itself.
fn own(volume: &Volume, dir: &Path) -> Option<Look> {
    let is = |has: bool, kind: &str| has.then(|| dir.join(kind).join(&volume.name));
    let files = is(volume.empty_dir.is_some(), "kubernetes.io~empty-dir")
        .or_else(|| is(volume.config_map.is_some(), "kubernetes.io~configmap"))
        .or_else(|| is(volume.secret.is_some(), "kubernetes.io~secret"))
        .or_else(|| is(volume.downward_api.is_some(), "kubernetes.io~downward-api"))
        .or_else(|| is(volume.projected.is_some(), "kubernetes.io~projected"));
    let mounted = is(volume.nfs.is_some(), "kubernetes.io~nfs")
        .or_else(|| is(volume.iscsi.is_some(), "kubernetes.io~iscsi"));
    files.map(Look::Files).or(mounted.map(Look::FileSystem))
}

/// The same for one that a claim stands for. Both are asked for by name, since a node may see no others.
async fn claimed(node: &Node, pod: &Pod, claim: &str, dir: &Path) -> Option<Look> {
    let claim = node.ctx.client.get::<PersistentVolumeClaim>(&Key::new(pod.namespace(), claim)).await.ok()?;
    let name = claim.spec?.volume_name?;
    let volume = node.ctx.client.get::<PersistentVolume>(&Key::new("", &name)).await.ok()?;
    persistent(&volume, dir)
}

fn persistent(volume: &PersistentVolume, dir: &Path) -> Option<Look> {
    let spec = volume.spec.as_ref()?;
    let is_block = spec.volume_mode.as_deref() == Some("Block");
    match (&spec.local, &spec.nfs, &spec.iscsi) {
        (Some(local), ..) if is_block => Some(Look::Device(local.path.clone().into())),
        (Some(local), ..) => Some(Look::FileSystem(local.path.clone().into())),
        (_, Some(_), _) => Some(Look::FileSystem(dir.join("kubernetes.io~nfs").join(volume.name()))),
        (.., Some(_)) if !is_block => {
            Some(Look::FileSystem(dir.join("kubernetes.io~iscsi").join(volume.name())))
        }
        _ => None,
    }
}

fn is_local_and_ephemeral(volume: &Volume) -> bool {
    let on_disk = |medium: Option<&str>| medium.unwrap_or_default().is_empty();
    volume.config_map.is_some()
        || volume.empty_dir.as_ref().is_some_and(|empty| on_disk(empty.medium.as_deref()))
}

impl Looking {
    /// Looks, and does not wait for ever.
    async fn see(&self, look: Look) -> Option<Vec<VolumeUsage>> {
        let (Look::Files(path) | Look::FileSystem(path) | Look::Device(path)) = look.clone();
        {
            let mut waiting = self.waiting.lock();
            let count = waiting.entry(path.clone()).or_default();
            if *count >= MOST_WAITING {
                return None;
            }
            *count += 1;
        }
        let all = self.waiting.clone();
        let looked = tokio::task::spawn_blocking(move || {
            let seen = look.see();
            let mut all = all.lock();
            let count = all.get_mut(&path).map(|count| {
                *count -= 1;
                *count
            });
            if count == Some(0) {
                all.remove(&path);
            }
            seen
        });
        tokio::time::timeout(PATIENCE, looked).await.ok()?.ok()?
    }
}

impl Look {
    fn see(&self) -> Option<Vec<VolumeUsage>> {
        let number = |amount: u64| i64::try_from(amount).unwrap_or(i64::MAX);
        if let Look::Device(path) = self {
            let size = std::fs::File::open(path).ok()?.seek(std::io::SeekFrom::End(0)).ok()?;
            return Some(vec![VolumeUsage { available: 0, total: number(size), used: 0, unit: csi::BYTES }]);
        }
        let (Look::Files(path) | Look::FileSystem(path) | Look::Device(path)) = self;
        let stat = rustix::fs::statvfs(path).ok()?;
        let bytes = |blocks: u64| blocks.saturating_mul(stat.f_frsize);
        let (mut used, mut inodes) =
            (bytes(stat.f_blocks.saturating_sub(stat.f_bfree)), stat.f_files.saturating_sub(stat.f_ffree));
        if let Look::Files(path) = self {
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
    fn check(volume: Value, expected: Option<Look>) {
        let mut volume = volume;
        volume["name"] = json!("v");
        let volume: Volume = serde_json::from_value(volume).expect("a volume");
        assert_eq!(own(&volume, Path::new("/p")), expected);
    }

    #[test]
    fn where_volumes_are() {
        let files = |path: &str| Some(Look::Files(path.into()));
        let mounted = |path: &str| Some(Look::FileSystem(path.into()));
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
                Some(Look::Device("/dev/x".into())),
            ),
            (json!({"nfs": {"server": "s", "path": "/"}}), mounted("/p/kubernetes.io~nfs/pv")),
            (json!({"hostPath": {"path": "/"}}), None),
        ] {
            let volume = json!({"metadata": {"name": "pv"}, "spec": spec});
            let volume: PersistentVolume = serde_json::from_value(volume).expect("a volume");
            assert_eq!(persistent(&volume, Path::new("/p")), expected);
        }
    }

    #[tokio::test(start_paused = true)]
    async fn the_same_is_told_for_a_minute() {
        let mut told = Told::default();
        told.0.insert("1".to_owned(), (Instant::now(), vec![json!(1)]));
        tokio::time::advance(TOLD_AGAIN - Duration::from_millis(1)).await;
        assert_eq!((told.again("1"), told.again("2")), (Some(vec![json!(1)]), None));
        tokio::time::advance(Duration::from_millis(1)).await;
        assert_eq!(told.again("1"), None);
    }

    #[tokio::test]
    async fn what_is_seen() {
        let dir = tempfile::tempdir().expect("a directory");
        std::fs::write(dir.path().join("a"), vec![1; 100_000]).expect("written");
        let looking = Looking::default();
        let files = looking.see(Look::Files(dir.path().into())).await.expect("seen");
        assert!((100_000..200_000).contains(&files[0].used) && files[1].used == 2, "{files:?}");
        let all = looking.see(Look::FileSystem(dir.path().into())).await.expect("seen");
        assert!(all[0].used > 100_000 && all[0].total == files[0].total, "{all:?}");
        let device = looking.see(Look::Device(dir.path().join("a"))).await.expect("seen");
        assert_eq!(amounts(&device)["capacityBytes"], 100_000);
        assert_eq!(amounts(&device)["inodes"], 0);
        assert_eq!(looking.see(Look::Files(dir.path().join("none"))).await, None);
        assert!(looking.waiting.lock().is_empty());
    }
}
