//! `skiff runtime`: the embedded runtime for another kubelet, over CRI. Tests what such a kubelet
//! expects of a runtime in addition to containers, which have tests of their own: the pod network and
//! host ports.
//!
//! Needs root and busybox; skipped otherwise.

use std::path::PathBuf;
use std::process::Command;
use std::time::{Duration, Instant};

use runtime::cri::*;
use runtime::{Remote, Runtime as _};
use testkit::{Network, Process};

const DEADLINE: Duration = Duration::from_secs(60);
const IMAGE: &str = "docker.io/library/busybox:1.36";
/// An address of the host.
const HOST_ADDRESS: &str = "192.0.2.1";

struct StandaloneRuntime {
    remote: Remote,
    process: Process,
    dir: tempfile::TempDir,
    network: Network,
}

/// A command in the runtime's network namespace.
fn in_network(network: &Network, program: &str) -> Command {
    let mut command = Command::new("nsenter");
    command.arg(format!("--net={}", network.path().display())).arg("--").arg(program);
    command
}

fn start_runtime(network: &Network, dir: &tempfile::TempDir) -> Process {
    let program = std::env::var("SKIFF_BIN").unwrap_or_else(|_| env!("CARGO_BIN_EXE_skiff").to_owned());
    let mut command = in_network(network, &program);
    command.arg("runtime").arg("--data-dir").arg(dir.path().join("data"));
    command.arg("--socket").arg(dir.path().join("cri.sock")).args(["--cni-conf-dir", "/nonexistent"]);
    let mut process = Process::spawn(&mut command).expect("a process");
    let ready = |log: &str| log.contains("ready").then_some(());
    process.wait_until_log(DEADLINE, ready).unwrap_or_else(|error| panic!("{error:#}"));
    process
}

impl StandaloneRuntime {
    fn start() -> Option<StandaloneRuntime> {
        if !testkit::can_run_pods(&["busybox"]) {
            return None;
        }
        let dir = tempfile::Builder::new().prefix("skiff-test-").tempdir().expect("a directory");
        let network = Network::new().expect("a network");
        let address_status = in_network(&network, "ip")
            .args(["addr", "add", &format!("{HOST_ADDRESS}/32"), "dev", "lo"])
            .status();
        assert!(address_status.expect("ip").success());
        let process = start_runtime(&network, &dir);
        let remote = Remote::new(&format!("unix://{}", dir.path().join("cri.sock").display()));
        let standalone = StandaloneRuntime { remote, process, dir, network };
        let archive = testkit::busybox_image(standalone.dir.path(), IMAGE).expect("an image");
        let program = std::env::var("SKIFF_BIN").unwrap_or_else(|_| env!("CARGO_BIN_EXE_skiff").to_owned());
        let mut import = Command::new(program);
        import.args(["image", "import", "--data-dir"]).arg(standalone.dir.path().join("data")).arg(archive);
        assert!(import.output().expect("skiff").status.success());
        Some(standalone)
    }

    fn config(&self, name: &str, ports: &[(i32, i32, &str)]) -> PodSandboxConfig {
        let options = NamespaceOption { pid: NamespaceMode::Container.into(), ..NamespaceOption::default() };
        PodSandboxConfig {
            metadata: Some(PodSandboxMetadata {
                name: name.into(),
                uid: name.into(),
                namespace: "default".into(),
                attempt: 0,
            }),
            hostname: name.into(),
            log_directory: self.dir.path().join("logs").display().to_string(),
            port_mappings: ports
                .iter()
                .map(|(host_port, container_port, host_ip)| PortMapping {
                    protocol: Protocol::Tcp.into(),
                    host_port: *host_port,
                    container_port: *container_port,
                    host_ip: (*host_ip).to_owned(),
                })
                .collect(),
            linux: Some(LinuxPodSandboxConfig {
                cgroup_parent: format!("/skiff-test-{}/{name}", std::process::id()),
                security_context: Some(LinuxSandboxSecurityContext {
                    namespace_options: Some(options),
                    ..LinuxSandboxSecurityContext::default()
                }),
                ..LinuxPodSandboxConfig::default()
            }),
            ..PodSandboxConfig::default()
        }
    }

