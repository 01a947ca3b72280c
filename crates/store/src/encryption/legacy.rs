//! AES-CBC and secretbox (XSalsa20-Poly1305) with local keys, for clusters that already use these
//! providers. Neither authenticates the key of the value in the store.

use aes::cipher::{BlockDecrypt, BlockEncrypt, KeyInit};
use aes::{Aes128, Aes192, Aes256, Block};
use bytes::Bytes;
use crypto_secretbox::aead::AeadInPlace as _;
use crypto_secretbox::{Nonce, XSalsa20Poly1305};
use ring::rand::{SecureRandom as _, SystemRandom};

use super::KeyError;

const BLOCK_BYTES: usize = 16;
const NONCE_BYTES: usize = 24;
const TAG_BYTES: usize = 16;

/// Named keys. The first one encrypts, all of them decrypt.
pub struct LegacyCipher {
    algorithm: LegacyAlgorithm,
    keys: Vec<(String, Key)>,
    random: SystemRandom,
}

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum LegacyAlgorithm {
    AesCbc,
    Secretbox,
}

enum Key {
    Aes128(Box<Aes128>),
    Aes192(Box<Aes192>),
    Aes256(Box<Aes256>),
    Salsa(Box<XSalsa20Poly1305>),
}

impl LegacyAlgorithm {
    fn prefix(self) -> &'static str {
        match self {
            LegacyAlgorithm::AesCbc => "k8s:enc:aescbc:v1:",
            LegacyAlgorithm::Secretbox => "k8s:enc:secretbox:v1:",
        }
    }

    fn key(self, secret: &[u8]) -> Result<Key, KeyError> {
        let wrong = |expected| KeyError::Length { got: secret.len(), expected };
        match self {
            LegacyAlgorithm::AesCbc => {
                const KEY_SIZES: &str = "[16 24 32]";
                let (small, middle, large) = (
                    Aes128::new_from_slice(secret),
                    Aes192::new_from_slice(secret),
                    Aes256::new_from_slice(secret),
                );
                let small = small.map(|key| Key::Aes128(Box::new(key)));
                let middle = middle.map(|key| Key::Aes192(Box::new(key)));
                let large = large.map(|key| Key::Aes256(Box::new(key)));
                small.or(middle).or(large).map_err(|_| wrong(KEY_SIZES))
            }
            LegacyAlgorithm::Secretbox => {
                let key = XSalsa20Poly1305::new_from_slice(secret).map_err(|_| wrong("[32]"))?;
                Ok(Key::Salsa(Box::new(key)))
            }
        }
    }
}

impl LegacyCipher {
    /// `keys` are pairs of a name and a secret.
    pub fn new(algorithm: LegacyAlgorithm, keys: &[(String, Vec<u8>)]) -> Result<LegacyCipher, KeyError> {
        let keys = keys.iter().map(|(name, secret)| Ok((name.clone(), algorithm.key(secret)?)));
        let keys = keys.collect::<Result<Vec<_>, _>>()?;
        match keys.is_empty() {
            true => Err(KeyError::NoKeys),
            false => Ok(LegacyCipher { algorithm, keys, random: SystemRandom::new() }),
        }
    }

    /// `None` if the system provides no random bytes.
    pub fn encrypt(&self, plain: &[u8]) -> Option<Bytes> {
        let (name, key) = self.keys.first()?;
        let mut out = format!("{}{name}:", self.algorithm.prefix()).into_bytes();
        match key {
            Key::Salsa(key) => {
                let mut nonce = [0; NONCE_BYTES];
                self.random.fill(&mut nonce).ok()?;
                let mut text = plain.to_vec();
                let tag = key.encrypt_in_place_detached(Nonce::from_slice(&nonce), b"", &mut text).ok()?;
                out.extend_from_slice(&nonce);
                out.extend_from_slice(&tag);
                out.extend_from_slice(&text);
            }
            key => {
                let mut last = [0; BLOCK_BYTES];
                self.random.fill(&mut last).ok()?;
                out.extend_from_slice(&last);
                // PKCS#7: always 1 to 16 bytes, each with the number of padding bytes.
                let padding = BLOCK_BYTES - plain.len() % BLOCK_BYTES;
                let padded = plain.iter().copied().chain(std::iter::repeat_n(padding as u8, padding));
                let padded: Vec<u8> = padded.collect();
                for chunk in padded.chunks_exact(BLOCK_BYTES) {
                    let mut block = Block::clone_from_slice(chunk);
                    block.iter_mut().zip(last).for_each(|(byte, before)| *byte ^= before);
                    key.encrypt_block(&mut block);
                    last.copy_from_slice(&block);
                    out.extend_from_slice(&block);
                }
            }
        }
        Some(out.into())
    }

