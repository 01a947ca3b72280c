use std::path::Path;
use std::sync::atomic::{AtomicUsize, Ordering};

use jiff::Timestamp;
use serde_json::json;
use testkit::{Asked, Webhook};

use super::*;

/// A server with a certificate of an authority of its own, whose certificate is given too.
pub fn webhook(
    dir: &Path,
    answer: impl Fn(&Asked) -> (u16, Value) + Send + Sync + 'static,
) -> (Webhook, String) {
    let now = Timestamp::now();
    let ca = pki::Authority::load_or_create(dir, "webhook-ca", now).unwrap();
    let leaf = pki::Leaf {
        common_name: "webhook".into(),
        organizations: Vec::new(),
        dns_names: vec!["hook.default.svc".into()],
        ips: vec!["127.0.0.1".parse().unwrap()],
        usage: pki::Usage::Server,
        lifetime: Duration::from_secs(3600),
    };
    let serving = pki::Serving::new(&ca.issue(&leaf, now).unwrap()).unwrap();
    let webhook = Webhook::start(pki::server_config(serving, &[]).unwrap(), answer).unwrap();
    (webhook, ca.pem().to_owned())
}

fn trusting(url: &str, authorities: &str) -> Client {
    let credentials = Credentials { authorities: Some(authorities.to_owned()), ..Credentials::default() };
    Client::new(url, credentials).unwrap()
}

#[tokio::test]
async fn what_passes_is_asked_again_and_what_does_not_is_told() {
    let dir = tempfile::tempdir().unwrap();
    let count = AtomicUsize::new(0);
    let (webhook, ca) = webhook(dir.path(), move |asked| match asked.path.as_str() {
        "/busy" if count.fetch_add(1, Ordering::SeqCst) == 0 => (503, json!({})),
        "/busy" => (200, json!({"asked": asked.body})),
        _ => (404, json!({})),
    });
    let client = trusting(&format!("{}/busy", webhook.url()), &ca);
    for _ in 0..2 {
        assert_eq!(client.review(&json!({"a": 1})).await.unwrap(), json!({"asked": {"a": 1}}));
    }
    assert_eq!(webhook.asked().len(), 3);
    let lost = trusting(&format!("{}/lost", webhook.url()), &ca);
    assert_eq!(lost.review(&json!({})).await.unwrap_err().to_string(), "127.0.0.1 answered with HTTP 404");
    assert_eq!(webhook.asked().len(), 4);
}

#[tokio::test]
async fn strangers_are_told_nothing() {
    let (dir, other) = (tempfile::tempdir().unwrap(), tempfile::tempdir().unwrap());
    let (webhook, _) = webhook(dir.path(), |_| (200, json!({})));
    let ca = pki::Authority::load_or_create(other.path(), "webhook-ca", Timestamp::now()).unwrap();
    let client = trusting(&webhook.url(), ca.pem());
    let error = client.json(Method::POST, "/", Bytes::from_static(b"secret")).await.unwrap_err().to_string();
    assert!(error.starts_with("cannot connect to 127.0.0.1:") && !error.contains("secret"), "{error}");
    assert!(webhook.asked().is_empty());
}

#[test]
fn bad_kubeconfigs_are_named_without_their_secrets() {
    let dir = tempfile::tempdir().unwrap();
    let path = dir.path().join("kubeconfig");
    let check = |cluster: &str, user: &str, expected: &str| {
        let text = format!(
            "clusters: [{{name: c, cluster: {{{cluster}}}}}]\nusers: [{{name: u, user: {{{user}}}}}]\n\
             contexts: [{{name: x, context: {{cluster: c, user: u}}}}]\ncurrent-context: x\n"
        );
        std::fs::write(&path, text).unwrap();
        let error = Client::from_kubeconfig(&path).err().unwrap().to_string();
        assert_eq!(error.replace(&dir.path().display().to_string(), "DIR"), expected);
    };
    check("server: 'http://a/'", "", "\"http://a/\" is not an https:// URL");
    check("server: nonsense", "token: hush", "\"nonsense\" is not an https:// URL");
    check(
        "server: 'https://a/', insecure-skip-tls-verify: true",
        "",
        "DIR/kubeconfig is not a kubeconfig: insecure-skip-tls-verify is not for servers that are trusted with decisions",
    );
    check("server: 'https://a/', certificate-authority: none.crt", "", "cannot read DIR/none.crt");
    check(
        "server: 'https://a/', certificate-authority-data: aHVzaA==",
        "",
        "the certificate authority for \"https://a/\" cannot be used",
    );
    check(
        "server: 'https://a/'",
        "client-key-data: aHVzaA==",
        "DIR/kubeconfig is not a kubeconfig: a client certificate and its key need each other",
    );
    std::fs::write(&path, "- hush").unwrap();
    let error = Client::from_kubeconfig(&path).err().unwrap().to_string();
    assert!(error.ends_with("is not a kubeconfig: it has no current context"), "{error}");
}
