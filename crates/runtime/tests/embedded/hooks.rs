//! OCI hooks that CDI specs configure for a device.

use std::path::{Path, PathBuf};

use runtime::cri::*;

use crate::kit::{TestNode, script};
use crate::users;

/// The directory of CDI specs. Mounted in this test's mount namespace only.
const CDI_DIR: &str = "/var/run/cdi";

struct CdiFiles {
    dir: PathBuf,
    was_created: bool,
}

impl CdiFiles {
    fn mount(dir: PathBuf) -> CdiFiles {
        let was_created = !Path::new(CDI_DIR).exists();
        std::fs::create_dir_all(CDI_DIR).unwrap();
        std::fs::create_dir_all(&dir).unwrap();
        rustix::mount::mount_bind(&dir, CDI_DIR).unwrap();
        CdiFiles { dir, was_created }
    }

    fn write(&self, devices: &serde_json::Value) {
        let file = serde_json::json!({"cdiVersion": "0.6.0", "kind": "example.com/gpu", "devices": devices});
        std::fs::write(self.dir.join("gpu.json"), file.to_string()).unwrap();
    }
}

impl Drop for CdiFiles {
    fn drop(&mut self) {
        let _ = rustix::mount::unmount(CDI_DIR, rustix::mount::UnmountFlags::DETACH);
        if self.was_created {
            let _ = std::fs::remove_dir(CDI_DIR);
        }
    }
}

fn device(name: &str, hooks: &[(&str, String)]) -> serde_json::Value {
    let hooks = hooks.iter().map(|(stage, script)| {
        serde_json::json!({
            "hookName": stage, "path": "/bin/sh", "args": ["sh", "-c", script], "env": ["PATH=/bin:/usr/bin"],
        })
    });
    serde_json::json!({"name": name, "containerEdits": {"hooks": hooks.collect::<Vec<_>>()}})
}

fn with_device(name: &str, text: &str) -> ContainerConfig {
    let mut config = script(text);
    // Then the seccomp filter is loaded last.
    let security = config.linux.as_mut().and_then(|linux| linux.security_context.as_mut());
    security.expect("a context").no_new_privs = true;
    config.cdi_devices = vec![CdiDevice { name: format!("example.com/gpu={name}") }];
    config
}

pub async fn runs_hooks_of_all_stages(node: &TestNode) {
    let files = CdiFiles::mount(node.dir.path().join("cdi"));
    let output_path = node.dir.path().join("state");
    let note = |name: &str| {
        format!("cat >{0}/{name}; readlink /proc/self/ns/net >>{0}/{name}", output_path.display())
    };
    // As vendors' hooks do: with the bundle from the state, and the root from its config.json.
    let may = "grep -e CapEff: -e Seccomp:";
    let root = r#"bundle=$(sed -n 's/.*"bundle":"\([^"]*\)".*/\1/p'); root=$(sed -n 's/.*"root":{"path":"\([^"]*\)".*/\1/p' $bundle/config.json)"#;
    files.write(&serde_json::json!([
        device(
            "good",
            &[
                ("prestart", note("prestart")),
                ("createRuntime", note("createRuntime")),
                ("createContainer", format!("{root}; test -e $root/proc/self && echo made >$root/made")),
                ("startContainer", format!("cat /made >/started; cat /proc/self/status | {may} >>/started")),
                ("poststart", note("poststart")),
                ("poststop", note("poststop")),
            ]
        ),
        device("bad", &[("createContainer", "echo no such luck; exit 7".to_owned())]),
    ]));
    let own = std::fs::read_link("/proc/self/ns/net").unwrap().display().to_string();
    let plain = node.pod("hooks").await;
    let mapped = users::pod(node, "hooks-users", |_| {}).await;
    for pod in [plain, mapped] {
        let _ = std::fs::remove_dir_all(&output_path);
        std::fs::create_dir(&output_path).unwrap();
        let id = pod.start(&with_device("good", "sleep 1000")).await;
        let look = format!("cat /made /started; cat /proc/self/status | {may}");
        let (_, seen, _) = pod.exec(&id, &look).await;
        let lines: Vec<&str> = seen.lines().collect();
        // Hooks that run in the container have no more privileges than the container.
        assert!(matches!(lines[..], ["made", "made", a, b, c, d] if (a, b) == (c, d)), "{seen}");
        assert!(seen.ends_with("Seccomp:\t2\n"), "{seen}");
        for stage in ["prestart", "createRuntime", "poststart"] {
            let text = std::fs::read_to_string(output_path.join(stage)).unwrap();
            assert!(
                text.contains(&format!(r#""id":"{id}""#)) && text.contains(r#""pid":"#),
                "{stage}: {text}"
            );
            // These hooks run in the host's namespaces.
            assert!(text.trim_end().ends_with(&own), "{stage}: {text} is not {own}");
        }
        assert!(!output_path.join("poststop").exists());
        node.runtime.remove_container(&id).await.unwrap();
        let text = std::fs::read_to_string(output_path.join("poststop")).unwrap();
        assert!(text.contains(r#""status":"stopped""#), "{text}");

        let id = pod.create(&with_device("bad", "true")).await;
        let error = node.runtime.start_container(&id).await.unwrap_err().message();
        let expected = "error running createContainer hook #0: exit status: 7, output: no such luck";
        assert!(error.ends_with(expected), "{error}");
    }
}
