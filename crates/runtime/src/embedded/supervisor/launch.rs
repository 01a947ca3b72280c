//! The last steps of a process that enters a container: drops the privileges of the supervisor, becomes
//! the container's user and executes the program. Used for first processes and for commands.

use std::collections::BTreeSet;
use std::io::{self, Write as _};
use std::os::fd::{AsFd, OwnedFd};
use std::os::unix::net::UnixStream;

use rustix::event::{PollFd, PollFlags, Timespec};
use rustix::fs::{Mode, OFlags};
use rustix::process::{Gid, Signal, Uid};
use rustix::thread::{CapabilitySet, CapabilitySets};

use super::identity::{self, Identity};
use super::{Failure, root, spawn};
use crate::embedded::seccomp;
use crate::embedded::spec::{Container, Seccomp};

const LAST_CAPABILITY: u8 = 40;

/// Compiles the seccomp filter. Called while the host's files are visible, for `Localhost` profiles.
pub fn seccomp_filter(spec: &Container) -> Result<Option<Vec<sys::seccomp::SockFilter>>, Failure> {
    match &spec.seccomp {
        _ if spec.privileged => Ok(None),
        Seccomp::Unconfined => Ok(None),
        Seccomp::Default => Ok(Some(seccomp::default_filter(&spec.capabilities))),
        Seccomp::File(path) => {
            let text = std::fs::read(path)
                .map_err(Failure::during(format!("read the seccomp profile {}", path.display())))?;
            let filter = seccomp::from_profile(&text, &spec.capabilities);
            let failed =
                |error| Failure(format!("cannot use the seccomp profile {}: {error}", path.display()));
            Ok(Some(filter.map_err(failed)?))
        }
    }
}

/// Executes the program. Returns only on failure.
pub fn launch(
    spec: &Container,
    command: &spawn::CommandSpec<'_>,
    filter: Option<&[sys::seccomp::SockFilter]>,
    supervisor: &UnixStream,
) -> Failure {
    match prepare(spec, command, filter, supervisor) {
        Ok(PreparedProgram { path, env }) => {
            let Err(error) = sys::process::execute(&path, command.args, &env);
            Failure(format!("exec {path}: {}", plain_message(&error)))
        }
        Err(failure) => failure,
    }
}

/// A program and its environment.
struct PreparedProgram {
    path: String,
    /// As `NAME=value`.
    env: Vec<String>,
}

fn prepare(
    spec: &Container,
    command: &spawn::CommandSpec<'_>,
    filter: Option<&[sys::seccomp::SockFilter]>,
    supervisor: &UnixStream,
) -> Result<PreparedProgram, Failure> {
    // Before any path of the container is followed: /proc/self/fd must not lead to files of the
    // supervisor.
    sys::process::close_other_fds(supervisor.as_fd()).map_err(Failure::during("close files"))?;
    let identity = match command.identity {
        Some(identity) => identity.clone(),
        None => resolve_identity(spec, supervisor)?,
    };
    let cwd = if spec.cwd.is_empty() { "/" } else { &spec.cwd };
    root::make_directory(cwd).map_err(Failure::during(format!("create the directory {cwd:?}")))?;
    rustix::process::chdir(cwd).map_err(|error| {
        Failure(format!("chdir to cwd ({cwd:?}) set in config.json failed: {}", plain_message(&error.into())))
    })?;
    // A path such as /proc/self/fd/7 could be a directory of the host. The path that `getcwd` returns
    // then does not start with a slash.
    let here = rustix::process::getcwd(Vec::new()).map_err(Failure::during("find the working directory"))?;
    if !here.as_bytes().starts_with(b"/") {
        return Err(Failure("current working directory is outside of container mount namespace root -- possible container breakout detected".to_owned()));
    }
    for fd in [rustix::stdio::stdin(), rustix::stdio::stdout(), rustix::stdio::stderr()] {
        // Lets the program open /dev/stdout by name. /dev/null is shared and keeps its owner.
        let is_shared = rustix::fs::fstat(fd).is_ok_and(|found| found.st_rdev == rustix::fs::makedev(1, 3));
        if !is_shared {
            let _ = rustix::fs::fchown(fd, Some(Uid::from_raw(identity.uid)), None);
        }
    }
    set_labels(spec)?;
    become_user(spec, &identity, filter)?;
    if has_supervisor_exited(supervisor) {
        return Err(Failure("the supervisor exited".to_owned()));
    }
    let env = environment(&spec.env, &identity.home, command.tty);
    let search = env.iter().find_map(|variable| variable.strip_prefix("PATH=")).unwrap_or_default();
    let name = command.args.first().ok_or_else(|| Failure("no command specified".to_owned()))?;
    let path = find_program(name, search).map_err(Failure)?;
    rustix::process::umask(Mode::from_raw_mode(0o022));
    // With no_new_privs the filter is loaded here, so that it need not allow the syscalls above.
    if let (true, Some(filter)) = (spec.no_new_privileges, filter) {
        sys::seccomp::load(filter).map_err(Failure::during("load the seccomp filter"))?;
    }
    // After the filter is loaded: hooks may be programs of the image and get no more privileges than
    // the container.
    if let Some(hooks) = command.hooks {
        hooks.run_start_hooks()?;
    }
    Ok(PreparedProgram { path, env })
}

