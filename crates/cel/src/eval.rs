//! The evaluator, which walks the checked tree. Errors in CEL behave like values (`false && error` is
//! false). They are propagated as `Err`, and logical operators and comprehensions absorb them.

pub(crate) mod budget;
mod comprehension;
pub(crate) mod cost;

use std::collections::{BTreeMap, HashMap};
use std::sync::Arc;

use crate::ast::{Entry, ExprKind, Id, Literal};
use crate::env::{Program, type_ident};
use crate::functions;
use crate::types::Type;
use crate::value::{Key, Map, Text, Value};
use budget::CostTracker;
pub use budget::{Budget, EvalError, MATCH_CONDITIONS_BUDGET, PER_CALL_LIMIT, RUNTIME_BUDGET};

pub(crate) type EvalResult<'a> = Result<Value<'a>, EvalError>;

/// The values of an environment's variables. Results may borrow from the program and from the
/// variables, so the program must be created before the variables.
#[derive(Clone, Default)]
pub struct Variables<'a> {
    values: Vec<(&'a str, Value<'a>)>,
}

impl<'a> Variables<'a> {
    /// No variables.
    pub fn new() -> Variables<'a> {
        Variables { values: Vec::new() }
    }

    /// Sets the value of a variable.
    pub fn set(&mut self, name: &'a str, value: Value<'a>) {
        match self.values.iter_mut().find(|(known, _)| *known == name) {
            Some((_, old)) => *old = value,
            None => self.values.push((name, value)),
        }
    }

    /// Adds a variable.
    pub fn with(mut self, name: &'a str, value: Value<'a>) -> Variables<'a> {
        self.set(name, value);
        self
    }

    fn get(&self, name: &str) -> Option<&Value<'a>> {
        self.values.iter().find(|(known, _)| *known == name).map(|(_, value)| value)
    }
}

struct Binding<'a> {
    name: &'a str,
    value: EvalResult<'a>,
}

pub(crate) struct Evaluator<'a, 'b> {
    program: &'a Program,
    variables: &'b Variables<'a>,
    activation: Vec<Binding<'a>>,
    constants: HashMap<Id, Value<'a>>,
    budget: &'b mut Budget,
    context: functions::EvalContext,
}

/// Evaluates a program and subtracts the cost from the budget.
pub(crate) fn run<'a>(
    program: &'a Program,
    variables: &Variables<'a>,
    budget: &mut Budget,
) -> EvalResult<'a> {
    let depth = budget.depth;
    let context = functions::EvalContext::new(CostTracker::new(PER_CALL_LIMIT));
    let mut evaluator =
        Evaluator { program, variables, activation: Vec::new(), constants: HashMap::new(), budget, context };
    let result = evaluator.eval(program.checked.ast.root);
    let cost = evaluator.context.cost_tracker.cost;
    budget.depth = depth;
    budget.subtract(cost);
    result
}

