//! Many concurrent streams to pods, with both protocols of kubectl: no data is lost or mixed up.
//!
//! `SKIFF_BIN` selects the skiff binary and `PATH` the kubectl; kubectl before 1.29 always uses the
//! older protocol. Needs root, kubectl and busybox; skipped otherwise.

use std::io::{Read as _, Write as _};
use std::path::Path;
use std::process::{Command, Stdio};

use testkit::{BackgroundCommand, Network, Server, Terminal};

const IMAGE: &str = "docker.io/library/busybox:1.36";
/// Concurrent commands in one container.
const EXEC_COUNT: usize = 50;
/// Bytes that each command receives and sends back.
const ECHO_BYTES: usize = 64 << 10;
/// Size in bytes of the file that is copied in both directions.
const FILE_BYTES: usize = 100 << 20;
/// Lines that a container writes while its log is followed.
const LINE_COUNT: usize = 100_000;

#[test]
fn many_streams_at_once() {
    if !testkit::can_run_pods(&["busybox"]) {
        return;
    }
    let network = Network::new().expect("a network");
    let server = Server::start_with_pods(&network, &["--controllers=*", "--node-name=here"]);
    let dir = tempfile::tempdir().expect("a directory");
    let archive = testkit::busybox_image(dir.path(), IMAGE).expect("an image").display().to_string();
    let data = server.data_dir().display().to_string();
    server.skiff(&["image", "import", "--data-dir", &data, &archive]).ok();
    server.wait_for_default_service_account();
    server.run_pod("site", "mkdir /www; exec busybox httpd -f -p 8080 -h /www", "Always");
    server.run_pod("ticker", "while true; do echo tick; sleep 0.05; done", "Always");
    for name in ["site", "ticker"] {
        server.wait_for_pod(name, "condition=Ready");
    }
    let bytes: Vec<u8> =
        (0..FILE_BYTES as u64).map(|i| (i.wrapping_mul(0x9e37_79b9_7f4a_7c15) >> 40) as u8).collect();
    let file = dir.path().join("there");
    std::fs::write(&file, &bytes).expect("written");
    for websockets in ["true", "false"] {
        let streams = Streams { server: &server, websockets };
        let log_pod = format!("talker-{websockets}");
        let script = format!("while ! test -e /go; do sleep 0.1; done; seq 1 {LINE_COUNT}");
        server.run_pod(&log_pod, &script, "Never");
        server.wait_for_pod(&log_pod, "condition=Ready");
        // All of these run concurrently.
        std::thread::scope(|scope| {
            scope.spawn(|| streams.follow_logs(&log_pod));
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

    fn spawn(&self, arguments: &[&str]) -> BackgroundCommand {
        let mut command = self.kubectl(arguments);
        BackgroundCommand(command.stdin(Stdio::piped()).stdout(Stdio::piped()).spawn().expect("kubectl"))
    }

    #[track_caller]
    fn run(&self, arguments: &[&str]) {
        let output = self.kubectl(arguments).output().expect("kubectl");
        let stderr = String::from_utf8_lossy(&output.stderr);
        assert!(output.status.success(), "{arguments:?}, websockets: {}: {stderr}", self.websockets);
    }

    /// A client that follows the log gets every line in order, and the end of the stream.
    fn follow_logs(&self, pod: &str) {
        let mut log_stream = self.spawn(&["logs", "-f", pod]);
        self.run(&["exec", pod, "--", "touch", "/go"]);
        let lines: Vec<String> = log_stream.lines().collect();
        assert_eq!(lines.len(), LINE_COUNT, "{:?}", lines.last());
        for (at, line) in lines.iter().enumerate() {
            assert_eq!(*line, (at + 1).to_string());
        }
        assert!(log_stream.0.wait().expect("an end").success());
    }

    fn copy(&self, there: &Path, back: &Path, bytes: &[u8]) {
        let (there, to) = (there.display().to_string(), back.display().to_string());
        self.run(&["cp", &there, "site:/www/file"]);
        self.run(&["cp", "site:/www/file", &to]);
        assert!(std::fs::read(back).expect("a copy") == bytes, "websockets: {}", self.websockets);
    }

    /// Each command gets its own input back.
    fn echo(&self) {
        let words = |i: usize| format!("{i:08}\n").repeat(ECHO_BYTES / 9).into_bytes();
        let mut all: Vec<_> =
            (0..EXEC_COUNT).map(|_| self.spawn(&["exec", "-i", "site", "--", "cat"])).collect();
        std::thread::scope(|scope| {
            for (i, one) in all.iter_mut().enumerate() {
                let (mut stdin, mut stdout) = (one.0.stdin.take(), one.0.stdout.take().expect("a pipe"));
                scope.spawn(move || {
                    stdin.as_mut().expect("a pipe").write_all(&words(i)).expect("written");
                    drop(stdin);
                });
                scope.spawn(move || {
                    let mut response = Vec::new();
                    stdout.read_to_end(&mut response).expect("read");
                    assert!(
                        response == words(i),
                        "{i}: {} bytes, websockets: {}",
                        response.len(),
                        self.websockets
                    );
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
        assert_eq!(terminal.end().expect("an end").code(), Some(5), "{}", terminal.output());
    }

    fn attach(&self) {
        let ticks = self.spawn(&["attach", "ticker"]).lines().take(20).collect::<Vec<_>>();
        assert_eq!(ticks, ["tick"; 20]);
    }

    /// Several connections through one forwarded port.
    fn forward(&self, bytes: &[u8]) {
        let mut forwarding = self.spawn(&["port-forward", "pod/site", ":8080"]);
        // Kept until the end: kubectl logs every connection to this pipe.
        let mut lines = forwarding.lines();
        let line = lines.next().expect("a port");
        let port = line.split_once("127.0.0.1:").and_then(|(_, rest)| rest.split_whitespace().next());
        let url = format!("http://127.0.0.1:{}/file", port.expect("a port"));
        std::thread::scope(|scope| {
            for _ in 0..4 {
                scope.spawn(|| {
                    let mut client = self.server.command("/bin/busybox");
                    let response = client.args(["wget", "-qO-", &url]).output().expect("an answer");
                    let stderr = String::from_utf8_lossy(&response.stderr);
                    assert!(response.stdout == bytes, "{} bytes: {stderr}", response.stdout.len());
                });
            }
        });
    }
}
