//! The address of this host: how it is chosen, and how changes are followed at runtime.
//!
//! An address is kept as long as the host has it, even if another network or a VPN comes up. A new
//! address is chosen only after the current one was removed.

use std::net::{IpAddr, Ipv4Addr, Ipv6Addr, SocketAddr, TcpListener, UdpSocket};
use std::time::{Duration, Instant};

use anyhow::Context as _;
use proxy::routes::RouteMonitor;
use sys::netlink::Netlink;
use tokio::sync::watch;

/// The current address of this host. The receiver is notified of changes.
pub type AddressReceiver = watch::Receiver<Option<IpAddr>>;

/// Poll interval while the host has no address, or while the kernel sends no netlink notifications.
const POLL_INTERVAL: Duration = Duration::from_secs(10);
/// How long a port may stay in use, and how often `listen` retries.
const PORT_RELEASE_TIMEOUT: Duration = Duration::from_secs(2);
const PORT_RELEASE_POLL: Duration = Duration::from_millis(20);
/// Documentation addresses (RFC 5737, RFC 3849), used only for route lookups. No packet is sent to
/// them.
const EXTERNAL_ADDRS: [SocketAddr; 2] = [
    SocketAddr::new(IpAddr::V4(Ipv4Addr::new(192, 0, 2, 1)), 9),
    SocketAddr::new(IpAddr::V6(Ipv6Addr::new(0x2001, 0xdb8, 0, 0, 0, 0, 0, 1)), 9),
];

/// The address of the interface with the default route, as upstream's kubelet chooses it. A VPN that
/// takes all traffic by more specific routes (OpenVPN) or by another routing table (WireGuard) leaves
/// the default route alone, and its address must not become the node's address at the next restart.
/// Without a default route, the first address that other hosts may reach. `None` if the host has no
/// network.
pub fn default_address() -> Option<IpAddr> {
    let read = |path: &str| std::fs::read_to_string(path).unwrap_or_default();
    let skiff_addresses =
        link_addresses(&[&[kubelet::network::BRIDGE][..], &proxy::routes::OVERLAYS].concat());
    let usable =
        |ip: &IpAddr| crate::server::external_address(*ip).is_some() && !skiff_addresses.contains(ip);
    let [v4, v6] = EXTERNAL_ADDRS.map(|to| {
        let source_address = source_address_for(to).ok().filter(usable);
        let link = if to.is_ipv4() {
            v4_default_link(&read("/proc/net/route"))
        } else {
            v6_default_link(&read("/proc/net/ipv6_route"))
        };
        let Some(link) = link else { return source_address };
        let addresses = link_addresses(&[link.as_str()]);
        let same_family = |ip: &&IpAddr| ip.is_ipv4() == to.is_ipv4() && usable(ip) && !is_link_local(**ip);
        source_address
            .filter(|ip| addresses.contains(ip))
            .or_else(|| addresses.iter().find(same_family).copied())
            .or(source_address)
    });
    let first_v4 =
        || v4_addresses(&read("/proc/net/fib_trie")).into_iter().map(IpAddr::V4).find(|ip| usable(ip));
    let first_v6 =
        || v6_addresses(&read("/proc/net/if_inet6")).into_iter().map(IpAddr::V6).find(|ip| usable(ip));
    v4.or_else(first_v4).or(v6).or_else(first_v6)
}

/// The interface of the IPv4 default route with the lowest metric.
fn v4_default_link(routes: &str) -> Option<String> {
    let parse = |line: &str| {
        let columns: Vec<&str> = line.split_whitespace().collect();
        let is_default = columns.get(1) == Some(&"00000000") && columns.get(7) == Some(&"00000000");
        let metric: u32 = columns.get(6)?.parse().ok()?;
        is_default.then(|| (metric, columns[0].to_owned()))
    };
    routes.lines().skip(1).filter_map(parse).min_by_key(|(metric, _)| *metric).map(|(_, link)| link)
}

