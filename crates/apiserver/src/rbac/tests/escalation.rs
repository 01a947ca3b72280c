//! Tests of privilege escalation checks.

use expect_test::{Expect, expect};

use super::{objects, poll_now, rbac, user};
use crate::rbac::{escalation, row};
use crate::request::Target;

/// The permissions of the test users.
const POLICY: &str = "
ClusterRole reader
  get list: pods @ core
ClusterRole secrets
  *: secrets @ core
ClusterRole cluster-admin
  *: * @ *
  *: *
ClusterRole aggregated from:x
ClusterRole escalator
  escalate: roles clusterroles @ rbac.authorization.k8s.io = free
  escalate: roles @ rbac.authorization.k8s.io
ClusterRole binder
  bind: clusterroles @ rbac.authorization.k8s.io = secrets
  bind: roles @ rbac.authorization.k8s.io
ClusterRole urls
  get: /logs/*
ClusterRole scales
  update: */scale @ *
ClusterRole one-secret
  get: secrets @ core = mine
Role a big
  *: * @ *
ClusterRoleBinding reader
  User ann
  Group readers
ClusterRoleBinding admins of:cluster-admin
  User root
ClusterRoleBinding escalator
  User esc
ClusterRoleBinding binder
  User bind
ClusterRoleBinding urls
  User url
ClusterRoleBinding scales
  User url
ClusterRoleBinding one-secret
  User url
RoleBinding a secrets of:^secrets
  User ann
RoleBinding a escalator of:^escalator
  User loc
RoleBinding a binder of:^binder
  User loc
RoleBinding a missing of:^gone
  User loc
";

/// Stores an object as `subject`, replacing `before` unless it is empty; `^name` is an update by
/// name.
#[track_caller]
fn check(subject: &str, before: &str, object: &str, expected: Expect) {
    let object = objects(object).remove(0);
    let before = if before.is_empty() { None } else { Some(objects(before).remove(0)) };
    let plural = format!("{}s", object["kind"].as_str().unwrap().to_ascii_lowercase());
    let namespace = object["metadata"]["namespace"].as_str().unwrap_or("");
    let mut target = Target::collection(row(&plural), namespace);
    if before.is_some() {
        target.name = object["metadata"]["name"].as_str().unwrap().to_owned();
    }
    let result =
        poll_now(escalation::check(&rbac(POLICY), &user(subject), &target, &object, before.as_ref()));
    let text = match result {
        Ok(()) => "may".to_owned(),
        Err(status) => format!("{} {}", status.code, status.message),
    };
    expected.assert_eq(&text);
}

