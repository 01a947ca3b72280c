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
use super::memory::{Change, Memory};
use super::record::{self, HEAD, Kind, Record};
use super::segment::{self, HEADER, Header, LOG_MAGIC, SNAPSHOT_MAGIC};

const SECTOR: u64 = 512;

pub struct Recovered {
    pub memory: Memory,
    /// What the next segment continues.
    pub sequence: u64,
    pub end: u64,
    pub chain: u32,
    /// Weight of the segments since the snapshot.
    pub log_bytes: u64,
}

/// Reads the newest snapshot and the segments after it. `tidy` is called now and then to bound history.
pub fn recover(dir: &Path, tidy: impl Fn(&mut Memory)) -> Result<Recovered, OpenError> {
    let (mut segments, mut snapshots) = (Vec::new(), Vec::new());
    for file in fs::read_dir(dir).map_err(at(dir))? {
        let name = file.map_err(at(dir))?.file_name();
        let Some((number, kind)) = name.to_str().and_then(|name| name.split_once('.')) else { continue };
        let Ok(number) = u64::from_str_radix(number, 16) else { continue };
        match kind {
            "log" => segments.push(number),
            "snap" => snapshots.push(number),
            // Never finished, so nothing depends on it.
            "log.tmp" | "snap.tmp" => fs::remove_file(dir.join(&name)).map_err(at(dir))?,
            _ => {}
        }
    }
    let mut memory = Memory::default();
    let first = match snapshots.into_iter().max() {
        Some(newest) => {
            load_snapshot(&segment::snapshot_path(dir, newest), Some(newest), |change| memory.load(change))
                .map(|revision| memory.advance(revision))?;
            memory.set_floor(memory.revision());
            newest
        }
        None => 1,
    };
    segments.retain(|sequence| *sequence >= first);
    segments.sort_unstable();
    let fresh = segments.is_empty() && first == 1;
    for (expected, found) in (first..).zip(segments.iter().copied().chain(fresh.then_some(1))) {
        if expected != found {
            return Err(OpenError::Missing { path: segment::segment_path(dir, expected) });
        }
    }
    if segments.is_empty() && !fresh {
        return Err(OpenError::Missing { path: segment::segment_path(dir, first) });
    }
    let open = |sequence| Reader::open(segment::segment_path(dir, sequence), LOG_MAGIC, Some(sequence));
    // Each segment's end is known by the next.
    let mut ends = Vec::new();
    for sequence in segments.iter().skip(1) {
        let next = open(*sequence)?.header;
        ends.push((next.prev_end, next.chain));
    }
    let mut state = Recovered { memory, sequence: first - u64::from(fresh), end: 0, chain: 0, log_bytes: 0 };
    let mut reserved = 0;
    for (n, sequence) in segments.into_iter().enumerate() {
        let mut file = open(sequence)?;
        state.memory.advance(file.header.base);
        state.sequence = file.header.sequence;
        state.end = replay(&mut file, ends.get(n).copied(), &mut state.memory, &mut reserved, &tidy)?;
        state.chain = file.chain;
        // At least that much each, so that many restarts also lead to a snapshot.
        state.log_bytes += state.end.max(64 << 10);
    }
    state.memory.advance(reserved);
    tidy(&mut state.memory);
    Ok(state)
}

/// Reads a whole snapshot and returns its revision; any flaw is an error.
pub fn load_snapshot(
    path: &Path,
    sequence: Option<u64>,
    mut each: impl FnMut(Change),
) -> Result<u64, OpenError> {
    let mut file = Reader::open(path.to_owned(), SNAPSHOT_MAGIC, sequence)?;
    let mut count = 0;
    loop {
        match file.next()? {
            Next::Record { kind: Kind::Put, change, .. } => {
                count += 1;
                each(change);
            }
            Next::Record { kind: Kind::End, change, .. } => {
                if change.expires != count || change.revision != file.header.base || !file.is_at_end()? {
                    return Err(file.damaged("the end does not fit what comes before"));
                }
                return Ok(change.revision);
            }
            Next::Record { .. } => return Err(file.damaged("a record that does not belong in a snapshot")),
            Next::Unreadable { why, .. } => return Err(file.damaged(why)),
        }
    }
}

/// Applies a segment's records up to `end` (and the chain's value there), or if it is the last one, up to
/// the end of what was written; cuts off a torn tail. Returns the end.
fn replay(
    file: &mut Reader,
    end: Option<(u64, u32)>,
    memory: &mut Memory,
    reserved: &mut u64,
    tidy: &impl Fn(&mut Memory),
) -> Result<u64, OpenError> {
    let mut count = 0u32;
    loop {
        if let Some((end, chain)) = end
            && file.offset >= end
        {
            if file.offset > end || file.chain != chain {
                return Err(file.damaged("the next file continues another record than the one here"));
            }
            return Ok(end);
        }
        let next = file.next()?;
        match next {
            Next::Record { kind: Kind::Reserve, change } => *reserved = change.revision,
            Next::Record { kind: Kind::End, .. } => {
                return Err(file.damaged("a record that does not belong in a segment"));
            }
            Next::Record { change, .. } => {
                if change.revision <= memory.revision() {
                    return Err(file.damaged("revisions do not increase"));
                }
                memory.apply(change);
                count = count.wrapping_add(1);
                if count.is_multiple_of(1024) {
                    tidy(memory);
                }
            }
            Next::Unreadable { why, torn } => {
                if end.is_some() || !torn || file.was_synced()? {
                    return Err(file.damaged(why));
                }
                file.cut()?;
                return Ok(file.offset);
            }
        }
    }
}

