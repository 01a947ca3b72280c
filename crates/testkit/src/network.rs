//! A network namespace for a test. Its content is isolated and disappears with it.

use std::path::PathBuf;
use std::process::Command;
use std::time::Duration;

use anyhow::Result;

use crate::process::Process;

const START_TIMEOUT: Duration = Duration::from_secs(10);

/// A network namespace with only a loopback link. It exists until this is dropped.
pub struct Network {
    process: Process,
}

impl Network {
    pub fn new() -> Result<Network> {
        let mut command = Command::new("unshare");
        command.args(["--net", "sh", "-c", "ip link set lo up && echo ready && exec sleep infinity"]);
        let mut process = Process::spawn(&mut command)?;
        process.wait_until_log(START_TIMEOUT, |log: &str| log.contains("ready").then_some(()))?;
        Ok(Network { process })
    }

    pub fn path(&self) -> PathBuf {
        PathBuf::from(format!("/proc/{}/ns/net", self.process.id()))
    }
}
