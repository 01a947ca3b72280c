//! The server under test.

use std::ffi::OsStr;
use std::net::TcpListener;
use std::path::{Path, PathBuf};
use std::process::{Command, Stdio};
use std::time::Duration;

use anyhow::{Context as _, Result};
use tempfile::TempDir;

use crate::{Containerd, Http, Network, Process};

/// A cold start takes about a second; a busy machine may take its time.
const START_TIMEOUT: Duration = Duration::from_secs(60);
const STOP_TIMEOUT: Duration = Duration::from_secs(30);
/// The controllers without which namespaces are not what tests of the API expect; the others would change the
/// objects of a test while it looks at them, and so would the scheduler. A test that wants more says
/// `--controllers` itself.
const CONTROLLERS_FLAG: &str = "--controllers=clusterrole-aggregation-controller,namespace-controller,persistentvolume-protection-controller,persistentvolumeclaim-protection-controller,root-ca-certificate-publisher-controller,serviceaccount-controller";
/// What Rust writes when a thread or a task panics.
const PANIC_MESSAGE: &str = "' panicked at ";

/// `skiff server --disable-agent` with its own data and port. Killed, and its data removed, on drop.
pub struct Server {
    dir: TempDir,
    port: u16,
    flags: Vec<String>,
    /// The network it is in, where it is not this process's.
    network: Option<PathBuf>,
    /// `None` between a kill and a restart.
    process: Option<Process>,
}

/// What a command printed and how it ended.
#[derive(Debug)]
pub struct Output {
    pub stdout: String,
    pub stderr: String,
    /// -1 when a signal ended it.
    pub code: i32,
}

/// For a node under test: pods are made and images kept however full the disk is, and whatever memory there is.
pub const NO_EVICTION_FLAGS: [&str; 2] =
    ["--kubelet-arg=eviction-hard=memory.available<0", "--kubelet-arg=image-gc-high-threshold=100"];

