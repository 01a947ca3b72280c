//! OCI lifecycle hooks. CDI specs configure them.
//!
//! Each hook gets the container's state as JSON on standard input, with the container's directory as
//! its bundle; `config.json` there names the root filesystem. Hooks before the start run in the process
//! that becomes the container, and a failure fails the start. Hooks after the start run in skiff, and a
//! failure is only logged.

use std::collections::BTreeMap;
use std::fs::File;
use std::io::{self, Read as _, Seek as _, Write as _};
use std::os::unix::process::CommandExt as _;
use std::path::Path;
use std::process::Command;
use std::time::{Duration, Instant};

use rustix::event::{PollFd, PollFlags, Timespec};
use rustix::fs::MemfdFlags;
use rustix::process::{Pid, PidfdFlags};
use serde_json::{Value, json};

use super::spec::{Container, Hook, Stage};

/// The version of the OCI runtime specification in states and bundles.
const OCI_VERSION: &str = "1.2.0";
/// Timeout of a hook that specifies none.
const DEFAULT_HOOK_TIMEOUT: Duration = Duration::from_secs(120);
/// Limit of the output that the error of a failed hook quotes.
const MAX_OUTPUT_BYTES: u64 = 1 << 10;

/// The OCI state of a container, as passed to a hook.
pub struct HookState<'a> {
    pub id: &'a str,
    pub status: &'a str,
    /// In the host's PID namespace; 0 for none.
    pub pid: i32,
    pub bundle: &'a Path,
}

impl HookState<'_> {
    fn text(&self) -> String {
        let mut state = json!({
            "ociVersion": OCI_VERSION, "id": self.id, "status": self.status, "bundle": self.bundle,
            "annotations": {},
        });
        if self.pid > 0 {
            state["pid"] = self.pid.into();
        }
        state.to_string()
    }
}

/// The bundle's `config.json`, with the parts that hooks use.
pub fn bundle_config(spec: &Container, bundle: &Path, annotations: &BTreeMap<String, String>) -> Value {
    let mounts = spec.mounts.iter().map(|mount| {
        json!({"destination": mount.target, "source": mount.source, "type": "bind", "options": ["rbind"]})
    });
    let cwd = if spec.cwd.is_empty() { "/" } else { &spec.cwd };
    json!({
        "ociVersion": OCI_VERSION,
        "process": {"args": spec.args, "env": spec.env, "cwd": cwd, "terminal": spec.tty},
        "root": {"path": bundle.join("upper"), "readonly": spec.read_only},
        "mounts": mounts.collect::<Vec<_>>(),
        "annotations": annotations,
        "linux": {"cgroupsPath": spec.cgroup},
    })
}

/// Runs the hooks of a stage in order until one fails. `working_dir` is their working directory.
pub fn run(hooks: &[Hook], stage: Stage, state: &HookState<'_>, working_dir: &Path) -> Result<(), String> {
    for (at, hook) in hooks.iter().filter(|hook| hook.stage == stage).enumerate() {
        let failed = |why: String| format!("error running {} hook #{at}: {why}", stage.name());
        let path = hook.path.display();
        run_hook(hook, &state.text(), working_dir)
            .map_err(|error| failed(format!("{path}: {error}")))?
            .map_err(failed)?;
    }
    Ok(())
}

