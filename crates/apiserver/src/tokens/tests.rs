use http::HeaderMap;
use http::header::AUTHORIZATION;
use jiff::ToSpan as _;

use super::*;
use crate::access::User;
use crate::authentication::Peer;
use crate::tests::{MAX_TOKEN_SECONDS, TestServer, summary};

const ACCOUNTS: &str = "/api/v1/namespaces/default/serviceaccounts";
const ISSUER: &str = "https://kubernetes.default.svc.cluster.local";

async fn create(test_server: &TestServer, plural: &str, object: Value) -> String {
    let (code, created) = test_server.send(&format!("POST /api/v1/{plural}"), object).await;
    assert_eq!(code, 201, "{created}");
    created.at("metadata").text("uid").to_owned()
}

async fn create_service_account(test_server: &TestServer) -> String {
    create(test_server, "namespaces/default/serviceaccounts", json!({"metadata": {"name": "robot"}})).await
}

fn pod(name: &str, account: &str) -> Value {
    json!({
        "metadata": {"name": name},
        "spec": {"serviceAccountName": account, "containers": [{"name": "c", "image": "i"}]},
    })
}

async fn request_token(test_server: &TestServer, spec: Value) -> (u16, Value) {
    test_server.send(&format!("POST {ACCOUNTS}/robot/token"), json!({"spec": spec})).await
}

async fn token(test_server: &TestServer, spec: Value) -> String {
    let (code, answer) = request_token(test_server, spec).await;
    assert_eq!(code, 201, "{answer}");
    answer.at("status").text("token").to_owned()
}

/// The user name of the token, or the reason why it is rejected.
async fn authenticate_at(test_server: &TestServer, token: &str, now: Timestamp) -> String {
    match authenticate(&test_server.server, token, &[ISSUER.to_owned()], now).await {
        Ok((user, _)) => user.name,
        Err(error) => error.to_string(),
    }
}

async fn authenticate_now(test_server: &TestServer, token: &str) -> String {
    authenticate_at(test_server, token, Timestamp::now()).await
}

const SERVICE_ACCOUNT_USER: &str = "system:serviceaccount:default:robot";

#[tokio::test]
async fn token_request_returns_audience_and_expiration() {
    let test_server = TestServer::start().await;
    let uid = create_service_account(&test_server).await;
    let (code, answer) = request_token(&test_server, json!({})).await;
    assert_eq!(code, 201, "{answer}");
    assert_eq!(answer.text("kind"), "TokenRequest");
    assert_eq!(answer.at("spec").at("audiences"), &json!([ISSUER]));
    assert_eq!(answer.at("spec").at("expirationSeconds"), &json!(3600));
    let metadata = answer.at("metadata");
    assert_eq!(
        (metadata.text("name"), metadata.text("namespace"), metadata.text("uid")),
        ("robot", "default", uid.as_str())
    );
    let claims = pki::token::unverified_claims(answer.at("status").text("token")).unwrap();
    let number = |name: &str| claims.int(name).unwrap();
    assert_eq!((number("exp") - number("iat"), number("nbf")), (3600, number("iat")));
    assert_eq!(claims.at("aud"), &json!([ISSUER]));
    assert_eq!(claims.text("sub"), SERVICE_ACCOUNT_USER);
    assert_eq!(
        claims.at("kubernetes.io"),
        &json!({"namespace": "default", "serviceaccount": {"name": "robot", "uid": uid}})
    );
    let expires = api::time::parse_rfc3339(answer.at("status").text("expirationTimestamp")).unwrap();
    assert_eq!(expires.as_second(), number("exp"));
}

