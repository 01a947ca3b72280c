//! The descriptors that a supervisor polls, and the events they stand for.

use std::io;
use std::os::fd::AsFd;
use std::time::Instant;

use rustix::event::{PollFd, PollFlags, Timespec};

use super::container::RunningContainer;
use super::log::OutputStream;

/// A descriptor is ready.
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
    /// The pause process has exited.
    PauseProcess,
    /// SIGTERM was received.
    Terminate,
    /// Something in the pod's directory was deleted.
    Removal,
}

/// The descriptors to poll, each with its event.
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

    /// Polls until the deadline and returns whether a descriptor is ready. A following
    /// [`PollSet::wait`] then returns the event at once.
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

    /// Polls until a descriptor is ready or the deadline is reached; then the result is empty.
    pub fn wait(mut self, deadline: Option<Instant>) -> io::Result<Vec<PollEvent>> {
        self.poll(deadline)?;
        let ready = self.events.into_iter().zip(&self.fds).filter(|(_, fd)| !fd.revents().is_empty());
        Ok(ready.map(|(event, _)| event).collect())
    }

    /// Adds the listeners of a container that have pending output.
    pub fn listeners(&mut self, id: &str, running: &'a RunningContainer) {
        for (at, listener) in running.listeners.iter().enumerate() {
            for stream in [OutputStream::Out, OutputStream::Err] {
                if let Some(file) = listener.pending_file(stream) {
                    self.add(PollEvent::ListenerOut(id.to_owned(), at, stream), file, PollFlags::OUT);
                }
            }
        }
    }

    /// Adds all descriptors of a container.
    pub fn container(&mut self, id: &str, running: &'a RunningContainer) {
        self.listeners(id, running);
        let id = || id.to_owned();
        let has_input = !running.to_stdin.is_empty();
        if let Some(starting) = &running.starting {
            self.add(PollEvent::Starting(id()), &starting.channel, PollFlags::IN);
        }
        // A stream is not read while a listener is too far behind.
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
            // Input is not read while the container has not read the previous input.
            if let Some(stdin) = listener.stdin.as_ref().filter(|_| !has_input) {
                self.add(PollEvent::ListenerIn(id(), at), stdin, PollFlags::IN);
            }
        }
        if let Some(child) = &running.child {
            self.add(PollEvent::Ended(id()), child, PollFlags::IN);
        }
    }
}
