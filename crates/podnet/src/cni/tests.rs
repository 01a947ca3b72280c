//! Against programs that are scripts and write down how they were called.

use std::os::unix::fs::PermissionsExt as _;

use super::*;

struct Place {
    dir: tempfile::TempDir,
    programs: Programs,
}

impl Place {
    fn new() -> Place {
        let dir = tempfile::tempdir().unwrap();
        let programs = Programs {
            dirs: vec![dir.path().join("none"), dir.path().join("bin")],
            cache: dir.path().join("cache"),
        };
        std::fs::create_dir(dir.path().join("bin")).unwrap();
        Place { dir, programs }
    }

    /// A program that writes down its command, namespace and input, and then does this.
    fn program(&self, name: &str, then: &str) {
        let path = self.dir.path().join("bin").join(name);
        let log = self.dir.path().join("log");
        let text = format!(
            "#!/bin/sh\ninput=$(cat)\necho \"{name} $CNI_COMMAND $CNI_CONTAINERID $CNI_NETNS $CNI_IFNAME $CNI_ARGS $input\" >>{}\n{then}\n",
            log.display()
        );
        std::fs::write(&path, text).unwrap();
        std::fs::set_permissions(&path, std::fs::Permissions::from_mode(0o755)).unwrap();
    }

    fn log(&self) -> Vec<String> {
        let text = std::fs::read_to_string(self.dir.path().join("log")).unwrap_or_default();
        let _ = std::fs::remove_file(self.dir.path().join("log"));
        text.lines().map(str::to_owned).collect()
    }
}

fn network() -> Network {
    let text = r#"{"cniVersion": "1.0.0", "name": "net", "plugins": [
        {"type": "first", "ipam": {"x": 1}},
        {"type": "second", "capabilities": {"portMappings": true, "bandwidth": false}}]}"#;
    Network::parse(text).unwrap()
}

fn attached(id: &str) -> Attached<'_> {
    let capabilities = json!({"portMappings": [{"hostPort": 80}], "bandwidth": {"ingressRate": 1}});
    Attached {
        id,
        namespace: Some("/proc/7/ns/net".into()),
        args: vec![("K8S_POD_NAME".to_owned(), "web".to_owned())],
        capabilities: capabilities.as_object().unwrap().clone(),
    }
}

const FIRST: &str =
    r#"test $CNI_COMMAND = ADD && echo '{"cniVersion":"1.0.0","ips":[{"address":"10.1.0.2/16"}]}'; true"#;
const SECOND: &str = r#"test $CNI_COMMAND = ADD && echo '{"cniVersion":"1.0.0","ips":[{"address":"10.1.0.2/16"},{"address":"fd00::2/64"}]}'; true"#;