/// The variables in the given order, the last value of each name. TERM and HOME are appended if
/// missing, as in runc.
fn environment(given: &[String], home: &str, tty: bool) -> Vec<String> {
    let mut names = BTreeSet::new();
    let mut env: Vec<String> = Vec::new();
    for variable in given.iter().rev() {
        // An empty HOME counts as missing.
        let Some((name, _)) = variable.split_once('=').filter(|variable| *variable != ("HOME", "")) else {
            continue;
        };
        if names.insert(name) {
            env.push(variable.clone());
        }
    }
    env.reverse();
    if tty && !names.contains("TERM") {
        env.push("TERM=xterm".to_owned());
    }
    if !names.contains("HOME") {
        env.push(format!("HOME={home}"));
    }
    env
}

/// Resolves the container's user with its own files and reports it to the supervisor: later commands
/// run as the same user, whatever the files contain by then.
fn resolve_identity(spec: &Container, supervisor: &UnixStream) -> Result<Identity, Failure> {
    let read = |path: &str| std::fs::read_to_string(path).unwrap_or_default();
    let identity =
        identity::resolve(&spec.user, &read("/etc/passwd"), &read("/etc/group")).map_err(Failure)?;
    spawn::send_identity(supervisor, &identity)
        .map_err(Failure::during("send the user to the supervisor"))?;
    Ok(identity)
}

/// Sets the AppArmor profile and the SELinux label that take effect with the exec.
fn set_labels(spec: &Container) -> Result<(), Failure> {
    if let Some(profile) = &spec.apparmor {
        let text = format!("exec {profile}");
        // Older kernels have a single file for all security modules.
        write_attribute("/proc/self/attr/apparmor/exec", &text)
            .or_else(|_| write_attribute("/proc/self/attr/exec", &text))
            .map_err(Failure::during(format!("apply the AppArmor profile {profile}")))?;
    }
    if let Some(label) = &spec.selinux {
        write_attribute("/proc/self/attr/exec", label)
            .map_err(Failure::during(format!("set the SELinux label {label}")))?;
    }
    Ok(())
}

/// Writes to a file of procfs, and fails if a volume is mounted in its place.
fn write_attribute(path: &str, text: &str) -> io::Result<()> {
    let mut file = std::fs::File::options().write(true).open(path)?;
    if !root::is_procfs(&file) {
        return Err(io::Error::other(format!("{path} is not on procfs")));
    }
    file.write_all(text.as_bytes())
}

