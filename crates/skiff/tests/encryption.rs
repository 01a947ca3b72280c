//! Encryption at rest with a real server and key rotation.

use std::path::{Path, PathBuf};

use serde_json::json;
use testkit::Server;

const SECRETS: &str = "/api/v1/namespaces/default/secrets";

/// Writes a configuration with these providers for Secrets and the group `apps`.
fn configure(path: &Path, providers: &str) {
    let text = format!(
        "apiVersion: apiserver.config.k8s.io/v1\nkind: EncryptionConfiguration\nresources:\n\
         - resources: [secrets, '*.apps']\n  providers: {providers}\n"
    );
    std::fs::write(path, text).unwrap();
}

fn aes(name: &str, letter: char) -> String {
    // A key of 32 bytes: 43 characters of base64 and one padding character.
    let secret = base64(&letter.to_string().repeat(32));
    format!("{{name: {name}, secret: '{secret}'}}")
}

fn base64(text: &str) -> String {
    use ::base64::Engine as _;
    ::base64::engine::general_purpose::STANDARD.encode(text)
}

/// Whether the text is in any file of the store.
fn is_on_disk(server: &Server, text: &str) -> bool {
    fn files(dir: &Path, found: &mut Vec<PathBuf>) {
        for entry in std::fs::read_dir(dir).unwrap() {
            let path = entry.unwrap().path();
            if path.is_dir() { files(&path, found) } else { found.push(path) }
        }
    }
    let mut found = Vec::new();
    files(&server.data_dir().join("store"), &mut found);
    let contains = |path: &PathBuf| {
        let bytes = std::fs::read(path).unwrap();
        bytes.windows(text.len()).any(|part| part == text.as_bytes())
    };
    found.iter().any(contains)
}

fn make(server: &Server, name: &str, value: &str) {
    let secret = json!({"metadata": {"name": name}, "stringData": {"password": value}});
    let reply = server.http().post(SECRETS, &secret).unwrap();
    assert_eq!(reply.status, 201, "{}", reply.text());
}

#[track_caller]
fn password(server: &Server, name: &str) -> String {
    let reply = server.http().get(&format!("{SECRETS}/{name}")).unwrap();
    assert_eq!(reply.status, 200, "{}", reply.text());
    reply.json()["data"]["password"].as_str().unwrap_or("").to_owned()
}

#[test]
fn secrets_are_encrypted_on_disk_and_keys_are_rotated() {
    let dir = tempfile::tempdir().unwrap();
    let path = dir.path().join("encryption.yaml");
    configure(&path, &format!("[{{aesgcm: {{keys: [{}]}}}}, {{identity: {{}}}}]", aes("one", 'a')));
    let flag = format!("--kube-apiserver-arg=encryption-provider-config={}", path.display());
    let mut server = Server::start_with(&["--log=debug", &flag]);
    let value = base64("very-private");
    make(&server, "first", "very-private");
    assert_eq!(password(&server, "first"), value);
    assert!(!is_on_disk(&server, &value), "the plain value is on disk");
    assert!(is_on_disk(&server, "k8s:enc:aesgcm:v1:one:"));
    let map = json!({"metadata": {"name": "m"}, "data": {"k": "for-everybody"}});
    server.http().post("/api/v1/namespaces/default/configmaps", &map).unwrap();
    assert!(is_on_disk(&server, "for-everybody"), "other resources are not encrypted");
    server.restart();
    assert_eq!(password(&server, "first"), value);

    // With a new first key, it encrypts and both keys decrypt. Writing an unchanged object encrypts it
    // with the new key.
    server.stop();
    let both = format!("[{{aesgcm: {{keys: [{}, {}]}}}}]", aes("two", 'b'), aes("one", 'a'));
    configure(&path, &both);
    server.restart();
    assert_eq!(password(&server, "first"), value);
    assert!(!is_on_disk(&server, "k8s:enc:aesgcm:v1:two:"));
    let url = format!("{SECRETS}/first");
    let object = server.http().get(&url).unwrap();
    let put =
        |body: &[u8]| server.http().send("PUT", &url, &[("content-type", "application/json")], body).unwrap();
    let replaced = put(&object.body);
    assert_eq!(replaced.status, 200, "{}", replaced.text());
    assert!(
        is_on_disk(&server, "k8s:enc:aesgcm:v1:two:"),
        "an unchanged object is encrypted with the new key"
    );
    let again = put(&replaced.body).json();
    assert_eq!(
        again["metadata"]["resourceVersion"],
        replaced.json()["metadata"]["resourceVersion"],
        "a second write changes nothing"
    );
    let log = server.log();
    assert!(!log.contains(&value) && !log.contains("very-private"), "{log}");

    // Without the key of a stored object the server does not start and names the object.
    server.stop();
    configure(&path, &format!("[{{aesgcm: {{keys: [{}]}}}}]", aes("three", 'c')));
    let failed = std::panic::catch_unwind(std::panic::AssertUnwindSafe(|| server.restart())).unwrap_err();
    let message = failed.downcast_ref::<String>().unwrap();
    assert!(message.contains("/registry/secrets/default/first: no matching key was found"), "{message}");
    assert!(!message.contains(&base64(&"c".repeat(32))), "{message}");
}
