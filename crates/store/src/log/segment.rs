//! Log files: their header, and the segment that is appended to.
//!
//! Segment `n` continues segment `n - 1` at the end position in its header. So a log can continue
//! after a failed write: what the failed write left in the old segment is after that position and
//! is never read.

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

/// The file is filled with zeros this far ahead of the write position, so that fdatasync does not
/// have to update metadata.
const ALLOCATE_AHEAD_BYTES: u64 = 1 << 20;
/// Preallocation does not pay off for writes of this size.
const LARGE_WRITE_BYTES: usize = 256 << 10;
/// The number of zeros written at once.
const ZERO_CHUNK_BYTES: usize = 64 << 10;

/// Disk operations that a test can make fail.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum DiskOp {
    Create,
    Write,
    Sync,
    Rename,
}

/// Called before each disk operation. An error makes it fail (a write fails half-way).
pub type FaultHook = Arc<dyn Fn(DiskOp) -> io::Result<()> + Send + Sync>;

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct FileHeader {
    pub salt: u32,
    /// The number of a segment. In a snapshot, the number of the first segment after it.
    pub sequence: u64,
    /// The current revision before the first record of a segment. In a snapshot, the revision of the
    /// snapshot.
    pub base_revision: u64,
    /// The end of the previous segment (0: none) and the CRC of its last record.
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
            return Err("not a store file, wrong magic".into());
        }
        if read_u32(60) != crc32c::crc32c(&bytes[..60]) {
            return Err("file header checksum mismatch".into());
        }
        if read_u32(8) != FORMAT_VERSION {
            return Err(format!("format version {} is not supported, only {FORMAT_VERSION}", read_u32(8)));
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

/// Creates a file with mode 0600. An existing file is truncated.
pub fn create_file(path: &Path, faults: &FaultHook) -> io::Result<File> {
    faults(DiskOp::Create)?;
    OpenOptions::new().read(true).write(true).create(true).truncate(true).mode(0o600).open(path)
}

/// Makes file creations, renames and removals in the directory durable.
pub fn sync_dir(dir: &Path, faults: &FaultHook) -> io::Result<()> {
    faults(DiskOp::Sync)?;
    rustix::fs::fsync(File::open(dir)?).map_err(Into::into)
}

/// Renames a complete and synced file to its final name.
pub fn rename(from: &Path, to: &Path, faults: &FaultHook) -> io::Result<()> {
    faults(DiskOp::Rename)?;
    fs::rename(from, to)?;
    // The parent of a bare file name is the empty path.
    let parent = to.parent().filter(|parent| !parent.as_os_str().is_empty());
    sync_dir(parent.unwrap_or(Path::new(".")), faults)
}

/// The segment that is written.
pub struct Segment {
    file: File,
    faults: FaultHook,
    salt: u32,
    pub sequence: u64,
    /// The end of the last record, and its CRC.
    pub position: u64,
    pub last_crc: u32,
    /// The same two values as of the last successful sync.
    pub synced: u64,
    pub synced_crc: u32,
    /// The end of the records that have been acknowledged.
    pub committed: u64,
    allocated: u64,
    buffer: Vec<u8>,
}

impl Segment {
    /// Creates the file under a temporary name with its header and preallocated zeros, syncs and
    /// renames it.
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

    /// Appends the records with one write. They are durable after the next [`Segment::sync`]. After
    /// an error the segment must not be used again.
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
        // Frees the memory of a rare large batch.
        if buffer.capacity() <= 4 << 20 {
            self.buffer = buffer;
        }
        Ok(())
    }

    /// After an error the segment must not be used again: the kernel may have dropped the dirty
    /// pages and report success for the next sync.
    pub fn sync(&mut self) -> io::Result<()> {
        if self.synced < self.position {
            (self.faults)(DiskOp::Sync)?;
            rustix::fs::fdatasync(&self.file)?;
            self.synced = self.position;
            self.synced_crc = self.last_crc;
        }
        Ok(())
    }

    /// After a failure: truncates the writes that were rejected because of it. If that fails, they
    /// may reappear after a restart, which clients must handle anyway, as with a lost response.
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
            // Allocated at run time: a constant would take 64 KiB in the binary.
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
