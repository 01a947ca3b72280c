//! Many streams to pods at once, by both protocols that kubectl has had: nothing is lost, nothing is mixed up.
//!
//! `SKIFF_BIN` says which program, `PATH` which kubectl; one from before 1.29 speaks the older protocol whatever it is told.
//! Needs root, kubectl and busybox; says so and passes where these are missing.

use std::io::{Read as _, Write as _};
use std::path::Path;
use std::process::{Command, Stdio};

use testkit::{Background, Network, Server, Terminal};

const IMAGE: &str = "docker.io/library/busybox:1.36";
/// Commands in one container at the same time.
const EXECS: usize = 50;
/// Bytes that each of them is given and gives back.
const ECHOED: usize = 64 << 10;
/// Bytes of the file that is copied there and back.
const FILE: usize = 100 << 20;
/// Lines that a container says while somebody listens.
const LINES: usize = 100_000;

#[test]
fn many_streams_at_once() {
    if !testkit::can_have_pods(&["busybox"]) {
        return;
    }
    let network = Network::new().expect("a network");
    let server = Server::start_with_pods(&network, &["--controllers=*", "--node-name=here"]);
    let dir = tempfile::tempdir().expect("a directory");
    let archive = testkit::busybox_image(dir.path(), IMAGE).expect("an image").display().to_string();
    let data = server.data_dir().display().to_string();
    server.skiff(&["image", "import", "--data-dir", &data, &archive]).ok();
    server.until_pods_can_be_made();
    server.run_pod("site", "mkdir /www; exec busybox httpd -f -p 8080 -h /www", "Always");
    server.run_pod("ticker", "while true; do echo tick; sleep 0.05; done", "Always");
    for name in ["site", "ticker"] {
        server.wait_for_pod(name, "condition=Ready");
    }
    let bytes: Vec<u8> =
        (0..FILE as u64).map(|i| (i.wrapping_mul(0x9e37_79b9_7f4a_7c15) >> 40) as u8).collect();
    let file = dir.path().join("there");
    std::fs::write(&file, &bytes).expect("written");
    for websockets in ["true", "false"] {
        let streams = Streams { server: &server, websockets };
        let talker = format!("talker-{websockets}");
        let talk = format!("while ! test -e /go; do sleep 0.1; done; seq 1 {LINES}");
        server.run_pod(&talker, &talk, "Never");
        server.wait_for_pod(&talker, "condition=Ready");
        // All of these go on beside each other.
        std::thread::scope(|scope| {
            scope.spawn(|| streams.listen(&talker));
            scope.spawn(|| streams.copy(&file, &dir.path().join("back"), &bytes));
            scope.spawn(|| streams.echo());
            scope.spawn(|| streams.resize());
            scope.spawn(|| streams.attach());
        });
        streams.forward(&bytes);
    }
}

struct Streams<'a> {
    server: &'a Server,
    websockets: &'a str,
}

impl Streams<'_> {
    fn kubectl(&self, arguments: &[&str]) -> Command {
        let mut command = self.server.kubectl_command();
        command
            .args(arguments)
            .env("KUBECTL_REMOTE_COMMAND_WEBSOCKETS", self.websockets)
            .env("KUBECTL_PORT_FORWARD_WEBSOCKETS", self.websockets);
        command
    }

    fn spawn(&self, arguments: &[&str]) -> Background {
        let mut command = self.kubectl(arguments);
        Background(command.stdin(Stdio::piped()).stdout(Stdio::piped()).spawn().expect("kubectl"))
    }

    #[track_caller]
    fn run(&self, arguments: &[&str]) {
        let output = self.kubectl(arguments).output().expect("kubectl");
        let said = String::from_utf8_lossy(&output.stderr);
        assert!(output.status.success(), "{arguments:?}, websockets: {}: {said}", self.websockets);
    }

    /// Who follows hears every line, in order, and the end.
    fn listen(&self, pod: &str) {
        let mut follower = self.spawn(&["logs", "-f", pod]);
        self.run(&["exec", pod, "--", "touch", "/go"]);
        let heard: Vec<String> = follower.lines().collect();
        assert_eq!(heard.len(), LINES, "{:?}", heard.last());
        for (at, line) in heard.iter().enumerate() {
            assert_eq!(*line, (at + 1).to_string());
        }
        assert!(follower.0.wait().expect("an end").success());
    }

    fn copy(&self, there: &Path, back: &Path, bytes: &[u8]) {
        let (there, to) = (there.display().to_string(), back.display().to_string());
        self.run(&["cp", &there, "site:/www/file"]);
        self.run(&["cp", "site:/www/file", &to]);
        assert!(std::fs::read(back).expect("a copy") == bytes, "websockets: {}", self.websockets);
    }

    /// Each gets its own words back, and nobody else's.
    fn echo(&self) {
        let words = |i: usize| format!("{i:08}\n").repeat(ECHOED / 9).into_bytes();
        let mut all: Vec<_> = (0..EXECS).map(|_| self.spawn(&["exec", "-i", "site", "--", "cat"])).collect();
        std::thread::scope(|scope| {
            for (i, one) in all.iter_mut().enumerate() {
                let (mut stdin, mut stdout) = (one.0.stdin.take(), one.0.stdout.take().expect("a pipe"));
                scope.spawn(move || {
                    stdin.as_mut().expect("a pipe").write_all(&words(i)).expect("written");
                    drop(stdin);
                });
                scope.spawn(move || {
                    let mut heard = Vec::new();
                    stdout.read_to_end(&mut heard).expect("read");
                    assert!(heard == words(i), "{i}: {} bytes, websockets: {}", heard.len(), self.websockets);
                });
            }
        });
        for mut one in all {
            assert!(one.0.wait().expect("an end").success());
        }
    }

    fn resize(&self) {
        let mut command = self.kubectl(&["exec", "-it", "site", "--", "sh"]);
        let mut terminal = Terminal::start(&mut command, (33, 111)).expect("kubectl");
        let seen = terminal.type_until("stty size", "33 111");
        seen.and_then(|()| terminal.resize((44, 122)))
            .and_then(|()| terminal.type_until("stty size", "44 122"))
            .and_then(|()| terminal.type_line("exit 5"))
            .unwrap_or_else(|error| panic!("websockets: {}: {error:#}", self.websockets));
        assert_eq!(terminal.end().expect("an end").code(), Some(5), "{}", terminal.said());
    }

    fn attach(&self) {
        let heard = self.spawn(&["attach", "ticker"]).lines().take(20).collect::<Vec<_>>();
        assert_eq!(heard, ["tick"; 20]);
    }

    /// Several connections through one forwarded port.
    fn forward(&self, bytes: &[u8]) {
        let mut forwarding = self.spawn(&["port-forward", "pod/site", ":8080"]);
        // Kept to the end: it says something of every connection.
        let mut lines = forwarding.lines();
        let line = lines.next().expect("a port");
        let port = line.split_once("127.0.0.1:").and_then(|(_, rest)| rest.split_whitespace().next());
        let url = format!("http://127.0.0.1:{}/file", port.expect("a port"));
        std::thread::scope(|scope| {
            for _ in 0..4 {
                scope.spawn(|| {
                    let mut wget = self.server.command("/bin/busybox");
                    let heard = wget.args(["wget", "-qO-", &url]).output().expect("an answer");
                    let why = String::from_utf8_lossy(&heard.stderr);
                    assert!(heard.stdout == bytes, "{} bytes: {why}", heard.stdout.len());
                });
            }
        });
    }
}
