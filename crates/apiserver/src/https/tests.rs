use std::path::Path;
use std::sync::atomic::{AtomicUsize, Ordering};

use jiff::Timestamp;
use serde_json::json;
use testkit::{Webhook, WebhookRequest};

use super::*;

/// A server with a certificate of its own CA. Also returns the CA's certificate.
pub fn webhook(
    dir: &Path,
    answer: impl Fn(&WebhookRequest) -> (u16, Value) + Send + Sync + 'static,
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
    let serving = pki::ServingCertificate::new(&ca.issue(&leaf, now).unwrap()).unwrap();
    let webhook = Webhook::start(pki::server_config(serving, &[]).unwrap(), answer).unwrap();
    (webhook, ca.pem().to_owned())
}

fn client_with_ca(url: &str, authorities: &str) -> HttpsClient {
    let credentials = Credentials { authorities: Some(authorities.to_owned()), ..Credentials::default() };
    HttpsClient::new(url, credentials).unwrap()
}

#[tokio::test]
async fn retries_only_temporary_errors() {
    let dir = tempfile::tempdir().unwrap();
    let count = AtomicUsize::new(0);
    let (webhook, ca) = webhook(dir.path(), move |request| match request.path.as_str() {
        "/busy" if count.fetch_add(1, Ordering::SeqCst) == 0 => (503, json!({})),
        "/busy" => (200, json!({"asked": request.body})),
        _ => (404, json!({})),
    });
    let client = client_with_ca(&format!("{}/busy", webhook.url()), &ca);
    for _ in 0..2 {
        assert_eq!(client.post_with_retry(&json!({"a": 1})).await.unwrap(), json!({"asked": {"a": 1}}));
    }
    assert_eq!(webhook.requests().len(), 3);
    let not_found = client_with_ca(&format!("{}/lost", webhook.url()), &ca);
    assert_eq!(
        not_found.post_with_retry(&json!({})).await.unwrap_err().to_string(),
        "127.0.0.1 returned HTTP status 404"
    );
    assert_eq!(webhook.requests().len(), 4);
}

#[tokio::test]
async fn request_is_not_sent_to_server_with_unknown_ca() {
    let (dir, other) = (tempfile::tempdir().unwrap(), tempfile::tempdir().unwrap());
    let (webhook, _) = webhook(dir.path(), |_| (200, json!({})));
    let ca = pki::Authority::load_or_create(other.path(), "webhook-ca", Timestamp::now()).unwrap();
    let client = client_with_ca(&webhook.url(), ca.pem());
    let error =
        client.request_json(Method::POST, "/", Bytes::from_static(b"secret")).await.unwrap_err().to_string();
    assert!(error.starts_with("cannot connect to 127.0.0.1:") && !error.contains("secret"), "{error}");
    assert!(webhook.requests().is_empty());
}

#[test]
fn kubeconfig_errors_do_not_contain_secrets() {
    let dir = tempfile::tempdir().unwrap();
    let path = dir.path().join("kubeconfig");
    let check = |cluster: &str, user: &str, expected: &str| {
        let text = format!(
            "clusters: [{{name: c, cluster: {{{cluster}}}}}]\nusers: [{{name: u, user: {{{user}}}}}]\n\
             contexts: [{{name: x, context: {{cluster: c, user: u}}}}]\ncurrent-context: x\n"
        );
        std::fs::write(&path, text).unwrap();
        let error = HttpsClient::from_kubeconfig(&path).err().unwrap().to_string();
        assert_eq!(error.replace(&dir.path().display().to_string(), "DIR"), expected);
    };
    check("server: 'http://a/'", "", "\"http://a/\" is not an https:// URL");
    check("server: nonsense", "token: hush", "\"nonsense\" is not an https:// URL");
    check(
        "server: 'https://a/', insecure-skip-tls-verify: true",
        "",
        "invalid kubeconfig DIR/kubeconfig: insecure-skip-tls-verify is not supported",
    );
    check("server: 'https://a/', certificate-authority: none.crt", "", "cannot read DIR/none.crt");
    check(
        "server: 'https://a/', certificate-authority-data: aHVzaA==",
        "",
        "invalid certificate authority for \"https://a/\"",
    );
    check(
        "server: 'https://a/'",
        "client-key-data: aHVzaA==",
        "invalid kubeconfig DIR/kubeconfig: a client certificate requires a client key and vice versa",
    );
    std::fs::write(&path, "- hush").unwrap();
    let error = HttpsClient::from_kubeconfig(&path).err().unwrap().to_string();
    assert!(error.ends_with("/kubeconfig: no current context"), "{error}");
}
