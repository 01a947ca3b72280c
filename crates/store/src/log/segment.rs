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

pub const HEADER_BYTES: usize = 64;
pub const LOG_MAGIC: [u8; 8] = *b"skifflog";
pub const SNAPSHOT_MAGIC: [u8; 8] = *b"skiffsnp";
const FORMAT_VERSION: u32 = 1;

/// Zeros are kept this far ahead of the write position, so that a sync changes no metadata.
const ALLOCATE_AHEAD_BYTES: u64 = 1 << 20;
/// Batches this large gain nothing from it.
const LARGE_WRITE_BYTES: usize = 256 << 10;
/// How much of it is written at once.
const ZERO_CHUNK_BYTES: usize = 64 << 10;

/// What a fault test may make fail.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum DiskOp {
    Create,
    Write,
    Sync,
    Rename,
}

/// Asked before each operation on the disk; an error makes it fail (a write, half-way through).
pub type FaultHook = Arc<dyn Fn(DiskOp) -> io::Result<()> + Send + Sync>;

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct FileHeader {
    pub salt: u32,
    /// A segment's own number; in a snapshot, the first segment that is not part of it.
    pub sequence: u64,
    /// The newest revision before this file, or in this snapshot.
    pub base_revision: u64,
    /// Where the segment before ended (0: there is none) and the `crc` of its last record.
    pub prev_end: u64,
    pub last_crc: u32,
}

impl FileHeader {
    pub fn new(sequence: u64, base_revision: u64, prev_end: u64, last_crc: u32) -> FileHeader {
        let salt = RandomState::new().build_hasher().finish() as u32;
        FileHeader { salt, sequence, base_revision, prev_end, last_crc }
    }

    pub fn encode(&self, magic: [u8; 8]) -> [u8; HEADER_BYTES] {
        let mut out = [0; HEADER_BYTES];
        out[..8].copy_from_slice(&magic);
        out[8..12].copy_from_slice(&FORMAT_VERSION.to_le_bytes());
        out[12..16].copy_from_slice(&self.salt.to_le_bytes());
        out[16..24].copy_from_slice(&self.sequence.to_le_bytes());
        out[24..32].copy_from_slice(&self.base_revision.to_le_bytes());
        out[32..40].copy_from_slice(&self.prev_end.to_le_bytes());
        out[40..44].copy_from_slice(&self.last_crc.to_le_bytes());
        let crc = crc32c::crc32c(&out[..60]);
        out[60..].copy_from_slice(&crc.to_le_bytes());
        out
    }

    pub fn decode(bytes: &[u8; HEADER_BYTES], magic: [u8; 8]) -> Result<FileHeader, String> {
        let read_u32 =
            |at: usize| u32::from_le_bytes([bytes[at], bytes[at + 1], bytes[at + 2], bytes[at + 3]]);
        let read_u64 = |at: usize| u64::from(read_u32(at)) | u64::from(read_u32(at + 4)) << 32;
        if bytes[..8] != magic {
            return Err("this is no file of the store".into());
        }
        if read_u32(60) != crc32c::crc32c(&bytes[..60]) {
            return Err("the file's header is damaged".into());
        }
        if read_u32(8) != FORMAT_VERSION {
            return Err(format!("format version {} is not known, only {FORMAT_VERSION}", read_u32(8)));
        }
        Ok(FileHeader {
            salt: read_u32(12),
            sequence: read_u64(16),
            base_revision: read_u64(24),
            prev_end: read_u64(32),
            last_crc: read_u32(40),
        })
    }
}

pub fn segment_path(dir: &Path, sequence: u64) -> PathBuf {
    dir.join(format!("{sequence:016x}.log"))
}

pub fn snapshot_path(dir: &Path, sequence: u64) -> PathBuf {
    dir.join(format!("{sequence:016x}.snap"))
}

/// A new file readable by its owner alone; an old one of that name is emptied.
pub fn create_file(path: &Path, faults: &FaultHook) -> io::Result<File> {
    faults(DiskOp::Create)?;
    OpenOptions::new().read(true).write(true).create(true).truncate(true).mode(0o600).open(path)
}

