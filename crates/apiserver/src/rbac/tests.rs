//! Authorization decisions against expectations written by hand, in the format of `defaults.txt`
//! and `decisions.txt`.

mod escalation;
mod impersonation;
mod requests;

use api::json::JsonExt as _;
use expect_test::expect;
use futures_util::FutureExt as _;
use serde_json::Value;

use super::index::RbacIndex;
use super::{Attributes, RBAC_RESOURCES, Rbac, defaults};
use crate::access::User;

/// The aggregated rules of a role, as the clusterrole-aggregation controller computes them.
fn aggregated_rules(role: &Value, roles: &[Value]) -> Vec<Value> {
    let mut rules: Vec<Value> = Vec::new();
    for selector in role.at("aggregationRule").items("clusterRoleSelectors") {
        let is_selected = |labels: &Value| {
            selector.entries("matchLabels").all(|(name, value)| labels.get(name) == Some(value))
        };
        let others = roles.iter().filter(|other| is_selected(other.at("metadata").at("labels")));
        for rule in others.flat_map(|other| other.items("rules")) {
            if !rules.contains(rule) {
                rules.push(rule.clone());
            }
        }
    }
    rules
}

/// The objects of a policy; `of:^x` in a RoleBinding references a ClusterRole.
fn objects(policy: &str) -> Vec<Value> {
    let mut objects = defaults::objects(policy);
    for object in &mut objects {
        if let Some(name) = object.at("roleRef").text("name").strip_prefix('^').map(str::to_owned) {
            object["roleRef"].set("name", name);
            object["roleRef"].set("kind", "ClusterRole");
        }
    }
    // Aggregated roles may aggregate other aggregated roles.
    for _ in 0..3 {
        let roles: Vec<Value> =
            objects.iter().filter(|object| object.text("kind") == "ClusterRole").cloned().collect();
        for object in objects.iter_mut().filter(|object| object.has("aggregationRule")) {
            object.set("rules", aggregated_rules(object, &roles));
        }
    }
    objects
}

fn put(view: &mut RbacIndex, object: &Value) {
    let metadata = object.at("metadata");
    let (namespace, name) = (metadata.text("namespace"), metadata.text("name"));
    match object.text("kind") {
        "Role" | "ClusterRole" => view.put_role(namespace, name, object),
        _ => view.put_binding(namespace, name, object),
    }
}

/// An authorizer with a fixed policy.
fn rbac(policy: &str) -> Rbac {
    Rbac::with_view(|view| objects(policy).iter().for_each(|object| put(view, object)))
}

/// Parses `name group group…` and adds the groups that service accounts and authenticated users
/// always have.
fn user(text: &str) -> User {
    let mut words = text.split_whitespace().map(str::to_owned);
    let name = words.next().unwrap_or_default();
    let mut groups: Vec<String> = words.collect();
    if let Some((namespace, _)) =
        name.strip_prefix("system:serviceaccount:").and_then(|rest| rest.split_once(':'))
    {
        groups.extend(["system:serviceaccounts".to_owned(), format!("system:serviceaccounts:{namespace}")]);
    }
    let known = if name == "system:anonymous" { "system:unauthenticated" } else { "system:authenticated" };
    groups.push(known.to_owned());
    User { name, groups, ..User::default() }
}

/// Parses `verb resource/sub.group namespace:name` or `verb /path`.
fn parse_attributes(text: &str) -> Attributes<'_> {
    let mut words = text.split_whitespace();
    let verb = words.next().expect("a verb");
    let what = words.next().expect("a resource or a path");
    if what.starts_with('/') {
        return Attributes::Path { verb, path: what };
    }
    let (what, group) = what.split_once('.').unwrap_or((what, ""));
    let (resource, subresource) = what.split_once('/').unwrap_or((what, ""));
    let scope = words.next().unwrap_or("");
    let (namespace, name) = scope.split_once(':').unwrap_or((scope, ""));
    Attributes::Resource { verb, group, resource, subresource, namespace, name, fields: None }
}

