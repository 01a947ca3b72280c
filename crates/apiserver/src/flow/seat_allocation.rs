//! Divides the server's seats among the priority levels: nominally by shares, then by measured
//! demand.
//!
//! A level lends seats that it does not need and borrows those of others, within its limits. The
//! formulas are upstream's (`flowcontrol/conc_alloc.go`).

use super::integrator::IntegratorResults;

/// The concurrency configuration of a PriorityLevelConfiguration.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct ConcurrencyShares {
    pub exempt: bool,
    pub shares: u64,
    pub lendable_percent: u64,
    /// `None`: no borrowing limit.
    pub borrowing_percent: Option<u64>,
}

/// The nominal seats of a level by its shares, and the limits of lending and borrowing.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct ConcurrencyLimits {
    pub nominal: u64,
    pub min: u64,
    pub max: u64,
}

/// The measured seat demand of a level.
#[derive(Clone, Copy, Debug, Default, PartialEq)]
pub struct SeatUsage {
    pub last_period: IntegratorResults,
    pub smoothed: f64,
}

/// One level as input of the seat allocation.
#[derive(Clone, Copy, Debug)]
pub struct SeatClaim {
    pub exempt: bool,
    pub bounds: ConcurrencyLimits,
    pub usage: SeatUsage,
    /// Its current concurrency limit.
    pub current: u64,
}

/// The seats of a level and its allocation target.
#[derive(Clone, Copy, Debug, Default, PartialEq)]
pub struct SeatAllocation {
    pub seats: u64,
    pub target: f64,
}

/// How slowly past demand decays: by half in five minutes of ten-second periods.
const SMOOTHING_COEFFICIENT: f64 = 0.977;
/// The minimum weight of an idle level.
const MIN_TARGET_SEATS: f64 = 0.001;
const EPSILON: f64 = 1e-7;

impl SeatUsage {
    pub fn update(&mut self, results: IntegratorResults) {
        self.last_period.max = results.max;
        if results.seconds > 0.0 {
            self.last_period = results;
            let envelope = results.average + results.deviation;
            self.smoothed = envelope
                .max(SMOOTHING_COEFFICIENT * self.smoothed + (1.0 - SMOOTHING_COEFFICIENT) * envelope);
        }
    }
}

/// The limits of each level when they divide `total` seats.
pub fn concurrency_limits(total: u64, shares: &[ConcurrencyShares]) -> Vec<ConcurrencyLimits> {
    let sum: u64 = shares.iter().map(|share| share.shares).sum();
    let of = |share: &ConcurrencyShares| {
        // Rounded up: slight overcommitment is harmless, a level without seats is not.
        let nominal = (total * share.shares).checked_div(sum).unwrap_or(0);
        let nominal = nominal + u64::from(nominal * sum < total * share.shares);
        let percent = |percent: u64| (nominal as f64 * percent as f64 / 100.0).round() as u64;
        ConcurrencyLimits {
            nominal,
            min: nominal - percent(share.lendable_percent.min(100)),
            max: nominal + share.borrowing_percent.map_or(total, percent),
        }
    };
    shares.iter().map(of).collect()
}

/// Reallocates the seats by the demand of the last period. Also returns the fair fraction: the part
/// of its target that every level can have.
pub fn compute_allocations(claims: &[SeatClaim]) -> (Vec<SeatAllocation>, f64) {
    let total: u64 = claims.iter().map(|claim| claim.bounds.nominal).sum();
    let max_seats = |claim: &SeatClaim| claim.usage.last_period.max.round() as u64;
    // Seats up to a level's peak demand are not lent. Exempt levels get what they use.
    let min_needed = |claim: &SeatClaim| match claim.exempt {
        true => claim.bounds.min.max(max_seats(claim)),
        false => claim.bounds.min.max(claim.bounds.nominal.min(max_seats(claim))),
    };
    let exempt: u64 = claims.iter().filter(|claim| claim.exempt).map(min_needed).sum();
    let left = total.saturating_sub(exempt);
    let limited = || claims.iter().filter(|claim| !claim.exempt);
    let min_sum: u64 = limited().map(|claim| claim.bounds.min).sum();
    let min_needed_sum: u64 = limited().map(min_needed).sum();
    let items: Vec<AllocationItem> = limited()
        .map(|claim| AllocationItem {
            lower_bound: min_needed(claim) as f64,
            upper_bound: claim.bounds.max as f64,
            target: (min_needed(claim) as f64).max(claim.usage.smoothed),
        })
        .collect();
    let mut fair_fraction = 0.0;
    let given: Vec<u64> = if left <= min_sum {
        limited().map(|claim| claim.bounds.min).collect()
    } else if left <= min_needed_sum {
        let part = (left - min_sum) as f64 / (min_needed_sum - min_sum) as f64;
        let of = |claim: &SeatClaim| {
            claim.bounds.min + ((min_needed(claim) - claim.bounds.min) as f64 * part).round() as u64
        };
        limited().map(of).collect()
    } else {
        match compute_fair_allocation(total as f64, &items) {
            Some((seats, fraction)) => {
                fair_fraction = fraction;
                seats.iter().map(|seats| seats.round() as u64).collect()
            }
            None => limited().map(|claim| claim.current).collect(),
        }
    };
    let mut given = given.into_iter().zip(&items);
    let allocations = claims.iter().map(|claim| match claim.exempt {
        true => SeatAllocation { seats: min_needed(claim), target: 0.0 },
        false => given
            .next()
            .map_or(SeatAllocation::default(), |(seats, item)| SeatAllocation { seats, target: item.target }),
    });
    (allocations.collect(), fair_fraction)
}

