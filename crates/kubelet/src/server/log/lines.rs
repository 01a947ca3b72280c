//! Parses the log format of CRI: `<time> stdout|stderr F|P text`. A line that is too long for the
//! runtime is split into several parts, of which all but the last are marked `P`. Pure except for
//! [`tail_offset`], which reads a file.

use std::fs::File;
use std::io::{self, Read as _, Seek as _, SeekFrom};

use jiff::Timestamp;

/// Longer than any line that a runtime writes. Longer lines are dropped.
const MAX_LINE_BYTES: usize = 1 << 20;
const BLOCK_BYTES: usize = 64 << 10;

/// Converts the bytes of a log to the output of the container, in chunks of any size.
pub struct LogParser {
    since: Option<Timestamp>,
    timestamps: bool,
    /// The number of bytes until the limit.
    remaining: Option<u64>,
    /// The beginning of a line whose end has not been read.
    incomplete: Vec<u8>,
    /// Whether the next text begins a line of the container's output.
    at_start: bool,
}

impl LogParser {
    pub fn new(since: Option<Timestamp>, timestamps: bool, limit: Option<u64>) -> LogParser {
        LogParser { since, timestamps, remaining: limit, incomplete: Vec::new(), at_start: true }
    }

    /// Whether the byte limit is reached.
    pub fn is_done(&self) -> bool {
        self.remaining == Some(0)
    }

    /// Processes more bytes and returns their output.
    pub fn process(&mut self, mut bytes: &[u8]) -> Vec<u8> {
        let mut out = Vec::with_capacity(bytes.len());
        while let Some(end) = bytes.iter().position(|byte| *byte == b'\n') {
            let (line, rest) = bytes.split_at(end);
            if self.incomplete.is_empty() {
                self.line(line, &mut out);
            } else {
                let mut incomplete = std::mem::take(&mut self.incomplete);
                incomplete.extend_from_slice(line);
                self.line(&incomplete, &mut out);
            }
            bytes = &rest[1..];
        }
        if self.incomplete.len() + bytes.len() <= MAX_LINE_BYTES {
            self.incomplete.extend_from_slice(bytes);
        } else {
            self.incomplete.clear();
        }
        if let Some(remaining) = &mut self.remaining {
            out.truncate(usize::try_from(*remaining).unwrap_or(usize::MAX));
            *remaining -= out.len() as u64;
        }
        out
    }

    fn line(&mut self, line: &[u8], out: &mut Vec<u8>) {
        let Some(LogLine { time, partial, text }) = LogLine::parse(line) else { return };
        if self.since.is_some_and(|since| parse_time(time).is_none_or(|time| time < since)) {
            return;
        }
        if self.timestamps && self.at_start {
            out.extend_from_slice(format_time(time).as_bytes());
            out.push(b' ');
        }
        out.extend_from_slice(text);
        if !partial {
            out.push(b'\n');
        }
        self.at_start = !partial;
    }
}

struct LogLine<'a> {
    time: &'a str,
    partial: bool,
    text: &'a [u8],
}

impl<'a> LogLine<'a> {
    fn parse(line: &'a [u8]) -> Option<LogLine<'a>> {
        let mut words = line.splitn(4, |byte| *byte == b' ');
        let time = std::str::from_utf8(words.next()?).ok()?;
        parse_time(time)?;
        if !matches!(words.next()?, b"stdout" | b"stderr") {
            return None;
        }
        // More tags may follow the first one after a colon.
        let partial = words.next()?.split(|byte| *byte == b':').next() == Some(b"P");
        Some(LogLine { time, partial, text: words.next()? })
    }
}

fn parse_time(time: &str) -> Option<Timestamp> {
    time.parse().ok()
}

/// With nine fractional digits, so that all times have the same width.
fn format_time(time: &str) -> String {
    let zone = time.char_indices().skip(19).find(|(_, c)| matches!(c, 'Z' | '+' | '-'));
    let (clock, zone) = time.split_at(zone.map_or(time.len(), |(i, _)| i));
    let (seconds, fraction) = clock.split_once('.').unwrap_or((clock, ""));
    format!("{seconds}.{fraction:0<9}{zone}")
}

/// The offset at which the last `count` lines begin. An unfinished last line does not count.
pub fn tail_offset(file: &mut File, count: u64) -> io::Result<u64> {
    let mut at = file.seek(SeekFrom::End(0))?;
    let mut block = vec![0; BLOCK_BYTES];
    let mut ends = 0;
    while at > 0 {
        let size = at.min(BLOCK_BYTES as u64);
        at -= size;
        let block = &mut block[..usize::try_from(size).unwrap_or(BLOCK_BYTES)];
        file.seek(SeekFrom::Start(at))?;
        file.read_exact(block)?;
        for (i, _) in block.iter().enumerate().rev().filter(|(_, byte)| **byte == b'\n') {
            // The end of the line before the requested ones.
            if ends == count {
                return Ok(at + i as u64 + 1);
            }
            ends += 1;
        }
    }
    Ok(0)
}
