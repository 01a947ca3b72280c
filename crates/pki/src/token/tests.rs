use std::fs;
use std::os::unix::fs::PermissionsExt as _;

use proptest::prelude::*;
use ring::hmac;

use super::*;

fn keys() -> Keys {
    Keys::load_or_create(tempfile::tempdir().unwrap().path()).unwrap()
}

fn part(value: &Value) -> String {
    URL_SAFE_NO_PAD.encode(value.to_string())
}

#[test]
fn key_is_created_once_with_private_permissions() {
    let dir = tempfile::tempdir().unwrap();
    let created = Keys::load_or_create(dir.path()).unwrap();
    let path = dir.path().join("service-account.key");
    assert_eq!(fs::metadata(&path).unwrap().permissions().mode() & 0o777, 0o600);
    let loaded = Keys::load_or_create(dir.path()).unwrap();
    assert_eq!(created.key_set(), loaded.key_set());
    let claims = json!({"sub": "ann"});
    assert_eq!(loaded.verify(&created.sign(&claims).unwrap()), Ok(claims));
    fs::write(&path, "nonsense").unwrap();
    let error = Keys::load_or_create(dir.path()).err().unwrap().to_string();
    assert!(error.ends_with("service-account.key (must be a P-256 key): invalid certificate or key"));
}

#[test]
fn old_key_files_verify_tokens_after_rotation() {
    let dir = tempfile::tempdir().unwrap();
    let at = |name: &str| dir.path().join(name);
    let first = Keys::load_or_create(dir.path()).unwrap();
    let token = first.sign(&json!({"n": 1})).unwrap();
    fs::rename(at("service-account.key"), at("service-account-1.key")).unwrap();
    let second = Keys::load_or_create(dir.path()).unwrap();
    assert_ne!(second.public[0].id, first.public[0].id);
    assert_eq!(second.verify(&token), Ok(json!({"n": 1})));
    assert_eq!(first.verify(&second.sign(&json!({})).unwrap()), Err(TokenSignatureError::UnknownKey));
    assert_eq!(second.key_set().0.matches("\"kid\"").count(), 2);

    // The public key alone suffices for verification.
    fs::remove_file(at("service-account-1.key")).unwrap();
    assert_eq!(
        Keys::load_or_create(dir.path()).unwrap().verify(&token),
        Err(TokenSignatureError::UnknownKey)
    );
    let spki = [&SPKI_PREFIX[..], &first.public[0].point].concat();
    fs::write(at("service-account-1.pub"), to_pem("PUBLIC KEY", &spki)).unwrap();
    assert_eq!(Keys::load_or_create(dir.path()).unwrap().verify(&token), Ok(json!({"n": 1})));
    fs::write(at("service-account-1.pub"), to_pem("PUBLIC KEY", &spki[1..])).unwrap();
    assert!(Keys::load_or_create(dir.path()).is_err());
}

#[test]
fn the_header_does_not_choose_the_algorithm() {
    let keys = keys();
    let public = &keys.public[0];
    let claims = part(&json!({"sub": "system:admin"}));
    let good = keys.sign(&json!({})).unwrap();
    let signature = good.rsplit_once('.').unwrap().1;
    for algorithm in ["none", "None", "", "RS256", "ES384", "HS256"] {
        let signed = format!("{}.{claims}", part(&json!({"alg": algorithm, "kid": public.id})));
        for signature in ["", signature] {
            assert_eq!(
                keys.verify(&format!("{signed}.{signature}")),
                Err(TokenSignatureError::Signature),
                "{algorithm}"
            );
        }
        // The public key as the HMAC secret, in every form an attacker can get it.
        let spki = [&SPKI_PREFIX[..], &public.point].concat();
        for secret in [&public.point[..], &spki, to_pem("PUBLIC KEY", &spki).as_bytes()] {
            let secret = hmac::Key::new(hmac::HMAC_SHA256, secret);
            let hmac_signature = URL_SAFE_NO_PAD.encode(hmac::sign(&secret, signed.as_bytes()));
            assert_eq!(
                keys.verify(&format!("{signed}.{hmac_signature}")),
                Err(TokenSignatureError::Signature),
                "{algorithm}"
            );
        }
    }
    // A valid signature under another algorithm name.
    let signed = format!("{}.{claims}", part(&json!({"alg": "HS256"})));
    let new_signature = keys.signing.sign(&keys.random, signed.as_bytes()).unwrap();
    let token = format!("{signed}.{}", URL_SAFE_NO_PAD.encode(new_signature));
    assert_eq!(keys.verify(&token), Err(TokenSignatureError::Signature));
    // A token that carries its own key.
    let signed = format!("{}.{claims}", part(&json!({"alg": "ES256", "jwk": {"kty": "EC"}, "crit": ["x"]})));
    let new_signature = keys.signing.sign(&keys.random, signed.as_bytes()).unwrap();
    let token = format!("{signed}.{}", URL_SAFE_NO_PAD.encode(new_signature));
    assert_eq!(keys.verify(&token), Err(TokenSignatureError::Signature));
}