/// The interface of the IPv6 default route with the lowest metric. `lo` is skipped: it has the kernel's
/// own unreachable default route.
fn v6_default_link(routes: &str) -> Option<String> {
    let parse = |line: &str| {
        let columns: Vec<&str> = line.split_whitespace().collect();
        let is_default = columns.first()?.bytes().all(|digit| digit == b'0') && columns.get(1) == Some(&"00");
        let metric = u32::from_str_radix(columns.get(5)?, 16).ok()?;
        let link = *columns.get(9)?;
        (is_default && link != "lo").then(|| (metric, link.to_owned()))
    };
    routes.lines().filter_map(parse).min_by_key(|(metric, _)| *metric).map(|(_, link)| link)
}

fn is_link_local(ip: IpAddr) -> bool {
    match ip {
        IpAddr::V4(ip) => ip.is_link_local(),
        IpAddr::V6(ip) => ip.is_unicast_link_local(),
    }
}

/// Binds a TCP listener and retries while the port is in use. If a previous skiff was killed while it
/// started a child process, the child holds the inherited socket until its `exec`.
pub fn listen(at: SocketAddr) -> anyhow::Result<TcpListener> {
    let started = Instant::now();
    loop {
        match TcpListener::bind(at) {
            Err(error)
                if error.kind() == std::io::ErrorKind::AddrInUse
                    && started.elapsed() < PORT_RELEASE_TIMEOUT =>
            {
                std::thread::park_timeout(PORT_RELEASE_POLL);
            }
            other => return other.with_context(|| format!("cannot listen on {at}")),
        }
    }
}

/// The source address that the kernel selects for packets to `to`.
pub fn source_address_for(to: SocketAddr) -> std::io::Result<IpAddr> {
    let any: IpAddr = if to.is_ipv4() { Ipv4Addr::UNSPECIFIED.into() } else { Ipv6Addr::UNSPECIFIED.into() };
    // `connect` on a UDP socket sends nothing. It only makes the kernel look up the route.
    let socket = UdpSocket::bind((any, 0))?;
    socket.connect(to)?;
    Ok(socket.local_addr()?.ip())
}

/// A receiver for an address that never changes.
pub fn fixed(address: Option<IpAddr>) -> AddressReceiver {
    watch::channel(address).1
}

/// Follows the address that `find` returns, starting with `now`.
pub fn follow<Finding: Future<Output = Option<IpAddr>> + Send>(
    now: Option<IpAddr>,
    find: impl Fn() -> Finding + Send + 'static,
) -> AddressReceiver {
    let (sender, address) = watch::channel(now);
    tokio::spawn(async move {
        let address_monitor = RouteMonitor::open();
        loop {
            let before = *sender.borrow();
            if before.is_none_or(is_removed)
                && let Some(found) = find().await
                && before != Some(found)
            {
                tracing::info!(address = %found, before = ?before, "node address changed");
                sender.send_replace(Some(found));
            }
            // The next round starts at a netlink notification. It is polled as well if there are no
            // notifications, or if the notification may have come before the new address was usable.
            let needs_poll = address_monitor.is_closed() || sender.borrow().is_none_or(is_removed);
            tokio::select! {
                () = address_monitor.changed() => {}
                () = tokio::time::sleep(POLL_INTERVAL), if needs_poll => {}
                () = sender.closed() => return,
            }
        }
    });
    address
}

/// Whether this host no longer has the address. Only a failed `bind` proves that.
fn is_removed(address: IpAddr) -> bool {
    let bound = UdpSocket::bind((address, 0));
    bound.is_err_and(|error| error.kind() == std::io::ErrorKind::AddrNotAvailable)
}

