//! Interprets the results of a connectivity check. Does no I/O.

use std::net::IpAddr;

use nft::IpNet;

use crate::routes::overlay;

/// Which packets came back.
#[derive(Clone, Copy, Debug, Default, PartialEq)]
pub struct CheckResults {
    pub udp: bool,
    pub large_udp: bool,
    pub tcp: bool,
    pub large_tcp: bool,
}

/// Describes why the pods of a node cannot be reached; `None` if they can.
pub fn failure_message(
    results: &CheckResults,
    name: &str,
    net: IpNet,
    node: IpAddr,
    direct: bool,
) -> Option<String> {
    let CheckResults { udp, large_udp, tcp, large_tcp } = *results;
    let kinds = |udp: bool, tcp: bool| match (udp, tcp) {
        (true, true) => "UDP and TCP",
        (true, false) => "UDP",
        _ => "TCP",
    };
    let what = match (udp || tcp, udp, tcp) {
        (false, ..) if direct => format!(
            "no packets come back: either node {name} at {node} cannot be reached, or the network between drops packets \
             of pods (clouds check source and destination addresses by default)"
        ),
        (false, ..) => format!(
            "no packets come back: either node {name} at {node} cannot be reached, or a firewall between blocks \
             UDP port {}",
            overlay::PORT
        ),
        (_, false, _) | (_, _, false) => {
            format!(
                "{} comes through and {} does not: a firewall filters it",
                kinds(udp, tcp),
                kinds(!udp, !tcp)
            )
        }
        _ if !large_udp || !large_tcp => format!(
            "small packets come through and large ones of {} do not: the link between has a smaller MTU than \
             the one of this node",
            kinds(!large_udp, !large_tcp)
        ),
        _ => return None,
    };
    Some(format!("The pod network {net} of node {name} is not reachable: {what}."))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[track_caller]
    fn check(results: [bool; 4], direct: bool, expected: &str) {
        let [udp, large_udp, tcp, large_tcp] = results;
        let results = CheckResults { udp, large_udp, tcp, large_tcp };
        let (net, node) = ("10.42.1.0/24".parse().unwrap(), "192.0.2.2".parse().unwrap());
        let message = failure_message(&results, "b", net, node, direct).unwrap_or_default();
        assert!(message.contains(expected) && message.is_empty() == expected.is_empty(), "{message}");
    }

    #[test]
    fn failure_message_contains_the_cause() {
        check([true; 4], true, "");
        check([false; 4], true, "clouds check source");
        check([false; 4], false, "UDP port 8472");
        check([true, true, false, false], true, "UDP comes through and TCP does not");
        check([false, false, true, true], true, "TCP comes through and UDP does not");
        check([true, false, true, false], true, "large ones of UDP and TCP do not");
        check([true, true, true, false], false, "large ones of TCP do not");
    }
}
