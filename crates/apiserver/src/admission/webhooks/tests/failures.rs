//! What becomes of a request whose webhook misbehaves.

use std::sync::Mutex;
use std::sync::mpsc;

use super::*;

/// Creates a config map named after the way the webhook misbehaves.
async fn check(stage: &Stage, mode: &str, expected: &str) {
    stage.settle().await;
    let found = stage.brief(CONFIG_MAPS, config_map(mode)).await;
    let uid = stage.hook.asked().last().map(|asked| asked.body["request"]["uid"].clone()).unwrap_or_default();
    let found = found.replace(&stage.hook.url(), "URL").replace(uid.as_str().unwrap_or("none"), "UID");
    assert_eq!(found, expected, "{mode}");
}

fn misbehave(asked: &Asked, slow: &Mutex<mpsc::Receiver<()>>) -> (u16, Value) {
    let (status, mut body) = answer(asked, json!({}));
    match asked.body["request"]["name"].as_str().unwrap() {
        // Until the test is over.
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
        "no" => return answer(asked, json!({"allowed": false})),
        "reason" => return answer(asked, json!({"allowed": false, "status": {"reason": "Because"}})),
        "message" => {
            let status = json!({"code": 418, "reason": "Teapot", "message": "short and stout",
                "details": {"causes": [{"reason": "r", "message": "m", "field": "f"}], "retryAfterSeconds": 3}});
            return answer(asked, json!({"allowed": false, "status": status, "warnings": ["careful"]}));
        }
        "success" => {
            return answer(asked, json!({"allowed": false, "status": {"code": 200, "message": "x"}}));
        }
        "patch" => return answer(asked, patch(json!([{"op": "remove", "path": "/data"}]))),
        "patch-type" => return answer(asked, json!({"patchType": "JSONPatch"})),
        _ => {}
    }
    (status, body)
}

