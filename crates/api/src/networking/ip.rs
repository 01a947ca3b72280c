//! IP addresses and CIDRs in API fields: parsing, ranges, and validation beyond their format, which is
//! in `names`.

use std::net::{IpAddr, Ipv4Addr, Ipv6Addr};

use crate::field::{ErrorList, Path};
use crate::names;

/// A CIDR with the host bits cleared.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Cidr {
    addr: IpAddr,
    bits: u8,
}

/// Parses an address with optional leading zeros. An IPv4-mapped IPv6 address becomes IPv4.
pub fn parse(value: &str) -> Option<IpAddr> {
    names::parse_ip(value).map(|ip| ip.to_canonical())
}

/// Whether the text is an IPv6 address.
pub fn is_v6(value: &str) -> bool {
    matches!(parse(value), Some(IpAddr::V6(_)))
}

impl Cidr {
    /// Parses a CIDR. Leading zeros and host bits are accepted.
    pub fn parse(value: &str) -> Option<Cidr> {
        let (addr, bits) = names::parse_cidr(value)?;
        // ::ffff:10.0.0.0/104 is 10.0.0.0/8.
        let (addr, bits) = match (addr, addr.to_canonical()) {
            (IpAddr::V6(_), v4 @ IpAddr::V4(_)) if bits >= 96 => (v4, bits - 96),
            _ => (addr, bits),
        };
        Some(Cidr { addr: names::mask(addr, bits), bits })
    }

    pub fn is_v6(self) -> bool {
        self.addr.is_ipv6()
    }

    pub fn contains(self, ip: IpAddr) -> bool {
        ip.is_ipv6() == self.is_v6() && names::mask(ip, self.bits) == self.addr
    }

    pub fn prefix_length(self) -> u8 {
        self.bits
    }

    /// The network address.
    pub fn first(self) -> IpAddr {
        self.addr
    }

    /// The highest address.
    pub fn last(self) -> IpAddr {
        from_number(to_number(self.addr) | self.host_mask(), self.is_v6())
    }

    /// The number of addresses minus one; the number itself may overflow.
    fn host_mask(self) -> u128 {
        let host_bits = address_bits(self.addr).saturating_sub(self.bits);
        1_u128.checked_shl(host_bits.into()).map_or(u128::MAX, |size| size - 1)
    }
}

impl std::fmt::Display for Cidr {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        write!(f, "{}/{}", self.addr, self.bits)
    }
}

/// The address as a number, for iterating over ranges.
pub fn to_number(ip: IpAddr) -> u128 {
    match ip {
        IpAddr::V4(ip) => ip.to_bits().into(),
        IpAddr::V6(ip) => ip.to_bits(),
    }
}

/// The inverse of [`to_number`].
pub fn from_number(number: u128, v6: bool) -> IpAddr {
    match u32::try_from(number) {
        Ok(bits) if !v6 => IpAddr::V4(Ipv4Addr::from_bits(bits)),
        _ => IpAddr::V6(Ipv6Addr::from_bits(number)),
    }
}

/// Reports addresses that are not allowed for endpoints.
pub fn validate_endpoint_ip(value: &str, path: &Path, errors: &mut ErrorList) {
    let Some(ip) = parse(value) else {
        errors.invalid(path, value, "must be a valid IP address");
        return;
    };
    let (link_local, link_local_multicast) = match ip {
        IpAddr::V4(ip) => (ip.is_link_local(), ip.octets()[..3] == [224, 0, 0]),
        IpAddr::V6(ip) => (ip.is_unicast_link_local(), ip.segments()[0] & 0xff0f == 0xff02),
    };
    if ip.is_unspecified() {
        errors.invalid(path, value, &format!("may not be unspecified ({value})"));
    }
    if ip.is_loopback() {
        errors.invalid(path, value, "may not be in the loopback range (127.0.0.0/8, ::1/128)");
    }
    if link_local {
        errors.invalid(path, value, "may not be in the link-local range (169.254.0.0/16, fe80::/10)");
    }
    if link_local_multicast {
        let detail = "may not be in the link-local multicast range (224.0.0.0/24, ff02::/10)";
        errors.invalid(path, value, detail);
    }
}

