//! Files of the log: their header, and the one being appended to.
//!
//! Segment `n` continues segment `n - 1` from where its header says that one ended, which is how a log goes
//! on after a failed write: what the failed write left behind lies after that end and is never read.

use std::fs::{self, File, OpenOptions};
use std::hash::{BuildHasher, Hasher, RandomState};
use std::io;
use std::os::unix::fs::{FileExt, OpenOptionsExt};
use std::path::{Path, PathBuf};
use std::sync::Arc;

use super::record::{self, Record};

pub const HEADER: usize = 64;
pub const LOG_MAGIC: [u8; 8] = *b"skifflog";
pub const SNAPSHOT_MAGIC: [u8; 8] = *b"skiffsnp";
const VERSION: u32 = 1;

/// Zeros are kept this far ahead of the write position, so that a sync changes no metadata.
const FILL: u64 = 1 << 20;
/// Batches this large gain nothing from it.
const LARGE: usize = 256 << 10;
/// How much of it is written at once.
const PART: usize = 64 << 10;

/// What a fault test may make fail.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Op {
    Create,
    Write,
    Sync,
    Rename,
}

/// Asked before each operation on the disk; an error makes it fail (a write, half-way through).
pub type Faults = Arc<dyn Fn(Op) -> io::Result<()> + Send + Sync>;

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Header {
    pub salt: u32,
    /// A segment's own number; in a snapshot, the first segment that is not part of it.
    pub sequence: u64,
    /// The newest revision before this file, or in this snapshot.
    pub base: u64,
    /// Where the segment before ended (0: there is none) and the `crc` of its last record.
    pub prev_end: u64,
    pub chain: u32,
}

impl Header {
    pub fn new(sequence: u64, base: u64, prev_end: u64, chain: u32) -> Header {
        let salt = RandomState::new().build_hasher().finish() as u32;
        Header { salt, sequence, base, prev_end, chain }
    }

    pub fn encode(&self, magic: [u8; 8]) -> [u8; HEADER] {
        let mut out = [0; HEADER];
        out[..8].copy_from_slice(&magic);
        out[8..12].copy_from_slice(&VERSION.to_le_bytes());
        out[12..16].copy_from_slice(&self.salt.to_le_bytes());
        out[16..24].copy_from_slice(&self.sequence.to_le_bytes());
        out[24..32].copy_from_slice(&self.base.to_le_bytes());
        out[32..40].copy_from_slice(&self.prev_end.to_le_bytes());
        out[40..44].copy_from_slice(&self.chain.to_le_bytes());
        let crc = crc32c::crc32c(&out[..60]);
        out[60..].copy_from_slice(&crc.to_le_bytes());
        out
    }

    pub fn decode(bytes: &[u8; HEADER], magic: [u8; 8]) -> Result<Header, String> {
        let word = |at: usize| u32::from_le_bytes([bytes[at], bytes[at + 1], bytes[at + 2], bytes[at + 3]]);
        let long = |at: usize| u64::from(word(at)) | u64::from(word(at + 4)) << 32;
        if bytes[..8] != magic {
            return Err("this is no file of the store".into());
        }
        if word(60) != crc32c::crc32c(&bytes[..60]) {
            return Err("the file's header is damaged".into());
        }
        if word(8) != VERSION {
            return Err(format!("format version {} is not known, only {VERSION}", word(8)));
        }
        Ok(Header { salt: word(12), sequence: long(16), base: long(24), prev_end: long(32), chain: word(40) })
    }
}

pub fn segment_path(dir: &Path, sequence: u64) -> PathBuf {
    dir.join(format!("{sequence:016x}.log"))
}

pub fn snapshot_path(dir: &Path, sequence: u64) -> PathBuf {
    dir.join(format!("{sequence:016x}.snap"))
}

/// A new file readable by its owner alone; an old one of that name is emptied.
pub fn create_file(path: &Path, faults: &Faults) -> io::Result<File> {
    faults(Op::Create)?;
    OpenOptions::new().read(true).write(true).create(true).truncate(true).mode(0o600).open(path)
}

