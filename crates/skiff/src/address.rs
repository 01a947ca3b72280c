//! The machine's own addresses, as the kernel's routing tables list them.

use std::net::{IpAddr, Ipv4Addr, Ipv6Addr};

/// The first address of this machine that others could reach; `None` on a machine without a network.
pub fn own() -> Option<IpAddr> {
    let trie = std::fs::read_to_string("/proc/net/fib_trie").unwrap_or_default();
    let v6 = std::fs::read_to_string("/proc/net/if_inet6").unwrap_or_default();
    first_v4(&trie).map(IpAddr::V4).or_else(|| first_v6(&v6).map(IpAddr::V6))
}

/// `|-- 192.0.2.7` followed by `/32 host LOCAL` is one of our addresses.
fn first_v4(trie: &str) -> Option<Ipv4Addr> {
    let mut last = None;
    for line in trie.lines() {
        if let Some(address) = line.trim().strip_prefix("|-- ") {
            last = address.parse::<Ipv4Addr>().ok();
        } else if line.contains("/32 host LOCAL")
            && let Some(address) = last.filter(|a| !a.is_loopback() && !a.is_link_local())
        {
            return Some(address);
        }
    }
    None
}

/// Global addresses have scope `00` in the fourth column.
fn first_v6(addresses: &str) -> Option<Ipv6Addr> {
    addresses.lines().find_map(|line| {
        let columns: Vec<&str> = line.split_whitespace().collect();
        let bits = u128::from_str_radix(columns.first()?, 16).ok()?;
        (columns.get(3) == Some(&"00")).then(|| Ipv6Addr::from(bits))
    })
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn addresses_are_read_from_the_kernels_tables() {
        let trie = "Local:\n  +-- 0.0.0.0/0 3 0 5\n     |-- 127.0.0.1\n        /32 host LOCAL\n     |-- 192.0.2.0\n        /24 link UNICAST\n     |-- 192.0.2.7\n        /32 host LOCAL\n";
        assert_eq!(first_v4(trie), Some(Ipv4Addr::new(192, 0, 2, 7)));
        assert_eq!(first_v4("     |-- 127.0.0.1\n        /32 host LOCAL\n"), None);
        let v6 = "00000000000000000000000000000001 01 80 10 80       lo\n20010db8000000000000000000000007 02 40 00 80     eth0\n";
        assert_eq!(first_v6(v6), Some("2001:db8::7".parse().unwrap()));
    }
}
