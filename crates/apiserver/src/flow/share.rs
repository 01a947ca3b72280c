//! How the server's seats are divided among the levels: by shares at first, then by what each can use.
//!
//! A level lends what it does not need and borrows what others lend, within its bounds. Upstream's formulas.

use super::demand::Seen;

/// What a PriorityLevelConfiguration says about seats.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Share {
    pub exempt: bool,
    pub shares: u64,
    pub lendable_percent: u64,
    /// Without a limit a level may borrow everything.
    pub borrowing_percent: Option<u64>,
}

/// The seats of a level: by its shares, and between what bounds they may be more or fewer.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Bounds {
    pub nominal: u64,
    pub min: u64,
    pub max: u64,
}

/// What a level is known to use.
#[derive(Clone, Copy, Debug, Default, PartialEq)]
pub struct Usage {
    pub seen: Seen,
    pub smoothed: f64,
}

/// One level, in the division of seats.
#[derive(Clone, Copy, Debug)]
pub struct Claim {
    pub exempt: bool,
    pub bounds: Bounds,
    pub usage: Usage,
    /// What it has now.
    pub current: u64,
}

/// What a level is given, and what it was judged to need.
#[derive(Clone, Copy, Debug, Default, PartialEq)]
pub struct Grant {
    pub seats: u64,
    pub target: f64,
}

/// How slowly the memory of high demand fades: by half in five minutes of ten-second periods.
const SMOOTHING: f64 = 0.977;
/// A level nobody uses still has some weight.
const MIN_TARGET: f64 = 0.001;
const EPSILON: f64 = 1e-7;

impl Usage {
    pub fn update(&mut self, seen: Seen) {
        self.seen.peak = seen.peak;
        if seen.seconds > 0.0 {
            self.seen = seen;
            let envelope = seen.average + seen.deviation;
            self.smoothed = envelope.max(SMOOTHING * self.smoothed + (1.0 - SMOOTHING) * envelope);
        }
    }
}

/// The bounds of each level when they divide `total` seats.
pub fn bounds(total: u64, shares: &[Share]) -> Vec<Bounds> {
    let sum: u64 = shares.iter().map(|share| share.shares).sum();
    let of = |share: &Share| {
        // Rounded up: a little more than there is does no harm, none at all does.
        let nominal = (total * share.shares).checked_div(sum).unwrap_or(0);
        let nominal = nominal + u64::from(nominal * sum < total * share.shares);
        let percent = |percent: u64| (nominal as f64 * percent as f64 / 100.0).round() as u64;
        Bounds {
            nominal,
            min: nominal - percent(share.lendable_percent.min(100)),
            max: nominal + share.borrowing_percent.map_or(total, percent),
        }
    };
    shares.iter().map(of).collect()
}

/// Divides the seats anew by what each level used in the last period; also the fair fraction of its target
/// that every level can have.
pub fn divide(claims: &[Claim]) -> (Vec<Grant>, f64) {
    let total: u64 = claims.iter().map(|claim| claim.bounds.nominal).sum();
    let peak = |claim: &Claim| claim.usage.seen.peak.round() as u64;
    // What a level used at its busiest is not lent away; exempt ones have what they take.
    let least = |claim: &Claim| match claim.exempt {
        true => claim.bounds.min.max(peak(claim)),
        false => claim.bounds.min.max(claim.bounds.nominal.min(peak(claim))),
    };
    let exempt: u64 = claims.iter().filter(|claim| claim.exempt).map(least).sum();
    let left = total.saturating_sub(exempt);
    let limited = || claims.iter().filter(|claim| !claim.exempt);
    let min_sum: u64 = limited().map(|claim| claim.bounds.min).sum();
    let least_sum: u64 = limited().map(least).sum();
    let targets: Vec<Target> = limited()
        .map(|claim| Target {
            low: least(claim) as f64,
            high: claim.bounds.max as f64,
            target: (least(claim) as f64).max(claim.usage.smoothed),
        })
        .collect();
    let mut fair = 0.0;
    let given: Vec<u64> = if left <= min_sum {
        limited().map(|claim| claim.bounds.min).collect()
    } else if left <= least_sum {
        let part = (left - min_sum) as f64 / (least_sum - min_sum) as f64;
        let of = |claim: &Claim| {
            claim.bounds.min + ((least(claim) - claim.bounds.min) as f64 * part).round() as u64
        };
        limited().map(of).collect()
    } else {
        match allocate(total as f64, &targets) {
            Some((seats, fraction)) => {
                fair = fraction;
                seats.iter().map(|seats| seats.round() as u64).collect()
            }
            None => limited().map(|claim| claim.current).collect(),
        }
    };
    let mut given = given.into_iter().zip(&targets);
    let grants = claims.iter().map(|claim| match claim.exempt {
        true => Grant { seats: least(claim), target: 0.0 },
        false => {
            given.next().map_or(Grant::default(), |(seats, target)| Grant { seats, target: target.target })
        }
    });
    (grants.collect(), fair)
}

