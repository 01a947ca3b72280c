//! Tokens of service accounts against a real server, as kubectl and programs in pods use them.

use serde_json::{Value, json};
use testkit::Server;

const SERVICE_ACCOUNT_USER: &str = "system:serviceaccount:default:robot";
const POD: &str = "apiVersion: v1
kind: Pod
metadata: {name: web}
spec:
  serviceAccountName: robot
  containers: [{name: c, image: web:1}]
";

#[test]
fn kubectl_can_create_and_use_tokens() {
    let Some(server) = start() else { return };
    let token = make(&server, "robot", &[]);
    assert_eq!(username(&server, &token), (201, SERVICE_ACCOUNT_USER.to_owned()));
    let review = with_token(&server, &token, &["auth", "whoami", "-o", "json"]);
    assert_eq!(review.code, 0, "{}", review.stderr);
    let user: Value = serde_json::from_str(&review.stdout).unwrap();
    let user = &user["status"]["userInfo"];
    assert_eq!(user["username"], SERVICE_ACCOUNT_USER);
    assert_eq!(
        user["groups"],
        json!(["system:serviceaccounts", "system:serviceaccounts:default", "system:authenticated"])
    );
    let id = user["extra"]["authentication.kubernetes.io/credential-id"][0].as_str().unwrap();
    assert!(id.starts_with("JTI="), "{id}");

    let secrets = with_token(&server, &token, &["get", "secrets"]);
    assert_eq!(
        secrets.stderr,
        "Error from server (Forbidden): secrets is forbidden: User \"system:serviceaccount:default:robot\" cannot list resource \"secrets\" in API group \"\" in the namespace \"default\"\n"
    );
    let garbage = with_token(&server, "garbage", &["get", "pods"]);
    assert_eq!(garbage.stderr, "error: You must be logged in to the server (Unauthorized)\n");
    assert_eq!(username(&server, "garbage"), (401, "Unauthorized".to_owned()));
    assert_eq!(username(&server, &format!("{token}A")).0, 401);
    let short = server.kubectl(&["create", "token", "robot", "--duration=1m"]);
    assert_eq!(
        short.stderr,
        "error: failed to create token: TokenRequest.authentication.k8s.io \"\" is invalid: spec.expirationSeconds: Invalid value: 60: may not specify a duration less than 10 minutes\n"
    );
    let other_audience = make(&server, "robot", &["--audience=vault"]);
    assert_eq!(username(&server, &other_audience).0, 401);
    assert!(!server.log().contains(&token), "the log contains a token");
}

#[test]
fn bound_tokens_are_invalid_after_object_deletion() {
    let Some(server) = start() else { return };
    server.kubectl_with(&["create", "-f", "-"], POD).ok();
    server.kubectl(&["create", "secret", "generic", "pass"]).ok();
    let bound = |kind: &str, name: &str| {
        make(&server, "robot", &["--bound-object-kind", kind, "--bound-object-name", name])
    };
    let tokens = [("pod", "web", bound("Pod", "web")), ("secret", "pass", bound("Secret", "pass"))];
    for (kind, name, token) in &tokens {
        assert_eq!(username(&server, token), (201, SERVICE_ACCOUNT_USER.to_owned()));
        server.kubectl(&["delete", kind, name, "--now"]).ok();
        assert_eq!(username(&server, token), (401, "Unauthorized".to_owned()), "{kind}");
    }
    let token = make(&server, "robot", &[]);
    assert_eq!(username(&server, &token), (201, SERVICE_ACCOUNT_USER.to_owned()));
    server.kubectl(&["delete", "serviceaccount", "robot"]).ok();
    assert_eq!(username(&server, &token), (401, "Unauthorized".to_owned()));
    // A new service account with the same name does not make the old token valid.
    server.kubectl(&["create", "serviceaccount", "robot"]).ok();
    assert_eq!(username(&server, &token), (401, "Unauthorized".to_owned()));
}

#[test]
fn tokens_stay_valid_after_restart_and_key_rotation() {
    let Some(mut server) = start() else { return };
    let old = make(&server, "robot", &[]);
    server.stop();
    let tls = server.data_dir().join("tls");
    std::fs::rename(tls.join("service-account.key"), tls.join("service-account-1.key")).unwrap();
    server.restart();
    assert_eq!(username(&server, &old), (201, SERVICE_ACCOUNT_USER.to_owned()));
    let new = make(&server, "robot", &[]);
    assert_eq!(username(&server, &new), (201, SERVICE_ACCOUNT_USER.to_owned()));

    // The keys with which other parties verify the tokens.
    let reply = server.http().get("/openid/v1/jwks").unwrap();
    assert_eq!(reply.header("content-type"), Some("application/jwk-set+json"));
    let keys = reply.json();
    assert_eq!(keys["keys"].as_array().map(Vec::len), Some(2));
    let configuration = server.http().get("/.well-known/openid-configuration").unwrap().json();
    assert_eq!(configuration["issuer"], "https://kubernetes.default.svc.cluster.local");

    server.stop();
    std::fs::remove_file(tls.join("service-account-1.key")).unwrap();
    server.restart();
    assert_eq!(username(&server, &old).0, 401);
    assert_eq!(username(&server, &new), (201, SERVICE_ACCOUNT_USER.to_owned()));
}

/// A server with a service account; `None` without kubectl.
fn start() -> Option<Server> {
    if !testkit::has_kubectl() {
        eprintln!("skipped: no kubectl");
        return None;
    }
    let server = Server::start();
    server.kubectl(&["create", "serviceaccount", "robot"]).ok();
    Some(server)
}

#[track_caller]
fn make(server: &Server, account: &str, flags: &[&str]) -> String {
    let token = server.kubectl(&[&["create", "token", account], flags].concat()).ok();
    token.trim().to_owned()
}

/// kubectl with a token and without a client certificate, which would take precedence.
#[track_caller]
fn with_token(server: &Server, token: &str, args: &[&str]) -> testkit::Output {
    let url = server.url();
    let flags = ["--kubeconfig=/dev/null", "--insecure-skip-tls-verify", "--server", &url, "--token", token];
    server.kubectl(&[&flags[..], args].concat())
}

/// How the server authenticates a token: the status code, and the user name or the error message.
#[track_caller]
fn username(server: &Server, token: &str) -> (u16, String) {
    let authorization = format!("Bearer {token}");
    let headers = [("authorization", authorization.as_str()), ("content-type", "application/json")];
    let reply = server
        .anonymous()
        .send("POST", "/apis/authentication.k8s.io/v1/selfsubjectreviews", &headers, b"{}")
        .unwrap();
    let answer = reply.json();
    let name = answer["status"]["userInfo"]["username"].as_str();
    (reply.status, name.or(answer["message"].as_str()).unwrap_or("").to_owned())
}
