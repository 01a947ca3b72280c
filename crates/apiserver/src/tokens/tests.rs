use http::HeaderMap;
use http::header::AUTHORIZATION;
use jiff::ToSpan as _;

use super::*;
use crate::access::User;
use crate::authentication::Peer;
use crate::tests::{MAX_TOKEN_SECONDS, Rig, brief};

const ACCOUNTS: &str = "/api/v1/namespaces/default/serviceaccounts";
const ISSUER: &str = "https://kubernetes.default.svc.cluster.local";

async fn make(rig: &Rig, plural: &str, object: Value) -> String {
    let (code, made) = rig.send(&format!("POST /api/v1/{plural}"), object).await;
    assert_eq!(code, 201, "{made}");
    made.at("metadata").text("uid").to_owned()
}

async fn robot(rig: &Rig) -> String {
    make(rig, "namespaces/default/serviceaccounts", json!({"metadata": {"name": "robot"}})).await
}

fn pod(name: &str, account: &str) -> Value {
    json!({
        "metadata": {"name": name},
        "spec": {"serviceAccountName": account, "containers": [{"name": "c", "image": "i"}]},
    })
}

async fn ask(rig: &Rig, spec: Value) -> (u16, Value) {
    rig.send(&format!("POST {ACCOUNTS}/robot/token"), json!({"spec": spec})).await
}

async fn token(rig: &Rig, spec: Value) -> String {
    let (code, answer) = ask(rig, spec).await;
    assert_eq!(code, 201, "{answer}");
    answer.at("status").text("token").to_owned()
}

/// Who the token is from, by name, or why it is refused.
async fn whose(rig: &Rig, token: &str, now: Timestamp) -> String {
    match owner(&rig.server, token, &[ISSUER.to_owned()], now).await {
        Ok((user, _)) => user.name,
        Err(why) => why.to_string(),
    }
}

async fn now_whose(rig: &Rig, token: &str) -> String {
    whose(rig, token, Timestamp::now()).await
}

const ROBOT: &str = "system:serviceaccount:default:robot";

#[tokio::test]
async fn tokens_say_what_they_are_for() {
    let rig = Rig::start().await;
    let uid = robot(&rig).await;
    let (code, answer) = ask(&rig, json!({})).await;
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
    assert_eq!(claims.text("sub"), ROBOT);
    assert_eq!(
        claims.at("kubernetes.io"),
        &json!({"namespace": "default", "serviceaccount": {"name": "robot", "uid": uid}})
    );
    let expires = api::time::parse_rfc3339(answer.at("status").text("expirationTimestamp")).unwrap();
    assert_eq!(expires.as_second(), number("exp"));
}

