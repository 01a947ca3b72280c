//! Standalone components serve health, metrics and their configuration, with authorization.

use std::net::TcpListener;
use std::process::Command;
use std::time::Duration;

use jiff::Timestamp;
use pki::{Authority, Leaf, Usage};
use serde_json::json;
use testkit::{Http, Process, Server};

const TIMEOUT: Duration = Duration::from_secs(60);

/// A port that is free at the moment.
fn free_port() -> u16 {
    TcpListener::bind("127.0.0.1:0").unwrap().local_addr().unwrap().port()
}

fn check_component(server: &Server, role: &str, group: &str, expected_metric: &str) {
    let dir = tempfile::tempdir().unwrap();
    let authority = Authority::load_or_create(dir.path(), "ca", Timestamp::now()).unwrap();
    let leaf = Leaf {
        common_name: role.to_owned(),
        organizations: Vec::new(),
        dns_names: vec!["localhost".to_owned()],
        ips: vec!["127.0.0.1".parse().unwrap()],
        usage: Usage::Server,
        lifetime: Duration::from_secs(3600),
    };
    let serving_pair =
        pki::load_or_issue(dir.path(), "serving", &authority, &leaf, Timestamp::now()).unwrap();
    let port = free_port();
    let mut command: Command = server.command(testkit::binary().expect("a program"));
    command.args([role, "--bind-address=127.0.0.1", &format!("--secure-port={port}")]);
    command.arg(format!("--kubeconfig={}", server.kubeconfig().display()));
    for (flag, file) in [("tls-cert-file", "serving.crt"), ("tls-private-key-file", "serving.key")] {
        command.arg(format!("--{flag}={}", dir.path().join(file).display()));
    }
    let mut process = Process::spawn(&mut command).unwrap();
    let url = format!("https://127.0.0.1:{port}");
    let kubeconfig = pki::kubeconfig(&url, authority.pem(), &serving_pair, "monitor");
    let anonymous = Http::anonymous(&kubeconfig).unwrap();
    let healthy = || anonymous.get("/healthz").ok().filter(|reply| reply.status == 200);
    assert_eq!(process.wait_until(TIMEOUT, healthy).unwrap().text(), "ok");
    assert_eq!(anonymous.get("/readyz").unwrap().text(), "ok");
    assert!(anonymous.get("/livez?verbose").unwrap().text().contains("livez check passed"));

    let denied = anonymous.get("/metrics").unwrap();
    assert_eq!(denied.status, 403);
    let words = "forbidden: User \"system:anonymous\" cannot get path \"/metrics\"";
    assert_eq!(denied.json()["message"], words);
    let bearer = |token: &str| {
        let header = format!("Bearer {token}");
        anonymous.send("GET", "/metrics", &[("authorization", &header)], b"").unwrap()
    };
    assert_eq!(bearer("nonsense").status, 401);
    let request = json!({"apiVersion": "authentication.k8s.io/v1", "kind": "TokenRequest", "spec": {}});
    let path = "/api/v1/namespaces/default/serviceaccounts/default/token";
    let token = process.wait_until(TIMEOUT, || {
        let answer = server.http().post(path, &request).ok()?.json();
        answer["status"]["token"].as_str().map(str::to_owned)
    });
    let token = token.unwrap();
    assert_eq!(bearer(&token).status, 403, "the service account has no permission");

    // The administrator's certificate is accepted, because the API server publishes the CA for client
    // certificates.
    let own = std::fs::read_to_string(server.kubeconfig()).unwrap();
    let value = |field: &str| {
        use base64::Engine as _;
        let line = own.lines().find_map(|line| line.trim().strip_prefix(&format!("{field}: "))).unwrap();
        String::from_utf8(base64::engine::general_purpose::STANDARD.decode(line).unwrap()).unwrap()
    };
    let (certificate, key) = (value("client-certificate-data"), value("client-key-data"));
    let admin = Http::with_certificate(&kubeconfig, &certificate, &key).unwrap();
    let has_metric = |text: &str| text.contains(expected_metric).then_some(());
    process.wait_until(TIMEOUT, || has_metric(&admin.get("/metrics").ok()?.text())).unwrap();
    let metrics = admin.get("/metrics").unwrap().text();
    assert!(metrics.contains("process_resident_memory_bytes "), "{metrics}");
    assert!(admin.get("/configz").unwrap().json()[group].is_object());
    assert_eq!(admin.get("/nothing").unwrap().status, 404);
    // A certificate of an unknown CA is rejected.
    let other_certificate =
        authority.issue(&Leaf { usage: Usage::Client, ..leaf }, Timestamp::now()).unwrap();
    let other_client =
        Http::with_certificate(&kubeconfig, &other_certificate.cert_pem, &other_certificate.key_pem).unwrap();
    assert_eq!(other_client.get("/metrics").unwrap().status, 401);
    process.terminate(TIMEOUT).unwrap();
}

#[test]
fn components_serve_health_metrics_and_config() {
    let server = Server::start();
    check_component(
        &server,
        "controller-manager",
        "kubecontrollermanager.config.k8s.io",
        "leader_election_master_status{name=\"kube-controller-manager\"} 1",
    );
    check_component(
        &server,
        "scheduler",
        "kubescheduler.config.k8s.io",
        "scheduler_cache_size{type=\"nodes\"} 0",
    );
}