    /// Runs a pod that responds to every connection on port 8080 with its name.
    async fn pod(&self, name: &str, ports: &[(i32, i32, &str)]) -> String {
        let config = self.config(name, ports);
        let failed = |error: runtime::Error| -> String { panic!("{error}\n{}", self.process.log()) };
        let pod = self.remote.run_sandbox(&config, "").await.unwrap_or_else(failed);
        let container = ContainerConfig {
            metadata: Some(ContainerMetadata { name: "main".into(), attempt: 0 }),
            image: Some(ImageSpec { image: IMAGE.into(), ..ImageSpec::default() }),
            command: ["nc", "-ll", "-p", "8080", "-e", "echo", name].map(str::to_owned).into(),
            log_path: format!("{name}.log"),
            linux: Some(LinuxContainerConfig {
                security_context: Some(LinuxContainerSecurityContext {
                    namespace_options: config
                        .linux
                        .as_ref()
                        .and_then(|linux| linux.security_context.clone()?.namespace_options),
                    ..LinuxContainerSecurityContext::default()
                }),
                ..LinuxContainerConfig::default()
            }),
            ..ContainerConfig::default()
        };
        let id = self.remote.create_container(&pod, &container, &config).await.unwrap_or_else(failed);
        self.remote.start_container(&id).await.unwrap_or_else(|error| panic!("{error}"));
        pod
    }

    /// Waits until a host port returns the expected response.
    #[track_caller]
    fn check(&self, address: &str, port: u16, expected: &str) {
        let started = Instant::now();
        loop {
            let mut command = in_network(&self.network, "busybox");
            command.args(["nc", "-w", "2", address, &port.to_string()]).stdin(std::process::Stdio::null());
            let output = command.output().expect("busybox");
            let text = String::from_utf8_lossy(&output.stdout).trim().to_owned();
            if text == expected {
                return;
            }
            let log = self.process.log();
            assert!(started.elapsed() < DEADLINE, "{address}:{port} is {text:?}, not {expected:?}\n{log}");
        }
    }
}

impl Drop for StandaloneRuntime {
    fn drop(&mut self) {
        self.process.kill();
        let data: PathBuf = self.dir.path().join("data");
        testkit::cleanup_node(self.dir.path(), &data.join("agent/pods"));
        testkit::remove_cgroup(&format!("skiff-test-{}", std::process::id()));
    }
}

#[tokio::test(flavor = "multi_thread")]
async fn host_ports_are_mapped_to_pods() {
    let Some(mut standalone) = StandaloneRuntime::start() else { return };
    let one = standalone.pod("one", &[(80, 8080, ""), (0, 9000, "")]).await;
    standalone.check(HOST_ADDRESS, 80, "one");
    let two = standalone.pod("two", &[(81, 8080, HOST_ADDRESS), (82, 8080, "192.0.2.7")]).await;
    standalone.check(HOST_ADDRESS, 81, "two");
    standalone.check(HOST_ADDRESS, 82, "");
    standalone.check(HOST_ADDRESS, 80, "one");
    // A restarted runtime restores the ports, even after SIGKILL.
    standalone.process.kill();
    standalone.process = start_runtime(&standalone.network, &standalone.dir);
    standalone.check(HOST_ADDRESS, 80, "one");
    standalone.check(HOST_ADDRESS, 81, "two");
    standalone.remote.stop_sandbox(&one).await.unwrap_or_else(|error| panic!("{error}"));
    standalone.check(HOST_ADDRESS, 80, "");
    standalone.check(HOST_ADDRESS, 81, "two");
    let three = standalone.pod("three", &[(80, 8080, "")]).await;
    standalone.check(HOST_ADDRESS, 80, "three");
    for pod in [one, two, three] {
        standalone.remote.remove_sandbox(&pod).await.unwrap_or_else(|error| panic!("{error}"));
    }
    standalone.check(HOST_ADDRESS, 80, "");
    assert!(testkit::remaining_state(&standalone.dir.path().join("data/agent/runtime/pods")).is_empty());
}
