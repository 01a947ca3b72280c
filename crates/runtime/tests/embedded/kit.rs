//! A node for tests, and counters of what pods leave behind.

use std::collections::BTreeMap;
use std::path::{Path, PathBuf};
use std::sync::atomic::{AtomicU32, Ordering};
use std::sync::{Arc, Mutex};
use std::time::{Duration, Instant};

use futures_util::FutureExt as _;
use runtime::cri::*;
use runtime::embedded::Config;
use runtime::{Embedded, Remote, Runtime};

pub const TEST_IMAGE: &str = "docker.io/library/busybox:1.36";
const DEADLINE: Duration = Duration::from_secs(60);

pub struct TestNode {
    pub dir: tempfile::TempDir,
    pub embedded: Embedded,
    /// `embedded`, directly or over its socket.
    pub runtime: Arc<dyn Runtime>,
    over_socket: bool,
    /// The tasks that serve the socket.
    servers: Mutex<Vec<tokio::task::JoinHandle<()>>>,
}

/// Runs the tests, each on a node of its own, and checks that nothing is left of its pods.
///
/// With `unified`, on a v2 hierarchy without controllers, tests that need a controller are skipped.
pub async fn run(only: Option<&str>, unified: bool) {
    const NEED_CONTROLLERS: [&str; 4] = [
        "life::enforces_resource_limits",
        "life::pod_quota_can_drop_below_an_exited_container",
        "life::run_and_remove_a_pod",
        "containerd::privileges_match_containerd",
    ];
    let mut failures = 0;
    macro_rules! tests {
        ($over_socket:expr, $($module:ident :: $name:ident),* $(,)?) => {$(
            let name = concat!(stringify!($module), "::", stringify!($name));
            let is_left_out = unified && ($over_socket || NEED_CONTROLLERS.contains(&name));
            let name = if $over_socket { format!("socket::{name}") } else { name.to_owned() };
            if !is_left_out && only.is_none_or(|only| name.contains(only)) {
                let node = TestNode::new($over_socket).await;
                let before = host_resource_counts(node.dir.path());
                let test = async {
                    crate::$module::$name(&node).await;
                    node.remove_all_pods().await;
                };
                if std::panic::AssertUnwindSafe(test).catch_unwind().await.is_err() {
                    println!("test {name} ... FAILED");
                    failures += 1;
                } else {
                    wait_for_baseline(&before, node.dir.path(), &name).await;
                    println!("test {name} ... ok");
                }
            }
        )*};
    }
    tests![
        false,
        life::run_and_remove_a_pod,
        life::containers_share_pod_namespaces,
        life::start_failure_reports_the_reason,
        life::passes_streams_and_signals,
        life::container_processes_are_in_its_cgroup,
        life::pod_quota_can_drop_below_an_exited_container,
        life::remove_a_pod_with_running_commands,
        life::remove_a_pod_with_a_shared_process_namespace,
        life::startup_does_not_wait_for_a_silent_supervisor,
        life::exec_runs_in_nested_cgroups,
        life::pod_exits_with_its_pause_process,
        life::enforces_resource_limits,
        life::running_pods_are_known_after_restart,
        life::upgrade_keeps_running_containers,
        life::killed_supervisor_leaves_no_processes,
        life::supervisor_terminates_containers_on_sigterm,
        life::pod_exits_when_its_directory_is_deleted,
        life::applies_user_and_working_directory,
        life::environment_keeps_its_order,
        life::mounts_volumes_with_propagation,
        life::supervisor_memory_is_small,
        breakout::container_cannot_write_to_the_runtime_binary,
        breakout::masked_and_read_only_paths_are_enforced,
        breakout::container_cannot_mount,
        breakout::container_cannot_open_host_devices,
        breakout::applies_capabilities_and_no_new_privileges,
        breakout::container_keeps_host_cgroup_mount_options,
        breakout::image_symlinks_do_not_redirect_mounts,
        breakout::only_allowed_proc_files_can_be_mounted_over,
        breakout::dangling_symlinks_resolve_inside_the_container,
        breakout::working_directory_cannot_be_a_host_fd,
        breakout::container_cannot_use_inherited_file_descriptors,
        breakout::volume_cannot_replace_the_mask_device,
        breakout::rejects_an_image_with_a_proc_symlink,
        breakout::pause_process_has_no_privileges,
        breakout::commands_run_as_the_user_of_the_container,
        breakout::container_with_fast_output_can_be_stopped,
        breakout::swapped_volume_directories_stay_inside,
        breakout::seccomp_applies_to_exec_commands,
        machines::runs_a_32_bit_executable,
        users::maps_container_root_to_another_host_user,
        users::exec_runs_in_the_user_namespace,
        users::container_root_has_no_host_privileges,
        users::mounts_proc_with_all_paths_visible,
        users::mapping_failure_reports_the_reason,
        volumes::mounts_an_image_as_volume,
        volumes::mounts_inside_volumes,
        volumes::missing_security_profile_fails_the_container,
        image_volumes::creates_volumes_declared_by_an_image,
        image_volumes::volume_symlinks_stay_inside_the_image,
        image_volumes::volume_owners_are_mapped_for_user_namespaces,
        hooks::runs_hooks_of_all_stages,
        containerd::privileges_match_containerd,
        churn::creates_and_deletes_pods_under_restarts,
    ];
    tests![
        true,
        life::run_and_remove_a_pod,
        life::containers_share_pod_namespaces,
        life::start_failure_reports_the_reason,
        life::passes_streams_and_signals,
        life::enforces_resource_limits,
        life::running_pods_are_known_after_restart,
        life::killed_supervisor_leaves_no_processes,
        life::mounts_volumes_with_propagation,
        image_volumes::creates_volumes_declared_by_an_image,
        network::uses_the_configured_cni_network,
        network::failed_pod_leaves_no_network,
        network::pod_sysctls_override_plugin_settings,
        network::limits_pod_bandwidth,
        network::pod_has_ipv4_and_ipv6,
        network::deleted_links_and_routes_are_created_again,
        socket::handles_calls_of_other_cri_clients,
        socket::sends_container_events,
        socket::rejects_invalid_requests,
        socket::rejects_duplicate_names,
        socket::rejects_conflicting_options,
        socket::updates_limits_before_start,
    ];
    assert_eq!(failures, 0, "tests failed");
    println!("\ntest result: ok.");
}

