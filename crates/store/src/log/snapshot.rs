//! Snapshots: all live data at one revision in one file. A snapshot replaces the segments before
//! it, and is the format of backups.
//!
//! The file has a header and records like a segment. The last record contains the number of
//! records.

use std::fs;
use std::io::{self, BufWriter, Write as _};
use std::path::Path;
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::{Arc, PoisonError, RwLock};

use super::mvcc::MvccStore;
use super::record::{self, Record, RecordKind};
use super::segment::{self, DiskOp, FaultHook, FileHeader, SNAPSHOT_MAGIC};
use crate::Revision;

/// Keys that are copied (by reference) while the lock is held once, so that writes can continue.
const PAGE_KEYS: usize = 256;

/// Keeps all versions visible at one revision while it exists.
pub struct PinnedRevision {
    mvcc: Arc<RwLock<MvccStore>>,
    pub revision: Revision,
}

impl PinnedRevision {
    pub fn new(mvcc: &Arc<RwLock<MvccStore>>) -> PinnedRevision {
        let revision = mvcc.write().unwrap_or_else(PoisonError::into_inner).pin();
        PinnedRevision { mvcc: mvcc.clone(), revision }
    }
}

impl Drop for PinnedRevision {
    fn drop(&mut self) {
        self.mvcc.write().unwrap_or_else(PoisonError::into_inner).unpin(self.revision);
    }
}

/// Writes the pinned state to `path`. The file is complete and synced, or does not exist.
/// `sequence` is the first segment with later writes. `stop` cancels the snapshot.
pub fn write(
    pin: &PinnedRevision,
    path: &Path,
    sequence: u64,
    faults: &FaultHook,
    stop: &AtomicBool,
) -> io::Result<()> {
    let mut name = path.as_os_str().to_owned();
    name.push(".tmp");
    let temp_path = Path::new(&name);
    let result = write_temp_file(pin, temp_path, sequence, faults, stop)
        .and_then(|()| segment::rename(temp_path, path, faults));
    if result.is_err() {
        let _ = fs::remove_file(temp_path);
    }
    result
}

fn write_temp_file(
    pin: &PinnedRevision,
    path: &Path,
    sequence: u64,
    faults: &FaultHook,
    stop: &AtomicBool,
) -> io::Result<()> {
    let header = FileHeader::new(sequence, pin.revision, 0, 0);
    let mut file = BufWriter::with_capacity(256 << 10, segment::create_file(path, faults)?);
    file.write_all(&header.encode(SNAPSHOT_MAGIC))?;
    let (mut last_crc, mut count, mut after) = (header.last_crc, 0, None);
    let mut buffer = Vec::new();
    loop {
        let (page, last) = {
            let mvcc = pin.mvcc.read().unwrap_or_else(PoisonError::into_inner);
            mvcc.pinned_page(pin.revision, after.as_ref(), PAGE_KEYS)
        };
        faults(DiskOp::Write)?;
        if stop.load(Ordering::Relaxed) {
            return Err(io::Error::other("the store is closing"));
        }
        for change in &page {
            let value = change.value.as_deref().unwrap_or_default();
            buffer.clear();
            let record = Record {
                kind: RecordKind::Put,
                synced: 0,
                revision: change.revision,
                expires: change.expires,
                key: &change.key,
                value,
            };
            last_crc = record::encode(&mut buffer, header.salt, last_crc, &record);
            file.write_all(&buffer)?;
            count += 1;
        }
        after = last;
        if after.is_none() {
            break;
        }
    }
    buffer.clear();
    let end = Record {
        kind: RecordKind::End,
        synced: 0,
        revision: pin.revision,
        expires: count,
        key: "",
        value: &[],
    };
    record::encode(&mut buffer, header.salt, last_crc, &end);
    file.write_all(&buffer)?;
    faults(DiskOp::Sync)?;
    let file = file.into_inner().map_err(io::IntoInnerError::into_error)?;
    rustix::fs::fsync(&file).map_err(Into::into)
}

/// Removes segments and snapshots before `sequence`, which the snapshot replaces.
pub fn remove_obsolete_files(dir: &Path, sequence: u64, faults: &FaultHook) -> io::Result<()> {
    for file in fs::read_dir(dir)? {
        let file = file?;
        let name = file.file_name();
        let Some((number, extension)) = name.to_str().and_then(|name| name.split_once('.')) else { continue };
        let is_obsolete = u64::from_str_radix(number, 16).is_ok_and(|number| number < sequence);
        if is_obsolete && number.len() == 16 && matches!(extension, "log" | "snap") {
            fs::remove_file(file.path())?;
        }
    }
    segment::sync_dir(dir, faults)
}
