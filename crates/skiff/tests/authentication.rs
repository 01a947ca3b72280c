//! All authentication methods, and authorization webhooks, against a real server.

use std::path::Path;
use std::time::Duration;

use jiff::Timestamp;
use pki::{Authority, CertKeyPair, Leaf, Usage};
use serde_json::{Value, json};
use tempfile::TempDir;
use testkit::{Http, Server, Webhook};

const UNAUTHORIZED: (u16, &str) = (401, "Unauthorized");

fn leaf(common_name: &str, usage: Usage) -> Leaf {
    Leaf {
        common_name: common_name.into(),
        organizations: vec!["crew".into()],
        dns_names: vec!["localhost".into()],
        ips: vec!["127.0.0.1".parse().unwrap()],
        usage,
        lifetime: Duration::from_secs(3600),
    }
}

fn authority(dir: &Path, name: &str) -> Authority {
    Authority::load_or_create(dir, name, Timestamp::now()).unwrap()
}

fn client(authority: &Authority, common_name: &str) -> CertKeyPair {
    authority.issue(&leaf(common_name, Usage::Client), Timestamp::now()).unwrap()
}

fn with_certificate(server: &Server, certificate: &CertKeyPair) -> Http {
    let kubeconfig = std::fs::read_to_string(server.kubeconfig()).unwrap();
    Http::with_certificate(&kubeconfig, &certificate.cert_pem, &certificate.key_pem).unwrap()
}

/// How the server authenticates a client: the status code, and the user name or the error message.
#[track_caller]
fn username(http: &Http, headers: &[(&str, &str)]) -> (u16, String) {
    let info = self_subject_review(http, headers);
    let name = info.1["status"]["userInfo"]["username"].as_str().or(info.1["message"].as_str());
    (info.0, name.unwrap_or("").to_owned())
}

#[track_caller]
fn self_subject_review(http: &Http, headers: &[(&str, &str)]) -> (u16, Value) {
    let path = "/apis/authentication.k8s.io/v1/selfsubjectreviews";
    let headers = [headers, &[("content-type", "application/json")]].concat();
    let reply = http.send("POST", path, &headers, b"{}").unwrap();
    (reply.status, reply.json())
}

#[track_caller]
fn check(found: (u16, String), expected: (u16, &str)) {
    assert_eq!((found.0, found.1.as_str()), expected);
}

fn argument(name: &str, path: &Path) -> String {
    format!("--kube-apiserver-arg={name}={}", path.display())
}

fn write(dir: &TempDir, name: &str, text: &str) -> std::path::PathBuf {
    let path = dir.path().join(name);
    std::fs::write(&path, text).unwrap();
    path
}

#[test]
fn rejects_certificates_of_unknown_authorities() {
    let dir = tempfile::tempdir().unwrap();
    let (extra_ca, other_ca) = (authority(dir.path(), "extra"), authority(dir.path(), "stranger"));
    let file = write(&dir, "more.crt", extra_ca.pem());
    let tokens = write(&dir, "tokens.csv", "letmein,ann,7\n");
    let server =
        Server::start_with(&[&argument("client-ca-file", &file), &argument("token-auth-file", &tokens)]);
    check(username(&server.http(), &[]), (201, "system:admin"));
    check(username(&with_certificate(&server, &client(&extra_ca, "eve")), &[]), (201, "eve"));
    let unknown_client = with_certificate(&server, &client(&other_ca, "system:admin"));
    check(username(&unknown_client, &[]), UNAUTHORIZED);
    assert_eq!(
        unknown_client.get("/healthz").unwrap().status,
        401,
        "the request is not treated as anonymous"
    );
    check(username(&unknown_client, &[("authorization", "Bearer letmein")]), (201, "ann"));
    check(username(&unknown_client, &[("authorization", "Bearer wrong")]), UNAUTHORIZED);
    let server_certificate = extra_ca.issue(&leaf("eve", Usage::Server), Timestamp::now()).unwrap();
    check(username(&with_certificate(&server, &server_certificate), &[]), UNAUTHORIZED);
    let past = Timestamp::now() - Duration::from_secs(7200);
    let expired = extra_ca.issue(&leaf("eve", Usage::Client), past).unwrap();
    check(username(&with_certificate(&server, &expired), &[]), UNAUTHORIZED);
}