impl TestNode {
    async fn new(over_socket: bool) -> TestNode {
        let dir = tempfile::Builder::new().prefix("skiff-runtime-").tempdir().expect("a directory");
        let archive = testkit::busybox_image(dir.path(), TEST_IMAGE).expect("an image");
        let embedded = open(dir.path()).await;
        let file = std::fs::File::open(archive).expect("an archive");
        ::image::import(embedded.images(), file).expect("imported");
        let runtime = Arc::new(embedded.clone());
        let mut node = TestNode { dir, embedded, runtime, over_socket, servers: Mutex::default() };
        node.runtime = node.offered(node.embedded.clone()).await;
        node
    }

    /// Opens the runtime again on the same data, as after a restart of skiff.
    pub async fn reopen(&self) -> Arc<dyn Runtime> {
        self.offered(open(self.dir.path()).await).await
    }

    pub fn socket(&self) -> PathBuf {
        self.dir.path().join("cri.sock")
    }

    /// The runtime itself, or a client of its socket.
    async fn offered(&self, embedded: Embedded) -> Arc<dyn Runtime> {
        if !self.over_socket {
            return Arc::new(embedded);
        }
        let listener = runtime::embedded::listen(&self.socket()).expect("a socket");
        self.servers.lock().unwrap().push(tokio::spawn(runtime::embedded::serve(embedded, listener)));
        let remote = Remote::new(&format!("unix://{}", self.socket().display()));
        assert_eq!(remote.version().await.expect("an answer").runtime_name, "skiff");
        Arc::new(remote)
    }

    pub fn logs(&self) -> PathBuf {
        self.dir.path().join("logs")
    }

    pub fn pod_config(&self, name: &str) -> PodSandboxConfig {
        pod_config(self.dir.path(), name)
    }

    pub async fn pod(&self, name: &str) -> TestPod<'_> {
        self.pod_with(self.pod_config(name)).await
    }

    pub async fn pod_with(&self, config: PodSandboxConfig) -> TestPod<'_> {
        let id = self.runtime.run_sandbox(&config, "").await.unwrap_or_else(|error| panic!("{error}"));
        TestPod { node: self, id, config }
    }

    /// Removes all pods.
    pub async fn remove_all_pods(&self) {
        // The first server is still needed below.
        self.servers.lock().unwrap().iter().skip(1).for_each(|task| task.abort());
        for pod in self.runtime.sandboxes(&[]).await.expect("pods") {
            self.runtime.remove_sandbox(&pod.id).await.unwrap_or_else(|error| panic!("{error}"));
        }
        let group = format!("/skiff-test-{}", std::process::id());
        sys::cgroup::Cgroups::of_host().expect("cgroups").remove(&group).expect("empty cgroups");
    }
}

