//! Durability: confirmed writes are on disk after SIGKILL and after a backup and a restore, corrupt
//! files are reported and not served, and files are private.

use std::collections::BTreeMap;
use std::os::unix::fs::PermissionsExt as _;
use std::path::{Path, PathBuf};
use std::process::{Command, Output};
use std::sync::mpsc::{Sender, channel};
use std::time::{Duration, Instant};

use serde_json::{Value, json};
use testkit::{Http, Process, Server, assert_same};

const MAPS: &str = "/api/v1/namespaces/default/configmaps";
const WRITER_COUNT: usize = 4;
const KILL_COUNT: usize = 4;
const RESPONSES_BEFORE_KILL: usize = 60;

/// The expected state of an object: that of the last response, or unknown after a request without a
/// response.
#[derive(Clone, Debug)]
enum ObjectState {
    Stored(Value),
    Deleted,
    Unknown,
}

#[test]
fn confirmed_writes_are_stored_after_sigkill() {
    let mut server = Server::start();
    let mut known: BTreeMap<String, ObjectState> = BTreeMap::new();
    for round in 0..KILL_COUNT {
        let http = server.http();
        let (sender, responses) = channel();
        let threads: Vec<_> = (0..WRITER_COUNT)
            .map(|writer| {
                let (http, sender) = (http.clone(), sender.clone());
                std::thread::spawn(move || {
                    write_until_it_fails(&http, &format!("r{round}-w{writer}"), &sender)
                })
            })
            .collect();
        drop(sender);
        let mut count = 0;
        for (name, state) in responses {
            count += usize::from(!matches!(state, ObjectState::Unknown));
            known.insert(name, state);
            if count == RESPONSES_BEFORE_KILL {
                server.kill9();
            }
        }
        threads.into_iter().for_each(|writer| writer.join().unwrap());
        server.restart();
        verify(&server.http(), &known);
    }
}

/// Creates, updates and deletes objects one after another, and reports each response.
fn write_until_it_fails(http: &Http, prefix: &str, responses: &Sender<(String, ObjectState)>) {
    for i in 0.. {
        let name = format!("{prefix}-{i}");
        let path = format!("{MAPS}/{name}");
        let map = json!({"metadata": {"name": name}, "data": {"a": "1"}});
        let json = [("content-type", "application/json")];
        let merge = [("content-type", "application/merge-patch+json")];
        let steps: &[(&str, &str, _, String)] = &[
            ("POST", MAPS, json, map.to_string()),
            ("PATCH", &path, merge, json!({"data": {"a": "2"}}).to_string()),
            ("DELETE", &path, json, String::new()),
        ];
        // A third of the objects is only created, a third is updated, a third is deleted.
        for (method, path, headers, body) in &steps[..=i % 3] {
            let state = match http.send(method, path, headers, body.as_bytes()) {
                Ok(reply) if *method == "DELETE" && reply.status == 200 => ObjectState::Deleted,
                Ok(reply) if matches!(reply.status, 200 | 201) => ObjectState::Stored(reply.json()),
                Ok(reply) => panic!("{method} {path}: {} {}", reply.status, reply.text()),
                Err(_) => ObjectState::Unknown,
            };
            let is_unknown = matches!(state, ObjectState::Unknown);
            if responses.send((name.clone(), state)).is_err() || is_unknown {
                return;
            }
        }
    }
}

#[track_caller]
fn verify(http: &Http, known: &BTreeMap<String, ObjectState>) {
    let found = objects(http);
    let mut latest_version = 0;
    for (name, state) in known {
        match (state, found.get(name)) {
            (ObjectState::Stored(expected), Some(object)) => {
                assert_same(name, expected, object);
                latest_version = latest_version.max(version(object));
            }
            (ObjectState::Stored(_), None) => panic!("{name} was confirmed and is lost"),
            (ObjectState::Deleted, Some(_)) => panic!("{name} was deleted and is stored"),
            (ObjectState::Deleted, None) | (ObjectState::Unknown, _) => {}
        }
    }
    let map = json!({"metadata": {"generateName": "after-"}});
    let created = http.post(MAPS, &map).unwrap().json();
    assert!(
        version(&created) > latest_version,
        "resource versions only increase: {created} after {latest_version}"
    );
}

#[test]
fn backup_and_restore_keeps_objects() {
    let mut server = Server::start();
    for name in ["a", "b"] {
        server.http().post(MAPS, &json!({"metadata": {"name": name}, "data": {"k": name}})).unwrap();
    }
    let before = objects(&server.http());
    let file = server.data_dir().with_file_name("backup");
    let (file, data) = (file.to_str().unwrap(), server.data_dir());
    let data = data.to_str().unwrap();
    let rejected = skiff(&["backup", file, "--data-dir", data]);
    assert!(!rejected.status.success() && text(&rejected).contains("in use"), "{}", text(&rejected));
    server.stop();
    assert!(skiff(&["backup", file, "--data-dir", data]).status.success());
    assert_eq!(mode(Path::new(file)) & 0o077, 0, "a backup contains Secrets");
    let rejected = skiff(&["restore", file, "--data-dir", data]);
    assert!(!rejected.status.success() && text(&rejected).contains("store"), "{}", text(&rejected));
    std::fs::remove_dir_all(server.data_dir().join("store")).unwrap();
    let restore = skiff(&["restore", file, "--data-dir", data]);
    assert!(restore.status.success(), "{}", text(&restore));
    server.restart();
    assert_same("restored", &json!(before), &json!(objects(&server.http())));
}

