//! User namespaces of pods (`hostUsers: false`): each of these pods has a range of host IDs for
//! itself.
//!
//! The range is stored in the pod's directory, in the same file as upstream's, and belongs to the
//! pod until that directory is removed. All state is on disk, so that a restarted kubelet finds it
//! there.

use std::collections::BTreeMap;
use std::io;
use std::path::{Path, PathBuf};

use k8s_openapi::api::core::v1::Pod;
use parking_lot::Mutex;
use runtime::cri::{self, IdMapping, NamespaceMode, UserNamespace};
use serde_json::{Value, json};

/// The number of IDs of each pod.
pub const IDS_PER_POD: u32 = 65536;
/// The file with the mappings in the pod's directory.
const MAPPINGS_FILE: &str = "userns";

/// The ID ranges of this node's pods.
pub struct UserNamespaceManager {
    pods: PathBuf,
    /// The owner (pod UID) of each range, by its index. The first range belongs to the host.
    allocated: Mutex<BTreeMap<u32, String>>,
}

impl UserNamespaceManager {
    /// Reads the ranges of all pods. An invalid file, or a range that another pod has, allocates
    /// nothing. It is reported when the range of that pod is requested.
    pub fn open(pods: &Path) -> UserNamespaceManager {
        let users = UserNamespaceManager { pods: pods.to_owned(), allocated: Mutex::default() };
        for entry in std::fs::read_dir(pods).into_iter().flatten().flatten() {
            let uid = entry.file_name().to_string_lossy().into_owned();
            if let Ok(Some(slot)) = users.read(&uid) {
                users.allocated.lock().entry(slot).or_insert(uid);
            }
        }
        users
    }

    /// The range of a pod, allocated if it has none.
    pub fn get_or_allocate(&self, uid: &str) -> Result<UserNamespace, String> {
        let mut allocated = self.allocated.lock();
        let known = self.read(uid).map_err(|why| format!("user namespace: {why}"))?;
        let slot = match known {
            Some(slot) => {
                let owner = allocated.entry(slot).or_insert_with(|| uid.to_owned());
                if owner != uid {
                    return Err(format!("user namespace: range picked for pod {uid:?} already taken"));
                }
                slot
            }
            None => {
                let failed = |why: String| format!("create user namespace: {why}");
                let slot = free_slot(&allocated).ok_or_else(|| {
                    failed("could not find an empty slot to allocate a user namespace".to_owned())
                })?;
                self.write(uid, slot).map_err(|error| failed(error.to_string()))?;
                allocated.insert(slot, uid.to_owned());
                slot
            }
        };
        let range = vec![IdMapping { host_id: slot * IDS_PER_POD, container_id: 0, length: IDS_PER_POD }];
        Ok(UserNamespace { mode: NamespaceMode::Pod.into(), uids: range.clone(), gids: range })
    }

    /// Releases the range of a removed pod.
    pub fn release(&self, uid: &str) {
        let mut allocated = self.allocated.lock();
        allocated.retain(|_, owner| owner != uid);
        let _ = std::fs::remove_file(self.pods.join(uid).join(MAPPINGS_FILE));
    }

    fn read(&self, uid: &str) -> Result<Option<u32>, String> {
        match std::fs::read(self.pods.join(uid).join(MAPPINGS_FILE)) {
            Ok(bytes) => parse(&bytes).map(Some),
            Err(error) if error.kind() == io::ErrorKind::NotFound => Ok(None),
            Err(error) if error.kind() == io::ErrorKind::NotADirectory => Ok(None),
            Err(error) => Err(error.to_string()),
        }
    }

    /// Writes and syncs the range before it is used, so that files of this pod never belong to
    /// another one after a crash.
    fn write(&self, uid: &str, slot: u32) -> io::Result<()> {
        let dir = self.pods.join(uid);
        std::fs::create_dir_all(&dir)?;
        let range = json!([{"hostId": slot * IDS_PER_POD, "containerId": 0, "length": IDS_PER_POD}]);
        let text = json!({"uidMappings": range, "gidMappings": range}).to_string();
        let temp_path = dir.join("userns.new");
        std::fs::write(&temp_path, text)?;
        std::fs::File::open(&temp_path)?.sync_all()?;
        std::fs::rename(&temp_path, dir.join(MAPPINGS_FILE))?;
        std::fs::File::open(&dir)?.sync_all()
    }
}

/// The first free range.
fn free_slot(allocated: &BTreeMap<u32, String>) -> Option<u32> {
    (1..=u32::MAX / IDS_PER_POD).find(|slot| !allocated.contains_key(slot))
}