    /// Returns the plain value, and whether it was encrypted with the first key. `Err(None)` if the
    /// value has another prefix.
    pub fn decrypt(&self, encrypted: &[u8]) -> Result<(Bytes, bool), Option<&'static str>> {
        let rest = encrypted.strip_prefix(self.algorithm.prefix().as_bytes()).ok_or(None)?;
        let mut message = "no matching key was found for the provided transformer";
        for (i, (name, key)) in self.keys.iter().enumerate() {
            let body_with_key = rest.strip_prefix(name.as_bytes()).and_then(|rest| rest.strip_prefix(b":"));
            let Some(body) = body_with_key else { continue };
            match key.decrypt(body) {
                Ok(plain) => return Ok((plain.into(), i == 0)),
                // Several keys may have the same name.
                Err(reason) => message = reason,
            }
        }
        Err(Some(message))
    }
}

impl Key {
    fn encrypt_block(&self, block: &mut Block) {
        match self {
            Key::Aes128(key) => key.encrypt_block(block),
            Key::Aes192(key) => key.encrypt_block(block),
            Key::Aes256(key) => key.encrypt_block(block),
            Key::Salsa(_) => {}
        }
    }

    fn decrypt_block(&self, block: &mut Block) {
        match self {
            Key::Aes128(key) => key.decrypt_block(block),
            Key::Aes192(key) => key.decrypt_block(block),
            Key::Aes256(key) => key.decrypt_block(block),
            Key::Salsa(_) => {}
        }
    }

