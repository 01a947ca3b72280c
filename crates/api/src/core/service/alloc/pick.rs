//! Picks a free address or port.
//!
//! The low end of each range is preferred for static (requested) values: dynamic allocation uses the
//! upper part first and the lower part only when the upper part is full. Upstream: KEP-3070 for IPs and
//! KEP-3668 for node ports.

use std::collections::BTreeSet;
use std::net::IpAddr;
use std::ops::RangeInclusive;

use super::{AllocationRanges, AllocatorState, Family};
use crate::networking::ip::{self, Cidr};

pub(super) fn pick_ip(
    family: Family,
    ranges: &AllocationRanges,
    allocated: &[IpAddr],
    state: &mut dyn AllocatorState,
) -> Option<IpAddr> {
    let v6 = family == Family::IPv6;
    ranges.cidrs.iter().filter(|cidr| cidr.is_v6() == v6).find_map(|cidr| {
        let usable = usable(*cidr)?;
        let size = ip::to_number(cidr.last()).saturating_sub(ip::to_number(cidr.first())).saturating_add(1);
        pick(usable, reserved(size, 16, 256, 16), state, |state, number| {
            let ip = ip::from_number(number, v6);
            !state.ip_in_use(ip) && !allocated.contains(&ip)
        })
        .map(|number| ip::from_number(number, v6))
    })
}

pub(super) fn pick_port(
    ranges: &AllocationRanges,
    allocated: &BTreeSet<u16>,
    state: &mut dyn AllocatorState,
) -> Option<u16> {
    let ports = &ranges.node_ports;
    let size = u128::from(ports.end().saturating_sub(*ports.start())) + 1;
    let range = u128::from(*ports.start())..=u128::from(*ports.end());
    pick(range, reserved(size, 16, 128, 32), state, |state, port| {
        u16::try_from(port).is_ok_and(|port| !state.port_in_use(port) && !allocated.contains(&port))
    })
    .and_then(|port| u16::try_from(port).ok())
}

/// Whether the address can be allocated: not the network address, and not the IPv4 broadcast address.
pub(super) fn is_usable(cidr: Cidr, ip: IpAddr) -> bool {
    cidr.contains(ip) && usable(cidr).is_some_and(|range| range.contains(&ip::to_number(ip)))
}

fn usable(cidr: Cidr) -> Option<RangeInclusive<u128>> {
    let first = ip::to_number(cidr.first()).checked_add(1)?;
    let last = ip::to_number(cidr.last()).checked_sub(u128::from(!cidr.is_v6()))?;
    (first <= last).then_some(first..=last)
}

/// The size of the static band at the low end: `size / step` within these bounds.
fn reserved(size: u128, min: u128, max: u128, step: u128) -> u128 {
    if size <= min { 0 } else { (size / step).clamp(min, max) }
}

fn pick(
    range: RangeInclusive<u128>,
    reserved: u128,
    state: &mut dyn AllocatorState,
    is_free: impl Fn(&dyn AllocatorState, u128) -> bool,
) -> Option<u128> {
    let (first, last) = range.into_inner();
    let split = first.saturating_add(reserved);
    let mut scan = |low: u128, high: u128| {
        if low > high {
            return None;
        }
        let count = (high - low).saturating_add(1);
        // Start at a random value and wrap around, so that every free value is found.
        let start = low + u128::from(state.random(u64::try_from(count).unwrap_or(u64::MAX)));
        (start..=high).chain(low..start).find(|number| is_free(state, *number))
    };
    scan(split, last).or_else(|| scan(first, last.min(split.checked_sub(1)?)))
}
