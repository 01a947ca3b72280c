use proptest::prelude::*;

use super::*;
use pool::Pool;

#[track_caller]
fn check(text: &str, expected: &str) {
    let formatted = text.parse::<Cidr>().map(|range| {
        let last = (1..1 << 17).rev().find_map(|n| range.nth(n)).unwrap();
        format!("{range} {} {last} {}", range.gateway(), range.first(24))
    });
    assert_eq!(formatted.unwrap_or_else(|error| error), expected);
}

#[test]
fn cidr_ranges() {
    check("10.42.0.0/16", "10.42.0.0/16 10.42.0.1 10.42.255.254 10.42.0.0/24");
    check("10.42.7.9/24", "10.42.7.0/24 10.42.7.1 10.42.7.254 10.42.7.0/24");
    check("fd00::/120", "fd00::/120 fd00::1 fd00::ff fd00::/120");
    check("10.0.0.0/33", "\"10.0.0.0/33\" is not a CIDR such as 10.42.0.0/24");
    check("nonsense", "\"nonsense\" is not a CIDR such as 10.42.0.0/24");
}

#[test]
fn released_addresses_are_not_reused_immediately() {
    let pool = Pool::default();
    let ranges = ["10.0.0.0/29".parse().unwrap()];
    let take = |owner: &str| pool.allocate(&ranges, owner).map(|taken| taken[0].to_string());
    let first: Vec<_> = ["a", "b", "c"].map(|owner| take(owner).unwrap()).into();
    assert_eq!(first, ["10.0.0.2", "10.0.0.3", "10.0.0.4"]);
    pool.release("b");
    assert_eq!([take("d").unwrap(), take("e").unwrap()], ["10.0.0.5", "10.0.0.6"]);
    assert_eq!(take("f").unwrap(), "10.0.0.3");
    assert_eq!(take("g").unwrap_err().to_string(), "no free pod address in 10.0.0.0/29");
    // A new process after a crash.
    let again = Pool::default();
    again.reserve("10.0.0.2".parse().unwrap(), "a");
    assert_eq!(again.allocate(&ranges, "h").unwrap()[0].to_string(), "10.0.0.3");
}

#[test]
fn pod_can_connect_to_its_node() {
    use rustix::thread::UnshareFlags;
    let checks = || {
        if sys::process::unshare(UnshareFlags::NEWNET).is_err() {
            return eprintln!("skipped: needs root");
        }
        let range: Cidr = "10.9.0.0/24".parse().unwrap();
        // The bridge of an earlier version took its MAC address from its ports.
        Netlink::open().unwrap().ensure_bridge("skiff0", DEFAULT_MTU, [2; 6]).unwrap();
        prepare("skiff0", &[range]).unwrap();
        let bridge = |host: &mut Netlink| host.link("skiff0").unwrap().unwrap().mac;
        let accept_ra = |link: &str| format!("/proc/sys/net/ipv6/conf/{link}/accept_ra");
        let accepts = |link: &str| std::fs::read_to_string(accept_ra(link)).is_ok_and(|text| text != "0\n");
        assert!(!accepts("skiff0"));
        // A bridge created by another program gets the same settings.
        let _ = std::fs::write(accept_ra("skiff0"), "2");
        prepare("skiff0", &[range]).unwrap();
        assert!(!accepts("skiff0"));
        let listener = std::net::TcpListener::bind("10.9.0.1:0").unwrap();
        let port = listener.local_addr().unwrap().port();
        let mut host = Netlink::open().unwrap();
        let node = std::fs::File::open("/proc/thread-self/ns/net").unwrap();
        sys::process::unshare(UnshareFlags::NEWNET).unwrap();
        let address = Address { ip: range.nth(2).unwrap(), prefix: 24, gateway: range.gateway() };
        let bandwidth = Bandwidth { ingress: 10_000_000, egress: 5_000_000 };
        let attachment = Attachment {
            link: "skpod1".into(),
            bridge: "skiff0".into(),
            addresses: vec![address],
            bandwidth,
        };
        // `attach` uses the namespace of the process; this test needs that of the thread.
        let own = std::fs::File::open("/proc/thread-self/ns/net").unwrap();
        attach_in(&mut host, &attachment, own).unwrap();
        let accepts_inside = accepts(POD_INTERFACE);
        assert_eq!(bridge(&mut host), [0x0a, 0x58, 10, 9, 0, 1]);
        let host_link = host.link("skpod1").unwrap().unwrap();
        assert_eq!((host_link.master, host_link.mac), (0, [0x0a, 0x58, 10, 9, 0, 1]));
        std::net::TcpStream::connect(("10.9.0.1", port)).unwrap();
        rustix::thread::move_into_link_name_space(node.as_fd(), None).unwrap();
        assert_eq!(links("sk").unwrap(), ["skiff0", "skpod1"]);
        assert!(!accepts("skpod1"));
        assert_eq!(accepts_inside, accepts("lo"), "settings inside the pod are not changed");
        detach("skpod1").unwrap();
        detach("skpod1").unwrap();
        assert_eq!(bridge(&mut host), [0x0a, 0x58, 10, 9, 0, 1]);
        assert_eq!(links("skpod").unwrap(), [""; 0]);
    };
    std::thread::spawn(checks).join().unwrap();
}

