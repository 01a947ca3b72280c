//! The hooks that run before a container's program, in the process that becomes the container.

use std::os::fd::AsFd;
use std::path::Path;

use rustix::fs::Mode;

use super::Failure;
use super::spawn::{self, SpawnContext};
use crate::embedded::hooks::{self, HookState};
use crate::embedded::spec::{Container, Hook, Stage};

/// The hooks of a container.
pub struct Hooks<'a> {
    hooks: &'a [Hook],
    id: &'a str,
    /// The PID of this process in the host's PID namespace.
    pid: i32,
    bundle: &'a Path,
}

impl Hooks<'_> {
    /// Must be called while the host's /proc is visible: /proc/self there has this process's PID on the
    /// host.
    pub fn new<'a>(id: &'a str, spec: &'a Container, bundle: &'a Path) -> Result<Hooks<'a>, Failure> {
        let own = std::fs::read_link("/proc/self").map_err(Failure::during("read this process's PID"))?;
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

    /// Runs prestart, createRuntime and createContainer hooks: everything is mounted, and the host's
    /// files are still visible.
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

    /// Runs startContainer hooks. This process already has the restrictions of the container.
    pub fn run_start_hooks(&self) -> Result<(), Failure> {
        self.run(Stage::StartContainer, Path::new("/"))
    }

    /// Runs prestart and createRuntime hooks in a child process that moves back to the host's
    /// namespaces.
    fn run_in_host(&self, context: &SpawnContext<'_>) -> Result<(), Failure> {
        if !self.has(Stage::Prestart) && !self.has(Stage::CreateRuntime) {
            return Ok(());
        }
        let work = || {
            for namespace in
                context.host_namespaces.iter().map(AsFd::as_fd).chain([context.host_mount_namespace])
            {
                rustix::thread::move_into_link_name_space(namespace, None)
                    .map_err(Failure::during("return to the host's namespaces"))?;
            }
            self.run(Stage::Prestart, self.bundle)?;
            self.run(Stage::CreateRuntime, self.bundle)
        };
        spawn::run_in_child(work)
    }
}
