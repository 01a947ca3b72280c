//! IP networks in CIDR notation.

use std::fmt;
use std::net::{IpAddr, Ipv4Addr, Ipv6Addr};
use std::str::FromStr;

/// A network of either family. The host bits are always zero.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub struct IpNet {
    first: IpAddr,
    bits: u8,
}

impl IpNet {
    /// The network with this prefix length that contains `address`; `None` if the length exceeds the
    /// address.
    pub fn new(address: IpAddr, bits: u8) -> Option<IpNet> {
        let first = match address {
            IpAddr::V4(v4) if bits <= 32 => {
                let mask = u32::MAX.checked_shl(u32::from(32 - bits)).unwrap_or(0);
                IpAddr::V4(Ipv4Addr::from_bits(v4.to_bits() & mask))
            }
            IpAddr::V6(v6) if bits <= 128 => {
                let mask = u128::MAX.checked_shl(u32::from(128 - bits)).unwrap_or(0);
                IpAddr::V6(Ipv6Addr::from_bits(v6.to_bits() & mask))
            }
            _ => return None,
        };
        Some(IpNet { first, bits })
    }

    pub fn contains(&self, address: IpAddr) -> bool {
        IpNet::new(address, self.bits).is_some_and(|net| net == *self)
    }

    pub fn first(&self) -> IpAddr {
        self.first
    }

    pub fn last(&self) -> IpAddr {
        match self.first {
            IpAddr::V4(v4) => {
                let host = u32::MAX.checked_shr(u32::from(self.bits)).unwrap_or(0);
                IpAddr::V4(Ipv4Addr::from_bits(v4.to_bits() | host))
            }
            IpAddr::V6(v6) => {
                let host = u128::MAX.checked_shr(u32::from(self.bits)).unwrap_or(0);
                IpAddr::V6(Ipv6Addr::from_bits(v6.to_bits() | host))
            }
        }
    }

    pub fn bits(&self) -> u8 {
        self.bits
    }

    pub fn is_v6(&self) -> bool {
        self.first.is_ipv6()
    }
}

impl From<IpAddr> for IpNet {
    fn from(first: IpAddr) -> IpNet {
        IpNet { first, bits: if first.is_ipv6() { 128 } else { 32 } }
    }
}

/// The error for a malformed network.
#[derive(Debug, PartialEq)]
pub struct ParseIpNetError;

impl fmt::Display for ParseIpNetError {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str("not a CIDR such as 10.0.0.0/8")
    }
}

impl std::error::Error for ParseIpNetError {}

impl FromStr for IpNet {
    type Err = ParseIpNetError;

    fn from_str(text: &str) -> Result<IpNet, ParseIpNetError> {
        let (address, bits) = text.split_once('/').ok_or(ParseIpNetError)?;
        let address = address.parse().map_err(|_| ParseIpNetError)?;
        IpNet::new(address, bits.parse().map_err(|_| ParseIpNetError)?).ok_or(ParseIpNetError)
    }
}

impl fmt::Display for IpNet {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{}/{}", self.first, self.bits)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[track_caller]
    fn check(net: &str, inside: &[&str], outside: &[&str]) {
        let net: IpNet = net.parse().unwrap();
        for address in inside {
            assert!(net.contains(address.parse().unwrap()), "{address} is in {net}");
        }
        for address in outside {
            assert!(!net.contains(address.parse().unwrap()), "{address} is not in {net}");
        }
    }

    #[test]
    fn contains() {
        check("10.1.2.3/8", &["10.0.0.0", "10.255.255.255"], &["11.0.0.0", "9.255.255.255", "::1"]);
        check("0.0.0.0/0", &["1.2.3.4"], &["::"]);
        check("2001:db8::1/32", &["2001:db8:ffff::"], &["2001:db9::", "10.0.0.1"]);
        check("::/0", &["::1"], &["127.0.0.1"]);
        check("10.0.0.1/32", &["10.0.0.1"], &["10.0.0.2"]);
    }

    #[test]
    fn first_and_last_address_of_a_network() {
        let net: IpNet = "10.1.0.0/16".parse().unwrap();
        assert_eq!((net.first(), net.last()), ("10.1.0.0".parse().unwrap(), "10.1.255.255".parse().unwrap()));
        assert_eq!("0.0.0.0/0".parse::<IpNet>().unwrap().last(), IpAddr::from([255; 4]));
        assert_eq!("::1/128".parse::<IpNet>().unwrap().last(), "::1".parse::<IpAddr>().unwrap());
    }

    #[test]
    fn rejects_malformed_networks() {
        for text in ["10.0.0.0", "10.0.0.0/33", "x/8", "::/129", "10.0.0.0/-1", ""] {
            assert_eq!(text.parse::<IpNet>(), Err(ParseIpNetError), "{text}");
        }
    }
}
