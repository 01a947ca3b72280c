//! Environments, which declare variables and types, and the programs that are compiled in them.

use std::collections::{BTreeMap, HashMap};
use std::sync::Arc;

use crate::ast::{Ast, ExprKind, Id};
use crate::check::{Checked, check};
use crate::decl::Decl;
use crate::estimate::{self, Cost};
use crate::eval::{self, Budget, EvalError, Variables};
use crate::functions::{self, FunctionOp};
use crate::parser;
use crate::signatures::{self, Function};
use crate::source::Errors;
use crate::types::{Object, Type};
use crate::value::Value;

/// The variables, types and libraries that an expression may use. Functions are those of Kubernetes
/// v1.36.
#[derive(Clone, Debug, Default)]
pub struct Env {
    variables: HashMap<String, Arc<Decl>>,
    messages: BTreeMap<String, Arc<Object>>,
    /// The first segments of dynamic message names, such as `Object` in mutations.
    dynamic_packages: Vec<String>,
    enabled_libs: Vec<&'static str>,
}

impl Env {
    /// An environment without variables.
    pub fn new() -> Env {
        Env::default()
    }

    /// Adds a variable. Its name may contain dots.
    pub fn variable(mut self, name: &str, decl: impl Into<Decl>) -> Env {
        self.variables.insert(name.to_owned(), Arc::new(decl.into()));
        self
    }

    /// Adds a message type, of which expressions can create values: `Name{field: value}`.
    pub fn message_type(mut self, object: Object) -> Env {
        self.messages.insert(object.name.clone(), Arc::new(object));
        self
    }

    /// Adds the message types `name`, `name.a`, `name.a.b` and so on, which have arbitrary fields.
    pub fn dynamic_messages(mut self, name: &str) -> Env {
        self.dynamic_packages.push(name.to_owned());
        self
    }

    /// Enables an optional library: `jsonpatch`, or `bindings` for `cel.bind`.
    pub fn library(mut self, name: &'static str) -> Env {
        self.enabled_libs.push(name);
        self
    }

    /// Parses and type-checks an expression.
    pub fn compile(&self, source: &str) -> Result<Program, Errors> {
        let mut errors = Errors::new(source);
        let checked = parser::parse(source, self.enabled_libs.contains(&"bindings"), &mut errors)
            .and_then(|ast| check(self, ast, &mut errors));
        let Some(checked) = checked else { return Err(errors) };
        Ok(Program::new(source, checked, self.variables.clone()))
    }

    pub(crate) fn function(&self, name: &str) -> Option<&'static Function> {
        signatures::function(name)
            .filter(|function| function.library.is_empty() || self.enabled_libs.contains(&function.library))
    }

    pub(crate) fn ident(&self, name: &str) -> Option<Type> {
        let variable = self.variables.get(name).map(|decl| decl.ty.clone());
        variable.or_else(|| type_ident(name).map(|ty| Type::Type(Some(Arc::new(ty)))))
    }

    pub(crate) fn message(&self, name: &str) -> Option<Arc<Object>> {
        let name = name.strip_prefix('.').unwrap_or(name);
        let first = name.split('.').next().unwrap_or_default();
        self.messages.get(name).cloned().or_else(|| {
            self.dynamic_packages
                .iter()
                .any(|open| open == first)
                .then(|| Arc::new(Object { name: name.to_owned(), fields: BTreeMap::new(), open: true }))
        })
    }
}

/// Type identifiers, which expressions can compare with `type(x)`.
pub(crate) fn type_ident(name: &str) -> Option<Type> {
    Some(match name {
        "bool" => Type::Bool,
        "bytes" => Type::Bytes,
        "double" => Type::Double,
        "google.protobuf.Duration" => Type::Duration,
        "int" => Type::Int,
        "list" => Type::list(Type::Dyn),
        "map" => Type::map(Type::Dyn, Type::Dyn),
        "null_type" => Type::Null,
        "string" => Type::String,
        "google.protobuf.Timestamp" => Type::Timestamp,
        "type" => Type::Type(None),
        "uint" => Type::Uint,
        "optional_type" => Type::optional(Type::Dyn),
        "net.IP" => Type::opaque("net.IP"),
        "net.CIDR" => Type::opaque("net.CIDR"),
        _ => return None,
    })
}

