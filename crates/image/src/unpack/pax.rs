//! PAX headers whose values contain newlines.
//!
//! A PAX record starts with its length, but the tar crate splits the header at newlines. A value
//! with a newline, such as file capabilities, is lost there, together with the size and owner
//! records after it. [`PaxEscapeReader`] filters the archive before the crate reads it and encodes
//! such values in hexadecimal; [`records`] decodes them.

use std::io::{self, Cursor, Read};

use tar::Header;

const TAR_BLOCK_BYTES: u64 = 512;
/// Limits headers of the next entry, which are held in memory.
const MAX_HEADER_BYTES: u64 = 1 << 20;
/// The offset of the flag in a GNU sparse block that announces another block.
const SPARSE_EXTENDED_OFFSET: usize = 504;
/// The key prefix of a value in hexadecimal.
const ESCAPED_KEY_PREFIX: &str = "SKIFF.hex.";

/// A tar archive without newlines in the values of its PAX headers.
pub struct PaxEscapeReader<R> {
    source: R,
    /// Bytes that are processed and not returned yet.
    ready: Cursor<Vec<u8>>,
    /// The remaining bytes of the current entry's content, which pass unchanged.
    left: u64,
    /// The file size of the next entry, if a PAX header sets it.
    size: Option<u64>,
}

impl<R: Read> PaxEscapeReader<R> {
    pub fn new(source: R) -> PaxEscapeReader<R> {
        PaxEscapeReader { source, ready: Cursor::default(), left: 0, size: None }
    }

    /// Processes the next header, including the content of PAX headers. Returns false at the end of
    /// the input.
    fn advance(&mut self) -> io::Result<bool> {
        let mut block = self.read_up_to(TAR_BLOCK_BYTES)?;
        if block.len() as u64 == TAR_BLOCK_BYTES {
            let mut header = Header::from_byte_slice(&block).clone();
            let kind = header.entry_type();
            let is_known = header.as_gnu().is_some() || header.as_ustar().is_some();
            let is_of_next = kind.is_gnu_longname()
                || kind.is_gnu_longlink()
                || kind.is_pax_local_extensions()
                || kind.is_pax_global_extensions();
            match header.entry_size() {
                Ok(size) if is_of_next && size > MAX_HEADER_BYTES => return Err(too_large()),
                Ok(size) if is_known && kind.is_pax_local_extensions() => {
                    let data = self.read_up_to(size.next_multiple_of(TAR_BLOCK_BYTES))?;
                    let known = data.get(..size as usize).unwrap_or(&data);
                    let escaped = escape_records(known);
                    self.size = file_size(escaped.as_deref().unwrap_or(known));
                    block = match escaped {
                        None => [block, data].concat(),
                        Some(mut escaped) => {
                            header.set_size(escaped.len() as u64);
                            header.set_cksum();
                            escaped.resize(escaped.len().next_multiple_of(TAR_BLOCK_BYTES as usize), 0);
                            [&header.as_bytes()[..], &escaped].concat()
                        }
                    };
                }
                Ok(size) => {
                    let gnu = header.as_gnu().filter(|_| kind.is_gnu_sparse());
                    let mut is_extended = gnu.is_some_and(tar::GnuHeader::is_extended);
                    while is_extended {
                        let more = self.read_up_to(TAR_BLOCK_BYTES)?;
                        is_extended = more.get(SPARSE_EXTENDED_OFFSET) == Some(&1);
                        block.extend(more);
                        if block.len() as u64 > MAX_HEADER_BYTES {
                            return Err(too_large());
                        }
                    }
                    let size = if is_of_next { size } else { self.size.take().unwrap_or(size) };
                    self.left = size.checked_next_multiple_of(TAR_BLOCK_BYTES).unwrap_or(u64::MAX);
                }
                // The size is invalid. The rest passes unchanged, and the tar crate reports the
                // error.
                Err(_) => self.left = u64::MAX,
            }
        }
        let is_any = !block.is_empty();
        self.ready = Cursor::new(block);
        Ok(is_any)
    }

    fn read_up_to(&mut self, most: u64) -> io::Result<Vec<u8>> {
        let mut bytes = Vec::new();
        (&mut self.source).take(most).read_to_end(&mut bytes)?;
        Ok(bytes)
    }
}

impl<R: Read> Read for PaxEscapeReader<R> {
    fn read(&mut self, buffer: &mut [u8]) -> io::Result<usize> {
        loop {
            let count = self.ready.read(buffer)?;
            if count > 0 || buffer.is_empty() {
                return Ok(count);
            }
            if self.left > 0 {
                let most = usize::try_from(self.left).unwrap_or(usize::MAX).min(buffer.len());
                let count = self.source.read(&mut buffer[..most])?;
                self.left -= count as u64;
                return Ok(count);
            }
            if !self.advance()? {
                return Ok(0);
            }
        }
    }
}

fn too_large() -> io::Error {
    io::Error::new(io::ErrorKind::InvalidData, format!("header is larger than {MAX_HEADER_BYTES} bytes"))
}

/// The PAX records of an entry. Invalid records are omitted.
pub fn records(entry: &mut tar::Entry<'_, impl Read>) -> io::Result<Vec<(String, Vec<u8>)>> {
    let extensions = entry.pax_extensions()?.into_iter().flatten().flatten();
    let record = |extension: tar::PaxExtension<'_>| {
        let (key, value) = (extension.key().ok()?, extension.value_bytes());
        match key.strip_prefix(ESCAPED_KEY_PREFIX) {
            Some(key) => Some((key.to_owned(), from_hex(value)?)),
            None => Some((key.to_owned(), value.to_owned())),
        }
    };
    Ok(extensions.filter_map(record).collect())
}

