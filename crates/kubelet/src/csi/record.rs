//! Volume metadata on disk (`vol_data.json`), in upstream's location and format.

use std::io;
use std::path::{Path, PathBuf};

use serde_json::{Value, json};

const VOLUME_DATA_FILE: &str = "vol_data.json";

/// The metadata of a volume that is staged or published on this node.
#[derive(Clone, Debug, PartialEq)]
pub struct VolumeRecord {
    pub driver: String,
    pub handle: String,
    /// The name of the PersistentVolume. For an inline volume, the name in the pod.
    pub name: String,
    /// The name of the volume in the pod.
    pub pod_volume_name: String,
    pub is_ephemeral: bool,
    pub is_block: bool,
    /// The directory of the metadata file.
    pub dir: PathBuf,
}

impl VolumeRecord {
    /// The name of the volume in the node status.
    pub fn unique_name(&self) -> String {
        unique_name(&self.driver, &self.handle)
    }

    /// The target path of NodePublishVolume.
    pub fn target_path(&self) -> PathBuf {
        self.dir.join("mount")
    }

    /// The staging path of NodeStageVolume.
    pub fn staging_path(&self) -> PathBuf {
        self.dir.join("globalmount")
    }

    pub fn write(&self, node: &str) -> io::Result<()> {
        std::fs::create_dir_all(&self.dir)?;
        let mode = if self.is_ephemeral { "Ephemeral" } else { "Persistent" };
        let text = json!({
            "attachmentID": attachment_name(&self.handle, &self.driver, node),
            "driverName": self.driver,
            "nodeName": node,
            "podVolume": self.pod_volume_name,
            "specVolID": self.name,
            "volumeHandle": self.handle,
            "volumeLifecycleMode": mode,
            "volumeMode": if self.is_block { "Block" } else { "Filesystem" },
        });
        std::fs::write(self.dir.join(VOLUME_DATA_FILE), text.to_string())
    }

    pub fn is_written(&self) -> bool {
        self.dir.join(VOLUME_DATA_FILE).exists()
    }

    fn read(dir: PathBuf) -> Option<VolumeRecord> {
        let text = std::fs::read(dir.join(VOLUME_DATA_FILE)).ok()?;
        let value: Value = serde_json::from_slice(&text).ok()?;
        let text = |name: &str| value[name].as_str().unwrap_or_default().to_owned();
        Some(VolumeRecord {
            driver: text("driverName"),
            handle: text("volumeHandle"),
            name: text("specVolID"),
            pod_volume_name: text("podVolume"),
            is_ephemeral: value["volumeLifecycleMode"] == "Ephemeral",
            is_block: value["volumeMode"] == "Block",
            dir,
        })
    }

    /// Removes the metadata and the empty directories. Fails if a directory is not empty: it may
    /// contain data of the volume.
    pub fn remove(&self, mount_path: &Path) -> io::Result<()> {
        let ignore_not_found = |result: io::Result<()>| match result {
            Err(error) if error.kind() != io::ErrorKind::NotFound => Err(error),
            _ => Ok(()),
        };
        match std::fs::symlink_metadata(mount_path) {
            Ok(known) if known.is_dir() => ignore_not_found(std::fs::remove_dir(mount_path))?,
            Ok(_) => ignore_not_found(std::fs::remove_file(mount_path))?,
            Err(_) => {}
        }
        ignore_not_found(std::fs::remove_file(self.dir.join(VOLUME_DATA_FILE)))?;
        ignore_not_found(std::fs::remove_dir(&self.dir))
    }
}

pub fn unique_name(driver: &str, handle: &str) -> String {
    format!("kubernetes.io/csi/{driver}^{handle}")
}

/// The name of the volume's VolumeAttachment.
pub fn attachment_name(handle: &str, driver: &str, node: &str) -> String {
    format!("csi-{}", digest(&format!("{handle}{driver}{node}")))
}

pub fn digest(text: &str) -> String {
    let digest = ring::digest::digest(&ring::digest::SHA256, text.as_bytes());
    digest.as_ref().iter().map(|byte| format!("{byte:02x}")).collect()
}

/// The metadata directory of a volume published for a pod.
pub fn published_dir(root: &Path, pod: &str, name: &str) -> PathBuf {
    pod_dir(root, pod).join(name.replace('/', "~"))
}

fn pod_dir(root: &Path, pod: &str) -> PathBuf {
    root.join("pods").join(pod).join("volumes/kubernetes.io~csi")
}

/// The metadata directory of a staged volume.
pub fn staged_dir(root: &Path, driver: &str, handle: &str) -> PathBuf {
    root.join("plugins/kubernetes.io/csi").join(driver).join(digest(handle))
}

/// The volumes published for a pod.
pub fn published_volumes(root: &Path, pod: &str) -> Vec<VolumeRecord> {
    dir_entries(&pod_dir(root, pod)).filter_map(VolumeRecord::read).collect()
}

/// Whether a volume is published for any pod.
pub fn is_published(root: &Path, driver: &str, handle: &str) -> bool {
    dir_entries(&root.join("pods")).any(|pod| {
        let of_pod = dir_entries(&pod.join("volumes/kubernetes.io~csi")).filter_map(VolumeRecord::read);
        of_pod.into_iter().any(|record| record.driver == driver && record.handle == handle)
    })
}

/// All staged volumes.
pub fn staged_volumes(root: &Path) -> Vec<VolumeRecord> {
    let drivers = dir_entries(&root.join("plugins/kubernetes.io/csi"));
    drivers
        .flat_map(|driver| dir_entries(&driver).filter_map(VolumeRecord::read).collect::<Vec<_>>())
        .collect()
}

fn dir_entries(dir: &Path) -> impl Iterator<Item = PathBuf> + use<> {
    std::fs::read_dir(dir).into_iter().flatten().flatten().map(|entry| entry.path())
}