impl<'a> Evaluator<'a, '_> {
    fn eval(&mut self, id: Id) -> EvalResult<'a> {
        self.budget.enter()?;
        let value = self.eval_node(id);
        self.budget.leave();
        value
    }

    fn eval_node(&mut self, id: Id) -> EvalResult<'a> {
        match self.program.checked.ast.kind(id) {
            ExprKind::Unspecified => Err(EvalError::new("broken expression")),
            ExprKind::Literal(literal) => Ok(literal_value(literal)),
            ExprKind::Ident(name) => self.ident(name),
            ExprKind::Select { operand, field, test: true } => self.has(*operand, field),
            ExprKind::Select { operand, field, test: false } => {
                let operand = self.eval(*operand)?;
                self.add_cost(1)?;
                self.select(&operand, field)
            }
            ExprKind::Call { function, target, args } => self.call(id, function, *target, args),
            ExprKind::List { items, optional } => self.list(id, items, optional),
            ExprKind::Map(entries) => self.map(id, entries),
            ExprKind::Struct { name, fields } => {
                let mut values = BTreeMap::new();
                for field in fields {
                    let Some(value) = self.element(field.value, field.optional)? else { continue };
                    values.insert(Key::String(Text::Borrowed(&field.name)), value);
                }
                self.add_cost(cost::STRUCT_CREATE_BASE_COST)?;
                let name: Arc<str> = name.trim_start_matches('.').into();
                Ok(Value::Map(Map::Message(name, Arc::new(values))))
            }
            ExprKind::Comprehension(fold) => self.eval_comprehension(fold),
        }
    }

    fn add_cost(&mut self, cost: u64) -> Result<(), EvalError> {
        self.context.cost_tracker.add_cost(cost)
    }

    fn ident(&mut self, name: &'a str) -> EvalResult<'a> {
        if !self.program.is_type(name) {
            self.add_cost(1)?;
        }
        self.lookup(name)
    }

    fn lookup(&self, name: &'a str) -> EvalResult<'a> {
        if let Some(local) = self.activation.iter().rev().find(|local| local.name == name) {
            return local.value.clone();
        }
        let name = name.strip_prefix('.').unwrap_or(name);
        if let Some(value) = self.variables.get(name) {
            return Ok(value.clone());
        }
        match type_ident(name) {
            Some(ty) => Ok(Value::Type(ty)),
            None => Err(EvalError::new(format!("no such attribute(s): {name}"))),
        }
    }

    fn has(&mut self, operand: Id, field: &str) -> EvalResult<'a> {
        let operand = self.eval(operand)?;
        self.find(&operand, field).map(|found| Value::Bool(found.is_some()))
    }

    fn select(&mut self, operand: &Value<'a>, field: &str) -> EvalResult<'a> {
        if let Value::Optional(inner) = operand {
            return match inner {
                None => Ok(Value::Optional(None)),
                Some(inner) => Ok(Value::Optional(self.find(inner, field)?.map(Arc::new))),
            };
        }
        self.find(operand, field)?.ok_or_else(|| EvalError::new(format!("no such key: {field}")))
    }

    fn find(&mut self, operand: &Value<'a>, field: &str) -> Result<Option<Value<'a>>, EvalError> {
        match operand {
            Value::Map(map) => Ok(map.field(field)),
            Value::Fields(fields) => {
                let fields = fields.clone();
                fields.get(field, self.budget).transpose()
            }
            Value::Optional(Some(inner)) => self.find(inner, field),
            Value::Optional(None) => Ok(None),
            _ => Err(EvalError::new("no such overload")),
        }
    }

    fn call(&mut self, id: Id, function: &'a str, target: Option<Id>, args: &'a [Id]) -> EvalResult<'a> {
        match (function, args) {
            ("_&&_", [left, right]) => return self.logical_operator(*left, *right, false),
            ("_||_", [left, right]) => return self.logical_operator(*left, *right, true),
            ("_?_:_", [condition, truthy, falsy]) => {
                return match self.eval(*condition)? {
                    Value::Bool(true) => self.attribute(*truthy),
                    Value::Bool(false) => self.attribute(*falsy),
                    _ => Err(EvalError::new("no such overload")),
                };
            }
            ("@not_strictly_false", [arg]) => {
                let value = self.eval(*arg);
                self.add_cost(1)?;
                return match value {
                    Err(EvalError::CostLimitExceeded) => Err(EvalError::CostLimitExceeded),
                    value => Ok(Value::Bool(!matches!(value, Ok(Value::Bool(false))))),
                };
            }
            ("_?._", [operand, field]) => {
                let operand = self.eval(*operand)?;
                let ExprKind::Literal(Literal::String(field)) = self.program.checked.ast.kind(*field) else {
                    return Err(EvalError::new("no such overload"));
                };
                let found = self.find(&operand, field)?;
                self.add_cost(u64::from(found.is_some()))?;
                return Ok(Value::Optional(found.map(Arc::new)));
            }
            ("or" | "orValue", [other]) if target.is_some() => {
                let first = self.eval(target.unwrap_or_default())?;
                return match (function, first) {
                    ("or", value @ Value::Optional(Some(_))) => Ok(value),
                    ("orValue", Value::Optional(Some(value))) => Ok(Arc::unwrap_or_clone(value)),
                    (_, Value::Optional(None)) => self.eval(*other),
                    _ => Err(EvalError::new("no such overload")),
                };
            }
            ("@in", [item, list]) if self.program.is_constant(*list) => {
                let item = self.eval(*item)?;
                let list = self.eval(*list)?;
                return functions::contains(&mut self.context, &item, &list);
            }
            _ => {}
        }
        if self.program.is_constant(id) {
            return self.constant_call(id, args);
        }
        let mut values = Vec::with_capacity(args.len() + 1);
        let mut failure = None;
        for (index, arg) in target.iter().chain(args).enumerate() {
            let value = if index == 1 && function == "_[_]" { self.attribute(*arg) } else { self.eval(*arg) };
            match value {
                Ok(value) => values.push(value),
                Err(EvalError::CostLimitExceeded) => return Err(EvalError::CostLimitExceeded),
                Err(other) => {
                    // The call is charged although it does not take place, as upstream does.
                    values.push(Value::Null);
                    failure.get_or_insert(other);
                }
            }
        }
        let cost = cost::call_cost(function, &values, &mut self.context.cost_tracker)?;
        self.add_cost(cost)?;
        if let Some(failure) = failure {
            return Err(failure);
        }
        if let ("sum", [Value::List(list)]) = (function, &values[..])
            && list.is_empty()
        {
            return Ok(zero_value(self.program.checked.ty(id)));
        }
        let Some(native) = self.program.native(id) else {
            return Err(EvalError::new(format!("no such overload: {function}")));
        };
        native(&mut self.context, &values)
    }

    /// Evaluates a branch of a conditional or an index. A variable costs nothing here, because upstream
    /// treats it as part of the enclosing attribute.
    fn attribute(&mut self, id: Id) -> EvalResult<'a> {
        match self.program.checked.ast.kind(id) {
            ExprKind::Ident(name) => self.lookup(name),
            _ => self.eval(id),
        }
    }

    fn constant_call(&mut self, id: Id, args: &'a [Id]) -> EvalResult<'a> {
        if let Some(value) = self.constants.get(&id) {
            return Ok(value.clone());
        }
        let Some(native) = self.program.native(id) else { return Err(EvalError::new("no such overload")) };
        let arg = self.eval(args[0])?;
        let value = native(&mut self.context, &[arg])?;
        self.constants.insert(id, value.clone());
        Ok(value)
    }

    /// Evaluates `&&` (false decides) and `||` (true decides). An error counts only if the other side
    /// does not decide.
    fn logical_operator(&mut self, left: Id, right: Id, decisive: bool) -> EvalResult<'a> {
        let left = self.eval(left);
        match left {
            Ok(Value::Bool(value)) if value == decisive => return left,
            Err(EvalError::CostLimitExceeded) => return left,
            _ => {}
        }
        let right = self.eval(right);
        match (&left, &right) {
            (_, Ok(Value::Bool(value))) if *value == decisive => right,
            (_, Err(EvalError::CostLimitExceeded)) => right,
            (Ok(Value::Bool(_)), Ok(Value::Bool(_))) => right,
            (Err(_), _) => left,
            (_, Err(_)) => right,
            _ => Err(EvalError::new("no such overload")),
        }
    }

    fn list(&mut self, id: Id, items: &'a [Id], optional: &[bool]) -> EvalResult<'a> {
        let constant = self.program.is_constant(id);
        if constant && let Some(value) = self.constants.get(&id) {
            return Ok(value.clone());
        }
        let mut values = Vec::with_capacity(items.len());
        for (item, optional) in items.iter().zip(optional) {
            values.extend(self.element(*item, *optional)?);
        }
        self.context.cost_tracker.add_values(values.len())?;
        let value = Value::list(values);
        if constant {
            self.constants.insert(id, value.clone());
        } else {
            self.add_cost(cost::LIST_CREATE_BASE_COST)?;
        }
        Ok(value)
    }

    fn map(&mut self, id: Id, entries: &'a [Entry]) -> EvalResult<'a> {
        let constant = self.program.is_constant(id);
        if constant && let Some(value) = self.constants.get(&id) {
            return Ok(value.clone());
        }
        let mut map = BTreeMap::new();
        for entry in entries {
            let key = self.eval(entry.key)?;
            let Some(value) = self.element(entry.value, entry.optional)? else { continue };
            let Some(key) = Key::of(&key) else {
                return Err(EvalError::new(format!("unsupported key type: {}", key.type_of().name())));
            };
            if map.insert(key, value).is_some() {
                return Err(EvalError::new("Failed with repeated key"));
            }
        }
        self.context.cost_tracker.add_values(map.len() * 2)?;
        let value = Value::Map(Map::Shared(Arc::new(map)));
        if constant {
            self.constants.insert(id, value.clone());
        } else {
            self.add_cost(cost::MAP_CREATE_BASE_COST)?;
        }
        Ok(value)
    }

    /// Evaluates an element of a literal. `None` for an optional element without a value.
    fn element(&mut self, id: Id, optional: bool) -> Result<Option<Value<'a>>, EvalError> {
        let value = self.eval(id)?;
        match value {
            Value::Optional(inner) if optional => Ok(inner.map(Arc::unwrap_or_clone)),
            other if optional => {
                let words =
                    format!("cannot initialize optional list element from non-optional value {other:?}");
                Err(EvalError::new(words))
            }
            value => Ok(Some(value)),
        }
    }

    fn items(&mut self, range: &Value<'a>, two: bool) -> Result<Vec<(Value<'a>, Value<'a>)>, EvalError> {
        match range {
            Value::List(list) => {
                self.context.cost_tracker.add_steps(list.len() as u64)?;
                let items = list.iter().enumerate();
                Ok(items
                    .map(
                        |(index, item)| {
                            if two { (Value::Int(index as i64), item) } else { (item, Value::Null) }
                        },
                    )
                    .collect())
            }
            Value::Map(map) => {
                self.context.cost_tracker.add_steps(map.len() as u64)?;
                Ok(map.entries())
            }
            other => Err(EvalError::new(format!("got '{}', expected iterable type", other.type_of().name()))),
        }
    }
}

/// The sum of an empty list has no value to take its type from, so the checked type determines it.
fn zero_value<'a>(ty: &Type) -> Value<'a> {
    match ty {
        Type::Uint => Value::Uint(0),
        Type::Double => Value::Double(0.0),
        Type::Duration => Value::Duration(0),
        _ => Value::Int(0),
    }
}

fn literal_value(literal: &Literal) -> Value<'_> {
    match literal {
        Literal::Null => Value::Null,
        Literal::Bool(value) => Value::Bool(*value),
        Literal::Int(value) => Value::Int(*value),
        Literal::Uint(value) => Value::Uint(*value),
        Literal::Double(value) => Value::Double(*value),
        Literal::String(text) => Value::String(Text::Borrowed(text)),
        Literal::Bytes(bytes) => Value::Bytes(bytes.as_slice().into()),
    }
}
