//! The server under test: `skiff server` with its own directory and port.

use std::net::TcpListener;
use std::path::{Path, PathBuf};
use std::process::Command;
use std::time::{Duration, Instant};

use anyhow::{Context as _, Result, bail};
use tempfile::TempDir;
use testkit::Process;

use crate::client::Target;

/// Poll interval until the server is ready; also the error of that measurement.
const POLL_INTERVAL: Duration = Duration::from_millis(2);
const START_TIMEOUT: Duration = Duration::from_secs(60);

/// Dropping it kills the server and removes its data and everything its node created.
pub struct Server {
    pub target: Target,
    /// From exec to the first successful response of `/readyz`.
    pub ready_after: Duration,
    process: Process,
    dir: TempDir,
}

impl Server {
    /// Starts with empty data and without a scheduler: pods stay as they were written.
    pub async fn start(binary: &Path, dir: &Path) -> Result<Server> {
        Server::start_with(binary, dir, &["--disable-scheduler"]).await
    }

    /// Starts with empty data and additional flags, without a node.
    pub async fn start_with(binary: &Path, dir: &Path, flags: &[&str]) -> Result<Server> {
        Server::start_with_node(binary, dir, &[&["--disable-agent"], flags].concat()).await
    }

    /// Starts with empty data and a node.
    pub async fn start_with_node(binary: &Path, dir: &Path, flags: &[&str]) -> Result<Server> {
        let mut attempts = 0;
        loop {
            match Server::try_start(binary, dir, flags).await {
                // Another process bound the port after it was found to be free.
                Err(error) if attempts < 3 && error.to_string().contains("in use") => attempts += 1,
                other => return other,
            }
        }
    }

    async fn try_start(binary: &Path, dir: &Path, flags: &[&str]) -> Result<Server> {
        let dir = tempfile::Builder::new().prefix("skiff-bench-").tempdir_in(dir)?;
        let port = TcpListener::bind("127.0.0.1:0")?.local_addr()?.port();
        let kubeconfig = dir.path().join("kubeconfig.yaml");
        let mut command = Command::new(binary);
        command
            .args(["server", "--bind-address", "127.0.0.1", "--https-listen-port"])
            .arg(port.to_string())
            .arg("--data-dir")
            .arg(dir.path().join("data"))
            .arg("--write-kubeconfig")
            .arg(&kubeconfig)
            .args(flags);
        let start = Instant::now();
        let mut process = Process::spawn(&mut command)?;
        while start.elapsed() < START_TIMEOUT {
            if let Some(target) = connect_when_ready(&kubeconfig).await {
                return Ok(Server { target, ready_after: start.elapsed(), process, dir });
            }
            if !process.is_running()? {
                bail!("the server exited\n{}", process.log());
            }
            tokio::time::sleep(POLL_INTERVAL).await;
        }
        bail!("the server was not ready within {START_TIMEOUT:?}\n{}", process.log())
    }

    pub fn data_dir(&self) -> PathBuf {
        self.dir.path().join("data")
    }

    /// Directory of its node's pods.
    pub fn pods_dir(&self) -> PathBuf {
        self.data_dir().join("agent/pods")
    }

    pub fn pid(&self) -> u32 {
        self.process.id()
    }

    /// The output of the server so far.
    pub fn log(&self) -> String {
        self.process.log()
    }

    /// CPU seconds that the server has used so far, in user and kernel mode.
    pub fn cpu(&self) -> Result<f64> {
        let text = self.proc("stat")?;
        // The process name may contain any character, so the fields are counted from the last
        // parenthesis.
        let rest = text.rsplit_once(')').map_or("", |(_, rest)| rest);
        let fields: Vec<&str> = rest.split_whitespace().collect();
        let ticks = |at: usize| fields.get(at).and_then(|field| field.parse::<f64>().ok());
        let used = ticks(11).zip(ticks(12)).with_context(|| format!("no CPU time in {text:?}"))?;
        Ok((used.0 + used.1) / rustix::param::clock_ticks_per_second() as f64)
    }

    /// Resident memory in megabytes.
    pub fn memory(&self) -> Result<f64> {
        self.status("VmRSS:")
    }

    /// Peak resident memory in megabytes.
    pub fn max_memory(&self) -> Result<f64> {
        self.status("VmHWM:")
    }

    fn status(&self, name: &str) -> Result<f64> {
        let text = self.proc("status")?;
        let line = text.lines().find_map(|line| line.strip_prefix(name));
        let kib = line.and_then(|line| line.split_whitespace().next()?.parse::<f64>().ok());
        Ok(kib.with_context(|| format!("no {name} in /proc"))? * 1024.0 / 1e6)
    }

    fn proc(&self, file: &str) -> Result<String> {
        let path = format!("/proc/{}/{file}", self.process.id());
        std::fs::read_to_string(&path).with_context(|| format!("read {path}"))
    }
}

impl Drop for Server {
    fn drop(&mut self) {
        self.process.kill();
        testkit::cleanup_node(self.dir.path(), &self.pods_dir());
    }
}

/// The server's address and credentials, once `/readyz` succeeds.
async fn connect_when_ready(kubeconfig: &Path) -> Option<Target> {
    let target = Target::from_kubeconfig(&std::fs::read_to_string(kubeconfig).ok()?).ok()?;
    target.connect().await.ok()?.get("/readyz").await.ok()?;
    Some(target)
}

/// The `skiff` binary in the directory of this binary.
pub fn built_binary() -> Result<PathBuf> {
    let own = std::env::current_exe().context("cannot determine the path of this program")?;
    Ok(own.with_file_name("skiff"))
}
