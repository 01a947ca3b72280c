//! Tests of impersonation.

use expect_test::{Expect, expect};
use http::HeaderMap;

use super::{poll_now, rbac, user};
use crate::access::{RequestInfo, impersonate};
use crate::rbac::row;
use crate::request::Target;

const POLICY: &str = "
ClusterRole old
  impersonate: users groups @ core = ann devs
  impersonate: serviceaccounts @ core
  impersonate: userextras/acme.com/x uids @ authentication.k8s.io = 1
ClusterRoleBinding old
  User old
ClusterRole narrow
  impersonate:user-info: users groups @ authentication.k8s.io = ann devs
  impersonate-on:user-info:list: roles @ rbac.authorization.k8s.io
ClusterRoleBinding narrow
  User narrow
ClusterRole agent
  impersonate:associated-node: nodes @ authentication.k8s.io
  impersonate-on:associated-node:list: roles @ rbac.authorization.k8s.io
ClusterRoleBinding agent
  ServiceAccount a/agent
";

/// The effective user of a request on roles by `subject` with these headers.
#[track_caller]
fn check(subject: &str, verb: &'static str, headers: &[(&str, &str)], expected: Expect) {
    let mut map = HeaderMap::new();
    for (name, value) in headers {
        let name = format!("impersonate-{name}");
        map.append(http::HeaderName::from_bytes(name.as_bytes()).unwrap(), value.parse().unwrap());
    }
    let mut user = user(subject);
    user.extra.insert("authentication.kubernetes.io/node-name".into(), vec!["n1".into()]);
    let target = Target::collection(row("roles"), "x");
    let found = match poll_now(impersonate(
        &rbac(POLICY),
        user,
        &map,
        &RequestInfo::Resource(verb, &target, "", None),
    )) {
        Ok(user) => format!("{} {:?} {} {:?}", user.name, user.groups, user.uid, user.extra),
        Err(status) => format!("{} {}", status.code, status.message),
    };
    expected.assert_eq(&found);
}