struct Target {
    low: f64,
    high: f64,
    target: f64,
}

/// The same fraction of its target for everybody, except where that is out of bounds, such that all is
/// given; and that fraction. `None` where the bounds leave no way.
fn allocate(sum: f64, targets: &[Target]) -> Option<(Vec<f64>, f64)> {
    let weight = |target: &Target| target.target.max(MIN_TARGET);
    let give = |target: &Target, fraction: f64| (fraction * weight(target)).min(target.high).max(target.low);
    let given = |fraction: f64| targets.iter().map(|target| give(target, fraction)).sum::<f64>();
    // What is given grows with the fraction, in straight lines that bend where somebody meets a bound.
    let mut bends: Vec<f64> = targets
        .iter()
        .flat_map(|target| [target.low / weight(target), target.high / weight(target)])
        .collect();
    bends.sort_unstable_by(f64::total_cmp);
    let (first, last) = (*bends.first()?, *bends.last()?);
    if given(first) > sum + EPSILON || given(last) < sum - EPSILON {
        return None;
    }
    let above = bends.partition_point(|bend| given(*bend) < sum - EPSILON);
    let fraction = match (above.checked_sub(1).map(|i| bends[i]), bends.get(above)) {
        (None, _) => first,
        (Some(below), None) => below,
        (Some(below), Some(above)) => {
            let (from, to) = (given(below), given(*above));
            if to - from > 0.0 { below + (above - below) * (sum - from) / (to - from) } else { *above }
        }
    };
    Some((targets.iter().map(|target| give(target, fraction)).collect(), fraction))
}

#[cfg(test)]
mod tests {
    use super::*;

    fn share(shares: u64, lendable_percent: u64) -> Share {
        Share { exempt: false, shares, lendable_percent, borrowing_percent: None }
    }

    #[test]
    fn the_defaults_divide_600_seats_as_upstream_does() {
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
        let found: Vec<_> = bounds(600, &shares).iter().map(|b| (b.nominal, b.min, b.max)).collect();
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
        assert_eq!(bounds(600, &[share(0, 0)]), [Bounds { nominal: 0, min: 0, max: 600 }]);
    }

    fn claim(nominal: u64, min: u64, used: f64) -> Claim {
        let mut usage = Usage::default();
        usage.update(Seen { average: used, deviation: 0.0, peak: used, seconds: 10.0 });
        Claim { exempt: false, bounds: Bounds { nominal, min, max: nominal + 600 }, usage, current: nominal }
    }

    #[track_caller]
    fn check(claims: &[Claim], expected: &[u64]) {
        let (grants, _) = divide(claims);
        assert_eq!(grants.iter().map(|grant| grant.seats).collect::<Vec<_>>(), expected);
    }

    #[test]
    fn who_needs_seats_borrows_from_who_lends() {
        // The second could use far more than it has, the first nothing: it keeps only what it does not lend.
        check(&[claim(100, 10, 0.0), claim(100, 50, 500.0)], &[10, 190]);
        // What the first has used at its busiest is not lent.
        check(&[claim(100, 10, 60.0), claim(100, 50, 500.0)], &[60, 140]);
        // Nobody borrows beyond their bound; the rest goes back.
        let mut bounded = claim(100, 50, 500.0);
        bounded.bounds.max = 120;
        check(&[claim(100, 10, 0.0), bounded], &[80, 120]);
        // Nobody uses anything: in proportion to what cannot be lent.
        check(&[claim(100, 50, 0.0), claim(100, 50, 0.0)], &[100, 100]);
        // Exempt ones take what they take, first from what can be lent.
        let exempt =
            Claim { exempt: true, bounds: Bounds { nominal: 0, min: 0, max: 0 }, ..claim(0, 0, 150.0) };
        check(&[exempt, claim(100, 10, 100.0), claim(100, 10, 100.0)], &[150, 25, 25]);
        let exempt = Claim { usage: claim(0, 0, 500.0).usage, ..exempt };
        check(&[exempt, claim(100, 10, 100.0), claim(100, 10, 100.0)], &[500, 10, 10]);
    }

    #[test]
    fn demand_fades_slowly() {
        let mut usage = Usage::default();
        usage.update(Seen { average: 100.0, deviation: 0.0, peak: 100.0, seconds: 10.0 });
        for _ in 0..30 {
            usage.update(Seen { average: 0.0, deviation: 0.0, peak: 0.0, seconds: 10.0 });
        }
        assert!((usage.smoothed - 50.0).abs() < 1.0, "{usage:?}");
    }
}