/// Creates a network namespace that has only a loopback interface.
fn namespace() -> std::fs::File {
    let create = || {
        sys::process::unshare(rustix::thread::UnshareFlags::NEWNET).unwrap();
        std::fs::File::open("/proc/thread-self/ns/net").unwrap()
    };
    std::thread::spawn(create).join().unwrap()
}

/// Runs `work` in a network namespace, on a separate thread.
fn in_namespace<T: Send>(namespace: &std::fs::File, work: impl FnOnce() -> T + Send) -> T {
    let entered = || {
        rustix::thread::move_into_link_name_space(namespace.as_fd(), None).unwrap();
        work()
    };
    std::thread::scope(|scope| scope.spawn(entered).join().unwrap())
}

const RANGES: [&str; 2] = ["10.9.0.0/24", "fd09::/64"];

fn pod(number: u64) -> Attachment {
    let address = |range: &str| {
        let range: Cidr = range.parse().unwrap();
        Address { ip: range.nth(number).unwrap(), prefix: range.prefix(), gateway: range.gateway() }
    };
    Attachment {
        link: format!("skpod{number}"),
        bridge: "skiff0".into(),
        addresses: RANGES.map(address).into(),
        bandwidth: Bandwidth::default(),
    }
}

/// Accepts connections until the test ends. Returns the port.
fn listen_at(address: IpAddr) -> u16 {
    let listener = std::net::TcpListener::bind((address, 0)).unwrap();
    let port = listener.local_addr().unwrap().port();
    std::thread::spawn(move || listener.incoming().for_each(drop));
    port
}

/// Whether one pod can connect to both addresses of another.
fn can_connect(from: &std::fs::File, to: &std::fs::File, number: u64) -> bool {
    pod(number).addresses.iter().all(|address| {
        let port = in_namespace(to, || listen_at(address.ip));
        let connect = || {
            let wait = std::time::Duration::from_secs(4);
            std::net::TcpStream::connect_timeout(&(address.ip, port).into(), wait).is_ok()
        };
        in_namespace(from, connect)
    })
}

/// Runs a test in a new network namespace.
fn run_on_test_node(test: impl FnOnce() + Send + 'static) {
    let checks = || {
        if sys::process::unshare(rustix::thread::UnshareFlags::NEWNET).is_err() {
            return eprintln!("skipped: needs root");
        }
        prepare("skiff0", &RANGES.map(|range| range.parse().unwrap())).unwrap();
        test();
    };
    std::thread::spawn(checks).join().unwrap();
}

#[test]
fn pods_can_connect_to_each_other_through_the_node() {
    run_on_test_node(|| {
        let [a, b] = [namespace(), namespace()];
        restore(&pod(2), a.try_clone().unwrap()).unwrap();
        restore(&pod(3), b.try_clone().unwrap()).unwrap();
        assert!(can_connect(&a, &b, 3) && can_connect(&b, &a, 2));
        // Without forwarding no packet can pass through the node's IP layer.
        for switch in ["ipv4/ip_forward", "ipv6/conf/all/forwarding"] {
            std::fs::write(format!("/proc/sys/net/{switch}"), "0").unwrap();
        }
        assert!(!can_connect(&a, &b, 3));
    });
}

