//! What claims mean where that is said in CEL.

use std::sync::LazyLock;

use api::field::quoted;
use cel::{Budget, Decl, Env, Program, Type, Variables};
use serde_json::{Value, json};

use super::super::configuration::Jwt;
use crate::access::User;

static CLAIMS: LazyLock<Env> =
    LazyLock::new(|| Env::new().variable("claims", Type::map(Type::String, Type::Dyn)));

static USER: LazyLock<Decl> = LazyLock::new(|| {
    let (text, texts) = (json!({"type": "string"}), json!({"type": "array", "items": {"type": "string"}}));
    let schema = json!({"type": "object", "properties": {
        "username": text, "uid": text, "groups": texts,
        "extra": {"type": "object", "additionalProperties": texts},
    }});
    Decl::from_schema(&schema, false).expect("an object has a declaration").named("kubernetes.UserInfo")
});

static USERS: LazyLock<Env> = LazyLock::new(|| Env::new().variable("user", USER.clone()));

/// The expressions of an issuer, compiled.
#[derive(Default)]
pub struct Programs {
    pub username: Option<Program>,
    pub groups: Option<Program>,
    pub uid: Option<Program>,
    extra: Vec<(String, Program)>,
    /// Each with what is said where it does not hold.
    claim_rules: Vec<(Program, String)>,
    user_rules: Vec<(Program, String)>,
}

impl Programs {
    /// Compiles what there is, and tells what is wrong with the rest.
    pub fn new(jwt: &Jwt, at: &str, problems: &mut Vec<String>) -> Programs {
        let mappings = &jwt.claim_mappings;
        let text = [Type::String];
        let texts = [Type::String, Type::list(Type::String)];
        let mut compile = |env: &Env, field: String, expression: &str, types: &[Type]| {
            let bad = |why: String| format!("{at}.{field}: Invalid value: {}: {why}", quoted(expression));
            match env.compile(expression) {
                _ if expression.is_empty() => None,
                Err(errors) => {
                    problems.push(bad(format!("compilation failed: {errors}")));
                    None
                }
                Ok(program) if types.contains(program.output()) || *program.output() == Type::Dyn => {
                    Some(program)
                }
                Ok(_) => {
                    let names: Vec<String> = types.iter().map(ToString::to_string).collect();
                    problems.push(bad(match names.as_slice() {
                        [one] => format!("must evaluate to {one}"),
                        many => format!("must evaluate to one of [{}]", many.join(" ")),
                    }));
                    None
                }
            }
        };
        let mut mapping = |name: &str, expression: &str, types: &[Type]| {
            compile(&CLAIMS, format!("claimMappings.{name}.expression"), expression, types)
        };
        let username = mapping("username", &mappings.username.expression, &text);
        let groups = mapping("groups", &mappings.groups.expression, &texts);
        let uid = mapping("uid", &mappings.uid.expression, &text);
        let extra = mappings.extra.iter().enumerate().filter_map(|(i, extra)| {
            let field = format!("claimMappings.extra[{i}].valueExpression");
            Some((extra.key.clone(), compile(&CLAIMS, field, &extra.value_expression, &texts)?))
        });
        let extra: Vec<_> = extra.collect();
        let rules = jwt.claim_validation_rules.iter().enumerate().filter_map(|(i, rule)| {
            let field = format!("claimValidationRules[{i}].expression");
            let program = compile(&CLAIMS, field, &rule.expression, &[Type::Bool])?;
            Some((program, rule.message.clone()))
        });
        let claim_rules: Vec<_> = rules.collect();
        let rules = jwt.user_validation_rules.iter().enumerate().filter_map(|(i, rule)| {
            let field = format!("userValidationRules[{i}].expression");
            let program = compile(&USERS, field, &rule.expression, &[Type::Bool])?;
            Some((program, rule.message.clone()))
        });
        let user_rules = rules.collect();
        let programs = Programs { username, groups, uid, extra, claim_rules, user_rules };
        if programs.trusts_unverified_email() {
            let expression = quoted(&mappings.username.expression);
            problems.push(format!(
                "{at}.claimMappings.username.expression: Invalid value: {expression}: claims.email_verified must be used in claimMappings.username.expression or claimMappings.extra[*].valueExpression or claimValidationRules[*].expression when claims.email is used in claimMappings.username.expression"
            ));
        }
        programs
    }

