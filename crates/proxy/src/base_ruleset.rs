//! The part of the table that does not depend on Services: the base chains and the maps they look up. A
//! packet passes the same small number of rules whether there is one Service or ten thousand. Does no
//! I/O.

use std::net::IpAddr;

use nft::{
    BaseChain, ChainType, DataType, Field, Fragment, Hook, IpFamily, IpNet, MatchValue, Name, Rule, Set,
    Statement, Verdict, rule,
};

/// The bit of the packet mark that requests masquerading. The same as upstream.
pub const MASQUERADE: u32 = 0x4000;
/// Hook priorities: before DNAT, and the kernel's standard values of DNAT, filter and SNAT.
const BEFORE_DNAT_PRIORITY: i32 = -110;
const DNAT_PRIORITY: i32 = -100;
const FILTER_PRIORITY: i32 = 0;
const SNAT_PRIORITY: i32 = 100;

/// The sets of one family that Services add elements to.
#[derive(Clone, Debug)]
pub struct ServiceSets {
    /// Address and port of Services, with their chains.
    pub services: Name,
    /// Node ports, with their chains.
    pub node_ports: Name,
    /// Addresses and ports without endpoints, with the verdict: reject or drop.
    pub no_endpoints: Name,
    pub no_endpoint_ports: Name,
    /// Load balancer addresses and ports with source ranges, with the chains that check these.
    pub firewall_ips: Name,
    /// The cluster IPs in use.
    pub cluster_ips: Name,
    /// Connections from an endpoint to itself: source, destination, protocol and port.
    pub hairpin_connections: Name,
}

impl ServiceSets {
    pub fn of(ip: IpFamily) -> ServiceSets {
        let name = |name: &str| Name::from(name_for_family(name, ip));
        ServiceSets {
            services: name("services"),
            node_ports: name("node-ports"),
            no_endpoints: name("no-endpoints"),
            no_endpoint_ports: name("no-endpoint-ports"),
            firewall_ips: name("firewalls"),
            cluster_ips: name("cluster-ips"),
            hairpin_connections: name("hairpins"),
        }
    }
}

/// The name of a set or chain with the family's suffix, for example `services4` for IPv4.
pub fn name_for_family(name: &str, ip: IpFamily) -> String {
    format!("{name}{}", if ip == IpFamily::V4 { 4 } else { 6 })
}

/// The map of host ports at loopback addresses. Only IPv4 can route from a loopback address to a pod.
pub fn loopback_ports() -> Name {
    "loopback-ports4".into()
}

/// The chain that rejects, as the target of map elements. (`nft` does not accept `reject` as a name.)
pub fn reject_chain() -> Name {
    "refuse".into()
}

/// The key fields of the Service maps.
fn service_key(ip: IpFamily) -> Vec<Field> {
    vec![Field::Destination(ip), Field::Proto, Field::DestinationPort]
}

/// Masquerades traffic from pods to destinations outside the pod networks, where no route back to pods
/// exists.
pub fn masquerade_outgoing(pods: &[IpNet]) -> Fragment {
    let mut fragment = Fragment::default();
    let mut rules = Vec::new();
    for ip in IpFamily::ALL {
        let any: Vec<MatchValue> =
            pods.iter().filter(|net| IpFamily::of(net.first()) == ip).copied().map(MatchValue::Net).collect();
        if !any.is_empty() {
            let from = Statement::Match { field: Field::Source(ip), not: false, any: any.clone() };
            let outside = Statement::Match { field: Field::Destination(ip), not: true, any };
            rules.push(rule([from, outside, Statement::Masquerade]));
        }
    }
    let base = BaseChain { chain_type: ChainType::Nat, hook: Hook::Postrouting, priority: SNAT_PRIORITY + 1 };
    fragment.base_chain(&"nat-outgoing".into(), base, rules);
    fragment
}

