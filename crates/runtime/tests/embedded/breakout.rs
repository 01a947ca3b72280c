//! Attempts to break out of a container.

use runtime::cri::*;

use crate::kit::{TestNode, TestPod, script, security, wait_exited, with};

/// All capabilities and no seccomp filter: only namespaces, mounts and cgroups confine such a
/// container.
pub fn privileged_security() -> LinuxContainerSecurityContext {
    let mut strong = security();
    strong.capabilities = Some(Capability { add_capabilities: vec!["ALL".into()], ..Capability::default() });
    strong.seccomp = None;
    // The confinement must not come from AppArmor.
    let unconfined = ProfileType::Unconfined.into();
    strong.apparmor = Some(SecurityProfile { profile_type: unconfined, localhost_ref: String::new() });
    strong
}

/// Runs the commands one by one. The output says which of them succeeded.
async fn run_attempts(pod: &TestPod<'_>, security: LinuxContainerSecurityContext, list: &[&str]) -> String {
    let lines = list.iter().enumerate();
    let script: String =
        lines.map(|(at, line)| format!("({line}) >/dev/null 2>&1 && echo {at} succeeded; ")).collect();
    let (_, output) = pod.finish(&with(security, &format!("{script} echo the end"))).await;
    output
}

pub async fn container_cannot_write_to_the_runtime_binary(node: &TestNode) {
    let pod = node.pod("program").await;
    // Neither through a command nor as privileged root.
    let own = crate::kit::program();
    let before = std::fs::metadata(&own).unwrap().modified().unwrap();
    let id = pod.start(&with(privileged_security(), "i=0; while [ $i -lt 3000 ]; do for p in /proc/[0-9]*; do (echo x >>$p/exe) 2>/dev/null && readlink $p/exe; done; i=$((i+1)); done; sleep 1000")).await;
    for _ in 0..20 {
        pod.exec(&id, "true").await;
    }
    // The executable of the first process of the image may be reachable.
    let (_, output, _) = pod.exec(&id, "ls -l /proc/self/exe; (echo x >>/proc/self/exe) 2>&1").await;
    assert!(output.contains("Text file busy"), "{output}");
    assert_eq!(std::fs::metadata(&own).unwrap().modified().unwrap(), before);
}

pub async fn masked_and_read_only_paths_are_enforced(node: &TestNode) {
    let pod = node.pod("paths").await;
    let commands = [
        "echo 1 >/proc/sysrq-trigger",
        "echo x >/proc/sys/kernel/core_pattern",
        "head -c 1 /proc/kcore | grep -q .",
        "cat /proc/keys | grep -q .",
        "cat /proc/timer_list | grep -q .",
        "ls /proc/scsi | grep -q .",
        "ls /sys/firmware | grep -q .",
        "touch /proc/scsi/x",
        "touch /sys/firmware/x",
        "echo x >/proc/bus/x || echo x >/proc/irq/default_smp_affinity",
        "echo 1 >/sys/kernel/uevent_seqnum || echo x >/sys/kernel/uevent_helper",
        "test -e /sys/fs/cgroup/memory && echo 1 >/sys/fs/cgroup/memory/release_agent",
        "echo 1000000000 >/sys/fs/cgroup/memory/memory.limit_in_bytes || echo max >/sys/fs/cgroup/memory.max",
        "mkdir /sys/fs/cgroup/x || mkdir /sys/fs/cgroup/memory/x",
        "umount /proc/kcore",
        "umount /proc/sys",
        "mount -o remount,rw /proc/sys",
        "mount -o remount,rw,bind /proc/sys",
    ];
    assert_eq!(run_attempts(&pod, security(), &commands).await, "the end\n");
}

pub async fn container_cannot_mount(node: &TestNode) {
    let pod = node.pod("mounts").await;
    let commands = [
        "mkdir -p /mnt && mount -t tmpfs none /mnt",
        "mount --bind / /mnt",
        "mount -t proc proc /mnt",
        "mount -t cgroup -o memory none /mnt",
        "mount -t overlay -o lowerdir=/bin:/etc none /mnt",
        "mount --make-rshared /",
        "pivot_root / /mnt",
        "unshare -m true",
        "unshare -U true",
        "unshare -r mount -t tmpfs none /mnt",
        "nsenter -t 1 -m true",
        "test -e /proc/1/root/../../../../../etc/machine-id",
        "chroot /proc/1/root/.. test -e /work",
        "cat /proc/1/mountinfo | grep -q /var/lib",
    ];
    assert_eq!(run_attempts(&pod, security(), &commands).await, "the end\n");
    // Without an open descriptor, no path leads to the host.
    let (_, output) = pod
        .finish(&script("ls -l /proc/self/fd 2>/dev/null | grep -c -- '->'; readlink /proc/self/cwd"))
        .await;
    assert_eq!(output, "3\n/\n", "the three streams");
}

