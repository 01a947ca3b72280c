//! Parsed FlowSchemas in order of precedence, each with its priority level.
//!
//! Rebuilt whenever a configuration object changes; classifying a request only compares strings.

use std::sync::Arc;

use api::json::JsonExt as _;
use http::HeaderValue;
use serde_json::Value;

use super::priority_level::PriorityLevel;
use super::queue_set::QueuingConfig;
use super::seat_allocation::ConcurrencyShares;
use crate::access::User;
use crate::rbac::Attributes;

pub struct FlowSchemaTable {
    /// By precedence, then by name. The last one matches everything.
    pub schemas: Vec<Arc<FlowSchemaEntry>>,
}

/// A FlowSchema and the priority level of the requests that it matches.
pub struct FlowSchemaEntry {
    pub rules: FlowSchemaSpec,
    pub uid: HeaderValue,
    pub level: Arc<PriorityLevel>,
    pub level_uid: HeaderValue,
    /// The index of this schema's metrics in its level.
    pub metrics_index: usize,
    /// The most seats that one request may take.
    pub max_seats: u64,
}

/// The parsed spec of a FlowSchema.
#[derive(Debug, PartialEq)]
pub struct FlowSchemaSpec {
    pub name: String,
    pub level: String,
    pub precedence: i64,
    pub distinguisher: Distinguisher,
    rules: Vec<PolicyRulesWithSubjects>,
}

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Distinguisher {
    None,
    User,
    Namespace,
}

#[derive(Debug, PartialEq)]
struct PolicyRulesWithSubjects {
    subjects: Vec<Subject>,
    resources: Vec<ResourceRule>,
    paths: Vec<NonResourceRule>,
}

#[derive(Debug, PartialEq)]
enum Subject {
    Any,
    User(String),
    Group(String),
    /// The user name prefix of all service accounts of a namespace.
    ServiceAccounts(String),
}

#[derive(Debug, PartialEq)]
struct ResourceRule {
    verbs: WildcardList,
    groups: WildcardList,
    resources: WildcardList,
    namespaces: WildcardList,
    cluster: bool,
}

#[derive(Debug, PartialEq)]
struct NonResourceRule {
    verbs: WildcardList,
    paths: Vec<String>,
}

/// A list of names, or `*`.
#[derive(Debug, PartialEq)]
enum WildcardList {
    All,
    Some(Vec<String>),
}

impl FlowSchemaTable {
    /// The first schema that matches, or the last one.
    pub fn find_schema(&self, user: &User, attributes: &Attributes<'_>) -> Option<&Arc<FlowSchemaEntry>> {
        self.schemas.iter().find(|schema| schema.rules.matches(user, attributes)).or(self.schemas.last())
    }
}

impl FlowSchemaSpec {
    pub fn parse(object: &Value) -> FlowSchemaSpec {
        let spec = object.at("spec");
        FlowSchemaSpec {
            name: object.at("metadata").text("name").to_owned(),
            level: spec.at("priorityLevelConfiguration").text("name").to_owned(),
            precedence: spec.int("matchingPrecedence").unwrap_or(1000),
            distinguisher: match spec.at("distinguisherMethod").text("type") {
                "ByUser" => Distinguisher::User,
                "ByNamespace" => Distinguisher::Namespace,
                _ => Distinguisher::None,
            },
            rules: spec.items("rules").iter().map(PolicyRulesWithSubjects::parse).collect(),
        }
    }

    pub fn matches(&self, user: &User, attributes: &Attributes<'_>) -> bool {
        self.rules.iter().any(|rule| rule.matches(user, attributes))
    }
}

impl PolicyRulesWithSubjects {
    fn parse(rule: &Value) -> PolicyRulesWithSubjects {
        let resource = |rule: &Value| ResourceRule {
            verbs: WildcardList::parse(rule.items("verbs")),
            groups: WildcardList::parse(rule.items("apiGroups")),
            resources: WildcardList::parse(rule.items("resources")),
            namespaces: WildcardList::parse(rule.items("namespaces")),
            cluster: rule.flag("clusterScope"),
        };
        let path = |rule: &Value| NonResourceRule {
            verbs: WildcardList::parse(rule.items("verbs")),
            paths: string_values(rule.items("nonResourceURLs")),
        };
        PolicyRulesWithSubjects {
            subjects: rule.items("subjects").iter().filter_map(Subject::parse).collect(),
            resources: rule.items("resourceRules").iter().map(resource).collect(),
            paths: rule.items("nonResourceRules").iter().map(path).collect(),
        }
    }

