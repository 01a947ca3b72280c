//! FlowSchemas as requests meet them: parsed, in order, each pointing at its level.
//!
//! Made anew whenever one of the objects changes; a request only compares strings.

use std::sync::Arc;

use api::json::Json as _;
use http::HeaderValue;
use serde_json::Value;

use super::level::Level;
use super::queues::Shape;
use super::share::Share;
use crate::access::User;
use crate::rbac::Ask;

pub struct Table {
    /// By precedence, then by name; the last one takes everything.
    pub schemas: Vec<Arc<Schema>>,
}

/// A FlowSchema, and where the requests it matches go.
pub struct Schema {
    pub rules: Rules,
    pub uid: HeaderValue,
    pub level: Arc<Level>,
    pub level_uid: HeaderValue,
    /// Where the level counts what this schema sends it.
    pub tally: usize,
    /// The most seats one request may take.
    pub max_seats: u64,
}

/// What a FlowSchema says.
#[derive(Debug, PartialEq)]
pub struct Rules {
    pub name: String,
    pub level: String,
    pub precedence: i64,
    pub distinguisher: Distinguisher,
    groups: Vec<Rule>,
}

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Distinguisher {
    None,
    User,
    Namespace,
}

#[derive(Debug, PartialEq)]
struct Rule {
    subjects: Vec<Subject>,
    resources: Vec<ResourceRule>,
    paths: Vec<PathRule>,
}

#[derive(Debug, PartialEq)]
enum Subject {
    Anybody,
    User(String),
    Group(String),
    /// What the names of all accounts of a namespace begin with.
    Accounts(String),
}

#[derive(Debug, PartialEq)]
struct ResourceRule {
    verbs: Words,
    groups: Words,
    resources: Words,
    namespaces: Words,
    cluster: bool,
}

#[derive(Debug, PartialEq)]
struct PathRule {
    verbs: Words,
    paths: Vec<String>,
}

/// Some words, or all.
#[derive(Debug, PartialEq)]
enum Words {
    All,
    Some(Vec<String>),
}

impl Table {
    /// Where a request belongs.
    pub fn classify(&self, user: &User, ask: &Ask<'_>) -> Option<&Arc<Schema>> {
        self.schemas.iter().find(|schema| schema.rules.matches(user, ask)).or(self.schemas.last())
    }
}

impl Rules {
    pub fn parse(object: &Value) -> Rules {
        let spec = object.at("spec");
        Rules {
            name: object.at("metadata").text("name").to_owned(),
            level: spec.at("priorityLevelConfiguration").text("name").to_owned(),
            precedence: spec.int("matchingPrecedence").unwrap_or(1000),
            distinguisher: match spec.at("distinguisherMethod").text("type") {
                "ByUser" => Distinguisher::User,
                "ByNamespace" => Distinguisher::Namespace,
                _ => Distinguisher::None,
            },
            groups: spec.items("rules").iter().map(Rule::parse).collect(),
        }
    }

    pub fn matches(&self, user: &User, ask: &Ask<'_>) -> bool {
        self.groups.iter().any(|rule| rule.matches(user, ask))
    }
}

impl Rule {
    fn parse(rule: &Value) -> Rule {
        let resource = |rule: &Value| ResourceRule {
            verbs: Words::parse(rule.items("verbs")),
            groups: Words::parse(rule.items("apiGroups")),
            resources: Words::parse(rule.items("resources")),
            namespaces: Words::parse(rule.items("namespaces")),
            cluster: rule.flag("clusterScope"),
        };
        let path = |rule: &Value| PathRule {
            verbs: Words::parse(rule.items("verbs")),
            paths: texts(rule.items("nonResourceURLs")),
        };
        Rule {
            subjects: rule.items("subjects").iter().filter_map(Subject::parse).collect(),
            resources: rule.items("resourceRules").iter().map(resource).collect(),
            paths: rule.items("nonResourceRules").iter().map(path).collect(),
        }
    }

    fn matches(&self, user: &User, ask: &Ask<'_>) -> bool {
        if !self.subjects.iter().any(|subject| subject.is(user)) {
            return false;
        }
        match *ask {
            Ask::Resource { verb, group, resource, subresource, namespace, .. } => {
                self.resources.iter().any(|rule| {
                    rule.verbs.has(verb)
                        && rule.resources.has_resource(resource, subresource)
                        && rule.groups.has(group)
                        && if namespace.is_empty() { rule.cluster } else { rule.namespaces.has(namespace) }
                })
            }
            Ask::Path { verb, path } => self
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
                "*" => Some(Subject::Anybody),
                name => Some(Subject::User(name.to_owned())),
            },
            "Group" => match subject.at("group").text("name") {
                "*" => Some(Subject::Anybody),
                name => Some(Subject::Group(name.to_owned())),
            },
            "ServiceAccount" => {
                let account = subject.at("serviceAccount");
                let namespace = format!("system:serviceaccount:{}:", account.text("namespace"));
                match account.text("name") {
                    "*" => Some(Subject::Accounts(namespace)),
                    name => Some(Subject::User(namespace + name)),
                }
            }
            _ => None,
        }
    }

    fn is(&self, user: &User) -> bool {
        match self {
            Subject::Anybody => true,
            Subject::User(name) => user.name == *name,
            Subject::Group(name) => user.is_in(name),
            Subject::Accounts(prefix) => user.name.starts_with(prefix.as_str()),
        }
    }
}