pub async fn container_cannot_open_host_devices(node: &TestNode) {
    let pod = node.pod("devices").await;
    let disk = std::fs::read_to_string("/proc/partitions").unwrap_or_default();
    let numbers: Vec<String> = disk
        .lines()
        .skip(2)
        .filter_map(|line| line.split_whitespace().nth(1).map(|_| line))
        .map(|line| {
            let mut words = line.split_whitespace();
            format!("{} {}", words.next().unwrap_or_default(), words.next().unwrap_or_default())
        })
        .take(1)
        .collect();
    let mut commands = vec![
        "mknod /mem c 1 1 && head -c 1 /mem",
        "mknod /kmsg c 1 11 && head -c 1 /kmsg",
        "mknod /dev/port c 1 4 && head -c 1 /dev/port",
    ];
    let disk = numbers
        .first()
        .map(|numbers| format!("mknod /disk b {numbers} && head -c 1 /disk"))
        .unwrap_or("false".into());
    commands.push(&disk);
    commands.push("mknod /fuse c 10 229 && : <>/fuse");
    commands.push("mknod /tun c 10 200 && : <>/tun");
    // Also for privileged capabilities: the cgroup denies the devices.
    assert_eq!(run_attempts(&pod, security(), &commands).await, "the end\n");
    assert_eq!(run_attempts(&pod, privileged_security(), &commands).await, "the end\n");
    // The default devices can be used, and created again.
    let usable = "echo x >/dev/null; head -c 1 /dev/zero | wc -c; head -c 1 /dev/urandom | wc -c; mknod /n c 1 3 && echo x >/n && echo made";
    assert_eq!(pod.finish(&script(usable)).await, (0, "1\n1\nmade\n".into()));
    // A device of the container can be used with its permissions.
    let given = |permissions: &str, text: &str| ContainerConfig {
        devices: vec![Device {
            host_path: "/dev/kmsg".into(),
            container_path: "/dev/given".into(),
            permissions: permissions.into(),
        }],
        ..with(privileged_security(), text)
    };
    let (_, output) = pod
        .finish(&given(
            "r",
            "(: </dev/given) 2>/dev/null && echo read; (: >>/dev/given) 2>/dev/null && echo written; true",
        ))
        .await;
    assert_eq!(output, "read\n");
    // A privileged container can use all devices.
    let mut free = security();
    free.privileged = true;
    let (_, output) = pod.finish(&with(free, "mknod /kmsg c 1 11 && (: </kmsg) && echo opened")).await;
    assert_eq!(output, "opened\n");
}

pub async fn applies_capabilities_and_no_new_privileges(node: &TestNode) {
    let pod = node.pod("caps").await;
    let status = "grep -E 'CapEff|CapBnd|CapInh|CapAmb|NoNewPrivs|Seccomp:' /proc/self/status";
    let (_, output) = pod.finish(&script(status)).await;
    let expected = "CapInh:\t0000000000000000\nCapEff:\t00000000a80425fb\nCapBnd:\t00000000a80425fb\nCapAmb:\t0000000000000000\nNoNewPrivs:\t0\nSeccomp:\t2\n";
    assert_eq!(output, expected);
    let mut restricted = security();
    restricted.capabilities = Some(Capability {
        drop_capabilities: vec!["ALL".into()],
        add_capabilities: vec!["NET_BIND_SERVICE".into()],
        ..Capability::default()
    });
    restricted.no_new_privs = true;
    restricted.run_as_user = Some(Int64Value { value: 1000 });
    let (_, output) = pod.finish(&with(restricted, status)).await;
    let expected = "CapInh:\t0000000000000000\nCapEff:\t0000000000000000\nCapBnd:\t0000000000000400\nCapAmb:\t0000000000000000\nNoNewPrivs:\t1\nSeccomp:\t2\n";
    assert_eq!(output, expected);
    let mut free = security();
    free.privileged = true;
    let (_, output) = pod.finish(&with(free, "grep -E 'CapEff|Seccomp:' /proc/self/status; mount -t tmpfs none /mnt 2>&1 || mkdir /mnt && mount -t tmpfs none /mnt && echo mounted; ls /dev/vda /dev/loop-control 2>&1 | head -n 1")).await;
    assert!(output.contains("Seccomp:\t0\n") && output.contains("mounted\n"), "{output}");
}

