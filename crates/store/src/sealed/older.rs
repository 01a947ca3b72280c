//! AES in CBC mode and XSalsa20 with Poly1305, with keys from a file: what clusters come from that were
//! encrypted before there was better. Neither binds a value to its place.

use aes::cipher::{BlockDecrypt, BlockEncrypt, KeyInit};
use aes::{Aes128, Aes192, Aes256, Block};
use bytes::Bytes;
use crypto_secretbox::aead::AeadInPlace as _;
use crypto_secretbox::{Nonce, XSalsa20Poly1305};
use ring::rand::{SecureRandom as _, SystemRandom};

use super::KeyError;

const BLOCK: usize = 16;
const NONCE: usize = 24;
const TAG: usize = 16;

/// Keys by name: the first one seals, all of them open.
pub struct Older {
    kind: Kind,
    keys: Vec<(String, Key)>,
    random: SystemRandom,
}

/// Which of the two.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Kind {
    AesCbc,
    Secretbox,
}

enum Key {
    Aes128(Box<Aes128>),
    Aes192(Box<Aes192>),
    Aes256(Box<Aes256>),
    Salsa(Box<XSalsa20Poly1305>),
}

impl Kind {
    fn prefix(self) -> &'static str {
        match self {
            Kind::AesCbc => "k8s:enc:aescbc:v1:",
            Kind::Secretbox => "k8s:enc:secretbox:v1:",
        }
    }

    fn key(self, secret: &[u8]) -> Result<Key, KeyError> {
        let wrong = |expected| KeyError::Length { got: secret.len(), expected };
        match self {
            Kind::AesCbc => {
                const SIZES: &str = "[16 24 32]";
                let (small, middle, large) = (
                    Aes128::new_from_slice(secret),
                    Aes192::new_from_slice(secret),
                    Aes256::new_from_slice(secret),
                );
                let small = small.map(|key| Key::Aes128(Box::new(key)));
                let middle = middle.map(|key| Key::Aes192(Box::new(key)));
                let large = large.map(|key| Key::Aes256(Box::new(key)));
                small.or(middle).or(large).map_err(|_| wrong(SIZES))
            }
            Kind::Secretbox => {
                let key = XSalsa20Poly1305::new_from_slice(secret).map_err(|_| wrong("[32]"))?;
                Ok(Key::Salsa(Box::new(key)))
            }
        }
    }
}

impl Older {
    /// Pairs of a name and a secret.
    pub fn new(kind: Kind, keys: &[(String, Vec<u8>)]) -> Result<Older, KeyError> {
        let keys = keys.iter().map(|(name, secret)| Ok((name.clone(), kind.key(secret)?)));
        let keys = keys.collect::<Result<Vec<_>, _>>()?;
        match keys.is_empty() {
            true => Err(KeyError::None),
            false => Ok(Older { kind, keys, random: SystemRandom::new() }),
        }
    }

    /// `None` where there is no randomness.
    pub fn seal(&self, plain: &[u8]) -> Option<Bytes> {
        let (name, key) = self.keys.first()?;
        let mut out = format!("{}{name}:", self.kind.prefix()).into_bytes();
        match key {
            Key::Salsa(key) => {
                let mut nonce = [0; NONCE];
                self.random.fill(&mut nonce).ok()?;
                let mut text = plain.to_vec();
                let tag = key.encrypt_in_place_detached(Nonce::from_slice(&nonce), b"", &mut text).ok()?;
                out.extend_from_slice(&nonce);
                out.extend_from_slice(&tag);
                out.extend_from_slice(&text);
            }
            key => {
                let mut last = [0; BLOCK];
                self.random.fill(&mut last).ok()?;
                out.extend_from_slice(&last);
                // Always padded, by as many bytes as each of them says.
                let padding = BLOCK - plain.len() % BLOCK;
                let padded = plain.iter().copied().chain(std::iter::repeat_n(padding as u8, padding));
                let padded: Vec<u8> = padded.collect();
                for chunk in padded.chunks_exact(BLOCK) {
                    let mut block = Block::clone_from_slice(chunk);
                    block.iter_mut().zip(last).for_each(|(byte, before)| *byte ^= before);
                    key.encrypt(&mut block);
                    last.copy_from_slice(&block);
                    out.extend_from_slice(&block);
                }
            }
        }
        Some(out.into())
    }

    /// The plain value and whether the first key had sealed it. An error without a word: it is not ours.
    pub fn open(&self, sealed: &[u8]) -> Result<(Bytes, bool), Option<&'static str>> {
        let rest = sealed.strip_prefix(self.kind.prefix().as_bytes()).ok_or(None)?;
        let mut why = "no matching key was found for the provided transformer";
        for (i, (name, key)) in self.keys.iter().enumerate() {
            let named = rest.strip_prefix(name.as_bytes()).and_then(|rest| rest.strip_prefix(b":"));
            let Some(body) = named else { continue };
            match key.open(body) {
                Ok(plain) => return Ok((plain.into(), i == 0)),
                // Another key may have the same name.
                Err(reason) => why = reason,
            }
        }
        Err(Some(why))
    }
}