/// Redirects packets from this node to its own loopback addresses to host ports. (Not to node ports,
/// the same as upstream.) The kernel must allow such packets on the links to pods: see
/// [`allow_loopback`](crate::allow_loopback).
pub fn loopback() -> Fragment {
    let fields = vec![Field::Proto, Field::DestinationPort];
    let lookup = Statement::Lookup { fields, map: loopback_ports() };
    let local = Statement::equals(Field::Destination(IpFamily::V4), loopback_net(IpFamily::V4));
    let base = BaseChain { chain_type: ChainType::Nat, hook: Hook::Output, priority: DNAT_PRIORITY + 1 };
    let mut fragment = Fragment::default();
    fragment.base_chain(
        &"nat-loopback".into(),
        base,
        vec![rule([local, Statement::DestinationIsLocal, lookup])],
    );
    fragment
}

/// The rules that do not depend on Services. `pods` are the pod networks, `services` the Service
/// networks.
pub fn base_rules(pods: &[IpNet], services: &[IpNet]) -> Fragment {
    let mut fragment = Fragment::default();
    for ip in IpFamily::ALL {
        let of = |nets: &[IpNet]| -> Vec<IpNet> {
            nets.iter().filter(|net| IpFamily::of(net.first()) == ip).copied().collect()
        };
        family_rules(&mut fragment, ip, &of(pods), &of(services));
    }
    fragment.set(&loopback_ports(), Set::verdict_map(&[DataType::Proto, DataType::Port]));
    fragment.chain(&reject_chain(), vec![rule([Statement::Reject])]);
    hooks(&mut fragment);
    fragment
}

fn hooks(fragment: &mut Fragment) {
    use ChainType::{Filter, Nat};
    use Hook::{Forward, Input, Output, Postrouting, Prerouting};
    let rows: [(&str, ChainType, Hook, i32, &[&str]); 8] = [
        ("filter-prerouting", Filter, Prerouting, BEFORE_DNAT_PRIORITY, &["firewall"]),
        ("filter-own", Filter, Output, BEFORE_DNAT_PRIORITY, &["firewall"]),
        ("nat-prerouting", Nat, Prerouting, DNAT_PRIORITY, &["service"]),
        ("nat-output", Nat, Output, DNAT_PRIORITY, &["service"]),
        ("nat-postrouting", Nat, Postrouting, SNAT_PRIORITY, &["masquerade"]),
        ("filter-input", Filter, Input, FILTER_PRIORITY, &["no-endpoint-port", "no-endpoint"]),
        ("filter-forward", Filter, Forward, FILTER_PRIORITY, &["no-endpoint", "unused-ip"]),
        ("filter-output", Filter, Output, FILTER_PRIORITY, &["no-endpoint", "unused-ip"]),
    ];
    for (name, kind, hook, priority, chains) in rows {
        let mut rules = Vec::new();
        if hook == Prerouting && kind == Filter {
            rules.extend(only_own_loopback());
        }
        for chain in chains {
            for ip in IpFamily::ALL {
                let mut expressions = Vec::new();
                if kind == Filter {
                    expressions.push(Statement::StateNew);
                }
                expressions.push(Statement::equals(Field::Family, MatchValue::Family(ip)));
                expressions.push(Statement::jump(&name_for_family(chain, ip).into()));
                rules.push(expressions);
            }
        }
        fragment.base_chain(&name.into(), BaseChain { chain_type: kind, hook, priority }, rules);
    }
}