/// Warns about an address that is not in canonical form.
pub fn format_warning(value: &str, path: &Path) -> Option<String> {
    let written = names::parse_ip(value)?;
    let ip = written.to_canonical();
    if !names::ip_any_form(value).is_empty() {
        return Some(format!("{path}: non-standard IP address {value:?} is invalid: use \"{ip}\""));
    }
    (ip.is_ipv6() && ip.to_string() != value)
        .then(|| format!("{path}: IPv6 address {value:?} should be in RFC 5952 canonical format (\"{ip}\")"))
}

/// Warns about a CIDR that is not in canonical form.
pub fn cidr_warnings(value: &str, path: &Path) -> Vec<String> {
    let (Some((written, _)), Some(network)) = (names::parse_cidr(value), Cidr::parse(value)) else {
        return Vec::new();
    };
    let ip = written.to_canonical();
    let mut warnings = Vec::new();
    if ip != network.addr {
        warnings.push(format!(
            "{path}: CIDR value {value:?} is ambiguous in this context (should be \"{network}\" or \"{ip}/{}\"?)",
            address_bits(ip),
        ));
    }
    let cidr_errors = names::cidr_any_form(value);
    if cidr_errors.iter().any(|wrong| !wrong.contains("beyond the prefix length")) {
        warnings.push(format!("{path}: non-standard CIDR value {value:?} is invalid: use \"{network}\""));
    }
    if warnings.is_empty() && network.is_v6() && network.to_string() != value {
        warnings.push(format!(
            "{path}: IPv6 CIDR value {value:?} should be in RFC 5952 canonical format (\"{network}\")"
        ));
    }
    warnings
}

fn address_bits(addr: IpAddr) -> u8 {
    if addr.is_ipv6() { 128 } else { 32 }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn cidr_parse_clears_host_bits() {
        let cidr = Cidr::parse("192.168.1.77/24").unwrap();
        assert_eq!(cidr.to_string(), "192.168.1.0/24");
        assert_eq!(cidr.last().to_string(), "192.168.1.255");
        assert!(cidr.contains("192.168.1.1".parse().unwrap()));
        assert!(!cidr.contains("192.168.2.1".parse().unwrap()) && !cidr.contains("::1".parse().unwrap()));
        assert_eq!(
            Cidr::parse("::/0").unwrap().last().to_string(),
            "ffff:ffff:ffff:ffff:ffff:ffff:ffff:ffff"
        );
        assert_eq!(Cidr::parse("0.0.0.0/0").unwrap().last().to_string(), "255.255.255.255");
        assert_eq!(Cidr::parse("::ffff:10.0.0.0/104").unwrap().to_string(), "10.0.0.0/8");
    }

    #[test]
    fn validates_endpoint_addresses() {
        for (value, expected) in [
            ("10.0.0.1", ""),
            ("127.0.0.1", "loopback"),
            ("169.254.0.1", "link-local range"),
            ("fe80::1", "link-local range"),
            ("ff02::1", "link-local multicast"),
            ("0.0.0.0", "may not be unspecified (0.0.0.0)"),
        ] {
            let mut errors = ErrorList::default();
            validate_endpoint_ip(value, &Path::new("f"), &mut errors);
            let got: String = errors.0.iter().map(|c| c.message.as_str()).collect();
            assert_eq!(got.is_empty(), expected.is_empty(), "{value}: {got}");
            assert!(got.contains(expected), "{value}: {got}");
        }
    }

    #[test]
    fn returns_format_warnings() {
        let path = Path::new("f");
        assert_eq!(format_warning("10.0.0.1", &path), None);
        assert_eq!(
            format_warning("010.0.0.1", &path).unwrap(),
            "f: non-standard IP address \"010.0.0.1\" is invalid: use \"10.0.0.1\""
        );
        assert_eq!(
            cidr_warnings("10.0.0.1/8", &path),
            [
                "f: CIDR value \"10.0.0.1/8\" is ambiguous in this context (should be \"10.0.0.0/8\" or \"10.0.0.1/32\"?)"
            ]
        );
        assert_eq!(
            cidr_warnings("fd00:0::/64", &path),
            ["f: IPv6 CIDR value \"fd00:0::/64\" should be in RFC 5952 canonical format (\"fd00::/64\")"]
        );
    }
}
