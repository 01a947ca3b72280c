//! Compares the privileges of containers with those that containerd gives for the same CRI
//! configuration.

use std::collections::BTreeSet;
use std::path::Path;
use std::time::{Duration, Instant};

use runtime::cri::*;
use runtime::{Remote, Runtime};

use crate::kit::{TestNode, security, with};

const DEADLINE: Duration = Duration::from_secs(60);

/// The configurations to compare, by name.
fn cases() -> Vec<(&'static str, LinuxContainerSecurityContext)> {
    let capabilities = |add: &[&str], drop: &[&str]| {
        let list = |names: &[&str]| names.iter().map(|name| (*name).to_owned()).collect();
        Some(Capability {
            add_capabilities: list(add),
            drop_capabilities: list(drop),
            ..Capability::default()
        })
    };
    let user = |value| Some(Int64Value { value });
    let unconfined =
        || Some(SecurityProfile { profile_type: ProfileType::Unconfined.into(), ..Default::default() });
    let security_context = security;
    vec![
        ("as usual", security_context()),
        ("unconfined", LinuxContainerSecurityContext { seccomp: unconfined(), ..security_context() }),
        ("no new privileges", LinuxContainerSecurityContext { no_new_privs: true, ..security_context() }),
        (
            "nothing",
            LinuxContainerSecurityContext { capabilities: capabilities(&[], &["ALL"]), ..security_context() },
        ),
        (
            "one only",
            LinuxContainerSecurityContext {
                capabilities: capabilities(&["NET_BIND_SERVICE"], &["ALL"]),
                no_new_privs: true,
                run_as_user: user(1000),
                ..security_context()
            },
        ),
        (
            "one less",
            LinuxContainerSecurityContext {
                capabilities: capabilities(&[], &["NET_RAW"]),
                ..security_context()
            },
        ),
        (
            "one more",
            LinuxContainerSecurityContext {
                capabilities: capabilities(&["SYS_TIME"], &[]),
                ..security_context()
            },
        ),
        (
            "all",
            LinuxContainerSecurityContext { capabilities: capabilities(&["ALL"], &[]), ..security_context() },
        ),
        (
            "other-user",
            LinuxContainerSecurityContext {
                run_as_user: user(1234),
                run_as_group: user(55),
                supplemental_groups: vec![77, 88],
                ..security_context()
            },
        ),
        ("read-only root", LinuxContainerSecurityContext { readonly_rootfs: true, ..security_context() }),
        (
            "unmasked",
            LinuxContainerSecurityContext {
                masked_paths: Vec::new(),
                readonly_paths: Vec::new(),
                ..security_context()
            },
        ),
        (
            "privileged",
            LinuxContainerSecurityContext {
                privileged: true,
                seccomp: unconfined(),
                masked_paths: Vec::new(),
                readonly_paths: Vec::new(),
                ..security_context()
            },
        ),
    ]
}

/// Reports the kernel's status of a process, the results of a few syscalls, limits, environment, mounts
/// and devices. The files of the pod, which have different paths, and cgroups, which are read-only
/// here, are left out.
const STATE_COMMAND: &str = "grep -E '^(Uid|Gid|Groups|Cap...|NoNewPrivs|Seccomp):' /proc/self/status; \
    for call in 'unshare -U true' 'unshare -m true' 'unshare -n true' 'mkdir /d' 'mknod /n p' 'mknod /b b 7 200' 'chown 5 /d' \
    'chroot / true' 'mount -t tmpfs none /d' 'hostname x' 'dmesg' 'ping -c 1 127.0.0.1' 'nice -n -1 true' 'cat /proc/kcore /dev/null -n0' \
    'ls /proc/scsi/' 'touch /proc/sys/x' 'touch /sys/x'; do \
    $call >/dev/null 2>&1; echo \"$call: $?\"; done; \
    tail -n +2 /proc/self/limits | sed 's/  */ /g; s/^/limit /'; umask; pwd; env | sort; \
    awk '$5 !~ \"^/sys/fs/cgroup\" && $5 !~ \"^/etc/\" { for (i = 7; $i != \"-\"; i++); print \"mount\", $5, $6, $(i+1) }' \
    /proc/self/mountinfo; stat -c 'device %n %A %u:%g %t:%T' /dev/*; echo the end";

