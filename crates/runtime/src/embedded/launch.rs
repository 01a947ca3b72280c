//! Starts the supervisor of a pod.

use std::ffi::OsStr;
use std::io::{self, Write as _};
use std::os::fd::{AsFd as _, AsRawFd as _, OwnedFd};
use std::os::unix::ffi::OsStrExt as _;
use std::path::Path;
use std::process::{Command, Stdio};

use sys::allocator::SMALL_ALLOCATOR_ENV;
use sys::mounts::{self, Attributes};

use super::spec::Sandbox;

/// Opens the supervisor executable on a read-only mount of its own. A container that gets hold of its
/// first process's executable (`/proc/self/exe`) cannot overwrite it, whatever its privileges
/// (CVE-2019-5736).
pub fn open_program(path: &Path) -> io::Result<OwnedFd> {
    let path = std::fs::canonicalize(path)?;
    let mount = mounts::copy_mount(&path)?;
    mounts::set_mount_attributes(&mount, Attributes { read_only: true, ..Attributes::default() })?;
    Ok(mount)
}

/// Starts the supervisor of the pod in `directory`, passes it the spec, and waits until it is ready.
pub fn start_supervisor(program: &OwnedFd, directory: &Path, spec: &Sandbox) -> Result<(), String> {
    let mut command = Command::new(format!("/proc/self/fd/{}", program.as_fd().as_raw_fd()));
    command.arg("supervise").arg(directory).env_clear();
    // Every pod has a supervisor, so they use the small allocator.
    command.env(OsStr::from_bytes(SMALL_ALLOCATOR_ENV.to_bytes()), "1");
    command.stdin(Stdio::piped()).stdout(Stdio::piped()).stderr(Stdio::null());
    let mut run = || {
        let mut child = command.spawn()?;
        if let Some(mut stdin) = child.stdin.take() {
            let spec = serde_json::to_vec(spec).expect("has only strings and numbers");
            // A supervisor that exits before reading has written the reason to standard output.
            let _ = stdin.write_all(&spec);
        }
        child.wait_with_output()
    };
    match run() {
        Ok(output) if output.status.success() => Ok(()),
        Ok(output) if output.stdout.is_empty() => {
            Err(format!("the pod supervisor exited with {}", output.status))
        }
        Ok(output) => Err(String::from_utf8_lossy(&output.stdout).into_owned()),
        Err(error) => Err(format!("cannot start the pod supervisor: {error}")),
    }
}