#[tokio::test]
async fn rejects_invalid_token_requests() {
    let test_server = TestServer::start().await;
    let uid = create_service_account(&test_server).await;
    create(&test_server, "namespaces/default/pods", pod("other", "default")).await;
    #[track_caller]
    fn check(answer: (u16, Value), expected: &str) {
        assert_eq!(summary(&answer, &[]), expected);
    }
    let post = format!("POST {ACCOUNTS}/robot/token");
    check(
        test_server.send(&format!("POST {ACCOUNTS}/missing/token"), json!({})).await,
        "404 serviceaccounts \"missing\" not found",
    );
    check(
        test_server.send(&post, json!({"metadata": {"name": "x"}})).await,
        "422 TokenRequest.authentication.k8s.io \"robot\" is invalid: metadata.name: Invalid value: \"x\": must match the service account name if specified",
    );
    check(
        test_server.send(&post, json!({"metadata": {"uid": "x"}})).await,
        &format!(
            "409 Operation cannot be fulfilled on TokenRequest.authentication.k8s.io \"robot\": the UID in the token request (x) does not match the UID of the service account ({uid})"
        ),
    );
    check(
        request_token(&test_server, json!({"expirationSeconds": 60})).await,
        "422 TokenRequest.authentication.k8s.io \"\" is invalid: spec.expirationSeconds: Invalid value: 60: may not specify a duration less than 10 minutes",
    );
    let bound = |version: &str, kind: &str, name: &str, uid: &str| {
        request_token(
            &test_server,
            json!({"boundObjectRef": {"apiVersion": version, "kind": kind, "name": name, "uid": uid}}),
        )
    };
    check(bound("v1", "Pod", "gone", "").await, "404 pods \"gone\" not found");
    check(bound("v1", "Node", "gone", "").await, "404 nodes \"gone\" not found");
    check(
        bound("v1", "Pod", "other", "").await,
        "400 cannot bind token for serviceaccount \"robot\" to pod running with different serviceaccount name.",
    );
    check(
        bound("apps/v1", "Pod", "other", "").await,
        "400 cannot bind token to object of type apps/v1, Kind=Pod",
    );
    check(
        bound("v1", "ConfigMap", "c", "").await,
        "400 cannot bind token to object of type /v1, Kind=ConfigMap",
    );
    create(&test_server, "namespaces/default/secrets", json!({"metadata": {"name": "s"}})).await;
    check(
        bound("v1", "Secret", "s", "x").await,
        "409 Operation cannot be fulfilled on Secret \"s\": the UID in the bound object reference (x) does not match the UID in record. The object might have been deleted and then recreated",
    );
}

#[tokio::test]
async fn tokens_are_valid_until_expiration() {
    let test_server = TestServer::start().await;
    create_service_account(&test_server).await;
    let token = token(&test_server, json!({"expirationSeconds": 600})).await;
    let now = Timestamp::now();
    assert_eq!(authenticate_at(&test_server, &token, now).await, SERVICE_ACCOUNT_USER);
    assert_eq!(
        authenticate_at(&test_server, &token, now + 11.minutes()).await,
        SERVICE_ACCOUNT_USER,
        "clocks may differ"
    );
    assert_eq!(
        authenticate_at(&test_server, &token, now + 12.minutes()).await,
        "service account token has expired"
    );
    assert_eq!(
        authenticate_at(&test_server, &token, now - 2.minutes()).await,
        "service account token is not valid yet"
    );
}

#[tokio::test]
async fn rejects_tokens_with_foreign_audience_issuer_or_key() {
    let test_server = TestServer::start().await;
    create_service_account(&test_server).await;
    let other_audience = token(&test_server, json!({"audiences": ["vault"]})).await;
    assert_eq!(
        authenticate_now(&test_server, &other_audience).await,
        format!("token audiences [\"vault\"] is invalid for the target audiences [\"{ISSUER}\"]")
    );
    let foreign_keys = pki::token::Keys::load_or_create(tempfile::tempdir().unwrap().path()).unwrap();
    let good = token(&test_server, json!({})).await;
    let claims = pki::token::unverified_claims(&good).unwrap();
    let foreign_token = foreign_keys.sign(&claims).unwrap();
    assert_eq!(authenticate_now(&test_server, &foreign_token).await, "invalid signature, no keys found");
    // The header of a valid token with the foreign signature.
    let swapped = format!(
        "{}.{}",
        good.split('.').next().unwrap(),
        foreign_token.split_once('.').map(|(_, rest)| rest).unwrap()
    );
    assert_eq!(
        authenticate_now(&test_server, &swapped).await,
        "go-jose/go-jose: error in cryptographic primitive"
    );
    let mut other_issuer = claims.clone();
    other_issuer.set("iss", "https://elsewhere");
    let signed = test_server.server.tokens.keys.sign(&other_issuer).unwrap();
    assert_eq!(authenticate_now(&test_server, &signed).await, "invalid bearer token");
    // Signed by this server, but without the required claims.
    let signed = test_server.server.tokens.keys.sign(&json!({"iss": ISSUER})).unwrap();
    assert_eq!(authenticate_now(&test_server, &signed).await, "invalid bearer token");
    assert_eq!(authenticate_now(&test_server, "garbage").await, "invalid bearer token");
}