    fn matches(&self, user: &User, attributes: &Attributes<'_>) -> bool {
        if !self.subjects.iter().any(|subject| subject.matches_user(user)) {
            return false;
        }
        match *attributes {
            Attributes::Resource { verb, group, resource, subresource, namespace, .. } => {
                self.resources.iter().any(|rule| {
                    rule.verbs.has(verb)
                        && rule.resources.has_resource(resource, subresource)
                        && rule.groups.has(group)
                        && if namespace.is_empty() { rule.cluster } else { rule.namespaces.has(namespace) }
                })
            }
            Attributes::Path { verb, path } => self
                .paths
                .iter()
                .any(|rule| rule.verbs.has(verb) && rule.paths.iter().any(|rule| covers(rule, path))),
        }
    }
}

impl Subject {
    fn parse(subject: &Value) -> Option<Subject> {
        match subject.text("kind") {
            "User" => match subject.at("user").text("name") {
                "*" => Some(Subject::Any),
                name => Some(Subject::User(name.to_owned())),
            },
            "Group" => match subject.at("group").text("name") {
                "*" => Some(Subject::Any),
                name => Some(Subject::Group(name.to_owned())),
            },
            "ServiceAccount" => {
                let account = subject.at("serviceAccount");
                let namespace = format!("system:serviceaccount:{}:", account.text("namespace"));
                match account.text("name") {
                    "*" => Some(Subject::ServiceAccounts(namespace)),
                    name => Some(Subject::User(namespace + name)),
                }
            }
            _ => None,
        }
    }

    fn matches_user(&self, user: &User) -> bool {
        match self {
            Subject::Any => true,
            Subject::User(name) => user.name == *name,
            Subject::Group(name) => user.is_in(name),
            Subject::ServiceAccounts(prefix) => user.name.starts_with(prefix.as_str()),
        }
    }
}

impl WildcardList {
    fn parse(items: &[Value]) -> WildcardList {
        match string_values(items) {
            words if words == ["*"] => WildcardList::All,
            words => WildcardList::Some(words),
        }
    }

    fn has(&self, word: &str) -> bool {
        match self {
            WildcardList::All => true,
            WildcardList::Some(words) => words.iter().any(|other| other == word),
        }
    }

    /// Like `has`, for `resource/subresource`.
    fn has_resource(&self, resource: &str, subresource: &str) -> bool {
        let is = |word: &String| match word.split_once('/') {
            Some(parts) => parts == (resource, subresource),
            None => subresource.is_empty() && word == resource,
        };
        match self {
            WildcardList::All => true,
            WildcardList::Some(words) => words.iter().any(is),
        }
    }
}

/// A rule's path matches itself and everything below it.
fn covers(rule: &str, path: &str) -> bool {
    if rule == "*" || rule == path {
        return true;
    }
    let prefix = rule.strip_suffix('*').unwrap_or(rule);
    let prefix = prefix.strip_suffix('/').unwrap_or(prefix);
    path.strip_prefix(prefix).is_some_and(|rest| rest.starts_with('/'))
}

fn string_values(items: &[Value]) -> Vec<String> {
    items.iter().filter_map(Value::as_str).map(str::to_owned).collect()
}

/// The concurrency shares and queuing configuration of a PriorityLevelConfiguration. `None` for a
/// spec that validation rejects.
pub fn parse_priority_level(object: &Value) -> Option<(ConcurrencyShares, QueuingConfig)> {
    let spec = object.at("spec");
    let count = |value: &Value, name: &str| u64::try_from(value.int(name).unwrap_or(0)).unwrap_or(0);
    let exempt = object.at("metadata").text("name") == "exempt";
    match spec.text("type") {
        "Exempt" if exempt => {
            let own = spec.at("exempt");
            let share = ConcurrencyShares {
                exempt: true,
                shares: count(own, "nominalConcurrencyShares"),
                lendable_percent: count(own, "lendablePercent"),
                borrowing_percent: None,
            };
            Some((share, QueuingConfig::Exempt))
        }
        "Limited" if !exempt => {
            let own = spec.at("limited");
            let share = ConcurrencyShares {
                exempt: false,
                shares: own.int("nominalConcurrencyShares").map_or(30, |n| u64::try_from(n).unwrap_or(0)),
                lendable_percent: count(own, "lendablePercent"),
                borrowing_percent: own
                    .int("borrowingLimitPercent")
                    .and_then(|percent| u64::try_from(percent).ok()),
            };
            let response = own.at("limitResponse");
            let queuing = response.at("queuing");
            let config = match response.text("type") {
                "Queue" => QueuingConfig::Queue {
                    queues: count(queuing, "queues").max(1),
                    hand_size: count(queuing, "handSize").max(1) as usize,
                    queue_length_limit: count(queuing, "queueLengthLimit").max(1) as usize,
                },
                _ => QueuingConfig::Reject,
            };
            Some((share, config))
        }
        _ => None,
    }
}

