use std::sync::Arc;

use jiff::Timestamp;
use k8s_openapi::ByteString;
use k8s_openapi::api::certificates::v1::CertificateSigningRequest;
use pki::Request;
use reconcile::Key;
use serde_json::{Value, json};

use super::plan::{check_request, condition, expires_at, lifetime, matching_approval_rules};
use crate::test_cluster::{TestCluster, wait_for};

/// A request for a certificate of `system:node:n` with a P-256 key and no SANs, created with openssl.
const NODE_REQUEST: &str = include_str!("node.csr");

fn usages(text: &str) -> Vec<String> {
    text.split(',').map(str::to_owned).collect()
}

fn csr(signer: &str, user: &str, conditions: Value) -> CertificateSigningRequest {
    let mut request: CertificateSigningRequest = serde_json::from_value(json!({
        "metadata": {"name": "r", "creationTimestamp": "2026-01-01T00:00:00Z"},
        "spec": {"signerName": signer, "username": user, "usages": ["digital signature", "client auth"], "request": ""},
        "status": {"conditions": conditions},
    }))
    .expect("a request");
    request.spec.request = ByteString(NODE_REQUEST.as_bytes().to_vec());
    request
}

#[test]
fn kubelet_requests_match_approval_rules() {
    let parsed = Request::parse(NODE_REQUEST.as_bytes()).expect("a request");
    let rules = |request: &CertificateSigningRequest| {
        let rules = matching_approval_rules(request, &parsed, |_, _| false);
        rules.iter().map(|rule| rule.subresource).collect::<Vec<_>>().join(" ")
    };
    let kubelet = "kubernetes.io/kube-apiserver-client-kubelet";
    assert_eq!(rules(&csr(kubelet, "system:node:n", json!([]))), "selfnodeclient nodeclient");
    assert_eq!(rules(&csr(kubelet, "system:bootstrap:x", json!([]))), "nodeclient");
    assert_eq!(rules(&csr("kubernetes.io/kube-apiserver-client", "system:node:n", json!([]))), "");
    assert_eq!(rules(&csr(kubelet, "system:node:n", json!([{"type": "Denied", "status": "True"}]))), "");
}

#[test]
fn serving_request_must_match_node_name_and_addresses() {
    let rules = |user: &str, dns: &str, ip: &str| {
        let leaf = pki::Leaf {
            common_name: "system:node:n".into(),
            organizations: vec!["system:nodes".into()],
            dns_names: vec![dns.into()],
            ips: vec![ip.parse().expect("an address")],
            usage: pki::Usage::Server,
            lifetime: std::time::Duration::from_secs(3600),
        };
        let requested = pki::create_csr(&leaf).expect("a request").request;
        let mut request = csr("kubernetes.io/kubelet-serving", user, json!([]));
        request.spec.usages = Some(usages("digital signature,server auth"));
        let parsed = Request::parse(requested.as_bytes()).expect("a request");
        let taken = |ip: std::net::IpAddr, name: &str| ip.to_string() == "192.0.2.2" && name == "n";
        let rules = matching_approval_rules(&request, &parsed, taken);
        rules.iter().map(|rule| rule.subresource).collect::<Vec<_>>().join(" ")
    };
    assert_eq!(rules("system:node:n", "n", "192.0.2.1"), "selfnodeserver");
    assert_eq!(rules("system:node:m", "n", "192.0.2.1"), "", "another user's name");
    assert_eq!(rules("system:node:n", "m", "192.0.2.1"), "", "another host");
    assert_eq!(rules("system:node:n", "n", "192.0.2.2"), "", "another node's address");
    assert_eq!(rules("system:node:n", "n", "127.0.0.1"), "", "a loopback address");
}

#[test]
fn signers_validate_usages_and_names() {
    let parsed = Request::parse(NODE_REQUEST.as_bytes()).expect("a request");
    let check = |signer: &str, requested: &str| {
        check_request(&format!("kubernetes.io/{signer}"), &parsed, &usages(requested))
            .err()
            .unwrap_or_default()
    };
    assert_eq!(check("kube-apiserver-client-kubelet", "client auth,digital signature"), "");
    assert_eq!(
        check("kube-apiserver-client-kubelet", "client auth,server auth"),
        "usages did not match [client auth digital signature key encipherment]"
    );
    assert_eq!(
        check("kubelet-serving", "server auth,digital signature"),
        "DNS or IP subjectAltName is required"
    );
    assert_eq!(check("kube-apiserver-client", "client auth"), "");
    assert_eq!(
        check("kube-apiserver-client", "server auth"),
        "invalid usage for client certificate: server auth"
    );
    assert_eq!(
        check("kube-apiserver-client", "digital signature"),
        "missing required usage for client certificate: client auth"
    );
}

#[test]
fn requests_expire_by_condition() {
    let at = |text: &str| -> Option<Timestamp> { Some(text.parse().expect("a time")) };
    let condition =
        |kind: &str| json!([{"type": kind, "status": "True", "lastUpdateTime": "2026-01-01T02:00:00Z"}]);
    assert_eq!(expires_at(&csr("s", "u", json!([])), None), at("2026-01-02T00:00:00Z"));
    assert_eq!(expires_at(&csr("s", "u", condition("Denied")), None), at("2026-01-01T03:00:00Z"));
    assert_eq!(expires_at(&csr("s", "u", condition("Failed")), None), at("2026-01-01T03:00:00Z"));
    assert_eq!(expires_at(&csr("s", "u", condition("Approved")), None), at("2026-01-02T02:00:00Z"));
    let mut with_certificate = csr("s", "u", condition("Approved"));
    with_certificate.status.get_or_insert_default().certificate = Some(ByteString(b"x".to_vec()));
    assert_eq!(expires_at(&with_certificate, None), at("2026-01-01T03:00:00Z"));
    assert_eq!(expires_at(&with_certificate, at("2026-01-01T02:10:00Z")), at("2026-01-01T02:10:00Z"));
    with_certificate.spec.expiration_seconds = Some(5);
    assert_eq!(lifetime(&with_certificate).as_secs(), 600);
}

#[tokio::test]
async fn kubelet_request_is_signed_after_approval() {
    let test_cluster = TestCluster::start(&[
        "certificatesigningrequest-approving-controller",
        "certificatesigningrequest-cleaner-controller",
        "certificatesigningrequest-signing-controller",
    ])
    .await;
    let mut request = csr("kubernetes.io/kube-apiserver-client-kubelet", "", json!([]));
    request.metadata.creation_timestamp = None;
    request.status = None;
    test_cluster.client.create(&request).await.expect("a request");
    let key = Key::new("", "r");
    let signed = || async {
        let request: CertificateSigningRequest = test_cluster.client.get(&key).await.ok()?;
        let certificate = request.status.as_ref()?.certificate.clone()?;
        Some((request, certificate))
    };
    let (request, certificate) = wait_for("a certificate", signed).await;
    let reason = condition(&request, "Approved").and_then(|condition| condition.reason.clone());
    assert_eq!(reason.as_deref(), Some("AutoApproved"));
    let pem = String::from_utf8(certificate.0).expect("text");
    let authority: &Arc<pki::Authority> =
        &test_cluster.ctx.settings.signers["kubernetes.io/kube-apiserver-client-kubelet"];
    assert!(pki::expiry(&pem) <= pki::expiry(authority.pem()));
}
