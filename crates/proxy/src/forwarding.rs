//! What the kernel must be told once, so that packets of pods pass through the rules at all.

use std::io;
use std::path::Path;

use nft::Net;

/// Lets this machine forward packets between pods, nodes and the outside, and shows our rules also those packets
/// that go from pod to pod over a bridge. Says what does not work and goes on: it may have been done otherwise.
pub fn prepare(pods: &[Net]) {
    let mut wanted = vec![("net/ipv4/ip_forward", true), ("net/bridge/bridge-nf-call-iptables", false)];
    if pods.iter().any(Net::is_v6) {
        wanted
            .extend([("net/ipv6/conf/all/forwarding", true), ("net/bridge/bridge-nf-call-ip6tables", false)]);
    }
    for (name, is_needed) in wanted {
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

/// Lets packets with loopback addresses pass a link, or not. Fails where there is no such link.
pub fn pass_loopback(link: &str, pass: bool) -> io::Result<()> {
    let (path, wanted) =
        (format!("/proc/sys/net/ipv4/conf/{link}/route_localnet"), if pass { "1" } else { "0" });
    if std::fs::read_to_string(&path)?.trim() == wanted {
        return Ok(());
    }
    std::fs::write(&path, wanted)
}
