//! Forks of the supervisor that become a container's processes.
//!
//! Each has a channel back to the supervisor. It brings the terminal's master, the user the process
//! runs as, or the error message, and is closed when the program is executed.

use std::io::{self, Read as _, Write as _};
use std::os::fd::{AsFd, BorrowedFd, OwnedFd};
use std::os::unix::net::UnixStream;
use std::path::Path;

use rustix::thread::{LinkNameSpaceType, ThreadNameSpaceType, UnshareFlags};
use sys::cgroup::{Cgroups, DeviceKind, DeviceRule};
use sys::process::{Child, CloneOptions};

use super::Failure;
use super::hooks::Hooks;
use super::identity::Identity;
use super::launch::{self, launch};
use super::root::{self, MountSources};
use super::users::PodUsers;
use crate::embedded::spec::{Container, Pids};

/// The overflow UID and GID, which own nothing.
const OVERFLOW_ID: u32 = 65534;

/// The state of the pod that a new process needs.
pub struct SpawnContext<'a> {
    /// The pod's directory.
    pub directory: &'a Path,
    pub cgroups: &'a Cgroups,
    /// The source of the containers' `/dev/shm`, in this mount namespace.
    pub shm: &'a Path,
    /// The host's mount namespace.
    pub host_mount_namespace: BorrowedFd<'a>,
    /// The host's network, IPC and UTS namespaces.
    pub host_namespaces: &'a [OwnedFd],
    /// The user namespace, if the pod has one of its own.
    pub users: Option<&'a PodUsers>,
}

/// The standard streams of a new process; not used with a terminal.
pub struct Stdio<'a> {
    pub stdin: BorrowedFd<'a>,
    pub stdout: BorrowedFd<'a>,
    pub stderr: BorrowedFd<'a>,
}

impl Stdio<'_> {
    /// Changes the owner of the streams to the pod's root user.
    fn set_owner(&self, users: &PodUsers) {
        [self.stdin, self.stdout, self.stderr].into_iter().for_each(|stream| users.set_owner(stream));
    }
}

/// A process that has not yet executed its program.
pub struct SpawnedProcess {
    pub child: Child,
    pub channel: UnixStream,
}

/// What a channel has brought when it is closed.
#[derive(Debug, Default)]
pub struct SpawnResult {
    pub failure: Option<String>,
    pub terminal: Option<OwnedFd>,
    pub identity: Option<Identity>,
    /// Received bytes that are not parsed yet.
    received: Vec<u8>,
}

/// Starts a container. `pids` is the PID namespace to join, if it does not get one of its own.
pub fn spawn_container(
    context: &SpawnContext<'_>,
    id: &str,
    spec: &Container,
    pids: Option<BorrowedFd<'_>>,
    stdio: &Stdio<'_>,
) -> Result<SpawnedProcess, Failure> {
    let directory = context.directory.join(id);
    let options = CloneOptions { pid: spec.pids == Pids::Own, ..CloneOptions::default() };
    let cgroup_result = create_cgroup(context.cgroups, spec);
    let group = CgroupTarget {
        cgroups: context.cgroups,
        name: &spec.cgroup,
        sub_group: None,
        created: cgroup_result,
    };
    spawn(options, group, pids, |channel| {
        let begin = || -> Result<_, Failure> {
            rustix::process::umask(rustix::fs::Mode::empty());
            sys::process::join_new_session_keyring()
                .map_err(Failure::during("join a new session keyring"))?;
            set_oom_score(spec.oom_score_adj);
            let filter = launch::seccomp_filter(spec)?;
            let hooks = Hooks::new(id, spec, &directory)?;
            let trees = MountSources::open(spec, context)?;
            let mut unshare_flags = UnshareFlags::NEWNS;
            if !spec.privileged {
                unshare_flags |= UnshareFlags::NEWCGROUP;
            }
            sys::process::unshare(unshare_flags).map_err(Failure::during("create a mount namespace"))?;
            root::enter(spec, &directory, trees, context, &hooks)?;
            if let Some(users) = context.users {
                stdio.set_owner(users);
                users.enter()?;
                // Locks the mounts made so far: root of the user namespace cannot unmount them one by
                // one.
                sys::process::unshare(UnshareFlags::NEWNS)
                    .map_err(Failure::during("create a mount namespace of the pod's user namespace"))?;
            }
            setup_streams(spec.tty, stdio, channel)?;
            if spec.tty {
                launch::console().map_err(Failure::during("mount /dev/console"))?;
            }
            Ok((filter, hooks))
        };
        match begin() {
            Ok((filter, hooks)) => {
                let hooks = Some(&hooks);
                let command = CommandSpec { args: &spec.args, tty: spec.tty, identity: None, hooks };
                launch(spec, &command, filter.as_deref(), channel)
            }
            Err(failure) => failure,
        }
    })
}