struct AllocationItem {
    lower_bound: f64,
    upper_bound: f64,
    target: f64,
}

/// Gives every level the same fraction of its target, clamped to its bounds, such that the sum is
/// exactly `sum`. Also returns the fraction. `None` if the bounds allow no solution.
fn compute_fair_allocation(sum: f64, items: &[AllocationItem]) -> Option<(Vec<f64>, f64)> {
    let weight = |item: &AllocationItem| item.target.max(MIN_TARGET_SEATS);
    let seats_at = |item: &AllocationItem, fraction: f64| {
        (fraction * weight(item)).min(item.upper_bound).max(item.lower_bound)
    };
    let given = |fraction: f64| items.iter().map(|item| seats_at(item, fraction)).sum::<f64>();
    // The sum is piecewise linear in the fraction, with a breakpoint where a level reaches a bound.
    let mut thresholds: Vec<f64> = items
        .iter()
        .flat_map(|item| [item.lower_bound / weight(item), item.upper_bound / weight(item)])
        .collect();
    thresholds.sort_unstable_by(f64::total_cmp);
    let (first, last) = (*thresholds.first()?, *thresholds.last()?);
    if given(first) > sum + EPSILON || given(last) < sum - EPSILON {
        return None;
    }
    let above = thresholds.partition_point(|threshold| given(*threshold) < sum - EPSILON);
    let fraction = match (above.checked_sub(1).map(|i| thresholds[i]), thresholds.get(above)) {
        (None, _) => first,
        (Some(below), None) => below,
        (Some(below), Some(above)) => {
            let (from, to) = (given(below), given(*above));
            if to - from > 0.0 { below + (above - below) * (sum - from) / (to - from) } else { *above }
        }
    };
    Some((items.iter().map(|item| seats_at(item, fraction)).collect(), fraction))
}

#[cfg(test)]
mod tests {
    use super::*;

    fn share(shares: u64, lendable_percent: u64) -> ConcurrencyShares {
        ConcurrencyShares { exempt: false, shares, lendable_percent, borrowing_percent: None }
    }

    #[test]
    fn default_levels_match_upstream_limits() {
        // system, node-high, leader-election, workload-high, workload-low, global-default, catch-all, exempt
        let mut shares = [
            share(30, 33),
            share(40, 25),
            share(10, 0),
            share(40, 50),
            share(100, 90),
            share(20, 50),
            share(5, 0),
            share(0, 0),
        ];
        shares[7].exempt = true;
        let found: Vec<_> =
            concurrency_limits(600, &shares).iter().map(|b| (b.nominal, b.min, b.max)).collect();
        let expected = [
            (74, 50, 674),
            (98, 73, 698),
            (25, 25, 625),
            (98, 49, 698),
            (245, 24, 845),
            (49, 24, 649),
            (13, 13, 613),
            (0, 0, 600),
        ];
        assert_eq!(found, expected);
        assert_eq!(
            concurrency_limits(600, &[share(0, 0)]),
            [ConcurrencyLimits { nominal: 0, min: 0, max: 600 }]
        );
    }

    fn claim(nominal: u64, min: u64, used: f64) -> SeatClaim {
        let mut usage = SeatUsage::default();
        usage.update(IntegratorResults { average: used, deviation: 0.0, max: used, seconds: 10.0 });
        SeatClaim {
            exempt: false,
            bounds: ConcurrencyLimits { nominal, min, max: nominal + 600 },
            usage,
            current: nominal,
        }
    }

    #[track_caller]
    fn check(claims: &[SeatClaim], expected: &[u64]) {
        let (allocations, _) = compute_allocations(claims);
        assert_eq!(allocations.iter().map(|allocation| allocation.seats).collect::<Vec<_>>(), expected);
    }

    #[test]
    fn busy_level_uses_lendable_seats_of_idle_level() {
        // The second level could use far more than it has, the first is idle and keeps only what it
        // does not lend.
        check(&[claim(100, 10, 0.0), claim(100, 50, 500.0)], &[10, 190]);
        // Seats up to the peak demand of the first are not lent.
        check(&[claim(100, 10, 60.0), claim(100, 50, 500.0)], &[60, 140]);
        // Borrowing stops at the limit; the remaining seats return to their owner.
        let mut bounded = claim(100, 50, 500.0);
        bounded.bounds.max = 120;
        check(&[claim(100, 10, 0.0), bounded], &[80, 120]);
        // All levels are idle: in proportion to what cannot be lent.
        check(&[claim(100, 50, 0.0), claim(100, 50, 0.0)], &[100, 100]);
        // Exempt levels take what they use, lendable seats first.
        let exempt = SeatClaim {
            exempt: true,
            bounds: ConcurrencyLimits { nominal: 0, min: 0, max: 0 },
            ..claim(0, 0, 150.0)
        };
        check(&[exempt, claim(100, 10, 100.0), claim(100, 10, 100.0)], &[150, 25, 25]);
        let exempt = SeatClaim { usage: claim(0, 0, 500.0).usage, ..exempt };
        check(&[exempt, claim(100, 10, 100.0), claim(100, 10, 100.0)], &[500, 10, 10]);
    }

    #[test]
    fn smoothed_usage_is_half_after_five_minutes() {
        let mut usage = SeatUsage::default();
        usage.update(IntegratorResults { average: 100.0, deviation: 0.0, max: 100.0, seconds: 10.0 });
        for _ in 0..30 {
            usage.update(IntegratorResults { average: 0.0, deviation: 0.0, max: 0.0, seconds: 10.0 });
        }
        assert!((usage.smoothed - 50.0).abs() < 1.0, "{usage:?}");
    }
}
