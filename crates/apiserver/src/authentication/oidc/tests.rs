use std::sync::Mutex as StdMutex;

use serde_json::json;
use testkit::Webhook;

use super::super::configuration::{ClaimRule, Extra, Prefixed, UserRule};
use super::*;
use crate::https::tests::webhook;

/// A local OIDC issuer whose keys can be rotated.
struct Provider {
    dir: tempfile::TempDir,
    keys: pki::token::Keys,
    served: Arc<StdMutex<String>>,
    webhook: Webhook,
    ca: String,
}

impl Provider {
    fn start() -> Provider {
        let dir = tempfile::tempdir().unwrap();
        let keys = pki::token::Keys::load_or_create(&dir.path().join("keys")).unwrap();
        let served = Arc::new(StdMutex::new(keys.key_set().0));
        let key_set = served.clone();
        let (webhook, ca) = webhook(dir.path(), move |received| {
            let url = format!("https://{}", received.header("host").unwrap());
            match received.path.as_str() {
                WELL_KNOWN => (200, json!({"issuer": url, "jwks_uri": format!("{url}/keys")})),
                "/keys" => (200, serde_json::from_str(&key_set.lock().unwrap()).unwrap()),
                _ => (404, json!({})),
            }
        });
        Provider { dir, keys, served, webhook, ca }
    }

    fn issuer(&self, change: impl FnOnce(&mut Jwt)) -> Issuer {
        let mut jwt = Jwt::default();
        jwt.claim_mappings.username = Prefixed::new("sub", "oidc:");
        jwt.claim_mappings.groups = Prefixed::new("groups", "g:");
        jwt.issuer.url = self.webhook.url();
        jwt.issuer.certificate_authority = self.ca.clone();
        jwt.issuer.audiences = vec!["skiff".to_owned()];
        change(&mut jwt);
        Issuer::new(jwt, all_algorithms()).unwrap()
    }

    fn claims(&self, more: Value) -> Value {
        let now = Timestamp::now().as_second();
        let mut claims = json!({"iss": self.webhook.url(), "aud": "skiff", "sub": "ann", "exp": now + 600});
        for (name, value) in more.as_object().unwrap() {
            claims[name] = value.clone();
        }
        claims
    }

    fn token(&self, more: Value) -> String {
        self.keys.sign(&self.claims(more)).unwrap()
    }
}

async fn authenticate(issuer: &Issuer, token: &str) -> String {
    match issuer.authenticate_token(token, Timestamp::now()).await {
        Ok(None) => "anonymous".to_owned(),
        Ok(Some(user)) => format!("{} {:?} {:?}", user.name, user.groups, user.uid),
        Err(reason) => reason,
    }
}

#[tokio::test]
async fn maps_claims_to_users() {
    let provider = Provider::start();
    let plain = provider.issuer(|_| {});
    let check = async |issuer: &Issuer, more: Value, expected: &str| {
        let token = provider.token(more.clone());
        assert_eq!(authenticate(issuer, &token).await, expected, "{more}");
    };
    check(&plain, json!({}), "oidc:ann [] \"\"").await;
    check(&plain, json!({"groups": ["a", "b"]}), "oidc:ann [\"g:a\", \"g:b\"] \"\"").await;
    check(&plain, json!({"groups": "a"}), "oidc:ann [\"g:a\"] \"\"").await;
    let number = "json: cannot unmarshal number into Go value of type string";
    check(&plain, json!({"groups": [1]}), &format!("oidc: parse groups claim \"groups\": {number}")).await;
    check(&plain, json!({"sub": 1}), &format!("oidc: parse username claims \"sub\": {number}")).await;
    check(&plain, json!({"sub": ""}), "oidc: username claim \"sub\" is empty").await;
    check(&plain, json!({"aud": ["other", "skiff"]}), "oidc:ann [] \"\"").await;
    check(
        &plain,
        json!({"aud": "other"}),
        "oidc: verify token: oidc: expected audience \"skiff\" got [\"other\"]",
    )
    .await;
    check(
        &plain,
        json!({"exp": 1_000_000_000}),
        "oidc: verify token: oidc: token is expired (Token Expiry: 2001-09-09 01:46:40 +0000 UTC)",
    )
    .await;
    check(&plain, json!({"iss": "https://other"}), "anonymous").await;
    let later = plain
        .authenticate_token(
            &provider.token(json!({"nbf": Timestamp::now().as_second() + 900})),
            Timestamp::now(),
        )
        .await;
    assert!(later.unwrap_err().contains("before the nbf (not before) time"));

    let mail = provider.issuer(|jwt| {
        jwt.claim_mappings.username = Prefixed::new("email", "");
        jwt.claim_mappings.uid.claim = "id".to_owned();
        jwt.issuer.audiences.push("more".to_owned());
        jwt.claim_validation_rules = vec![ClaimRule::required("hd", "example.com")];
    });
    let good = json!({"email": "a@example.com", "id": "7", "hd": "example.com", "aud": "more"});
    let with = |name: &str, value: Value| {
        let mut claims = good.clone();
        claims[name] = value;
        claims
    };
    check(&mail, good.clone(), "a@example.com [] \"7\"").await;
    check(&mail, with("email_verified", json!(true)), "a@example.com [] \"7\"").await;
    check(&mail, with("email_verified", json!(false)), "oidc: email not verified").await;
    check(
        &mail,
        with("hd", json!("evil.com")),
        "oidc: required claim hd value does not match. Got = evil.com, want = example.com",
    )
    .await;
    check(&mail, with("id", json!(7)), &format!("oidc: parse uid claim \"id\": {number}")).await;
    check(&mail, json!({}), "oidc: parse username claims \"email\": claim not present").await;
    check(
        &mail,
        with("aud", json!([])),
        "oidc: verify token: oidc: expected audience in [\"skiff\" \"more\"] got []",
    )
    .await;
}