#[tokio::test]
async fn tokens_are_invalid_without_the_bound_object() {
    let test_server = TestServer::start().await;
    let old = create_service_account(&test_server).await;
    for (plural, kind, path, object) in [
        ("namespaces/default/pods", "Pod", "namespaces/default/pods/o", pod("o", "robot")),
        (
            "namespaces/default/secrets",
            "Secret",
            "namespaces/default/secrets/o",
            json!({"metadata": {"name": "o"}}),
        ),
        ("nodes", "Node", "nodes/o", json!({"metadata": {"name": "o"}})),
    ] {
        let first = create(&test_server, plural, object.clone()).await;
        let reference = json!({"apiVersion": "v1", "kind": kind, "name": "o", "uid": first});
        let token = token(&test_server, json!({"boundObjectRef": reference})).await;
        assert_eq!(authenticate_now(&test_server, &token).await, SERVICE_ACCOUNT_USER, "{kind}");
        let (code, _) = test_server.call(&format!("DELETE /api/v1/{path}"), "application/json", "").await;
        assert_eq!(code, 200);
        assert_eq!(
            authenticate_now(&test_server, &token).await,
            "service account token has been invalidated",
            "{kind}"
        );
        let second = create(&test_server, plural, object).await;
        let kind = kind.to_ascii_lowercase();
        assert_eq!(
            authenticate_now(&test_server, &token).await,
            format!("{kind} UID ({second}) does not match service account {kind} ref claim ({first})")
        );
    }
    let token = token(&test_server, json!({})).await;
    test_server.call(&format!("DELETE {ACCOUNTS}/robot"), "application/json", "").await;
    assert_eq!(authenticate_now(&test_server, &token).await, "serviceaccounts \"robot\" not found");
    let new = create_service_account(&test_server).await;
    assert_eq!(
        authenticate_now(&test_server, &token).await,
        format!("service account UID ({new}) does not match claim ({old})")
    );
}

#[tokio::test]
async fn deleted_object_is_valid_for_one_minute() {
    let test_server = TestServer::start().await;
    let account = json!({"metadata": {"name": "robot", "finalizers": ["acme.com/keep"]}});
    create(&test_server, "namespaces/default/serviceaccounts", account).await;
    let token = token(&test_server, json!({})).await;
    test_server.call(&format!("DELETE {ACCOUNTS}/robot"), "application/json", "").await;
    assert_eq!(authenticate_now(&test_server, &token).await, SERVICE_ACCOUNT_USER);
    assert_eq!(
        authenticate_at(&test_server, &token, Timestamp::now() + 2.minutes()).await,
        "service account default/robot has been deleted"
    );
}

#[tokio::test]
async fn pod_tokens_contain_pod_and_node_claims() {
    let test_server = TestServer::start().await;
    create_service_account(&test_server).await;
    let node = create(&test_server, "nodes", json!({"metadata": {"name": "n"}})).await;
    let mut object = pod("p", "robot");
    object.object_mut("spec").insert("nodeName".into(), "n".into());
    let uid = create(&test_server, "namespaces/default/pods", object).await;
    let reference = json!({"apiVersion": "v1", "kind": "Pod", "name": "p"});
    let (_, answer) =
        request_token(&test_server, json!({"boundObjectRef": reference, "expirationSeconds": 3607})).await;
    let token = answer.at("status").text("token");
    let claims = pki::token::unverified_claims(token).unwrap();
    // The year for clients that do not reload tokens.
    let issued_at = claims.int("iat").unwrap();
    assert_eq!(claims.int("exp").unwrap() - issued_at, 365 * 24 * 3600);
    assert_eq!(claims.at("kubernetes.io").int("warnafter").unwrap() - issued_at, 3607);
    let expires = api::time::parse_rfc3339(answer.at("status").text("expirationTimestamp")).unwrap();
    assert_eq!(expires.as_second() - issued_at, 3607);

    let (user, _) =
        authenticate(&test_server.server, token, &test_server.server.tokens.audiences(), Timestamp::now())
            .await
            .unwrap();
    assert_eq!(
        user_info(&user).at("extra"),
        &json!({
            "authentication.kubernetes.io/credential-id": [format!("JTI={}", claims.text("jti"))],
            "authentication.kubernetes.io/node-name": ["n"],
            "authentication.kubernetes.io/node-uid": [node],
            "authentication.kubernetes.io/pod-name": ["p"],
            "authentication.kubernetes.io/pod-uid": [uid],
        })
    );
}

#[tokio::test]
async fn token_reviews_return_user_and_audiences() {
    let test_server = TestServer::start().await;
    let uid = create_service_account(&test_server).await;
    let other_audience = token(&test_server, json!({"audiences": ["vault", "db"]})).await;
    let review = |spec: Value| {
        let test_server = &test_server;
        async move {
            let path = "POST /apis/authentication.k8s.io/v1/tokenreviews";
            let (code, answer) = test_server.send(path, json!({"spec": spec})).await;
            (code, answer.at("status").clone(), answer)
        }
    };
    let (code, status, _) = review(json!({"token": other_audience, "audiences": ["x", "db", "vault"]})).await;
    assert_eq!((code, status.flag("authenticated")), (201, true));
    assert_eq!(status.at("audiences"), &json!(["vault", "db"]));
    let user = status.at("user");
    assert_eq!((user.text("username"), user.text("uid")), (SERVICE_ACCOUNT_USER, uid.as_str()));
    assert_eq!(
        user.at("groups"),
        &json!(["system:serviceaccounts", "system:serviceaccounts:default", "system:authenticated"])
    );
    let (_, status, _) = review(json!({"token": other_audience})).await;
    let error = format!(
        "[invalid bearer token, token audiences [\"vault\" \"db\"] is invalid for the target audiences [\"{ISSUER}\"]]"
    );
    assert_eq!(status, json!({"user": {}, "error": error}));
    for bad in ["x", "\n", " ", "a b"] {
        let (_, status, _) = review(json!({"token": bad})).await;
        assert_eq!(status, json!({"user": {}, "error": "invalid bearer token"}), "{bad:?}");
    }
    let (code, _, answer) = review(json!({})).await;
    assert_eq!(summary(&(code, answer), &[]), "400 token is required for TokenReview in authentication");
}

