use futures_util::FutureExt as _;
use proptest::prelude::*;

use super::*;
use crate::Expect;
use crate::log::{Config, LogStore};

fn aes_gcm(names: &[&str]) -> AesGcm {
    let keys: Vec<_> = names.iter().map(|name| ((*name).to_owned(), name.repeat(32).into_bytes())).collect();
    AesGcm::new(&keys.into_iter().map(|(name, secret)| (name, secret[..32].to_vec())).collect::<Vec<_>>())
        .unwrap()
}

/// Keys are `/registry/<plural>/…` and `/registry/<group with a dot>/<plural>/…`.
fn group_resource(key: &str) -> Option<(&str, &str)> {
    let rest = key.strip_prefix("/registry/")?;
    let (first, after) = rest.split_once('/')?;
    if first.contains('.') { Some((first, after.split('/').next()?)) } else { Some(("", first)) }
}

fn new_rules(list: Vec<(&str, &str, Vec<Provider>)>) -> EncryptionRules {
    let mut rules = EncryptionRules::new(group_resource);
    for (group, plural, providers) in list {
        rules.add(group, plural, &providers.into());
    }
    rules
}

fn secret_rules(names: &[&str], identity: bool) -> EncryptionRules {
    let mut providers = vec![Provider::AesGcm(aes_gcm(names))];
    if identity {
        providers.push(Provider::Identity);
    }
    new_rules(vec![("", "secrets", providers)])
}

fn put(key: &str, value: &'static str, expect: Expect) -> Write {
    Write {
        key: key.into(),
        value: Some(Bytes::from_static(value.as_bytes())),
        expect,
        ttl: None,
        lazy: false,
    }
}

const KEY: &str = "/registry/secrets/default/a";

#[tokio::test]
async fn writes_encrypted_and_reads_plain_values() {
    let dir = tempfile::tempdir().unwrap();
    let inner: Arc<dyn Store> = Arc::new(LogStore::open(dir.path(), Config::default()).unwrap());
    let store = EncryptionStore::new(inner.clone(), secret_rules(&["k1"], true));
    let mut watch = crate::suite::watch(&store, "/registry/", 1).await.unwrap();
    let revision = store.write(put(KEY, "hush hush", Expect::Absent)).await.unwrap();
    store.write(put("/registry/pods/default/p", "open", Expect::Absent)).await.unwrap();

    let raw = inner.get(KEY).await.unwrap().unwrap().value;
    assert!(raw.starts_with(b"k8s:enc:aesgcm:v1:k1:"), "{raw:?}");
    assert!(!raw.windows(4).any(|part| part == b"hush"));
    assert_eq!(inner.get("/registry/pods/default/p").await.unwrap().unwrap().value, "open");

    assert_eq!(store.get(KEY).await.unwrap().unwrap().value, "hush hush");
    let page = store.list("/registry/", None, 0, None).await.unwrap();
    let values: Vec<_> = page.entries.iter().map(|entry| entry.value.clone()).collect();
    assert_eq!(values, ["open", "hush hush"]);
    let events = crate::suite::next_events(&mut watch).await;
    assert!(matches!(&events[0], Event::Put { entry, created: true } if entry.value == "hush hush"));

    let conflict = store.write(put(KEY, "new", Expect::Revision(revision + 7))).await.unwrap_err();
    let Error::Conflict { current: Some(current), .. } = conflict else { panic!("{conflict}") };
    assert_eq!(current.value, "hush hush");
    // The plain text is not on disk either.
    drop((store, inner, watch));
    for file in std::fs::read_dir(dir.path()).unwrap() {
        let bytes = std::fs::read(file.unwrap().path()).unwrap_or_default();
        assert!(!bytes.windows(4).any(|part| part == b"hush"));
    }
}

