//! A client attached to a container.

use std::fs::File;
use std::os::fd::OwnedFd;
use std::time::{Duration, Instant};

use super::container::{nonblocking_file, write_some};
use super::log::OutputStream;

/// Pending bytes of a listener at which the container's output is no longer read.
pub const MAX_PENDING_BYTES: usize = 1 << 20;
/// How long a listener with pending bytes may read nothing.
pub const WRITE_TIMEOUT: Duration = Duration::from_secs(10);

pub struct Listener {
    pub connection: u64,
    pub stdin: Option<File>,
    /// For stdout and stderr.
    output: [Option<ListenerSink>; 2],
}

/// An output stream of a listener.
struct ListenerSink {
    file: File,
    /// Bytes that could not be written yet.
    pending: Vec<u8>,
    /// When bytes were written last, or when nothing was pending.
    last_write: Instant,
}

impl Listener {
    pub fn new(
        connection: u64,
        stdin: Option<OwnedFd>,
        output: [Option<OwnedFd>; 2],
    ) -> std::io::Result<Listener> {
        let sink = |fd: Option<OwnedFd>| -> std::io::Result<Option<ListenerSink>> {
            let file = fd.map(nonblocking_file).transpose()?;
            Ok(file.map(|file| ListenerSink { file, pending: Vec::new(), last_write: Instant::now() }))
        };
        let [stdout, stderr] = output;
        let stdin = stdin.map(nonblocking_file).transpose()?;
        Ok(Listener { connection, stdin, output: [sink(stdout)?, sink(stderr)?] })
    }

    pub fn write(&mut self, stream: OutputStream, bytes: &[u8]) {
        let Some(sink) = &mut self.output[stream as usize] else { return };
        if sink.pending.is_empty() {
            sink.last_write = Instant::now();
        }
        sink.pending.extend_from_slice(bytes);
        self.flush(stream);
    }

    /// Writes pending bytes without blocking.
    pub fn flush(&mut self, stream: OutputStream) {
        let Some(sink) = &mut self.output[stream as usize] else { return };
        let before = sink.pending.len();
        if !write_some(&mut sink.file, &mut sink.pending) {
            self.output[stream as usize] = None;
        } else if sink.pending.len() < before {
            sink.last_write = Instant::now();
        }
    }

    /// The file to poll until more can be written, if bytes are pending.
    pub fn pending_file(&self, stream: OutputStream) -> Option<&File> {
        let sink = self.output[stream as usize].as_ref()?;
        (!sink.pending.is_empty()).then_some(&sink.file)
    }

    /// Whether the limit of pending bytes is reached.
    pub fn is_full(&self, stream: OutputStream) -> bool {
        self.output[stream as usize].as_ref().is_some_and(ListenerSink::is_full)
    }

    /// Whether any bytes are pending.
    pub fn has_pending(&self) -> bool {
        self.output.iter().flatten().any(|sink| !sink.pending.is_empty())
    }

    /// The deadline for the next write, if there is one. With `for_all`, any pending bytes have a
    /// deadline, not only a full buffer.
    pub fn write_deadline(&self, for_all: bool) -> Option<Instant> {
        let waits = |sink: &&ListenerSink| sink.is_full() || (for_all && !sink.pending.is_empty());
        self.output.iter().flatten().filter(waits).map(|sink| sink.last_write + WRITE_TIMEOUT).min()
    }
}

impl ListenerSink {
    fn is_full(&self) -> bool {
        self.pending.len() >= MAX_PENDING_BYTES
    }
}
