//! Loops. Appending to the accumulator happens in place, or every `map` would take quadratic time.

use std::sync::Arc;

use super::{Evaluated, Evaluation, Failure, Local, cost};
use crate::ast::{Fold, Id, Kind};
use crate::value::{Key, List, Map, Value};

impl<'a> Evaluation<'a, '_> {
    pub(super) fn fold(&mut self, fold: &'a Fold) -> Evaluated<'a> {
        let range = self.eval(fold.range)?;
        let init = match self.eval(fold.init) {
            Err(Failure::Cost) => return Err(Failure::Cost),
            init => init,
        };
        let items = self.items(&range, fold.second.is_some())?;
        let depth = self.locals.len();
        self.locals.push(Local { name: &fold.accumulator, value: init });
        let ended = self.rounds(fold, items, depth);
        self.locals.truncate(depth + 1);
        let result = ended.and_then(|()| self.eval(fold.result));
        self.locals.truncate(depth);
        result
    }

    fn rounds(
        &mut self,
        fold: &'a Fold,
        items: Vec<(Value<'a>, Value<'a>)>,
        slot: usize,
    ) -> Result<(), Failure> {
        for (first, second) in items {
            self.locals.truncate(slot + 1);
            self.locals.push(Local { name: &fold.variable, value: Ok(first) });
            if let Some(name) = &fold.second {
                self.locals.push(Local { name, value: Ok(second) });
            }
            match self.eval(fold.condition) {
                Ok(Value::Bool(true)) => {}
                Err(Failure::Cost) => return Err(Failure::Cost),
                _ => break,
            }
            match self.step(fold, fold.step, slot) {
                Err(Failure::Cost) => return Err(Failure::Cost),
                Err(failure) => self.locals[slot].value = Err(failure),
                Ok(()) => {}
            }
        }
        Ok(())
    }

    fn step(&mut self, fold: &'a Fold, step: Id, slot: usize) -> Result<(), Failure> {
        let ast = &self.program.checked.ast;
        let is_accumulator = |id: Id| matches!(ast.kind(id), Kind::Ident(name) if *name == fold.accumulator);
        if let Kind::Call { function, target: None, args } = ast.kind(step) {
            match (function.as_str(), args.as_slice()) {
                ("_?_:_", [condition, truthy, falsy]) if is_accumulator(*falsy) => {
                    return match self.eval(*condition)? {
                        Value::Bool(true) => self.step(fold, *truthy, slot),
                        Value::Bool(false) => Ok(()),
                        _ => Err(Failure::error("no such overload")),
                    };
                }
                ("_+_", [accumulator, list]) if is_accumulator(*accumulator) => {
                    if let Kind::List { items, .. } = ast.kind(*list)
                        && let [item] = items[..]
                    {
                        return self.append(item, slot);
                    }
                }
                ("cel.@mapInsert", [accumulator, key, value]) if is_accumulator(*accumulator) => {
                    return self.insert(*key, *value, slot);
                }
                _ => {}
            }
        }
        let value = self.eval(step);
        match value {
            Err(Failure::Cost) => Err(Failure::Cost),
            value => {
                self.locals[slot].value = value;
                Ok(())
            }
        }
    }

    fn append(&mut self, item: Id, slot: usize) -> Result<(), Failure> {
        let item = self.eval(item)?;
        // The accumulator is read, a list of one is made, and the two are joined.
        self.charge(1 + cost::LIST + 1)?;
        self.cx.meter.values(1)?;
        match &mut self.locals[slot].value {
            Ok(Value::List(List::Shared(items))) => {
                Arc::make_mut(items).push(item);
                Ok(())
            }
            Ok(_) => Err(Failure::error("no such overload")),
            Err(failure) => Err(failure.clone()),
        }
    }

    fn insert(&mut self, key: Id, value: Id, slot: usize) -> Result<(), Failure> {
        let key = self.eval(key)?;
        let value = self.eval(value)?;
        self.charge(2)?;
        self.cx.meter.values(2)?;
        let Some(map_key) = Key::of(&key) else {
            return Err(Failure::error(format!("unsupported key type: {}", key.type_of().name())));
        };
        match &mut self.locals[slot].value {
            Ok(Value::Map(Map::Shared(entries))) => match Arc::make_mut(entries).insert(map_key, value) {
                None => Ok(()),
                Some(_) => Err(Failure::error(format!("insert failed: key {key:?} already exists"))),
            },
            Ok(_) => Err(Failure::error("no such overload")),
            Err(failure) => Err(failure.clone()),
        }
    }
}
