use proptest::prelude::*;

use super::*;
use pool::Pool;

#[track_caller]
fn check(text: &str, expected: &str) {
    let shown = text.parse::<Cidr>().map(|range| {
        let last = (1..1 << 17).rev().find_map(|n| range.nth(n)).unwrap();
        format!("{range} {} {last} {}", range.gateway(), range.first(24))
    });
    assert_eq!(shown.unwrap_or_else(|error| error), expected);
}

#[test]
fn ranges() {
    check("10.42.0.0/16", "10.42.0.0/16 10.42.0.1 10.42.255.254 10.42.0.0/24");
    check("10.42.7.9/24", "10.42.7.0/24 10.42.7.1 10.42.7.254 10.42.7.0/24");
    check("fd00::/120", "fd00::/120 fd00::1 fd00::ff fd00::/120");
    check("10.0.0.0/33", "\"10.0.0.0/33\" is not a range of addresses such as 10.42.0.0/24");
    check("nonsense", "\"nonsense\" is not a range of addresses such as 10.42.0.0/24");
}

#[test]
fn addresses_are_given_out_once_and_not_again_at_once() {
    let pool = Pool::default();
    let ranges = ["10.0.0.0/29".parse().unwrap()];
    let take = |owner: &str| pool.take(&ranges, owner).map(|taken| taken[0].to_string());
    let first: Vec<_> = ["a", "b", "c"].map(|owner| take(owner).unwrap()).into();
    assert_eq!(first, ["10.0.0.2", "10.0.0.3", "10.0.0.4"]);
    pool.give_back("b");
    assert_eq!([take("d").unwrap(), take("e").unwrap()], ["10.0.0.5", "10.0.0.6"]);
    assert_eq!(take("f").unwrap(), "10.0.0.3");
    assert_eq!(take("g").unwrap_err().to_string(), "no address is free in 10.0.0.0/29");
    // Another process, after a crash.
    let again = Pool::default();
    again.hold("10.0.0.2".parse().unwrap(), "a");
    assert_eq!(again.take(&ranges, "h").unwrap()[0].to_string(), "10.0.0.3");
}

#[test]
fn a_pod_reaches_its_node() {
    use rustix::thread::UnshareFlags;
    let checks = || {
        if sys::process::unshare(UnshareFlags::NEWNET).is_err() {
            return eprintln!("skipped: needs root");
        }
        let range: Cidr = "10.9.0.0/24".parse().unwrap();
        // One of an earlier skiff, which followed its ports.
        Netlink::open().unwrap().ensure_bridge("skiff0", MTU, [2; 6]).unwrap();
        prepare("skiff0", &[range]).unwrap();
        let bridge = |host: &mut Netlink| host.link("skiff0").unwrap().unwrap().mac;
        let accept_ra = |link: &str| format!("/proc/sys/net/ipv6/conf/{link}/accept_ra");
        let accepts = |link: &str| std::fs::read_to_string(accept_ra(link)).is_ok_and(|text| text != "0\n");
        assert!(!accepts("skiff0"));
        // One that somebody else has made is no different.
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
        // `attach` is for a process; this is a thread, whose namespace is found elsewhere.
        let own = std::fs::File::open("/proc/thread-self/ns/net").unwrap();
        attach_in(&mut host, &attachment, own).unwrap();
        let accepts_inside = accepts(INSIDE);
        assert_eq!(bridge(&mut host), [0x0a, 0x58, 10, 9, 0, 1]);
        std::net::TcpStream::connect(("10.9.0.1", port)).unwrap();
        rustix::thread::move_into_link_name_space(node.as_fd(), None).unwrap();
        assert_eq!(links("sk").unwrap(), ["skiff0", "skpod1"]);
        assert!(!accepts("skpod1"));
        assert_eq!(accepts_inside, accepts("lo"), "what the pod itself believes is its own affair");
        detach("skpod1").unwrap();
        detach("skpod1").unwrap();
        assert_eq!(bridge(&mut host), [0x0a, 0x58, 10, 9, 0, 1]);
        assert_eq!(links("skpod").unwrap(), [""; 0]);
    };
    std::thread::spawn(checks).join().unwrap();
}

proptest! {
    #[test]
    fn nth_is_inside(a: u32, prefix in 0u8..=32, n: u64) {
        let range: Cidr = format!("{}/{prefix}", std::net::Ipv4Addr::from(a)).parse().unwrap();
        prop_assert!(range.nth(n).is_none_or(|ip| range.contains(ip)));
    }
}
