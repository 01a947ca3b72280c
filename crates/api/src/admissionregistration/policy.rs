//! Validation that validating and mutating admission policies and their bindings share.

use std::collections::HashSet;

use cel::{Env, Type};
use serde_json::Value;

use super::expressions::{self, CompositionEnv, OptionalVariables};
use super::rule::validate_named_rule;
use super::webhook::{FAILURE_POLICIES, MATCH_POLICIES, optional_one_of};
use crate::field::{ErrorList, Path};
use crate::json::JsonExt;
use crate::meta::{self, SelectorOptions};
use crate::names;

const MAX_MATCH_CONDITIONS: usize = 64;
/// Mutating policies do not apply to DELETE, which has no object to mutate.
const MUTATING_OPERATIONS: [&str; 4] = ["*", "CONNECT", "CREATE", "UPDATE"];

/// The CEL environment of the expressions of a policy.
pub(super) struct ExpressionContext {
    params: bool,
    composition_env: CompositionEnv,
}

impl ExpressionContext {
    /// Reports an expression that does not compile or has the wrong result type.
    pub fn check(
        &self,
        optional_variables: OptionalVariables,
        expression: &str,
        allowed_types: &[Type],
        path: &Path,
        errors: &mut ErrorList,
    ) {
        let env = expressions::base_env(OptionalVariables { params: self.params, ..optional_variables });
        if let Err(reason) = expressions::compile(&self.composition_env.env(&env), expression, allowed_types)
        {
            errors.invalid(path, expression, &reason);
        }
    }
}

/// Validates the part of a policy's spec up to its variables.
pub(super) fn validate_common_spec(
    spec: &Value,
    mutating: bool,
    path: &Path,
    errors: &mut ErrorList,
) -> ExpressionContext {
    required_one_of(spec, "failurePolicy", &FAILURE_POLICIES, path, errors);
    if spec.has("paramKind") {
        param_kind(spec.at("paramKind"), &path.child("paramKind"), errors);
    }
    let constraints = spec.at("matchConstraints");
    let at = path.child("matchConstraints");
    if constraints.is_null() {
        errors.required(&at, "");
    } else {
        match_resources(constraints, &at, errors);
        if constraints.items("resourceRules").is_empty() {
            errors.required(&at.child("resourceRules"), "");
        }
        if mutating {
            validate_mutating_operations(constraints, &at, errors);
        }
    }
    let params = spec.has("paramKind");
    validate_match_conditions(spec.items("matchConditions"), params, &path.child("matchConditions"), errors);
    let mut composition_env = CompositionEnv::default();
    let env = expressions::base_env(OptionalVariables { params, authorizer: true, patches: false });
    for (i, item) in spec.items("variables").iter().enumerate() {
        variable(item, &env, &mut composition_env, &path.child("variables").index(i), errors);
    }
    ExpressionContext { params, composition_env }
}

/// Validates the part of a binding's spec that both kinds have.
pub(super) fn validate_binding_spec(spec: &Value, path: &Path, errors: &mut ErrorList) {
    let policy = spec.text("policyName");
    if policy.is_empty() {
        errors.required(&path.child("policyName"), "");
    } else {
        errors.invalid_each(&path.child("policyName"), policy, names::dns1123_subdomain(policy));
    }
    if spec.has("paramRef") {
        param_ref(spec.at("paramRef"), &path.child("paramRef"), errors);
    }
    if spec.has("matchResources") {
        match_resources(spec.at("matchResources"), &path.child("matchResources"), errors);
    }
}

pub(super) fn required_one_of(
    obj: &Value,
    field: &str,
    values: &[&str],
    path: &Path,
    errors: &mut ErrorList,
) {
    if obj.text(field).is_empty() {
        errors.required(&path.child(field), "");
    } else {
        optional_one_of(obj, field, values, path, errors);
    }
}

pub(super) fn validate_mutating_operations(matching: &Value, path: &Path, errors: &mut ErrorList) {
    for rule in matching.items("resourceRules") {
        for operation in rule.items("operations") {
            let name = operation.as_str().unwrap_or("");
            if !MUTATING_OPERATIONS.contains(&name) {
                errors.not_supported(&path.child("resourceRules.operations"), name, &MUTATING_OPERATIONS);
            }
        }
    }
}

