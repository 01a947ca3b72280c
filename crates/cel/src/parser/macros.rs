//! Macros: calls that are expanded while parsing, most of them to a comprehension. Upstream:
//! `parser/macro.go` in cel-go.

use super::{ParseResult, Parser};
use crate::ast::{ACCUMULATOR_NAME, Comprehension, Entry, ExprKind, Id, Literal};

/// The accumulator name of older cel-go versions, which is a valid identifier.
const HIDDEN_ACCUMULATOR_NAME: &str = "__result__";
const UNUSED_ITER_VAR: &str = "#unused";
const SORT_BY_INPUT: &str = "@__sortBy_input__";

impl Parser<'_, '_> {
    /// Adds a function call, or expands the macro of this name.
    pub(super) fn call(&mut self, at: u32, function: &str, args: Vec<Id>) -> ParseResult<Id> {
        if function == "has" && args.len() == 1 {
            return match self.ast.kind(args[0]) {
                ExprKind::Select { operand, field, .. } => {
                    let (operand, field) = (*operand, field.clone());
                    self.add(at, ExprKind::Select { operand, field, test: true })
                }
                _ => self.report_error(args[0], "invalid argument to has() macro"),
            };
        }
        self.add(at, ExprKind::Call { function: function.to_owned(), target: None, args })
    }

    /// Adds a member call, or expands the macro of this name.
    pub(super) fn member_call(
        &mut self,
        at: u32,
        function: &str,
        target: Id,
        args: Vec<Id>,
    ) -> ParseResult<Id> {
        match (function, args.len()) {
            ("all" | "exists" | "exists_one" | "existsOne", 2 | 3) => {
                self.expand_quantifier(at, function, target, &args)
            }
            ("map", 2 | 3) => self.expand_map(at, target, &args),
            ("filter", 2) => self.expand_filter(at, target, &args),
            ("transformList", 3 | 4) => {
                self.expand_two_variable_comprehension(at, target, &args, TransformOutput::List)
            }
            ("transformMap", 3 | 4) => {
                self.expand_two_variable_comprehension(at, target, &args, TransformOutput::Map)
            }
            ("transformMapEntry", 3 | 4) => {
                self.expand_two_variable_comprehension(at, target, &args, TransformOutput::Entries)
            }
            ("optMap" | "optFlatMap", 2) => self.expand_optional_map(at, function, target, &args),
            ("sortBy", 2) => self.expand_sort_by(at, target, &args),
            ("bind", 3) if self.bindings && self.is_ident(target, "cel") => self.expand_bind(at, &args),
            _ => self.add(at, ExprKind::Call { function: function.to_owned(), target: Some(target), args }),
        }
    }

    fn expand_quantifier(&mut self, at: u32, function: &str, target: Id, args: &[Id]) -> ParseResult<Id> {
        let (variable, second) =
            match self.variables(&args[..args.len() - 1], "argument must be a simple name") {
                Ok(variables) => variables,
                Err((id, words)) => return self.report_error(id, &words),
            };
        let predicate = args[args.len() - 1];
        let accumulator = self.ident(at, ACCUMULATOR_NAME)?;
        let literal_true = self.literal(at, Literal::Bool(true))?;
        let (init, condition, step, result) = match function {
            "all" => {
                let condition = self.new_call(at, "@not_strictly_false", vec![accumulator])?;
                (
                    literal_true,
                    condition,
                    self.new_call(at, "_&&_", vec![accumulator, predicate])?,
                    accumulator,
                )
            }
            "exists" => {
                let init = self.literal(at, Literal::Bool(false))?;
                let not = self.new_call(at, "!_", vec![accumulator])?;
                let condition = self.new_call(at, "@not_strictly_false", vec![not])?;
                (init, condition, self.new_call(at, "_||_", vec![accumulator, predicate])?, accumulator)
            }
            _ => {
                let init = self.literal(at, Literal::Int(0))?;
                let one = self.literal(at, Literal::Int(1))?;
                let more = self.new_call(at, "_+_", vec![accumulator, one])?;
                let step = self.new_call(at, "_?_:_", vec![predicate, more, accumulator])?;
                (init, literal_true, step, self.new_call(at, "_==_", vec![accumulator, one])?)
            }
        };
        self.new_comprehension(
            at,
            Comprehension {
                iter_range: target,
                iter_var: variable,
                iter_var2: second,
                accu_var: ACCUMULATOR_NAME.to_owned(),
                accu_init: init,
                loop_condition: condition,
                loop_step: step,
                result,
            },
        )
    }

