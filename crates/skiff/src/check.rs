//! `skiff check`: what this host has of what a node needs, and how to get the rest.

use std::net::{Ipv4Addr, TcpListener};
use std::path::Path;

use crate::containerd::{self, NETWORK_PROGRAMS, find_program};

/// What a look at one thing has found.
enum Found {
    Good(String),
    /// Things work, but not all of them.
    Lacking(String, &'static str),
    /// No pod can run.
    Missing(String, &'static str),
}

use Found::{Good, Lacking, Missing};

/// What is looked at, and how.
type Check = (&'static str, fn() -> Found);

const CHECKS: &[Check] = &[
    ("user", user),
    ("container runtime", runtime),
    ("runc", runc),
    ("network programs", network_programs),
    ("packet filter", packet_filter),
    ("cgroups", cgroups),
    ("CAP_SYS_RESOURCE", capability),
    ("mounts", mounts),
    ("forwarding", forwarding),
    ("ports", ports),
];

/// Prints every check; fails where no pod could run.
pub fn run() -> anyhow::Result<()> {
    let mut missing = 0;
    for (name, look) in CHECKS {
        match look() {
            Good(what) => println!("ok       {name}: {what}"),
            Lacking(what, fix) => println!("lacking  {name}: {what}\n         {fix}"),
            Missing(what, fix) => {
                missing += 1;
                println!("missing  {name}: {what}\n         {fix}");
            }
        }
    }
    anyhow::ensure!(missing == 0, "pods cannot run on this host: {missing} of its parts are missing");
    Ok(())
}

fn user() -> Found {
    match rustix::process::geteuid().is_root() {
        true => Good("root".to_owned()),
        false => {
            Missing("not root".to_owned(), "run as root, or say --disable-agent for a control plane alone")
        }
    }
}

/// What only a runtime other than the one that is built in needs.
const NOT_NEEDED: &str = "none, which the runtime that is built in does not need";

fn runtime() -> Found {
    match (containerd::is_running(), find_program("containerd")) {
        (true, _) => Good("built in; the host's containerd answers too".to_owned()),
        (_, Some(path)) => Good(format!("built in; there is {} too", path.display())),
        _ => Good("built in".to_owned()),
    }
}

fn runc() -> Found {
    Good(find_program("runc").map_or_else(|| NOT_NEEDED.to_owned(), |path| path.display().to_string()))
}

fn network_programs() -> Found {
    let fix = "install CNI's programs (Debian: apt-get install containernetworking-plugins)";
    let needed = ["ptp", "host-local", "loopback"];
    let dir = NETWORK_PROGRAMS.into_iter().find(|dir| Path::new(dir).join("loopback").exists());
    let Some(dir) = dir else { return Good(NOT_NEEDED.to_owned()) };
    let left: Vec<&str> = needed.into_iter().filter(|name| !Path::new(dir).join(name).exists()).collect();
    match left.is_empty() {
        true => Good(dir.to_owned()),
        false => Lacking(format!("{dir} has no {}", left.join(", ")), fix),
    }
}

fn packet_filter() -> Found {
    let none =
        || "no iptables, which is needed only with another runtime and --disable-kube-proxy".to_owned();
    Good(find_program("iptables").map_or_else(none, |path| path.display().to_string()))
}

fn cgroups() -> Found {
    let fix = "start the kernel with cgroup_enable=memory";
    if let Ok(text) = std::fs::read_to_string("/sys/fs/cgroup/cgroup.controllers") {
        return judge("v2", &text.split_whitespace().collect::<Vec<_>>(), fix);
    }
    let present = ["cpu", "memory", "pids"].into_iter();
    let present: Vec<&str> = present.filter(|name| Path::new("/sys/fs/cgroup").join(name).exists()).collect();
    judge("v1", &present, fix)
}

fn judge(version: &str, present: &[&str], fix: &'static str) -> Found {
    let left: Vec<&str> =
        ["cpu", "memory", "pids"].into_iter().filter(|name| !present.contains(name)).collect();
    match left.is_empty() {
        true => Good(version.to_owned()),
        false => Lacking(format!("{version} without {}: limits of these are not kept", left.join(", ")), fix),
    }
}

fn capability() -> Found {
    match containerd::has_capability(containerd::SYS_RESOURCE) {
        true => Good("held".to_owned()),
        false => Lacking(
            "not held: important pods cannot be protected when memory runs out".to_owned(),
            "start the server with it, or set restrict_oom_score_adj = true in the host's containerd",
        ),
    }
}

fn mounts() -> Found {
    let table = std::fs::read_to_string("/proc/self/mountinfo").unwrap_or_default();
    match is_shared(&table) {
        true => Good("/ is shared".to_owned()),
        false => Lacking(
            "/ is private: mounts made in pods do not reach others (mountPropagation)".to_owned(),
            "mount --make-rshared /",
        ),
    }
}

/// Whether the last mount at `/` passes mounts on.
fn is_shared(table: &str) -> bool {
    let root = table.lines().rfind(|line| line.split(' ').nth(4) == Some("/"));
    root.is_some_and(|line| line.split(" - ").next().is_some_and(|fields| fields.contains(" shared:")))
}

fn forwarding() -> Found {
    let on = std::fs::read_to_string("/proc/sys/net/ipv4/ip_forward").is_ok_and(|text| text.trim() == "1");
    match on {
        true => Good("on".to_owned()),
        false => Good("off, turned on with the first pod".to_owned()),
    }
}

fn ports() -> Found {
    let taken: Vec<String> = [6443, 10250]
        .into_iter()
        .filter(|port| TcpListener::bind((Ipv4Addr::UNSPECIFIED, *port)).is_err())
        .map(|port| port.to_string())
        .collect();
    match taken.is_empty() {
        true => Good("6443 and 10250 are free".to_owned()),
        false => Lacking(
            format!("somebody listens on {}", taken.join(" and ")),
            "if it is not this server, choose others: --https-listen-port, --kubelet-port",
        ),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_last_mount_counts() {
        let private = "1 0 8:1 / / rw - ext4 /dev/sda rw\n2 1 0:5 / /proc rw shared:2 - proc proc rw\n";
        assert!(!is_shared(private));
        assert!(is_shared(&format!("{private}3 1 8:1 / / rw shared:1 - ext4 /dev/sda rw\n")));
        assert!(!is_shared(""));
    }

    #[test]
    fn what_is_missing_is_named() {
        let Lacking(what, _) = judge("v2", &["cpu", "pids"], "") else { panic!("memory is missing") };
        assert_eq!(what, "v2 without memory: limits of these are not kept");
        assert!(matches!(judge("v1", &["cpu", "memory", "pids"], ""), Good(_)));
    }
}
