//! The sysctls that forwarding of pod traffic needs.

use std::io;
use std::net::IpAddr;
use std::path::Path;

use nft::IpNet;
use sys::netlink::Netlink;

/// Enables IP forwarding. Also passes bridged packets to netfilter: with CNI plugins that attach pods
/// to a bridge, our rules see traffic between pods only in this case. Failures are logged and ignored,
/// because forwarding may have been set up in another way.
pub fn enable_forwarding(pods: &[IpNet]) {
    let mut settings = vec![("net/ipv4/ip_forward", true), ("net/bridge/bridge-nf-call-iptables", false)];
    if pods.iter().any(IpNet::is_v6) {
        settings
            .extend([("net/ipv6/conf/all/forwarding", true), ("net/bridge/bridge-nf-call-ip6tables", false)]);
    }
    for (name, is_needed) in settings {
        let path = Path::new("/proc/sys").join(name);
        // Do not write a value that is already set: writing ip_forward resets other settings to their
        // defaults.
        if std::fs::read_to_string(&path).is_ok_and(|value| value.trim() == "1") {
            continue;
        }
        match std::fs::write(&path, "1") {
            Ok(()) => tracing::info!(setting = name, "sysctl enabled"),
            Err(error) if is_needed || path.exists() => {
                tracing::warn!(%error, setting = name, "failed to enable sysctl, Services may not be reachable");
            }
            Err(_) => tracing::debug!(setting = name, "sysctl does not exist"),
        }
    }
}

/// Sets `route_localnet` on the bridge and on the links to pods, which are those with an address of the
/// bridge. Links of pods that are created later get the bridge's setting, see `podnet`. Fails if the
/// bridge does not exist.
pub fn allow_loopback(bridge: &str, pass: bool) -> io::Result<()> {
    route_localnet(bridge, pass)?;
    let mut netlink = Netlink::open()?;
    let links = netlink.links()?;
    let addresses = netlink.all_addresses()?;
    let Some(bridge) = links.iter().find(|link| link.name == bridge) else { return Ok(()) };
    let bridge_addresses: Vec<IpAddr> = addresses
        .iter()
        .filter(|(link, address, _)| *link == bridge.index && address.is_ipv4())
        .map(|(_, address, _)| *address)
        .collect();
    let is_pod_link = |index: u32| {
        addresses.iter().any(|(link, address, _)| *link == index && bridge_addresses.contains(address))
    };
    for link in links.iter().filter(|link| is_pod_link(link.index)) {
        match route_localnet(&link.name, pass) {
            // The pod was deleted in the meantime.
            Err(error) if error.kind() == io::ErrorKind::NotFound => {}
            written => written?,
        }
    }
    Ok(())
}

fn route_localnet(link: &str, pass: bool) -> io::Result<()> {
    let (path, value) =
        (format!("/proc/sys/net/ipv4/conf/{link}/route_localnet"), if pass { "1" } else { "0" });
    if std::fs::read_to_string(&path)?.trim() == value {
        return Ok(());
    }
    std::fs::write(&path, value)
}