/// The program of a new process.
pub struct CommandSpec<'a> {
    pub args: &'a [String],
    pub tty: bool,
    /// The container's user, if it is known already.
    pub identity: Option<&'a Identity>,
    /// The hooks of a container's first process.
    pub hooks: Option<&'a Hooks<'a>>,
}

/// Runs a command in a running container. `first` is the container's first process.
pub fn spawn_command(
    context: &SpawnContext<'_>,
    spec: &Container,
    command: &CommandSpec<'_>,
    first: &Child,
    pids: Option<BorrowedFd<'_>>,
    stdio: &Stdio<'_>,
) -> Result<SpawnedProcess, Failure> {
    let sub_group = context.cgroups.of_process(first.pid());
    let group = CgroupTarget { cgroups: context.cgroups, name: &spec.cgroup, sub_group, created: Ok(()) };
    spawn(CloneOptions::default(), group, pids, |channel| {
        let begin = || -> Result<_, Failure> {
            sys::process::join_new_session_keyring()
                .map_err(Failure::during("join a new session keyring"))?;
            set_oom_score(spec.oom_score_adj);
            let filter = launch::seccomp_filter(spec)?;
            let mut into = ThreadNameSpaceType::MOUNT;
            if !spec.privileged {
                into |= ThreadNameSpaceType::CONTROL_GROUP;
            }
            rustix::thread::move_into_thread_name_spaces(first.as_fd(), into)
                .map_err(Failure::during("enter the container's namespaces"))?;
            if let Some(users) = context.users {
                stdio.set_owner(users);
                users.enter()?;
            }
            setup_streams(command.tty, stdio, channel)?;
            Ok(filter)
        };
        match begin() {
            Ok(filter) => launch(spec, command, filter.as_deref(), channel),
            Err(failure) => failure,
        }
    })
}

/// The pause process of a pod: holds its PID namespace and reaps the orphans in it.
pub struct PauseProcess {
    pub child: Child,
    /// The pause process exits when this is closed.
    _alive: UnixStream,
}

impl PauseProcess {
    /// Starts a pause process and waits until it has given up everything that could be abused: all
    /// containers of the pod see this process, and some may inspect it.
    pub fn start() -> Result<PauseProcess, Failure> {
        const READY: &[u8] = &[0];
        let (local, remote) = UnixStream::pair().map_err(Failure::during("create a socket pair"))?;
        let mut local = Some(local);
        let child = sys::process::fork(CloneOptions { pid: true, ..CloneOptions::default() }, || {
            // Its copy of the other end would keep it from noticing the supervisor's exit.
            drop(local.take());
            let mut remote = remote;
            sys::process::ignore_child_signals();
            let result = drop_privileges(remote.as_fd());
            let reply = result.as_ref().map_or_else(|Failure(message)| message.as_bytes(), |()| READY);
            if remote.write_all(reply).is_ok() && result.is_ok() {
                let _ = remote.read(&mut [0]);
            }
            0
        });
        let child = child.map_err(Failure::during("fork a process"))?;
        let mut alive = local.ok_or_else(|| Failure("the pause process has no socket".to_owned()))?;
        let mut buffer = [0; 512];
        let length = alive.read(&mut buffer).map_err(Failure::during("read from the pause process"))?;
        match &buffer[..length] {
            READY => Ok(PauseProcess { child, _alive: alive }),
            message => {
                let _ = child.wait();
                Err(Failure(String::from_utf8_lossy(message).into_owned()))
            }
        }
    }
}

