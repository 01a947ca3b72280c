//! CIDR ranges that pod addresses are allocated from.

use std::fmt;
use std::net::{IpAddr, Ipv4Addr, Ipv6Addr};
use std::str::FromStr;

/// A range such as `10.42.0.0/24`. Host bits are always zero.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub struct Cidr {
    base: u128,
    prefix: u8,
    is_v4: bool,
}

impl Cidr {
    fn bits(self) -> u8 {
        if self.is_v4 { 32 } else { 128 }
    }

    /// The range with this prefix length that contains `ip`.
    pub fn around(ip: IpAddr, prefix: u8) -> Cidr {
        let (value, is_v4) = number(ip);
        let bits = if is_v4 { 32 } else { 128 };
        let prefix = prefix.min(bits);
        Cidr { base: value & mask(prefix, bits), prefix, is_v4 }
    }

    /// The network address.
    pub fn base(self) -> IpAddr {
        self.address(self.base)
    }

    pub fn prefix(self) -> u8 {
        self.prefix
    }

    /// The n-th address of the range. `None` for the network address, the IPv4 broadcast address and
    /// anything outside.
    pub fn nth(self, n: u64) -> Option<IpAddr> {
        let size = 1u128.checked_shl(u32::from(self.bits() - self.prefix)).unwrap_or(u128::MAX);
        // The last address of an IPv4 range is the broadcast address.
        let last = if self.is_v4 { size.saturating_sub(2) } else { size.saturating_sub(1) };
        (n > 0 && u128::from(n) <= last).then(|| self.address(self.base + u128::from(n)))
    }

    /// The node's own address in the range.
    pub fn gateway(self) -> IpAddr {
        self.nth(1).unwrap_or_else(|| self.address(self.base))
    }

    /// The first subrange with this prefix length, or the range itself if it is not larger.
    pub fn first(self, prefix: u8) -> Cidr {
        Cidr { prefix: prefix.clamp(self.prefix, self.bits()), ..self }
    }

    pub fn contains(self, ip: IpAddr) -> bool {
        let (value, is_v4) = number(ip);
        is_v4 == self.is_v4 && value & mask(self.prefix, self.bits()) == self.base
    }

    pub fn is_ipv6(self) -> bool {
        !self.is_v4
    }

    fn address(self, value: u128) -> IpAddr {
        if self.is_v4 { IpAddr::V4(Ipv4Addr::from(value as u32)) } else { IpAddr::V6(Ipv6Addr::from(value)) }
    }
}

fn number(ip: IpAddr) -> (u128, bool) {
    match ip {
        IpAddr::V4(ip) => (u128::from(u32::from(ip)), true),
        IpAddr::V6(ip) => (u128::from(ip), false),
    }
}

fn mask(prefix: u8, bits: u8) -> u128 {
    let all = if bits == 32 { u128::from(u32::MAX) } else { u128::MAX };
    all & all.checked_shl(u32::from(bits - prefix)).unwrap_or(0)
}

impl FromStr for Cidr {
    type Err = String;

    fn from_str(text: &str) -> Result<Cidr, String> {
        let wrong = || format!("{text:?} is not a CIDR such as 10.42.0.0/24");
        let (ip, prefix) = text.split_once('/').ok_or_else(wrong)?;
        let (base, is_v4) = number(ip.parse().map_err(|_| wrong())?);
        let bits = if is_v4 { 32 } else { 128 };
        let prefix: u8 = prefix.parse().ok().filter(|prefix| *prefix <= bits).ok_or_else(wrong)?;
        Ok(Cidr { base: base & mask(prefix, bits), prefix, is_v4 })
    }
}

impl fmt::Display for Cidr {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{}/{}", self.address(self.base), self.prefix)
    }
}