/// The configuration of a pod with its logs below a directory.
pub fn pod_config(dir: &Path, name: &str) -> PodSandboxConfig {
    let options = NamespaceOption { pid: NamespaceMode::Container.into(), ..NamespaceOption::default() };
    PodSandboxConfig {
        metadata: Some(PodSandboxMetadata {
            name: name.into(),
            uid: name.into(),
            namespace: "d".into(),
            attempt: 0,
        }),
        hostname: name.into(),
        log_directory: dir.join("logs").display().to_string(),
        dns_config: Some(DnsConfig { servers: vec!["10.43.0.10".into()], ..DnsConfig::default() }),
        labels: BTreeMap::from([("pod".to_owned(), name.to_owned())]),
        linux: Some(LinuxPodSandboxConfig {
            cgroup_parent: format!("/skiff-test-{}/pod{name}", std::process::id()),
            security_context: Some(LinuxSandboxSecurityContext {
                namespace_options: Some(options),
                ..LinuxSandboxSecurityContext::default()
            }),
            ..LinuxPodSandboxConfig::default()
        }),
        ..PodSandboxConfig::default()
    }
}

/// Cleans up after a failed test.
impl Drop for TestNode {
    fn drop(&mut self) {
        testkit::cleanup_node(self.dir.path(), &self.dir.path().join("pods"));
        testkit::remove_cgroup(&format!("skiff-test-{}", std::process::id()));
        self.servers.get_mut().unwrap().iter().for_each(|task| task.abort());
    }
}

/// Kills the supervisors of pods below a directory.
pub fn kill_supervisors(dir: &Path) {
    for pid in supervisors(dir) {
        let _ = rustix::process::kill_process(pid, rustix::process::Signal::KILL);
    }
}

/// The supervisors of pods below a directory.
pub fn supervisors(dir: &Path) -> Vec<rustix::process::Pid> {
    let mark = format!("supervise\0{}", dir.display());
    let entries = std::fs::read_dir("/proc").into_iter().flatten().flatten();
    let found = entries.filter_map(|entry| {
        let words = std::fs::read(entry.path().join("cmdline")).ok()?;
        let is_one = words.windows(mark.len()).any(|part| part == mark.as_bytes());
        let pid = entry.file_name().to_string_lossy().parse().ok()?;
        rustix::process::Pid::from_raw(pid).filter(|_| is_one)
    });
    found.collect()
}

pub async fn open(dir: &Path) -> Embedded {
    open_with(dir, program()).await
}

/// The program that runs as supervisor: `SKIFF_BIN`, such as a release, or this program.
pub fn program() -> PathBuf {
    let named = std::env::var_os("SKIFF_BIN").map(PathBuf::from);
    named.unwrap_or_else(|| std::env::current_exe().expect("this program"))
}

/// Like [`open`], with another program as supervisor.
pub async fn open_with(dir: &Path, program: PathBuf) -> Embedded {
    let config = Config {
        root: dir.join("runtime"),
        program,
        bridge: "skiff0".into(),
        cni: runtime::embedded::Cni {
            conf_dir: dir.join("net.d"),
            bin_dirs: vec![dir.join("bin"), "/usr/lib/cni".into(), "/opt/cni/bin".into()],
        },
        ranges: vec!["10.88.0.0/24".parse().expect("a range")],
        registries: dir.join("registries.yaml"),
        mirrors_only: false,
        seccomp_profiles: dir.join("seccomp"),
        host_ports: tokio::sync::watch::Sender::default(),
    };
    Embedded::open(config).await.unwrap_or_else(|error| panic!("{error}"))
}

pub struct TestPod<'a> {
    pub node: &'a TestNode,
    pub id: String,
    pub config: PodSandboxConfig,
}

/// The security context of containers that the kubelet creates by default.
pub fn security() -> LinuxContainerSecurityContext {
    let paths = |list: &[&str]| list.iter().map(|path| (*path).to_owned()).collect();
    LinuxContainerSecurityContext {
        namespace_options: Some(NamespaceOption {
            pid: NamespaceMode::Container.into(),
            ..NamespaceOption::default()
        }),
        masked_paths: paths(&[
            "/proc/acpi",
            "/proc/kcore",
            "/proc/keys",
            "/proc/timer_list",
            "/proc/scsi",
            "/sys/firmware",
        ]),
        readonly_paths: paths(&["/proc/bus", "/proc/fs", "/proc/irq", "/proc/sys", "/proc/sysrq-trigger"]),
        seccomp: Some(SecurityProfile {
            profile_type: ProfileType::RuntimeDefault.into(),
            ..SecurityProfile::default()
        }),
        ..LinuxContainerSecurityContext::default()
    }
}

/// A container that runs a script.
pub fn script(text: &str) -> ContainerConfig {
    with(security(), text)
}

