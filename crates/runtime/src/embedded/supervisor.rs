//! The process that a pod lives in: `skiff supervise DIRECTORY`.
//!
//! It holds what the pod's containers share (network, IPC and host name; no container is needed for that), starts them,
//! writes their logs, takes down how they end, and answers skiff on a socket. It outlives skiff, and a later skiff finds
//! it by that socket. It has one thread and never waits for anybody but the kernel's poll. Read [`supervise`], then
//! [`Supervisor::serve`].

mod connection;
mod container;
mod hooks;
pub mod identity;
mod launch;
mod layers;
mod listener;
mod log;
mod news;
mod orphan;
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
use sys::memory::Program;
use sys::process::Child;
use sys::removal::Removals;

use super::protocol::{Answer, Request, Status, Streams};
use super::record;
use super::spec::Pids;
use connection::Connection;
use container::{Running, Starting, nanoseconds, patient};
use identity::Identity;
use listener::Listener;
use log::Log;
use news::{News, Watched};
use spawn::{Keeper, Outcome, Stdio, Surroundings};
use users::Users;

pub use setup::supervise;

/// How long nothing happens before it is taken for rest: what is needed for one thing is mostly needed for the next.
const QUIET: Duration = Duration::from_millis(100);
/// How long a pod that ends waits for those who listen to it.
const LAST_MOMENT: Duration = Duration::from_secs(2);

/// Why a container or a command could not be started, in words for its user.
#[derive(Debug)]
struct Failure(String);

impl Failure {
    fn during<E: Into<io::Error>>(doing: impl std::fmt::Display) -> impl FnOnce(E) -> Failure {
        move |error| Failure(format!("cannot {doing}: {}", launch::plain(&error.into())))
    }
}

/// A pod.
struct Supervisor {
    directory: PathBuf,
    cgroups: Cgroups,
    /// The host's mount namespace.
    host: OwnedFd,
    /// Its network and the other namespaces that pods have of their own.
    outside: Vec<OwnedFd>,
    /// Of a pod whose users are others outside.
    users: Option<Users>,
    /// Of a pod whose containers share their processes.
    keeper: Option<Keeper>,
    /// The link to take away in the end, and where it is.
    network: Option<(sys::netlink::Netlink, String)>,
    /// What its containers have as `/dev/shm`.
    shm: PathBuf,
    listener: UnixListener,
    connections: Vec<Connection>,
    containers: BTreeMap<String, Running>,
    commands: Vec<Command>,
    /// What is taken away of the pod's directory.
    removals: Option<Removals>,
    next: u64,
    stops: bool,
    /// Readable once SIGTERM has come.
    sigterm: Option<OwnedFd>,
    /// When the pod is killed that was asked to end.
    terminates_at: Option<Instant>,
    /// The pod's directory was removed: nobody knows of it any more.
    is_orphan: bool,
    /// Of which nothing is needed while nothing happens.
    program: Program,
}

/// A command that runs in a container.
struct Command {
    connection: u64,
    child: Child,
    /// Open until its program runs.
    channel: Option<UnixStream>,
    outcome: Outcome,
}

impl Supervisor {
    /// Answers until told to stop.
    fn serve(&mut self) -> io::Result<()> {
        let mut whole_until = Some(Instant::now() + QUIET);
        while !self.stops {
            for news in self.wait(&mut whole_until)? {
                // What streams need is little, and they may go on for long.
                let is_of_streams = matches!(
                    news,
                    News::Output(..) | News::Stdin(_) | News::ListenerIn(..) | News::ListenerOut(..)
                );
                if !is_of_streams {
                    whole_until = Some(Instant::now() + QUIET);
                }
                self.act(news);
            }
            self.part();
            self.tidy();
            self.stops |= self.is_terminated();
        }
        self.shut_down();
        Ok(())
    }

