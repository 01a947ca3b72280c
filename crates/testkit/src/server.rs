//! The server under test.

use std::ffi::OsStr;
use std::net::TcpListener;
use std::path::{Path, PathBuf};
use std::process::{Command, Stdio};
use std::time::Duration;

use anyhow::{Context as _, Result};
use tempfile::TempDir;

use crate::{Containerd, Http, Network, Process};

/// A cold start takes about a second; a busy machine may take much longer.
const START_TIMEOUT: Duration = Duration::from_secs(60);
const STOP_TIMEOUT: Duration = Duration::from_secs(30);
/// The controllers that namespaces need in tests of the API. Other controllers and the scheduler would
/// modify the objects of a test while it runs. Tests that need more pass `--controllers` themselves.
const CONTROLLERS_FLAG: &str = "--controllers=clusterrole-aggregation-controller,namespace-controller,persistentvolume-protection-controller,persistentvolumeclaim-protection-controller,root-ca-certificate-publisher-controller,serviceaccount-controller";
/// The message that Rust prints when a thread or task panics.
const PANIC_MESSAGE: &str = "' panicked at ";

/// `skiff server --disable-agent` with its own data and port. Dropping it kills the server and removes
/// its data.
pub struct Server {
    dir: TempDir,
    port: u16,
    flags: Vec<String>,
    /// Its network namespace, if it is not that of this process.
    network: Option<PathBuf>,
    /// `None` between a kill and a restart.
    process: Option<Process>,
}

/// The output and exit code of a command.
#[derive(Debug)]
pub struct Output {
    pub stdout: String,
    pub stderr: String,
    /// -1 if a signal ended the command.
    pub code: i32,
}

/// Flags of a node under test that disable eviction and image garbage collection, because the disk of
/// this machine may be almost full.
pub const NO_EVICTION_FLAGS: [&str; 2] =
    ["--kubelet-arg=eviction-hard=memory.available<0", "--kubelet-arg=image-gc-high-threshold=100"];

/// Whether kubectl is installed; tests that need it are skipped otherwise.
pub fn has_kubectl() -> bool {
    Command::new("kubectl").args(["version", "--client"]).output().is_ok_and(|output| output.status.success())
}

impl Server {
    /// Starts a server and waits until it is ready.
    #[track_caller]
    pub fn start() -> Server {
        Server::start_with(&[])
    }

    /// The same with more flags.
    #[track_caller]
    pub fn start_with(flags: &[&str]) -> Server {
        Server::start_in(None, flags)
    }

    /// Starts a server with a node that runs pods in this containerd. Both are in a network namespace
    /// of their own, which only [`Server::kubectl`] and [`Server::command`] can reach.
    #[track_caller]
    pub fn start_with_node(containerd: &Containerd, flags: &[&str]) -> Server {
        let socket = containerd.socket().display().to_string();
        let node = ["--container-runtime-endpoint", &socket, "--kubelet-port", "0"];
        Server::start_in(Some(containerd.network()), &[&node[..], &NO_EVICTION_FLAGS, flags].concat())
    }

    /// Starts a server with a node that uses the embedded runtime, in a network namespace of its own.
    #[track_caller]
    pub fn start_with_pods(network: &Network, flags: &[&str]) -> Server {
        Server::start_in(
            Some(network.path()),
            &[&["--kubelet-port", "0"], &NO_EVICTION_FLAGS[..], flags].concat(),
        )
    }

    /// Runs the skiff binary with these arguments until it exits.
    #[track_caller]
    pub fn skiff(&self, args: &[&str]) -> Output {
        let program = binary().unwrap_or_else(|error| panic!("{error:#}"));
        output(Command::new(program).args(args), "").unwrap_or_else(|error| panic!("{error:#}"))
    }

    #[track_caller]
    fn start_in(network: Option<PathBuf>, flags: &[&str]) -> Server {
        let flags: Vec<String> = flags.iter().map(ToString::to_string).collect();
        let mut attempts = 0;
        loop {
            let mut server =
                Server::new(network.clone(), flags.clone()).unwrap_or_else(|error| panic!("{error:#}"));
            match server.run() {
                Ok(()) => return server,
                // Another process bound the port after it was found to be free.
                Err(error) if attempts < 3 && error.to_string().contains("in use") => attempts += 1,
                Err(error) => panic!("{error:#}"),
            }
        }
    }

    /// The administrator's kubeconfig.
    pub fn kubeconfig(&self) -> PathBuf {
        self.dir.path().join("kubeconfig.yaml")
    }

    pub fn data_dir(&self) -> PathBuf {
        self.dir.path().join("data")
    }

    pub fn url(&self) -> String {
        format!("https://127.0.0.1:{}", self.port)
    }

