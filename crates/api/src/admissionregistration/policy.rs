//! What validating and mutating policies, and their bindings, have in common.

use std::collections::HashSet;

use cel::{Env, Type};
use serde_json::Value;

use super::expressions::{self, Composed, Names};
use super::rule::named_rule;
use super::webhook::{FAILURE_POLICIES, MATCH_POLICIES, known};
use crate::field::{Errors, Path};
use crate::json::Json;
use crate::meta::{self, SelectorOptions};
use crate::names;

const MAX_MATCH_CONDITIONS: usize = 64;
/// Mutating policies see no DELETE: there is nothing left to change.
const MUTATING_OPERATIONS: [&str; 4] = ["*", "CONNECT", "CREATE", "UPDATE"];

/// What the expressions of a policy can refer to.
pub(super) struct Vocabulary {
    params: bool,
    composed: Composed,
}

impl Vocabulary {
    /// Complains about an expression that cannot be compiled or gives something else.
    pub fn check(&self, names: Names, expression: &str, wanted: &[Type], path: &Path, errors: &mut Errors) {
        let env = expressions::env(Names { params: self.params, ..names });
        if let Err(why) = expressions::compile(&self.composed.env(&env), expression, wanted) {
            errors.invalid(path, expression, &why);
        }
    }
}

/// The first part of a policy's spec, up to its variables.
pub(super) fn matching(spec: &Value, mutating: bool, path: &Path, errors: &mut Errors) -> Vocabulary {
    required_and_known(spec, "failurePolicy", &FAILURE_POLICIES, path, errors);
    if spec.has("paramKind") {
        param_kind(spec.at("paramKind"), &path.at("paramKind"), errors);
    }
    let constraints = spec.at("matchConstraints");
    let at = path.at("matchConstraints");
    if constraints.is_null() {
        errors.required(&at, "");
    } else {
        match_resources(constraints, &at, errors);
        if constraints.items("resourceRules").is_empty() {
            errors.required(&at.at("resourceRules"), "");
        }
        if mutating {
            mutating_operations(constraints, &at, errors);
        }
    }
    let params = spec.has("paramKind");
    match_conditions(spec.items("matchConditions"), params, &path.at("matchConditions"), errors);
    let mut composed = Composed::default();
    let env = expressions::env(Names { params, authorizer: true, patches: false });
    for (i, item) in spec.items("variables").iter().enumerate() {
        variable(item, &env, &mut composed, &path.at("variables").index(i), errors);
    }
    Vocabulary { params, composed }
}

/// The first part of a binding's spec.
pub(super) fn binding(spec: &Value, path: &Path, errors: &mut Errors) {
    let policy = spec.text("policyName");
    if policy.is_empty() {
        errors.required(&path.at("policyName"), "");
    } else {
        errors.invalid_each(&path.at("policyName"), policy, names::dns1123_subdomain(policy));
    }
    if spec.has("paramRef") {
        param_ref(spec.at("paramRef"), &path.at("paramRef"), errors);
    }
    if spec.has("matchResources") {
        match_resources(spec.at("matchResources"), &path.at("matchResources"), errors);
    }
}

pub(super) fn required_and_known(
    obj: &Value,
    field: &str,
    values: &[&str],
    path: &Path,
    errors: &mut Errors,
) {
    if obj.text(field).is_empty() {
        errors.required(&path.at(field), "");
    } else {
        known(obj, field, values, path, errors);
    }
}

pub(super) fn mutating_operations(matching: &Value, path: &Path, errors: &mut Errors) {
    for rule in matching.items("resourceRules") {
        for operation in rule.items("operations") {
            let name = operation.as_str().unwrap_or("");
            if !MUTATING_OPERATIONS.contains(&name) {
                errors.not_supported(&path.at("resourceRules.operations"), name, &MUTATING_OPERATIONS);
            }
        }
    }
}

