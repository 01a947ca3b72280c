//! What the expressions of a policy see, and what evaluating one comes to.

use std::sync::{Arc, OnceLock, Weak};

use api::admissionregistration::expressions::{NAMESPACE, REQUEST};
use api::json::Json as _;
use api::{Resource, Status};
use cel::{Budget, Check, Failure, Fields, Library, Question, Variables};
use serde_json::Value;

use super::asking::Asking;
use super::config::{Expression, Policy};
use crate::admission::webhooks::{request_of, told};
use crate::admission::{Cluster as _, Request};
use crate::server::Server;

/// A request in the version a policy wants to see.
pub struct Subject {
    pub object: Value,
    old: Value,
    request: Value,
    namespace: Value,
}

impl Subject {
    pub fn new(
        server: &Server,
        request: &Request<'_>,
        row: &'static Resource,
        object: &Value,
    ) -> Result<Subject, Status> {
        let object = told(request, row, object);
        let mut asked = request_of(request, row, &object);
        asked.remove("object");
        let old = asked.remove("oldObject").unwrap_or_default();
        let itself = (request.row.group, request.row.plural) == ("", "namespaces");
        let namespace = match request.namespace {
            "" => Value::Null,
            _ if itself => Value::Null,
            name => match server.get("", "namespaces", "", name) {
                Some(found) => found.value(),
                None => return Err(Status::not_found("", "namespaces", name)),
            },
        };
        Ok(Subject { object, old, request: asked.into(), namespace })
    }

    fn question(&self) -> Question {
        let resource = self.request.at("resource");
        Question {
            group: resource.text("group").to_owned(),
            resource: resource.text("resource").to_owned(),
            subresource: self.request.text("subResource").to_owned(),
            namespace: self.request.text("namespace").to_owned(),
            name: self.request.text("name").to_owned(),
            ..Question::default()
        }
    }
}

/// The variables of a policy's expressions, and those the policy composes, which live as long as this.
pub struct Sight<'a> {
    pub variables: Variables<'a>,
    composed: Arc<Composed<'a>>,
}

impl<'a> Sight<'a> {
    pub fn new(
        policy: &'a Policy,
        subject: &'a Subject,
        params: &'a Value,
        asking: &'a Asking<'a>,
    ) -> Sight<'a> {
        let check = |check| cel::Value::Library(Library::Check(check));
        let base = Variables::new()
            .with("object", cel::Value::from_json(&subject.object))
            .with("oldObject", cel::Value::from_json(&subject.old))
            .with("request", cel::Value::from_declared(&subject.request, &REQUEST))
            .with("namespaceObject", cel::Value::from_declared(&subject.namespace, &NAMESPACE))
            .with("params", cel::Value::from_json(params))
            .with("authorizer", check(Check::new(asking)))
            .with("authorizer.requestResource", check(Check::for_resource(asking, subject.question())));
        let composed = Arc::new(Composed {
            variables: &policy.variables,
            base,
            known: policy.variables.iter().map(|_| OnceLock::new()).collect(),
        });
        Sight { variables: composed.whole(), composed }
    }

    /// The value of an expression.
    pub fn see(&self, expression: &'a Expression, budget: &mut Budget) -> Result<cel::Value<'a>, Blind> {
        debug_assert!(Arc::strong_count(&self.composed) > 0, "what is composed outlives the expression");
        evaluate(expression, &self.variables, budget)
    }
}

/// Why an expression says nothing.
#[derive(Debug)]
pub enum Blind {
    /// Something is wrong with it.
    Wrong(String),
    /// All expressions together cost too much.
    Spent,
}

pub const OUT_OF_BUDGET: &str =
    "validation failed due to running out of cost budget, no further validation rules will be run";

impl Blind {
    pub fn message(self) -> String {
        match self {
            Blind::Wrong(message) => message,
            Blind::Spent => OUT_OF_BUDGET.to_owned(),
        }
    }
}

fn evaluate<'a>(
    expression: &'a Expression,
    variables: &Variables<'a>,
    budget: &mut Budget,
) -> Result<cel::Value<'a>, Blind> {
    let program = expression.as_ref().map_err(|error| Blind::Wrong(format!("compilation error: {error}")))?;
    let value = program.run(variables, budget);
    if budget.is_exhausted() {
        return Err(Blind::Spent);
    }
    value.map_err(|failure| {
        Blind::Wrong(format!("expression '{}' resulted in error: {failure}", program.source()))
    })
}

/// Variables that are worked out when they are first read, each once.
struct Composed<'a> {
    variables: &'a [(String, Expression)],
    base: Variables<'a>,
    known: Vec<OnceLock<Result<cel::Value<'a>, Failure>>>,
}

/// What expressions hold on to. It must not keep what it belongs to alive: a variable may be a part of itself.
struct Handle<'a>(Weak<Composed<'a>>);

impl<'a> Composed<'a> {
    fn whole(self: &Arc<Self>) -> Variables<'a> {
        let handle = Arc::new(Handle(Arc::downgrade(self)));
        self.base.clone().with("variables", cel::Value::Fields(handle))
    }

    fn compute(self: &Arc<Self>, index: usize, budget: &mut Budget) -> Result<cel::Value<'a>, Failure> {
        let variables = self.variables;
        let (name, expression) = &variables[index];
        let program = expression.as_ref().map_err(|error| {
            Failure::Error(format!("composited variable {name:?} fails to compile: {error}"))
        })?;
        program.run(&self.whole(), budget).map_err(|failure| {
            Failure::Error(format!("composited variable {name:?} fails to evaluate: {failure}"))
        })
    }
}

impl<'a> Fields<'a> for Handle<'a> {
    fn get(&self, name: &str, budget: &mut Budget) -> Option<Result<cel::Value<'a>, Failure>> {
        let composed = self.0.upgrade()?;
        let index = composed.variables.iter().position(|(known, _)| known == name)?;
        if let Some(known) = composed.known[index].get() {
            return Some(known.clone());
        }
        let value = composed.compute(index, budget);
        Some(composed.known[index].get_or_init(|| value).clone())
    }

    fn type_name(&self) -> &str {
        "kubernetes.variables"
    }
}
