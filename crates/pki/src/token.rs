//! Service account tokens (JWT) and their signing keys.
//!
//! One key signs. It and all other key files in the directory verify, so a key is rotated by renaming
//! `service-account.key` to `service-account-<anything>.key` and restarting. Only ES256 is used and
//! accepted, whatever algorithm the token header claims. The claims are opaque JSON: the caller checks
//! issuer, audience and expiry.

use std::path::{Path, PathBuf};

use base64::Engine as _;
use base64::engine::general_purpose::{STANDARD, URL_SAFE_NO_PAD};
use ring::digest;
use ring::rand::SystemRandom;
use ring::signature::{
    ECDSA_P256_SHA256_FIXED, ECDSA_P256_SHA256_FIXED_SIGNING, EcdsaKeyPair, KeyPair as _, UnparsedPublicKey,
};
use rustls::pki_types::pem::PemObject as _;
use rustls::pki_types::{PrivatePkcs8KeyDer, SubjectPublicKeyInfoDer};
use serde_json::{Value, json};

use crate::{Error, file};

const KEY_FILE_PREFIX: &str = "service-account";
const ALGORITHM: &str = "ES256";
/// The SubjectPublicKeyInfo of a P-256 key up to its 65-byte uncompressed point.
const SPKI_PREFIX: [u8; 26] = [
    0x30, 0x59, 0x30, 0x13, 0x06, 0x07, 0x2a, 0x86, 0x48, 0xce, 0x3d, 0x02, 0x01, 0x06, 0x08, 0x2a, 0x86,
    0x48, 0xce, 0x3d, 0x03, 0x01, 0x07, 0x03, 0x42, 0x00,
];
const POINT_BYTES: usize = 65;

/// The keys of the cluster's service account tokens.
pub struct Keys {
    signing: EcdsaKeyPair,
    random: SystemRandom,
    /// The first one belongs to the signing key.
    public: Vec<PublicKey>,
}

/// Why a token was rejected.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum TokenSignatureError {
    /// It is not a signed JWT.
    Malformed,
    /// Its `kid` is not among the keys.
    UnknownKey,
    Signature,
}

struct PublicKey {
    id: String,
    point: [u8; POINT_BYTES],
}

/// Omits the keys, so that they cannot appear in logs.
impl std::fmt::Debug for Keys {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.write_str("Keys")
    }
}

impl Keys {
    /// Reads the signing key from `service-account.key`, which is created if it is missing, and further
    /// verification keys from `service-account-*.key` and `service-account-*.pub`.
    pub fn load_or_create(dir: &Path) -> Result<Keys, Error> {
        file::private_dir(dir)?;
        let random = SystemRandom::new();
        let path = dir.join(format!("{KEY_FILE_PREFIX}.key"));
        let pem = match file::read(&path)? {
            Some(pem) => pem,
            None => {
                let pkcs8 = EcdsaKeyPair::generate_pkcs8(&ECDSA_P256_SHA256_FIXED_SIGNING, &random)
                    .map_err(|_| Error::Randomness)?;
                let pem = to_pem("PRIVATE KEY", pkcs8.as_ref());
                file::write_file(&path, pem.as_bytes(), 0o600)?;
                pem
            }
        };
        let signing = private_key(&pem, &path, &random)?;
        let mut public = vec![PublicKey::of(&signing, &path)?];
        for path in verification_key_files(dir)? {
            let Some(pem) = file::read(&path)? else { continue };
            let key = if path.extension().is_some_and(|extension| extension == "pub") {
                public_key(&pem, &path)?
            } else {
                PublicKey::of(&private_key(&pem, &path, &random)?, &path)?
            };
            if public.iter().all(|known| known.id != key.id) {
                public.push(key);
            }
        }
        Ok(Keys { signing, random, public })
    }

    /// Reads only the key in this file, which must exist: for components that sign and do not verify.
    pub fn load(path: &Path) -> Result<Keys, Error> {
        let random = SystemRandom::new();
        let pem = file::read_present(path)?;
        let signing = private_key(&pem, path, &random)?;
        let public = vec![PublicKey::of(&signing, path)?];
        Ok(Keys { signing, random, public })
    }

    /// Signs the claims as a JWT.
    pub fn sign(&self, claims: &Value) -> Result<String, Error> {
        let header = json!({"alg": ALGORITHM, "kid": self.public[0].id});
        let mut token = URL_SAFE_NO_PAD.encode(header.to_string());
        token.push('.');
        URL_SAFE_NO_PAD.encode_string(claims.to_string(), &mut token);
        let signature = self.signing.sign(&self.random, token.as_bytes()).map_err(|_| Error::Randomness)?;
        token.push('.');
        URL_SAFE_NO_PAD.encode_string(signature, &mut token);
        Ok(token)
    }