    /// Whoever goes by an e-mail address must ask whether it is its owner's.
    fn trusts_unverified_email(&self) -> bool {
        let reads = |program: &Program, claim: &str| {
            let mut places = program.source().match_indices(claim);
            places.any(|(at, _)| {
                let next = program.source()[at + claim.len()..].chars().next();
                !next.is_some_and(|c| c.is_ascii_alphanumeric() || c == '_')
            })
        };
        let asks = |program: &Program| {
            reads(program, "claims.email_verified") || reads(program, "claims.?email_verified")
        };
        let email = |program: &Program| reads(program, "claims.email") || reads(program, "claims.?email");
        let others = self.extra.iter().map(|(_, program)| program);
        let others = others.chain(self.claim_rules.iter().map(|(program, _)| program));
        self.username.as_ref().is_some_and(email) && !others.chain(&self.username).any(asks)
    }

    /// What the expressions add to a user, and whether the rules let them in.
    pub fn judge(&self, claims: &Value, user: &mut User) -> Result<(), String> {
        for (key, program) in &self.extra {
            let failed = |why: String| {
                format!("oidc: error evaluating extra claim expression: {}: {why}", program.source())
            };
            let values = texts(program, claims).map_err(failed)?;
            if !values.is_empty() {
                user.extra.insert(key.clone(), values);
            }
        }
        for (program, message) in &self.claim_rules {
            let variables = Variables::new().with("claims", cel::Value::from_json(claims));
            holds(program, &variables, message)
                .map_err(|why| format!("oidc: error evaluating claim validation expression: {why}"))?;
        }
        if self.user_rules.is_empty() {
            return Ok(());
        }
        let known = json!({
            "username": user.name, "uid": user.uid, "groups": user.groups, "extra": user.extra,
        });
        for (program, message) in &self.user_rules {
            let variables = Variables::new().with("user", cel::Value::from_declared(&known, &USER));
            holds(program, &variables, message)
                .map_err(|why| format!("oidc: error evaluating user info validation rule: {why}"))?;
        }
        Ok(())
    }
}

fn holds<'a>(program: &'a Program, variables: &Variables<'a>, message: &str) -> Result<(), String> {
    let value = program.run(variables, &mut Budget::new(cel::RUNTIME_BUDGET));
    match value.map_err(|failure| failed(program, &failure))?.as_bool() {
        Some(true) => Ok(()),
        Some(false) => Err(format!("validation expression '{}' failed: {message}", program.source())),
        None => Err("validation expression must return a boolean".to_owned()),
    }
}

fn failed(program: &Program, failure: &cel::Failure) -> String {
    format!("expression '{}' resulted in error: {failure}", program.source())
}

/// The one text that an expression makes of claims.
pub fn text(program: &Program, claims: &Value, what: &str) -> Result<String, String> {
    let variables = Variables::new().with("claims", cel::Value::from_json(claims));
    let value = program.run(&variables, &mut Budget::new(cel::RUNTIME_BUDGET));
    let value = value.map_err(|failure| failed(program, &failure))?;
    let text = value.as_str().map(str::to_owned);
    text.ok_or_else(|| format!("{what} claim expression must return a string"))
}

/// The texts that an expression makes of claims: one, several or none.
pub fn texts(program: &Program, claims: &Value) -> Result<Vec<String>, String> {
    const OTHER: &str = "expression must return a string or a list of strings";
    let variables = Variables::new().with("claims", cel::Value::from_json(claims));
    let value = program.run(&variables, &mut Budget::new(cel::RUNTIME_BUDGET));
    let value = value.map_err(|failure| failed(program, &failure))?;
    match (value.as_str(), &value) {
        (Some(""), _) | (_, cel::Value::Null) => Ok(Vec::new()),
        (Some(one), _) => Ok(vec![one.to_owned()]),
        (None, cel::Value::List(list)) => {
            list.iter().map(|item| item.as_str().map(str::to_owned).ok_or_else(|| OTHER.to_owned())).collect()
        }
        _ => Err(OTHER.to_owned()),
    }
}
