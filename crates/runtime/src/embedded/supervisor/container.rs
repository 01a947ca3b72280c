//! A container that runs, as its supervisor sees it: its first process, its streams, who listens to them.
//!
//! Whoever is attached hears all that is said. One that is slow is waited for, as by containerd: little is kept for it, and
//! once that is much the container is no longer heard, so that it waits in turn when its pipe is full. But nobody's
//! terminal that stands still may stop a container for good: a listener that takes nothing for a while is sent away, and
//! told so. It finds the rest in the log.

use std::fs::File;
use std::io::{self, Read as _, Write as _};
use std::os::fd::OwnedFd;
use std::time::Instant;

use jiff::Timestamp;
use sys::process::{Child, ExitStatus};

use super::identity::Identity;
use super::listener::Listener;
use super::log::{Log, OutputStream};
use super::spawn::SpawnResult;
use crate::embedded::protocol::RunStatus;
use crate::embedded::spec;

/// What is read at once.
const READ_BUFFER_BYTES: usize = 8 << 10;
/// What is heard of a container before others have their turn: some speak faster than can be written down.
const MAX_BYTES_PER_READ: usize = 16 * READ_BUFFER_BYTES;
/// What is heard of one that has ended. More is only in a pipe where somebody else still writes to it.
const MAX_FINAL_OUTPUT_BYTES: usize = 1 << 20;

/// One run.
pub struct RunningContainer {
    pub spec: spec::Container,
    pub status: RunStatus,
    /// None once it has ended.
    pub child: Option<Child>,
    /// Open until its program runs, with who wants to know.
    pub starting: Option<PendingStart>,
    pub output: [Option<File>; 2],
    /// With a terminal: its near end, for both directions.
    pub terminal: Option<File>,
    pub stdin: Option<File>,
    /// What the container has not read yet.
    pub to_stdin: Vec<u8>,
    /// Closes its stdin once all is written.
    pub stdin_ends: bool,
    /// Who it runs as, once it does.
    pub identity: Option<Identity>,
    pub log: Log,
    pub listeners: Vec<Listener>,
}

pub struct PendingStart {
    pub channel: std::os::unix::net::UnixStream,
    pub spawn_result: SpawnResult,
    pub connection: u64,
}

impl RunningContainer {
    /// Reads what the container says at the moment. `None` when the stream is at its end.
    pub fn read_output(&mut self, stream: OutputStream) -> Option<()> {
        self.read_output_up_to(stream, MAX_BYTES_PER_READ)
    }

    fn read_output_up_to(&mut self, stream: OutputStream, most: usize) -> Option<()> {
        let (mut buffer, mut total) = ([0; READ_BUFFER_BYTES], 0);
        while total < most && !self.is_blocked(stream) {
            let source = match stream {
                OutputStream::Out if self.terminal.is_some() => self.terminal.as_mut(),
                _ => self.output[stream as usize].as_mut(),
            };
            match source?.read(&mut buffer) {
                Ok(0) => return self.close(stream),
                Ok(count) => {
                    total += count;
                    self.log.write(stream, &buffer[..count], Timestamp::now());
                    for listener in &mut self.listeners {
                        listener.write(stream, &buffer[..count]);
                    }
                }
                Err(error) if error.kind() == io::ErrorKind::WouldBlock => return Some(()),
                Err(error) if error.kind() == io::ErrorKind::Interrupted => {}
                // A terminal whose far end nobody holds answers with an error.
                Err(_) => return self.close(stream),
            }
        }
        Some(())
    }

    /// Whether its program is about to be run.
    pub fn is_starting(&self) -> bool {
        self.starting.is_some()
    }

    fn is_finished(&self) -> bool {
        self.status.finished != 0
    }

    /// Whether somebody is so far behind that it has to be waited for.
    pub fn is_blocked(&self, stream: OutputStream) -> bool {
        !self.is_finished() && self.listeners.iter().any(|listener| listener.is_full(stream))
    }

    /// When it will have been waited for somebody for long enough. Once the container is over all are waited for.
    pub fn deadline(&self) -> Option<Instant> {
        let is_over = self.is_finished();
        self.listeners.iter().filter_map(|listener| listener.write_deadline(is_over)).min()
    }

    /// Lets go of those whom nobody waits for any more: who took nothing for too long, and who have heard all of a
    /// container that is over. Answers their connections, each with whether it heard all.
    pub fn take_finished_listeners(&mut self, now: Instant) -> Vec<(u64, bool)> {
        let is_over = self.is_finished();
        let (mut finished, mut had_stdin) = (Vec::new(), false);
        self.listeners.retain(|listener| {
            let is_late = listener.write_deadline(is_over).is_some_and(|deadline| deadline <= now);
            let is_done = is_over && !listener.has_pending();
            if is_late || is_done {
                finished.push((listener.connection, is_done));
                had_stdin |= listener.stdin.is_some();
            }
            !is_late && !is_done
        });
        self.end_shared_stdin(had_stdin);
        finished
    }