/// A container in the host's cgroup namespace must not change the mount options of the host's cgroups,
/// which all mounts share.
pub async fn container_keeps_host_cgroup_mount_options(node: &TestNode) {
    let of_host = || {
        let mounts = std::fs::read_to_string("/proc/self/mounts").unwrap();
        let found = mounts.lines().map(|line| line.split(' ').map(str::to_owned).collect::<Vec<_>>());
        found.into_iter().find(|words| words[2] == "cgroup2")
    };
    let groups = sys::cgroup::Cgroups::of_host().unwrap();
    let Some(before) = of_host().filter(|_| groups.is_v2()) else {
        return println!("skipped: needs cgroup v2");
    };
    let pod = node.pod("groups").await;
    let mut free = security();
    free.privileged = true;
    let look = "grep ' /sys/fs/cgroup cgroup2 ' /proc/mounts; cat /proc/self/cgroup; mkdir /sys/fs/cgroup/skiff-test-made \
        && rmdir /sys/fs/cgroup/skiff-test-made && echo made";
    let (_, output) = pod.finish(&with(free, look)).await;
    assert_eq!(of_host(), Some(before.clone()));
    if before[3] == "rw,relatime" {
        println!("the host's cgroup mount has no options that could change");
    }
    // A clone of the host's mount shows the mount source that was given here.
    let (mount, rest) = output.split_once('\n').unwrap();
    assert!(
        mount.starts_with(&format!("{} /sys/fs/cgroup cgroup2 rw,nosuid,nodev,noexec,", before[0])),
        "{output}"
    );
    assert!(rest.contains("/skiff-test-") && rest.ends_with("\nmade\n"), "{output}");
    // Other containers see only their own cgroup, read-only.
    let look = "grep ' /sys/fs/cgroup cgroup2 ' /proc/mounts; cat /proc/self/cgroup";
    let (_, output) = pod.finish(&script(look)).await;
    assert!(output.contains(" ro,nosuid,nodev,noexec,") && output.ends_with("0::/\n"), "{output}");
}

/// An image whose directories are symlinks to directories of the host.
pub async fn image_symlinks_do_not_redirect_mounts(node: &TestNode) {
    let links =
        [("data", "/etc"), ("up", "../../../../../.."), ("elsewhere", "/proc/1/root"), ("process", "/proc")];
    import_links(node, "evil:1", &links);
    let host = node.dir.path().join("mine");
    std::fs::create_dir_all(&host).unwrap();
    let pod = node.pod("links").await;
    let mut config = script("ls -d /data/x/y /proc/self/status >/dev/null && echo inside; ls /elsewhere");
    config.image = Some(ImageSpec { image: "evil:1".into(), ..ImageSpec::default() });
    let target = |path: &str| Mount {
        container_path: path.into(),
        host_path: host.display().to_string(),
        ..Mount::default()
    };
    config.mounts = vec![target("/data/x/y"), target("/up/skiff-made-this")];
    let (code, output) = pod.finish(&config).await;
    assert!(output.starts_with("inside\n"), "{code} {output}");
    assert!(!std::path::Path::new("/skiff-made-this").exists() && !std::path::Path::new("/etc/x").exists());
    // Targets inside /proc are rejected, and so are the allowed files of /proc when reached through a
    // symlink.
    for path in ["/process/sys", "/process/cpuinfo"] {
        let mut config = script("true");
        config.image = Some(ImageSpec { image: "evil:1".into(), ..ImageSpec::default() });
        config.mounts = vec![target(path)];
        let id = pod.create(&config).await;
        let error = node.runtime.start_container(&id).await.unwrap_err().message();
        assert!(
            error.ends_with(&format!("{path:?} cannot be mounted because it is inside /proc")),
            "{error}"
        );
    }
}

