//! PolicyRules: what they allow, and which other rules they cover.

use api::field::quote;
use api::json::JsonExt as _;
use serde_json::{Map, Value};

use super::Attributes;

#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct PolicyRule {
    pub verbs: Vec<String>,
    pub groups: Vec<String>,
    pub resources: Vec<String>,
    pub names: Vec<String>,
    pub urls: Vec<String>,
}

impl PolicyRule {
    pub fn parse(value: &Value) -> PolicyRule {
        let string_list = |name: &str| {
            value.items(name).iter().map(|text| text.as_str().unwrap_or_default().to_owned()).collect()
        };
        PolicyRule {
            verbs: string_list("verbs"),
            groups: string_list("apiGroups"),
            resources: string_list("resources"),
            names: string_list("resourceNames"),
            urls: string_list("nonResourceURLs"),
        }
    }

    /// The rules of a role.
    pub fn all_of(role: &Value) -> Vec<PolicyRule> {
        role.items("rules").iter().map(PolicyRule::parse).collect()
    }

    pub fn to_value(&self) -> Value {
        let fields = [
            ("apiGroups", &self.groups),
            ("nonResourceURLs", &self.urls),
            ("resourceNames", &self.names),
            ("resources", &self.resources),
            ("verbs", &self.verbs),
        ];
        let present =
            fields.into_iter().filter(|(name, string_list)| *name == "verbs" || !string_list.is_empty());
        Value::Object(
            present
                .map(|(name, string_list)| (name.to_owned(), Value::from(string_list.clone())))
                .collect::<Map<_, _>>(),
        )
    }

    pub fn allows(&self, attributes: &Attributes<'_>) -> bool {
        match attributes {
            Attributes::Resource { verb, group, resource, subresource, name, .. } => {
                matches(&self.verbs, verb)
                    && matches(&self.groups, group)
                    && self.resources.iter().any(|rule| resource_matches(rule, resource, subresource))
                    && (self.names.is_empty() || has(&self.names, name))
            }
            Attributes::Path { verb, path } => {
                matches(&self.verbs, verb) && self.urls.iter().any(|url| url == "*" || url_covers(url, path))
            }
        }
    }

    /// Expands the rule to rules of one group, resource, verb and name (or path) each. Upstream:
    /// `BreakdownRule`.
    pub fn expand(&self) -> Vec<PolicyRule> {
        let one = |text: &String| vec![text.clone()];
        let mut expanded = Vec::new();
        for group in &self.groups {
            for resource in &self.resources {
                for verb in &self.verbs {
                    let whole = PolicyRule {
                        verbs: one(verb),
                        groups: one(group),
                        resources: one(resource),
                        ..PolicyRule::default()
                    };
                    if self.names.is_empty() {
                        expanded.push(whole.clone());
                    }
                    expanded.extend(
                        self.names.iter().map(|name| PolicyRule { names: one(name), ..whole.clone() }),
                    );
                }
            }
        }
        for url in &self.urls {
            expanded.extend(self.verbs.iter().map(|verb| PolicyRule {
                verbs: one(verb),
                urls: one(url),
                ..PolicyRule::default()
            }));
        }
        expanded
    }

    /// The number of expanded rules.
    fn expanded_count(&self) -> usize {
        let names = self.names.len().max(1);
        let resources = [self.resources.len(), self.verbs.len(), names];
        let of_resources = resources.iter().fold(self.groups.len(), |size, n| size.saturating_mul(*n));
        of_resources.saturating_add(self.urls.len().saturating_mul(self.verbs.len()))
    }

