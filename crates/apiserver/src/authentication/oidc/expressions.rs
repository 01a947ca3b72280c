//! CEL expressions of AuthenticationConfiguration.

use std::sync::LazyLock;

use api::field::quote;
use cel::{Budget, Decl, Env, Program, Type, Variables};
use serde_json::{Value, json};

use super::super::configuration::Jwt;
use crate::access::User;

static CLAIMS_ENV: LazyLock<Env> =
    LazyLock::new(|| Env::new().variable("claims", Type::map(Type::String, Type::Dyn)));

static USER_DECL: LazyLock<Decl> = LazyLock::new(|| {
    let (text, string_array) =
        (json!({"type": "string"}), json!({"type": "array", "items": {"type": "string"}}));
    let schema = json!({"type": "object", "properties": {
        "username": text, "uid": text, "groups": string_array,
        "extra": {"type": "object", "additionalProperties": string_array},
    }});
    Decl::from_schema(&schema, false)
        .expect("an object has a declaration")
        .with_type_name("kubernetes.UserInfo")
});

static USER_ENV: LazyLock<Env> = LazyLock::new(|| Env::new().variable("user", USER_DECL.clone()));

/// The compiled expressions of an issuer.
#[derive(Default)]
pub struct ClaimExpressions {
    pub username: Option<Program>,
    pub groups: Option<Program>,
    pub uid: Option<Program>,
    extra: Vec<(String, Program)>,
    /// Each with its failure message.
    claim_rules: Vec<(Program, String)>,
    user_rules: Vec<(Program, String)>,
}

impl ClaimExpressions {
    /// Compiles all expressions and appends errors to `field_errors`.
    pub fn new(jwt: &Jwt, at: &str, field_errors: &mut Vec<String>) -> ClaimExpressions {
        let mappings = &jwt.claim_mappings;
        let text = [Type::String];
        let string_types = [Type::String, Type::list(Type::String)];
        let mut compile = |env: &Env, field: String, expression: &str, types: &[Type]| {
            let bad =
                |reason: String| format!("{at}.{field}: Invalid value: {}: {reason}", quote(expression));
            match env.compile(expression) {
                _ if expression.is_empty() => None,
                Err(errors) => {
                    field_errors.push(bad(format!("compilation failed: {errors}")));
                    None
                }
                Ok(program) if types.contains(program.output()) || *program.output() == Type::Dyn => {
                    Some(program)
                }
                Ok(_) => {
                    let names: Vec<String> = types.iter().map(ToString::to_string).collect();
                    field_errors.push(bad(match names.as_slice() {
                        [one] => format!("must evaluate to {one}"),
                        many => format!("must evaluate to one of [{}]", many.join(" ")),
                    }));
                    None
                }
            }
        };
        let mut mapping = |name: &str, expression: &str, types: &[Type]| {
            compile(&CLAIMS_ENV, format!("claimMappings.{name}.expression"), expression, types)
        };
        let username = mapping("username", &mappings.username.expression, &text);
        let groups = mapping("groups", &mappings.groups.expression, &string_types);
        let uid = mapping("uid", &mappings.uid.expression, &text);
        let extra = mappings.extra.iter().enumerate().filter_map(|(i, extra)| {
            let field = format!("claimMappings.extra[{i}].valueExpression");
            Some((extra.key.clone(), compile(&CLAIMS_ENV, field, &extra.value_expression, &string_types)?))
        });
        let extra: Vec<_> = extra.collect();
        let rules = jwt.claim_validation_rules.iter().enumerate().filter_map(|(i, rule)| {
            let field = format!("claimValidationRules[{i}].expression");
            let program = compile(&CLAIMS_ENV, field, &rule.expression, &[Type::Bool])?;
            Some((program, rule.message.clone()))
        });
        let claim_rules: Vec<_> = rules.collect();
        let rules = jwt.user_validation_rules.iter().enumerate().filter_map(|(i, rule)| {
            let field = format!("userValidationRules[{i}].expression");
            let program = compile(&USER_ENV, field, &rule.expression, &[Type::Bool])?;
            Some((program, rule.message.clone()))
        });
        let user_rules = rules.collect();
        let claim_expressions = ClaimExpressions { username, groups, uid, extra, claim_rules, user_rules };
        if claim_expressions.uses_unverified_email() {
            let expression = quote(&mappings.username.expression);
            field_errors.push(format!(
                "{at}.claimMappings.username.expression: Invalid value: {expression}: claims.email_verified must be used in claimMappings.username.expression or claimMappings.extra[*].valueExpression or claimValidationRules[*].expression when claims.email is used in claimMappings.username.expression"
            ));
        }
        claim_expressions
    }

