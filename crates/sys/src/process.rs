//! Processes: forks into new namespaces, and handles (pidfds) that never refer to a reused PID.

use std::convert::Infallible;
use std::ffi::CString;
use std::io;
use std::os::fd::{AsFd, AsRawFd as _, BorrowedFd, FromRawFd as _, IntoRawFd as _, OwnedFd};
use std::sync::atomic::{AtomicI32, Ordering};

use rustix::process::{Pid, Signal, WaitId, WaitIdOptions};

/// How a fork differs from this process: the namespaces it gets, and the cgroup it starts in.
#[derive(Clone, Copy, Debug, Default)]
pub struct CloneOptions<'a> {
    pub pid: bool,
    pub user: bool,
    /// See [`Cgroups::open_dir`](crate::cgroup::Cgroups::open_dir).
    pub cgroup: Option<BorrowedFd<'a>>,
}

/// The type of libc's constant is too narrow for it.
const CLONE_INTO_CGROUP: u64 = 0x2_0000_0000;

/// A process started by [`fork`]. Dropping the handle does not affect the process.
#[derive(Debug)]
pub struct Child {
    pid: Pid,
    pidfd: OwnedFd,
}

/// How a process has exited.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum ExitStatus {
    Exited(i32),
    Killed(i32),
}

impl ExitStatus {
    /// The exit code as in shells and Kubernetes: 128 plus the signal for a killed process.
    pub fn code(self) -> i32 {
        match self {
            ExitStatus::Exited(code) => code,
            ExitStatus::Killed(signal) => 128 + signal,
        }
    }
}

/// Runs `body` in a fork of this process, which exits with the returned code.
///
/// Fails in a process with several threads: the fork would have one of them, and the locks of all.
pub fn fork(options: CloneOptions<'_>, body: impl FnOnce() -> i32) -> io::Result<Child> {
    if std::fs::read_dir("/proc/self/task")?.count() != 1 {
        return Err(io::Error::other("cannot fork a process with several threads"));
    }
    let mut pidfd: libc::c_int = -1;
    let mut flags = libc::CLONE_PIDFD as u64;
    if options.pid {
        flags |= libc::CLONE_NEWPID as u64;
    }
    if options.user {
        flags |= libc::CLONE_NEWUSER as u64;
    }
    // SAFETY: all zeroes is a valid value of this struct of integers.
    let mut arguments: libc::clone_args = unsafe { std::mem::zeroed() };
    if let Some(cgroup) = options.cgroup {
        flags |= CLONE_INTO_CGROUP;
        arguments.cgroup = u64::try_from(cgroup.as_raw_fd()).map_err(io::Error::other)?;
    }
    arguments.flags = flags;
    arguments.pidfd = std::ptr::from_mut(&mut pidfd) as u64;
    arguments.exit_signal = libc::SIGCHLD as u64;
    // SAFETY: without CLONE_VM and without a stack this is fork: the child continues with a copy of
    // everything. There is one thread, so no lock is held by a thread that the child lacks. `arguments`
    // outlives the call.
    let pid = unsafe {
        libc::syscall(libc::SYS_clone3, &raw const arguments, std::mem::size_of::<libc::clone_args>())
    };
    match pid {
        -1 => Err(io::Error::last_os_error()),
        0 => {
            reset_sigterm_pipe();
            let code = std::panic::catch_unwind(std::panic::AssertUnwindSafe(body)).unwrap_or(70);
            // SAFETY: exits immediately; nothing that belongs to the parent is flushed or dropped
            // twice.
            unsafe { libc::_exit(code) }
        }
        pid => {
            let pid = i32::try_from(pid).ok().and_then(Pid::from_raw).ok_or(io::ErrorKind::InvalidData)?;
            // SAFETY: the kernel has just created this descriptor (CLONE_PIDFD), so it has no other
            // owner.
            let pidfd = unsafe { OwnedFd::from_raw_fd(pidfd) };
            Ok(Child { pid, pidfd })
        }
    }
}

