use super::limits::weight;
use super::*;

#[track_caller]
fn check(mounts: &str, expected: &[&str]) {
    let groups = Cgroups::parse(mounts.lines().map(str::to_owned)).unwrap();
    let found: Vec<_> =
        groups.directories("/skiff/pod1").iter().map(|path| path.display().to_string()).collect();
    assert_eq!(found, expected);
}

#[test]
fn detects_v1_and_v2_hierarchies() {
    check("cgroup2 /sys/fs/cgroup cgroup2 rw,nosuid 0 0\n", &["/sys/fs/cgroup/skiff/pod1"]);
    let hybrid = "cgroup /c/cpu,cpuacct cgroup rw,cpu,cpuacct 0 0\ncgroup /c/memory cgroup rw,memory 0 0\n\
        cgroup /c/systemd cgroup rw,name=systemd 0 0\ncgroup2 /c/unified cgroup2 rw 0 0\n";
    check(hybrid, &["/c/cpu,cpuacct/skiff/pod1", "/c/memory/skiff/pod1"]);
    assert!(Cgroups::parse(["tmpfs /tmp tmpfs rw 0 0".to_owned()].into_iter()).is_err());
}

#[test]
fn maps_cpu_shares_to_weight() {
    assert_eq!([0, 2, 1024, 262_144].map(weight), [1, 1, 100, 10_000]);
    assert!((3..262_144).step_by(997).all(|shares| weight(shares) <= weight(shares + 997)));
}

#[test]
fn applies_limits_to_a_cgroup() {
    let Ok(groups) = Cgroups::of_host() else { return };
    let group = format!("/skiff-test-{}/inner", std::process::id());
    if groups.create(&group).is_err() {
        eprintln!("skipped: needs root and control groups that can be written");
        return;
    }
    let limits = Limits { memory: 64 << 20, cpu_shares: 512, pids: 50, ..Limits::default() };
    let limited = groups.limit(&group, &limits);
    let usage = groups.usage(&group);
    let devices = groups.allow_devices(&group, &["c 1:3 rwm".parse().unwrap()]);
    let empty = groups.processes(&group).map(|found| found.is_empty());
    groups.remove(group.trim_end_matches("/inner")).unwrap();
    limited.unwrap();
    devices.unwrap();
    assert_eq!(usage.memory_limit, Some(64 << 20));
    assert!(empty.unwrap());
    assert!(groups.directories(&group).iter().all(|path| !path.exists()));
}
