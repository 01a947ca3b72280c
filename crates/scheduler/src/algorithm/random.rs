//! Small random numbers from a seed, so that tests can repeat what they saw.

/// A source of random numbers: xorshift64*.
#[derive(Clone, Debug)]
pub struct Random(u64);

impl Random {
    /// The same seed gives the same numbers.
    pub fn new(seed: u64) -> Random {
        Random(seed.wrapping_mul(0x9e37_79b9_7f4a_7c15) | 1)
    }

    /// The next number.
    pub fn next(&mut self) -> u64 {
        self.0 ^= self.0 >> 12;
        self.0 ^= self.0 << 25;
        self.0 ^= self.0 >> 27;
        self.0.wrapping_mul(0x2545_f491_4f6c_dd1d)
    }

    /// A number below the limit, 0 if the limit is 0.
    pub fn next_below(&mut self, limit: usize) -> usize {
        ((u128::from(self.next()) * limit as u128) >> 64) as usize
    }

    /// The place of the highest score; among equals each is as likely.
    pub fn best(&mut self, scores: &[i64]) -> usize {
        let (mut best, mut equals) = (0, 0);
        for (i, score) in scores.iter().enumerate() {
            if i == 0 || *score > scores[best] {
                (best, equals) = (i, 1);
            } else if *score == scores[best] {
                equals += 1;
                if self.next_below(equals) == 0 {
                    best = i;
                }
            }
        }
        best
    }
}
