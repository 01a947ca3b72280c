//! The audit log of the built binary, configured with upstream's flags.

use serde_json::{Value, json};
use testkit::Server;

const POLICY: &str = "
apiVersion: audit.k8s.io/v1
kind: Policy
omitStages: [RequestReceived]
rules:
- {level: None, userGroups: ['system:serviceaccounts']}
- {level: Metadata, resources: [{resources: [secrets]}]}
- {level: RequestResponse, resources: [{resources: [configmaps]}], namespaces: [default]}
";

#[test]
fn audit_log_follows_policy() {
    let dir = tempfile::tempdir().unwrap();
    let (policy, log) = (dir.path().join("policy.yaml"), dir.path().join("audit.log"));
    std::fs::write(&policy, POLICY).unwrap();
    let flags = [
        format!("--kube-apiserver-arg=audit-policy-file={}", policy.display()),
        format!("--kube-apiserver-arg=audit-log-path={}", log.display()),
        "--kube-apiserver-arg=audit-log-maxsize=1".to_owned(),
    ];
    let mut server = Server::start_with(&flags.each_ref().map(String::as_str));
    let http = server.http();
    let map = json!({"metadata": {"name": "m"}, "data": {"a": "b"}});
    let secret = json!({"metadata": {"name": "s"}, "stringData": {"password": "hunter2"}});
    for (plural, object) in [("configmaps", map), ("secrets", secret)] {
        let reply = http.post(&format!("/api/v1/namespaces/default/{plural}"), &object).unwrap();
        assert_eq!(reply.status, 201, "{}", reply.text());
        // The FlowSchema of the request, identified by its UID.
        assert_eq!(reply.header("x-kubernetes-pf-flowschema-uid").map(str::len), Some(36));
    }
    server.stop();
    let text = std::fs::read_to_string(&log).unwrap();
    assert!(!text.contains("hunter2") && !text.contains("aHVudGVyMg"), "{text}");
    let events: Vec<Value> = text.lines().map(|line| serde_json::from_str(line).unwrap()).collect();
    let of = |resource: &str| {
        // Requests of the server itself are in other namespaces.
        let in_default_namespace = |event: &&Value| event["objectRef"]["namespace"] == "default";
        let events = events
            .iter()
            .filter(in_default_namespace)
            .filter(|event| event["objectRef"]["resource"] == resource);
        let events: Vec<&Value> = events.collect();
        assert_eq!(events.len(), 1, "{text}");
        events[0]
    };
    let map = of("configmaps");
    assert_eq!((&map["level"], &map["verb"]), (&json!("RequestResponse"), &json!("create")));
    assert_eq!(map["user"]["username"], "system:admin");
    assert_eq!(map["sourceIPs"], json!(["127.0.0.1"]));
    assert_eq!(map["responseObject"]["data"], json!({"a": "b"}));
    assert_eq!(of("secrets")["objectRef"]["name"], "s");
    assert!(of("secrets")["requestObject"].is_null());
}

#[test]
fn invalid_audit_policy_prevents_server_start() {
    let dir = tempfile::tempdir().unwrap();
    let policy = dir.path().join("policy.yaml");
    std::fs::write(&policy, "apiVersion: audit.k8s.io/v1\nkind: Policy\nrules: []\n").unwrap();
    let output = std::process::Command::new(testkit::binary().expect("a program"))
        .args(["server", "--disable-agent", "--bind-address", "127.0.0.1", "--https-listen-port", "0"])
        .arg("--data-dir")
        .arg(dir.path().join("data"))
        .arg(format!("--kube-apiserver-arg=audit-policy-file={}", policy.display()))
        .output()
        .unwrap();
    let text = String::from_utf8_lossy(&output.stderr);
    assert!(!output.status.success() && text.contains("loaded illegal policy with 0 rules"), "{text}");
}