#[tokio::test(flavor = "multi_thread")]
async fn every_way_to_fail_is_told() {
    let (_over, slow) = mpsc::channel();
    let slow = Mutex::new(slow);
    let stage = Stage::start(move |asked| misbehave(asked, &slow)).await;
    let mut hook = stage.webhook("v.example.com", rule("CREATE", "core", "v1", "configmaps"));
    hook["timeoutSeconds"] = 1.into();
    stage.configure("Validating", "v", json!([hook])).await;
    let calling = "500 Internal error occurred: failed calling webhook \"v.example.com\": ";
    let failed = |why: &str| format!("{calling}failed to call webhook: {why}");
    let invalid = |why: &str| format!("{calling}received invalid webhook response: {why}");
    let denied = "admission webhook \"v.example.com\" denied the request";
    let server = |text: &str| {
        failed(&format!("an error on the server (\"{text}\") has prevented the request from succeeding"))
    };
    check(&stage, "fine", "201").await;
    check(&stage, "slow", &failed("Post \"URL/v.example.com?timeout=1s\": context deadline exceeded")).await;
    check(
        &stage,
        "garbage",
        &failed("couldn't get version/kind; json parse error: invalid character 'o' in literal null (expecting 'u')"),
    )
    .await;
    check(&stage, "broken", &server("boom")).await;
    check(&stage, "broken-json", &server("unknown")).await;
    check(&stage, "absent", &failed("the server could not find the requested resource")).await;
    check(&stage, "status", &failed("who are you?")).await;
    check(&stage, "empty", &invalid("webhook response was absent")).await;
    check(&stage, "wrong-uid", &invalid("expected response.uid=\"UID\", got \"other\"")).await;
    let expected = "expected webhook response of admission.k8s.io/v1, Kind=AdmissionReview, got ";
    check(&stage, "wrong-kind", &invalid(&format!("{expected}admission.k8s.io/v1, Kind=Pod"))).await;
    let beta = "admission.k8s.io/v1beta1, Kind=AdmissionReview";
    check(&stage, "wrong-version", &invalid(&format!("{expected}{beta}"))).await;
    check(&stage, "patch", &invalid("validating webhook may not return response.patch")).await;
    check(&stage, "patch-type", &invalid("validating webhook may not return response.patchType")).await;
    check(&stage, "no", &format!("400 {denied} without explanation")).await;
    check(&stage, "reason", &format!("400 {denied}: Because")).await;
    check(&stage, "success", &format!("400 {denied}: x")).await;
    check(&stage, "message", &format!("418 {denied}: short and stout")).await;
    let ((_, status), remarks) = stage.send(CONFIG_MAPS, config_map("message")).await;
    expect_test::expect![[r#"{"apiVersion":"v1","code":418,"details":{"causes":[{"field":"f","message":"m","reason":"r"}],"retryAfterSeconds":3},"kind":"Status","message":"admission webhook \"v.example.com\" denied the request: short and stout","metadata":{},"reason":"Teapot","status":"Failure"}"#]]
    .assert_eq(&status.to_string());
    assert_eq!(remarks.warnings(), ["careful"]);
    let found = stage.brief(CONFIG_MAPS, config_map("wrong-type")).await;
    assert!(found.starts_with(&failed("invalid type: string \"yes\", expected a boolean")), "{found}");
    let mut out = String::new();
    stage.rig.server.webhooks.print(&mut out);
    for line in [
        "apiserver_admission_webhook_rejection_count{error_type=\"no_error\",name=\"v.example.com\",operation=\"CREATE\",rejection_code=\"418\",type=\"validating\"} 2",
        "apiserver_admission_webhook_rejection_count{error_type=\"calling_webhook_error\",name=\"v.example.com\",operation=\"CREATE\",rejection_code=\"404\",type=\"validating\"} 1",
        "apiserver_admission_webhook_request_total{code=\"200\",name=\"v.example.com\",operation=\"CREATE\",rejected=\"false\",type=\"validating\"} 1",
    ] {
        assert!(out.lines().any(|found| found == line), "{line}\n{out}");
    }
}

#[tokio::test(flavor = "multi_thread")]
async fn failing_open_lets_requests_pass_and_leaves_a_trace() {
    let (_over, slow) = mpsc::channel();
    let slow = Mutex::new(slow);
    let stage = Stage::start(move |asked| misbehave(asked, &slow)).await;
    let mut hook = stage.webhook("v.example.com", rule("CREATE", "core", "v1", "configmaps"));
    hook["failurePolicy"] = "Ignore".into();
    stage.configure("Validating", "v", json!([hook.clone()])).await;
    hook["name"] = "m.example.com".into();
    stage.configure("Mutating", "m", json!([hook])).await;
    for mode in ["garbage", "broken", "wrong-uid"] {
        check(&stage, mode, "201").await;
    }
    // A refusal is no failure.
    check(&stage, "no", "400 admission webhook \"m.example.com\" denied the request without explanation")
        .await;
    let (_, remarks) = stage.send(CONFIG_MAPS, config_map("empty")).await;
    let found: Vec<String> =
        remarks.annotations().into_iter().map(|(key, text)| format!("{key}: {text}")).collect();
    expect_test::expect![[r#"
        failed-open.mutation.webhook.admission.k8s.io/round_0_index_0: m.example.com
        failed-open.validating.webhook.admission.k8s.io/round_0_index_0: v.example.com
        mutation.webhook.admission.k8s.io/round_0_index_0: {"configuration":"m","mutated":false,"webhook":"m.example.com"}"#]]
    .assert_eq(&found.join("\n"));
    let mut out = String::new();
    stage.rig.server.webhooks.print(&mut out);
    let line = "apiserver_admission_webhook_fail_open_count{name=\"v.example.com\",type=\"validating\"} 4";
    assert!(out.lines().any(|found| found == line), "{out}");
}

#[tokio::test(flavor = "multi_thread")]
async fn a_webhook_that_is_not_there_or_not_trusted() {
    let stage = Stage::start(|asked| answer(asked, json!({}))).await;
    let mut hook = stage.webhook("v.example.com", rule("CREATE", "core", "v1", "configmaps"));
    let calling =
        "500 Internal error occurred: failed calling webhook \"v.example.com\": failed to call webhook: ";
    let listener = std::net::TcpListener::bind("127.0.0.1:0").unwrap();
    let gone = listener.local_addr().unwrap();
    drop(listener);
    hook["clientConfig"]["url"] = format!("https://{gone}/x").into();
    stage.configure("Validating", "v", json!([hook.clone()])).await;
    let refused = format!(
        "{calling}Post \"https://{gone}/x?timeout=10s\": dial tcp {gone}: connect: connection refused"
    );
    check(&stage, "down", &refused).await;
    let other = tempfile::tempdir().unwrap();
    let ca = pki::Authority::load_or_create(other.path(), "other", jiff::Timestamp::now()).unwrap();
    hook["clientConfig"] = json!({"url": stage.hook.url(), "caBundle": STANDARD.encode(ca.pem())});
    let path = "/apis/admissionregistration.k8s.io/v1/validatingwebhookconfigurations/v";
    assert_eq!(stage.send(&format!("PATCH {path}"), json!({"webhooks": [hook]})).await.0.0, 200);
    stage.settle().await;
    let stranger = "Post \"URL/?timeout=10s\": tls: failed to verify certificate: x509: certificate signed by unknown authority";
    check(&stage, "stranger", &format!("{calling}{stranger}")).await;
    assert!(stage.hook.asked().is_empty());
    // Whoever has locked themselves out gets back in: configurations ask nobody.
    assert_eq!(stage.rig.send(&format!("DELETE {path}"), json!({})).await.0, 200);
    stage.settle().await;
    check(&stage, "free", "201").await;
}

#[tokio::test(flavor = "multi_thread")]
async fn webhooks_behind_services() {
    let stage =
        Stage::start(|asked| answer(asked, json!({"allowed": asked.path == "/ask?timeout=10s"}))).await;
    let mut hook = stage.webhook("v.example.com", rule("CREATE", "core", "v1", "configmaps"));
    hook["clientConfig"] = json!({
        "service": {"namespace": "default", "name": "hook", "port": 8443, "path": "/ask"}, "caBundle": stage.bundle,
    });
    stage.configure("Validating", "v", json!([hook])).await;
    let failed = |why: &str| {
        format!(
            "500 Internal error occurred: failed calling webhook \"v.example.com\": failed to call webhook: Post \"https://hook.default.svc:8443/ask?timeout=10s\": {why}"
        )
    };
    check(&stage, "no-service", &failed("service \"hook\" not found")).await;
    let service = json!({"metadata": {"name": "hook"}, "spec": {"ports": [{"name": "https", "port": 443}]}});
    stage.rig.send("POST /api/v1/namespaces/default/services", service).await;
    check(&stage, "no-port", &failed("no service port 8443 found for service \"hook\"")).await;
    let patch = json!({"spec": {"ports": [{"name": "https", "port": 8443}]}});
    let path = "PATCH /api/v1/namespaces/default/services/hook";
    assert_eq!(stage.send(path, patch).await.0.0, 200);
    check(&stage, "no-endpoint", &failed("no endpoints available for service \"hook\"")).await;
    let port: u16 = stage.hook.url().rsplit(':').next().unwrap().parse().unwrap();
    let slice = json!({
        "metadata": {"name": "hook-1", "labels": {"kubernetes.io/service-name": "hook"}}, "addressType": "IPv4",
        "ports": [{"name": "https", "port": port, "protocol": "TCP"}],
        "endpoints": [
            {"addresses": ["192.0.2.1"], "conditions": {"ready": false}},
            // The loopback address is none for a slice that clients make.
            {"addresses": ["192.0.2.2"], "conditions": {"ready": true}},
        ],
    });
    let slices = "POST /apis/discovery.k8s.io/v1/namespaces/default/endpointslices";
    assert_eq!(stage.rig.send(slices, slice).await.0, 201);
    stage.settle().await;
    let resolved = crate::endpoints::resolve(&stage.rig.server, "default", "hook", 8443);
    assert_eq!(resolved, Ok(("192.0.2.2".to_owned(), port)));
    // The one kind of Service that can lead to a loopback address.
    let elsewhere = json!({"spec": {"type": "ExternalName", "externalName": "127.0.0.1"}});
    let elsewhere = stage.send(path, elsewhere).await.0;
    assert_eq!(elsewhere.0, 200, "{}", elsewhere.1);
    let service = json!({"namespace": "default", "name": "hook", "port": port, "path": "/ask"});
    let mut hook = stage.webhook("v.example.com", rule("CREATE", "core", "v1", "configmaps"));
    hook["clientConfig"] = json!({"service": service, "caBundle": stage.bundle});
    let config = "PATCH /apis/admissionregistration.k8s.io/v1/validatingwebhookconfigurations/v";
    assert_eq!(stage.send(config, json!({"webhooks": [hook]})).await.0.0, 200);
    stage.settle().await;
    check(&stage, "fine", "201").await;
    assert_eq!(
        stage.hook.asked().last().unwrap().header("host"),
        Some(format!("hook.default.svc:{port}").as_str())
    );
}
