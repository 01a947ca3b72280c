//! The CEL environments of admission policies and match conditions: the available variables and the
//! required result types. Used by validation and by the evaluation at request time.

use std::collections::BTreeMap;
use std::sync::LazyLock;

use cel::{Decl, Env, Field, Object, Program, Type};
use serde_json::Value;

use crate::json::JsonExt;

/// Variables that are only available in some expressions.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct OptionalVariables {
    /// `params`
    pub params: bool,
    /// `authorizer` and `authorizer.requestResource`
    pub authorizer: bool,
    /// `Object{…}`, `JSONPatch{…}` and `jsonpatch`
    pub patches: bool,
}

/// The `request` variable.
pub static REQUEST_DECL: LazyLock<Decl> = LazyLock::new(|| {
    let kind = || string_object("kubernetes.GroupVersionKind", &["group", "version", "kind"]);
    let resource = || string_object("kubernetes.GroupVersionResource", &["group", "version", "resource"]);
    let user = object(
        "kubernetes.UserInfo",
        vec![
            ("username", Type::String),
            ("uid", Type::String),
            ("groups", Type::list(Type::String)),
            ("extra", Type::map(Type::String, Type::list(Type::String))),
        ],
    );
    let request = object(
        "kubernetes.AdmissionRequest",
        vec![
            ("kind", kind()),
            ("resource", resource()),
            ("subResource", Type::String),
            ("requestKind", kind()),
            ("requestResource", resource()),
            ("requestSubResource", Type::String),
            ("name", Type::String),
            ("namespace", Type::String),
            ("operation", Type::String),
            ("userInfo", user),
            ("dryRun", Type::Bool),
            ("options", Type::Dyn),
        ],
    );
    request.into()
});

/// The `namespaceObject` variable.
pub static NAMESPACE_DECL: LazyLock<Decl> = LazyLock::new(|| {
    let list = || Type::list(Type::String);
    let map = || Type::map(Type::String, Type::String);
    let metadata = object(
        "kubernetes.NamespaceMetadata",
        vec![
            ("name", Type::String),
            ("generateName", Type::String),
            ("namespace", Type::String),
            ("labels", map()),
            ("annotations", map()),
            ("UID", Type::String),
            ("creationTimestamp", Type::Timestamp),
            ("deletionGracePeriodSeconds", Type::Int),
            ("deletionTimestamp", Type::Timestamp),
            ("generation", Type::Int),
            ("resourceVersion", Type::String),
            ("finalizers", list()),
        ],
    );
    let condition = object(
        "kubernetes.NamespaceCondition",
        vec![
            ("status", Type::String),
            ("type", Type::String),
            ("lastTransitionTime", Type::Timestamp),
            ("message", Type::String),
            ("reason", Type::String),
        ],
    );
    let status = vec![("conditions", Type::list(condition)), ("phase", Type::String)];
    let namespace = object(
        "kubernetes.Namespace",
        vec![
            ("metadata", metadata),
            ("spec", object("kubernetes.NamespaceSpec", vec![("finalizers", list())])),
            ("status", object("kubernetes.NamespaceStatus", status)),
        ],
    );
    namespace.into()
});

fn string_object(name: &str, fields: &[&'static str]) -> Type {
    object(name, fields.iter().map(|field| (*field, Type::String)).collect())
}

fn object(name: &str, fields: Vec<(&str, Type)>) -> Type {
    Type::object(name, fields.into_iter().map(|(name, ty)| (name.to_owned(), field(name, ty))).collect())
}

fn field(name: &str, ty: Type) -> Field {
    Field { property: name.to_owned(), decl: ty.into() }
}

/// The CEL environment of an admission expression.
pub fn base_env(optional_variables: OptionalVariables) -> Env {
    env_with_types(optional_variables, Type::Dyn, Type::Dyn)
}

/// Like [`env`], with known types of the object and the parameters.
pub fn env_with_types(
    optional_variables: OptionalVariables,
    object: impl Into<Decl> + Clone,
    params: impl Into<Decl>,
) -> Env {
    let mut env = Env::new()
        .variable("object", object.clone())
        .variable("oldObject", object)
        .variable("namespaceObject", NAMESPACE_DECL.clone())
        .variable("request", REQUEST_DECL.clone());
    if optional_variables.params {
        env = env.variable("params", params);
    }
    if optional_variables.authorizer {
        env = env
            .variable("authorizer", Type::opaque("kubernetes.authorization.Authorizer"))
            .variable("authorizer.requestResource", Type::opaque("kubernetes.authorization.ResourceCheck"));
    }
    if optional_variables.patches {
        let fields =
            [("op", Type::String), ("path", Type::String), ("from", Type::String), ("value", Type::Dyn)];
        let fields = fields.map(|(name, ty)| (name.to_owned(), field(name, ty)));
        let operation = Object { name: "JSONPatch".to_owned(), fields: fields.into(), open: false };
        env = env.message_type(operation).dynamic_messages("Object").library("jsonpatch");
    }
    env
}

/// The `variables` of a policy. Each variable may refer to the earlier ones.
#[derive(Clone, Debug, Default)]
pub struct CompositionEnv {
    fields: BTreeMap<String, Field>,
}

impl CompositionEnv {
    /// Compiles and adds a variable. If it does not compile, it is added with type `dyn`, so that later
    /// expressions can refer to it.
    pub fn add(&mut self, base: &Env, name: &str, expression: &str) -> Result<Program, String> {
        let program = compile(&self.env(base), expression, &[]);
        let ty = program.as_ref().map_or(Type::Dyn, |program| program.output().clone());
        self.fields.insert(name.to_owned(), field(name, ty));
        program
    }

    /// `base` with the variables added so far.
    pub fn env(&self, base: &Env) -> Env {
        base.clone().variable("variables", Type::object("kubernetes.variables", self.fields.clone()))
    }
}

/// Compiles an expression whose result must have one of these types. An empty list allows any type.
pub fn compile(env: &Env, expression: &str, allowed_types: &[Type]) -> Result<Program, String> {
    let program = env.compile(expression).map_err(|errors| format!("compilation failed: {errors}"))?;
    if allowed_types.is_empty() || allowed_types.contains(program.output()) {
        return Ok(program);
    }
    let found = type_name(program.output());
    Err(match allowed_types {
        [one] => format!("must evaluate to {} but got {found}", type_name(one)),
        many => {
            let many: Vec<String> = many.iter().map(type_name).collect();
            format!("must evaluate to one of [{}] but got {found}", many.join(" "))
        }
    })
}

/// The result type of the expression of a mutation.
pub fn patch_type(mutation: &Value) -> Type {
    let named = |name: &str| Type::object(name, BTreeMap::new());
    match mutation.text("patchType") {
        "JSONPatch" => Type::list(named("JSONPatch")),
        _ => named("Object"),
    }
}

/// The run-time name of a type, as in upstream's error messages.
fn type_name(ty: &Type) -> String {
    match ty {
        Type::List(item) => format!("list({})", type_name(item)),
        Type::Map(types) => format!("map({}, {})", type_name(&types.0), type_name(&types.1)),
        Type::Opaque(name, parameters) if !parameters.is_empty() => {
            let parameters: Vec<String> = parameters.iter().map(type_name).collect();
            format!("{name}({})", parameters.join(", "))
        }
        other => other.name().to_owned(),
    }
}