/// Whether kubectl can be called; a test without it skips with a word.
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

    /// A server with a node that runs pods on this containerd; both are in a network of their own, into which
    /// only [`Server::kubectl`] and [`Server::command`] reach.
    #[track_caller]
    pub fn start_with_node(containerd: &Containerd, flags: &[&str]) -> Server {
        let socket = containerd.socket().display().to_string();
        let node = ["--container-runtime-endpoint", &socket, "--kubelet-port", "0"];
        Server::start_in(Some(containerd.network()), &[&node[..], &NO_EVICTION_FLAGS, flags].concat())
    }

    /// A server with a node that runs pods by itself, in a network of its own.
    #[track_caller]
    pub fn start_with_pods(network: &Network, flags: &[&str]) -> Server {
        Server::start_in(
            Some(network.path()),
            &[&["--kubelet-port", "0"], &NO_EVICTION_FLAGS[..], flags].concat(),
        )
    }

    /// The program under test with these arguments, to its end.
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
                // Somebody else took the port between our looking and the server's binding it.
                Err(error) if attempts < 3 && error.to_string().contains("in use") => attempts += 1,
                Err(error) => panic!("{error:#}"),
            }
        }
    }

    /// The file that lets clients in.
    pub fn kubeconfig(&self) -> PathBuf {
        self.dir.path().join("kubeconfig.yaml")
    }

    pub fn data_dir(&self) -> PathBuf {
        self.dir.path().join("data")
    }

    pub fn url(&self) -> String {
        format!("https://127.0.0.1:{}", self.port)
    }

    /// The server's process, while it runs.
    pub fn pid(&self) -> Option<u32> {
        self.process.as_ref().map(Process::id)
    }

    /// What the server has written since it was last started.
    pub fn log(&self) -> String {
        self.process.as_ref().map(Process::log).unwrap_or_default()
    }

    /// A client with the kubeconfig's certificate.
    #[track_caller]
    pub fn http(&self) -> Http {
        self.client(Http::from_kubeconfig).unwrap_or_else(|error| panic!("{error:#}"))
    }

    /// A client without any.
    #[track_caller]
    pub fn anonymous(&self) -> Http {
        self.client(Http::anonymous).unwrap_or_else(|error| panic!("{error:#}"))
    }

    #[track_caller]
    pub fn kubectl(&self, args: &[&str]) -> Output {
        self.kubectl_with(args, "")
    }

    /// kubectl with this on its standard input, for `-f -`.
    #[track_caller]
    pub fn kubectl_with(&self, args: &[&str], stdin: &str) -> Output {
        output(self.kubectl_command().args(args), stdin)
            .unwrap_or_else(|error| panic!("kubectl {}: {error:#}", args.join(" ")))
    }

    /// kubectl without arguments yet.
    pub fn kubectl_command(&self) -> Command {
        let mut command = self.command("kubectl");
        // A home of its own, so that no cache or configuration of the user's plays in.
        command.env("KUBECONFIG", self.kubeconfig()).env("HOME", self.dir.path());
        command
    }

    /// A command where the server is.
    pub fn command(&self, program: impl AsRef<OsStr>) -> Command {
        let Some(network) = &self.network else { return Command::new(program) };
        let mut command = Command::new("nsenter");
        command.arg(format!("--net={}", network.display())).arg("--").arg(program);
        command
    }

    /// SIGKILL: what was answered must survive this.
    #[track_caller]
    pub fn kill9(&mut self) {
        self.check_log();
        self.process = None;
    }

    /// SIGTERM and a proper end.
    #[track_caller]
    pub fn stop(&mut self) {
        if let Some(mut process) = self.process.take() {
            let ended = process.terminate(STOP_TIMEOUT).unwrap_or_else(|error| panic!("{error:#}"));
            assert!(ended.success(), "the server ended with {ended}\n{}", process.log());
            assert!(!process.log().contains(PANIC_MESSAGE), "{}", process.log());
        }
    }

    /// Stops the server if it runs, and starts it again on the same data and port.
    #[track_caller]
    pub fn restart(&mut self) {
        self.stop();
        self.run().unwrap_or_else(|error| panic!("{error:#}"));
    }

    fn new(network: Option<PathBuf>, flags: Vec<String>) -> Result<Server> {
        let dir =
            tempfile::Builder::new().prefix("skiff-test-").tempdir().context("cannot make a directory")?;
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

    /// A task that panicked may go unnoticed by every request.
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
            assert!(remaining.is_empty(), "the node has left something behind: {remaining:#?}");
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

/// Whether every namespace has what the server puts into it, so that nothing turns up in the middle of a test.
fn namespaces_are_ready(http: &Http) -> Option<bool> {
    let count = |path: &str| Some(http.get(path).ok()?.json()["items"].as_array()?.len());
    let namespaces = count("/api/v1/namespaces")?;
    let certificates = count("/api/v1/configmaps?fieldSelector=metadata.name%3Dkube-root-ca.crt")?;
    let accounts = count("/api/v1/serviceaccounts?fieldSelector=metadata.name%3Ddefault")?;
    Some(namespaces > 0 && certificates >= namespaces && accounts >= namespaces)
}

/// Runs a command to its end. A thread feeds its input, so that neither side waits for the other.
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
        // A command that does not read its input closes it, which is no error here.
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

/// A loopback port that was free a moment ago.
fn free_port() -> Result<u16> {
    let listener = TcpListener::bind("127.0.0.1:0").context("no free port")?;
    Ok(listener.local_addr()?.port())
}

/// The `skiff` to be tested: what `SKIFF_BIN` says, such as a release, or the one built with this test: what cargo
/// names, or the one beside the test in the target directory.
pub fn binary() -> Result<PathBuf> {
    for name in ["SKIFF_BIN", "NEXTEST_BIN_EXE_skiff", "CARGO_BIN_EXE_skiff"] {
        if let Some(path) = std::env::var_os(name) {
            return Ok(path.into());
        }
    }
    let test = std::env::current_exe().context("where is this test?")?;
    binary_for_test(&test)
        .with_context(|| format!("no skiff beside {}: cargo build --package skiff", test.display()))
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