    fn expand_map(&mut self, at: u32, target: Id, args: &[Id]) -> ParseResult<Id> {
        let variable = match self.variables(&args[..1], "argument is not an identifier") {
            Ok((variable, _)) => variable,
            Err((id, words)) => return self.report_error(id, &words),
        };
        let predicate = (args.len() == 3).then(|| args[1]);
        self.collect_into_list(at, target, variable, None, predicate, args[args.len() - 1])
    }

    fn expand_filter(&mut self, at: u32, target: Id, args: &[Id]) -> ParseResult<Id> {
        let variable = match self.variables(&args[..1], "argument is not an identifier") {
            Ok((variable, _)) => variable,
            Err((id, words)) => return self.report_error(id, &words),
        };
        self.collect_into_list(at, target, variable, None, Some(args[1]), args[0])
    }

    fn expand_two_variable_comprehension(
        &mut self,
        at: u32,
        target: Id,
        args: &[Id],
        output: TransformOutput,
    ) -> ParseResult<Id> {
        let (variable, second) = match self.variables(&args[..2], "argument must be a simple name") {
            Ok(variables) => variables,
            Err((id, words)) => return self.report_error(id, &words),
        };
        let predicate = (args.len() == 4).then(|| args[2]);
        let transform = args[args.len() - 1];
        if output == TransformOutput::List {
            return self.collect_into_list(at, target, variable, second, predicate, transform);
        }
        let accumulator = self.ident(at, ACCUMULATOR_NAME)?;
        let mut insert = vec![accumulator];
        if output == TransformOutput::Map {
            insert.push(self.ident(at, &variable)?);
        }
        insert.push(transform);
        let init = self.add(at, ExprKind::Map(Vec::<Entry>::new()))?;
        let step = self.new_call(at, "cel.@mapInsert", insert)?;
        self.new_collection(
            at,
            CollectionMacro { target, variable, second, predicate, init, step, accumulator },
        )
    }

    /// Adds a comprehension that appends to a list.
    fn collect_into_list(
        &mut self,
        at: u32,
        target: Id,
        variable: String,
        second: Option<String>,
        predicate: Option<Id>,
        item: Id,
    ) -> ParseResult<Id> {
        let accumulator = self.ident(at, ACCUMULATOR_NAME)?;
        let init = self.add(at, ExprKind::List { items: Vec::new(), optional: Vec::new() })?;
        let one = self.add(at, ExprKind::List { items: vec![item], optional: vec![false] })?;
        let step = self.new_call(at, "_+_", vec![accumulator, one])?;
        self.new_collection(
            at,
            CollectionMacro { target, variable, second, predicate, init, step, accumulator },
        )
    }

    fn new_collection(&mut self, at: u32, collection: CollectionMacro) -> ParseResult<Id> {
        let CollectionMacro { target, variable, second, predicate, init, step, accumulator } = collection;
        let condition = self.literal(at, Literal::Bool(true))?;
        let step = match predicate {
            Some(predicate) => self.new_call(at, "_?_:_", vec![predicate, step, accumulator])?,
            None => step,
        };
        self.new_comprehension(
            at,
            Comprehension {
                iter_range: target,
                iter_var: variable,
                iter_var2: second,
                accu_var: ACCUMULATOR_NAME.to_owned(),
                accu_init: init,
                loop_condition: condition,
                loop_step: step,
                result: accumulator,
            },
        )
    }

    fn expand_optional_map(&mut self, at: u32, function: &str, target: Id, args: &[Id]) -> ParseResult<Id> {
        let ExprKind::Ident(name) = self.ast.kind(args[0]) else {
            return self
                .report_error(args[0], &format!("{function}() variable name must be a simple identifier"));
        };
        let name = name.clone();
        let present = self.new_member_call(at, "hasValue", target, Vec::new())?;
        let value = self.new_member_call(at, "value", target, Vec::new())?;
        let bound = self.binding(at, name, value, args[1])?;
        let found = if function == "optMap" { self.new_call(at, "optional.of", vec![bound])? } else { bound };
        let none = self.new_call(at, "optional.none", Vec::new())?;
        self.new_call(at, "_?_:_", vec![present, found, none])
    }