impl Child {
    /// The PID in this process's namespace.
    pub fn pid(&self) -> i32 {
        self.pid.as_raw_nonzero().get()
    }

    /// Sends a signal. A process that has already exited is not an error.
    pub fn signal(&self, signal: i32) -> io::Result<()> {
        pidfd_send_signal(self.pidfd.as_fd(), signal)
    }

    /// The exit status, if the process has exited.
    pub fn try_wait(&self) -> io::Result<Option<ExitStatus>> {
        self.wait_with(WaitIdOptions::EXITED | WaitIdOptions::NOHANG)
    }

    /// Waits for the exit.
    pub fn wait(&self) -> io::Result<ExitStatus> {
        loop {
            match self.wait_with(WaitIdOptions::EXITED) {
                Ok(Some(ended)) => return Ok(ended),
                Err(error) if error.kind() != io::ErrorKind::Interrupted => return Err(error),
                _ => {}
            }
        }
    }

    fn wait_with(&self, options: WaitIdOptions) -> io::Result<Option<ExitStatus>> {
        let status = rustix::process::waitid(WaitId::PidFd(self.pidfd.as_fd()), options)?;
        Ok(status.map(|status| match (status.exit_status(), status.terminating_signal()) {
            (Some(code), _) => ExitStatus::Exited(code),
            (None, signal) => ExitStatus::Killed(signal.unwrap_or(libc::SIGKILL)),
        }))
    }
}

/// The pidfd, readable after the exit.
impl AsFd for Child {
    fn as_fd(&self) -> BorrowedFd<'_> {
        self.pidfd.as_fd()
    }
}

fn pidfd_send_signal(pidfd: BorrowedFd<'_>, signal: i32) -> io::Result<()> {
    // SAFETY: passes integers and a null pointer; the descriptor is open during the call. rustix has no
    // real-time signals, which images may specify.
    let sent = unsafe {
        let none = std::ptr::null::<libc::siginfo_t>();
        libc::syscall(libc::SYS_pidfd_send_signal, pidfd.as_raw_fd(), signal, none, 0)
    };
    match sent {
        0 => Ok(()),
        _ => match io::Error::last_os_error() {
            error if error.raw_os_error() == Some(libc::ESRCH) => Ok(()),
            error => Err(error),
        },
    }
}

/// The pipe that the SIGTERM handler writes to; -1 without a handler.
static SIGTERM_PIPE: AtomicI32 = AtomicI32::new(-1);

extern "C" fn write_to_sigterm_pipe(_signal: libc::c_int) {
    // SAFETY: all calls are async-signal-safe. The descriptor is never closed while it is in the
    // static, the byte is static, and errno of the interrupted code is restored.
    unsafe {
        let errno = *libc::__errno_location();
        libc::write(SIGTERM_PIPE.load(Ordering::Relaxed), c"!".as_ptr().cast(), 1);
        *libc::__errno_location() = errno;
    }
}

/// Handles SIGTERM from now on: the returned descriptor becomes readable at the first one. Processes
/// that this one [`fork`]s, and programs that they execute, have the default action.
pub fn sigterm_pipe() -> io::Result<OwnedFd> {
    use rustix::pipe::{PipeFlags, pipe_with};
    let (reader, writer) = pipe_with(PipeFlags::CLOEXEC | PipeFlags::NONBLOCK)?;
    // Never closed, since the handler may run at any time.
    SIGTERM_PIPE.store(writer.into_raw_fd(), Ordering::Relaxed);
    handle_sigterm(write_to_sigterm_pipe as *const () as libc::sighandler_t)?;
    Ok(reader)
}

/// In a fork the descriptor may soon be closed and reused.
fn reset_sigterm_pipe() {
    if SIGTERM_PIPE.swap(-1, Ordering::Relaxed) != -1 {
        let _ = handle_sigterm(libc::SIG_DFL);
    }
}