    /// Waits for news. When it is time for that, this process lets go of its program.
    fn wait(&self, whole_until: &mut Option<Instant>) -> io::Result<Vec<News>> {
        let mut watched = Watched::default();
        watched.add(News::Caller, &self.listener, PollFlags::IN);
        if let Some(removals) = &self.removals {
            watched.add(News::Removal, removals, PollFlags::IN);
        }
        // Once is enough.
        if let Some(sigterm) = self.sigterm.as_ref().filter(|_| self.terminates_at.is_none()) {
            watched.add(News::Terminate, sigterm, PollFlags::IN);
        }
        if let Some(keeper) = &self.keeper {
            watched.add(News::Keeper, &keeper.child, PollFlags::IN);
        }
        for connection in &self.connections {
            let flags = if connection.has_more() { PollFlags::IN | PollFlags::OUT } else { PollFlags::IN };
            watched.add(News::Connection(connection.id), &connection.stream, flags);
        }
        for (id, running) in &self.containers {
            watched.container(id, running);
        }
        for command in &self.commands {
            if let Some(channel) = &command.channel {
                watched.add(News::Command(command.connection), channel, PollFlags::IN);
            }
            watched.add(News::Command(command.connection), &command.child, PollFlags::IN);
        }
        let deadline = self.containers.values().filter_map(Running::deadline).chain(self.terminates_at).min();
        let is_at_rest = self.commands.is_empty() && !self.containers.values().any(Running::is_starting);
        if let Some(until) = whole_until.filter(|_| is_at_rest) {
            let comes_first = deadline.is_some_and(|deadline| deadline <= until);
            if Instant::now() < until && (comes_first || watched.come_by(until)?) {
                return watched.wait(deadline);
            }
            *whole_until = None;
            // Last of all: what is used after that comes back, and stays.
            self.program.let_go();
        }
        watched.wait(deadline)
    }

    fn act(&mut self, news: News) {
        match news {
            News::Caller => self.accept(),
            News::Connection(id) => self.hear(id),
            News::Starting(id) => self.started(&id),
            News::Output(id, stream) => {
                if let Some(running) = self.containers.get_mut(&id) {
                    running.hear(stream);
                }
            }
            News::Stdin(id) => {
                if let Some(running) = self.containers.get_mut(&id) {
                    running.feed();
                }
            }
            News::ListenerIn(id, at) => {
                let running = self.containers.get_mut(&id);
                if let Some(left) = running.and_then(|running| running.hear_listener(at)) {
                    self.say(left, &Answer::Done, true);
                }
            }
            News::ListenerOut(id, at, stream) => {
                let running = self.containers.get_mut(&id);
                if let Some(listener) = running.and_then(|running| running.listeners.get_mut(at)) {
                    listener.flush(stream);
                }
            }
            News::Ended(id) => self.ended(&id),
            News::Command(connection) => self.command(connection),
            // No container can be started among its processes any more: the pod has to be made anew.
            News::Keeper => self.stops = true,
            News::Terminate => self.terminate(),
            News::Removal => {
                self.removals.iter().for_each(Removals::heard);
                self.look_around();
            }
        }
    }

    fn accept(&mut self) {
        if let Ok((stream, _)) = self.listener.accept() {
            self.next += 1;
            self.connections.extend(Connection::new(self.next, stream));
        }
    }

    fn hear(&mut self, id: u64) {
        let Some(connection) = self.connections.iter_mut().find(|connection| connection.id == id) else {
            return;
        };
        connection.flush();
        for (request, fds) in connection.requests() {
            self.answer(id, request, fds);
        }
    }

    fn say(&mut self, id: u64, answer: &Answer, is_last: bool) {
        if let Some(connection) = self.connections.iter_mut().find(|connection| connection.id == id) {
            connection.say(answer);
            connection.ends |= is_last;
        }
    }

    fn answer(&mut self, id: u64, request: Request, fds: Vec<OwnedFd>) {
        let done = match request {
            Request::Watch => return self.watch(id),
            Request::Start { container } => match self.start(id, &container) {
                // The answer comes when its program runs.
                Ok(()) => return,
                Err(Failure(message)) => Err(message),
            },
            Request::Exec { container, command, tty, streams } => {
                match self.exec(id, &container, &command, tty, streams, fds) {
                    Ok(()) => return,
                    Err(Failure(message)) => Err(message),
                }
            }
            Request::Attach { container, streams } => match self.attach(id, &container, streams, fds) {
                Ok(()) => return,
                Err(error) => Err(error.to_string()),
            },
            Request::Signal { container, signal } => {
                let child = self.containers.get(&container).and_then(|running| running.child.as_ref());
                child.map_or(Ok(()), |child| child.signal(signal)).map_err(|error| error.to_string())
            }
            Request::Resize { container, rows, columns } => {
                if let Some(running) = self.containers.get(&container) {
                    running.resize(rows, columns);
                }
                // Sent by those who are attached, whose connection goes on.
                return;
            }
            Request::Socket { ipv6 } => return self.socket(id, ipv6),
            Request::Reopen { container } => {
                let running = self.containers.get_mut(&container);
                running.map_or(Ok(()), |running| running.log.reopen()).map_err(|error| error.to_string())
            }
            Request::Forget { container } => {
                let is_over = self.containers.get(&container).is_none_or(|running| running.child.is_none());
                if is_over && let Some(running) = self.containers.remove(&container) {
                    for listener in running.listeners {
                        self.say(listener.connection, &Answer::Done, true);
                    }
                }
                is_over.then_some(()).ok_or_else(|| "the container still runs".to_owned())
            }
            Request::Set { pod } => setup::set(&pod, self.users.as_ref()).map_err(|Failure(message)| message),
            Request::Stop => {
                self.stops = true;
                Ok(())
            }
        };
        let answer = done.map_or_else(|message| Answer::Failed { message }, |()| Answer::Done);
        self.say(id, &answer, true);
    }