#[test]
fn token_file_maps_tokens_to_users() {
    let dir = tempfile::tempdir().unwrap();
    let tokens = write(&dir, "tokens.csv", "s3cret-ann,ann,7\ns3cret-bob,bob,8,\"dev,ops\"\n");
    let server = Server::start_with(&["--log=debug", &argument("token-auth-file", &tokens)]);
    let http = server.anonymous();
    let (_, bob) = self_subject_review(&http, &[("authorization", "Bearer s3cret-bob")]);
    let expected = json!({"username": "bob", "uid": "8", "groups": ["dev", "ops", "system:authenticated"]});
    assert_eq!(bob["status"]["userInfo"], expected);
    check(username(&http, &[("authorization", "Bearer s3cret-ann")]), (201, "ann"));
    check(username(&http, &[("authorization", "Bearer s3cret-eve")]), UNAUTHORIZED);
    let review = json!({"spec": {"token": "s3cret-bob"}});
    let path = "/apis/authentication.k8s.io/v1/tokenreviews";
    let status = server.http().post(path, &review).unwrap().json()["status"].take();
    assert_eq!(
        status,
        json!({
            "authenticated": true, "user": expected,
            "audiences": ["https://kubernetes.default.svc.cluster.local"],
        })
    );
    let review = json!({"spec": {"token": "s3cret-bob", "audiences": ["vault"]}});
    let status = server.http().post(path, &review).unwrap().json()["status"].take();
    assert_eq!(status, json!({"user": {}, "error": "invalid bearer token"}));
    assert!(!server.log().contains("s3cret"), "the log contains a token:\n{}", server.log());
}

#[test]
fn bootstrap_tokens_expire_and_end_with_their_secret() {
    let server = Server::start_with(&["--log=debug"]);
    let secrets = "/api/v1/namespaces/kube-system/secrets";
    let make = |id: &str, more: Value| {
        let mut data = json!({
            "token-id": id, "token-secret": "0123456789abcdef", "usage-bootstrap-authentication": "true",
        });
        for (key, value) in more.as_object().unwrap() {
            data[key] = value.clone();
        }
        let secret = json!({
            "metadata": {"name": format!("bootstrap-token-{id}")},
            "type": "bootstrap.kubernetes.io/token", "stringData": data,
        });
        let reply = server.http().post(secrets, &secret).unwrap();
        assert_eq!(reply.status, 201, "{}", reply.text());
    };
    let http = server.anonymous();
    let bearer = |id: &str| {
        let value = format!("Bearer {id}.0123456789abcdef");
        self_subject_review(&http, &[("authorization", &value)])
    };
    let name = |id: &str| bearer(id).1["status"]["userInfo"]["username"].as_str().unwrap_or("").to_owned();
    assert_eq!(bearer("aaaaaa").0, 401);
    make(
        "aaaaaa",
        json!({"auth-extra-groups": "system:bootstrappers:worker", "expiration": "2999-01-01T00:00:00Z"}),
    );
    let (code, known) = bearer("aaaaaa");
    assert_eq!(code, 201);
    assert_eq!(
        known["status"]["userInfo"],
        json!({
            "username": "system:bootstrap:aaaaaa",
            "groups": ["system:bootstrappers", "system:bootstrappers:worker", "system:authenticated"],
        })
    );
    make("bbbbbb", json!({"expiration": "2020-01-01T00:00:00Z"}));
    make("cccccc", json!({"usage-bootstrap-authentication": "false"}));
    make("dddddd", json!({"token-secret": "another9another9"}));
    for id in ["bbbbbb", "cccccc", "dddddd"] {
        assert_eq!(bearer(id).0, 401, "{id}");
    }
    make("eeeeee", json!({}));
    assert_eq!(name("eeeeee"), "system:bootstrap:eeeeee");
    let path = format!("{secrets}/bootstrap-token-eeeeee");
    assert_eq!(server.http().send("DELETE", &path, &[], b"").unwrap().status, 200);
    assert_eq!(bearer("eeeeee").0, 401, "revoked immediately");
    assert!(!server.log().contains("0123456789abcdef"), "{}", server.log());
}