#[test]
fn backup_accepts_a_bare_file_name() {
    let dir = tempfile::tempdir().unwrap();
    let mut command = Command::new(testkit::binary().expect("a program"));
    command.current_dir(dir.path()).args(["backup", "b.file", "--data-dir"]).arg(dir.path().join("data"));
    let output = command.output().unwrap();
    assert!(output.status.success(), "{}", text(&output));
    assert!(dir.path().join("b.file").is_file());
}

#[test]
fn only_one_server_uses_a_directory() {
    let server = Server::start();
    let data = server.data_dir();
    let second = skiff(&[
        "server",
        "--disable-agent",
        "--bind-address=127.0.0.1",
        "--https-listen-port=0",
        "--data-dir",
        data.to_str().unwrap(),
    ]);
    let words = text(&second);
    assert_eq!(second.status.code(), Some(1), "{words}");
    assert!(words.contains("in use") && words.contains(data.to_str().unwrap()), "{words}");
    assert_eq!(server.http().get("/readyz").unwrap().status, 200, "the first server keeps running");
}

#[test]
fn corrupt_record_error_has_file_and_offset() {
    let mut server = Server::start();
    for i in 0..20 {
        server.http().post(MAPS, &json!({"metadata": {"name": format!("m{i}")}})).unwrap();
    }
    server.stop();
    let mut files = Vec::new();
    walk(&server.data_dir().join("store"), &mut files);
    let log = files.iter().max_by_key(|path| std::fs::metadata(path).unwrap().len()).unwrap();
    let mut bytes = std::fs::read(log).unwrap();
    // The file is preallocated, so it ends with zeros.
    let middle = bytes.iter().rposition(|byte| *byte != 0).unwrap() / 2;
    bytes[middle] ^= 0x10;
    std::fs::write(log, bytes).unwrap();
    let start = ["server", "--disable-agent", "--bind-address=127.0.0.1", "--https-listen-port=0"];
    let mut command = Command::new(testkit::binary().expect("a program"));
    command.args(start).arg("--data-dir").arg(server.data_dir());
    let mut process = Process::spawn(&mut command).unwrap();
    let words = process.wait_until(Duration::from_secs(30), || None::<()>).unwrap_err().to_string();
    assert!(words.starts_with("the process exited with exit status: 1"), "{words}");
    assert!(words.contains(log.file_name().unwrap().to_str().unwrap()), "names the file: {words}");
    // The reported offset is the start of the corrupt record, slightly before the changed byte.
    let offset = words.split(|c: char| !c.is_ascii_digit()).filter_map(|word| word.parse::<usize>().ok());
    let offset_matches = offset.clone().any(|offset| offset <= middle && middle - offset < 4096);
    assert!(offset_matches, "reports the offset, before {middle}: {words}");
}

#[test]
fn data_dir_and_keys_are_private() {
    let server = Server::start();
    assert_eq!(mode(&server.kubeconfig()), 0o600);
    assert_eq!(mode(&server.data_dir()), 0o700);
    let mut files = Vec::new();
    walk(&server.data_dir(), &mut files);
    let keys = files.iter().filter(|path| path.to_string_lossy().contains("key"));
    assert!(keys.clone().count() > 0, "there are key files: {files:?}");
    for path in files {
        let is_key = std::fs::read(&path).unwrap().windows(11).any(|part| part == b"PRIVATE KEY");
        assert!(!is_key || mode(&path) & 0o077 == 0, "{} is {:o}", path.display(), mode(&path));
    }
}

#[test]
fn sigterm_ends_watches_and_the_server() {
    let mut server = Server::start();
    let http = server.http();
    let mut watches: Vec<_> = (0..3).map(|_| http.open(&format!("{MAPS}?watch=1")).unwrap()).collect();
    assert!(watches.iter().all(|watch| watch.status == 200));
    let started = Instant::now();
    server.stop();
    assert!(started.elapsed() < Duration::from_secs(5), "took {:?}", started.elapsed());
    for watch in &mut watches {
        while let Ok(Some(line)) = watch.next_line() {
            assert!(line.contains("\"type\":"), "{line}");
        }
    }
}

fn objects(http: &Http) -> BTreeMap<String, Value> {
    let list = http.get(MAPS).unwrap().json();
    let items = list["items"].as_array().unwrap_or_else(|| panic!("{list}"));
    let with_type = |item: &Value| {
        let mut item = item.clone();
        item["kind"] = "ConfigMap".into();
        item["apiVersion"] = "v1".into();
        item
    };
    items
        .iter()
        .map(|item| (item["metadata"]["name"].as_str().unwrap().to_owned(), with_type(item)))
        .collect()
}

fn version(object: &Value) -> u64 {
    object["metadata"]["resourceVersion"].as_str().unwrap().parse().unwrap()
}

fn skiff(args: &[&str]) -> Output {
    Command::new(testkit::binary().expect("a program")).args(args).output().unwrap()
}

fn text(output: &Output) -> String {
    String::from_utf8_lossy(&output.stderr).into_owned()
}

fn mode(path: &Path) -> u32 {
    std::fs::metadata(path).unwrap().permissions().mode() & 0o777
}

fn walk(folder: &Path, files: &mut Vec<PathBuf>) {
    for entry in std::fs::read_dir(folder).unwrap() {
        let path = entry.unwrap().path();
        if path.is_dir() { walk(&path, files) } else { files.push(path) }
    }
}