pub fn become_user(
    spec: &Container,
    identity: &Identity,
    filter: Option<&[sys::seccomp::SockFilter]>,
) -> Result<(), Failure> {
    let groups: Vec<Gid> = identity.groups.iter().copied().map(Gid::from_raw).collect();
    rustix::thread::set_thread_groups(&groups).map_err(Failure::during("set groups"))?;
    if spec.no_new_privileges {
        rustix::thread::set_no_new_privs(true).map_err(Failure::during("set no_new_privs"))?;
    } else if let Some(filter) = filter {
        // Without no_new_privs, loading a filter needs privileges that are dropped below. Any usable
        // profile allows the remaining steps.
        sys::seccomp::load(filter).map_err(Failure::during("load the seccomp filter"))?;
    }
    let allowed = capability_set(&spec.capabilities);
    for number in 0..=LAST_CAPABILITY {
        let one = capability_set(&[number]);
        let is_there = rustix::thread::capability_is_in_bounding_set(one).unwrap_or(false);
        if is_there && !allowed.contains(one) {
            rustix::thread::remove_capability_from_bounding_set(one)
                .map_err(Failure::during("drop capabilities from the bounding set"))?;
        }
    }
    rustix::thread::set_keep_capabilities(true).map_err(Failure::during("keep capabilities"))?;
    let (uid, gid) = (Uid::from_raw(identity.uid), Gid::from_raw(identity.gid));
    rustix::thread::set_thread_res_gid(gid, gid, gid).map_err(Failure::during("set the group"))?;
    rustix::thread::set_thread_res_uid(uid, uid, uid).map_err(Failure::during("set the user"))?;
    // Root on this node may lack capabilities itself, and can pass on only those it has.
    let own = rustix::thread::capabilities(None).map_err(Failure::during("read capabilities"))?.permitted;
    let ambient = capability_set(&spec.ambient) & allowed & own;
    let sets = CapabilitySets { effective: allowed & own, permitted: allowed & own, inheritable: ambient };
    rustix::thread::set_capabilities(None, sets).map_err(Failure::during("set capabilities"))?;
    for one in
        spec.ambient.iter().map(|number| capability_set(&[*number])).filter(|one| ambient.contains(*one))
    {
        rustix::thread::configure_capability_in_ambient_set(one, true)
            .map_err(Failure::during("set ambient capabilities"))?;
    }
    rustix::thread::set_keep_capabilities(false).map_err(Failure::during("clear kept capabilities"))?;
    // The kernel clears the parent death signal when the user changes.
    rustix::process::set_parent_process_death_signal(Some(Signal::KILL))
        .map_err(Failure::during("set the parent death signal"))
}

/// Whether the supervisor has exited before the parent death signal was set.
fn has_supervisor_exited(supervisor: &UnixStream) -> bool {
    let mut fds = [PollFd::new(supervisor, PollFlags::empty())];
    let _ = rustix::event::poll(&mut fds, Some(&Timespec { tv_sec: 0, tv_nsec: 0 }));
    fds[0].revents().intersects(PollFlags::HUP | PollFlags::ERR)
}

fn capability_set(numbers: &[u8]) -> CapabilitySet {
    numbers.iter().fold(CapabilitySet::empty(), |set, number| {
        set | CapabilitySet::from_bits_retain(1u64.checked_shl(u32::from(*number)).unwrap_or(0))
    })
}

/// Finds an executable by name. The errors are those of Go's `exec.LookPath`.
fn find_program(name: &str, search: &str) -> Result<String, String> {
    if name.contains('/') {
        return match check_executable(name) {
            Ok(()) => Ok(name.to_owned()),
            Err(error) if error.kind() == io::ErrorKind::NotFound => {
                Err(format!("exec: {name:?}: stat {name}: {}", plain_message(&error)))
            }
            Err(error) => Err(format!("exec: {name:?}: {}", plain_message(&error))),
        };
    }
    let directories = search.split(':').map(|directory| if directory.is_empty() { "." } else { directory });
    let found = directories
        .map(|directory| format!("{}/{name}", directory.trim_end_matches('/')))
        .find(|path| check_executable(path).is_ok());
    found
        .filter(|_| !name.is_empty())
        .ok_or_else(|| format!("exec: {name:?}: executable file not found in $PATH"))
}

fn check_executable(path: &str) -> io::Result<()> {
    let found = std::fs::metadata(path)?;
    if found.is_dir() {
        return Err(io::Error::other("is a directory"));
    }
    rustix::fs::accessat(rustix::fs::CWD, path, rustix::fs::Access::EXEC_OK, rustix::fs::AtFlags::EACCESS)
        .or_else(|error| match error {
            // Old kernel without faccessat2. The exec reports a missing permission.
            rustix::io::Errno::NOSYS => Ok(()),
            error => Err(error),
        })?;
    Ok(())
}

/// The error's text in lower case and without Rust's "(os error N)", as Go formats it.
pub fn plain_message(error: &io::Error) -> String {
    let text = error.to_string();
    let text = text.split(" (os error").next().unwrap_or(&text);
    let mut letters = text.chars();
    letters.next().map(|first| first.to_lowercase().chain(letters).collect()).unwrap_or_default()
}