    fn watch(&mut self, id: u64) {
        let known: Vec<Answer> =
            self.containers.iter().map(|(id, running)| told(id, &running.status)).collect();
        if let Some(connection) = self.connections.iter_mut().find(|connection| connection.id == id) {
            connection.watches = true;
            known.iter().for_each(|answer| connection.say(answer));
            connection.say(&Answer::Known);
        }
    }

    fn announce(&mut self, id: &str) {
        let Some(running) = self.containers.get(id) else { return };
        let answer = told(id, &running.status);
        // Also where a skiff finds it that comes when this process is gone.
        if !self.is_orphan {
            let _ = record::add_status(&self.directory.join(id), &running.status);
        }
        for connection in self.connections.iter_mut().filter(|connection| connection.watches) {
            connection.say(&answer);
        }
    }

    fn around(&self) -> Surroundings<'_> {
        Surroundings {
            directory: &self.directory,
            cgroups: &self.cgroups,
            shm: &self.shm,
            host: self.host.as_fd(),
            outside: &self.outside,
            users: self.users.as_ref(),
        }
    }

    fn start(&mut self, connection: u64, id: &str) -> Result<(), Failure> {
        if self.containers.contains_key(id) {
            return Err(Failure("the container was started before".to_owned()));
        }
        let spec = setup::read_container(&self.directory, id)?;
        fn failed<E: Into<io::Error>>(error: E) -> Failure {
            Failure::during("make the container's streams")(error)
        }
        let null = setup::null().map_err(failed)?;
        let (out, err) = (pipe().map_err(failed)?, pipe().map_err(failed)?);
        let stdin = if spec.stdin && !spec.tty { Some(pipe().map_err(failed)?) } else { None };
        let log = Log::open(spec.log.as_deref()).map_err(Failure::during("open the container's log"))?;
        let stdio = Stdio {
            stdin: stdin.as_ref().map_or(null.as_fd(), |(read, _)| read.as_fd()),
            stdout: out.1.as_fd(),
            stderr: err.1.as_fd(),
        };
        let pids = self.pids(&spec.pids)?;
        let pids = pids.as_ref().map(|file| file.as_fd());
        let spawned = spawn::container(&self.around(), id, &spec, pids, &stdio)?;
        let status = Status { pid: spawned.child.pid(), ..Status::default() };
        let (outcome, channel) = (Outcome::default(), spawned.channel);
        let tty = spec.tty;
        let ours = |pipe: (OwnedFd, OwnedFd)| if tty { Ok(None) } else { patient(pipe.0).map(Some) };
        let running = Running {
            output: [ours(out).map_err(failed)?, ours(err).map_err(failed)?],
            stdin: stdin.map(|(_, write)| patient(write)).transpose().map_err(failed)?,
            spec,
            status,
            child: Some(spawned.child),
            starting: Some(Starting { channel, outcome, connection }),
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

    /// The process namespace to begin in.
    fn pids(&self, pids: &Pids) -> Result<Option<File>, Failure> {
        let pid = match pids {
            Pids::Own | Pids::Host => return Ok(None),
            Pids::Pod => self.keeper.as_ref().map(|keeper| keeper.child.pid()),
            Pids::Of(id) => self.running(id).map(Child::pid),
        };
        let pid = pid.ok_or_else(|| Failure("whose processes it is to see does not run".to_owned()))?;
        let path = format!("/proc/{pid}/ns/pid");
        File::open(&path).map(Some).map_err(Failure::during(format!("open {path}")))
    }

    fn running(&self, id: &str) -> Option<&Child> {
        self.containers.get(id).and_then(|running| running.child.as_ref())
    }

    fn started(&mut self, id: &str) {
        let Some(running) = self.containers.get_mut(id) else { return };
        let Some(starting) = &mut running.starting else { return };
        if spawn::listen(&starting.channel, &mut starting.outcome).is_none() {
            return;
        }
        let connection = starting.connection;
        let outcome = std::mem::take(&mut starting.outcome);
        running.starting = None;
        if let Some(terminal) = outcome.terminal {
            running.terminal = patient(terminal).ok();
        }
        running.identity = outcome.identity;
        let answer = match outcome.failure {
            Some(message) => {
                running.status.failure = Some(message.clone());
                Answer::Failed { message }
            }
            None => {
                running.status.started = nanoseconds(Timestamp::now());
                running.status.user = running.identity.as_ref().map(Identity::user);
                Answer::Done
            }
        };
        self.announce(id);
        self.say(connection, &answer, true);
    }

    fn ended(&mut self, id: &str) {
        let ended = self.running(id).and_then(|child| child.try_wait().ok().flatten());
        let Some(ended) = ended else { return };
        // The news of its start, or why there was none, come first.
        self.started(id);
        let Some(running) = self.containers.get_mut(id) else { return };
        let out_of_memory = self.cgroups.oom_kills(&running.spec.cgroup) > 0;
        running.end(ended, out_of_memory);
        // What else is in there, such as commands, ends with it; nothing else does that where processes are shared.
        let _ = self.cgroups.kill(&running.spec.cgroup);
        // The group stays until the container is removed. In the first version of cgroups its quota would keep the pod's
        // from being lowered below it.
        let no_quota = Limits { cpu_quota: -1, ..Limits::default() };
        let _ = self.cgroups.limit(&running.spec.cgroup, &no_quota);
        self.look_around();
        self.announce(id);
    }

    fn exec(
        &mut self,
        connection: u64,
        id: &str,
        command: &[String],
        tty: bool,
        streams: Streams,
        fds: Vec<OwnedFd>,
    ) -> Result<(), Failure> {
        let running = self.containers.get(id).filter(|running| running.starting.is_none());
        let first = running.and_then(|running| running.child.as_ref());
        let (Some(running), Some(first)) = (running, first) else {
            return Err(Failure("the container does not run".to_owned()));
        };
        let null = setup::null().map_err(Failure::during("open /dev/null"))?;
        let [stdin, stdout, stderr] =
            named(streams, fds).ok_or_else(|| Failure("streams are missing".to_owned()))?;
        let stdio = Stdio {
            stdin: stdin.as_ref().unwrap_or(&null).as_fd(),
            stdout: stdout.as_ref().unwrap_or(&null).as_fd(),
            stderr: stderr.as_ref().unwrap_or(&null).as_fd(),
        };
        let path = format!("/proc/{}/ns/pid", first.pid());
        let pids = File::open(&path).map_err(Failure::during(format!("open {path}")))?;
        let pids = Some(pids.as_fd()).filter(|_| running.spec.pids != Pids::Host);
        let identity = running.identity.as_ref();
        let what = spawn::Command { args: command, tty, identity, hooks: None };
        let spawned = spawn::command(&self.around(), &running.spec, &what, first, pids, &stdio)?;
        let (child, channel, outcome) = (spawned.child, Some(spawned.channel), Outcome::default());
        self.commands.push(Command { connection, child, channel, outcome });
        Ok(())
    }

    /// A command has started, failed to, or ended.
    fn command(&mut self, id: u64) {
        let Some(at) = self.commands.iter().position(|command| command.connection == id) else { return };
        let command = &mut self.commands[at];
        if let Some(channel) = &command.channel {
            if spawn::listen(channel, &mut command.outcome).is_none() {
                return;
            }
            command.channel = None;
            let outcome = std::mem::take(&mut command.outcome);
            let connection = self.connections.iter_mut().find(|connection| connection.id == id);
            if let Some(connection) = connection {
                match (outcome.failure, outcome.terminal) {
                    (Some(message), _) => {
                        connection.say(&Answer::Failed { message });
                        connection.ends = true;
                    }
                    (None, Some(terminal)) => connection.say_with(&Answer::Done, terminal.as_fd()),
                    (None, None) => connection.say(&Answer::Done),
                }
            }
        }
        let command = &self.commands[at];
        if let Ok(Some(ended)) = command.child.try_wait() {
            self.commands.remove(at);
            self.say(id, &Answer::Exited { code: ended.code() }, true);
        }
    }

    fn attach(&mut self, connection: u64, id: &str, streams: Streams, fds: Vec<OwnedFd>) -> io::Result<()> {
        let running = self.containers.get_mut(id).filter(|running| running.child.is_some());
        let running = running.ok_or_else(|| io::Error::other("the container does not run"))?;
        let [stdin, stdout, stderr] =
            named(streams, fds).ok_or_else(|| io::Error::other("streams are missing"))?;
        running.listeners.push(Listener::new(connection, stdin, [stdout, stderr])?);
        Ok(())
    }

    fn socket(&mut self, id: u64, ipv6: bool) {
        let family = if ipv6 { AddressFamily::INET6 } else { AddressFamily::INET };
        let flags = SocketFlags::CLOEXEC | SocketFlags::NONBLOCK;
        let made = rustix::net::socket_with(family, SocketType::STREAM, flags, None);
        let Some(connection) = self.connections.iter_mut().find(|connection| connection.id == id) else {
            return;
        };
        match made {
            Ok(socket) => connection.say_with(&Answer::Done, socket.as_fd()),
            Err(error) => connection.say(&Answer::Failed { message: error.to_string() }),
        }
        connection.ends = true;
    }

    /// Lets go of listeners whom nobody waits for any more.
    fn part(&mut self) {
        let now = Instant::now();
        let parted: Vec<_> = self.containers.values_mut().flat_map(|running| running.part(now)).collect();
        for (connection, has_heard_all) in parted {
            let why = || format!("nothing was read for {} seconds", listener::PATIENCE.as_secs());
            let late = || Answer::Failed { message: format!("{}: the container goes on without", why()) };
            self.say(connection, &if has_heard_all { Answer::Done } else { late() }, true);
        }
    }

    /// Gives listeners a moment for the last words of what has ended.
    fn drain(&mut self) {
        let end = Instant::now() + LAST_MOMENT;
        while Instant::now() < end {
            self.part();
            let mut watched = Watched::default();
            self.containers.iter().for_each(|(id, running)| watched.listeners(id, running));
            if watched.is_empty() {
                return;
            }
            for news in watched.wait(Some(end)).unwrap_or_default() {
                self.act(news);
            }
        }
    }

    /// Lets go of those who are gone, and of what they wanted.
    fn tidy(&mut self) {
        let gone: Vec<u64> = self
            .connections
            .iter()
            .filter(|connection| connection.is_over())
            .map(|connection| connection.id)
            .collect();
        if gone.is_empty() {
            return;
        }
        self.connections.retain(|connection| !gone.contains(&connection.id));
        for command in self.commands.iter().filter(|command| gone.contains(&command.connection)) {
            let _ = command.child.signal(9);
        }
        for running in self.containers.values_mut() {
            running.leave(|listener| gone.contains(&listener.connection));
        }
    }

    fn shut_down(&mut self) {
        for running in self.containers.values() {
            if let Some(child) = &running.child {
                let _ = child.signal(9);
            }
        }
        // These first: the kernel does not let go of a container's first process as long as there are others that nobody
        // has asked for their end, and these are asked by nobody else.
        for command in self.commands.drain(..) {
            let _ = command.child.signal(9);
            let _ = command.child.wait();
        }
        // So are containers among another one's processes.
        let is_guest = |running: &Running| matches!(running.spec.pids, Pids::Of(_));
        let (mut order, hosts): (Vec<_>, Vec<_>) =
            self.containers.iter().partition(|(_, running)| is_guest(running));
        order.extend(hosts);
        for id in order.into_iter().map(|(id, _)| id.clone()).collect::<Vec<_>>() {
            let ended = self.running(&id).and_then(|child| child.wait().ok());
            if let (Some(ended), Some(running)) = (ended, self.containers.get_mut(&id)) {
                running.end(ended, false);
                self.announce(&id);
            }
        }
        self.drain();
        if let Some(keeper) = &self.keeper {
            let _ = keeper.child.signal(9);
            let _ = keeper.child.wait();
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

fn told(id: &str, status: &Status) -> Answer {
    Answer::Status { container: id.to_owned(), status: status.clone() }
}

/// The descriptors that came along, each where it belongs.
fn named(streams: Streams, fds: Vec<OwnedFd>) -> Option<[Option<OwnedFd>; 3]> {
    if fds.len() < streams.count() {
        return None;
    }
    let mut fds = fds.into_iter();
    Some([streams.stdin, streams.stdout, streams.stderr].map(|wanted| if wanted { fds.next() } else { None }))
}

fn pipe() -> io::Result<(OwnedFd, OwnedFd)> {
    Ok(rustix::pipe::pipe_with(rustix::pipe::PipeFlags::CLOEXEC)?)
}
