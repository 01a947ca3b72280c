//! Image volumes, mounts inside volumes, and security modules.

use std::path::Path;

use runtime::cri::*;

use crate::breakout::privileged_security;
use crate::kit::{TestNode, TestPod, script, security, wait_exited, with};
use crate::{image, users};

fn mount(target: &str, part: &str) -> Mount {
    Mount {
        container_path: target.into(),
        image: Some(ImageSpec { image: "data:1".into(), ..ImageSpec::default() }),
        image_sub_path: part.into(),
        ..Mount::default()
    }
}

fn import(node: &TestNode) {
    let lower = [("dir/file", "below\n", ""), ("dir/old", "old\n", ""), ("run", "#!/bin/sh\necho ran\n", "")];
    let upper =
        [("dir/file", "above\n", ""), ("dir/.wh.old", "", ""), ("out", "", "/etc"), ("up", "", "../../dir")];
    image::import(node, "data:1", &[&lower, &upper]);
    image::import(node, "one:1", &[&lower]);
}

pub async fn mounts_an_image_as_volume(node: &TestNode) {
    import(node);
    let pod = node.pod("images").await;
    // A single stream, since the order of lines of two streams is undefined.
    let look = "exec 2>&1; cat /all/dir/file /part/file /linked/file; ls /part; touch /all/x /part/y; /all/run; \
        grep -c ' /all .*ro,nosuid,nodev,noexec' /proc/mounts; cat /one/dir/old";
    let mut config = script(look);
    let mut one = mount("/one", "");
    one.image.as_mut().unwrap().image = "one:1".into();
    // Below another mount, and through a symlink that stays inside.
    config.mounts = vec![mount("/all", ""), mount("/part", "dir"), mount("/linked", "up"), one];
    let (_, said) = pod.finish(&config).await;
    let read_only = "touch: /all/x: Read-only file system\ntouch: /part/y: Read-only file system\n";
    let denied = "sh: /all/run: Permission denied\n";
    for expected in ["above\nabove\nabove\nfile\n", read_only, denied, "1\nold\n"] {
        assert!(said.contains(expected), "{expected}: {said}");
    }
    // The same for a pod with a user namespace, whose root owns the files of root.
    let others = users::pod(node, "owners", |_| {}).await;
    let mut config = script("stat -c %u /all/dir/file /part/file; cat /one/run | wc -l");
    let mut one = mount("/one", "");
    one.image.as_mut().unwrap().image = "one:1".into();
    config.mounts = vec![mount("/all", ""), mount("/part", "dir"), one];
    assert_eq!(others.finish(&config).await, (0, "0\n0\n2\n".into()));

    // A missing sub path is an error of the creation. A symlink never leads to the host.
    for part in ["nothing", "out/passwd", "dir/old"] {
        let mut config = script("true");
        config.mounts = vec![mount("/x", part)];
        let error = node.runtime.create_container(&pod.id, &config, &pod.config).await.unwrap_err().message();
        let expected = format!(
            "ImageVolumeMountFailed: cannot mount {part:?} of the image \"data:1\": no such file or directory"
        );
        assert_eq!(error, expected);
    }
    let mut config = script("true");
    let mut missing = mount("/x", "");
    missing.image.as_mut().unwrap().image = "nosuch:1".into();
    config.mounts = vec![missing];
    let error = node.runtime.create_container(&pod.id, &config, &pod.config).await.unwrap_err().message();
    assert_eq!(error, "ImageVolumeMountFailed: image \"nosuch:1\" not found");

    // The layers are in use while the container exists.
    let mut config = script("sleep 1000");
    config.mounts = vec![mount("/all", "")];
    let id = pod.start(&config).await;
    node.runtime.remove_image(&ImageSpec { image: "data:1".into(), ..ImageSpec::default() }).await.unwrap();
    assert_eq!(pod.exec(&id, "cat /all/dir/file").await.1, "above\n");
}

pub async fn missing_security_profile_fails_the_container(node: &TestNode) {
    let pod = node.pod("profiles").await;
    if Path::new("/sys/kernel/security/apparmor").exists() {
        return check_default_profile(node, &pod).await;
    }
    for kind in [ProfileType::RuntimeDefault, ProfileType::Localhost] {
        let mut security_context = security();
        security_context.apparmor =
            Some(SecurityProfile { profile_type: kind.into(), localhost_ref: "mine".into() });
        let config = with(security_context, "true");
        let error = node.runtime.create_container(&pod.id, &config, &pod.config).await.unwrap_err().message();
        assert_eq!(error, "apparmor is not supported");
    }
    // An SELinux label is ignored without SELinux.
    let mut free = security();
    let unconfined = ProfileType::Unconfined.into();
    free.apparmor = Some(SecurityProfile { profile_type: unconfined, localhost_ref: String::new() });
    free.selinux_options = Some(SelinuxOption { type_: "spc_t".into(), ..SelinuxOption::default() });
    assert_eq!(pod.finish(&with(free, "echo runs")).await, (0, "runs\n".into()));
}

