//! The type checker: determines the type of every node and the overloads of every call, and reports
//! errors in cel-go's format. Upstream: `checker` in github.com/google/cel-go.

mod type_mapping;

use std::sync::Arc;

use crate::ast::{Ast, Comprehension, ExprKind, Id, Literal};
use crate::env::Env;
use crate::functions::regex;
use crate::signatures::{Function, Overload};
use crate::source::Errors;
use crate::time;
use crate::types::Type;
use type_mapping::{TypeMapping, more_general};

/// The maximum number of parts of a type. Types in real expressions have few.
const MAX_TYPE_SIZE: usize = 500;

/// A type-checked expression.
#[derive(Debug)]
pub(crate) struct Checked {
    pub ast: Ast,
    types: Vec<Type>,
    overloads: Vec<Vec<&'static Overload>>,
}

impl Checked {
    pub fn ty(&self, id: Id) -> &Type {
        &self.types[id as usize]
    }

    pub fn overloads(&self, id: Id) -> &[&'static Overload] {
        &self.overloads[id as usize]
    }
}

pub(crate) fn check(env: &Env, ast: Ast, errors: &mut Errors) -> Option<Checked> {
    let count = ast.len();
    let mut checker = Checker {
        env,
        ast,
        errors,
        types: vec![None; count],
        overloads: vec![Vec::new(); count],
        scope: Vec::new(),
        type_mapping: TypeMapping::default(),
    };
    let root = checker.ast.root;
    checker.check(root);
    if checker.errors.is_empty() {
        checker.check_literals();
        checker.check_elements();
    }
    if !checker.errors.is_empty() {
        return None;
    }
    let Checker { ast, types, overloads, type_mapping, .. } = checker;
    let types = types.into_iter().map(|ty| ty.map_or(Type::Dyn, |ty| type_mapping.apply(&ty, true)));
    Some(Checked { ast, types: types.collect(), overloads })
}

struct Checker<'a> {
    env: &'a Env,
    ast: Ast,
    errors: &'a mut Errors,
    types: Vec<Option<Type>>,
    overloads: Vec<Vec<&'static Overload>>,
    /// The variables of enclosing comprehensions, innermost last.
    scope: Vec<(String, Type)>,
    type_mapping: TypeMapping,
}