#[tokio::test]
async fn bearer_token_is_used_without_client_certificate() {
    let test_server = TestServer::start().await;
    create_service_account(&test_server).await;
    let token = token(&test_server, json!({})).await;
    let check = |user: User, value: String, expected: &'static str| {
        let test_server = &test_server;
        async move {
            let mut headers = HeaderMap::new();
            headers.insert(AUTHORIZATION, HeaderValue::from_bytes(value.as_bytes()).unwrap());
            let peer = if user == User::anonymous() { Peer::default() } else { Peer::known(user) };
            let found =
                match authentication::authenticate(&test_server.server, &peer, "/", &mut headers).await {
                    Ok(user) => user.name,
                    Err(status) => format!("{} {} {}", status.code, status.reason, status.message),
                };
            assert_eq!(found, expected, "{value}");
            assert!(headers.is_empty(), "the token is removed from the headers");
        }
    };
    const UNAUTHORIZED: &str = "401 Unauthorized Unauthorized";
    let anonymous = User::anonymous;
    let ann = || User { name: "ann".into(), ..User::default() };
    check(anonymous(), format!("Bearer {token}"), SERVICE_ACCOUNT_USER).await;
    check(anonymous(), format!("bEARER {token} x"), SERVICE_ACCOUNT_USER).await;
    check(ann(), format!("Bearer {token}"), "ann").await;
    check(ann(), "Bearer garbage".into(), "ann").await;
    check(anonymous(), "Bearer garbage".into(), UNAUTHORIZED).await;
    check(anonymous(), format!("Bearer {token}x"), UNAUTHORIZED).await;
    check(anonymous(), format!("Bearer \u{e9}{token}"), UNAUTHORIZED).await;
    check(anonymous(), format!("Bearer  {token}"), "system:anonymous").await;
    check(anonymous(), "Bearer".into(), "system:anonymous").await;
    check(anonymous(), format!("Basic {token}"), "system:anonymous").await;
}

#[tokio::test]
async fn discovery_documents_are_available() {
    let test_server = TestServer::start().await;
    let configuration = handle_discovery(&test_server.server, "/.well-known/openid-configuration").unwrap();
    assert_eq!(configuration.headers()[CONTENT_TYPE], "application/json");
    assert_eq!(configuration.headers()[CACHE_CONTROL], "public, max-age=3600");
    assert_eq!(
        test_server.server.tokens.configuration,
        format!(
            r#"{{"issuer":"{ISSUER}","jwks_uri":"https://192.0.2.1:6443/openid/v1/jwks","response_types_supported":["id_token"],"subject_types_supported":["public"],"id_token_signing_alg_values_supported":["ES256"]}}"#
        )
    );
    let keys = handle_discovery(&test_server.server, "/openid/v1/jwks").unwrap();
    assert_eq!(keys.headers()[CONTENT_TYPE], "application/jwk-set+json");
    assert!(handle_discovery(&test_server.server, "/openid/v1").is_none());
}

#[tokio::test]
async fn token_expiration_is_limited_to_the_maximum() {
    let test_server = TestServer::start().await;
    create_service_account(&test_server).await;
    let user = User { name: "admin".into(), groups: vec!["system:masters".into()], ..User::default() };
    let requested_seconds = MAX_TOKEN_SECONDS + 1;
    let body = json!({"spec": {"expirationSeconds": requested_seconds}}).to_string();
    let request = format!("POST {ACCOUNTS}/robot/token");
    let ((code, answer), recorder) =
        test_server.call_with_recorder(user, &request, "application/json", &body).await;
    assert_eq!((code, answer.at("spec").int("expirationSeconds")), (201, Some(MAX_TOKEN_SECONDS)));
    let claims = pki::token::unverified_claims(answer.at("status").text("token")).unwrap();
    assert_eq!(claims.int("exp").unwrap() - claims.int("iat").unwrap(), MAX_TOKEN_SECONDS);
    let words = format!(
        "requested expiration of {requested_seconds} seconds shortened to {MAX_TOKEN_SECONDS} seconds"
    );
    assert_eq!(recorder.warnings(), [words]);
}
