//! Startup of a supervisor: detaches from its parent and sets up the pod's namespaces, network and
//! socket.

use std::fs::File;
use std::io::{self, Read as _, Write as _};
use std::os::fd::{AsFd, OwnedFd};
use std::os::unix::net::UnixListener;
use std::path::{Path, PathBuf};
use std::process::ExitCode;

use rustix::event::{PollFd, PollFlags, Timespec};
use rustix::fs::{Mode, OFlags};
use rustix::mount::{MountFlags, MountPropagationFlags};
use rustix::thread::UnshareFlags;
use sys::cgroup::Cgroups;
use sys::memory::FileMappings;
use sys::netlink::Netlink;
use sys::process::CloneOptions;
use sys::removal_watcher::RemovalWatcher;

use super::users::PodUsers;
use super::{Failure, Supervisor, launch, layers, spawn};
use crate::embedded::SUPERVISORS_CGROUP;
use crate::embedded::protocol::SOCKET;
use crate::embedded::spec::{self, Sandbox};

/// `skiff supervise DIRECTORY`: starts a supervisor in the background and exits once it accepts
/// requests. On failure, the reason is on standard output.
pub fn supervise(directory: &Path) -> ExitCode {
    sys::process::raise_nofile_limit();
    let begin = || -> io::Result<String> {
        let spec: Sandbox = serde_json::from_reader(io::stdin().lock())?;
        let (mut reader, writer) = io::pipe()?;
        let cgroup = supervisors_cgroup();
        let clone_options =
            CloneOptions { cgroup: cgroup.as_ref().map(AsFd::as_fd), ..CloneOptions::default() };
        let mut writer = Some(writer);
        let mut start = |clone_options: CloneOptions<'_>| {
            sys::process::fork(clone_options, || {
                writer.take().map_or(1, |writer| run(directory, &spec, writer))
            })
        };
        let child = match start(clone_options) {
            Ok(child) => child,
            // A kernel before 5.7 without CLONE_INTO_CGROUP, or a cgroup that accepts no processes.
            Err(_) => start(CloneOptions::default())?,
        };
        // Only the child has a copy now, so that reading ends when it exits.
        drop(writer);
        let mut output = [0; 4096];
        let count = reader.read(&mut output)?;
        if has_caller_exited() {
            let _ = child.signal(9);
        }
        Ok(String::from_utf8_lossy(&output[..count]).into_owned())
    };
    let error_message = match begin() {
        Ok(output) if output == "ready" => return ExitCode::SUCCESS,
        Ok(output) if output.is_empty() => "the supervisor exited without a result".to_owned(),
        Ok(output) => output,
        Err(error) => error.to_string(),
    };
    print!("{error_message}");
    ExitCode::FAILURE
}

/// The cgroup of all supervisors, with cgroup v2. In the cgroup of skiff's service they would be
/// leftover processes at each restart, and a service manager would stop them or account them to the
/// service.
fn supervisors_cgroup() -> Option<OwnedFd> {
    let cgroups = Cgroups::of_host().ok()?;
    let open = || cgroups.open_dir(SUPERVISORS_CGROUP);
    open().or_else(|| {
        cgroups.is_v2().then(|| cgroups.create(SUPERVISORS_CGROUP).ok())??;
        open()
    })
}

/// Whether skiff, which reads standard output, has exited. It then does not know this supervisor, and a
/// new skiff may already have looked for it.
fn has_caller_exited() -> bool {
    let stdout = rustix::stdio::stdout();
    let mut fds = [PollFd::new(&stdout, PollFlags::empty())];
    let _ = rustix::event::poll(&mut fds, Some(&Timespec { tv_sec: 0, tv_nsec: 0 }));
    fds[0].revents().intersects(PollFlags::HUP | PollFlags::ERR)
}

fn run(directory: &Path, spec: &Sandbox, mut ready: io::PipeWriter) -> i32 {
    // While no client can connect, this process must not outlive its parent.
    let follow = rustix::process::set_parent_process_death_signal;
    let _ = follow(Some(rustix::process::Signal::KILL));
    match prepare(directory, spec) {
        Ok(mut supervisor) => {
            let _ = follow(None);
            let _ = ready.write_all(b"ready");
            drop(ready);
            match supervisor.serve() {
                Ok(()) => 0,
                Err(error) => {
                    log_exit_reason(directory, &error);
                    1
                }
            }
        }
        Err(Failure(message)) => {
            let _ = ready.write_all(message.as_bytes());
            1
        }
    }
}