fn param_kind(param: &Value, path: &Path, errors: &mut Errors) {
    let at = path.at("apiVersion");
    let api_version = param.text("apiVersion");
    if api_version.is_empty() {
        errors.required(&at, "");
    } else if api_version.matches('/').count() > 1 {
        errors.invalid(&at, api_version, &format!("unexpected GroupVersion string: {api_version}"));
    } else {
        let (group, version) = api_version.split_once('/').unwrap_or(("", api_version));
        let problems = names::dns1123_subdomain(group);
        if !group.is_empty() && !problems.is_empty() {
            errors.invalid(&at, group, &problems.join(","));
        }
        let problems = names::dns1035_label(version);
        if version.is_empty() {
            errors.invalid(&at, api_version, "version must be specified");
        } else if !problems.is_empty() {
            errors.invalid(&at, version, &problems.join(","));
        }
    }
    let kind = param.text("kind");
    let problems = names::dns1035_label(&kind.to_lowercase());
    if kind.is_empty() {
        errors.required(&path.at("kind"), "");
    } else if !problems.is_empty() {
        let message = format!("may have mixed case, but should otherwise match: {}", problems.join(","));
        errors.invalid(&path.at("kind"), kind, &message);
    }
}

fn match_resources(matching: &Value, path: &Path, errors: &mut Errors) {
    required_and_known(matching, "matchPolicy", &MATCH_POLICIES, path, errors);
    for field in ["namespaceSelector", "objectSelector"] {
        if matching.has(field) {
            meta::label_selector(matching.at(field), &path.at(field), SelectorOptions::default(), errors);
        } else {
            errors.required(&path.at(field), "");
        }
    }
    for field in ["resourceRules", "excludeResourceRules"] {
        for (i, rule) in matching.items(field).iter().enumerate() {
            named_rule(rule, &path.at(field).index(i), errors);
        }
    }
}

fn param_ref(reference: &Value, path: &Path, errors: &mut Errors) {
    const EXCLUSIVE: &str = "name and selector are mutually exclusive";
    let name = reference.text("name");
    let has_selector = reference.has("selector");
    if !name.is_empty() {
        errors.invalid_each(&path.at("name"), name, names::path_segment_name(name));
        if has_selector {
            errors.forbidden(&path.at("name"), EXCLUSIVE);
        }
    }
    if has_selector {
        let selector = reference.at("selector");
        meta::label_selector(selector, &path.at("selector"), SelectorOptions::default(), errors);
        if !name.is_empty() {
            errors.forbidden(&path.at("selector"), EXCLUSIVE);
        }
    }
    if name.is_empty() && !has_selector {
        errors.required(path, "one of name or selector must be specified");
    }
    required_and_known(reference, "parameterNotFoundAction", &["Deny", "Allow"], path, errors);
}

pub(super) fn match_conditions(conditions: &[Value], params: bool, path: &Path, errors: &mut Errors) {
    if conditions.len() > MAX_MATCH_CONDITIONS {
        errors.too_many(path, conditions.len(), MAX_MATCH_CONDITIONS);
    }
    let mut seen = HashSet::new();
    for (i, condition) in conditions.iter().enumerate() {
        let path = path.index(i);
        let expression = condition.text("expression").trim();
        if expression.is_empty() {
            errors.required(&path.at("expression"), "");
        } else {
            let env = expressions::env(Names { params, authorizer: true, patches: false });
            if let Err(why) = expressions::compile(&env, expression, &[Type::Bool]) {
                errors.invalid(&path.at("expression"), expression, &why);
            }
        }
        let name = condition.text("name");
        if name.is_empty() {
            errors.required(&path.at("name"), "");
            continue;
        }
        errors.invalid_each(&path.at("name"), name, names::qualified_name(name));
        if !seen.insert(name) {
            errors.duplicate(&path.at("name"), name);
        }
    }
}

fn variable(variable: &Value, env: &Env, composed: &mut Composed, path: &Path, errors: &mut Errors) {
    let name = variable.text("name");
    if name.trim().is_empty() {
        errors.required(&path.at("name"), "name is not specified");
    } else if !is_cel_identifier(name) {
        errors.invalid(&path.at("name"), name, "must be a valid CEL identifier");
    }
    let expression = variable.text("expression");
    if expression.trim().is_empty() {
        errors.required(&path.at("expression"), "expression is not specified");
    } else if let Err(why) = composed.add(env, name, expression) {
        errors.invalid(&path.at("expression"), expression, &why);
    }
}

fn is_cel_identifier(name: &str) -> bool {
    name.starts_with(|c: char| c.is_ascii_alphabetic() || c == '_')
        && name.chars().all(|c| c.is_ascii_alphanumeric() || c == '_')
        && !cel::is_reserved(name)
}
