//! Content digests as in the OCI image specification. Only SHA-256 is supported.

use std::fmt;
use std::io::{self, Read};

use serde::{Deserialize, Serialize};
use sha2::{Digest as _, Sha256};

/// `sha256:` and 64 lower-case hexadecimal digits. No other text is accepted, so a digest is safe
/// as part of a path.
#[derive(Clone, Debug, PartialEq, Eq, Hash, PartialOrd, Ord, Serialize, Deserialize)]
#[serde(try_from = "String", into = "String")]
pub struct Digest(String);

impl Digest {
    pub fn parse(text: &str) -> Option<Digest> {
        let hex = text.strip_prefix("sha256:")?;
        let is_valid = hex.len() == 64 && hex.bytes().all(|byte| matches!(byte, b'0'..=b'9' | b'a'..=b'f'));
        is_valid.then(|| Digest(text.to_owned()))
    }

    pub fn of(bytes: &[u8]) -> Digest {
        Digest::from_hash(Sha256::new_with_prefix(bytes))
    }

    pub(crate) fn from_hash(hash: Sha256) -> Digest {
        let mut text = "sha256:".to_owned();
        for byte in hash.finalize() {
            text.push_str(&format!("{byte:02x}"));
        }
        Digest(text)
    }

    /// The hexadecimal digits without the algorithm.
    pub fn hex(&self) -> &str {
        self.0.strip_prefix("sha256:").unwrap_or(&self.0)
    }

    /// The chain ID of a layer on top of the layers with the chain ID `below`, as the OCI image
    /// specification defines it.
    pub fn chain_id(below: Option<&Digest>, layer: &Digest) -> Digest {
        match below {
            None => layer.clone(),
            Some(below) => Digest::of(format!("{below} {layer}").as_bytes()),
        }
    }
}

impl fmt::Display for Digest {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(&self.0)
    }
}

impl From<Digest> for String {
    fn from(digest: Digest) -> String {
        digest.0
    }
}

impl TryFrom<String> for Digest {
    type Error = String;

    fn try_from(text: String) -> Result<Digest, String> {
        Digest::parse(&text).ok_or_else(|| format!("{text:?} is not a digest"))
    }
}

/// Computes the digest of the bytes read through it.
pub struct DigestReader<R> {
    inner: R,
    hash: Sha256,
    length: u64,
}

impl<R: Read> DigestReader<R> {
    pub fn new(inner: R) -> DigestReader<R> {
        DigestReader { inner, hash: Sha256::new(), length: 0 }
    }

    /// Reads the rest of the input. Returns the digest and the length of the whole input.
    pub fn finish(mut self) -> io::Result<(Digest, u64)> {
        io::copy(&mut self, &mut io::sink())?;
        Ok((Digest::from_hash(self.hash), self.length))
    }
}

impl<R: Read> Read for DigestReader<R> {
    fn read(&mut self, buffer: &mut [u8]) -> io::Result<usize> {
        let count = self.inner.read(buffer)?;
        self.hash.update(&buffer[..count]);
        self.length += count as u64;
        Ok(count)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn accepts_only_complete_digests() {
        let good = Digest::of(b"").to_string();
        assert_eq!(good, "sha256:e3b0c44298fc1c149afbf4c8996fb92427ae41e4649b934ca495991b7852b855");
        let bad = ["", "sha256:", "sha256:../../etc/passwd", &good[..70], "sha512:00"];
        assert!(Digest::parse(&good).is_some() && bad.iter().all(|text| Digest::parse(text).is_none()));
        assert!(Digest::parse(&good.to_uppercase()).is_none());
    }
}
