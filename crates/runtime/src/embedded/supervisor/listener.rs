//! Somebody attached to a container.

use std::fs::File;
use std::os::fd::OwnedFd;
use std::time::{Duration, Instant};

use super::container::{patient, write_some};
use super::log::Stream;

/// What is kept for a listener that is behind before the container waits for it.
pub const FURTHEST_BEHIND: usize = 1 << 20;
/// How long one is waited for that takes nothing at all.
pub const PATIENCE: Duration = Duration::from_secs(10);

pub struct Listener {
    pub connection: u64,
    pub stdin: Option<File>,
    /// For stdout and stderr.
    output: [Option<Ear>; 2],
}

/// One of its streams.
struct Ear {
    file: File,
    /// What it has not taken yet.
    pending: Vec<u8>,
    /// When it took something last, or had taken all.
    moved: Instant,
}

impl Listener {
    pub fn new(
        connection: u64,
        stdin: Option<OwnedFd>,
        output: [Option<OwnedFd>; 2],
    ) -> std::io::Result<Listener> {
        let ear = |fd: Option<OwnedFd>| -> std::io::Result<Option<Ear>> {
            let file = fd.map(patient).transpose()?;
            Ok(file.map(|file| Ear { file, pending: Vec::new(), moved: Instant::now() }))
        };
        let [stdout, stderr] = output;
        let stdin = stdin.map(patient).transpose()?;
        Ok(Listener { connection, stdin, output: [ear(stdout)?, ear(stderr)?] })
    }

    pub fn tell(&mut self, stream: Stream, bytes: &[u8]) {
        let Some(ear) = &mut self.output[stream as usize] else { return };
        if ear.pending.is_empty() {
            ear.moved = Instant::now();
        }
        ear.pending.extend_from_slice(bytes);
        self.flush(stream);
    }

    /// Writes what it takes.
    pub fn flush(&mut self, stream: Stream) {
        let Some(ear) = &mut self.output[stream as usize] else { return };
        let before = ear.pending.len();
        if !write_some(&mut ear.file, &mut ear.pending) {
            self.output[stream as usize] = None;
        } else if ear.pending.len() < before {
            ear.moved = Instant::now();
        }
    }

    /// What to wait for until more can be written.
    pub fn waiting(&self, stream: Stream) -> Option<&File> {
        let ear = self.output[stream as usize].as_ref()?;
        (!ear.pending.is_empty()).then_some(&ear.file)
    }

    /// Whether no more is to be kept for it.
    pub fn is_full(&self, stream: Stream) -> bool {
        self.output[stream as usize].as_ref().is_some_and(Ear::is_full)
    }

    /// Whether there is anything that it has not taken.
    pub fn is_behind(&self) -> bool {
        self.output.iter().flatten().any(|ear| !ear.pending.is_empty())
    }

    /// Until when it is waited for: none if it is not. `for_all` waits for whatever it has not taken, and not only where
    /// it is too much.
    pub fn waited_for(&self, for_all: bool) -> Option<Instant> {
        let waits = |ear: &&Ear| ear.is_full() || (for_all && !ear.pending.is_empty());
        self.output.iter().flatten().filter(waits).map(|ear| ear.moved + PATIENCE).min()
    }
}

impl Ear {
    fn is_full(&self) -> bool {
        self.pending.len() >= FURTHEST_BEHIND
    }
}
