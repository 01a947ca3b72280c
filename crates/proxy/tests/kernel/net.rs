//! Network namespaces for tests. A test runs itself again in a new network and mount namespace, in
//! which a node, pods and an external host are created. Everything is removed when the process exits.

use std::io::{self, Read as _, Write as _};
use std::net::{IpAddr, Ipv4Addr, SocketAddr, TcpListener, TcpStream, UdpSocket};
use std::os::fd::AsFd as _;
use std::process::Command;
use std::sync::mpsc;
use std::time::Duration;

use podnet::{Address, Attachment, Bandwidth, Cidr};
use rustix::thread::{LinkNameSpaceType, move_into_link_name_space};

const INSIDE: &str = "SKIFF_TEST_INSIDE";
const BRIDGE: &str = "pods";
const RANGES: [&str; 2] = ["10.42.0.0/24", "fd42::/64"];
/// How long a client waits for a response.
const CLIENT_TIMEOUT: Duration = Duration::from_secs(2);

/// Whether this process is inside the namespaces. Otherwise runs the named test inside, and fails if it
/// fails.
#[track_caller]
pub fn inside(test: &str) -> bool {
    if std::env::var_os(INSIDE).is_some() {
        return true;
    }
    if !rustix::process::geteuid().is_root() {
        eprintln!("skipped: needs root for network namespaces");
        return false;
    }
    let this = std::env::current_exe().unwrap();
    let mut command = Command::new("unshare");
    command.args(["--net", "--mount"]).arg(this).args(["--exact", test, "--nocapture"]).env(INSIDE, "1");
    match command.output() {
        Err(error) => eprintln!("skipped: cannot run unshare: {error}"),
        Ok(output) => {
            let text = format!(
                "{}{}",
                String::from_utf8_lossy(&output.stdout),
                String::from_utf8_lossy(&output.stderr)
            );
            // A misspelled name runs no test, which succeeds as well.
            assert!(output.status.success() && text.contains("1 passed"), "{text}");
            eprintln!("{text}");
        }
    }
    false
}

/// Runs a shell command that must succeed and returns its output.
#[track_caller]
pub fn sh(line: &str) -> String {
    let output = Command::new("sh").args(["-ec", line]).output().unwrap();
    assert!(output.status.success(), "{line}: {}", String::from_utf8_lossy(&output.stderr));
    String::from_utf8_lossy(&output.stdout).into_owned()
}

