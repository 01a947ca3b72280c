//! The macros: calls that are rewritten while parsing, most of them into a fold.

use super::{Parsed, Parser};
use crate::ast::{ACCUMULATOR, Entry, Fold, Id, Kind, Literal};

/// What an expression could write to name the accumulator of older versions.
const OLD_ACCUMULATOR: &str = "__result__";
const UNUSED: &str = "#unused";
const SORTED: &str = "@__sortBy_input__";

impl Parser<'_, '_> {
    /// A call of a function, or of the macro of that name.
    pub(super) fn call(&mut self, at: u32, function: &str, args: Vec<Id>) -> Parsed<Id> {
        if function == "has" && args.len() == 1 {
            return match self.ast.kind(args[0]) {
                Kind::Select { operand, field, .. } => {
                    let (operand, field) = (*operand, field.clone());
                    self.add(at, Kind::Select { operand, field, test: true })
                }
                _ => self.refuse(args[0], "invalid argument to has() macro"),
            };
        }
        self.add(at, Kind::Call { function: function.to_owned(), target: None, args })
    }

    /// A call of a method, or of the macro of that name.
    pub(super) fn member_call(&mut self, at: u32, function: &str, target: Id, args: Vec<Id>) -> Parsed<Id> {
        match (function, args.len()) {
            ("all" | "exists" | "exists_one" | "existsOne", 2 | 3) => {
                self.quantifier(at, function, target, &args)
            }
            ("map", 2 | 3) => self.transform(at, target, &args),
            ("filter", 2) => self.filter(at, target, &args),
            ("transformList", 3 | 4) => self.two_variables(at, target, &args, Output::List),
            ("transformMap", 3 | 4) => self.two_variables(at, target, &args, Output::Map),
            ("transformMapEntry", 3 | 4) => self.two_variables(at, target, &args, Output::Entries),
            ("optMap" | "optFlatMap", 2) => self.optional_map(at, function, target, &args),
            ("sortBy", 2) => self.sort_by(at, target, &args),
            ("bind", 3) if self.bindings && self.is_ident(target, "cel") => self.bind(at, &args),
            _ => self.add(at, Kind::Call { function: function.to_owned(), target: Some(target), args }),
        }
    }

    fn quantifier(&mut self, at: u32, function: &str, target: Id, args: &[Id]) -> Parsed<Id> {
        let (variable, second) =
            match self.variables(&args[..args.len() - 1], "argument must be a simple name") {
                Ok(variables) => variables,
                Err((id, words)) => return self.refuse(id, &words),
            };
        let predicate = args[args.len() - 1];
        let accumulator = self.ident(at, ACCUMULATOR)?;
        let truth = self.literal(at, Literal::Bool(true))?;
        let (init, condition, step, result) = match function {
            "all" => {
                let condition = self.invoke(at, "@not_strictly_false", vec![accumulator])?;
                (truth, condition, self.invoke(at, "_&&_", vec![accumulator, predicate])?, accumulator)
            }
            "exists" => {
                let init = self.literal(at, Literal::Bool(false))?;
                let not = self.invoke(at, "!_", vec![accumulator])?;
                let condition = self.invoke(at, "@not_strictly_false", vec![not])?;
                (init, condition, self.invoke(at, "_||_", vec![accumulator, predicate])?, accumulator)
            }
            _ => {
                let init = self.literal(at, Literal::Int(0))?;
                let one = self.literal(at, Literal::Int(1))?;
                let more = self.invoke(at, "_+_", vec![accumulator, one])?;
                let step = self.invoke(at, "_?_:_", vec![predicate, more, accumulator])?;
                (init, truth, step, self.invoke(at, "_==_", vec![accumulator, one])?)
            }
        };
        self.fold(
            at,
            Fold {
                range: target,
                variable,
                second,
                accumulator: ACCUMULATOR.to_owned(),
                init,
                condition,
                step,
                result,
            },
        )
    }

    fn transform(&mut self, at: u32, target: Id, args: &[Id]) -> Parsed<Id> {
        let variable = match self.variables(&args[..1], "argument is not an identifier") {
            Ok((variable, _)) => variable,
            Err((id, words)) => return self.refuse(id, &words),
        };
        let predicate = (args.len() == 3).then(|| args[1]);
        self.gather(at, target, variable, None, predicate, args[args.len() - 1])
    }

    fn filter(&mut self, at: u32, target: Id, args: &[Id]) -> Parsed<Id> {
        let variable = match self.variables(&args[..1], "argument is not an identifier") {
            Ok((variable, _)) => variable,
            Err((id, words)) => return self.refuse(id, &words),
        };
        self.gather(at, target, variable, None, Some(args[1]), args[0])
    }

    fn two_variables(&mut self, at: u32, target: Id, args: &[Id], output: Output) -> Parsed<Id> {
        let (variable, second) = match self.variables(&args[..2], "argument must be a simple name") {
            Ok(variables) => variables,
            Err((id, words)) => return self.refuse(id, &words),
        };
        let predicate = (args.len() == 4).then(|| args[2]);
        let transform = args[args.len() - 1];
        if output == Output::List {
            return self.gather(at, target, variable, second, predicate, transform);
        }
        let accumulator = self.ident(at, ACCUMULATOR)?;
        let mut insert = vec![accumulator];
        if output == Output::Map {
            insert.push(self.ident(at, &variable)?);
        }
        insert.push(transform);
        let init = self.add(at, Kind::Map(Vec::<Entry>::new()))?;
        let step = self.invoke(at, "cel.@mapInsert", insert)?;
        self.gathering(at, Gathering { target, variable, second, predicate, init, step, accumulator })
    }

