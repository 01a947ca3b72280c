//! Bandwidth limits of pods, from the annotations `kubernetes.io/ingress-bandwidth` and
//! `kubernetes.io/egress-bandwidth`.
//!
//! Counterpart: the CNI `bandwidth` plugin.

use std::io;

use serde::{Deserialize, Serialize};
use sys::netlink::{Netlink, Rate};

/// The longest time a packet may be queued. The CNI `bandwidth` plugin has the same value.
const LATENCY_MS: u64 = 25;
/// The burst is the amount that the rate allows in this time, but at least [`MIN_BURST_BYTES`]: less
/// than a few packets would stall the link.
const BURST_MS: u64 = 100;
const MIN_BURST_BYTES: u64 = 16 << 10;

/// Limits in bits per second; 0 means unlimited.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
pub struct Bandwidth {
    /// Traffic to the pod.
    pub ingress: u64,
    /// Traffic from the pod.
    pub egress: u64,
}

/// Limits what a link sends to `bits` per second; 0 means unlimited.
pub(crate) fn limit(netlink: &mut Netlink, index: u32, bits: u64) -> io::Result<()> {
    if bits == 0 {
        return Ok(());
    }
    netlink.set_rate_limit(index, rate(bits))
}

fn rate(bits: u64) -> Rate {
    let bytes = (bits / 8).max(1);
    let within = |time: u64| bytes.saturating_mul(time) / 1000;
    let burst = within(BURST_MS).max(MIN_BURST_BYTES);
    let to_u32 = |value: u64| u32::try_from(value).unwrap_or(u32::MAX);
    Rate { bytes, burst: to_u32(burst), queue: to_u32(burst.saturating_add(within(LATENCY_MS))) }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn bits_become_bytes() {
        assert_eq!(rate(8_000_000), Rate { bytes: 1_000_000, burst: 100_000, queue: 125_000 });
        assert_eq!(rate(1_000), Rate { bytes: 125, burst: 16 << 10, queue: (16 << 10) + 3 });
        assert_eq!(rate(u64::MAX).burst, u32::MAX);
        assert_eq!(rate(1).bytes, 1);
    }
}