/// Creates a node with two pods and an external host. As on most hosts, bridged packets bypass
/// netfilter and strict reverse path filtering is on.
pub fn build() {
    sh("mount -t tmpfs none /run
        ip link set lo up
        for switch in /proc/sys/net/bridge/bridge-nf-call-*tables; do [ ! -e $switch ] || echo 0 > $switch; done
        echo 1 > /proc/sys/net/ipv4/conf/all/rp_filter");
    let ranges: Vec<Cidr> = RANGES.iter().map(|range| range.parse().unwrap()).collect();
    podnet::prepare(BRIDGE, &ranges).unwrap();
    for (name, number) in [("a", 5), ("b", 6)] {
        sh(&format!("ip netns add {name}"));
        let address = |range: &Cidr| Address {
            ip: range.nth(number).unwrap(),
            prefix: range.prefix(),
            gateway: range.gateway(),
        };
        let attachment = Attachment {
            link: format!("veth-{name}"),
            bridge: BRIDGE.into(),
            addresses: ranges.iter().map(address).collect(),
            bandwidth: Bandwidth::default(),
        };
        let namespace = std::fs::File::open(format!("/run/netns/{name}")).unwrap();
        podnet::restore(&attachment, namespace).unwrap();
    }
    sh("ip netns add out
        ip link add uplink type veth peer name eth0 netns out
        ip addr add 192.0.2.1/24 dev uplink; ip link set uplink up; ip route add default via 192.0.2.2
        ip -6 addr add 2001:db8::1/64 dev uplink nodad
        ip -n out link set lo up; ip -n out link set eth0 up
        ip -n out addr add 192.0.2.2/24 dev eth0; ip -n out route add default via 192.0.2.1
        ip -n out addr add 192.0.2.3/24 dev eth0
        ip -n out addr add 2001:db8::2/64 dev eth0 nodad; ip -n out route add default via 2001:db8::1");
}

/// Runs `work` in the named namespace, on a separate thread. `node` is the current namespace.
fn run_in_namespace<T: Send + 'static>(
    name: &str,
    work: impl FnOnce() -> T + Send + 'static,
) -> mpsc::Receiver<T> {
    let (sender, receiver) = mpsc::channel();
    let path = (name != "node").then(|| format!("/run/netns/{name}"));
    std::thread::spawn(move || {
        if let Some(path) = path {
            let file = std::fs::File::open(&path).unwrap();
            move_into_link_name_space(file.as_fd(), Some(LinkNameSpaceType::Network)).unwrap();
        }
        let _ = sender.send(work());
    });
    receiver
}

/// Serves TCP and UDP on port 8080 of all addresses. Responds with its name and the client's address.
pub fn serve(name: &'static str) {
    let ready = run_in_namespace(name, move || {
        let tcp = TcpListener::bind("[::]:8080").unwrap();
        let udp = UdpSocket::bind("[::]:8080").unwrap();
        std::thread::spawn(move || {
            for stream in tcp.incoming() {
                let mut stream = stream.unwrap();
                let peer = stream.peer_addr().unwrap().ip().to_canonical();
                let _ = write!(stream, "{name} {peer}");
            }
        });
        std::thread::spawn(move || {
            let mut buffer = [0; 64];
            while let Ok((_, peer)) = udp.recv_from(&mut buffer) {
                let _ = udp.send_to(format!("{name} {}", peer.ip().to_canonical()).as_bytes(), peer);
            }
        });
    });
    ready.recv().unwrap();
}

/// Sends a TCP request from a namespace. Returns the response or how it failed.
pub fn tcp_request(namespace: &str, to: &str) -> String {
    let to: SocketAddr = to.parse().unwrap();
    let answer = run_in_namespace(namespace, move || -> io::Result<String> {
        let mut stream = TcpStream::connect_timeout(&to, CLIENT_TIMEOUT)?;
        stream.set_read_timeout(Some(CLIENT_TIMEOUT))?;
        let mut answer = String::new();
        stream.read_to_string(&mut answer)?;
        Ok(answer)
    });
    answer_text(answer.recv().unwrap())
}

/// A UDP client that keeps its port, so that its packets belong to one flow.
pub struct UdpClient(UdpSocket);

impl UdpClient {
    pub fn new(namespace: &str, to: &str) -> UdpClient {
        let to: SocketAddr = to.parse().unwrap();
        let any: IpAddr = if to.is_ipv6() { [0u16; 8].into() } else { Ipv4Addr::UNSPECIFIED.into() };
        let socket = run_in_namespace(namespace, move || {
            let socket = UdpSocket::bind((any, 0)).unwrap();
            socket.connect(to).unwrap();
            socket.set_read_timeout(Some(CLIENT_TIMEOUT)).unwrap();
            socket
        });
        UdpClient(socket.recv().unwrap())
    }

    pub fn request(&self) -> String {
        let answer = || -> io::Result<String> {
            self.0.send(b"?")?;
            let mut buffer = [0; 64];
            let length = self.0.recv(&mut buffer)?;
            Ok(String::from_utf8_lossy(&buffer[..length]).into_owned())
        };
        answer_text(answer())
    }
}

fn answer_text(answer: io::Result<String>) -> String {
    answer.unwrap_or_else(|error| match error.kind() {
        io::ErrorKind::ConnectionRefused => "refused".to_owned(),
        io::ErrorKind::TimedOut | io::ErrorKind::WouldBlock => "nothing".to_owned(),
        _ => format!("{error}"),
    })
}
