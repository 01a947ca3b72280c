//! CSI drivers, network plugins and monitoring agents mount the kubelet's directory by its standard
//! path.

use std::process::Command;

use serde_json::{Value, json};

use super::start;

#[test]
fn default_kubelet_directory_is_the_nodes_own() {
    let Some(cluster) = start() else { return };
    let server = &cluster.server;
    let root = server.data_dir().join("agent/kubelet");
    let pods = root.join("pods");
    server.wait_until("the kubelet directories exist", || {
        pods.is_dir() && root.join("plugins_registry").is_dir()
    });
    // As on hosts with systemd, where all mounts are shared.
    for arguments in [&["--bind"][..], &["--make-rshared"]] {
        let mut mount = Command::new("mount");
        let mount = mount.args(arguments).args((arguments == ["--bind"]).then_some(&pods)).arg(&pods);
        assert!(mount.status().expect("mount").success(), "{arguments:?}");
    }
    // Mounts that the driver creates use the host's path; its socket uses the path inside the
    // container.
    let pod_mount = pods.join("given");
    let script = format!(
        "mkdir {0} && mount -t tmpfs none {0} && touch {0}/file && \
         touch /var/lib/kubelet/plugins_registry/driver.sock && exec sleep 1000000",
        pod_mount.display()
    );
    let names = ["pods", "plugins_registry"];
    let path = |name: &str| format!("/var/lib/kubelet/{name}");
    let volumes = names.map(
        |name| json!({"name": name.replace('_', "-"), "hostPath": {"path": path(name), "type": "Directory"}}),
    );
    let mounts = names.map(|name| {
        let propagation = if name == "pods" { json!("Bidirectional") } else { Value::Null };
        json!({"name": name.replace('_', "-"), "mountPath": path(name), "mountPropagation": propagation})
    });
    let pod = json!({
        "apiVersion": "v1", "kind": "Pod", "metadata": {"name": "driver"},
        "spec": {
            "terminationGracePeriodSeconds": 0, "volumes": volumes,
            "containers": [{
                "name": "main", "image": "busybox:1.36", "command": ["sh", "-c", script],
                "securityContext": {"privileged": true}, "volumeMounts": mounts,
            }],
        },
    });
    server.kubectl_with(&["create", "-f", "-"], &pod.to_string()).ok();
    server.wait_until("the driver's volume is on the host", || pod_mount.join("file").exists());
    server.wait_until("the socket is in the plugin registry directory", || {
        root.join("plugins_registry/driver.sock").exists()
    });
    let seen = ["exec", "driver", "--", "ls", "/var/lib/kubelet/pods/given"];
    assert_eq!(server.kubectl(&seen).ok(), "file\n");
    server.kubectl(&["delete", "pod", "driver", "--wait"]).ok();
    for target in [&pod_mount, &pods] {
        assert!(
            Command::new("umount").arg(target).status().expect("umount").success(),
            "{}",
            target.display()
        );
    }
    cluster
        .server
        .wait_until("no resources remain", || cluster.resource_counts().values().all(|count| *count == 0));
}