enum Next {
    Record {
        kind: Kind,
        change: Change,
    },
    /// `torn`: it looks like a write that stopped half-way, or the end.
    Unreadable {
        why: &'static str,
        torn: bool,
    },
}

/// Reads records in order; `offset` and `chain` are those of the end of the last good one.
struct Reader {
    path: PathBuf,
    file: BufReader<File>,
    header: Header,
    offset: u64,
    chain: u32,
    body: Vec<u8>,
}

impl Reader {
    fn open(path: PathBuf, magic: [u8; 8], sequence: Option<u64>) -> Result<Reader, OpenError> {
        let file = File::open(&path).map_err(at(&path))?;
        let mut file = BufReader::with_capacity(256 << 10, file);
        let mut bytes = [0; HEADER];
        let damaged = |why: String| OpenError::Damaged { path: path.clone(), offset: 0, why };
        if read_most(&mut file, &mut bytes).map_err(at(&path))? < HEADER {
            return Err(damaged("the file's header is missing".into()));
        }
        let header = Header::decode(&bytes, magic).map_err(damaged)?;
        if sequence.is_some_and(|sequence| sequence != header.sequence) {
            return Err(damaged(format!("the file's name does not fit its number {}", header.sequence)));
        }
        Ok(Reader { path, file, header, offset: HEADER as u64, chain: header.chain, body: Vec::new() })
    }

    fn next(&mut self) -> Result<Next, OpenError> {
        let mut head = [0; HEAD];
        let got = read_most(&mut self.file, &mut head).map_err(at(&self.path))?;
        let unreadable = |why, torn| Ok(Next::Unreadable { why, torn });
        let Some(decoded) = record::decode_head(&head, self.header.salt).filter(|_| got == HEAD) else {
            let mut after = [0];
            let more = read_most(&mut self.file, &mut after).map_err(at(&self.path))?;
            let torn = more == 0 || after == [0] || has_empty_sector(self.offset, &head);
            return unreadable("no record begins here", torn);
        };
        self.body.resize(decoded.len, 0);
        let got = read_most(&mut self.file, &mut self.body).map_err(at(&self.path))?;
        let body = &self.body[..got];
        let Some(record) = record::decode_body(&decoded, body, self.header.salt) else {
            let whole = [&head, body].concat();
            let torn = got < decoded.len || body.last() == Some(&0) || has_empty_sector(self.offset, &whole);
            return unreadable("the record's checksum is wrong", torn);
        };
        if decoded.prev != self.chain {
            return unreadable("the record does not follow the one before it", false);
        }
        let next = Next::Record { kind: record.kind, change: change(&record) };
        self.chain = decoded.crc;
        self.offset += (HEAD + decoded.len) as u64;
        Ok(next)
    }

    /// Whether a later record tells that what is at `offset` had been synced.
    fn was_synced(&mut self) -> Result<bool, OpenError> {
        let rest = self.rest()?;
        if rest.iter().all(|byte| *byte == 0) {
            return Ok(false);
        }
        // A length can begin with a zero; one that is nothing else is seen through at once.
        let alone = |from: usize| record::decode_alone(&rest[from..], self.header.salt);
        Ok((1..rest.len()).any(|from| alone(from).is_some_and(|record| record.synced > self.offset)))
    }

    /// Drops everything after the last good record.
    fn cut(&mut self) -> Result<(), OpenError> {
        let rest = self.rest()?;
        if rest.iter().any(|byte| *byte != 0) {
            tracing::warn!(file = %self.path.display(), offset = self.offset, "cutting off an unfinished write");
        }
        let file = fs::OpenOptions::new().write(true).open(&self.path).map_err(at(&self.path))?;
        file.set_len(self.offset).and_then(|()| file.sync_all()).map_err(at(&self.path))
    }

    fn is_at_end(&mut self) -> Result<bool, OpenError> {
        Ok(read_most(&mut self.file, &mut [0]).map_err(at(&self.path))? == 0)
    }

    fn rest(&mut self) -> Result<Vec<u8>, OpenError> {
        let mut rest = Vec::new();
        self.file
            .seek(SeekFrom::Start(self.offset))
            .and_then(|_| self.file.read_to_end(&mut rest))
            .map_err(at(&self.path))?;
        Ok(rest)
    }

    fn damaged(&self, why: &str) -> OpenError {
        OpenError::Damaged { path: self.path.clone(), offset: self.offset, why: why.into() }
    }
}

fn change(record: &Record) -> Change {
    Change {
        key: Arc::from(record.key),
        value: (record.kind == Kind::Put).then(|| Bytes::copy_from_slice(record.value)),
        revision: record.revision,
        expires: record.expires,
    }
}

/// Whether one of the disk's sectors that `bytes`, found at `offset`, lie in was never written.
fn has_empty_sector(offset: u64, bytes: &[u8]) -> bool {
    let first = (SECTOR - offset % SECTOR) as usize;
    let (head, rest) = bytes.split_at(first.min(bytes.len()));
    std::iter::once(head)
        .chain(rest.chunks(SECTOR as usize))
        .any(|piece| !piece.is_empty() && piece.iter().all(|byte| *byte == 0))
}

/// Fills `buffer` as far as the file goes.
fn read_most(file: &mut impl Read, buffer: &mut [u8]) -> io::Result<usize> {
    let mut got = 0;
    while got < buffer.len() {
        match file.read(&mut buffer[got..]) {
            Ok(0) => break,
            Ok(n) => got += n,
            Err(error) if error.kind() == io::ErrorKind::Interrupted => {}
            Err(error) => return Err(error),
        }
    }
    Ok(got)
}

fn at(path: &Path) -> impl Fn(io::Error) -> OpenError {
    let path = path.to_owned();
    move |source| OpenError::Io { path: path.clone(), source }
}
