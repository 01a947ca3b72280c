//! Pods with user namespaces.

use std::os::unix::fs::{MetadataExt as _, PermissionsExt as _};

use runtime::cri::*;

use crate::breakout::privileged_security;
use crate::kit::{TestNode, TestPod, script, security, with};

pub const FIRST: u32 = 65536 * 7;

fn mappings() -> Vec<IdMapping> {
    vec![IdMapping { host_id: FIRST, container_id: 0, length: 65536 }]
}

pub fn namespace() -> UserNamespace {
    UserNamespace { mode: NamespaceMode::Pod.into(), uids: mappings(), gids: mappings() }
}

pub async fn pod<'a>(
    node: &'a TestNode,
    name: &str,
    change: impl FnOnce(&mut PodSandboxConfig),
) -> TestPod<'a> {
    let mut config = node.pod_config(name);
    let security = config.linux.as_mut().unwrap().security_context.as_mut().unwrap();
    security.namespace_options.as_mut().unwrap().userns_options = Some(namespace());
    change(&mut config);
    node.pod_with(config).await
}

fn mount(host: &std::path::Path, target: &str) -> Mount {
    Mount {
        container_path: target.into(),
        host_path: host.display().to_string(),
        uid_mappings: mappings(),
        gid_mappings: mappings(),
        ..Mount::default()
    }
}

/// The host's UIDs of a container's processes.
fn host_uids(pod: &TestPod<'_>, id: &str) -> Vec<String> {
    let parent = pod.config.linux.as_ref().unwrap().cgroup_parent.clone();
    let cgroups = sys::cgroup::Cgroups::of_host().unwrap();
    let pids = cgroups.processes(&format!("{parent}/{id}")).unwrap();
    let line = |pid| {
        let status = std::fs::read_to_string(format!("/proc/{pid}/status")).unwrap();
        status.lines().find(|line| line.starts_with("Uid:")).unwrap().to_owned()
    };
    pids.into_iter().map(line).collect()
}

pub async fn maps_container_root_to_another_host_user(node: &TestNode) {
    let host = node.dir.path().join("volume");
    std::fs::create_dir_all(&host).unwrap();
    std::fs::write(host.join("old"), "mine\n").unwrap();
    std::fs::set_permissions(host.join("old"), std::fs::Permissions::from_mode(0o600)).unwrap();
    let pod = pod(node, "users", |config| {
        let sysctls = [("net.ipv4.ip_unprivileged_port_start", "80"), ("kernel.shm_rmid_forced", "1")];
        config.linux.as_mut().unwrap().sysctls =
            sysctls.map(|(name, value)| (name.to_owned(), value.to_owned())).into();
    })
    .await;
    let owners = "id -u; cat /proc/self/uid_map | tr -s ' '; cat /data/old; echo x >/data/new; touch /made; \
        stat -c '%u:%g' / /bin/busybox /data/old /data/new /made /dev /dev/null /dev/shm /data /etc/resolv.conf /proc/self/fd/1; \
        chown 1234:55 /data/new; chmod 640 /data/new; \
        cat /proc/sys/net/ipv4/ip_unprivileged_port_start /proc/sys/kernel/shm_rmid_forced; echo again >/dev/stdout";
    let mut config = script(owners);
    config.mounts = vec![mount(&host, "/data")];
    let (code, output) = pod.finish(&config).await;
    let all = "0:0\n".repeat(11);
    assert_eq!(
        (code, output.as_str()),
        (0, format!("0\n 0 {FIRST} 65536\nmine\n{all}80\n1\nagain\n").as_str())
    );
    // A file it wrote has the owner in the pod's mapping.
    let new = std::fs::metadata(host.join("new")).unwrap();
    assert_eq!((new.uid(), new.gid(), new.mode() & 0o777), (1234, 55, 0o640));

    // Another user, a terminal, and the pod's network, which its root may configure.
    let mut other_user = security();
    other_user.run_as_user = Some(Int64Value { value: 1000 });
    other_user.supplemental_groups = vec![77];
    let (_, output) =
        pod.finish(&with(other_user, "id; touch /dev/shm/x && stat -c %u /dev/shm/x; touch /x")).await;
    assert!(
        output.contains("uid=1000 gid=0 groups=0,77\n1000\n") && output.contains("Permission denied"),
        "{output}"
    );
    let tty = ContainerConfig {
        tty: true,
        ..script("tty; stat -c '%u %g' $(tty); ls -l /dev/console | head -c 1")
    };
    let (_, output) = pod.finish(&tty).await;
    assert_eq!(output.replace('\r', ""), "/dev/pts/0\n0 5\nc\n");
    let mut admin = security();
    admin.capabilities =
        Some(Capability { add_capabilities: vec!["NET_ADMIN".into()], ..Capability::default() });
    let (_, output) = pod.finish(&with(admin, "ip addr add 10.1.2.3/32 dev lo && echo changed")).await;
    assert_eq!(output, "changed\n");

    let id = pod.start(&script("sleep 1000")).await;
    let line = format!("Uid:\t{FIRST}\t{FIRST}\t{FIRST}\t{FIRST}");
    assert_eq!(host_uids(&pod, &id), [line]);
}

