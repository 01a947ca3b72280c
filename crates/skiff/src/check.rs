//! `skiff check`: checks whether this host has what a node needs, and prints how to fix what is
//! missing.

use std::net::{Ipv4Addr, TcpListener};
use std::path::Path;

use crate::containerd::{self, CNI_BIN_DIRS, find_program};

/// Result of one check.
enum CheckResult {
    Passed(String),
    /// Pods run, with restrictions. The second field is the fix.
    Warning(String, &'static str),
    /// Pods cannot run. The second field is the fix.
    Failed(String, &'static str),
}

use CheckResult::{Failed, Passed, Warning};

/// The default of `--cluster-cidr`.
const DEFAULT_CLUSTER_CIDR: &str = "10.42.0.0/16";

/// Name and function of a check.
type Check = (&'static str, fn() -> CheckResult);

const CHECKS: &[Check] = &[
    ("user", user),
    ("container runtime", runtime),
    ("runc", runc),
    ("CNI plugins", cni_plugins),
    ("iptables", iptables),
    ("cgroups", cgroups),
    ("CAP_SYS_RESOURCE", capability),
    ("mounts", mounts),
    ("forwarding", forwarding),
    ("host firewall", host_firewall),
    ("ports", ports),
];

/// Prints the result of every check. Returns an error if pods cannot run.
pub fn run() -> anyhow::Result<()> {
    let mut failures = 0;
    for (name, check) in CHECKS {
        match check() {
            Passed(message) => println!("ok       {name}: {message}"),
            Warning(message, fix) => println!("warning  {name}: {message}\n         {fix}"),
            Failed(message, fix) => {
                failures += 1;
                println!("failed   {name}: {message}\n         {fix}");
            }
        }
    }
    anyhow::ensure!(failures == 0, "pods cannot run on this host: {failures} checks failed");
    Ok(())
}

fn user() -> CheckResult {
    match rustix::process::geteuid().is_root() {
        true => Passed("root".to_owned()),
        false => Failed(
            "not root".to_owned(),
            "run as root, or use --disable-agent for a control plane without a node",
        ),
    }
}

/// Result for programs that only a runtime other than the embedded one uses.
const NOT_REQUIRED: &str = "not found; the embedded runtime does not need it";

fn runtime() -> CheckResult {
    match (containerd::is_running(), find_program("containerd")) {
        (true, _) => Passed("embedded; the host's containerd is running as well".to_owned()),
        (_, Some(path)) => Passed(format!("embedded; {} is installed as well", path.display())),
        _ => Passed("embedded".to_owned()),
    }
}

fn runc() -> CheckResult {
    Passed(find_program("runc").map_or_else(|| NOT_REQUIRED.to_owned(), |path| path.display().to_string()))
}

fn cni_plugins() -> CheckResult {
    let fix = "install the CNI plugins (Debian: apt-get install containernetworking-plugins)";
    let required = ["ptp", "host-local", "loopback"];
    let dir = CNI_BIN_DIRS.into_iter().find(|dir| Path::new(dir).join("loopback").exists());
    let Some(dir) = dir else { return Passed(NOT_REQUIRED.to_owned()) };
    let missing: Vec<&str> =
        required.into_iter().filter(|name| !Path::new(dir).join(name).exists()).collect();
    match missing.is_empty() {
        true => Passed(dir.to_owned()),
        false => Warning(format!("{dir} has no {}", missing.join(", ")), fix),
    }
}

fn iptables() -> CheckResult {
    let none = || "not found; needed only with another runtime and --disable-kube-proxy".to_owned();
    Passed(find_program("iptables").map_or_else(none, |path| path.display().to_string()))
}

fn cgroups() -> CheckResult {
    let fix = "start the kernel with cgroup_enable=memory";
    if let Ok(text) = std::fs::read_to_string("/sys/fs/cgroup/cgroup.controllers") {
        return check_controllers("v2", &text.split_whitespace().collect::<Vec<_>>(), fix);
    }
    let present = ["cpu", "memory", "pids"].into_iter();
    let present: Vec<&str> = present.filter(|name| Path::new("/sys/fs/cgroup").join(name).exists()).collect();
    check_controllers("v1", &present, fix)
}

fn check_controllers(version: &str, present: &[&str], fix: &'static str) -> CheckResult {
    let missing: Vec<&str> =
        ["cpu", "memory", "pids"].into_iter().filter(|name| !present.contains(name)).collect();
    match missing.is_empty() {
        true => Passed(version.to_owned()),
        false => {
            Warning(format!("{version} without {}: these limits are not enforced", missing.join(", ")), fix)
        }
    }
}

fn capability() -> CheckResult {
    match containerd::has_capability(containerd::CAP_SYS_RESOURCE) {
        true => Passed("present".to_owned()),
        false => Warning(
            "missing: important pods cannot be protected from the OOM killer".to_owned(),
            "start the server with it, or set restrict_oom_score_adj = true in the host's containerd",
        ),
    }
}

fn mounts() -> CheckResult {
    let table = std::fs::read_to_string("/proc/self/mountinfo").unwrap_or_default();
    match is_shared(&table) {
        true => Passed("/ is shared".to_owned()),
        false => Warning(
            "/ is private: mounts created in pods do not propagate (mountPropagation)".to_owned(),
            "mount --make-rshared /",
        ),
    }
}

/// Whether `/` has shared propagation. The last mount at `/` in the table is the one in effect.
fn is_shared(table: &str) -> bool {
    let root = table.lines().rfind(|line| line.split(' ').nth(4) == Some("/"));
    root.is_some_and(|line| line.split(" - ").next().is_some_and(|fields| fields.contains(" shared:")))
}

fn forwarding() -> CheckResult {
    let on = std::fs::read_to_string("/proc/sys/net/ipv4/ip_forward").is_ok_and(|text| text.trim() == "1");
    match on {
        true => Passed("on".to_owned()),
        false => Passed("off; enabled with the first pod".to_owned()),
    }
}

/// Checks whether the firewall rules of other programs drop packets of pods. Assumes the default
/// `--cluster-cidr`.
fn host_firewall() -> CheckResult {
    let pods: Vec<nft::IpNet> = DEFAULT_CLUSTER_CIDR.parse().into_iter().collect();
    match proxy::host_firewall::inspect(&pods) {
        Ok(found) => {
            firewall_result(&found.blocking_rules, found.missing_accept().map(ToString::to_string).collect())
        }
        Err(error) => Warning(format!("cannot list firewall rules: {error}"), "run as root"),
    }
}

fn firewall_result(obstacles: &[String], lacking: Vec<String>) -> CheckResult {
    const FIX: &str =
        "accept packets from and to the pod networks there (--cluster-cidr, default 10.42.0.0/16)";
    match (obstacles.is_empty(), lacking.is_empty()) {
        (false, _) => Warning(obstacles.join("; "), FIX),
        (true, false) => {
            Passed(format!("the server adds rules that accept packets of pods ({})", lacking.join("; ")))
        }
        (true, true) => Passed("lets packets of pods through".to_owned()),
    }
}

fn ports() -> CheckResult {
    let in_use: Vec<String> = [6443, 10250]
        .into_iter()
        .filter(|port| TcpListener::bind((Ipv4Addr::UNSPECIFIED, *port)).is_err())
        .map(|port| port.to_string())
        .collect();
    match in_use.is_empty() {
        true => Passed("6443 and 10250 are free".to_owned()),
        false => Warning(
            format!("already in use: {}", in_use.join(" and ")),
            "if it is not this server, choose other ports with --https-listen-port and --kubelet-port",
        ),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn last_root_mount_sets_propagation() {
        let private = "1 0 8:1 / / rw - ext4 /dev/sda rw\n2 1 0:5 / /proc rw shared:2 - proc proc rw\n";
        assert!(!is_shared(private));
        assert!(is_shared(&format!("{private}3 1 8:1 / / rw shared:1 - ext4 /dev/sda rw\n")));
        assert!(!is_shared(""));
    }

    #[test]
    fn reports_chains_that_drop_pod_packets() {
        let Warning(message, _) = firewall_result(&["table inet x".to_owned()], Vec::new()) else {
            panic!("must be a warning")
        };
        assert_eq!(message, "table inet x");
        let Passed(message) = firewall_result(&[], vec!["table ip filter, chain FORWARD".to_owned()]) else {
            panic!("must pass")
        };
        assert_eq!(
            message,
            "the server adds rules that accept packets of pods (table ip filter, chain FORWARD)"
        );
        assert!(matches!(firewall_result(&[], Vec::new()), Passed(_)));
    }

    #[test]
    fn reports_missing_controllers() {
        let Warning(message, _) = check_controllers("v2", &["cpu", "pids"], "") else {
            panic!("must be a warning")
        };
        assert_eq!(message, "v2 without memory: these limits are not enforced");
        assert!(matches!(check_controllers("v1", &["cpu", "memory", "pids"], ""), Passed(_)));
    }
}
