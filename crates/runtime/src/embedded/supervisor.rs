//! The supervisor process of a pod: `skiff supervise DIRECTORY`.
//!
//! It holds the namespaces that the pod's containers share (network, IPC and UTS; no pause container is
//! needed for them), starts containers, writes their logs, records their exit and serves requests of
//! skiff on a socket. It outlives skiff, and a later skiff finds it by that socket. It is
//! single-threaded and blocks only in `poll`. Start reading at [`supervise`], then
//! [`Supervisor::serve`]. Its counterpart in containerd is the shim.

mod connection;
mod container;
mod hooks;
pub mod identity;
mod launch;
mod layers;
mod listener;
mod log;
mod orphan;
mod poll_set;
mod root;
mod setup;
mod spawn;
mod terminate;
mod users;
mod volumes;

use std::collections::BTreeMap;
use std::fs::File;
use std::io;
use std::os::fd::{AsFd, OwnedFd};
use std::os::unix::net::{UnixListener, UnixStream};
use std::path::PathBuf;
use std::time::{Duration, Instant};

use jiff::Timestamp;
use rustix::event::PollFlags;
use rustix::net::{AddressFamily, SocketFlags, SocketType};
use sys::cgroup::{Cgroups, Limits};
use sys::memory::FileMappings;
use sys::process::Child;
use sys::removal_watcher::RemovalWatcher;

use super::protocol::{RunStatus, StreamSet, SupervisorRequest, SupervisorResponse};
use super::record;
use super::spec::Pids;
use connection::Connection;
use container::{PendingStart, RunningContainer, nanoseconds, nonblocking_file};
use identity::Identity;
use listener::Listener;
use log::Log;
use poll_set::{PollEvent, PollSet};
use spawn::{PauseProcess, SpawnContext, SpawnResult, Stdio};
use users::PodUsers;

pub use setup::supervise;

/// How long no event must arrive for the process to count as idle. Pages used for one event are mostly
/// needed for the next.
const IDLE_DELAY: Duration = Duration::from_millis(100);
/// Time for listeners to read the remaining output when the pod stops.
const DRAIN_TIMEOUT: Duration = Duration::from_secs(2);

/// Why a container or command could not be started, as shown to the user.
#[derive(Debug)]
struct Failure(String);

impl Failure {
    fn during<E: Into<io::Error>>(doing: impl std::fmt::Display) -> impl FnOnce(E) -> Failure {
        move |error| Failure(format!("cannot {doing}: {}", launch::plain_message(&error.into())))
    }
}

/// The state of a pod.
struct Supervisor {
    directory: PathBuf,
    cgroups: Cgroups,
    /// The host's mount namespace.
    host_mount_namespace: OwnedFd,
    /// The host's network, IPC and UTS namespaces.
    host_namespaces: Vec<OwnedFd>,
    /// The user namespace, if the pod has one of its own.
    users: Option<PodUsers>,
    /// Holds the PID namespace, if the containers share one.
    pause_process: Option<PauseProcess>,
    /// The host-side link to delete at the end, and a netlink socket in its namespace.
    network: Option<(sys::netlink::Netlink, String)>,
    /// The source of `/dev/shm` in the containers.
    shm: PathBuf,
    listener: UnixListener,
    connections: Vec<Connection>,
    containers: BTreeMap<String, RunningContainer>,
    commands: Vec<RunningCommand>,
    /// Reports deletions in the pod's directory.
    removal_watcher: Option<RemovalWatcher>,
    next: u64,
    is_shutdown: bool,
    /// Readable after SIGTERM.
    sigterm: Option<OwnedFd>,
    /// When the pod is killed after SIGTERM.
    terminates_at: Option<Instant>,
    /// The pod's directory was deleted, so no skiff process knows the pod any more.
    is_orphan: bool,
    /// The mappings of the executable, whose pages are released while idle.
    mappings: FileMappings,
}

/// A command that runs in a container (exec).
struct RunningCommand {
    connection: u64,
    child: Child,
    /// Open until the command's program runs.
    channel: Option<UnixStream>,
    spawn_result: SpawnResult,
}

