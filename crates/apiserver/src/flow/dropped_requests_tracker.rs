//! The Retry-After of rejected requests, which grows with the number of recently rejected ones.
//! Upstream: `droppedRequestsTracker`.

use std::collections::VecDeque;

/// The largest Retry-After in seconds.
const MAX_RETRY_AFTER_SECONDS: u64 = 32;

/// How many requests of a level were rejected in each of the last seconds.
#[derive(Debug)]
pub struct DroppedRequestsTracker {
    history: VecDeque<(u64, u64)>,
    second: u64,
    count: u64,
    retry_after: u64,
    last_increase: Option<u64>,
}

impl Default for DroppedRequestsTracker {
    fn default() -> DroppedRequestsTracker {
        DroppedRequestsTracker {
            history: VecDeque::new(),
            second: 0,
            count: 0,
            retry_after: 1,
            last_increase: None,
        }
    }
}

impl DroppedRequestsTracker {
    /// Counts a rejected request in this second and returns its Retry-After in seconds.
    pub fn record_dropped_request(&mut self, second: u64) -> u64 {
        if self.second == second {
            self.count += 1;
            return self.retry_after;
        }
        if self.count > 0 {
            self.history.push_back((self.second, self.count));
        }
        let keep = (2 * self.retry_after).min(MAX_RETRY_AFTER_SECONDS);
        self.history.retain(|(at, _)| second.saturating_sub(*at) <= keep.max(1) + 1);
        (self.second, self.count) = (second, 1);
        self.adjust(second);
        self.retry_after
    }

    /// Doubles the Retry-After if many requests were rejected within it, and decrements it if few
    /// were: multiplicative increase, additive decrease.
    fn adjust(&mut self, now: u64) {
        let recent =
            self.history.iter().filter(|(at, _)| now.saturating_sub(*at) <= self.retry_after && *at < now);
        let dropped_count: u64 = recent.map(|(_, count)| count).sum();
        let can_increase = self.last_increase.is_none_or(|at| now.saturating_sub(at) >= self.retry_after);
        if can_increase && dropped_count >= 3 * self.retry_after {
            self.retry_after = (self.retry_after * 2).min(MAX_RETRY_AFTER_SECONDS);
            self.last_increase = Some(now);
        } else if dropped_count < self.retry_after && self.retry_after > 1 {
            self.retry_after -= 1;
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn retry_after_follows_the_number_of_dropped_requests() {
        let mut tracker = DroppedRequestsTracker::default();
        let mut results = Vec::new();
        for second in 100..116 {
            let per_second = if second < 108 { 50 } else { 1 };
            let values: Vec<u64> = (0..per_second).map(|_| tracker.record_dropped_request(second)).collect();
            results.push(values[0]);
        }
        assert_eq!(results, [1, 2, 2, 4, 4, 4, 4, 8, 8, 8, 8, 8, 8, 8, 8, 16]);
        for second in (200..300).step_by(3) {
            tracker.record_dropped_request(second);
        }
        assert_eq!(tracker.record_dropped_request(300), 1);
    }
}