    fn expand_sort_by(&mut self, at: u32, target: Id, args: &[Id]) -> ParseResult<Id> {
        if !matches!(
            self.ast.kind(target),
            ExprKind::List { .. }
                | ExprKind::Select { .. }
                | ExprKind::Ident(_)
                | ExprKind::Comprehension(_)
                | ExprKind::Call { .. }
        ) {
            let words =
                "sortBy can only be applied to a list, identifier, comprehension, call or select expression";
            return self.report_error(target, words);
        }
        let input = self.ident(at, SORT_BY_INPUT)?;
        let keys = self.expand_map(at, input, args)?;
        let sorted = self.new_member_call(at, "@sortByAssociatedKeys", input, vec![keys])?;
        self.binding(at, SORT_BY_INPUT.to_owned(), target, sorted)
    }

    fn expand_bind(&mut self, at: u32, args: &[Id]) -> ParseResult<Id> {
        let ExprKind::Ident(name) = self.ast.kind(args[0]) else {
            return self.report_error(args[0], "cel.bind() variable names must be simple identifiers");
        };
        let name = name.clone();
        self.binding(at, name, args[1], args[2])
    }

    /// Adds `result` with `name` bound to `value`: a comprehension over an empty list.
    fn binding(&mut self, at: u32, name: String, value: Id, result: Id) -> ParseResult<Id> {
        let range = self.add(at, ExprKind::List { items: Vec::new(), optional: Vec::new() })?;
        let condition = self.literal(at, Literal::Bool(false))?;
        let step = self.ident(at, &name)?;
        self.new_comprehension(
            at,
            Comprehension {
                iter_range: range,
                iter_var: UNUSED_ITER_VAR.to_owned(),
                iter_var2: None,
                accu_var: name,
                accu_init: value,
                loop_condition: condition,
                loop_step: step,
                result,
            },
        )
    }

    fn variables(&self, args: &[Id], otherwise: &str) -> Result<(String, Option<String>), (Id, String)> {
        let mut names = Vec::new();
        for arg in args {
            let ExprKind::Ident(name) = self.ast.kind(*arg) else { return Err((*arg, otherwise.to_owned())) };
            if names.contains(name) {
                return Err((*arg, format!("duplicate variable name: {name}")));
            }
            names.push(name.clone());
        }
        if let Some(index) =
            names.iter().position(|name| name == ACCUMULATOR_NAME || name == HIDDEN_ACCUMULATOR_NAME)
        {
            return Err((args[index], "iteration variable overwrites accumulator variable".to_owned()));
        }
        let mut names = names.into_iter();
        Ok((names.next().unwrap_or_default(), names.next()))
    }

    fn report_error(&mut self, id: Id, words: &str) -> ParseResult<Id> {
        let at = self.ast.node(id).offset;
        self.errors.report(Some(at), words.to_owned());
        self.add(at, ExprKind::Unspecified)
    }

    fn is_ident(&self, id: Id, expected: &str) -> bool {
        matches!(self.ast.kind(id), ExprKind::Ident(name) if name == expected)
    }

    fn ident(&mut self, at: u32, name: &str) -> ParseResult<Id> {
        self.add(at, ExprKind::Ident(name.to_owned()))
    }

    fn literal(&mut self, at: u32, literal: Literal) -> ParseResult<Id> {
        self.add(at, ExprKind::Literal(literal))
    }

    fn new_call(&mut self, at: u32, function: &str, args: Vec<Id>) -> ParseResult<Id> {
        self.add(at, ExprKind::Call { function: function.to_owned(), target: None, args })
    }

    fn new_member_call(&mut self, at: u32, function: &str, target: Id, args: Vec<Id>) -> ParseResult<Id> {
        self.add(at, ExprKind::Call { function: function.to_owned(), target: Some(target), args })
    }

    fn new_comprehension(&mut self, at: u32, comprehension: Comprehension) -> ParseResult<Id> {
        self.add(at, ExprKind::Comprehension(Box::new(comprehension)))
    }
}

#[derive(PartialEq)]
enum TransformOutput {
    List,
    Map,
    Entries,
}

struct CollectionMacro {
    target: Id,
    variable: String,
    second: Option<String>,
    predicate: Option<Id>,
    init: Id,
    step: Id,
    accumulator: Id,
}