#[test]
fn admin_can_impersonate_any_user() {
    let ann = ("user", "ann");
    let root = "root system:masters";
    check(root, "list", &[ann], expect![[r#"ann ["system:authenticated"]  {}"#]]);
    check(
        root,
        "list",
        &[ann, ("group", "a"), ("group", "b"), ("uid", "7")],
        expect![[r#"ann ["a", "b", "system:authenticated"] 7 {}"#]],
    );
    check(
        root,
        "list",
        &[ann, ("extra-acme.com%2fx", "1"), ("extra-acme.com%2fx", "2")],
        expect![[r#"ann ["system:authenticated"]  {"acme.com/x": ["1", "2"]}"#]],
    );
    check(
        root,
        "list",
        &[ann, ("group", "system:masters")],
        expect![[r#"ann ["system:masters", "system:authenticated"]  {}"#]],
    );
    check(
        root,
        "list",
        &[("user", "system:serviceaccount:a:b")],
        expect![[
            r#"system:serviceaccount:a:b ["system:serviceaccounts", "system:serviceaccounts:a", "system:authenticated"]  {}"#
        ]],
    );
    check(
        root,
        "list",
        &[("user", "system:anonymous")],
        expect![[r#"system:anonymous ["system:unauthenticated"]  {}"#]],
    );
    check(
        root,
        "list",
        &[("user", "system:node:n2")],
        expect![[r#"system:node:n2 ["system:nodes", "system:authenticated"]  {}"#]],
    );
    check(
        root,
        "list",
        &[("group", "a")],
        expect![[
            r#"400 requested &user.DefaultInfo{Name:"", UID:"", Groups:[]string{"a"}, Extra:map[string][]string(nil)} without impersonating a user name"#
        ]],
    );
    check(
        root,
        "list",
        &[("uid", "7"), ("extra-k", "v")],
        expect![[
            r#"400 requested &user.DefaultInfo{Name:"", UID:"7", Groups:[]string(nil), Extra:map[string][]string{"k":[]string{"v"}}} without impersonating a user name"#
        ]],
    );
}

#[test]
fn impersonation_requires_permission_for_each_attribute() {
    let ann = ("user", "ann");
    check(
        "jo",
        "list",
        &[ann],
        expect![[
            r#"403 roles.rbac.authorization.k8s.io is forbidden: User "jo" cannot impersonate-on:user-info:list resource "roles" in API group "rbac.authorization.k8s.io" in the namespace "x""#
        ]],
    );
    check(
        "jo",
        "list",
        &[("user", "system:serviceaccount:a:b")],
        expect![[
            r#"403 roles.rbac.authorization.k8s.io is forbidden: User "jo" cannot impersonate-on:serviceaccount:list resource "roles" in API group "rbac.authorization.k8s.io" in the namespace "x""#
        ]],
    );
    check(
        "jo",
        "list",
        &[("user", "system:node:n1")],
        expect![[
            r#"403 roles.rbac.authorization.k8s.io is forbidden: User "jo" cannot impersonate-on:arbitrary-node:list resource "roles" in API group "rbac.authorization.k8s.io" in the namespace "x""#
        ]],
    );
    check("old", "list", &[ann], expect![[r#"ann ["system:authenticated"]  {}"#]]);
    check("old", "list", &[ann, ("group", "devs")], expect![[r#"ann ["devs", "system:authenticated"]  {}"#]]);
    check(
        "old",
        "list",
        &[ann, ("group", "system:masters")],
        expect![[
            r#"403 roles.rbac.authorization.k8s.io is forbidden: User "old" cannot impersonate-on:user-info:list resource "roles" in API group "rbac.authorization.k8s.io" in the namespace "x""#
        ]],
    );
    check(
        "old",
        "list",
        &[("user", "bob")],
        expect![[
            r#"403 roles.rbac.authorization.k8s.io is forbidden: User "old" cannot impersonate-on:user-info:list resource "roles" in API group "rbac.authorization.k8s.io" in the namespace "x""#
        ]],
    );
    check(
        "old",
        "list",
        &[ann, ("extra-acme.com%2fx", "1"), ("uid", "1")],
        expect![[r#"ann ["system:authenticated"] 1 {"acme.com/x": ["1"]}"#]],
    );
    check(
        "old",
        "list",
        &[ann, ("extra-acme.com%2fx", "2")],
        expect![[
            r#"403 roles.rbac.authorization.k8s.io is forbidden: User "old" cannot impersonate-on:user-info:list resource "roles" in API group "rbac.authorization.k8s.io" in the namespace "x""#
        ]],
    );
    check(
        "old",
        "list",
        &[ann, ("uid", "2")],
        expect![[
            r#"403 roles.rbac.authorization.k8s.io is forbidden: User "old" cannot impersonate-on:user-info:list resource "roles" in API group "rbac.authorization.k8s.io" in the namespace "x""#
        ]],
    );
    check(
        "old",
        "list",
        &[("user", "system:serviceaccount:a:b")],
        expect![[
            r#"system:serviceaccount:a:b ["system:serviceaccounts", "system:serviceaccounts:a", "system:authenticated"]  {}"#
        ]],
    );
}

#[test]
fn constrained_impersonation_checks_verb_and_target() {
    let ann = ("user", "ann");
    check("narrow", "list", &[ann], expect![[r#"ann ["system:authenticated"]  {}"#]]);
    check(
        "narrow",
        "list",
        &[ann, ("group", "devs")],
        expect![[r#"ann ["devs", "system:authenticated"]  {}"#]],
    );
    check(
        "narrow",
        "create",
        &[ann],
        expect![[
            r#"403 roles.rbac.authorization.k8s.io is forbidden: User "narrow" cannot impersonate-on:user-info:create resource "roles" in API group "rbac.authorization.k8s.io" in the namespace "x""#
        ]],
    );
    check(
        "narrow",
        "list",
        &[("user", "bob")],
        expect![[
            r#"403 users.authentication.k8s.io "bob" is forbidden: User "narrow" cannot impersonate:user-info resource "users" in API group "authentication.k8s.io" at the cluster scope"#
        ]],
    );
    check(
        "narrow",
        "list",
        &[ann, ("group", "system:masters")],
        expect![[
            r#"403 groups.authentication.k8s.io "system:masters" is forbidden: User "narrow" cannot impersonate:user-info resource "groups" in API group "authentication.k8s.io" at the cluster scope: impersonating the system:masters group is not allowed"#
        ]],
    );
    check(
        "narrow",
        "list",
        &[ann, ("group", "other")],
        expect![[
            r#"403 groups.authentication.k8s.io "other" is forbidden: User "narrow" cannot impersonate:user-info resource "groups" in API group "authentication.k8s.io" at the cluster scope"#
        ]],
    );
    check(
        "narrow",
        "list",
        &[ann, ("extra-scopes", "a")],
        expect![[
            r#"403 userextras.authentication.k8s.io is forbidden: User "narrow" cannot impersonate:user-info resource "userextras" in API group "authentication.k8s.io" at the cluster scope: impersonating an invalid key in extra is not allowed: extra.key: Invalid value: "scopes": must be a domain-prefixed path (such as "acme.io/foo")"#
        ]],
    );
    check(
        "narrow",
        "list",
        &[("user", "system:serviceaccount:a:b")],
        expect![[
            r#"403 roles.rbac.authorization.k8s.io is forbidden: User "narrow" cannot impersonate-on:serviceaccount:list resource "roles" in API group "rbac.authorization.k8s.io" in the namespace "x""#
        ]],
    );
    let agent = "system:serviceaccount:a:agent";
    check(
        agent,
        "list",
        &[("user", "system:node:n1")],
        expect![[r#"system:node:n1 ["system:nodes", "system:authenticated"]  {}"#]],
    );
    check(
        agent,
        "list",
        &[("user", "system:node:n2")],
        expect![[
            r#"403 roles.rbac.authorization.k8s.io is forbidden: User "system:serviceaccount:a:agent" cannot impersonate-on:arbitrary-node:list resource "roles" in API group "rbac.authorization.k8s.io" in the namespace "x""#
        ]],
    );
    check(
        agent,
        "create",
        &[("user", "system:node:n1")],
        expect![[
            r#"403 roles.rbac.authorization.k8s.io is forbidden: User "system:serviceaccount:a:agent" cannot impersonate-on:associated-node:create resource "roles" in API group "rbac.authorization.k8s.io" in the namespace "x""#
        ]],
    );
    check(
        "agent",
        "list",
        &[("user", "system:node:n1")],
        expect![[
            r#"403 roles.rbac.authorization.k8s.io is forbidden: User "agent" cannot impersonate-on:arbitrary-node:list resource "roles" in API group "rbac.authorization.k8s.io" in the namespace "x""#
        ]],
    );
}