/// Opens a new pseudo-terminal of the container that this process is in. The slave becomes this
/// process's controlling terminal and standard streams; the master is returned.
pub fn terminal() -> Result<OwnedFd, Failure> {
    fn failed<E: Into<io::Error>>(error: E) -> Failure {
        Failure::during("open a terminal")(error)
    }
    let flags = OFlags::RDWR | OFlags::NOCTTY | OFlags::CLOEXEC;
    let terminal_fd = rustix::fs::open("/dev/ptmx", flags, Mode::empty()).map_err(failed)?;
    rustix::pty::unlockpt(&terminal_fd).map_err(failed)?;
    let pts = rustix::pty::ioctl_tiocgptpeer(
        &terminal_fd,
        rustix::pty::OpenptFlags::RDWR | rustix::pty::OpenptFlags::NOCTTY | rustix::pty::OpenptFlags::CLOEXEC,
    )
    .map_err(failed)?;
    rustix::process::ioctl_tiocsctty(&pts).map_err(failed)?;
    stdio(pts.as_fd(), pts.as_fd(), pts.as_fd()).map_err(failed)?;
    Ok(terminal_fd)
}

/// Sets the standard streams of this process.
pub fn stdio(stdin: impl AsFd, stdout: impl AsFd, stderr: impl AsFd) -> io::Result<()> {
    rustix::stdio::dup2_stdin(stdin)?;
    rustix::stdio::dup2_stdout(stdout)?;
    rustix::stdio::dup2_stderr(stderr)?;
    Ok(())
}

/// Mounts the terminal of the first process on `/dev/console`. By descriptor, so that it is the
/// terminal whatever its path leads to.
pub fn console() -> io::Result<()> {
    let dev = rustix::fs::open("/dev", OFlags::PATH | OFlags::DIRECTORY | OFlags::CLOEXEC, Mode::empty())?;
    let create_flags = OFlags::CREATE | OFlags::EXCL | OFlags::WRONLY | OFlags::NOFOLLOW | OFlags::CLOEXEC;
    match rustix::fs::openat(&dev, "console", create_flags, Mode::from_raw_mode(0o620)) {
        Ok(_) | Err(rustix::io::Errno::EXIST) => {}
        Err(error) => return Err(error.into()),
    }
    let found = OFlags::PATH | OFlags::NOFOLLOW | OFlags::CLOEXEC;
    let place = rustix::fs::openat(&dev, "console", found, Mode::empty())?;
    if rustix::fs::FileType::from_raw_mode(rustix::fs::fstat(&place)?.st_mode).is_symlink() {
        return Err(io::Error::other("it is a symlink"));
    }
    sys::mounts::attach(root::clone_mount(rustix::stdio::stdin())?, place)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[track_caller]
    fn check(name: &str, search: &str, expected: &str) {
        assert_eq!(find_program(name, search).unwrap_or_else(|error| error), expected);
    }

    #[test]
    fn environment_keeps_its_order() {
        let check = |given: &[&str], tty: bool, expected: &[&str]| {
            let given: Vec<String> = given.iter().map(|variable| (*variable).to_owned()).collect();
            assert_eq!(environment(&given, "/root", tty), expected);
        };
        check(&["Z=1", "A=2"], false, &["Z=1", "A=2", "HOME=/root"]);
        check(&["Z=1", "A=2", "Z=3"], false, &["A=2", "Z=3", "HOME=/root"]);
        check(&["HOME=/srv", "Z=1"], false, &["HOME=/srv", "Z=1"]);
        check(&["HOME=", "Z=a=b", "strange"], false, &["Z=a=b", "HOME=/root"]);
        check(&["Z=1"], true, &["Z=1", "TERM=xterm", "HOME=/root"]);
        check(&["TERM=dumb"], true, &["TERM=dumb", "HOME=/root"]);
    }

    #[test]
    fn find_executable_in_the_search_path() {
        check("sh", "/nowhere:/bin", "/bin/sh");
        check("/bin/sh", "", "/bin/sh");
        check("no-such-program", "/bin", "exec: \"no-such-program\": executable file not found in $PATH");
        check("/no/such", "/bin", "exec: \"/no/such\": stat /no/such: no such file or directory");
        check("/etc/passwd", "", "exec: \"/etc/passwd\": permission denied");
        check("/etc", "", "exec: \"/etc\": is a directory");
        check("", "/bin", "exec: \"\": executable file not found in $PATH");
    }
}