#[tokio::test]
async fn rotates_keys_when_new_key_is_first() {
    let dir = tempfile::tempdir().unwrap();
    let inner: Arc<dyn Store> = Arc::new(LogStore::open(dir.path(), Config::default()).unwrap());
    inner.write(put("/registry/secrets/default/plain", "from before", Expect::Absent)).await.unwrap();
    EncryptionStore::new(inner.clone(), secret_rules(&["k1"], true))
        .write(put(KEY, "old", Expect::Absent))
        .await
        .unwrap();

    let store = EncryptionStore::new(inner.clone(), secret_rules(&["k2", "k1"], true));
    let entries = store.list("/registry/", None, 0, None).await.unwrap().entries;
    assert!(store.is_stale(KEY) && store.is_stale("/registry/secrets/default/plain"));
    for entry in entries {
        let write = Write {
            key: entry.key.clone(),
            value: Some(entry.value),
            expect: Expect::Revision(entry.revision),
            ttl: None,
            lazy: false,
        };
        store.write(write).await.unwrap();
        store.get(&entry.key).await.unwrap();
        assert!(!store.is_stale(&entry.key));
    }
    // Neither the old key nor plain values are needed any more.
    let store = EncryptionStore::new(inner.clone(), secret_rules(&["k2"], false));
    assert_eq!(store.get(KEY).await.unwrap().unwrap().value, "old");
    assert_eq!(store.get("/registry/secrets/default/plain").await.unwrap().unwrap().value, "from before");

    // Disabling encryption: identity writes, the keys are still used for reads.
    let providers = vec![Provider::Identity, Provider::AesGcm(aes_gcm(&["k2"]))];
    let store = EncryptionStore::new(inner.clone(), new_rules(vec![("", "secrets", providers)]));
    let entry = store.get(KEY).await.unwrap().unwrap();
    assert!(store.is_stale(KEY));
    store.write(put(KEY, "old", Expect::Revision(entry.revision))).await.unwrap();
    assert_eq!(inner.get(KEY).await.unwrap().unwrap().value, "old");
}

#[tokio::test]
async fn missing_key_error_contains_no_secret() {
    let dir = tempfile::tempdir().unwrap();
    let inner: Arc<dyn Store> = Arc::new(LogStore::open(dir.path(), Config::default()).unwrap());
    let encrypted_store = EncryptionStore::new(inner.clone(), secret_rules(&["k1"], false));
    encrypted_store.write(put(KEY, "hush", Expect::Absent)).await.unwrap();
    let check = async |rules: EncryptionRules, expected: &str| {
        let store = EncryptionStore::new(inner.clone(), rules);
        let error = store.list("/registry/", None, 0, None).await.unwrap_err().to_string();
        assert_eq!(error, format!("cannot decrypt the value of {KEY}: {expected}"));
    };
    let no_provider = "the provided value does not match any of the supported transformers";
    check(new_rules(vec![]), no_provider).await;
    check(new_rules(vec![("", "secrets", vec![Provider::Identity])]), no_provider).await;
    check(secret_rules(&["k2"], true), "no matching key was found for the provided AES transformer").await;
    let wrong_key = AesGcm::new(&[("k1".to_owned(), vec![7; 32])]).unwrap();
    let wrong_key = new_rules(vec![("", "secrets", vec![Provider::AesGcm(wrong_key)])]);
    check(wrong_key, "cipher: message authentication failed").await;

    // A value copied to another key cannot be decrypted.
    let value = inner.get(KEY).await.unwrap().unwrap().value;
    let other = "/registry/secrets/default/mine";
    let copy =
        Write { key: other.into(), value: Some(value), expect: Expect::Absent, ttl: None, lazy: false };
    inner.write(copy).await.unwrap();
    let error = encrypted_store.get(other).await.unwrap_err().to_string();
    assert!(error.ends_with("cipher: message authentication failed"), "{error}");
}

