//! Limits of evaluation. Cost is counted as upstream does, so that the same expressions fit the budget.
//! It does not cover everything, though (comparing two large objects costs one unit). Therefore steps
//! and memory are limited, too, so high that only expressions which would run for minutes upstream
//! reach these limits.

/// The maximum cost of one evaluation.
pub const PER_CALL_LIMIT: u64 = 1_000_000;
/// The maximum total cost of all expressions for one object.
pub const RUNTIME_BUDGET: u64 = 10_000_000;
/// The maximum total cost of all match conditions of a webhook or policy.
pub const MATCH_CONDITIONS_BUDGET: u64 = 2_500_000;

/// The maximum number of elements that one evaluation may compare or copy.
pub(crate) const MAX_STEPS: u64 = 20_000_000;
/// The maximum number of bytes that one evaluation may allocate, including those it has freed again.
const MAX_ALLOCATED_BYTES: u64 = 128 << 20;
/// The maximum depth of evaluation, including variables that are evaluated when they are read.
const MAX_EVAL_DEPTH: u32 = 400;

/// Why the evaluation of an expression failed.
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
pub enum EvalError {
    /// An error of the language: no such key, division by zero, and so on.
    #[error("{0}")]
    Error(String),
    /// A cost, step or memory limit was exceeded.
    #[error("operation cancelled: actual cost limit exceeded")]
    CostLimitExceeded,
}

impl EvalError {
    pub(crate) fn new(words: impl Into<String>) -> EvalError {
        EvalError::Error(words.into())
    }
}

/// The remaining cost for a sequence of evaluations.
#[derive(Debug)]
pub struct Budget {
    remaining: Option<u64>,
    pub(crate) depth: u32,
}

impl Budget {
    /// A budget of `total`.
    pub fn new(total: u64) -> Budget {
        Budget { remaining: Some(total), depth: 0 }
    }

    /// The remaining cost; `None` if the budget was exceeded.
    pub fn remaining(&self) -> Option<u64> {
        self.remaining
    }

    /// Whether the budget was exceeded. If so, no further expression may be evaluated.
    pub fn is_exhausted(&self) -> bool {
        self.remaining.is_none()
    }

    /// Subtracts `cost`.
    pub fn subtract(&mut self, cost: u64) {
        self.remaining = self.remaining.and_then(|remaining| remaining.checked_sub(cost));
    }

    pub(crate) fn enter(&mut self) -> Result<(), EvalError> {
        self.depth += 1;
        if self.depth > MAX_EVAL_DEPTH {
            return Err(EvalError::new("max recursion depth exceeded"));
        }
        Ok(())
    }

    pub(crate) fn leave(&mut self) {
        self.depth -= 1;
    }
}

/// The resources used by the current evaluation.
#[derive(Debug)]
pub(crate) struct CostTracker {
    pub cost: u64,
    limit: u64,
    steps: u64,
    bytes: u64,
}

impl CostTracker {
    pub fn new(limit: u64) -> CostTracker {
        CostTracker { cost: 0, limit, steps: 0, bytes: 0 }
    }

    pub fn add_cost(&mut self, cost: u64) -> Result<(), EvalError> {
        self.cost = self.cost.saturating_add(cost);
        if self.cost > self.limit { Err(EvalError::CostLimitExceeded) } else { Ok(()) }
    }

    /// Accounts for elements that are about to be visited.
    pub fn add_steps(&mut self, steps: u64) -> Result<(), EvalError> {
        self.steps = self.steps.saturating_add(steps);
        if self.steps > MAX_STEPS { Err(EvalError::CostLimitExceeded) } else { Ok(()) }
    }

    /// Accounts for bytes that are about to be allocated.
    pub fn add_bytes(&mut self, bytes: usize) -> Result<(), EvalError> {
        self.bytes = self.bytes.saturating_add(bytes as u64);
        if self.bytes > MAX_ALLOCATED_BYTES { Err(EvalError::CostLimitExceeded) } else { Ok(()) }
    }

    /// Accounts for values that are about to be added to a list or map.
    pub fn add_values(&mut self, count: usize) -> Result<(), EvalError> {
        self.add_steps(count as u64)?;
        self.add_bytes(count.saturating_mul(size_of::<crate::Value<'_>>()))
    }
}