/// Gives up what this process does not need for waiting: files, the host's filesystem, privileges and
/// user.
fn drop_privileges(keep_fd: BorrowedFd<'_>) -> Result<(), Failure> {
    sys::process::close_other_fds(keep_fd).map_err(Failure::during("close files"))?;
    let null = super::setup::null().map_err(Failure::during("open /dev/null"))?;
    // Mounted nowhere, so that it has no parent directory.
    let empty = root::empty_filesystem().map_err(Failure::during("create an empty root"))?;
    rustix::process::fchdir(&empty)
        .and_then(|()| rustix::process::chroot("."))
        .map_err(Failure::during("change to the empty root"))?;
    drop(empty);
    launch::stdio(&null, &null, &null).map_err(Failure::during("detach from the standard streams"))?;
    drop(null);
    let spec = Container { no_new_privileges: true, ..Container::default() };
    let identity = Identity { uid: OVERFLOW_ID, gid: OVERFLOW_ID, groups: Vec::new(), home: String::new() };
    let filter = crate::embedded::seccomp::default_filter(&[]);
    launch::become_user(&spec, &identity, None)?;
    sys::seccomp::load(&filter).map_err(Failure::during("load the seccomp filter"))
}

/// The cgroup of a new process.
struct CgroupTarget<'a> {
    cgroups: &'a Cgroups,
    name: &'a str,
    /// The cgroup of the container's first process. If the container has nested cgroups with
    /// controllers enabled, cgroup v2 allows no processes in its own cgroup.
    sub_group: Option<String>,
    /// The result of creating the cgroup. The new process reports an error, like all its other errors.
    created: Result<(), Failure>,
}

impl CgroupTarget<'_> {
    fn join(self) -> Result<(), Failure> {
        self.created?;
        self.cgroups.join(self.name).map_err(Failure::during("join the container's cgroup"))
    }
}

/// Starts a process in a container's cgroup.
fn spawn(
    options: CloneOptions<'_>,
    group: CgroupTarget<'_>,
    pids: Option<BorrowedFd<'_>>,
    body: impl FnOnce(&UnixStream) -> Failure,
) -> Result<SpawnedProcess, Failure> {
    let (local, remote) = UnixStream::pair().map_err(Failure::during("create a socket pair"))?;
    local.set_nonblocking(true).map_err(Failure::during("create a socket pair"))?;
    let names = [Some(group.name), group.sub_group.as_deref()].into_iter().flatten();
    let cgroup_dirs: Vec<OwnedFd> =
        names.filter(|_| group.created.is_ok()).filter_map(|name| group.cgroups.open_dir(name)).collect();
    // Taken in the child; still here for the second attempt in this process.
    let (mut group, mut body) = (Some(group), Some(body));
    let mut run = |is_inside: bool| {
        // Set first: a process of a container must not outlive its supervisor.
        let _ = rustix::process::set_parent_process_death_signal(Some(rustix::process::Signal::KILL));
        let _ = rustix::process::setsid();
        let (Some(group), Some(body)) = (group.take(), body.take()) else { return 127 };
        let joined = if is_inside { Ok(()) } else { group.join() };
        let Failure(message) = joined.err().unwrap_or_else(|| body(&remote));
        let _ = (&remote).write_all(message.as_bytes());
        127
    };
    let child = in_pid_namespace(pids, || {
        for cgroup_dir in &cgroup_dirs {
            if let Ok(child) =
                sys::process::fork(CloneOptions { cgroup: Some(cgroup_dir.as_fd()), ..options }, || run(true))
            {
                return Ok(child);
            }
        }
        // CLONE_INTO_CGROUP is subject to the container's pids limit, joining a cgroup is not.
        sys::process::fork(options, || run(false))
    });
    let child = child.map_err(Failure::during("fork a process of the container"))?;
    Ok(SpawnedProcess { child, channel: local })
}