/// The table has a line per user, followed by indented lines of `yes` or `no` and the request.
#[track_caller]
fn check_all(rbac: &Rbac, table: &str) -> usize {
    let mut subject = User::default();
    let mut count = 0;
    let mut wrong = Vec::new();
    for line in table.lines().filter(|line| !line.is_empty() && !line.starts_with('#')) {
        let Some(line) = line.strip_prefix("  ") else {
            subject = user(line);
            continue;
        };
        let (expected, request) = line.trim().split_once(' ').expect("an expectation and a question");
        count += 1;
        if rbac.allows(&subject, &parse_attributes(request.trim())) != (expected == "yes") {
            wrong.push(format!("{}: {line}", subject.name));
        }
    }
    assert!(wrong.is_empty(), "decided otherwise:\n{}", wrong.join("\n"));
    count
}

#[test]
fn default_policy_allows_what_upstream_allows() {
    let policy = format!(
        "{}{}",
        defaults::DEFAULT_POLICY,
        "
RoleBinding team owners of:^admin
  Group owners
RoleBinding team writers of:^edit
  User ed
RoleBinding team readers of:^view
  User vi
  ServiceAccount team/robot
ClusterRoleBinding auditors of:view
  User audit
"
    );
    assert!(check_all(&rbac(&policy), include_str!("tests/defaults.txt")) > 100);
}

#[test]
fn rule_matching_follows_upstream() {
    let count = check_all(&rbac(include_str!("tests/policy.txt")), include_str!("tests/decisions.txt"));
    assert!(count > 100);
}

const POLICY_WITH_MISSING_ROLES: &str = "
ClusterRole read
  get: pods @ core
ClusterRoleBinding everywhere of:read
  User ann
  Group devs
RoleBinding a here of:^read
  ServiceAccount a/bot
RoleBinding a lost of:nothing
  Group devs
RoleBinding a lost2 of:^nowhere
  Group devs
RoleBinding a lost3 of:^nowhere
  User cy
RoleBinding a lost4 of:^nowhere
  User cy
";

/// Polls a decision that needs no webhook.
#[track_caller]
fn poll_now<T>(future: impl Future<Output = T>) -> T {
    future.now_or_never().expect("only webhook authorizers are pending")
}

#[track_caller]
fn check_reason(subject: &str, request: &str, expected: expect_test::Expect) {
    let (rbac, user, attributes) =
        (rbac(POLICY_WITH_MISSING_ROLES), user(subject), parse_attributes(request));
    let text = match poll_now(rbac.authorize(&user, &attributes)) {
        Ok(()) => rbac.authorize_local(&user, &attributes).reason(&user),
        Err(status) => format!("{} {}", status.code, status.message),
    };
    expected.assert_eq(&text);
}

