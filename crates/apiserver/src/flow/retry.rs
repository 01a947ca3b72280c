//! When the refused shall come again: the longer, the more have been refused lately.

use std::collections::VecDeque;

/// The most seconds anybody is told to wait.
const MAX: u64 = 32;

/// How many requests of a level were refused in each of the last seconds.
#[derive(Debug)]
pub struct Refusals {
    history: VecDeque<(u64, u64)>,
    second: u64,
    count: u64,
    after: u64,
    raised: Option<u64>,
}

impl Default for Refusals {
    fn default() -> Refusals {
        Refusals { history: VecDeque::new(), second: 0, count: 0, after: 1, raised: None }
    }
}

impl Refusals {
    /// One more is refused in this second; after how many it may come again.
    pub fn refuse(&mut self, second: u64) -> u64 {
        if self.second == second {
            self.count += 1;
            return self.after;
        }
        if self.count > 0 {
            self.history.push_back((self.second, self.count));
        }
        let keep = (2 * self.after).min(MAX);
        self.history.retain(|(at, _)| second.saturating_sub(*at) <= keep.max(1) + 1);
        (self.second, self.count) = (second, 1);
        self.adjust(second);
        self.after
    }

    /// Doubles where many were refused in the time the last were told to wait, and shrinks by one where few
    /// were, as TCP does.
    fn adjust(&mut self, now: u64) {
        let lately = self.history.iter().filter(|(at, _)| now.saturating_sub(*at) <= self.after && *at < now);
        let refused: u64 = lately.map(|(_, count)| count).sum();
        let rested = self.raised.is_none_or(|at| now.saturating_sub(at) >= self.after);
        if rested && refused >= 3 * self.after {
            self.after = (self.after * 2).min(MAX);
            self.raised = Some(now);
        } else if refused < self.after && self.after > 1 {
            self.after -= 1;
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn many_refusals_double_the_wait_and_few_shorten_it() {
        let mut refusals = Refusals::default();
        let mut told = Vec::new();
        for second in 100..116 {
            let per_second = if second < 108 { 50 } else { 1 };
            let answers: Vec<u64> = (0..per_second).map(|_| refusals.refuse(second)).collect();
            told.push(answers[0]);
        }
        assert_eq!(told, [1, 2, 2, 4, 4, 4, 4, 8, 8, 8, 8, 8, 8, 8, 8, 16]);
        for second in (200..300).step_by(3) {
            refusals.refuse(second);
        }
        assert_eq!(refusals.refuse(300), 1);
    }
}