    /// The PID of the server, while it runs.
    pub fn pid(&self) -> Option<u32> {
        self.process.as_ref().map(Process::id)
    }

    /// The output of the server since its last start.
    pub fn log(&self) -> String {
        self.process.as_ref().map(Process::log).unwrap_or_default()
    }

    /// A client with the kubeconfig's client certificate.
    #[track_caller]
    pub fn http(&self) -> Http {
        self.client(Http::from_kubeconfig).unwrap_or_else(|error| panic!("{error:#}"))
    }

    /// A client without a certificate.
    #[track_caller]
    pub fn anonymous(&self) -> Http {
        self.client(Http::anonymous).unwrap_or_else(|error| panic!("{error:#}"))
    }

    #[track_caller]
    pub fn kubectl(&self, args: &[&str]) -> Output {
        self.kubectl_with(args, "")
    }

    /// kubectl with this standard input, for `-f -`.
    #[track_caller]
    pub fn kubectl_with(&self, args: &[&str], stdin: &str) -> Output {
        output(self.kubectl_command().args(args), stdin)
            .unwrap_or_else(|error| panic!("kubectl {}: {error:#}", args.join(" ")))
    }

    /// kubectl without arguments.
    pub fn kubectl_command(&self) -> Command {
        let mut command = self.command("kubectl");
        // A separate home directory: the cache and configuration of the user must not affect the test.
        command.env("KUBECONFIG", self.kubeconfig()).env("HOME", self.dir.path());
        command
    }

    /// A command in the server's network namespace.
    pub fn command(&self, program: impl AsRef<OsStr>) -> Command {
        let Some(network) = &self.network else { return Command::new(program) };
        let mut command = Command::new("nsenter");
        command.arg(format!("--net={}", network.display())).arg("--").arg(program);
        command
    }

    /// SIGKILL: acknowledged writes must survive it.
    #[track_caller]
    pub fn kill9(&mut self) {
        self.check_log();
        self.process = None;
    }

    /// SIGTERM; the server must exit successfully.
    #[track_caller]
    pub fn stop(&mut self) {
        if let Some(mut process) = self.process.take() {
            let ended = process.terminate(STOP_TIMEOUT).unwrap_or_else(|error| panic!("{error:#}"));
            assert!(ended.success(), "the server exited with {ended}\n{}", process.log());
            assert!(!process.log().contains(PANIC_MESSAGE), "{}", process.log());
        }
    }

    /// Stops the server if it runs, and starts it again with the same data and port.
    #[track_caller]
    pub fn restart(&mut self) {
        self.stop();
        self.run().unwrap_or_else(|error| panic!("{error:#}"));
    }

    fn new(network: Option<PathBuf>, flags: Vec<String>) -> Result<Server> {
        let dir = tempfile::Builder::new()
            .prefix("skiff-test-")
            .tempdir()
            .context("cannot create a temporary directory")?;
        Ok(Server { dir, port: free_port()?, flags, network, process: None })
    }

    fn run(&mut self) -> Result<()> {
        let mut command = self.command(binary()?);
        command.arg("server");
        if self.network.is_none() {
            command.arg("--disable-agent");
        }
        command
            .arg("--data-dir")
            .arg(self.data_dir())
            .arg("--write-kubeconfig")
            .arg(self.kubeconfig())
            .args(["--bind-address", "127.0.0.1", "--https-listen-port", &self.port.to_string()])
            .args(&self.flags);
        if !self.flags.iter().any(|flag| flag.starts_with("--controllers")) {
            command.args([CONTROLLERS_FLAG, "--disable-scheduler"]);
        }
        if self.network.is_some() {
            let mut process = Process::spawn(&mut command)?;
            let ready = |log: &str| log.contains("kubeconfig=").then_some(());
            process.wait_until_log(START_TIMEOUT, ready)?;
            self.process = Some(process);
            return Ok(());
        }
        let process = self.process.insert(Process::spawn(&mut command)?);
        let kubeconfig = self.dir.path().join("kubeconfig.yaml");
        let is_ready = || {
            let text = std::fs::read_to_string(&kubeconfig).ok()?;
            let http = Http::from_kubeconfig(&text).ok()?;
            (http.get("/readyz").ok()?.status == 200 && namespaces_are_ready(&http)?).then_some(())
        };
        process.wait_until(START_TIMEOUT, is_ready)
    }

    /// Fails if a task has panicked, which no request might reveal.
    #[track_caller]
    fn check_log(&self) {
        let log = self.log();
        assert!(!log.contains(PANIC_MESSAGE), "the server panicked\n{log}");
    }

