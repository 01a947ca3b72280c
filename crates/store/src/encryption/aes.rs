//! AES-GCM with keys from a file.

use bytes::Bytes;
use ring::aead::{AES_128_GCM, AES_256_GCM, Aad, LessSafeKey, NONCE_LEN, Nonce, UnboundKey};
use ring::rand::{SecureRandom as _, SystemRandom};

const KEY_SIZES: &str = "[16 32]";
const PREFIX: &str = "k8s:enc:aesgcm:v1:";

/// Keys by name: the first one seals, all of them open.
pub struct AesGcm {
    keys: Vec<(String, LessSafeKey)>,
    random: SystemRandom,
}

/// Why keys cannot be used. Never tells a secret.
#[derive(Debug, PartialEq, Eq, thiserror::Error)]
pub enum KeyError {
    #[error("at least one keys is required")]
    NoKeys,
    #[error("secret is not of the expected length, got {got}, expected one of {expected}")]
    Length { got: usize, expected: &'static str },
}

impl AesGcm {
    /// Pairs of a name and a secret of 16 or 32 bytes.
    pub fn new(keys: &[(String, Vec<u8>)]) -> Result<AesGcm, KeyError> {
        let keys = keys.iter().map(|(name, secret)| {
            let algorithm = match secret.len() {
                16 => &AES_128_GCM,
                32 => &AES_256_GCM,
                got => return Err(KeyError::Length { got, expected: KEY_SIZES }),
            };
            let key = UnboundKey::new(algorithm, secret);
            let key = key.map_err(|_| KeyError::Length { got: secret.len(), expected: KEY_SIZES })?;
            Ok((name.clone(), LessSafeKey::new(key)))
        });
        let keys = keys.collect::<Result<Vec<_>, _>>()?;
        if keys.is_empty() { Err(KeyError::NoKeys) } else { Ok(AesGcm { keys, random: SystemRandom::new() }) }
    }

    /// `None` where there is no randomness.
    pub fn encrypt(&self, aad: &str, plain: &[u8]) -> Option<Bytes> {
        let (name, key) = self.keys.first()?;
        let prefix = format!("{PREFIX}{name}:");
        let mut out = Vec::with_capacity(prefix.len() + NONCE_LEN + plain.len() + key.algorithm().tag_len());
        out.extend_from_slice(prefix.as_bytes());
        encrypt_into(key, &self.random, aad.as_bytes(), plain, &mut out)?;
        Some(out.into())
    }

    /// The plain value and whether the first key had sealed it. An error without a word: it is not ours.
    pub fn decrypt(&self, aad: &str, encrypted: &[u8]) -> Result<(Bytes, bool), Option<&'static str>> {
        let rest = encrypted.strip_prefix(PREFIX.as_bytes()).ok_or(None)?;
        let mut message = "no matching key was found for the provided AES transformer";
        for (i, (name, key)) in self.keys.iter().enumerate() {
            let body_with_key = rest.strip_prefix(name.as_bytes()).and_then(|rest| rest.strip_prefix(b":"));
            let Some(body) = body_with_key else { continue };
            match decrypt(key, aad.as_bytes(), body) {
                Some(plain) => return Ok((plain, i == 0)),
                // Another key may have the same name.
                None => message = "cipher: message authentication failed",
            }
        }
        Err(Some(message))
    }
}

/// Appends a nonce and the sealed text.
pub fn encrypt_into(
    key: &LessSafeKey,
    random: &SystemRandom,
    aad: &[u8],
    plain: &[u8],
    out: &mut Vec<u8>,
) -> Option<()> {
    let mut nonce = [0; NONCE_LEN];
    random.fill(&mut nonce).ok()?;
    out.extend_from_slice(&nonce);
    let start = out.len();
    out.extend_from_slice(plain);
    let nonce = Nonce::assume_unique_for_key(nonce);
    let tag = key.seal_in_place_separate_tag(nonce, Aad::from(aad), &mut out[start..]).ok()?;
    out.extend_from_slice(tag.as_ref());
    Some(())
}

/// What a nonce and a sealed text hold, if they are of this key and place.
pub fn decrypt(key: &LessSafeKey, aad: &[u8], body: &[u8]) -> Option<Bytes> {
    let (nonce, text) = body.split_at_checked(NONCE_LEN)?;
    let nonce = Nonce::try_assume_unique_for_key(nonce).ok()?;
    let mut buffer = text.to_vec();
    let length = key.open_in_place(nonce, Aad::from(aad), &mut buffer).ok()?.len();
    buffer.truncate(length);
    Some(buffer.into())
}