impl Checker<'_> {
    /// Returns the type of a node. Macros reference some nodes twice, always in the same scope, so each
    /// node is checked only once.
    fn check(&mut self, id: Id) -> Type {
        if let Some(ty) = &self.types[id as usize] {
            return ty.clone();
        }
        let mut ty = self.check_expr(id);
        if ty.exceeds_size(MAX_TYPE_SIZE) {
            // Nested `[1].map(v, {v: v})` doubles the type in each step.
            self.report_error(id, "the type of the expression is too large".to_owned());
            ty = Type::Error;
        }
        self.types[id as usize] = Some(ty.clone());
        ty
    }

    fn check_expr(&mut self, id: Id) -> Type {
        // A node may be replaced with another kind (a select with an identifier), so it is taken out
        // while it is checked.
        let kind = self.ast.take(id);
        let (kind, ty) = match kind {
            ExprKind::Unspecified => (ExprKind::Unspecified, Type::Error),
            ExprKind::Literal(literal) => {
                let ty = literal_type(&literal);
                (ExprKind::Literal(literal), ty)
            }
            ExprKind::Ident(name) => {
                let ty = self.lookup(&name).unwrap_or_else(|| self.report_unknown(id, &name));
                (ExprKind::Ident(name), ty)
            }
            ExprKind::Select { operand, field, test } => self.select(id, operand, field, test),
            ExprKind::Call { function, target, args } => self.call(id, function, target, args),
            ExprKind::List { items, optional } => {
                let ty = self.check_list(&items, &optional);
                (ExprKind::List { items, optional }, ty)
            }
            ExprKind::Map(entries) => {
                let (mut key_type, mut value_type) = (None, None);
                for entry in &entries {
                    let key = self.check(entry.key);
                    key_type = Some(self.join_types(key_type, key));
                    let value = self.check(entry.value);
                    let value =
                        if entry.optional { self.unwrap_optional_type(entry.value, &value) } else { value };
                    value_type = Some(self.join_types(value_type, value));
                }
                let key = key_type.unwrap_or_else(|| self.type_mapping.new_type_var());
                let value = value_type.unwrap_or_else(|| self.type_mapping.new_type_var());
                (ExprKind::Map(entries), Type::map(key, value))
            }
            ExprKind::Struct { name, fields } => self.check_message(id, name, fields),
            ExprKind::Comprehension(comprehension) => {
                let ty = self.check_comprehension(&comprehension);
                (ExprKind::Comprehension(comprehension), ty)
            }
        };
        self.ast.set(id, kind);
        ty
    }

    fn select(&mut self, id: Id, operand: Id, field: String, test: bool) -> (ExprKind, Type) {
        // A dotted name may refer to a variable with dots in its name, which takes precedence over the
        // selection of a field.
        if !test && let Some(prefix) = self.ast.qualified_name(operand) {
            let name = format!("{prefix}.{field}");
            if let Some(ty) = self.lookup(&name) {
                return (ExprKind::Ident(name), ty);
            }
        }
        let ty = self.select_field(id, operand, &field, false);
        let ty = if test { Type::Bool } else { self.type_mapping.apply(&ty, false) };
        (ExprKind::Select { operand, field, test }, ty)
    }

    fn select_field(&mut self, id: Id, operand: Id, field: &str, optional: bool) -> Type {
        let operand = self.check(operand);
        let operand = self.type_mapping.apply(&operand, false);
        let (target, was_optional) = operand.unwrap_optional();
        let result = match &target {
            Type::Map(types) => types.1.clone(),
            Type::Object(object) => match object.field(field) {
                Some(found) => found.decl.ty.clone(),
                None if object.open => Type::Dyn,
                None => {
                    self.report_error(id, format!("undefined field '{field}'"));
                    Type::Error
                }
            },
            Type::Param(_) => {
                self.type_mapping.assignable(&Type::Dyn, &target);
                Type::Dyn
            }
            Type::Dyn | Type::Error => Type::Dyn,
            _ => {
                self.report_error(id, format!("type '{target}' does not support field selection"));
                Type::Dyn
            }
        };
        if optional || was_optional { Type::optional(result) } else { result }
    }

    fn call(&mut self, id: Id, function: String, target: Option<Id>, args: Vec<Id>) -> (ExprKind, Type) {
        if function == "_?._" {
            let ty = match (self.ast.kind(args[1]), args[0]) {
                (ExprKind::Literal(Literal::String(field)), operand) => {
                    let field = field.clone();
                    self.check(args[1]);
                    self.select_field(id, operand, &field, true)
                }
                _ => Type::Error,
            };
            let ty = self.type_mapping.apply(&ty, false);
            return (ExprKind::Call { function, target, args }, ty);
        }
        for arg in &args {
            self.check(*arg);
        }
        let namespaced = target
            .and_then(|target| self.ast.qualified_name(target))
            .map(|prefix| format!("{prefix}.{function}"))
            .and_then(|name| self.env.function(&name));
        let (found, target) = match (namespaced, target) {
            (Some(found), _) => (Some(found), None),
            (None, Some(target)) => {
                self.check(target);
                (self.env.function(&function), Some(target))
            }
            (None, None) => (self.env.function(&function), None),
        };
        let Some(found) = found else {
            let ty = self.report_unknown(id, &function);
            return (ExprKind::Call { function, target, args }, ty);
        };
        let ty = self.resolve_overload(id, found, target, &args);
        (ExprKind::Call { function: found.name.to_owned(), target, args }, ty)
    }

    fn resolve_overload(
        &mut self,
        id: Id,
        function: &'static Function,
        target: Option<Id>,
        args: &[Id],
    ) -> Type {
        let types: Vec<Type> = target.iter().chain(args).map(|arg| self.check(*arg)).collect();
        if matches!(function.name, "_&&_" | "_||_") {
            self.overloads[id as usize] = function.overloads.iter().collect();
            let mut result = Type::Bool;
            for (arg, ty) in args.iter().zip(&types) {
                if !self.type_mapping.assignable(ty, &Type::Bool) {
                    self.mismatch(*arg, &Type::Bool, ty);
                    result = Type::Error;
                }
            }
            return result;
        }
        let mut result: Option<Type> = None;
        for overload in function.overloads.iter().filter(|overload| overload.member == target.is_some()) {
            let (arg_types, result_type) = self.with_fresh_type_params(overload);
            if !self.type_mapping.all_assignable(&types, &arg_types) {
                continue;
            }
            self.overloads[id as usize].push(overload);
            let result_type = self.type_mapping.apply(&result_type, false);
            result = Some(match result {
                None => result_type,
                Some(result) if result.is_dyn() || result == result_type => result,
                Some(_) => Type::Dyn,
            });
        }
        result.unwrap_or_else(|| {
            let types: Vec<String> =
                types.iter().map(|ty| self.type_mapping.apply(ty, true).to_string()).collect();
            let signature = match target {
                Some(_) => format!("{}.({})", types[0], types[1..].join(", ")),
                None => format!("({})", types.join(", ")),
            };
            self.report_error(
                id,
                format!("found no matching overload for '{}' applied to '{signature}'", function.name),
            );
            Type::Error
        })
    }

    /// Returns the signature with new type variables in place of its type parameters.
    fn with_fresh_type_params(&mut self, overload: &Overload) -> (Vec<Type>, Type) {
        if !overload.generic {
            return (overload.args.clone(), overload.result.clone());
        }
        let mut names: Vec<(Arc<str>, Type)> = Vec::new();
        let args = overload.args.iter().map(|arg| self.replace_type_params(arg, &mut names)).collect();
        (args, self.replace_type_params(&overload.result, &mut names))
    }

    fn replace_type_params(&mut self, ty: &Type, names: &mut Vec<(Arc<str>, Type)>) -> Type {
        match ty {
            Type::Param(name) => match names.iter().find(|(known, _)| known == name) {
                Some((_, variable)) => variable.clone(),
                None => {
                    let variable = self.type_mapping.new_type_var();
                    names.push((name.clone(), variable.clone()));
                    variable
                }
            },
            Type::List(item) => Type::list(self.replace_type_params(item, names)),
            Type::Map(types) => Type::map(
                self.replace_type_params(&types.0, names),
                self.replace_type_params(&types.1, names),
            ),
            Type::Opaque(name, parameters) => Type::Opaque(
                name,
                parameters.iter().map(|parameter| self.replace_type_params(parameter, names)).collect(),
            ),
            Type::Type(Some(inner)) => Type::Type(Some(Arc::new(self.replace_type_params(inner, names)))),
            _ => ty.clone(),
        }
    }

    fn check_list(&mut self, items: &[Id], optional: &[bool]) -> Type {
        let mut joined = None;
        for (item, optional) in items.iter().zip(optional) {
            let ty = self.check(*item);
            let ty = if *optional { self.unwrap_optional_type(*item, &ty) } else { ty };
            joined = Some(self.join_types(joined, ty));
        }
        Type::list(joined.unwrap_or_else(|| self.type_mapping.new_type_var()))
    }

    fn check_message(&mut self, id: Id, name: String, fields: Vec<crate::ast::Field>) -> (ExprKind, Type) {
        let Some(object) = self.env.message(&name) else {
            let ty = match self.lookup(&name) {
                Some(Type::Type(_)) => {
                    self.report_error(id, format!("'{name}' is not a message type"));
                    Type::Error
                }
                Some(ty) => {
                    self.report_error(id, format!("'{ty}' is not a type"));
                    Type::Error
                }
                None => self.report_unknown(id, &name),
            };
            return (ExprKind::Struct { name, fields }, ty);
        };
        for field in &fields {
            let value = self.check(field.value);
            let value = if field.optional { self.unwrap_optional_type(field.value, &value) } else { value };
            let field_type = match object.fields.get(&field.name) {
                Some(found) => found.decl.ty.clone(),
                None if object.open => Type::Dyn,
                None => {
                    self.errors.report(Some(field.offset), format!("undefined field '{}'", field.name));
                    Type::Error
                }
            };
            if !self.type_mapping.assignable(&field_type, &value) {
                let value = self.type_mapping.apply(&value, true);
                let message = format!(
                    "expected type of field '{}' is '{field_type}' but provided type is '{value}'",
                    field.name
                );
                self.errors.report(Some(field.offset), message);
            }
        }
        (ExprKind::Struct { name, fields }, Type::Object(object))
    }

    fn check_comprehension(&mut self, comprehension: &Comprehension) -> Type {
        let range = self.check(comprehension.iter_range);
        let accu_type = self.check(comprehension.accu_init);
        let range = self.type_mapping.apply(&range, false);
        let depth = self.scope.len();
        self.scope.push((comprehension.accu_var.clone(), accu_type.clone()));
        let two = comprehension.iter_var2.is_some();
        let (first, second) = match &range {
            Type::List(item) if two => (Type::Int, (**item).clone()),
            Type::List(item) => ((**item).clone(), Type::Dyn),
            Type::Map(types) => (types.0.clone(), types.1.clone()),
            Type::Dyn | Type::Error | Type::Param(_) => {
                self.type_mapping.assignable(&Type::Dyn, &range);
                (Type::Dyn, Type::Dyn)
            }
            _ => {
                let message = format!(
                    "expression of type '{range}' cannot be range of a comprehension (must be list, map, or dynamic)"
                );
                self.report_error(comprehension.iter_range, message);
                (Type::Error, Type::Error)
            }
        };
        self.scope.push((comprehension.iter_var.clone(), first));
        if let Some(name) = &comprehension.iter_var2 {
            self.scope.push((name.clone(), second));
        }
        self.expect_type(comprehension.loop_condition, &Type::Bool);
        self.expect_type(comprehension.loop_step, &accu_type);
        self.scope.truncate(depth + 1);
        let result = self.check(comprehension.result);
        self.scope.truncate(depth);
        self.type_mapping.apply(&result, false)
    }

    fn expect_type(&mut self, id: Id, expected: &Type) {
        let found = self.check(id);
        if !self.type_mapping.assignable(expected, &found) {
            self.mismatch(id, expected, &found);
        }
    }

    fn unwrap_optional_type(&mut self, id: Id, ty: &Type) -> Type {
        let (inner, optional) = ty.unwrap_optional();
        if !optional && !inner.is_dyn() {
            self.mismatch(id, &Type::optional(inner.clone()), &inner);
        }
        inner
    }

    fn join_types(&mut self, previous: Option<Type>, current: Type) -> Type {
        let Some(previous) = previous else { return current };
        if self.type_mapping.assignable(&previous, &current) {
            return more_general(&previous, &current);
        }
        Type::Dyn
    }

    /// The elements of list and map literals must have one type, except in the arguments of `format`.
    fn check_elements(&mut self) {
        let mut seen = vec![false; self.ast.len() * 2];
        let mut pending = vec![(self.ast.root, false)];
        let mut type_errors = Vec::new();
        while let Some((id, exempt)) = pending.pop() {
            if std::mem::replace(&mut seen[id as usize * 2 + usize::from(exempt)], true) {
                continue;
            }
            let kind = self.ast.kind(id);
            let exempt = exempt || matches!(kind, ExprKind::Call { function, .. } if function == "format");
            pending.extend(self.ast.children(kind).map(|child| (child, exempt)));
            match kind {
                _ if exempt => {}
                ExprKind::List { items, optional } => {
                    let types = items.iter().zip(optional).map(|(item, optional)| (*item, *optional));
                    type_errors.extend(self.first_type_mismatch(types));
                }
                ExprKind::Map(entries) => {
                    type_errors
                        .extend(self.first_type_mismatch(entries.iter().map(|entry| (entry.key, false))));
                    type_errors.extend(
                        self.first_type_mismatch(entries.iter().map(|entry| (entry.value, entry.optional))),
                    );
                }
                _ => {}
            }
        }
        for (id, expected, found) in type_errors {
            self.mismatch(id, &expected, &found);
        }
    }

    fn first_type_mismatch(&self, elements: impl Iterator<Item = (Id, bool)>) -> Option<(Id, Type, Type)> {
        let mut elements = elements.map(|(id, optional)| {
            let ty =
                self.types[id as usize].as_ref().map_or(Type::Dyn, |ty| self.type_mapping.apply(ty, true));
            (id, if optional { ty.unwrap_optional().0 } else { ty })
        });
        let (_, first) = elements.next()?;
        elements.find(|(_, ty)| *ty != first).map(|(id, ty)| (id, first, ty))
    }

    fn lookup(&self, name: &str) -> Option<Type> {
        let name = name.strip_prefix('.').unwrap_or(name);
        let local = self.scope.iter().rev().find(|(known, _)| known == name).map(|(_, ty)| ty.clone());
        local.or_else(|| self.env.ident(name))
    }

    /// Validates literal arguments of functions that parse them: durations, timestamps and regular
    /// expressions.
    fn check_literals(&mut self) {
        for id in self.ast.ids() {
            let ExprKind::Call { function, args, .. } = self.ast.kind(id) else { continue };
            let [arg] = args[..] else { continue };
            let ExprKind::Literal(literal) = self.ast.kind(arg) else { continue };
            let is_valid = match (function.as_str(), literal) {
                ("duration", Literal::String(text)) => time::parse_duration(text).is_some(),
                ("timestamp", Literal::String(text)) => time::parse_timestamp(text).is_some(),
                ("timestamp", Literal::Int(seconds)) => time::from_second(*seconds).is_some(),
                ("matches", Literal::String(text)) => regex::compile_in_expression(text).is_ok(),
                _ => true,
            };
            if !is_valid {
                let message = format!("invalid {function} argument");
                self.report_error(arg, message);
            }
        }
    }

    fn report_unknown(&mut self, id: Id, name: &str) -> Type {
        self.report_error(id, format!("undeclared reference to '{name}' (in container '')"));
        Type::Error
    }

    fn mismatch(&mut self, id: Id, expected: &Type, found: &Type) {
        self.report_error(id, format!("expected type '{expected}' but found '{found}'"));
    }

    fn report_error(&mut self, id: Id, message: String) {
        let at = self.ast.node(id).offset;
        self.errors.report(Some(at), message);
    }
}

fn literal_type(literal: &Literal) -> Type {
    match literal {
        Literal::Null => Type::Null,
        Literal::Bool(_) => Type::Bool,
        Literal::Int(_) => Type::Int,
        Literal::Uint(_) => Type::Uint,
        Literal::Double(_) => Type::Double,
        Literal::String(_) => Type::String,
        Literal::Bytes(_) => Type::Bytes,
    }
}