fn prepare(directory: &Path, spec: &Sandbox) -> Result<Supervisor, Failure> {
    let _ = rustix::process::setsid();
    let detach = || null().and_then(|null| launch::stdio(&null, &null, &null));
    detach().map_err(Failure::during("detach from the standard streams"))?;
    let place = directory.to_owned();
    std::panic::set_hook(Box::new(move |panic| log_exit_reason(&place, panic)));
    // Processes in a container must not be able to trace a supervisor process that is about to enter
    // it.
    let _ = rustix::process::set_dumpable_behavior(rustix::process::DumpableBehavior::NotDumpable);
    let _ = std::fs::write("/proc/self/oom_score_adj", "-998");
    let cgroups = Cgroups::of_host().map_err(Failure::during("detect the cgroup hierarchies"))?;
    let flags = OFlags::RDONLY | OFlags::CLOEXEC;
    let host_mount_namespace = rustix::fs::open("/proc/self/ns/mnt", flags, Mode::empty())
        .map_err(Failure::during("open /proc/self/ns/mnt"))?;
    let host_namespaces = ["net", "ipc", "uts"].map(|name| format!("/proc/self/ns/{name}"));
    let host_namespaces: Result<Vec<OwnedFd>, _> =
        host_namespaces.iter().map(|path| rustix::fs::open(path, flags, Mode::empty())).collect();
    let host_namespaces = host_namespaces.map_err(Failure::during("open the host's namespaces"))?;
    let (users, network) = setup_network(spec)?;
    let shm = mount_shared_memory(directory, spec, users.as_ref())?;
    // Forked before there is anything that a copy of this process must not hold.
    let pause_process = if spec.shared_pids {
        let failed = |Failure(reason)| Failure(format!("start the pause process: {reason}"));
        Some(spawn::PauseProcess::start().map_err(failed)?)
    } else {
        None
    };
    rustix::process::chdir(directory).map_err(Failure::during("enter the pod directory"))?;
    let _ = std::fs::remove_file(SOCKET);
    // Relative, since a socket path is limited to 108 bytes.
    let listener = UnixListener::bind(SOCKET).map_err(Failure::during("create the pod socket"))?;
    listener.set_nonblocking(true).map_err(Failure::during("create the pod socket"))?;
    // If the directory was deleted meanwhile, no client would ever connect.
    std::fs::metadata(directory.join(SOCKET)).map_err(Failure::during("find the pod socket"))?;
    // Without it, a deletion is noticed at the next event.
    let removal_watcher = RemovalWatcher::watch(directory).ok();
    let directory = directory.to_owned();
    let (connections, containers, commands) = Default::default();
    Ok(Supervisor {
        directory,
        cgroups,
        host_mount_namespace,
        host_namespaces,
        users,
        pause_process,
        network,
        shm,
        listener,
        connections,
        containers,
        commands,
        removal_watcher,
        next: 0,
        is_shutdown: false,
        sigterm: sys::process::sigterm_pipe().ok(),
        terminates_at: None,
        is_orphan: false,
        mappings: FileMappings::of_process().unwrap_or_default(),
    })
}

/// The host-side link of the pod, and a netlink socket in its namespace.
type Link = (Netlink, String);

/// Sets up the namespaces of the pod and its network.
fn setup_network(spec: &Sandbox) -> Result<(Option<PodUsers>, Option<Link>), Failure> {
    let mut host = Netlink::open().map_err(Failure::during("open a netlink socket"))?;
    let mut unshare_flags = UnshareFlags::empty();
    unshare_flags.set(UnshareFlags::NEWNET, !spec.host_network);
    unshare_flags.set(UnshareFlags::NEWIPC, !spec.host_ipc);
    unshare_flags.set(UnshareFlags::NEWUTS, !spec.hostname.is_empty());
    let users = spec.users.as_ref().map(|map| PodUsers::create(map, unshare_flags)).transpose()?;
    if users.is_some() {
        unshare_flags = UnshareFlags::empty();
    }
    sys::process::unshare(unshare_flags | UnshareFlags::NEWNS)
        .map_err(Failure::during("create the pod namespaces"))?;
    rustix::mount::mount_change("/", MountPropagationFlags::DOWNSTREAM | MountPropagationFlags::REC)
        .map_err(Failure::during("change the propagation of the host's mounts"))?;
    if !spec.hostname.is_empty() {
        rustix::system::sethostname(spec.hostname.as_bytes())
            .map_err(Failure::during("set the host name"))?;
    }
    let mut link = None;
    if !spec.host_network {
        allow_low_ports_and_ping(users.is_some());
        let failed = |error: podnet::Error| {
            let source =
                std::error::Error::source(&error).map(|source| format!(": {source}")).unwrap_or_default();
            Failure(format!("failed to setup network for sandbox: {error}{source}"))
        };
        match &spec.network {
            Some(attachment) => {
                podnet::attach(&mut host, attachment).map_err(failed)?;
                link = Some((host, attachment.link.clone()));
            }
            None => {
                let mut inside =
                    Netlink::open().map_err(Failure::during("open a netlink socket in the pod"))?;
                podnet::loopback(&mut inside).map_err(failed)?;
            }
        }
    }
    apply_sysctls(spec, users.as_ref())?;
    Ok((users, link))
}

