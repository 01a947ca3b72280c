//! What a supervisor waits for, and what that tells it.

use std::io;
use std::os::fd::AsFd;
use std::time::Instant;

use rustix::event::{PollFd, PollFlags, Timespec};

use super::container::RunningContainer;
use super::log::OutputStream;

/// What the kernel has news of.
#[derive(Clone, Debug)]
pub enum PollEvent {
    Caller,
    Connection(u64),
    Starting(String),
    Output(String, OutputStream),
    Stdin(String),
    ListenerIn(String, usize),
    ListenerOut(String, usize, OutputStream),
    Ended(String),
    Command(u64),
    /// Of common processes; it has ended.
    PauseProcess,
    /// SIGTERM has come.
    Terminate,
    /// Something in the pod's directory is gone.
    Removal,
}

/// What to wait for.
#[derive(Default)]
pub struct PollSet<'a> {
    events: Vec<PollEvent>,
    fds: Vec<PollFd<'a>>,
}

impl<'a> PollSet<'a> {
    pub fn add(&mut self, event: PollEvent, fd: &'a impl AsFd, flags: PollFlags) {
        self.events.push(event);
        self.fds.push(PollFd::new(fd, flags));
    }

    pub fn is_empty(&self) -> bool {
        self.fds.is_empty()
    }

    /// Whether there are news before that time; they are still there for [`Watched::wait`].
    pub fn is_ready_before(&mut self, deadline: Instant) -> io::Result<bool> {
        self.poll(Some(deadline)).map(|count| count > 0)
    }

    fn poll(&mut self, deadline: Option<Instant>) -> io::Result<usize> {
        loop {
            let left = deadline.map(|deadline| deadline.saturating_duration_since(Instant::now()));
            let left = left.map(Timespec::try_from).transpose().map_err(io::Error::other)?;
            match rustix::event::poll(&mut self.fds, left.as_ref()) {
                Err(rustix::io::Errno::INTR) => {}
                done => return Ok(done?),
            }
        }
    }

    /// Waits until there are news, or for as long as that; then there may be none.
    pub fn wait(mut self, deadline: Option<Instant>) -> io::Result<Vec<PollEvent>> {
        self.poll(deadline)?;
        let ready = self.events.into_iter().zip(&self.fds).filter(|(_, fd)| !fd.revents().is_empty());
        Ok(ready.map(|(event, _)| event).collect())
    }

    /// Who listens to a container and has not taken all of it.
    pub fn listeners(&mut self, id: &str, running: &'a RunningContainer) {
        for (at, listener) in running.listeners.iter().enumerate() {
            for stream in [OutputStream::Out, OutputStream::Err] {
                if let Some(file) = listener.pending_file(stream) {
                    self.add(PollEvent::ListenerOut(id.to_owned(), at, stream), file, PollFlags::OUT);
                }
            }
        }
    }

    /// Everything of one container that something may come from.
    pub fn container(&mut self, id: &str, running: &'a RunningContainer) {
        self.listeners(id, running);
        let id = || id.to_owned();
        let has_input = !running.to_stdin.is_empty();
        if let Some(starting) = &running.starting {
            self.add(PollEvent::Starting(id()), &starting.channel, PollFlags::IN);
        }
        // What somebody is too far behind with is not heard for now.
        let is_readable = |stream: OutputStream| !running.is_blocked(stream);
        if let Some(terminal) = running.terminal.as_ref().filter(|_| is_readable(OutputStream::Out)) {
            self.add(PollEvent::Output(id(), OutputStream::Out), terminal, PollFlags::IN);
        }
        if let Some(stdin) = running.terminal.as_ref().or(running.stdin.as_ref()).filter(|_| has_input) {
            self.add(PollEvent::Stdin(id()), stdin, PollFlags::OUT);
        }
        for stream in [OutputStream::Out, OutputStream::Err] {
            if let Some(output) = running.output[stream as usize].as_ref().filter(|_| is_readable(stream)) {
                self.add(PollEvent::Output(id(), stream), output, PollFlags::IN);
            }
        }
        for (at, listener) in running.listeners.iter().enumerate() {
            // One that types faster than the container reads has to wait.
            if let Some(stdin) = listener.stdin.as_ref().filter(|_| !has_input) {
                self.add(PollEvent::ListenerIn(id(), at), stdin, PollFlags::IN);
            }
        }
        if let Some(child) = &running.child {
            self.add(PollEvent::Ended(id()), child, PollFlags::IN);
        }
    }
}
