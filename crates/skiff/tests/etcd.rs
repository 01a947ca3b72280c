//! Servers that store their objects in a real etcd.

use std::collections::HashSet;
use std::net::{IpAddr, Ipv4Addr, TcpListener};
use std::path::PathBuf;
use std::process::Command;
use std::time::Duration;

use jiff::Timestamp;
use pki::{Authority, Leaf, Usage};
use serde_json::{Value, json};
use testkit::{Http, Process, Server};

const MAPS: &str = "/api/v1/namespaces/default/configmaps";
const SERVICES: &str = "/api/v1/namespaces/default/services";

#[test]
fn objects_are_stored_in_etcd() {
    let Some(etcd) = Etcd::start(false) else { return };
    let mut server = Server::start_with(&etcd.flags());
    let http = server.http();
    let mut watch = http.open(&format!("{MAPS}?watch=1&fieldSelector=metadata.name%3Da")).unwrap();
    let created = ok(&http, "POST", MAPS, &json!({"metadata": {"name": "a"}, "data": {"k": "1"}}));
    let one = format!("{MAPS}/a");
    let mut next = created.clone();
    next["data"]["k"] = "2".into();
    let changed = ok(&http, "PUT", &one, &next);
    let stale = http.send("PUT", &one, &JSON, next.to_string().as_bytes()).unwrap();
    assert_eq!(stale.status, 409, "{}", stale.text());
    for (kind, object) in [("ADDED", &created), ("MODIFIED", &changed)] {
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
    assert!(!server.data_dir().join("store").exists(), "the embedded store is not used");
}

/// Two servers on one etcd, over TLS, allocate addresses and ports at the same time without duplicates.
#[test]
fn two_servers_allocate_unique_addresses_and_ports() {
    const SERVICES_PER_SERVER: usize = 25;
    let Some(etcd) = Etcd::start(true) else { return };
    // The port range is small, so that most choices collide.
    let port_range = ["--service-node-port-range", "30000-30060"];
    let flags = [&etcd.flags()[..], &port_range].concat();
    let servers = [Server::start_with(&flags), Server::start_with(&flags)];
    let service = |name: &str, extra: Value| {
        let mut spec = json!({"type": "NodePort", "ports": [{"port": 80}]});
        spec.as_object_mut().unwrap().extend(extra.as_object().unwrap().clone());
        json!({"metadata": {"name": name}, "spec": spec})
    };
    std::thread::scope(|scope| {
        for (i, server) in servers.iter().enumerate() {
            let http = server.http();
            scope.spawn(move || {
                for n in 0..SERVICES_PER_SERVER {
                    ok(&http, "POST", SERVICES, &service(&format!("s{i}-{n}"), json!({})));
                }
            });
        }
    });
    let http = servers[0].http();
    let services = http.get(SERVICES).unwrap().json();
    let services: Vec<&Value> = services["items"]
        .as_array()
        .unwrap()
        .iter()
        .filter(|item| item["spec"]["type"] == "NodePort")
        .collect();
    assert_eq!(services.len(), 2 * SERVICES_PER_SERVER);
    let ips: HashSet<&str> = services.iter().filter_map(|s| s["spec"]["clusterIP"].as_str()).collect();
    let ports: HashSet<i64> =
        services.iter().filter_map(|s| s["spec"]["ports"][0]["nodePort"].as_i64()).collect();
    assert_eq!((ips.len(), ports.len()), (2 * SERVICES_PER_SERVER, 2 * SERVICES_PER_SERVER));

    // One server rejects addresses and ports that the other has allocated, until they are released.
    let (ip, port) =
        (services[0]["spec"]["clusterIP"].clone(), services[0]["spec"]["ports"][0]["nodePort"].clone());
    let holder = format!("{SERVICES}/{}", services[0]["metadata"]["name"].as_str().unwrap());
    let conflicting = service("wanted", json!({"clusterIP": ip, "ports": [{"port": 80, "nodePort": port}]}));
    let other = servers[1].http();
    let send = |http: &Http| http.send("POST", SERVICES, &JSON, conflicting.to_string().as_bytes()).unwrap();
    for http in [&http, &other] {
        let reply = send(http);
        assert_eq!(reply.status, 422, "{}", reply.text());
        assert!(reply.text().contains("provided IP is already allocated"), "{}", reply.text());
    }
    assert_eq!(http.send("DELETE", &holder, &[], b"").unwrap().status, 200);
    let reply = send(&other);
    assert_eq!(reply.status, 201, "{}", reply.text());
}

#[test]
fn etcd_tls_requires_valid_certificates() {
    let Some(etcd) = Etcd::start(true) else { return };
    let other_dir = tempfile::tempdir().unwrap();
    Authority::load_or_create(other_dir.path(), "ca", Timestamp::now()).unwrap();
    let other_ca = other_dir.path().join("ca.crt").display().to_string();
    let mut flags = etcd.flags();
    flags[3] = &other_ca;
    for (flags, expected) in
        [(flags, "cannot reach etcd"), (etcd.flags()[..2].to_vec(), "needs --datastore-cafile")]
    {
        let data = tempfile::tempdir().unwrap();
        let mut command = Command::new(testkit::binary().expect("a program"));
        command.args(["server", "--disable-agent", "--https-listen-port", "0", "--data-dir"]);
        let output = command.arg(data.path()).args(&flags).output().unwrap();
        let stderr = String::from_utf8_lossy(&output.stderr);
        assert!(!output.status.success() && stderr.contains(expected), "{stderr}");
    }
}

struct Etcd {
    _process: Process,
    _folder: tempfile::TempDir,
    flags: Vec<String>,
}

impl Etcd {
    /// `None` if etcd is not installed.
    fn start(tls: bool) -> Option<Etcd> {
        if Command::new("etcd").arg("--version").output().is_err() {
            println!("skipped: no etcd");
            return None;
        }
        let folder = tempfile::tempdir().unwrap();
        let ports = [(); 2].map(|()| TcpListener::bind("127.0.0.1:0").unwrap());
        let [client, peer] =
            ports.map(|listener| format!("127.0.0.1:{}", listener.local_addr().unwrap().port()));
        let client = format!("{}://{client}", if tls { "https" } else { "http" });
        let peer = format!("http://{peer}");
        let mut command = Command::new("etcd");
        command.arg("--data-dir").arg(folder.path().join("data")).args(["--unsafe-no-fsync", "--name=t"]);
        command.args(["--listen-client-urls", &client, "--advertise-client-urls", &client]);
        command.args(["--listen-peer-urls", &peer, "--initial-advertise-peer-urls", &peer]);
        command.args(["--initial-cluster", &format!("t={peer}")]);
        let mut flags = vec!["--datastore-endpoint".to_owned(), client];
        if tls {
            let [ca, server, client] = certificates(&folder);
            command.arg("--client-cert-auth").arg("--trusted-ca-file").arg(&ca[0]);
            command.arg("--cert-file").arg(&server[0]).arg("--key-file").arg(&server[1]);
            for (flag, path) in [("ca", &ca[0]), ("cert", &client[0]), ("key", &client[1])] {
                flags.extend([format!("--datastore-{flag}file"), path.display().to_string()]);
            }
        }
        let mut process = Process::spawn(&mut command).unwrap();
        process
            .wait_until_log(Duration::from_secs(60), |log| {
                let ready =
                    log.contains("ready to serve client requests") || log.contains("serving client traffic");
                ready.then_some(())
            })
            .unwrap();
        Some(Etcd { _process: process, _folder: folder, flags })
    }

    fn flags(&self) -> Vec<&str> {
        self.flags.iter().map(String::as_str).collect()
    }
}

/// A CA, a certificate for etcd and one for its clients, each as certificate and key file.
fn certificates(folder: &tempfile::TempDir) -> [[PathBuf; 2]; 3] {
    let (dir, now) = (folder.path().join("tls"), Timestamp::now());
    let authority = Authority::load_or_create(&dir, "ca", now).unwrap();
    for (name, usage) in [("server", Usage::Server), ("client", Usage::Client)] {
        let leaf = Leaf {
            common_name: name.to_owned(),
            organizations: Vec::new(),
            dns_names: Vec::new(),
            ips: vec![IpAddr::V4(Ipv4Addr::LOCALHOST)],
            usage,
            lifetime: Duration::from_secs(3600),
        };
        pki::load_or_issue(&dir, name, &authority, &leaf, now).unwrap();
    }
    ["ca", "server", "client"].map(|name| ["crt", "key"].map(|end| dir.join(format!("{name}.{end}"))))
}

const JSON: [(&str, &str); 1] = [("content-type", "application/json")];

#[track_caller]
fn ok(http: &Http, method: &str, path: &str, body: &Value) -> Value {
    let reply = http.send(method, path, &JSON, body.to_string().as_bytes()).unwrap();
    assert!(matches!(reply.status, 200 | 201), "{method} {path}: {}", reply.text());
    reply.json()
}
