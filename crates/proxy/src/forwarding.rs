//! The kernel's settings by which packets of pods are forwarded.

use std::io;
use std::net::IpAddr;
use std::path::Path;

use nft::IpNet;
use sys::netlink::Netlink;

/// Lets this machine forward packets between pods, nodes and the outside. Where pods share a bridge, as with other CNI
/// plugins, our rules see what goes from pod to pod only if the bridge shows it to them. Logs what fails and goes on: it
/// may have been configured otherwise.
pub fn enable_forwarding(pods: &[IpNet]) {
    let mut settings = vec![("net/ipv4/ip_forward", true), ("net/bridge/bridge-nf-call-iptables", false)];
    if pods.iter().any(IpNet::is_v6) {
        settings
            .extend([("net/ipv6/conf/all/forwarding", true), ("net/bridge/bridge-nf-call-ip6tables", false)]);
    }
    for (name, is_needed) in settings {
        let path = Path::new("/proc/sys").join(name);
        // Writing what is there already may do more than it seems: forwarding resets other settings.
        if std::fs::read_to_string(&path).is_ok_and(|value| value.trim() == "1") {
            continue;
        }
        match std::fs::write(&path, "1") {
            Ok(()) => tracing::info!(setting = name, "switched on"),
            Err(error) if is_needed || path.exists() => {
                tracing::warn!(%error, setting = name, "cannot switch on, Services may not be reachable");
            }
            Err(_) => tracing::debug!(setting = name, "is not there"),
        }
    }
}

/// Lets packets with loopback addresses pass the links to pods, or not. Those are the links with an address of this
/// bridge. Fails where there is no such bridge. Links of later pods are set as the bridge is, see `podnet`.
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
            // The pod has ended meanwhile.
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
