//! One rule of a role: what it allows, and which other rules it covers.

use api::field::quoted;
use api::json::Json as _;
use serde_json::{Map, Value};

use super::Ask;

#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct Rule {
    pub verbs: Vec<String>,
    pub groups: Vec<String>,
    pub resources: Vec<String>,
    pub names: Vec<String>,
    pub urls: Vec<String>,
}

impl Rule {
    pub fn parse(value: &Value) -> Rule {
        let texts = |name: &str| {
            value.items(name).iter().map(|text| text.as_str().unwrap_or_default().to_owned()).collect()
        };
        Rule {
            verbs: texts("verbs"),
            groups: texts("apiGroups"),
            resources: texts("resources"),
            names: texts("resourceNames"),
            urls: texts("nonResourceURLs"),
        }
    }

    /// The rules of a role.
    pub fn all_of(role: &Value) -> Vec<Rule> {
        role.items("rules").iter().map(Rule::parse).collect()
    }

    pub fn to_value(&self) -> Value {
        let fields = [
            ("apiGroups", &self.groups),
            ("nonResourceURLs", &self.urls),
            ("resourceNames", &self.names),
            ("resources", &self.resources),
            ("verbs", &self.verbs),
        ];
        let present = fields.into_iter().filter(|(name, texts)| *name == "verbs" || !texts.is_empty());
        Value::Object(
            present.map(|(name, texts)| (name.to_owned(), Value::from(texts.clone()))).collect::<Map<_, _>>(),
        )
    }

    pub fn allows(&self, ask: &Ask<'_>) -> bool {
        match ask {
            Ask::Resource { verb, group, resource, subresource, name, .. } => {
                matches(&self.verbs, verb)
                    && matches(&self.groups, group)
                    && self.resources.iter().any(|rule| resource_matches(rule, resource, subresource))
                    && (self.names.is_empty() || has(&self.names, name))
            }
            Ask::Path { verb, path } => {
                matches(&self.verbs, verb) && self.urls.iter().any(|url| url == "*" || url_covers(url, path))
            }
        }
    }

    /// A rule of one group, resource, verb and name (or path) for each that this one allows.
    pub fn atoms(&self) -> Vec<Rule> {
        let one = |text: &String| vec![text.clone()];
        let mut atoms = Vec::new();
        for group in &self.groups {
            for resource in &self.resources {
                for verb in &self.verbs {
                    let whole = Rule {
                        verbs: one(verb),
                        groups: one(group),
                        resources: one(resource),
                        ..Rule::default()
                    };
                    if self.names.is_empty() {
                        atoms.push(whole.clone());
                    }
                    atoms.extend(self.names.iter().map(|name| Rule { names: one(name), ..whole.clone() }));
                }
            }
        }
        for url in &self.urls {
            atoms.extend(self.verbs.iter().map(|verb| Rule {
                verbs: one(verb),
                urls: one(url),
                ..Rule::default()
            }));
        }
        atoms
    }

    /// How many atoms there are.
    fn size(&self) -> usize {
        let names = self.names.len().max(1);
        let resources = [self.resources.len(), self.verbs.len(), names];
        let of_resources = resources.iter().fold(self.groups.len(), |size, n| size.saturating_mul(*n));
        of_resources.saturating_add(self.urls.len().saturating_mul(self.verbs.len()))
    }

    /// Everything `other` allows, this rule allows too. Exact for atoms.
    fn covers(&self, other: &Rule) -> bool {
        let all =
            |owned: &[String], asked: &[String]| has(owned, "*") || asked.iter().all(|one| has(owned, one));
        let resource_covered = |asked: &String| {
            has(&self.resources, asked)
                || asked.split_once('/').is_some_and(|(_, subresource)| {
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
                .all(|asked| self.urls.iter().any(|own| own == asked || url_covers(own, asked)))
    }
}

/// As upstream prints it in refusals: `{APIGroups:["apps"], Resources:["deployments"], Verbs:["get"]}`.
impl std::fmt::Display for Rule {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        let fields = [
            ("APIGroups", &self.groups),
            ("Resources", &self.resources),
            ("NonResourceURLs", &self.urls),
            ("ResourceNames", &self.names),
            ("Verbs", &self.verbs),
        ];
        let shown = fields.into_iter().filter(|(_, texts)| !texts.is_empty());
        let parts: Vec<String> =
            shown.map(|(name, texts)| format!("{name}:{}", quoted_list(texts))).collect();
        write!(f, "{{{}}}", parts.join(", "))
    }
}

/// A list of strings as Go's `%q` prints it.
pub fn quoted_list(texts: &[String]) -> String {
    let quoted: Vec<String> = texts.iter().map(|text| quoted(text)).collect();
    format!("[{}]", quoted.join(" "))
}

/// How many atoms are looked at one by one. A few long lists multiply to more than memory holds.
const ATOMS: usize = 20_000;

/// The atoms of `asked` that no rule of `owned` covers.
///
/// A rule that goes beyond the limit must be covered by a single one, or is missing as a whole.
pub fn missing(owned: &[Rule], asked: &[Rule]) -> Vec<Rule> {
    let mut left = ATOMS;
    let mut missing = Vec::new();
    let uncovered = |rule: &Rule| !owned.iter().any(|own| own.covers(rule));
    for rule in asked {
        let size = rule.size();
        if size > left {
            missing.extend(uncovered(rule).then(|| rule.clone()));
        } else {
            left -= size;
            missing.extend(rule.atoms().into_iter().filter(uncovered));
        }
    }
    missing
}

/// Atoms that differ only in their verb become one rule.
pub fn compact(atoms: Vec<Rule>) -> Vec<Rule> {
    let mut rules: Vec<Rule> = Vec::new();
    for atom in atoms {
        let same = |rule: &&mut Rule| {
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

fn has(texts: &[String], wanted: &str) -> bool {
    texts.iter().any(|text| text == wanted)
}

fn matches(allowed: &[String], asked: &str) -> bool {
    allowed.iter().any(|text| text == "*" || text == asked)
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

/// `/healthz/*` covers everything that begins with `/healthz/`.
fn url_covers(rule: &str, path: &str) -> bool {
    rule == path || rule.ends_with('*') && path.starts_with(rule.trim_end_matches('*'))
}
