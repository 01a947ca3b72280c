//! Integrates a level's seat demand over time: average, standard deviation and maximum of a period.
//! Upstream: `integrator` in `flowcontrol/fairqueuing`.

/// The integrals of a value over the time since the last reset.
#[derive(Clone, Copy, Debug)]
pub struct Integrator {
    value: f64,
    since: u64,
    seconds: f64,
    sum: f64,
    square_sum: f64,
    max: f64,
}

/// The statistics of one period.
#[derive(Clone, Copy, Debug, Default, PartialEq)]
pub struct IntegratorResults {
    pub average: f64,
    pub deviation: f64,
    pub max: f64,
    /// With a period of zero length, only the maximum is meaningful.
    pub seconds: f64,
}

impl Integrator {
    pub fn new(now: u64) -> Integrator {
        Integrator { value: 0.0, since: now, seconds: 0.0, sum: 0.0, square_sum: 0.0, max: 0.0 }
    }

    pub fn set(&mut self, now: u64, value: u64) {
        self.advance(now);
        self.value = value as f64;
        self.max = self.max.max(self.value);
    }

    /// Ends a period and starts the next.
    pub fn reset(&mut self, now: u64) -> IntegratorResults {
        self.advance(now);
        let mut results =
            IntegratorResults { max: self.max, seconds: self.seconds, ..IntegratorResults::default() };
        if self.seconds > 0.0 {
            results.average = self.sum / self.seconds;
            let variance = self.square_sum / self.seconds - results.average * results.average;
            results.deviation = variance.max(0.0).sqrt();
        }
        *self = Integrator { value: self.value, max: self.value, ..Integrator::new(now) };
        results
    }

    fn advance(&mut self, now: u64) {
        let seconds = now.saturating_sub(self.since) as f64 * 1e-9;
        self.since = self.since.max(now);
        self.seconds += seconds;
        self.sum += self.value * seconds;
        self.square_sum += self.value * self.value * seconds;
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn integrator_tracks_average_and_max_per_period() {
        let second = 1_000_000_000;
        let mut integrator = Integrator::new(0);
        integrator.set(second, 10);
        integrator.set(2 * second, 30);
        integrator.set(2 * second, 20);
        let results = integrator.reset(4 * second);
        assert_eq!((results.average, results.max, results.seconds), (12.5, 30.0, 4.0));
        assert!((results.deviation - 68.75f64.sqrt()).abs() < 1e-9, "{results:?}");
        // The next period starts where this one ended.
        let results = integrator.reset(5 * second);
        assert_eq!((results.average, results.deviation, results.max), (20.0, 0.0, 20.0));
        assert_eq!(
            integrator.reset(5 * second),
            IntegratorResults { max: 20.0, ..IntegratorResults::default() }
        );
    }
}
