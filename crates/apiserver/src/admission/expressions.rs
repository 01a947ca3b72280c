//! CEL match conditions of webhooks: their environment and evaluation.

use std::sync::LazyLock;

use api::admissionregistration::expressions::{self, OptionalVariables, REQUEST_DECL};
use cel::{
    AuthorizationAttributes, AuthorizerCheck, Budget, Env, EvalError, LibraryValue, Program, Type, Variables,
};
use serde_json::Value;

use super::policies::CelAuthorizer;
use crate::access::User;
use crate::server::Server;

/// One entry of `matchConditions`.
pub struct MatchCondition {
    program: Result<Program, String>,
}

/// The variables that match conditions may use.
static CONDITION_ENV: LazyLock<Env> = LazyLock::new(|| {
    expressions::base_env(OptionalVariables { authorizer: true, ..OptionalVariables::default() })
});

impl MatchCondition {
    /// A condition that does not compile is neither true nor false: it is an error when it is
    /// evaluated.
    pub fn new(expression: &str) -> MatchCondition {
        let program = expressions::compile(&CONDITION_ENV, expression, &[Type::Bool]);
        MatchCondition { program }
    }
}

/// The input of match conditions.
pub struct ConditionInput<'a> {
    pub server: &'a Server,
    pub user: &'a User,
    /// The `AdmissionRequest` without object and oldObject.
    pub request: &'a Value,
    pub object: &'a Value,
    pub old: &'a Value,
}

/// Whether all conditions hold. One that is false decides, whatever errors the others have.
pub fn conditions_match(conditions: &[MatchCondition], input: &ConditionInput<'_>) -> Result<bool, String> {
    let authorizer = CelAuthorizer { server: input.server, user: input.user };
    let text = |name: &str| input.request[name].as_str().unwrap_or("").to_owned();
    let resource = &input.request["resource"];
    let own = AuthorizationAttributes {
        group: resource["group"].as_str().unwrap_or("").to_owned(),
        resource: resource["resource"].as_str().unwrap_or("").to_owned(),
        subresource: text("subResource"),
        namespace: text("namespace"),
        name: text("name"),
        ..AuthorizationAttributes::default()
    };
    let mut variables = Variables::new()
        .with("object", cel::Value::from_json(input.object))
        .with("oldObject", cel::Value::from_json(input.old))
        .with("namespaceObject", cel::Value::Null)
        .with("request", cel::Value::from_declared(input.request, &REQUEST_DECL));
    variables.set("authorizer", cel::Value::Library(LibraryValue::Check(AuthorizerCheck::new(&authorizer))));
    let own = AuthorizerCheck::for_resource(&authorizer, own);
    variables.set("authorizer.requestResource", cel::Value::Library(LibraryValue::Check(own)));
    let mut budget = Budget::new(cel::MATCH_CONDITIONS_BUDGET);
    let mut errors = Vec::new();
    for condition in conditions {
        match &condition.program {
            Err(reason) => errors.push(format!("compilation error: {reason}")),
            Ok(program) => match program.run(&variables, &mut budget) {
                Ok(value) if value.as_bool() == Some(false) => return Ok(false),
                Ok(_) => {}
                Err(failure @ EvalError::Error(_)) => {
                    errors.push(format!("expression '{}' resulted in error: {failure}", program.source()))
                }
                Err(failure) => {
                    errors.push(failure.to_string());
                    break;
                }
            },
        }
    }
    match errors.as_slice() {
        [] => Ok(true),
        [one] => Err(one.clone()),
        many => Err(format!("[{}]", many.join(", "))),
    }
}
