//! Records of pods and containers on disk, for recovery after a restart. The file `record` in the
//! directory of a pod, and in those of its containers below it, is one of these messages. They are
//! protobuf, since most of their content is CRI configuration. The supervisor writes the status of a
//! container to `status.json` beside it.

use std::io::{self, Write as _};
use std::path::Path;

use super::protocol::RunStatus;
use crate::cri::{ContainerConfig, LinuxContainerResources, PodSandboxConfig};

pub const RECORD_FILE: &str = "record";
const STATUS_FILE: &str = "status.json";

#[derive(Clone, PartialEq, prost::Message)]
pub struct PodRecord {
    #[prost(message, optional, tag = 1)]
    pub config: Option<PodSandboxConfig>,
    #[prost(int64, tag = 2)]
    pub created: i64,
    #[prost(string, tag = 3)]
    pub handler: String,
    #[prost(string, repeated, tag = 4)]
    pub ips: Vec<String>,
    /// The pod has no network yet.
    #[prost(bool, tag = 6)]
    pub is_unfinished: bool,
    /// Skiff publishes its host ports: it was created by an external CRI client.
    #[prost(bool, tag = 7)]
    pub opens_ports: bool,
}

#[derive(Clone, PartialEq, prost::Message)]
pub struct ContainerRecord {
    #[prost(message, optional, tag = 1)]
    pub config: Option<ContainerConfig>,
    #[prost(int64, tag = 2)]
    pub created: i64,
    /// The image ID.
    #[prost(string, tag = 3)]
    pub image: String,
    /// The reference by which the image can be pulled again.
    #[prost(string, tag = 4)]
    pub image_ref: String,
    #[prost(string, repeated, tag = 5)]
    pub layers: Vec<String>,
    #[prost(int32, tag = 6)]
    pub stop_signal: i32,
    /// The resources in effect, if they were changed after creation.
    #[prost(message, optional, tag = 7)]
    pub resources: Option<LinuxContainerResources>,
}

/// Replaces the record atomically.
pub fn write(directory: &Path, record: &impl prost::Message) -> io::Result<()> {
    let (path, temp_path) = (directory.join(RECORD_FILE), directory.join("record.new"));
    std::fs::write(&temp_path, record.encode_to_vec())?;
    std::fs::rename(temp_path, path)
}

pub fn read<T: prost::Message + Default>(directory: &Path) -> io::Result<T> {
    let bytes = std::fs::read(directory.join(RECORD_FILE))?;
    if bytes.is_empty() {
        return Err(io::ErrorKind::InvalidData.into());
    }
    T::decode(&bytes[..]).map_err(|error| io::Error::new(io::ErrorKind::InvalidData, error))
}

/// Appends a status as a line. That is cheaper than replacing the file, and the previous status is
/// never lost.
pub fn add_status(directory: &Path, status: &RunStatus) -> io::Result<()> {
    let status = serde_json::to_string(status).expect("a status has only numbers and strings");
    // Starts with a line break: the last write may be incomplete because the disk was full.
    let line = format!("\n{status}\n");
    let file = std::fs::File::options().append(true).create(true).open(directory.join(STATUS_FILE));
    file?.write_all(line.as_bytes())
}

/// The last status; `None` if the container was not started.
pub fn last_status(directory: &Path) -> Option<RunStatus> {
    let text = std::fs::read(directory.join(STATUS_FILE)).ok()?;
    // The last line may be incomplete after a power failure.
    text.split(|byte| *byte == b'\n').rev().find_map(|line| serde_json::from_slice(line).ok())
}

/// Whether an error of [`read`] means that there is no complete record.
pub fn is_missing(error: &io::Error) -> bool {
    use io::ErrorKind::{InvalidData, NotADirectory, NotFound};
    matches!(error.kind(), InvalidData | NotADirectory | NotFound)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn reads_the_last_complete_status() {
        let dir = tempfile::tempdir().unwrap();
        assert_eq!(last_status(dir.path()), None);
        let started = RunStatus { pid: 7, started: 1, ..RunStatus::default() };
        let ended = RunStatus { finished: 2, exit_code: 3, ..started.clone() };
        for status in [&started, &ended] {
            add_status(dir.path(), status).unwrap();
            assert_eq!(last_status(dir.path()).as_ref(), Some(status));
        }
        let path = dir.path().join(STATUS_FILE);
        let content = std::fs::read(&path).unwrap();
        std::fs::write(&path, &content[..content.len() - 5]).unwrap();
        assert_eq!(last_status(dir.path()), Some(started));
        add_status(dir.path(), &ended).unwrap();
        assert_eq!(last_status(dir.path()), Some(ended));
    }
}
