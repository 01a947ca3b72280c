//! Ranges of costs and sizes, with saturating arithmetic.

/// A range from `min` to `max`, both inclusive.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Estimate {
    /// The lower bound.
    pub min: u64,
    /// The upper bound; `u64::MAX` means unlimited.
    pub max: u64,
}

impl Estimate {
    pub(crate) const ZERO: Estimate = Estimate::fixed(0);
    pub(crate) const UNKNOWN: Estimate = Estimate { min: 0, max: u64::MAX };

    pub(crate) const fn fixed(value: u64) -> Estimate {
        Estimate { min: value, max: value }
    }

    pub(crate) fn add(self, other: Estimate) -> Estimate {
        Estimate { min: self.min.saturating_add(other.min), max: self.max.saturating_add(other.max) }
    }

    pub(crate) fn multiply(self, other: Estimate) -> Estimate {
        Estimate { min: self.min.saturating_mul(other.min), max: self.max.saturating_mul(other.max) }
    }

    pub(crate) fn union(self, other: Estimate) -> Estimate {
        Estimate { min: self.min.min(other.min), max: self.max.max(other.max) }
    }

    /// Multiplies with a factor and rounds up.
    pub(crate) fn scaled(self, factor: f64) -> Estimate {
        // The result saturates at the largest integer.
        let scale = |value: u64| {
            if value > 0 && value as f64 > u64::MAX as f64 / factor {
                return u64::MAX;
            }
            (value as f64 * factor).ceil() as u64
        };
        Estimate { min: scale(self.min), max: scale(self.max) }
    }
}