fn family_rules(fragment: &mut Fragment, ip: IpFamily, pods: &[IpNet], services: &[IpNet]) {
    let sets = ServiceSets::of(ip);
    let address = ip.address();
    let front_key = [address, DataType::Proto, DataType::Port];
    for map in [&sets.services, &sets.no_endpoints, &sets.firewall_ips] {
        fragment.set(map, Set::verdict_map(&front_key));
    }
    for map in [&sets.node_ports, &sets.no_endpoint_ports] {
        fragment.set(map, Set::verdict_map(&[DataType::Proto, DataType::Port]));
    }
    fragment.set(&sets.cluster_ips, Set::new(&[address]));
    fragment.set(&sets.hairpin_connections, Set::new(&[address, address, DataType::Proto, DataType::Port]));

    let mut chain = |name: &str, rules: Vec<Rule>| fragment.chain(&name_for_family(name, ip).into(), rules);
    let lookup = |map: &Name| rule([Statement::Lookup { fields: service_key(ip), map: map.clone() }]);
    let ports = vec![Field::Proto, Field::DestinationPort];
    chain("firewall", vec![lookup(&sets.firewall_ips)]);
    chain("no-endpoint", vec![lookup(&sets.no_endpoints)]);
    chain(
        "no-endpoint-port",
        vec![rule([
            not_loopback(ip),
            Statement::Lookup { fields: ports.clone(), map: sets.no_endpoint_ports.clone() },
        ])],
    );
    chain("service", service_rules(ip, &sets, pods, ports, lookup(&sets.services)));
    chain("masquerade", masquerade_rules(ip, &sets));
    let mut unused = vec![rule([in_cluster_ips(ip, &sets), Statement::Reject])];
    if !services.is_empty() {
        let any = services.iter().copied().map(MatchValue::Net).collect();
        unused.push(rule([
            Statement::Match { field: Field::Destination(ip), not: false, any },
            Statement::Verdict(Verdict::Drop),
        ]));
    }
    chain("unused-ip", unused);
}

fn service_rules(
    ip: IpFamily,
    sets: &ServiceSets,
    pods: &[IpNet],
    ports: Vec<Field>,
    lookup: Rule,
) -> Vec<Rule> {
    let mut rules = Vec::new();
    if !pods.is_empty() {
        // Traffic to a cluster IP from outside the pod networks is masqueraded, so that responses come
        // back through this node wherever the endpoint is.
        let any = pods.iter().copied().map(MatchValue::Net).collect();
        rules.push(rule([
            in_cluster_ips(ip, sets),
            Statement::Match { field: Field::Source(ip), not: true, any },
            Statement::SetMark(MASQUERADE),
        ]));
    }
    rules.push(lookup);
    rules.push(rule([
        Statement::DestinationIsLocal,
        not_loopback(ip),
        Statement::Lookup { fields: ports, map: sets.node_ports.clone() },
    ]));
    rules
}

fn masquerade_rules(ip: IpFamily, sets: &ServiceSets) -> Vec<Rule> {
    let fields = vec![Field::Source(ip), Field::Destination(ip), Field::Proto, Field::DestinationPort];
    vec![
        rule([Statement::HasMark(MASQUERADE), Statement::ClearMark(MASQUERADE), Statement::Masquerade]),
        rule([
            Statement::IsDnat,
            Statement::InSet { fields, set: sets.hairpin_connections.clone() },
            Statement::Masquerade,
        ]),
    ]
}

fn in_cluster_ips(ip: IpFamily, sets: &ServiceSets) -> Statement {
    Statement::InSet { fields: vec![Field::Destination(ip)], set: sets.cluster_ips.clone() }
}

/// Drops packets with a loopback source or destination that come from another interface.
/// `route_localnet` lets such packets pass, and they could reach services that listen only on loopback
/// addresses. At this point, responses to masqueraded packets still have the address that they were
/// masqueraded with. On WSL, `loopback0` carries the packets that Windows sends to its own loopback
/// addresses.
fn only_own_loopback() -> impl Iterator<Item = Rule> {
    [Field::Destination(IpFamily::V4), Field::Source(IpFamily::V4)].into_iter().map(|field| {
        let any = ["lo", "loopback0"].map(MatchValue::Link).into();
        let foreign = Statement::Match { field: Field::Link, not: true, any };
        rule([Statement::equals(field, loopback_net(IpFamily::V4)), foreign, Statement::drop()])
    })
}

/// Excludes loopback addresses from node ports.
fn not_loopback(ip: IpFamily) -> Statement {
    Statement::Match { field: Field::Destination(ip), not: true, any: vec![loopback_net(ip)] }
}

/// The loopback network of a family.
pub fn loopback_net(ip: IpFamily) -> MatchValue {
    let (address, bits) = match ip {
        IpFamily::V4 => (IpAddr::from([127, 0, 0, 0]), 8),
        IpFamily::V6 => (IpAddr::from([0, 0, 0, 0, 0, 0, 0, 1]), 128),
    };
    MatchValue::Net(IpNet::new(address, bits).expect("the family has this many bits"))
}