fn param_kind(param: &Value, path: &Path, errors: &mut ErrorList) {
    let at = path.child("apiVersion");
    let api_version = param.text("apiVersion");
    if api_version.is_empty() {
        errors.required(&at, "");
    } else if api_version.matches('/').count() > 1 {
        errors.invalid(&at, api_version, &format!("unexpected GroupVersion string: {api_version}"));
    } else {
        let (group, version) = api_version.split_once('/').unwrap_or(("", api_version));
        let messages = names::dns1123_subdomain(group);
        if !group.is_empty() && !messages.is_empty() {
            errors.invalid(&at, group, &messages.join(","));
        }
        let messages = names::dns1035_label(version);
        if version.is_empty() {
            errors.invalid(&at, api_version, "version must be specified");
        } else if !messages.is_empty() {
            errors.invalid(&at, version, &messages.join(","));
        }
    }
    let kind = param.text("kind");
    let messages = names::dns1035_label(&kind.to_lowercase());
    if kind.is_empty() {
        errors.required(&path.child("kind"), "");
    } else if !messages.is_empty() {
        let message = format!("may have mixed case, but should otherwise match: {}", messages.join(","));
        errors.invalid(&path.child("kind"), kind, &message);
    }
}

fn match_resources(matching: &Value, path: &Path, errors: &mut ErrorList) {
    required_one_of(matching, "matchPolicy", &MATCH_POLICIES, path, errors);
    for field in ["namespaceSelector", "objectSelector"] {
        if matching.has(field) {
            meta::validate_label_selector(
                matching.at(field),
                &path.child(field),
                SelectorOptions::default(),
                errors,
            );
        } else {
            errors.required(&path.child(field), "");
        }
    }
    for field in ["resourceRules", "excludeResourceRules"] {
        for (i, rule) in matching.items(field).iter().enumerate() {
            validate_named_rule(rule, &path.child(field).index(i), errors);
        }
    }
}

fn param_ref(reference: &Value, path: &Path, errors: &mut ErrorList) {
    const EXCLUSIVE: &str = "name and selector are mutually exclusive";
    let name = reference.text("name");
    let has_selector = reference.has("selector");
    if !name.is_empty() {
        errors.invalid_each(&path.child("name"), name, names::path_segment_name(name));
        if has_selector {
            errors.forbidden(&path.child("name"), EXCLUSIVE);
        }
    }
    if has_selector {
        let selector = reference.at("selector");
        meta::validate_label_selector(selector, &path.child("selector"), SelectorOptions::default(), errors);
        if !name.is_empty() {
            errors.forbidden(&path.child("selector"), EXCLUSIVE);
        }
    }
    if name.is_empty() && !has_selector {
        errors.required(path, "one of name or selector must be specified");
    }
    required_one_of(reference, "parameterNotFoundAction", &["Deny", "Allow"], path, errors);
}

pub(super) fn validate_match_conditions(
    conditions: &[Value],
    params: bool,
    path: &Path,
    errors: &mut ErrorList,
) {
    if conditions.len() > MAX_MATCH_CONDITIONS {
        errors.too_many(path, conditions.len(), MAX_MATCH_CONDITIONS);
    }
    let mut seen = HashSet::new();
    for (i, condition) in conditions.iter().enumerate() {
        let path = path.index(i);
        let expression = condition.text("expression").trim();
        if expression.is_empty() {
            errors.required(&path.child("expression"), "");
        } else {
            let env = expressions::base_env(OptionalVariables { params, authorizer: true, patches: false });
            if let Err(reason) = expressions::compile(&env, expression, &[Type::Bool]) {
                errors.invalid(&path.child("expression"), expression, &reason);
            }
        }
        let name = condition.text("name");
        if name.is_empty() {
            errors.required(&path.child("name"), "");
            continue;
        }
        errors.invalid_each(&path.child("name"), name, names::qualified_name(name));
        if !seen.insert(name) {
            errors.duplicate(&path.child("name"), name);
        }
    }
}

fn variable(
    variable: &Value,
    env: &Env,
    composition_env: &mut CompositionEnv,
    path: &Path,
    errors: &mut ErrorList,
) {
    let name = variable.text("name");
    if name.trim().is_empty() {
        errors.required(&path.child("name"), "name is not specified");
    } else if !is_cel_identifier(name) {
        errors.invalid(&path.child("name"), name, "must be a valid CEL identifier");
    }
    let expression = variable.text("expression");
    if expression.trim().is_empty() {
        errors.required(&path.child("expression"), "expression is not specified");
    } else if let Err(reason) = composition_env.add(env, name, expression) {
        errors.invalid(&path.child("expression"), expression, &reason);
    }
}

fn is_cel_identifier(name: &str) -> bool {
    name.starts_with(|c: char| c.is_ascii_alphabetic() || c == '_')
        && name.chars().all(|c| c.is_ascii_alphanumeric() || c == '_')
        && !cel::is_reserved(name)
}
