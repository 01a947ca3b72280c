//! The housekeeping tick of a node. Its lease has to be renewed every ten seconds in any case. All
//! other periodic tasks run on the same tick, so that an idle node wakes up once and not once for
//! each of them.

use std::time::Duration;

use tokio::time::Instant;

const HOUSEKEEPING_INTERVAL: Duration = Duration::from_secs(10);

/// Ticks every ten seconds from its creation, for all waiters at once.
pub struct HousekeepingTicker(Instant);

impl HousekeepingTicker {
    pub fn start() -> HousekeepingTicker {
        HousekeepingTicker(Instant::now())
    }

    /// Waits for the next tick. A task that takes longer than the interval misses ticks.
    pub async fn tick(&self) {
        let ticks = self.0.elapsed().as_secs() / HOUSEKEEPING_INTERVAL.as_secs() + 1;
        let next = HOUSEKEEPING_INTERVAL.saturating_mul(u32::try_from(ticks).unwrap_or(u32::MAX));
        tokio::time::sleep_until(self.0 + next).await;
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[tokio::test(start_paused = true)]
    async fn wakes_all_waiters_on_the_same_tick() {
        let ticker = HousekeepingTicker::start();
        let start = Instant::now();
        let after = async |pause: u64| {
            tokio::time::sleep(Duration::from_secs(pause)).await;
            ticker.tick().await;
            start.elapsed().as_secs()
        };
        assert_eq!(tokio::join!(after(0), after(3), after(9), after(10), after(25)), (10, 10, 10, 20, 30));
    }
}
