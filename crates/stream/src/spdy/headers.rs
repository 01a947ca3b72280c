//! SPDY header blocks: one zlib stream per direction, with a preset dictionary.
//!
//! Received blocks are decompressed. Sent blocks are stored without compression, because their
//! total size is a few dozen bytes.

use std::io;
use std::sync::LazyLock;

use miniz_oxide::inflate::TINFLStatus;
use miniz_oxide::inflate::core::{DecompressorOxide, decompress, inflate_flags};

use super::{invalid, read_u32};

/// The window size of deflate.
const WINDOW_BYTES: usize = 32 << 10;
const MAX_HEADERS: u32 = 100;
const MAX_HEADER_BYTES: usize = 64 << 10;

/// The dictionary of SPDY/3: these words, each with a length prefix, followed by the text.
const DICTIONARY_WORDS: &str = "options head post put delete trace accept accept-charset accept-encoding accept-language \
    accept-ranges age allow authorization cache-control connection content-base content-encoding content-language \
    content-length content-location content-md5 content-range content-type date etag expect expires from host if-match \
    if-modified-since if-none-match if-range if-unmodified-since last-modified location max-forwards pragma \
    proxy-authenticate proxy-authorization range referer retry-after server te trailer transfer-encoding upgrade \
    user-agent vary via warning www-authenticate method get status 200_OK version HTTP/1.1 url public set-cookie \
    keep-alive origin";
const DICTIONARY_TEXT: &str = "100101201202205206300302303304305306307402405406407408409410411412413414415416417502504505203 \
    Non-Authoritative Information204 No Content301 Moved Permanently400 Bad Request401 Unauthorized403 Forbidden404 Not \
    Found500 Internal Server Error501 Not Implemented503 Service UnavailableJan Feb Mar Apr May Jun Jul Aug Sept Oct Nov \
    Dec 00:00:00 Mon, Tue, Wed, Thu, Fri, Sat, Sun, GMTchunked,text/html,image/png,image/jpg,image/gif,application/xml,\
    application/xhtml+xml,text/plain,text/javascript,publicprivatemax-age=gzip,deflate,sdchcharset=utf-8charset=\
    iso-8859-1,utf-,*,enq=0.";

static DICTIONARY: LazyLock<Vec<u8>> = LazyLock::new(|| {
    let mut bytes = Vec::new();
    for word in DICTIONARY_WORDS.split_whitespace() {
        let length = u32::try_from(word.len()).unwrap_or_default();
        bytes.extend(length.to_be_bytes());
        bytes.extend(word.replace('_', " ").bytes());
    }
    bytes.extend(DICTIONARY_TEXT.bytes());
    bytes
});

/// The decompression state of a connection. Later blocks refer to earlier ones.
pub struct HeaderDecompressor {
    state: Box<DecompressorOxide>,
    window: Vec<u8>,
    position: usize,
    /// The remaining bytes of the zlib header and dictionary checksum before the first block.
    prefix_bytes: usize,
}

impl HeaderDecompressor {
    pub fn new() -> HeaderDecompressor {
        let mut window = vec![0; WINDOW_BYTES];
        window[..DICTIONARY.len()].copy_from_slice(&DICTIONARY);
        HeaderDecompressor { state: Box::default(), window, position: DICTIONARY.len(), prefix_bytes: 6 }
    }

    /// The headers in a block.
    pub fn decompress_headers(&mut self, block: &[u8]) -> io::Result<Vec<(String, String)>> {
        let skipped = self.prefix_bytes.min(block.len());
        // The FDICT bit of the second byte. Without a dictionary, there is no checksum.
        if self.prefix_bytes == 6 && block.get(1).is_some_and(|flags| flags & 0x20 == 0) {
            self.prefix_bytes = 0;
            return self.decompress_headers(block.get(2..).unwrap_or_default());
        }
        self.prefix_bytes -= skipped;
        parse(&self.decompress_block(&block[skipped..])?)
    }

    fn decompress_block(&mut self, mut block: &[u8]) -> io::Result<Vec<u8>> {
        let mut text = Vec::new();
        loop {
            let flags = inflate_flags::TINFL_FLAG_HAS_MORE_INPUT;
            let (status, read, written) =
                decompress(&mut self.state, block, &mut self.window, self.position, flags);
            block = block.get(read..).unwrap_or_default();
            text.extend_from_slice(&self.window[self.position..self.position + written]);
            self.position = (self.position + written) % WINDOW_BYTES;
            if text.len() > MAX_HEADER_BYTES {
                return Err(invalid("headers are too long"));
            }
            match status {
                TINFLStatus::NeedsMoreInput | TINFLStatus::Done => return Ok(text),
                TINFLStatus::HasMoreOutput => {}
                _ => return Err(invalid("cannot decompress headers")),
            }
        }
    }
}

fn parse(text: &[u8]) -> io::Result<Vec<(String, String)>> {
    let count = read_u32(text, 0)?;
    if count > MAX_HEADERS {
        return Err(invalid("too many headers"));
    }
    let mut at = 4;
    let mut word = || -> io::Result<String> {
        let length = read_u32(text, at)? as usize;
        let bytes = text.get(at + 4..).and_then(|rest| rest.get(..length));
        at += 4 + length;
        bytes
            .map(|bytes| String::from_utf8_lossy(bytes).into_owned())
            .ok_or_else(|| invalid("header is truncated"))
    };
    (0..count).map(|_| Ok((word()?, word()?))).collect()
}

/// Encodes headers without compression.
pub fn encode_headers(headers: &[(&str, &str)]) -> Vec<u8> {
    let count = |count: usize| u32::try_from(count).unwrap_or(u32::MAX).to_be_bytes();
    let mut text = count(headers.len()).to_vec();
    for word in headers.iter().flat_map(|(name, value)| [name, value]) {
        text.extend(count(word.len()));
        text.extend(word.bytes());
    }
    text
}

/// Wraps encoded headers in a stored deflate block.
pub fn stored_block(text: &[u8], is_first: bool) -> Vec<u8> {
    let length = u16::try_from(text.len()).unwrap_or_default();
    let start: &[u8] = if is_first { &[0x78, 0x01] } else { &[] };
    // An empty stored block flushes the stream (Z_SYNC_FLUSH), so that the peer can decode the
    // headers at once.
    let end = [0, 0, 0, 0xff, 0xff];
    [start, &[0], &length.to_le_bytes(), &(!length).to_le_bytes(), text, &end].concat()
}

#[cfg(test)]
pub fn dictionary() -> &'static [u8] {
    &DICTIONARY
}
