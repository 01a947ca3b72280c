//! A node for tests, and a way to count what pods leave behind.

use std::collections::BTreeMap;
use std::path::{Path, PathBuf};
use std::sync::atomic::{AtomicU32, Ordering};
use std::sync::{Arc, Mutex};
use std::time::{Duration, Instant};

use futures_util::FutureExt as _;
use runtime::cri::*;
use runtime::embedded::Config;
use runtime::{Embedded, Remote, Runtime};

pub const IMAGE: &str = "docker.io/library/busybox:1.36";
const DEADLINE: Duration = Duration::from_secs(60);

pub struct Node {
    pub dir: tempfile::TempDir,
    pub embedded: Embedded,
    /// The same, or the same over its socket.
    pub runtime: Arc<dyn Runtime>,
    over_socket: bool,
    /// Those who serve sockets.
    serving: Mutex<Vec<tokio::task::JoinHandle<()>>>,
}

/// Runs the tests, each on a node of its own, and checks that nothing is left of its pods.
///
/// On a host of the second version of cgroups that has no controllers, `unified`, those that need one are left out.
pub async fn run(only: Option<&str>, unified: bool) {
    const NEED_CONTROLLERS: [&str; 4] = [
        "life::limits_hold",
        "life::pods_can_have_less_than_a_container_that_ended",
        "life::a_pod_lives_and_dies",
        "containerd::privileges_are_the_same",
    ];
    let mut failures = 0;
    macro_rules! tests {
        ($over_socket:expr, $($module:ident :: $name:ident),* $(,)?) => {$(
            let name = concat!(stringify!($module), "::", stringify!($name));
            let is_left_out = unified && ($over_socket || NEED_CONTROLLERS.contains(&name));
            let name = if $over_socket { format!("socket::{name}") } else { name.to_owned() };
            if !is_left_out && only.is_none_or(|only| name.contains(only)) {
                let node = Node::new($over_socket).await;
                let before = traces(node.dir.path());
                let test = async {
                    crate::$module::$name(&node).await;
                    node.empty().await;
                };
                if std::panic::AssertUnwindSafe(test).catch_unwind().await.is_err() {
                    println!("test {name} ... FAILED");
                    failures += 1;
                } else {
                    settled(&before, node.dir.path(), &name).await;
                    println!("test {name} ... ok");
                }
            }
        )*};
    }
    tests![
        false,
        life::a_pod_lives_and_dies,
        life::containers_share_their_pod,
        life::what_cannot_start_says_why,
        life::streams_and_signals,
        life::all_of_a_container_is_in_its_cgroup,
        life::pods_can_have_less_than_a_container_that_ended,
        life::commands_do_not_hold_a_pod,
        life::those_who_look_into_others_do_not_hold_a_pod,
        life::a_silent_supervisor_keeps_nobody_waiting,
        life::commands_follow_into_groups_of_a_container,
        life::a_pod_goes_with_its_keeper,
        life::limits_hold,
        life::a_later_skiff_finds_its_pods,
        life::another_program_takes_over,
        life::a_killed_supervisor_leaves_nothing,
        life::sigterm_to_a_supervisor_ends_its_pod_in_order,
        life::a_pod_whose_directory_is_removed_ends,
        life::users_and_directories,
        life::variables_keep_their_order,
        life::volumes_and_propagation,
        life::a_supervisor_is_small,
        breakout::the_program_cannot_be_overwritten,
        breakout::masked_and_read_only_paths_hold,
        breakout::nothing_can_be_mounted,
        breakout::devices_cannot_be_opened,
        breakout::privileges_are_what_they_should_be,
        breakout::groups_stay_as_the_host_has_them,
        breakout::images_cannot_mount_elsewhere,
        breakout::only_the_machine_is_covered,
        breakout::links_to_nothing_stay_inside,
        breakout::no_directory_of_the_host_is_begun_in,
        breakout::no_open_file_leads_out,
        breakout::what_hides_cannot_be_exchanged,
        breakout::proc_is_no_link,
        breakout::the_keeper_has_nothing,
        breakout::users_are_who_they_were,
        breakout::talking_keeps_nobody_waiting,
        breakout::volumes_cannot_lead_out,
        breakout::seccomp_holds_for_commands_too,
        machines::programs_for_32_bits,
        users::root_is_nobody_outside,
        users::commands_stay_inside,
        users::all_of_root_is_not_enough,
        users::an_unmasked_proc_can_be_mounted_again,
        users::what_cannot_be_mapped_says_why,
        volumes::an_image_is_a_volume,
        volumes::mounts_within_volumes,
        volumes::profiles_that_cannot_be_applied_say_so,
        image_volumes::an_image_has_volumes,
        image_volumes::links_stay_inside,
        image_volumes::owners_are_the_pods,
        hooks::all_stages_are_run,
        containerd::privileges_are_the_same,
        churn::pods_come_and_go,
    ];
    tests![
        true,
        life::a_pod_lives_and_dies,
        life::containers_share_their_pod,
        life::what_cannot_start_says_why,
        life::streams_and_signals,
        life::limits_hold,
        life::a_later_skiff_finds_its_pods,
        life::a_killed_supervisor_leaves_nothing,
        life::volumes_and_propagation,
        image_volumes::an_image_has_volumes,
        network::of_the_administrator,
        network::of_a_pod_that_cannot_be,
        network::settings_are_the_pods,
        network::bandwidth_is_limited,
        network::both_families,
        socket::what_only_other_clients_ask,
        socket::events_are_told,
        socket::bad_requests_are_refused,
        socket::nothing_is_made_twice,
        socket::what_does_not_go_together_is_refused,
        socket::limits_can_be_changed_before_the_start,
    ];
    assert_eq!(failures, 0, "tests failed");
    println!("\ntest result: ok.");
}