/// Makes creations, renames and removals in the directory durable.
pub fn sync_dir(dir: &Path, faults: &Faults) -> io::Result<()> {
    faults(Op::Sync)?;
    rustix::fs::fsync(File::open(dir)?).map_err(Into::into)
}

/// Gives a finished and synced file its name.
pub fn rename(from: &Path, to: &Path, faults: &Faults) -> io::Result<()> {
    faults(Op::Rename)?;
    fs::rename(from, to)?;
    // The parent of a bare file name is an empty path.
    let parent = to.parent().filter(|parent| !parent.as_os_str().is_empty());
    sync_dir(parent.unwrap_or(Path::new(".")), faults)
}

/// The segment being written.
pub struct Segment {
    file: File,
    faults: Faults,
    salt: u32,
    pub sequence: u64,
    /// End of the records, and the `crc` of the last.
    pub position: u64,
    pub chain: u32,
    /// The same two as of the last successful sync.
    pub synced: u64,
    pub synced_chain: u32,
    /// End of the records that somebody has been told of.
    pub shown: u64,
    filled: u64,
    buffer: Vec<u8>,
}

impl Segment {
    /// The file appears under its name whole: with header, zeros ahead and on disk.
    pub fn create(dir: &Path, header: Header, faults: &Faults) -> io::Result<Segment> {
        let path = segment_path(dir, header.sequence);
        let temporary = path.with_extension("log.tmp");
        let file = create_file(&temporary, faults)?;
        let end = HEADER as u64;
        let mut segment = Segment {
            file,
            faults: faults.clone(),
            salt: header.salt,
            sequence: header.sequence,
            position: 0,
            chain: header.chain,
            synced: end,
            synced_chain: header.chain,
            shown: end,
            filled: 0,
            buffer: Vec::new(),
        };
        segment.write_at_end(&header.encode(LOG_MAGIC))?;
        (segment.faults)(Op::Sync)?;
        rustix::fs::fsync(&segment.file)?;
        rename(&temporary, &path, faults)?;
        Ok(segment)
    }

    /// Writes the records in one go; they are durable after the next [`Segment::sync`].
    /// After an error the segment must not be used again.
    pub fn append<'a>(&mut self, records: impl Iterator<Item = Record<'a>>) -> io::Result<()> {
        let mut buffer = std::mem::take(&mut self.buffer);
        buffer.clear();
        let mut chain = self.chain;
        for mut record in records {
            record.synced = self.synced;
            chain = record::encode(&mut buffer, self.salt, chain, &record);
        }
        self.write_at_end(&buffer)?;
        self.chain = chain;
        // A rare large batch should not hold its memory for ever.
        if buffer.capacity() <= 4 << 20 {
            self.buffer = buffer;
        }
        Ok(())
    }

    /// After an error the segment must not be used again: the kernel may have dropped what it could not
    /// write and call the next sync a success.
    pub fn sync(&mut self) -> io::Result<()> {
        if self.synced < self.position {
            (self.faults)(Op::Sync)?;
            rustix::fs::fdatasync(&self.file)?;
            self.synced = self.position;
            self.synced_chain = self.chain;
        }
        Ok(())
    }

    /// After a failure: cuts off the writes that were refused because of it, if the disk lets us. If it does
    /// not, they may be there after a restart, which is no worse than an answer lost on the way.
    pub fn abandon(self) {
        let _ = self.file.set_len(self.shown);
    }

    fn write_at_end(&mut self, bytes: &[u8]) -> io::Result<()> {
        if let Err(error) = (self.faults)(Op::Write) {
            self.file.write_all_at(&bytes[..bytes.len() / 2], self.position)?;
            return Err(error);
        }
        self.file.write_all_at(bytes, self.position)?;
        self.position += bytes.len() as u64;
        if self.position > self.filled {
            self.filled = self.position;
            let until = if bytes.len() < LARGE { self.position + FILL } else { self.position };
            // Made when it is needed: as a constant it would be in the program, zero by zero.
            let zeros = vec![0; PART.min((until - self.filled) as usize)];
            while self.filled < until {
                let len = zeros.len().min((until - self.filled) as usize);
                self.file.write_all_at(&zeros[..len], self.filled)?;
                self.filled += len as u64;
            }
        }
        Ok(())
    }
}