#[test]
fn role_cannot_grant_more_than_its_author_has() {
    check("ann", "", "ClusterRole x\n  get: pods @ core\n", expect!["may"]);
    check("ann", "", "Role a x\n  get: pods @ core\n", expect!["may"]);
    check("bob readers", "", "Role a x\n  list: pods @ core\n", expect!["may"]);
    check("ann", "", "Role a x\n  get: pods @ core = one\n", expect!["may"]);
    check("ann", "", "Role a x\n  delete: secrets @ core\n", expect!["may"]);
    check(
        "ann",
        "",
        "Role b x\n  delete: secrets @ core\n",
        expect![[r#"
        403 roles.rbac.authorization.k8s.io "x" is forbidden: user "ann" (groups=["system:authenticated"]) is attempting to grant RBAC permissions not currently held:
        {APIGroups:[""], Resources:["secrets"], Verbs:["delete"]}"#]],
    );
    check(
        "ann",
        "",
        "ClusterRole x\n  delete: secrets @ core\n",
        expect![[r#"
        403 clusterroles.rbac.authorization.k8s.io "x" is forbidden: user "ann" (groups=["system:authenticated"]) is attempting to grant RBAC permissions not currently held:
        {APIGroups:[""], Resources:["secrets"], Verbs:["delete"]}"#]],
    );
    check(
        "ann",
        "",
        "ClusterRole x\n  get delete create: pods services @ core,apps\n",
        expect![[r#"
        403 clusterroles.rbac.authorization.k8s.io "x" is forbidden: user "ann" (groups=["system:authenticated"]) is attempting to grant RBAC permissions not currently held:
        {APIGroups:[""], Resources:["pods"], Verbs:["delete" "create"]}
        {APIGroups:[""], Resources:["services"], Verbs:["get" "delete" "create"]}
        {APIGroups:["apps"], Resources:["pods"], Verbs:["get" "delete" "create"]}
        {APIGroups:["apps"], Resources:["services"], Verbs:["get" "delete" "create"]}"#]],
    );
    check(
        "ann",
        "",
        "ClusterRole x\n  *: pods @ core\n",
        expect![[r#"
        403 clusterroles.rbac.authorization.k8s.io "x" is forbidden: user "ann" (groups=["system:authenticated"]) is attempting to grant RBAC permissions not currently held:
        {APIGroups:[""], Resources:["pods"], Verbs:["*"]}"#]],
    );
    check(
        "ann",
        "",
        "ClusterRole x\n  get: * @ core\n",
        expect![[r#"
        403 clusterroles.rbac.authorization.k8s.io "x" is forbidden: user "ann" (groups=["system:authenticated"]) is attempting to grant RBAC permissions not currently held:
        {APIGroups:[""], Resources:["*"], Verbs:["get"]}"#]],
    );
    check(
        "ann",
        "",
        "ClusterRole x\n  get: pods/log @ core\n",
        expect![[r#"
        403 clusterroles.rbac.authorization.k8s.io "x" is forbidden: user "ann" (groups=["system:authenticated"]) is attempting to grant RBAC permissions not currently held:
        {APIGroups:[""], Resources:["pods/log"], Verbs:["get"]}"#]],
    );
    check(
        "ann",
        "",
        "ClusterRole x\n  get: /metrics\n",
        expect![[r#"
        403 clusterroles.rbac.authorization.k8s.io "x" is forbidden: user "ann" (groups=["system:authenticated"]) is attempting to grant RBAC permissions not currently held:
        {NonResourceURLs:["/metrics"], Verbs:["get"]}"#]],
    );
    check(
        "url",
        "",
        "ClusterRole x\n  get: /logs/a /logs/* /logs\n",
        expect![[r#"
        403 clusterroles.rbac.authorization.k8s.io "x" is forbidden: user "url" (groups=["system:authenticated"]) is attempting to grant RBAC permissions not currently held:
        {NonResourceURLs:["/logs"], Verbs:["get"]}"#]],
    );
    check(
        "url",
        "",
        "ClusterRole x\n  get: *\n",
        expect![[r#"
        403 clusterroles.rbac.authorization.k8s.io "x" is forbidden: user "url" (groups=["system:authenticated"]) is attempting to grant RBAC permissions not currently held:
        {NonResourceURLs:["*"], Verbs:["get"]}"#]],
    );
    check("url", "", "ClusterRole x\n  update: deployments/scale @ apps\n", expect!["may"]);
    check("url", "", "ClusterRole x\n  update: */scale @ *\n", expect!["may"]);
    check(
        "url",
        "",
        "ClusterRole x\n  update: deployments @ apps\n",
        expect![[r#"
        403 clusterroles.rbac.authorization.k8s.io "x" is forbidden: user "url" (groups=["system:authenticated"]) is attempting to grant RBAC permissions not currently held:
        {APIGroups:["apps"], Resources:["deployments"], Verbs:["update"]}"#]],
    );
    check("url", "", "ClusterRole x\n  get: secrets @ core = mine\n", expect!["may"]);
    check(
        "url",
        "",
        "ClusterRole x\n  get: secrets @ core = mine yours\n",
        expect![[r#"
        403 clusterroles.rbac.authorization.k8s.io "x" is forbidden: user "url" (groups=["system:authenticated"]) is attempting to grant RBAC permissions not currently held:
        {APIGroups:[""], Resources:["secrets"], ResourceNames:["yours"], Verbs:["get"]}"#]],
    );
    check(
        "url",
        "",
        "ClusterRole x\n  get: secrets @ core\n",
        expect![[r#"
        403 clusterroles.rbac.authorization.k8s.io "x" is forbidden: user "url" (groups=["system:authenticated"]) is attempting to grant RBAC permissions not currently held:
        {APIGroups:[""], Resources:["secrets"], Verbs:["get"]}"#]],
    );
    check("root", "", "ClusterRole x\n  *: * @ *\n  *: *\n", expect!["may"]);
    check("jo system:masters", "", "ClusterRole x\n  *: * @ *\n", expect!["may"]);
    check(
        "loc",
        "",
        "ClusterRole x\n  get: pods @ core\n",
        expect![[r#"
        403 clusterroles.rbac.authorization.k8s.io "x" is forbidden: user "loc" (groups=["system:authenticated"]) is attempting to grant RBAC permissions not currently held:
        {APIGroups:[""], Resources:["pods"], Verbs:["get"]}"#]],
    );
    check("ann", "", "ClusterRole x\n", expect!["may"]);
}

#[test]
fn escalate_verb_allows_any_rule() {
    check("esc", "", "Role a x\n  *: * @ *\n", expect!["may"]);
    check(
        "esc",
        "",
        "ClusterRole free\n  get: pods @ core\n",
        expect![[r#"
        403 clusterroles.rbac.authorization.k8s.io "free" is forbidden: user "esc" (groups=["system:authenticated"]) is attempting to grant RBAC permissions not currently held:
        {APIGroups:[""], Resources:["pods"], Verbs:["get"]}"#]],
    );
    check("esc", "ClusterRole free\n", "ClusterRole free\n  get: pods @ core\n", expect!["may"]);
    check(
        "esc",
        "ClusterRole other\n",
        "ClusterRole other\n  get: pods @ core\n",
        expect![[r#"
        403 clusterroles.rbac.authorization.k8s.io "other" is forbidden: user "esc" (groups=["system:authenticated"]) is attempting to grant RBAC permissions not currently held:
        {APIGroups:[""], Resources:["pods"], Verbs:["get"]}"#]],
    );
    check("loc", "", "Role a x\n  get: pods @ core\n", expect!["may"]);
    check(
        "loc",
        "",
        "Role b x\n  get: pods @ core\n",
        expect![[r#"
        403 roles.rbac.authorization.k8s.io "x" is forbidden: user "loc" (groups=["system:authenticated"]) is attempting to grant RBAC permissions not currently held:
        {APIGroups:[""], Resources:["pods"], Verbs:["get"]}"#]],
    );
}

#[test]
fn role_update_checks_all_rules() {
    let big = "ClusterRole x\n  get: secrets @ core\n";
    check("ann", big, big, expect!["may"]);
    check("ann", big, "ClusterRole x\n  get: pods @ core\n", expect!["may"]);
    check(
        "ann",
        big,
        "ClusterRole x into:y\n  get: secrets @ core\n",
        expect![[r#"
        403 clusterroles.rbac.authorization.k8s.io "x" is forbidden: user "ann" (groups=["system:authenticated"]) is attempting to grant RBAC permissions not currently held:
        {APIGroups:[""], Resources:["secrets"], Verbs:["get"]}"#]],
    );
}

#[test]
fn aggregation_rule_requires_cluster_admin() {
    check(
        "ann",
        "",
        "ClusterRole x from:y\n",
        expect![[
            r#"403 clusterroles.rbac.authorization.k8s.io "x" is forbidden: must have cluster-admin privileges to use the aggregationRule"#
        ]],
    );
    check(
        "ann",
        "ClusterRole x from:y\n",
        "ClusterRole x\n",
        expect![[
            r#"403 clusterroles.rbac.authorization.k8s.io "x" is forbidden: must have cluster-admin privileges to use the aggregationRule"#
        ]],
    );
    check("root", "", "ClusterRole x from:y\n", expect!["may"]);
}

#[test]
fn binding_cannot_grant_more_than_its_author_has() {
    check("ann", "", "ClusterRoleBinding x of:reader\n  User eve\n", expect!["may"]);
    check("ann", "", "RoleBinding a x of:^reader\n  User eve\n", expect!["may"]);
    check("ann", "", "RoleBinding a x of:^secrets\n  User ann\n", expect!["may"]);
    check(
        "ann",
        "",
        "RoleBinding b x of:^secrets\n  User ann\n",
        expect![[r#"
        403 rolebindings.rbac.authorization.k8s.io "x" is forbidden: user "ann" (groups=["system:authenticated"]) is attempting to grant RBAC permissions not currently held:
        {APIGroups:[""], Resources:["secrets"], Verbs:["*"]}"#]],
    );
    check(
        "ann",
        "",
        "ClusterRoleBinding x of:secrets\n  User ann\n",
        expect![[r#"
        403 clusterrolebindings.rbac.authorization.k8s.io "x" is forbidden: user "ann" (groups=["system:authenticated"]) is attempting to grant RBAC permissions not currently held:
        {APIGroups:[""], Resources:["secrets"], Verbs:["*"]}"#]],
    );
    check(
        "ann",
        "",
        "ClusterRoleBinding x of:cluster-admin\n  User ann\n",
        expect![[r#"
        403 clusterrolebindings.rbac.authorization.k8s.io "x" is forbidden: user "ann" (groups=["system:authenticated"]) is attempting to grant RBAC permissions not currently held:
        {APIGroups:["*"], Resources:["*"], Verbs:["*"]}
        {NonResourceURLs:["*"], Verbs:["*"]}"#]],
    );
    check(
        "ann",
        "",
        "RoleBinding a x of:big\n  User ann\n",
        expect![[r#"
        403 rolebindings.rbac.authorization.k8s.io "x" is forbidden: user "ann" (groups=["system:authenticated"]) is attempting to grant RBAC permissions not currently held:
        {APIGroups:["*"], Resources:["*"], Verbs:["*"]}"#]],
    );
    check(
        "ann",
        "",
        "RoleBinding a x of:none\n  User ann\n",
        expect![[r#"404 roles.rbac.authorization.k8s.io "none" not found"#]],
    );
    check(
        "ann",
        "",
        "RoleBinding a x of:^none\n  User ann\n",
        expect![[r#"404 clusterroles.rbac.authorization.k8s.io "none" not found"#]],
    );
    check("root", "", "ClusterRoleBinding x of:cluster-admin\n  User eve\n", expect!["may"]);
    check("jo system:masters", "", "RoleBinding a x of:^none\n  User ann\n", expect!["may"]);
    check(
        "ann",
        "ClusterRoleBinding x of:secrets\n  User eve\n",
        "ClusterRoleBinding x of:secrets\n",
        expect![[r#"
        403 clusterrolebindings.rbac.authorization.k8s.io "x" is forbidden: user "ann" (groups=["system:authenticated"]) is attempting to grant RBAC permissions not currently held:
        {APIGroups:[""], Resources:["secrets"], Verbs:["*"]}"#]],
    );
}

#[test]
fn bind_verb_allows_binding_of_any_role() {
    check("bind", "", "ClusterRoleBinding x of:secrets\n  User bind\n", expect!["may"]);
    check("bind", "", "RoleBinding a x of:^secrets\n  User bind\n", expect!["may"]);
    check(
        "bind",
        "",
        "ClusterRoleBinding x of:reader\n  User bind\n",
        expect![[r#"
        403 clusterrolebindings.rbac.authorization.k8s.io "x" is forbidden: user "bind" (groups=["system:authenticated"]) is attempting to grant RBAC permissions not currently held:
        {APIGroups:[""], Resources:["pods"], Verbs:["get" "list"]}"#]],
    );
    check("bind", "", "RoleBinding a x of:big\n  User bind\n", expect!["may"]);
    check("bind", "", "RoleBinding a x of:none\n  User bind\n", expect!["may"]);
    check("loc", "", "RoleBinding a x of:^secrets\n  User loc\n", expect!["may"]);
    check(
        "loc",
        "",
        "RoleBinding b x of:^secrets\n  User loc\n",
        expect![[r#"
        403 rolebindings.rbac.authorization.k8s.io "x" is forbidden: user "loc" (groups=["system:authenticated"]) is attempting to grant RBAC permissions not currently held:
        {APIGroups:[""], Resources:["secrets"], Verbs:["*"]}"#]],
    );
    check(
        "loc",
        "",
        "ClusterRoleBinding x of:secrets\n  User loc\n",
        expect![[r#"
        403 clusterrolebindings.rbac.authorization.k8s.io "x" is forbidden: user "loc" (groups=["system:authenticated"]) is attempting to grant RBAC permissions not currently held:
        {APIGroups:[""], Resources:["secrets"], Verbs:["*"]}"#]],
    );
}

/// Rules whose expansion exceeds memory are rejected without expanding them.
#[test]
fn rejects_huge_rules_without_expansion() {
    let many = |prefix: &str, separator: &str| {
        (0..3_000).map(|i| format!("{prefix}{i}")).collect::<Vec<_>>().join(separator)
    };
    let text = format!("ClusterRole x\n  {}: {} @ {}\n", many("v", " "), many("r", " "), many("g", ","));
    let object = objects(&text).remove(0);
    let target = Target::collection(row("clusterroles"), "");
    let rbac = rbac(POLICY);
    assert!(poll_now(escalation::check(&rbac, &user("ann"), &target, &object, None)).is_err());
    assert!(poll_now(escalation::check(&rbac, &user("root"), &target, &object, None)).is_ok());
}
