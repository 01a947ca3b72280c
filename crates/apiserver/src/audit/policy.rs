//! `audit.k8s.io/v1` Policy: the audit level of each request.

use std::path::{Path, PathBuf};

use api::field::{ErrorList, Path as Field};
use serde::Deserialize;
use serde_json::Value;

use crate::access::User;
use crate::rbac::Attributes;

/// Audit level: how much is recorded.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
pub enum Level {
    None,
    Metadata,
    Request,
    RequestResponse,
}

/// The stages of a request at which events are recorded.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Stage {
    RequestReceived,
    ResponseStarted,
    ResponseComplete,
    Panic,
}

pub const LEVELS: [(&str, Level); 4] = [
    ("None", Level::None),
    ("Metadata", Level::Metadata),
    ("Request", Level::Request),
    ("RequestResponse", Level::RequestResponse),
];
const STAGES: [(&str, Stage); 4] = [
    ("RequestReceived", Stage::RequestReceived),
    ("ResponseStarted", Stage::ResponseStarted),
    ("ResponseComplete", Stage::ResponseComplete),
    ("Panic", Stage::Panic),
];

#[derive(Debug)]
pub struct Policy {
    rules: Vec<Rule>,
}

/// The outcome of the policy for one request.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct RequestAuditConfig {
    pub level: Level,
    /// One bit for each omitted stage.
    omit_stage_bits: u8,
    pub omit_managed_fields: bool,
}

#[derive(Debug)]
struct Rule {
    audit_config: RequestAuditConfig,
    users: Vec<String>,
    groups: Vec<String>,
    verbs: Vec<String>,
    resources: Vec<Resources>,
    namespaces: Vec<String>,
    urls: Vec<String>,
}

#[derive(Debug, thiserror::Error)]
pub enum PolicyError {
    #[error("failed to read file path {path:?}")]
    Read { path: PathBuf, source: std::io::Error },
    #[error("failed decoding: {reason}: from file {path}")]
    Decode { path: PathBuf, reason: String },
    #[error("unknown group version field {found} in policy: from file {path}")]
    Version { path: PathBuf, found: String },
    #[error("{reason}: from file {path}")]
    Invalid { path: PathBuf, reason: String },
}

/// The policy file.
#[derive(Deserialize)]
#[serde(rename_all = "camelCase", default)]
#[derive(Default)]
struct File {
    api_version: String,
    kind: String,
    rules: Vec<FileRule>,
    omit_stages: Vec<String>,
    omit_managed_fields: bool,
}

#[derive(Default, Deserialize)]
#[serde(rename_all = "camelCase", default)]
struct FileRule {
    level: String,
    users: Vec<String>,
    user_groups: Vec<String>,
    verbs: Vec<String>,
    resources: Vec<Resources>,
    namespaces: Vec<String>,
    #[serde(rename = "nonResourceURLs")]
    urls: Vec<String>,
    omit_stages: Vec<String>,
    omit_managed_fields: Option<bool>,
}

#[derive(Debug, Default, Deserialize)]
#[serde(rename_all = "camelCase", default)]
struct Resources {
    group: String,
    resources: Vec<String>,
    resource_names: Vec<String>,
}

impl Stage {
    pub fn name(self) -> &'static str {
        STAGES.iter().find(|(_, stage)| *stage == self).map_or("", |(name, _)| name)
    }

    fn bit(self) -> u8 {
        1 << self as u8
    }
}

impl Level {
    pub fn name(self) -> &'static str {
        LEVELS.iter().find(|(_, level)| *level == self).map_or("", |(name, _)| name)
    }
}

impl RequestAuditConfig {
    pub fn should_omit(&self, stage: Stage) -> bool {
        self.omit_stage_bits & stage.bit() != 0
    }
}

impl Policy {
    pub fn load(path: &Path) -> Result<Policy, PolicyError> {
        let text = std::fs::read_to_string(path)
            .map_err(|source| PolicyError::Read { path: path.to_owned(), source })?;
        Policy::parse(&text, path)
    }