/// Files of `/proc` about the machine can be mounted over, and no others.
pub async fn only_allowed_proc_files_can_be_mounted_over(node: &TestNode) {
    let (file, directory) = (node.dir.path().join("injected"), node.dir.path().join("directory"));
    std::fs::write(&file, "injected\n").unwrap();
    std::fs::create_dir_all(&directory).unwrap();
    let mount = |path: &str, source: &std::path::Path| Mount {
        container_path: path.into(),
        host_path: source.display().to_string(),
        ..Mount::default()
    };
    let names = ["cpuinfo", "diskstats", "meminfo", "stat", "swaps", "uptime", "loadavg", "slabinfo"];
    let names = names.into_iter().chain(["sys/kernel/ns_last_pid", "sys/crypto/fips_enabled"]);
    // Not every kernel has all of them.
    let paths = names.map(|name| format!("/proc/{name}")).filter(|path| std::fs::exists(path).unwrap());
    let paths: Vec<String> = paths.collect();
    let pod = node.pod("injected").await;
    let mut config = script(&format!("cat {}; grep -c ^MemTotal /proc/meminfo", paths.join(" ")));
    config.mounts = paths.iter().map(|path| mount(path, &file)).collect();
    let (_, output) = pod.finish(&config).await;
    assert_eq!(output, "injected\n".repeat(paths.len()) + "0\n");
    // A read-only path stays read-only with a mount in it.
    let path = "/proc/sys/kernel/ns_last_pid";
    if paths.iter().any(|known| known == path) {
        let mut config =
            with(privileged_security(), &format!("(echo x >{path}) 2>/dev/null || echo protected"));
        config.mounts = vec![mount(path, &file)];
        assert_eq!(pod.finish(&config).await, (0, "protected\n".into()));
    }
    for (path, source) in [
        ("/proc", &directory),
        ("/proc/sys", &directory),
        ("/proc/self/attr", &directory),
        ("/proc/1/cpuinfo", &file),
        ("/proc/version", &file),
        ("/proc/sys/kernel/core_pattern", &file),
        ("/proc/sys/../cpuinfo", &file),
        ("/proc/cpuinfo", &directory),
        ("/proc/cpuinfo/x", &file),
    ] {
        let mut config = script("true");
        config.mounts = vec![mount(path, source)];
        let id = pod.create(&config).await;
        let error = node.runtime.start_container(&id).await.unwrap_err().message();
        assert!(error.contains(&format!("{path:?}")), "{error}");
    }
}

/// A dangling symlink can be mounted on: its target is created, which is never on the host.
pub async fn dangling_symlinks_resolve_inside_the_container(node: &TestNode) {
    let (host, volume) = (node.dir.path().join("mine"), node.dir.path().join("volume"));
    for place in [&host, &volume] {
        std::fs::create_dir_all(place).unwrap();
    }
    std::fs::write(host.join("file"), "of the host\n").unwrap();
    let outside = node.dir.path().join("outside");
    let (out, up) = (outside.display().to_string(), format!("{}{}", "../".repeat(24), outside.display()));
    std::os::unix::fs::symlink(&out, volume.join("out")).unwrap();
    std::os::unix::fs::symlink(&up, volume.join("up")).unwrap();
    let links = [
        ("etc/resolv.conf", "../run/systemd/resolve/stub-resolv.conf"),
        ("etc/localtime", "/usr/share/zoneinfo/UTC"),
        ("var/run", "/run"),
        ("deep/link", "../none/../first"),
        ("first", "second"),
        ("second", "./third"),
        ("a", "b"),
        ("b", "a"),
        ("grows", "none/../grows"),
        ("number", "/proc/self/fd/1000/x"),
    ];
    import_links(node, "dangling:1", &links);
    let pod = node.pod("dangling").await;
    let mount = |target: &str, source: &std::path::Path| Mount {
        container_path: target.into(),
        host_path: source.display().to_string(),
        ..Mount::default()
    };
    let of_links = |text: &str, mounts: Vec<Mount>| {
        let image = Some(ImageSpec { image: "dangling:1".into(), ..ImageSpec::default() });
        ContainerConfig { image, mounts, ..script(text) }
    };
    let file = host.join("file");
    let mounts = vec![
        mount("/etc/localtime", &file),
        mount("/var/run/service", &host),
        mount("/deep/link", &host),
        mount("/vol", &volume),
        mount("/vol/out", &file),
        mount("/vol/up/further", &file),
    ];
    let look = format!(
        "cd /; busybox grep -c 10.43.0.10 run/systemd/resolve/stub-resolv.conf; \
         busybox cat usr/share/zoneinfo/UTC run/service/file third/file .{out}; ls vol"
    );
    let of_host = "of the host\n";
    // Both lead to the same path, which is a file for one mount and a directory for the other.
    let id = pod.create(&of_links("true", mounts.clone())).await;
    let error = node.runtime.start_container(&id).await.unwrap_err().message();
    assert!(error.contains("mount on \"/vol/up/further\""), "{error}");
    let (_, output) = pod.finish(&of_links(&look, mounts[..5].to_vec())).await;
    assert_eq!(output, format!("1\n{}out\nup\n", of_host.repeat(4)));
    let mounts = vec![mount("/vol", &volume), mount("/vol/up/further", &file)];
    let look = format!("busybox cat {out}/further");
    assert_eq!(pod.finish(&of_links(&look, mounts)).await, (0, of_host.into()));
    for target in ["/a", "/a/x", "/grows", "/number"] {
        let id = pod.create(&of_links("true", vec![mount(target, &host)])).await;
        let error = node.runtime.start_container(&id).await.unwrap_err().message();
        assert!(error.contains(&format!("mount on {target:?}")), "{error}");
    }
    assert!(!outside.exists() && std::fs::read_dir(&host).unwrap().count() == 1);
}

