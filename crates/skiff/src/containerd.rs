//! `--container-runtime-endpoint containerd`: uses the host's containerd if it runs, else starts one if
//! it is installed.
//!
//! The managed containerd keeps its state under the data directory. It stops with skiff, but its
//! containers keep running, and the next containerd takes them over.

mod pause;

use std::ffi::OsStr;
use std::fs::File;
use std::io;
use std::os::unix::net::UnixStream;
use std::os::unix::process::CommandExt as _;
use std::path::{Path, PathBuf};
use std::process::{Command, Stdio};
use std::time::{Duration, Instant};

use anyhow::{Context as _, bail, ensure};
use rustix::process::{Pid, Signal, kill_process};
use tokio::sync::watch;

/// Socket of the host's containerd on Debian and most other distributions.
const SYSTEM_SOCKET: &str = "/run/containerd/containerd.sock";
/// Directories of the CNI plugins, by distribution.
pub const CNI_BIN_DIRS: [&str; 2] = ["/usr/lib/cni", "/opt/cni/bin"];
const SANDBOX_IMAGE: &str = "registry.k8s.io/pause:3.10.1";
const START_TIMEOUT: Duration = Duration::from_secs(30);
const RESTART_DELAY: Duration = Duration::from_secs(1);
/// Without CAP_SYS_RESOURCE, a process cannot lower `oom_score_adj`.
pub const CAP_SYS_RESOURCE: u32 = 24;

/// The socket of a containerd that accepts connections: the managed one, else the host's. Starts
/// nothing.
pub fn running_socket(data_dir: &Path) -> Option<String> {
    let own_socket = socket(data_dir);
    [own_socket, PathBuf::from(SYSTEM_SOCKET)]
        .into_iter()
        .find(|socket| UnixStream::connect(socket).is_ok())
        .map(|socket| socket.display().to_string())
}

/// Whether the host's own containerd accepts connections.
pub fn is_running() -> bool {
    UnixStream::connect(SYSTEM_SOCKET).is_ok()
}

/// The socket of the host's containerd, or of a managed one started here. `None` if containerd is not
/// installed.
pub async fn ensure_running(
    data_dir: &Path,
    shutdown: watch::Receiver<bool>,
) -> anyhow::Result<Option<String>> {
    if is_running() {
        return Ok(Some(SYSTEM_SOCKET.to_owned()));
    }
    let Some(program) = find_program("containerd") else { return Ok(None) };
    let managed = ManagedContainerd { program, dir: dir(data_dir) };
    let socket = socket(data_dir);
    ensure!(socket.as_os_str().len() < 100, "{} is too long for a Unix socket path", socket.display());
    managed.write_config()?;
    managed.stop_previous().await;
    tokio::spawn(managed.clone().keep_running(shutdown));
    let started = Instant::now();
    while UnixStream::connect(&socket).is_err() {
        if started.elapsed() > START_TIMEOUT {
            bail!("containerd is not ready in time, see {}", managed.log().display());
        }
        tokio::time::sleep(Duration::from_millis(20)).await;
    }
    if let Some(archive) = pause::archive(managed.sandbox_image())? {
        let path = managed.dir.join("pause.tar");
        std::fs::write(&path, archive).with_context(|| format!("cannot write {}", path.display()))?;
        import(&socket.display().to_string(), &path)?;
    }
    Ok(Some(socket.display().to_string()))
}

/// Stops the managed containerd of a data directory, its shims and its containers.
pub async fn stop_all(data_dir: &Path) -> io::Result<()> {
    // containerd and its shims have the absolute path on their command lines.
    let data_dir = std::path::absolute(data_dir)?;
    let managed = ManagedContainerd { program: PathBuf::new(), dir: dir(&data_dir) };
    if managed.dir.exists() {
        managed.stop_previous().await;
        runtime::orphans::kill_all(&socket(&data_dir));
    }
    Ok(())
}

/// Imports an image archive into the CRI namespace of containerd. Returns the output of `ctr`.
pub fn import(socket: &str, archive: &Path) -> anyhow::Result<String> {
    ctr(socket, &["import".as_ref(), archive.as_os_str()])
        .with_context(|| format!("cannot import {}", archive.display()))
}

/// Exports images from the CRI namespace of containerd to an archive.
pub fn export(socket: &str, archive: &Path, names: &[String]) -> anyhow::Result<()> {
    let names = names.iter().map(|name| name.as_ref());
    let args: Vec<&OsStr> = ["export".as_ref(), archive.as_os_str()].into_iter().chain(names).collect();
    ctr(socket, &args).with_context(|| format!("cannot write {}", archive.display()))?;
    Ok(())
}

fn ctr(socket: &str, args: &[&OsStr]) -> anyhow::Result<String> {
    let output = Command::new("ctr")
        .args(["--address", socket, "--namespace", "k8s.io", "images"])
        .args(args)
        .output()
        .context("cannot run ctr, which comes with containerd")?;
    ensure!(output.status.success(), "{}", String::from_utf8_lossy(&output.stderr).trim_end());
    Ok(String::from_utf8_lossy(&output.stdout).into_owned())
}

fn dir(data_dir: &Path) -> PathBuf {
    data_dir.join("agent/containerd")
}

fn socket(data_dir: &Path) -> PathBuf {
    dir(data_dir).join("containerd.sock")
}

/// A containerd that skiff starts, with all its state in `dir`.
#[derive(Clone)]
struct ManagedContainerd {
    program: PathBuf,
    dir: PathBuf,
}