impl Supervisor {
    /// Serves events until the pod is stopped.
    fn serve(&mut self) -> io::Result<()> {
        let mut idle_at = Some(Instant::now() + IDLE_DELAY);
        while !self.is_shutdown {
            for event in self.wait(&mut idle_at)? {
                // Stream events need few pages and may continue for long, so they do not keep the
                // process from idling.
                let is_stream_event = matches!(
                    event,
                    PollEvent::Output(..)
                        | PollEvent::Stdin(_)
                        | PollEvent::ListenerIn(..)
                        | PollEvent::ListenerOut(..)
                );
                if !is_stream_event {
                    idle_at = Some(Instant::now() + IDLE_DELAY);
                }
                self.handle_event(event);
            }
            self.drop_finished_listeners();
            self.remove_closed_connections();
            self.is_shutdown |= self.is_terminated();
        }
        self.shut_down();
        Ok(())
    }

    /// Waits for events. Releases the pages of the executable when the process becomes idle.
    fn wait(&self, idle_at: &mut Option<Instant>) -> io::Result<Vec<PollEvent>> {
        let mut poll_set = PollSet::default();
        poll_set.add(PollEvent::Caller, &self.listener, PollFlags::IN);
        if let Some(removal_watcher) = &self.removal_watcher {
            poll_set.add(PollEvent::Removal, removal_watcher, PollFlags::IN);
        }
        // Only the first SIGTERM counts.
        if let Some(sigterm) = self.sigterm.as_ref().filter(|_| self.terminates_at.is_none()) {
            poll_set.add(PollEvent::Terminate, sigterm, PollFlags::IN);
        }
        if let Some(pause_process) = &self.pause_process {
            poll_set.add(PollEvent::PauseProcess, &pause_process.child, PollFlags::IN);
        }
        for connection in &self.connections {
            let flags =
                if connection.has_pending_output() { PollFlags::IN | PollFlags::OUT } else { PollFlags::IN };
            poll_set.add(PollEvent::Connection(connection.id), &connection.stream, flags);
        }
        for (id, running) in &self.containers {
            poll_set.container(id, running);
        }
        for command in &self.commands {
            if let Some(channel) = &command.channel {
                poll_set.add(PollEvent::Command(command.connection), channel, PollFlags::IN);
            }
            poll_set.add(PollEvent::Command(command.connection), &command.child, PollFlags::IN);
        }
        let deadline =
            self.containers.values().filter_map(RunningContainer::deadline).chain(self.terminates_at).min();
        let is_idle =
            self.commands.is_empty() && !self.containers.values().any(RunningContainer::is_starting);
        if let Some(until) = idle_at.filter(|_| is_idle) {
            let is_deadline_first = deadline.is_some_and(|deadline| deadline <= until);
            if Instant::now() < until && (is_deadline_first || poll_set.is_ready_before(until)?) {
                return poll_set.wait(deadline);
            }
            *idle_at = None;
            // The last step before the wait: pages used after it are loaded again and stay.
            self.mappings.release_pages();
        }
        poll_set.wait(deadline)
    }

    fn handle_event(&mut self, event: PollEvent) {
        match event {
            PollEvent::Caller => self.accept(),
            PollEvent::Connection(id) => self.read_requests(id),
            PollEvent::Starting(id) => self.started(&id),
            PollEvent::Output(id, stream) => {
                if let Some(running) = self.containers.get_mut(&id) {
                    running.read_output(stream);
                }
            }
            PollEvent::Stdin(id) => {
                if let Some(running) = self.containers.get_mut(&id) {
                    running.write_stdin();
                }
            }
            PollEvent::ListenerIn(id, at) => {
                let running = self.containers.get_mut(&id);
                if let Some(left) = running.and_then(|running| running.read_listener_input(at)) {
                    self.send_answer(left, &SupervisorResponse::Done, true);
                }
            }
            PollEvent::ListenerOut(id, at, stream) => {
                let running = self.containers.get_mut(&id);
                if let Some(listener) = running.and_then(|running| running.listeners.get_mut(at)) {
                    listener.flush(stream);
                }
            }
            PollEvent::Ended(id) => self.ended(&id),
            PollEvent::Command(connection) => self.command(connection),
            // No container can join the shared PID namespace any more, so the pod has to be recreated.
            PollEvent::PauseProcess => self.is_shutdown = true,
            PollEvent::Terminate => self.terminate(),
            PollEvent::Removal => {
                self.removal_watcher.iter().for_each(RemovalWatcher::drain);
                self.check_directories();
            }
        }
    }

