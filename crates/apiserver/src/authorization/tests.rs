use super::configuration::parse;
use super::*;

const CONFIG_HEADER: &str = "apiVersion: apiserver.config.k8s.io/v1\nkind: AuthorizationConfiguration\n";
const WEBHOOK: &str = "{timeout: 3s, authorizedTTL: 5m, unauthorizedTTL: 30s, subjectAccessReviewVersion: v1, \
    failurePolicy: Deny, cacheUnauthorizedRequests: false, connectionInfo: {type: KubeConfigFile, kubeConfigFile: /x}}";

#[track_caller]
fn check(authorizers: &str, expected: expect_test::Expect) {
    let found = match parse(&format!("{CONFIG_HEADER}authorizers: {authorizers}\n")) {
        Ok(specs) => format!("{specs:?}"),
        Err(reason) => reason,
    };
    expected.assert_eq(&found);
}

#[test]
fn validates_configuration() {
    check(
        &format!(
            "[{{type: Node, name: n}}, {{type: Webhook, name: w, webhook: {WEBHOOK}}}, {{type: RBAC, name: r}}]"
        ),
        expect_test::expect![[
            r#"[Node, Webhook(WebhookOptions { name: "w", kubeconfig: "/x", version: "v1", authorized: 300s, unauthorized: 0ns, timeout: 3s, conditions: [], deny_on_failure: true }), Rbac]"#
        ]],
    );
    check(
        "[]",
        expect_test::expect!["authorizers: Required value: at least one authorization mode must be defined"],
    );
    check(
        "[{type: AlwaysAllow, name: a}, {type: RBAC, name: a}, {type: Webhook, name: w}]",
        expect_test::expect![[
            r#"[authorizers[0].type: Unsupported value: "AlwaysAllow": supported values: "Node", "RBAC", "Webhook", authorizers[1].name: Duplicate value: "a", authorizers[2].webhook: Required value: required when type=Webhook]"#
        ]],
    );
    check(
        "[{type: Webhook, name: w, webhook: {timeout: 31s, unauthorizedTTL: x, subjectAccessReviewVersion: v2, \
         connectionInfo: {type: KubeConfigFile, kubeConfigFile: x}, matchConditions: [{expression: 'true'}, {expression: '1'}]}}]",
        expect_test::expect![[
            r#"[authorizers[0].timeout: Invalid value: "31s": must be > 0s and <= 30s, authorizers[0].authorizedTTL: Required value, authorizers[0].unauthorizedTTL: Invalid value: "x": must be > 0s, authorizers[0].subjectAccessReviewVersion: Unsupported value: "v2": supported values: "v1", "v1beta1", authorizers[0].failurePolicy: Required value, authorizers[0].connectionInfo.kubeConfigFile: Invalid value: "x": must be an absolute path, authorizers[0].matchConditions[1].expression: Invalid value: "1": must evaluate to bool]"#
        ]],
    );
}

#[test]
fn node_and_rbac_are_required() {
    let modes = |modes: &[&str]| {
        let modes = modes.iter().map(ToString::to_string).collect();
        AuthorizerChain::new(&Options { modes, ..Options::default() })
            .err()
            .map_or(String::new(), |reason| reason.to_string())
    };
    assert_eq!(modes(&["Node", "RBAC"]), "");
    assert_eq!(modes(&[]), "");
    let needed = "authorization modes Node and RBAC are required exactly once each";
    assert_eq!(modes(&["RBAC"]), needed);
    assert_eq!(modes(&["Node", "RBAC", "RBAC"]), needed);
    assert_eq!(
        modes(&["AlwaysAllow"]),
        "authorization-mode \"AlwaysAllow\" is not one of Node, RBAC and Webhook"
    );
    assert_eq!(
        modes(&["Node", "RBAC", "Webhook"]),
        "authorization-mode Webhook's authorization config file not passed"
    );
}