/// A compiled expression. It can be evaluated any number of times, also concurrently.
pub struct Program {
    source: String,
    pub(crate) checked: Checked,
    functions: Vec<Option<FunctionOp>>,
    constant_exprs: Vec<bool>,
    variables: HashMap<String, Arc<Decl>>,
}

impl Program {
    fn new(source: &str, checked: Checked, variables: HashMap<String, Arc<Decl>>) -> Program {
        let ast = &checked.ast;
        let functions = ast.ids().map(|id| match ast.kind(id) {
            ExprKind::Call { function, .. } => functions::function_op(function),
            _ => None,
        });
        let functions = functions.collect();
        let is_constant_expr = find_constant_exprs(ast);
        Program { source: source.to_owned(), functions, constant_exprs: is_constant_expr, checked, variables }
    }

    /// The source of the expression.
    pub fn source(&self) -> &str {
        &self.source
    }

    /// The type of the result.
    pub fn output(&self) -> &Type {
        self.checked.ty(self.checked.ast.root)
    }

    /// Whether the expression references this variable.
    pub fn references_variable(&self, variable: &str) -> bool {
        let ast = &self.checked.ast;
        ast.ids().any(|id| matches!(ast.kind(id), ExprKind::Ident(name) if name == variable))
    }

    /// The minimum and maximum cost, estimated from the sizes that the variables' declarations allow.
    pub fn estimate(&self) -> Cost {
        estimate::estimate(&self.checked, &self.variables)
    }

    /// Evaluates the expression. The cost is subtracted from `budget`. One evaluation never costs more
    /// than [`PER_CALL_LIMIT`](crate::PER_CALL_LIMIT).
    pub fn run<'a>(&'a self, variables: &Variables<'a>, budget: &mut Budget) -> Result<Value<'a>, EvalError> {
        eval::run(self, variables, budget)
    }

    /// Whether the name refers to a type and not to a variable.
    pub(crate) fn is_type(&self, name: &str) -> bool {
        !self.variables.contains_key(name) && type_ident(name).is_some()
    }

    pub(crate) fn native(&self, id: Id) -> Option<FunctionOp> {
        self.functions[id as usize]
    }

    /// Whether a node is a list or map of literals, or the conversion of one. These cost nothing.
    pub(crate) fn is_constant(&self, id: Id) -> bool {
        self.constant_exprs[id as usize]
    }
}

fn find_constant_exprs(ast: &Ast) -> Vec<bool> {
    let mut is_constant_expr = vec![false; ast.len()];
    for id in ast.ids() {
        // Children are added before their parents, so their entries are final.
        is_constant_expr[id as usize] = match ast.kind(id) {
            ExprKind::List { items, optional } => {
                !optional.contains(&true)
                    && items.iter().all(|item| {
                        matches!(ast.kind(*item), ExprKind::Literal(_)) || is_constant_expr[*item as usize]
                    })
            }
            ExprKind::Map(entries) => entries.iter().all(|entry| {
                let is_constant_entry =
                    |id: Id| matches!(ast.kind(id), ExprKind::Literal(_)) || is_constant_expr[id as usize];
                !entry.optional && is_constant_entry(entry.key) && is_constant_entry(entry.value)
            }),
            ExprKind::Call { function, target: None, args } => {
                CONVERSIONS.contains(&function.as_str())
                    && matches!(args[..], [arg] if matches!(ast.kind(arg), ExprKind::Literal(_)) || is_constant_expr[arg as usize])
            }
            _ => false,
        };
    }
    is_constant_expr
}

/// Conversions of constants are constant, too.
const CONVERSIONS: &[&str] =
    &["bool", "bytes", "double", "duration", "dyn", "int", "string", "timestamp", "type", "uint"];

impl std::fmt::Debug for Program {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_struct("Program").field("source", &self.source).field("output", self.output()).finish()
    }
}
