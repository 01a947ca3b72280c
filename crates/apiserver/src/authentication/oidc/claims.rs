//! Mapping of verified claims to a user.

use api::field::quote;
use api::json::JsonExt as _;
use serde_json::Value;

use super::super::configuration::{Jwt, Prefixed};
use super::expressions::{self, ClaimExpressions};
use crate::access::User;

pub fn user_from_claims(
    jwt: &Jwt,
    claim_expressions: &ClaimExpressions,
    claims: &Value,
) -> Result<User, String> {
    let mappings = &jwt.claim_mappings;
    let name = match &claim_expressions.username {
        Some(program) => username_from_expression(program, claims)?,
        None => username(&mappings.username, claims)?,
    };
    let mut user = User { name, ..User::default() };
    user.groups = match &claim_expressions.groups {
        Some(program) => expressions::evaluate_strings(program, claims)
            .map_err(|reason| format!("oidc: error evaluating group claim expression: {reason}"))?,
        None => groups(&mappings.groups, claims)?,
    };
    if let Some(program) = &claim_expressions.uid {
        user.uid = expressions::evaluate_string(program, claims, "uid")
            .map_err(|reason| format!("oidc: error evaluating uid claim expression: {reason}"))?;
    } else if !mappings.uid.claim.is_empty() {
        let name = &mappings.uid.claim;
        let uid = text(claims, name)
            .map_err(|reason| format!("oidc: parse uid claim {}: {reason}", quote(name)))?;
        user.uid = uid.to_owned();
    }
    if let Ok(id) = text(claims, "jti")
        && !id.is_empty()
    {
        let id = vec![format!("JTI={id}")];
        user.extra.insert("authentication.kubernetes.io/credential-id".to_owned(), id);
    }
    for rule in jwt.claim_validation_rules.iter().filter(|rule| !rule.claim.is_empty()) {
        let claim = &rule.claim;
        if claims.get(claim).is_none() {
            return Err(format!("oidc: required claim {claim} not present in ID token"));
        }
        let value = text(claims, claim).map_err(|reason| format!("oidc: parse claim {claim}: {reason}"))?;
        if value != rule.required_value {
            let expected = &rule.required_value;
            return Err(format!(
                "oidc: required claim {claim} value does not match. Got = {value}, want = {expected}"
            ));
        }
    }
    claim_expressions.apply_rules(claims, &mut user)?;
    Ok(user)
}

/// The user name from a CEL expression; must not be empty.
fn username_from_expression(program: &cel::Program, claims: &Value) -> Result<String, String> {
    let name = expressions::evaluate_string(program, claims, "username")
        .map_err(|reason| format!("oidc: error evaluating username claim expression: {reason}"))?;
    match name.is_empty() {
        true => Err("oidc: empty username via CEL expression is not allowed".to_owned()),
        false => Ok(name),
    }
}

fn username(mapping: &Prefixed, claims: &Value) -> Result<String, String> {
    let claim = &mapping.claim;
    let name = text(claims, claim)
        .map_err(|reason| format!("oidc: parse username claims {}: {reason}", quote(claim)))?;
    if name.is_empty() {
        return Err(format!("oidc: username claim {} is empty", quote(claim)));
    }
    if claim == "email" {
        match claims.get("email_verified") {
            None | Some(Value::Bool(true)) => {}
            Some(Value::Bool(false)) => return Err("oidc: email not verified".to_owned()),
            Some(other) => {
                let reason = type_error(other, "bool");
                return Err(format!("oidc: parse 'email_verified' claim: {reason}"));
            }
        }
    }
    Ok(format!("{}{name}", mapping.prefix.as_deref().unwrap_or("")))
}

/// Some issuers send a single group as a string.
fn groups(mapping: &Prefixed, claims: &Value) -> Result<Vec<String>, String> {
    let claim = &mapping.claim;
    let prefix = mapping.prefix.as_deref().unwrap_or("");
    let prefixed = |value: &Value| match value {
        Value::String(group) => Ok(format!("{prefix}{group}")),
        other => Err(format!("oidc: parse groups claim {}: {}", quote(claim), type_error(other, "string"))),
    };
    match claims.get(claim).filter(|_| !claim.is_empty()) {
        None | Some(Value::Null) => Ok(Vec::new()),
        Some(Value::Array(groups)) => groups.iter().map(prefixed).collect(),
        Some(one) => Ok(vec![prefixed(one)?]),
    }
}

fn text<'a>(claims: &'a Value, name: &str) -> Result<&'a str, String> {
    match claims.at(name) {
        Value::String(text) => Ok(text),
        Value::Null if claims.get(name).is_none() => Err("claim not present".to_owned()),
        // Null decodes to the empty string in Go.
        Value::Null => Ok(""),
        other => Err(type_error(other, "string")),
    }
}

fn type_error(value: &Value, expected: &str) -> String {
    let kind = match value {
        Value::Null => "null",
        Value::Bool(_) => "bool",
        Value::Number(_) => "number",
        Value::String(_) => "string",
        Value::Array(_) => "array",
        Value::Object(_) => "object",
    };
    format!("json: cannot unmarshal {kind} into Go value of type {expected}")
}
