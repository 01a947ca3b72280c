//! JSON Web Keys of external token issuers (OpenID Connect), and verification of the tokens they sign.
//!
//! A key is used only with the algorithms of its type, whatever algorithm the token header claims.

use base64::Engine as _;
use base64::engine::general_purpose::URL_SAFE_NO_PAD;
use ring::signature::{self, RsaParameters, RsaPublicKeyComponents, UnparsedPublicKey};
use serde_json::Value;

/// The supported signature algorithms. Of those in OpenID Connect, ES512 is missing, because `ring`
/// does not implement P-521.
pub const ALGORITHMS: [&str; 8] = ["ES256", "ES384", "PS256", "PS384", "PS512", "RS256", "RS384", "RS512"];

/// The public keys of an issuer.
#[derive(Debug, Default)]
pub struct KeySet(Vec<Key>);

#[derive(Debug)]
struct Key {
    id: String,
    public: PublicKeyValue,
}

#[derive(Debug)]
enum PublicKeyValue {
    Rsa { n: Vec<u8>, e: Vec<u8> },
    P256(Vec<u8>),
    P384(Vec<u8>),
}

/// A parsed token whose signature has not been verified.
#[derive(Debug)]
pub struct Unverified<'a> {
    signed: &'a str,
    signature: Vec<u8>,
    pub algorithm: String,
    key_id: String,
    pub claims: Value,
}

impl KeySet {
    /// Parses a JSON Web Key Set. Keys of unknown types and keys for other uses than signatures are
    /// ignored.
    pub fn parse(set: &Value) -> Option<KeySet> {
        let keys = set.get("keys")?.as_array()?;
        Some(KeySet(keys.iter().filter_map(Key::parse).collect()))
    }

    /// Whether one of the keys signed the token.
    pub fn signed(&self, token: &Unverified<'_>) -> bool {
        let fits = |key: &&Key| token.key_id.is_empty() || key.id == token.key_id;
        self.0.iter().filter(fits).any(|key| key.public.signed(token))
    }
}

impl<'a> Unverified<'a> {
    /// Returns `None` if the token is malformed or has critical header parameters (`crit`), none of
    /// which is supported.
    pub fn parse(token: &'a str) -> Option<Unverified<'a>> {
        let (signed, signature) = token.rsplit_once('.')?;
        let (header, payload) = signed.split_once('.')?;
        let decode = |part: &str| URL_SAFE_NO_PAD.decode(part).ok();
        let object =
            |part: &str| serde_json::from_slice::<Value>(&decode(part)?).ok().filter(Value::is_object);
        let header = object(header)?;
        let text = |name: &str| header.get(name).and_then(Value::as_str).unwrap_or("").to_owned();
        if header.get("crit").is_some() {
            return None;
        }
        Some(Unverified {
            signed,
            signature: decode(signature)?,
            algorithm: text("alg"),
            key_id: text("kid"),
            claims: object(payload)?,
        })
    }
}

impl Key {
    fn parse(key: &Value) -> Option<Key> {
        let text = |name: &str| key.get(name).and_then(Value::as_str).unwrap_or("");
        let bytes = |name: &str| URL_SAFE_NO_PAD.decode(text(name)).ok().filter(|bytes| !bytes.is_empty());
        if !matches!(text("use"), "" | "sig") {
            return None;
        }
        // An uncompressed curve point: the byte 4, then both coordinates.
        let point = |size: usize| {
            let (x, y) = (bytes("x")?, bytes("y")?);
            (x.len() == size && y.len() == size).then(|| [&[4], x.as_slice(), &y].concat())
        };
        let public = match (text("kty"), text("crv")) {
            ("RSA", _) => PublicKeyValue::Rsa { n: bytes("n")?, e: bytes("e")? },
            ("EC", "P-256") => PublicKeyValue::P256(point(32)?),
            ("EC", "P-384") => PublicKeyValue::P384(point(48)?),
            _ => return None,
        };
        Some(Key { id: text("kid").to_owned(), public })
    }
}

impl PublicKeyValue {
    fn signed(&self, token: &Unverified<'_>) -> bool {
        let (message, signature) = (token.signed.as_bytes(), token.signature.as_slice());
        let curve = |algorithm: &'static dyn signature::VerificationAlgorithm, point: &[u8]| {
            UnparsedPublicKey::new(algorithm, point).verify(message, signature).is_ok()
        };
        match (self, token.algorithm.as_str()) {
            (PublicKeyValue::P256(point), "ES256") => curve(&signature::ECDSA_P256_SHA256_FIXED, point),
            (PublicKeyValue::P384(point), "ES384") => curve(&signature::ECDSA_P384_SHA384_FIXED, point),
            (PublicKeyValue::Rsa { n, e }, algorithm) => rsa(algorithm).is_some_and(|parameters| {
                RsaPublicKeyComponents { n, e }.verify(parameters, message, signature).is_ok()
            }),
            _ => false,
        }
    }
}

