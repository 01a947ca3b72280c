//! A server that keeps its objects in a real etcd.

use std::net::TcpListener;
use std::process::Command;
use std::time::Duration;

use serde_json::{Value, json};
use testkit::{Http, Process, Server};

const MAPS: &str = "/api/v1/namespaces/default/configmaps";

#[test]
fn objects_live_in_etcd() {
    if Command::new("etcd").arg("--version").output().is_err() {
        println!("skipped: no etcd");
        return;
    }
    let folder = tempfile::tempdir().unwrap();
    let ports: Vec<u16> =
        [(); 2].map(|()| TcpListener::bind("127.0.0.1:0").unwrap()).iter().map(port).collect();
    let (client, peer) = (format!("http://127.0.0.1:{}", ports[0]), format!("http://127.0.0.1:{}", ports[1]));
    let mut command = Command::new("etcd");
    command.arg("--data-dir").arg(folder.path()).args(["--unsafe-no-fsync", "--name=t"]);
    command.args(["--listen-client-urls", &client, "--advertise-client-urls", &client]);
    command.args(["--listen-peer-urls", &peer, "--initial-advertise-peer-urls", &peer]);
    command.args(["--initial-cluster", &format!("t={peer}")]);
    let mut etcd = Process::spawn(&mut command).unwrap();
    etcd.wait_until_log(Duration::from_secs(60), |log| {
        log.contains("ready to serve client requests").then_some(())
    })
    .unwrap();

    let mut server = Server::start_with(&["--datastore-endpoint", &client]);
    let http = server.http();
    let mut watch = http.open(&format!("{MAPS}?watch=1&fieldSelector=metadata.name%3Da")).unwrap();
    let made = ok(&http, "POST", MAPS, &json!({"metadata": {"name": "a"}, "data": {"k": "1"}}));
    let one = format!("{MAPS}/a");
    let mut next = made.clone();
    next["data"]["k"] = "2".into();
    let changed = ok(&http, "PUT", &one, &next);
    let stale = http.send("PUT", &one, &JSON, next.to_string().as_bytes()).unwrap();
    assert_eq!(stale.status, 409, "{}", stale.text());
    for (kind, object) in [("ADDED", &made), ("MODIFIED", &changed)] {
        let event: Value = serde_json::from_str(&watch.next_line().unwrap().unwrap()).unwrap();
        assert_eq!((&event["type"], &event["object"]), (&json!(kind), object));
    }
    let before = http.get(MAPS).unwrap().json();

    server.restart();
    let http = server.http();
    assert_eq!(http.get(MAPS).unwrap().json()["items"], before["items"], "the same after a restart");
    assert_eq!(http.get(&one).unwrap().json(), changed);
    assert_eq!(http.send("DELETE", &one, &[], b"").unwrap().status, 200);
    assert_eq!(http.get(&one).unwrap().status, 404);
    assert!(!server.data_dir().join("store").exists(), "nothing is stored twice");
}

const JSON: [(&str, &str); 1] = [("content-type", "application/json")];

#[track_caller]
fn ok(http: &Http, method: &str, path: &str, body: &Value) -> Value {
    let reply = http.send(method, path, &JSON, body.to_string().as_bytes()).unwrap();
    assert!(matches!(reply.status, 200 | 201), "{method} {path}: {}", reply.text());
    reply.json()
}

fn port(listener: &TcpListener) -> u16 {
    listener.local_addr().unwrap().port()
}
