//! Tests with plugins that are shell scripts and log their calls.

use std::os::unix::fs::PermissionsExt as _;

use super::*;

struct TestEnv {
    dir: tempfile::TempDir,
    cni_plugins: CniPlugins,
}

impl TestEnv {
    fn new() -> TestEnv {
        let dir = tempfile::tempdir().unwrap();
        let cni_plugins = CniPlugins {
            dirs: vec![dir.path().join("none"), dir.path().join("bin")],
            cache: dir.path().join("cache"),
        };
        std::fs::create_dir(dir.path().join("bin")).unwrap();
        TestEnv { dir, cni_plugins }
    }

    /// Installs a plugin that logs its command, namespace and input and then runs `then`.
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

fn attached(id: &str) -> RuntimeConf<'_> {
    let capabilities = json!({"portMappings": [{"hostPort": 80}], "bandwidth": {"ingressRate": 1}});
    RuntimeConf {
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
fn plugins_receive_the_previous_result() {
    let env = TestEnv::new();
    env.program("first", FIRST);
    env.program("second", SECOND);
    let found = env.cni_plugins.add(&network(), &attached("abc")).unwrap();
    let expected: [IpAddr; 2] = ["10.1.0.2".parse().unwrap(), "fd00::2".parse().unwrap()];
    assert_eq!(found, expected);
    let log = env.log();
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
    assert_eq!(env.cni_plugins.cached_ids(), ["abc"]);

    // `CHECK` and `DEL` use the cached configuration. `DEL` runs in reverse order.
    env.cni_plugins.check("abc", Path::new("/proc/7/ns/net")).unwrap();
    let commands = |log: Vec<String>| {
        log.iter().map(|line| line.splitn(3, ' ').take(2).collect::<Vec<_>>().join(" ")).collect::<Vec<_>>()
    };
    let log = env.log();
    assert!(log.iter().all(|line| line.contains("prevResult") && line.contains("fd00::2/64")), "{log:?}");
    assert_eq!(commands(log), ["first CHECK", "second CHECK"]);
    env.cni_plugins.delete("abc", None).unwrap();
    let log = env.log();
    assert!(log[0].contains(" abc  eth0 ") && log[0].contains("portMappings"), "{log:?}");
    assert_eq!(commands(log), ["second DEL", "first DEL"]);
    assert!(env.cni_plugins.cached_ids().is_empty());
    env.cni_plugins.delete("abc", None).unwrap();
    assert!(env.log().is_empty());
}

#[test]
fn failed_add_runs_delete_and_reports_reason() {
    let env = TestEnv::new();
    env.program("first", FIRST);
    env.program(
        "second",
        r#"test $CNI_COMMAND = ADD && { echo '{"code": 7, "msg": "no way", "details": "at all"}'; exit 1; }; true"#,
    );
    let error = env.cni_plugins.add(&network(), &attached("abc")).unwrap_err();
    assert_eq!(error.to_string(), "plugin type=\"second\" failed (add): no way; at all");
    let log = env.log();
    assert_eq!(log.iter().filter(|line| line.contains(" DEL ")).count(), 2, "{log:?}");
    assert!(env.cni_plugins.cached_ids().is_empty());

    env.program("second", "echo broken >&2; exit 1");
    let error = env.cni_plugins.add(&network(), &attached("abc")).unwrap_err();
    assert_eq!(error.to_string(), "plugin type=\"second\" failed (add): netplugin failed: \"broken\"");
    std::fs::remove_file(env.dir.path().join("bin/second")).unwrap();
    let error = env.cni_plugins.add(&network(), &attached("abc")).unwrap_err();
    assert!(error.to_string().starts_with("failed to find plugin \"second\" in path ["), "{error}");
}

/// The runtime may be killed during `ADD`. Its successor must be able to delete the attachment.
#[test]
fn interrupted_add_can_be_deleted() {
    let env = TestEnv::new();
    env.program("first", FIRST);
    // A copy of the cache as the next process would find it if this one were killed now.
    let seen = env.dir.path().join("seen");
    env.program(
        "second",
        &format!("test $CNI_COMMAND = DEL || cp -r {} {}", env.cni_plugins.cache.display(), seen.display()),
    );
    assert!(env.cni_plugins.add(&network(), &attached("abc")).is_err(), "the plugin returns no result");
    env.log();
    env.program("second", "true");
    let later = CniPlugins { cache: seen, ..env.cni_plugins.clone() };
    assert_eq!(later.cached_ids(), ["abc"]);
    later.check("abc", Path::new("/proc/7/ns/net")).unwrap();
    assert_eq!(env.log(), [""; 0]);
    later.delete("abc", None).unwrap();
    let log = env.log();
    assert_eq!(log.len(), 2, "{log:?}");
    assert!(log[0].starts_with("second DEL abc ") && log[1].starts_with("first DEL abc "), "{log:?}");
    assert!(log.iter().all(|line| !line.contains("prevResult")), "{log:?}");
    assert!(log[0].contains("K8S_POD_NAME=web") && log[0].contains("portMappings"), "{log:?}");
    assert!(later.cached_ids().is_empty());
    // The cache entry itself was only partially written.
    std::fs::write(later.cache.join(".abc"), "{").unwrap();
    assert_eq!(later.cached_ids(), ["abc"]);
    later.delete("abc", None).unwrap();
    assert!(later.cached_ids().is_empty() && env.log().is_empty());
}

/// An address that was not released stays recorded.
#[test]
fn delete_succeeds_after_failed_rollback() {
    let env = TestEnv::new();
    env.program("first", FIRST);
    env.program("second", "exit 1");
    assert!(env.cni_plugins.add(&network(), &attached("abc")).is_err());
    assert_eq!(env.cni_plugins.cached_ids(), ["abc"]);
    assert!(env.cni_plugins.delete("abc", None).is_err());
    env.program("second", "test $CNI_COMMAND = DEL");
    env.cni_plugins.delete("abc", None).unwrap();
    assert!(env.cni_plugins.cached_ids().is_empty());
}

#[test]
fn loads_first_valid_network() {
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
fn invalid_configurations_are_rejected() {
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
        assert_eq!(Network::parse(&text).unwrap().supports_check(), expected, "{version}");
    }
    let old = json!({"ip4": {"ip": "10.0.0.2/24"}, "ip6": {"ip": "fd00::2/64"}});
    assert_eq!(addresses(&old).len(), 2);
}
