//! Somebody attached to a container.

use std::fs::File;
use std::os::fd::OwnedFd;
use std::time::{Duration, Instant};

use super::container::{nonblocking_file, write_some};
use super::log::OutputStream;

/// What is kept for a listener that is behind before the container waits for it.
pub const MAX_PENDING_BYTES: usize = 1 << 20;
/// How long one is waited for that takes nothing at all.
pub const WRITE_TIMEOUT: Duration = Duration::from_secs(10);

pub struct Listener {
    pub connection: u64,
    pub stdin: Option<File>,
    /// For stdout and stderr.
    output: [Option<ListenerSink>; 2],
}

/// One of its streams.
struct ListenerSink {
    file: File,
    /// What it has not taken yet.
    pending: Vec<u8>,
    /// When it took something last, or had taken all.
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

    /// Writes what it takes.
    pub fn flush(&mut self, stream: OutputStream) {
        let Some(sink) = &mut self.output[stream as usize] else { return };
        let before = sink.pending.len();
        if !write_some(&mut sink.file, &mut sink.pending) {
            self.output[stream as usize] = None;
        } else if sink.pending.len() < before {
            sink.last_write = Instant::now();
        }
    }

    /// What to wait for until more can be written.
    pub fn pending_file(&self, stream: OutputStream) -> Option<&File> {
        let sink = self.output[stream as usize].as_ref()?;
        (!sink.pending.is_empty()).then_some(&sink.file)
    }

    /// Whether no more is to be kept for it.
    pub fn is_full(&self, stream: OutputStream) -> bool {
        self.output[stream as usize].as_ref().is_some_and(ListenerSink::is_full)
    }

    /// Whether there is anything that it has not taken.
    pub fn has_pending(&self) -> bool {
        self.output.iter().flatten().any(|sink| !sink.pending.is_empty())
    }

    /// Until when it is waited for: none if it is not. `for_all` waits for whatever it has not taken, and not only where
    /// it is too much.
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