/// Runs one hook. The outer error means that it could not be run, the inner one that it failed or timed
/// out.
fn run_hook(hook: &Hook, state: &str, working_dir: &Path) -> io::Result<Result<(), String>> {
    let memory = |name: &str| rustix::fs::memfd_create(name, MemfdFlags::CLOEXEC).map(File::from);
    let (mut input, mut output) = (memory("state")?, memory("said")?);
    input.write_all(state.as_bytes())?;
    input.rewind()?;
    let mut command = Command::new(&hook.path);
    if let Some((name, args)) = hook.args.split_first() {
        command.arg0(name).args(args);
    }
    command.env_clear().envs(hook.env.iter().filter_map(|pair| pair.split_once('=')));
    command.current_dir(working_dir).stdin(input).stdout(output.try_clone()?).stderr(output.try_clone()?);
    let mut child = command.spawn()?;
    let timeout = hook.timeout.map_or(DEFAULT_HOOK_TIMEOUT, |seconds| Duration::from_secs(seconds.into()));
    let timed_out = !has_ended(&child, Instant::now() + timeout)?;
    if timed_out {
        let _ = child.kill();
    }
    let status = child.wait()?;
    if status.success() && !timed_out {
        return Ok(Ok(()));
    }
    let mut captured = Vec::new();
    output.rewind()?;
    output.take(MAX_OUTPUT_BYTES).read_to_end(&mut captured)?;
    let captured = String::from_utf8_lossy(&captured).trim().to_owned();
    let how = if timed_out { format!("timed out after {timeout:?}") } else { status.to_string() };
    Ok(Err(format!("{how}, output: {captured}")))
}

fn has_ended(child: &std::process::Child, deadline: Instant) -> io::Result<bool> {
    let pid = i32::try_from(child.id()).ok().and_then(Pid::from_raw).ok_or(io::ErrorKind::InvalidData)?;
    let pidfd = rustix::process::pidfd_open(pid, PidfdFlags::empty())?;
    loop {
        let left = deadline.saturating_duration_since(Instant::now());
        let left = Timespec::try_from(left).map_err(io::Error::other)?;
        match rustix::event::poll(&mut [PollFd::new(&pidfd, PollFlags::IN)], Some(&left)) {
            Ok(count) => return Ok(count > 0),
            Err(rustix::io::Errno::INTR) => {}
            Err(error) => return Err(error.into()),
        }
    }
}

impl Stage {
    pub const ALL: [Stage; 6] = [
        Stage::Prestart,
        Stage::CreateRuntime,
        Stage::CreateContainer,
        Stage::StartContainer,
        Stage::Poststart,
        Stage::Poststop,
    ];

    /// The name in the OCI runtime specification.
    pub fn name(self) -> &'static str {
        match self {
            Stage::Prestart => "prestart",
            Stage::CreateRuntime => "createRuntime",
            Stage::CreateContainer => "createContainer",
            Stage::StartContainer => "startContainer",
            Stage::Poststart => "poststart",
            Stage::Poststop => "poststop",
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn passes_state_to_hooks_and_reports_their_output() {
        let dir = tempfile::tempdir().unwrap();
        let hook = |stage, script: &str, timeout| Hook {
            stage,
            path: "/bin/sh".into(),
            args: ["sh", "-c", script].map(str::to_owned).into(),
            env: vec!["WORD=said".to_owned()],
            timeout,
        };
        let state = HookState { id: "c1", status: "created", pid: 7, bundle: dir.path() };
        let hooks = [
            hook(Stage::CreateRuntime, "cat >state; echo $WORD >>state", None),
            hook(Stage::Prestart, "true", None),
            hook(Stage::Prestart, "echo no; echo way >&2; exit 3", None),
            hook(Stage::Poststart, "exec sleep 1000", Some(0)),
        ];
        let run = |stage| run(&hooks, stage, &state, dir.path());
        run(Stage::CreateRuntime).unwrap();
        let text = std::fs::read_to_string(dir.path().join("state")).unwrap();
        let (state_json, word) = text.rsplit_once('}').unwrap();
        let state_json: Value = serde_json::from_str(&format!("{state_json}}}")).unwrap();
        let expected = json!({"ociVersion": OCI_VERSION, "id": "c1", "status": "created", "pid": 7,
            "bundle": dir.path(), "annotations": {}});
        assert_eq!((state_json, word), (expected, "said\n"));
        run(Stage::Poststop).unwrap();
        let error = run(Stage::Prestart).unwrap_err();
        assert_eq!(error, "error running prestart hook #1: exit status: 3, output: no\nway");
        let error = run(Stage::Poststart).unwrap_err();
        assert_eq!(error, "error running poststart hook #0: timed out after 0ns, output: ");
    }
}
