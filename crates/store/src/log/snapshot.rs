//! All live data of one revision in one file: what lets old segments go, and what a backup is.
//!
//! The file has a segment's form: a header, then records, then one that says how many there were.

use std::fs;
use std::io::{self, BufWriter, Write as _};
use std::path::Path;
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::{Arc, PoisonError, RwLock};

use super::memory::Memory;
use super::record::{self, Kind, Record};
use super::segment::{self, Faults, Header, Op, SNAPSHOT_MAGIC};
use crate::Revision;

/// Keys copied (by reference) under one hold of the lock, so that writes go on meanwhile.
const PART: usize = 256;

/// Holds on to the versions of one revision for as long as it lives.
pub struct Pin {
    memory: Arc<RwLock<Memory>>,
    pub revision: Revision,
}

impl Pin {
    pub fn new(memory: &Arc<RwLock<Memory>>) -> Pin {
        let revision = memory.write().unwrap_or_else(PoisonError::into_inner).pin();
        Pin { memory: memory.clone(), revision }
    }
}

impl Drop for Pin {
    fn drop(&mut self) {
        self.memory.write().unwrap_or_else(PoisonError::into_inner).unpin(self.revision);
    }
}

/// Writes the pinned state to `path`, which appears whole and synced or not at all. `sequence` is the first
/// segment with later writes; `stop` gives up.
pub fn write(pin: &Pin, path: &Path, sequence: u64, faults: &Faults, stop: &AtomicBool) -> io::Result<()> {
    let mut name = path.as_os_str().to_owned();
    name.push(".tmp");
    let temporary = Path::new(&name);
    let written = write_temporary(pin, temporary, sequence, faults, stop)
        .and_then(|()| segment::rename(temporary, path, faults));
    if written.is_err() {
        let _ = fs::remove_file(temporary);
    }
    written
}

fn write_temporary(
    pin: &Pin,
    path: &Path,
    sequence: u64,
    faults: &Faults,
    stop: &AtomicBool,
) -> io::Result<()> {
    let header = Header::new(sequence, pin.revision, 0, 0);
    let mut file = BufWriter::with_capacity(256 << 10, segment::create_file(path, faults)?);
    file.write_all(&header.encode(SNAPSHOT_MAGIC))?;
    let (mut chain, mut count, mut after) = (header.chain, 0, None);
    let mut buffer = Vec::new();
    loop {
        let (part, last) = {
            let memory = pin.memory.read().unwrap_or_else(PoisonError::into_inner);
            memory.pinned_part(pin.revision, after.as_ref(), PART)
        };
        faults(Op::Write)?;
        if stop.load(Ordering::Relaxed) {
            return Err(io::Error::other("the store is closing"));
        }
        for change in &part {
            let value = change.value.as_deref().unwrap_or_default();
            buffer.clear();
            let record = Record {
                kind: Kind::Put,
                synced: 0,
                revision: change.revision,
                expires: change.expires,
                key: &change.key,
                value,
            };
            chain = record::encode(&mut buffer, header.salt, chain, &record);
            file.write_all(&buffer)?;
            count += 1;
        }
        after = last;
        if after.is_none() {
            break;
        }
    }
    buffer.clear();
    let end =
        Record { kind: Kind::End, synced: 0, revision: pin.revision, expires: count, key: "", value: &[] };
    record::encode(&mut buffer, header.salt, chain, &end);
    file.write_all(&buffer)?;
    faults(Op::Sync)?;
    let file = file.into_inner().map_err(io::IntoInnerError::into_error)?;
    rustix::fs::fsync(&file).map_err(Into::into)
}

/// Removes what a snapshot has replaced: segments and snapshots before `sequence`.
pub fn remove_older(dir: &Path, sequence: u64, faults: &Faults) -> io::Result<()> {
    for file in fs::read_dir(dir)? {
        let file = file?;
        let name = file.file_name();
        let Some((number, kind)) = name.to_str().and_then(|name| name.split_once('.')) else { continue };
        let older = u64::from_str_radix(number, 16).is_ok_and(|number| number < sequence);
        if older && number.len() == 16 && matches!(kind, "log" | "snap") {
            fs::remove_file(file.path())?;
        }
    }
    segment::sync_dir(dir, faults)
}