impl Words {
    fn parse(items: &[Value]) -> Words {
        match texts(items) {
            words if words == ["*"] => Words::All,
            words => Words::Some(words),
        }
    }

    fn has(&self, word: &str) -> bool {
        match self {
            Words::All => true,
            Words::Some(words) => words.iter().any(|other| other == word),
        }
    }

    /// As `has`, for `resource/subresource`.
    fn has_resource(&self, resource: &str, subresource: &str) -> bool {
        let is = |word: &String| match word.split_once('/') {
            Some(parts) => parts == (resource, subresource),
            None => subresource.is_empty() && word == resource,
        };
        match self {
            Words::All => true,
            Words::Some(words) => words.iter().any(is),
        }
    }
}

/// A rule's path covers itself and everything below it.
fn covers(rule: &str, path: &str) -> bool {
    if rule == "*" || rule == path {
        return true;
    }
    let stem = rule.strip_suffix('*').unwrap_or(rule);
    let stem = stem.strip_suffix('/').unwrap_or(stem);
    path.strip_prefix(stem).is_some_and(|rest| rest.starts_with('/'))
}

fn texts(items: &[Value]) -> Vec<String> {
    items.iter().filter_map(Value::as_str).map(str::to_owned).collect()
}

/// What a PriorityLevelConfiguration says: its share, and how its requests wait. `None` where it makes no
/// sense, which the kind's rules do not let through.
pub fn level_of(object: &Value) -> Option<(Share, Shape)> {
    let spec = object.at("spec");
    let count = |value: &Value, name: &str| u64::try_from(value.int(name).unwrap_or(0)).unwrap_or(0);
    let exempt = object.at("metadata").text("name") == "exempt";
    match spec.text("type") {
        "Exempt" if exempt => {
            let own = spec.at("exempt");
            let share = Share {
                exempt: true,
                shares: count(own, "nominalConcurrencyShares"),
                lendable_percent: count(own, "lendablePercent"),
                borrowing_percent: None,
            };
            Some((share, Shape::Exempt))
        }
        "Limited" if !exempt => {
            let own = spec.at("limited");
            let share = Share {
                exempt: false,
                shares: own.int("nominalConcurrencyShares").map_or(30, |n| u64::try_from(n).unwrap_or(0)),
                lendable_percent: count(own, "lendablePercent"),
                borrowing_percent: own
                    .int("borrowingLimitPercent")
                    .and_then(|percent| u64::try_from(percent).ok()),
            };
            let response = own.at("limitResponse");
            let queuing = response.at("queuing");
            let shape = match response.text("type") {
                "Queue" => Shape::Queue {
                    queues: count(queuing, "queues").max(1),
                    hand: count(queuing, "handSize").max(1) as usize,
                    length: count(queuing, "queueLengthLimit").max(1) as usize,
                },
                _ => Shape::Reject,
            };
            Some((share, shape))
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

    /// Asks as `get pods/log @ group in namespace` or `get /path`.
    fn ask(text: &str) -> Ask<'_> {
        let (verb, what) = text.split_once(' ').unwrap();
        if what.starts_with('/') {
            return Ask::Path { verb, path: what };
        }
        let (what, namespace) = what.split_once(" in ").unwrap_or((what, ""));
        let (what, group) = what.split_once(" @ ").unwrap_or((what, ""));
        let (resource, subresource) = what.split_once('/').unwrap_or((what, ""));
        Ask::Resource { verb, group, resource, subresource, namespace, name: "", fields: None }
    }

    #[track_caller]
    fn check(rules: &[Rules], user: &User, asks: &[(&str, &str)]) {
        for (text, expected) in asks {
            let found = rules.iter().find(|rules| rules.matches(user, &ask(text)));
            assert_eq!(found.map_or("", |rules| rules.name.as_str()), *expected, "{} {text}", user.name);
        }
    }

    #[test]
    fn the_defaults_tell_requests_apart() {
        let mut rules: Vec<Rules> = super::super::defaults::schemas().iter().map(Rules::parse).collect();
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
    fn scopes_and_subresources() {
        let rule = |rule: Value| {
            let subjects = json!([{"kind": "User", "user": {"name": "*"}}]);
            Rules::parse(
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
        let everywhere =
            json!({"verbs": ["*"], "apiGroups": ["*"], "resources": ["*"], "clusterScope": true});
        check(
            &[rule(everywhere)],
            &user("x", &[]),
            &[("list pods/log @ apps", "own"), ("list pods in a", "")],
        );
    }
}
