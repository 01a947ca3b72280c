//! What is in the table whatever Services there are: where packets are caught, and the maps that say where they go.
//! A packet meets the same few rules for one Service as for ten thousand. Pure.

use std::net::IpAddr;

use nft::{
    Atom, Base, Field, Fragment, Hook, Ip, Kind, Name, Net, Rule, Set, Statement, Type, Verdict, rule,
};

/// The bit of a packet's mark that asks for masquerading on the way out. Upstream's.
pub const MASQUERADE: u32 = 0x4000;
/// Before and after destinations are changed, and when sources are: the kernel's usual numbers.
const BEFORE_DNAT: i32 = -110;
const DNAT: i32 = -100;
const FILTER: i32 = 0;
const SNAT: i32 = 100;

/// The sets of one family that Services put elements into.
#[derive(Clone, Debug)]
pub struct Sets {
    /// Addresses and ports of Services, and the chains they lead to.
    pub services: Name,
    /// Node ports, and the chains they lead to.
    pub node_ports: Name,
    /// Addresses and ports that lead nowhere, and whether to say so.
    pub no_endpoints: Name,
    pub no_endpoint_ports: Name,
    /// Addresses and ports that not everybody may reach.
    pub firewalls: Name,
    /// The cluster IPs in use.
    pub cluster_ips: Name,
    /// What a connection of an endpoint to itself looks like.
    pub hairpins: Name,
}

impl Sets {
    pub fn of(ip: Ip) -> Sets {
        let name = |name: &str| Name::from(named(name, ip));
        Sets {
            services: name("services"),
            node_ports: name("node-ports"),
            no_endpoints: name("no-endpoints"),
            no_endpoint_ports: name("no-endpoint-ports"),
            firewalls: name("firewalls"),
            cluster_ips: name("cluster-ips"),
            hairpins: name("hairpins"),
        }
    }
}

/// `services` for IPv4 is `services4`.
pub fn named(name: &str, ip: Ip) -> String {
    format!("{name}{}", if ip == Ip::V4 { 4 } else { 6 })
}

/// The host ports of pods as they are found at loopback addresses. Only IPv4 has a way from there to a pod.
pub fn loopback_ports() -> Name {
    "loopback-ports4".into()
}

/// The chain that rejects, for maps to lead to. (`nft` takes no chain called reject.)
pub fn refuse() -> Name {
    "refuse".into()
}

/// What a packet to a Service is found by.
fn front(ip: Ip) -> Vec<Field> {
    vec![Field::Destination(ip), Field::Proto, Field::DestinationPort]
}

/// What leaves the pods' networks goes out by this node's address: nobody outside knows the way back to a pod.
pub fn way_out(pods: &[Net]) -> Fragment {
    let mut fragment = Fragment::default();
    let mut rules = Vec::new();
    for ip in Ip::BOTH {
        let any: Vec<Atom> =
            pods.iter().filter(|net| Ip::of(net.first()) == ip).copied().map(Atom::Net).collect();
        if !any.is_empty() {
            let from = Statement::Is { field: Field::Source(ip), not: false, any: any.clone() };
            let elsewhere = Statement::Is { field: Field::Destination(ip), not: true, any };
            rules.push(rule([from, elsewhere, Statement::Masquerade]));
        }
    }
    let base = Base { kind: Kind::Nat, hook: Hook::Postrouting, priority: SNAT + 1 };
    fragment.base(&"nat-way-out".into(), base, rules);
    fragment
}

/// What this machine sends to its own loopback addresses leads to host ports, too. (To node ports it does not, as
/// upstream.) The kernel must let such packets pass the link to the pods.
pub fn loopback() -> Fragment {
    let fields = vec![Field::Proto, Field::DestinationPort];
    let lookup = Statement::Lookup { fields, map: loopback_ports() };
    let local = Statement::is(Field::Destination(Ip::V4), loopback_net(Ip::V4));
    let base = Base { kind: Kind::Nat, hook: Hook::Output, priority: DNAT + 1 };
    let mut fragment = Fragment::default();
    fragment.base(&"nat-loopback".into(), base, vec![rule([local, Statement::DestinationIsLocal, lookup])]);
    fragment
}

/// The parts that do not depend on any Service. `pods` are the networks of pods, `services` those of Services.
pub fn skeleton(pods: &[Net], services: &[Net]) -> Fragment {
    let mut fragment = Fragment::default();
    for ip in Ip::BOTH {
        let of = |nets: &[Net]| -> Vec<Net> {
            nets.iter().filter(|net| Ip::of(net.first()) == ip).copied().collect()
        };
        family(&mut fragment, ip, &of(pods), &of(services));
    }
    fragment.set(&loopback_ports(), Set::verdicts(&[Type::Proto, Type::Port]));
    fragment.chain(&refuse(), vec![rule([Statement::Reject])]);
    hooks(&mut fragment);
    fragment
}

