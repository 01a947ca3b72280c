//! What is written down of pods and containers, so that a later skiff knows them. In the directory of a pod, and of each
//! of its containers below, is a file `record` with one of these, as protobuf since its main part is CRI's. How a container
//! is, which its supervisor writes, is beside it in `status.json`.

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
    /// It has no network yet.
    #[prost(bool, tag = 6)]
    pub is_unfinished: bool,
    /// Its ports of the machine are ours to open: it was made by somebody else's kubelet.
    #[prost(bool, tag = 7)]
    pub opens_ports: bool,
}

#[derive(Clone, PartialEq, prost::Message)]
pub struct ContainerRecord {
    #[prost(message, optional, tag = 1)]
    pub config: Option<ContainerConfig>,
    #[prost(int64, tag = 2)]
    pub created: i64,
    /// The image's id.
    #[prost(string, tag = 3)]
    pub image: String,
    /// By which the image can be pulled again.
    #[prost(string, tag = 4)]
    pub image_ref: String,
    #[prost(string, repeated, tag = 5)]
    pub layers: Vec<String>,
    #[prost(int32, tag = 6)]
    pub stop_signal: i32,
    /// What it may use, where that is no longer as it was made.
    #[prost(message, optional, tag = 7)]
    pub resources: Option<LinuxContainerResources>,
}

/// Writes one down, so that it is there as a whole or not at all.
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

/// Adds how a container is now, as a line of its own: less work than another file, and what was true before is not lost.
pub fn add_status(directory: &Path, status: &RunStatus) -> io::Result<()> {
    let status = serde_json::to_string(status).expect("a status has only numbers and strings");
    // Of the line before only a part may have found room on the disk.
    let line = format!("\n{status}\n");
    let file = std::fs::File::options().append(true).create(true).open(directory.join(STATUS_FILE));
    file?.write_all(line.as_bytes())
}

/// How a container was last; `None` of one that was not started.
pub fn last_status(directory: &Path) -> Option<RunStatus> {
    let text = std::fs::read(directory.join(STATUS_FILE)).ok()?;
    // The power may have been cut in the middle of the last.
    text.split(|byte| *byte == b'\n').rev().find_map(|line| serde_json::from_slice(line).ok())
}

/// Whether a failure to read one says that there is none.
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