/// A working directory that names a descriptor which is open during the start.
pub async fn working_directory_cannot_be_a_host_fd(node: &TestNode) {
    let pod = node.pod("begin").await;
    let mut started_count = 0;
    for number in 0..30 {
        let mut config =
            script("pwd; ls ../../../../../../../../..; cat ../../../../../../../../../etc/machine-id");
        config.working_dir = format!("/proc/self/fd/{number}");
        let id = pod.create(&config).await;
        let _ = std::fs::remove_file(node.logs().join("main.log"));
        if node.runtime.start_container(&id).await.is_ok() {
            wait_exited(&node.runtime, &id).await;
            let output = pod.log_output("main.log");
            assert!(!output.contains("\nboot\n") && !output.contains("\nlost+found\n"), "{number}: {output}");
            started_count += 1;
        }
        node.runtime.remove_container(&id).await.unwrap();
    }
    assert!(started_count < 30);
}

/// Neither an executable nor a directory to create can be reached through such a descriptor.
pub async fn container_cannot_use_inherited_file_descriptors(node: &TestNode) {
    let pod = node.pod("numbers").await;
    let up = "../".repeat(24);
    let escape_path = node.dir.path().join("evil");
    for number in 3..40 {
        let mut config = script("true");
        config.command = vec![format!("/proc/self/fd/{number}/{up}bin/true")];
        let id = pod.create(&config).await;
        let result = node.runtime.start_container(&id).await;
        assert!(result.is_err(), "an executable was reached through descriptor {number}");
        node.runtime.remove_container(&id).await.unwrap();
        let mut config = script("true");
        config.working_dir = format!("/proc/self/fd/{number}/{up}{}", escape_path.display());
        let id = pod.create(&config).await;
        let _ = node.runtime.start_container(&id).await;
        node.runtime.remove_container(&id).await.unwrap();
        assert!(!escape_path.exists(), "a directory was created through descriptor {number}");
    }
    // Nor through a descriptor that a command has.
    let id = pod.start(&script("sleep 1000")).await;
    for number in 3..40 {
        let inside = format!("/proc/self/fd/{number}/{up}bin/true");
        let run = node.runtime.exec_sync(&id, &[inside], std::time::Duration::from_secs(10)).await;
        assert!(run.is_err(), "a command was reached through descriptor {number}");
    }
}

/// A volume mounted on `/dev` has a symlink for `null`, which would replace the mask of masked paths.
pub async fn volume_cannot_replace_the_mask_device(node: &TestNode) {
    let dev = node.dir.path().join("dev");
    std::fs::create_dir_all(&dev).unwrap();
    std::os::unix::fs::symlink("/proc/sys/kernel/core_pattern", dev.join("null")).unwrap();
    let pod = node.pod("null").await;
    let mut config = script(
        "mkdir -p /tmp; cat /proc/keys; { echo x >/proc/keys; } 2>/tmp/said; cat /proc/keys; echo the end",
    );
    config.mounts = vec![Mount {
        container_path: "/dev".into(),
        host_path: dev.display().to_string(),
        ..Mount::default()
    }];
    let before = std::fs::read_to_string("/proc/sys/kernel/core_pattern").unwrap();
    let (_, output) = pod.finish(&config).await;
    assert_eq!(std::fs::read_to_string("/proc/sys/kernel/core_pattern").unwrap(), before);
    assert_eq!(output, "the end\n");
}

