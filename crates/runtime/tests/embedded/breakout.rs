//! Ways out of a container that must not be any.

use std::io::Write as _;

use runtime::Runtime;
use runtime::cri::*;

use crate::kit::{Node, script, security, with};

pub async fn nothing_leads_out(node: &Node) {
    let pod = node.pod("escape").await;
    let (_, said) = pod
        .finish(&script(
            "mount -t tmpfs none /mnt; mount --bind / /mnt; unshare -m true; mknod /disk b 254 0 && cat /disk | head -c 1; \
             echo 1 >/proc/sysrq-trigger; echo x >/proc/sys/kernel/core_pattern; cat /proc/kcore | head -c 1; \
             ls /proc/scsi /sys/firmware; echo 1 >/sys/fs/cgroup/memory/release_agent; mount -o remount,rw /proc/sys; \
             echo c >/proc/1/oom_score_adj; cat /proc/keys; ls /proc/1/root/..; umount /proc/kcore; echo the end",
        ))
        .await;
    for allowed in ["SysRq", "rw,"] {
        assert!(!said.contains(allowed), "{said}");
    }
    for denied in [
        "can't create /sys/fs/cgroup/memory/release_agent: Read-only file system",
        "can't create /proc/sys/kernel/core_pattern: Read-only file system",
        "the end",
    ] {
        assert!(said.contains(denied), "{denied}: {said}");
    }
    let denials = said.matches("Operation not permitted").count() + said.matches("permission denied").count();
    assert!(denials >= 4, "{said}");

    // The program a container's processes come from cannot be written to, not even by root in there.
    let mut strong = security();
    strong.capabilities = Some(Capability { add_capabilities: vec!["ALL".into()], ..Capability::default() });
    strong.seccomp = None;
    let own = std::env::current_exe().unwrap();
    let before = std::fs::metadata(&own).unwrap().modified().unwrap();
    let id = pod.start(&with(strong, "i=0; while [ $i -lt 3000 ]; do for p in /proc/[0-9]*; do (echo x >>$p/exe) 2>/dev/null && readlink $p/exe; done; i=$((i+1)); done; sleep 1000")).await;
    for _ in 0..20 {
        pod.exec(&id, "true").await;
    }
    assert_eq!(std::fs::metadata(&own).unwrap().modified().unwrap(), before);
}

pub async fn privileges_are_what_they_should_be(node: &Node) {
    let pod = node.pod("caps").await;
    let status = "grep -E 'CapEff|CapBnd|CapInh|CapAmb|NoNewPrivs|Seccomp:' /proc/self/status";
    let (_, said) = pod.finish(&script(status)).await;
    let expected = "CapInh:\t0000000000000000\nCapEff:\t00000000a80425fb\nCapBnd:\t00000000a80425fb\nCapAmb:\t0000000000000000\nNoNewPrivs:\t0\nSeccomp:\t2\n";
    assert_eq!(said, expected);
    let mut tight = security();
    tight.capabilities = Some(Capability {
        drop_capabilities: vec!["ALL".into()],
        add_capabilities: vec!["NET_BIND_SERVICE".into()],
        ..Capability::default()
    });
    tight.no_new_privs = true;
    tight.run_as_user = Some(Int64Value { value: 1000 });
    let (_, said) = pod.finish(&with(tight, status)).await;
    let expected = "CapInh:\t0000000000000000\nCapEff:\t0000000000000000\nCapBnd:\t0000000000000400\nCapAmb:\t0000000000000000\nNoNewPrivs:\t1\nSeccomp:\t2\n";
    assert_eq!(said, expected);
    let mut free = security();
    free.privileged = true;
    let (_, said) = pod.finish(&with(free, "grep -E 'CapEff|Seccomp:' /proc/self/status; mount -t tmpfs none /mnt 2>&1 || mkdir /mnt && mount -t tmpfs none /mnt && echo mounted; ls /dev/vda /dev/loop-control 2>&1 | head -n 1")).await;
    assert!(said.contains("Seccomp:\t0\n") && said.contains("mounted\n"), "{said}");
}

/// An image whose directories are links to the host's.
pub async fn images_cannot_mount_elsewhere(node: &Node) {
    let archive = evil_image(node.dir.path());
    image::import(node.runtime.images(), std::fs::File::open(archive).unwrap()).unwrap();
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
    let (code, said) = pod.finish(&config).await;
    assert!(said.starts_with("inside\n"), "{code} {said}");
    assert!(!std::path::Path::new("/skiff-made-this").exists() && !std::path::Path::new("/etc/x").exists());
    // A place inside /proc is none.
    let mut config = script("true");
    config.image = Some(ImageSpec { image: "evil:1".into(), ..ImageSpec::default() });
    config.mounts = vec![target("/process/sys")];
    let id = pod.create(&config).await;
    let error = node.runtime.start_container(&id).await.unwrap_err().message();
    assert!(error.ends_with("\"/process/sys\" cannot be mounted because it is inside /proc"), "{error}");
}

fn evil_image(dir: &std::path::Path) -> std::path::PathBuf {
    let mut layer = tar::Builder::new(Vec::new());
    let mut link = |name: &str, target: &str| {
        let mut header = tar::Header::new_gnu();
        header.set_entry_type(tar::EntryType::Symlink);
        header.set_size(0);
        header.set_mode(0o777);
        layer.append_link(&mut header, name, target).unwrap();
    };
    link("data", "/etc");
    link("up", "../../../../../..");
    link("elsewhere", "/proc/1/root");
    link("process", "/proc");
    link("bin/sh", "busybox");
    link("bin/ls", "busybox");
    let mut header = tar::Header::new_gnu();
    header.set_mode(0o755);
    let busybox = std::fs::read("/bin/busybox").unwrap();
    header.set_size(busybox.len() as u64);
    layer.append_data(&mut header, "bin/busybox", &busybox[..]).unwrap();
    let layer = layer.into_inner().unwrap();
    let digest = image::Digest::of(&layer);
    let config = format!(
        r#"{{"os":"linux","architecture":"amd64","config":{{"Env":["PATH=/bin"]}},"rootfs":{{"type":"layers","diff_ids":["{digest}"]}}}}"#
    );
    let manifest = r#"[{"Config":"c.json","RepoTags":["evil:1"],"Layers":["l.tar"]}]"#;
    let mut archive = tar::Builder::new(Vec::new());
    for (name, bytes) in
        [("c.json", config.as_bytes()), ("l.tar", &layer), ("manifest.json", manifest.as_bytes())]
    {
        let mut header = tar::Header::new_gnu();
        header.set_mode(0o644);
        header.set_size(bytes.len() as u64);
        archive.append_data(&mut header, name, bytes).unwrap();
    }
    let path = dir.join("evil.tar");
    std::fs::File::create(&path).unwrap().write_all(&archive.into_inner().unwrap()).unwrap();
    path
}

pub async fn seccomp_holds_for_commands_too(node: &Node) {
    let pod = node.pod("filter").await;
    let id = pod.start(&script("sleep 1000")).await;
    let (code, _, said) = pod.exec(&id, "unshare -U true").await;
    assert!(code != 0 && said.contains("Operation not permitted"), "{code} {said}");
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
    let (code, said) = pod.finish(&with(own, "mkdir /x")).await;
    assert_eq!((code, said.as_str()), (1, "mkdir: can't create directory '/x': Permission denied\n"));
}
