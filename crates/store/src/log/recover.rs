//! Recovery from log files: restores every acknowledged record, or fails and reports the position.
//!
//! The difficult case is an unreadable record. It is a *torn tail* if the machine stopped while it
//! was written; then it is truncated, because it was never acknowledged. It is *corruption* if it
//! had been synced; then continuing would silently lose data. The rules are:
//!
//! - Unreadable data before the end position in the next file's header is corruption.
//! - A record contains the synced length of the file at the time it was written. A readable record
//!   after the unreadable one that declares it as synced proves corruption.
//! - Otherwise the unreadable record belongs to the last, unsynced writes. An interrupted write
//!   leaves zeros (or nothing) in place of a sector or of the rest of the record. If there are
//!   none, it is corruption.

use std::fs::{self, File};
use std::io::{self, BufReader, Read, Seek, SeekFrom};
use std::path::{Path, PathBuf};
use std::sync::Arc;

use bytes::Bytes;

use super::OpenError;
use super::mvcc::{Change, MvccStore};
use super::record::{self, RECORD_HEADER_BYTES, Record, RecordKind};
use super::segment::{self, FileHeader, HEADER_BYTES, LOG_MAGIC, SNAPSHOT_MAGIC};

const SECTOR_BYTES: u64 = 512;

pub struct Recovery {
    pub mvcc: MvccStore,
    /// The position that the next segment continues from.
    pub sequence: u64,
    pub end: u64,
    pub last_crc: u32,
    /// The size of the segments since the snapshot.
    pub log_bytes: u64,
}

/// Reads the newest snapshot and the segments after it. `trim` is called periodically to limit the
/// history.
pub fn recover(dir: &Path, trim: impl Fn(&mut MvccStore)) -> Result<Recovery, OpenError> {
    let (mut segments, mut snapshots) = (Vec::new(), Vec::new());
    for file in fs::read_dir(dir).map_err(io_error(dir))? {
        let name = file.map_err(io_error(dir))?.file_name();
        let Some((number, extension)) = name.to_str().and_then(|name| name.split_once('.')) else { continue };
        let Ok(number) = u64::from_str_radix(number, 16) else { continue };
        match extension {
            "log" => segments.push(number),
            "snap" => snapshots.push(number),
            // The file was never completed, so nothing depends on it.
            "log.tmp" | "snap.tmp" => fs::remove_file(dir.join(&name)).map_err(io_error(dir))?,
            _ => {}
        }
    }
    let mut mvcc = MvccStore::default();
    let first = match snapshots.into_iter().max() {
        Some(latest) => {
            load_snapshot(&segment::snapshot_path(dir, latest), Some(latest), |change| mvcc.load(change))
                .map(|revision| mvcc.advance(revision))?;
            mvcc.set_compact_revision(mvcc.revision());
            latest
        }
        None => 1,
    };
    segments.retain(|sequence| *sequence >= first);
    segments.sort_unstable();
    let is_empty = segments.is_empty() && first == 1;
    for (expected, found) in (first..).zip(segments.iter().copied().chain(is_empty.then_some(1))) {
        if expected != found {
            return Err(OpenError::Missing { path: segment::segment_path(dir, expected) });
        }
    }
    if segments.is_empty() && !is_empty {
        return Err(OpenError::Missing { path: segment::segment_path(dir, first) });
    }
    let open = |sequence| RecordReader::open(segment::segment_path(dir, sequence), LOG_MAGIC, Some(sequence));
    // The end of each segment is in the header of the next one.
    let mut ends = Vec::new();
    for sequence in segments.iter().skip(1) {
        let next = open(*sequence)?.header;
        ends.push((next.prev_end, next.last_crc));
    }
    let mut recovery =
        Recovery { mvcc, sequence: first - u64::from(is_empty), end: 0, last_crc: 0, log_bytes: 0 };
    let mut reserved = 0;
    for (n, sequence) in segments.into_iter().enumerate() {
        let mut file = open(sequence)?;
        recovery.mvcc.advance(file.header.base_revision);
        recovery.sequence = file.header.sequence;
        recovery.end = replay(&mut file, ends.get(n).copied(), &mut recovery.mvcc, &mut reserved, &trim)?;
        recovery.last_crc = file.last_crc;
        // Counts at least 64 KiB per segment, so that many restarts lead to a snapshot, too.
        recovery.log_bytes += recovery.end.max(64 << 10);
    }
    recovery.mvcc.advance(reserved);
    trim(&mut recovery.mvcc);
    Ok(recovery)
}