    /// Whether the user name is an e-mail address and nothing checks `email_verified`.
    fn uses_unverified_email(&self) -> bool {
        let reads = |program: &Program, claim: &str| {
            let mut occurrences = program.source().match_indices(claim);
            occurrences.any(|(at, _)| {
                let next = program.source()[at + claim.len()..].chars().next();
                !next.is_some_and(|c| c.is_ascii_alphanumeric() || c == '_')
            })
        };
        let checks_verified = |program: &Program| {
            reads(program, "claims.email_verified") || reads(program, "claims.?email_verified")
        };
        let email = |program: &Program| reads(program, "claims.email") || reads(program, "claims.?email");
        let others = self.extra.iter().map(|(_, program)| program);
        let others = others.chain(self.claim_rules.iter().map(|(program, _)| program));
        self.username.as_ref().is_some_and(email) && !others.chain(&self.username).any(checks_verified)
    }

    /// Adds the extra attributes and checks the validation rules.
    pub fn apply_rules(&self, claims: &Value, user: &mut User) -> Result<(), String> {
        for (key, program) in &self.extra {
            let failed = |reason: String| {
                format!("oidc: error evaluating extra claim expression: {}: {reason}", program.source())
            };
            let values = evaluate_strings(program, claims).map_err(failed)?;
            if !values.is_empty() {
                user.extra.insert(key.clone(), values);
            }
        }
        for (program, message) in &self.claim_rules {
            let variables = Variables::new().with("claims", cel::Value::from_json(claims));
            check_rule(program, &variables, message)
                .map_err(|reason| format!("oidc: error evaluating claim validation expression: {reason}"))?;
        }
        if self.user_rules.is_empty() {
            return Ok(());
        }
        let known = json!({
            "username": user.name, "uid": user.uid, "groups": user.groups, "extra": user.extra,
        });
        for (program, message) in &self.user_rules {
            let variables = Variables::new().with("user", cel::Value::from_declared(&known, &USER_DECL));
            check_rule(program, &variables, message)
                .map_err(|reason| format!("oidc: error evaluating user info validation rule: {reason}"))?;
        }
        Ok(())
    }
}

fn check_rule<'a>(program: &'a Program, variables: &Variables<'a>, message: &str) -> Result<(), String> {
    let value = program.run(variables, &mut Budget::new(cel::RUNTIME_BUDGET));
    match value.map_err(|failure| evaluation_error(program, &failure))?.as_bool() {
        Some(true) => Ok(()),
        Some(false) => Err(format!("validation expression '{}' failed: {message}", program.source())),
        None => Err("validation expression must return a boolean".to_owned()),
    }
}

fn evaluation_error(program: &Program, failure: &cel::EvalError) -> String {
    format!("expression '{}' resulted in error: {failure}", program.source())
}

/// Evaluates an expression to a string.
pub fn evaluate_string(program: &Program, claims: &Value, what: &str) -> Result<String, String> {
    let variables = Variables::new().with("claims", cel::Value::from_json(claims));
    let value = program.run(&variables, &mut Budget::new(cel::RUNTIME_BUDGET));
    let value = value.map_err(|failure| evaluation_error(program, &failure))?;
    let text = value.as_str().map(str::to_owned);
    text.ok_or_else(|| format!("{what} claim expression must return a string"))
}

/// Evaluates an expression to a list of strings; a string is one element, null and "" are none.
pub fn evaluate_strings(program: &Program, claims: &Value) -> Result<Vec<String>, String> {
    const OTHER: &str = "expression must return a string or a list of strings";
    let variables = Variables::new().with("claims", cel::Value::from_json(claims));
    let value = program.run(&variables, &mut Budget::new(cel::RUNTIME_BUDGET));
    let value = value.map_err(|failure| evaluation_error(program, &failure))?;
    match (value.as_str(), &value) {
        (Some(""), _) | (_, cel::Value::Null) => Ok(Vec::new()),
        (Some(one), _) => Ok(vec![one.to_owned()]),
        (None, cel::Value::List(list)) => {
            list.iter().map(|item| item.as_str().map(str::to_owned).ok_or_else(|| OTHER.to_owned())).collect()
        }
        _ => Err(OTHER.to_owned()),
    }
}