    /// Verifies a token with these keys and returns its claims.
    pub fn verify(&self, token: &str) -> Result<Value, TokenSignatureError> {
        let (signed, signature) = token.rsplit_once('.').ok_or(TokenSignatureError::Malformed)?;
        let (header, payload) = signed.split_once('.').ok_or(TokenSignatureError::Malformed)?;
        let header = decode(header)?;
        let signature = URL_SAFE_NO_PAD.decode(signature).map_err(|_| TokenSignatureError::Malformed)?;
        let claims = decode(payload)?;
        if header.get("crit").is_some() {
            // A critical header parameter must be understood (RFC 7515, section 4.1.11), and none is
            // supported.
            return Err(TokenSignatureError::Signature);
        }
        let named = header.get("kid").and_then(Value::as_str).unwrap_or("");
        let mut keys = self.public.iter().filter(|key| named.is_empty() || key.id == named).peekable();
        if keys.peek().is_none() {
            return Err(TokenSignatureError::UnknownKey);
        }
        let is_valid = header.get("alg").and_then(Value::as_str) == Some(ALGORITHM)
            && keys.any(|key| key.verify(signed.as_bytes(), &signature));
        if is_valid { Ok(claims) } else { Err(TokenSignatureError::Signature) }
    }

    /// The public keys as a JSON Web Key Set, and their algorithms.
    pub fn key_set(&self) -> (String, Vec<&'static str>) {
        // Formatted by hand, because the field order is upstream's.
        let keys: Vec<String> = self.public.iter().map(PublicKey::to_jwk).collect();
        (format!("{{\"keys\":[{}]}}", keys.join(",")), vec![ALGORITHM])
    }
}

/// The claims of a token without verification. Use them only to select the authenticator for the token.
pub fn unverified_claims(token: &str) -> Option<Value> {
    let mut parts = token.split('.');
    let (_, payload, _) = (parts.next()?, parts.next()?, parts.next()?);
    if parts.next().is_some() {
        return None;
    }
    decode(payload).ok()
}

impl PublicKey {
    fn new(point: &[u8]) -> Option<PublicKey> {
        let point: [u8; POINT_BYTES] = point.try_into().ok()?;
        let hash = digest::digest(&digest::SHA256, &[&SPKI_PREFIX[..], &point].concat());
        Some(PublicKey { id: URL_SAFE_NO_PAD.encode(hash), point })
    }

    fn of(key: &EcdsaKeyPair, path: &Path) -> Result<PublicKey, Error> {
        PublicKey::new(key.public_key().as_ref()).ok_or_else(|| malformed(path))
    }

    fn verify(&self, message: &[u8], signature: &[u8]) -> bool {
        UnparsedPublicKey::new(&ECDSA_P256_SHA256_FIXED, &self.point).verify(message, signature).is_ok()
    }

    fn to_jwk(&self) -> String {
        // An uncompressed curve point: the byte 4, then both coordinates.
        let (x, y) = self.point[1..].split_at(POINT_BYTES / 2);
        format!(
            r#"{{"use":"sig","kty":"EC","kid":"{}","crv":"P-256","alg":"{ALGORITHM}","x":"{}","y":"{}"}}"#,
            self.id,
            URL_SAFE_NO_PAD.encode(x),
            URL_SAFE_NO_PAD.encode(y)
        )
    }
}

/// Decodes a part of a token, which must be a JSON object.
fn decode(part: &str) -> Result<Value, TokenSignatureError> {
    let bytes = URL_SAFE_NO_PAD.decode(part).map_err(|_| TokenSignatureError::Malformed)?;
    let value: Value = serde_json::from_slice(&bytes).map_err(|_| TokenSignatureError::Malformed)?;
    if value.is_object() { Ok(value) } else { Err(TokenSignatureError::Malformed) }
}

/// The paths of the other key files, sorted by name.
fn verification_key_files(dir: &Path) -> Result<Vec<PathBuf>, Error> {
    let read_error = |source| Error::Read { path: dir.to_owned(), source };
    let mut paths = Vec::new();
    for entry in std::fs::read_dir(dir).map_err(read_error)? {
        let name = entry.map_err(read_error)?.file_name();
        let Some(name) = name.to_str() else { continue };
        let is_key = name.ends_with(".key") || name.ends_with(".pub");
        if is_key && name.strip_prefix(KEY_FILE_PREFIX).is_some_and(|rest| rest.starts_with('-')) {
            paths.push(dir.join(name));
        }
    }
    paths.sort();
    Ok(paths)
}

fn private_key(pem: &str, path: &Path, random: &SystemRandom) -> Result<EcdsaKeyPair, Error> {
    let der = PrivatePkcs8KeyDer::from_pem_slice(pem.as_bytes()).map_err(|_| malformed(path))?;
    EcdsaKeyPair::from_pkcs8(&ECDSA_P256_SHA256_FIXED_SIGNING, der.secret_pkcs8_der(), random)
        .map_err(|_| malformed(path))
}

fn public_key(pem: &str, path: &Path) -> Result<PublicKey, Error> {
    let der = SubjectPublicKeyInfoDer::from_pem_slice(pem.as_bytes()).map_err(|_| malformed(path))?;
    der.strip_prefix(&SPKI_PREFIX).and_then(PublicKey::new).ok_or_else(|| malformed(path))
}

fn malformed(path: &Path) -> Error {
    Error::Malformed { what: format!("{} (must be a P-256 key)", path.display()) }
}

fn to_pem(label: &str, der: &[u8]) -> String {
    let text = STANDARD.encode(der);
    let lines: Vec<&str> = text.as_bytes().chunks(64).filter_map(|line| str::from_utf8(line).ok()).collect();
    format!("-----BEGIN {label}-----\n{}\n-----END {label}-----\n", lines.join("\n"))
}

#[cfg(test)]
mod tests;