#[test]
fn most_specific_rule_wins() {
    let providers = |name: &str| vec![Provider::AesGcm(aes_gcm(&[name]))];
    let rules = new_rules(vec![
        ("", "secrets", providers("a")),
        ("", "secrets", providers("late")),
        ("", "*", providers("b")),
        ("apps.x", "*", providers("c")),
        ("*", "*", providers("d")),
        ("", "events", vec![Provider::Identity]),
    ]);
    let check = |key: &str, expected: &str| {
        let encrypted = rules.encrypt(key, &Bytes::from_static(b"x")).now_or_never().unwrap().unwrap();
        let name = encrypted
            .strip_prefix(b"k8s:enc:aesgcm:v1:")
            .map_or(&b"-"[..], |rest| &rest[..rest.len().min(1)]);
        assert_eq!(String::from_utf8_lossy(name), expected, "{key}");
    };
    check("/registry/secrets/default/a", "a");
    check("/registry/configmaps/default/a", "b");
    check("/registry/events/default/a", "-");
    check("/registry/apps.x/deployments/default/a", "c");
    check("/registry/batch.x/jobs/default/a", "d");
    check("nonsense", "-");
    assert_eq!(AesGcm::new(&[]).err(), Some(KeyError::NoKeys));
    assert_eq!(
        AesGcm::new(&[("x".to_owned(), vec![0; 24])]).err(),
        Some(KeyError::Length { got: 24, expected: "[16 32]" })
    );
}

#[tokio::test]
async fn encrypted_store_passes_store_suite() {
    let dir = tempfile::tempdir().unwrap();
    let inner: Arc<dyn Store> = Arc::new(LogStore::open(dir.path(), Config::default()).unwrap());
    let mut rules = EncryptionRules::new(|_| Some(("", "things")));
    rules.add("*", "*", &vec![Provider::AesGcm(aes_gcm(&["k"]))].into());
    crate::suite::run(Arc::new(EncryptionStore::new(inner, rules))).await;
}

proptest! {
    #[test]
    fn decrypt_round_trips_and_rejects_changes(plain: Vec<u8>, flip in 0usize..200, garbage: Vec<u8>) {
        let aes = aes_gcm(&["k"]);
        let encrypted = aes.encrypt("/a", &plain).unwrap();
        prop_assert_eq!(aes.decrypt("/a", &encrypted).unwrap().0, plain);
        prop_assert!(aes.decrypt("/b", &encrypted).is_err());
        let mut broken = encrypted.to_vec();
        let at = flip % broken.len();
        broken[at] ^= 1;
        prop_assert!(aes.decrypt("/a", &broken).is_err());
        let _ = aes.decrypt("/a", &garbage);
        let _ = aes.decrypt("/a", &[b"k8s:enc:aesgcm:v1:k:", garbage.as_slice()].concat());
    }
}

#[tokio::test]
async fn reload_changes_rules_at_runtime() {
    let dir = tempfile::tempdir().unwrap();
    let inner: Arc<dyn Store> = Arc::new(LogStore::open(dir.path(), Config::default()).unwrap());
    let store = EncryptionStore::new(inner.clone(), secret_rules(&["k1"], true));
    let revision = store.write(put(KEY, "hush", Expect::Absent)).await.unwrap();
    store.get(KEY).await.unwrap();
    assert!(!store.is_stale(KEY));
    // A new key encrypts. The old one still decrypts its values, which are stale.
    store.reload(secret_rules(&["k2", "k1"], true)).await.unwrap();
    assert!(store.is_stale(KEY));
    assert_eq!(store.get(KEY).await.unwrap().unwrap().value, "hush");
    store.write(put(KEY, "hush", Expect::Revision(revision))).await.unwrap();
    assert!(inner.get(KEY).await.unwrap().unwrap().value.starts_with(b"k8s:enc:aesgcm:v1:k2:"));
    store.get(KEY).await.unwrap();
    assert!(!store.is_stale(KEY));
    // Rules that cannot decrypt existing values return an error.
    let error = store.reload(secret_rules(&["k3"], true)).await.unwrap_err();
    assert!(error.to_string().contains(KEY) && !error.to_string().contains("hush"), "{error}");
}