/// An image whose `/proc` is a symlink that a volume could hide behind.
pub async fn rejects_an_image_with_a_proc_symlink(node: &TestNode) {
    let entries = [("bin/none", "", ""), ("vol/proc/none", "", ""), ("proc", "", "/vol/proc")];
    crate::image::import(node, "linked:1", &[&entries]);
    let pod = node.pod("linked").await;
    let mut config = script("true");
    config.image = Some(ImageSpec { image: "linked:1".into(), ..ImageSpec::default() });
    let id = pod.create(&config).await;
    let error = node.runtime.start_container(&id).await.unwrap_err().message();
    assert!(error.ends_with("/proc must be mounted on ordinary directory"), "{error}");
}

/// The pause process of a shared PID namespace has no privileges or files that containers could use.
pub async fn pause_process_has_no_privileges(node: &TestNode) {
    let mut config = node.pod_config("keeper");
    let options = NamespaceOption { pid: NamespaceMode::Pod.into(), ..NamespaceOption::default() };
    let mut context =
        LinuxSandboxSecurityContext { namespace_options: Some(options.clone()), ..Default::default() };
    context.privileged = false;
    config.linux.as_mut().unwrap().security_context = Some(context);
    let pod = node.pod_with(config).await;
    let sandbox_status = node.runtime.sandbox_status(&pod.id).await.unwrap().linux.unwrap();
    assert_eq!(sandbox_status.namespaces.unwrap().options.as_ref(), Some(&options));
    let mut strong = privileged_security();
    strong.namespace_options = Some(options);
    let look = "grep -E '^(Uid|CapEff|CapBnd|NoNewPrivs|Seccomp):' /proc/1/status; ls -a /proc/1/root/ | grep -vE '^[.]*$'; \
        ls /proc/1/root/../../etc 2>/dev/null; ls /proc/1/cwd/; ls -l /proc/1/fd | grep -vE 'total|/dev/null|socket:'; echo the end";
    let (_, output) = pod.finish(&with(strong, look)).await;
    let expected = "Uid:\t65534\t65534\t65534\t65534\nCapEff:\t0000000000000000\nCapBnd:\t0000000000000000\nNoNewPrivs:\t1\nSeccomp:\t2\nthe end\n";
    assert_eq!(output, expected);
}

/// A numeric user is never looked up as a name; and a name keeps the user that it had at the start of
/// the container.
pub async fn commands_run_as_the_user_of_the_container(node: &TestNode) {
    let passwd = node.dir.path().join("passwd");
    std::fs::write(&passwd, "1000:x:0:0::/:/bin/sh\napp:x:1001:1001::/:/bin/sh\n").unwrap();
    let pod = node.pod("users").await;
    let mounted = |user: &str, text: &str| {
        let mut security = security();
        match user.parse() {
            Ok(value) => security.run_as_user = Some(Int64Value { value }),
            Err(_) => security.run_as_username = user.into(),
        }
        let mount = Mount {
            container_path: "/etc/passwd".into(),
            host_path: passwd.display().to_string(),
            ..Mount::default()
        };
        ContainerConfig { mounts: vec![mount], ..with(security, text) }
    };
    assert_eq!(pod.finish(&mounted("1000", "id -u")).await, (0, "1000\n".into()));
    let id = pod.start(&mounted("app", "sleep 1000")).await;
    std::fs::write(&passwd, "app:x:0:0::/:/bin/sh\n").unwrap();
    let (_, output, _) = pod.exec(&id, "id -u").await;
    assert_eq!(output, "1001\n");
}

/// A container that writes faster than its log can be written can be stopped like any other.
pub async fn container_with_fast_output_can_be_stopped(node: &TestNode) {
    let pod = node.pod("talker").await;
    let id = pod.start(&script("trap '' TERM; while true; do yes 2>/dev/null; done")).await;
    let (code, output, _) = pod.exec(&id, "echo here").await;
    assert_eq!((code, output.as_str()), (0, "here\n"));
    let started = std::time::Instant::now();
    node.runtime
        .stop_container(&id, std::time::Duration::from_secs(1))
        .await
        .unwrap_or_else(|error| panic!("{error}"));
    assert!(started.elapsed() < std::time::Duration::from_secs(30), "{:?}", started.elapsed());
    assert_eq!(wait_exited(&node.runtime, &id).await.exit_code, 137);
}

