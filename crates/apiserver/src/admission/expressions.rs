//! CEL as admission speaks it: what conditions on a request can see, and who answers their questions.

use std::sync::LazyLock;

use api::admissionregistration::expressions::{self, Names, REQUEST};
use cel::{Budget, Check, Env, Failure, Library, Program, Question, Type, Variables};
use serde_json::Value;

use super::policies::Asking;
use crate::access::User;
use crate::server::Server;

/// One of `matchConditions`.
pub struct Condition {
    program: Result<Program, String>,
}

/// What conditions on a request can refer to.
static CONDITIONS: LazyLock<Env> =
    LazyLock::new(|| expressions::env(Names { authorizer: true, ..Names::default() }));

impl Condition {
    /// One that cannot be compiled never holds, nor does it not.
    pub fn new(expression: &str) -> Condition {
        let program = expressions::compile(&CONDITIONS, expression, &[Type::Bool]);
        Condition { program }
    }
}

/// What conditions are about.
pub struct Subject<'a> {
    pub server: &'a Server,
    pub user: &'a User,
    /// An `AdmissionRequest`, its objects aside.
    pub request: &'a Value,
    pub object: &'a Value,
    pub old: &'a Value,
}

/// Whether all conditions hold: one that does not is enough, whatever is wrong with the others.
pub fn hold(conditions: &[Condition], subject: &Subject<'_>) -> Result<bool, String> {
    let asking = Asking { server: subject.server, user: subject.user };
    let text = |name: &str| subject.request[name].as_str().unwrap_or("").to_owned();
    let resource = &subject.request["resource"];
    let own = Question {
        group: resource["group"].as_str().unwrap_or("").to_owned(),
        resource: resource["resource"].as_str().unwrap_or("").to_owned(),
        subresource: text("subResource"),
        namespace: text("namespace"),
        name: text("name"),
        ..Question::default()
    };
    let mut variables = Variables::new()
        .with("object", cel::Value::from_json(subject.object))
        .with("oldObject", cel::Value::from_json(subject.old))
        .with("namespaceObject", cel::Value::Null)
        .with("request", cel::Value::from_declared(subject.request, &REQUEST));
    variables.set("authorizer", cel::Value::Library(Library::Check(Check::new(&asking))));
    let own = Check::for_resource(&asking, own);
    variables.set("authorizer.requestResource", cel::Value::Library(Library::Check(own)));
    let mut budget = Budget::new(cel::MATCH_CONDITIONS_BUDGET);
    let mut problems = Vec::new();
    for condition in conditions {
        match &condition.program {
            Err(why) => problems.push(format!("compilation error: {why}")),
            Ok(program) => match program.run(&variables, &mut budget) {
                Ok(value) if value.as_bool() == Some(false) => return Ok(false),
                Ok(_) => {}
                Err(failure @ Failure::Error(_)) => {
                    problems.push(format!("expression '{}' resulted in error: {failure}", program.source()))
                }
                Err(failure) => {
                    problems.push(failure.to_string());
                    break;
                }
            },
        }
    }
    match problems.as_slice() {
        [] => Ok(true),
        [one] => Err(one.clone()),
        many => Err(format!("[{}]", many.join(", "))),
    }
}