/// Encodes values with newlines. `None` if there are none, or if the header is malformed.
fn escape_records(bytes: &[u8]) -> Option<Vec<u8>> {
    let mut records = Vec::new();
    let mut rest = bytes;
    while !rest.is_empty() {
        let space = rest.iter().position(|byte| *byte == b' ')?;
        let length: usize = std::str::from_utf8(&rest[..space]).ok()?.parse().ok()?;
        let record = rest.get(space + 1..length)?.strip_suffix(b"\n")?;
        let equals = record.iter().position(|byte| *byte == b'=')?;
        records.push((&record[..equals], &record[equals + 1..]));
        rest = &rest[length..];
    }
    let has_newline = |value: &[u8]| value.contains(&b'\n');
    if !records.iter().any(|(_, value)| has_newline(value)) {
        return None;
    }
    let mut written = Vec::new();
    for (key, value) in records {
        if has_newline(value) {
            write_record(
                &mut written,
                &[ESCAPED_KEY_PREFIX.as_bytes(), key].concat(),
                to_hex(value).as_bytes(),
            );
        } else {
            write_record(&mut written, key, value);
        }
    }
    Some(written)
}

/// Writes a record. Its length field includes the digits of the length itself.
fn write_record(to: &mut Vec<u8>, key: &[u8], value: &[u8]) {
    let others = key.len() + value.len() + 3;
    let mut length = others + 1;
    while others + length.to_string().len() != length {
        length = others + length.to_string().len();
    }
    to.extend_from_slice(format!("{length} ").as_bytes());
    to.extend_from_slice(&[key, b"=", value, b"\n"].concat());
}

/// Finds the size as the tar crate does, so that both agree on the start of the next header.
fn file_size(records: &[u8]) -> Option<u64> {
    for record in tar::PaxExtensions::new(records) {
        let record = record.ok()?;
        if record.key() == Ok("size") {
            return record.value().ok()?.parse().ok();
        }
    }
    None
}

fn to_hex(bytes: &[u8]) -> String {
    bytes.iter().map(|byte| format!("{byte:02x}")).collect()
}

fn from_hex(text: &[u8]) -> Option<Vec<u8>> {
    let pairs = text.chunks(2).map(|pair| u8::from_str_radix(std::str::from_utf8(pair).ok()?, 16).ok());
    pairs.collect()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[track_caller]
    fn check(header: &[u8], expected: Option<&[u8]>) {
        let to_text = |bytes: &[u8]| String::from_utf8_lossy(bytes).into_owned();
        assert_eq!(escape_records(header).as_deref().map(to_text), expected.map(to_text));
    }

    #[test]
    fn escapes_only_values_with_newlines() {
        check(b"", None);
        check(b"8 a=bcd\n7 e=fg\n", None);
        check(b"8 a=b\nd\n7 e=fg\n", Some(b"22 SKIFF.hex.a=620a64\n7 e=fg\n"));
        // Malformed headers.
        for header in
            [&b"8 a=b\nd"[..], b"7 a=b\nd\n", b"99 a=b\nd\n", b"x a=\n\n", b"8 a\nbcd\n", b"1 a=\nb\n"]
        {
            check(header, None);
        }
        assert_eq!(from_hex(b"620a64"), Some(b"b\nd".to_vec()));
        assert_eq!(from_hex(b"xy"), None);
    }

    /// The header of an entry without its content.
    fn header(kind: u8, size: u64) -> Header {
        let mut header = Header::new_gnu();
        header.set_entry_type(tar::EntryType::new(kind));
        header.set_size(size);
        header.set_cksum();
        header
    }

    #[test]
    fn rejects_headers_above_the_size_limit() {
        let read = |archive: Vec<u8>| {
            let source = archive.chain(io::repeat(b'x').take(4 << 20));
            let mut archive = tar::Archive::new(PaxEscapeReader::new(source));
            archive.entries()?.try_for_each(|entry| entry.map(drop))
        };
        let mut sparse = header(b'S', 0);
        let gnu = sparse.as_gnu_mut().unwrap();
        (gnu.isextended, gnu.realsize) = ([1], *b"00000000000\0");
        sparse.set_cksum();
        let sparse = [&sparse.as_bytes()[..], &[0; 512]].concat();
        for kind in [b'L', b'K', b'x', b'g'] {
            let large = header(kind, MAX_HEADER_BYTES + 1).as_bytes().to_vec();
            for archive in [large.clone(), [&sparse[..], &large].concat()] {
                let message = read(archive).unwrap_err().to_string();
                assert_eq!(message, "header is larger than 1048576 bytes", "{}", char::from(kind));
            }
        }
        let mut large_header = [1; 512].repeat(3000);
        large_header.splice(..512, sparse[..512].iter().copied());
        assert_eq!(read(large_header).unwrap_err().to_string(), "header is larger than 1048576 bytes");
    }

    #[test]
    fn record_length_includes_its_own_digits() {
        for length in 90..=100 {
            let mut written = Vec::new();
            write_record(&mut written, b"k", &vec![b'v'; length]);
            let recorded_length: usize =
                String::from_utf8_lossy(&written).split(' ').next().unwrap().parse().unwrap();
            assert_eq!(recorded_length, written.len());
        }
    }
}