#[cfg(test)]
mod tests {
    use serde_json::json;

    use super::*;

    fn user(name: &str, groups: &[&str]) -> User {
        let groups = groups.iter().map(|group| (*group).to_owned()).collect();
        User { name: name.into(), groups, ..User::default() }
    }

    /// Parses `get pods/log @ group in namespace` or `get /path`.
    fn parse_attributes(text: &str) -> Attributes<'_> {
        let (verb, what) = text.split_once(' ').unwrap();
        if what.starts_with('/') {
            return Attributes::Path { verb, path: what };
        }
        let (what, namespace) = what.split_once(" in ").unwrap_or((what, ""));
        let (what, group) = what.split_once(" @ ").unwrap_or((what, ""));
        let (resource, subresource) = what.split_once('/').unwrap_or((what, ""));
        Attributes::Resource { verb, group, resource, subresource, namespace, name: "", fields: None }
    }

    #[track_caller]
    fn check(rules: &[FlowSchemaSpec], user: &User, cases: &[(&str, &str)]) {
        for (text, expected) in cases {
            let found = rules.iter().find(|rules| rules.matches(user, &parse_attributes(text)));
            assert_eq!(found.map_or("", |rules| rules.name.as_str()), *expected, "{} {text}", user.name);
        }
    }

    #[test]
    fn default_schemas_match_expected_requests() {
        let mut rules: Vec<FlowSchemaSpec> =
            super::super::defaults::schemas().iter().map(FlowSchemaSpec::parse).collect();
        rules.sort_by(|a, b| (a.precedence, &a.name).cmp(&(b.precedence, &b.name)));
        let all = ["system:authenticated"];
        check(
            &rules,
            &user("admin", &["system:masters", all[0]]),
            &[("get pods in a", "exempt"), ("get /", "exempt")],
        );
        check(
            &rules,
            &user("alice", &all),
            &[
                ("get /healthz", "probes"),
                ("get /livez/ping", "probes"),
                ("get /healthzz", "global-default"),
                ("post /healthz", "global-default"),
                ("list pods in a", "global-default"),
            ],
        );
        check(&rules, &user("system:anonymous", &["system:unauthenticated"]), &[("get /readyz", "probes")]);
        check(
            &rules,
            &user("system:node:n", &["system:nodes", all[0]]),
            &[
                ("patch nodes/status", "system-node-high"),
                ("get nodes", "system-node-high"),
                ("update leases @ coordination.k8s.io in kube-node-lease", "system-node-high"),
                ("get nodes/proxy", "system-nodes"),
                ("list pods", "system-nodes"),
            ],
        );
        check(
            &rules,
            &user("system:kube-scheduler", &all),
            &[
                ("update leases @ coordination.k8s.io in kube-system", "system-leader-election"),
                ("patch leases @ coordination.k8s.io in kube-system", "kube-scheduler"),
                ("watch pods", "kube-scheduler"),
            ],
        );
        check(
            &rules,
            &user("system:kube-controller-manager", &all),
            &[("list pods", "kube-controller-manager")],
        );
        let account = |namespace: &str| {
            user(&format!("system:serviceaccount:{namespace}:x"), &["system:serviceaccounts"])
        };
        check(&rules, &account("kube-system"), &[("list pods", "kube-system-service-accounts")]);
        check(&rules, &account("kube-systems"), &[("list pods", "service-accounts")]);
        check(&rules, &user("odd", &["system:authenticated"]), &[("get /metrics", "global-default")]);
    }

    #[test]
    fn matches_scopes_and_subresources() {
        let rule = |rule: Value| {
            let subjects = json!([{"kind": "User", "user": {"name": "*"}}]);
            FlowSchemaSpec::parse(
                &json!({"metadata": {"name": "own"}, "spec": {"rules": [{"subjects": subjects, "resourceRules": [rule]}]}}),
            )
        };
        let pods = json!({"verbs": ["get", "list"], "apiGroups": [""], "resources": ["pods", "pods/log"], "namespaces": ["a"]});
        check(
            &[rule(pods)],
            &user("x", &[]),
            &[
                ("get pods in a", "own"),
                ("get pods/log in a", "own"),
                ("get pods/status in a", ""),
                ("get pods in b", ""),
                ("list pods", ""),
                ("create pods in a", ""),
                ("get pods @ apps in a", ""),
                ("get /pods", ""),
            ],
        );
        let cluster_scope =
            json!({"verbs": ["*"], "apiGroups": ["*"], "resources": ["*"], "clusterScope": true});
        check(
            &[rule(cluster_scope)],
            &user("x", &[]),
            &[("list pods/log @ apps", "own"), ("list pods in a", "")],
        );
    }
}
