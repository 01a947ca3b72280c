//! Networks configured by the administrator with real CNI plugins, and bandwidth limits of pods.

use std::os::unix::fs::PermissionsExt as _;
use std::path::{Path, PathBuf};

use runtime::cri::*;
use serde_json::Value;

use crate::kit::{TestNode, script};
use crate::socket::CriClient;

/// A CNI plugin that records its input and delegates to the real plugin.
const RECORDER_PLUGIN: &str = r#"#!/bin/sh
input=$(cat)
printf '%s %s\n' "$CNI_COMMAND" "$input" >>"$(dirname "$0")/log"
case $CNI_COMMAND in
ADD) printf '%s' "$input" | python3 -c 'import json,sys; print(json.dumps(json.load(sys.stdin)["prevResult"]))' ;;
esac
"#;

pub async fn uses_the_configured_cni_network(node: &TestNode) {
    if !Path::new("/usr/lib/cni/bridge").exists() {
        return eprintln!("skipped: needs containernetworking-plugins");
    }
    let dir = node.dir.path();
    let (conf, bin) = (dir.join("net.d"), dir.join("bin"));
    std::fs::create_dir_all(&conf).unwrap();
    std::fs::create_dir_all(&bin).unwrap();
    std::fs::write(bin.join("recorder"), RECORDER_PLUGIN).unwrap();
    std::fs::set_permissions(bin.join("recorder"), std::fs::Permissions::from_mode(0o755)).unwrap();
    let addresses = dir.join("addresses");
    let config = serde_json::json!({"cniVersion": "1.0.0", "name": "theirs", "plugins": [
        {"type": "bridge", "bridge": "theirs0", "isGateway": true,
         "ipam": {"type": "host-local", "dataDir": addresses, "ranges": [[{"subnet": "10.99.0.0/24"}], [{"subnet": "fd99::/120"}]],
                  "routes": [{"dst": "0.0.0.0/0"}]}},
        {"type": "tuning", "sysctl": {"net.core.somaxconn": "333"}},
        {"type": "recorder", "capabilities": {"portMappings": true, "bandwidth": true}},
    ]});
    std::fs::write(conf.join("20-theirs.conflist"), config.to_string()).unwrap();
    std::fs::write(conf.join("10-skiff.conflist"), r#"{"name": "ours", "type": "nothing-there"}"#).unwrap();

    let mut pod_config = node.pod_config("theirs");
    pod_config.annotations.insert("kubernetes.io/ingress-bandwidth".into(), "10M".into());
    pod_config.port_mappings =
        vec![PortMapping { container_port: 80, host_port: 8080, ..PortMapping::default() }];
    let pod = node.pod_with(pod_config).await;
    let status = node.runtime.sandbox_status(&pod.id).await.unwrap().network.unwrap();
    assert_eq!((status.ip.as_str(), status.additional_ips[0].ip.as_str()), ("10.99.0.2", "fd99::2"));
    let id = pod.start(&script("sleep 1000")).await;
    let (_, seen, _) =
        pod.exec(&id, "ip -o addr show eth0; cat /proc/sys/net/core/somaxconn; ip route").await;
    assert!(seen.contains("10.99.0.2/24") && seen.contains("fd99::2/120"), "{seen}");
    assert!(seen.contains("\n333\n") && seen.contains("default via 10.99.0.1"), "{seen}");
    let log = || std::fs::read_to_string(bin.join("log")).unwrap_or_default();
    let cni_request: Value = serde_json::from_str(log().trim().strip_prefix("ADD ").unwrap()).unwrap();
    let capabilities = &cni_request["runtimeConfig"];
    assert_eq!(capabilities["portMappings"][0]["hostPort"], 8080);
    assert_eq!(capabilities["bandwidth"]["ingressRate"], 10_000_000);
    assert_eq!(cni_request["prevResult"]["ips"][0]["address"], "10.99.0.2/24");

    // Verbose status runs CNI's CHECK, which notices that the address was deleted.
    let mut client = CriClient::connect(node);
    let mut checked = async || {
        let request = PodSandboxStatusRequest { pod_sandbox_id: pod.id.clone(), verbose: true };
        let answer: PodSandboxStatusResponse = client.get("PodSandboxStatus", request).await;
        let info: Value = serde_json::from_str(&answer.info["info"]).unwrap();
        info["cniCheck"].as_str().unwrap().to_owned()
    };
    assert_eq!(checked().await, "ok");
    let request = ContainerStatusRequest { container_id: id.clone(), verbose: true };
    let answer: ContainerStatusResponse = CriClient::connect(node).get("ContainerStatus", request).await;
    let info: Value = serde_json::from_str(&answer.info["info"]).unwrap();
    let pid = &info["pid"];
    let delete_status = std::process::Command::new("nsenter")
        .args([&format!("--net=/proc/{pid}/ns/net"), "ip", "addr", "del", "10.99.0.2/24", "dev", "eth0"])
        .status();
    assert!(delete_status.unwrap().success());
    let found = checked().await;
    assert!(found.contains("plugin type=\"bridge\" failed (check)"), "{found}");

    // The attachment is deleted with its recorded configuration, even if the configuration file is
    // gone.
    std::fs::remove_file(conf.join("20-theirs.conflist")).unwrap();
    let later = node.reopen().await;
    assert_eq!(later.sandbox_status(&pod.id).await.unwrap().network.unwrap().ip, "10.99.0.2");
    drop(later);
    node.runtime.remove_sandbox(&pod.id).await.unwrap();
    assert!(log().lines().last().unwrap().starts_with("DEL "), "{}", log());
    let left: Vec<_> = std::fs::read_dir(addresses.join("theirs")).unwrap().flatten().collect();
    let left: Vec<_> = left.iter().map(|entry| entry.file_name().into_string().unwrap()).collect();
    assert!(!left.iter().any(|name| name.starts_with("10.99")), "{left:?}");

    // The error names a missing plugin, and nothing is left behind.
    std::fs::write(conf.join("30-bad.conf"), r#"{"name": "bad", "type": "nothing-there"}"#).unwrap();
    let error = node.runtime.run_sandbox(&node.pod_config("bad"), "").await.unwrap_err().message();
    assert!(
        error.contains("failed to setup network for sandbox")
            && error.contains("failed to find plugin \"nothing-there\""),
        "{error}"
    );
    std::fs::write(conf.join("30-bad.conf"), "{").unwrap();
    let status = node.runtime.status().await.unwrap().status.unwrap();
    let network = status.conditions.iter().find(|condition| condition.type_ == "NetworkReady").unwrap();
    assert!(!network.status && network.message.contains("30-bad.conf"), "{network:?}");
    std::fs::remove_file(conf.join("30-bad.conf")).unwrap();
    let _ = podnet::detach("theirs0");
}

/// A CNI plugin that is a whole network, sets sysctls of its own and records its calls. At its end it
/// runs the commands in a file.
const FAKE_PLUGIN: &str = r#"#!/bin/sh
here=$(dirname "$0")
printf '%s %s\n' "$CNI_COMMAND" "$CNI_CONTAINERID" >>"$here/log"
case $CNI_COMMAND in
ADD)
    nsenter --net="$CNI_NETNS" sh -c '
        ip link add eth0 type veth peer name far && ip addr add 10.97.0.2/24 dev eth0
        echo 333 >/proc/sys/net/core/somaxconn'
    . "$here/more"
    echo '{"cniVersion": "1.0.0", "ips": [{"address": "10.97.0.2/24"}]}' ;;
esac
"#;

/// Configures that plugin as the network, with commands to run at its end. Returns the path of its log.
fn install_fake_plugin(node: &TestNode, more: &str) -> PathBuf {
    let (conf, bin) = (node.dir.path().join("net.d"), node.dir.path().join("bin"));
    for place in [&conf, &bin] {
        std::fs::create_dir_all(place).unwrap();
    }
    std::fs::write(bin.join("alone"), FAKE_PLUGIN).unwrap();
    std::fs::write(bin.join("more"), more).unwrap();
    std::fs::set_permissions(bin.join("alone"), std::fs::Permissions::from_mode(0o755)).unwrap();
    let config = r#"{"cniVersion": "1.0.0", "name": "alone", "type": "alone"}"#;
    std::fs::write(conf.join("20-alone.conf"), config).unwrap();
    bin.join("log")
}

/// The pod's sysctls are applied after its network is set up, and override those of the plugin.
pub async fn pod_sysctls_override_plugin_settings(node: &TestNode) {
    let log = install_fake_plugin(node, "");
    let want = |config: &mut PodSandboxConfig, sysctls: &[(&str, &str)]| {
        let sysctls = sysctls.iter().map(|(name, value)| ((*name).to_owned(), (*value).to_owned()));
        config.linux.as_mut().unwrap().sysctls = sysctls.collect();
    };
    let pod_config = |name: &str, sysctls: &[(&str, &str)]| {
        let mut config = node.pod_config(name);
        want(&mut config, sysctls);
        config
    };
    let plain = node.pod_with(pod_config("plain", &[])).await;
    let own = [("net.core.somaxconn", "444"), ("net.ipv4.conf.eth0.arp_announce", "2")];
    let own = node.pod_with(pod_config("own", &own)).await;
    let users = [("net.ipv4.conf.eth0.arp_announce", "1"), ("kernel.shm_rmid_forced", "1")];
    let users = crate::users::pod(node, "users", |config| want(config, &users)).await;
    for (pod, expected) in [(plain, "333\n0\n"), (own, "444\n2\n"), (users, "333\n1\n")] {
        let id = pod.start(&script("sleep 1000")).await;
        let look = "cd /proc/sys/net && cat core/somaxconn ipv4/conf/eth0/arp_announce";
        assert_eq!(pod.exec(&id, look).await.1, expected);
    }
    let error =
        node.runtime.run_sandbox(&pod_config("bad", &[("kernel.core_pattern", "|/bin/sh")]), "").await;
    let error = error.unwrap_err().message();
    assert!(error.contains("\"kernel.core_pattern\" is not in a separate kernel namespace"), "{error}");
    let log = std::fs::read_to_string(log).unwrap();
    assert!(log.lines().last().unwrap().starts_with("DEL "), "{log}");
}

/// Nothing is left of the network of a pod whose creation fails.
pub async fn failed_pod_leaves_no_network(node: &TestNode) {
    // From then on the pod's record cannot be written.
    let log = install_fake_plugin(node, r#"mkdir "$here/../runtime/pods/$CNI_CONTAINERID/record.new""#);
    let error = node.runtime.run_sandbox(&node.pod_config("lost"), "").await.unwrap_err().message();
    assert!(error.contains("cannot write the pod record"), "{error}");
    let log = std::fs::read_to_string(log).unwrap();
    let calls: Vec<_> = log.lines().filter_map(|line| line.split_once(' ')).collect();
    assert!(matches!(calls[..], [("ADD", one), ("DEL", other)] if one == other), "{calls:?}");
}

pub async fn pod_has_ipv4_and_ipv6(node: &TestNode) {
    node.runtime.set_pod_cidr("10.88.0.0/24,fd88::/120").await.unwrap();
    let (one, two) = (node.pod("one").await, node.pod("two").await);
    let ips = async |pod: &str| {
        let network = node.runtime.sandbox_status(pod).await.unwrap().network.unwrap();
        (network.ip, network.additional_ips[0].ip.clone())
    };
    let (first, second) = (ips(&one.id).await, ips(&two.id).await);
    assert!(first.0.starts_with("10.88.0.") && first.1.starts_with("fd88::"), "{first:?}");
    assert!(first.0 != second.0 && first.1 != second.1);
    let id = one.start(&script("sleep 1000")).await;
    two.start(&script("while true; do echo hello | nc -l -p 8080; done")).await;
    for ip in [second.0, second.1, "10.88.0.1".to_owned(), "fd88::1".to_owned()] {
        let look = match ip.ends_with(".1") || ip.ends_with("::1") {
            // This node itself, by the address that pods use.
            true => format!("ping -c 1 {ip}"),
            false => format!("until nc {ip} 8080 </dev/null 2>/dev/null | grep hello; do :; done"),
        };
        let (code, said, complaints) = one.exec(&id, &look).await;
        assert_eq!(code, 0, "{ip}: {said}{complaints}");
    }
}

pub async fn deleted_links_and_routes_are_created_again(node: &TestNode) {
    node.runtime.set_pod_cidr("10.89.0.0/24,fd89::/120").await.unwrap();
    let (one, two) = (node.pod("one").await, node.pod("two").await);
    let network = node.runtime.sandbox_status(&two.id).await.unwrap().network.unwrap();
    let ips = [network.ip, network.additional_ips[0].ip.clone()];
    let id = one.start(&script("sleep 1000")).await;
    two.start(&script("while true; do echo hello | nc -l -p 8080; done")).await;
    let link = format!("skp{}", &two.id[..12]);
    let failures = [
        format!("ip link del {link}"),
        format!("ip link set {link} down"),
        format!("ip route del {}/32", ips[0]),
        format!("ip -6 route del {}/128", ips[1]),
        "ip link del skiff0".to_owned(),
    ];
    for damage in failures {
        let done = std::process::Command::new("sh").args(["-c", &damage]).status().expect("sh");
        assert!(done.success(), "{damage}");
        for ip in &ips {
            let look =
                format!("until timeout 1 nc {ip} 8080 </dev/null 2>/dev/null | grep hello; do :; done");
            let (code, said, complaints) = one.exec(&id, &look).await;
            assert_eq!(code, 0, "{damage}: {ip}: {said}{complaints}");
        }
    }
    let started = std::time::Instant::now();
    while !podnet::links("skiff0").unwrap().iter().any(|link| link == "skiff0") {
        assert!(started.elapsed() < std::time::Duration::from_secs(10), "the bridge is not created again");
        tokio::time::sleep(std::time::Duration::from_millis(5)).await;
    }
}

pub async fn limits_pod_bandwidth(node: &TestNode) {
    let mut config = node.pod_config("slow");
    for (name, rate) in [("ingress", "8M"), ("egress", "16M")] {
        config.annotations.insert(format!("kubernetes.io/{name}-bandwidth"), rate.into());
    }
    let pod = node.pod_with(config.clone()).await;
    let link = format!("skp{}", &pod.id[..12]);
    let tc = |arguments: &[&str]| {
        let output = std::process::Command::new("tc").args(arguments).output().expect("tc");
        String::from_utf8_lossy(&output.stdout).into_owned()
    };
    let qdisc = tc(&["qdisc", "show", "dev", &link]);
    assert!(qdisc.contains("tbf") && qdisc.contains("rate 8Mbit"), "{qdisc}");
    // Receiving two megabytes at one per second takes time.
    let id = pod.start(&script("nc -l -p 9000 >/dev/null; echo got it; sleep 1000")).await;
    let ip = node.runtime.sandbox_status(&pod.id).await.unwrap().network.unwrap().ip;
    let (_, _, _) = pod.exec(&id, "until grep -q ':2328 ' /proc/net/tcp /proc/net/tcp6; do :; done").await;
    let started = std::time::Instant::now();
    {
        use std::io::Write as _;
        let mut stream = std::net::TcpStream::connect((ip.as_str(), 9000)).unwrap();
        stream.write_all(&vec![0; 2_000_000]).unwrap();
    }
    while !pod.log_output("main.log").contains("got it") {
        tokio::time::sleep(std::time::Duration::from_millis(5)).await;
    }
    assert!(started.elapsed() > std::time::Duration::from_secs(1), "{:?}", started.elapsed());
    config.metadata.as_mut().unwrap().attempt += 1;
    config.annotations.insert("kubernetes.io/ingress-bandwidth".into(), "1".into());
    let error = node.runtime.run_sandbox(&config, "").await.unwrap_err().message();
    assert!(error.contains("resource is unreasonably small (< 1kbit)"), "{error}");
}
