//! The type checker: gives every node a type and every call its overloads, or complains as cel-go does.

mod unify;

use std::sync::Arc;

use crate::ast::{Ast, Fold, Id, Kind, Literal};
use crate::env::Env;
use crate::functions::regex;
use crate::signatures::{Function, Overload};
use crate::source::Errors;
use crate::time;
use crate::types::Type;
use unify::{Substitution, more_general};

/// Parts of a type; those that people write have a few.
const LARGEST_TYPE: usize = 500;

/// What the checker found out.
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
        locals: Vec::new(),
        substitution: Substitution::default(),
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
    let Checker { ast, types, overloads, substitution, .. } = checker;
    let types = types.into_iter().map(|ty| ty.map_or(Type::Dyn, |ty| substitution.apply(&ty, true)));
    Some(Checked { ast, types: types.collect(), overloads })
}

struct Checker<'a> {
    env: &'a Env,
    ast: Ast,
    errors: &'a mut Errors,
    types: Vec<Option<Type>>,
    overloads: Vec<Vec<&'static Overload>>,
    /// The variables of enclosing folds, innermost last.
    locals: Vec<(String, Type)>,
    substitution: Substitution,
}

impl Checker<'_> {
    /// The type of a node. Macros use some nodes twice, always in the same scope, so once is enough.
    fn check(&mut self, id: Id) -> Type {
        if let Some(ty) = &self.types[id as usize] {
            return ty.clone();
        }
        let mut ty = self.find(id);
        if ty.is_larger_than(LARGEST_TYPE) {
            // `[1].map(v, {v: v})` over and over doubles the type each time.
            self.complain(id, "the type of the expression is too large".to_owned());
            ty = Type::Error;
        }
        self.types[id as usize] = Some(ty.clone());
        ty
    }

    fn find(&mut self, id: Id) -> Type {
        // Nodes are replaced by what they turn out to be, so they are taken out while looked at.
        let kind = self.ast.take(id);
        let (kind, ty) = match kind {
            Kind::Broken => (Kind::Broken, Type::Error),
            Kind::Literal(literal) => {
                let ty = literal_type(&literal);
                (Kind::Literal(literal), ty)
            }
            Kind::Ident(name) => {
                let ty = self.lookup(&name).unwrap_or_else(|| self.undeclared(id, &name));
                (Kind::Ident(name), ty)
            }
            Kind::Select { operand, field, test } => self.select(id, operand, field, test),
            Kind::Call { function, target, args } => self.call(id, function, target, args),
            Kind::List { items, optional } => {
                let ty = self.list(&items, &optional);
                (Kind::List { items, optional }, ty)
            }
            Kind::Map(entries) => {
                let (mut key_type, mut value_type) = (None, None);
                for entry in &entries {
                    let key = self.check(entry.key);
                    key_type = Some(self.join(key_type, key));
                    let value = self.check(entry.value);
                    let value = if entry.optional { self.unwrapped(entry.value, &value) } else { value };
                    value_type = Some(self.join(value_type, value));
                }
                let key = key_type.unwrap_or_else(|| self.substitution.variable());
                let value = value_type.unwrap_or_else(|| self.substitution.variable());
                (Kind::Map(entries), Type::map(key, value))
            }
            Kind::Struct { name, fields } => self.message(id, name, fields),
            Kind::Fold(fold) => {
                let ty = self.fold(&fold);
                (Kind::Fold(fold), ty)
            }
        };
        self.ast.set(id, kind);
        ty
    }

    fn select(&mut self, id: Id, operand: Id, field: String, test: bool) -> (Kind, Type) {
        if !test && let Some(prefix) = self.ast.qualified_name(operand) {
            let name = format!("{prefix}.{field}");
            if let Some(ty) = self.lookup(&name) {
                return (Kind::Ident(name), ty);
            }
        }
        let ty = self.select_field(id, operand, &field, false);
        let ty = if test { Type::Bool } else { self.substitution.apply(&ty, false) };
        (Kind::Select { operand, field, test }, ty)
    }

    fn select_field(&mut self, id: Id, operand: Id, field: &str, optional: bool) -> Type {
        let operand = self.check(operand);
        let operand = self.substitution.apply(&operand, false);
        let (target, was_optional) = operand.unwrap_optional();
        let result = match &target {
            Type::Map(types) => types.1.clone(),
            Type::Object(object) => match object.field(field) {
                Some(found) => found.decl.ty.clone(),
                None if object.open => Type::Dyn,
                None => {
                    self.complain(id, format!("undefined field '{field}'"));
                    Type::Error
                }
            },
            Type::Param(_) => {
                self.substitution.assignable(&Type::Dyn, &target);
                Type::Dyn
            }
            Type::Dyn | Type::Error => Type::Dyn,
            _ => {
                self.complain(id, format!("type '{target}' does not support field selection"));
                Type::Dyn
            }
        };
        if optional || was_optional { Type::optional(result) } else { result }
    }

    fn call(&mut self, id: Id, function: String, target: Option<Id>, args: Vec<Id>) -> (Kind, Type) {
        if function == "_?._" {
            let ty = match (self.ast.kind(args[1]), args[0]) {
                (Kind::Literal(Literal::String(field)), operand) => {
                    let field = field.clone();
                    self.check(args[1]);
                    self.select_field(id, operand, &field, true)
                }
                _ => Type::Error,
            };
            let ty = self.substitution.apply(&ty, false);
            return (Kind::Call { function, target, args }, ty);
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
            let ty = self.undeclared(id, &function);
            return (Kind::Call { function, target, args }, ty);
        };
        let ty = self.resolve(id, found, target, &args);
        (Kind::Call { function: found.name.to_owned(), target, args }, ty)
    }

    fn resolve(&mut self, id: Id, function: &'static Function, target: Option<Id>, args: &[Id]) -> Type {
        let types: Vec<Type> = target.iter().chain(args).map(|arg| self.check(*arg)).collect();
        if matches!(function.name, "_&&_" | "_||_") {
            self.overloads[id as usize] = function.overloads.iter().collect();
            let mut result = Type::Bool;
            for (arg, ty) in args.iter().zip(&types) {
                if !self.substitution.assignable(ty, &Type::Bool) {
                    self.mismatch(*arg, &Type::Bool, ty);
                    result = Type::Error;
                }
            }
            return result;
        }
        let mut result: Option<Type> = None;
        for overload in function.overloads.iter().filter(|overload| overload.member == target.is_some()) {
            let (wanted, gives) = self.instantiate(overload);
            if !self.substitution.all_assignable(&types, &wanted) {
                continue;
            }
            self.overloads[id as usize].push(overload);
            let gives = self.substitution.apply(&gives, false);
            result = Some(match result {
                None => gives,
                Some(result) if result.is_dyn() || result == gives => result,
                Some(_) => Type::Dyn,
            });
        }
        result.unwrap_or_else(|| {
            let types: Vec<String> =
                types.iter().map(|ty| self.substitution.apply(ty, true).to_string()).collect();
            let shown = match target {
                Some(_) => format!("{}.({})", types[0], types[1..].join(", ")),
                None => format!("({})", types.join(", ")),
            };
            self.complain(
                id,
                format!("found no matching overload for '{}' applied to '{shown}'", function.name),
            );
            Type::Error
        })
    }

    /// The signature with type variables of its own.
    fn instantiate(&mut self, overload: &Overload) -> (Vec<Type>, Type) {
        if !overload.generic {
            return (overload.args.clone(), overload.result.clone());
        }
        let mut names: Vec<(Arc<str>, Type)> = Vec::new();
        let args = overload.args.iter().map(|arg| self.renamed(arg, &mut names)).collect();
        (args, self.renamed(&overload.result, &mut names))
    }

    fn renamed(&mut self, ty: &Type, names: &mut Vec<(Arc<str>, Type)>) -> Type {
        match ty {
            Type::Param(name) => match names.iter().find(|(known, _)| known == name) {
                Some((_, variable)) => variable.clone(),
                None => {
                    let variable = self.substitution.variable();
                    names.push((name.clone(), variable.clone()));
                    variable
                }
            },
            Type::List(item) => Type::list(self.renamed(item, names)),
            Type::Map(types) => Type::map(self.renamed(&types.0, names), self.renamed(&types.1, names)),
            Type::Opaque(name, parameters) => Type::Opaque(
                name,
                parameters.iter().map(|parameter| self.renamed(parameter, names)).collect(),
            ),
            Type::Type(Some(inner)) => Type::Type(Some(Arc::new(self.renamed(inner, names)))),
            _ => ty.clone(),
        }
    }

    fn list(&mut self, items: &[Id], optional: &[bool]) -> Type {
        let mut joined = None;
        for (item, optional) in items.iter().zip(optional) {
            let ty = self.check(*item);
            let ty = if *optional { self.unwrapped(*item, &ty) } else { ty };
            joined = Some(self.join(joined, ty));
        }
        Type::list(joined.unwrap_or_else(|| self.substitution.variable()))
    }

    fn message(&mut self, id: Id, name: String, fields: Vec<crate::ast::Field>) -> (Kind, Type) {
        let Some(object) = self.env.message(&name) else {
            let ty = match self.lookup(&name) {
                Some(Type::Type(_)) => {
                    self.complain(id, format!("'{name}' is not a message type"));
                    Type::Error
                }
                Some(ty) => {
                    self.complain(id, format!("'{ty}' is not a type"));
                    Type::Error
                }
                None => self.undeclared(id, &name),
            };
            return (Kind::Struct { name, fields }, ty);
        };
        for field in &fields {
            let value = self.check(field.value);
            let value = if field.optional { self.unwrapped(field.value, &value) } else { value };
            let wanted = match object.fields.get(&field.name) {
                Some(found) => found.decl.ty.clone(),
                None if object.open => Type::Dyn,
                None => {
                    self.errors.report(Some(field.at), format!("undefined field '{}'", field.name));
                    Type::Error
                }
            };
            if !self.substitution.assignable(&wanted, &value) {
                let value = self.substitution.apply(&value, true);
                let words = format!(
                    "expected type of field '{}' is '{wanted}' but provided type is '{value}'",
                    field.name
                );
                self.errors.report(Some(field.at), words);
            }
        }
        (Kind::Struct { name, fields }, Type::Object(object))
    }

    fn fold(&mut self, fold: &Fold) -> Type {
        let range = self.check(fold.range);
        let accumulated = self.check(fold.init);
        let range = self.substitution.apply(&range, false);
        let depth = self.locals.len();
        self.locals.push((fold.accumulator.clone(), accumulated.clone()));
        let two = fold.second.is_some();
        let (first, second) = match &range {
            Type::List(item) if two => (Type::Int, (**item).clone()),
            Type::List(item) => ((**item).clone(), Type::Dyn),
            Type::Map(types) => (types.0.clone(), types.1.clone()),
            Type::Dyn | Type::Error | Type::Param(_) => {
                self.substitution.assignable(&Type::Dyn, &range);
                (Type::Dyn, Type::Dyn)
            }
            _ => {
                let words = format!(
                    "expression of type '{range}' cannot be range of a comprehension (must be list, map, or dynamic)"
                );
                self.complain(fold.range, words);
                (Type::Error, Type::Error)
            }
        };
        self.locals.push((fold.variable.clone(), first));
        if let Some(name) = &fold.second {
            self.locals.push((name.clone(), second));
        }
        self.assert(fold.condition, &Type::Bool);
        self.assert(fold.step, &accumulated);
        self.locals.truncate(depth + 1);
        let result = self.check(fold.result);
        self.locals.truncate(depth);
        self.substitution.apply(&result, false)
    }

    fn assert(&mut self, id: Id, wanted: &Type) {
        let found = self.check(id);
        if !self.substitution.assignable(wanted, &found) {
            self.mismatch(id, wanted, &found);
        }
    }

    fn unwrapped(&mut self, id: Id, ty: &Type) -> Type {
        let (inner, optional) = ty.unwrap_optional();
        if !optional && !inner.is_dyn() {
            self.mismatch(id, &Type::optional(inner.clone()), &inner);
        }
        inner
    }

    fn join(&mut self, previous: Option<Type>, current: Type) -> Type {
        let Some(previous) = previous else { return current };
        if self.substitution.assignable(&previous, &current) {
            return more_general(&previous, &current);
        }
        Type::Dyn
    }

    /// Lists and maps written out have elements of one type, except where `format` takes them.
    fn check_elements(&mut self) {
        let mut seen = vec![false; self.ast.len() * 2];
        let mut open = vec![(self.ast.root, false)];
        let mut wrong = Vec::new();
        while let Some((id, exempt)) = open.pop() {
            if std::mem::replace(&mut seen[id as usize * 2 + usize::from(exempt)], true) {
                continue;
            }
            let kind = self.ast.kind(id);
            let exempt = exempt || matches!(kind, Kind::Call { function, .. } if function == "format");
            open.extend(self.ast.children(kind).map(|child| (child, exempt)));
            match kind {
                _ if exempt => {}
                Kind::List { items, optional } => {
                    let types = items.iter().zip(optional).map(|(item, optional)| (*item, *optional));
                    wrong.extend(self.first_odd(types));
                }
                Kind::Map(entries) => {
                    wrong.extend(self.first_odd(entries.iter().map(|entry| (entry.key, false))));
                    wrong.extend(self.first_odd(entries.iter().map(|entry| (entry.value, entry.optional))));
                }
                _ => {}
            }
        }
        for (id, expected, found) in wrong {
            self.mismatch(id, &expected, &found);
        }
    }

    fn first_odd(&self, elements: impl Iterator<Item = (Id, bool)>) -> Option<(Id, Type, Type)> {
        let mut elements = elements.map(|(id, optional)| {
            let ty =
                self.types[id as usize].as_ref().map_or(Type::Dyn, |ty| self.substitution.apply(ty, true));
            (id, if optional { ty.unwrap_optional().0 } else { ty })
        });
        let (_, first) = elements.next()?;
        elements.find(|(_, ty)| *ty != first).map(|(id, ty)| (id, first, ty))
    }

    fn lookup(&self, name: &str) -> Option<Type> {
        let name = name.strip_prefix('.').unwrap_or(name);
        let local = self.locals.iter().rev().find(|(known, _)| known == name).map(|(_, ty)| ty.clone());
        local.or_else(|| self.env.ident(name))
    }

    /// Literals that only functions read are read now already.
    fn check_literals(&mut self) {
        for id in self.ast.ids() {
            let Kind::Call { function, args, .. } = self.ast.kind(id) else { continue };
            let [arg] = args[..] else { continue };
            let Kind::Literal(literal) = self.ast.kind(arg) else { continue };
            let fine = match (function.as_str(), literal) {
                ("duration", Literal::String(text)) => time::parse_duration(text).is_some(),
                ("timestamp", Literal::String(text)) => time::parse_timestamp(text).is_some(),
                ("timestamp", Literal::Int(seconds)) => time::from_second(*seconds).is_some(),
                ("matches", Literal::String(text)) => regex::compile_in_expression(text).is_ok(),
                _ => true,
            };
            if !fine {
                let words = format!("invalid {function} argument");
                self.complain(arg, words);
            }
        }
    }

    fn undeclared(&mut self, id: Id, name: &str) -> Type {
        self.complain(id, format!("undeclared reference to '{name}' (in container '')"));
        Type::Error
    }

    fn mismatch(&mut self, id: Id, expected: &Type, found: &Type) {
        self.complain(id, format!("expected type '{expected}' but found '{found}'"));
    }

    fn complain(&mut self, id: Id, words: String) {
        let at = self.ast.node(id).at;
        self.errors.report(Some(at), words);
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