impl Node {
    async fn new(over_socket: bool) -> Node {
        let dir = tempfile::Builder::new().prefix("skiff-runtime-").tempdir().expect("a directory");
        let archive = testkit::busybox_image(dir.path(), IMAGE).expect("an image");
        let embedded = open(dir.path()).await;
        let file = std::fs::File::open(archive).expect("an archive");
        ::image::import(embedded.images(), file).expect("imported");
        let runtime = Arc::new(embedded.clone());
        let mut node = Node { dir, embedded, runtime, over_socket, serving: Mutex::default() };
        node.runtime = node.offered(node.embedded.clone()).await;
        node
    }

    /// Another skiff on the same data.
    pub async fn again(&self) -> Arc<dyn Runtime> {
        self.offered(open(self.dir.path()).await).await
    }

    pub fn socket(&self) -> PathBuf {
        self.dir.path().join("cri.sock")
    }

    /// The runtime as it is, or as a client of its socket has it.
    async fn offered(&self, embedded: Embedded) -> Arc<dyn Runtime> {
        if !self.over_socket {
            return Arc::new(embedded);
        }
        let listener = runtime::embedded::listen(&self.socket()).expect("a socket");
        self.serving.lock().unwrap().push(tokio::spawn(runtime::embedded::serve(embedded, listener)));
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

    pub async fn pod(&self, name: &str) -> Pod<'_> {
        self.pod_with(self.pod_config(name)).await
    }

    pub async fn pod_with(&self, config: PodSandboxConfig) -> Pod<'_> {
        let id = self.runtime.run_sandbox(&config, "").await.unwrap_or_else(|error| panic!("{error}"));
        Pod { node: self, id, config }
    }

    /// Removes all pods.
    pub async fn empty(&self) {
        // The first one serves what follows.
        self.serving.lock().unwrap().iter().skip(1).for_each(|task| task.abort());
        for pod in self.runtime.sandboxes(&[]).await.expect("pods") {
            self.runtime.remove_sandbox(&pod.id).await.unwrap_or_else(|error| panic!("{error}"));
        }
        let group = format!("/skiff-test-{}", std::process::id());
        sys::cgroup::Cgroups::of_host().expect("cgroups").remove(&group).expect("empty cgroups");
    }
}

/// A pod of this name with its logs below a directory.
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