#[tokio::test]
async fn bad_requests_for_tokens() {
    let rig = Rig::start().await;
    let uid = robot(&rig).await;
    make(&rig, "namespaces/default/pods", pod("other", "default")).await;
    #[track_caller]
    fn check(answer: (u16, Value), expected: &str) {
        assert_eq!(brief(&answer, &[]), expected);
    }
    let post = format!("POST {ACCOUNTS}/robot/token");
    check(
        rig.send(&format!("POST {ACCOUNTS}/nobody/token"), json!({})).await,
        "404 serviceaccounts \"nobody\" not found",
    );
    check(
        rig.send(&post, json!({"metadata": {"name": "x"}})).await,
        "422 TokenRequest.authentication.k8s.io \"robot\" is invalid: metadata.name: Invalid value: \"x\": must match the service account name if specified",
    );
    check(
        rig.send(&post, json!({"metadata": {"uid": "x"}})).await,
        &format!(
            "409 Operation cannot be fulfilled on TokenRequest.authentication.k8s.io \"robot\": the UID in the token request (x) does not match the UID of the service account ({uid})"
        ),
    );
    check(
        ask(&rig, json!({"expirationSeconds": 60})).await,
        "422 TokenRequest.authentication.k8s.io \"\" is invalid: spec.expirationSeconds: Invalid value: 60: may not specify a duration less than 10 minutes",
    );
    let bound = |version: &str, kind: &str, name: &str, uid: &str| {
        ask(&rig, json!({"boundObjectRef": {"apiVersion": version, "kind": kind, "name": name, "uid": uid}}))
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
    make(&rig, "namespaces/default/secrets", json!({"metadata": {"name": "s"}})).await;
    check(
        bound("v1", "Secret", "s", "x").await,
        "409 Operation cannot be fulfilled on Secret \"s\": the UID in the bound object reference (x) does not match the UID in record. The object might have been deleted and then recreated",
    );
}

#[tokio::test]
async fn tokens_live_as_long_as_they_say() {
    let rig = Rig::start().await;
    robot(&rig).await;
    let token = token(&rig, json!({"expirationSeconds": 600})).await;
    let now = Timestamp::now();
    assert_eq!(whose(&rig, &token, now).await, ROBOT);
    assert_eq!(whose(&rig, &token, now + 11.minutes()).await, ROBOT, "clocks may differ");
    assert_eq!(whose(&rig, &token, now + 12.minutes()).await, "service account token has expired");
    assert_eq!(whose(&rig, &token, now - 2.minutes()).await, "service account token is not valid yet");
}

#[tokio::test]
async fn tokens_for_others_and_by_others_are_refused() {
    let rig = Rig::start().await;
    robot(&rig).await;
    let vault = token(&rig, json!({"audiences": ["vault"]})).await;
    assert_eq!(
        now_whose(&rig, &vault).await,
        format!("token audiences [\"vault\"] is invalid for the target audiences [\"{ISSUER}\"]")
    );
    let stranger = pki::token::Keys::load_or_create(tempfile::tempdir().unwrap().path()).unwrap();
    let good = token(&rig, json!({})).await;
    let claims = pki::token::unverified_claims(&good).unwrap();
    let forged = stranger.sign(&claims).unwrap();
    assert_eq!(now_whose(&rig, &forged).await, "invalid signature, no keys found");
    // Their header would be right too.
    let swapped = format!(
        "{}.{}",
        good.split('.').next().unwrap(),
        forged.split_once('.').map(|(_, rest)| rest).unwrap()
    );
    assert_eq!(now_whose(&rig, &swapped).await, "go-jose/go-jose: error in cryptographic primitive");
    let mut elsewhere = claims.clone();
    elsewhere.set("iss", "https://elsewhere");
    let signed = rig.server.tokens.keys.sign(&elsewhere).unwrap();
    assert_eq!(now_whose(&rig, &signed).await, "invalid bearer token");
    // Signed, but not with what a token of ours says.
    let signed = rig.server.tokens.keys.sign(&json!({"iss": ISSUER})).unwrap();
    assert_eq!(now_whose(&rig, &signed).await, "invalid bearer token");
    assert_eq!(now_whose(&rig, "garbage").await, "invalid bearer token");
}

#[tokio::test]
async fn tokens_go_with_what_they_are_bound_to() {
    let rig = Rig::start().await;
    let old = robot(&rig).await;
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
        let first = make(&rig, plural, object.clone()).await;
        let reference = json!({"apiVersion": "v1", "kind": kind, "name": "o", "uid": first});
        let token = token(&rig, json!({"boundObjectRef": reference})).await;
        assert_eq!(now_whose(&rig, &token).await, ROBOT, "{kind}");
        let (code, _) = rig.call(&format!("DELETE /api/v1/{path}"), "application/json", "").await;
        assert_eq!(code, 200);
        assert_eq!(now_whose(&rig, &token).await, "service account token has been invalidated", "{kind}");
        let second = make(&rig, plural, object).await;
        let kind = kind.to_ascii_lowercase();
        assert_eq!(
            now_whose(&rig, &token).await,
            format!("{kind} UID ({second}) does not match service account {kind} ref claim ({first})")
        );
    }
    let token = token(&rig, json!({})).await;
    rig.call(&format!("DELETE {ACCOUNTS}/robot"), "application/json", "").await;
    assert_eq!(now_whose(&rig, &token).await, "serviceaccounts \"robot\" not found");
    let new = robot(&rig).await;
    assert_eq!(
        now_whose(&rig, &token).await,
        format!("service account UID ({new}) does not match claim ({old})")
    );
}

