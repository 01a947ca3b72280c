//! Compiled policies and bindings.

use api::admissionregistration::expressions::{self, CompositionEnv, OptionalVariables, compile};
use api::json::JsonExt as _;
use api::selector::LabelSelector;
use cel::{Program, Type};
use serde_json::Value;

use crate::admission::webhooks::{Rule, rule};

/// A compiled expression, or its compile error.
pub type Expression = Result<Program, String>;

pub struct Policy {
    pub name: String,
    pub fails_open: bool,
    pub match_resources: Option<MatchResources>,
    /// apiVersion and kind of `paramKind`.
    pub param_kind: Option<(String, String)>,
    pub conditions: Vec<Expression>,
    pub variables: Vec<(String, Expression)>,
    pub validations: Vec<Validation>,
    /// Audit annotations: key and value expression.
    pub annotations: Vec<(String, Expression)>,
    pub mutations: Vec<Mutation>,
    pub reinvoke: bool,
}

pub struct Validation {
    pub source: String,
    pub expression: Expression,
    pub message: String,
    pub message_expression: Option<Expression>,
    pub reason: String,
}

pub struct Mutation {
    pub expression: Expression,
    /// `JSONPatch`; otherwise `ApplyConfiguration`.
    pub is_patch: bool,
}

pub struct Binding {
    pub name: String,
    pub policy: String,
    pub match_resources: Option<MatchResources>,
    pub params: Option<ParamRef>,
    pub actions: Vec<String>,
}

pub struct ParamRef {
    pub name: String,
    pub namespace: String,
    pub selector: Option<LabelSelector>,
    /// `parameterNotFoundAction: Deny`.
    pub required: bool,
}

/// `MatchResources`: which requests a policy or binding applies to.
pub struct MatchResources {
    pub namespaces: LabelSelector,
    pub objects: LabelSelector,
    pub rules: Vec<NamedRule>,
    pub excluded: Vec<NamedRule>,
    /// `matchPolicy: Exact`.
    pub exact: bool,
}

/// A `NamedRuleWithOperations`; no names means all names.
pub struct NamedRule {
    pub rule: Rule,
    pub names: Vec<String>,
}

impl Policy {
    pub fn compile(object: &Value) -> Policy {
        let spec = object.at("spec");
        let params = spec.has("paramKind");
        let names = OptionalVariables { params, authorizer: true, patches: false };
        let env = expressions::base_env(names);
        let conditions = spec.items("matchConditions").iter();
        let conditions = conditions.map(|one| compile(&env, one.text("expression").trim(), &[Type::Bool]));
        let mut variables_env = CompositionEnv::default();
        let variables = spec.items("variables").iter().map(|variable| {
            let name = variable.text("name");
            (name.to_owned(), variables_env.add(&env, name, variable.text("expression")))
        });
        let variables = variables.collect();
        let full_env = variables_env.env(&env);
        let message_env =
            variables_env.env(&expressions::base_env(OptionalVariables { authorizer: false, ..names }));
        let patch_env =
            variables_env.env(&expressions::base_env(OptionalVariables { patches: true, ..names }));
        let validations = spec.items("validations").iter().map(|validation| Validation {
            source: validation.text("expression").to_owned(),
            expression: compile(&full_env, validation.text("expression"), &[Type::Bool]),
            message: validation.text("message").to_owned(),
            message_expression: Some(validation.text("messageExpression"))
                .filter(|text| !text.is_empty())
                .map(|text| compile(&message_env, text, &[Type::String])),
            reason: validation.text("reason").to_owned(),
        });
        let annotations = spec.items("auditAnnotations").iter().map(|annotation| {
            let expression = annotation.text("valueExpression").trim();
            let program = compile(&full_env, expression, &[Type::String, Type::Null]);
            (annotation.text("key").to_owned(), program)
        });
        let mutations = spec.items("mutations").iter().map(|mutation| {
            let is_patch = mutation.text("patchType") == "JSONPatch";
            let field = if is_patch { "jsonPatch" } else { "applyConfiguration" };
            let expected_type = expressions::patch_type(mutation);
            Mutation {
                expression: compile(&patch_env, mutation.at(field).text("expression"), &[expected_type]),
                is_patch,
            }
        });
        let param_kind = spec.at("paramKind");
        Policy {
            name: object.at("metadata").text("name").to_owned(),
            fails_open: spec.text("failurePolicy") == "Ignore",
            match_resources: match_resources(spec.at("matchConstraints")),
            param_kind: params
                .then(|| (param_kind.text("apiVersion").to_owned(), param_kind.text("kind").to_owned())),
            conditions: conditions.collect(),
            variables,
            validations: validations.collect(),
            annotations: annotations.collect(),
            mutations: mutations.collect(),
            reinvoke: spec.text("reinvocationPolicy") == "IfNeeded",
        }
    }
}

impl Binding {
    pub fn read(object: &Value) -> Binding {
        let spec = object.at("spec");
        let reference = spec.at("paramRef");
        let params = spec.has("paramRef").then(|| ParamRef {
            name: reference.text("name").to_owned(),
            namespace: reference.text("namespace").to_owned(),
            selector: reference.has("selector").then(|| selector(reference.at("selector"))),
            required: reference.text("parameterNotFoundAction") == "Deny",
        });
        let actions = spec.items("validationActions").iter().filter_map(Value::as_str).map(str::to_owned);
        Binding {
            name: object.at("metadata").text("name").to_owned(),
            policy: spec.text("policyName").to_owned(),
            match_resources: match_resources(spec.at("matchResources")),
            params,
            actions: actions.collect(),
        }
    }
}

fn match_resources(value: &Value) -> Option<MatchResources> {
    let rules = |field: &str| {
        let rules = value.items(field).iter().map(|named| {
            let names = named.items("resourceNames").iter().filter_map(Value::as_str).map(str::to_owned);
            NamedRule { rule: rule(named), names: names.collect() }
        });
        rules.collect()
    };
    value.is_object().then(|| MatchResources {
        namespaces: selector(value.at("namespaceSelector")),
        objects: selector(value.at("objectSelector")),
        rules: rules("resourceRules"),
        excluded: rules("excludeResourceRules"),
        exact: value.text("matchPolicy") != "Equivalent",
    })
}

/// Validation has checked the selectors; one that cannot be parsed selects nothing.
fn selector(value: &Value) -> LabelSelector {
    match value {
        Value::Null => LabelSelector::everything(),
        given => LabelSelector::from_value(given).unwrap_or_else(|_| LabelSelector::nothing()),
    }
}