#[test]
fn only_trusted_proxies_can_set_user_headers() {
    let server = Server::start();
    let tls = server.data_dir().join("tls");
    let proxies = authority(&tls, "request-header-ca");
    let proxy = with_certificate(&server, &client(&proxies, "system:auth-proxy"));
    let headers = [
        ("x-remote-user", "ann"),
        ("x-remote-uid", "7"),
        ("x-remote-group", "dev"),
        ("x-remote-group", "ops"),
        ("x-remote-extra-acme.com%2fproject", "one"),
        ("x-remote-extra-acme.com%2fproject", "two"),
    ];
    let (code, answer) = self_subject_review(&proxy, &headers);
    assert_eq!(code, 201, "{answer}");
    assert_eq!(
        answer["status"]["userInfo"],
        json!({
            "username": "ann", "uid": "7", "groups": ["dev", "ops", "system:authenticated"],
            "extra": {"acme.com/project": ["one", "two"]},
        })
    );
    check(username(&proxy, &[]), UNAUTHORIZED);
    check(username(&with_certificate(&server, &client(&proxies, "mallory")), &headers), UNAUTHORIZED);
    check(username(&server.http(), &headers), (201, "system:admin"));
    let clients = authority(&tls, "client-ca");
    check(
        username(&with_certificate(&server, &client(&clients, "system:auth-proxy")), &headers),
        (201, "system:auth-proxy"),
    );
    assert_eq!(username(&server.anonymous(), &headers).0, 403, "an anonymous user");

    let path = "/api/v1/namespaces/kube-system/configmaps/extension-apiserver-authentication";
    let map = server.http().get(path).unwrap().json();
    let expected = json!({
        "client-ca-file": clients.pem(),
        "requestheader-client-ca-file": proxies.pem(),
        "requestheader-allowed-names": "[\"system:auth-proxy\"]",
        "requestheader-username-headers": "[\"X-Remote-User\"]",
        "requestheader-uid-headers": "[\"X-Remote-Uid\"]",
        "requestheader-group-headers": "[\"X-Remote-Group\"]",
        "requestheader-extra-headers-prefix": "[\"X-Remote-Extra-\"]",
    });
    assert_eq!(map["data"], expected);
}

#[test]
fn anonymous_auth_can_be_disabled() {
    let mut server = Server::start_with(&["--kube-apiserver-arg=anonymous-auth=false"]);
    check(username(&server.anonymous(), &[]), UNAUTHORIZED);
    for path in ["/healthz", "/version", "/api"] {
        assert_eq!(server.anonymous().get(path).unwrap().status, 401, "{path}");
        assert_eq!(server.http().get(path).unwrap().status, 200, "{path}");
    }
    server.stop();
    let server = Server::start();
    let anonymous = server.anonymous();
    for (path, code) in [("/healthz", 200), ("/version", 200), ("/api", 403), ("/api/v1/pods", 403)] {
        assert_eq!(anonymous.get(path).unwrap().status, code, "{path}");
    }
}

/// A webhook with a certificate of its own CA, and a kubeconfig for it.
fn webhook(
    dir: &TempDir,
    path: &str,
    answer: impl Fn(&testkit::WebhookRequest) -> (u16, Value) + Send + Sync + 'static,
) -> (Webhook, std::path::PathBuf) {
    let ca = authority(dir.path(), "webhook-ca");
    let certificate = ca.issue(&leaf("webhook", Usage::Server), Timestamp::now()).unwrap();
    let tls = pki::server_config(pki::ServingCertificate::new(&certificate).unwrap(), &[]).unwrap();
    let webhook = Webhook::start(tls, answer).unwrap();
    let kubeconfig = format!(
        "{{clusters: [{{name: c, cluster: {{server: '{}{path}', certificate-authority: webhook-ca.crt}}}}], \
         users: [{{name: u, user: {{token: our-own-token}}}}], \
         contexts: [{{name: x, context: {{cluster: c, user: u}}}}], current-context: x}}",
        webhook.url()
    );
    (webhook, write(dir, "webhook.yaml", &kubeconfig))
}

#[test]
fn token_webhook_is_used_and_cached() {
    let dir = tempfile::tempdir().unwrap();
    let (webhook, kubeconfig) = webhook(&dir, "/authenticate", |request| {
        let status = match request.body["spec"]["token"].as_str().unwrap_or("") {
            "hook-ann" => json!({
                "authenticated": true,
                "user": {"username": "ann", "uid": "7", "groups": ["dev"], "extra": {"a": ["b"]}},
            }),
            "hook-error" => json!({"error": "hook-error is unheard of"}),
            "hook-down" => return (400, json!({})),
            _ => json!({"authenticated": false}),
        };
        (200, json!({"apiVersion": "authentication.k8s.io/v1", "kind": "TokenReview", "status": status}))
    });
    let server = Server::start_with(&[
        "--log=debug",
        &argument("authentication-token-webhook-config-file", &kubeconfig),
        "--kube-apiserver-arg=authentication-token-webhook-version=v1",
    ]);
    let http = server.anonymous();
    let bearer = |token: &str| self_subject_review(&http, &[("authorization", &format!("Bearer {token}"))]);
    let user = json!({
        "username": "ann", "uid": "7", "groups": ["dev", "system:authenticated"], "extra": {"a": ["b"]},
    });
    for _ in 0..3 {
        assert_eq!(bearer("hook-ann").1["status"]["userInfo"], user);
        assert_eq!(bearer("hook-eve").0, 401);
    }
    let requests = webhook.requests();
    assert_eq!(requests.len(), 2, "responses are cached");
    assert_eq!((requests[0].method.as_str(), requests[0].path.as_str()), ("POST", "/authenticate"));
    assert_eq!(requests[0].header("authorization"), Some("Bearer our-own-token"));
    assert_eq!(requests[0].body["kind"], "TokenReview");
    assert_eq!(requests[0].body["apiVersion"], "authentication.k8s.io/v1");
    for _ in 0..2 {
        assert_eq!(bearer("hook-error").0, 401);
        assert_eq!(bearer("hook-down").0, 401);
    }
    assert_eq!(webhook.requests().len(), 6, "failures are not cached");
    let review = json!({"spec": {"token": "hook-error"}});
    let reply = server.http().post("/apis/authentication.k8s.io/v1/tokenreviews", &review).unwrap().json();
    assert_eq!(reply["status"], json!({"user": {}, "error": "[invalid bearer token, … is unheard of]"}));
    for secret in ["hook-ann", "hook-error", "hook-eve", "our-own-token"] {
        assert!(!server.log().contains(secret), "{secret} is in the log:\n{}", server.log());
    }
}