/// On a host with AppArmor and its parser: all containers are confined, commands included, unless
/// unconfined is requested.
async fn check_default_profile(node: &TestNode, pod: &TestPod<'_>) {
    if std::process::Command::new("apparmor_parser").arg("--version").output().is_err() {
        return println!("skipped: needs apparmor_parser on a host with AppArmor");
    }
    let run_with_profile = |kind: ProfileType, name: &str| {
        let mut security_context = security();
        let localhost_ref = name.to_owned();
        security_context.apparmor = Some(SecurityProfile { profile_type: kind.into(), localhost_ref });
        security_context
    };
    let id = pod.start(&with(run_with_profile(ProfileType::RuntimeDefault, ""), "sleep 1000")).await;
    let profile = pod.exec(&id, "cat /proc/self/attr/current").await.1;
    assert!(profile.ends_with(" (enforce)\n"), "{profile}");
    let (_, said) = pod.finish(&with(security(), "cat /proc/self/attr/current")).await;
    assert_eq!(said, profile);
    let free = run_with_profile(ProfileType::Unconfined, "");
    assert_eq!(pod.finish(&with(free, "cat /proc/self/attr/current")).await, (0, "unconfined\n".into()));
    let missing = with(run_with_profile(ProfileType::Localhost, "mine"), "true");
    let error = node.runtime.create_container(&pod.id, &missing, &pod.config).await.unwrap_err().message();
    assert_eq!(error, "apparmor profile not found mine");
    // Only AppArmor denies this: capabilities and seccomp do not.
    let strong = LinuxContainerSecurityContext { apparmor: None, ..privileged_security() };
    let (_, said) =
        pod.finish(&with(strong, "mount -t tmpfs none /tmp && echo mounted || echo denied")).await;
    assert!(said.ends_with("denied\n"), "{said}");
}

/// A directory of the host that is a shared mount, with another mount in it.
struct SharedMount<'a>(&'a Path);

impl<'a> SharedMount<'a> {
    fn create(place: &'a Path) -> SharedMount<'a> {
        for name in ["inner", "late", "within"] {
            std::fs::create_dir_all(place.join(name)).unwrap();
        }
        rustix::mount::mount_bind(place, place).unwrap();
        rustix::mount::mount_change(place, rustix::mount::MountPropagationFlags::SHARED).unwrap();
        let shared = SharedMount(place);
        shared.mount("inner");
        shared
    }

    fn mount(&self, name: &str) {
        let flags = rustix::mount::MountFlags::empty();
        rustix::mount::mount("tmpfs", self.0.join(name), "tmpfs", flags, None).unwrap();
    }
}

impl Drop for SharedMount<'_> {
    fn drop(&mut self) {
        for place in [self.0.join("late"), self.0.join("inner"), self.0.to_owned()] {
            let _ = rustix::mount::unmount(place, rustix::mount::UnmountFlags::DETACH);
        }
    }
}

pub async fn mounts_inside_volumes(node: &TestNode) {
    let place = node.dir.path().join("nested");
    let shared = SharedMount::create(&place);
    let pod = node.pod("nested").await;
    let mount = |target: &str| Mount {
        container_path: target.into(),
        host_path: place.display().to_string(),
        ..Mount::default()
    };

    // Read-only applies to the mount itself, recursive read-only to nested mounts as well.
    let mut config =
        script("for d in /some /all; do touch $d/x || touch $d/inner/x && echo $d; done 2>/dev/null");
    config.mounts = vec![
        Mount { readonly: true, ..mount("/some") },
        Mount { readonly: true, recursive_read_only: true, ..mount("/all") },
    ];
    assert_eq!(pod.finish(&config).await.1, "/some\n");

    // Later mounts of the host appear only where propagation was requested.
    let mut config =
        script("until test -e /to/late/mark; do sleep 0.01; done; test -e /private/late/mark || echo one");
    config.mounts = vec![
        mount("/private"),
        Mount { propagation: MountPropagation::HostToContainer.into(), ..mount("/to") },
    ];
    let id = pod.start(&config).await;
    shared.mount("late");
    std::fs::write(place.join("late/mark"), "").unwrap();
    assert_eq!(wait_exited(&node.runtime, &id).await.exit_code, 0);
    assert!(pod.log_output("main.log").ends_with("one\n"), "{}", pod.log_output("main.log"));
    node.runtime.remove_container(&id).await.unwrap();

    // Mounts of a container propagate to the host only with Bidirectional.
    let mut free = security();
    free.privileged = true;
    for (propagation, goes_out) in
        [(MountPropagation::HostToContainer, false), (MountPropagation::Bidirectional, true)]
    {
        let text = "mount -t tmpfs none /both/within && touch /both/within/mark; sleep 1000";
        let mut config = with(free.clone(), text);
        config.mounts = vec![Mount { propagation: propagation.into(), ..mount("/both") }];
        let id = pod.start(&config).await;
        pod.exec(&id, "until test -e /both/within/mark; do sleep 0.01; done").await;
        assert_eq!(place.join("within/mark").exists(), goes_out);
        node.runtime.remove_container(&id).await.unwrap();
        let _ = rustix::mount::unmount(place.join("within"), rustix::mount::UnmountFlags::DETACH);
    }
}