async fn state(
    runtime: &dyn Runtime,
    config: &PodSandboxConfig,
    pod: &str,
    own: &LinuxContainerSecurityContext,
) -> String {
    let container = with(own.clone(), STATE_COMMAND);
    let log = Path::new(&config.log_directory).join(&container.log_path);
    let _ = std::fs::remove_file(&log);
    let id =
        runtime.create_container(pod, &container, config).await.unwrap_or_else(|error| panic!("{error}"));
    runtime.start_container(&id).await.unwrap_or_else(|error| panic!("{error}"));
    let started = Instant::now();
    while runtime.container_status(&id).await.expect("a status").state() != ContainerState::Exited {
        assert!(started.elapsed() < DEADLINE, "the container is still running");
        tokio::time::sleep(Duration::from_millis(10)).await;
    }
    // containerd writes the end of the log a little after it has reported the exit.
    let mut output = std::fs::read_to_string(&log).unwrap_or_default();
    while !output.contains(" the end\n") && started.elapsed() < DEADLINE {
        tokio::time::sleep(Duration::from_millis(10)).await;
        output = std::fs::read_to_string(&log).unwrap_or_default();
    }
    runtime.remove_container(&id).await.unwrap_or_else(|error| panic!("{error}"));
    output.lines().map(|line| line.splitn(4, ' ').nth(3).unwrap_or_default().to_owned() + "\n").collect()
}

pub async fn privileges_match_containerd(node: &TestNode) {
    if !["/usr/bin/containerd", "/usr/local/bin/containerd"].iter().any(|path| Path::new(path).exists()) {
        return println!("skipped: containerd is not installed");
    }
    let other = match testkit::Containerd::start(&node.dir.path().join("containerd")) {
        Ok(other) => other,
        Err(error) => panic!("containerd does not start: {error}"),
    };
    let remote = Remote::new(&format!("unix://{}", other.socket().display()));
    let mut config = node.pod_config("same");
    let linux = config.linux.as_mut().expect("made so");
    linux.security_context.as_mut().expect("made so").privileged = true;
    let embedded_sandbox =
        node.runtime.run_sandbox(&config, "").await.unwrap_or_else(|error| panic!("{error}"));
    // In a cgroup of its own, which containerd removes.
    let mut remote_config = config.clone();
    remote_config.linux.as_mut().expect("made so").cgroup_parent = String::new();
    let remote_sandbox = remote
        .run_sandbox(&remote_config, "")
        .await
        .unwrap_or_else(|error| panic!("{error}\n{}", other.log()));
    let mut diff = String::new();
    for (name, own) in cases() {
        let embedded = state(&*node.runtime, &config, &embedded_sandbox, &own).await;
        let containerd = state(&remote, &remote_config, &remote_sandbox, &own).await;
        let (embedded_sandbox, remote_sandbox): (BTreeSet<&str>, BTreeSet<&str>) =
            (embedded.lines().collect(), containerd.lines().collect());
        assert!(embedded_sandbox.len() > 50 && remote_sandbox.len() > 50, "{embedded}\n{containerd}");
        diff.extend(
            embedded_sandbox.difference(&remote_sandbox).map(|line| format!("{name}: {line:?} only here\n")),
        );
        diff.extend(
            remote_sandbox
                .difference(&embedded_sandbox)
                .map(|line| format!("{name}: {line:?} only with containerd\n")),
        );
    }
    let removed = remote.remove_sandbox(&remote_sandbox).await;
    assert_eq!(diff, "");
    removed.unwrap_or_else(|error| panic!("{error}"));
}
