//! A container's log in CRI format: timestamp, stream, tag (`F` for full, `P` for partial lines), text.

use std::fs::{File, OpenOptions};
use std::io::{self, Write as _};
use std::path::{Path, PathBuf};

/// Longer lines are split into partial lines.
const MAX_LINE_BYTES: usize = 16 << 10;

/// The log of a container.
pub struct Log {
    path: PathBuf,
    file: Option<File>,
    /// The incomplete lines of stdout and stderr.
    pending: [Vec<u8>; 2],
}

/// An output stream of a container.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum OutputStream {
    Out = 0,
    Err = 1,
}

impl Log {
    /// Without a path, output is discarded.
    pub fn open(path: Option<&Path>) -> io::Result<Log> {
        let file = path.map(open).transpose()?;
        let path = path.map(Path::to_owned).unwrap_or_default();
        Ok(Log { path, file, pending: Default::default() })
    }

    /// Opens a new file after the old one was renamed by log rotation.
    pub fn reopen(&mut self) -> io::Result<()> {
        if self.file.is_some() {
            self.file = Some(open(&self.path)?);
        }
        Ok(())
    }

    pub fn write(&mut self, stream: OutputStream, bytes: &[u8], now: jiff::Timestamp) {
        let Some(file) = &mut self.file else { return };
        let pending = &mut self.pending[stream as usize];
        let mut text = Vec::new();
        for chunk in bytes.split_inclusive(|byte| *byte == b'\n') {
            pending.extend_from_slice(chunk);
            while pending.len() > MAX_LINE_BYTES + 1
                || (pending.len() > MAX_LINE_BYTES && pending.last() != Some(&b'\n'))
            {
                let rest = pending.split_off(MAX_LINE_BYTES);
                write_entry(&mut text, stream, false, pending, now);
                *pending = rest;
            }
            if pending.last() == Some(&b'\n') {
                pending.pop();
                write_entry(&mut text, stream, true, pending, now);
                pending.clear();
            }
        }
        // Errors are ignored: a full disk must not stop the container.
        let _ = file.write_all(&text);
    }

    /// Writes the remaining incomplete lines as partial lines when the container has exited.
    pub fn finish(&mut self, now: jiff::Timestamp) {
        for stream in [OutputStream::Out, OutputStream::Err] {
            let pending = std::mem::take(&mut self.pending[stream as usize]);
            if let (Some(file), false) = (&mut self.file, pending.is_empty()) {
                let mut text = Vec::new();
                write_entry(&mut text, stream, false, &pending, now);
                let _ = file.write_all(&text);
            }
        }
    }
}

fn open(path: &Path) -> io::Result<File> {
    use std::os::unix::fs::OpenOptionsExt as _;
    if let Some(parent) = path.parent() {
        std::fs::create_dir_all(parent)?;
    }
    OpenOptions::new().append(true).create(true).mode(0o640).open(path)
}

fn write_entry(text: &mut Vec<u8>, stream: OutputStream, is_whole: bool, line: &[u8], now: jiff::Timestamp) {
    let name = if stream == OutputStream::Out { "stdout" } else { "stderr" };
    let tag = if is_whole { "F" } else { "P" };
    // Writing into memory does not fail.
    let _ = write!(text, "{now:.9} {name} {tag} ");
    text.extend_from_slice(line);
    text.push(b'\n');
}

#[cfg(test)]
mod tests {
    use super::*;

    #[track_caller]
    fn check(writes: &[(OutputStream, &str)], expected: &str) {
        let directory = tempfile::tempdir().unwrap();
        let path = directory.path().join("pod/0.log");
        let mut log = Log::open(Some(&path)).unwrap();
        let now = jiff::Timestamp::from_second(1).unwrap();
        writes.iter().for_each(|(stream, text)| log.write(*stream, text.as_bytes(), now));
        log.finish(now);
        let text = std::fs::read_to_string(&path).unwrap();
        let text =
            text.replace("1970-01-01T00:00:01.000000000Z ", "").replace(&"x".repeat(MAX_LINE_BYTES), "X");
        assert_eq!(text, expected);
    }

    #[test]
    fn tags_full_and_partial_lines() {
        use OutputStream::{Err, Out};
        check(
            &[(Out, "a\nb"), (Err, "e\n"), (Out, "c\n\nd")],
            "stdout F a\nstderr F e\nstdout F bc\nstdout F \nstdout P d\n",
        );
        let long = "x".repeat(MAX_LINE_BYTES);
        check(&[(Out, &format!("{long}\n"))], "stdout F X\n");
        check(&[(Out, &format!("{long}y\n"))], "stdout P X\nstdout F y\n");
        check(&[(Out, &long), (Out, &long), (Out, "\n")], "stdout P X\nstdout F X\n");
    }

    #[test]
    fn reopen_a_rotated_log() {
        let directory = tempfile::tempdir().unwrap();
        let path = directory.path().join("0.log");
        let mut log = Log::open(Some(&path)).unwrap();
        let now = jiff::Timestamp::UNIX_EPOCH;
        log.write(OutputStream::Out, b"old\n", now);
        std::fs::rename(&path, directory.path().join("1.log")).unwrap();
        log.reopen().unwrap();
        log.write(OutputStream::Out, b"new\n", now);
        assert!(std::fs::read_to_string(&path).unwrap().ends_with("new\n"));
        Log::open(None).unwrap().write(OutputStream::Out, b"nowhere\n", now);
    }
}