pub fn with(security: LinuxContainerSecurityContext, text: &str) -> ContainerConfig {
    ContainerConfig {
        metadata: Some(ContainerMetadata { name: "main".into(), attempt: 0 }),
        image: Some(ImageSpec { image: TEST_IMAGE.into(), ..ImageSpec::default() }),
        command: ["sh", "-c", text].map(str::to_owned).into(),
        log_path: "main.log".into(),
        linux: Some(LinuxContainerConfig {
            security_context: Some(security),
            ..LinuxContainerConfig::default()
        }),
        ..ContainerConfig::default()
    }
}

impl TestPod<'_> {
    pub async fn create(&self, config: &ContainerConfig) -> String {
        // The name and attempt of a container must be unique in its pod.
        static NUMBER: AtomicU32 = AtomicU32::new(0);
        let mut config = config.clone();
        config.metadata.get_or_insert_default().attempt = NUMBER.fetch_add(1, Ordering::Relaxed);
        let created = self.node.runtime.create_container(&self.id, &config, &self.config).await;
        created.unwrap_or_else(|error| panic!("{error}"))
    }

    pub async fn start(&self, config: &ContainerConfig) -> String {
        let id = self.create(config).await;
        self.node.runtime.start_container(&id).await.unwrap_or_else(|error| panic!("{error}"));
        id
    }

    /// Runs a container until it exits; returns exit code and log.
    pub async fn finish(&self, config: &ContainerConfig) -> (i32, String) {
        let _ = std::fs::remove_file(self.node.logs().join(&config.log_path));
        let id = self.start(config).await;
        let status = wait_exited(&self.node.runtime, &id).await;
        let output = self.log_output(&config.log_path);
        self.node.runtime.remove_container(&id).await.unwrap_or_else(|error| panic!("{error}"));
        (status.exit_code, output)
    }

    /// The text of a log without timestamps, streams and tags.
    pub fn log_output(&self, log: &str) -> String {
        let text = std::fs::read_to_string(self.node.logs().join(log)).unwrap_or_default();
        text.lines().map(|line| line.splitn(4, ' ').nth(3).unwrap_or_default().to_owned() + "\n").collect()
    }

    /// The log once it is as expected, or as it is at the deadline.
    pub async fn wait_for_log(&self, log: &str, expected: &str) -> String {
        let started = Instant::now();
        loop {
            let output = self.log_output(log);
            if output == expected || started.elapsed() > DEADLINE {
                return output;
            }
            tokio::time::sleep(Duration::from_millis(5)).await;
        }
    }

    /// Runs a command in a container: exit code, stdout, stderr.
    pub async fn exec(&self, id: &str, command: &str) -> (i32, String, String) {
        let command = ["sh", "-c", command].map(str::to_owned);
        let done = self.node.runtime.exec_sync(id, &command, DEADLINE).await;
        let done = done.unwrap_or_else(|error| panic!("{error}"));
        let text = |bytes: Vec<u8>| String::from_utf8_lossy(&bytes).into_owned();
        (done.exit_code, text(done.stdout), text(done.stderr))
    }
}

pub async fn wait_exited(runtime: &Arc<dyn Runtime>, id: &str) -> ContainerStatus {
    let started = Instant::now();
    loop {
        let status = runtime.container_status(id).await.unwrap_or_else(|error| panic!("{error}"));
        if status.state() == ContainerState::Exited {
            return status;
        }
        assert!(started.elapsed() < DEADLINE, "the container is still running: {status:?}");
        tokio::time::sleep(Duration::from_millis(5)).await;
    }
}

/// Waits until the resources are back at the initial counts: connections to pods are closed by tasks of
/// their own.
async fn wait_for_baseline(before: &BTreeMap<&'static str, usize>, dir: &Path, name: &str) {
    let started = Instant::now();
    loop {
        let mut after = host_resource_counts(dir);
        // The bridge is created with the first pod and stays.
        after.insert("links", after["links"].saturating_sub(1));
        if after.iter().all(|(trace, count)| *count <= before[trace]) {
            return;
        }
        if started.elapsed() > DEADLINE {
            let links = std::fs::read_dir("/proc/self/fd").into_iter().flatten().flatten();
            let files: Vec<_> = links.filter_map(|link| std::fs::read_link(link.path()).ok()).collect();
            panic!("{name} leaks resources: {before:?} became {after:?}, open files: {files:?}");
        }
        tokio::time::sleep(Duration::from_millis(5)).await;
    }
}

/// Counts what pods may leave behind on a host.
pub fn host_resource_counts(dir: &Path) -> BTreeMap<&'static str, usize> {
    let lines = |path: &str| std::fs::read_to_string(path).unwrap_or_default().lines().count();
    BTreeMap::from([
        ("mounts", lines("/proc/self/mounts")),
        ("links", podnet::links("sk").unwrap_or_default().len()),
        ("supervisors", supervisors(dir).len()),
        ("files", std::fs::read_dir("/proc/self/fd").into_iter().flatten().count()),
    ])
}
