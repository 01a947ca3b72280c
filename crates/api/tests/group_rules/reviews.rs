use api::ErrorList;
use api::authentication::{token_request, token_review};
use api::authorization::self_subject_rules_review;
use expect_test::expect;
use serde_json::{Value, json};

use super::{check, check_valid, lines};

#[test]
fn validates_access_reviews() {
    let spec = json!({"user": "jane", "resourceAttributes": {"verb": "get", "resource": "pods"}});
    check_valid("SubjectAccessReview", json!({"metadata": {"creationTimestamp": null}, "spec": spec}));
    check(
        "SubjectAccessReview",
        json!({"metadata": {"name": "x"}, "spec": {}}),
        expect![[r#"
        spec.resourceAttributes: Invalid value: null: exactly one of nonResourceAttributes or resourceAttributes must be specified
        spec.user: Invalid value: "": at least one of user or group must be specified
        metadata: Invalid value: {"name":"x"}: must be empty
    "#]],
    );
    let both = json!({"resourceAttributes": {}, "nonResourceAttributes": {"path": "/x", "verb": "get"}});
    check(
        "SelfSubjectAccessReview",
        json!({"spec": both}),
        expect![[r#"
        spec.nonResourceAttributes: Invalid value: {"Path":"/x","Verb":"get"}: cannot be specified in combination with resourceAttributes
    "#]],
    );
    let selectors = json!({"resourceAttributes": {
        "fieldSelector": {},
        "labelSelector": {"rawSelector": "a=b", "requirements": [{"key": "a b", "operator": "Like"}]},
    }});
    check(
        "SelfSubjectAccessReview",
        json!({"spec": selectors}),
        expect![[r#"
        spec.resourceAttributes.fieldSelector.requirements: Required value: when spec.resourceAttributes.fieldSelector is specified, requirements or rawSelector is required
        spec.resourceAttributes.labelSelector.rawSelector: Invalid value: "a=b": may not specified at the same time as requirements
        spec.resourceAttributes.labelSelector.requirements[0].key: Invalid value: "a b": name part must consist of alphanumeric characters, '-', '_' or '.', and must start and end with an alphanumeric character (e.g. 'MyName',  or 'my.name',  or '123-abc', regex used for validation is '([A-Za-z0-9][-A-Za-z0-9_.]*)?[A-Za-z0-9]')
    "#]],
    );
}

#[test]
fn local_review_rejects_other_namespace() {
    let review = |spec: Value| json!({"metadata": {"namespace": "shop"}, "spec": spec});
    let kind = "LocalSubjectAccessReview";
    check_valid(kind, review(json!({"user": "jane", "resourceAttributes": {"namespace": "shop"}})));
    check(
        kind,
        review(json!({"user": "jane", "resourceAttributes": {"namespace": "x"}})),
        expect![[r#"
        spec.resourceAttributes.namespace: Invalid value: "x": must match metadata.namespace
    "#]],
    );
    check(
        kind,
        review(json!({"groups": ["devs"], "nonResourceAttributes": {"path": "/"}})),
        expect![[r#"
        spec.nonResourceAttributes: Invalid value: {"Path":"/","Verb":""}: disallowed on this kind of request
    "#]],
    );
}

#[test]
fn validates_token_requests() {
    let error_lines = |seconds: Value| {
        let mut errors = ErrorList::default();
        token_request::validate(&json!({"spec": {"expirationSeconds": seconds}}), &mut errors);
        lines(&errors)
    };
    expect![[r#""#]].assert_eq(&error_lines(Value::Null));
    expect![[r#"
        spec.expirationSeconds: Invalid value: 599: may not specify a duration less than 10 minutes
    "#]]
    .assert_eq(&error_lines(json!(599)));
    expect![[r#"
        spec.expirationSeconds: Invalid value: 4294967297: may not specify a duration larger than 2^32 seconds
    "#]]
    .assert_eq(&error_lines(json!(4_294_967_297_i64)));
    assert_eq!(token_review::token(&json!({"spec": {"token": "t"}})), Ok("t"));
    let missing = token_review::token(&json!({})).expect_err("no token");
    expect!["token is required for TokenReview in authentication"].assert_eq(&missing.message);
    let missing = self_subject_rules_review::namespace(&json!({})).expect_err("no namespace");
    expect!["no namespace on request"].assert_eq(&missing.message);
}