fn handle_sigterm(handler: libc::sighandler_t) -> io::Result<()> {
    // SAFETY: all zeroes is a valid value of this struct: no flags, an empty mask.
    let mut action: libc::sigaction = unsafe { std::mem::zeroed() };
    action.sa_sigaction = handler;
    action.sa_flags = libc::SA_RESTART;
    // SAFETY: `action` outlives the call and names a handler that is safe to run at any time, or the default.
    match unsafe { libc::sigaction(libc::SIGTERM, &raw const action, std::ptr::null_mut()) } {
        0 => Ok(()),
        _ => Err(io::Error::last_os_error()),
    }
}

/// The number of a signal, by name with or without `SIG`, or by number.
pub fn signal_number(name: &str) -> Option<i32> {
    const NAMES: &[(&str, Signal)] = &[
        ("HUP", Signal::HUP),
        ("INT", Signal::INT),
        ("QUIT", Signal::QUIT),
        ("ABRT", Signal::ABORT),
        ("KILL", Signal::KILL),
        ("USR1", Signal::USR1),
        ("USR2", Signal::USR2),
        ("PIPE", Signal::PIPE),
        ("ALRM", Signal::ALARM),
        ("TERM", Signal::TERM),
        ("CONT", Signal::CONT),
        ("STOP", Signal::STOP),
        ("TSTP", Signal::TSTP),
        ("WINCH", Signal::WINCH),
        ("IO", Signal::IO),
        ("PWR", Signal::POWER),
        ("SYS", Signal::SYS),
    ];
    let name = name.trim().to_ascii_uppercase();
    let name = name.strip_prefix("SIG").unwrap_or(&name);
    if let Ok(number) = name.parse::<i32>() {
        return (1..=64).contains(&number).then_some(number);
    }
    if let Some(offset) = name.strip_prefix("RTMIN") {
        let offset = if offset.is_empty() { 0 } else { offset.parse::<i32>().ok()? };
        // glibc reserves the kernel's first two real-time signals.
        return Some(34 + offset).filter(|number| (34..=64).contains(number));
    }
    NAMES.iter().find(|(known, _)| *known == name).map(|(_, signal)| signal.as_raw())
}

/// Closes all descriptors except the standard ones and `keep_fd`, which becomes close-on-exec. For a
/// fork that executes a program or exits, and never uses the descriptors it has copies of.
pub fn close_other_fds(keep_fd: BorrowedFd<'_>) -> io::Result<()> {
    let keep_fd = u32::try_from(keep_fd.as_raw_fd()).map_err(io::Error::other)?;
    for (first, last) in [(3, keep_fd.saturating_sub(1)), (keep_fd.max(2) + 1, u32::MAX)] {
        if first > last {
            continue;
        }
        // SAFETY: passes integers. No other owner of these descriptors in this process uses them again,
        // as the caller promises: values of the parent are not dropped in a fork.
        if unsafe { libc::syscall(libc::SYS_close_range, first, last, 0) } != 0 {
            return Err(io::Error::last_os_error());
        }
    }
    // SAFETY: as above; only a flag is changed.
    let done = unsafe { libc::syscall(libc::SYS_close_range, 3, u32::MAX, libc::CLOSE_RANGE_CLOEXEC) };
    if done == 0 { Ok(()) } else { Err(io::Error::last_os_error()) }
}

/// Leaves the session keyring with the keys of this process and its ancestors for a new one.
pub fn join_new_session_keyring() -> io::Result<()> {
    /// `KEYCTL_JOIN_SESSION_KEYRING`
    const JOIN_SESSION_KEYRING: libc::c_long = 1;
    // SAFETY: passes an integer and a null pointer, which requests a new anonymous keyring.
    let done =
        unsafe { libc::syscall(libc::SYS_keyctl, JOIN_SESSION_KEYRING, std::ptr::null::<libc::c_char>()) };
    match done {
        -1 => match io::Error::last_os_error() {
            // A kernel without keyrings.
            error if error.raw_os_error() == Some(libc::ENOSYS) => Ok(()),
            error => Err(error),
        },
        _ => Ok(()),
    }
}