fn hooks(fragment: &mut Fragment) {
    use Hook::{Forward, Input, Output, Postrouting, Prerouting};
    use Kind::{Filter, Nat};
    let rows: [(&str, Kind, Hook, i32, &[&str]); 8] = [
        ("filter-prerouting", Filter, Prerouting, BEFORE_DNAT, &["firewall"]),
        ("filter-own", Filter, Output, BEFORE_DNAT, &["firewall"]),
        ("nat-prerouting", Nat, Prerouting, DNAT, &["service"]),
        ("nat-output", Nat, Output, DNAT, &["service"]),
        ("nat-postrouting", Nat, Postrouting, SNAT, &["masquerade"]),
        ("filter-input", Filter, Input, FILTER, &["no-endpoint-port", "no-endpoint"]),
        ("filter-forward", Filter, Forward, FILTER, &["no-endpoint", "unused-ip"]),
        ("filter-output", Filter, Output, FILTER, &["no-endpoint", "unused-ip"]),
    ];
    for (name, kind, hook, priority, chains) in rows {
        let mut rules = Vec::new();
        if hook == Prerouting && kind == Filter {
            rules.extend(only_own_loopback());
        }
        for chain in chains {
            for ip in Ip::BOTH {
                let mut statements = Vec::new();
                if kind == Filter {
                    statements.push(Statement::New);
                }
                statements.push(Statement::is(Field::Family, Atom::Family(ip)));
                statements.push(Statement::jump(&named(chain, ip).into()));
                rules.push(statements);
            }
        }
        fragment.base(&name.into(), Base { kind, hook, priority }, rules);
    }
}

fn family(fragment: &mut Fragment, ip: Ip, pods: &[Net], services: &[Net]) {
    let sets = Sets::of(ip);
    let address = ip.address();
    let front_key = [address, Type::Proto, Type::Port];
    for map in [&sets.services, &sets.no_endpoints, &sets.firewalls] {
        fragment.set(map, Set::verdicts(&front_key));
    }
    for map in [&sets.node_ports, &sets.no_endpoint_ports] {
        fragment.set(map, Set::verdicts(&[Type::Proto, Type::Port]));
    }
    fragment.set(&sets.cluster_ips, Set::plain(&[address]));
    fragment.set(&sets.hairpins, Set::plain(&[address, address, Type::Proto, Type::Port]));

    let mut chain = |name: &str, rules: Vec<Rule>| fragment.chain(&named(name, ip).into(), rules);
    let lookup = |map: &Name| rule([Statement::Lookup { fields: front(ip), map: map.clone() }]);
    let ports = vec![Field::Proto, Field::DestinationPort];
    chain("firewall", vec![lookup(&sets.firewalls)]);
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
        let any = services.iter().copied().map(Atom::Net).collect();
        unused.push(rule([
            Statement::Is { field: Field::Destination(ip), not: false, any },
            Statement::Verdict(Verdict::Drop),
        ]));
    }
    chain("unused-ip", unused);
}

fn service_rules(ip: Ip, sets: &Sets, pods: &[Net], ports: Vec<Field>, lookup: Rule) -> Vec<Rule> {
    let mut rules = Vec::new();
    if !pods.is_empty() {
        // Whoever comes to a cluster IP from elsewhere must get the answer from here, wherever the endpoint is.
        let any = pods.iter().copied().map(Atom::Net).collect();
        rules.push(rule([
            in_cluster_ips(ip, sets),
            Statement::Is { field: Field::Source(ip), not: true, any },
            Statement::Mark(MASQUERADE),
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

fn masquerade_rules(ip: Ip, sets: &Sets) -> Vec<Rule> {
    let fields = vec![Field::Source(ip), Field::Destination(ip), Field::Proto, Field::DestinationPort];
    vec![
        rule([Statement::Marked(MASQUERADE), Statement::Unmark(MASQUERADE), Statement::Masquerade]),
        rule([
            Statement::Redirected,
            Statement::In { fields, set: sets.hairpins.clone() },
            Statement::Masquerade,
        ]),
    ]
}

fn in_cluster_ips(ip: Ip, sets: &Sets) -> Statement {
    Statement::In { fields: vec![Field::Destination(ip)], set: sets.cluster_ips.clone() }
}

/// Nobody else reaches what listens on loopback addresses only, or passes for one of them, whatever links the kernel lets
/// such packets pass. Answers to this machine have the address they were masqueraded with here yet. By `loopback0` WSL
/// hands on what Windows sends to its own loopback.
fn only_own_loopback() -> impl Iterator<Item = Rule> {
    [Field::Destination(Ip::V4), Field::Source(Ip::V4)].into_iter().map(|field| {
        let any = ["lo", "loopback0"].map(Atom::Link).into();
        let foreign = Statement::Is { field: Field::Link, not: true, any };
        rule([Statement::is(field, loopback_net(Ip::V4)), foreign, Statement::drop()])
    })
}

/// Node ports are for the node's other addresses.
fn not_loopback(ip: Ip) -> Statement {
    Statement::Is { field: Field::Destination(ip), not: true, any: vec![loopback_net(ip)] }
}

/// The addresses by which a machine speaks to itself.
pub fn loopback_net(ip: Ip) -> Atom {
    let (address, bits) = match ip {
        Ip::V4 => (IpAddr::from([127, 0, 0, 0]), 8),
        Ip::V6 => (IpAddr::from([0, 0, 0, 0, 0, 0, 0, 1]), 128),
    };
    Atom::Net(Net::new(address, bits).expect("the family has this many bits"))
}