#[test]
fn reasons_match_upstream_text() {
    check_reason(
        "ann",
        "get pods b:x",
        expect![[r#"RBAC: allowed by ClusterRoleBinding "everywhere" of ClusterRole "read" to User "ann""#]],
    );
    check_reason(
        "bob devs",
        "get pods",
        expect![[
            r#"RBAC: allowed by ClusterRoleBinding "everywhere" of ClusterRole "read" to Group "devs""#
        ]],
    );
    check_reason(
        "system:serviceaccount:a:bot",
        "get pods a",
        expect![[r#"RBAC: allowed by RoleBinding "here/a" of ClusterRole "read" to ServiceAccount "bot/a""#]],
    );
    check_reason(
        "bob devs",
        "list pods a",
        expect![[
            r#"403 pods is forbidden: User "bob" cannot list resource "pods" in API group "" in the namespace "a": RBAC: [role.rbac.authorization.k8s.io "nothing" not found, clusterrole.rbac.authorization.k8s.io "nowhere" not found]"#
        ]],
    );
    check_reason(
        "cy",
        "update deployments/scale.apps a:x",
        expect![[
            r#"403 deployments.apps "x" is forbidden: User "cy" cannot update resource "deployments/scale" in API group "apps" in the namespace "a": RBAC: clusterrole.rbac.authorization.k8s.io "nowhere" not found"#
        ]],
    );
    check_reason(
        "zoe",
        "list nodes",
        expect![[
            r#"403 nodes is forbidden: User "zoe" cannot list resource "nodes" in API group "" at the cluster scope"#
        ]],
    );
    check_reason("zoe", "get /metrics", expect![[r#"403 forbidden: User "zoe" cannot get path "/metrics""#]]);
    check_reason("root system:masters", "get /metrics", expect![""]);
}

#[test]
fn view_follows_role_and_binding_changes() {
    let mut view = RbacIndex::default();
    let user_in_binding = user("bob");
    let get = parse_attributes("get pods a");
    let may = |view: &RbacIndex| view.find_binding(&user_in_binding, &get).is_ok();
    let [role, binding] = <[Value; 2]>::try_from(objects(
        "Role a r\n  get: pods @ core\nRoleBinding a b of:r\n  User bob\n  User bob\n",
    ))
    .expect("two objects");
    put(&mut view, &binding);
    assert!(!may(&view), "the role is not there yet");
    put(&mut view, &role);
    assert!(may(&view));
    put(&mut view, &objects("Role a r\n  list: pods @ core\n")[0]);
    assert!(!may(&view), "the role has changed");
    put(&mut view, &role);
    view.remove_binding("a", "b");
    assert!(!may(&view), "the binding is gone");
    put(&mut view, &binding);
    assert!(may(&view));
    view.remove_role("a", "r");
    assert!(!may(&view), "the role is gone");
    put(&mut view, &objects("RoleBinding a b of:r\n  User ann\n")[0]);
    put(&mut view, &role);
    assert!(!may(&view), "the binding has another subject");
    view.remove_role("a", "r");
    view.remove_binding("a", "b");
    assert!(view.is_empty(), "removed roles and bindings leave no entries");
}

/// Many roles and bindings do not mix the permissions of different users.
#[test]
fn bindings_stay_separate_at_scale() {
    let mut view = RbacIndex::default();
    for i in 0..1_000 {
        put(&mut view, &objects(&format!("Role n{} r{i}\n  get list: kind{i} pods/log @ core\n", i % 50))[0]);
    }
    for i in 0..5_000 {
        let (role, namespace_index) = (i % 1_000, i % 50);
        let text =
            format!("RoleBinding n{namespace_index} b{i} of:r{role}\n  User u{i}\n  Group g{}\n", i % 100);
        put(&mut view, &objects(&text)[0]);
    }
    let is_allowed = |view: &RbacIndex, subject: &str, request: &str| {
        view.find_binding(&user(subject), &parse_attributes(request)).is_ok()
    };
    let may = |subject: &str, request: &str| is_allowed(&view, subject, request);
    for i in (0..5_000).step_by(7) {
        let (role, namespace_index) = (i % 1_000, i % 50);
        assert!(may(&format!("u{i}"), &format!("get kind{role} n{namespace_index}:x")));
        assert!(may(&format!("x g{}", i % 100), &format!("list kind{role} n{namespace_index}")));
        assert!(!may(&format!("u{i}"), &format!("get kind{role} n{}:x", (namespace_index + 1) % 50)));
        assert!(!may(&format!("u{i}"), &format!("get kind{} n{namespace_index}:x", (role + 50) % 1_000)));
        assert!(!may(&format!("u{i}"), &format!("delete kind{role} n{namespace_index}:x")));
    }
    for i in 0..5_000 {
        view.remove_binding(&format!("n{}", i % 50), &format!("b{i}"));
    }
    assert!(!is_allowed(&view, "u1", "get kind1 n1:x"));
}

#[test]
fn resource_order_matches_apply() {
    let namespaced = RBAC_RESOURCES.map(|plural| super::row(plural).namespaced);
    assert_eq!(namespaced, [false, true, false, true]);
}