/// Reads a complete snapshot and returns its revision. Any error is corruption.
pub fn load_snapshot(
    path: &Path,
    sequence: Option<u64>,
    mut on_change: impl FnMut(Change),
) -> Result<u64, OpenError> {
    let mut file = RecordReader::open(path.to_owned(), SNAPSHOT_MAGIC, sequence)?;
    let mut count = 0;
    loop {
        match file.next()? {
            ReadResult::Record { kind: RecordKind::Put, change, .. } => {
                count += 1;
                on_change(change);
            }
            ReadResult::Record { kind: RecordKind::End, change, .. } => {
                if change.expires != count
                    || change.revision != file.header.base_revision
                    || !file.is_at_end()?
                {
                    return Err(file.corruption_error("end record does not match the snapshot"));
                }
                return Ok(change.revision);
            }
            ReadResult::Record { .. } => {
                return Err(file.corruption_error("unexpected record type in a snapshot"));
            }
            ReadResult::Invalid { reason: why, .. } => return Err(file.corruption_error(why)),
        }
    }
}

/// Applies the records of a segment up to `end` (an offset and the CRC of the last record). For the
/// last segment, applies all complete records and truncates a torn tail. Returns the end offset.
fn replay(
    file: &mut RecordReader,
    end: Option<(u64, u32)>,
    mvcc: &mut MvccStore,
    reserved: &mut u64,
    trim: &impl Fn(&mut MvccStore),
) -> Result<u64, OpenError> {
    let mut count = 0u32;
    loop {
        if let Some((end, last_crc)) = end
            && file.offset >= end
        {
            if file.offset > end || file.last_crc != last_crc {
                return Err(
                    file.corruption_error("last record does not match the header of the next segment")
                );
            }
            return Ok(end);
        }
        let next = file.next()?;
        match next {
            ReadResult::Record { kind: RecordKind::Reserve, change } => *reserved = change.revision,
            ReadResult::Record { kind: RecordKind::End, .. } => {
                return Err(file.corruption_error("unexpected record type in a segment"));
            }
            ReadResult::Record { change, .. } => {
                if change.revision <= mvcc.revision() {
                    return Err(file.corruption_error("revisions do not increase"));
                }
                mvcc.apply(change);
                count = count.wrapping_add(1);
                if count.is_multiple_of(1024) {
                    trim(mvcc);
                }
            }
            ReadResult::Invalid { reason: why, is_torn: torn } => {
                if end.is_some() || !torn || file.was_synced()? {
                    return Err(file.corruption_error(why));
                }
                file.truncate()?;
                return Ok(file.offset);
            }
        }
    }
}

enum ReadResult {
    Record {
        kind: RecordKind,
        change: Change,
    },
    /// `is_torn`: the data looks like an interrupted write, or like the end of the log.
    Invalid {
        reason: &'static str,
        is_torn: bool,
    },
}

/// Reads records in order. `offset` and `last_crc` belong to the end of the last valid record.
struct RecordReader {
    path: PathBuf,
    file: BufReader<File>,
    header: FileHeader,
    offset: u64,
    last_crc: u32,
    body: Vec<u8>,
}

impl RecordReader {
    fn open(path: PathBuf, magic: [u8; 8], sequence: Option<u64>) -> Result<RecordReader, OpenError> {
        let file = File::open(&path).map_err(io_error(&path))?;
        let mut file = BufReader::with_capacity(256 << 10, file);
        let mut bytes = [0; HEADER_BYTES];
        let corruption_error = |reason: String| OpenError::Corrupt { path: path.clone(), offset: 0, reason };
        if read_up_to(&mut file, &mut bytes).map_err(io_error(&path))? < HEADER_BYTES {
            return Err(corruption_error("file header is truncated".into()));
        }
        let header = FileHeader::decode(&bytes, magic).map_err(corruption_error)?;
        if sequence.is_some_and(|sequence| sequence != header.sequence) {
            return Err(corruption_error(format!(
                "file name does not match sequence number {}",
                header.sequence
            )));
        }
        Ok(RecordReader {
            path,
            file,
            header,
            offset: HEADER_BYTES as u64,
            last_crc: header.last_crc,
            body: Vec::new(),
        })
    }

