//! Images as volumes, and what the kernel's security modules are asked for.

use std::path::Path;

use runtime::cri::*;

use crate::kit::{Node, script, security, with};
use crate::{image, users};

fn mount(target: &str, part: &str) -> Mount {
    Mount {
        container_path: target.into(),
        image: Some(ImageSpec { image: "data:1".into(), ..ImageSpec::default() }),
        image_sub_path: part.into(),
        ..Mount::default()
    }
}

fn import(node: &Node) {
    let lower = [("dir/file", "below\n", ""), ("dir/old", "old\n", ""), ("run", "#!/bin/sh\necho ran\n", "")];
    let upper =
        [("dir/file", "above\n", ""), ("dir/.wh.old", "", ""), ("out", "", "/etc"), ("up", "", "../../dir")];
    image::import(node, "data:1", &[&lower, &upper]);
    image::import(node, "one:1", &[&lower]);
}

pub async fn an_image_is_a_volume(node: &Node) {
    import(node);
    let pod = node.pod("images").await;
    // By one stream, since the lines of two come in any order.
    let look = "exec 2>&1; cat /all/dir/file /part/file /linked/file; ls /part; touch /all/x /part/y; /all/run; \
        grep -c ' /all .*ro,nosuid,nodev,noexec' /proc/mounts; cat /one/dir/old";
    let mut config = script(look);
    let mut one = mount("/one", "");
    one.image.as_mut().unwrap().image = "one:1".into();
    // Below another mount, and through a link that stays inside.
    config.mounts = vec![mount("/all", ""), mount("/part", "dir"), mount("/linked", "up"), one];
    let (_, said) = pod.finish(&config).await;
    let read_only = "touch: /all/x: Read-only file system\ntouch: /part/y: Read-only file system\n";
    let denied = "sh: /all/run: Permission denied\n";
    for expected in ["above\nabove\nabove\nfile\n", read_only, denied, "1\nold\n"] {
        assert!(said.contains(expected), "{expected}: {said}");
    }
    // The same for a pod with users of its own, whose root owns what is root's in there.
    let others = users::pod(node, "owners", |_| {}).await;
    let mut config = script("stat -c %u /all/dir/file /part/file; cat /one/run | wc -l");
    let mut one = mount("/one", "");
    one.image.as_mut().unwrap().image = "one:1".into();
    config.mounts = vec![mount("/all", ""), mount("/part", "dir"), one];
    assert_eq!(others.finish(&config).await, (0, "0\n0\n2\n".into()));

    // What is not in there is said when the container is made; a link never leads to the host.
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

    // Its layers are in use as long as the container is there.
    let mut config = script("sleep 1000");
    config.mounts = vec![mount("/all", "")];
    let id = pod.start(&config).await;
    node.runtime.remove_image(&ImageSpec { image: "data:1".into(), ..ImageSpec::default() }).await.unwrap();
    assert_eq!(pod.exec(&id, "cat /all/dir/file").await.1, "above\n");
}

pub async fn profiles_that_cannot_be_applied_say_so(node: &Node) {
    if Path::new("/sys/kernel/security/apparmor").exists() {
        return println!("skipped: this host has AppArmor");
    }
    let pod = node.pod("profiles").await;
    for kind in [ProfileType::RuntimeDefault, ProfileType::Localhost] {
        let mut confined = security();
        confined.apparmor = Some(SecurityProfile { profile_type: kind.into(), localhost_ref: "mine".into() });
        let config = with(confined, "true");
        let error = node.runtime.create_container(&pod.id, &config, &pod.config).await.unwrap_err().message();
        assert_eq!(error, "apparmor is not supported");
    }
    // A label of SELinux is left off where there is none.
    let mut free = security();
    let unconfined = ProfileType::Unconfined.into();
    free.apparmor = Some(SecurityProfile { profile_type: unconfined, localhost_ref: String::new() });
    free.selinux_options = Some(SelinuxOption { type_: "spc_t".into(), ..SelinuxOption::default() });
    assert_eq!(pod.finish(&with(free, "echo runs")).await, (0, "runs\n".into()));
}