/// Forks a child into another PID namespace; this process stays in its own.
fn in_pid_namespace(
    pids: Option<BorrowedFd<'_>>,
    fork: impl FnOnce() -> io::Result<Child>,
) -> io::Result<Child> {
    let Some(pids) = pids else { return fork() };
    let kind = Some(LinkNameSpaceType::ProcessID);
    let own = std::fs::File::open("/proc/self/ns/pid")?;
    // Entering a PID namespace affects only the children of this process.
    rustix::thread::move_into_link_name_space(pids, kind)?;
    let result = fork();
    rustix::thread::move_into_link_name_space(own.as_fd(), kind)?;
    result
}

/// Runs `body` in a child process, which may enter namespaces that it cannot leave.
pub fn run_in_child(body: impl FnOnce() -> Result<(), Failure>) -> Result<(), Failure> {
    let (mut local, remote) = UnixStream::pair().map_err(Failure::during("create a socket pair"))?;
    let child = sys::process::fork(CloneOptions::default(), || {
        let _ = rustix::process::set_parent_process_death_signal(Some(rustix::process::Signal::KILL));
        let Err(Failure(message)) = body() else { return 0 };
        let _ = (&remote).write_all(message.as_bytes());
        1
    });
    let child = child.map_err(Failure::during("fork a process"))?;
    drop(remote);
    let mut message = String::new();
    let _ = local.read_to_string(&mut message);
    match child.wait() {
        Ok(ended) if ended.code() == 0 => Ok(()),
        _ if message.is_empty() => Err(Failure("a helper process was killed".to_owned())),
        _ => Err(Failure(message)),
    }
}

fn setup_streams(tty: bool, stdio: &Stdio<'_>, channel: &UnixStream) -> Result<(), Failure> {
    if tty {
        let local = launch::terminal()?;
        sys::fds::send(channel, b"\0", &[local.as_fd()]).map_err(Failure::during("send the terminal"))?;
        return Ok(());
    }
    launch::stdio(stdio.stdin, stdio.stdout, stdio.stderr).map_err(Failure::during("set up standard streams"))
}

fn create_cgroup(cgroups: &Cgroups, spec: &Container) -> Result<(), Failure> {
    let group = &spec.cgroup;
    cgroups.create(group).map_err(Failure::during("create the container cgroup"))?;
    cgroups.limit(group, &spec.limits).map_err(Failure::during("set the container limits"))?;
    cgroups
        .allow_devices(group, &device_rules(spec))
        .map_err(Failure::during("set the container's device rules"))
}

fn device_rules(spec: &Container) -> Vec<DeviceRule> {
    use std::os::unix::fs::{FileTypeExt as _, MetadataExt as _};
    /// Creating nodes is harmless while they cannot be opened. The terminals are the container's own.
    const DEFAULT_DEVICE_RULES: [&str; 10] = [
        "c *:* m",
        "b *:* m",
        "c 1:3 rwm",
        "c 1:5 rwm",
        "c 1:7 rwm",
        "c 1:8 rwm",
        "c 1:9 rwm",
        "c 5:0 rwm",
        "c 5:2 rwm",
        "c 136:* rwm",
    ];
    if spec.privileged {
        return vec![DeviceRule::ALL];
    }
    let mut rules: Vec<DeviceRule> =
        DEFAULT_DEVICE_RULES.iter().filter_map(|rule| rule.parse().ok()).collect();
    for device in &spec.devices {
        let of_source = || {
            let found = std::fs::metadata(&device.source).ok()?;
            let (major, minor) = (rustix::fs::major(found.rdev()), rustix::fs::minor(found.rdev()));
            Some((found.file_type().is_block_device(), major, minor))
        };
        let Some((is_block, major, minor)) =
            device.made.as_ref().and_then(|cgroup_result| cgroup_result.numbers).or_else(of_source)
        else {
            continue;
        };
        rules.push(DeviceRule {
            kind: Some(if is_block { DeviceKind::Block } else { DeviceKind::Character }),
            major: Some(major),
            minor: Some(minor),
            read: device.access.contains('r'),
            write: device.access.contains('w'),
            mknod: device.access.contains('m'),
        });
    }
    rules
}