#[test]
fn accepts_tokens_of_oidc_issuers() {
    let dir = tempfile::tempdir().unwrap();
    let keys = pki::token::Keys::load_or_create(&dir.path().join("keys")).unwrap();
    let key_set: Value = serde_json::from_str(&keys.key_set().0).unwrap();
    let (issuer, _) = webhook(&dir, "/", move |request| {
        let url = format!("https://{}", request.header("host").unwrap());
        match request.path.as_str() {
            "/.well-known/openid-configuration" => {
                (200, json!({"issuer": url, "jwks_uri": format!("{url}/keys")}))
            }
            _ => (200, key_set.clone()),
        }
    });
    let ca = dir.path().join("webhook-ca.crt");
    let token = |audience: &str| {
        let expires = Timestamp::now().as_second() + 600;
        let claims = json!({
            "iss": issuer.url(), "aud": audience, "sub": "ann", "groups": ["dev"], "exp": expires, "jti": "7",
        });
        format!("Bearer {}", keys.sign(&claims).unwrap())
    };
    let server = Server::start_with(&[
        "--log=debug",
        &format!("--kube-apiserver-arg=oidc-issuer-url={}", issuer.url()),
        "--kube-apiserver-arg=oidc-client-id=skiff",
        "--kube-apiserver-arg=oidc-signing-algs=ES256",
        "--kube-apiserver-arg=oidc-groups-claim=groups",
        "--kube-apiserver-arg=oidc-groups-prefix=oidc:",
        &argument("oidc-ca-file", &ca),
    ]);
    let (code, answer) = self_subject_review(&server.anonymous(), &[("authorization", &token("skiff"))]);
    assert_eq!(code, 201, "{answer}");
    assert_eq!(
        answer["status"]["userInfo"],
        json!({
            "username": format!("{}#ann", issuer.url()), "groups": ["oidc:dev", "system:authenticated"],
            "extra": {"authentication.kubernetes.io/credential-id": ["JTI=7"]},
        })
    );
    check(username(&server.anonymous(), &[("authorization", &token("other"))]), UNAUTHORIZED);
    assert!(!server.log().contains("eyJ"), "the log contains a token:\n{}", server.log());
    drop(server);

    let text = format!(
        "apiVersion: apiserver.config.k8s.io/v1\nkind: AuthenticationConfiguration\n\
         jwt:\n- issuer:\n    url: {}\n    audiences: [one, two]\n    audienceMatchPolicy: MatchAny\n    certificateAuthority: |\n{}\
         \x20 claimMappings: {{username: {{claim: sub, prefix: 'x:'}}}}\n\
         anonymous: {{enabled: true, conditions: [{{path: /livez}}]}}\n",
        issuer.url(),
        std::fs::read_to_string(&ca)
            .unwrap()
            .lines()
            .map(|line| format!("      {line}\n"))
            .collect::<String>()
    );
    let file = write(&dir, "authentication.yaml", &text);
    let server = Server::start_with(&[&argument("authentication-config", &file)]);
    check(username(&server.anonymous(), &[("authorization", &token("two"))]), (201, "x:ann"));
    let anonymous = server.anonymous();
    assert_eq!(anonymous.get("/livez").unwrap().status, 200);
    assert_eq!(anonymous.get("/livez/ping").unwrap().status, 401);
    assert_eq!(anonymous.get("/version").unwrap().status, 401);
}

