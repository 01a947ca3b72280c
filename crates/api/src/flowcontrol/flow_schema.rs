//! FlowSchema: assigns requests to priority levels.

use serde_json::{Value, json};

use crate::field::{ErrorList, Path};
use crate::json::JsonExt;
use crate::strategy::RestStrategy;
use crate::{meta, names};

const MAX_PRECEDENCE: i64 = 10000;
const VERBS: [&str; 9] =
    ["create", "delete", "deletecollection", "get", "list", "patch", "proxy", "update", "watch"];
/// The kinds of subjects with their fields.
const SUBJECTS: [(&str, &str); 3] =
    [("ServiceAccount", "serviceAccount"), ("User", "user"), ("Group", "group")];

pub struct FlowSchema;

impl RestStrategy for FlowSchema {
    fn validate(&self, obj: &Value, errors: &mut ErrorList) {
        let (spec, path) = (obj.at("spec"), Path::new("spec"));
        let name = obj.at("metadata").text("name");
        validate_spec(spec, name, &path, errors);
        if let Some(wanted) = mandatory_spec(name)
            && !meta::semantic_equal(spec, &wanted)
        {
            errors.invalid(&path, spec.clone(), &format!("spec of '{name}' must equal the fixed value"));
        }
        super::validate_conditions(obj, errors);
    }

    fn validate_status_update(&self, new: &Value, _old: &Value, errors: &mut ErrorList) {
        super::validate_conditions(new, errors);
    }
}

/// The specs of the mandatory FlowSchemas.
fn mandatory_spec(name: &str) -> Option<Value> {
    let group = |name: &str| json!({"kind": "Group", "group": {"name": name}});
    let rules = |subjects: Value| {
        json!([{
            "subjects": subjects,
            "resourceRules": [{
                "verbs": ["*"],
                "apiGroups": ["*"],
                "resources": ["*"],
                "namespaces": ["*"],
                "clusterScope": true,
            }],
            "nonResourceRules": [{"verbs": ["*"], "nonResourceURLs": ["*"]}],
        }])
    };
    match name {
        "exempt" => Some(json!({
            "priorityLevelConfiguration": {"name": "exempt"},
            "matchingPrecedence": 1,
            "rules": rules(json!([group("system:masters")])),
        })),
        "catch-all" => Some(json!({
            "priorityLevelConfiguration": {"name": "catch-all"},
            "matchingPrecedence": 10000,
            "distinguisherMethod": {"type": "ByUser"},
            "rules": rules(json!([group("system:unauthenticated"), group("system:authenticated")])),
        })),
        _ => None,
    }
}

fn validate_spec(spec: &Value, name: &str, path: &Path, errors: &mut ErrorList) {
    let precedence = spec.int("matchingPrecedence").unwrap_or(0);
    let at = path.child("matchingPrecedence");
    if precedence <= 0 {
        errors.invalid(&at, precedence, "must be a positive value");
    }
    if precedence > MAX_PRECEDENCE {
        errors.invalid(&at, precedence, &format!("must not be greater than {MAX_PRECEDENCE}"));
    }
    if precedence == 1 && name != "exempt" {
        let message = "only the schema named 'exempt' may have matchingPrecedence 1";
        errors.invalid(&at, precedence, message);
    }
    let method = spec.at("distinguisherMethod");
    let known = ["ByNamespace", "ByUser"];
    if !method.is_null() && !known.contains(&method.text("type")) {
        let rendered = json!({"Type": method.text("type")});
        errors.not_supported(&path.child("distinguisherMethod.type"), rendered, &known);
    }
    let level = spec.at("priorityLevelConfiguration").text("name");
    let at = path.child("priorityLevelConfiguration.name");
    if level.is_empty() {
        errors.required(&at, "must reference a priority level");
    } else {
        errors.invalid_each(&at, level, names::dns1123_subdomain(level));
    }
    for (i, item) in spec.items("rules").iter().enumerate() {
        validate_rule(item, &path.child("rules").index(i), errors);
    }
}

fn validate_rule(rule: &Value, path: &Path, errors: &mut ErrorList) {
    let subjects = rule.items("subjects");
    if subjects.is_empty() {
        errors.required(&path.child("subjects"), "subjects must contain at least one value");
    }
    for (i, item) in subjects.iter().enumerate() {
        validate_subject(item, &path.child("subjects").index(i), errors);
    }
    let (resources, urls) = (rule.items("resourceRules"), rule.items("nonResourceRules"));
    if resources.is_empty() && urls.is_empty() {
        errors.required(path, "at least one of resourceRules and nonResourceRules has to be non-empty");
    }
    for (i, item) in resources.iter().enumerate() {
        resource_rule(item, &path.child("resourceRules").index(i), errors);
    }
    for (i, item) in urls.iter().enumerate() {
        url_rule(item, &path.child("nonResourceRules").index(i), errors);
    }
}

