//! A running container as its supervisor sees it: first process, streams and attached listeners.
//!
//! Every listener gets all output. As in containerd, a slow listener slows the container down: once too
//! much is pending for it, the container's output is no longer read, and the container blocks when its
//! pipe is full. A stopped terminal must not block a container forever, so a listener that reads
//! nothing for a while is removed with an error. It finds the rest in the log.

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

/// Bytes read at once.
const READ_BUFFER_BYTES: usize = 8 << 10;
/// Bytes read from one container before other events are handled: some write faster than the log can be
/// written.
const MAX_BYTES_PER_READ: usize = 16 * READ_BUFFER_BYTES;
/// Limit of the output read after the exit. More can be in a pipe only if another process still writes
/// to it.
const MAX_FINAL_OUTPUT_BYTES: usize = 1 << 20;

/// A container that was started.
pub struct RunningContainer {
    pub spec: spec::Container,
    pub status: RunStatus,
    /// `None` after the exit.
    pub child: Option<Child>,
    /// The channel of a start in progress, and the connection that waits for its result.
    pub starting: Option<PendingStart>,
    pub output: [Option<File>; 2],
    /// With a terminal: the pty master, for both directions.
    pub terminal: Option<File>,
    pub stdin: Option<File>,
    /// Input that the container has not read yet.
    pub to_stdin: Vec<u8>,
    /// Close stdin once `to_stdin` is written.
    pub stdin_ends: bool,
    /// The user it was started as.
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
    /// Reads the output that is available. `None` at the end of the stream.
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
                // A pty master returns an error once no process holds the other side.
                Err(_) => return self.close(stream),
            }
        }
        Some(())
    }

    /// Whether its program is not running yet.
    pub fn is_starting(&self) -> bool {
        self.starting.is_some()
    }

    fn is_finished(&self) -> bool {
        self.status.finished != 0
    }

    /// Whether the stream must not be read because a listener is too far behind.
    pub fn is_blocked(&self, stream: OutputStream) -> bool {
        !self.is_finished() && self.listeners.iter().any(|listener| listener.is_full(stream))
    }

    /// When the next listener has to be removed for being too slow. After the exit, all listeners with
    /// pending output have a deadline.
    pub fn deadline(&self) -> Option<Instant> {
        let is_over = self.is_finished();
        self.listeners.iter().filter_map(|listener| listener.write_deadline(is_over)).min()
    }

    /// Removes listeners that are too slow, and after the exit those that have read everything. Returns
    /// their connections, each with whether it has read everything.
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

    /// Reads input from a listener. At its end the listener is removed and its connection returned for
    /// the response. With `stdinOnce` the container's stdin is closed instead, and the listener stays
    /// for further output.
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

    /// Removes listeners whose connection was closed.
    pub fn remove_listeners(&mut self, is_closed: impl Fn(&Listener) -> bool) {
        let had_stdin = self.listeners.iter().any(|listener| listener.stdin.is_some() && is_closed(listener));
        self.listeners.retain(|listener| !is_closed(listener));
        self.end_shared_stdin(had_stdin);
    }

    /// Closes stdin after the first listener with stdin is gone, if no other may follow (`stdinOnce`).
    fn end_shared_stdin(&mut self, had_stdin: bool) {
        if had_stdin && self.is_stdin_once() {
            self.end_stdin();
        }
    }

    /// Whether stdin ends with the first listener. A terminal has no end of file that could be passed
    /// on.
    fn is_stdin_once(&self) -> bool {
        self.spec.stdin_once && !self.spec.tty
    }

    fn end_stdin(&mut self) {
        self.stdin_ends = true;
        self.write_stdin();
    }

    /// Writes pending input as far as the container reads it.
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

    /// Handles the exit of the first process: reads the remaining output and records the final status.
    pub fn end(&mut self, ended: ExitStatus, out_of_memory: bool) {
        // Set before reading: from now on a slow listener does not keep output from being read.
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

    /// Sets the size of the terminal.
    pub fn resize(&self, rows: u16, columns: u16) {
        if let Some(terminal) = &self.terminal {
            resize(terminal, rows, columns);
        }
    }
}

/// Sets the size of a terminal.
pub fn resize(terminal: &File, rows: u16, columns: u16) {
    let size = rustix::termios::Winsize { ws_row: rows, ws_col: columns, ws_xpixel: 0, ws_ypixel: 0 };
    let _ = rustix::termios::tcsetwinsize(terminal, size);
}

/// Writes as much as possible without blocking. Returns whether the file is still writable.
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

/// Makes a descriptor non-blocking.
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