/// A directory of a volume is swapped with a symlink all the time, while volumes are mounted below it.
pub async fn swapped_volume_directories_stay_inside(node: &TestNode) {
    let (shared, other, host) =
        (node.dir.path().join("shared"), node.dir.path().join("other"), node.dir.path().join("host"));
    for place in [&shared, &other, &host] {
        std::fs::create_dir_all(place).unwrap();
    }
    std::fs::write(other.join("mark"), "").unwrap();
    let up = "../".repeat(20);
    let target = format!("{up}{}", host.display());
    let pod = node.pod("exchange").await;
    let mount = |path: &str, source: &std::path::Path| Mount {
        container_path: path.into(),
        host_path: source.display().to_string(),
        ..Mount::default()
    };
    let exchange = format!(
        "cd /vol; mkdir d; ln -s {target} l; while true; do mv d x; mv l d; mv d l; mv x d; done 2>/dev/null"
    );
    let mut config = script(&exchange);
    config.mounts = vec![mount("/vol", &shared)];
    config.log_path = "exchange.log".into();
    pod.start(&config).await;
    let mut inside = 0;
    for _ in 0..40 {
        let mut config = script("true");
        config.mounts = vec![mount("/vol", &shared), mount("/vol/d/deep/place", &other)];
        let id = pod.create(&config).await;
        if node.runtime.start_container(&id).await.is_ok() {
            wait_exited(&node.runtime, &id).await;
            inside += 1;
        }
        node.runtime.remove_container(&id).await.unwrap();
        // Nothing was created or mounted at the symlink's target on the host.
        assert_eq!(std::fs::read_dir(&host).unwrap().count(), 0);
    }
    assert!(inside > 0);
}

/// Imports an image that has a shell and these symlinks.
fn import_links(node: &TestNode, name: &str, links: &[(&str, &str)]) {
    let mut layer = tar::Builder::new(Vec::new());
    for (path, target) in [("bin/sh", "busybox"), ("bin/ls", "busybox")].iter().chain(links) {
        let mut header = tar::Header::new_gnu();
        header.set_entry_type(tar::EntryType::Symlink);
        header.set_size(0);
        header.set_mode(0o777);
        layer.append_link(&mut header, path, target).unwrap();
    }
    let mut header = tar::Header::new_gnu();
    header.set_mode(0o755);
    let busybox = std::fs::read("/bin/busybox").unwrap();
    header.set_size(busybox.len() as u64);
    layer.append_data(&mut header, "bin/busybox", &busybox[..]).unwrap();
    let archive = crate::image::archive(name, &[layer.into_inner().unwrap()]);
    ::image::import(node.embedded.images(), std::io::Cursor::new(archive)).unwrap();
}

pub async fn seccomp_applies_to_exec_commands(node: &TestNode) {
    let pod = node.pod("filter").await;
    let id = pod.start(&script("sleep 1000")).await;
    let (code, _, output) = pod.exec(&id, "unshare -U true").await;
    assert!(code != 0 && output.contains("Operation not permitted"), "{code} {output}");
    assert_eq!(
        pod.exec(&id, "grep -E 'Seccomp:|CapEff' /proc/self/status").await.1,
        "CapEff:\t00000000a80425fb\nSeccomp:\t2\n"
    );
    let profiles = node.dir.path().join("seccomp");
    std::fs::create_dir_all(&profiles).unwrap();
    let text = r#"{"defaultAction":"SCMP_ACT_ALLOW","syscalls":[{"names":["mkdir","mkdirat"],"action":"SCMP_ACT_ERRNO","errnoRet":13}]}"#;
    std::fs::write(profiles.join("no-mkdir.json"), text).unwrap();
    let mut own = security();
    own.seccomp = Some(SecurityProfile {
        profile_type: ProfileType::Localhost.into(),
        localhost_ref: "no-mkdir.json".into(),
    });
    let (code, output) = pod.finish(&with(own, "mkdir /x")).await;
    assert_eq!((code, output.as_str()), (1, "mkdir: can't create directory '/x': Permission denied\n"));
}
