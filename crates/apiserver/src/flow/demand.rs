//! How many seats a level could use, over time: average, spread and peak of the last period.

/// The integrals of a value over the time since the last look.
#[derive(Clone, Copy, Debug)]
pub struct Demand {
    value: f64,
    since: u64,
    seconds: f64,
    sum: f64,
    squares: f64,
    peak: f64,
}

/// What was seen in a period.
#[derive(Clone, Copy, Debug, Default, PartialEq)]
pub struct Seen {
    pub average: f64,
    pub deviation: f64,
    pub peak: f64,
    /// A period of no length says nothing but its peak.
    pub seconds: f64,
}

impl Demand {
    pub fn new(now: u64) -> Demand {
        Demand { value: 0.0, since: now, seconds: 0.0, sum: 0.0, squares: 0.0, peak: 0.0 }
    }

    pub fn set(&mut self, now: u64, value: u64) {
        self.advance(now);
        self.value = value as f64;
        self.peak = self.peak.max(self.value);
    }

    /// Ends a period and begins the next.
    pub fn take(&mut self, now: u64) -> Seen {
        self.advance(now);
        let mut seen = Seen { peak: self.peak, seconds: self.seconds, ..Seen::default() };
        if self.seconds > 0.0 {
            seen.average = self.sum / self.seconds;
            let variance = self.squares / self.seconds - seen.average * seen.average;
            seen.deviation = variance.max(0.0).sqrt();
        }
        *self = Demand { value: self.value, peak: self.value, ..Demand::new(now) };
        seen
    }

    fn advance(&mut self, now: u64) {
        let seconds = now.saturating_sub(self.since) as f64 * 1e-9;
        self.since = self.since.max(now);
        self.seconds += seconds;
        self.sum += self.value * seconds;
        self.squares += self.value * self.value * seconds;
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn average_spread_and_peak_of_a_period() {
        let second = 1_000_000_000;
        let mut demand = Demand::new(0);
        demand.set(second, 10);
        demand.set(2 * second, 30);
        demand.set(2 * second, 20);
        let seen = demand.take(4 * second);
        assert_eq!((seen.average, seen.peak, seen.seconds), (12.5, 30.0, 4.0));
        assert!((seen.deviation - 68.75f64.sqrt()).abs() < 1e-9, "{seen:?}");
        // The next begins where this one ended.
        let seen = demand.take(5 * second);
        assert_eq!((seen.average, seen.deviation, seen.peak), (20.0, 0.0, 20.0));
        assert_eq!(demand.take(5 * second), Seen { peak: 20.0, ..Seen::default() });
    }
}