    fn client(&self, make: fn(&str) -> Result<Http>) -> Result<Http> {
        let path = self.kubeconfig();
        make(&std::fs::read_to_string(&path).with_context(|| format!("read {}", path.display()))?)
    }
}

impl Drop for Server {
    fn drop(&mut self) {
        let log = self.log();
        self.process = None;
        let mut remaining = Vec::new();
        if self.network.is_some() {
            crate::cleanup_node(self.dir.path(), &self.data_dir().join("agent/pods"));
            remaining = crate::remaining_state(self.dir.path());
        }
        if !std::thread::panicking() {
            assert!(!log.contains(PANIC_MESSAGE), "the server panicked\n{log}");
            assert!(remaining.is_empty(), "the node left resources behind: {remaining:#?}");
        }
    }
}

impl Output {
    /// The standard output of a command that must succeed.
    #[track_caller]
    pub fn ok(self) -> String {
        assert_eq!(self.code, 0, "{}{}", self.stdout, self.stderr);
        self.stdout
    }
}

/// Whether every namespace has its default objects, so that none of them appears in the middle of a
/// test.
fn namespaces_are_ready(http: &Http) -> Option<bool> {
    let count = |path: &str| Some(http.get(path).ok()?.json()["items"].as_array()?.len());
    let namespaces = count("/api/v1/namespaces")?;
    let certificates = count("/api/v1/configmaps?fieldSelector=metadata.name%3Dkube-root-ca.crt")?;
    let accounts = count("/api/v1/serviceaccounts?fieldSelector=metadata.name%3Ddefault")?;
    Some(namespaces > 0 && certificates >= namespaces && accounts >= namespaces)
}

/// Runs a command until it exits. A thread writes its input, so that neither side blocks the other.
fn output(command: &mut Command, stdin: &str) -> Result<Output> {
    let program = command.get_program().display().to_string();
    let mut child = command
        .stdin(Stdio::piped())
        .stdout(Stdio::piped())
        .stderr(Stdio::piped())
        .spawn()
        .with_context(|| format!("cannot start {program}"))?;
    let input = child.stdin.take();
    let text = stdin.to_owned();
    let stdin_writer = std::thread::spawn(move || {
        // A command that does not read its input closes the pipe, which is not an error here.
        input.map(|mut input| std::io::Write::write_all(&mut input, text.as_bytes()))
    });
    let output = child.wait_with_output().with_context(|| format!("cannot wait for {program}"))?;
    let _ = stdin_writer.join();
    Ok(Output {
        stdout: String::from_utf8_lossy(&output.stdout).into_owned(),
        stderr: String::from_utf8_lossy(&output.stderr).into_owned(),
        code: output.status.code().unwrap_or(-1),
    })
}

/// A loopback port that is free at the time of the call.
fn free_port() -> Result<u16> {
    let listener = TcpListener::bind("127.0.0.1:0").context("no free port")?;
    Ok(listener.local_addr()?.port())
}

/// The `skiff` binary under test: from `SKIFF_BIN` (a release build, for example), else the one that
/// cargo names, else the one in the target directory of the test.
pub fn binary() -> Result<PathBuf> {
    for name in ["SKIFF_BIN", "NEXTEST_BIN_EXE_skiff", "CARGO_BIN_EXE_skiff"] {
        if let Some(path) = std::env::var_os(name) {
            return Ok(path.into());
        }
    }
    let test = std::env::current_exe().context("cannot determine the path of the test binary")?;
    binary_for_test(&test).with_context(|| {
        format!("no skiff binary next to {}: run cargo build --package skiff", test.display())
    })
}

fn binary_for_test(test: &Path) -> Option<PathBuf> {
    let path = test.parent()?.parent()?.join("skiff");
    path.is_file().then_some(path)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn output_passes_stdin_and_returns_exit_code() {
        let long = "x".repeat(1 << 20);
        let run = output(Command::new("sh").args(["-c", "cat; echo err >&2; exit 3"]), &long).unwrap();
        assert_eq!((run.stdout.len(), run.stderr.as_str(), run.code), (1 << 20, "err\n", 3));
        assert_eq!(output(Command::new("true").arg("x"), &long).unwrap().code, 0);
        assert_eq!(output(Command::new("sh").args(["-c", "kill -9 $$"]), "").unwrap().code, -1);
    }

    #[test]
    fn binary_is_in_target_dir_of_test() {
        let dir = tempfile::tempdir().unwrap();
        let test = dir.path().join("debug/deps/some_test-0123");
        assert_eq!(binary_for_test(&test), None);
        std::fs::create_dir_all(test.parent().unwrap()).unwrap();
        std::fs::write(dir.path().join("debug/skiff"), "").unwrap();
        assert_eq!(binary_for_test(&test), Some(dir.path().join("debug/skiff")));
    }
}
