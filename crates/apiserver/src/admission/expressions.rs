//! CEL as admission speaks it: what conditions on a request can see, and who answers their questions.

use std::sync::LazyLock;

use cel::{
    Authorizer, Budget, Check, Decision, Decl, Env, Failure, Library, Program, Question, Type, Variables,
};
use futures_util::FutureExt as _;
use serde_json::{Value, json};

use crate::access::User;
use crate::rbac::Ask;
use crate::server::Server;

/// One of `matchConditions`.
pub struct Condition {
    program: Result<Program, String>,
}

/// The request, as expressions see it.
pub static REQUEST: LazyLock<Decl> = LazyLock::new(|| {
    let text = json!({"type": "string"});
    let object = |names: &[&str]| {
        let properties: serde_json::Map<String, Value> =
            names.iter().map(|name| ((*name).to_owned(), text.clone())).collect();
        json!({"type": "object", "properties": properties})
    };
    let texts = json!({"type": "array", "items": text});
    let user = json!({"type": "object", "properties": {
        "username": text, "uid": text, "groups": texts,
        "extra": {"type": "object", "additionalProperties": texts},
    }});
    let (kind, resource) = (object(&["group", "version", "kind"]), object(&["group", "version", "resource"]));
    let schema = json!({"type": "object", "properties": {
        "kind": kind, "resource": resource, "subResource": text,
        "requestKind": kind, "requestResource": resource, "requestSubResource": text,
        "name": text, "namespace": text, "operation": text, "userInfo": user, "dryRun": {"type": "boolean"},
        "options": {"x-kubernetes-preserve-unknown-fields": true},
    }});
    let decl = Decl::from_schema(&schema, false).expect("an object has a declaration");
    decl.named("kubernetes.AdmissionRequest")
});

/// What conditions on a request can refer to.
static CONDITIONS: LazyLock<Env> = LazyLock::new(|| {
    Env::new()
        .variable("object", Type::Dyn)
        .variable("oldObject", Type::Dyn)
        .variable("request", REQUEST.clone())
        .variable("authorizer", Type::opaque("kubernetes.authorization.Authorizer"))
        .variable("authorizer.requestResource", Type::opaque("kubernetes.authorization.ResourceCheck"))
});

impl Condition {
    /// One that cannot be compiled never holds, nor does it not.
    pub fn new(expression: &str) -> Condition {
        let program =
            CONDITIONS.compile(expression).map_err(|errors| format!("compilation failed: {errors}"));
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

/// Answers what expressions ask about whoever has sent the request.
struct Asking<'a> {
    server: &'a Server,
    user: &'a User,
}

impl Authorizer for Asking<'_> {
    fn authorize(&self, question: &Question) -> Decision {
        let account = question.service_account.as_ref().map(|(namespace, name)| User {
            name: format!("system:serviceaccount:{namespace}:{name}"),
            groups: vec![
                "system:serviceaccounts".into(),
                format!("system:serviceaccounts:{namespace}"),
                "system:authenticated".into(),
            ],
            ..User::default()
        });
        let fields = api::selector::FieldSelector::parse(&question.field_selector).unwrap_or_default();
        let ask = match &question.path {
            Some(path) => Ask::Path { verb: &question.verb, path },
            None => Ask::Resource {
                verb: &question.verb,
                group: &question.group,
                resource: &question.resource,
                subresource: &question.subresource,
                namespace: &question.namespace,
                name: &question.name,
                fields: Some(&fields),
            },
        };
        // An expression does not wait: who can only be answered over the network is not.
        match self.server.rbac.judge(account.as_ref().unwrap_or(self.user), &ask).now_or_never() {
            Some(verdict) => Decision {
                allowed: verdict.allowed,
                reason: verdict.reason,
                error: Some(verdict.problem).filter(|problem| !problem.is_empty()),
            },
            None => Decision {
                error: Some("the authorizer takes too long to answer an expression".to_owned()),
                ..Decision::default()
            },
        }
    }
}
