//! From files back to memory: takes every record that was promised, or refuses and says where.
//!
//! The one hard question is a record that cannot be read. It is a *torn tail* if the machine stopped while
//! it was being written, and then it is cut off: nobody was told that it had been stored. It is *damage* if
//! it had been synced, and then going on would lose it silently. Told apart like this:
//!
//! - Anything unreadable before the end that the next file names is damage.
//! - A record says how much of the file was synced before it was written. One that can be read beyond the
//!   unreadable place and says that place was synced makes it damage.
//! - Otherwise the place lies in the last, unsynced writes. A write that stopped half-way leaves zeros (or
//!   nothing) where a sector or the rest of the record should be; if there are none, it is damage.

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
    /// What the next segment continues.
    pub sequence: u64,
    pub end: u64,
    pub last_crc: u32,
    /// Weight of the segments since the snapshot.
    pub log_bytes: u64,
}

/// Reads the newest snapshot and the segments after it. `tidy` is called now and then to bound history.
pub fn recover(dir: &Path, trim: impl Fn(&mut MvccStore)) -> Result<Recovery, OpenError> {
    let (mut segments, mut snapshots) = (Vec::new(), Vec::new());
    for file in fs::read_dir(dir).map_err(io_error(dir))? {
        let name = file.map_err(io_error(dir))?.file_name();
        let Some((number, extension)) = name.to_str().and_then(|name| name.split_once('.')) else { continue };
        let Ok(number) = u64::from_str_radix(number, 16) else { continue };
        match extension {
            "log" => segments.push(number),
            "snap" => snapshots.push(number),
            // Never finished, so nothing depends on it.
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
    // Each segment's end is known by the next.
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
        // At least that much each, so that many restarts also lead to a snapshot.
        recovery.log_bytes += recovery.end.max(64 << 10);
    }
    recovery.mvcc.advance(reserved);
    trim(&mut recovery.mvcc);
    Ok(recovery)
}

/// Reads a whole snapshot and returns its revision; any flaw is an error.
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
                    return Err(file.corruption_error("the end does not fit what comes before"));
                }
                return Ok(change.revision);
            }
            ReadResult::Record { .. } => {
                return Err(file.corruption_error("a record that does not belong in a snapshot"));
            }
            ReadResult::Invalid { reason: why, .. } => return Err(file.corruption_error(why)),
        }
    }
}

/// Applies a segment's records up to `end` (and the chain's value there), or if it is the last one, up to
/// the end of what was written; cuts off a torn tail. Returns the end.
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
                return Err(file.corruption_error("the next file continues another record than the one here"));
            }
            return Ok(end);
        }
        let next = file.next()?;
        match next {
            ReadResult::Record { kind: RecordKind::Reserve, change } => *reserved = change.revision,
            ReadResult::Record { kind: RecordKind::End, .. } => {
                return Err(file.corruption_error("a record that does not belong in a segment"));
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
    /// `torn`: it looks like a write that stopped half-way, or the end.
    Invalid {
        reason: &'static str,
        is_torn: bool,
    },
}

/// Reads records in order; `offset` and `chain` are those of the end of the last good one.
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
            return Err(corruption_error("the file's header is missing".into()));
        }
        let header = FileHeader::decode(&bytes, magic).map_err(corruption_error)?;
        if sequence.is_some_and(|sequence| sequence != header.sequence) {
            return Err(corruption_error(format!(
                "the file's name does not fit its number {}",
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
            return invalid("no record begins here", is_torn);
        };
        self.body.resize(header.len, 0);
        let len = read_up_to(&mut self.file, &mut self.body).map_err(io_error(&self.path))?;
        let body = &self.body[..len];
        let Some(record) = record::decode_body(&header, body, self.header.salt) else {
            let record_bytes = [&header_bytes, body].concat();
            let is_torn =
                len < header.len || body.last() == Some(&0) || has_empty_sector(self.offset, &record_bytes);
            return invalid("the record's checksum is wrong", is_torn);
        };
        if header.prev != self.last_crc {
            return invalid("the record does not follow the one before it", false);
        }
        let next = ReadResult::Record { kind: record.kind, change: to_change(&record) };
        self.last_crc = header.crc;
        self.offset += (RECORD_HEADER_BYTES + header.len) as u64;
        Ok(next)
    }

    /// Whether a later record tells that what is at `offset` had been synced.
    fn was_synced(&mut self) -> Result<bool, OpenError> {
        let rest = self.read_rest()?;
        if rest.iter().all(|byte| *byte == 0) {
            return Ok(false);
        }
        // A length can begin with a zero; one that is nothing else is seen through at once.
        let record_at = |from: usize| record::decode_record(&rest[from..], self.header.salt);
        Ok((1..rest.len()).any(|from| record_at(from).is_some_and(|record| record.synced > self.offset)))
    }

    /// Drops everything after the last good record.
    fn truncate(&mut self) -> Result<(), OpenError> {
        let rest = self.read_rest()?;
        if rest.iter().any(|byte| *byte != 0) {
            tracing::warn!(file = %self.path.display(), offset = self.offset, "cutting off an unfinished write");
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

/// Whether one of the disk's sectors that `bytes`, found at `offset`, lie in was never written.
fn has_empty_sector(offset: u64, bytes: &[u8]) -> bool {
    let first = (SECTOR_BYTES - offset % SECTOR_BYTES) as usize;
    let (head, rest) = bytes.split_at(first.min(bytes.len()));
    std::iter::once(head)
        .chain(rest.chunks(SECTOR_BYTES as usize))
        .any(|piece| !piece.is_empty() && piece.iter().all(|byte| *byte == 0))
}

/// Fills `buffer` as far as the file goes.
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
