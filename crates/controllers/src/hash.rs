//! Short names for templates: a hash in letters and digits that spell no words.

use std::io;

use serde::Serialize;

/// What generated names are spelled with: no vowels, and nothing that looks like another.
const SAFE_CHARS: &[u8] = b"bcdfghjklmnpqrstvwxz2456789";

/// The hash of an object's JSON form, told apart from others of the same object by `collisions`. The same for
/// ever: a field that a later version adds changes nothing for as long as it is not set.
pub fn hash_object(object: &impl Serialize, collisions: Option<i32>) -> String {
    let mut hasher = Fnv32a::default();
    // Nothing that the API holds fails to be written as JSON, and writing into a number never fails.
    let _ = serde_json::to_writer(&mut hasher, object);
    if let Some(collisions) = collisions {
        hasher.add(&collisions.to_le_bytes());
    }
    safe_encode(hasher.0)
}

/// A hash as it appears in names: its decimal digits, each spelled by a letter.
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
