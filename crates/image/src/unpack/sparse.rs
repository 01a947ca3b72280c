//! Sparse files in PAX format, in the versions 0.0, 0.1 and 1.0 of GNU tar. The archive contains
//! only the data segments, one after the other.

use std::ffi::OsString;
use std::fs::File;
use std::io::{self, Read, Seek as _, SeekFrom};
use std::os::unix::ffi::OsStringExt as _;
use std::path::PathBuf;

/// Limits the size of the segment map, which is held in memory.
const MAX_MAP_BYTES: usize = 1 << 20;

/// The sparse file records of a PAX header.
#[derive(Debug, Default)]
pub struct SparseFile {
    /// The real file name. The name of the tar entry is a placeholder for programs without support
    /// for this format.
    pub name: Option<PathBuf>,
    size: u64,
    /// Offset and length of each segment, alternating.
    segments: Vec<u64>,
    /// Version 1.0: the map is at the start of the content, not in the header.
    is_map_inline: bool,
}

impl SparseFile {
    /// Reads the `GNU.sparse.*` records of an entry. `None` if it is not a sparse file.
    pub fn from_records(records: Vec<(String, Vec<u8>)>) -> io::Result<Option<SparseFile>> {
        let mut sparse = None;
        for (key, value) in records {
            let Some(key) = key.strip_prefix("GNU.sparse.") else { continue };
            let sparse = sparse.get_or_insert_with(SparseFile::default);
            match key {
                "name" => sparse.name = Some(OsString::from_vec(value).into()),
                "size" | "realsize" => sparse.size = number(&value)?,
                "major" => sparse.is_map_inline = value == b"1",
                "offset" | "numbytes" => sparse.segments.push(number(&value)?),
                "map" => {
                    sparse.segments =
                        value.split(|byte| *byte == b',').map(number).collect::<io::Result<_>>()?
                }
                _ => {}
            }
        }
        Ok(sparse)
    }

    pub fn write(mut self, mut content: impl Read, file: &mut File) -> io::Result<()> {
        if self.is_map_inline {
            self.segments = read_map(&mut content)?;
        }
        file.set_len(self.size)?;
        for part in self.segments.chunks(2) {
            let &[from, length] = part else { return Err(io::ErrorKind::InvalidData.into()) };
            if from.checked_add(length).is_none_or(|end| end > self.size) {
                return Err(io::ErrorKind::InvalidData.into());
            }
            file.seek(SeekFrom::Start(from))?;
            if io::copy(&mut (&mut content).take(length), file)? < length {
                return Err(io::ErrorKind::UnexpectedEof.into());
            }
        }
        Ok(())
    }
}

/// Reads the map of version 1.0: the number of segments, then offset and length of each, one number
/// per line, padded to blocks of 512 bytes.
fn read_map(content: &mut impl Read) -> io::Result<Vec<u64>> {
    let mut text = Vec::new();
    while text.len() < MAX_MAP_BYTES {
        let mut block = [0; 512];
        content.read_exact(&mut block)?;
        text.extend(block);
        let lines = text.iter().filter(|byte| **byte == b'\n').count();
        let mut numbers = text.split(|byte| *byte == b'\n').take(lines);
        let count = numbers.next().map(number).transpose()?;
        if let Some(count) = count.and_then(|count| usize::try_from(count).ok()?.checked_mul(2))
            && lines > count
        {
            return numbers.take(count).map(number).collect();
        }
    }
    Err(io::ErrorKind::InvalidData.into())
}

fn number(text: &[u8]) -> io::Result<u64> {
    let number = std::str::from_utf8(text).ok().and_then(|text| text.parse().ok());
    number.ok_or_else(|| io::ErrorKind::InvalidData.into())
}
