//! How containers are run: a trait with the shape of CRI (DESIGN D7), CRI itself over its socket, and a runtime of our
//! own.
//!
//! The kubelet sees only [`Runtime`]. Knows no API objects: what a pod becomes in these terms is the kubelet's
//! business. Read [`Runtime`], then [`Remote`] or [`embedded`].

pub mod cri;
pub mod embedded;
pub mod orphans;
mod remote;
mod socket;

use std::collections::BTreeMap;
use std::path::PathBuf;
use std::time::Duration;

use async_trait::async_trait;
use cri::{
    AuthConfig, Container, ContainerConfig, ContainerStats, ContainerStatus, ExecRequest, ExecSyncResponse,
    FilesystemUsage, Image, ImageSpec, LinuxContainerResources, PodSandbox, PodSandboxConfig,
    PodSandboxStatus, StatusResponse, VersionResponse,
};

pub use embedded::Embedded;
pub use remote::Remote;
pub use socket::{GrpcClient, RpcError};
pub use tonic::Code as RefusalCode;

/// Why the runtime did not do as it was asked.
#[derive(Debug, thiserror::Error)]
pub enum Error {
    #[error("{call}: {message}")]
    Rejected { call: &'static str, code: ErrorCode, message: String },
    #[error("the container runtime at {socket} cannot be reached: is it running?")]
    Unreachable { socket: PathBuf, message: String },
}

/// What kind of refusal it is, as far as anybody cares.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum ErrorCode {
    NotFound,
    /// It took longer than was allowed.
    Timeout,
    Unimplemented,
    Other,
}

impl Error {
    pub fn is_not_found(&self) -> bool {
        matches!(self, Error::Rejected { code: ErrorCode::NotFound, .. })
    }

    /// What the runtime itself said, without who was asked for what.
    pub fn message(&self) -> String {
        match self {
            Error::Rejected { message, .. } => message.clone(),
            Error::Unreachable { .. } => self.to_string(),
        }
    }
}

/// How often a runtime is asked what it has that does not tell by itself.
const DEFAULT_POLL_INTERVAL: Duration = Duration::from_secs(1);

pub type Result<T> = std::result::Result<T, Error>;

/// Runs pods and containers. Every call may be repeated; what is done already is no failure.
#[async_trait]
pub trait Runtime: Send + Sync + 'static {
    async fn version(&self) -> Result<VersionResponse>;
    async fn status(&self) -> Result<StatusResponse>;
    /// What the runtime says of itself beyond what was agreed on, by topic, mostly JSON.
    async fn details(&self) -> Result<BTreeMap<String, String>> {
        Ok(BTreeMap::new())
    }
    /// Whether containers can be given what is mounted here. Elsewhere nobody would see more of it than an empty directory.
    async fn shares_mount_namespace(&self) -> bool {
        true
    }
    /// Tells which addresses this node's pods get, where the runtime cares.
    async fn set_pod_cidr(&self, cidr: &str) -> Result<()>;

    /// Waits until something may have happened to pods or containers since this answered last; 0 is for the first time.
    /// Most runtimes do not tell, so that it is time to look again after a while.
    async fn wait_for_change(&self, _since: u64) -> u64 {
        tokio::time::sleep(DEFAULT_POLL_INTERVAL).await;
        0
    }

    /// Removes what it has forgotten when it was killed, and says how much that was. For one that forgets nothing there
    /// is nothing to do.
    async fn remove_orphans(&self) -> Result<usize> {
        Ok(0)
    }

    /// Makes and starts what the containers of a pod share; answers with its id.
    async fn run_sandbox(&self, config: &PodSandboxConfig, handler: &str) -> Result<String>;
    async fn stop_sandbox(&self, id: &str) -> Result<()>;
    async fn remove_sandbox(&self, id: &str) -> Result<()>;
    async fn sandbox_status(&self, id: &str) -> Result<PodSandboxStatus>;
    /// Those with all of these labels.
    async fn sandboxes(&self, labels: &[(&str, &str)]) -> Result<Vec<PodSandbox>>;

    async fn create_container(
        &self,
        sandbox: &str,
        config: &ContainerConfig,
        sandbox_config: &PodSandboxConfig,
    ) -> Result<String>;
    async fn start_container(&self, id: &str) -> Result<()>;
    /// Asks the container to stop, and makes it after `grace`.
    async fn stop_container(&self, id: &str, grace: Duration) -> Result<()>;
    async fn remove_container(&self, id: &str) -> Result<()>;
    async fn container_status(&self, id: &str) -> Result<ContainerStatus>;
    /// Those with all of these labels.
    async fn containers(&self, labels: &[(&str, &str)]) -> Result<Vec<Container>>;
    async fn update_resources(&self, id: &str, resources: &LinuxContainerResources) -> Result<()>;
    /// Begins a new log file where the old one has been moved away.
    async fn reopen_log(&self, id: &str) -> Result<()>;
    async fn stats(&self) -> Result<Vec<ContainerStats>>;

    /// Runs a command to its end and keeps what it says.
    async fn exec_sync(&self, id: &str, command: &[String], timeout: Duration) -> Result<ExecSyncResponse>;
    /// The address at which a command's streams can be had.
    async fn exec(&self, request: &ExecRequest) -> Result<String>;
    async fn attach(&self, request: &cri::AttachRequest) -> Result<String>;
    async fn port_forward(&self, sandbox: &str, ports: &[i32]) -> Result<String>;

    async fn images(&self) -> Result<Vec<Image>>;
    async fn image(&self, image: &ImageSpec) -> Result<Option<Image>>;
    /// Answers with the reference the image can be used by.
    async fn pull(
        &self,
        image: &ImageSpec,
        auth: Option<&AuthConfig>,
        sandbox: &PodSandboxConfig,
    ) -> Result<String>;
    async fn remove_image(&self, image: &ImageSpec) -> Result<()>;
    async fn image_filesystems(&self) -> Result<Vec<FilesystemUsage>>;
}