    pub fn parse(text: &str, path: &Path) -> Result<Policy, PolicyError> {
        let decode = |reason: String| PolicyError::Decode { path: path.to_owned(), reason };
        let value: Value = schema::yaml::parse(text).map_err(|error| decode(error.to_string()))?;
        for name in unknown_fields(&value) {
            tracing::warn!(path = %path.display(), "unknown field {name:?} in the audit policy ignored");
        }
        let file: File = serde_json::from_value(value).map_err(|error| decode(error.to_string()))?;
        if file.api_version != "audit.k8s.io/v1" || file.kind != "Policy" {
            let found = format!("{}, Kind={}", file.api_version, file.kind);
            return Err(PolicyError::Version { path: path.to_owned(), found });
        }
        let invalid = |reason: String| PolicyError::Invalid { path: path.to_owned(), reason };
        let errors = file.check();
        if !errors.is_empty() {
            return Err(invalid(errors.to_string()));
        }
        if file.rules.is_empty() {
            return Err(invalid("loaded illegal policy with 0 rules".into()));
        }
        let policy_omit_bits = stage_bits(&file.omit_stages);
        let default = file.omit_managed_fields;
        let rule = |rule: FileRule| Rule {
            audit_config: RequestAuditConfig {
                level: LEVELS.iter().find(|(name, _)| *name == rule.level).map_or(Level::None, |(_, l)| *l),
                omit_stage_bits: policy_omit_bits | stage_bits(&rule.omit_stages),
                omit_managed_fields: rule.omit_managed_fields.unwrap_or(default),
            },
            users: rule.users,
            groups: rule.user_groups,
            verbs: rule.verbs,
            resources: rule.resources,
            namespaces: rule.namespaces,
            urls: rule.urls,
        };
        Ok(Policy { rules: file.rules.into_iter().map(rule).collect() })
    }

    /// Evaluates the first matching rule; `None` for level `None`. `user` is `None` if
    /// authentication failed.
    pub fn evaluate(&self, user: Option<&User>, attributes: &Attributes<'_>) -> Option<RequestAuditConfig> {
        let rule = self.rules.iter().find(|rule| rule.matches(user, attributes))?;
        (rule.audit_config.level > Level::None).then_some(rule.audit_config)
    }
}

fn stage_bits(names: &[String]) -> u8 {
    let known = STAGES.iter().filter(|(name, _)| names.iter().any(|other| other == name));
    known.fold(0, |bits, (_, stage)| bits | stage.bit())
}

/// Fields that do not exist in the Policy schema.
fn unknown_fields(policy: &Value) -> Vec<&str> {
    const FIELDS: &[&str] = &["apiVersion", "kind", "metadata", "rules", "omitStages", "omitManagedFields"];
    const RULE: &[&str] = &[
        "level",
        "users",
        "userGroups",
        "verbs",
        "resources",
        "namespaces",
        "nonResourceURLs",
        "omitStages",
        "omitManagedFields",
    ];
    const RESOURCES: &[&str] = &["group", "resources", "resourceNames"];
    fn others<'a>(value: &'a Value, known: &'static [&str]) -> impl Iterator<Item = &'a str> {
        let names = value.as_object().into_iter().flat_map(|fields| fields.keys());
        names.map(String::as_str).filter(|name| !known.contains(name))
    }
    fn items<'a>(value: &'a Value, name: &str) -> impl Iterator<Item = &'a Value> {
        value.get(name).and_then(Value::as_array).into_iter().flatten()
    }
    let mut found: Vec<&str> = others(policy, FIELDS).collect();
    for rule in items(policy, "rules") {
        found.extend(others(rule, RULE));
        items(rule, "resources").for_each(|resources| found.extend(others(resources, RESOURCES)));
    }
    found
}

impl File {
    fn check(&self) -> ErrorList {
        let mut errors = ErrorList::default();
        check_stages(&self.omit_stages, &Field::new("omitStages"), &mut errors);
        for (i, rule) in self.rules.iter().enumerate() {
            rule.check(&Field::new("rules").index(i), &mut errors);
        }
        errors
    }
}

fn check_stages(stages: &[String], path: &Field, errors: &mut ErrorList) {
    let names = STAGES.map(|(name, _)| name);
    for (i, stage) in stages.iter().enumerate() {
        if !names.contains(&stage.as_str()) {
            let message = format!("allowed stages are {}", names.join(","));
            errors.invalid(&path.index(i), stage.as_str(), &message);
        }
    }
}