#[test]
fn each_program_is_told_what_came_before() {
    let place = Place::new();
    place.program("first", FIRST);
    place.program("second", SECOND);
    let found = place.programs.add(&network(), &attached("abc")).unwrap();
    let expected: [IpAddr; 2] = ["10.1.0.2".parse().unwrap(), "fd00::2".parse().unwrap()];
    assert_eq!(found, expected);
    let log = place.log();
    let start = "ADD abc /proc/7/ns/net eth0 K8S_POD_NAME=web";
    assert_eq!(
        log,
        [
            format!(r#"first {start} {{"cniVersion":"1.0.0","ipam":{{"x":1}},"name":"net","type":"first"}}"#),
            format!(
                r#"second {start} {{"cniVersion":"1.0.0","name":"net","prevResult":{{"cniVersion":"1.0.0","ips":[{{"address":"10.1.0.2/16"}}]}},"runtimeConfig":{{"portMappings":[{{"hostPort":80}}]}},"type":"second"}}"#
            ),
        ]
    );
    assert_eq!(place.programs.attached(), ["abc"]);

    // By what was written down: in their order, and in the end the other way round.
    place.programs.check("abc", Path::new("/proc/7/ns/net")).unwrap();
    let commands = |log: Vec<String>| {
        log.iter().map(|line| line.splitn(3, ' ').take(2).collect::<Vec<_>>().join(" ")).collect::<Vec<_>>()
    };
    let log = place.log();
    assert!(log.iter().all(|line| line.contains("prevResult") && line.contains("fd00::2/64")), "{log:?}");
    assert_eq!(commands(log), ["first CHECK", "second CHECK"]);
    place.programs.delete("abc", None).unwrap();
    let log = place.log();
    assert!(log[0].contains(" abc  eth0 ") && log[0].contains("portMappings"), "{log:?}");
    assert_eq!(commands(log), ["second DEL", "first DEL"]);
    assert!(place.programs.attached().is_empty());
    place.programs.delete("abc", None).unwrap();
    assert!(place.log().is_empty());
}

#[test]
fn what_fails_is_undone_and_says_why() {
    let place = Place::new();
    place.program("first", FIRST);
    place.program(
        "second",
        r#"test $CNI_COMMAND = ADD && { echo '{"code": 7, "msg": "no way", "details": "at all"}'; exit 1; }; true"#,
    );
    let error = place.programs.add(&network(), &attached("abc")).unwrap_err();
    assert_eq!(error.to_string(), "plugin type=\"second\" failed (add): no way; at all");
    let log = place.log();
    assert_eq!(log.iter().filter(|line| line.contains(" DEL ")).count(), 2, "{log:?}");
    assert!(place.programs.attached().is_empty());

    place.program("second", "echo broken >&2; exit 1");
    let error = place.programs.add(&network(), &attached("abc")).unwrap_err();
    assert_eq!(error.to_string(), "plugin type=\"second\" failed (add): netplugin failed: \"broken\"");
    std::fs::remove_file(place.dir.path().join("bin/second")).unwrap();
    let error = place.programs.add(&network(), &attached("abc")).unwrap_err();
    assert!(error.to_string().starts_with("failed to find plugin \"second\" in path ["), "{error}");
}

/// Whoever runs programs may be killed before they answer, and another one comes later.
#[test]
fn what_was_never_finished_can_be_undone() {
    let place = Place::new();
    place.program("first", FIRST);
    // What a later skiff would see, if this one were killed now.
    let seen = place.dir.path().join("seen");
    place.program(
        "second",
        &format!("test $CNI_COMMAND = DEL || cp -r {} {}", place.programs.cache.display(), seen.display()),
    );
    assert!(place.programs.add(&network(), &attached("abc")).is_err(), "it has no result");
    place.log();
    place.program("second", "true");
    let later = Programs { cache: seen, ..place.programs.clone() };
    assert_eq!(later.attached(), ["abc"]);
    later.check("abc", Path::new("/proc/7/ns/net")).unwrap();
    assert_eq!(place.log(), [""; 0]);
    later.delete("abc", None).unwrap();
    let log = place.log();
    assert_eq!(log.len(), 2, "{log:?}");
    assert!(log[0].starts_with("second DEL abc ") && log[1].starts_with("first DEL abc "), "{log:?}");
    assert!(log.iter().all(|line| !line.contains("prevResult")), "{log:?}");
    assert!(log[0].contains("K8S_POD_NAME=web") && log[0].contains("portMappings"), "{log:?}");
    assert!(later.attached().is_empty());
    // It was not even written down.
    std::fs::write(later.cache.join(".abc"), "{").unwrap();
    assert_eq!(later.attached(), ["abc"]);
    later.delete("abc", None).unwrap();
    assert!(later.attached().is_empty() && place.log().is_empty());
}

/// An address that could not be given back is not forgotten.
#[test]
fn what_cannot_be_undone_is_undone_later() {
    let place = Place::new();
    place.program("first", FIRST);
    place.program("second", "exit 1");
    assert!(place.programs.add(&network(), &attached("abc")).is_err());
    assert_eq!(place.programs.attached(), ["abc"]);
    assert!(place.programs.delete("abc", None).is_err());
    place.program("second", "test $CNI_COMMAND = DEL");
    place.programs.delete("abc", None).unwrap();
    assert!(place.programs.attached().is_empty());
}

#[test]
fn the_first_network_that_can_be_understood() {
    let dir = tempfile::tempdir().unwrap();
    let write = |name: &str, text: &str| std::fs::write(dir.path().join(name), text).unwrap();
    let found = || load(dir.path(), &["10-skiff.conflist"]).map(|found| found.map(|network| network.name));
    assert_eq!(load(&dir.path().join("none"), &[]).unwrap(), None);
    assert_eq!(found().unwrap(), None);
    write("README", "{}");
    write("10-skiff.conflist", r#"{"name": "own", "plugins": [{"type": "x"}]}"#);
    assert_eq!(found().unwrap(), None);
    write("00-broken.conf", "{");
    assert!(found().unwrap_err().to_string().contains("00-broken.conf"));
    write("30-last.conf", r#"{"name": "last", "type": "x"}"#);
    assert_eq!(found().unwrap().as_deref(), Some("last"));
    write("20-list.conflist", r#"{"name": "list", "cniVersion": "0.4.0", "plugins": [{"type": "x"}]}"#);
    assert_eq!(found().unwrap().as_deref(), Some("list"));
}

#[test]
fn versions_and_bad_configurations() {
    for (text, expected) in [
        (r#"{"name": "a", "plugins": []}"#, "no plugins in list"),
        (r#"{"name": "a", "plugins": 7}"#, "'plugins' is not a list"),
        (r#"{"name": "a"}"#, "no 'plugins' key"),
        (r#"{"name": "../a", "type": "x"}"#, "invalid network name \"../a\""),
        (r#"{"type": "x"}"#, "invalid network name \"\""),
        (r#"{"name": "a", "type": "../x"}"#, "missing 'type'"),
    ] {
        assert_eq!(Network::parse(text).unwrap_err(), expected);
    }
    for (version, check, expected) in
        [("0.3.1", false, false), ("0.4.0", false, true), ("1.0.0", false, true), ("1.1.0", true, false)]
    {
        let text =
            format!(r#"{{"name": "a", "cniVersion": "{version}", "type": "x", "disableCheck": {check}}}"#);
        assert_eq!(Network::parse(&text).unwrap().can_be_checked(), expected, "{version}");
    }
    let old = json!({"ip4": {"ip": "10.0.0.2/24"}, "ip6": {"ip": "fd00::2/64"}});
    assert_eq!(addresses(&old).len(), 2);
}
