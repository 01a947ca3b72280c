//! Seeded pseudo-random numbers, reproducible in tests.

/// A xorshift64* generator.
#[derive(Clone, Debug)]
pub struct Random(u64);

impl Random {
    /// The same seed yields the same sequence.
    pub fn new(seed: u64) -> Random {
        Random(seed.wrapping_mul(0x9e37_79b9_7f4a_7c15) | 1)
    }

    /// Returns the next number.
    pub fn next_u64(&mut self) -> u64 {
        self.0 ^= self.0 >> 12;
        self.0 ^= self.0 << 25;
        self.0 ^= self.0 >> 27;
        self.0.wrapping_mul(0x2545_f491_4f6c_dd1d)
    }

    /// Returns a number below `limit`; 0 if `limit` is 0.
    pub fn next_below(&mut self, limit: usize) -> usize {
        ((u128::from(self.next_u64()) * limit as u128) >> 64) as usize
    }

    /// Returns the index of the highest score, each of several equal ones with the same probability
    /// (reservoir sampling, as upstream's `selectHost`).
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