    /// A fold that appends to a list.
    fn gather(
        &mut self,
        at: u32,
        target: Id,
        variable: String,
        second: Option<String>,
        predicate: Option<Id>,
        item: Id,
    ) -> Parsed<Id> {
        let accumulator = self.ident(at, ACCUMULATOR)?;
        let init = self.add(at, Kind::List { items: Vec::new(), optional: Vec::new() })?;
        let one = self.add(at, Kind::List { items: vec![item], optional: vec![false] })?;
        let step = self.invoke(at, "_+_", vec![accumulator, one])?;
        self.gathering(at, Gathering { target, variable, second, predicate, init, step, accumulator })
    }

    fn gathering(&mut self, at: u32, gathering: Gathering) -> Parsed<Id> {
        let Gathering { target, variable, second, predicate, init, step, accumulator } = gathering;
        let condition = self.literal(at, Literal::Bool(true))?;
        let step = match predicate {
            Some(predicate) => self.invoke(at, "_?_:_", vec![predicate, step, accumulator])?,
            None => step,
        };
        self.fold(
            at,
            Fold {
                range: target,
                variable,
                second,
                accumulator: ACCUMULATOR.to_owned(),
                init,
                condition,
                step,
                result: accumulator,
            },
        )
    }

    fn optional_map(&mut self, at: u32, function: &str, target: Id, args: &[Id]) -> Parsed<Id> {
        let Kind::Ident(name) = self.ast.kind(args[0]) else {
            return self.refuse(args[0], &format!("{function}() variable name must be a simple identifier"));
        };
        let name = name.clone();
        let present = self.method(at, "hasValue", target, Vec::new())?;
        let value = self.method(at, "value", target, Vec::new())?;
        let bound = self.binding(at, name, value, args[1])?;
        let found = if function == "optMap" { self.invoke(at, "optional.of", vec![bound])? } else { bound };
        let none = self.invoke(at, "optional.none", Vec::new())?;
        self.invoke(at, "_?_:_", vec![present, found, none])
    }

    fn sort_by(&mut self, at: u32, target: Id, args: &[Id]) -> Parsed<Id> {
        if !matches!(
            self.ast.kind(target),
            Kind::List { .. } | Kind::Select { .. } | Kind::Ident(_) | Kind::Fold(_) | Kind::Call { .. }
        ) {
            let words =
                "sortBy can only be applied to a list, identifier, comprehension, call or select expression";
            return self.refuse(target, words);
        }
        let input = self.ident(at, SORTED)?;
        let keys = self.transform(at, input, args)?;
        let sorted = self.method(at, "@sortByAssociatedKeys", input, vec![keys])?;
        self.binding(at, SORTED.to_owned(), target, sorted)
    }

    fn bind(&mut self, at: u32, args: &[Id]) -> Parsed<Id> {
        let Kind::Ident(name) = self.ast.kind(args[0]) else {
            return self.refuse(args[0], "cel.bind() variable names must be simple identifiers");
        };
        let name = name.clone();
        self.binding(at, name, args[1], args[2])
    }

    /// `result` with `name` standing for `value`: a fold over nothing.
    fn binding(&mut self, at: u32, name: String, value: Id, result: Id) -> Parsed<Id> {
        let range = self.add(at, Kind::List { items: Vec::new(), optional: Vec::new() })?;
        let condition = self.literal(at, Literal::Bool(false))?;
        let step = self.ident(at, &name)?;
        self.fold(
            at,
            Fold {
                range,
                variable: UNUSED.to_owned(),
                second: None,
                accumulator: name,
                init: value,
                condition,
                step,
                result,
            },
        )
    }

    fn variables(&self, args: &[Id], otherwise: &str) -> Result<(String, Option<String>), (Id, String)> {
        let mut names = Vec::new();
        for arg in args {
            let Kind::Ident(name) = self.ast.kind(*arg) else { return Err((*arg, otherwise.to_owned())) };
            if names.contains(name) {
                return Err((*arg, format!("duplicate variable name: {name}")));
            }
            names.push(name.clone());
        }
        if let Some(index) = names.iter().position(|name| name == ACCUMULATOR || name == OLD_ACCUMULATOR) {
            return Err((args[index], "iteration variable overwrites accumulator variable".to_owned()));
        }
        let mut names = names.into_iter();
        Ok((names.next().unwrap_or_default(), names.next()))
    }

    fn refuse(&mut self, id: Id, words: &str) -> Parsed<Id> {
        let at = self.ast.node(id).at;
        self.errors.report(Some(at), words.to_owned());
        self.add(at, Kind::Broken)
    }

    fn is_ident(&self, id: Id, wanted: &str) -> bool {
        matches!(self.ast.kind(id), Kind::Ident(name) if name == wanted)
    }

    fn ident(&mut self, at: u32, name: &str) -> Parsed<Id> {
        self.add(at, Kind::Ident(name.to_owned()))
    }

    fn literal(&mut self, at: u32, literal: Literal) -> Parsed<Id> {
        self.add(at, Kind::Literal(literal))
    }

    fn invoke(&mut self, at: u32, function: &str, args: Vec<Id>) -> Parsed<Id> {
        self.add(at, Kind::Call { function: function.to_owned(), target: None, args })
    }

    fn method(&mut self, at: u32, function: &str, target: Id, args: Vec<Id>) -> Parsed<Id> {
        self.add(at, Kind::Call { function: function.to_owned(), target: Some(target), args })
    }

    fn fold(&mut self, at: u32, fold: Fold) -> Parsed<Id> {
        self.add(at, Kind::Fold(Box::new(fold)))
    }
}

#[derive(PartialEq)]
enum Output {
    List,
    Map,
    Entries,
}

struct Gathering {
    target: Id,
    variable: String,
    second: Option<String>,
    predicate: Option<Id>,
    init: Id,
    step: Id,
    accumulator: Id,
}
