//! Container runtimes: the trait [`Runtime`], which has the shape of CRI v1, and its implementations.
//! [`Remote`] is any CRI runtime over its socket; [`embedded`] needs nothing installed.
//!
//! The kubelet sees only [`Runtime`]. This crate must not know API objects: the kubelet converts pods
//! to CRI configuration. Start reading at [`Runtime`], then [`Remote`] or [`embedded`].

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

/// The error of a runtime call.
#[derive(Debug, thiserror::Error)]
pub enum Error {
    #[error("{call}: {message}")]
    Rejected { call: &'static str, code: ErrorCode, message: String },
    #[error("the container runtime at {socket} cannot be reached: is it running?")]
    Unreachable { socket: PathBuf, message: String },
}

/// The kinds of errors that callers distinguish.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum ErrorCode {
    NotFound,
    /// The call exceeded its timeout.
    Timeout,
    Unimplemented,
    Other,
}

impl Error {
    pub fn is_not_found(&self) -> bool {
        matches!(self, Error::Rejected { code: ErrorCode::NotFound, .. })
    }

    /// The message of the runtime, without the name of the call.
    pub fn message(&self) -> String {
        match self {
            Error::Rejected { message, .. } => message.clone(),
            Error::Unreachable { .. } => self.to_string(),
        }
    }
}

/// The poll interval of runtimes without events.
const DEFAULT_POLL_INTERVAL: Duration = Duration::from_secs(1);

pub type Result<T> = std::result::Result<T, Error>;

/// A container runtime. Calls can be repeated: what is already done is not an error.
#[async_trait]
pub trait Runtime: Send + Sync + 'static {
    async fn version(&self) -> Result<VersionResponse>;
    async fn status(&self) -> Result<StatusResponse>;
    /// The runtime's verbose status by topic, mostly JSON.
    async fn details(&self) -> Result<BTreeMap<String, String>> {
        Ok(BTreeMap::new())
    }
    /// Whether containers can use what is mounted in this process's mount namespace. Otherwise they
    /// would see only empty mount points.
    async fn shares_mount_namespace(&self) -> bool {
        true
    }
    /// Passes the node's pod CIDRs to the runtime.
    async fn set_pod_cidr(&self, cidr: &str) -> Result<()>;

    /// Waits until pods or containers may have changed. `since` is the result of the last call, 0 for
    /// the first. By default, for runtimes without events, it returns after the poll interval.
    async fn wait_for_change(&self, _since: u64) -> u64 {
        tokio::time::sleep(DEFAULT_POLL_INTERVAL).await;
        0
    }

    /// Removes what a killed runtime has left behind, and returns the number of removed objects.
    async fn remove_orphans(&self) -> Result<usize> {
        Ok(0)
    }

    /// Creates and starts a pod sandbox. Returns its ID.
    async fn run_sandbox(&self, config: &PodSandboxConfig, handler: &str) -> Result<String>;
    async fn stop_sandbox(&self, id: &str) -> Result<()>;
    async fn remove_sandbox(&self, id: &str) -> Result<()>;
    async fn sandbox_status(&self, id: &str) -> Result<PodSandboxStatus>;
    /// The sandboxes that have all of these labels.
    async fn sandboxes(&self, labels: &[(&str, &str)]) -> Result<Vec<PodSandbox>>;

    async fn create_container(
        &self,
        sandbox: &str,
        config: &ContainerConfig,
        sandbox_config: &PodSandboxConfig,
    ) -> Result<String>;
    async fn start_container(&self, id: &str) -> Result<()>;
    /// Sends the stop signal, and SIGKILL after `grace`.
    async fn stop_container(&self, id: &str, grace: Duration) -> Result<()>;
    async fn remove_container(&self, id: &str) -> Result<()>;
    async fn container_status(&self, id: &str) -> Result<ContainerStatus>;
    /// The containers that have all of these labels.
    async fn containers(&self, labels: &[(&str, &str)]) -> Result<Vec<Container>>;
    async fn update_resources(&self, id: &str, resources: &LinuxContainerResources) -> Result<()>;
    /// Opens a new log file after the old one was renamed.
    async fn reopen_log(&self, id: &str) -> Result<()>;
    async fn stats(&self) -> Result<Vec<ContainerStats>>;

    /// Runs a command and returns its output and exit code.
    async fn exec_sync(&self, id: &str, command: &[String], timeout: Duration) -> Result<ExecSyncResponse>;
    /// Returns the URL at which the command's streams are served.
    async fn exec(&self, request: &ExecRequest) -> Result<String>;
    async fn attach(&self, request: &cri::AttachRequest) -> Result<String>;
    async fn port_forward(&self, sandbox: &str, ports: &[i32]) -> Result<String>;

    async fn images(&self) -> Result<Vec<Image>>;
    async fn image(&self, image: &ImageSpec) -> Result<Option<Image>>;
    /// Returns the reference of the pulled image.
    async fn pull(
        &self,
        image: &ImageSpec,
        auth: Option<&AuthConfig>,
        sandbox: &PodSandboxConfig,
    ) -> Result<String>;
    async fn remove_image(&self, image: &ImageSpec) -> Result<()>;
    async fn image_filesystems(&self) -> Result<Vec<FilesystemUsage>>;
}
