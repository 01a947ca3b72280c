//! The hooks of a container that are run on its way, by the process that becomes it.

use std::os::fd::AsFd;
use std::path::Path;

use rustix::fs::Mode;

use super::Failure;
use super::spawn::{self, SpawnContext};
use crate::embedded::hooks::{self, HookState};
use crate::embedded::spec::{Container, Hook, Stage};

/// Those of one container.
pub struct Hooks<'a> {
    hooks: &'a [Hook],
    id: &'a str,
    /// This process, as the host counts.
    pid: i32,
    bundle: &'a Path,
}

impl Hooks<'_> {
    /// While the host's own files about processes are in sight, which know this one's number there.
    pub fn new<'a>(id: &'a str, spec: &'a Container, bundle: &'a Path) -> Result<Hooks<'a>, Failure> {
        let own = std::fs::read_link("/proc/self").map_err(Failure::during("find this process's number"))?;
        let pid = own.to_str().and_then(|number| number.parse().ok()).unwrap_or(0);
        Ok(Hooks { hooks: &spec.hooks, id, pid, bundle })
    }

    fn has(&self, stage: Stage) -> bool {
        self.hooks.iter().any(|hook| hook.stage == stage)
    }

    fn run(&self, stage: Stage, working_dir: &Path) -> Result<(), Failure> {
        let state = HookState { id: self.id, status: "created", pid: self.pid, bundle: self.bundle };
        hooks::run(self.hooks, stage, &state, working_dir).map_err(Failure)
    }

    /// All of the container is mounted, and the host's files are still in sight.
    pub fn run_create_hooks(&self, context: &SpawnContext<'_>) -> Result<(), Failure> {
        let stages = [Stage::Prestart, Stage::CreateRuntime, Stage::CreateContainer];
        if !stages.into_iter().any(|stage| self.has(stage)) {
            return Ok(());
        }
        let before = rustix::process::umask(Mode::from_raw_mode(0o022));
        self.run_in_host(context)?;
        self.run(Stage::CreateContainer, self.bundle)?;
        rustix::process::umask(before);
        Ok(())
    }

    /// This process is about to be the container's program, and may do no more than that.
    pub fn run_start_hooks(&self) -> Result<(), Failure> {
        self.run(Stage::StartContainer, Path::new("/"))
    }

    /// Those that are to see the host as it is are run by a process that goes back there.
    fn run_in_host(&self, context: &SpawnContext<'_>) -> Result<(), Failure> {
        if !self.has(Stage::Prestart) && !self.has(Stage::CreateRuntime) {
            return Ok(());
        }
        let work = || {
            for namespace in
                context.host_namespaces.iter().map(AsFd::as_fd).chain([context.host_mount_namespace])
            {
                rustix::thread::move_into_link_name_space(namespace, None)
                    .map_err(Failure::during("go back to the host"))?;
            }
            self.run(Stage::Prestart, self.bundle)?;
            self.run(Stage::CreateRuntime, self.bundle)
        };
        spawn::run_in_child(work)
    }
}