#[test]
fn restore_creates_missing_links_routes_and_addresses() {
    run_on_test_node(|| {
        let [a, b] = [namespace(), namespace()];
        let all = || vec![pod(2), pod(3)];
        let restore_all = || {
            for attachment in incomplete(all()).unwrap() {
                let namespace = if attachment == pod(2) { &a } else { &b };
                restore(&attachment, namespace.try_clone().unwrap()).unwrap();
            }
        };
        assert_eq!(incomplete(all()).unwrap(), all());
        restore_all();
        assert_eq!(incomplete(all()).unwrap(), []);
        let mut host = Netlink::open().unwrap();
        let index = |host: &mut Netlink| host.link("skpod2").unwrap().unwrap().index;
        let failures: [&dyn Fn(&mut Netlink); 3] = [
            &|host| host.delete_link("skpod2").unwrap(),
            &|host| {
                let index = index(host);
                host.delete_link_route(index, "10.9.0.2".parse().unwrap(), 32).unwrap();
            },
            &|host| {
                let index = index(host);
                host.delete_link_route(index, "fd09::2".parse().unwrap(), 128).unwrap();
            },
        ];
        for inject in failures {
            inject(&mut host);
            assert_eq!(incomplete(all()).unwrap(), [pod(2)]);
            restore_all();
            assert_eq!(incomplete(all()).unwrap(), []);
            assert!(can_connect(&a, &b, 3) && can_connect(&b, &a, 2));
        }
    });
}

#[test]
fn restore_can_detach_pods_from_the_bridge() {
    run_on_test_node(|| {
        let [a, b] = [namespace(), namespace()];
        let mut host = Netlink::open().unwrap();
        let bridge = host.link("skiff0").unwrap().unwrap().index;
        // Attached to the bridge, as by an earlier version.
        for (number, namespace) in [(2, &a), (3, &b)] {
            let attachment = pod(number);
            let veth = Veth {
                name: &attachment.link,
                peer: POD_INTERFACE,
                namespace: namespace.as_fd(),
                mac: None,
                peer_mac: mac(attachment.addresses.first().map(|address| address.ip)),
                master: bridge,
                mtu: DEFAULT_MTU,
            };
            host.add_veth(&veth).unwrap();
            in_namespace(namespace, || {
                let mut inside = Netlink::open().unwrap();
                let index = inside.link(POD_INTERFACE).unwrap().unwrap().index;
                inside.set_up(index).unwrap();
                for address in &attachment.addresses {
                    inside.add_address(index, address.ip, address.prefix).unwrap();
                    inside.add_default_route(index, address.gateway).unwrap();
                }
            });
        }
        assert!(can_connect(&a, &b, 3));
        let port = in_namespace(&b, || listen_at("10.9.0.3".parse().unwrap()));
        let connected = in_namespace(&a, || std::net::TcpStream::connect(("10.9.0.3", port)).unwrap());
        for (number, namespace) in [(2, &a), (3, &b)] {
            assert_eq!(incomplete(vec![pod(number)]).unwrap(), [pod(number)]);
            restore(&pod(number), namespace.try_clone().unwrap()).unwrap();
            assert_eq!(incomplete(vec![pod(number)]).unwrap(), []);
        }
        assert_eq!(host.link("skpod2").unwrap().unwrap().master, 0);
        assert!(can_connect(&a, &b, 3) && can_connect(&b, &a, 2));
        drop(connected);
    });
}

proptest! {
    #[test]
    fn nth_is_inside(a: u32, prefix in 0u8..=32, n: u64) {
        let range: Cidr = format!("{}/{prefix}", std::net::Ipv4Addr::from(a)).parse().unwrap();
        prop_assert!(range.nth(n).is_none_or(|ip| range.contains(ip)));
    }
}