pub async fn exec_runs_in_the_user_namespace(node: &TestNode) {
    let pod = pod(node, "inside", |_| {}).await;
    let id = pod.start(&script("sleep 1000")).await;
    let (_, output, _) = pod
        .exec(&id, "id -u; for ns in user mnt pid net ipc uts cgroup; do test $(readlink /proc/self/ns/$ns) = $(readlink /proc/1/ns/$ns) || echo another $ns; done; readlink /proc/self/ns/user; tr -s ' ' </proc/self/uid_map")
        .await;
    let host = std::fs::read_link("/proc/self/ns/user").unwrap().display().to_string();
    let lines: Vec<&str> = output.lines().collect();
    assert!(lines.len() == 3 && lines[0] == "0" && lines[1] != host, "{output}");
    assert_eq!(lines[2], format!(" 0 {FIRST} 65536"));
    // Operations that only root on the host may do, from a command.
    let (_, output, _) =
        pod.exec(&id, "(echo -1000 >/proc/self/oom_score_adj) 2>&1; kill -0 1 && echo alive").await;
    assert!(output.contains("ermission denied") && output.contains("alive"), "{output}");
    // Commands of a second skiff run in the user namespace, too.
    let later = node.reopen().await;
    let output = later
        .exec_sync(&id, &["cat", "/proc/self/uid_map"].map(str::to_owned), std::time::Duration::from_secs(60))
        .await
        .unwrap();
    assert!(String::from_utf8_lossy(&output.stdout).contains(&FIRST.to_string()));
}

pub async fn container_root_has_no_host_privileges(node: &TestNode) {
    let secret = node.dir.path().join("secret");
    std::fs::write(&secret, "secret\n").unwrap();
    std::fs::set_permissions(&secret, std::fs::Permissions::from_mode(0o600)).unwrap();
    let pod = pod(node, "strong", |_| {}).await;
    let script = "for one in 'umount /proc/kcore' 'umount /proc/sys' 'umount /sys' 'mount -o remount,rw,bind /sys' \
        'mount -o remount,rw,bind /proc/sys' 'mknod /x b 254 0' 'mknod /dev/y c 1 3' 'cat /secret' 'cat /proc/kcore | grep -q .' \
        'chown 0 /secret' 'dmesg' 'nice -n -5 true && nsenter -t 1 -m umount /proc/sys'; do \
        sh -c \"$one\" >/dev/null 2>&1 && echo \"$one\"; done; mount -t tmpfs none /tmp && echo own mounts; hostname other && hostname";
    let mut config = with(privileged_security(), script);
    // Without mappings the files have their owners on the host, which are not mapped in the pod.
    config.mounts =
        vec![Mount { uid_mappings: Vec::new(), gid_mappings: Vec::new(), ..mount(&secret, "/secret") }];
    let (_, output) = pod.finish(&config).await;
    assert_eq!(output, "own mounts\nother\n");
}

/// `procMount: Unmasked`: containers in a pod may mount a `/proc` of their own, which the kernel allows
/// only if theirs is completely visible.
pub async fn mounts_proc_with_all_paths_visible(node: &TestNode) {
    let pod = pod(node, "unmasked", |_| {}).await;
    let script = "unshare -m -p -f sh -c 'mount -t proc proc /tmp && readlink /tmp/self' 2>/dev/null || echo no; \
        (echo 1 >/proc/sys/kernel/panic) 2>/dev/null || echo not the host; \
        grep -c ' /proc/' /proc/self/mountinfo";
    let all_visible = LinuxContainerSecurityContext {
        masked_paths: Vec::new(),
        readonly_paths: Vec::new(),
        privileged: false,
        ..privileged_security()
    };
    let masked = LinuxContainerSecurityContext {
        masked_paths: security().masked_paths,
        readonly_paths: security().readonly_paths,
        ..all_visible.clone()
    };
    let (_, output) = pod.finish(&with(all_visible, script)).await;
    assert_eq!(output, "1\nnot the host\n0\n");
    let (_, output) = pod.finish(&with(masked, script)).await;
    assert!(output.starts_with("no\nnot the host\n") && !output.ends_with("\n0\n"), "{output}");
}

pub async fn mapping_failure_reports_the_reason(node: &TestNode) {
    let pod = pod(node, "why", |_| {}).await;
    let mut config = script("true");
    config.mounts = vec![mount(std::path::Path::new("/sys/class"), "/class")];
    let id = pod.create(&config).await;
    let error = node.runtime.start_container(&id).await.unwrap_err().message();
    let expected = "failed to set MOUNT_ATTR_IDMAP on /sys/class: invalid argument (maybe the filesystem used doesn't support idmap mounts on this kernel?)";
    assert!(error.ends_with(expected), "{error}");
    let mut wrong = node.pod_config("wrong");
    let security = wrong.linux.as_mut().unwrap().security_context.as_mut().unwrap();
    let root = vec![IdMapping { host_id: 0, container_id: 0, length: 65536 }];
    security.namespace_options.as_mut().unwrap().userns_options =
        Some(UserNamespace { mode: NamespaceMode::Pod.into(), uids: root.clone(), gids: root });
    let error = node.runtime.run_sandbox(&wrong, "").await.unwrap_err().message();
    assert!(error.contains("root of the pod must not be mapped to root of the host"), "{error}");
    let features = node.runtime.status().await.unwrap().runtime_handlers[0].features.clone().unwrap();
    assert!(features.user_namespaces);
}