// The addresses of the named links; empty if netlink fails. `default_address` excludes skiff's own
// links.
fn link_addresses(names: &[&str]) -> Vec<IpAddr> {
    let found = || -> std::io::Result<Vec<IpAddr>> {
        let mut netlink = Netlink::open()?;
        let mut all = Vec::new();
        for name in names {
            if let Some(link) = netlink.link(name)? {
                all.extend(netlink.addresses(link.index)?.into_iter().map(|(address, _)| address));
            }
        }
        Ok(all)
    };
    found().unwrap_or_default()
}

/// Parses `/proc/net/fib_trie`: `|-- 192.0.2.7` followed by `/32 host LOCAL` is an address of this
/// host.
fn v4_addresses(trie: &str) -> Vec<Ipv4Addr> {
    let mut last = None;
    let mut found = Vec::new();
    for line in trie.lines() {
        if let Some(address) = line.trim().strip_prefix("|-- ") {
            last = address.parse::<Ipv4Addr>().ok();
        } else if line.contains("/32 host LOCAL") {
            found.extend(last.take().filter(|address| !address.is_link_local()));
        }
    }
    found
}

/// Parses `/proc/net/if_inet6`. Global addresses have scope `00` in the fourth column.
fn v6_addresses(addresses: &str) -> Vec<Ipv6Addr> {
    let parse = |line: &str| {
        let columns: Vec<&str> = line.split_whitespace().collect();
        let bits = u128::from_str_radix(columns.first()?, 16).ok()?;
        (columns.get(3) == Some(&"00")).then(|| Ipv6Addr::from(bits))
    };
    addresses.lines().filter_map(parse).collect()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn reads_addresses_from_proc_tables() {
        let trie = "Local:\n  +-- 0.0.0.0/0 3 0 5\n     |-- 127.0.0.1\n        /32 host LOCAL\n     |-- 192.0.2.0\n        /24 link UNICAST\n     |-- 192.0.2.7\n        /32 host LOCAL\n";
        assert_eq!(v4_addresses(trie), [Ipv4Addr::LOCALHOST, Ipv4Addr::new(192, 0, 2, 7)]);
        assert_eq!(v4_addresses("     |-- 169.254.0.1\n        /32 host LOCAL\n"), [] as [Ipv4Addr; 0]);
        let v6 = "00000000000000000000000000000001 01 80 10 80       lo\n20010db8000000000000000000000007 02 40 00 80     eth0\n";
        assert_eq!(v6_addresses(v6), ["2001:db8::7".parse::<Ipv6Addr>().unwrap()]);
    }

    #[test]
    fn default_link_ignores_half_default_routes() {
        let routes = "Iface\tDestination\tGateway\tFlags\tRefCnt\tUse\tMetric\tMask\tMTU\tWindow\tIRTT\n\
            wg0\t00000000\t00000000\t0001\t0\t0\t0\t00000080\t0\t0\t0\n\
            wg0\t00000080\t00000000\t0001\t0\t0\t0\t00000080\t0\t0\t0\n\
            wlan0\t00000000\t010200C0\t0003\t0\t0\t600\t00000000\t0\t0\t0\n\
            eth0\t00000000\t010200C0\t0003\t0\t0\t100\t00000000\t0\t0\t0\n";
        assert_eq!(v4_default_link(routes).as_deref(), Some("eth0"));
        let zeros = "0".repeat(32);
        let gateway = "fd000000000000000000000000000001";
        let routes = format!(
            "{zeros} 00 {zeros} 00 {gateway} 00000400 00000002 00000000 00000003     eth0\n\
             {zeros} 01 {zeros} 00 {zeros} 00000100 00000002 00000000 00000003      wg0\n\
             {zeros} 00 {zeros} 00 {zeros} ffffffff 00000001 00000000 00200200       lo\n"
        );
        assert_eq!(v6_default_link(&routes).as_deref(), Some("eth0"));
        assert_eq!(v6_default_link(""), None);
    }

    #[test]
    fn detects_removed_addresses() {
        assert!(!is_removed(Ipv4Addr::LOCALHOST.into()));
        assert!(is_removed(Ipv4Addr::new(192, 0, 2, 77).into()));
    }
}