/// The index of the range in a pod's file.
fn parse(bytes: &[u8]) -> Result<u32, String> {
    const INVALID: &str = "invalid user namespace configuration";
    let value: Value = serde_json::from_slice(bytes)
        .map_err(|error| format!("invalid user namespace mappings file: {error}"))?;
    let (uids, gids) = (&value["uidMappings"], &value["gidMappings"]);
    let (Some([range]), true) = (uids.as_array().map(Vec::as_slice), uids == gids) else {
        return Err(format!("{INVALID}: GID and UID mappings should be identical."));
    };
    let number = |name: &str| range[name].as_u64().and_then(|number| u32::try_from(number).ok());
    let (Some(first), Some(0), Some(length)) = (number("hostId"), number("containerId"), number("length"))
    else {
        return Err(format!("{INVALID}: UID 0 must be mapped"));
    };
    if length != IDS_PER_POD {
        return Err(format!("wrong user namespace length {length}"));
    }
    match first % IDS_PER_POD {
        0 if first > 0 => Ok(first / IDS_PER_POD),
        0 => Err(format!("id {first} is out of range")),
        _ => Err(format!("wrong user namespace offset specified {first}")),
    }
}

/// Whether a pod has a user namespace of its own.
pub fn has_user_namespace(pod: &Pod) -> bool {
    pod.spec.as_ref().and_then(|spec| spec.host_users) == Some(false)
}

/// Applies the mappings to a pod sandbox.
pub fn apply_to_sandbox(config: &mut cri::PodSandboxConfig, users: &UserNamespace) {
    let security = config.linux.as_mut().and_then(|linux| linux.security_context.as_mut());
    if let Some(options) = security.and_then(|security| security.namespace_options.as_mut()) {
        options.userns_options = Some(users.clone());
    }
}

/// Applies the mappings to a container. Its mounts are ID-mapped, so that files have the same
/// owners inside the container as on the host.
pub fn apply_to_container(config: &mut cri::ContainerConfig, users: &UserNamespace) {
    let security = config.linux.as_mut().and_then(|linux| linux.security_context.as_mut());
    if let Some(options) = security.and_then(|security| security.namespace_options.as_mut()) {
        options.userns_options = Some(users.clone());
    }
    for mount in &mut config.mounts {
        mount.uid_mappings = users.uids.clone();
        mount.gid_mappings = users.gids.clone();
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn first(users: &UserNamespaceManager, uid: &str) -> u32 {
        users.get_or_allocate(uid).unwrap().uids[0].host_id
    }

    #[test]
    fn ranges_do_not_overlap() {
        let dir = tempfile::tempdir().unwrap();
        let users = UserNamespaceManager::open(dir.path());
        assert_eq!([first(&users, "a"), first(&users, "b"), first(&users, "a")], [65536, 131072, 65536]);
        // After a restart.
        let later = UserNamespaceManager::open(dir.path());
        assert_eq!([first(&later, "c"), first(&later, "b")], [196608, 131072]);
        later.release("a");
        assert_eq!(first(&later, "d"), 65536);
        let written = std::fs::read_to_string(dir.path().join("d/userns")).unwrap();
        assert_eq!(serde_json::from_str::<Value>(&written).unwrap()["gidMappings"][0]["hostId"], 65536);
    }

    #[track_caller]
    fn check(text: &str, expected: Result<u32, &str>) {
        assert_eq!(
            parse(text.as_bytes()).as_ref().map_err(String::as_str),
            expected.as_ref().map_err(|text| *text)
        );
    }

    #[test]
    fn rejects_invalid_mapping_files() {
        let file = |first: u32, inside: u32, length: u32| {
            let range = json!([{"hostId": first, "containerId": inside, "length": length}]);
            json!({"uidMappings": range, "gidMappings": range}).to_string()
        };
        check(&file(65536 * 3, 0, 65536), Ok(3));
        check(&file(0, 0, 65536), Err("id 0 is out of range"));
        check(&file(65537, 0, 65536), Err("wrong user namespace offset specified 65537"));
        check(&file(65536, 0, 65535), Err("wrong user namespace length 65535"));
        check(&file(65536, 1, 65536), Err("invalid user namespace configuration: UID 0 must be mapped"));
        check("{}", Err("invalid user namespace configuration: GID and UID mappings should be identical."));
        assert!(parse(b"x").unwrap_err().starts_with("invalid user namespace mappings file"));
        let dir = tempfile::tempdir().unwrap();
        std::fs::create_dir(dir.path().join("a")).unwrap();
        std::fs::write(dir.path().join("a/userns"), "nonsense").unwrap();
        let users = UserNamespaceManager::open(dir.path());
        assert!(
            users
                .get_or_allocate("a")
                .unwrap_err()
                .starts_with("user namespace: invalid user namespace mappings file")
        );
    }

    #[test]
    fn rejects_a_range_of_another_pod() {
        let dir = tempfile::tempdir().unwrap();
        let users = UserNamespaceManager::open(dir.path());
        first(&users, "a");
        std::fs::create_dir(dir.path().join("b")).unwrap();
        std::fs::copy(dir.path().join("a/userns"), dir.path().join("b/userns")).unwrap();
        assert_eq!(
            users.get_or_allocate("b").unwrap_err(),
            "user namespace: range picked for pod \"b\" already taken"
        );
        let none = (1..=65535).map(|slot| (slot, String::new())).collect();
        assert_eq!(free_slot(&none), None);
    }
}