/// Applies the pod's sysctls.
pub fn apply_sysctls(spec: &Sandbox, users: Option<&PodUsers>) -> Result<(), Failure> {
    let set = || {
        for (name, value) in &spec.sysctls {
            if !is_namespaced_sysctl(spec, name) {
                return Err(Failure(format!("sysctl {name:?} is not in a separate kernel namespace")));
            }
            let swapped = name.chars().map(|letter| match letter {
                '.' => '/',
                '/' => '.',
                other => other,
            });
            let path = format!("/proc/sys/{}", swapped.collect::<String>());
            std::fs::write(&path, value).map_err(Failure::during(format!("set {name} to {value:?}")))?;
        }
        Ok(())
    };
    match users {
        // Some can be set only by root of the namespace.
        Some(users) if !spec.sysctls.is_empty() => users.run_as_root(set),
        _ => set(),
    }
}

/// Allows ports below 1024 and ping without privileges in a network namespace of the pod. The pod's own
/// sysctls are applied later.
fn allow_low_ports_and_ping(has_own_users: bool) {
    let _ = std::fs::write("/proc/sys/net/ipv4/ip_unprivileged_port_start", "0");
    if !has_own_users {
        let _ = std::fs::write("/proc/sys/net/ipv4/ping_group_range", "0 2147483647");
    }
}

/// Whether a sysctl is namespaced and the pod has that namespace, so that nothing else on the host is
/// affected.
fn is_namespaced_sysctl(spec: &Sandbox, name: &str) -> bool {
    let of_ipc = ["kernel.sem", "kernel.shm", "kernel.msg", "fs.mqueue."]
        .iter()
        .any(|prefix| name.starts_with(prefix));
    let is_plain = name.split(['.', '/']).all(|part| !part.is_empty());
    is_plain && (name.starts_with("net.") && !spec.host_network || of_ipc && !spec.host_ipc)
}

/// Mounts the pod's `/dev/shm` and returns its path in this mount namespace. With the host's IPC
/// namespace it is the host's.
fn mount_shared_memory(
    directory: &Path,
    spec: &Sandbox,
    users: Option<&PodUsers>,
) -> Result<PathBuf, Failure> {
    fn failed<E: Into<io::Error>>(error: E) -> Failure {
        Failure::during("mount the pod's /dev/shm")(error)
    }
    let mut place = PathBuf::from("/dev/shm");
    if spec.host_ipc {
        return Ok(place);
    }
    // This process does not need the host's /dev/shm; any other mount point would have to be created.
    if !place.is_dir() {
        place = directory.join("shm");
        layers::create_dir(&place).map_err(failed)?;
    }
    let owner = users.map(|users| {
        let (uid, gid) = users.root();
        format!(",uid={},gid={}", uid.as_raw(), gid.as_raw())
    });
    let options = format!("mode=1777,size={}{}", spec.shm, owner.unwrap_or_default());
    let options = std::ffi::CString::new(options).map_err(failed)?;
    let flags = MountFlags::NOSUID | MountFlags::NODEV | MountFlags::NOEXEC;
    rustix::mount::mount("shm", &place, "tmpfs", flags, Some(options.as_c_str())).map_err(failed)?;
    Ok(place)
}

/// Logs the reason of an unexpected exit in the pod's directory.
fn log_exit_reason(directory: &Path, reason: &dyn std::fmt::Display) {
    let log = File::options().append(true).create(true).open(directory.join("supervisor.log"));
    let _ = log.and_then(|mut log| writeln!(log, "{reason}"));
}

/// Opens /dev/null.
pub fn null() -> io::Result<OwnedFd> {
    Ok(rustix::fs::open("/dev/null", OFlags::RDWR | OFlags::CLOEXEC, Mode::empty())?)
}

pub fn read_container(directory: &Path, id: &str) -> Result<spec::Container, Failure> {
    if id.is_empty() || !id.bytes().all(|byte| byte.is_ascii_alphanumeric()) {
        return Err(Failure(format!("{id:?} is not a valid container ID")));
    }
    read_json(&directory.join(id).join("spec.json"))
}

fn read_json<T: serde::de::DeserializeOwned>(path: &Path) -> Result<T, Failure> {
    let bytes = std::fs::read(path).map_err(Failure::during(format!("read {}", path.display())))?;
    serde_json::from_slice(&bytes)
        .map_err(|error| Failure(format!("cannot parse {}: {error}", path.display())))
}