fn rsa(algorithm: &str) -> Option<&'static RsaParameters> {
    Some(match algorithm {
        "RS256" => &signature::RSA_PKCS1_2048_8192_SHA256,
        "RS384" => &signature::RSA_PKCS1_2048_8192_SHA384,
        "RS512" => &signature::RSA_PKCS1_2048_8192_SHA512,
        "PS256" => &signature::RSA_PSS_2048_8192_SHA256,
        "PS384" => &signature::RSA_PSS_2048_8192_SHA384,
        "PS512" => &signature::RSA_PSS_2048_8192_SHA512,
        _ => return None,
    })
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;
    use serde_json::json;

    use super::*;
    use crate::token::Keys;

    // Created with OpenSSL for this test: a 2048-bit key's modulus and one token each for RS256 and
    // PS256.
    const RSA: &str = include_str!("jwk/rsa.txt");

    fn rsa_case(name: &str) -> &'static str {
        RSA.lines().find_map(|line| line.strip_prefix(name)?.strip_prefix(": ")).unwrap()
    }

    fn rsa_keys() -> KeySet {
        KeySet::parse(&json!({"keys": [{"kty": "RSA", "kid": "r", "n": rsa_case("n"), "e": "AQAB"}]}))
            .unwrap()
    }

    #[test]
    fn tokens_are_verified_with_the_key_set_of_the_issuer() {
        let dir = tempfile::tempdir().unwrap();
        let keys = Keys::load_or_create(dir.path()).unwrap();
        let token = keys.sign(&json!({"sub": "ann"})).unwrap();
        let set: Value = serde_json::from_str(&keys.key_set().0).unwrap();
        let set = KeySet::parse(&set).unwrap();
        let parsed = Unverified::parse(&token).unwrap();
        assert_eq!((parsed.algorithm.as_str(), &parsed.claims), ("ES256", &json!({"sub": "ann"})));
        assert!(set.signed(&parsed));
        let (signed, signature) = token.rsplit_once('.').unwrap();
        let modified = format!("{signed}.{}", signature.chars().rev().collect::<String>());
        assert!(Unverified::parse(&modified).is_none_or(|modified| !set.signed(&modified)));
        assert!(!rsa_keys().signed(&parsed));

        for name in ["RS256", "PS256"] {
            let parsed = Unverified::parse(rsa_case(name)).unwrap();
            assert_eq!(parsed.algorithm, name);
            assert!(rsa_keys().signed(&parsed), "{name}");
            assert!(!set.signed(&parsed), "{name}");
            let other = Unverified { algorithm: "RS512".to_owned(), ..parsed };
            assert!(!rsa_keys().signed(&other));
            let none = Unverified { algorithm: "none".to_owned(), signature: Vec::new(), ..other };
            assert!(!rsa_keys().signed(&none));
        }
    }

    #[test]
    fn key_type_and_use_are_validated() {
        let parsed = Unverified::parse(rsa_case("RS256")).unwrap();
        let check = |key: Value, expected: bool| {
            let set = KeySet::parse(&json!({"keys": [key]})).unwrap();
            assert_eq!(set.signed(&parsed), expected, "{set:?}");
        };
        let n = rsa_case("n");
        check(json!({"kty": "RSA", "kid": "r", "n": n, "e": "AQAB", "use": "sig"}), true);
        check(json!({"kty": "RSA", "kid": "r", "n": n, "e": "AQAB", "use": "enc"}), false);
        check(json!({"kty": "RSA", "kid": "other", "n": n, "e": "AQAB"}), false);
        check(json!({"kty": "RSA", "kid": "r", "n": n}), false);
        check(json!({"kty": "EC", "crv": "P-256", "kid": "r", "x": "AA", "y": "AA"}), false);
        check(json!({"kty": "oct", "kid": "r", "k": n}), false);
        assert!(KeySet::parse(&json!({})).is_none());
    }

    proptest! {
        #[test]
        fn never_panics(token in "[a-zA-Z0-9_.=-]{0,80}", x in "[a-zA-Z0-9_-]{0,44}") {
            let set = KeySet::parse(&json!({"keys": [
                {"kty": "EC", "crv": "P-256", "x": x, "y": x}, {"kty": "RSA", "n": x, "e": x},
            ]})).unwrap();
            if let Some(parsed) = Unverified::parse(&token) {
                prop_assert!(!set.signed(&parsed));
            }
        }
    }
}