impl FileRule {
    fn check(&self, path: &Field, errors: &mut ErrorList) {
        let names = LEVELS.map(|(name, _)| name);
        match self.level.as_str() {
            "" => errors.required(&path.child("level"), ""),
            level if !names.contains(&level) => errors.not_supported(&path.child("level"), level, &names),
            _ => {}
        }
        for (i, url) in self.urls.iter().enumerate().filter(|(_, url)| *url != "*") {
            let at = path.child("nonResourceURLs").index(i);
            if !url.starts_with('/') {
                errors.invalid(&at, url.as_str(), "non-resource URL rules must begin with a '/' character");
            }
            if url.find('*').is_some_and(|star| star + 1 < url.len()) {
                let message = "non-resource URL wildcards '*' must be the final character of the rule";
                errors.invalid(&at, url.as_str(), message);
            }
        }
        for resources in &self.resources {
            let at = path.child("resources");
            let group = resources.group.as_str();
            if !matches!(group, "" | "*") {
                let reason = api::names::dns1123_subdomain(group);
                if !reason.is_empty() {
                    errors.invalid(&at.child("group"), group, &reason.join(","));
                }
            }
            if !resources.resource_names.is_empty() && resources.resources.is_empty() {
                let message = "using resourceNames requires at least one resource";
                errors.invalid(&at.child("resourceNames"), resources.resource_names.clone(), message);
            }
        }
        check_stages(&self.omit_stages, &path.child("omitStages"), errors);
        if !self.urls.is_empty() && (!self.resources.is_empty() || !self.namespaces.is_empty()) {
            let message = "rules cannot apply to both regular resources and non-resource URLs";
            errors.invalid(&path.child("nonResourceURLs"), self.urls.clone(), message);
        }
    }
}

impl Rule {
    fn matches(&self, user: Option<&User>, attributes: &Attributes<'_>) -> bool {
        let has = |words: &[String], word: &str| words.iter().any(|other| other == word);
        if !self.users.is_empty() && !user.is_some_and(|user| has(&self.users, &user.name)) {
            return false;
        }
        let in_group = || user.is_some_and(|user| user.groups.iter().any(|group| has(&self.groups, group)));
        if !self.groups.is_empty() && !in_group() {
            return false;
        }
        let verb = match attributes {
            Attributes::Resource { verb, .. } | Attributes::Path { verb, .. } => verb,
        };
        if !self.verbs.is_empty() && !has(&self.verbs, verb) {
            return false;
        }
        match *attributes {
            Attributes::Resource { group, resource, subresource, namespace, name, .. } => {
                if self.namespaces.is_empty() && self.resources.is_empty() {
                    return self.urls.is_empty();
                }
                (self.namespaces.is_empty() || has(&self.namespaces, namespace))
                    && (self.resources.is_empty()
                        || self.resources.iter().any(|one| one.has(group, resource, subresource, name)))
            }
            Attributes::Path { path, .. } => {
                let about_paths = self.namespaces.is_empty() && self.resources.is_empty();
                about_paths && (self.urls.is_empty() || self.urls.iter().any(|url| covers(url, path)))
            }
        }
    }
}

impl Resources {
    fn has(&self, group: &str, resource: &str, subresource: &str, name: &str) -> bool {
        if self.group != group && self.group != "*" {
            return false;
        }
        if self.resources.is_empty() {
            return true;
        }
        let named = self.resource_names.is_empty() || self.resource_names.iter().any(|other| other == name);
        let is = |pattern: &String| match pattern.split_once('/') {
            None => pattern == "*" || pattern == resource && subresource.is_empty(),
            Some(("*", sub)) if !subresource.is_empty() && sub == subresource => true,
            Some((whole, "*")) if whole == resource => true,
            Some(parts) => parts == (resource, subresource),
        };
        named && self.resources.iter().any(is)
    }
}

fn covers(pattern: &str, path: &str) -> bool {
    pattern == path || pattern.strip_suffix('*').is_some_and(|prefix| path.starts_with(prefix))
}

#[cfg(test)]
mod tests {
    use super::*;

    fn policy(rules: &str) -> Result<Policy, String> {
        let text = format!("apiVersion: audit.k8s.io/v1\nkind: Policy\n{rules}");
        Policy::parse(&text, Path::new("p")).map_err(|error| error.to_string())
    }

    fn user(name: &str, groups: &[&str]) -> User {
        let groups = groups.iter().map(|group| (*group).to_owned()).collect();
        User { name: name.into(), groups, ..User::default() }
    }

    /// `verb resource[/sub][.group] [namespace/]name` or `verb /path`.
    #[track_caller]
    fn check(policy: &Policy, user: &User, request_line: &str, expected: &str) {
        let words: Vec<&str> = request_line.split(' ').collect();
        let attributes = match words[1].starts_with('/') {
            true => Attributes::Path { verb: words[0], path: words[1] },
            false => {
                let (what, group) = words[1].split_once('.').unwrap_or((words[1], ""));
                let (resource, subresource) = what.split_once('/').unwrap_or((what, ""));
                let namespaced_name = words.get(2).copied().unwrap_or("");
                let (namespace, name) = namespaced_name.split_once('/').unwrap_or(("", namespaced_name));
                Attributes::Resource {
                    verb: words[0],
                    group,
                    resource,
                    subresource,
                    namespace,
                    name,
                    fields: None,
                }
            }
        };
        let found =
            policy.evaluate(Some(user), &attributes).map_or("None", |audit_config| audit_config.level.name());
        assert_eq!(found, expected, "{} {request_line}", user.name);
    }

