//! Requests with failing webhooks.

use std::sync::Mutex;
use std::sync::mpsc;

use super::*;

/// Creates a ConfigMap whose name selects how the webhook fails.
async fn check(test: &WebhookTest, mode: &str, expected: &str) {
    test.wait_for_cache().await;
    let found = test.send_summary(CONFIG_MAPS, config_map(mode)).await;
    let uid = test
        .hook
        .requests()
        .last()
        .map(|received| received.body["request"]["uid"].clone())
        .unwrap_or_default();
    let found = found.replace(&test.hook.url(), "URL").replace(uid.as_str().unwrap_or("none"), "UID");
    assert_eq!(found, expected, "{mode}");
}

fn failing_answer(received: &WebhookRequest, slow: &Mutex<mpsc::Receiver<()>>) -> (u16, Value) {
    let (status, mut body) = answer(received, json!({}));
    match received.body["request"]["name"].as_str().unwrap() {
        // Until the test ends.
        "slow" => drop(slow.lock().unwrap().recv()),
        "garbage" => return (200, json!("nonsense")),
        "broken" => return (500, json!("boom")),
        "broken-json" => return (500, json!({})),
        "absent" => return (404, json!("no such page")),
        "status" => return (403, json!({"kind": "Status", "status": "Failure", "message": "who are you?"})),
        "empty" => return (200, json!({"kind": "AdmissionReview", "apiVersion": "admission.k8s.io/v1"})),
        "wrong-uid" => body["response"]["uid"] = "other".into(),
        "wrong-kind" => body["kind"] = "Pod".into(),
        "wrong-version" => body["apiVersion"] = "admission.k8s.io/v1beta1".into(),
        "wrong-type" => body["response"]["allowed"] = "yes".into(),
        "no" => return answer(received, json!({"allowed": false})),
        "reason" => return answer(received, json!({"allowed": false, "status": {"reason": "Because"}})),
        "message" => {
            let status = json!({"code": 418, "reason": "Teapot", "message": "short and stout",
                "details": {"causes": [{"reason": "r", "message": "m", "field": "f"}], "retryAfterSeconds": 3}});
            return answer(received, json!({"allowed": false, "status": status, "warnings": ["careful"]}));
        }
        "success" => {
            return answer(received, json!({"allowed": false, "status": {"code": 200, "message": "x"}}));
        }
        "patch" => return answer(received, patch(json!([{"op": "remove", "path": "/data"}]))),
        "patch-type" => return answer(received, json!({"patchType": "JSONPatch"})),
        _ => {}
    }
    (status, body)
}

