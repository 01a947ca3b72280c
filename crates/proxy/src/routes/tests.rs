//! Tests in the kernel with two nodes and a router between them that has no routes to pods.

use std::fs::File;
use std::net::{IpAddr, UdpSocket};
use std::os::fd::AsFd as _;
use std::process::Command;
use std::sync::mpsc;
use std::time::Duration;

use nft::IpNet;
use rustix::thread::UnshareFlags;

use super::{OVERLAYS, sync_routes};

/// Runs `work` in the network namespace of a node.
fn inside<T: Send>(network: &File, work: impl FnOnce() -> T + Send) -> T {
    std::thread::scope(|scope| {
        let thread = scope.spawn(|| {
            let kind = Some(rustix::thread::LinkNameSpaceType::Network);
            rustix::thread::move_into_link_name_space(network.as_fd(), kind).expect("the network");
            work()
        });
        thread.join().expect("no panic")
    })
}

#[track_caller]
fn sh(script: &str) {
    let output = Command::new("sh").args(["-ec", script]).output().expect("a shell");
    assert!(output.status.success(), "{script}: {}", String::from_utf8_lossy(&output.stderr));
}

/// Creates a network namespace and runs `script` in it.
fn network(script: &str) -> File {
    std::thread::scope(|scope| {
        let thread = scope.spawn(|| {
            sys::process::unshare(UnshareFlags::NEWNET).expect("root");
            sh(script);
            File::open("/proc/thread-self/ns/net").expect("a network")
        });
        thread.join().expect("no panic")
    })
}

struct Node {
    network: File,
    address: IpAddr,
    /// The pod network and a pod address in each family.
    pods: [(IpNet, IpAddr); 2],
}

impl Node {
    fn new(number: u8, over_v6: bool) -> Node {
        let pods = [
            (format!("10.42.{number}.0/24"), format!("10.42.{number}.1")),
            (format!("fd42:0:0:{number}::/64"), format!("fd42:0:0:{number}::1")),
        ];
        let pods = pods.map(|(net, ip)| (net.parse::<IpNet>().unwrap(), ip.parse::<IpAddr>().unwrap()));
        let (address, router, bits) = match over_v6 {
            true => (format!("2001:db8:{number}::2"), format!("2001:db8:{number}::1"), 64),
            false => (format!("192.0.{number}.2"), format!("192.0.{number}.1"), 24),
        };
        let network = network(&format!(
            "ip link set lo up; ip link add eth0 type veth peer name far{number}; ip link set eth0 up
             sysctl -qw net.ipv6.conf.all.forwarding=1
             ip addr add {address}/{bits} dev eth0 nodad; ip route add default via {router} dev eth0 onlink
             ip link add skiff0 type bridge; ip link set skiff0 up
             ip addr add {}/24 dev skiff0; ip addr add {}/64 dev skiff0 nodad",
            pods[0].1, pods[1].1,
        ));
        Node { network, address: address.parse().unwrap(), pods }
    }

    /// Moves the peer of this node's link to the router.
    fn connect(&self, number: u8, router: &str) {
        inside(&self.network, || sh(&format!("ip link set far{number} netns {router}")));
    }

    fn sync_routes_to(&self, other: &Node) -> bool {
        let desired = other.pods.iter().map(|(net, _)| (*net, other.address)).collect();
        let own = self.pods.map(|(net, _)| net);
        inside(&self.network, || sync_routes(&desired, &own, &[self.address]))
    }

    /// Whether a large packet from `from` is received by the other node and answered.
    fn gets_reply(&self, from: IpAddr, other: &Node, to: IpAddr) -> bool {
        let (ready, is_ready) = mpsc::channel();
        std::thread::scope(|scope| {
            scope.spawn(move || {
                inside(&other.network, move || {
                    let socket = UdpSocket::bind((to, 9000)).unwrap();
                    socket.set_read_timeout(Some(Duration::from_secs(6))).unwrap();
                    ready.send(()).unwrap();
                    let mut buffer = [0; 2000];
                    while let Ok((count, from)) = socket.recv_from(&mut buffer) {
                        let _ = socket.send_to(&buffer[..count], from);
                        if count == 1 {
                            return;
                        }
                    }
                });
            });
            is_ready.recv().unwrap();
            inside(&self.network, || {
                let socket = UdpSocket::bind((from, 0)).unwrap();
                socket.set_read_timeout(Some(Duration::from_secs(1))).unwrap();
                // There is no route.
                if socket.connect((to, 9000)).is_err() {
                    return false;
                }
                let mut buffer = [0; 2000];
                // Packets may be lost. The small packet ends the receiver.
                let received = (0..5).any(|_| {
                    socket.send(&[7; 1400]).is_ok()
                        && socket.recv(&mut buffer).is_ok_and(|count| count == 1400)
                });
                let _ = socket.send(&[7]);
                received
            })
        })
    }
}

#[track_caller]
fn check(over_v6: bool) {
    let tools = |name: &str| Command::new(name).arg("-V").output().is_ok();
    if !rustix::process::geteuid().is_root() || !tools("ip") || !tools("sysctl") {
        return eprintln!("skipped: needs root, ip and sysctl");
    }
    let nodes = [Node::new(1, over_v6), Node::new(2, over_v6)];
    // A process in the router's namespace is needed, because links are moved to it by process ID.
    let mut router = Command::new("unshare").args(["--net", "sleep", "100"]).spawn().unwrap();
    let place = format!("/proc/{}/ns/net", router.id());
    let own = std::fs::read_link("/proc/self/ns/net").unwrap();
    while std::fs::read_link(&place).is_ok_and(|current| current == own) {
        std::thread::yield_now();
    }
    let addresses = |number: u8| match over_v6 {
        true => format!("ip addr add 2001:db8:{number}::1/64 dev far{number} nodad"),
        false => format!("ip addr add 192.0.{number}.1/24 dev far{number}"),
    };
    for (node, number) in nodes.iter().zip(1..) {
        node.connect(number, &router.id().to_string());
    }
    inside(&File::open(&place).unwrap(), || {
        sh("sysctl -qw net.ipv4.ip_forward=1 net.ipv6.conf.all.forwarding=1");
        for number in [1, 2] {
            sh(&format!("ip link set far{number} up; {}", addresses(number)));
        }
    });
    let [a, b] = &nodes;
    let received = || {
        a.pods.iter().zip(&b.pods).map(|((_, from), (_, to))| a.gets_reply(*from, b, *to)).collect::<Vec<_>>()
    };
    assert_eq!(received(), [false, false], "the router has no routes to pods");
    // A repeated sync changes nothing.
    for _ in 0..2 {
        assert!(a.sync_routes_to(b) && b.sync_routes_to(a));
    }
    assert_eq!(received(), [true, true]);
    inside(&a.network, || {
        let mut netlink = sys::netlink::Netlink::open().unwrap();
        let current = OVERLAYS.map(|name| netlink.link(name).unwrap().is_some());
        assert_eq!(current, [!over_v6, over_v6]);
        assert!(sync_routes(&Default::default(), &[], &[]), "all nodes are removed");
        assert_eq!(OVERLAYS.map(|name| netlink.link(name).unwrap()), [None, None]);
    });
    let _ = router.kill();
    let _ = router.wait();
}

#[test]
fn routes_between_pods_over_ipv4() {
    check(false);
}

#[test]
fn routes_between_pods_over_ipv6() {
    check(true);
}