    #[test]
    fn first_matching_rule_applies() {
        let policy = policy(
            r#"
omitStages: [RequestReceived]
rules:
- {level: None, users: ["system:kube-proxy"], verbs: [watch], resources: [{resources: [endpoints, services/status]}]}
- {level: None, userGroups: ["system:nodes"], nonResourceURLs: ["/healthz*", /version]}
- {level: Metadata, resources: [{resources: [secrets, configmaps]}, {group: authentication.k8s.io, resources: [tokenreviews]}]}
- {level: Request, namespaces: [kube-system], verbs: [get], omitStages: [Panic], omitManagedFields: true}
- {level: RequestResponse, resources: [{group: apps}, {resources: ["pods/*", "*/scale"]}, {resources: [nodes], resourceNames: [node-1]}]}
- {level: Metadata, nonResourceURLs: ["*"]}
"#,
        )
        .unwrap();
        let (proxy, node, anna) =
            (user("system:kube-proxy", &[]), user("n", &["system:nodes"]), user("anna", &[]));
        for (user, request_line, expected) in [
            (&proxy, "watch endpoints a/", "None"),
            (&proxy, "get endpoints kube-system/x", "Request"),
            (&proxy, "watch services/status a/x", "None"),
            (&node, "get /healthz/ping", "None"),
            (&node, "get /version", "None"),
            (&node, "get /versions", "Metadata"),
            (&anna, "get /healthz", "Metadata"),
            (&anna, "get secrets kube-system/x", "Metadata"),
            (&anna, "get secrets/status kube-system/x", "Request"),
            (&anna, "create tokenreviews.authentication.k8s.io", "Metadata"),
            (&anna, "get deployments.apps a/x", "RequestResponse"),
            (&anna, "get pods a/x", "RequestResponse"),
            (&anna, "get pods/log a/x", "RequestResponse"),
            (&anna, "get x/scale a/x", "RequestResponse"),
            (&anna, "get nodes node-1", "RequestResponse"),
            (&anna, "get nodes node-2", "None"),
            (&anna, "list services a/", "None"),
        ] {
            check(&policy, user, request_line, expected);
        }
        let attributes = Attributes::Resource {
            verb: "get",
            group: "",
            resource: "pods",
            subresource: "",
            namespace: "kube-system",
            name: "",
            fields: None,
        };
        let audit_config = policy.evaluate(None, &attributes).unwrap();
        assert!(audit_config.should_omit(Stage::RequestReceived) && audit_config.should_omit(Stage::Panic));
        assert!(!audit_config.should_omit(Stage::ResponseComplete) && audit_config.omit_managed_fields);
    }

    #[test]
    fn rejects_invalid_policies_with_upstream_errors() {
        #[track_caller]
        fn check(rules: &str, expected: &str) {
            assert_eq!(policy(rules).unwrap_err(), format!("{expected}: from file p"));
        }
        check("rules: []", "loaded illegal policy with 0 rules");
        check("rules: [{}]", "rules[0].level: Required value");
        check(
            "rules: [{level: All}]",
            r#"rules[0].level: Unsupported value: "All": supported values: "None", "Metadata", "Request", "RequestResponse""#,
        );
        check(
            "rules: [{level: None, nonResourceURLs: [x]}]",
            r#"rules[0].nonResourceURLs[0]: Invalid value: "x": non-resource URL rules must begin with a '/' character"#,
        );
        check(
            "rules: [{level: None, omitStages: [Never]}]",
            r#"rules[0].omitStages[0]: Invalid value: "Never": allowed stages are RequestReceived,ResponseStarted,ResponseComplete,Panic"#,
        );
        let other = Policy::parse("apiVersion: audit.k8s.io/v1beta1\nkind: Policy", Path::new("p"));
        let expected = "unknown group version field audit.k8s.io/v1beta1, Kind=Policy in policy: from file p";
        assert_eq!(other.unwrap_err().to_string(), expected);
        assert!(Policy::load(Path::new("/nowhere")).is_err());
        assert_eq!(unknown_fields(&serde_json::json!({"rules": [{"verb": []}], "x": 1})), ["x", "verb"]);
    }
}