impl ManagedContainerd {
    fn log(&self) -> PathBuf {
        self.dir.join("containerd.log")
    }

    fn sandbox_image(&self) -> &'static str {
        if pause::IS_SUPPORTED { pause::IMAGE } else { SANDBOX_IMAGE }
    }

    fn write_config(&self) -> anyhow::Result<()> {
        std::fs::create_dir_all(&self.dir)
            .with_context(|| format!("cannot create {}", self.dir.display()))?;
        let cni_bin_dir = CNI_BIN_DIRS.into_iter().find(|dir| Path::new(dir).join("ptp").exists());
        if cni_bin_dir.is_none() {
            tracing::warn!(
                "pods have no network: no CNI plugins found (install containernetworking-plugins)"
            );
        }
        let text = format!(
            r#"version = 2
root = "{dir}/root"
state = "{dir}/state"
disabled_plugins = ["io.containerd.internal.v1.opt"]
[grpc]
  address = "{dir}/containerd.sock"
[plugins."io.containerd.grpc.v1.cri"]
  sandbox_image = "{image}"
  restrict_oom_score_adj = {restrict}
  netns_mounts_under_state_dir = true
  [plugins."io.containerd.grpc.v1.cri".cni]
    conf_dir = "{dir}/net.d"
    bin_dir = "{cni_bin_dir}"
"#,
            dir = self.dir.display(),
            image = self.sandbox_image(),
            restrict = !has_capability(CAP_SYS_RESOURCE),
            cni_bin_dir = cni_bin_dir.unwrap_or(CNI_BIN_DIRS[0]),
        );
        let path = self.dir.join("config.toml");
        std::fs::write(&path, text).with_context(|| format!("cannot write {}", path.display()))
    }

    /// Starts containerd, and restarts it whenever it exits.
    async fn keep_running(self, mut shutdown: watch::Receiver<bool>) {
        while !*shutdown.borrow() {
            let child = match self.spawn() {
                Ok(child) => child,
                Err(error) => {
                    tracing::error!(%error, program = %self.program.display(), "cannot start containerd");
                    return;
                }
            };
            let terminate_guard = TerminateOnDrop(i32::try_from(child.id()).ok().and_then(Pid::from_raw));
            let (exit_sender, ended) = tokio::sync::oneshot::channel();
            // `wait` runs on a thread of its own, not on the blocking pool: the async runtime would
            // wait for that at shutdown.
            let mut child = child;
            std::thread::spawn(move || {
                let _ = child.wait();
                let _ = exit_sender.send(());
            });
            tokio::select! {
                _ = ended => tracing::warn!(log = %self.log().display(), "containerd exited, restarting it"),
                _ = shutdown.wait_for(|stop| *stop) => return,
            }
            terminate_guard.release();
            tokio::time::sleep(RESTART_DELAY).await;
        }
    }

    fn spawn(&self) -> io::Result<std::process::Child> {
        let log = File::options().create(true).append(true).open(self.log())?;
        let child = Command::new(&self.program)
            .arg("--config")
            .arg(self.dir.join("config.toml"))
            .stdin(Stdio::null())
            .stdout(log.try_clone()?)
            .stderr(log)
            // A process group of its own: Ctrl-C in the terminal must not reach containerd. skiff sends
            // SIGTERM itself.
            .process_group(0)
            .spawn()?;
        std::fs::write(self.dir.join("containerd.pid"), child.id().to_string())?;
        Ok(child)
    }

    /// Stops the containerd of a previous skiff: its configuration may be outdated, and it is not a
    /// child of this process, so its exit would go unnoticed. Its containers keep running.
    async fn stop_previous(&self) {
        let pid = std::fs::read_to_string(self.dir.join("containerd.pid")).ok();
        let Some(pid) = pid.and_then(|text| text.trim().parse().ok()).and_then(Pid::from_raw) else { return };
        // The PID may have been reused, so the command line is checked for our configuration file.
        let config = self.dir.join("config.toml").display().to_string();
        let is_same_process = || {
            let command =
                std::fs::read(format!("/proc/{}/cmdline", pid.as_raw_nonzero())).unwrap_or_default();
            String::from_utf8_lossy(&command).contains(&config)
        };
        let started = Instant::now();
        while is_same_process() && started.elapsed() < START_TIMEOUT {
            let _ = kill_process(pid, Signal::TERM);
            tokio::time::sleep(Duration::from_millis(50)).await;
        }
    }
}

/// Sends SIGTERM to a process when dropped, also when the async runtime shuts down.
struct TerminateOnDrop(Option<Pid>);

impl TerminateOnDrop {
    /// Disarms it after the process has exited, because its PID may be reused.
    fn release(mut self) {
        self.0 = None;
    }
}

impl Drop for TerminateOnDrop {
    fn drop(&mut self) {
        let _ = self.0.map(|pid| kill_process(pid, Signal::TERM));
    }
}

/// Searches `PATH` for a program.
pub fn find_program(name: &str) -> Option<PathBuf> {
    let path = std::env::var_os("PATH").unwrap_or_default();
    std::env::split_paths(&path).map(|dir| dir.join(name)).find(|program| program.exists())
}

/// Whether this process has a capability in its effective set. Returns true if that is unknown.
pub fn has_capability(number: u32) -> bool {
    let status = std::fs::read_to_string("/proc/self/status").unwrap_or_default();
    let set = status.lines().find_map(|line| line.strip_prefix("CapEff:"));
    let set = set.and_then(|set| u64::from_str_radix(set.trim(), 16).ok());
    set.is_none_or(|set| set >> number & 1 == 1)
}