#[tokio::test]
async fn what_is_being_deleted_counts_for_a_minute() {
    let rig = Rig::start().await;
    let account = json!({"metadata": {"name": "robot", "finalizers": ["acme.com/keep"]}});
    make(&rig, "namespaces/default/serviceaccounts", account).await;
    let token = token(&rig, json!({})).await;
    rig.call(&format!("DELETE {ACCOUNTS}/robot"), "application/json", "").await;
    assert_eq!(now_whose(&rig, &token).await, ROBOT);
    assert_eq!(
        whose(&rig, &token, Timestamp::now() + 2.minutes()).await,
        "service account default/robot has been deleted"
    );
}

#[tokio::test]
async fn pods_tokens_tell_of_the_pod_and_its_node() {
    let rig = Rig::start().await;
    robot(&rig).await;
    let node = make(&rig, "nodes", json!({"metadata": {"name": "n"}})).await;
    let mut object = pod("p", "robot");
    object.object_mut("spec").insert("nodeName".into(), "n".into());
    let uid = make(&rig, "namespaces/default/pods", object).await;
    let reference = json!({"apiVersion": "v1", "kind": "Pod", "name": "p"});
    let (_, answer) = ask(&rig, json!({"boundObjectRef": reference, "expirationSeconds": 3607})).await;
    let token = answer.at("status").text("token");
    let claims = pki::token::unverified_claims(token).unwrap();
    // The year for programs that do not know of expiry.
    let issued = claims.int("iat").unwrap();
    assert_eq!(claims.int("exp").unwrap() - issued, 365 * 24 * 3600);
    assert_eq!(claims.at("kubernetes.io").int("warnafter").unwrap() - issued, 3607);
    let expires = api::time::parse_rfc3339(answer.at("status").text("expirationTimestamp")).unwrap();
    assert_eq!(expires.as_second() - issued, 3607);

    let (user, _) =
        owner(&rig.server, token, &rig.server.tokens.audiences(), Timestamp::now()).await.unwrap();
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
async fn reviews() {
    let rig = Rig::start().await;
    let uid = robot(&rig).await;
    let vault = token(&rig, json!({"audiences": ["vault", "db"]})).await;
    let review = |spec: Value| {
        let rig = &rig;
        async move {
            let path = "POST /apis/authentication.k8s.io/v1/tokenreviews";
            let (code, answer) = rig.send(path, json!({"spec": spec})).await;
            (code, answer.at("status").clone(), answer)
        }
    };
    let (code, status, _) = review(json!({"token": vault, "audiences": ["x", "db", "vault"]})).await;
    assert_eq!((code, status.flag("authenticated")), (201, true));
    assert_eq!(status.at("audiences"), &json!(["vault", "db"]));
    let user = status.at("user");
    assert_eq!((user.text("username"), user.text("uid")), (ROBOT, uid.as_str()));
    assert_eq!(
        user.at("groups"),
        &json!(["system:serviceaccounts", "system:serviceaccounts:default", "system:authenticated"])
    );
    let (_, status, _) = review(json!({"token": vault})).await;
    let why = format!(
        "[invalid bearer token, token audiences [\"vault\" \"db\"] is invalid for the target audiences [\"{ISSUER}\"]]"
    );
    assert_eq!(status, json!({"user": {}, "error": why}));
    for bad in ["x", "\n", " ", "a b"] {
        let (_, status, _) = review(json!({"token": bad})).await;
        assert_eq!(status, json!({"user": {}, "error": "invalid bearer token"}), "{bad:?}");
    }
    let (code, _, answer) = review(json!({})).await;
    assert_eq!(brief(&(code, answer), &[]), "400 token is required for TokenReview in authentication");
}

#[tokio::test]
async fn requests_are_from_their_token_unless_from_a_certificate() {
    let rig = Rig::start().await;
    robot(&rig).await;
    let token = token(&rig, json!({})).await;
    let check = |user: User, value: String, expected: &'static str| {
        let rig = &rig;
        async move {
            let mut headers = HeaderMap::new();
            headers.insert(AUTHORIZATION, HeaderValue::from_bytes(value.as_bytes()).unwrap());
            let peer = if user == User::anonymous() { Peer::default() } else { Peer::known(user) };
            let found = match authentication::authenticate(&rig.server, &peer, "/", &mut headers).await {
                Ok(user) => user.name,
                Err(status) => format!("{} {} {}", status.code, status.reason, status.message),
            };
            assert_eq!(found, expected, "{value}");
            assert!(headers.is_empty(), "nobody else sees the token");
        }
    };
    const REFUSED: &str = "401 Unauthorized Unauthorized";
    let nobody = User::anonymous;
    let ann = || User { name: "ann".into(), ..User::default() };
    check(nobody(), format!("Bearer {token}"), ROBOT).await;
    check(nobody(), format!("bEARER {token} x"), ROBOT).await;
    check(ann(), format!("Bearer {token}"), "ann").await;
    check(ann(), "Bearer garbage".into(), "ann").await;
    check(nobody(), "Bearer garbage".into(), REFUSED).await;
    check(nobody(), format!("Bearer {token}x"), REFUSED).await;
    check(nobody(), format!("Bearer \u{e9}{token}"), REFUSED).await;
    check(nobody(), format!("Bearer  {token}"), "system:anonymous").await;
    check(nobody(), "Bearer".into(), "system:anonymous").await;
    check(nobody(), format!("Basic {token}"), "system:anonymous").await;
}

