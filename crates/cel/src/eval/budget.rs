//! What evaluation may use. Cost is counted as upstream counts it, so that what fits there fits here. It does not
//! see everything, though (comparing two large objects costs one unit), so steps and memory are counted beside it,
//! with limits that only what upstream would spend minutes on can reach.

/// What one evaluation of an expression may cost.
pub const PER_CALL_LIMIT: u64 = 1_000_000;
/// What all expressions about one object may cost.
pub const RUNTIME_BUDGET: u64 = 10_000_000;
/// What all match conditions of one webhook or policy may cost.
pub const MATCH_CONDITIONS_BUDGET: u64 = 2_500_000;

/// Elements compared or copied in one evaluation.
pub(crate) const MAX_STEPS: u64 = 20_000_000;
/// Bytes made in one evaluation, also those that are gone again.
const MAX_ALLOCATED_BYTES: u64 = 128 << 20;
/// How deep evaluation nests, through variables that are computed when they are read too.
const MAX_EVAL_DEPTH: u32 = 400;

/// Why an expression has no value.
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
pub enum EvalError {
    /// As the language says: no such key, a division by zero, and so on.
    #[error("{0}")]
    Error(String),
    /// It would have cost too much.
    #[error("operation cancelled: actual cost limit exceeded")]
    CostLimitExceeded,
}

impl EvalError {
    pub(crate) fn new(words: impl Into<String>) -> EvalError {
        EvalError::Error(words.into())
    }
}

/// What expressions evaluated one after another may cost together.
#[derive(Debug)]
pub struct Budget {
    remaining: Option<u64>,
    pub(crate) depth: u32,
}

impl Budget {
    /// Room for `total`.
    pub fn new(total: u64) -> Budget {
        Budget { remaining: Some(total), depth: 0 }
    }

    /// What is left; none once more has been spent than there was.
    pub fn remaining(&self) -> Option<u64> {
        self.remaining
    }

    /// Whether more has been spent than there was: nothing else may be evaluated.
    pub fn is_exhausted(&self) -> bool {
        self.remaining.is_none()
    }

    /// Takes `cost` away.
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

/// What the evaluation under way has used.
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

    /// Says how many elements are about to be looked at.
    pub fn add_steps(&mut self, steps: u64) -> Result<(), EvalError> {
        self.steps = self.steps.saturating_add(steps);
        if self.steps > MAX_STEPS { Err(EvalError::CostLimitExceeded) } else { Ok(()) }
    }

    /// Says how many bytes are about to be made.
    pub fn add_bytes(&mut self, bytes: usize) -> Result<(), EvalError> {
        self.bytes = self.bytes.saturating_add(bytes as u64);
        if self.bytes > MAX_ALLOCATED_BYTES { Err(EvalError::CostLimitExceeded) } else { Ok(()) }
    }

    /// Says how many values are about to be put in a list or map.
    pub fn add_values(&mut self, count: usize) -> Result<(), EvalError> {
        self.add_steps(count as u64)?;
        self.add_bytes(count.saturating_mul(size_of::<crate::Value<'_>>()))
    }
}