    /// Whether this rule allows everything that `other` allows. Exact for expanded rules.
    fn covers(&self, other: &PolicyRule) -> bool {
        let all = |owned: &[String], requested: &[String]| {
            has(owned, "*") || requested.iter().all(|one| has(owned, one))
        };
        let resource_covered = |requested: &String| {
            has(&self.resources, requested)
                || requested.split_once('/').is_some_and(|(_, subresource)| {
                    self.resources.iter().any(|own| own.strip_prefix("*/") == Some(subresource))
                })
        };
        all(&self.verbs, &other.verbs)
            && all(&self.groups, &other.groups)
            && (has(&self.resources, "*") || other.resources.iter().all(resource_covered))
            && (self.names.is_empty()
                || !other.names.is_empty() && other.names.iter().all(|name| has(&self.names, name)))
            && other
                .urls
                .iter()
                .all(|requested| self.urls.iter().any(|own| own == requested || url_covers(own, requested)))
    }
}

/// Upstream's format in error messages: `{APIGroups:["apps"], Resources:["deployments"],
/// Verbs:["get"]}`.
impl std::fmt::Display for PolicyRule {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        let fields = [
            ("APIGroups", &self.groups),
            ("Resources", &self.resources),
            ("NonResourceURLs", &self.urls),
            ("ResourceNames", &self.names),
            ("Verbs", &self.verbs),
        ];
        let present = fields.into_iter().filter(|(_, string_list)| !string_list.is_empty());
        let parts: Vec<String> =
            present.map(|(name, string_list)| format!("{name}:{}", quoted_list(string_list))).collect();
        write!(f, "{{{}}}", parts.join(", "))
    }
}

/// Formats a list of strings like Go's `%q`.
pub fn quoted_list(string_list: &[String]) -> String {
    let quoted: Vec<String> = string_list.iter().map(|text| quote(text)).collect();
    format!("[{}]", quoted.join(" "))
}

/// The limit of expansion. A few long lists can multiply to more rules than fit in memory.
const MAX_EXPANDED_RULES: usize = 20_000;

/// The expanded rules of `requested` that no rule of `owned` covers.
///
/// A rule that exceeds the limit must be covered by a single owned rule; otherwise it is missing as
/// a whole.
pub fn missing(owned: &[PolicyRule], requested: &[PolicyRule]) -> Vec<PolicyRule> {
    let mut left = MAX_EXPANDED_RULES;
    let mut missing = Vec::new();
    let is_missing = |rule: &PolicyRule| !owned.iter().any(|own| own.covers(rule));
    for rule in requested {
        let size = rule.expanded_count();
        if size > left {
            missing.extend(is_missing(rule).then(|| rule.clone()));
        } else {
            left -= size;
            missing.extend(rule.expand().into_iter().filter(is_missing));
        }
    }
    missing
}

/// Merges expanded rules that differ only in the verb.
pub fn compact(expanded: Vec<PolicyRule>) -> Vec<PolicyRule> {
    let mut rules: Vec<PolicyRule> = Vec::new();
    for atom in expanded {
        let same = |rule: &&mut PolicyRule| {
            atom.urls.is_empty()
                && rule.urls.is_empty()
                && (&rule.groups, &rule.resources, &rule.names)
                    == (&atom.groups, &atom.resources, &atom.names)
        };
        match rules.iter_mut().find(same) {
            Some(rule) => rule.verbs.extend(atom.verbs),
            None => rules.push(atom),
        }
    }
    rules
}

fn has(string_list: &[String], expected: &str) -> bool {
    string_list.iter().any(|text| text == expected)
}

fn matches(allowed: &[String], requested: &str) -> bool {
    allowed.iter().any(|text| text == "*" || text == requested)
}

fn resource_matches(rule: &str, resource: &str, subresource: &str) -> bool {
    if rule == "*" {
        return true;
    }
    match rule.split_once('/') {
        None => subresource.is_empty() && rule == resource,
        Some((_, "")) => false,
        Some((left, right)) => right == subresource && (left == "*" || left == resource),
    }
}

/// Whether a rule's path matches: `/healthz/*` covers every path that starts with `/healthz/`.
fn url_covers(rule: &str, path: &str) -> bool {
    rule == path || rule.ends_with('*') && path.starts_with(rule.trim_end_matches('*'))
}