impl Key {
    fn encrypt(&self, block: &mut Block) {
        match self {
            Key::Aes128(key) => key.encrypt_block(block),
            Key::Aes192(key) => key.encrypt_block(block),
            Key::Aes256(key) => key.encrypt_block(block),
            Key::Salsa(_) => {}
        }
    }

    fn decrypt(&self, block: &mut Block) {
        match self {
            Key::Aes128(key) => key.decrypt_block(block),
            Key::Aes192(key) => key.decrypt_block(block),
            Key::Aes256(key) => key.decrypt_block(block),
            Key::Salsa(_) => {}
        }
    }

    fn open(&self, body: &[u8]) -> Result<Vec<u8>, &'static str> {
        const SHORT: &str = "the stored data was shorter than the required size";
        if let Key::Salsa(key) = self {
            let (nonce, rest) = body.split_at_checked(NONCE).ok_or(SHORT)?;
            let (tag, text) = rest.split_at_checked(TAG).ok_or(SHORT)?;
            let mut plain = text.to_vec();
            let opened = key.decrypt_in_place_detached(Nonce::from_slice(nonce), b"", &mut plain, tag.into());
            return opened.map(|()| plain).map_err(|_| "output array was not large enough for encryption");
        }
        let (mut last, text) = body.split_at_checked(BLOCK).ok_or(SHORT)?;
        if text.is_empty() || !text.len().is_multiple_of(BLOCK) {
            return Err("the stored data is not a multiple of the block size");
        }
        let mut plain = Vec::with_capacity(text.len());
        for chunk in text.chunks_exact(BLOCK) {
            let mut block = Block::clone_from_slice(chunk);
            self.decrypt(&mut block);
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

    fn keys(kind: Kind, names: &[&str], size: usize) -> Older {
        let keys: Vec<_> = names
            .iter()
            .map(|name| ((*name).to_owned(), name.repeat(size).as_bytes()[..size].to_vec()))
            .collect();
        Older::new(kind, &keys).unwrap()
    }

    proptest! {
        #[test]
        fn what_is_sealed_is_opened(plain in proptest::collection::vec(any::<u8>(), 0..200), at in any::<usize>()) {
            for (kind, size) in [(Kind::AesCbc, 16), (Kind::AesCbc, 24), (Kind::AesCbc, 32), (Kind::Secretbox, 32)] {
                let one = keys(kind, &["k1"], size);
                let sealed = one.seal(&plain).unwrap();
                prop_assert_eq!(one.open(&sealed), Ok((plain.clone().into(), true)));
                prop_assert_eq!(keys(kind, &["k2", "k1"], size).open(&sealed), Ok((plain.clone().into(), false)));
                prop_assert!(matches!(keys(kind, &["k2"], size).open(&sealed), Err(Some(_))));
                let mut broken = sealed.to_vec();
                let at = at % broken.len();
                broken[at] ^= 1;
                // Nothing panics; what is authenticated is not taken either.
                let opened = one.open(&broken);
                prop_assert!(kind == Kind::AesCbc || opened.is_err());
                let _ = one.open(&broken[..at]);
            }
        }
    }

    /// The examples everybody checks with: NIST SP 800-38A, F.2.1, with a block of padding added, and NaCl's own.
    #[test]
    fn published_examples_are_opened() {
        #[track_caller]
        fn check(kind: Kind, prefix: &str, key: &str, sealed: &str, plain: &str) {
            let hex = |text: &str| -> Vec<u8> {
                (0..text.len()).step_by(2).map(|i| u8::from_str_radix(&text[i..i + 2], 16).unwrap()).collect()
            };
            let older = Older::new(kind, &[("k".to_owned(), hex(key))]).unwrap();
            let sealed = [prefix.as_bytes(), &hex(sealed)].concat();
            assert_eq!(older.open(&sealed), Ok((hex(plain).into(), true)));
        }
        check(
            Kind::AesCbc,
            "k8s:enc:aescbc:v1:k:",
            "2b7e151628aed2a6abf7158809cf4f3c",
            "000102030405060708090a0b0c0d0e0f7649abac8119b246cee98e9b12e9197d8964e0b149c10b7b682e6e39aaeb731c",
            "6bc1bee22e409f96e93d7e117393172a",
        );
        check(
            Kind::Secretbox,
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
    fn keys_have_their_sizes() {
        let wrong = |kind, size| {
            Older::new(kind, &[("k".to_owned(), vec![1; size])]).err().map(|error| error.to_string())
        };
        let expected = |sizes: &str| {
            Some(format!("secret is not of the expected length, got 17, expected one of {sizes}"))
        };
        assert_eq!(wrong(Kind::AesCbc, 17), expected("[16 24 32]"));
        assert_eq!(wrong(Kind::Secretbox, 17), expected("[32]"));
        assert_eq!(Older::new(Kind::Secretbox, &[]).err(), Some(KeyError::None));
    }
}