/// Sets the OOM score adjustment, best effort: root in a restricted environment may not lower it.
fn set_oom_score(adjustment: i64) {
    let _ = std::fs::write("/proc/self/oom_score_adj", adjustment.to_string());
}

/// The first byte of an identity message, which ends with a line break.
const IDENTITY: u8 = 1;

/// Reports a container's user to the supervisor.
pub fn send_identity(mut channel: &UnixStream, identity: &Identity) -> io::Result<()> {
    let mut message = vec![IDENTITY];
    serde_json::to_writer(&mut message, identity)?;
    message.push(b'\n');
    channel.write_all(&message)
}

/// Reads from a channel; `None` while it is open.
pub fn read_channel(channel: &UnixStream, spawn_result: &mut SpawnResult) -> Option<()> {
    let mut buffer = [0; 4096];
    loop {
        match sys::fds::receive(channel, &mut buffer) {
            Ok((0, _)) => break,
            Ok((count, mut fds)) => {
                spawn_result.terminal = spawn_result.terminal.take().or(fds.pop());
                spawn_result.received.extend_from_slice(&buffer[..count]);
            }
            Err(error) if error.kind() == io::ErrorKind::WouldBlock => return None,
            Err(_) => break,
        }
    }
    spawn_result.parse_received();
    Some(())
}

impl SpawnResult {
    /// Parses everything received. In this order, each optional: the byte of the terminal, the
    /// identity, the error message.
    fn parse_received(&mut self) {
        let received = std::mem::take(&mut self.received);
        let mut rest = received.strip_prefix(b"\0").unwrap_or(&received);
        if let Some(message) = rest.strip_prefix(&[IDENTITY])
            && let Some(end) = message.iter().position(|byte| *byte == b'\n')
        {
            self.identity = serde_json::from_slice(&message[..end]).ok();
            rest = &message[end + 1..];
        }
        if !rest.is_empty() {
            self.failure = Some(String::from_utf8_lossy(rest).into_owned());
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn channel_returns_terminal_identity_and_failure() {
        let expected = Identity { uid: 7, gid: 8, groups: vec![9], home: "/\n".to_owned() };
        for (terminal, identity, failure) in [
            (false, false, ""),
            (true, true, ""),
            (false, true, "exec x"),
            (true, true, "y\nz"),
            (true, false, "w"),
        ] {
            let (local, remote) = UnixStream::pair().unwrap();
            local.set_nonblocking(true).unwrap();
            let mut spawn_result = SpawnResult::default();
            if terminal {
                sys::fds::send(&remote, b"\0", &[local.as_fd()]).unwrap();
            }
            if identity {
                send_identity(&remote, &expected).unwrap();
            }
            assert_eq!(read_channel(&local, &mut spawn_result), None, "the channel is still open");
            (&remote).write_all(failure.as_bytes()).unwrap();
            drop(remote);
            assert_eq!(read_channel(&local, &mut spawn_result), Some(()));
            assert_eq!(spawn_result.terminal.is_some(), terminal);
            assert_eq!(spawn_result.identity.as_ref(), identity.then_some(&expected));
            assert_eq!(spawn_result.failure.as_deref().unwrap_or_default(), failure);
        }
    }
}
