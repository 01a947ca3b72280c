//! Pods of a server under test: whether pods can run here, and how to create them and wait for them.

use std::io::{BufRead as _, BufReader};
use std::path::Path;
use std::process::{Child, Stdio};
use std::time::{Duration, Instant};

use serde_json::json;

use crate::{Server, has_kubectl};

const DEADLINE: Duration = Duration::from_secs(60);

/// Whether pods can run here: as root, with kubectl and these programs. Prints why the test is skipped
/// if not.
pub fn can_run_pods(programs: &[&str]) -> bool {
    let path = std::env::var_os("PATH").unwrap_or_default();
    let is_installed =
        |program: &&str| std::env::split_paths(&path).any(|dir| Path::new(&dir).join(program).exists());
    let can = rustix::process::geteuid().is_root() && has_kubectl() && programs.iter().all(is_installed);
    if !can {
        eprintln!("skipped: needs root, kubectl and {}", programs.join(" and "));
    }
    can
}

impl Server {
    /// Waits until the condition holds.
    #[track_caller]
    pub fn wait_until(&self, what: &str, mut condition: impl FnMut() -> bool) {
        let started = Instant::now();
        while !condition() {
            if started.elapsed() > DEADLINE {
                let kinds = "pods,services,endpointslices,events,nodes";
                let seen = self.kubectl(&["get", kinds, "-A", "-o", "wide"]).stdout;
                panic!("timed out waiting for: {what}\n{seen}\n{}", self.log());
            }
            std::thread::yield_now();
        }
    }

    /// Waits until pods can be created in the default namespace.
    #[track_caller]
    pub fn wait_for_default_service_account(&self) {
        self.wait_until("the default service account", || {
            self.kubectl(&["get", "serviceaccount", "default"]).code == 0
        });
    }

    /// Creates a pod with one container that runs this script.
    #[track_caller]
    pub fn run_pod(&self, name: &str, script: &str, restart: &str) {
        let command = json!(["sh", "-c", script]);
        let container =
            json!({"name": "main", "image": "busybox:1.36", "stdin": name == "reader", "command": command});
        let pod = json!({
            "apiVersion": "v1", "kind": "Pod", "metadata": {"name": name},
            "spec": {
                "restartPolicy": restart, "terminationGracePeriodSeconds": 1, "containers": [container],
            }
        });
        self.kubectl_with(&["create", "-f", "-"], &pod.to_string()).ok();
    }

    /// Waits with `kubectl wait` until the pod has a condition.
    #[track_caller]
    pub fn wait_for_pod(&self, name: &str, condition: &str) {
        let wait = ["wait", &format!("pod/{name}"), &format!("--for={condition}"), "--timeout=60s"];
        let output = self.kubectl(&wait);
        if output.code != 0 {
            let described = self.kubectl(&["describe", "pod", name]).stdout;
            panic!("{}\n{described}\n{}", output.stderr, self.log());
        }
    }

    /// Starts a kubectl command in the background.
    pub fn background(&self, arguments: &[&str]) -> BackgroundCommand {
        let mut command = self.kubectl_command();
        let child = command.args(arguments).stdin(Stdio::null()).stdout(Stdio::piped()).spawn();
        BackgroundCommand(child.expect("kubectl"))
    }
}

/// Kills the command when dropped.
pub struct BackgroundCommand(pub Child);

impl BackgroundCommand {
    /// The lines of its output, as they are written.
    pub fn lines(&mut self) -> impl Iterator<Item = String> + use<> {
        BufReader::new(self.0.stdout.take().expect("a pipe")).lines().map_while(Result::ok)
    }
}

impl Drop for BackgroundCommand {
    fn drop(&mut self) {
        let _ = self.0.kill();
        let _ = self.0.wait();
    }
}
