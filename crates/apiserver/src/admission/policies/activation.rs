//! The CEL activation of a policy: its variables, and evaluation of its expressions.

use std::sync::{Arc, OnceLock, Weak};

use api::admissionregistration::expressions::{NAMESPACE_DECL, REQUEST_DECL};
use api::json::JsonExt as _;
use api::{Resource, Status};
use cel::{AuthorizationAttributes, AuthorizerCheck, Budget, EvalError, Fields, LibraryValue, Variables};
use serde_json::Value;

use super::authorizer::CelAuthorizer;
use super::config::{Expression, Policy};
use crate::admission::webhooks::{build_request, to_versioned};
use crate::admission::{Cluster as _, Request};
use crate::server::Server;

/// A request in the version of the policy.
pub struct VersionedRequest {
    pub object: Value,
    old: Value,
    request: Value,
    namespace: Value,
}

impl VersionedRequest {
    pub fn new(
        server: &Server,
        request: &Request<'_>,
        row: &'static Resource,
        object: &Value,
    ) -> Result<VersionedRequest, Status> {
        let object = to_versioned(request, row, object);
        let mut admission_request = build_request(request, row, &object);
        admission_request.remove("object");
        let old = admission_request.remove("oldObject").unwrap_or_default();
        let is_namespace = (request.row.group, request.row.plural) == ("", "namespaces");
        let namespace = match request.namespace {
            "" => Value::Null,
            _ if is_namespace => Value::Null,
            name => match server.get("", "namespaces", "", name) {
                Some(found) => found.value(),
                None => return Err(Status::not_found("", "namespaces", name)),
            },
        };
        Ok(VersionedRequest { object, old, request: admission_request.into(), namespace })
    }

    fn question(&self) -> AuthorizationAttributes {
        let resource = self.request.at("resource");
        AuthorizationAttributes {
            group: resource.text("group").to_owned(),
            resource: resource.text("resource").to_owned(),
            subresource: self.request.text("subResource").to_owned(),
            namespace: self.request.text("namespace").to_owned(),
            name: self.request.text("name").to_owned(),
            ..AuthorizationAttributes::default()
        }
    }
}

/// The variables of the expressions. Keeps the composed variables alive, which expressions only
/// hold weakly.
pub struct PolicyActivation<'a> {
    pub variables: Variables<'a>,
    lazy_variables: Arc<LazyVariables<'a>>,
}

impl<'a> PolicyActivation<'a> {
    pub fn new(
        policy: &'a Policy,
        versioned_request: &'a VersionedRequest,
        params: &'a Value,
        authorizer: &'a CelAuthorizer<'a>,
    ) -> PolicyActivation<'a> {
        let check = |check| cel::Value::Library(LibraryValue::Check(check));
        let base = Variables::new()
            .with("object", cel::Value::from_json(&versioned_request.object))
            .with("oldObject", cel::Value::from_json(&versioned_request.old))
            .with("request", cel::Value::from_declared(&versioned_request.request, &REQUEST_DECL))
            .with("namespaceObject", cel::Value::from_declared(&versioned_request.namespace, &NAMESPACE_DECL))
            .with("params", cel::Value::from_json(params))
            .with("authorizer", check(AuthorizerCheck::new(authorizer)))
            .with(
                "authorizer.requestResource",
                check(AuthorizerCheck::for_resource(authorizer, versioned_request.question())),
            );
        let lazy_variables = Arc::new(LazyVariables {
            variables: &policy.variables,
            base,
            cached: policy.variables.iter().map(|_| OnceLock::new()).collect(),
        });
        PolicyActivation { variables: lazy_variables.activation_variables(), lazy_variables }
    }

    /// Evaluates an expression.
    pub fn evaluate(
        &self,
        expression: &'a Expression,
        budget: &mut Budget,
    ) -> Result<cel::Value<'a>, EvaluationError> {
        debug_assert!(Arc::strong_count(&self.lazy_variables) > 0, "lazy variables outlive the expression");
        evaluate(expression, &self.variables, budget)
    }
}

/// Why an expression has no value.
#[derive(Debug)]
pub enum EvaluationError {
    /// Compile or runtime error.
    Invalid(String),
    /// The cost budget of all expressions together is exhausted.
    OutOfBudget,
}

pub const OUT_OF_BUDGET: &str =
    "validation failed due to running out of cost budget, no further validation rules will be run";

impl EvaluationError {
    pub fn message(self) -> String {
        match self {
            EvaluationError::Invalid(message) => message,
            EvaluationError::OutOfBudget => OUT_OF_BUDGET.to_owned(),
        }
    }
}

fn evaluate<'a>(
    expression: &'a Expression,
    variables: &Variables<'a>,
    budget: &mut Budget,
) -> Result<cel::Value<'a>, EvaluationError> {
    let program = expression
        .as_ref()
        .map_err(|error| EvaluationError::Invalid(format!("compilation error: {error}")))?;
    let value = program.run(variables, budget);
    if budget.is_exhausted() {
        return Err(EvaluationError::OutOfBudget);
    }
    value.map_err(|failure| {
        EvaluationError::Invalid(format!("expression '{}' resulted in error: {failure}", program.source()))
    })
}

/// `spec.variables`, each evaluated on first use and cached.
struct LazyVariables<'a> {
    variables: &'a [(String, Expression)],
    base: Variables<'a>,
    cached: Vec<OnceLock<Result<cel::Value<'a>, EvalError>>>,
}

/// The handle that expressions hold. It must be weak: a cached value may contain the handle, and a
/// strong reference would keep `LazyVariables` alive forever.
struct LazyVariablesRef<'a>(Weak<LazyVariables<'a>>);

impl<'a> LazyVariables<'a> {
    fn activation_variables(self: &Arc<Self>) -> Variables<'a> {
        let handle = Arc::new(LazyVariablesRef(Arc::downgrade(self)));
        self.base.clone().with("variables", cel::Value::Fields(handle))
    }

    fn compute(self: &Arc<Self>, index: usize, budget: &mut Budget) -> Result<cel::Value<'a>, EvalError> {
        let variables = self.variables;
        let (name, expression) = &variables[index];
        let program = expression.as_ref().map_err(|error| {
            EvalError::Error(format!("composited variable {name:?} fails to compile: {error}"))
        })?;
        program.run(&self.activation_variables(), budget).map_err(|failure| {
            EvalError::Error(format!("composited variable {name:?} fails to evaluate: {failure}"))
        })
    }
}

impl<'a> Fields<'a> for LazyVariablesRef<'a> {
    fn get(&self, name: &str, budget: &mut Budget) -> Option<Result<cel::Value<'a>, EvalError>> {
        let lazy_variables = self.0.upgrade()?;
        let index = lazy_variables.variables.iter().position(|(variable, _)| variable == name)?;
        if let Some(cached) = lazy_variables.cached[index].get() {
            return Some(cached.clone());
        }
        let value = lazy_variables.compute(index, budget);
        Some(lazy_variables.cached[index].get_or_init(|| value).clone())
    }

    fn type_name(&self) -> &str {
        "kubernetes.variables"
    }
}