#[tokio::test(flavor = "multi_thread")]
async fn reports_each_webhook_failure() {
    let (_sender, slow) = mpsc::channel();
    let slow = Mutex::new(slow);
    let test = WebhookTest::start(move |received| failing_answer(received, &slow)).await;
    let mut hook = test.webhook("v.example.com", rule("CREATE", "core", "v1", "configmaps"));
    hook["timeoutSeconds"] = 1.into();
    test.configure("Validating", "v", json!([hook])).await;
    let error_prefix = "500 Internal error occurred: failed calling webhook \"v.example.com\": ";
    let failed = |reason: &str| format!("{error_prefix}failed to call webhook: {reason}");
    let invalid = |reason: &str| format!("{error_prefix}received invalid webhook response: {reason}");
    let denied = "admission webhook \"v.example.com\" denied the request";
    let server = |text: &str| {
        failed(&format!("an error on the server (\"{text}\") has prevented the request from succeeding"))
    };
    check(&test, "fine", "201").await;
    check(&test, "slow", &failed("Post \"URL/v.example.com?timeout=1s\": context deadline exceeded")).await;
    check(
        &test,
        "garbage",
        &failed("couldn't get version/kind; json parse error: invalid character 'o' in literal null (expecting 'u')"),
    )
    .await;
    check(&test, "broken", &server("boom")).await;
    check(&test, "broken-json", &server("unknown")).await;
    check(&test, "absent", &failed("the server could not find the requested resource")).await;
    check(&test, "status", &failed("who are you?")).await;
    check(&test, "empty", &invalid("webhook response was absent")).await;
    check(&test, "wrong-uid", &invalid("expected response.uid=\"UID\", got \"other\"")).await;
    let expected = "expected webhook response of admission.k8s.io/v1, Kind=AdmissionReview, got ";
    check(&test, "wrong-kind", &invalid(&format!("{expected}admission.k8s.io/v1, Kind=Pod"))).await;
    let beta = "admission.k8s.io/v1beta1, Kind=AdmissionReview";
    check(&test, "wrong-version", &invalid(&format!("{expected}{beta}"))).await;
    check(&test, "patch", &invalid("validating webhook may not return response.patch")).await;
    check(&test, "patch-type", &invalid("validating webhook may not return response.patchType")).await;
    check(&test, "no", &format!("400 {denied} without explanation")).await;
    check(&test, "reason", &format!("400 {denied}: Because")).await;
    check(&test, "success", &format!("400 {denied}: x")).await;
    check(&test, "message", &format!("418 {denied}: short and stout")).await;
    let ((_, status), recorder) = test.send(CONFIG_MAPS, config_map("message")).await;
    expect_test::expect![[r#"{"apiVersion":"v1","code":418,"details":{"causes":[{"field":"f","message":"m","reason":"r"}],"retryAfterSeconds":3},"kind":"Status","message":"admission webhook \"v.example.com\" denied the request: short and stout","metadata":{},"reason":"Teapot","status":"Failure"}"#]]
    .assert_eq(&status.to_string());
    assert_eq!(recorder.warnings(), ["careful"]);
    let found = test.send_summary(CONFIG_MAPS, config_map("wrong-type")).await;
    assert!(found.starts_with(&failed("invalid type: string \"yes\", expected a boolean")), "{found}");
    let mut out = String::new();
    test.test_server.server.webhooks.print(&mut out);
    for line in [
        "apiserver_admission_webhook_rejection_count{error_type=\"no_error\",name=\"v.example.com\",operation=\"CREATE\",rejection_code=\"418\",type=\"validating\"} 2",
        "apiserver_admission_webhook_rejection_count{error_type=\"calling_webhook_error\",name=\"v.example.com\",operation=\"CREATE\",rejection_code=\"404\",type=\"validating\"} 1",
        "apiserver_admission_webhook_request_total{code=\"200\",name=\"v.example.com\",operation=\"CREATE\",rejected=\"false\",type=\"validating\"} 1",
    ] {
        assert!(out.lines().any(|found| found == line), "{line}\n{out}");
    }
}

#[tokio::test(flavor = "multi_thread")]
async fn failing_open_allows_requests_and_adds_audit_annotation() {
    let (_sender, slow) = mpsc::channel();
    let slow = Mutex::new(slow);
    let test = WebhookTest::start(move |received| failing_answer(received, &slow)).await;
    let mut hook = test.webhook("v.example.com", rule("CREATE", "core", "v1", "configmaps"));
    hook["failurePolicy"] = "Ignore".into();
    test.configure("Validating", "v", json!([hook.clone()])).await;
    hook["name"] = "m.example.com".into();
    test.configure("Mutating", "m", json!([hook])).await;
    for mode in ["garbage", "broken", "wrong-uid"] {
        check(&test, mode, "201").await;
    }
    // A denial is not a failure.
    check(&test, "no", "400 admission webhook \"m.example.com\" denied the request without explanation")
        .await;
    let (_, recorder) = test.send(CONFIG_MAPS, config_map("empty")).await;
    let found: Vec<String> =
        recorder.annotations().into_iter().map(|(key, text)| format!("{key}: {text}")).collect();
    expect_test::expect![[r#"
        failed-open.mutation.webhook.admission.k8s.io/round_0_index_0: m.example.com
        failed-open.validating.webhook.admission.k8s.io/round_0_index_0: v.example.com
        mutation.webhook.admission.k8s.io/round_0_index_0: {"configuration":"m","mutated":false,"webhook":"m.example.com"}"#]]
    .assert_eq(&found.join("\n"));
    let mut out = String::new();
    test.test_server.server.webhooks.print(&mut out);
    let line = "apiserver_admission_webhook_fail_open_count{name=\"v.example.com\",type=\"validating\"} 4";
    assert!(out.lines().any(|found| found == line), "{out}");
}

#[tokio::test(flavor = "multi_thread")]
async fn reports_unreachable_webhook_and_unknown_authority() {
    let test = WebhookTest::start(|received| answer(received, json!({}))).await;
    let mut hook = test.webhook("v.example.com", rule("CREATE", "core", "v1", "configmaps"));
    let error_prefix =
        "500 Internal error occurred: failed calling webhook \"v.example.com\": failed to call webhook: ";
    let listener = std::net::TcpListener::bind("127.0.0.1:0").unwrap();
    let closed_addr = listener.local_addr().unwrap();
    drop(listener);
    hook["clientConfig"]["url"] = format!("https://{closed_addr}/x").into();
    test.configure("Validating", "v", json!([hook.clone()])).await;
    let connection_error = format!(
        "{error_prefix}Post \"https://{closed_addr}/x?timeout=10s\": dial tcp {closed_addr}: connect: connection refused"
    );
    check(&test, "down", &connection_error).await;
    let other = tempfile::tempdir().unwrap();
    let ca = pki::Authority::load_or_create(other.path(), "other", jiff::Timestamp::now()).unwrap();
    hook["clientConfig"] = json!({"url": test.hook.url(), "caBundle": STANDARD.encode(ca.pem())});
    let path = "/apis/admissionregistration.k8s.io/v1/validatingwebhookconfigurations/v";
    assert_eq!(test.send(&format!("PATCH {path}"), json!({"webhooks": [hook]})).await.0.0, 200);
    test.wait_for_cache().await;
    let unknown_authority = "Post \"URL/?timeout=10s\": tls: failed to verify certificate: x509: certificate signed by unknown authority";
    check(&test, "stranger", &format!("{error_prefix}{unknown_authority}")).await;
    assert!(test.hook.requests().is_empty());
    // A broken webhook can always be deleted: its configuration is not subject to webhooks.
    assert_eq!(test.test_server.send(&format!("DELETE {path}"), json!({})).await.0, 200);
    test.wait_for_cache().await;
    check(&test, "free", "201").await;
}

#[tokio::test(flavor = "multi_thread")]
async fn calls_webhooks_through_services() {
    let test = WebhookTest::start(|received| {
        answer(received, json!({"allowed": received.path == "/ask?timeout=10s"}))
    })
    .await;
    let mut hook = test.webhook("v.example.com", rule("CREATE", "core", "v1", "configmaps"));
    hook["clientConfig"] = json!({
        "service": {"namespace": "default", "name": "hook", "port": 8443, "path": "/ask"}, "caBundle": test.bundle,
    });
    test.configure("Validating", "v", json!([hook])).await;
    let failed = |reason: &str| {
        format!(
            "500 Internal error occurred: failed calling webhook \"v.example.com\": failed to call webhook: Post \"https://hook.default.svc:8443/ask?timeout=10s\": {reason}"
        )
    };
    check(&test, "no-service", &failed("service \"hook\" not found")).await;
    let service = json!({"metadata": {"name": "hook"}, "spec": {"ports": [{"name": "https", "port": 443}]}});
    test.test_server.send("POST /api/v1/namespaces/default/services", service).await;
    check(&test, "no-port", &failed("no service port 8443 found for service \"hook\"")).await;
    let patch = json!({"spec": {"ports": [{"name": "https", "port": 8443}]}});
    let path = "PATCH /api/v1/namespaces/default/services/hook";
    assert_eq!(test.send(path, patch).await.0.0, 200);
    check(&test, "no-endpoint", &failed("no endpoints available for service \"hook\"")).await;
    let port: u16 = test.hook.url().rsplit(':').next().unwrap().parse().unwrap();
    let slice = json!({
        "metadata": {"name": "hook-1", "labels": {"kubernetes.io/service-name": "hook"}}, "addressType": "IPv4",
        "ports": [{"name": "https", "port": port, "protocol": "TCP"}],
        "endpoints": [
            {"addresses": ["192.0.2.1"], "conditions": {"ready": false}},
            // Clients may not write loopback addresses to an EndpointSlice.
            {"addresses": ["192.0.2.2"], "conditions": {"ready": true}},
        ],
    });
    let slices = "POST /apis/discovery.k8s.io/v1/namespaces/default/endpointslices";
    assert_eq!(test.test_server.send(slices, slice).await.0, 201);
    test.wait_for_cache().await;
    let resolved = crate::endpoints::resolve(&test.test_server.server, "default", "hook", 8443);
    assert_eq!(resolved, Ok(("192.0.2.2".to_owned(), port)));
    // The only type of Service that can resolve to a loopback address.
    let external_name = json!({"spec": {"type": "ExternalName", "externalName": "127.0.0.1"}});
    let external_name = test.send(path, external_name).await.0;
    assert_eq!(external_name.0, 200, "{}", external_name.1);
    let service = json!({"namespace": "default", "name": "hook", "port": port, "path": "/ask"});
    let mut hook = test.webhook("v.example.com", rule("CREATE", "core", "v1", "configmaps"));
    hook["clientConfig"] = json!({"service": service, "caBundle": test.bundle});
    let config = "PATCH /apis/admissionregistration.k8s.io/v1/validatingwebhookconfigurations/v";
    assert_eq!(test.send(config, json!({"webhooks": [hook]})).await.0.0, 200);
    test.wait_for_cache().await;
    check(&test, "fine", "201").await;
    assert_eq!(
        test.hook.requests().last().unwrap().header("host"),
        Some(format!("hook.default.svc:{port}").as_str())
    );
}