#[test]
fn a_token_need_not_name_its_key() {
    let keys = keys();
    let signed = format!("{}.{}", part(&json!({"alg": "ES256"})), part(&json!({"a": 1})));
    let new_signature = keys.signing.sign(&keys.random, signed.as_bytes()).unwrap();
    assert_eq!(
        keys.verify(&format!("{signed}.{}", URL_SAFE_NO_PAD.encode(new_signature))),
        Ok(json!({"a": 1}))
    );
}

#[test]
fn malformed_tokens_are_rejected() {
    let keys = keys();
    let empty = part(&json!({}));
    for token in ["", ".", "..", "...", "a.b.c", "{}", "e30.e30", "e30.W10.AA", "MQ.e30.AA"] {
        assert_eq!(keys.verify(token), Err(TokenSignatureError::Malformed), "{token}");
    }
    assert_eq!(keys.verify(&format!("{empty}.{empty}.")), Err(TokenSignatureError::Signature));
    assert_eq!(unverified_claims("a.e30"), None);
    assert_eq!(unverified_claims("a.e30.b.c"), None);
    assert_eq!(unverified_claims("?.e30.?"), Some(json!({})));
    let deep = URL_SAFE_NO_PAD.encode("[".repeat(100_000));
    assert_eq!(unverified_claims(&format!("{empty}.{deep}.")), None);
}

#[test]
fn key_set_format_is_standard() {
    let keys = keys();
    let (text, algorithms) = keys.key_set();
    assert_eq!(algorithms, ["ES256"]);
    let set: Value = serde_json::from_str(&text).unwrap();
    let key = &set["keys"][0];
    assert_eq!((&key["kty"], &key["crv"], &key["use"]), (&"EC".into(), &"P-256".into(), &"sig".into()));
    let decode_value = |name: &str| URL_SAFE_NO_PAD.decode(key[name].as_str().unwrap()).unwrap();
    assert_eq!([vec![4], decode_value("x"), decode_value("y")].concat(), keys.public[0].point);
    assert_eq!(key["kid"].as_str().unwrap().len(), 43);
}

proptest! {
    #![proptest_config(ProptestConfig::with_cases(64))]

    #[test]
    fn signed_tokens_verify_and_modified_tokens_fail(
        text in ".*",
        number: i64,
        position: prop::sample::Index,
        bit in 0..6usize,
    ) {
        let keys = keys();
        let claims = json!({"text": text, "number": number});
        let token = keys.sign(&claims).unwrap();
        prop_assert_eq!(keys.verify(&token), Ok(claims));
        // Changing any character must be detected (a dot is not in the alphabet).
        const LETTERS: &[u8] = b"ABCDEFGHIJKLMNOPQRSTUVWXYZabcdefghijklmnopqrstuvwxyz0123456789-_";
        let mut bytes = token.clone().into_bytes();
        let at = position.index(bytes.len());
        if let Some(value) = LETTERS.iter().position(|letter| *letter == bytes[at]) {
            bytes[at] = LETTERS[value ^ (1 << bit)];
            prop_assert!(keys.verify(str::from_utf8(&bytes).unwrap()).is_err());
        }
        prop_assert!(keys.verify(&token[..at]).is_err());
    }

    #[test]
    fn never_panics(token in r"[A-Za-z0-9_.{}=-]{0,80}|\PC*") {
        let keys = keys();
        prop_assert!(keys.verify(&token).is_err());
        let _ = unverified_claims(&token);
    }
}