#[test]
fn authorization_webhook_is_used_and_cached() {
    let dir = tempfile::tempdir().unwrap();
    let tokens = write(&dir, "tokens.csv", "t-ann,ann,7\nt-eve,eve,8\nt-down,down,9\n");
    let (webhook, kubeconfig) = webhook(&dir, "/authorize", |request| {
        let spec = &request.body["spec"];
        let status = match (spec["user"].as_str(), spec["resourceAttributes"]["resource"].as_str()) {
            (Some("ann"), Some("pods")) => json!({"allowed": true, "reason": "ann is trusted"}),
            (Some("eve"), Some("selfsubjectreviews")) => {
                json!({"allowed": false, "denied": true, "reason": "eve is not"})
            }
            (Some("down"), _) => return (400, json!({})),
            _ => json!({"allowed": false, "reason": "no opinion"}),
        };
        (
            200,
            json!({"apiVersion": "authorization.k8s.io/v1", "kind": "SubjectAccessReview", "status": status}),
        )
    });
    let configuration = format!(
        "apiVersion: apiserver.config.k8s.io/v1\nkind: AuthorizationConfiguration\nauthorizers:\n\
         - {{type: Node, name: node}}\n\
         - type: Webhook\n  name: hook\n  webhook: {{timeout: 3s, authorizedTTL: 5m, unauthorizedTTL: 5m, \
         subjectAccessReviewVersion: v1, failurePolicy: NoOpinion, \
         connectionInfo: {{type: KubeConfigFile, kubeConfigFile: {}}}}}\n\
         - {{type: RBAC, name: rbac}}\n",
        kubeconfig.display()
    );
    let configuration = write(&dir, "authorization.yaml", &configuration);
    let server = Server::start_with(&[
        &argument("token-auth-file", &tokens),
        &argument("authorization-config", &configuration),
    ]);
    assert!(
        webhook.requests().iter().all(|request| request.body["spec"]["user"] != "system:admin"),
        "system:masters is not checked by the webhook"
    );
    let http = server.anonymous();
    let get = |token: &str, path: &str| {
        let reply = http.send("GET", path, &[("authorization", &format!("Bearer {token}"))], b"").unwrap();
        (reply.status, reply.json()["message"].as_str().unwrap_or("").to_owned())
    };
    for _ in 0..2 {
        assert_eq!(get("t-ann", "/api/v1/namespaces/default/pods").0, 200);
        assert_eq!(
            get("t-ann", "/api/v1/secrets"),
            (403, "secrets is forbidden: User \"ann\" cannot list resource \"secrets\" in API group \"\" at the cluster scope: no opinion".to_owned())
        );
    }
    // Components of the server send requests as well.
    let mut requests = webhook.requests();
    requests.retain(|request| request.body["spec"]["user"] == "ann");
    assert_eq!(requests.len(), 2, "responses are cached");
    assert_eq!(
        requests[0].body["spec"],
        json!({
            "user": "ann", "uid": "7", "groups": ["system:authenticated"],
            "resourceAttributes": {"namespace": "default", "verb": "list", "version": "v1", "resource": "pods"},
        })
    );
    // The webhook comes before RBAC, so it can deny what roles allow.
    check(username(&http, &[("authorization", "Bearer t-ann")]), (201, "ann"));
    let denied = username(&http, &[("authorization", "Bearer t-eve")]);
    assert_eq!(denied.0, 403, "{denied:?}");
    assert!(denied.1.ends_with(": eve is not"), "{denied:?}");
    // A failed webhook has no opinion. If no other authorizer allows the request, the response is an
    // error, not a denial.
    check(username(&http, &[("authorization", "Bearer t-down")]), (201, "down"));
    assert_eq!(get("t-down", "/api/v1/secrets").0, 500);
    let review = json!({"spec": {"user": "ann", "resourceAttributes": {"verb": "list", "resource": "pods"}}});
    let path = "/apis/authorization.k8s.io/v1/subjectaccessreviews";
    let status = server.http().post(path, &review).unwrap().json()["status"].take();
    assert_eq!(status, json!({"allowed": true, "reason": "ann is trusted"}));
    let review =
        json!({"spec": {"user": "down", "resourceAttributes": {"verb": "list", "resource": "pods"}}});
    let status = server.http().post(path, &review).unwrap().json()["status"].take();
    assert_eq!(status, json!({"allowed": false, "evaluationError": "127.0.0.1 returned HTTP status 400"}));
    // Impersonation needs permission.
    let impersonation_headers = [("authorization", "Bearer t-ann"), ("impersonate-user", "bob")];
    assert_eq!(username(&http, &impersonation_headers).0, 403);
}
