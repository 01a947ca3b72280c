use std::time::Duration;

use jiff::Timestamp;

use super::*;
use crate::{Authority, CertKeyPair, Leaf, Usage};

const EXPECTED_ERROR: &str = "invalid join token: must have the form K10<CA digest>::<id>.<secret>";
const HASH: &str = "00112233445566778899aabbccddeeff00112233445566778899aabbccddeeff";

#[track_caller]
fn check(text: &str, expected: &str) {
    let parsed = match text.parse::<JoinToken>() {
        Ok(token) => token.to_secret_string(),
        Err(error) => error.to_string(),
    };
    assert_eq!(parsed, expected, "{text}");
}

#[test]
fn tokens_are_parsed_and_formatted() {
    let full_token = format!("K10{HASH}::abcdef.0123456789abcdef");
    check(&full_token, &full_token);
    check(&format!(" {full_token}\n"), &full_token);
    check("abcdef.0123456789abcdef", "abcdef.0123456789abcdef");
    check("K1000::abcdef.0123456789abcdef", EXPECTED_ERROR);
    check(&format!("K10{}::a", HASH.replace('0', "g")), EXPECTED_ERROR);
    check("", EXPECTED_ERROR);
    check("server:", EXPECTED_ERROR);
    // A token derived from a password does not depend on the user name before it.
    let word: JoinToken = "hunter2".parse().unwrap();
    check(&format!("K10{HASH}::node:hunter2"), &format!("K10{HASH}::{}", word.to_secret_string()));
    assert_eq!(BootstrapToken::from_text(&word.bootstrap.bearer()).unwrap(), word.bootstrap);
    assert_ne!(word.bootstrap, BootstrapToken::from_text("hunter3").unwrap());
}

#[test]
fn random_tokens_are_tokens_and_secret() {
    let token = BootstrapToken::random().unwrap();
    assert_eq!(BootstrapToken::from_text(&token.bearer()).unwrap(), token);
    assert_ne!(token, BootstrapToken::random().unwrap());
    assert!(!format!("{token:?}").contains(&token.secret));
}

#[test]
fn only_the_pinned_authority_is_trusted() {
    let dir = tempfile::tempdir().unwrap();
    let now = Timestamp::now();
    let good = Authority::load_or_create(dir.path(), "good", now).unwrap();
    let bad = Authority::load_or_create(dir.path(), "bad", now).unwrap();
    let leaf = Leaf {
        common_name: "server".to_owned(),
        organizations: vec![],
        dns_names: vec!["localhost".to_owned()],
        ips: vec![],
        usage: Usage::Server,
        lifetime: Duration::from_secs(3600),
    };
    let verify = |issued: &CertKeyPair, beside: &Authority, name: &'static str| {
        let pinned = PinnedAuthorityVerifier::new(Fingerprint::from_pem(good.pem()).unwrap());
        let der = |pem: &str| CertificateDer::from_pem_slice(pem.as_bytes()).unwrap();
        let name = ServerName::try_from(name).unwrap();
        let (end_entity, beside) = (der(&issued.cert_pem), der(beside.pem()));
        let verified = pinned.verify_server_cert(&end_entity, &[beside], &name, &[], UnixTime::now());
        assert_eq!(verified.is_ok(), pinned.authority().is_some());
        verified.is_ok()
    };
    let (ours, theirs) = (good.issue(&leaf, now).unwrap(), bad.issue(&leaf, now).unwrap());
    assert!(verify(&ours, &good, "localhost"));
    assert!(!verify(&ours, &good, "elsewhere"));
    assert!(!verify(&theirs, &bad, "localhost"), "CA with another digest");
    assert!(!verify(&theirs, &good, "localhost"), "the pinned CA beside a certificate of another CA");
}
