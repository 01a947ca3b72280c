//! Hashes of pod templates for generated names.

use std::io;

use serde::Serialize;

/// Characters of generated names: no vowels, which avoids words, and no lookalikes (upstream's
/// `SafeEncodeString`).
const SAFE_CHARS: &[u8] = b"bcdfghjklmnpqrstvwxz2456789";

/// The hash of an object's JSON form. A different collision count yields a different hash. The hash stays
/// stable across versions, because unset fields are not serialized.
pub fn hash_object(object: &impl Serialize, collisions: Option<i32>) -> String {
    let mut hasher = Fnv32a::default();
    // API objects always serialize to JSON, and writing to the hasher cannot fail.
    let _ = serde_json::to_writer(&mut hasher, object);
    if let Some(collisions) = collisions {
        hasher.add(&collisions.to_le_bytes());
    }
    safe_encode(hasher.0)
}

/// Encodes the decimal digits of a hash with safe characters.
pub fn safe_encode(hash: u32) -> String {
    hash.to_string()
        .bytes()
        .map(|digit| char::from(SAFE_CHARS[usize::from(digit) % SAFE_CHARS.len()]))
        .collect()
}

/// 32-bit FNV-1a.
pub struct Fnv32a(pub u32);

impl Default for Fnv32a {
    fn default() -> Self {
        Fnv32a(0x811c_9dc5)
    }
}

impl Fnv32a {
    pub fn add(&mut self, bytes: &[u8]) {
        for byte in bytes {
            self.0 = (self.0 ^ u32::from(*byte)).wrapping_mul(0x0100_0193);
        }
    }
}

impl io::Write for Fnv32a {
    fn write(&mut self, bytes: &[u8]) -> io::Result<usize> {
        self.add(bytes);
        Ok(bytes.len())
    }

    fn flush(&mut self) -> io::Result<()> {
        Ok(())
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn matches_fnv_test_vectors() {
        for (text, expected) in [("", 0x811c_9dc5), ("a", 0xe40c_292c), ("foobar", 0xbf9c_f968)] {
            let mut hasher = Fnv32a::default();
            hasher.add(text.as_bytes());
            assert_eq!(hasher.0, expected, "{text}");
        }
        assert_eq!(safe_encode(1_234_567_890), "56789bcdf4");
    }

    #[test]
    fn collision_count_changes_hash() {
        let hashes = [None, Some(0), Some(1)].map(|collisions| hash_object(&"template", collisions));
        assert_ne!(hashes[0], hashes[1]);
        assert_ne!(hashes[1], hashes[2]);
        assert_eq!(hashes[0], hash_object(&"template", None));
    }
}