    fn next(&mut self) -> Result<ReadResult, OpenError> {
        let mut header_bytes = [0; RECORD_HEADER_BYTES];
        let len = read_up_to(&mut self.file, &mut header_bytes).map_err(io_error(&self.path))?;
        let invalid = |reason, is_torn| Ok(ReadResult::Invalid { reason, is_torn });
        let Some(header) =
            record::decode_header(&header_bytes, self.header.salt).filter(|_| len == RECORD_HEADER_BYTES)
        else {
            let mut next_byte = [0];
            let more = read_up_to(&mut self.file, &mut next_byte).map_err(io_error(&self.path))?;
            let is_torn = more == 0 || next_byte == [0] || has_empty_sector(self.offset, &header_bytes);
            return invalid("invalid record header", is_torn);
        };
        self.body.resize(header.len, 0);
        let len = read_up_to(&mut self.file, &mut self.body).map_err(io_error(&self.path))?;
        let body = &self.body[..len];
        let Some(record) = record::decode_body(&header, body, self.header.salt) else {
            let record_bytes = [&header_bytes, body].concat();
            let is_torn =
                len < header.len || body.last() == Some(&0) || has_empty_sector(self.offset, &record_bytes);
            return invalid("record checksum mismatch", is_torn);
        };
        if header.prev != self.last_crc {
            return invalid("record does not continue the previous record", false);
        }
        let next = ReadResult::Record { kind: record.kind, change: to_change(&record) };
        self.last_crc = header.crc;
        self.offset += (RECORD_HEADER_BYTES + header.len) as u64;
        Ok(next)
    }

    /// Whether a later record proves that the data at `offset` was synced.
    fn was_synced(&mut self) -> Result<bool, OpenError> {
        let rest = self.read_rest()?;
        if rest.iter().all(|byte| *byte == 0) {
            return Ok(false);
        }
        // A record length may start with a zero byte, so every offset is tried. Zeros are rejected
        // by the header check.
        let record_at = |from: usize| record::decode_record(&rest[from..], self.header.salt);
        Ok((1..rest.len()).any(|from| record_at(from).is_some_and(|record| record.synced > self.offset)))
    }

    /// Truncates the file after the last valid record.
    fn truncate(&mut self) -> Result<(), OpenError> {
        let rest = self.read_rest()?;
        if rest.iter().any(|byte| *byte != 0) {
            tracing::warn!(file = %self.path.display(), offset = self.offset, "truncating incomplete write");
        }
        let file = fs::OpenOptions::new().write(true).open(&self.path).map_err(io_error(&self.path))?;
        file.set_len(self.offset).and_then(|()| file.sync_all()).map_err(io_error(&self.path))
    }

    fn is_at_end(&mut self) -> Result<bool, OpenError> {
        Ok(read_up_to(&mut self.file, &mut [0]).map_err(io_error(&self.path))? == 0)
    }

    fn read_rest(&mut self) -> Result<Vec<u8>, OpenError> {
        let mut rest = Vec::new();
        self.file
            .seek(SeekFrom::Start(self.offset))
            .and_then(|_| self.file.read_to_end(&mut rest))
            .map_err(io_error(&self.path))?;
        Ok(rest)
    }

    fn corruption_error(&self, reason: &str) -> OpenError {
        OpenError::Corrupt { path: self.path.clone(), offset: self.offset, reason: reason.into() }
    }
}

fn to_change(record: &Record) -> Change {
    Change {
        key: Arc::from(record.key),
        value: (record.kind == RecordKind::Put).then(|| Bytes::copy_from_slice(record.value)),
        revision: record.revision,
        expires: record.expires,
    }
}

/// Whether one of the disk sectors that contain `bytes` (at `offset` of the file) was never
/// written.
fn has_empty_sector(offset: u64, bytes: &[u8]) -> bool {
    let first = (SECTOR_BYTES - offset % SECTOR_BYTES) as usize;
    let (head, rest) = bytes.split_at(first.min(bytes.len()));
    std::iter::once(head)
        .chain(rest.chunks(SECTOR_BYTES as usize))
        .any(|piece| !piece.is_empty() && piece.iter().all(|byte| *byte == 0))
}

/// Reads until `buffer` is full or the file ends.
fn read_up_to(file: &mut impl Read, buffer: &mut [u8]) -> io::Result<usize> {
    let mut len = 0;
    while len < buffer.len() {
        match file.read(&mut buffer[len..]) {
            Ok(0) => break,
            Ok(n) => len += n,
            Err(error) if error.kind() == io::ErrorKind::Interrupted => {}
            Err(error) => return Err(error),
        }
    }
    Ok(len)
}

fn io_error(path: &Path) -> impl Fn(io::Error) -> OpenError {
    let path = path.to_owned();
    move |source| OpenError::Io { path: path.clone(), source }
}