/// Makes creations, renames and removals in the directory durable.
pub fn sync_dir(dir: &Path, faults: &FaultHook) -> io::Result<()> {
    faults(DiskOp::Sync)?;
    rustix::fs::fsync(File::open(dir)?).map_err(Into::into)
}

/// Gives a finished and synced file its name.
pub fn rename(from: &Path, to: &Path, faults: &FaultHook) -> io::Result<()> {
    faults(DiskOp::Rename)?;
    fs::rename(from, to)?;
    // The parent of a bare file name is an empty path.
    let parent = to.parent().filter(|parent| !parent.as_os_str().is_empty());
    sync_dir(parent.unwrap_or(Path::new(".")), faults)
}

/// The segment being written.
pub struct Segment {
    file: File,
    faults: FaultHook,
    salt: u32,
    pub sequence: u64,
    /// End of the records, and the `crc` of the last.
    pub position: u64,
    pub last_crc: u32,
    /// The same two as of the last successful sync.
    pub synced: u64,
    pub synced_crc: u32,
    /// End of the records that somebody has been told of.
    pub committed: u64,
    allocated: u64,
    buffer: Vec<u8>,
}

impl Segment {
    /// The file appears under its name whole: with header, zeros ahead and on disk.
    pub fn create(dir: &Path, header: FileHeader, faults: &FaultHook) -> io::Result<Segment> {
        let path = segment_path(dir, header.sequence);
        let temp_path = path.with_extension("log.tmp");
        let file = create_file(&temp_path, faults)?;
        let end = HEADER_BYTES as u64;
        let mut segment = Segment {
            file,
            faults: faults.clone(),
            salt: header.salt,
            sequence: header.sequence,
            position: 0,
            last_crc: header.last_crc,
            synced: end,
            synced_crc: header.last_crc,
            committed: end,
            allocated: 0,
            buffer: Vec::new(),
        };
        segment.append_bytes(&header.encode(LOG_MAGIC))?;
        (segment.faults)(DiskOp::Sync)?;
        rustix::fs::fsync(&segment.file)?;
        rename(&temp_path, &path, faults)?;
        Ok(segment)
    }

    /// Writes the records in one go; they are durable after the next [`Segment::sync`].
    /// After an error the segment must not be used again.
    pub fn append<'a>(&mut self, records: impl Iterator<Item = Record<'a>>) -> io::Result<()> {
        let mut buffer = std::mem::take(&mut self.buffer);
        buffer.clear();
        let mut last_crc = self.last_crc;
        for mut record in records {
            record.synced = self.synced;
            last_crc = record::encode(&mut buffer, self.salt, last_crc, &record);
        }
        self.append_bytes(&buffer)?;
        self.last_crc = last_crc;
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
            (self.faults)(DiskOp::Sync)?;
            rustix::fs::fdatasync(&self.file)?;
            self.synced = self.position;
            self.synced_crc = self.last_crc;
        }
        Ok(())
    }

    /// After a failure: cuts off the writes that were refused because of it, if the disk lets us. If it does
    /// not, they may be there after a restart, which is no worse than an answer lost on the way.
    pub fn truncate_to_committed(self) {
        let _ = self.file.set_len(self.committed);
    }

    fn append_bytes(&mut self, bytes: &[u8]) -> io::Result<()> {
        if let Err(error) = (self.faults)(DiskOp::Write) {
            self.file.write_all_at(&bytes[..bytes.len() / 2], self.position)?;
            return Err(error);
        }
        self.file.write_all_at(bytes, self.position)?;
        self.position += bytes.len() as u64;
        if self.position > self.allocated {
            self.allocated = self.position;
            let end = if bytes.len() < LARGE_WRITE_BYTES {
                self.position + ALLOCATE_AHEAD_BYTES
            } else {
                self.position
            };
            // Made when it is needed: as a constant it would be in the program, zero by zero.
            let zeros = vec![0; ZERO_CHUNK_BYTES.min((end - self.allocated) as usize)];
            while self.allocated < end {
                let len = zeros.len().min((end - self.allocated) as usize);
                self.file.write_all_at(&zeros[..len], self.allocated)?;
                self.allocated += len as u64;
            }
        }
        Ok(())
    }
}
