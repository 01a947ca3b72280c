//! AES-GCM with local keys. Counterpart upstream: `storage/value/encrypt/aes`.

use bytes::Bytes;
use ring::aead::{AES_128_GCM, AES_256_GCM, Aad, LessSafeKey, NONCE_LEN, Nonce, UnboundKey};
use ring::rand::{SecureRandom as _, SystemRandom};

const KEY_SIZES: &str = "[16 32]";
const PREFIX: &str = "k8s:enc:aesgcm:v1:";

/// Named keys. The first one encrypts, all of them decrypt.
pub struct AesGcm {
    keys: Vec<(String, LessSafeKey)>,
    random: SystemRandom,
}

/// The reason why keys are invalid. Contains no secrets.
#[derive(Debug, PartialEq, Eq, thiserror::Error)]
pub enum KeyError {
    #[error("at least one keys is required")]
    NoKeys,
    #[error("secret is not of the expected length, got {got}, expected one of {expected}")]
    Length { got: usize, expected: &'static str },
}

impl AesGcm {
    /// `keys` are pairs of a name and a secret of 16 or 32 bytes.
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

    /// `None` if the system provides no random bytes.
    pub fn encrypt(&self, aad: &str, plain: &[u8]) -> Option<Bytes> {
        let (name, key) = self.keys.first()?;
        let prefix = format!("{PREFIX}{name}:");
        let mut out = Vec::with_capacity(prefix.len() + NONCE_LEN + plain.len() + key.algorithm().tag_len());
        out.extend_from_slice(prefix.as_bytes());
        encrypt_into(key, &self.random, aad.as_bytes(), plain, &mut out)?;
        Some(out.into())
    }

    /// Returns the plain value, and whether it was encrypted with the first key. `Err(None)` if the
    /// value has another prefix.
    pub fn decrypt(&self, aad: &str, encrypted: &[u8]) -> Result<(Bytes, bool), Option<&'static str>> {
        let rest = encrypted.strip_prefix(PREFIX.as_bytes()).ok_or(None)?;
        let mut message = "no matching key was found for the provided AES transformer";
        for (i, (name, key)) in self.keys.iter().enumerate() {
            let body_with_key = rest.strip_prefix(name.as_bytes()).and_then(|rest| rest.strip_prefix(b":"));
            let Some(body) = body_with_key else { continue };
            match decrypt(key, aad.as_bytes(), body) {
                Some(plain) => return Ok((plain, i == 0)),
                // Several keys may have the same name.
                None => message = "cipher: message authentication failed",
            }
        }
        Err(Some(message))
    }
}

/// Appends a random nonce, the ciphertext and the tag.
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

/// Decrypts a nonce and a ciphertext. `None` if the key or the authenticated data does not match.
pub fn decrypt(key: &LessSafeKey, aad: &[u8], body: &[u8]) -> Option<Bytes> {
    let (nonce, text) = body.split_at_checked(NONCE_LEN)?;
    let nonce = Nonce::try_assume_unique_for_key(nonce).ok()?;
    let mut buffer = text.to_vec();
    let length = key.open_in_place(nonce, Aad::from(aad), &mut buffer).ok()?.len();
    buffer.truncate(length);
    Some(buffer.into())
}