fn validate_subject(subject: &Value, path: &Path, errors: &mut ErrorList) {
    let kind = subject.text("kind");
    let Some((_, own)) = SUBJECTS.iter().find(|(name, _)| *name == kind) else {
        errors.not_supported(&path.child("kind"), kind, &["Group", "ServiceAccount", "User"]);
        return;
    };
    let (value, at) = (subject.at(own), path.child(own));
    let name = value.text("name");
    if value.is_null() {
        errors.required(&at, &format!("{own} is required when subject kind is '{kind}'"));
    } else {
        if name.is_empty() {
            errors.required(&at.child("name"), "");
        }
        if kind == "ServiceAccount" {
            if !name.is_empty() && name != "*" {
                errors.invalid_each(&at.child("name"), name, names::dns1123_subdomain(name));
            }
            let namespace = value.text("namespace");
            if namespace.is_empty() {
                errors.required(&at.child("namespace"), "must specify namespace for service account");
            } else {
                errors.invalid_each(&at.child("namespace"), namespace, names::dns1123_label(namespace));
            }
        }
    }
    for (other, field) in SUBJECTS.iter().filter(|(name, field)| *name != kind && subject.has(field)) {
        let message = format!("{field} is forbidden when subject kind is not '{other}'");
        errors.forbidden(&path.child(field), &message);
    }
}

fn has_wildcard(list: &[Value]) -> bool {
    list.iter().any(|item| item == "*")
}

fn validate_verbs(rule: &Value, path: &Path, errors: &mut ErrorList) {
    let (list, at) = (rule.items("verbs"), path.child("verbs"));
    if list.is_empty() {
        errors.required(&at, "verbs must contain at least one value");
    } else if has_wildcard(list) {
        if list.len() > 1 {
            let message = "if '*' is present, must not specify other verbs";
            errors.invalid(&at, rule.at("verbs").clone(), message);
        }
    } else if !list.iter().all(|verb| VERBS.iter().any(|known| verb == known)) {
        errors.not_supported(&at, rule.at("verbs").clone(), &VERBS);
    }
}

fn resource_rule(rule: &Value, path: &Path, errors: &mut ErrorList) {
    validate_verbs(rule, path, errors);
    for (field, singular, plural) in
        [("apiGroups", "api group", "api groups"), ("resources", "resource", "resources")]
    {
        let list = rule.items(field);
        if list.is_empty() {
            errors
                .required(&path.child(field), &format!("resource rules must supply at least one {singular}"));
        } else if list.len() > 1 && has_wildcard(list) {
            let message = format!("if '*' is present, must not specify other {plural}");
            errors.invalid(&path.child(field), rule.at(field).clone(), &message);
        }
    }
    let (namespaces, at) = (rule.items("namespaces"), path.child("namespaces"));
    if namespaces.is_empty() && !rule.flag("clusterScope") {
        let detail = "resource rules that are not cluster scoped must supply at least one namespace";
        errors.required(&at, detail);
    } else if has_wildcard(namespaces) {
        if namespaces.len() > 1 {
            let message = "if '*' is present, must not specify other namespaces";
            errors.invalid(&at, rule.at("namespaces").clone(), message);
        }
    } else {
        for (i, item) in namespaces.iter().enumerate() {
            let name = item.as_str().unwrap_or("");
            for word in names::dns1123_label(name) {
                let message = format!("each member of this list must be '*' or a DNS-1123 label; {word}");
                errors.invalid(&at.index(i), name, &message);
            }
        }
    }
}

fn url_rule(rule: &Value, path: &Path, errors: &mut ErrorList) {
    validate_verbs(rule, path, errors);
    let (urls, at) = (rule.items("nonResourceURLs"), path.child("nonResourceURLs"));
    if urls.is_empty() {
        errors.required(&at, "nonResourceURLs must contain at least one value");
    } else if has_wildcard(urls) {
        if urls.len() > 1 {
            let message = "if '*' is present, must not specify other non-resource URLs";
            errors.invalid(&at, rule.at("nonResourceURLs").clone(), message);
        }
    } else {
        for (i, url) in urls.iter().enumerate() {
            let url = url.as_str().unwrap_or("");
            if let Some(error) = url_error(url) {
                errors.invalid(&at.index(i), url, error);
            }
        }
    }
}

fn url_error(url: &str) -> Option<&'static str> {
    let wildcard_count = url.matches('*').count();
    match url {
        "" => Some("must not be empty"),
        "/" => None,
        _ if !url.starts_with('/') => Some("must start with slash"),
        _ if url.contains(' ') => Some("must not contain white-space"),
        _ if url.contains("//") => Some("must not contain double slash"),
        _ if wildcard_count > 1 || wildcard_count == 1 && !url.ends_with("/*") => {
            Some("wildcard can only do suffix matching")
        }
        _ => None,
    }
}