/// Raises the limit of open files to the hard limit, for this process and its children. Default soft
/// limits are low for the sake of old programs.
pub fn raise_nofile_limit() {
    use rustix::process::{Resource, Rlimit, getrlimit, setrlimit};
    let max = getrlimit(Resource::Nofile).maximum;
    // On failure the lower limit stays, which works until it is reached.
    let _ = setrlimit(Resource::Nofile, Rlimit { current: max, maximum: max });
}

/// Makes the kernel reap children of this process; their exit status is discarded.
pub fn ignore_child_signals() {
    // SAFETY: an ignored signal calls no function.
    unsafe { libc::signal(libc::SIGCHLD, libc::SIG_IGN) };
}

/// Executes the program at `path`, which must contain a slash, with the environment in the given order.
///
/// `std::os::unix::process::CommandExt::exec` sorts the variables by name. As there, the program starts
/// with no blocked signals and the default action for SIGPIPE, which Rust programs ignore.
pub fn execute(path: &str, args: &[String], env: &[String]) -> io::Result<Infallible> {
    let path = CString::new(path)?;
    let c_strings =
        |list: &[String]| list.iter().map(|text| CString::new(text.as_str())).collect::<Result<Vec<_>, _>>();
    let (args, env) = (c_strings(args)?, c_strings(env)?);
    let pointers = |list: &[CString]| -> Vec<*const libc::c_char> {
        list.iter().map(|text| text.as_ptr()).chain([std::ptr::null()]).collect()
    };
    let (argv, envp) = (pointers(&args), pointers(&env));
    // SAFETY: the set is a local variable that is initialized before it is used. A signal with its
    // default action calls no function.
    unsafe {
        let mut none = std::mem::zeroed();
        libc::sigemptyset(&raw mut none);
        let error = libc::pthread_sigmask(libc::SIG_SETMASK, &raw const none, std::ptr::null_mut());
        if error != 0 {
            return Err(io::Error::from_raw_os_error(error));
        }
        if libc::signal(libc::SIGPIPE, libc::SIG_DFL) == libc::SIG_ERR {
            return Err(io::Error::last_os_error());
        }
    }
    // SAFETY: both arrays end with a null pointer, and they and their strings outlive the call.
    unsafe { libc::execve(path.as_ptr(), argv.as_ptr(), envp.as_ptr()) };
    Err(io::Error::last_os_error())
}

/// Moves to new namespaces. For a process with one thread, or where only this thread is meant.
pub fn unshare(flags: rustix::thread::UnshareFlags) -> io::Result<()> {
    use rustix::thread::UnshareFlags as F;
    if flags.contains(F::FILES) {
        return Err(io::ErrorKind::InvalidInput.into());
    }
    // SAFETY: unsafe only for the descriptor table, which stays shared.
    unsafe { rustix::thread::unshare_unsafe(flags)? };
    Ok(())
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn reads_signal_names() {
        let numbers = ["SIGTERM", "quit", "9", "SIGRTMIN+3", "37", "nonsense", "0", "SIGRTMIN+90"];
        let known = numbers.map(signal_number);
        assert_eq!(known, [Some(15), Some(3), Some(9), Some(37), Some(37), None, None, None]);
    }

    #[test]
    fn sets_nofile_limit_to_maximum() {
        raise_nofile_limit();
        let limit = rustix::process::getrlimit(rustix::process::Resource::Nofile);
        assert_eq!(limit.current, limit.maximum);
    }

    #[test]
    fn fork_fails_in_a_threaded_process() {
        let result = fork(CloneOptions::default(), || 0).map(drop).map_err(|error| error.to_string());
        assert_eq!(result, Err("cannot fork a process with several threads".to_owned()));
    }
}
