//! Sparse files as PAX headers describe them, in all three forms of GNU tar: what is in the archive are the parts that are
//! not empty, one after the other.

use std::ffi::OsString;
use std::fs::File;
use std::io::{self, Read, Seek as _, SeekFrom};
use std::os::unix::ffi::OsStringExt as _;
use std::path::PathBuf;

/// Nobody has a longer list of parts before a file.
const MAX_MAP_BYTES: usize = 1 << 20;

#[derive(Debug, Default)]
pub struct SparseFile {
    /// What the file is called. The name of the entry is for programs that do not know these.
    pub name: Option<PathBuf>,
    size: u64,
    /// Where each part begins and how long it is.
    segments: Vec<u64>,
    /// Whether these are before the content instead.
    is_map_inline: bool,
}

impl SparseFile {
    /// What the header of an entry says, if it is such a file.
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

/// How many parts there are, then the parts, each number in a line, in whole blocks.
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