#[tokio::test]
async fn rejects_tokens_signed_by_other_keys() {
    let provider = Provider::start();
    let issuer = provider.issuer(|_| {});
    let other = pki::token::Keys::load_or_create(&provider.dir.path().join("other")).unwrap();
    let other_token = other.sign(&provider.claims(json!({}))).unwrap();
    let signature_error =
        "oidc: verify token: failed to verify signature: failed to verify id token signature";
    assert_eq!(authenticate(&issuer, &other_token).await, signature_error);
    assert_eq!(authenticate(&issuer, &provider.token(json!({}))).await, "oidc:ann [] \"\"");
    for _ in 0..5 {
        assert_eq!(authenticate(&issuer, &other_token).await, signature_error);
    }
    let received: Vec<String> =
        provider.webhook.requests().into_iter().map(|received| received.path).collect();
    assert_eq!(received, [WELL_KNOWN, "/keys"], "key requests are rate limited");
    let strict = Issuer::new(issuer.jwt.clone(), algorithms(&[]).unwrap()).unwrap();
    assert_eq!(
        authenticate(&strict, &provider.token(json!({}))).await,
        "oidc: verify token: oidc: id token signed with unsupported algorithm, expected [\"RS256\"] got \"ES256\""
    );
}

#[tokio::test]
async fn loads_rotated_keys() {
    let provider = Provider::start();
    let issuer = provider.issuer(|_| {});
    assert_eq!(authenticate(&issuer, &provider.token(json!({}))).await, "oidc:ann [] \"\"");
    let new = pki::token::Keys::load_or_create(&provider.dir.path().join("new")).unwrap();
    *provider.served.lock().unwrap() = new.key_set().0;
    let token = new.sign(&provider.claims(json!({}))).unwrap();
    assert!(
        authenticate(&issuer, &token).await.contains("failed to verify"),
        "within the minimum fetch interval"
    );
    issuer.fetch_state.lock().await.last = None;
    assert_eq!(authenticate(&issuer, &token).await, "oidc:ann [] \"\"");
    assert_eq!(provider.webhook.requests().len(), 3, "discovery is not repeated");
}

#[tokio::test]
async fn rejects_tokens_if_issuer_is_unreachable() {
    let provider = Provider::start();
    let invalid_issuer =
        provider.issuer(|jwt| jwt.issuer.discovery_url = Some(format!("{}/lost", jwt.issuer.url)));
    assert_eq!(
        authenticate(&invalid_issuer, &provider.token(json!({}))).await,
        "oidc: authenticator not initialized"
    );
    let url = format!("{}{WELL_KNOWN}", provider.webhook.url());
    let other = provider.issuer(|jwt| {
        jwt.issuer.url = "https://other".to_owned();
        jwt.issuer.discovery_url = Some(url);
    });
    let token = provider.token(json!({"iss": "https://other"}));
    assert_eq!(authenticate(&other, &token).await, "oidc: authenticator not initialized");
    assert!(algorithms(&["HS256".to_owned()]).is_err());
}

#[tokio::test]
async fn maps_claims_with_cel_expressions() {
    let provider = Provider::start();
    let issuer = provider.issuer(|jwt| {
        let mappings = &mut jwt.claim_mappings;
        mappings.username = Prefixed { expression: "'x:' + claims.sub".into(), ..Prefixed::default() };
        mappings.groups = Prefixed { expression: "claims.?roles.orValue([])".into(), ..Prefixed::default() };
        mappings.uid.expression = "claims.?id.orValue('')".into();
        mappings.extra = vec![Extra {
            key: "example.com/team".into(),
            value_expression: "claims.?team.orValue('')".into(),
        }];
        let rule = |expression: &str, message: &str| ClaimRule {
            expression: expression.into(),
            message: message.into(),
            ..ClaimRule::default()
        };
        jwt.claim_validation_rules = vec![rule("claims.sub != 'eve'", "not her")];
        let rule = UserRule {
            expression: "!user.groups.exists(g, g.startsWith('system:'))".into(),
            message: "reserved".into(),
        };
        jwt.user_validation_rules = vec![rule];
    });
    let check = async |more: Value, expected: &str| {
        let found = match issuer.authenticate_token(&provider.token(more.clone()), Timestamp::now()).await {
            Ok(user) => user.map_or("anonymous".to_owned(), |user| {
                format!("{} {:?} {:?} {:?}", user.name, user.groups, user.uid, user.extra)
            }),
            Err(reason) => reason,
        };
        assert_eq!(found, expected, "{more}");
    };
    check(json!({}), "x:ann [] \"\" {}").await;
    check(
        json!({"roles": ["a", "b"], "id": "7", "team": ["t"]}),
        "x:ann [\"a\", \"b\"] \"7\" {\"example.com/team\": [\"t\"]}",
    )
    .await;
    check(json!({"roles": "a"}), "x:ann [\"a\"] \"\" {}").await;
    check(
        json!({"sub": "eve"}),
        "oidc: error evaluating claim validation expression: validation expression 'claims.sub != 'eve'' failed: not her",
    )
    .await;
    check(
        json!({"roles": ["system:masters"]}),
        "oidc: error evaluating user info validation rule: validation expression '!user.groups.exists(g, g.startsWith('system:'))' failed: reserved",
    )
    .await;
    check(
        json!({"roles": [1]}),
        "oidc: error evaluating group claim expression: expression must return a string or a list of strings",
    )
    .await;
    check(
        json!({"id": 7}),
        "oidc: error evaluating uid claim expression: uid claim expression must return a string",
    )
    .await;
}