    fn accept(&mut self) {
        if let Ok((stream, _)) = self.listener.accept() {
            self.next += 1;
            self.connections.extend(Connection::new(self.next, stream));
        }
    }

    fn read_requests(&mut self, id: u64) {
        let Some(connection) = self.connections.iter_mut().find(|connection| connection.id == id) else {
            return;
        };
        connection.flush();
        for (request, fds) in connection.requests() {
            self.answer(id, request, fds);
        }
    }

    fn send_answer(&mut self, id: u64, answer: &SupervisorResponse, is_last: bool) {
        if let Some(connection) = self.connections.iter_mut().find(|connection| connection.id == id) {
            connection.send(answer);
            connection.closes_after_flush |= is_last;
        }
    }

    fn answer(&mut self, id: u64, request: SupervisorRequest, fds: Vec<OwnedFd>) {
        let done = match request {
            SupervisorRequest::Watch => return self.watch(id),
            SupervisorRequest::Start { container } => match self.start(id, &container) {
                // The response is sent when the container's program runs.
                Ok(()) => return,
                Err(Failure(message)) => Err(message),
            },
            SupervisorRequest::Exec { container, command, tty, streams } => {
                match self.exec(id, &container, &command, tty, streams, fds) {
                    Ok(()) => return,
                    Err(Failure(message)) => Err(message),
                }
            }
            SupervisorRequest::Attach { container, streams } => {
                match self.attach(id, &container, streams, fds) {
                    Ok(()) => return,
                    Err(error) => Err(error.to_string()),
                }
            }
            SupervisorRequest::Signal { container, signal } => {
                let child = self.containers.get(&container).and_then(|running| running.child.as_ref());
                child.map_or(Ok(()), |child| child.signal(signal)).map_err(|error| error.to_string())
            }
            SupervisorRequest::Resize { container, rows, columns } => {
                if let Some(running) = self.containers.get(&container) {
                    running.resize(rows, columns);
                }
                // Sent on the connection of an attach, which stays open and gets no response.
                return;
            }
            SupervisorRequest::Socket { ipv6 } => return self.socket(id, ipv6),
            SupervisorRequest::Reopen { container } => {
                let running = self.containers.get_mut(&container);
                running.map_or(Ok(()), |running| running.log.reopen()).map_err(|error| error.to_string())
            }
            SupervisorRequest::Forget { container } => {
                let is_over = self.containers.get(&container).is_none_or(|running| running.child.is_none());
                if is_over && let Some(running) = self.containers.remove(&container) {
                    for listener in running.listeners {
                        self.send_answer(listener.connection, &SupervisorResponse::Done, true);
                    }
                }
                is_over.then_some(()).ok_or_else(|| "the container is still running".to_owned())
            }
            SupervisorRequest::Set { pod } => {
                setup::apply_sysctls(&pod, self.users.as_ref()).map_err(|Failure(message)| message)
            }
            SupervisorRequest::Stop => {
                self.is_shutdown = true;
                Ok(())
            }
        };
        let answer =
            done.map_or_else(|message| SupervisorResponse::Failed { message }, |()| SupervisorResponse::Done);
        self.send_answer(id, &answer, true);
    }

    fn watch(&mut self, id: u64) {
        let known: Vec<SupervisorResponse> =
            self.containers.iter().map(|(id, running)| status_answer(id, &running.status)).collect();
        if let Some(connection) = self.connections.iter_mut().find(|connection| connection.id == id) {
            connection.is_watcher = true;
            known.iter().for_each(|answer| connection.send(answer));
            connection.send(&SupervisorResponse::Known);
        }
    }

    fn publish_status(&mut self, id: &str) {
        let Some(running) = self.containers.get(id) else { return };
        let answer = status_answer(id, &running.status);
        // Also on disk, where a skiff that starts after this process has exited finds it.
        if !self.is_orphan {
            let _ = record::add_status(&self.directory.join(id), &running.status);
        }
        for connection in self.connections.iter_mut().filter(|connection| connection.is_watcher) {
            connection.send(&answer);
        }
    }

