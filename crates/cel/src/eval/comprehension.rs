//! Evaluates comprehensions. Elements are appended to the accumulator in place, because copying it
//! would make `map` take quadratic time.

use std::sync::Arc;

use super::{Binding, EvalError, EvalResult, Evaluator, cost};
use crate::ast::{Comprehension, ExprKind, Id};
use crate::value::{Key, List, Map, Value};

impl<'a> Evaluator<'a, '_> {
    pub(super) fn eval_comprehension(&mut self, comprehension: &'a Comprehension) -> EvalResult<'a> {
        let range = self.eval(comprehension.iter_range)?;
        let init = match self.eval(comprehension.accu_init) {
            Err(EvalError::CostLimitExceeded) => return Err(EvalError::CostLimitExceeded),
            init => init,
        };
        let items = self.items(&range, comprehension.iter_var2.is_some())?;
        let depth = self.activation.len();
        self.activation.push(Binding { name: &comprehension.accu_var, value: init });
        let ended = self.run_iterations(comprehension, items, depth);
        self.activation.truncate(depth + 1);
        let result = ended.and_then(|()| self.eval(comprehension.result));
        self.activation.truncate(depth);
        result
    }

    fn run_iterations(
        &mut self,
        comprehension: &'a Comprehension,
        items: Vec<(Value<'a>, Value<'a>)>,
        slot: usize,
    ) -> Result<(), EvalError> {
        for (first, second) in items {
            self.activation.truncate(slot + 1);
            self.activation.push(Binding { name: &comprehension.iter_var, value: Ok(first) });
            if let Some(name) = &comprehension.iter_var2 {
                self.activation.push(Binding { name, value: Ok(second) });
            }
            match self.eval(comprehension.loop_condition) {
                Ok(Value::Bool(true)) => {}
                Err(EvalError::CostLimitExceeded) => return Err(EvalError::CostLimitExceeded),
                _ => break,
            }
            match self.step(comprehension, comprehension.loop_step, slot) {
                Err(EvalError::CostLimitExceeded) => return Err(EvalError::CostLimitExceeded),
                // The error becomes the value of the accumulator, because a later element may still
                // decide the result of `all` and `exists`.
                Err(failure) => self.activation[slot].value = Err(failure),
                Ok(()) => {}
            }
        }
        Ok(())
    }

    fn step(&mut self, comprehension: &'a Comprehension, step: Id, slot: usize) -> Result<(), EvalError> {
        let ast = &self.program.checked.ast;
        let is_accumulator =
            |id: Id| matches!(ast.kind(id), ExprKind::Ident(name) if *name == comprehension.accu_var);
        if let ExprKind::Call { function, target: None, args } = ast.kind(step) {
            match (function.as_str(), args.as_slice()) {
                ("_?_:_", [condition, truthy, falsy]) if is_accumulator(*falsy) => {
                    return match self.eval(*condition)? {
                        Value::Bool(true) => self.step(comprehension, *truthy, slot),
                        Value::Bool(false) => Ok(()),
                        _ => Err(EvalError::new("no such overload")),
                    };
                }
                ("_+_", [accumulator, list]) if is_accumulator(*accumulator) => {
                    if let ExprKind::List { items, .. } = ast.kind(*list)
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
            Err(EvalError::CostLimitExceeded) => Err(EvalError::CostLimitExceeded),
            value => {
                self.activation[slot].value = value;
                Ok(())
            }
        }
    }

    fn append(&mut self, item: Id, slot: usize) -> Result<(), EvalError> {
        let item = self.eval(item)?;
        // The cost of reading the accumulator, creating a one-element list and concatenating them, as
        // upstream evaluates it.
        self.add_cost(1 + cost::LIST_CREATE_BASE_COST + 1)?;
        self.context.cost_tracker.add_values(1)?;
        match &mut self.activation[slot].value {
            Ok(Value::List(List::Shared(items))) => {
                Arc::make_mut(items).push(item);
                Ok(())
            }
            Ok(_) => Err(EvalError::new("no such overload")),
            Err(failure) => Err(failure.clone()),
        }
    }

    fn insert(&mut self, key: Id, value: Id, slot: usize) -> Result<(), EvalError> {
        let key = self.eval(key)?;
        let value = self.eval(value)?;
        self.add_cost(2)?;
        self.context.cost_tracker.add_values(2)?;
        let Some(map_key) = Key::of(&key) else {
            return Err(EvalError::new(format!("unsupported key type: {}", key.type_of().name())));
        };
        match &mut self.activation[slot].value {
            Ok(Value::Map(Map::Shared(entries))) => match Arc::make_mut(entries).insert(map_key, value) {
                None => Ok(()),
                Some(_) => Err(EvalError::new(format!("insert failed: key {key:?} already exists"))),
            },
            Ok(_) => Err(EvalError::new("no such overload")),
            Err(failure) => Err(failure.clone()),
        }
    }
}
