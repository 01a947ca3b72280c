use api::ErrorList;
use api::certificates::certificate_signing_request::{
    prepare_approval, prepare_status, set_requester, validate_approval,
};
use base64::Engine as _;
use base64::engine::general_purpose::STANDARD;
use expect_test::{Expect, expect};
use serde_json::{Value, json};

use super::{check, check_update, check_valid, lines, strategy, with_value};

const CSR: &str = "CertificateSigningRequest";
const NOW: &str = "2026-01-02T03:04:05Z";

fn csr() -> Value {
    json!({
        "metadata": {"name": "jane"},
        "spec": {
            "request": STANDARD.encode(include_str!("jane.csr")),
            "signerName": "kubernetes.io/kube-apiserver-client",
            "usages": ["client auth"],
        },
        "status": {},
    })
}

fn certificate() -> Value {
    STANDARD.encode(include_str!("jane.crt")).into()
}

#[test]
fn validates_requests() {
    check_valid(CSR, csr());
    check(
        CSR,
        json!({"spec": {}}),
        expect![[r#"
        spec.request: Invalid value: "": PEM block type must be CERTIFICATE REQUEST
        spec.usages: Required value
        spec.signerName: Required value
    "#]],
    );
    check(
        CSR,
        with_value(csr(), "/spec/request", certificate()),
        expect![[r#"
        spec.request: Invalid value: "LS0tLS1CRUdJTiBDRVJUSUZJQ0FURS0tLS0tCk1JSUJkRENDQVJ1Z0F3SUJBZ0lVU0Y0UGZjNFY2S3krcXV2cmt4L2xueCtYdldNd0NnWUlLb1pJemowRUF3SXcKRHpFTk1Bc0dBMVVFQXd3RWFtRnVaVEFnRncweU5qRXhNVFV5TVRFNE16QmFHQTh5TVRJMk1UQXlNakl4TVRnegpNRm93RHpFTk1Bc0dBMVVFQXd3RWFtRnVaVEJaTUJNR0J5cUdTTTQ5QWdFR0NDcUdTTTQ5QXdFSEEwSUFCRWJPCjhmajBpeWRXazFSTGJSYUdZdm5GbDVzeUhPUXRRK2thZnc4OGpOemR5R2tVS0JaUTNSSHVlR0p4T0pFK3hWNk4KUzFhbmh5QnZGY2pwTjExdHliYWpVekJSTUIwR0ExVWREZ1FXQkJURlNveUFFNytvWm1VWUVGOVpRNHUvSG8yagpOekFmQmdOVkhTTUVHREFXZ0JURlNveUFFNytvWm1VWUVGOVpRNHUvSG8yak56QVBCZ05WSFJNQkFmOEVCVEFECkFRSC9NQW9HQ0NxR1NNNDlCQU1DQTBjQU1FUUNJRWxQaDk5cmNZOWFyd3RWVFZ1RkczYnlJRWczaFVMZ0M4QWIKQ29uZnBXMHBBaUIrUGZ1by9jOC81d1ZGbFB0NElUYTJUNnNiVURSc1V4b2JVRVBIR1czSnFRPT0KLS0tLS1FTkQgQ0VSVElGSUNBVEUtLS0tLQo=": PEM block type must be CERTIFICATE REQUEST
    "#]],
    );
    let usages = json!(["client auth", "fun", "client auth"]);
    check(
        CSR,
        with_value(csr(), "/spec/usages", usages),
        expect![[r#"
        spec.usages[1]: Unsupported value: "fun": supported values: "any", "cert sign", "client auth", "code signing", "content commitment", "crl sign", "data encipherment", "decipher only", "digital signature", "email protection", "encipher only", "ipsec end system", "ipsec tunnel", "ipsec user", "key agreement", "key encipherment", "microsoft sgc", "netscape sgc", "ocsp signing", "s/mime", "server auth", "signing", "timestamping"
        spec.usages[2]: Duplicate value: "client auth"
    "#]],
    );
    check(
        CSR,
        with_value(csr(), "/spec/expirationSeconds", json!(599)),
        expect![[r#"
        spec.expirationSeconds: Invalid value: 599: may not specify a duration less than 600 seconds (10 minutes)
    "#]],
    );
    for signer in ["kubernetes.io/legacy-unknown", "signer", "local/s", "Example.com/a_b", "a.b/c/d"] {
        let errors =
            |expected: Expect| check(CSR, with_value(csr(), "/spec/signerName", json!(signer)), expected);
        match signer {
            "signer" => errors(expect![[r#"
                spec.signerName: Invalid value: "signer": must be a fully qualified domain and path of the form 'example.com/signer-name'
            "#]]),
            "local/s" => errors(expect![[r#"
                spec.signerName: Invalid value: "local": should be a domain with at least two segments separated by dots
            "#]]),
            "Example.com/a_b" => errors(expect![[r#"
                spec.signerName: Invalid value: "Example.com": validating label "Example": a lowercase RFC 1123 label must consist of lower case alphanumeric characters or '-', and must start and end with an alphanumeric character (e.g. 'my-name',  or '123-abc', regex used for validation is '[a-z0-9]([-a-z0-9]*[a-z0-9])?')
                spec.signerName: Invalid value: "a_b": validating label "a_b": a lowercase RFC 1123 subdomain must consist of lower case alphanumeric characters, '-' or '.', and must start and end with an alphanumeric character (e.g. 'example.com', regex used for validation is '[a-z0-9]([-a-z0-9]*[a-z0-9])?(\.[a-z0-9]([-a-z0-9]*[a-z0-9])?)*')
            "#]]),
            "a.b/c/d" => errors(expect![[r#"
                spec.signerName: Invalid value: "a.b/c/d": must be a fully qualified domain and path of the form 'example.com/signer-name'
            "#]]),
            _ => errors(expect![[r#"
                spec.signerName: Invalid value: "kubernetes.io/legacy-unknown": the legacy signerName is not allowed via this API version
            "#]]),
        }
    }
}

#[test]
fn create_sets_requester_from_user() {
    let mut new = with_value(csr(), "/spec/username", json!("root"));
    new["spec"]["groups"] = json!(["system:masters"]);
    new["status"] = json!({"certificate": "eA=="});
    strategy(CSR).prepare_for_create(&mut new);
    set_requester(&mut new, "jane", "", &["devs".to_owned()], &serde_json::Map::new());
    new["spec"]["request"] = Value::Null;
    expect![[r#"{"metadata":{"name":"jane"},"spec":{"groups":["devs"],"request":null,"signerName":"kubernetes.io/kube-apiserver-client","usages":["client auth"],"username":"jane"},"status":{}}"#]].assert_eq(&new.to_string());
}

#[test]
fn spec_change_causes_no_update_error() {
    check_update(CSR, csr(), with_value(csr(), "/spec/usages", json!(["any"])), expect![[r#""#]]);
}

#[track_caller]
fn check_approval(old: Value, conditions: Value, expected: Expect) {
    let mut new = with_value(old.clone(), "/status/conditions", conditions);
    new["status"]["certificate"] = certificate();
    prepare_approval(&mut new, &old, NOW);
    let mut errors = ErrorList::default();
    validate_approval(&new, &old, &mut errors);
    expected.assert_eq(&format!("{}{}\n", lines(&errors), new["status"]));
}

#[test]
fn validates_approval() {
    let approved = json!([{"type": "Approved", "status": "True"}]);
    check_approval(
        csr(),
        approved.clone(),
        expect![[r#"
        {"conditions":[{"lastTransitionTime":"2026-01-02T03:04:05Z","lastUpdateTime":"2026-01-02T03:04:05Z","status":"True","type":"Approved"}]}
    "#]],
    );
    check_approval(
        csr(),
        json!([{"type": "Approved", "status": "True"}, {"type": "Denied", "status": "False"}]),
        expect![[r#"
        status.conditions[1].status: Unsupported value: "False": supported values: "True"
        status.conditions: Invalid value: "Denied": Approved and Denied conditions are mutually exclusive
        {"conditions":[{"lastTransitionTime":"2026-01-02T03:04:05Z","lastUpdateTime":"2026-01-02T03:04:05Z","status":"True","type":"Approved"},{"lastTransitionTime":"2026-01-02T03:04:05Z","lastUpdateTime":"2026-01-02T03:04:05Z","status":"False","type":"Denied"}]}
    "#]],
    );
    check_approval(
        with_value(csr(), "/status/conditions", approved),
        json!([]),
        expect![[r#"
        status.conditions: Forbidden: updates may not remove a condition of type "Approved"
        {"conditions":[]}
    "#]],
    );
}

#[track_caller]
fn check_signing(old: Value, status: Value, expected: Expect) {
    let mut new = with_value(old.clone(), "/status", status);
    prepare_status(&mut new, &old, NOW);
    let mut errors = ErrorList::default();
    strategy(CSR).validate_status_update(&new, &old, &mut errors);
    expected.assert_eq(&lines(&errors));
}

#[test]
fn validates_certificate_update() {
    let approved = json!([{
        "type": "Approved", "status": "True", "reason": "Fine", "lastUpdateTime": NOW, "lastTransitionTime": NOW,
    }]);
    let old = with_value(csr(), "/status/conditions", approved.clone());
    check_signing(old.clone(), json!({"conditions": approved, "certificate": certificate()}), expect![""]);
    let fake_conditions = json!([{"type": "Approved", "status": "True", "reason": "Forged"}]);
    check_signing(
        old.clone(),
        json!({"conditions": fake_conditions, "certificate": "eHl6"}),
        expect![[r#"
        status.certificate: Invalid value: "<certificate data>": must contain at least one CERTIFICATE PEM block
    "#]],
    );
    check_signing(
        csr(),
        json!({"conditions": approved}),
        expect![[r#"
        status.conditions: Forbidden: updates may not add a condition of type "Approved"
    "#]],
    );
    let signed = with_value(old, "/status/certificate", certificate());
    check_signing(
        signed,
        json!({"conditions": approved, "certificate": ""}),
        expect![[r#"
        status.certificate: Forbidden: updates may not modify existing certificate content
    "#]],
    );
}

#[test]
fn selectable_by_signer_name() {
    let fields = strategy(CSR).selectable_fields(&csr());
    assert_eq!(fields, [("spec.signerName", "kubernetes.io/kube-apiserver-client".to_owned())]);
    assert_eq!(strategy(CSR).selectable_fields(&Value::Null), [("spec.signerName", String::new())]);
}