/// What a test that failed leaves must not outlive it.
impl Drop for Node {
    fn drop(&mut self) {
        testkit::sweep(self.dir.path(), &self.dir.path().join("pods"));
        testkit::remove_cgroup(&format!("skiff-test-{}", std::process::id()));
        self.serving.get_mut().unwrap().iter().for_each(|task| task.abort());
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

/// What pods are supervised by: `SKIFF_BIN`, such as a release, or else this program.
pub fn program() -> PathBuf {
    let named = std::env::var_os("SKIFF_BIN").map(PathBuf::from);
    named.unwrap_or_else(|| std::env::current_exe().expect("this program"))
}

/// The same with pods supervised by a program at another place.
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

pub struct Pod<'a> {
    pub node: &'a Node,
    pub id: String,
    pub config: PodSandboxConfig,
}

/// What every container of the kubelet's has.
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
        image: Some(ImageSpec { image: IMAGE.into(), ..ImageSpec::default() }),
        command: ["sh", "-c", text].map(str::to_owned).into(),
        log_path: "main.log".into(),
        linux: Some(LinuxContainerConfig {
            security_context: Some(security),
            ..LinuxContainerConfig::default()
        }),
        ..ContainerConfig::default()
    }
}

impl Pod<'_> {
    pub async fn create(&self, config: &ContainerConfig) -> String {
        // No two of a pod may have the same name and number.
        static NUMBER: AtomicU32 = AtomicU32::new(0);
        let mut config = config.clone();
        config.metadata.get_or_insert_default().attempt = NUMBER.fetch_add(1, Ordering::Relaxed);
        let made = self.node.runtime.create_container(&self.id, &config, &self.config).await;
        made.unwrap_or_else(|error| panic!("{error}"))
    }

    pub async fn start(&self, config: &ContainerConfig) -> String {
        let id = self.create(config).await;
        self.node.runtime.start_container(&id).await.unwrap_or_else(|error| panic!("{error}"));
        id
    }

    /// Runs a container to its end; answers exit code and what it said.
    pub async fn finish(&self, config: &ContainerConfig) -> (i32, String) {
        let _ = std::fs::remove_file(self.node.logs().join(&config.log_path));
        let id = self.start(config).await;
        let status = ended(&self.node.runtime, &id).await;
        let said = self.said(&config.log_path);
        self.node.runtime.remove_container(&id).await.unwrap_or_else(|error| panic!("{error}"));
        (status.exit_code, said)
    }

    /// A log without times, streams and tags.
    pub fn said(&self, log: &str) -> String {
        let text = std::fs::read_to_string(self.node.logs().join(log)).unwrap_or_default();
        text.lines().map(|line| line.splitn(4, ' ').nth(3).unwrap_or_default().to_owned() + "\n").collect()
    }

    /// A command in a container: exit code, stdout, stderr.
    pub async fn exec(&self, id: &str, command: &str) -> (i32, String, String) {
        let command = ["sh", "-c", command].map(str::to_owned);
        let done = self.node.runtime.exec_sync(id, &command, DEADLINE).await;
        let done = done.unwrap_or_else(|error| panic!("{error}"));
        let text = |bytes: Vec<u8>| String::from_utf8_lossy(&bytes).into_owned();
        (done.exit_code, text(done.stdout), text(done.stderr))
    }
}

pub async fn ended(runtime: &Arc<dyn Runtime>, id: &str) -> ContainerStatus {
    let begun = Instant::now();
    loop {
        let status = runtime.container_status(id).await.unwrap_or_else(|error| panic!("{error}"));
        if status.state() == ContainerState::Exited {
            return status;
        }
        assert!(begun.elapsed() < DEADLINE, "the container goes on: {status:?}");
        tokio::time::sleep(Duration::from_millis(5)).await;
    }
}

/// Waits until nothing is left that was not there before: connections to pods are closed by tasks that end on their own.
async fn settled(before: &BTreeMap<&'static str, usize>, dir: &Path, name: &str) {
    let begun = Instant::now();
    loop {
        let mut after = traces(dir);
        // The bridge comes with the first pod and stays.
        after.insert("links", after["links"].saturating_sub(1));
        if after.iter().all(|(trace, count)| *count <= before[trace]) {
            return;
        }
        assert!(begun.elapsed() < DEADLINE, "{name} leaves something behind: {before:?} became {after:?}");
        tokio::time::sleep(Duration::from_millis(5)).await;
    }
}

/// What pods may leave behind on a host, counted.
pub fn traces(dir: &Path) -> BTreeMap<&'static str, usize> {
    let lines = |path: &str| std::fs::read_to_string(path).unwrap_or_default().lines().count();
    BTreeMap::from([
        ("mounts", lines("/proc/self/mounts")),
        ("links", podnet::links("sk").unwrap_or_default().len()),
        ("supervisors", supervisors(dir).len()),
        ("files", std::fs::read_dir("/proc/self/fd").into_iter().flatten().count()),
    ])
}