    fn close(&mut self, stream: OutputStream) -> Option<()> {
        match stream {
            OutputStream::Out if self.terminal.is_some() => self.terminal = None,
            _ => self.output[stream as usize] = None,
        }
        None
    }

    /// Passes on what one of the listeners types. One who has typed all there is leaves, and its connection is
    /// answered; unless the container hears of that end, too, and may have more to say because of it.
    pub fn read_listener_input(&mut self, at: usize) -> Option<u64> {
        let mut buffer = [0; READ_BUFFER_BYTES];
        match self.listeners.get_mut(at)?.stdin.as_mut()?.read(&mut buffer) {
            Ok(count) if count > 0 => {
                self.to_stdin.extend_from_slice(&buffer[..count]);
                self.write_stdin();
                None
            }
            Err(error) if error.kind() == io::ErrorKind::WouldBlock => None,
            _ if self.is_stdin_once() => {
                self.listeners[at].stdin = None;
                self.end_stdin();
                None
            }
            _ => Some(self.listeners.remove(at).connection),
        }
    }

    /// Lets listeners go who have hung up.
    pub fn remove_listeners(&mut self, is_closed: impl Fn(&Listener) -> bool) {
        let had_stdin = self.listeners.iter().any(|listener| listener.stdin.is_some() && is_closed(listener));
        self.listeners.retain(|listener| !is_closed(listener));
        self.end_shared_stdin(had_stdin);
    }

    /// One who typed is gone: the container waits for nobody else where it was for that one.
    fn end_shared_stdin(&mut self, had_stdin: bool) {
        if had_stdin && self.is_stdin_once() {
            self.end_stdin();
        }
    }

    /// Whether the first who types is the only one. A terminal has no end that could be passed on.
    fn is_stdin_once(&self) -> bool {
        self.spec.stdin_once && !self.spec.tty
    }

    fn end_stdin(&mut self) {
        self.stdin_ends = true;
        self.write_stdin();
    }

    /// Writes to the container what it takes.
    pub fn write_stdin(&mut self) {
        let target = if self.terminal.is_some() { self.terminal.as_mut() } else { self.stdin.as_mut() };
        let Some(target) = target else { return self.to_stdin.clear() };
        if !write_some(target, &mut self.to_stdin) {
            self.stdin = None;
            self.to_stdin.clear();
        }
        if self.stdin_ends && self.to_stdin.is_empty() {
            self.stdin = None;
        }
    }

    /// The first process has ended: takes down what is left to hear, and how it was.
    pub fn end(&mut self, ended: ExitStatus, out_of_memory: bool) {
        // From now on nobody is waited for before it is heard.
        self.status.finished = nanoseconds(Timestamp::now());
        for stream in [OutputStream::Out, OutputStream::Err] {
            self.read_output_up_to(stream, MAX_FINAL_OUTPUT_BYTES);
        }
        let now = Timestamp::now();
        self.log.finish(now);
        self.child = None;
        self.output = [None, None];
        self.terminal = None;
        self.stdin = None;
        self.status.finished = nanoseconds(now);
        self.status.exit_code = ended.code();
        self.status.out_of_memory = out_of_memory;
        self.status.pid = 0;
    }

    /// How large the terminal is.
    pub fn resize(&self, rows: u16, columns: u16) {
        if let Some(terminal) = &self.terminal {
            resize(terminal, rows, columns);
        }
    }
}

/// Says how large a terminal is.
pub fn resize(terminal: &File, rows: u16, columns: u16) {
    let size = rustix::termios::Winsize { ws_row: rows, ws_col: columns, ws_xpixel: 0, ws_ypixel: 0 };
    let _ = rustix::termios::tcsetwinsize(terminal, size);
}

/// Writes as much as is taken at the moment; answers whether more may come.
pub fn write_some(file: &mut File, pending: &mut Vec<u8>) -> bool {
    while !pending.is_empty() {
        match file.write(pending) {
            Ok(0) => return false,
            Ok(count) => drop(pending.drain(..count)),
            Err(error) if error.kind() == io::ErrorKind::WouldBlock => return true,
            Err(error) if error.kind() == io::ErrorKind::Interrupted => {}
            Err(_) => return false,
        }
    }
    true
}

/// A descriptor that never keeps the supervisor waiting.
pub fn nonblocking_file(fd: OwnedFd) -> io::Result<File> {
    let flags = rustix::fs::fcntl_getfl(&fd)?;
    rustix::fs::fcntl_setfl(&fd, flags | rustix::fs::OFlags::NONBLOCK)?;
    Ok(File::from(fd))
}

pub fn nanoseconds(time: Timestamp) -> i64 {
    i64::try_from(time.as_nanosecond()).unwrap_or(i64::MAX)
}

#[cfg(test)]
mod tests;
