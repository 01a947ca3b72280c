//! What is written down of pods and containers, so that a later skiff knows them. In the directory of a pod, and of each
//! of its containers below, is a file `record` with one of these, as protobuf since its main part is CRI's.

use std::io;
use std::path::Path;

use super::supervisor::write_file;
use crate::cri::{ContainerConfig, LinuxContainerResources, PodSandboxConfig};

const FILE: &str = "record";

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
    /// Its supervisor was told to end.
    #[prost(bool, tag = 5)]
    pub is_stopped: bool,
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
    /// What it may use, where that is no longer what it was made with.
    #[prost(message, optional, tag = 7)]
    pub resources: Option<LinuxContainerResources>,
}

pub fn write(directory: &Path, record: &impl prost::Message) -> io::Result<()> {
    write_file(&directory.join(FILE), &record.encode_to_vec())
}

pub fn read<T: prost::Message + Default>(directory: &Path) -> io::Result<T> {
    let bytes = std::fs::read(directory.join(FILE))?;
    if bytes.is_empty() {
        return Err(io::ErrorKind::InvalidData.into());
    }
    T::decode(&bytes[..]).map_err(|error| io::Error::new(io::ErrorKind::InvalidData, error))
}

/// Whether a failure to read one says that there is none.
pub fn is_none(error: &io::Error) -> bool {
    use io::ErrorKind::{InvalidData, NotADirectory, NotFound};
    matches!(error.kind(), InvalidData | NotADirectory | NotFound)
}
