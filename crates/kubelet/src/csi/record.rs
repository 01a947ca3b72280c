//! What is written down of volumes on this node, beside them.

use std::io;
use std::path::{Path, PathBuf};

use serde_json::{Value, json};

const FILE: &str = "vol_data.json";

/// A volume that is on this node.
#[derive(Clone, Debug, PartialEq)]
pub struct Record {
    pub driver: String,
    pub handle: String,
    /// The name of the volume, or of the one in the pod where it is made for it alone.
    pub name: String,
    /// What the pod calls it.
    pub in_pod: String,
    pub is_ephemeral: bool,
    pub is_block: bool,
    /// The directory it is written in.
    pub dir: PathBuf,
}

impl Record {
    /// As statuses of nodes name it.
    pub fn unique_name(&self) -> String {
        unique_name(&self.driver, &self.handle)
    }

    /// Where the driver puts it for a pod.
    pub fn place(&self) -> PathBuf {
        self.dir.join("mount")
    }

    /// Where the driver puts it for all pods.
    pub fn staging(&self) -> PathBuf {
        self.dir.join("globalmount")
    }

    pub fn write(&self, node: &str) -> io::Result<()> {
        std::fs::create_dir_all(&self.dir)?;
        let mode = if self.is_ephemeral { "Ephemeral" } else { "Persistent" };
        let text = json!({
            "attachmentID": attachment_name(&self.handle, &self.driver, node),
            "driverName": self.driver,
            "nodeName": node,
            "podVolume": self.in_pod,
            "specVolID": self.name,
            "volumeHandle": self.handle,
            "volumeLifecycleMode": mode,
            "volumeMode": if self.is_block { "Block" } else { "Filesystem" },
        });
        std::fs::write(self.dir.join(FILE), text.to_string())
    }

    pub fn is_written(&self) -> bool {
        self.dir.join(FILE).exists()
    }

    fn read(dir: PathBuf) -> Option<Record> {
        let text = std::fs::read(dir.join(FILE)).ok()?;
        let value: Value = serde_json::from_slice(&text).ok()?;
        let text = |name: &str| value[name].as_str().unwrap_or_default().to_owned();
        Some(Record {
            driver: text("driverName"),
            handle: text("volumeHandle"),
            name: text("specVolID"),
            in_pod: text("podVolume"),
            is_ephemeral: value["volumeLifecycleMode"] == "Ephemeral",
            is_block: value["volumeMode"] == "Block",
            dir,
        })
    }

    /// Removes what is written, and the directory, which must be empty then: what is in it is somebody's data.
    pub fn erase(&self, place: &Path) -> io::Result<()> {
        let gone = |result: io::Result<()>| match result {
            Err(error) if error.kind() != io::ErrorKind::NotFound => Err(error),
            _ => Ok(()),
        };
        match std::fs::symlink_metadata(place) {
            Ok(known) if known.is_dir() => gone(std::fs::remove_dir(place))?,
            Ok(_) => gone(std::fs::remove_file(place))?,
            Err(_) => {}
        }
        gone(std::fs::remove_file(self.dir.join(FILE)))?;
        gone(std::fs::remove_dir(&self.dir))
    }
}

pub fn unique_name(driver: &str, handle: &str) -> String {
    format!("kubernetes.io/csi/{driver}^{handle}")
}

/// The name of the object that asks for a volume to be attached.
pub fn attachment_name(handle: &str, driver: &str, node: &str) -> String {
    format!("csi-{}", digest(&format!("{handle}{driver}{node}")))
}

pub fn digest(text: &str) -> String {
    let digest = ring::digest::digest(&ring::digest::SHA256, text.as_bytes());
    digest.as_ref().iter().map(|byte| format!("{byte:02x}")).collect()
}

/// Where a pod's volume is written down.
pub fn published_dir(root: &Path, pod: &str, name: &str) -> PathBuf {
    pod_dir(root, pod).join(name.replace('/', "~"))
}

fn pod_dir(root: &Path, pod: &str) -> PathBuf {
    root.join("pods").join(pod).join("volumes/kubernetes.io~csi")
}

/// Where a volume that pods share is written down; it is in `globalmount` there.
pub fn staged_dir(root: &Path, driver: &str, handle: &str) -> PathBuf {
    root.join("plugins/kubernetes.io/csi").join(driver).join(digest(handle))
}

/// The volumes a pod has.
pub fn published(root: &Path, pod: &str) -> Vec<Record> {
    below(&pod_dir(root, pod)).filter_map(Record::read).collect()
}

/// Whether any pod has a volume.
pub fn is_published(root: &Path, driver: &str, handle: &str) -> bool {
    below(&root.join("pods")).any(|pod| {
        let of_pod = below(&pod.join("volumes/kubernetes.io~csi")).filter_map(Record::read);
        of_pod.into_iter().any(|record| record.driver == driver && record.handle == handle)
    })
}

/// All volumes that pods share.
pub fn staged(root: &Path) -> Vec<Record> {
    let drivers = below(&root.join("plugins/kubernetes.io/csi"));
    drivers.flat_map(|driver| below(&driver).filter_map(Record::read).collect::<Vec<_>>()).collect()
}

fn below(dir: &Path) -> impl Iterator<Item = PathBuf> + use<> {
    std::fs::read_dir(dir).into_iter().flatten().flatten().map(|entry| entry.path())
}