    fn decrypt(&self, body: &[u8]) -> Result<Vec<u8>, &'static str> {
        const TOO_SHORT: &str = "the stored data was shorter than the required size";
        if let Key::Salsa(key) = self {
            let (nonce, rest) = body.split_at_checked(NONCE_BYTES).ok_or(TOO_SHORT)?;
            let (tag, text) = rest.split_at_checked(TAG_BYTES).ok_or(TOO_SHORT)?;
            let mut plain = text.to_vec();
            let result = key.decrypt_in_place_detached(Nonce::from_slice(nonce), b"", &mut plain, tag.into());
            return result.map(|()| plain).map_err(|_| "output array was not large enough for encryption");
        }
        let (mut last, text) = body.split_at_checked(BLOCK_BYTES).ok_or(TOO_SHORT)?;
        if text.is_empty() || !text.len().is_multiple_of(BLOCK_BYTES) {
            return Err("the stored data is not a multiple of the block size");
        }
        let mut plain = Vec::with_capacity(text.len());
        for chunk in text.chunks_exact(BLOCK_BYTES) {
            let mut block = Block::clone_from_slice(chunk);
            self.decrypt_block(&mut block);
            plain.extend(block.iter().zip(last).map(|(byte, before)| byte ^ before));
            last = chunk;
        }
        let padding = plain.last().copied().map_or(0, usize::from);
        let size = plain
            .len()
            .checked_sub(padding)
            .filter(|_| padding > 0)
            .ok_or("invalid PKCS7 data (empty or not padded)")?;
        if plain[size..].iter().any(|byte| usize::from(*byte) != padding) {
            return Err("invalid padding on input");
        }
        plain.truncate(size);
        Ok(plain)
    }
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;

    use super::*;

    fn test_cipher(algorithm: LegacyAlgorithm, names: &[&str], size: usize) -> LegacyCipher {
        let keys: Vec<_> = names
            .iter()
            .map(|name| ((*name).to_owned(), name.repeat(size).as_bytes()[..size].to_vec()))
            .collect();
        LegacyCipher::new(algorithm, &keys).unwrap()
    }

    proptest! {
        #[test]
        fn decrypt_round_trips(plain in proptest::collection::vec(any::<u8>(), 0..200), at in any::<usize>()) {
            for (algorithm, size) in [(LegacyAlgorithm::AesCbc, 16), (LegacyAlgorithm::AesCbc, 24), (LegacyAlgorithm::AesCbc, 32), (LegacyAlgorithm::Secretbox, 32)] {
                let cipher = test_cipher(algorithm, &["k1"], size);
                let encrypted = cipher.encrypt(&plain).unwrap();
                prop_assert_eq!(cipher.decrypt(&encrypted), Ok((plain.clone().into(), true)));
                prop_assert_eq!(test_cipher(algorithm, &["k2", "k1"], size).decrypt(&encrypted), Ok((plain.clone().into(), false)));
                prop_assert!(matches!(test_cipher(algorithm, &["k2"], size).decrypt(&encrypted), Err(Some(_))));
                let mut broken = encrypted.to_vec();
                let at = at % broken.len();
                broken[at] ^= 1;
                // Corrupt input never panics, and an authenticated cipher rejects it.
                let result = cipher.decrypt(&broken);
                prop_assert!(algorithm == LegacyAlgorithm::AesCbc || result.is_err());
                let _ = cipher.decrypt(&broken[..at]);
            }
        }
    }

    /// Published test vectors: NIST SP 800-38A, F.2.1, with a block of padding added, and those of
    /// NaCl.
    #[test]
    fn decrypt_matches_reference_vectors() {
        #[track_caller]
        fn check(algorithm: LegacyAlgorithm, prefix: &str, key: &str, encrypted: &str, plain: &str) {
            let hex = |text: &str| -> Vec<u8> {
                (0..text.len()).step_by(2).map(|i| u8::from_str_radix(&text[i..i + 2], 16).unwrap()).collect()
            };
            let cipher = LegacyCipher::new(algorithm, &[("k".to_owned(), hex(key))]).unwrap();
            let encrypted = [prefix.as_bytes(), &hex(encrypted)].concat();
            assert_eq!(cipher.decrypt(&encrypted), Ok((hex(plain).into(), true)));
        }
        check(
            LegacyAlgorithm::AesCbc,
            "k8s:enc:aescbc:v1:k:",
            "2b7e151628aed2a6abf7158809cf4f3c",
            "000102030405060708090a0b0c0d0e0f7649abac8119b246cee98e9b12e9197d8964e0b149c10b7b682e6e39aaeb731c",
            "6bc1bee22e409f96e93d7e117393172a",
        );
        check(
            LegacyAlgorithm::Secretbox,
            "k8s:enc:secretbox:v1:k:",
            "1b27556473e985d462cd51197a9a46c76009549eac6474f206c4ee0844f68389",
            concat!(
                "69696ee955b62b73cd62bda875fc73d68219e0036b7a0b37",
                "f3ffc7703f9400e52a7dfb4b3d3305d98e993b9f48681273c29650ba32fc76ce48332ea7164d96a4476fb8c531a1186a",
                "c0dfc17c98dce87b4da7f011ec48c97271d2c20f9b928fe2270d6fb863d51738b48eeee314a7cc8ab932164548e526ae",
                "90224368517acfeabd6bb3732bc0e9da99832b61ca01b6de56244a9e88d5f9b37973f622a43d14a6599b1f654cb45a74",
                "e355a5",
            ),
            concat!(
                "be075fc53c81f2d5cf141316ebeb0c7b5228c52a4c62cbd44b66849b64244ffce5ecbaaf33bd751a1ac728d45e6c6129",
                "6cdc3c01233561f41db66cce314adb310e3be8250c46f06dceea3a7fa1348057e2f6556ad6b1318a024a838f21af1fde",
                "048977eb48f59ffd4924ca1c60902e52f0a089bc76897040e082f937763848645e0705",
            ),
        );
    }

    #[test]
    fn rejects_invalid_key_sizes() {
        let wrong = |algorithm, size| {
            LegacyCipher::new(algorithm, &[("k".to_owned(), vec![1; size])])
                .err()
                .map(|error| error.to_string())
        };
        let expected = |sizes: &str| {
            Some(format!("secret is not of the expected length, got 17, expected one of {sizes}"))
        };
        assert_eq!(wrong(LegacyAlgorithm::AesCbc, 17), expected("[16 24 32]"));
        assert_eq!(wrong(LegacyAlgorithm::Secretbox, 17), expected("[32]"));
        assert_eq!(LegacyCipher::new(LegacyAlgorithm::Secretbox, &[]).err(), Some(KeyError::NoKeys));
    }
}
