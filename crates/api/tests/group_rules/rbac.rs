use expect_test::expect;
use serde_json::{Value, json};

use super::{check, check_update, check_valid, with_value};

fn binding() -> Value {
    json!({
        "metadata": {"name": "robot-reads", "namespace": "shop"},
        "roleRef": {"apiGroup": "rbac.authorization.k8s.io", "kind": "Role", "name": "reader"},
        "subjects": [{"kind": "ServiceAccount", "name": "robot", "namespace": "shop"}],
    })
}

#[test]
fn validates_policy_rules() {
    check_valid("Role", json!({"rules": [{"verbs": ["get"], "apiGroups": [""], "resources": ["pods"]}]}));
    check(
        "Role",
        json!({"rules": [{}, {"verbs": ["get"], "nonResourceURLs": ["/x"]}]}),
        expect![[r#"
        rules[0].verbs: Required value: verbs must contain at least one value
        rules[0].apiGroups: Required value: resource rules must supply at least one api group
        rules[0].resources: Required value: resource rules must supply at least one resource
        rules[1].nonResourceURLs: Invalid value: ["/x"]: namespaced rules cannot apply to non-resource URLs
    "#]],
    );
    check_valid("ClusterRole", json!({"rules": [{"verbs": ["get"], "nonResourceURLs": ["/x"]}]}));
    let both = json!({"rules": [{"verbs": ["get"], "nonResourceURLs": ["/x"], "resources": ["pods"]}]});
    check(
        "ClusterRole",
        both,
        expect![[r#"
        rules[0].nonResourceURLs: Invalid value: ["/x"]: rules cannot apply to both regular resources and non-resource URLs
    "#]],
    );
}

#[test]
fn aggregation_rule_requires_selectors() {
    check_valid(
        "ClusterRole",
        json!({"aggregationRule": {"clusterRoleSelectors": [{"matchLabels": {"a": "b"}}]}}),
    );
    check(
        "ClusterRole",
        json!({"aggregationRule": {}}),
        expect![[r#"
        aggregationRule.clusterRoleSelectors: Required value: at least one clusterRoleSelector required if aggregationRule is non-nil
    "#]],
    );
    let bad = json!({"aggregationRule": {"clusterRoleSelectors": [{"matchLabels": {"a": "b c"}}]}});
    check(
        "ClusterRole",
        bad,
        expect![[r#"
        aggregationRule.clusterRoleSelectors[0].matchLabels: Invalid value: "b c": a valid label must be an empty string or consist of alphanumeric characters, '-', '_' or '.', and must start and end with an alphanumeric character (e.g. 'MyValue',  or 'my_value',  or '12345', regex used for validation is '(([A-Za-z0-9][-A-Za-z0-9_.]*)?[A-Za-z0-9])?')
        aggregationRule.clusterRoleSelectors[0]: Invalid value: null: invalid label selector.
    "#]],
    );
}

#[test]
fn validates_role_bindings() {
    check_valid("RoleBinding", binding());
    check(
        "RoleBinding",
        json!({"roleRef": {}, "subjects": [{}]}),
        expect![[r#"
        roleRef.apiGroup: Unsupported value: "": supported values: "rbac.authorization.k8s.io"
        roleRef.kind: Unsupported value: "": supported values: "Role", "ClusterRole"
        roleRef.name: Required value
        subjects[0].name: Required value
        subjects[0].kind: Unsupported value: "": supported values: "ServiceAccount", "User", "Group"
    "#]],
    );
    check(
        "ClusterRoleBinding",
        binding(),
        expect![[r#"
        roleRef.kind: Unsupported value: "Role": supported values: "ClusterRole"
    "#]],
    );
    let subjects = json!([
        {"kind": "ServiceAccount", "name": "Robot", "apiGroup": "x"},
        {"kind": "User", "name": "jane"},
        {"kind": "Group", "apiGroup": "rbac.authorization.k8s.io"},
    ]);
    let obj = with_value(binding(), "/subjects", subjects);
    check(
        "ClusterRoleBinding",
        with_value(obj, "/roleRef/kind", json!("ClusterRole")),
        expect![[r#"
        subjects[0].name: Invalid value: "Robot": a lowercase RFC 1123 subdomain must consist of lower case alphanumeric characters, '-' or '.', and must start and end with an alphanumeric character (e.g. 'example.com', regex used for validation is '[a-z0-9]([-a-z0-9]*[a-z0-9])?(\.[a-z0-9]([-a-z0-9]*[a-z0-9])?)*')
        subjects[0].apiGroup: Unsupported value: "x": supported values: ""
        subjects[0].namespace: Required value
        subjects[1].apiGroup: Unsupported value: "": supported values: "rbac.authorization.k8s.io"
        subjects[2].name: Required value
    "#]],
    );
    check(
        "RoleBinding",
        with_value(binding(), "/roleRef/name", json!("a/b")),
        expect![[r#"
        roleRef.name: Invalid value: "a/b": may not contain '/'
    "#]],
    );
}

#[test]
fn role_ref_is_immutable() {
    check_update("RoleBinding", binding(), binding(), expect![[r#""#]]);
    check_update(
        "RoleBinding",
        binding(),
        with_value(binding(), "/roleRef/name", json!("other")),
        expect![[r#"
        roleRef: Invalid value: {"APIGroup":"rbac.authorization.k8s.io","Kind":"Role","Name":"other"}: cannot change roleRef
    "#]],
    );
}

/// A few megabytes of invalid items must not cause gigabytes of errors or take minutes to print.
#[test]
fn number_of_errors_is_limited() {
    let obj = json!({"rules": vec![json!({}); 1_000_000]});
    let mut errors = api::ErrorList::default();
    super::strategy("Role").validate(&obj, &mut errors);
    assert_eq!(errors.0.len(), 10_000);
    assert!(errors.to_string().len() < 2_000_000);
}