    fn spawn_context(&self) -> SpawnContext<'_> {
        SpawnContext {
            directory: &self.directory,
            cgroups: &self.cgroups,
            shm: &self.shm,
            host_mount_namespace: self.host_mount_namespace.as_fd(),
            host_namespaces: &self.host_namespaces,
            users: self.users.as_ref(),
        }
    }

    fn start(&mut self, connection: u64, id: &str) -> Result<(), Failure> {
        if self.containers.contains_key(id) {
            return Err(Failure("the container was already started".to_owned()));
        }
        let spec = setup::read_container(&self.directory, id)?;
        fn failed<E: Into<io::Error>>(error: E) -> Failure {
            Failure::during("create the container streams")(error)
        }
        let null = setup::null().map_err(failed)?;
        let (out, err) = (pipe().map_err(failed)?, pipe().map_err(failed)?);
        let stdin = if spec.stdin && !spec.tty { Some(pipe().map_err(failed)?) } else { None };
        let log = Log::open(spec.log.as_deref()).map_err(Failure::during("open the container log"))?;
        let stdio = Stdio {
            stdin: stdin.as_ref().map_or(null.as_fd(), |(read, _)| read.as_fd()),
            stdout: out.1.as_fd(),
            stderr: err.1.as_fd(),
        };
        let pids = self.pids(&spec.pids)?;
        let pids = pids.as_ref().map(|file| file.as_fd());
        let spawned = spawn::spawn_container(&self.spawn_context(), id, &spec, pids, &stdio)?;
        let status = RunStatus { pid: spawned.child.pid(), ..RunStatus::default() };
        let (spawn_result, channel) = (SpawnResult::default(), spawned.channel);
        let tty = spec.tty;
        let output_file =
            |pipe: (OwnedFd, OwnedFd)| if tty { Ok(None) } else { nonblocking_file(pipe.0).map(Some) };
        let running = RunningContainer {
            output: [output_file(out).map_err(failed)?, output_file(err).map_err(failed)?],
            stdin: stdin.map(|(_, write)| nonblocking_file(write)).transpose().map_err(failed)?,
            spec,
            status,
            child: Some(spawned.child),
            starting: Some(PendingStart { channel, spawn_result, connection }),
            terminal: None,
            to_stdin: Vec::new(),
            stdin_ends: false,
            identity: None,
            log,
            listeners: Vec::new(),
        };
        self.containers.insert(id.to_owned(), running);
        Ok(())
    }

    /// The PID namespace that a container joins, if it joins one.
    fn pids(&self, pids: &Pids) -> Result<Option<File>, Failure> {
        let pid = match pids {
            Pids::Own | Pids::Host => return Ok(None),
            Pids::Pod => self.pause_process.as_ref().map(|pause_process| pause_process.child.pid()),
            Pids::Of(id) => self.running(id).map(Child::pid),
        };
        let pid = pid.ok_or_else(|| Failure("the target of the PID namespace is not running".to_owned()))?;
        let path = format!("/proc/{pid}/ns/pid");
        File::open(&path).map(Some).map_err(Failure::during(format!("open {path}")))
    }

    fn running(&self, id: &str) -> Option<&Child> {
        self.containers.get(id).and_then(|running| running.child.as_ref())
    }

    fn started(&mut self, id: &str) {
        let Some(running) = self.containers.get_mut(id) else { return };
        let Some(starting) = &mut running.starting else { return };
        if spawn::read_channel(&starting.channel, &mut starting.spawn_result).is_none() {
            return;
        }
        let connection = starting.connection;
        let spawn_result = std::mem::take(&mut starting.spawn_result);
        running.starting = None;
        if let Some(terminal) = spawn_result.terminal {
            running.terminal = nonblocking_file(terminal).ok();
        }
        running.identity = spawn_result.identity;
        let answer = match spawn_result.failure {
            Some(message) => {
                running.status.failure = Some(message.clone());
                SupervisorResponse::Failed { message }
            }
            None => {
                running.status.started = nanoseconds(Timestamp::now());
                running.status.user = running.identity.as_ref().map(Identity::user);
                SupervisorResponse::Done
            }
        };
        self.publish_status(id);
        self.send_answer(connection, &answer, true);
    }

    fn ended(&mut self, id: &str) {
        let ended = self.running(id).and_then(|child| child.try_wait().ok().flatten());
        let Some(ended) = ended else { return };
        // The result of the start has to be published before the exit.
        self.started(id);
        let Some(running) = self.containers.get_mut(id) else { return };
        let out_of_memory = self.cgroups.oom_kill_count(&running.spec.cgroup) > 0;
        running.end(ended, out_of_memory);
        // Other processes in the container, such as commands, end with its first process. In a shared
        // PID namespace the kernel does not kill them.
        let _ = self.cgroups.kill(&running.spec.cgroup);
        // The cgroup stays until the container is removed. With cgroup v1 its quota would keep the
        // pod's quota from being lowered below it.
        let no_quota = Limits { cpu_quota: -1, ..Limits::default() };
        let _ = self.cgroups.limit(&running.spec.cgroup, &no_quota);
        self.check_directories();
        self.publish_status(id);
    }

    fn exec(
        &mut self,
        connection: u64,
        id: &str,
        command: &[String],
        tty: bool,
        streams: StreamSet,
        fds: Vec<OwnedFd>,
    ) -> Result<(), Failure> {
        let running = self.containers.get(id).filter(|running| running.starting.is_none());
        let first = running.and_then(|running| running.child.as_ref());
        let (Some(running), Some(first)) = (running, first) else {
            return Err(Failure("the container is not running".to_owned()));
        };
        let null = setup::null().map_err(Failure::during("open /dev/null"))?;
        let [stdin, stdout, stderr] =
            assign_streams(streams, fds).ok_or_else(|| Failure("streams are missing".to_owned()))?;
        let stdio = Stdio {
            stdin: stdin.as_ref().unwrap_or(&null).as_fd(),
            stdout: stdout.as_ref().unwrap_or(&null).as_fd(),
            stderr: stderr.as_ref().unwrap_or(&null).as_fd(),
        };
        let path = format!("/proc/{}/ns/pid", first.pid());
        let pids = File::open(&path).map_err(Failure::during(format!("open {path}")))?;
        let pids = Some(pids.as_fd()).filter(|_| running.spec.pids != Pids::Host);
        let identity = running.identity.as_ref();
        let what = spawn::CommandSpec { args: command, tty, identity, hooks: None };
        let spawned = spawn::spawn_command(&self.spawn_context(), &running.spec, &what, first, pids, &stdio)?;
        let (child, channel, spawn_result) = (spawned.child, Some(spawned.channel), SpawnResult::default());
        self.commands.push(RunningCommand { connection, child, channel, spawn_result });
        Ok(())
    }

    /// Handles an event of a command: it has started, failed to start, or exited.
    fn command(&mut self, id: u64) {
        let Some(at) = self.commands.iter().position(|command| command.connection == id) else { return };
        let command = &mut self.commands[at];
        if let Some(channel) = &command.channel {
            if spawn::read_channel(channel, &mut command.spawn_result).is_none() {
                return;
            }
            command.channel = None;
            let spawn_result = std::mem::take(&mut command.spawn_result);
            let connection = self.connections.iter_mut().find(|connection| connection.id == id);
            if let Some(connection) = connection {
                match (spawn_result.failure, spawn_result.terminal) {
                    (Some(message), _) => {
                        connection.send(&SupervisorResponse::Failed { message });
                        connection.closes_after_flush = true;
                    }
                    (None, Some(terminal)) => {
                        connection.send_with_fd(&SupervisorResponse::Done, terminal.as_fd())
                    }
                    (None, None) => connection.send(&SupervisorResponse::Done),
                }
            }
        }
        let command = &self.commands[at];
        if let Ok(Some(ended)) = command.child.try_wait() {
            self.commands.remove(at);
            self.send_answer(id, &SupervisorResponse::Exited { code: ended.code() }, true);
        }
    }

    fn attach(&mut self, connection: u64, id: &str, streams: StreamSet, fds: Vec<OwnedFd>) -> io::Result<()> {
        let running = self.containers.get_mut(id).filter(|running| running.child.is_some());
        let running = running.ok_or_else(|| io::Error::other("the container is not running"))?;
        let [stdin, stdout, stderr] =
            assign_streams(streams, fds).ok_or_else(|| io::Error::other("streams are missing"))?;
        running.listeners.push(Listener::new(connection, stdin, [stdout, stderr])?);
        Ok(())
    }

    fn socket(&mut self, id: u64, ipv6: bool) {
        let family = if ipv6 { AddressFamily::INET6 } else { AddressFamily::INET };
        let flags = SocketFlags::CLOEXEC | SocketFlags::NONBLOCK;
        let result = rustix::net::socket_with(family, SocketType::STREAM, flags, None);
        let Some(connection) = self.connections.iter_mut().find(|connection| connection.id == id) else {
            return;
        };
        match result {
            Ok(socket) => connection.send_with_fd(&SupervisorResponse::Done, socket.as_fd()),
            Err(error) => connection.send(&SupervisorResponse::Failed { message: error.to_string() }),
        }
        connection.closes_after_flush = true;
    }

    /// Drops listeners that are finished or too slow, and answers their connections.
    fn drop_finished_listeners(&mut self) {
        let now = Instant::now();
        let finished: Vec<_> =
            self.containers.values_mut().flat_map(|running| running.take_finished_listeners(now)).collect();
        for (connection, is_complete) in finished {
            let reason = || format!("nothing was read for {} seconds", listener::WRITE_TIMEOUT.as_secs());
            let late = || SupervisorResponse::Failed {
                message: format!("{}: detached from the container", reason()),
            };
            self.send_answer(connection, &if is_complete { SupervisorResponse::Done } else { late() }, true);
        }
    }

    /// Gives listeners time to read the remaining output of exited containers.
    fn drain(&mut self) {
        let end = Instant::now() + DRAIN_TIMEOUT;
        while Instant::now() < end {
            self.drop_finished_listeners();
            let mut poll_set = PollSet::default();
            self.containers.iter().for_each(|(id, running)| poll_set.listeners(id, running));
            if poll_set.is_empty() {
                return;
            }
            for event in poll_set.wait(Some(end)).unwrap_or_default() {
                self.handle_event(event);
            }
        }
    }

    /// Drops closed connections. Kills their commands and removes their listeners.
    fn remove_closed_connections(&mut self) {
        let closed: Vec<u64> = self
            .connections
            .iter()
            .filter(|connection| connection.is_closed())
            .map(|connection| connection.id)
            .collect();
        if closed.is_empty() {
            return;
        }
        self.connections.retain(|connection| !closed.contains(&connection.id));
        for command in self.commands.iter().filter(|command| closed.contains(&command.connection)) {
            let _ = command.child.signal(9);
        }
        for running in self.containers.values_mut() {
            running.remove_listeners(|listener| closed.contains(&listener.connection));
        }
    }

    fn shut_down(&mut self) {
        for running in self.containers.values() {
            if let Some(child) = &running.child {
                let _ = child.signal(9);
            }
        }
        // Commands first: the exit of the first process of a PID namespace completes only when all
        // other processes in it have been reaped, and no other process reaps these.
        for command in self.commands.drain(..) {
            let _ = command.child.signal(9);
            let _ = command.child.wait();
        }
        // The same applies to containers in another container's PID namespace.
        let is_guest = |running: &RunningContainer| matches!(running.spec.pids, Pids::Of(_));
        let (mut order, hosts): (Vec<_>, Vec<_>) =
            self.containers.iter().partition(|(_, running)| is_guest(running));
        order.extend(hosts);
        for id in order.into_iter().map(|(id, _)| id.clone()).collect::<Vec<_>>() {
            let ended = self.running(&id).and_then(|child| child.wait().ok());
            if let (Some(ended), Some(running)) = (ended, self.containers.get_mut(&id)) {
                running.end(ended, false);
                self.publish_status(&id);
            }
        }
        self.drain();
        if let Some(pause_process) = &self.pause_process {
            let _ = pause_process.child.signal(9);
            let _ = pause_process.child.wait();
        }
        if let Some((host, link)) = &mut self.network {
            let _ = host.delete_link(link);
        }
        if self.is_orphan {
            self.remove_cgroups();
        }
        let _ = std::fs::remove_file(self.directory.join(super::protocol::SOCKET));
    }
}

fn status_answer(id: &str, status: &RunStatus) -> SupervisorResponse {
    SupervisorResponse::Status { container: id.to_owned(), status: status.clone() }
}

/// Assigns the received descriptors to the streams.
fn assign_streams(streams: StreamSet, fds: Vec<OwnedFd>) -> Option<[Option<OwnedFd>; 3]> {
    if fds.len() < streams.count() {
        return None;
    }
    let mut fds = fds.into_iter();
    Some([streams.stdin, streams.stdout, streams.stderr].map(|wanted| if wanted { fds.next() } else { None }))
}

fn pipe() -> io::Result<(OwnedFd, OwnedFd)> {
    Ok(rustix::pipe::pipe_with(rustix::pipe::PipeFlags::CLOEXEC)?)
}
