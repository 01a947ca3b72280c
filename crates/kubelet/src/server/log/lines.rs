//! The runtimes' format of logs: `<time> stdout|stderr F|P text`, a line that was too long for the runtime in
//! several parts, all but the last marked `P`. Pure but for [`tail`], which looks into a file.

use std::fs::File;
use std::io::{self, Read as _, Seek as _, SeekFrom};

use jiff::Timestamp;

/// More than any runtime puts into one line; what is longer is no log.
const LONGEST: usize = 1 << 20;
const BLOCK: usize = 64 << 10;

/// Turns the bytes of a log into what the container said, in any pieces.
pub struct Lines {
    since: Option<Timestamp>,
    timestamps: bool,
    /// How many bytes may still be given.
    left: Option<u64>,
    /// The beginning of a line whose end has not been read.
    begun: Vec<u8>,
    /// Whether what comes next begins a line of the container's.
    at_start: bool,
}

impl Lines {
    pub fn new(since: Option<Timestamp>, timestamps: bool, limit: Option<u64>) -> Lines {
        Lines { since, timestamps, left: limit, begun: Vec::new(), at_start: true }
    }

    /// Whether as much has been given as was wanted.
    pub fn is_done(&self) -> bool {
        self.left == Some(0)
    }

    /// What can be said after these further bytes.
    pub fn take(&mut self, mut bytes: &[u8]) -> Vec<u8> {
        let mut out = Vec::with_capacity(bytes.len());
        while let Some(end) = bytes.iter().position(|byte| *byte == b'\n') {
            let (line, rest) = bytes.split_at(end);
            if self.begun.is_empty() {
                self.line(line, &mut out);
            } else {
                let mut begun = std::mem::take(&mut self.begun);
                begun.extend_from_slice(line);
                self.line(&begun, &mut out);
            }
            bytes = &rest[1..];
        }
        if self.begun.len() + bytes.len() <= LONGEST {
            self.begun.extend_from_slice(bytes);
        } else {
            self.begun.clear();
        }
        if let Some(left) = &mut self.left {
            out.truncate(usize::try_from(*left).unwrap_or(usize::MAX));
            *left -= out.len() as u64;
        }
        out
    }

    fn line(&mut self, line: &[u8], out: &mut Vec<u8>) {
        let Some(Line { time, partial, text }) = Line::parse(line) else { return };
        if self.since.is_some_and(|since| parsed(time).is_none_or(|time| time < since)) {
            return;
        }
        if self.timestamps && self.at_start {
            out.extend_from_slice(fixed(time).as_bytes());
            out.push(b' ');
        }
        out.extend_from_slice(text);
        if !partial {
            out.push(b'\n');
        }
        self.at_start = !partial;
    }
}

struct Line<'a> {
    time: &'a str,
    partial: bool,
    text: &'a [u8],
}

impl<'a> Line<'a> {
    fn parse(line: &'a [u8]) -> Option<Line<'a>> {
        let mut words = line.splitn(4, |byte| *byte == b' ');
        let time = std::str::from_utf8(words.next()?).ok()?;
        parsed(time)?;
        if !matches!(words.next()?, b"stdout" | b"stderr") {
            return None;
        }
        // Further tags may follow the first one after a colon.
        let partial = words.next()?.split(|byte| *byte == b':').next() == Some(b"P");
        Some(Line { time, partial, text: words.next()? })
    }
}

fn parsed(time: &str) -> Option<Timestamp> {
    time.parse().ok()
}

/// With nine digits of a second, so that times stand below each other.
fn fixed(time: &str) -> String {
    let zone = time.char_indices().skip(19).find(|(_, c)| matches!(c, 'Z' | '+' | '-'));
    let (clock, zone) = time.split_at(zone.map_or(time.len(), |(i, _)| i));
    let (seconds, fraction) = clock.split_once('.').unwrap_or((clock, ""));
    format!("{seconds}.{fraction:0<9}{zone}")
}

/// Where the last `count` lines of the file begin. What follows the last end of a line is no line yet.
pub fn tail(file: &mut File, count: u64) -> io::Result<u64> {
    let mut at = file.seek(SeekFrom::End(0))?;
    let mut block = vec![0; BLOCK];
    let mut ends = 0;
    while at > 0 {
        let size = at.min(BLOCK as u64);
        at -= size;
        let block = &mut block[..usize::try_from(size).unwrap_or(BLOCK)];
        file.seek(SeekFrom::Start(at))?;
        file.read_exact(block)?;
        for (i, _) in block.iter().enumerate().rev().filter(|(_, byte)| **byte == b'\n') {
            // The end of the line before those wanted.
            if ends == count {
                return Ok(at + i as u64 + 1);
            }
            ends += 1;
        }
    }
    Ok(0)
}