#[tokio::test]
async fn others_can_check_our_tokens() {
    let rig = Rig::start().await;
    let configuration = discovery(&rig.server, "/.well-known/openid-configuration").unwrap();
    assert_eq!(configuration.headers()[CONTENT_TYPE], "application/json");
    assert_eq!(configuration.headers()[CACHE_CONTROL], "public, max-age=3600");
    assert_eq!(
        rig.server.tokens.configuration,
        format!(
            r#"{{"issuer":"{ISSUER}","jwks_uri":"https://192.0.2.1:6443/openid/v1/jwks","response_types_supported":["id_token"],"subject_types_supported":["public"],"id_token_signing_alg_values_supported":["ES256"]}}"#
        )
    );
    let keys = discovery(&rig.server, "/openid/v1/jwks").unwrap();
    assert_eq!(keys.headers()[CONTENT_TYPE], "application/jwk-set+json");
    assert!(discovery(&rig.server, "/openid/v1").is_none());
}

#[tokio::test]
async fn nobody_gets_a_longer_life_than_tokens_may_have() {
    let rig = Rig::start().await;
    robot(&rig).await;
    let user = User { name: "admin".into(), groups: vec!["system:masters".into()], ..User::default() };
    let asked = MAX_TOKEN_SECONDS + 1;
    let body = json!({"spec": {"expirationSeconds": asked}}).to_string();
    let request = format!("POST {ACCOUNTS}/robot/token");
    let ((code, answer), remarks) = rig.call_remarked(user, &request, "application/json", &body).await;
    assert_eq!((code, answer.at("spec").int("expirationSeconds")), (201, Some(MAX_TOKEN_SECONDS)));
    let claims = pki::token::unverified_claims(answer.at("status").text("token")).unwrap();
    assert_eq!(claims.int("exp").unwrap() - claims.int("iat").unwrap(), MAX_TOKEN_SECONDS);
    let words = format!("requested expiration of {asked} seconds shortened to {MAX_TOKEN_SECONDS} seconds");
    assert_eq!(remarks.warnings(), [words]);
}
